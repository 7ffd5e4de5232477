"""What stays in memory.

Two rules, each the best that is known for its case:

* *Static*: a sole job that visits every sample once an epoch. Nothing beats keeping whatever filled
  the cache first (MinIO, CoorDL, VLDB 2021): the hit rate is cache size / data set size, and the
  misses are spread evenly, where LRU evicts every sample just before its use and Belady's rule
  has all misses in one half of the epoch. What comes at another's cost *passes* through.
* *Next use*: everything else. The sample whose next use, by any job, is farthest in time goes
  (Belady, with the future that jobs announced; `next_use` has what silent jobs let one expect).

Residents lie on stacks by key: the time of next use in parts of an epoch (PARTS), or one of

    IDLE      nobody has its shard open                  first to go
    PASSING   static: came at another's cost             oldest first
    UNSURE    not looked at since it came, or since its time was due; static: kept, newest first
    READY     looked at, and the next to go
    FAR       not wanted as far as is known

A key is what was believed when the resident was looked at last. A belief that became too near is
found out when its time is due: the stack becomes UNSURE. One that became too far is found out when
it is to go: victims are looked at once more. So nothing has to be done at a use, nor when a job
joins, leaves or changes its pace. Within a key the newest goes first: ties leave the resident.

Data sets that share no shard compete (groups). A group below its floor of size / 2J for each of
its jobs takes from those above theirs; otherwise what is wanted later by a quarter and more gives
way.

No clock, no lock. Whether a slot can be evicted just now (nobody pins it) is the cache's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.arena import Arena
from ffserve.cache.next_use import Group, NextUse
from ffserve.engine.plan import AtHand
from ffserve.engine.residents import MIXED, NO_KEY, Residents, by_key

PARTS = 64
"""Parts of an epoch that keys tell apart."""
NONE = NO_KEY
FAR, READY, UNSURE, PASSING, IDLE = 1 << 58, 1 << 59, 1 << 60, 1 << 61, 1 << 62
SLACK = 2
"""Parts by which a victim may be wanted earlier than was believed."""
UNSORTED_SHARE = 128
"""Residents are looked at when one part in this many is unsure, so that it is done in bulk."""
MOST_UNSORTED = 4096
READY_SHARE, MOST_READY = 96, 4096
"""Victims are looked for this many at a time, at most one part in so many of the residents."""
MOST_LOOKED_AT = 4096
"""Residents that one search looks at before it takes what it has."""
FEW = 256
SMALLEST_STACK = 128
"""Slots that a stack has room for at once: a turn's, since what passes is often as much."""
ADVANTAGE = 1.25
"""How much later another group's resident must be wanted to give way."""

Int64s: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]
Usable: TypeAlias = Callable[[Int64s], NDArray[np.bool_]]
"""Which of these slots can be evicted just now."""
_NO_SLOTS: Int64s = np.zeros(0, np.int64)
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
        self._first = first
        self._count = count
        # As large as the arena may become, touched as far as it ever was.
        self._key = np.empty(arena.slot_limit, np.int64)
        self._known = 0
        self._group = np.zeros(arena.slot_limit, np.int32)
        self._shelves: list[dict[int, Shelf]] = [{} for _ in range(len(arena.class_sizes) + 1)]
        self._large = len(arena.class_sizes)
        self._ahead = np.zeros(arena.slot_limit, np.bool_)
        """Filled before anybody asked, and not used since."""
        self.residents = Residents(
            self._key,
            self._group,
            self._ahead,
            arena.tables()[1],
            arena.slab_class,
            arena.slots_per_slab,
            self._large,
        )
        self._widths: dict[int, float] = {}
        self._static: dict[int, bool] = {}
        """By which rule each group gave its last victims."""
        self.used: dict[int, int] = {}
        """Bytes of slots that each group has."""
        self.follow_arena()

    def follow_arena(self) -> None:
        """The arena may have more slots than before."""
        if self._arena.slot_count > self._known:
            self._key[self._known : self._arena.slot_count] = NONE
            self._known = self._arena.slot_count

    # ---- coming and going -----------------------------------------------------------------

    def enter(self, slots: Int64s, group: int, size: int) -> None:
        """Slots that are being filled for a group, and their bytes."""
        self._group[slots] = group
        self.used[group] = self.used.get(group, 0) + size

    def replaced(self, group: int, held: int, freed: int) -> None:
        """A group has so many bytes of slots more, and so many less."""
        self.used[group] = self.used.get(group, 0) + held - freed

    def came_ahead(self, slots: Int64s) -> None:
        """Slots that are being filled though nobody asked for them."""
        self._ahead[slots] = True

    def asked(self, slots: Int64s) -> None:
        """Slots of samples that somebody asked for."""
        self._ahead[slots] = False

    def leave(self, slots: Int64s) -> int:
        """Slots that hold nothing any more. Returns: how many of these came ahead and were not
        used."""
        group, size, unused = self.residents.leave(slots)
        if group != MIXED:
            self._give_back(group, size)
            return unused
        sizes = self._arena.sizes(slots)
        for group, rows in self._by_group(slots):
            self._give_back(group, int(np.add.reduce(sizes[rows])))
        return unused

    def _give_back(self, group: int, size: int) -> None:
        self.used[group] -= size
        if not self.used[group]:
            del self.used[group]

    def keep(self, slots: Int64s, size_class: int) -> None:
        """Slots that were filled while there was room."""
        self._put(slots, size_class, UNSURE)

    def let_pass(self, slots: Int64s, size_class: int) -> None:
        """Slots that were filled at another's cost."""
        for group, rows in self._by_group(slots):
            key = PASSING if self._static.get(group, True) else UNSURE
            self._put(slots[rows], size_class, key)

    def abandon(self, slots: Int64s, size_class: int) -> None:
        """Slots of shards that nobody has open."""
        self._put(slots[self._key[slots] != IDLE], size_class, IDLE)

    def doubt(self, slots: Int64s) -> None:
        """These residents were just used: what was believed of them has changed."""
        slots, group, size_class = self.residents.doubt(slots, UNSURE)
        if not len(slots):
            return
        if group != MIXED and size_class != MIXED:
            self._push(self._shelf(group, size_class), UNSURE, slots)
            return
        classes = self._arena.slab_class[slots // self._arena.slots_per_slab]
        for size_class in np.unique(classes).tolist():
            rows = classes == size_class
            self._put(slots[rows], size_class if size_class >= 0 else self._large, UNSURE)

    def _put(self, slots: Int64s, size_class: int, key: int) -> None:
        if not len(slots):
            return
        group = self.residents.put(slots, key)
        if group != MIXED:
            self._push(self._shelf(group, size_class), key, slots)
            return
        for group, rows in self._by_group(slots):
            self._push(self._shelf(group, size_class), key, slots[rows])

    def _by_group(self, slots: Int64s) -> list[tuple[int, Int64s | slice]]:
        """Return each group with its rows; mostly there is one."""
        group = self.residents.group(slots)
        if group != MIXED:
            return [(group, _ALL)]
        groups = self._group[slots]
        return [(g, np.flatnonzero(groups == g)) for g in np.unique(groups).tolist()]

    def _push(self, shelf: Shelf, key: int, slots: Int64s | Int32s) -> None:
        stack = shelf.stacks.get(key)
        if stack is not None:
            if stack.add(slots):
                shelf.entries += len(slots)
                return
            if len(stack) >= FEW:
                # Before it grows: what moved on (and will never be looked for here) goes.
                shelf.push(key, self._pop(shelf, key, len(stack), after=key))
        shelf.push(key, slots)

    def _shelf(self, group: int, size_class: int) -> Shelf:
        shelves = self._shelves[size_class]
        shelf = shelves.get(group)
        if shelf is None:
            shelf = shelves[group] = Shelf(group, size_class)
        return shelf

    # ---- victims --------------------------------------------------------------------------

    def has_idle(self, size_class: int) -> bool:
        """Whether there may be slots that nobody wants."""
        return any(IDLE in shelf.stacks for shelf in self._shelves[size_class].values())

    def idle_victims(self, size_class: int, count: int, usable: Usable) -> Int64s:
        """Return up to `count` slots that nobody wants; those that somebody wants again stay."""
        found, missing = [_NO_SLOTS], count
        there = [shelf for shelf in self._shelves[size_class].values() if IDLE in shelf.stacks]
        for shelf in there:
            while IDLE in shelf.stacks and missing:
                slots = self._pop(shelf, IDLE, missing)
                good = usable(slots)
                found.append(slots[good])
                missing -= len(found[-1])
                self._put(slots[~good], size_class, UNSURE)
        return np.concatenate(found) if there else _NO_SLOTS

    def victims(
        self, size_class: int, count: int, usable: Usable, taker: int, latest: float | None
    ) -> tuple[Int64s, int]:
        """Return up to `count` slots to be given to a group, and how many of these (they stand
        first) come from other groups.

        Args: latest: take only what will be wanted after this time; None: what is farthest.
        """
        if self._uses.merged:
            self._merge()
        if self._shelves[size_class].keys() == {taker}:
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

    def at_hand(self, size_class: int, taker: int) -> AtHand | None:
        """Return where `victims` would take from, where that needs no choice; see `took`."""
        shelf = self._shelves[size_class].get(taker)
        if shelf is None or len(self._shelves[size_class]) > 1 or self._uses.merged:
            return None
        stacks = shelf.stacks
        if not stacks or IDLE in stacks:
            return None
        if READY in stacks:
            return stacks[READY].held, READY, True
        group = self._uses.groups.get(taker)
        if group is not None and not group.static(self._uses.now):
            return None
        key = PASSING if PASSING in stacks else max(stacks)
        return stacks[key].held, key, key != PASSING

    def took(self, size_class: int, taker: int, key: int, count: int, *, newest: bool) -> None:
        """So many entries of a stack `at_hand` were looked at; what was good of them is evicted."""
        self._shelves[size_class][taker].pop(key, count, newest=newest)
        if key != READY:
            self._static[taker] = True

    def _merge(self) -> None:
        while self._uses.merged:
            old, new = self._uses.merged.pop()
            moved = [
                (size_class, key, self._pop(shelf, key, shelf.entries))
                for size_class, shelves in enumerate(self._shelves)
                if (shelf := shelves.pop(old, None)) is not None
                for key in list(shelf.stacks)
            ]
            self._group[self._group == old] = new
            self._widths.pop(old, None)
            self._static.pop(old, None)
            if old in self.used:
                self.used[new] = self.used.get(new, 0) + self.used.pop(old)
            for size_class, key, slots in moved:
                self._put(slots, size_class, max(key, UNSURE))

    def _sources(self, size_class: int, taker: int) -> list[int]:
        """Return the groups to take from, in order."""
        shelves = self._shelves[size_class]
        for number in [n for n, shelf in shelves.items() if not shelf.entries]:
            del shelves[number]
        there = list(shelves)
        if there == [taker]:
            return there
        floors = self.floors()
        worth = {number: self._farthest(number, shelves[number]) for number in there}
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

    def _farthest(self, number: int, shelf: Shelf) -> float:
        """Return in how many seconds what a group can do without soonest will be wanted."""
        group, now = self._uses.groups.get(number), self._uses.now
        if group is None or not group.active(now):
            return np.inf
        if PASSING in shelf.stacks or group.static(now):
            return group.epoch_s(now)
        keys = [key for key in shelf.stacks if key < FAR]
        return max(max(keys) * self._width(group) - now, 0.0) if keys else group.epoch_s(now)

    def _take(
        self, number: int, size_class: int, count: int, usable: Usable, latest: float | None
    ) -> Int64s:
        shelf = self._shelves[size_class].get(number)
        if shelf is None or not shelf.entries:
            return _NO_SLOTS
        ready = self._take_ready(shelf, count, usable, latest)
        if len(ready) == count:
            return ready
        group = self._uses.groups.get(number)
        static = self._static[number] = group is None or group.static(self._uses.now)
        if static:
            rest = self._take_static(shelf, count - len(ready), usable)
        else:
            assert group is not None
            rest = self._take_farthest(group, shelf, count - len(ready), usable, latest)
        return np.concatenate((ready, rest))

    def _take_ready(self, shelf: Shelf, count: int, usable: Usable, latest: float | None) -> Int64s:
        """Take what was looked for before."""
        if latest is not None and shelf.ready_s <= latest:
            return _NO_SLOTS
        found: list[Int64s] = []
        missing = count
        while missing and READY in shelf.stacks:
            slots = self._pop(shelf, READY, missing)
            good = usable(slots)
            if np.count_nonzero(good) < len(slots):
                self._put(slots[~good], shelf.size_class, UNSURE)
                slots = slots[good]
            found.append(slots)
            missing -= len(slots)
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else _NO_SLOTS

    def _take_static(self, shelf: Shelf, count: int, usable: Usable) -> Int64s:
        """What passes, oldest first; then what is kept, newest first."""
        found, spared, missing, looked = [_NO_SLOTS], [], count, 0
        while shelf.stacks and missing and looked < 16 * MOST_LOOKED_AT:
            key = PASSING if PASSING in shelf.stacks else max(shelf.stacks)
            slots = self._pop(shelf, key, missing, newest=key != PASSING)
            looked += len(slots)
            good = usable(slots)
            found.append(slots[good])
            missing -= len(found[-1])
            if not good.all():
                spared.append((key, slots[~good]))
        for key, slots in reversed(spared):
            self._put(slots, shelf.size_class, key)
        return np.concatenate(found)

    def _take_farthest(
        self,
        group: Group,
        shelf: Shelf,
        count: int,
        usable: Usable,
        latest: float | None,
    ) -> Int64s:
        width = self._width(group)
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
            self._sort_in(shelf, slots, keys)
        chosen = np.concatenate(found)
        if len(chosen) > count:
            self._put(chosen[count:][::-1].copy(), shelf.size_class, READY)
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
            part = self._pop(shelf, key, count)
            parts.append(part)
            keys.append(np.full(len(part), key))
            count -= looked_at
            if count <= 0:
                break
        if parts:
            return np.concatenate(parts), np.concatenate(keys)
        if UNSURE not in shelf.stacks or latest is not None:
            return _NO_SLOTS, _NO_SLOTS
        slots = self._pop(shelf, UNSURE, count)
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
            self._sort_in(shelf, slots[timed[sooner]], actual[sooner])
            kept = np.ones(len(slots), np.bool_)
            kept[timed[sooner]] = False
            slots, keys = slots[kept], keys[kept]
        return slots, keys

    def _expire(self, shelf: Shelf, due: int) -> None:
        """What should have been used by now is known no longer."""
        for key in [k for k in shelf.stacks if k < due - 1]:
            self._put(self._pop(shelf, key, shelf.entries), shelf.size_class, UNSURE)

    def _sort_out(
        self, group: Group, shelf: Shelf, count: int, wanted: int, least: int
    ) -> tuple[Int64s, Int64s]:
        """Look at up to `count` residents that nobody looked at.

        Returns: those that belong to the `wanted` farthest of all, with keys of `least` and more.
            They need not go over a stack.
        """
        slots = self._pop(shelf, UNSURE, count)
        slots, keys = by_key(slots, self._keys(group, slots), FAR)
        cut = max(len(keys) - self._farther(shelf, keys, wanted), int(keys.searchsorted(least)))
        self._spread(shelf, slots[:cut], keys[:cut])
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

    def _sort_in(self, shelf: Shelf, slots: Int64s, keys: Int64s) -> None:
        self._spread(shelf, *by_key(slots, keys, FAR))

    def _spread(self, shelf: Shelf, slots: Int64s, rising: Int64s) -> None:
        """Put slots on the stacks of their keys."""
        if not len(slots):
            return
        self._key[slots] = rising
        edges = (rising[1:] != rising[:-1]).nonzero()[0] + 1
        starts = [0, *edges.tolist()]
        entries = slots.astype(np.int32)
        for key, start, stop in zip(
            rising[starts].tolist(), starts, [*starts[1:], len(slots)], strict=True
        ):
            self._push(shelf, key, entries[start:stop])

    def _pop(
        self, shelf: Shelf, key: int, count: int, *, newest: bool = True, after: int = NONE
    ) -> Int64s:
        """Take slots off a stack; return those that still belong there, each once. They are on no
        stack then, whatever else of it names them, or stay what they are: on that of `after`."""
        entries = shelf.pop(key, count, newest=newest)
        return self.residents.take(entries, key, shelf.group, shelf.size_class, after)

    # ---- keys -----------------------------------------------------------------------------

    def _width(self, group: Group) -> float:
        """Return the seconds that one key stands for; anew when the pace has changed a lot."""
        wanted = group.epoch_s(self._uses.now) / PARTS
        width = self._widths.get(group.number)
        if width is None or not 0.5 < wanted / width < 2:
            self._widths[group.number] = width = wanted
            for shelves in self._shelves:
                shelf = shelves.get(group.number)
                for key in [k for k in shelf.stacks if k <= FAR] if shelf else ():
                    assert shelf is not None
                    slots = self._pop(shelf, key, shelf.entries)
                    self._put(slots, shelf.size_class, UNSURE)
        return width

    def _keys(self, group: Group, slots: Int64s) -> Int64s:
        """Return the key of each slot: of the sample in it that is wanted soonest."""
        future, width = group.future(self._uses.now), self._widths[group.number]
        return future.keys(self._first, self._count, slots, width, FAR)

    def weights(self, slots: Int64s) -> NDArray[np.float64]:
        """Return how much each resident is worth to be kept: 0.0 not at all, 1.0 wanted at once
        or kept for good."""
        keys = self._key[slots]
        weights = np.where((keys >= PASSING) | (keys == READY) | (keys == FAR), 0.0, 1.0)
        timed = np.flatnonzero((keys >= 0) & (keys < FAR))
        groups = self._group[slots[timed]]
        for number in np.unique(groups).tolist():
            group = self._uses.groups.get(number)
            rows = timed[groups == number]
            if group is None or group.static(self._uses.now):
                continue
            ahead = keys[rows] - self._uses.now / self._widths.get(number, 1.0)
            weights[rows] = 1 / (1 + np.maximum(ahead, 0) / PARTS)
        return weights
