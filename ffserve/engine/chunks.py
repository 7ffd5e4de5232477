"""The Python face of codec.c: the walk from chunk to chunk, and the records inside a decoded one.

Nothing here reads a file. A ``Walk`` says which bytes it wants next and takes them as a window;
its tables take 37 bytes a chunk and grow with what it found: a chunk has 21 bytes at least.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib
from ffserve.errors import UsageError

Int64s = NDArray[np.int64]

MORE: int = lib.FFS_CHUNKS_MORE
FULL: int = lib.FFS_CHUNKS_FULL
END: int = lib.FFS_CHUNKS_END
FAULT: int = lib.FFS_CHUNKS_FAULT

_FIRST_ROOM = 1024
_TABLES = {
    "begins": (np.int64, "int64_t[]"),
    "ends": (np.int64, "int64_t[]"),
    "firsts": (np.int64, "int64_t[]"),
    "sizes": (np.int64, "int64_t[]"),
    "checksums": (np.uint32, "uint32_t[]"),
    "compressors": (np.uint8, "uint8_t[]"),
}
_I64S = ffi.typeof("int64_t[]")
_DESTS = ffi.typeof("uint8_t *[]")
_U8S = ffi.typeof("uint8_t[]")
_from_buffer = ffi.from_buffer


class Walk:
    """From header to header through one RecordIO file, and the chunks found.

    It takes sound chunks only, and stops at any other: what is wrong there is for others to say.

    Args:
        file_size: in bytes.
        records_allowed, records_a_byte: so many records may all headers claim, and so many more
            for each byte of the file up to there.
    """

    def __init__(self, file_size: int, *, records_allowed: int, records_a_byte: int) -> None:
        self._c = ffi.new("ffs_chunk_scan *")
        self._c.file_size = file_size
        self._c.records_allowed = records_allowed
        self._c.records_a_byte = records_a_byte
        self._c.dialect = -1
        self._tables: dict[str, NDArray[Any]] = {
            name: np.zeros(1, kind) for name, (kind, _) in _TABLES.items()
        }
        self._grow(_FIRST_ROOM)

    @property
    def count(self) -> int:
        """Chunks found so far."""
        return int(self._c.count)

    @property
    def records(self) -> int:
        """Records that they claim."""
        return int(self._tables["firsts"][self.count])

    @property
    def at(self) -> int:
        """Where the next chunk begins."""
        return int(self._c.at)

    @at.setter
    def at(self, place: int) -> None:
        self._c.at = self._c.wanted = place
        self._c.inside = 0

    @property
    def wanted(self) -> int:
        """Where the next window has to begin, or before."""
        return int(self._c.wanted)

    @property
    def dialect(self) -> int | None:
        """0 py, 1 go, None before the first chunk."""
        return None if self._c.dialect < 0 else int(self._c.dialect)

    @dialect.setter
    def dialect(self, number: int | None) -> None:
        self._c.dialect = -1 if number is None else number

    def feed(self, window: memoryview, base: int) -> int:
        """Go on through the file's bytes from ``base`` on; return why it stopped.

        Args:    window: holds 20 bytes from ``wanted`` on, or all that are left.
        Returns: MORE, END or FAULT.
        """
        with _from_buffer(_U8S, window) as bytes_:
            while (why := int(lib.ffs_chunks(self._c, bytes_, base, len(bytes_)))) == FULL:
                self._grow(2 * self.count)
        return why

    def add(
        self, begin: int, end: int, records: int, size: int, checksum: int, compressor: int
    ) -> None:
        """Enter a chunk that the caller found; `at` stays."""
        if self.count == self._c.room:
            self._grow(2 * self.count)
        row, firsts = self.count, self._tables["firsts"]
        values = (begin, end, firsts[row], size, checksum, compressor)
        for table, value in zip(self._tables.values(), values, strict=True):
            table[row] = value
        firsts[row + 1] = firsts[row] + records
        self._c.count += 1

    def _grow(self, room: int) -> None:
        # A place that was left out and the chunk behind it have 22 bytes at least.
        room = min(room, int(self._c.file_size) // 11 + 2)
        for name, (kind, c_type) in _TABLES.items():
            table = np.empty(room + 1, kind)
            table[: self.count + 1] = self._tables[name][: self.count + 1]
            self._tables[name] = table
            setattr(self._c, name, _from_buffer(ffi.typeof(c_type), table))
        self._c.room = room

    def table(self, name: str) -> NDArray[Any]:
        """Return `begins`, `ends`, `firsts` (one more), `sizes`, `checksums` or `compressors`.

        Arrays: int64, the last two uint32 and uint8; views, the caller's from then on.
        """
        return self._tables[name][: self.count + (name == "firsts")]


def split_records(data: Any, count: int) -> tuple[Int64s, Int64s, int]:
    """Find records (u32 length, bytes) that lie one behind the other.

    Args: data: bytes-like. count: how many at most; bounded by the size of the data.
    Returns: (starts, lengths, end): of those that lie whole inside, and where the last one ends.
    """
    starts, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
    end = ffi.new("uint64_t *")
    with _from_buffer(_U8S, data) as bytes_:
        found = lib.ffs_split(
            bytes_,
            len(bytes_),
            count,
            _from_buffer(_I64S, starts),
            _from_buffer(_I64S, lengths),
            end,
        )
    return starts[:found], lengths[:found], int(end[0])


def scatter(
    data: NDArray[np.uint8], starts: Int64s, lengths: Int64s, dests: NDArray[np.uint64]
) -> None:
    """Copy pieces data[starts[k] : starts[k] + lengths[k]] to addresses that have room for them.

    Raises: UsageError when a piece does not lie within the data.
    """
    if not len(starts) == len(lengths) == len(dests):
        raise UsageError("starts, lengths and dests must be of one length")
    if len(starts) == 0:
        return
    if int(min(starts.min(), lengths.min())) < 0 or int((starts + lengths).max()) > data.nbytes:
        raise UsageError("a piece lies outside of the data")
    lib.ffs_scatter(
        _from_buffer(_U8S, data),
        _from_buffer(_I64S, np.ascontiguousarray(starts, np.int64)),
        _from_buffer(_I64S, np.ascontiguousarray(lengths, np.int64)),
        len(starts),
        _from_buffer(_DESTS, np.ascontiguousarray(dests, np.uint64)),
    )
