"""Statistics of the daemon since its start: durations, rates, and samples that clients read.

To note a duration takes 0.2 us. Buckets double from 1 us to 8 s, the same as those in which clients
report (`MappedView.take_times`).
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from ffserve.engine.shm import DURATIONS
from ffserve.errors import ProtocolError

BOUNDS_S = tuple(2**k / 1e6 for k in range(DURATIONS - 1))
"""The upper ends of all buckets except the last, which has none."""

RATE_S, MARK_S = 5.0, 1.0
"""Rates are means over the last RATE_S, because clients that only hit report once a second. The
values of the counters are kept every MARK_S."""

LARGEST_COUNT = (1 << 63) - 1
"""The largest number that REPORT can carry; only false counters of a client reach it."""


class Histogram:
    """Durations by bucket, and their sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * DURATIONS
        self.sum_s = 0.0

    def note(self, seconds: float) -> None:
        """Count a duration."""
        us = int(seconds * 1e6)
        self.counts[min(us.bit_length(), DURATIONS - 1) if us > 0 else 0] += 1
        self.sum_s += seconds


class Rates:
    """The rates at which counters rise: means of the last RATE_S.

    Args: now: monotonic time, at which the counters are 0. count: of the counters.
    """

    __slots__ = ("_marks",)

    def __init__(self, now: float, count: int) -> None:
        self._marks = deque([(now, (0,) * count)])
        """Earlier values of the counters. The oldest ones are as old as the means reach back."""

    def note(self, now: float, counters: tuple[int, ...]) -> None:
        """Keep what the counters are; called every few seconds at least."""
        marks = self._marks
        if now - marks[-1][0] >= MARK_S:
            marks.append((now, counters))
        while len(marks) > 1 and marks[1][0] <= now - RATE_S:
            marks.popleft()

    def per_second(self, now: float, counters: tuple[int, ...]) -> list[float]:
        """Return how much each counter has risen in a second."""
        began, before = self._marks[0]
        seconds = max(now - began, MARK_S)
        return [(b - a) / seconds for a, b in zip(before, counters, strict=True)]


class Statistics:
    """Counters of the samples that clients read, of the times that they report, and of reads.

    hits, hit_size, missed: samples and bytes found in memory, samples asked for. errors: failed
    samples and requests, by the code of the error. corrected: samples that were right at the second
    read only. refused, cut_off: clients. prepared, preparing_s: samples that clients prepared and
    handed over, and how long that took; prepared_found, preparing_saved_s: those that were found in
    memory instead.
    """

    def __init__(self) -> None:
        self.hits = self.hit_size = self.missed = 0
        self.errors: Counter[str] = Counter()
        self.refused = self.cut_off = self.corrected = 0
        self.prepared = self.prepared_found = 0
        self.preparing_s = self.preparing_saved_s = 0.0
        self.hit_batches = Histogram()
        """Copying batches of cached samples, as clients report it."""
        self.requests = Histogram()
        """How long requests took, from GET or LEASE to the answer."""

    def take_times(self, took_ns: int, packed: bytes) -> None:
        """Add the times that a client reports in TIMES. Raises: ProtocolError."""
        if len(packed) != 4 * DURATIONS or not 0 <= took_ns < 1 << 63:
            raise ProtocolError("invalid TIMES message: it does not have one count for each bucket")
        histogram = self.hit_batches
        counts = np.frombuffer(packed, "<u4").tolist()
        histogram.counts = [a + b for a, b in zip(histogram.counts, counts, strict=True)]
        histogram.sum_s += took_ns / 1e9
