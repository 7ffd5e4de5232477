"""The reader for programs that run an event loop (asyncio's own, uvloop, any other).

    async with ffserve.aio.open("/data/train") as reader:
        batch = await reader.read_batch(indices)
        async for sample in reader: ...

Any number of requests may be on their way, over one connection a loop. What is in memory is copied
without waiting, large copies beside the loop; what is not is one frame to the daemon, and its
answer is awaited. Without a daemon the engine's completions are awaited likewise. A reader may be
used from several loops in several threads, from a loop that comes after another, in a forked child
and as a copy that was pickled: in each place it connects at its first use. When the daemon restarts
the request that was on its way is made again as a whole, as by `ffserve.Reader`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, overload

import numpy as np

from ffserve.client import choice, connections
from ffserve.client.announced import Announced, check_count, check_order
from ffserve.client.base import (
    READ_AHEAD_COUNT,
    READ_AHEAD_SIZE,
    RETURN_AFTER_S,
    SIZES_AT_ONCE,
    TOGETHER_COUNT,
    BaseReader,
    batches_ahead,
    check_options,
    cut,
    taken_apart,
    together,
)
from ffserve.client.choice import RECONNECT_S, Choosing, Origin
from ffserve.client.daemon import source_over
from ffserve.client.inline import InlineSource
from ffserve.client.local import ChunkedPending, LocalPending, LocalSource
from ffserve.client.loop import Home, LoopConnection, home, in_thread, pool, undisturbed
from ffserve.client.remote import Awaited, RemotePending, RemoteSource, Steps
from ffserve.client.source import Batch, Bytes, Int64s, Source
from ffserve.dataset import PathLike, ShardInfo, expand_paths
from ffserve.engine.ring import probe
from ffserve.errors import FFServeError, ServerUnavailable, UsageError
from ffserve.places import find_socket

T = TypeVar("T")
Failed: TypeAlias = dict[int, FFServeError]
"""What could not be read, by position."""

LARGE_COPY_SIZE = 1024 * 1024
"""Bytes from which on a copy leaves the loop to others. Copying so much takes 0.12 ms (ratios in
docs/decisions/README.md), which is what the way to a thread and back costs too."""


def open(
    paths: PathLike | Sequence[PathLike],
    *,
    format: str | None = None,
    server: str = "auto",
    verify: bool = True,
    on_error: Literal["raise", "skip"] = "raise",
) -> Opening:
    """Open record files as one sequence of samples; to be awaited, or used in `async with`.

    Args: as `ffserve.open`.
    Raises: as `ffserve.open`, when it is awaited.
    """
    return Opening(lambda: _open(paths, format, server, verify, on_error))


class Opening:
    """What `open` returns: `await` it for the reader, or have `async with` close it as well."""

    def __init__(self, make: Callable[[], Awaitable[Reader]]) -> None:
        self._make = make
        self._reader: Reader | None = None

    def __await__(self) -> Generator[Any, None, Reader]:
        return self._make().__await__()

    async def __aenter__(self) -> Reader:
        self._reader = await self._make()
        return self._reader

    async def __aexit__(self, *exc: object) -> None:
        assert self._reader is not None
        await self._reader.aclose()


async def _open(
    paths: PathLike | Sequence[PathLike],
    format: str | None,
    server: str,
    verify: bool,
    on_error: Literal["raise", "skip"],
) -> Reader:
    suffixes = check_options(format, server, on_error)
    found = await in_thread(lambda: expand_paths(paths, suffixes=suffixes), _nothing)
    tolerant = on_error == "skip"
    reader = Reader(found, format, server, verify, tolerant)
    try:
        await reader._take_in(await reader._choose(choice.first(server, 0.0)))
        if tolerant:
            await reader._leave_out_damaged()
    except BaseException:
        await reader.aclose()
        raise
    return reader


@dataclass(slots=True)
class _Place:
    """What a reader has in one event loop."""

    home: Home
    source: Source | None = None
    away_since: float | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    searches: int = 0
    failure: FFServeError | None = None
    """Of the last search for a source."""
    copied: int = 0
    """Bytes copied since the loop was last left to others."""


class Reader(BaseReader):
    """Samples of a data set by index. Made by `ffserve.aio.open`."""

    def __init__(
        self,
        paths: tuple[str, ...],
        format: str | None,
        server: str,
        verify: bool,
        tolerant: bool,
    ) -> None:
        super().__init__(paths, format, server, verify, tolerant)
        self._set_up()

    def _set_up(self) -> None:
        self._places: dict[asyncio.AbstractEventLoop, _Place] = {}
        self._announced = Announced()
        connections.after_fork(self)

    # ---- where the samples come from ------------------------------------------------------

    def _place(self) -> _Place:
        here = home()
        place = self._places.get(here.loop)
        if place is None:
            self._drop_closed_loops()
            place = self._places[here.loop] = _Place(here)
        return place

    def _drop_closed_loops(self) -> None:
        """Close what loops left that ended without `aclose`; `home` has ended what was on its
        way."""
        for loop in [loop for loop in self._places if loop.is_closed()]:
            source = self._places.pop(loop).source
            if source is not None:
                source.after_fork()
                source.close()

    async def _choose(self, choosing: Choosing[Source]) -> Source:
        try:
            step = next(choosing)
            while True:
                try:
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                        step = next(choosing)
                        continue
                    opened = self._open_remote() if step is Origin.REMOTE else self._open_local()
                    source = await opened
                except FFServeError as error:
                    step = choosing.throw(error)
                else:
                    step = choosing.send(source)
        except StopIteration as end:
            chosen: Source = end.value
            return chosen

    async def _open_remote(self) -> Source:
        connection = await home().connect(find_socket(self._socket))
        try:
            opened = await connection.opened(
                self._paths, self._format, self._verify, self._tolerant
            )
            return source_over(connection, opened, self._paths)
        except BaseException:
            connection.leave()
            raise

    async def _open_local(self) -> Source:
        await in_thread(probe, _nothing)
        engine = home().engine().engine
        return await in_thread(
            lambda: LocalSource(
                self._paths, self._format, self._verify, self._tolerant, lambda: engine
            ),
            LocalSource.close,
        )

    async def _take_in(self, source: Source) -> None:
        try:
            if self._closed:
                raise UsageError("this reader is closed")
            self._check_content(source)
        except BaseException:
            source.close()
            raise
        if self._announced:
            # Of this reader's orders another daemon knows nothing. They are of use, not needed.
            with contextlib.suppress(FFServeError):
                for announcement in self._announced.orders():
                    await self._tell(source, announcement)
                source.reached(*self._announced.position)
        self._place().source = source

    async def _current(self) -> Source:
        place = self._place()
        source = place.source
        if source is not None and (place.away_since is None or not await self._look_again(place)):
            return source
        async with self._alone(place):
            if place.source is None:
                patience_s = RECONNECT_S["require"]
                await self._take_in(await self._choose(choice.first(self._server, patience_s)))
            assert place.source is not None
            return place.source

    @contextlib.asynccontextmanager
    async def _alone(self, place: _Place) -> AsyncIterator[None]:
        """Look for a source for all; who waited while that failed is told the same."""
        asked = place.searches
        async with place.lock:
            if self._closed:
                raise UsageError("this reader is closed")
            if place.failure is not None and asked < place.searches:
                raise place.failure.located()
            place.searches += 1
            place.failure = None
            try:
                yield
            except FFServeError as error:
                place.failure = error
                raise

    async def _look_again(self, place: _Place) -> bool:
        """Whether the daemon that went away is back; looked for now and then."""
        since = place.away_since
        if since is None or time.monotonic() - since < RETURN_AFTER_S:
            return False
        place.away_since = time.monotonic()
        async with place.lock:
            try:
                source = await self._open_remote()
            except choice.NOT_SERVED:
                return False
            old = place.source
            await self._take_in(source)
            place.away_since = None
            if old is not None:
                self._retire(old)
            return True

    async def _replace(self, lost: Source) -> None:
        """The daemon is gone: wait for the next one, or read by ourselves."""
        place = self._place()
        async with self._alone(place):
            if place.source is not lost:
                return
            self._retire(lost)
            place.source = None
            source = await self._choose(choice.after_loss(self._server))
            if isinstance(source, LocalSource):
                place.away_since = time.monotonic()
            await self._take_in(source)

    def _retire(self, source: Source) -> None:
        self._add_totals(source)
        source.close()

    async def _retrying(self, attempt: Callable[[Source], Awaitable[T]]) -> T:
        """Make a request; when the daemon goes away meanwhile, make it again as a whole."""
        while True:
            source = await self._current()
            try:
                return await attempt(source)
            except ServerUnavailable:
                if isinstance(source, LocalSource):
                    if source is self._place().source:
                        raise
                    continue
                await self._replace(source)

    @property
    def source(self) -> str:
        """Where samples come from in this loop, such as "daemon /run/ffserve/ffserve.sock"."""
        source = self._place().source
        return source.description if source is not None else "not opened in this loop yet"

    @property
    def shards(self) -> list[ShardInfo]:
        """The files, in order."""
        source = self._place().source
        if source is None:
            raise UsageError("read from this loop first", hint="await reader.sizes([])")
        return list(source.shards)

    # ---- reading --------------------------------------------------------------------------

    def _start(
        self, source: Source, numbers: Int64s, *, apart: bool, out: Bytes | None = None
    ) -> _Request:
        pending = source.start(numbers, apart=apart, out=out)
        ended = None
        if isinstance(pending, LocalPending) and pending.batch is not None:
            ended = self._place().home.engine().watch(pending.batch)
        return _Request(source, pending, ended, keeps_out=out is not None)

    async def _finish(self, request: _Request) -> dict[int, FFServeError]:
        source, pending = request.source, request.pending
        if isinstance(source, LocalSource):
            if isinstance(pending, ChunkedPending):
                request.over = True
                return await undisturbed(asyncio.wrap_future(pool().submit(source.finish, pending)))
            if request.ended is not None:
                await asyncio.shield(request.ended)
            request.over = True
            return source.collect(pending)
        assert isinstance(source, RemoteSource)
        failed = await self._run(source, pending, source.steps(pending))
        request.over = True
        return failed

    async def _run(
        self, source: RemoteSource, pending: RemotePending, steps: Steps
    ) -> dict[int, FFServeError]:
        connection = source.connection
        assert isinstance(connection, LoopConnection)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Awaited):
                    step = steps.send(await connection.ready(step.tag))
                else:
                    if step.pause_s:
                        await asyncio.sleep(step.pause_s)
                    step = steps.send(await self._copy(source, pending, step.positions))
        except StopIteration as end:
            failed: dict[int, FFServeError] = end.value
            return failed

    async def _copy(
        self, source: RemoteSource, pending: RemotePending, positions: Int64s | None
    ) -> Int64s:
        offsets = pending.target.offsets
        if positions is None:
            size = int(offsets[-1])
        else:
            size = int((offsets[positions + 1] - offsets[positions]).sum())
        if size >= LARGE_COPY_SIZE:
            return await undisturbed(
                asyncio.wrap_future(pool().submit(source.copy, pending, positions))
            )
        place = self._place()
        place.copied += size
        if place.copied >= LARGE_COPY_SIZE:
            # Who reads nothing but what is there would never let anybody else run.
            place.copied = 0
            await asyncio.sleep(0)
        return source.copy(pending, positions)

    async def _settle(self, request: _Request) -> None:
        """Nobody wants this request any more: give back its pins, and the caller his buffer."""
        if request.over:
            return
        source, pending = request.source, request.pending
        request.over = True
        if isinstance(source, RemoteSource):
            connection = source.connection
            assert isinstance(connection, LoopConnection)
            for tag in source.give_up(pending):
                connection.give_up(tag)
            return
        assert isinstance(source, LocalSource)
        if request.ended is None:
            source.collect(pending)
            return
        request.ended.add_done_callback(lambda _: source.collect(pending))
        if request.keeps_out:
            # The reads go straight to the caller's buffer, and cannot be called back.
            await undisturbed(request.ended)

    async def _whole(
        self, source: Source, numbers: Int64s, *, apart: bool, out: Bytes | None = None
    ) -> tuple[Any, dict[int, FFServeError]]:
        request = self._start(source, numbers, apart=apart, out=out)
        try:
            failed = await self._finish(request)
        finally:
            await self._settle(request)
        return request.pending.target, failed

    @overload
    async def read(self, indices: Any, *, errors: Literal["raise"] = "raise") -> list[Bytes]: ...
    @overload
    async def read(
        self, indices: Any, *, errors: Literal["return"]
    ) -> list[Bytes | FFServeError]: ...
    async def read(
        self, indices: Any, *, errors: Literal["raise", "return"] = "raise"
    ) -> list[Bytes] | list[Bytes | FFServeError]:
        """Read samples.

        Args, Returns, Raises: as `ffserve.Reader.read`. A cancelled read leaves nothing behind.
        """
        numbers = self._numbers(indices)
        target, failed = await self._retrying(
            lambda source: self._whole(source, numbers, apart=True)
        )
        self._used(numbers)
        return self._mixed(target.arrays, failed, numbers, errors)

    async def read_batch(self, indices: Any, *, out: Bytes | None = None) -> Batch:
        """Read samples into one buffer.

        Args, Returns, Raises: as `ffserve.Reader.read_batch`. Cancelled with an `out` it ends once
            nothing is written there any more.
        """
        numbers = self._numbers(indices)
        target, failed = await self._retrying(
            lambda source: self._whole(source, numbers, apart=False, out=out)
        )
        self._used(numbers)
        self._raise_first(failed, numbers)
        return Batch(target.buffer, target.offsets)

    async def __aiter__(self) -> AsyncIterator[Bytes]:
        async with contextlib.aclosing(self.batches()) as batches:
            async for batch in batches:
                for sample in batch:
                    yield sample.copy()

    async def batches(
        self, indices: Any = None, *, count: int = READ_AHEAD_COUNT, size: int = READ_AHEAD_SIZE
    ) -> Any:
        """Read in order with read-ahead, as `ffserve.Reader.batches`; an async generator."""
        numbers = self._all_numbers() if indices is None else self._numbers(indices)
        ahead: deque[tuple[list[Int64s], asyncio.Task[tuple[Batch, Failed]]]] = deque()
        most_together = max(count, TOGETHER_COUNT)
        try:
            async with contextlib.aclosing(self._estimated(numbers)) as estimated:
                async for some, sizes in estimated:
                    for parts, total in together(cut(some, sizes, count, size)):
                        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
                        ahead.append((parts, asyncio.ensure_future(self._batch(whole))))
                        if len(ahead) >= batches_ahead(most_together, total):
                            for batch in self._intact_of(ahead[0][0], *await ahead[0][1]):
                                yield batch
                            ahead.popleft()
            while ahead:
                for batch in self._intact_of(ahead[0][0], *await ahead[0][1]):
                    yield batch
                ahead.popleft()
        finally:
            for _, task in ahead:
                task.cancel()
            await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)

    def _intact_of(self, parts: list[Int64s], batch: Batch, failed: Failed) -> Iterator[Batch]:
        for part, some, errors in taken_apart(parts, batch, failed):
            self._raise_first(errors, part)
            yield some

    async def _batch(self, numbers: Int64s) -> tuple[Batch, Failed]:
        target, failed = await self._retrying(
            lambda source: self._whole(source, numbers, apart=False)
        )
        return Batch(target.buffer, target.offsets), failed

    async def _estimated(self, numbers: Int64s) -> AsyncGenerator[tuple[Int64s, Int64s], None]:
        """Yield some samples after the other with about their sizes."""
        for start in range(0, len(numbers), SIZES_AT_ONCE):
            some = numbers[start : start + SIZES_AT_ONCE]
            yield some, await self._retrying(estimating(some))

    # ---- the order ------------------------------------------------------------------------

    async def announce(
        self,
        order: Any,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Tell the daemon which samples this job will ask for, in order.

        Args, Raises: as `ffserve.Reader.announce`.
        """
        numbers = self._numbers(order)
        epoch = check_count("epoch", epoch)
        check_order(numbers, self._count, name, replacement)
        announcement = (numbers, epoch, name, replacement)
        await self._retrying(lambda source: self._tell(source, announcement))
        self._announced.add(epoch, numbers, name, replacement)

    async def _tell(
        self, source: Source, announcement: tuple[Int64s, int, str | None, bool]
    ) -> None:
        if isinstance(source, RemoteSource):
            assert isinstance(source.connection, LoopConnection)
            await source.connection.announced(source.dataset, *announcement)

    def reached(self, epoch: int, position: int) -> None:
        """Tell the daemon how far the job has come, as `ffserve.Reader.reached`."""
        epoch, position = check_count("epoch", epoch), check_count("position", position)
        self._announced.told(epoch, position)
        source = self._place().source
        if source is not None:
            source.reached(epoch, position)

    def _used(self, numbers: Int64s) -> None:
        due = self._announced.read(numbers) if self._announced else None
        source = self._place().source
        if due is not None and source is not None:
            source.reached(*due)

    # ---- about the samples ----------------------------------------------------------------

    async def _sizes_of(self, numbers: Int64s | None) -> Int64s:
        async def attempt(source: Source) -> Int64s:
            if isinstance(source, InlineSource):
                assert isinstance(source.connection, LoopConnection)
                steps = source.looking_up(numbers)
                try:
                    step = next(steps)
                    while True:
                        step = steps.send(await source.connection.answer(step.tag, step.kind))
                except StopIteration as end:
                    sizes: Int64s = end.value[1]
                    return sizes
            if not isinstance(source, RemoteSource):
                assert isinstance(source, LocalSource)
                if source.knows_sizes:
                    return source.sizes(numbers)
                return await undisturbed(asyncio.wrap_future(pool().submit(source.sizes, numbers)))
            pending = source.start_sizes(numbers)
            if pending is not None:
                request = _Request(source, pending, None, keeps_out=False)
                try:
                    await self._run(source, pending, source.sizes_steps(pending))
                    request.over = True
                finally:
                    await self._settle(request)
            return source.known_sizes(numbers)

        return await self._retrying(attempt)

    async def sizes(self, indices: Any = None) -> Int64s:
        """Return lengths in bytes, int64[n], as `ffserve.Reader.sizes`; None for all."""
        return await self._sizes_of(self._intact if indices is None else self._numbers(indices))

    async def _leave_out_damaged(self) -> None:
        bad: dict[int, FFServeError] = {}
        async for some, sizes in self._estimated(self._all_numbers()):
            for part, _ in cut(some, sizes, READ_AHEAD_COUNT, READ_AHEAD_SIZE):
                got = await self.read(part, errors="return")
                for number, sample in zip(part.tolist(), got, strict=True):
                    if isinstance(sample, FFServeError):
                        bad[number] = sample
        self._leave_out(bad)

    def stats(self) -> dict[str, int | float | str]:
        """Return what was read through this reader in this loop, as `ffserve.Reader.stats`."""
        source = self._place().source
        if source is None:
            raise UsageError("nothing was read from this loop yet")
        return self._summed(source)

    # ---- life -----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Give everything back, in every loop; idempotent. Later reads raise UsageError."""
        self._closed = True
        here = home().loop
        self._drop_closed_loops()
        places, self._places = self._places, {}
        for loop, place in places.items():
            source = place.source
            if source is None:
                continue
            if loop is here:
                source.close()
            else:
                loop.call_soon_threadsafe(source.close)

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def after_fork(self) -> None:
        """This process is a child: connect anew at the next use."""
        places, self._places = self._places, {}
        self._announced = Announced()
        for place in places.values():
            if place.source is not None:
                place.source.after_fork()

    def __getstate__(self) -> dict[str, Any]:
        state = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_places", "_announced")
        }
        return {**state, "_totals": {}, "job": connections.job_name()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        connections.join_job(state.pop("job"))
        self.__dict__.update(state)
        self._set_up()

    def __repr__(self) -> str:
        more = f" and {len(self._paths) - 1} more" if len(self._paths) > 1 else ""
        return f"<ffserve.aio.Reader of {len(self)} samples in {self._paths[0]}{more}>"


@dataclass(slots=True)
class _Request:
    """A request that was started. Whoever started it finishes it, and settles it in any case."""

    source: Source
    pending: Any
    ended: asyncio.Future[None] | None
    keeps_out: bool
    over: bool = False


def estimating(numbers: Int64s) -> Callable[[Source], Awaitable[Int64s]]:
    """Return what asks a source for estimates."""

    async def attempt(source: Source) -> Int64s:
        return source.estimate(numbers)

    return attempt


def _nothing(made: object) -> None:
    """What was made needs no undoing."""
