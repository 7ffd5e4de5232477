"""TFRecord as a stream: bytes in, records out. Compressed files can be read in no other way.

GZIP (one member or several) and ZLIB compress the file as a whole, so nothing tells where a
record begins but the bytes before it. An ``Inflater`` turns the file's bytes into pieces of
bounded size, a ``FrameStream`` pieces into records; neither does I/O, and both give the same
however their input is cut. What a record may cost is limited: a length above the limit is refused
before a byte of it is kept.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ffserve.engine import codec
from ffserve.engine.codec import FRAME_HEADER_SIZE, FRAME_SIZE, checksums, frame_header_is_valid
from ffserve.errors import ChecksumError, FFServeError, FormatError, TruncatedError, UsageError
from ffserve.formats.base import CHECKSUM_CRC32C, GZIP_MAGIC, ZLIB_MAGIC

PIECE_SIZE = 1 << 20
"""What an Inflater gives at once, at most."""
RECORD_LIMIT = 1 << 30
"""Records of more bytes are refused unless another limit is given."""

WBITS = {"gzip": 31, "zlib": 15}
"""For zlib: which header and trailer each compression has."""
_MAGIC = {"gzip": GZIP_MAGIC, "zlib": ZLIB_MAGIC}


class InOrderOnlyError(UsageError, TypeError):
    """A compressed file was asked for something that only an index could answer.

    A TypeError, so that ``list(reader)`` takes a missing length for what it is.
    """

    @classmethod
    def of(cls, path: str) -> InOrderOnlyError:
        """Return the error for a file."""
        return cls(
            "this file is compressed as a whole: it can be iterated in order, but has no indices "
            "and no length",
            path=path,
            hint="`ffserve convert` makes files of it that can be read in any order",
        )


def compression_of(head: bytes) -> str | None:
    """Return how a file is compressed that begins with ``head``: "gzip", "zlib" or None.

    The first record's header must hold, so that no plain file and no compressed file of another
    kind is taken for one. A stream of no bytes is a file of no records. One that was cut before
    that header is told by gzip's three bytes; the two of zlib say too little.
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
    """The bytes behind a compressed file, in pieces.

    Args:
        path: for errors.
        compression: "gzip" or "zlib"; "none" hands everything on.
    """

    def __init__(self, path: str, compression: str) -> None:
        self._path = path
        self._compression = compression
        self._stream = None if compression == "none" else zlib.decompressobj(WBITS[compression])
        self._begun = False
        """Whether this member has had bytes."""
        self._members = 0
        self._at = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what these further bytes of the file give, ``PIECE_SIZE`` bytes at most at once.

        Raises:  FormatError for what is no such stream or does not match its checksum.
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
                # What the sound bytes before the damage give is lost in a call that fails.
                self._stream = restore
                yield from self._up_to(data, error)
            data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
            self._at += before - len(data)
            if piece:
                yield piece
        # What the stream still holds back of the bytes that it has got.
        while self._begun and not self._stream.eof:
            if not (piece := self._stream.decompress(b"", PIECE_SIZE)):
                return
            yield piece

    def _up_to(self, data: bytes, error: zlib.error) -> Iterator[bytes]:
        """Yield what the sound bytes give, then raise."""
        assert self._stream is not None
        for k in range(len(data)):
            try:
                piece = self._stream.decompress(data[k : k + 1], PIECE_SIZE)
            except zlib.error:
                break
            self._at += 1
            if piece:
                yield piece
        raise FormatError(
            f"the {self._compression} stream is damaged: {error}",
            path=self._path,
            offset=self._at,
            hint="take another copy of the file",
        )

    def _next_member(self, data: bytes) -> bytes:
        """Begin another member; return what is left to feed."""
        self._members += 1
        if self._compression == "gzip":
            rest = data.lstrip(b"\0")  # padding, as of a tape's block
            self._at += len(data) - len(rest)
            if not rest:
                return b""
            self._stream = zlib.decompressobj(WBITS["gzip"])
            self._begun = False
            return rest
        raise FormatError(
            "bytes follow the end of the zlib stream", path=self._path, offset=self._at
        )

    @property
    def whole(self) -> bool:
        """Whether what was fed ends with the end of a stream."""
        return self._stream is None or self._stream.eof

    def close(self) -> None:
        """The file ended.

        Raises:  TruncatedError when it did inside a stream.
        """
        if not self.whole and (self._begun or not self._members):
            raise TruncatedError(
                f"the file ends inside its {self._compression} stream: it was cut",
                path=self._path,
                offset=self._at,
                hint='take another copy of it, or read what is whole with on_error="skip"',
            )


@dataclass(frozen=True)
class Records:
    """Records that came out of a stream together.

    block: the bytes that they lie in. offsets, lengths: of their payloads in it, int64. first:
    the number of the first in the stream. damaged: payloads that do not match their checksums.
    """

    block: bytes
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    first: int
    damaged: NDArray[np.bool_]

    def without(self, rows: NDArray[np.int64]) -> Records:
        """Return all but some."""
        kept = np.ones(len(self.offsets), np.bool_)
        kept[rows] = False
        offsets, lengths, damaged = self.offsets[kept], self.lengths[kept], self.damaged[kept]
        return Records(self.block, offsets, lengths, self.first, damaged)


class FrameStream:
    """Records out of the bytes of a TFRecord file.

    Args:
        path: for errors.
        verify: hold lengths and payloads against their checksums.
        limit: bytes of the largest record that is taken.
    """

    def __init__(self, path: str, *, verify: bool = True, limit: int = RECORD_LIMIT) -> None:
        self._path = path
        self._verify = verify
        self._limit = limit
        self._held = bytearray()
        self._wanted = FRAME_HEADER_SIZE
        """So many bytes are needed before there can be anything new."""
        self.count = 0
        """Records so far."""
        self._at = 0
        """Of what is held, in the uncompressed stream."""

    def feed(self, data: bytes) -> Records | None:
        """Take more bytes; return the records that are whole now.

        Raises:  ChecksumError for a damaged length, FormatError for a record above the limit:
                 once all records before it were returned. Nothing can be fed any more then.
        """
        self._held += data
        if len(self._held) < self._wanted:
            return None
        block = bytes(self._held)
        walk = codec.FrameScanner(len(block), verify=self._verify)
        why = walk.feed(memoryview(block), 0)
        if why == codec.FrameScanner.CUT_RECORD:
            self._wanted = self._needed(block, walk.at, walk.count)
        elif why == codec.FrameScanner.BAD_HEADER and not walk.count:
            raise ChecksumError(
                f"the length of record {self.count} does not match its checksum, so that nothing "
                "tells where the next one begins",
                path=self._path,
                index=self.count,
                hint=f"it stands at byte {self._at} of the uncompressed stream",
            )
        else:
            self._wanted = FRAME_HEADER_SIZE
        self._held = bytearray(block[walk.at :])
        self._at += walk.at
        if not walk.count:
            return None
        offsets, lengths, expected = walk.tables()
        damaged = np.zeros(walk.count, np.bool_)
        if self._verify:
            damaged = checksums(CHECKSUM_CRC32C, block, offsets, lengths) != expected
        first = self.count
        self.count += walk.count
        return Records(block, offsets.astype(np.int64), lengths.astype(np.int64), first, damaged)

    def _needed(self, block: bytes, at: int, before: int) -> int:
        """Return how many bytes make the record at a place whole, itself included."""
        [length] = struct.unpack_from("<Q", block, at)
        if length > self._limit:
            if before:
                return 0  # it is raised with the next call, the records before it come first
            raise FormatError(
                f"record {self.count} says that it has {length} bytes, {self._limit} are allowed "
                "in a stream",
                path=self._path,
                index=self.count,
                hint="if that is meant, give a higher record_limit",
            )
        return int(length) + FRAME_SIZE

    def close(self) -> None:
        """The stream ended.

        Raises:  what `feed` still had to raise; TruncatedError when bytes are left.
        """
        if len(self._held) >= FRAME_HEADER_SIZE:
            self._wanted = 0
            self.feed(b"")
        if self._held:
            raise TruncatedError(
                f"the stream ends inside record {self.count}, of which there are "
                f"{len(self._held)} bytes",
                path=self._path,
                index=self.count,
                hint='take another copy of it, or read what is whole with on_error="skip"',
            )


def record_error(path: str, index: int) -> FFServeError:
    """Return the error of a record whose payload does not match its checksum."""
    return ChecksumError(
        "the record does not match its checksum: its bytes were damaged after they were written",
        path=path,
        index=index,
        hint='restore the file, or leave the record out with on_error="skip"',
    )
