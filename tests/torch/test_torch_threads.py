"""The loader without worker processes: threads make batches ahead of the loop."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_cases
import transfer_cases as cases
from daemon import serving, until

import ffserve
from ffserve.errors import ChecksumError, UsageError
from ffserve.torch import DataLoader, EpochSampler


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    until(lambda: not loader_threads(), "the threads end")


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("ffserve-loader")]


class Gated(cases.Made):
    """Records the batches that are begun; all but the first wait."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.begun: list[int] = []
        self.gate = threading.Event()

    def __getitem__(self, indices: Any) -> list[Any]:
        self.begun += indices
        if indices != [0]:
            assert self.gate.wait(30)
        return [np.array(indices)]


@pytest.mark.check
@pytest.mark.parametrize("with_daemon", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
def test_batches_arrive_in_order_and_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_daemon: bool, threads: int
) -> None:
    path = tmp_path / "a.ffr"
    with ffserve.create(path, n=100) as writer:
        for k in range(100):
            writer.write(np.full(3000 + k, k, np.uint8))

    def check() -> None:
        sampler = EpochSampler(100, seed=1)
        batches = DataLoader(
            cases.Raw(str(path)),
            batch_size=7,
            sampler=sampler,
            collate_fn=cases.keep_list,
            threads=threads,
        )
        arrays = [array for batch in batches for array in batch]
        assert [int(array[0]) for array in arrays] == sampler.order().tolist()
        assert all((array == array[0]).all() for array in arrays)
        assert all(len(array) == 3000 + int(array[0]) for array in arrays)
        assert all(array.flags.writeable for array in arrays)

    if not with_daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", "/nonexistent")
        check()
        return
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        check()


def test_threads_work_a_bounded_number_of_batches_ahead() -> None:
    dataset = Gated(40)
    batches = iter(DataLoader(dataset, collate_fn=cases.first_only, threads=2))
    assert next(batches).tolist() == [0]
    until(lambda: len(dataset.begun) == 3, "both threads have begun a batch")
    dataset.gate.set()
    until(lambda: len(dataset.begun) == 5, "two batches a thread are begun ahead")
    assert next(batches).tolist() == [1]
    until(lambda: len(dataset.begun) == 6, "the next one is begun")
    assert [int(batch[0]) for batch in batches] == list(range(2, 40))


def test_an_error_is_raised_for_its_batch_and_the_loop_can_continue() -> None:
    batches = iter(DataLoader(torch_cases.Damaged(20), batch_size=4, threads=3))
    assert [next(batches)[0].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ChecksumError) as caught:
        next(batches)
    assert caught.value.index == torch_cases.DAMAGED_INDEX
    assert [batch[0].tolist() for batch in batches] == [[12, 13, 14, 15], [16, 17, 18, 19]]
    del caught


@pytest.mark.check
def test_a_loop_that_is_left_ends_the_threads() -> None:
    dataset = Gated(1000)
    batches = iter(DataLoader(dataset, collate_fn=cases.first_only, threads=2))
    next(batches)
    assert loader_threads()
    dataset.gate.set()
    del batches
    gc.collect()
    until(lambda: not loader_threads(), "the threads end")
    assert len(dataset.begun) <= 6, "what had not begun was called off"


def test_the_position_counts_batches_of_the_loop() -> None:
    def fresh() -> tuple[EpochSampler, DataLoader]:
        sampler = EpochSampler(30, seed=5)
        return sampler, DataLoader(
            cases.Made(30), batch_size=3, sampler=sampler, collate_fn=cases.keep_list, threads=2
        )

    sampler, batches = fresh()
    iterator = iter(batches)
    got = [int(array[0]) for _ in range(4) for array in next(iterator)]
    state = batches.state_dict()
    _, restored = fresh()
    restored.load_state_dict(state)
    got += [int(array[0]) for batch in restored for array in batch]
    assert got == sampler.order().tolist()
    del iterator


@pytest.mark.parametrize("options", [{"threads": -1}, {"threads": 2, "num_workers": 1}])
def test_threads_exclude_workers_and_are_not_negative(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="threads"):
        DataLoader(cases.Made(3), **options)
