"""The daemon as a process: its socket, its clients, their files, and faults of each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import (
    DEADLINE_S,
    Daemon,
    Raw,
    asking,
    client,
    damage,
    everything_is_given_back,
    get,
    run_python,
    sample,
    serving,
    stopped,
    until,
    write,
)

import ffserve
import ffserve.aio
from ffserve import protocol
from ffserve.client.daemon import channel, handshake
from ffserve.client.daemon.shared_memory import DaemonSource
from ffserve.client.source import Batch
from ffserve.dtypes import Bytes
from ffserve.errors import (
    ChecksumError,
    FFServeError,
    ReadError,
    ServerUnavailable,
    TruncatedError,
)
from ffserve.system.machine_memory import usable_memory

AS_NOBODY = """
import os, sys, ffserve
from ffserve.errors import AccessDenied, ServerUnavailable
# Import everything while this user may still read it.
with ffserve.open(sys.argv[1], server=sys.argv[2]) as r: r.read([0])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file of 200 samples of very different sizes."""
    return write(tmp_path / "a.ffr", [sample(i) for i in range(200)])


def text(sample: Bytes | FFServeError) -> bytes:
    """Return the bytes of a sample, which must not be an error."""
    assert not isinstance(sample, FFServeError), sample
    return sample.tobytes()


# ---- the socket -------------------------------------------------------------------------------


def test_a_second_daemon_exits_and_the_first_continues(daemon: Daemon) -> None:
    done = subprocess.run(
        daemon.command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert f"another daemon (pid {daemon.pid}) serves this socket" in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert daemon.status()["pid"] == daemon.pid


def test_stale_socket_is_replaced_after_a_kill(path: str) -> None:
    with serving() as daemon:
        first = daemon.pid
        assert daemon.end(signal.SIGKILL) == -signal.SIGKILL
        assert stat.S_ISSOCK(os.lstat(daemon.socket).st_mode)
        with pytest.raises(ServerUnavailable, match="no daemon answers"):
            daemon.open(path)
        daemon.start()
        assert daemon.status()["pid"] != first
        assert daemon.end() == 0
        assert not os.path.lexists(daemon.socket)
        assert os.listdir(daemon.directory) == ["log"]


def test_a_file_at_the_path_of_the_socket_is_kept() -> None:
    daemon = Daemon(expect=[".*"])
    try:
        Path(daemon.socket).write_text("precious")
        daemon.start(wait=False)
        assert daemon.process is not None
        assert daemon.process.wait(30) == 2
        assert "the path of the socket exists and is not a socket" in daemon.text()
        assert Path(daemon.socket).read_text() == "precious"
    finally:
        daemon.close()


def test_the_socket_of_another_program_is_kept() -> None:
    daemon = Daemon(expect=[".*"])
    try:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(daemon.socket)
            other.listen()
            daemon.start(wait=False)
            assert daemon.process is not None
            assert daemon.process.wait(30) == 2
            assert "another program listens on this socket" in daemon.text()
            assert os.path.exists(daemon.socket)
    finally:
        daemon.close()


@needs_root
def test_the_socket_has_the_configured_mode_and_group() -> None:
    with serving(options=["--socket-mode", "0620", "--socket-group", "65534"]) as daemon:
        status = os.stat(daemon.socket)
        assert stat.S_IMODE(status.st_mode) == 0o620
        assert status.st_gid == 65534


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("RLIMIT_NOFILE, (40, 40)", "the limit on open files is 40"),
        ("RLIMIT_FSIZE, (1 << 20, 1 << 20)", "ulimit -f"),
    ],
)
def test_a_limit_that_is_too_low_for_a_daemon_is_named(limit: str, said: str) -> None:
    daemon = Daemon(patch=f"import resource; resource.setrlimit(resource.{limit})")
    try:
        process = daemon.start(wait=False).process
        assert process is not None and process.wait(DEADLINE_S) > 0
        assert said in daemon.text() and "Errno" not in daemon.text()
        assert os.listdir(daemon.directory) == ["log"]
    finally:
        daemon.close()


def test_a_socket_with_an_unknown_group_is_not_left_behind() -> None:
    daemon = Daemon(options=["--socket-group", "no-such-group"])
    try:
        process = daemon.start(wait=False).process
        assert process is not None and process.wait(DEADLINE_S) == 2
        assert "unknown group" in daemon.text()
        assert os.listdir(daemon.directory) == ["log"]
    finally:
        daemon.close()


def test_a_clock_that_is_set_back_changes_no_duration() -> None:
    back = "import itertools, time; c = itertools.count(2e9, -1e6); time.time = lambda: next(c)"
    with serving(patch=back) as daemon:
        assert 0 <= daemon.status()["uptime_s"] <= daemon.status()["uptime_s"] < 1e5


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_ends_a_daemon_with_a_terminal_that_does_not_ignore_it(ignored: bool) -> None:
    """Neither case inherits what this process does, which ignores it when started by nohup."""
    what = "SIG_IGN" if ignored else "SIG_DFL"
    patch = (
        "import fcntl, os, signal, termios\n"
        "os.setsid()\n"
        "terminal = os.openpty()\n"
        "fcntl.ioctl(terminal[1], termios.TIOCSCTTY, 0)\n"
        f"signal.signal(signal.SIGHUP, signal.{what})"
    )
    with serving(patch=patch) as daemon:
        if ignored:
            os.kill(daemon.pid, signal.SIGHUP)
            assert daemon.status()["pid"] == daemon.pid
        else:
            assert daemon.end(signal.SIGHUP) == 0
            assert not os.path.exists(daemon.socket)


def test_more_clients_than_the_backlog_connect(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(32) as pool:
        listener.bind(path)
        listener.listen(1)
        listener.settimeout(DEADLINE_S)
        coming = [pool.submit(handshake._connect, path) for _ in range(32)]
        for _ in coming:
            listener.accept()[0].close()
        for each in coming:
            each.result().close()


def test_a_daemon_that_accepts_no_client_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshake, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setenv("FFSERVE_SOCKET", str(tmp_path / "s"))
    file = write(tmp_path / "a.ffr", [b"one"])
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        waiting.connect(str(tmp_path / "s"))
        with ffserve.open(file) as reader:
            assert reader.source.startswith("engine") and bytes(reader[0]) == b"one"
    assert "reads the files without the daemon" in caplog.text
    assert "daemon is stopped" in caplog.text
    caplog.clear()


def test_sigterm_answers_requests_and_removes_the_socket(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [sample(i, [20_000]) for i in range(1000)])
    with serving() as daemon:
        with Raw(daemon.socket) as raw:
            opened = raw.open(path)
            with stopped(daemon.pid):
                # The daemon finds all requests, and then SIGTERM, when it continues.
                raw.send(*(get(k + 1, opened.dataset, range(k, 1000, 4)) for k in range(4)))
                os.kill(daemon.pid, signal.SIGTERM)
            answers = 0
            with contextlib.suppress(EOFError, ConnectionError):
                while True:
                    ready = raw.receive()
                    assert isinstance(ready, protocol.Ready)
                    assert ready.count == 250 and not ready.errors
                    answers += 1
        assert daemon.process is not None
        assert daemon.process.wait(30) == 0
        daemon.process = None
        assert not os.path.lexists(daemon.socket)
        assert answers in (0, 4), "SIGTERM came before the requests, or after all of them"


def test_a_stopped_daemon_does_not_block_hits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "REPORT_INTERVAL_S", -1.0)
    with serving() as daemon, daemon.open(path) as reader:
        reader.read(range(200))
        before = daemon.status()["jobs"][0]["hits"]
        done = []

        def hit() -> None:
            other = daemon.open(path)
            turn.set()
            go.wait()
            for k in range(2000):
                reader.read([k % 200])
            other.close()
            done.append(True)

        turn, go = threading.Event(), threading.Event()
        loop = threading.Thread(target=hit, daemon=True)
        loop.start()
        turn.wait()
        with stopped(daemon.pid):
            go.set()
            loop.join(DEADLINE_S)
            assert done == [True]

        def reported() -> Any:
            reader.read([0])
            [job], [shard] = (daemon.status()[key] for key in ("jobs", "shards"))
            return job["hits"] > before + 2000 and shard["sessions"] == 1

        until(reported, "every hit is counted, and one data set is closed")


@pytest.mark.check
def test_sigterm_ends_the_daemon_while_clients_keep_asking(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [sample(i, [20_000]) for i in range(500)])
    program = """
import sys, ffserve
from ffserve.errors import ServerUnavailable
import ffserve.client.failover as failover
failover.RECONNECT_S["require"] = 0
r = ffserve.open(sys.argv[1], server=sys.argv[2])
print("ready", flush=True)
try:
    while True:
        r.read(range(500))
except ServerUnavailable:
    pass
print("over", flush=True)
"""
    with (
        serving(arena="2MiB", options=["--drain-timeout", "60"]) as daemon,
        client(program, path, daemon.socket) as one,
        client(program, path, daemon.socket) as two,
    ):
        assert daemon.end() == 0, "long before the drain timeout"
        for process in (one, two):
            assert process.stdout is not None
            assert process.stdout.readline() == "over\n"


# ---- shared reads -----------------------------------------------------------------------------


def test_same_missing_samples_are_read_once(path: str) -> None:
    with serving() as daemon, Raw(daemon.socket) as one, Raw(daemon.socket) as two:
        sets = [raw.open(path).dataset for raw in (one, two)]
        with stopped(daemon.pid):
            for raw, number in zip((one, two), sets, strict=True):
                raw.send(get(1, number, range(200)))
        for raw in (one, two):
            ready = raw.receive()
            assert isinstance(ready, protocol.Ready)
            assert (ready.count, ready.errors) == (200, [])
        cache = daemon.cache()
        assert cache["asked"] == 400
        assert cache["blocks_read"] <= 200
        assert cache["read_size"] < 2 * os.path.getsize(path)


@pytest.mark.check
def test_processes_that_read_the_same_samples_read_the_disk_once(path: str) -> None:
    program = """
import sys, ffserve
r = ffserve.open(sys.argv[1], server=sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
print(sum(len(s) for s in r.read(range(len(r)))), flush=True)
"""
    total = sum(len(sample(i)) for i in range(200))
    with serving() as daemon, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client(program, path, daemon.socket)) for _ in range(3)]
        for one in clients:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        for one in clients:
            assert one.stdout is not None
            assert one.stdout.readline() == f"{total}\n"
        assert daemon.cache()["blocks_read"] <= 200


def test_the_next_job_finds_the_samples_in_memory(path: str) -> None:
    with serving() as daemon:
        with daemon.open(path) as reader:
            reader.read(range(200))
        until(lambda: daemon.status()["shards"][0]["sessions"] == 0, "the shard is idle")
        read = daemon.cache()["blocks_read"]
        done = run_python(
            "import sys, ffserve\n"
            "r = ffserve.open(sys.argv[1], server=sys.argv[2]); r.read(range(200))\n"
            "print(r.stats()['hits'])",
            path,
            daemon.socket,
        )
        assert done.stdout == "200\n"
        assert daemon.cache()["blocks_read"] == read


# ---- sizes ------------------------------------------------------------------------------------


def test_a_file_opened_by_its_formats_name_is_the_same_shard(path: str) -> None:
    with (
        serving() as daemon,
        daemon.open(path) as found,
        daemon.open(path, format="ffrecord") as named,
    ):
        found.read(range(200))
        before = daemon.cache()["blocks_read"]
        named.read(range(200))
        assert daemon.cache()["blocks_read"] == before > 0


def test_arena_far_smaller_than_the_data_set(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [sample(i, [100, 9000, 60_000, 300_000]) for i in range(200)])
    with serving(arena="2MiB") as daemon, daemon.open(path) as reader:
        order = np.random.default_rng(1).permutation(200)
        for _ in range(2):
            for index, got in zip(order, reader.read(order), strict=True):
                assert got.tobytes() == sample(int(index), [100, 9000, 60_000, 300_000])
        assert daemon.cache()["evicted"] > 0
        assert daemon.status()["arena"]["used"] <= 2 << 20


def test_sample_larger_than_the_arena_fails_alone(tmp_path: Path) -> None:
    sizes = [4000, 3_000_000, 5000]
    path = write(tmp_path / "a.ffr", [sample(i, sizes) for i in range(9)])
    with serving(arena="1MiB") as daemon, daemon.open(path) as reader:
        got = reader.read(range(9), errors="return")
        for i, one in enumerate(got):
            if i % 3 == 1:
                assert isinstance(one, ReadError)
                assert (one.path, one.index) == (path, i)
                assert one.hint is not None and "--arena" in one.hint
                assert "3000000 bytes" in str(one)
            else:
                assert text(one) == sample(i, sizes)
        with pytest.raises(ReadError, match="does not fit into the daemon's arena"):
            reader.read([0, 4])
        with pytest.raises(ReadError, match="does not fit"), reader.lease([4]):
            pass
        assert reader[8].tobytes() == sample(8, sizes)
        assert reader.sizes([1]).tolist() == [3_000_000]


def test_a_hundred_thousand_indices_and_none(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader:
        indices = np.random.default_rng(2).integers(0, 28, 100_000) * 7 + 3
        batch = reader.read_batch(indices)
        assert len(batch) == 100_000
        assert all(
            one.tobytes() == sample(int(i))
            for one, i in zip(batch[::997], indices[::997], strict=True)
        )
        assert reader.read([]) == []
        assert len(reader.read_batch([])) == 0
        with reader.lease([]) as views:
            assert list(views) == []


def test_a_hundred_thousand_missing_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [i.to_bytes(4, "little") * 10 for i in range(100_000)])
    with serving(arena="4MiB") as daemon, daemon.open(path) as reader:
        batch = reader.read_batch(np.arange(100_000)[::-1])
        numbers = batch.buffer.view("<u4")[::10]
        assert np.array_equal(numbers, np.arange(100_000)[::-1])


# ---- files that change, and other files --------------------------------------------------------


def other(i: int) -> bytes:
    return sample(i, seed=1)


def test_a_deleted_file_is_served_to_sessions_that_have_it_open(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader:
        os.unlink(path)
        assert [s.tobytes() for s in reader.read(range(200))] == [sample(i) for i in range(200)]
        with pytest.raises(ReadError, match="No such file"):
            daemon.open(path)


def test_replaced_file_old_session_old_bytes_new_session_new_bytes(
    daemon: Daemon, path: str
) -> None:
    with daemon.open(path) as old:
        old.read(range(100))
        write(path, [other(i) for i in range(150)])
        with daemon.open(path) as new:
            assert (len(old), len(new)) == (200, 150)
            assert [s.tobytes() for s in new.read(range(150))] == [other(i) for i in range(150)]
            assert [s.tobytes() for s in old.read(range(200))] == [sample(i) for i in range(200)]


FORK = """
import os, shutil, sys
import ffserve
server, first, served, fresh, way = sys.argv[1:]
def check():
    assert bytes(reader[0]) == b"first"
    assert way == "rewritten" or bytes(reader[1]) == b"served"
reader = ffserve.open([first, served], server=server)
check()
if way == "rewritten":
    shutil.copyfile(fresh, served)
elif way == "deleted": os.unlink(served)
else: os.rename(fresh, served)
child = os.fork()
check()
if child: assert os.waitpid(child, 0)[1] == 0
"""
"""A process with a reader of two files, of which one is replaced before it forks."""


def three_files(folder: Path) -> list[str]:
    return [write(folder / f"{name}.ffr", [name.encode()]) for name in ("first", "served", "fresh")]


@pytest.mark.check
@pytest.mark.parametrize("way", ["renamed", "deleted", "rewritten"])
@pytest.mark.parametrize("server", ["daemon", "off"])
def test_a_fork_after_a_served_file_was_replaced_failed(
    daemon: Daemon, tmp_path: Path, way: str, server: str
) -> None:
    """Its parent has the old file open in the daemon still."""
    where = daemon.socket if server == "daemon" else server
    run_python(FORK, where, *three_files(tmp_path), way)


def test_a_copy_of_a_reader_failed_after_a_served_file_was_replaced(
    daemon: Daemon, tmp_path: Path
) -> None:
    first, served, fresh = three_files(tmp_path)
    other = ffserve.aio.open([first, served], server=daemon.socket)

    async def copied() -> list[bytes]:
        async with other as reader:
            os.rename(fresh, served)
            async with pickle.loads(pickle.dumps(reader)) as copy:
                return [bytes(one) for one in await copy.read([0, 1])]

    with daemon.open([first, served]) as reader:
        packed = pickle.dumps(reader)
        assert asyncio.run(copied()) == [b"first", b"served"]
        program = """
import pickle, sys
with pickle.load(open(sys.argv[1], "rb")) as copy: print(*map(bytes, copy.read([0, 1])))
"""
        (tmp_path / "packed").write_bytes(packed)
        assert run_python(program, tmp_path / "packed").stdout == "b'first' b'served'\n"
        assert bytes(reader[1]) == b"served"
    until(lambda: not any(s["path"] == served for s in daemon.status()["shards"]), "it is closed")
    done = run_python(program, tmp_path / "packed", code=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ffserve.errors.FormatError: {served}: the file was replaced"), last
    assert "open a new reader" in last


def test_a_copy_of_a_reader_of_a_file_that_was_touched(daemon: Daemon, path: str) -> None:
    """It has other times, and the same content."""
    with daemon.open(path) as reader:
        packed = pickle.dumps(reader)
    os.utime(path)
    for _ in range(2):
        with pickle.loads(packed) as copy:
            assert bytes(copy[3]) == sample(3)


def test_only_the_missing_samples_of_a_truncated_file_fail(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader:
        offsets, lengths, _ = reader.tables(0)
        os.truncate(path, int(offsets[150]))
        got = reader.read(range(200), errors="return")
        for i, one in enumerate(got):
            if i < 150 or lengths[i] == 0:
                assert text(one) == sample(i)
            else:
                assert isinstance(one, ReadError) and "the file changed since" in str(one)
                assert (one.path, one.index, one.offset) == (path, i, int(offsets[i]))
        with daemon.open(path, verify=False) as late:
            assert late[3].tobytes() == sample(3)
            with pytest.raises(TruncatedError):
                late.read([199])


def test_file_rewritten_in_place_gives_an_old_session_errors_not_wrong_bytes(
    daemon: Daemon, path: str, tmp_path: Path
) -> None:
    with daemon.open(path) as old:
        old.read(range(10))
        content = Path(write(tmp_path / "b.ffr", [other(i) for i in range(200)])).read_bytes()
        with open(path, "r+b") as file:
            file.write(content)
        with daemon.open(path) as new:
            assert [s.tobytes() for s in new.read(range(200))] == [other(i) for i in range(200)]
        for i, one in enumerate(old.read(range(200), errors="return")):
            if isinstance(one, FFServeError):
                assert isinstance(one, ReadError) and one.index == i
            else:
                assert one.tobytes() == sample(i)
        assert "the file changed since" in str(old.read([12], errors="return")[0])


def test_file_rewritten_with_its_size_and_time_kept_gives_a_new_session_new_bytes(
    daemon: Daemon, path: str, tmp_path: Path
) -> None:
    with daemon.open(path) as old:
        old.read(range(100))
        before = os.stat(path)
        turned = [sample(i)[::-1] for i in range(200)]
        with open(path, "r+b") as file:
            file.write(Path(write(tmp_path / "b.ffr", turned)).read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert os.stat(path).st_size == before.st_size
        with daemon.open(path) as new:
            assert [s.tobytes() for s in new.read(range(200))] == turned


@pytest.mark.parametrize("suffix", ["ffr", "recordio"])
def test_errors_have_the_path_that_this_client_used(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    write(first, [bytes(5000)] * 9)
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    os.link(first, second)
    with serving() as daemon, daemon.open(first) as one, daemon.open(second) as other:
        for reader, path in ((one, first), (other, second), (one, first)):
            [error] = reader.read([8], errors="return")
            assert isinstance(error, ChecksumError)
            assert (error.path, error.index) == (str(path), 8)
        assert len(daemon.status()["shards"]) == 1


@needs_root
def test_no_permission_on_the_socket_itself(path: str) -> None:
    program = AS_NOBODY + (
        "try: ffserve.open(sys.argv[1], server=sys.argv[2])\n"
        "except ServerUnavailable as e: print(e)"
    )
    with serving(options=["--socket-mode", "0600"]) as daemon:
        own = write(daemon.directory / "a.ffr", [b"one"])
        assert "Permission denied" in run_python(program, own, daemon.socket).stdout


def test_a_large_batch_is_asked_for_in_parts(daemon: Daemon, tmp_path: Path) -> None:
    """The first samples are copied while the last ones are read."""
    truth = [sample(i, sizes=(1 << 20, (1 << 20) + 7, 100)) for i in range(30)]
    path = write(tmp_path / "large.ffr", truth)
    damage(path, 25)
    order = np.random.default_rng(0).permutation(30)
    bad = order.tolist().index(25)
    with daemon.open(path) as reader:
        source = reader._selector.current()
        assert isinstance(source, DaemonSource)
        pending = source.start(order, apart=False)
        assert 2 <= len(pending._asked) <= 4
        assert np.concatenate([part for _, part in pending._asked]).tolist() == list(range(30))
        failed = source.finish(pending)
        assert list(failed) == [bad]
        assert isinstance(failed[bad], ChecksumError) and failed[bad].index == 25
        for k, one in enumerate(Batch(pending.target.buffer, pending.target.offsets)):
            assert k == bad or one.tobytes() == truth[order[k]]
        intact = np.delete(order, bad)
        got = reader.read(intact)
        assert [one.tobytes() for one in got] == [truth[i] for i in intact]


def test_a_damaged_sample_fails_alone(daemon: Daemon, path: str) -> None:
    damage(path, 33)
    wrong = sample(33)[:-1] + bytes([sample(33)[-1] ^ 1])
    with daemon.open(path) as reader, daemon.open(path, verify=False) as careless:
        offset = int(reader.tables(0)[0][33])
        for _ in range(2):
            assert careless[33].tobytes() == wrong
            got = reader.read(range(200), errors="return")
            for i, one in enumerate(got):
                if i == 33:
                    assert isinstance(one, ChecksumError)
                    assert (one.path, one.index, one.offset) == (path, 33, offset)
                else:
                    assert text(one) == sample(i)
            with pytest.raises(ChecksumError), reader.lease([32, 33]):
                pass
            with pytest.raises(ChecksumError, match="sample 33"):
                reader.read_batch([1, 33])
    assert daemon.cache()["checksum_failures"] >= 1
    with daemon.open(path, on_error="skip") as intact:
        assert len(intact) == 199
        assert intact[33].tobytes() == sample(34)
        assert [error.index for error in intact.damaged] == [33]


# ---- nothing leaks ----------------------------------------------------------------------------


def open_sessions(daemon: Daemon) -> int:
    """What shards and jobs count; a session ends in steps, after its descriptors are closed."""
    status = daemon.status()
    return sum(entry["sessions"] for kind in ("shards", "jobs") for entry in status[kind])


@pytest.mark.check
def test_two_hundred_connections_leave_nothing_behind(path: str) -> None:
    with serving(arena="1MiB") as daemon:
        with daemon.open(path) as reader:
            reader.read(range(5))
        daemon.status()
        before = daemon.fd_count()
        for k in range(200):
            if k % 2:
                with daemon.open(path) as reader, reader.lease([1, 2]):
                    reader.read([k, (k + 7) % 200])
            else:
                with Raw(daemon.socket) as raw:
                    raw.send(get(1, raw.open(path).dataset, range(k, 200)))
        until(lambda: daemon.fd_count() <= before, "the descriptors are given back")
        until(lambda: not open_sessions(daemon), "the sessions have ended")
        everything_is_given_back(daemon)


@pytest.mark.check
def test_clients_killed_while_they_wait_or_lease_leave_nothing_behind(path: str) -> None:
    program = """
import sys, threading, ffserve
r = ffserve.open(sys.argv[1], server=sys.argv[2])
lease = r.lease([5, 6, 12]); views = lease.__enter__()
def work():
    while True: r.read(range(200))
for _ in range(2): threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""
    with serving(arena="1MiB") as daemon:
        with daemon.open(path) as reader:
            reader.read([0])
        before = daemon.fd_count()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(client(program, path, daemon.socket)) for _ in range(3)]
            time.sleep(0.2)
            for one in clients:
                one.kill()
        until(lambda: daemon.fd_count() <= before, "the descriptors are given back")
        until(lambda: not open_sessions(daemon), "the sessions have ended")
        everything_is_given_back(daemon)


@pytest.mark.check
@pytest.mark.parametrize(
    "last",
    [
        protocol.encode(protocol.Tell(0, 0, 0, b"")),
        protocol.encode(protocol.Tell(0, 0, 0, b""))[:-1],
        protocol.encode(protocol.Status(3)),
    ],
    ids=["a message", "a part of one", "a request"],
)
def test_clients_that_ended_with_unread_replies_were_kept_for_ever(last: bytes) -> None:
    """Their end is an error of the socket, after which uvloop reports nothing more of it: what came
    before the end was received, the end was not."""
    with serving(
        patch="import ffserve.server.sessions.server as s; s.ALIVE_INTERVAL_S = 0.2"
    ) as daemon:
        daemon.status()
        before = daemon.fd_count()
        clients = [Raw(daemon.socket) for _ in range(3)]
        for raw in clients:
            raw.send(protocol.Status(2))
            select.select([raw.socket], [], [], DEADLINE_S)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            for raw in clients:
                raw.socket.sendall(last)
                raw.socket.close()
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        until(lambda: daemon.fd_count() <= before, "the descriptors are given back")


def test_requests_longer_than_a_slice_changed_the_watch_twice(tmp_path: Path) -> None:
    """Each took its connection out of the loop and put it back. Here every step is longer than a
    slice."""
    counted = tmp_path / "counted"
    patch = (
        "import atexit, pathlib\n"
        "from ffserve.server.sessions import server as s, turns as t\n"
        "t.SLICE_S, changes, real = 0.0, [], s.ClientConnection._watch\n"
        "def watch(self, reading):\n"
        "    changes.extend([reading] * (reading != self._reading))\n"
        "    real(self, reading)\n"
        "s.ClientConnection._watch = watch\n"
        f"atexit.register(lambda: pathlib.Path({str(counted)!r}).write_text(str(len(changes))))"
    )
    path = write(tmp_path / "a.ffr", [sample(i) for i in range(200)])
    with serving(patch=patch) as daemon, daemon.open(path) as reader:
        for i in range(200):
            assert reader.read([i])[0].tobytes() == sample(i)
    assert int(counted.read_text()) < 100


@pytest.mark.check
def test_idle_shards_give_up_their_descriptors_for_new_ones(tmp_path: Path) -> None:
    """Several clients at once; a shard may be opened again while it is dropped in steps."""
    patch = (
        "import resource, ffserve.server.files.closing as c; c.DROP_COUNT = 2\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    )
    truth = [[sample(5 * k + i) for i in range(5)] for k in range(300)]
    paths = [write(tmp_path / f"{k}.ffr", samples) for k, samples in enumerate(truth)]
    with serving(patch=patch) as daemon:
        problems: list[BaseException] = []

        def read_files(numbers: Sequence[int]) -> None:
            try:
                for k in numbers:
                    with daemon.open(paths[k]) as reader:
                        assert [s.tobytes() for s in reader.read(range(5))] == truth[k]
            except BaseException as error:
                problems.append(error)

        orders = (range(300), range(299, -1, -1), [k % 200 for k in range(0, 2100, 7)])
        threads = [threading.Thread(target=read_files, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems
        assert daemon.fd_count() < 256
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(daemon.open(path)) for path in paths[:150]]
            assert all(
                r[0].tobytes() == samples[0] for r, samples in zip(readers, truth, strict=False)
            )


@pytest.mark.check
def test_three_hundred_readers_in_one_process(daemon: Daemon, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{k:03}.ffr", [sample(k)]) for k in range(300)]
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(daemon.open(path)) for path in paths]
        assert all(r[0].tobytes() == sample(k) for k, r in enumerate(readers))
    with daemon.open(paths) as reader:
        assert [s.tobytes() for s in reader] == [sample(k) for k in range(300)]


def test_more_sessions_than_allowed(path: str) -> None:
    with serving(options=["--max-sessions", "2"]) as daemon:
        with (
            Raw(daemon.socket),
            Raw(daemon.socket),
            pytest.raises(ServerUnavailable, match="already serves 2 sessions"),
        ):
            daemon.open(path)

        def again() -> bool:
            with contextlib.suppress(ServerUnavailable):
                return len(daemon.open(path)) == 200
            return False

        until(again, "it accepts clients again")


# ---- leases -----------------------------------------------------------------------------------


def test_lease_is_in_place_and_read_only(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader, reader.lease([6, 5, 6, 0]) as views:
        assert [v.tobytes() for v in views] == [sample(i) for i in (6, 5, 6, 0)]
        assert not any(v.flags.writeable for v in views)
        assert views[0].__array_interface__["data"] == views[2].__array_interface__["data"]
        assert not views[0].flags.owndata
        for view in views[:2]:
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
            with pytest.raises(ValueError):
                view.flags.writeable = True


def test_leases_of_more_than_the_arena_holds(tmp_path: Path) -> None:
    sizes = [70_000, 50_000]
    path = write(tmp_path / "a.ffr", [sample(i, sizes) for i in range(60)])
    with (
        serving(arena="2MiB") as daemon,
        daemon.open(path) as reader,
        reader.lease(range(60)) as all_of_them,
        reader.lease([1, 59]) as some,
    ):
        assert [v.tobytes() for v in reader.read(range(60))] == [
            sample(i, sizes) for i in range(60)
        ]
        assert [v.tobytes() for v in all_of_them] == [sample(i, sizes) for i in range(60)]
        assert [v.tobytes() for v in some] == [sample(i, sizes) for i in (1, 59)]


def test_leased_bytes_stay_while_everything_else_is_evicted(tmp_path: Path) -> None:
    sizes = [30_000]
    path = write(tmp_path / "a.ffr", [sample(i, sizes) for i in range(200)])
    with serving(arena="1MiB") as daemon, daemon.open(path) as reader:
        with reader.lease(range(10)) as views:
            for start in range(10, 200, 10):
                reader.read(range(start, start + 10))
            assert [v.tobytes() for v in views] == [sample(i, sizes) for i in range(10)]
        everything_is_given_back(daemon)


def test_a_client_that_never_acknowledges_does_not_block_others(tmp_path: Path) -> None:
    sizes = [40_000]
    path = write(tmp_path / "a.ffr", [sample(i, sizes) for i in range(100)])
    with serving(arena="1MiB") as daemon, Raw(daemon.socket) as hoarder:
        # It asks for all samples in parts and never acknowledges.
        dataset = hoarder.open(path).dataset
        for tag in range(1, 30):
            hoarder.send(get(tag, dataset, range(3 * tag, 3 * tag + 3)))
            assert isinstance(hoarder.receive(), protocol.Ready)
        with daemon.open(path) as reader:
            assert [s.tobytes() for s in reader.read(range(100))] == [
                sample(i, sizes) for i in range(100)
            ]


@pytest.mark.check
def test_a_client_stopped_in_mid_batch_does_not_block_others(tmp_path: Path) -> None:
    sizes = [40_000]
    path = write(tmp_path / "a.ffr", [sample(i, sizes) for i in range(100)])
    program = """
import sys, ffserve
r = ffserve.open(sys.argv[1], server=sys.argv[2])
lease = r.lease(range(3)); lease.__enter__()
print("ready", flush=True)
while True: r.read(range(100))
"""
    with serving(arena="1MiB") as daemon, client(program, path, daemon.socket) as process:
        for _ in range(3):
            with stopped(process.pid), daemon.open(path) as reader:
                got = [s.tobytes() for s in reader.read(range(100))]
                assert got == [sample(i, sizes) for i in range(100)]
            time.sleep(0.05)


# ---- opening at the same time ------------------------------------------------------------------


def test_one_users_bad_shard_does_not_fail_the_opening_of_another(
    daemon: Daemon, tmp_path: Path
) -> None:
    paths = [write(tmp_path / f"{k}.ffr", [sample(k)]) for k in range(20)]
    bad = tmp_path / "bad.ffr"
    bad.write_bytes(b"not an FFRecord file" * 100)
    problems: list[BaseException] = []

    def open_all(names: list[str], good: bool) -> None:
        try:
            for _ in range(10):
                try:
                    with daemon.open(names, format="ffrecord") as reader:
                        assert good and len(reader) == 20
                except FFServeError as error:
                    assert not good and error.path == str(bad), error
        except BaseException as error:
            problems.append(error)

    threads = [
        threading.Thread(target=open_all, args=(names, good))
        for names, good in (
            (paths, True),
            ([str(bad), *paths], False),
            (paths[::-1], True),
            ([*paths, str(bad)], False),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems


def test_file_names_that_are_not_unicode(tmp_path: Path) -> None:
    directory = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(directory)
    name = os.fsdecode(directory + b"/\xff.ffr")
    samples = [sample(i) for i in range(20)]
    write(name, samples)
    with serving() as daemon, daemon.open(os.fsdecode(directory)) as reader:
        assert [one.tobytes() for one in reader.read(range(20))] == samples
        assert reader.shards[0].path == name
        assert daemon.status()["shards"][0]["path"] == name


@needs_root
def test_a_socket_without_permission_is_reported_once() -> None:
    with serving() as daemon:
        path = write(daemon.directory / "a.ffr", [b"one"])
        program = AS_NOBODY + (
            "os.environ['FFSERVE_SOCKET'] = sys.argv[2]\n"
            "for _ in range(2): print(ffserve.open(sys.argv[1]).source)"
        )
        # Start the local engine while its modules can still be imported.
        program = program.replace(
            "os.setgroups", "ffserve.open(sys.argv[1], server='off')[0]\nos.setgroups", 1
        )
        ended = run_python(program, path, daemon.socket)
    assert ended.stdout.startswith("engine ")
    assert ended.stderr.count("reads the files without the daemon") == 1, ended.stderr


def test_a_missing_root_is_reported_at_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "nodata"
    line = f"missing root {missing}: it is served as soon as the directory exists"
    with serving(roots=[missing], expect=[line]) as daemon:
        assert line in daemon.text()
        missing.mkdir()
        path = write(missing / "a.ffr", [b"x"])
        with daemon.open(path) as reader:
            assert reader[0].tobytes() == b"x"


@pytest.mark.parametrize(
    "arena", ["4096TiB", str(usable_memory() - (16 << 20))], ids=["huge", "all-memory"]
)
def test_an_arena_larger_than_memory_is_refused(tmp_path: Path, arena: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ffserve", "serve", "--arena", arena),
            *("--socket", tmp_path / "s"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "an arena of" in done.stderr and "smaller --arena" in done.stderr
    assert not (tmp_path / "s").exists()


def polite(daemon: Daemon) -> None:
    """A session that ends with BYE, and has ended."""
    with Raw(daemon.socket) as raw:
        raw.send(protocol.Bye())
        assert raw.socket.recv(1) == b""


def test_the_end_of_a_session_was_counted_twice(path: str) -> None:
    """So there could be any number of sessions, and a container's user was taken to have gone while
    others of its sessions were there."""
    with serving(options=["--max-sessions", "8"]) as daemon, contextlib.ExitStack() as stack:
        for _ in range(20):
            polite(daemon)
        for _ in range(8):
            stack.enter_context(Raw(daemon.socket)).open(path)
        # Root may connect to ask for the status.
        late = stack.enter_context(Raw(daemon.socket))
        late.send(asking(path))
        assert "already serves 8 sessions" in str(late.refused())


@pytest.mark.check
def test_each_end_of_the_last_session_of_a_user_left_memory_behind(daemon: Daemon) -> None:
    """A `status` every second took 100 MB a day."""
    for _ in range(200):
        polite(daemon)
    before = daemon.private_size()
    for _ in range(700):
        polite(daemon)
    assert daemon.private_size() - before < 1 << 20
