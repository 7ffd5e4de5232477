"""``Dataset(features=…)``: columns of tf.train.Examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ffserve
from ffserve.errors import FormatError, UsageError

torch = pytest.importorskip("torch")
example = pytest.importorskip("ffserve.example")

from ffserve.torch import DataLoader, Dataset, EpochSampler, RawDataset  # noqa: E402

FEATURES = {"image": bytes, "label": int, "weight": float, "boxes": list[float], "tags": list[str]}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    with ffserve.create(tmp_path / "train.tfrecord") as writer:
        for k in range(30):
            writer.write(
                example.encode(
                    {
                        "image": bytes([k]) * k,
                        "label": -k,
                        "weight": k / 4,
                        "boxes": np.arange(k % 3, dtype=np.float32),
                        "tags": ["é"] * (k % 2),
                        "unused": b"x" * 100,
                    }
                )
            )
    return tmp_path / "train.tfrecord"


def test_samples_are_dicts_of_features(records: Path) -> None:
    dataset = Dataset(records, features=FEATURES)
    assert len(dataset) == 30
    [last, first] = dataset[[29, 0]]
    assert last["image"] == bytes([29]) * 29 and last["label"] == -29 and last["weight"] == 7.25
    assert last["boxes"].tolist() == [0.0, 1.0] and last["tags"] == ["é"]
    assert first["image"] == b"" and len(first["boxes"]) == 0 and first["tags"] == []
    assert type(last["label"]) is int and dataset[4]["label"] == -4
    assert list(last) == list(FEATURES)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_a_column_for_each_feature(records: Path, workers: int) -> None:
    dataset = Dataset(records, features={"image": bytes, "label": int, "weight": float})
    sampler = EpochSampler(30, seed=1)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler, num_workers=workers)
    labels = []
    for batch in loader:
        assert batch["label"].dtype == torch.int64 and batch["weight"].dtype == torch.float32
        assert [len(each) for each in batch["image"]] == (-batch["label"]).tolist()
        labels += (-batch["label"]).tolist()
    assert labels == list(sampler)


class Scaled(Dataset):
    def process(self, indices: Sequence[int], data: Any) -> Any:
        assert data["label"].dtype == np.int64 and data["weight"].dtype == np.float32
        return list(data["label"] * 2)


class Prepared(Dataset):
    def prepare(self, indices: Sequence[int], data: Any) -> Any:
        return [len(image) for image in data["image"]]


def test_process_and_prepare_get_columns(records: Path) -> None:
    assert Scaled(records, features=FEATURES)[[3, 5]] == [-6, -10]
    assert Prepared(records, features=FEATURES)[[3, 5]] == [3, 5]


def test_what_does_not_fit_is_an_error(records: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"label": bytes}, r"sample 7: feature 'label' holds integers, not bytes"),
        ({"boxes": float}, r"feature 'boxes' holds several values.*list\[float\]"),
        ({"nothing": int}, r"sample 7: .* no feature 'nothing'; it has 'boxes': float, 'image'"),
    ]
    for features, text in cases:
        with pytest.raises(FormatError, match=text) as caught:
            Dataset(records, features=features)[[7, 8]]
        assert caught.value.path == str(records)
    with ffserve.create(tmp_path / "other.tfrecord") as writer:
        writer.write(b"\xff\xff\xff")
        writer.write(example.encode({"text": b"\xff"}))
    with pytest.raises(FormatError, match=r"sample 0: the record is not a tf\.train\.Example"):
        Dataset(tmp_path / "other.tfrecord", features={"text": str})[[0]]
    with pytest.raises(FormatError, match="feature 'text' is not UTF-8"):
        Dataset(tmp_path / "other.tfrecord", features={"text": str})[[1]]
    cases = [({}, "features is empty"), ({"x": dict}, "feature 'x' cannot be")]
    for features, text in cases:
        with pytest.raises(UsageError, match=text):
            Dataset(records, features=features)


def test_a_raw_dataset_with_features_has_dicts(records: Path) -> None:
    dataset = RawDataset(records, features={"label": int})
    assert dataset[[2]] == [{"label": -2}]
