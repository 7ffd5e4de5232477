"""Victims: which objects of a store lose blocks first.

A store may have millions of small objects, so they are listed without the store's lock, LISTED at a
time, and kept in a heap. Each has the rank that it had when it was seen last; it is looked at again
before one of its blocks is evicted.

A rank is the time at which a block is needed again: the block with the latest time goes first. Uses
that nobody has announced come after all others, and blocks of objects that no process has open
after these.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Floats
from ffserve.store.blocks import ABSENT, BlockState, StoredObject

LISTED_S, AGAIN_S = 1.0, 0.1
"""A listing of the objects is renewed after LISTED_S, or after AGAIN_S if none of them had a block
that may be evicted."""
LISTING_SHARE = 20
"""Listing takes at most 1 / LISTING_SHARE of the time."""
LISTED = 2048
"""This many objects are listed at a time, which takes 10 ms."""
MOST_RANKED = 256
"""Blocks of an object that are ranked together: those that go first."""
UNKNOWN = float(1 << 40)
"""Rank of a block without an announced use: a time beyond all announced ones."""


@dataclass(frozen=True, slots=True)
class Victim:
    """What is known of an object since it was looked at last.

    rank: the highest of its blocks. blocks: rank and number of some, the first to go last; empty:
    it was not looked at.
    """

    rank: float
    blocks: list[tuple[float, int]]


class Victims:
    """The objects of a store by rank. All but ``look`` are called under the lock of the store.

    Args:
        objects: the directory of the objects.
        lock: of the store, among the threads of this process.
        is_open: whether this process has an object open, by the name of its directory.
        most: objects that are remembered, those that were seen first.
    """

    def __init__(self, objects: str, lock: Any, is_open: Callable[[str], bool], most: int) -> None:
        self._objects = objects
        self._lock = lock
        self._is_open = is_open
        self._most = most
        self._victims: dict[str, Victim] = {}
        self._heap: list[tuple[float, str]] = []
        """Negative rank and name of each object; entries of earlier ranks are passed over."""
        self._listing = threading.Lock()
        self._entries: Iterator[tuple[str, float]] | None = None
        """The rest of the objects that are being listed."""
        self.listed_at, self._again_s = -math.inf, LISTED_S
        """When the latest listing ended."""
        self._listing_s = 0.0
        """The time that the latest listing took."""

    def __len__(self) -> int:
        return len(self._victims)

    @property
    def best(self) -> float:
        """The highest rank that an object may have; -inf without any."""
        return -self._heap[0][0] if self._heap else -math.inf

    @property
    def is_due(self) -> bool:
        """Whether it is time to list objects."""
        age = time.monotonic() - self.listed_at
        due_s = max(self._again_s, LISTING_SHARE * self._listing_s)
        return self._entries is not None or age > due_s

    def exhausted(self) -> None:
        """Have the objects listed soon, since none was found that may lose a block."""
        self._again_s = AGAIN_S

    def take(self) -> tuple[str, Victim] | None:
        """Remove and return an object of the rank `best`; None: it has another rank by now."""
        rank, name = heappop(self._heap)
        victim = self._victims.get(name)
        if victim is None or victim.rank != -rank:
            return None
        del self._victims[name]
        return name, victim

    def note(self, name: str, rank: float, blocks: list[tuple[float, int]] | None = None) -> None:
        """Note that no block of an object has a higher rank."""
        known = self._victims.get(name)
        if known is None and len(self._victims) >= self._most:
            return
        self._victims[name] = Victim(rank, blocks or [])
        if known is None or known.rank != rank:
            heappush(self._heap, (-rank, name))
        if len(self._heap) > 2 * len(self._victims) + LISTED:
            self._heap = [(-victim.rank, name) for name, victim in self._victims.items()]
            heapify(self._heap)

    def look(self) -> None:
        """List some of the objects if it is time, unless another thread does. Without the lock of
        the store: others may come and go meanwhile."""
        if not self._listing.acquire(blocking=False):
            return
        try:
            if not self.is_due:
                return
            begun = time.monotonic()
            if self._entries is None:
                self._entries, self._listing_s = self._every(), 0.0
            part: list[tuple[str, float]] = []
            with contextlib.suppress(OSError):  # no descriptor is left, say
                part += itertools.islice(self._entries, LISTED)
            with self._lock:
                for name, rank in part:
                    self.note(name, UNKNOWN if self._is_open(name) else rank)
                now = time.monotonic()
                self._listing_s += now - begun
                if len(part) < LISTED:
                    self._entries, self.listed_at, self._again_s = None, now, LISTED_S
        finally:
            self._listing.release()

    def _every(self) -> Iterator[tuple[str, float]]:
        """Yield name and rank of every object, as if none was open."""
        with os.scandir(self._objects) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    used_at = os.stat(os.path.join(entry.path, "state")).st_atime
                    yield entry.name, closed_rank(used_at)

    def clear(self) -> None:
        """Forget all objects."""
        self._victims.clear()
        self._heap.clear()
        self._entries = None


def first_to_go(
    state: BlockState, is_open: bool, stored: StoredObject | None
) -> list[tuple[float, int]]:
    """Return rank and number of the blocks of an object that go first, the first one last.

    Args: stored: of this process, which pins none of them.
    """
    there = state.words != ABSENT
    blocks = np.flatnonzero(there if stored is None else there & ~stored.pinned)
    if not is_open:
        # Blocks of an object that was opened longer ago are evicted sooner.
        rank = closed_rank(state.used_at)
        return [(rank, block) for block in blocks[-MOST_RANKED:].tolist()]
    ranks = open_ranks(state.uses[blocks], time.time())
    if len(blocks) > MOST_RANKED:
        chosen = np.argpartition(ranks, -MOST_RANKED)[-MOST_RANKED:]
        blocks, ranks = blocks[chosen], ranks[chosen]
    order = np.argsort(ranks, kind="stable")
    return list(zip(ranks[order].tolist(), blocks[order].tolist(), strict=True))


def closed_rank(used_at: float) -> float:
    """Return the rank of blocks of an object that is not open: the longer ago it was opened, the
    sooner they go."""
    return 2 * UNKNOWN - used_at


def open_ranks(uses: NDArray[np.uint32], now: float) -> Floats:
    """Return the rank of blocks with these announced uses."""
    ranks: Floats = np.where(uses > now, uses, UNKNOWN).astype(np.float64)
    return ranks
