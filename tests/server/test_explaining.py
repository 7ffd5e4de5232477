"""Damaged samples are explained beside the loop: nobody else waits for that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from daemon import (
    DEADLINE_S,
    Daemon,
    Raw,
    asking,
    client,
    damage,
    get,
    sample,
    serving,
    started,
    until,
    write,
)
from fuse import FUSE, GETATTR

import ffserve
from ffserve import protocol
from ffserve.disk import shardfile
from ffserve.errors import ChecksumError
from ffserve.limits import MOST_EXPLANATIONS
from ffserve.server.users.threads import UserThreads

COUNT = 40
TRUTH = [sample(index, [5000]) for index in range(COUNT)]
DAMAGED = 7


@contextlib.contextmanager
def hanging(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A file with a damaged sample on a file system that tells nothing more of it once a second
    file exists. It ends before the daemon, which could not end before."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounts file systems")
    source, begin, place = write(tmp_path / "source.ffr", TRUTH), tmp_path / "begin", tmp_path / "m"
    damage(source, DAMAGED)
    place.mkdir()
    try:
        with client(FUSE, source, place, GETATTR, begin):
            yield str(place / "a.ffr"), begin
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True)


def indexed(path: Path) -> str:
    """Write the index file of a file; return its path."""
    found = shardfile.write_index_file(str(path))
    assert found is not None
    return found[1]


def error_of(answer: protocol.Message) -> ffserve.FFServeError:
    """The only error in an answer."""
    assert isinstance(answer, protocol.Ready), answer
    [[position, *wire]] = answer.errors
    assert position == 0
    return protocol.error_from_wire(wire)


def others_are_served(daemon: Daemon, path: str) -> None:
    """Check that another session is answered."""
    with daemon.open(path) as reader:
        assert [bytes(one) for one in reader.read(range(COUNT))] == TRUTH


def test_one_damaged_sample_on_storage_that_hangs_held_up_everybody(tmp_path: Path) -> None:
    """The daemon's loop looked at the file."""
    other = write(tmp_path / "other.ffr", TRUTH)
    with (
        serving() as daemon,
        hanging(tmp_path) as (path, begin),
        Raw(daemon.socket) as raw,
    ):
        dataset = raw.open(path).dataset
        raw.send(get(2, dataset, [0]))
        assert isinstance(raw.receive(), protocol.Ready)
        begin.touch()
        tags = range(3, 3 + 2 * MOST_EXPLANATIONS)
        for tag in tags:
            raw.send(get(tag, dataset, [DAMAGED]))
        others_are_served(daemon, other)
        for _ in tags:
            assert isinstance(error_of(raw.receive()), ChecksumError), "as it was found"
        raw.send(get(100, dataset, [3], [2]))
        assert raw.receive() == protocol.Ready(100, 1, [])
        others_are_served(daemon, other)


def test_a_session_may_end_while_its_samples_are_explained(tmp_path: Path) -> None:
    with serving() as daemon:
        with hanging(tmp_path) as (path, begin):
            with Raw(daemon.socket) as raw:
                dataset = raw.open(path).dataset
                raw.send(get(2, dataset, [0]))
                assert isinstance(raw.receive(), protocol.Ready)
                begin.touch()
                raw.send(get(3, dataset, [DAMAGED]))
                raw.send(protocol.Close(dataset))
            others_are_served(daemon, write(tmp_path / "other.ffr", TRUTH))
        others_are_served(daemon, write(tmp_path / "third.ffr", TRUTH))


@pytest.mark.check
def test_a_user_who_comes_again_and_again_has_one_thread_that_hangs(tmp_path: Path) -> None:
    with serving() as daemon, hanging(tmp_path) as (path, begin):
        counts, sockets = list[int](), daemon.socket_count()
        for _ in range(3):
            with Raw(daemon.socket) as raw:
                dataset = raw.open(path).dataset
                begin.touch()
                raw.send(get(2, dataset, [DAMAGED]))
                assert isinstance(error_of(raw.receive()), ChecksumError)
                begin.unlink()
            until(lambda: daemon.socket_count() == sockets, "its session has ended")
            counts.append(len(os.listdir(f"/proc/{daemon.pid}/task")))
        assert max(counts) == counts[0], counts


def test_a_damaged_sample_of_a_file_that_changed_is_explained(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", TRUTH)
    with serving() as daemon, daemon.open(path) as reader:
        assert bytes(reader[0]) == TRUTH[0]
        damage(path, DAMAGED)
        for _ in range(2):
            found = reader.read([DAMAGED], errors="return")
            assert isinstance(found[0], ffserve.ReadError), found
            assert "changed since it was opened" in str(found[0])
        with daemon.open(path) as anew, pytest.raises(ChecksumError):
            anew.read([DAMAGED])


def test_a_stale_index_that_is_found_when_nobody_has_the_file_open(tmp_path: Path) -> None:
    """The next one to open the file gets other tables."""
    samples = [sample(index, [9000]) for index in range(200)]
    path, cache = tmp_path / "a.tfrecord", tmp_path / "cache"
    write(path, samples)
    index = indexed(path)
    status = os.stat(path)
    samples[DAMAGED + 90] = samples[3]
    other = write(tmp_path / "b.tfrecord", samples)
    path.write_bytes(Path(other).read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(index, (status.st_mtime + 3600,) * 2)  # so nothing is compared when it is opened
    slowly = (
        "import time, ffserve.server.files.explaining as explaining\n"
        "look = explaining.look\n"
        "explaining.look = lambda *args: (time.sleep(0.5), look(*args))"
    )
    daemon = Daemon(patch=slowly)
    daemon.environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with started(daemon):
        with Raw(daemon.socket) as raw:
            raw.send(asking(str(path)))
            assert isinstance(raw.receive(), protocol.Need)
            kinds = bytes([protocol.RECORD_FILE, protocol.INDEX_FILE])
            raw.pass_files(1, [str(path), index], kinds=kinds)
            opened = raw.receive()
            assert isinstance(opened, protocol.Opened)
            raw.send(get(2, opened.dataset, [DAMAGED + 90]))
            until(lambda: daemon.cache()["failed"], "it does not match the index")
        until(lambda: list(cache.rglob("*.ffx")), "the index file is known to be stale")
        time.sleep(0.2)
        with Raw(daemon.socket) as raw:
            dataset = raw.open(str(path)).dataset
            raw.send(get(2, dataset, [DAMAGED + 90]))
            assert raw.receive() == protocol.Ready(2, 1, [])


# ---- threads of users --------------------------------------------------------------------------


class Calls:
    """Calls that end when they are told to, in a loop of this thread."""

    def __init__(self, most: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.threads = UserThreads("test", most)
        self.threads.attach(self.loop)
        self.go: Queue[Any] = Queue()
        self.ended: list[Any] = []

    def call(self, user: str) -> bool:
        return self.threads.call(user, lambda: (user, self.go.get()), self.ended.append)

    def until(self, count: int) -> None:
        """Run the loop until so many calls have ended."""

        async def wait() -> None:
            while len(self.ended) < count:
                await asyncio.sleep(0.001)

        self.loop.run_until_complete(asyncio.wait_for(wait(), DEADLINE_S))


def test_calls_of_a_user_are_made_in_order_and_only_so_many() -> None:
    calls = Calls(3)
    assert [calls.call("a") for _ in range(5)] == [True] * 3 + [False] * 2
    assert calls.threads.call("b", lambda: "at once", calls.ended.append)
    calls.until(1)
    assert calls.ended == ["at once"], "another user's thread"
    for number in range(3):
        calls.go.put(number)
    calls.until(4)
    assert calls.ended[1:] == [("a", 0), ("a", 1), ("a", 2)]
    until(lambda: "test" not in [each.name for each in threading.enumerate()], "no thread is left")
    assert calls.call("a"), "it gets another thread"
    calls.go.put(3)
    calls.until(5)
    calls.loop.close()


def test_what_a_call_raises_is_raised_in_the_loop() -> None:
    calls, found = Calls(1), list[Any]()
    calls.loop.set_exception_handler(lambda _, about: found.append(about["exception"]))
    assert calls.threads.call("a", lambda: 1 // 0, calls.ended.append)
    assert calls.threads.call("b", lambda: None, lambda _: None)

    async def wait() -> None:
        while not found:
            await asyncio.sleep(0.001)

    calls.loop.run_until_complete(asyncio.wait_for(wait(), DEADLINE_S))
    assert isinstance(found[0], ZeroDivisionError) and not calls.ended
    assert calls.call("a")
    calls.go.put(1)
    calls.until(1)
    calls.loop.close()


def test_calls_that_have_not_begun_are_dropped_at_the_end() -> None:
    calls = Calls(3)
    for _ in range(3):
        calls.call("a")
    calls.go.put(0)
    calls.until(1)
    threading.Timer(0.05, calls.go.put, [1]).start()
    calls.threads.close(wait=True)
    assert calls.go.empty(), "the one that had begun has ended"
    calls.loop.close()
