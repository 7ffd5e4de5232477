"""The loader with real workers: batches, errors, and positions to resume from."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_cases as cases
from daemon import DEADLINE_S, until
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import ffserve
from ffserve.errors import ChecksumError, UsageError
from ffserve.torch import DataLoader, EpochSampler

N = 50


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    gc.collect()  # a caught error's traceback holds the iterator that raised it
    for child in multiprocessing.active_children():
        child.join(DEADLINE_S)
    assert not multiprocessing.active_children()


def indices_of(batch: Any) -> list[int]:
    first = batch[0]
    return first.tolist() if isinstance(first, torch.Tensor) else [sample[0] for sample in batch]


def drained(loader: Any) -> list[list[int]]:
    return [indices_of(batch) for batch in loader]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# What it hands out


def test_workers_refused_a_dataset_without_a_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ffserve.create(tmp_path / "a.ffr") as writer:
        for k in range(6):
            writer.write(bytes([k]))
    for num_workers in (0, 1):
        loader = DataLoader(
            cases.Unsized(tmp_path / "a.ffr"),
            batch_sampler=[[5, 1], [0]],
            num_workers=num_workers,
            collate_fn=cases.keep_list,
        )
        assert list(loader) == [[b"\5", b"\1"], [b"\0"]]
    assert "no attribute 'reader'" in caplog.text  # nothing is announced
    caplog.clear()


@pytest.mark.check
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_those_of_torch(num_workers: int, shuffle: bool) -> None:
    options: dict[str, Any] = {"batch_size": 8, "shuffle": shuffle}
    expected = torch.utils.data.DataLoader(
        cases.Single(N), generator=seeded(5), **options, num_workers=0
    )
    loader = DataLoader(cases.Numbers(N), generator=seeded(5), **options, num_workers=num_workers)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert len(loader) == len(expected) == 7
    for _ in range(2):
        for batch, expected_batch in zip(loader, expected, strict=True):
            assert torch.equal(batch[0], expected_batch[0])
            assert torch.equal(batch[1], expected_batch[1])
            assert batch[2].tolist() == [len(batch[0])] * len(batch[0]), "one call a batch"


@pytest.mark.check
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_any_start_method(start_method: str) -> None:
    loader = DataLoader(
        cases.Damaged(18),
        batch_size=6,
        num_workers=1,
        multiprocessing_context=start_method,
        collate_fn=cases.keep_list,
        worker_init_fn=cases.shift_by_hundred,
    )
    batches = iter(loader)
    first = next(batches)
    assert [sample[:3] for sample in first] == [(i, 3 * i + 100, 6) for i in range(6)]
    with pytest.raises(ChecksumError) as caught:
        next(batches)
    assert caught.value.index == cases.DAMAGED_INDEX
    assert indices_of(next(batches)) == list(range(12, 18))
    assert next(batches, None) is None


@pytest.mark.check
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("by_list", [None, True])
def test_a_dataset_that_knows_only_lists(num_workers: int, by_list: bool | None) -> None:
    loader = DataLoader(cases.ListOnly(10), batch_size=4, num_workers=num_workers, by_list=by_list)
    assert [(b[0].tolist(), b[1].tolist()) for b in loader] == [
        ([0, 1, 2, 3], [4] * 4),
        ([4, 5, 6, 7], [4] * 4),
        ([8, 9], [2] * 2),
    ]


def test_a_dataset_for_single_indices_is_asked_as_torch_asks() -> None:
    # A list would index this one as well, but give columns.
    loader = DataLoader(TensorDataset(torch.arange(10), torch.arange(10) * 2), batch_size=5)
    assert [batch[1].tolist() for batch in loader] == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]


def test_a_dataset_that_refuses_index_and_list_raises_the_first_error() -> None:
    class Broken:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: Any) -> Any:
            raise TypeError(f"no colour {index}")

    with pytest.raises(TypeError, match="no colour 0"):
        next(iter(DataLoader(Broken(), batch_size=2)))


def test_torch_loader_asks_our_dataset_once_a_batch() -> None:
    loader = torch.utils.data.DataLoader(cases.Numbers(10), batch_size=4)
    assert [batch[2].tolist() for batch in loader] == [[4] * 4, [4] * 4, [2] * 2]
    half = torch.utils.data.Subset(cases.Numbers(10), [9, 1, 5])
    (batch,) = torch.utils.data.DataLoader(half, batch_size=3)
    assert (batch[0].tolist(), batch[2].tolist()) == ([9, 1, 5], [3] * 3)


def test_samplers_and_batch_samplers_of_the_users() -> None:
    dataset = cases.Numbers(12)
    assert drained(DataLoader(dataset, sampler=[3, 1, 3], batch_size=2)) == [[3, 1], [3]]
    assert drained(DataLoader(dataset, sampler=[3, 1, 3], batch_size=2, drop_last=True)) == [[3, 1]]
    loader = DataLoader(dataset, batch_sampler=cases.EvensThenOdds(12))
    assert len(loader) == 4
    assert drained(loader) == [[0, 2, 4], [6, 8, 10], [1, 3, 5], [7, 9, 11]]
    loader.set_step(3)
    assert drained(loader) == [[7, 9, 11]]


def test_without_batches_a_dataset_gets_a_list_of_one() -> None:
    loader = DataLoader(cases.Numbers(3), batch_size=None, collate_fn=cases.keep_list)
    assert [[sample[0] for sample in samples] for samples in loader] == [[0], [1], [2]]
    lists = DataLoader(
        cases.Numbers(5),
        batch_size=None,
        sampler=BatchSampler(range(5), 2, False),
        collate_fn=cases.keep_list,
    )
    assert [[s[0] for s in samples] for samples in lists] == [[0, 1], [2, 3], [4]]
    singles = DataLoader(cases.Single(3), batch_size=None)
    assert list(singles) == [[0, 0], [1, 3], [2, 6]]


def test_an_iterable_dataset_passes_through() -> None:
    loader = DataLoader(cases.Stream(), batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for call in (loader.state_dict, lambda: loader.set_step(1)):
        with pytest.raises(UsageError, match="IterableDataset"):
            call()


def test_persistent_workers_stay_and_follow_every_change() -> None:
    loader = DataLoader(
        cases.Numbers(12),
        batch_size=4,
        sampler=EpochSampler(12, seed=1),
        num_workers=1,
        persistent_workers=True,
    )
    pids = set()
    for epoch, step in enumerate((0, 1, 0)):
        loader.sampler.set_epoch(epoch)
        loader.set_step(step)
        batches = list(loader)
        pids |= {int(pid) for batch in batches for pid in batch[3]}
        got = [i for batch in batches for i in indices_of(batch)]
        assert got == loader.sampler.order().tolist()[4 * step :]
    assert len(pids) == 1
    del loader


def test_leaving_an_iteration_early_ends_its_workers() -> None:
    for batch in DataLoader(cases.Numbers(N), batch_size=2, num_workers=1):
        assert indices_of(batch) == [0, 1]
        break


# set_step


@pytest.mark.check
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_set_step_skips_the_first_batches(num_workers: int, batch_size: int, shuffle: bool) -> None:
    whole = DataLoader(
        cases.Numbers(25), batch_size=batch_size, shuffle=shuffle, generator=seeded(12345)
    )
    loader = DataLoader(
        cases.Numbers(25),
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        generator=seeded(12345),
    )
    loader.set_step(5)
    assert len(loader) == len(whole) - 5
    assert drained(loader) == drained(whole)[5:]
    assert len(drained(loader)) == len(whole) - 5, "it stays in force"
    loader.set_step(0)
    assert len(loader) == len(whole) == len(drained(loader))


@pytest.mark.check
@pytest.mark.parametrize("step", [-1, 3, 4])
def test_a_step_outside_the_epoch_is_refused(step: int) -> None:
    loader = DataLoader(cases.Numbers(12), batch_size=4)
    for kind in (UsageError, AssertionError):  # the original's
        with pytest.raises(kind, match="3 batches"):
            loader.set_step(step)
    assert len(loader) == 3


def test_a_loader_that_is_not_skippable_says_so() -> None:
    loader = DataLoader(cases.Numbers(12), batch_size=4, skippable=False)
    for kind in (UsageError, AssertionError):  # the original's
        with pytest.raises(kind, match="skippable"):
            loader.set_step(1)
    assert len(drained(loader)) == 3


# Errors


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_arrives_with_all_its_attributes(num_workers: int) -> None:
    loader = DataLoader(cases.Damaged(20), batch_size=4, num_workers=num_workers)
    got: list[int] = []
    batches = iter(loader)
    with pytest.raises(ChecksumError) as caught:
        for batch in batches:
            got += indices_of(batch)
    assert got == list(range(8))
    assert drained(batches) == [[12, 13, 14, 15], [16, 17, 18, 19]], "the others can be had"
    error = caught.value
    assert (error.path, error.index, error.offset) == ("/data/cut.ffr", cases.DAMAGED_INDEX, 4711)
    assert error.hint == "copy the file again"
    assert str(error) == (
        "/data/cut.ffr, sample 9, byte 4711: stored 00000001, found 00000002 (copy the file again)"
    )
    if num_workers:
        assert "torch_cases.py" in str(error.__cause__)
        assert "DataLoader worker" in str(error.__cause__)


def test_other_errors_arrive_as_torch_sends_them() -> None:
    with pytest.raises(KeyError, match="colour"):
        next(iter(DataLoader(cases.Foreign(4), num_workers=1)))
    with pytest.raises(RuntimeError, match="1 is not 2"):
        next(iter(DataLoader(cases.Stubborn(4), num_workers=1)))


@pytest.mark.check
@pytest.mark.parametrize("persistent", [False, True])
def test_killing_a_worker_gives_torchs_own_error(persistent: bool) -> None:
    # In a process of its own: torch raises the error from a handler of SIGCHLD, wherever the main
    # thread happens to be, and again when the interpreter ends.
    script = f"""
        import os, torch_cases
        from ffserve.torch import DataLoader
        options = dict(
            batch_size=4,
            num_workers=1,
            persistent_workers={persistent},
            collate_fn=torch_cases.keep_list,  # a tensor's memory is fetched from the worker
        )
        try:
            for batch in DataLoader(torch_cases.Suicidal(20), **options):
                print([sample[0] for sample in batch], flush=True)
        except RuntimeError as error:
            os.write(1, str(error).encode())
            os._exit(0)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    *batches, error = result.stdout.strip().splitlines()
    assert batches == ["[0, 1, 2, 3]", "[4, 5, 6, 7]"][: len(batches)]
    assert re.search(r"DataLoader worker .* (killed by signal: Killed|exited unexpectedly)", error)


# Going on in mid-epoch


@pytest.mark.check
@pytest.mark.parametrize(
    ("workers_before", "workers_after", "batch_size_after"), [(2, 0, 4), (0, 1, 4), (2, 1, 3)]
)
def test_a_restored_loader_hands_out_exactly_the_rest(
    workers_before: int, workers_after: int, batch_size_after: int
) -> None:
    def loader_with(num_workers: int, batch_size: int) -> DataLoader:
        sampler = EpochSampler(N, seed=3, rank=1, world_size=2)
        return DataLoader(
            cases.Numbers(N), batch_size=batch_size, sampler=sampler, num_workers=num_workers
        )

    before = loader_with(workers_before, 4)
    before.sampler.set_epoch(6)
    batches = iter(before)
    used = [i for _ in range(3) for i in indices_of(next(batches))]
    state = json.loads(json.dumps(before.state_dict()))
    del batches

    after = loader_with(workers_after, batch_size_after)
    after.load_state_dict(state)
    assert after.state_dict() == state
    assert after.sampler.epoch == 6
    after.sampler.set_epoch(6)
    rest = [i for batch in drained(after) for i in batch]
    assert used + rest == after.sampler.order().tolist()
    assert after.state_dict()["sampler"]["position"] == N // 2
    # The next epoch is whole again.
    after.sampler.set_epoch(7)
    assert [i for batch in drained(after) for i in batch] == after.sampler.order().tolist()


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    drop_last=st.booleans(),
    stops=st.lists(st.integers(0, 5), min_size=1, max_size=4),
)
def test_any_number_of_restarts_loses_and_repeats_nothing(
    n: int, batch_size: int, drop_last: bool, stops: list[int]
) -> None:
    def fresh() -> DataLoader:
        return DataLoader(
            cases.Numbers(n),
            batch_size=batch_size,
            sampler=EpochSampler(n, seed=1),
            drop_last=drop_last,
        )

    expected = [i for batch in drained(fresh()) for i in batch]
    got: list[int] = []
    loader = fresh()
    for stop in stops:
        state = loader.state_dict()
        loader = fresh()
        loader.load_state_dict(state)
        batches = iter(loader)
        for batch in islice(batches, stop):
            got += indices_of(batch)
    state = loader.state_dict()
    loader = fresh()
    loader.load_state_dict(state)
    got += [i for batch in drained(loader) for i in batch]
    assert got == expected


def test_a_failed_batch_is_not_used_up() -> None:
    loader = DataLoader(
        cases.Damaged(20),
        batch_size=4,
        sampler=EpochSampler(20, seed=0, shuffle=False),
        num_workers=1,
    )
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(ChecksumError):
        next(batches)
    assert loader.state_dict()["sampler"]["position"] == 8
    next(batches)
    assert loader.state_dict()["sampler"]["position"] == 16, "the loop chose to go on behind it"
    assert len(list(batches)) == 1


def test_a_loader_resumes_in_mid_epoch_with_another_world_size() -> None:
    def loader_of(rank: int, world_size: int, num_workers: int = 0) -> DataLoader:
        sampler = EpochSampler(N, seed=3, rank=rank, world_size=world_size)
        sampler.set_epoch(2)
        return DataLoader(cases.Numbers(N), batch_size=4, sampler=sampler, num_workers=num_workers)

    used: list[int] = []
    for rank in range(3):
        loader = loader_of(rank, 3, num_workers=2 if rank == 1 else 0)
        batches = iter(loader)
        used += [i for _ in range(2) for i in indices_of(next(batches))]
        state = loader.state_dict()
        del batches
    assert sorted(used) == sorted(EpochSampler(N, seed=3).order(2)[:24])
    for rank in range(2):
        loader = loader_of(rank, 2)
        loader.set_step(1)  # counts whole epochs only
        loader.load_state_dict(json.loads(json.dumps(state)))
        used += [i for batch in drained(loader) for i in batch]
        assert loader.state_dict()["sampler"] == {
            **state["sampler"],
            "world_size": 2,
            "split_at": 24,
            "position": 13,
        }
        loader.set_step(0)
        loader.sampler.set_epoch(3)
        assert sum(map(len, drained(loader))) == N // 2
    assert sorted(used) == list(range(N))


def test_the_sampler_knows_its_position_with_any_loader() -> None:
    sampler = EpochSampler(20, seed=0)
    loader = DataLoader(cases.Numbers(20), batch_size=4, sampler=sampler, num_workers=2)
    batches = iter(loader)
    next(batches)
    assert sampler.state_dict()["position"] == 4, "handed out, not prefetched"
    sampler.set_epoch(1)
    next(batches)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)
    del batches
    bare = iter(sampler)
    assert [next(bare), next(bare)] == sampler.order()[:2].tolist()
    assert sampler.state_dict()["position"] == 2
    assert len(sampler) == 20


def test_a_restored_position_replaces_set_step() -> None:
    def fresh() -> DataLoader:
        return DataLoader(cases.Numbers(20), batch_size=4, sampler=EpochSampler(20, seed=0))

    loader = fresh()
    loader.set_step(2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert state["sampler"]["position"] == 12
    again = fresh()
    again.set_step(2)
    again.load_state_dict(state)
    assert drained(again) == drained(fresh())[3:]
    assert drained(again) == drained(fresh())[2:]


def sequential(num_workers: int) -> DataLoader:
    return DataLoader(cases.Numbers(20), batch_size=3, num_workers=num_workers)


def random_with_generator(num_workers: int) -> DataLoader:
    return DataLoader(
        cases.Numbers(20),
        batch_size=3,
        shuffle=True,
        generator=seeded(num_workers),
        num_workers=num_workers,
    )


def distributed(num_workers: int) -> DataLoader:
    sampler = DistributedSampler(cases.Numbers(40), num_replicas=2, rank=1, seed=5)
    sampler.set_epoch(3 if num_workers == 0 else 0)
    return DataLoader(cases.Numbers(40), batch_size=3, sampler=sampler, num_workers=num_workers)


def random_without_generator(num_workers: int) -> DataLoader:
    return DataLoader(cases.Numbers(20), batch_size=3, shuffle=True, num_workers=num_workers)


def random_subset(num_workers: int) -> DataLoader:
    sampler = SubsetRandomSampler(list(range(5, 20)), generator=seeded(num_workers))
    return DataLoader(cases.Numbers(20), batch_size=4, sampler=sampler, num_workers=num_workers)


def weighted(num_workers: int) -> DataLoader:
    sampler = WeightedRandomSampler([float(i) for i in range(20)], 30)
    return DataLoader(cases.Numbers(20), batch_size=4, sampler=sampler, num_workers=num_workers)


def batches_in_a_list(num_workers: int) -> DataLoader:
    batches = [[3, 1], [4], [1, 5, 9], [2], [6, 5]]
    return DataLoader(cases.Numbers(20), batch_sampler=batches, num_workers=num_workers)


@pytest.mark.check
@pytest.mark.parametrize(
    "build",
    [
        sequential,
        random_with_generator,
        random_without_generator,
        random_subset,
        weighted,
        distributed,
        batches_in_a_list,
    ],
)
def test_orders_of_torch_that_can_be_computed_again(build: Any) -> None:
    before = build(0)
    list(before)  # a whole epoch first: the generator has moved on
    batches = iter(before)
    next(batches), next(batches)
    state = before.state_dict()
    rest = [indices_of(batch) for batch in batches]
    after = build(1)
    after.load_state_dict(state)
    assert drained(after) == rest
    assert len(drained(after)) == len(after)


@pytest.mark.check
@pytest.mark.parametrize(
    "options",
    [
        {"sampler": RandomSampler(range(20), num_samples=30)},
        {"sampler": RandomSampler(range(20), replacement=True, generator=seeded(1))},
        {"batch_sampler": cases.EvensThenOdds(20)},
    ],
)
def test_orders_that_cannot_be_computed_again_are_refused(options: dict[str, Any]) -> None:
    loader = DataLoader(cases.Numbers(20), **options)
    with pytest.raises(UsageError, match="EpochSampler"):
        loader.state_dict()


def test_states_of_other_loaders_are_refused() -> None:
    def with_sampler(**arguments: Any) -> DataLoader:
        sampler = EpochSampler(**{"n": 20, "seed": 0, **arguments})
        return DataLoader(cases.Numbers(20), sampler=sampler)

    state = with_sampler().state_dict()
    for arguments, named in (
        ({"n": 19}, "n=20"),
        ({"seed": 1}, "seed=0"),
        ({"shuffle": False}, "shuffle=True"),
        ({"window": 4}, "window=None"),
        ({"shared": "sweep"}, "shared=None"),
    ):
        with pytest.raises(UsageError, match=named):
            with_sampler(**arguments).load_state_dict(state)
    with pytest.raises(UsageError, match="counts samples"):
        sequential(0).load_state_dict(state)
    with pytest.raises(UsageError, match="batch_size"):
        DataLoader(cases.Numbers(20), batch_size=3).load_state_dict(
            {**sequential(0).state_dict(), "batch_size": 4}
        )
    with pytest.raises(UsageError, match=r"num_replicas 2, here it is 4 .*EpochSampler"):
        other = DistributedSampler(cases.Numbers(40), num_replicas=4, rank=1, seed=5)
        DataLoader(cases.Numbers(40), batch_size=3, sampler=other).load_state_dict(
            distributed(0).state_dict()
        )
    with pytest.raises(UsageError, match="own_generator True, here it is False"):
        random_without_generator(0).load_state_dict(random_with_generator(0).state_dict())
    with pytest.raises(UsageError, match="another sampler"):
        sequential(0).load_state_dict(random_with_generator(0).state_dict())


def test_batches_out_of_order_have_no_position() -> None:
    loader = DataLoader(
        cases.Numbers(20), sampler=EpochSampler(20, seed=0), num_workers=1, in_order=False
    )
    with pytest.raises(UsageError, match="in_order"):
        loader.state_dict()


@pytest.mark.filterwarnings("ignore:Got pickle error")  # of newer torch
@pytest.mark.parametrize("option", ["collate_fn", "worker_init_fn"])
def test_a_lambda_for_spawned_workers_is_explained(option: str) -> None:
    loader = DataLoader(
        cases.Numbers(4),
        num_workers=1,
        multiprocessing_context="spawn",
        **{option: lambda given: given},
    )
    with pytest.raises(UsageError, match=r"(?i)pickle.*top level of a module"):
        iter(loader)


@pytest.mark.check
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_a_killed_job_lived_on(method: str) -> None:
    """Under forkserver their parent is the server, which lives as long as they do."""
    support = Path(cases.__file__).parent
    paths = os.pathsep.join([str(support), str(support.parents[1])])
    job = subprocess.Popen(
        [sys.executable, str(support / "killed_job.py"), method],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
        text=True,
    )
    assert job.stdout is not None
    pid, *workers = map(int, job.stdout.readline().split())
    assert pid == job.pid and len(workers) == 2
    try:
        job.kill()
        job.wait()
        until(lambda: not any(map(is_alive, workers)), "the workers end")
    finally:
        job.stdout.close()
        for worker in filter(is_alive, workers):
            os.kill(worker, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
