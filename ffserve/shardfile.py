"""From an open file to its shard: which format it has, and what an earlier walk over it found."""

from __future__ import annotations

import os

from ffserve import formats, sidecar
from ffserve.errors import ReadError
from ffserve.files import open_regular, read_at_of
from ffserve.formats.base import HEAD_SIZE, ReadAt, WalkedFormat, WalkedShard


def open_shard(
    fd: int,
    path: str,
    format_name: str | None = None,
    *,
    verify: bool = True,
    tolerant: bool = False,
    keep: sidecar.Keep = "own",
) -> formats.Shard:
    """Parse an open file.

    Args:
        fd: opened for reading, without O_DIRECT; needed until the shard is loaded.
        path: its name, for errors, suffix and sidecar.
        format_name: None to tell by content, then by suffix.
        verify, tolerant: see ``formats.base.Format.open``.
        keep: where a sidecar may be written.
    Raises:  FormatError, ChecksumError, TruncatedError, ReadError.
    Cost:    that of the format; for one that has to be walked over, a sidecar saves the walk.
    """
    chosen, read_at, size = _tell(fd, path, format_name)
    if not isinstance(chosen, WalkedFormat) or size < sidecar.WORTH_SIZE:
        return chosen.open(read_at, size, path, verify=verify, tolerant=tolerant)
    identity = sidecar.Identity.of(fd, path, chosen.name)
    if (kept := sidecar.find(fd, path, identity)) is not None:
        shard = chosen.restore(kept.lengths, kept.checksums, size, path)
        if shard is not None:
            return shard
    walked = chosen.open(read_at, size, path, verify=verify, tolerant=tolerant)
    if verify and walked.sound:
        sidecar.store(fd, path, identity, walked, keep)
    return walked


def index_file(
    path: str, format_name: str | None = None, *, renew: bool = False
) -> tuple[WalkedShard, str] | None:
    """Walk over a file and keep what was found, beside it or else in the user's cache.

    Args:
        path: the file.
        format_name: None to tell by content, then by suffix.
        renew: walk also when there is a sound sidecar.
    Returns: what is in the file, and where the sidecar lies; None when the file's format has
             tables of its own.
    Raises:  FormatError, ChecksumError, TruncatedError, AccessDenied; ReadError also when a
             sidecar can be written nowhere.
    Cost:    one walk over the file, unless there is a sound sidecar.
    """
    fd = open_regular(path)
    try:
        chosen, read_at, size = _tell(fd, path, format_name)
        if not isinstance(chosen, WalkedFormat):
            return None
        identity = sidecar.Identity.of(fd, path, chosen.name)
        if not renew and (kept := sidecar.find(fd, path, identity)) is not None:
            shard = chosen.restore(kept.lengths, kept.checksums, size, path)
            if shard is not None:
                return shard, kept.place
        walked = chosen.open(read_at, size, path)
        place = sidecar.store(fd, path, identity, walked, "beside")
    finally:
        os.close(fd)
    if place is None:
        raise ReadError(
            "an index can be written neither beside the file nor in the user's cache, or the "
            "file is being written to",
            path=path,
            hint="set XDG_CACHE_HOME to a directory that can be written to",
        )
    return walked, place


def _tell(fd: int, path: str, format_name: str | None) -> tuple[formats.Format, ReadAt, int]:
    size, read_at = os.fstat(fd).st_size, read_at_of(fd, path)
    if format_name:
        return formats.by_name(format_name), read_at, size
    head = bytearray(min(size, HEAD_SIZE))
    got = read_at(0, memoryview(head)) if head else 0
    return formats.detect(bytes(head[:got]), path, size), read_at, size
