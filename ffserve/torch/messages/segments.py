"""Segments: shared memory in which batches cross from a worker to the training process.

A worker has a few *segments*: memfds that it creates when it needs one, maps, and sends once,
through a socket pair that existed before the worker started. A segment is reused, so its pages are
allocated once and its descriptor is sent once. Its first word is its state:

    FREE    the worker may fill it
    TAKEN   being filled, or in use by the training process until the last array over it is gone
    LEFT    not to be used again: the worker drops it

The training process gets writable memory of its own. It returns a segment when the last array or
tensor over it is gone, in whichever thread, by setting the word; nothing is sent. A memfd has no
name and the kernel counts its mappings, so a killed process leaves nothing behind.

Forks: a child of the training process inherits the arrays that exist then, and may read them for
as long as it likes. So their segments become LEFT, not FREE. A child never sets a word.

Bounds: a worker creates no more than `limit` bytes of segments, but always as many as it needs to
keep torch's prefetching going. When the training process holds that much, batches are copied as
they arrive, and their segments are returned at once.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import multiprocessing
import multiprocessing.reduction
import os
import socket
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from ffserve.engine.shm import Flag

FREE, TAKEN, LEFT = 0, 1, 2
HEAD_SIZE = 64
"""The room of a segment begins after this many bytes: a cache line, which holds the word."""
SMALLEST_SIZE = 64 << 10
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Segment:
    """One memfd, mapped whole. The caller keeps the descriptor, which is not needed any more.

    Args:
        number: of the segment among its worker's.
        size: bytes of the memfd.
    Raises: OSError when it cannot be mapped.
    """

    __slots__ = ("__weakref__", "_room", "flag", "kept", "number", "size")

    def __init__(self, fd: int, number: int, size: int) -> None:
        # Not mmap.mmap: it would keep a descriptor for every segment.
        prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        address = _libc.mmap(None, size, prot, flags, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        weakref.finalize(self, _libc.munmap, address, size).atexit = False
        # All pages at once, instead of a fault for each; without effect before Linux 5.14.
        _libc.madvise(address, size, _MADV_POPULATE_WRITE)
        _libc.madvise(address, size, mmap.MADV_DONTDUMP)
        self.number = number
        self.size = size
        self.flag = Flag(address)
        self.kept = False
        """A child may read it for longer than this process does: it is not to be used again."""
        self._room = (ctypes.c_uint8 * (size - HEAD_SIZE), address + HEAD_SIZE)

    @property
    def room(self) -> int:
        """Bytes behind the state."""
        return self.size - HEAD_SIZE

    def lend(self) -> Any:
        """Return a writable buffer of the room: a new object that every array over it keeps alive.

        It keeps the mapping alive in turn.
        """
        kind, address = self._room
        lent: Any = kind.from_address(address)
        lent.segment = self
        return lent


class Sender:
    """A worker's side: creates segments, finds free ones.

    Args:
        key: of the receiver. worker: this one's number.
        channel: the worker's end of the pair.
        limit: bytes of segments, beyond `min_count` of them.
        min_count: how many segments it may have in any case.
    """

    def __init__(
        self, key: int, worker: int, channel: socket.socket, limit: int, min_count: int
    ) -> None:
        self._key = key
        self._worker = worker
        self._channel = channel
        weakref.finalize(self, channel.close)
        self._limit = limit
        self._min_count = min_count
        self._segments: list[Segment] = []
        self._numbers = itertools.count()
        self._dropped: list[int] = []

    def take(self, room: int) -> Segment | None:
        """Return a segment with at least this much room, now TAKEN; None if there is none.

        A free segment that is too small is dropped for it.
        """
        free: list[Segment] = []
        for segment in tuple(self._segments):
            state = segment.flag.get()
            if state == LEFT:
                self._drop(segment)
            elif state == FREE:
                free.append(segment)
        fitting = [segment for segment in free if segment.room >= room]
        chosen = min(fitting, key=_size_of) if fitting else self._make(room, free)
        if chosen is not None:
            chosen.flag.set(TAKEN)
        return chosen

    def send(self, segment: Segment) -> tuple[Any, ...]:
        """Return the reference of a segment for the training process: the key of its receiver, and
        the arguments of `Receiver.open`."""
        dropped, self._dropped = tuple(self._dropped), []
        return self._key, self._worker, segment.number, dropped

    def _make(self, room: int, free: list[Segment]) -> Segment | None:
        size = rounded(HEAD_SIZE + room)
        if free:
            self._drop(min(free, key=_size_of))
        while free and self._is_full(size):
            smallest = min(free, key=_size_of)
            free.remove(smallest)
            self._drop(smallest)
        if self._is_full(size):
            return None
        number = next(self._numbers)
        try:
            fd = os.memfd_create("ffserve-batch", os.MFD_CLOEXEC)
            try:
                # A lack of memory is an error here; at the first access it would be a SIGBUS.
                os.posix_fallocate(fd, 0, size)
                segment = Segment(fd, number, size)
                socket.send_fds(
                    self._channel, [number.to_bytes(8, "little")], [fd], socket.MSG_DONTWAIT
                )
            finally:
                os.close(fd)
        except OSError:
            return None
        self._segments.append(segment)
        return segment

    def _is_full(self, size: int) -> bool:
        if len(self._segments) < self._min_count:
            return False
        return sum(map(_size_of, self._segments)) + size > self._limit

    def _drop(self, segment: Segment) -> None:
        """Drop a segment; its memory is freed with the last mapping of it."""
        if segment in self._segments:
            self._segments.remove(segment)
            self._dropped.append(segment.number)


class Receiver:
    """The training process's side: maps segments, returns them when nothing uses them.

    Args:
        workers: how many there will be.
        limit: bytes of one worker's segments that arrays may hold; beyond, batches are copied.
    """

    def __init__(self, workers: int, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(workers)]
        self._channels = [ours for ours, _ in pairs]
        self._workers_ends = [theirs for _, theirs in pairs]
        self._segments: list[dict[int, Segment]] = [{} for _ in range(workers)]
        self._lent: list[dict[int, Segment]] = [{} for _ in range(workers)]
        weakref.finalize(self, _close, (*self._channels, *self._workers_ends))
        self.key = next(_keys)
        _receivers[self.key] = self

    def channels(self, min_count: int) -> WorkerChannels:
        """Return the workers' ends, for processes that are about to be started."""
        return WorkerChannels(self.key, self._workers_ends, 2 * self._limit, min_count)

    def started(self) -> None:
        """Close the workers' ends here: all workers run."""
        _close(self._workers_ends)

    def __reduce__(self) -> Any:
        return _nothing, ()

    def open(self, worker: int, number: int, dropped: tuple[int, ...]) -> Any:
        """Return a buffer over a segment that a worker filled; it is returned with its last user.

        Args: dropped: the numbers of this worker's segments that will not come again.
        """
        with self._lock:
            segments, lent = self._segments[worker], self._lent[worker]
            for dropped_number in dropped:
                segments.pop(dropped_number, None)
            while (segment := segments.get(number)) is None:
                self._receive(worker)
        if len(lent) * segment.size > self._limit:
            copied = np.frombuffer(segment.lend(), np.uint8).copy()
            segment.flag.set(FREE)
            return copied
        buffer = segment.lend()
        lent[id(segment)] = segment
        weakref.finalize(buffer, give_back, segment, os.getpid(), lent).atexit = False
        return buffer

    def _receive(self, worker: int) -> None:
        # A worker sends a segment before the first message that lies in it: no wait.
        channel = self._channels[worker]
        message, fds, _flags, _address = socket.recv_fds(channel, 8, 1, socket.MSG_DONTWAIT)
        number = int.from_bytes(message, "little")
        try:
            self._segments[worker][number] = Segment(fds[0], number, os.fstat(fds[0]).st_size)
        finally:
            os.close(fds[0])

    def keep_all(self) -> None:
        """Before a fork: segments that are lent now are never used again."""
        for lent in self._lent:
            for segment in list(lent.values()):
                segment.kept = True


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


def give_back(segment: Segment, owner: int, lent: dict[int, Segment] | None = None) -> None:
    """Return a segment in the process that borrowed it. For finalizers: takes no locks.

    Args: owner: that process. lent: the segments that the process has borrowed.
    """
    if os.getpid() == owner:
        if lent is not None:
            lent.pop(id(segment), None)
        segment.flag.set(LEFT if segment.kept else FREE)


class WorkerChannels:
    """The workers' ends of the socket pairs, on their way into the workers.

    Survives the pickling that starts a process; in any other pickle it becomes None.
    """

    def __init__(self, key: int, ends: list[socket.socket], limit: int, min_count: int) -> None:
        self._key = key
        self._ends = ends
        self._limit = limit
        self._min_count = min_count

    def sender(self, worker: int) -> Sender:
        """Return one worker's side, in that worker; the others' ends are closed."""
        for number, end in enumerate(self._ends):
            if number != worker:
                end.close()
        return Sender(self._key, worker, self._ends[worker], self._limit, self._min_count)

    def __reduce__(self) -> Any:
        if multiprocessing.context.get_spawning_popen() is None:
            return _nothing, ()
        ends = [multiprocessing.reduction.DupFd(end.fileno()) for end in self._ends]
        return _arrived, (self._key, ends, self._limit, self._min_count)


def _arrived(key: int, ends: list[Any], limit: int, min_count: int) -> WorkerChannels:
    return WorkerChannels(
        key, [socket.socket(fileno=end.detach()) for end in ends], limit, min_count
    )


def _nothing() -> None:
    return None


_keys = itertools.count(1)
_receivers: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()


def receiver(key: int) -> Receiver:
    """Return this process's receiver of that key."""
    return _receivers[key]


def _before_fork() -> None:
    for known in list(_receivers.values()):
        known.keep_all()


os.register_at_fork(before=_before_fork)


def rounded(size: int) -> int:
    """Return the size of a segment for so many bytes: a multiple of a coarse step."""
    step = max(SMALLEST_SIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def memory_limit() -> int:
    """Return how many bytes of segments a loader may have: a sixteenth of memory, at most 4 GiB."""
    memory = 1 << 36
    with suppress(OSError, ValueError):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(memory // 16, 4 << 30)


def _size_of(segment: Segment) -> int:
    return segment.size
