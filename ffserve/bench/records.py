"""The data that the contestants read: random samples of one size, or a user's own files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ffserve
from ffserve.engine.io import open_direct
from ffserve.errors import UsageError
from ffserve.formats import by_name

MIB = 1 << 20
PIECE_SIZE = 16 * MIB


@dataclass(frozen=True)
class Data:
    """The first ``count`` samples of a data set, ``size`` bytes together; ``name`` is its part in
    the names of rows. ``step`` is set for data that ``make`` writes, samples of that many bytes,
    with ``options`` for `ffserve.create`. What is compressed has every other 32 bytes zero."""

    name: str
    paths: tuple[str, ...]
    count: int
    size: int
    step: int | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def mean(self) -> int:
        """Bytes of a sample, on the average."""
        return max(1, round(self.size / self.count))

    @property
    def roots(self) -> list[str]:
        """The directories that a daemon has to serve."""
        return sorted({os.path.dirname(os.path.realpath(path)) for path in self.paths})

    def make(self) -> None:
        """Write the file unless it is there; a user's own files are left as they are."""
        if self.step is None or os.path.exists(self.paths[0]):
            return
        random = np.random.default_rng(self.step)
        rows = max(1, min(self.count, PIECE_SIZE // self.step))
        block = random.integers(0, 256, (rows, self.step), np.uint8)
        options = dict(self.options)
        if options.get("compression", "none") != "none":
            block.reshape(-1, 32)[::2] = 0
        with ffserve.create(self.paths[0], n=self.count, **options) as writer:
            for k in range(self.count):
                writer.write(block[k % rows])
        evict(self.paths)

    def sizes(self) -> NDArray[np.int64]:
        """Return the samples' lengths, int64[count]."""
        with ffserve.open(self.paths, server="off") as reader:
            return reader.sizes(range(self.count))

    def extent(self) -> tuple[int, int]:
        """Return what direct I/O has to read for a sample, the median of the first file's, and the
        device's logical block, where such reads begin and end; in bytes."""
        fd, block = open_direct(self.paths[0])
        os.close(fd)
        with ffserve.open(self.paths, server="off") as reader:
            offsets, lengths, _ = reader.tables(0)
        begins = offsets.astype(np.int64)
        ends = begins + lengths.astype(np.int64)
        sizes = -(-ends // block) - begins // block
        return int(np.median(sizes)) * block, block

    def samples(self) -> Iterator[NDArray[np.uint8]]:
        """Yield every sample; each is valid until the next."""
        with ffserve.open(self.paths, server="off") as reader:
            for batch in reader.batches(range(self.count)):
                yield from batch


def generated(
    folder: str | Path, step: int, size: int, kind: str = "", **options: str | int
) -> Data:
    """Describe data that ``make`` will write: about ``size`` bytes in samples of ``step``.

    Args:
        kind: what tells them from others of that size, for names of rows; FFRecord if not given.
        options: for `ffserve.create`.
    """
    count = max(1, size // step)
    suffix = by_name(str(options.get("format", "ffrecord"))).suffixes[0]
    path = os.path.join(folder, f"{step}-{count}{kind and f'-{kind}'}{suffix}")
    name = f"{label(step)}{kind and f'-{kind}'}"
    return Data(name, (path,), count, count * step, step, tuple(options.items()))


def existing(paths: Sequence[str], most: int) -> Data:
    """Describe a user's files: their first samples, of ``most`` bytes at most.

    Raises: UsageError when there is nothing to read in them; whatever opening them raises.
    """
    with ffserve.open(list(paths), server="off") as reader:
        sizes = reader.sizes()
        files = tuple(shard.path for shard in reader.shards)
    ends = np.cumsum(sizes)
    count = int(np.searchsorted(ends, most, side="right")) if len(ends) else 0
    count = min(max(count, 1), len(ends))
    if count == 0 or ends[count - 1] == 0:
        raise UsageError("there are no samples to read in these files", path=str(paths[0]))
    return Data("files", files, count, int(ends[count - 1]))


def label(size: int) -> str:
    """Return a size as it stands in a row's name: ``100B``, ``4KiB``, ``1MiB``."""
    for unit, name in ((MIB, "MiB"), (1024, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"


def files_below(path: str) -> list[str]:
    """Return the file itself, or the files below a directory."""
    if os.path.isfile(path):
        return [path]
    return [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]


def evict(paths: Sequence[str]) -> None:
    """Take files out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def load(paths: Sequence[str]) -> None:
    """Read files once, so that the page cache has them."""
    piece = bytearray(PIECE_SIZE)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass
