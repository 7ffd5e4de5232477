"""Programs as people write them for the original ffrecord, with nothing but the import changed.

`programs/` has converters, data sets, training loops and benchmarks. They are written for this test
after descriptions of public programs, and check every sample that they read. Each runs without a
daemon, through one, and through one whose arena is smaller than some of the samples. Where the
original is installed, they run with it as well: so they are programs for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import serving

pytestmark = pytest.mark.interop

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))


def changed(program: str) -> str:
    """Change the imports, as docs/howto/replace.md tells."""
    program = re.sub(r"^import ffrecord$", "import ffserve as ffrecord", program, flags=re.M)
    return re.sub(r"^(from|import) ffrecord\b", r"\1 ffserve", program, flags=re.M)


@contextlib.contextmanager
def environment(server: str, directory: Path) -> Iterator[dict[str, str]]:
    if server == "none":
        yield {**os.environ, "FFSERVE_SOCKET": str(directory / "none")}
        return
    with serving(arena=server) as daemon:
        yield {**os.environ, "FFSERVE_SOCKET": daemon.socket}
        assert daemon.status()["jobs"], "the program read through the daemon"


@pytest.mark.parametrize("server", ["none", "64MiB", "4MiB"])
@pytest.mark.parametrize("name", NAMES)
def test_a_program_runs_unchanged(name: str, server: str, tmp_path: Path) -> None:
    program = tmp_path / f"{name}.py"
    program.write_text(changed((PROGRAMS / f"{name}.py").read_text()))
    (tmp_path / "files").mkdir()
    with environment(server, tmp_path) as variables:
        done = ran(program, tmp_path / "files", variables)
    too_large = done.stderr.count("the daemon has no memory for samples")
    assert (too_large > 0) == (name == "large" and server == "4MiB"), done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("ffrecord") is None,
    reason="not installed (pip install ffrecord)",
)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_program_for_the_original(name: str, tmp_path: Path) -> None:
    ran(PROGRAMS / f"{name}.py", tmp_path, dict(os.environ))


def ran(
    program: Path, directory: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, program, directory],
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("ok"), done.stdout + done.stderr
    return done
