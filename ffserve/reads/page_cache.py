"""Page cache: finds the blocks of open files that it holds, so that they are read from it.

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

from ffserve.dtypes import Int32s, Int64s
from ffserve.engine.cached import cached_extents, some_cached
from ffserve.engine.many_files import open_again

SAMPLED_COUNT = 256
"""Opening a file asks the kernel about this many of its pages."""
SMALLEST_SHARE = 0.01
"""Share of a file's blocks in the page cache below which they are not asked about."""
ASKED_EVERY = 64
"""One load in this many asks nevertheless."""
REMEMBERED_COUNT = 64
"""After this many blocks, an earlier result has half its weight."""


def open_cached(fds: Int32s, begins: Int64s, ends: Int64s) -> Int32s:
    """Open files that are partly in the page cache a second time, through it; return their
    descriptors, -1 for others.

    It is -1, too, if the kernel does not say what is there: before Linux 6.5, on a file that this
    user neither owns nor may write (Linux 6.14), and if this user may not open the file.

    Args: fds: of the files, with or without O_DIRECT. begins, ends: of the samples in each.
    """
    opened = np.full(len(fds), -1, np.int32)
    left = np.flatnonzero(some_cached(fds, begins, ends, SAMPLED_COUNT, SMALLEST_SHARE))
    while len(left):
        again, failed = open_again(fds[left], os.O_RDONLY | os.O_CLOEXEC)
        opened[left[: len(again)]] = again
        left = left[len(again) + 1 :] if failed is not None else left[:0]
    for fd in opened[opened >= 0].tolist():
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return opened


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

    def add(self, files: Int32s, fds: Int32s, numbers: Int32s) -> None:
        """Add files.

        Args: fds, numbers: their descriptors and numbers for reads through the page cache; -1:
            none.
        """
        more = int(max(files.max(), numbers.max())) + 1 - len(self._fds)
        if more > 0:
            more += len(self._fds)
            self._fds = np.append(self._fds, np.full(more, -1, np.int32))
            self._numbers = np.append(self._numbers, np.full(more, -1, np.int32))
            self._shares = np.append(self._shares, np.zeros(more))
        self._fds[files], self._numbers[files], self._shares[files] = fds, numbers, 1.0
        self.count += int((numbers >= 0).sum())

    def remove(self, file: int) -> int:
        """Remove a file; return its number for reads through the page cache, -1 for none."""
        number = int(self._numbers[file])
        self._fds[file] = self._numbers[file] = -1
        self.count -= number >= 0
        return number

    def numbers(self, files: Int32s) -> Int32s:
        """Return the numbers of files for reads through the page cache."""
        return self._numbers[files]

    def chosen(self, files: Int32s, begins: Int64s, ends: Int64s) -> Int32s:
        """Return the number by which each extent is read: that of the second descriptor if it is in
        the page cache."""
        found = self.find(files, begins, ends)
        return files if found is None else np.where(found, self._numbers[files], files)

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
