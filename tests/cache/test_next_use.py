"""The C core's functions over residents and orders, compared with a few lines of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.engine.slots import MIXED, NO_KEY, Future, OrderParts, Residents, SilentJobs, by_key

SLOTS, PER_SLAB, LARGE = 32, 8, 9
SLOT = st.integers(0, SLOTS - 1)
FAR, STALE = 1 << 58, 1 << 60


class Tables:
    """Slots by turns in groups 1 and 2 and under keys NO_KEY, 5, 6 and STALE; slabs of classes 0,
    1 and LARGE."""

    def __init__(self) -> None:
        slots = np.arange(SLOTS)
        self.keys = np.array([NO_KEY, 5, 6, STALE])[slots % 4]
        self.groups = (1 + slots // 2 % 2).astype(np.int32)
        self.prefetched = slots % 3 == 0
        self.sizes = 100 + slots
        self.slabs = np.array([0, 1, 0, LARGE], np.int32)
        self.c = Residents(
            self.keys, self.groups, self.prefetched, self.sizes, self.slabs, PER_SLAB
        )

    def size_class(self, slot: int) -> int:
        return int(self.slabs[slot // PER_SLAB])

    def of(self, slots: list[int]) -> tuple[int, int]:
        """Return the group and the size class of all, or MIXED."""
        groups = {int(self.groups[slot]) for slot in slots}
        classes = {self.size_class(slot) for slot in slots}
        return (
            groups.pop() if len(groups) == 1 else MIXED,
            classes.pop() if len(classes) == 1 else MIXED,
        )


@given(
    st.lists(SLOT, max_size=40),
    st.sampled_from((5, 6, STALE)),
    st.sampled_from((1, 2)),
    st.sampled_from((0, 1, LARGE)),
    st.booleans(),
)
def test_entries_that_still_belong_in_a_bucket_are_taken_once(
    entries: list[int], key: int, group: int, size_class: int, stays: bool
) -> None:
    tables = Tables()
    keys = tables.keys.copy()
    right = [
        slot
        for slot in dict.fromkeys(entries)
        if keys[slot] == key
        and tables.groups[slot] == group
        and tables.size_class(slot) == size_class
    ]
    after = key if stays else NO_KEY
    taken = tables.c.take(np.array(entries, np.int32), key, group, size_class, after)
    assert taken.tolist() == right
    keys[right] = after
    assert (tables.keys == keys).all()


@given(st.lists(SLOT, max_size=40))
def test_slots_get_a_key(slots: list[int]) -> None:
    tables = Tables()
    keys = tables.keys.copy()
    assert tables.c.put(np.array(slots, np.int64), 77) == tables.of(slots)[0]
    assert tables.c.group(np.array(slots, np.int64)) == tables.of(slots)[0]
    keys[slots] = 77
    assert (tables.keys == keys).all()


@given(st.lists(SLOT, max_size=40))
def test_a_use_invalidates_estimated_times_only(slots: list[int]) -> None:
    tables = Tables()
    keys, prefetched = tables.keys.copy(), tables.prefetched.copy()
    timed = [slot for slot in slots if 0 <= keys[slot] < STALE]
    moved, group, size_class = tables.c.invalidate(np.array(slots, np.int64), STALE)
    assert moved.tolist() == timed
    assert (group, size_class) == tables.of(timed)
    keys[timed], prefetched[slots] = STALE, False
    assert (tables.keys == keys).all() and (tables.prefetched == prefetched).all()


@given(st.lists(SLOT, max_size=40, unique=True))
def test_slots_leave(slots: list[int]) -> None:
    tables = Tables()
    keys, prefetched = tables.keys.copy(), tables.prefetched.copy()
    group, size, unused = tables.c.leave(np.array(slots, np.int64))
    assert group == tables.of(slots)[0]
    assert size == sum(100 + slot for slot in slots)
    assert unused == sum(slot % 3 == 0 for slot in slots)
    keys[slots], prefetched[slots] = NO_KEY, False
    assert (tables.keys == keys).all() and (tables.prefetched == prefetched).all()


@pytest.mark.parametrize("outside", [-1, SLOTS, 1 << 40])
def test_slots_outside_the_tables_are_refused(outside: int) -> None:
    tables = Tables()
    keys, prefetched = tables.keys.copy(), tables.prefetched.copy()
    slots = np.array([1, outside])
    entries = np.array([1, min(outside, (1 << 31) - 1)], np.int32)
    for call in (
        lambda: tables.c.take(entries, 5, 1, 0),
        lambda: tables.c.take(entries[:1], NO_KEY, 1, 0),
        lambda: tables.c.group(slots),
        lambda: tables.c.put(slots, 5),
        lambda: tables.c.invalidate(slots, STALE),
        lambda: tables.c.leave(slots),
    ):
        with pytest.raises(AssertionError):
            call()
    assert (tables.keys == keys).all() and (tables.prefetched == prefetched).all()


def test_arrays_that_are_not_contiguous_are_refused() -> None:
    tables = Tables()
    with pytest.raises(ValueError, match="contiguous"):
        tables.c.put(np.arange(8)[::2], 5)
    assert (tables.keys == Tables().keys).all()


@given(st.lists(st.integers(-1, 40) | st.integers(10, 3000) | st.sampled_from((FAR, STALE))))
def test_slots_are_sorted_by_key_stably(keys: list[int]) -> None:
    slots, found = by_key(np.arange(len(keys)), np.array(keys, np.int64), FAR)
    expected = sorted(range(len(keys)), key=keys.__getitem__)
    assert slots.tolist() == expected
    assert found.tolist() == [keys[row] for row in expected]


# ---- when what is in them will be wanted -----------------------------------------------------


@given(
    st.lists(SLOT, max_size=30),
    st.lists(st.integers(0, 19), max_size=10),
    st.booleans(),
    st.booleans(),
)
def test_a_slot_is_wanted_when_the_soonest_of_its_samples_is(
    slots: list[int], before: list[int], announced: bool, silent: bool
) -> None:
    """Slot k holds samples 2k and on, k % 3 of them and one."""
    chance = np.random.default_rng(len(slots))
    seen = np.zeros(20, np.bool_)
    seen[before] = True
    buckets = chance.integers(0, 256, (2, 40)).astype(np.uint8)
    times = np.sort(chance.random((2, 256)) * 100)
    times[:, 0] = np.inf
    jobs = SilentJobs([(seen, 5, 0.25, 1.0), (None, 0, 0.0, 0.0), (seen, 30, 16.0, 32.0)])
    future = Future(
        [(OrderParts(buckets[0], 10), times[0]), (OrderParts(buckets[1], 0), times[1])] * announced,
        jobs if silent else None,
        50.0,
    )
    firsts, counts = np.arange(SLOTS) * 2, (np.arange(SLOTS) % 3 + 1).astype(np.int32)

    def wanted(k: int) -> float:
        of_silent = (0.0 if not 5 <= k < 25 else 0.25 if k - 5 in before else 1.0) + (
            0.0 if not 30 <= k < 50 else 16.0 if k - 30 in before else 32.0
        )
        return min(
            times[0][buckets[0][k - 10]] if announced and 10 <= k < 50 else np.inf,
            times[1][buckets[1][k]] if announced and k < 40 else np.inf,
            50.0 + 1 / of_silent if silent and of_silent else np.inf,
        )

    expected = [min(wanted(2 * k + i) for i in range(k % 3 + 1)) for k in slots]
    found = future.keys(firsts, counts, np.array(slots, np.int64), 0.5, 120)
    assert found.tolist() == [min(int(time / 0.5), 120) if time < 1e9 else 120 for time in expected]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30))
def test_the_parts_of_samples_and_the_last_in_the_highest(numbers: list[int]) -> None:
    parts = np.random.default_rng(1).integers(0, 5, 20).astype(np.uint8)
    buckets, lowest, highest, place = OrderParts(parts, 10).parts(np.array(numbers, np.int64))
    expected = [int(parts[k - 10]) if 10 <= k < 30 else 0 for k in numbers]
    assert buckets.tolist() == expected
    assert (lowest, highest) == (min(expected), max(expected))
    assert place == max(k for k, part in enumerate(expected) if part == highest)


def test_a_missing_time_or_slot_is_refused() -> None:
    table, times = OrderParts(np.array([3], np.uint8), 0), np.zeros(256)
    firsts, counts, slots = np.zeros(2, np.int64), np.ones(2, np.int32), np.array([0, 1])
    assert Future([(table, times)], None, 0.0).keys(firsts, counts, slots, 1.0, 9).tolist() == [
        0,
        0,
    ]
    with pytest.raises(AssertionError):
        Future([(table, times[1:])], None, 0.0).keys(firsts, counts, slots, 1.0, 9)
    for outside in (-1, 2):
        with pytest.raises(AssertionError):
            Future([], None, 0.0).keys(firsts, counts, np.array([0, outside]), 1.0, 9)
