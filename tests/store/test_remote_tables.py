"""Remote record files as tables, as the tasks of Spark and Ray read them: by ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from origins import HttpOrigin

import ffserve
from ffserve import example
from ffserve.errors import ChecksumError, FormatError, MissingFile, ReadError, UsageError

pa = pytest.importorskip("pyarrow")

from ffserve.arrow import hive, table_reading  # noqa: E402 - without pyarrow it cannot be imported
from ffserve.arrow.table_reading import FilePiece, RecordTable  # noqa: E402

CASES: list[tuple[str, dict[str, Any]]] = [
    ("tfrecord", {}), ("tfrecord", {"compression": "gzip"}), ("ffrecord", {}),
    ("recordio", {"max_chunk_size": 5_000}),
]  # fmt: skip


def encoded(count: int, first: int = 0) -> list[bytes]:
    return [example.encode({"id": first + k, "noise": b"%d" % k * 40}) for k in range(count)]


def written(path: Path, format: str, records: list[bytes], **options: Any) -> bytes:
    with ffserve.create(path, format=format, **options) as writer:
        for record in records:
            writer.write(record)
    return path.read_bytes()


def ids(table: RecordTable, piece: FilePiece) -> list[int]:
    schema = pa.schema([("id", pa.int64())])
    return [
        k for batch in table_reading.batches(table, piece, schema) for k in batch["id"].to_pylist()
    ]


@pytest.mark.check
@pytest.mark.parametrize("case", range(len(CASES)))
def test_pieces_of_remote_files_hold_each_record_once(
    server: HttpOrigin, tmp_path: Path, case: int
) -> None:
    format, options = CASES[case]
    name = f"a.{format}"
    url = server.put(name, written(tmp_path / name, format, encoded(30_000), **options))
    [file] = hive.find_files([url])
    assert (file.path, file.size) == (url, len(server.files[name]))
    assert table_reading.format_of([file]) == format
    table = RecordTable(format, "Example", server="auto")
    assert table_reading.infer_schema(table, [file], ratio=0.01).names == ["id", "noise"]
    pieces = list(table_reading.pieces_of(table, file, file.size // 3))
    # To divide a TFRecord file, all of it would have to be read.
    assert (len(pieces) > 1) == (format != "tfrecord")
    assert sum(table_reading.count(table, piece) for piece in pieces) == 30_000
    server.sent.clear()
    assert [k for piece in pieces for k in ids(table, piece)] == list(range(30_000))
    if format != "recordio":  # its chunks are so small that their headers are all of it
        assert server.total <= file.size + len(pieces) * (600 << 10)
    assert not (tmp_path / "store").exists()


def test_partitions_of_a_remote_directory(server: HttpOrigin, tmp_path: Path) -> None:
    names = ("k=1/l=a/x.ffr", "k=1/l=b/x.ffr", "k=2/l=a/x.ffr", "_temporary/x.ffr", "k=1/_SUCCESS")
    for first, name in enumerate(names):
        (tmp_path / "table" / name).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path / "table" / name, "ffrecord", encoded(3, 10 * first))
    url = f"local://{tmp_path}/table"
    found = hive.find_files([url])
    assert [file.path for file in found] == [f"{url}/{name}" for name in names[:3]]
    assert found[1].values == (("k", "1"), ("l", "b"))
    assert [f.values for f in hive.find_files([f"{url}/k=*"])] == [
        (("l", "a"),), (("l", "b"),), (("l", "a"),)
    ]  # fmt: skip
    assert hive.find_files([f"{url}/k=1"], base=url) == found[:2]
    table = RecordTable("ffrecord", "Example")
    schema = table_reading.infer_schema(table, found)
    assert schema.names == ["id", "noise", "k", "l"]
    [piece] = table_reading.pieces_of(table, found[1], 1 << 30)
    [batch] = table_reading.batches(table, piece, schema)
    assert batch["id"].to_pylist() == [10, 11, 12] and batch["l"].to_pylist() == ["b"] * 3
    with pytest.raises(MissingFile):
        hive.find_files([f"{url}/none"])
    with pytest.raises(MissingFile, match="no file matches"):
        hive.find_files([f"{url}/z=*"])
    with pytest.raises(UsageError, match="is not a parent"):
        hive.find_files([url], base=f"{url}/k=1")
    written(tmp_path / "table" / "k=1" / "y.ffr", "ffrecord", encoded(1))
    with pytest.raises(FormatError, match="differ"):
        hive.find_files([url])


def test_damaged_and_replaced_remote_files(
    server: HttpOrigin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = bytearray(written(tmp_path / "a", "tfrecord", encoded(1000)))
    content[len(content) // 2] ^= 1
    [file] = hive.find_files([server.put("a.tfrecord", bytes(content))])
    piece = FilePiece(file.path, file.size, version=file.version)
    with pytest.raises(ChecksumError, match="sample 5"):
        ids(RecordTable("tfrecord", "Example"), piece)
    skipped: list[int] = []
    table = RecordTable("tfrecord", "Example", skip=True)
    schema = pa.schema([("id", pa.int64())])
    assert sum(len(b) for b in table_reading.batches(table, piece, schema, skipped.append)) == 999
    assert skipped == [1]
    caplog.clear()
    with pytest.raises(FormatError, match="the file is tfrecord, not ffrecord"):
        ids(RecordTable("ffrecord", "Example"), piece)
    # A task reads what was planned, whatever was put there since.
    for format in ("tfrecord", "ffrecord"):
        url = server.put("b", written(tmp_path / "b", format, encoded(100)))
        [file] = hive.find_files([url])
        server.put("b", written(tmp_path / "c", format, encoded(100, 500)))
        with pytest.raises(ReadError, match="changed at the origin"):
            ids(RecordTable(format, "Example"), FilePiece(url, file.size, version=file.version))
