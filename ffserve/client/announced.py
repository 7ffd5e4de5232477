"""The orders that a reader announced, and how far it has read in them.

They go to the next daemon when this one is lost.
"""

from __future__ import annotations

import operator
import time
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Int64s
from ffserve.errors import SampleIndexError, UsageError
from ffserve.limits import MOST_NAME

REPORT_INTERVAL_S, REPORT_COUNT = 0.01, 4096
"""How often a reader that counts by itself reports its position in an order: after this time, or
this many samples. A job that asks for samples far from its position is taken to follow no order."""
SLOW_READS_S = 0.005
"""Reads that are further apart than this are reported each: what is used between two reports is
prefetched twice, and that takes memory."""
MOST_EPOCHS = 2
"""A reader keeps this many orders for the next daemon, in case this one restarts."""

Order: TypeAlias = tuple[Int64s, int, str | None, bool]
"""The arguments of `SampleSource.announce`: order, epoch, name, replacement."""


@dataclass(slots=True)
class _KeptOrder:
    order: NDArray[np.uint32] | Int64s
    name: str | None
    replacement: bool


class AnnouncedOrders:
    """The orders that a reader announced in this process, and how far it has read in them.

    A loader reports its position itself (`Reader.reached`). For a program that only announces and
    reads, the reader counts: a read that is the next part of the order moves the position, another
    one does not. Copies of a reader in other processes (a loader's workers) do neither.

    any: whether there are any; an attribute, since each read looks at it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing was announced in this process."""
        self.any = False
        self._orders: dict[int, _KeptOrder] = {}
        self._epoch = 0
        self._position = 0
        self._reported = self._read_at = 0.0
        self._reported_position = 0
        self._counted_elsewhere = False

    def add(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Keep an order that the source has taken."""
        self.any = True
        if not self._orders or epoch <= self._epoch:
            self._orders.clear()
            self._epoch, self._position, self._reported_position = epoch, 0, 0
        small = int(order.max()) < 1 << 32
        self._orders[epoch] = _KeptOrder(
            order.astype(np.uint32) if small else order, name, replacement
        )
        current = self._orders.get(self._epoch)
        if current is None or (epoch > self._epoch and self._position >= len(current.order)):
            # The epoch before it is over.
            self._epoch, self._position, self._reported_position = epoch, 0, 0
        while len(self._orders) > MOST_EPOCHS:
            del self._orders[min(self._orders)]

    def orders(self) -> list[Order]:
        """Return arguments of `SampleSource.announce`, first epoch first."""
        return [
            (known.order.astype(np.int64), epoch, known.name, known.replacement)
            for epoch, known in sorted(self._orders.items())
        ]

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and position in its order."""
        return self._epoch, self._position

    def reached(self, epoch: int, position: int) -> None:
        """Take a position from the program, which counts from now on."""
        self._counted_elsewhere = True
        if epoch >= self._epoch:
            self._epoch, self._position = epoch, position

    def read(self, numbers: Int64s) -> tuple[int, int] | None:
        """Count a read; return (epoch, position) if a report is due."""
        if self._counted_elsewhere or (known := self._orders.get(self._epoch)) is None:
            return None
        part = known.order[self._position : self._position + len(numbers)]
        if len(part) != len(numbers) or not np.array_equal(part, numbers):
            return None
        self._position += len(numbers)
        epoch, position = self._epoch, self._position
        over = position == len(known.order)
        if over and epoch + 1 in self._orders:
            self._epoch, self._position = epoch + 1, 0
        now = time.monotonic()
        late = position - self._reported_position >= REPORT_COUNT
        slow, self._read_at = now - self._read_at >= SLOW_READS_S, now
        if not (over or late or slow) and now - self._reported < REPORT_INTERVAL_S:
            return None
        self._reported, self._reported_position = now, self._position
        return epoch, position


def check_order(order: Int64s, count: int, name: object, replacement: bool) -> None:
    """Check an order of a data set of `count` samples.

    Raises: UsageError when it is empty, or its name is invalid; SampleIndexError when it visits a
        sample twice and `replacement` is false.
    """
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= MOST_NAME):
        raise UsageError(
            f"an order's name must be a string of 1 to {MOST_NAME} characters, not {name!r}"
        )
    if not len(order):
        raise UsageError("the order has no samples", hint="give the indices of the whole epoch")
    if replacement:
        return
    seen = np.zeros(count, np.bool_)
    seen[order] = True
    if np.count_nonzero(seen) < len(order):
        values, counts = np.unique(order, return_counts=True)
        raise SampleIndexError(
            "the order visits a sample more than once",
            index=int(values[int(np.argmax(counts > 1))]),
            hint="pass replacement=True if that is meant",
        )


def check_count(name: str, value: object) -> int:
    """Return a value that must be an integer from 0. Raises: UsageError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} must be an integer, not {value!r}") from None
    if not 0 <= number < 1 << 63:
        raise UsageError(f"{name} must be from 0 to 2^63 - 1, not {number}")
    return number
