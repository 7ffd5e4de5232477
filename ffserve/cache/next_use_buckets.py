"""Next-use buckets: residents by the estimated time of their next use, and the eviction search.

A bucket holds the residents of one key: the time of their next use in parts of an epoch (of
BUCKETS_PER_EPOCH, since monotonic seconds began), or one of

    IDLE         its shard is idle: no session has it open     the first to be evicted
    EXPENDABLE   static rule: took the slot of another         oldest first
    STALE        no estimate, or one that is no longer valid   static rule: newest first
    READY        chosen by an earlier search                   the next to be evicted
    FAR          not wanted as far as is known

A resident that moves to another bucket, is evicted or changes its group stays as an entry of its
old bucket: its key tells where it belongs, and entries that do not match are dropped when they are
popped.

A pinned resident cannot be evicted. When a search comes upon one, it is *parked*: it stays in no
bucket until its last pin is released. So no search looks at a pinned resident twice.

The eviction search takes victims from the farthest bucket. A key is the estimate made when the
resident was last examined. An estimate that became too early is found when its time is due: the
residents of the bucket become STALE. One that became too late is found when the resident is chosen:
victims are examined once more. So a use, and a job that joins, leaves or changes its pace, cost
nothing here. Within a key the newest is evicted first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ffserve.cache.arena import NO_SLOTS, Arena, joined
from ffserve.cache.next_use import Group, NextUse
from ffserve.dtypes import Bools, Int32s, Int64s
from ffserve.engine.slots import MIXED, NO_KEY, Residents, by_key

NONE = NO_KEY
FAR, READY, STALE, EXPENDABLE, IDLE = 1 << 58, 1 << 59, 1 << 60, 1 << 61, 1 << 62
FEW = 256
"""A bucket with at least this many entries is purged of those that have moved before it grows."""
SMALLEST_BUCKET = 128
"""A bucket has room for this many slots at first: those of one turn, of which many are
expendable."""

BUCKETS_PER_EPOCH = 64
"""Keys distinguish this many parts of an epoch."""
SLACK = 2
"""A victim may be wanted earlier than estimated, by this many parts of an epoch."""
UNSORTED_SHARE = 128
"""Stale residents are examined when they are one part in this many, so that it is done in bulk."""
MOST_UNSORTED = 4096
READY_SHARE, MOST_READY = 96, 4096
"""A search keeps surplus victims for the next one: at most 1 part in READY_SHARE of the residents,
and at most MOST_READY."""
MOST_LOOKED_AT = 4096
"""A search examines at most this many residents before it takes what it has found."""

Usable: TypeAlias = Callable[[Int64s], Bools]
"""Return which of these slots can be evicted now."""
_ALL = slice(None)


class Bucket:
    """Slots in the order in which they were added."""

    __slots__ = ("_end", "_items", "_start")

    def __init__(self) -> None:
        self._items = np.empty(SMALLEST_BUCKET, np.int32)
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def add(self, slots: Int64s | Int32s) -> bool:
        """Append slots, unless it takes more memory; return whether that was done."""
        end = self._end + len(slots)
        if end > len(self._items):
            return False
        self._items[self._end : end] = slots
        self._end = end
        return True

    def push(self, slots: Int64s | Int32s) -> None:
        """Append slots."""
        if self.add(slots):
            return
        held = self.held
        items = np.empty(max(SMALLEST_BUCKET, 2 * (len(held) + len(slots))), np.int32)
        items[: len(held)] = held
        self._items, self._start, self._end = items, 0, len(held)
        self.add(slots)

    @property
    def held(self) -> Int32s:
        """The slots; valid until the next push."""
        return self._items[self._start : self._end]

    def pop(self, count: int, *, newest: bool = True) -> Int32s:
        """Remove up to `count` slots from one end; they are valid until the next push."""
        if newest:
            start = max(self._end - count, self._start)
            taken = self._items[start : self._end]
            self._end = start
        else:
            end = min(self._start + count, self._end)
            taken = self._items[self._start : end]
            self._start = end
        return taken


class BucketSet:
    """The buckets of one group and size class."""

    __slots__ = (
        "buckets", "entries", "group", "parked", "ready_s", "size_class", "surplus", "takes",
    )  # fmt: skip

    def __init__(self, group: int, size_class: int) -> None:
        self.group = group
        self.size_class = size_class
        self.buckets: dict[int, Bucket] = {}
        self.entries = 0
        """In all buckets, including those that moved since."""
        self.parked = 0
        """Residents that are parked."""
        self.ready_s = 0.0
        """The estimated time at which the first of those in READY is wanted."""
        self.takes = 0
        """Searches by the static rule."""
        self.surplus = FAR
        """Of the static rule: the fewest expendable residents that were left over lately."""

    def push(self, key: int, slots: Int64s | Int32s) -> None:
        """Append slots to the bucket of a key."""
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = self.buckets[key] = Bucket()
        bucket.push(slots)
        self.entries += len(slots)

    def pop(self, key: int, count: int, *, newest: bool = True) -> Int32s:
        """Remove slots from the bucket of a key; they are valid until the next push."""
        bucket = self.buckets[key]
        slots = bucket.pop(count, newest=newest)
        if not len(bucket):
            del self.buckets[key]
        self.entries -= len(slots)
        return slots


class NextUseBuckets:
    """All buckets, and the tables by slot that tell which bucket each resident is in.

    Args: arena: of the slots. pins: int[slots], of the cache.
    """

    def __init__(self, arena: Arena, pins: Int32s) -> None:
        self._arena = arena
        self._pins = pins
        # Sized for the largest arena; only the part that was ever used takes memory.
        self.key = np.empty(arena.slot_limit, np.int64)
        """Of slots that were entered."""
        self.group = np.zeros(arena.slot_limit, np.int32)
        self.prefetched = np.zeros(arena.slot_limit, np.bool_)
        """Filled before a request, and not used since."""
        self.parked = np.zeros(arena.slot_limit, np.bool_)
        """Pinned, and in no bucket; `key` tells where they were, or belong since."""
        self.of_class: list[dict[int, BucketSet]] = []
        """By size class, by group."""
        self.residents = Residents(
            self.key,
            self.group,
            self.prefetched,
            arena.tables()[1],
            arena.slab_class,
            arena.slots_per_slab,
        )
        self.add_classes()

    def add_classes(self) -> None:
        """Add the size classes of new domains."""
        classes = self._arena.domain_count * self._arena.class_count
        self.of_class += [{} for _ in range(classes - len(self.of_class))]

    def enter(self, slots: Int64s, group: int) -> None:
        """Slots are being filled for a group; they are in no bucket yet."""
        self.key[slots] = NONE
        self.group[slots] = group

    def put(self, slots: Int64s, size_class: int, key: int) -> None:
        """Move slots of one size class to their groups' buckets of a key."""
        if not len(slots):
            return
        group = self.residents.put(slots, key)
        if group != MIXED:
            self.push(self.bucket_set(group, size_class), key, slots)
            return
        for group, rows in self.by_group(slots):
            self.push(self.bucket_set(group, size_class), key, slots[rows])

    def park(self, bucket_set: BucketSet, slots: Int64s, keys: Int64s) -> tuple[Int64s, Int64s]:
        """Park those of these slots, which were popped, that are pinned; return the others."""
        pinned = self._pins[slots] > 0
        parked = slots[pinned]
        self.key[parked] = keys[pinned]
        # One that was used since may have got an entry again, and be found a second time.
        bucket_set.parked += len(parked) - int(np.count_nonzero(self.parked[parked]))
        self.parked[parked] = True
        return slots[~pinned], keys[~pinned]

    def put_back(self, bucket_set: BucketSet, slots: Int64s, key: int) -> None:
        """Move popped slots that cannot be evicted to the bucket of a key, or park them."""
        slots, _ = self.park(bucket_set, slots, np.full(len(slots), key))
        self.put(slots, bucket_set.size_class, key)

    def unpark(self, slots: Int64s) -> None:
        """Put those of these slots that are parked into buckets again: of the key that they had, or
        STALE, since estimates may be old."""
        slots = slots[self.parked[slots]]
        if not len(slots):
            return
        self.parked[slots] = False
        keys = self.key[slots]
        keys[keys <= READY] = STALE
        classes = self._arena.slab_class[slots // self._arena.slots_per_slab]
        for size_class, key in set(zip(classes.tolist(), keys.tolist(), strict=True)):
            chosen = slots[(classes == size_class) & (keys == key)]
            for group, rows in self.by_group(chosen):
                self.bucket_set(group, size_class).parked -= len(chosen[rows])
            self.put(chosen, size_class, key)

    def by_group(self, slots: Int64s) -> list[tuple[int, Int64s | slice]]:
        """Return each group with its rows; mostly there is one."""
        group = self.residents.group(slots)
        if group != MIXED:
            return [(group, _ALL)]
        groups = self.group[slots]
        return [(g, np.flatnonzero(groups == g)) for g in np.unique(groups).tolist()]

    def push(self, bucket_set: BucketSet, key: int, slots: Int64s | Int32s) -> None:
        """Append slots that have a key already to its bucket."""
        bucket = bucket_set.buckets.get(key)
        if bucket is not None:
            if bucket.add(slots):
                bucket_set.entries += len(slots)
                return
            if len(bucket) >= FEW:
                # Before it grows: entries that moved, which will never be looked for here, go.
                bucket_set.push(key, self.pop(bucket_set, key, len(bucket), after=key))
        bucket_set.push(key, slots)

    def bucket_set(self, group: int, size_class: int) -> BucketSet:
        """Return the buckets of a group and size class, which may be new."""
        bucket_sets = self.of_class[size_class]
        bucket_set = bucket_sets.get(group)
        if bucket_set is None:
            bucket_set = bucket_sets[group] = BucketSet(group, size_class)
        return bucket_set

    def sort_in(self, bucket_set: BucketSet, slots: Int64s, keys: Int64s) -> None:
        """Move slots to the buckets of their keys, in any order."""
        self.spread(bucket_set, *by_key(slots, keys, FAR))

    def spread(self, bucket_set: BucketSet, slots: Int64s, rising: Int64s) -> None:
        """Move slots to the buckets of their keys, which rise."""
        if not len(slots):
            return
        self.key[slots] = rising
        edges = (rising[1:] != rising[:-1]).nonzero()[0] + 1
        starts = [0, *edges.tolist()]
        entries = slots.astype(np.int32)
        for key, start, stop in zip(
            rising[starts].tolist(), starts, [*starts[1:], len(slots)], strict=True
        ):
            self.push(bucket_set, key, entries[start:stop])

    def pop(
        self, bucket_set: BucketSet, key: int, count: int, *, newest: bool = True, after: int = NONE
    ) -> Int64s:
        """Remove entries from a bucket; return those that still belong there, each once. They are
        in no bucket then, whatever other entry names them; or get the key `after`."""
        entries = bucket_set.pop(key, count, newest=newest)
        return self.residents.take(entries, key, bucket_set.group, bucket_set.size_class, after)


class EvictionSearch:
    """Finds the residents with the farthest next use; see the module.

    Args:
        next_use: when samples will be wanted.
        first, count: int[slots], of the cache: the samples in each slot.
    """

    def __init__(
        self, buckets: NextUseBuckets, next_use: NextUse, first: Int64s, count: Int32s
    ) -> None:
        self._buckets = buckets
        self._next_use = next_use
        self._first = first
        self._count = count
        self.widths: dict[int, float] = {}
        """By group: the seconds that one key spans."""

    def take(
        self, group: Group, bucket_set: BucketSet, count: int, usable: Usable, latest: float | None
    ) -> Int64s:
        """Take up to `count` usable slots with the farthest next use out of the buckets. More that
        the search finds go to READY.

        Args: latest: take only samples wanted after this time, if not None.
        """
        width = self.width(group)
        self._expire(bucket_set, int(self._next_use.turn_at / width))
        # Surplus for the next call: examining many costs little more than examining few. What
        # silent jobs have seen changes too fast for that.
        more = min(MOST_READY, bucket_set.entries // READY_SHARE) if group.announced else 0
        missing = count if READY in bucket_set.buckets else max(count, more)
        found, looked = [NO_SLOTS], 0
        nearest = FAR
        spared: list[tuple[Int64s, Int64s]] = []
        slots, keys = NO_SLOTS, NO_SLOTS
        unsorted = len(bucket_set.buckets.get(STALE, ()))
        if unsorted > min(bucket_set.entries // UNSORTED_SHARE, MOST_UNSORTED):
            most = max(MOST_LOOKED_AT, 8 * count)
            least = 0 if latest is None else int(latest / width) + 1
            slots, keys = self._sort_stale(group, bucket_set, most, missing, least)
        while True:
            good = usable(slots)
            if np.count_nonzero(good) < len(slots):
                spared.append(self._buckets.park(bucket_set, slots[~good], keys[~good]))
                slots, keys = slots[good], keys[good]
            if len(slots) > missing:
                spared.append((slots[missing:], keys[missing:]))
                slots, keys = slots[:missing], keys[:missing]
            found.append(slots)
            missing -= len(slots)
            nearest = min(nearest, int(np.minimum.reduce(keys, initial=FAR)))
            if missing <= 0 or looked >= MOST_LOOKED_AT + 8 * count:
                break
            # Twice as many each time: where most are pinned, few at a time would take for ever.
            slots, keys = self._pop_farthest(bucket_set, max(missing, looked), latest, width)
            if not len(slots):
                break
            looked += len(slots)
            slots, keys = self._reexamine(group, bucket_set, slots, keys)
        for slots, keys in spared:
            self._buckets.sort_in(bucket_set, slots, keys)
        chosen = np.concatenate(found)
        if len(chosen) > count:
            self._buckets.put(chosen[count:][::-1].copy(), bucket_set.size_class, READY)
            bucket_set.ready_s = np.inf if nearest == FAR else nearest * width
        return chosen[:count]

    def _pop_farthest(
        self, bucket_set: BucketSet, count: int, latest: float | None, width: float
    ) -> tuple[Int64s, Int64s]:
        """Remove entries from the buckets, farthest first; return those that still belong there,
        each once, and their keys."""
        parts, keys = [], []
        for key in sorted(bucket_set.buckets, reverse=True):
            if key in (STALE, READY):
                continue
            if latest is not None and key < FAR and key * width <= latest:
                break
            part = self._pop(bucket_set, key, count)
            parts.append(part)
            keys.append(np.full(len(part), key))
            count -= len(part)
            if not count:
                break
        slots = joined(parts)
        if len(slots) or latest is not None:
            return slots, joined(keys)
        slots = self._pop(bucket_set, STALE, count)
        return slots, np.full(len(slots), STALE)

    def _pop(self, bucket_set: BucketSet, key: int, count: int) -> Int64s:
        """Remove entries until `count` of them still belong there, or none is left."""
        parts: list[Int64s] = []
        while count and key in bucket_set.buckets:
            parts.append(self._buckets.pop(bucket_set, key, count))
            count -= len(parts[-1])
        return joined(parts)

    def _reexamine(
        self, group: Group, bucket_set: BucketSet, slots: Int64s, keys: Int64s
    ) -> tuple[Int64s, Int64s]:
        """Move those wanted sooner than estimated to where they belong; return the others."""
        timed = np.flatnonzero(keys <= FAR)
        if not len(timed):
            return slots, keys
        actual, limit = self._keys(group, slots[timed]), keys[timed] - SLACK
        far = keys[timed] == FAR
        if far.any():
            # All others may be as near: then the farthest of them is far enough.
            limit[far] = max((k for k in bucket_set.buckets if k < FAR), default=0)
        sooner = actual < limit
        if sooner.any():
            self._buckets.sort_in(bucket_set, slots[timed[sooner]], actual[sooner])
            kept = np.ones(len(slots), np.bool_)
            kept[timed[sooner]] = False
            slots, keys = slots[kept], keys[kept]
        return slots, keys

    def _expire(self, bucket_set: BucketSet, due: int) -> None:
        """Residents that should have been used by now become STALE."""
        for key in [k for k in bucket_set.buckets if k < due - 1]:
            slots = self._buckets.pop(bucket_set, key, bucket_set.entries)
            self._buckets.put(slots, bucket_set.size_class, STALE)

    def _sort_stale(
        self, group: Group, bucket_set: BucketSet, count: int, wanted: int, least: int
    ) -> tuple[Int64s, Int64s]:
        """Examine up to `count` STALE residents and move them to their buckets.

        Returns: those that belong to the `wanted` farthest of all, with keys of `least` and more;
            they are in no bucket.
        """
        slots = self._buckets.pop(bucket_set, STALE, count)
        slots, keys = by_key(slots, self._keys(group, slots), FAR)
        cut = max(
            len(keys) - self._farther(bucket_set, keys, wanted), int(keys.searchsorted(least))
        )
        self._buckets.spread(bucket_set, slots[:cut], keys[:cut])
        return slots[cut:][::-1].copy(), keys[cut:][::-1].copy()

    def _farther(self, bucket_set: BucketSet, rising: Int64s, wanted: int) -> int:
        """Return how many of these keys are among the `wanted` highest of these and the buckets."""
        before = 0
        for key in sorted(bucket_set.buckets, reverse=True):
            if key in (STALE, READY):
                continue
            # Among equals the newest is evicted first, which are these.
            found = len(rising) - int(rising.searchsorted(key))
            if before + found >= wanted:
                return max(wanted - before, 0)
            before += len(bucket_set.buckets[key])
            if before + found >= wanted:
                return found
        return min(len(rising), wanted - before)

    def width(self, group: Group) -> float:
        """Return the seconds that one key spans; anew when it changed by a factor of two."""
        wanted = group.epoch_s(self._next_use.turn_at) / BUCKETS_PER_EPOCH
        width = self.widths.get(group.number)
        if width is None or not 0.5 < wanted / width < 2:
            self.widths[group.number] = width = wanted
            for bucket_sets in self._buckets.of_class:
                bucket_set = bucket_sets.get(group.number)
                for key in [k for k in bucket_set.buckets if k <= FAR] if bucket_set else ():
                    assert bucket_set is not None
                    slots = self._buckets.pop(bucket_set, key, bucket_set.entries)
                    self._buckets.put(slots, bucket_set.size_class, STALE)
        return width

    def _keys(self, group: Group, slots: Int64s) -> Int64s:
        """Return the key of each slot: that of its sample that is wanted soonest."""
        future, width = group.future(self._next_use.turn_at), self.widths[group.number]
        return future.keys(self._first, self._count, slots, width, FAR)
