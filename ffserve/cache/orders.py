"""The order that a job announced for an epoch, as the daemon keeps it.

Two views of one permutation, four bytes a sample together (`narrow`; five from 268 million samples
on). *Pieces* say which sample stands at a position (for reading ahead); a piece is forgotten when
it has been passed. The *table* says in
which of PARTS equal parts of the epoch a sample stands (for what to keep): 32 to 64 parts equal
exact positions to a tenth of a point of hit rate, so a byte is enough. A sample that comes more
than once (sampling with replacement) stands at its next place, and `following` has the places
after that, a byte a position.

What arrives is hostile until `Arriving.finish` has returned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.narrow import Narrow
from ffserve.engine.orders import Table
from ffserve.errors import SampleIndexError, UsageError

PARTS = 250
"""Parts of an epoch; 0 in a table means that the sample does not come (any more)."""
PIECE = 65_536
"""Positions that are kept, and forgotten, together."""
MOST_VISITS = 16
"""An order with replacement has at most this many positions a sample of its data set."""
_FEW = 1 << 20

Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Order:
    """A whole order. Made by `Arriving.finish`.

    Args:
        count: positions. low: the lowest sample number of the data set.
        table: uint8[span]: bucket, from 1, of sample `low` + k.
        pieces: sample numbers less `low`, PIECE each but the last.
        following: uint8[count] or None: the bucket in which the sample at a position comes again.
    """

    def __init__(
        self,
        count: int,
        low: int,
        table: Bytes,
        pieces: list[Narrow | None],
        following: Bytes | None,
    ) -> None:
        self.count = count
        self.low = low
        self.table = table
        self.c = Table(table, low)
        self.following = following
        self._pieces = pieces
        self._passed = 0

    @property
    def size(self) -> int:
        """Bytes that it takes, roughly."""
        held = sum(piece.nbytes for piece in self._pieces if piece is not None)
        return held + self.count * (1 if self.following is None else 2)

    def bucket(self, position: int) -> int:
        """Return the bucket of a position; PARTS + 1 at the end."""
        return 1 + position * PARTS // self.count

    def edge(self, bucket: int) -> int:
        """Return the first position of a bucket."""
        return -(-(bucket - 1) * self.count // PARTS)

    def numbers(self, start: int, stop: int) -> Int64s:
        """Return the sample numbers at positions [start, stop), without those forgotten."""
        start, stop = max(start, self._passed), min(stop, self.count)
        if start >= stop:
            return np.zeros(0, np.int64)
        at, piece = start // PIECE * PIECE, self._pieces[start // PIECE]
        if piece is not None and stop <= at + PIECE:
            return piece.part(start - at, stop - at, self.low)
        parts = []
        for k in range(start // PIECE, -(-stop // PIECE)):
            piece = self._pieces[k]
            if piece is not None:
                first, end = max(start - k * PIECE, 0), min(stop - k * PIECE, len(piece))
                parts.append(piece.part(first, end, self.low))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def buckets(self, numbers: Int64s) -> Bytes:
        """Return the bucket in which each sample comes next; 0: it does not."""
        return self.c.buckets(numbers)[0]

    def passed(self, position: int) -> Int64s:
        """The job is at `position`: forget what lies before it, and return that."""
        numbers = self.numbers(self._passed, position)
        if self.following is None:
            self.table[numbers - self.low] = 0
        else:
            # Of a sample that stands here twice the last place counts, whose following is right.
            self.table[numbers - self.low] = self.following[self._passed : position]
        for k in range(self._passed // PIECE, position // PIECE):
            self._pieces[k] = None
        self._passed = max(self._passed, position)
        return numbers

    def same(self, other: Order) -> bool:
        """Whether both visit the same samples in the same order, as far as both still know."""
        return (
            self.count == other.count
            and self.low == other.low
            and len(self.table) == len(other.table)
            and all(
                a is None or b is None or a is b or a.same(b)
                for a, b in zip(self._pieces, other._pieces, strict=True)
            )
        )

    def share(self, other: Order) -> None:
        """Hold the pieces of an order that is the `same`, instead of a copy of them."""
        self._pieces = [
            a if b is None else b for a, b in zip(self._pieces, other._pieces, strict=True)
        ]

    def visits_like(self, other: Order) -> bool:
        """Whether the other visits what is left of this one."""
        if self.low != other.low or len(self.table) != len(other.table):
            return False
        return self.count == other.count and not np.any((self.table > 0) & (other.table == 0))


class Arriving:
    """An order on its way from a client, piece by piece.

    Args:
        count: positions that were announced.
        sample_count: of the data set. low, span: of its sample numbers.
        replacement: whether a sample may come more than once.

    Raises: UsageError when no order of this length can be meant.
    """

    def __init__(
        self, count: int, *, sample_count: int, low: int, span: int, replacement: bool
    ) -> None:
        most = max(MOST_VISITS * sample_count, _FEW) if replacement else sample_count
        if not 0 < count <= most:
            raise UsageError(
                f"an order of {count} positions over a data set of {sample_count} samples",
                hint=f"it may have 1 to {most}"
                + ("" if replacement else "; an order that repeats samples must say so"),
            )
        self.count = count
        self.arrived = 0
        self._low = low
        self._replacement = replacement
        self._table = np.zeros(span, np.uint8)
        self._pieces: list[Narrow | None] = []
        self._room = np.empty(min(PIECE, count), np.uint32)

    def add(self, numbers: Int64s) -> None:
        """Take the next positions; the numbers are of the data set.

        Raises: UsageError when there are more than announced.
        """
        start, stop = self.arrived, self.arrived + len(numbers)
        if stop > self.count:
            raise UsageError(f"the order has more positions than the {self.count} announced")
        if not self._replacement:
            low, high = start * PARTS // self.count, (stop - 1) * PARTS // self.count
            edges = -(-np.arange(low, high + 2) * self.count // PARTS)
            edges[0], edges[-1] = start, stop
            buckets = np.arange(low + 1, high + 2, dtype=np.uint8)
            self._table[numbers - self._low] = np.repeat(buckets, np.diff(edges))
        self.arrived = stop
        at = 0
        while at < len(numbers):
            place = (start + at) % PIECE
            part = numbers[at : at + PIECE - place]
            self._room[place : place + len(part)] = part - self._low
            at += len(part)
            if place + len(part) == PIECE or start + at == self.count:
                room = self._room[: place + len(part)]
                self._pieces.append(Narrow(room, len(self._table)))

    def finish(self) -> Order:
        """Return the order when all has arrived.

        Raises:
            UsageError: it is shorter than announced.
            SampleIndexError: it visits a sample twice, and was not announced so; `.index` is the
                sample's number in the node.
        """
        if self.arrived < self.count:
            raise UsageError(
                f"the order ends after {self.arrived} of the {self.count} positions announced"
            )
        order = Order(self.count, self._low, self._table, self._pieces, None)
        if self._replacement:
            order.following = self._link(order)
        elif np.count_nonzero(self._table) < self.count:
            twice = self._first_repeated(order)
            raise SampleIndexError("the order visits a sample more than once", index=twice)
        return order

    def _link(self, order: Order) -> Bytes:
        """From the end to the beginning, a bucket at a time: within one it makes no difference."""
        following = np.zeros(self.count, np.uint8)
        for bucket in range(PARTS, 0, -1):
            start, stop = order.edge(bucket), order.edge(bucket + 1)
            places = order.numbers(start, stop) - self._low
            following[start:stop] = self._table[places]
            self._table[places] = bucket
        return following

    def _first_repeated(self, order: Order) -> int:
        seen = np.zeros(len(self._table), np.bool_)
        for start in range(0, self.count, PIECE):
            numbers = order.numbers(start, start + PIECE)
            unique, counts = np.unique(numbers, return_counts=True)
            again = unique[(counts > 1) | seen[unique - self._low]]
            if len(again):
                return int(again[0])
            seen[unique - self._low] = True
        raise AssertionError("an order that is shorter than its table has a repeated sample")
