"""Data sets of other packages, converted: docs/howto/coming-from.md, section by section."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

PACKAGES = {
    "mds": ("streaming", "mosaicml-streaming"),
    "litdata": ("litdata", "litdata"),
    "webdataset": ("webdataset", "webdataset"),
    "imagefolder": ("torchvision", "torchvision"),
    "parquet": ("datasets", "datasets"),
    "arrow": ("datasets", "datasets"),
    "arrayrecord": ("array_record", "array-record"),
    "lmdb": ("lmdb", "lmdb"),
    "h5py": ("h5py", "h5py"),
}
PROGRAM = Path(__file__).parents[1] / "support" / "other_packages.py"


def run(check: str, kind: str, folder: Path) -> str:
    """Run a check in this interpreter, or in the package's own environment (.ci/setup)."""
    module, package = PACKAGES[kind]
    python = sys.executable
    if importlib.util.find_spec(module) is None:
        python = os.path.join(sys.prefix, "peers", package, "bin", "python")
        if not os.path.exists(python):
            pytest.skip(f"needs {package} (make interop)")
    done = subprocess.run(
        [python, PROGRAM, check, kind],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(PROGRAM.parents[2]), "FFSERVE_SOCKET": str(folder / "none")},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize("kind", PACKAGES)
def test_their_lines_and_ours_use_the_same_samples(tmp_path: Path, kind: str) -> None:
    run("compare", kind, tmp_path)


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_killed_conversion_goes_on_to_the_same_bytes(tmp_path: Path, kind: str) -> None:
    run("resume", kind, tmp_path)


@pytest.mark.parametrize("kind", PACKAGES)
def test_memory_is_bounded(tmp_path: Path, kind: str) -> None:
    """300 MB in samples of 1 MiB; compressed shards have 64 MiB."""
    for line in run("memory", kind, tmp_path).splitlines():
        if line.startswith(kind):
            _, size, growth = line.split()
            print(line)
            assert int(size) >= 250 and int(growth) < (120 if kind == "litdata" else 200)
