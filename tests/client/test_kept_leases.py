"""What is leased outlives the connection that it was leased over."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from daemon import (
    Daemon,
    client,
    everything_is_given_back,
    sample,
    serving,
    stopped,
    until,
    write,
)

from ffserve.client.daemon import connection, handshake
from ffserve.client.failover import RECONNECT_S
from ffserve.errors import ServerUnavailable

LEASED = range(5)

SIZES = [30_000]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", [sample(i, SIZES) for i in range(100)])


def evict_all_but(daemon: Daemon, path: str, views: Sequence[object]) -> None:
    """Have the daemon read so much that everything goes which is not leased; look at that."""
    with daemon.open(path) as other:
        for _ in range(2):
            for first in range(5, 95, 10):
                other.read(range(first, first + 10))
    assert [bytes(view) for view in views] == [sample(i, SIZES) for i in LEASED]  # type: ignore[call-overload]


def nothing_is_kept(daemon: Daemon) -> None:
    until(lambda: sum(j["sessions"] for j in daemon.status()["jobs"]) == 0, "all sessions end")
    # A session ends at once, and gives back what it holds in steps, between those of others.
    until(lambda: daemon.status()["arena"]["leased"] == 0, "the leases have ended")
    everything_is_given_back(daemon)


@pytest.mark.check
def test_leased_bytes_changed_after_a_stop_that_the_client_took_for_the_end(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(arena="1MiB") as daemon, daemon.open(path) as reader:
        with reader.lease(LEASED) as views:
            with (
                monkeypatch.context() as patch,
                stopped(daemon.pid),
                pytest.raises(ServerUnavailable),
            ):
                patch.setattr(connection, "SILENCE_S", 1)
                patch.setattr(handshake, "CONNECT_TIMEOUT_S", 1.0)
                patch.setitem(RECONNECT_S, "require", 0.1)
                reader.read(range(50, 60))
            evict_all_but(daemon, path, views)
        nothing_is_kept(daemon)


def test_leased_bytes_changed_when_their_reader_was_closed(path: str) -> None:
    with serving(arena="1MiB") as daemon:
        reader = daemon.open(path)
        with reader.lease(LEASED) as views:
            reader.close()
            evict_all_but(daemon, path, views)
        nothing_is_kept(daemon)


PARENT = """
import os, sys, ffserve
reader = ffserve.open(sys.argv[1], server=sys.argv[2])
lease = reader.lease(range(5)); views = lease.__enter__()
reader.close()
if os.fork() == 0:
    sys.stdin.readline()
    os._exit(0)
print("ready", flush=True)
os.wait()
"""


def test_a_child_held_its_parents_leases(path: str) -> None:
    """It had a copy of the socket over which they are kept."""
    with serving(arena="1MiB") as daemon, client(PARENT, path, daemon.socket) as parent:
        assert daemon.status()["arena"]["leased"] >= 4 * SIZES[0]
        parent.kill()
        nothing_is_kept(daemon)


def test_half_a_message_was_sent_and_then_another(path: str) -> None:
    """A signal's handler raised while a message of half a megabyte was sent. The daemon took what
    came next for the rest of it: other samples would have been leased than those looked at."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with serving(arena="1MiB") as daemon, daemon.open(path) as reader:
            with stopped(daemon.pid), pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with reader.lease(np.zeros(65_536, np.int64)):
                    pass
            with daemon.open(path) as other, other.lease(LEASED) as views:
                assert [bytes(v) for v in views] == [sample(i, SIZES) for i in LEASED]
            assert reader[7].tobytes() == sample(7, SIZES)
    finally:
        signal.signal(signal.SIGALRM, before)
