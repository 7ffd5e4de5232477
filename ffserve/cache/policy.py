"""Fill, then do not evict what is still wanted.

For one job that visits every sample once an epoch nothing beats keeping whatever filled the cache
first (MinIO, CoorDL, VLDB 2021): the hit rate equals cache size / dataset size, where LRU evicts
every sample just before its next use. So there are three kinds of residents, given up in this
order: *idle*, whose shard no session has open any more; *passing*, which came when the arena was
full and were delivered; *kept*, the newest first, and only as many as the passing traffic needs.

Plain lists, no clock and no lock; whether a slot can be evicted just now (nobody pins it) is the
cache's to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class FillThenKeep:
    """Victims by size class.

    Args: class_count: of the arena, the class of large slots included.
    """

    def __init__(self, class_count: int) -> None:
        self._idle: list[deque[int]] = [deque() for _ in range(class_count)]
        self._passing: list[deque[int]] = [deque() for _ in range(class_count)]
        self._kept: list[list[int]] = [[] for _ in range(class_count)]

    def keep(self, slots: Iterable[int], size_class: int) -> None:
        """Slots that were filled while there was room."""
        self._kept[size_class].extend(slots)

    def let_pass(self, slots: Iterable[int], size_class: int) -> None:
        """Slots that were filled at another's cost."""
        self._passing[size_class].extend(slots)

    def abandon(self, slots: Iterable[int], size_class: int) -> None:
        """Slots of shards that nobody has open."""
        self._idle[size_class].extend(slots)

    def idle_victims(self, size_class: int, count: int, usable: Callable[[int], bool]) -> list[int]:
        """Return up to `count` slots that nobody wants; `usable` says which are still idle."""
        return _pop_usable(self._idle[size_class], count, usable, keep_unusable=False)

    def victims(self, size_class: int, count: int, usable: Callable[[int], bool]) -> list[int]:
        """Return up to `count` slots of passing samples, then of kept ones.

        Args: usable: False for a slot that is pinned, or that holds something else by now.
        """
        found = _pop_usable(self._passing[size_class], count, usable, keep_unusable=True)
        kept, skipped = self._kept[size_class], []
        while len(found) < count and kept:
            slot = kept.pop()
            (found if usable(slot) else skipped).append(slot)
            if len(skipped) >= 4 * count + 64:
                break
        kept.extend(reversed(skipped))
        return found

    def forget(self, slots: set[int], size_class: int) -> None:
        """Slots that were evicted without having been asked for here."""
        for group in (self._idle, self._passing):
            group[size_class] = deque(s for s in group[size_class] if s not in slots)
        self._kept[size_class] = [s for s in self._kept[size_class] if s not in slots]


def _pop_usable(
    queue: deque[int], count: int, usable: Callable[[int], bool], *, keep_unusable: bool
) -> list[int]:
    found: list[int] = []
    for _ in range(len(queue)):
        if len(found) == count:
            break
        slot = queue.popleft()
        if usable(slot):
            found.append(slot)
        elif keep_unusable:
            queue.append(slot)
    return found
