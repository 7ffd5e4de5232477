"""Packing: every token once, best fit, a pure function; waste beside other ways of packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.errors import UsageError
from ffserve.order import epoch_order, permutation
from ffserve.packing import plan


def fills_of(sizes: list[int], length: int, window: int, seed: int) -> list[int]:
    """Best fit decreasing, one piece at a time: the tokens of each sequence."""
    short = [size % length for size in sizes if size % length]
    short = [short[i] for i in permutation(len(short), seed, (0, 2))]
    fills = [length for size in sizes for _ in range(size // length)]
    for first in range(0, len(short), window):
        rooms: list[int] = []
        for size in sorted(short[first : first + window], reverse=True):
            fitting = [(room, k) for k, room in enumerate(rooms) if room >= size]
            if fitting:
                rooms[min(fitting)[1]] -= size
            else:
                rooms.append(length - size)
        fills += [length - room for room in rooms]
    return sorted(fills)


@given(
    sizes=st.lists(st.integers(0, 70), max_size=80),
    length=st.integers(1, 40),
    window=st.integers(1, 90),
    seed=st.integers(0, 5),
)
def test_every_token_is_in_one_sequence(
    sizes: list[int], length: int, window: int, seed: int
) -> None:
    packed = plan(sizes, length, seed, window=window)
    tokens = []
    for first, end in zip(packed.offsets[:-1].tolist(), packed.offsets[1:].tolist(), strict=True):
        assert first < end and packed.sizes[first:end].sum() <= length
        for k in range(first, end):
            start, size = int(packed.starts[k]), int(packed.sizes[k])
            tokens += [(int(packed.samples[k]), token) for token in range(start, start + size)]
    assert sorted(tokens) == [(i, token) for i, size in enumerate(sizes) for token in range(size)]
    # Documents are cut at multiples of the length only.
    pieces = np.bincount(packed.samples, minlength=len(sizes)).tolist()
    assert pieces == [-(-size // length) for size in sizes]
    fills = np.add.reduceat(packed.sizes, packed.offsets[:-1]) if len(packed) else np.zeros(0)
    assert sorted(fills.tolist()) == fills_of(sizes, length, window, seed)


def test_the_plan_is_known_for_good() -> None:
    # Written down once. If this fails, a resumed job reads other sequences.
    packed = plan([5, 3, 12, 4, 0, 7, 2], 8, seed=1)
    assert packed.offsets.tolist() == [0, 1, 3, 5, 6, 7]
    assert packed.samples.tolist() == [6, 2, 3, 0, 1, 2, 5]
    assert packed.starts.tolist() == [0, 8, 0, 0, 0, 0, 0]


def test_seeds_bring_other_samples_together() -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 500)
    samples = {tuple(plan(sizes, 100, seed).samples.tolist()) for seed in range(4)}
    assert len(samples) == 4
    again = plan(sizes, 100, 2)
    assert tuple(again.samples.tolist()) in samples


def test_an_epoch_of_the_same_seed_had_the_sequences_in_the_order_of_the_files() -> None:
    """The third one: the plan and the sampler drew the same permutation."""
    packed = plan([8] * 100, 8, seed=7)
    for epoch in range(5):
        visited = packed.samples[epoch_order(len(packed), seed=7, epoch=epoch)]
        assert np.count_nonzero(np.diff(visited) == 1) < 10


def test_pieces_of_sequences_are_found() -> None:
    packed = plan([5, 3, 12, 4, 0, 7, 2], 8, seed=1)
    numbers, edges = packed.pieces([2, 0, 2])
    for k, sequence in enumerate((2, 0, 2)):
        expected = range(int(packed.offsets[sequence]), int(packed.offsets[sequence + 1]))
        assert numbers[edges[k] : edges[k + 1]].tolist() == list(expected)
    numbers, edges = packed.pieces([])
    assert (numbers.tolist(), edges.tolist()) == ([], [0])
    assert len(plan([], 8, 0)) == len(plan([0, 0], 8, 0)) == 0
    assert plan([], 8, 0).waste == 0


def first_fit_count(sizes: list[int], length: int) -> int:
    """The sequences of first fit, in the order of the samples: a tree of the largest rooms."""
    leaves = 1 << max(1, len(sizes) - 1).bit_length()
    rooms = [length] * (2 * leaves)
    used = 0
    for size in sizes:
        node = 1
        while node < leaves:
            node = 2 * node + (rooms[2 * node] < size)
        used = max(used, node - leaves + 1)
        rooms[node] -= size
        while node > 1:
            node //= 2
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
    return used


def concatenation_count(sizes: list[int], length: int) -> int:
    """The sequences of greedy concatenation: a sample that does not fit begins the next one."""
    count, room = 0, 0
    for size in sizes:
        if size > room:
            count, room = count + 1, length
        room -= size
    return count


@pytest.mark.parametrize(("median", "sigma"), [(400, 1.2), (150, 0.8), (1000, 1.8)])
def test_best_fit_wastes_less_than_first_fit_and_concatenation(median: int, sigma: float) -> None:
    rng = np.random.default_rng(3)
    sizes = np.maximum(1, median * rng.lognormal(0, sigma, 20_000)).astype(np.int64)
    whole = int((sizes // 2048).sum())
    rests = [size for size in (sizes % 2048).tolist() if size]
    tokens = int(sizes.sum())

    def waste(count: int) -> float:
        return 1 - tokens / (2048 * (whole + count))

    packed = plan(sizes, 2048, seed=0)
    first_fit = waste(first_fit_count(rests, 2048))
    concatenation = waste(concatenation_count(rests, 2048))
    assert packed.waste < min(0.001, first_fit)
    assert first_fit < concatenation / 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([1, -2], 8, 0), "sample 1 has -2 tokens"),
        (([1.5], 8, 0), "integers"),
        (([[1]], 8, 0), "2 dimensions"),
        (([1], 0, 0), "length is 0"),
        (([1], 8, -1), "seed is -1"),
    ],
)
def test_invalid_arguments_are_refused(arguments: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        plan(*arguments)
    with pytest.raises(UsageError, match="window is 0"):
        plan([1], 8, 0, window=0)
