"""What `make release` has built: the wheels in dist/, and pip for other Pythons and processors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ffserve

DIST = Path(__file__).parents[2] / "dist"
VERSION = ffserve.__version__
"""Of the sources; that of a build also names the commit."""


def wheel(architecture: str, tag: str = "abi3") -> Path:
    """Return the wheel for a processor."""
    found = list(DIST.glob(f"ffserve-{VERSION}*-{tag}-*_{architecture}.whl"))
    assert len(found) == 1, f"dist/ has {len(found)} wheels for {architecture}: run `make wheels`"
    return found[0]


def pip(*words: object) -> None:
    """Run pip of this environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def platform(architecture: str, python: str) -> list[str]:
    """Return the options of pip for another processor and another Python."""
    names = [f"manylinux_2_{minor}_{architecture}" for minor in range(28, 16, -1)]
    words = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    return [*words, *(f"--platform={each}" for each in (*names, f"manylinux2014_{architecture}"))]
