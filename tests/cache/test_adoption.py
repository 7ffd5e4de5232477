"""Adoption: a daemon's cache is taken over after a kill at any moment, and garbage does no harm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_simulation import World, random_world

from ffserve.cache.adoption import adopt
from ffserve.cache.arena import SlabTables
from ffserve.engine.slots import LOADING, RESIDENT

SEEDS = [
    *range(3),
    *(pytest.param(seed, marks=pytest.mark.check) for seed in range(3, 10)),
    *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in range(10, 200)),
]


def killed(seed: int) -> tuple[World, SlabTables]:
    """Return a world whose daemon died after some time, with its directory, and its tables."""
    tables = SlabTables(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))

    def record(world: World) -> None:
        nonlocal tables
        slabs = len(world.arena.slab_class)
        tables = SlabTables(*(np.zeros(slabs, each.dtype) for each in tables))
        world.arena.record(tables)

    world = random_world(seed, begin=record)
    with suppress(AssertionError):  # it does not come to an end
        world.run(check=False, most_events=world.random.randint(1, 400))
    for number, offset in world.slot_bytes.items():
        (begin,) = world.table.blocks(np.array([number])).begins.tolist()
        within = int(world.directory.offsets[number]) - begin
        world.directory.entries["place"][number] |= np.uint64(offset + within)
        world.directory.entries["seq"][number] = 1
    return world, tables


def places(entries: NDArray[Any]) -> NDArray[np.int64]:
    """Where samples lie in the arena."""
    return (entries["place"] & np.uint64((1 << 48) - 1)).astype(np.int64)


def take_over(heir: World, world: World, tables: SlabTables) -> None:
    """Have a world take the memory of another one over; check what it has."""
    heir.directory.entries[: world._end] = world.directory.entries[: world._end]
    heir.cache.state[:] = world.cache.state
    heir.cache.leases[:] = world.cache.leases
    entries = heir.directory.entries[: world._end]
    there = np.flatnonzero(entries["seq"] & 1)
    heir.slot_bytes = dict(zip(there.tolist(), places(entries[there]).tolist(), strict=True))
    used = np.flatnonzero(heir.cache.state), np.flatnonzero(heir.cache.leases)
    adopted = adopt(heir.cache, tables, {0}, *used)
    heir.pages.follow(heir.resizing.size)
    assert (heir.cache.state[adopted.loading] == LOADING).all()
    adopted.end_quarantine()
    adopted.end_leases()
    assert not heir.cache.leases.any() and not (heir.cache.state == LOADING).any()
    left = [n for n in np.flatnonzero(entries["seq"] & 1).tolist() if n in heir.slot_bytes]
    assert len(left) == adopted.samples
    slots = heir.directory.slot_of[left].astype(np.int64) - 1
    assert (slots >= 0).all() and (heir.cache.state[slots] == RESIDENT).all()
    blocks = heir.table.blocks(np.array(left, np.int64))
    assert (heir.cache.slots.firsts[slots] == blocks.firsts).all(), "not a block"
    assert (heir.cache.slots.counts[slots] == blocks.counts).all(), "a part of a block"
    begins, sizes = heir.arena.offsets(slots), heir.arena.sizes(slots)
    ends = places(entries[left]) + entries["length_low"][left]
    assert (places(entries[left]) >= begins).all() and (ends <= begins + sizes).all()
    heir.slot_bytes = dict(zip(left, begins.tolist(), strict=True))
    heir.check()


def live_on(seed: int, world: World, begin: Callable[[World], object]) -> None:
    """Have all jobs come to a world that begins with the memory of another one."""
    heir = random_world(seed, begin=begin)
    try:
        heir.run()
        heir.check_end()
    finally:
        heir.close()
        world.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_all_that_was_cached_is_taken_over(seed: int) -> None:
    world, tables = killed(seed)
    cached: dict[int, set[int]] = {}
    for number in world.slot_bytes:
        slot = int(world.directory.slot_of[number]) - 1
        if world.cache.state[slot] == RESIDENT:
            cached.setdefault(slot, set()).add(number)
    expected: set[int] = set()

    def compare(heir: World) -> None:
        for numbers in cached.values():
            blocks = heir.table.blocks(np.array([min(numbers)]))
            first, count = int(blocks.firsts[0]), int(blocks.counts[0])
            # A block of which a part could not be read is read again.
            if numbers == set(range(first, first + count)):
                expected.update(numbers)
        take_over(heir, world, tables)
        assert set(heir.slot_bytes) == expected

    live_on(seed, world, compare)


@pytest.mark.parametrize("seed", SEEDS)
def test_garbage_is_not_taken_over(seed: int) -> None:
    world, tables = killed(seed)
    rng = np.random.default_rng(seed)
    entries = world.directory.entries[: world._end]
    for table in (entries, *tables, world.cache.state, world.cache.leases):
        view = table.view(np.uint8).reshape(-1)
        places = rng.integers(0, len(view), 1 + len(view) // int(rng.choice((4, 64, 1000))))
        view[places] = rng.integers(0, 256, len(places))
    live_on(seed, world, lambda heir: take_over(heir, world, tables))
