"""What the commands share that look into record files."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
import numpy as np
from numpy.typing import NDArray

from ffserve.errors import ReadError

BATCH_SIZE = 32 << 20
"""Bytes that one read of cat asks for, unless a single sample is larger."""
BATCH_COUNT = 4096

format_option = click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="ffrecord, recordio, …; by content, then suffix, when left out.",
)
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=min(4, os.cpu_count() or 1),
    show_default=True,
    help="Files at once.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


def files_of(paths: tuple[str, ...], format_name: str | None) -> list[str]:
    """Expand directories and patterns; what cannot be found stays, to be reported in its turn."""
    from ffserve import formats
    from ffserve.dataset import expand_paths

    names = (format_name,) if format_name else formats.NAMES
    suffixes = [suffix for name in names for suffix in formats.by_name(name).suffixes]
    files: list[str] = []
    for path in paths:
        try:
            files.extend(expand_paths(path, suffixes=suffixes))
        except ReadError:
            if os.path.isdir(path):
                raise
            files.append(os.path.abspath(path))
    return files


def batches_of(sizes: NDArray[np.int64]) -> Iterator[range]:
    """Cut a run of samples into ranges of bounded bytes."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        limit = BATCH_SIZE + (int(ends[first - 1]) if first else 0)
        stop = int(np.searchsorted(ends, limit, side="right"))
        stop = min(max(stop, first + 1), first + BATCH_COUNT)
        yield range(first, stop)
        first = stop
