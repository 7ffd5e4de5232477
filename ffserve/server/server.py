"""Server: the listening socket, the clients' connections, the event loop.

Connections are plain non-blocking sockets watched by the loop instead of asyncio transports,
because descriptors travel beside the bytes (SCM_RIGHTS), which transports cannot do. Frames are
small (payload goes through the arena), so one recv usually brings one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from ffserve import protocol
from ffserve.engine.io import ATOMIC_SEND_SIZE, DirectReply, ReplySocket
from ffserve.errors import FFServeError, ProtocolError, ServerUnavailable
from ffserve.protocol import Message
from ffserve.server.access import Namespaces, Owner
from ffserve.server.catalog import PassedFile, Request, close_fds, run_in_thread
from ffserve.server.inline import MemoryFrame, MemoryMessage, Outbox, widen_send_buffer
from ffserve.server.session import NEW, OVER, Session
from ffserve.server.state import ServerState

log = logging.getLogger("ffserve")

HELLO_TIMEOUT_S = 10.0
MOST_UNSENT = 64 * 1024 * 1024
"""Bytes that wait for a client that does not read; beyond, the client is disconnected."""
WRITES_AT_ONCE = 4
"""Frames and runs of one connection before others have their turn."""
ALIVE_INTERVAL_S = 2.5
"""How often a client that waits gets a sign of life; it gives up after four times as long."""
RESIZE_STEP_S = 0.01
"""Between two steps of a resize."""
ACCEPT_PAUSE_S = 0.2
"""After accept() has failed, for example without a free descriptor."""
FILES_TIMEOUT_S = 30.0
"""From NEED to FILES."""
TEND_INTERVAL_S = 1.0
"""How often idle shards are looked at."""
OPENINGS, LANE_TIMEOUT_S = 4, 60.0
"""OPENs of one user that are carried out at once; how long another waits for its turn."""
_CHUNK = 80 * 1024
"""Bytes received at once: a piece of an order, or hundreds of requests."""


class ClientConnection:
    """One client's socket."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._decoder = protocol.Decoder(protocol.FROM_CLIENT)
        self._outbox = Outbox(self._write)
        self._watched = self._busy = False
        """Whether the loop watches for room in the socket; whether `_writable` runs."""
        self._closed = False
        self._reply_socket = ReplySocket(self._fd)
        self.session = Session(
            server.state,
            server.namespaces.peer(sock),
            self._send,
            self._open_dataset,
            self._outbox,
            self._direct_reply,
        )
        self._opening = asyncio.Lock()
        """Held by the OPEN that is carried out; others of this client wait."""
        self._loop.add_reader(self._fd, self._readable)
        self._hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, self._no_hello)

    def _no_hello(self) -> None:
        if self.session.phase == NEW:
            self._refuse(ProtocolError(f"no HELLO message within {HELLO_TIMEOUT_S:g} s"))

    def _readable(self) -> None:
        try:
            chunk = self._receive() if self.session.needs_files else self._sock.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        if self.session.awaits_direct_reply:
            # The client may have the reply already, and this may acknowledge it.
            self._server.state.engines.reap()
        try:
            if len(self.session.received) > protocol.MOST_FILES:
                raise ProtocolError(f"more than {protocol.MOST_FILES} descriptors for one FILES")
            for message in self._decoder.feed(chunk):
                self.session.receive(message, time.monotonic())
                if self.session.phase == OVER or self._closed:
                    self.close()
                    return
        except FFServeError as error:
            self._refuse(error)
            return
        self._server.arm()
        if self.session.receiving_order:
            self._loop.remove_reader(self._fd)
            self._server.read_later(self)

    def show_life(self) -> None:
        """Tell a client that waits that the daemon works, unless more is on its way to it."""
        if self.session.owes_answer and not self._outbox:
            self._send(protocol.Alive())

    def _receive(self) -> bytes:
        """Receive bytes and the descriptors that come with them."""
        chunk, fds, flags, _address = socket.recv_fds(
            self._sock, _CHUNK, protocol.MOST_FILES, socket.MSG_CMSG_CLOEXEC
        )
        self.session.received += fds
        if flags & socket.MSG_CTRUNC:
            self.session.received_too_many = True
        return chunk

    def _open_dataset(self, tag: int, request: Request) -> None:
        """Open a data set beside the loop and tell the session."""

        async def passing(positions: list[int]) -> list[PassedFile]:
            answered: asyncio.Future[list[PassedFile] | FFServeError] = self._loop.create_future()

            def take(answer: list[PassedFile] | FFServeError) -> None:
                if not answered.done():
                    answered.set_result(answer)

            self.session.need(tag, positions, take)
            late = ServerUnavailable(
                f"the client passed no descriptors for {FILES_TIMEOUT_S:g} s",
                hint="it was stopped, or its file system does not answer; try again",
            )
            timer = self._loop.call_later(FILES_TIMEOUT_S, self.session.refuse_files, late)
            try:
                answer = await answered
            except asyncio.CancelledError:
                self.session.refuse_files(late)
                raise
            finally:
                timer.cancel()
                self._drop_received()
            if isinstance(answer, FFServeError):
                raise answer.located(path=request.paths[positions[0]])
            return answer

        async def opening() -> None:
            catalog, peer = self._server.state.catalog, self.session.peer
            try:
                async with self._opening, self._server.lane(peer.owner):
                    shards = await catalog.open(request, peer, passing)
            except FFServeError as error:
                self.session.failed(tag, error)
            except Exception as error:
                log.exception("internal error while opening a data set")
                failure = FFServeError(f"internal error of the daemon: {error!r}")
                self.session.failed(tag, failure)
            else:
                self.session.opened(tag, request.paths, shards)

        self._server.begin(opening())

    def _drop_received(self) -> None:
        """Close descriptors that nobody took, in a thread, since their file system may hang."""
        fds, self.session.received = self.session.received, []
        self.session.received_too_many = False
        if fds:
            run_in_thread(lambda: close_fds(fds))

    def read_on(self) -> None:
        """Watch for messages again."""
        if not self._closed:
            self._loop.add_reader(self._fd, self._readable)

    def _direct_reply(self, ready: protocol.Ready) -> DirectReply:
        return DirectReply(self._reply_socket, protocol.encode(ready))

    def _send(self, message: Message | MemoryMessage) -> None:
        if self._closed:
            return
        frame: bytes | MemoryFrame
        if isinstance(message, MemoryMessage):
            frame = MemoryFrame(protocol.encode(message.message), message.files)
        else:
            frame = protocol.encode(message)
        if isinstance(message, protocol.Welcome):
            widen_send_buffer(self._sock)
        if len(frame) > ATOMIC_SEND_SIZE or isinstance(frame, MemoryFrame):
            self._reply_socket.block(True)
        self._outbox.put(frame)
        if self._outbox.frames_size > MOST_UNSENT:
            log.warning("disconnected a client (pid %d) that does not read", self.session.peer.pid)
            self._loop.call_soon(self.close)

    def _write(self) -> None:
        """Send now, unless the socket is full: then the loop calls `_writable`."""
        if not self._watched and not self._busy:
            self._writable()

    def _writable(self) -> None:
        self._busy = True
        sending = self.session.sending_count
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
        if bool(self._outbox) != self._watched:
            self._watched = not self._watched
            if self._watched:
                self._loop.add_writer(self._fd, self._writable)
            else:
                self._loop.remove_writer(self._fd)
        if self.session.sending_count < sending:
            self._loop.call_soon(self._server.pump)

    def _refuse(self, error: FFServeError) -> None:
        """End the session with an error."""
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
        self._drop_received()
        self._server.arm()


class Server:
    """Accepts clients and keeps their connections.

    Args: listener: a listening Unix stream socket; closed by `drain`.
    """

    def __init__(self, state: ServerState, listener: socket.socket) -> None:
        self.state = state
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._connections: set[ClientConnection] = set()
        self._openings: set[asyncio.Task[None]] = set()
        self.namespaces = Namespaces()
        self._lanes: weakref.WeakValueDictionary[Owner, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._resize_timer: asyncio.TimerHandle | None = None
        self._tending = self._loop.create_task(self._tend())
        self._draining = False
        self._used_at = time.monotonic()
        self._later: deque[ClientConnection] = deque()
        """Connections to be read again, in this order."""
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)
        state.engines.attach(self._loop)
        self._alive_timer = self._loop.call_later(ALIVE_INTERVAL_S, self._show_life)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                log.warning("cannot accept a client, trying again: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            if len(self._connections) >= self.state.config.max_sessions:
                self._refuse(sock)
                continue
            try:
                self._connections.add(ClientConnection(self, sock))
            except OSError:
                sock.close()

    def _resume(self) -> None:
        if not self._draining:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _refuse(self, sock: socket.socket) -> None:
        error = ServerUnavailable(
            f"the daemon already serves {self.state.config.max_sessions} sessions",
            hint="raise --max-sessions, or close readers",
        )
        with contextlib.suppress(OSError):
            sock.send(protocol.encode(protocol.Fail(0, protocol.error_to_wire(error))))
        sock.close()

    def forget(self, connection: ClientConnection) -> None:
        """A connection has closed itself."""
        self._connections.discard(connection)
        namespace = connection.session.peer.namespace
        if self.namespaces.release(namespace):
            self.state.catalog.end_namespace(namespace)
        if connection.session.joined:
            self._used_at = time.monotonic()

    def read_later(self, connection: ClientConnection) -> None:
        """Read a connection again after those that wait for the same.

        Sessions that announce an order do: each piece keeps the loop for most of a millisecond, and
        a request should wait for one piece, not for one of every job that announces.
        """
        if not self._later:
            self._loop.call_soon(self._read_next)
        self._later.append(connection)

    def _read_next(self) -> None:
        self._later.popleft().read_on()
        if self._later:
            self._loop.call_soon(self._read_next)

    def _show_life(self) -> None:
        for connection in list(self._connections):
            connection.show_life()
        self._alive_timer = self._loop.call_later(ALIVE_INTERVAL_S, self._show_life)

    def begin(self, opening: Coroutine[Any, Any, None]) -> None:
        """Carry out an OPEN beside the loop."""
        task = self._loop.create_task(opening)
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)

    @contextlib.asynccontextmanager
    async def lane(self, owner: Owner) -> AsyncIterator[None]:
        """Wait until a client may open a data set: its user's files may be on a file system that
        does not answer, which must cost neither others nor ever more threads and descriptors."""
        lane = self._lanes.setdefault(owner, asyncio.Semaphore(OPENINGS))
        try:
            await asyncio.wait_for(lane.acquire(), LANE_TIMEOUT_S)
        except TimeoutError:
            raise ServerUnavailable(
                f"{OPENINGS} earlier requests of this user to open files have not ended for "
                f"{LANE_TIMEOUT_S:g} s",
                hint="does a file system not answer? try again later",
            ) from None
        try:
            yield
        finally:
            lane.release()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_INTERVAL_S)
            try:
                await self.state.catalog.tend(time.monotonic())
            except Exception:
                log.exception("internal error while closing files")

    def arm(self) -> None:
        """Set the timers for blocked requests and for a resize."""
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
        """Give turns: memory may be free now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.state.scheduler.pump(time.monotonic())
        self.arm()

    @property
    def idle_s(self) -> float:
        """Seconds since the last client that opened files went; 0: there is one."""
        if any(connection.session.joined for connection in self._connections):
            return 0.0
        return time.monotonic() - self._used_at

    @property
    def connection_count(self) -> int:
        """Clients connected now."""
        return len(self._connections)

    async def drain(self, timeout_s: float) -> bool:
        """Accept no new clients, answer the requests under way, then close all sessions.

        Returns: whether everything was answered in time.
        """
        self._draining = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        deadline = time.monotonic() + timeout_s
        while not self.state.scheduler.idle and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        drained = self.state.scheduler.idle
        for task in (*self._openings, self._tending):
            task.cancel()
        self.state.scheduler.stop()
        for connection in list(self._connections):
            connection.close()
        for timer in (self._timer, self._resize_timer, self._alive_timer):
            if timer is not None:
                timer.cancel()
        return drained
