"""Memory: the shared memory of a daemon, new or that of its predecessor, and the cache over it."""

from __future__ import annotations

import mmap
import secrets

import numpy as np

from ffserve.cache.adoption import Adopted
from ffserve.cache.arena import Arena
from ffserve.cache.cache import Cache
from ffserve.cache.inventory import Inventory
from ffserve.cache.next_use import NextUse
from ffserve.cache.tables import Directory, ShardTable
from ffserve.config import ServerConfig
from ffserve.dtypes import Int64s
from ffserve.engine.shm import retract
from ffserve.errors import ReadError
from ffserve.limits import LEAST_ORDERS_SIZE, LEAST_TABLES_SIZE, ORDERS_SHARE, TABLES_SHARE
from ffserve.server.life.restart import PAGE_NAME, KeptMemory, terms_of
from ffserve.server.users.peers import namespace_marks
from ffserve.system.machine_memory import usable_memory
from ffserve.system.memfd import SharedMemory


class DaemonMemory:
    """See the module's text.

    page: by which clients know the daemon, beginning with `epoch`. arena, mapping: the slots, and
    where they lie. inventory: what a successor is to know.

    Args: kept: the memory of a predecessor, which is taken over; None: new memory.
    Raises: ReadError: no memory, or what was kept cannot be mapped.
    """

    def __init__(self, config: ServerConfig, kept: KeptMemory | None) -> None:
        self.page = SharedMemory(PAGE_NAME, mmap.PAGESIZE, None if kept is None else kept.page)
        epoch = self.page.array[:8].view("<u8")
        if kept is None:
            epoch[0] = secrets.randbits(63)
        self.epoch = int(epoch[0])
        if kept is None:
            self.arena, self.mapping = _new(config)
            self.inventory = _new_inventory(config, self.arena)
            self.directory = Directory()  # as large as the address space lets it be
            self.inventory.header["capacity"] = self.directory.capacity
        else:
            self.arena, self.mapping, self.directory = _kept(config, kept)
            self.inventory = kept.inventory
            self.inventory.begin()
        self.directory.next_number = self.inventory.header["next_number"]
        self.table = ShardTable(self.directory)
        self.next_use = NextUse(orders_limit(self.arena.size))
        self.next_use.grouped = self.inventory.set_group
        self.cache = Cache(
            self.arena,
            self.directory,
            self.table,
            self._retract,
            self.next_use,
            self.inventory.states,
            self.inventory.leases,
        )
        self.adopted: Adopted | None = None
        """The samples that were taken over."""

    def _retract(self, firsts: Int64s, counts: Int64s, slots: Int64s, sizes: Int64s) -> None:
        retract(
            self.directory.entries_memory.address,
            firsts,
            counts,
            slots.view(np.uint64),
            sizes.view(np.uint64),
        )


def _new_inventory(config: ServerConfig, arena: Arena) -> Inventory:
    inventory = Inventory.create(
        arena.slab_size,
        arena.limit // arena.slab_size,
        namespace_marks(),
        terms_of(config),
    )
    arena.record(inventory.slabs)
    return inventory


def _kept(config: ServerConfig, kept: KeptMemory) -> tuple[Arena, SharedMemory, Directory]:
    """Return what a predecessor had. Raises: ReadError."""
    arena = Arena(config.arena_size, kept.limit, kept.slab_size)
    files = kept.domains[0].files
    memory = SharedMemory("ffserve-arena", arena.limit, files[0])
    return arena, memory, Directory(kept.inventory.get("capacity"), files[1:])


def orders_limit(arena_size: int) -> int:
    """Return how many bytes announced orders may take beside an arena of this size."""
    return _limit_beside(arena_size, LEAST_ORDERS_SIZE, ORDERS_SHARE)


def tables_limit(arena_size: int) -> int:
    """Return how many bytes tables of files may take beside an arena of this size."""
    return _limit_beside(arena_size, LEAST_TABLES_SIZE, TABLES_SHARE)


def _limit_beside(arena_size: int, least: int, share: int) -> int:
    left = max(usable_memory() - arena_size, 0)
    return min(max(least, arena_size // share), left // 2)


def _new(config: ServerConfig) -> tuple[Arena, SharedMemory]:
    """Return the arena and its memory, as large as the arena may become."""
    limit = max(config.arena_size, config.max_arena_size)
    while True:
        arena = Arena(config.arena_size, limit)
        try:
            return arena, SharedMemory("ffserve-arena", arena.limit)
        except (ReadError, OSError):
            # The address space is limited, so the arena cannot grow as far.
            if limit == config.arena_size:
                raise
            limit = max(config.arena_size, limit // 2)
