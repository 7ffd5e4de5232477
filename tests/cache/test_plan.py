"""A plain miss is planned at once; step by step comes to the same, in every table."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ffserve.cache.arena import Arena
from ffserve.cache.cache import Cache, Failure, Fetch, Int64s, Load
from ffserve.cache.jobs import JobProgress
from ffserve.cache.next_use import NextUse
from ffserve.cache.tables import Directory, ShardTable
from ffserve.engine.plan import Planner
from ffserve.engine.residents import Residents
from ffserve.engine.slots import FREE, RESIDENT, Slots

MIB = 1 << 20
LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "equal": lambda _: 5000,
    "small": lambda chance: chance.randrange(200, 1500),
    "mixed": lambda chance: chance.choice((4000, 4000, 9000, 70_000)),
    "rarely mixed": lambda chance: 5000 if chance.random() < 0.99 else 300_000,
}


class Node:
    """Shards of one kind of records, and a cache over them.

    Args: jobs: that visit them; 3: two, of which the first announced an order.
    """

    def __init__(self, kind: str, at_once: bool, jobs: int) -> None:
        chance = random.Random(kind)
        self.arena, self.directory = Arena(3 * MIB, 4 * MIB), Directory(1 << 22)
        self.table, self.uses = ShardTable(self.directory), NextUse()
        self.retracted: list[tuple[int, ...]] = []
        self.cache = Cache(self.arena, self.directory, self.table, self._retract, self.uses)
        self.cache.plans_at_once = at_once
        self.runs: list[tuple[int, int]] = []
        for k in range(3):
            lengths = [LENGTHS[kind](chance) for _ in range(1500)]
            self._shard(k, np.array(lengths, np.int64))
        bases, counts = np.array(self.runs).T.copy()
        self.jobs: list[JobProgress] = [
            self.uses.join(f"job {k}", bases[k : k + 2], counts[k : k + 2])
            for k in range(min(jobs, 2))
        ]
        if jobs == 3:
            progress = self.jobs[0]
            order = np.random.default_rng(1).permutation(progress.sample_count) + progress.low
            arriving = self.uses.arriving(progress, len(order), replacement=False)
            arriving.add(order)
            self.uses.announced(progress, 0, arriving.finish(), None, self)
        self.loads: list[Load] = []
        self.fetches: list[Fetch] = []

    def _shard(self, k: int, lengths: Int64s) -> None:
        base = self.directory.reserve(len(lengths))
        self.runs.append((base, len(lengths)))
        self.directory.offsets[base : base + len(lengths)] = np.cumsum(lengths) - lengths
        self.directory.set_lengths(base, lengths.astype(np.uint64))
        self.table.add(
            base, len(lengths), payload_size=int(lengths.sum()), alignment=512, checksum_kind=0,
            file=k, engine=0,
        )  # fmt: skip
        self.table.sessions[self.table.row(base)] = 1

    def _retract(self, *contents: Int64s) -> None:
        self.retracted += zip(*(row.tolist() for row in contents), strict=True)

    def ask(self, numbers: list[int], job: int, count: int, size: int) -> None:
        fetch = Fetch(np.array(numbers, np.int64))
        self.fetches.append(fetch)
        self.go_on(len(self.fetches) - 1, count, size)
        if self.jobs:
            progress = self.jobs[job % len(self.jobs)]
            inside = fetch.numbers - progress.low
            inside = fetch.numbers[(inside >= 0) & (inside < progress.span)]
            self.cache.invalidate(progress.asked(inside, self.uses.now))

    def go_on(self, fetch: int, count: int, size: int) -> None:
        load = self.cache.advance(self.fetches[fetch], count, size)
        if load is not None:
            self.loads.append(load)

    def end(self, load: int, failing: float) -> None:
        ended, chance = self.loads.pop(load), random.Random(load)
        firsts, counts = ended.blocks.firsts.tolist(), ended.blocks.counts.tolist()
        every = [n for f, c in zip(firsts, counts, strict=True) for n in range(f, f + c)]
        bad = {n: Failure(-5) for n in every if chance.random() < failing}
        self.cache.loaded(ended, bad)

    def let_go(self, fetch: int) -> None:
        if not self.fetches[fetch].waiting:
            gone = self.fetches.pop(fetch)
            self.cache.release(gone.pins)

    def state(self) -> dict[str, Any]:
        cache, policy, arena = self.cache, self.cache.policy, self.arena
        count = arena.slot_count
        held = np.flatnonzero(cache.state[:count] != FREE)
        resident = np.flatnonzero(cache.state[:count] == RESIDENT)
        first, end = self.runs[0][0], sum(self.runs[-1])
        found: dict[str, Any] = {
            "states": cache.state[:count],
            "pins": cache.pins[:count],
            "first": cache._first[held],
            "count": cache._count[held],
            "load_of": cache._load_of[held],
            "slot_of": self.directory.slot_of[first:end],
            "key": policy.buckets.key[resident],
            "group": policy.buckets.group[held],
            "ahead": policy.buckets.ahead[:count],
            "used by group": policy.used,
            "static": policy._static,
            "buckets": [
                {(g, key): bucket.held.tolist() for g, s in bucket_sets.items()
                 for key, bucket in s.buckets.items()}
                for bucket_sets in policy.buckets.of_class
            ],
            "entries": [{g: s.entries for g, s in t.items()} for t in policy.buckets.of_class],
            "used": arena.used_size,
            "slabs": (arena.slab_class[: arena.slab_count], arena.slab_used[: arena.slab_count]),
            "free": [free.held.tolist() for free in arena._free_slots],
            "free slabs": arena._free_slabs,
            "used by shard": self.table.used,
            "counters": cache.counters,
            "next load": cache._next_load,
            "retracted": self.retracted,
        }  # fmt: skip
        for k, fetch in enumerate(self.fetches):
            found[f"fetch {k}"] = [fetch.cursor, fetch.waiting, fetch.pinned_size, fetch.failures]
            found[f"pins {k}"] = [pins.tolist() for pins in fetch.pins]
        for k, load in enumerate(self.loads):
            parts = [(c, slots.tolist(), passing) for c, slots, passing in load.parts]
            found[f"load {k}"] = [load.number, load.size, load.reads, parts]
            found[f"rows {k}"] = [load.blocks.table, load.slots, load.offsets, load.sizes]
        self.retracted = []
        return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def step(nodes: tuple[Node, Node], chance: random.Random, *, calm: bool) -> None:
    """Have both do the same; calm: no shard is left, and the arena keeps its size."""
    node = nodes[0]
    what, seed = chance.random(), chance.random()
    low, end = node.runs[0][0], sum(node.runs[-1])
    for each in nodes:
        mine = random.Random(seed)
        each.uses.now += 0.01
        if what < 0.5 and len(each.fetches) < 4:
            many = mine.choice((1, 8, 30, 64))
            run = mine.choice((each.runs[0], each.runs[0], (low, end - low)))
            numbers = [mine.randrange(run[0], sum(run)) for _ in range(many)]
            if mine.random() < 0.7:
                slots = each.directory.slot_of[numbers].tolist()
                numbers = [n for n, slot in zip(numbers, slots, strict=True) if not slot]
            if mine.random() < 0.2:
                first = mine.randrange(low, end - 40)
                numbers = list(range(first, first + 40))
            each.ask(numbers, mine.randrange(4), mine.choice((128, 20)), mine.choice((MIB, 90_000)))
        elif what < 0.55 and each.fetches:
            each.go_on(mine.randrange(len(each.fetches)), 128, MIB)
        elif what < 0.8 and each.loads:
            each.end(mine.randrange(len(each.loads)), mine.choice((0, 0, 0, 0.02)))
        elif what < 0.97 and each.fetches:
            each.let_go(mine.randrange(len(each.fetches)))
        elif calm:
            pass
        elif what < 0.98:
            each.cache.allocator.resize(mine.choice((8, 12, 16)))
            each.cache.allocator.retire()
        elif what < 0.99:
            row = mine.randrange(3)
            each.table.sessions[row] ^= 1
            each.cache.allocator.idle_changed |= each.table.sessions[row] == 0


@pytest.mark.parametrize("jobs", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", LENGTHS)
def test_a_plan_made_at_once_is_the_one_made_step_by_step(
    kind: str, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    choose = Planner.choose

    def counted(self: Planner, *arguments: Any) -> Any:
        plan = choose(self, *arguments)
        made.append(plan.c.gone if plan.found else -1)
        return plan

    monkeypatch.setattr(Planner, "choose", counted)
    for seed in range(4):
        nodes = Node(kind, True, jobs), Node(kind, False, jobs)
        try:
            chance = random.Random(seed)
            for _ in range(400):
                step(nodes, chance, calm=seed > 0)
                one, other = (node.state() for node in nodes)
                assert [name for name in other if not same(one.get(name), other[name])] == []
        finally:
            for node in nodes:
                node.directory.close()
    plans = [gone for gone in made if gone >= 0]
    assert len(plans) > 40, "hardly any miss was planned at once"
    assert sum(gone > 0 for gone in plans) > 20 or jobs, "hardly any had victims"


class Tables:
    """Ten samples of 4000 bytes in one file, 16 slots of 4096 bytes, of which 4 to 7 hold what is
    on a bucket of key 9 and group 1."""

    def __init__(self) -> None:
        self.directory = Directory(1 << 22)
        self.directory.reserve(20)
        self.directory.offsets[:10] = np.arange(10) * 4096
        self.directory.set_lengths(0, np.full(20, 4000, np.uint64))
        self.shards = ShardTable(self.directory)
        self.shards.add(
            0, 20, payload_size=80_000, alignment=512, checksum_kind=0, file=0, engine=0
        )
        self.states, self.pins = np.zeros(16, np.uint8), np.zeros(16, np.int32)
        self.firsts, self.counts = np.zeros(16, np.int64), np.zeros(16, np.int32)
        self.keys, self.groups = np.full(16, -1, np.int64), np.zeros(16, np.int32)
        offsets = np.arange(16) * 4096
        sizes = np.full(16, 4096)
        self.slots = Slots(
            self.directory.slot_of, self.states, self.pins, self.firsts, self.counts,
            np.zeros(16, np.int32), offsets, sizes,
        )  # fmt: skip
        ahead, classes = np.zeros(16, np.bool_), np.zeros(1, np.int32)
        self.slab_used = np.full(1, 4, np.int64)
        residents = Residents(self.keys, self.groups, ahead, sizes, classes, 16, 2)
        class_sizes = np.array([4096, 8192])
        self.planner = Planner(
            self.slots, self.shards.c, residents, class_sizes, self.slab_used, 65_536
        )
        held = np.arange(4, 8)
        self.states[held], self.keys[held], self.groups[held] = RESIDENT, 9, 1
        self.firsts[held], self.counts[held] = 10 + held, 1
        self.directory.slot_of[14:18] = held + 1
        self.shards.used[0] = 4 * 4096

    def choose(
        self, numbers: list[int], free: list[int], entries: list[int], *, newest: bool = False
    ) -> Any:
        victims = np.array(entries, np.int32), 9, newest
        wanted = np.array(numbers, np.int64)
        stock = 0, np.array(free, np.int64), False, victims
        return self.planner.choose(wanted, MIB, 1, [stock])

    def everything(self) -> list[NDArray[Any]]:
        tables = (self.states, self.pins, self.firsts, self.counts, self.keys, self.groups)
        slot_of = self.directory.slot_of[:20]
        return [table.copy() for table in (*tables, slot_of, self.shards.used, self.slab_used)]


def test_what_is_not_plain_changes_nothing() -> None:
    tables = Tables()
    try:
        tables.pins[6] = 1
        tables.pins[1] = 1
        before = tables.everything()
        for numbers, free, entries in (
            ([1, 14], [0], [4, 5]),  # one is there
            ([1, 20], [0], [4, 5]),  # of no shard
            ([1, -1], [0], [4, 5]),
            ([1, 2, 3], [], [4, 5]),  # too few
            ([1, 2, 3], [], [4, 5, 4, 5]),  # twice the same
            ([1, 2], [], [4, 6, 5]),  # one is pinned
            ([1, 2], [], [4, 0, 16]),  # no such slot
            ([1, 2], [], [4, 0, -1]),
            ([1, 2], [1, 0], []),  # a free slot with a pin
            ([1, 2], [4, 0], []),  # one that is not free
            ([1, 2], [16, 0], []),
            ([1, 2], [-1, 0], []),
        ):
            assert not tables.choose(numbers, free, entries).found, (numbers, free, entries)
            assert same(tables.everything(), before)
    finally:
        tables.directory.close()


def test_a_plan_takes_free_slots_then_victims_and_no_slot_twice() -> None:
    tables = Tables()
    try:
        plan = tables.choose([3, 1, 3, 2], [8, 9], [0, 5, 5, 4, 7])
        assert plan.found and plan.slots.tolist() == [9, 8, 5]
        assert plan.table[0].tolist() == [3, 1, 2] and plan.wanted == [(0, 3)]
        ((size_class, fresh, gone, looked),) = plan.parts()
        assert (size_class, fresh.tolist(), gone.tolist(), looked) == (0, [9, 8], [5], 2)
        assert plan.contents.tolist() == [[15], [1], [5 * 4096], [4096]]
        places, rooms = plan.take(7, 3)
        assert places.tolist() == [9 * 4096, 8 * 4096, 5 * 4096] and rooms.tolist() == [4096] * 3
        assert tables.directory.slot_of[:20].nonzero()[0].tolist() == [1, 2, 3, 14, 16, 17]
        assert tables.directory.slot_of[[3, 1, 2]].tolist() == [10, 9, 6]
        assert tables.pins[[9, 8, 5]].tolist() == [1, 1, 1] and tables.pins.sum() == 3
        assert tables.groups[[9, 8, 5]].tolist() == [7, 7, 7]
        assert (tables.slab_used[0], tables.shards.used[0]) == (6, 6 * 4096)
        assert (plan.c.held, plan.c.freed, plan.c.size) == (3 * 4096, 4096, plan.table[4].sum())
    finally:
        tables.directory.close()


def test_the_newest_victims_are_taken_as_they_stand_on_their_stack() -> None:
    """Three at a time, as they are popped; 0 and the second 7 are not on it any more."""
    tables = Tables()
    try:
        plan = tables.choose([0, 1, 2], [], [5, 4, 6, 7, 0, 7], newest=True)
        assert plan.found and plan.slots.tolist() == [7, 4, 6]
        assert plan.parts()[0][3] == 5
    finally:
        tables.directory.close()
