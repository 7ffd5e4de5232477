"""The Python face of orders.c: what the daemon looks up in announced orders, one call a batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffserve.engine._core import ffi, lib

Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

_I64S = ffi.typeof("int64_t[]")
_U8S = ffi.typeof("uint8_t[]")
_DOUBLES = ffi.typeof("double[]")
_from_buffer = ffi.from_buffer


def unpack(planes: Bytes, halves: Bytes | None, start: int, stop: int, low: int) -> Int64s:
    """Return int64[stop - start]: `low` and the numbers at places [start, stop).

    Args:
        planes: uint8[bytes, n], the lowest of all numbers, the next, and so on.
        halves: uint8[(n + 1) // 2] or None: 4 bits above them, of two numbers in each.
    """
    whole, count = planes.shape
    assert halves is None or len(halves) == (count + 1) // 2
    numbers = np.empty(max(stop - start, 0), np.int64)
    rc = lib.ffs_unpack(
        _from_buffer(_U8S, planes),
        whole,
        ffi.NULL if halves is None else _from_buffer(_U8S, halves),
        count,
        start,
        stop,
        low,
        _from_buffer(_I64S, numbers),
    )
    assert rc == 0, "places are those of the order"
    return numbers


class Table:
    """In which part of an epoch each sample comes.

    Args: buckets: uint8[n], of samples `low` and on; looked at, not copied.
    """

    def __init__(self, buckets: Bytes, low: int) -> None:
        self._c = ffi.new("ffs_table *")
        self._keep = self._c.buckets = _from_buffer(_U8S, buckets)
        self._c.size, self._c.low = len(buckets), low

    def buckets(self, numbers: Int64s) -> Bytes:
        """Return the part in which each sample comes; 0 for those that are not in the table."""
        buckets = np.empty(len(numbers), np.uint8)
        lib.ffs_buckets(
            self._c, _from_buffer(_I64S, numbers), len(numbers), _from_buffer(_U8S, buckets)
        )
        return buckets

    def soonest(self, times: Floats, numbers: Int64s, best: Floats) -> None:
        """Make of each of `best` the less of it and times[part of that sample]."""
        assert len(numbers) == len(best)
        rc = lib.ffs_soonest(
            self._c,
            _from_buffer(_DOUBLES, times),
            len(times),
            _from_buffer(_I64S, numbers),
            len(numbers),
            _from_buffer(_DOUBLES, best),
        )
        assert rc == 0, "there is a time for each part"
