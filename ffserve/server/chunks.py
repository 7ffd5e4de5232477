"""Chunks: loads whose records are in chunks, decoded by threads and published record by record.

The chunks of a load are read as a few batches (`ffserve/decoding.py`). A thread decodes each chunk
straight into its part of the slot and publishes its records, whose lengths are known from then on.
A damaged chunk fails its own records. The bytes that are read and not yet decoded are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ffserve.cache.cache import Failure, Int64s
from ffserve.cache.shm import SharedMemory
from ffserve.cache.tables import Blocks, Directory, ShardTable
from ffserve.decoding import (
    Bytes,
    ChunkBatch,
    ChunkRun,
    DecodedChunk,
    ReusableBuffers,
    batches,
    thread_pool,
)
from ffserve.engine.io import Batch
from ffserve.engine.shm import publish_run
from ffserve.errors import STATUS_FORMAT

RAW_SIZE = 64 << 20
"""Bytes that are being read or wait to be decoded, unless one batch is larger."""
REUSED_SIZE = 16 << 20
"""Bytes of memory for them that are kept for later batches."""
_CHUNK_TAG = 1 << 63
"""Set in the tags of these batches."""

Failures = dict[int, Failure]


@dataclass(slots=True)
class _Block(ChunkRun):
    """A block of the cache: its first sample, and where its slot is in the arena."""

    first: int
    place: int


@dataclass(slots=True, eq=False)
class _Load:
    finished: Callable[[Failures], None]
    remaining: int = 0
    """Batches that have not been decoded."""
    failures: Failures = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Part:
    """A part of a load: one batch."""

    load: _Load
    engine: int
    blocks: list[_Block]
    size: int


class ChunkLoader:
    """Reads chunks and decodes them into their slots.

    Args: submit: submits a batch to the engine of this number.
    """

    def __init__(
        self,
        submit: Callable[[int, Batch], None],
        memory: SharedMemory,
        directory: Directory,
        table: ShardTable,
    ) -> None:
        self._submit = submit
        self._memory = memory
        self._directory = directory
        self._table = table
        self._waiting: deque[_Part] = deque()
        self._reading: dict[int, tuple[_Part, ChunkBatch[_Block]]] = {}
        self._raw_size = 0
        self._buffers = ReusableBuffers(REUSED_SIZE)
        self._next_tag = 0
        self._pool: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.in_flight = 0
        """Batches submitted and not yet published."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._loop = loop

    def submit(self, blocks: Blocks, slots: Int64s, finished: Callable[[Failures], None]) -> None:
        """Read and decode blocks into their slots; then call `finished` in the loop's thread."""
        load = _Load(finished)
        for engine, group in batches(self._blocks(blocks, slots)):
            size = sum(block.end - block.begin for block in group)
            self._waiting.append(_Part(load, engine, group, size))
            load.remaining += 1
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
        runs = (lows, highs, blocks.begins, blocks.ends, files, blocks.firsts, slots)
        columns = [column.tolist() for column in (*runs, engines, rows)]
        for *run, engine, row in zip(*columns, strict=True):
            yield engine, _Block(shards[row], *run)

    def _pump(self) -> None:
        while self._waiting and (
            not self._raw_size or self._raw_size + self._waiting[0].size <= RAW_SIZE
        ):
            part = self._waiting.popleft()
            self._raw_size += part.size
            self.in_flight += 1
            chunks = ChunkBatch(part.blocks, self._buffers)
            chunks.batch.tag = self._next_tag | _CHUNK_TAG
            self._next_tag += 1
            self._reading[chunks.batch.tag] = part, chunks
            self._submit(part.engine, chunks.batch)

    def took(self, batch: Batch) -> bool:
        """Take a batch that has ended if it is one of these."""
        found = self._reading.pop(batch.tag, None)
        if found is None:
            return False
        part, chunks = found
        if self._pool is None:
            self._pool = thread_pool()
        future = self._pool.submit(self._decode, chunks)
        future.add_done_callback(lambda done: self._report(part, done))
        return True

    # ---- in a thread of the pool ----------------------------------------------------------

    def _decode(self, chunks: ChunkBatch[_Block]) -> Failures:
        failures: Failures = {}
        entries = self._directory.entries_memory.address
        for block, chunk, offset, outcome in chunks.decode(self._slot):
            firsts = block.shard.chunks.firsts
            first = block.first + int(firsts[chunk] - firsts[block.low])
            if isinstance(outcome, DecodedChunk):
                publish_run(entries, first, block.place + offset, outcome.starts, outcome.lengths)
                continue
            if isinstance(outcome, int):
                failure = Failure(outcome)
            else:
                failure = Failure(STATUS_FORMAT, error=outcome)
            count = int(firsts[chunk + 1] - firsts[chunk])
            failures.update(dict.fromkeys(range(first, first + count), failure))
        return failures

    def _slot(self, block: _Block, offset: int, size: int) -> Bytes:
        place = block.place + offset
        return self._memory.array[place : place + size]

    def _report(self, part: _Part, done: Future[Failures]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._decoded, part, done)

    # ---- in the loop's thread -------------------------------------------------------------

    def _decoded(self, part: _Part, done: Future[Failures]) -> None:
        self._raw_size -= part.size
        self.in_flight -= 1
        load = part.load
        load.failures.update(done.result())
        load.remaining -= 1
        if load.remaining == 0:
            load.finished(load.failures)
        self._pump()

    def close(self) -> None:
        """End the threads; the engines have stopped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
