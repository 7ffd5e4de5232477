"""The order of a mixture: exact shares, no sample lost or doubled, a pure function."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.errors import UsageError
from ffserve.mixture import MixtureOrder

sizes_and_weights = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from([0, 0.1, 0.25, 1, 1.5, 7])),
    min_size=1,
    max_size=5,
).filter(lambda pairs: any(weight for _, weight in pairs))


def datasets_of(sizes: list[int], order: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(sizes), order, side="right")


def steps_of(mixture: MixtureOrder, order: np.ndarray) -> list[list[int]]:
    """Return how many samples of each data set are in each whole step."""
    which = datasets_of(mixture.sizes, order)
    whole = len(order) // mixture.batch_size * mixture.batch_size
    rows = which[:whole].reshape(-1, mixture.batch_size)
    return [np.bincount(row, minlength=len(mixture.sizes)).tolist() for row in rows]


def check_without_replacement(mixture: MixtureOrder, order: np.ndarray, counts: list[int]) -> None:
    """In an epoch no sample of a data set comes again before all of it have come."""
    which = datasets_of(mixture.sizes, order)
    start = 0
    for d, size in enumerate(mixture.sizes):
        samples = order[which == d] - start
        assert len(samples) == counts[d]
        for first in range(0, len(samples), max(size, 1)):
            part = samples[first : first + size]
            assert len(np.unique(part)) == len(part)
        start += size


@given(
    pairs=sizes_and_weights,
    epoch_size=st.integers(0, 400),
    batch_size=st.integers(1, 90),
    epoch=st.integers(0, 2**64 - 1),
)
def test_shares_are_exact_to_one_sample(
    pairs: list[tuple[int, float]], epoch_size: int, batch_size: int, epoch: int
) -> None:
    sizes, weights = [size for size, _ in pairs], [weight for _, weight in pairs]
    exact = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    arguments: dict[str, Any] = {"weights": weights, "epoch_size": epoch_size}
    if any(0 < share * epoch_size < 1 for share in exact):
        with pytest.raises(UsageError, match="would get no sample"):
            MixtureOrder(sizes, batch_size=batch_size, **arguments)
        return
    mixture = MixtureOrder(sizes, batch_size=batch_size, **arguments)
    counts = mixture.counts(epoch)
    order = mixture.order(seed=3, epoch=epoch)
    assert order.dtype == np.int64 and len(order) == sum(counts) == epoch_size
    check_without_replacement(mixture, order, counts)
    steps = steps_of(mixture, order)
    for d, share in enumerate(exact):
        assert abs(counts[d] - share * epoch_size) < 1
        of_steps = [step[d] for step in steps]
        assert not steps or max(of_steps) - min(of_steps) <= 1
        for number in of_steps:
            # One sample, and what the shorter last step was rounded.
            assert abs(number - share * batch_size) < 1 + Fraction(1, len(steps))


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5), data=st.data())
def test_repeats_and_sample_counts_are_kept(sizes: list[int], data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        most = [400 * (size > 0) for size in sizes]
        samples = [data.draw(st.integers(0, end)) for end in most]
        mixture = MixtureOrder(sizes, samples=samples, batch_size=data.draw(st.integers(1, 70)))
    else:
        repeats = [data.draw(st.sampled_from([0, 0.5, 1, 2, 3.25])) for _ in sizes]
        mixture = MixtureOrder(sizes, repeats=repeats)
        samples = [
            math.floor(size * Fraction(each) + Fraction(1, 2))
            for size, each in zip(sizes, repeats, strict=True)
        ]
    for epoch in range(2):
        assert mixture.counts(epoch) == samples
        order = mixture.order(seed=5, epoch=epoch)
        check_without_replacement(mixture, order, samples)


def test_without_shares_an_epoch_is_every_sample_once() -> None:
    order = MixtureOrder([5, 0, 8]).order(seed=0, epoch=2)
    assert sorted(order.tolist()) == list(range(13))


def test_the_order_is_known_for_good() -> None:
    # Written down once. If this fails, resumed jobs repeat some samples and miss others.
    mixture = MixtureOrder([6, 20, 3], weights=[2, 1, 1], epoch_size=12, batch_size=5)
    assert mixture.order(seed=1, epoch=0).tolist() == [3, 16, 18, 26, 4, 5, 27, 20, 0, 1, 28, 2]
    large = MixtureOrder([5000, 300], weights=[3, 1], epoch_size=4000).order(seed=9, epoch=4)
    assert [*large[:5].tolist(), int(large[-1])] == [473, 3755, 5285, 5029, 2719, 2974]
    windows = MixtureOrder([5000, 300], repeats=[0.5, 2]).order(seed=9, epoch=4, window=128)
    assert [*windows[:5].tolist(), int(windows[-1])] == [4554, 2982, 5129, 5115, 4863, 4944]


def test_epochs_of_a_part_have_nothing_in_common_until_all_was_used() -> None:
    mixture = MixtureOrder([100, 10], samples=[30, 10])
    for first in (0, 3, 300):
        epochs = [mixture.order(seed=4, epoch=first + k) for k in range(3)]
        used = np.concatenate([order[order < 100] for order in epochs])
        assert len(np.unique(used)) == 90
    assert len({tuple(mixture.order(seed=4, epoch=e).tolist()) for e in range(9)}) == 9
    assert mixture.order(seed=5, epoch=0).tolist() != mixture.order(seed=4, epoch=0).tolist()


def test_a_part_of_a_permutation_is_what_the_whole_one_has_there() -> None:
    from ffserve.order import permutation

    for n in (1, 2, 7, 1000):
        whole = permutation(n, 3, (1, 2)).tolist()
        for first, end in ((0, n), (0, n // 2), (n // 3, n // 2), (n // 2, n), (n, n), (0, 0)):
            assert permutation(n, 3, (1, 2), part=(first, end)).tolist() == whole[first:end]


@given(
    weights=st.lists(st.sampled_from([0, 1, 2, 30]), min_size=3, max_size=3).filter(any),
    floor=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    batch_size=st.integers(18, 60),
    epoch=st.integers(0, 3),
)
def test_each_step_has_its_floor(
    weights: list[int], floor: list[int], batch_size: int, epoch: int
) -> None:
    schedule = {0: weights, 5: [1, 1, 1], 11: weights}
    mixture = MixtureOrder(
        [50, 90, 20],
        weights=schedule,
        epoch_size=1000,
        schedule="step",
        batch_size=batch_size,
        floor=floor,
    )
    order = mixture.order(seed=0, epoch=epoch)
    for step in steps_of(mixture, order):
        assert all(number >= least for number, least in zip(step, floor, strict=True))
    check_without_replacement(mixture, order, mixture.counts(epoch))


def test_weights_above_their_floors_keep_their_proportions() -> None:
    mixture = MixtureOrder(
        [9, 9, 9, 9], weights=[97, 48.5, 0.5, 0], epoch_size=1600, batch_size=16, floor=[0, 0, 1, 3]
    )
    assert mixture.counts() == [800, 400, 100, 300]


@pytest.mark.check
@given(
    starts=st.sets(st.integers(1, 60), max_size=5),
    rows=st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=6, max_size=6),
    epoch_size=st.integers(30, 200),
    batch_size=st.integers(1, 20),
)
def test_a_schedule_by_step_is_exact_from_its_steps_on(
    starts: set[int], rows: list[list[int]], epoch_size: int, batch_size: int
) -> None:
    edges = [0, *sorted(starts)]
    mixture = MixtureOrder(
        [40, 50, 60],
        weights=dict(zip(edges, rows, strict=False)),
        schedule="step",
        epoch_size=epoch_size,
        batch_size=batch_size,
    )
    step_count = -(-epoch_size // batch_size)
    for epoch in range(3):
        order = mixture.order(seed=2, epoch=epoch)
        which = datasets_of(mixture.sizes, order)
        assert len(order) == epoch_size
        inside = [min(max(e - epoch * step_count, 0), step_count) for e in [*edges, 10**9]]
        wanted = [Fraction(0)] * 3
        for row, (first, end) in zip(rows, pairwise(inside), strict=False):
            stop = min(end * batch_size, epoch_size)
            size = stop - min(first * batch_size, epoch_size)
            wanted = [w + Fraction(x, sum(row)) * size for w, x in zip(wanted, row, strict=True)]
            counts = np.bincount(which[:stop], minlength=3).tolist()
            assert all(abs(c - w) < 1 for c, w in zip(counts, wanted, strict=True))


def test_a_schedule_by_epoch_changes_the_shares_of_epochs() -> None:
    weights = {0: [1, 0], 2: [1, 1], 5: [0, 1]}
    mixture = MixtureOrder([10, 30], weights=weights, epoch_size=20)
    assert [mixture.counts(epoch) for epoch in (0, 1, 2, 4, 5, 99)] == [
        [20, 0],
        [20, 0],
        [10, 10],
        [10, 10],
        [0, 20],
        [0, 20],
    ]
    assert (mixture.order(seed=0, epoch=0) < 10).all()
    assert (mixture.order(seed=0, epoch=5) >= 10).all()


def test_every_part_of_an_epoch_comes_close_to_the_shares() -> None:
    weights = [0.55, 0.3, 0.1, 0.05]
    mixture = MixtureOrder([1000] * 4, weights=weights, epoch_size=64_003, batch_size=8)
    steps = np.cumsum(steps_of(mixture, mixture.order(seed=1, epoch=0)), axis=0)
    ideal = 8 * np.outer(np.arange(1, len(steps) + 1), weights)
    assert np.abs(steps - ideal).max() < 8


def test_no_rank_gets_more_than_its_part_of_a_data_set() -> None:
    mixture = MixtureOrder([3000, 3000], batch_size=256)
    order = mixture.order(seed=1, epoch=0)
    for world_size in (2, 4, 8):
        for rank in range(world_size):
            share = float(np.mean(order[rank::world_size] < 3000))
            assert 0.42 < share < 0.58


def test_each_data_set_has_windows_of_its_own() -> None:
    mixture = MixtureOrder([6400, 3200])
    order = mixture.order(seed=1, epoch=0, window=640)
    second = order[order >= 6400] - 6400
    for first in range(0, 3200, 640):
        # 32 blocks of 20 neighbours each.
        assert len(np.unique(second[first : first + 640] // 20)) == 32
    assert sorted(order.tolist()) == list(range(9600))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"weights": [1, 1, 1]}, "weights has 3 entries for 2 data sets"),
        ({"weights": [1, 1], "samples": [1, 1]}, "weights and samples are given"),
        ({"weights": [0, 0]}, "all weights are 0"),
        ({"weights": [1, -1]}, "weights has the entry -1"),
        ({"weights": [1, float("nan")]}, "weights has the entry nan"),
        ({"weights": [1, float("inf")]}, "weights has the entry inf"),
        ({"weights": ["a", 1]}, "weights has the entry 'a'"),
        ({"weights": {1: [1, 1]}}, "does not begin at 0"),
        ({"weights": {}}, "does not begin at 0"),
        ({"weights": {0: [1, 1]}, "schedule": "day"}, "schedule is 'day'"),
        ({"weights": {0: [1, 1]}, "schedule": "step"}, "need batch_size"),
        ({"weights": [1, 1], "floor": [1, 1]}, "need batch_size"),
        ({"weights": [1, 1], "floor": [5, 4], "batch_size": 8}, "the floors need 9 samples"),
        ({"samples": [40, 1], "floor": [0, 1], "batch_size": 8}, "too few for a floor of 1"),
        ({"samples": [40, -1]}, "a number of samples is -1"),
        ({"repeats": [1, 1], "epoch_size": 5}, "epoch_size is given without weights"),
        ({"repeats": [1, 0.01]}, "data set 1 would get no sample: 0.01 of its 20"),
        ({"epoch_size": 5}, "epoch_size is given without weights"),
        ({"weights": [1, 1], "epoch_size": -1}, "epoch_size is -1"),
        ({"weights": [1000, 1], "epoch_size": 100}, "data set 1 would get no sample"),
        ({"weights": [1, 1], "batch_size": 0}, "batch_size is 0"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        MixtureOrder([10, 20], **arguments)


def test_an_empty_data_set_has_no_share() -> None:
    with pytest.raises(UsageError, match="data set 1 is empty"):
        MixtureOrder([10, 0], weights=[1, 1])
    with pytest.raises(UsageError, match="1 to 65536 data sets"):
        MixtureOrder([])
    assert MixtureOrder([0, 0]).order(seed=0, epoch=0).tolist() == []
    mixture = MixtureOrder([3])
    for arguments in ({"seed": -1, "epoch": 0}, {"seed": 0, "epoch": "0"}):
        with pytest.raises(UsageError):
            mixture.order(**arguments)
    with pytest.raises(UsageError, match="window is 0"):
        mixture.order(seed=0, epoch=0, window=0)
