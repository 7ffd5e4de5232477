"""Tables of hazards: what a client reads in place without asking, and what of it the daemon sees.

Why neither side can miss the other stands in engine/hazards.c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib
from ffserve.engine.view import Int64s, View
from ffserve.errors import ReadError

PANEL: int = lib.FFS_PANEL
PANELS: int = lib.FFS_PANELS
TABLE_SIZE: int = ffi.sizeof("ffs_hazards")
"""Bytes of a table's file."""
MOST_HAZARDS: int = PANELS * PANEL
"""Samples that one table can name."""

_FIRST: int = ffi.offsetof("ffs_hazards", "samples")
_I64S = ffi.typeof("int64_t[]")
_U32S = ffi.typeof("uint32_t[]")
_NOTE = ffi.typeof("ffs_lease_note *")
_INT64 = np.dtype(np.int64)
_TOGETHER = (_INT64.itemsize,)
_from_buffer = ffi.from_buffer
_new = ffi.new


class Table:
    """A table's memory, mapped until nobody holds this any more.

    Args: fd: a sealed file of TABLE_SIZE bytes, which may be closed afterwards.
    Raises: ReadError when the kernel maps no more.
    """

    __slots__ = ("_c",)

    def __init__(self, fd: int) -> None:
        table = lib.ffs_hazards_map(fd)
        if not table:
            raise ReadError(
                "cannot map a table of leases", hint="is an address-space limit in force?"
            )
        self._c = ffi.gc(table, lib.ffs_hazards_unmap)

    def set_budget(self, budget: int) -> int:
        """Set how many bytes the client may claim; return what it has claimed after that."""
        return int(lib.ffs_hazards_set_budget(self._c, budget))

    def first_named(self) -> bytes:
        """Return the first panel as it lies there: whoever leases anew writes to it, if nothing is
        leased already."""
        return bytes(self.memory[_FIRST : _FIRST + 4 * PANEL])

    @property
    def memory(self) -> memoryview:
        """The table's bytes, as PROTOCOL.md lays them out."""
        return memoryview(ffi.buffer(self._c))


class Leases:
    """A client's side of its table."""

    __slots__ = ("_c", "_emptied", "_table")

    def __init__(self, table: Table) -> None:
        self._table = table
        self._emptied: Callable[[], object] | None = None
        self._c = ffi.new("ffs_leases *")
        self._c.table = table._c

    def forget(self) -> None:
        """The table is another process's, or nobody looks at it: leave it alone from now on."""
        self._c.table = ffi.NULL

    def end(self, emptied: Callable[[], object]) -> bool:
        """Lease nothing any more; return whether something is leased still.

        Args: emptied: called then when the last of it is given back, once or more.
        """
        self._emptied = emptied
        if lib.ffs_leases_end(self._c):
            return True
        self._emptied = None
        return False

    def given_back(self) -> None:
        """Nothing is leased, and nothing will be."""
        if self._emptied is not None:
            self._emptied()


class Lease:
    """Samples that stay where they are until `release`, which must come. Made by `Leaser.lease`.

    starts: int64[n], byte offsets in the arena, -1 where a sample could not be leased; sizes:
    int64[n], of those that could; left: how many could not; size: bytes of those that could.
    """

    __slots__ = ("_leases", "_note", "left", "size", "sizes", "starts")

    def __init__(self, leases: Leases, note: Any, starts: Int64s, sizes: Int64s, left: int) -> None:
        self._leases = leases
        self._note = note
        self.starts = starts
        self.sizes = sizes
        self.left = left
        self.size: int = note.size

    def release(self) -> None:
        """Give back; the bytes may be others at once. Once more does nothing."""
        if lib.ffs_unlease(self._leases._c, self._note):
            self._leases.given_back()


class Leaser:
    """Leases samples of one data set.

    Args:
        view: over the data set. bases: uint64, of each of its segments the number of its first
            sample. extra: bytes that a sample is charged beyond its length.
    """

    __slots__ = ("_bases", "_c", "_leases", "_view", "_view_c")

    def __init__(self, leases: Leases, view: View, bases: Sequence[int], extra: int) -> None:
        self._leases = leases
        self._view = view
        self._view_c = view._c
        self._bases = ffi.new("uint64_t[]", list(bases))
        self._c = ffi.new("ffs_leaser *", (leases._c, self._bases, extra))

    def lease(self, indices: Int64s) -> Lease:
        """Lease what is readable now and fits into the budget.

        Args: indices: int64, contiguous, each within the view; repeats are allowed.
        Raises: ReadError when the directory points outside of the arena.
        Cost: one call, no lock; about 10 ns a sample.
        """
        lease = self._lease(indices)
        if lease.left < 0:
            lease.release()
            raise ReadError("the shared directory points outside of the arena")
        return lease

    def lease_all(self, indices: NDArray[Any]) -> Lease | None:
        """Lease all of a batch; None when it is not as simple as that, `lease` tells why.

        Args: indices: any array.
        """
        if indices.dtype != _INT64 or indices.strides != _TOGETHER:
            return None
        lease = self._lease(indices)
        if lease.left:
            lease.release()
            return None
        return lease

    def _lease(self, indices: Int64s) -> Lease:
        n = len(indices)
        out = np.empty((2, n), _INT64)
        c = _from_buffer(_I64S, out)
        note = _new(_NOTE)
        which = _from_buffer(_I64S, indices)
        left = lib.ffs_lease(self._c, self._view_c, which, n, c, c + n, note)
        return Lease(self._leases, note, out[0], out[1], left)


# ---- the daemon's side ---------------------------------------------------------------------------


class Hazards:
    """All tables that are looked at together."""

    __slots__ = ("_count", "_ends", "_held", "_samples", "_tables")

    def __init__(self, tables: Sequence[Table]) -> None:
        self._held = tuple(tables)
        self._count = len(tables)
        self._tables = ffi.new("ffs_hazards *[]", [table._c for table in tables])
        self._samples = np.empty(self._count * MOST_HAZARDS, np.uint32)
        self._ends = np.zeros(self._count, np.int64)

    def read(self) -> tuple[NDArray[np.uint32], Int64s]:
        """Return the sample numbers that are named now, any u32, repeats and all, and where those
        of each table end among them. Both are overwritten by the next call."""
        count = lib.ffs_hazards_read(
            self._tables,
            self._count,
            _from_buffer(_U32S, self._samples),
            _from_buffer(_I64S, self._ends),
        )
        return self._samples[:count], self._ends


def restore(entries_address: int, numbers: Int64s) -> None:
    """Make samples readable again that were retracted and not written over."""
    entries = ffi.cast("ffs_entry *", entries_address)
    lib.ffs_restore(entries, _from_buffer(_I64S, numbers), len(numbers))
