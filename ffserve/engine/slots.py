"""The Python face of slots.c: what is per sample when the cache plans a request.

Pure functions over the cache's own arrays, one call a batch. They decide nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

FREE: int = lib.FFS_SLOT_FREE
LOADING: int = lib.FFS_SLOT_LOADING
RESIDENT: int = lib.FFS_SLOT_RESIDENT
FAILED: int = lib.FFS_SLOT_FAILED

_I64S = ffi.typeof("int64_t[]")
_I32S = ffi.typeof("int32_t[]")
_U8S = ffi.typeof("uint8_t[]")
_from_buffer = ffi.from_buffer


class Slots:
    """Tables by sample and by slot, which stay where they are; the first five are attributes.

    Args:
        slot_of: int32[samples], the number of its slot + 1, 0 for none.
        states, pins, firsts, counts, loads: by slot; loads: number of the load that fills it.
        offsets, sizes: int64[slots], in the arena.
    """

    def __init__(
        self,
        slot_of: Int32s,
        states: NDArray[np.uint8],
        pins: Int32s,
        firsts: Int64s,
        counts: Int32s,
        loads: Int32s,
        offsets: Int64s,
        sizes: Int64s,
    ) -> None:
        self.slot_of, self.states, self.pins = slot_of, states, pins
        self.firsts, self.counts = firsts, counts
        c = self.c = ffi.new("ffs_slots *")
        self._keep: list[Any] = []
        assert len(states) == len(pins) == len(firsts) == len(counts) == len(loads) == len(sizes)
        for name, kind, array in (
            ("slot_of", _I32S, slot_of),
            ("states", _U8S, states),
            ("pins", _I32S, pins),
            ("firsts", _I64S, firsts),
            ("counts", _I32S, counts),
            ("loads", _I32S, loads),
            ("offsets", _I64S, offsets),
            ("sizes", _I64S, sizes),
        ):
            pointer = _from_buffer(kind, array)
            setattr(c, name, pointer)
            self._keep.append(pointer)
        c.sample_count, c.slot_count = len(slot_of), len(states)
        self._found = ffi.new("int64_t *")

    def split(self, numbers: Int64s, most: int) -> tuple[int, Int64s, Int64s, Int64s]:
        """Look samples up.

        Args: most: bytes; no further than to where the slots found have more together.
        Returns: how many samples were looked at, at least one; the positions of those that are in
            no slot; the slots that hold the others, each once, and where each comes first.
        """
        n = len(numbers)
        out = np.empty(3 * n + 3, np.int64)
        c = _from_buffer(_I64S, out)
        rc = lib.ffs_slots_split(
            self.c, _from_buffer(_I64S, numbers), n, most, c + 3, c + (n + 3), c + (2 * n + 3), c
        )
        assert rc == 0, "samples are those of open shards"
        absent, held = 3 + c[1], n + 3 + c[2]
        return c[0], out[3:absent], out[n + 3 : held], out[2 * n + 3 : 2 * n + 3 + c[2]]

    def cut(self, blocks: Int64s, where: Int64s, most: int) -> tuple[Int64s, Int64s, int]:
        """Leave each block once, in order, until they have more than `most` bytes together.

        Args:
            blocks: int64[rows, n] of `ffserve.engine.blocks`. where: int64[n], position of the
                sample that wants it; the one at 0 is served however large. Both are overwritten.
        Returns: what is left of both; the position of the first sample left out, -1 if none was.
        """
        n, end = len(where), self._found
        kept = lib.ffs_slots_cut(
            self.c, _from_buffer(_I64S, blocks), _from_buffer(_I64S, where), n, most, end
        )
        assert kept >= 0, "a block that is to be read lies in no slot, not even in part"
        if kept < n:
            blocks, where = blocks[:, :kept].copy(), where[:kept]
        return blocks, where, end[0]

    def pin(self, slots: Int64s) -> tuple[int, Int64s]:
        """Pin slots, once each; return the bytes of all, and those of them that are being read."""
        loading, size = np.empty(len(slots), np.int64), self._found
        count = lib.ffs_slots_pin(
            self.c, _from_buffer(_I64S, slots), len(slots), _from_buffer(_I64S, loading), size
        )
        assert count >= 0
        return size[0], loading[:count]

    def unpin(self, slots: Int64s) -> int:
        """Give pins back; return how many slots failed and have none left."""
        failed: int = lib.ffs_slots_unpin(self.c, _from_buffer(_I64S, slots), len(slots))
        assert failed >= 0, "only what was pinned is given back"
        return failed

    def enter(self, blocks: Int64s, slots: Int64s, load: int) -> tuple[int, Int64s, Int64s]:
        """Say that blocks are being read into slots, each of which is pinned once more.

        Returns: bytes of the slots together; offset and size of each.
        """
        places, sizes = np.empty((2, len(slots)), np.int64)
        size = lib.ffs_slots_enter(
            self.c,
            _from_buffer(_I64S, blocks),
            _from_buffer(_I64S, slots),
            len(slots),
            load,
            _from_buffer(_I64S, places),
            _from_buffer(_I64S, sizes),
        )
        assert size >= 0, "a block that is to be read lies in no slot, not even in part"
        return size, places, sizes

    def resident(self, numbers: Int64s) -> Int64s:
        """Return the slots of those samples that are there, in their order, repeats kept."""
        return self._of(numbers, RESIDENT)

    def taken(self, numbers: Int64s) -> Int64s:
        """Return the slots of those samples that are there, or on their way."""
        return self._of(numbers, -1)

    def _of(self, numbers: Int64s, state: int) -> Int64s:
        slots = np.empty(len(numbers), np.int64)
        count = lib.ffs_slots_of(
            self.c, _from_buffer(_I64S, numbers), len(numbers), state, _from_buffer(_I64S, slots)
        )
        assert count >= 0, "samples are those of open shards"
        return slots[:count]

    def contents(self, slots: Int64s) -> Int64s:
        """Return int64[4, n]: first sample and number of samples in each slot, its offset, its
        size."""
        tables = np.empty((4, len(slots)), np.int64)
        rc = lib.ffs_slots_contents(
            self.c, _from_buffer(_I64S, slots), len(slots), _from_buffer(_I64S, tables)
        )
        assert rc == 0
        return tables

    def usable(self, slots: Int64s) -> NDArray[np.bool_]:
        """Return for each slot whether it is resident and has no pin."""
        usable = np.empty(len(slots), np.bool_)
        rc = lib.ffs_slots_usable(
            self.c, _from_buffer(_I64S, slots), len(slots), _from_buffer(_U8S, usable)
        )
        assert rc == 0
        return usable

    def vacate(self, slots: Int64s) -> None:
        """Say that slots hold nothing any more and are free."""
        rc = lib.ffs_slots_vacate(self.c, _from_buffer(_I64S, slots), len(slots))
        assert rc == 0


def mark(seen: NDArray[np.bool_], numbers: Int64s, low: int) -> tuple[int, int]:
    """Mark seen[numbers - low]; return how many were not marked before, and how many were, a place
    that comes twice counted once."""
    found = ffi.new("int64_t[2]")
    rc = lib.ffs_mark(
        _from_buffer(_U8S, seen), len(seen), _from_buffer(_I64S, numbers), len(numbers), low, found
    )
    assert rc == 0, "samples are those of the data set"
    return found[0], found[1]
