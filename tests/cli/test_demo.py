"""The demo, run small, and what it leaves behind: nothing."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import until

from ffserve.bench import child_processes
from ffserve.errors import FFServeError

EPOCHS = 2


@pytest.fixture(autouse=True)
def nothing_stays_beside_the_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The daemon's socket is not below --dir, which may be too long a path for one."""
    with tempfile.TemporaryDirectory(prefix="ffs-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert not list(Path(directory).glob("ffserve-*"))


def command(place: Path, *arguments: str) -> list[str]:
    place.mkdir()
    return [
        sys.executable, "-m", "ffserve", "demo", "--files", "80", "--dir", str(place),
        *(() if "--epochs" in arguments else ("--epochs", str(EPOCHS))), *arguments,
    ]  # fmt: skip


def processes_of(place: Path) -> list[str]:
    """Return the command lines of processes that work in a place."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = os.fsdecode((entry / "cmdline").read_bytes().replace(b"\0", b" "))
            except OSError:
                continue
            if str(place) in line:
                found.append(line)
    return found


def assert_nothing_left(place: Path) -> None:
    assert list(place.iterdir()) == []
    until(lambda: not processes_of(place), "every process has ended")


def await_first_epoch(process: subprocess.Popen[str]) -> None:
    """Read no further, so that it gets no further than a small pipe lets it."""
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    for line in process.stdout:
        if "epoch 1" in line:
            return
    raise AssertionError("it ended before")


FRAMEWORKS = [
    pytest.param(
        "PyTorch",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("torch") is None, reason="there is no torch"
        ),
    ),
    "numpy",
]


@pytest.mark.check
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_jobs_read_the_data_once(framework: str, tmp_path: Path) -> None:
    arguments = ["--json"] if framework == "PyTorch" else ["--json", "--no-torch"]
    place = tmp_path / "place"
    done = subprocess.run(command(place, *arguments), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    samples, size = result["samples"], result["size_bytes"]
    first, second = result["jobs"]
    assert result["framework"] == framework
    assert result["files"] == 80
    assert samples == 80
    assert result["checksum_failures"] == 0
    for job in (first, second):
        assert job["samples"] == samples * EPOCHS
        assert job["size_bytes"] == size * EPOCHS
        assert job["hits"] + job["missed"] == samples * EPOCHS
        assert job["last_loss"] < job["first_loss"]
        assert job["errors"] == 0
    # Once: all of it, in whole blocks, and nothing for the second job.
    assert size <= first["read_from_disk_bytes"] <= size + 8192 * samples
    assert second["read_from_disk_bytes"] == 0
    if framework != "PyTorch":  # whose loader announces what it will want, and finds it there
        assert first["missed"] >= samples
    assert second["hit_rate"] == 1
    # The same order and the same bytes: the second job learned exactly the same.
    assert second["last_loss"] == pytest.approx(first["last_loss"], rel=1e-3)
    assert_nothing_left(place)


@pytest.mark.check
def test_the_text_explains_each_step(tmp_path: Path) -> None:
    place = tmp_path / "a-directory-whose-path-is-too-long-for-a-socket" / ("x" * 60)
    place.parent.mkdir()
    done = subprocess.run(
        command(place, "--no-torch", "--engine", "threads"),
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("engine threads", "hit rate", "checksum failures", "job 2", "100.0 %",
                  "Next steps", "numpy"):  # fmt: skip
        assert words in done.stdout
    assert_nothing_left(place)


@pytest.mark.check
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    place = tmp_path / "place"
    with subprocess.Popen(
        command(place, "--no-torch", "--epochs", "100"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        await_first_epoch(process)
        assert len(processes_of(place)) >= 2
        process.send_signal(number)
        assert process.stdout is not None
        rest = process.stdout.read()
        assert process.wait(30) == 130
    assert "Traceback" not in rest
    assert_nothing_left(place)


@pytest.mark.check
def test_a_demo_whose_daemon_dies_reports_it_and_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with subprocess.Popen(
        command(place, "--no-torch", "--epochs", "100"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        await_first_epoch(process)
        [daemon] = [pid for pid in children(process.pid) if b"\0serve\0" in command_line(pid)]
        os.kill(daemon, signal.SIGKILL)
        _, error = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "the daemon ended with code -9" in error
    assert "Traceback" not in error.partition("the training job failed")[0]
    assert_nothing_left(place)


def test_the_traceback_of_a_daemon_that_dies_at_its_start_is_written_as_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = [sys.executable, "-c", "def start():\n    raise RuntimeError('broken')\nstart()"]
    with (
        pytest.raises(FFServeError, match=r"^the daemon ended with code 1: RuntimeError: broken$"),
        child_processes.daemon([str(tmp_path)], 16 << 20, program=program),
    ):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "the daemon ended with code 1; it has written:"
    assert lines[1].strip() == "Traceback (most recent call last):"
    assert lines[-1].strip() == "RuntimeError: broken" and len(lines) >= 5


def children(parent: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
