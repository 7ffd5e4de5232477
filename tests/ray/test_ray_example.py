"""The example that feeds a training loop from Ray Data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs Ray (make ray)")
pytest.importorskip("torch")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_loop_is_fed_from_the_table(tmp_path: Path) -> None:
    table = tmp_path / "table"
    done = subprocess.run(
        [sys.executable, "-m", "ffserve.examples.ray_torch", str(table), "--cpus", "2"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {path.name for path in table.iterdir()} == {
        "_SUCCESS", *(f"entity={k}" for k in range(4)),
    }  # fmt: skip
    assert len(re.findall(r"epoch \d: 4000 samples", done.stdout)) == 3, done.stdout
    [weights] = re.findall(r"weights (.*)", done.stdout)
    assert [float(w) for w in weights.split()] == pytest.approx([1, -2, 0.5, 0.25], abs=0.05)
