"""The files of a local source: their tables, and which records are read through the page cache.

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
import logging
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.dataset.layout import Layout, ShardInfo, combined_fingerprint
from ffserve.disk.files import wrap_os_error
from ffserve.disk.shardfile import Contradiction, FileState, contradicted
from ffserve.dtypes import Int32s, Int64s
from ffserve.engine.cached import LocalTables
from ffserve.engine.io import in_memory, open_direct
from ffserve.errors import Failure, FFServeError, UsageError
from ffserve.formats.base import UNKNOWN_LENGTH
from ffserve.reads.records import BatchEngine
from ffserve.reads.shard_tables import Tables, enter
from ffserve.system.machine_memory import free_memory

log = logging.getLogger("ffserve")

MOST_OF_FREE_MEMORY = 0.8
"""The share may fill this part of the free memory."""
GAP = 64 << 10
"""Records with at most this many bytes between them are read together."""
AROUND = 32 << 10
"""A read through the page cache brings a block of this many bytes around a smaller record, so that
an epoch of small records in random order needs fewer reads of the device than there are records."""
SHARE_STEPS = 16
"""A share is a multiple of 1/16, so that processes which open the files one after another agree."""


def fitting_share(size: int, free: int | None = None) -> float:
    """Return which share of `size` bytes fits into free memory: 0 to 1, a multiple of 1/16.

    Args: free: free memory, in bytes; None: that of the machine.
    """
    if not size:
        return 1.0
    free = free_memory() if free is None else free
    steps = int(MOST_OF_FREE_MEMORY * free / size * SHARE_STEPS)
    return min(steps, SHARE_STEPS) / SHARE_STEPS


class SampleTables:
    """Where the samples of a source are in its files.

    offsets, lengths, checksums: by sample, of the payload in its file; lengths in u32 where they
    fit. held: lengths of the memory for samples, 0 for those beyond the end of a file. truncated:
    whether there are such samples. sizes, kinds, in_chunks: by shard: bytes of the file, kind of
    the checksums, whether the records are in chunks. chunked: these shards by number.

    Args: parsed, paths: of the files. verify: whether checksums are compared.
    """

    def __init__(self, parsed: list[Tables], paths: list[str], *, verify: bool) -> None:
        self.sizes = np.array([tables.size for tables in parsed], np.uint64)
        self.kinds = np.array([t.kind if verify else 0 for t in parsed], np.int32)
        self.chunked = {k: t.chunked for k, t in enumerate(parsed) if t.chunked is not None}
        self.in_chunks = np.array([k in self.chunked for k in range(len(parsed))], np.bool_)
        self.layout = Layout(np.array([tables.count for tables in parsed], np.int64))
        count, firsts = self.layout.count, self.layout.firsts.tolist()
        self.offsets = np.empty(count, np.uint64)
        self.checksums = np.empty(count, np.uint32)
        short = not self.chunked and int(self.sizes.max()) < (1 << 32) - 1
        self.lengths: NDArray[Any] = np.empty(count, np.uint32 if short else np.uint64)
        enter(parsed, firsts[:-1], paths, self)
        self.truncated = any(tables.truncated for tables in parsed)
        self.held = self.lengths
        if self.truncated:
            self.held = self.lengths.copy()
            self.held[self.cut(np.arange(count))] = 0
        self.shards = [
            ShardInfo(
                t.single.path if t.single else path,
                t.format,
                t.count,
                first,
                t.size,
                t.fingerprint,
            )
            for path, t, first in zip(paths, parsed, firsts, strict=False)
        ]
        self.fingerprint = combined_fingerprint(
            np.array([t.fingerprint for t in parsed], np.uint64)
        )

    def set_lengths(self, start: int, lengths: NDArray[np.uint64]) -> None:
        """Enter lengths from a sample on."""
        self.lengths[start : start + len(lengths)] = lengths

    def learned(self, shard: int, chunk: int, lengths: Int64s) -> None:
        """Enter the lengths of the records of a chunk. Any thread."""
        first = int(self.layout.firsts[shard] + self.chunked[shard].chunks.firsts[chunk])
        self.lengths[first : first + len(lengths)] = lengths

    def shard_of(self, index: int) -> int:
        """Return the shard of a sample."""
        return int(self.layout.shards(np.array([index], np.int64))[0])

    def cut(self, indices: Int64s) -> Int64s:
        """Return the positions of samples that reach beyond the end of their files."""
        if not self.truncated:
            return indices[:0]
        lengths = self.lengths[indices]
        ends = self.offsets[indices] + lengths
        return np.flatnonzero((lengths > 0) & (ends > self.sizes[self.layout.shards(indices)]))

    def estimate(self, indices: Int64s) -> Int64s:
        """Return lengths in bytes, a guess where one is not known; never reads."""
        sizes = self.lengths[indices].astype(np.int64)
        unknown = np.flatnonzero(sizes == UNKNOWN_LENGTH) if self.chunked else sizes[:0]
        if len(unknown):
            means = np.array(
                [
                    int(self.chunked[k].chunks.sizes.sum()) // max(shard.count, 1)
                    if k in self.chunked
                    else 0
                    for k, shard in enumerate(self.shards)
                ],
                np.int64,
            )
            sizes[unknown] = means[self.layout.shards(indices[unknown])]
        return sizes

    def of_shard(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of a shard's payload offsets, lengths and checksums."""
        run = slice(int(self.layout.firsts[shard]), int(self.layout.firsts[shard + 1]))
        lengths = self.lengths[run].astype(np.uint64)
        return self.offsets[run].copy(), lengths, self.checksums[run].copy()


@dataclass(slots=True)
class _File:
    path: str
    fd: int
    """Through the page cache."""
    device: int
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

    def add(
        self, path: str, fd: int, device: int, fingerprint: int, *, remote: bool = False
    ) -> None:
        """Take an open file, which is on this device; it is closed by `close`.

        Args: remote: its bytes are fetched, so the kernel is told nothing of how it is read.
        """
        if remote:
            self._files.append(_File(path, fd, device, fingerprint, in_memory=True))
            return
        self._files.append(_File(path, fd, device, fingerprint, in_memory(fd)))
        # With O_NONBLOCK io_uring fails a read where it would wait.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def choose_share(self, share: float) -> None:
        """Open what a share needs. Raises: ReadError, AccessDenied."""
        self.share = share
        for file in self._files:
            if share < 1 and not file.in_memory:
                file.direct, file.alignment = _open_direct(file)

    def tables(self, samples: SampleTables, *, most_at_once: int = 1 << 62) -> LocalTables:
        """Return tables that read through the chosen share; see `LocalTables`."""
        limit = int(self.share * (1 << 32))
        always = [file.direct < 0 or file.alignment == 1 for file in self._files]
        return LocalTables(
            samples.offsets,
            samples.held,
            samples.checksums,
            samples.layout.firsts[:-1],
            np.array([file.fd for file in self._files], np.int32),
            samples.kinds,
            np.array([file.seed for file in self._files], np.uint64),
            np.array([1 << 32 if a else limit for a in always], np.uint64),
            in_memory=all(file.in_memory for file in self._files),
            most_at_once=most_at_once,
        )

    def fd(self, shard: int) -> int:
        """Return the descriptor of a file, without O_DIRECT."""
        return self._files[shard].fd

    def devices(self) -> dict[int, int | None]:
        """Return which device each descriptor's file is on."""
        return {fd: file.device for file in self._files for fd in {file.fd, file.direct} - {-1}}

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


class FileFaults:
    """What was found wrong with the files of a source since they were opened.

    Args:
        states: what each file was then, and `Tables.scanned`.
        remote: shards that are read by ranges: this machine has nothing of them.
    """

    def __init__(
        self,
        states: list[tuple[FileState, str | None]],
        samples: SampleTables,
        files: ShardFiles,
        remote: frozenset[int],
    ) -> None:
        self._states, self._samples, self._files, self._remote = states, samples, files, remote
        self._contradictions: dict[int, Contradiction] = {}
        """By shard, once one was found."""
        self._warned: set[int] = set()

    def read_wrong(self, shard: int) -> None:
        """Tell once that a file was read wrong, unless it has changed meanwhile. Any thread."""
        state, _ = self._states[shard]
        if shard in self._warned or state.has_changed(self._files.fd(shard)):
            return
        self._warned.add(shard)
        path = self._samples.shards[shard].path
        if shard in self._remote:
            log.warning(
                "%s came wrong once from its origin, and right the second time: check the network "
                "and the memory",
                path,
            )
        else:
            log.warning(
                "%s was read wrong once, and right the second time: check the disk, its cable and "
                "the memory",
                path,
            )

    def named(self, index: int, failure: Failure) -> FFServeError:
        """Return the error of a sample that could not be read."""
        samples = self._samples
        extent = int(samples.offsets[index]), int(samples.lengths[index])
        error = failure.named(samples.shards[samples.shard_of(index)].path, index, *extent)
        return self.explained(error, index, (*extent, int(samples.checksums[index])))

    def explained(
        self, error: FFServeError, index: int, record: tuple[int, int, int] = (0, 0, 0)
    ) -> FFServeError:
        """Return the error that says why, if the file has changed or its index file was stale.

        Args: record: offset, length and checksum of the sample; zeros for one in a chunk.
        """
        shard = self._samples.shard_of(index)
        if shard in self._remote:
            return error
        why = self._contradictions.get(shard)
        if why is None:
            state, scanned = self._states[shard]
            path, chunked = self._samples.shards[shard].path, self._samples.chunked.get(shard)
            fd = self._files.fd(shard)
            why = state.contradiction(error, fd, path, scanned, record, chunked, "own")
            if why is None:
                return error
            self._contradictions[shard] = why
        return contradicted(error, why)


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
