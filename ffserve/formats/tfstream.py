"""TFRecord streams: bytes in, records out, for compressed files that are read in order.

An ``Inflater`` turns the bytes of the file into pieces of bounded size, a ``FrameStream`` turns
pieces into records. Neither does I/O, and their output does not depend on how the input is split. A
record with a length above the limit is refused before memory is allocated for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ffserve.dtypes import Bools, Int64s
from ffserve.engine import codec
from ffserve.engine.codec import FRAME_HEADER_SIZE, FRAME_SIZE, checksums, frame_header_is_valid
from ffserve.errors import ChecksumError, FFServeError, FormatError, TruncatedError
from ffserve.formats.base import CHECKSUM_CRC32C, GZIP_MAGIC, ZLIB_MAGIC

PIECE_SIZE = 1 << 20
"""Largest piece that an Inflater yields."""
RECORD_LIMIT = 1 << 30
"""Default limit on the bytes of a record."""

WBITS = {"gzip": 31, "zlib": 15}
"""zlib's wbits, which select header and trailer, by compression."""
_MAGIC = {"gzip": GZIP_MAGIC, "zlib": ZLIB_MAGIC}


def compression_of(head: bytes) -> str | None:
    """Return the compression of a TFRecord file that begins with ``head``: "gzip", "zlib" or None.

    The header of the first record must be valid, which excludes uncompressed files and compressed
    files of other kinds. An empty stream is a file without records. If the file ends before that
    header, gzip's three magic bytes suffice, but the two of zlib do not.
    """
    for name, magic in _MAGIC.items():
        if not head.startswith(magic):
            continue
        if frame_header_is_valid(head):
            return None
        inflater, begin = Inflater("", name), b""
        try:
            for piece in inflater.feed(head):
                begin += piece[:FRAME_HEADER_SIZE]
                if len(begin) >= FRAME_HEADER_SIZE:
                    break
        except FormatError:
            continue
        if len(begin) >= FRAME_HEADER_SIZE:
            found = frame_header_is_valid(begin)
        else:
            found = not begin if inflater.whole else name == "gzip"
        if found:
            return name
    return None


class Inflater:
    """Decompresses a file, in pieces.

    Args:
        path: name of the file, for errors.
        compression: "gzip" or "zlib"; "none" passes all bytes through.
    """

    def __init__(self, path: str, compression: str) -> None:
        self._path = path
        self._compression = compression
        self._stream = None if compression == "none" else zlib.decompressobj(WBITS[compression])
        self._begun = False
        """Whether the current member has received bytes."""
        self._members = 0
        self._at = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decompress further bytes of the file; yield pieces of at most ``PIECE_SIZE`` bytes.

        Raises:  FormatError: an invalid stream, or a checksum mismatch.
        """
        if self._stream is None:
            if data:
                yield data
            return
        while data:
            if self._stream.eof:
                data = self._next_member(data)
                continue
            self._begun = True
            before = len(data)
            restore = self._stream.copy()
            try:
                piece = self._stream.decompress(data, PIECE_SIZE)
            except zlib.error as error:
                # The failed call lost the output of the intact bytes before the damage.
                self._stream = restore
                yield from self._up_to(data, error)
            data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
            self._at += before - len(data)
            if piece:
                yield piece
        # Output that zlib still buffers.
        while self._begun and not self._stream.eof:
            if not (piece := self._stream.decompress(b"", PIECE_SIZE)):
                return
            yield piece

    def _up_to(self, data: bytes, error: zlib.error) -> Iterator[bytes]:
        """Yield the output of the bytes before the damage, then raise."""
        assert self._stream is not None
        for k in range(len(data)):
            try:
                piece = self._stream.decompress(data[k : k + 1], PIECE_SIZE)
            except zlib.error:
                break
            self._at += 1
            if piece:
                yield piece
        raise stream_error(self._path, self._compression, error, self._at)

    def _next_member(self, data: bytes) -> bytes:
        """Begin the next member; return the remaining bytes."""
        self._members += 1
        if self._compression == "gzip":
            rest = data.lstrip(b"\0")  # zero padding, as on tapes
            self._at += len(data) - len(rest)
            if not rest:
                return b""
            self._stream = zlib.decompressobj(WBITS["gzip"])
            self._begun = False
            return rest
        raise rest_error(self._path, self._at)

    @property
    def whole(self) -> bool:
        """Whether the bytes so far end with the end of a stream."""
        return self._stream is None or self._stream.eof

    def close(self) -> None:
        """Finish at the end of the file.

        Raises:  TruncatedError: the file ends inside a stream.
        """
        if not self.whole and (self._begun or not self._members):
            raise cut_stream_error(self._path, self._compression, self._at)


@dataclass(frozen=True)
class Records:
    """A run of records of a stream.

    block: the bytes that contain them. offsets, lengths: of their payloads in it, int64. first:
    number of the first record in the stream. damaged: whether each payload fails its checksum.
    """

    block: bytes
    offsets: Int64s
    lengths: Int64s
    first: int
    damaged: Bools

    def without(self, rows: Int64s) -> Records:
        """Return the records without the given rows."""
        kept = np.ones(len(self.offsets), np.bool_)
        kept[rows] = False
        offsets, lengths, damaged = self.offsets[kept], self.lengths[kept], self.damaged[kept]
        return Records(self.block, offsets, lengths, self.first, damaged)


class FrameStream:
    """Parses the bytes of a TFRecord file into records.

    Args:
        path: name of the file, for errors.
        verify: verify lengths and payloads.
        limit: bytes of the largest accepted record.
    """

    def __init__(self, path: str, *, verify: bool = True, limit: int = RECORD_LIMIT) -> None:
        self._path = path
        self._verify = verify
        self._limit = limit
        self._held = bytearray()
        self._wanted = FRAME_HEADER_SIZE
        """Number of held bytes needed to complete the next record."""
        self.count = 0
        """Number of records so far."""
        self._at = 0
        """Offset of the held bytes in the uncompressed stream."""

    def feed(self, data: bytes) -> Records | None:
        """Take more bytes; return the records that are complete now.

        Raises:  ChecksumError: a damaged length. FormatError: a record above the limit. All records
                 before it have been returned by then, and the stream accepts no more bytes.
        """
        self._held += data
        if len(self._held) < self._wanted:
            return None
        block = bytes(self._held)
        scanner = codec.FrameScanner(len(block), verify=self._verify)
        stop = scanner.feed(memoryview(block), 0)
        if stop == codec.FrameScanner.CUT_RECORD:
            self._wanted = self._needed(block, scanner.at, scanner.count)
        elif stop == codec.FrameScanner.BAD_HEADER and not scanner.count:
            raise length_error(self._path, self.count, self._at)
        else:
            self._wanted = FRAME_HEADER_SIZE
        self._held = bytearray(block[scanner.at :])
        self._at += scanner.at
        if not scanner.count:
            return None
        offsets, lengths, expected = scanner.tables()
        damaged = np.zeros(scanner.count, np.bool_)
        if self._verify:
            damaged = checksums(CHECKSUM_CRC32C, block, offsets, lengths) != expected
        first = self.count
        self.count += scanner.count
        return Records(block, offsets.astype(np.int64), lengths.astype(np.int64), first, damaged)

    def _needed(self, block: bytes, at: int, before: int) -> int:
        """Return the size of the frame at an offset."""
        [length] = struct.unpack_from("<Q", block, at)
        if length > self._limit:
            if before:
                return 0  # return the records before it first; the next call raises
            raise FormatError(
                f"record {self.count} has {length} bytes, more than the limit of {self._limit}",
                path=self._path,
                index=self.count,
                hint="check the file for damage; records of this size cannot be read as a stream",
            )
        return int(length) + FRAME_SIZE

    def close(self) -> None:
        """Finish at the end of the stream.

        Raises:  a pending error of `feed`; TruncatedError: the stream ends inside a record.
        """
        if len(self._held) >= FRAME_HEADER_SIZE:
            self._wanted = 0
            self.feed(b"")
        if self._held:
            raise cut_record_error(self._path, self.count, len(self._held))


# ---- errors, of streams and of indexed files -----------------------------------------------------

_RESTORE = "restore the file from a copy"
_INTACT = "restore the file, or read its intact samples with on_error='skip'"


def record_error(path: str, index: int | None) -> FFServeError:
    """Return the error for a record whose payload fails its checksum."""
    return ChecksumError(
        "checksum mismatch: the bytes of the record were damaged after they were written",
        path=path,
        index=index,
        hint="restore the file, or skip the record with on_error='skip'",
    )


def stream_error(path: str, compression: str, reason: object, offset: int) -> FormatError:
    """Return the error for a compressed stream that cannot be decoded from this byte on."""
    return FormatError(
        f"the {compression} stream is damaged: {reason}", path=path, offset=offset, hint=_RESTORE
    )


def rest_error(path: str, offset: int) -> FormatError:
    """Return the error for bytes behind a zlib stream."""
    return FormatError(
        "bytes follow the end of the zlib stream", path=path, offset=offset, hint=_RESTORE
    )


def cut_stream_error(path: str, compression: str, offset: int) -> TruncatedError:
    """Return the error for a file that ends inside its compressed stream."""
    return TruncatedError(
        f"the file ends inside its {compression} stream", path=path, offset=offset, hint=_INTACT
    )


def length_error(path: str, index: int, at: int) -> ChecksumError:
    """Return the error for a length that fails its checksum, at this byte of the output."""
    return ChecksumError(
        f"checksum mismatch in the length of record {index}, at byte {at} of the uncompressed "
        "stream; the position of the next record is unknown",
        path=path,
        index=index,
        hint=_RESTORE,
    )


def cut_record_error(path: str, index: int, size: int) -> TruncatedError:
    """Return the error for a record of which the output has only `size` bytes."""
    return TruncatedError(
        f"the stream ends inside record {index}, after {size} bytes of it",
        path=path,
        index=index,
        hint=_INTACT,
    )
