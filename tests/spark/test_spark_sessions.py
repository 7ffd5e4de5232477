"""Sessions, threads, SQL and the ways to name files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="needs pyspark (make spark)")
from pyspark.errors import AnalysisException

import ffserve
import ffserve.spark
from ffserve import example

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


def test_ways_to_name_files(spark: Any, table: Path) -> None:
    def load(paths: Any) -> list[tuple[Any, ...]]:
        return rows(spark.read.schema("v long").format("tfrecord").load(paths))

    assert load([f"{table}/k=1", f"{table}/k=2/a.tfrecord"]) == [(10,), (20,)]
    assert (
        load(f"{table}/k=*") == load(f"file:{table}") == load(f"file://{table}") == [(10,), (20,)]
    )
    with pytest.raises(AnalysisException, match="the file system 'hdfs' is not supported"):
        spark.read.format("tfrecord").load("hdfs://host/table")
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
