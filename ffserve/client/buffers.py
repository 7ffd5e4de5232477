"""Memory for batches, kept when it is freed.

Fresh memory costs up to three times what copying into it does: the kernel zeroes every page of it.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np
from numpy.typing import NDArray

SMALL_SIZE = (32 << 20) - (64 << 10)
"""Bytes up to which malloc keeps what is freed."""
MOST_KEPT = 512 << 20
"""Bytes of a larger buffer that is kept for the next batch."""

_UINT8 = np.dtype(np.uint8)
_asked = False
_spare: list[mmap.mmap] = []


def keep_freed_memory() -> None:
    """Have malloc keep what batches give back, once a process.

    glibc maps blocks of 128 KiB and more anew each time, and gives the top of its heap back to the
    kernel beyond as much. Freeing one large block raises both limits, to its size and to twice its
    size (mallopt(3), M_MMAP_THRESHOLD: the dynamic threshold, 32 MiB at most). The block is never
    touched, so it costs nothing.
    """
    global _asked
    if not _asked:
        _asked = True
        np.empty(SMALL_SIZE, np.uint8)


def empty(size: int) -> NDArray[np.uint8]:
    """Return uint8[size] with anything in it.

    The memory of the last large one that was freed, with all its views, is used again, or stays as
    it is until another is freed; so a loop over large batches works in two.
    """
    if size <= SMALL_SIZE:
        if not _asked:
            keep_freed_memory()
        return np.empty(size, _UINT8)
    memory = _take(size)
    if memory is None:
        return np.empty(size, np.uint8)
    buffer = np.frombuffer(memory, np.uint8, size)
    weakref.finalize(buffer, _give, memory).atexit = False
    return buffer


def _take(size: int) -> mmap.mmap | None:
    # A finalizer may run at any moment, in any thread: no lock, each step by itself is atomic.
    with contextlib.suppress(IndexError):
        memory = _spare.pop()
        if size <= len(memory) <= 2 * size:
            return memory
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give(memory: mmap.mmap) -> None:
    if len(memory) <= MOST_KEPT:
        _spare[:] = [memory]
