"""The order of an epoch: a bijection, a pure function, the same on every machine."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.errors import UsageError
from ffserve.order import epoch_order, rank_sample_count


@given(n=st.integers(0, 300), seed=st.integers(0, 2**128 - 1), epoch=st.integers(0, 2**64 - 1))
def test_an_order_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    order = epoch_order(n, seed=seed, epoch=epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


@given(
    n=st.integers(0, 200),
    world_size=st.integers(1, 12),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_ranks_share_an_epoch_evenly(n: int, world_size: int, epoch: int, shuffle: bool) -> None:
    whole = epoch_order(n, seed=7, epoch=epoch, shuffle=shuffle)
    ranks = [
        epoch_order(n, seed=7, epoch=epoch, shuffle=shuffle, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert {len(order) for order in ranks} == {rank_sample_count(n, world_size)}
    # Interleaved again, the slices are the whole order, continued from its beginning.
    together = np.stack(ranks, axis=1).ravel()
    assert together[:n].tolist() == whole.tolist()
    extra = len(together) - n
    assert 0 <= extra < world_size
    assert together[n:].tolist() == [whole[i % n] for i in range(extra)]


def test_slices_are_disjoint_when_the_ranks_divide_the_samples() -> None:
    slices = [
        set(epoch_order(60, seed=1, epoch=2, rank=r, world_size=4).tolist()) for r in range(4)
    ]
    assert set().union(*slices) == set(range(60))
    assert sum(map(len, slices)) == 60


def test_the_order_is_known_for_good() -> None:
    # Written down once. If this fails, resumed jobs repeat some samples and miss others.
    assert epoch_order(10, seed=0, epoch=0).tolist() == [6, 3, 8, 1, 4, 5, 9, 2, 7, 0]
    order = epoch_order(100_000, seed=2**70 + 1, epoch=3)
    assert order[:5].tolist() == [41164, 55512, 7798, 40941, 7023]
    assert int(order[-1]) == 73346


def test_seeds_and_epochs_do_not_run_into_one_another() -> None:
    pairs = [(0, 1), (1, 0), (0, 1 << 32), (1 << 32, 0), (1, 1), (0, 0), (1 << 64, 0)]
    orders = {tuple(epoch_order(50, seed=s, epoch=e).tolist()) for s, e in pairs}
    assert len(orders) == len(pairs)


def test_every_place_is_as_likely() -> None:
    counts = np.zeros((8, 8), np.int64)
    for epoch in range(4000):
        counts[np.arange(8), epoch_order(8, seed=11, epoch=epoch)] += 1
    expected = 4000 / 8
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 100  # 49 degrees of freedom: mean 49, the seed is fixed


def test_unshuffled_is_the_order_of_the_dataset() -> None:
    assert epoch_order(5, seed=3, epoch=9, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    assert epoch_order(5, seed=3, epoch=9, shuffle=False, rank=1, world_size=2).tolist() == [
        1,
        3,
        0,
    ]


def test_ten_million_samples_take_about_a_second() -> None:
    took_s = []
    for epoch in range(2):
        start = time.perf_counter()
        order = epoch_order(10_000_000, seed=1, epoch=epoch)
        took_s.append(time.perf_counter() - start)
    assert np.bincount(order, minlength=10_000_000).max() == 1
    assert min(took_s) < 3  # 0.7 s alone on 2 cores; the margin is for a busy machine


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": -1},
        {"n": 2.5},
        {"seed": -1},
        {"seed": 1 << 128},
        {"epoch": -1},
        {"rank": 2, "world_size": 2},
        {"rank": -1},
        {"world_size": 0},
    ],
)
def test_arguments_outside_their_range_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        epoch_order(**{"n": 4, "seed": 0, "epoch": 0, **arguments})  # type: ignore[arg-type]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
