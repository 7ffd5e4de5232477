"""Descriptors of files whose file system answers when its owner wants, or never."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import (
    DEADLINE_S,
    Daemon,
    Raw,
    asking,
    client,
    run_python,
    sample,
    serving,
    stopped,
    until,
    write,
)
from fuse import COUNT, FLUSH, FUSE, GETATTR, READ, STATFS, TRUTH, fuse

from ffserve import protocol

ALICE = 61_001

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")

AS_ALICE = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
import daemon as support
from ffserve import protocol
os.setgroups([]); os.setgid({ALICE}); os.setuid({ALICE})
"""
PASS = (
    AS_ALICE
    + """
raws = [support.Raw(sys.argv[2]) for _ in range(int(sys.argv[3]))]
print("ready", flush=True)
for raw in raws:
    raw.send(support.asking(sys.argv[1]))
    if isinstance(raw.receive(), protocol.Need):
        raw.pass_files(1, [sys.argv[1]])
for raw in raws:
    while isinstance(answer := raw.receive(), protocol.Alive):
        pass
    print(answer, flush=True)
"""
)
"""A user who passes descriptors in some sessions, and prints what the daemon says."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can search, unlike pytest's own."""
    with contextlib.ExitStack() as stack:
        daemon = Daemon()
        stack.callback(daemon.close)
        yield daemon.directory


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon of root that everybody may connect to."""
    with serving(options=["--socket-mode", "0666", "--close-after", "0"]) as running:
        yield running


@contextlib.contextmanager
def silence(place: Path, silent: int, daemon: Daemon) -> Iterator[None]:
    """A user passes files of a file system that does not answer, which ends before him."""
    with contextlib.ExitStack() as ending, contextlib.ExitStack() as stack:
        path = stack.enter_context(fuse(place, silent))
        sender = ending.enter_context(client(PASS, path, daemon.socket, 6))
        time.sleep(0.5)
        yield
        assert sender.poll() is None


def held(daemon: Daemon, place: Path) -> list[str]:
    """The daemon's descriptors of files below a directory."""
    found = []
    for fd in os.listdir(f"/proc/{daemon.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{daemon.pid}/fd/{fd}"))
    return [name for name in found if name.startswith((str(place), "/a.ffr"))]


def others_are_served(daemon: Daemon, tmp_path: Path) -> None:
    """Check that another user opens files and reads them."""
    with daemon.open(write(tmp_path / "other.ffr", TRUTH)) as reader:
        assert [bytes(one) for one in reader.read(range(COUNT))] == TRUTH


def test_a_file_on_fuse_is_refused(daemon: Daemon, place: Path) -> None:
    with fuse(place) as path:
        done = run_python(PASS, path, daemon.socket, 1).stdout
        assert "access" in done and "file system (fuse)" in done, done
        with daemon.open(path) as reader:
            assert bytes(reader[3]) == TRUTH[3], "the daemon's own user may hang itself"
    others_are_served(daemon, place)


def test_a_file_on_fuse_that_the_administrator_allows(place: Path) -> None:
    options = ["--socket-mode", "0666", "--close-after", "0", "--file-system", "fuse"]
    with serving(options=options) as daemon, fuse(place) as path:
        assert "Opened" in run_python(PASS, path, daemon.socket, 1).stdout


@pytest.mark.check
@pytest.mark.parametrize("silent", [STATFS, FLUSH], ids=["statfs", "close"])
def test_a_file_system_that_does_not_answer_the_check(
    daemon: Daemon, place: Path, silent: int
) -> None:
    """Only the sender waits; when the file system ends, everything is given back."""
    with silence(place, silent, daemon):
        for _ in range(3):
            others_are_served(daemon, place)
    until(lambda: not held(daemon, place), "nothing is held")


def test_a_file_whose_reads_never_return(place: Path) -> None:
    """On a file system that the administrator allowed: the openings of one user wait."""
    options = ["--socket-mode", "0666", "--close-after", "0", "--file-system", "fuse"]
    with serving(options=options) as daemon:
        with silence(place, READ, daemon):
            for _ in range(3):
                others_are_served(daemon, place)
        until(lambda: not held(daemon, place), "nothing is held")


WAIT_AND_READ = """
import ffserve, sys
reader = ffserve.open(sys.argv[1], server=sys.argv[2])
reader[0]
print("ready", flush=True)
input()
reader.read(range(len(reader)))
"""
"""A job that opens a file, and reads most of it when it is told to."""


@pytest.mark.check
def test_a_disk_that_does_not_answer_is_logged_while_it_is_silent(place: Path) -> None:
    begin = place / "begin"
    patch = (
        "import ffserve.server.reading.engines as io, ffserve.server.sessions.server as server\n"
        "io.SLOW_S, server.ALIVE_INTERVAL_S = 1.0, 0.05"
    )
    line = rf"slow disk: a read from {place}/fuse \(device 0:\d+\) takes \d+\.\d s.*"
    large = [sample(index, [70_000]) for index in range(100)]  # more than is read ahead
    with serving(patch=patch) as daemon:
        with (
            fuse(place, READ, begin=begin, samples=large) as path,
            client(WAIT_AND_READ, path, daemon.socket) as job,
        ):
            assert f"read from {place}/fuse" not in daemon.text()
            begin.touch()
            assert job.stdin is not None
            job.stdin.write("\n")
            job.stdin.flush()
            until(lambda: f"read from {place}/fuse" in daemon.text(), "the daemon says so")
            others_are_served(daemon, place)
        daemon.end()
        assert len(re.findall(line, daemon.text())) == 1, "no read is counted twice"


@pytest.mark.check
def test_a_daemon_that_was_stopped_does_not_blame_the_disk(place: Path) -> None:
    patch = (
        "import ffserve.server.reading.engines as io, ffserve.server.sessions.server as server\n"
        "io.SLOW_S, server.ALIVE_INTERVAL_S = 3.0, 0.05"
    )
    source = write(place / "source.ffr", [sample(index, [70_000]) for index in range(100)])
    mounted = place / "fuse"
    mounted.mkdir()
    try:
        with (
            serving(patch=patch) as daemon,
            client(FUSE, source, mounted, "0", "/") as system,
            client(WAIT_AND_READ, mounted / "a.ffr", daemon.socket) as job,
        ):
            assert job.stdin is not None
            with stopped(system.pid):
                job.stdin.write("\n")
                job.stdin.flush()
                until(lambda: daemon.status()["engine"]["inflight"], "a read waits for the disk")
                os.kill(daemon.pid, signal.SIGSTOP)
                time.sleep(3.3)
            time.sleep(0.2)  # the read ends
            os.kill(daemon.pid, signal.SIGCONT)
            assert job.wait(DEADLINE_S) == 0
            daemon.end()
            assert f"read from {mounted}" not in daemon.text()
    finally:
        subprocess.run(["umount", "-l", mounted], capture_output=True)


@pytest.mark.check
def test_a_file_system_that_falls_silent_kept_deleted_files_of_others_open(place: Path) -> None:
    """Idle files were looked at one after another."""
    options = ["--socket-mode", "0666", "--file-system", "fuse"]
    begin = place / "begin"
    with serving(options=options) as daemon, fuse(place, GETATTR, begin=begin) as path:
        assert "Opened" in run_python(PASS, path, daemon.socket, 1).stdout
        begin.touch()
        time.sleep(1.5)  # it is looked at
        for k in range(2):
            deleted = write(place / f"deleted{k}.ffr", TRUTH)
            with daemon.open(deleted) as reader:
                assert bytes(reader[3]) == TRUTH[3]
            os.unlink(deleted)
            until(lambda k=k: not any(f"deleted{k}" in name for name in held(daemon, place)),
                  "it is closed")  # fmt: skip
        begin.unlink()


@pytest.mark.check
def test_users_without_a_number_here_are_not_one_user(place: Path) -> None:
    """All of them appear as the overflow user to a daemon in a user namespace."""
    path = write(place / "a.ffr", TRUTH)
    os.chmod(path, 0o600)
    os.chown(path, ALICE, ALICE)
    daemon = Daemon(options=["--socket-mode", "0666"])
    daemon.command = ["unshare", "-Ur", *daemon.command]
    hold = AS_ALICE + (
        "import time\n"
        "raw = support.Raw(sys.argv[2]); raw.open(sys.argv[1])\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    claim = AS_ALICE.replace(str(ALICE), str(ALICE + 1)) + (
        "raw = support.Raw(sys.argv[2]); raw.send(support.asking(sys.argv[1]))\n"
        "print(type(raw.receive()).__name__)"
    )
    try:
        daemon.start()
        with client(hold, path, daemon.socket):
            assert run_python(claim, path, daemon.socket).stdout == "Need\n"
            with Raw(daemon.socket) as raw:
                raw.send(asking(path))
                assert isinstance(raw.receive(), protocol.Need)
        assert daemon.end() == 0
    finally:
        daemon.close()
