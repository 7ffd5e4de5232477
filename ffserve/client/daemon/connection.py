"""Connections to the daemon: what all drivers of a channel do, the driver with blocking calls, and
the connections of a process.

A driver owns the socket of a channel. What a request does is a generator of steps (see
`channel.Steps`), written once; `Connection` takes them with blocking calls and
`loop.LoopConnection` with `await`. A generator that is closed gives its request up.

A connection is shared by threads and readers. Of the threads that wait for answers one at a time
reads the socket and hands the others theirs, so no thread of our own is needed; whichever thread
sends, sends what all have queued. A connection that broke stays broken.

All readers and threads of a process share one connection per socket and job; `connect` makes a new
one when it broke. After a fork the child drops the parent's connections and makes its own.

The daemon keeps leased samples for as long as the socket is open. So the socket stays open, even if
the connection is closed or broken, until the last lease is given back or the process ends: a
daemon that was stopped and goes on must not evict what this process still reads.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import select
import socket
import struct
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ffserve import protocol
from ffserve.client.daemon.channel import RECEIVE_SIZE, Beside, Copying, SilentError, Steps
from ffserve.client.daemon.handshake import Handshake
from ffserve.client.daemon.mapped_memory import receive
from ffserve.client.daemon.passed_files import DatasetRequest, PassedFiles, described, send
from ffserve.dtypes import Int64s
from ffserve.errors import FFServeError, ProtocolError, ServerUnavailable
from ffserve.system.socket_path import find_socket

T = TypeVar("T")

SILENCE_S = 10
"""A daemon that owes an answer and sends nothing for this long is stopped: while it works on
requests it sends ALIVE (server.ALIVE_INTERVAL_S)."""
SEND_TIMEOUT_S = 30
"""The daemon may leave requests that fill the socket unread for this long."""


class Driver(ABC):
    """A connection to the daemon. One that broke stays broken.

    Args: path: the socket. job: name of the training run that this process belongs to.

    Raises:
        ServerUnavailable: nothing answers there.
        ProtocolError: the other side speaks another protocol.
    """

    def __init__(self, path: str, job: str) -> None:
        self.path = path
        self.job = job
        self.readers = 0
        self.statistics: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those of its data sets, which have hits that were not reported yet."""
        self.handshake = Handshake(path, job)
        self.channel = self.handshake.channel
        self._socket = self.handshake.socket

    @property
    def alive(self) -> bool:
        """False once it broke or was closed."""
        return self.channel.broken is None

    # ---- requests -------------------------------------------------------------------------

    def opening(self, request: DatasetRequest) -> Steps[protocol.Opened]:
        """Open a data set.

        Raises: what the daemon answers; ServerUnavailable if it is gone; UnmappedError;
            MissingFile, AccessDenied, ReadError: this process cannot open a file.
        """
        self.handshake.check_memory()
        paths, fetches = request.paths, self.handshake.fetches
        if not self.handshake.names_members:
            self._refuse_members(request)
        files = yield Beside(partial(described, request, fetches, self.path))

        def needed(packed: bytes) -> PassedFiles:
            return PassedFiles.of(paths, protocol.unpack_positions(packed, len(paths)))

        opened = yield from self._opened(self.channel.open(request, files), needed)
        request.states = files.identities
        return opened

    def _refuse_members(self, request: DatasetRequest) -> None:
        """Raise ProtocolError for tar files, of which the daemon cannot say the names."""
        tar = [path for path in request.paths if path.endswith(".tar") or request.format == "tar"]
        if tar and request.format in (None, "tar"):
            raise ProtocolError(
                "the daemon is of a release that reads no tar files",
                path=tar[0],
                hint="upgrade it, or restart it if it was upgraded",
            )

    def _opened(self, tag: int, files: Callable[[bytes], PassedFiles]) -> Steps[protocol.Opened]:
        """Pass the files that are needed until the answer comes."""
        while isinstance(answer := (yield from self._answer(tag)), protocol.Need):
            try:
                passed = yield Beside(partial(files, answer.positions), PassedFiles.close)
            except BaseException:
                self.channel.pass_no_files(tag)
                self.report()
                raise
            self.channel.pass_files(tag, passed)
        opened: protocol.Opened = answer
        return opened

    def _answer(self, tag: int) -> Steps[Any]:
        try:
            return (yield tag)
        except BaseException:
            self.channel.give_up(tag)
            raise

    def announcing(
        self, dataset: int, epoch: int, order: Int64s, name: str | None, replacement: bool
    ) -> Steps[None]:
        """Announce an order, unless the daemon wants none. One at a time: pieces must not mix."""
        if self.channel.takes_orders:
            tag = 0
            for tag in self.channel.order_pieces(dataset, epoch, order, name, replacement):  # noqa: B007
                self.flush()
            yield from self._answer(tag)

    # ---- the socket -----------------------------------------------------------------------

    @abstractmethod
    def check(self) -> None:
        """Break if the daemon has hung up; for a client that asks it for nothing."""

    @abstractmethod
    def flush(self) -> None:
        """Send the requests that are queued."""

    @abstractmethod
    def report(self) -> None:
        """Send the reports that are due, without waiting."""

    def _take(self) -> list[int]:
        """Receive what the daemon has sent; return the tags that were answered.

        Raises: BlockingIOError: nothing came in time; OSError; ServerUnavailable: it has hung up;
            as `Channel.feed`.
        """
        chunk = receive(self._socket, RECEIVE_SIZE, self.channel.memories_due)
        answered = self.channel.feed(chunk)
        if not chunk:
            raise self._hung_up()
        return answered

    def _hung_up(self) -> ServerUnavailable:
        return ServerUnavailable("the daemon closed the connection", path=self.path)

    def _gone(self, error: OSError) -> FFServeError:
        """Return the error of requests after an error of the socket."""
        if isinstance(error, FFServeError):
            return error
        return ServerUnavailable(f"the connection to the daemon failed: {error}", path=self.path)

    # ---- the end --------------------------------------------------------------------------

    @abstractmethod
    def close_dataset(self, dataset: int) -> None:
        """A data set is not needed any more; requests for it fail from now on."""

    @abstractmethod
    def leave(self) -> None:
        """A reader does not need the connection any more; the last one closes it."""

    def _closed(self) -> ServerUnavailable:
        return ServerUnavailable("this connection was closed", path=self.path)

    def _drop(self) -> None:
        """Close the descriptors and nothing else: the connection is the parent process's, or its
        loop is closed."""
        # A thread that exists in the parent only may have held the lock.
        self.channel.lock = threading.RLock()
        self.channel.fail(self._closed())
        self.channel.drop_passing()
        self._socket.close()
        self.handshake.drop_fds()


class Connection(Driver):
    """A connection with blocking calls.

    Args, Raises: as of `Driver`.
    """

    def __init__(self, path: str, job: str) -> None:
        super().__init__(path, job)
        self._sending = threading.Lock()
        self._announcing = threading.Lock()
        self._state = threading.Condition(self.channel.lock)
        self._receiving = False
        self._is_closed = False
        self._socket.settimeout(None)
        # The kernel's timeout costs no system call of its own.
        for option, limit_s in (
            (socket.SO_RCVTIMEO, SILENCE_S),
            (socket.SO_SNDTIMEO, SEND_TIMEOUT_S),
        ):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", limit_s, 0))

    def check(self) -> None:
        """Break if the daemon has hung up; for a client that asks it for nothing."""
        if not self.alive:
            return
        # One of its own: a poll object that two threads use at a time raises RuntimeError.
        hang_up = select.poll()
        try:
            hang_up.register(self._socket, select.POLLRDHUP)
        except ValueError:
            return  # closed by another thread
        if hang_up.poll(0):
            self._break(self._hung_up())

    # ---- requests -------------------------------------------------------------------------

    def open(self, request: DatasetRequest) -> protocol.Opened:
        """Open a data set. Raises: as `opening`."""
        return self.run(self.opening(request))

    def prepare(
        self, dataset: int | None, key: bytes, what: dict[str, Any], memory: int
    ) -> protocol.Opened:
        """Open prepared samples.

        Args: dataset, key, what: see `Channel.prepare`. memory: descriptor of the memory file that
            they will be put through.
        Raises: as `open`.
        """
        self.handshake.check_memory()
        tag = self.channel.prepare(dataset, key, what)
        return self.run(self._opened(tag, lambda _needed: PassedFiles.memory(memory)))

    def announce(
        self, dataset: int, epoch: int, order: Int64s, name: str | None, replacement: bool
    ) -> None:
        """Announce an order; return when the daemon has taken it. Raises what the daemon
        answers."""
        with self._announcing:
            self.run(self.announcing(dataset, epoch, order, name, replacement))

    def status(self) -> dict[str, Any]:
        """Return the daemon's report."""
        report: protocol.Report = self.wait(self.channel.status())
        return report.facts

    def resize(self, size: int) -> dict[str, Any]:
        """Give the daemon's arena another size, in bytes; return its facts about the arena.

        Raises: AccessDenied, UsageError, ReadError: not allowed, impossible, more than is free.
        """
        report: protocol.Report = self.wait(self.channel.resize(size))
        facts = report.facts.get("arena")
        if not isinstance(facts, dict):
            raise ProtocolError("invalid REPORT: it has no arena", path=self.path)
        return facts

    def run(self, steps: Steps[T], request: Copying | None = None) -> T:
        """Take the steps of a request; return its result. Args: request: that copies samples."""
        try:
            step = next(steps)
            while True:
                if type(step) is int:
                    step = steps.send(self.wait(step))
                elif step is None or type(step) is np.ndarray:
                    assert request is not None
                    step = steps.send(request.copy(step))
                elif type(step) is Beside:
                    step = steps.send(step.make())
                else:
                    time.sleep(step)  # type: ignore[arg-type]
                    step = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        except BaseException:
            steps.close()
            raise

    def close_dataset(self, dataset: int) -> None:
        """A data set is not needed any more."""
        with self._state:
            self.channel.close_dataset(dataset)
            self._state.notify_all()
        self.report()

    def lease(self, dataset: int, indices: Int64s, tags: list[int]) -> protocol.Ready:
        """Ask for a lease; return the answer. Args: tags: see `Channel.lease`."""
        with self._state:
            if not self.channel.leased:
                self.handshake.hold_leases(True)
            tag = self.channel.lease(dataset, indices, tags)
        ready: protocol.Ready = self.wait(tag)
        return ready

    def release(self, tags: list[int]) -> None:
        """Give leases back. Over a broken connection the socket is closed with the last of them."""
        try:
            with contextlib.suppress(FFServeError), self._state:
                self.channel.release(tags)
            with contextlib.suppress(FFServeError):
                self.flush()
            with self._state:
                if not self.channel.leased:
                    self.handshake.hold_leases(False)
        finally:
            if not self.alive:
                self._end()

    # ---- sending --------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the requests that are queued; if another thread sends, it sends them.

        No thread waits for the lock, so a signal's handler that interrupts a sender may call this.
        An exception leaves it locked: the connection is broken then, and nothing is sent any more.
        """
        try:
            while self.channel.urgent and self._sending.acquire(blocking=False):
                while output := self.channel.output():
                    if self.channel.passing:
                        self.channel.sent(self._send_files(output))
                    else:
                        self._socket.sendall(output)
                        self.channel.sent(len(output))
                self._sending.release()
        except BaseException as error:
            self.channel.drop_passing()
            self._failed(error)

    def report(self) -> None:
        """Send the reports that are due. It does not wait: a report that the socket does not take
        is sent later."""
        try:
            if self.alive and self._sending.acquire(blocking=False):
                self.channel.queue_reports()
                if output := self.channel.output():
                    self.channel.sent(self._sent_at_once(output))
                self._sending.release()
        except BaseException as error:
            self.channel.drop_passing()
            with contextlib.suppress(FFServeError):
                self._failed(error)
        # Another thread may have left its request to this one.
        with contextlib.suppress(FFServeError):
            self.flush()

    def _sent_at_once(self, output: memoryview) -> int:
        try:
            return send(self._socket, output, self.channel.passing, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _send_files(self, output: memoryview) -> int:
        """Send bytes and descriptors, of which the kernel takes only so many for each user."""
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while True:
            try:
                return send(self._socket, output, self.channel.passing)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    # ---- receiving ------------------------------------------------------------------------

    def wait(self, tag: int) -> Any:
        """Return the answer to a request.

        Raises: what the daemon answered; ServerUnavailable when it is gone.
        """
        self.flush()
        channel = self.channel
        try:
            with self._state:
                while self._receiving and self.alive and not channel.has_answer(tag):
                    self._state.wait()
                receiving = self.alive and not channel.has_answer(tag)
                if receiving:
                    self._receiving = True
            if receiving:
                while self.alive and not channel.has_answer(tag):
                    self._receive(tag)
                with self._state:
                    self._receiving = False
                    self._state.notify_all()
        except BaseException as error:
            self._failed(error)
        return channel.collect(tag)

    def _receive(self, tag: int) -> None:
        if self._take() != [tag]:
            with self._state:
                self._state.notify_all()
        self.flush()
        if self.channel.report_due:
            self.report()

    # ---- the end --------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        """Break the connection on an error while sending or receiving, and raise."""
        if isinstance(error, BlockingIOError):
            self._break(silent_error(self.path))
        elif isinstance(error, OSError):
            self._break(self._gone(error))
        elif isinstance(error, FFServeError):
            self._break(error)
        else:
            # A signal's handler, or lack of memory: how much was sent or received is not known.
            self._break(ServerUnavailable(f"interrupted by {error!r}", path=self.path))
            raise error
        raise self.channel.gone() from error

    def _break(self, error: FFServeError) -> None:
        with self._state:
            self.channel.fail(error)
            self._state.notify_all()
            self._end()
        if self._sending.acquire(blocking=False):
            self.channel.drop_passing()
            self._sending.release()

    def _end(self) -> None:
        """End the session, unless samples are leased over it: the last release ends it then."""
        with self._state:
            if self.channel.leased:
                _kept.add(self)
                return
            _kept.discard(self)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._is_closed:
                self._socket.close()
                self.handshake.drop_fds()

    def leave(self) -> None:
        """A reader does not need the connection any more; the last one closes it."""
        with _lock:
            self.readers -= 1
            if self.readers > 0:
                return
            slot = _slots.get((self.path, self.job))
            if slot is not None and slot.connection is self:
                slot.connection = None
        self.close()

    def close(self) -> None:
        """End the session. Mappings live as long as arrays over them, the session as leases."""
        if self.alive:
            for each in list(self.statistics):
                each.enter_hits()
            self.report()
        self._break(self._closed())
        self._is_closed = True
        self._end()

    def after_fork(self) -> None:
        """This process is a child: drop the parent's connection without a message."""
        self._sending = threading.Lock()
        self._announcing = threading.Lock()
        self.channel.leased.clear()
        self._drop()
        self._state = threading.Condition(self.channel.lock)


def silent_error(path: str) -> SilentError:
    """Return the error for a daemon that sends nothing."""
    return SilentError(
        f"the daemon has not answered a request, and has sent nothing for {SILENCE_S} s",
        path=path,
        hint="check whether its process is stopped, or the machine is swapping",
    )


def status(path: str | None = None) -> dict[str, Any]:
    """Return a daemon's report.

    Args: path: its socket; None: the default socket of this user.
    Raises: ServerUnavailable when no daemon answers.
    """
    connection = Connection(find_socket(path), "status")
    try:
        return connection.status()
    finally:
        connection.close()


_kept: set[Connection] = set()
"""Connections that are broken or closed, but over which samples are leased."""


# ---- the connections of this process -------------------------------------------------------------


class _Slot:
    """Where the connection to one socket in one job is kept. lock: held while it is made."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None


_lock = threading.Lock()
"""Guards what follows; nothing waits for a daemon while it is held."""
_slots: dict[tuple[str, str], _Slot] = {}
"""The connections of this process, by socket and job."""
_job: str | None = None
_job_inherited = False
_fork_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_at_end: multiprocessing.util.Finalize | None = None


def job_name() -> str:
    """Return the name of the training run: made once, inherited by workers however started."""
    global _job
    if _job is None:
        _job = uuid.uuid4().hex
    return _job


def join_job(name: str) -> None:
    """Belong to a job that another process began, unless this process has one already."""
    global _job, _job_inherited
    if _job is None:
        _job, _job_inherited = name, True


def lead_job() -> None:
    """Be a training process, not a worker of one: announcing an order says so.

    Training processes that one parent made (ranks, the runs of a sweep) have inherited its job.
    The orders that they announce would be taken for those of one job, each replacing the other's.
    So each begins a job of its own. Connections that it has already stay in the inherited one.
    """
    global _job, _job_inherited
    if _job_inherited:
        _job, _job_inherited = None, False


def connect(path: str) -> Connection:
    """Return this process's connection to the daemon in its job, made anew if it broke.

    The caller calls `leave` when it does not need the connection any more.
    """
    global _at_end
    key = path, job_name()
    with _lock:
        if _at_end is None:
            # Worker processes of multiprocessing end without atexit; they run finalizers.
            _at_end = multiprocessing.util.Finalize(None, _close_all, exitpriority=0)
        slot = _slots.setdefault(key, _Slot())
    with slot.lock:
        if (kept := slot.connection) is not None:
            kept.check()
        with _lock:
            if slot.connection is not None and slot.connection.alive:
                slot.connection.readers += 1
                return slot.connection
        made = Connection(*key)
        with _lock:
            slot.connection = made
            made.readers += 1
        return made


def call_after_fork(listener: Any) -> None:
    """Have `listener.after_fork()` called in every child, after the connections were dropped."""
    _fork_listeners.add(listener)


def _drop_connections() -> None:
    global _lock, _at_end, _job_inherited
    _at_end = None
    _job_inherited = _job is not None
    _lock = threading.Lock()
    for connection in _kept:
        connection.after_fork()
    _kept.clear()
    for slot in _slots.values():
        if slot.connection is not None:
            slot.connection.after_fork()
    _slots.clear()
    for listener in list(_fork_listeners):
        listener.after_fork()


os.register_at_fork(after_in_child=_drop_connections)


def _close_all() -> None:
    """Close what readers left open: the daemon gets their last counters."""
    with _lock:
        left = [slot.connection for slot in _slots.values() if slot.connection is not None]
        _slots.clear()
    for connection in left:
        connection.close()


atexit.register(_close_all)
