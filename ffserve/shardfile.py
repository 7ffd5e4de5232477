"""Opening a shard: detect the format of an open file and load its tables or its index file."""

from __future__ import annotations

import os

from ffserve import formats, index_file
from ffserve.errors import ReadError
from ffserve.files import open_regular, read_at_of
from ffserve.formats.base import HEAD_SIZE, ReadAt, ScannedFormat, ScannedShard


def open_shard(
    fd: int,
    path: str,
    format_name: str | None = None,
    *,
    verify: bool = True,
    tolerant: bool = False,
    keep: index_file.Keep = "own",
) -> formats.Shard:
    """Open the shard in an open file.

    Args:
        fd: descriptor, opened for reading without O_DIRECT; needed until the shard is loaded.
        path: name of the file, for errors, for its suffix, and to find its index file.
        format_name: format; None detects it by content, then by suffix.
        verify, tolerant: see ``formats.base.Format.open``.
        keep: where an index file may be written.
    Raises:  FormatError, ChecksumError, TruncatedError, ReadError.
    Cost:    that of the format; an index file saves the scan of a format without tables.
    """
    chosen, read_at, size = _detect(fd, path, format_name)
    if not isinstance(chosen, ScannedFormat) or size < index_file.MIN_INDEXED_SIZE:
        return chosen.open(read_at, size, path, verify=verify, tolerant=tolerant)
    identity = index_file.Identity.of(fd, path, chosen.name)
    if (indexed := index_file.find(fd, path, identity)) is not None:
        shard = chosen.restore(indexed.lengths, indexed.checksums, size, path)
        if shard is not None:
            return shard
    scanned = chosen.open(read_at, size, path, verify=verify, tolerant=tolerant)
    if verify and scanned.sound:
        index_file.store(fd, path, identity, scanned, keep)
    return scanned


def write_index_file(
    path: str, format_name: str | None = None, *, renew: bool = False
) -> tuple[ScannedShard, str] | None:
    """Scan a file and write its index file beside it, else into the user's cache.

    Args:
        path: the file.
        format_name: format; None detects it by content, then by suffix.
        renew: scan even if there is a valid index file.
    Returns: the shard and the path of its index file; None if the format has tables of its own.
    Raises:  FormatError, ChecksumError, TruncatedError, AccessDenied; ReadError also if the index
             file cannot be written anywhere.
    Cost:    one scan of the file, unless there is a valid index file.
    """
    fd = open_regular(path)
    try:
        chosen, read_at, size = _detect(fd, path, format_name)
        if not isinstance(chosen, ScannedFormat):
            return None
        identity = index_file.Identity.of(fd, path, chosen.name)
        if not renew and (indexed := index_file.find(fd, path, identity)) is not None:
            shard = chosen.restore(indexed.lengths, indexed.checksums, size, path)
            if shard is not None:
                return shard, indexed.path
        scanned = chosen.open(read_at, size, path)
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
    size, read_at = os.fstat(fd).st_size, read_at_of(fd, path)
    if format_name:
        return formats.by_name(format_name), read_at, size
    head = bytearray(min(size, HEAD_SIZE))
    got = read_at(0, memoryview(head)) if head else 0
    return formats.detect(bytes(head[:got]), path, size), read_at, size
