"""Descriptors of clients: how they are received and refused, and closed in threads, a few per user.

To close a descriptor can take as long as its sender wants: a TCP connection lingers, a file system
is silent, the pages of a memory file are freed. So the event loop never closes the last descriptor
of a file that a client opened. The kernel closes descriptors that were sent and not received when
it discards them; then the thread that receives, or closes the socket, waits for that.
Since Linux 6.16 a socket can refuse descriptors (SO_PASSRIGHTS), so that clients can pass some only
after the daemon has asked for them. Before, all are received, to be closed here.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import math
import socket
import termios
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from ffserve.engine.many_files import close_fds
from ffserve.limits import CLOSING_THREADS
from ffserve.protocol import MOST_FILES
from ffserve.server.users.shares import User
from ffserve.server.users.threads import run_in_thread

_SO_PASSRIGHTS = 83
_ANCILLARY_SIZE = socket.CMSG_SPACE(4 * MOST_FILES)


def refuse_descriptors(sock: socket.socket) -> bool:
    """Refuse descriptors, on a connection or on all that come to a listener; return False if the
    kernel cannot."""
    return _pass_rights(sock, False)


def _pass_rights(sock: socket.socket, wanted: bool) -> bool:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, wanted)
    except OSError:  # before Linux 6.16
        return False
    return True


class Closer:
    """Closes what came from one user.

    Args: user: whose connections wait while too much of it is not closed.
    """

    def __init__(self, user: User) -> None:
        self._user = user
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._threads = 0

    def close(self, call: Callable[[], None], count: int) -> None:
        """Make a call in a thread. Args: count: how many descriptors it closes."""
        self._user.closing.take(count)

        def closing() -> None:
            call()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._user.closing.give, count)

        with self._lock:
            self._waiting.append(closing)
            if self._threads == CLOSING_THREADS:
                return
            self._threads += 1
        run_in_thread(self._run)

    def close_fds(self, fds: list[int]) -> None:
        """Close received descriptors."""
        if fds:
            self.close(partial(close_fds, fds), len(fds))

    def close_socket(self, sock: socket.socket, carrying: bool = True) -> None:
        """Close a connection.

        Args: carrying: whether unread bytes may have descriptors.
        """
        if carrying:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)  # nothing more can come
                if sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    self.close(sock.close, 1)
                    return
        sock.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                closing = self._waiting.popleft()
            closing()


def closer_of(user: User) -> Closer:
    """Return the closer of a user."""
    if user.closer is None:
        user.closer = Closer(user)
    closer: Closer = user.closer
    return closer


class DescriptorReceiver:
    """Receives from a connection, with descriptors while they were asked for.

    Args: refuses: whether the connection refuses descriptors.
    """

    def __init__(self, sock: socket.socket, refuses: bool) -> None:
        self._sock = sock
        self._can_refuse = refuses
        self._left = 0.0 if refuses else math.inf
        """So many unread bytes may have descriptors."""
        # A connection that was made before the listener refused them accepts descriptors.
        if refuses and sock.getsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS):
            self.accept(False)

    @property
    def carrying(self) -> bool:
        """Whether unread bytes may have descriptors."""
        return self._left > 0

    def accept(self, wanted: bool) -> None:
        """Let the client pass descriptors from now on, or no longer."""
        if self._can_refuse and self._sock.fileno() >= 0:
            _pass_rights(self._sock, wanted)
            self._left = math.inf
            if not wanted:
                unread = array.array("i", [0])
                fcntl.ioctl(self._sock, termios.FIONREAD, unread)
                self._left = unread[0]

    def receive(self, most: int) -> tuple[bytes, list[int], bool]:
        """Return bytes, the descriptors that came with them, and whether others were lost, since
        this process may have no more. Raises: OSError."""
        if not self._left:
            return self._sock.recv(most), [], False
        chunk, ancillary, flags, _ = self._sock.recvmsg(
            most, _ANCILLARY_SIZE, socket.MSG_CMSG_CLOEXEC
        )
        self._left = max(self._left - len(chunk), 0)
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return chunk, list(fds), bool(flags & socket.MSG_CTRUNC)
