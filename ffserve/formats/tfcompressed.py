"""Compressed TFRecord files by index: seek points, and chunks that are decoded from them.

GZIP and ZLIB compress a file as a whole. One pass over the file finds the records in its output,
and points of the file from which decoding can begin: the beginnings of deflate blocks. The records
are divided into chunks of about ``SPAN_SIZE`` bytes. A chunk is decoded from the last block that
begins before its first record: up to that record the output is dropped. Its extent in the file ends
where the output is known to contain the end of its last record, so the extents of neighbours
overlap, and a record that lies across seek points is complete in its chunk.

A block refers to at most 32 KiB of output before it, its window. Only the bytes to which the chunk
really refers are kept, compressed with the gaps between them as zeros (as rapidgzip does). They are
found by decoding the first 32 KiB after the point with windows that contain the position of each
byte: output that differs from window to window is a copy from there, and its values say from where.
A chunk that refers to nothing needs no window. Such points are the beginnings of gzip members, and
where a writer made a full flush, as ours does between records (``CompressedEncoder``).

The pass verifies the whole file: the checksums of the streams, of the lengths and of the records. A
record that does not match its checksum becomes a chunk of its own, so that it fails alone.

Hostile files: memory does not depend on what a file claims. Output is dropped piece by piece, the
number of records and the size of the output are limited by the size of the file.
"""

from __future__ import annotations

import errno
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bytes, Int64s, UInt32s, UInt64s
from ffserve.engine import inflate
from ffserve.engine.codec import CRC_32C, FRAME_HEADER_SIZE, FRAME_SIZE, FrameScanner, crc32c
from ffserve.engine.codec import checksums as checksums_of
from ffserve.engine.inflate import MARK_DTYPE, WINDOW_SIZE, BlockInflater, inflate_span
from ffserve.errors import (
    GAP_CHECKSUM,
    ChecksumError,
    FFServeError,
    FormatError,
    TruncatedError,
    UsageError,
)
from ffserve.formats.base import (
    CHECKSUM_CRC32C,
    RECORD_TABLE_SIZE,
    UNKNOWN_LENGTH,
    Admit,
    Chunks,
    ReadAt,
    read_exactly,
    scan_fingerprint,
)
from ffserve.formats.tfstream import (
    cut_record_error,
    cut_stream_error,
    length_error,
    record_error,
    rest_error,
    stream_error,
)

SPAN_SIZE = 1 << 20
"""A chunk ends with the first record that makes it this large, in bytes of output."""
READ_SIZE = 128 << 10
PIECE_SIZE = 256 << 10
"""The pass looks at this many bytes of output together."""
RECORDS_ALLOWED, RECORDS_PER_BYTE = 1 << 20, 1
"""A file may have RECORDS_ALLOWED records, and RECORDS_PER_BYTE for each of its bytes. Each record
has a checksum of 4 bytes, which do not compress unless records repeat."""
OUTPUT_ALLOWED, OUTPUT_PER_BYTE = 4 << 30, 128
"""A file may decode to OUTPUT_ALLOWED bytes, and OUTPUT_PER_BYTE for each of its bytes. Deflate
allows 1032 per byte, which no useful records come near; with it, a pass over a small file could
take hours."""
COMPARED_CHUNKS = 3
"""This many chunks are decoded to compare a file with its index file."""
COMPARED_SIZE = 64 << 20
"""When a read has failed, this comparison reads and decodes at most this many bytes, which takes a
fifth of a second."""

_COMPRESSIONS = ("gzip", "zlib")
_UNBOUNDED = 1 << 62
CHUNK_TABLE_SIZE = 104
"""Bytes that a shard keeps for each chunk, besides its window."""
_HEAD = struct.Struct("<QQQ")
"""Head of what an index file keeps: compression, number of chunks, size of the output."""
_ROW = np.dtype(
    [("bit", "<u8"), ("end", "<u8"), ("first", "<u8"), ("skip", "<u8"), ("window", "<i8")]
)
"""A chunk: the bit of the file where its block begins, the byte where its extent ends, its first
record, the output to drop; the size of its compressed window, or SAME."""
_SAME = -1
"""The window is that of the chunk before."""
_WINDOW_MOST = WINDOW_SIZE + 1024
"""A compressed window has at most this many bytes."""


class PassSizes(NamedTuple):
    """How a file is read and divided; see the constants."""

    span: int = SPAN_SIZE
    read: int = READ_SIZE
    piece: int = PIECE_SIZE
    records_allowed: int = RECORDS_ALLOWED
    output_allowed: int = OUTPUT_ALLOWED


PASS_SIZES = PassSizes()


class InOrderOnlyError(UsageError, TypeError):
    """Random access to a compressed file, or its length, was requested of a build without zlib.

    Also a TypeError, so that ``list(reader)`` treats it as a missing length.
    """


@dataclass
class CompressedShard:
    """One compressed TFRecord file after its pass. Its offsets are those of the output."""

    path: str
    size: int
    compression: str
    offsets: UInt64s = field(repr=False)
    lengths: UInt64s = field(repr=False)
    checksums: UInt32s = field(repr=False)
    """CRC-32C of each payload, unmasked."""
    chunks: Chunks = field(repr=False)
    rows: NDArray[Any] = field(repr=False)
    windows: bytes = field(repr=False)
    output_size: int
    """In bytes."""
    verify: bool = True
    sound: bool = True
    """Whether a tolerant pass skipped nothing."""
    problems: dict[int, FFServeError] = field(default_factory=dict, repr=False)
    """The errors of chunks that cannot be read."""
    format: str = "tfrecord"
    checksum_kind: int = CHECKSUM_CRC32C

    def __post_init__(self) -> None:
        self.count = len(self.lengths)
        self.fingerprint = scan_fingerprint(self.format, self.lengths, self.checksums, self.size)
        sizes = self.rows["window"]
        self._window_ends = np.cumsum(np.maximum(sizes, 0))
        # For each chunk, the chunk that keeps its window.
        rows = np.where(sizes == _SAME, 0, np.arange(len(sizes)))
        self._window_rows = np.maximum.accumulate(rows)
        self._compared = False
        self._fits: bool | None = None
        """What `fits` returns, once it was found out."""

    def load(self, offsets: UInt64s, lengths: UInt64s, checksums: UInt32s) -> None:
        """Fill the caller's arrays; the offsets are those of the chunks in the file."""
        offsets[:] = np.repeat(self.chunks.begins.astype(np.uint64), np.diff(self.chunks.firsts))
        lengths[:] = self.lengths
        checksums[:] = self.checksums

    def about(self) -> dict[str, str | int]:
        """Return compression, number and decoded sizes of the chunks, and the size of windows."""
        return {
            "chunks": len(self.chunks),
            "compression": self.compression,
            "decoded_size_bytes": int(self.chunks.sizes.sum()),
            "largest_chunk_size_bytes": int(self.chunks.sizes.max(initial=0)),
            "windows_size_bytes": len(self.windows),
        }

    def limit(self, size: int) -> None:
        """Refuse chunks that are larger; see ``ChunkedShard``."""
        chunks = self.chunks
        held = np.maximum(chunks.sizes + self.rows["skip"].astype(np.int64), self._encoded())
        for chunk in np.flatnonzero(held > size).tolist():
            self.problems[chunk] = FormatError(
                f"chunk {chunk}, from record {int(chunks.firsts[chunk])} on, has "
                f"{int(self._encoded()[chunk])} bytes, {int(held[chunk])} decoded, more than the "
                f"limit of {size}",
                path=self.path,
                offset=int(chunks.begins[chunk]),
                hint="raise the daemon's max_chunk_size if you trust this file",
            )
            chunks.sizes[chunk] = 0
            chunks.ends[chunk] = chunks.begins[chunk]

    def _encoded(self) -> Int64s:
        return self.chunks.ends - self.chunks.begins

    def decode(self, chunk: int, extent: memoryview, into: Bytes) -> tuple[Int64s, Int64s]:
        """Verify and decode a chunk; see ``ChunkedShard``."""
        problem = self.problems.get(chunk)
        if problem is not None:
            raise problem.located()
        begin, first = int(self.chunks.begins[chunk]), int(self.chunks.firsts[chunk])
        if len(extent) != int(self._encoded()[chunk]):
            raise TruncatedError(
                f"chunk {chunk}: the file has only {len(extent)} of its "
                f"{int(self._encoded()[chunk])} bytes",
                path=self.path,
                offset=begin,
                hint="the file was truncated while in use: restore it and open it again",
            )
        row = self.rows[chunk]
        bit, skip, gzip = int(row["bit"]) & 7, int(row["skip"]), self.compression == "gzip"
        why, used, _ = inflate_span(extent, bit, self._window(chunk), skip, into, members=gzip)
        if why:
            found = "is damaged" if why == -errno.EBADMSG else "does not contain its records"
            raise FormatError(
                f"chunk {chunk}: the {self.compression} stream {found}",
                path=self.path,
                offset=begin + used,
                hint="restore the file from a copy; `ffserve verify` lists all damage",
            )
        return self._records(chunk, slice(first, int(self.chunks.firsts[chunk + 1])), into)

    def _records(self, chunk: int, rows: slice, into: Bytes) -> tuple[Int64s, Int64s]:
        """Verify the frames of a decoded chunk; return starts and lengths of the payloads."""
        scanner = FrameScanner(len(into), verify=self.verify)
        stop = scanner.feed(into.data, 0) if len(into) else FrameScanner.END
        starts, lengths, stored = scanner.tables()
        if (
            stop != FrameScanner.END
            or not np.array_equal(lengths, self.lengths[rows])
            or not np.array_equal(stored, self.checksums[rows])
        ):
            raise FormatError(
                f"chunk {chunk}: its records differ from those that the file had when it was "
                "indexed",
                path=self.path,
                offset=int(self.chunks.begins[chunk]),
                hint="`ffserve verify` lists all damage, and makes the index file anew",
            )
        if self.verify:
            bad = np.flatnonzero(checksums_of(CRC_32C, into, starts, lengths) != stored)
            if len(bad):
                raise record_error(self.path, None)
        return starts.astype(np.int64), lengths.astype(np.int64)

    def _window(self, chunk: int) -> bytes:
        row = int(self._window_rows[chunk])
        end, size = int(self._window_ends[row]), int(self.rows["window"][row])
        if not size:
            return b""
        try:
            found = zlib.decompressobj().decompress(self.windows[end - size : end], WINDOW_SIZE)
        except zlib.error:
            found = b""  # decoding fails
        return found

    @property
    def kept(self) -> bytes:
        """The bytes that an index file keeps, besides lengths and checksums."""
        head = _HEAD.pack(_COMPRESSIONS.index(self.compression), len(self.rows), self.output_size)
        return head + self.rows.tobytes() + self.windows

    def agrees(self, read_at: ReadAt, records: Int64s) -> bool:
        """Whether the file decodes to these records; a few of their chunks are tried.

        Args:    read_at: the file. records: their numbers, at least one.
        Cost:    that of decoding ``COMPARED_CHUNKS`` chunks.
        """
        found = np.unique(self.chunks.holding(records))
        some = np.linspace(0, len(found) - 1, min(len(found), COMPARED_CHUNKS))
        agrees = all(self._decodes(read_at, k) for k in found[some.astype(np.int64)].tolist())
        self._compared, self._fits = True, agrees
        return agrees

    def fits(self, read_at: ReadAt) -> bool | None:
        """Whether these are the records of the file; see ``ScannedChunks``.

        Cost:    that of decoding the ``COMPARED_CHUNKS`` smallest chunks, once, as far as they have
                 ``COMPARED_SIZE`` bytes together.
        """
        if not self._compared:
            self._fits = self._compare(read_at)
            self._compared = True
        return self._fits

    def _compare(self, read_at: ReadAt) -> bool | None:
        costs = self._encoded() + self.rows["skip"].astype(np.int64) + self.chunks.sizes
        costs[list(self.problems)] = COMPARED_SIZE + 1
        left, found = COMPARED_SIZE, None
        for chunk in np.argsort(costs, kind="stable")[:COMPARED_CHUNKS].tolist():
            left -= int(costs[chunk])
            if left < 0:
                break
            found = self._decodes(read_at, chunk)
            if found:
                break
        return found

    def _decodes(self, read_at: ReadAt, chunk: int) -> bool:
        """Whether a chunk has the records that the tables say, right or damaged."""
        extent = memoryview(bytearray(int(self._encoded()[chunk])))
        try:
            read_exactly(read_at, int(self.chunks.begins[chunk]), extent, self.path)
            self.decode(chunk, extent, np.empty(int(self.chunks.sizes[chunk]), np.uint8))
        except ChecksumError:  # of a payload, after lengths and stored checksums were compared
            return True
        except FormatError:
            return False
        return True


def restore(
    lengths: UInt64s, checksums: UInt32s, kept: bytes, size: int, path: str
) -> CompressedShard | None:
    """Return the shard of an earlier pass; None if `kept` is invalid or contradicts the rest.

    Every number is checked, as far as it can be without decoding; `CompressedShard.decode` compares
    the records.
    """
    if len(kept) < _HEAD.size:
        return None
    number, count, output_size = _HEAD.unpack_from(kept)
    if number >= len(_COMPRESSIONS) or count > (len(kept) - _HEAD.size) // _ROW.itemsize:
        return None
    rows = np.frombuffer(kept, _ROW, count, _HEAD.size)
    windows = kept[_HEAD.size + count * _ROW.itemsize :]
    if bool(count) != bool(len(lengths)):
        return None
    if len(lengths) > RECORDS_ALLOWED + RECORDS_PER_BYTE * size:
        return None
    if output_size > min(OUTPUT_ALLOWED + OUTPUT_PER_BYTE * size, UNKNOWN_LENGTH - 1):
        return None
    if (lengths > np.uint64(output_size)).any():
        return None
    ends = np.cumsum(lengths + np.uint64(FRAME_SIZE))
    # The sum cannot wrap: at most 2^46 records of 2^48 bytes.
    if (int(ends[-1]) if len(ends) else 0) != output_size:
        return None
    if count and not _rows_are_valid(rows, len(windows), ends, size):
        return None
    return _shard(path, size, _COMPRESSIONS[number], lengths, checksums, rows, windows, ends)


def _rows_are_valid(rows: NDArray[Any], windows: int, ends: UInt64s, size: int) -> bool:
    firsts, sizes = rows["first"], rows["window"]
    if firsts[0] != 0 or (firsts >= len(ends)).any() or (firsts[1:] <= firsts[:-1]).any():
        return False
    starts = _starts(firsts, ends)
    begins = rows["bit"] >> np.uint64(3)
    return bool(
        (rows["skip"] <= starts).all()
        and (begins < rows["end"]).all()
        and (rows["end"] <= np.uint64(size)).all()
        and (np.diff(rows["bit"].astype(np.int64)) >= 0).all()
        and (np.diff(rows["end"].astype(np.int64)) >= 0).all()
        and (sizes >= _SAME).all()
        and (sizes <= _WINDOW_MOST).all()
        and sizes[0] != _SAME
        and int(np.maximum(sizes, 0).sum()) == windows
    )


def _starts(firsts: UInt64s, ends: UInt64s) -> UInt64s:
    """Return where records begin in the output, given where all records end."""
    before = np.concatenate((np.zeros(1, np.uint64), ends))
    return before[firsts.astype(np.int64)]


def _shard(
    path: str,
    size: int,
    compression: str,
    lengths: UInt64s,
    checksums: UInt32s,
    rows: NDArray[Any],
    windows: bytes,
    ends: UInt64s,
) -> CompressedShard:
    starts = _starts(np.append(rows["first"], np.uint64(len(lengths))), ends).astype(np.int64)
    chunks = Chunks(
        firsts=np.append(rows["first"], np.uint64(len(lengths))).astype(np.int64),
        begins=(rows["bit"] >> np.uint64(3)).astype(np.int64),
        ends=rows["end"].astype(np.int64),
        sizes=np.diff(starts),
    )
    output_size = int(ends[-1]) if len(ends) else 0
    offsets = ends - lengths - np.uint64(FRAME_SIZE - FRAME_HEADER_SIZE)
    return CompressedShard(
        path, size, compression, offsets, lengths, checksums, chunks, rows, windows, output_size
    )


# ---- the pass ------------------------------------------------------------------------------------


def scan(
    read_at: ReadAt,
    size: int,
    path: str,
    compression: str,
    *,
    verify: bool,
    tolerant: bool,
    admit: Admit,
    sizes: PassSizes,
) -> CompressedShard:
    """Read a whole compressed file; see ``TFRecord.open``."""
    if not inflate.library():
        raise InOrderOnlyError(
            "this build of ffserve lacks zlib: it reads compressed files in order only",
            path=path,
            hint="install zlib's headers (zlib1g-dev) and install ffserve again",
        )
    return _Pass(read_at, size, path, compression, verify, tolerant, admit, sizes).run()


class _Pass:
    """One pass over a file."""

    def __init__(
        self,
        read_at: ReadAt,
        size: int,
        path: str,
        compression: str,
        verify: bool,
        tolerant: bool,
        admit: Admit,
        sizes: PassSizes,
    ) -> None:
        self._admit = admit
        self._sizes = sizes
        self._read_at = read_at
        self._size = size
        self._path = path
        self._compression = compression
        self._verify = verify
        self._tolerant = tolerant
        self._inflater = BlockInflater(compression)
        self._scanner = FrameScanner(_UNBOUNDED, verify=verify or tolerant)
        self._buffer = np.empty(WINDOW_SIZE + sizes.piece, np.uint8)
        """The last WINDOW_SIZE bytes of earlier output, or fewer, then the latest piece."""
        self._cutter = _Cutter(self._refers_to, sizes.span)
        self._sums = _Sums()

    def run(self) -> CompressedShard:
        problem: FFServeError | None = None
        try:
            for view, base, marks in self._pieces():
                stop = self._scanner.feed(view.data, base)
                kept = RECORD_TABLE_SIZE * self._scanner.count + self._cutter.kept_size
                self._admit(self._scanner.count, kept)
                offsets, lengths, _ = self._scanner.tables()
                if self._verify:
                    self._sums.add(view, base, offsets, lengths)
                self._cutter.add(view, base, marks, offsets, self._inflater.used)
                self._check(stop)
            self._check_end()
        except FFServeError as error:
            if not self._tolerant or not isinstance(error, FormatError):
                raise
            problem = error.located()  # without a traceback, whose frames hold the buffers
        return self._found(problem)

    def _pieces(self) -> Iterator[tuple[Bytes, int, NDArray[Any]]]:
        """Yield the output in pieces: a piece behind its window, the offset of that window, and the
        beginnings of blocks in the piece."""
        inflater, buffer = self._inflater, self._buffer
        kept, at, data = 0, 0, memoryview(b"")
        memory = bytearray(min(self._sizes.read, self._size))
        while True:
            if not data and at < self._size:
                data = memoryview(memory)[: self._size - at]
                read_exactly(self._read_at, at, data, self._path)
                at += len(data)
            used, made = inflater.used, inflater.made
            why, marks = inflater.run(data, buffer[WINDOW_SIZE:])
            data, made = data[inflater.used - used :], inflater.made - made
            if made or len(marks):
                end = WINDOW_SIZE + made
                yield buffer[WINDOW_SIZE - kept : end], inflater.made - made - kept, marks
                kept = min(WINDOW_SIZE, kept + made)
                buffer[WINDOW_SIZE - kept : WINDOW_SIZE] = buffer[end - kept : end].copy()
            if why == BlockInflater.BAD:
                raise stream_error(self._path, self._compression, inflater.message, inflater.used)
            if why == BlockInflater.REST:
                raise rest_error(self._path, inflater.used)
            if not made and not data and at == self._size:
                return

    def _check(self, stop: int) -> None:
        """Raise the error of a record, or of a file that is larger than its size allows."""
        scanner, used = self._scanner, self._inflater.used
        if stop == FrameScanner.BAD_HEADER:
            raise length_error(self._path, scanner.count, scanner.at)
        if stop == FrameScanner.CUT_RECORD:
            raise cut_record_error(self._path, scanner.count, self._inflater.made - scanner.at)
        for kind, found, most in (
            ("records", scanner.count, self._sizes.records_allowed + RECORDS_PER_BYTE * used),
            (
                "bytes",
                self._inflater.made,
                self._sizes.output_allowed + OUTPUT_PER_BYTE * used,
            ),
        ):
            if found > most:
                raise FormatError(
                    f"the first {used} bytes of the file decode to {found} {kind}, more than "
                    "allowed",
                    path=self._path,
                    offset=used,
                    hint="the file is hostile, or unusually redundant: decompress it, or read it "
                    "in order",
                )

    def _check_end(self) -> None:
        """Raise if the stream or its last record is incomplete."""
        scanner, made = self._scanner, self._inflater.made
        if not self._inflater.whole:
            raise cut_stream_error(self._path, self._compression, self._size)
        if scanner.complete < scanner.count or scanner.at != made:
            at = scanner.at
            if scanner.complete < scanner.count:
                at -= scanner.last_length + FRAME_SIZE
            raise cut_record_error(self._path, scanner.complete, made - at)

    def _found(self, problem: FFServeError | None) -> CompressedShard:
        count = self._scanner.complete
        offsets, lengths, checksums = self._scanner.tables()
        offsets, lengths, checksums = offsets[:count], lengths[:count], checksums[:count]
        rows, windows = self._cutter.finish(count)
        if self._verify:
            rows = _isolated(rows, offsets, self._sums.differ(checksums))
        ends = offsets + lengths + np.uint64(FRAME_SIZE - FRAME_HEADER_SIZE)
        if problem is not None:
            # A record of its own stands for everything behind the damage.
            lengths, checksums = np.append(lengths, 0), np.append(checksums, GAP_CHECKSUM)
            lengths, checksums = lengths.astype(np.uint64), checksums.astype(np.uint32)
            ends = np.append(ends, ends[-1:] if count else np.zeros(1, np.uint64))
            end = rows["end"][-1] if count else 0
            rows = np.append(rows, np.array([(8 * int(end), end, count, 0, 0)], _ROW))
        shard = _shard(
            self._path, self._size, self._compression, lengths, checksums, rows, windows, ends
        )
        shard.verify = self._verify
        if problem is not None:
            shard.sound = False
            shard.problems[len(rows) - 1] = problem
        return shard

    def _refers_to(self, bit: int, window: Bytes) -> bytes:
        """Return a compressed window with those bytes only to which the output from a block's
        beginning on refers; no bytes if it refers to none."""
        if not len(window):
            return b""
        rest = self._size - bit // 8
        data = memoryview(bytearray(min(WINDOW_SIZE * 5 // 4, rest)))
        read_exactly(self._read_at, bit // 8, data, self._path)
        places = np.arange(len(window))
        low, high = (places & 255).astype(np.uint8), (places >> 8).astype(np.uint8)
        outputs = []
        for stand_in in (low, high, ~low):
            out = np.zeros(WINDOW_SIZE, np.uint8)
            why, _, made = inflate_span(
                data, bit & 7, stand_in.tobytes(), 0, out, members=self._compression == "gzip"
            )
            if why and len(data) < rest:  # the blocks are unusually small: keep all of it
                return zlib.compress(window.tobytes(), 1)
            outputs.append(out[: made if why else len(out)])
        copied = outputs[0] != outputs[2]
        needed = outputs[0][copied].astype(np.int64) | outputs[1][copied].astype(np.int64) << 8
        sparse = np.zeros_like(window)
        sparse[needed] = window[needed]
        return zlib.compress(sparse.tobytes(), 1) if len(needed) else b""


class _Sums:
    """Computes the checksums of records whose bytes come in pieces."""

    def __init__(self) -> None:
        self._found: list[UInt32s] = []
        self._count = 0
        self._begun = False
        """Whether the record after those was begun: `_sum` covers it up to `_at`."""
        self._sum = self._at = 0

    def add(self, view: Bytes, base: int, offsets: UInt64s, lengths: UInt64s) -> None:
        """Take a piece of the output, which begins at `base`, and all records found so far."""
        end = base + len(view)
        if self._begun:
            stop = int(offsets[self._count] + lengths[self._count])
            upto = min(stop, end)
            self._sum = crc32c(view[self._at - base : upto - base].data, self._sum)
            self._at = upto
            if stop > end:
                return
            self._found.append(np.array([self._sum], np.uint32))
            self._count += 1
            self._begun = False
        first = self._count
        ends = offsets[first:] + lengths[first:]
        whole = int(np.searchsorted(ends, np.uint64(end), side="right"))
        if whole:
            places = offsets[first : first + whole] - np.uint64(base)
            self._found.append(checksums_of(CRC_32C, view, places, lengths[first : first + whole]))
            self._count += whole
        if self._count < len(offsets):
            start = int(offsets[self._count])
            self._sum, self._at, self._begun = crc32c(view[start - base :].data), end, True

    def differ(self, checksums: UInt32s) -> Int64s:
        """Return the records that do not match their checksums."""
        found = np.concatenate([np.zeros(0, np.uint32), *self._found])
        return np.flatnonzero(found[: len(checksums)] != checksums)


class _Cutter:
    """Divides records into chunks, and chooses the block from which each is decoded.

    Args:
        refers_to: returns the compressed window of a block (its bit, the output before it).
        span: the least size of a chunk, in bytes of output.
    """

    def __init__(self, refers_to: Callable[[int, Bytes], bytes], span: int) -> None:
        self._span = span
        self._refers_to = refers_to
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._windows: list[bytes] = []
        self.kept_size = 0
        """Bytes of the rows and windows so far."""
        self._first = self._start = self._point = 0
        """Of the last chunk: its first record; the offsets of that and of the block in the output.
        """
        self._end = 0
        """Bytes of the file that contain all output so far."""
        self._carried: NDArray[Any] = np.zeros(0, MARK_DTYPE)
        self._carried_window = np.zeros(0, np.uint8)
        """The last block of earlier pieces."""

    def add(
        self,
        view: Bytes,
        base: int,
        marks: NDArray[Any],
        offsets: UInt64s,
        used: int,
    ) -> None:
        """Take a piece of the output.

        Args: view: the piece and what came before it. base: its offset. marks: blocks that begin
            in it. offsets: of all payloads found so far. used: bytes of the file used so far.
        """
        if not self._rows and len(marks):
            self._begin(0, 0, int(marks["bit"][0]), 0, view[:0])
        carried, marks = len(self._carried), np.concatenate((self._carried, marks))
        places = marks["out"].astype(np.int64)
        while (found := self._next(offsets, places)) is not None:
            record, start, k = found
            later = int(np.searchsorted(places, start))
            self._close(-(-int(marks["bit"][later]) // 8) if later < len(marks) else used)
            window, place = self._carried_window, int(places[k])
            if k >= carried:
                window = _before(view, place - base)
            self._begin(record, start, int(marks["bit"][k]), place, window)
        self._end = used
        if len(marks) > carried:
            self._carried = marks[-1:].copy()
            self._carried_window = _before(view, int(places[-1]) - base).copy()

    def _next(self, offsets: UInt64s, places: Int64s) -> tuple[int, int, int] | None:
        """Return the first record of the next chunk, its offset, and its block among those that
        begin at `places`; None if that is not known yet."""
        starts = offsets[self._first :].astype(np.int64) - FRAME_HEADER_SIZE
        if not len(places):
            return None
        row = int(np.searchsorted(starts, self._start + self._span))
        if row == len(starts):
            return None
        k = int(np.searchsorted(places, starts[row], side="right")) - 1
        if k < 0 or places[k] <= self._point:
            # No block has begun since the last chunk's: take the record after the next one.
            k = int(np.searchsorted(places, self._point, side="right"))
            row = int(np.searchsorted(starts, places[k])) if k < len(places) else len(starts)
            if row == len(starts):
                return None
            k = int(np.searchsorted(places, starts[row], side="right")) - 1
        return self._first + row, int(starts[row]), k

    def _begin(self, record: int, start: int, bit: int, place: int, window: Bytes) -> None:
        kept = self._refers_to(bit, window)
        self._windows.append(kept)
        self.kept_size += CHUNK_TABLE_SIZE + len(kept)
        self._rows.append((bit, 0, record, start - place, len(kept)))
        self._first, self._start, self._point = record, start, place

    def _close(self, end: int) -> None:
        bit, _, *rest = self._rows[-1]
        self._rows[-1] = (bit, end, *rest)  # type: ignore[assignment]

    def finish(self, count: int) -> tuple[NDArray[Any], bytes]:
        """Return the rows of the chunks of the first `count` records, and their windows."""
        if self._rows:
            self._close(self._end)
        rows = np.array(self._rows, _ROW)
        kept = int(np.searchsorted(rows["first"], count))
        return rows[:kept], b"".join(self._windows[:kept])


def _before(view: Bytes, place: int) -> Bytes:
    return view[max(0, place - WINDOW_SIZE) : place]


def _isolated(rows: NDArray[Any], offsets: UInt64s, bad: Int64s) -> NDArray[Any]:
    """Give each bad record a chunk of its own, decoded from the block of the chunk it was in."""
    if not len(bad):
        return rows
    edges = np.unique(np.concatenate((rows["first"].astype(np.int64), bad, bad + 1)))
    edges = edges[edges < len(offsets)]
    chunks = np.searchsorted(rows["first"], edges, side="right") - 1
    firsts = rows["first"][chunks].astype(np.int64)
    cut = rows[chunks]
    cut["first"] = edges
    cut["skip"] += offsets[edges] - offsets[firsts]
    cut["window"][edges != firsts] = _SAME
    return cut
