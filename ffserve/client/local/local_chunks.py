"""Decoded chunks of a local source: read by an engine, decoded by threads, kept for a while.

The chunks of a request are read as a few batches (`ffserve/reads/chunks.py`) and decoded by a few
threads while the caller continues. Decoded chunks are kept for a while, so that a request for their
neighbours does not decode them again; a scan in order decodes each chunk once.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakMethod

import numpy as np

from ffserve.client.source import Target
from ffserve.dtypes import Bytes, Int64s
from ffserve.engine.codec import scatter
from ffserve.errors import FFServeError, status_error
from ffserve.formats.base import ChunkedShard
from ffserve.reads.by_device import engine_of
from ffserve.reads.chunks import (
    ChunkBatch,
    ChunkRun,
    DecodedChunk,
    Outcome,
    ReusableBuffers,
    batches,
    thread_pool,
)
from ffserve.reads.records import BatchEngine

KEPT_SIZE = 64 << 20
"""A source keeps this many bytes of decoded chunks; it keeps the last chunk however large."""
AHEAD_SIZE = 64 << 20
"""A request decodes at most this many bytes of chunks at once, unless one chunk is larger."""
REUSED_SIZE = 8 << 20
"""A source keeps this many bytes of memory for encoded chunks, to use it again."""

_lock = threading.Lock()
_pools: dict[BatchEngine, ThreadPoolExecutor] = {}
"""The threads that decode chunks for all sources of this process, by the engine that reads them:
they wait for it, so those of a device that hangs are not to hold up others."""


def in_decoding_thread(engine: BatchEngine, call: Callable[[], None]) -> None:
    """Have a function called by one of the threads that decode what this engine of the process
    reads."""
    with _lock:
        pool = _pools.get(engine)
        if pool is None:
            pool = _pools[engine] = thread_pool()
    pool.submit(call)


def _drop_threads() -> None:
    global _lock
    _lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_drop_threads)

Key: TypeAlias = tuple[int, int]
"""A shard and its chunk."""

Second: TypeAlias = Callable[[int, int], Iterable[memoryview]]
"""See `ChunkRun.second`."""
FileOf: TypeAlias = Callable[[int, int], tuple[int, Second]]
"""Gives the file for a read, by shard and offset: the engine's number, and `ChunkRun.second`."""


@dataclass(slots=True, kw_only=True)
class Chunk(ChunkRun):
    """A chunk of a shard of the data set, and what becomes of it."""

    key: Key
    decoded: Future[DecodedChunk | FFServeError]


@dataclass(frozen=True, slots=True)
class ChunkRecords:
    """Records wanted of one chunk: their numbers in it, and their positions in the request."""

    key: Key
    records: Int64s
    positions: Int64s


class ChunkCache:
    """The decoded chunks of one source.

    Args: shards: those with chunks, by their number in the data set. learned: gets the lengths of a
        chunk's records (shard, chunk, lengths), in any thread. warn: called with a shard of which a
        chunk was right at the second read only, in any thread; a method of what has this cache, and
        held weakly, so that both go with the last reference to it. in_thread: has a function called
        that waits for a batch of an engine and decodes it.
    """

    def __init__(
        self,
        shards: dict[int, ChunkedShard],
        learned: Callable[[int, int, Int64s], None],
        warn: Callable[[int], None],
        in_thread: Callable[[BatchEngine, Callable[[], None]], object],
    ) -> None:
        self._shards = shards
        self._learned = learned
        self._warn = WeakMethod(warn)
        self._in_thread = in_thread
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Future[DecodedChunk | FFServeError]] = OrderedDict()
        self._kept_size = 0
        self._buffers = ReusableBuffers(REUSED_SIZE)

    def wanted(self, shards: Int64s, records: Int64s, positions: Int64s) -> list[ChunkRecords]:
        """Sort records (numbers in their shards) by chunk."""
        chunks = np.empty(len(records), np.int64)
        for shard in np.unique(shards).tolist():
            inside = shards == shard
            chunks[inside] = self._shards[shard].chunks.holding(records[inside])
        order = np.lexsort((chunks, shards))
        changes = (np.diff(shards[order]) != 0) | (np.diff(chunks[order]) != 0)
        found = []
        for rows in np.split(order, np.flatnonzero(changes) + 1):
            key = int(shards[rows[0]]), int(chunks[rows[0]])
            first = self._shards[key[0]].chunks.firsts[key[1]]
            found.append(ChunkRecords(key, records[rows] - first, positions[rows]))
        return found

    def size(self, key: Key) -> int:
        """Return the bytes of a decoded chunk."""
        return int(self._shards[key[0]].chunks.sizes[key[1]])

    def fetch(
        self, engine: BatchEngine, file_of: FileOf, keys: list[Key]
    ) -> list[Future[DecodedChunk | FFServeError]]:
        """Start to read and decode chunks that are not kept; return at once."""
        with self._lock:
            missing = self._missing(file_of, keys)
            for reads, runs in batches((engine_of(engine, run.file), run) for run in missing):
                self._read(engine, reads, file_of, runs)
            found = [self._kept[key] for key in keys]
            while self._kept_size > KEPT_SIZE and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))
            return found

    def _drop(self, key: Key) -> None:
        if self._kept.pop(key, None) is not None:
            self._kept_size -= self.size(key)

    def _missing(self, file_of: FileOf, keys: list[Key]) -> Iterator[Chunk]:
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)
                continue
            shard, k = self._shards[key[0]], key[1]
            begin, end = int(shard.chunks.begins[k]), int(shard.chunks.ends[k])
            file = file_of(key[0], begin)
            yield Chunk(shard, k, k + 1, begin, end, *file, key=key, decoded=Future())

    def _read(
        self, engine: BatchEngine, reads: BatchEngine, file_of: FileOf, chunks: list[Chunk]
    ) -> None:
        reading = ChunkBatch(chunks, self._buffers)
        reading.batch.keep = reading.batch.keep, file_of
        engine.submit(reading.batch)
        for chunk in chunks:
            self._kept[chunk.key] = chunk.decoded
            self._kept_size += self.size(chunk.key)

        def decode() -> None:
            try:
                engine.wait(reading.batch)
                for chunk, _, _, outcome, again in reading.decode(new_memory):
                    chunk.decoded.set_result(self._outcome(chunk, outcome, again))
            except BaseException as error:  # a request must not wait for ever
                for chunk in chunks:
                    if not chunk.decoded.done():
                        chunk.decoded.set_exception(error)

        self._in_thread(reads, decode)

    def _outcome(self, chunk: Chunk, outcome: Outcome, again: bool) -> DecodedChunk | FFServeError:
        if isinstance(outcome, DecodedChunk):
            self._learned(*chunk.key, outcome.lengths)
            if again and (warn := self._warn()) is not None:
                warn(chunk.key[0])
            return outcome
        with self._lock:
            self._drop(chunk.key)
        if isinstance(outcome, int):
            return status_error(outcome, path=chunk.shard.path, index=None, offset=chunk.begin)
        return outcome


class ChunkReads:
    """The chunks of one request, of which as many are being read as AHEAD_SIZE allows.

    Args: engine, file_of: as of `ChunkCache.fetch`. wanted: the records.

    failed: errors by position.
    """

    def __init__(
        self, cache: ChunkCache, engine: BatchEngine, file_of: FileOf, wanted: list[ChunkRecords]
    ) -> None:
        self.failed: dict[int, FFServeError] = {}
        self._found: list[tuple[Int64s, Bytes, Int64s, Int64s]] = []
        """Positions, bytes, starts, lengths."""
        self._cache, self._engine, self._file_of = cache, engine, file_of
        self._waiting = deque(wanted)
        self._begun: deque[tuple[ChunkRecords, Future[DecodedChunk | FFServeError]]] = deque()
        self._begun_size = 0
        self._begin()

    def _begin(self) -> None:
        """Start to read the next chunks, as many as may be on their way."""
        chosen: list[ChunkRecords] = []
        while self._waiting:
            size = self._cache.size(self._waiting[0].key)
            if self._begun_size and self._begun_size + size > AHEAD_SIZE:
                break
            self._begun_size += size
            chosen.append(self._waiting.popleft())
        keys = [wanted.key for wanted in chosen]
        found = self._cache.fetch(self._engine, self._file_of, keys)
        self._begun.extend(zip(chosen, found, strict=True))

    def finish(self) -> None:
        """Wait for all chunks."""
        whole = not self._waiting
        while self._begun:
            wanted, decoded = self._begun.popleft()
            outcome = decoded.result()
            self._begun_size -= self._cache.size(wanted.key)
            if isinstance(outcome, FFServeError):
                self.failed.update(dict.fromkeys(wanted.positions.tolist(), outcome))
            else:
                starts = outcome.starts[wanted.records]
                lengths = outcome.lengths[wanted.records]
                buffer = outcome.buffer
                if not whole:
                    # Else a large request would hold all its samples twice.
                    buffer, starts = _packed(buffer, starts, lengths)
                self.add(wanted.positions, buffer, starts, lengths)
            if self._waiting and self._begun_size <= AHEAD_SIZE // 2:
                self._begin()

    def add(self, positions: Int64s, buffer: Bytes, starts: Int64s, lengths: Int64s) -> None:
        """Have records at some positions of the request."""
        self._found.append((positions, buffer, starts, lengths))

    def edges(self, count: int) -> Int64s:
        """Return the running sums of the lengths, 0 for records that failed."""
        lengths = np.zeros(count, np.int64)
        for positions, _, _, found in self._found:
            lengths[positions] = found
        return _edges(lengths)

    def copy_to(self, target: Target) -> None:
        """Copy the records to their destinations."""
        places = target.places()
        for positions, buffer, starts, lengths in self._found:
            scatter(buffer, starts, lengths, places[positions])


def new_memory(_run: ChunkRun, _offset: int, size: int) -> Bytes:
    """Return memory of its own for a decoded chunk."""
    return np.empty(size, np.uint8)


def _edges(lengths: Int64s) -> Int64s:
    edges = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=edges[1:])
    return edges


def _packed(buffer: Bytes, starts: Int64s, lengths: Int64s) -> tuple[Bytes, Int64s]:
    target = Target(_edges(lengths), apart=False)
    scatter(buffer, starts, lengths, target.places())
    assert target.buffer is not None
    return target.buffer, target.offsets[:-1]
