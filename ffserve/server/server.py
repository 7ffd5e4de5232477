"""Sockets and the event loop: bytes in, messages to sessions, bytes out.

Connections are plain non-blocking sockets watched by the loop rather than asyncio transports,
because descriptors travel beside the bytes (SCM_RIGHTS), which transports cannot do. Frames are
small (payload goes through the arena), so one recv usually brings one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque

from ffserve import protocol
from ffserve.engine.io import ATOMIC_SEND_SIZE, DirectReply, ReplySocket
from ffserve.errors import FFServeError, ProtocolError, ServerUnavailable
from ffserve.protocol import Message
from ffserve.server.access import Peer
from ffserve.server.inline import Outbox, widen_send_buffer
from ffserve.server.session import NEW, OVER, Session
from ffserve.server.state import ServerState

log = logging.getLogger("ffserve")

HELLO_TIMEOUT_S = 10.0
MOST_UNSENT = 64 * 1024 * 1024
"""Bytes that wait for a client that does not read; beyond, it is cut off."""
WRITES_AT_ONCE = 4
"""Frames and runs before others have their turn; each is sent as far as it fits into the socket."""
RESIZE_STEP_S = 0.01
"""Between two looks at what keeps the arena from shrinking."""
_CHUNK = 80 * 1024
"""What is taken in at once: a piece of an order, or hundreds of requests."""


class Connection:
    """One client's socket."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._decoder = protocol.Decoder(protocol.FROM_CLIENT)
        self._outbox = Outbox(self._write)
        self._writing = self._busy = False
        self._closed = False
        self._reply_socket = ReplySocket(self._fd)
        self.session = Session(
            server.state,
            Peer.of(sock),
            self._send,
            server.open_dataset,
            self._outbox,
            self._promise,
        )
        self._loop.add_reader(self._fd, self._readable)
        self._hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, self._no_hello)

    def _no_hello(self) -> None:
        if self.session.phase == NEW:
            self._broken(ProtocolError("the client said nothing"))

    def _readable(self) -> None:
        try:
            chunk = self._sock.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        if self.session.promised:
            # The client may know more than we do: this may be what it says to the answer.
            self._server.state.engines.reap()
        try:
            for message in self._decoder.feed(chunk):
                self.session.receive(message, time.monotonic())
                if self.session.phase == OVER or self._closed:
                    self.close()
                    return
        except FFServeError as error:
            self._broken(error)
            return
        self._server.arm()
        if self.session.announcing:
            self._loop.remove_reader(self._fd)
            self._server.stand_in_line(self)

    def go_on(self) -> None:
        """Read again, after it stood in line."""
        if not self._closed:
            self._loop.add_reader(self._fd, self._readable)

    def _promise(self, ready: protocol.Ready) -> DirectReply:
        return DirectReply(self._reply_socket, protocol.encode(ready))

    def _send(self, message: Message) -> None:
        if self._closed:
            return
        frame = protocol.encode(message)
        if isinstance(message, protocol.Welcome):
            if not self.session.inline:
                self._send_with_memory(frame)
                return
            widen_send_buffer(self._sock)
        if len(frame) > ATOMIC_SEND_SIZE:
            self._reply_socket.block(True)
        self._outbox.put(frame)
        if self._outbox.frames_size > MOST_UNSENT:
            log.warning("cut off a client (pid %d) that does not read", self.session.peer.pid)
            self._loop.call_soon(self.close)

    def _write(self) -> None:
        """Send what there is, unless the socket is full: then the loop calls when it is not."""
        if not self._writing and not self._busy:
            self._writable()

    def _writable(self) -> None:
        self._busy = True
        delivering = self.session.delivering_count
        try:
            left = WRITES_AT_ONCE
            while left and self._outbox.send(self._sock):
                left -= 1
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._outbox.clear()
            self._loop.call_soon(self.close)
        finally:
            self._busy = False
        self._reply_socket.block(self._closed or bool(self._outbox))
        if bool(self._outbox) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._fd, self._writable)
            else:
                self._loop.remove_writer(self._fd)
        if self.session.delivering_count < delivering:
            self._loop.call_soon(self._server.pump)

    def _send_with_memory(self, frame: bytes) -> None:
        state = self._server.state
        memories = (state.memory, state.directory.entries_memory, state.directory.index_memory)
        fds: list[int] = []
        try:
            fds.extend(memory.reader_fd() for memory in memories)
            sent = socket.send_fds(self._sock, [frame], fds)
        except (BrokenPipeError, ConnectionResetError):
            # Who was not answered in time has gone away again.
            self._loop.call_soon(self.close)
            return
        except OSError as error:
            log.warning("cannot hand the shared memory to a client: %s", error)
            self._loop.call_soon(self.close)
            return
        finally:
            for fd in fds:
                os.close(fd)
        assert sent == len(frame), "the first frame of a connection fits into its buffer"

    def _broken(self, error: FFServeError) -> None:
        log.warning("closed a session (pid %d): %s", self.session.peer.pid, error)
        self.session.fail(0, error)
        self.close()

    def close(self) -> None:
        """Give everything back; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._reply_socket.block(True)
        self._hello_timer.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        with contextlib.suppress(OSError):
            self._outbox.send(self._sock)
        self._sock.close()
        self._server.forget(self)
        self.session.leave(time.monotonic())
        self._server.arm()


class Server:
    """Listens and keeps the connections.

    Args: listener: a listening Unix stream socket; closed by `drain`.
    """

    def __init__(self, state: ServerState, listener: socket.socket) -> None:
        self.state = state
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._openings: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._resize_timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._line: deque[Connection] = deque()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)
        state.engines.attach(self._loop)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # Out of descriptors: leave the listener alone for a moment instead of spinning.
                log.warning("cannot take another client: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(0.2, self._resume)
                return
            sock.setblocking(False)
            if len(self._connections) >= self.state.config.max_sessions:
                self._refuse(sock)
                continue
            try:
                self._connections.add(Connection(self, sock))
            except OSError:
                sock.close()

    def _resume(self) -> None:
        if not self._draining:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _refuse(self, sock: socket.socket) -> None:
        error = ServerUnavailable(
            f"the daemon serves {self.state.config.max_sessions} sessions already",
            hint="raise --max-sessions",
        )
        with contextlib.suppress(OSError):
            sock.send(protocol.encode(protocol.Fail(0, protocol.error_to_wire(error))))
        sock.close()

    def forget(self, connection: Connection) -> None:
        """A connection closed itself."""
        self._connections.discard(connection)

    def stand_in_line(self, connection: Connection) -> None:
        """Have a connection read again when those before it in the line have.

        Whoever is announcing an order does so: each piece keeps the loop for the better part of a
        millisecond, and a request that comes meanwhile is to wait for one piece, not for one of
        every job that announces.
        """
        if not self._line:
            self._loop.call_soon(self._next_in_line)
        self._line.append(connection)

    def _next_in_line(self) -> None:
        self._line.popleft().go_on()
        if self._line:
            self._loop.call_soon(self._next_in_line)

    def open_dataset(
        self,
        session: Session,
        tag: int,
        paths: list[str],
        name: str | None,
        verify: bool,
        tolerant: bool,
    ) -> None:
        """Open a data set beside the loop and tell the session."""

        async def opening() -> None:
            try:
                catalog = self.state.catalog
                shards = await catalog.open(paths, name, verify, tolerant, session.peer)
            except FFServeError as error:
                session.failed(tag, error)
            except Exception as error:
                log.exception("opening a data set failed")
                session.failed(tag, FFServeError(f"the daemon failed: {error!r}"))
            else:
                session.opened(tag, paths, shards)

        task = self._loop.create_task(opening())
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)

    def arm(self) -> None:
        """See to it that requests that wait for room are looked at again in time."""
        if self._resize_timer is None and self.state.resizing.under_way:
            self._resize_timer = self._loop.call_later(RESIZE_STEP_S, self._resize)
        now = time.monotonic()
        deadline = self.state.scheduler.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = max(deadline, now + 0.001)
        self._timer = self._loop.call_later(self._timer_at - now, self.pump)

    def _resize(self) -> None:
        self._resize_timer = None
        self.state.resizing.step(time.monotonic())
        self.arm()

    def pump(self) -> None:
        """Give turns: there may be room now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.state.scheduler.pump(time.monotonic())
        self.arm()

    @property
    def connection_count(self) -> int:
        """Clients connected now."""
        return len(self._connections)

    async def drain(self, timeout_s: float) -> bool:
        """Take no new clients, let what is asked for be answered, then close.

        Returns whether everything was answered in time.
        """
        self._draining = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        deadline = time.monotonic() + timeout_s
        while not self.state.scheduler.idle and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        drained = self.state.scheduler.idle
        for task in list(self._openings):
            task.cancel()
        self.state.scheduler.stop()
        for connection in list(self._connections):
            connection.close()
        for timer in (self._timer, self._resize_timer):
            if timer is not None:
                timer.cancel()
        return drained
