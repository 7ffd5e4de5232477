"""Reading files: engines, batches, direct replies.

The Python face of reading/io.h. Everything here is thin: arrays go in as numpy buffers, there is
one C call per batch, and the GIL is released during it. The untyped cffi module is confined to this
folder.

An ``EngineBatch`` is one block of C memory that its numpy views keep alive. From submit until it
has ended the kernel may write to it. So the engine holds it in a dictionary, which the engine's
finalizer holds in turn: in whatever order Python destroys objects, the engine's threads have
stopped before a batch in flight is freed.

After a fork the engine's threads are in the parent only. The engine in the child refuses to work;
dropping it, or ``forget()``, frees its memory and descriptors without touching the parent's ring.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import mmap
import multiprocessing
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bools, Int32s, Int64s
from ffserve.engine import arrays, codec
from ffserve.engine.core import I32S, I64S, NULL, ffi, from_buffer, lib
from ffserve.engine.many_files import (
    close_fds,
    flags_and_types,
    open_again,
    stat_fds,
    stated_alignments,
)
from ffserve.engine.shm import NOWHERE
from ffserve.engine.slots import Shards
from ffserve.errors import FFServeError, ReadError, UsageError

log = logging.getLogger("ffserve")

Kind = Literal["registered", "uring", "aio", "threads"]

KINDS: dict[Kind, int] = {
    "registered": lib.FFS_ENGINE_REGISTERED,
    "uring": lib.FFS_ENGINE_URING,
    "aio": lib.FFS_ENGINE_AIO,
    "threads": lib.FFS_ENGINE_THREADS,
}
"""All kinds of engine, best first. With registered buffers the kernel does not look up the pages of
the arena for every read."""

ECHECKSUM: int = lib.FFS_ECHECKSUM
ETRUNCATED: int = lib.FFS_ETRUNCATED


def refused(status: Int32s) -> Bools:
    """Return which records have a read that the kernel refused (-errno)."""
    found: Bools = (status < 0) & (status > ETRUNCATED) & (status > ECHECKSUM)
    return found


def memory_at(address: int, size: int) -> memoryview:
    """Return writable memory at an address, which must stay valid."""
    return memoryview(ffi.buffer(ffi.cast("char *", address), size))


READ_DTYPE = np.dtype(
    [
        ("offset", "u8"),
        ("length", "u8"),
        ("slot", "u8"),
        ("slot_size", "u8"),
        ("file", "i4"),
        ("checksum_kind", "i4"),
        ("first_record", "u4"),
        ("record_count", "u4"),
    ]
)
RECORD_DTYPE = np.dtype(
    [
        ("offset", "u8"),
        ("length", "u8"),
        ("entry", "u8"),
        ("dest", "u8"),
        ("checksum", "u4"),
        ("found", "u4"),
        ("status", "i4"),
        ("reserved", "u4"),
    ]
)
assert READ_DTYPE.itemsize == ffi.sizeof("ffs_read")
assert RECORD_DTYPE.itemsize == ffi.sizeof("ffs_record")

_NO_READS: NDArray[Any] = np.empty(0, READ_DTYPE)
_NO_RECORDS: NDArray[Any] = np.empty(0, RECORD_DTYPE)

_POINTER = ffi.typeof("uintptr_t")

# Waits in C are cut into slices, so that Ctrl-C takes effect.
_WAIT_SLICE_MS = 200


def _error(rc: int, failure: str) -> UsageError | ReadError:
    if rc in (-22, -16):  # EINVAL, EBUSY: an error of the caller
        return UsageError(f"{failure}: {os.strerror(-rc)}")
    return ReadError(f"{failure}: {os.strerror(-rc)}")


class EngineBatch:
    """Reads and records of one submit: fill both arrays, submit, look at ``status``.

    `reads` and `records` are structured arrays of READ_DTYPE and RECORD_DTYPE: views of C memory,
    zeroed initially.

    Attributes:
        keep: the owner of the memory that the records' ``dest`` point to. It is kept alive as
            long as the engine may write there, even if the caller drops the batch.
        begun: when the caller submitted it, by a clock of the caller's.
        errors: by record, of those that another error than that of their status describes.
    """

    __slots__ = (
        "__weakref__", "_c", "_held", "_reads", "_records", "address", "begun", "errors", "keep",
    )  # fmt: skip

    def __init__(self, read_count: int, record_count: int) -> None:
        self._own(lib.ffs_batch_new(read_count, record_count))

    def _own(self, c: Any) -> None:
        if c == NULL:
            raise MemoryError("no memory for a batch")
        self._c: Any = ffi.gc(c, lib.ffs_batch_free)
        self._held: dict[int, EngineBatch] | None = None
        self._reads: NDArray[Any] | None = None
        self._records: NDArray[Any] | None = None
        self.keep: object = None
        self.begun = 0.0
        self.errors: dict[int, FFServeError] = {}
        self.address = int(ffi.cast(_POINTER, c))

    @classmethod
    def of_blocks(
        cls,
        shards: Shards,
        blocks: Int64s,
        offsets: Int64s,
        sizes: Int64s,
        arena_address: int,
        merge: tuple[int, int, int],
        *,
        cached: bool = False,
    ) -> EngineBatch:
        """Return a batch that reads blocks into slots; one C call fills it.

        Args:
            shards, blocks: see `ffserve.engine.slots`; n blocks, with a record per sample.
            offsets, sizes: int64[n], of the slots in the arena.
            merge: most, gap and size of `merge_reads`. Blocks that are merged, and those whose slot
                does not hold what a direct read brings, are read through a buffer.
            cached: the blocks are read from the page cache, so no read is direct.
        Raises: UsageError when a record is not inside its block.
        """
        batch = cls.__new__(cls)
        c = lib.ffs_batch_blocks(
            shards.c,
            from_buffer(I64S, blocks),
            blocks.shape[1],
            from_buffer(I64S, offsets),
            from_buffer(I64S, sizes),
            ffi.cast("uint8_t *", arena_address),
            *merge,
            cached,
        )
        if c == NULL:
            raise UsageError("no memory for a batch, or a record is outside its block")
        batch._own(c)
        return batch

    @property
    def reads(self) -> NDArray[Any]:
        """The reads; empty after `free`."""
        if self._reads is None:
            c = self._c
            self._reads = self._array(c.reads, READ_DTYPE, c.read_count) if c else _NO_READS
        return self._reads

    @property
    def records(self) -> NDArray[Any]:
        """The records; empty after `free`."""
        if self._records is None:
            c = self._c
            self._records = (
                self._array(c.records, RECORD_DTYPE, c.record_count) if c else _NO_RECORDS
            )
        return self._records

    def _array(self, first: Any, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        # The array keeps the buffer alive, which keeps the owning pointer alive.
        start = int(ffi.cast(_POINTER, first)) - self.address
        block = ffi.buffer(self._c, start + count * dtype.itemsize)
        return np.frombuffer(block, dtype, count, start)

    @property
    def read_count(self) -> int:
        """Number of reads."""
        return int(self._c.read_count)

    @property
    def failed(self) -> int:
        """Number of records whose status is not 0, when the batch has ended."""
        return int(self._c.failed)

    @property
    def bytes(self) -> int:
        """Bytes read from files, over-read included, when the batch has ended."""
        return int(self._c.bytes)

    @property
    def done(self) -> bool:
        """Whether the batch was submitted and has ended."""
        return bool(self._c.done)

    @property
    def in_flight(self) -> bool:
        """Whether an engine owns the batch now."""
        return self._held is not None and not self._c.done

    def ended_elsewhere(self) -> None:
        """Count the failed records of a batch that was read without an engine."""
        self._c.failed = int(np.count_nonzero(self.records["status"]))

    def free(self) -> None:
        """Free the memory now, not with the last reference to the batch or its arrays.

        Raises: UsageError while the batch is in flight.
        """
        if self._c is None:
            return
        if self.in_flight:
            raise UsageError("a batch in flight cannot be freed", hint="wait for it first")
        if self._held is not None:
            self._held.pop(self.address, None)
        self._held = self._c = None
        self._reads, self._records = _NO_READS, _NO_RECORDS


def _shut(core: Any, in_flight: dict[int, EngineBatch]) -> None:
    lib.ffs_engine_stop(core)
    in_flight.clear()


class Engine:
    """Carries out reads: one I/O thread over io_uring or Linux AIO, or a pool of threads.

    Args:
        kind: one of KINDS; "auto" is the best that works on this machine.
        depth: reads in flight, 1 to 4096.
        threads: number of threads for the kind "threads"; each carries out one read at a time.
    Raises:
        UsageError: an unknown kind; depth or threads out of range.
        ReadError: the kind does not work on this machine.
    """

    def __init__(
        self,
        kind: Kind | Literal["auto"] = "auto",
        *,
        depth: int = 64,
        threads: int = 32,
    ) -> None:
        if kind != "auto" and kind not in KINDS:
            raise UsageError(
                f"unknown engine {kind!r}", hint=f"use one of auto, {', '.join(KINDS)}"
            )
        if not 1 <= depth <= 4096 or not 1 <= threads <= 1024:
            raise UsageError("depth must be 1 to 4096 and threads 1 to 1024")
        self.kind, core = _open_engine(kind, depth, threads)
        self.depth = depth if self.kind != "threads" else threads
        self._pid = os.getpid()
        self._in_flight: dict[int, EngineBatch] = {}
        self._notifying = False
        self._arena_size = 0
        # Freed with the last reference, which may be that of a call in another thread.
        self._c: Any = ffi.gc(core, lib.ffs_engine_close)
        self._finalizer = weakref.finalize(self, _shut, self._c, self._in_flight)

    def _core(self) -> Any:
        core = self._c
        if core is None:
            raise UsageError("the engine is closed")
        if self._pid != os.getpid():
            raise UsageError(
                "the engine belongs to the parent process", hint="open one after the fork"
            )
        return core

    def set_arena(self, address: int, size: int, entries_address: int, entry_count: int) -> None:
        """Set the arena and directory that slots and entries refer to; before the first submit.

        The mapping must outlive the engine.
        """
        self._arena_size = size
        lib.ffs_engine_set_arena(
            self._core(),
            ffi.cast("uint8_t *", address),
            size,
            ffi.cast("ffs_entry *", entries_address),
            entry_count,
        )

    def arena_ready(self, size: int, end: int | None = None) -> None:
        """Announce that bytes [0, size) of the arena keep their pages and [0, end) is in use.

        An engine with registered buffers pins them in the background; any other ignores this. A
        lower size than before withdraws the rest; call it before the pages there change.
        """
        lib.ffs_engine_arena_ready(self._core(), size, self._arena_size if end is None else end)

    def add_file(self, fd: int, alignment: int, around: int = 0) -> int:
        """Add an open file and return its id.

        Args:
            fd: stays the caller's; must stay open until ``remove_file``.
            alignment: of reads from it, as ``open_direct`` returns it; 1: buffered.
            around: of a buffered file: a shorter read to a destination outside the arena brings
                whole blocks of so many bytes, a power of two, into the page cache; 0: no.
        """
        rc = int(lib.ffs_file_add(self._core(), fd, alignment, around))
        if rc < 0:
            raise _error(rc, "cannot add the file")
        return rc

    def add_files(self, fds: Int32s, alignments: Int64s) -> Int32s:
        """Add open files, as `add_file` does; return their ids, -1 where `fds` is -1."""
        ids = np.empty(len(fds), np.int32)
        rc = lib.ffs_files_add(
            self._core(),
            from_buffer(I32S, fds),
            from_buffer(I64S, alignments),
            len(fds),
            from_buffer(I32S, ids),
        )
        if rc < 0:
            raise _error(rc, "cannot add the files")
        return ids

    def remove_file(self, file: int) -> None:
        """Remove a file; no read of it may be queued or in flight."""
        lib.ffs_file_remove(self._core(), file)

    def batch(self, read_count: int, record_count: int) -> EngineBatch:
        """Return a zeroed batch. It may be submitted again after it has ended."""
        return EngineBatch(read_count, record_count)

    def submit(self, batch: EngineBatch) -> None:
        """Submit the batch; the caller must not touch it until it has ended.

        Raises: UsageError for an unknown file, a record outside its extent, a slot that is too
        small, or no destination for the bytes: then nothing is read.
        """
        core = self._core()
        if not self._notifying and len(self._in_flight) >= 64:
            self._sweep()
        self._in_flight[batch.address] = batch
        batch._held = self._in_flight
        rc = lib.ffs_submit(core, batch._c)
        if rc < 0:
            if rc != -16:  # EBUSY: the batch is in flight and stays so
                self._in_flight.pop(batch.address, None)
                batch._held = None
            raise _error(rc, "cannot submit the batch")

    def _sweep(self) -> None:
        """Drop batches that have ended and that no call has waited for."""
        for address, batch in list(self._in_flight.items()):
            if batch.done:
                self._in_flight.pop(address, None)

    def wait(self, batch: EngineBatch, timeout_s: float | None = None) -> bool:
        """Block until the batch has ended; ``completed()`` does not return it then.

        Args: timeout_s: None: no limit.
        Returns: False when the time is over.
        """
        core = self._core()
        if timeout_s is None:
            while not lib.ffs_wait(core, batch._c, _WAIT_SLICE_MS):
                pass
        else:
            until = time.monotonic() + timeout_s
            left_ms = timeout_s * 1000
            while not lib.ffs_wait(
                core, batch._c, min(max(int(left_ms + 0.999), 0), _WAIT_SLICE_MS)
            ):
                left_ms = (until - time.monotonic()) * 1000
                if left_ms <= 0:
                    return False
        self._in_flight.pop(batch.address, None)
        batch._held = None
        return True

    def fileno(self) -> int:
        """Return an eventfd that is readable while ``completed()`` has batches.

        Batches submitted after the first call are reported by it. The caller must not read it.
        """
        self._notifying = True
        return int(lib.ffs_engine_notify(self._core(), 1))

    def completed(self) -> list[EngineBatch]:
        """Return the batches that have ended since the last call, oldest first; see ``fileno``."""
        core = self._core()
        ended: list[EngineBatch] = []
        while True:
            c = lib.ffs_engine_pop(core)
            if c == NULL:
                return ended
            batch = self._in_flight.pop(int(ffi.cast(_POINTER, c)))
            batch._held = None
            ended.append(batch)

    def counters(self) -> dict[str, int]:
        """Return totals (reads, bytes, short_reads, errors, checksum_errors, wakeups, submits, and
        fixed: reads into registered buffers) and present values (registered bytes, inflight,
        queued)."""
        out = ffi.new("ffs_counters *")
        lib.ffs_engine_counters(self._core(), out)
        return {name: int(getattr(out, name)) for name in _COUNTERS}

    @property
    def in_flight(self) -> list[EngineBatch]:
        """The batches that were submitted and not reported, the oldest first."""
        return list(self._in_flight.values())

    @property
    def broken(self) -> bool:
        """Whether the engine stopped reading because its descriptors were closed by other code. The
        kernel may still write to the destinations of reads that have failed."""
        return bool(lib.ffs_engine_broken(self._core()))

    def close(self) -> None:
        """Wait for reads in flight, cancel queued ones (-ECANCELED), end the threads."""
        if self._c is None:
            return
        if self._pid != os.getpid():
            self.forget()
            return
        self._finalizer()
        self._c = None

    def forget(self) -> None:
        """In a forked child: free the engine without touching the parent's."""
        if self._c is None:
            return
        if self._pid == os.getpid():
            raise UsageError("forget() is for forked children only", hint="call close()")
        self._finalizer.detach()
        self._in_flight.clear()
        ffi.release(self._c)  # runs ffs_engine_close, which forgets in a child
        self._c = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_COUNTERS = tuple(name for name, _ in ffi.typeof("ffs_counters").fields)


# ---- direct replies ----------------------------------------------------------------------------

ATOMIC_SEND_SIZE = 2048
"""Bytes that a Unix socket accepts completely or not at all, however small its buffer is."""


class ReplySocket:
    """A client's socket, to which the I/O thread may send direct replies while it is not blocked.

    Args: fd: of a non-blocking Unix stream socket; stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        c = lib.ffs_reply_socket_new(fd)
        if c == NULL:
            raise MemoryError("no memory for a reply socket")
        self.c: Any = ffi.gc(c, lib.ffs_reply_socket_free)
        self.blocked = False

    def block(self, blocked: bool) -> None:
        """Block or unblock direct replies. After blocking returns, none is being sent."""
        if blocked != self.blocked:
            self.blocked = blocked
            lib.ffs_reply_socket_block(self.c, blocked)


class DirectReply:
    """A frame that the I/O thread sends when all batches that it waits for have succeeded.

    Args: frame: at most 24 bytes.
    """

    __slots__ = ("_c", "_socket")

    def __init__(self, socket: ReplySocket, frame: bytes) -> None:
        self._socket = socket
        c = self._c = ffi.new("ffs_reply *")
        c.socket, c.left, c.size = socket.c, 1, len(frame)
        c.frame = frame

    def wait_for(self, batch: EngineBatch) -> None:
        """Wait for this batch too; call it before the batch is submitted."""
        batch.keep = self
        lib.ffs_reply_wait_for(self._c, batch._c)

    def hold(self) -> None:
        """Do not send the reply before another call of `arm`."""
        lib.ffs_reply_wait_for(self._c, NULL)

    def arm(self) -> None:
        """Wait for no batch after those that it waits for when the last of these ends. The reply is
        sent with one of them: not without this call, and not by it."""
        lib.ffs_reply_arm(self._c)

    @property
    def sent(self) -> bool:
        """Whether the reply was sent; final when the batches were taken from their engines."""
        return bool(self._c.sent)


# ---- merging reads -----------------------------------------------------------------------------

MERGED_SIZE = 120 * 1024
"""The extents of a merged read begin within this many bytes of its start. That is half a bounce
buffer (FFS_BOUNCE_SIZE in reading/backend.h), so that the read, with its last extent and the
alignment, fits into one. Disks reach full speed at about 64 KiB per read."""
MERGED_GAP = 4096
"""Neighbours are merged if at most this many bytes lie between them; these bytes are read and
dropped. The framing of the formats takes below 100 bytes, and reading a page costs less than
another read."""


def merge_reads(
    begins: Int64s,
    ends: Int64s,
    files: Int64s,
    most: int,
    gap: int = MERGED_GAP,
    size: int = MERGED_SIZE,
) -> Int64s:
    """Decide which neighbouring extents are read together, through a bounce buffer.

    A read costs a device and the kernel about as much for 4 KiB as for 64 KiB.

    Args:
        begins, ends, files: int64[n], one per extent. A read takes adjacent extents of one file.
        most: bytes of an extent; a larger one is read alone.
        gap, size: see MERGED_GAP and MERGED_SIZE.
    Returns: int64, the position of the first extent of each read, in rising order.
    """
    firsts = np.empty(len(begins), np.int64)
    count = lib.ffs_merge(
        from_buffer(I64S, begins),
        from_buffer(I64S, ends),
        from_buffer(I64S, files),
        len(begins),
        most,
        gap,
        size,
        from_buffer(I64S, firsts),
    )
    return firsts[:count]


# ---- about files -------------------------------------------------------------------------------


def in_memory(fd: int) -> bool:
    """Whether a file lies in memory (tmpfs, ramfs), so that nothing is gained by reading past the
    page cache."""
    return int(lib.ffs_file_system_type(fd)) in _IN_MEMORY


_IN_MEMORY = (0x01021994, 0x858458F6)
"""TMPFS_MAGIC, RAMFS_MAGIC."""


def file_system_type(fd: int) -> int:
    """Return the type of the file system of an open file, the f_type of statfs(2)."""
    rc = int(lib.ffs_file_system_type(fd))
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return rc


# ---- opening files -----------------------------------------------------------------------------

_LARGEST_ALIGNMENT = 128 << 10
"""FFS_ALIGNMENT_MAX of engine/reading/backend.h."""


def _logical_block_size(device: int) -> int:
    """Logical block size of a device; 4096 where it is unknown."""
    place = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in ("queue", "../queue"):  # a partition has the queue of its disk
        try:
            with open(f"{place}/{queue}/logical_block_size", encoding="ascii") as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return 4096


def _reads_aligned(fd: int, alignment: int) -> bool:
    """Whether direct reads at this alignment succeed, at the start and after it."""
    with mmap.mmap(-1, max(alignment, mmap.PAGESIZE)) as page:
        try:
            with memoryview(page) as whole, whole[:alignment] as piece:
                os.preadv(fd, [piece], 0)
                os.preadv(fd, [piece], alignment)
        except OSError:
            return False
    return True


_proven: set[tuple[int, int]] = set()
"""The devices and alignments at which a read has succeeded."""
_switching = threading.Lock()
"""Held while `buffered` switches O_DIRECT off."""


def direct_alignment(fd: int) -> int:
    """Return the alignment of reads from a descriptor with O_DIRECT, or 1 if none works.

    Asks the kernel (statx, Linux 6.1), else the block device, and verifies the answer by reading.
    """
    out = ffi.new("uint32_t[2]")
    candidates = []
    known = lib.ffs_dio_alignment(fd, out, out + 1) == 0
    if known:
        if not out[1]:
            return 1
        candidates.append(int(max(out[0], out[1])))
    else:
        candidates.append(_logical_block_size(os.fstat(fd).st_dev))
    candidates += [size for size in (4096, 65536) if size > candidates[0]]
    candidates = [size for size in candidates if size <= _LARGEST_ALIGNMENT]
    device = os.fstat(fd).st_dev
    for alignment in candidates:
        if known and (device, alignment) in _proven:
            return alignment
        if alignment & (alignment - 1) == 0 and _reads_aligned(fd, alignment):
            # One trial per device is enough for what the kernel says.
            if known:
                _proven.add((device, alignment))
            return alignment
    return 1


def open_direct(path_or_fd: str | os.PathLike[str] | int) -> tuple[int, int]:
    """Open a regular file for direct I/O, or buffered where direct I/O does not work or is of no
    use.

    Args:
        path_or_fd: a path, or a descriptor, which is opened again. If this user may not open its
            file, the result is a duplicate, which shares the flags of the given one.
    Returns: (fd, alignment): the caller closes fd; alignment 1: buffered.
    Raises: OSError as open() does; UsageError for anything but a regular file or block device.
    """
    given = path_or_fd if isinstance(path_or_fd, int) else None
    path = os.fspath(path_or_fd) if not isinstance(path_or_fd, int) else f"/proc/self/fd/{given}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as refused:
        if given is not None and isinstance(refused, PermissionError):
            fd = os.dup(given)
            set_direct(fd, True)
        else:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise UsageError("not a regular file", path=os.fspath(path))
        alignment = 1
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            alignment = 1 if in_memory(fd) else direct_alignment(fd)
            if alignment == 1:
                set_direct(fd, False)
    except BaseException:
        os.close(fd)
        raise
    return fd, alignment


def open_direct_all(fds: Int32s) -> tuple[Int32s, Int64s]:
    """Open the files of descriptors again, each as `open_direct` does.

    Returns: descriptors and alignments.
    Raises: as `open_direct`; then all that were opened are closed.
    """
    opened, alignments = np.full(len(fds), -1, np.int32), np.ones(len(fds), np.int64)
    _, types, _ = flags_and_types(fds)
    plain = np.zeros(len(fds), np.bool_)
    plain[: len(types)] = np.isin(types, _IN_MEMORY)
    try:
        for chosen, flag in ((plain, 0), (~plain, os.O_DIRECT)):
            left = np.flatnonzero(chosen)
            while len(left):
                again, failed = open_again(fds[left], os.O_RDONLY | os.O_CLOEXEC | flag)
                done, left = left[: len(again)], left[len(again) :]
                opened[done] = again
                if flag:
                    alignments[done] = _direct_alignments(again)
                if failed is not None:
                    opened[left[0]], alignments[left[0]] = open_direct(int(fds[left[0]]))
                    left = left[1:]
    except BaseException:
        close_fds(opened[opened >= 0])
        raise
    for fd in opened[~plain & (alignments == 1)].tolist():
        set_direct(fd, False)
    return opened, alignments


def _direct_alignments(fds: Int32s) -> Int64s:
    """Return `direct_alignment` of each descriptor."""
    alignments = stated_alignments(fds)
    devices = stat_fds(fds)[0]["device"].tolist()
    for k, (device, stated) in enumerate(zip(devices, alignments.tolist(), strict=True)):
        if (device, stated) not in _proven:
            alignments[k] = direct_alignment(int(fds[k]))
    return alignments


def set_direct(fd: int, direct: bool) -> None:
    """Switch O_DIRECT of an open file description on, if the file system can, or off; O_NONBLOCK,
    with which io_uring fails a read where it would wait, is always switched off."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~(os.O_DIRECT | os.O_NONBLOCK)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


@contextlib.contextmanager
def buffered(fd: int, patience_s: float = 1.0) -> Iterator[int]:
    """Return a descriptor of an open file that reads through the page cache.

    The file is opened again. If this user may not open it, since another process passed the
    descriptor, the result is the given one, with O_DIRECT switched off meanwhile.

    Args: patience_s: how long to wait for other threads that do so.
    Raises: OSError; TimeoutError: other threads read such files for longer.
    """
    try:
        plain = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        plain = -1
    if plain >= 0:
        try:
            yield plain
        finally:
            os.close(plain)
        return
    # Each thread must find the flag as it was before all of them.
    if not _switching.acquire(timeout=patience_s):
        raise TimeoutError("another thread reads a file of this kind")
    try:
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        set_direct(fd, False)
        try:
            yield fd
        finally:
            set_direct(fd, direct)
    finally:
        _switching.release()


# ---- which engines work on this machine --------------------------------------------------------


LOCKED = "too little memory may be locked (see ulimit -l)"


def _reason(rc: int) -> str:
    """Say in words why the kernel refused an engine."""
    if rc == -38:
        return "not supported by this kernel or this build, or hidden by seccomp"
    if rc == -1:
        return "not permitted (seccomp, or kernel.io_uring_disabled)"
    if rc == -12:
        return LOCKED
    return os.strerror(-rc)


_TRIAL_SIZE = 128 * 1024
"""The file of the trial has this size, so that reading it uses a registered buffer."""


@functools.cache
def _trial(kind: Kind) -> str | None:
    """Read a file by this kind of engine. Returns None if it works, else the reason."""
    if not lib.ffs_built() >> KINDS[kind] & 1:
        return "not in this build"
    content = os.urandom(_TRIAL_SIZE)
    try:
        # In memory: a container may have no directory that can be written.
        with open(os.memfd_create("ffserve-trial"), "w+b", buffering=0) as file:
            file.write(content)
            fd, alignment = open_direct(file.fileno())
            try:
                with Engine(kind, depth=2, threads=1) as engine:
                    batch = engine.batch(1, 1)
                    got = np.zeros(_TRIAL_SIZE - 192, np.uint8)
                    file_id = engine.add_file(fd, alignment)
                    batch.reads[0] = (100, len(got), NOWHERE, 0, file_id, 0, 0, 1)
                    batch.records[0] = (100, len(got), NOWHERE, got.ctypes.data, 0, 0, 0, 0)
                    engine.submit(batch)
                    engine.wait(batch)
                    fixed = engine.counters()["fixed"]
            finally:
                os.close(fd)
    except (OSError, UsageError) as error:
        return str(error)
    status = int(batch.records["status"][0])
    if status:
        return f"a read of a file in memory failed: {os.strerror(-status)}"
    if got.tobytes() != content[100 : 100 + len(got)]:
        return "a read of a file in memory returned wrong bytes"
    return _reason(-12) if kind == "registered" and not fixed else None


def probe() -> list[Kind]:
    """Return the kinds that work on this machine, best first; each is tried once per process."""
    return [kind for kind in KINDS if _trial(kind) is None]


_refused: dict[Kind, str] = {}
"""Kinds that passed their trial and could not be opened, with the reason: the trial is small."""


def _open_engine(kind: Kind | Literal["auto"], depth: int, threads: int) -> tuple[Kind, Any]:
    """Return the kind that was opened, and the engine in C. Raises: ReadError."""
    out = ffi.new("ffs_engine **")
    for each in KINDS if kind == "auto" else (kind,):
        if kind == "auto" and _trial(each) is not None:
            continue  # stops at the first: trying all of them takes 50 ms
        rc = lib.ffs_engine_open(out, KINDS[each], depth, threads)
        if rc >= 0:
            return each, out[0]
        _refused[each] = _reason(rc)
    if kind == "auto":
        raise ReadError(f"no engine works on this machine: {describe()}")
    raise ReadError(
        f"the engine {kind!r} does not work on this machine: {_refused[kind]}",
        hint='use "auto", which chooses one that works',
    )


def ring_refusal(kind: str) -> str | None:
    """Return why "auto" chose this kind and not io_uring; None: it is io_uring."""
    return None if kind in ("registered", "uring") else refusal("uring")


def best_refusal(kind: str) -> str | None:
    """Return why "auto" chose this kind and none before it; None: it is the best."""
    if kind == "registered":
        return None
    return ring_refusal(kind) or refusal("registered")


def refusal(kind: Kind) -> str | None:
    """Return why this kind of engine does not work on this machine; None: it does."""
    return _refused.get(kind) or _trial(kind)


def local_engine(kind: Kind | Literal["auto"] = "auto") -> Engine:
    """Return an engine for a process that also reads through the page cache.

    Linux AIO carries out buffered reads one after another; threads take its place.
    """
    engine = Engine(kind, depth=128)
    if engine.kind == "aio":
        engine.close()
        engine = Engine("threads", depth=128)
    # Once, and not by each worker of a job.
    if multiprocessing.parent_process() is None and (reason := ring_refusal(engine.kind)):
        _say_refusal(engine.kind, reason)
    return engine


@functools.cache
def _say_refusal(kind: Kind, reason: str) -> None:
    log.warning("io_uring is not used (%s): reading with %s", reason, kind)


def describe() -> str:
    """Return one line: the engine that "auto" chooses, why others do not work, what
    computes checksums, what makes lists of arrays."""
    usable = probe()
    parts = [f"engine {usable[0]}" if usable else "no engine"]
    if usable[1:]:
        parts.append(f"also {', '.join(usable[1:])}")
    parts += [f"no {kind}: {_trial(kind)}" for kind in KINDS if kind not in usable]
    parts += [f"{kind} refused: {why}" for kind, why in _refused.items() if kind in usable]
    parts.append(f"checksums by {codec.checksum_library()}")
    parts.append(f"lists of arrays by {f'Python: {arrays.MISSING}' if arrays.MISSING else 'C'}")
    return "; ".join(parts)
