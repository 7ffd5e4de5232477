"""What the status of a failed read means to its user: one table, for daemon and client alike."""

from __future__ import annotations

import os

from ffserve.errors import ChecksumError, FFServeError, ReadError, TruncatedError

CHECKSUM, TRUNCATED = -100_001, -100_002
"""FFS_ECHECKSUM and FFS_ETRUNCATED of engine/core.h."""
TOO_LARGE = -100_100
"""No slot of the arena can hold the sample, or the chunk it lies in."""
FORMAT = -100_102
"""The format found the sample's chunk damaged, and says how."""
ARENA_BUSY = -100_101
"""The arena stayed full of samples that were leased or being read for too long."""

LOST_CHECKSUM = 0xFFFFFFFF
"""What the table of a tolerant shard says of a place without a sample, of length 0."""


def read_failure(
    status: int,
    *,
    path: str,
    index: int | None,
    offset: int | None = None,
    length: int = 0,
    found: int = 0,
    expected: int = 0,
    arena_size: int = 0,
) -> FFServeError:
    """Return the error for a status of the engine or the cache.

    Args:
        status: -errno, or one of the codes above.
        path, index, offset, length: which sample, and where its payload lies.
        found, expected: checksums.
    """
    if status == CHECKSUM and length == 0 and expected == LOST_CHECKSUM:
        return ChecksumError(
            "the file is damaged here, and where the sample ends cannot be told: what lies before "
            "the next one that could be found is left out",
            path=path,
            index=index,
            offset=offset,
            hint="restore the file to have it",
        )
    if status == CHECKSUM:
        return ChecksumError(
            f"the sample's checksum is {found:08x}, the file's table says {expected:08x}: "
            "its bytes were damaged after they were written",
            path=path,
            index=index,
            offset=offset,
            hint="restore the file, or see `ffserve verify` for the extent of the damage",
        )
    if status == TRUNCATED:
        return TruncatedError(
            "the file ends inside this sample: it was cut",
            path=path,
            index=index,
            offset=offset,
            hint="restore the file, or see `ffserve verify` for the extent of the damage",
        )
    if status == TOO_LARGE:
        return ReadError(
            f"the sample, or the chunk it lies in, of {length} bytes and read in whole blocks, "
            f"does not fit into the daemon's arena of {arena_size} bytes",
            path=path,
            index=index,
            offset=offset,
            hint="start the daemon with a larger --arena, or open with server='off'",
        )
    if status == ARENA_BUSY:
        return ReadError(
            "the daemon's arena stayed full of samples that are leased or being read",
            path=path,
            index=index,
            offset=offset,
            hint="release leases sooner, or start the daemon with a larger --arena; a disk that "
            "hangs keeps it full, too",
        )
    return ReadError(
        f"the operating system could not read this sample: {os.strerror(-status)}",
        path=path,
        index=index,
        offset=offset,
        hint="see the kernel's log if the device failed",
    )
