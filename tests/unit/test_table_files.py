"""Record files as a table, without an engine for tables: pieces, batches, files of a task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from daemon import serving

import ffserve
from ffserve import example
from ffserve.arrow import hive, table_reading
from ffserve.arrow.staged_output import OutputJob
from ffserve.arrow.table_reading import FilePiece, RecordTable
from ffserve.arrow.table_writing import TableOutput, write_task
from ffserve.errors import FFServeError, FormatError, SampleIndexError, UsageError

FORMATS = ("tfrecord", "ffrecord", "recordio")
SCHEMA = pa.schema([("id", pa.int64())])


def write(path: Path, count: int, format: str) -> Path:
    options = {"max_chunk_size": 5_000} if format == "recordio" else {}
    with ffserve.create(path, format=format, **options) as writer:
        for k in range(count):
            writer.write(example.encode({"id": k, "noise": os.urandom(50 + k % 9)}))
    return path


def ids(table: RecordTable, piece: FilePiece, schema: Any = SCHEMA) -> list[int]:
    return [
        k for batch in table_reading.batches(table, piece, schema) for k in batch["id"].to_pylist()
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_pieces_hold_each_record_once(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / f"a.{format}", 500, format)
    [file] = hive.find_files([str(path)])
    table = RecordTable(format, "Example")
    assert table_reading.format_of([file]) == format
    for limit in (10**9, file.size // 4, 1000, 1):
        pieces = list(table_reading.pieces_of(table, file, limit))
        assert (len(pieces) == 1) == (limit >= file.size)
        assert sum(table_reading.count(table, piece) for piece in pieces) == 500
        if limit > 1:
            assert [k for piece in pieces for k in ids(table, piece)] == list(range(500))


@pytest.mark.parametrize("format", ("ffrecord", "recordio"))
def test_a_file_that_lost_records_after_planning_gave_fewer_rows(
    tmp_path: Path, format: str
) -> None:
    path, table = write(tmp_path / f"a.{format}", 500, format), RecordTable(format, "Example")
    [file] = hive.find_files([str(path)])
    last = list(table_reading.pieces_of(table, file, file.size // 4))[-1]
    write(path, 490, format)
    with pytest.raises(SampleIndexError, match="490 samples") as caught:
        ids(table, last)
    assert caught.value.path == str(path)


@pytest.mark.check
@pytest.mark.parametrize("format", FORMATS)
def test_pieces_are_read_through_a_daemon(tmp_path: Path, format: str) -> None:
    path = write(tmp_path / f"a.{format}", 100, format)
    [file] = hive.find_files([str(path)])
    with serving() as daemon:
        table = RecordTable(format, "Example", server=daemon.socket)
        pieces = list(table_reading.pieces_of(table, file, file.size // 2))
        assert [k for piece in pieces for k in ids(table, piece)] == list(range(100))
        with ffserve.open(path, server=daemon.socket) as reader:
            reader.read(range(100))
            assert reader.stats()["misses"] == 0


RECORDS = [example.encode({"id": k, "noise": bytes(size)}) for k, size in enumerate(
    [0, 1, 30, 63, 64, 65, 500, 7, 2000, 1, 0, 3000, 5])]  # fmt: skip


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """A file that is to be read 64 bytes at a time, and has records that are larger."""
    with ffserve.create(tmp_path / "a.tfrecord") as writer:
        for record in RECORDS:
            writer.write(record)
    return tmp_path / "a.tfrecord"


def test_frames_of_all_sizes_are_read_in_order(frames: Path) -> None:
    table = RecordTable("tfrecord", "ByteArray", frames_size=64)
    [file] = hive.find_files([str(frames)])
    schema = pa.schema([("byteArray", pa.binary())])
    for limit in (10**9, 700, 100):
        found = [
            value
            for piece in table_reading.pieces_of(table, file, limit)
            for batch in table_reading.batches(table, piece, schema)
            for value in batch["byteArray"].to_pylist()
        ]
        assert found == RECORDS


def test_damage_at_any_byte_of_frames_is_an_error_after_the_records_before_it(frames: Path) -> None:
    table, intact = RecordTable("tfrecord", "Example", frames_size=64), frames.read_bytes()
    with ffserve.open(frames, server="off") as reader:
        offsets, lengths, _ = reader.tables(0)
        ends = (offsets + lengths + np.uint64(4)).tolist()
    for at in range(0, len(intact), 97):
        whole = next(k for k, end in enumerate(ends) if at < end)
        for cut in (False, True):
            data = bytearray(intact[:at] if cut else intact)
            if not cut:
                data[at] ^= 1
            frames.write_bytes(data)
            found = []
            piece = FilePiece(str(frames), len(data))
            if cut and at in (0, *ends):
                continue  # a file with fewer records
            with pytest.raises(FFServeError, match=r"a\.tfrecord"):
                for batch in table_reading.batches(table, piece, SCHEMA):
                    found += batch["id"].to_pylist()
            assert found == list(range(whole))


def test_a_file_that_shrinks_while_its_frames_are_read_is_an_error(frames: Path) -> None:
    found = []
    with pytest.raises(FFServeError, match=r"a\.tfrecord"):
        piece = FilePiece(str(frames), frames.stat().st_size)
        table = RecordTable("tfrecord", "Example", frames_size=64)
        for batch in table_reading.batches(table, piece, SCHEMA):
            found += batch["id"].to_pylist()
            os.truncate(frames, 100)
    assert found == list(range(len(found))) and 0 < len(found) < len(RECORDS)


def test_batches_of_partition_columns_and_of_none(tmp_path: Path) -> None:
    folder = tmp_path / "k=1"
    folder.mkdir()
    write(folder / "a.tfrecord", 10_000, "tfrecord")
    [file] = hive.find_files([str(tmp_path)])
    [piece] = table_reading.pieces_of(RecordTable("tfrecord", "Example"), file, file.size)
    for skip in (False, True):
        table = RecordTable("tfrecord", "Example", skip=skip)
        for schema in (pa.schema([("k", pa.int32())]), pa.schema([])):
            found = list(table_reading.batches(table, piece, schema))
            assert sum(batch.num_rows for batch in found) == 10_000
            assert {batch.num_columns for batch in found} == {len(schema)}


def test_the_files_of_a_task_come_back(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    job = OutputJob.begin(out, "error", pid=os.getpid())
    batch = pa.record_batch({"id": np.arange(100), "k": np.arange(100) % 3})
    output = TableOutput("tfrecord", "Example", "", ("k",), 20)
    files = write_task(output, job, 7, [batch.slice(0, 60), batch.slice(60)])
    assert {(file.directory, file.count) for file in files} == {
        ("k=0", 20), ("k=0", 14), ("k=1", 20), ("k=1", 13), ("k=2", 20), ("k=2", 13),
    }  # fmt: skip
    job.commit(files)
    table = RecordTable("tfrecord", "Example")
    found = hive.find_files([out])
    schema = table_reading.infer_schema(table, found)
    assert schema == pa.schema([("id", pa.int64()), ("k", pa.int32())])
    pieces = [piece for file in found for piece in table_reading.pieces_of(table, file, file.size)]
    rows = [
        row
        for p in pieces
        for b in table_reading.batches(table, p, schema)
        for row in b.to_pylist()
    ]
    assert sorted(rows, key=lambda row: row["id"]) == batch.to_pylist()


def test_directories_have_the_names_that_were_given(tmp_path: Path) -> None:
    """Spark finds a column in any case, and names directories as partitionBy was told."""
    out = tmp_path / "out"
    job = OutputJob.begin(str(out), "error", pid=os.getpid())
    output = TableOutput(
        "tfrecord", "Example", partition_by=("k", "text"), partition_names=("K", "Text")
    )
    table = pa.record_batch({"id": [1, 2], "k": [1, 2], "text": ["a", "b"]})
    job.commit(write_task(output, job, 0, [table]))
    made = {str(path.parent.relative_to(out)) for path in out.rglob("*.tfrecord")}
    assert made == {"K=1/Text=a", "K=2/Text=b"}


def test_a_task_that_fails_removes_its_files(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    job = OutputJob.begin(out, "error", pid=os.getpid())
    good = pa.record_batch({"id": [1], "k": [1]})
    lists = pa.record_batch({"id": pa.array([[None]], pa.list_(pa.int64())), "k": [1]})
    without = pa.record_batch({"id": [1]})
    output = TableOutput("tfrecord", "Example", partition_by=("k",))
    for bad, error, text in (
        (lists, FormatError, "row 1, column 'id'.*null"),
        (without, UsageError, "partition column 'k' is not a column"),
    ):
        with pytest.raises(error, match=text):
            write_task(output, job, 0, [good, bad])
        assert os.listdir(job.root) == ["owner.json"]
    job.discard()
    assert not os.path.exists(out)
