"""What a reader announced, and how far it has read in it.

A loader reports its position itself (`Reader.reached`). For who only announces and reads, the
reader counts: a read that is the next part of the order moves the position, any other does not.
Copies of a reader in other processes (a loader's workers) neither count nor report.
"""

from __future__ import annotations

import operator
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ffserve.client.source import Int64s
from ffserve.errors import SampleIndexError, UsageError

REPORT_INTERVAL_S = 0.01
"""How often a reader that counts by itself reports."""
MOST_EPOCHS = 2
"""Orders that are kept for the next daemon, should this one start anew."""
MOST_NAME = 200


@dataclass(slots=True)
class _Announcement:
    order: NDArray[np.uint32] | Int64s
    name: str | None
    replacement: bool


class Announced:
    """The orders of one reader in the process that announced them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing was announced: this process is another one."""
        self._orders: dict[int, _Announcement] = {}
        self._epoch = 0
        self._position = 0
        self._reported = 0.0
        self._told = False

    def add(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Keep an order that the source has taken."""
        if not self._orders or epoch <= self._epoch:
            self._orders.clear()
            self._epoch, self._position = epoch, 0
        small = int(order.max()) < 1 << 32
        self._orders[epoch] = _Announcement(
            order.astype(np.uint32) if small else order, name, replacement
        )
        while len(self._orders) > MOST_EPOCHS:
            del self._orders[min(self._orders)]

    def orders(self) -> list[tuple[Int64s, int, str | None, bool]]:
        """Return what `Source.announce` is to be called with, first things first."""
        return [
            (known.order.astype(np.int64), epoch, known.name, known.replacement)
            for epoch, known in sorted(self._orders.items())
        ]

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and position in its order."""
        return self._epoch, self._position

    def told(self, epoch: int, position: int) -> None:
        """Somebody else counts."""
        self._told = True
        if epoch >= self._epoch:
            self._epoch, self._position = epoch, position

    def read(self, numbers: Int64s) -> tuple[int, int] | None:
        """Count a read; return (epoch, position) when it is time to report."""
        if self._told or (known := self._orders.get(self._epoch)) is None:
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
        if not over and now - self._reported < REPORT_INTERVAL_S:
            return None
        self._reported = now
        return epoch, position

    def __bool__(self) -> bool:
        return bool(self._orders)


def check_order(order: Int64s, count: int, name: object, replacement: bool) -> None:
    """Refuse what is no order of a data set of `count` samples.

    Raises: UsageError when it is empty, or its name is none; SampleIndexError when it visits a
        sample twice and `replacement` does not say so.
    """
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= MOST_NAME):
        raise UsageError(f"an order's name is a text of 1 to {MOST_NAME} characters, not {name!r}")
    if not len(order):
        raise UsageError("an order without samples", hint="give the indices of the whole epoch")
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
    """Return an integer from 0. Raises: UsageError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is {value!r}, but an integer is needed") from None
    if not 0 <= number < 1 << 63:
        raise UsageError(f"{name} is {number}, but must be an integer from 0")
    return number
