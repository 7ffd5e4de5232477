"""Sessions, threads, SQL and the ways to name files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="needs pyspark (make spark)")
from pyspark.errors import AnalysisException, PySparkException

import ffserve
import ffserve.spark
from ffserve import example
from ffserve.errors import UsageError

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two partitions with a row each."""
    for k in (1, 2):
        folder = tmp_path / "table" / f"k={k}"
        folder.mkdir(parents=True)
        with ffserve.create(folder / "a.tfrecord") as writer:
            writer.write(example.encode({"v": 10 * k, "w": "text"}))
    return tmp_path / "table"


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def test_sql(spark: Any, table: Path) -> None:
    spark.sql(f"CREATE TEMPORARY VIEW one USING tfrecord OPTIONS (path '{table}')")
    assert rows(spark.sql("SELECT k, sum(v) FROM one GROUP BY k")) == [(1, 10), (2, 20)]
    spark.sql(f"CREATE TABLE two USING tfrecord LOCATION '{table}'")
    assert rows(spark.sql("SELECT v, k FROM two")) == [(10, 1), (20, 2)]
    spark.sql("DROP TABLE two")
    assert (table / "k=1" / "a.tfrecord").exists()


def test_writes_that_pass_save_by_are_refused_and_change_nothing(spark: Any, table: Path) -> None:
    spark.sql(f"CREATE TEMPORARY VIEW three USING tfrecord OPTIONS (path '{table}')")
    spark.sql(f"CREATE TABLE four USING tfrecord LOCATION '{table}'")
    df = spark.createDataFrame([(1, "x", 1)], "v long, w string, k int")
    other = str(table.parent / "other")
    ways = {
        "INSERT INTO a view": lambda: spark.sql("INSERT INTO three VALUES (1, 'x', 1)"),
        "INSERT INTO": lambda: spark.sql("INSERT INTO four VALUES (1, 'x', 1)"),
        "INSERT OVERWRITE": lambda: spark.sql("INSERT OVERWRITE four VALUES (1, 'x', 1)"),
        "insertInto": lambda: df.write.insertInto("four"),
        "saveAsTable": lambda: df.write.format("tfrecord").saveAsTable("five"),
        "saveAsTable with a path": lambda: (
            df.write.format("tfrecord").option("path", other).saveAsTable("five")
        ),
        "CREATE TABLE AS": lambda: spark.sql("CREATE TABLE five USING tfrecord AS SELECT 1 AS v"),
        "writeTo": lambda: df.writeTo("five").using("tfrecord").create(),
    }
    before = sorted(table.rglob("*"))
    for name, write in ways.items():
        with pytest.raises(
            AnalysisException, match=r"only with DataFrameWriter\.save of Python"
        ) as found:
            write()
        assert 'format("tfrecord").save(path)' in str(found.value), name
    assert sorted(table.rglob("*")) == before and not Path(other).exists()
    spark.sql("DROP TABLE four")


def test_unsupported_statements_say_so(spark: Any, table: Path) -> None:
    spark.sql(f"CREATE TABLE six (v long) USING tfrecord LOCATION '{table}'")
    with pytest.raises(AnalysisException, match=r"no path.*LOCATION without a list of columns"):
        spark.sql("SELECT * FROM six").collect()
    spark.sql("DROP TABLE six")
    with pytest.raises(AnalysisException, match="UNSUPPORTED_DATASOURCE_FOR_DIRECT_QUERY"):
        spark.sql(f"SELECT * FROM tfrecord.`{table}`")
    with pytest.raises(PySparkException, match=r"NOT_IMPLEMENTED|not implemented"):
        stream = spark.readStream.format("tfrecord").load(str(table)).writeStream
        stream.format("noop").start().processAllAvailable()
    df = spark.createDataFrame([(1, "x")], "v long, w string")
    with pytest.raises(UsageError, match="cannot write to http:// URLs"):
        df.write.format("tfrecord").save("http://127.0.0.1:9/table")
    with pytest.raises(UsageError, match="Spark Connect session"):
        ffserve.spark.register(object())


def test_ways_to_name_files(spark: Any, table: Path) -> None:
    def load(paths: Any) -> list[tuple[Any, ...]]:
        return rows(spark.read.schema("v long").format("tfrecord").load(paths))

    assert load([f"{table}/k=1", f"{table}/k=2/a.tfrecord"]) == [(10,), (20,)]
    assert (
        load(f"{table}/k=*") == load(f"file:{table}") == load(f"file://{table}") == [(10,), (20,)]
    )
    pytest.importorskip("fsspec")
    assert load(f"local://{table}") == load([f"local://{table}/k=*"]) == [(10,), (20,)]
    with pytest.raises(AnalysisException, match="the file system 'hdfs' is not supported"):
        spark.read.format("tfrecord").load("hdfs:/table")
    with pytest.raises(AnalysisException, match="no file matches the pattern"):
        spark.read.format("tfrecord").load(f"{table}/z*")


def test_counts_without_reading_the_records(spark: Any, table: Path) -> None:
    path = table / "k=2" / "a.tfrecord"
    data = bytearray(path.read_bytes())
    data[-6] ^= 1  # of the payload
    path.write_bytes(data)
    narrow = spark.read.schema("k int").format("tfrecord").load(str(table))
    assert narrow.count() == 2 and rows(narrow) == [(1,), (2,)]


def test_registering_again_and_in_a_new_session(spark: Any, table: Path) -> None:
    ffserve.spark.register(spark)
    assert spark.read.format("tfrecord").load(str(table)).count() == 2
    second = spark.newSession()
    ffserve.spark.register(second)
    assert second.read.format("tfrecord").load(str(table)).count() == 2


def test_threads(spark: Any, table: Path) -> None:
    found = []

    def count() -> None:
        ffserve.spark.register(spark)
        found.append(spark.read.format("tfrecord").load(str(table)).count())

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    assert found == [2]
