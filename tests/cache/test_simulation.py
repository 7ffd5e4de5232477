"""Cache, scheduler and sessions together, driven by a seeded simulation of everything around them.

The disk is simulated (late, out of order, with failures), the clock is virtual, and so are the
clients: some are slow, some never acknowledge, some hold leases for ever, some die. What is under
test is the very code that the daemon runs. After every tick the invariants of `check` hold.
"""

from __future__ import annotations

import heapq
import mmap
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.cache.allocator import Allocator
from ffserve.cache.arena import Arena
from ffserve.cache.cache import Cache, Fetch, Load
from ffserve.cache.next_use import NextUse
from ffserve.cache.next_use_buckets import NONE
from ffserve.cache.tables import Directory, ShardTable
from ffserve.config import ServerConfig
from ffserve.engine.slots import FAILED, FREE, LOADING, RESIDENT
from ffserve.errors import Failure, ProtocolError
from ffserve.protocol import Message
from ffserve.server.files.preparations import Preparations
from ffserve.server.life.resize import Resizing
from ffserve.server.prepared.claims import Claims
from ffserve.server.reading.requests import GrantedLease, Requester
from ffserve.server.reading.scheduler import GIVE_UP_S, Scheduler
from ffserve.server.reading.statistics import Statistics
from ffserve.server.sessions.datasets import Steps
from ffserve.server.sessions.job_table import JobTable
from ffserve.server.sessions.outbox import MemoryMessage
from ffserve.server.sessions.session import Session
from ffserve.server.sessions.state import Clients
from ffserve.server.status.faults import Faults
from ffserve.server.users.domains import Domain, Domains
from ffserve.server.users.peers import Peer
from ffserve.server.users.shares import User, Users
from ffserve.system.memfd import MemoryFile, SharedMemory

Int64s = NDArray[np.int64]
MIB = 1 << 20
LONG = (7, 16, 30)
"""Seeds whose lives take as long as all others of the default run together."""
SEEDS = [seed for seed in range(40) if seed not in LONG]
FEW = [*SEEDS[:5], *(pytest.param(seed, marks=pytest.mark.check) for seed in SEEDS[5:15])]
FUZZ_SEEDS = [*LONG, *SEEDS[15:], *range(40, 1040)]
EIO = -5
HELLO = {"versions": [protocol.VERSION], "locks": True}
WHAT = {"paths": ["/x"], "format": None, "verify": True}


@dataclass
class Shard:
    """As catalog.OpenShard, as far as sessions look at one."""

    path: str
    base: int
    count: int
    size: int
    domain: Domain
    sessions: int = 0
    format: str = "ffrecord"
    fingerprint: int = 7
    checksum_kind: int = 0
    contradiction: str | None = None

    @property
    def payload_size(self) -> int:
        return self.size


class Shards:
    """The catalog's part that a session calls."""

    def __init__(self, table: ShardTable, cache: Cache) -> None:
        self._table = table
        self._cache = cache
        self.preparations = Preparations()

    def hold(self, shards: list[Shard], change: int) -> None:
        for shard in shards:
            shard.sessions += change
            self._table.sessions[self._table.row(shard.base)] = shard.sessions
            if shard.sessions == 0:
                self._cache.allocator.idle_changed = True

    def close(self, shards: list[Shard], owner: tuple[int, int]) -> None:
        self.hold(shards, -1)

    def shards(self) -> list[Shard]:
        return []


class Pages:
    """Memory that is given back when the world has time for it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.size = world.arena.size
        self.settled = True
        self.populated = 0

    def follow(self, size: int) -> None:
        assert self.settled, "grown into what is being given back"
        if size < self.size:
            self.settled = False
            self.world.at(self.world.now + self.world.random.uniform(0, 0.1), self._settle)
        self.size = size

    def _settle(self) -> None:
        self.settled = True


class World:
    """The parts of a daemon without engines and sockets: all that a Session asks of them.

    Args:
        lengths: of the samples, one array a shard.
        cache_type, arena_type: what to test.
    """

    def __init__(
        self,
        seed: int,
        arena_size: int,
        lengths: list[Int64s],
        *,
        cache_type: Callable[..., Cache] = Cache,
        arena_type: Callable[..., Arena] = Arena,
        failure_rate: float = 0.0,
        slowest_s: float = 0.02,
        most_reads: int = 256,
        largest_arena: int | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.arena = arena_type(arena_size, largest_arena)
        self.directory = Directory(1 << 22)
        self.table = ShardTable(self.directory)
        self.next_use = NextUse()
        self.entered = np.zeros(self.arena.slot_limit, np.bool_)
        """Slots that ever held something."""
        self.cache = cache_type(
            self.arena, self.directory, self.table, self._retract, self.next_use
        )
        self.scheduler = Scheduler(self.cache, self._submit, most_reads=most_reads)
        self.pages = Pages(self)
        self.resizing = Resizing(self.cache, self.scheduler, self.pages)
        self.claims = Claims(self.directory)
        self.catalog = Shards(self.table, self.cache)
        self.epoch = self.random.getrandbits(63)
        self.page = SharedMemory("ffserve-page", mmap.PAGESIZE)
        self.page.array[:8] = np.array([self.epoch], "<u8").view(np.uint8)
        self.memory = SharedMemory("ffserve-arena", self.arena.limit)
        self.domains = Domains(self.cache, self.memory, self.directory, self._move)
        self.domain = self.domains.obtain(None)
        self.failure_rate = failure_rate
        self.slowest_s = slowest_s
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.loads: dict[int, Load] = {}
        self.unheard: list[tuple[Load, dict[int, Failure]]] = []
        """Loads that have ended, of which the scheduler was not told yet."""
        self.clients: list[Client] = []
        self.state = self._state()
        """What a ServerState offers its sessions."""
        self.slot_bytes: dict[int, int] = {}
        """What the directory says to clients: sample → place in the arena, readable ones only."""
        self.disk_delay_s = 0.0
        self.reads = 0
        self._serial = 0
        self.shards = [self._shard(k, run) for k, run in enumerate(lengths)]
        self.catalog.hold(self.shards, 0)

    def _shard(self, k: int, lengths: Int64s) -> Shard:
        base = self.directory.reserve(len(lengths))
        ends = np.cumsum(lengths)
        self.directory.offsets[base : base + len(lengths)] = ends - lengths + 64
        self.directory.set_lengths(base, lengths.astype(np.uint64))
        self.table.add(
            base,
            len(lengths),
            payload_size=int(ends[-1]),
            alignment=self.random.choice((1, 512, 4096)),
            checksum_kind=0,
            file=k,
            engine=0,
        )
        self.cache.fit(base)
        return Shard(f"/shard{k}", base, len(lengths), int(ends[-1]) + 64, self.domain)

    def _move(self, offset: int, size: int, before: MemoryFile, after: MemoryFile) -> bool:
        raise AssertionError("a slab of the only domain is given to another")

    def _state(self) -> SimpleNamespace:
        engines: Any = SimpleNamespace(
            kind="simulated", read_size=0, checksum_failures=0, counters=dict, fetches=None
        )
        statistics = Statistics()
        return SimpleNamespace(
            about=lambda: {"server": "simulated", "epoch": self.epoch},
            started=0.0,
            began=0.0,
            config=ServerConfig(),
            memory=SimpleNamespace(
                page=self.page,
                arena=self.arena,
                directory=self.directory,
                table=self.table,
                next_use=self.next_use,
                cache=self.cache,
            ),
            reading=SimpleNamespace(engines=engines, scheduler=self.scheduler),
            files=SimpleNamespace(
                catalog=self.catalog,
                explainer=SimpleNamespace(explain=lambda user, failed, send: send()),
                scrubber=SimpleNamespace(rate=0, size=0, passes=0),
                remote=None,
            ),
            pages=self.pages,
            resizing=self.resizing,
            domains=self.domains,
            claims=self.claims,
            clients=Clients(Users(), 1),
            statistics=statistics,
            faults=Faults(statistics, self.table),
            jobs=JobTable(self.cache, self.scheduler, engines, statistics, self.now),
        )

    # ---- the disk ---------------------------------------------------------------------------

    def at(self, time: float, what: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self.events, (time, self._serial, what))

    def _submit(self, load: Load, reply: DirectReply | None) -> None:
        assert len(np.unique(load.slots)) == len(load.slots)
        assert (load.sizes >= load.blocks.sizes).all(), "a slot is too small for its block"
        assert (load.offsets + load.sizes <= self.arena.size).all()
        assert (load.offsets + load.sizes <= self.pages.size).all(), "into what is given back"
        self.reads += len(load.slots)
        self.loads[id(load)] = load
        delay = self.random.uniform(0, self.slowest_s)
        if self.random.random() < 0.02:
            delay *= 50
        self.disk_delay_s = max(self.disk_delay_s, delay)
        if reply is not None:
            reply.left += 1
        self.at(self.now + delay, lambda: self._landed(load, reply))

    def _landed(self, load: Load, reply: DirectReply | None) -> None:
        failures = {}
        rows = zip(
            load.slots.tolist(),
            load.blocks.firsts.tolist(),
            load.blocks.counts.tolist(),
            load.offsets.tolist(),
            strict=True,
        )
        for _, first, count, offset in rows:
            whole = self.random.random() < self.failure_rate / 2
            for number in range(first, first + count):
                if whole or self.random.random() < self.failure_rate:
                    failures[number] = Failure(EIO)
                elif number not in self.slot_bytes:
                    # As ffs_publish: what is readable elsewhere stays there.
                    self.slot_bytes[number] = offset
        self.unheard.append((load, failures))
        if reply is not None:
            reply.ended(failed=bool(failures))
        # The loop hears of it later than the client does, who may be quicker to say something.
        self.at(self.now + self.random.choice((0, 0, 0.001, 0.03)), self.hear)

    def hear(self) -> None:
        """As the daemon's loop does: take in what has ended."""
        unheard, self.unheard = self.unheard, []
        for load, failures in unheard:
            del self.loads[id(load)]
            self.scheduler.loaded(load, failures, self.now)
        self.scheduler.go_on(self.now)

    def _retract(self, firsts: Int64s, counts: Int64s, slots: Int64s, sizes: Int64s) -> None:
        rows = zip(firsts.tolist(), counts.tolist(), slots.tolist(), sizes.tolist(), strict=True)
        for first, count, slot, size in rows:
            for number in range(first, first + count):
                if slot <= self.slot_bytes.get(number, -1) < slot + size:
                    del self.slot_bytes[number]

    def resize(self, size: int) -> None:
        """As `ffserve resize`, and then again and again as the server does."""
        self.resizing.begin(self.resizing.rounded(size))
        self._go_on_resizing(size, 0.01)

    def _go_on_resizing(self, size: int, pause_s: float) -> None:
        if self.resizing.target != self.resizing.rounded(size):
            return
        self.resizing.step(self.now)
        if self.resizing.under_way and not all(client.dead for client in self.clients):
            # Less and less often: leases can last for years here.
            self.at(self.now + pause_s, lambda: self._go_on_resizing(size, 1.5 * pause_s))

    # ---- time -------------------------------------------------------------------------------

    def run(self, *, check: bool = True, most_events: int = 100_000) -> None:
        """Let things happen until nothing is left to happen."""
        for _ in range(most_events):
            deadline = self.scheduler.next_deadline()
            if not self.events and deadline is None:
                return
            if deadline is not None and (not self.events or deadline < self.events[0][0]):
                self.now = max(deadline, self.now + 0.001)
                self.scheduler.pump(self.now)
            else:
                self.now, _, what = heapq.heappop(self.events)
                what()
            if check:
                self.check()
        raise AssertionError("the simulation does not come to an end")

    def check(self) -> None:
        """Assert what must hold at any time."""
        cache, arena, state = self.cache, self.arena, self.cache.state
        taken = np.flatnonzero(state != FREE)
        # Slots: those in use do not overlap and make up what the arena thinks is used.
        offsets, sizes = arena.offsets(taken), arena.sizes(taken)
        order = np.argsort(offsets)
        ends = (offsets + sizes)[order]
        assert (ends[:-1] <= offsets[order][1:]).all(), "slots overlap"
        assert arena.used_size == int(sizes.sum()), "a slot is lost"
        rows = cache.shards.rows(cache._first[taken])
        used = np.bincount(rows, sizes, minlength=len(cache.shards.bases))
        assert cache.shards.used.tolist() == used.tolist(), "a shard's slots are counted wrongly"
        assert (offsets + sizes <= self.pages.size).all(), "a slot is in what was given back"
        # Loading slots are exactly those of the loads on their way.
        loading = sorted(s for load in self.loads.values() for s in load.slots.tolist())
        assert loading == np.flatnonzero(state == LOADING).tolist(), "a loading slot was taken"
        # Samples and slots point at one another.
        held: dict[int, set[int]] = {}
        numbers = np.flatnonzero(self.directory.slot_of[: self._end])
        for number, slot in zip(
            numbers.tolist(), (self.directory.slot_of[numbers] - 1).tolist(), strict=True
        ):
            held.setdefault(slot, set()).add(number)
        for slot in taken.tolist():
            first, count = int(cache._first[slot]), int(cache._count[slot])
            mine = held.pop(slot, set())
            assert mine <= set(range(first, first + count)), "a slot holds another's samples"
            assert bool(mine) == (state[slot] != FAILED), "a failed slot is still looked up"
            if state[slot] == LOADING:
                assert len(mine) == count
        assert not held, "samples point at free slots"
        # What clients can read is what is resident, at the slot's place, or was just read into one.
        places = {}
        there = state == RESIDENT
        for load, _ in self.unheard:
            there[load.slots] = True
        resident = numbers[there[self.directory.slot_of[numbers] - 1]]
        failed = {number for _, failures in self.unheard for number in failures}
        resident = np.array([n for n in resident.tolist() if n not in failed], np.int64)
        slots = self.directory.slot_of[resident].astype(np.int64) - 1
        for number, place in zip(resident.tolist(), arena.offsets(slots).tolist(), strict=True):
            places[number] = place
        assert self.slot_bytes == places, "readable and resident differ"
        leases = self._leases()
        assert self.scheduler.pins.leased_size == sum(lease.pinned_size for lease in leases)
        in_slab = np.zeros_like(self.scheduler.pins._leases_in_slab)
        for lease in leases:
            in_slab[arena.slabs_of(lease.pins)] += 1
        assert (self.scheduler.pins._leases_in_slab == in_slab).all()
        assert self.scheduler.pins._leased_slabs == np.count_nonzero(in_slab)
        # Pins are what requests, unacknowledged answers and leases hold, and nothing else.
        pins = np.zeros_like(cache.pins)
        for holder in (*self._fetches(), *leases):
            for slots in holder.pins:
                pins[slots] += 1
        pieces = [p for c in self.scheduler.prefetcher._cursors.values() for p in c.pieces]
        for piece in pieces:
            if not piece.waiting:
                for slots in piece.pins:
                    pins[slots] += 1
        pinned = sum(piece.pinned_size for piece in pieces)
        assert self.scheduler.prefetcher._pinned_size == pinned
        for client in self.clients:
            for kept in client.owner.unacknowledged.values():
                for slots in kept.pins:
                    pins[slots] += 1
        assert (pins == cache.pins).all(), "pins are not what is held"
        for user, turns in self.scheduler._order.users.items():
            owners = [client.owner for client in self.clients if client.owner.user is user]
            answers = [kept for owner in owners for kept in owner.unacknowledged.values()]
            granted = [lease for owner in owners for lease in owner.leases.values()]
            assert turns.pinned_size == sum(each.pinned_size for each in answers)
            assert turns.leased_size == sum(each.pinned_size for each in granted)
        assert not cache.pins[state == FREE].any(), "a free slot is pinned"
        # The policy knows every resident, and who has how much.
        policy, bucket_sets = cache.policy, cache.policy.buckets
        assert (bucket_sets.key[state == RESIDENT] != NONE).all(), "a resident nobody would evict"
        assert (cache.pins[bucket_sets.parked] > 0).all(), "parked without a pin"
        found = [
            bucket.held[bucket_sets.key[bucket.held] == key]
            for sets in bucket_sets.of_class
            for bucket_set in sets.values()
            for key, bucket in bucket_set.buckets.items()
        ]
        found.append(np.flatnonzero(bucket_sets.parked))
        missing = np.setdiff1d(np.flatnonzero(state == RESIDENT), np.concatenate(found))
        assert not len(missing), "a resident is in no bucket"
        parked = sum(each.parked for sets in bucket_sets.of_class for each in sets.values())
        assert parked == len(found[-1]), "parked slots are counted wrongly"
        self.entered |= state != FREE
        gone = self.entered & (state != RESIDENT)
        assert (bucket_sets.key[gone] == NONE).all(), "what is gone has a key"
        owners = np.unique(bucket_sets.group[taken]).tolist()
        held_by = {g: int(sizes[bucket_sets.group[taken] == g].sum()) for g in owners}
        assert policy.used == held_by

    def _fetches(self) -> set[Fetch]:
        fetches: set[Fetch] = set()
        for client in self.clients:
            fetches.update(client.owner.waiting.values())
        for load in self.loads.values():
            fetches.update(load.fetches)
        return fetches

    def _leases(self) -> list[GrantedLease]:
        return [lease for client in self.clients for lease in client.owner.leases.values()]

    @property
    def _end(self) -> int:
        return max(shard.base + shard.count for shard in self.shards)

    def check_end(self) -> None:
        """Assert what must hold when everybody has left."""
        assert self.scheduler.idle and not self.loads
        assert not self.cache.pins.any()
        assert self.scheduler.pins.leased_size == 0
        assert not (self.cache.state == LOADING).any()
        assert not (self.cache.state == FAILED).any()
        assert all(shard.sessions == 0 for shard in self.shards)
        for shard in self.shards:
            assert self.cache.allocator.evict(shard.base, shard.base + shard.count)
            assert self.cache.drop(shard.base)
        assert not self.scheduler.prefetcher._cursors
        assert not self.next_use.jobs, "a progress of a session that ended is still there"
        # 0: of adopted samples, whose shards have no group.
        groups = {group for sets in self.cache.policy.buckets.of_class for group in sets}
        assert groups <= {0}, "the buckets of a group without shards are still there"
        assert self.arena.used_size == 0
        self.resizing.step(self.now)
        assert not self.resizing.held_size
        assert (self.arena.slab_class[: self.arena.open_count] == -1).all()
        assert not self.slot_bytes

    def close(self) -> None:
        self.directory.close()
        self.memory.close()
        self.page.close()


@dataclass(eq=False)
class DirectReply:
    """As engine.io.DirectReply: goes to the client without the session."""

    client: Client
    ready: protocol.Ready
    left: int = 1
    failed: bool = False
    sent: bool = False

    def ended(self, *, failed: bool) -> None:
        self.failed |= failed
        self.left -= 1
        if self.left == 0 and not self.failed and not self.client.dead:
            self.sent = True
            self.client.direct_replies += 1
            self.client._got(self.ready)

    def arm(self) -> None:
        self.left -= 1


@dataclass(eq=False)
class Client:
    """A client and its session.

    Args:
        orders: batches of indices to be read, in turn.
        pace_s: how long it takes over an answer.
        acknowledges: whether it ever does.
        lease_rate: how many of its requests are leases; those it keeps for `lease_s`.
        lifetime_s: when it dies.
        announces: "nothing", "the truth", "a lie", or "silently": the truth, without reporting.
    """

    world: World
    batches: list[Int64s]
    pace_s: float = 0.01
    acknowledges: bool = True
    lease_rate: float = 0.0
    lease_s: float = 0.05
    in_flight: int = 2
    lifetime_s: float | None = None
    announces: str = "nothing"
    job: str = "simulated"
    shards: list[Shard] = field(default_factory=list)
    asked: dict[int, tuple[float, Int64s, bool]] = field(default_factory=dict)
    served: int = 0
    readable: int = 0
    hits: int = 0
    errors: int = 0
    direct_replies: int = 0
    """Answers that came without the session's doing."""
    waited_s: list[float] = field(default_factory=list)
    dead: bool = False
    done: bool = False
    tag: int = 0
    due: list[int] = field(default_factory=list)
    mapped: list[int] = field(default_factory=list)
    """Domains whose memory it has."""

    def __post_init__(self) -> None:
        self.shards = self.shards or self.world.shards
        self.world.clients.append(self)
        self._decoder = protocol.Decoder(protocol.FROM_SERVER)
        self._to_daemon = protocol.Decoder(protocol.FROM_CLIENT)
        session: Any = Session
        self.session = session(
            self.world.state,
            Peer(1, 1, 1),
            self._got,
            self._open,
            direct_reply=partial(DirectReply, self),
            later=lambda steps: take_all(steps, self.world.now),
        )
        self.owner: Requester = self.session.owner
        self._tell(protocol.Hello({**HELLO, "job": self.job}))
        self._tell(protocol.Open(self._next_tag(), WHAT, bytes(40)))
        if self.lifetime_s is not None:
            self.world.at(self.world.now + self.lifetime_s, self.leave)

    def _next_tag(self) -> int:
        self.tag += 1
        return self.tag

    def _tell(self, message: Message) -> None:
        if self.session.awaits_direct_reply:
            self.world.hear()
        for received in self._to_daemon.feed(protocol.encode(message)):
            take_all(self.session.receive(received, self.world.now), self.world.now)

    def _open(self, tag: int, _: object) -> None:
        self.world.catalog.hold(self.shards, 1)
        shards: Any = self.shards
        self.session.datasets.opened(tag, [shard.path for shard in shards], shards)

    def _got(self, sent: Message | MemoryMessage) -> None:
        assert not self.dead, "the dead get an answer"
        message = sent
        if isinstance(sent, MemoryMessage):
            message = sent.message
            self._map(sent)
        for received in self._decoder.feed(protocol.encode(message)):
            match received:
                case protocol.Opened():
                    assert self.mapped, "a data set without its memory"
                    self.dataset = received.dataset
                    counts = np.array([shard.count for shard in self.shards])
                    bases = np.array([shard.base for shard in self.shards])
                    self._numbers = np.concatenate(
                        [np.arange(b, b + c) for b, c in zip(bases, counts, strict=True)]
                    )
                    if self.announces != "nothing" and self.batches:
                        self._announce()
                    for _ in range(self.in_flight):
                        self.world.at(self.world.now, self.ask)
                case protocol.Ready():
                    self._ready(received)
                case protocol.Welcome():
                    pass
                case _:
                    raise AssertionError(f"unexpected: {received}")

    def _map(self, sent: MemoryMessage) -> None:
        """Check the memory that comes with a message."""
        if isinstance(sent.message, protocol.Welcome):
            (page,) = sent.files
            epoch = int.from_bytes(os.pread(page.fd, 8, 0), "little")
            assert epoch == sent.message.about["epoch"], "the page of another daemon"
            return
        assert isinstance(sent.message, protocol.Opened)
        assert not self.mapped, "memory that the client has comes again"
        self.mapped = protocol.unpack_tags(sent.message.domains)
        assert self.mapped == [self.world.domain.serial]
        assert sent.files == list(self.world.domain.files)

    def _announce(self) -> None:
        order = np.concatenate(self.batches)
        if self.announces == "a lie":
            order = self.world.random.sample(range(len(self._numbers)), len(self._numbers))
        packed = protocol.pack_order(np.array(order))
        what = {"name": None, "replacement": True}
        for epoch in (0, 1):
            self._tell(
                protocol.Order(self._next_tag(), self.dataset, epoch, len(order), 0, packed, what)
            )

    def ask(self) -> None:
        """Send the next request, hits apart as a client does."""
        while not self.dead:
            if not self.batches:
                if not self.asked and not self.done:
                    self.done = True
                    self.world.at(self.world.now + self.pace_s, self.leave)
                return
            batch = self.batches.pop(0)
            missing = np.array(
                [i for i in batch.tolist() if int(self._numbers[i]) not in self.world.slot_bytes],
                np.int64,
            )
            self.hits += len(batch) - len(missing)
            self.served += len(batch) - len(missing)
            if len(missing):
                break
        else:
            return
        tag = self._next_tag()
        lease = self.world.random.random() < self.lease_rate
        self.asked[tag] = self.world.now, missing, lease
        packed = protocol.pack_indices(missing)
        if lease:
            self._tell(protocol.Lease(tag, self.dataset, packed))
        else:
            due, self.due = protocol.pack_tags(self.due), []
            self._tell(protocol.Get(tag, self.dataset, packed, due, 0, 0))

    def _ready(self, ready: protocol.Ready) -> None:
        if ready.tag not in self.asked and self.announces != "nothing":
            return
        assert ready.tag in self.asked, "a second answer to one request"
        world = self.world
        since, indices, lease = self.asked.pop(ready.tag)
        waited = world.now - since
        self.waited_s.append(waited)
        assert 0 <= ready.count <= len(indices)
        failed = {wire[0] for wire in ready.errors}
        for wire in ready.errors:
            assert 0 <= wire[0] < ready.count
            assert int(indices[wire[0]]) == wire[4], "an error names another sample"
        for position in range(ready.count):
            if position not in failed:
                number = int(self._numbers[indices[position]])
                assert number in world.slot_bytes, "an announced sample is not readable"
        self.errors += len(failed)
        self.served += ready.count
        if self.announces in ("the truth", "a lie") and not lease:
            self.world.at(self.world.now, lambda: self._report(self.served))
        rest = indices[ready.count :]
        if len(rest) and lease:
            # What cannot be leased is copied.
            self.served += len(rest)
        elif len(rest):
            assert ready.count > 0, "a GET was answered without progress"
            self.batches.insert(0, rest)
        if lease:
            world.at(world.now + self.lease_s, lambda: self._release(ready.tag))
        elif self.acknowledges:
            world.at(world.now + self.pace_s, lambda: self._copied(ready.tag))
        world.at(world.now + self.pace_s, self.ask)

    def _report(self, position: int) -> None:
        if not self.dead:
            self._tell(protocol.Reached(self.dataset, 0, position))

    def _release(self, tag: int) -> None:
        if not self.dead:
            self._tell(protocol.Release(protocol.pack_tags([tag])))

    def _copied(self, tag: int) -> None:
        self.due.append(tag)
        if not self.dead and (not self.batches or self.world.random.random() < 0.2):
            due, self.due = protocol.pack_tags(self.due), []
            self._tell(protocol.Tell(0, 0, 0, due))

    def leave(self) -> None:
        """Die, or end."""
        if not self.dead:
            self.dead = True
            take_all(self.session.leave(self.world.now), self.world.now)


def take_all(steps: Steps | None, now: float) -> None:
    """Take the steps of a session, all at this time; nothing waits for a bound here."""
    if steps is not None:
        with suppress(StopIteration):
            assert next(steps) is None
            while True:
                assert steps.send(now) is None


def batches_of(
    chooser: random.Random, count: int, total: int, largest: int, *, repeats: bool = True
) -> list[Int64s]:
    """Random batches; with repeats inside a batch now and then."""
    batches = []
    while total > 0:
        size = min(total, chooser.randint(1, largest))
        chosen = [chooser.randrange(count) for _ in range(size)]
        if repeats and chooser.random() < 0.2:
            chosen += chosen[: size // 2]
        batches.append(np.array(chosen, np.int64))
        total -= size
    return batches


def random_lengths(chooser: random.Random, arena_size: int) -> list[Int64s]:
    """A few shards of one character each; together usually larger than the arena."""
    shards = []
    for _ in range(chooser.randint(1, 4)):
        kind = chooser.choice(("tiny", "small", "mixed", "large", "huge", "lone giant"))
        match kind:
            case "tiny":
                lengths = [chooser.randint(0, 200) for _ in range(chooser.randint(1, 3000))]
            case "small":
                lengths = [chooser.randint(1500, 6000) for _ in range(chooser.randint(1, 800))]
            case "mixed":
                lengths = [int(2 ** chooser.uniform(0, 18)) for _ in range(chooser.randint(1, 300))]
            case "large":
                size = arena_size // 4
                lengths = [chooser.randint(size // 4, size) for _ in range(chooser.randint(1, 20))]
            case "huge":
                size = arena_size
                lengths = [
                    chooser.randint(size // 3, size + size // 8)
                    for _ in range(chooser.randint(1, 6))
                ]
            case _:
                lengths = [chooser.randint(0, 50) for _ in range(500)]
                lengths[chooser.randrange(500)] = arena_size // 3
        shards.append(np.array(lengths, np.int64))
    return shards


def random_world(
    seed: int,
    cache_type: Callable[..., Cache] = Cache,
    lengths_of: Callable[[random.Random, int], list[Int64s]] = random_lengths,
    begin: Callable[[World], object] = lambda world: None,
    arena_type: Callable[..., Arena] = Arena,
) -> World:
    """Return a world with its clients. Args: begin: what happens before they come."""
    chooser = random.Random(seed)
    arena_size = chooser.choice((1, 1, 2, 5)) * MIB + chooser.choice((0, 123_456))
    world = World(
        seed,
        arena_size,
        lengths_of(chooser, arena_size),
        cache_type=cache_type,
        arena_type=arena_type,
        failure_rate=chooser.choice((0, 0, 0.02, 0.3)),
        slowest_s=chooser.choice((0.001, 0.02, 0.3)),
        most_reads=chooser.choice((4, 64, 512)),
        largest_arena=2 * arena_size,
    )
    begin(world)
    if chooser.random() < 0.5:
        for _ in range(chooser.randint(1, 20)):
            size = chooser.randint(world.arena.smallest_size, world.arena.limit)
            world.at(world.now + chooser.uniform(0, 3), partial(world.resize, size))
    for _ in range(chooser.randint(1, 6)):
        shards = [s for s in world.shards if chooser.random() < 0.7] or world.shards
        count = sum(shard.count for shard in shards)
        Client(
            world,
            batches_of(
                chooser, count, chooser.choice((20, 200, 600)), chooser.choice((3, 40, 300))
            ),
            pace_s=chooser.choice((0, 0.001, 0.02, 0.5)),
            acknowledges=chooser.random() < 0.7,
            lease_rate=chooser.choice((0, 0, 0.3, 1)),
            lease_s=chooser.choice((0.01, 1, 1e9)),
            in_flight=chooser.randint(1, 4),
            lifetime_s=chooser.choice((None, None, 0.05, 1, 30)),
            announces=chooser.choice(("nothing", "nothing", "the truth", "a lie", "silently")),
            job=chooser.choice(("one", "another", "third")),
            shards=shards,
        )
    return world


def simulate(seed: int, cache_type: Callable[..., Cache] = Cache) -> World:
    """Run one world from beginning to end."""
    world = random_world(seed, cache_type)
    try:
        world.check()
        # Leases for ever end when their holders leave, which they do when they have all they want.
        world.run()
        for client in world.clients:
            assert client.dead and (client.done or client.lifetime_s is not None), "never served"
            assert all(
                waited <= GIVE_UP_S + 2 * world.disk_delay_s + 2 for waited in client.waited_s
            )
        world.check_end()
    finally:
        world.close()
    return world


@pytest.mark.parametrize("seed", FEW)
def test_invariants_hold_through_random_lives(seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize(
    "seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in FUZZ_SEEDS[:100])]
)
def test_slots_over_several_slabs_hold_through_random_lives(seed: int) -> None:
    """All shards have samples of one size, and a run may have a third of an arena."""

    def of_one_size(chooser: random.Random, arena_size: int) -> list[Int64s]:
        slab_size = Arena(arena_size).slab_size
        sizes = [slab_size * 2 // 5 - 4096]  # five in two slabs
        sizes += [chooser.randint(slab_size // 9, slab_size // 2) for _ in range(3)]
        lengths = random_lengths(chooser, arena_size)
        return [np.full(len(run), size) for run, size in zip(lengths, sizes, strict=False)]

    longer_runs = partial(Arena, run_share=3, run_waste=0.0)
    world = random_world(seed, lengths_of=of_one_size, arena_type=longer_runs)
    try:
        assert world.arena.longest_run > 1 or world.arena.open_count < 6
        world.run()
        world.check_end()
    finally:
        world.close()


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", FUZZ_SEEDS)
def test_invariants_hold_through_many_random_lives(seed: int) -> None:
    simulate(seed)


# ---- clients that break the rules ---------------------------------------------------------------


def wild_message(chooser: random.Random, dataset: int) -> Message:
    """Something that the codec lets through: tags twice, indices nowhere, sizes that are none."""
    tag = chooser.choice(
        (0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 1 << 32, -1) if chooser.random() < 0.1 else range(1, 10_000)
    )
    number = dataset if chooser.random() < 0.97 else 77
    top = 900 if chooser.random() < 0.02 else 800
    indices = protocol.pack_indices(
        np.array([chooser.randrange(top) for _ in range(chooser.randint(0, 30))], np.int64)
    )
    tags = protocol.pack_tags([chooser.randrange(10_000) for _ in range(chooser.randint(0, 300))])
    if chooser.random() < 0.01:
        indices, tags = indices[:-1] + b"x", tags + b"x"
    return chooser.choice(
        (
            protocol.Get(tag, number, indices, tags, chooser.randrange(1 << 63), 5),
            protocol.Get(tag, number, indices, b"", 1, 1),
            protocol.Lease(tag, number, indices),
            protocol.Release(tags),
            protocol.Tell(0, chooser.choice((0, 1, (1 << 64) - 1)), 3, tags),
            protocol.Status(tag),
            protocol.Order(
                tag,
                number,
                0,
                chooser.choice((30, 800, 10**12)),
                0,
                indices[: 4 * 30],
                {"name": None, "replacement": chooser.random() < 0.9},
            ),
            protocol.Seen(number, indices[: len(indices) // 8 * 4]),
            protocol.Reached(number, chooser.randrange(3), chooser.randrange(900)),
            protocol.Close(chooser.choice((0, 77, 77, 77, dataset))),
            protocol.Open(tag, WHAT, bytes(40)),
            protocol.Files(tag, bytes(2)),
        )
    )


@pytest.mark.check
@pytest.mark.parametrize("seed", range(15))
def test_a_client_that_breaks_the_rules_harms_only_itself(seed: int) -> None:
    chooser = random.Random(seed)
    world = World(
        seed,
        MIB,
        [np.full(400, 3000, np.int64), np.full(400, 90, np.int64)],
        failure_rate=0.05,
        most_reads=16,
    )
    honest = Client(world, batches_of(chooser, 800, 300, 20), pace_s=0.01)
    try:
        for _ in range(5):
            heard: list[Message | MemoryMessage] = []
            session: Any = Session

            openings: list[int] = []
            wild = session(
                world.state,
                Peer(1, 1, 1),
                heard.append,
                lambda tag, _, to=openings: to.append(tag),
                user=User(1, trusted=False),
                later=lambda steps: take_all(steps, world.now),
            )
            held = Client(world, [], in_flight=0)
            held.leave()
            held.owner = wild.owner  # so that its pins are counted
            for opening in (
                protocol.Hello({**HELLO, "job": "wild"}),
                protocol.Open(1, WHAT, bytes(40)),
            ):
                take_all(wild.receive(opening, world.now), world.now)
            with suppress(ProtocolError):
                for _ in range(chooser.randint(1, 80)):
                    while openings:
                        world.catalog.hold(world.shards, 1)
                        shards: Any = world.shards
                        wild.datasets.opened(
                            openings.pop(), [shard.path for shard in shards], shards
                        )
                    take_all(wild.receive(wild_message(chooser, 1), world.now), world.now)
                    world.check()
                    if world.events and chooser.random() < 0.5:
                        world.now, _, what = heapq.heappop(world.events)
                        what()
                        world.check()
            take_all(wild.leave(world.now), world.now)
            world.check()
            for message in heard:
                protocol.encode(message.message if isinstance(message, MemoryMessage) else message)
        world.run()
        assert honest.done
        world.check_end()
    finally:
        world.close()


# ---- canaries: what is broken on purpose is caught ---------------------------------------------


class ForgetsPins(Cache):
    """Does not pin what it finds."""

    def advance(self, fetch: Fetch, count: int, size: int) -> Load | None:
        load = super().advance(fetch, count, size)
        if load is None and fetch.pins:
            self.pins[fetch.pins[-1]] -= 1
        return load


class EvictsWhatLoads(Allocator):
    """Takes slots that the disk still writes into."""

    def _from_policy(
        self, size_class: int, count: int, group: int, latest: float | None
    ) -> tuple[Int64s, int]:
        loading = np.flatnonzero(self._state == LOADING)
        chosen = loading[self._classes(loading) == size_class][:1]
        self._evict(chosen)
        more, others = super()._from_policy(size_class, count - len(chosen), group, latest)
        return np.concatenate((chosen, more)), others


class PublishesFailures(Cache):
    """Believes in samples that the disk could not read."""

    def _fail(self, load: Load, failures: dict[int, Failure]) -> None:
        self.counters.failed += len(failures)


class LosesSlots(Cache):
    """Does not give back what it cannot use."""

    def _free_failed(self, slot: int) -> None:
        if self.pins[slot] == 0:
            self.state[slot] = FREE


def cache_with(room_type: type[Allocator], *parts: Any) -> Cache:
    """Make a cache whose room is broken."""
    cache = Cache(*parts)
    cache.allocator = room_type(
        cache.arena, cache.shards, cache.slots, cache.policy, cache.retract, cache.counters
    )
    return cache


@pytest.mark.check
@pytest.mark.parametrize(
    "broken",
    (ForgetsPins, EvictsWhatLoads, PublishesFailures, LosesSlots),
    ids=lambda c: c.__name__,
)
def test_the_simulation_catches_a_broken_cache(broken: type[Cache | Allocator]) -> None:
    cache_type = broken if issubclass(broken, Cache) else partial(cache_with, broken)
    caught = 0
    for seed in SEEDS:
        try:
            simulate(seed, cache_type)
        except (AssertionError, KeyError, IndexError, ValueError):
            caught += 1
            if caught == 2:
                return
    raise AssertionError("the invariants do not notice")


# ---- what the policy and the turns promise ------------------------------------------------------


def hit_rate_of_an_epoch(lengths: Int64s, arena_size: int, seed: int) -> float:
    """One job that visits every sample once an epoch; the last of three epochs."""
    world = World(seed, arena_size, [lengths])
    chooser = np.random.default_rng(seed)
    try:
        hits = 0
        for _ in range(3):
            order = chooser.permutation(len(lengths))
            client = Client(world, [order[k : k + 64] for k in range(0, len(order), 64)], pace_s=0)
            keeper = Client(world, [], in_flight=0)
            world.run(check=False)
            assert client.done
            hits = client.hits
            keeper.dead = True
        return hits / len(lengths)
    finally:
        world.close()


def test_one_job_over_twice_the_cache_hits_as_often_as_the_cache_is_large() -> None:
    lengths = np.full(4000, 8000, np.int64)
    rate = hit_rate_of_an_epoch(lengths, 16 * MIB, seed=1)
    share = 16 * MIB / (8192 * 4000)
    assert 0.85 * share <= rate <= 1.1 * share


def test_samples_larger_than_a_slab_are_kept_as_others_are() -> None:
    lengths = np.full(100, 600_000, np.int64)
    rate = hit_rate_of_an_epoch(lengths, 32 * MIB, seed=2)
    assert rate >= 0.75 * (32 * MIB / (786_432 * 100))


def test_samples_of_mixed_sizes_are_kept_as_others_are() -> None:
    lengths = np.array([2_000 + 97 * (k * 7919 % 1000) for k in range(1000)], np.int64)
    # One order is luck by a tenth.
    rates = [hit_rate_of_an_epoch(lengths, 24 * MIB, seed=seed) for seed in range(1, 9)]
    assert np.mean(rates) >= 0.64 * 24 * MIB / int(lengths.sum())


def test_tiny_requests_are_not_starved_behind_a_huge_one() -> None:
    world = World(5, 8 * MIB, [np.full(40_000, 4000, np.int64)], slowest_s=0.002, most_reads=256)
    try:
        huge = Client(world, [np.arange(k, k + 10_000) for k in range(0, 40_000, 10_000)], pace_s=0)
        tiny = Client(world, [np.array([k * 400]) for k in range(60)], pace_s=0.001, in_flight=1)
        world.run(check=False)
        assert huge.done and tiny.done
        assert len(tiny.waited_s) > 20 and tiny.direct_replies > 20
        assert sorted(tiny.waited_s)[len(tiny.waited_s) // 2] < 0.05
        assert max(tiny.waited_s) < 1.5
    finally:
        world.close()


def test_requests_of_other_users_took_direct_replies_away() -> None:
    """READY came from the loop, which had much to do for the others, and so could be late."""
    world = World(5, 8 * MIB, [np.full(8000, 4000, np.int64)], slowest_s=0.01, most_reads=1024)
    try:
        clients = [
            Client(world, [np.arange(k, k + 8) for k in range(first, first + 400, 8)], in_flight=1)
            for first in range(0, 8000, 400)
        ]
        world.run(check=False)
        assert all(client.done and client.direct_replies > 20 for client in clients)
    finally:
        world.close()


def test_two_data_sets_of_other_sizes_do_not_take_the_same_slabs_in_turn() -> None:
    count = 1200
    world = World(6, 6 * MIB, [np.full(count, size, np.int64) for size in (16_000, 48_000)])
    chooser = np.random.default_rng(6)
    held: list[int] = []
    try:
        for shard, pace_s, epochs in zip(world.shards, (0.01, 0.02), (12, 6), strict=True):
            orders = [chooser.permutation(count) for _ in range(epochs)]
            batches = [order[k : k + 20] for order in orders for k in range(0, count, 20)]
            Client(world, batches, pace_s=pace_s, in_flight=1, job=shard.path, shards=[shard])
        slow = world.next_use.group_of(world.shards[1].base)

        def look() -> None:
            held.append(world.cache.policy.used.get(slow, 0))
            if len(held) < 400:
                world.at(world.now + 0.01, look)

        world.at(world.now + 2, look)
        world.run(check=False)
        # Once it has its floor it keeps that, within a slab.
        assert min(held) >= 0.8 * world.arena.size / 4
        assert max(held) - min(held) <= world.arena.slab_size
    finally:
        world.close()
