"""What of one group is wanted last: the search by next use, on the stacks of one size class.

Time is counted in keys: parts of an epoch (PARTS), since monotonic seconds began.

A key is what was believed when the resident was looked at last. A belief that became too near is
found out when its time is due: the stack becomes UNSURE. One that became too far is found out when
it is to go: victims are looked at once more. So nothing has to be done at a use, nor when a job
joins, leaves or changes its pace. Within a key the newest goes first: ties leave the resident.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.next_use import Group, NextUse
from ffserve.cache.shelves import FAR, READY, UNSURE, Shelf, Shelves
from ffserve.engine.residents import by_key

PARTS = 64
"""Parts of an epoch that keys tell apart."""
SLACK = 2
"""Parts by which a victim may be wanted earlier than was believed."""
UNSORTED_SHARE = 128
"""Residents are looked at when one part in this many is unsure, so that it is done in bulk."""
MOST_UNSORTED = 4096
READY_SHARE, MOST_READY = 96, 4096
"""Victims are looked for this many at a time, at most one part in so many of the residents."""
MOST_LOOKED_AT = 4096
"""Residents that one search looks at before it takes what it has."""

Int64s: TypeAlias = NDArray[np.int64]
Usable: TypeAlias = Callable[[Int64s], NDArray[np.bool_]]
"""Which of these slots can be evicted just now."""
_NO_SLOTS: Int64s = np.zeros(0, np.int64)


class Farthest:
    """See the module's text.

    Args: uses: who wants what. first, count: int[slots], the cache's: the samples in a slot.
    """

    def __init__(
        self, shelves: Shelves, uses: NextUse, first: Int64s, count: NDArray[np.int32]
    ) -> None:
        self._shelves = shelves
        self._uses = uses
        self._first = first
        self._count = count
        self.widths: dict[int, float] = {}
        """By group: the seconds that one key stands for."""

    def take(
        self, group: Group, shelf: Shelf, count: int, usable: Usable, latest: float | None
    ) -> Int64s:
        """Take up to `count` slots off the stacks that will be wanted last; some more, which they
        are found with, go on READY.

        Args: latest: take only what will be wanted after this time.
        """
        width = self.width(group)
        self._expire(shelf, int(self._uses.now / width))
        # Some more than are needed, for the next: looking at many costs little more than at few.
        # What silent jobs have seen changes faster than that.
        more = min(MOST_READY, shelf.entries // READY_SHARE) if group.announced else 0
        missing = count if READY in shelf.stacks else max(count, more)
        found, looked = [_NO_SLOTS], 0
        nearest = FAR
        spared: list[tuple[Int64s, Int64s]] = []
        slots, keys = _NO_SLOTS, _NO_SLOTS
        unsorted = len(shelf.stacks.get(UNSURE, ()))
        if unsorted > min(shelf.entries // UNSORTED_SHARE, MOST_UNSORTED):
            most = max(MOST_LOOKED_AT, 8 * count)
            least = 0 if latest is None else int(latest / width) + 1
            slots, keys = self._sort_out(group, shelf, most, missing, least)
        while True:
            good = usable(slots)
            if np.count_nonzero(good) < len(slots):
                spared.append((slots[~good], keys[~good]))
                slots, keys = slots[good], keys[good]
            if len(slots) > missing:
                spared.append((slots[missing:], keys[missing:]))
                slots, keys = slots[:missing], keys[:missing]
            found.append(slots)
            missing -= len(slots)
            nearest = min(nearest, int(np.minimum.reduce(keys, initial=FAR)))
            if missing <= 0 or looked >= MOST_LOOKED_AT + 8 * count:
                break
            # As many again each time: where most are pinned, few would be looked at for ever.
            slots, keys = self._pop_farthest(shelf, max(missing, looked), latest, width)
            if not len(slots):
                break
            looked += len(slots)
            slots, keys = self._look_again(group, shelf, slots, keys)
        for slots, keys in spared:
            self._shelves.sort_in(shelf, slots, keys)
        chosen = np.concatenate(found)
        if len(chosen) > count:
            self._shelves.put(chosen[count:][::-1].copy(), shelf.size_class, READY)
            shelf.ready_s = np.inf if nearest == FAR else nearest * width
        return chosen[:count]

    def _pop_farthest(
        self, shelf: Shelf, count: int, latest: float | None, width: float
    ) -> tuple[Int64s, Int64s]:
        """Take slots off the stacks, farthest first; return those that still belong there, each
        once, and their keys."""
        parts, keys = [], []
        for key in sorted(shelf.stacks, reverse=True):
            if key in (UNSURE, READY):
                continue
            if latest is not None and key < FAR and key * width <= latest:
                break
            looked_at = min(count, len(shelf.stacks[key]))
            part = self._shelves.pop(shelf, key, count)
            parts.append(part)
            keys.append(np.full(len(part), key))
            count -= looked_at
            if count <= 0:
                break
        if parts:
            return np.concatenate(parts), np.concatenate(keys)
        if UNSURE not in shelf.stacks or latest is not None:
            return _NO_SLOTS, _NO_SLOTS
        slots = self._shelves.pop(shelf, UNSURE, count)
        return slots, np.full(len(slots), UNSURE)

    def _look_again(
        self, group: Group, shelf: Shelf, slots: Int64s, keys: Int64s
    ) -> tuple[Int64s, Int64s]:
        """Put those that are wanted sooner than was believed where they belong; return the rest."""
        timed = np.flatnonzero(keys <= FAR)
        if not len(timed):
            return slots, keys
        actual, limit = self._keys(group, slots[timed]), keys[timed] - SLACK
        far = keys[timed] == FAR
        if far.any():
            # All that is left may be as near: then the farthest of it is far enough.
            limit[far] = max((k for k in shelf.stacks if k < FAR), default=0)
        sooner = actual < limit
        if sooner.any():
            self._shelves.sort_in(shelf, slots[timed[sooner]], actual[sooner])
            kept = np.ones(len(slots), np.bool_)
            kept[timed[sooner]] = False
            slots, keys = slots[kept], keys[kept]
        return slots, keys

    def _expire(self, shelf: Shelf, due: int) -> None:
        """What should have been used by now is known no longer."""
        for key in [k for k in shelf.stacks if k < due - 1]:
            slots = self._shelves.pop(shelf, key, shelf.entries)
            self._shelves.put(slots, shelf.size_class, UNSURE)

    def _sort_out(
        self, group: Group, shelf: Shelf, count: int, wanted: int, least: int
    ) -> tuple[Int64s, Int64s]:
        """Look at up to `count` residents that nobody looked at.

        Returns: those that belong to the `wanted` farthest of all, with keys of `least` and more.
            They need not go over a stack.
        """
        slots = self._shelves.pop(shelf, UNSURE, count)
        slots, keys = by_key(slots, self._keys(group, slots), FAR)
        cut = max(len(keys) - self._farther(shelf, keys, wanted), int(keys.searchsorted(least)))
        self._shelves.spread(shelf, slots[:cut], keys[:cut])
        return slots[cut:][::-1].copy(), keys[cut:][::-1].copy()

    def _farther(self, shelf: Shelf, rising: Int64s, wanted: int) -> int:
        """Return how many of these keys are among the `wanted` highest, the stacks' included."""
        before = 0
        for key in sorted(shelf.stacks, reverse=True):
            if key in (UNSURE, READY):
                continue
            # Of equals the newest goes first, which are these.
            found = len(rising) - int(rising.searchsorted(key))
            if before + found >= wanted:
                return max(wanted - before, 0)
            before += len(shelf.stacks[key])
            if before + found >= wanted:
                return found
        return min(len(rising), wanted - before)

    def width(self, group: Group) -> float:
        """Return the seconds that one key stands for; anew when the pace has changed a lot."""
        wanted = group.epoch_s(self._uses.now) / PARTS
        width = self.widths.get(group.number)
        if width is None or not 0.5 < wanted / width < 2:
            self.widths[group.number] = width = wanted
            for shelves in self._shelves.of_class:
                shelf = shelves.get(group.number)
                for key in [k for k in shelf.stacks if k <= FAR] if shelf else ():
                    assert shelf is not None
                    slots = self._shelves.pop(shelf, key, shelf.entries)
                    self._shelves.put(slots, shelf.size_class, UNSURE)
        return width

    def _keys(self, group: Group, slots: Int64s) -> Int64s:
        """Return the key of each slot: of the sample in it that is wanted soonest."""
        future, width = group.future(self._uses.now), self.widths[group.number]
        return future.keys(self._first, self._count, slots, width, FAR)
