"""The arena grows and shrinks while it is in use (`ffserve resize`).

The memory file and everybody's mapping of it are as large as the arena may ever become; what is not
in use is a hole. So nobody has to map anything anew, and nobody can run past the end of the file.
Growing hands out more slabs at once. Shrinking takes three steps: slabs beyond the new size are
not handed out any more; they are emptied as their samples are unpinned, which a lease can delay for
as long as it likes; when all are empty their pages go back to the kernel.

No clock, no loop: `step` is called until it is done.
"""

from __future__ import annotations

from typing import Protocol

from ffserve.cache.cache import Cache
from ffserve.config import format_size
from ffserve.errors import UsageError
from ffserve.server.scheduler import Scheduler


class Memory(Protocol):
    """What holds the arena's pages; see `Pages`."""

    def follow(self, size: int) -> None:
        """So much is in use now."""

    @property
    def settled(self) -> bool:
        """Whether what is not in use was given back."""


class Resizing:
    """The size that is wanted, and the way there.

    Args: memory: follows the size.
    """

    def __init__(self, cache: Cache, scheduler: Scheduler, memory: Memory) -> None:
        self._cache = cache
        self._arena = cache.arena
        self._scheduler = scheduler
        self._memory = memory
        self.target = self._arena.size
        """Bytes."""

    @property
    def under_way(self) -> bool:
        """Whether `step` has something to do."""
        arena = self._arena
        return (
            arena.size != self.target
            or arena.slab_count != arena.open_count
            or not self._memory.settled
        )

    @property
    def size(self) -> int:
        """Bytes in use, those included that are being given up."""
        return self._arena.slab_count * self._arena.slab_size

    @property
    def held_size(self) -> int:
        """Bytes of slabs that are to be given up and are not empty yet."""
        return len(self._arena.retiring()) * self._arena.slab_size

    def rounded(self, size: int) -> int:
        """Return the size that the arena would get.

        Raises: UsageError: it cannot have that size.
        """
        arena = self._arena
        if size < arena.smallest_size:
            raise UsageError(
                f"an arena of {format_size(size)} is too small",
                hint=f"this one can shrink to {format_size(arena.smallest_size)}",
            )
        if size > arena.limit:
            raise UsageError(
                f"the arena cannot grow to {format_size(size)}: this daemon was started for at "
                f"most {format_size(arena.limit)}",
                hint="start it with a larger --max-arena",
            )
        return size // arena.slab_size * arena.slab_size

    def begin(self, size: int) -> None:
        """Let the arena have another size, in bytes, as `rounded` gave it."""
        self.target = size

    def step(self, now: float) -> None:
        """Do what can be done at once."""
        arena, count = self._arena, self.target // self._arena.slab_size
        if not self._memory.settled:
            return
        if count != arena.open_count:
            self._cache.allocator.resize(count)
            if arena.open_count == arena.slab_count:
                self._memory.follow(self.size)
        if arena.open_count < arena.slab_count:
            self._scheduler.make_room(now)
            if self._cache.allocator.retire():
                arena.trim()
                self._memory.follow(self.size)
        self._scheduler.pump(now)
