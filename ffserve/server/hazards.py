"""Leases without asking: the daemon's side of the tables in which clients name what they lease.

Every session that can share memory gets a table of its own with its WELCOME, made here, sealed,
and mapped by nobody else. It is looked at from the session's first LEASE on, which also gives it a
budget: an equal share of `SHARE` of the arena among all who lease. What a table may hold at most
(`allowed`) follows its budget down only when its client has let go of so much, and up only when
others have; so all of them together never hold more than that share. Who has leased nothing for
`IDLE_S` has no budget any more; its next lease is asked for by a LEASE, as its first one was.

What the tables say is looked at when something is to be evicted. Nothing in them is believed: a
number that is none is passed over, and who is found to hold more than it was allowed, by the slots
that it keeps, is cut off; a client that keeps to the rules never is, since it charges each sample
at least what its slot takes. A table is not read at one moment, though: of a client that gives back
and leases anew meanwhile both is seen, together more than it may. So who seems to hold too much is
looked at again, by itself, and is cut off when that is so in `LOOKS` looks, one upon the other. Any
look will do otherwise, since what stays leased is seen in each. So what one client does is never
another's fault, and who holds too much now and then gains nothing by it.

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
from ffserve.cache.shm import sealed_file
from ffserve.cache.tables import Directory
from ffserve.config import format_size
from ffserve.engine import hazards
from ffserve.errors import FFServeError, ProtocolError, ReadError

Int64s = NDArray[np.int64]

SHARE = 3, 8
"""Of the arena: what all tables may hold together. LEASE has what is left of its half."""
LOOKS = 8
"""A client that does nothing but change what it leases, in the worst order, was seen wrongly in one
look of 40,000."""
IDLE_S = 10.0
"""A share is looked at so often, when somebody asks for a lease, whether it is used."""
_NONE: Int64s = np.zeros(0, np.int64)


@dataclass(eq=False, slots=True)
class LeaseTable:
    """One session's.

    fd: of its memory, for the client; -1 once it was handed out. cut: ends the session, soon but
    not at once. budget, allowed: bytes, see the module's text. named: what it leased last, or
    leases, when it was looked at whether its share is used.
    """

    size: ClassVar[int] = hazards.TABLE_SIZE
    fd: int
    memory: hazards.Table
    cut: Callable[[FFServeError], None]
    budget: int = 0
    allowed: int = 0
    named: bytes = b""

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
        self._idle_at = 0.0

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

    def wanted(self, table: LeaseTable, now: float) -> None:
        """A session leases: look at its table from now on, and see that it has its share."""
        if now >= self._idle_at:
            self._idle_at = now + IDLE_S
            self._take_back()
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

    def _take_back(self) -> None:
        """Take the share of those who have leased nothing since the last time."""
        for table in tuple(self._tables):
            before, table.named = table.named, table.memory.first_named()
            if before != table.named:
                continue
            budget = table.budget
            if table.set_budget(0):
                table.set_budget(budget)  # It leases something.
            else:
                table.allowed, table.named = 0, b""
                self._tables.remove(table)
        self.share_out()

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
        samples, ends = self._hazards.read()
        if not len(samples):
            return _NONE
        slots = self._located(samples)
        suspects = self._suspects(slots, ends)
        if suspects:
            parts = np.split(slots, ends[:-1])
            guilty = []
            for k in suspects:
                table = self._tables[k]
                again = self._look_again(table)
                parts[k] = _NONE if again is None else again
                if again is None:
                    guilty.append(table)
            self._cut_off(guilty)
            slots = np.concatenate(parts)
        held: Int64s = slots[slots >= 0]
        return held

    def _located(self, samples: NDArray[np.uint32]) -> Int64s:
        """Return the slots of samples that a table names, -1 for those that are not in memory."""
        numbers = samples.astype(np.int64)
        numbers[numbers >= self._directory.end] = -1
        slots: Int64s = self._directory.slot_of[np.maximum(numbers, 0)].astype(np.int64) - 1
        slots[numbers < 0] = -1
        return slots

    def _look_again(self, table: LeaseTable) -> Int64s | None:
        """Return the slots of a table that seemed to hold too much; None when it always does."""
        alone = hazards.Hazards([table.memory])
        for _ in range(LOOKS - 1):
            slots = self._located(alone.read()[0])
            if not self._too_much(slots, table.allowed):
                return slots
        return None

    def _cut_off(self, tables: list[LeaseTable]) -> None:
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
        if tables:
            self.share_out()

    def _suspects(self, slots: Int64s, ends: Int64s) -> list[int]:
        """Return the rows of the tables that name too many samples, or hold too much, it seems."""
        sums = np.diff(np.append(0, self._sizes(slots).cumsum())[ends], prepend=0)
        counts = np.diff(ends, prepend=0)
        rows = np.flatnonzero((sums > self._allowed) | (counts * SMALLEST_SLOT > self._allowed))
        parts = np.split(slots, ends[:-1]) if len(rows) else []
        return [k for k in rows.tolist() if self._too_much(parts[k], int(self._allowed[k]))]

    def _too_much(self, slots: Int64s, allowed: int) -> bool:
        if len(slots) * SMALLEST_SLOT > allowed:
            return True
        return int(self._sizes(np.unique(slots)).sum()) > allowed

    def _sizes(self, slots: Int64s) -> Int64s:
        return np.where(slots >= 0, self._arena.sizes(np.maximum(slots, 0)), 0)

    @property
    def held_size(self) -> int:
        """Bytes of the slots that are leased now."""
        return int(self._arena.sizes(np.unique(self.slots())).sum())

    def restore(self, numbers: Int64s) -> None:
        """Make samples readable again that were retracted just now."""
        hazards.restore(self._directory.entries_memory.address, numbers)
