"""Prefetcher: reads the next samples of every announced order before they are asked for.

Jobs are served by earliest deadline, after all requests, and never at the cost of samples with an
earlier next use (`cache.policy`). Prefetched samples are pinned until their job has advanced past
them, so that they are still there when it asks. That takes about a hundredth of the arena for each
job, and is given up at once when a request waits for memory.

A job is prefetched up to the position that its workers have reached as far as the daemon knows, and
from there two batches or what the job uses during a slow read, whichever is more. No socket and no
clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ffserve.cache.cache import Cache, Fetch, Int64s, Load
from ffserve.cache.jobs import JobProgress

PIECE_COUNT = 128
"""Samples in one piece, at most."""
LONGEST_PIECE = 1024
"""A piece that is in memory already doubles the size of the next one, up to this, since following
an order costs more in short pieces."""
JOB_SHARE = 100
"""Prefetched samples of one job take at most 1 part in JOB_SHARE of the arena, but two batches at
least."""
TOTAL_SHARE = 8
"""Prefetched samples of all jobs take at most 1 part in TOTAL_SHARE."""
SHORTEST_S = 0.05
"""The least duration that a slow read is assumed to take."""
FORGET = 0.999
"""Factor by which the assumed duration of a slow read decreases with every piece that is read."""
FIRST_STEP = 32
"""Samples in a batch of a job that has not reported a position yet."""
PIECES = 4
"""A window is read, and given up, in at least so many pieces."""
SMALLEST_PIECE = 8
RETRY_S = 0.02
"""Pause after the arena had no room."""
LOOK = 65_536
"""Samples of a data set that are checked together for being in memory. When all of them are, its
orders need not be followed until something is evicted."""
SAMPLE_SIZE = 64 * 1024
"""Assumed size of the samples of a job before the first is read."""


class Piece(Fetch):
    """Consecutive positions of an order, on their way through the cache.

    Args:
        latest: when the job will ask for the first of them.
        epoch, begun: of the order; time of the fetch.
    """

    __slots__ = ("begun", "dropped", "end", "epoch")

    def __init__(self, numbers: Int64s, latest: float, epoch: int, begun: float) -> None:
        super().__init__(numbers, latest)
        self.epoch = epoch
        self.begun = begun
        self.end = 0
        """The position behind it."""
        self.dropped = False
        """Whether its pins go as soon as its loads have ended."""


@dataclass(slots=True, eq=False)
class _Cursor:
    """How far the orders of one job were prefetched."""

    epoch: int = 0
    position: int = 0
    sample_size: float = SAMPLE_SIZE
    not_before: float = 0.0
    most: int = PIECE_COUNT
    """The most samples in the next piece."""
    resident: int = 0
    """Samples of the data set, from the first one on, that were found in memory."""
    evicted: int = -1
    """The cache's count of evictions at that time."""
    pieces: deque[Piece] = field(default_factory=deque)


class Prefetcher:
    """See the module's text."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._cursors: dict[JobProgress, _Cursor] = {}
        self._slowest_s = SHORTEST_S
        self._pinned_size = 0

    def window(self, progress: JobProgress, now: float) -> int:
        """Return how many positions beyond its front a job is prefetched."""
        cursor = self._cursors.get(progress)
        size = cursor.sample_size if cursor else SAMPLE_SIZE
        batches = 2 * max(int(progress.step) or FIRST_STEP, 1)
        wanted = max(batches, int(progress.pace.rate(now) * self._slowest_s))
        return min(wanted, max(batches, int(self._cache.arena.size / JOB_SHARE / size)))

    def next_load(self, now: float) -> tuple[Load, str] | None:
        """Return what to read next and for which job; None: nothing for now."""
        while (progress := self._most_urgent(now)) is not None:
            load = self._advance(progress, self._cursors[progress], now)
            if load is not None:
                return load, progress.job
        return None

    def _most_urgent(self, now: float) -> JobProgress | None:
        if self._pinned_size >= self._cache.arena.size // TOTAL_SHARE:
            return None
        best, soonest = None, np.inf
        for progress in self._cache.next_use.jobs:
            if not progress.orders or not progress.active(now):
                continue
            cursor = self._cursors.get(progress)
            if cursor is None:
                cursor = self._cursors[progress] = _Cursor(progress.epoch, progress.front)
            if cursor.not_before > now or self._all_resident(progress, cursor):
                continue
            self._catch_up(progress, cursor)
            distance = self._distance(progress, cursor)
            if distance is None or self._room(progress, cursor, distance, now) <= 0:
                continue
            due = distance / progress.rate(now)
            if due < soonest:
                best, soonest = progress, due
        return best

    def _all_resident(self, progress: JobProgress, cursor: _Cursor) -> bool:
        """Return whether the whole data set is known to be in memory."""
        if cursor.evicted != self._cache.counters.evicted:
            cursor.evicted, cursor.resident = self._cache.counters.evicted, 0
        return cursor.resident >= progress.span

    def _check_residents(self, progress: JobProgress, cursor: _Cursor) -> None:
        """Check some more samples of a data set of which a whole piece was in memory."""
        end = min(cursor.resident + LOOK, progress.span)
        if self._cache.holds(progress.low + cursor.resident, progress.low + end):
            cursor.resident = end

    def _room(self, progress: JobProgress, cursor: _Cursor, distance: int, now: float) -> int:
        """Return how many positions to read now: a piece, or 0 while that is too early."""
        window = self.window(progress, now)
        piece = min(max(window // PIECES, SMALLEST_PIECE), cursor.most)
        room = int(progress.lead) + window - distance
        return min(piece, room) if room > piece // 2 else 0

    def _catch_up(self, progress: JobProgress, cursor: _Cursor) -> None:
        """Skip the positions that the job has asked for already."""
        if (cursor.epoch, cursor.position) < (progress.epoch, progress.front):
            cursor.epoch, cursor.position = progress.epoch, progress.front
        order = progress.orders.get(cursor.epoch)
        if order is not None and cursor.position >= order.count:
            cursor.epoch, cursor.position = cursor.epoch + 1, 0

    def _distance(self, progress: JobProgress, cursor: _Cursor) -> int | None:
        """Return how many positions the cursor is ahead of the job; None: the orders have ended."""
        if cursor.epoch not in progress.orders:
            return None
        if cursor.epoch == progress.epoch:
            return cursor.position - progress.position
        order = progress.order
        if order is None or cursor.epoch != progress.epoch + 1:
            return None
        return order.count - progress.position + cursor.position

    def _advance(self, progress: JobProgress, cursor: _Cursor, now: float) -> Load | None:
        order = progress.orders[cursor.epoch]
        distance = self._distance(progress, cursor)
        assert distance is not None
        room = self._room(progress, cursor, distance, now)
        numbers = order.numbers(cursor.position, cursor.position + room)
        piece = Piece(numbers, now + distance / progress.rate(now), cursor.epoch, now)
        left = self._cache.arena.size // TOTAL_SHARE - self._pinned_size
        load = self._cache.advance(piece, len(numbers), left)
        if piece.cursor == 0:
            cursor.not_before = now + RETRY_S
            return None
        resident = load is None and not piece.waiting
        cursor.most = min(2 * cursor.most, LONGEST_PIECE) if resident else PIECE_COUNT
        if resident:
            self._check_residents(progress, cursor)
        cursor.position += piece.cursor
        piece.end = cursor.position
        self._pinned_size += piece.pinned_size
        cursor.sample_size += (piece.pinned_size / piece.cursor - cursor.sample_size) / 8
        cursor.pieces.append(piece)
        return load

    def loaded(self, piece: Piece, now: float) -> None:
        """All loads of a piece have ended."""
        self._slowest_s = max(self._slowest_s * FORGET, 2 * (now - piece.begun), SHORTEST_S)
        if piece.dropped:
            self._cache.release(piece.pins)
            piece.pins = []

    def advanced(self, progress: JobProgress) -> None:
        """A job has advanced: unpin the pieces that it has used."""
        cursor = self._cursors.get(progress)
        if cursor is None:
            return
        pieces = cursor.pieces
        while pieces and (pieces[0].epoch, pieces[0].end) <= (progress.epoch, progress.position):
            self._drop(pieces.popleft())
        if not progress.orders or (pieces and pieces[0].epoch not in progress.orders):
            self.forget(progress)

    def replaced(self, progress: JobProgress, epoch: int) -> None:
        """A job is about to get an order for an epoch."""
        cursor = self._cursors.get(progress)
        if cursor is not None and epoch <= cursor.epoch:
            self.forget(progress)

    def forget(self, progress: JobProgress) -> None:
        """Start anew with a job: its orders have changed or ended."""
        cursor = self._cursors.pop(progress, None)
        if cursor is not None:
            self._drop_all(cursor)

    def make_room(self) -> None:
        """A request waits for memory: give up all pins."""
        for cursor in self._cursors.values():
            self._drop_all(cursor)
            cursor.not_before = 0.0

    def _drop_all(self, cursor: _Cursor) -> None:
        while cursor.pieces:
            self._drop(cursor.pieces.popleft())

    def _drop(self, piece: Piece) -> None:
        self._pinned_size -= piece.pinned_size
        piece.dropped = True
        if not piece.waiting:
            # Otherwise its slots are still being filled, and `loaded` unpins them.
            self._cache.release(piece.pins)
            piece.pins = []
