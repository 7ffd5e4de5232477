"""Chunks decoded in this process, where no daemon does it.

Chunks are read through the engine, many at a time, and decoded by a few threads, while whoever
asked goes on. Decoded ones are kept for a while, so that neighbours that are asked for next do
not decode them again; a scan in order decodes each once.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.client.source import Bytes, Int64s, Target
from ffserve.engine.codec import scatter
from ffserve.engine.extents import Extents, Spares
from ffserve.engine.io import Engine
from ffserve.errors import FFServeError, status_error
from ffserve.formats.base import ChunkedShard

KEPT_SIZE = 64 << 20
"""Bytes of decoded chunks that a source keeps; the last chunk is kept however large."""
AHEAD_SIZE = 64 << 20
"""Bytes of decoded chunks that a request has on its way at once, unless one is larger."""
GROUP_SIZE = 1 << 20
"""Bytes of chunks that are read as one batch and decoded by one thread."""
SPARE_SIZE = 8 << 20
"""Bytes of memory for chunks as they are read that a source keeps for the next ones."""
MAX_CHUNK_SIZE = 1 << 30
"""What a chunk may have, in the file or decoded; the daemon's limit is in its configuration."""

Key: TypeAlias = tuple[int, int]
"""A shard and its chunk."""

_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            count = min(4, os.cpu_count() or 1)
            _pool = ThreadPoolExecutor(count, thread_name_prefix="ffserve-decode")
        return _pool


def _in_child() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A chunk's bytes, and where its records lie in them."""

    buffer: Bytes
    starts: Int64s
    lengths: Int64s


Outcome: TypeAlias = "Decoded | FFServeError"


@dataclass(slots=True)
class _Entry:
    group: Future[list[Outcome]]
    place: int
    size: int

    def result(self) -> Outcome:
        return self.group.result()[self.place]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Records of one chunk, by their numbers in it, and the positions in a request they are for."""

    key: Key
    records: Int64s
    positions: Int64s


class ChunkStore:
    """The decoded chunks of one source.

    Args: shards: those in chunks, by their place in the data set. learned: is told the lengths of
        a chunk's records, in any thread: (shard, chunk, lengths).
    """

    def __init__(
        self, shards: dict[int, ChunkedShard], learned: Callable[[int, int, Int64s], None]
    ) -> None:
        self._shards = shards
        self._learned = learned
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._kept_size = 0
        self._spares = Spares(SPARE_SIZE)

    def wanted(self, shards: Int64s, records: Int64s, positions: Int64s) -> list[Wanted]:
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
            found.append(Wanted(key, records[rows] - first, positions[rows]))
        return found

    def size(self, key: Key) -> int:
        """Return what a chunk has when it is decoded, in bytes."""
        return int(self._shards[key[0]].chunks.sizes[key[1]])

    def fetch(self, engine: Engine, files: NDArray[np.int32], keys: list[Key]) -> list[_Entry]:
        """Have chunks read and decoded that are not here; return at once."""
        with self._lock:
            group: list[Key] = []
            size = 0
            for key in keys:
                if key in self._entries:
                    self._entries.move_to_end(key)
                    continue
                chunks = self._shards[key[0]].chunks
                more = int(chunks.ends[key[1]] - chunks.begins[key[1]])
                if group and size + more > GROUP_SIZE:
                    self._read(engine, files, group)
                    group, size = [], 0
                group.append(key)
                size += more
            if group:
                self._read(engine, files, group)
            found = [self._entries[key] for key in keys]
            while self._kept_size > KEPT_SIZE and len(self._entries) > 1:
                _, entry = self._entries.popitem(last=False)
                self._kept_size -= entry.size
            return found

    def _read(self, engine: Engine, files: NDArray[np.int32], keys: list[Key]) -> None:
        shards = [self._shards[shard] for shard, _ in keys]
        found = [(s.chunks, k) for s, (_, k) in zip(shards, keys, strict=True)]
        begins = np.array([chunks.begins[k] for chunks, k in found], np.int64)
        ends = np.array([chunks.ends[k] for chunks, k in found], np.int64)
        edges = np.cumsum(ends - begins)
        raw = self._spares.take(int(edges[-1]))
        extents = Extents(engine, files[[shard for shard, _ in keys]], begins, ends, raw)
        engine.submit(extents.batch)

        def decode() -> list[Outcome]:
            engine.wait(extents.batch)
            outcomes = [
                self._decode(key, status, raw.data[end - size : end])
                for key, status, end, size in zip(
                    keys, extents.statuses(), edges.tolist(), (ends - begins).tolist(), strict=True
                )
            ]
            self._spares.give(raw)
            return outcomes

        future = _threads().submit(decode)
        for place, key in enumerate(keys):
            size = self.size(key)
            self._entries[key] = _Entry(future, place, size)
            self._kept_size += size

    def _decode(self, key: Key, status: int, extent: memoryview) -> Outcome:
        shard = self._shards[key[0]]
        if status:
            begin = int(shard.chunks.begins[key[1]])
            error = status_error(status, path=shard.path, index=None, offset=begin)
        else:
            try:
                buffer = np.empty(self.size(key), np.uint8)
                starts, lengths = shard.decode(key[1], extent, buffer)
            except FFServeError as damage:
                error = damage
            else:
                self._learned(*key, lengths)
                return Decoded(buffer, starts, lengths)
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._kept_size -= entry.size
        return error


@dataclass(slots=True)
class ChunkRequest:
    """Records on their way out of chunks: `waiting` were not begun, `begun` are being decoded."""

    store: ChunkStore
    engine: Engine
    files: NDArray[np.int32]
    waiting: deque[Wanted]
    begun: deque[tuple[Wanted, _Entry]] = field(default_factory=deque)
    found: list[tuple[Int64s, Bytes, Int64s, Int64s]] = field(default_factory=list)
    """Positions, bytes, starts, lengths."""
    failed: dict[int, FFServeError] = field(default_factory=dict)
    _begun_size: int = 0

    def begin(self) -> None:
        """Have the next chunks read, as many as may be on their way."""
        chosen: list[Wanted] = []
        while self.waiting:
            size = self.store.size(self.waiting[0].key)
            if self._begun_size and self._begun_size + size > AHEAD_SIZE:
                break
            self._begun_size += size
            chosen.append(self.waiting.popleft())
        entries = self.store.fetch(self.engine, self.files, [wanted.key for wanted in chosen])
        self.begun.extend(zip(chosen, entries, strict=True))

    def finish(self) -> None:
        """Wait for everything."""
        whole = not self.waiting
        while self.begun:
            wanted, entry = self.begun.popleft()
            outcome = entry.result()
            self._begun_size -= self.store.size(wanted.key)
            if isinstance(outcome, FFServeError):
                self.failed.update(dict.fromkeys(wanted.positions.tolist(), outcome))
            else:
                starts = outcome.starts[wanted.records]
                lengths = outcome.lengths[wanted.records]
                buffer = outcome.buffer
                if not whole:
                    # Else a request for everything would hold everything twice.
                    buffer, starts = _packed(buffer, starts, lengths)
                self.found.append((wanted.positions, buffer, starts, lengths))
            if self.waiting and self._begun_size <= AHEAD_SIZE // 2:
                self.begin()

    def lengths(self, count: int) -> Int64s:
        """Return the lengths by position, 0 for what failed or is not ours."""
        lengths = np.zeros(count, np.int64)
        for positions, _, _, found in self.found:
            lengths[positions] = found
        return lengths

    def copy_to(self, target: Target) -> None:
        """Copy what was found to its places."""
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
