"""What lies in a segment before its message is made: samples as read, and collated tensors."""

from __future__ import annotations

import bisect
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.client.source import Bytes, Int64s
from ffserve.torch.segments import Segment, give_back

ALIGNMENT = 64

Alive = Callable[[], object]
"""Gives None when nobody has it any more."""


class Placed:
    """What lies already in the segment of the message that is being made.

    Each piece of memory crosses once: the training process gets arrays that share nothing.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.used = 0
        lent = segment.lend()
        # Whoever holds an array of it last: then it is free, unless it is on its way.
        weakref.finalize(lent, give_back, segment, os.getpid()).atexit = False
        self._alive = weakref.ref(lent)
        self.memory: Bytes | None = np.frombuffer(lent, np.uint8)
        """The segment's room; None when it was let go."""
        self._address = address_of(self.memory)
        self._groups: list[_Group] = []

    def add_samples(self, sizes: Int64s) -> tuple[list[Bytes], NDArray[np.uint64]] | None:
        """Return an array for each sample, and their addresses; None if they do not fit."""
        edges = self.lay(sizes)
        return None if edges is None else (self.show(edges), self.addresses(edges))

    def lay(self, sizes: Int64s) -> Int64s | None:
        """Return where samples of these sizes are to lie, int64[2, n]; None if they do not fit."""
        edges, end = laid(self.used, sizes)
        if end > self.segment.room or self.memory is None:
            return None
        self.used = end
        return edges

    def addresses(self, edges: Int64s) -> NDArray[np.uint64]:
        """Return where they are to be read to."""
        return places(edges, self._address)

    def show(self, edges: Int64s, size: int | None = None) -> list[Bytes]:
        """Return arrays of samples that lie side by side; they are a group of their own.

        Args: size: as for `cut`.
        """
        assert self.memory is not None
        if not edges.size:
            return []
        group = _Group(edges, self.memory, size)
        bisect.insort(self._groups, group, key=_first_of)
        return list(group.samples)

    def add(self, size: int) -> Bytes | None:
        """Return an array of this size, or None if it does not fit."""
        end = self.used + -(-size // ALIGNMENT) * ALIGNMENT
        if end > self.segment.room or self.memory is None:
            return None
        first, self.used = self.used, end
        edges = np.array([[first], [first + size]], np.int64)
        bisect.insort(self._groups, _Group(edges), key=_first_of)
        return self.memory[first : first + size]

    def claim_table(self, first: int, count: int, size: int) -> tuple[Bytes, Alive] | None:
        """Return the memory of all of a group, if it is that and a table of such rows.

        Args:    first: an address.
        Returns: a view of its own, and what tells whether anybody still has one of the samples.
        """
        first -= self._address
        group = self._group(first)
        if group is None or group.claimed or self.memory is None:
            return None
        edges = group.edges
        end = first + count * size
        if edges.shape[1] != count or edges[0, 0] != first or edges[1, -1] != end:
            return None
        if (edges[1] - edges[0] != size).any():
            return None
        # One piece from now on, which `claim` finds.
        self._groups[self._groups.index(group)] = _Group(np.array([[first], [end]], np.int64))
        return self.memory[first:end], group.alive

    def claim_samples(self, rows: list[Bytes]) -> Int64s | None:
        """Return where these samples lie, int64[2, n], if they are just what one read gave."""
        first = address_of(rows[0]) - self._address
        group = self._group(first)
        if group is None or group.claimed or len(group.samples) != len(rows):
            return None
        if not all(map(operator.is_, group.samples, rows)):
            return None
        group.claimed.update(range(len(rows)))
        return group.edges

    def claim(self, address: int, size: int) -> int | None:
        """Return where this memory begins, if it lies here and crosses for the first time."""
        first = address - self._address
        group = self._group(first) if size else None
        if group is None:
            return None
        edges = group.edges
        number = 0
        if edges.shape[1] > 1:
            number = int(np.searchsorted(edges[0], first, side="right")) - 1
        if number in group.claimed or first + size > edges[1, number]:
            return None
        group.claimed.add(number)
        return first

    def _group(self, first: int) -> _Group | None:
        if not 0 <= first < self.used:
            return None
        return self._groups[bisect.bisect_right(self._groups, first, key=_first_of) - 1]

    def let_go(self) -> bool:
        """Drop what is held here; return whether nobody else holds any of it."""
        self.memory = None
        for group in self._groups:
            group.samples = ()
        return self._alive() is None

    def is_idle(self) -> bool:
        """Whether samples were placed, and none of them crossed."""
        read = [group for group in self._groups if group.is_read]
        return bool(read) and not any(group.claimed for group in read)


class _Group:
    """What one read put side by side, or one array of another origin.

    Args: edges: int64[2, n], where each begins and ends. memory: of samples, which get arrays.
    """

    __slots__ = ("alive", "claimed", "edges", "first", "is_read", "samples")

    def __init__(self, edges: Int64s, memory: Bytes | None = None, size: int | None = None) -> None:
        self.first = int(edges[0, 0])
        self.edges = edges
        self.samples: tuple[Bytes, ...] = ()
        self.is_read = memory is not None
        self.claimed: set[int] = set()
        if memory is not None:
            # Through a buffer, so that views have this very array as their base.
            own = np.frombuffer(memory[self.first : int(edges[1, -1])].data, np.uint8)
            self.samples = tuple(cut(own, edges - self.first, size))
            self.alive: Alive = weakref.ref(own)


def _first_of(group: _Group) -> int:
    return group.first


class Rows(Sequence[Bytes]):
    """Samples side by side, of which no arrays were made yet.

    Args: edges: int64[2, n], where they lie in memory. placed: whose memory it is, if anybody's.
    """

    __slots__ = ("edges", "memory", "placed", "seen", "size")

    def __init__(self, edges: Int64s, memory: Bytes, placed: Placed | None) -> None:
        self.edges = edges
        self.size = one_size(edges)
        """Of each, if they are all of one."""
        self.memory = memory
        self.placed = placed
        self.seen = False
        """Somebody has got arrays."""

    def let_go(self) -> Bytes:
        """Return the memory, which is not held here any more."""
        memory, self.memory = self.memory, _NOTHING
        return memory

    def __len__(self) -> int:
        return len(self.edges[0])

    def __getitem__(self, index: Any) -> Any:
        self.seen = True
        edges = self.edges[:, index]
        if not isinstance(index, slice):
            return self.memory[edges[0] : edges[1]]
        if self.placed is None:
            return cut(self.memory, edges, self.size)
        return self.placed.show(edges, self.size)


_NOTHING = np.empty(0, np.uint8)


def laid(first: int, sizes: Int64s) -> tuple[Int64s, int]:
    """Return where samples of these sizes lie, int64[2, n], from `first` on; and the end."""
    edges = np.empty((2, len(sizes)), np.int64)
    if not len(sizes):
        return edges, first
    np.cumsum((sizes + (ALIGNMENT - 1)) & -ALIGNMENT, out=edges[1])
    edges[1] += first
    end = int(edges[1, -1])
    edges[0, 0] = first
    edges[0, 1:] = edges[1, :-1]
    np.add(edges[0], sizes, out=edges[1])
    return edges, end


def cut(memory: Bytes, edges: Int64s, size: int | None = None) -> list[Bytes]:
    """Return views of the memory; edges, int64[2, n], are where they begin and end.

    Args: size: of each, if they are known to be `laid` and of one size.
    """
    firsts, lasts = edges
    count = len(firsts)
    step = 0
    if count > 1:
        step = int(firsts[1] - firsts[0])
        if size is None:
            size = int(lasts[0] - firsts[0])
            if (lasts - firsts != size).any() or (np.diff(firsts) != step).any() or step < size:
                size = None
    if size is not None and count:
        # Rows of a table are cheaper to make than slices.
        return [*np.ndarray((count, size), np.uint8, memory, int(firsts[0]), (step, 1))]
    return [memory[a:b] for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def one_size(edges: Int64s) -> int | None:
    """Return the size of samples that are all of one size."""
    sizes = edges[1] - edges[0]
    size = int(sizes[0])
    return size if (sizes == size).all() else None


def places(edges: Int64s, address: int) -> NDArray[np.uint64]:
    """Return where samples are to be read to whose memory begins at an address."""
    found: NDArray[np.uint64] = (edges[0] + address).view(np.uint64)
    return found


def address_of(array: Bytes) -> int:
    """Return where an array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address
