"""Scanner of tar archives. The Python face of records/tar.h; nothing here reads a file."""

from __future__ import annotations

import numpy as np

from ffserve.dtypes import UInt32s, UInt64s
from ffserve.engine.core import U8S, U32S, U64S, ffi, from_buffer, lib

BLOCK_SIZE: int = lib.FFS_TAR_BLOCK
FIRST: int = lib.FFS_TAR_FIRST
"""In the kind of a member: it is the first of a sample. The other bits are its field's number."""
NAMES_COUNT: int = lib.FFS_TAR_BLOCK_COUNT
"""Names are kept in blocks of this many members."""
MOST_NAME: int = lib.FFS_TAR_MOST_NAME
MOST_PAX: int = lib.FFS_TAR_MOST_PAX
MOST_FIELDS: int = lib.FFS_TAR_MOST_FIELDS
_FIRST_ROOM = 64


def header_is_valid(head: bytes) -> bool:
    """Whether bytes begin with a header that matches its checksum."""
    with from_buffer(U8S, head) as bytes_:
        return len(head) >= BLOCK_SIZE and bool(lib.ffs_tar_header_is_valid(bytes_))


class TarScanner:
    """Scan of the headers of one archive.

    Args: file_size: in bytes. tolerant: a member that the file cuts is the last one.
    """

    MORE: int = lib.FFS_TAR_MORE
    NAMES: int = lib.FFS_TAR_NAMES
    LINK: int = lib.FFS_TAR_LINK
    END: int = lib.FFS_TAR_END
    _FULL: int = lib.FFS_TAR_FULL

    BAD_CHECKSUM: int = lib.FFS_TAR_BAD_CHECKSUM
    BAD_NUMBER: int = lib.FFS_TAR_BAD_NUMBER
    CUT_HEADER: int = lib.FFS_TAR_CUT_HEADER
    CUT_MEMBER: int = lib.FFS_TAR_CUT_MEMBER
    BAD_PAX: int = lib.FFS_TAR_BAD_PAX
    LONG_PAX: int = lib.FFS_TAR_LONG_PAX
    LONG_NAME: int = lib.FFS_TAR_LONG_NAME
    GLOBAL: int = lib.FFS_TAR_GLOBAL
    SPARSE: int = lib.FFS_TAR_SPARSE
    TWICE: int = lib.FFS_TAR_TWICE
    FIELDS: int = lib.FFS_TAR_FIELDS
    NO_MEMBER: int = lib.FFS_TAR_NO_MEMBER

    def __init__(self, file_size: int, *, tolerant: bool = False) -> None:
        self._c = ffi.new("ffs_tar_scan *")
        self._c.file_size, self._c.tolerant, self._c.key_size = file_size, tolerant, -1
        self._offsets = np.empty(0, np.uint64)
        self._lengths = np.empty(0, np.uint64)
        self._kinds = np.empty(0, np.uint32)
        self._names = np.empty(0, np.uint8)
        self._grow(_FIRST_ROOM)
        self._grow_names(8 * MOST_NAME)

    @property
    def at(self) -> int:
        """Position of the next header."""
        return int(self._c.at)

    @property
    def wanted(self) -> int:
        """Bytes that the next window must have, from `at` on."""
        return max(int(self._c.wanted), BLOCK_SIZE)

    @property
    def last_length(self) -> int:
        """Size of the last member; 0 before the first."""
        return int(self._c.length)

    @property
    def fault(self) -> int:
        """What is wrong at `at`."""
        return int(self._c.fault)

    @property
    def count(self) -> int:
        """Members of samples that were found so far."""
        return int(self._c.count)

    @property
    def samples(self) -> int:
        """Samples that they belong to."""
        return int(self._c.samples)

    @property
    def skipped(self) -> int:
        """Regular files that belong to no sample."""
        return int(self._c.skipped)

    @property
    def cut(self) -> bool:
        """Whether the file ends inside a header or a member."""
        return bool(self._c.cut)

    @property
    def digest(self) -> int:
        """CRC-32C of all headers."""
        return int(self._c.digest)

    @property
    def name(self) -> bytes:
        """Name of the last member."""
        return bytes(ffi.string(self._c.name))

    @property
    def link(self) -> bytes:
        """What the last member is a hard link to."""
        return bytes(ffi.string(self._c.link))

    def feed(self, window: memoryview, base: int) -> int:
        """Continue through the file's bytes from ``base`` on; return the reason for stopping."""
        with from_buffer(U8S, window) as bytes_:
            while (why := int(lib.ffs_tar(self._c, bytes_, base, len(bytes_)))) == self._FULL:
                if self.count == len(self._lengths):
                    self._grow(2 * self.count)
                if len(self._names) - int(self._c.names_size) <= MOST_NAME:
                    self._grow_names(2 * len(self._names))
        return why

    def take_names(self) -> bytes:
        """Return the names of the members since the last call, each with a zero behind it."""
        names = self._names[: self._c.names_size].tobytes()
        self._c.names_size = 0
        return names

    def fields(self) -> list[bytes]:
        """Return the names of the fields, by number."""
        packed = bytes(ffi.buffer(self._c.field_names, self._c.field_size))
        return packed.split(b"\0")[:-1]

    def tables(self) -> tuple[UInt64s, UInt64s, UInt32s]:
        """Return offsets, lengths and kinds of the members, as views."""
        rows = slice(self.count)
        return self._offsets[rows], self._lengths[rows], self._kinds[rows]

    def _grow_names(self, room: int) -> None:
        names = np.empty(room, np.uint8)
        names[: len(self._names)] = self._names
        self._names, self._c.names, self._c.names_room = names, from_buffer(U8S, names), room

    def _grow(self, room: int) -> None:
        room = min(room, int(self._c.file_size) // BLOCK_SIZE + 1)
        longer = []
        for table in (self._offsets, self._lengths, self._kinds):
            longer.append(np.empty(room, table.dtype))
            longer[-1][: len(table)] = table[:room]
        self._offsets, self._lengths, self._kinds = longer
        self._c.offsets = from_buffer(U64S, self._offsets)
        self._c.lengths = from_buffer(U64S, self._lengths)
        self._c.kinds = from_buffer(U32S, self._kinds)
        self._c.room = room
