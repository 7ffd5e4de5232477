"""The Python face of blocks.c: from samples to blocks, from neighbouring extents to reads.

Pure functions over arrays; nothing is read here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

ROWS: int = lib.FFS_BLOCK_ROWS
"""Rows of a table of blocks, int64[ROWS, n]: number of the first sample, number of samples, begin
and end in the file, size widened to the file's alignment, shard."""

_I64S = ffi.typeof("int64_t[]")
_I32S = ffi.typeof("int32_t[]")
_from_buffer = ffi.from_buffer


class Shards:
    """The tables of open shards, and those of their samples.

    Args: addresses of the directory's entries, of the payloads' offsets and of the checksums, and
        how many samples these have; the memory must outlive this object.
    """

    def __init__(self, entries: int, offsets: int, checksums: int, sample_count: int) -> None:
        self.c: Any = ffi.new("ffs_shards *")
        self.c.entries = ffi.cast("ffs_entry *", entries)
        self.c.offsets = ffi.cast("uint64_t *", offsets)
        self.c.checksums = ffi.cast("uint32_t *", checksums)
        self.c.sample_count = sample_count
        self._keep: list[Any] = []

    def follow(
        self,
        bases: Int64s,
        counts: Int64s,
        alignments: Int64s,
        shifts: Int64s,
        files: Int32s,
        kinds: Int32s,
        used: Int64s,
        singly: Int64s,
    ) -> None:
        """Take over the tables of shards, one element each, bases rising.

        Args:
            counts: samples. alignments: powers of two. shifts: 1 << shift samples make a block.
            used: bytes of slots, which `count` changes.
            singly: first samples, rising, of blocks that are not shared.
        """
        c = self.c
        c.shard_count, c.singly_count = len(bases), len(singly)
        wide = {
            "bases": bases,
            "counts": counts,
            "alignments": alignments,
            "shifts": shifts,
            "used": used,
            "singly": singly,
        }
        kept = {name: _from_buffer(_I64S, array) for name, array in wide.items()}
        kept |= {
            name: _from_buffer(_I32S, array) for name, array in (("files", files), ("kinds", kinds))
        }
        for name, pointer in kept.items():
            setattr(c, name, pointer)
        self._keep = list(kept.values())

    def blocks(self, numbers: Int64s, largest: int) -> Int64s:
        """Return the block of each sample, int64[ROWS, n]; a sample alone where its block would
        have more than `largest` bytes."""
        table = np.empty((ROWS, len(numbers)), np.int64)
        rc = lib.ffs_blocks(
            self.c, _from_buffer(_I64S, numbers), len(numbers), largest, _from_buffer(_I64S, table)
        )
        assert rc == 0, "samples are those of open shards"
        return table

    def count(self, numbers: Int64s, sizes: Int64s, sign: int) -> None:
        """Slots with these samples, of `sizes` bytes, are taken (1) or given back (-1)."""
        rc = lib.ffs_shards_count(
            self.c, _from_buffer(_I64S, numbers), _from_buffer(_I64S, sizes), len(numbers), sign
        )
        assert rc == 0, "samples are those of open shards"
