"""The node-wide tables: one entry a sample of every open shard.

Three arrays run in parallel, addressed by a sample's node-wide number: the *directory* (seqlock,
place in the arena, length: 16 bytes, `ffs_entry` in engine/shm.h), the *index* (payload offset
in the file, 8 bytes; expected checksum, 4 bytes), and the daemon's own `slot_of` (4 bytes). The
first two are memfds that clients map read-only. They are sized for the whole node at once and take
memory only where shards lie, so they never move and never grow under a client's mapping. A shard
owns one run of numbers; runs of shards opened together lie together, so a data set of 10,000 shards
is usually one run to its clients.
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.shm import SharedMemory, private_zeros
from ffserve.errors import ReadError
from ffserve.formats.base import UNKNOWN_LENGTH

ENTRY_DTYPE = np.dtype([("seq", "<u4"), ("length_low", "<u4"), ("place", "<u8")])
CAPACITY = 1 << 32
"""Samples of all shards that a node has open: 64 + 48 GiB of address space, none of memory."""
_SMALLEST_CAPACITY = 1 << 22


class Directory:
    """The shared tables and who owns which run of them.

    Args: capacity: samples; halved while the address space refuses it.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        while True:
            try:
                self.entries_memory = SharedMemory("ffserve-directory", capacity * 16)
                self.index_memory = SharedMemory("ffserve-index", capacity * 12)
                self.slot_of = private_zeros(capacity, np.dtype(np.int32))
                break
            except (ReadError, OSError):
                if capacity <= _SMALLEST_CAPACITY:
                    raise
                capacity //= 2
        self.capacity = capacity
        self.entries = self.entries_memory.array.view(ENTRY_DTYPE)
        self._length_low: NDArray[np.uint32] = self.entries["length_low"]
        self._long = False
        self.offsets: NDArray[np.uint64] = self.index_memory.array[: capacity * 8].view(np.uint64)
        self.checksums: NDArray[np.uint32] = self.index_memory.array[capacity * 8 :].view(np.uint32)
        self._unused = 0
        """Numbers from here on were never given out."""
        self._free: list[tuple[int, int]] = []

    def reserve(self, count: int) -> int:
        """Take a run of `count` numbers; return the first.

        Numbers are given out anew only when all have been used: a client that was cut off and
        does not know it yet would find another shard's samples under them.

        Raises: ReadError when no run is long enough.
        """
        if self._unused + count <= self.capacity:
            self._unused += count
            return self._unused - count
        self._put_back(self._unused, self.capacity - self._unused)
        self._unused = self.capacity
        for k, (start, room) in enumerate(self._free):
            if room >= count:
                self._free[k] = (start + count, room - count)
                if room == count:
                    del self._free[k]
                return start
        raise ReadError(
            f"the node-wide tables have no room for another {count} samples",
            hint="restart the daemon, or open fewer data sets at once",
        )

    def release(self, start: int, count: int) -> None:
        """Give a run back and its memory to the kernel. Nobody may look at it any more."""
        if count == 0:
            return
        self.entries_memory.discard(start * 16, count * 16)
        self.index_memory.discard(start * 8, count * 8)
        self.index_memory.discard(self.capacity * 8 + start * 4, count * 4)
        self.slot_of[start : start + count] = 0
        self._put_back(start, count)

    def _put_back(self, start: int, count: int) -> None:
        if count == 0:
            return
        k = bisect.bisect(self._free, (start, count))
        self._free.insert(k, (start, count))
        self._merge(k)
        self._merge(k - 1)

    def _merge(self, k: int) -> None:
        if 0 <= k < len(self._free) - 1:
            (start, room), (following, more) = self._free[k], self._free[k + 1]
            if start + room == following:
                self._free[k : k + 2] = [(start, room + more)]

    def set_lengths(self, start: int, lengths: NDArray[np.uint64]) -> None:
        """Write the lengths of a shard's samples, all known or none, into unreadable entries."""
        run = self.entries[start : start + len(lengths)]
        if len(lengths) and int(lengths[0]) == UNKNOWN_LENGTH:
            # Records in chunks: nobody asks for their lengths here, so `_long` need not be set.
            assert (lengths == UNKNOWN_LENGTH).all()
            run["length_low"], run["place"] = 0xFFFFFFFF, 0xFFFF << 48
            return
        assert not len(lengths) or int(lengths.max()) < UNKNOWN_LENGTH, "see bound_lengths"
        run["length_low"] = lengths.astype(np.uint32)
        if len(lengths) and int(lengths.max()) >> 32:
            self._long = True
            run["place"] = lengths >> np.uint64(32) << np.uint64(48)

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return lengths in bytes, int64[n]."""
        if not self._long:
            return self._length_low[numbers].astype(np.int64)
        entries = self.entries[numbers]
        low = entries["length_low"].astype(np.int64)
        return low | ((entries["place"] >> np.uint64(48)).astype(np.int64) << 32)

    def longest(self, start: int, count: int) -> int:
        """Return the bytes of the longest of a run of samples whose lengths are known."""
        if not self._long:
            return int(self._length_low[start : start + count].max(initial=0))
        return int(self.lengths(np.arange(start, start + count)).max(initial=0))

    @property
    def end(self) -> int:
        """Numbers from here on were never given out."""
        return self._unused

    def close(self) -> None:
        """Unmap everything."""
        del self.entries, self._length_low, self.offsets, self.checksums, self.slot_of
        self.entries_memory.close()
        self.index_memory.close()
