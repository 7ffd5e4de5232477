"""Catalog: the open shards, each opened and parsed once, shared by all data sets.

A shard is identified by its file (device, inode, size, times of change), not by its name: a file
that was replaced or rewritten under its name is another shard, and sessions that opened the old
one go on reading the old one. Both times count: mtime can be set back by anybody who writes
(`cp -p`, `rsync --inplace`), ctime by nobody. A shard that no session has open stays open, with its
samples, for the next job until its descriptor is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ffserve import formats
from ffserve.cache.cache import Cache
from ffserve.cache.tables import Directory, ShardTable
from ffserve.dataset import bound_lengths
from ffserve.engine.io import open_direct
from ffserve.errors import AccessDenied, FFServeError, ReadError
from ffserve.files import os_error, wrap_os_error
from ffserve.formats.base import HEAD_SIZE, ChunkedShard
from ffserve.server import access
from ffserve.server.access import Peer
from ffserve.server.io import Engines
from ffserve.shardfile import FileState, open_shard, scanned_as

Key = tuple[Any, ...]

_OPENERS = 4
"""Threads that open shards, so that a hung network mount does not block other users."""

_PATH_MAX = 4096
"""Bytes of a path, the NUL at its end included, that the kernel accepts."""

DROP_COUNT = 8192
"""Samples of a dropped shard that are evicted between two turns of the loop: 1 to 4 ms."""


@dataclass(slots=True, eq=False)
class OpenShard:
    """A shard in the tables of the daemon; `sessions`: data sets of sessions that contain it."""

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
    payload_size: int
    device: int
    opened: FileState
    scanned: str | None
    chunked: ChunkedShard | None = None
    sessions: int = 0
    stale: bool = False
    """The file has other records by now; the next data set with it opens it anew."""


class Catalog:
    """Opens, shares and closes shards.

    Args: roots: see access.check. max_chunk_size: see ServerConfig.
    """

    def __init__(
        self,
        directory: Directory,
        table: ShardTable,
        cache: Cache,
        engines: Engines,
        roots: tuple[str, ...],
        max_chunk_size: int,
    ) -> None:
        self._directory = directory
        self._table = table
        self._cache = cache
        self._engines = engines
        self._max_chunk_size = max_chunk_size
        self._roots = tuple(os.path.realpath(root) for root in roots)
        self._open: dict[Key, asyncio.Future[OpenShard]] = {}
        self._idle: OrderedDict[Key, OpenShard] = OrderedDict()
        self._pool = ThreadPoolExecutor(_OPENERS, thread_name_prefix="ffserve-open")
        self._reserving = threading.Lock()
        # Each shard has one descriptor; a quarter is left for sessions and everything else.
        self._most_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4

    async def open(
        self,
        paths: list[str],
        format_name: str | None,
        verify: bool,
        tolerant: bool,
        peer: Peer,
    ) -> list[OpenShard]:
        """Open the shards of one data set for one session; `close` gives them back.

        Raises: AccessDenied, FormatError, ChecksumError, TruncatedError, ReadError: of the first
            shard that cannot be served; then none is held.
        """
        loop = asyncio.get_running_loop()
        keys = await loop.run_in_executor(
            self._pool, self._identify, paths, format_name, verify, tolerant, peer
        )
        while not self._room_for(keys) and await self._drop_idle():
            pass
        if not self._room_for(keys):
            new = sum(key not in self._open for key in set(keys))
            raise ReadError(
                f"the daemon may have {self._most_open} files open; {len(self._open)} are in use, "
                f"and this data set has {new} more",
                path=paths[0],
                hint="raise the limit on open files (ulimit -n, LimitNOFILE= in the systemd unit)",
            )
        wanted = dict(zip(keys, paths, strict=True))
        while True:
            mine: dict[Key, asyncio.Future[OpenShard]] = {}
            for key in wanted:
                if key not in self._open:
                    self._open[key] = mine[key] = loop.create_future()
            if mine:
                await self._open_new(loop, wanted, mine, peer)
            others = [f for key in wanted if (f := self._open.get(key)) and not f.done()]
            if others:
                await asyncio.wait(others)
            elif all(key in self._open for key in wanted):
                break
            # Another session may have failed to open a shard for reasons of its own: try again.
        shards = [self._open[key].result() for key in keys]
        for shard in shards:
            self._hold(shard)
        return shards

    async def _open_new(
        self,
        loop: asyncio.AbstractEventLoop,
        paths: dict[Key, str],
        mine: dict[Key, asyncio.Future[OpenShard]],
        peer: Peer,
    ) -> None:
        try:
            outcome = await loop.run_in_executor(
                self._pool, self._parse_all, [(key, paths[key]) for key in mine], peer
            )
            for key, shard in outcome:
                future = mine[key]
                if isinstance(shard, OpenShard):
                    if shard.count:
                        engine, file = self._engines.add_file(
                            shard.device, shard.fd, shard.alignment
                        )
                        self._table.add(
                            shard.base,
                            shard.count,
                            payload_size=shard.payload_size,
                            alignment=shard.alignment,
                            checksum_kind=shard.checksum_kind,
                            file=file,
                            engine=engine,
                            chunked=shard.chunked,
                        )
                    self._idle[key] = shard
                    future.set_result(shard)
                else:
                    del self._open[key]
                    future.set_exception(shard)
                    future.exception()
        finally:
            for key, future in mine.items():
                if not future.done():
                    del self._open[key]
                    future.cancel()
        for _, shard in outcome:
            if not isinstance(shard, OpenShard):
                raise shard

    def _identify(
        self,
        paths: list[str],
        format_name: str | None,
        verify: bool,
        tolerant: bool,
        peer: Peer,
    ) -> list[Key]:
        keys = []
        for path in paths:
            fd = self._open_plain(path, peer)
            try:
                identity = _identity(fd)
                name = format_name or _format_of(fd, path, identity[2])
                keys.append((*identity, name, verify, tolerant))
            finally:
                os.close(fd)
        return keys

    def _open_plain(self, path: str, peer: Peer) -> int:
        """Open a file for a peer; a file that the peer may not read is not touched."""
        if len(os.fsencode(path)) >= _PATH_MAX:
            # Resolving it below would take the square of its length.
            raise os_error(OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)), path)
        try:
            path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            # An error must not tell which files exist outside the roots.
            access.check_roots(os.path.realpath(path), path, self._roots)
            raise _daemon_error(error, path) from error
        try:
            access.check(path_fd, path, self._roots, peer)
            return os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if isinstance(error, FFServeError):
                raise
            raise _daemon_error(error, path) from error
        finally:
            os.close(path_fd)

    def _parse_all(
        self, wanted: list[tuple[Key, str]], peer: Peer
    ) -> list[tuple[Key, OpenShard | Exception]]:
        outcome: list[tuple[Key, OpenShard | Exception]] = []
        failed = False
        for key, path in wanted:
            if failed:
                outcome.append((key, ReadError("another shard of the data set failed", path=path)))
                continue
            try:
                outcome.append((key, self._parse(key, path, peer)))
            except Exception as error:
                failed = True
                outcome.insert(0, (key, error))
        return outcome

    def _parse(self, key: Key, path: str, peer: Peer) -> OpenShard:
        plain = self._open_plain(path, peer)
        try:
            # ctime is left out: some file systems report another one each time.
            if _identity(plain)[:4] != key[:4]:
                raise ReadError("the file changed while it was opened", path=path, hint="try again")
            size, name, verify, tolerant = key[2], *key[5:]
            opened = FileState.of(plain)
            parsed = open_shard(plain, path, name, verify=verify, tolerant=tolerant, keep="cache")
            chunked = parsed if isinstance(parsed, ChunkedShard) else None
            if chunked is not None:
                chunked.limit(self._max_chunk_size)
            with self._reserving:
                base = self._directory.reserve(parsed.count)
            end = base + parsed.count
            try:
                lengths = np.empty(parsed.count, np.uint64)
                parsed.load(
                    self._directory.offsets[base:end], lengths, self._directory.checksums[base:end]
                )
                if chunked is None:
                    bound_lengths(self._directory.offsets[base:end], lengths, size, path)
                self._directory.set_lengths(base, lengths)
                fd, alignment = wrap_os_error(lambda _: open_direct(f"/proc/self/fd/{plain}"), path)
            except BaseException:
                with self._reserving:
                    self._directory.release(base, parsed.count)
                raise
        finally:
            os.close(plain)
        payload_size = int((lengths if chunked is None else chunked.chunks.sizes).sum())
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
            payload_size=payload_size,
            chunked=chunked,
            device=key[0],
            opened=opened,
            scanned=scanned_as(parsed),
        )

    def _hold(self, shard: OpenShard) -> None:
        if shard.sessions == 0:
            self._idle.pop(shard.key, None)
        shard.sessions += 1
        if shard.count:
            self._table.sessions[self._table.row(shard.base)] = shard.sessions

    def close(self, shards: list[OpenShard]) -> None:
        """Give back what `open` returned."""
        for shard in shards:
            shard.sessions -= 1
            if shard.count:
                self._table.sessions[self._table.row(shard.base)] = shard.sessions
            if shard.sessions == 0:
                self._idle[shard.key] = shard
                self._cache.allocator.idle_changed = True

    def explain(
        self, shard: OpenShard, error: FFServeError, record: tuple[int, int, int]
    ) -> FFServeError:
        """Return the error of a sample of a shard that a session has open; see
        `FileState.explain`. Nobody else gets tables that contradict their file."""
        scanned = shard.scanned
        found = shard.opened.explain(error, shard.fd, shard.path, scanned, record, "cache")
        if found is not error and not shard.stale:
            assert shard.sessions, "it is not idle"
            shard.stale = True
            future = self._open.pop(shard.key)
            shard.key = (*shard.key, shard.base)
            self._open[shard.key] = future
        return found

    def _room_for(self, keys: list[Key]) -> bool:
        return len(self._open.keys() | keys) <= self._most_open

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
                    return True
        return False

    def _forget(self, shard: OpenShard) -> None:
        del self._idle[shard.key], self._open[shard.key]
        if shard.count:
            row = self._table.row(shard.base)
            self._engines.remove_file(int(self._table.engines[row]), int(self._table.files[row]))
            self._table.remove(shard.base)
            with self._reserving:
                self._directory.release(shard.base, shard.count)
        os.close(shard.fd)

    def shards(self) -> list[OpenShard]:
        """Return every shard that is open, idle ones included."""
        return [f.result() for f in self._open.values() if f.done() and not f.exception()]

    def shutdown(self) -> None:
        """Close every descriptor."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for shard in self.shards():
            os.close(shard.fd)


def _daemon_error(error: OSError, path: str) -> FFServeError:
    """Translate an error of the operating system, which was refused to the daemon itself."""
    if not isinstance(error, PermissionError):
        return os_error(error, path)
    return AccessDenied(
        f"the daemon, user {os.geteuid()}, may not read this file",
        path=path,
        hint="give this user read permission for the file, and search permission for the "
        "directories above it (`namei -l` shows them)",
    )


def _format_of(fd: int, path: str, size: int) -> str | None:
    """Detect a format, so that naming it or not leads to the same shard."""
    with contextlib.suppress(OSError, FFServeError):  # parsing reports what is wrong
        return formats.detect(os.pread(fd, HEAD_SIZE, 0), path, size).name
    return None


def _identity(fd: int) -> tuple[int, int, int, int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
