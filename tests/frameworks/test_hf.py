"""ffserve.hf under the real datasets package."""

from __future__ import annotations

from pathlib import Path

import pytest

import ffserve
import ffserve.hf
from ffserve import example

datasets = pytest.importorskip("datasets", reason="datasets is not installed (make interop)")

ROWS = [{"id": k, "text": f"text {k}", "scores": [k / 2, 1.0]} for k in range(30)]


def test_there_and_back(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    paths = [tmp_path / "a.ffr", tmp_path / "b.tfrecord", tmp_path / "c.tfrecord.gz"]
    for k, path in enumerate(paths):
        assert ffserve.hf.write(data.shard(3, k, contiguous=True), path) == 10

    def decode(sample: object) -> dict[str, object]:
        found = example.decode(sample)
        text: list[bytes] = found["text"]  # type: ignore[assignment]
        return {"id": int(found["id"][0]), "text": text[0].decode(), "scores": found["scores"]}

    back = ffserve.hf.dataset(paths, decode=decode, server="off")
    assert back.num_shards == 3
    for _ in range(2):
        found = [{**row, "scores": list(map(float, row["scores"]))} for row in back]
        assert found == ROWS
    some = [row["id"] for row in back.shard(3, 1)]
    assert some == list(range(10, 20))


def test_bytes_as_they_are(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    ffserve.hf.write(data, tmp_path / "a.ffr", encode=lambda row: row["text"].encode())
    found = list(ffserve.hf.dataset(tmp_path / "a.ffr", server="off"))
    assert found == [{"sample": row["text"].encode()} for row in ROWS]
