"""What systemd says to a service and wants to hear, sd_notify(3) and sd_listen_fds(3)."""

from __future__ import annotations

import contextlib
import os
import socket

_FIRST_PASSED_FD = 3


def notify(state: str) -> None:
    """Tell the service manager, if there is one, such as "READY=1"."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
    ):
        sock.connect(address)
        sock.send(state.encode())


def watchdog_interval_s() -> float | None:
    """Return how often at least the manager wants a sign of life; None: never."""
    wanted = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not wanted.isdecimal() or pid != str(os.getpid()):
        return None
    return int(wanted) / 1e6


def listening_socket() -> socket.socket | None:
    """Return the socket that socket activation passed, or None."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    if int(os.environ.get("LISTEN_FDS", "0")) < 1:
        return None
    os.set_inheritable(_FIRST_PASSED_FD, False)
    return socket.socket(fileno=_FIRST_PASSED_FD)
