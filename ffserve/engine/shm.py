"""Shared memory: looking samples up in the directory, copying them into batches, publishing.

The Python face of memory/shm.h. Arrays go in as numpy buffers, there is one C call per batch, and
the GIL is released during it. memory/shm.c explains why a torn copy is never accepted.

Fresh memory costs up to three times as much as copying into it, since the kernel zeroes every page.
So memory of batches is kept when it is freed.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bytes, Int64s, UInt64s
from ffserve.engine.arrays import separate
from ffserve.engine.core import DESTS, I64S, NULL, U8S, U64S, ffi, from_buffer, lib
from ffserve.errors import ReadError, SampleIndexError, UsageError

NOWHERE = 2**64 - 1
"""No offset: a sample that is not readable, a read without a slot, a record without an entry."""

DURATIONS: int = lib.FFS_DURATIONS
"""Buckets of `MappedView.take_times`."""

_INT64 = np.dtype(np.int64)
_UINT8 = np.dtype(np.uint8)
_UINT64 = np.dtype(np.uint64)
_TOGETHER = (_INT64.itemsize,)


class Batch(Sequence[Bytes]):
    """Samples of one `read_batch`: a sequence of views of one buffer.

    Args:
        buffer: uint8[total], owned by the batch; the samples lie back to back.
        offsets: int64[n + 1]; sample i is buffer[offsets[i]:offsets[i + 1]].
    """

    __slots__ = ("buffer", "offsets")

    def __init__(self, buffer: Bytes, offsets: Int64s) -> None:
        self.buffer = buffer
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[Bytes]: ...
    def __getitem__(self, index: int | slice) -> Bytes | list[Bytes]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise SampleIndexError(f"position {index} is outside a batch of {len(self)} samples")
        return self.buffer[self.offsets[position] : self.offsets[position + 1]]

    def __iter__(self) -> Iterator[Bytes]:
        edges = self.offsets.tolist()
        for start, end in pairwise(edges):
            yield self.buffer[start:end]

    def __dlpack__(self, **options: Any) -> Any:
        """Return ``buffer`` for ``from_dlpack`` of another library, without a copy."""
        return self.buffer.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()

    def __repr__(self) -> str:
        return f"Batch({len(self)} samples, {self.buffer.nbytes} bytes)"


Allocate = Callable[[Int64s], tuple[list[Bytes], UInt64s]]
"""Gives arrays for samples with these offsets (running sum of the sizes), and their addresses."""


class Located(NamedTuple):
    """The entries of the directory for n samples.

    offsets: int64[n + 1], running sum of the lengths, an unknown one counted as 0. missing:
    positions that cannot be read now. unknown: how many lengths are not known yet.
    """

    offsets: Int64s
    missing: Int64s
    unknown: int


class MappedView:
    """Arenas and directories, as a client needs them to copy samples.

    Args:
        arena_size: bytes of each arena.
        segments: (address of the first entry, index of its sample, count, address of the arena), in
            rising order of index, from 0, without gaps. The mappings must outlive the view.
    """

    __slots__ = ("_alike", "_c", "_last_size", "_segments", "_taken", "_times", "sample_count")

    def __init__(self, arena_size: int, segments: Sequence[tuple[int, int, int, int]]) -> None:
        self.sample_count = 0
        self._last_size = 0
        self._alike = False
        """Whether the last two batches were of the same size."""
        self._segments = ffi.new("ffs_segment[]", len(segments))
        for segment, (address, first, count, arena) in zip(self._segments, segments, strict=True):
            if first != self.sample_count or count < 0:
                raise UsageError("segments must cover the samples from 0 without gaps")
            segment.entries = ffi.cast("ffs_entry *", address)
            segment.first = first
            segment.count = count
            segment.arena = ffi.cast("uint8_t *", arena)
            self.sample_count += count
        self._c = ffi.new("ffs_view *")
        lowest = min((arena for *_, arena in segments), default=0)
        self._c.lowest = ffi.cast("uint8_t *", lowest)
        self._c.arena_size = arena_size
        self._c.segments = self._segments
        self._c.segment_count = len(segments)
        self._c.times = times = ffi.new("ffs_times *")
        self._times = np.frombuffer(ffi.buffer(times), np.uint64)[1:]
        self._taken = self._times.copy()
        """What `take_times` has returned so far."""

    @property
    def c(self) -> Any:
        """The C structure, for other calls of the core."""
        return self._c

    def take_times(self) -> UInt64s | None:
        """Return how long it took to copy batches since the last call: the sum in nanoseconds, then
        counts below 1, 2, 4, … us and of all others. None: no batch was timed; one in eight is."""
        now = self._times.copy()
        more = now - self._taken
        self._taken = now
        return more if more[1:].any() else None

    def locate(self, indices: Int64s) -> Located:
        """Look samples up.

        Args: indices: shape (n,), int64, contiguous; repeats are allowed.
        Raises: SampleIndexError for an index outside the view; ReadError for impossible lengths.
        Cost: one call, no lock; 10-20 ns per sample.
        """
        n = len(indices)
        if indices.dtype != _INT64:
            indices = indices.astype(np.int64)
        out = np.empty(2 * n + 3, np.int64)
        c = from_buffer(I64S, out)
        missing = lib.ffs_locate(
            self._c,
            from_buffer(I64S, indices),
            n,
            c,
            c + (n + 1),
            c + (2 * n + 1),
            c + (2 * n + 2),
        )
        if missing < 0:
            if out[2 * n + 2] < 0:
                raise ReadError("the shared directory is invalid: lengths of more than 2^63 bytes")
            index = int(indices[out[2 * n + 2]])
            raise SampleIndexError(f"the dataset has {self.sample_count} samples", index=index)
        return Located(out[: n + 1], out[n + 1 : n + 1 + missing], c[2 * n + 1])

    def gather(
        self,
        indices: Int64s,
        offsets: Int64s,
        buffer: Bytes | None,
        dests: UInt64s | None = None,
        positions: Int64s | None = None,
    ) -> Int64s | None:
        """Copy samples out of the arena.

        Args:
            indices, offsets: the argument and result of ``locate``.
            buffer: sample k goes to buffer[offsets[k] : offsets[k + 1]]; None if dests are given.
            dests: one address per sample, with room for it.
            positions: which samples to copy, each from 0 to n - 1; None for all.
        Returns: the positions that were not readable (to be requested from the daemon), or None
            when a sample's length differs from ``offsets``: call ``locate`` again.
        Raises: ReadError when the directory points outside the arena, SampleIndexError for an
            index outside the view.
        """
        n = len(indices)
        if len(offsets) != n + 1:
            raise UsageError("offsets must have one element more than indices")
        if indices.dtype != _INT64 or offsets.dtype != _INT64:
            raise UsageError("indices and offsets must be int64")
        if dests is not None:
            if len(dests) != n or dests.dtype != _UINT64:
                raise UsageError("dests must be one uint64 address per sample")
            to, tos = NULL, from_buffer(DESTS, dests)
        elif buffer is None or buffer.nbytes < offsets[n]:
            raise UsageError("the buffer is smaller than the samples")
        else:
            to, tos = from_buffer(U8S, buffer, True), NULL
        if positions is None:
            count, which = n, NULL
        else:
            if positions.dtype != _INT64:
                raise UsageError("positions must be int64")
            count, which = len(positions), from_buffer(I64S, positions)
        left = np.empty(count, np.int64)
        rc = lib.ffs_gather(
            self._c,
            from_buffer(I64S, indices),
            from_buffer(I64S, offsets),
            to,
            tos,
            which,
            count,
            from_buffer(I64S, left),
        )
        if rc >= 0:
            return left[:rc]
        if rc == lib.FFS_ESTALE:
            return None
        if n and (int(indices.min()) < 0 or int(indices.max()) >= self.sample_count):
            raise SampleIndexError(f"the dataset has {self.sample_count} samples")
        raise ReadError("the shared directory points outside the arena")

    def copy_batch(
        self,
        indices: NDArray[Any],
        out: Bytes | None = None,
    ) -> Batch | Located | None:
        """Copy a batch whose samples are all readable now: ``locate`` and ``gather`` in one.

        Args:
            indices: any array.
            out: uint8, contiguous, writable; used instead of a new buffer.
        Returns: the batch. If a sample is not readable, or the batch is larger than ``out``: the
            result of ``locate``. None if the array is not as ``locate`` needs it, or an index or
            the directory is out of range.
        Cost: one call if the batch has the size of the one before, else two. If the last two had
            one size, samples are looked up while others are copied.
        """
        if indices.dtype != _INT64 or indices.strides != _TOGETHER:
            return None
        n = len(indices)
        found = np.empty(2 * n + 3, _INT64)
        which, edges = from_buffer(I64S, indices), from_buffer(I64S, found)
        if out is None:
            least = room = self._last_size  # a guess, since other threads copy batches too
            to = empty(room)
        else:
            least, room, to = 0, len(out), out
        copy, c, likely = lib.ffs_copy_batch, self._c, self._alike and self._last_size <= room
        rc = copy(c, which, n, edges, from_buffer(U8S, to), least, room, likely)
        if rc == 0 or rc == 1:
            total = edges[n]
            self._alike = total == self._last_size
            self._last_size = total
        if rc == 1 and out is None:
            room = edges[n]
            to = empty(room)
            rc = copy(c, which, n, edges, from_buffer(U8S, to), room, room, False)
        if rc == 0:
            return Batch(to if out is None else to[: edges[n]], found[: n + 1])
        if rc == lib.FFS_ERANGE:
            return None
        missing = edges[2 * n + 1]
        return Located(found[: n + 1], found[n + 1 : n + 1 + missing], edges[2 * n + 2])

    def copy_arrays(
        self, indices: NDArray[Any], allocate: Allocate = separate
    ) -> tuple[list[Bytes], int] | Located | None:
        """Copy a batch whose samples are all readable now, each to an array of its own.

        Args:
            indices: any array.
            allocate: gives arrays for the offsets of `locate`, and their addresses.
        Returns: the arrays and their bytes in total; else as `copy_batch`.
        Cost: three calls.
        """
        if indices.dtype != _INT64 or indices.strides != _TOGETHER:
            return None
        n = len(indices)
        found = np.empty(2 * n + 3, _INT64)
        c, which, edges = self._c, from_buffer(I64S, indices), from_buffer(I64S, found)
        places, counts = edges + (n + 1), edges + (2 * n + 1)
        missing = lib.ffs_locate(c, which, n, edges, places, counts, counts + 1)
        if missing < 0:
            return None
        offsets = found[: n + 1]
        if missing:
            return Located(offsets, found[n + 1 : n + 1 + missing], counts[0])
        if not _asked:
            keep_freed_memory()
        arrays, addresses = allocate(offsets)
        dests = from_buffer(DESTS, addresses)
        if lib.ffs_gather(c, which, edges, NULL, dests, NULL, n, NULL):
            return None
        return arrays, edges[n]

    def places(self, indices: Int64s) -> UInt64s:
        """Return the place of each sample, in bytes from the start of the arena with the lowest
        address; NOWHERE if it is not readable now.

        Only a lease keeps the samples there.
        Raises: as ``gather``.
        """
        if indices.dtype != _INT64:
            indices = indices.astype(np.int64)
        out = np.empty(len(indices), np.uint64)
        rc = lib.ffs_places(
            self._c, from_buffer(I64S, indices), len(indices), from_buffer(U64S, out)
        )
        if rc >= 0:
            return out
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.sample_count):
            raise SampleIndexError(f"the dataset has {self.sample_count} samples")
        raise ReadError("the shared directory points outside the arena")


def retract(
    entries_address: int, firsts: Int64s, counts: Int64s, slots: UInt64s, sizes: UInt64s
) -> None:
    """Make entries unreadable before their slots are written again (in the daemon).

    Args: for each k, those entries of [firsts[k], firsts[k] + counts[k]) are retracted whose
        payload starts inside [slots[k], slots[k] + sizes[k]) of the arena.
    """
    if not len(firsts) == len(counts) == len(slots) == len(sizes):
        raise UsageError("firsts, counts, slots and sizes must have the same length")
    lib.ffs_retract(
        ffi.cast("ffs_entry *", entries_address),
        from_buffer(I64S, firsts),
        from_buffer(I64S, counts),
        from_buffer(U64S, slots),
        from_buffer(U64S, sizes),
        len(firsts),
    )


def publish(entries_address: int, entry: int, offset: int, length: int) -> None:
    """Make one sample readable whose bytes are at ``offset`` in the arena."""
    lib.ffs_publish(ffi.cast("ffs_entry *", entries_address) + entry, offset, length)


def publish_run(
    entries_address: int, first: int, base: int, starts: Int64s, lengths: Int64s
) -> None:
    """Make samples [first, first + n) readable, whose payloads are at ``base + starts``."""
    lib.ffs_publish_run(
        ffi.cast("ffs_entry *", entries_address),
        first,
        len(starts),
        base,
        from_buffer(I64S, starts),
        from_buffer(I64S, lengths),
    )


# ---- memory that is kept -------------------------------------------------------------------------

BLOCK_SIZE = 32 << 20
"""malloc maps every block of this many bytes anew. It does not allow a higher threshold."""
SMALL_SIZE = BLOCK_SIZE - (64 << 10)
"""malloc keeps freed blocks of up to this many bytes."""
MOST_KEPT = 512 << 20
"""The largest buffer that is kept for the next batch has this many bytes; as much free memory of
lists of samples is kept."""

_asked = False
_spare: list[mmap.mmap] = []


def keep_freed_memory() -> None:
    """Have malloc keep the memory of freed batches; once per process.

    glibc maps blocks of 128 KiB and more anew each time, and gives the top of its heap back to the
    kernel beyond as much. It raises both limits by itself, but not beyond 32 and 64 MiB
    (mallopt(3), M_MMAP_THRESHOLD): of a list of 64 samples of 1 MiB every page would be cleared by
    the kernel each time, which takes three times as long as reading them from memory.
    """
    global _asked
    if not _asked:
        _asked = True
        lib.ffs_keep_freed_memory(BLOCK_SIZE, MOST_KEPT)


def empty(size: int) -> Bytes:
    """Return uint8[size], not initialized.

    A large one takes the memory of the last large one that was freed with all its views, so a loop
    over large batches works in two.
    """
    if size <= SMALL_SIZE:
        if not _asked:
            keep_freed_memory()
        return np.empty(size, _UINT8)
    memory = _take(size)
    if memory is None:
        return np.empty(size, _UINT8)
    buffer = np.frombuffer(memory, np.uint8, size)
    weakref.finalize(buffer, _give, memory).atexit = False
    return buffer


def _take(size: int) -> mmap.mmap | None:
    # A finalizer may run at any moment in any thread: no lock, each step by itself is atomic.
    with contextlib.suppress(IndexError):
        memory = _spare.pop()
        if size <= len(memory) <= 2 * size:
            return memory
    step = 1 << max(size.bit_length() - 3, 0)  # so that the next one, if a little larger, fits
    try:
        memory = mmap.mmap(-1, -(-size // step) * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give(memory: mmap.mmap) -> None:
    if len(memory) <= MOST_KEPT:
        _spare[:] = [memory]


# ---- flags ---------------------------------------------------------------------------------------


class Flag:
    """One aligned u32 that two processes share.

    A process that gets a value sees everything the other one wrote before setting it. Setting takes
    no lock and allocates nothing, so a finalizer may do it.

    Args: address: of the word; the memory must outlive the flag.
    """

    __slots__ = ("_word",)

    def __init__(self, address: int) -> None:
        self._word = ffi.cast("uint32_t *", address)

    def get(self) -> int:
        """Return the value."""
        return int(lib.ffs_flag_get(self._word))

    def set(self, value: int) -> None:
        """Set the value."""
        lib.ffs_flag_set(self._word, value)
