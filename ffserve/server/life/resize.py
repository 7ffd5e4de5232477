"""Resize: the arena grows and shrinks while it is in use (`ffserve resize`).

The memory file and all mappings of it are as large as the arena may ever become; the unused part is
a hole. So no process maps anything again, and none can run past the end of the file. Growing hands
out more slabs at once. Shrinking takes three steps: slabs beyond the new size are not handed out
any more; they are emptied as their samples are unpinned, which a lease can delay for as long as it
lasts; when all are empty, their pages go back to the kernel.

`Resizing` has no clock and no loop: `step` is called until it is done. `Pages` takes pages from the
kernel and gives them back in a thread of its own. Taking pages ahead keeps page faults out of the
reads; a read that overtakes this thread takes its own pages. Before pages go, the engines are told,
so that no registered buffer keeps them. The same holds for a slab that moves to another domain: its
old pages go at once, and the arena from there on is registered again when nothing has moved for
CALM_S.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Protocol

from ffserve.cache.cache import Cache
from ffserve.config import format_size
from ffserve.errors import ReadError, UsageError
from ffserve.server.life.daemon_memory import orders_limit
from ffserve.server.reading.engines import Engines
from ffserve.server.reading.scheduler import Scheduler
from ffserve.system.machine_memory import free_memory
from ffserve.system.memfd import MemoryFile, SharedMemory

log = logging.getLogger("ffserve")

_STEP = 2 * 1024 * 1024
CALM_S = 1.0
"""No pages are taken ahead for this long after a part of the arena moved to another domain:
registering 128 MiB occupies an I/O thread for some milliseconds."""


class Memory(Protocol):
    """The owner of the arena's pages: `Pages`, or a simulation's."""

    def follow(self, size: int) -> None:
        """Note that this many bytes are in use from now on."""

    @property
    def settled(self) -> bool:
        """Whether all unused pages were given back."""

    @property
    def populated(self) -> int:
        """Bytes from the start that have been taken ahead of use."""


class Resizing:
    """The target size of the arena, and the steps towards it.

    Args: memory: is told of every size.
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
        """Bytes in use, including those that are being given up."""
        return self._arena.slab_count * self._arena.slab_size

    @property
    def held_size(self) -> int:
        """Bytes of slabs to be given up that are not empty yet."""
        return len(self._arena.retiring()) * self._arena.slab_size

    def rounded(self, size: int) -> int:
        """Return the size in whole slabs.

        Raises: UsageError: the arena cannot have that size.
        """
        arena = self._arena
        if size < arena.smallest_size:
            raise UsageError(
                f"an arena of {format_size(size)} is too small",
                hint=f"the arena of this daemon can shrink to {format_size(arena.smallest_size)}",
            )
        if size > arena.limit:
            raise UsageError(
                f"the arena cannot grow to {format_size(size)}: this daemon was started for at "
                f"most {format_size(arena.limit)}",
                hint="start the daemon with a larger --max-arena",
            )
        return size // arena.slab_size * arena.slab_size

    def start(self, size: int, now: float) -> None:
        """Begin to resize the arena.

        Raises:
            UsageError: the arena cannot have that size.
            ReadError: too little memory is free, or it cannot be told how much is.
        """
        size = self.rounded(size)
        more = size - max(self._memory.populated, self._arena.used_size)
        try:
            free = free_memory()
        except OSError as error:
            raise ReadError(
                f"cannot find out how much memory is free: {error.strerror}",
                hint="raise the limit on open files (ulimit -n)",
            ) from error
        if size > self._arena.size and more > free:
            raise ReadError(
                f"an arena of {format_size(size)} needs another {format_size(more)}, but only "
                f"{format_size(free)} of memory are free",
                hint="choose a smaller size, or free memory",
            )
        self._cache.next_use.most_size = orders_limit(size)
        self.begin(size)
        self.step(now)

    def begin(self, size: int) -> None:
        """Set the target, in bytes, as `rounded` returned it."""
        self.target = size

    def step(self, now: float) -> None:
        """Advance towards the target without waiting."""
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


class Pages:
    """The pages of the arena, taken and given back by a thread of its own.

    Args: size: bytes of the arena that are in use, from its start.
    """

    def __init__(self, memory: SharedMemory, engines: Engines, size: int) -> None:
        self._memory = memory
        self._engines = engines
        self._changed = threading.Condition()
        self._wanted = self._touched = size
        self._stopping = False
        self._moved = 0
        """Slabs that were moved to another domain."""
        self._again: dict[tuple[MemoryFile, int], int] = {}
        """Parts that moved, and may have kept pages: file and offset, size. A huge page that an
        engine has registered cannot be split, so that a part of it is not freed."""
        self._calm_at = 0.0
        """No pages are taken ahead before this time."""
        self._free_to = 0
        """End of the part of the arena for which there was free memory."""
        self._waits = False
        """Whether there was too little; it is said once."""
        self.populated = 0
        """Bytes from the start that have been taken ahead of use."""
        self._thread = threading.Thread(target=self._run, name="ffserve-populate", daemon=True)

    def start(self) -> None:
        """Begin to take pages."""
        self._thread.start()

    def follow(self, size: int) -> None:
        """So much of the arena is in use from now on. The pages beyond it are given back: they hold
        nothing any more, and nothing may be put there before `settled`."""
        with self._changed:
            self._wanted = size
            self._touched = max(self._touched, size)
            self._changed.notify()

    @property
    def settled(self) -> bool:
        """Whether all unused pages were given back."""
        # Without the lock: only the thread that asks changes what is wanted.
        return self._touched == self._wanted

    def move(self, offset: int, size: int, before: MemoryFile, after: MemoryFile) -> bool:
        """Show another file in a part of the arena that holds nothing, and free the pages of the
        one before; return False if no mapping is left for it, and nothing has changed."""
        with self._changed:
            try:
                self._withdraw(offset)
                self._memory.show(after, offset, size)
            except OSError as error:
                log.warning(
                    "cannot give memory to another user (%s): raise vm.max_map_count", error
                )
                return False
            self._again.pop((after, offset), None)
            self._again[before, offset] = size
            try:
                before.punch(offset, size)
            except OSError as error:
                log.warning("cannot free memory that another user had: %s", error)
            return True

    def _withdraw(self, offset: int) -> None:
        """Have the engines keep no page from here on."""
        self._moved += 1
        self._calm_at = time.monotonic() + CALM_S
        if offset < self.populated:
            self.populated = offset
            self._engines.arena_ready(self.populated, self._wanted)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                # Let other threads take the lock of the address space between two steps.
                self._changed.wait_for(lambda: self._stopping, 0.0005)
                self._changed.wait_for(self._something)
                if self._stopping:
                    return
                wanted, touched, moved = self._wanted, self._touched, self._moved
                start, wait_s = self.populated, self._calm_at - time.monotonic()
                if touched == wanted and wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                for (file, offset), size in self._again.items():
                    with contextlib.suppress(OSError):  # it was closed
                        file.punch(offset, size)
                self._again.clear()
            if touched > wanted:
                self._give_back(wanted, touched)
                continue
            step = min(_STEP, wanted - start)
            if not step:
                continue
            if not self._is_free(start, wanted):
                with self._changed:
                    self._calm_at = time.monotonic() + CALM_S
                continue
            self._memory.populate(start, step)
            with self._changed:
                # Else a part of this may have other pages by now.
                if moved == self._moved:
                    self.populated = start + step
                    self._engines.arena_ready(self.populated, wanted)

    def _is_free(self, start: int, wanted: int) -> bool:
        """Whether there is memory for the next pages. In a container that started again, clients
        that have not moved yet hold the arena of the previous daemon, against the same limit."""
        if start < self._free_to <= wanted:
            return True
        size = min(32 * _STEP, wanted - start)  # so much must be free before pages are taken
        try:
            free = free_memory()
        except OSError:  # no descriptor is left: it looks again later
            return False
        if free >= size:
            self._free_to = start + size
            return True
        if not self._waits:
            log.warning(
                "waiting for memory to be free: %s of the arena's %s are taken",
                format_size(start),
                format_size(wanted),
            )
        self._waits = True
        return False

    def _something(self) -> bool:
        behind = self._touched > self._wanted or self.populated < self._wanted
        return self._stopping or behind or bool(self._again)

    def _give_back(self, wanted: int, touched: int) -> None:
        with self._changed:
            self.populated = min(self.populated, wanted)
            self._engines.arena_ready(self.populated, wanted)
        start = max(wanted, touched - 32 * _STEP)
        self._memory.discard(start, touched - start)
        with self._changed:
            # Nothing grows before all has been given back, so this is as it was.
            self._touched = start
