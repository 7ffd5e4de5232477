"""Examples in Spark, side by side with Parquet.

    python -m benchmarks.spark [--directory /dev/shm] [--size 256MiB] [--rounds 4]

Every figure is the time of Parquet divided by that of TFRecord for the same table in the same run:
best of the rounds, files in the page cache, two cores, a gigabyte for the driver. Parquet reads its
schema from the files, so it is compared with and without a schema here. Needs `make spark`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import ffserve.spark
from ffserve.config import parse_size

ROW_SIZE = 300


def table(spark: Any, size: int) -> DataFrame:
    """Return rows of an integer, a float, 32 floats and a text."""
    return spark.range(0, size // ROW_SIZE, 1, 4).selectExpr(
        "id",
        "cast(rand(1) as float) as x",
        "transform(sequence(1, 32), i -> cast(rand(2) * i as float)) as v",
        "concat('text of the record ', md5(cast(id as string)), md5(cast(-id as string))) as t",
    )


def best(rounds: int, ways: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the shortest time of each way, taken in turns."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            found[name] = min(found[name], time.perf_counter() - begun)
    return found


def consume(frame: DataFrame) -> None:
    """Read everything and drop it."""
    frame.write.format("noop").mode("overwrite").save()


def report(title: str, times: dict[str, float]) -> None:
    """Print a ratio per way."""
    for name, seconds in times.items():
        print(f"{title:6} {name:24} {seconds:6.2f} s  {times['parquet'] / seconds:5.2f}")


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--size", type=parse_size, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    spark: Any = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    ffserve.spark.register(spark)
    folder = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        compare(spark, folder, options.size, options.rounds)
    finally:
        shutil.rmtree(folder)
        spark.stop()


def compare(spark: Any, folder: Path, size: int, rounds: int) -> None:
    """Write and read the table in both formats."""
    rows = table(spark, size).persist()
    rows.count()

    def written(format: str) -> Callable[[], None]:
        return lambda: rows.write.mode("overwrite").format(format).save(f"{folder}/{format}")

    report("write", best(rounds, {name: written(name) for name in ("parquet", "tfrecord")}))
    rows.unpersist()
    schema = spark.read.parquet(f"{folder}/parquet").schema
    records = spark.read.format("tfrecord")
    ways = {
        "parquet": lambda: consume(spark.read.parquet(f"{folder}/parquet")),
        "tfrecord with a schema": lambda: consume(
            spark.read.schema(schema).format("tfrecord").load(f"{folder}/tfrecord")
        ),
        "tfrecord": lambda: consume(records.load(f"{folder}/tfrecord")),
    }
    report("read", best(rounds, ways))


if __name__ == "__main__":
    main()
