"""For tests of the engine: an arena and its directory, and the descriptors of this process."""

from __future__ import annotations

import mmap
import os

import numpy as np

from ffserve.engine.io import Engine
from ffserve.engine.shm import MappedView, retract
from ffserve.engine.slots import ENTRY_DTYPE

MIB = 1 << 20


class Arena:
    """Slots and directory in shared memory, as the daemon makes them."""

    def __init__(self, size: int, entry_count: int) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.entries = np.frombuffer(
            mmap.mmap(-1, max(entry_count, 1) * ENTRY_DTYPE.itemsize), ENTRY_DTYPE
        )[:entry_count]
        self.entries["length_low"] = 0xFFFFFFFF
        self.entries["place"] = 0xFFFF << 48
        self.address = self.bytes.ctypes.data
        self.entries_address = self.entries.ctypes.data

    def view(self) -> MappedView:
        return MappedView(
            len(self.bytes), [(self.entries_address, 0, len(self.entries), self.address)]
        )

    def serve(self, engine: Engine) -> Arena:
        engine.set_arena(self.address, len(self.bytes), self.entries_address, len(self.entries))
        engine.arena_ready(len(self.bytes))
        return self

    def retract(self, entry: int, slot: int, size: int) -> None:
        retract(
            self.entries_address,
            np.array([entry]),
            np.array([1]),
            np.array([slot], np.uint64),
            np.array([size], np.uint64),
        )


def descriptors(what: str) -> set[int]:
    """Return this process's descriptors of a kind: "[io_uring]", "[eventfd]"."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == f"anon_inode:{what}":
                found.add(int(name))
        except OSError:
            continue
    return found
