"""ffserve.hf under the real datasets package."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import ffserve
import ffserve.hf
from ffserve import example
from ffserve.errors import FormatError, UsageError

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

    back = ffserve.hf.dataset(paths, decode=decode, num_shards=3, server="off")
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


def test_columns_of_examples_are_decoded_as_arrow(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    paths = [tmp_path / "a.ffr", tmp_path / "b.tfrecord", tmp_path / "c.tfrecord.gz"]
    for k, path in enumerate(paths):
        ffserve.hf.write(data.shard(3, k, contiguous=True), path)
    schema = pa.schema(
        [("text", pa.string()), ("scores", pa.list_(pa.float32())), ("id", pa.int64())]
    )
    back = ffserve.hf.dataset(paths, schema=schema, num_shards=3, server="off")
    assert back.num_shards == 3 and list(back.features) == ["text", "scores", "id"]
    for _ in range(2):
        assert list(back) == ROWS
    assert [row["id"] for row in back.shard(3, 1)] == list(range(10, 20))
    tables = list(back.with_format("arrow").iter(8))
    assert all(isinstance(table, pa.Table) and table.schema == schema for table in tables)
    assert sum(map(len, tables)) == 30
    words = ffserve.hf.dataset(paths, schema=pa.schema([("text", pa.string())]), server="off")
    assert [row["text"] for row in words.shuffle(seed=1, buffer_size=5)] != [
        row["text"] for row in words
    ]
    with pytest.raises(UsageError, match="both decode and schema"):
        ffserve.hf.dataset(paths, decode=example.decode, schema=schema)
    wrong = ffserve.hf.dataset(paths[1], schema=pa.schema([("text", pa.int64())]), server="off")
    with pytest.raises(FormatError, match=r"b\.tfrecord: row 0, column 'text'"):
        list(wrong)


def test_one_file_was_one_shard_that_two_workers_could_not_share(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    ffserve.hf.write(data, tmp_path / "a.ffr")
    decode = {"decode": lambda sample: {"id": int(example.decode(sample)["id"][0])}}
    schema = {"schema": pa.schema([("id", pa.int64())])}
    for options in (decode, schema):
        for count in (4, 64):
            found = ffserve.hf.dataset(
                tmp_path / "a.ffr", num_shards=count, server="off", **options
            )
            assert found.num_shards == count
            halves = [[row["id"] for row in found.shard(2, k)] for k in range(2)]
            assert halves[0] + halves[1] == list(range(30)) and all(map(len, halves))
        assert ffserve.hf.dataset(tmp_path / "a.ffr", **options).num_shards >= 2
    ffserve.hf.write(data, tmp_path / "b.tfrecord.gz")
    both = ffserve.hf.dataset([tmp_path / "a.ffr", tmp_path / "b.tfrecord.gz"], num_shards=6)
    assert both.num_shards == 4
