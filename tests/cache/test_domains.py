"""Memory of several domains and sizes: who gets how much, and that nothing lies elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from ffserve.cache.arena import Arena
from ffserve.cache.cache import Cache, Fetch, Load
from ffserve.cache.jobs import JobProgress
from ffserve.cache.tables import REGION_UNIT, SMALLEST_REGION, Directory, ShardTable
from ffserve.errors import ReadError
from ffserve.server.reading.requests import Requester, SampleRequest
from ffserve.server.reading.scheduler import Scheduler
from ffserve.server.users.shares import User
from ffserve.system.memfd import MemoryFile, SharedMemory

MIB = 1 << 20
CAPACITY = 1 << 22


class Node:
    """A cache of 64 slabs, whose reads end at once, and shards of some users."""

    def __init__(self) -> None:
        self.arena = Arena(16 * MIB)
        self.directory = Directory(CAPACITY)
        self.table = ShardTable(self.directory)
        self.cache = Cache(self.arena, self.directory, self.table, lambda *_: None)
        self.given: list[tuple[int, int]] = []
        self.arena.give = self.give
        self.counts: dict[int, int] = {}

    def give(self, slab: int, domain: int) -> bool:
        low, high = slab * self.arena.slots_per_slab, (slab + 1) * self.arena.slots_per_slab
        assert not self.cache.state[low:high].any(), "only an empty slab changes hands"
        self.given.append((slab, domain))
        return True

    def user(self) -> int:
        number = self.cache.add_domain()
        files = [
            MemoryFile(m.file.name, m.size)
            for m in (self.directory.entries_memory, self.directory.index_memory)
        ]
        self.directory.add_domain(number, *files)
        return number

    def shard(self, count: int, size: int, domain: int = 0) -> int:
        base = self.directory.reserve(count, domain)
        end = base + count
        self.directory.offsets[base:end] = np.arange(count, dtype=np.uint64) * size
        self.directory.set_lengths(base, np.full(count, size, np.uint64))
        self.table.add(
            base,
            count,
            payload_size=count * size,
            alignment=1,
            checksum_kind=0,
            file=0,
            engine=0,
            domain=domain,
        )
        self.table.sessions[self.table.row(base)] = 1
        self.counts[base] = count
        return base

    def job(self, name: str, base: int) -> JobProgress:
        return self.cache.next_use.join(name, np.array([base]), np.array([self.counts[base]]))

    def read(self, progress: JobProgress, base: int, epochs: int = 1) -> None:
        """Read all samples of a shard, 32 at a time, 1,000 per second."""
        next_use = self.cache.next_use
        for epoch in range(epochs):
            order = base + np.random.default_rng(epoch).permutation(self.counts[base])
            for at in range(0, len(order), 32):
                numbers = order[at : at + 32]
                next_use.turn_at += 0.032
                fetch = Fetch(numbers)
                while not fetch.complete:
                    before = fetch.cursor
                    load = self.cache.advance(fetch, 32, MIB)
                    if load is not None:
                        self.cache.loaded(load, {})
                    assert fetch.cursor > before
                self.cache.release(fetch.pins)
                self.cache.used(numbers)
                self.cache.invalidate(progress.asked(numbers, next_use.turn_at))

    def used(self, base: int) -> int:
        """Bytes of the samples of a shard that are in memory; they lie in its domain's slabs."""
        row = self.table.row(base)
        held = self.cache._slot_of[base : base + self.counts[base]]
        slabs = (np.unique(held[held > 0]) - 1) // self.arena.slots_per_slab
        assert (self.arena.slab_domain[slabs] == self.table.domains[row]).all()
        return int(self.table.used[row])


@pytest.mark.parametrize("of_another_user", [False, True])
def test_the_first_kept_all_memory_from_jobs_of_other_users_or_sizes(of_another_user: bool) -> None:
    node = Node()
    first = node.shard(8192, 4096)
    size = 4096 if of_another_user else 8192
    second = node.shard(32 * MIB // size, size, node.user() if of_another_user else 0)
    one, two = node.job("one", first), node.job("two", second)
    node.read(one, first)
    assert node.used(first) > 15 * MIB
    for _ in range(3):
        node.read(two, second)
        node.read(one, first)
    # A quarter of the memory for each of two jobs is its floor.
    assert node.used(second) >= 3.5 * MIB and node.used(first) >= 3.5 * MIB
    assert node.used(first) + node.used(second) <= node.arena.size


def test_memory_of_an_idle_user_moves_to_a_busy_one_and_back() -> None:
    node = Node()
    theirs, mine = node.user(), node.user()
    first, second = node.shard(8192, 4096, theirs), node.shard(8192, 4096, mine)
    one = node.job("one", first)
    node.read(one, first)
    assert node.used(first) > 15 * MIB
    # The first user does nothing any more, but has its data set open.
    node.cache.next_use.turn_at += 3600
    two = node.job("two", second)
    node.read(two, second, 2)
    assert node.used(second) > 14 * MIB
    node.cache.next_use.turn_at += 3600
    node.read(one, first, 2)
    assert node.used(first) > 14 * MIB


def test_memory_of_a_user_who_closed_everything_is_taken_first() -> None:
    node = Node()
    first, second = node.shard(8192, 4096, node.user()), node.shard(2048, 4096)
    node.read(node.job("one", first), first)
    kept = node.shard(256, 4096)
    node.read(node.job("three", kept), kept)
    node.table.sessions[node.table.row(first)] = 0
    node.cache.allocator.idle_changed = True
    node.read(node.job("two", second), second)
    assert node.used(second) == 8 * MIB and node.used(kept) == MIB


def test_a_request_over_two_users_takes_slots_of_both() -> None:
    node = Node()
    public, private = node.shard(64, 3000), node.shard(64, 3000, node.user())
    fetch = Fetch(np.stack((np.arange(64) + public, np.arange(64) + private), axis=1).ravel())
    while not fetch.complete:
        load = node.cache.advance(fetch, 100, MIB)
        assert load is not None
        node.cache.loaded(load, {})
    assert node.used(public) and node.used(private)
    for base in (public, private):
        assert (node.cache._slot_of[base : base + 64] > 0).all()


def test_slabs_that_cannot_change_hands_stay_where_they_are() -> None:
    """No mapping is left: the request of another user waits, and nothing else happens."""
    node = Node()
    first, second = node.shard(8192, 4096), node.shard(8192, 4096, node.user())
    node.read(node.job("one", first), first)
    node.arena.give = lambda slab, domain: False
    fetch = Fetch(np.arange(second, second + 8))
    assert node.cache.advance(fetch, 8, MIB) is None and fetch.cursor == 0
    assert not node.used(second)


def test_one_user_in_many_namespaces_moved_slabs_in_the_turns_of_others() -> None:
    """Forty namespaces with four size classes each made a turn of one user take 370 ms."""
    node, chance, now = Node(), np.random.default_rng(0), 0.0
    common = node.shard(2048, 4096)
    private = []
    for _ in range(10):
        domain = node.user()
        private.append([node.shard(256, size, domain) for size in (3000, 9000, 40_000, 120_000)])
    loads: list[Load] = []
    answered: dict[int, int] = {1: 0, 2: 0}

    def finished(request: SampleRequest, _now: float) -> None:
        answered[request.owner.user.uid] += request.count
        tags.append((request.owner, request.tag))

    tags: list[tuple[Requester, int]] = []
    scheduler = Scheduler(node.cache, lambda load, _: loads.append(load), most_reads=4096)
    scheduler.wake = lambda: None
    users = [User(uid, trusted=False) for uid in (1, 2)]
    hostile = [Requester(finished, user=users[0], job=str(k)) for k in range(10)]
    honest = Requester(finished, user=users[1], job="honest")
    for turn in range(1000):
        now += 0.001
        if not honest.waiting:
            numbers = common + chance.integers(0, 2048, 32)
            scheduler.add(SampleRequest(honest, turn, numbers), now)
        for each, bases in zip(hostile, private, strict=True):
            if not each.waiting:
                numbers = np.repeat(bases, 16) + chance.integers(0, 256, 64)
                scheduler.add(SampleRequest(each, turn, chance.permutation(numbers)), now)
        scheduler.pump(now)
        while loads:
            scheduler.loaded(loads.pop(), {}, now)
        while tags:
            owner, tag = tags.pop()
            scheduler.pins.acknowledge(owner, [tag])
    assert len(node.given) > 100 and answered[1] > 1000, "the other user goes on"
    assert answered[2] >= 32 * 980, "a turn in each pump"
    assert len(node.given) < 7000, "12,000 when moving slabs cost nothing"


# ---- numbers ---------------------------------------------------------------------------------


def test_numbers_of_a_domain_are_whole_pages_of_its_own_files() -> None:
    directory = Directory(CAPACITY)
    files = [
        MemoryFile(memory.file.name, memory.size)
        for memory in (directory.entries_memory, directory.index_memory)
    ]
    directory.add_domain(7, *files)
    public, private = directory.reserve(10), directory.reserve(10, 7)
    assert private % REGION_UNIT == 0 and private > public
    assert directory.reserve(5) == private + SMALLEST_REGION
    assert directory.reserve(20, 7) == private + 10
    directory.entries["place"][private] = 77
    directory.offsets[private] = 78
    directory.checksums[private] = 79
    seen = [SharedMemoryView(file) for file in files]
    assert seen[0].at(private * 16 + 8) == 77 and seen[1].at(private * 8) == 78
    assert seen[1].at(CAPACITY * 8 + private * 4) & 0xFFFFFFFF == 79
    shown = SharedMemoryView(directory.entries_memory.file)
    assert shown.at(private * 16 + 8) == 0, "nothing is seen in the file of another domain"
    # A domain that grows gets few, larger regions.
    bases = [directory.reserve(SMALLEST_REGION, 7) for _ in range(12)]
    assert len({base % REGION_UNIT for base in bases}) and len(directory._regions[7].parts) <= 6
    for base in [*bases, private + 10, private]:
        directory.release(base, {private + 10: 20, private: 10}.get(base, SMALLEST_REGION), 7)
    directory.drop_domain(7)
    assert directory.entries["place"][private] == 0
    with pytest.raises(ReadError):
        directory.reserve(CAPACITY + 1)


class SharedMemoryView:
    """The bytes of a memory file, as another process maps them."""

    def __init__(self, file: MemoryFile) -> None:
        self._memory = SharedMemory("test", file.size)
        self._memory.show(file, 0, file.size)

    def at(self, offset: int) -> int:
        return int.from_bytes(bytes(self._memory.array[offset : offset + 8]), "little")
