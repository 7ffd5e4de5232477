"""Checksums by the C core: CRC-32 and CRC-32C, many pieces a call, without the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib
from ffserve.errors import UsageError

UInt32s = NDArray[np.uint32]
UInt64s = NDArray[np.uint64]

CRC_NONE: int = lib.FFS_CRC_NONE
CRC_32: int = lib.FFS_CRC_32
CRC_32C: int = lib.FFS_CRC_32C

_U64S = ffi.typeof("uint64_t[]")
_U32S = ffi.typeof("uint32_t[]")
_U8S = ffi.typeof("uint8_t[]")
_from_buffer = ffi.from_buffer


def checksum(kind: int, data: Any, seed: int = 0) -> int:
    """CRC of a bytes-like object; ``seed`` is the CRC of what came before it."""
    with _from_buffer(_U8S, data) as bytes_:
        return int(lib.ffs_checksum(kind, seed, bytes_, len(bytes_)))


def checksums(kind: int, data: Any, offsets: UInt64s, lengths: UInt64s) -> UInt32s:
    """CRC of each piece data[offsets[k] : offsets[k] + lengths[k]], one call for all.

    Raises: UsageError when a piece does not lie within data.
    """
    offsets = np.ascontiguousarray(offsets, np.uint64)
    lengths = np.ascontiguousarray(lengths, np.uint64)
    with _from_buffer(_U8S, data) as bytes_:
        size = np.uint64(len(bytes_))
        if len(offsets) != len(lengths) or bool(
            np.any(lengths > size) or np.any(offsets > size - np.minimum(lengths, size))
        ):
            raise UsageError("a piece lies outside of the data")
        out = np.empty(len(offsets), np.uint32)
        lib.ffs_checksums(
            kind,
            bytes_,
            _from_buffer(_U64S, offsets),
            _from_buffer(_U64S, lengths),
            len(offsets),
            _from_buffer(_U32S, out),
        )
    return out


def library() -> str:
    """Return what computes them: ISA-L, or tables of our own."""
    return str(ffi.string(lib.ffs_checksum_library()).decode())
