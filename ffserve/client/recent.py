"""The latest samples that were found in memory: what the daemon's policy wants to know of hits.

Who never misses need not report any, so only so many are kept as one report takes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
_NONE: Int64s = np.zeros(0, np.int64)


class Recent:
    """The last `size` of the indices that were noted. For one thread at a time."""

    __slots__ = ("_at", "_ring", "_wrapped", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._ring = _NONE
        self._at = 0
        self._wrapped = False

    def note(self, indices: Int64s) -> None:
        """Note indices; they are copied."""
        at = self._at
        end = at + len(indices)
        if end <= len(self._ring):
            self._ring[at:end] = indices
            self._at = end
        else:
            self._go_round(indices[-self.size :])

    def _go_round(self, indices: Int64s) -> None:
        if not len(self._ring):
            self._ring = np.empty(self.size, np.int64)  # touched as far as it is used
        first = min(self.size - self._at, len(indices))
        self._ring[self._at : self._at + first] = indices[:first]
        self._at += first
        if first < len(indices):
            self._wrapped = True
            self._at = len(indices) - first
            self._ring[: self._at] = indices[first:]

    def take(self) -> Int64s:
        """Return the latest indices, the last one noted last, and forget them."""
        ring, at = self._ring, self._at
        parts = (ring[at:], ring[:at]) if self._wrapped else (ring[:at],)
        self._at, self._wrapped = 0, False
        return np.concatenate(parts)
