"""Lists of integers in, lists of arrays out: in C, and in Python where that is missing."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.engine import arrays, io

WAYS = [arrays.separate, arrays._separate]


def test_the_module_in_c_was_built() -> None:
    """Here it must be; elsewhere `ffserve bench` says why it is not."""
    assert arrays.MISSING == ""
    assert "lists of arrays by C" in io.describe()


@pytest.mark.parametrize("separate", WAYS)
@given(sizes=st.lists(st.integers(0, 9000), max_size=70))
def test_each_array_has_its_own_memory(separate: Any, sizes: list[int]) -> None:
    offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64)
    made, places = separate(offsets)
    assert [one.nbytes for one in made] == sizes
    assert places.dtype == np.uint64
    assert places.tolist() == [one.__array_interface__["data"][0] for one in made]
    for k, one in enumerate(made):
        assert one.dtype == np.uint8 and one.ndim == 1 and one.flags.owndata and one.flags.writeable
        one[:] = k
    assert all((one == k).all() for k, one in enumerate(made))


@pytest.mark.check
@pytest.mark.parametrize("separate", WAYS)
def test_nothing_is_kept_of_lists_that_were_dropped_or_failed(separate: Any) -> None:
    good = np.arange(65) * 4096
    bad = [np.array([0, 4096, 5000, 10]), np.array([0, 1 << 20, 1 << 62])]
    tracemalloc.start()
    try:
        for k in range(2000):
            if k == 10:
                before = tracemalloc.get_traced_memory()[0]
            separate(good)
            for each in bad:
                with pytest.raises((ValueError, MemoryError)):
                    separate(each)
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 20
    finally:
        tracemalloc.stop()


def test_offsets_of_another_kind_are_refused() -> None:
    bad: Any
    for bad in (
        None,
        [0, 1],
        np.zeros(0, np.int64),
        np.zeros((2, 2), np.int64),
        np.zeros(2, np.int32),
        np.zeros(2, np.uint64),
        np.zeros(2),
        np.zeros(2, ">i8"),
        np.zeros(4, np.int64)[::2],
        np.zeros(17, np.uint8)[1:].view(np.int64),
    ):
        with pytest.raises(TypeError):
            arrays.separate(bad)


@given(
    values=st.lists(st.integers(-2, 12) | st.sampled_from([2**62, 2**63, 2**70, -(2**64)])),
    count=st.sampled_from([0, 1, 10, 2**63]),
    kind=st.sampled_from([list, tuple]),
)
def test_integers_in_range(values: list[int], count: int, kind: Any) -> None:
    found = arrays.integers(kind(values), count)
    inside = all(0 <= value < min(count, 2**63) for value in values)
    assert (found is not None) == inside
    if found is not None:
        assert found.dtype == np.int64 and found.tolist() == values


def test_what_may_be_indices_in_another_shape_is_left_to_others() -> None:
    class Number(int):
        pass

    class Numbers(list[int]):
        pass

    other: Any
    for other in (
        None, 1, "12", b"12", range(2), {1}, np.arange(2), iter([1]), Numbers([1]),
        [True], [1.0], [None], [np.int64(1)], [Number(1)], [1, "1"],
    ):  # fmt: skip
        assert arrays.integers(other, 10) is None
    with pytest.raises((TypeError, OverflowError)):
        arrays.integers([1], -1)
    with pytest.raises(TypeError):
        arrays.integers([1])  # type: ignore[call-arg]


def test_a_list_may_change_while_it_is_read() -> None:
    """Without the GIL, within a call; position k always holds 1000 + k, or nothing."""
    values = [1000 + k for k in range(200)]
    end = threading.Event()

    def change() -> None:
        while not end.is_set():
            del values[50:]
            values.extend([1000 + k for k in range(50, 200)])

    threads = [threading.Thread(target=change)]
    found: list[Any] = []

    def read() -> None:
        found.extend(arrays.integers(values, 2000) for _ in range(3000))

    threads += [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    end.set()
    threads[0].join()
    assert len(found) == 9000
    for each in found:  # None: it became shorter meanwhile
        assert each is None or (each == np.arange(1000, 1000 + len(each))).all()
    assert any(each is not None for each in found)


@pytest.mark.parametrize("separate", WAYS)
def test_lists_of_arrays_are_made_by_several_threads_at_a_time(separate: Any) -> None:
    def make(seed: int) -> None:
        sizes = np.random.default_rng(seed).integers(0, 100_000, 60)
        for _ in range(40):
            made, places = separate(np.concatenate(([0], np.cumsum(sizes))))
            for one in made:
                one[:] = seed
            right = [one.__array_interface__["data"][0] for one in made]
            done.append(places.tolist() == right and all((one == seed).all() for one in made))

    done: list[bool] = []
    threads = [threading.Thread(target=make, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 160
