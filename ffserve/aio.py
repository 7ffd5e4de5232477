"""The reader for programs that run an event loop (asyncio's own, uvloop, any other).

    async with ffserve.aio.open("/data/train") as reader:
        batch = await reader.read_batch(indices)
        async for sample in reader: ...

Any number of requests may be on their way, over one connection per loop. Cached samples are copied
without waiting, large copies beside the loop; for the others the daemon is asked, and its answer is
awaited. Without a daemon the completions of an engine are awaited. A reader may be used from
several loops in several threads, from a loop that comes after another, in a forked child and as a
copy that was pickled: in each place it connects at its first use. When the daemon restarts, a
request that was on its way is made again as a whole, as by `ffserve.Reader`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Sequence,
)
from typing import Any, Literal, TypeVar, overload

from ffserve.client.failover import LoopSelector, OpenRequest, announce
from ffserve.client.loop import Failed, LoopState, in_thread, loop_state
from ffserve.client.source import Batch, SampleSource, Target, cut
from ffserve.dataset.fields import Rows, copies
from ffserve.dataset.layout import ShardInfo
from ffserve.dataset.paths import PathLike, expand_paths
from ffserve.dtypes import Bytes, Int64s
from ffserve.errors import ArenaError, FFServeError, ServerUnavailable, UsageError
from ffserve.reader import (
    READ_AHEAD_COUNT,
    READ_AHEAD_SIZE,
    BaseReader,
    ReadAhead,
    by_number,
    check_options,
    pieces,
    split,
)

T = TypeVar("T")


def open(
    paths: PathLike | Sequence[PathLike],
    *,
    format: str | None = None,
    server: str = "auto",
    verify: bool = True,
    on_error: Literal["raise", "skip"] = "raise",
    fields: Sequence[str] | None = None,
) -> Opening:
    """Open record files as one sequence of samples; to be awaited, or used in `async with`.

    Args: as `ffserve.open`. What is read of samples with several fields is that of `FieldReader`.
    Raises: as `ffserve.open`, when it is awaited.
    """
    return Opening(lambda: _open(paths, format, server, verify, on_error, fields))


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
    fields: Sequence[str] | None,
) -> Reader:
    suffixes = check_options(format, server, on_error)
    found = await in_thread(lambda: expand_paths(paths, suffixes=suffixes))
    tolerant = on_error == "skip"
    parts = fields is not None
    reader = Reader(OpenRequest(found, format, server, verify, tolerant, parts=parts))
    try:
        await reader._here().open()
        await reader._find_folders()
        await reader._find_fields(fields)
        if tolerant:
            await reader._leave_out_damaged()
    except BaseException:
        await reader.aclose()
        raise
    return reader


class Reader(BaseReader):
    """Samples of a data set by index. Made by `ffserve.aio.open`."""

    _name = "ffserve.aio.Reader"

    def _set_up(self) -> None:
        super()._set_up()
        self._selectors: dict[asyncio.AbstractEventLoop, LoopSelector] = {}

    def _here(self) -> LoopSelector:
        """Return the reader's source selection in the running loop."""
        state = loop_state()
        selector = self._selectors.get(state.loop)
        if selector is None:
            self._drop_closed_loops()
            selector = LoopSelector(state, self._request, self._announced)
            self._selectors[state.loop] = selector
        return selector

    async def _retrying(
        self, attempt: Callable[[LoopState, SampleSource], Coroutine[Any, Any, T]]
    ) -> T:
        """Make a request; if the daemon goes away meanwhile, or its arena has no memory for a
        sample, make it again as a whole."""
        selector = self._here()
        while True:
            source = await selector.current()
            try:
                return await attempt(selector.state, source)
            except (ServerUnavailable, ArenaError) as error:
                spare = await selector.after(source, error)
            if spare is not None:
                return await attempt(selector.state, spare)

    def _drop_closed_loops(self) -> None:
        """Close the sources of loops that were closed without `aclose`; `loop_state` has closed
        their connections."""
        for loop in list(self._selectors):
            if loop.is_closed() and (selector := self._selectors.pop(loop, None)) is not None:
                selector.abandon()

    @property
    def source(self) -> str:
        """Where samples come from in this loop, such as "daemon /run/ffserve/ffserve.sock"."""
        source = self._here().source
        return source.description if source is not None else "not opened in this loop yet"

    @property
    def shards(self) -> list[ShardInfo]:
        """The files, in order."""
        source = self._here().source
        if source is None:
            raise UsageError("read from this loop first", hint="await reader.sizes([])")
        return self._shown_shards(source.shards)

    async def _find_folders(self) -> None:
        search = self._folder_search(await self._here().current())
        if len(search.last):
            sizes = (await self._here().current()).estimate(search.last)
            asked = await in_thread(lambda: search.look(sizes))
            unknown = Rows(search.hear(await self._blocks(asked) if asked else []))
            reading = self._in_order(unknown, READ_AHEAD_COUNT, READ_AHEAD_SIZE)
            async with contextlib.aclosing(reading) as batches:
                async for rows, batch, failed in batches:
                    search.take(rows.numbers, batch, failed)
            self._hide_folders(search.found)

    async def _find_fields(self, fields: Sequence[str] | None) -> None:
        source = await self._here().current()
        if blocks := self._abouts(source, fields):
            self._set_fields(source, await self._blocks(blocks), fields)

    async def _blocks(self, blocks: list[tuple[int, int]]) -> list[bytes]:
        return await self._retrying(lambda state, source: state.named(source, blocks))

    async def keys(self, indices: Any) -> list[str]:
        """Return the keys of samples of tar files, as `ffserve.Reader.keys`."""
        names, numbers = self._named_records(indices)
        missing = names.missing(numbers)
        blocks = await self._blocks(missing) if missing else []
        return self._keys_of(names.take(numbers, missing, blocks))

    async def names(self) -> list[str]:
        """Return the names of the samples, as `ffserve.Reader.names`."""
        if self._member_names is not None:
            if self._names is None:
                self._names = await self.keys(range(len(self)))
            return self._names
        if not len(self._folders):
            return []
        if self._names is None:
            target, failed = await self._retrying(
                lambda state, source: state.read(source, self._folders, apart=False)
            )
            assert target.buffer is not None
            shards = (await self._here().current()).shards
            batch = Batch(target.buffer, target.offsets)
            return await in_thread(lambda: self._set_names(shards, batch, failed))
        return self._names

    async def labels(self, indices: Any) -> list[dict[str, Any]]:
        """Return the labels of samples, as `ffserve.Reader.labels`."""
        await self.names()
        return self._labels_of(indices)

    async def index_of(self, name: str) -> int:
        """Return the index of the sample with a name, as `ffserve.Reader.index_of`."""
        return self._index_of(name, await self.names())

    # ---- reading --------------------------------------------------------------------------

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
        rows = self._rows(indices)
        target, failed = await self._retrying(
            lambda state, source: state.read(source, rows.numbers, apart=True)
        )
        assert target.arrays is not None
        self._used(rows.numbers)
        mixed = self._mixed(target.arrays, failed, rows.numbers, errors)
        samples: list[Any] = rows.by_field(mixed)
        return samples

    async def read_batch(self, indices: Any, *, out: Bytes | None = None) -> Batch:
        """Read samples into one buffer.

        Args, Returns, Raises: as `ffserve.Reader.read_batch`. Cancelled with an `out` it ends once
            nothing is written there any more.
        """
        rows = self._rows(indices, together=True)
        target, failed = await self._retrying(
            lambda state, source: state.read(source, rows.numbers, apart=False, out=out)
        )
        self._used(rows.numbers)
        self._raise_first(failed, rows.numbers)
        assert target.buffer is not None
        batch: Batch = rows.divided(Batch(target.buffer, target.offsets))
        return batch

    async def __aiter__(self) -> AsyncIterator[Bytes]:
        async with contextlib.aclosing(self.batches()) as batches:
            async for batch in batches:
                for sample in copies(batch):
                    yield sample

    async def batches(
        self, indices: Any = None, *, count: int = READ_AHEAD_COUNT, size: int = READ_AHEAD_SIZE
    ) -> Any:
        """Read in order with read-ahead, as `ffserve.Reader.batches`; an async generator."""
        async with contextlib.aclosing(
            self._in_order(self._rows_or_all(indices), count, size)
        ) as answers:
            async for part, batch, failed in answers:
                self._raise_first(failed, part.numbers)
                yield part.by_field(batch)

    async def _in_order(
        self, rows: Rows, count: int, size: int
    ) -> AsyncGenerator[tuple[Rows, Batch, Failed], None]:
        ahead = ReadAhead(self._start)
        try:
            for some, last in pieces(rows):
                sizes = some.sums((await self._here().current()).estimate(some.numbers))
                for parts, task in ahead.through(cut(some, sizes, count, size), last=last):
                    target, failed = await task
                    assert target.buffer is not None
                    for answer in split(parts, Batch(target.buffer, target.offsets), failed):
                        yield answer
        finally:
            for _, task in ahead.begun:
                task.cancel()
            await asyncio.gather(*(task for _, task in ahead.begun), return_exceptions=True)

    def _start(self, numbers: Int64s) -> asyncio.Task[tuple[Target, Failed]]:
        reading = self._retrying(lambda state, source: state.read(source, numbers, apart=False))
        return asyncio.ensure_future(reading)

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
        announcement = self._checked_order(order, epoch, name, replacement)
        await self._retrying(lambda _, source: announce(source, announcement))
        self._announced.add(*announcement)

    def reached(self, epoch: int, position: int) -> None:
        """Tell the daemon how far the job has come, as `ffserve.Reader.reached`."""
        epoch, position = self._counted(epoch, position)
        self._announced.reached(epoch, position)
        source = self._here().source
        if source is not None:
            source.reached(epoch, position)

    def _used(self, numbers: Int64s) -> None:
        due = self._announced.read(numbers) if self._announced.any else None
        source = self._here().source
        if due is not None and source is not None:
            source.reached(*due)

    # ---- about the samples ----------------------------------------------------------------

    async def sizes(self, indices: Any = None) -> Int64s:
        """Return lengths in bytes, int64[n], as `ffserve.Reader.sizes`; None for all."""
        rows = self._rows_or_all(indices)
        with self._by_index():
            sizes = await self._retrying(lambda state, source: state.sizes(source, rows.numbers))
        return rows.sums(sizes)

    async def _leave_out_damaged(self) -> None:
        bad: dict[int, FFServeError] = {}
        everything = self._in_order(self._rows_or_all(), READ_AHEAD_COUNT, READ_AHEAD_SIZE)
        async for part, _, failed in everything:
            bad |= by_number(part, failed)
        self._leave_out(bad)

    def stats(self) -> dict[str, int | float | str]:
        """Return what was read through this reader in this loop, as `ffserve.Reader.stats`."""
        selection = self._here().selection
        if selection.source is None:
            raise UsageError("this event loop has not read anything yet")
        return self._summed(selection.source, selection.spare)

    # ---- life -----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Give everything back, in every loop; idempotent. Later reads raise UsageError."""
        self._request.closed = True
        here = loop_state().loop
        self._drop_closed_loops()
        selectors, self._selectors = self._selectors, {}
        for loop, selector in selectors.items():
            for source in selector.close():
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
        selectors, self._selectors = self._selectors, {}
        self._announced.forget()
        for selector in selectors.values():
            selector.abandon()
