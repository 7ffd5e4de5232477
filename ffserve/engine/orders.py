"""The Python face of orders.c: when samples will be wanted, by what is known of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

_I64S = ffi.typeof("int64_t[]")
_I32S = ffi.typeof("int32_t[]")
_U8S = ffi.typeof("uint8_t[]")
_DOUBLES = ffi.typeof("double[]")
_from_buffer = ffi.from_buffer


class Table:
    """In which part of an epoch each sample comes.

    Args: parts: uint8[n], of samples `low` and on; looked at, not copied.
    """

    def __init__(self, parts: Bytes, low: int) -> None:
        self.c = ffi.new("ffs_table *")
        self._keep = self.c.parts = _from_buffer(_U8S, parts)
        self.c.size, self.c.low = len(parts), low
        self._found = ffi.new("int64_t[3]")

    def parts(self, numbers: Int64s) -> tuple[Bytes, int, int, int]:
        """Return the part in which each sample comes, 0 for those that are not in the table; the
        lowest and the highest of these; where the last sample stands that is in the highest."""
        parts, found = np.empty(len(numbers), np.uint8), self._found
        lib.ffs_parts(
            self.c, _from_buffer(_I64S, numbers), len(numbers), _from_buffer(_U8S, parts), found
        )
        return parts, found[0], found[1], found[2]


class Silent:
    """Jobs of which nothing is known but what they have seen in this epoch.

    Args:
        jobs: for each what it has seen, bool[samples], or None where all samples are alike; the
            number of the first of these samples; how likely it is, a second, to want one that it
            has seen, and one that it has not. The arrays are looked at, not copied.
    """

    def __init__(self, jobs: Sequence[tuple[NDArray[np.bool_] | None, int, float, float]]) -> None:
        self.c = ffi.new("ffs_silent[]", len(jobs))
        self._keep = []
        for job, (seen, low, again, first) in zip(self.c, jobs, strict=True):
            job.low, job.again, job.first = low, again, first
            if seen is not None:
                job.seen, job.size = pointer, _ = _from_buffer(_U8S, seen), len(seen)
                self._keep.append(pointer)

    def __len__(self) -> int:
        return len(self.c)


class Future:
    """All that is known of when samples will be wanted.

    Args:
        announced: for each order in which part of its epoch a sample comes, and float64[256], when
            each of these parts does.
        silent: what other jobs let one expect. now: the time at which they do.
    """

    def __init__(
        self, announced: Sequence[tuple[Table, Floats]], silent: Silent | None, now: float
    ) -> None:
        orders = ffi.new("ffs_timed[]", len(announced))
        self._keep: list[Any] = [orders, announced, silent]
        for order, (table, times) in zip(orders, announced, strict=True):
            order.table, order.time_count = table.c[0], len(times)
            order.times = pointer = _from_buffer(_DOUBLES, times)
            self._keep.append(pointer)
        c = self._c = ffi.new("ffs_future *")
        c.announced, c.announced_count = orders, len(announced)
        if silent is not None:
            c.silent, c.silent_count = silent.c, len(silent)
        c.now = now

    def keys(self, firsts: Int64s, counts: Int32s, slots: Int64s, width: float, far: int) -> Int64s:
        """Return when slots will be wanted, the soonest of the samples in each: in parts of `width`
        seconds, rounded down, `far` at most.

        Args: firsts, counts: by slot, the number of its first sample and of its samples.
        """
        assert len(firsts) == len(counts)
        keys = np.empty(len(slots), np.int64)
        rc = lib.ffs_keys(
            self._c,
            _from_buffer(_I64S, firsts),
            _from_buffer(_I32S, counts),
            len(firsts),
            _from_buffer(_I64S, slots),
            len(slots),
            width,
            far,
            _from_buffer(_I64S, keys),
        )
        assert rc == 0, "there is a time for each part"
        return keys
