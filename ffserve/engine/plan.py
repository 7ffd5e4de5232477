"""The Python face of plan.c: a plain miss, planned by two calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.engine._core import ffi, lib
from ffserve.engine.blocks import ROWS, Shards
from ffserve.engine.residents import Residents
from ffserve.engine.slots import Slots

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

MOST_CLASSES: int = lib.FFS_PLAN_CLASSES
"""Size classes that the blocks of one plan may have."""

AtHand: TypeAlias = tuple[Int32s, int, bool]
"""Victims that need no choice: entries of a stack of a group's residents of one size class, their
key, whether the newest go first."""
Stock: TypeAlias = tuple[int, Int64s, bool, AtHand | None]
"""A size class; its free slots, the last of which is taken first; whether there could be more of
them; victims."""

_I64S = ffi.typeof("int64_t[]")
_I32S = ffi.typeof("int32_t[]")
_from_buffer = ffi.from_buffer


class Planner:
    """The tables that a plan is made from, which stay where they are.

    Args:
        class_sizes: int64[classes], of slots, rising. slab_used: int64[slabs], slots in use.
        largest: bytes of a block that several samples share.
    """

    def __init__(
        self,
        slots: Slots,
        shards: Shards,
        residents: Residents,
        class_sizes: Int64s,
        slab_used: Int64s,
        largest: int,
    ) -> None:
        c = self._c = ffi.new("ffs_planner *")
        self._keep = [slots, shards, residents, class_sizes, slab_used]
        c.slots, c.shards, c.residents = slots.c, shards.c, residents.c
        c.class_sizes = _from_buffer(_I64S, class_sizes)
        c.class_count, c.largest = len(class_sizes), largest
        c.slab_used = _from_buffer(_I64S, slab_used)
        self._stocks = ffi.new("ffs_stock[]", MOST_CLASSES)

    def choose(self, numbers: Int64s, most: int, group: int, stocks: Sequence[Stock]) -> Plan:
        """Choose slots for the samples.

        Args: numbers: n > 0 of them. most: bytes, about. stocks: at most MOST_CLASSES.
        """
        victims = False
        for c, (size_class, free, more, at_hand) in zip(self._stocks, stocks, strict=False):
            c.size_class, c.group, c.more_free = size_class, group, more
            c.free_slots, c.free_count = _from_buffer(_I64S, free), len(free)
            c.victim_count = 0
            if at_hand is not None:
                entries, c.key, c.newest = at_hand
                c.victims, c.victim_count = _from_buffer(_I32S, entries), len(entries)
                victims = True
        return Plan(self._c, self._stocks, len(stocks), numbers, most, victims)


class Plan:
    """What was chosen.

    found: whether it is one; if not, nothing was done. c: the fields of `ffs_plan` in plan.h.
    table: int64[ROWS, n], the blocks. slots: int64[n], for them. taken: the same slots, the free
        ones by size class, then those with victims by size class.
    contents: int64[4, victims], see `Slots.contents`.
    """

    __slots__ = (
        "_blocks", "_contents", "_planner", "_slots", "_taken", "c", "contents", "found", "slots",
        "table", "taken",
    )  # fmt: skip

    def __init__(
        self, planner: Any, stocks: Any, stock_count: int, numbers: Int64s, most: int, victims: bool
    ) -> None:
        n = len(numbers)
        self._planner, c = planner, ffi.new("ffs_plan *")
        self.c = c
        room = np.empty((ROWS + 2) * n, np.int64)
        contents = np.empty(4 * n if victims else 0, np.int64)
        self._blocks = _from_buffer(_I64S, room)
        self._slots = self._blocks + ROWS * n
        self._taken = self._slots + n
        self._contents = _from_buffer(_I64S, contents)
        count = lib.ffs_plan_choose(
            planner,
            _from_buffer(_I64S, numbers),
            n,
            most,
            stocks,
            stock_count,
            self._blocks,
            self._slots,
            self._taken,
            self._contents,
            c,
        )
        self.found: bool = count > 0
        if count:
            self.table = room[: ROWS * count].reshape(ROWS, count)
            self.slots = room[ROWS * n : ROWS * n + count]
            self.taken = room[(ROWS + 1) * n : (ROWS + 1) * n + count]
            gone = c.gone
            self.contents = contents[: 4 * gone].reshape(4, gone)

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """The size classes, rising, and how many slots of each it takes, where nothing but a stock
        is in the way."""
        c = self.c
        return [(c.classes[k], c.wanted[k]) for k in range(c.class_count)] if c.count else []

    def parts(self) -> list[tuple[int, Int64s, Int64s, int]]:
        """Return for each size class the free slots that are taken, those with victims, and how
        many entries were taken off their stack."""
        c, found = self.c, []
        fresh, gone = 0, c.count - c.gone
        for k in range(c.class_count):
            fresh_end = fresh + c.fresh[k]
            gone_end = gone + c.wanted[k] - c.fresh[k]
            looked = c.looked[k]
            found.append(
                (c.classes[k], self.taken[fresh:fresh_end], self.taken[gone:gone_end], looked)
            )
            fresh, gone = fresh_end, gone_end
        return found

    def take(self, group: int, load: int) -> tuple[Int64s, Int64s]:
        """Have the slots, whose victims were made unreadable; return their places and sizes."""
        places, rooms = np.empty((2, len(self.slots)), np.int64)
        rc = lib.ffs_plan_take(
            self._planner,
            group,
            load,
            self._blocks,
            self._slots,
            self._taken,
            self._contents,
            _from_buffer(_I64S, places),
            _from_buffer(_I64S, rooms),
            self.c,
        )
        assert rc == 0, "what is planned is not changed before it is taken"
        return places, rooms
