"""TFRecord in Spark: what Spark-TFRecord documents, and what it gets wrong."""

from __future__ import annotations

import datetime
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
import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="needs pyspark (make spark)")
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

import ffserve
import ffserve.spark
from ffserve import example
from ffserve.arrow.table_writing import _groups
from ffserve.store.public import RemoteDirectory

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.collect()), key=repr)


def files(path: str) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in Path(path).rglob("*") if p.is_file())


def data_files(path: str) -> list[str]:
    return [name for name in files(path) if os.path.basename(name).startswith("part-")]


def write(path: Path, *records: Any) -> str:
    with ffserve.create(path, format="tfrecord") as writer:
        for record in records:
            writer.write(example.encode(record))
    return str(path)


def read(spark: Any, path: Any, **options: Any) -> DataFrame:
    return spark.read.format("tfrecord").options(**options).load(path)


# ---- the documentation of Spark-TFRecord ---------------------------------------------------------


def test_the_documented_example(spark: Any, out: str) -> None:
    df = spark.createDataFrame([(8, "bat"), (8, "abc"), (1, "xyz"), (2, "aaa")], ["number", "word"])
    (df.repartition(3, "number").write.mode("overwrite").partitionBy("number")
       .format("tfrecord").option("recordType", "Example").save(out))  # fmt: skip
    assert sorted(os.listdir(out)) == ["_SUCCESS", "number=1", "number=2", "number=8"]
    again = spark.read.format("tfrecord").option("recordType", "Example").load(out)
    assert again.columns == ["word", "number"]
    assert dict(again.dtypes) == {"word": "string", "number": "int"}
    assert rows(again) == [("aaa", 2), ("abc", 8), ("bat", 8), ("xyz", 1)]
    [one] = spark.read.format("tfrecord").load(f"{out}/number=1").collect()
    assert one.asDict() == {"word": "xyz"}


def test_partition_by_in_any_order_and_other_formats_unchanged(spark: Any, out: str) -> None:
    df = spark.createDataFrame([(1, 2, "x")], ["a", "b", "c"])
    df.write.partitionBy(["a", "b"]).format("tfrecord").save(f"{out}/1")
    df.write.save(f"{out}/2", format="tfrecord", partitionBy=["a", "b"])
    df.write.save(f"{out}/3", format="tfrecords", partitionBy="a", mode="append")
    for k, folder in ((1, "a=1/b=2"), (2, "a=1/b=2"), (3, "a=1")):
        [name] = data_files(f"{out}/{k}")
        assert os.path.dirname(name) == folder
    for format in ("parquet", "json"):
        writer = df.write.partitionBy("a").format(format)
        writer.save(f"{out}/{format}")
        assert "a=1" in os.listdir(f"{out}/{format}")
        with pytest.raises(AnalysisException, match="PATH_ALREADY_EXISTS"):
            writer.save(f"{out}/{format}")
    writer = df.write.partitionBy("a").format("tfrecord")
    writer.save(f"{out}/4")
    writer.format("json").save(f"{out}/5")
    assert "a=1" in os.listdir(f"{out}/5")


def test_all_types(spark: Any, out: str) -> None:
    fields = [
        StructField("int", IntegerType()),
        StructField("long", LongType()),
        StructField("float", FloatType()),
        StructField("double", DoubleType()),
        StructField("decimal", DecimalType(10, 2)),
        StructField("string", StringType()),
        StructField("binary", BinaryType()),
        StructField("ints", ArrayType(IntegerType())),
        StructField("longs", ArrayType(LongType())),
        StructField("floats", ArrayType(FloatType())),
        StructField("doubles", ArrayType(DoubleType())),
        StructField("decimals", ArrayType(DecimalType(5, 1))),
        StructField("strings", ArrayType(StringType())),
        StructField("binaries", ArrayType(BinaryType())),
    ]
    schema = StructType(fields)
    full = (
        *(-(2**31), 2**63 - 1, 1.5, -2.25, Decimal("3.14"), "é", b"\xff\x00"),
        *([1, -2], [2**40], [0.5], [1e10], [Decimal("0.3"), Decimal("-7.7")]),
        *(["a", "", "ü"], [b"", b"\x80"]),
    )
    empty = (*[None] * 7, *[[]] * 7)
    nothing = (None,) * 14
    df = spark.createDataFrame([full, empty, nothing], schema)
    df.coalesce(1).write.format("tfrecord").save(out)
    # An empty array has values of no kind, but it is not null.
    assert rows(spark.read.schema(schema).format("tfrecord").load(out)) == sorted(
        [full, empty, nothing], key=repr
    )
    found = dict(read(spark, out).dtypes)
    assert found["int"] == found["long"] == "bigint"
    assert found["float"] == found["double"] == found["decimal"] == "float"
    assert found["string"] == "string" and found["binary"] == "binary"
    assert found["ints"] == "array<bigint>" and found["decimals"] == "array<float>"
    assert found["strings"] == "array<string>" and found["binaries"] == "array<binary>"
    narrow = (
        spark.read.schema("decimal decimal(10,2), ints array<int>").format("tfrecord").load(out)
    )
    assert rows(narrow)[0][0] == Decimal("3.14")


def test_sequence_examples(spark: Any, out: str) -> None:
    schema = "id long, steps array<array<float>>, words array<array<string>>, n array<array<long>>"
    data = [
        (1, [[1.0, 2.0], []], [["a"], ["b", "c"]], [[1], [2], [3]]),
        (2, [], None, [[]]),
    ]
    df = spark.createDataFrame(data, schema)
    df.write.format("tfrecord").option("recordType", "SequenceExample").save(out)
    again = read(spark, out, recordType="sequenceexample")
    assert dict(again.dtypes) == dict(df.dtypes)
    assert rows(again.select(df.columns)) == sorted(data, key=repr)
    [path] = [name for name in data_files(out) if "00000" in name or "00001" in name][:1]
    with ffserve.open(f"{out}/{path}") as reader:
        assert set(example.decode_sequence(reader[0]).lists) <= {"steps", "words", "n"}
    with pytest.raises(AnalysisException, match=r"array of arrays.*SequenceExample"):
        df.write.format("tfrecord").save(f"{out}2")
    assert not os.path.exists(f"{out}2")


def test_byte_arrays(spark: Any, out: str) -> None:
    df = spark.createDataFrame([(b"one",), (b"",), (b"\xff",)], "byteArray binary")
    df.write.format("tfrecord").option("recordType", "ByteArray").save(out)
    again = read(spark, out, recordType="ByteArray")
    assert again.dtypes == [("byteArray", "binary")]
    assert sorted(bytes(row[0]) for row in again.collect()) == [b"", b"one", b"\xff"]


# ---- inference -----------------------------------------------------------------------------------


def test_inference_looks_at_all_files(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.tfrecord", {"x": 1, "y": [1, 2], "t": "text"})
    write(tmp_path / "b.tfrecord", {"x": 2.5, "y": 3, "z": b"\xff\xfe"})
    found = read(spark, str(tmp_path))
    assert dict(found.dtypes) == {
        "x": "float", "y": "array<bigint>", "t": "string", "z": "binary"
    }  # fmt: skip
    assert rows(found.select("x", "y")) == [(1.0, [1, 2]), (2.5, [3])]
    first = read(spark, str(tmp_path), mergeSchema="false")
    assert dict(first.dtypes) == {"x": "bigint", "y": "array<bigint>", "t": "string"}
    sampled = read(spark, str(tmp_path), samplingRatio="0.0001")
    assert dict(sampled.dtypes) == dict(found.dtypes)  # the first record of each file is taken


def test_columns_that_differ_are_an_error_with_both_files(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.tfrecord", {"x": 1})
    write(tmp_path / "b.tfrecord", {"y": 1}, {"x": "text"})
    with pytest.raises(AnalysisException) as caught:
        read(spark, str(tmp_path))
    text = str(caught.value)
    assert "feature 'x' holds byte strings in row 1, but integers in row 0" in text
    assert "a.tfrecord" in text and "b.tfrecord" in text


def test_integers_that_a_float_cannot_hold_are_an_error(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.tfrecord", {"x": 0.5}, {"x": 2**24 + 1})
    with pytest.raises(PySparkException, match=r"row 1, column 'x'.*cannot hold exactly"):
        read(spark, str(tmp_path)).collect()
    exact = spark.read.schema("x double").format("tfrecord").load(str(tmp_path))
    assert rows(exact) == [(0.5,), (2.0**24 + 1,)]


# ---- partitions ----------------------------------------------------------------------------------


def test_options_of_create_table_were_unknown(spark: Any, out: str) -> None:
    writer = spark.createDataFrame([(1, [["a"]])], "id long, words array<array<string>>").write
    writer.format("tfrecord").option("recordType", "SequenceExample").save(out)
    spark.sql(
        f"CREATE TABLE of_options USING tfrecord OPTIONS (recordType 'SequenceExample', "
        f"path '{out}', on_error 'skip')"
    )
    try:
        assert rows(spark.table("of_options")) == [(1, [["a"]])]
    finally:
        spark.sql("DROP TABLE of_options")


def test_a_partition_column_in_another_case_was_no_column(spark: Any, out: str) -> None:
    df = spark.createDataFrame([(1, "a"), (2, "b")], "number long, Text string")
    df.write.format("tfrecord").partitionBy("NUMBER").save(f"{out}/1")
    df.write.format("parquet").partitionBy("NUMBER").save(f"{out}/parquet")
    named = [sorted(path.name for path in Path(out, of).glob("*=*")) for of in ("1", "parquet")]
    assert named == [["NUMBER=1", "NUMBER=2"]] * 2, "as Spark's own formats name them"
    found = spark.read.format("tfrecord").load(f"{out}/1")
    assert found.columns == ["Text", "NUMBER"]
    assert sorted(rows(found.select("NUMBER", "text"))) == [(1, "a"), (2, "b")]
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(AnalysisException, match="NUMBER"):
            df.write.format("tfrecord").partitionBy("NUMBER").save(f"{out}/2")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_partition_values_with_escapes_nulls_and_types(spark: Any, out: str) -> None:
    day = datetime.date(2024, 2, 29)
    moment = datetime.datetime(2024, 1, 2, 3, 4, 5, 600000)
    data = [
        (1, "a/b=c%d", day, 0.5, moment, True),
        (2, "é ü:'\"*?[x]", None, 1.5, None, False),
        (3, None, day, None, moment, None),
    ]
    schema = "v long, s string, d date, f double, t timestamp, b boolean"
    df = spark.createDataFrame(data, schema)
    keys = ["s", "d", "f", "t", "b"]
    df.write.format("tfrecord").partitionBy(*keys).save(out)
    df.write.format("json").partitionBy(*keys).save(f"{out}-json")
    folders = [{os.path.dirname(name) for name in data_files(o)} for o in (out, f"{out}-json")]
    assert folders[0] == folders[1]  # as Spark itself names them
    again = read(spark, out)
    assert again.dtypes == spark.read.format("json").load(f"{out}-json").dtypes
    assert rows(again.select("v", *keys)) == rows(
        spark.read.format("json").load(f"{out}-json").select("v", *keys)
    )
    typed = spark.read.schema(schema).format("tfrecord").load(out)
    assert rows(typed) == sorted(data, key=repr)


def test_typed_partition_values(spark: Any, out: str, tmp_path: Path) -> None:
    for name, first, second, kind in (
        ("i", "1", "08", "int"),
        ("l", "1", "3000000000", "bigint"),
        ("d", "1", "0.5", "double"),
        ("s", "1", "x", "string"),
        ("t", "2024-01-01", "2024-01-01 10:00:00", "timestamp"),
        ("n", "1", "__HIVE_DEFAULT_PARTITION__", "int"),
    ):
        for value in (first, second):
            folder = tmp_path / name / f"k={value}"
            folder.mkdir(parents=True)
            write(folder / "a.tfrecord", {"v": 1})
        assert dict(read(spark, str(tmp_path / name)).dtypes)["k"] == kind
    one = read(spark, str(tmp_path / "i" / "k=1"), basePath=str(tmp_path / "i"))
    assert rows(one) == [(1, 1)]


def test_a_partition_column_that_is_also_in_the_file(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "k=1").mkdir()
    write(tmp_path / "k=1" / "a.tfrecord", {"k": 7, "v": 2})
    with pytest.raises(AnalysisException, match="'k' is in the records and in the name"):
        read(spark, str(tmp_path))
    chosen = spark.read.schema("v long, k int").format("tfrecord").load(str(tmp_path))
    assert rows(chosen) == [(2, 1)]


def test_many_partitions_in_one_task(spark: Any, out: str) -> None:
    df = spark.range(0, 600, 1, 1).selectExpr("id % 300 as k", "id as v")
    df.write.format("tfrecord").partitionBy("k").save(out)
    assert len([name for name in os.listdir(out) if name.startswith("k=")]) == 300
    assert rows(read(spark, out).select("v", "k")) == rows(df.select("v", "k"))


def test_rows_of_five_partition_columns_were_in_each_others_directories() -> None:
    """Where each column had thousands of values: their numbers were combined in 64 bits."""
    random = np.random.default_rng(0)
    names = [f"k{k}" for k in range(5)]
    batch = pa.RecordBatch.from_pydict({k: random.permutation(8192).astype(str) for k in names})
    found = [(row, place) for place, rows in _groups(batch, names, names) for row in rows.tolist()]
    assert sorted(found) == [
        (row, "/".join(f"{k}={value}" for k, value in values.items()))
        for row, values in enumerate(batch.to_pylist())
    ]


# ---- save modes ----------------------------------------------------------------------------------


def test_save_modes(spark: Any, out: str) -> None:
    one, two = (spark.createDataFrame([(k,)], "v long") for k in (1, 2))
    one.write.format("tfrecord").save(out)
    for mode in ("error", "errorifexists", None):
        with pytest.raises(AnalysisException) as caught:
            two.write.mode(mode).format("tfrecord").save(out)
        assert caught.value.getCondition() == "PATH_ALREADY_EXISTS"
        assert out in str(caught.value)
    two.write.mode("ignore").format("tfrecord").save(out)
    assert rows(read(spark, out)) == [(1,)]
    two.write.mode("append").format("tfrecord").save(out)
    assert rows(read(spark, out)) == [(1,), (2,)]
    read(spark, out).write.mode("overwrite").format("tfrecord").save(out)  # of what it reads
    assert rows(read(spark, out)) == [(1,), (2,)]
    two.write.mode("overwrite").format("tfrecord").save(out)
    assert rows(read(spark, out)) == [(2,)]
    two.write.mode("ignore").format("tfrecord").save(f"{out}2")
    assert rows(read(spark, f"{out}2")) == [(2,)]
    with pytest.raises(Exception, match="bogus"):
        two.write.mode("bogus").format("tfrecord").save(out)


def test_tables_at_an_origin(spark: Any, bucket: str, tmp_path: Path) -> None:
    """All modes, a task that fails, and one that is tried again; nothing is left beside them."""
    out = f"{bucket}/tables/one"
    one, two = (spark.createDataFrame([(k, k)], "v long, k int") for k in (1, 2))
    one.write.format("tfrecord").partitionBy("k").save(out)
    assert rows(read(spark, out)) == [(1, 1)]
    with pytest.raises(AnalysisException, match="Path s3://bucket/tables/one already exists"):
        two.write.format("tfrecord").save(out)
    two.write.mode("ignore").format("tfrecord").save(out)
    two.write.mode("append").format("tfrecord").partitionBy("k").save(out)
    assert rows(read(spark, out)) == [(1, 1), (2, 2)]
    read(spark, out).write.mode("overwrite").format("tfrecord").partitionBy("k").save(out)
    assert rows(read(spark, out)) == [(1, 1), (2, 2)]
    new = spark.createDataFrame([(3, 2), (4, 3)], "v long, k int")
    writer = new.write.mode("overwrite").format("tfrecord").partitionBy("k")
    writer.option("partitionOverwriteMode", "dynamic").save(out)
    assert rows(read(spark, out)) == [(1, 1), (3, 2), (4, 3)]
    before = RemoteDirectory(out).files("")
    assert len(before) == 4 and before[0] == "_SUCCESS"
    for times, counter in ((99, tmp_path / "a"), (1, tmp_path / "b")):
        counter.mkdir()
        frame = failing(spark, str(counter), times)
        if times == 99:
            with pytest.raises(PySparkException, match="made to fail"):
                frame.write.mode("overwrite").format("tfrecord").save(out)
            assert RemoteDirectory(out).files("") == before
        else:
            frame.write.mode("overwrite").format("tfrecord").save(out)
            found = [tuple(row) for row in read(spark, out).select("id").collect()]
            assert len(found) == len(set(found)) == frame.count()
    assert not [name for name in RemoteDirectory(out).files("") if name.startswith("_temporary")]


def test_dynamic_partition_overwrite(spark: Any, out: str) -> None:
    spark.createDataFrame([(1, 1), (2, 2)], "v long, k int").write.format("tfrecord").partitionBy(
        "k"
    ).save(out)
    new = spark.createDataFrame([(3, 2), (4, 3)], "v long, k int")
    writer = new.write.mode("overwrite").format("tfrecord").partitionBy("k")
    writer.option("partitionOverwriteMode", "dynamic").save(out)
    assert rows(read(spark, out)) == [(1, 1), (3, 2), (4, 3)]
    new.write.mode("overwrite").format("tfrecord").partitionBy("k").save(out)
    assert rows(read(spark, out)) == [(3, 2), (4, 3)]


def test_max_records_per_file(spark: Any, out: str) -> None:
    df = spark.range(0, 25, 1, 1).selectExpr("id as v", "id % 2 as k")
    writer = df.write.format("tfrecord").partitionBy("k").option("maxRecordsPerFile", 4)
    writer.save(out)
    counts = []
    for name in data_files(out):
        with ffserve.open(f"{out}/{name}") as reader:
            counts.append(len(reader))
    assert sorted(counts) == [1, 4, 4, 4, 4, 4, 4]
    assert len(rows(read(spark, out))) == 25


@pytest.mark.parametrize(
    ("codec", "suffix"),
    [
        ("gzip", ".tfrecord.gz"),
        ("deflate", ".tfrecord.deflate"),
        ("org.apache.hadoop.io.compress.GzipCodec", ".tfrecord.gz"),
        ("org.apache.hadoop.io.compress.DefaultCodec", ".tfrecord.deflate"),
        ("none", ".tfrecord"),
    ],
)
def test_codecs(spark: Any, out: str, codec: str, suffix: str) -> None:
    spark.range(5).write.format("tfrecord").option("codec", codec).save(out)
    assert all(name.endswith(suffix) for name in data_files(out))
    assert rows(read(spark, out)) == [(k,) for k in range(5)]


# ---- tasks that fail -----------------------------------------------------------------------------


def failing(spark: Any, counter: str, times: int, *, kill: bool = False) -> DataFrame:
    """200 rows in 2 tasks; the second one fails so often, when most of its rows were written."""

    def rows_of(numbers: Any) -> Any:
        for number in numbers:
            yield (number,)
            tries = len(os.listdir(counter))
            if number == 190 and tries < times:
                open(f"{counter}/{tries}", "w").close()
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the task was made to fail")

    numbers = spark.sparkContext.parallelize(range(200), 2)
    return spark.createDataFrame(numbers.mapPartitions(rows_of), "id long")


@pytest.mark.parametrize("mode", ["error", "append", "overwrite"])
def test_a_failing_task_leaves_nothing_visible(
    spark: Any, out: str, tmp_path: Path, mode: str
) -> None:
    counter = tmp_path / "counter"
    counter.mkdir()
    if mode != "error":
        spark.createDataFrame([(7,)], "id long").write.format("tfrecord").save(out)
    before = files(out) if mode != "error" else []
    with pytest.raises(PySparkException, match="made to fail"):
        failing(spark, str(counter), 99).write.mode(mode).format("tfrecord").save(out)
    assert len(os.listdir(counter)) == 3  # tries
    if mode == "error":
        assert not os.path.exists(out)
    else:
        assert files(out) == before
        assert os.listdir(out).count("_temporary") == 0
        assert rows(read(spark, out)) == [(7,)]


@pytest.mark.parametrize("kill", [False, True])
def test_a_retried_task_leaves_no_duplicates(
    spark: Any, out: str, tmp_path: Path, kill: bool
) -> None:
    counter = tmp_path / "counter"
    counter.mkdir()
    failing(spark, str(counter), 2, kill=kill).write.format("tfrecord").save(out)
    assert len(os.listdir(counter)) == 2
    assert rows(read(spark, out)) == sorted([(k,) for k in range(200)], key=repr)
    assert sorted(os.listdir(out))[0] == "_SUCCESS" and "_temporary" not in os.listdir(out)


KILLED = """
import os, sys, time
from pyspark.sql import SparkSession
import ffserve.spark
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
ffserve.spark.register(spark)
out, mark = sys.argv[1:]
def rows_of(numbers):
    for number in numbers:
        yield (number,)
        if number == 2:
            open(mark, "w").close()
            time.sleep(60)
numbers = spark.sparkContext.parallelize(range(4), 2).mapPartitions(rows_of)
df = spark.createDataFrame(numbers, "id long")
df.write.mode("overwrite").format("tfrecord").save(out)
"""


def test_a_killed_driver_leaves_the_old_data_and_the_next_write_cleans_up(
    spark: Any, out: str, tmp_path: Path
) -> None:
    spark.createDataFrame([(7,)], "id long").write.format("tfrecord").save(out)
    before = files(out)
    mark = tmp_path / "running"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYSPARK_PYTHON": sys.executable}
    environment.pop("PYSPARK_GATEWAY_PORT", None)
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-c", KILLED, out, str(mark)],
            env=environment, start_new_session=True, stderr=stderr,
        )  # fmt: skip
    try:
        while not mark.exists():
            assert driver.poll() is None, log.read_text()
            time.sleep(0.1)
        # The Java process has a session of its own.
        children = subprocess.run(
            ["pgrep", "-P", str(driver.pid)], capture_output=True, text=True, check=True
        )
        for pid in (*map(int, children.stdout.split()), driver.pid):
            os.kill(pid, signal.SIGKILL)
    finally:
        driver.kill()
        driver.wait()
    assert "_temporary" in os.listdir(out)
    assert [name for name in files(out) if not name.startswith("_temporary")] == before
    assert rows(read(spark, out)) == [(7,)]
    spark.createDataFrame([(8,)], "id long").write.mode("append").format("tfrecord").save(out)
    assert "_temporary" not in os.listdir(out)
    assert rows(read(spark, out)) == [(7,), (8,)]


def test_a_null_where_none_is_allowed_has_column_and_row(
    spark: Any, out: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.tfrecord", {"id": 1}, {"id": 2}, {"other": 3})
    strict = StructType([StructField("id", LongType(), nullable=False)])
    with pytest.raises(PySparkException, match=r"a\.tfrecord: row 2, column 'id'.*NOT NULL"):
        spark.read.schema(strict).format("tfrecord").load(path).collect()
    df = spark.createDataFrame([([1, None],)], "v array<long>")
    with pytest.raises(PySparkException, match=r"row 0, column 'v'.*element of the array is null"):
        df.write.format("tfrecord").save(out)
    assert not os.path.exists(out)


def test_decimals_that_a_float_cannot_hold_are_an_error(spark: Any, out: str) -> None:
    df = spark.createDataFrame([(Decimal("12345678.91"),)], "d decimal(10,2)")
    with pytest.raises(PySparkException, match=r"row 0, column 'd'.*more digits"):
        df.write.format("tfrecord").save(out)


# ---- damage, and other bad input -----------------------------------------------------------------


def test_a_damaged_record_is_named_or_skipped(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, *({"id": k} for k in range(100)))
    with ffserve.open(path) as reader:
        offsets, _, _ = reader.tables(0)
    data = bytearray(path.read_bytes())
    data[int(offsets[50]) + 3] ^= 1
    path.write_bytes(data)
    schema = spark.read.schema("id long").format("tfrecord")
    with pytest.raises(PySparkException) as caught:
        schema.load(str(path)).collect()
    assert re.search(rf"a\.tfrecord, sample 50, byte {offsets[50]}: checksum", str(caught.value))
    kept = schema.option("on_error", "skip").load(str(path))
    before = ffserve.spark.skipped(spark)
    assert rows(kept) == sorted([(k,) for k in range(100) if k != 50], key=repr)
    assert ffserve.spark.skipped(spark) == before + 1


def test_cut_empty_and_foreign_files(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut" / "a.tfrecord"
    path.parent.mkdir()
    write(path, {"id": 1}, {"id": 2})
    path.write_bytes(path.read_bytes()[:-3])
    schema = spark.read.schema("id long").format("tfrecord")
    with pytest.raises(PySparkException, match=r"a\.tfrecord.*the file ends inside"):
        schema.load(str(path)).collect()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.tfrecord").touch()
    assert rows(schema.load(str(tmp_path / "empty"))) == []
    with pytest.raises(AnalysisException, match="cannot infer a schema: no file has columns"):
        read(spark, str(tmp_path / "empty"))
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    write(mixed / "a.tfrecord", {"id": 1})
    with ffserve.create(mixed / "b.ffr") as writer:
        writer.write(b"sample")
    with pytest.raises(AnalysisException, match=r"b\.ffr: the file is ffrecord, not tfrecord"):
        read(spark, str(mixed))


def test_invalid_calls(spark: Any, tmp_path: Path, out: str) -> None:
    path = write(tmp_path / "a.tfrecord", {"id": 1})
    reader = spark.read.format("tfrecord")
    with pytest.raises(
        AnalysisException, match=r"(?i)no option 'recordTyp'.*did you mean recordType"
    ):
        reader.option("recordTyp", "Example").load(path)
    with pytest.raises(AnalysisException, match=r"missing: no such file or directory"):
        read(spark, str(tmp_path / "missing"))
    with pytest.raises(AnalysisException, match="invalid recordType 'Sample'"):
        read(spark, path, recordType="Sample")
    df = spark.createDataFrame([(True, 1)], "flag boolean, k int")
    with pytest.raises(AnalysisException, match="column 'flag' has the type bool"):
        df.write.format("tfrecord").save(out)
    with pytest.raises(AnalysisException, match="tfrecord does not support the codec 'bzip2'"):
        df.select("k").write.format("tfrecord").option("codec", "bzip2").save(out)
    with pytest.raises(AnalysisException, match="partition column 'nope' is not a column"):
        df.select("k").write.format("tfrecord").partitionBy("nope").save(out)
    with pytest.raises(AnalysisException, match="all columns are partition columns"):
        df.select("k").write.format("tfrecord").partitionBy("k").save(out)
    assert not os.path.exists(out)
    with pytest.raises(
        AnalysisException, match=r"a\.tfrecord.*(the output path is a file|not a dir)"
    ):
        df.select("k").write.mode("append").format("tfrecord").save(path)


# ---- splitting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["tfrecord", "ffrecord", "recordio"])
def test_big_files_are_split(spark: Any, tmp_path: Path, format: str) -> None:
    path = tmp_path / f"a.{format}"
    options = {"max_chunk_size": 10_000} if format == "recordio" else {}
    chance = np.random.default_rng(0)
    with ffserve.create(path, format=format, **options) as writer:
        for k in range(1000):
            writer.write(example.encode({"id": k, "noise": chance.bytes(100 + k % 7)}))
    reader = spark.read.format(format).option("recordType", "Example")
    split = reader.option("maxPartitionBytes", path.stat().st_size // 3).load(str(path))
    assert 3 <= split.rdd.getNumPartitions() <= 4
    assert [row.id for row in split.select("id").orderBy("id").collect()] == list(range(1000))
    whole = spark.read.format(format).option("recordType", "Example").load(str(path))
    assert whole.rdd.getNumPartitions() == 1
    assert rows(whole) == rows(split)


@pytest.mark.parametrize(
    ("format", "codec"),
    [("ffrecord", ""), ("recordio", ""), ("recordio", "snappy"), ("recordio", "gzip")],
)
def test_ffrecord_and_recordio(spark: Any, out: str, format: str, codec: str) -> None:
    df = spark.createDataFrame([(b"one", 1), (b"\xff\x00", 2), (b"", 2)], "byteArray binary, k int")
    writer = df.write.format(format).partitionBy("k")
    (writer.option("codec", codec) if codec else writer).save(out)
    again = spark.read.format(format).load(out)
    assert again.dtypes == [("byteArray", "binary"), ("k", "int")]
    assert rows(again) == rows(df)
    with ffserve.open(f"{out}/k=1") as reader:
        assert reader.shards[0].format == format and bytes(reader[0]) == b"one"
    typed = spark.createDataFrame([(1, "x")], "id long, word string")
    typed.write.format(format).option("recordType", "Example").save(f"{out}2")
    assert rows(spark.read.format(format).option("recordType", "Example").load(f"{out}2")) == [
        (1, "x")
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk(spark: Any, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path], check=True)
    try:
        out = str(tmp_path / "table")
        spark.createDataFrame([(b"old",)], "byteArray binary").write.format("recordio").save(out)
        before = files(out)
        large = spark.createDataFrame([(os.urandom(100_000),) for _ in range(8)], "b binary")
        for mode in ("append", "overwrite"):
            with pytest.raises(PySparkException, match="No space left on device"):
                large.write.mode(mode).format("tfrecord").save(out)
        assert files(out) == before and "_temporary" not in os.listdir(out)
        assert [bytes(row[0]) for row in spark.read.format("recordio").load(out).collect()] == [
            b"old"
        ]
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_errors_fit_on_one_screen(spark: Any, tmp_path: Path, out: str) -> None:
    for name in ("kinds", "cut", "garbage"):
        (tmp_path / name / "k=1").mkdir(parents=True)
    kinds, cut, garbage = (tmp_path / n / "k=1" / "a.tfrecord" for n in ("kinds", "cut", "garbage"))
    write(kinds, {"id": 1}, {"id": "text"})
    write(cut, {"id": 1}, {"id": 2})
    cut.write_bytes(cut.read_bytes()[:-3])
    garbage.write_bytes(b"no record has such a header")
    typed = spark.read.schema("id long, k int").format("tfrecord")
    lists = spark.createDataFrame([([1, None],)], "v array<long>")
    for act, text in (
        (lambda: typed.load(str(kinds)), f"{kinds}: row 1, column 'id': it holds byte strings"),
        (lambda: typed.load(str(cut)), f"{cut}, byte "),
        (lambda: typed.load(str(garbage)), f"{garbage}, byte 0"),
        (lambda: read(spark, str(kinds)), "feature 'id' holds byte strings in row 1"),
        (lambda: read(spark, str(cut)), f"{cut}, byte "),
        (lambda: read(spark, str(garbage)), f"{garbage}, byte 0"),
        (lambda: lists.write.format("tfrecord").save(out), "row 0, column 'v'"),
    ):
        with pytest.raises(PySparkException) as caught:
            found = act()
            found.collect()
        assert text in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 25, str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        *("true", "date'2024-01-31'", "timestamp'2024-01-31 00:00:00'", "map('a', 1)"),
        *("struct(1)", "cast(1 as smallint)", "null", "array(true)", "interval 1 day"),
        "array(array(array(1)))",
    ],
)
def test_types_that_records_cannot_hold(spark: Any, out: str, value: str) -> None:
    df = spark.sql(f"SELECT 1 AS a, {value} AS b")
    with pytest.raises(AnalysisException, match=r"column 'b' has the type.*cast it to int, bigint"):
        df.write.format("tfrecord").option("recordType", "SequenceExample").save(out)
    assert not os.path.exists(out)
