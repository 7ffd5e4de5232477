"""The C core's functions over slots and blocks, compared with a few lines of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.engine.io import EngineBatch, merge_reads
from ffserve.engine.slots import FAILED, FREE, LOADING, RESIDENT, ROWS, Shards, Slots, mark
from ffserve.errors import UsageError

SAMPLES, SLOTS = 40, 12
ENTRY = np.dtype([("seq", "<u4"), ("length_low", "<u4"), ("place", "<u8")])
LARGE = 1 << 40

indices = st.lists(st.integers(0, SAMPLES - 1), max_size=30)


class Tables:
    """Slots 0 to 9 hold samples 0 to 9, each slot k * 100 + 50 bytes large; samples from 20 on
    belong to a second shard."""

    def __init__(self) -> None:
        self.slot_of = np.zeros(SAMPLES, np.int32)
        self.slot_of[:10] = np.arange(1, 11)
        self.states = np.full(SLOTS, FREE, np.uint8)
        self.states[:10] = RESIDENT
        self.pins = np.zeros(SLOTS, np.int32)
        self.firsts = np.zeros(SLOTS, np.int64)
        self.counts = np.zeros(SLOTS, np.int32)
        self.loads = np.zeros(SLOTS, np.int32)
        self.parked = np.zeros(SLOTS, np.bool_)
        self.offsets = np.arange(SLOTS) * 1000
        self.sizes = np.arange(SLOTS) * 100 + 50
        self.c = Slots(
            self.slot_of,
            self.states,
            self.pins,
            self.firsts,
            self.counts,
            self.loads,
            self.parked,
            self.offsets,
            self.sizes,
            self._shards(),
        )

    def _shards(self) -> Shards:
        self.used = np.array([2750, 0])
        shards, none = Shards(0, 0, 0, SAMPLES), np.zeros(2, np.int64)
        bases, counts, files = np.array([0, 20]), np.array([20, 20]), np.zeros(2, np.int32)
        shards.follow(bases, counts, np.array([512, 1]), none, files, files, self.used, none[:0])
        return shards


@given(indices, st.integers(0, 3000))
def test_split(chosen: list[int], most: int) -> None:
    tables = Tables()
    states, slot_of = tables.states.copy(), tables.slot_of.copy()
    looked, absent, slots, positions = tables.c.split(np.array(chosen, np.int64), most)
    expected, size = {}, 0
    for k, number in enumerate(chosen):
        if number < 10 and number not in expected:
            size += number * 100 + 50
            if size > most and k:
                break
            expected[number] = k
    else:
        k = len(chosen)
    assert looked == k
    assert absent.tolist() == [i for i, number in enumerate(chosen[:k]) if number >= 10]
    assert dict(zip(slots.tolist(), positions.tolist(), strict=True)) == expected
    assert (tables.states == states).all() and (tables.slot_of == slot_of).all()


@pytest.mark.parametrize("chosen", [[3, SAMPLES], [-1]])
def test_nothing_is_done_for_what_is_outside(chosen: list[int]) -> None:
    tables, numbers = Tables(), np.array(chosen, np.int64)
    blocks = np.ones((ROWS, 1), np.int64)
    for call in (
        lambda: tables.c.split(numbers, LARGE),
        lambda: tables.c.resident(numbers),
        lambda: tables.c.taken(numbers),
        lambda: tables.c.pin(numbers),
        lambda: tables.c.unpin(numbers),
        lambda: tables.c.usable(numbers),
        lambda: tables.c.vacate(numbers),
        lambda: tables.c.cut(np.vstack([numbers] * ROWS), numbers.copy(), LARGE),
        lambda: tables.c.enter(blocks, numbers[-1:], 1),
        lambda: tables.c.enter(np.vstack([numbers[-1:]] * ROWS), np.array([11]), 1),
        lambda: mark(np.zeros(SAMPLES, np.bool_), numbers, 0),
    ):
        with pytest.raises(AssertionError):
            call()
    assert not tables.pins.any()
    assert tables.slot_of.tolist() == [*range(1, 11), *[0] * 30]
    assert tables.states.tolist() == [RESIDENT] * 10 + [FREE] * 2


@given(
    st.lists(st.tuples(st.integers(10, 30), st.integers(1, 500)), max_size=30), st.integers(0, 3000)
)
def test_cut_leaves_each_block_once(wanted: list[tuple[int, int]], most: int) -> None:
    tables = Tables()
    sizes = dict(wanted)
    blocks = np.zeros((ROWS, len(wanted)), np.int64)
    blocks[0] = [first for first, _ in wanted]
    blocks[4] = [sizes[first] for first, _ in wanted]
    where = np.arange(len(wanted)) * 2
    left, places, cut, smallest, largest = tables.c.cut(blocks, where, most)
    expected, size, end = {}, 0, -1
    for k, (first, _) in enumerate(wanted):
        if first not in expected:
            if size + sizes[first] > most and k:
                end = 2 * k
                break
            size += sizes[first]
            expected[first] = 2 * k
    assert dict(zip(left[0].tolist(), places.tolist(), strict=True)) == expected
    assert left[4].tolist() == [sizes[first] for first in expected]
    assert cut == end and not tables.slot_of[10:].any()
    if expected:
        assert (smallest, largest) == (left[4].min(), left[4].max())


def test_pins_and_what_is_read() -> None:
    tables = Tables()
    blocks = np.zeros((ROWS, 2), np.int64)
    blocks[0], blocks[1], blocks[4], blocks[5] = [12, 20], [1, 3], [400, 90], [0, 1]
    blocks[2], blocks[3] = [1030, 2006], [1430, 2090]
    held, size, offsets, sizes = tables.c.enter(blocks, np.array([11, 10]), 7)
    assert tables.used.tolist() == [2750 + 1150, 1050]
    assert (held, size) == (2200, 512 + 84), "as the disk is read"
    assert (offsets.tolist(), sizes.tolist()) == ([11000, 10000], [1150, 1050])
    assert tables.slot_of[[12, 19, 20, 21, 22, 23]].tolist() == [12, 0, 11, 11, 11, 0]
    assert tables.firsts[10:].tolist() == [20, 12] and tables.counts[10:].tolist() == [3, 1]
    assert tables.loads[10:].tolist() == [7, 7]
    assert tables.states[10:].tolist() == [LOADING] * 2
    held, loading = tables.c.pin(np.array([3, 10]))
    assert (held, loading.tolist()) == (350 + 1050, [10])
    assert tables.c.resident(np.array([3, 21, 30, 3])).tolist() == [3, 3]
    assert tables.c.taken(np.array([3, 21, 30, 3])).tolist() == [3, 10, 3]
    assert tables.c.usable(np.array([3, 10, 5, 11])).tolist() == [False, False, True, False]
    tables.states[10] = FAILED
    tables.parked[3] = True
    assert tables.c.unpin(np.array([10])) == 0
    assert tables.c.unpin(np.array([3, 10])) == 2
    with pytest.raises(AssertionError):
        tables.c.unpin(np.array([3]))
    with pytest.raises(AssertionError, match="not even in part"):
        tables.c.enter(np.array([[19], [2], [0], [0], [0], [0]]), np.array([9]), 8)
    with pytest.raises(AssertionError, match="not even in part"):
        tables.c.cut(np.array([[20], [1], [0], [0], [1], [0]]), np.array([0]), 9)
    tables.slot_of[21] = 0  # it failed
    tables.slot_of[22] = 5  # and is read again by itself
    assert tables.c.vacate(np.array([10])).tolist() == [[20], [3], [10000], [1050]]
    assert tables.used.tolist() == [2750 + 1150, 0]
    assert tables.slot_of[[12, 20, 21, 22]].tolist() == [12, 0, 0, 5]
    assert tables.states[10:].tolist() == [FREE, LOADING]


def test_one_slot_is_not_given_to_two_blocks() -> None:
    tables = Tables()
    blocks = np.zeros((ROWS, 2), np.int64)
    blocks[0], blocks[1] = [12, 20], [1, 3]
    with pytest.raises(AssertionError):
        tables.c.enter(blocks, np.array([11, 11]), 7)
    tables.c.pin(np.array([10]))
    with pytest.raises(AssertionError):
        tables.c.enter(blocks[:, 1:].copy(), np.array([10]), 8)


@given(st.lists(st.integers(5, 24), max_size=30), st.lists(st.integers(0, 19), max_size=10))
def test_mark(numbers: list[int], before: list[int]) -> None:
    seen = np.zeros(20, np.bool_)
    seen[before] = True
    fresh, again = mark(seen, np.array(numbers, np.int64), 5)
    places = {number - 5 for number in numbers}
    assert (fresh, again) == (len(places - set(before)), len(places & set(before)))
    assert set(np.flatnonzero(seen).tolist()) == places | set(before)
    assert set(seen.view(np.uint8).tolist()) <= {0, 1}


class Files:
    """Two shards: samples 5 to 24, four to a block, and 30 to 34; sample k has k bytes."""

    def __init__(self, *singly: int) -> None:
        self.entries = np.zeros(SAMPLES, ENTRY)
        self.entries["length_low"] = np.arange(SAMPLES)
        self.offsets = (1000 + np.arange(SAMPLES) * 50).astype(np.uint64)
        self.checksums = np.arange(SAMPLES, dtype=np.uint32) + 7
        self.used = np.zeros(2, np.int64)
        self.c = Shards(
            self.entries.ctypes.data, self.offsets.ctypes.data, self.checksums.ctypes.data, SAMPLES
        )
        self.c.follow(
            np.array([5, 30]),
            np.array([20, 5]),
            np.array([512, 1]),
            np.array([2, 0]),
            np.array([3, 4], np.int32),
            np.array([1, 2], np.int32),
            self.used,
            np.array(singly, np.int64),
        )


def test_blocks() -> None:
    files = Files(13)
    table = files.c.blocks(np.array([5, 8, 24, 14, 30, 34]), 1 << 20)
    assert table[0].tolist() == [5, 5, 21, 14, 30, 34]
    assert table[1].tolist() == [4, 4, 4, 1, 1, 1]
    assert table[2].tolist() == [1250, 1250, 2050, 1700, 2500, 2700]
    assert table[3].tolist() == [1408, 1408, 2224, 1714, 2530, 2734]
    assert table[4].tolist() == [158, 158, 174, 14, 30, 34], "what fills a block badly is packed"
    assert table[5].tolist() == [0, 0, 0, 0, 1, 1]
    assert files.c.blocks(np.array([24]), 100)[:2].tolist() == [[24], [1]]
    for outside in (4, 25, 35, SAMPLES, -1):
        with pytest.raises(AssertionError):
            files.c.blocks(np.array([outside]), 1 << 20)


def test_the_contents_of_several_slots() -> None:
    tables = Tables()
    tables.firsts[:10], tables.counts[:10] = np.arange(10), 1
    assert tables.c.vacate(np.array([3, 0])).tolist() == [[3, 0], [1, 1], [3000, 0], [350, 50]]
    assert tables.used.tolist() == [2350, 0] and (tables.states[[0, 3]] == FREE).all()
    assert tables.slot_of[:5].tolist() == [0, 2, 3, 0, 5]


def test_a_block_of_no_shard_is_refused() -> None:
    tables = Tables()
    for shard in (2, -1):
        blocks = np.array([[12], [1], [0], [0], [0], [shard]])
        with pytest.raises(AssertionError):
            tables.c.enter(blocks, np.array([11]), 7)
    assert tables.used.tolist() == [2750, 0] and not tables.slot_of[12]


def test_a_batch_of_blocks() -> None:
    files = Files()
    table = files.c.blocks(np.array([5, 30, 31]), 1 << 20)
    arena, places, rooms = 1 << 20, np.array([4096, 0, 512]), np.array([1024, 512, 512])
    batch = EngineBatch.of_blocks(files.c, table, places, rooms, arena, (100, 4096, 1 << 20))
    nowhere = 2**64 - 1
    assert batch.reads["offset"].tolist() == [1250, 2500]
    assert batch.reads["length"].tolist() == [158, 81]
    assert batch.reads["slot"].tolist() == [4096, nowhere]
    assert batch.reads["file"].tolist() == [3, 4]
    assert batch.reads["checksum_kind"].tolist() == [1, 2]
    assert batch.reads["first_record"].tolist() == [0, 4]
    assert batch.reads["record_count"].tolist() == [4, 2]
    assert batch.records["entry"].tolist() == [5, 6, 7, 8, 30, 31]
    assert batch.records["dest"].tolist() == [0, 0, 0, 0, arena, arena + 512]
    assert batch.records["checksum"].tolist() == [12, 13, 14, 15, 37, 38]
    batch.free()
    assert not len(batch.reads) and not len(batch.records)


def test_small_samples_kept_the_ends_of_the_disk_blocks_they_were_read_with() -> None:
    """Their slots hold just the samples, and what was read with them is not copied."""
    files = Files()
    table = files.c.blocks(np.array([5]), 1 << 20)
    exact = int(table[4][0])
    assert exact == 158
    arena, nowhere = 1 << 20, 2**64 - 1
    for place, room, cached, direct in (
        (4096, 192, False, False),
        (4096, 192, True, True),
        (4096, 512, False, True),
        (4096 + 64, 512, False, False),
    ):
        batch = EngineBatch.of_blocks(
            files.c, table, np.array([place]), np.array([room]), arena, (0, 0, 1), cached=cached
        )
        assert batch.reads["slot"].tolist() == [place if direct else nowhere]
        dests = [0] * 4 if direct else [arena + place + o for o in (0, 50, 100, 150)]
        assert batch.records["dest"].tolist() == dests


def test_large_samples_are_read_to_their_slots() -> None:
    """Copying would cost more than the ends of the disk blocks."""
    shards = Files()
    shards.entries["length_low"][5:9] = 16_384
    shards.offsets[5:9] = 1000 + 16_384 * np.arange(4, dtype=np.uint64)
    assert shards.c.blocks(np.array([5]), 1 << 20)[4].tolist() == [4 * 16_384 + 512]


def test_a_record_outside_of_its_block_is_refused() -> None:
    """An index that is out of order would have records written over other slots."""
    files = Files()
    places = np.array([0]), np.array([4096])
    files.offsets[6] = 10
    table = files.c.blocks(np.array([5]), 1 << 20)
    with pytest.raises(UsageError, match="outside its block"):
        EngineBatch.of_blocks(files.c, table, *places, 0, (0, 0, 1))
    for row, value in ((0, -1), (0, SAMPLES), (1, 0), (1, SAMPLES), (5, 2), (5, -1)):
        table = files.c.blocks(np.array([9]), 1 << 20)
        table[row] = value
        with pytest.raises(UsageError):
            EngineBatch.of_blocks(files.c, table, *places, 0, (0, 0, 1))


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 60), st.booleans()), max_size=40),
    st.integers(1, 60),
)
def test_merge(parts: list[tuple[int, int, bool]], most: int) -> None:
    begins, ends, files = np.zeros((3, len(parts)), np.int64)
    at = 100
    for k, (gap, size, other) in enumerate(parts):
        begins[k], ends[k] = at + gap, at + gap + size
        files[k] = files[k - 1] + other
        at = int(ends[k])
    firsts, start = [], 0
    for k in range(len(parts)):
        joined = k and 0 <= begins[k] - ends[k - 1] <= 5 and files[k] == files[k - 1]
        joined = joined and max(ends[k] - begins[k], ends[k - 1] - begins[k - 1]) <= most
        start = start if joined else begins[k]
        if not joined or (begins[k] - start) // 70 != (begins[k - 1] - start) // 70:
            firsts.append(k)
    assert merge_reads(begins, ends, files, most, 5, 70).tolist() == firsts
