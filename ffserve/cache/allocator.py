"""Slot allocator: free slots, idle slots, the policy's victims, emptied slabs.

Slots for samples to be read come from these sources, in this order:

1. slots of the size class that are free, or can be cut from a free slab;
2. slots of the size class with samples of idle shards (no session has them open);
3. a slab of another size class that holds only samples of idle shards;
4. a slab of another size class with samples of groups that have to give way (`Policy.givers`);
5. victims that the policy chooses among the residents of the size class;
6. any slab that can be emptied.

A size class is one of a domain, so sources 3, 4 and 6 move memory between users as well. Pinned
slots and slots that are being read stay. All evictions happen here: the samples of a slot are made
unreadable and forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ffserve.cache.arena import NO_SLOTS, Arena, first_run, joined
from ffserve.cache.policy import Policy
from ffserve.cache.tables import ShardTable
from ffserve.dtypes import Bools, Floats, Int64s
from ffserve.engine.slots import FAILED, LOADING, RESIDENT, Slots

STEAL_WINDOW = 256
"""If a slab must be emptied, this many slabs are compared."""

MOST_LOOKED_AT = 65_536
"""This many slots or samples are examined together, which takes 1 to 6 ms."""

GIVING_PAUSE_S = 2e-6
"""After all slots were examined in vain, at 40 ns each, the search pauses for this long per
slot."""

RETIRE_WINDOW = 16
"""When the arena shrinks, this many slabs are emptied together, which takes 5 ms with slots of 4
KiB."""

Retract: TypeAlias = Callable[[Int64s, Int64s, Int64s, Int64s], None]
"""Make blocks unreadable: firsts, counts, slot offsets, slot sizes. After it returns, no reader
accepts the old bytes."""

Part: TypeAlias = tuple[int, Int64s, bool]
"""Slots of one size class, and whether they are expendable: taken at another sample's cost."""


@dataclass(slots=True)
class CacheCounters:
    """Samples and blocks since the start."""

    asked: int = 0
    resident: int = 0
    joined: int = 0
    blocks_read: int = 0
    evicted: int = 0
    failed: int = 0
    prefetched: int = 0
    """Blocks read before a request for them."""
    wasted: int = 0
    """Prefetched blocks that were evicted before their first use."""


class Allocator:
    """Allocates and evicts; see the module.

    Args:
        slots: the cache's tables. retract: see Retract. counters: of the cache; evictions count.
    """

    def __init__(
        self,
        arena: Arena,
        shards: ShardTable,
        slots: Slots,
        policy: Policy,
        retract: Retract,
        counters: CacheCounters,
    ) -> None:
        self.idle_changed = False
        """Set by the owner of the shards when a shard loses its last session."""
        self.emptied, self.most_emptied = 0, math.inf
        """The number of slabs that were emptied, and its limit: an allocation for several samples
        ends there with the slots that it has; one sample always gets its slot. The scheduler sets
        both."""
        self._most_now = math.inf
        self._arena = arena
        self._shards = shards
        self._slots = slots
        self._state = slots.states
        self._policy = policy
        self._retract = retract
        self._counters = counters
        self._hand = self._retiring_hand = self._idle_hand = 0
        self._idle_slabs = 0
        """Slabs still to be examined for idle ones."""
        self._idle_found: list[int] = []
        """Slabs that were idle when they were examined."""
        self._idle_runs: list[tuple[int, int]] = []
        """Samples of idle shards that the policy does not know yet: first, end."""
        self._giving_hand = 0
        self._giving_found: list[int] = []
        """Slabs that groups had to give when they were examined."""
        self._giving_left = 0
        """Slabs to be examined before that is given up for a time."""
        self._giving_after = 0.0
        """When it is tried again."""

    # ---- allocating -----------------------------------------------------------------------

    def allocate(
        self,
        classes: list[tuple[int, Int64s | slice]],
        sizes: Int64s,
        group: int,
        latest: float | None,
    ) -> tuple[Int64s, list[Part], bool]:
        """Allocate a slot for each size.

        Slots of several size classes, and those of an incomplete allocation, are marked LOADING, so
        that the search for the next class does not take them again. A prefetch takes no slab from
        another class.

        Args: classes: each size class with its rows of `sizes`. latest: see Fetch.
        Returns: int64[n], slots, -1 where there is none; the slots by size class; whether each size
            has one.
        """
        self._most_now = self.most_emptied if len(sizes) > 1 else math.inf
        slots = np.full(len(sizes), -1, np.int64) if len(classes) > 1 else NO_SLOTS
        parts: list[Part] = []
        complete = True
        for size_class, rows in classes:
            wanted = sizes[rows]
            domain, rank = divmod(size_class, self._arena.class_count)
            if rank == self._arena.large:
                found, expendable = self._take_runs(wanted, domain, latest)
                parts += _parts(size_class, found, expendable)
            else:
                found, fresh = self._take(size_class, len(wanted), group, latest)
                if fresh < len(found):
                    parts.append((size_class, found[fresh:], True))
                if fresh:
                    parts.append((size_class, found[:fresh], False))
            filled = len(found) == len(wanted)
            if rank == self._arena.large:
                filled = bool((found >= 0).all())
            if filled and len(classes) == 1:
                return found, parts, True
            self._state[found[found >= 0]] = LOADING
            if len(classes) == 1:
                slots = np.full(len(sizes), -1, np.int64)
            slots[np.arange(len(sizes))[rows][: len(found)]] = found
            complete &= filled
        return slots, parts, complete

    def _take(
        self, size_class: int, wanted: int, group: int, latest: float | None
    ) -> tuple[Int64s, int]:
        """Return up to `wanted` slots, and how many of them (these come first) took no sample of
        the group's own."""
        found = self._arena.take(size_class, wanted)
        if len(found) < wanted:
            idle = self._from_idle(size_class, wanted - len(found))
            found = joined((found, idle)) if len(idle) else found
        while (
            len(found) < wanted
            and (self._idle_slabs or self._idle_found)
            and self.emptied < self._most_now
        ):
            self._state[found] = LOADING
            if not self._steal_idle(self._arena.run_length(size_class)):
                break
            found = joined((found, self._arena.take(size_class, wanted - len(found))))
        if len(found) < wanted and latest is None:
            found = self._take_given(size_class, wanted, group, found)
        fresh = len(found)
        if len(found) < wanted:
            missing = wanted - len(found)
            victims, others = self._from_policy(size_class, missing, group, latest)
            found = joined((found, victims)) if len(found) else victims
            fresh += others
        while len(found) < wanted and latest is None and self.emptied < self._most_now:
            self._state[found] = LOADING
            unwanted = self._steal(1)
            if unwanted is None:
                break
            stolen = self._arena.take(size_class, wanted - len(found))
            if not len(stolen):
                break  # its pages cannot be given to this domain
            if unwanted and fresh == len(found):
                fresh += len(stolen)
            found = joined((found, stolen))
        return found, fresh

    def _from_policy(
        self, size_class: int, count: int, group: int, latest: float | None
    ) -> tuple[Int64s, int]:
        victims, others = self._policy.victims(size_class, count, self._usable, group, latest)
        self._evict(victims)
        return victims, others

    def _take_runs(self, sizes: Int64s, domain: int, latest: float | None) -> tuple[Int64s, Bools]:
        """Return a large slot for each size, -1 where there is none, and which are expendable."""
        slots, expendable = np.full(len(sizes), -1, np.int64), np.zeros(len(sizes), np.bool_)
        for row, size in enumerate(sizes.tolist()):
            slot = self._arena.take_run(size, domain)
            if slot is None and latest is None and self.emptied < self._most_now:
                unwanted = self._steal(-(-size // self._arena.slab_size))
                if unwanted is not None:
                    slot, expendable[row] = self._arena.take_run(size, domain), not unwanted
            if slot is not None:
                slots[row] = slot
                self._state[slot] = LOADING
        return slots, expendable

    # ---- idle shards ----------------------------------------------------------------------

    def _from_idle(self, size_class: int, count: int) -> Int64s:
        if self.idle_changed:
            self.idle_changed = False
            self._idle_slabs = self._arena.open_count
            bases, counts = self._shards.bases, self._shards.counts
            self._idle_runs = [
                (int(bases[row]), int(bases[row] + counts[row])) for row in self._shards.idle()
            ]
        evicted = self._evict_idle(size_class, count)
        if len(evicted) < count and self._idle_runs:
            self._find_idle()
            evicted = joined((evicted, self._evict_idle(size_class, count - len(evicted))))
        return evicted

    def _evict_idle(self, size_class: int, count: int) -> Int64s:
        if not self._policy.has_idle(size_class):
            return NO_SLOTS
        victims = self._policy.idle_victims(size_class, count, self._usable_idle)
        self._evict(victims)
        return victims

    def _find_idle(self) -> None:
        """Report more samples of idle shards to the policy."""
        looked = 0
        while self._idle_runs and looked < MOST_LOOKED_AT:
            first, end = self._idle_runs.pop()
            stop = min(end, first + MOST_LOOKED_AT - looked)
            if stop < end:
                self._idle_runs.append((stop, end))
            looked += stop - first
            # The shard may have been opened again, or dropped, since it was found idle.
            slots = self.slots_of(first, stop)
            idle = slots[self._state[slots] == RESIDENT]
            idle = idle[~self._wanted(idle)]
            classes = self._classes(idle)
            for size_class in np.unique(classes).tolist():
                self._policy.abandon(idle[classes == size_class], size_class)

    def _steal_idle(self, most: int) -> bool:
        """Empty up to `most` idle slabs of any size class, neighbours if possible; False when none
        is among those examined this time.

        Without this, a job with samples of one size would evict its own samples while memory is
        full of samples of another size that an earlier job left behind.
        """
        if not self._shards.idle():
            self._idle_slabs = 0
            self._idle_found.clear()
            return False
        heads, total = self._arena.heads(), self._arena.open_count
        if not self._idle_found:
            low = self._idle_hand if self._idle_hand < total else 0
            self._idle_hand = high = min(low + self._window(), total)
            self._idle_slabs = max(0, self._idle_slabs - (high - low))
            self._idle_found = self._idle_in(heads, low, high)
        emptied = 0
        while self._idle_found and emptied < most:
            slab = self._idle_found.pop()
            if slab < total and self._idle_in(heads, slab, slab + 1):
                self._empty(slab)
                emptied += 1
        return emptied > 0

    def _idle_in(self, heads: Int64s, low: int, high: int) -> list[int]:
        """Return the slabs of [low, high) that hold samples of idle shards only."""
        busy = self._busy(heads, low, high)
        wanted, _ = self._worth(heads, low, high)
        idle = ~busy & ~wanted & ~self._arena.free_slabs(low, high)
        found: list[int] = (low + np.flatnonzero(idle)).tolist()
        return found

    # ---- other groups -----------------------------------------------------------------------

    def _take_given(self, size_class: int, wanted: int, group: int, found: Int64s) -> Int64s:
        """Add slots from slabs that other groups have to give.

        Groups whose samples are of other sizes, or of other users, meet in no size class: without
        this, who came first would keep all memory.
        """
        if self._policy.is_alone(group) or self._policy.turn_at < self._giving_after:
            return found
        run = self._arena.run_length(size_class)
        while len(found) < wanted and self.emptied < self._most_now:
            self._state[found] = LOADING
            coming, emptied = int(self._arena.sizes(found).sum()), 0
            while emptied < run and (givers := self._policy.givers(size_class, group, coming)):
                slab = self._given_slab(givers)
                if slab is None:
                    break
                self._empty(slab)
                coming += self._arena.slab_size
                emptied += 1
            if not emptied:
                break
            found = joined((found, self._arena.take(size_class, wanted - len(found))))
        return found

    def _given_slab(self, givers: list[int]) -> int | None:
        """Return a slab that holds samples of these groups only, none of them busy; None: none is
        among those examined this time."""
        heads, total = self._arena.heads(), self._arena.open_count
        if not self._giving_found:
            if not self._giving_left:
                self._giving_left = total
            high = self._giving_hand if 0 < self._giving_hand <= total else total
            self._giving_hand = low = max(high - self._window(), 0)
            self._giving_left = max(self._giving_left - (high - low), 0)
            self._giving_found = self._given_in(heads, low, high, givers)
        while self._giving_found:
            slab = self._giving_found.pop()
            if slab < total and self._given_in(heads, slab, slab + 1, givers):
                self._giving_left = 0
                return slab
        if not self._giving_left:
            pause_s = GIVING_PAUSE_S * self._arena.slots_per_slab * total
            self._giving_after = self._policy.turn_at + pause_s
        return None

    def _given_in(self, heads: Int64s, low: int, high: int, givers: list[int]) -> list[int]:
        """Return the slabs of [low, high) that these groups can give."""
        first, per_slab = int(heads[low]), self._arena.slots_per_slab
        span = slice(first * per_slab, high * per_slab)
        states = self._state[span]
        resident = states == RESIDENT
        kept = (states == LOADING) | (states == FAILED) | (self._slots.pins[span] > 0)
        kept |= resident & ~np.isin(self._policy.buckets.group[span], givers)
        chosen = heads[low:high] - first
        given = resident.reshape(-1, per_slab).any(axis=1) & ~kept.reshape(-1, per_slab).any(axis=1)
        found: list[int] = (low + np.flatnonzero(given[chosen])).tolist()
        return found

    # ---- slabs ----------------------------------------------------------------------------

    def resize(self, slabs: int) -> None:
        """Hand out slabs below `slabs` only; `retire` empties those above."""
        self._arena.resize(slabs)

    def retire(self) -> bool:
        """Empty some of the slabs beyond the arena's size; return whether all are empty now. Slabs
        with slots that are pinned or being read wait for a later call."""
        slabs = self._arena.retiring()
        if not len(slabs):
            return True
        behind = slabs[slabs >= self._retiring_hand]
        low = int(behind[0] if len(behind) else slabs[0])
        high = min(low + RETIRE_WINDOW, self._arena.slab_count)
        self._retiring_hand = high
        busy = self._busy(self._arena.heads(), low, high)
        for slab in (low + np.flatnonzero(~busy)).tolist():
            self._empty(slab)
        return not len(self._arena.retiring())

    def _steal(self, need: int) -> bool | None:
        """Empty a run of `need` slabs.

        Returns: None when every such run has a busy slot; else whether the run held samples of idle
            shards only.
        """
        found = self._choose_run(need)
        if found is None:
            return None
        start, unwanted = found
        for slab in range(start, start + need):
            self._empty(slab)
        return unwanted

    def _choose_run(self, need: int) -> tuple[int, bool] | None:
        """Return the start of a run of slabs without a busy slot, and whether it holds samples of
        idle shards only. A run without samples worth keeping is preferred, then one with few.

        The search continues where the last one ended and examines one window at a time: examining
        every slot of a large arena would delay all requests.
        """
        heads = self._arena.heads()
        total = self._arena.open_count
        window = max(self._window(), 4 * need)
        starts = [min(self._hand, max(0, total - window)), *range(0, total, window)]
        spans = [(start, min(start + window, total)) for start in starts]
        if need > 1 and window < total:
            spans.append((0, total))
        for low, high in spans:
            busy = self._busy(heads, low, high)
            if first_run(~busy, need) is None:
                continue  # The worth of the samples takes far longer to compute.
            wanted, kept = self._worth(heads, low, high)
            found = first_run(~busy & (kept == 0), need)
            if found is None and need == 1:
                free = np.flatnonzero(~busy)
                found = int(free[np.argmin(kept[free])]) if len(free) else None
            elif found is None:
                found = first_run(~busy, need)
            if found is not None:
                self._hand = low
                return low + found, not wanted[found : found + need].any()
        return None

    def _busy(self, heads: Int64s, low: int, high: int) -> Bools:
        """Return whether each slab of [low, high) has a busy slot. A slab inside a large slot
        counts as its first slab."""
        first, per_slab = int(heads[low]), self._arena.slots_per_slab
        span = slice(first * per_slab, high * per_slab)
        states = self._state[span]
        busy = (states == LOADING) | (states == FAILED) | (self._slots.pins[span] > 0)
        in_slab: Bools = busy.reshape(-1, per_slab).any(axis=1)[heads[low:high] - first]
        return in_slab

    def _worth(self, heads: Int64s, low: int, high: int) -> tuple[Bools, Floats]:
        """Return for each slab of [low, high): whether it has a sample of an open shard; how many
        slots are worth keeping (those wanted late count less). Large slots as in `_busy`."""
        first, per_slab = int(heads[low]), self._arena.slots_per_slab
        resident = np.flatnonzero(self._state[first * per_slab : high * per_slab] == RESIDENT)
        slots = resident + first * per_slab
        wanted = self._wanted(slots)
        kept = self._policy.weights(slots) * wanted
        slabs = resident // per_slab
        chosen = heads[low:high] - first
        return (
            (np.bincount(slabs[wanted], minlength=high - first) > 0)[chosen],
            np.bincount(slabs, kept, minlength=high - first).astype(np.float64)[chosen],
        )

    def _window(self) -> int:
        """Return how many slabs are examined together."""
        return min(STEAL_WINDOW, max(1, MOST_LOOKED_AT // self._arena.slots_per_slab))

    def _empty(self, slab: int) -> None:
        """Evict all residents of a slab."""
        self.emptied += 1
        low, high = self._arena.members(slab)
        victims = low + np.flatnonzero(self._state[low:high] == RESIDENT)
        self._evict(victims)
        self._arena.free(victims)

    # ---- evicting -------------------------------------------------------------------------

    def evict(self, first: int, end: int) -> bool:
        """Evict the samples [first, end) of a shard. False when one of their slots is pinned or
        being read: then none is evicted.

        Cost: 0.14 us per sample, more where memory is slow.
        """
        inside = self.slots_of(first, end)
        if not self._slots.usable(inside).all():
            return False
        self._evict(inside)
        self._arena.free(inside)
        return True

    def _evict(self, slots: Int64s) -> None:
        """Make the samples of resident slots unreadable and forget them. The slots stay taken."""
        if not len(slots):
            return
        self._retract(*self._slots.vacate(slots))
        self._counters.wasted += self._policy.leave(slots)
        self._counters.evicted += len(slots)

    def slots_of(self, first: int, end: int) -> Int64s:
        """Return the slots that hold samples [first, end), each once."""
        held = self._slots.slot_of[first:end].astype(np.int64)
        held = held[held > 0] - 1
        # numpy.unique uses a hash table here, which takes 30 times as long as sorting.
        held.sort()
        each = np.ones(len(held), np.bool_)
        np.not_equal(held[1:], held[:-1], out=each[1:])
        return held[each]

    def _usable(self, slots: Int64s) -> Bools:
        usable = self._slots.usable(slots)
        if self._arena.open_count < self._arena.slab_count:
            usable &= self._arena.within(slots)
        return usable

    def _usable_idle(self, slots: Int64s) -> Bools:
        return self._usable(slots) & ~self._wanted(slots)

    def _wanted(self, slots: Int64s) -> Bools:
        """Return for each resident slot whether a session has its shard open."""
        sessions: Int64s = self._shards.sessions[self._shards.rows(self._slots.firsts[slots])]
        wanted: Bools = sessions > 0
        return wanted

    def _classes(self, slots: Int64s) -> Int64s:
        slabs = slots // self._arena.slots_per_slab
        classes: Int64s = self._arena.slab_class[slabs].astype(np.int64)
        return classes


def _parts(size_class: int, slots: Int64s, expendable: Bools) -> list[Part]:
    taken = slots >= 0
    parts = [
        (size_class, slots[taken & expendable], True),
        (size_class, slots[taken & ~expendable], False),
    ]
    return [part for part in parts if len(part[1])]
