"""Requests of /dev/fuse: those that can be answered from the arena are answered in C.

The Python face of memory/fuse.h.
"""

from __future__ import annotations

import os

import numpy as np

from ffserve.dtypes import Int64s
from ffserve.engine.core import I64S, NULL, U8S, ffi, from_buffer, lib
from ffserve.engine.shm import MappedView


class Requests:
    """The requests that one thread takes.

    Args:
        device: descriptor of /dev/fuse.
        samples: int64[n], of node k + 1 the sample that it is, or -1.
        first_node: the node of sample 0, among those that follow from numbers.
        request_size: bytes of the longest request. content_size: of the longest answer.
        hit_count: `next` returns after so many hits.
    """

    def __init__(
        self,
        device: int,
        samples: Int64s,
        first_node: int,
        *,
        request_size: int,
        content_size: int,
        hit_count: int = 64,
    ) -> None:
        self.buffer = np.empty(request_size, np.uint8)
        """The request that `next` has returned."""
        self._content = np.empty(content_size, np.uint8)
        self._hits = np.empty(hit_count, np.int64)
        self._c = c = ffi.new("ffs_fuse *")
        c.device, c.first_node = device, first_node
        # The C structure borrows the arrays, so the views of them are kept.
        self._kept = [
            from_buffer(I64S, samples), from_buffer(U8S, self.buffer),
            from_buffer(U8S, self._content), from_buffer(I64S, self._hits),
        ]  # fmt: skip
        c.samples, c.request, c.content, c.hits = self._kept
        c.named_count, c.request_size = len(samples), request_size
        c.content_size, c.hits_room = content_size, hit_count

    def next(self, view: MappedView | None) -> int:
        """Wait for a request that cannot be answered from memory.

        Args: view: of the samples; None: none is in memory.
        Returns: its size; 0: so many samples were read that the caller should take `hits`.
        Raises: OSError: of read(2).
        """
        size: int = lib.ffs_fuse_next(self._c, NULL if view is None else view.c)
        if size < 0:
            raise OSError(-size, os.strerror(-size))
        return size

    def take_hits(self) -> tuple[Int64s, int]:
        """Return the samples that were read from memory since the last call, and their bytes."""
        c = self._c
        found = self._hits[: c.hit_count].copy(), int(c.hit_size)
        c.hit_count = c.hit_size = 0
        return found
