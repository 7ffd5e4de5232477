"""The example that prepares data in Spark and trains on its partitions through the daemon."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from daemon import serving

pytest.importorskip("pyspark", reason="needs pyspark (make spark)")
pytest.importorskip("torch")

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_each_entity_is_trained_from_its_partition_through_the_daemon(tmp_path: Path) -> None:
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
    environment.pop("PYSPARK_GATEWAY_PORT", None)
    with serving() as daemon:
        done = subprocess.run(
            [sys.executable, "-m", "ffserve.examples.spark_torch", str(tmp_path / "table")],
            env={**environment, "FFSERVE_SOCKET": daemon.socket},
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = re.findall(
            r"entity=(\d): 1000 samples, loss (\S+), weights (\S+) (\S+) (\S+) (\S+)",
            done.stdout,
        )
        assert daemon.cache()["blocks_read"] > 0
    assert [row[0] for row in found] == ["0", "1", "2", "3"], done.stdout
    for entity, loss, *weights in found:
        k = int(entity)
        expected = [math.cos(k), math.sin(k), -1, 0.5]
        assert [float(weight) for weight in weights] == pytest.approx(expected, abs=0.05)
        assert float(loss) < 0.01
