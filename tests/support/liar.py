"""A daemon that completes the handshake and then follows a script of the test's own."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from daemon import DEADLINE_S
from given_memory import GivenMemory

from ffserve import protocol


class Peer:
    """The connection of the one client, as the script sees it."""

    def __init__(self, connection: socket.socket, memory: GivenMemory) -> None:
        self._socket = connection
        self.memory = memory
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
        """Send messages, with their memory, and bytes as they are."""
        for part in parts:
            if isinstance(part, bytes):
                self._socket.sendall(part)
                continue
            fds = self.memory.fds_of(part)
            socket.send_fds(self._socket, [protocol.encode(part)], fds)
            for fd in fds:
                os.close(fd)


class Liar:
    """A daemon for one client.

    Args: script: runs in a thread after WELCOME; the client's end of the connection ends it.
    hung_up: set when the client has hung up.
    """

    def __init__(self, place: Path, script: Callable[[Peer], object]) -> None:
        self.path = str(place / "liar")
        self.hung_up = threading.Event()
        self._script = script
        self._about = {
            "version": protocol.VERSION,
            "epoch": 7,
            "arena_size": 1 << 20,
            "capacity": 1 << 12,
        }
        self._memory = GivenMemory(self._about)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self._connection, _ = self._listener.accept()
        peer = Peer(self._connection, self._memory)
        try:
            peer.receive()
            peer.send(protocol.Welcome(self._about))
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
        self._memory.close()


def opens(peer: Peer, count: int = 2) -> None:
    """Answer an OPEN of one file with a data set of `count` samples of 3 bytes, number 1."""
    opened = peer.receive()
    assert isinstance(opened, protocol.Open)
    for number in range(count):
        peer.memory.describe(number, 3)
    shards = np.array([(0, count, 1000, 7, 0, 0)], protocol.SHARD_DTYPE)
    domains = protocol.pack_tags([0])
    peer.send(protocol.Opened(opened.tag, 1, shards.tobytes(), ["ffrecord"], domains))


def gives(peer: Peer, get: protocol.Get, *samples: bytes) -> None:
    """Answer a GET with these samples."""
    indices = protocol.unpack_indices(get.indices).tolist()
    for number, content in zip(indices, samples, strict=True):
        peer.memory.publish(number, content)
    peer.send(protocol.Ready(get.tag, len(samples), []))
