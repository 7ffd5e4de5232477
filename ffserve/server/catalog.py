"""Catalog: the open shards, each opened and parsed once, shared by all data sets.

A shard is identified by its file (device, inode, size, times of change), not by its name: a file
that was replaced or rewritten under its name is another shard, and sessions that opened the old
one go on reading the old one. Both times count: mtime can be set back by anybody who writes
(`cp -p`, `rsync --inplace`), ctime by nobody. A shard that no session has open stays open, with its
samples, for the next job until its descriptor is needed.

The daemon reads a file through descriptors that clients opened (`access.py`). While a shard is
open, its inode cannot belong to another file. So a client whose user has proven once that it may
read the file names it by its identity from then on, and needs no descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np

from ffserve import formats
from ffserve.cache.cache import Cache
from ffserve.cache.tables import Directory, ShardTable
from ffserve.dataset import bound_lengths
from ffserve.engine.io import open_direct, set_direct
from ffserve.errors import FFServeError, ReadError
from ffserve.files import wrap_os_error
from ffserve.formats.base import HEAD_SIZE, ChunkedShard
from ffserve.protocol import MOST_FILES
from ffserve.server.access import DomainOf, Owner, Peer, Rules
from ffserve.server.domains import Domain, Domains
from ffserve.server.io import Engines
from ffserve.server.page_cache import open_cached
from ffserve.shardfile import FileState, open_shard, scanned_as

Identity: TypeAlias = tuple[int, int, int, int, int]
"""Device, inode, size, mtime, ctime."""
Key: TypeAlias = tuple[Identity, str | None, bool, bool, Owner | None, int]
"""Identity, format, verify, tolerant; the owner of the domain; and -1, or the base of a shard that
is stale."""
Alias: TypeAlias = tuple[Identity, str | None, str, bool, bool]
"""How clients ask for a shard: identity, format (or nil), the format that its suffix denotes if it
names none, verify, tolerant."""
T = TypeVar("T")

HOLD_COUNT = 256
"""Shards that are looked up between two turns of the loop."""
DROP_COUNT = 8192
"""Samples of a dropped shard that are evicted between two turns of the loop: 1 to 4 ms."""


@dataclass(slots=True, eq=False)
class OpenShard:
    """A shard in the tables of the daemon.

    path: the name that the client gave who opened it first. sessions: data sets of sessions that
    contain it; holders: the same by owner. proven: who has passed a descriptor of it.
    """

    key: Key
    path: str
    format: str
    fd: int
    size: int
    count: int
    base: int
    checksum_kind: int
    fingerprint: int
    alignment: int
    cached_fd: int
    """The file through the page cache, -1 for none; see `page_cache.open_cached`."""
    payload_size: int
    device: int
    opened: FileState
    scanned: str | None
    domain: Domain
    chunked: ChunkedShard | None = None
    sessions: int = 0
    holders: Counter[Owner] = field(default_factory=Counter)
    proven: set[Owner] = field(default_factory=set)
    aliases: set[Alias] = field(default_factory=set)
    stale: bool = False
    """The file has other records by now; the next data set with it opens it anew."""


@dataclass(slots=True, eq=False)
class PassedFile:
    """A descriptor that a client passed for a file of its OPEN; `index`: of its index file."""

    position: int
    fd: int
    index: int | None = None


@dataclass(slots=True)
class Request:
    """What an OPEN asks for.

    paths: the client's names; nothing is opened by them. identities: as the client sees the files.
    """

    paths: list[str]
    identities: list[Identity]
    format: str | None
    verify: bool
    tolerant: bool

    def alias(self, position: int, identity: Identity) -> Alias:
        """Return how this request asks for a shard."""
        named = None if self.format else formats.by_suffix(self.paths[position])
        by_suffix = named.name if named else ""
        return identity, self.format, by_suffix, self.verify, self.tolerant


Passing: TypeAlias = Callable[[list[int]], Awaitable[list[PassedFile]]]
"""Asks the client for descriptors of at most MOST_FILES positions; returns the first few of them,
one at least. Raises an FFServeError when none come."""


class Catalog:
    """Opens, shares and closes shards.

    Args: rules: which descriptors are taken. max_chunk_size: see ServerConfig.
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
    ) -> None:
        self._domains = domains
        self._directory = directory
        self._table = table
        self._cache = cache
        self._engines = engines
        self._max_chunk_size = max_chunk_size
        self._rules = rules
        self._open: dict[Key, asyncio.Future[OpenShard]] = {}
        self._aliases: dict[tuple[Alias, Owner | None], OpenShard] = {}
        """By alias and domain."""
        self._idle: OrderedDict[Key, OpenShard] = OrderedDict()
        self._held: Counter[Owner] = Counter()
        """Shards by owner."""
        self._reserving = threading.Lock()
        # Each shard has one descriptor or two; an eighth is left for sessions and everything else.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_open, self._most_cached = limit * 3 // 4, limit // 8
        self._cached_count = 0

    # ---- opening --------------------------------------------------------------------------

    async def open(self, request: Request, peer: Peer, passing: Passing) -> list[OpenShard]:
        """Open the shards of one data set for one session; `close` gives them back.

        Raises: AccessDenied, FormatError, ChecksumError, TruncatedError, ReadError: of the first
            shard that cannot be served; then none is held.
        """
        found: dict[int, OpenShard] = {}
        try:
            left: list[int] = []
            for first in range(0, len(request.paths), HOLD_COUNT):
                some = range(first, min(first + HOLD_COUNT, len(request.paths)))
                left += self._hold_proven(request, some, peer, found)
                await asyncio.sleep(0)
            if left:
                await self._make_room(request, left, peer)
            while left:
                batch = self._hold_proven(request, left[:MOST_FILES], peer, found)
                if batch:
                    await self._make_room(request, batch, peer)
                    await self._take(request, await passing(batch), peer, found)
                head = [position for position in left[:MOST_FILES] if position not in found]
                left = head + left[MOST_FILES:]
        except BaseException:
            self.close(list(found.values()), peer.owner)
            raise
        return [found[position] for position in range(len(request.paths))]

    def _hold_proven(
        self,
        request: Request,
        positions: Sequence[int],
        peer: Peer,
        found: dict[int, OpenShard],
    ) -> list[int]:
        """Hold the shards that this peer's owner has proven; return the positions of the others."""
        owner, left = peer.owner, []
        for position in positions:
            alias = request.alias(position, request.identities[position])
            shard = self._aliases.get((alias, None)) or self._aliases.get((alias, owner))
            if shard is None or owner not in shard.proven:
                left.append(position)
            else:
                self._hold(shard, owner)
                found[position] = shard
        return left

    async def _make_room(self, request: Request, left: list[int], peer: Peer) -> None:
        """Close idle shards, so that those of a request can be opened. Raises: ReadError."""
        # Shards that others have proven need no room, but who has not must not learn of them.
        new = len({request.identities[position] for position in left})
        most = self._most_open
        if peer.uid not in (0, os.geteuid()):
            most //= 2
            if self._held[peer.owner] + new > most:
                raise ReadError(
                    f"user {peer.uid} may have {most} files open in the daemon, half of its own "
                    f"limit; {self._held[peer.owner]} are in use, and this data set has {new} more",
                    path=request.paths[left[0]],
                    hint="raise the daemon's limit on open files (LimitNOFILE= in the systemd "
                    "unit, ulimit -n)",
                )
        used = len(self._open) - len(self._idle)
        if used + new <= self._most_open:
            while len(self._open) + new > self._most_open and await self._drop_idle():
                pass
        if len(self._open) + new > self._most_open:
            raise ReadError(
                f"the daemon may have {self._most_open} files open; {used} are in use, "
                f"and this data set has {new} more",
                path=request.paths[left[0]],
                hint="raise the limit on open files (ulimit -n, LimitNOFILE= in the systemd unit)",
            )

    async def _take(
        self,
        request: Request,
        passed: list[PassedFile],
        peer: Peer,
        found: dict[int, OpenShard],
    ) -> None:
        """Hold the shards of passed descriptors, and close the descriptors."""
        fds = [fd for one in passed for fd in (one.fd, one.index) if fd is not None]
        try:
            keys = await in_thread(lambda: self._identify(request, passed, peer))
            for owner in {key[4] for key in keys}:
                while self._domains.is_full(owner) and await self._drop_idle():
                    pass
            left = list(zip(keys, passed, strict=True))
            while left:
                mine: dict[Key, asyncio.Future[OpenShard]] = {}
                files: dict[Key, PassedFile] = {}
                for key, one in left:
                    if key not in self._open:
                        self._open[key] = mine[key] = asyncio.Future()
                        files[key] = one
                if mine:
                    await self._open_new(request, files, mine)
                waiting = []
                for key, one in left:
                    future = self._open.get(key)
                    if future is None or not future.done():
                        # Another session opens the shard. If it fails for reasons of its own, the
                        # next turn opens it for this one.
                        waiting.append((key, one))
                        continue
                    found[one.position] = shard = future.result()
                    self._hold(shard, peer.owner)
                    self._proven(shard, request.alias(one.position, key[0]), peer.owner)
                left = waiting
                others = [f for key, _ in left if (f := self._open.get(key)) and not f.done()]
                if others:
                    await asyncio.wait(others)
        except asyncio.CancelledError:
            raise  # The daemon ends, and a thread may still read the files.
        except BaseException:
            await in_thread(lambda: close_fds(fds))
            raise
        await in_thread(lambda: close_fds(fds))

    def _proven(self, shard: OpenShard, alias: Alias, owner: Owner) -> None:
        shard.proven.add(owner)
        shard.aliases.add(alias)
        self._aliases[alias, shard.key[4]] = shard

    async def _open_new(
        self,
        request: Request,
        files: dict[Key, PassedFile],
        mine: dict[Key, asyncio.Future[OpenShard]],
    ) -> None:
        domains: dict[Key, Domain] = {}
        try:
            with self._reserving:
                for key in files:
                    domains[key] = domain = self._domains.obtain(key[4])
                    domain.shards += 1
            outcome = await in_thread(lambda: self._parse_all(request, files, domains))
            for key, shard in outcome:
                future = mine[key]
                if isinstance(shard, OpenShard):
                    self._add(shard)
                    future.set_result(shard)
                    del domains[key]
                else:
                    del self._open[key]
                    future.set_exception(shard)
                    future.exception()
        finally:
            for domain in domains.values():
                domain.shards -= 1
            for key, future in mine.items():
                if not future.done():
                    del self._open[key]
                    future.cancel()
        for _, shard in outcome:
            if not isinstance(shard, OpenShard):
                raise shard

    def _add(self, shard: OpenShard) -> None:
        """Enter a parsed shard into the tables; it is idle."""
        self._idle[shard.key] = shard
        if not shard.count:
            return
        engine, file = self._engines.add_file(
            shard.device, shard.fd, shard.alignment, shard.cached_fd
        )
        self._table.add(
            shard.base,
            shard.count,
            payload_size=shard.payload_size,
            alignment=shard.alignment,
            checksum_kind=shard.checksum_kind,
            file=file,
            engine=engine,
            domain=shard.domain.number,
            chunked=shard.chunked,
        )
        self._cache.fit(shard.base)

    # ---- in a thread ------------------------------------------------------------------------

    def _identify(self, request: Request, passed: list[PassedFile], peer: Peer) -> list[Key]:
        with self._rules.domains(peer) as domain_of:
            return [self._key(request, one, peer, domain_of) for one in passed]

    def _key(self, request: Request, passed: PassedFile, peer: Peer, domain_of: DomainOf) -> Key:
        path = request.paths[passed.position]
        status = self._rules.check(passed.fd, path, peer)
        if passed.index is not None:
            self._rules.check(passed.index, path, peer)
        # The tables are read through the page cache.
        set_direct(passed.fd, direct=False)
        name = request.format or _format_of(passed.fd, path, status.st_size)
        owner = domain_of(path, status)
        return _identity(status), name, request.verify, request.tolerant, owner, -1

    def _parse_all(
        self, request: Request, files: dict[Key, PassedFile], domains: dict[Key, Domain]
    ) -> list[tuple[Key, OpenShard | Exception]]:
        outcome: list[tuple[Key, OpenShard | Exception]] = []
        failed = False
        for key, passed in files.items():
            path = request.paths[passed.position]
            if failed:
                outcome.append((key, ReadError("another shard of the data set failed", path=path)))
                continue
            try:
                outcome.append((key, self._parse(key, path, passed, domains[key])))
            except Exception as error:
                failed = True
                outcome.insert(0, (key, error))
        return outcome

    def _parse(self, key: Key, path: str, passed: PassedFile, domain: Domain) -> OpenShard:
        identity, name, verify, tolerant, *_ = key
        plain, size = passed.fd, identity[2]
        # ctime is left out: some file systems report another one each time.
        if _identity(os.fstat(plain))[:4] != identity[:4]:
            raise ReadError("the file changed while it was opened", path=path, hint="try again")
        opened = FileState.of(plain)
        parsed = open_shard(
            plain,
            path,
            name,
            verify=verify,
            tolerant=tolerant,
            keep="inode",
            passed_index=passed.index,
        )
        chunked = parsed if isinstance(parsed, ChunkedShard) else None
        if chunked is not None:
            chunked.limit(self._max_chunk_size)
        with self._reserving:
            base = self._directory.reserve(parsed.count, domain.number)
        end = base + parsed.count
        try:
            lengths = np.empty(parsed.count, np.uint64)
            parsed.load(
                self._directory.offsets[base:end], lengths, self._directory.checksums[base:end]
            )
            if chunked is None:
                bound_lengths(self._directory.offsets[base:end], lengths, size, path)
            self._directory.set_lengths(base, lengths)
            fd, alignment = wrap_os_error(lambda _: open_direct(plain), path)
        except BaseException:
            with self._reserving:
                self._directory.release(base, parsed.count, domain.number)
            raise
        payload_size = int((lengths if chunked is None else chunked.chunks.sizes).sum())
        begin = int(self._directory.offsets[base]) if parsed.count else size
        return OpenShard(
            key=key,
            path=path,
            format=parsed.format,
            fd=fd,
            size=size,
            count=parsed.count,
            base=base,
            checksum_kind=parsed.checksum_kind if verify else 0,
            fingerprint=parsed.fingerprint,
            alignment=alignment,
            cached_fd=self._open_cached(fd, alignment, begin, size),
            payload_size=payload_size,
            domain=domain,
            chunked=chunked,
            device=identity[0],
            opened=opened,
            scanned=scanned_as(parsed),
        )

    def _open_cached(self, fd: int, alignment: int, begin: int, end: int) -> int:
        """Return `open_cached` of a file with direct I/O, while there are descriptors for it."""
        if alignment == 1 or self._cached_count >= self._most_cached:
            return -1
        cached_fd = open_cached(fd, begin, end)
        with self._reserving:
            self._cached_count += cached_fd >= 0
        return cached_fd

    def _close(self, shard: OpenShard) -> None:
        os.close(shard.fd)
        if shard.cached_fd >= 0:
            os.close(shard.cached_fd)
            with self._reserving:
                self._cached_count -= 1

    # ---- holding and closing ------------------------------------------------------------------

    def _hold(self, shard: OpenShard, owner: Owner) -> None:
        if shard.sessions == 0:
            self._idle.pop(shard.key, None)
        if not shard.holders[owner]:
            self._held[owner] += 1
        shard.holders[owner] += 1
        shard.sessions += 1
        if shard.count:
            self._table.sessions[self._table.row(shard.base)] = shard.sessions

    def close(self, shards: list[OpenShard], owner: Owner) -> None:
        """Give back what `open` returned."""
        for shard in shards:
            shard.holders[owner] -= 1
            if not shard.holders[owner]:
                del shard.holders[owner]
                self._forget_owner(shard, owner)
            shard.sessions -= 1
            if shard.count:
                self._table.sessions[self._table.row(shard.base)] = shard.sessions
            if shard.sessions == 0:
                self._idle[shard.key] = shard
                self._cache.allocator.idle_changed = True

    def _forget_owner(self, shard: OpenShard, owner: Owner) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        # The last holder's proof stays, for its next job. An owner that is one connection (below 0)
        # does not come again.
        if shard.holders or owner[1] < 0:
            shard.proven.discard(owner)

    def explain(
        self, shard: OpenShard, error: FFServeError, record: tuple[int, int, int]
    ) -> FFServeError:
        """Return the error of a sample of a shard that a session has open; see
        `FileState.explain`. Nobody else gets tables that contradict their file."""
        scanned = shard.scanned
        opened, fd, path = shard.opened, shard.fd, shard.path
        found = opened.explain(error, fd, path, scanned, record, shard.chunked, "inode")
        if found is not error and not shard.stale:
            assert shard.sessions, "it is not idle"
            shard.stale = True
            self._drop_aliases(shard)
            future = self._open.pop(shard.key)
            shard.key = (*shard.key[:5], shard.base)
            self._open[shard.key] = future
        return found

    def _drop_aliases(self, shard: OpenShard) -> None:
        for alias in shard.aliases:
            if self._aliases.get((alias, shard.key[4])) is shard:
                del self._aliases[alias, shard.key[4]]
        shard.aliases.clear()

    async def _drop_idle(self) -> bool:
        """Close the shard that has been idle for longest; return False when none can be closed.

        The loop runs between two steps. If the shard is opened or closed in the meantime, nothing
        more is done here, since the caller must count the open shards again.
        """
        for shard in list(self._idle.values()):
            end = shard.base + shard.count
            for first in range(shard.base, end + 1, DROP_COUNT):
                await asyncio.sleep(0)
                if self._idle.get(shard.key) is not shard:
                    return True
                if not self._cache.allocator.evict(first, min(first + DROP_COUNT, end)):
                    break
            else:
                if shard.count == 0 or self._cache.drop(shard.base):
                    self._forget(shard)
                    await self._dissolve(shard.domain)
                    return True
        return False

    def _forget(self, shard: OpenShard) -> None:
        del self._idle[shard.key], self._open[shard.key]
        self._drop_aliases(shard)
        if shard.count:
            row = self._table.row(shard.base)
            self._engines.remove_file(int(self._table.engines[row]), int(self._table.files[row]))
            self._table.remove(shard.base)
            with self._reserving:
                self._directory.release(shard.base, shard.count, shard.domain.number)
        shard.domain.shards -= 1
        self._close(shard)

    async def _dissolve(self, domain: Domain) -> None:
        """Free a domain if it has no shards any more, a few slabs at a time."""
        left = True
        while left:
            with self._reserving:
                left = self._domains.dissolve(domain)
            await asyncio.sleep(0)

    def shards(self) -> list[OpenShard]:
        """Return every shard that is open, idle ones included."""
        return [f.result() for f in self._open.values() if f.done() and not f.exception()]

    def shutdown(self) -> None:
        """Close every descriptor."""
        for shard in self.shards():
            self._close(shard)


def close_fds(fds: list[int]) -> None:
    """Close descriptors. It may wait for their file systems: not in the loop's thread."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


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


def _format_of(fd: int, path: str, size: int) -> str | None:
    """Detect a format, so that naming it or not leads to the same shard."""
    with contextlib.suppress(OSError, FFServeError):  # parsing reports what is wrong
        return formats.detect(os.pread(fd, HEAD_SIZE, 0), path, size).name
    return None


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
