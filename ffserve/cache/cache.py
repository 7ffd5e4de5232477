"""The cache as a state machine: what is in memory, what is on its way, what must be read.

It knows no socket, no thread and no clock: the server asks it to `advance` a fetch, submits the
`Load` that comes back, and tells it with `loaded` how that went. Numbers are node-wide sample
numbers throughout.

A slot's life:

    FREE ──advance──▶ LOADING ──loaded──▶ RESIDENT ──evicted──▶ FREE
                         └────failed────▶ FAILED ──last pin released──▶ FREE

A pin keeps a slot from being evicted. `advance` takes one pin a slot for its fetch, `release`
gives them back; what clients lease without asking (`leases`) keeps it likewise. LOADING slots are
never evicted, whoever died: the kernel still writes into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.arena import Arena, first_run
from ffserve.cache.directory import Directory
from ffserve.cache.leases import Leases, NoLeases
from ffserve.cache.next_use import NextUse
from ffserve.cache.policy import Policy
from ffserve.cache.shards import LARGEST_SHARED_BLOCK, Blocks, ShardTable
from ffserve.engine.plan import MOST_CLASSES, Planner, Stock
from ffserve.engine.slots import FAILED, FREE, LOADING, RESIDENT, Slots
from ffserve.errors import FFServeError
from ffserve.failures import TOO_LARGE

MOST_LOADS = (1 << 31) - 1
"""Loads are numbered up to here, then from 1 again."""

STEAL_WINDOW = 256
"""Slabs looked at together when one has to be emptied."""

MOST_LOOKED_AT = 65_536
"""Slots, or samples, that are looked at together: 1 to 6 ms."""

RETIRE_WINDOW = 16
"""Slabs that are emptied at once when the arena shrinks: 5 ms at 4 KiB a slot."""

Int64s: TypeAlias = NDArray[np.int64]
Retract: TypeAlias = Callable[[Int64s, Int64s, Int64s, Int64s], None]
"""Make blocks unreadable: firsts, counts, slot offsets, slot sizes. Returns when no reader can
take the old bytes for good any more."""


_NO_SLOTS: Int64s = np.zeros(0, np.int64)
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample could not be read.

    status: -errno or FFS_E* of engine/core.h, or TOO_LARGE; found, expected: checksums; size: of
    the chunk that was TOO_LARGE, in bytes; error: what its format says instead of all that.
    """

    status: int
    found: int = 0
    expected: int = 0
    size: int = 0
    error: FFServeError | None = None


class Fetch:
    """One request for samples on its way through the cache.

    Args:
        numbers: int64[n] of one data set, repeats allowed; dealt with in this order.
        latest: read ahead for what is wanted at this time: only what will be wanted after it may
            be evicted; None: it is wanted now.
    """

    __slots__ = ("cursor", "failures", "latest", "numbers", "pinned_size", "pins", "waiting")

    def __init__(self, numbers: Int64s, latest: float | None = None) -> None:
        self.numbers = numbers
        self.latest = latest
        self.cursor = 0
        """How many of `numbers` were dealt with: they are resident, on their way, or failed."""
        self.waiting = 0
        """Loads that have to end before the first `cursor` samples are all decided."""
        self.pins: list[Int64s] = []
        self.pinned_size = 0
        self.failures: dict[int, Failure] = {}

    @property
    def complete(self) -> bool:
        """Whether everything was asked for and has come."""
        return self.waiting == 0 and self.cursor == len(self.numbers)


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that must be read now, each into its slot.

    number: its own while it is read. parts: the slots by size class and whether they came at
    another's cost. size: bytes of the blocks, widened. reads: of the device; who reads it sets that
    to less where neighbours are read together.
    """

    number: int
    blocks: Blocks
    slots: Int64s
    offsets: Int64s
    sizes: Int64s
    parts: list[tuple[int, Int64s, bool]]
    size: int
    reads: int
    fetches: list[Fetch] = field(default_factory=list)


@dataclass(slots=True)
class CacheCounters:
    """Since the start: samples and blocks."""

    asked: int = 0
    resident: int = 0
    joined: int = 0
    blocks_read: int = 0
    evicted: int = 0
    failed: int = 0
    read_ahead: int = 0
    """Of the blocks read: before anybody asked."""
    wasted: int = 0
    """Of these: evicted before anybody used them."""


class Cache:
    """Slots, their contents and their pins.

    Args:
        retract: see Retract; in the daemon the C core's, in a simulation any other.
        uses: who wants what, for the policy.
    """

    def __init__(
        self,
        arena: Arena,
        directory: Directory,
        shards: ShardTable,
        retract: Retract,
        uses: NextUse | None = None,
    ) -> None:
        self.arena = arena
        self.shards = shards
        self.counters = CacheCounters()
        self._directory = directory
        self._slot_of = directory.slot_of
        self._retract = retract
        self.leases: Leases = NoLeases()
        self._large = len(arena.class_sizes)
        self.uses = NextUse() if uses is None else uses
        slots = arena.slot_limit
        self.state = np.zeros(slots, np.uint8)
        self.pins = np.zeros(slots, np.int32)
        self._first = np.zeros(slots, np.int64)
        self._count = np.zeros(slots, np.int32)
        self.policy = Policy(arena, self.uses, self._first, self._count)
        self._load_of = np.zeros(slots, np.int32)
        self._slots = Slots(
            self._slot_of,
            self.state,
            self.pins,
            self._first,
            self._count,
            self._load_of,
            *arena.tables(),
        )
        self.plans_at_once = True
        """Whether plain misses are planned at once; for tests."""
        self._planner = Planner(
            self._slots,
            shards.c,
            self.policy.residents,
            arena.class_sizes,
            arena.slab_used,
            LARGEST_SHARED_BLOCK,
        )
        self._usual_classes: dict[int, tuple[int, ...]] = {}
        """By group: the size classes of what was planned at once of late."""
        self._leased = np.zeros(slots, np.bool_)
        self._marked = np.zeros(0, np.int64)
        """The slots for which `_leased` is set."""
        self._loading: dict[int, Load] = {}
        self._next_load = 1
        self._hand = self._retiring_hand = self._idle_hand = 0
        self._idle_slabs = 0
        """Slabs still to be looked at for those in which nobody wants anything."""
        self._idle_found: list[int] = []
        """Slabs in which nobody wanted anything when they were looked at."""
        self._idle_runs: list[tuple[int, int]] = []
        """Samples of idle shards that the policy has not been told of: first, end."""
        self.idle_changed = False
        """Set by the owner of the shards when a shard lost its last session."""

    # ---- asking ---------------------------------------------------------------------------

    def advance(self, fetch: Fetch, count: int, size: int) -> Load | None:
        """Deal with the next samples of a fetch: at most `count`, and about `size` bytes.

        Pins what it touches, moves `fetch.cursor`. No progress means that the arena is full of
        pinned slots: ask again after a release.
        """
        part = fetch.numbers[fetch.cursor : fetch.cursor + count]
        if not len(part):
            return None
        if self.plans_at_once and fetch.latest is None and not self.shards.has_chunks:
            plain = self._advance_at_once(fetch, part, size)
            if plain is not None:
                return plain
        handled, absent, touched, positions = self._slots.split(part, size)
        load = None
        held, loading = self._slots.pin(touched) if len(touched) else (0, touched)
        if len(absent):
            # What the request finds in memory must not be evicted for what it does not.
            part = part[:handled]
            load, cut = self._admit(fetch, part, absent, size)
            kept = int(positions.searchsorted(cut)) if len(touched) else 0
            if kept < len(touched):
                self.release([touched[kept:]])
                touched = touched[:kept]
                held, loading = self._again(touched)
            if cut == 0 and handled > 1:
                # What was there of the part may itself have been in the way.
                load, cut = self._admit(fetch, part[:1], absent[:1], size)
            handled = cut
        if len(touched):
            fetch.pins.append(touched)
            fetch.pinned_size += held
            if len(loading):
                self._join(fetch, loading)
        if load is not None:
            load.fetches.append(fetch)
            fetch.waiting += 1
        fetch.cursor += handled
        if fetch.latest is None:
            self.counters.asked += handled
            self.counters.resident += handled - int(absent.searchsorted(handled))
        return load

    def _advance_at_once(self, fetch: Fetch, part: Int64s, size: int) -> Load | None:
        """Do what `advance` does where that is plain; None: it is not, nothing was done."""
        group = self.uses.group_of(int(part[0]))
        usual = self._usual_classes.get(group, ())
        for _ in range(3):
            stocks = [self._stock(size_class, group, len(part)) for size_class in usual]
            if stocks and not any(len(stock[1]) or stock[2] or stock[3] for stock in stocks):
                return None
            plan = self._planner.choose(part, size, group, stocks)
            if plan.found or not plan.wanted:
                break
            wanted = dict(plan.wanted)
            if wanted.keys() <= set(usual):
                for size_class, count in wanted.items():
                    self.arena.cut_slabs(size_class, count)
            else:
                every = {*usual, *wanted}
                usual = tuple(sorted(every if len(every) <= MOST_CLASSES else wanted))
                self._usual_classes[group] = usual
        if not plan.found:
            return None
        c, slots = plan.c, plan.slots
        if c.gone:
            self._retract(*plan.contents)
            self.counters.evicted += c.gone
        parts: list[tuple[int, Int64s, bool]] = []
        for size_class, fresh, gone, looked in plan.parts():
            if len(gone):
                at_hand = next(stock[3] for stock in stocks if stock[0] == size_class)
                assert at_hand is not None
                self.policy.took(size_class, group, at_hand[1], looked, newest=at_hand[2])
                parts.append((size_class, gone, True))
            if len(fresh):
                self.arena.taken(size_class, len(fresh))
                parts.append((size_class, fresh, False))
        number = self._number()
        offsets, sizes = plan.take(group, number)
        self.policy.replaced(group, c.held, c.freed)
        self.counters.wasted += c.wasted
        self.counters.blocks_read += len(slots)
        self.counters.asked += c.handled
        load = Load(
            number, Blocks(plan.table), slots, offsets, sizes, parts, c.size, len(slots), [fetch]
        )
        self._loading[number] = load
        fetch.pins.append(slots)
        fetch.pinned_size += c.held
        fetch.waiting += 1
        fetch.cursor += c.handled
        return load

    def _stock(self, size_class: int, group: int, count: int) -> Stock:
        """Return the slots of a class that are at hand, as far as `count` may need them."""
        free = self.arena.free_slots(size_class).held
        if len(free) >= count:
            return size_class, free, False, None
        if self.arena.has_free_slabs:
            return size_class, free, True, None
        undecided = (
            self.idle_changed
            or self._idle_slabs
            or self._idle_found
            or self._idle_runs
            or len(self._marked)
            or self.leases.active
            or self.arena.open_count < self.arena.slab_count
        )
        at_hand = None if undecided else self.policy.at_hand(size_class, group)
        return size_class, free, False, at_hand

    def _number(self) -> int:
        number = self._next_load
        self._next_load = number % MOST_LOADS + 1
        return number

    def _again(self, pinned: Int64s) -> tuple[int, Int64s]:
        size = int(self.arena.sizes(pinned).sum())
        return size, pinned[self.state[pinned] == LOADING]

    def _join(self, fetch: Fetch, loading: Int64s) -> None:
        for number in np.unique(self._load_of[loading]).tolist():
            self._loading[number].fetches.append(fetch)
            fetch.waiting += 1
            self.counters.joined += 1

    def _admit(
        self, fetch: Fetch, part: Int64s, absent: Int64s, size: int
    ) -> tuple[Load | None, int]:
        """Find room for what is absent; return the load and how much of the part is dealt with."""
        # In order of first use, so that a cut leaves a prefix that is whole.
        numbers = part if len(absent) == len(part) else part[absent]
        table, where, left_out = self._slots.cut(self.shards.table(numbers), absent.copy(), size)
        blocks, cut = Blocks(table), len(part) if left_out < 0 else left_out
        if not len(where):
            return None, cut
        if int(np.maximum.reduce(blocks.sizes)) > self.arena.size:
            fits = blocks.sizes <= self.arena.size
            for column in np.flatnonzero(~fits).tolist():
                told = int(blocks.sizes[column])
                told = told if self.shards.chunked[blocks.shards[column]] else 0
                first, failure = blocks.firsts[column], Failure(TOO_LARGE, size=told)
                inside = part[(part >= first) & (part < first + blocks.counts[column])]
                fetch.failures.update(dict.fromkeys(inside.tolist(), failure))
            blocks, where = blocks.take(fits), where[fits]
            if not len(where):
                return None, cut
        classes = self.arena.classes(blocks.sizes)
        group = self.uses.group_of(int(blocks.firsts[0]))
        slots, passing = self._allocate(classes, blocks.sizes, group, fetch.latest)
        if np.minimum.reduce(slots) < 0:
            cut = int(where[int(np.argmax(slots < 0))])
            surplus = slots[(where >= cut) & (slots >= 0)]
            self.state[surplus] = FREE
            self.arena.free(surplus)
            rest = where < cut
            blocks, slots, passing = blocks.take(rest), slots[rest], passing[rest]
            classes = classes[rest]
            if not len(slots):
                return None, cut
        number = self._number()
        held, offsets, sizes = self._slots.enter(blocks.table, slots, number)
        self.policy.enter(slots, group, held)
        self.shards.c.count(blocks.firsts, sizes, 1)
        if fetch.latest is not None:
            self.policy.came_ahead(slots)
            self.counters.read_ahead += len(slots)
        fetch.pins.append(slots)
        fetch.pinned_size += held
        parts = _parts(slots, classes, passing)
        size = int(np.add.reduce(blocks.sizes))
        load = Load(number, blocks, slots, offsets, sizes, parts, size, len(slots))
        self._loading[number] = load
        self.counters.blocks_read += len(slots)
        return load, cut

    # ---- what came of it ------------------------------------------------------------------

    def loaded(self, load: Load, failures: dict[int, Failure]) -> list[Fetch]:
        """Take in the outcome of a load: which samples failed, by number; the rest is published.

        Returns the fetches that have no load to wait for any more.
        """
        slots = load.slots
        del self._loading[load.number]
        self.state[slots] = RESIDENT
        if failures:
            self._fail(load, failures)
        for size_class, chosen, passing in load.parts:
            if failures:
                chosen = chosen[self.state[chosen] == RESIDENT]
            if passing:
                self.policy.let_pass(chosen, size_class)
            else:
                self.policy.keep(chosen, size_class)
        ready = []
        for fetch in load.fetches:
            fetch.waiting -= 1
            if failures:
                fetch.failures.update(failures)
            if fetch.waiting == 0:
                ready.append(fetch)
        return ready

    def _fail(self, load: Load, failures: dict[int, Failure]) -> None:
        self.counters.failed += len(failures)
        bad = np.array(list(failures), np.int64)
        self._slot_of[bad] = 0
        damaged: list[int] = []
        for slot, first, count in zip(
            load.slots.tolist(),
            load.blocks.firsts.tolist(),
            load.blocks.counts.tolist(),
            strict=True,
        ):
            run = self._slot_of[first : first + count]
            if not run.any():
                self.state[slot] = FAILED
                self._free_failed(slot)
            if count > 1 and not run.all():
                # Else a second slot for the block would overlap with what this one still holds.
                damaged.append(first)
        if damaged:
            self.shards.read_singly(damaged)

    def _free_failed(self, slot: int) -> None:
        if self.pins[slot] == 0:
            freed = np.array([slot], np.int64)
            self.state[slot] = FREE
            self.shards.c.count(self._first[freed], self.arena.sizes(freed), -1)
            self.policy.leave(freed)
            self.arena.free(freed)

    def hold(self, slots: Int64s) -> int:
        """Pin resident slots once more, as often as they are named; return their size in bytes.

        `release` gives that back.
        """
        return self._slots.pin(slots)[0]

    def release(self, pins: list[Int64s]) -> None:
        """Give back what `advance` or `hold` pinned."""
        for slots in pins:
            if self._slots.unpin(slots):
                failed = slots[(self.state[slots] == FAILED) & (self.pins[slots] == 0)]
                for slot in failed.tolist():
                    self._free_failed(slot)

    # ---- room -----------------------------------------------------------------------------

    def _classes(self, slots: Int64s) -> Int64s:
        classes = self.arena.slab_class[slots // self.arena.slots_per_slab].astype(np.int64)
        classes[classes < 0] = self._large
        return classes

    @property
    def leased(self) -> bool:
        """Whether something was leased without asking when it was looked for last."""
        return len(self._marked) > 0

    def _look_at_leases(self) -> bool:
        """Mark what is leased without asking now; return whether there is any."""
        if len(self._marked):
            self._leased[self._marked] = False
        self._marked = self.leases.slots()
        if not len(self._marked):
            return False
        self._leased[self._marked] = True
        return True

    def _usable(self, slots: Int64s) -> NDArray[np.bool_]:
        usable = self._slots.usable(slots)
        if len(self._marked):
            usable &= ~self._leased[slots]
        if self.arena.open_count < self.arena.slab_count:
            usable &= slots < self.arena.open_count * self.arena.slots_per_slab
        return usable

    def _usable_idle(self, slots: Int64s) -> NDArray[np.bool_]:
        return self._usable(slots) & ~self._wanted(slots)

    def _wanted(self, slots: Int64s) -> NDArray[np.bool_]:
        """Whether a session has the shard open that a resident slot belongs to."""
        sessions: Int64s = self.shards.sessions[self.shards.rows(self._first[slots])]
        wanted: NDArray[np.bool_] = sessions > 0
        return wanted

    def _allocate(
        self, classes: Int64s, sizes: Int64s, group: int, latest: float | None
    ) -> tuple[Int64s, NDArray[np.bool_]]:
        """Return a LOADING slot for each size, or -1, and whether it came at another's cost.

        Slots are marked at once, so that making room for the next does not take them again. What
        is read ahead takes no slab from another class.
        """
        slots = np.full(len(sizes), -1, np.int64)
        passing = np.zeros(len(sizes), np.bool_)
        for size_class, rows in _groups(classes):
            if size_class == self._large:
                for row in np.arange(len(sizes))[rows].tolist():
                    slots[row], passing[row] = self._allocate_large(int(sizes[row]), latest)
                    if slots[row] >= 0:
                        self.state[slots[row]] = LOADING
                continue
            wanted = len(sizes[rows])
            free = self.arena.take(size_class, wanted)
            if len(free) < wanted:
                free = _joined(free, self._from_idle(size_class, wanted - len(free)))
            while len(free) < wanted and (self._idle_slabs or self._idle_found):
                self.state[free] = LOADING
                if not self._steal_idle():
                    break
                free = _joined(free, self.arena.take(size_class, wanted - len(free)))
            fresh = len(free)
            if len(free) < wanted:
                missing = wanted - len(free)
                victims, others = self._from_policy(size_class, missing, group, latest)
                free = _joined(free, victims)
                fresh += others
            while len(free) < wanted and latest is None:
                self.state[free] = LOADING
                unwanted = self._steal(1)
                if unwanted is None:
                    break
                stolen = self.arena.take(size_class, wanted - len(free))
                assert len(stolen), "an emptied slab has room"
                if unwanted and fresh == len(free):
                    fresh += len(stolen)
                free = _joined(free, stolen)
            if len(free) == len(sizes):
                passing[fresh:] = True
                return free, passing
            self.state[free] = LOADING
            filled = np.arange(len(sizes))[rows][: len(free)]
            slots[filled] = free
            passing[filled[fresh:]] = True
        return slots, passing

    def _from_idle(self, size_class: int, count: int) -> Int64s:
        if self.idle_changed:
            self.idle_changed = False
            self._idle_slabs = self.arena.open_count
            bases, counts = self.shards.bases, self.shards.counts
            self._idle_runs = [
                (int(bases[row]), int(bases[row] + counts[row])) for row in self.shards.idle()
            ]
        evicted = self._evict_idle(size_class, count)
        if len(evicted) < count and self._idle_runs:
            self._find_idle()
            evicted = _joined(evicted, self._evict_idle(size_class, count - len(evicted)))
        return evicted

    def _evict_idle(self, size_class: int, count: int) -> Int64s:
        if not self.policy.has_idle(size_class):
            return _NO_SLOTS
        self._look_at_leases()
        victims = self.policy.idle_victims(size_class, count, self._usable_idle)
        kept = self._evict(victims)
        if kept is not None:
            self.policy.abandon(victims[kept], size_class)
            victims = victims[~kept]
        return victims

    def _from_policy(
        self, size_class: int, count: int, group: int, latest: float | None
    ) -> tuple[Int64s, int]:
        self._look_at_leases()
        victims, others = self.policy.victims(size_class, count, self._usable, group, latest)
        kept = self._evict(victims)
        if kept is not None:
            self.policy.keep(victims[kept], size_class)
            others -= int(np.count_nonzero(kept[:others]))
            victims = victims[~kept]
        return victims, others

    def _find_idle(self) -> None:
        """Tell the policy of some more that nobody has open."""
        looked = 0
        while self._idle_runs and looked < MOST_LOOKED_AT:
            first, end = self._idle_runs.pop()
            stop = min(end, first + MOST_LOOKED_AT - looked)
            if stop < end:
                self._idle_runs.append((stop, end))
            looked += stop - first
            # It may have been opened again, or dropped, since it was found idle.
            slots = self._slots_of(first, stop)
            idle = slots[self.state[slots] == RESIDENT]
            idle = idle[~self._wanted(idle)]
            classes = self._classes(idle)
            for size_class in np.unique(classes).tolist():
                self.policy.abandon(idle[classes == size_class], size_class)

    def _slots_of(self, first: int, end: int) -> Int64s:
        """Return the slots that hold samples [first, end), each once."""
        held = self._slot_of[first:end].astype(np.int64)
        held = held[held > 0] - 1
        # numpy.unique looks numbers up in a hash table where this sorts, in 30 times as long.
        held.sort()
        each = np.ones(len(held), np.bool_)
        np.not_equal(held[1:], held[:-1], out=each[1:])
        return held[each]

    def holds(self, first: int, end: int) -> bool:
        """Whether each of the samples [first, end) is there or on its way."""
        return int(self._slot_of[first:end].min()) > 0

    def used(self, numbers: Int64s) -> None:
        """These samples were just asked for, be they there or on their way."""
        if self.counters.read_ahead:
            self.policy.asked(self._slots.taken(numbers))

    def doubt(self, numbers: Int64s) -> None:
        """These samples were just used, so that they will be wanted at another time than before."""
        slots = self._slots.resident(numbers)
        if len(slots):
            self.policy.doubt(slots)

    def _allocate_large(self, size: int, latest: float | None) -> tuple[int, bool]:
        slot = self.arena.take_run(size)
        if slot is not None or latest is not None:
            return -1 if slot is None else slot, False
        unwanted = self._steal(-(-size // self.arena.slab_size))
        if unwanted is None:
            return -1, False
        slot = self.arena.take_run(size)
        assert slot is not None
        return slot, not unwanted

    def _steal(self, need: int) -> bool | None:
        """Empty a run of `need` slabs. None: every such run has a busy slot; True: nobody who is
        here wanted what was in it."""
        found = self._choose_run(need)
        if found is None:
            return None
        start, unwanted = found
        emptied = [self._empty(slab) for slab in range(start, start + need)]
        return unwanted if all(emptied) else None

    def _steal_idle(self) -> bool:
        """Empty a slab in which nobody wants anything, whatever its size class; False when there is
        none among those that are looked at this time.

        Else a job with samples of one size would go on evicting its own, beside memory full of
        samples of another size that a job left behind.
        """
        if not self.shards.idle():
            self._idle_slabs = 0
            self._idle_found.clear()
            return False
        heads, total = self.arena.heads(), self.arena.open_count
        if not self._idle_found:
            low = self._idle_hand if self._idle_hand < total else 0
            self._idle_hand = high = min(low + self._window(), total)
            self._idle_slabs = max(0, self._idle_slabs - (high - low))
            self._idle_found = self._idle_in(heads, low, high)
        while self._idle_found:
            slab = self._idle_found.pop()
            if slab < total and self._idle_in(heads, slab, slab + 1):
                self._empty(slab)
                return True
        return False

    def _idle_in(self, heads: Int64s, low: int, high: int) -> list[int]:
        """Return the slabs of [low, high) that hold something, but nothing that anybody wants."""
        busy, wanted, _ = self._census(heads, low, high)
        idle = ~busy & ~wanted & ~self.arena.free_slabs(low, high)
        found: list[int] = (low + np.flatnonzero(idle)).tolist()
        return found

    def _window(self) -> int:
        """Return how many slabs are looked at together."""
        return min(STEAL_WINDOW, max(1, MOST_LOOKED_AT // self.arena.slots_per_slab))

    def _empty(self, slab: int) -> bool:
        """Evict all residents; whether none was leased meanwhile."""
        low, high = self.arena.members(slab)
        victims = low + np.flatnonzero(self.state[low:high] == RESIDENT)
        kept = self._evict(victims)
        self.arena.free(victims if kept is None else victims[~kept])
        return kept is None

    def resize(self, slabs: int) -> None:
        """Hand out so many slabs; see `retire` for what is beyond them."""
        self.arena.resize(slabs)
        self.policy.follow_arena()
        self.leases.resized()

    def retire(self) -> bool:
        """Empty some of the slabs beyond the arena's size that nobody is busy with; whether all are
        empty now. What is pinned or being read there stays until a later call."""
        slabs = self.arena.retiring()
        if not len(slabs):
            return True
        behind = slabs[slabs >= self._retiring_hand]
        low = int(behind[0] if len(behind) else slabs[0])
        high = min(low + RETIRE_WINDOW, self.arena.slab_count)
        self._retiring_hand = high
        busy, _, _ = self._census(self.arena.heads(), low, high)
        for slab in (low + np.flatnonzero(~busy)).tolist():
            self._empty(slab)
        return not len(self.arena.retiring())

    def _choose_run(self, need: int) -> tuple[int, bool] | None:
        """Return the start of a run of slabs without a busy slot, and whether nobody wants what is
        in it: one with nothing that is to be kept, if there is one nearby, else with little.

        The search goes on where the last one ended and looks at a window at a time, since a look
        at every slot of a large arena would hold everybody up.
        """
        heads = self.arena.heads()
        total = self.arena.open_count
        window = max(self._window(), 4 * need)
        starts = [min(self._hand, max(0, total - window)), *range(0, total, window)]
        spans = [(start, min(start + window, total)) for start in starts]
        if need > 1 and window < total:
            spans.append((0, total))
        for low, high in spans:
            busy, wanted, kept = self._census(heads, low, high)
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

    def _census(
        self, heads: Int64s, low: int, high: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.float64]]:
        """For slabs [low, high): has it a busy slot, has it what a session wants, how many slots
        of it are to be kept (those wanted late count for less). A slab inside a large slot counts
        as its head does."""
        self._look_at_leases()
        first = int(heads[low])
        per_slab = self.arena.slots_per_slab
        span = slice(first * per_slab, high * per_slab)
        states = self.state[span]
        resident = np.flatnonzero(states == RESIDENT)
        busy = (states == LOADING) | (states == FAILED) | (self.pins[span] > 0)
        busy |= self._leased[span]
        slots = resident + span.start
        wanted = self._wanted(slots)
        kept = self.policy.weights(slots) * wanted
        slabs = resident // per_slab
        chosen = heads[low:high] - first
        return (
            busy.reshape(-1, per_slab).any(axis=1)[chosen],
            (np.bincount(slabs[wanted], minlength=high - first) > 0)[chosen],
            np.bincount(slabs, kept, minlength=high - first).astype(np.float64)[chosen],
        )

    def _evict(self, slots: Int64s) -> NDArray[np.bool_] | None:
        """Make what the slots hold unreadable and forget it. The slots stay taken.

        Returns: None, or for each whether it was kept, since a client leased some meanwhile.
        """
        if not len(slots):
            return None
        kept = None
        firsts, counts, offsets, sizes = self._slots.contents(slots)
        self._retract(firsts, counts, offsets, sizes)
        if self._look_at_leases():
            leased = self._leased[slots]
            if leased.any():
                kept = leased
                self._restore(slots[kept])
                slots, firsts, sizes = slots[~kept], firsts[~kept], sizes[~kept]
        self._slots.vacate(slots)
        self.shards.c.count(firsts, sizes, -1)
        self.counters.wasted += self.policy.leave(slots)
        self.counters.evicted += len(slots)
        return kept

    def _restore(self, slots: Int64s) -> None:
        """Make what slots hold readable again: no byte of it has changed."""
        numbers = []
        for slot in slots.tolist():
            first = int(self._first[slot])
            run = self._slot_of[first : first + int(self._count[slot])]
            numbers.append(first + np.flatnonzero(run == slot + 1))
        self.leases.restore(np.concatenate(numbers))

    def evict(self, first: int, end: int) -> bool:
        """Evict the samples [first, end) of a shard. False when one of their slots is pinned,
        leased or being read: then none is, or all but what was leased in this moment.

        Cost: 0.14 us a sample, and more where memory is slow.
        """
        inside = self._slots_of(first, end)
        self._look_at_leases()
        if not self._slots.usable(inside).all() or self._leased[inside].any():
            return False
        kept = self._evict(inside)
        self.arena.free(inside if kept is None else inside[~kept])
        return kept is None

    def drop(self, base: int) -> bool:
        """Forget a shard that nobody has open. False while there is a slot with a sample of it."""
        if self.shards.used[self.shards.row(base)]:
            return False  # Where its samples are evicted, what failed is still pinned.
        self.uses.drop(base)
        return True

    def usage(self) -> Int64s:
        """Return the bytes of slots in use by each row of the shard table."""
        return self.shards.used


def _joined(some: Int64s, more: Int64s) -> Int64s:
    if not len(more):
        return some
    return np.concatenate((some, more)) if len(some) else more


def _groups(classes: Int64s) -> list[tuple[int, Int64s | slice]]:
    """Return each size class with the rows that have it; mostly there is one."""
    if np.count_nonzero(classes != classes[0]) == 0:
        return [(int(classes[0]), _ALL)]
    return [(c, np.flatnonzero(classes == c)) for c in np.unique(classes).tolist()]


def _parts(
    slots: Int64s, classes: Int64s, passing: NDArray[np.bool_]
) -> list[tuple[int, Int64s, bool]]:
    """Return slots by size class and whether they came at another's cost, these first."""
    parts = []
    for size_class, rows in _groups(classes):
        chosen, at_a_cost = slots[rows], passing[rows]
        count = np.count_nonzero(at_a_cost)
        if count:
            parts.append((size_class, chosen[at_a_cost] if count < len(chosen) else chosen, True))
        if count < len(chosen):
            parts.append((size_class, chosen[~at_a_cost] if count else chosen, False))
    return parts
