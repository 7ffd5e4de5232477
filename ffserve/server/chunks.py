"""Chunks: read as they stand in the file, decoded beside the loop, published record by record.

The loads of a shard whose records lie in chunks come here. Neighbouring blocks are read together
as one batch of the engine, into memory of their own; a few threads verify and decode them (the
compression libraries release the GIL), each chunk straight into its part of the slot, and publish
its records, whose lengths are known from then on. A chunk that is damaged fails its own records.

What is read and not yet decoded is bounded. It never comes from what a file claims: extents were
held against the file when it was opened, and decoding ends with the slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.cache import Failure, Int64s
from ffserve.cache.shm import SharedMemory
from ffserve.cache.tables import Blocks, Directory, ShardTable
from ffserve.engine.extents import Extents, Spares
from ffserve.engine.io import Batch, Engine
from ffserve.engine.shm import publish_run
from ffserve.errors import STATUS_FORMAT, FFServeError
from ffserve.formats.base import ChunkedShard

GROUP_SIZE = 1 << 20
"""Bytes of blocks that are read as one batch and decoded by one thread, unless one is larger."""
RAW_SIZE = 64 << 20
"""Bytes that are on their way from the disk or wait to be decoded, unless one group is larger."""
SPARE_SIZE = 16 << 20
"""Bytes of that memory that are kept for the next ones."""
_THREADS = min(4, os.cpu_count() or 1)
_OURS = 1 << 63
"""Set in the tags of our batches."""

Failures = dict[int, Failure]


@dataclass(slots=True)
class _Block:
    """One block: samples [first, first + count), and the chunks [low, high) of its shard."""

    shard: ChunkedShard
    first: int
    low: int
    high: int
    begin: int
    end: int
    place: int
    """Of its slot in the arena."""
    file: int


@dataclass(slots=True, eq=False)
class _Group:
    """Blocks that are read together."""

    engine: int
    load: _Load
    blocks: list[_Block] = field(default_factory=list)
    size: int = 0
    raw: NDArray[np.uint8] | None = None
    extents: Extents | None = None


@dataclass(slots=True, eq=False)
class _Load:
    finished: Callable[[Failures], None]
    remaining: int = 0
    failures: Failures = field(default_factory=dict)


class ChunkLoader:
    """Reads chunks and decodes them into their slots.

    Args: engines: of Engines, which may grow.
    """

    def __init__(
        self, engines: list[Engine], memory: SharedMemory, directory: Directory, table: ShardTable
    ) -> None:
        self._engines = engines
        self._memory = memory
        self._directory = directory
        self._table = table
        self._waiting: deque[_Group] = deque()
        self._reading: dict[int, _Group] = {}
        self._raw_size = 0
        self._spares = Spares(SPARE_SIZE)
        self._next_tag = 0
        self._pool: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.in_flight = 0
        """Groups begun and not yet published."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._loop = loop

    def submit(self, blocks: Blocks, slots: Int64s, finished: Callable[[Failures], None]) -> None:
        """Read and decode blocks into their slots; then call `finished` in the loop's thread."""
        load = _Load(finished)
        groups: dict[int, _Group] = {}
        for engine, block in self._blocks(blocks, slots):
            size = block.end - block.begin
            group = groups.get(engine)
            if group is None or group.size + size > GROUP_SIZE:
                group = groups[engine] = _Group(engine, load)
                self._waiting.append(group)
                load.remaining += 1
            group.blocks.append(block)
            group.size += size
        self._pump()

    def _blocks(self, blocks: Blocks, slots: Int64s) -> Iterator[tuple[int, _Block]]:
        """Yield each block and the engine that reads it, in order."""
        table = self._table
        lows, highs = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
        shards = {}
        for row in np.unique(blocks.shards).tolist():
            shards[row] = shard = table.decoder(row)
            inside = blocks.shards == row
            starts = blocks.firsts[inside] - table.bases[row]
            lows[inside] = shard.chunks.holding(starts)
            highs[inside] = shard.chunks.holding(starts + blocks.counts[inside] - 1) + 1
        rows = blocks.shards
        files, engines = table.files[rows], table.engines[rows]
        extents = (blocks.firsts, lows, highs, blocks.begins, blocks.ends)
        columns = [column.tolist() for column in (*extents, slots, files, engines, rows)]
        for *place, engine, row in zip(*columns, strict=True):
            yield engine, _Block(shards[row], *place)

    def _pump(self) -> None:
        while self._waiting and (
            not self._raw_size or self._raw_size + self._waiting[0].size <= RAW_SIZE
        ):
            self._read(self._waiting.popleft())

    def _read(self, group: _Group) -> None:
        engine, blocks = self._engines[group.engine], group.blocks
        self._raw_size += group.size
        self.in_flight += 1
        group.raw = self._spares.take(group.size)
        files = np.array([block.file for block in blocks], np.int32)
        begins = np.array([block.begin for block in blocks], np.int64)
        ends = np.array([block.end for block in blocks], np.int64)
        group.extents = Extents(engine, files, begins, ends, group.raw)
        batch = group.extents.batch
        batch.tag = self._next_tag | _OURS
        self._next_tag += 1
        self._reading[batch.tag] = group
        engine.submit(batch)

    def took(self, batch: Batch) -> bool:
        """Take a batch that has ended if it is ours."""
        group = self._reading.pop(batch.tag, None)
        if group is None:
            return False
        assert group.extents is not None
        statuses = group.extents.statuses()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="ffserve-decode")
        future = self._pool.submit(self._decode, group, statuses)
        future.add_done_callback(lambda done: self._tell(group, done))
        return True

    # ---- in a thread of the pool ----------------------------------------------------------

    def _decode(self, group: _Group, statuses: list[int]) -> Failures:
        assert group.raw is not None
        failures: Failures = {}
        raw, at = group.raw.data, 0
        for block, status in zip(group.blocks, statuses, strict=True):
            size = block.end - block.begin
            if status:
                firsts = block.shard.chunks.firsts
                count = int(firsts[block.high] - firsts[block.low])
                _fail(failures, block.first, count, Failure(status))
            else:
                self._decode_block(block, raw[at : at + size], failures)
            at += size
        return failures

    def _decode_block(self, block: _Block, raw: memoryview, failures: Failures) -> None:
        chunks = block.shard.chunks
        first, place = block.first, block.place
        for chunk in range(block.low, block.high):
            count = int(chunks.firsts[chunk + 1] - chunks.firsts[chunk])
            size = int(chunks.sizes[chunk])
            begin, end = int(chunks.begins[chunk]), int(chunks.ends[chunk])
            into = self._memory.array[place : place + size]
            try:
                starts, lengths = block.shard.decode(
                    chunk, raw[begin - block.begin : end - block.begin], into
                )
            except FFServeError as error:
                _fail(failures, first, count, Failure(STATUS_FORMAT, error=error))
            except MemoryError:
                _fail(failures, first, count, Failure(-errno.ENOMEM))
            except Exception as error:
                # A request that is never answered would be worse than not knowing why.
                found = FFServeError(f"the decoder of {block.shard.format} failed: {error!r}")
                _fail(failures, first, count, Failure(STATUS_FORMAT, error=found))
            else:
                entries = self._directory.entries_memory.address
                publish_run(entries, first, place, starts, lengths)
            first += count
            place += size

    def _tell(self, group: _Group, done: Future[Failures]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody asks any more
            self._loop.call_soon_threadsafe(self._decoded, group, done)

    # ---- in the loop's thread -------------------------------------------------------------

    def _decoded(self, group: _Group, done: Future[Failures]) -> None:
        self._raw_size -= group.size
        self.in_flight -= 1
        if group.raw is not None:
            self._spares.give(group.raw)
        group.raw = None
        load = group.load
        load.failures.update(done.result())
        load.remaining -= 1
        if load.remaining == 0:
            load.finished(load.failures)
        self._pump()

    def close(self) -> None:
        """End the threads; the engines have stopped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _fail(failures: Failures, first: int, count: int, failure: Failure) -> None:
    failures.update(dict.fromkeys(range(first, first + count), failure))
