"""The arena of a running daemon grows and shrinks: real daemons, real clients, real leases."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from daemon import Daemon, Raw, run_python, serving, until, write

import ffserve
from ffserve import protocol
from ffserve.cli import cli
from ffserve.client.daemon.connection import Connection
from ffserve.errors import ReadError, UsageError
from ffserve.system import machine_memory

MIB = 1 << 20
SIZE = 50_000
COUNT = 1000
HOLDING = """
import sys, ffserve
with ffserve.open(sys.argv[1], server=sys.argv[2]) as reader, reader.lease(range(980, 1000)):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def truth() -> list[bytes]:
    rng = np.random.default_rng(7)
    return [rng.bytes(SIZE) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, truth: list[bytes]) -> str:
    return write(tmp_path_factory.mktemp("resize") / "x.ffr", truth)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with serving(arena="16MiB", options=("--max-arena", "256MiB")) as running:
        yield running


def resize(daemon: Daemon, size: str, *options: str, code: int = 0) -> str:
    """Run the command; return its output."""
    done = CliRunner().invoke(cli, ["resize", size, "--socket", daemon.socket, *options])
    assert done.exit_code == code, done.output
    return done.output


def memory_size(daemon: Daemon) -> int:
    """Return the bytes of memory that the file of the arena takes."""
    folder = Path(f"/proc/{daemon.pid}/fd")
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # of a client that has ended
            if "ffserve-arena" in os.readlink(entry):
                return entry.stat().st_blocks * 512
    raise AssertionError("the daemon has no arena")


class Load:
    """A thread that reads random batches until the end of the block, and checks every byte."""

    def __init__(self, daemon: Daemon, path: str, truth: list[bytes], seed: int) -> None:
        self.batches = 0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(daemon, path, truth, seed))

    def _run(self, daemon: Daemon, path: str, truth: list[bytes], seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            with daemon.open(path) as reader:
                while not self._stop.is_set():
                    indices = rng.integers(0, COUNT, 32)
                    for index, found in zip(indices, reader.read(indices), strict=True):
                        assert bytes(found) == truth[index]
                    self.batches += 1
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.error is None, self.error
        assert self.batches


@pytest.mark.check
def test_grows_under_load(daemon: Daemon, path: str, truth: list[bytes]) -> None:
    with Load(daemon, path, truth, 1), Load(daemon, path, truth, 2) as load:
        until(lambda: load.batches > 3, "reading continues")
        assert resize(daemon, "96MiB") == "the arena has 96.0 MiB\n"
        until(lambda: load.batches > 10, "reading continues")
    arena = daemon.status()["arena"]
    assert arena["size"] == arena["target"] == arena["populated"] == 96 * MIB
    with daemon.open(path) as reader:
        reader.read(range(COUNT))
        before = daemon.cache()["blocks_read"]
        assert [bytes(found) for found in reader.read(range(COUNT))] == truth
        assert daemon.cache()["blocks_read"] == before, "everything fits now"
    assert memory_size(daemon) >= 96 * MIB


def test_shrinks_under_load_and_gives_its_memory_back(path: str, truth: list[bytes]) -> None:
    with serving(arena="96MiB") as daemon:
        until(lambda: daemon.status()["arena"]["populated"] == 96 * MIB, "all memory is taken")
        assert memory_size(daemon) >= 96 * MIB
        with Load(daemon, path, truth, 1), Load(daemon, path, truth, 2) as load:
            until(lambda: load.batches > 3, "reading continues")
            assert resize(daemon, "8MiB") == "the arena has 8.00 MiB\n"
            assert memory_size(daemon) <= 8 * MIB
            done = load.batches
            until(lambda: load.batches > done + 3, "reading continues")
        assert memory_size(daemon) <= 8 * MIB
        arena = daemon.status()["arena"]
        assert arena["size"] == arena["target"] == arena["populated"] == 8 * MIB >= arena["used"]


def test_a_growing_arena_grew_from_its_new_size() -> None:
    with serving(arena="16MiB", options=("--max-arena", "256MiB")) as daemon:
        said = resize(daemon, "256MiB", "--no-wait")
        assert "from 256 MiB" not in said
        again = resize(daemon, "256MiB", "--no-wait")
        assert again.startswith("the arena has 256 MiB")
        assert "from 256 MiB" not in again


@pytest.mark.check
def test_changes_size_many_times_under_load(path: str, truth: list[bytes]) -> None:
    with (
        serving(arena="32MiB", options=("--max-arena", "128MiB")) as daemon,
        Load(daemon, path, truth, 1) as load,
    ):
        for size in (8, 128, 16, 64, 4, 100, 32) * 3:
            resize(daemon, f"{size}MiB", *(["--no-wait"] if size % 3 else []))
        assert resize(daemon, "32MiB") == "the arena has 32.0 MiB\n"
        done = load.batches
        until(lambda: load.batches > done + 3, "reading continues")
        assert memory_size(daemon) <= 32 * MIB


@pytest.mark.check
def test_shrinking_waits_for_leases(path: str, truth: list[bytes]) -> None:
    with serving(arena="96MiB") as daemon, daemon.open(path) as reader:
        reader.read(range(COUNT))
        with reader.lease(range(0, COUNT, 10)) as views:
            said = resize(daemon, "8MiB", "--no-wait")
            assert said == "resizing the arena from 96.0 MiB to 8.00 MiB\n"
            until(
                lambda: daemon.status()["arena"]["used"] < 90 * MIB,
                "other slabs are emptied",
            )
            arena = daemon.status()["arena"]
            assert arena["resizing"] and arena["held"] and arena["leased"] >= COUNT // 10 * SIZE
            assert arena["size"] == 96 * MIB and arena["target"] == 8 * MIB
            assert [bytes(v) for v in views] == truth[::10], "leased samples stay"
            # Reads continue in the rest, and another resize ends the waiting.
            assert [bytes(found) for found in reader.read(range(50))] == truth[:50]
            assert resize(daemon, "96MiB") == "the arena has 96.0 MiB\n"
            resize(daemon, "8MiB", "--no-wait")
            assert [bytes(v) for v in views] == truth[::10]
        until(lambda: not daemon.status()["arena"]["resizing"], "the arena is small")
        assert memory_size(daemon) <= 8 * MIB
        assert [bytes(found) for found in reader.read(range(COUNT))] == truth


@pytest.mark.check
def test_leases_in_the_part_that_was_added_are_counted(
    daemon: Daemon, path: str, truth: list[bytes]
) -> None:
    with daemon.open(path) as reader:
        reader.read(range(COUNT))
        resize(daemon, "96MiB")
        for _ in range(2):
            # Two thirds of the slabs, which are more than the arena had at the start.
            with reader.lease(range(COUNT - 100)) as views:
                assert [bytes(view) for view in views] == truth[:-100]
                leased = daemon.status()["arena"]["leased"]
                assert 40 * MIB < leased <= 48 * MIB
            until(lambda: daemon.status()["arena"]["leased"] == 0, "the leases have ended")


@pytest.mark.check
def test_a_killed_client_does_not_delay_a_resize(path: str) -> None:
    with serving(arena="96MiB") as daemon, daemon.open(path) as reader:
        reader.read(range(COUNT))
        holder = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", HOLDING, path, daemon.socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert holder.stdout is not None and holder.stdin is not None
            assert holder.stdout.readline() == b"held\n"
            resize(daemon, "4MiB", "--no-wait")
            until(
                lambda: daemon.status()["arena"]["used"] < 8 * MIB,
                "other slabs are emptied",
            )
            assert daemon.status()["arena"]["held"], "the last samples are near the end"
            holder.send_signal(signal.SIGKILL)
            until(lambda: not daemon.status()["arena"]["resizing"], "the arena is small")
            assert memory_size(daemon) <= 4 * MIB
        finally:
            holder.kill()
            holder.communicate()


def test_invalid_sizes_are_refused(daemon: Daemon) -> None:
    for size, said in (
        ("1KiB", "an arena of 1.00 KiB is too small"),
        ("300MiB", "cannot grow to 300 MiB: this daemon was started for at most 256 MiB"),
        ("many", "invalid size 'many'"),
    ):
        assert said in resize(daemon, size, code=2)
    with Raw(daemon.socket) as raw:
        for tag, number in enumerate((-1, 0, 1 << 63, (1 << 64) - 1), 1):
            raw.send(protocol.Resize(tag, number))
            answer = raw.receive()
            assert isinstance(answer, protocol.Fail) and answer.tag == tag
            assert isinstance(protocol.error_from_wire(answer.error), UsageError)
    assert daemon.status()["arena"]["target"] == 16 * MIB


def test_more_than_is_free_is_refused() -> None:
    whole = machine_memory.usable_memory() // (4 * MIB) * 4 * MIB
    with serving(arena="16MiB", options=("--max-arena", str(2 * whole))) as daemon:
        connection = Connection(daemon.socket, "resize")
        try:
            with pytest.raises(ReadError, match="of memory are free"):
                connection.resize(2 * whole)
        finally:
            connection.close()
        assert daemon.status()["arena"]["target"] == 16 * MIB


def test_a_daemon_without_a_free_descriptor_took_no_more_memory() -> None:
    """The thread that takes it ended with an exception."""
    patch = (
        "import ffserve.server.life.resize as r\nreal, calls = r.free_memory, []\n"
        "def failing():\n"
        "    calls.append(1)\n"
        "    if len(calls) == 1: raise OSError(24, 'Too many open files')\n"
        "    return real()\n"
        "r.free_memory, r.CALM_S = failing, 0.1"
    )
    with serving(arena="16MiB", patch=patch) as daemon:
        until(lambda: daemon.status()["arena"]["populated"] == 16 * MIB, "all memory is taken")


def test_another_user_may_not_resize() -> None:
    program = """
import os
from ffserve.config import ServerConfig
from ffserve.errors import AccessDenied
from ffserve.server.users.peers import Peer
from ffserve.server.sessions.state import ServerState
small, large = 16 << 20, 32 << 20
state = ServerState(ServerConfig(arena_size_bytes=small, max_arena_size_bytes=large))
try:
    state.resize(large, Peer(1, os.geteuid() + 1, 1), 0.0)
except AccessDenied as error:
    print(error)
assert state.memory.arena.size == small
state.resize(large, Peer(1, os.geteuid(), 1), 0.0)
assert state.memory.arena.size == large
state.close()
"""
    assert "may not resize the arena" in run_python(program).stdout


@pytest.mark.check
def test_registered_buffers_follow_the_size() -> None:
    if "registered" not in ffserve.engine.io.probe():
        pytest.skip("no registered buffers here")
    options = ("--max-arena", "256MiB", "--engine", "registered")
    with serving(arena="16MiB", options=options) as daemon:
        bounces = (256 << 10) * 128
        for size in (64, 200, 24, 16):
            resize(daemon, f"{size}MiB")

            def registered(size: int = size) -> bool:
                found = int(daemon.status()["engine"]["registered"])
                return size * MIB <= found <= size * MIB + bounces

            until(registered, f"{size} MiB are registered")


def test_free_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   90 kB\n")
    (tmp_path / "cgroup").write_text("0::/a\n")
    group = tmp_path / "a"
    group.mkdir()
    files = (tmp_path / "meminfo", tmp_path / "cgroup", tmp_path)
    assert machine_memory.free_memory(*files) == 90 << 10
    (group / "memory.max").write_text("50000\n")
    (group / "memory.current").write_text("40000\n")
    (group / "memory.stat").write_text("file 9000\ninactive_file 2000\nactive_file 1000\n")
    assert machine_memory.free_memory(*files) == 13_000
    (group / "memory.current").write_text("60000\n")
    assert machine_memory.free_memory(*files) == 0
