"""Codecs: checksums, scanners of TFRecord frames and RecordIO chunks.

The Python face of records/codec.h. Nothing here reads a file: a scanner says which bytes it
needs next and gets them as a window. Its tables grow with what it finds and are bounded by the size
of the file. The GIL is released during every call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bools, Bytes, Int32s, Int64s, UInt32s, UInt64s
from ffserve.engine.core import DESTS, I32S, I64S, U8S, U32S, U64S, ffi, from_buffer, lib
from ffserve.errors import UsageError

CRC_NONE: int = lib.FFS_CRC_NONE
CRC_32: int = lib.FFS_CRC_32
CRC_32C: int = lib.FFS_CRC_32C

_FIRST_ROOM = 64
"""A table has this many rows at first, and doubles: a small file takes no more memory than it
needs."""


def checksum(kind: int, data: Any, seed: int = 0) -> int:
    """Return the CRC of a bytes-like object; ``seed`` is the CRC of the bytes before it."""
    with from_buffer(U8S, data) as bytes_:
        return int(lib.ffs_checksum(kind, seed, bytes_, len(bytes_)))


def checksums(kind: int, data: Any, offsets: UInt64s, lengths: UInt64s) -> UInt32s:
    """Return the CRC of each piece data[offsets[k] : offsets[k] + lengths[k]]; one call for all.

    Raises: UsageError when a piece is outside the data.
    """
    offsets = np.ascontiguousarray(offsets, np.uint64)
    lengths = np.ascontiguousarray(lengths, np.uint64)
    with from_buffer(U8S, data) as bytes_:
        size = np.uint64(len(bytes_))
        if len(offsets) != len(lengths) or bool(
            np.any(lengths > size) or np.any(offsets > size - np.minimum(lengths, size))
        ):
            raise UsageError("a piece is outside the data")
        out = np.empty(len(offsets), np.uint32)
        lib.ffs_checksums(
            kind,
            bytes_,
            from_buffer(U64S, offsets),
            from_buffer(U64S, lengths),
            len(offsets),
            from_buffer(U32S, out),
        )
    return out


def checksum_library() -> str:
    """Return the implementation of the checksums: "ISA-L" or "tables"."""
    return str(ffi.string(lib.ffs_checksum_library()).decode())


# ---- TFRecord frames ---------------------------------------------------------------------------

FRAME_HEADER_SIZE = 12
FRAME_FOOTER_SIZE = 4
FRAME_SIZE = FRAME_HEADER_SIZE + FRAME_FOOTER_SIZE


def crc32c(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """Return the CRC-32C of contiguous bytes; ``seed`` is the CRC-32C of the bytes before them."""
    return checksum(CRC_32C, data, seed)


def mask(crc: int) -> int:
    """Return a CRC-32C as TFRecord stores it (masked)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame_all(payloads: Bytes, edges: Int64s) -> Bytes:
    """Return the frames of adjacent payloads.

    Args: payloads: uint8, contiguous. edges: int64[n + 1], rising from 0 to its length.
    """
    out = np.empty(len(payloads) + FRAME_SIZE * (len(edges) - 1), np.uint8)
    places = np.ascontiguousarray(edges, np.uint64)
    lib.ffs_frame_all(
        from_buffer(U8S, payloads),
        from_buffer(U64S, places),
        len(edges) - 1,
        from_buffer(U8S, out),
    )
    return out


def frame_header_is_valid(head: bytes | bytearray | memoryview) -> bool:
    """Return whether bytes begin with a record's length and its checksum."""
    return len(head) >= FRAME_HEADER_SIZE and mask(crc32c(head[:8])) == int.from_bytes(
        head[8:12], "little"
    )


class FrameScanner:
    """Scan of the frames of one TFRecord file.

    Args:
        file_size: in bytes.
        verify: compare headers with their checksums.
    """

    MORE: int = lib.FFS_FRAMES_MORE
    END: int = lib.FFS_FRAMES_END
    BAD_HEADER: int = lib.FFS_FRAMES_BAD_HEADER
    CUT_HEADER: int = lib.FFS_FRAMES_CUT_HEADER
    CUT_RECORD: int = lib.FFS_FRAMES_CUT_RECORD
    _FULL: int = lib.FFS_FRAMES_FULL

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
        """Number of records found so far."""
        return int(self._c.count)

    @property
    def complete(self) -> int:
        """Number of those whose checksum was found too."""
        return self.count - (1 if self._c.owed else 0)

    @property
    def at(self) -> int:
        """Position of the next header."""
        return int(self._c.at)

    @property
    def wanted(self) -> int:
        """Where the next window must begin: at a footer that is still missing, if there is one."""
        return self.at - FRAME_FOOTER_SIZE if self._c.owed else self.at

    @property
    def last_length(self) -> int:
        """Payload size of the last record found; 0 before the first."""
        return int(self._lengths[self.count - 1]) if self.count else 0

    def feed(self, window: memoryview, base: int) -> int:
        """Continue through the file's bytes from ``base`` on; return the reason for stopping.

        Returns: MORE, END, BAD_HEADER, CUT_HEADER or CUT_RECORD.
        """
        with from_buffer(U8S, window) as bytes_:
            while (why := int(lib.ffs_frames(self._c, bytes_, base, len(bytes_)))) == self._FULL:
                self._grow(2 * len(self._lengths))
        return why

    def add(self, offset: int, length: int, checksum: int) -> None:
        """Enter a placeholder for a damaged part of the file."""
        if self.count == len(self._lengths):
            self._grow(2 * self.count)
        row = self.count
        self._offsets[row], self._lengths[row], self._checksums[row] = offset, length, checksum
        self._c.count += 1

    def skip_to(self, at: int) -> None:
        """Continue at another frame, after a damaged part."""
        self._c.at = at

    def _grow(self, room: int) -> None:
        # A placeholder and the frame after it take at least 17 bytes of the file.
        room = min(room, int(self._c.file_size) // 8 + 2)
        tables = self._offsets, self._lengths, self._checksums
        self._offsets, self._lengths, self._checksums = (_longer(each, room) for each in tables)
        self._c.offsets = from_buffer(U64S, self._offsets)
        self._c.lengths = from_buffer(U64S, self._lengths)
        self._c.checksums = from_buffer(U32S, self._checksums)
        self._c.room = room

    def tables(self) -> tuple[UInt64s, UInt64s, UInt32s]:
        """Return payload offsets, payload lengths and unmasked checksums, as views."""
        return (
            self._offsets[: self.count],
            self._lengths[: self.count],
            self._checksums[: self.count],
        )


def _longer(table: NDArray[Any], room: int) -> NDArray[Any]:
    longer = np.empty(room, table.dtype)
    longer[: len(table)] = table[:room]
    return longer


class FrameFinder:
    """Search for the next frame after a damaged header.

    Args:
        file_size: in bytes.
        lost: position of the damaged header.
        proven: accept a frame only if the four bytes before it are the checksum of all bytes since
            the damaged header. If only that header is damaged, this always finds the next frame,
            even if the payload contains frames; the end of the file may then be the result.
    """

    def __init__(self, file_size: int, lost: int, *, proven: bool) -> None:
        self._c = ffi.new("ffs_frame_finder *")
        self._c.file_size = file_size
        self._c.proven = proven
        self._c.summed = lost + FRAME_HEADER_SIZE
        self._c.at = lost + FRAME_SIZE if proven else lost + 1

    @property
    def at(self) -> int:
        """Position of the frame found; until then, of the next candidate."""
        return int(self._c.at)

    @property
    def wanted(self) -> int:
        """Where the next window must begin."""
        return int(self._c.summed) if self._c.proven else self.at

    def feed(self, window: memoryview, base: int) -> bool:
        """Continue through the file's bytes from ``base`` on; True: found."""
        with from_buffer(U8S, window) as bytes_:
            return bool(lib.ffs_frame_search(self._c, bytes_, base, len(bytes_)))

    def refuse(self) -> None:
        """Reject the frame found; continue the search after it."""
        self._c.at += 1


# ---- RecordIO chunks ---------------------------------------------------------------------------

_CHUNK_HEADER_SIZE = 20

CHUNK_TABLES = {
    "begins": (np.int64, I64S),
    "ends": (np.int64, I64S),
    "firsts": (np.int64, I64S),
    "sizes": (np.int64, I64S),
    "checksums": (np.uint32, U32S),
    "compressors": (np.uint8, U8S),
}
"""The tables of a ChunkScanner: types in numpy and C."""
_NO_CHUNKS: dict[str, NDArray[Any]] = {
    name: np.zeros(1, kind) for name, (kind, _) in CHUNK_TABLES.items()
}


class ChunkScanner:
    """Scan of the chunks of one RecordIO file.

    It accepts valid chunks only and stops at any other; `fault` is one of NO_HEADER and the
    constants after it. Its tables take 37 bytes per chunk; a chunk takes at least 21 bytes of the
    file.

    Args:
        file_size: in bytes.
        records_allowed, records_per_byte: limit of the records that headers may state: so many,
            plus so many per byte of the file up to there.
    """

    MORE: int = lib.FFS_CHUNKS_MORE
    END: int = lib.FFS_CHUNKS_END
    FAULT: int = lib.FFS_CHUNKS_FAULT
    VALID: int = lib.FFS_CHUNKS_VALID
    _FULL: int = lib.FFS_CHUNKS_FULL

    NO_HEADER: int = lib.FFS_CHUNK_NO_HEADER
    DIALECT: int = lib.FFS_CHUNK_DIALECT
    COMPRESSOR: int = lib.FFS_CHUNK_COMPRESSOR
    CUT: int = lib.FFS_CHUNK_CUT
    PAYLOAD: int = lib.FFS_CHUNK_PAYLOAD
    SIZE: int = lib.FFS_CHUNK_SIZE
    RECORDS: int = lib.FFS_CHUNK_RECORDS
    LIMIT: int = lib.FFS_CHUNK_LIMIT

    def __init__(self, file_size: int, *, records_allowed: int, records_per_byte: int) -> None:
        self._c = ffi.new("ffs_chunk_scan *")
        self._c.file_size = file_size
        self._c.records_allowed = records_allowed
        self._c.records_per_byte = records_per_byte
        self._c.dialect = -1
        self._tables = _NO_CHUNKS
        self._grow(_FIRST_ROOM)

    @property
    def count(self) -> int:
        """Number of chunks found so far."""
        return int(self._c.count)

    @property
    def records(self) -> int:
        """Number of records in them, as their headers state."""
        return int(self._tables["firsts"][self.count])

    @property
    def at(self) -> int:
        """Position of the next chunk."""
        return int(self._c.at)

    @at.setter
    def at(self, place: int) -> None:
        self._c.at = self._c.wanted = place
        self._c.inside = 0

    @property
    def wanted(self) -> int:
        """Where the next window must begin, or before."""
        return int(self._c.wanted)

    @property
    def dialect(self) -> int | None:
        """0: py, 1: go, None: unknown before the first chunk."""
        return None if self._c.dialect < 0 else int(self._c.dialect)

    @dialect.setter
    def dialect(self, number: int | None) -> None:
        self._c.dialect = -1 if number is None else number

    @property
    def fault(self) -> int:
        """The fault of the chunk at which the scanner stopped."""
        return int(self._c.fault)

    @property
    def header(self) -> tuple[int, int, int, int]:
        """Records, checksum, compressor and payload size of the last header of a known dialect."""
        c = self._c
        return c.records, c.checksum, c.compressor, c.size

    @property
    def decoded(self) -> int:
        """Bytes to which the payload of that chunk decodes, or to which its part before
        `examined` does."""
        return int(self._c.decoded)

    @property
    def examined(self) -> int:
        """Where a damaged frame of that payload begins."""
        return int(self._c.place)

    def feed(self, window: memoryview, base: int, *, single: bool = False) -> int:
        """Continue through the file's bytes from ``base`` on; return the reason for stopping.

        Args:
            window: holds 20 bytes from ``wanted`` on, or all that are left.
            single: examine the chunk at `at` only, and do not enter it.
        Returns: MORE, END or FAULT; VALID for a single chunk.
        """
        self._c.single = single
        with from_buffer(U8S, window) as bytes_:
            while (why := int(lib.ffs_chunks(self._c, bytes_, base, len(bytes_)))) == self._FULL:
                self._grow(2 * self.count)
        return why

    def add(
        self, begin: int, end: int, records: int, size: int, checksum: int, compressor: int
    ) -> None:
        """Enter a chunk that the caller found; `at` does not change."""
        if self.count == self._c.room:
            self._grow(2 * self.count)
        row, firsts = self.count, self._tables["firsts"]
        values = (begin, end, firsts[row], size, checksum, compressor)
        for table, value in zip(self._tables.values(), values, strict=True):
            table[row] = value
        firsts[row + 1] = firsts[row] + records
        self._c.count += 1

    def _grow(self, room: int) -> None:
        # A damaged part and the chunk after it take at least 22 bytes of the file.
        room = min(room, int(self._c.file_size) // 11 + 2)
        tables, filled = {}, self.count + 1
        for name, (kind, c_type) in CHUNK_TABLES.items():
            tables[name] = table = np.empty(room + 1, kind)
            table[:filled] = self._tables[name][:filled]
            setattr(self._c, name, from_buffer(c_type, table))
        self._tables = tables
        self._c.room = room

    def table(self, name: str) -> NDArray[Any]:
        """Return `begins`, `ends`, `firsts` (one more), `sizes`, `checksums` or `compressors`.

        A view: int64, the last two uint32 and uint8. The scanner does not change it later.
        """
        return self._tables[name][: self.count + (name == "firsts")]


def split_records(data: Any, count: int) -> tuple[Int64s, Int64s, int]:
    """Find records (u32 length, bytes), each directly after the one before.

    Args: data: bytes-like. count: the maximum; bounded by the size of the data.
    Returns: (starts, lengths, end): of the complete records, and where the last one ends.
    """
    starts, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
    end = ffi.new("uint64_t *")
    with from_buffer(U8S, data) as bytes_:
        found = lib.ffs_split(
            bytes_,
            len(bytes_),
            count,
            from_buffer(I64S, starts),
            from_buffer(I64S, lengths),
            end,
        )
    return starts[:found], lengths[:found], int(end[0])


def scatter(data: Bytes, starts: Int64s, lengths: Int64s, dests: UInt64s) -> None:
    """Copy pieces data[starts[k] : starts[k] + lengths[k]] to addresses that have room for them.

    Raises: UsageError when a piece is outside the data.
    """
    if not len(starts) == len(lengths) == len(dests):
        raise UsageError("starts, lengths and dests must have the same length")
    if ((starts < 0) | (lengths < 0) | (lengths > data.nbytes - starts)).any():
        raise UsageError("a piece is outside the data")
    lib.ffs_scatter(
        from_buffer(U8S, data),
        from_buffer(I64S, np.ascontiguousarray(starts, np.int64)),
        from_buffer(I64S, np.ascontiguousarray(lengths, np.int64)),
        len(starts),
        from_buffer(DESTS, np.ascontiguousarray(dests, np.uint64)),
    )


# ---- tables of many small files ----------------------------------------------------------------

Tables = tuple[UInt64s, UInt64s, UInt32s]
"""Payload offsets, payload lengths and checksums."""
Small = tuple[Bools, Int64s]
"""Which files are in order and have all that is needed in their heads; their rows in the tables."""


def _small(heads: Bytes, got: Int64s, sizes: Int64s, room: int) -> tuple[Any, Small]:
    done, counts = np.zeros(len(got), np.bool_), np.zeros(len(got), np.int64)
    c = ffi.new("ffs_small_files *")
    c.heads = ffi.cast("uint8_t *", ffi.from_buffer(heads))
    c.stride, c.n, c.room = heads.shape[1], len(got), room
    c.got, c.sizes = from_buffer(I64S, got), from_buffer(I64S, sizes)
    c.done, c.counts = from_buffer(U8S, done.view(np.uint8)), from_buffer(I64S, counts)
    return c, (done, counts)


def _tables(room: int) -> tuple[Tables, tuple[Any, Any, Any]]:
    tables = np.empty(room, np.uint64), np.empty(room, np.uint64), np.empty(room, np.uint32)
    offsets, lengths, checksums = tables
    return tables, (from_buffer(U64S, offsets), from_buffer(U64S, lengths),
                    from_buffer(U32S, checksums))  # fmt: skip


def _used(tables: Tables, rows: int) -> Tables:
    """Return the rows that were filled, without the room for more: those of a data set stay until
    all of its files are read."""
    offsets, lengths, checksums = tables
    return offsets[:rows].copy(), lengths[:rows].copy(), checksums[:rows].copy()


def small_ffrecord(
    heads: Bytes, got: Int64s, sizes: Int64s
) -> tuple[Bools, Int64s, Tables, UInt32s]:
    """Return the tables of FFRecord files, and the CRC-32 of each file's count and tables.

    Args: heads: uint8[n, most], contiguous. got, sizes: int64[n]; see `formats.base.Heads`.
    """
    room = int(got.sum()) // 12
    crcs = np.zeros(len(got), np.uint32)
    c, (done, counts) = _small(heads, got, sizes, room)
    tables, places = _tables(room)
    lib.ffs_small_ffrecord(c, *places, from_buffer(U32S, crcs))
    return done, counts, _used(tables, c.rows), crcs


def small_tfrecord(heads: Bytes, got: Int64s, sizes: Int64s) -> tuple[Bools, Int64s, Tables]:
    """Return the tables of TFRecord files. Args: as of `small_ffrecord`."""
    room = int(got.sum()) // FRAME_SIZE
    c, (done, counts) = _small(heads, got, sizes, room)
    tables, places = _tables(room)
    lib.ffs_small_tfrecord(c, *places)
    return done, counts, _used(tables, c.rows)


def small_tfrecord_index(
    indexes: Bytes,
    got: Int64s,
    index_sizes: Int64s,
    sizes: Int64s,
    mtimes: Int64s,
    head_crcs: UInt32s,
    tail_crcs: UInt32s,
) -> tuple[Bools, Int64s, Tables]:
    """Return the tables of TFRecord files out of their index files.

    Args:
        indexes: uint8[n, most], contiguous; the beginnings of the index files. got: int64[n], how
            much of each there is. index_sizes: int64[n], of the index files.
        sizes, mtimes, head_crcs, tail_crcs: of the files, see `index_file.Identity`.
    """
    room = int(got.sum()) // 8
    c, (done, counts) = _small(indexes, got, sizes, room)
    tables, places = _tables(room)
    lib.ffs_small_tfrecord_index(
        c,
        from_buffer(I64S, index_sizes),
        from_buffer(I64S, mtimes),
        from_buffer(U32S, head_crcs),
        from_buffer(U32S, tail_crcs),
        *places,
    )
    return done, counts, _used(tables, c.rows)


def small_recordio(
    heads: Bytes, got: Int64s, sizes: Int64s, most: int
) -> tuple[Bools, Int64s, dict[str, NDArray[Any]], Int32s]:
    """Return the chunks of RecordIO files.

    Args: heads, got, sizes: as of `small_ffrecord`. most: records of a file; others are left.
    Returns: which are done; their chunks; the tables of a ChunkScanner, of one after another; the
        dialect of each file: 0 py, 1 go, -1: an empty file.
    """
    room = int(got.sum()) // _CHUNK_HEADER_SIZE
    c, (done, counts) = _small(heads, got, sizes, room)
    dialects = np.empty(len(got), np.int32)
    tables, places = {}, []
    for name, (kind, c_type) in CHUNK_TABLES.items():
        tables[name] = table = np.empty(room + 1 + (len(got) if name == "firsts" else 0), kind)
        places.append(from_buffer(c_type, table))
    lib.ffs_small_recordio(c, most, 0, *places, from_buffer(I32S, dialects))
    files = int(done.sum())
    for name, table in tables.items():
        tables[name] = table[: c.rows + (files if name == "firsts" else 0)].copy()
    return done, counts, tables, dialects
