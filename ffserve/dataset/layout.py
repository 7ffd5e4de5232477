"""Index space of a data set: sample indices to shards and to sample numbers, and their checks.

A data set is an ordered list of shards; sample indices count through the shards in that order.
Nothing here opens a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.arrays import integers
from ffserve.errors import UsageError, outside


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard of an opened dataset.

    Args:
        path: the file.
        format: "ffrecord", "recordio", "tfrecord" or "tar".
        count: number of samples.
        first: dataset index of its first sample.
        size: bytes of the file when it was opened.
        fingerprint: identifies the content; equal on every machine.
    """

    path: str
    format: str
    count: int
    first: int
    size: int
    fingerprint: int


class Layout:
    """Maps dataset indices to shards, and to the daemon's sample numbers.

    Args:
        counts: samples of each shard, int64[shards].
        bases: sample number of each shard's first sample, int64[shards]; None without a daemon.
    """

    def __init__(self, counts: NDArray[np.int64], bases: NDArray[np.int64] | None = None) -> None:
        self.counts = counts
        self.firsts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=self.firsts[1:])
        self.count = int(self.firsts[-1])
        self._bases = bases
        self._shift = None if bases is None else bases - self.firsts[:-1]
        self._offset: int | None = None
        """The common shift of all shards if they are adjacent in the tables."""
        if self._shift is not None and len(counts) and (self._shift == self._shift[0]).all():
            self._offset = int(self._shift[0])

    def shards(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of the shard of each index; indices must be in range."""
        if len(self.counts) == 1:
            return np.zeros(len(indices), np.int64)
        return np.searchsorted(self.firsts, indices, side="right") - 1

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample number of each index; indices must be in range."""
        if self._offset is not None:
            return indices + self._offset
        assert self._shift is not None
        return indices + self._shift[self.shards(indices)]

    def index(self, number: int) -> int:
        """Return the dataset index of a sample number."""
        assert self._shift is not None and self._bases is not None
        inside = (self._bases <= number) & (number < self._bases + self.counts)
        return number - int(self._shift[int(np.argmax(inside))])

    def runs(self, domains: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (first, base, count) of each maximal run that is contiguous in the tables.

        Args: domains: of the shards; a run lies in one.
        """
        assert self._bases is not None
        runs: list[tuple[int, int, int]] = []
        last = None
        for first, base, count, domain in zip(
            self.firsts[:-1].tolist(),
            self._bases.tolist(),
            self.counts.tolist(),
            domains,
            strict=True,
        ):
            if count == 0:
                continue
            if runs and domain == last and runs[-1][1] + runs[-1][2] == base:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + count)
            else:
                runs.append((first, base, count))
            last = domain
        return runs


class Numbering:
    """The samples of files that a reader shows, by index, where it hides others.

    A sample's number is its index among all samples of the files.

    Args: hidden: numbers, ascending, none twice. count: samples in the files.
    """

    def __init__(self, hidden: NDArray[np.int64], count: int) -> None:
        self.hidden = hidden
        self.count = count - len(hidden)
        self._gaps = hidden - np.arange(len(hidden))
        """For each hidden sample the index of the shown one behind it."""
        self._moved = bool(len(hidden)) and int(self._gaps[0]) < self.count

    @property
    def key(self) -> object:
        """Equal if the same is shown."""
        return "Numbering", digest(self.hidden)

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each index; indices must be in range."""
        if not self._moved:  # what is hidden lies behind all others
            return indices
        return indices + np.searchsorted(self._gaps, indices, side="right")

    def indices(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each number; none is hidden."""
        return numbers - np.searchsorted(self.hidden, numbers)


class Selection:
    """A Numbering of chosen samples, in an order of their own.

    Args: chosen: their numbers, none twice.
    """

    def __init__(self, chosen: NDArray[np.int64]) -> None:
        self.chosen = chosen
        self.count = len(chosen)
        self._order = np.argsort(chosen)

    @property
    def key(self) -> object:
        """Equal if the same is shown."""
        return "Selection", digest(self.chosen)

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each index; indices must be in range."""
        return self.chosen[indices]

    def indices(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each number; all are chosen."""
        return self._order[np.searchsorted(self.chosen, numbers, sorter=self._order)]


def digest(numbers: NDArray[np.int64] | None) -> bytes:
    """Return 16 bytes that identify numbers."""
    return hashlib.blake2b(b"" if numbers is None else numbers.tobytes(), digest_size=16).digest()


def as_indices(indices: Any, count: int) -> NDArray[np.int64]:
    """Return sample indices as int64[n]; order and repeats are kept.

    Args:
        indices: list, tuple, range, set, generator or integer ndarray.
        count: samples of the dataset.

    Raises:
        SampleIndexError: an index is negative, or `count` or more.
        UsageError: an index is not an integer, or an array is not one-dimensional.
    """
    return check_range(as_int64(indices, count), count)


def as_int64(indices: Any, count: int) -> NDArray[np.int64]:
    """Return a caller's sample indices as `as_indices` does, before `check_range`: never the
    caller's own array, which another thread may write to."""
    found = integers(indices, count)
    if found is not None:
        return found
    if isinstance(indices, np.ndarray):
        array = indices
    elif isinstance(indices, range):
        array = _range_as_array(indices, count)
    else:
        array = _values_as_array(indices, count)
    if array.ndim != 1:
        raise UsageError(
            f"sample indices must be one-dimensional, not of shape {array.shape}",
            hint="flatten the array first",
        )
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise UsageError(
            f"sample indices must be integers, not {array.dtype}", hint="convert the array first"
        )
    if array.dtype == np.uint64 and int(array.max()) >= count:
        raise outside(int(array.max()), count)
    return array.astype(np.int64, order="C", copy=array is indices)


def _range_as_array(indices: range, count: int) -> NDArray[np.int64]:
    # Checked before the array is allocated, since a range may have any length.
    for end in (min, max) if indices else ():
        worst = end(indices[0], indices[-1])
        if not 0 <= worst < count:
            raise outside(worst, count)
    return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)


def _values_as_array(indices: Any, count: int) -> NDArray[Any]:
    try:
        if isinstance(indices, (str, bytes, bytearray)):
            raise TypeError
        values = indices if isinstance(indices, (list, tuple)) else list(indices)
    except TypeError:
        raise UsageError(
            f"invalid sample indices: {type(indices).__name__} is not a sequence of integers",
            hint="give a list, tuple, range, set, generator or integer array",
        ) from None
    if not values:
        return np.zeros(0, np.int64)
    try:
        array = np.array(values)
        if array.dtype.kind == "f":  # numpy's result for mixed signed and unsigned integers
            with contextlib.suppress(TypeError):
                values = [operator.index(value) for value in values]
                array = np.array(values, object)
    except (ValueError, OverflowError, TypeError):
        raise UsageError(
            "sample indices must be integers", hint="give a list or array of integers"
        ) from None
    if array.dtype == object and all(isinstance(value, int) for value in values):
        for value in values:
            if not 0 <= value < count:
                raise outside(value, count)
        array = array.astype(np.int64)
    return array


def check_range(chosen: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the indices. Raises: SampleIndexError if one is negative, or `count` or more."""
    if not len(chosen):
        return chosen
    # As unsigned integers, negative ones are too large too: one comparison finds both.
    if int(chosen.view(np.uint64).max()) >= count:
        low = int(chosen.min())
        raise outside(low if low < 0 else int(chosen.max()), count)
    return chosen


def combined_fingerprint(fingerprints: NDArray[np.uint64]) -> int:
    """Return one u64 fingerprint for an ordered list of shard fingerprints."""
    packed = fingerprints.astype("<u8").tobytes()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
