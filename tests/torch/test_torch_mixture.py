"""Mixtures and replicated ranks under the loader: resumed anywhere, nothing lost, announced."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_cases as cases
from daemon import Daemon, serving, until, write
from hypothesis import given, settings
from hypothesis import strategies as st

from ffserve.errors import UsageError
from ffserve.order import epoch_order
from ffserve.torch import (
    ConcatDataset,
    DataLoader,
    EpochSampler,
    Mixture,
    RawDataset,
    Subset,
    data_rank,
)
from ffserve.torch.samplers import MixtureSampler


def mixture_of(*sizes: int, **arguments: Any) -> Mixture:
    return Mixture([cases.Numbers(size) for size in sizes], **{"seed": 3, **arguments})


def whole_order(mixture: Mixture, epoch: int) -> list[int]:
    order: list[int] = mixture.mixture_order.order(seed=mixture.seed, epoch=epoch).tolist()
    return order


@pytest.mark.check
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    epoch_size=st.integers(40, 120),
    stays=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 60), st.integers(1, 3)), max_size=4),
    last=st.integers(1, 7),
    batch_size=st.integers(1, 20),
)
def test_no_sample_is_lost_or_doubled_whatever_the_world_sizes(
    sizes: list[int],
    epoch_size: int,
    stays: list[tuple[int, int, int]],
    last: int,
    batch_size: int,
) -> None:
    """Each stay: groups of ranks, samples until the interruption, ranks per group."""
    weights = [1 + d for d in range(len(sizes))]
    mixture = mixture_of(*sizes, weights=weights, epoch_size=epoch_size, batch_size=batch_size)
    state = None
    used: list[int] = []
    for groups, count, replication in [*stays, (last, epoch_size, 2)]:
        ranks = [
            mixture.sampler(rank, groups * replication, replication=replication)
            for rank in range(groups * replication)
        ]
        parts = []
        for sampler in ranks:
            sampler.set_epoch(5)
            if state is not None:
                sampler.load_state_dict(state)
            parts.append(list(islice(sampler, count)))
        for first in range(0, len(parts), replication):
            group = parts[first : first + replication]
            assert group == [group[0]] * replication, "ranks of a group get the same samples"
            used += group[0]
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    extra = Counter(used)
    extra.subtract(whole_order(mixture, 5))
    assert min(extra.values()) >= 0, "lost"
    assert sum(extra.values()) < max([last, *(groups for groups, *_ in stays)])


@pytest.mark.check
@settings(max_examples=8)
@given(data=st.data())
def test_loaders_resume_with_other_ranks_and_workers(data: st.DataObject) -> None:
    mixture = mixture_of(13, 40, 5, weights=[1, 2, 1], epoch_size=96, batch_size=12)
    state = None
    used: list[int] = []
    for part in range(3):
        world_size = data.draw(st.sampled_from([1, 2, 3]), "world size")
        way = data.draw(st.sampled_from([{}, {"num_workers": 1}, {"threads": 2}]), "workers")
        count = data.draw(st.integers(0, 4), "batches") if part < 2 else 99
        states = []
        for rank in range(world_size):
            sampler = mixture.sampler(rank, world_size)
            loader = DataLoader(mixture, batch_size=4, sampler=sampler, collate_fn=list, **way)
            if state is not None:
                loader.load_state_dict(state)
            used += [sample[0] for batch in islice(loader, count) for sample in batch]
            states.append(loader.state_dict())
        state = states[0]
    order = np.array(whole_order(mixture, 0))
    starts = np.array([0, 13, 53])
    extra = Counter(used)
    # Sample i of each data set is i.
    extra.subtract((order - starts[starts[1:].searchsorted(order, side="right")]).tolist())
    assert min(extra.values()) >= 0, "lost"
    assert sum(extra.values()) < 3


def test_a_state_of_another_mixture_is_refused() -> None:
    state = mixture_of(10, 20, weights=[1, 1]).sampler().state_dict()
    for other, named in (
        (mixture_of(10, 20, weights=[1, 2]).sampler(), "weights="),
        (mixture_of(10, 21, weights=[1, 1], epoch_size=30).sampler(), "sizes="),
        (mixture_of(10, 20, weights=[1, 1], batch_size=4).sampler(), "batch_size="),
        (mixture_of(10, 20, weights=[1, 1], seed=4).sampler(), "seed="),
        (mixture_of(10, 20, weights=[1, 1], epoch_size=8).sampler(), "n="),
    ):
        with pytest.raises(UsageError, match=named):
            other.load_state_dict(state)
    with pytest.raises(UsageError, match="invalid state of a MixtureSampler: missing sizes"):
        mixture_of(10, 20).sampler().load_state_dict(EpochSampler(30, seed=3).state_dict())
    with pytest.raises(UsageError, match="seed is -1"):
        mixture_of(3, seed=-1)


def test_a_shared_mixture_has_one_order_whatever_the_seeds() -> None:
    orders = [mixture_of(9, 9, seed=s).sampler(shared="sweep").order().tolist() for s in (1, 2)]
    assert orders[0] == orders[1]
    assert mixture_of(9, 9).sampler(0, 2, shared="sweep").order_name == "sweep/0"


def test_each_data_set_of_a_mixture_gets_its_own_order() -> None:
    mixture = mixture_of(4, 30, weights=[1, 1], epoch_size=24)
    sampler = mixture.sampler()
    loader = DataLoader(mixture, batch_size=5, sampler=sampler)
    for _ in loader:
        pass
    loader._plan._announcer.settle()
    small, large = (dataset.reader for dataset in mixture.datasets)
    for epoch in (0, 1):
        order = sampler.order(epoch)
        assert small.orders[epoch] == (epoch, order[order < 4].tolist())
        assert large.orders[epoch] == (epoch, (order[order >= 4] - 4).tolist())
    # Only what comes more than once in an epoch is announced so.
    assert small.options == [(None, True)] * 2
    assert large.options == [(None, False)] * 2
    assert small.positions[-1] == large.positions[-1] == (0, 12)


def test_a_mixture_inside_a_concatenation_is_looked_into() -> None:
    dataset = cases.Numbers(6)
    inside = Mixture([Subset(dataset, [0, 1]), Subset(dataset, [4, 5])], seed=0)
    ConcatDataset([inside, Subset(dataset, [2, 3])]).announce(np.arange(6))
    assert dataset.reader.orders == [(0, [0, 1, 4, 5, 2, 3])]


def test_a_daemon_follows_a_mixture(tmp_path: Path, daemon: Daemon, monkeypatch: Any) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    until(lambda: not daemon.status()["progress"], "the jobs of the tests before are gone")
    contents = [[b"%d of %d" % (i, d) * 200 for i in range(50 + 350 * d)] for d in range(2)]
    datasets = [
        RawDataset(write(tmp_path / f"{d}.ffr", payloads)) for d, payloads in enumerate(contents)
    ]
    mixture = Mixture(datasets, weights=[1, 1], epoch_size=200, seed=1)
    sampler = mixture.sampler()
    loader = DataLoader(mixture, batch_size=10, sampler=sampler, collate_fn=list)
    flat = contents[0] + contents[1]
    samples = iter(loader)
    got = [bytes(sample) for sample in next(samples)]

    loader._plan._announcer.settle()
    progress = daemon.status()["progress"]
    assert [(each["count"], each["announced"]) for each in progress] == [(100, [0, 1])] * 2
    got += [bytes(sample) for batch in samples for sample in batch]
    assert got == [flat[index] for index in sampler.order()]
    for dataset in datasets:
        dataset.reader.close()


@pytest.mark.check
def test_mixtures_cross_to_workers_of_every_start_method() -> None:
    mixture = mixture_of(5, 7, repeats=[2, 1])
    for method in ("fork", "spawn"):
        sampler = mixture.sampler()
        loader = DataLoader(
            mixture, batch_size=4, sampler=sampler, num_workers=1, multiprocessing_context=method
        )
        indices = [index for batch in loader for index in batch[0].tolist()]
        assert indices == [i - 5 * (i >= 5) for i in sampler.order().tolist()]
        assert type(sampler) is MixtureSampler and len(sampler) == 17


# Replicated ranks


def test_ranks_of_a_group_have_one_order_and_one_name() -> None:
    ranks = [
        EpochSampler(20, seed=1, rank=r, world_size=6, replication=3, shared="s") for r in range(6)
    ]
    alone = [EpochSampler(20, seed=1, rank=r, world_size=2, shared="s") for r in range(2)]
    for rank, sampler in enumerate(ranks):
        assert list(sampler) == list(alone[rank // 3])
        assert sampler.order_name == alone[rank // 3].order_name
        assert len(sampler) == 10
    whole = EpochSampler(20, seed=1, rank=2, world_size=3, replication=3, shared="s")
    assert whole.order_name == "s"


def test_states_count_groups_and_not_ranks() -> None:
    before = EpochSampler(24, seed=1, rank=0, world_size=4, replication=2)
    used = list(islice(before, 3))
    state = before.state_dict()
    same = EpochSampler(24, seed=1, rank=1, world_size=2)
    same.load_state_dict(state)
    assert same.position == 3 and same.order().tolist()[:3] != used
    other = EpochSampler(24, seed=1, rank=3, world_size=4)
    other.load_state_dict(state)
    rest = epoch_order(24, seed=1, epoch=0, rank=3, world_size=4, start=6)
    assert list(other) == rest.tolist()
    for change in ({"replication": 0}, {"replication": 3}, {"replication": "2"}):
        with pytest.raises(UsageError, match="replication is"):
            other.load_state_dict({**state, **change})


@pytest.mark.parametrize("replication", [0, 3, "2"])
def test_replication_divides_the_world_size(replication: Any) -> None:
    with pytest.raises(UsageError, match="replication is"):
        EpochSampler(4, seed=0, rank=0, world_size=4, replication=replication)


def test_ranks_of_a_device_mesh_share_reads_and_memory(tmp_path: Path) -> None:
    """Tensor-parallel ranks get the same samples; each sample is read once and kept once."""
    payloads = [i.to_bytes(8, "little") * 500 for i in range(256)]
    file = write(tmp_path / "train.ffr", payloads)
    context = multiprocessing.get_context("forkserver")
    with serving() as daemon:
        results = context.Queue()
        ranks = [
            context.Process(
                target=cases.read_as_rank,
                args=(file, daemon.socket, str(tmp_path / "init"), rank, results),
            )
            for rank in range(4)
        ]
        for process in ranks:
            process.start()
        answers = sorted(results.get(timeout=100) for _ in ranks)
        for process in ranks:
            process.join()
            assert process.exitcode == 0
        everything = list(range(256))
        for rank, dp_rank, dp_size, both, used in answers:
            assert (dp_rank, dp_size, both) == (rank // 2, 2, (rank, 4))
            assert used == [everything, everything]
        size = sum(map(len, payloads))
        status = daemon.status()
        assert size <= status["cache"]["read_size"] < 1.5 * size, "each sample was read once"
        assert size <= status["arena"]["used"] < 1.5 * size, "and is in memory once"


@pytest.mark.parametrize(("names", "coordinate"), [(("dp", "tp"), None), (("dp", "tp"), (1, 0))])
def test_a_mesh_without_this_process_or_dimension(names: Any, coordinate: Any) -> None:
    class Mesh:
        mesh_dim_names = names

        def get_coordinate(self) -> Any:
            return coordinate

    with pytest.raises(UsageError, match=r"not in the device mesh|no dimension 'pp', but dp, tp"):
        data_rank(Mesh(), "pp")
