"""The shared directory: looking samples up in it, copying them out of the arena, changing it.

Arrays go in as numpy buffers, one C call is made a batch, and the GIL is released during it. Why a
copy that the daemon's eviction overtakes is never taken stands in engine/shm.c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib
from ffserve.errors import ReadError, SampleIndexError, UsageError

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

NOWHERE = 2**64 - 1
"""No place: a sample that cannot be read now, a read without a slot, a record without an entry."""

ENTRY_DTYPE = np.dtype([("seq", "u4"), ("length_low", "u4"), ("place", "u8")])
assert ENTRY_DTYPE.itemsize == ffi.sizeof("ffs_entry")

_INT64 = np.dtype(np.int64)
_UINT8 = np.dtype(np.uint8)
_UINT64 = np.dtype(np.uint64)
_TOGETHER = (_INT64.itemsize,)
_I64S = ffi.typeof("int64_t[]")
_U64S = ffi.typeof("uint64_t[]")
_U8S = ffi.typeof("uint8_t[]")
_DESTS = ffi.typeof("uint8_t *[]")
_from_buffer = ffi.from_buffer
_NULL = ffi.NULL


def _empty(size: int) -> NDArray[np.uint8]:
    return np.empty(size, _UINT8)


class View:
    """What a reader needs to copy samples out of shared memory: the arena and the directory.

    Args:
        arena_address, arena_size: the mapping, which must outlive the view.
        segments: (address of the first entry, index of its sample, count), in rising order of
            index and without gaps from 0.
    """

    __slots__ = ("_alike", "_c", "_last_size", "_segments", "sample_count")

    def __init__(
        self, arena_address: int, arena_size: int, segments: Sequence[tuple[int, int, int]]
    ) -> None:
        self.sample_count = 0
        self._last_size = 0
        self._alike = False
        """Whether the last two batches took as many bytes."""
        self._segments = ffi.new("ffs_segment[]", len(segments))
        for segment, (address, first, count) in zip(self._segments, segments, strict=True):
            if first != self.sample_count or count < 0:
                raise UsageError("segments must follow each other from sample 0 without a gap")
            segment.entries = ffi.cast("ffs_entry *", address)
            segment.first = first
            segment.count = count
            self.sample_count += count
        self._c = ffi.new("ffs_view *")
        self._c.arena = ffi.cast("uint8_t *", arena_address)
        self._c.arena_size = arena_size
        self._c.segments = self._segments
        self._c.segment_count = len(segments)

    def locate(self, indices: Int64s) -> tuple[Int64s, Int64s, int]:
        """Look samples up.

        Args: indices: shape (n,), int64, contiguous; repeats are allowed.
        Returns: (offsets, missing, unknown). offsets (n + 1): running sum of the lengths, an
            unknown one counted as 0. missing: positions that cannot be read now. unknown: how
            many lengths are not known yet.
        Raises: SampleIndexError for an index outside of the view.
        Cost: one call, no lock; about 10-20 ns a sample.
        """
        n = len(indices)
        if indices.dtype != _INT64:
            indices = indices.astype(np.int64)
        out = np.empty(2 * n + 3, np.int64)
        c = _from_buffer(_I64S, out)
        missing = lib.ffs_locate(
            self._c,
            _from_buffer(_I64S, indices),
            n,
            c,
            c + (n + 1),
            c + (2 * n + 1),
            c + (2 * n + 2),
        )
        if missing < 0:
            index = int(indices[out[2 * n + 2]])
            raise SampleIndexError(f"there are {self.sample_count} samples", index=index)
        return out[: n + 1], out[n + 1 : n + 1 + missing], c[2 * n + 1]

    def gather(
        self,
        indices: Int64s,
        offsets: Int64s,
        buffer: NDArray[np.uint8] | None,
        dests: UInt64s | None = None,
        positions: Int64s | None = None,
    ) -> Int64s | None:
        """Copy samples out of the arena.

        Args:
            indices, offsets: as given to and got from ``locate``.
            buffer: sample k goes to buffer[offsets[k] : offsets[k + 1]]; None if dests are given.
            dests: addresses, one a sample, with room for it.
            positions: which samples to copy, each from 0 to n - 1; None for all.
        Returns: the positions that could not be read (ask the daemon for them), or None when
            a sample's length is not what ``offsets`` says: locate again.
        Raises: ReadError when the directory points outside of the arena, SampleIndexError for
            an index outside of the view.
        """
        n = len(indices)
        if len(offsets) != n + 1:
            raise UsageError("offsets must have one element more than indices")
        if indices.dtype != _INT64 or offsets.dtype != _INT64:
            raise UsageError("indices and offsets must be int64")
        if dests is not None:
            if len(dests) != n or dests.dtype != _UINT64:
                raise UsageError("dests must be one uint64 address a sample")
            to, tos = _NULL, _from_buffer(_DESTS, dests)
        elif buffer is None or buffer.nbytes < offsets[n]:
            raise UsageError("the buffer is smaller than the samples")
        else:
            to, tos = _from_buffer(_U8S, buffer, True), _NULL
        if positions is None:
            count, which = n, _NULL
        else:
            if positions.dtype != _INT64:
                raise UsageError("positions must be int64")
            count, which = len(positions), _from_buffer(_I64S, positions)
        left = np.empty(count, np.int64)
        rc = lib.ffs_gather(
            self._c,
            _from_buffer(_I64S, indices),
            _from_buffer(_I64S, offsets),
            to,
            tos,
            which,
            count,
            _from_buffer(_I64S, left),
        )
        if rc >= 0:
            return left[:rc]
        if rc == lib.FFS_ESTALE:
            return None
        if n and (int(indices.min()) < 0 or int(indices.max()) >= self.sample_count):
            raise SampleIndexError(f"there are {self.sample_count} samples")
        raise ReadError("the shared directory points outside of the arena")

    def copy_batch(
        self,
        indices: Int64s,
        out: NDArray[np.uint8] | None = None,
        empty: Callable[[int], NDArray[np.uint8]] = _empty,
    ) -> tuple[NDArray[np.uint8], Int64s] | None:
        """Copy a batch of which every sample can be read now: ``locate`` and ``gather`` in one.

        Args:
            indices: any array.
            out: uint8, contiguous, writable; used instead of a new buffer.
            empty: makes a new buffer of so many bytes.
        Returns: (buffer, offsets), the samples back to back. None when it is not as simple as
            that: ``locate`` and ``gather`` tell why.
        Cost: one call where a batch takes as much memory as the one before, else two. Where the two
            before were alike samples are looked up while others are copied.
        """
        if indices.dtype != _INT64 or indices.strides != _TOGETHER:
            return None
        n = len(indices)
        offsets = np.empty(n + 1, _INT64)
        which, edges = _from_buffer(_I64S, indices), _from_buffer(_I64S, offsets)
        if out is None:
            least = room = self._last_size  # a guess: also other threads have batches
            to = empty(room)
        else:
            least, room, to = 0, len(out), out
        copy, c, likely = lib.ffs_copy_batch, self._c, self._alike and self._last_size <= room
        rc = copy(c, which, n, edges, _from_buffer(_U8S, to), least, room, likely)
        if rc == 0 or rc == 1:
            total = edges[n]
            self._alike = total == self._last_size
            self._last_size = total
        if rc == 1 and out is None:
            room = edges[n]
            to = empty(room)
            rc = copy(c, which, n, edges, _from_buffer(_U8S, to), room, room, False)
        if rc:
            return None
        return to if out is None else to[: edges[n]], offsets

    def places(self, indices: Int64s) -> UInt64s:
        """Byte offset in the arena of each sample, NOWHERE where it cannot be read now.

        The samples must be pinned by a lease, or they may be gone at once.
        Raises: as ``gather``.
        """
        if indices.dtype != _INT64:
            indices = indices.astype(np.int64)
        out = np.empty(len(indices), np.uint64)
        rc = lib.ffs_places(
            self._c, _from_buffer(_I64S, indices), len(indices), _from_buffer(_U64S, out)
        )
        if rc >= 0:
            return out
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.sample_count):
            raise SampleIndexError(f"there are {self.sample_count} samples")
        raise ReadError("the shared directory points outside of the arena")


def addresses(arrays: Sequence[NDArray[np.uint8]]) -> UInt64s:
    """Return where the bytes of each array lie (a tenth of a microsecond an array)."""
    pointers = ffi.new(_DESTS, [_from_buffer(_U8S, array) for array in arrays])
    return np.frombuffer(ffi.buffer(pointers), np.uint64)


def retract(
    entries_address: int, firsts: Int64s, counts: Int64s, slots: UInt64s, sizes: UInt64s
) -> None:
    """Make entries unreadable before their slots are filled anew (the daemon's side).

    Args: for each k the entries [firsts[k], firsts[k] + counts[k]), of which those are meant
        whose payload starts within [slots[k], slots[k] + sizes[k]) of the arena.
    """
    if not len(firsts) == len(counts) == len(slots) == len(sizes):
        raise UsageError("firsts, counts, slots and sizes must be of one length")
    lib.ffs_retract(
        ffi.cast("ffs_entry *", entries_address),
        _from_buffer(_I64S, firsts),
        _from_buffer(_I64S, counts),
        _from_buffer(_U64S, slots),
        _from_buffer(_U64S, sizes),
        len(firsts),
    )


def publish(entries_address: int, entry: int, offset: int, length: int) -> None:
    """Make one sample readable whose bytes lie at ``offset`` of the arena already."""
    lib.ffs_publish(ffi.cast("ffs_entry *", entries_address) + entry, offset, length)


def publish_run(
    entries_address: int, first: int, base: int, starts: Int64s, lengths: Int64s
) -> None:
    """Make the samples [first, first + n) readable, whose payloads lie at ``base + starts``."""
    lib.ffs_publish_run(
        ffi.cast("ffs_entry *", entries_address),
        first,
        len(starts),
        base,
        _from_buffer(_I64S, starts),
        _from_buffer(_I64S, lengths),
    )
