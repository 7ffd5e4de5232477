"""Scrubbing: an idle daemon reads the files that jobs have open, and compares checksums.

So damage is found before a job meets it. A thread reads a piece of a file past the page cache and
checks it. Then scrubbing pauses for as long as the rate demands, and for as long as there are
requests or reads. A wrong sample is read again (`reads/second_read.py`); if it is wrong again, it
is reported and counted like a damaged sample that a job asked for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from ffserve.cache.cache import Cache
from ffserve.cache.tables import Directory
from ffserve.dtypes import Int64s
from ffserve.engine.codec import checksums
from ffserve.errors import STATUS_TRUNCATED, FFServeError, ReadError, status_error
from ffserve.reads.second_read import extent_checksum, other_paths, read_extent, right_status, whole
from ffserve.server.files.catalog import Catalog
from ffserve.server.files.explaining import explained, look
from ffserve.server.files.shards import OpenShard
from ffserve.server.users.threads import in_thread

log = logging.getLogger("ffserve")

PIECE_COUNT, PIECE_SIZE = 4096, 1 << 20
"""A piece has at most this many samples, and this many bytes unless one sample or chunk is
larger."""
LEAST_SIZE = 64 << 10
"""A piece counts as this many bytes at least, since a read of fewer bytes takes as long."""
MOST_GAP = 64 << 10
"""A piece ends where more bytes than this lie between two samples."""
IDLE_S = 1.0
"""A piece is read when no sample was asked for during this long."""
LOOK_S = 1.0
"""The scrubber looks so often at the rate, at whether the daemon is idle, and at whether there is a
file."""


@dataclass(slots=True)
class ScrubPiece:
    """Samples [first, first + n) of a shard, adjacent in its file; or one of its chunks.

    begins, lengths: int64[n]. expected: uint32[n].
    """

    shard: OpenShard
    first: int
    begins: Int64s
    lengths: Int64s
    expected: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
    chunk: int = -1

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return int(self.begins[-1] + self.lengths[-1] - self.begins[0])


@dataclass(frozen=True, slots=True)
class Damage:
    """A sample that is damaged or cannot be read: its index in its file, its error, and its record
    as in `explaining.FailedSample`."""

    index: int
    error: FFServeError
    record: tuple[int, int, int]


class Scrubber:
    """Reads the open files while the daemon is idle.

    Args:
        is_idle: whether no request waits and no read is in flight.
        failed: called with shard, number, error and time for each sample that is damaged or cannot
            be read.
    """

    def __init__(
        self,
        catalog: Catalog,
        directory: Directory,
        cache: Cache,
        is_idle: Callable[[], bool],
        failed: Callable[[OpenShard, int, FFServeError, float], object],
    ) -> None:
        self._catalog = catalog
        self._directory = directory
        self._cache = cache
        self._is_idle = is_idle
        self._failed = failed
        self.rate = 0
        """Bytes per second; 0: the files are not read."""
        self._pieces: Iterator[ScrubPiece | None] = iter(())
        self._asked, self._idle_since = 0, 0.0
        self.passes = 0
        """So many times all files were read to their end."""
        self.size = 0
        """Bytes read."""

    async def run(self) -> None:
        """Read the files again and again."""
        while True:
            idle = self._idle(time.monotonic())
            piece = self._next() if self.rate and idle else None
            size = 0
            if piece is not None:
                try:
                    fd = os.dup(piece.shard.fd)
                    found = await in_thread(partial(_check_and_close, fd, piece))
                    for damage in found:
                        self._report(piece.shard, damage)
                        await asyncio.sleep(0)
                    size = piece.size
                except (OSError, MemoryError) as error:  # no descriptor or no memory is left
                    self._fail(
                        piece.shard,
                        piece.first,
                        ReadError(f"cannot read the file to scrub it: {error}"),
                    )
                except Exception:
                    log.exception("internal error while scrubbing %s", piece.shard.path)
            self.size += size
            await self._pause(max(size, LEAST_SIZE) if size else 0)

    async def _pause(self, size: int) -> None:
        """Wait as long as reading this many bytes should take, or LOOK_S if there are none."""
        if not size:
            await asyncio.sleep(LOOK_S)
        left = float(size)
        while left > 0 and self.rate:
            seconds, rate = min(left / self.rate, LOOK_S), self.rate
            await asyncio.sleep(seconds)
            left -= seconds * rate

    def _idle(self, now: float) -> bool:
        """Whether no sample was asked for during IDLE_S."""
        asked = self._cache.counters.asked
        if asked != self._asked or not self._is_idle():
            self._asked, self._idle_since = asked, now
        return now - self._idle_since >= IDLE_S

    def _next(self) -> ScrubPiece | None:
        for piece in self._pieces:
            return piece
        self._pieces = self._all_pieces()
        return next(self._pieces, None)

    def _all_pieces(self) -> Iterator[ScrubPiece | None]:
        """Yield the pieces of the files that are open now; None for samples without bytes."""
        found = False
        for shard in [shard for part in self._catalog.shards() for shard in part]:
            position = 0
            while _is_scrubbed(shard) and position < _count(shard):
                piece, position = self._piece(shard, position)
                found = found or piece is not None
                yield piece
        self.passes += found

    def _piece(self, shard: OpenShard, position: int) -> tuple[ScrubPiece | None, int]:
        """Return the piece that begins at a sample or chunk, and where the next piece begins.
        None: it has no bytes."""
        directory = self._directory
        if shard.chunked is not None:
            chunks = shard.chunked.chunks
            begin, end = int(chunks.begins[position]), int(chunks.ends[position])
            extent = np.array([begin], np.int64), np.array([end - begin], np.int64)
            first, none = int(chunks.firsts[position]), np.zeros(1, np.uint32)
            whole = chunks.sizes[position] > 0 and end > begin
            piece = ScrubPiece(shard, first, *extent, none, position) if whole else None
            return piece, position + 1
        numbers = np.arange(position, min(position + PIECE_COUNT, shard.count)) + shard.base
        begins, lengths = directory.offsets[numbers].astype(np.int64), directory.lengths(numbers)
        ends = begins + lengths
        gaps = begins[1:] - ends[:-1]
        apart = (gaps < 0) | (gaps > MOST_GAP) | (ends[1:] - begins[0] > PIECE_SIZE)
        count = int(apart.argmax()) + 1 if apart.any() else len(numbers)
        rows = slice(0, count)
        piece = ScrubPiece(
            shard, position, begins[rows], lengths[rows], directory.checksums[numbers[rows]]
        )
        return (piece if piece.size > 0 else None), position + count

    def _report(self, shard: OpenShard, damage: Damage) -> None:
        """Report a sample that is damaged, or whose file has changed."""
        if _is_scrubbed(shard):  # else no session has it open by now
            if shard.contradiction is not None:
                self._catalog.set_stale(shard)
            self._fail(shard, damage.index, explained(shard, damage.error))

    def _fail(self, shard: OpenShard, index: int, error: FFServeError) -> None:
        error.path = shard.path
        self._failed(shard, shard.base + index, error, time.monotonic())


def _is_scrubbed(shard: OpenShard) -> bool:
    """Whether a file is open in a session and has checksums."""
    # Blocks of a remote file may not be there; they have checksums of their own.
    checked = (shard.chunked is not None or shard.checksum_kind) and shard.remote is None
    return bool(shard.sessions and shard.fd >= 0 and not shard.stale and checked)


def _count(shard: OpenShard) -> int:
    return shard.count if shard.chunked is None else len(shard.chunked.chunks)


def _check_and_close(fd: int, piece: ScrubPiece) -> list[Damage]:
    """Check a piece and close the descriptor, in a thread for which the daemon does not wait."""
    try:
        damage = check(fd, piece)
        for each in damage:
            if piece.shard.contradiction is None:
                look(piece.shard, fd, each.error, each.record)
        return damage
    finally:
        os.close(fd)


def check(fd: int, piece: ScrubPiece) -> list[Damage]:
    """Return the damage of a piece. It may run in any thread."""
    if piece.chunk >= 0:
        error = _chunk_error(fd, piece)
        return [] if error is None else [Damage(piece.first, error, (int(piece.begins[0]), 0, 0))]
    damage = []
    for k in _wrong(fd, piece).tolist():
        record = int(piece.begins[k]), int(piece.lengths[k]), int(piece.expected[k])
        error = _sample_error(fd, piece, k, record)
        if error is not None:
            damage.append(Damage(piece.first + k, error, record))
    return damage


def _wrong(fd: int, piece: ScrubPiece) -> Int64s:
    """Return which samples of a piece are wrong, or cannot be read, at the first read."""
    begin, kind = int(piece.begins[0]), piece.shard.checksum_kind
    wrong = np.flatnonzero(piece.lengths > 0)
    try:
        if piece.size > PIECE_SIZE:  # one sample, of any size
            found = np.array([extent_checksum(fd, kind, begin, piece.size)], np.uint32)
        else:
            (extent,) = read_extent(fd, begin, piece.size)
            starts, lengths = piece.begins - begin, piece.lengths
            found = checksums(kind, extent, starts.view(np.uint64), lengths.view(np.uint64))
    except (OSError, EOFError):
        return wrong
    differ: Int64s = wrong[found[wrong] != piece.expected[wrong]]
    return differ


def _sample_error(
    fd: int, piece: ScrubPiece, k: int, record: tuple[int, int, int]
) -> FFServeError | None:
    """Return the error of a sample that is wrong at the second read, too."""
    offset, length, expected = record
    shard = piece.shard
    status, found = right_status(fd, shard.checksum_kind, offset, length, expected)
    if not status:
        return None
    return status_error(
        status,
        path=shard.path,
        index=piece.first + k,
        offset=offset,
        length=length,
        found=found,
        expected=expected,
    )


def _chunk_error(fd: int, piece: ScrubPiece) -> FFServeError | None:
    """Return the error of a chunk that is damaged at the second read, too."""
    shard, begin = piece.shard.chunked, int(piece.begins[0])
    assert shard is not None
    into = np.empty(int(shard.chunks.sizes[piece.chunk]), np.uint8)
    about: Any = {"path": piece.shard.path, "index": piece.first, "offset": begin}
    error: FFServeError | None = None
    for again in chain((fd,), other_paths(fd)):
        try:
            shard.decode(piece.chunk, whole(again, begin, piece.size), into)
        except FFServeError as failed:
            error = failed.located(index=piece.first)
        except EOFError:
            error = status_error(STATUS_TRUNCATED, **about)
        except OSError as failed:
            error = status_error(-(failed.errno or errno.EIO), **about)
        else:
            return None
    return error
