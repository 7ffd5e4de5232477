"""Client statistics: what was read of a data set of the daemon, counted here and reported to it.

Cached samples are entered into the counters now and then only. The latest of them are reported
before the next GET, so that the daemon's policy knows which cached samples are in use; a client
that never misses reports none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from ffserve import protocol
from ffserve.client.daemon.connection import Driver
from ffserve.dtypes import Int64s, UInt64s

COUNT_INTERVAL_S = 0.25
"""How often cached samples enter the counters, besides before a look at them, and how often a
client that only hits looks whether its daemon is there."""
TIMES_INTERVAL_S = 0.5
"""How often the duration of hits is read."""
_NONE: Int64s = np.zeros(0, np.int64)


class RecentHits:
    """The last `size` of the indices that were noted. For one thread at a time."""

    __slots__ = ("_at", "_ring", "_wrapped", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._ring = _NONE
        self._at = 0
        self._wrapped = False

    def note(self, indices: Int64s) -> None:
        """Note indices; they are copied."""
        at = self._at
        end = at + len(indices)
        if end <= len(self._ring):
            self._ring[at:end] = indices
            self._at = end
        else:
            self._wrap(indices[-self.size :])

    def _wrap(self, indices: Int64s) -> None:
        if not len(self._ring):
            self._ring = np.empty(self.size, np.int64)  # pages that are not used cost nothing
        first = min(self.size - self._at, len(indices))
        self._ring[self._at : self._at + first] = indices[:first]
        self._at += first
        if first < len(indices):
            self._wrapped = True
            self._at = len(indices) - first
            self._ring[: self._at] = indices[first:]

    def take(self) -> Int64s:
        """Return the latest indices, the last one noted last, and forget them."""
        ring, at = self._ring, self._at
        parts = (ring[at:], ring[:at]) if self._wrapped else (ring[:at],)
        self._at, self._wrapped = 0, False
        return np.concatenate(parts)


class ClientStatistics:
    """Samples and bytes since the data set was opened. May be used by threads."""

    def __init__(self, connection: Driver, dataset: int) -> None:
        self._connection = connection
        self._dataset = dataset
        self.prepared = False
        """Whether these are prepared samples."""
        self._lock = threading.Lock()
        self._hits = self._misses = self._size = 0
        self._recent = RecentHits(protocol.MAX_GET_COUNT)
        self._new_count = self._new_size = 0
        """Hits and their bytes that have not entered the counters."""
        self._count_at = time.monotonic() + COUNT_INTERVAL_S
        self.take_times: Callable[[], UInt64s | None] | None = None
        """See `MappedView.take_times`."""
        self._times_at = 0.0
        connection.statistics.add(self)

    def add_hits(self, indices: Int64s, size: int) -> None:
        """Note a batch of which every sample was cached; it enters the counters later."""
        with self._lock:
            self._recent.note(indices)
            self._new_count += len(indices)
            self._new_size += size
        if time.monotonic() > self._count_at:
            self.enter_hits()
            self._connection.check()

    def enter_hits(self) -> None:
        """Enter the hits that were noted into the counters."""
        now = time.monotonic()
        self._count_at = now + COUNT_INTERVAL_S
        with self._lock:
            hits, self._new_count = self._new_count, 0
            size, self._new_size = self._new_size, 0
            self._hits += hits
            self._size += size
            times = None
            if self.take_times is not None and now > self._times_at:
                self._times_at = now + TIMES_INTERVAL_S
                times = self.take_times()
        if times is not None:
            self._connection.channel.count_times(times)
        self._count_hits(hits, size)

    def note_hits(self, indices: Int64s) -> None:
        """Keep cached samples to be reported before the next GET."""
        with self._lock:
            self._recent.note(indices)

    def report_hits(self) -> None:
        """Queue the report of the latest hits, before a GET."""
        self.enter_hits()
        with self._lock:
            recent = self._recent.take()
        if len(recent):
            self._connection.channel.seen(self._dataset, recent)

    def count(self, hits: int, misses: int, size: int) -> None:
        """Count a request: cached samples, samples asked for, bytes of all."""
        self.count_asked(hits, misses, size)
        self._count_hits(hits, size * hits // max(1, hits + misses))

    def count_asked(self, hits: int, misses: int, size: int) -> None:
        """Count a request of which the daemon was asked for every sample, so that it knows them."""
        with self._lock:
            self._hits += hits
            self._misses += misses
            self._size += size

    def _count_hits(self, hits: int, size: int) -> None:
        prepared = self._dataset if self.prepared else None
        if hits and self._connection.channel.count_hits(hits, size, prepared):
            self._connection.report()

    def facts(self) -> dict[str, int | float | str]:
        """Return the counters."""
        self.enter_hits()
        with self._lock:
            hits, misses, size = self._hits, self._misses, self._size
        return {
            "hits": hits,
            "misses": misses,
            "samples": hits + misses,
            "bytes": size,
            "hit_rate": hits / max(1, hits + misses),
        }
