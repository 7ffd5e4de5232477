"""Catalog: the open shards, each opened and parsed once, shared by all data sets.

A shard is identified by its file (device, inode, size, times of change), not by its name: a file
that was replaced or rewritten under its name is another shard, and sessions that opened the old
one go on reading the old one. Both times count: mtime can be set back by anybody who writes
(`cp -p`, `rsync --inplace`), ctime by nobody.

A shard that no session has open is idle. Its file is closed after a while, or when the descriptor
is needed, so that file systems can be unmounted. Its samples stay in memory until others need it,
and are served again when the same file is opened again, whose tables are compared: its inode may be
another file's by then. A file that was deleted, replaced or rewritten cannot be opened again as the
file that it was: it is closed at once, and its samples are evicted.

The daemon reads a file through descriptors that clients opened (`access.py`). While a shard is
open, its inode cannot belong to another file. So a client whose user has proven once that it may
read the file names it by its identity from then on, and needs no descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TypeVar

import numpy as np

from ffserve.cache.adoption import drop_other_blocks
from ffserve.cache.cache import Cache
from ffserve.cache.inventory import CHUNKED, Inventory, ShardRow
from ffserve.cache.tables import Directory, ShardTable
from ffserve.disk.files import os_error
from ffserve.disk.shardfile import FileState
from ffserve.engine.opening import close_fds
from ffserve.errors import FFServeError, ReadError
from ffserve.formats.base import UNKNOWN_LENGTH
from ffserve.protocol import MOST_FILES
from ffserve.server.files.opening import (
    Identified,
    IdentifiedFiles,
    IdentifiedObjects,
    Opener,
    Opening,
    close_passed,
)
from ffserve.server.files.remote import ASKED_AT_ONCE, FDS_OF_OBJECT, RemoteFiles, Wanted
from ffserve.server.files.shards import (
    Alias,
    Identity,
    Key,
    OpenShard,
    PassedFile,
    Passing,
    Request,
    closed_shard,
    prepared_key,
    prepared_shard,
    row_of,
)
from ffserve.server.prepared.claims import Preparation, Preparations
from ffserve.server.reading.io import Engines
from ffserve.server.users.access import HOST, OWN, Owner, Peer, Rules, viewer_of
from ffserve.server.users.domains import Domain, Domains

T = TypeVar("T")

HOLD_COUNT = 256
"""Shards that are looked up, closed or forgotten between two turns of the loop."""
DROP_COUNT = 8192
"""Samples of a dropped shard that are evicted between two turns of the loop: 1 to 4 ms."""
RELEASE_COUNT = 1 << 18
"""Samples of a forgotten shard whose tables are given back between two turns of the loop: 1 ms."""
MOST_ALIASES = 64
"""How many aliases of a shard are known; under others its users pass descriptors each time."""
SILENT_S = 5.0
"""Files of a device that does not answer for so long are not looked at before it does."""
REMOTE_COUNT = 64
"""Remote files that are opened together."""
LOOK_S = 0.25
"""How often a session that waits for files of others looks whether these wait for something else.
"""
MOST_CLOSED = 16_384
"""Closed shards whose samples are kept; beyond, those of the shard closed first are evicted."""


@dataclass(frozen=True, slots=True)
class PendingOpen:
    """An OPEN that is not answered yet. found: the shards that are held, by position."""

    request: Request
    peer: Peer
    found: dict[int, OpenShard] = field(default_factory=dict)


class Catalog:
    """Opens, shares and closes shards.

    Args:
        rules: which descriptors are taken. max_chunk_size, close_after_s: see ServerConfig.
        inventory: where the shards are entered for a successor.
        forgotten: called with the number of the first sample of each shard that leaves the tables:
            it may become another shard's.
        remote: the store; None: remote files are not served.
    """

    def __init__(
        self,
        directory: Directory,
        table: ShardTable,
        cache: Cache,
        engines: Engines,
        rules: Rules,
        max_chunk_size: int,
        domains: Domains,
        close_after_s: float,
        inventory: Inventory,
        forgotten: Callable[[int], object],
        remote: RemoteFiles | None = None,
    ) -> None:
        self._domains = domains
        self._forgotten = forgotten
        self.remote = remote
        self._remote_count = 0
        """Shards that are objects of the store."""
        self._inventory = inventory
        self._directory = directory
        self._table = table
        self._cache = cache
        self._engines = engines
        self._opener = Opener(
            directory, rules, max_chunk_size, lambda: self._most_extra - self._extra()
        )
        self._open: dict[Key, OpenShard] = {}
        self._opening: dict[Key, Opening] = {}
        """Files that are being opened, with those that are opened together."""
        self._aliases: dict[Owner | None, dict[Alias, OpenShard]] = {}
        """By domain and alias."""
        self._close_after_s = close_after_s
        self._idle: OrderedDict[Key, OpenShard] = OrderedDict()
        """Open, the one that has been idle for longest first."""
        self._closed: OrderedDict[Key, OpenShard] = OrderedDict()
        self._most_closed = MOST_CLOSED
        self._prepared: dict[Key, OpenShard] = {}
        """Prepared shards that a session has open; others are closed ones."""
        self.preparations = Preparations()
        self._entered = False
        """Whether shards were opened since closed shards were compared with their names."""
        self._ended: set[int] = set()
        """Namespaces that have ended, while there is something in the domains of their users."""
        self._silent: set[int] = set()
        """Devices whose file systems do not answer."""
        self._held: Counter[Owner] = Counter()
        """Shards by owner."""
        self._promised: list[tuple[Owner, set[Alias]]] = []
        """By OPEN: shards that are not open yet."""
        # Three quarters are for shards, an eighth for their second descriptors and for domains, an
        # eighth for sessions and everything else.
        self._limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_open, self._most_extra = self._limit * 3 // 4, self._limit // 8
        # Sessions of one user may pass descriptors of the same files at a time.
        self._most_asked = max(min(MOST_FILES, self._limit // 32), 1)

    def reconfigure(self, rules: Rules | None, max_chunk_size: int, close_after_s: float) -> None:
        """Follow other settings. Open shards stay open; with other rules (None: they stay), a user
        who opens one from now on proves anew that they allow it."""
        self._opener.max_chunk_size, self._close_after_s = max_chunk_size, close_after_s
        if rules is not None:
            self._opener.rules = rules
            for shard in self._open.values():
                shard.aliases, shard.proven = (), frozenset()
            self._aliases.clear()

    # ---- opening --------------------------------------------------------------------------

    async def open(self, request: Request, peer: Peer, passing: Passing) -> list[OpenShard]:
        """Open the shards of one data set for one session; `close` gives them back.

        Raises: AccessDenied, FormatError, ChecksumError, TruncatedError, ReadError: of the first
            shard that cannot be served; then none is held.
        """
        pending = PendingOpen(request, peer)
        try:
            left: list[int] = []
            for first in range(0, len(request.paths), HOLD_COUNT):
                some = range(first, min(first + HOLD_COUNT, len(request.paths)))
                request.name(some)
                local = [k for k in some if k not in request.remote] if request.remote else some
                left += self._hold_proven(pending, local)
                await asyncio.sleep(0)
            if request.remote:
                positions = sorted(request.remote)
                with self._promising(pending, positions):
                    await self._make_room(pending, positions)
                    await self._open_remote(pending, positions)
            if left:
                with self._promising(pending, left):
                    await self._make_room(pending, left)
                    await self._open_local(pending, left, passing)
        except BaseException:
            self.close(list(pending.found.values()), peer.owner)
            raise
        return [pending.found[position] for position in range(len(request.paths))]

    async def _open_local(self, pending: PendingOpen, left: list[int], passing: Passing) -> None:
        """Open the shards at some positions. The client opens the next files while those that it
        has passed are parsed."""
        asking: asyncio.Future[list[PassedFile]] | None = None
        asked: list[int] = []
        try:
            while left or asking is not None:
                passed: list[PassedFile] = []
                if asking is not None:
                    passed, asking = await asking, None
                    left = asked[len({one.position for one in passed}) :] + left
                asked, left = left[: self._most_asked], left[self._most_asked :]
                asked = self._hold_proven(pending, asked)
                try:
                    if asked:
                        await self._make_room(pending, asked)
                        asking = asyncio.ensure_future(passing(asked))
                    if passed:
                        taken, passed = passed, []
                        identify = partial(
                            self._opener.identify, pending.request, taken, pending.peer
                        )
                        await self._obtain(pending, identify, partial(close_passed, taken))
                finally:
                    if passed:
                        await in_thread(partial(close_passed, passed))
        except BaseException:
            if asking is not None:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, FFServeError):
                    unused = await asking
                    await in_thread(partial(close_passed, unused))
            raise

    async def _open_remote(self, pending: PendingOpen, positions: list[int]) -> None:
        """Open the remote files of an OPEN, some at a time."""
        remote, request, peer = self.remote, pending.request, pending.peer
        if remote is None or request.access is None:
            raise ReadError(
                "the daemon has no store for remote files",
                path=request.paths[positions[0]],
                hint="set [store] directory in its configuration",
            )
        urls = [request.remote[k].url for k in positions]
        access = remote.access_for(peer, request.access, urls)
        if not remote.fetcher.has_store:
            await in_thread(remote.open_store)
        for first in range(0, len(positions), REMOTE_COUNT):
            some = positions[first : first + REMOTE_COUNT]
            wanted = [remote.wanted(k, request.remote[k], access, peer) for k in some]
            # The name without a format decides as the content does: a user's own choice.
            how = request.format, request.verify, request.tolerant
            keys: list[Key] = [(one.file, *how, one.owner, -1) for one in wanted]
            rows = zip(wanted, keys, strict=True)
            unproven = [one for one, key in rows if not self._may_read(one, key, peer)]
            files = IdentifiedObjects(remote, peer, wanted, [request.paths[k] for k in some], keys)
            await self._obtain(pending, partial(files.identify, unproven), files.close)

    def _may_read(self, one: Wanted, key: Key, peer: Peer) -> bool:
        """Whether the origin has let this user read an open object with the same access."""
        shard = self._open.get(key)
        if shard is None or shard.remote is None or not shard.sessions:
            return False
        return shard.remote.proofs.get(peer.owner) == one.access.digest

    # ---- what local and remote files have in common -----------------------------------------

    async def _obtain(
        self,
        pending: PendingOpen,
        identify: Callable[[], Identified],
        close: Callable[[], object],
    ) -> None:
        """Hold the shards of some files of an OPEN.

        Args: identify: checks the files; close: gives back what is not needed of them. Both are
            called in threads.
        """
        try:
            files = await in_thread(identify)
            for owner in {key[4] for key in files.keys}:
                while self._domains.is_full(owner) and await self._drop_oldest():
                    pass
            left = most = len(files.keys)
            while left:
                most = await self._open_missing(pending, files, most)
                left = self._hold_opened(pending, files, range(len(files.keys)))
        except asyncio.CancelledError:
            raise  # The daemon ends, and a thread may still read the files.
        except BaseException:
            await in_thread(close)
            raise
        await in_thread(close)

    async def _open_missing(self, pending: PendingOpen, files: Identified, most: int) -> int:
        """Open those of some files that are neither open nor being opened, at most `most` at once;
        if there are none, wait for those that others open.

        Returns: how many to open at once from now on: until they are closed, passed descriptors
            take room beside the new ones.
        """
        now = time.monotonic()
        mine: dict[Key, int] = {}
        others: set[asyncio.Future[None]] = set()
        for k, key in enumerate(files.keys):
            if key in self._open:
                continue
            opening = self._opening.get(key)
            if opening is not None and not opening.holds_up(key, now):
                others.add(opening.ended)
            elif len(mine) < most:
                mine.setdefault(key, k)
        try:
            if isinstance(files, IdentifiedObjects):
                await self._open_each(pending, files, mine)
            elif mine:
                await self._open_new(pending, files, mine)
        except OSError as error:
            if len(mine) > 1 and _is_emfile(error) and isinstance(files, IdentifiedFiles):
                return len(mine) // 2
            failure = self._opening_error(error, files.paths[min(mine.values())])
            if failure is error:
                raise
            raise failure from error
        if not mine and others:
            await asyncio.wait(others, timeout=LOOK_S)
        return most

    async def _open_each(
        self, pending: PendingOpen, files: IdentifiedObjects, mine: dict[Key, int]
    ) -> None:
        """Open remote files, each in a thread of its own, some at a time."""
        limit = asyncio.Semaphore(ASKED_AT_ONCE)
        failed: list[BaseException] = []

        async def open_one(key: Key, row: int) -> None:
            async with limit:
                if failed or key in self._open or key in self._opening:
                    return
                try:
                    await self._open_new(pending, files, {key: row})
                except BaseException as error:
                    failed.append(error)

        # Also after a failure all threads are waited for: their number has a bound for each user.
        await asyncio.gather(*(open_one(key, row) for key, row in mine.items()))
        if failed:
            raise failed[0]

    async def _open_new(
        self, pending: PendingOpen, files: Identified, mine: dict[Key, int]
    ) -> None:
        """Open the shards of some keys, by their rows, in a thread, and hold them."""
        ended = asyncio.get_running_loop().create_future()
        opening = Opening(time.monotonic(), len(mine) == 1, ended)
        self._opening.update(dict.fromkeys(mine, opening))
        domains: list[Domain] = []
        rows = list(mine.values())
        try:
            # While they are empty, until it is known how many shards there are of each.
            with self._opener.lock:
                for key in mine:
                    domains.append(self._domains.obtain(key[4]))
                    domains[-1].shards += 1
            shards = await in_thread(
                partial(self._opener.open, pending.request, files, rows, domains, opening)
            )
            fresh = [shard for shard in shards if shard.key not in self._open]
            self._enter(fresh)
            self._hold_opened(pending, files, rows)
        finally:
            for domain in domains:
                domain.shards -= 1
            for key in mine:
                if self._opening.get(key) is opening:
                    del self._opening[key]
            ended.set_result(None)
        if len(fresh) < len(shards):
            await self._discard([s for s in shards if self._open.get(s.key) is not s])

    async def _discard(self, shards: list[OpenShard]) -> None:
        """Close shards whose files another session has opened in the meantime."""
        fds = [fd for shard in shards for fd in self._taken_fds(shard)]
        with self._opener.lock:
            for shard in shards:
                self._directory.release(shard.base, shard.count, shard.domain.number)
        await in_thread(partial(close_fds, fds))

    def _hold_opened(self, pending: PendingOpen, files: Identified, rows: Sequence[int]) -> int:
        """Hold the shards of those identified files that are open, which the peer has proven now,
        if the rules are still those by which the files were checked.

        Returns: the number of the others. Another session opens them; if it fails for reasons of
            its own, the next turn opens them for this one.
        """
        request, found = pending.request, pending.found
        owner, positions = pending.peer.owner, files.positions
        viewer, proof = viewer_of(owner), frozenset((owner,))
        kept, left, held = [], 0, []
        for k in rows:
            position = positions[k]
            if position in found:
                continue
            shard = self._open.get(files.keys[k])
            if shard is None:
                left += 1
                continue
            found[position] = shard
            held.append(shard)
            kept.append(request.aliases[position])
            shard.names[viewer] = files.paths[k]
            if isinstance(files, IdentifiedObjects):
                files.give(k, shard)
            elif files.rules is self._opener.rules:
                if owner not in shard.proven:
                    shard.proven = shard.proven | proof if shard.proven else proof
                # Under what the daemon knows of the file, whatever the client says.
                self._name(shard, request.alias(position, files.keys[k][0]))
        for each, promised in self._promised:
            if each == owner:
                promised.difference_update(kept)
        self._hold(held, owner)
        return left

    def _name(self, shard: OpenShard, alias: Alias) -> None:
        if len(shard.aliases) < MOST_ALIASES and alias not in shard.aliases:
            shard.aliases += (alias,)
            self._aliases.setdefault(shard.key[4], {})[alias] = shard

    def _close_objects(self, shard: OpenShard) -> None:
        """Give back the object of a shard that is closed."""
        if shard.remote is not None and self.remote is not None:
            objects = list(shard.remote.objects.values())
            if self._engines.fetches is not None and shard.count:
                self._engines.fetches.remove(shard.base)
            shard.remote = None
            self._remote_count -= 1
            run_in_thread(partial(self.remote.close, objects))

    def _hold_proven(self, pending: PendingOpen, positions: Sequence[int]) -> list[int]:
        """Hold the shards that this peer's owner has proven; return the positions of the others."""
        request, found, owner = pending.request, pending.found, pending.peer.owner
        left, held = [], []
        common, own = self._aliases.get(None, {}), self._aliases.get(owner, {})
        for position in positions:
            alias = request.aliases[position]
            shard = common.get(alias) or own.get(alias)
            if shard is None or owner not in shard.proven:
                left.append(position)
            else:
                held.append(shard)
                found[position] = shard
        self._hold(held, owner)
        return left

    @contextlib.contextmanager
    def _promising(self, pending: PendingOpen, left: list[int]) -> Iterator[None]:
        """Count the files of an OPEN against the limit before they come: of two OPENs at a time,
        the second is refused at once if there is no room for both."""
        # Shards that others have proven need no room, but who has not must not learn of them.
        aliases = pending.request.aliases
        mine = pending.peer.owner, {aliases[position] for position in left}
        self._promised.append(mine)
        try:
            yield
        finally:
            self._promised = [each for each in self._promised if each is not mine]

    async def _make_room(self, pending: PendingOpen, left: list[int]) -> None:
        """Close idle shards, so that those of a request can be opened. Raises: ReadError."""
        request, peer = pending.request, pending.peer
        room, held = self._room(), self._held[peer.owner]
        limited = peer.uid not in (0, os.geteuid())
        most = room // 2 if limited else room
        at_most = sum(len(aliases) for _, aliases in self._promised)
        if len(self._open) + at_most <= room and held + at_most <= most:
            return
        promised = {(owner, alias) for owner, aliases in self._promised for alias in aliases}
        new = len({request.identities[position] for position in left})
        held += sum(owner == peer.owner for owner, _ in promised)
        if limited and held > most:
            raise ReadError(
                f"user {peer.uid} may have {most} files open in the daemon, half of its own "
                f"limit; {held - new} are in use, and this data set has {new} more",
                path=request.paths[left[0]],
                hint="raise the daemon's limit on open files (LimitNOFILE= in the systemd "
                "unit, ulimit -n)",
            )
        count = len(self._open) + len(promised)
        used = count - len(self._idle)
        if used <= room < count:
            await self._close(list(self._idle.values()), count - room)
            count = len(self._open) + len(promised)
        if count > room:
            raise ReadError(
                f"the daemon may have {room} files open; {used - new} are in use, "
                f"and this data set has {new} more",
                path=request.paths[left[0]],
                hint="raise the limit on open files (ulimit -n, LimitNOFILE= in the systemd unit)",
            )

    def _extra(self) -> int:
        """Return the second descriptors of shards, and those of domains beyond the first."""
        objects = FDS_OF_OBJECT * self._remote_count
        return self._opener.cached_count + self._domains.fd_count + objects

    def _room(self) -> int:
        """Return how many shards may be open: fewer once domains need more than their part."""
        return max(self._most_open - max(self._extra() - self._most_extra, 0), 0)

    def _opening_error(self, error: OSError, path: str) -> Exception:
        """Return the error for files that could not be opened."""
        if _is_emfile(error):
            return ReadError(
                "too many files open in the daemon: others open files at the same time, and its "
                f"limit is {self._limit}",
                path=path,
                hint="try again, or raise the daemon's limit on open files (LimitNOFILE= in the "
                "systemd unit, ulimit -n)",
            )
        return error if isinstance(error, FFServeError) else os_error(error, path)

    def _enter(self, shards: list[OpenShard]) -> None:
        """Enter parsed shards into the tables."""
        by_device: defaultdict[int, list[OpenShard]] = defaultdict(list)
        self._entered = True
        for shard in shards:
            self._open[shard.key] = shard
            shard.domain.shards += 1
            self._remote_count += shard.remote is not None
            if shard.count:
                by_device[shard.device].append(shard)
        fresh, numbers, adopted = [], [], []
        for device, some in by_device.items():
            engine, files = self._engines.add_files(
                device,
                np.array([shard.fd for shard in some], np.int32),
                np.array([shard.alignment for shard in some], np.int64),
                np.array([shard.cached_fd for shard in some], np.int32),
            )
            for shard, file in zip(some, files.tolist(), strict=True):
                closed = self._inherit(shard)
                if shard.remote is not None:
                    self._engines.set_remote(engine, file, shard.base, shard.remote)
                if closed is None:
                    fresh.append(shard)
                    numbers.append((file, engine))
                    continue
                row = self._table.row(shard.base)
                self._table.engines[row], self._table.files[row] = engine, file
                if closed.adopted:
                    adopted.append(shard.base)
        if adopted:
            self._cache.fit(adopted)
        if fresh:
            self._add_new(fresh, numbers)
            self._cache.fit([shard.base for shard in fresh])

    def _add_new(
        self, shards: list[OpenShard], numbers: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Add shards to the table and to the inventory."""
        self._add_rows(shards, numbers)
        for shard in shards:
            if shard.key[5] < 0:  # its file is not stale
                self._inventory.add_shard(row_of(shard))

    def _add_rows(
        self,
        shards: Sequence[OpenShard],
        numbers: Sequence[tuple[int, int]] | None = None,
        has_chunks: Sequence[bool] | None = None,
    ) -> None:
        """Add rows to the table of shards. Args: numbers: file and engine of each; None: they have
        none. has_chunks: as of `ShardTable.add_all`."""
        columns = [
            (s.base, s.count, s.payload_size, s.alignment, s.checksum_kind, *n, s.domain.number)
            for s, n in zip(shards, numbers or [(-1, 0)] * len(shards), strict=True)
        ]
        chunked = [shard.chunked for shard in shards]
        self._table.add_all(np.array(columns, np.int64).T, chunked, has_chunks)

    # ---- a predecessor's ------------------------------------------------------------------------

    def adopt(self, rows: Sequence[ShardRow]) -> None:
        """Enter the shards of a predecessor, whose numbers are their own already, as closed ones.
        Their samples are served when a client passes a descriptor of the same file."""
        domains = {domain.serial: domain for domain in self._domains.all}
        shards = [closed_shard(row, domains[row.domain], self.preparations) for row in rows]
        for shard in shards:
            shard.domain.shards += 1
            shard.domain.prepared_count += shard.count * (shard.preparation is not None)
            self._closed[shard.key] = shard
        if rows:
            self._add_rows(shards, has_chunks=[bool(row.flags & CHUNKED) for row in rows])
        # Not idle: the jobs that had them open are on their way back.
        self._table.sessions[:] = 1
        self._most_closed = max(MOST_CLOSED, len(rows))
        self._cache.next_use.adopt({row.base: row.group for row in rows if row.group})

    def end_return(self) -> None:
        """Shards of the predecessor that nobody has opened are idle from now on."""
        self._most_closed = MOST_CLOSED
        left = [shard.base for shard in self._closed.values() if shard.adopted]
        if left:
            self._table.set_sessions(left, [0] * len(left))
            self._cache.allocator.idle_changed = True

    def _suits(self, closed: OpenShard, shard: OpenShard) -> bool:
        """Whether the lengths that a predecessor found are those of the file, and the blocks that
        it cached those that are read now."""
        entries, row = self._directory.entries, self._table.row(closed.base)
        if bool(self._table.chunked[row]) != (shard.chunked is not None):
            return False
        if shard.chunked is None:
            old, new = (entries[s.base : s.base + s.count] for s in (closed, shard))
            return np.array_equal(old["length_low"], new["length_low"]) and np.array_equal(
                old["place"] >> np.uint64(48), new["place"] >> np.uint64(48)
            )
        self._table.set_chunks(closed.base, shard.chunked)
        return drop_other_blocks(self._cache, closed.base, closed.count)

    def _inherit(self, shard: OpenShard) -> OpenShard | None:
        """Return the closed shard of the same file, whose samples are this one's now, if any."""
        closed = self._closed.pop(shard.key, None)
        if closed is None:
            return None
        old, new = (slice(s.base, s.base + s.count) for s in (closed, shard))
        directory = self._directory
        facts = attrgetter(
            "format", "count", "payload_size", "checksum_kind", "alignment", "device", "fingerprint"
        )
        same = (
            facts(closed) == facts(shard)
            and np.array_equal(directory.offsets[old], directory.offsets[new])
            and np.array_equal(directory.checksums[old], directory.checksums[new])
            and (not closed.adopted or self._suits(closed, shard))
        )
        if not same:
            # Another file with the number, size and times of a deleted one.
            self._closed[closed.key] = closed
            self._set_apart(closed)
            return None
        with self._opener.lock:
            directory.release(shard.base, shard.count, shard.domain.number)
        shard.domain.shards -= 1  # it was counted twice
        shard.base, shard.chunked = closed.base, closed.chunked or shard.chunked
        return closed

    def _taken_fds(self, shard: OpenShard) -> list[int]:
        """Return the descriptors of a shard, which has none any more."""
        self._close_objects(shard)
        fds = [fd for fd in (shard.fd, shard.cached_fd) if fd >= 0]
        if shard.cached_fd >= 0:
            with self._opener.lock:
                self._opener.cached_count -= 1
        shard.fd = shard.cached_fd = -1
        return fds

    # ---- prepared samples ---------------------------------------------------------------------

    def open_prepared(
        self, sources: list[OpenShard], firsts: list[int], key: bytes, name: str, owner: Owner
    ) -> list[OpenShard]:
        """Open the prepared shards of shards that a session has open; `close` gives them back.

        Args: firsts: indices of their first samples, on which results may depend.
        Raises: ReadError: there is no room in the tables, or for another domain.
        """
        preparation = self.preparations.obtain(owner, key, name)
        count = sum(source.count for source in sources)
        preparation.raw_size = sum(source.payload_size for source in sources) / max(count, 1)
        found: list[OpenShard] = []
        fresh: list[OpenShard] = []
        try:
            for source, first in zip(sources, firsts, strict=True):
                own = prepared_key(source.key, source.fingerprint, key, first, owner)
                shard = self._prepared.get(own) or self._closed.pop(own, None)
                if shard is None:
                    shard = self._new_prepared(source, preparation, first)
                    fresh.append(shard)
                elif shard.adopted:
                    shard.adopted = False
                    like = prepared_shard(source, preparation, first, shard.base, shard.domain)
                    shard.path, shard.names = like.path, like.names
                self._prepared[own] = shard
                found.append(shard)
        finally:
            # With those of an OPEN that fails: they are forgotten as closed ones are.
            if fresh := [shard for shard in fresh if shard.count]:
                self._add_new(fresh)
            self._hold(found, owner)
            if len(found) < len(sources):
                self.close(found, owner)
        return found

    def _new_prepared(self, source: OpenShard, preparation: Preparation, first: int) -> OpenShard:
        with self._opener.lock:
            domain = self._domains.obtain_for(preparation.owner, source.count)
            base = self._directory.reserve(source.count, domain.number) if source.count else 0
            domain.shards += source.count > 0
            domain.prepared_count += source.count
        self._directory.set_lengths(base, np.full(source.count, UNKNOWN_LENGTH, np.uint64))
        return prepared_shard(source, preparation, first, base, domain)

    # ---- holding and closing ------------------------------------------------------------------

    def _hold(self, shards: list[OpenShard], owner: Owner) -> None:
        fresh = 0
        for shard in shards:
            if shard.sessions == 0:
                self._idle.pop(shard.key, None)
            holding = shard.holders.get(owner, 0)
            fresh += not holding and shard.preparation is None
            shard.holders[owner] = holding + 1
            shard.sessions += 1
        if fresh:
            self._held[owner] += fresh
        self._count_sessions(shards)

    def close(self, shards: list[OpenShard], owner: Owner) -> None:
        """Give back what `open` returned."""
        now = time.monotonic()
        for shard in shards:
            shard.holders[owner] -= 1
            if not shard.holders[owner]:
                del shard.holders[owner]
                self._forget_owner(shard, owner)
            shard.sessions -= 1
            if shard.sessions == 0 and shard.preparation is not None:
                del self._prepared[shard.key]
                if shard.count:
                    self._closed[shard.key] = shard
                    self._cache.allocator.idle_changed = True
            elif shard.sessions == 0:
                shard.idle_since = now
                self._idle[shard.key] = shard
                self._cache.allocator.idle_changed = True
        self._count_sessions(shards)

    def _count_sessions(self, shards: list[OpenShard]) -> None:
        shards = [shard for shard in shards if shard.count]
        counts = [shard.sessions for shard in shards]
        self._table.set_sessions([shard.base for shard in shards], counts)

    def _forget_owner(self, shard: OpenShard, owner: Owner) -> None:
        if shard.preparation is not None:
            return
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        # The last holder's proof stays, for its next job; that of one whose namespace may end, so
        # that nobody else gets its number, does not.
        if shard.holders or owner[1] not in (OWN, HOST):
            shard.proven -= {owner}
        if shard.remote is not None and shard.holders and len(shard.remote.objects) > 1:
            # Others share it, with their own access.
            shard.remote.proofs.pop(owner, None)
            opened = shard.remote.objects.pop(owner, None)
            if opened is not None and self.remote is not None:
                run_in_thread(partial(self.remote.close, [opened]))
        if viewer_of(owner) == owner:
            shard.names.pop(owner, None)

    def changed(self, bases: Container[int]) -> set[int]:
        """Return those of these shards, by first number, whose file has changed since it was
        opened."""
        return {
            shard.base
            for shard in self._open.values()
            if shard.base in bases and shard.fd >= 0 and shard.opened.has_changed(shard.fd)
        }

    def set_stale(self, shard: OpenShard) -> None:
        """The tables of a shard contradict its file: whoever opens that from now on gets others.
        Nothing happens if it has been closed meanwhile."""
        if self._open.get(shard.key) is shard and not shard.stale:
            shard.stale = True
            self._set_apart(shard)

    def _drop_aliases(self, shard: OpenShard) -> None:
        domain = self._aliases.get(shard.key[4], {})
        for alias in shard.aliases:
            if domain.get(alias) is shard:
                del domain[alias]
        if not domain:
            self._aliases.pop(shard.key[4], None)
        shard.aliases = ()

    async def tend(self, now: float) -> None:
        """Close the files of shards that have been idle for long; evict the samples of files that
        cannot be opened again; forget closed shards without samples. Called now and then."""
        idle = list(self._idle.values())
        # One that was closed meanwhile was not looked at: its descriptor may be another file's.
        ended = {s for s in await self._ended_of(idle) if self._idle.get(s.key) is s}
        self._set_apart_ended({s.key[0] for s in ended if s.remote is None})
        before = now - self._close_after_s
        chosen = [
            s
            for s in idle
            if s in ended or s.idle_since <= before or self._has_ended(s.domain.owner)
        ]
        await self._close(chosen, len(chosen))
        for shard in [s for s in self._closed.values() if s.key[5] >= 0]:
            await self._evict(shard)
        await self._forget_empty()
        await self._drop_ended()
        while len(self._closed) > self._most_closed:
            if not await self._drop(next(iter(self._closed.values()))):
                break

    def _set_apart_ended(self, ended: set[Identity]) -> None:
        """Set those shards without a session apart whose files cannot be opened again: of these
        identities, and closed ones whose name is a later file's by now."""
        if self._entered and self._closed:
            latest: dict[tuple[Owner | None, str], int] = {}
            for shard in self._open.values():
                if shard.remote is None:
                    name = shard.key[4], shard.path
                    latest[name] = max(shard.opened.ctime_ns, latest.get(name, 0))
            for shard in self._closed.values():
                if latest.get((shard.key[4], shard.path), 0) > shard.opened.ctime_ns:
                    ended.add(shard.key[0])
        self._entered = False
        if ended:
            for shard in (*self._idle.values(), *self._closed.values()):
                if shard.key[0] in ended:
                    self._set_apart(shard)

    def _set_apart(self, shard: OpenShard) -> None:
        """Nobody gets this shard from now on who does not have it open."""
        self._drop_aliases(shard)
        self._inventory.remove_shard(shard.base)
        before, shard.key = shard.key, (*shard.key[:5], shard.base)
        for shards in (self._open, self._idle, self._closed):
            if shards.get(before) is shard:
                del shards[before]
                shards[shard.key] = shard

    def end_namespace(self, number: int) -> None:
        """Nobody of a mount namespace will come again: what is cached for its users is dropped."""
        self._ended.add(number)

    def _has_ended(self, owner: Owner | None) -> bool:
        return owner is not None and owner[1] in self._ended

    async def _drop_ended(self) -> None:
        if self._ended:
            for shard in [s for s in self._closed.values() if self._has_ended(s.domain.owner)]:
                await self._drop(shard)
            owners = [each.owner for each in self._domains.all if each.owner is not None]
            self._ended.intersection_update([owner[1] for owner in owners])

    async def _ended_of(self, shards: list[OpenShard]) -> set[OpenShard]:
        """Return the shards whose files have no name any more, or were changed, as far as file
        systems answer."""
        by_device: defaultdict[int, list[OpenShard]] = defaultdict(list)
        for shard in shards:
            if shard.device not in self._silent:
                by_device[shard.device].append(shard)
        asked = (
            self._on_device(device, partial(_ended_of, some)) for device, some in by_device.items()
        )
        found: set[OpenShard] = set()
        return found.union(*(answer or () for answer in await asyncio.gather(*asked)))

    async def _on_device(self, device: int, call: Callable[[], T]) -> T | None:
        """Make a call on files of a device in a thread; return None if it takes too long. The
        device is silent then, until the call has ended."""
        task = asyncio.ensure_future(in_thread(call))
        await asyncio.wait({task}, timeout=SILENT_S)
        if task.done():
            return task.result()
        self._silent.add(device)
        task.add_done_callback(lambda _: self._silent.discard(device))
        return None

    async def _forget_empty(self) -> None:
        """Forget the closed shards without samples."""
        table = self._table
        empty = table.bases[(table.used == 0) & (table.sessions == 0) & (table.files < 0)].tolist()
        closed = {shard.base: shard for shard in self._closed.values()} if empty else {}
        for first in range(0, len(empty), HOLD_COUNT):
            some = [closed[base] for base in empty[first : first + HOLD_COUNT] if base in closed]
            some = [shard for shard in some if self._is_closed(shard)]
            if self._cache.drop(*(shard.base for shard in some)):
                await self._forget(some)
            await asyncio.sleep(0)

    def _is_closed(self, shard: OpenShard) -> bool:
        """Whether a shard is still closed."""
        return self._closed.get(shard.key) is shard

    async def _close(self, shards: list[OpenShard], most: int) -> None:
        """Close the files of shards that are still idle and not being read, `most` of them."""
        for first in range(0, len(shards), HOLD_COUNT):
            if most > 0:
                most -= await self._close_some(shards[first : first + HOLD_COUNT], most)

    async def _close_some(self, shards: list[OpenShard], most: int) -> int:
        fds: defaultdict[int, list[int]] = defaultdict(list)
        closed = 0
        busy = self._cache.shards_being_read() if shards else set()
        for shard in shards:
            if closed >= most:
                break
            unfit = shard.base in busy or shard.device in self._silent
            if self._idle.get(shard.key) is not shard or unfit:
                continue
            del self._idle[shard.key], self._open[shard.key]
            self._drop_aliases(shard)
            shard.proven = frozenset()
            closed += 1
            fds[shard.device] += self._taken_fds(shard)
            if shard.count:
                row = self._table.row(shard.base)
                engine, file = int(self._table.engines[row]), int(self._table.files[row])
                self._engines.remove_file(engine, file)
                self._table.files[row] = -1
                self._closed[shard.key] = shard
            else:
                shard.domain.shards -= 1
        closing = (self._on_device(each, partial(close_fds, some)) for each, some in fds.items())
        await asyncio.gather(*closing)
        return closed

    async def _drop_oldest(self) -> bool:
        """Drop a shard that no session has open; return False when there is none that can be."""
        idle = len(self._idle)
        if not self._closed:
            await self._close(list(self._idle.values()), 1)
        for shard in list(self._closed.values()):
            if await self._drop(shard):
                return True
        return len(self._idle) < idle

    async def _drop(self, shard: OpenShard) -> bool:
        """Evict the samples of a closed shard, and forget it if it is still closed; return False
        when one of them is in use."""
        if not await self._evict(shard):
            return False
        if self._is_closed(shard):
            if not self._cache.drop(shard.base):
                return False
            await self._forget([shard])
        return True

    async def _evict(self, shard: OpenShard) -> bool:
        """Evict the samples of a closed shard; return False when one of them is in use.

        The loop runs between two steps, and the shard may be opened again meanwhile.
        """
        end = shard.base + shard.count
        for first in range(shard.base, end, DROP_COUNT):
            await asyncio.sleep(0)
            if not self._is_closed(shard):
                break
            if not self._cache.allocator.evict(first, min(first + DROP_COUNT, end)):
                return False
        return True

    async def _forget(self, shards: list[OpenShard]) -> None:
        """Remove closed shards without samples from the tables, and domains without shards."""
        if shards:
            self._table.remove(*(shard.base for shard in shards))
            for shard in shards:
                del self._closed[shard.key]
                self._forgotten(shard.base)
                self._inventory.remove_shard(shard.base)
        for shard in shards:
            number, end = shard.domain.number, shard.base + shard.count
            for first in range(shard.base, end, RELEASE_COUNT):
                if first > shard.base:
                    await asyncio.sleep(0)
                with self._opener.lock:
                    self._directory.release(first, min(RELEASE_COUNT, end - first), number)
            with self._opener.lock:
                shard.domain.shards -= 1
                shard.domain.prepared_count -= shard.count * (shard.preparation is not None)
        for domain in self._domains.all:
            if not domain.shards:
                await self._dissolve(domain)

    async def _dissolve(self, domain: Domain) -> None:
        """Free a domain if it has no shards any more, a few slabs at a time."""
        left = True
        while left:
            with self._opener.lock:
                left = self._domains.dissolve(domain)
            await asyncio.sleep(0)

    def shards(self) -> Iterator[list[OpenShard]]:
        """Yield every shard in the tables, closed ones included, some at a time."""
        opened = list(self._open.values())
        for first in range(0, len(opened), HOLD_COUNT):
            yield opened[first : first + HOLD_COUNT]
        closed = [*self._prepared.values(), *self._closed.values()]
        for first in range(0, len(closed), HOLD_COUNT):
            yield closed[first : first + HOLD_COUNT]

    def has(self, shard: OpenShard) -> bool:
        """Whether a shard of `shards` is still in the tables."""
        return any(
            each.get(shard.key) is shard for each in (self._open, self._prepared, self._closed)
        )

    def shutdown(self) -> None:
        """Close every descriptor."""
        for shards in self.shards():
            for shard in shards:
                close_fds(self._taken_fds(shard))


def _ended_of(shards: list[OpenShard]) -> list[OpenShard]:
    """Return the shards whose files have no name any more, or were changed."""
    ended = []
    for shard in shards:
        with contextlib.suppress(OSError):
            found = os.fstat(shard.fd)
            changed = shard.remote is None and shard.opened != FileState.of_status(found)
            if found.st_nlink == 0 or changed:
                ended.append(shard)
    return ended


def _is_emfile(error: Exception) -> bool:
    """Whether an error, or what it was made of, says that no descriptor is left."""
    return errno.EMFILE in (getattr(each, "errno", 0) for each in (error, error.__cause__))


async def in_thread(call: Callable[[], T]) -> T:
    """Return the result of a call in a thread of its own. The daemon does not wait for it at its
    end: a file system that does not answer keeps it forever."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def end(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, result, failure)

    run_in_thread(run)
    return await future


def run_in_thread(call: Callable[[], object]) -> None:
    """Make a call that may wait for a file system, in a thread of its own."""
    threading.Thread(target=call, name="ffserve-open", daemon=True).start()
