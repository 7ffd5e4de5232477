"""A service manager for the tests: it keeps descriptors as systemd does.

It speaks sd_notify(3) and sd_listen_fds(3), keeps what a service sends with FDSTORE=1 by name, and
passes that, behind the listening socket, to the next process that it starts. The socket stays open
all the while, so clients that connect meanwhile wait.
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from daemon import DEADLINE_S, EXPECTED, Daemon, started, until

from ffserve.cache.inventory import NAME, Inventory

TAKEN_OVER = r"took over \d+ samples, .*"
COLD = r"starting with empty memory; the memory of the previous daemon is not used: .*"
_FIRST_FD = 3
_MOST_FDS = 253


class ManagedDaemon(Daemon):
    """A daemon under a service manager of its own. `stored`: the descriptors by name."""

    def __init__(self, **options: Any) -> None:
        expect = [*EXPECTED, TAKEN_OVER, *options.pop("expect", ())]
        super().__init__(expect=expect, **options)
        self.stored: dict[str, int] = {}
        self.states: list[str] = []
        """What the service said of itself."""
        self.counts_starts = False
        """Whether a daemon waits after failed starts, as under systemd."""
        self._lock = threading.Lock()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(self.directory / "notify"))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.socket)
        self.listener.listen(64)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def start(self, *, wait: bool = True) -> ManagedDaemon:
        """Start it with what is stored, and wait until it is ready."""
        assert self.process is None
        self._deliver()
        with self._lock:
            names = list(self.stored)
            fds = [self.listener.fileno(), *self.stored.values()]
            self.states.clear()

        def place() -> None:
            # To high numbers first, so that none overwrites one that is still to be placed.
            high = [os.dup(fd) for fd in fds]
            os.closerange(_FIRST_FD, min(high))
            for number, fd in enumerate(high, _FIRST_FD):
                os.dup2(fd, number)
            os.closerange(_FIRST_FD + len(high), max(high) + 1)

        environment = {
            **os.environ,
            **(self.environment or {}),
            **({"INVOCATION_ID": "0"} if self.counts_starts else {}),
            "NOTIFY_SOCKET": str(self.directory / "notify"),
            "LISTEN_FDS": str(len(fds)),
            "LISTEN_FDNAMES": ":".join(["ffserve", *names]),
        }
        # The shell's process becomes the daemon's.
        if not self.counts_starts:
            environment.pop("INVOCATION_ID", None)
        command = ["/bin/sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *self.command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=place,
                close_fds=False,
            )
        if wait:
            until(self._is_ready, "the daemon is ready")
        return self

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.text()
        with self._lock:
            return "READY=1" in self.states

    def restart(self, number: int = signal.SIGKILL) -> ManagedDaemon:
        """End it with a signal, and start the next one."""
        self.end(number)
        return self.start()

    def drop_store(self) -> None:
        """Close all that is stored, as systemd does when the service is stopped."""
        self._deliver()
        with self._lock:
            for fd in self.stored.values():
                os.close(fd)
            self.stored.clear()

    def _deliver(self) -> None:
        """Wait until everything that a service has sent was received."""
        done = threading.Event()
        self._marker = done
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect(str(self.directory / "notify"))
            sock.send(b"MARKER=1")
        assert done.wait(DEADLINE_S)

    def _receive(self) -> None:
        while True:
            try:
                text, fds, _, _ = _receive_fds(self._notify)
            except OSError:
                return
            lines = text.decode().split("\n")
            values = dict(line.split("=", 1) for line in lines if "=" in line)
            name = values.get("FDNAME", "stored")
            with self._lock:
                if "MARKER" in values:
                    self._marker.set()
                elif "FDSTORE" in values:
                    assert len(fds) == 1
                    old = self.stored.pop(name, None)
                    if old is not None:
                        os.close(old)
                    self.stored[name] = fds.pop()
                elif "FDSTOREREMOVE" in values:
                    if name in self.stored:
                        os.close(self.stored.pop(name))
                else:
                    self.states += lines
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """End everything."""
        super().close()
        self._notify.shutdown(socket.SHUT_RDWR)
        self._notify.close()
        self.listener.close()
        with self._lock:
            for fd in self.stored.values():
                os.close(fd)
            self.stored.clear()


def _receive_fds(sock: socket.socket) -> tuple[bytes, list[int], int, Any]:
    fds = array.array("i")
    room = socket.CMSG_LEN(_MOST_FDS * fds.itemsize)
    text, rights, flags, address = sock.recvmsg(4096, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, raw in rights:
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    if not text:
        raise OSError("closed")
    return text, list(fds), flags, address


@contextlib.contextmanager
def managed(*, expect: Sequence[str] = (), **options: Any) -> Iterator[ManagedDaemon]:
    """A running daemon under a service manager; see `daemon.serving`."""
    with started(ManagedDaemon(expect=expect, **options)) as daemon:
        yield daemon


@contextlib.contextmanager
def inventory_of(daemon: ManagedDaemon) -> Iterator[Inventory]:
    """The inventory that a daemon which has ended left for its successor."""
    fd = os.dup(daemon.stored[NAME])
    inventory = Inventory.adopt(fd, os.fstat(fd).st_size)
    yield inventory
    inventory.close()
