"""Recorded sessions: the frames of both sides, as a file, to be played back to later releases.

As a program it records the sessions of this release into tests/golden/protocol: see "A release" in
docs/CONTRIBUTING.md. A line is the sender, the number of descriptors that come with the frame, and
the frame in hexadecimal digits. Signs of life are left out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from daemon import Raw, damage, sample, serving, write

import ffserve
from ffserve import protocol

GOLDEN = Path(__file__).parents[1] / "golden" / "protocol"
SIZES, COUNT, BAD = (0, 1, 511, 3000), 12, 7
SAMPLES = [sample(index, SIZES) for index in range(COUNT)]
GOOD = [index for index in range(COUNT) if index != BAD]
KEY = b"recorded".ljust(32)
_WITH_FDS = {each.TYPE for each in (protocol.Welcome, protocol.Opened, protocol.Files)}


@dataclass(frozen=True)
class Frame:
    """A frame with what comes with it. body: its values; the first is the type."""

    sender: str
    fd_count: int
    content: bytes

    @property
    def body(self) -> list[Any]:
        """Its values; the first is the type."""
        (size,) = struct.unpack_from("<I", self.content)
        return unpack(self.content[4 : 4 + size])


def unpack(body: bytes) -> list[Any]:
    """Return the values of a frame, with no help of the code under test."""
    values: list[Any] = msgpack.unpackb(body, raw=False, unicode_errors="surrogateescape")
    return values


def pack(values: list[Any]) -> bytes:
    """Return the frame of some values."""
    body: bytes = msgpack.packb(values, unicode_errors="surrogateescape")
    return struct.pack("<I", len(body)) + body


class Frames:
    """The frames of one side of a connection, and the descriptors that came since the last."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = b""
        self.fds: list[int] = []

    def next(self) -> bytes:
        """Return the next frame. Raises: EOFError."""
        (size,) = struct.unpack("<I", self._first(4))
        size += 4
        taken, self._received = self._first(size), self._received[size:]
        return taken

    def _first(self, size: int) -> bytes:
        while len(self._received) < size:
            chunk, fds, _, _ = socket.recv_fds(self._socket, 65536, protocol.MOST_FILES)
            self.fds += fds
            if not chunk:
                raise EOFError
            self._received += chunk
        return self._received[:size]

    def close_fds(self) -> int:
        """Close the descriptors; return their number."""
        count = len(self.fds)
        while self.fds:
            os.close(self.fds.pop())
        return count


def read_session(path: Path) -> list[Frame]:
    """Return the frames of a recorded session, in order."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return [Frame(sender, int(count), bytes.fromhex(digits)) for sender, count, digits in rows]


def session_file(directory: Path) -> str:
    """Write the record file of the recorded sessions; sample BAD is damaged."""
    path = write(directory / "data.ffr", SAMPLES)
    damage(path, BAD)
    return path


# ---- what is recorded, and expected of a daemon that plays it back -----------------------------


def shared_session(path: str, server: str) -> None:
    """Read out of shared memory."""
    with ffserve.open(path, server=server) as reader:
        assert len(reader) == COUNT
        assert [each.tobytes() for each in reader.read(GOOD)] == [SAMPLES[k] for k in GOOD]
        assert reader.read([3])[0].tobytes() == SAMPLES[3]
        with pytest.raises(ffserve.ChecksumError) as caught:
            reader.read([BAD])
        assert caught.value.index == BAD
        assert list(reader.sizes([2, 3])) == [len(SAMPLES[2]), len(SAMPLES[3])]
        reader.announce(GOOD)
        assert reader.read([GOOD[0], GOOD[1]])[1].tobytes() == SAMPLES[GOOD[1]]
        with reader.lease([1, 2]) as leased:
            assert [bytes(each) for each in leased] == SAMPLES[1:3]


def prepared_session(path: str, server: str) -> None:
    """Prepare samples and hand them over."""
    with Raw(server) as raw:
        opened = raw.open(path)
        memory = os.memfd_create("recorded", os.MFD_CLOEXEC)
        os.write(memory, b"prepared")
        raw.send(protocol.Prepare(2, opened.dataset, KEY, {"name": "recorded"}))
        assert isinstance(raw.receive(), protocol.Need)
        raw.pass_files(2, [memory])
        os.close(memory)
        prepared = raw.receive()
        assert isinstance(prepared, protocol.Opened)
        indices = protocol.pack_indices(np.array([0, 1]))
        raw.send(protocol.Claim(3, prepared.dataset, indices, 0))
        assert raw.receive() == protocol.Claimed(3, b"\1\1")
        places, lengths = (np.array(each, "<u8").tobytes() for each in ([0, 3], [3, 5]))
        raw.send(protocol.Put(4, prepared.dataset, indices, places, lengths, 1000))
        assert raw.receive() == protocol.Ready(4, 2, [])
        raw.send(protocol.Claim(5, prepared.dataset, indices, 1))
        assert raw.receive() == protocol.Claimed(5, b"\0\0")
        raw.send(protocol.Distrust(prepared.dataset, 0))
        raw.send(protocol.Claim(6, prepared.dataset, indices, 0))
        assert raw.receive() == protocol.Claimed(6, b"\3\3")
        raw.send(protocol.Status(7))
        assert isinstance(raw.receive(), protocol.Report)
        raw.send(protocol.Bye())


SESSIONS: dict[str, Callable[[str, str], None]] = {
    "shared": shared_session,
    "prepared": prepared_session,
}
"""The clients, by name."""


# ---- recording ---------------------------------------------------------------------------------


class Recorder:
    """Passes everything between clients and a daemon on, and keeps the frames.

    sessions: of each connection.
    """

    def __init__(self, place: Path, daemon: str) -> None:
        self.path = str(place / "recorder")
        self.sessions: list[list[Frame]] = []
        self._daemon = daemon
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._threads: list[threading.Thread] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._daemon)
            self._pairs.append((client, server))
            frames: list[Frame] = []
            self.sessions.append(frames)
            self._start(self._pass_on, "client", client, server, frames)
            self._start(self._pass_on, "daemon", server, client, frames)

    def _pass_on(
        self, sender: str, source: socket.socket, target: socket.socket, frames: list[Frame]
    ) -> None:
        received = Frames(source)
        with contextlib.suppress(EOFError, OSError):
            while True:
                content = received.next()
                values = unpack(content[4 : 4 + struct.unpack_from("<I", content)[0]])
                # Others take none: what has come belongs to a later frame.
                fds = received.fds if values[0] in _WITH_FDS else []
                if values[0] != protocol.Alive.TYPE:
                    frames.append(Frame(sender, len(fds), content))
                socket.send_fds(target, [content], fds)
                if fds:
                    received.close_fds()
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End it, when everything that was sent is passed on."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for client, _ in self._pairs:
            client.shutdown(socket.SHUT_RD)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *(sock for pair in self._pairs for sock in pair)):
            each.close()


def record(name: str, directory: Path) -> Iterator[list[Frame]]:
    """Yield the frames of each connection of a session with a real daemon."""
    with serving() as daemon:
        recorder = Recorder(daemon.directory, daemon.socket)
        try:
            SESSIONS[name](session_file(directory), recorder.path)
        finally:
            recorder.close()
    yield from (frames for frames in recorder.sessions if len(frames) > 2)


def main() -> None:
    """Record all sessions."""
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.glob(f"{protocol.VERSION}-*.txt"):
        old.unlink()
    for name in SESSIONS:
        with tempfile.TemporaryDirectory() as directory:
            for k, frames in enumerate(record(name, Path(directory))):
                lines = [f"{f.sender} {f.fd_count} {f.content.hex()}\n" for f in frames]
                path = GOLDEN / f"{protocol.VERSION}-{name}-{k}.txt"
                path.write_text("".join(lines))


if __name__ == "__main__":
    main()
