"""Every program of ffserve.examples runs, with and without a daemon."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from daemon import run_python

import ffserve
from ffserve import examples
from ffserve.bench import child_processes

TORCH = importlib.util.find_spec("torch") is not None
NOT_PROGRAMS = {"next_byte"}


def run(name: str, *arguments: str | Path, server: str = "off") -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"ffserve.examples.{name}", *map(str, arguments)],
        capture_output=True, text=True, timeout=100,
        env={**os.environ, "FFSERVE_SOCKET": server, "PYTHONWARNINGS": "error"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    with ffserve.create(directory / "sources.ffr") as writer:
        for path in sorted(Path(ffserve.__file__).parent.glob("*.py")) * 8:
            writer.write(path.read_bytes())
    return directory


@pytest.mark.check
@pytest.mark.parametrize("suffix", ["ffr", "recordio", "tfrecord"])
def test_read_and_write(suffix: str, tmp_path: Path) -> None:
    said = run("read_and_write", tmp_path / f"a.{suffix}", "--count", "20")
    assert "20 samples" in said and "first: 'sample 0', last: 'sample 19'" in said
    assert said.count(f"{10 * 8 + 10 * 9} bytes") == 2
    assert "leased: ['sample 3', 'sample 4']" in said


@pytest.mark.check
@pytest.mark.skipif(not TORCH, reason="torch is not installed")
def test_load_torch(data: Path) -> None:
    said = run("load_torch", data, "--epochs", "1", "--workers", "1")
    assert f"epoch 1: {len(ffserve.open(data, server='off'))} samples" in said


@pytest.mark.check
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "train_torch", marks=pytest.mark.skipif(not TORCH, reason="torch is not installed")
        ),
        "train_numpy",
    ],
)
def test_train_through_a_daemon(name: str, data: Path) -> None:
    with child_processes.daemon([str(data)], 64 << 20) as daemon:
        said = run(name, data, "--epochs", "2", "--workers", "1", "--json", server=daemon.socket)
        events: list[dict[str, Any]] = [json.loads(line) for line in said.splitlines()]
        read = daemon.status()["cache"]["blocks_read"]
    epochs = [event for event in events if event["event"] == "epoch"]
    assert [event["samples"] for event in epochs] == [read, read]
    assert epochs[1]["last_loss"] < epochs[0]["first_loss"]


HELP = """
import contextlib, io, runpy, sys
for name in sys.argv[1:]:
    sys.argv, said = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_module(f"ffserve.examples.{name}", run_name="__main__")
    assert f"usage: {name}" in said.getvalue(), name
"""


@pytest.mark.check
def test_every_example_has_a_help_text_and_is_listed() -> None:
    names = {module.name for module in pkgutil.iter_modules(examples.__path__)} - NOT_PROGRAMS
    for name in names:
        assert f"    {name} " in (examples.__doc__ or ""), name
    run_python(HELP, *(name for name in names if TORCH or "torch" not in name))
