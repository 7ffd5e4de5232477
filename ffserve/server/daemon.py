"""The daemon as a process: its socket, its signals, its memory, systemd.

Reading order for a newcomer: `serve` takes the socket, `_run` wires state, server and signals;
`state.py` is the picture of the parts, `session.py` one client's conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import grp
import logging
import os
import resource
import signal
import socket
import stat

import uvloop

from ffserve.config import ServerConfig, format_size
from ffserve.errors import ReadError, UsageError
from ffserve.files import os_error, raise_file_limit, wrap_os_error
from ffserve.machine import usable_memory
from ffserve.server.server import Server
from ffserve.server.state import ServerState
from ffserve.socket_path import prepare_socket_directory

log = logging.getLogger("ffserve")

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP is the end of the terminal; who wants to outlive it (nohup) has it ignored."""
_BACKLOG = 1024
_FIRST_PASSED_FD = 3
LEAST_FILES = 64
"""Descriptors: its own take two dozen, and a client some more while it is greeted."""
OWN_SIZE = 32 * 1024 * 1024
"""What a daemon takes beside its arena as it starts, and a little; samples and orders come on top
of it (docs/CONFIGURATION.md)."""


def serve(config: ServerConfig) -> int:
    """Run the daemon until SIGTERM, SIGINT or SIGHUP; return its exit code.

    Raises:
        UsageError: another daemon serves this socket, or something that is no socket is there.
        AccessDenied, ReadError: the socket or the shared memory cannot be made.
    """
    logging.basicConfig(format="ffserve: %(message)s", level=config.log_level.upper())
    raise_file_limit()
    _check_machine(config)
    # Who can connect can also tell us to stop, before the loop is there to hear it.
    early: list[int] = []
    stopping = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    for number in stopping:
        signal.signal(number, lambda number, _frame: early.append(number))
    listener, lock = _listen(config)
    try:
        uvloop.run(_run(config, listener, stopping, early))
        return 0
    finally:
        listener.close()
        if lock is not None:
            _remove_socket(config.socket, lock)


def _check_machine(config: ServerConfig) -> None:
    """Refuse what cannot be; say which roots are not there. Raises: UsageError."""
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most_files < LEAST_FILES:
        raise UsageError(
            f"{most_files} open files are allowed, a daemon needs {LEAST_FILES} and one for each "
            "file that it serves",
            hint="raise the limit (ulimit -n, LimitNOFILE= of its unit)",
        )
    memory = usable_memory()
    if config.arena_size > memory - OWN_SIZE:
        raise UsageError(
            f"an arena of {format_size(config.arena_size)} and {format_size(OWN_SIZE)} for the "
            f"daemon itself are more than the {format_size(memory)} of memory that this process "
            f"may use",
            hint="give a smaller --arena; leave memory for the jobs themselves",
        )
    for root in config.roots:
        if not os.path.isdir(root):
            log.warning("there is no directory %s: nothing is served from there until it is", root)


async def _run(
    config: ServerConfig, listener: socket.socket, stopping: list[signal.Signals], early: list[int]
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in stopping:
        loop.add_signal_handler(number, stop.set)
    if early:
        stop.set()
    state = ServerState(config)
    state.engines.on_broken = stop.set
    server = Server(state, listener)
    state.pages.start()
    log.info(
        "serving %s on %s, arena %s, engine %s",
        " ".join(config.roots),
        config.socket,
        format_size(state.arena.size),
        state.engines.kind,
    )
    _notify("READY=1")
    watchdog = loop.create_task(_watchdog())
    await stop.wait()
    _notify("STOPPING=1")
    log.info("stopping: %d clients", server.connection_count)
    watchdog.cancel()
    broken = state.engines.broken
    patience_s = 0.0 if broken else config.drain_timeout_s
    if not await server.drain(patience_s):
        log.warning("stopped with requests unanswered after %g s", patience_s)
    state.close()
    if broken:
        raise ReadError(
            "an engine broke while it read: nobody can say when the kernel is done with its memory",
            hint="start the daemon again; systemd does so by itself",
        )


async def _watchdog() -> None:
    interval_s = _watchdog_interval_s()
    while interval_s is not None:
        _notify("WATCHDOG=1")
        await asyncio.sleep(interval_s / 2)


# ---- systemd: sd_notify(3), sd_listen_fds(3) --------------------------------------------------


def _notify(state: str) -> None:
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


def _watchdog_interval_s() -> float | None:
    """Return how often at least the manager wants a sign of life; None: never."""
    wanted = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not wanted.isdecimal() or pid != str(os.getpid()):
        return None
    return int(wanted) / 1e6


def _passed_socket() -> socket.socket | None:
    """Return the socket that socket activation passed, or None."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    if int(os.environ.get("LISTEN_FDS", "0")) < 1:
        return None
    os.set_inheritable(_FIRST_PASSED_FD, False)
    return socket.socket(fileno=_FIRST_PASSED_FD)


# ---- the socket -------------------------------------------------------------------------------


def _listen(config: ServerConfig) -> tuple[socket.socket, int | None]:
    """Return the listening socket, and the lock that makes it ours (None: systemd's socket)."""
    passed = _passed_socket()
    if passed is not None:
        return passed, None
    path = config.socket
    prepare_socket_directory(path)
    lock = _lock(path)
    try:
        _clear_stale(path)
        group = None if config.socket_group is None else _group_number(config.socket_group)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with contextlib.ExitStack() as undo:
            undo.callback(listener.close)
            # Nobody may connect before mode and group are right.
            previous = os.umask(0o177)
            try:
                wrap_os_error(listener.bind, path)
            finally:
                os.umask(previous)
            undo.callback(os.unlink, path)
            if group is not None:
                wrap_os_error(lambda p: os.chown(p, -1, group), path)
            wrap_os_error(lambda p: os.chmod(p, config.socket_mode), path)
            listener.listen(_BACKLOG)
            undo.pop_all()
        return listener, lock
    except BaseException:
        _remove_lock(path, lock)
        raise


def _lock(path: str) -> int:
    """Become the one daemon of this socket; the kernel drops the lock however we end."""
    lock_path = path + ".lock"
    while True:
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise os_error(error, lock_path, hint="name another place with --socket") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(fd, 32).decode(errors="replace").strip()
            os.close(fd)
            raise UsageError(
                f"another daemon{f' (pid {pid})' if pid else ''} serves this socket",
                path=path,
                hint="stop it, or give this one another --socket",
            ) from None
        # An ending daemon unlinks its lock file: make sure that ours is the one with the name.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(lock_path).st_ino == os.fstat(fd).st_ino:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        os.close(fd)


def _clear_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(
            "something that is no socket is in the socket's place",
            path=path,
            hint="remove it, or give another --socket",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
        try:
            attempt.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise UsageError(
        "another program answers on this socket",
        path=path,
        hint="stop it, or give this daemon another --socket",
    )


def _group_number(group: str) -> int:
    try:
        return int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(f"no group is called {group!r}", hint="see socket_group") from None


def _remove_socket(path: str, lock: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
    _remove_lock(path, lock)


def _remove_lock(path: str, lock: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path + ".lock")
    os.close(lock)
