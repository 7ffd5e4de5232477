"""Extents of files read as they stand into memory of the caller's, for whoever decodes them.

Memory that is allocated anew for each extent would have every page of it zeroed first, hence
``Spares``.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.io import Batch, Engine
from ffserve.engine.shm import NOWHERE

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]

PIECE_SIZE = 256 << 10
"""What memory is rounded up to."""


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
        sizes = ends - begins
        assert int(sizes.sum()) <= len(raw)
        self.batch: Batch = engine.batch(len(begins), len(begins))
        reads, records = self.batch.reads, self.batch.records
        reads["offset"] = records["offset"] = begins
        reads["length"] = records["length"] = sizes
        reads["slot"] = records["entry"] = NOWHERE
        reads["file"] = files
        reads["first_record"] = np.arange(len(begins))
        reads["record_count"] = 1
        records["dest"] = raw.__array_interface__["data"][0] + np.cumsum(sizes) - sizes
        self.batch.keep = raw

    def statuses(self) -> list[int]:
        """Return each extent's status once the batch has ended. Frees the batch."""
        found: list[int] = self.batch.records["status"].tolist()
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
