"""Chunk loader: decodes loads whose records are in chunks, and publishes them record by record.

The chunks of a load are read as a few batches (`ffserve/reads/chunks.py`). A thread decodes each
chunk straight into its part of the slot and publishes its records, whose lengths are known from
then on. A damaged chunk fails its own records only. The bytes that are read and not yet decoded are
bounded.

A chunk of a few KiB may take a second: deflate makes a thousand bytes of one, and may have to drop
them before the first record. So users take turns here as well, whoever reads: one of them has a
part of the bytes, and one thread fewer than there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ffserve.cache.cache import Load
from ffserve.cache.jobs import owner_of
from ffserve.cache.prefetch import Piece
from ffserve.cache.tables import Directory, ShardTable
from ffserve.dtypes import Bytes, Int64s
from ffserve.engine.io import EngineBatch
from ffserve.engine.shm import publish_run
from ffserve.errors import STATUS_FORMAT, Failure, FormatError
from ffserve.limits import OTHERS_SHARE
from ffserve.reads.chunks import (
    THREADS,
    ChunkBatch,
    ChunkRun,
    DecodedChunk,
    ReusableBuffers,
    batches,
    read_again,
    thread_pool,
)
from ffserve.reads.chunks import Outcome as ChunkOutcome
from ffserve.reads.records import Failures
from ffserve.reads.second_read import second_reads
from ffserve.server.reading.damage import Outcome
from ffserve.server.reading.devices import Device, Devices
from ffserve.server.reading.requests import SampleRequest
from ffserve.server.reading.statistics import Histogram
from ffserve.system.memfd import SharedMemory

RAW_SIZE = 64 << 20
"""At most this many bytes are being read or wait to be decoded, and of one user OTHERS_SHARE times
what is left, unless one batch of the user is larger."""
REUSED_SIZE = 16 << 20
"""The loader keeps this many bytes of buffers for later batches."""


@dataclass(slots=True, kw_only=True)
class _Block(ChunkRun):
    """A block of the cache: its first sample, and the offset of its slot in the arena."""

    first: int
    offset: int


@dataclass(slots=True)
class _Decoded:
    """What became of a batch. right: samples that were right at the second read only. damaged:
    chunks to be read a second time (block, number of the chunk, its offset); lost: the failures of
    their samples."""

    right: list[int] = field(default_factory=list)
    failures: Failures = field(default_factory=dict)
    damaged: list[tuple[_Block, int, int]] = field(default_factory=list)
    lost: Failures = field(default_factory=dict)


class ChunkLoader:
    """See the module's text.

    Args:
        devices: that chunks are read from. submit: submits a batch to a device.
        ended: called in the loop's thread when one of the `batches` of a load has ended.
        mending: gives `ChunkRun.mend` for an extent (device, file, load, begin, end).
        read_again: has a function called that reads damaged samples of a load a second time, and
            may wait for an origin. The third argument has their failures if it is not called.
    """

    def __init__(
        self,
        memory: SharedMemory,
        directory: Directory,
        table: ShardTable,
        devices: Devices,
        submit: Callable[[Device, EngineBatch], None],
        ended: Callable[[Load], None],
        mending: Callable[[Device, int, Load, int, int], Callable[[], bool] | None],
        read_again: Callable[[Load, Callable[[], Outcome], Failures], None],
    ) -> None:
        self._memory = memory
        self._directory = directory
        self._table = table
        self._devices = devices
        self._submit = submit
        self._ended = ended
        self._mending = mending
        self._read_again = read_again
        self._waiting: dict[str, deque[tuple[Load, Device, list[_Block], int]]] = {}
        """Batches to be read, by user: load, device, blocks, size in bytes."""
        self._reading: dict[EngineBatch, tuple[str, Load, ChunkBatch[_Block]]] = {}
        self._read: dict[str, deque[tuple[Load, ChunkBatch[_Block], float]]] = {}
        """Batches to be decoded, by user: load, chunks, end of the read."""
        self._raw_size: Counter[str] = Counter()
        self._decoders: Counter[str] = Counter()
        """Bytes and threads of each user."""
        self._ends = False
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
        waiting = self._waiting.setdefault(_user_of(load), deque())
        for device, blocks in batches(self._blocks(load, rows, file)):
            size = sum(block.end - block.begin for block in blocks)
            waiting.append((load, device, blocks, size))
            load.batches += 1
        self._pump()

    def _blocks(self, load: Load, rows: Int64s, file: int) -> Iterator[tuple[Device, _Block]]:
        """Yield each block and the device that reads it, in order."""
        table, blocks, offsets = self._table, load.blocks.take(rows), load.offsets[rows]
        lows, highs = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        files = table.files[blocks.shards]
        shards = {}
        for row in np.unique(blocks.shards).tolist():
            shards[row] = shard = table.decoder(row)
            inside = blocks.shards == row
            starts = blocks.firsts[inside] - table.bases[row]
            lows[inside] = shard.chunks.holding(starts)
            highs[inside] = shard.chunks.holding(starts + blocks.counts[inside] - 1) + 1
            if file < 0:
                device = self._devices.all[int(table.engines[row])]
                extents = blocks.begins[inside], blocks.ends[inside]
                files[inside] = device.cached.chosen(files[inside], *extents)
            else:
                files[inside] = file
        columns = lows, highs, blocks.begins, blocks.ends, files, blocks.firsts, offsets
        for row, low, high, begin, end, number, first, offset in zip(
            blocks.shards.tolist(), *(column.tolist() for column in columns), strict=True
        ):
            device = self._devices.all[int(table.engines[row])]
            yield device, _Block(
                shards[row], low, high, begin, end, number,
                partial(second_reads, device.fd(number)),
                self._mending(device, number, load, begin, end), first=first, offset=offset,
            )  # fmt: skip

    def _pump(self) -> None:
        for user, waiting in list(self._waiting.items()):
            while waiting and self._may_read(user, waiting[0][3]):
                load, device, blocks, size = waiting.popleft()
                self._raw_size[user] += size
                self.in_flight += 1
                chunks = ChunkBatch(blocks, self._buffers)
                self._reading[chunks.batch] = user, load, chunks
                self._submit(device, chunks.batch)
            if not waiting:
                del self._waiting[user]

    def _may_read(self, user: str, size: int) -> bool:
        held, left = self._raw_size[user], RAW_SIZE - self._raw_size.total()
        return not held or (size <= left and held + size <= OTHERS_SHARE * left)

    def firsts_of(self, batch: EngineBatch) -> Int64s:
        """Return the first sample of each block of a batch; nothing if the batch is not of this
        loader."""
        found = self._reading.get(batch)
        runs = [] if found is None else found[-1].runs
        return np.array([block.first for block in runs], np.int64)

    def take(self, batch: EngineBatch) -> bool:
        """Decode a batch that has ended; return False if the batch is not of this loader."""
        found = self._reading.pop(batch, None)
        if found is None:
            return False
        user, load, chunks = found
        begun = time.monotonic()
        load.read_s += begun - batch.begun
        self._read.setdefault(user, deque()).append((load, chunks, begun))
        self._decode_next()
        return True

    def _decode_next(self) -> None:
        """Let free threads decode, of the users with fewest threads first."""
        if self._pool is None:
            self._pool = thread_pool(THREADS + 1)
        while self._read and not self._ends and self._decoders.total() <= THREADS:
            user = min(self._read, key=self._decoders.__getitem__)
            if self._decoders[user] >= THREADS:
                return
            self._decoders[user] += 1
            load, chunks, begun = self._read[user].popleft()
            if not self._read[user]:
                del self._read[user]
            future = self._pool.submit(self._decode, chunks)
            future.add_done_callback(partial(self._report, user, load, chunks.size, begun))

    # ---- in a thread of the pool ----------------------------------------------------------

    def _decode(self, chunks: ChunkBatch[_Block]) -> _Decoded:
        found = _Decoded()
        for block, chunk, offset, outcome, again in chunks.decode(self._slot):
            if self._ends:
                break
            first, failures = self._enter(block, chunk, offset, outcome)
            found.right += [first] * again
            if block.mend is not None and isinstance(outcome, FormatError):
                found.damaged.append((block, chunk, offset))
                found.lost.update(failures)
            else:
                found.failures.update(failures)
        return found

    def _enter(
        self, block: _Block, chunk: int, offset: int, outcome: ChunkOutcome
    ) -> tuple[int, Failures]:
        """Publish the records of a chunk; return the first sample, and the failures of all."""
        firsts = block.shard.chunks.firsts
        first = block.first + int(firsts[chunk] - firsts[block.low])
        if isinstance(outcome, DecodedChunk):
            entries = self._directory.entries_memory.address
            publish_run(entries, first, block.offset + offset, outcome.starts, outcome.lengths)
            return first, {}
        if isinstance(outcome, int):
            failure = Failure(outcome)
        else:
            failure = Failure(STATUS_FORMAT, error=outcome)
        count = int(firsts[chunk + 1] - firsts[chunk])
        return first, dict.fromkeys(range(first, first + count), failure)

    def _mend(self, found: _Decoded) -> Outcome:
        """Read damaged chunks of remote files a second time. In a thread of the user."""
        right: list[int] = []
        mended = False
        for block, chunk, offset in found.damaged:
            # Other chunks may lie in the blocks that the first one has mended.
            mended = (block.mend is not None and block.mend()) or mended
            outcome = read_again(block, chunk, self._slot, offset)
            if outcome is not None:
                first, _ = self._enter(block, chunk, offset, outcome)
                firsts = block.shard.chunks.firsts
                for number in range(first, first + int(firsts[chunk + 1] - firsts[chunk])):
                    del found.lost[number]
                right += [first] * (not mended)
        return right, found.lost

    def _slot(self, block: _Block, offset: int, size: int) -> Bytes:
        start = block.offset + offset
        return self._memory.array[start : start + size]

    def _report(
        self, user: str, load: Load, size: int, begun: float, done: Future[_Decoded]
    ) -> None:
        if done.cancelled() or self._ends:  # the daemon ends
            return
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._decoded, user, load, size, begun, done)

    # ---- in the loop's thread -------------------------------------------------------------

    def _decoded(
        self, user: str, load: Load, size: int, begun: float, done: Future[_Decoded]
    ) -> None:
        decode_s = time.monotonic() - begun
        self.decoding.note(decode_s)
        load.decode_s += decode_s
        self._raw_size -= Counter({user: size})
        self._decoders -= Counter({user: 1})
        self.in_flight -= 1
        self._decode_next()
        found = done.result()
        load.right += found.right
        load.failures.update(found.failures)
        if found.damaged:
            self._read_again(load, partial(self._mend, found), found.lost)
        self._ended(load)
        self._pump()

    def close(self) -> None:
        """End the threads; the engines have stopped."""
        self._ends = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _user_of(load: Load) -> str:
    """Return the user whose job asked first; "" if no job did."""
    fetch = load.fetches[0]
    if isinstance(fetch, Piece):
        return fetch.progress.owner
    return owner_of(fetch.owner.job) if isinstance(fetch, SampleRequest) else ""
