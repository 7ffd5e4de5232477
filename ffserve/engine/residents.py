"""The Python face of residents.c: what is per slot when victims are taken and residents doubted.

Pure functions over the policy's own arrays, one call a batch. They decide nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]

NO_KEY: int = lib.FFS_NO_KEY
"""Of a slot that is on no stack."""
MIXED: int = lib.FFS_MIXED

_I64S = ffi.typeof("int64_t[]")
_I32S = ffi.typeof("int32_t[]")
_U8S = ffi.typeof("uint8_t[]")
_from_buffer = ffi.from_buffer


class Residents:
    """Tables by slot, which stay where they are.

    Args:
        keys: int64[slots]. groups: int32[slots]. ahead: bool[slots], filled before anybody asked.
        sizes: int64[slots], bytes.
        classes: int32[slabs], below 0 of large slots, whose size class is `large`.
        slots_per_slab: a power of two.
    """

    def __init__(
        self,
        keys: Int64s,
        groups: Int32s,
        ahead: NDArray[np.bool_],
        sizes: Int64s,
        classes: Int32s,
        slots_per_slab: int,
        large: int,
    ) -> None:
        assert len(keys) == len(groups) == len(ahead) == len(sizes)
        assert len(classes) * slots_per_slab >= len(keys)
        assert slots_per_slab & (slots_per_slab - 1) == 0
        c = self.c = ffi.new("ffs_residents *")
        self._keep = [
            _from_buffer(_I64S, keys),
            _from_buffer(_I32S, groups),
            _from_buffer(_U8S, ahead),
            _from_buffer(_I64S, sizes),
            _from_buffer(_I32S, classes),
        ]
        c.keys, c.groups, c.ahead, c.sizes, c.classes = self._keep
        c.slot_count, c.slab_shift, c.large = len(keys), slots_per_slab.bit_length() - 1, large
        self._found = ffi.new("int64_t[3]")

    def take(
        self, items: Int32s, key: int, group: int, size_class: int, after: int = NO_KEY
    ) -> Int64s:
        """Return those of a stack's entries that still belong there, each once, in order: slots
        that were not moved, evicted, or given to another group or class since. Their key becomes
        `after`."""
        slots = np.empty(len(items), np.int64)
        count = lib.ffs_residents_take(
            self.c,
            _from_buffer(_I32S, items),
            len(items),
            key,
            after,
            group,
            size_class,
            _from_buffer(_I64S, slots),
        )
        assert count >= 0
        return slots[:count]

    def group(self, slots: Int64s) -> int:
        """Return the group of all slots, or MIXED, of none as well."""
        group: int = lib.ffs_residents_group(self.c, _from_buffer(_I64S, slots), len(slots))
        assert group >= MIXED
        return group

    def put(self, slots: Int64s, key: int) -> int:
        """Give slots a key; return the group of all, or MIXED."""
        found = self._found
        rc = lib.ffs_residents_put(self.c, _from_buffer(_I64S, slots), len(slots), key, found)
        assert rc == 0
        group: int = found[0]
        return group

    def invalidate(self, slots: Int64s, key: int) -> tuple[Int64s, int, int]:
        """Slots were used, so they are not ahead any more; those on stacks of a key below `key` get
        that.

        Returns: these, repeats kept; the group of all and the size class of all, or MIXED.
        """
        moved, found = np.empty(len(slots), np.int64), self._found
        count = lib.ffs_residents_invalidate(
            self.c,
            _from_buffer(_I64S, slots),
            len(slots),
            key,
            _from_buffer(_I64S, moved),
            found,
        )
        assert count >= 0
        return moved[:count], found[0], found[1]

    def leave(self, slots: Int64s) -> tuple[int, int, int]:
        """Say that slots, each named once, hold nothing any more.

        Returns: the group of all or MIXED, their bytes, how many were ahead.
        """
        found = self._found
        rc = lib.ffs_residents_leave(self.c, _from_buffer(_I64S, slots), len(slots), found)
        assert rc == 0
        return found[0], found[1], found[2]


def by_key(slots: Int64s, keys: Int64s, far: int) -> tuple[Int64s, Int64s]:
    """Return slots and keys in the order of the keys, equals as they stand.

    Args: keys: mostly 0 to `far`, and below it no farther apart than some epochs have parts.
    """
    n = len(slots)
    assert len(keys) == n
    sorted_slots, sorted_keys = np.empty(n, np.int64), np.empty(n, np.int64)
    if lib.ffs_sort_by_key(
        _from_buffer(_I64S, slots),
        _from_buffer(_I64S, keys),
        n,
        far,
        _from_buffer(_I64S, sorted_slots),
        _from_buffer(_I64S, sorted_keys),
    ):
        return sorted_slots, sorted_keys
    rising = np.argsort(keys, kind="stable")
    return slots[rising], keys[rising]
