"""`ffserve stop`: which process it stops, and which it leaves alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import error_of, run, text_of
from daemon import DEADLINE_S, Daemon, run_python, sample, serving, until, write

import ffserve
from ffserve.client.daemon.connection import status
from ffserve.errors import ServerUnavailable

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes a process of another user")


@pytest.fixture
def own() -> Iterator[Daemon]:
    """A daemon that the test ends."""
    with serving() as daemon:
        yield daemon
        if daemon.process is None:
            daemon.start()


def answers(socket: str) -> bool:
    """Return whether a daemon answers on a socket."""
    with contextlib.suppress(ServerUnavailable):
        return bool(status(socket))
    return False


def ended(daemon: Daemon) -> int:
    """Return the exit code of a daemon that ends by itself."""
    assert daemon.process is not None
    code = daemon.process.wait(DEADLINE_S)
    daemon.process = None
    return code


def test_stop_waits_for_the_end(own: Daemon) -> None:
    pid = own.pid
    assert text_of("stop", "--socket", own.socket) == (
        f"stopped the daemon (pid {pid}) on {own.socket}\n"
    )
    assert not os.path.exists(own.socket)
    assert ended(own) == 0
    assert "no daemon answers" in error_of("stop", "--socket", own.socket, code=3)


def test_stop_in_json(own: Daemon) -> None:
    pid = own.pid
    facts = json.loads(text_of("stop", "--socket", own.socket, "--json"))
    assert facts == {"socket": own.socket, "pid": pid, "ended": True}
    ended(own)


@pytest.mark.check
def test_jobs_continue_without_the_daemon(own: Daemon, tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [sample(i) for i in range(100)])
    program = """
import ffserve, os, sys
os.environ["FFSERVE_SOCKET"] = sys.argv[2]
with ffserve.open(sys.argv[1]) as reader:
    assert reader.source.startswith("daemon")
    print("ready", flush=True)
    sys.stdin.readline()
    total = sum(len(sample) for sample in reader)
    print(total, reader.source)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, path, own.socket],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        run("stop", "--socket", own.socket)
        out, _ = job.communicate("go\n", timeout=DEADLINE_S)
    assert job.returncode == 0
    total = sum(len(sample(i)) for i in range(100))
    assert out.startswith(f"{total} engine")
    ended(own)


def test_no_wait(own: Daemon) -> None:
    said = text_of("stop", "--socket", own.socket, "--no-wait")
    assert said.startswith(("stopping the daemon", "stopped the daemon"))
    assert ended(own) == 0


@needs_root
def test_another_user_may_not_stop_it() -> None:
    program = """
import os, sys
from ffserve import cli
cli.run(["stop", "--socket", "/none"])  # imports, while that is allowed
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(cli.run(["stop", "--socket", sys.argv[1]]))
"""
    with serving(options=["--socket-mode", "0666"]) as daemon:
        done = run_python(program, daemon.socket, code=2)
        assert f"the daemon (pid {daemon.pid}) belongs to user 0" in done.stderr
        assert "only that user and root" in done.stderr
        assert daemon.status()["pid"] == daemon.pid


HOLDER = """
import os, socket, sys
with open("/proc/self/comm", "w") as file:
    file.write(sys.argv[2])
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
pid = os.fork()
if pid == 0:
    os.dup2(listener.fileno(), 3)
    os.set_inheritable(3, True)
    environment = {**os.environ, "LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "ffserve", "serve", "--arena", "16MiB"],
              environment)
print(pid, flush=True)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""Holds the socket of a daemon, as a service manager does."""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("systemd", "use `systemctl --user stop ffserve.socket ffserve.service`"),
        ("keeper", "is not the process that listens on the socket (keeper, pid"),
    ],
)
def test_a_daemon_whose_socket_a_service_manager_holds(
    tmp_path: Path, name: str, said: str
) -> None:
    socket = str(tmp_path / "s")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, socket, name], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        try:
            # A client waits for less long than a busy machine may take to start the daemon.
            until(lambda: answers(socket), "it answers")
            assert said in error_of("stop", "--socket", socket, code=2)
            assert json.loads(text_of("status", "--socket", socket, "--json"))["pid"] == pid
        finally:
            os.kill(pid, signal.SIGTERM)
        assert holder.wait(DEADLINE_S) == 0


SLOW = """
import asyncio
from ffserve.server.sessions.server import Server
original = Server.drain
async def drain(self, patience_s):
    await asyncio.sleep(4)
    return await original(self, patience_s)
Server.drain = drain
"""


@pytest.mark.check
def test_it_says_what_it_waits_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [sample(i) for i in range(10)])
    with serving(patch=SLOW) as daemon:
        with ffserve.open(path, server=daemon.socket) as reader:
            reader.read(range(10))
            done = run("stop", "--socket", daemon.socket)
        assert done.stderr == b"waiting for the requests of 1 client\n"
        assert not os.path.exists(daemon.socket)
        ended(daemon)
        daemon.start()
