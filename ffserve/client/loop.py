"""Connections and engines of event loops: the awaiting driver of a channel, and of local reads.

Each event loop has its own connections and engine, used from its thread alone. Sockets do not
block; what a socket does not take is sent when it is writable. Large copies are made by threads
beside the loop. A request that was cancelled is answered all the same; the pins that the answer
brings are given back when it comes.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ffserve import protocol
from ffserve.client.daemon import connection as blocking
from ffserve.client.daemon.channel import Beside, Copying, Steps
from ffserve.client.daemon.passed_files import DatasetRequest, send
from ffserve.client.daemon.shared_memory import DaemonSource
from ffserve.client.local.local_engines import LocalEngines
from ffserve.client.local.local_source import LocalRequest, LocalSource
from ffserve.client.local.ranged_source import RangedSource
from ffserve.client.source import SampleSource, Target
from ffserve.dtypes import Bytes, Int64s
from ffserve.engine.io import Engine, EngineBatch
from ffserve.errors import FFServeError, ProtocolError
from ffserve.reads.by_device import SplitEngine
from ffserve.reads.records import BatchEngine

T = TypeVar("T")

Failed: TypeAlias = dict[int, FFServeError]
"""Errors by position."""

LARGE_COPY_SIZE = 1024 * 1024
"""A thread makes copies of this many bytes or more. Copying so much takes 0.12 ms (ratios in
docs/decisions/requests.md), as long as the way to a thread and back."""
_THREADS = 4


class LoopConnection(blocking.Driver):
    """A connection that belongs to one event loop.

    Made in any thread, since the handshake blocks; used in the loop's from `attach` on.

    Args, Raises: as of `connection.Driver`.
    """

    def __init__(self, path: str, job: str) -> None:
        super().__init__(path, job)
        self._socket.setblocking(False)
        self._fd = self._socket.fileno()

    def attach(self, state: LoopState) -> None:
        """Have the loop watch the socket."""
        self._state = state
        self._loop = state.loop
        self._awaited: dict[int, asyncio.Future[None]] = {}
        self._announcing = asyncio.Lock()
        self._copied = 0
        """Bytes copied since others last had their turn in the loop."""
        self._writing = False
        self._heard = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._fd, self._readable)

    # ---- requests -------------------------------------------------------------------------

    async def open(self, request: DatasetRequest) -> protocol.Opened:
        """Open a data set. Raises: as `opening`."""
        return await self.run(self.opening(request))

    async def announce(
        self, dataset: int, epoch: int, order: Int64s, name: str | None, replacement: bool
    ) -> None:
        """Announce an order; return when the daemon has taken it. Raises what the daemon
        answers."""
        async with self._announcing:
            await self.run(self.announcing(dataset, epoch, order, name, replacement))

    async def run(self, steps: Steps[T], request: Copying | None = None) -> T:
        """Take the steps of a request; return its result. Args: request: that copies samples."""
        try:
            step = next(steps)
            while True:
                if type(step) is int:
                    step = steps.send(await self._wait(step))
                elif step is None or type(step) is np.ndarray:
                    assert request is not None
                    step = steps.send(await self._copy(request, step))
                elif type(step) is Beside:
                    step = steps.send(await in_thread(step.make, step.drop))
                else:
                    await asyncio.sleep(step)  # type: ignore[arg-type]
                    step = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        except BaseException:
            steps.close()
            self.report()
            raise

    async def _copy(self, request: Copying, positions: Int64s | None) -> Int64s:
        offsets = request.target.offsets
        if positions is None:
            size = int(offsets[-1])
        else:
            size = int((offsets[positions + 1] - offsets[positions]).sum())
        if size >= LARGE_COPY_SIZE:
            copying = pool().submit(request.copy, positions)
            left: Int64s = await undisturbed(asyncio.wrap_future(copying))
            return left
        self._copied += size
        if self._copied >= LARGE_COPY_SIZE:
            # A task that reads only cached samples would never let another one run.
            self._copied = 0
            await asyncio.sleep(0)
        return request.copy(positions)

    def close_dataset(self, dataset: int) -> None:
        """A data set is not needed any more."""
        for tag in self.channel.close_dataset(dataset):
            self._wake(tag)
        self.report()

    async def _wait(self, tag: int) -> Any:
        """Return the answer to a request."""
        self.flush()
        if self.alive and not self.channel.has_answer(tag):
            if self._timer is None:
                self._timer = self._loop.call_later(blocking.SILENCE_S, self._see_that_it_lives)
            future = self._awaited[tag] = self._loop.create_future()
            try:
                await future
            finally:
                self._awaited.pop(tag, None)
        return self.channel.collect(tag)

    # ---- the socket -----------------------------------------------------------------------

    def flush(self) -> None:
        """Send the requests that are queued. Bytes that the socket does not take follow later."""
        if self._writing:
            return
        while output := self.channel.output():
            try:
                sent = send(self._socket, output, self.channel.passing)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                self._break(self._gone(error))
                return
            self.channel.sent(sent)
            if sent < len(output):
                self._writing = True
                self._loop.add_writer(self._fd, self._writable)
                return

    def report(self) -> None:
        """Send the reports that are due, unless the socket takes nothing; then later."""
        if self.alive and not self._writing:
            self.channel.queue_reports()
            self.flush()

    def _writable(self) -> None:
        self._writing = False
        self._loop.remove_writer(self._fd)
        self.flush()
        self.report()

    def _readable(self) -> None:
        channel = self.channel
        try:
            answered = self._take()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._break(self._gone(error))
            return
        except FFServeError as error:
            self._break(error)
            return
        except Exception as error:
            # Lack of memory, for instance: how much of it was taken is not known.
            self._break(ProtocolError(f"cannot take an answer: {error!r}", path=self.path))
            return
        self._heard = time.monotonic()
        for tag in answered:
            self._wake(tag)
        if channel.urgent:
            self.flush()
        if channel.report_due:
            self.report()

    def _wake(self, tag: int) -> None:
        future = self._awaited.get(tag)
        if future is not None and not future.done():
            future.set_result(None)

    def check(self) -> None:
        """Break if the daemon has hung up: the loop does so by itself."""

    def _see_that_it_lives(self) -> None:
        """End the connection if the daemon owes an answer and sends nothing."""
        self._timer = None
        if self.alive:
            self._readable()  # the loop itself may have been held up: it may have sent something
        since = self.channel.owes_since
        if not self.alive or since is None:
            return
        left_s = max(since, self._heard) + blocking.SILENCE_S - time.monotonic()
        if left_s <= 0:
            self._break(blocking.silent_error(self.path))
        else:
            self._timer = self._loop.call_later(left_s, self._see_that_it_lives)

    # ---- the end --------------------------------------------------------------------------

    def _break(self, error: FFServeError) -> None:
        if not self.alive:
            return
        self.channel.fail(error)
        self.channel.drop_passing()
        if self._timer is not None:
            self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
        self._socket.close()
        self.handshake.drop_fds()
        for tag in list(self._awaited):
            self._wake(tag)

    def leave(self) -> None:
        """A reader does not need the connection any more; the last one closes it."""
        self.readers -= 1
        if self.readers == 0:
            self._state.forget(self)
            self.report()
            self._break(self._closed())

    def abandon(self) -> None:
        """Close the descriptors and nothing else: the loop is closed, or another process's."""
        self._drop()


class LoopEngine:
    """Engines whose batches are awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.engines = LocalEngines(self._started)
        self._loop = loop
        self._ended: dict[int, asyncio.Future[None]] = {}

    def _started(self, engine: Engine) -> None:
        """Any thread."""
        self._loop.call_soon_threadsafe(self._loop.add_reader, engine.fileno(), self._reap, engine)

    def watch(self, engine: BatchEngine, batch: EngineBatch) -> asyncio.Future[Any]:
        """Return a future that is done when the batch has ended. Called once, after it was
        submitted to this engine; a task that awaits it shields it."""
        if not isinstance(engine, SplitEngine):
            return self._end_of(batch)
        ended = asyncio.gather(*map(self._end_of, engine.parts(batch)))
        ended.add_done_callback(lambda _: engine.join(batch))
        return ended

    def _end_of(self, batch: EngineBatch) -> asyncio.Future[None]:
        future = self._ended[batch.address] = self._loop.create_future()
        return future

    def _reap(self, engine: Engine) -> None:
        for batch in engine.completed():
            self._ended.pop(batch.address).set_result(None)


class LoopState:
    """What all readers of one event loop share: a connection per socket, and engines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._connections: dict[str, LoopConnection] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._engine: LoopEngine | None = None

    async def connect(self, path: str) -> LoopConnection:
        """Return this loop's connection to the daemon, made anew if it broke."""
        async with self._connecting.setdefault(path, asyncio.Lock()):
            connection = self._connections.get(path)
            if connection is None or not connection.alive:
                connection = await in_thread(
                    lambda: LoopConnection(path, blocking.job_name()), LoopConnection.abandon
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
        """Return this loop's engines."""
        if self._engine is None:
            self._engine = LoopEngine(self.loop)
        return self._engine

    # ---- reading --------------------------------------------------------------------------

    async def read(
        self, source: SampleSource, numbers: Int64s, *, apart: bool, out: Bytes | None = None
    ) -> tuple[Target, Failed]:
        """Read samples; return where they are, and the errors."""
        if isinstance(source, LocalSource):
            return await self._read_local(source, numbers, apart, out)
        assert isinstance(source, DaemonSource) and isinstance(source.connection, LoopConnection)
        request = source.start(numbers, apart=apart, out=out)
        failed = await source.connection.run(request.steps(), request)
        return request.target, failed

    async def named(self, source: SampleSource, blocks: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return blocks of names; see `SampleSource.named`."""
        if isinstance(source, LocalSource):
            return source.named(blocks)
        assert isinstance(source, DaemonSource) and isinstance(source.connection, LoopConnection)
        return await source.connection.run(source.naming(blocks))

    async def _read_local(
        self, source: LocalSource, numbers: Int64s, apart: bool, out: Bytes | None
    ) -> tuple[Target, Failed]:
        request = source.start(numbers, apart=apart, out=out)
        if request.elsewhere is not None or isinstance(source, RangedSource):
            finishing = pool().submit(source.finish, request)
            failed = await undisturbed(asyncio.wrap_future(finishing))
        else:
            failed = await self._collect(source, request, keeps_out=out is not None)
        return request.target, failed

    async def _collect(
        self, source: LocalSource, request: LocalRequest, *, keeps_out: bool
    ) -> Failed:
        if request.batch is None:
            return source.collect(request)
        assert request.engine is not None  # it was started
        ended = self.engine().watch(request.engine, request.batch)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            ended.add_done_callback(lambda _: source.collect(request))
            if keeps_out:
                # The reads go straight to the caller's buffer, and cannot be called back.
                await undisturbed(ended)
            raise
        return source.collect(request)

    async def sizes(self, source: SampleSource, numbers: Int64s) -> Int64s:
        """Return lengths in bytes."""
        if isinstance(source, LocalSource):
            if source.knows_sizes:
                return source.sizes(numbers)
            return await undisturbed(asyncio.wrap_future(pool().submit(source.sizes, numbers)))
        assert isinstance(source, DaemonSource) and isinstance(source.connection, LoopConnection)
        return await source.connection.run(source.measuring(numbers))

    # ---- the end --------------------------------------------------------------------------

    def dissolve(self) -> None:
        """The loop was closed and left things open."""
        for connection in self._connections.values():
            connection.abandon()
        if self._engine is not None:
            self._engine.engines.close()

    def after_fork(self) -> None:
        """This process is a child. The loop's epoll is the parent's too: nothing is removed."""
        for connection in self._connections.values():
            connection.abandon()
        if self._engine is not None:
            self._engine.engines.forget()


_lock = threading.Lock()
_states: dict[asyncio.AbstractEventLoop, LoopState] = {}
_pool: ThreadPoolExecutor | None = None


def loop_state() -> LoopState:
    """Return the state of the running loop, and give back what closed loops left."""
    loop = asyncio.get_running_loop()
    found = _states.get(loop)
    if found is not None:
        return found
    with _lock:
        for closed in [other for other in _states if other.is_closed()]:
            _states.pop(closed).dissolve()
        _states[loop] = LoopState(loop)
        return _states[loop]


def pool() -> ThreadPoolExecutor:
    """Return the threads for work that would hold a loop up."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_THREADS, "ffserve-aio")
        return _pool


async def in_thread(make: Callable[[], T], drop: Callable[[T], object] | None = None) -> T:
    """Make something in a thread; if the caller is cancelled meanwhile, drop it once it is made."""
    future = pool().submit(make)

    def unwanted(done: Future[T]) -> None:
        if drop is not None and not done.cancelled() and done.exception() is None:
            drop(done.result())

    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(unwanted)
        raise


async def undisturbed(future: asyncio.Future[T]) -> T:
    """Await work that writes to memory of the caller; a cancellation takes effect after it."""
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


def _drop_loops() -> None:
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None
    for state in _states.values():
        state.after_fork()
    _states.clear()


os.register_at_fork(after_in_child=_drop_loops)
