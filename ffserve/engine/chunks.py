"""Records inside decoded chunks, found by the C core."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.engine._core import ffi, lib
from ffserve.errors import UsageError

Int64s = NDArray[np.int64]

_I64S = ffi.typeof("int64_t[]")
_DESTS = ffi.typeof("uint8_t *[]")
_U8S = ffi.typeof("uint8_t[]")
_from_buffer = ffi.from_buffer


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
