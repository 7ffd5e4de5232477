"""Handshake: connects to the daemon, exchanges HELLO and WELCOME.

Over a connection to a daemon whose memory cannot be mapped (`memory.check_page`) no data set can be
opened; `ffserve status` and other questions are answered.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import weakref
from typing import Any

from ffserve import protocol
from ffserve.client.daemon.channel import RECEIVE_SIZE, Channel
from ffserve.client.daemon.mapped_memory import Memories, UnmappedError, check_page, close_all
from ffserve.errors import FFServeError, ProtocolError, ServerUnavailable
from ffserve.protocol import Message
from ffserve.system.memfd import lock_byte
from ffserve.system.socket_path import MAX_SOCKET_PATH, connect

CONNECT_TIMEOUT_S = 5.0


class Handshake:
    """A socket after the handshake.

    Args: path: of the socket. job: name of the training run.

    unmapped: why this process cannot map the daemon's memory; None: it can. channel: of the
    connection.

    Raises:
        ServerUnavailable: nothing answers there.
        ProtocolError: the other side speaks another protocol.
    """

    def __init__(self, path: str, job: str) -> None:
        self.path = path
        self.unmapped: UnmappedError | None = None
        self._memories: Memories | None = None
        self._fds: list[int] = []
        self._fds_lost = False
        self._generation = 0
        weakref.finalize(self, close_all, self._fds).atexit = False
        self.socket = _connect(path)
        try:
            decoder = protocol.Decoder(protocol.FROM_SERVER)
            about = self._exchange(decoder, job)
            self._take(about)
        except BaseException:
            self.drop_fds()
            self.socket.close()
            raise
        takes_orders = about.get("orders") is True
        self.channel = Channel(path, decoder, takes_orders=takes_orders, memories=self._memories)
        self.channel.takes_times = about.get("times") is True
        self.channel.tells_last = about.get("last") is True
        self.fetches = _texts(about.get("remote"))
        """Protocols by which the daemon fetches remote files."""
        self.shares_prepared = about.get("prepared") is True
        """Whether the daemon knows PREPARE, CLAIM, PUT and DISTRUST."""
        self.names_members = about.get("members") is True
        """Whether the daemon knows NAMES, and so tar files."""
        self.keeps_items = about.get("items") is True
        """Whether these may be made of no file."""

    def _exchange(self, decoder: protocol.Decoder, job: str) -> dict[str, Any]:
        """Send HELLO; return what WELCOME says."""
        from ffserve._version import __version__

        hello = protocol.Hello(
            {
                "versions": list(protocol.VERSIONS),
                "client": f"ffserve {__version__}",
                "job": job,
                "pid": os.getpid(),
                **_described(),
                "locks": True,
            }
        )
        try:
            # A daemon that takes no more clients says so and hangs up before it reads anything.
            with contextlib.suppress(BrokenPipeError):
                self.socket.sendall(protocol.encode(hello))
            messages: list[Message] = []
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            while not messages:
                self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
                chunk, fds, flags, _address = socket.recv_fds(
                    self.socket, RECEIVE_SIZE, 4, socket.MSG_CMSG_CLOEXEC
                )
                self._fds += fds
                self._fds_lost |= bool(flags & socket.MSG_CTRUNC)
                if not chunk:
                    raise ServerUnavailable(
                        "the daemon closed the connection during the handshake", path=self.path
                    )
                messages = decoder.feed(chunk)
        except OSError as error:
            if isinstance(error, FFServeError):
                raise
            timed_out = isinstance(error, TimeoutError)
            reason = (
                f"the daemon sent no WELCOME within {CONNECT_TIMEOUT_S:g} s"
                if timed_out
                else str(error)
            )
            raise ServerUnavailable(
                f"the handshake {'timed out' if timed_out else 'failed'}: {reason}",
                path=self.path,
                hint=(
                    "check whether the daemon is stopped or the machine overloaded, or wait with "
                    "server='require'"
                ),
            ) from error
        match messages[0]:
            case protocol.Welcome(about=about):
                return about
            case protocol.Fail(error=wire):
                raise protocol.error_from_wire(wire)
        raise ProtocolError(
            f"invalid handshake: the daemon sent {type(messages[0]).__name__.upper()} where "
            "WELCOME is due",
            path=self.path,
        )

    def _take(self, about: dict[str, Any]) -> None:
        version = about.get("version")
        if version not in protocol.VERSIONS:
            raise ProtocolError(
                f"invalid WELCOME: it has version {version!r}, which this client did not offer",
                path=self.path,
            )
        arena_size, capacity = about.get("arena_size"), about.get("capacity")
        if not isinstance(arena_size, int) or not isinstance(capacity, int):
            raise ProtocolError(
                "invalid WELCOME: arena_size or capacity is missing", path=self.path
            )
        if arena_size <= 0 or not 0 < capacity < 1 << 48:
            raise ProtocolError(
                f"invalid WELCOME: it has arena_size {arena_size} and capacity {capacity}",
                path=self.path,
            )
        generation = about.get("generation", 0)
        if not isinstance(generation, int) or not 0 <= generation < 1 << 62:
            raise ProtocolError(
                f"invalid WELCOME: it has generation {generation!r}", path=self.path
            )
        self._generation = generation
        try:
            check_page(self.path, self._fds, about.get("epoch"), arena_size, lost=self._fds_lost)
        except UnmappedError as error:
            self.unmapped = error
        else:
            self._memories = Memories(self.path, arena_size, capacity)

    def check_memory(self) -> None:
        """Raise UnmappedError if this process cannot map the daemon's memory."""
        if self.unmapped is not None:
            raise self.unmapped.located()

    def hold_leases(self, held: bool) -> None:
        """Show that leases are held over this connection, or not any more: the daemon's successor
        sees it, whatever becomes of the connection. Raises: OSError."""
        if self._fds:
            lock_byte(self._fds[0], self._generation, held=held)

    def drop_fds(self) -> None:
        """Close the descriptors of the shared memory; mappings stay."""
        close_all(self._fds)
        if self._memories is not None:
            self._memories.close()


def _texts(values: Any) -> frozenset[str]:
    if not isinstance(values, list):
        return frozenset()
    return frozenset(value for value in values if isinstance(value, str))


def _described() -> dict[str, str]:
    """Return what people are shown of this job: the name that it gave itself, and its command."""
    command = " ".join(map(str, getattr(sys, "argv", [])))
    title = os.environ.get("FFSERVE_JOB", "")
    return {
        "title": _cut(title, protocol.MOST_TITLE),
        "command": _cut(command, protocol.MOST_COMMAND),
    }


def _cut(text: str, most: int) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= most else text[: most - 1] + "…"


def _connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connect(sock, path, CONNECT_TIMEOUT_S)
    except OSError as error:
        sock.close()
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            hint = f"a socket's path has at most {MAX_SOCKET_PATH} bytes"
        elif isinstance(error, PermissionError):
            hint = "become a member of the socket's group (see `ls -l`) and log in again"
        elif isinstance(error, BlockingIOError):
            hint = "check with `ffserve status` whether the daemon is stopped or overloaded"
        else:
            hint = "start one with `ffserve serve`, or set $FFSERVE_SOCKET"
        raise ServerUnavailable(
            f"no daemon answers: {error.strerror or error}", path=path, hint=hint
        ) from error
    return sock
