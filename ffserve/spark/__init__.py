"""Read and write record files in Spark as DataFrames; see docs/SPARK.md.

    ffserve.spark.register(spark)
    df.write.mode("overwrite").partitionBy("day").format("tfrecord").save("/data/table")
    spark.read.format("tfrecord").load("/data/table").show()

The formats are "tfrecord" (also "tfrecords"), "ffrecord" and "recordio". This needs pyspark 4.1 and
pyarrow: ``pip install 'ffserve[spark]'``, on the driver and on all executors.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from ffserve.errors import UsageError

__all__ = ["register", "skipped"]

_COUNTER = "_ffserve_skipped"
_SIZE = re.compile(r"([0-9]+) *([kmgtp]?)i?b?", re.IGNORECASE)


def register(spark: Any) -> None:
    """Register the formats "tfrecord", "tfrecords", "ffrecord" and "recordio" in a session.

    It also wraps ``DataFrameWriter``, so that partitionBy and all save modes work for these
    formats; others are not affected. Call it again after a change of the session's time zone or
    partition size.

    Args:    spark: a SparkSession.
    Raises:  UsageError: pyspark or pyarrow is missing or too old.
    """
    try:
        from ffserve.spark.data_source import NAMES, source_class
        from ffserve.spark.options import Settings
        from ffserve.spark.wrapping import wrap_writer
    except ImportError as error:
        raise UsageError(
            f"pyspark 4.1 or newer and pyarrow are needed: {error}",
            hint="pip install 'ffserve[spark]'",
        ) from error
    try:
        context = spark.sparkContext
    except AttributeError as error:
        raise UsageError(
            "a Spark Connect session cannot register the formats of another process",
            hint="use a session of this process (SparkSession.builder.master(…))",
        ) from error
    prefix = "spark.sql.sources.partitionColumnTypeInference.enabled"
    settings = Settings(
        _size(spark.conf.get("spark.sql.files.maxPartitionBytes")),
        _size(spark.conf.get("spark.sql.files.openCostInBytes")),
        spark.conf.get("spark.sql.session.timeZone"),
        spark.conf.get(prefix).lower() == "true",
        _counter(context),
    )
    given = context.pythonExec
    if given == "python3" and context.master.startswith("local"):
        # Spark's default is whatever python3 the PATH has; its workers here need this one.
        context.pythonExec = sys.executable
    # Spark compares the names with those of the active session, which may be another one.
    context._jvm.SparkSession.setActiveSession(spark._jsparkSession)
    try:
        for name in NAMES:
            spark.dataSource.register(source_class(name, settings))
    finally:
        context.pythonExec = given
    wrap_writer()


def skipped(spark: Any) -> int:
    """Return how many damaged records reads with ``on_error=skip`` have left out so far.

    Args:    spark: a session that was registered. A task that ran twice may count twice.
    """
    return int(_counter(spark.sparkContext).value)


def _counter(context: Any) -> Any:
    """Return the accumulator of a SparkContext."""
    if not hasattr(context, _COUNTER):
        setattr(context, _COUNTER, context.accumulator(0))
    return getattr(context, _COUNTER)


def _size(text: str) -> int:
    """Return the bytes of a Spark setting such as 128MB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"invalid size {text!r}")
    return int(found[1]) << 10 * " kmgtp".index(found[2].lower() or " ")
