"""One connection to the daemon, to be shared by threads and readers.

Requests are tagged; any number may be on their way. Of the threads that wait for an answer one at
a time reads the socket and hands the others theirs, so no thread of our own is needed. A
connection that broke stays broken. Which connections a process has: `connections`.

The daemon keeps what is leased for as long as the socket is open. So that stays open, whatever
became of the connection, until all that was leased over it is given back or the process ends: a
daemon that was stopped and goes on must not take away what somebody looks at.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.client.greeting import greet
from ffserve.client.inbox import FRAME_CHUNK, Inbox, Sink
from ffserve.errors import FFServeError, ProtocolError, ServerUnavailable
from ffserve.protocol import Message
from ffserve.socket_path import find_socket

M = TypeVar("M")

ANSWER_TIMEOUT_S = 120
"""A daemon that answers nothing for so long (stopped, or hung on a dead disk) counts as gone. It
gives up by itself on what only waits for room long before that."""
TELL_INTERVAL_S = 1.0
"""How often a client that only hits reports its counters."""
ORDER_PIECE = 16_384
"""Positions in one ORDER: what the daemon takes in between the requests of others."""


@dataclass(slots=True)
class _Waiter:
    answer: Message | None = None


class Connection:
    """A connected and greeted socket, with the daemon's memory mapped.

    Args: path: the socket. job: name of the training run that this process belongs to.

    Raises:
        ServerUnavailable: nobody answers there.
        ProtocolError: who answers speaks another protocol.
    """

    def __init__(self, path: str, job: str) -> None:
        self.path = path
        self.job = job
        self.readers = 0
        self._send_lock = threading.Lock()
        self._announcing = threading.Lock()
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)
        self._receiving = False
        self._waiters: dict[int, _Waiter] = {}
        self._unanswered: set[int] = set()
        """Tags of GETs and LEASEs that are on their way."""
        self._broken: FFServeError | None = None
        self._closed = False
        self._leased: set[int] = set()
        """Tags of LEASEs that were not released yet."""
        self._next_tag = 1
        self._acknowledged: list[int] = []
        self._hits = self._hit_size = 0
        self._unneeded: list[int] = []
        """Data sets that the daemon has still to be told to close."""
        self._told = time.monotonic()
        self.given = greet(path, job)
        self._inbox = Inbox(self.given.decoder)
        if self.given.inline:
            self._inbox.most = FRAME_CHUNK
        self._socket = self.given.socket
        self._socket.settimeout(None)
        # In the kernel, so that it costs no system call of its own.
        limit = struct.pack("ll", ANSWER_TIMEOUT_S, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    # ---- asking ---------------------------------------------------------------------------

    def open(
        self, paths: tuple[str, ...], format: str | None, verify: bool, tolerant: bool = False
    ) -> protocol.Opened:
        """Open a data set. Raises what the daemon answers; ServerUnavailable if it is gone."""
        return self._expect(self._send_open(paths, format, verify, tolerant), protocol.Opened)

    def _send_open(
        self, paths: tuple[str, ...], format: str | None, verify: bool, tolerant: bool
    ) -> int:
        tag = self._tag()
        what = {"paths": list(paths), "format": format, "verify": verify, "tolerant": tolerant}
        self._send(protocol.Open(tag, what), tag)
        return tag

    def get(self, dataset: int, indices: NDArray[np.int64], sink: Sink | None = None) -> int:
        """Ask for samples to be made readable; return the tag to `wait_ready` for.

        Args: sink: takes the samples where they come through the socket.
        """
        tag = self._tag()
        if sink is not None:
            self._inbox.sinks[tag] = sink
        with self._lock:
            acknowledged, self._acknowledged = self._acknowledged, []
            hits, self._hits = self._hits, 0
            hit_size, self._hit_size = self._hit_size, 0
            self._told = time.monotonic()
        packed = protocol.pack_tags(acknowledged)
        message = protocol.Get(tag, dataset, protocol.pack_indices(indices), packed, hits, hit_size)
        self._send(message, tag)
        if self._unneeded:
            self._close_unneeded()
        return tag

    def seen(self, dataset: int, indices: NDArray[np.int64]) -> None:
        """Report samples that were found in memory, before a GET that has to wait anyway.

        Args: indices: at most MAX_GET_COUNT.
        """
        if self.given.takes_orders:
            self._send(protocol.Seen(dataset, protocol.pack_order(indices)), None)

    def lease(self, dataset: int, indices: NDArray[np.int64], tags: list[int]) -> int:
        """Ask for samples to be pinned; return the tag to `wait_ready` for.

        Args: tags: the tag is added to these, all of which the caller will `release`, in any case.
        """
        tag = self._tag()
        tags.append(tag)
        with self._lock:
            self._leased.add(tag)
        self._send(protocol.Lease(tag, dataset, protocol.pack_indices(indices)), tag)
        return tag

    def release(self, tags: list[int]) -> None:
        """Give leases back. What was leased over a connection that broke is given back together,
        with the last of it."""
        try:
            with contextlib.suppress(FFServeError):
                self._send(protocol.Release(protocol.pack_tags(tags)), None)
        finally:
            with self._lock:
                self._leased.difference_update(tags)
                if self._broken is not None:
                    self._hang_up()

    def wait_ready(self, tag: int) -> protocol.Ready:
        """Wait for the answer to `get` or `lease`."""
        return self._expect(tag, protocol.Ready)

    def answered(self, tag: int, timeout_s: float) -> bool:
        """Wait for so long at most; return whether there may be an answer for `wait_ready`."""
        waiter = self._waiters[tag]
        with self._lock:
            if waiter.answer is None and self._broken is None and self._receiving:
                self._state.wait(timeout_s)
            if waiter.answer is not None or self._broken is not None:
                return True
            if self._receiving:
                return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def give_up(self, tag: int) -> None:
        """Nobody will wait for this GET."""
        with self._lock:
            self._waiters.pop(tag, None)
        self._inbox.drop(tag)

    def look_up(self, dataset: int, indices: NDArray[np.int64]) -> int:
        """Ask what the index says; return the tag to `wait_for`."""
        tag = self._tag()
        self._send(protocol.Lookup(tag, dataset, protocol.pack_indices(indices)), tag)
        return tag

    def wait_for(self, tag: int, kind: type[M]) -> M:
        """Wait for an answer of this kind."""
        return self._expect(tag, kind)

    def acknowledge(self, tag: int) -> None:
        """The samples of a GET were copied; the daemon hears of it with the next message."""
        with self._lock:
            self._acknowledged.append(tag)

    def count_hits(self, count: int, size: int) -> None:
        """Count samples that were copied without asking; now and then tell the daemon."""
        with self._lock:
            self._hits += count
            self._hit_size += size
            due = time.monotonic() - self._told > TELL_INTERVAL_S
        if due:
            self.tell()

    def tell(self) -> None:
        """Send the counters and acknowledgements that are due.

        It never waits: while the daemon takes nothing in, they are kept for a later time.
        """
        with self._lock:
            acknowledged, self._acknowledged = self._acknowledged, []
            hits, self._hits = self._hits, 0
            hit_size, self._hit_size = self._hit_size, 0
            self._told = time.monotonic()
        if hits or acknowledged:
            packed = protocol.pack_tags(acknowledged)
            if not self._send_if_room(protocol.Tell(0, hits, hit_size, packed)):
                with self._lock:
                    self._acknowledged += acknowledged
                    self._hits += hits
                    self._hit_size += hit_size
        self._close_unneeded()

    def announce(
        self,
        dataset: int,
        epoch: int,
        order: NDArray[np.int64],
        name: str | None,
        replacement: bool,
    ) -> None:
        """Announce an order, in pieces; return when the daemon has taken it.

        A daemon that knows no orders is not told. Raises what the daemon answers.
        """
        if self.given.takes_orders:
            # Pieces of two orders must not mix.
            with self._announcing:
                tag = self._send_order(dataset, epoch, order, name, replacement)
                self._expect(tag, protocol.Ready)

    def _send_order(
        self,
        dataset: int,
        epoch: int,
        order: NDArray[np.int64],
        name: str | None,
        replacement: bool,
    ) -> int:
        tag = self._tag()
        what = {"name": name, "replacement": replacement}
        for start in range(0, len(order), ORDER_PIECE):
            packed = protocol.pack_order(order[start : start + ORDER_PIECE])
            piece = protocol.Order(tag, dataset, epoch, len(order), start, packed, what)
            self._send(piece, tag if start == 0 else None)
        return tag

    def reached(self, dataset: int, epoch: int, position: int) -> bool:
        """Report how far the job has come in the order that it announced.

        It never waits: while the daemon takes nothing in, reports are left out.

        Returns: False when the daemon is gone.
        """
        if self.given.takes_orders:
            self._send_if_room(protocol.Reached(dataset, epoch, position))
        return self.alive

    def status(self) -> dict[str, Any]:
        """Return the daemon's report."""
        tag = self._tag()
        self._send(protocol.Status(tag), tag)
        return self._expect(tag, protocol.Report).facts

    def resize(self, size: int) -> dict[str, Any]:
        """Let the daemon's arena have another size, in bytes; return its facts about the arena.

        Raises: AccessDenied, UsageError, ReadError: not allowed, impossible, more than is free.
        """
        tag = self._tag()
        self._send(protocol.Resize(tag, size), tag)
        facts = self._expect(tag, protocol.Report).facts.get("arena")
        if not isinstance(facts, dict):
            raise ProtocolError("the daemon's answer has no arena", path=self.path)
        return facts

    def close_dataset(self, dataset: int) -> None:
        """The data set is needed no more. It never waits; see `tell`."""
        with self._lock:
            self._unneeded.append(dataset)
        self.tell()

    def _close_unneeded(self) -> None:
        with self._lock:
            unneeded, self._unneeded = self._unneeded, []
        while unneeded and self._send_if_room(protocol.Close(unneeded[-1])):
            unneeded.pop()
        with self._lock:
            self._unneeded += unneeded

    def leave(self) -> None:
        """A reader needs the connection no more; where several share it, the last one closes it."""
        self.close()

    # ---- the socket -----------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False once it broke or was closed."""
        return self._broken is None

    def _tag(self) -> int:
        with self._lock:
            tag = self._next_tag
            self._next_tag = tag % 0xFFFFFFFF + 1
            return tag

    def _send(self, message: Message, tag: int | None) -> None:
        try:
            self._send_whole(message, tag)
        except FFServeError:
            raise
        except BaseException:
            self._interrupted()
            raise

    def _send_whole(self, message: Message, tag: int | None) -> None:
        frame = protocol.encode(message)
        if isinstance(message, (protocol.Get, protocol.Lease)):
            self._make_room(message.tag)
        with self._lock:
            if self._broken is not None:
                raise self._gone()
            if tag is not None:
                self._waiters[tag] = _Waiter()
        try:
            with self._send_lock:
                self._socket.sendall(frame)
        except BlockingIOError as error:
            self._silent()
            raise self._gone() from error
        except OSError as error:
            self._break(ServerUnavailable(f"the daemon is gone: {error}", path=self.path))
            raise self._gone() from error

    def _send_if_room(self, message: Message) -> bool:
        """Send a message far below a page, which the socket takes whole or not at all.

        Returns: whether it was sent; False also when the daemon is gone.
        """
        if self._broken is not None or not self._send_lock.acquire(blocking=False):
            return False
        try:
            self._socket.send(protocol.encode(message), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            self._break(ServerUnavailable(f"the daemon is gone: {error}", path=self.path))
            return False
        finally:
            self._send_lock.release()
        return True

    def _expect(self, tag: int, kind: type[M]) -> M:
        return self._checked(self._wait(tag), kind)

    def _checked(self, answer: Message, kind: type[M]) -> M:
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, protocol.Fail):
            raise protocol.error_from_wire(answer.error)
        error = ProtocolError(f"the daemon answered with a {type(answer).__name__}", path=self.path)
        self._break(error)
        raise error

    def _make_room(self, tag: int) -> None:
        """The daemon takes so many requests at a time; wait until it can take this one."""
        while True:
            with self._lock:
                if len(self._unanswered) < protocol.MOST_REQUESTS:
                    self._unanswered.add(tag)
                    return
            self._receive_until(lambda: len(self._unanswered) < protocol.MOST_REQUESTS)

    def _wait(self, tag: int) -> Message:
        waiter = self._waiters[tag]
        try:
            self._receive_until(lambda: waiter.answer is not None)
        finally:
            with self._lock:
                self._waiters.pop(tag, None)
        assert waiter.answer is not None
        return waiter.answer

    def _receive_until(self, over: Callable[[], bool]) -> None:
        """Receive, or let another thread receive, until something has come about."""
        try:
            while not self._received(over):
                pass
        except FFServeError:
            raise
        except BaseException:
            self._interrupted()
            raise

    def _received(self, over: Callable[[], bool]) -> bool:
        with self._lock:
            while not over() and self._broken is None and self._receiving:
                self._state.wait()
            if over():
                return True
            if self._broken is not None:
                raise self._gone()
            self._receiving = True
        while not over() and self._broken is None:
            self._receive()
        with self._lock:
            self._receiving = False
            self._state.notify_all()
        return over()

    def _receive(self) -> None:
        messages = self._next_messages()
        with self._lock:
            for tag, message in messages:
                self._unanswered.discard(tag)
                waiter = self._waiters.get(tag)
                if waiter is not None:
                    waiter.answer = message
            if len(messages) > 1 or len(self._waiters) > 1:
                self._state.notify_all()

    def _next_messages(self) -> list[tuple[int, Message]]:
        """Receive once; return what is complete now, by tag.

        Raises: BlockingIOError from a socket that does not block; else the connection is broken.
        """
        try:
            messages = self._inbox.receive(self._socket)
            if messages is None:
                raise ServerUnavailable("the daemon is gone", path=self.path)
        except BlockingIOError as error:
            if not self._socket.getblocking():
                raise
            self._silent()
            raise self._gone() from error
        except OSError as error:
            gone = error if isinstance(error, FFServeError) else None
            self._break(gone or ServerUnavailable(f"the daemon is gone: {error}", path=self.path))
            raise self._gone() from error
        except ProtocolError as error:
            self._break(error)
            raise
        for message in messages:
            if isinstance(message, protocol.Fail) and message.tag == 0:
                self._break(protocol.error_from_wire(message.error))
                raise self._gone()
        return [(getattr(message, "tag", 0), message) for message in messages]

    def _silent(self) -> None:
        self._break(
            ServerUnavailable(
                f"the daemon has answered nothing for {ANSWER_TIMEOUT_S} s",
                path=self.path,
                hint="is it stopped, or does its disk hang?",
            )
        )

    def _interrupted(self) -> None:
        """A signal's handler raised while we sent or received: nobody knows what of it is lost."""
        self._break(ServerUnavailable("a request was interrupted by a signal", path=self.path))

    def _break(self, error: FFServeError) -> None:
        with self._lock:
            self._broken = self._broken or error
            self._state.notify_all()
            self._hang_up()

    def _hang_up(self) -> None:
        """End the session, or leave that to whoever gives back the last that is leased over it."""
        with self._lock:
            if self._leased:
                _kept.add(self)
                return
            _kept.discard(self)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._closed:
                self._socket.close()
                self.given.drop_fds()

    def _gone(self) -> FFServeError:
        assert self._broken is not None
        return self._broken.located()

    def close(self) -> None:
        """Say goodbye. Mappings live on as long as arrays over them, the session as leases."""
        if self._broken is None:
            self.tell()
        self._break(ServerUnavailable("this connection was closed", path=self.path))
        self._closed = True
        self._hang_up()

    def after_fork(self) -> None:
        """This process is a child: drop the parent's connection without a word."""
        # A thread that stayed in the parent may have held them.
        self._send_lock = threading.Lock()
        self._announcing = threading.Lock()
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)
        self._leased.clear()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors and nothing else."""
        self._broken = self._broken or ServerUnavailable("closed", path=self.path)
        self._socket.close()
        self.given.drop_fds()


_kept: set[Connection] = set()
"""Of no more use, but something is leased over them."""


def _in_child() -> None:
    for connection in _kept:
        connection.after_fork()
    _kept.clear()


os.register_at_fork(after_in_child=_in_child)


def status(path: str | None = None) -> dict[str, Any]:
    """Ask a daemon how it is.

    Args: path: its socket; None: where this user's daemon would be.
    Raises: ServerUnavailable when none answers.
    """
    connection = Connection(find_socket(path), "status")
    try:
        return connection.status()
    finally:
        connection.close()
