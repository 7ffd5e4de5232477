"""Shards as one index space: which file a sample lies in, and which files a user meant.

A dataset is an ordered list of shards; sample indices run through them in that order. Nothing
here opens a shard: the tables come from `formats`, the bytes from an engine.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import FormatError, MissingFile, SampleIndexError, UsageError
from ffserve.formats.base import UNKNOWN_LENGTH

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard of an opened dataset.

    Args:
        path: the file.
        format: "ffrecord", "recordio" or "tfrecord".
        count: samples in it.
        first: dataset index of its first sample.
        size: bytes of the file when it was opened.
        fingerprint: of its content; the same on every machine.
    """

    path: str
    format: str
    count: int
    first: int
    size: int
    fingerprint: int


def expand_paths(
    paths: PathLike | Sequence[PathLike],
    *,
    suffixes: Sequence[str] | Callable[[], Sequence[str]] = (),
) -> tuple[str, ...]:
    """Return the absolute paths of the files that a user meant, in order.

    Args:
        paths: one file, a directory (its files with one of `suffixes`, by name, not recursive), a
            glob pattern (by name), or a sequence of these.
        suffixes: what counts in a directory; () for everything that is no hidden file. If a
            function, it is called when there is one.

    Raises:
        MissingFile: a file does not exist; a directory or pattern gives no file.
        UsageError: an empty sequence or path, or something that is no path.
    """
    if isinstance(paths, (str, os.PathLike)):
        return _expand_one(os.fspath(paths), suffixes)
    if isinstance(paths, (bytes, bytearray)) or not isinstance(paths, Iterable):
        raise UsageError(f"a path, or a sequence of paths, is needed, not {type(paths).__name__}")
    found: list[str] = []
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"{path!r} is no path")
        found.extend(_expand_one(os.fspath(path), suffixes))
    if not found:
        raise UsageError("no paths given", hint="name at least one file")
    return tuple(found)


def _expand_one(
    path: str, suffixes: Sequence[str] | Callable[[], Sequence[str]]
) -> tuple[str, ...]:
    if not path:
        raise UsageError("an empty path", hint="is a variable of the shell not set?")
    absolute = os.path.abspath(path)
    if os.path.isdir(absolute):
        if callable(suffixes):
            suffixes = suffixes()
        names = sorted(
            name
            for name in os.listdir(absolute)
            if (name.endswith(tuple(suffixes)) if suffixes else True) and not name.startswith(".")
        )
        files = tuple(
            joined for name in names if os.path.isfile(joined := os.path.join(absolute, name))
        )
        if not files:
            wanted = ", ".join("*" + suffix for suffix in suffixes) or "files"
            raise MissingFile(
                f"the directory holds no {wanted}",
                path=absolute,
                hint="`ffserve pack` makes record files of other files",
            )
        return files
    if os.path.lexists(absolute):  # Whoever opens it says what is wrong with a link.
        return (absolute,)
    if glob.has_magic(path):
        matches = tuple(sorted(m for m in glob.glob(absolute) if os.path.isfile(m)))
        if not matches:
            raise MissingFile("no file matches this pattern", path=absolute)
        return matches
    raise MissingFile(
        "no such file or directory", path=absolute, hint="is the path right on this machine?"
    )


class Layout:
    """Where the samples of a dataset lie: dataset index → shard and node-wide table entry.

    Args:
        counts: samples of each shard, int64[shards].
        bases: node-wide number of each shard's first sample, int64[shards]; None where there are
            no node-wide tables.
    """

    def __init__(self, counts: NDArray[np.int64], bases: NDArray[np.int64] | None = None) -> None:
        self.counts = counts
        self.firsts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=self.firsts[1:])
        self.count = int(self.firsts[-1])
        self._bases = bases
        self._shift = None if bases is None else bases - self.firsts[:-1]
        self._offset: int | None = None
        """What all shifts are, where the shards lie side by side in the tables."""
        if self._shift is not None and len(counts) and (self._shift == self._shift[0]).all():
            self._offset = int(self._shift[0])

    def shards(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shard's position in the dataset for each index; indices are in range."""
        if len(self.counts) == 1:
            return np.zeros(len(indices), np.int64)
        return np.searchsorted(self.firsts, indices, side="right") - 1

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the node-wide numbers of samples; indices are in range."""
        if self._offset is not None:
            return indices + self._offset
        assert self._shift is not None
        return indices + self._shift[self.shards(indices)]

    def index(self, number: int) -> int:
        """Return the dataset index of a sample that is known by its node-wide number."""
        assert self._shift is not None and self._bases is not None
        inside = (self._bases <= number) & (number < self._bases + self.counts)
        return number - int(self._shift[int(np.argmax(inside))])

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (first, base, count) of maximal runs that lie together in the node-wide tables."""
        assert self._bases is not None
        runs: list[tuple[int, int, int]] = []
        for first, base, count in zip(
            self.firsts[:-1].tolist(), self._bases.tolist(), self.counts.tolist(), strict=True
        ):
            if count == 0:
                continue
            if runs and runs[-1][1] + runs[-1][2] == base:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + count)
            else:
                runs.append((first, base, count))
        return runs


_MOST_OFFSET = 1 << 62
"""Whatever is read there ends below 2^63 (off_t)."""
_PIECE = 1 << 20
"""Samples looked at together: a table may have a hundred million."""


def bound_lengths(
    offsets: NDArray[np.uint64], lengths: NDArray[np.uint64], size: int, path: str
) -> None:
    """Shorten, in place, the lengths of samples that a cut file does not hold whole.

    They keep one byte more than the file has, so that reading them still meets its end, and so
    that no length out of a file makes anybody allocate more than the file's own size.

    Raises: FormatError: a record that no entry can describe, in a file of 256 TiB or more; or one
        that begins where no file can have a byte.
    """
    for start in range(0, len(lengths), _PIECE):
        piece = lengths[start : start + _PIECE]
        begins = offsets[start : start + _PIECE]
        cut = (piece > 0) & ((begins > size) | (piece > size))
        cut |= (piece > 0) & ~cut & (begins + piece > size)
        if cut.any():
            held = np.uint64(size) - np.minimum(begins[cut], np.uint64(size))
            piece[cut] = held + np.uint64(1)
        if int(piece.max()) >= UNKNOWN_LENGTH:
            raise FormatError(
                f"record {start + int(piece.argmax())} has {int(piece.max())} bytes",
                path=path,
                hint=f"ffserve reads records of fewer than {UNKNOWN_LENGTH} bytes",
            )
        if int(begins.max()) > _MOST_OFFSET:
            raise FormatError(
                f"record {start + int(begins.argmax())} begins at byte {int(begins.max())}, where "
                f"no file can have one",
                path=path,
                hint="the file is damaged: take another copy or write it again",
            )


def as_indices(indices: Any, count: int) -> NDArray[np.int64]:
    """Return what a caller gave as sample indices as int64[n]; order and repeats kept.

    Args: indices: list, tuple, range, set, generator or integer ndarray. count: of the dataset.

    Raises:
        SampleIndexError: one is negative or not below `count`.
        UsageError: something that is no integer, or an array that is not one-dimensional.
    """
    if isinstance(indices, np.ndarray):
        array = indices
    elif isinstance(indices, range):
        # Before there is an array of them, which may be of any length.
        for end in (min, max) if indices else ():
            worst = end(indices[0], indices[-1])
            if not 0 <= worst < count:
                raise outside(worst, count)
        array = np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    else:
        try:
            if isinstance(indices, (str, bytes, bytearray)):
                raise TypeError
            values = indices if isinstance(indices, (list, tuple)) else list(indices)
        except TypeError:
            raise UsageError(
                f"sample indices are needed, not {type(indices).__name__}",
                hint="give a list, tuple, range, set, generator or integer array",
            ) from None
        if not values:
            return np.zeros(0, np.int64)
        try:
            array = np.array(values)
            if array.dtype.kind == "f":  # as numpy makes of signed and unsigned ones together
                with contextlib.suppress(TypeError):
                    values = [operator.index(value) for value in values]
                    array = np.array(values, object)
        except (ValueError, OverflowError, TypeError):
            raise UsageError("sample indices must be integers") from None
        if array.dtype == object and all(isinstance(value, int) for value in values):
            for value in values:
                if not 0 <= value < count:
                    raise outside(value, count)
            array = array.astype(np.int64)
    if array.ndim != 1:
        if array.size == 0 and array.ndim <= 1:
            return np.zeros(0, np.int64)
        raise UsageError(f"sample indices must be one-dimensional, not of shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise UsageError(f"sample indices must be integers, not {array.dtype}")
    if array.dtype == np.uint64 and int(array.max()) >= count:
        raise outside(int(array.max()), count)
    chosen = np.ascontiguousarray(array, dtype=np.int64)
    # As unsigned numbers negative ones are too large as well: one look at each.
    if int(chosen.view(np.uint64).max()) >= count:
        low = int(chosen.min())
        raise outside(low if low < 0 else int(chosen.max()), count)
    return chosen


def outside(index: int, count: int) -> SampleIndexError:
    """Return the error for an index that a dataset does not have."""
    return SampleIndexError(
        f"sample index {index} is outside the dataset of {count} samples",
        index=index,
        hint="indices run from 0 to count - 1; negative ones are not taken",
    )


def combined_fingerprint(fingerprints: Iterable[int]) -> int:
    """Return one u64 for an ordered list of shards' fingerprints."""
    digest = hashlib.blake2b(digest_size=8)
    for fingerprint in fingerprints:
        digest.update(fingerprint.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def check_same_content(expected: int | None, shards: Sequence[ShardInfo]) -> None:
    """Refuse a dataset that is not the one a reader was opened on.

    Raises: FormatError when the files were replaced in between.
    """
    if expected is not None and combined_fingerprint(s.fingerprint for s in shards) != expected:
        raise FormatError(
            "the files are not those that this reader was opened on: they were replaced or "
            "rewritten meanwhile",
            path=shards[0].path if shards else None,
            hint="open them anew to read the new content",
        )
