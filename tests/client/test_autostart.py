"""`server="start"`: a daemon that a reader starts, and that ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import text_of
from daemon import DEADLINE_S, run_python, sample, serving, write
from own_daemons import daemons

import ffserve
from ffserve.client.daemon import connection

PROGRAM = """
import ffserve, sys
with ffserve.open(sys.argv[1], server=sys.argv[2]) as reader:
    print(reader.source, bytes(reader[7]).hex())
"""
COUNT = 50


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", [sample(i) for i in range(COUNT)])


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where programs look for a daemon and start one; what they started is killed."""
    path = str(tmp_path / "s")
    monkeypatch.setenv("FFSERVE_SOCKET", path)
    monkeypatch.delenv("FFSERVE_START", raising=False)
    yield path
    for pid in daemons(path):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.check
def test_many_processes_at_once_start_one_daemon(path: str, socket: str) -> None:
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, path, "start"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for program in programs:
        out, _ = program.communicate(timeout=120)
        assert out == f"daemon {socket} {sample(7).hex()}\n"
    assert len(daemons(socket)) == 1


def test_status_and_stop_find_it(path: str, socket: str) -> None:
    run_python(PROGRAM, path, "start")
    assert connection.status(socket)["pid"] == daemons(socket)[0]
    assert text_of("stop", "--socket", socket).startswith("stopped the daemon")
    assert daemons(socket) == []
    assert not os.path.exists(socket)


def test_a_process_with_many_open_files_could_not_start_one(path: str, socket: str) -> None:
    program = (
        "import os, resource\nhard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
        "for _ in range(1100): os.dup(0)\n"
    )
    assert "daemon" in run_python(program + PROGRAM, path, "start").stdout
    assert len(daemons(socket)) == 1


def test_it_is_no_child_of_the_process_that_started_it(path: str, socket: str) -> None:
    program = PROGRAM + (
        "import os\ntry:\n    os.waitpid(-1, 0)\nexcept ChildProcessError:\n    print('no child')\n"
    )
    assert "no child" in run_python(program, path, "start").stdout
    (pid,) = daemons(socket)
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"


def test_it_has_no_settings_of_the_machine_s_daemon(path: str, socket: str) -> None:
    run_python(PROGRAM, path, "start")
    command = Path(f"/proc/{daemons(socket)[0]}/cmdline").read_bytes().split(b"\0")
    assert command[command.index(b"--config") + 1] == b"/dev/null"


def test_nothing_is_started_unless_it_is_asked_for(path: str, socket: str) -> None:
    assert "engine" in run_python(PROGRAM, path, "auto").stdout
    assert daemons(socket) == []
    assert not os.path.exists(socket + ".log")


@pytest.mark.check
def test_the_environment_asks_for_it(
    path: str, socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFSERVE_START", "1")
    assert "engine" in run_python(PROGRAM, path, "off").stdout
    assert daemons(socket) == []
    assert "daemon" in run_python(PROGRAM, path, "auto").stdout
    assert len(daemons(socket)) == 1
    monkeypatch.setenv("FFSERVE_START", "yes")
    with pytest.raises(ffserve.UsageError, match="'yes' of FFSERVE_START"):
        ffserve.open(path)


def test_a_loop_starts_one(path: str, socket: str) -> None:
    program = (
        "import asyncio, sys\nfrom ffserve import aio\n"
        "async def main():\n"
        "    async with aio.open(sys.argv[1], server='start') as reader:\n"
        "        print(reader.source, len(await reader.read([1, 2])))\n"
        "asyncio.run(main())\n"
    )
    assert "daemon" in run_python(program, path).stdout
    assert len(daemons(socket)) == 1


def test_one_that_cannot_be_started_is_said_once(
    path: str, socket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "s").write_text("in the way")
    with ffserve.open(path, server="start") as reader, ffserve.open(path, server="start"):
        assert "engine" in reader.source
        assert bytes(reader[7]) == sample(7)
        assert "is not a socket" in reader.stats()["unserved"]
    (line,) = caplog.messages
    assert "no daemon could be started" in line
    assert "the daemon that this process started ended at once" in line
    assert f"see {socket}.log" in line


def test_a_missing_directory_of_the_socket_is_said(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", str(tmp_path / "nowhere" / "s"))
    with ffserve.open(path, server="start") as reader:
        assert "engine" in reader.source
    assert "the directory of the socket does not exist" in caplog.text


def test_a_log_that_leads_elsewhere_is_refused(
    path: str, socket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.symlink(victim, socket + ".log")
    with ffserve.open(path, server="start") as reader:
        assert "engine" in reader.source
    assert victim.read_text() == "precious"
    assert daemons(socket) == []


@pytest.mark.check
def test_a_lost_daemon_is_not_started_again_by_a_reader(path: str, socket: str) -> None:
    # `ffserve stop` would have no effect while a job runs.
    with ffserve.open(path, server="start") as reader:
        assert "daemon" in reader.source
        text_of("stop", "--socket", socket)
        assert bytes(reader[7]) == sample(7)
        assert daemons(socket) == []


@pytest.mark.check
def test_a_daemon_ends_after_its_last_client(path: str) -> None:
    with serving(
        options=["--idle-timeout", "2"], expect=["no client has been connected for 2 s"]
    ) as daemon:
        assert daemon.process is not None
        with daemon.open(path) as reader:
            began = time.monotonic()
            while time.monotonic() - began < 3:
                reader.read([1])
                time.sleep(0.1)
            assert daemon.process.poll() is None
        connection.status(daemon.socket)
        assert daemon.process.wait(DEADLINE_S) == 0
        daemon.process = None
        assert not os.path.exists(daemon.socket)
