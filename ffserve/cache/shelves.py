"""Residents on stacks, by when they are believed to be wanted next.

A key is the time of next use in parts of an epoch, or one of

    IDLE      nobody has its shard open                  first to go
    PASSING   static: came at another's cost             oldest first
    UNSURE    not looked at since it came, or since its time was due; static: kept, newest first
    READY     looked at, and the next to go
    FAR       not wanted as far as is known

Nothing is searched for when a resident moves to another stack, is evicted or is given to another
group: its key says where it belongs, and what a stack names besides is left out when it is popped.
What all this is for: `policy`.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.arena import Arena
from ffserve.engine.residents import MIXED, NO_KEY, Residents, by_key

NONE = NO_KEY
FAR, READY, UNSURE, PASSING, IDLE = 1 << 58, 1 << 59, 1 << 60, 1 << 61, 1 << 62
FEW = 256
"""From so many on a stack is looked through for what moved on before it grows."""
SMALLEST_STACK = 128
"""Slots that a stack has room for at once: a turn's, since what passes is often as much."""

Int64s: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]
_ALL = slice(None)


class Stack:
    """Slots in the order in which they came."""

    __slots__ = ("_end", "_items", "_start")

    def __init__(self) -> None:
        self._items = np.empty(SMALLEST_STACK, np.int32)
        self._start = self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    def add(self, slots: Int64s | Int32s) -> bool:
        """Put slots on top, unless it takes more memory; whether that was done."""
        end = self._end + len(slots)
        if end > len(self._items):
            return False
        self._items[self._end : end] = slots
        self._end = end
        return True

    def push(self, slots: Int64s | Int32s) -> None:
        """Put slots on top."""
        if self.add(slots):
            return
        held = self.held
        items = np.empty(max(SMALLEST_STACK, 2 * (len(held) + len(slots))), np.int32)
        items[: len(held)] = held
        self._items, self._start, self._end = items, 0, len(held)
        self.add(slots)

    @property
    def held(self) -> Int32s:
        """The slots, to be looked at until the next push."""
        return self._items[self._start : self._end]

    def pop(self, count: int, *, newest: bool = True) -> Int32s:
        """Take up to `count` slots from one end; they may be looked at until the next push."""
        if newest:
            start = max(self._end - count, self._start)
            taken = self._items[start : self._end]
            self._end = start
        else:
            end = min(self._start + count, self._end)
            taken = self._items[self._start : end]
            self._start = end
        return taken


class Shelf:
    """The stacks of one group and size class."""

    __slots__ = ("entries", "group", "ready_s", "size_class", "stacks")

    def __init__(self, group: int, size_class: int) -> None:
        self.group = group
        self.size_class = size_class
        self.stacks: dict[int, Stack] = {}
        self.entries = 0
        """On all stacks; those that moved on since included."""
        self.ready_s = 0.0
        """When the first of those on READY is wanted, as was believed when they came there."""

    def push(self, key: int, slots: Int64s | Int32s) -> None:
        """Put slots on the stack of a key."""
        stack = self.stacks.get(key)
        if stack is None:
            stack = self.stacks[key] = Stack()
        stack.push(slots)
        self.entries += len(slots)

    def pop(self, key: int, count: int, *, newest: bool = True) -> Int32s:
        """Take slots from the stack of a key; they may be looked at until the next push."""
        stack = self.stacks[key]
        slots = stack.pop(count, newest=newest)
        if not len(stack):
            del self.stacks[key]
        self.entries -= len(slots)
        return slots


class Shelves:
    """All stacks, and the tables of slots that say what belongs there.

    Args: arena: whose slots these are.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # As large as the arena may become, touched as far as it ever was.
        self.key = np.empty(arena.slot_limit, np.int64)
        self.known = 0
        """Slots below this have a key."""
        self.group = np.zeros(arena.slot_limit, np.int32)
        self.ahead = np.zeros(arena.slot_limit, np.bool_)
        """Filled before anybody asked, and not used since."""
        self.large = len(arena.class_sizes)
        """The size class of what is larger than a slab."""
        self.of_class: list[dict[int, Shelf]] = [{} for _ in range(self.large + 1)]
        """By size class, by group."""
        self.residents = Residents(
            self.key,
            self.group,
            self.ahead,
            arena.tables()[1],
            arena.slab_class,
            arena.slots_per_slab,
            self.large,
        )
        self.follow_arena()

    def follow_arena(self) -> None:
        """The arena may have more slots than before: those are on no stack."""
        if self._arena.slot_count > self.known:
            self.key[self.known : self._arena.slot_count] = NONE
            self.known = self._arena.slot_count

    def put(self, slots: Int64s, size_class: int, key: int) -> None:
        """Put slots of one size class on their groups' stacks of a key."""
        if not len(slots):
            return
        group = self.residents.put(slots, key)
        if group != MIXED:
            self.push(self.shelf(group, size_class), key, slots)
            return
        for group, rows in self.by_group(slots):
            self.push(self.shelf(group, size_class), key, slots[rows])

    def by_group(self, slots: Int64s) -> list[tuple[int, Int64s | slice]]:
        """Return each group with its rows; mostly there is one."""
        group = self.residents.group(slots)
        if group != MIXED:
            return [(group, _ALL)]
        groups = self.group[slots]
        return [(g, np.flatnonzero(groups == g)) for g in np.unique(groups).tolist()]

    def push(self, shelf: Shelf, key: int, slots: Int64s | Int32s) -> None:
        """Put slots that have a key already on its stack."""
        stack = shelf.stacks.get(key)
        if stack is not None:
            if stack.add(slots):
                shelf.entries += len(slots)
                return
            if len(stack) >= FEW:
                # Before it grows: what moved on (and will never be looked for here) goes.
                shelf.push(key, self.pop(shelf, key, len(stack), after=key))
        shelf.push(key, slots)

    def shelf(self, group: int, size_class: int) -> Shelf:
        """Return a group's shelf, which may be new."""
        shelves = self.of_class[size_class]
        shelf = shelves.get(group)
        if shelf is None:
            shelf = shelves[group] = Shelf(group, size_class)
        return shelf

    def sort_in(self, shelf: Shelf, slots: Int64s, keys: Int64s) -> None:
        """Put slots on the stacks of their keys, in any order."""
        self.spread(shelf, *by_key(slots, keys, FAR))

    def spread(self, shelf: Shelf, slots: Int64s, rising: Int64s) -> None:
        """Put slots on the stacks of their keys, which rise."""
        if not len(slots):
            return
        self.key[slots] = rising
        edges = (rising[1:] != rising[:-1]).nonzero()[0] + 1
        starts = [0, *edges.tolist()]
        entries = slots.astype(np.int32)
        for key, start, stop in zip(
            rising[starts].tolist(), starts, [*starts[1:], len(slots)], strict=True
        ):
            self.push(shelf, key, entries[start:stop])

    def pop(
        self, shelf: Shelf, key: int, count: int, *, newest: bool = True, after: int = NONE
    ) -> Int64s:
        """Take slots off a stack; return those that still belong there, each once. They are on no
        stack then, whatever else of it names them, or stay what they are: on that of `after`."""
        entries = shelf.pop(key, count, newest=newest)
        return self.residents.take(entries, key, shelf.group, shelf.size_class, after)
