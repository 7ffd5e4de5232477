"""Sample numbers in as few half bytes as their data set needs: 3 bytes each up to 16 million
samples, 3.5 up to 268 million, 4 beyond."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.orders import unpack

Int64s = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Narrow:
    """Numbers that stay as they are.

    Args: numbers: integers[n] in [0, span), which are copied. span: at most 2^32.
    """

    __slots__ = ("_count", "_halves", "_planes")

    def __init__(self, numbers: NDArray[np.integer], span: int) -> None:
        whole, half = divmod(-(-max(span - 1, 255).bit_length() // 4), 2)
        self._count = len(numbers)
        self._planes = np.empty((whole, len(numbers)), np.uint8)
        """One row for the lowest bytes of all numbers, one for the next, and so on."""
        for k in range(whole):
            self._planes[k] = numbers >> 8 * k & 0xFF
        self._halves: Bytes | None = None
        """What is above them, of two numbers in a byte."""
        if half:
            above = np.zeros(len(numbers) + len(numbers) % 2, np.uint8)
            above[: len(numbers)] = numbers >> 8 * whole
            self._halves = (above[0::2] | above[1::2] << 4).astype(np.uint8)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        return self._planes.nbytes + (0 if self._halves is None else self._halves.nbytes)

    def part(self, start: int, stop: int, low: int = 0) -> Int64s:
        """Return `low` and the numbers at places [start, stop), which lie within them."""
        return unpack(self._planes, self._halves, start, stop, low)

    def same(self, other: Narrow) -> bool:
        """Whether both, of one span, are equal."""
        return np.array_equal(self._planes, other._planes) and (
            self._halves is None
            or other._halves is None
            or np.array_equal(self._halves, other._halves)
        )
