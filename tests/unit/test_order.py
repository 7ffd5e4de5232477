"""The order of an epoch: a bijection, a pure function, the same on every machine."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.errors import UsageError
from ffserve.order import epoch_order, rank_sample_count, shared_seed


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
    assert epoch_order(10, seed=0, epoch=0, window=4).tolist() == [0, 3, 6, 4, 5, 7, 2, 9, 1, 8]
    order = epoch_order(1000, seed=2, epoch=1, window=200)
    assert order[:5].tolist() == [59, 823, 821, 271, 822]


def test_seeds_and_epochs_do_not_run_into_one_another() -> None:
    pairs = [(0, 1), (1, 0), (0, 1 << 32), (1 << 32, 0), (1, 1), (0, 0), (1 << 64, 0)]
    orders = {tuple(epoch_order(50, seed=s, epoch=e).tolist()) for s, e in pairs}
    assert len(orders) == len(pairs)


@given(n=st.integers(0, 400), window=st.integers(1, 500), epoch=st.integers(0, 9))
def test_a_windowed_shuffle_is_a_bijection_too(n: int, window: int, epoch: int) -> None:
    order = epoch_order(n, seed=5, epoch=epoch, window=window)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


@given(n=st.integers(1, 5000), window=st.integers(64, 1000))
def test_a_window_holds_whole_blocks_of_neighbours(n: int, window: int) -> None:
    order = epoch_order(n, seed=1, epoch=0, window=window)
    size = window // 32
    where = np.empty(n, np.int64)
    where[order] = np.arange(n) // window
    for first in range(0, n, size):
        seen = set(where[first : first + size].tolist())
        assert len(seen) <= 2 and max(seen) - min(seen) <= 1
    per_window = [len({i // size for i in order[w : w + window]}) for w in range(0, n, window)]
    assert max(per_window) <= -(-window // size) + 2


def test_windows_come_from_random_places_and_are_mixed() -> None:
    order = epoch_order(100_000, seed=1, epoch=0, window=3200)
    jumps = np.abs(np.diff(order))
    assert np.median(jumps) > 10_000, "neighbours in time are strangers"
    assert not np.array_equal(order, epoch_order(100_000, seed=1, epoch=1, window=3200))
    means = order[:96_000].reshape(30, 3200).mean(axis=1)
    assert means.std() < 12_000, "each window has something of everywhere"


def test_a_name_is_a_seed() -> None:
    assert shared_seed("sweep") == 48187385431978730841612102031293957537
    assert shared_seed("sweep") != shared_seed("sweep2")


@given(
    n=st.integers(0, 120),
    window=st.none() | st.integers(1, 130),
    splits=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60)), max_size=4),
    last=st.integers(1, 9),
)
def test_an_epoch_split_anew_uses_every_sample_once(
    n: int, window: int | None, splits: list[tuple[int, int]], last: int
) -> None:
    whole = epoch_order(n, seed=7, epoch=1, window=window)
    start, used = 0, np.zeros(n, np.int64)
    for world_size, count in [*splits, (last, n)]:
        ranks = [
            epoch_order(
                n, seed=7, epoch=1, window=window, rank=r, world_size=world_size, start=start
            )
            for r in range(world_size)
        ]
        assert {len(order) for order in ranks} == {rank_sample_count(n - start, world_size)}
        count = min(count, len(ranks[0]))
        for order in ranks:
            np.add.at(used, order[:count], 1)
        start = min(n, start + count * world_size)
        assert used[whole[:start]].min(initial=1) == 1, "the first ones are used"
        assert start == n or used[whole[start:]].max() == 0, "and no others"
    assert used.min(initial=1) == 1
    assert used.sum() - n < max(world_size for world_size, _ in [*splits, (last, 0)])
    if n >= 9:
        assert used.max() <= 2


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


@pytest.mark.check
def test_ten_million_samples_take_about_a_second() -> None:
    took_s = []
    for epoch in range(2):
        start = time.perf_counter()
        order = epoch_order(10_000_000, seed=1, epoch=epoch)
        took_s.append(time.perf_counter() - start)
    assert np.bincount(order, minlength=10_000_000).max() == 1
    assert min(took_s) < 10  # 0.7 s alone on 2 cores; the margin is for a slow and busy machine


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
        {"window": 0},
        {"window": 2.0},
        {"start": 5},
        {"start": -1},
    ],
)
def test_arguments_outside_their_range_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        epoch_order(**{"n": 4, "seed": 0, "epoch": 0, **arguments})  # type: ignore[arg-type]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
