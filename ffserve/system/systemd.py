"""Messages to systemd: states (sd_notify(3)), and the priorities of lines for the journal, which
reads them from the beginning of a line (sd-daemon(3)).
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import socket
import sys

_PRIORITIES = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
"""The priorities of syslog(3), by level."""


def notify(state: str, *fds: int) -> None:
    """Send a state such as "READY=1" to the service manager, if there is one, with descriptors."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
    ):
        sock.connect(address)
        sock.sendmsg([state.encode()], rights)


def passed_names() -> list[str] | None:
    """Return the names of the descriptors that the service manager passed, in their order; None: it
    passed none."""
    count, pid = os.environ.get("LISTEN_FDS", ""), os.environ.get("LISTEN_PID", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return None
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    return [names[k] if k < len(names) else "" for k in range(int(count))]


def priority(level: int) -> str:
    """Return what begins a line of this level: nothing unless standard error is the journal."""
    return f"<{_PRIORITIES.get(level, 6)}>" if is_journal() else ""


def is_journal() -> bool:
    """Whether standard error is the journal."""
    # systemd.exec(5): device and inode of the journal's stream.
    stream = os.environ.get("JOURNAL_STREAM")
    if not stream:
        return False
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"
