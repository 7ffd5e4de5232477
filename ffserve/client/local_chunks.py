"""Decoded chunks of a local source: read by an engine, decoded by threads, kept for a while.

The chunks of a request are read as a few batches (`ffserve/decoding.py`) and decoded by a few
threads while the caller continues. Decoded chunks are kept for a while, so that a request for their
neighbours does not decode them again; a scan in order decodes each chunk once.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ffserve.client.source import Bytes, Int64s, Target
from ffserve.decoding import (
    ChunkBatch,
    ChunkRun,
    DecodedChunk,
    ReusableBuffers,
    batches,
    thread_pool,
)
from ffserve.engine.codec import scatter
from ffserve.engine.io import Engine
from ffserve.errors import FFServeError, FormatError, status_error
from ffserve.formats.base import ChunkedShard

KEPT_SIZE = 64 << 20
"""Bytes of decoded chunks that a source keeps; the last chunk is kept however large."""
AHEAD_SIZE = 64 << 20
"""Bytes of decoded chunks that a request has on their way at once, unless one is larger."""
REUSED_SIZE = 8 << 20
"""Bytes of memory for encoded chunks that a source keeps for later ones."""

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
"""Of this process, for all sources."""


def decoding_threads() -> ThreadPoolExecutor:
    """Return the threads of this process that decode chunks."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = thread_pool()
        return _pool


def _drop_threads() -> None:
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


os.register_at_fork(after_in_child=_drop_threads)

Key: TypeAlias = tuple[int, int]
"""A shard and its chunk."""

NumberOf: TypeAlias = Callable[[int, int], int]
"""Gives the engine's number of the file for a read, by shard and offset."""

Outcome: TypeAlias = "DecodedChunk | FFServeError"


@dataclass(slots=True)
class Chunk(ChunkRun):
    """A chunk of a shard of the data set."""

    key: Key


@dataclass(slots=True)
class _Entry:
    group: Future[list[Outcome]]
    number: int
    size: int

    def result(self) -> Outcome:
        return self.group.result()[self.number]


@dataclass(frozen=True, slots=True)
class ChunkRecords:
    """Records wanted of one chunk: their numbers in it, and their positions in the request."""

    key: Key
    records: Int64s
    positions: Int64s


class ChunkCache:
    """The decoded chunks of one source.

    Args: shards: those with chunks, by their number in the data set. learned: gets the lengths of a
        chunk's records (shard, chunk, lengths), in any thread. second_read: reads and decodes a
        damaged chunk again; returns None if that fails.
    """

    def __init__(
        self,
        shards: dict[int, ChunkedShard],
        learned: Callable[[int, int, Int64s], None],
        second_read: Callable[[int, ChunkRun], DecodedChunk | None],
    ) -> None:
        self._shards = shards
        self._learned = learned
        self._second_read = second_read
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
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

    def fetch(self, engine: Engine, files: NumberOf, keys: list[Key]) -> list[_Entry]:
        """Start to read and decode chunks that are not kept; return at once."""
        with self._lock:
            for _, runs in batches((engine, run) for run in self._missing(files, keys)):
                self._read(engine, files, runs)
            found = [self._entries[key] for key in keys]
            while self._kept_size > KEPT_SIZE and len(self._entries) > 1:
                _, entry = self._entries.popitem(last=False)
                self._kept_size -= entry.size
            return found

    def _missing(self, files: NumberOf, keys: list[Key]) -> Iterator[Chunk]:
        for key in keys:
            if key in self._entries:
                self._entries.move_to_end(key)
                continue
            number, k = key
            shard = self._shards[number]
            begin, end = int(shard.chunks.begins[k]), int(shard.chunks.ends[k])
            yield Chunk(shard, k, k + 1, begin, end, files(number, begin), key)

    def _read(self, engine: Engine, files: NumberOf, chunks: list[Chunk]) -> None:
        reading = ChunkBatch(chunks, self._buffers)
        reading.batch.keep = reading.batch.keep, files
        engine.submit(reading.batch)

        def decode() -> list[Outcome]:
            engine.wait(reading.batch)
            return [
                self._outcome(chunk, found)
                for chunk, _, _, found in reading.decode(
                    lambda chunk, offset, size: np.empty(size, np.uint8)
                )
            ]

        future = decoding_threads().submit(decode)
        for number, chunk in enumerate(chunks):
            self._enter(chunk, future, number)

    def _enter(self, chunk: Chunk, group: Future[list[Outcome]], number: int) -> None:
        size = self.size(chunk.key)
        self._entries[chunk.key] = _Entry(group, number, size)
        self._kept_size += size

    def _outcome(self, chunk: Chunk, found: DecodedChunk | FFServeError | int) -> Outcome:
        if isinstance(found, FormatError):
            found = self._second_read(chunk.key[0], chunk) or found
        if isinstance(found, DecodedChunk):
            self._learned(*chunk.key, found.lengths)
            return found
        with self._lock:
            entry = self._entries.pop(chunk.key, None)
            if entry is not None:
                self._kept_size -= entry.size
        if isinstance(found, int):
            return status_error(found, path=chunk.shard.path, index=None, offset=chunk.begin)
        return found


@dataclass(slots=True)
class ChunkReads:
    """The chunks of one request: `waiting` are not being read yet, `begun` are."""

    cache: ChunkCache
    engine: Engine
    files: NumberOf
    waiting: deque[ChunkRecords]
    begun: deque[tuple[ChunkRecords, _Entry]] = field(default_factory=deque)
    found: list[tuple[Int64s, Bytes, Int64s, Int64s]] = field(default_factory=list)
    """Positions, bytes, starts, lengths."""
    failed: dict[int, FFServeError] = field(default_factory=dict)
    _begun_size: int = 0

    def begin(self) -> None:
        """Start to read the next chunks, as many as may be on their way."""
        chosen: list[ChunkRecords] = []
        while self.waiting:
            size = self.cache.size(self.waiting[0].key)
            if self._begun_size and self._begun_size + size > AHEAD_SIZE:
                break
            self._begun_size += size
            chosen.append(self.waiting.popleft())
        entries = self.cache.fetch(self.engine, self.files, [wanted.key for wanted in chosen])
        self.begun.extend(zip(chosen, entries, strict=True))

    def finish(self) -> None:
        """Wait for all chunks."""
        whole = not self.waiting
        while self.begun:
            wanted, entry = self.begun.popleft()
            outcome = entry.result()
            self._begun_size -= self.cache.size(wanted.key)
            if isinstance(outcome, FFServeError):
                self.failed.update(dict.fromkeys(wanted.positions.tolist(), outcome))
            else:
                starts = outcome.starts[wanted.records]
                lengths = outcome.lengths[wanted.records]
                buffer = outcome.buffer
                if not whole:
                    # Else a large request would hold all its samples twice.
                    buffer, starts = _packed(buffer, starts, lengths)
                self.found.append((wanted.positions, buffer, starts, lengths))
            if self.waiting and self._begun_size <= AHEAD_SIZE // 2:
                self.begin()

    def lengths(self, count: int) -> Int64s:
        """Return the lengths by position, 0 for records that failed or are not in chunks."""
        lengths = np.zeros(count, np.int64)
        for positions, _, _, found in self.found:
            lengths[positions] = found
        return lengths

    def copy_to(self, target: Target) -> None:
        """Copy the records to their destinations."""
        places = target.places()
        for positions, buffer, starts, lengths in self.found:
            scatter(buffer, starts, lengths, places[positions])


def _packed(buffer: Bytes, starts: Int64s, lengths: Int64s) -> tuple[Bytes, Int64s]:
    edges = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=edges[1:])
    target = Target(edges, apart=False)
    scatter(buffer, starts, lengths, target.places())
    assert target.buffer is not None
    return target.buffer, edges[:-1]
