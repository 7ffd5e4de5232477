"""EpochSampler by itself: shared orders, windows, and positions restored with other world sizes."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.errors import UsageError
from ffserve.order import epoch_order
from ffserve.torch import EpochSampler


def test_a_shared_order_is_the_same_whatever_the_seeds() -> None:
    first = EpochSampler(100, seed=1, shared="sweep")
    second = EpochSampler(100, seed=2, shared="sweep")
    other = EpochSampler(100, seed=1, shared="another")
    for epoch in range(3):
        for sampler in (first, second, other):
            sampler.set_epoch(epoch)
        assert list(first) == list(second) == first.order().tolist()
        assert list(first) != list(other)
    second.load_state_dict(first.state_dict())
    with pytest.raises(UsageError, match="shared=sweep"):
        other.load_state_dict(first.state_dict())


def test_the_name_of_an_order_tells_the_ranks_apart() -> None:
    def name(**arguments: Any) -> str | None:
        return EpochSampler(10, seed=0, **arguments).order_name

    assert name() is None
    assert name(shared="sweep") == "sweep"
    names = {name(shared="sweep", rank=rank, world_size=3) for rank in range(3)}
    assert len(names | {"sweep"}) == 4


def test_the_order_is_that_of_the_arguments() -> None:
    sampler = EpochSampler(60, seed=4, rank=1, world_size=2, window=20)
    sampler.set_epoch(3)
    expected = epoch_order(60, seed=4, epoch=3, rank=1, world_size=2, window=20)
    assert list(sampler) == sampler.order().tolist() == expected.tolist()
    following = sampler.order(4)
    assert not np.array_equal(following, expected)
    sampler.set_epoch(4)
    assert sampler.order() is following, "drawn once"
    with pytest.raises(ValueError, match="read-only"):
        following[0] = 1
    assert list(pickle.loads(pickle.dumps(sampler))) == following.tolist()


@given(
    n=st.integers(0, 60),
    stays=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 40)), max_size=4),
    last=st.integers(1, 7),
)
def test_positions_are_restored_with_any_world_size(
    n: int, stays: list[tuple[int, int]], last: int
) -> None:
    state = None
    used: list[int] = []
    for world_size, count in [*stays, (last, n)]:
        ranks = [EpochSampler(n, seed=9, rank=r, world_size=world_size) for r in range(world_size)]
        for sampler in ranks:
            sampler.set_epoch(5)
            if state is not None:
                sampler.load_state_dict(state)
            used += islice(sampler, count)
            assert len(sampler) == len(sampler.order(5))
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert set(used) == set(range(n))
    assert len(used) - n < max([last, *(world_size for world_size, _ in stays)])
    for sampler in ranks:
        assert list(sampler) == sampler.order(5).tolist(), "later iterations are whole again"


def test_a_restored_position_stays_until_an_iteration_begins() -> None:
    sampler = EpochSampler(10, seed=0)
    sampler.load_state_dict({**sampler.state_dict(), "position": 7})
    sampler.follow()
    assert list(sampler) == sampler.order()[7:].tolist()
    assert list(sampler) == sampler.order().tolist()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"position": 21}, "position 21 is outside an epoch of 20"),
        ({"position": -1}, "position is -1"),
        ({"position": "3"}, "position is '3'"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": None}, "world_size is None"),
        ({"split_at": 21}, "split_at is 21 of 20"),
        ({"split_at": 4, "position": 17}, "outside an epoch of 16"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": "0"}, "epoch is '0'"),
    ],
)
def test_invalid_states_are_refused(change: dict[str, Any], named: str) -> None:
    sampler = EpochSampler(20, seed=0)
    state = sampler.state_dict()
    with pytest.raises(UsageError, match=named):
        sampler.load_state_dict({**state, **change})
    with pytest.raises(UsageError, match="missing n"):
        sampler.load_state_dict({})
    assert sampler.state_dict() == state, "nothing has changed"


@pytest.mark.parametrize(
    "arguments", [{"n": -1}, {"window": 0}, {"shared": ""}, {"shared": 3}, {"rank": 1}]
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        EpochSampler(**{"n": 4, "seed": 0, **arguments})
