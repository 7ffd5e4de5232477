"""A word of shared memory that says whose turn it is."""

from __future__ import annotations

from ffserve.engine.core import ffi, lib


class Flag:
    """One aligned u32 that two processes share.

    Who sees a value also sees what the other side wrote before setting it; and what the setter had
    read by then stays read. Safe to set from a finalizer: no lock, no allocation.

    Args: address: of the word; the memory must outlive the flag.
    """

    __slots__ = ("_word",)

    def __init__(self, address: int) -> None:
        self._word = ffi.cast("uint32_t *", address)

    def get(self) -> int:
        """Return the value."""
        return int(lib.ffs_flag_get(self._word))

    def set(self, value: int) -> None:
        """Set the value."""
        lib.ffs_flag_set(self._word, value)
