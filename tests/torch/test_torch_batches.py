"""Batches of small samples, of subsets and of concatenations, through workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transfer_cases as cases
from daemon import damage, serving
from transfer_cases import alike

import ffserve
from ffserve.torch import ConcatDataset, DataLoader, RawDataset, Subset
from ffserve.torch.dataset import has_batch_method

COUNT = 60


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as daemon:
        yield daemon.socket


@pytest.fixture(params=["in memory", "alone"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server: str) -> str:
    """Where samples come from; those of `written` are in the daemon's memory."""
    socket = server if request.param == "in memory" else "/nonexistent"
    monkeypatch.setenv("FFSERVE_SOCKET", socket)
    return socket


def written(path: Path, size: int, odd: int = 0) -> str:
    """Write a file whose samples repeat their index; all have one size, except one if odd."""
    with ffserve.create(path, n=COUNT) as writer:
        for k in range(COUNT):
            writer.write(np.full(size + odd * (k == 25), k, np.uint8))
    with ffserve.open(str(path)) as reader:
        reader.read(range(COUNT))
    return str(path)


def rows_of(loader: Any) -> list[list[list[int]]]:
    return [batch.tolist() for batch in loader]


# Samples that `process` gets


@pytest.mark.check
@pytest.mark.parametrize(("size", "odd"), [(4096, 0), (48, 0), (100, 0), (4096, 16), (4096, 5)])
@pytest.mark.parametrize("keeps", [False, True])
def test_small_samples_arrive_and_stay_as_they_were(
    source: str, tmp_path: Path, size: int, odd: int, keeps: bool
) -> None:
    dataset = cases.Placed(written(tmp_path / "a.ffr", size, odd), keeps=keeps)
    batches = rows_of(DataLoader(dataset, batch_size=6, num_workers=1, bundle=4))
    rows = [row for batch in batches for row in batch]
    assert [(index, first) for index, first, _ in rows] == [(k, k) for k in range(COUNT)]
    assert all(intact for *_, intact in rows), "what a data set keeps is its own"


def test_a_damaged_sample_fails_its_batch_only(source: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.ffr", 4096)
    other = str(tmp_path / "b.ffr")
    Path(other).write_bytes(Path(path).read_bytes())
    damage(other, 16)
    batches = iter(DataLoader(cases.Indexed(other), batch_size=6, num_workers=1, bundle=4))
    got = [next(batches).tolist() for _ in range(2)]
    with pytest.raises(ffserve.ChecksumError) as caught:
        next(batches)
    assert (caught.value.path, caught.value.index) == (other, 16)
    got += rows_of(batches)
    whole = [[[k, k] for k in range(i, i + 6)] for i in range(0, COUNT, 6)]
    assert got == whole[:2] + whole[3:]


# What collation is given


def test_whatever_torch_collates_arrives_as_from_torch(source: str, tmp_path: Path) -> None:
    dataset = cases.Various(written(tmp_path / "a.ffr", 128))
    ours = list(DataLoader(dataset, batch_size=7, num_workers=2, bundle=3))
    theirs = list(torch.utils.data.DataLoader(dataset, batch_size=7))
    assert len(ours) == len(theirs) == 9
    assert all(map(alike, ours, theirs))


def test_tensors_that_do_not_fit_together_fail_as_in_torch(source: str, tmp_path: Path) -> None:
    dataset = cases.Uneven(written(tmp_path / "a.ffr", 64))
    batches = iter(DataLoader(dataset, batch_size=15, num_workers=1, bundle=4))
    assert next(batches).shape == (15, 64)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="equal size"):
            next(batches)
    last = next(batches)
    assert last.shape == (15, 62) and last[:, 0].tolist() == list(range(45, 60))
    assert next(batches, None) is None


# Subsets


def subsets(dataset: Any) -> dict[str, tuple[Any, list[int]]]:
    order = [*range(50, 10, -3), 7, 7, 0]
    plain = torch.utils.data.Subset
    first, _ = torch.utils.data.random_split(
        dataset, [40, COUNT - 40], torch.Generator().manual_seed(1)
    )
    return {
        "ours": (Subset(dataset, order), order),
        "torch's": (plain(dataset, order), order),
        "of a subset": (Subset(plain(dataset, order), [3, 1, 16, 15]), [41, 47, 0, 7]),
        "an array": (Subset(dataset, np.array(order)), order),
        "a tensor": (plain(dataset, torch.tensor(order)), order),
        "a range": (Subset(dataset, range(59, 30, -1)), list(range(59, 30, -1))),
        "split": (first, list(first.indices)),
    }


@pytest.mark.check
@pytest.mark.parametrize("kind", [*subsets(range(COUNT))])
def test_subsets_arrive_as_they_were_asked_for(source: str, tmp_path: Path, kind: str) -> None:
    subset, expected = subsets(cases.Indexed(written(tmp_path / "a.ffr", 4096)))[kind]
    for options in ({"bundle": 3}, {"bundle": 1}, {}):
        batches = DataLoader(subset, batch_size=4, num_workers=1, **options)
        rows = [row for batch in rows_of(batches) for row in batch]
        assert rows == [[index, index] for index in expected]


def test_raw_samples_of_a_subset(source: str, tmp_path: Path) -> None:
    subset, expected = subsets(RawDataset(written(tmp_path / "a.ffr", 4096)))["torch's"]
    batches = DataLoader(subset, batch_size=4, num_workers=1, bundle=2, collate_fn=list)
    assert [int(array[0]) for batch in batches for array in batch] == expected


def test_small_batches_of_subsets_and_concatenations_share_messages(tmp_path: Path) -> None:
    dataset = cases.Indexed(written(tmp_path / "a.ffr", 4096))
    plain = torch.utils.data
    for whole in (
        dataset,
        Subset(dataset, range(COUNT)),
        plain.Subset(dataset, range(COUNT)),
        ConcatDataset([Subset(dataset, range(20)), Subset(dataset, range(20, COUNT))]),
        plain.ConcatDataset([dataset]),
    ):
        batches = DataLoader(whole, batch_size=2, num_workers=1)
        batches._inner, receiver = batches._build_inner()
        assert batches._inner.sampler.message_batches == 7
        del receiver


@pytest.mark.check
def test_an_index_that_a_subset_lacks_fails_its_batch_only(source: str, tmp_path: Path) -> None:
    dataset = cases.Indexed(written(tmp_path / "a.ffr", 4096))
    batches = iter(
        DataLoader(Subset(dataset, [5, COUNT, 9]), sampler=[0, 1, 2], num_workers=1, bundle=3)
    )
    assert next(batches).tolist() == [[5, 5]]
    with pytest.raises(ffserve.SampleIndexError) as caught:
        next(batches)
    assert caught.value.index == COUNT
    assert next(batches).tolist() == [[9, 9]]
    assert next(batches, None) is None


class Other(Subset):
    """A subset that reads other samples than its indices."""

    def __getitem__(self, indices: Any) -> Any:
        return self.dataset[[COUNT - 1 - i for i in indices]]


def test_a_users_subset_class_is_asked(source: str, tmp_path: Path) -> None:
    other = Other(cases.Indexed(written(tmp_path / "a.ffr", 4096)), range(COUNT))
    batches = DataLoader(other, batch_size=6, num_workers=1, bundle=4)
    rows = [row for batch in rows_of(batches) for row in batch]
    assert rows == [[k, k] for k in range(COUNT - 1, -1, -1)]


# Concatenations


class Odd(cases.Indexed):
    """Fails for sample 17; returns one tensor too many with sample 33."""

    def process(self, indices: Any, data: list[Any]) -> Any:
        if 17 in indices:
            raise KeyError("seventeen")
        made = super().process(indices, data)
        return made + made[:1] if 33 in indices else made


def concatenations(first: Any, second: Any) -> dict[str, Any]:
    plain = torch.utils.data
    return {
        "two": ConcatDataset([first, second]),
        "of subsets": ConcatDataset(
            [Subset(first, range(59, -1, -2)), plain.Subset(second, [7, 7, 0]), Subset(first, [])]
        ),
        "a subset of": Subset(ConcatDataset([first, second]), range(119, 0, -3)),
        "torch's subset of": plain.Subset(ConcatDataset([second, first]), range(40, 80)),
        "of concatenations": ConcatDataset(
            [ConcatDataset([first, Subset(second, [3])]), second, ConcatDataset([first])]
        ),
        "of itself": ConcatDataset([first, first]),
    }


@pytest.mark.check
@pytest.mark.parametrize("kind", [*concatenations(cases.Made(COUNT), cases.Made(COUNT))])
@pytest.mark.parametrize("size", [4096, 20_480])
def test_concatenations_arrive_as_they_were_asked_for(
    source: str, tmp_path: Path, kind: str, size: int
) -> None:
    first = cases.Indexed(written(tmp_path / "a.ffr", size))
    second = cases.Indexed(written(tmp_path / "b.ffr", 48, odd=1))
    whole = concatenations(first, second)[kind]
    order = np.random.default_rng(3).permutation(len(whole)).tolist()
    expected = [sample.tolist() for sample in whole.__getitems__(order)]
    for options in ({"bundle": 3}, {"bundle": 1}, {}):
        batches = DataLoader(whole, batch_size=7, num_workers=1, sampler=order, **options)
        assert [row for batch in rows_of(batches) for row in batch] == expected


def test_an_error_in_a_part_fails_its_batch_only(source: str, tmp_path: Path) -> None:
    first = Odd(written(tmp_path / "a.ffr", 4096))
    second = cases.Indexed(written(tmp_path / "b.ffr", 4096))
    whole = ConcatDataset([first, second])
    order = [0, 60, 16, 76, 17, 77, 18, 78, 33, 93, 34, 94, 119, 59, 119, 58]
    batches = iter(DataLoader(whole, batch_size=2, sampler=order, num_workers=1, bundle=8))
    assert next(batches)[:, 0].tolist() == [0, 0]
    assert next(batches)[:, 0].tolist() == [16, 16]
    with pytest.raises(KeyError, match="seventeen"):
        next(batches)
    assert next(batches)[:, 0].tolist() == [18, 18]
    with pytest.raises(ffserve.UsageError, match=r"dataset 0 .Odd. answered 1 indices with 2"):
        next(batches)
    assert rows_of(batches) == [[[34, 34]] * 2, [[59, 59]] * 2, [[59, 59], [58, 58]]]


def test_an_index_that_a_concatenation_lacks_fails_its_batch_only(
    source: str, tmp_path: Path
) -> None:
    dataset = cases.Indexed(written(tmp_path / "a.ffr", 4096))
    whole = ConcatDataset([dataset, dataset])
    batches = iter(DataLoader(whole, sampler=[5, 2 * COUNT, -1], num_workers=1, bundle=3))
    assert next(batches).tolist() == [[5, 5]]
    with pytest.raises(ffserve.SampleIndexError):
        next(batches)
    assert next(batches).tolist() == [[59, 59]]


def test_a_part_of_a_users_class_is_asked(source: str, tmp_path: Path) -> None:
    dataset = cases.Indexed(written(tmp_path / "a.ffr", 4096))
    whole = ConcatDataset([dataset, Other(dataset, range(COUNT))])
    rows = [
        row for batch in rows_of(DataLoader(whole, batch_size=6, num_workers=1)) for row in batch
    ]
    assert rows == [[k, k] for k in [*range(COUNT), *range(COUNT - 1, -1, -1)]]


def test_torchs_concatenation_is_asked_once_a_batch(source: str, tmp_path: Path) -> None:
    plain = torch.utils.data.ConcatDataset
    path = written(tmp_path / "a.ffr", 4096)
    whole = plain([cases.Indexed(path), plain([Subset(cases.Indexed(path), [3, 9])])])
    order = [61, 5, 59, 60, -1, -62]
    expected = [[9, 9], [5, 5], [59, 59], [3, 3], [9, 9], [0, 0]]
    for options in ({"num_workers": 1}, {"num_workers": 0}, {"threads": 2}):
        batches = DataLoader(whole, batch_size=4, sampler=order, **options)
        assert [row for batch in rows_of(batches) for row in batch] == expected
    calls = plain([cases.Calls(path), cases.Calls(path)])
    batch = next(iter(DataLoader(calls, batch_size=8, num_workers=0)))
    assert batch[:, 1].tolist() == [8] * 8
    other = plain([cases.Indexed(path), torch.utils.data.TensorDataset(torch.zeros(2, 2))])
    assert not has_batch_method(other)


@pytest.mark.check
def test_an_index_that_torchs_concatenation_lacks_is_an_index_error(
    source: str, tmp_path: Path
) -> None:
    whole = torch.utils.data.ConcatDataset([cases.Indexed(written(tmp_path / "a.ffr", 4096))])
    batches = iter(DataLoader(whole, sampler=[5, COUNT, 7], num_workers=1, bundle=3))
    assert next(batches).tolist() == [[5, 5]]
    with pytest.raises(IndexError):
        next(batches)
    assert next(batches).tolist() == [[7, 7]]
