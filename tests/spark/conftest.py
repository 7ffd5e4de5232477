"""A Spark session of two cores for all tests of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session in which tasks are tried three times, and with ffserve registered."""
    sql = pytest.importorskip("pyspark.sql", reason="needs pyspark (make spark)")
    folder = str(tmp_path_factory.mktemp("spark"))
    s3_server.lead_there()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = (
            sql.SparkSession.builder.master("local[2,3]")
            .config("spark.driver.memory", "1g")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.execution.arrow.maxRecordsPerBatch", "16")
            .config("spark.sql.warehouse.dir", folder)
            .config("spark.local.dir", folder)
            .config("spark.sql.session.timeZone", "Europe/Amsterdam")
            .getOrCreate()
        )
    session.sparkContext.setLogLevel("OFF")
    import ffserve.spark

    ffserve.spark.register(session)
    yield session
    session.stop()


@pytest.fixture
def out(tmp_path: Path) -> str:
    """A path at which nothing is yet."""
    return str(tmp_path / "table")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty bucket of S3."""
    with s3_server.bucket(tmp_path_factory.mktemp("moto") / "output") as url:
        yield url
