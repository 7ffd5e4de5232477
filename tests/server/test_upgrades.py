"""Upgrades: clients and daemons of different releases and protocol versions work together.

Sessions of this protocol version and the one before were recorded at their releases
(`support/recording.py`). Here recorded clients meet today's daemon, and recorded daemons today's
client. `tests/upgrades` installs the release before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DEADLINE_S, Raw, pack_identities, run_python, sample, serving, write
from given_memory import GivenMemory
from recording import (
    BAD,
    GOLDEN,
    SAMPLES,
    SESSIONS,
    Frame,
    Frames,
    pack,
    read_session,
    record,
    session_file,
    shared_session,
    unpack,
)

import ffserve
from ffserve import protocol
from ffserve.errors import ProtocolError

RECORDED = sorted(
    path.stem for version in protocol.VERSIONS for path in GOLDEN.glob(f"{version}-*.txt")
)


def recorded(name: str) -> list[Frame]:
    """Return a recorded session."""
    return read_session(GOLDEN / f"{name}.txt")


def test_every_version_that_is_spoken_was_recorded() -> None:
    found = {tuple(name.split("-")[:2]) for name in RECORDED}
    assert found == {(str(v), name) for v in protocol.VERSIONS for name in SESSIONS}


# ---- a recorded client, today's daemon ---------------------------------------------------------


class Replay:
    """A recorded client that talks to a daemon."""

    def __init__(self, path: str, file: str) -> None:
        self._file = file
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(path)
        self._frames = Frames(self._socket)
        self._prepares = False

    def send(self, frame: Frame) -> None:
        """Send a recorded frame, about the files of this test."""
        values, fds = frame.body, []
        self._prepares |= values[0] == protocol.Prepare.TYPE
        if values[0] == protocol.Open.TYPE:
            values[2]["paths"] = [self._file]
            values[3] = pack_identities([os.stat(self._file)])
        elif values[0] == protocol.Files.TYPE and self._prepares:
            fds = [os.memfd_create("recorded", os.MFD_CLOEXEC)]
            os.write(fds[0], b"prepared")
        elif values[0] == protocol.Files.TYPE:
            # The index files that a client may add are left out.
            assert len(values[2].strip(b"\1")) == 1
            values[2], fds = b"\0", [os.open(self._file, os.O_RDONLY)]
        socket.send_fds(self._socket, [pack(values)], fds)
        for fd in fds:
            os.close(fd)

    def receive(self) -> tuple[list[Any], int]:
        """Return the values of the next frame, and how many descriptors came."""
        while True:
            values = unpack(self._frames.next()[4:])
            if values[0] != protocol.Alive.TYPE:
                return values, self._frames.close_fds()

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def check_reply(known: Frame, found: list[Any], fd_count: int) -> None:
    """Check that the client which got a recorded reply understands another one as well."""
    old = known.body
    assert [type(value) for value in found] == [type(value) for value in old]
    assert found[0] == old[0]
    assert fd_count == known.fd_count
    match old[0]:
        case protocol.Welcome.TYPE:
            about, told = old[1], found[1]
            assert {key: type(told.get(key)) for key in about} == {
                key: type(value) for key, value in about.items()
            }
            assert told["version"] == about["version"] and told["payload"] == about["payload"]
        case protocol.Opened.TYPE:
            rows = []
            for packed in (old[3], found[3]):
                table = np.frombuffer(packed, protocol.SHARD_DTYPE).copy()
                table["base"] = table["domain"] = 0
                rows.append(table.tolist())
            assert rows[0] == rows[1]
            assert (*found[1:3], found[4]) == (*old[1:3], old[4])
            assert len(found[5]) == len(old[5])
        case protocol.Ready.TYPE:
            assert found[1:3] == old[1:3]
            assert [error[:2] for error in found[3]] == [error[:2] for error in old[3]]
        case protocol.Fail.TYPE:
            assert (found[1], found[2][0]) == (old[1], old[2][0])
        case protocol.Report.TYPE:
            assert found[1] == old[1]
        case _:
            assert found == old


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_client_is_served(name: str, tmp_path: Path) -> None:
    file = session_file(tmp_path)
    with serving() as daemon:
        replay = Replay(daemon.socket, file)
        for frame in recorded(name):
            if frame.sender == "client":
                replay.send(frame)
            else:
                check_reply(frame, *replay.receive())
        replay.close()


# ---- a recorded daemon, today's client ---------------------------------------------------------

TAGGED = {
    each.TYPE
    for each in (*protocol.FROM_CLIENT, *protocol.FROM_SERVER)
    if fields(each) and fields(each)[0].name == "tag"
}
"""Types of messages that begin with a tag."""


class Playback:
    """A recorded daemon: it answers each message as it was answered, in order of its type. Its
    memory is made anew; the samples of a GET are put into it before the answer."""

    def __init__(self, place: Path, frames: list[Frame]) -> None:
        self.path = str(place / "playback")
        self.asked: list[int] = []
        """Types of the messages that came."""
        self._replies: defaultdict[int, deque[list[Frame]]] = defaultdict(deque)
        (about,) = (frame.body[1] for frame in frames if frame.body[0] == protocol.Welcome.TYPE)
        self._memory = GivenMemory(about)
        self._base = 0
        tagged: dict[int, list[Frame]] = {}
        for frame in frames:
            kind, *values = frame.body
            tag = values[0] if kind in TAGGED else 0
            if frame.sender == "daemon":
                tagged[tag].append(frame)
            elif kind in TAGGED or kind == protocol.Hello.TYPE:
                tagged[tag] = []
                self._replies[kind].append(tagged[tag])
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            connection, _ = self._listener.accept()
            with connection:
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        received = Frames(connection)
        while True:
            values = unpack(received.next()[4:])
            received.close_fds()
            self.asked.append(values[0])
            if values[0] == protocol.Get.TYPE:
                for index in protocol.unpack_indices(values[3]).tolist():
                    if index != BAD:
                        self._memory.publish(self._base + index, SAMPLES[index])
            if self._replies[values[0]]:
                for frame in self._replies[values[0]].popleft():
                    self._reply(connection, frame.body, values[1])

    def _reply(self, connection: socket.socket, reply: list[Any], tag: Any) -> None:
        fds: list[int] = []
        if reply[0] == protocol.Welcome.TYPE:
            fds = self._memory.fds_of(protocol.Welcome(*reply[1:]))
        else:
            reply[1] = tag
        if reply[0] == protocol.Opened.TYPE:
            fds = self._memory.fds_of(protocol.Opened(*reply[1:]))
            self._base = int(np.frombuffer(reply[3], protocol.SHARD_DTYPE)["base"][0])
            for index, sample in enumerate(SAMPLES):
                self._memory.describe(self._base + index, len(sample))
        socket.send_fds(connection, [pack(reply)], fds)
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> Playback:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)
        self._listener.close()
        self._memory.close()


@pytest.mark.parametrize("version", [*protocol.VERSIONS, None])
def test_a_recorded_daemon_is_understood(version: int | None, tmp_path: Path) -> None:
    if version is None:  # as `recording.py` records it today
        (frames,) = record("shared", tmp_path)
    else:
        frames = recorded(f"{version}-shared-0")
    with Playback(tmp_path, frames) as daemon:
        shared_session(session_file(tmp_path), daemon.path)
    assert {protocol.Hello.TYPE, protocol.Open.TYPE, protocol.Files.TYPE} < set(daemon.asked)


# ---- protocol versions -------------------------------------------------------------------------

NEXT = "from ffserve import protocol as p; p.VERSIONS = (p.VERSION + 1, p.VERSION)"
"""Makes a process speak the next version, and this one."""
AFTER = "from ffserve import protocol as p; p.VERSIONS = (p.VERSION + 2, p.VERSION + 1)"
"""Makes a process speak the two versions after this one."""
REFUSED = [r"closed a session \(pid \d+\): upgrade .*"]
READING = """
import sys
import ffserve
with ffserve.open(sys.argv[1], server=sys.argv[2]) as reader:
    for _ in range(2):
        print([len(each) for each in reader.read(range(len(reader)))])
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[str]:
    """A file of five samples, of 0 to 4 bytes."""
    yield write(tmp_path / "five.ffr", [sample(k, range(5)) for k in range(5)])


def test_the_next_daemon_serves_todays_client(file: str) -> None:
    with serving(patch=NEXT) as daemon:
        with Raw(daemon.socket, hello=False) as raw:
            welcome = raw.hello()
            assert isinstance(welcome, protocol.Welcome)
            assert welcome.about["version"] == protocol.VERSION
        with Raw(daemon.socket, hello=False) as raw:
            spoken = [protocol.VERSION, protocol.VERSION + 1]
            welcome = raw.hello(versions=spoken)
            assert isinstance(welcome, protocol.Welcome)
            assert welcome.about["version"] == protocol.VERSION + 1
        with daemon.open(file) as reader:
            assert [len(each) for each in reader.read(range(5))] == [0, 1, 2, 3, 4]


@pytest.mark.check
def test_todays_daemon_serves_the_next_client(file: str) -> None:
    with serving() as daemon:
        done = run_python(NEXT + READING, file, daemon.socket)
        assert done.stdout == 2 * "[0, 1, 2, 3, 4]\n"


def test_a_client_of_two_versions_before_is_told_to_upgrade(file: str) -> None:
    with serving(patch=AFTER, expect=REFUSED) as daemon:
        with pytest.raises(ProtocolError) as caught:
            daemon.open(file)
        release = f"ffserve {ffserve.__version__}"
        assert str(caught.value) == (
            f"upgrade ffserve in this client ({release}), which speaks version {protocol.VERSION} "
            f"of the protocol: the daemon ({release}) speaks versions {protocol.VERSION + 1} to "
            f"{protocol.VERSION + 2}"
        )


def test_a_client_of_before_access_by_descriptor_is_told_to_upgrade() -> None:
    with serving(expect=REFUSED) as daemon, Raw(daemon.socket, hello=False) as raw:
        raw.send(protocol.Hello({"versions": [1], "client": "ffserve 0.0.1", "job": "j", "pid": 1}))
        told = str(raw.refused())
        assert told.startswith("upgrade ffserve in this client (ffserve 0.0.1), which speaks ver")


@pytest.mark.check
def test_a_daemon_of_two_versions_before_is_named(file: str) -> None:
    with serving(expect=REFUSED) as daemon:
        program = AFTER + READING
        told = run_python(program, file, daemon.socket, code=1).stderr.splitlines()[-1]
        assert "upgrade the daemon (ffserve" in told
        # It reads without the daemon, and says why.
        program = program.replace("server=sys.argv[2]", 'server="auto"')
        program = f"import os, sys\nos.environ['FFSERVE_SOCKET'] = sys.argv[2]\n{program}"
        done = run_python(program, file, daemon.socket)
        assert done.stdout == 2 * "[0, 1, 2, 3, 4]\n"
        assert "the files without the daemon: upgrade the daemon (ffserve" in done.stderr
