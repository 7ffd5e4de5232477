"""The Python face of the C engines: batches in, ended batches out, and which engine works here.

Everything here is thin: arrays go in as numpy buffers, one C call is made a batch, and the GIL is
released during it. The untyped cffi module is confined to this folder.

Who owns what. A ``Batch`` is one block of C memory that its numpy views keep alive. From submit
until it has ended the kernel may write into it, so the engine holds it in a dictionary that in
turn the engine's finalizer holds: whatever order Python tears things down in, the engine's
threads have stopped before a batch in flight is freed.

A fork leaves the engine's threads in the parent. The child's copy refuses to work; dropping it,
or ``forget()``, gives its memory and descriptors back without touching the parent's ring.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
import weakref
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ffserve.engine import checksum
from ffserve.engine.blocks import Shards
from ffserve.engine.core import ffi, lib
from ffserve.engine.direct import open_direct
from ffserve.engine.view import NOWHERE
from ffserve.errors import ReadError, UsageError

Kind = Literal["registered", "uring", "aio", "threads"]

KINDS: dict[Kind, int] = {
    "registered": lib.FFS_ENGINE_REGISTERED,
    "uring": lib.FFS_ENGINE_URING,
    "aio": lib.FFS_ENGINE_AIO,
    "threads": lib.FFS_ENGINE_THREADS,
}
"""Every kind there is, the best first. With registered buffers the kernel need not look the pages
of the arena up for every read."""

ECHECKSUM: int = lib.FFS_ECHECKSUM
ETRUNCATED: int = lib.FFS_ETRUNCATED


def refused(status: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which records' reads were refused by the kernel (-errno), not just found wrong."""
    none: NDArray[np.bool_] = (status < 0) & (status > ETRUNCATED) & (status > ECHECKSUM)
    return none


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
_I64S = ffi.typeof("int64_t[]")
_from_buffer = ffi.from_buffer
_NULL = ffi.NULL

# An uninterrupted wait in C would keep Ctrl-C waiting too.
_WAIT_SLICE_MS = 200
_SWEEP_AT = 64


def _error(rc: int, what: str) -> UsageError | ReadError:
    if rc in (-22, -16):  # EINVAL, EBUSY: our own caller's
        return UsageError(f"{what}: {os.strerror(-rc)}")
    return ReadError(f"{what}: {os.strerror(-rc)}")


class Batch:
    """Reads and records for one submit: fill the two arrays, submit, look at ``status``.

    `reads` and `records` are structured arrays of READ_DTYPE and RECORD_DTYPE: views of C memory,
    zeroed at first.

    Attributes:
        keep: whatever owns the memory that the records' ``dest`` point to; it lives as long as
            the engine may write there, even if the caller loses interest.
    """

    __slots__ = ("__weakref__", "_c", "_held", "_reads", "_records", "address", "keep")

    def __init__(self, read_count: int, record_count: int) -> None:
        self._own(lib.ffs_batch_new(read_count, record_count))

    def _own(self, c: Any) -> None:
        if c == _NULL:
            raise MemoryError("no memory for a batch")
        self._c: Any = ffi.gc(c, lib.ffs_batch_free)
        self._held: dict[int, Batch] | None = None
        self._reads: NDArray[Any] | None = None
        self._records: NDArray[Any] | None = None
        self.keep: object = None
        self.address = int(ffi.cast(_POINTER, c))

    @classmethod
    def of_blocks(
        cls,
        shards: Shards,
        blocks: NDArray[np.int64],
        places: NDArray[np.int64],
        rooms: NDArray[np.int64],
        arena_address: int,
        merge: tuple[int, int, int],
    ) -> Batch:
        """A batch that reads blocks into slots, filled by one call.

        Args:
            shards, blocks: see `ffserve.engine.blocks`; n blocks, with a record for every sample.
            places, rooms: int64[n], of the slots: offset in the arena, size.
            merge: most, gap and size of `ffserve.engine.blocks.merge`: which are read at once,
                through a buffer.
        Raises: UsageError when a record is not inside of its block.
        """
        batch = cls.__new__(cls)
        c = lib.ffs_batch_blocks(
            shards.c,
            _from_buffer(_I64S, blocks),
            blocks.shape[1],
            _from_buffer(_I64S, places),
            _from_buffer(_I64S, rooms),
            ffi.cast("uint8_t *", arena_address),
            *merge,
        )
        if c == _NULL:
            raise UsageError("no memory for a batch, or a record lies outside of its block")
        batch._own(c)
        return batch

    @property
    def reads(self) -> NDArray[Any]:
        """The reads; empty once the batch was freed."""
        if self._reads is None:
            c = self._c
            self._reads = self._array(c.reads, READ_DTYPE, c.read_count) if c else _NO_READS
        return self._reads

    @property
    def records(self) -> NDArray[Any]:
        """The records; empty once the batch was freed."""
        if self._records is None:
            c = self._c
            self._records = (
                self._array(c.records, RECORD_DTYPE, c.record_count) if c else _NO_RECORDS
            )
        return self._records

    def _array(self, first: Any, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        # The buffer keeps the owning pointer alive, the array keeps the buffer.
        start = int(ffi.cast(_POINTER, first)) - self.address
        block = ffi.buffer(self._c, start + count * dtype.itemsize)
        return np.frombuffer(block, dtype, count, start)

    @property
    def read_count(self) -> int:
        """How many reads there are."""
        return int(self._c.read_count)

    @property
    def tag(self) -> int:
        """A number of the caller's own."""
        return int(self._c.tag)

    @tag.setter
    def tag(self, value: int) -> None:
        self._c.tag = value

    @property
    def failed(self) -> int:
        """How many records have a status other than 0, once the batch has ended."""
        return int(self._c.failed)

    @property
    def bytes(self) -> int:
        """Bytes read from files, over-read included, once the batch has ended."""
        return int(self._c.bytes)

    @property
    def done(self) -> bool:
        """Whether the batch has ended; never before it was submitted."""
        return bool(self._c.done)

    @property
    def in_flight(self) -> bool:
        """Whether an engine owns the batch now."""
        return self._held is not None and not self._c.done

    def free(self) -> None:
        """Give the memory back now rather than with the last reference to batch or arrays.

        Raises: UsageError while the batch is in flight.
        """
        if self._c is None:
            return
        if self.in_flight:
            raise UsageError("a batch in flight cannot be freed")
        if self._held is not None:
            self._held.pop(self.address, None)
        self._held = self._c = None
        self._reads, self._records = _NO_READS, _NO_RECORDS


def _shut(core: Any, in_flight: dict[int, Batch]) -> None:
    lib.ffs_engine_stop(core)
    in_flight.clear()


class Engine:
    """Reads in flight: one I/O thread over io_uring or Linux AIO, or a pool of threads.

    Args:
        kind: "auto" takes the best that works here; any other is taken or refused.
        depth: reads in flight, 1 to 4096.
        threads: how many for the kind "threads", where each is one read in flight.
    Raises:
        UsageError: an unknown kind, a depth or number of threads out of range.
        ReadError: the kind that was asked for does not work here.
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
                f"no engine is called {kind!r}", hint=f"one of auto, {', '.join(KINDS)}"
            )
        if not 1 <= depth <= 4096 or not 1 <= threads <= 1024:
            raise UsageError("depth goes from 1 to 4096, threads from 1 to 1024")
        self.kind: Kind = _best() if kind == "auto" else kind
        out = ffi.new("ffs_engine **")
        rc = lib.ffs_engine_open(out, KINDS[self.kind], depth, threads)
        if rc < 0:
            raise ReadError(
                f"the engine {self.kind} does not work here: {_reason(rc)}",
                hint='the kind "auto" takes one that does',
            )
        self.depth = depth if self.kind != "threads" else threads
        self._pid = os.getpid()
        self._in_flight: dict[int, Batch] = {}
        self._notifying = False
        self._arena_size = 0
        # Freed when the last reference goes, which may be a call that another thread is in.
        self._c: Any = ffi.gc(out[0], lib.ffs_engine_close)
        self._finalizer = weakref.finalize(self, _shut, self._c, self._in_flight)

    def _core(self) -> Any:
        core = self._c
        if core is None:
            raise UsageError("the engine is closed")
        if self._pid != os.getpid():
            raise UsageError("the engine stayed in the parent process", hint="open one here")
        return core

    def set_arena(self, address: int, size: int, entries_address: int, entry_count: int) -> None:
        """Say where slots and directory entries lie; before the first submit.

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
        """Bytes [0, size) of the arena have the pages that they will keep; [0, end) is in use.

        An engine with registered buffers then pins them, in the background; any other ignores it.
        A lower size than before takes that back before the pages above it change.
        """
        lib.ffs_engine_arena_ready(self._core(), size, self._arena_size if end is None else end)

    def add_file(self, fd: int, alignment: int) -> int:
        """Add an open file and return its id.

        Args:
            fd: stays the caller's and must stay open until ``remove_file``.
            alignment: of reads from it, as ``open_direct`` gives it; 1 when it is buffered.
        """
        rc = int(lib.ffs_file_add(self._core(), fd, alignment))
        if rc < 0:
            raise _error(rc, "cannot add the file")
        return rc

    def remove_file(self, file: int) -> None:
        """Forget a file of which no read is queued or in flight."""
        lib.ffs_file_remove(self._core(), file)

    def batch(self, read_count: int, record_count: int) -> Batch:
        """A zeroed batch; it may be submitted again after it has ended."""
        return Batch(read_count, record_count)

    def submit(self, batch: Batch) -> None:
        """Hand the batch over; it must not be touched until it has ended.

        Raises: UsageError when a read or record does not fit (an unknown file, a record outside
        of its extent, a slot that is too small, no place for the bytes): nothing is read then.
        """
        core = self._core()
        if not self._notifying and len(self._in_flight) >= _SWEEP_AT:
            self._sweep()
        self._in_flight[batch.address] = batch
        batch._held = self._in_flight
        rc = lib.ffs_submit(core, batch._c)
        if rc < 0:
            if rc != -16:  # EBUSY: it is in flight, and stays so
                self._in_flight.pop(batch.address, None)
                batch._held = None
            raise _error(rc, "the batch was refused")

    def _sweep(self) -> None:
        """Let go of batches that ended and that nobody came to wait for."""
        for address, batch in list(self._in_flight.items()):
            if batch.done:
                self._in_flight.pop(address, None)

    def wait(self, batch: Batch, timeout_s: float | None = None) -> bool:
        """Block until the batch has ended.

        A batch that was waited for does not appear in ``completed()`` as well.
        Args: timeout_s: None waits for ever.
        Returns: False when the time is up.
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
        """An eventfd that is readable while ``completed()`` has something to give.

        From the first call on, every batch submitted goes there when it ends. Never read it.
        """
        self._notifying = True
        return int(lib.ffs_engine_notify(self._core(), 1))

    def completed(self) -> list[Batch]:
        """Batches that have ended since the last call, oldest first; see ``fileno``."""
        core = self._core()
        ended: list[Batch] = []
        while True:
            c = lib.ffs_engine_pop(core)
            if c == _NULL:
                return ended
            batch = self._in_flight.pop(int(ffi.cast(_POINTER, c)))
            batch._held = None
            ended.append(batch)

    def counters(self) -> dict[str, int]:
        """What the engine did so far: reads, bytes, short_reads, errors, checksum_errors, wakeups,
        submits, fixed (reads into registered buffers); and what is now: registered (bytes),
        inflight, queued."""
        out = ffi.new("ffs_counters *")
        lib.ffs_engine_counters(self._core(), out)
        return {name: int(getattr(out, name)) for name in _COUNTERS}

    @property
    def broken(self) -> bool:
        """Whether it reads nothing any more: somebody closed its descriptors. Where one of its
        reads has failed the kernel may still write."""
        return bool(lib.ffs_engine_broken(self._core()))

    def close(self) -> None:
        """Wait for what is in flight, cancel what is queued (-ECANCELED), end the threads."""
        if self._c is None:
            return
        if self._pid != os.getpid():
            self.forget()
            return
        self._finalizer()
        self._c = None

    def forget(self) -> None:
        """In a forked child: drop the engine without touching what belongs to the parent."""
        if self._c is None:
            return
        if self._pid == os.getpid():
            raise UsageError("only a forked child forgets an engine", hint="close() it")
        self._finalizer.detach()
        self._in_flight.clear()
        ffi.release(self._c)  # runs ffs_engine_close, which forgets in a child
        self._c = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_COUNTERS = tuple(name for name, _ in ffi.typeof("ffs_counters").fields)


# ---- what works here ---------------------------------------------------------------------------


def _reason(rc: int) -> str:
    """Why the kernel refused an engine, in words."""
    if rc == -38:
        return "not in this kernel or not in this build"
    if rc == -1:
        return "not permitted (seccomp, or kernel.io_uring_disabled)"
    if rc == -12:
        return "no memory that may be locked (see ulimit -l)"
    return os.strerror(-rc)


_TRIAL_SIZE = 128 * 1024
"""Of the file: enough that a read of it is worth a registered buffer (engine/buffers.h)."""


@functools.cache
def _trial(kind: Kind) -> str | None:
    """Read a file by this kind of engine; None if it works, else why not."""
    if not lib.ffs_built() >> KINDS[kind] & 1:
        return "not in this build"
    content = os.urandom(_TRIAL_SIZE)
    try:
        with tempfile.TemporaryFile() as file:
            file.write(content)
            file.flush()
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
        return f"a read of a temporary file failed: {os.strerror(-status)}"
    if got.tobytes() != content[100 : 100 + len(got)]:
        return "a read brought wrong bytes"
    return _reason(-12) if kind == "registered" and not fixed else None


def probe() -> list[Kind]:
    """The kinds that work here, best first, each tried once a process by a real read."""
    return [kind for kind in KINDS if _trial(kind) is None]


def _best() -> Kind:
    for kind in KINDS:  # and no further: to try all of them takes 50 ms
        if _trial(kind) is None:
            return kind
    raise ReadError(f"no engine works here: {describe()}")


def describe() -> str:
    """One line for people: the engine that "auto" takes, why the others are out, checksums by."""
    usable = probe()
    parts = [f"engine {usable[0]}" if usable else "no engine"]
    if usable[1:]:
        parts.append(f"also {', '.join(usable[1:])}")
    parts += [f"no {kind}: {_trial(kind)}" for kind in KINDS if kind not in usable]
    parts.append(f"checksums by {checksum.library()}")
    return "; ".join(parts)
