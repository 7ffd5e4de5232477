"""Fill, then do not evict what is still wanted.

For one job that visits every sample once an epoch nothing beats keeping whatever filled the cache
first (MinIO, CoorDL, VLDB 2021): the hit rate equals cache size / dataset size, where LRU evicts
every sample just before its next use. So there are three kinds of residents, given up in this
order: *idle*, whose shard no session has open any more; *passing*, which came when the arena was
full and were delivered; *kept*, the newest first, and only as many as the passing traffic needs.

Plain dicts as ordered sets (a slot is in at most one of them, and leaves it in O(1)), no clock and
no lock; whether a slot can be evicted just now (nobody pins it) is the cache's to say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Usable: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""Which of these slots can be evicted just now."""

_MOST_LOOKED_AT = 65_536
"""Slots that one search for victims looks at before it says that there are none."""


class FillThenKeep:
    """Victims by size class.

    Args: class_count: of the arena, the class of large slots included.
    """

    def __init__(self, class_count: int) -> None:
        self._idle: list[dict[int, None]] = [{} for _ in range(class_count)]
        self._passing: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(class_count)]
        self._kept: list[dict[int, None]] = [{} for _ in range(class_count)]

    def keep(self, slots: Iterable[int], size_class: int) -> None:
        """Slots that were filled while there was room."""
        self._kept[size_class].update(dict.fromkeys(slots))

    def let_pass(self, slots: Iterable[int], size_class: int) -> None:
        """Slots that were filled at another's cost."""
        self._passing[size_class].update(dict.fromkeys(slots))

    def abandon(self, slots: Iterable[int], size_class: int) -> None:
        """Slots of shards that nobody has open."""
        self._idle[size_class].update(dict.fromkeys(slots))

    def idle_victims(self, size_class: int, count: int, usable: Usable) -> list[int]:
        """Return up to `count` slots that nobody wants; those that somebody wants again stay."""
        found, spared = _search(self._idle[size_class], count, usable, newest=True)
        self.keep(reversed(spared), size_class)
        return found

    def victims(self, size_class: int, count: int, usable: Usable) -> list[int]:
        """Return up to `count` slots of passing samples, oldest first, then of kept ones, newest
        first."""
        passing, kept = self._passing[size_class], self._kept[size_class]
        found, spared = _search(passing, count, usable, newest=False)
        self.let_pass(spared, size_class)
        if len(found) < count:
            more, spared = _search(kept, count - len(found), usable, newest=True)
            self.keep(reversed(spared), size_class)
            found += more
        return found

    def forget(self, slots: Iterable[int], size_class: int) -> None:
        """Slots that were evicted without having been asked for here."""
        for group in (self._idle, self._passing, self._kept):
            members = group[size_class]
            if members:
                for slot in slots:
                    members.pop(slot, None)


def _search(
    group: dict[int, None], count: int, usable: Usable, *, newest: bool
) -> tuple[list[int], list[int]]:
    """Take out until `count` usable slots are found: (these, the others as they came)."""
    found: list[int] = []
    spared: list[int] = []
    while group and len(found) < count and len(spared) < _MOST_LOOKED_AT:
        slots = list(islice(reversed(group) if newest else group, count - len(found)))
        for slot in slots:
            del group[slot]
        usable_now = usable(np.array(slots, np.int64))
        if usable_now.all():
            found += slots
            continue
        good = usable_now.tolist()
        found += [slot for slot, fits in zip(slots, good, strict=True) if fits]
        spared += [slot for slot, fits in zip(slots, good, strict=True) if not fits]
    return found, spared
