"""Environments of their own for the packages that ffserve is held against."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

PLACE = Path(__file__).resolve().parents[2] / ".interop"


def python_with(*packages: str) -> Path:
    """Return a Python that has these packages from the index, made once; such as "numpy==2.0"."""
    name = hashlib.sha256("\n".join((sys.version, *sorted(packages))).encode()).hexdigest()[:12]
    python = PLACE / name / "bin" / "python"
    done = PLACE / name / "complete"
    if not done.exists():
        venv.create(PLACE / name, clear=True, with_pip=True)
        command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *packages]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        done.write_text("\n".join(packages))
    return python


def run(python: Path, program: str, *arguments: str, feed: Sequence[str] = ()) -> str:
    """Run a program there; return what it prints."""
    done = subprocess.run(
        [python, "-c", program, *arguments],
        input="\n".join(feed),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
