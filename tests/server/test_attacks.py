"""Users that ask for more than their share: an honest user of the same daemon is served as before.

Here the attacks of `support/attacks.py` are short, and may cost much, since other tests run at the
same time. `make attack` (tests/attack) looks at what was promised.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import attacks
import pytest
from attack_field import Field, Promise, field
from daemon import DEADLINE_S, Daemon, Raw, asking, get, serving, until, write

import ffserve
from ffserve import limits, protocol
from ffserve.client.daemon.connection import status
from ffserve.server.sessions.server import Server

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv, to run processes as other users",
)

LAX = Promise(factor=300, floor_s=0.5, worst_s=DEADLINE_S, begun_s=DEADLINE_S)
"""Other tests run at the same time. Without turns by user it was tens of thousands of times, or
there was no answer."""
MOST_KEPT = limits.USER_MESSAGES_SIZE
"""Bytes that the daemon may keep after an attack, of free lists: no more than a user could hold in
messages and replies."""


@pytest.fixture(scope="module")
def crowded() -> Iterator[Field]:
    with field(300) as made:
        yield made


@pytest.mark.check
@pytest.mark.parametrize("kind", attacks.KINDS)
def test_an_attack_of_one_user_stopped_all_others(crowded: Field, kind: str) -> None:
    daemon = crowded.daemon
    before, sockets = daemon.private_size(), daemon.socket_count(local=True)
    crowded.run(kind, 0.5, LAX)
    # The honest client may be greeting.
    closed = "the connections of the attack are closed"
    until(lambda: daemon.socket_count(local=True) <= sockets + 1, closed)
    until(lambda: daemon.private_size() - before < MOST_KEPT, "the memory is given back")
    until(lambda: daemon.status()["arena"]["leased"] == 0, "the leases have ended")


@pytest.mark.check
def test_thousands_of_connections_locked_out_root() -> None:
    """One user gets four fifths, another one still gets some, and root is always served."""
    with field(1) as made, made.attacking("connections"):
        path = made.daemon.socket
        connected = until(lambda: _sessions(made.daemon), "the attack has its connections", 90)
        assert connected < 3500
        assert status(path)["pid"] == made.daemon.pid
        with ffserve.open(made.source, server=path) as reader:
            assert len(reader) == attacks.SAMPLES
        with Raw(path) as raw:
            assert raw.open(made.source).dataset == 1


def _sessions(daemon: Daemon) -> int:
    count = daemon.socket_count()
    return count if count > 3000 else 0


def test_connections_one_after_another_kept_the_loop_from_other_work(tmp_path: Path) -> None:
    admitted: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as clients:
        listener.bind(str(tmp_path / "s"))
        listener.listen(100)
        listener.setblocking(False)
        for _ in range(100):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(listener.getsockname())
        server = Server.__new__(Server)
        server._listener = listener
        server._admit = admitted.append  # type: ignore[method-assign]
        counts = []
        while len(admitted) < 100:
            before = len(admitted)
            server._accept()
            counts.append(len(admitted) - before)
        for sock in admitted:
            sock.close()
    assert 0 < max(counts) <= 16, counts


def test_sessions_beyond_the_limit_only_ask_for_the_status() -> None:
    with serving(options=["--max-sessions", "2"]) as daemon, Raw(daemon.socket), Raw(daemon.socket):
        assert status(daemon.socket)["pid"] == daemon.pid
        with Raw(daemon.socket) as raw:
            raw.send(asking(__file__))
            assert "already serves 2 sessions" in str(raw.refused())


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_the_root_of_a_container_took_the_sessions_that_are_kept_for_root() -> None:
    program = """
import socket, sys
with socket.socket(socket.AF_UNIX) as attempt:
    attempt.settimeout(30)
    attempt.connect(sys.argv[1])
    refusal = attempt.recv(4096)
    assert b"already serves 2 sessions" in refusal and not attempt.recv(1), refusal
"""
    with serving(options=["--max-sessions", "2"]) as daemon, Raw(daemon.socket), Raw(daemon.socket):
        inside = ["unshare", "-m", sys.executable, "-c", program, daemon.socket]
        assert subprocess.run(inside, check=False, timeout=60).returncode == 0
        assert status(daemon.socket)["pid"] == daemon.pid


@pytest.mark.check
def test_a_message_that_came_byte_by_byte_woke_the_loop_for_each_byte(tmp_path: Path) -> None:
    """After a few bytes the daemon pauses: what comes meanwhile waits in the socket."""

    def unread(raw: Raw) -> int:
        (size,) = struct.unpack("i", fcntl.ioctl(raw.socket, termios.TIOCOUTQ, bytes(4)))
        return int(size)

    path = write(tmp_path / "a.ffr", [b"x"])
    patch = "import ffserve.server.sessions.server as server; server.TRICKLE_PAUSE_S = 2.0"
    with serving(patch=patch) as daemon, Raw(daemon.socket) as raw, Raw(daemon.socket) as other:
        frame = protocol.encode(get(2, raw.open(path).dataset, [0]))
        begun = time.monotonic()
        raw.socket.sendall(frame[:7])
        until(lambda: not unread(raw), "the first bytes are received")
        raw.socket.sendall(frame[7:9])
        # Others are served in the meantime, and whole messages without a pause.
        number = other.open(path).dataset
        for tag in range(2, 10):
            other.send(get(tag, number, [0]))
            assert isinstance(other.receive(), protocol.Ready)
        assert unread(raw) or time.monotonic() - begun > 2.0
        until(lambda: not unread(raw), "the next bytes are received")
        raw.socket.sendall(frame[9:])
        assert isinstance(raw.receive(), protocol.Ready)
