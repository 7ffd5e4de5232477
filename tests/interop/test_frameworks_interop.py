"""The framework faces and TFRecord, held against the real frameworks in an environment of theirs.

The tests themselves are those of ``tests/frameworks``, which are skipped where a framework is not
installed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from originals import python_with

pytestmark = pytest.mark.interop

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("cffi", "click", "cramjam", "msgpack", "numpy", "protobuf", "rich", "uvloop")
TESTING = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("tensorflow", ["tensorflow-cpu", "pyarrow"]),
        ("grain", ["grain"]),
        ("hf", ["datasets"]),
    ],
)
def test_under_the_real_framework(name: str, packages: list[str]) -> None:
    python = python_with(*packages, *NEEDED, *TESTING)
    # With tests/ on the module path, the folder tests/torch would be taken for PyTorch.
    options = ["-q", "-rs", "--import-mode=importlib"]
    done = subprocess.run(
        [python, "-m", "pytest", *options, f"tests/frameworks/test_{name}.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
