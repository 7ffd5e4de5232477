"""Leases without asking: the daemon's side of the tables in which clients name what they lease.

Every session that can share memory gets a table of its own with its WELCOME, made here, sealed,
and mapped by nobody else. It is looked at from the session's first LEASE on, which also gives it a
budget: an equal share of `SHARE` of the arena among all who lease. What a table may hold at most
(`allowed`) follows its budget down only when its client has let go of so much, and up only when
others have; so all of them together never hold more than that share.

What the tables say is looked at when something is to be evicted. Nothing in them is believed: a
number that is none is passed over, and who is found to hold more than it was allowed, by the slots
that it keeps, is cut off; a client that keeps to the rules never is, since it charges each sample
at least what its slot takes. A table is not read at one moment, though: of a client that gives back
and leases anew meanwhile both is seen, together more than it may. So who seems to hold too much is
looked at again, and is cut off when that is so in `LOOKS` looks, one upon the other.

With its session a client's table goes, however it ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.arena import SMALLEST_SLOT, Arena
from ffserve.cache.directory import Directory
from ffserve.cache.memory import sealed_file
from ffserve.config import format_size
from ffserve.engine import hazards
from ffserve.errors import FFServeError, ProtocolError, ReadError

Int64s = NDArray[np.int64]

SHARE = 3, 8
"""Of the arena: what all tables may hold together. LEASE has what is left of its half."""
LOOKS = 8
"""A client that does nothing but change what it leases, in the worst order, was seen wrongly in one
look of 40,000."""
_NONE: Int64s = np.zeros(0, np.int64)


@dataclass(eq=False, slots=True)
class LeaseTable:
    """One session's.

    fd: of its memory, for the client; -1 once it was handed out. cut: ends the session, soon but
    not at once. budget, allowed: bytes, see the module's text.
    """

    size: ClassVar[int] = hazards.TABLE_SIZE
    fd: int
    memory: hazards.Table
    cut: Callable[[FFServeError], None]
    budget: int = 0
    allowed: int = 0

    def set_budget(self, budget: int) -> int:
        """Tell the client; return what it has claimed after that."""
        self.budget = budget
        return self.memory.set_budget(budget)

    def take_fd(self) -> int:
        """Return the descriptor, which is the caller's then."""
        fd, self.fd = self.fd, -1
        return fd


class LeaseTables:
    """All of them. Fulfils `cache.leases.Leases`."""

    def __init__(self, arena: Arena, directory: Directory) -> None:
        self._arena = arena
        self._directory = directory
        self._tables: list[LeaseTable] = []
        """Those that are looked at."""
        self._hazards = hazards.Hazards([])
        self._allowed = _NONE

    def table(self, cut: Callable[[FFServeError], None]) -> LeaseTable | None:
        """Make a session's table; None when there is no memory or no descriptor left."""
        try:
            fd = sealed_file("ffserve-leases", hazards.TABLE_SIZE)
        except OSError:
            return None
        try:
            return LeaseTable(fd, hazards.Table(fd), cut)
        except ReadError:
            os.close(fd)
            return None

    def wanted(self, table: LeaseTable) -> None:
        """A session leases: look at its table from now on, and see that it has its share."""
        if table not in self._tables:
            self._tables.append(table)
        elif table.budget >= self._share:
            return
        self.share_out()

    def drop(self, table: LeaseTable) -> None:
        """A session ended: what it leased is leased no more."""
        table.set_budget(0)
        if table in self._tables:
            self._tables.remove(table)
            self.share_out()
        if table.fd >= 0:
            os.close(table.take_fd())

    @property
    def promised_size(self) -> int:
        """Bytes of slots that clients may hold by these leases."""
        return sum(table.allowed for table in self._tables)

    @property
    def _total(self) -> int:
        return self._arena.size * SHARE[0] // SHARE[1]

    @property
    def _share(self) -> int:
        return self._total // max(len(self._tables), 1)

    def resized(self) -> None:
        """The arena has another size."""
        if self._tables:
            self.share_out()

    def share_out(self) -> None:
        """Give everybody an equal share, as far as others have let go of what was theirs."""
        share = self._share
        for table in self._tables:
            claimed = table.set_budget(min(table.budget, share))
            table.allowed = min(table.allowed, max(table.budget, claimed))
        spare = self._total - self.promised_size
        for table in self._tables:
            more = min(max(share - table.allowed, 0), max(spare, 0))
            spare -= more
            table.allowed += more
            table.set_budget(min(share, table.allowed))
        self._hazards = hazards.Hazards([table.memory for table in self._tables])
        self._allowed = np.array([table.allowed for table in self._tables], np.int64)

    # ---- what is leased -------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether any session leases."""
        return bool(self._tables)

    def slots(self) -> Int64s:
        """Return the slots that are leased now, having cut off whoever leases too much."""
        looks, suspects = 0, set(self._tables)
        while self._tables:
            samples, ends = self._hazards.read()
            if not len(samples):
                break
            numbers = samples.astype(np.int64)
            numbers[numbers >= self._directory.end] = -1
            slots = self._directory.slot_of[np.maximum(numbers, 0)].astype(np.int64) - 1
            slots[numbers < 0] = -1
            suspects &= (excessive := self._excessive(slots, ends))
            if not excessive:
                held: Int64s = slots[slots >= 0]
                return held
            looks += 1
            if looks == LOOKS:
                # None in all looks, but somebody in each: they change places to escape this.
                self._cut_off(suspects or excessive)
                looks, suspects = 0, set(self._tables)
        return _NONE

    def _cut_off(self, tables: set[LeaseTable]) -> None:
        for table in tables:
            self._tables.remove(table)
            error = ProtocolError(
                "the client leases more of the arena than the "
                f"{format_size(table.allowed)} that it may",
                hint="install the same ffserve for the daemon and its clients",
            )
            table.allowed = 0
            table.set_budget(0)
            table.cut(error)
        self.share_out()

    def _excessive(self, slots: Int64s, ends: Int64s) -> set[LeaseTable]:
        """Return the tables that name too many samples, or hold too much, as it looks."""
        sizes = self._sizes(slots)
        sums = np.diff(np.append(0, sizes.cumsum())[ends], prepend=0)
        counts = np.diff(ends, prepend=0)
        found = set()
        for k in np.flatnonzero((sums > self._allowed) | (counts * SMALLEST_SLOT > self._allowed)):
            mine = slots[ends[k] - counts[k] : ends[k]]
            if (
                counts[k] * SMALLEST_SLOT > self._allowed[k]
                or int(self._sizes(np.unique(mine)).sum()) > self._allowed[k]
            ):
                found.add(self._tables[k])
        return found

    def _sizes(self, slots: Int64s) -> Int64s:
        return np.where(slots >= 0, self._arena.sizes(np.maximum(slots, 0)), 0)

    @property
    def held_size(self) -> int:
        """Bytes of the slots that are leased now."""
        return int(self._arena.sizes(np.unique(self.slots())).sum())

    def restore(self, numbers: Int64s) -> None:
        """Make samples readable again that were retracted just now."""
        hazards.restore(self._directory.entries_memory.address, numbers)
