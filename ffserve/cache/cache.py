"""The cache as a state machine: what is in memory, what is on its way, what must be read.

It knows no socket, no thread and no clock: the server asks it to `advance` a fetch, submits the
`Load` that comes back, and tells it with `loaded` how that went; `room` says which slots are read
into. Numbers are node-wide sample numbers throughout.

A slot's life:

    FREE ──advance──▶ LOADING ──loaded──▶ RESIDENT ──evicted──▶ FREE
                         └────failed────▶ FAILED ──last pin released──▶ FREE

A pin keeps a slot from being evicted. `advance` takes one pin a slot for its fetch, `release`
gives them back. LOADING
slots are never evicted, whoever died: the kernel still writes into them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.allocator import Allocator, CacheCounters, Retract, by_class
from ffserve.cache.arena import Arena
from ffserve.cache.next_use import NextUse
from ffserve.cache.policy import Policy
from ffserve.cache.tables import LARGEST_SHARED_BLOCK, Blocks, Directory, ShardTable
from ffserve.engine.plan import MOST_CLASSES, Planner
from ffserve.engine.slots import FAILED, FREE, LOADING, RESIDENT, Slots
from ffserve.errors import STATUS_TOO_LARGE, FFServeError

Int64s: TypeAlias = NDArray[np.int64]

MOST_LOADS = (1 << 31) - 1
"""Loads are numbered up to here, then from 1 again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample could not be read.

    status: negative errno or a status of `errors.py`; found, expected: checksums; size: bytes of
    the chunk for STATUS_TOO_LARGE; error: the format's own error, which replaces all others.
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
        self._slot_of = directory.slot_of
        self._retract = retract
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
        self.allocator = Allocator(arena, shards, self._slots, self.policy, retract, self.counters)
        self.plans_at_once = True
        """Whether plain misses are planned at once; for tests."""
        self._planner = Planner(
            self._slots,
            shards.c,
            self.policy.buckets.residents,
            arena.class_sizes,
            arena.slab_used,
            LARGEST_SHARED_BLOCK,
        )
        self._usual_classes: dict[int, tuple[int, ...]] = {}
        """By group: the size classes of what was planned at once of late."""
        self._loading: dict[int, Load] = {}
        self._next_load = 1

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
            stocks = [self.allocator.stock(size_class, group, len(part)) for size_class in usual]
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
                first, failure = blocks.firsts[column], Failure(STATUS_TOO_LARGE, size=told)
                inside = part[(part >= first) & (part < first + blocks.counts[column])]
                fetch.failures.update(dict.fromkeys(inside.tolist(), failure))
            blocks, where = blocks.take(fits), where[fits]
            if not len(where):
                return None, cut
        classes = self.arena.classes(blocks.sizes)
        group = self.uses.group_of(int(blocks.firsts[0]))
        slots, passing = self.allocator.allocate(classes, blocks.sizes, group, fetch.latest)
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
            self.policy.prefetched(slots)
            self.counters.prefetched += len(slots)
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
                self.policy.admit_expendable(chosen, size_class)
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

    def release(self, pins: list[Int64s]) -> None:
        """Give back what `advance` pinned."""
        for slots in pins:
            if self._slots.unpin(slots):
                failed = slots[(self.state[slots] == FAILED) & (self.pins[slots] == 0)]
                for slot in failed.tolist():
                    self._free_failed(slot)

    # ---- about samples --------------------------------------------------------------------

    def holds(self, first: int, end: int) -> bool:
        """Whether each of the samples [first, end) is there or on its way."""
        return int(self._slot_of[first:end].min()) > 0

    def used(self, numbers: Int64s) -> None:
        """These samples were just asked for, be they there or on their way."""
        if self.counters.prefetched:
            self.policy.asked(self._slots.taken(numbers))

    def invalidate(self, numbers: Int64s) -> None:
        """These samples were just used, so that they will be wanted at another time than before."""
        slots = self._slots.resident(numbers)
        if len(slots):
            self.policy.invalidate(slots)

    def drop(self, base: int) -> bool:
        """Forget a shard that nobody has open. False while there is a slot with a sample of it."""
        if self.shards.used[self.shards.row(base)]:
            return False  # Where its samples are evicted, what failed is still pinned.
        self.uses.drop(base)
        return True


def _parts(
    slots: Int64s, classes: Int64s, passing: NDArray[np.bool_]
) -> list[tuple[int, Int64s, bool]]:
    """Return slots by size class and whether they came at another's cost, these first."""
    parts = []
    for size_class, rows in by_class(classes):
        chosen, at_a_cost = slots[rows], passing[rows]
        count = np.count_nonzero(at_a_cost)
        if count:
            parts.append((size_class, chosen[at_a_cost] if count < len(chosen) else chosen, True))
        if count < len(chosen):
            parts.append((size_class, chosen[~at_a_cost] if count else chosen, False))
    return parts
