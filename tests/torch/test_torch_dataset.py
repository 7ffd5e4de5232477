"""Datasets over real files, in this process and in workers, and their combinations."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_cases as cases
from daemon import damage
from hypothesis import given
from hypothesis import strategies as st

import ffserve
from ffserve.compat.ffrecord import FileReader, FileWriter
from ffserve.errors import ChecksumError, SampleIndexError, UsageError
from ffserve.torch import (
    ConcatDataset,
    DataLoader,
    Dataset,
    EpochSampler,
    RawDataset,
    ReaderRegistry,
    Subset,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "ffrecord"


def written(path: Path, samples: list[bytes]) -> str:
    with FileWriter(path, len(samples)) as writer:
        for sample in samples:
            writer.write_one(sample)
    return str(path)


@pytest.fixture
def samples() -> list[bytes]:
    return [pickle.dumps((i, "x" * (i * 37 % 501))) for i in range(40)]


@pytest.fixture
def file(tmp_path: Path, samples: list[bytes]) -> str:
    return written(tmp_path / "train.ffr", samples)


def keys(dataset: Any, indices: Any) -> list[int]:
    return [sample[0] for sample in dataset[indices]]


# One dataset


def test_a_dataset_reads_and_processes_a_list(file: str, samples: list[bytes]) -> None:
    dataset = cases.Raw(file)
    assert len(dataset) == dataset.reader.n == 40
    assert dataset.fnames == file
    assert dataset.reader.check_data
    assert not cases.Raw([file], check_data=False).reader.check_data
    wanted = [3, 39, 0, 3]
    assert dataset[wanted] == [samples[i] for i in wanted]
    assert dataset[tuple(wanted)] == dataset.__getitems__(wanted) == dataset[wanted]
    assert dataset[[]] == []
    assert dataset[7] == dataset[np.int64(7)] == samples[7]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("suffix", ["tfrecord", "recordio"])
def test_a_dataset_of_another_format(
    tmp_path: Path, samples: list[bytes], suffix: str, num_workers: int
) -> None:
    for start in (0, 25):
        with ffserve.create(tmp_path / f"{start}.{suffix}") as writer:
            for each in samples[start : start + 25]:
                writer.write(each)
    for names in (
        str(tmp_path),
        str(tmp_path / f"*.{suffix}"),
        [tmp_path / f"{start}.{suffix}" for start in (0, 25)],
    ):
        dataset = cases.Raw(names)
        assert dataset.ffreaders() == [dataset.reader]
        assert dataset.reader.n == 40 and len(dataset.reader.fnames) == 2
        dataset.reader.validate()
        assert dataset[[39, 0]] == [samples[39], samples[0]]
        assert pickle.loads(pickle.dumps(dataset))[3] == samples[3]
    sampler = EpochSampler(40, seed=0)
    loader = DataLoader(
        dataset, batch_size=7, sampler=sampler, num_workers=num_workers, collate_fn=cases.keep_list
    )
    got = [sample for batch in loader for sample in batch]
    assert got == [samples[i] for i in sampler.order()]
    # If a directory contains .ffr files, these are the data set, as in ffrecord.
    written(tmp_path / "a.ffr", samples[:3])
    assert len(cases.Raw(tmp_path)) == 3
    (tmp_path / f"0.{suffix}").write_bytes(b"y")
    with pytest.raises(ffserve.FormatError):
        dataset.reader.validate()


@pytest.mark.parametrize("name", ["nowhere.ffr", "nowhere.tfrecord", "*.ffr", "x.recordio", "."])
def test_a_dataset_of_missing_files_names_them(tmp_path: Path, name: str) -> None:
    with pytest.raises(ffserve.FFServeError, match=r"[Nn]o such file|no file|contains no"):
        cases.Raw(tmp_path / name)


def test_a_dataset_refuses_invalid_indices(file: str) -> None:
    dataset = cases.Raw(file)
    for wrong in (slice(2), "3", 1.5, {1, 2}, np.arange(3)):
        with pytest.raises(TypeError, match="list or tuple"):
            dataset[wrong]
    for outside in (40, -1, [0, 40]):
        with pytest.raises(IndexError) as caught:
            dataset[outside]
        assert isinstance(caught.value, SampleIndexError)


def test_a_dataset_without_process_is_refused(file: str) -> None:
    with pytest.raises(NotImplementedError, match="process"):
        Dataset(file)[0]


def test_a_raw_dataset_gives_the_payloads(file: str, samples: list[bytes]) -> None:
    dataset = RawDataset(file)
    assert [bytes(sample) for sample in dataset[[3, 0, 3]]] == [samples[i] for i in (3, 0, 3)]
    assert bytes(dataset[7]) == samples[7]


def test_golden_files_read_as_the_original_wrote_them() -> None:
    manifest = json.loads((GOLDEN / "manifest.json").read_text())["files"]
    dataset = cases.Raw(str(GOLDEN / "plain.ffr"))
    assert [len(sample) for sample in dataset[list(range(len(dataset)))]] == (
        manifest["plain.ffr"]["sizes"]
    )
    assert len(cases.Raw(str(GOLDEN / "multi"))) == sum(
        len(cases.Raw(str(part))) for part in (GOLDEN / "multi").glob("*.ffr")
    )


@pytest.mark.check
@pytest.mark.parametrize("start_method", [None, "fork", "spawn", "forkserver"])
def test_workers_read_after_the_parent_did(
    file: str, samples: list[bytes], start_method: str | None
) -> None:
    dataset = cases.Raw(file)
    assert dataset[[5]] == [samples[5]]
    loader = DataLoader(
        dataset,
        batch_size=16,
        sampler=EpochSampler(40, seed=1),
        num_workers=0 if start_method is None else 2,
        multiprocessing_context=start_method,
        collate_fn=cases.keep_list,
    )
    got = [sample for batch in loader for sample in batch]
    assert got == [samples[i] for i in loader.sampler.order()]
    assert dataset[[6]] == [samples[6]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_sample_is_named_from_a_worker(
    file: str, samples: list[bytes], num_workers: int
) -> None:
    damage(file, 9)
    loader = DataLoader(
        cases.Raw(file), batch_size=4, num_workers=num_workers, collate_fn=cases.keep_list
    )
    batches = iter(loader)
    assert next(batches) == samples[:4]
    assert next(batches) == samples[4:8]
    with pytest.raises(ChecksumError) as caught:
        next(batches)
    assert (caught.value.path, caught.value.index) == (file, 9)
    assert [sample for batch in batches for sample in batch] == samples[12:], "only it is lost"


def test_datasets_pickle_and_copy(file: str, samples: list[bytes]) -> None:
    dataset = ConcatDataset([cases.Raw(file), Subset(cases.Raw(file), [7, 8])])
    for other in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert other[[1, 41]] == [samples[1], samples[8]]


# Registries


class TwoReaders(ReaderRegistry):
    def __init__(self, file: str) -> None:
        self.first = FileReader(file)
        self.second = FileReader(file)
        self.name = "two"


class Nested(Dataset):
    def __init__(self, file: str) -> None:
        self.another = TwoReaders(file)
        self.reader1 = FileReader(file)
        self.reader2 = FileReader(file)


def test_a_registry_knows_the_readers_below_it(file: str) -> None:
    nested = Nested(file)
    another = nested.another
    assert nested.ffreaders() == [nested.reader1, nested.reader2, another.first, another.second]
    assert len(Subset(nested, []).ffreaders()) == 4
    parts: list[Any] = [cases.Raw(file), Subset(cases.Raw(file), [0])]
    assert ConcatDataset(parts).ffreaders() == [parts[0].reader, parts[1].dataset.reader]
    assert len(ReaderRegistry().ffreaders()) == 0
    del nested.another, nested.reader1
    nested.reader2 = None  # type: ignore[assignment]
    assert nested.ffreaders() == []


# Subset and ConcatDataset


def test_a_subset_keeps_order_and_repeats() -> None:
    for indices in ([4, 4, 1], np.array([4, 4, 1]), torch.tensor([4, 4, 1]), range(4, 1, -1)):
        subset = Subset(cases.Numbers(6), indices)
        assert len(subset) == 3
        assert keys(subset, [2, 0, 0]) == [int(indices[i]) for i in (2, 0, 0)]
        assert subset[1][0] == indices[1]
    assert keys(Subset(Subset(cases.Numbers(6), [5, 4, 3]), [2, 0]), [0, 1]) == [3, 5]
    with pytest.raises(IndexError):
        Subset(cases.Numbers(6), [1])[[1]]


class Counting(cases.Numbers):
    """Numbers that start at ``base`` and count how often they are asked."""

    def __init__(self, n: int, base: int) -> None:
        super().__init__(n)
        self.base = base
        self.calls = 0

    def __getitem__(self, indices: Any) -> Any:
        self.calls += 1
        assert all(0 <= i < self.n for i in indices)
        return [[self.base + i] for i in indices]


@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5), choices=st.data())
def test_a_concatenation_is_indexed_like_one_list(sizes: list[int], choices: Any) -> None:
    parts = [Counting(size, 100 * k) for k, size in enumerate(sizes)]
    plain = [100 * k + i for k, size in enumerate(sizes) for i in range(size)]
    both = ConcatDataset(iter(parts))
    assert len(both) == len(plain)
    assert both.cumulative_sizes == np.cumsum(sizes).tolist()
    valid = st.integers(-len(plain), len(plain) - 1) if plain else st.just(0)
    indices = choices.draw(st.lists(valid, max_size=12 if plain else 0))
    answer = both[indices]
    assert [sample[0] for sample in answer] == [plain[i] for i in indices]
    assert len({id(sample) for sample in answer}) == len(indices), "a repeat is its own sample"
    touched = {plain[i] // 100 for i in indices}
    assert [part.calls for part in parts] == [int(k in touched) for k in range(len(parts))]


def test_a_concatenation_refuses_invalid_indices_and_parts() -> None:
    both = ConcatDataset([cases.Numbers(2), cases.Numbers(3)])
    assert both[4][0] == 2
    assert both[-5][0] == 0
    with pytest.raises(IndexError, match="5 samples"):
        both[[0, 5]]
    with pytest.raises(ValueError, match="before the first"):
        both[[-6]]
    with pytest.raises(AssertionError, match="empty"):
        ConcatDataset([])
    with pytest.raises(AssertionError, match="Single"):
        ConcatDataset([cases.Single(3)])

    class Short(cases.Numbers):
        def __getitem__(self, indices: Any) -> Any:
            return super().__getitem__(indices)[1:]

    with pytest.raises(UsageError, match=r"dataset 1 .* 2 indices with 1 samples"):
        ConcatDataset([cases.Numbers(2), Short(3)])[[3, 4]]


def test_concatenations_load_in_workers() -> None:
    both = ConcatDataset([cases.Numbers(7), Subset(cases.Numbers(9), range(8, 0, -1))])
    for loader_class in (DataLoader, torch.utils.data.DataLoader):
        loader = loader_class(both, batch_size=5, num_workers=1)
        got = [i for batch in loader for i in batch[0].tolist()]
        assert got == [*range(7), *range(8, 0, -1)]


def test_the_sum_of_two_datasets_is_indexed_by_a_list(
    file: str, tmp_path: Path, samples: list[bytes]
) -> None:
    other = written(tmp_path / "other.ffr", [b"other %d" % i for i in range(5)])
    first, second = RawDataset(file), RawDataset(other)
    both = first + second
    assert type(both) is ConcatDataset and len(both) == len(samples) + 5
    assert [bytes(one) for one in both[[40, 3, 44, 3]]] == [
        b"other 0", samples[3], b"other 4", samples[3],
    ]  # fmt: skip
    assert bytes(both[-1]) == b"other 4"
    three = first + second + Subset(first, [7])
    assert bytes(three[[45]][0]) == samples[7]
    loader = DataLoader(second + second, batch_size=3, collate_fn=list, num_workers=1)
    assert [bytes(one) for batch in loader for one in batch] == [
        b"other %d" % (i % 5) for i in range(10)
    ]


def test_a_sum_with_a_dataset_of_torch_is_that_of_torch(file: str) -> None:
    numbers = torch.utils.data.TensorDataset(torch.arange(3))
    both = RawDataset(file) + numbers
    assert type(both) is torch.utils.data.ConcatDataset
    assert both[41] == (torch.tensor(1),)


def test_ffserve_itself_does_not_import_torch() -> None:
    script = "import sys, ffserve.order, ffserve; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )


def test_without_pytorch_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['torch'] = None; import ffserve.torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ") and "pip install 'ffserve[torch]'" in last


def test_every_reader_says_where_samples_come_from(file: str) -> None:
    """`dataset.reader`, which the documents ask to look at, had no `source`."""
    with ffserve.open(file) as reader:
        expected = reader.source
    assert Dataset(file).reader.source == FileReader(file).source == expected
    assert FileReader.for_files([file]).source == expected
