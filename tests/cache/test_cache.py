"""Slots, shared tables, blocks, policy, and what the cache once got wrong."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from ffserve.cache.arena import (
    LONGEST_RUN,
    OWN_CLASSES,
    OWN_GAIN,
    PACKED_ALIGNMENT,
    RUN_SHARE,
    SLOT_ALIGNMENT,
    SMALLEST_ARENA,
    SMALLEST_SLOT,
    Arena,
)
from ffserve.cache.cache import Cache, Fetch, Load
from ffserve.cache.tables import LARGEST_SHARED_BLOCK, Directory, ShardTable
from ffserve.engine.slots import FREE, RESIDENT
from ffserve.errors import (
    STATUS_ARENA_BUSY,
    STATUS_TOO_LARGE,
    Failure,
    FormatError,
    ReadError,
    UsageError,
)
from ffserve.formats.base import UNKNOWN_LENGTH
from ffserve.limits import MOST_UNACKNOWLEDGED
from ffserve.reads.shard_tables import bound_lengths
from ffserve.server.reading.pins import PIN_GRACE_S
from ffserve.server.reading.requests import Requester, SampleRequest
from ffserve.server.reading.scheduler import (
    GIVE_UP_S,
    QUANTUM,
    QUANTUM_SIZE,
    RETRY_S,
    Scheduler,
)
from ffserve.server.users.shares import ACTIVE_S, User
from ffserve.system.memfd import HUGE_PAGE, SharedMemory, map_read_only

Int64s = NDArray[np.int64]
KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096


# ---- arena -------------------------------------------------------------------------------------


def test_an_arena_below_the_smallest_is_refused() -> None:
    with pytest.raises(UsageError):
        Arena(SMALLEST_ARENA - 1)


@pytest.mark.check
@given(size=st.integers(SMALLEST_ARENA, 1 << 40))
def test_every_class_fits_its_slab(size: int) -> None:
    arena = Arena(size)
    assert 0 < arena.size <= size < arena.size + arena.slab_size
    classes = arena.class_sizes[arena.class_sizes > 0].tolist()
    assert classes == sorted(set(classes))
    assert classes[0] >= SMALLEST_SLOT and classes[-1] == arena.slab_size
    assert all(size % SLOT_ALIGNMENT == 0 for size in classes)


@given(size=st.integers(SMALLEST_ARENA, 1 << 34), wanted=st.floats(0, 1))
def test_a_class_wastes_at_most_a_ninth(size: int, wanted: float) -> None:
    arena = Arena(size)
    ask = int(SMALLEST_SLOT + wanted * (arena.slab_size // 9 - SMALLEST_SLOT))
    slot = int(arena.class_sizes[int(arena.classes(np.array([ask]))[0])])
    assert ask <= slot
    # The last class before a slab's ninth may be grown to what its slab would waste.
    assert slot - ask <= slot / 9 + slot / (arena.slab_size // slot) + SLOT_ALIGNMENT


def unit_of(size: int) -> int:
    """What the slots of a class of its own are a multiple of."""
    return PACKED_ALIGNMENT if size % SLOT_ALIGNMENT else SLOT_ALIGNMENT


@given(size=st.integers(SMALLEST_ARENA, 1 << 30), wanted=st.floats(0, 1))
def test_samples_of_one_size_left_a_ninth_of_the_memory_unused(size: int, wanted: float) -> None:
    arena = Arena(size)
    ask = int(SMALLEST_SLOT + wanted * (arena.slab_size - SMALLEST_SLOT))
    arena.make_class(ask)
    taken = arena.take(int(arena.classes(np.array([ask]))[0]), 1 << 30)
    assert len(np.unique(taken)) == len(taken)
    most = arena.open_count * (arena.slab_size // (-(-ask // unit_of(ask)) * unit_of(ask)))
    assert len(taken) >= most / (1 + OWN_GAIN) * (1 - 1 / RUN_SHARE)


@given(wanted=st.floats(0, 1), slabs=st.integers(LONGEST_RUN * RUN_SHARE, 200))
@example(wanted=66_048 / MIB, slabs=128)
def test_slabs_that_were_no_multiple_of_their_slots_left_a_tenth_unused(
    wanted: float, slabs: int
) -> None:
    arena = Arena(slabs * MIB)
    assert arena.slab_size == MIB
    ask = int(SMALLEST_SLOT + wanted * (MIB // 4))
    arena.make_class(ask)
    taken = arena.take(int(arena.classes(np.array([ask]))[0]), 1 << 30)
    # What no run can leave less of: a slot per run, one part in 32 of it, and slots hardly larger.
    runs = 1 + arena.open_count // LONGEST_RUN
    assert len(taken) * (ask + unit_of(ask)) * (1 + OWN_GAIN) >= arena.size - runs * ask - 7 * MIB


def test_a_run_of_slabs_over_the_new_end_of_the_arena_is_not_filled_again() -> None:
    arena = Arena(128 * MIB)
    arena.make_class(66_048)
    (size_class,) = arena.classes(np.array([66_048])).tolist()
    run = arena.run_length(size_class)
    count = run * MIB // 66_048
    assert run == 6 and count == 95 > run * (MIB // 66_048)
    taken = arena.take(size_class, 1 << 30)
    everything = len(taken)
    assert everything == 21 * count + 2 * (MIB // 66_048)
    arena.resize(10 * run + 3)
    inside = taken[arena.within(taken)]
    assert len(inside) == 10 * count
    across = taken[taken // arena.slots_per_slab == 10 * run]
    assert len(across) == count
    arena.free(across[:-1])
    assert not len(arena.take(size_class, 1)), "it goes when it is empty"
    arena.free(across[-1:])
    fresh = arena.take(size_class, 1 << 30)
    assert len(fresh) == 3 * (MIB // 66_048) and arena.within(fresh).all()
    arena.resize(128)
    arena.free(np.setdiff1d(taken, across))
    arena.free(fresh)
    assert len(arena.take(size_class, 1 << 30)) == everything


def test_a_size_gets_a_class_of_its_own_if_a_slab_then_holds_a_64th_more() -> None:
    arena = Arena(64 * MIB)
    general = np.count_nonzero(arena.class_sizes)
    for size in (16_384, 16_320):
        arena.make_class(size)
        assert np.count_nonzero(arena.class_sizes) == general
    arena.make_class(16_128)  # 65 of them, where the general class has 64
    assert 16_128 in arena.class_sizes


def test_classes_of_one_size_are_made_anew_when_none_of_their_slots_is_in_use() -> None:
    arena = Arena(64 * MIB)
    general = np.count_nonzero(arena.class_sizes)
    held = []
    for size in range(8704, arena.slab_size, 512):
        arena.make_class(size)
        (size_class,) = arena.classes(np.array([size])).tolist()
        assert arena.class_sizes[size_class] >= size
        if arena.class_sizes[size_class] == size:
            held.append(arena.take(size_class, 1))
            assert len(held[-1]), "there is a slab for each"
    assert np.count_nonzero(arena.class_sizes) == general + OWN_CLASSES
    arena.free(np.concatenate(held))
    for size in (8704, 17_408):
        arena.make_class(size)
        assert size in arena.class_sizes
    assert np.count_nonzero(arena.class_sizes) == general + OWN_CLASSES


class ArenaMachine(RuleBasedStateMachine):
    """Random taking and giving back, against sets of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(8 * MIB)
        assert self.arena.slab_size == 256 * KIB and self.arena.open_count == 2 * RUN_SHARE
        assert [self.arena.add_domain(), self.arena.add_domain()] == [1, 2]
        self.given = self.arena.slab_domain.copy()
        self.arena.give = self.give
        self.held: dict[int, int] = {}
        self.domains: dict[int, int] = {}

    def give(self, slab: int, domain: int) -> bool:
        low, high = slab * self.arena.slots_per_slab, (slab + 1) * self.arena.slots_per_slab
        assert self.arena.slab_class[slab] < 0 and not any(low <= s < high for s in self.held)
        self.given[slab] = domain
        return True

    @rule(size=st.integers(0, 300_000), count=st.integers(1, 20), domain=st.integers(0, 2))
    def take(self, size: int, count: int, domain: int) -> None:
        (rank,) = self.arena.classes(np.array([size])).tolist()
        if rank == self.arena.large:
            slot = self.arena.take_run(size, domain)
            taken = [] if slot is None else [slot]
        else:
            ((size_class, _),) = self.arena.by_class(np.array([size]), size, size, domain)
            taken = self.arena.take(size_class, count)
            assert len(taken) <= count
        for slot in taken:
            assert slot not in self.held
            self.held[slot], self.domains[slot] = size, domain

    @rule(size=st.integers(4096, 262_144))
    def make_class(self, size: int) -> None:
        self.arena.make_class(size)

    @rule(size=st.integers(262_145, 2 * MIB), domain=st.integers(0, 2))
    def take_run(self, size: int, domain: int) -> None:
        free = self.arena.slab_class == -1
        slot = self.arena.take_run(size, domain)
        if slot is not None:
            self.held[slot], self.domains[slot] = size, domain
        else:
            need = -(-size // self.arena.slab_size)
            assert "1" * need not in "".join("01"[bool(f)] for f in free)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        self.arena.free(np.array(slots, np.int64))
        for slot in slots:
            del self.held[slot]

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self) -> None:
        slots = np.array(sorted(self.held), np.int64)
        assert (self.given == self.arena.slab_domain).all()
        for domain, slabs in enumerate(self.arena._free_slabs):
            assert (self.given[slabs] == domain).all()
        for slot in self.held:
            inside = self.arena.slabs_of([np.array([slot], np.int64)])
            assert (self.given[inside] == self.domains[slot]).all()
        if not len(slots):
            assert self.arena.used_size == 0
            assert (self.arena.slab_class == -1).all()
            free = sorted(slab for slabs in self.arena._free_slabs for slab in slabs)
            assert free == list(range(self.arena.slab_count))
            assert not any(self.arena._free_slots)
            return
        offsets, sizes = self.arena.offsets(slots), self.arena.sizes(slots)
        assert (offsets % PACKED_ALIGNMENT == 0).all()
        assert (offsets[sizes % SLOT_ALIGNMENT == 0] % SLOT_ALIGNMENT == 0).all()
        assert (sizes >= np.array([self.held[s] for s in slots.tolist()])).all()
        edges = sorted(zip(offsets.tolist(), sizes.tolist(), strict=True))
        for (offset, size), (following, _) in pairwise(edges):
            assert offset + size <= following
        assert edges[-1][0] + edges[-1][1] <= self.arena.size
        assert self.arena.used_size == int(sizes.sum())
        heads = self.arena.heads()
        for slab in range(self.arena.slab_count):
            low, high = self.arena.members(slab)
            assert low == heads[slab] * self.arena.slots_per_slab
            assert high == (slab + 1) * self.arena.slots_per_slab


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_giving_back_a_whole_arena_takes_no_time() -> None:
    arena = Arena(1 << 30)
    slots = np.array(arena.take(0, 1 << 30), np.int64)
    assert len(slots) == (1 << 30) // SMALLEST_SLOT
    start = time.perf_counter()
    arena.free(slots[::2])
    arena.free(slots[1::2])
    assert time.perf_counter() - start < 20
    assert arena.used_size == 0


# ---- directory ---------------------------------------------------------------------------------


@pytest.fixture
def directory() -> Iterator[Directory]:
    made = Directory(1 << 22)
    yield made
    made.close()


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_runs_of_numbers_are_disjoint_and_merge_again(data: st.DataObject) -> None:
    directory = Directory(1 << 22)
    try:
        held: list[tuple[int, int]] = []
        for _ in range(data.draw(st.integers(1, 20))):
            if data.draw(st.booleans()) and held:
                chosen: int = data.draw(st.integers(0, len(held) - 1))
                start, count = held.pop(chosen)
                directory.release(start, count)
            else:
                count = data.draw(st.integers(1, 1 << 20))
                try:
                    held.append((directory.reserve(count), count))
                except ReadError:
                    assert sum(count for _, count in held) + count > 1 << 20
            for (start, count), (following, _) in pairwise(sorted(held)):
                assert start + count <= following
        for start, count in held:
            directory.release(start, count)
        assert directory.reserve(1 << 22) == 0
    finally:
        directory.close()


def test_numbers_of_a_dropped_shard_are_not_soon_another_shards() -> None:
    directory = Directory(1 << 22)
    try:
        first = directory.reserve(1000)
        directory.release(first, 1000)
        assert directory.reserve(1000) != first
        assert directory.reserve((1 << 22) - 2000) == 2000
        assert directory.reserve(1000) == first, "but when nothing else is left"
    finally:
        directory.close()


def test_tables_that_are_taken_over_keep_rows_of_known_shards_and_no_others(
    directory: Directory,
) -> None:
    """The others read as zeros."""
    tables = directory.entries["length_low"], directory.offsets, directory.checksums
    for table in tables:
        table[:20_000] = 7
    directory.adopt({0: [(1000, 10), (9000, 5)]}, 20_000)
    kept = [*range(1000, 1010), *range(9000, 9005)]
    for table in tables:
        assert np.flatnonzero(table[:20_000]).tolist() == kept


@pytest.mark.parametrize("start", (0, 1, 255, 256, 257))
@pytest.mark.parametrize("count", (1, 3, 256, 257, 1025, 5000))
def test_a_released_run_reads_as_zeros_and_its_neighbours_do_not(
    directory: Directory, start: int, count: int
) -> None:
    end = start + count
    for array in (directory.offsets, directory.checksums, directory.slot_of):
        array[: end + 2000] = 7
    directory.entries["seq"][: end + 2000] = 7
    directory.release(start, count)
    for array in (
        directory.entries["seq"],
        directory.offsets,
        directory.checksums,
        directory.slot_of,
    ):
        assert not array[start:end].any()
        assert (array[:start] == 7).all()
        assert (array[end : end + 2000] == 7).all()


@pytest.mark.parametrize("count", (100, 20_000))
def test_the_tables_of_released_runs_stayed_in_memory(directory: Directory, count: int) -> None:
    """4 bytes a sample did, and all where a run was smaller than a page."""

    def size() -> int:
        files = directory.entries_memory.file, directory.index_memory.file
        shared = sum(os.fstat(file.fd).st_blocks * 512 for file in files)
        status = Path("/proc/self/status").read_text()
        return shared + int(status.partition("RssAnon:")[2].split()[0]) * 1024

    before = size()
    for _ in range(2_000_000 // count):
        start = directory.reserve(count)
        run = slice(start, start + count)
        for array in (directory.offsets, directory.checksums, directory.slot_of):
            array[run] = 7
        directory.entries["seq"][run] = 7
        directory.release(start, count)
    assert size() - before < MIB, "72 MB were used"


@given(offset=st.integers(0, 3 * PAGE), size=st.integers(0, 5 * PAGE))
@settings(deadline=None)
def test_discard_zeroes_what_it_is_told_and_nothing_else(offset: int, size: int) -> None:
    memory = SharedMemory("ffserve-test", 8 * PAGE)
    try:
        memory.array[:] = 9
        memory.discard(offset, size)
        assert not memory.array[offset : offset + size].any()
        assert (memory.array[:offset] == 9).all()
        assert (memory.array[offset + size :] == 9).all()
    finally:
        memory.close()


def regions() -> dict[int, str]:
    """What the kernel says of this process's mappings, by address."""
    texts = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return {int(text.split("-")[0], 16): text for text in texts}


@pytest.mark.parametrize("offset", [0, 5 * PAGE + 3, 3 * MIB, 4 * MIB])
def test_huge_pages_are_huge_for_clients_too(offset: int) -> None:
    """The kernel had put them at any page: not one huge page was ever in use."""
    memory = SharedMemory("ffserve-test", 8 * MIB)
    mapped = map_read_only(memory.file.fd, offset, 8 * MIB - offset)
    address = int(mapped.ctypes.data)
    try:
        assert memory.address % HUGE_PAGE == 0
        assert (address - offset) % HUGE_PAGE == 0
        memory.populate(0, 2 * MIB)
        memory.populate(2 * MIB, 6 * MIB)
        memory.array[4 * MIB] = 7
        assert mapped[4 * MIB - offset] == 7 and not mapped[: 4 * MIB - offset].any()
        huge = [
            int(re.findall(r"ShmemPmdMapped: *(\d+) kB", regions()[start // PAGE * PAGE])[0])
            for start in (memory.address, address)
        ]
        if huge[0] == 8 * 1024:  # not every kernel has them, and not at any time
            # What the client looked at: from its first whole one to that of the sample.
            assert huge[1] >= (8 * MIB - offset) // HUGE_PAGE // 2 * 2048
    finally:
        memory.close()


def test_no_more_is_mapped_than_the_file_holds() -> None:
    memory = SharedMemory("ffserve-test", 4 * PAGE)
    try:
        for offset, size in [(0, 4 * PAGE + 1), (4 * PAGE, 1), (2**62, 5), (5, 2**62), (-1, 5)]:
            with pytest.raises(ReadError, match="cannot map"):
                map_read_only(memory.file.fd, offset, size)
        mapped = map_read_only(memory.file.fd, 4 * PAGE - 1, 1)
        assert not mapped.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            mapped.flags.writeable = True
    finally:
        memory.close()
    assert mapped[0] == 0  # an array keeps its mapping


def test_samples_stay_out_of_core_files() -> None:
    memory = SharedMemory("ffserve-test", 8 * PAGE)
    mapped = map_read_only(memory.file.fd, 0, 8 * PAGE)
    try:
        flags = [
            regions()[address].split("VmFlags:")[1].split()
            for address in (memory.address, mapped.ctypes.data)
        ]
        assert len(flags) == 2 and all("dd" in flag for flag in flags)
    finally:
        memory.close()


@given(lengths=st.lists(st.integers(0, UNKNOWN_LENGTH - 1), min_size=1, max_size=20))
@example(lengths=[UNKNOWN_LENGTH - 1, 5])
@settings(deadline=None, max_examples=30)
def test_lengths_up_to_48_bits_survive(lengths: list[int]) -> None:
    directory = Directory(1 << 22)
    try:
        start = directory.reserve(3) + directory.reserve(len(lengths)) - 3 + 3
        directory.set_lengths(start, np.array(lengths, np.uint64))
        numbers = np.arange(start, start + len(lengths))
        assert directory.lengths(numbers).tolist() == lengths
    finally:
        directory.close()


@pytest.mark.parametrize("length", [UNKNOWN_LENGTH, UNKNOWN_LENGTH + 1, 1 << 63])
def test_a_record_too_long_for_an_entry_is_refused_when_its_shard_is_opened(length: int) -> None:
    # Only a file of 256 TiB and more can hold one, or be cut inside one.
    offsets = np.array([64, 100], np.uint64)
    lengths = np.array([36, UNKNOWN_LENGTH - 1], np.uint64)
    bound_lengths(offsets, lengths, 1 << 49, "f")
    assert lengths.tolist() == [36, UNKNOWN_LENGTH - 1]
    lengths[1] = length
    with pytest.raises(FormatError, match=r"f: record 1 has \d+ bytes"):
        bound_lengths(offsets, lengths, 1 << 49, "f")
    lengths[1] = length
    bound_lengths(offsets, lengths, 1 << 47, "f")
    assert lengths.tolist() == [36, (1 << 47) - 100 + 1]


# ---- blocks ------------------------------------------------------------------------------------


class Node:
    """A cache over shards of given lengths, and a disk that delivers when it is told."""

    def __init__(
        self, lengths: list[list[int]], arena_size: int = MIB, alignment: int = 512
    ) -> None:
        self.arena = Arena(arena_size)
        self.directory = Directory(1 << 22)
        self.table = ShardTable(self.directory)
        self.retracted: set[int] = set()
        self.cache = Cache(self.arena, self.directory, self.table, self._retract)
        self.bases = []
        for k, run in enumerate(lengths):
            array = np.array(run, np.int64)
            base = self.directory.reserve(len(run))
            self.directory.offsets[base : base + len(run)] = np.cumsum(array) - array + 100
            self.directory.set_lengths(base, array.astype(np.uint64))
            self.table.add(
                base,
                len(run),
                payload_size=int(array.sum()),
                alignment=alignment,
                checksum_kind=0,
                file=k,
                engine=0,
            )
            self.table.sessions[self.table.row(base)] = 1
            self.bases.append(base)

    def _retract(self, firsts: Int64s, counts: Int64s, slots: Int64s, sizes: Int64s) -> None:
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            self.retracted.update(range(first, first + count))

    def fetch(self, numbers: list[int], *, size: int = 1 << 40) -> tuple[Fetch, list[Load]]:
        """Advance a new fetch as far as it gets."""
        fetch, loads = Fetch(np.array(numbers, np.int64)), []
        before = -1
        while before < fetch.cursor < len(numbers):
            before = fetch.cursor
            load = self.cache.advance(fetch, 128, size)
            if load is not None:
                loads.append(load)
        return fetch, loads

    def read(self, numbers: list[int], failures: dict[int, Failure] | None = None) -> Fetch:
        """Fetch, load and unpin."""
        fetch, loads = self.fetch(numbers)
        for load in loads:
            mine = set[int]()
            for first, count in zip(load.blocks.firsts, load.blocks.counts, strict=True):
                mine.update(range(int(first), int(first + count)))
            self.cache.loaded(load, {n: f for n, f in (failures or {}).items() if n in mine})
        self.cache.release(fetch.pins)
        fetch.pins = []
        return fetch

    def resident(self, numbers: list[int]) -> list[bool]:
        slots = self.directory.slot_of[numbers].astype(np.int64) - 1
        good: list[bool] = ((slots >= 0) & (self.cache.state[slots] == RESIDENT)).tolist()
        return good


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(
        st.lists(
            st.one_of(
                st.integers(0, 100), st.integers(0, 5000), st.sampled_from([70_000, 300_000])
            ),
            min_size=1,
            max_size=200,
        ),
        min_size=1,
        max_size=4,
    ),
    alignment=st.sampled_from((1, 512, 4096)),
)
def test_every_sample_is_in_exactly_one_block(lengths: list[list[int]], alignment: int) -> None:
    node = Node(lengths, alignment=alignment)
    try:
        total = sum(map(len, lengths))
        blocks = node.table.blocks(np.arange(total))
        ranges = set(zip(blocks.firsts.tolist(), blocks.counts.tolist(), strict=True))
        covered = sorted(n for first, count in ranges for n in range(first, first + count))
        alone = [n for n in covered if covered.count(n) > 1] if len(covered) != total else []
        assert not alone and covered == list(range(total))
        borders = [*node.bases, total]
        for number in range(total):
            first, count = int(blocks.firsts[number]), int(blocks.counts[number])
            assert first <= number < first + count
            row = int(blocks.shards[number])
            assert borders[row] <= first and first + count <= borders[row + 1]
            offset = int(node.directory.offsets[number])
            length = int(node.directory.lengths(np.array([number]))[0])
            assert blocks.begins[number] <= offset
            assert offset + length <= blocks.ends[number]
            extent = int(blocks.ends[number] - blocks.begins[number])
            assert extent <= blocks.sizes[number] <= extent + 2 * alignment
            assert count == 1 or extent <= LARGEST_SHARED_BLOCK
    finally:
        node.directory.close()


def test_damaged_blocks_are_marked_once_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each used to sort all those before it: many held everybody up."""
    node = Node([[100] * 5000])
    followed = []
    follow = node.table._follow
    monkeypatch.setattr(node.table, "_follow", lambda: (followed.append(1), follow()))
    count = int(node.table.blocks(np.array([0], np.int64)).counts[0])
    assert count > 1
    firsts = list(range(0, 5000, count))
    for part in (firsts[20:], firsts[:10], firsts[:30]):
        followed.clear()
        wanted = [n for first in part for n in range(first, min(first + count, 5000))]
        fetch, loads = node.fetch(wanted)
        for load in loads:
            before = len(followed)
            node.cache.loaded(load, {int(n): Failure(-5) for n in load.blocks.firsts})
            assert len(followed) - before <= 1
        node.cache.release(fetch.pins)
    marked = node.table.blocks(np.array(firsts, np.int64))
    assert marked.counts.tolist() == [1] * len(firsts)
    node.table.remove(node.bases[0])
    assert not len(node.table._singly)


def test_a_huge_record_among_tiny_ones_is_read_alone_and_its_neighbours_too() -> None:
    lengths = [10] * 2000
    lengths[500] = 300_000
    node = Node([lengths])
    blocks = node.table.blocks(np.array([0, 499, 500, 501, 1999]))
    assert blocks.counts.tolist()[1:4] == [1, 1, 1]
    assert blocks.counts[0] > 1 and blocks.counts[4] > 1
    node.directory.close()


# ---- the cache ---------------------------------------------------------------------------------


def test_a_hit_was_evicted_for_a_miss_of_the_same_request() -> None:
    node = Node([[60_000] * 40])
    for number in range(16):
        node.read([number])
    here = [n for n in range(40) if node.resident([n])[0]]
    assert 0 < len(here) < 20
    fetch, _ = node.fetch([here[-1], 20, 21, here[0], 22])
    dealt_with = fetch.numbers[: fetch.cursor].tolist()
    assert (node.directory.slot_of[dealt_with] > 0).all()
    node.directory.close()


def test_a_request_whose_own_hits_fill_the_arena_gets_on() -> None:
    node = Node([[250_000] * 8])
    node.read([1]), node.read([2]), node.read([3]), node.read([4])
    here = [n for n in range(1, 5) if node.resident([n])[0]]
    fetch, _ = node.fetch([0, *here])
    assert fetch.cursor >= 1
    node.directory.close()


@pytest.mark.parametrize(("alignment", "together"), [(1, 1), (512, 1), (4096, 2)])
def test_neighbours_share_a_block_where_the_disk_delivers_them_anyway(
    alignment: int, together: int
) -> None:
    node = Node([[3000] * 64], alignment=alignment)
    first = node.bases[0]
    node.read([first + 6])
    assert node.resident(list(range(first, first + 64))) == [
        6 <= k < 6 + together for k in range(64)
    ]


def test_a_half_failed_block_was_loaded_into_two_slots_at_once() -> None:
    node = Node([[100] * 64])
    bad = Failure(-5)
    node.read([3], {3: bad})
    assert node.resident([2, 3]) == [True, False]
    node.read([3])
    assert node.resident([2, 3]) == [True, True]
    slots = node.directory.slot_of[[2, 3]]
    counts = node.cache._count[slots - 1]
    assert slots[0] != slots[1] and counts.tolist() == [64, 1]
    node.directory.close()


def test_a_failed_sample_leaves_nothing_behind() -> None:
    node = Node([[5000] * 10])
    fetch = node.read([1, 2], {1: Failure(-5), 2: Failure(-5)})
    assert set(fetch.failures) == {1, 2}
    assert node.arena.used_size == 0
    assert (node.cache.state == FREE).all()
    node.directory.close()


def test_a_sample_larger_than_the_arena_fails_alone() -> None:
    node = Node([[5000, 3 * MIB, 5000]])
    fetch, loads = node.fetch([0, 1, 2])
    assert fetch.cursor == 3
    assert {n: f.status for n, f in fetch.failures.items()} == {1: STATUS_TOO_LARGE}
    assert sum(len(load.slots) for load in loads) == 2
    node.directory.close()


def test_lengths_above_4_gib_are_too_large_and_nothing_worse() -> None:
    node = Node([[(1 << 33) + 5, 100_000, 7]])
    fetch, _ = node.fetch([0, 1, 2])
    assert fetch.cursor == 3 and set(fetch.failures) == {0}
    node.directory.close()


def test_a_shard_is_dropped_only_when_it_is_unused() -> None:
    node = Node([[5000] * 10, [5000] * 10])
    fetch, loads = node.fetch([1])
    for nobody in (False, False, True):
        assert node.cache.allocator.evict(0, 10) == nobody
        assert node.cache.drop(0) == nobody
        if loads:
            node.cache.loaded(loads.pop(), {})
        else:
            node.cache.release(fetch.pins)
            fetch.pins.clear()
            node.read([11])
    assert node.resident([1, 11]) == [False, True]
    node.directory.close()


def test_samples_of_idle_shards_go_first() -> None:
    node = Node([[60_000] * 8, [60_000] * 40], arena_size=MIB)
    node.read([8, 9, 10])
    node.read([0, 1, 2, 3])
    node.table.sessions[0] = 0
    node.cache.allocator.idle_changed = True
    for number in range(11, 16):
        node.read([number])
    assert all(node.resident([8, 9, 10]))
    node.directory.close()


def lengths_of(kind: str, total: int) -> list[int]:
    """Records of one kind, `total` bytes of them or a little more."""
    rng = np.random.default_rng([ord(kind[0]), total])
    count = total // 3000
    if kind == "small":
        lengths = rng.integers(4000, 9000, count)
    elif kind == "images":
        lengths = np.clip(rng.lognormal(11.5, 0.5, count), 5000, 2 * MIB).astype(np.int64)
    else:
        lengths = rng.integers(900_000, 3_000_000, count)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), total)) + 1].tolist()


def held_size(node: Node, first: int, count: int) -> int:
    """Bytes of samples that can be read."""
    numbers = list(range(first, first + count))
    lengths = node.directory.lengths(np.array(numbers, np.int64))
    return int(lengths[node.resident(numbers)].sum())


@pytest.mark.check
@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for a in ("small", "images", "large") for b in ("small", "images", "large") if a != b],
)
@pytest.mark.parametrize("stays", [True, False])
def test_memory_is_used_when_record_sizes_change(before: str, after: str, stays: bool) -> None:
    """One job fills the arena, then another reads records of other sizes."""
    size = 64 * MIB
    first, second = lengths_of(before, int(1.3 * size)), lengths_of(after, int(1.5 * size))
    node = Node([first, second], arena_size=size)
    rng = np.random.default_rng(1)

    def epoch(base: int, count: int) -> None:
        order = base + rng.permutation(count)
        for start in range(0, count, 64):
            node.read(order[start : start + 64].tolist())

    epoch(0, len(first))
    assert held_size(node, 0, len(first)) >= 0.75 * size
    if not stays:
        node.table.sessions[0] = 0
        node.cache.allocator.idle_changed = True
    for _ in range(2):
        epoch(len(first), len(second))
    wanted = held_size(node, len(first), len(second))
    if stays:
        wanted += held_size(node, 0, len(first))
    assert wanted >= 0.8 * size
    node.directory.close()


@pytest.mark.check
def test_stealing_in_a_large_arena_takes_little_time() -> None:
    """A job with samples of another size comes to a full arena of a million slots."""
    node = Node([[4000] * 1_040_000, [100_000] * 4000], arena_size=4 << 30)
    for start in range(0, 1_040_000, 10_000):
        node.read(list(range(start, start + 10_000)))
    start_s = time.perf_counter()
    node.read(list(range(1_040_000, 1_042_000)))
    taken_s = time.perf_counter() - start_s
    assert all(node.resident([1_040_000 + k for k in range(100)]))
    # Some fifty slabs of a thousand slots; one look at every slot would be 10 ms each.
    assert taken_s < 20, taken_s
    node.directory.close()


# ---- the scheduler -----------------------------------------------------------------------------


def into(finished: list[SampleRequest]) -> Callable[[SampleRequest, float], None]:
    """Return what a session does with finished requests: it keeps them."""
    return lambda request, _now: finished.append(request)


def scheduled(node: Node) -> tuple[Scheduler, list[Load], list[SampleRequest], Requester]:
    loads: list[Load] = []
    finished: list[SampleRequest] = []
    scheduler = Scheduler(node.cache, lambda load, _: loads.append(load), most_reads=64)
    return scheduler, loads, finished, Requester(into(finished))


def ended(scheduler: Scheduler, load: Load, now: float) -> None:
    scheduler.loaded(load, {}, now)
    scheduler.go_on(now)


def asked(owner: Requester, tag: int, numbers: list[int], *, lease: bool = False) -> SampleRequest:
    return SampleRequest(owner, tag, np.array(numbers, np.int64), lease=lease)


@pytest.mark.parametrize(("size", "counts"), [(4000, [256, 256, 88]), (400_000, [31] * 3)])
def test_a_turn_is_bounded_in_samples_and_bytes(size: int, counts: list[int]) -> None:
    node = Node([[size] * 600], arena_size=1 << 30)
    scheduler, loads, _, owner = scheduled(node)
    scheduler.add(asked(owner, 1, list(range(600))), 0.0)
    for load in loads:
        ended(scheduler, load, 0.0)
        if len(loads) >= len(counts):
            break
    assert [len(load.slots) for load in loads[: len(counts)]] == counts
    assert all(load.size <= QUANTUM_SIZE for load in loads)
    node.directory.close()


class ArmedReply:
    """Says when it was armed among the loads that it waits for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def arm(self) -> None:
        self.calls.append("arm")

    @property
    def sent(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("count", "calls"), [(QUANTUM, ["arm", "load"]), (2 * QUANTUM, ["load", "load", "arm"])]
)
def test_the_only_load_ended_before_its_reply_was_armed(count: int, calls: list[str]) -> None:
    """Of several loads the first may end before the last is submitted: nothing is sent then."""
    node = Node([[100] * 600])
    reply = ArmedReply()
    scheduler = Scheduler(node.cache, lambda *_: reply.calls.append("load"), most_reads=64)
    request = SampleRequest(Requester(lambda *_: None), 1, np.arange(count), reply=reply)
    scheduler.add(request, 0.0)
    assert reply.calls == calls
    node.directory.close()


def test_a_user_who_asked_for_little_waited_for_the_next_turn_of_the_loop() -> None:
    node = Node([[100] * 6000])
    scheduler, loads, finished, honest = scheduled(node)
    scheduler.wake = lambda: None
    scheduler._most_reads = scheduler._order._most_reads = 4096
    hostile = Requester(into(finished), user=User(1, trusted=False))
    scheduler.add(asked(honest, 1, [0]), 0.0)
    ended(scheduler, loads[0], 0.0)
    for tag in range(20):
        scheduler.add(asked(hostile, tag, list(range(100 * tag, 100 * tag + 100))), 0.0)
    before = len(loads)
    for tag in 2, 3:
        scheduler.add(asked(honest, tag, [2000 * tag - 1]), 0.0)
    # The second one has to wait: until the other user has had as much.
    served = [fetch for load in loads[before:] for fetch in load.fetches]
    assert [fetch.tag for fetch in served if isinstance(fetch, SampleRequest)] == [2]
    scheduler.pump(0.0)
    assert len(loads) == before + 2
    node.directory.close()


def test_a_request_gave_up_without_a_look_at_the_room_just_taken_back() -> None:
    node = Node([[900_000] * 3])
    scheduler, loads, finished, owner = scheduled(node)
    scheduler.add(asked(owner, 1, [0]), 0.0)
    ended(scheduler, loads[0], 0.0)
    other = Requester(into(finished), user=owner.user)
    late = asked(other, 1, [1])
    scheduler.add(late, 0.0)
    assert scheduler.blocked_count == 1
    scheduler.pump(GIVE_UP_S + 1)
    assert scheduler.blocked_count == 0 and len(loads) == 2
    ended(scheduler, loads[1], GIVE_UP_S + 1)
    assert finished[-1] is late and not late.failures
    node.directory.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_daemon_that_ends_wrote_over_what_clients_still_leased(stopped: bool) -> None:
    """Sessions end one after the other; what the first had pinned made room for the others."""
    node = Node([[900_000] * 3])
    scheduler, loads, finished, owner = scheduled(node)
    scheduler.add(asked(owner, 1, [0]), 0.0)
    ended(scheduler, loads[0], 0.0)
    scheduler.add(asked(Requester(into(finished), user=owner.user), 1, [1]), 0.0)
    assert scheduler.blocked_count == 1 and len(loads) == 1
    if stopped:
        scheduler.stop()
    list(scheduler.leave(owner, 0.0))
    assert len(loads) == (1 if stopped else 2)
    node.directory.close()


def test_only_a_lease_makes_a_request_give_up() -> None:
    node = Node([[400_000] * 4], arena_size=MIB)
    scheduler, loads, finished, owner = scheduled(node)
    scheduler.add(asked(owner, 1, [0], lease=True), 0.0)
    ended(scheduler, loads[0], 0.0)
    assert owner.leases
    late = asked(Requester(into(finished), user=owner.user), 2, [1, 2])
    scheduler.add(late, 1.0)
    for load in loads[1:]:
        ended(scheduler, load, 1.0)
    now = 1.0
    while late not in finished:
        deadline = scheduler.next_deadline()
        assert deadline is not None and deadline > now
        now = deadline
        scheduler.pump(now)
    statuses = {failure.status for failure in late.failures.values()}
    assert statuses <= {STATUS_ARENA_BUSY}
    node.directory.close()


def test_leases_on_their_way_together_took_more_than_their_half() -> None:
    node = Node([[100_000] * 30])
    scheduler, loads, finished, owner = scheduled(node)
    for tag in range(1, 11):
        scheduler.add(asked(owner, tag, [tag], lease=True), 0.0)
    for load in loads:
        ended(scheduler, load, 0.0)
    leased = sum(fetch.pinned_size for fetch in owner.leases.values())
    assert 0 < leased <= node.arena.size // 2
    assert {request.count for request in finished} == {0, 1}
    list(scheduler.leave(owner, 1.0))
    assert not node.cache.pins.any()
    node.directory.close()


def test_users_that_came_and_went_were_kept_with_their_last_answer() -> None:
    node = Node([[1000] * 10])
    scheduler, loads, _finished, _owner = scheduled(node)
    for k in range(20):
        owner = Requester(lambda *_: None, user=User(k))
        scheduler.add(asked(owner, 1, [k % 10]), 0.0)
        while loads:
            ended(scheduler, loads.pop(), 0.0)
        assert owner.unacknowledged
        list(scheduler.leave(owner, 0.0))
    assert len(scheduler._order.users) <= 2
    node.directory.close()


def test_a_deadline_that_passed_unseen_was_forgotten() -> None:
    node = Node([[900_000] * 3])
    scheduler, _loads, finished, owner = scheduled(node)
    scheduler.add(asked(owner, 1, [0]), 0.0)
    scheduler.add(asked(Requester(into(finished), user=owner.user), 1, [1]), 0.0)
    assert scheduler.blocked_count == 1
    # Time goes on between the last look at the requests and the question.
    for expected in (0.1, 1.0, GIVE_UP_S):
        assert scheduler.next_deadline() == expected
        scheduler.pump(expected)
    node.directory.close()


def crowding(lease: bool) -> tuple[Node, Scheduler, Requester]:
    """Two users of an arena of 2048 slots: one holds three or four parts of 256 slots that were
    answered, and waits for as many as it may; the other has read one sample, and waits for none."""
    node = Node([[4000] * 8192], arena_size=8 * MIB)
    loads: list[Load] = []
    scheduler = Scheduler(node.cache, lambda load, _: loads.append(load), most_reads=1 << 20)
    owners = [Requester(lambda *_: None, user=User(uid, trusted=False)) for uid in (1, 2)]
    hostile, honest = owners
    scheduler.add(asked(honest, 1, [8000]), 0.0)
    answered = 3 if lease else 4
    for tag in range(1, answered + 1):
        numbers = list(range(256 * tag, 256 * (tag + 1)))
        scheduler.add(asked(hostile, tag, numbers, lease=lease), 0.0)
    for load in loads:
        ended(scheduler, load, 0.0)
    scheduler.pins.acknowledge(honest, [1])
    assert len(hostile.leases if lease else hostile.unacknowledged) == answered
    for tag in range(5, 20):
        scheduler.add(asked(hostile, tag, list(range(256 * tag, 256 * (tag + 1)))), 0.0)
    return node, scheduler, honest


def test_a_user_with_requests_under_way_kept_its_pins_while_another_waited() -> None:
    node, scheduler, honest = crowding(lease=False)
    scheduler.add(asked(honest, 2, list(range(8001, 8065))), 0.0)
    assert all(request.cursor == 64 for request in honest.waiting.values())
    node.directory.close()


def test_a_user_with_leases_had_as_much_under_way_as_one_without() -> None:
    node, _, _ = crowding(lease=True)
    turn = 64 * 4096
    assert int(node.cache.pins.sum()) * 4096 <= node.arena.size // 2 + turn
    node.directory.close()


def test_an_answer_waited_until_others_had_their_turn() -> None:
    """Each of many reads that had ended gave a turn to another request before the next answer."""
    node = Node([[4000] * 600])
    scheduler, loads, finished, owner = scheduled(node)
    scheduler.add(asked(owner, 1, list(range(64))), 0.0)
    other = Requester(into(finished), user=User(2))
    scheduler.add(asked(other, 1, list(range(64, 164))), 0.0)
    assert len(loads) == 2
    for load in tuple(loads):
        scheduler.loaded(load, {}, 0.0)
    assert [request.owner for request in finished] == [owner, other]
    assert len(loads) == 2
    scheduler.add(asked(owner, 2, [200]), 0.0)
    assert len(loads) == 3
    node.directory.close()


def test_a_user_that_only_waited_held_up_the_requests_of_another() -> None:
    """It did not count as a second user, so its oldest request had all turns."""
    node = Node([[700_000] * 3, [1000] * 10], arena_size=2 * MIB)
    loads: list[Load] = []
    scheduler = Scheduler(node.cache, lambda load, _: loads.append(load), most_reads=2)
    hostile, honest = (Requester(lambda *_: None, user=User(uid)) for uid in (1, 2))
    scheduler.add(asked(hostile, 1, [0], lease=True), 0.0)
    scheduler.add(asked(hostile, 2, [1]), 0.0)
    scheduler.add(asked(hostile, 3, [2]), 0.0)
    ended(scheduler, loads[0], 0.5)
    assert scheduler.blocked_count == 1 and hostile.leases
    request = asked(honest, 1, [5])
    scheduler.add(request, 1.2 + ACTIVE_S - 1.0)
    assert request.cursor == 1
    node.directory.close()


def test_a_blocked_user_waited_for_one_that_could_have_no_turn() -> None:
    """The other one had as many reads in flight as it may; while it asked for more, free memory
    stayed free."""
    node = Node([[700_000] * 6], arena_size=2 * MIB)
    loads: list[Load] = []
    scheduler = Scheduler(node.cache, lambda load, _: loads.append(load), most_reads=8)
    much, little = (Requester(lambda *_: None, user=User(uid)) for uid in (1, 2))
    for tag in (1, 2, 3):
        scheduler.add(asked(much, tag, [tag]), 0.0)
    for load in tuple(loads):
        ended(scheduler, load, 0.0)
    scheduler._order.share.charge(much.user, 5.0)
    scheduler.add(asked(little, 1, [4]), 0.02)
    scheduler.add(asked(little, 2, [5]), 0.02)
    assert [tag for tag in (1, 2) if tag in little.waiting] == [1, 2] and len(loads) == 3
    assert scheduler.blocked_count == 1 and not scheduler._order.share.is_due(much.user)
    scheduler.pins.acknowledge(much, list(much.unacknowledged))
    scheduler.pump(0.05)
    assert much.waiting[3].cursor == 1 and little.waiting[2].cursor == 0
    node.directory.close()


def test_a_user_without_memory_searched_for_it_with_each_of_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And these searches cost it no turn of its share."""
    node = Node([[400_000] + [300_000] * 60], arena_size=MIB)
    loads: list[Load] = []
    scheduler = Scheduler(node.cache, lambda load, _: loads.append(load), most_reads=64)
    hostile, honest = (Requester(lambda *_: None, user=User(uid)) for uid in (1, 2))
    for owner, number in ((hostile, 0), (honest, 1)):
        scheduler.add(asked(owner, 1, [number], lease=owner is hostile), 0.0)
        ended(scheduler, loads[-1], 0.0)
    scheduler.add(asked(hostile, 2, [2]), 0.0)
    ended(scheduler, loads[-1], 0.0)
    searches: list[int] = []
    allocate = node.cache.allocator.allocate

    def search(*arguments: Any) -> Any:
        searches.append(1)
        return allocate(*arguments)

    monkeypatch.setattr(node.cache.allocator, "allocate", search)
    used = scheduler._order.share.used(hostile.user)
    for tag in range(3, 53):
        scheduler.add(asked(hostile, tag, [tag]), 0.0)
    assert scheduler.blocked_count == 50 and 0 < len(searches) <= 2
    assert scheduler._order.share.used(hostile.user) > used
    scheduler.pump(RETRY_S / 2)
    assert len(searches) <= 2
    scheduler.pump(RETRY_S)
    assert 2 <= len(searches) <= 4
    # Its pins are taken back after their grace, and it goes on.
    before = len(loads)
    scheduler.pump(PIN_GRACE_S)
    assert len(loads) > before
    node.directory.close()


def test_a_search_among_pinned_slots_asked_what_each_was_worth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And began anew for the first of the samples, though none had been in its way."""
    node = Node([[4000] * 600], arena_size=MIB)
    assert node.fetch(list(range(300)))[0].cursor == 256
    weighed: list[Int64s] = []
    searches: list[int] = []
    policy, victims = node.cache.policy, node.cache.policy.victims
    monkeypatch.setattr(policy, "weights", weighed.append)

    def search(*arguments: Any) -> Any:
        searches.append(1)
        return victims(*arguments)

    monkeypatch.setattr(policy, "victims", search)
    late = Fetch(np.arange(400, 464))
    assert node.cache.advance(late, 64, MIB) is None
    assert late.cursor == 0 and not weighed and len(searches) == 1
    node.directory.close()


def test_a_client_that_never_acknowledged_made_the_list_of_pins_grow_for_ever() -> None:
    node = Node([[4000] * 10])
    scheduler, loads, finished, silent = scheduled(node)
    scheduler.add(asked(silent, 1, [0]), 0.0)
    ended(scheduler, loads[0], 0.0)
    owner = Requester(into(finished), user=silent.user)
    for tag in range(1, 10_000):
        scheduler.add(asked(owner, tag, [0]), 0.0)
        scheduler.pins.acknowledge(owner, [tag])
    assert sum(len(turns.pins) for turns in scheduler._order.users.values()) < 5000
    assert finished[-1].count == 1
    assert PIN_GRACE_S > 0
    node.directory.close()


def test_pins_of_a_user_that_may_ask_for_no_more_are_taken_back_the_oldest_first() -> None:
    node = Node([[4000] * 10])
    scheduler, loads, _, owner = scheduled(node)
    owner.user.asked.most = 3
    scheduler.add(asked(owner, 1, [0]), 0.0)
    ended(scheduler, loads[0], 0.0)
    for tag in (2, 3):
        scheduler.add(asked(owner, tag, [0]), 0.0)
    assert owner.user.asked.full
    scheduler.pins.limit(owner.user)
    assert not owner.user.asked.full and list(owner.unacknowledged) == [2, 3]
    assert node.cache.pins.sum() == 2
    node.directory.close()


def test_a_client_that_never_acknowledged_made_its_pins_grow_for_ever() -> None:
    node = Node([[4000] * 10])
    scheduler, loads, finished, owner = scheduled(node)
    scheduler.add(asked(owner, 1, [0]), 0.0)
    ended(scheduler, loads[0], 0.0)
    for tag in range(2, 5 * MOST_UNACKNOWLEDGED):
        scheduler.add(asked(owner, tag, [0]), 0.0)
    assert len(finished) == tag and all(request.count == 1 for request in finished)
    assert list(owner.unacknowledged) == [*range(tag - MOST_UNACKNOWLEDGED + 1, tag + 1)]
    assert node.cache.pins.sum() == MOST_UNACKNOWLEDGED
    assert (
        sum(len(turns.pins) for turns in scheduler._order.users.values()) < 5 * MOST_UNACKNOWLEDGED
    )
    scheduler.pins.acknowledge(owner, [1, tag])
    assert node.cache.pins.sum() == MOST_UNACKNOWLEDGED - 1
    list(scheduler.leave(owner, 0.0))
    assert not node.cache.pins.any()
    node.directory.close()


def test_pins_of_a_repeated_sample_held_arrays_of_the_whole_request() -> None:
    node = Node([[4000] * 10], arena_size=16 * MIB)
    scheduler, loads, finished, owner = scheduled(node)
    scheduler.add(asked(owner, 1, [0]), 0.0)
    ended(scheduler, loads[0], 0.0)
    scheduler.add(asked(owner, 2, [0] * 10_000), 0.0)
    assert [request.count for request in finished] == [1, 10_000]
    held = [pins if pins.base is None else pins.base for pins in owner.unacknowledged[2].pins]
    assert sum(array.nbytes for array in held) == 8 * len(held) == 8 * 40
    list(scheduler.leave(owner, 0.0))
    node.directory.close()


def test_leases_of_samples_that_failed_were_kept_without_a_limit() -> None:
    """They pin nothing, so no limit on leased memory counts them."""
    node = Node([[3_000_000] * 2, [4000]])
    scheduler, loads, finished, owner = scheduled(node)
    for tag in range(1, 100):
        scheduler.add(asked(owner, tag, [0, 1], lease=True), 0.0)
    assert [request.count for request in finished] == [2] * 99
    assert all(set(request.failures) == {0, 1} for request in finished)
    assert not owner.leases
    scheduler.add(asked(owner, 100, [1, 2], lease=True), 0.0)
    ended(scheduler, loads[0], 0.0)
    assert list(owner.leases) == [100] and scheduler.pins.leased_size > 0
    scheduler.pins.release(owner, list(range(1, 101)))
    assert scheduler.pins.leased_size == 0 and not node.cache.pins.any()
    node.directory.close()


def test_shards_that_are_opened_together_get_the_classes_that_each_would() -> None:
    """One call for all of them: a class per size, none for a shard of many sizes."""
    runs = [[5000] * 7, [9000], [5000] * 300, [100, 70_000, 9000] * 9, [30_000] * 5]
    together, singly = Node(runs, 4 * MIB), Node(runs, 4 * MIB)
    together.cache.fit(together.bases)
    for base in singly.bases:
        singly.cache.fit([base])
    assert sorted(together.arena.class_sizes) == sorted(singly.arena.class_sizes)
    together.cache.fit([])
