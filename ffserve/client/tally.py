"""What was read of a data set of the daemon: counted here, and told to the daemon.

What was copied without asking enters the counters now and then only, and the latest of it goes
out before the next GET, so that the daemon knows what was used of what it keeps.
"""

from __future__ import annotations

import threading
import time

from ffserve import protocol
from ffserve.client.connection import Connection
from ffserve.client.recent import Recent
from ffserve.client.source import Int64s

COUNT_AFTER_S = 1.0
"""What was copied without asking enters the counters so often, and before a look at them."""


class Tally:
    """Samples and bytes since the data set was opened. May be used by threads."""

    def __init__(self, connection: Connection, dataset: int) -> None:
        self._connection = connection
        self._dataset = dataset
        self._lock = threading.Lock()
        self._hits = self._misses = self._size = 0
        self._recent = Recent(protocol.MAX_GET_COUNT)
        self._fresh_count = self._fresh_size = 0
        """Hits and their bytes that are not in the counters yet."""
        self._count_at = time.monotonic() + COUNT_AFTER_S

    def took(self, indices: Int64s, size: int) -> None:
        """Note a batch that was all in memory, to be entered into the counters later."""
        with self._lock:
            self._recent.note(indices)
            self._fresh_count += len(indices)
            self._fresh_size += size
        if time.monotonic() > self._count_at:
            self.enter_fresh()

    def enter_fresh(self) -> None:
        """Enter what was noted into the counters."""
        self._count_at = time.monotonic() + COUNT_AFTER_S
        with self._lock:
            hits, self._fresh_count = self._fresh_count, 0
            total, self._fresh_size = self._fresh_size, 0
            self._hits += hits
            self._size += total
        if hits:
            self._connection.count_hits(hits, total)

    def note_seen(self, hits: Int64s) -> None:
        """Keep the latest hits for the next GET; who never sends one need not report any."""
        with self._lock:
            self._recent.note(hits)

    def tell_seen(self) -> None:
        """Report the latest hits, before a GET."""
        self.enter_fresh()
        with self._lock:
            seen = self._recent.take()
        if len(seen):
            self._connection.seen(self._dataset, seen)

    def count(self, hits: int, misses: int, size: int) -> None:
        """Count a request: samples found in memory, samples asked for, bytes of all."""
        self.count_asked(hits, misses, size)
        if hits:
            self._connection.count_hits(hits, size * hits // (hits + misses))

    def count_asked(self, hits: int, misses: int, size: int) -> None:
        """Count a request of which the daemon knows everything: all of it was asked for."""
        with self._lock:
            self._hits += hits
            self._misses += misses
            self._size += size

    def facts(self) -> dict[str, int | float | str]:
        """Return the counters."""
        self.enter_fresh()
        with self._lock:
            hits, misses, size = self._hits, self._misses, self._size
        return {
            "hits": hits,
            "misses": misses,
            "samples": hits + misses,
            "bytes": size,
            "hit_rate": hits / max(1, hits + misses),
        }
