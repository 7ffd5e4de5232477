"""Views for `make view`: a million samples, storage that hangs, programs that are killed, and users
who mount by fusermount3."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ENVIRONMENT
from daemon import DEADLINE_S, Daemon, client, sample, until, write
from fuse import READ, fuse
from view import Mounted, mounted

import ffserve
from ffserve.view.serving import THREADS
from ffserve.view.supervisor import PROCESSES

pytestmark = pytest.mark.view

COUNT = 1_000_000
NOBODY = 65_534
AS_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip
"""A user who can read the Python of these tests, wherever it is."""


def processes(view: Mounted) -> list[int]:
    """Return all processes of a view."""
    children = Path(f"/proc/{view.process.pid}/task/{view.process.pid}/children").read_text()
    return [view.process.pid, *map(int, children.split())]


def own_memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_tar_of_a_million_samples_takes_bounded_memory(tmp_path: Path) -> None:
    with ffserve.create(tmp_path / "a.ffr") as writer:
        for k in range(COUNT):
            writer.write(b"%d" % k)
    with mounted(tmp_path / "a.ffr") as view:
        top = view.samples / "a.ffr"

        def archived(*names: str) -> int:
            size = 0
            words = ["tar", "-C", top, "-cf", "-", *names]
            with subprocess.Popen(words, stdout=subprocess.PIPE) as tar:
                assert tar.stdout is not None
                while piece := tar.stdout.read(1 << 20):
                    size += len(piece)
            assert tar.returncode == 0
            return size

        archived("00", "01")
        before = [own_memory(pid) for pid in processes(view)]
        assert archived(".") >= COUNT * 1024  # a head and a block for each
        after = [own_memory(pid) for pid in processes(view)]
        print("memory of the view, MiB:", [size >> 20 for size in (*before, *after)])
        assert all(b - a < 48 << 20 for a, b in zip(before, after, strict=True))
        begun = time.monotonic()
        assert sum(len(os.listdir(top / f"{k:02}")) for k in range(10)) == 100_000
        print(f"100,000 entries listed in {time.monotonic() - begun:.2f} s")


def test_a_packed_folder_of_many_files(tmp_path: Path) -> None:
    for k in range(20):
        (tmp_path / "in" / f"class{k}").mkdir(parents=True)
        for j in range(1000):
            (tmp_path / "in" / f"class{k}" / f"{j}.jpg").write_bytes(b"%d %d" % (k, j))
    subprocess.run(
        [sys.executable, "-m", "ffserve", "pack", tmp_path / "in", "-o", tmp_path / "a.ffr"],
        check=True, capture_output=True,
    )  # fmt: skip
    with mounted(tmp_path / "a.ffr") as view:
        subprocess.run(["diff", "-r", tmp_path / "in", view.samples / "a.ffr"], check=True)


def test_a_killed_program_does_not_wait_for_a_hanging_disk(tmp_path: Path) -> None:
    begin = tmp_path / "begin"
    with fuse(tmp_path, READ, begin=begin) as path:
        good = write(tmp_path / "good.ffr", [sample(k) for k in range(100)])
        with mounted(path, good) as view:
            begin.touch()
            waiting = subprocess.Popen(["cat", view.samples / "a.ffr" / "0" / "6"])
            time.sleep(0.5)
            assert waiting.poll() is None
            content = (view.samples / "good.ffr" / "0" / "06").read_bytes()
            assert content == sample(6), "others are served meanwhile"
            waiting.send_signal(signal.SIGKILL)
            assert waiting.wait(DEADLINE_S) == -signal.SIGKILL
            assert view.end(signal.SIGTERM) == 0, "its processes still wait for the disk"


WAITING = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
print("ready", flush=True)
open(sys.argv[1], "rb").read()
"""
"""A program that goes on waiting after a signal."""


def test_programs_that_wait_for_a_hanging_disk_took_all_threads(tmp_path: Path) -> None:
    """Those that read another disk were not answered; and one that had got a signal before it was
    killed waited on."""
    begin = tmp_path / "begin"
    count = PROCESSES * THREADS + 1
    large = [sample(k, sizes=(100_000,)) for k in range(count)]
    with fuse(tmp_path, READ, begin=begin, samples=large) as path:
        good = write(tmp_path / "good.ffr", [sample(k) for k in range(100)])
        with mounted(path, good) as view:
            begin.touch()
            with contextlib.ExitStack() as stack:
                waiting = [
                    stack.enter_context(client(WAITING, view.samples / "a.ffr" / "0" / f"{k:02}"))
                    for k in range(count)
                ]
                for k in range(100):
                    assert (view.samples / "good.ffr" / "0" / f"{k:02}").read_bytes() == sample(k)
                for number in (signal.SIGUSR1, signal.SIGKILL):
                    for program in waiting:
                        program.send_signal(number)
                    time.sleep(0.5)
                for program in waiting:
                    assert program.wait(DEADLINE_S) == -signal.SIGKILL
            assert view.end(signal.SIGTERM) == 0


def test_killed_programs_disturb_nobody(tmp_path: Path) -> None:
    large = [sample(k, sizes=(3 << 20, 100_000, 10)) for k in range(60)]
    path = write(tmp_path / "a.ffr", large)
    with mounted(path) as view:
        folder = view.samples / "a.ffr" / "0"
        stop = threading.Event()

        def kill_some() -> None:
            chance = random.Random(1)
            while not stop.is_set():
                program = subprocess.Popen(
                    ["sh", "-c", f"cat {folder}/* > /dev/null"], start_new_session=True
                )
                time.sleep(chance.random() / 10)
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()

        killer = threading.Thread(target=kill_some)
        killer.start()
        try:
            for turn in range(10):
                for k, each in enumerate(large):
                    file = folder / f"{k:02}"
                    with open(file, "rb") as opened:
                        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    assert file.read_bytes() == each, (turn, k)
        finally:
            stop.set()
            killer.join()
        assert view.process.poll() is None


def test_a_daemon_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [sample(k) for k in range(14)]
    path = write(tmp_path / "a.ffr", samples)
    daemon = Daemon().start()
    monkeypatch.setitem(ENVIRONMENT, "FFSERVE_SOCKET", daemon.socket)
    try:
        with mounted(path, options=()) as view:
            assert "by daemon" in view.log()
            folder = view.samples / "a.ffr" / "0"
            assert (folder / "05").read_bytes() == samples[5]
            daemon.end(signal.SIGKILL)
            assert (folder / "06").read_bytes() == samples[6]
            daemon.start()
            assert (folder / "07").read_bytes() == samples[7]
            assert daemon.end() == 0
    finally:
        daemon.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that belongs to a user without rights."""
    with tempfile.TemporaryDirectory(prefix="ffs-") as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "view"
        path.mkdir()
        os.chown(path, NOBODY, NOBODY)
        yield path


def test_a_user_mounts_by_the_setuid_program(tmp_path: Path, place: Path) -> None:
    if shutil.which("fusermount3") is None:
        pytest.skip("no fusermount3 here (package fuse3)")
    samples = [sample(k) for k in range(14)]
    path = write(tmp_path / "a.ffr", samples)
    mode = Path("/dev/fuse").stat().st_mode
    os.chmod("/dev/fuse", 0o666)  # as udev has it
    try:
        with mounted(path, place=place, program=(*AS_NOBODY, sys.executable)):
            for name, content in (("samples/a.ffr/0/06", samples[6]), ("shards/a.ffr", None)):
                done = subprocess.run([*AS_NOBODY, "cat", place / name], capture_output=True)
                assert done.stdout == (content or Path(path).read_bytes()), done.stderr
            done = subprocess.run(["cat", place / "shards/a.ffr"], capture_output=True)
            assert b"Permission denied" in done.stderr, "root has no right to see it"
        until(lambda: os.listdir(place) == [], "it is unmounted")
        words = [*AS_NOBODY, sys.executable, "-m", "ffserve", "mount", "--allow-other", place]
        if "\nuser_allow_other" not in Path("/etc/fuse.conf").read_text():
            with tempfile.TemporaryDirectory() as folder:  # which everybody may read
                os.chmod(folder, 0o755)
                shown = shutil.copy(path, folder)
                refused = subprocess.run([*words, shown], capture_output=True, text=True)
            assert refused.returncode == 2 and "user_allow_other" in refused.stderr
    finally:
        os.chmod("/dev/fuse", mode)
