"""The files of a local source, and which of their records are read through the page cache.

Reads with O_DIRECT are the cheapest way to bytes that are not in memory, but a second epoch costs
as much as the first. The page cache keeps what it reads, so a second epoch over data that fit into
memory needs no disk. Where they do not fit, its replacement (least recently used) keeps almost
nothing of an epoch in random order: 15 % of data twice as large as memory, instead of half of them.
So a fixed share of the data goes through the page cache, as much as fits, and the rest past it. The
share consists of regions of 1 MiB that a hash chooses. It needs no state, all processes choose the
same regions, and those of a smaller share belong to every larger one.

Records of chosen regions are first looked for in the calling thread (`ffs_local_read`, which waits
for no device). An engine reads those that are not in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.disk.files import wrap_os_error
from ffserve.dtypes import Int32s, Int64s
from ffserve.engine.cached import LocalTables
from ffserve.engine.io import in_memory, open_direct
from ffserve.errors import UsageError
from ffserve.reads.records import BatchEngine
from ffserve.system.machine import free_memory

MOST_OF_FREE_MEMORY = 0.8
"""Part of the free memory that the share may fill."""
GAP = 64 << 10
"""Bytes between records that are read with them."""
AROUND = 32 << 10
"""A read through the page cache brings a block of so many bytes around a smaller record, so that an
epoch of small records in random order needs fewer reads of the device than there are records."""
SHARE_STEPS = 16
"""A share is a multiple of 1/16, so that processes which open the files one after another agree."""


def fitting_share(size: int) -> float:
    """Return which share of `size` bytes fits into free memory: 0 to 1, a multiple of 1/16."""
    if not size:
        return 1.0
    steps = int(MOST_OF_FREE_MEMORY * free_memory() / size * SHARE_STEPS)
    return min(steps, SHARE_STEPS) / SHARE_STEPS


@dataclass(slots=True)
class _File:
    path: str
    fd: int
    """Through the page cache."""
    seed: int
    in_memory: bool
    direct: int = -1
    """Past the page cache; -1: not opened."""
    alignment: int = 1


def _open_direct(file: _File) -> tuple[int, int]:
    return wrap_os_error(lambda _: open_direct(file.fd), file.path)


class ShardFiles:
    """The open files of a source.

    `add` each of them, then `choose_share`. Files that are never closed are closed with the last
    reference; a batch in flight holds one.
    """

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._attached: list[tuple[BatchEngine, Int32s]] = []
        self._finalizer = weakref.finalize(self, _close, self._files, self._attached)
        self._finalizer.atexit = False
        self.share = 1.0
        """Of the data that is read through the page cache."""

    def add(self, path: str, fd: int, fingerprint: int) -> None:
        """Take an open file; it is closed by `close`."""
        self._files.append(_File(path, fd, fingerprint, in_memory(fd)))
        # With O_NONBLOCK io_uring fails a read where it would wait.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def choose_share(self, share: float) -> None:
        """Open what a share needs. Raises: ReadError, AccessDenied."""
        self.share = share
        for file in self._files:
            if share < 1 and not file.in_memory:
                file.direct, file.alignment = _open_direct(file)

    def tables(
        self,
        offsets: NDArray[np.uint64],
        lengths: NDArray[Any],
        checksums: NDArray[np.uint32],
        firsts: Int64s,
        kinds: NDArray[np.int32],
        *,
        most_at_once: int = 1 << 62,
    ) -> LocalTables:
        """Return tables that read through the chosen share; see `LocalTables`."""
        limit = int(self.share * (1 << 32))
        always = [file.direct < 0 or file.alignment == 1 for file in self._files]
        return LocalTables(
            offsets,
            lengths,
            checksums,
            firsts,
            np.array([file.fd for file in self._files], np.int32),
            kinds,
            np.array([file.seed for file in self._files], np.uint64),
            np.array([1 << 32 if a else limit for a in always], np.uint64),
            in_memory=all(file.in_memory for file in self._files),
            most_at_once=most_at_once,
        )

    def fd(self, shard: int) -> int:
        """Return the descriptor of a file, without O_DIRECT."""
        return self._files[shard].fd

    def will_need(
        self, shards: Int64s, through: NDArray[np.bool_], starts: Int64s, sizes: Int64s
    ) -> None:
        """Begin to read records into the page cache, in large pieces; a hint.

        Args: of records in the order of the files: which are read through the page cache.
        """
        ends = starts + sizes
        apart = (starts[1:] - ends[:-1] > GAP) | (shards[1:] != shards[:-1])
        apart |= through[1:] != through[:-1]
        firsts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        lasts = np.append(firsts[1:], len(starts)) - 1
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if through[first]:
                begin = int(starts[first])
                size = int(ends[last]) - begin
                os.posix_fadvise(self.fd(int(shards[first])), begin, size, os.POSIX_FADV_WILLNEED)

    def attach(self, engine: BatchEngine) -> Int32s:
        """Add the files to an engine."""
        numbers = np.full((2, len(self._files)), -1, np.int32)
        self._attached.append((engine, numbers))
        for k, file in enumerate(self._files):
            # What the page cache keeps is wanted sooner or later: all of it, or a region.
            around = AROUND if self.share == 1 or file.alignment > 1 else 0
            numbers[:, k] = engine.add_file(file.fd, 1, around)
            if file.direct >= 0:
                numbers[0, k] = engine.add_file(file.direct, file.alignment)
        return numbers

    def after_fork(self) -> None:
        """This process is a child: the engines are the parent's."""
        self._attached.clear()

    def close(self) -> None:
        """Close all files; no read of them may be queued or in flight."""
        self._finalizer()


def _close(files: list[_File], attached: list[tuple[BatchEngine, Int32s]]) -> None:
    for engine, numbers in attached:
        with contextlib.suppress(UsageError):  # the engine is closed
            for number in set(numbers.ravel().tolist()) - {-1}:
                engine.remove_file(number)
    for file in files:
        for fd in {file.fd, file.direct} - {-1}:
            with contextlib.suppress(OSError):
                os.close(fd)
    attached.clear()
    files.clear()
