"""ServerState: the parts of a daemon that all sessions share, and how they are connected.

catalog ─ opens shards ─▶ directory, table
scheduler ─ turns ─▶ cache ─ loads ─▶ engines ─ batches ─▶ I/O threads
                       ◀── loaded ─────────┘
"""

from __future__ import annotations

import mmap
import resource
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ffserve import protocol
from ffserve._version import __version__
from ffserve.cache.adoption import Adopted, adopt
from ffserve.cache.arena import Arena
from ffserve.cache.cache import Cache
from ffserve.cache.inventory import Inventory
from ffserve.cache.jobs import JobProgress
from ffserve.cache.next_use import SMALLEST_LIMIT, NextUse
from ffserve.cache.tables import Directory, ShardTable
from ffserve.config import ServerConfig, format_size
from ffserve.dtypes import Int64s
from ffserve.engine.shm import retract
from ffserve.errors import (
    AccessDenied,
    ArenaError,
    FFServeError,
    FormatError,
    ProtocolError,
    ReadError,
)
from ffserve.server.files.catalog import Catalog
from ffserve.server.files.explaining import Explainer
from ffserve.server.files.holding import CatalogTables, OpenSettings
from ffserve.server.files.remote import RemoteFiles
from ffserve.server.files.scrub import Scrubber
from ffserve.server.files.shards import OpenShard
from ffserve.server.life.log import RepeatedLines
from ffserve.server.life.resize import Pages, Resizing
from ffserve.server.life.restart import PAGE_NAME, KeptMemory, terms_of
from ffserve.server.prepared.claims import Claims
from ffserve.server.reading.io import Engines
from ffserve.server.reading.scheduler import Scheduler
from ffserve.server.reading.statistics import Rates, Statistics
from ffserve.server.reading.waiting import JobReads, JobTime, Use
from ffserve.server.users.access import Peer, Rules, Viewer, namespace_marks
from ffserve.server.users.domains import Domains
from ffserve.server.users.shares import Users
from ffserve.system.machine import free_memory, usable_memory
from ffserve.system.memfd import SharedMemory

LARGEST_COUNT = (1 << 63) - 1
"""The largest number that REPORT can carry; only false counters of a client reach it."""
MEMORY_FILES_SHARE = 16
"""Files that prepared samples come through are 1 part in MEMORY_FILES_SHARE of the descriptors."""
MOST_JOBS = 256
"""Jobs whose counters are kept, ended ones included."""
MOST_NAME = 200
"""Characters in the name of a job."""
JOB_COUNTERS, COUNTERS = 4, 7
"""How many counters have rates: `ServerState.counters_of`, `ServerState.counters`."""
MOST_SLOW = 256
"""Files with slow reads that are remembered, the latest."""

RIVAL_SHARE = 16
"""A job whose data take less than 1 part in RIVAL_SHARE of the arena is no rival for memory."""
ORDERS_SHARE = 4
"""Announced orders take at most 1 part in ORDERS_SHARE of the arena's size (SMALLEST_LIMIT at
least) as memory of their own, and at most half of the memory beside the arena."""


@dataclass(slots=True)
class Job:
    """A training run: the counters of all its sessions since it was first seen."""

    name: str
    first_seen: float
    last_seen: float
    user: Viewer
    sessions: int = 0
    hits: int = 0
    hit_size: int = 0
    missed: int = 0
    errors: int = 0
    waited_s: float = 0.0
    """Time between requests and their answers, summed over its sessions."""
    time: JobTime = field(default_factory=JobTime)
    pid: int = 0
    paths: str = ""
    title: str = ""
    """The name that it gave itself."""
    command: str = ""
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.rates = Rates(self.first_seen, JOB_COUNTERS)

    @classmethod
    def greeted(cls, about: dict[str, Any], user: Viewer, now: float) -> Job:
        """Return the job that a HELLO is of. Raises: ProtocolError."""
        name = about.get("job")
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
            raise ProtocolError("invalid HELLO message: no name of a job")
        job = cls(name, now, now, user)
        for key, most in (("title", protocol.MOST_TITLE), ("command", protocol.MOST_COMMAND)):
            text = about.get(key, "")
            if not isinstance(text, str) or len(text) > most:
                raise ProtocolError(
                    f"invalid HELLO message: {key} is no text of at most {most} characters"
                )
            setattr(job, key, text)
        return job


@dataclass(slots=True)
class SlowReads:
    """The slow reads of one file: how many, the seconds that the longest took, when the last one
    ended."""

    count: int = 0
    longest_s: float = 0.0
    last: float = 0.0


class ServerState:
    """The parts of one daemon.

    Args: kept: the memory of a predecessor, which is taken over; None: new memory.
    Raises: ReadError: no memory, or what was kept cannot be mapped.
    """

    def __init__(self, config: ServerConfig, kept: KeptMemory | None = None) -> None:
        self.config = config
        self.started, self.began = time.time(), time.monotonic()
        self.page = SharedMemory(PAGE_NAME, mmap.PAGESIZE, None if kept is None else kept.page)
        epoch = self.page.array[:8].view("<u8")
        if kept is None:
            epoch[0] = secrets.randbits(63)
        self.epoch = int(epoch[0])
        if kept is None:
            self.arena, self.memory = _memory(config)
            self.inventory = self._new_inventory()
            self.directory = Directory()  # as large as the address space lets it be
            self.inventory.header["capacity"] = self.directory.capacity
        else:
            self.arena, self.memory, self.directory = _kept_memory(config, kept)
            self.inventory = kept.inventory
            self.inventory.begin()
        self.directory.next_number = self.inventory.header["next_number"]
        self.table = ShardTable(self.directory)
        self.next_use = NextUse(_orders_limit(self.arena.size))
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
        self.remote = RemoteFiles(config) if config.store_directory else None
        self.engines = self._new_engines()
        self.pages = Pages(self.memory, self.engines, self.arena.size)
        self.domains = Domains(
            self.cache,
            self.memory,
            self.directory,
            self.pages.move,
            self.inventory,
            [] if kept is None else kept.domains,
        )
        self.scheduler = Scheduler(self.cache, self.engines.submit, most_reads=4 * config.depth)
        self.engines.loaded = self.scheduler.loaded
        self.catalog = Catalog(
            CatalogTables(self.directory, self.table, self.cache, self.inventory, self.domains),
            self.engines,
            OpenSettings(_rules(config), config.max_chunk_size_bytes, config.close_after_s),
            lambda base: self.slow_reads.pop(base, None),
            self.remote,
        )
        self.explainer = Explainer(self.catalog)
        self.resizing = Resizing(self.cache, self.scheduler, self.pages)
        self.scrubber = Scrubber(
            self.catalog,
            self.directory,
            self.cache,
            lambda: self.scheduler.idle,
            self.note_failed,
        )
        self.scrubber.rate = config.scrub_rate_bytes
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self.users = Users()
        self.repeated = RepeatedLines()
        self.statistics = Statistics()
        self.rates = Rates(self.began, COUNTERS)
        self.session_count = 0
        """Connected clients."""
        self.most_sessions = config.max_sessions
        """The largest number of them; `Server` lowers it to what the descriptors allow."""
        self.slow_reads: OrderedDict[int, SlowReads] = OrderedDict()
        """By the number of a shard's first sample; the latest last."""
        self.claims = Claims(self.directory, lambda dataset: dataset.preparation.owner)
        self.scheduler.put_ended = lambda request: self.claims.end(
            request.dataset, request.numbers.tolist()
        )
        self.most_memory_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // MEMORY_FILES_SHARE
        self.adopted = None if kept is None else self._adopt(kept)
        """What was taken over."""

    def _new_engines(self) -> Engines:
        config, memory, arena = self.config, self.memory, self.arena
        fetcher = None if self.remote is None else self.remote.fetcher
        tables = self.directory, self.table
        engines = Engines(config.engine, config.depth, memory, arena, *tables, fetcher)
        engines.on_slow = self._slow_disk
        engines.on_right = self._wrong_once
        engines.on_slow_read = self._slow_read
        return engines

    def _new_inventory(self) -> Inventory:
        arena = self.arena
        inventory = Inventory.create(
            arena.slab_size,
            arena.limit // arena.slab_size,
            namespace_marks(),
            terms_of(self.config),
        )
        arena.record(inventory.slabs)
        return inventory

    def _adopt(self, kept: KeptMemory) -> Adopted:
        """Take over shards and samples. Raises: ReadError."""
        self.directory.adopt(kept.runs, self.inventory.get("next_number"))
        self.catalog.adopt(kept.shards)
        numbers = {domain.number for domain in kept.domains}
        inventory = self.inventory
        adopted = adopt(self.cache, inventory.slabs, numbers, inventory.held(), inventory.leased())
        self.cache.policy.returning.update(self.next_use.groups)
        try:
            self.domains.show_slabs()
        except OSError as error:
            raise ReadError(f"cannot map the memory of all users: {error}") from error
        # The samples beyond the size are evicted as by a resize.
        self.pages.follow(self.resizing.size)
        self.resizing.begin(self.resizing.rounded(self.config.arena_size))
        self.inventory.taken_over(namespace_marks())
        return adopted

    def note_refused(self, uid: int, error: FFServeError, now: float) -> None:
        """Note that a client was refused."""
        self.statistics.refused += 1
        self.repeated.warning("refused a client of user %d: %s", uid, error, user=uid, now=now)

    def note_failed(
        self, shard: OpenShard, number: int, error: FFServeError, now: float, uid: int = -1
    ) -> None:
        """Note that a sample is damaged, or cannot be read.

        Args: uid: the user who asked for it, -1: nobody.
        """
        self.statistics.errors[error.code] += 1
        lines = self.repeated
        if isinstance(error, ArenaError):
            lines.warning("no memory for a sample: %s", error, user=uid, key=error.code, now=now)
        elif isinstance(error, FormatError):
            shard.note_damaged(number)
            lines.error("damaged sample: %s", error, user=uid, key=shard.path, now=now)
        else:
            lines.error("cannot read a sample: %s", error, user=uid, key=shard.path, now=now)

    def _slow_disk(self, device: str, seconds: float) -> None:
        self.repeated.warning(
            "slow disk: a read from %s takes %.1f s",
            device,
            seconds,
            key=device,
            now=time.monotonic(),
        )

    def _wrong_once(self, numbers: Int64s) -> None:
        """These samples were right at the second read only. If their file is being overwritten, the
        disk is not to blame."""
        rows = self.table.rows(numbers)
        changed = self.catalog.changed(set(self.table.bases[rows].tolist()))
        rows = rows[~np.isin(self.table.bases[rows], list(changed))]
        self.statistics.corrected += len(rows)
        for engine in np.unique(self.table.engines[rows]).tolist():
            device = self.engines.device_of(engine)
            self.repeated.warning(
                "%s gave wrong bytes, which were right when they were read again: check the disk, "
                "its cable and the memory",
                device,
                key=device,
                now=time.monotonic(),
            )

    def _slow_read(self, numbers: Int64s, seconds: float) -> None:
        """A read of these samples was slow."""
        table, now = self.table, time.monotonic()
        for base in np.unique(table.bases[table.rows(numbers)]).tolist():
            slow = self.slow_reads.setdefault(base, SlowReads())
            slow.count += 1
            slow.longest_s, slow.last = max(slow.longest_s, seconds), now
            self.slow_reads.move_to_end(base)
        while len(self.slow_reads) > MOST_SLOW:
            self.slow_reads.popitem(last=False)

    def _retract(self, firsts: Int64s, counts: Int64s, slots: Int64s, sizes: Int64s) -> None:
        retract(
            self.directory.entries_memory.address,
            firsts,
            counts,
            slots.view(np.uint64),
            sizes.view(np.uint64),
        )

    def job(self, name: str, now: float, user: Viewer) -> Job:
        """Return a user's job of this name; create it if it is new. If a job of another user has
        the name, it gets another."""
        while (job := self.jobs.get(name)) is not None and job.user != user:
            name += f" ({user})"
        if job is None:
            job = self.jobs[name] = Job(name, now, now, user)
            for old in [j for j in self.jobs.values() if not j.sessions and j is not job]:
                if len(self.jobs) <= MOST_JOBS:
                    break
                del self.jobs[old.name]
        return job

    def join(self, greeted: Job, peer: Peer, now: float) -> Job:
        """Return the job to which another session belongs from now on.

        Args: greeted: as its HELLO said.
        """
        job = self.job(greeted.name, now, greeted.user)
        job.sessions += 1
        job.pid = job.pid or peer.pid
        job.title, job.command = job.title or greeted.title, job.command or greeted.command
        return job

    def counters_of(self, job: Job) -> tuple[int, ...]:
        """Return the counters of a job that have rates: hits, misses, bytes of both."""
        reads = self.scheduler.reads_of.get(job.name)
        return job.hits, job.missed, job.hit_size, 0 if reads is None else reads.size

    def counters(self) -> tuple[int, ...]:
        """Return those of all: hits, misses, bytes of hits and of reads, reads, evicted samples,
        errors."""
        statistics, cache = self.statistics, self.cache.counters
        sizes = statistics.hit_size, self.engines.read_size
        failed = statistics.errors.total()
        return (
            *(statistics.hits, statistics.missed, *sizes),
            *(cache.blocks_read, cache.evicted, failed),
        )

    def measure(self, now: float) -> Iterator[None]:
        """Compute where the time of jobs goes and what their rates are, in steps."""
        self.rates.note(now, self.counters())
        data_sets: defaultdict[str, list[JobProgress]] = defaultdict(list)
        memory = []
        for progress in self.next_use.jobs:
            data_sets[progress.job].append(progress)
            used_size = self.cache.policy.used.get(progress.group, 0)
            memory.append((used_size, progress.job, progress.group))
        memory = [row for row in memory if row[0] >= self.arena.size // RIVAL_SHARE]
        memory.sort(reverse=True)
        yield None
        for job in list(self.jobs.values()):
            job.rates.note(now, self.counters_of(job))
            if not job.time.idle:
                reads = self.scheduler.reads_of.get(job.name) or JobReads()
                job.time.step(now, reads, self._use_of(job, data_sets[job.name], memory, now))
            yield None

    def _use_of(
        self, job: Job, data_sets: list[JobProgress], memory: list[tuple[int, str, int]], now: float
    ) -> Use:
        """Args: memory: bytes, job and group of jobs that may be rivals, the largest first."""
        payload_size = sum(each.payload_size for each in data_sets)
        count = sum(each.sample_count for each in data_sets)
        window = sum(self.scheduler.prefetcher.window(each, now) for each in data_sets)
        used_size = (job.hits + job.missed + window) * payload_size // max(count, 1)
        groups = {each.group for each in data_sets}
        others = [row for row in memory if row[1] != job.name]
        # Jobs of one group share what they have; any other takes all that it has.
        rival = min(others, key=lambda row: row[2] in groups, default=None)
        fits = min(self.arena.size / max(payload_size, 1), 1.0)
        return Use(used_size, payload_size, fits, None if rival is None else rival[1])

    def resize(self, size: int, peer: Peer) -> None:
        """Begin to resize the arena for a client; as `resize_arena`.

        Raises: AccessDenied: the peer is no administrator.
        """
        if not peer.is_administrator:
            raise AccessDenied(
                f"user {peer.uid} may not resize the arena",
                hint="run this as root or as the user of the daemon, and not in a container other "
                "than the daemon's",
            )
        self.resize_arena(size)

    def resize_arena(self, size: int) -> None:
        """Begin to resize the arena.

        Raises:
            UsageError: the arena cannot have that size.
            ReadError: too little memory is free, or it cannot be told how much is.
        """
        size = self.resizing.rounded(size)
        more = size - max(self.pages.populated, self.arena.used_size)
        try:
            free = free_memory()
        except OSError as error:
            raise ReadError(
                f"cannot tell how much memory is free: {error.strerror}",
                hint="raise the limit on open files (ulimit -n)",
            ) from error
        if size > self.arena.size and more > free:
            raise ReadError(
                f"an arena of {format_size(size)} needs another {format_size(more)}, but only "
                f"{format_size(free)} of memory are free",
                hint="choose a smaller size, or free memory",
            )
        self.next_use.most_size = _orders_limit(size)
        self.resizing.begin(size)
        self.resizing.step(time.monotonic())

    def reconfigure(self, config: ServerConfig) -> None:
        """Follow other settings, without losing what is in memory.

        Args: config: it differs from the present one only in what can change (`config.LIVE`).
        Raises: UsageError, ReadError: the arena cannot have that size. Then nothing has changed.
        """
        before = self.config
        if config.arena_size_bytes != before.arena_size_bytes:
            self.resize_arena(config.arena_size)
        self.config = config
        self.scrubber.rate = config.scrub_rate_bytes
        same = (config.roots, config.file_systems) == (before.roots, before.file_systems)
        rules = None if same else _rules(config)
        self.catalog.reconfigure(rules, config.max_chunk_size_bytes, config.close_after_s)

    def about(self) -> dict[str, Any]:
        """Return the content of WELCOME that is the same for all sessions."""
        return {
            "server": f"ffserve {__version__}",
            "epoch": self.epoch,
            "arena_size": self.memory.size,
            "capacity": self.directory.capacity,
            "max_get": protocol.MAX_GET_COUNT,
            "payload": "shared",
            "orders": True,
            "generation": self.inventory.get("generation"),
            "times": True,
            "prepared": True,
            "remote": [] if self.remote is None else self.remote.protocols,
        }

    def close(self) -> None:
        """End the I/O threads and close the files. Shared memory goes with the process."""
        self.pages.stop()
        self.explainer.close()
        self.engines.close()
        self.catalog.shutdown()


def _rules(config: ServerConfig) -> Rules:
    return Rules(config.roots, config.file_systems, config.common)


def _kept_memory(config: ServerConfig, kept: KeptMemory) -> tuple[Arena, SharedMemory, Directory]:
    """Return what a predecessor had. Raises: ReadError."""
    arena = Arena(config.arena_size, kept.limit, kept.slab_size)
    files = kept.domains[0].files
    memory = SharedMemory("ffserve-arena", arena.limit, files[0])
    return arena, memory, Directory(kept.inventory.get("capacity"), files[1:])


def _orders_limit(arena_size: int) -> int:
    left = max(usable_memory() - arena_size, 0)
    return min(max(SMALLEST_LIMIT, arena_size // ORDERS_SHARE), left // 2)


def _memory(config: ServerConfig) -> tuple[Arena, SharedMemory]:
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
