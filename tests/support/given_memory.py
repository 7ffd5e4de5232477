"""The memory that a daemon shares, for tests that play the daemon."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from ffserve import protocol
from ffserve.engine.slots import ENTRY_DTYPE
from ffserve.system.memfd import SharedMemory


class GivenMemory:
    """A page, and one domain: arena, directory, index.

    Args: about: of WELCOME: epoch, arena_size, capacity.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        capacity = about["capacity"]
        self._page = SharedMemory("test-page", mmap.PAGESIZE)
        self._page.array[:8].view("<u8")[0] = about["epoch"]
        self._domain = [
            SharedMemory(f"test-{name}", size)
            for name, size in (
                ("arena", about["arena_size"]),
                ("directory", ENTRY_DTYPE.itemsize * capacity),
                ("index", 12 * capacity),
            )
        ]
        self._used = 0

    def fds_of(self, message: protocol.Message) -> list[int]:
        """Return new descriptors that go with a message of the daemon; the caller closes them."""
        match message:
            case protocol.Welcome():
                return [self._page.file.reader_fd()]
            case protocol.Opened(domains=domains) if domains:
                return [memory.file.reader_fd() for memory in self._domain]
        return []

    def _entry(self, number: int) -> Any:
        return self._domain[1].array.view(ENTRY_DTYPE)[number]

    def describe(self, number: int, size: int) -> None:
        """Enter the length of a sample, which is not in the arena."""
        self._entry(number)["length_low"] = size

    def publish(self, number: int, content: bytes) -> None:
        """Put a sample into the arena, unless it is there."""
        entry = self._entry(number)
        if entry["seq"] & 1 == 0:
            place = np.frombuffer(content, np.uint8)
            self._domain[0].array[self._used : self._used + len(content)] = place
            entry["length_low"], entry["place"] = len(content), self._used
            entry["seq"] += 1
            self._used += len(content)

    def close(self) -> None:
        """Give it back."""
        for memory in (self._page, *self._domain):
            memory.close()
