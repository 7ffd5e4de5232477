"""Extents of files read as they stand into memory of the caller's, for whoever decodes them.

An extent is read in pieces that fit the buffers which the engine keeps. For a larger read it maps
memory, every page of which has to be zeroed first; so has memory that is allocated anew for each
extent, hence ``Spares``. Pieces meet where blocks of the device do, so that none is read twice.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.ring import Batch, Engine
from ffserve.engine.view import NOWHERE

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]

PIECE_SIZE = 256 << 10
"""FFS_BOUNCE_SIZE of the C core."""
_BLOCK_SIZE = 4096


class Extents:
    """A batch of reads that fills ``raw`` with extents of files, one after the other.

    Args:
        engine: reads them; `batch` is to be submitted to it.
        files: number of each one's file.
        begins, ends: int64[n], in the files.
        raw: uint8, as many bytes as all have together; kept until the batch is freed.
    """

    def __init__(
        self, engine: Engine, files: NDArray[np.int32], begins: Int64s, ends: Int64s, raw: Bytes
    ) -> None:
        lows = begins // _BLOCK_SIZE * _BLOCK_SIZE
        counts = np.maximum(-((lows - ends) // PIECE_SIZE), 1)
        self._firsts = np.cumsum(counts) - counts
        extent = np.repeat(np.arange(len(begins)), counts)
        piece = np.arange(len(extent)) - self._firsts[extent]
        starts = lows[extent] + piece * PIECE_SIZE
        offsets = np.maximum(starts, begins[extent])
        sizes = np.minimum(starts + PIECE_SIZE, ends[extent]) - offsets
        assert int(sizes.sum()) <= len(raw)
        self.batch: Batch = engine.batch(len(extent), len(extent))
        reads, records = self.batch.reads, self.batch.records
        reads["offset"] = records["offset"] = offsets
        reads["length"] = records["length"] = sizes
        reads["slot"] = records["entry"] = NOWHERE
        reads["file"] = files[extent]
        reads["first_record"] = np.arange(len(extent))
        reads["record_count"] = 1
        records["dest"] = raw.__array_interface__["data"][0] + np.cumsum(sizes) - sizes
        self.batch.keep = raw

    def statuses(self) -> list[int]:
        """Return each extent's status once the batch has ended: 0, or that of a piece that failed.

        Frees the batch.
        """
        found: list[int] = np.minimum.reduceat(self.batch.records["status"], self._firsts).tolist()
        self.batch.free()
        return found


class Spares:
    """Memory that is used again and again, from any thread.

    Args: most: bytes that are kept while nobody uses them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: list[Bytes] = []

    def take(self, size: int) -> Bytes:
        """Return memory of `size` bytes or somewhat more, with anything in it."""
        with self._lock:
            for k, memory in enumerate(self._kept):
                if size <= len(memory) <= 2 * size + PIECE_SIZE:
                    return self._kept.pop(k)
        return np.empty(-(-size // PIECE_SIZE) * PIECE_SIZE, np.uint8)

    def give(self, memory: Bytes) -> None:
        """Take memory back that nothing refers to any more."""
        with self._lock:
            self._kept.append(memory)
            while sum(map(len, self._kept)) > self._most:
                del self._kept[0]
