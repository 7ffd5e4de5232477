"""Records in the page cache: finds them, and reads them in the calling thread.

The Python face of reading/cached.h.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bools, Bytes, Int32s, Int64s, UInt32s, UInt64s
from ffserve.engine.arrays import PartOfArrays, read_cached, read_joined
from ffserve.engine.core import I32S, I64S, NULL, U8S, U32S, U64S, ffi, from_buffer, lib
from ffserve.engine.shm import SMALL_SIZE, keep_freed_memory

_INT64 = np.dtype(np.int64)
_DESTS = ffi.typeof("uint8_t **")

REGION_BITS: int = lib.FFS_REGION_BITS
"""log2 of the bytes of a region of a file, which is read through the page cache or past it."""


class LocalTables:
    """The tables of a source that reads by itself, for one call per batch.

    The arrays must not be replaced while this object is in use; their content may change.

    Args:
        offsets: uint64[n], of payloads. lengths: uint32[n] or uint64[n]. checksums: uint32[n].
        firsts: int64[shards], the first sample of each shard. fds, kinds: int32[shards].
        seeds, limits: uint64[shards], see `ffs_through_cache`.
        in_memory: all files lie in memory.
        most_at_once: bytes of samples that one call may read.
    """

    def __init__(
        self,
        offsets: UInt64s,
        lengths: NDArray[Any],
        checksums: UInt32s,
        firsts: Int64s,
        fds: Int32s,
        kinds: Int32s,
        seeds: UInt64s,
        limits: UInt64s,
        *,
        in_memory: bool,
        most_at_once: int = 1 << 62,
    ) -> None:
        self._c: Any = ffi.new("ffs_local *")
        c = self._c
        short = lengths.dtype == np.uint32
        kept = {
            "offsets": from_buffer(U64S, offsets),
            "lengths": from_buffer(U32S, lengths) if short else NULL,
            "long_lengths": NULL if short else from_buffer(U64S, lengths),
            "checksums": from_buffer(U32S, checksums),
            "firsts": from_buffer(I64S, firsts),
            "fds": from_buffer(I32S, fds),
            "kinds": from_buffer(I32S, kinds),
            "seeds": from_buffer(U64S, seeds),
            "limits": from_buffer(U64S, limits),
        }
        for name, array in kept.items():
            setattr(c, name, array)
        c.sample_count, c.shard_count = len(offsets), len(firsts)
        c.in_memory, c.most_at_once = in_memory, most_at_once
        self._keep = kept
        address = int(ffi.cast("uintptr_t", c))
        self.arrays: Callable[[object], list[Bytes] | PartOfArrays | None]
        self.arrays = partial(read_cached, address)
        """Read samples that are in the page cache; see `arrays.read_cached`."""
        self._joined = partial(read_joined, address)
        keep_freed_memory()

    def batch(self, indices: object) -> tuple[Any, ...] | None:
        """Read samples that are in the page cache into one buffer; see `arrays.read_joined`."""
        return self._joined(indices, SMALL_SIZE)

    def edges(self, indices: NDArray[Any]) -> Int64s | None:
        """Return the running sums of the samples' lengths, int64[n + 1].

        Args: indices: any array. None is returned for one that is not contiguous int64, or if an
            index is outside of the tables.
        """
        contiguous = indices.strides == (8,) or indices.shape == (0,)
        if indices.dtype != _INT64 or not contiguous:
            return None
        edges = np.empty(len(indices) + 1, _INT64)
        which, to = from_buffer(I64S, indices), from_buffer(I64S, edges)
        return None if lib.ffs_local_edges(self._c, which, len(indices), to) else edges

    def read(self, indices: Int64s, edges: Int64s, to: Bytes | UInt64s) -> Int64s:
        """Read samples that are in the page cache, and verify them. Waits for no device.

        Args:
            indices, edges: as `edges` took and returned them.
            to: uint8[total], a buffer for all of them; or uint64[n], the address of each.
        Returns: the positions of those that are left to an engine, rising.
        """
        apart = to.dtype != np.uint8
        left = np.empty(len(indices), _INT64)
        count = lib.ffs_local_read(
            self._c,
            from_buffer(I64S, indices),
            len(indices),
            from_buffer(I64S, edges),
            NULL if apart else from_buffer(U8S, to),
            ffi.cast(_DESTS, from_buffer(to)) if apart else NULL,
            from_buffer(I64S, left),
        )
        return left[:count]

    @property
    def counters(self) -> tuple[int, int]:
        """Samples that were read here, and their bytes."""
        return self._c.count, self._c.size

    def close(self) -> None:
        """Read no more; wait for the threads that read, which wait for no device."""
        lib.ffs_local_close(self._c)

    def after_fork(self) -> None:
        """The threads that read are the parent's."""
        self._c.readers = 0

    def through_cache(self, shards: Int64s, offsets: Int64s) -> Bools:
        """Return which records are read through the page cache."""
        chosen = np.empty(len(shards), np.bool_)
        lib.ffs_through_cache(
            self._c,
            from_buffer(I64S, shards),
            from_buffer(I64S, offsets),
            len(shards),
            from_buffer(U8S, chosen.view(np.uint8)),
        )
        return chosen


def cached_pages(fd: int, offset: int, length: int) -> int:
    """Return how many pages of an extent are in the page cache.

    Raises: OSError with ENOSYS before Linux 6.5, with EPERM for a file that this process neither
        owns nor may write.
    """
    return _checked(lib.ffs_cached_pages(fd, offset, length))


def some_cached(fds: Int32s, begins: Int64s, ends: Int64s, samples: int, share: float) -> Bools:
    """Return of which extents of files more than a share seems to be in the page cache.

    Args: contiguous. samples: pages of each that are looked at, evenly spaced. share: of these.
    Returns: False where the kernel does not say, for the reasons that `cached_pages` names.
    """
    some = np.empty(len(fds), np.bool_)
    lib.ffs_some_cached(
        from_buffer(I32S, fds),
        from_buffer(I64S, begins),
        from_buffer(I64S, ends),
        len(fds),
        samples,
        share,
        from_buffer(U8S, some.view(np.uint8)),
    )
    return some


def cached_extents(fds: Int32s, begins: Int64s, ends: Int64s) -> Bools:
    """Return which extents of files are wholly in the page cache; False where the fd is -1.

    Args: contiguous.
    Raises: OSError, as `cached_pages`.
    """
    cached = np.empty(len(fds), np.bool_)
    _checked(
        lib.ffs_cached_extents(
            from_buffer(I32S, fds),
            from_buffer(I64S, begins),
            from_buffer(I64S, ends),
            len(fds),
            from_buffer(U8S, cached.view(np.uint8)),
        )
    )
    return cached


def _checked(rc: int) -> int:
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return int(rc)
