"""Sources of samples: the interface that readers use, and the memory that samples are read into.

Reading is in two steps, so that the next batch can be on its way while the last one is used:
`start` sends requests and returns at once, `finish` waits for the answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ffserve.dataset.fields import Rows
from ffserve.dataset.layout import ShardInfo
from ffserve.dtypes import Bytes, Int64s
from ffserve.engine.arrays import separate
from ffserve.engine.shm import Batch as Batch
from ffserve.engine.shm import empty, keep_freed_memory
from ffserve.errors import FFServeError, SampleIndexError, UsageError

Samples = TypeVar("Samples", Int64s, Rows)
Indices: TypeAlias = "NDArray[Any] | list[Any] | tuple[Any, ...]"
"""Sample indices in the types that need no conversion first."""


class Held(Protocol):
    """Keeps leased samples in place."""

    def release(self) -> None:
        """Give the lease back. A second call does nothing."""
        ...


class Leased(Sequence[Bytes]):
    """Samples in place: a sequence of read-only views, each made when it is accessed.

    Args:
        memory: uint8, read-only; contains the samples.
        starts, sizes: int64[n]; sample i is memory[starts[i]:starts[i] + sizes[i]].
        copies: samples outside of `memory`, by position.
        held: keeps the memory unchanged until `release`.
    """

    __slots__ = ("_copies", "_held", "memory", "sizes", "starts")

    def __init__(
        self,
        memory: Bytes,
        starts: Int64s,
        sizes: Int64s,
        copies: dict[int, Bytes],
        held: Held | None = None,
    ) -> None:
        self.memory = memory
        self.starts = starts
        self.sizes = sizes
        self._copies = copies
        self._held = held

    def release(self) -> None:
        """Give the lease back: views may show other bytes from now on."""
        if self._held is not None:
            self._held.release()

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[Bytes]: ...
    def __getitem__(self, index: int | slice) -> Bytes | list[Bytes]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise SampleIndexError(f"position {index} is outside a lease of {len(self)} samples")
        if position in self._copies:
            return self._copies[position]
        start = int(self.starts[position])
        return self.memory[start : start + int(self.sizes[position])]

    def __iter__(self) -> Iterator[Bytes]:
        memory, copies = self.memory, self._copies
        for k, (start, size) in enumerate(
            zip(self.starts.tolist(), self.sizes.tolist(), strict=True)
        ):
            yield copies[k] if copies and k in copies else memory[start : start + size]

    def __repr__(self) -> str:
        return f"Leased({len(self)} samples, {int(self.sizes.sum())} bytes)"


def arrays_of(offsets: Int64s) -> tuple[list[Bytes], NDArray[np.uint64]]:
    """Return an array for each sample, where this thread wants it, and their addresses.

    Args: offsets: int64[n + 1], running sum of the sizes.
    """
    if places.place is not None:
        placed = places.place(offsets[1:] - offsets[:-1])
        if placed is not None:
            return placed
    keep_freed_memory()
    return separate(offsets)


class Target:
    """Destination of one request's samples: one buffer, or an array for each sample.

    Args:
        offsets: int64[n + 1], running sum of the lengths. apart: an array for each sample.
        out: a buffer of at least offsets[n] bytes to use instead of a new one.
        arrays: an array for each sample, and their addresses, to use instead of new ones.

    Raises: UsageError for an `out` that cannot be used.
    """

    __slots__ = ("addresses", "arrays", "buffer", "offsets")

    def __init__(
        self,
        offsets: Int64s,
        *,
        apart: bool,
        out: Bytes | None = None,
        arrays: tuple[list[Bytes], NDArray[np.uint64]] | None = None,
    ) -> None:
        self.offsets = offsets
        self.buffer: Bytes | None = None
        self.arrays: list[Bytes] | None = None
        self.addresses: NDArray[np.uint64] | None = None
        if apart:
            self.arrays, self.addresses = arrays or arrays_of(offsets)
        else:
            size = int(offsets[-1])
            self.buffer = empty(size) if out is None else check_out(out, size)

    def places(self) -> NDArray[np.uint64]:
        """Return the address of each sample's destination."""
        if self.addresses is not None:
            return self.addresses
        assert self.buffer is not None
        base = self.buffer.__array_interface__["data"][0]
        places: NDArray[np.uint64] = (self.offsets[:-1] + base).astype(np.uint64)
        return places


Place = Callable[[Int64s], tuple[list[Bytes], NDArray[np.uint64]] | None]
"""Gives arrays of these sizes and their addresses, or None when it has no room."""


class _Places(threading.local):
    place: Place | None = None


places = _Places()
"""Where this thread wants its arrays; `placing` sets it."""


@contextmanager
def placing(place: Place) -> Iterator[None]:
    """Let the arrays of every `read` of this thread come from `place`, where it has room."""
    before, places.place = places.place, place
    try:
        yield
    finally:
        places.place = before


def check_out(out: Bytes, total: int) -> Bytes:
    """Return the part of a caller's buffer that a batch of `total` bytes takes.

    Raises: UsageError when it cannot be used.
    """
    if not isinstance(out, np.ndarray) or out.dtype != np.uint8 or out.ndim != 1:
        raise UsageError(
            "out must be a one-dimensional uint8 array", hint="of a torch tensor: tensor.numpy()"
        )
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise UsageError("out must be contiguous and writable")
    if out.nbytes < total:
        raise UsageError(f"out has {out.nbytes} bytes, the batch needs {total}")
    return out[:total]


class PendingRead(Protocol):
    """A read that was started."""

    @property
    def target(self) -> Target:
        """Destination of the samples; complete when the request is finished."""
        ...


class SampleSource(Protocol):
    """A data set that samples are read from: `shared_memory` or `local`."""

    count: int
    fingerprint: int
    """That of all shards together."""
    description: str

    @property
    def shards(self) -> list[ShardInfo]:
        """The files, in order."""
        ...

    @property
    def states(self) -> Int64s:
        """Sizes and times of the local files at opening, as `contents_of` returns them."""
        ...

    def sizes(self, indices: Int64s) -> Int64s:
        """Return lengths in bytes; reads what must be read to know them.

        Raises: the error of the first sample whose length cannot be known.
        """
        ...

    def estimate(self, indices: Int64s) -> Int64s:
        """Return lengths in bytes, a guess where one is not known; does no I/O."""
        ...

    def cached_batch(self, indices: NDArray[Any], out: Bytes | None) -> Batch | Any:
        """Copy a batch of cached samples.

        Args: indices: any array.
        Returns: the batch if every sample is cached; else what was found, for `start`; None if
            nothing is known, for instance because an index is outside of the data set.
        Raises: UsageError for an `out` that cannot be used.
        """
        ...

    def cached_arrays(self, indices: Indices) -> list[Bytes] | Any:
        """Copy cached samples, each to an array of its own.

        Args, Returns: as of `cached_batch`; also lists and tuples.
        """
        ...

    def start(
        self,
        indices: Int64s,
        *,
        apart: bool,
        out: Bytes | None = None,
        found: Any = None,
    ) -> PendingRead:
        """Begin to read; return at once.

        Args: indices: in range. found: what `cached_batch` or `cached_arrays` has found of them.
        """
        ...

    def finish(self, request: Any) -> dict[int, FFServeError]:
        """Fill the target of a request; return the errors by position.

        Raises: ServerUnavailable when the source itself is lost; the request can be made again
            of another source.
        """
        ...

    def lease(self, indices: Int64s) -> Leased:
        """Return read-only views, in place where possible, until they are released."""
        ...

    def announce(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Take the order of an epoch, which was checked."""
        ...

    def reached(self, epoch: int, position: int) -> bool:
        """Take the job's position in an epoch's order; return False if the source is lost."""
        ...

    def tables(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of a shard's payload offsets, lengths and checksums."""
        ...

    def named(self, blocks: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return blocks of the names of records, see `formats/members.py`.

        Args: blocks: the position of a shard whose records are members, and the block's number. Of
            an FFRecord file ABOUT are the first bytes of its last sample; b"": they are not known.
        """
        ...

    def stats(self) -> dict[str, int | float | str]:
        """Return counters since the source was opened."""
        ...

    def after_fork(self) -> None:
        """This process is a child: drop what belongs to the parent."""
        ...

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        ...


def cut(numbers: Samples, sizes: Int64s, count: int, size: int) -> Iterator[tuple[Samples, int]]:
    """Cut into parts of at most `count` samples and about `size` bytes, at least one sample.

    Yields: the part and its bytes.
    """
    ends = np.cumsum(sizes)
    at = 0
    while at < len(numbers):
        before = int(ends[at - 1]) if at else 0
        upto = int(np.searchsorted(ends, before + size, side="right"))
        upto = min(max(upto, at + 1), at + count, len(numbers))
        yield numbers[at:upto], int(ends[upto - 1]) - before
        at = upto
