"""Record files, as the commands take them: lists of files, their names, parts of a read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import ReadError
from ffserve.store.urls import is_url

if TYPE_CHECKING:
    import ffserve

BATCH_SIZE = 32 << 20
"""One read of cat requests at most this many bytes, unless a single sample is larger."""
BATCH_COUNT = 4096


def files_of(paths: tuple[str, ...], format_name: str | None) -> list[str]:
    """Expand directories and patterns; missing paths stay in the list, to be reported in order."""
    from ffserve import formats
    from ffserve.dataset.paths import expand_paths

    names = (format_name,) if format_name else formats.NAMES
    suffixes = [suffix for name in names for suffix in formats.by_name(name).suffixes]
    files: list[str] = []
    for path in paths:
        try:
            files.extend(expand_paths(path, suffixes=suffixes))
        except ReadError:
            if os.path.isdir(path):
                raise
            files.append(path if is_url(path) else os.path.abspath(path))
    return files


def batches_of(sizes: NDArray[np.int64]) -> Iterator[range]:
    """Split a range of samples into ranges of bounded bytes."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        limit = BATCH_SIZE + (int(ends[first - 1]) if first else 0)
        stop = int(np.searchsorted(ends, limit, side="right"))
        stop = min(max(stop, first + 1), first + BATCH_COUNT)
        yield range(first, stop)
        first = stop


def total_size(paths: Sequence[str]) -> int:
    """Return the approximate bytes of files and directories, without those that cannot be read."""
    total = 0
    seen: set[tuple[int, int]] = set()
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        try:
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode):
                total += found.st_size
            elif stat.S_ISDIR(found.st_mode) and (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                waiting.extend(os.path.join(path, name) for name in os.listdir(path))
        except OSError:
            continue
    return total


def opened_by_member(file: str, format_name: str | None, server: str) -> ffserve.Reader:
    """Open files; of tar files each member is a sample. Raises: as `ffserve.open`."""
    import ffserve
    from ffserve.reader import open_files

    reader = ffserve.open(file, format=format_name, server=server)
    if not reader.fields:
        return reader
    reader.close()
    return open_files(file, "tar", server, whole=True)
