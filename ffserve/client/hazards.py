"""Leasing samples of the daemon: without a round trip what is in memory, by asking what is not.

What is read in place is written into a table of this process's own, which the daemon looks at
before it evicts (engine/hazards.c). The table belongs to the connection: a child that was forked
leaves it alone, and makes one of its own with its connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ffserve.engine.hazards import Lease

if TYPE_CHECKING:
    from ffserve.client.connection import Connection
    from ffserve.client.source import Int64s, Leased


class Asked:
    """Leases that the daemon has been asked for, beside one without asking."""

    __slots__ = ("_connection", "_lease", "_tags")

    def __init__(self, connection: Connection, lease: Lease | None) -> None:
        self._connection = connection
        self._lease = lease
        self._tags: list[int] = []

    def ask(self, dataset: int, indices: Int64s) -> int:
        """Ask for a lease; return its tag."""
        return self._connection.lease(dataset, indices, self._tags)

    def release(self) -> None:
        """Give all of them back."""
        if self._lease is not None:
            self._lease.release()
        tags, self._tags = self._tags, []
        if tags:
            self._connection.release(tags)


class Leasing:
    """`with` it: samples are leased on entry and released on leaving."""

    __slots__ = ("_indices", "_lease", "_leased")

    def __init__(self, lease: Callable[[Any], Leased], indices: Any) -> None:
        self._lease = lease
        self._indices = indices
        self._leased: Leased | None = None

    def __enter__(self) -> Leased:
        leased = self._leased = self._lease(self._indices)
        return leased

    def __exit__(self, *exc: object) -> None:
        leased = self._leased
        if leased is not None:
            leased.release()
            self._leased = None
