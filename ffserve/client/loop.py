"""What an event loop needs to read samples: connections and an engine whose answers are awaited.

A blocking connection does everything here but send and wait; both go through the loop instead, on
a socket that does not block. Each event loop has its own connections and engine, used from its
thread alone, so nothing needs a lock. A request that nobody awaits any more is answered all the
same: what the answer brings (pins, a data set) is given back when it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ffserve import protocol
from ffserve.client import connections
from ffserve.client.connection import ANSWER_TIMEOUT_S, Connection
from ffserve.client.source import Int64s
from ffserve.engine.io import Batch, Engine
from ffserve.errors import FFServeError, ServerUnavailable
from ffserve.protocol import Message

T = TypeVar("T")
M = TypeVar("M")

_THREADS = 4


class LoopConnection(Connection):
    """A connection that belongs to one event loop.

    Made in any thread, since the greeting blocks; after `attach` only for the loop's.
    """

    def attach(self, home: Home) -> None:
        """Have the loop watch the socket."""
        self._home = home
        self._loop = home.loop
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._unwanted: dict[int, Callable[[Message], None]] = {}
        self._held: deque[tuple[int, bytes]] = deque()
        """Requests that the daemon cannot take yet."""
        self._unsent = bytearray()
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._socket.setblocking(False)
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._readable)

    # ---- awaiting -------------------------------------------------------------------------

    async def opened(
        self, paths: tuple[str, ...], format: str | None, verify: bool, tolerant: bool
    ) -> protocol.Opened:
        """Open a data set. Raises what the daemon answers; ServerUnavailable if it is gone."""
        return await self._answer(
            self._send_open(paths, format, verify, tolerant), protocol.Opened, self._close_late
        )

    async def ready(self, tag: int) -> protocol.Ready:
        """Await the answer to `get`; if cancelled, the pins are given back when it comes."""
        return await self._answer(tag, protocol.Ready, self._acknowledge_late)

    async def announced(
        self, dataset: int, order: Int64s, epoch: int, name: str | None, replacement: bool
    ) -> None:
        """Announce an order; see `announce`."""
        if self.given.takes_orders:
            tag = self._send_order(dataset, epoch, order, name, replacement)
            await self._answer(tag, protocol.Ready, lambda _: None)

    def give_up(self, tag: int) -> None:
        """Nobody will await this GET."""
        self._inbox.drop(tag)
        self._discard(tag, self._acknowledge_late)

    async def answer(self, tag: int, kind: type[M]) -> M:
        """Await an answer of this kind, to `get` or to `look_up`."""
        return await self._answer(tag, kind, self._acknowledge_late)

    async def _answer(self, tag: int, kind: type[M], undo: Callable[[Message], None]) -> M:
        future = self._answers.get(tag)
        if future is None:
            raise self._gone()
        try:
            answer = await future
        except asyncio.CancelledError:
            self._inbox.drop(tag)
            self._discard(tag, undo)
            raise
        self._answers.pop(tag, None)
        return self._checked(answer, kind)

    def _discard(self, tag: int, undo: Callable[[Message], None]) -> None:
        future = self._answers.pop(tag, None)
        if future is None or self._broken is not None:
            return
        if future.done() and not future.cancelled():
            undo(future.result())
            return
        for held in self._held:
            if held[0] == tag:
                self._held.remove(held)
                return
        self._unwanted[tag] = undo

    def _acknowledge_late(self, answer: Message) -> None:
        if isinstance(answer, protocol.Ready):
            self.acknowledge(answer.tag)
            self.tell()

    def _close_late(self, answer: Message) -> None:
        if isinstance(answer, protocol.Opened):
            self.close_dataset(answer.dataset)

    # ---- the socket -----------------------------------------------------------------------

    def _send(self, message: Message, tag: int | None) -> None:
        frame = protocol.encode(message)
        if self._broken is not None:
            raise self._gone()
        if tag is not None:
            self._answers[tag] = self._loop.create_future()
            if self._timer is None:
                self._heard = self._loop.time()
                self._timer = self._loop.call_later(ANSWER_TIMEOUT_S, self._check)
        if isinstance(message, (protocol.Get, protocol.Lease)):
            if len(self._unanswered) >= protocol.MOST_REQUESTS:
                self._held.append((message.tag, frame))
                return
            self._unanswered.add(message.tag)
        self._write(frame)

    def _send_if_room(self, message: Message) -> bool:
        try:
            self._send(message, None)
        except FFServeError:
            return False
        return True

    def _write(self, frame: bytes) -> None:
        if self._unsent:
            self._unsent += frame
            return
        try:
            sent = self._socket.send(frame)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._break(ServerUnavailable(f"the daemon is gone: {error}", path=self.path))
            raise self._gone() from error
        if sent < len(frame):
            self._unsent += frame[sent:]
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._break(ServerUnavailable(f"the daemon is gone: {error}", path=self.path))
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            messages = self._next_messages()
        except (BlockingIOError, InterruptedError):
            return
        except FFServeError:
            return  # It is broken now, and who waits was told so.
        self._heard = self._loop.time()
        for tag, message in messages:
            self._unanswered.discard(tag)
            future = self._answers.get(tag)
            undo = self._unwanted.pop(tag, None)
            if future is not None and not future.done():
                future.set_result(message)
            elif undo is not None:
                with contextlib.suppress(ServerUnavailable):
                    undo(message)
        with contextlib.suppress(ServerUnavailable):
            while self._held and len(self._unanswered) < protocol.MOST_REQUESTS:
                tag, frame = self._held.popleft()
                self._unanswered.add(tag)
                self._write(frame)

    def _check(self) -> None:
        """See that the daemon still answers."""
        self._timer = None
        if self._broken is not None or not (self._answers or self._unwanted):
            return
        left_s = self._heard + ANSWER_TIMEOUT_S - self._loop.time()
        if left_s <= 0:
            self._silent()
        else:
            self._timer = self._loop.call_later(left_s, self._check)

    def _break(self, error: FFServeError) -> None:
        first = self._broken is None
        super()._break(error)
        if first:
            self._unwatch()
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(self._gone())
                    future.exception()  # Whoever awaits it sees it; nobody has to.
            self._held.clear()

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)

    def leave(self) -> None:
        """A reader needs the connection no more; the last one closes it."""
        self.readers -= 1
        if self.readers == 0:
            self._home.forget(self)
            self.close()


class LoopEngine:
    """An engine whose batches are awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = Engine("auto", depth=128)
        self._loop = loop
        self._ended: dict[int, asyncio.Future[None]] = {}
        loop.add_reader(self.engine.fileno(), self._reap)

    def watch(self, batch: Batch) -> asyncio.Future[None]:
        """Return what is done when the batch has ended. To be called once, when it was submitted;
        whoever awaits it shields it."""
        future = self._ended[batch.address] = self._loop.create_future()
        return future

    def _reap(self) -> None:
        for batch in self.engine.completed():
            self._ended.pop(batch.address).set_result(None)


class Home:
    """What all readers of one event loop share: a connection a socket, and an engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._connections: dict[str, LoopConnection] = {}
        self._connecting = asyncio.Lock()
        self._engine: LoopEngine | None = None

    async def connect(self, path: str) -> LoopConnection:
        """Return this loop's connection to the daemon, made anew if it broke."""
        async with self._connecting:
            connection = self._connections.get(path)
            if connection is None or not connection.alive:
                connection = await in_thread(
                    lambda: LoopConnection(path, connections.job_name()), LoopConnection.abandon
                )
                connection.attach(self)
                self._connections[path] = connection
            connection.readers += 1
            return connection

    def forget(self, connection: LoopConnection) -> None:
        """A connection was closed."""
        if self._connections.get(connection.path) is connection:
            del self._connections[connection.path]

    def engine(self) -> LoopEngine:
        """Return this loop's engine."""
        if self._engine is None:
            self._engine = LoopEngine(self.loop)
        return self._engine

    def dissolve(self) -> None:
        """The loop was closed and left things open."""
        for connection in self._connections.values():
            connection.abandon()
        if self._engine is not None:
            self._engine.engine.close()

    def after_fork(self) -> None:
        """This process is a child. The loop's epoll is the parent's too: nothing is removed."""
        for connection in self._connections.values():
            connection.abandon()
        if self._engine is not None:
            self._engine.engine.forget()


_lock = threading.Lock()
_homes: dict[asyncio.AbstractEventLoop, Home] = {}
_pool: ThreadPoolExecutor | None = None


def home() -> Home:
    """Return what belongs to the running loop, and clear away what closed loops left."""
    loop = asyncio.get_running_loop()
    found = _homes.get(loop)
    if found is not None:
        return found
    with _lock:
        for closed in [other for other in _homes if other.is_closed()]:
            _homes.pop(closed).dissolve()
        _homes[loop] = Home(loop)
        return _homes[loop]


def pool() -> ThreadPoolExecutor:
    """Return the threads for what would hold a loop up."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, "ffserve-aio")
        return _pool


async def in_thread(make: Callable[[], T], drop: Callable[[T], object]) -> T:
    """Make something in a thread; if the caller is cancelled meanwhile, drop it once it is made."""
    future = pool().submit(make)

    def unwanted(done: Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            drop(done.result())

    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(unwanted)
        raise


async def undisturbed(future: asyncio.Future[T]) -> T:
    """Await what writes to memory that is ours to give away; being cancelled comes after it."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        future.exception()
        raise asyncio.CancelledError
    return future.result()


def _in_child() -> None:
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None
    for each in _homes.values():
        each.after_fork()
    _homes.clear()


os.register_at_fork(after_in_child=_in_child)
