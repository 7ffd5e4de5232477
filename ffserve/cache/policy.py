"""Cache policy: which samples stay in memory.

Two rules, each the best known for its case:

* *Static*: a sole job that visits every sample once per epoch. Nothing beats keeping the samples
  that filled the cache first (MinIO, CoorDL, VLDB 2021): the hit rate is cache size / dataset size,
  and misses are spread evenly, where LRU evicts every sample just before its use and Belady's rule
  has all misses in one half of the epoch. A sample that takes the slot of another is *expendable*:
  it is the first to be evicted.
* *Next use*: everything else. The sample whose next use, by any job, is farthest in time is evicted
  (Belady, with the future that jobs announced; `next_use` estimates that of silent jobs).

`next_use_buckets` keeps residents by their estimated next use and searches for victims there.

Datasets that share no shard compete as *groups*. A group below its floor takes slots from groups
above theirs; otherwise a sample of another group is evicted if it is wanted later by a quarter or
more. Floors are size / 2U for each of U users, divided among the user's jobs. Between groups of one
user the times at which samples are wanted are weighed by what a byte of them saves, which is more
for prepared samples than for raw ones. Slots of another size class, or of another user's domain,
change hands by whole slabs, by the same rule.

There is no clock and no lock. The cache knows which slots are usable: resident and not pinned.
"""

from __future__ import annotations

import numpy as np

from ffserve.cache.arena import NO_SLOTS, Arena, joined
from ffserve.cache.next_use import NextUse
from ffserve.cache.next_use_buckets import (
    BUCKETS_PER_EPOCH,
    EXPENDABLE,
    FAR,
    IDLE,
    READY,
    STALE,
    BucketSet,
    EvictionSearch,
    NextUseBuckets,
    Usable,
)
from ffserve.dtypes import Floats, Int32s, Int64s
from ffserve.engine.slots import MIXED

MOST_LOOKED_AT = 65_536
"""A search examines at most this many residents before it takes what it has found."""
ADVANTAGE = 1.25
"""A resident of another group is evicted only if it is wanted later by this factor."""

LOOK_FOR_SURPLUS, LOOKS = 8, 8
"""Expendable residents that no search needed are counted after every LOOK_FOR_SURPLUS searches; the
smallest of LOOKS counts is the number that can be kept."""


class Policy:
    """Chooses victims; see the module.

    Args:
        arena: of the slots. next_use: when samples will be wanted.
        first, count, pins: int[slots], of the cache: the samples in each slot, and its pins.
    """

    def __init__(
        self,
        arena: Arena,
        next_use: NextUse,
        first: Int64s,
        count: Int32s,
        pins: Int32s,
    ) -> None:
        self._arena = arena
        self._next_use = next_use
        self.buckets = NextUseBuckets(arena, pins)
        self._search = EvictionSearch(self.buckets, next_use, first, count)
        self._static: dict[int, bool] = {}
        """Whether the last victims of each group were chosen by the static rule."""
        self.used: dict[int, int] = {}
        """Bytes of the slots of each group."""
        self.returning: set[int] = set()
        """Groups of a predecessor, whose jobs are on their way back: those without a job give
        nothing while others can."""

    @property
    def turn_at(self) -> float:
        """When the scheduler gave its latest turns; see `NextUse`."""
        return self._next_use.turn_at

    # ---- residents ------------------------------------------------------------------------

    def enter(self, slots: Int64s, group: int, size: int) -> None:
        """Slots of `size` bytes together are being filled for a group."""
        self.buckets.enter(slots, group)
        self.used[group] = self.used.get(group, 0) + size

    def prefetched(self, slots: Int64s) -> None:
        """Slots are being filled before a request for their samples."""
        self.buckets.prefetched[slots] = True

    def requested(self, slots: Int64s) -> None:
        """Samples in these slots were requested."""
        self.buckets.prefetched[slots] = False

    def leave(self, slots: Int64s) -> int:
        """Slots hold nothing any more. Returns: the number of those prefetched and not used."""
        group, size, unused = self.buckets.residents.leave(slots)
        if group != MIXED:
            self._subtract(group, size)
            return unused
        sizes = self._arena.sizes(slots)
        for group, rows in self.buckets.by_group(slots):
            self._subtract(group, int(np.add.reduce(sizes[rows])))
        return unused

    def _subtract(self, group: int, size: int) -> None:
        self.used[group] -= size
        if not self.used[group]:
            del self.used[group]

    def forget(self, group: int) -> None:
        """A group has no shards any more, and so no slots."""
        self._static.pop(group, None)
        self._search.widths.pop(group, None)
        for bucket_sets in self.buckets.of_class:
            bucket_sets.pop(group, None)

    def admit(self, slots: Int64s, size_class: int) -> None:
        """Slots were filled without evicting a sample of the group."""
        self.buckets.put(slots, size_class, STALE)

    def admit_expendable(self, slots: Int64s, size_class: int) -> None:
        """Slots were filled in the place of other samples of the group."""
        for group, rows in self.buckets.by_group(slots):
            key = EXPENDABLE if self._static.get(group, True) else STALE
            self.buckets.put(slots[rows], size_class, key)

    def abandon(self, slots: Int64s, size_class: int) -> None:
        """Slots hold samples of idle shards: no session has them open."""
        self.buckets.put(slots[self.buckets.key[slots] != IDLE], size_class, IDLE)

    def invalidate(self, slots: Int64s) -> None:
        """Residents were just used: the estimates of their next use are no longer valid."""
        slots, group, size_class = self.buckets.residents.invalidate(slots, STALE)
        if not len(slots):
            return
        if group != MIXED and size_class != MIXED:
            self.buckets.push(self.buckets.bucket_set(group, size_class), STALE, slots)
            return
        classes = self._arena.slab_class[slots // self._arena.slots_per_slab]
        for size_class in np.unique(classes).tolist():
            rows = classes == size_class
            self.buckets.put(slots[rows], size_class, STALE)

    def unpark(self, slots: Int64s) -> None:
        """Slots have no pin any more: those that are parked get their place in a bucket again."""
        self.buckets.unpark(slots)

    # ---- victims --------------------------------------------------------------------------

    def has_idle(self, size_class: int) -> bool:
        """Whether there may be slots with samples of idle shards."""
        for bucket_set in self.buckets.of_class[size_class].values():
            if IDLE in bucket_set.buckets:
                return True
        return False

    def idle_victims(self, size_class: int, count: int, usable: Usable) -> Int64s:
        """Return up to `count` slots with samples of idle shards, of those that are usable."""
        found: list[Int64s] = []
        missing = count
        for bucket_set in list(self.buckets.of_class[size_class].values()):
            while IDLE in bucket_set.buckets and missing:
                slots = self.buckets.pop(bucket_set, IDLE, missing)
                good = usable(slots)
                found.append(slots[good])
                missing -= len(found[-1])
                self.buckets.put_back(bucket_set, slots[~good], STALE)
        return joined(found)

    def victims(
        self, size_class: int, count: int, usable: Usable, taker: int, latest: float | None
    ) -> tuple[Int64s, int]:
        """Choose up to `count` victims whose slots a group takes.

        Args: taker: the group. latest: take only samples wanted after this time, if not None.
        Returns: their slots, and how many of them (these come first) are of other groups.
        """
        if self._next_use.merged:
            self._merge()
        bucket_sets = self.buckets.of_class[size_class]
        if len(bucket_sets) == 1 and taker in bucket_sets:
            return self._take(taker, size_class, count, usable, latest), 0
        found, others = [NO_SLOTS], 0
        own = NO_SLOTS
        missing = count
        for number, most in self._sources(size_class, taker):
            slots = self._take(number, size_class, min(missing, most), usable, latest)
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
        while self._next_use.merged:
            old, new = self._next_use.merged.pop()
            moved = [
                (size_class, key, self.buckets.pop(bucket_set, key, bucket_set.entries))
                for size_class, bucket_sets in enumerate(self.buckets.of_class)
                if (bucket_set := bucket_sets.get(old)) is not None
                for key in list(bucket_set.buckets)
            ]
            for size_class, bucket_sets in enumerate(self.buckets.of_class):
                if (bucket_set := bucket_sets.pop(old, None)) is not None:
                    self.buckets.bucket_set(new, size_class).parked += bucket_set.parked
            self.buckets.group[self.buckets.group == old] = new
            self._search.widths.pop(old, None)
            self._static.pop(old, None)
            if old in self.used:
                self.used[new] = self.used.get(new, 0) + self.used.pop(old)
            for size_class, key, slots in moved:
                self.buckets.put(slots, size_class, max(key, STALE))

    def _sources(self, size_class: int, taker: int) -> list[tuple[int, int]]:
        """Return the groups to take victims from, in order, and how many from each at most: no
        group is pushed below its floor while another can give."""
        bucket_sets = self.buckets.of_class[size_class]
        for number in [n for n, each in bucket_sets.items() if not each.entries + each.parked]:
            del bucket_sets[number]
        there = list(bucket_sets)
        if there == [taker]:
            return [(taker, FAR)]
        floors = self.floors()
        size = int(self._arena.class_sizes[size_class % self._arena.class_count])
        spare = {n: (self.used.get(n, 0) - floors.get(n, 0)) // size for n in there}
        worth = {number: self._spare(number, bucket_sets[number], taker) for number in there}
        above = [
            (n, spare[n]) for n in there if n != taker and spare[n] > 0 and not self._returns(n)
        ]
        above.sort(key=lambda source: -worth[source[0]])
        own = [(taker, FAR)] if taker in worth else []
        if self.used.get(taker, 0) < floors.get(taker, 0):
            return above + own
        own_s = ADVANTAGE * self._spared_of_own(taker, bucket_sets)
        saved_s = self._next_use.saved_s
        first = [s for s in above if worth[s[0]] > own_s / saved_s(taker, s[0])]
        # A group without slots of this class has to take from another.
        return first + own if own or first else above or [(n, FAR) for n in there]

    def is_alone(self, group: int) -> bool:
        """Whether no other group has slots."""
        return len(self.used) == (group in self.used)

    def givers(self, size_class: int, taker: int, coming: int) -> list[int]:
        """Return the groups whose slabs of other size classes a group may take: those that would
        have to give it slots, but have none of its size class, and keep their floor without a run
        of slabs. Otherwise two groups would take the same slabs from each other for ever.

        Args: coming: bytes of slots that the group was given and has not entered yet.
        """
        if self._next_use.merged:
            self._merge()
        bucket_sets = self.buckets.of_class[size_class]
        floors, lost = self.floors(), self._arena.longest_run * self._arena.slab_size
        above = [
            number
            for number, size in self.used.items()
            if number != taker
            and number not in bucket_sets
            and not self._returns(number)
            and (number not in floors or size >= floors[number] + lost)
        ]
        if not above or self.used.get(taker, 0) + coming < floors.get(taker, 0):
            return above
        return [
            number
            for number in above
            if self._epoch_s(number, taker) > ADVANTAGE * self._epoch_s(taker, number)
        ]

    def _returns(self, number: int) -> bool:
        """Whether the jobs of a group are on their way back."""
        if number not in self.returning:
            return False
        group = self._next_use.groups.get(number)
        return group is not None and not group.jobs

    def _epoch_s(self, number: int, beside: int) -> float:
        """Return in how many seconds a group will have used all of its samples (inf: never),
        divided by what a byte of it saves, to be compared with another group."""
        group, now = self._next_use.groups.get(number), self._next_use.turn_at
        if group is None:
            return np.inf
        return group.epoch_s(now) / self._next_use.saved_s(number, beside)

    def floors(self) -> dict[int, int]:
        """Return the bytes of each group that other groups may not take: half of an equal part of
        each user, divided among the user's jobs."""
        now, jobs, counts = self._next_use.turn_at, list[tuple[int, str]](), dict[str, int]()
        for number, group in self._next_use.groups.items():
            for progress in group.active(now):
                if not progress.feeds:
                    jobs.append((number, progress.owner))
                    counts[progress.owner] = counts.get(progress.owner, 0) + 1
        floors, size = dict[int, int](), self._arena.size // (2 * max(len(counts), 1))
        for number, owner in jobs:
            floors[number] = floors.get(number, 0) + size // counts[owner]
        return floors

    def _spared_of_own(self, taker: int, bucket_sets: dict[int, BucketSet]) -> float:
        """Return in how many seconds the first victim of the taker itself will be wanted."""
        group, now = self._next_use.groups.get(taker), self._next_use.turn_at
        if group is None:
            return np.inf
        if group.static(now):
            return group.epoch_s(now)
        return self._spared_s(taker, bucket_sets[taker]) if taker in bucket_sets else 0.0

    def _spare(self, number: int, bucket_set: BucketSet, taker: int) -> float:
        """Return how well the first victim of a group can be spared for another: the time until it
        is wanted, divided by what a byte of the group saves then. Only ratios matter."""
        return self._spared_s(number, bucket_set) / self._next_use.saved_s(number, taker)

    def _spared_s(self, number: int, bucket_set: BucketSet) -> float:
        """Return in how many seconds the first victim of a group will be wanted."""
        group, now = self._next_use.groups.get(number), self._next_use.turn_at
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
            return NO_SLOTS
        ready = NO_SLOTS
        if READY in bucket_set.buckets:
            ready = self._take_ready(bucket_set, count, usable, latest)
            if len(ready) == count:
                return ready
        group = self._next_use.groups.get(number)
        static = self._static[number] = group is None or group.static(self._next_use.turn_at)
        if static:
            rest = self._take_static(bucket_set, count - len(ready), usable)
        else:
            assert group is not None
            rest = self._search.take(group, bucket_set, count - len(ready), usable, latest)
        return joined((ready, rest)) if len(ready) else rest

    def _take_ready(
        self, bucket_set: BucketSet, count: int, usable: Usable, latest: float | None
    ) -> Int64s:
        """Take victims that an earlier search found."""
        if latest is not None and bucket_set.ready_s <= latest:
            return NO_SLOTS
        found: list[Int64s] = []
        missing = count
        while missing and READY in bucket_set.buckets:
            slots = self.buckets.pop(bucket_set, READY, missing)
            good = usable(slots)
            if np.count_nonzero(good) < len(slots):
                self.buckets.put_back(bucket_set, slots[~good], STALE)
                slots = slots[good]
            found.append(slots)
            missing -= len(slots)
        return joined(found)

    def _take_static(self, bucket_set: BucketSet, count: int, usable: Usable) -> Int64s:
        """Take expendable residents, oldest first, then the others, newest first."""
        bucket_set.takes += 1
        if bucket_set.takes % LOOK_FOR_SURPLUS == 0 and EXPENDABLE in bucket_set.buckets:
            self._keep_surplus(bucket_set, count, usable)
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
            self.buckets.put_back(bucket_set, slots, key)
        return joined(found)

    def _keep_surplus(self, bucket_set: BucketSet, count: int, usable: Usable) -> None:
        """Keep expendable residents that were not needed for some time.

        Their number is the highest that was ever needed at once: pinned, or prefetched and not used
        yet. Without this, a short delay would take slots from the others for good.
        """
        held = bucket_set.buckets[EXPENDABLE].held.astype(np.int64)
        surplus = int(np.count_nonzero(usable(held))) - count
        bucket_set.surplus = min(bucket_set.surplus, surplus)
        if bucket_set.takes % (LOOK_FOR_SURPLUS * LOOKS) == 0:
            if bucket_set.surplus > 0:
                slots = self.buckets.pop(bucket_set, EXPENDABLE, bucket_set.surplus, newest=False)
                good = usable(slots)
                self.buckets.put(slots[good], bucket_set.size_class, STALE)
                self.buckets.put_back(bucket_set, slots[~good], EXPENDABLE)
            bucket_set.surplus = FAR

    def weights(self, slots: Int64s) -> Floats:
        """Return how much each resident is worth keeping: from 0.0, not at all, to 1.0, wanted at
        once or kept by the static rule."""
        keys = self.buckets.key[slots]
        weights = np.where((keys >= EXPENDABLE) | (keys == READY) | (keys == FAR), 0.0, 1.0)
        timed = np.flatnonzero((keys >= 0) & (keys < FAR))
        groups = self.buckets.group[slots[timed]]
        for number in np.unique(groups).tolist():
            group = self._next_use.groups.get(number)
            rows = timed[groups == number]
            if group is None or group.static(self._next_use.turn_at):
                continue
            ahead = keys[rows] - self._next_use.turn_at / self._search.widths.get(number, 1.0)
            weights[rows] = 1 / (1 + np.maximum(ahead, 0) / BUCKETS_PER_EPOCH)
        return weights
