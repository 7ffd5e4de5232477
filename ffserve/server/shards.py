"""Shards: the properties of a shard that the daemon has opened, and of the OPEN that asks for it.

`catalog.py` opens and closes them; sessions read their tables, STATUS lists them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ffserve.cache.inventory import CHUNKED, TOLERANT, VERIFIED, ShardRow
from ffserve.formats.base import ChunkedShard
from ffserve.server.access import Owner, Viewer
from ffserve.server.domains import Domain
from ffserve.shardfile import FileState

Identity: TypeAlias = tuple[int, int, int, int, int]
"""Device, inode, size, mtime, ctime."""
Key: TypeAlias = tuple[Identity, str | None, bool, bool, Owner | None, int]
"""Identity, format, verify, tolerant; the owner of the domain; and -1, or the base of a shard that
is stale."""
Alias: TypeAlias = tuple[Identity, str | None, str, bool, bool]
"""How clients ask for a shard: identity, format (or nil), the end of its name if they name none,
verify, tolerant."""
SUFFIX_LENGTH = 16
"""Characters of a name in an alias: the suffix may decide what the format is."""


@dataclass(slots=True, eq=False)
class OpenShard:
    """A shard in the tables of the daemon.

    path: the name that the client gave who opened it first. fd: -1 while it is closed. sessions:
    data sets of sessions that contain it; holders: the same by owner. proven: who has passed a
    descriptor of it.
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
    scanned: str | None
    domain: Domain
    chunked: ChunkedShard | None = None
    sessions: int = 0
    holders: dict[Owner, int] = field(default_factory=dict)
    proven: frozenset[Owner] = frozenset()
    names: dict[Viewer, str] = field(default_factory=dict)
    """By user who has passed a descriptor: the path that this user gave."""
    aliases: tuple[Alias, ...] = ()
    stale: bool = False
    """The file has other records by now; the next data set with it opens it anew."""
    idle_since: float = 0.0
    adopted: bool = False
    """It is a predecessor's, and nobody has passed a descriptor of it yet."""

    @property
    def opened(self) -> FileState:
        """The file before its tables were read."""
        return FileState(*self.key[0][2:])


@dataclass(slots=True, eq=False)
class PassedFile:
    """A descriptor that a client passed for a file of its OPEN, -1 once it is closed; `index`: of
    its index file."""

    position: int
    fd: int
    index: int | None = None


@dataclass(slots=True)
class Request:
    """An OPEN: which files, and how.

    paths: the client's names; nothing is opened by them. identities: as the client sees the files.
    """

    paths: list[str]
    identities: list[Identity]
    format: str | None
    verify: bool
    tolerant: bool
    aliases: list[Alias] = field(default_factory=list)
    """By position, as the client sees the files; `name` makes them."""

    def name(self, positions: range) -> None:
        """Make the aliases of the next positions."""
        self.aliases += [self.alias(k, self.identities[k]) for k in positions]

    def alias(self, position: int, identity: Identity) -> Alias:
        """Return how this request asks for a shard."""
        end = "" if self.format else self.paths[position][-SUFFIX_LENGTH:]
        return identity, self.format, end, self.verify, self.tolerant


Passing: TypeAlias = Callable[[list[int]], Awaitable[list[PassedFile]]]
"""Asks the client for descriptors of at most MOST_FILES positions; returns the first few of them,
one at least. Raises an FFServeError when none come."""


def row_of(shard: OpenShard) -> ShardRow:
    """Return what a successor needs to know of a shard."""
    identity, asked, verify, tolerant, *_ = shard.key
    flags = (
        (verify and VERIFIED) | (tolerant and TOLERANT) | (shard.chunked is not None and CHUNKED)
    )
    return ShardRow(
        shard.base,
        shard.count,
        identity,
        shard.domain.serial,
        shard.fingerprint,
        shard.payload_size,
        shard.alignment,
        0,
        shard.checksum_kind,
        flags,
        asked or "",
        shard.format,
        shard.path,
    )


def closed_shard(row: ShardRow, domain: Domain) -> OpenShard:
    """Return a shard of a predecessor, as one that was closed."""
    verify, tolerant = bool(row.flags & VERIFIED), bool(row.flags & TOLERANT)
    return OpenShard(
        key=(row.identity, row.asked or None, verify, tolerant, domain.owner, -1),
        path=row.path,
        format=row.format,
        fd=-1,
        size=row.identity[2],
        count=row.count,
        base=row.base,
        checksum_kind=row.checksum_kind,
        fingerprint=row.fingerprint,
        alignment=row.alignment,
        cached_fd=-1,
        payload_size=row.payload_size,
        device=row.identity[0],
        scanned=None,
        domain=domain,
        adopted=True,
    )
