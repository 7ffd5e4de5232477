"""Opening a shard: detect the format of an open file and load its tables or its index file.

A read that later finds a sample that does not match its checksum asks here for the cause: the file
changed since, or its index file was stale (`FileState.contradiction`), or the sample is damaged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ffserve import formats
from ffserve.disk import index_file
from ffserve.disk.files import open_regular, read_at_of, wrap_os_error
from ffserve.engine.io import buffered
from ffserve.errors import ChecksumError, FFServeError, FormatError, ReadError
from ffserve.formats.base import (
    HEAD_SIZE,
    Admit,
    ChunkedShard,
    ReadAt,
    ScannedChunks,
    ScannedFormat,
    ScannedShard,
    is_scanned,
    members_of,
    needs_scan,
    next_data,
    unbounded,
)

log = logging.getLogger("ffserve")

SAID_AFTER_S = 10.0
"""The progress of a scan is logged after this time, and again each time that the scan has taken
twice as long."""
COMPARED_COUNT = 16
"""If an index file is older than the ctime of its file, this many records are compared with it."""


def open_shard(
    fd: int,
    path: str,
    format_name: str | None = None,
    *,
    verify: bool = True,
    tolerant: bool = False,
    keep: index_file.Keep = "own",
    seen: Callable[[int], object] | None = None,
    passed_index: int | None = None,
    admit: Admit = unbounded,
    reading: Callable[[int], object] | None = None,
) -> formats.Shard:
    """Open the shard in an open file.

    Args:
        fd: descriptor, opened for reading without O_DIRECT; needed until the shard is loaded.
        path: name of the file, for errors, for its suffix, and to find its index file.
        format_name: format; None detects it by content, then by suffix.
        verify, tolerant: see ``formats.base.Format.open``.
        keep: where an index file may be written.
        seen: gets the byte up to which a scan has come, again and again. With it, a file without
            tables is scanned even if it has an index file. An index file that contradicts the scan
            is replaced.
        passed_index: descriptor of an index file of the client; see `index_file.find`.
        admit: see ``formats.base.Format.open``; it also admits what an index file claims.
        reading: called before each read of the file, with its size; ends the opening by raising.
    Raises:  FormatError, ChecksumError, TruncatedError, ReadError.
    Cost:    that of the format; an index file saves the scan of a format without tables.
    """
    chosen, plain, size = _detect(fd, path, format_name)
    read_at: ReadAt = plain if reading is None else Counted(plain, reading)
    if not needs_scan(chosen) or size < index_file.MIN_INDEXED_SIZE:
        plainly = chosen.open(read_at, size, path, verify=verify, tolerant=tolerant, admit=admit)
        _admit_members(plainly, admit)
        return plainly
    identity = index_file.Identity.of(fd, path, chosen.name)
    indexed = index_file.find(fd, path, identity, keep, passed_index, admit)
    if seen is None and indexed is not None:
        shard = _restored(fd, path, chosen, read_at, size, indexed)
        if shard is not None:
            _admit_members(shard, admit)
            return shard
    counted = watched(read_at, seen or progress_of(path, size))
    scanned = chosen.open(counted, size, path, verify=verify, tolerant=tolerant, admit=admit)
    if verify and not (indexed is not None and _same(indexed, scanned)):
        if scanned.sound:
            index_file.store(fd, path, identity, scanned, keep)
        elif indexed is not None and len(indexed.lengths):
            index_file.discard(fd, path, identity, keep)
    _admit_members(scanned, admit)
    return scanned


def _admit_members(shard: formats.Shard, admit: Admit) -> None:
    """Admit what is left of the tables of members when they are entered: their names."""
    if (members := members_of(shard)) is not None:
        admit(shard.count, members.size)


class Counted:
    """The same `ReadAt`, which tells the size of each read before it.

    Args: reading: called with the size; it may raise.
    """

    def __init__(self, read_at: ReadAt, reading: Callable[[int], object]) -> None:
        self._read_at = read_at
        self._reading = reading

    def __call__(self, offset: int, into: memoryview, /) -> int:
        """Read; see `ReadAt`."""
        self._reading(len(into))
        return self._read_at(offset, into)

    @property
    def headers(self) -> Any:
        """How a scan reads headers by itself, of which only the first one is told; None: not."""
        return getattr(self._read_at, "headers", None)

    @property
    def foretold(self) -> Any:
        """See `formats.base.ForetoldReadAt`; None: it cannot be told."""
        return getattr(self._read_at, "foretold", None)

    def next_data(self, offset: int) -> int:
        """See `formats.base.next_data`."""
        return next_data(self._read_at, offset)


def watched(read_at: ReadAt, seen: Callable[[int], object]) -> ReadAt:
    """Return the same `ReadAt`, which reports before each read up to which byte it has come."""
    return _Watched(read_at, seen)


class _Watched(Counted):
    _furthest = 0

    def __call__(self, offset: int, into: memoryview, /) -> int:
        self._furthest = max(self._furthest, offset + len(into))
        self._reading(self._furthest)
        return self._read_at(offset, into)


def progress_of(path: str, size: int, after_s: float = SAID_AFTER_S) -> Callable[[int], None]:
    """Return a function that logs how far the scan of a file is, if it takes long."""
    begun = time.monotonic()
    due = begun + after_s

    def seen(end: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + (now - begun)
            log.warning("%s: scanned %d of %d MiB for its index", path, end >> 20, size >> 20)

    return seen


def _restored(
    fd: int,
    path: str,
    chosen: ScannedFormat,
    read_at: ReadAt,
    size: int,
    indexed: index_file.Indexed,
) -> ScannedShard | None:
    """Return the shard of an index file; None if the index file contradicts the file."""
    kept = indexed.lengths, indexed.checksums, indexed.kept
    shard = chosen.restore(*kept, size, path)
    if shard is None or not shard.count or os.fstat(fd).st_ctime_ns <= indexed.written_ns:
        return shard
    return shard if shard.agrees(read_at, _some(shard.count)) else None


def _some(count: int) -> NDArray[np.int64]:
    """Return a few of `count` records."""
    return np.linspace(0, count - 1, min(count, COMPARED_COUNT)).astype(np.int64)


def _same(indexed: index_file.Indexed, scanned: ScannedShard) -> bool:
    return (
        np.array_equal(indexed.lengths, scanned.lengths)
        and np.array_equal(indexed.checksums, scanned.checksums)
        and indexed.kept == scanned.kept
    )


def _discard_stale(
    fd: int,
    path: str,
    scanned: str,
    record: tuple[int, int, int],
    chunked: ChunkedShard | None,
    keep: index_file.Keep,
) -> bool:
    """Whether the file has other records than its tables say; make its index file invalid then."""
    chosen = formats.by_name(scanned)
    assert needs_scan(chosen)
    with buffered(fd, 0) as plain:  # not after others, whose file system may hang
        read_at = read_at_of(plain, path)
        if isinstance(chunked, ScannedChunks):
            agrees = chunked.fits(read_at) is not False
        else:
            offset, length, checksum = record
            agrees = chosen.agrees(
                read_at,
                np.array([offset], np.uint64),
                np.array([length], np.uint64),
                np.array([checksum], np.uint32),
            )
        if not agrees:
            index_file.discard(plain, path, index_file.Identity.of(plain, path, scanned), keep)
        return not agrees


def scanned_as(shard: formats.Shard) -> str | None:
    """Return the format of a shard whose tables are those of a scan that skipped nothing, or of
    its index file; else None."""
    return shard.format if is_scanned(shard) and shard.sound else None


@dataclass(frozen=True, slots=True)
class FileState:
    """Size and times of a file before its tables were read, to explain later mismatches."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, fd: int) -> FileState:
        """Return the state of an open file."""
        return cls.of_status(os.fstat(fd))

    @classmethod
    def of_status(cls, status: os.stat_result) -> FileState:
        """Return the state that stat(2) reports."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def has_changed(self, fd: int) -> bool:
        """Return whether an open file is not in this state any more, as far as that is known."""
        try:
            return FileState.of(fd) != self
        except OSError:  # of a file system that is gone
            return False

    def contradiction(
        self,
        error: FFServeError,
        fd: int,
        path: str,
        scanned: str | None,
        record: tuple[int, int, int],
        chunked: ChunkedShard | None,
        keep: index_file.Keep,
    ) -> Contradiction | None:
        """Return why the tables of a shard contradict its file, as far as that is known.

        Args:
            error: of a sample; nothing is known if it is not a FormatError.
            fd: the file, opened with or without O_DIRECT.
            path: its name.
            scanned: `scanned_as` its shard.
            record: payload offset, length and checksum of the sample.
            chunked: the shard, if its samples are in chunks.
            keep: where an index file may be written: a stale one is made invalid.
        """
        if not isinstance(error, FormatError):
            return None
        with contextlib.suppress(OSError, MemoryError):  # of a file system that is gone
            if FileState.of(fd) != self:
                return "changed"
            # A record in a chunk has its checksum compared after its place in the tables.
            doubted = isinstance(error, ChecksumError) == (chunked is None)
            if scanned and doubted and _discard_stale(fd, path, scanned, record, chunked, keep):
                return "stale"
        return None


Contradiction = Literal["changed", "stale"]
"""Why tables contradict a file: it changed since it was opened, or its index file was stale."""


def contradicted(error: FFServeError, why: Contradiction) -> ReadError:
    """Return the error of a sample of a file that its tables contradict."""
    if why == "changed":
        text = f"the file changed since it was opened: {error.message}"
        hint = "open it again; to replace a file in use, write a new one and rename it"
    else:
        text = (
            "the index file of this file was stale: the file was changed with its size and time "
            "kept"
        )
        hint = "open the file again: it is scanned, and gets a new index file"
    return ReadError(text, path=error.path, index=error.index, offset=error.offset, hint=hint)


def write_index_file(
    path: str,
    format_name: str | None = None,
    *,
    renew: bool = False,
    seen: Callable[[int], None] | None = None,
) -> tuple[ScannedShard, str] | None:
    """Scan a file and write its index file beside it, else into the user's cache.

    Args:
        path: the file.
        format_name: format; None detects it by content, then by suffix.
        renew: scan even if there is a valid index file.
        seen: gets the byte up to which the scan has come, again and again.
    Returns: the shard and the path of its index file; None if the format has tables of its own.
    Raises:  FormatError, ChecksumError, TruncatedError, AccessDenied; ReadError also if the index
             file cannot be written anywhere.
    Cost:    one scan of the file, unless there is a valid index file.
    """
    fd = open_regular(path)
    try:
        chosen, read_at, size = _detect(fd, path, format_name)
        if not needs_scan(chosen):
            return None
        identity = index_file.Identity.of(fd, path, chosen.name)
        if not renew and (indexed := index_file.find(fd, path, identity)) is not None:
            shard = _restored(fd, path, chosen, read_at, size, indexed)
            if shard is not None:
                return shard, indexed.path
        scanned = chosen.open(watched(read_at, seen) if seen else read_at, size, path)
        written = index_file.store(fd, path, identity, scanned, "beside")
    finally:
        os.close(fd)
    if written is None:
        raise ReadError(
            "cannot write the index file: neither the file's directory nor the user's cache is "
            "writable, or the file changed during the scan",
            path=path,
            hint="set XDG_CACHE_HOME to a writable directory, or wait until the file is complete",
        )
    return scanned, written


def _detect(fd: int, path: str, format_name: str | None) -> tuple[formats.Format, ReadAt, int]:
    size = os.fstat(fd).st_size
    # Small files are read once.
    head = wrap_os_error(lambda _: os.pread(fd, min(size, HEAD_SIZE), 0), path)
    read_at = read_at_of(fd, path, head)
    if format_name:
        return formats.by_name(format_name), read_at, size
    return formats.detect(head, path, size), read_at, size
