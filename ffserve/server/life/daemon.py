"""The daemon as a process: its socket, its signals, its memory, systemd.

`serve` takes the socket; `_run` connects state, server and signals. `state.py` shows the parts of
the daemon, `session.py` the life of one connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import resource
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import uvloop

from ffserve._version import __version__
from ffserve.cache.inventory import Inventory
from ffserve.config import ServerConfig, format_size, merge_live
from ffserve.disk.files import os_error
from ffserve.engine.io import ring_refusal
from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.server.files.remote import try_store
from ffserve.server.life import starts
from ffserve.server.life.fd_store import forget, keep, memory_of, passed
from ffserve.server.life.handover import DRAIN_S, LISTENER, LOCK, give, take_from
from ffserve.server.life.log import start_logging
from ffserve.server.life.restart import QUARANTINE_S, RETURN_S, take
from ffserve.server.life.startup import check, group_of, http_module
from ffserve.server.sessions.server import Server, listen
from ffserve.server.sessions.state import ServerState
from ffserve.system.capabilities import lockable_size
from ffserve.system.memfd import is_locked_below
from ffserve.system.socket_path import prepare_socket_directory
from ffserve.system.systemd import notify

log = logging.getLogger("ffserve")

Action: TypeAlias = Callable[[], object]
STATUS_INTERVAL_S = 5.0
"""How often the service manager gets a line about the daemon, if it has changed."""
IDLE_CHECK_S = 1.0
"""How often the daemon looks whether it has been idle for long."""
_BACKLOG = 1024
SETTLE_INTERVAL_S = 1.0
"""How often a daemon that took memory over looks for leases of its predecessor."""
EXIT_REMOVED = 75
"""Exit code if the socket of systemd has no path any more; the unit then restarts both."""
MOST_REMOVED = 2
"""After this many failed starts the daemon serves without the path: the unit restarts no socket."""
EXIT_FAULT = 1
"""Exit code after an internal error; systemd starts the daemon again."""


def serve(
    config: ServerConfig,
    load: Callable[[], ServerConfig],
    ignored: Sequence[str] = (),
    *,
    handover: bool = False,
    failed: int = 0,
) -> int:
    """Run the daemon until SIGTERM or SIGINT, or until another one takes it over; return its exit
    code.

    SIGHUP reloads the settings. If the daemon has a terminal, the signal means that the terminal
    was closed, and ends it; nohup makes the process ignore it.

    Args: load: reads the settings again. ignored: as of `check`. handover: take the running daemon
        over. failed: how many starts before this one have failed.
    Raises:
        UsageError: another daemon serves this socket, or its path is not a socket; with handover:
            none serves it, or it does not hand over.
        AccessDenied, ReadError: the socket or the shared memory cannot be created.
    """
    start_logging(config.log_level, config.log_format)
    check(config, ignored)  # all of it before another daemon hands over, which ends that one
    try_store(config)
    signals = _DaemonSignals()
    sockets, kept = passed()
    lock: int | None = None
    if sockets:
        listener = sockets[0]
        if is_removed(listener):
            _say_removed(listener)
            if failed < MOST_REMOVED:
                return EXIT_REMOVED
    elif handover:
        listener, lock, kept = take_from(config.socket)
        _write_pid(lock)
    else:
        listener, lock = _listen(config)
    handed = False
    try:
        http = _http_listener(config, sockets[1:])
        handed = uvloop.run(_run(config, listener, lock, http, kept, load, signals))
        return 0
    finally:
        listener.close()
        if lock is not None and not handed:
            _remove_socket(config.socket, lock)


class _DaemonSignals:
    """The signals that the daemon handles. They may come before its loop handles them.

    A daemon with a terminal gets SIGHUP when the terminal is closed.
    """

    def __init__(self) -> None:
        hangup = {signal.SIGHUP} if _has_terminal() else set()
        self._stopping = self._wanted({signal.SIGTERM, signal.SIGINT, *hangup})
        self._reloading = self._wanted({signal.SIGHUP} - hangup)
        self._early: list[int] = []
        for number in self._stopping + self._reloading:
            signal.signal(number, lambda number, _frame: self._early.append(number))

    def _wanted(self, numbers: set[signal.Signals]) -> list[signal.Signals]:
        return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def attach(self, loop: asyncio.AbstractEventLoop, stop: Action, reload: Action) -> None:
        """Call one of these for each signal, also for signals that came before."""
        for numbers, action in ((self._stopping, stop), (self._reloading, reload)):
            for number in numbers:
                loop.add_signal_handler(number, action)
            if set(self._early) & set(numbers):
                loop.call_soon(action)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _run(
    config: ServerConfig,
    listener: socket.socket,
    lock: int | None,
    http_listener: socket.socket | None,
    kept: dict[str, int],
    load: Callable[[], ServerConfig],
    signals: _DaemonSignals,
) -> bool:
    """Serve until the end; return whether another daemon took over."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    state = _state(config, kept)
    loop.set_exception_handler(partial(_end_at_once, state.memory.inventory))
    keep(state.memory, state.domains)
    server = Server(state, listener, stop.set)
    close_http: Action | None = None
    if http_listener is not None:
        show_jobs = config.http_jobs == "all"
        close_http = http_module().HttpServer(server, http_listener, show_jobs=show_jobs).close
    state.pages.start()
    signals.attach(loop, stop.set, partial(_reload, server, load))
    _log_start(server)
    # All objects made until now stay. Without them a full garbage collection takes much less time.
    gc.freeze()
    if config.engine == "auto" and (reason := ring_refusal(state.reading.engines.kind)):
        log.warning(
            "io_uring is not used (%s): reading with %s", reason, state.reading.engines.kind
        )
    notify(f"READY=1\nSTATUS={_status(server)}")
    tasks = [
        loop.create_task(each)
        for each in (
            _watchdog(),
            _report(server, listener),
            _settle(state),
            _stop_when_idle(server, stop),
            _succeed(),
        )
    ]
    await stop.wait()
    for task in tasks:
        task.cancel()
    return await _end(server, listener, lock, close_http)


async def _end(
    server: Server, listener: socket.socket, lock: int | None, close_http: Action | None
) -> bool:
    """Answer what is under way and end; return whether another daemon took over."""
    state = server.state
    notify(f"STOPPING=1\nSTATUS=stopping, clients: {server.connection_count}")
    if not state.reading.engines.broken:
        starts.forget()
    if server.heir is None:
        log.info("stopping: %d clients", server.connection_count)
    else:
        log.info("stopping: %d clients, another daemon takes over", server.connection_count)
    broken = state.reading.engines.broken
    if broken:
        state.memory.inventory.doubt()
    patience_s = 0.0 if broken else state.config.drain_timeout_s
    if server.heir is not None:
        patience_s = min(patience_s, DRAIN_S)
    if not await server.drain(patience_s) and server.heir is None:
        log.warning("stopped with unanswered requests after %g s", patience_s)
    if close_http is not None:
        close_http()
    state.close()
    if broken:
        raise ReadError(
            "an I/O engine failed while it was reading: the kernel may still write to the arena, "
            "so the daemon ends",
            hint="start the daemon again (systemd does so); see dmesg for the cause",
        )
    if server.heir is None or lock is None:
        return False
    sock, tag = server.heir
    try:
        give(
            sock,
            tag,
            {LISTENER: listener.fileno(), LOCK: lock, **memory_of(state.memory, state.domains)},
        )
    except OSError as error:
        log.warning("the daemon that was taking over has ended: %s", error)
        return False
    return True


def _state(config: ServerConfig, fds: dict[str, int]) -> ServerState:
    """Return the parts of the daemon, over the memory of a predecessor if that can be used.

    Args: fds: of the predecessor, by name.
    """
    if not fds:
        return ServerState(config)
    names = list(fds)
    try:
        kept = take(fds, config)
    except ReadError as error:
        log.warning(
            "starting with empty memory; the memory of the previous daemon is not used: %s", error
        )
        kept, left = None, names
    else:
        left = list(fds)
    for fd in fds.values():
        os.close(fd)
    forget(left)
    try:
        state = ServerState(config, kept)
    except ReadError:
        forget(names)  # the next daemon starts with new memory
        raise
    if state.memory.adopted is not None:
        log.info(
            "took over %d samples, %s",
            state.memory.adopted.samples,
            format_size(state.memory.adopted.size),
        )
    return state


async def _settle(state: ServerState) -> None:
    """End what waits for the predecessor's clients and reads."""
    adopted = state.memory.adopted
    if adopted is None:
        return
    began = time.monotonic()
    returning = quarantined = True
    generation = state.memory.inventory.get("generation")
    while returning or quarantined or len(adopted.leased):
        await asyncio.sleep(SETTLE_INTERVAL_S)
        since_s = time.monotonic() - began
        if quarantined and since_s >= QUARANTINE_S:
            adopted.end_quarantine()
            quarantined = False
        if returning and since_s >= RETURN_S:
            state.memory.cache.policy.returning.clear()
            state.files.catalog.end_return()
            returning = False
        if len(adopted.leased) and not is_locked_below(state.memory.page.file.fd, generation):
            adopted.end_leases()
        state.reading.scheduler.pump(time.monotonic())


def _log_start(server: Server) -> None:
    state = server.state
    locked = lockable_size()
    log.info(
        "serving %s on %s, arena %s, engine %s, version %s; limits: arena %s, %d sessions, "
        "%d files, %s of locked memory",
        " ".join(state.config.roots),
        state.config.socket,
        format_size(state.memory.arena.size),
        state.reading.engines.kind,
        __version__,
        format_size(state.memory.arena.limit),
        server.state.clients.most,
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "any amount" if locked is None else format_size(locked),
    )


def _end_at_once(
    inventory: Inventory, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """End the process after an exception in a callback of the loop.

    Nobody answers the requests of that turn, and signs of life would keep their clients waiting.
    Nor can the tables be trusted, so no other request is answered from them, and no successor takes
    them over. The kernel closes the sockets, and the clients go on by themselves.
    """
    error = context.get("exception")
    if error is None:
        loop.default_exception_handler(context)
        return
    inventory.doubt()
    log.critical("internal error, the daemon ends", exc_info=error)
    os._exit(EXIT_FAULT)


def _reload(server: Server, load: Callable[[], ServerConfig]) -> None:
    """Read the settings again and follow them; keep the present ones if they are not valid."""
    notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        new, changed, left = merge_live(server.state.config, load())
        server.reconfigure(new)
    except FFServeError as error:
        log.error("the settings were not changed: %s", error)
        line = f"the settings were not changed: {error}"
    else:
        logging.getLogger().setLevel(new.log_level.upper())
        log.info("reloaded the settings; changed: %s", ", ".join(changed) or "none")
        if left:
            log.warning("a restart is needed for the new value of %s", ", ".join(left))
        line = _status(server)
    notify(f"READY=1\nSTATUS={line}")


async def _stop_when_idle(server: Server, stop: asyncio.Event) -> None:
    while True:
        timeout_s = server.state.config.idle_timeout_s
        left_s = timeout_s - server.idle_s
        if timeout_s and left_s <= 0:
            break
        # The setting can change.
        await asyncio.sleep(min(left_s, IDLE_CHECK_S) if timeout_s else IDLE_CHECK_S)
    log.info("no client has been connected for %g s", timeout_s)
    stop.set()


def _status(server: Server) -> str:
    """Return one line for `systemctl status`."""
    state = server.state
    counters, arena = state.memory.cache.counters, state.memory.arena
    return (
        f"clients: {server.connection_count}; "
        f"arena: {format_size(arena.used_size)} of {format_size(arena.size)} used; "
        f"read: {format_size(state.reading.engines.read_size)}; "
        f"failed blocks: {counters.failed}"
    )


async def _succeed() -> None:
    """Forget earlier starts, which failed, when this one has succeeded."""
    await asyncio.sleep(starts.SERVED_S)
    starts.forget()


async def _report(server: Server, listener: socket.socket) -> None:
    last, removed = "", False
    while True:
        await asyncio.sleep(STATUS_INTERVAL_S)
        line = _status(server)
        if is_removed(listener):
            line = f"{listener.getsockname()} was removed: restart the service; {line}"
            if not removed:
                _say_removed(listener)
                removed = True
        if line != last:
            notify(f"STATUS={line}")
            last = line


async def _watchdog() -> None:
    interval_s = _watchdog_interval_s()
    while interval_s is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval_s / 2)


def _watchdog_interval_s() -> float | None:
    """Return the period in which the service manager expects WATCHDOG=1; None: it does not."""
    wanted = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not wanted.isdecimal() or pid != str(os.getpid()):
        return None
    return int(wanted) / 1e6


# ---- the socket -------------------------------------------------------------------------------


def _listen(config: ServerConfig) -> tuple[socket.socket, int]:
    """Return a listening socket and the lock on it."""
    path = config.socket
    prepare_socket_directory(path)
    lock = _lock(path)
    try:
        group = group_of(config)
        return listen(path, mode=config.socket_mode, group=group, backlog=_BACKLOG), lock
    except BaseException:
        _remove_lock(path, lock)
        raise


def is_removed(listener: socket.socket) -> bool:
    """Whether a socket that listens has no path any more, as far as a service can see that: some
    see nothing of /home, /tmp and /run/user."""
    path = listener.getsockname()
    if not isinstance(path, str) or not path.startswith("/run/") or path.startswith("/run/user/"):
        return False
    try:
        return not stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _say_removed(listener: socket.socket) -> None:
    log.error("%s was removed, so no job finds the daemon", listener.getsockname())


def _http_listener(config: ServerConfig, passed: Sequence[socket.socket]) -> socket.socket | None:
    """Return a listening socket for HTTP: a TCP socket that systemd passed, or that of the
    configuration; None: there is none."""
    for each in passed:
        if each.family in (socket.AF_INET, socket.AF_INET6):
            return each
    if not config.http:
        return None
    listener: socket.socket = http_module().listen(config, group_of(config))
    return listener


def _lock(path: str) -> int:
    """Lock the socket's path, so that one daemon serves it; the kernel frees the lock."""
    lock_path = path + ".lock"
    while True:
        try:
            fd = _open_lock(lock_path)
        except OSError as error:
            raise os_error(error, lock_path, hint="choose another path with --socket") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(fd, 32).decode(errors="replace").strip()
            os.close(fd)
            raise UsageError(
                f"another daemon{f' (pid {pid})' if pid else ''} serves this socket",
                path=path,
                hint="stop that daemon, take over from it with --handover, or choose another path "
                "with --socket",
            ) from None
        # An ending daemon unlinks its lock file: check that the name is that of the locked file.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(lock_path).st_ino == os.fstat(fd).st_ino:
                _write_pid(fd)
                return fd
        os.close(fd)


def _write_pid(lock: int) -> None:
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _open_lock(path: str) -> int:
    """Open or create the lock file. Raises: OSError; UsageError: it is not a file of this user's
    alone, since another user may have put a link there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink <= 1:
        return fd
    os.close(fd)
    raise UsageError(
        "the lock file of the socket does not belong to the daemon's user alone",
        path=path,
        hint="remove it, or choose another path with --socket",
    )


def _remove_socket(path: str, lock: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
    _remove_lock(path, lock)


def _remove_lock(path: str, lock: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path + ".lock")
    os.close(lock)
