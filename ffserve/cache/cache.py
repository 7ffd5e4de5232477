"""The cache as a state machine: samples in memory, samples being read, samples to be read.

It uses no socket, no thread and no clock. The server calls `advance` for a fetch, submits the
`Load` that it returns, and reports the outcome with `loaded`; `allocator` chooses the slots. All
numbers of samples are sample numbers, not indices in a data set.

The life of a slot:

    FREE ──advance──▶ LOADING ──loaded──▶ RESIDENT ──evicted──▶ FREE
                         └────failed────▶ FAILED ──last pin released──▶ FREE

A pin keeps a slot from being evicted. `advance` takes one pin per slot for its fetch, `release`
returns them. LOADING slots are never evicted, even when every client is gone: the kernel still
writes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ffserve.cache.allocator import Allocator, CacheCounters, Part, Retract
from ffserve.cache.arena import Arena
from ffserve.cache.next_use import NextUse
from ffserve.cache.policy import Policy
from ffserve.cache.tables import Blocks, Directory, ShardTable
from ffserve.dtypes import Bools, Bytes, Int32s, Int64s
from ffserve.engine.slots import FAILED, FREE, LOADING, RESIDENT, Slots
from ffserve.errors import STATUS_TOO_LARGE, Failure

FITTED, FITTED_OF_EACH = 4096, 64
"""This many blocks are examined for being all of one size: of all shards that are opened together,
and of each shard at least."""
ONE_SIZE = 31 / 32
"""Blocks count as all of one size if their mean size is at least this part of the largest."""

MOST_LOADS = (1 << 31) - 1
"""The highest number of a load; the next one is 1."""


class Fetch:
    """One request for samples on its way through the cache.

    Args:
        numbers: int64[n] of one dataset, repeats allowed; planned in this order.
        latest: for a prefetch, the time at which the samples will be wanted: only samples wanted
            later may be evicted for them. None: they are wanted now.
    """

    __slots__ = (
        "cursor",
        "failures",
        "latest",
        "numbers",
        "pinned_size",
        "pins",
        "source",
        "waiting",
    )

    def __init__(self, numbers: Int64s, latest: float | None = None) -> None:
        self.numbers = numbers
        self.latest = latest
        self.source: object = None
        """What prepared samples are copied from; None: the samples are in the files of shards."""
        self.cursor = 0
        """The number of samples that were planned: they are resident, being read, or failed."""
        self.waiting = 0
        """Loads that must end before the outcome of the first `cursor` samples is known."""
        self.pins: list[Int64s] = []
        self.pinned_size = 0
        self.failures: dict[int, Failure] = {}

    @property
    def complete(self) -> bool:
        """Whether all samples are planned and their outcome is known."""
        return self.waiting == 0 and self.cursor == len(self.numbers)


@dataclass(slots=True, eq=False)
class Load:
    """Blocks to be read, each into its slot.

    number: unique while the load is in progress. parts: its slots by size class. size: bytes of the
    blocks in their files, widened. reads: of the device; the reader lowers it where neighbours are
    read together.
    source: see `Fetch`. All others are the reader's. batches, failures: parts of the load that have
    not ended, failed samples by number. read_s, decode_s: the time of batches that are decoded, and
    of their decoding. right: samples whose checksum was right at the second read only. releases:
    called when the load has ended. fetch_s: how long it has waited for the origin.
    """

    number: int
    blocks: Blocks
    slots: Int64s
    offsets: Int64s
    sizes: Int64s
    parts: list[Part]
    size: int
    reads: int
    source: object = None
    fetches: list[Fetch] = field(default_factory=list)
    batches: int = 0
    failures: dict[int, Failure] = field(default_factory=dict)
    read_s: float = 0.0
    decode_s: float = 0.0
    right: list[int] = field(default_factory=list)
    releases: list[Callable[[], object]] = field(default_factory=list)
    fetch_s: float = 0.0


class Cache:
    """Slots, their contents and their pins.

    Args:
        retract: see Retract; in the daemon the C core's.
        next_use: when samples will be wanted, for the policy.
        states, leases: uint8[slots], int32[slots], zeros, or a predecessor's (`adoption.adopt`):
            the state of each slot, and how many leases it has. In the daemon they are in shared
            memory, for its successor.
    """

    def __init__(
        self,
        arena: Arena,
        directory: Directory,
        shards: ShardTable,
        retract: Retract,
        next_use: NextUse | None = None,
        states: Bytes | None = None,
        leases: Int32s | None = None,
    ) -> None:
        self.arena = arena
        self.shards = shards
        self.counters = CacheCounters()
        self._slot_of = directory.slot_of
        self.retract = retract
        self.next_use = NextUse() if next_use is None else next_use
        slots = arena.slot_limit
        self.state = np.zeros(slots, np.uint8) if states is None else states
        self.leases = np.zeros(slots, np.int32) if leases is None else leases
        self.pins = np.zeros(slots, np.int32)
        self._first = np.zeros(slots, np.int64)
        self._count = np.zeros(slots, np.int32)
        self.policy = Policy(arena, self.next_use, self._first, self._count, self.pins)
        self._load_of = np.zeros(slots, np.int32)
        self.slots = Slots(
            self._slot_of,
            self.state,
            self.pins,
            self._first,
            self._count,
            self._load_of,
            self.policy.buckets.parked,
            *arena.tables(),
            shards.c,
        )
        self.allocator = Allocator(arena, shards, self.slots, self.policy, retract, self.counters)
        self._loading: dict[int, Load] = {}
        self._next_load = 1
        self.release_count = 0
        """Calls of `release`: after one, slots may be found where there were none."""

    def add_domain(self) -> int:
        """Let another domain have slots; return its number."""
        number = self.arena.add_domain()
        self.policy.buckets.add_classes()
        return number

    def fit(self, bases: Sequence[int]) -> None:
        """Make size classes for shards that were just added to the shard table, if the samples of a
        shard are all of one size. Args: bases: of shards with samples."""
        rows = np.searchsorted(self.shards.bases, np.array(bases, np.int64))
        rows = rows[~self.shards.chunked[rows]]
        if not len(rows):
            return
        counts = self.shards.counts[rows]
        examined = np.minimum(counts, max(FITTED // len(rows), FITTED_OF_EACH))
        starts = np.cumsum(examined) - examined
        # Evenly spaced: a class for the largest of these serves nearly all others as well.
        steps = (counts - 1) / np.maximum(examined - 1, 1)
        ranks = np.arange(int(examined.sum())) - np.repeat(starts, examined)
        numbers = np.repeat(self.shards.bases[rows], examined)
        numbers += (ranks * np.repeat(steps, examined)).astype(np.int64)
        sizes = self.shards.blocks(numbers).sizes
        largest = np.maximum.reduceat(sizes, starts)
        fits = largest <= self.arena.slab_size
        fits &= np.add.reduceat(sizes, starts) >= ONE_SIZE * largest * examined
        for size in np.unique(largest[fits]).tolist():
            self.arena.make_class(size)

    # ---- planning -------------------------------------------------------------------------

    def advance(self, fetch: Fetch, count: int, size: int) -> Load | None:
        """Plan the next samples of a fetch: at most `count`, and about `size` bytes.

        Pins the slots of these samples and moves `fetch.cursor`. If the cursor stays, the arena is
        full of pinned slots: try again after a release.

        Returns: what must be read for them, or None.
        """
        part = fetch.numbers[fetch.cursor : fetch.cursor + count]
        if not len(part):
            return None
        handled, absent, touched, positions = self.slots.split(part, size)
        load = None
        held, loading = self.slots.pin(touched) if len(touched) else (0, touched)
        if len(absent):
            # Pinned before: samples of the request must not evict each other.
            part = part[:handled]
            load, cut, returned = self._admit(fetch, part, absent, size)
            returned |= len(touched) > 0
            kept = int(positions.searchsorted(cut)) if len(touched) else 0
            if kept < len(touched):
                self.release([touched[kept:]])
                touched = touched[:kept]
                held = int(self.arena.sizes(touched).sum())
                loading = touched[self.state[touched] == LOADING]
            if cut == 0 and handled > 1 and returned:
                # The slots of the part's other samples may have been in the way.
                load, cut, _ = self._admit(fetch, part[:1], absent[:1], size)
            if cut < len(part):
                absent = absent[: absent.searchsorted(cut)]
            handled = cut
        if len(touched):
            # A copy: `touched` is a view of an array three times as long as the part.
            fetch.pins.append(touched.copy())
            fetch.pinned_size += held
            if len(loading):
                self._join(fetch, loading)
        if load is not None:
            load.fetches.append(fetch)
            fetch.waiting += 1
        fetch.cursor += handled
        if fetch.latest is None:
            self.counters.asked += handled
            self.counters.resident += handled - len(absent)
        return load

    def _join(self, fetch: Fetch, loading: Int64s) -> None:
        for number in np.unique(self._load_of[loading]).tolist():
            self._loading[number].fetches.append(fetch)
            fetch.waiting += 1
            self.counters.joined += 1

    def _admit(
        self, fetch: Fetch, part: Int64s, absent: Int64s, size: int
    ) -> tuple[Load | None, int, bool]:
        """Allocate slots for absent samples; return the load, how many samples of the part are
        planned, and whether slots were given back that later samples of the part had got."""
        numbers = part if len(absent) == len(part) else part[absent]
        # Blocks are in order of first use, so that what fits is a prefix of the part.
        cut = self.slots.cut(self.shards.table(numbers), absent.copy(), size)
        blocks, wanted_by = Blocks(cut.blocks), cut.positions
        end = len(part) if cut.end < 0 else cut.end
        if cut.largest > self.arena.size:
            fits = self._refuse_too_large(fetch, part, blocks)
            blocks, wanted_by = blocks.take(fits), wanted_by[fits]
        if not len(wanted_by):
            return None, end, False
        domains = self.shards.domain(blocks.shards)
        classes = self.arena.by_class(blocks.sizes, cut.smallest, cut.largest, domains)
        group = self.next_use.group_of(int(numbers[0]))
        slots, parts, complete = self.allocator.allocate(classes, blocks.sizes, group, fetch.latest)
        returned = False
        if not complete:
            end = int(wanted_by[int(np.argmax(slots < 0))])
            surplus = slots[(wanted_by >= end) & (slots >= 0)]
            self.state[surplus] = FREE
            self.arena.free(surplus)
            returned = len(surplus) > 0
            fits = wanted_by < end
            blocks, slots = blocks.take(fits), slots[fits]
            parts = [(c, kept, e) for c, s, e in parts if len(kept := s[self.state[s] == LOADING])]
            if not len(slots):
                return None, end, returned
        return self._start(fetch, blocks, slots, parts, group), end, returned

    def _refuse_too_large(self, fetch: Fetch, part: Int64s, blocks: Blocks) -> Bools:
        """Fail the samples of blocks that exceed the whole arena; return which blocks do not."""
        fits = blocks.sizes <= self.arena.size
        for column in np.flatnonzero(~fits).tolist():
            chunked = self.shards.chunked[blocks.shards[column]]
            size = int(blocks.sizes[column]) if chunked else 0
            first = blocks.firsts[column]
            inside = part[(part >= first) & (part < first + blocks.counts[column])]
            failure = Failure(STATUS_TOO_LARGE, size=size)
            fetch.failures.update(dict.fromkeys(inside.tolist(), failure))
        return fits

    def _start(
        self, fetch: Fetch, blocks: Blocks, slots: Int64s, parts: list[Part], group: int
    ) -> Load:
        number = self._next_load
        self._next_load = number % MOST_LOADS + 1
        held, size, offsets, sizes = self.slots.enter(blocks.table, slots, number)
        self.policy.enter(slots, group, held)
        if fetch.latest is not None:
            self.policy.prefetched(slots)
            self.counters.prefetched += len(slots)
        fetch.pins.append(slots)
        fetch.pinned_size += held
        self.counters.blocks_read += len(slots)
        load = Load(number, blocks, slots, offsets, sizes, parts, size, len(slots), fetch.source)
        self._loading[number] = load
        return load

    # ---- outcomes -------------------------------------------------------------------------

    def loaded(self, load: Load, failures: dict[int, Failure]) -> list[Fetch]:
        """Record the outcome of a load, whose samples are readable but for the failed ones.

        Args: failures: by sample number.
        Returns: the fetches that no longer wait for a load.
        """
        slots = load.slots
        del self._loading[load.number]
        self.state[slots] = RESIDENT
        if failures:
            self._fail(load, failures)
        for size_class, chosen, expendable in load.parts:
            if failures:
                chosen = chosen[self.state[chosen] == RESIDENT]
            if expendable:
                self.policy.admit_expendable(chosen, size_class)
            else:
                self.policy.admit(chosen, size_class)
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
                # A second slot for the whole block would overlap with this one.
                damaged.append(first)
        if damaged:
            self.shards.read_singly(damaged)

    def _free_failed(self, slot: int) -> None:
        if self.pins[slot] == 0:
            freed = np.array([slot], np.int64)
            self.slots.vacate(freed)
            self.policy.leave(freed)
            self.arena.free(freed)

    def release(self, pins: list[Int64s]) -> None:
        """Return the pins of `advance`."""
        self.release_count += 1
        for slots in pins:
            if self.slots.unpin(slots):
                free = slots[self.pins[slots] == 0]
                self.policy.unpark(free)
                for slot in free[self.state[free] == FAILED].tolist():
                    self._free_failed(slot)

    # ---- leases ---------------------------------------------------------------------------

    def lease(self, pins: list[Int64s]) -> None:
        """These pins, each slot once in an array, are those of a lease from now on."""
        for slots in pins:
            self.leases[slots] += 1

    def end_lease(self, pins: list[Int64s]) -> None:
        """Return the pins of a lease."""
        for slots in pins:
            self.leases[slots] -= 1
        self.release(pins)

    # ---- samples --------------------------------------------------------------------------

    def holds(self, first: int, end: int) -> bool:
        """Whether each of the samples [first, end) is resident or being read."""
        return int(self._slot_of[first:end].min()) > 0

    def used(self, numbers: Int64s) -> None:
        """These samples were just requested: those prefetched were of use."""
        if self.counters.prefetched:
            self.policy.requested(self.slots.taken(numbers))

    def invalidate(self, numbers: Int64s) -> None:
        """These samples were just used: the estimates of their next use are no longer valid."""
        slots = self.slots.resident(numbers)
        if len(slots):
            self.policy.invalidate(slots)

    def shards_being_read(self) -> set[int]:
        """Return the bases of the shards of which samples are being read."""
        if not self._loading:
            return set()
        firsts = np.concatenate([load.blocks.firsts for load in self._loading.values()])
        bases: list[int] = self.shards.bases[np.unique(self.shards.rows(firsts))].tolist()
        return set(bases)

    def drop(self, *bases: int) -> bool:
        """Forget shards without sessions. False while a slot holds a sample of one."""
        rows = np.searchsorted(self.shards.bases, np.array(bases, np.int64))
        if self.shards.used[rows].any():
            return False  # Failed slots may still be pinned after the samples were evicted.
        for group in self.next_use.drop(*bases):
            self.policy.forget(group)
        return True
