"""What is read before anybody asks: the next samples of every order that a job announced.

Earliest deadline first over all jobs, behind everything that is asked for, and never at the cost
of what will be wanted sooner (`cache.policy`). What was read ahead is pinned until its job has
passed it, so that it is there when it is wanted; that is bounded to about one part in a hundred of
the arena for each job, and given up at once when a request waits for room.

How far: to the position that the job's workers are known to have got to, and from there two
batches, or what it uses while a slow read takes, whichever is more. No socket and no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ffserve.cache.cache import Cache, Fetch, Load
from ffserve.cache.jobs import JobProgress

QUANTUM = 128
LONGEST_PIECE = 1024
"""Samples that are read, or found to be in memory, at once; one that finds all of it there makes
the next one twice as long, since following an order costs the more the shorter the pieces are."""
WALK_SHARE = 100
"""What is read ahead for one job takes at most one part in this many of the arena, but two
batches at least."""
TOTAL_SHARE = 8
"""What is read ahead for all takes at most one part in this many."""
SHORTEST_S = 0.05
"""Reads are taken for at least so slow."""
FORGET = 0.999
FIRST_STEP = 32
"""Samples of a batch, of a job that has not reported any yet."""
PIECES = 4
"""A window is read, and given up, in at least so many pieces."""
SMALLEST_PIECE = 8
RETRY_S = 0.02
"""After no room was found."""
LOOK = 65_536
"""Samples of a data set that are looked at together, whether they are in memory. When all of it is,
nobody has to follow its orders until something is evicted."""
SAMPLE_SIZE = 64 * 1024
"""Of a job of which nothing was read yet."""


@dataclass(slots=True, eq=False)
class _Piece:
    """One fetch of positions that follow one another."""

    progress: JobProgress
    fetch: Fetch
    epoch: int
    end: int
    begun: float


@dataclass(slots=True, eq=False)
class _Walker:
    """How far one job was read ahead."""

    epoch: int = 0
    position: int = 0
    pinned_size: int = 0
    sample_size: float = SAMPLE_SIZE
    not_before: float = 0.0
    most: int = QUANTUM
    there: int = 0
    """So many of the data set's samples, from the first one on, were in memory,"""
    evicted: int = -1
    """when this was the cache's count of evictions."""
    pieces: deque[_Piece] = field(default_factory=deque)


class Prefetcher:
    """See the module's text."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._walkers: dict[JobProgress, _Walker] = {}
        self._by_fetch: dict[Fetch, _Piece] = {}
        self._slowest_s = SHORTEST_S
        self._pinned_size = 0

    def window(self, progress: JobProgress, now: float) -> int:
        """Return how many positions beyond its front a job is to be read ahead."""
        walker = self._walkers.get(progress)
        size = walker.sample_size if walker else SAMPLE_SIZE
        batches = 2 * max(int(progress.step) or FIRST_STEP, 1)
        wanted = max(batches, int(progress.pace.rate(now) * self._slowest_s))
        return min(wanted, max(batches, int(self._cache.arena.size / WALK_SHARE / size)))

    def next_load(self, now: float) -> tuple[Load, str] | None:
        """Return what to read next and for which job; None: nothing, for now."""
        while (progress := self._most_urgent(now)) is not None:
            load = self._advance(progress, self._walkers[progress], now)
            if load is not None:
                return load, progress.job
        return None

    def _most_urgent(self, now: float) -> JobProgress | None:
        if self._pinned_size >= self._cache.arena.size // TOTAL_SHARE:
            return None
        best, soonest = None, np.inf
        for progress in self._cache.uses.jobs:
            if not progress.orders or not progress.active(now):
                continue
            walker = self._walkers.get(progress)
            if walker is None:
                walker = self._walkers[progress] = _Walker(progress.epoch, progress.front)
            if walker.not_before > now or self._holds_all(progress, walker):
                continue
            self._catch_up(progress, walker)
            ahead = self._distance(progress, walker)
            if ahead is None or self._room(progress, walker, ahead, now) <= 0:
                continue
            due = ahead / progress.rate(now)
            if due < soonest:
                best, soonest = progress, due
        return best

    def _holds_all(self, progress: JobProgress, walker: _Walker) -> bool:
        """Whether all that a job can ask for is known to be in memory."""
        if walker.evicted != self._cache.counters.evicted:
            walker.evicted, walker.there = self._cache.counters.evicted, 0
        return walker.there >= progress.span

    def _look(self, progress: JobProgress, walker: _Walker) -> None:
        """Look at some more samples of a data set, of which a piece was in memory."""
        upto = min(walker.there + LOOK, progress.span)
        if self._cache.holds(progress.low + walker.there, progress.low + upto):
            walker.there = upto

    def _room(self, progress: JobProgress, walker: _Walker, ahead: int, now: float) -> int:
        """Return how many positions to read now: a piece, or none if that is too early."""
        window = self.window(progress, now)
        piece = min(max(window // PIECES, SMALLEST_PIECE), walker.most)
        room = int(progress.lead) + window - ahead
        return min(piece, room) if room > piece // 2 else 0

    def _catch_up(self, progress: JobProgress, walker: _Walker) -> None:
        """What was asked for already need not be read ahead."""
        if (walker.epoch, walker.position) < (progress.epoch, progress.front):
            walker.epoch, walker.position = progress.epoch, progress.front
        order = progress.orders.get(walker.epoch)
        if order is not None and walker.position >= order.count:
            walker.epoch, walker.position = walker.epoch + 1, 0

    def _distance(self, progress: JobProgress, walker: _Walker) -> int | None:
        """Return how many positions ahead of the job reading has got; None: there is no more."""
        if walker.epoch not in progress.orders:
            return None
        if walker.epoch == progress.epoch:
            return walker.position - progress.position
        order = progress.order
        if order is None or walker.epoch != progress.epoch + 1:
            return None
        return order.count - progress.position + walker.position

    def _advance(self, progress: JobProgress, walker: _Walker, now: float) -> Load | None:
        order = progress.orders[walker.epoch]
        ahead = self._distance(progress, walker)
        assert ahead is not None
        room = self._room(progress, walker, ahead, now)
        numbers = order.numbers(walker.position, walker.position + room)
        fetch = Fetch(numbers, now + ahead / progress.rate(now))
        left = self._cache.arena.size // TOTAL_SHARE - self._pinned_size
        load = self._cache.advance(fetch, len(numbers), left)
        if fetch.cursor == 0:
            walker.not_before = now + RETRY_S
            return None
        there = load is None and not fetch.waiting
        walker.most = min(2 * walker.most, LONGEST_PIECE) if there else QUANTUM
        if there:
            self._look(progress, walker)
        walker.position += fetch.cursor
        walker.pinned_size += fetch.pinned_size
        self._pinned_size += fetch.pinned_size
        walker.sample_size += (fetch.pinned_size / fetch.cursor - walker.sample_size) / 8
        piece = _Piece(progress, fetch, walker.epoch, walker.position, now)
        walker.pieces.append(piece)
        if fetch.waiting:
            self._by_fetch[fetch] = piece
        return load

    def loaded(self, fetch: Fetch, now: float) -> bool:
        """All loads of a fetch ended; whether it was one of these."""
        piece = self._by_fetch.pop(fetch, None)
        if piece is None:
            return False
        took = now - piece.begun
        self._slowest_s = max(self._slowest_s * FORGET, 2 * took, SHORTEST_S)
        if piece not in self._walkers.get(piece.progress, _Walker()).pieces:
            self._cache.release(fetch.pins)
            fetch.pins = []
        return True

    def passed(self, progress: JobProgress) -> None:
        """A job got on: what it has used needs no protection any more."""
        walker = self._walkers.get(progress)
        if walker is None:
            return
        pieces = walker.pieces
        while pieces and (pieces[0].epoch, pieces[0].end) <= (progress.epoch, progress.position):
            self._give_up(walker, pieces.popleft())
        if not progress.orders or (pieces and pieces[0].epoch not in progress.orders):
            self.forget(progress)

    def replaced(self, progress: JobProgress, epoch: int) -> None:
        """A job is about to get an order for an epoch."""
        walker = self._walkers.get(progress)
        if walker is not None and epoch <= walker.epoch:
            self.forget(progress)

    def forget(self, progress: JobProgress) -> None:
        """A job announced something else, or nothing more, or ended."""
        walker = self._walkers.pop(progress, None)
        if walker is not None:
            self._drop_pins(walker)

    def make_room(self) -> None:
        """Somebody waits: give up everything that was pinned here."""
        for walker in self._walkers.values():
            self._drop_pins(walker)
            walker.not_before = 0.0

    def _drop_pins(self, walker: _Walker) -> None:
        while walker.pieces:
            self._give_up(walker, walker.pieces.popleft())

    def _give_up(self, walker: _Walker, piece: _Piece) -> None:
        walker.pinned_size -= piece.fetch.pinned_size
        self._pinned_size -= piece.fetch.pinned_size
        if not piece.fetch.waiting:
            # Else the slots are still being filled, and `loaded` gives the pins back.
            self._cache.release(piece.fetch.pins)
            piece.fetch.pins = []
