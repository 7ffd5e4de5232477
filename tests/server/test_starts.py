"""A daemon that fails or is killed soon after its start makes the next one wait."""

from __future__ import annotations

import os
import signal
import time

import pytest
from daemon import until
from service_manager import ManagedDaemon, started

from ffserve.client.public import Connection
from ffserve.errors import ServerUnavailable
from ffserve.server.life.starts import NAME, SERVED_S, TURNED_AWAY_S

pytestmark = pytest.mark.check


def failed(daemon: ManagedDaemon) -> int:
    """How many starts the service manager knows to have failed, with the present one."""
    daemon._deliver()
    return os.pread(daemon.stored[NAME], 1, 0)[0] if NAME in daemon.stored else 0


def test_a_start_is_forgotten_when_the_daemon_serves_or_ends_on_purpose() -> None:
    daemon = ManagedDaemon()
    daemon.counts_starts = True
    with started(daemon):
        assert failed(daemon) == 1
        daemon.restart(signal.SIGKILL)
        assert failed(daemon) == 2
        until(lambda: failed(daemon) == 0, f"it has served for {SERVED_S} s")
        daemon.restart(signal.SIGKILL)
        assert failed(daemon) == 1
        daemon.restart(signal.SIGTERM)
        assert failed(daemon) == 1, "the count began anew"


def test_after_failed_starts_the_next_one_waits_and_turns_clients_away() -> None:
    daemon = ManagedDaemon()
    daemon.counts_starts = True
    with started(daemon):
        daemon.end(signal.SIGKILL)
        os.pwrite(daemon.stored[NAME], bytes([9]), 0)
        begin = time.monotonic()
        daemon.start(wait=False)
        said = "STATUS=start 10 follows in 10 s: the last 9 failed"
        until(lambda: said in daemon.states, "it says that it waits")
        with pytest.raises(
            ServerUnavailable,
            match=r"closed the connection during the handshake|the handshake failed",
        ):
            Connection(daemon.socket, "turned away")
        assert daemon.process is not None and daemon.process.poll() is None
        until(daemon._is_ready, "it serves")
        assert time.monotonic() - begin >= 10 > TURNED_AWAY_S


def test_sigterm_ends_the_wait_and_the_next_start_does_not_wait() -> None:
    daemon = ManagedDaemon()
    daemon.counts_starts = True
    with started(daemon):
        daemon.end(signal.SIGKILL)
        os.pwrite(daemon.stored[NAME], bytes([200]), 0)
        daemon.start(wait=False)
        until(lambda: "STATUS=start 201 follows in 10 s: the last 200 failed" in daemon.states, "")
        daemon.end(signal.SIGTERM)
        assert failed(daemon) == 0
        daemon.start()
        assert not any(state.startswith("STATUS=start") for state in daemon.states)
