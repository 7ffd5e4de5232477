"""Handover: a running daemon passes its memory and its listening socket to the next one.

The new daemon connects as a client and sends HANDOVER. The old one takes no new clients, ends what
it has begun, closes its sessions and its engines, and then sends all descriptors, by name, in
frames of HANDED; it ends without removing the socket. Clients that connect meanwhile wait in the
queue of the socket. Nothing of what comes is believed: `restart.take` checks it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator

from ffserve import protocol
from ffserve.errors import (
    AccessDenied,
    FFServeError,
    ProtocolError,
    ServerUnavailable,
    UsageError,
)
from ffserve.server.users.peers import Peer
from ffserve.system.socket_path import Credentials, connect

LISTENER, LOCK = "listener", "lock"
"""The names of the listening socket and of the lock on its path."""
CONNECT_TIMEOUT_S = 5.0
"""The new daemon waits for the answer to its greeting for this long."""
TIMEOUT_S = 30.0
"""The new daemon waits for all descriptors for this long: the old daemon ends its reads first."""
DRAIN_S = 0.25
"""The old daemon waits for requests under way for this long; clients repeat the requests that it
did not answer."""
FDS_AT_ONCE = 64


def give(heir: socket.socket, tag: int, fds: dict[str, int]) -> None:
    """Send descriptors to the next daemon; close its connection. Raises: OSError: it is gone."""
    with heir:
        heir.settimeout(CONNECT_TIMEOUT_S)
        names = list(fds)
        for first in range(0, len(names), FDS_AT_ONCE):
            part = names[first : first + FDS_AT_ONCE]
            left = len(names) - first - len(part)
            frame = protocol.encode(protocol.Handed(tag, part, left))
            sent = socket.send_fds(heir, [frame], [fds[name] for name in part])
            # Not without a rest: the other side may have closed the connection by now.
            if sent < len(frame):
                heir.sendall(frame[sent:])


def take_from(path: str) -> tuple[socket.socket, int, dict[str, int]]:
    """Have the daemon that serves a socket hand over.

    Returns: the listening socket, the lock on its path, the descriptors of the memory by name.
    Raises: UsageError: no daemon serves the socket, or it does not hand over; ProtocolError.
    """
    fds: dict[str, int] = {}
    try:
        for names, received in _frames(path):
            if len(names) != len(received) or set(names) & set(fds):
                raise ProtocolError("the daemon's descriptors did not arrive", path=path)
            fds |= dict(zip(names, received, strict=True))
        return _checked(path, fds)
    except BaseException:
        for fd in fds.values():
            os.close(fd)
        raise


def _frames(path: str) -> Iterator[tuple[list[str], list[int]]]:
    """Yield names and descriptors, which become the caller's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        try:
            connect(sock, path, CONNECT_TIMEOUT_S)
        except BlockingIOError as error:
            raise UsageError(
                f"the daemon on this socket took no connection for {CONNECT_TIMEOUT_S:.0f} s",
                path=path,
                hint="see by `ffserve status` whether it is stopped or overloaded, and try again",
            ) from error
        except OSError as error:
            raise UsageError(
                f"no daemon serves this socket: {error.strerror or error}",
                path=path,
                hint="start the daemon without --handover",
            ) from error
        sock.settimeout(CONNECT_TIMEOUT_S)
        uid = Credentials.of(sock).uid
        if uid != os.geteuid():
            raise UsageError(
                f"the daemon on this socket belongs to user {uid}",
                path=path,
                hint="run this as that user",
            )
        about = {
            "versions": list(protocol.VERSIONS),
            "job": "handover",
            "client": "ffserve serve --handover",
            "pid": os.getpid(),
            "payload": ["shared", "inline"],
            "handover": True,
        }
        try:
            sock.sendall(protocol.encode(protocol.Hello(about)))
            sock.sendall(protocol.encode(protocol.Handover(1)))
            yield from _handed(sock)
        except FFServeError as error:
            raise error.located(path=path) from None
        except (OSError, EOFError) as error:
            raise ServerUnavailable(
                f"the daemon did not hand over: {error}", path=path, hint="start without --handover"
            ) from error


def _handed(sock: socket.socket) -> Iterator[tuple[list[str], list[int]]]:
    decoder = protocol.Decoder(protocol.FROM_SERVER)
    deadline = time.monotonic() + TIMEOUT_S
    pending: list[int] = []
    left = 1
    try:
        while left:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            chunk, fds, _flags, _address = socket.recv_fds(
                sock, 65536, protocol.MOST_FILES, socket.MSG_CMSG_CLOEXEC
            )
            pending += fds
            if not chunk:
                raise EOFError("it closed the connection")
            for message in decoder.feed(chunk):
                match message:
                    case protocol.Welcome():
                        _close_all(pending)  # its page, which comes by name as well
                    case protocol.Handed(names=names, left=left):
                        some, pending[:] = pending[: len(names)], pending[len(names) :]
                        yield names, some
                    case protocol.Fail(error=wire):
                        raise protocol.error_from_wire(wire)
    finally:
        _close_all(pending)


def _checked(path: str, fds: dict[str, int]) -> tuple[socket.socket, int, dict[str, int]]:
    """Return the listening socket, the lock, and the rest."""
    wrong = ProtocolError(
        "the daemon handed over no listening socket of this path, or no lock", path=path
    )
    if LISTENER not in fds or LOCK not in fds:
        raise wrong
    lock = os.fstat(fds[LOCK])
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(fds[LISTENER]).st_mode):
            raise wrong
        there = os.stat(path + ".lock")
        if (there.st_dev, there.st_ino) == (lock.st_dev, lock.st_ino):
            listener = socket.socket(fileno=os.dup(fds[LISTENER]))
            listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listener.family == socket.AF_UNIX and listens and listener.getsockname() == path:
                os.close(fds.pop(LISTENER))
                return listener, fds.pop(LOCK), fds
            listener.close()
    raise wrong


def check(peer: Peer) -> None:
    """Check whether this daemon hands over to a client. Raises: AccessDenied, UsageError: not."""
    if not peer.is_administrator:
        raise AccessDenied(
            f"user {peer.uid} may not take this daemon over",
            hint="run this as root or as the user of the daemon, and not in a container other "
            "than the daemon's",
        )
    if os.environ.get("NOTIFY_SOCKET"):
        raise UsageError(
            "this daemon was started by a service manager",
            hint="restart its service: that keeps the memory as well",
        )


def _close_all(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
