"""A daemon that completes the handshake and then follows a script of the test's own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from daemon import DEADLINE_S

from ffserve import protocol


class Peer:
    """The connection of the one client, as the script sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._decoder = protocol.Decoder(protocol.FROM_CLIENT)
        self._messages: list[protocol.Message] = []

    def receive(self) -> protocol.Message:
        """Return the next message; EOFError when the client has hung up."""
        while not self._messages:
            chunk = self._socket.recv(65536)
            if not chunk:
                raise EOFError
            self._messages = self._decoder.feed(chunk)
        return self._messages.pop(0)

    def send(self, *parts: protocol.Message | bytes) -> None:
        """Send messages, and bytes as they are."""
        for part in parts:
            self._socket.sendall(part if isinstance(part, bytes) else protocol.encode(part))


class Liar:
    """A daemon for one client, of which nothing is read in shared memory.

    Args: script: runs in a thread after WELCOME; the client's end of the connection ends it.
    hung_up: set when the client has hung up.
    """

    def __init__(
        self, place: Path, script: Callable[[Peer], object], *, arena_size: int = 1 << 20
    ) -> None:
        self.path = str(place / "liar")
        self.hung_up = threading.Event()
        self._script = script
        self._arena_size = arena_size
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self._connection, _ = self._listener.accept()
        peer = Peer(self._connection)
        about = {
            "version": protocol.VERSION,
            "arena_size": self._arena_size,
            "capacity": 1 << 20,
            "payload": "inline",
        }
        try:
            peer.receive()
            peer.send(protocol.Welcome(about))
            self._script(peer)
            while True:
                peer.receive()
        except (EOFError, OSError):
            self.hung_up.set()

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *exc: object) -> None:
        for each in (self._connection, self._listener):
            with contextlib.suppress(OSError):
                if each is not None:
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)
        self._listener.close()
        if self._connection is not None:
            self._connection.close()


def opens(peer: Peer, count: int = 2) -> None:
    """Answer an OPEN of one file with a data set of `count` samples, number 1."""
    opened = peer.receive()
    assert isinstance(opened, protocol.Open)
    shards = np.array([(0, count, 1000, 7, 0, 0)], protocol.SHARD_DTYPE)
    peer.send(protocol.Opened(opened.tag, 1, shards.tobytes(), ["ffrecord"]))


def sends(peer: Peer, tag: int, *samples: bytes) -> None:
    """Answer a GET with these samples."""
    lengths = np.array([len(each) for each in samples], "<u8").tobytes()
    content = b"".join(samples)
    peer.send(protocol.Sending(tag, lengths), protocol.Payload(tag, len(content)), content)
    peer.send(protocol.Ready(tag, len(samples), []))
