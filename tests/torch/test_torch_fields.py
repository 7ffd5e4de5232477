"""Tar files in torch's datasets and loaders: fields of a batch, prepared samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from daemon import Daemon
from tar_files import numbered, write

from ffserve.errors import UsageError
from ffserve.torch import DataLoader, Dataset, EpochSampler, RawDataset, Subset


class Numbers(Dataset):
    """The number of each sample by its fields."""

    def process(self, indices: Sequence[int], data: Any) -> Any:
        """Return (index, bytes of the picture, class)."""
        rows = zip(indices, data["jpg"], data["cls"], strict=True)
        return [(k, len(jpg), -1 if cls is None else int(bytes(cls))) for k, jpg, cls in rows]


class Prepared(Dataset):
    """The same, prepared."""

    calls = 0

    def prepare(self, indices: Sequence[int], data: Any) -> Any:
        """Return tensors."""
        Prepared.calls += len(indices)
        return [torch.tensor(list(bytes(each))) for each in data["json"]]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "x.tar", numbered(200, irregular=True))


@pytest.fixture(autouse=True)
def socket(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_by_field(path: str, workers: int) -> None:
    dataset = Numbers(path, fields=["jpg", "cls"])
    sampler = EpochSampler(len(dataset), seed=3)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=workers)
    found = {}
    for indices, sizes, classes in loader:
        rows = zip(indices.tolist(), sizes.tolist(), classes.tolist(), strict=True)
        found |= {k: (size, kind) for k, size, kind in rows}
    samples = numbered(200, irregular=True)
    assert found == {
        k: (len(each["jpg"]), int(each.get("cls", b"-1"))) for k, each in enumerate(samples)
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_raw_samples(path: str, workers: int) -> None:
    samples = numbered(200, irregular=True)
    one = RawDataset(path, fields=["jpg"])
    loader = DataLoader(one, batch_size=32, collate_fn=list, num_workers=workers)
    flat = [bytes(each) for batch in loader for each in batch]
    assert flat == [each["jpg"] for each in samples]
    several = RawDataset(path)
    loader = DataLoader(several, batch_size=32, collate_fn=list, num_workers=workers)
    rows = [each for batch in loader for each in batch]
    assert [
        {name: bytes(value) for name, value in each.items() if value is not None} for each in rows
    ] == samples
    assert bytes(Subset(several, [5, 4])[0]["jpg"]) == samples[5]["jpg"]


def test_prepared_samples_are_shared(path: str) -> None:
    Prepared.calls = 0
    for fields in (["json", "jpg"], ["json", "jpg"], ["json", "cls"]):
        dataset = Prepared(path, fields=fields)
        assert [each.tolist() for each in dataset[list(range(200))]] == [[123, 125]] * 200
        assert dataset[7].tolist() == [123, 125]
    # Others fields are another preparation; one of some hundred samples is compared.
    assert 400 <= Prepared.calls < 450


def test_features_of_several_fields(path: str) -> None:
    with pytest.raises(UsageError, match="features cannot be decoded"):
        Dataset(path, features={"x": int})
