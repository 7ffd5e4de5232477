"""The Python face of codec.c: TFRecord's CRC-32C, and the walk over its frames.

Nothing here reads a file. A ``Walk`` says which bytes it wants next and takes them as a window;
tables grow as it goes and are bounded by the file: a frame has 16 bytes at least.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib

HEADER_SIZE = 12
FOOTER_SIZE = 4
FRAME_SIZE = HEADER_SIZE + FOOTER_SIZE
_MASK = 0xA282EAD8

MORE: int = lib.FFS_FRAMES_MORE
FULL: int = lib.FFS_FRAMES_FULL
END: int = lib.FFS_FRAMES_END
BAD_HEADER: int = lib.FFS_FRAMES_BAD_HEADER
CUT_HEADER: int = lib.FFS_FRAMES_CUT_HEADER
CUT_RECORD: int = lib.FFS_FRAMES_CUT_RECORD

_CRC_32C: int = lib.FFS_CRC_32C
_U64S = ffi.typeof("uint64_t[]")
_U32S = ffi.typeof("uint32_t[]")
_U8S = ffi.typeof("uint8_t[]")
_FIRST_ROOM = 1024


def crc32c(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """Return the CRC-32C of contiguous bytes; ``seed`` is that of what came before them."""
    with ffi.from_buffer(_U8S, data) as bytes_:
        return int(lib.ffs_checksum(_CRC_32C, seed, bytes_, len(bytes_)))


def mask(crc: int) -> int:
    """Return a CRC-32C as TFRecord stores it."""
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def frame_all(payloads: NDArray[np.uint8], edges: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the frames of payloads that lie back to back.

    Args:    payloads: uint8, contiguous. edges: int64[n + 1], rising from 0 to its length.
    """
    out = np.empty(len(payloads) + FRAME_SIZE * (len(edges) - 1), np.uint8)
    places = np.ascontiguousarray(edges, np.uint64)
    lib.ffs_frame_all(
        ffi.from_buffer(_U8S, payloads),
        ffi.from_buffer(_U64S, places),
        len(edges) - 1,
        ffi.from_buffer(_U8S, out),
    )
    return out


def header_holds(head: bytes | bytearray | memoryview) -> bool:
    """Whether twelve bytes are a record's length and the checksum of that."""
    return mask(crc32c(head[:8])) == int.from_bytes(head[8:12], "little")


class Walk:
    """From frame to frame through one file.

    Args:
        file_size: in bytes.
        verify: hold headers against their checksums.
    """

    def __init__(self, file_size: int, *, verify: bool = True) -> None:
        self._c = ffi.new("ffs_frame_scan *")
        self._c.file_size = file_size
        self._c.verify = verify
        self._offsets = np.empty(0, np.uint64)
        self._lengths = np.empty(0, np.uint64)
        self._checksums = np.empty(0, np.uint32)
        self._grow(_FIRST_ROOM)

    @property
    def count(self) -> int:
        """Records found so far."""
        return int(self._c.count)

    @property
    def at(self) -> int:
        """Where the next header stands."""
        return int(self._c.at)

    @property
    def wanted(self) -> int:
        """Where the next window has to begin: the footer that is still missing, if any."""
        return self.at - FOOTER_SIZE if self._c.owed else self.at

    @property
    def last_length(self) -> int:
        """Payload bytes of the record found last; 0 before the first."""
        return int(self._lengths[self.count - 1]) if self.count else 0

    def feed(self, window: memoryview, base: int) -> int:
        """Go on through the file's bytes from ``base`` on; return why it stopped.

        Returns: MORE, END, BAD_HEADER, CUT_HEADER or CUT_RECORD.
        """
        with ffi.from_buffer(_U8S, window) as bytes_:
            while (why := int(lib.ffs_frames(self._c, bytes_, base, len(bytes_)))) == FULL:
                self._grow(2 * len(self._lengths))
        return why

    def add(self, offset: int, length: int, checksum: int) -> None:
        """Enter a record that is none: a place that could not be used."""
        if self.count == len(self._lengths):
            self._grow(2 * self.count)
        row = self.count
        self._offsets[row], self._lengths[row], self._checksums[row] = offset, length, checksum
        self._c.count += 1

    def skip_to(self, at: int) -> None:
        """Go on at another frame: what lies between is damaged."""
        self._c.at = at

    def _grow(self, room: int) -> None:
        # A lost place and the frame behind it have 17 bytes at least.
        room = min(room, int(self._c.file_size) // 8 + 2)
        self._offsets = np.resize(self._offsets, room)
        self._lengths = np.resize(self._lengths, room)
        self._checksums = np.resize(self._checksums, room)
        self._c.offsets = ffi.from_buffer(_U64S, self._offsets)
        self._c.lengths = ffi.from_buffer(_U64S, self._lengths)
        self._c.checksums = ffi.from_buffer(_U32S, self._checksums)
        self._c.room = room

    def tables(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return payload offsets, payload lengths and unmasked checksums; views."""
        return (
            self._offsets[: self.count],
            self._lengths[: self.count],
            self._checksums[: self.count],
        )


class Finder:
    """The search for the frame behind one whose header is damaged.

    Args:
        file_size: in bytes.
        lost: where the damaged header stands.
        proven: take a frame only where the four bytes in front of it are the checksum of all
            payload since the damaged header. If only that header is damaged this finds the next
            frame for certain, also when the payload holds frames itself; the file's end may then
            be what is found.
    """

    def __init__(self, file_size: int, lost: int, *, proven: bool) -> None:
        self._c = ffi.new("ffs_frame_finder *")
        self._c.file_size = file_size
        self._c.proven = proven
        self._c.summed = lost + HEADER_SIZE
        self._c.at = lost + FRAME_SIZE if proven else lost + 1

    @property
    def at(self) -> int:
        """What was found; until then, what is looked at next."""
        return int(self._c.at)

    @property
    def wanted(self) -> int:
        """Where the next window has to begin."""
        return int(self._c.summed) if self._c.proven else self.at

    def feed(self, window: memoryview, base: int) -> bool:
        """Go on through the file's bytes from ``base`` on; True: found."""
        with ffi.from_buffer(_U8S, window) as bytes_:
            return bool(lib.ffs_frame_search(self._c, bytes_, base, len(bytes_)))

    def refuse(self) -> None:
        """What was found is none; look behind it."""
        self._c.at += 1
