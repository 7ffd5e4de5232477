"""Windows of an order: where a part of it ends that divides hardly any neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks import shuffle
from ffserve.order import epoch_order
from ffserve.reads.windows import KNOWN_SHARE, window_ends

N = 1 << 18
LOOK = 1 << 15


def ends_of(numbers: NDArray[np.int64], least: int, *, last: bool = False) -> list[int]:
    return list(window_ends(numbers, least, last=last))


@given(
    window=st.sampled_from([2048, 4096, 5000, 8192, 16384]),
    seed=st.integers(0, 1 << 40),
    start=st.integers(0, 20_000),
    ranks=st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=25, deadline=None)
def test_the_rest_of_a_window_is_found_wherever_it_is_looked_for(
    window: int, seed: int, start: int, ranks: int
) -> None:
    order = epoch_order(N, seed=seed, epoch=0, window=window, rank=ranks - 1, world_size=ranks)
    mine = window // ranks
    numbers = order[start : start + LOOK]
    ends = ends_of(numbers, mine // 4)
    assert ends
    if window % 1024 == 0:  # else blocks do not begin with a run, and an end may be missed
        # The first may be nearer than `least`.
        assert len(ends) >= int(len(numbers) * KNOWN_SHARE) // mine - 1
    for end in ends:
        left = (start + end) % mine
        assert min(left, mine - left) <= max(8, mine // 64), "a boundary of the windows"
    assert np.all(np.diff(ends) >= mine // 4)


@pytest.mark.check
@pytest.mark.parametrize("n", [40_000, 100_000, 1 << 20, 1 << 24])
def test_an_order_that_is_shuffled_as_a_whole_has_no_windows(n: int) -> None:
    for seed in range(5 if n <= 1 << 20 else 1):
        assert ends_of(epoch_order(n, seed=seed, epoch=0)[:LOOK], 1024) == []


def test_windows_that_are_larger_than_what_is_looked_at_are_not_found() -> None:
    order = epoch_order(N, seed=1, epoch=0, window=LOOK)
    assert ends_of(order[:LOOK], 1024) == []


def test_an_order_in_rising_order_ends_anywhere() -> None:
    assert ends_of(np.arange(LOOK), 1024) == list(range(1024, LOOK * 3 // 4, 1024))


def test_the_last_samples_of_an_order_are_a_window() -> None:
    order = epoch_order(N, seed=1, epoch=0, window=8192)
    assert ends_of(order[-3000:], 1024, last=True) == [3000]
    assert ends_of(order[-8192 - 3000 :], 1024, last=True) == [3000, 3000 + 8192]
    assert ends_of(order[-500:], 1024, last=True) == [500]
    assert ends_of(order[:0], 1024, last=True) == []
    assert ends_of(order[:0], 1024) == []
    assert ends_of(order[:1000], 1024) == []


def test_the_measures_of_a_shuffle_tell_orders_apart() -> None:
    n, batch = 1 << 17, 64
    uniform = shuffle.of_windows(n, n, batch)
    assert uniform["displacement"] == pytest.approx(1, abs=0.02)
    assert uniform["together"] == pytest.approx(100 * 63 / (n - 1), abs=0.02)
    assert uniform["design"] == pytest.approx(1, abs=0.15)
    windowed = shuffle.of_windows(n, 4096, batch)
    assert windowed["displacement"] == pytest.approx(1, abs=0.1)
    assert windowed["together"] == pytest.approx(100 * 63 / 4095, abs=0.2)
    assert windowed["design"] == pytest.approx(1 + 63 / 32, abs=1), "32 clusters per window"
    buffer = shuffle.of_buffer(n, 4096, batch)
    assert buffer["displacement"] < 0.1 and buffer["design"] > 50
    in_order = shuffle._measured(np.arange(n), batch)
    assert in_order["displacement"] == 0 and in_order["design"] == pytest.approx(64, rel=0.01)
