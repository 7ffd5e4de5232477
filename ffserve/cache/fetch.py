"""What goes through the cache: a request for samples, what is read for it, what may go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.shards import Blocks
from ffserve.errors import FFServeError

Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample could not be read.

    status: negative errno or a status of `errors.py`; found, expected: checksums; size: bytes of
    the chunk for STATUS_TOO_LARGE; error: the format's own error, which replaces all others.
    """

    status: int
    found: int = 0
    expected: int = 0
    size: int = 0
    error: FFServeError | None = None


class Fetch:
    """One request for samples on its way through the cache.

    Args:
        numbers: int64[n] of one data set, repeats allowed; dealt with in this order.
        latest: read ahead for what is wanted at this time: only what will be wanted after it may
            be evicted; None: it is wanted now.
    """

    __slots__ = ("cursor", "failures", "latest", "numbers", "pinned_size", "pins", "waiting")

    def __init__(self, numbers: Int64s, latest: float | None = None) -> None:
        self.numbers = numbers
        self.latest = latest
        self.cursor = 0
        """How many of `numbers` were dealt with: they are resident, on their way, or failed."""
        self.waiting = 0
        """Loads that have to end before the first `cursor` samples are all decided."""
        self.pins: list[Int64s] = []
        self.pinned_size = 0
        self.failures: dict[int, Failure] = {}

    @property
    def complete(self) -> bool:
        """Whether everything was asked for and has come."""
        return self.waiting == 0 and self.cursor == len(self.numbers)


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that must be read now, each into its slot.

    number: its own while it is read. parts: the slots by size class and whether they came at
    another's cost. size: bytes of the blocks, widened. reads: of the device; who reads it sets that
    to less where neighbours are read together.
    """

    number: int
    blocks: Blocks
    slots: Int64s
    offsets: Int64s
    sizes: Int64s
    parts: list[tuple[int, Int64s, bool]]
    size: int
    reads: int
    fetches: list[Fetch] = field(default_factory=list)


@dataclass(slots=True)
class CacheCounters:
    """Since the start: samples and blocks."""

    asked: int = 0
    resident: int = 0
    joined: int = 0
    blocks_read: int = 0
    evicted: int = 0
    failed: int = 0
    read_ahead: int = 0
    """Of the blocks read: before anybody asked."""
    wasted: int = 0
    """Of these: evicted before anybody used them."""
