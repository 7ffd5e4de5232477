"""Prefetcher: reads the next samples of every announced order before they are asked for.

Jobs are served by earliest deadline, after all requests, and never at the cost of samples with an
earlier next use (`cache.policy`). Prefetched samples are pinned until their job has advanced past
them, so that they are still there when it asks. That takes about a hundredth of the arena for each
job, and is given up at once when a request waits for memory.

A job is prefetched up to the position that its workers have reached as far as the daemon knows, and
from there two batches or what the job uses during a slow read, whichever is more. Where that would
take too much of a small arena it is a batch and what the job uses during a read, at most a half.

A windowed order (`ffserve.reads.windows`) is prefetched by windows: the samples of each are read in
the order of the files, neighbours together, before the job comes to the first of them. No socket
and no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from ffserve.cache.cache import Cache, Fetch, Load
from ffserve.cache.jobs import JobProgress
from ffserve.cache.orders import AnnouncedOrder
from ffserve.dtypes import Int64s
from ffserve.reads.windows import LEAST_SIZE, fewest, window_ends

PIECE_COUNT = 128
"""A piece has at most this many samples."""
LONGEST_PIECE = 1024
"""If a piece is in memory already, the next one is twice as large, up to this size, since following
an order costs more in short pieces."""
JOB_SHARE = 100
"""Prefetched samples of one job take at most 1 part in JOB_SHARE of the arena, but two batches at
least."""
TOTAL_SHARE = 8
"""Prefetched samples of all jobs take at most 1 part in TOTAL_SHARE."""
SHORTEST_S = 0.05
"""The least duration that a slow read is assumed to take."""
FORGET, FORGET_SOON = 0.999, 0.98
"""Factors by which the assumed duration of a slow read, and that of one in a small arena, decrease
with every piece that is read."""
FIRST_STEP = 32
"""Samples in a batch of a job that has not reported a position yet."""
PIECES = 4
"""A window is read in at least this many pieces, and its memory is given up in as many."""
MOST_LOOKED_AT = 64
"""One search compares this many jobs and serves the most urgent one. If there are more jobs, the
next search looks at others."""
RETRY_S = 0.02
"""After the arena had no room, the prefetcher pauses for this long."""
LOOK = 65_536
"""Samples of a data set that are checked together for being in memory. When all of them are, its
orders need not be followed until something is evicted."""
SAMPLE_SIZE = 64 * 1024
"""Until the first sample of a job is read, its samples are assumed to have this size."""
WINDOWS_AHEAD = 2.5
"""This many windows of a windowed order are prefetched: the one in use, the next, and the beginning
of the one after it, so that the disk does not wait for a report of the position."""
WINDOW_SHARE = 3
"""These windows and all other prefetched samples take at most 1 part in WINDOW_SHARE of the
arena."""
WINDOW_LOOK = 1 << 17
"""The end of a window is searched for within this many samples, which takes 2 ms."""
WINDOW_PIECE_SIZE = 2 << 20
"""A piece of a window has at most this many bytes."""
SAMPLED = 256
"""The mean size of an order's samples is estimated from this many of them."""


_NONE: Int64s = np.zeros(0, np.int64)


class Piece(Fetch):
    """Consecutive positions of an order, on their way through the cache.

    Args:
        progress: of the job. latest: when the job will ask for the first of them.
        epoch, begun: of the order; time of the fetch.
    """

    __slots__ = ("begun", "dropped", "end", "epoch", "progress")

    def __init__(
        self, progress: JobProgress, numbers: Int64s, latest: float, epoch: int, begun: float
    ) -> None:
        super().__init__(numbers, latest)
        self.progress = progress
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
    windowed: bool = True
    """Whether the order of the epoch is windowed, as far as it was looked at."""
    window: Int64s = field(default_factory=lambda: _NONE)
    """The last samples of the window that ends at `window_end`, in the order of the files."""
    window_end: int = 0
    window_count: int = 0
    """Samples of the whole window."""
    window_piece: int = PIECE_COUNT
    """Samples of a window in one piece, at most."""

    def move_to(self, epoch: int, position: int) -> None:
        """Go on at a position that the prefetching has not led to."""
        if epoch != self.epoch:
            self.windowed, self.window_end = True, 0
        self.epoch, self.position, self.window = epoch, position, _NONE


class Prefetcher:
    """See the module's text.

    Args: window_least_size: several windows of fewer bytes are read as one.
    """

    def __init__(self, cache: Cache, *, window_least_size: int = LEAST_SIZE) -> None:
        self._cache = cache
        self._window_least_size = window_least_size
        self._cursors: dict[JobProgress, _Cursor] = {}
        self._slowest_s = SHORTEST_S
        self._slow_s = 0.0
        """The longest duration of a recent read."""
        self._pinned_size = 0
        self._first = 0
        """The first job that is looked at."""
        self.paused_until = 0.0
        """When the last pause of a job ends; all pauses are equally long."""

    def window(self, progress: JobProgress, now: float) -> int:
        """Return how many positions beyond its front a job is prefetched."""
        cursor = self._cursors.get(progress)
        size = cursor.sample_size if cursor else SAMPLE_SIZE
        step = max(int(progress.step) or FIRST_STEP, 1)
        wanted = max(2 * step, int(progress.pace.rate(now) * self._slowest_s))
        share = JOB_SHARE
        if cursor and cursor.window_end:
            wanted, share = max(wanted, int(WINDOWS_AHEAD * cursor.window_count)), WINDOW_SHARE
        # The samples that a job may use before its next report, and during a read.
        usual = ceil(progress.usual_step) or step
        least = usual + min(ceil(progress.rate(now) * self._slow_s), (usual + 1) // 2)
        return min(wanted, max(least, int(self._cache.arena.size / share / size)))

    def next_load(self, now: float) -> tuple[Load, str] | None:
        """Return what to read next and for which job; None: nothing for now."""
        while (progress := self._most_urgent(now)) is not None:
            cursor = self._cursors[progress]
            distance = self._distance(progress, cursor)
            assert distance is not None
            room = self._room(progress, cursor, distance, now)
            load = self._advance(progress, cursor, now, room)
            if load is not None:
                return load, progress.job
        return None

    def next_of_window(self, job: str, now: float) -> Load | None:
        """Return the next part of the window that a job has asked for samples of.

        Its requests wait for that: sample by sample they would read the window's blocks many times.
        """
        for progress, cursor in self._cursors.items():
            if progress.job != job or not cursor.window_end or cursor.not_before > now:
                continue
            self._catch_up(progress, cursor)
            if (
                cursor.windowed
                and cursor.epoch == progress.epoch
                and progress.order is not None
                and len(cursor.window)
                and cursor.window_end - cursor.window_count < progress.front
                and not self._all_resident(progress, cursor)
                and self._left(cursor) > 0
            ):
                load = self._advance(progress, cursor, now, cursor.window_piece)
                if load is not None:
                    return load
        return None

    def _most_urgent(self, now: float) -> JobProgress | None:
        best, soonest = None, np.inf
        jobs = self._cache.next_use.announced_jobs
        if len(jobs) > MOST_LOOKED_AT:
            self._first = (self._first + MOST_LOOKED_AT) % len(jobs)
            jobs = (jobs[self._first :] + jobs[: self._first])[:MOST_LOOKED_AT]
        for progress in jobs:
            if progress.on_demand or not progress.active(now):
                continue
            cursor = self._cursors.get(progress)
            if cursor is None:
                cursor = self._cursors[progress] = _Cursor(progress.epoch, progress.position)
            if cursor.not_before > now or self._all_resident(progress, cursor):
                continue
            self._catch_up(progress, cursor)
            if self._left(cursor) <= 0:
                continue
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
        """Return how many positions to read now: a piece, or 0 while that is too early. What the
        job is to use next is never too early."""
        window = self.window(progress, now)
        most = cursor.window_piece if cursor.window_end else cursor.most
        piece = min(max(window // PIECES, 8), most)
        lead = int(progress.lead)
        room = lead + window - distance
        return min(piece, room) if room > piece // 2 or distance < lead + progress.usual_step else 0

    def _catch_up(self, progress: JobProgress, cursor: _Cursor) -> None:
        """Skip what the job has asked for already: positions, or whole windows."""
        if cursor.epoch < progress.epoch:
            cursor.move_to(progress.epoch, progress.position)
        order = progress.orders.get(cursor.epoch)
        if order is not None and cursor.position >= order.count:
            cursor.move_to(cursor.epoch + 1, 0)
            order = progress.orders.get(cursor.epoch)
        if order is None:
            return
        if cursor.epoch == progress.epoch:
            # No window is looked for where the order has dropped what the job has used.
            known = cursor.windowed and cursor.position < cursor.window_end
            if (cursor.window_end if known else cursor.position) <= progress.front:
                cursor.move_to(progress.epoch, progress.front)
        self._find_window(cursor, order)

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

    def _advance(
        self, progress: JobProgress, cursor: _Cursor, now: float, room: int
    ) -> Load | None:
        """Read the next samples, at most `room`; return None if all of them are on their way."""
        order = progress.orders[cursor.epoch]
        distance = self._distance(progress, cursor)
        assert distance is not None
        if cursor.windowed:
            numbers = cursor.window[:room]
            distance = max(distance - (cursor.window_count - len(cursor.window)), 0)
        else:
            numbers = order.numbers(cursor.position, cursor.position + room)
        if progress.ready is not None:
            numbers = numbers[: progress.ready(numbers)]
            if not len(numbers):
                self._pause(cursor, now)
                return None
        piece = Piece(progress, numbers, now + distance / progress.rate(now), cursor.epoch, now)
        load = self._cache.advance(piece, len(numbers), self._left(cursor))
        if piece.cursor == 0:
            self._pause(cursor, now)
            return None
        resident = load is None and not piece.waiting
        cursor.most = min(2 * cursor.most, LONGEST_PIECE) if resident else PIECE_COUNT
        if resident:
            self._check_residents(progress, cursor)
        cursor.position += piece.cursor
        piece.end = cursor.position
        if cursor.windowed:
            cursor.window = cursor.window[piece.cursor :]
            piece.end = cursor.window_end
        self._pinned_size += piece.pinned_size
        cursor.sample_size += (piece.pinned_size / piece.cursor - cursor.sample_size) / 8
        cursor.pieces.append(piece)
        return load

    def _pause(self, cursor: _Cursor, now: float) -> None:
        cursor.not_before = self.paused_until = now + RETRY_S

    def _left(self, cursor: _Cursor) -> int:
        """Return how many more bytes may be pinned for a job."""
        share = WINDOW_SHARE if cursor.window_end else TOTAL_SHARE
        return self._cache.arena.size // share - self._pinned_size

    def _find_window(self, cursor: _Cursor, order: AnnouncedOrder) -> None:
        """Find the window at the cursor's position, if it is a new one, and sort its samples."""
        if not cursor.windowed or len(cursor.window) or cursor.position >= order.count:
            return
        if cursor.position >= cursor.window_end:
            size = self._record_size(order.numbers(cursor.position, cursor.position + SAMPLED))
            look = min(
                int(self._cache.arena.size / WINDOW_SHARE / WINDOWS_AHEAD * 4 / 3 / size),
                WINDOW_LOOK,
            )
            numbers = order.numbers(cursor.position, cursor.position + look)
            # After a jump into the middle of a window, the rest of it.
            jumped = cursor.position > cursor.window_end > 0
            least = fewest(size, self._window_least_size)
            last = cursor.position + look >= order.count
            ends = window_ends(numbers, 1 if jumped else least, last=last)
            end = next(ends, None) if least else None
            if end is None:
                cursor.windowed, cursor.window_end = False, 0
                return
            cursor.window_end, cursor.window_count = cursor.position + end, end
            cursor.sample_size = size
            cursor.window_piece = max(int(WINDOW_PIECE_SIZE / size), 1)
        cursor.window = order.numbers(cursor.position, cursor.window_end)
        cursor.window.sort()

    def _record_size(self, numbers: Int64s) -> float:
        blocks = self._cache.shards.blocks(numbers)
        return max(float(np.mean((blocks.ends - blocks.begins) / blocks.counts)), 1.0)

    def loaded(self, piece: Piece, now: float) -> None:
        """All loads of a piece have ended."""
        duration_s = now - piece.begun
        self._slowest_s = max(self._slowest_s * FORGET, 2 * duration_s, SHORTEST_S)
        self._slow_s = max(self._slow_s * FORGET_SOON, duration_s)
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
        """A job has got an order for an epoch."""
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
