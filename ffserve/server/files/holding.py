"""Holding: the shards in the daemon's tables, and which sessions have them open.

A shard is identified by its file (device, inode, size, times of change), not by its name. A file
that was replaced or rewritten under its name is another shard; sessions that opened the old one go
on reading the old one. Both times count: mtime can be set back by anybody who may write the file
(`cp -p`, `rsync --inplace`), ctime by nobody.

A shard is in one of these states:

- open: a session has it open, and its descriptor is open;
- idle: no session has it open, and its descriptor is still open;
- closed: it has no descriptor, and its samples are still in memory;
- prepared: a session has it open, and it never had a file.

While a shard is open, its inode cannot belong to another file. So a client whose user has proven
once that it may read the file names it by its identity (`shards.Alias`) from then on, and passes
no descriptor.
"""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ffserve.cache.cache import Cache
from ffserve.cache.inventory import Inventory
from ffserve.cache.tables import Directory, ShardTable
from ffserve.dtypes import Int32s, Int64s
from ffserve.limits import (
    EXTRA_PART,
    FDS_OF_OBJECT,
    MOST_ALIASES,
    MOST_CLOSED,
    PASSED_SHARE,
    SHARDS_PART,
)
from ffserve.protocol import MOST_FILES
from ffserve.server.files.charges import TableAccounts
from ffserve.server.files.remote import RemoteFiles, RemoteShard
from ffserve.server.files.shards import Alias, OpenShard, ShardKey
from ffserve.server.users.access import Rules
from ffserve.server.users.domains import Domains
from ffserve.server.users.peers import HOST, OWN, Account, Owner, account_of, viewer_of
from ffserve.server.users.threads import run_in_thread

HOLD_COUNT = 256
"""The loop takes a turn after this many shards were looked up, listed, closed or forgotten."""


class FileEngines(Protocol):
    """The engines, as far as open files are entered into them; see `reading.io.Engines`."""

    def add_files(
        self, device: int, fds: Int32s, alignments: Int64s, cached_fds: Int32s
    ) -> tuple[int, Int32s]:
        """Return the number of a device's engine, and those of open files on it."""

    def remove_file(self, engine: int, file: int) -> None:
        """Forget a file of which no read is queued or in flight."""

    def set_remotes(self, engine: int, files: Int32s, shards: dict[int, RemoteShard]) -> None:
        """Note that files that were added belong to remote shards."""

    def remove_remote(self, base: int) -> None:
        """Note that a remote shard is closed."""


@dataclass(frozen=True, slots=True)
class CatalogTables:
    """The tables in which a shard is entered.

    inventory: for a successor of this daemon. lock: guards the numbers of the directory, the
    domains and `DescriptorBudget.cached_count`, which threads use, too. accounts: who pays for
    them.
    """

    directory: Directory
    shards: ShardTable
    cache: Cache
    inventory: Inventory
    domains: Domains
    accounts: TableAccounts
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class OpenSettings:
    """Settings that a reload can change.

    rules: which descriptors are taken. max_chunk_size, close_after_s: see `config.ServerConfig`.
    """

    rules: Rules
    max_chunk_size: int
    close_after_s: float


class DescriptorBudget:
    """The number of files that may be open, by the limit of the process (RLIMIT_NOFILE).

    `limits.py` explains the parts.
    """

    def __init__(self, domains: Domains) -> None:
        self._domains = domains
        self.limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_open = int(self.limit * SHARDS_PART)
        self._most_extra = int(self.limit * EXTRA_PART)
        self.most_asked = max(min(MOST_FILES, self.limit // PASSED_SHARE), 1)
        """Files for which one OPEN asks at once: several sessions of one user may pass descriptors
        at the same time."""
        self.cached_count = 0
        """Files that are open a second time, through the page cache."""
        self.remote_count = 0
        """Shards that are objects of the store."""

    @property
    def _extra(self) -> int:
        """The second descriptors of shards, and those of domains beyond the first."""
        return self.cached_count + self._domains.fd_count + FDS_OF_OBJECT * self.remote_count

    @property
    def spare(self) -> int:
        """The number of further files that may be open a second time."""
        return self._most_extra - self._extra

    def shard_count(self, objects: int = 0) -> int:
        """Return the number of shards that may be open; it falls when second descriptors need more
        than their part. Args: objects: further objects of the store that will be among them."""
        extra = self._extra + FDS_OF_OBJECT * objects
        return max(self._most_open - max(extra - self._most_extra, 0), 0)


class HeldShards:
    """The shards in the tables.

    Args: remote: the store; None: remote files are not served.
    """

    def __init__(
        self,
        tables: CatalogTables,
        engines: FileEngines,
        budget: DescriptorBudget,
        remote: RemoteFiles | None,
    ) -> None:
        self.tables = tables
        self.engines = engines
        self.budget = budget
        self.remote = remote
        self.open: dict[ShardKey, OpenShard] = {}
        """Those with a descriptor, idle ones included."""
        self.idle: OrderedDict[ShardKey, OpenShard] = OrderedDict()
        """The one that has been idle for longest is the first."""
        self.closed: OrderedDict[ShardKey, OpenShard] = OrderedDict()
        """The one that was closed first is the first."""
        self.most_closed = MOST_CLOSED
        self.prepared: dict[ShardKey, OpenShard] = {}
        """Prepared shards that a session has open; the others are closed ones."""
        self._charged: dict[Account, Counter[OpenShard]] = {}
        """The shards that each account has open, prepared ones not included, and for how many of
        its owners."""
        self._aliases: dict[Owner | None, dict[Alias, OpenShard]] = {}
        """By the owner of the domain, and by alias."""

    # ---- proofs ---------------------------------------------------------------------------------

    def proven(self, aliases: list[Alias], owner: Owner) -> list[OpenShard | None]:
        """Return, for each alias, the shard that an owner has proven it may read; None if there is
        none."""
        common, own = self._aliases.get(None, {}), self._aliases.get(owner, {})
        found = [common.get(alias) or own.get(alias) for alias in aliases]
        return [None if s is None or owner not in s.proven else s for s in found]

    def add_alias(self, shard: OpenShard, alias: Alias) -> None:
        """Let clients that have proven a shard ask for it by an alias."""
        if len(shard.aliases) < MOST_ALIASES and alias not in shard.aliases:
            shard.aliases += (alias,)
            self._aliases.setdefault(shard.key.owner, {})[alias] = shard

    def drop_aliases(self, shard: OpenShard) -> None:
        """Delete the aliases of a shard, so that no client finds it by one."""
        domain = self._aliases.get(shard.key.owner, {})
        for alias in shard.aliases:
            if domain.get(alias) is shard:
                del domain[alias]
        if not domain:
            self._aliases.pop(shard.key.owner, None)
        shard.aliases = ()

    def forget_proofs(self) -> None:
        """Every user must prove anew that it may read a file. Open shards stay open."""
        for shard in self.open.values():
            shard.aliases, shard.proven = (), frozenset()
        self._aliases.clear()

    # ---- sessions -------------------------------------------------------------------------------

    def hold(self, shards: list[OpenShard], owner: Owner) -> None:
        """Note that a data set of a session has these shards open; `release` gives them back."""
        account = account_of(owner)
        charged = self._charged.setdefault(account, Counter())
        for shard in shards:
            if shard.sessions == 0:
                self.idle.pop(shard.key, None)
                if shard.charge is not None and shard.charge.uid != owner[0]:
                    shard.charge.move(owner[0])
            holding = shard.holders.get(owner, 0)
            if not holding and shard.preparation is None:
                charged[shard] += 1
            shard.holders[owner] = holding + 1
            shard.sessions += 1
        if not charged:
            del self._charged[account]
        self._count_sessions(shards)

    def count_of(self, account: Account) -> int:
        """Return how many shards a user has open, prepared ones not included."""
        return len(self._charged.get(account, ()))

    def release(self, shards: list[OpenShard], owner: Owner) -> None:
        """Give back what `hold` has taken."""
        now = time.monotonic()
        for shard in shards:
            shard.holders[owner] -= 1
            if not shard.holders[owner]:
                del shard.holders[owner]
                self._forget_owner(shard, owner)
            shard.sessions -= 1
            if shard.sessions == 0 and shard.preparation is not None:
                del self.prepared[shard.key]
                if shard.count:
                    self.closed[shard.key] = shard
                    self.tables.cache.allocator.idle_changed = True
            elif shard.sessions == 0:
                shard.idle_since = now
                self.idle[shard.key] = shard
                self.tables.cache.allocator.idle_changed = True
        self._count_sessions(shards)

    def _count_sessions(self, shards: list[OpenShard]) -> None:
        shards = [shard for shard in shards if shard.count]
        counts = [shard.sessions for shard in shards]
        self.tables.shards.set_sessions([shard.base for shard in shards], counts)

    def _forget_owner(self, shard: OpenShard, owner: Owner) -> None:
        if shard.preparation is not None:
            return
        uids = {uid for uid, _ in shard.holders}
        if shard.charge is not None and uids and shard.charge.uid not in uids:
            shard.charge.move(min(uids))
        account = account_of(owner)
        charged = self._charged[account]
        charged[shard] -= 1
        if not charged[shard]:
            del charged[shard]
        if not charged:
            del self._charged[account]
        # The proof of the last holder stays, for its next job. The proof of an owner whose
        # namespace can end does not stay, since a later namespace may have the same number.
        if shard.holders or owner[1] not in (OWN, HOST):
            shard.proven -= {owner}
        if shard.remote is not None and shard.holders and len(shard.remote.objects) > 1:
            # Other users share the shard, with their own access.
            shard.remote.proofs.pop(owner, None)
            opened = shard.remote.objects.pop(owner, None)
            if opened is not None and self.remote is not None:
                run_in_thread(partial(self.remote.close, [opened]))
        if viewer_of(owner) == owner:
            shard.names.pop(owner, None)

    # ---- files ----------------------------------------------------------------------------------

    def take_fds(self, shard: OpenShard) -> list[int]:
        """Return the descriptors of a shard, which has none from now on. Its object of the store,
        whose descriptor is the second one then, is given back."""
        fds = [shard.fd] if shard.fd >= 0 else []
        if shard.remote is not None and self.remote is not None:
            objects = list(shard.remote.objects.values())
            if shard.count:
                self.engines.remove_remote(shard.base)
            shard.remote = None
            self.budget.remote_count -= 1
            run_in_thread(partial(self.remote.close, objects))
        elif shard.cached_fd >= 0:
            fds.append(shard.cached_fd)
            with self.tables.lock:
                self.budget.cached_count -= 1
        shard.fd = shard.cached_fd = -1
        return fds

    def changed(self, bases: Container[int]) -> set[int]:
        """Return the first numbers of the shards whose file has changed since it was opened. Args:
        bases: first numbers."""
        return {
            shard.base
            for shard in self.open.values()
            if shard.base in bases and shard.fd >= 0 and shard.opened.has_changed(shard.fd)
        }

    def set_stale(self, shard: OpenShard) -> None:
        """The tables of a shard contradict its file: the next OPEN opens the file anew. Nothing
        happens if the shard has been closed meanwhile."""
        if self.open.get(shard.key) is shard and not shard.stale:
            shard.stale = True
            self.set_apart(shard)

    def set_apart(self, shard: OpenShard) -> None:
        """Let no further OPEN find a shard; sessions that have it open keep it."""
        self.drop_aliases(shard)
        self.tables.inventory.remove_shard(shard.base)
        before, shard.key = shard.key, shard.key._replace(apart=shard.base)
        for shards in (self.open, self.idle, self.closed):
            if shards.get(before) is shard:
                del shards[before]
                shards[shard.key] = shard

    # ---- lists ----------------------------------------------------------------------------------

    def is_closed(self, shard: OpenShard) -> bool:
        """Whether a shard is still closed."""
        return self.closed.get(shard.key) is shard

    def has(self, shard: OpenShard) -> bool:
        """Whether a shard is in the tables."""
        return any(each.get(shard.key) is shard for each in (self.open, self.prepared, self.closed))

    def shards(self) -> Iterator[list[OpenShard]]:
        """Yield every shard in the tables, closed ones included, HOLD_COUNT at a time."""
        opened = list(self.open.values())
        for first in range(0, len(opened), HOLD_COUNT):
            yield opened[first : first + HOLD_COUNT]
        closed = [*self.prepared.values(), *self.closed.values()]
        for first in range(0, len(closed), HOLD_COUNT):
            yield closed[first : first + HOLD_COUNT]
