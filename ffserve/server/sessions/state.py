"""ServerState: the parts of a daemon that all sessions share, and how they are connected.

catalog ─ opens shards ─▶ directory, table
scheduler ─ turns ─▶ cache ─ loads ─▶ engines ─ batches ─▶ I/O threads
                       ◀── ended ──────────┘
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ffserve import protocol
from ffserve._version import __version__
from ffserve.cache.adoption import adopt
from ffserve.cache.cache import Load
from ffserve.config import ServerConfig
from ffserve.dtypes import Int64s
from ffserve.errors import AccessDenied, ReadError
from ffserve.server.files.catalog import Catalog
from ffserve.server.files.charges import TableAccounts
from ffserve.server.files.explaining import Explainer
from ffserve.server.files.holding import CatalogTables, OpenSettings
from ffserve.server.files.remote import RemoteFiles
from ffserve.server.files.scrub import Scrubber
from ffserve.server.life.daemon_memory import DaemonMemory, tables_limit
from ffserve.server.life.resize import Pages, Resizing
from ffserve.server.life.restart import KeptMemory
from ffserve.server.prepared.claims import Claims
from ffserve.server.reading.engines import Engines
from ffserve.server.reading.scheduler import Scheduler
from ffserve.server.reading.statistics import Statistics
from ffserve.server.sessions.job_table import JobTable
from ffserve.server.status.faults import Faults
from ffserve.server.users.access import Rules
from ffserve.server.users.domains import Domains
from ffserve.server.users.peers import Peer, account_of, namespace_marks
from ffserve.server.users.shares import Users


class EventLoop(Protocol):
    """The interface of the loop that the state needs; `Server` has it."""

    def arm(self) -> None:
        """Set the timers for waiting requests and work."""
        ...

    def pump_soon(self) -> None:
        """Let the scheduler give turns when the loop has looked for messages."""
        ...

    def end(self) -> None:
        """End the daemon."""
        ...


@dataclass(slots=True)
class ReadPath:
    """Scheduling and I/O."""

    engines: Engines
    scheduler: Scheduler


@dataclass(slots=True)
class ServedFiles:
    """Open files. remote: None if there is no store for remote files."""

    catalog: Catalog
    explainer: Explainer
    scrubber: Scrubber
    remote: RemoteFiles | None


@dataclass(slots=True)
class Clients:
    """Connected clients. most: the largest number of them; `Server` lowers it to what the
    descriptors allow."""

    users: Users
    most: int
    count: int = 0


class ServerState:
    """The parts of one daemon.

    Args: kept: the memory of a predecessor, which is taken over; None: new memory.
    Raises: ReadError: no memory, or what was kept cannot be mapped.
    """

    def __init__(self, config: ServerConfig, kept: KeptMemory | None = None) -> None:
        self.config = config
        self.started, self.began = time.time(), time.monotonic()
        self._loop: EventLoop | None = None
        self.memory = memory = DaemonMemory(config, kept)
        self.statistics = Statistics()
        self.faults = Faults(self.statistics, memory.table)
        remote = RemoteFiles(config) if config.store_directory else None
        engines = Engines(
            config.engine,
            config.depth,
            memory.mapping,
            memory.arena,
            memory.directory,
            memory.table,
            self,
            None if remote is None else remote.fetcher,
        )
        scheduler = Scheduler(memory.cache, engines.submit, most_reads=4 * config.depth)
        self.reading = ReadPath(engines, scheduler)
        self.pages = Pages(memory.mapping, engines, memory.arena.size)
        self.resizing = Resizing(memory.cache, scheduler, self.pages)
        self.domains = Domains(
            memory.cache,
            memory.mapping,
            memory.directory,
            self.pages.move,
            memory.inventory,
            [] if kept is None else kept.domains,
        )
        catalog = Catalog(
            CatalogTables(
                memory.directory,
                memory.table,
                memory.cache,
                memory.inventory,
                self.domains,
                TableAccounts(tables_limit(memory.arena.size)),
            ),
            engines,
            OpenSettings(_rules(config), config.max_chunk_size_bytes, config.close_after_s),
            self.faults.forget,
            remote,
        )
        scrubber = Scrubber(
            catalog, memory.directory, memory.cache, lambda: scheduler.idle, self.faults.failed
        )
        scrubber.rate = config.scrub_rate_bytes
        self.files = ServedFiles(catalog, Explainer(catalog), scrubber, remote)
        self.claims = Claims(
            memory.directory, lambda dataset: account_of(dataset.preparation.owner)
        )
        scheduler.put_ended = lambda request: self.claims.end(
            request.dataset, request.numbers.tolist()
        )
        self.clients = Clients(Users(), config.max_sessions)
        self.jobs = JobTable(memory.cache, scheduler, engines, self.statistics, self.began)
        if kept is not None:
            self._adopt(kept)

    def _adopt(self, kept: KeptMemory) -> None:
        """Take over shards and samples. Raises: ReadError."""
        memory = self.memory
        memory.directory.adopt(kept.runs, memory.inventory.get("next_number"))
        self.files.catalog.adopt(kept.shards)
        numbers = {domain.number for domain in kept.domains}
        inventory = memory.inventory
        adopted = adopt(
            memory.cache, inventory.slabs, numbers, inventory.held(), inventory.leased()
        )
        memory.cache.policy.returning.update(memory.next_use.groups)
        try:
            self.domains.show_slabs()
        except OSError as error:
            raise ReadError(f"cannot map the memory of all users: {error}") from error
        # The samples beyond the size are evicted as by a resize.
        self.pages.follow(self.resizing.size)
        self.resizing.begin(self.resizing.rounded(self.config.arena_size))
        inventory.taken_over(namespace_marks())
        memory.adopted = adopted

    def attach(self, loop: asyncio.AbstractEventLoop, server: EventLoop) -> None:
        """Serve from this loop."""
        self._loop = server
        self.reading.engines.attach(loop)
        self.files.explainer.attach(loop)
        self.reading.scheduler.wake = server.pump_soon

    # ---- what becomes of reads: see `ReadEvents` ----------------------------------------------

    def ended(self, loads: list[Load], now: float) -> None:
        """Take loads that have ended."""
        assert self._loop is not None
        scheduler = self.reading.scheduler
        for load in loads:
            scheduler.loaded(load, load.failures, now)
        scheduler.go_on(now)
        self._loop.arm()

    def broken(self) -> None:
        """End the daemon, since an engine has broken."""
        assert self._loop is not None
        self._loop.end()

    def slow_disk(self, device: str, seconds: float, now: float) -> None:
        """Note that a read from a device takes this many seconds."""
        self.faults.slow_disk(device, seconds, now)

    def slow_read(self, numbers: Int64s, seconds: float, now: float) -> None:
        """Note that the reads of these samples took this many seconds."""
        self.faults.slow_read(numbers, seconds, now)

    def corrected(self, numbers: Int64s, now: float) -> None:
        """Note samples that were right at the second read only. If their file is being overwritten,
        the disk is not to blame."""
        table = self.memory.table
        rows = table.rows(numbers)
        changed = self.files.catalog.changed(set(table.bases[rows].tolist()))
        rows = rows[~np.isin(table.bases[rows], list(changed))]
        devices = map(self.reading.engines.device_of, np.unique(table.engines[rows]).tolist())
        self.faults.corrected(len(rows), list(devices), now)

    # ---- settings -----------------------------------------------------------------------------

    def resize(self, size: int, peer: Peer, now: float) -> None:
        """Begin to resize the arena for a client; as `Resizing.start`.

        Raises: AccessDenied: the peer is no administrator.
        """
        if not peer.is_administrator:
            raise AccessDenied(
                f"user {peer.uid} may not resize the arena",
                hint="run this as root or as the user of the daemon, and not in a container other "
                "than the daemon's",
            )
        self.resizing.start(size, now)

    def reconfigure(self, config: ServerConfig, now: float) -> None:
        """Follow other settings, without losing what is in memory.

        Args: config: it differs from the present one only in what can change (`config.LIVE`).
        Raises: UsageError, ReadError: the arena cannot have that size. Then nothing has changed.
        """
        before = self.config
        if config.arena_size_bytes != before.arena_size_bytes:
            self.resizing.start(config.arena_size, now)
        self.config = config
        self.files.scrubber.rate = config.scrub_rate_bytes
        same = (config.roots, config.file_systems) == (before.roots, before.file_systems)
        rules = None if same else _rules(config)
        self.files.catalog.reconfigure(rules, config.max_chunk_size_bytes, config.close_after_s)

    def about(self) -> dict[str, Any]:
        """Return the content of WELCOME that is the same for all sessions."""
        memory, remote = self.memory, self.files.remote
        return {
            "server": f"ffserve {__version__}",
            "epoch": memory.epoch,
            "arena_size": memory.mapping.size,
            "capacity": memory.directory.capacity,
            "max_get": protocol.MAX_GET_COUNT,
            "payload": "shared",
            "orders": True,
            "generation": memory.inventory.get("generation"),
            "times": True,
            "prepared": True,
            "members": True,
            "last": True,
            "items": True,
            "remote": [] if remote is None else remote.protocols,
        }

    def close(self) -> None:
        """End the I/O threads and close the files. Shared memory goes with the process."""
        self.pages.stop()
        self.files.explainer.close()
        self.reading.engines.close()
        self.files.catalog.shutdown()


def _rules(config: ServerConfig) -> Rules:
    return Rules(config.roots, config.file_systems, config.common)
