"""RecordIO chunks: headers of both dialects, and compression of payloads.

A header is five little-endian u32::

    py   magic, records, CRC-32C of the payload, compressor 1 2 3, size of the payload
    go   magic, CRC-32 of the payload, compressor 0 1 2, size of the payload, records

Word 3 distinguishes the dialects: a payload in the go dialect has at least 4 bytes, so a value up
to 3 is a compressor. Snappy is one raw block in py, and the framed stream in go.

cramjam (Rust: snap, flate2) compresses: it has wheels for every platform, supports both kinds of
snappy, decodes into the caller's memory without exceeding it, and releases the GIL.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import FormatError
from ffserve.formats.base import CHECKSUM_CRC32, CHECKSUM_CRC32C

MAGIC = 0x01020304
HEADER = struct.Struct("<5I")
PREFIX = struct.Struct("<I")
"""Length prefix of each record in the decoded payload."""
U32_MAX = (1 << 32) - 1

NONE, SNAPPY, GZIP = "none", "snappy", "gzip"
COMPRESSIONS = (NONE, SNAPPY, GZIP)
"""By number. `parse_header`, `stated_size` and `plausible` in engine/codec.c repeat these numbers,
the rule of `dialect_of` and the ratios of `most_decoded`: change both."""

_MOST_BY_SNAPPY = 22
"""A snappy element of 3 bytes decodes to at most 64 bytes."""
_MOST_BY_GZIP = 1032
"""A deflate code of 2 bits decodes to at most 258 bytes (zlib's technical notes)."""
_FRAME_MOST = 65_536
"""Largest decoded size of one frame of a snappy stream."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a chunk."""

    records: int
    checksum: int
    compressor: int
    """In the numbering of the dialect."""
    size: int
    """Of the payload, in bytes."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One of the two chunk layouts."""

    name: str
    checksum_kind: int
    checksum_name: str
    first_compressor: int
    framed: bool
    default_chunk_size: int

    def unpack(self, words: tuple[int, ...]) -> Header:
        """Parse the words of a header."""
        if self.name == "py":
            return Header(words[1], words[2], words[3], words[4])
        return Header(words[4], words[1], words[2], words[3])

    def pack(self, header: Header) -> bytes:
        """Return the 20 bytes of a header."""
        if self.name == "py":
            words = (header.records, header.checksum, header.compressor, header.size)
        else:
            words = (header.checksum, header.compressor, header.size, header.records)
        return HEADER.pack(MAGIC, *words)

    def compression(self, compressor: int) -> str | None:
        """Return the name of a compressor; None if unknown."""
        number = compressor - self.first_compressor
        return COMPRESSIONS[number] if 0 <= number < len(COMPRESSIONS) else None

    def compressor(self, compression: str) -> int:
        """Return the number of a compression."""
        return COMPRESSIONS.index(compression) + self.first_compressor


PY = Dialect("py", CHECKSUM_CRC32C, "CRC-32C", 1, False, 1024)
GO = Dialect("go", CHECKSUM_CRC32, "CRC-32", 0, True, 32 << 20)
DIALECTS = {"py": PY, "go": GO}


def dialect_of(words: tuple[int, ...]) -> Dialect:
    """Detect the dialect of a header by its word 3."""
    return PY if words[3] <= 3 else GO


def most_decoded(compression: str, size: int) -> int:
    """Return the largest decoded size of a payload of `size` bytes."""
    if compression == NONE:
        return size
    return size * (_MOST_BY_SNAPPY if compression == SNAPPY else _MOST_BY_GZIP)


def varint(head: bytes) -> tuple[int, int]:
    """Return (value, bytes read) of the u32 at the beginning of a raw snappy block.

    Raises: ValueError: invalid.
    """
    value = 0
    for k, byte in enumerate(head[:5]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            if value > U32_MAX:
                break
            return value, k + 1
    raise ValueError("invalid length at its beginning")


def frame(head: bytes) -> tuple[int, int]:
    """Parse the header of one frame of a snappy stream.

    Args: head: the first 13 bytes of the frame, or the rest of the stream.
    Returns: (bytes of the frame, decoded bytes).
    Raises: ValueError: not a frame.
    """
    if len(head) < 4:
        raise ValueError("a frame is truncated")
    kind, size = head[0], int.from_bytes(head[1:4], "little")
    decoded = 0
    if kind == 0x00:
        decoded = varint(head[8:13])[0]
    elif kind == 0x01:
        decoded = size - 4
    elif kind == 0xFF:
        if size != 6:
            raise ValueError("invalid stream identifier")
    elif kind < 0x80:
        raise ValueError(f"unknown frame type {kind:#04x}")
    if not 0 <= decoded <= _FRAME_MOST:
        raise ValueError(f"a frame claims {decoded} decoded bytes")
    return 4 + size, decoded


def compress(compression: str, payload: bytes | bytearray, *, framed: bool) -> bytes | memoryview:
    """Compress the payload of a chunk."""
    if compression == NONE:
        return memoryview(payload)
    import cramjam

    if compression == GZIP:
        packed: Any = cramjam.gzip.compress(payload)
    elif framed:
        packed = cramjam.snappy.compress(payload)
    else:
        packed = cramjam.snappy.compress_raw(payload)
    return memoryview(packed)


def decompress(
    compression: str, payload: memoryview, into: NDArray[np.uint8], *, framed: bool
) -> None:
    """Decode a payload into `into`, which has exactly its decoded size, without other memory.

    Raises: FormatError: the payload is damaged, or its decoded size differs.
    """
    if compression == NONE:
        if len(payload) != len(into):
            raise FormatError(f"its payload has {len(payload)} bytes instead of {len(into)}")
        into[:] = np.frombuffer(payload, np.uint8)
        return
    import cramjam

    decode: Any
    if compression == GZIP:
        decode = cramjam.gzip.decompress_into
    elif framed:
        decode = cramjam.snappy.decompress_into
    else:
        decode = cramjam.snappy.decompress_raw_into
    try:
        got = decode(payload, into)
    except cramjam.DecompressionError as error:
        raise FormatError(f"its {compression} payload is damaged: {error}") from None
    if got != len(into):
        raise FormatError(
            f"its {compression} payload decodes to {got} bytes, but claims {len(into)}"
        )
