"""What clients lease without asking, as the cache sees it.

A client says in memory of its own what it reads in place, and the cache looks there when it is
about to write to a slot: once before it chooses, so that it chooses others, and once after the
samples were made unreadable, when nobody can begin another lease on them. What was leased in
between is made readable again and stays (`engine/hazards.c` says why no lease is missed).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Leases(Protocol):
    """In the daemon `server.hazards.LeaseTables`; in a simulation any other."""

    @property
    def promised_size(self) -> int:
        """Bytes of slots that clients may hold by such leases."""
        ...

    @property
    def active(self) -> bool:
        """Whether anybody may lease so at all; who does not yet begins at no other time than when
        the cache is left alone."""
        ...

    def slots(self) -> Int64s:
        """Return the slots that are leased now; repeats, and slots that hold nothing, may be
        among them."""
        ...

    def restore(self, numbers: Int64s) -> None:
        """Make samples readable again that were retracted just now."""
        ...

    def resized(self) -> None:
        """The arena has another size."""
        ...


class NoLeases:
    """Nobody leases anything without asking."""

    promised_size = 0
    active = False
    _NONE = np.zeros(0, np.int64)

    def slots(self) -> Int64s:
        """Return none."""
        return self._NONE

    def restore(self, numbers: Int64s) -> None:
        """Never called, since nothing is leased."""
        raise AssertionError

    def resized(self) -> None:
        """Do nothing."""
