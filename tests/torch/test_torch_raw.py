"""Raw messages, tensors that stay where they were read, and the options of torch's loader for
both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transfer_cases as cases
from daemon import damage, serving

import ffserve
from ffserve.torch import DataLoader, Dataset, EpochSampler, RawDataset, Subset
from ffserve.torch.dataset import is_raw
from ffserve.torch.messages.segments import SMALLEST_SIZE
from ffserve.torch.messages.transfer import RawBatches

COUNT = 90
EVEN_SIZE = 20_480


@pytest.fixture(scope="module")
def samples() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    sizes = [*random.integers(0, 4000, COUNT - 3), 0, 0, 70_000]
    return [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, samples: list[np.ndarray]) -> str:
    return written(tmp_path_factory.mktemp("handover") / "a.ffr", samples)


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("handover") / "even.ffr"
    return written(path, [np.full(EVEN_SIZE, k, np.uint8) for k in range(COUNT)])


def written(path: Path, samples: list[np.ndarray]) -> str:
    with ffserve.create(path, n=len(samples)) as writer:
        for sample in samples:
            writer.write(sample)
    return str(path)


@pytest.fixture(params=["daemon", "alone"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "alone":
        monkeypatch.setenv("FFSERVE_SOCKET", "/nonexistent")
        yield "alone"
        return
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        yield "daemon"


def raw_loader(file: str, **options: Any) -> DataLoader:
    given: dict[str, Any] = {"batch_size": 7, "num_workers": 1, "collate_fn": list}
    return DataLoader(RawDataset(file), **{**given, **options})


def went_raw(iterator: Any) -> bool:
    return isinstance(iterator._answers, RawBatches)


# Raw samples


@pytest.mark.check
@pytest.mark.parametrize(
    "order",
    [
        {},
        {"sampler": EpochSampler(COUNT, seed=2), "drop_last": True},
        {"sampler": [5, 5, 88, 3, 5] * 5},
        {"batch_size": 1, "batch_sampler": [[4, 4], [], [87, 88], [0, 1, 2, 3], [89]] * 3},
    ],
)
def test_raw_samples_arrive_as_they_were_asked_for(
    source: str, file: str, samples: list[np.ndarray], order: dict[str, Any]
) -> None:
    batches = raw_loader(file, bundle=3, **order)
    asked = [list(batch) for batch in batches.batch_sampler]
    iterator = iter(batches)
    kept = []
    for number, indices in enumerate(asked):
        batch = next(iterator)
        assert went_raw(iterator) == ("batch_sampler" not in order)
        assert type(batch) is list and len(batch) == len(indices)
        for index, array in zip(indices, batch, strict=True):
            assert type(array) is np.ndarray and array.flags.writeable and array.flags.c_contiguous
            assert np.array_equal(array, samples[index])
        if number % 2 and batch:
            batch[0][:] = 1  # it is this array's alone, also if it was asked for twice
        else:
            kept.append((indices, batch))
    assert next(iterator, None) is None
    for indices, batch in kept:
        assert all(np.array_equal(a, samples[i]) for i, a in zip(indices, batch, strict=True))


def test_samples_of_one_size_and_empty_ones(tmp_path: Path, even: str) -> None:
    for path, size in ((even, EVEN_SIZE), (written(tmp_path / "e.ffr", [np.empty(0)] * 20), 0)):
        iterator = iter(raw_loader(path, bundle=2))
        index = 0
        for batch in iterator:
            assert went_raw(iterator)
            for array in batch:
                assert array.shape == (size,) and (array == index).all()
                index += 1
        assert index == (COUNT if size else 20)


def test_raw_samples_cross_without_shared_memory(file: str, samples: list[np.ndarray]) -> None:
    iterator = iter(raw_loader(file, bundle=4, worker_init_fn=cases.no_more_memory))
    arrays = [array for batch in iterator for array in batch]
    assert went_raw(iterator)
    assert all(map(np.array_equal, arrays, samples)) and len(arrays) == COUNT
    assert all(array.flags.writeable for array in arrays)


@pytest.mark.parametrize("bundle", [1, 4])
def test_a_damaged_sample_fails_its_batch_only(
    tmp_path: Path, samples: list[np.ndarray], bundle: int
) -> None:
    path = written(tmp_path / "a.ffr", samples)
    damage(path, 16)
    iterator = iter(raw_loader(path, bundle=bundle))
    got: list[np.ndarray] = [array for _ in range(2) for array in next(iterator)]
    with pytest.raises(ffserve.ChecksumError) as caught:
        next(iterator)
    assert (caught.value.path, caught.value.index) == (path, 16)
    got += [array for batch in iterator for array in batch]
    assert all(map(np.array_equal, got, samples[:14] + samples[21:]))


class Own(RawDataset):
    """A dataset with its own __getitem__."""

    def __getitem__(self, indices: Any) -> Any:
        return self.reader.read(indices)


class Halved(RawDataset):
    def process(self, indices: Any, data: list[Any]) -> Any:
        return data[::2]


def test_only_a_raw_dataset_that_overrides_nothing_is_raw(file: str) -> None:
    plain = RawDataset(file)
    assert is_raw(plain)
    for other in (
        cases.Raw(file),
        Dataset(file),
        Own(file),
        Halved(file),
        Subset(plain, [1]),
        cases.Made(3),
        [1],
    ):
        assert not is_raw(other)
    plain.process = lambda indices, data: data[1:]  # type: ignore[method-assign]
    assert not is_raw(plain)
    (batch,) = DataLoader(plain, batch_size=90, num_workers=1, collate_fn=list)
    assert len(batch) == 89


@pytest.mark.parametrize("kind", [RawDataset, cases.Raw, Own])
@pytest.mark.parametrize("collate", [list, cases.keep_list])
def test_raw_samples_are_the_same_on_both_paths(
    file: str, samples: list[np.ndarray], kind: Any, collate: Any
) -> None:
    iterator = iter(DataLoader(kind(file), batch_size=7, num_workers=1, collate_fn=collate))
    arrays = []
    for batch in iterator:
        assert went_raw(iterator) == (kind is RawDataset and collate is list)
        arrays += batch
    assert all(map(np.array_equal, arrays, samples)) and len(arrays) == COUNT


def test_process_may_return_fewer_samples(file: str, samples: list[np.ndarray]) -> None:
    batches = DataLoader(
        Halved(file), batch_size=6, num_workers=1, collate_fn=cases.keep_list, bundle=4
    )
    arrays = [array for batch in batches for array in batch]
    assert all(map(np.array_equal, arrays, samples[::2])) and len(arrays) == COUNT // 2


def test_a_raw_batch_that_is_kept_holds_only_its_message(even: str) -> None:
    batches = raw_loader(even, bundle=2)
    kept = list(batches)
    assert [int(array[0]) for batch in kept for array in batch] == list(range(COUNT))
    assert batches._receiver is not None
    (lent,) = batches._receiver._lent
    assert len(lent) == 7, "thirteen batches, two a message"
    del kept[1:]
    assert len(lent) == 1
    del kept
    assert not lent


# Tensors


def test_tensors_that_lie_side_by_side_are_collated_where_they_were_read(even: str) -> None:
    batches = DataLoader(cases.Tensors(even), batch_size=10, num_workers=1, bundle=3)
    index = 0
    for batch in batches:
        assert type(batch) is torch.Tensor and batch.shape == (10, EVEN_SIZE)
        assert batch.is_contiguous() and (batch[:, 0] == batch[:, -1]).all()
        assert batch[:, 0].tolist() == list(range(index, index + 10))
        batch += 1
        index += 10
    assert index == COUNT
    assert batches._receiver is not None
    (segments,) = batches._receiver._segments
    message = 30 * EVEN_SIZE
    assert max(segment.size for segment in segments.values()) < message * 9 // 8 + SMALLEST_SIZE


def test_a_batch_does_not_change_with_samples_that_a_dataset_keeps(even: str) -> None:
    for bundle in (1, 3):
        batches = DataLoader(cases.Keeping(even), batch_size=10, num_workers=1, bundle=bundle)
        firsts = [column.tolist() for batch in batches for column in (batch[:, 0], batch[:, -1])]
        assert firsts == [list(range(k, k + 10)) for k in range(0, COUNT, 10) for _ in range(2)]


# torch's options


def test_with_in_order_false_a_quick_workers_batches_come_first(tmp_path: Path, even: str) -> None:
    path = str(tmp_path / "go")
    iterator = iter(
        raw_loader(
            even, num_workers=2, bundle=2, in_order=False, worker_init_fn=cases.Waiting(path, 0)
        )
    )
    got = [int(array[0]) for _ in range(4) for array in next(iterator)]
    assert not set(got) & set(range(28)) or min(got) > 0, "worker 0 has the first message"
    assert 0 not in got
    Path(path).touch()
    got += [int(array[0]) for batch in iterator for array in batch]
    assert sorted(got) == list(range(COUNT))


def test_a_worker_that_takes_too_long_is_an_error(tmp_path: Path, even: str) -> None:
    path = str(tmp_path / "go")
    iterator = iter(raw_loader(even, bundle=2, timeout=0.2, worker_init_fn=cases.Waiting(path, 0)))
    try:
        with pytest.raises(RuntimeError, match=r"timed out after 0\.4 seconds"):
            next(iterator)
    finally:
        Path(path).touch()


def test_a_timeout_that_is_not_reached_changes_nothing(even: str) -> None:
    batches = raw_loader(even, bundle=2, timeout=60)
    got = [int(array[0]) for batch in batches for array in batch]
    assert got == list(range(COUNT))


@pytest.mark.parametrize("raw", [False, True])
def test_pinned_batches(even: str, raw: bool) -> None:
    cuda = torch.cuda.is_available()
    options: dict[str, Any] = {"batch_size": 10, "num_workers": 2, "bundle": 2, "pin_memory": True}
    if raw:
        batches = DataLoader(RawDataset(even), collate_fn=list, **options)
    else:
        batches = DataLoader(cases.Tensors(even), **options)
    if cuda:
        got = list(batches)
    else:
        with pytest.warns(UserWarning, match="pin_memory"):  # torch goes on without
            got = list(batches)
    if raw:
        assert [int(array[0]) for batch in got for array in batch] == list(range(COUNT))
        assert all(array.flags.writeable for batch in got for array in batch)
    else:
        assert [int(first) for batch in got for first in batch[:, 0]] == list(range(COUNT))
        assert all(batch.is_pinned() == cuda for batch in got)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_batch_is_read_into_a_tensor(
    source: str, file: str, samples: list[np.ndarray], pinned: bool
) -> None:
    if pinned and not torch.cuda.is_available():
        pytest.skip("memory is pinned for CUDA")
    chosen = [89, 3, 3, 50]
    size = sum(len(samples[index]) for index in chosen)
    tensor = torch.zeros(size + 9, dtype=torch.uint8, pin_memory=pinned)
    with ffserve.open(file) as reader:
        batch = reader.read_batch(chosen, out=tensor.numpy())
        assert [bytes(sample) for sample in batch] == [bytes(samples[i]) for i in chosen]
        assert bytes(tensor[:size].numpy()) == b"".join(bytes(samples[i]) for i in chosen)
        assert not tensor[size:].any()
        assert batch.buffer.ctypes.data == tensor.data_ptr()
        with pytest.raises(ffserve.UsageError, match="out has"):
            reader.read_batch(chosen, out=tensor[: size - 1].numpy())
        with pytest.raises(ffserve.UsageError, match=r"tensor\.numpy"):
            reader.read_batch(chosen, out=tensor)
