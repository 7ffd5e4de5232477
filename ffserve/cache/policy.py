"""What stays in memory.

Two rules, each the best that is known for its case:

* *Static*: a sole job that visits every sample once an epoch. Nothing beats keeping whatever filled
  the cache first (MinIO, CoorDL, VLDB 2021): the hit rate is cache size / data set size, and the
  misses are spread evenly, where LRU evicts every sample just before its use and Belady's rule
  has all misses in one half of the epoch. What comes at another's cost *passes* through.
* *Next use*: everything else. The sample whose next use, by any job, is farthest in time goes
  (Belady, with the future that jobs announced; `next_use` has what silent jobs let one expect).

`next_use_buckets` keeps residents by their estimated next use and searches for victims there.

Data sets that share no shard compete (groups). A group below its floor of size / 2J for each of
its jobs takes from those above theirs; otherwise what is wanted later by a quarter and more gives
way.

No clock, no lock. Whether a slot can be evicted just now (nobody pins it) is the cache's to say.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.arena import Arena, joined
from ffserve.cache.next_use import NextUse
from ffserve.cache.next_use_buckets import (
    BUCKETS_PER_EPOCH,
    EXPENDABLE,
    FAR,
    IDLE,
    READY,
    UNSURE,
    BucketSet,
    EvictionSearch,
    NextUseBuckets,
    Usable,
)
from ffserve.engine.plan import MIXED

MOST_LOOKED_AT = 65_536
"""Residents that one search looks at before it takes what it has."""
ADVANTAGE = 1.25
"""How much later another group's resident must be wanted to give way."""

Int64s: TypeAlias = NDArray[np.int64]
_NO_SLOTS: Int64s = np.zeros(0, np.int64)


class Policy:
    """See the module's text.

    Args:
        arena: whose slots these are. uses: who wants what.
        first, count: int[slots], the cache's: the samples in a slot.
    """

    def __init__(
        self, arena: Arena, uses: NextUse, first: Int64s, count: NDArray[np.int32]
    ) -> None:
        self._arena = arena
        self._uses = uses
        self.buckets = NextUseBuckets(arena)
        self._search = EvictionSearch(self.buckets, uses, first, count)
        self._static: dict[int, bool] = {}
        """By which rule each group gave its last victims."""
        self.used: dict[int, int] = {}
        """Bytes of slots that each group has."""

    # ---- coming and going -----------------------------------------------------------------

    def enter(self, slots: Int64s, group: int, size: int) -> None:
        """Slots that are being filled for a group, and their bytes."""
        self.buckets.group[slots] = group
        self.used[group] = self.used.get(group, 0) + size

    def prefetched(self, slots: Int64s) -> None:
        """Slots that are being filled though nobody asked for them."""
        self.buckets.ahead[slots] = True

    def asked(self, slots: Int64s) -> None:
        """Slots of samples that somebody asked for."""
        self.buckets.ahead[slots] = False

    def leave(self, slots: Int64s) -> int:
        """Slots that hold nothing any more. Returns: how many of these came ahead and were not
        used."""
        group, size, unused = self.buckets.residents.leave(slots)
        if group != MIXED:
            self._give_back(group, size)
            return unused
        sizes = self._arena.sizes(slots)
        for group, rows in self.buckets.by_group(slots):
            self._give_back(group, int(np.add.reduce(sizes[rows])))
        return unused

    def _give_back(self, group: int, size: int) -> None:
        self.used[group] -= size
        if not self.used[group]:
            del self.used[group]

    def keep(self, slots: Int64s, size_class: int) -> None:
        """Slots that were filled while there was room."""
        self.buckets.put(slots, size_class, UNSURE)

    def admit_expendable(self, slots: Int64s, size_class: int) -> None:
        """Slots that were filled at another's cost."""
        for group, rows in self.buckets.by_group(slots):
            key = EXPENDABLE if self._static.get(group, True) else UNSURE
            self.buckets.put(slots[rows], size_class, key)

    def abandon(self, slots: Int64s, size_class: int) -> None:
        """Slots of shards that nobody has open."""
        self.buckets.put(slots[self.buckets.key[slots] != IDLE], size_class, IDLE)

    def invalidate(self, slots: Int64s) -> None:
        """These residents were just used: what was believed of them has changed."""
        slots, group, size_class = self.buckets.residents.invalidate(slots, UNSURE)
        if not len(slots):
            return
        if group != MIXED and size_class != MIXED:
            self.buckets.push(self.buckets.bucket_set(group, size_class), UNSURE, slots)
            return
        classes = self._arena.slab_class[slots // self._arena.slots_per_slab]
        for size_class in np.unique(classes).tolist():
            rows = classes == size_class
            self.buckets.put(
                slots[rows], size_class if size_class >= 0 else self.buckets.large, UNSURE
            )

    # ---- victims --------------------------------------------------------------------------

    def has_idle(self, size_class: int) -> bool:
        """Whether there may be slots that nobody wants."""
        for bucket_set in self.buckets.of_class[size_class].values():
            if IDLE in bucket_set.buckets:
                return True
        return False

    def idle_victims(self, size_class: int, count: int, usable: Usable) -> Int64s:
        """Return up to `count` slots that nobody wants; those that somebody wants again stay."""
        found: list[Int64s] = []
        missing = count
        for bucket_set in self.buckets.of_class[size_class].values():
            while IDLE in bucket_set.buckets and missing:
                slots = self.buckets.pop(bucket_set, IDLE, missing)
                good = usable(slots)
                found.append(slots[good])
                missing -= len(found[-1])
                self.buckets.put(slots[~good], size_class, UNSURE)
        return joined(found)

    def victims(
        self, size_class: int, count: int, usable: Usable, taker: int, latest: float | None
    ) -> tuple[Int64s, int]:
        """Return up to `count` slots to be given to a group, and how many of these (they stand
        first) come from other groups.

        Args: latest: take only what will be wanted after this time; None: what is farthest.
        """
        if self._uses.merged:
            self._merge()
        if self.buckets.of_class[size_class].keys() == {taker}:
            return self._take(taker, size_class, count, usable, latest), 0
        found, others = [_NO_SLOTS], 0
        own = _NO_SLOTS
        missing = count
        for number in self._sources(size_class, taker):
            slots = self._take(number, size_class, missing, usable, latest)
            missing -= len(slots)
            if number == taker:
                own = slots
            else:
                found.append(slots)
                others += len(slots)
            if not missing:
                break
        return np.concatenate((*found, own)), others

    def _merge(self) -> None:
        while self._uses.merged:
            old, new = self._uses.merged.pop()
            moved = [
                (size_class, key, self.buckets.pop(bucket_set, key, bucket_set.entries))
                for size_class, bucket_sets in enumerate(self.buckets.of_class)
                if (bucket_set := bucket_sets.pop(old, None)) is not None
                for key in list(bucket_set.buckets)
            ]
            self.buckets.group[self.buckets.group == old] = new
            self._search.widths.pop(old, None)
            self._static.pop(old, None)
            if old in self.used:
                self.used[new] = self.used.get(new, 0) + self.used.pop(old)
            for size_class, key, slots in moved:
                self.buckets.put(slots, size_class, max(key, UNSURE))

    def _sources(self, size_class: int, taker: int) -> list[int]:
        """Return the groups to take from, in order."""
        bucket_sets = self.buckets.of_class[size_class]
        for number in [n for n, bucket_set in bucket_sets.items() if not bucket_set.entries]:
            del bucket_sets[number]
        there = list(bucket_sets)
        if there == [taker]:
            return there
        floors = self.floors()
        worth = {number: self._spared_s(number, bucket_sets[number]) for number in there}
        above = [n for n in there if n != taker and self.used.get(n, 0) > floors.get(n, 0)]
        above.sort(key=lambda n: -worth[n])
        own = [taker] if taker in worth else []
        if self.used.get(taker, 0) < floors.get(taker, 0):
            return above + own
        least = ADVANTAGE * self._worth_of_own(taker, worth)
        first = [n for n in above if worth[n] > least]
        # Who has nothing of his own here has to take from somebody.
        return first + own if own or first else above or there

    def floors(self) -> dict[int, int]:
        """Return the bytes that each group may not be pushed below by others."""
        now = self._uses.now
        jobs = {number: len(group.active(now)) for number, group in self._uses.groups.items()}
        total = sum(jobs.values())
        return {n: self._arena.size * k // (2 * total) for n, k in jobs.items() if k}

    def _worth_of_own(self, taker: int, worth: dict[int, float]) -> float:
        group, now = self._uses.groups.get(taker), self._uses.now
        if group is None or group.static(now):
            return group.epoch_s(now) if group else np.inf
        return worth.get(taker, 0.0)

    def _spared_s(self, number: int, bucket_set: BucketSet) -> float:
        """Return in how many seconds what a group can do without soonest will be wanted."""
        group, now = self._uses.groups.get(number), self._uses.now
        if group is None or not group.active(now):
            return np.inf
        if EXPENDABLE in bucket_set.buckets or group.static(now):
            return group.epoch_s(now)
        keys = [key for key in bucket_set.buckets if key < FAR]
        if not keys:
            return group.epoch_s(now)
        return max(max(keys) * self._search.width(group) - now, 0.0)

    def _take(
        self, number: int, size_class: int, count: int, usable: Usable, latest: float | None
    ) -> Int64s:
        bucket_set = self.buckets.of_class[size_class].get(number)
        if bucket_set is None or not bucket_set.entries:
            return _NO_SLOTS
        ready = _NO_SLOTS
        if READY in bucket_set.buckets:
            ready = self._take_ready(bucket_set, count, usable, latest)
            if len(ready) == count:
                return ready
        group = self._uses.groups.get(number)
        static = self._static[number] = group is None or group.static(self._uses.now)
        if static:
            rest = self._take_static(bucket_set, count - len(ready), usable)
        else:
            assert group is not None
            rest = self._search.take(group, bucket_set, count - len(ready), usable, latest)
        return joined((ready, rest))

    def _take_ready(
        self, bucket_set: BucketSet, count: int, usable: Usable, latest: float | None
    ) -> Int64s:
        """Take what was looked for before."""
        if latest is not None and bucket_set.ready_s <= latest:
            return _NO_SLOTS
        found: list[Int64s] = []
        missing = count
        while missing and READY in bucket_set.buckets:
            slots = self.buckets.pop(bucket_set, READY, missing)
            good = usable(slots)
            if np.count_nonzero(good) < len(slots):
                self.buckets.put(slots[~good], bucket_set.size_class, UNSURE)
                slots = slots[good]
            found.append(slots)
            missing -= len(slots)
        return joined(found)

    def _take_static(self, bucket_set: BucketSet, count: int, usable: Usable) -> Int64s:
        """What passes, oldest first; then what is kept, newest first."""
        found: list[Int64s] = []
        spared: list[tuple[int, Int64s]] = []
        missing, looked = count, 0
        while bucket_set.buckets and missing and looked < MOST_LOOKED_AT:
            key = EXPENDABLE if EXPENDABLE in bucket_set.buckets else max(bucket_set.buckets)
            slots = self.buckets.pop(bucket_set, key, missing, newest=key != EXPENDABLE)
            looked += len(slots)
            good = usable(slots)
            if np.count_nonzero(good) < len(slots):
                spared.append((key, slots[~good]))
                slots = slots[good]
            found.append(slots)
            missing -= len(slots)
        for key, slots in reversed(spared):
            self.buckets.put(slots, bucket_set.size_class, key)
        return joined(found)

    def weights(self, slots: Int64s) -> NDArray[np.float64]:
        """Return how much each resident is worth to be kept: 0.0 not at all, 1.0 wanted at once
        or kept for good."""
        keys = self.buckets.key[slots]
        weights = np.where((keys >= EXPENDABLE) | (keys == READY) | (keys == FAR), 0.0, 1.0)
        timed = np.flatnonzero((keys >= 0) & (keys < FAR))
        groups = self.buckets.group[slots[timed]]
        for number in np.unique(groups).tolist():
            group = self._uses.groups.get(number)
            rows = timed[groups == number]
            if group is None or group.static(self._uses.now):
                continue
            ahead = keys[rows] - self._uses.now / self._search.widths.get(number, 1.0)
            weights[rows] = 1 / (1 + np.maximum(ahead, 0) / BUCKETS_PER_EPOCH)
        return weights
