"""The greeting: a socket to the daemon, and what it gives of its memory.

Three descriptors come with WELCOME: arena, directory, index. They are mapped read-only. Where they
do not reach us (another container, a limit on descriptors or on the address space) samples come
through the socket instead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.cache.shm import is_sealed, map_read_only
from ffserve.client.inbox import CHUNK
from ffserve.errors import FFServeError, ProtocolError, ReadError, ServerUnavailable
from ffserve.protocol import Message
from ffserve.socket_path import MAX_SOCKET_PATH

CONNECT_TIMEOUT_S = 5.0


class _NoMemory(ServerUnavailable):
    """The daemon's memory did not reach us."""


class Greeting:
    """A socket that was greeted.

    Args: path: of the socket. job: name of the training run. payload: how samples may come.

    arena_size: bytes, as large as it may become. takes_orders: whether ORDER is of use. inline:
    samples come through the socket, and nothing is mapped.
    """

    arena: NDArray[np.uint8]

    def __init__(self, path: str, job: str, payload: list[str]) -> None:
        self.path = path
        self.decoder = protocol.Decoder(protocol.FROM_SERVER)
        self._fds: list[int] = []
        weakref.finalize(self, _close_all, self._fds).atexit = False
        self.socket = _connect(path)
        try:
            self._take(self._greet(job, payload), payload)
        except BaseException:
            self.drop_fds()
            self.socket.close()
            raise

    def _greet(self, job: str, payload: list[str]) -> dict[str, Any]:
        from ffserve import __version__

        hello = protocol.Hello(
            {
                "versions": [protocol.VERSION],
                "client": f"ffserve {__version__}",
                "job": job,
                "pid": os.getpid(),
                "payload": payload,
            }
        )
        try:
            # A daemon that takes no more clients says so and hangs up before it hears anything.
            with contextlib.suppress(BrokenPipeError):
                self.socket.sendall(protocol.encode(hello))
            messages: list[Message] = []
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            while not messages:
                self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
                chunk, fds, _flags, _address = socket.recv_fds(self.socket, CHUNK, 4)
                self._fds += fds
                if not chunk:
                    raise ServerUnavailable("the daemon hung up", path=self.path)
                messages = self.decoder.feed(chunk)
        except OSError as error:
            if isinstance(error, FFServeError):
                raise
            slow = isinstance(error, TimeoutError)
            reason = f"nothing came for {CONNECT_TIMEOUT_S:g} s" if slow else str(error)
            raise ServerUnavailable(
                f"there is a daemon, but it does not greet: {reason}",
                path=self.path,
                hint="is it stopped, or the machine overloaded? server='require' waits for it",
            ) from error
        match messages[0]:
            case protocol.Welcome(about=about):
                return about
            case protocol.Fail(error=wire):
                raise protocol.error_from_wire(wire)
        raise ProtocolError("the daemon's greeting is none", path=self.path)

    def _take(self, about: dict[str, Any], payload: list[str]) -> None:
        arena_size, capacity = about.get("arena_size"), about.get("capacity")
        if not isinstance(arena_size, int) or not isinstance(capacity, int):
            raise ProtocolError("the daemon's WELCOME has no sizes", path=self.path)
        if arena_size <= 0 or not 0 < capacity < 1 << 48:
            raise ProtocolError("the daemon's WELCOME has impossible sizes", path=self.path)
        self.arena_size = arena_size
        self.takes_orders = about.get("orders") is True
        self._capacity = capacity
        self.inline = about.get("payload", "shared") == "inline"
        if self.inline:
            return
        if "shared" not in payload:
            raise ProtocolError("the daemon cannot send samples through the socket", path=self.path)
        if len(self._fds) != 3:
            raise _NoMemory("no descriptors came with the daemon's WELCOME", path=self.path)
        if not all(map(is_sealed, self._fds)):
            raise ProtocolError("the daemon's memory is not sealed", path=self.path)
        try:
            self.arena = map_read_only(self._fds[0], 0, self.arena_size)
        except ReadError as error:
            raise _NoMemory(error.message, path=self.path) from error

    def entries(self, base: int, count: int) -> NDArray[np.uint8]:
        """Map the directory's entries of samples [base, base + count), read-only."""
        self._check_run(base, count)
        return map_read_only(self._fds[1], base * 16, count * 16)

    def index(self, base: int, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of the payload offsets and the checksums of a run of samples."""
        self._check_run(base, count)
        if count == 0:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        offsets = map_read_only(self._fds[2], base * 8, count * 8).view(np.uint64)
        place = self._capacity * 8 + base * 4
        return offsets.copy(), map_read_only(self._fds[2], place, count * 4).view(np.uint32).copy()

    def _check_run(self, base: int, count: int) -> None:
        if base < 0 or count < 0 or base + count > self._capacity:
            raise ProtocolError("the daemon named samples outside its tables", path=self.path)

    def drop_fds(self) -> None:
        """Close the descriptors of what is mapped; mappings stay."""
        _close_all(self._fds)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def greet(path: str, job: str) -> Greeting:
    """Connect to the daemon at `path` and greet it.

    Raises:
        ServerUnavailable: nobody answers there.
        ProtocolError: who answers speaks another protocol.
    """
    try:
        return Greeting(path, job, ["shared", "inline"])
    except _NoMemory:
        return Greeting(path, job, ["inline"])


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Where as many wait already as may, a socket with Python's timeout gives up at once.
        patience = struct.pack("ll", *divmod(int(CONNECT_TIMEOUT_S * 1e6), 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        sock.connect(path)
    except OSError as error:
        sock.close()
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            hint = f"a socket's path has at most {MAX_SOCKET_PATH} bytes"
        elif isinstance(error, PermissionError):
            hint = "become a member of the socket's group (see `ls -l`) and log in again"
        elif isinstance(error, BlockingIOError):
            hint = "it is stopped, or has more to do than it can: `ffserve status` may tell"
        else:
            hint = "start one with `ffserve serve`, or set $FFSERVE_SOCKET"
        raise ServerUnavailable(
            f"no daemon answers: {error.strerror or error}", path=path, hint=hint
        ) from error
    return sock
