"""Record files in Ray Data: the same tables, modes and errors as in Spark."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="needs Ray (make ray)")
import pyarrow as pa
from daemon import serving

import ffserve
import ffserve.ray
from ffserve import example
from ffserve.errors import ChecksumError, FFServeError, FormatError, TruncatedError, UsageError
from ffserve.store.public import RemoteDirectory

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

FORMATS = ("tfrecord", "ffrecord", "recordio")


def rows(dataset: Any) -> list[dict[str, Any]]:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else value

    found = [{name: plain(value) for name, value in row.items()} for row in dataset.take_all()]
    return sorted(found, key=repr)


def files(path: str) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in Path(path).rglob("*") if p.is_file())


def data_files(path: str) -> list[str]:
    return [name for name in files(path) if os.path.basename(name).startswith("part-")]


def write(path: Path, *records: Any, format: str = "tfrecord", **options: Any) -> str:
    with ffserve.create(path, format=format, **options) as writer:
        for record in records:
            writer.write(example.encode(record))
    return str(path)


# ---- reading what was written --------------------------------------------------------------------


def test_the_documented_example(ray_data: Any, out: str) -> None:
    pairs = [(8, "bat"), (8, "abc"), (1, "xyz"), (2, "aaa")]
    dataset = ray_data.from_items([{"number": n, "word": w} for n, w in pairs])
    ffserve.ray.write(dataset, out, format="tfrecord", partition_cols=["number"])
    assert sorted(os.listdir(out)) == ["_SUCCESS", "number=1", "number=2", "number=8"]
    again = ffserve.ray.read(out)
    assert again.schema().names == ["word", "number"]
    assert again.schema().types == [pa.string(), pa.int32()]
    assert rows(again) == [{"word": w, "number": n} for w, n in sorted((w, n) for n, w in pairs)]
    assert again.count() == 4
    assert rows(ffserve.ray.read(f"{out}/number=1")) == [{"word": "xyz"}]
    pytest.importorskip("fsspec")
    assert rows(ffserve.ray.read(f"local://{out}")) == rows(again)
    assert rows(ffserve.ray.read(f"{out}/number=1", base_path=out)) == [
        {"word": "xyz", "number": 1}
    ]


def test_all_types(ray_data: Any, out: str) -> None:
    fields: list[tuple[str, Any, Any]] = [
        ("int", pa.int32(), -(2**31)),
        ("long", pa.int64(), 2**63 - 1),
        ("float", pa.float32(), 1.5),
        ("double", pa.float64(), -2.25),
        ("decimal", pa.decimal128(10, 2), Decimal("3.14")),
        ("string", pa.string(), "é"),
        ("binary", pa.binary(), b"\xff\x00"),
        ("longs", pa.list_(pa.int64()), [1, 2, 3]),
        ("doubles", pa.list_(pa.float64()), [0.5]),
        ("strings", pa.list_(pa.string()), ["a", ""]),
    ]
    schema = pa.schema([(name, type) for name, type, _ in fields])
    full = {name: value for name, _, value in fields}
    table = pa.Table.from_pylist([full, dict.fromkeys(full)], schema=schema)
    ffserve.ray.write(ray_data.from_arrow(table), out, format="tfrecord")
    again = ffserve.ray.read(out, schema=schema)
    assert pa.schema(list(zip(again.schema().names, again.schema().types, strict=True))) == schema
    [found, empty] = sorted(rows(again), key=lambda row: row["int"] is None)
    assert found == full
    assert empty == dict.fromkeys(full)


def test_sequence_examples_and_byte_arrays(ray_data: Any, out: str) -> None:
    type = pa.list_(pa.list_(pa.int64()))
    table = pa.table({"steps": pa.array([[[1, 2], [3]], []], type), "id": [0, 1]})
    dataset = ray_data.from_arrow(table)
    with pytest.raises(UsageError, match=r"array of arrays.*SequenceExample"):
        ffserve.ray.write(dataset, out, format="tfrecord")
    ffserve.ray.write(dataset, out, format="tfrecord", record_type="SequenceExample")
    again = ffserve.ray.read(out, record_type="sequenceexample").to_pandas().sort_values("id")
    assert [[list(step) for step in steps] for steps in again["steps"]] == [[[1, 2], [3]], []]
    for format in FORMATS:
        blobs = ray_data.from_items([{"b": b"one", "k": 1}, {"b": b"\xff\x00", "k": 2}])
        there = f"{out}-{format}"
        ffserve.ray.write(
            blobs, there, format=format, record_type="ByteArray", partition_cols=["k"]
        )
        again = ffserve.ray.read(there, record_type="ByteArray")
        assert rows(again) == [
            {"byteArray": b"\xff\x00", "k": 2},
            {"byteArray": b"one", "k": 1},
        ]
        assert again.count() == 2


def test_partition_values_with_escapes_and_nulls(ray_data: Any, out: str) -> None:
    table = pa.table(
        {
            "v": [1, 2, 3],
            "s": ["a/b=c%d", "é ü:'\"*?[x]", None],
            "i": pa.array([7, None, 8], pa.int64()),
            "f": [0.5, 1.5, None],
        }
    )
    dataset = ray_data.from_arrow(table)
    ffserve.ray.write(dataset, out, format="tfrecord", partition_cols=["s", "i", "f"])
    assert "s=__HIVE_DEFAULT_PARTITION__" in os.listdir(out)
    again = ffserve.ray.read(out)
    assert again.schema().types == [pa.int64(), pa.string(), pa.int32(), pa.float64()]
    assert rows(again) == sorted(table.to_pylist(), key=repr)
    typed = pa.schema([("v", pa.int32()), ("i", pa.string())])
    assert rows(ffserve.ray.read(out, schema=typed)) == [
        {"v": 1, "i": "7"},
        {"v": 2, "i": None},
        {"v": 3, "i": "8"},
    ]


def test_columns_that_are_not_wanted_are_not_decoded(ray_data: Any, tmp_path: Path) -> None:
    (tmp_path / "k=1").mkdir()
    write(tmp_path / "k=1" / "a.tfrecord", {"a": 1, "b": "text"}, {"a": 2, "b": 3})
    wrong = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("k", pa.int32())])
    dataset = ffserve.ray.read(tmp_path, schema=wrong)
    with pytest.raises(FormatError, match="column 'b'"):
        dataset.take_all()
    assert rows(dataset.select_columns(["k", "a"])) == [{"k": 1, "a": 1}, {"k": 1, "a": 2}]
    assert rows(ffserve.ray.read(tmp_path, schema=wrong, columns=["a"])) == [{"a": 1}, {"a": 2}]
    assert dataset.count() == 2
    assert rows(ffserve.ray.read(tmp_path, schema=wrong, columns=["k"])) == [{"k": 1}, {"k": 1}]


def test_counts_come_from_the_index(ray_data: Any, tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64())])
    for format in FORMATS:
        path = tmp_path / f"a.{format}"
        write(path, *({"id": k} for k in range(100)), format=format)
        with ffserve.open(path) as reader:
            offsets, lengths, _ = reader.tables(0)
        data = bytearray(path.read_bytes())
        data[int(offsets[50]) + int(lengths[50]) - 1 if format != "recordio" else -1] ^= 1
        path.write_bytes(data)
        dataset = ffserve.ray.read(path, schema=schema)
        assert dataset.count() == 100
        with pytest.raises(FFServeError):  # so count() did not look at the payloads
            dataset.take_all()


def test_inference_looks_at_all_files(ray_data: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.tfrecord", {"x": 1})
    write(tmp_path / "b.tfrecord", {"x": 0.5, "y": [1, 2]})
    whole = ffserve.ray.read(tmp_path)
    assert dict(zip(whole.schema().names, whole.schema().types, strict=True)) == {
        "x": pa.float32(),
        "y": pa.list_(pa.int64()),
    }
    assert ffserve.ray.read(tmp_path, merge_schema=False).schema().names == ["x"]
    write(tmp_path / "c.tfrecord", {"x": "text"})
    with pytest.raises(FormatError, match=r"'x' holds byte strings in row 0, but .*b\.tfrecord"):
        ffserve.ray.read(tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_one_big_file_is_read_by_many_tasks(ray_data: Any, tmp_path: Path, format: str) -> None:
    options = {"max_chunk_size": 10_000} if format == "recordio" else {}
    chance = np.random.default_rng(0)
    records = [{"id": k, "noise": chance.bytes(100 + k % 7)} for k in range(1000)]
    path = write(tmp_path / f"a.{format}", *records, format=format, **options)
    dataset = ffserve.ray.read(path, parallelism=5)

    def task(batch: Any) -> Any:
        import ray

        name = ray.get_runtime_context().get_task_id()
        return {"id": batch["id"], "task": np.full(len(batch["id"]), name)}

    found = dataset.map_batches(task, batch_size=None).to_pandas()
    assert sorted(found["id"]) == list(range(1000))
    assert found["task"].nunique() == 5
    assert dataset.count() == 1000
    assert ffserve.ray.read(path).materialize().num_blocks() == 1


@pytest.mark.parametrize(
    ("format", "compression", "suffix"),
    [
        ("tfrecord", "gzip", ".tfrecord.gz"),
        ("tfrecord", "zlib", ".tfrecord.deflate"),
        ("recordio", "snappy", ".recordio"),
    ],
)
def test_compressed_files(
    ray_data: Any, out: str, format: str, compression: str, suffix: str
) -> None:
    dataset = ray_data.range(50)
    ffserve.ray.write(dataset, out, format=format, compression=compression)
    assert all(name.endswith(suffix) for name in data_files(out))
    assert rows(ffserve.ray.read(out)) == rows(dataset)
    assert ffserve.ray.read(out).count() == 50


def test_types_of_blocks(ray_data: Any, out: str) -> None:
    tensors = ray_data.from_numpy(np.arange(12, dtype=np.int64).reshape(4, 3))
    ffserve.ray.write(tensors, f"{out}1", format="tfrecord")
    assert [row["data"] for row in rows(ffserve.ray.read(f"{out}1"))] == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11],
    ]  # fmt: skip
    ragged = ray_data.from_items([{"x": np.arange(k, dtype=np.float32)} for k in (1, 3)])
    ffserve.ray.write(ragged, f"{out}2", format="tfrecord")
    assert rows(ffserve.ray.read(f"{out}2")) == [{"x": [0.0, 1.0, 2.0]}, {"x": [0.0]}]
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    pairs = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2))
    table = pa.table({"w": words, "n": pa.nulls(3), "p": pairs})
    ffserve.ray.write(ray_data.from_arrow(table), f"{out}3", format="tfrecord")
    assert rows(ffserve.ray.read(f"{out}3"))[0] == {"p": [1, 2], "w": "a"}
    frame = table.select(["w", "p"]).to_pandas()
    ffserve.ray.write(ray_data.from_pandas(frame), f"{out}4", format="tfrecord")
    assert rows(ffserve.ray.read(f"{out}4")) == rows(ffserve.ray.read(f"{out}3"))
    wide = ray_data.from_numpy(np.zeros((2, 3, 3)))
    with pytest.raises(UsageError, match=r"'data' holds tensors of more than one dim.*flatten"):
        ffserve.ray.write(wide, f"{out}5", format="tfrecord")
    parts = pa.table({"k": pa.nulls(2), "v": [1, 2]})
    ffserve.ray.write(
        ray_data.from_arrow(parts), f"{out}6", format="tfrecord", partition_cols=["k"]
    )
    assert rows(ffserve.ray.read(f"{out}6")) == [{"v": 1, "k": None}, {"v": 2, "k": None}]


# ---- save modes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["a directory", "S3"])
def test_save_modes(
    ray_data: Any, out: str, where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if where == "S3":
        out = f"{request.getfixturevalue('bucket')}/table"
    one, two = (ray_data.from_items([{"v": k}]) for k in (1, 2))
    ffserve.ray.write(one, out, format="tfrecord")
    with pytest.raises(UsageError, match="the output path exists") as caught:
        ffserve.ray.write(two, out, format="tfrecord")
    assert caught.value.path == out
    ffserve.ray.write(two, out, format="tfrecord", mode="ignore")
    assert rows(ffserve.ray.read(out)) == [{"v": 1}]
    ffserve.ray.write(two, out, format="tfrecord", mode="append")
    both = [{"v": 1}, {"v": 2}]
    assert rows(ffserve.ray.read(out)) == both
    ffserve.ray.write(ffserve.ray.read(out), out, format="tfrecord", mode="overwrite")
    assert rows(ffserve.ray.read(out)) == both  # it read what it has replaced
    ffserve.ray.write(two, out, format="tfrecord", mode="overwrite")
    assert rows(ffserve.ray.read(out)) == [{"v": 2}]
    if where == "S3":
        with pytest.raises(Exception, match="made to fail"):
            frame = failing(ray_data, tmp_path / "counter", 99)
            ffserve.ray.write(frame, out, format="tfrecord", mode="overwrite")
        left = RemoteDirectory(out).files("")
        assert len(left) == 2 and left[0] == "_SUCCESS"
        assert rows(ffserve.ray.read(out)) == [{"v": 2}]


def test_dynamic_partition_overwrite(ray_data: Any, out: str) -> None:
    old = ray_data.from_items([{"v": 1, "k": 1}, {"v": 2, "k": 2}])
    ffserve.ray.write(old, out, format="tfrecord", partition_cols=["k"])
    new = ray_data.from_items([{"v": 3, "k": 2}, {"v": 4, "k": 3}])
    ffserve.ray.write(new, out, format="tfrecord", partition_cols=["k"], mode="dynamic")
    assert [(row["v"], row["k"]) for row in rows(ffserve.ray.read(out))] == [(1, 1), (3, 2), (4, 3)]


def test_max_rows_per_file_and_many_partitions(ray_data: Any, out: str) -> None:
    dataset = ray_data.range(600, override_num_blocks=1).map_batches(
        lambda batch: {"id": batch["id"], "k": batch["id"] % 150}, batch_size=None
    )
    ffserve.ray.write(dataset, out, format="tfrecord", partition_cols=["k"], max_rows_per_file=3)
    assert len([name for name in os.listdir(out) if name.startswith("k=")]) == 150
    counts = []
    for name in data_files(out):
        with ffserve.open(f"{out}/{name}") as reader:
            counts.append(len(reader))
    assert sorted(counts) == [1] * 150 + [3] * 150
    assert rows(ffserve.ray.read(out)) == rows(dataset)


def test_an_empty_dataset(ray_data: Any, out: str) -> None:
    nothing = ray_data.range(5).filter(lambda row: False)
    ffserve.ray.write(nothing, out, format="tfrecord")
    assert os.listdir(out) == ["_SUCCESS"]
    schema = pa.schema([("id", pa.int64())])
    again = ffserve.ray.read(out, schema=schema, format="tfrecord")
    assert again.take_all() == [] and again.count() == 0
    assert again.schema().names == ["id"]
    with pytest.raises(UsageError, match="there are no files"):
        ffserve.ray.read(out)


# ---- tasks that fail -----------------------------------------------------------------------------


def failing(ray_data: Any, counter: Path, times: int, *, kill: bool = False) -> Any:
    """200 rows in 2 tasks; the second one fails so often, when most of its rows were written."""
    counter.mkdir()
    folder = str(counter)

    def number(row: Any) -> Any:
        tries = len(os.listdir(folder))
        if row["id"] == 190 and tries < times:
            open(f"{folder}/{tries}", "w").close()
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the task was made to fail")
        return row

    return ray_data.range(200, override_num_blocks=2).map(number)


@pytest.mark.parametrize("mode", ["error", "append", "overwrite"])
def test_a_failing_task_leaves_nothing_visible(
    ray_data: Any, out: str, tmp_path: Path, mode: Any
) -> None:
    if mode != "error":
        ffserve.ray.write(ray_data.from_items([{"id": 7}]), out, format="tfrecord")
    before = files(out) if mode != "error" else []
    with pytest.raises(Exception, match="made to fail"):
        ffserve.ray.write(
            failing(ray_data, tmp_path / "counter", 99), out, format="tfrecord", mode=mode
        )
    if mode == "error":
        assert not os.path.exists(out)
    else:
        assert files(out) == before and "_temporary" not in os.listdir(out)
        assert rows(ffserve.ray.read(out)) == [{"id": 7}]


def test_a_killed_task_leaves_no_duplicates(ray_data: Any, out: str, tmp_path: Path) -> None:
    dataset = failing(ray_data, tmp_path / "counter", 2, kill=True)
    ffserve.ray.write(dataset, out, format="tfrecord")
    assert len(os.listdir(tmp_path / "counter")) == 2
    assert sorted(row["id"] for row in ffserve.ray.read(out).take_all()) == list(range(200))
    assert "_temporary" not in os.listdir(out)


KILLED = """
import sys, time
import ray
import ffserve.ray
out, mark = sys.argv[1:]
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
def slow(row):
    if row["id"] == 2:
        open(mark, "w").close()
        time.sleep(60)
    return row
ffserve.ray.write(ray.data.range(4).map(slow), out, format="tfrecord", mode="overwrite")
"""


def test_a_killed_driver_leaves_the_old_data_and_the_next_write_cleans_up(
    ray_data: Any, out: str, tmp_path: Path
) -> None:
    ffserve.ray.write(ray_data.from_items([{"id": 7}]), out, format="tfrecord")
    before = files(out)
    mark, log = tmp_path / "running", tmp_path / "log"
    with log.open("wb") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-c", KILLED, out, str(mark)],
            start_new_session=True, stdout=stderr, stderr=stderr,
        )  # fmt: skip
    try:
        while not mark.exists():
            assert driver.poll() is None, log.read_text()
            time.sleep(0.1)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert [name for name in files(out) if not name.startswith("_temporary")] == before
    assert os.listdir(f"{out}/_temporary")
    assert rows(ffserve.ray.read(out)) == [{"id": 7}]
    ffserve.ray.write(ray_data.from_items([{"id": 8}]), out, format="tfrecord", mode="append")
    assert "_temporary" not in os.listdir(out)
    assert rows(ffserve.ray.read(out)) == [{"id": 7}, {"id": 8}]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk(ray_data: Any, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path], check=True)
    try:
        out = str(tmp_path / "table")
        old = ray_data.from_items([{"b": b"old"}])
        ffserve.ray.write(old, out, format="recordio", record_type="ByteArray")
        before = files(out)
        large = ray_data.from_items([{"b": os.urandom(100_000)} for _ in range(8)])
        for mode in ("append", "overwrite"):
            with pytest.raises(FFServeError, match="No space left on device"):
                ffserve.ray.write(large, out, format="tfrecord", mode=mode)
        assert files(out) == before and "_temporary" not in os.listdir(out)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


# ---- the daemon ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_tasks_read_through_the_daemon_of_their_node(
    ray_data: Any, tmp_path: Path, format: str
) -> None:
    records = [{"id": k, "noise": bytes(500)} for k in range(400)]
    path = write(tmp_path / f"a.{format}", *records, format=format)
    schema = pa.schema([("id", pa.int64())])

    def read(server: str) -> list[int]:
        dataset = ffserve.ray.read(path, schema=schema, parallelism=2, server=server)
        return sorted(row["id"] for row in dataset.take_all())

    socket = os.environ["FFSERVE_SOCKET"]
    with serving() as daemon:
        assert read("auto") == list(range(400))
        assert daemon.cache()["asked"] == 0  # the tasks' socket is another one
        os.symlink(daemon.socket, socket)
        try:
            assert read("auto") == list(range(400))
        finally:
            os.unlink(socket)
        count = daemon.cache()["blocks_read"]
        assert count > 0
        assert read(daemon.socket) == list(range(400))
        assert daemon.cache()["blocks_read"] == count  # all of it was in memory
    with pytest.raises(FFServeError, match=r"(?i)daemon"):
        read("require")


# ---- damage, and other bad input -----------------------------------------------------------------


def test_a_damaged_record_is_named_or_skipped(ray_data: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, *({"id": k} for k in range(100)))
    with ffserve.open(path) as reader:
        offsets, _, _ = reader.tables(0)
    data = bytearray(path.read_bytes())
    data[int(offsets[50]) + 3] ^= 1
    path.write_bytes(data)
    schema = pa.schema([("id", pa.int64())])
    with pytest.raises(ChecksumError) as caught:
        ffserve.ray.read(path, schema=schema).take_all()
    assert re.search(rf"a\.tfrecord, sample 50, byte {offsets[50]}: checksum", str(caught.value))
    before = ffserve.ray.skipped()
    kept = ffserve.ray.read(path, schema=schema, on_error="skip")
    assert sorted(row["id"] for row in kept.take_all()) == [k for k in range(100) if k != 50]
    assert ffserve.ray.skipped() == before + 1
    assert kept.count() == 99


def test_cut_empty_and_foreign_files(ray_data: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut" / "a.tfrecord"
    path.parent.mkdir()
    write(path, {"id": 1}, {"id": 2})
    path.write_bytes(path.read_bytes()[:-3])
    schema = pa.schema([("id", pa.int64())])
    with pytest.raises(TruncatedError, match=r"a\.tfrecord.*the file ends inside"):
        ffserve.ray.read(path, schema=schema).take_all()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.tfrecord").touch()
    assert ffserve.ray.read(empty, schema=schema).take_all() == []
    with pytest.raises(UsageError, match="cannot infer a schema: no file has columns"):
        ffserve.ray.read(empty)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    write(mixed / "a.tfrecord", {"id": 1})
    write(mixed / "b.ffr", {"id": 2}, format="ffrecord")
    with pytest.raises(FormatError, match=r"b\.ffr: the file is ffrecord, not tfrecord"):
        ffserve.ray.read(mixed)
    with pytest.raises(FormatError, match=r"b\.ffr: the file is ffrecord, not tfrecord"):
        ffserve.ray.read(mixed, schema=schema).take_all()


def test_a_partition_column_that_is_also_in_the_file(ray_data: Any, tmp_path: Path) -> None:
    (tmp_path / "k=1").mkdir()
    write(tmp_path / "k=1" / "a.tfrecord", {"k": 7, "v": 2})
    with pytest.raises(FormatError, match="'k' is in the records and in the name"):
        ffserve.ray.read(tmp_path)
    schema = pa.schema([("v", pa.int64()), ("k", pa.int32())])
    assert rows(ffserve.ray.read(tmp_path, schema=schema)) == [{"v": 2, "k": 1}]


def test_invalid_calls(ray_data: Any, tmp_path: Path, out: str) -> None:
    path = write(tmp_path / "a.tfrecord", {"id": 1})
    for arguments, text in (
        ({"record_type": "Sample"}, "invalid record_type 'Sample'"),
        ({"format": "parquet"}, "unknown format 'parquet'"),
        ({"schema": {"id": int}}, r"must be a pyarrow\.Schema, not dict"),
        ({"columns": ["nope"]}, r"no column 'nope' \(the columns are id\)"),
        ({"columns": "id"}, "columns must be a list"),
        ({"parallelism": 0}, "parallelism must be at least 1"),
        ({"on_error": "drop"}, "on_error must be"),
        ({"sampling_ratio": 0}, "sampling_ratio must be above 0"),
        ({"schema": pa.schema([("id", pa.bool_())])}, "column 'id' has the type bool"),
    ):
        with pytest.raises(UsageError, match=text):
            ffserve.ray.read(path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        ffserve.ray.read(tmp_path / "missing")
    with pytest.raises(UsageError, match="the file system 'hdfs' is not supported"):
        ffserve.ray.read("hdfs:/table")
    dataset = ray_data.from_items([{"id": 1, "flag": True}])
    for arguments, text in (
        ({"format": "parquet"}, "unknown format"),
        ({"compression": "bzip2"}, "tfrecord does not support the compression 'bzip2'"),
        ({"mode": "replace"}, "invalid mode 'replace'"),
        ({"partition_cols": "id"}, "partition_cols must be a list"),
        ({"partition_cols": ["nope"]}, "partition column 'nope' is not a column"),
        ({"max_rows_per_file": 0}, "max_rows_per_file must be at least 1"),
        ({}, "column 'flag' has the type bool"),
    ):
        with pytest.raises(UsageError, match=text):
            ffserve.ray.write(dataset, out, **{"format": "tfrecord", **arguments})
        assert not os.path.exists(out)
    with pytest.raises(UsageError, match=r"must be a ray\.data\.Dataset, not list"):
        ffserve.ray.write([1, 2], out, format="tfrecord")
    with pytest.raises(UsageError, match=r"a\.tfrecord.*the output path is a file"):
        ffserve.ray.write(dataset, path, format="tfrecord", mode="append")


def test_errors_fit_on_one_screen(ray_data: Any, tmp_path: Path, out: str) -> None:
    (tmp_path / "k=1").mkdir()
    path = write(tmp_path / "k=1" / "a.tfrecord", {"id": 1}, {"id": "text"})
    schema = pa.schema([("id", pa.int64()), ("k", pa.int32())])
    with pytest.raises(FormatError) as caught:
        ffserve.ray.read(tmp_path, schema=schema).take_all()
    text = str(caught.value)
    assert f"{path}: row 1, column 'id': it holds byte strings, and the schema says int64" in text
    assert len(text.splitlines()) <= 50
    table = pa.table({"v": pa.array([[1], [None]], pa.list_(pa.int64()))})
    with pytest.raises(FormatError, match=r"row 1, column 'v'.*element of the array") as caught:
        ffserve.ray.write(ray_data.from_arrow(table), out, format="tfrecord")
    assert len(str(caught.value).splitlines()) == 1
