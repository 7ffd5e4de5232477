"""The samples that a benchmark reads: data that it writes itself, or the files of the user."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ffserve
from ffserve.errors import UsageError
from ffserve.formats import by_name

MIB = 1 << 20
PIECE_SIZE = 16 * MIB


@dataclass(frozen=True)
class BenchmarkData:
    """The first ``count`` samples of a data set, of ``size`` bytes in all.

    Args:
        name: its part of the names of rows.
        sample_size: for data that `make` writes: bytes of each sample.
        options: for data that `make` writes: arguments of `ffserve.create`. In compressed data
            every other 32 bytes are zero.
    """

    name: str
    paths: tuple[str, ...]
    count: int
    size: int
    sample_size: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def mean(self) -> int:
        """Mean bytes of a sample."""
        return max(1, round(self.size / self.count))

    @property
    def roots(self) -> list[str]:
        """The directories that a daemon has to serve."""
        return sorted({os.path.dirname(os.path.realpath(path)) for path in self.paths})

    def make(self) -> None:
        """Write the file unless it exists; files of the user are left as they are."""
        if self.sample_size is None or os.path.exists(self.paths[0]):
            return
        random = np.random.default_rng(self.sample_size)
        rows = max(1, min(self.count, PIECE_SIZE // self.sample_size))
        block = random.integers(0, 256, (rows, self.sample_size), np.uint8)
        options = dict(self.options)
        if options.get("compression", "none") != "none":
            block.reshape(-1, 32)[::2] = 0
        with ffserve.create(self.paths[0], n=self.count, **options) as writer:
            for k in range(self.count):
                writer.write(block[k % rows])
        evict(self.paths)

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each sample, int64[count]."""
        with ffserve.open(self.paths, server="off") as reader:
            return reader.sizes(range(self.count))

    def samples(self) -> Iterator[NDArray[np.uint8]]:
        """Yield every sample; each is valid until the next."""
        with ffserve.open(self.paths, server="off") as reader:
            for batch in reader.batches(range(self.count)):
                yield from batch


def generated(
    folder: str | Path, sample_size: int, size: int, kind: str = "", **options: str | int
) -> BenchmarkData:
    """Describe data that `BenchmarkData.make` will write: about ``size`` bytes.

    Args:
        kind: distinguishes data of the same sample size in file names and names of rows.
        options: for `ffserve.create`; FFRecord by default.
    """
    count = max(1, size // sample_size)
    suffix = by_name(str(options.get("format", "ffrecord"))).suffixes[0]
    path = os.path.join(folder, f"{sample_size}-{count}{kind and f'-{kind}'}{suffix}")
    name = f"{size_label(sample_size)}{kind and f'-{kind}'}"
    return BenchmarkData(
        name, (path,), count, count * sample_size, sample_size, tuple(options.items())
    )


def existing(paths: Sequence[str], limit: int) -> BenchmarkData:
    """Describe the first samples of a user's files, of ``limit`` bytes at most.

    Raises: UsageError when they hold no bytes; whatever opening them raises.
    """
    with ffserve.open(list(paths), server="off") as reader:
        sizes = reader.sizes()
        files = tuple(shard.path for shard in reader.shards)
    ends = np.cumsum(sizes)
    count = int(np.searchsorted(ends, limit, side="right")) if len(ends) else 0
    count = min(max(count, 1), len(ends))
    if count == 0 or ends[count - 1] == 0:
        raise UsageError("these files contain no samples to read", path=str(paths[0]))
    return BenchmarkData("files", files, count, int(ends[count - 1]))


def size_label(size: int) -> str:
    """Return a size as names of rows have it: ``100B``, ``4KiB``, ``1MiB``."""
    for unit, name in ((MIB, "MiB"), (1024, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"


def evict(paths: Sequence[str]) -> None:
    """Remove files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
