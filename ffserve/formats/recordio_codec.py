"""RecordIO's chunks: the header in both dialects, and the three ways to compress a payload.

Five little-endian u32 stand in front of a payload, the first being the magic::

    py   magic, records, CRC-32C of the payload, compressor 1 2 3, size of the payload
    go   magic, CRC-32 of the payload, compressor 0 1 2, size of the payload, records

Word 3 tells them apart: a payload in the go dialect has at least 4 bytes, so a number up to 3 is a
compressor. Snappy is one raw block in py, and the framed stream in go.

cramjam (Rust: snap, flate2) does the compression: it has wheels for every platform, knows both
kinds of snappy, decodes into memory of the caller's and no further, and releases the GIL.
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
"""In front of each record inside the decoded payload."""
U32_MAX = (1 << 32) - 1

NONE, SNAPPY, GZIP = "none", "snappy", "gzip"
COMPRESSIONS = (NONE, SNAPPY, GZIP)

_MOST_BY_SNAPPY = 22
"""A snappy element of 3 bytes stands for at most 64."""
_MOST_BY_GZIP = 1032
"""A deflate code of 2 bits stands for at most 258 bytes (zlib's technical notes)."""
_FRAME_MOST = 65_536
"""Bytes that one frame of a snappy stream decodes to, at most."""


@dataclass(frozen=True, slots=True)
class Header:
    """What stands in front of a chunk's payload."""

    records: int
    checksum: int
    compressor: int
    """As the dialect numbers it."""
    size: int
    """Of the payload, in bytes."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One of the two ways to write a chunk."""

    name: str
    checksum_kind: int
    checksum_name: str
    first_compressor: int
    framed: bool
    default_chunk_size: int

    def unpack(self, words: tuple[int, ...]) -> Header:
        """Return what the words behind the magic mean."""
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
        """Return the name of a compressor, None for one that is not known."""
        number = compressor - self.first_compressor
        return COMPRESSIONS[number] if 0 <= number < len(COMPRESSIONS) else None

    def compressor(self, compression: str) -> int:
        """Return the number of a compression."""
        return COMPRESSIONS.index(compression) + self.first_compressor


PY = Dialect("py", CHECKSUM_CRC32C, "CRC-32C", 1, False, 1024)
GO = Dialect("go", CHECKSUM_CRC32, "CRC-32", 0, True, 32 << 20)
DIALECTS = {"py": PY, "go": GO}


def dialect_of(words: tuple[int, ...]) -> Dialect:
    """Tell the dialect of a header by its word 3."""
    return PY if words[3] <= 3 else GO


def most_decoded(compression: str, size: int) -> int:
    """Return the most bytes that a payload of `size` bytes can decode to."""
    if compression == NONE:
        return size
    return size * (_MOST_BY_SNAPPY if compression == SNAPPY else _MOST_BY_GZIP)


def varint(head: bytes) -> tuple[int, int]:
    """Return (value, bytes taken) of the u32 that begins a raw snappy block.

    Raises: ValueError when there is none.
    """
    value = 0
    for k, byte in enumerate(head[:5]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            if value > U32_MAX:
                break
            return value, k + 1
    raise ValueError("it begins with no length")


def frame(head: bytes) -> tuple[int, int]:
    """Look at the header of one frame of a snappy stream.

    Args: head: 13 bytes from its beginning, or all that is left of the stream.
    Returns: (bytes of the frame, bytes that it decodes to).
    Raises: ValueError when it is no frame.
    """
    if len(head) < 4:
        raise ValueError("a frame is cut")
    kind, size = head[0], int.from_bytes(head[1:4], "little")
    decoded = 0
    if kind == 0x00:
        decoded = varint(head[8:13])[0]
    elif kind == 0x01:
        decoded = size - 4
    elif kind == 0xFF:
        if size != 6:
            raise ValueError("the identifier of its stream is none")
    elif kind < 0x80:
        raise ValueError(f"a frame of the kind {kind:#04x} cannot be skipped")
    if not 0 <= decoded <= _FRAME_MOST:
        raise ValueError(f"a frame claims {decoded} bytes")
    return 4 + size, decoded


def compress(compression: str, payload: bytes | bytearray, *, framed: bool) -> bytes | memoryview:
    """Return a chunk's payload, compressed."""
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
    """Decode a payload that gives exactly as many bytes as `into` has; take no other memory.

    Raises: FormatError when it is damaged or gives another number.
    """
    if compression == NONE:
        if len(payload) != len(into):
            raise FormatError(f"its payload has {len(payload)} bytes, {len(into)} were expected")
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
            f"its {compression} payload gives {got} bytes, it tells of {len(into)} itself"
        )
