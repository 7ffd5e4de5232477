"""Record files of which every sample is known: written, and checked when they are read.

The bytes of a file follow from its place in the list and a version. The checksum of each sample
(CRC-32, by zlib) is computed before it is written, and kept in a file of its own; what a client
gets is hashed by the C core and compared with it. The first eight bytes of a sample, where it has
so many, say which sample of which version of which file it is.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from daemon import damage
from numpy.typing import NDArray

import ffserve
from ffserve.engine.codec import CRC_32, checksums

Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]
KEY_SIZE = 8
_PLACE_BITS, _INDEX_BITS = 8, 32
FULL_SECONDS = 600
"""A shorter run has a tenth of the small samples, so that epochs end."""


@dataclass(frozen=True)
class Spec:
    """A file: sample i has sizes[i % len(sizes)] bytes. damaged: samples with a wrong bit."""

    name: str
    count: int
    sizes: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    damaged: tuple[int, ...] = ()

    def lengths(self, count: int) -> Int64s:
        """Return the sizes of the first samples."""
        return np.resize(np.array(self.sizes, np.int64), count)


SMALL = (
    Spec("small.ffr", 200_000, (100,)),
    Spec("small.tfrecord", 100_000, (8, 40, 100, 200, 64)),
    Spec("small.recordio", 60_000, (16, 100, 300), {"compression": "snappy"}),
)
COMPRESSED = (
    Spec("packed.tfrecord.gz", 60_000, (30, 90, 200)),
    Spec(
        "packed.recordio",
        20_000,
        (50, 150),
        {"compression": "gzip", "max_chunk_size": 1 << 16, "dialect": "go"},
    ),
)
MIXED = (
    Spec("mixed.ffr", 4000, (0, 1, 511, 512, 513, 4096, 5000, 70_000)),
    Spec("mixed.tfrecord", 2000, (0, 3000, 20_000, 8191)),
    Spec("large.ffr", 60, (300_000, 262_144, 500_001)),
)
DAMAGED = (
    Spec("damaged.ffr", 3000, (100, 5000, 600), damaged=(7, 77, 1500)),
    Spec("damaged.tfrecord", 3000, (80, 9000), damaged=(0, 2000, 2999)),
)
CHANGING = (
    Spec("changing.ffr", 2000, (20, 300, 2000)),
    Spec("changing.tfrecord", 2000, (20, 500)),
    Spec("changing.recordio", 2000, (20, 300, 2000)),
)
OVERWRITTEN = (Spec("overwritten.ffr", 2000, (20, 300, 2000)),)
REMOTE = (
    Spec("remote.ffr", 6000, (100, 3000, 9000)),
    Spec("remote.tfrecord", 2000, (40, 2000, 20_000)),
)
"""More than the stores of the daemons may take."""
REPLACED = (Spec("replaced.ffr", 2000, (20, 300, 2000)),)
"""An object of the origin that is replaced."""
SOUND = SMALL + COMPRESSED + MIXED
ALL = SOUND + DAMAGED + CHANGING + OVERWRITTEN + REMOTE + REPLACED


class WrongSampleError(AssertionError):
    """A sample that is not what was written."""


class Truth:
    """What a list of files holds, one after the other: sizes and checksums.

    Args: specs: the files. versions: of each. folder: where they were written.
    """

    def __init__(
        self, folder: Path, specs: Sequence[Spec], versions: Sequence[int] | None = None
    ) -> None:
        self.paths = [str(folder / spec.name) for spec in specs]
        versions = versions or [0] * len(specs)
        parts = [
            np.load(_sums_path(folder, spec, version))
            for spec, version in zip(specs, versions, strict=True)
        ]
        self.sums: NDArray[np.uint32] = np.concatenate(parts)
        counts = [len(part) for part in parts]
        self.firsts = np.concatenate(([0], np.cumsum(counts))).tolist()
        self.sizes = np.concatenate(
            [spec.lengths(count) for spec, count in zip(specs, counts, strict=True)]
        )
        self.damaged = np.array(
            [first + k for spec, first in zip(specs, self.firsts[:-1], strict=True)
             for k in spec.damaged], np.int64,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.sums)

    def check(self, indices: Any, buffer: Bytes, offsets: Int64s) -> int:
        """Hash adjacent samples and compare; return their number.

        Args: indices: int64[n]. buffer: uint8. offsets: int64[n + 1].
        Raises: WrongSampleError.
        """
        indices = np.asarray(indices, np.int64)
        return self._compare(indices, buffer, offsets[:-1], np.diff(offsets))

    def check_arrays(self, indices: Any, arrays: Sequence[Any]) -> int:
        """The same of samples that are arrays of their own."""
        indices = np.asarray(indices, np.int64)
        if len(arrays) != len(indices):
            raise WrongSampleError(f"{len(arrays)} samples instead of {len(indices)}")
        if not len(arrays):
            return 0
        sizes = np.fromiter(map(len, arrays), np.int64, len(arrays))
        starts = np.cumsum(sizes) - sizes
        return self._compare(indices, np.concatenate(arrays), starts, sizes)

    def _compare(self, indices: Int64s, buffer: Bytes, starts: Int64s, sizes: Int64s) -> int:
        if len(sizes) != len(indices):
            raise WrongSampleError(f"{len(sizes)} samples instead of {len(indices)}")
        found = checksums(CRC_32, buffer, starts.astype(np.uint64), sizes.astype(np.uint64))
        wrong = (found != self.sums[indices]) | (sizes != self.sizes[indices])
        if wrong.any():
            raise WrongSampleError(self._described(np.flatnonzero(wrong), indices, buffer, starts,
                                                   sizes))  # fmt: skip
        return len(indices)

    def _described(
        self, wrong: Int64s, indices: Int64s, buffer: Bytes, starts: Int64s, sizes: Int64s
    ) -> str:
        lines = [f"{len(wrong)} of {len(indices)} samples are wrong"]
        for k in wrong[:5].tolist():
            some = bytes(buffer[starts[k] : starts[k] + sizes[k]])
            lines.append(
                f"position {k}, index {indices[k]} ({self.place(int(indices[k]))}): "
                f"{sizes[k]} bytes for {self.sizes[indices[k]]}, it says it is {described(some)}, "
                f"{some[:24].hex()}…{some[-8:].hex()}, {some.count(0)} zeros"
            )
        return "\n".join(lines)

    def place(self, index: int) -> str:
        """Return file and sample of an index."""
        file = int(np.searchsorted(self.firsts, index, "right")) - 1
        return f"sample {index - self.firsts[file]} of {self.paths[file]}"


def described(sample: bytes) -> str:
    """Return what a sample says it is."""
    if len(sample) < KEY_SIZE:
        return "too short to tell"
    version, place, index = key_of(sample)
    if place >= len(ALL):
        return "nothing known"
    return f"sample {index} of {ALL[place].name}, version {version}"


def key_of(sample: Any) -> tuple[int, int, int]:
    """Return version, place of the file, and index that a sample begins with."""
    key = int.from_bytes(bytes(sample[:KEY_SIZE]), "little")
    index = key & ((1 << _INDEX_BITS) - 1)
    place = key >> _INDEX_BITS & ((1 << _PLACE_BITS) - 1)
    return key >> (_INDEX_BITS + _PLACE_BITS), place, index


def generate(spec: Spec, version: int, count: int) -> tuple[Bytes, Int64s]:
    """Return the samples of a version of a file, adjacent, and their offsets."""
    place = ALL.index(spec)
    sizes = spec.lengths(count)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    source = np.random.Generator(np.random.PCG64([place, version]))
    buffer = np.frombuffer(source.bytes(int(offsets[-1])), np.uint8).copy()
    named = np.flatnonzero(sizes >= KEY_SIZE)
    high = version << (_PLACE_BITS + _INDEX_BITS) | place << _INDEX_BITS
    keys = (named.astype(np.uint64) | np.uint64(high)).view(np.uint8).reshape(-1, KEY_SIZE)
    buffer[offsets[named][:, None] + np.arange(KEY_SIZE)] = keys
    return buffer, offsets


def write_version(folder: Path, spec: Spec, version: int, *, scale: float = 1.0) -> None:
    """Write a version of a file; what it holds is known before that."""
    count = round(spec.count * scale) if spec in SMALL + COMPRESSED else spec.count
    buffer, offsets = generate(spec, version, count)
    view = memoryview(buffer)
    edges = offsets.tolist()
    sums = [zlib.crc32(view[a:b]) for a, b in pairwise(edges)]
    path = _sums_path(folder, spec, version)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        np.save(out, np.array(sums, np.uint32))
    part.rename(path)
    with ffserve.create(folder / spec.name, **spec.options) as writer:
        writer.write_batch(buffer, offsets)
    for index in spec.damaged:
        damage(folder / spec.name, index)


def forget_version(folder: Path, spec: Spec, version: int) -> None:
    """Remove what is known of a version."""
    _sums_path(folder, spec, version).unlink(missing_ok=True)


class Versions:
    """Versions of a file: the last that was begun, and the last that is complete."""

    def __init__(self, folder: Path, spec: Spec) -> None:
        path = folder / "versions" / spec.name
        if not path.exists():
            path.write_bytes(bytes(16))
        self.numbers = np.memmap(path, np.int64, "r+", shape=(2,))

    @property
    def begun(self) -> int:
        """The number of the last version that was begun."""
        return int(self.numbers[0])

    @property
    def done(self) -> int:
        """The number of the last version that is complete."""
        return int(self.numbers[1])


KEPT_VERSIONS = 200
"""Versions whose sums are kept; readers hold a file for some seconds."""


def drop_cached(folder: Path, spec: Spec) -> None:
    """Have the kernel drop a file from the page cache."""
    fd = os.open(folder / spec.name, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _sums_path(folder: Path, spec: Spec, version: int) -> Path:
    return folder / "sums" / f"{spec.name}.{version}.npy"
