"""Scanner of tar archives. The Python face of records/tar.h; nothing here reads a file."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ffserve.dtypes import UInt32s, UInt64s
from ffserve.engine.core import U8S, ffi, from_buffer, lib

BLOCK_SIZE: int = lib.FFS_TAR_BLOCK
FIRST: int = lib.FFS_TAR_FIRST
"""In the kind of a record, which stands in the place of its checksum: it is the first of a sample.
The other bits are its field's number."""
BLOCK_COUNT: int = lib.FFS_TAR_BLOCK_COUNT
"""Members that are taken together, and whose names are a block."""
MOST_NAME: int = lib.FFS_TAR_MOST_NAME
MOST_PAX: int = lib.FFS_TAR_MOST_PAX
MOST_FIELDS: int = lib.FFS_TAR_MOST_FIELDS
MORE: int = lib.FFS_TAR_MORE
ROWS: int = lib.FFS_TAR_ROWS
LINK: int = lib.FFS_TAR_LINK
END: int = lib.FFS_TAR_END
FAULT: int = lib.FFS_TAR_FAULT
"""Reasons for stopping, see tar.h."""

Tables: TypeAlias = tuple[UInt64s, UInt64s, UInt32s]
"""Offsets and lengths of members' contents, and their kinds."""
_FAULTS: dict[int, str] = ffi.typeof("ffs_tar_fault").elements


def header_is_valid(head: bytes) -> bool:
    """Whether bytes begin with a header that matches its checksum."""
    with from_buffer(U8S, head) as bytes_:
        return len(head) >= BLOCK_SIZE and bool(lib.ffs_tar_header_is_valid(bytes_))


class TarScanner:
    """Scan of the headers of one archive.

    Args: file_size: in bytes. window_size: of the largest window, in bytes. tolerant: a member that
    the file cuts is the last one.

    window: memory for the bytes that are fed. state: to be read, as tar.h has it.
    """

    def __init__(self, file_size: int, window_size: int, *, tolerant: bool = False) -> None:
        self.state: Any = ffi.new("ffs_tar_scan *")
        self.state.file_size, self.state.tolerant, self.state.key_size = file_size, tolerant, -1
        # Memory that is not written costs nothing, not even to have it zeroed.
        names = np.empty(BLOCK_COUNT * (MOST_NAME + 1), np.uint8)
        window = np.empty(window_size, np.uint8)
        self.window = window.data
        self.state.names, self._window = from_buffer(U8S, names), from_buffer(U8S, window)
        self._names = names

    def feed(self, base: int, size: int) -> int:
        """Continue through the file's bytes [base, base + size), the first ones of `window`; return
        the reason for stopping."""
        return int(lib.ffs_tar(self.state, self._window, base, size))

    def headers(self, fd: int, size: int, large: int) -> int:
        """Continue through headers that are read from a descriptor, ``size`` bytes each, as long as
        members have ``large`` bytes or more; return the reason for stopping."""
        return int(lib.ffs_tar_headers(self.state, fd, self._window, size, large))

    def take(self) -> tuple[bytes, Tables]:
        """Return the members since the last call, at most BLOCK_COUNT, as names, each with a zero
        behind it, and tables."""
        c, count = self.state, self.state.held
        names = self._names[: c.names_size].tobytes()
        c.held = c.names_size = 0
        return names, (
            np.frombuffer(ffi.buffer(c.offsets), np.uint64, count).copy(),
            np.frombuffer(ffi.buffer(c.lengths), np.uint64, count).copy(),
            np.frombuffer(ffi.buffer(c.kinds), np.uint32, count).copy(),
        )

    def fields(self) -> list[bytes]:
        """Return the names of the fields, by number."""
        return bytes(ffi.buffer(self.state.field_names, self.state.field_size)).split(b"\0")[:-1]

    @property
    def fault(self) -> str:
        """What is wrong at `at`, such as "CUT_MEMBER"; see tar.h."""
        return _FAULTS[self.state.fault].removeprefix("FFS_TAR_")

    @property
    def name(self) -> bytes:
        """Name of the last member."""
        return bytes(ffi.string(self.state.name))

    @property
    def link(self) -> bytes:
        """What the last member is a hard link to."""
        return bytes(ffi.string(self.state.link))
