"""A Ray of two cores for all tests of this folder."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server

SOCKET = os.path.join(tempfile.gettempdir(), f"ffs-ray-{os.getpid()}")
"""What FFSERVE_SOCKET is in all tasks; a test may put a daemon there."""
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray names it so
"""Ray's own is 15: beside other programs, tasks starve."""


@pytest.fixture(scope="session")
def ray_data() -> Iterator[Any]:
    """The module ``ray.data``, in a session of its own."""
    ray = pytest.importorskip("ray", reason="needs Ray (make ray)")
    os.environ["FFSERVE_SOCKET"] = SOCKET  # tasks inherit it
    s3_server.lead_there()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        import ray.data
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    yield ray.data
    ray.shutdown()
    del os.environ["FFSERVE_SOCKET"]


@pytest.fixture
def out(tmp_path: Path) -> str:
    """A path at which nothing is yet."""
    return str(tmp_path / "table")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty bucket of S3."""
    with s3_server.bucket(tmp_path_factory.mktemp("moto") / "output") as url:
        yield url
