"""What the C core does a slot when victims are chosen, held against a few lines of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.engine.residents import MIXED, NO_KEY, Residents

SLOTS, PER_SLAB, LARGE = 32, 8, 9
SLOT = st.integers(0, SLOTS - 1)
UNSURE = 1 << 60


class Tables:
    """Slots by turns in groups 1 and 2 and under keys NO_KEY, 5, 6 and UNSURE; slabs of classes 0,
    1 and 0, the last a large slot."""

    def __init__(self) -> None:
        slots = np.arange(SLOTS)
        self.keys = np.array([NO_KEY, 5, 6, UNSURE])[slots % 4]
        self.groups = (1 + slots // 2 % 2).astype(np.int32)
        self.ahead = slots % 3 == 0
        self.sizes = 100 + slots
        self.slabs = np.array([0, 1, 0, -2], np.int32)
        self.c = Residents(
            self.keys, self.groups, self.ahead, self.sizes, self.slabs, PER_SLAB, LARGE
        )

    def size_class(self, slot: int) -> int:
        found = int(self.slabs[slot // PER_SLAB])
        return found if found >= 0 else LARGE

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
    st.sampled_from((5, 6, UNSURE)),
    st.sampled_from((1, 2)),
    st.sampled_from((0, 1, LARGE)),
    st.booleans(),
)
def test_what_still_belongs_on_a_stack_is_taken_once(
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
    keys[slots] = 77
    assert (tables.keys == keys).all()


@given(st.lists(SLOT, max_size=40))
def test_only_what_has_a_time_is_doubted(slots: list[int]) -> None:
    tables = Tables()
    keys, ahead = tables.keys.copy(), tables.ahead.copy()
    timed = [slot for slot in slots if 0 <= keys[slot] < UNSURE]
    moved, group, size_class = tables.c.doubt(np.array(slots, np.int64), UNSURE)
    assert moved.tolist() == timed
    assert (group, size_class) == tables.of(timed)
    keys[timed], ahead[slots] = UNSURE, False
    assert (tables.keys == keys).all() and (tables.ahead == ahead).all()


@given(st.lists(SLOT, max_size=40, unique=True))
def test_slots_leave(slots: list[int]) -> None:
    tables = Tables()
    keys, ahead = tables.keys.copy(), tables.ahead.copy()
    group, size, unused = tables.c.leave(np.array(slots, np.int64))
    assert group == tables.of(slots)[0]
    assert size == sum(100 + slot for slot in slots)
    assert unused == sum(slot % 3 == 0 for slot in slots)
    keys[slots], ahead[slots] = NO_KEY, False
    assert (tables.keys == keys).all() and (tables.ahead == ahead).all()


@pytest.mark.parametrize("outside", [-1, SLOTS, 1 << 40])
def test_nothing_is_done_for_slots_that_there_are_not(outside: int) -> None:
    tables = Tables()
    keys, ahead = tables.keys.copy(), tables.ahead.copy()
    slots = np.array([1, outside])
    entries = np.array([1, min(outside, (1 << 31) - 1)], np.int32)
    for call in (
        lambda: tables.c.take(entries, 5, 1, 0),
        lambda: tables.c.take(entries[:1], NO_KEY, 1, 0),
        lambda: tables.c.put(slots, 5),
        lambda: tables.c.doubt(slots, UNSURE),
        lambda: tables.c.leave(slots),
    ):
        with pytest.raises(AssertionError):
            call()
    assert (tables.keys == keys).all() and (tables.ahead == ahead).all()


def test_arrays_that_do_not_lie_in_one_piece_are_refused() -> None:
    tables = Tables()
    with pytest.raises(ValueError, match="contiguous"):
        tables.c.put(np.arange(8)[::2], 5)
    assert (tables.keys == Tables().keys).all()
