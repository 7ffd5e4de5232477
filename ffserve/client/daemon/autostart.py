"""Autostart: starts a daemon for this user when none answers (`server="start"`).

The daemon is no child of this process and outlives it: it belongs to all jobs of the user, and
ends by itself some time after the last one (`--idle-timeout`). It has the defaults of all settings,
whatever those of the machine's daemon are, and reads remote files for its user alone, with what its
process has of this one's environment, through the store that this user's processes share.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ffserve.disk.files import os_error, wrap_os_error
from ffserve.errors import AccessDenied, ServerUnavailable, UsageError
from ffserve.store.directory import default_directory
from ffserve.system.socket_path import LISTENS_S, connect, prepare_socket_directory

IDLE_TIMEOUT_S = 600
"""How long a daemon that was started here stays after its last client."""
START_TIMEOUT_S = 30.0
_POLL_S = 0.02
_OF_OTHER_SERVICES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "RUNTIME_DIRECTORY",
    "CACHE_DIRECTORY",
)
"""Variables that systemd set for the service in which this process runs, not for the daemon."""
_PROGRAM = """
import os, sys
if os.fork():
    os._exit(0)  # the daemon is no child of the process that started it
os.sched_setaffinity(0, range(os.cpu_count()))  # the job may be bound to some of its cores
sys.path.append(sys.argv.pop(1))
from ffserve.cli import main
sys.exit(main())
"""


def start_wanted(*, remote: bool = False) -> bool:
    """Return whether `server="auto"` starts a daemon: as ``$FFSERVE_START`` says, else for remote
    files. Raises: UsageError."""
    value = os.environ.get("FFSERVE_START", "")
    if value not in ("", "0", "1"):
        raise UsageError(
            f"invalid value {value!r} of FFSERVE_START",
            hint="set it to 1 to start a daemon, or to 0 not to start one",
        )
    return value == "1" or (remote and not value)


def start_daemon(path: str) -> None:
    """Return when a daemon listens on a socket: one that does already, or one that is started.

    However many processes call this at once, one of them starts a daemon. Its log is in PATH.log.

    Args:    path: of the socket.
    Raises:  ServerUnavailable: the daemon ended at once, or does not answer. MissingFile,
             AccessDenied, ReadError: the socket's directory or the log cannot be created.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    prepare_socket_directory(path)
    with _lock(os.path.dirname(os.path.abspath(path)), path, deadline) as locked:
        if locked and not _answers(path):
            _start(path, deadline)


@contextlib.contextmanager
def _lock(directory: str, path: str, deadline: float) -> Iterator[bool]:
    """Lock the socket's directory; give False if a daemon answers before the lock is free."""
    fd = wrap_os_error(lambda d: os.open(d, os.O_RDONLY | os.O_DIRECTORY), directory)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if _answers(path):
                    yield False
                    return
                if time.monotonic() >= deadline:
                    raise ServerUnavailable(
                        f"another process has held the lock for starting a daemon for more than "
                        f"{START_TIMEOUT_S:g} s",
                        path=path,
                        hint="start one with `ffserve serve`",
                    ) from None
                time.sleep(_POLL_S)
                continue
            yield True
            # A child that was forked meanwhile has this descriptor: closing it is not enough.
            fcntl.flock(fd, fcntl.LOCK_UN)
            return
    finally:
        os.close(fd)


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as attempt:
        try:
            connect(attempt, path, LISTENS_S)
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
        return True


def _start(path: str, deadline: float) -> None:
    """Start a daemon and wait until it listens."""
    log_path = path + ".log"
    package = str(Path(__file__).resolve().parents[2])
    environment = {k: v for k, v in os.environ.items() if k not in _OF_OTHER_SERVICES}
    settings = ["--socket", os.path.abspath(path), "--idle-timeout", str(IDLE_TIMEOUT_S)]
    settings += ["--config", os.devnull, "--store-directory", default_directory()]
    settings += ["--store-access", "own"]
    if size := os.environ.get("FFSERVE_STORE_SIZE"):
        settings += ["--store-size", size]
    if cache := os.environ.get("FFSERVE_STORE_CACHE"):
        settings += ["--store-cache", cache]
    alive, held = os.pipe()
    try:
        with _create_log(log_path) as log:
            try:
                intermediate = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, package, "serve", *settings],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=environment,
                    pass_fds=[held],  # the daemon's end closes it
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerUnavailable(
                    f"cannot run {sys.executable or 'a Python interpreter'}: {error.strerror}",
                    path=path,
                    hint="start a daemon with `ffserve serve`",
                ) from error
        os.close(held)
        held = -1
        intermediate.wait()
        _wait(path, alive, log_path, deadline)
    finally:
        for fd in (alive, held):
            if fd >= 0:
                os.close(fd)


def _wait(path: str, alive: int, log_path: str, deadline: float) -> None:
    poll = select.poll()  # the number of a descriptor may exceed what select(2) takes
    poll.register(alive, select.POLLIN)
    while True:
        ended = bool(poll.poll(1000 * _POLL_S))
        if _answers(path):
            return
        if ended or time.monotonic() >= deadline:
            happened = "ended at once" if ended else f"does not answer after {START_TIMEOUT_S:g} s"
            raise ServerUnavailable(
                f"the daemon that this process started {happened}{_last_line(log_path)}",
                path=path,
                hint=f"see {log_path}",
            )


def _create_log(path: str) -> BinaryIO:
    """Create the log, or empty that of the last daemon. Raises: AccessDenied, ReadError."""
    try:
        # Another user may have put a link or a pipe there if the directory is shared.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        log = os.fdopen(fd, "wb")
    except OSError as error:
        raise os_error(error, path, hint="choose another socket with FFSERVE_SOCKET") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        log.close()
        raise AccessDenied(
            "the daemon's log is not a file of this user",
            path=path,
            hint="remove it, or choose another socket with FFSERVE_SOCKET",
        )
    log.truncate(0)
    return log


def _last_line(log_path: str) -> str:
    with contextlib.suppress(OSError), open(log_path, "rb") as log:
        lines = log.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            if not line.startswith("  hint:"):
                return f": {line.removeprefix('error: ')}"
    return ""
