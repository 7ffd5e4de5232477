"""What the page cache holds of the daemon's files: such blocks are read from there.

Direct I/O on a file that was just written or copied first writes its dirty pages to the disk, and
then reads from the disk what is in memory already. So a shard of which some is in the page cache
when it is opened is opened a second time, without O_DIRECT, and its blocks are asked about before
they are read (cachestat, Linux 6.5: 1 us a block). A block is read either way, never both. When
less than 1 % of a shard's blocks were found lately, only one load in 64 still asks.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.cached import cached_extents, cached_pages

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

SAMPLED_COUNT = 256
"""Pages of a file that are asked about when it is opened."""
SMALLEST_SHARE = 0.01
"""Share of a file's blocks in the page cache below which they are not asked about."""
ASKED_EVERY = 64
"""Loads, of which one asks nevertheless."""
REMEMBERED_COUNT = 64
"""Blocks after which what was found counts half."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def open_cached(fd: int, begin: int, end: int) -> int:
    """Open a file again, through the page cache, if some of it is there; else return -1.

    It is -1, too, if the kernel does not say what is there: before Linux 6.5, on a file that this
    user neither owns nor may write (Linux 6.14), and if this user may not open the file.

    Args: fd: of the file, with or without O_DIRECT. begin, end: of its samples in it.
    """
    places = range(begin, end, max((end - begin) // SAMPLED_COUNT, _PAGE))
    try:
        if sum(cached_pages(fd, place, 1) for place in places) <= SMALLEST_SHARE * len(places):
            return -1
        plain = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)
    return plain


class CachedFiles:
    """The files of one engine that are open a second time, by their number in it."""

    def __init__(self) -> None:
        self._fds = np.zeros(0, np.int32)
        self._numbers = np.zeros(0, np.int32)
        self._shares = np.zeros(0)
        """Of the blocks of each file that were found lately; REMEMBERED_COUNT weighs the past."""
        self.count = 0
        """Files that are open a second time."""
        self._loads = 0

    def add(self, file: int, fd: int, number: int) -> None:
        """Add a file.

        Args: fd, number: its descriptor and number for reads through the page cache; -1: none.
        """
        more = max(file, number) + 1 - len(self._fds)
        if more > 0:
            more += len(self._fds)
            self._fds = np.append(self._fds, np.full(more, -1, np.int32))
            self._numbers = np.append(self._numbers, np.full(more, -1, np.int32))
            self._shares = np.append(self._shares, np.zeros(more))
        self._fds[file], self._numbers[file], self._shares[file] = fd, number, 1.0
        self.count += number >= 0

    def remove(self, file: int) -> int:
        """Remove a file; return its number for reads through the page cache, -1 for none."""
        number = int(self._numbers[file])
        self._fds[file] = self._numbers[file] = -1
        self.count -= number >= 0
        return number

    def numbers(self, files: Int32s) -> Int32s:
        """Return the numbers of files for reads through the page cache."""
        return self._numbers[files]

    def find(self, files: Int32s, begins: Int64s, ends: Int64s) -> NDArray[np.bool_] | None:
        """Return which extents of files are in the page cache; None: none of them."""
        if not self.count:
            return None
        self._loads += 1
        fds = self._fds[files]
        if self._loads % ASKED_EVERY:
            fds[self._shares[files] < SMALLEST_SHARE] = -1
        asked = fds >= 0
        if not asked.any():
            return None
        try:
            found = cached_extents(fds, begins, ends)
        except OSError:  # of these files the kernel says no more
            self._fds[files[asked]] = -1
            return None
        self._remember(files[asked], found[asked])
        return found if found.any() else None

    def _remember(self, files: Int32s, found: NDArray[np.bool_]) -> None:
        asked = np.bincount(files, minlength=len(self._fds))
        hits = np.bincount(files, found, minlength=len(self._fds))
        weight = REMEMBERED_COUNT / (REMEMBERED_COUNT + asked)
        shares = hits / np.maximum(asked, 1)
        self._shares = weight * self._shares + (1 - weight) * shares
