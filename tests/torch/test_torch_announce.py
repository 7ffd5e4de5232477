"""Announcements of loaders: orders and positions; the loop never waits for them."""

from __future__ import annotations

import copy
import gc
import logging
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_cases as cases
from daemon import Daemon, serving, until, write
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import ffserve
from ffserve.order import epoch_order
from ffserve.torch import ConcatDataset, DataLoader, Dataset, EpochSampler, Subset, announce
from ffserve.torch.announce import Announcement, Announcer
from ffserve.torch.samplers import order_of

N = 20


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def indices_of(batch: Any) -> list[int]:
    return batch[0].tolist()


def drained(loader: Any) -> list[list[int]]:
    """Iterate to the end, and until everything is announced."""
    batches = [indices_of(batch) for batch in loader]
    if isinstance(loader, DataLoader):
        loader._plan._announcer.settle()
    return batches


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


# What torch would hand out


def kinds(generator: torch.Generator | None) -> dict[str, Callable[[], dict[str, Any]]]:
    """Loader options, made anew at each call, with samplers that draw from `generator`."""

    def distributed(**options: Any) -> dict[str, Any]:
        return {"sampler": DistributedSampler(range(N), num_replicas=3, rank=2, **options)}

    return {
        "sequential": dict,
        "shuffle": lambda: {"shuffle": True, "generator": generator},
        "random": lambda: {"sampler": RandomSampler(range(N), generator=generator)},
        "random, fewer": lambda: {
            "sampler": RandomSampler(range(N), num_samples=13, generator=generator)
        },
        "random, more": lambda: {
            "sampler": RandomSampler(range(N), num_samples=33, generator=generator)
        },
        "random, replacement": lambda: {
            "sampler": RandomSampler(range(N), replacement=True, generator=generator)
        },
        "subset": lambda: {"sampler": SubsetRandomSampler([4, 8, 15, 3, 0], generator=generator)},
        "subset of a tensor": lambda: {
            "sampler": SubsetRandomSampler(torch.arange(5, 15), generator=generator)
        },
        "weighted": lambda: {
            "sampler": WeightedRandomSampler(range(1, N + 1), 30, generator=generator)
        },
        "weighted, distinct": lambda: {
            "sampler": WeightedRandomSampler(range(1, N + 1), 15, False, generator=generator)
        },
        "distributed": distributed,
        "distributed, in order": lambda: distributed(shuffle=False),
        "distributed, drop_last": lambda: distributed(drop_last=True, seed=4),
        "list": lambda: {"sampler": [3, 1, 4, 1, 5]},
        "array": lambda: {"sampler": np.arange(3, 9)},
        "batches": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
        "own batch sampler": lambda: {"batch_sampler": cases.EvensThenOdds(N)},
        "batch sampler": lambda: {
            "batch_sampler": BatchSampler(RandomSampler(range(N), generator=generator), 3, True)
        },
    }


KINDS = list(kinds(None))
UNKNOWN = {
    "random, more",
    "random, replacement",
    "subset of a tensor",
    "own batch sampler",
}


@pytest.mark.check
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_sees_what_torch_hands_out(
    kind: str, own_generator: bool, drop_last: bool
) -> None:
    """The same batches, and the same state of the generators, also after epochs left early."""

    def trace(loader_class: Any, batch_size: int) -> list[Any]:
        torch.manual_seed(11)
        generator = seeded(7) if own_generator else None
        options = kinds(generator)[kind]()
        if "batch_sampler" not in options:
            options |= {"batch_size": batch_size, "drop_last": drop_last}
        loader = loader_class(cases.Numbers(N), **options)
        seen: list[Any] = []
        for epoch, count in enumerate((99, 2, 99, 0, 99)):
            if "distributed" in kind and epoch != 1:
                loader.sampler.set_epoch(epoch)
            for batch in islice(loader, count):
                seen.append((indices_of(batch), int(torch.randint(1000, ()))))
            seen.append(torch.get_rng_state().tolist())
            if generator is not None:
                seen.append(generator.get_state().tolist())
        return seen

    for batch_size in (1, 4, 7):
        assert trace(DataLoader, batch_size) == trace(torch.utils.data.DataLoader, batch_size)


@pytest.mark.check
@pytest.mark.parametrize("kind", ["shuffle", "random", "subset", "weighted", "distributed"])
def test_workers_see_the_same(kind: str) -> None:
    def trace(loader_class: Any) -> list[Any]:
        torch.manual_seed(11)
        generator = seeded(7)
        loader = loader_class(
            cases.Numbers(N), batch_size=4, num_workers=2, **kinds(generator)[kind]()
        )
        return [
            *(flat(drained(loader)) for _ in range(2)),
            generator.get_state().tolist(),
            torch.get_rng_state().tolist(),
        ]

    assert trace(DataLoader) == trace(torch.utils.data.DataLoader)


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 30),
    replicas=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_any_distributed_sampler(
    n: int, replicas: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    if drop_last and n < replicas:
        return  # torch itself fails
    for rank in range(replicas):
        sampler = DistributedSampler(
            range(n), replicas, rank, shuffle=shuffle, seed=3, drop_last=drop_last
        )
        sampler.set_epoch(epoch)
        assert order_of(sampler).compute().tolist() == list(sampler)


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 200), count=st.integers(1, 200), seed=st.integers(0, 9))
def test_any_random_sampler(n: int, count: int, seed: int) -> None:
    for generator in (None, seeded(seed)):
        sampler = RandomSampler(range(n), num_samples=min(count, n), generator=generator)
        before = seeded(seed).get_state()
        torch.default_generator.set_state(before)
        expected = list(sampler)
        torch.default_generator.set_state(before)
        if generator is not None:
            generator.set_state(before)
        assert order_of(sampler).compute().tolist() == expected


# What is announced


@pytest.mark.check
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_announced_is_what_is_handed_out(kind: str, num_workers: int) -> None:
    dataset = cases.Numbers(N)
    loader = DataLoader(dataset, num_workers=num_workers, **kinds(seeded(3))[kind]())
    used = []
    for epoch in range(3):
        if "distributed" in kind:
            loader.sampler.set_epoch(epoch)
        used.append(flat(drained(loader)))
    orders, positions = dataset.reader.orders, dataset.reader.positions
    if kind in UNKNOWN:
        assert not orders and not positions
        return
    # The first epoch and the one behind it at once, then only what is new.
    assert [epoch for epoch, _ in orders] == [0, 1, 2, 3]
    assert [order for _, order in orders[:3]] == used
    repeats = {len(set(order)) < len(order) for order in used}
    assert dataset.reader.options == [(None, True in repeats)] * 4
    for epoch in range(3):
        reported = [position for e, position in positions if e == epoch]
        # The thread may report its first position when the loop is some batches on.
        assert reported[-1] == len(used[epoch]) and reported == sorted(reported)


def test_without_a_generator_only_the_present_order_is_known() -> None:
    dataset = cases.Numbers(N)
    loader = DataLoader(dataset, batch_size=6, shuffle=True)
    used = [flat(drained(loader)) for _ in range(2)]
    assert dataset.reader.orders == list(enumerate(used))


def test_persistent_workers_draw_no_seed_from_the_generator() -> None:
    dataset = cases.Numbers(N)
    loader = DataLoader(
        dataset,
        batch_size=6,
        shuffle=True,
        generator=seeded(2),
        num_workers=1,
        persistent_workers=True,
    )
    used = [flat(drained(loader)) for _ in range(3)]
    assert [order for _, order in dataset.reader.orders[:3]] == used
    assert len(dataset.reader.orders) == 4
    del loader


@pytest.mark.check
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_the_training_process_announces_and_not_its_workers(start_method: str) -> None:
    dataset = cases.Numbers(N)
    sampler = EpochSampler(N, seed=0)
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=sampler,
        num_workers=1,
        multiprocessing_context=start_method,
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert flat(drained(loader)) == sampler.order().tolist()
    assert dataset.reader.orders == [(e, sampler.order(e).tolist()) for e in range(3)]


def test_a_shared_order_is_announced_by_its_name() -> None:
    dataset = cases.Numbers(N)
    sampler = EpochSampler(N, seed=0, shared="sweep")
    drained(DataLoader(dataset, sampler=sampler))
    assert dataset.reader.options == [("sweep", False)] * 2
    assert dataset.reader.orders[1] == (
        1,
        EpochSampler(N, seed=5, shared="sweep").order(1).tolist(),
    )


def test_batches_that_are_dropped_are_not_announced() -> None:
    dataset = cases.Numbers(N)
    loader = DataLoader(
        dataset, batch_size=6, sampler=EpochSampler(N, seed=0), drop_last=True, num_workers=1
    )
    used = flat(drained(loader))
    assert len(used) == 18
    assert dataset.reader.orders[0] == (0, used)
    assert dataset.reader.positions[-1] == (0, 18)


def test_without_set_epoch_the_next_order_is_the_same() -> None:
    for sampler in (
        EpochSampler(N, seed=0),
        DistributedSampler(range(N), num_replicas=1, rank=0),
    ):
        dataset = cases.Numbers(N)
        loader = DataLoader(dataset, batch_size=6, sampler=sampler)
        used = flat(drained(loader))
        for _ in range(2):
            assert flat(drained(loader)) == used
        # At first set_epoch was expected.
        assert dataset.reader.orders[1][0] == 1 and dataset.reader.orders[1][1] != used
        assert dataset.reader.orders[2:] == [(1, used), (2, used), (3, used)]
        sampler.set_epoch(1)
        again = flat(drained(loader))
        assert dataset.reader.orders[5] == (1, again)


def test_an_epoch_that_is_left_is_announced_again() -> None:
    dataset = cases.Numbers(N)
    sampler = EpochSampler(N, seed=0)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1)
    list(islice(loader, 2))
    used = flat(drained(loader))
    sampler.set_epoch(1)
    following = flat(drained(loader))
    # Begun again it is announced again, which takes the position back.
    epochs = [0, 1, 0, 1, 2]
    assert [epoch for epoch, _ in dataset.reader.orders] == epochs
    assert dataset.reader.orders[2][1] == used
    assert dataset.reader.orders[3][1] == following


def test_a_resumed_loader_announces_where_it_is() -> None:
    dataset = cases.Numbers(N)
    loader = DataLoader(dataset, batch_size=4, sampler=EpochSampler(N, seed=0))
    loader.sampler.set_epoch(3)
    list(islice(loader, 2))
    state = loader.state_dict()
    dataset = cases.Numbers(N)
    loader = DataLoader(dataset, batch_size=5, sampler=EpochSampler(N, seed=0), num_workers=1)
    loader.load_state_dict(state)
    drained(loader)
    order = loader.sampler.order().tolist()
    assert dataset.reader.orders[0] == (3, order)
    assert dataset.reader.positions[0] == (3, 8)
    assert dataset.reader.positions[-1] == (3, 20)
    assert dataset.reader.orders[1] == (4, loader.sampler.order(4).tolist())


def test_the_rest_of_an_epoch_of_another_world_size_is_announced() -> None:
    loader = DataLoader(cases.Numbers(N), batch_size=3, sampler=EpochSampler(N, seed=0))
    list(islice(loader, 2))
    dataset = cases.Numbers(N)
    sampler = EpochSampler(N, seed=0, rank=1, world_size=2)
    halves = DataLoader(dataset, batch_size=3, sampler=sampler)
    halves.load_state_dict(loader.state_dict())
    used = flat(drained(halves))
    assert used == epoch_order(N, seed=0, epoch=0)[7::2].tolist()
    assert dataset.reader.orders == [(0, used), (1, sampler.order(1).tolist())]


def test_skipped_steps_are_positions_too() -> None:
    for options in ({"sampler": EpochSampler(N, seed=0)}, {"shuffle": True}):
        dataset = cases.Numbers(N)
        loader = DataLoader(dataset, batch_size=4, **options)
        loader.set_step(2)
        used = flat(drained(loader))
        epoch, order = dataset.reader.orders[0]
        assert order[8:] == used and len(order) == N
        assert dataset.reader.positions[0] == (epoch, 8)


def test_batches_out_of_order_are_counted() -> None:
    dataset = cases.Numbers(N)
    loader = DataLoader(
        dataset, batch_size=4, sampler=EpochSampler(N, seed=0), num_workers=2, in_order=False
    )
    reported = []
    for number, _ in enumerate(loader, 1):
        until(lambda: not loader._plan._newest().announced.busy, "the announcement")
        reported.append((number * 4, loader._plan._newest().announced.position))
    assert all(at == expected for expected, at in reported)


# Subsets and concatenations


class Either(cases.Numbers):
    """Numbers, also one by one, as torch's ConcatDataset asks."""

    def __getitem__(self, indices: Any) -> Any:
        return (
            super().__getitem__(indices)
            if isinstance(indices, list)
            else super().__getitem__([indices])[0]
        )


def test_announcements_reach_the_datasets_below() -> None:
    first, second = Either(3), Either(9)
    for subset_class, concat_class in (
        (Subset, ConcatDataset),
        (torch.utils.data.Subset, torch.utils.data.ConcatDataset),
    ):
        first.reader, second.reader = cases.Recorder(3), cases.Recorder(9)
        both = concat_class([first, subset_class(second, [8, 6, 4])])
        loader = DataLoader(both, batch_size=1, sampler=[5, 0, 3, 2])
        for position, _ in enumerate(loader, 1):
            loader._plan._announcer.settle()
            loader._plan._announcer._clock = lambda position=position: 1e9 + position
        assert first.reader.orders == [(0, [0, 2]), (1, [0, 2])]
        assert second.reader.orders == [(0, [4, 8]), (1, [4, 8])]
        # 5 | 0 | 3 | 2: a position is reported when the next batch is asked for.
        assert dedup(first.reader.positions) == [(0, 0), (0, 1), (0, 2)]
        assert dedup(second.reader.positions)[-1] == (0, 2)


def dedup(positions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return list(dict.fromkeys(positions))


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    data=st.data(),
)
def test_positions_of_parts_are_exact(sizes: list[int], data: st.DataObject) -> None:
    parts = [cases.Numbers(size) for size in sizes]
    both = ConcatDataset(parts)
    orders = {}
    for epoch in range(3):
        orders[epoch] = data.draw(st.permutations(range(sum(sizes))))
        both.announce(np.array(orders[epoch], np.int64), epoch)
    moves = st.tuples(st.integers(0, 2), st.integers(0, sum(sizes) + 2))
    for epoch, position in data.draw(st.lists(moves, max_size=12)):
        both.reached(epoch, position)
        for number, part in enumerate(parts):
            start = sum(sizes[:number])
            expected = sum(start <= i < start + sizes[number] for i in orders[epoch][:position])
            assert part.reader.positions[-1] == (epoch, expected)


def concatenations(dataset: Any) -> dict[str, tuple[Any, list[int]]]:
    """Concatenations over one reader, and the sample that each index stands for."""
    low, high = torch.utils.data.random_split(dataset, [6, 4], seeded(1))
    twin = copy.copy(dataset)
    return {
        "twice": (ConcatDataset([dataset, dataset]), [*range(10), *range(10)]),
        "a twin": (ConcatDataset([dataset, twin]), [*range(10), *range(10)]),
        "split": (torch.utils.data.ConcatDataset([low, high]), [*low.indices, *high.indices]),
        "nested": (
            ConcatDataset([Subset(dataset, [5, 3]), ConcatDataset([Subset(dataset, [4, 3])])]),
            [5, 3, 4, 3],
        ),
        "subset of a concatenation": (
            Subset(ConcatDataset([dataset, dataset]), [15, 2, 5, 11]),
            [5, 2, 5, 1],
        ),
    }


@pytest.mark.parametrize("kind", list(concatenations(Either(10))))
def test_parts_of_one_reader_are_one_order(kind: str) -> None:
    """Announced one after the other, the second order would replace the first."""
    dataset = Either(10)
    both, samples = concatenations(dataset)[kind]
    sampler = EpochSampler(len(samples), seed=0)
    loader = DataLoader(both, batch_size=2, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        drained(loader)
    wanted = [[samples[i] for i in sampler.order(epoch)] for epoch in range(3)]
    assert dataset.reader.orders == list(enumerate(wanted))
    assert dataset.reader.options == [(None, len(set(samples)) < len(samples))] * 3
    ends = [position for epoch, position in dataset.reader.positions if epoch == 0]
    assert ends[-1] == len(samples) and ends == sorted(ends)


def test_a_dataset_that_changes_indices_announces_its_own() -> None:
    class Backwards(Either):
        def announce(self, order: Any, epoch: int = 0, **options: Any) -> None:
            super().announce(9 - order, epoch, **options)

    straight, backwards = Either(10), Backwards(10)
    backwards.reader = straight.reader
    drained(DataLoader(ConcatDataset([straight, backwards]), sampler=[1, 12, 2, 11]))
    assert straight.reader.orders[:2] == [(0, [1, 2]), (0, [7, 8])]


def test_a_subset_with_repeats_is_announced_with_replacement() -> None:
    dataset = cases.Numbers(N)
    drained(DataLoader(Subset(dataset, [3, 3, 4]), sampler=EpochSampler(3, seed=0)))
    assert dataset.reader.options == [(None, True)] * 2


def test_datasets_find_their_readers(tmp_path: Path) -> None:
    class Two(Dataset):
        def __init__(self, n: int) -> None:
            self.images = ffserve.FileReader(paths[0])
            self.labels = ffserve.FileReader(paths[1])
            self.n = n

        def __len__(self) -> int:
            return self.n

    paths = [write(tmp_path / f"{i}.ffr", [b"x"] * count) for i, count in enumerate((4, 6))]
    dataset = Two(4)
    assert dataset._announced_to() == [dataset.images]
    dataset.reader = dataset.labels
    assert dataset._announced_to() == [dataset.labels, dataset.images]
    dataset.announce(np.arange(4), 0)
    dataset.reached(0, 2)


# Datasets without readers, and failures


class Failing(cases.Recorder):
    def announce(self, order: Any, epoch: int = 0, **options: Any) -> None:
        raise OSError("no daemon today")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failing_announcement_is_logged_once_and_training_goes_on(
    num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = cases.Numbers(N)
    dataset.reader = Failing(N)
    loader = DataLoader(dataset, sampler=EpochSampler(N, seed=0), num_workers=num_workers)
    with caplog.at_level(logging.WARNING, "ffserve"):
        for _ in range(3):
            assert len(drained(loader)) == N
    assert [record.getMessage() for record in caplog.records] == [
        "the order of samples is not announced: no daemon today"
    ]
    assert dataset.reader.positions == []


def test_datasets_of_the_users_that_announce_or_do_not(caplog: pytest.LogCaptureFixture) -> None:
    class Plain(cases.Single):
        """A user's dataset that takes orders and no positions."""

        def announce(self, order: Any, epoch: int = 0) -> None:
            self.announced = [*getattr(self, "announced", ()), (epoch, order.tolist())]

    dataset = Plain(4)
    drained(DataLoader(dataset))
    assert dataset.announced == [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3])]
    # Nobody to announce to: no thread is started.
    loader = DataLoader(cases.Single(4))
    assert flat([[int(i) for i in batch[0]] for batch in loader]) == [0, 1, 2, 3]
    assert loader._plan._announcer._thread is None
    with caplog.at_level(logging.WARNING, "ffserve"):
        list(DataLoader(dataset, sampler=EpochSampler(4, seed=0, shared="sweep")))
    for thread in threading.enumerate():
        if thread.name == "ffserve-announce":
            thread.join()
    assert "unexpected keyword argument 'name'" in caplog.text


def test_lists_that_are_not_indices_have_no_order() -> None:
    for sampler in (["a", "b"], [(0, 1), (2, 3)], [[0, 1], [2]], [], [0.5]):
        assert order_of(sampler).compute() is None or sampler == []

    class Mine(Sampler):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class MineToo(RandomSampler):
        pass

    assert order_of(Mine()) is None
    assert order_of(MineToo(range(4))) is None
    assert order_of(SequentialSampler(range(4))).compute().tolist() == [0, 1, 2, 3]


class Held(cases.Recorder):
    """A reader whose daemon does not answer for a while."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.go_on = threading.Event()

    def announce(self, order: Any, epoch: int = 0, **options: Any) -> None:
        self.go_on.wait()
        super().announce(order, epoch, **options)


def test_the_loop_does_not_wait_for_the_announcement() -> None:
    dataset = cases.Numbers(N)
    dataset.reader = reader = Held(N)
    sampler = EpochSampler(N, seed=0)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    assert flat([indices_of(batch) for batch in loader]) == sampler.order().tolist()
    assert not reader.orders and not reader.positions
    reader.go_on.set()
    loader._plan._announcer.settle()
    assert [epoch for epoch, _ in reader.orders] == [0, 1]
    assert reader.positions == [(0, N)], "where the loop has come to meanwhile"


# Two loaders


def test_loaders_over_the_same_files_announce_in_turn() -> None:
    """Validation in mid-epoch replaces the order of training, which announces it again."""
    dataset = cases.Numbers(N)
    sampler = EpochSampler(12, seed=0)
    training = DataLoader(Subset(dataset, range(12)), batch_size=2, sampler=sampler)
    validation = DataLoader(Subset(dataset, range(12, 20)), batch_size=4)
    training._plan._announcer._clock = iter(range(10**6)).__next__
    for number, _ in enumerate(training):
        training._plan._announcer.settle()
        if number == 2:
            del dataset.reader.orders[:]
            drained(validation)
            assert dataset.reader.orders[0] == (0, list(range(12, 20)))
            del dataset.reader.orders[:]
    assert dataset.reader.orders[0] == (0, sampler.order().tolist())
    assert dataset.reader.positions[-1] == (0, 12)
    del dataset.reader.orders[:]
    drained(validation)
    sampler.set_epoch(1)
    drained(training)
    epochs = [epoch for epoch, order in dataset.reader.orders if max(order) < 12]
    assert epochs == [1, 2], "the present one too, though it was announced before"


def test_two_loaders_at_once_do_not_announce_again_and_again() -> None:
    dataset = cases.Numbers(N)
    loaders = [
        DataLoader(dataset, batch_size=2, sampler=EpochSampler(N, seed=seed)) for seed in (1, 2)
    ]
    for loader in loaders:
        loader._plan._announcer._clock = iter(range(10**6)).__next__
    for _ in zip(*loaders, strict=True):
        for loader in loaders:
            loader._plan._announcer.settle()
    assert len(dataset.reader.orders) == 4


@pytest.mark.check
def test_the_announcer_never_forgot_loaders_and_ids_of_objects_that_were_gone() -> None:
    gc.collect()
    before = len(announce._announcers)
    for n in range(N, N + 20):
        drained(DataLoader(cases.Numbers(n), sampler=EpochSampler(n, seed=0)))

    def forgotten() -> bool:
        gc.collect()
        return len(announce._announcers) <= before

    until(forgotten, "they are forgotten, when their threads have ended")
    # Readers that come to lie where those of an ended loader lay are not taken for them.
    kept = cases.Numbers(N)
    loader = DataLoader(kept, batch_size=4, sampler=EpochSampler(N, seed=0))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        drained(loader)
        drained(DataLoader(cases.Numbers(N), sampler=EpochSampler(N, seed=1)))
    assert [epoch for epoch, _ in kept.reader.orders] == [0, 1, 2, 3], "each order once"


def test_iterations_that_replaced_an_announcement_are_remembered_while_they_run() -> None:
    dataset = cases.Numbers(N)
    training = DataLoader(dataset, batch_size=2, sampler=EpochSampler(N, seed=0))
    batches = iter(training)
    next(batches)
    announcer = training._plan._announcer
    announcer.settle()
    for _ in range(10):
        drained(DataLoader(dataset, batch_size=4))
    assert len(announcer._replaced_by) == 1
    announcer._clock = iter(range(10**9, 2 * 10**9)).__next__
    next(batches)
    announcer.settle()
    assert not announcer._replaced_by, "announced again"
    assert dataset.reader.orders[-2] == (0, training.sampler.order().tolist())


# The parts


def test_positions_are_reported_now_and_then() -> None:
    now = 0.0
    dataset = cases.Numbers(100_000)
    announcer = Announcer(dataset, lambda: now)
    current = Announcement(0, np.arange(100_000))
    announced = announcer.begin(current, 0, lambda: None)
    announcer.settle()
    reported = dataset.reader.positions
    for position in range(1, 2001):
        now += 2e-5
        announcer.reached(announced, position)
    assert reported == [(0, 0), (0, 1000), (0, 2000)], "each hundredth"
    now += 0.051
    announcer.reached(announced, 2001)
    announcer.reached(announced, 50_000)
    assert reported[3:] == [(0, 2001)], "after 50 ms, and not within ten"
    announcer.reached(announced, 49_000)
    announcer.reached(announced, 100_000, end=True)
    assert reported[4:] == [(0, 100_000)]


def test_a_loader_can_be_copied_and_pickled() -> None:
    loader = DataLoader(cases.Numbers(N), batch_size=4, sampler=EpochSampler(N, seed=0))
    used = drained(loader)
    for again in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert drained(again) == used


# With a daemon


@pytest.fixture
def file(tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FFSERVE_SOCKET", str(daemon.socket))
    until(lambda: not daemon.status()["progress"], "the jobs of the tests before are gone")
    return write(tmp_path / "train.ffr", [b"%d" % i for i in range(200)])


def loader_over(dataset: Any, sampler: EpochSampler, **options: Any) -> DataLoader:
    return DataLoader(
        dataset, batch_size=10, sampler=sampler, collate_fn=cases.keep_list, **options
    )


@pytest.mark.check
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_daemon_follows_a_job(file: str, daemon: Daemon, start_method: str) -> None:
    dataset, sampler = cases.Raw(file), EpochSampler(200, seed=0)
    loader = loader_over(dataset, sampler, num_workers=1, multiprocessing_context=start_method)
    batches = iter(loader)
    got = [int(sample) for _ in range(3) for sample in next(batches)]
    loader._plan._announcer.settle()
    jobs = daemon.status()["progress"]
    assert len(jobs) == 1, "the workers are of the same job"
    progress = jobs[0]
    assert (progress["epoch"], progress["count"], progress["announced"]) == (0, 200, [0, 1])
    got += [int(sample) for batch in batches for sample in batch]
    assert got == sampler.order().tolist()
    until(lambda: daemon.status()["progress"][0]["epoch"] == 1, "the next epoch")
    sampler.set_epoch(1)
    assert len(list(loader)) == 20
    loader._plan._announcer.settle()
    until(lambda: daemon.status()["progress"][0]["announced"] == [2], "the third epoch")
    dataset.reader.close()
    until(lambda: not daemon.status()["progress"], "the end")


@pytest.mark.check
def test_a_daemon_killed_in_mid_epoch_gets_the_orders_again(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training process reads no samples; it notices the loss when it reports."""
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        dataset, sampler = cases.Raw(file), EpochSampler(200, seed=0)
        loader = loader_over(dataset, sampler, num_workers=2)
        batches = iter(loader)
        got = [int(sample) for _ in range(3) for sample in next(batches)]
        loader._plan._announcer.settle()
        daemon.end(signal.SIGKILL)
        daemon.start()
        # Each position is reported at once.
        loader._plan._announcer._clock = iter(range(10**9, 2 * 10**9)).__next__
        for batch in batches:
            got += [int(sample) for sample in batch]
            if len(got) < 150:
                continue
            far = len(got) - 20

            def reported(far: int = far) -> bool:
                return any(
                    (progress["announced"], progress["epoch"]) == ([0, 1], 0)
                    and far <= progress["position"] <= 200
                    for progress in reported_again(dataset, daemon)
                )

            until(reported, "the next daemon gets both epochs and the position")
            break
        got += [int(sample) for batch in batches for sample in batch]
        assert got == sampler.order().tolist()
        dataset.reader.close()


def reported_again(dataset: Any, daemon: Daemon) -> list[dict[str, Any]]:
    dataset.reached(*dataset.reader._reader._announced.position)
    return [progress for progress in daemon.status()["progress"] if progress["announced"]]


@pytest.mark.check
def test_a_worker_killed_in_mid_epoch(file: str, daemon: Daemon) -> None:
    dataset, sampler = cases.Raw(file), EpochSampler(200, seed=0)
    loader = loader_over(dataset, sampler, num_workers=2)
    batches = iter(loader)
    got = [int(sample) for sample in next(batches)]
    for worker in multiprocessing.active_children():
        worker.kill()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        for batch in batches:
            got += [int(sample) for sample in batch]
    assert len(got) < 200
    del batches
    state, got_before = loader.state_dict(), list(got)
    loader.load_state_dict(state)
    got = got_before + [int(sample) for batch in loader for sample in batch]
    assert got == sampler.order().tolist()
    loader._plan._announcer.settle()
    until(lambda: daemon.status()["progress"][0]["epoch"] == 1, "the epoch's end")
    dataset.reader.close()


def train(dataset: Any, rank: int, reported: Any, go_on: Any, read_first: bool) -> None:
    """One rank; its dataset comes from the parent."""
    if read_first:
        assert dataset[rank] == b"%d" % rank
    loader = loader_over(dataset, EpochSampler(200, seed=0, rank=rank, world_size=2))
    batches = iter(loader)
    got = [int(sample) for sample in next(batches)]
    loader._plan._announcer.settle()
    reported.set()
    go_on.wait()
    got += [int(sample) for batch in batches for sample in batch]
    assert got == loader.sampler.order().tolist()


@pytest.mark.check
@pytest.mark.parametrize(
    ("start_method", "read_first"), [("fork", False), ("fork", True), ("spawn", False)]
)
def test_ranks_of_one_parent_are_separate_jobs(
    file: str, daemon: Daemon, start_method: str, read_first: bool
) -> None:
    context = multiprocessing.get_context(start_method)
    dataset = cases.Raw(file)
    assert dataset[0] == b"0"
    reported, go_on = [context.Event(), context.Event()], context.Event()
    ranks = [
        context.Process(target=train, args=(dataset, rank, reported[rank], go_on, read_first))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        assert all(event.wait(60) for event in reported)
        jobs = [progress for progress in daemon.status()["progress"] if progress["announced"]]
        assert [progress["count"] for progress in jobs] == [100, 100]
        assert jobs[0]["job"] != jobs[1]["job"]
    finally:
        go_on.set()  # or they would be waited for when the tests end
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    dataset.reader.close()
