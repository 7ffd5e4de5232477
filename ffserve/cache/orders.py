"""Announced orders: the permutation of one epoch, as the daemon keeps it.

Two views of one permutation, five bytes per sample together. *Pieces* hold the sample at each
position (for prefetching), four bytes each; a piece is dropped when the job has advanced past it.
The *table* holds the part of the epoch in which each sample comes (for eviction), of PARTS equal
parts: 32 to 64 parts equal exact positions to a tenth of a point of hit rate, so a byte is enough.
A sample that comes more than once (sampling with replacement) is entered at its next use, and
`following` holds the part of the use after that, one byte per position.

The input of `Arriving` is untrusted until `finishing` has returned.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

import numpy as np

from ffserve.dtypes import Bytes, Int64s, UInt32s
from ffserve.engine.slots import OrderParts
from ffserve.errors import SampleIndexError, UsageError
from ffserve.limits import MOST_VISITS

PARTS = 250
"""An epoch has this many parts, numbered from 1. A 0 in a table means that the sample does not
come, or not any more."""
PIECE = 65_536
"""Positions are held and dropped in pieces of this size."""
_FEW = 1 << 20

STEP_COUNT, STEP_SIZE = 16_384, 1 << 20
"""One step of a long calculation handles this many positions of an order, or bytes of its table."""

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A calculation in steps: the daemon serves others in between."""


def done(steps: Steps[T]) -> T:
    """Take all steps; return the result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result


class AnnouncedOrder:
    """A complete order, made by `Arriving.finishing`.

    Args:
        count: positions. low: the lowest sample number of the dataset.
        table: uint8[span]: part, from 1, of sample `low` + k.
        pieces: sample numbers less `low` (below 2^32: see `tables.CAPACITY`), PIECE each but the
           last.
        following: uint8[count] or None: the part in which the sample at a position comes again.
    """

    def __init__(
        self,
        count: int,
        low: int,
        table: Bytes,
        pieces: list[UInt32s | None],
        following: Bytes | None,
    ) -> None:
        self.count = count
        self.low = low
        self.table = table
        self.c = OrderParts(table, low)
        self.following = following
        self._pieces = pieces
        self._position = 0
        self.like: tuple[AnnouncedOrder, bool] | None = None
        """The order of the epoch after, and whether it visits the same samples."""

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        left = self.count - self._position // PIECE * PIECE
        return 4 * left + len(self.table) + (0 if self.following is None else self.count)

    def part(self, position: int) -> int:
        """Return the part of a position; PARTS + 1 at the end."""
        return 1 + position * PARTS // self.count

    def edge(self, part: int) -> int:
        """Return the first position of a part."""
        return -(-(part - 1) * self.count // PARTS)

    def numbers(self, start: int, stop: int) -> Int64s:
        """Return the samples at positions [start, stop) but for those dropped."""
        start, stop = max(start, self._position), min(stop, self.count)
        if start >= stop:
            return np.zeros(0, np.int64)
        runs = []
        for k in range(start // PIECE, -(-stop // PIECE)):
            piece = self._pieces[k]
            if piece is not None:
                run = piece[max(start - k * PIECE, 0) : stop - k * PIECE]
                runs.append(np.add(run, self.low, dtype=np.int64))
        if len(runs) == 1:
            return runs[0]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def parts(self, numbers: Int64s) -> Bytes:
        """Return the part in which each sample comes next, 0 for those that do not."""
        return self.c.parts(numbers)[0]

    def advance(self, position: int) -> Int64s:
        """The job is at `position`: return and drop the samples before it."""
        numbers = self.numbers(self._position, position)
        if self.following is None:
            self.table[numbers - self.low] = 0
        else:
            # The last position counts if a sample comes twice here.
            self.table[numbers - self.low] = self.following[self._position : position]
        for k in range(self._position // PIECE, position // PIECE):
            self._pieces[k] = None
        self._position = max(self._position, position)
        return numbers

    def pass_over(self, numbers: Int64s) -> None:
        """The job has used these samples, and has not reported a position behind them yet. Not for
        an order with replacement."""
        assert self.following is None
        self.table[numbers - self.low] = 0

    def same(self, other: AnnouncedOrder) -> Steps[bool]:
        """Return whether both visit the same samples in the same order, as far as both still hold
        them."""
        if (self.count, self.low, len(self.table)) != (other.count, other.low, len(other.table)):
            return False
        for a, b in zip(self._pieces, other._pieces, strict=True):
            if not (a is None or b is None or a is b or np.array_equal(a, b)):
                return False
            yield None
        return True

    def share(self, other: AnnouncedOrder) -> None:
        """Share the pieces of an order that is the `same`."""
        self._pieces = [
            a if b is None else b for a, b in zip(self._pieces, other._pieces, strict=True)
        ]

    def compare(self, following: AnnouncedOrder) -> Steps[None]:
        """Find out whether the order of the epoch after visits all samples left in this one: sets
        `like`."""
        same = (self.count, self.low, len(self.table)) == (
            following.count,
            following.low,
            len(following.table),
        )
        for first in range(0, len(self.table) if same else 0, STEP_SIZE):
            here, there = (each.table[first : first + STEP_SIZE] for each in (self, following))
            same = not np.any((here > 0) & (there == 0))
            yield None
            if not same:
                break
        self.like = following, same


class Arriving:
    """An order that is being received from a client, piece by piece.

    Args:
        count: announced positions.
        sample_count: of the dataset. low, span: its sample numbers are in [low, low + span).
        replacement: whether a sample may come more than once.
        user: who announces it.

    Raises: UsageError when no order of this length is valid.
    """

    def __init__(
        self,
        count: int,
        *,
        sample_count: int,
        low: int,
        span: int,
        replacement: bool,
        user: int = 0,
    ) -> None:
        most = max(MOST_VISITS * sample_count, _FEW) if replacement else sample_count
        if not 0 < count <= most:
            raise UsageError(
                f"invalid order: {count} positions over a dataset of {sample_count} samples",
                hint=f"it may have 1 to {most}"
                + ("" if replacement else "; an order that repeats samples must say so"),
            )
        self.count = count
        self.user = user
        self.size = span + 5 * count
        """Bytes that it takes, at most."""
        self.arrived = 0
        self._low = low
        self._replacement = replacement
        self._table = np.zeros(span, np.uint8)
        self._pieces: list[UInt32s] = []

    def add(self, numbers: Int64s) -> None:
        """Add the next positions; the numbers are of the dataset.

        Raises: UsageError when there are more than announced.
        """
        start, stop = self.arrived, self.arrived + len(numbers)
        if stop > self.count:
            raise UsageError(f"the order has more positions than the {self.count} announced")
        if not self._replacement:
            low, high = start * PARTS // self.count, (stop - 1) * PARTS // self.count
            edges = -(-np.arange(low, high + 2) * self.count // PARTS)
            edges[0], edges[-1] = start, stop
            parts = np.arange(low + 1, high + 2, dtype=np.uint8)
            self._table[numbers - self._low] = np.repeat(parts, np.diff(edges))
        self.arrived = stop
        at = 0
        while at < len(numbers):
            k, offset = divmod(start + at, PIECE)
            if offset == 0:
                self._pieces.append(np.empty(min(PIECE, self.count - k * PIECE), np.uint32))
            run = numbers[at : at + PIECE - offset]
            self._pieces[k][offset : offset + len(run)] = run - self._low
            at += len(run)

    def finish(self) -> AnnouncedOrder:
        """As `finishing`, in one step."""
        return done(self.finishing())

    def finishing(self) -> Steps[AnnouncedOrder]:
        """Return the order when all of it was received.

        Raises:
            UsageError: it is shorter than announced.
            SampleIndexError: it visits a sample twice without `replacement`; `.index` is the
                sample number.
        """
        if self.arrived < self.count:
            raise UsageError(
                f"the order ends after {self.arrived} of the {self.count} positions announced"
            )
        order = AnnouncedOrder(self.count, self._low, self._table, list(self._pieces), None)
        if self._replacement:
            order.following = yield from self._link(order)
            return order
        visited = 0
        for first in range(0, len(self._table), STEP_SIZE):
            visited += int(np.count_nonzero(self._table[first : first + STEP_SIZE]))
            yield None
        if visited < self.count:
            twice = yield from self._first_repeated(order)
            raise SampleIndexError("the order visits a sample more than once", index=twice)
        return order

    def _link(self, order: AnnouncedOrder) -> Steps[Bytes]:
        """Compute `following`, from the last part to the first."""
        following = np.zeros(self.count, np.uint8)
        for part in range(PARTS, 0, -1):
            first, stop = order.edge(part), order.edge(part + 1)
            # Both places of a sample that comes twice in a part have the same next use.
            cuts = range(first, stop, STEP_COUNT)
            for start in cuts:
                places = order.numbers(start, min(start + STEP_COUNT, stop)) - self._low
                following[start : start + len(places)] = self._table[places]
                yield None
            for start in cuts:
                places = order.numbers(start, min(start + STEP_COUNT, stop)) - self._low
                self._table[places] = part
                yield None
        return following

    def _first_repeated(self, order: AnnouncedOrder) -> Steps[int]:
        seen = np.zeros(len(self._table), np.bool_)
        for start in range(0, self.count, STEP_COUNT):
            numbers = order.numbers(start, start + STEP_COUNT)
            unique, counts = np.unique(numbers, return_counts=True)
            again = unique[(counts > 1) | seen[unique - self._low]]
            if len(again):
                return int(again[0])
            seen[unique - self._low] = True
            yield None
        raise AssertionError("an order that is shorter than its table has a repeated sample")
