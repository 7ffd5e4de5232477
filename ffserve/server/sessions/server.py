"""Server: the listening socket, the clients' connections, the event loop.

Connections are plain non-blocking sockets watched by the loop instead of asyncio transports,
because descriptors travel beside the bytes (SCM_RIGHTS), which transports cannot do. Frames are
small (payload goes through the arena), so one recv usually brings one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ffserve import protocol
from ffserve.config import ServerConfig
from ffserve.disk.files import wrap_os_error
from ffserve.engine.io import ATOMIC_SEND_SIZE, DirectReply, ReplySocket
from ffserve.errors import FFServeError, ProtocolError, ServerUnavailable
from ffserve.limits import (
    MOST_UNREAD,
    NAMESPACE_OPENINGS,
    RESERVED_SESSIONS,
    USER_OPENINGS,
    most_sessions,
)
from ffserve.protocol import Message
from ffserve.server.files.shards import PassedFile, Request
from ffserve.server.prepared.sharing import PrepareRequest
from ffserve.server.sessions.context import NEW, OVER, READY
from ffserve.server.sessions.datasets import Steps
from ffserve.server.sessions.outbox import MemoryFrame, MemoryMessage, Outbox
from ffserve.server.sessions.session import Session
from ffserve.server.sessions.state import ServerState
from ffserve.server.sessions.turns import Turns
from ffserve.server.users.access import check_memory
from ffserve.server.users.descriptors import DescriptorReceiver, closer_of, refuse_descriptors
from ffserve.server.users.peers import Account, Namespaces, Owner, Peer, is_administrator
from ffserve.server.users.shares import Bound, User
from ffserve.system.socket_path import Credentials, remove_stale_socket

log = logging.getLogger("ffserve")

HELLO_TIMEOUT_S = 10.0
WRITES_AT_ONCE = 4
"""A connection sends this many frames before others have their turn."""
ALIVE_INTERVAL_S = 2.5
"""A client that waits gets a message that the daemon works at this interval; it gives up after four
times as long."""
MEASURED_JOBS = 64
"""The daemon computes for this many jobs at a time where their time goes."""
RESIZE_STEP_S = 0.01
"""The pause between two steps of a resize."""
ACCEPT_PAUSE_S = 0.2
"""The pause after accept() has failed, for example because no descriptor is free."""
FILES_TIMEOUT_S = 30.0
"""A client that passes no descriptors for this long after NEED fails to open its data set."""
TEND_INTERVAL_S = 1.0
"""The daemon looks for idle shards at this interval."""
LANE_TIMEOUT_S = 60.0
"""An OPEN fails if it has waited this long for earlier ones of its user."""
_ACCEPTED = 8
"""One turn of the loop accepts this many connections; each takes 10 to 30 us."""
TRICKLE_SIZE, TRICKLE_PAUSE_S = 4096, 0.02
"""A part of a message that brings less than this many bytes, and does not complete it, is followed
by a pause. ffserve's clients send whole messages, whose parts are larger. A message that comes byte
by byte would wake the loop for each byte; in a pause the socket fills up, and its sender waits."""
_CHUNK, _SMALL_CHUNK = 80 * 1024, 16 * 1024
"""A connection receives this many bytes at once: a piece of an order, or hundreds of requests. A
user with many incomplete messages receives _SMALL_CHUNK."""


class ClientConnection:
    """One client's socket.

    Args: refusal: why it may open no data set; None: it may.
    """

    def __init__(
        self,
        server: Server,
        sock: socket.socket,
        peer: Peer,
        user: User,
        refusal: FFServeError | None,
    ) -> None:
        self.user = user
        self._server = server
        self._sock = sock
        self.fd = sock.fileno()
        self._loop = server.loop
        self._decoder = protocol.Decoder(protocol.FROM_CLIENT)
        self._outbox = Outbox(self._write, user)
        self._watched = self._busy = False
        """Whether the loop watches for room in the socket; whether `_writable` runs."""
        self._reading = self._queued = self.held = self._unread = self._closed = False
        """Whether the loop watches for messages; whether a turn is coming; whether the connection
        waits, and whether it waits until its replies are read; whether it was closed."""
        self._received = self._last_size = 0
        """Bytes that count against the user's bound, and those that came last."""
        self._steps: deque[Steps] = deque()
        """The work to be done before the next message is handled."""
        self._begun = False
        """Whether a step of the first of it was taken."""
        self._reply_socket = ReplySocket(self.fd)
        self._receiver = DescriptorReceiver(sock, server.refuses_descriptors)
        self._hello_timer: asyncio.TimerHandle | None = None
        self.session = Session(
            server.state,
            peer,
            self._send,
            self._open_dataset,
            self._direct_reply,
            user=user,
            later=self._later,
            refusal=refusal,
            heir=self._take_over,
            preparer=self._open_prepared,
        )
        self._opening = asyncio.Lock()
        """Held by the OPEN that is carried out; others of this client wait."""
        self._later(None)

    # ---- turns ------------------------------------------------------------------------------

    def _readable(self) -> None:
        if self._queued or self.held:
            # The socket stays readable until its turn has come.
            self._watch(False)
        else:
            # A message in many parts can wait for messages that come whole.
            self._add(at_once=not self._received)

    def _add(self, *, at_once: bool = False) -> None:
        self._queued = True
        self._server.turns.add(self, first=not self.session.context.joined, at_once=at_once)

    def _later(self, steps: Steps | None) -> None:
        """Ask for a turn, with these steps."""
        if steps is not None:
            self._steps.append(steps)
        if not self._queued and not self.held:
            self._add()

    def _watch(self, reading: bool) -> None:
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._loop.add_reader(self.fd, self._readable)
            else:
                self._loop.remove_reader(self.fd)

    def _go_on(self) -> bool:
        """Go on, since the connection need not wait any longer; return False if it did not wait."""
        if not self.held or self._closed:
            return False
        self.held = self._unread = False
        self._add()
        return True

    def _hold(self, bound: Bound | None) -> None:
        """Wait until a bound of the user is not full; None: until the replies are read."""
        self.held = True
        if bound is None:
            self._unread = True
        else:
            bound.waiting.append(self._go_on)

    def work(self, until: float) -> bool:
        """Receive and handle messages; see `turns.TurnTaker`."""
        self._queued = False
        try:
            left = self._work(until)
        except FFServeError as error:
            self._refuse(error)
            left = False
        if not self._closed:
            self._count_received()
            # Where it waits, `_readable` ends the watch if something comes: seldom.
            if not (self._reading or left or self.held or self._queued):
                self._watch(True)
        else:
            left = bool(self._steps)
            if not (left or self._queued):
                self._server.forget(self)
        if self._queued:  # it was added in the meantime
            return False
        self._queued = left
        return left

    def _work(self, until: float) -> bool:
        # It receives until nothing is left: a client that has ended without reading its replies is
        # an error of the socket, after which uvloop watches it no longer. Where an answer is owed,
        # sending it will tell; in the middle of a message, `Server._show_life` will.
        received, now = False, time.monotonic()
        while self._closed or self._may_go_on():
            if self._steps:
                self._step(now)
            elif self._closed:
                break
            else:
                message = self._decoder.next()
                if message is None and not self._decoder.unfinished:
                    if received and (self.session.has_requests or self.in_message):
                        if self._trickles:
                            self._pause()
                        break
                    if not self._receive():
                        break
                    received, now = True, time.monotonic()
                    if not self._steps:
                        message = self._decoder.next()
                if message is not None:
                    self._handle(message, now)
            now = time.monotonic()
            if now >= until:
                return True
        return False

    @property
    def _trickles(self) -> bool:
        """Whether the last bytes that came were few, and did not complete a message."""
        return self.in_message and self._last_size < TRICKLE_SIZE

    def _pause(self) -> None:
        """Receive nothing for TRICKLE_PAUSE_S."""
        self.held = True
        self._watch(False)
        self._loop.call_later(TRICKLE_PAUSE_S, self._go_on)

    @property
    def in_message(self) -> bool:
        """Whether a part of a message has come."""
        return self._decoder.pending_size > 0

    def _step(self, now: float) -> None:
        """Take a step of the first work."""
        begun, self._begun = self._begun, True
        try:
            bound = self._steps[0].send(now) if begun else next(self._steps[0])
        except StopIteration:
            self._steps.popleft()
            self._begun = False
        else:
            if bound is not None and not self._closed:
                self._hold(bound)
        if self.session.context.phase == OVER:
            self.close()

    def _may_go_on(self) -> bool:
        """Whether it waits for nothing, and the replies are read; otherwise it waits for that."""
        if self.held:
            return False
        user = self.user
        if self._outbox.unsent_size > MOST_UNREAD:
            self._hold(None)
        elif user.unsent.full:
            self._hold(user.unsent)
        elif user.closing.full:
            self._hold(user.closing)
        return not self.held

    def _handle(self, message: Message, now: float) -> None:
        steps = self.session.receive(message, now)
        if steps is not None:
            self._steps.append(steps)
            self._step(now)
        elif self.session.context.phase == OVER:
            self.close()

    def _receive(self) -> bool:
        """Receive bytes; return whether there were any."""
        if self._hello_timer is None:
            self._hello_timer = self._loop.call_later(HELLO_TIMEOUT_S, self._no_hello)
        received = self.user.received
        full = received.full
        if full and self._decoder.pending_size >= _SMALL_CHUNK:
            if received.exempt not in (None, self):
                self._hold(received)
                return False
            received.exempt = self
        try:
            most = _SMALL_CHUNK if full else _CHUNK
            chunk, fds, lost = self._receiver.receive(most)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            chunk, fds, lost = b"", [], False
        if fds or lost:
            self._take_descriptors(fds, lost)
        if not chunk:
            self.close()
            return False
        if self.session.awaits_direct_reply:
            # The client may have the reply already, and this may acknowledge it.
            self._server.state.reading.engines.reap()
        self._decoder.push(chunk)
        self._last_size = len(chunk)
        return True

    def _no_hello(self) -> None:
        if self.session.context.phase == NEW:
            self._refuse(
                ProtocolError(f"the client sent no HELLO message within {HELLO_TIMEOUT_S:g} s")
            )

    def _count_received(self) -> None:
        received, size = self.user.received, self._decoder.pending_size
        more, self._received = size - self._received, size
        if size < _SMALL_CHUNK and received.exempt is self:
            received.exempt = None
        if more > 0:
            received.take(more)
        elif more < 0:
            received.give(-more)

    def show_life(self) -> None:
        """Tell a client that waits that the daemon works, unless more is on its way to it."""
        waits = self._steps or self.held or self._decoder.pending_size
        ready = self.session.context.phase == READY and not self._outbox
        if ready and (waits or self.session.owes_answer):
            self._send(protocol.Alive())

    # ---- opening ----------------------------------------------------------------------------

    def _take_descriptors(self, fds: list[int], lost: bool) -> None:
        """Take descriptors that came with bytes.

        Args: lost: more came, but the daemon may have no more.
        """
        if not self.session.datasets.needs_files:
            closer_of(self.user).close_fds(fds)
            return
        self.session.datasets.received += fds
        self.session.datasets.received_too_many |= lost
        if len(self.session.datasets.received) > protocol.MOST_FILES:
            raise ProtocolError(
                f"more than {protocol.MOST_FILES} descriptors came for one FILES message"
            )

    async def _passed(self, tag: int, path: str, positions: list[int]) -> list[PassedFile]:
        """Ask the client for descriptors; return them. Raises: FFServeError, with the path, if none
        come."""
        answered: asyncio.Future[list[PassedFile] | FFServeError] = self._loop.create_future()

        def take(answer: list[PassedFile] | FFServeError) -> None:
            if not answered.done():
                answered.set_result(answer)

        self._receiver.accept(True)
        self.session.datasets.need(tag, positions, take)
        late = ServerUnavailable(
            f"the client passed no descriptors for {FILES_TIMEOUT_S:g} s",
            hint="the client was stopped, or its file system does not respond; try again",
        )
        timer = self._loop.call_later(FILES_TIMEOUT_S, self.session.datasets.refuse_files, late)
        try:
            answer = await answered
        except asyncio.CancelledError:
            self.session.datasets.refuse_files(late)
            raise
        finally:
            timer.cancel()
            self._drop_received()
        if isinstance(answer, FFServeError):
            raise answer.located(path=path)
        self._receiver.accept(False)
        return answer

    def _open_prepared(self, tag: int, request: PrepareRequest) -> None:
        """Take the client's memory file for prepared samples and tell the session."""

        async def opening() -> None:
            path, fds = request.source.paths[0], list[int]()
            try:
                async with self._opening:
                    for file in await self._passed(tag, path, [0]):
                        fds += [fd for fd in (file.fd, file.index) if fd is not None]
                check_memory(fds)
                self.session.sharing.opened(tag, request, fds[0])
                fds = []
            except FFServeError as error:
                self.session.sharing.not_opened(tag, request, error)
            except Exception as error:
                log.exception("internal error while opening prepared samples")
                failure = FFServeError(f"internal error of the daemon: {error!r}")
                self.session.sharing.not_opened(tag, request, failure)
            finally:
                closer_of(self.user).close_fds(fds)

        self._server.begin(opening())

    def _open_dataset(self, tag: int, request: Request) -> None:
        """Open a data set beside the loop and tell the session."""

        async def passing(positions: list[int]) -> list[PassedFile]:
            return await self._passed(tag, request.paths[positions[0]], positions)

        async def opening() -> None:
            catalog, peer = self._server.state.files.catalog, self.session.peer
            try:
                async with self._opening, self._server.lane(peer):
                    shards = await catalog.open(request, peer, passing)
            except FFServeError as error:
                self.session.datasets.failed(tag, error, time.monotonic())
            except Exception as error:
                log.exception("internal error while opening a data set")
                failure = FFServeError(f"internal error of the daemon: {error!r}")
                self.session.datasets.failed(tag, failure, time.monotonic())
            else:
                self.session.datasets.opened(tag, request.paths, shards)
            finally:
                self.user.opening.give(len(request.paths))

        self.user.opening.take(len(request.paths))
        self._server.begin(opening())

    def _take_over(self, tag: int) -> None:
        """Hand this daemon over to the client. Raises: ServerUnavailable: it cannot take over."""
        self._server.begin_handover(self._sock, tag)

    def _drop_received(self) -> None:
        """Close descriptors that no message took."""
        fds, self.session.datasets.received = self.session.datasets.received, []
        self.session.datasets.received_too_many = False
        closer_of(self.user).close_fds(fds)

    # ---- replies ----------------------------------------------------------------------------

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
        if len(frame) > ATOMIC_SEND_SIZE or isinstance(frame, MemoryFrame):
            self._reply_socket.block(True)
        self._outbox.put(frame)

    def _write(self) -> None:
        """Send now, unless the socket is full: then the loop calls `_writable`."""
        if not self._watched and not self._busy:
            self._writable()

    def _writable(self) -> None:
        self._busy = True
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
                self._loop.add_writer(self.fd, self._writable)
            else:
                self._loop.remove_writer(self.fd)
        self._outbox.count()
        if self._unread and self._outbox.unsent_size <= MOST_UNREAD // 2:
            self._go_on()

    def _refuse(self, error: FFServeError) -> None:
        """End the session with an error."""
        self._server.state.statistics.cut_off += 1
        self._server.state.faults.lines.warning(
            "closed a session (pid %d): %s",
            self.session.peer.pid,
            error,
            user=self.user.uid,
            now=time.monotonic(),
        )
        self.session.fail(0, error)
        self.close()

    def close(self) -> None:
        """Close the socket, and give everything back in the turns to come; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._reply_socket.block(True)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._watch(False)
        self._loop.remove_writer(self.fd)
        with contextlib.suppress(OSError):
            self._outbox.send(self._sock)
        closer_of(self.user).close_socket(self._sock, self._receiver.carrying)
        self._outbox.clear()
        self._decoder = protocol.Decoder(protocol.FROM_CLIENT)
        self._count_received()
        self.held = self._unread = False
        self._drop_received()
        self._steps = deque([self.session.leave(time.monotonic())])
        self._begun = False
        if not self._queued:
            self._add()


@dataclass(slots=True)
class Arrival:
    """A client that has connected and not had a turn yet."""

    user: User
    sock: socket.socket
    peer: Peer | None
    """None until it is looked up."""
    refusal: FFServeError | None
    arrived: Callable[[Arrival], None]

    def work(self, until: float) -> bool:
        """Become a connection; see `turns.TurnTaker`."""
        self.arrived(self)
        return False


class Server:
    """Accepts clients and keeps their connections.

    Args:
        listener: a listening Unix stream socket; closed by `drain`.
        end: called when the daemon is to end: another one takes it over, or an engine has broken.
    """

    def __init__(
        self,
        state: ServerState,
        listener: socket.socket,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        self.state = state
        self.loop = asyncio.get_running_loop()
        self.turns = Turns(self.loop, self.arm)
        self._listener = listener
        self.refuses_descriptors = refuse_descriptors(listener)
        self._connections: set[ClientConnection] = set()
        self._openings: set[asyncio.Task[None]] = set()
        self.namespaces = Namespaces()
        self._lanes: weakref.WeakValueDictionary[Owner | Account, asyncio.Semaphore] = (
            weakref.WeakValueDictionary()
        )
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._resize_timer: asyncio.TimerHandle | None = None
        self._tending = self.loop.create_task(self._tend())
        self._scrubbing = self.loop.create_task(state.files.scrubber.run())
        self._pumping = False
        """Whether the loop will call `pump`."""
        self._draining = False
        self.heir: tuple[socket.socket, int] | None = None
        """The connection of the daemon that takes this one over, and the tag of its request."""
        self._end = end
        self._used_at = time.monotonic()
        self.state.clients.most = most_sessions(state.config.max_sessions, _most_files())
        listener.setblocking(False)
        self.loop.add_reader(listener.fileno(), self._accept)
        state.attach(self.loop, self)
        self._measuring: Iterator[None] = iter(())
        self._alive_timer = self.loop.call_later(ALIVE_INTERVAL_S, self._show_life)

    def reconfigure(self, config: ServerConfig) -> None:
        """Follow other settings; as `ServerState.reconfigure`."""
        self.state.reconfigure(config, time.monotonic())
        self.state.clients.most = most_sessions(config.max_sessions, _most_files())
        self.arm()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.state.faults.lines.warning(
                    "cannot accept a client, trying again: %s",
                    error,
                    key=error.errno,
                    now=time.monotonic(),
                )
                self.loop.remove_reader(self._listener.fileno())
                self.loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            try:
                self._admit(sock)
            except OSError:
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        uid = Credentials.of(sock).uid
        # Only these settings need it now, and it takes longer than all other steps.
        peer = self.namespaces.peer(sock) if is_administrator(uid) else None
        trusted = peer is not None and peer.is_administrator
        user, count = self.state.clients.users.of(uid, trusted=trusted), self.state.clients.count
        refusal = None
        if not user.may_take(1, user.sessions, count, self.state.clients.most):
            refusal = user.too_many_sessions(count, self.state.clients.most)
            if not user.trusted or count >= self.state.clients.most + RESERVED_SESSIONS:
                self.state.faults.refused(uid, refusal, time.monotonic())
                with contextlib.suppress(OSError):
                    sock.send(protocol.encode(protocol.Fail(0, protocol.error_to_wire(refusal))))
                closer_of(user).close_socket(sock)
                self.left_namespace(peer)
                return
        user.sessions += 1
        self.state.clients.count += 1
        self.turns.add(Arrival(user, sock, peer, refusal, self._arrived), first=True)

    def _arrived(self, client: Arrival) -> None:
        try:
            gone = not client.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            gone = False
        except OSError:
            gone = True
        if gone or self._draining:
            closer_of(client.user).close_socket(client.sock)
            self.left_namespace(client.peer)
            self._left(client.user)
            return
        peer = client.peer or self.namespaces.peer(client.sock)
        self._connections.add(
            ClientConnection(self, client.sock, peer, client.user, client.refusal)
        )

    def left_namespace(self, peer: Peer | None) -> None:
        """Note that a client is gone about which `Namespaces.peer` was asked."""
        if peer is not None and self.namespaces.release(peer.namespace):
            self.state.files.catalog.end_namespace(peer.namespace)

    def _left(self, user: User) -> None:
        self.state.clients.count -= 1
        if self.state.clients.users.left(user):
            self.turns.forget(user)

    def _resume(self) -> None:
        if not self._draining:
            self.loop.add_reader(self._listener.fileno(), self._accept)

    def forget(self, connection: ClientConnection) -> None:
        """Forget a connection that has given everything back."""
        self._connections.discard(connection)
        self.left_namespace(connection.session.peer)
        if connection.session.context.joined:
            self._used_at = time.monotonic()
        self._left(connection.user)

    def _show_life(self) -> None:
        """Send signs of life; find clients that ended while their connection was not watched, and
        disks that are slow; write lines that repeat; measure jobs."""
        self.state.claims.expire(time.monotonic())
        waiting: dict[int, ClientConnection] = {}
        poll = select.poll()
        for connection in list(self._connections):
            connection.show_life()
            if connection.held or connection.in_message:
                waiting[connection.fd] = connection
                poll.register(connection.fd, 0)
        for fd, event in poll.poll(0):
            if waiting[fd].held or event & select.POLLERR:
                waiting[fd].close()
        now = time.monotonic()
        self.state.reading.engines.find_slow(now)
        self.state.faults.lines.flush(now)
        self.state.jobs.rates.note(now, self.state.jobs.counters())
        if next(self._measuring, self) is self:
            self._measuring = self.state.jobs.measure(now)
        for _ in islice(self._measuring, MEASURED_JOBS):
            pass
        self._alive_timer = self.loop.call_later(ALIVE_INTERVAL_S, self._show_life)

    def begin_handover(self, sock: socket.socket, tag: int) -> None:
        """End, so that the daemon on this connection takes over. Raises: ServerUnavailable: it
        cannot."""
        if self._draining or self.heir is not None:
            raise ServerUnavailable(
                "this daemon is stopping, or another daemon is already taking it over",
                hint="see 'ffserve status', and try again",
            )
        try:
            self.heir = sock.dup(), tag
        except OSError as error:
            raise ServerUnavailable(
                f"the daemon cannot duplicate the connection for the handover: {error.strerror}"
            ) from error
        self._end()

    def end(self) -> None:
        """End the daemon."""
        self._end()

    def begin(self, opening: Coroutine[Any, Any, None]) -> None:
        """Carry out an OPEN beside the loop."""
        task = self.loop.create_task(opening)
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)

    @contextlib.asynccontextmanager
    async def lane(self, peer: Peer) -> AsyncIterator[None]:
        """Wait until a client may open a data set: its user's files may be on a file system that
        does not answer, which must cost neither others nor ever more threads and descriptors."""
        with contextlib.ExitStack() as held:
            lanes = (peer.owner, NAMESPACE_OPENINGS), (peer.account, USER_OPENINGS)
            for whose, most in lanes:
                lane = self._lanes.setdefault(whose, asyncio.Semaphore(most))
                try:
                    await asyncio.wait_for(lane.acquire(), LANE_TIMEOUT_S)
                except asyncio.TimeoutError:  # before Python 3.11 not the built-in one
                    raise ServerUnavailable(
                        f"{most} earlier requests of this user to open files have not ended for "
                        f"{LANE_TIMEOUT_S:g} s",
                        hint="check whether a file system does not respond; try again later",
                    ) from None
                held.callback(lane.release)
            yield

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_INTERVAL_S)
            try:
                await self.state.files.catalog.tend(time.monotonic())
            except Exception:
                log.exception("internal error while closing files")

    def arm(self) -> None:
        """Set the timers for blocked requests, prefetching that pauses, and a resize."""
        if self._resize_timer is None and self.state.resizing.under_way:
            self._resize_timer = self.loop.call_later(RESIZE_STEP_S, self._resize)
        deadline = self.state.reading.scheduler.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic()
        self._timer_at = max(deadline, now + 0.001)
        self._timer = self.loop.call_later(self._timer_at - now, self.pump)

    def _resize(self) -> None:
        self._resize_timer = None
        self.state.resizing.step(time.monotonic())
        self.arm()

    def pump_soon(self) -> None:
        """Give turns when the loop has looked for messages."""
        if not self._pumping:
            self._pumping = True
            self.loop.call_soon(self.pump)

    def pump(self) -> None:
        """Give turns, since memory may be free now."""
        self._pumping = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.state.reading.scheduler.pump(time.monotonic())
        self.arm()

    @property
    def not_ready(self) -> str | None:
        """The reason why no new client is served; None if clients are served."""
        if self._draining:
            return "stopping"
        return "an I/O engine is broken" if self.state.reading.engines.broken else None

    @property
    def idle_s(self) -> float:
        """Seconds since the last client that opened files went away; 0 while there is one."""
        if any(connection.session.context.joined for connection in self._connections):
            return 0.0
        return time.monotonic() - self._used_at

    @property
    def connection_count(self) -> int:
        """Clients connected now."""
        return len(self._connections)

    def _has_answered(self) -> bool:
        scheduler, explainer = self.state.reading.scheduler, self.state.files.explainer
        return not scheduler.request_count and not explainer.waiting_count

    async def drain(self, timeout_s: float) -> bool:
        """Accept no new clients, answer the requests under way, then close all sessions.

        Returns: whether everything was answered in time.
        """
        self._draining = True
        self.loop.remove_reader(self._listener.fileno())
        if self.heir is None:
            self._listener.close()
        deadline = time.monotonic() + timeout_s
        scheduler = self.state.reading.scheduler
        while not (self._has_answered() and scheduler.idle) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        answered = self._has_answered()  # a silent origin may hold reads that nobody waits for
        for task in (*self._openings, self._tending, self._scrubbing):
            task.cancel()
        scheduler.stop()
        for connection in list(self._connections):
            connection.close()
        self.turns.finish()
        self.state.faults.lines.flush(time.monotonic(), ending=True)
        for timer in (self._timer, self._resize_timer, self._alive_timer):
            if timer is not None:
                timer.cancel()
        return answered


def listen(path: str, *, mode: int, group: int | None, backlog: int) -> socket.socket:
    """Return a listening Unix stream socket, in place of a stale one.

    Args: group: of the socket; None: this process's.
    Raises: UsageError: as `remove_stale_socket`. AccessDenied, ReadError: it cannot be made.
    """
    remove_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with contextlib.ExitStack() as undo:
        undo.callback(listener.close)
        # No client may connect before mode and group are set.
        previous = os.umask(0o177)
        try:
            wrap_os_error(listener.bind, path)
        finally:
            os.umask(previous)
        undo.callback(os.unlink, path)
        if group is not None:
            wrap_os_error(lambda p: os.chown(p, -1, group), path)
        wrap_os_error(lambda p: os.chmod(p, mode), path)
        listener.listen(backlog)
        undo.pop_all()
    return listener


def _most_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
