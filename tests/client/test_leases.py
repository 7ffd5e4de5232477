"""Leases: what is read in place stays, whatever the daemon evicts meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from daemon import (
    Daemon,
    Raw,
    client,
    everything_is_given_back,
    get,
    sample,
    serving,
    stopped,
    until,
    write,
)

from ffserve.errors import UsageError

SIZES = [30_000]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", [sample(i, SIZES) for i in range(100)])


def test_a_lease_is_over_when_it_is_left(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader:
        for _ in range(10):
            with reader.lease([5, 6, 5]) as views:
                assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in (5, 6, 5)]
                assert not any(v.flags.writeable or v.flags.owndata for v in views)
                assert daemon.status()["arena"]["leased"] >= 2 * SIZES[0]
            # The release comes by another connection than the question.
            until(lambda: daemon.status()["arena"]["leased"] == 0, "the lease is over")
        with pytest.raises(ValueError, match="mine"), reader.lease([1]):
            raise ValueError("mine")
        until(lambda: daemon.status()["arena"]["leased"] == 0, "the lease is over")


def test_an_array_of_indices_is_leased_like_a_list(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader:
        reader.read(range(100))
        before = reader.stats()
        for chosen in (np.array([5, 6, 5]), np.arange(10)[::2], np.array([7], np.uint8)):
            with reader.lease(chosen) as views:
                assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in chosen.tolist()]
        leased = (5, 6, 5, 0, 2, 4, 6, 8, 7)
        after, size = reader.stats(), sum(len(sample(i, SIZES)) for i in leased)
        gained = {
            name: int(after[name]) - int(before[name]) for name in ("hits", "misses", "bytes")
        }
        assert gained == {"hits": 9, "misses": 0, "bytes": size}
        with reader.lease(np.zeros(0, np.int64)) as views:
            assert list(views) == []
        for bad in ([3, 100], [-1], [2**62]):
            with pytest.raises(IndexError), reader.lease(np.array(bad)):
                pass
        assert daemon.status()["arena"]["leased"] == 0
        reader.close()
        with pytest.raises(UsageError, match="closed"), reader.lease(np.arange(3)):
            pass


LEASING = """
import sys, time, zlib, numpy as np, ffserve
path, server, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
truth = [zlib.crc32(s) for s in ffserve.open(path, server="off").read(range(100))]
r = ffserve.open(path, server=server)
random = np.random.default_rng(int(sys.argv[4]))
print("ready", flush=True)
end, leased, asking = time.monotonic() + seconds, 0, 0
while time.monotonic() < end or leased < 200:
    chosen = random.integers(0, 100, 3)
    with r.lease(chosen) as views:
        for _ in range(2):
            for i, view in zip(chosen.tolist(), views):
                assert zlib.crc32(view) == truth[i], i
        leased += any(not view.flags.owndata for view in views)
print(leased, flush=True)
"""


def lease_while_all_is_evicted(path: str, seconds: float, clients: int) -> None:
    with serving(arena="1MiB") as daemon:
        with daemon.open(path) as reader:
            reader.read(range(100))
            before = daemon.cache()["evicted"]
            with contextlib.ExitStack() as stack:
                running = [
                    stack.enter_context(client(LEASING, path, daemon.socket, seconds, seed))
                    for seed in range(clients)
                ]
                while any(process.poll() is None for process in running):
                    for first in range(0, 100, 10):
                        reader.read(range(first, first + 10))
                for process in running:
                    assert process.stdout is not None
                    assert process.returncode == 0
                    assert int(process.stdout.read()) >= 200
            assert daemon.cache()["evicted"] > before + 100
        everything_is_given_back(daemon)


@pytest.mark.check
def test_leased_samples_match_their_checksums_while_all_is_evicted(path: str) -> None:
    lease_while_all_is_evicted(path, 2.0, 2)


@pytest.mark.soak
def test_leased_samples_match_their_checksums_for_long(path: str) -> None:
    lease_while_all_is_evicted(path, 60.0, 6)


def test_leased_bytes_stay_while_everything_else_is_evicted(path: str) -> None:
    with serving(arena="1MiB") as daemon:
        with daemon.open(path) as reader:
            with reader.lease(range(5)) as views:
                for start in range(5, 95, 10):
                    reader.read(range(start, start + 10))
                assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in range(5)]
                assert daemon.status()["arena"]["leased"] >= 5 * SIZES[0]
            until(lambda: daemon.status()["arena"]["leased"] == 0, "the lease is given back")
        everything_is_given_back(daemon)


HOLDING = """
import sys, threading, zlib, ffserve
r = ffserve.open(sys.argv[1], server=sys.argv[2])
lease = r.lease(range(5)); views = lease.__enter__()
sums = [zlib.crc32(v) for v in views]
print("ready", flush=True)
sys.stdin.readline()
assert sums == [zlib.crc32(v) for v in views]
print("same", flush=True)
threading.Event().wait()
"""


def test_a_client_killed_while_it_holds_leaves_nothing_behind(path: str) -> None:
    with serving(arena="1MiB") as daemon:
        with client(HOLDING, path, daemon.socket) as holder:
            assert daemon.status()["arena"]["leased"] >= 5 * SIZES[0]
            holder.kill()
        until(lambda: daemon.status()["arena"]["leased"] == 0, "its leases have ended")
        everything_is_given_back(daemon)


def test_a_stopped_client_keeps_its_leases_and_nobody_waits_for_it(path: str) -> None:
    with serving(arena="1MiB") as daemon, client(HOLDING, path, daemon.socket) as holder:
        with stopped(holder.pid), daemon.open(path) as reader:
            for _ in range(2):
                got = [s.tobytes() for s in reader.read(range(100))]
                assert got == [sample(i, SIZES) for i in range(100)]
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "same\n"


def test_a_child_leaves_its_parents_leases_alone(path: str) -> None:
    with serving(arena="1MiB") as daemon, daemon.open(path) as reader:
        lease = reader.lease(range(10))
        views = lease.__enter__()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                lease.__exit__(None, None, None)
                for _ in range(2):
                    with reader.lease(range(20)) as own:
                        assert [v.tobytes() for v in own] == [sample(i, SIZES) for i in range(20)]
                for _ in range(2):
                    assert len(reader.read(range(20, 100))) == 80
                status = 0
            finally:
                os._exit(status)
        _, ended = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(ended) == 0
        assert daemon.status()["arena"]["leased"] >= 10 * SIZES[0], "the child gave it back"
        assert [v.tobytes() for v in views] == [sample(i, SIZES) for i in range(10)]
        lease.__exit__(None, None, None)
        until(lambda: daemon.status()["arena"]["leased"] == 0, "it was given back")


def test_leased_bytes_changed_when_the_daemon_was_told_to_stop(tmp_path: Path) -> None:
    """One session after the other is closed; the others' requests waited for this one's room."""
    truth = [sample(k, SIZES) for k in range(5)] + [sample(k, [900_000]) for k in range(5, 10)]
    path = write(tmp_path / "a.ffr", truth)
    options, expect = ["--drain-timeout", "0.2"], ["stopped with unanswered requests after .*"]
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(serving(arena="1MiB", options=options, expect=expect))
        reader = stack.enter_context(daemon.open(path))
        views = stack.enter_context(reader.lease([0]))
        for index in range(5, 10):
            waiting = stack.enter_context(Raw(daemon.socket))
            waiting.send(get(2, waiting.open(path).dataset, [index]))
        until(lambda: daemon.cache()["blocked"] == 5, "the others wait for room")
        daemon.end(signal.SIGTERM)
        assert views[0].tobytes() == truth[0]


@pytest.mark.check
def test_leases_in_every_slab_blocked_all_other_reads(tmp_path: Path) -> None:
    with serving(arena="4MiB") as daemon:  # 16 slabs
        count = 1100
        small = write(tmp_path / "small.ffr", [sample(k, [4000]) for k in range(count)])
        large = write(tmp_path / "large.ffr", [sample(k, [100_000]) for k in range(4)])
        with daemon.open(small) as reader, daemon.open(large) as other:
            reader.read(range(count))
            with reader.lease(range(0, count, 20)) as leased, reader.lease([1, 2]) as more:
                began = time.monotonic()
                assert [len(each) for each in other.read(range(4))] == [100_000] * 4
                assert time.monotonic() - began < 15, "it waited until the scheduler gave up"
                for k, view in zip(range(0, count, 20), leased, strict=True):
                    assert bytes(view) == sample(k, [4000])
                assert bytes(more[1]) == sample(2, [4000])
