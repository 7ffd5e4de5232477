"""Which neighbouring extents of a file are read together, and what that may cost.

A read costs a device and the kernel about as much for 4 KiB as for 64 KiB, so neighbours that are
wanted at the same time are read at once, into a bounce buffer of the engine, and copied from there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.blocks import merge

MERGED_SIZE = 120 * 1024
"""Bytes from the start of a merged read within which the extents in it begin. Half of a bounce
buffer (FFS_BOUNCE_SIZE in engine/backend.h): with the last extent and the alignment it fits into
one, while a larger read would be given fresh memory each time. Disks stream at full speed from
about 64 KiB a read."""
MERGED_GAP = 4096
"""Bytes between neighbours that are read for nothing: the framing of the formats is below 100, and
a page costs less than another read. So at most this much a record is over-read."""


def merged(
    begins: NDArray[np.int64], ends: NDArray[np.int64], files: NDArray[np.int64], most: int
) -> NDArray[np.int64]:
    """Return the position of the first extent of each read, in rising order.

    Args:
        begins, ends, files: int64[n], one an extent, n > 0; each read takes the extents up to
            the next one's first, which follow each other in one file.
        most: bytes of an extent; a larger one is read alone.
    """
    return merge(begins, ends, files, most, MERGED_GAP, MERGED_SIZE)
