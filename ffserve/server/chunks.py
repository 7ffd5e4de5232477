"""Chunk loader: decodes loads whose records are in chunks, and publishes them record by record.

The chunks of a load are read as a few batches (`ffserve/decoding.py`). A thread decodes each chunk
straight into its part of the slot and publishes its records, whose lengths are known from then on.
A damaged chunk fails its own records only. The bytes that are read and not yet decoded are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ffserve.cache.cache import Failure, Int64s, Load
from ffserve.cache.tables import Directory, ShardTable
from ffserve.decoding import (
    Bytes,
    ChunkBatch,
    ChunkRun,
    DecodedChunk,
    ReusableBuffers,
    batches,
    read_again,
    thread_pool,
)
from ffserve.engine.io import EngineBatch
from ffserve.engine.shm import publish_run
from ffserve.errors import STATUS_FORMAT, FormatError
from ffserve.memfd import SharedMemory
from ffserve.server.page_cache import Int32s
from ffserve.server.statistics import Histogram

RAW_SIZE = 64 << 20
"""Bytes that are being read or wait to be decoded, unless one batch is larger."""
REUSED_SIZE = 16 << 20
"""Bytes of memory for them that are kept for later batches."""

Failures = dict[int, Failure]


@dataclass(slots=True)
class _Block(ChunkRun):
    """A block of the cache: its first sample, and the offset of its slot in the arena."""

    first: int
    offset: int


class ChunkLoader:
    """See the module's text.

    Args:
        submit: submits a batch to the engine of this number.
        ended: called in the loop's thread when one of the `batches` of a load has ended.
        file_numbers: by which extents are read, of their engines, files, begins and ends.
        fd_of: returns the descriptor of a file that is being read (engine, file), in any thread.
        mend: called in a thread before an extent (engine, file, begin, end) is read again; returns
            whether it has been mended.
    """

    def __init__(
        self,
        submit: Callable[[int, EngineBatch], None],
        memory: SharedMemory,
        directory: Directory,
        table: ShardTable,
        ended: Callable[[Load], None],
        file_numbers: Callable[[Int32s, Int32s, Int64s, Int64s], Int32s],
        fd_of: Callable[[int, int], int],
        mend: Callable[[int, int, int, int], bool],
    ) -> None:
        self._submit = submit
        self._memory = memory
        self._directory = directory
        self._table = table
        self._ended = ended
        self._file_numbers = file_numbers
        self._fd_of = fd_of
        self._mend = mend
        self._waiting: deque[tuple[Load, int, list[_Block], int]] = deque()
        """Batches to be read: load, engine, blocks, size in bytes."""
        self._reading: dict[EngineBatch, tuple[Load, int, ChunkBatch[_Block]]] = {}
        self._raw_size = 0
        self._buffers = ReusableBuffers(REUSED_SIZE)
        self._pool: ThreadPoolExecutor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.decoding = Histogram()
        """How long chunks were decoded, from the end of their read."""
        self.in_flight = 0
        """Batches submitted and not yet published."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._loop = loop

    def submit(self, load: Load, rows: Int64s, file: int = -1) -> None:
        """Read and decode some of the blocks of a load into their slots. Args: file: to read from,
        in the place of their own."""
        for engine, blocks in batches(self._blocks(load, rows, file)):
            size = sum(block.end - block.begin for block in blocks)
            self._waiting.append((load, engine, blocks, size))
            load.batches += 1
        self._pump()

    def _blocks(self, load: Load, rows: Int64s, file: int) -> Iterator[tuple[int, _Block]]:
        """Yield each block and the engine that reads it, in order."""
        table, blocks, offsets = self._table, load.blocks.take(rows), load.offsets[rows]
        lows, highs = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        shards = {}
        for row in np.unique(blocks.shards).tolist():
            shards[row] = shard = table.decoder(row)
            inside = blocks.shards == row
            starts = blocks.firsts[inside] - table.bases[row]
            lows[inside] = shard.chunks.holding(starts)
            highs[inside] = shard.chunks.holding(starts + blocks.counts[inside] - 1) + 1
        engines = table.engines[blocks.shards]
        files = table.files[blocks.shards]
        if file < 0:
            files = self._file_numbers(engines, files, blocks.begins, blocks.ends)
        else:
            files = np.full_like(files, file)
        runs = (lows, highs, blocks.begins, blocks.ends, files, blocks.firsts, offsets)
        columns = [column.tolist() for column in (*runs, engines, blocks.shards)]
        for *run, engine, row in zip(*columns, strict=True):
            yield engine, _Block(shards[row], *run)

    def _pump(self) -> None:
        while self._waiting and (
            not self._raw_size or self._raw_size + self._waiting[0][3] <= RAW_SIZE
        ):
            load, engine, blocks, size = self._waiting.popleft()
            self._raw_size += size
            self.in_flight += 1
            chunks = ChunkBatch(blocks, self._buffers)
            self._reading[chunks.batch] = load, engine, chunks
            self._submit(engine, chunks.batch)

    def firsts_of(self, batch: EngineBatch) -> Int64s:
        """Return the first sample of each block of a batch; none: it is not one of these."""
        found = self._reading.get(batch)
        runs = [] if found is None else found[-1].runs
        return np.array([block.first for block in runs], np.int64)

    def take(self, batch: EngineBatch) -> bool:
        """Decode a batch that has ended; return False if it is not one of these."""
        found = self._reading.pop(batch, None)
        if found is None:
            return False
        load, engine, chunks = found
        begun = time.monotonic()
        load.read_s += begun - batch.begun
        if self._pool is None:
            self._pool = thread_pool()
        future = self._pool.submit(self._decode, engine, chunks)
        future.add_done_callback(lambda done: self._report(load, chunks.size, begun, done))
        return True

    # ---- in a thread of the pool ----------------------------------------------------------

    def _decode(self, engine: int, chunks: ChunkBatch[_Block]) -> tuple[list[int], Failures]:
        """Return samples that were right at the second read only, and failures."""
        right: list[int] = []
        failures: Failures = {}
        entries, mended = self._directory.entries_memory.address, False
        for block, chunk, offset, outcome in chunks.decode(self._slot):
            firsts = block.shard.chunks.firsts
            first = block.first + int(firsts[chunk] - firsts[block.low])
            if isinstance(outcome, FormatError):
                mended = self._mend(engine, block.file, block.begin, block.end) or mended
                fd = self._fd_of(engine, block.file)
                again = read_again(block, chunk, fd, self._slot, offset)
                if again is not None:
                    if not mended:
                        right.append(first)
                    outcome = again
            if isinstance(outcome, DecodedChunk):
                publish_run(entries, first, block.offset + offset, outcome.starts, outcome.lengths)
                continue
            if isinstance(outcome, int):
                failure = Failure(outcome)
            else:
                failure = Failure(STATUS_FORMAT, error=outcome)
            count = int(firsts[chunk + 1] - firsts[chunk])
            failures.update(dict.fromkeys(range(first, first + count), failure))
        return right, failures

    def _slot(self, block: _Block, offset: int, size: int) -> Bytes:
        start = block.offset + offset
        return self._memory.array[start : start + size]

    def _report(
        self, load: Load, size: int, begun: float, done: Future[tuple[list[int], Failures]]
    ) -> None:
        if done.cancelled():  # the daemon ends
            return
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._decoded, load, size, begun, done)

    # ---- in the loop's thread -------------------------------------------------------------

    def _decoded(
        self, load: Load, size: int, begun: float, done: Future[tuple[list[int], Failures]]
    ) -> None:
        decode_s = time.monotonic() - begun
        self.decoding.note(decode_s)
        load.decode_s += decode_s
        self._raw_size -= size
        self.in_flight -= 1
        right, failures = done.result()
        load.right += right
        load.failures.update(failures)
        self._ended(load)
        self._pump()

    def close(self) -> None:
        """End the threads; the engines have stopped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
