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

from ffserve.dtypes import Bytes
from ffserve.errors import FormatError
from ffserve.formats.base import CHECKSUM_CRC32, CHECKSUM_CRC32C

MAGIC = 0x01020304
HEADER = struct.Struct("<5I")
PREFIX = struct.Struct("<I")
"""Length prefix of each record in the decoded payload."""
U32_MAX = (1 << 32) - 1

NONE, SNAPPY, GZIP = "none", "snappy", "gzip"
COMPRESSIONS = (NONE, SNAPPY, GZIP)
"""By number, as in engine/records/codec.c, which reads headers and decides which are valid."""


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


def decompress(compression: str, payload: memoryview, into: Bytes, *, framed: bool) -> None:
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
