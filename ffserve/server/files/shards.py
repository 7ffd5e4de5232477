"""Shards: the properties of a shard that the daemon has opened, and of the OPEN that asks for it.

`opening.py` opens them and `closing.py` closes them; sessions read their tables, STATUS lists them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ffserve.cache.inventory import CHUNKED, PREPARED, TOLERANT, VERIFIED, ShardRow
from ffserve.cache.tables import SMALL_RECORD_SIZE
from ffserve.disk.shardfile import Contradiction, FileState
from ffserve.formats.base import ChunkedShard
from ffserve.formats.ffrecord import FORMAT as FFRECORD
from ffserve.formats.members import ABOUT, Members
from ffserve.server.files.charges import TableCharge
from ffserve.server.files.preparations import Preparation, Preparations
from ffserve.server.files.remote import RemoteShard
from ffserve.server.users.domains import Domain
from ffserve.server.users.peers import Owner, Viewer, viewer_of
from ffserve.store.credentials import Access
from ffserve.store.origin import ObjectVersion

Identity: TypeAlias = tuple[int, int, int, int, int]
"""A file as the client sees it: device, inode, size, mtime, ctime."""
Alias: TypeAlias = tuple[Identity, str | None, str, bool, bool]
"""How clients ask for a shard: identity, format (or None), the end of its name if they name no
format, verify, tolerant."""


class FileIdentity(NamedTuple):
    """The identity of a file; for a remote file, numbers that stand for its version."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def state(self) -> FileState:
        """The size and the times of the file."""
        return FileState(self.size, self.mtime_ns, self.ctime_ns)


class ShardKey(NamedTuple):
    """The key of a shard. Files of one key share one shard.

    owner: of the domain that its samples belong to. apart: -1; the base of a shard that is set
    apart, since its file was replaced: an OPEN does not find it any more.
    """

    identity: FileIdentity
    format: str | None
    verify: bool
    tolerant: bool
    owner: Owner | None
    apart: int = -1

    @property
    def is_apart(self) -> bool:
        """Whether an OPEN does not find the shard."""
        return self.apart >= 0


_PREPARED_BY = re.compile(r"(.*) ([0-9]{1,19}) ([0-9a-f]{64})", re.DOTALL)
"""The path in a row of prepared samples: name of the preparation, first index, key."""
SUFFIX_LENGTH = 16
"""An alias has this many characters of the end of a name: the suffix may decide the format."""


@dataclass(slots=True, eq=False)
class OpenShard:
    """A shard in the tables of the daemon.

    path: the name by which the first client opened it. fd: -1 while it is closed. sessions: how
    many data sets of sessions contain it; holders: the same by owner. proven: the owners that have
    passed a descriptor of it.
    """

    key: ShardKey
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
    """The file through the page cache, -1: not open; see `page_cache.open_cached`. Of a remote file
    it is the store's."""
    payload_size: int
    device: int
    scanned: str | None
    domain: Domain
    chunked: ChunkedShard | None = None
    members: Members | None = None
    """Which its records are, if they are members of samples."""
    sessions: int = 0
    holders: dict[Owner, int] = field(default_factory=dict)
    proven: frozenset[Owner] = frozenset()
    names: dict[Viewer, str] = field(default_factory=dict)
    """The path of each user who has passed a descriptor."""
    aliases: tuple[Alias, ...] = ()
    preparation: Preparation | None = None
    """Of a shard whose samples clients prepare. It has no file."""
    first: int = 0
    """Of a prepared shard: the index of its first sample, on which the samples may depend."""
    contradiction: Contradiction | None = None
    """Why its tables contradict its file. Any thread may set it; `HeldShards.set_stale` follows."""
    stale: bool = False
    """Whether the file has other records by now. The next data set opens the file anew."""
    idle_since: float = 0.0
    damaged: int = 0
    """This many samples were found damaged."""
    _damaged: bytearray = field(default_factory=bytearray)
    """A bit for each sample, once a damaged one was found."""
    remote: RemoteShard | None = None
    """Its file is an object of the store."""
    charge: TableCharge | None = None
    """Who pays for its tables; None: nobody, since it is a predecessor's, or prepared."""
    adopted: bool = False
    """Whether it is a predecessor's, and no client has passed a descriptor of it yet."""

    def block(self, number: int) -> bytes | None:
        """Return a block of NAMES; None: there is none."""
        members = self.members
        if members is not None and (number == ABOUT or number < len(members.blocks)):
            return members.block(number)
        if self.format != FFRECORD.name or number != ABOUT:
            return None
        return b"" if self.remote is None else self.remote.last or b""

    @property
    def opened(self) -> FileState:
        """The file before its tables were read."""
        return self.key.identity.state

    def note_damaged(self, number: int) -> None:
        """Count a sample as damaged, once."""
        self._damaged = self._damaged or bytearray(self.count // 8 + 1)
        byte, bit = divmod(number - self.base, 8)
        self.damaged += ~self._damaged[byte] >> bit & 1
        self._damaged[byte] |= 1 << bit


@dataclass(slots=True, eq=False)
class PassedFile:
    """A descriptor that a client passed for a file of its OPEN; -1 once it is closed. index: a
    descriptor of its index file."""

    position: int
    fd: int
    index: int | None = None


@dataclass(slots=True)
class Request:
    """An OPEN: the files, and the settings by which they are opened.

    paths: the client's names. The daemon opens no file by them. URLs are without secrets.
    identities: the files as the client sees them. remote: the versions of remote files, by
    position. access: reaches their origins. parts: only parts of them are read.
    """

    paths: list[str]
    identities: list[Identity]
    format: str | None
    verify: bool
    tolerant: bool
    remote: dict[int, ObjectVersion] = field(default_factory=dict)
    access: Access | None = None
    parts: bool = False
    wanted: Callable[[], bool] = lambda: True
    """Whether the session still waits for them. Threads call it."""
    aliases: list[Alias] = field(default_factory=list)
    """By position; `name` makes them."""

    def name(self, positions: range) -> None:
        """Make the aliases of the next positions."""
        self.aliases += [self.alias(k, self.identities[k]) for k in positions]

    def alias(self, position: int, identity: Identity) -> Alias:
        """Return how this request asks for a shard."""
        end = "" if self.format else self.paths[position][-SUFFIX_LENGTH:]
        return identity, self.format, end, self.verify, self.tolerant


Passing: TypeAlias = Callable[[list[int]], Awaitable[list[PassedFile]]]
"""Asks the client for descriptors of at most MOST_FILES positions, and returns those of the first
few of them, at least one. Raises an FFServeError when none come."""


@dataclass(frozen=True, slots=True)
class Items:
    """Samples that clients make of no file, as far as their prepared shard follows a file's."""

    count: int
    names: dict[Viewer, str]
    path: str = "items"
    fingerprint: int = 0
    payload_size: int = 0
    device: int = 0

    @property
    def key(self) -> ShardKey:
        """A key that no file has."""
        return ShardKey(FileIdentity(0, 0, self.count, 0, 0), None, False, False, None)


Sources: TypeAlias = Sequence[OpenShard | Items]
"""What prepared shards are made of."""


def items(count: int, owner: Owner) -> Items:
    """Return so many items of an owner."""
    return Items(count, {viewer_of(owner): "items"})


def prepared_key(
    source: ShardKey, fingerprint: int, key: bytes, first: int, owner: Owner
) -> ShardKey:
    """Return the key of the prepared samples of a shard; see `prepared_shard`."""
    how = f"{source.format or ''} {fingerprint:x} {key.hex()} {first}"
    return source._replace(format=how, owner=owner)


def prepared_shard(
    source: OpenShard | Items, preparation: Preparation, first: int, base: int, domain: Domain
) -> OpenShard:
    """Return the prepared samples of a shard, or of no file. Args: first: the index of its first
    sample."""
    viewer = viewer_of(preparation.owner)
    return OpenShard(
        prepared_key(source.key, source.fingerprint, preparation.key, first, preparation.owner),
        f"{source.path} prepared by {preparation.name}",
        "prepared",
        fd=-1,
        size=0,
        count=source.count,
        base=base,
        checksum_kind=0,
        fingerprint=source.fingerprint,
        alignment=1,
        cached_fd=-1,
        payload_size=source.count * SMALL_RECORD_SIZE,
        device=source.device,
        scanned=None,
        domain=domain,
        names={viewer: f"{source.names.get(viewer, '')} prepared by {preparation.name}"},
        preparation=preparation,
        first=first,
    )


def row_of(shard: OpenShard) -> ShardRow:
    """Return the row of a shard in the inventory, for a successor."""
    key, asked = shard.key, shard.key.format
    flags = (
        (key.verify and VERIFIED)
        | (key.tolerant and TOLERANT)
        | (shard.chunked is not None and CHUNKED)
    )
    path, preparation = shard.path, shard.preparation
    if preparation is not None:
        asked, flags = (asked or "").split(" ", 1)[0], flags | PREPARED
        path = f"{preparation.name} {shard.first} {preparation.key.hex()}"
    return ShardRow(
        shard.base,
        shard.count,
        key.identity,
        shard.domain.serial,
        shard.fingerprint,
        shard.payload_size,
        shard.alignment,
        0,
        shard.checksum_kind,
        flags,
        asked or "",
        shard.format,
        path,
    )


def preparation_of(row: ShardRow) -> tuple[str, int, bytes] | None:
    """Return how the samples of a row were prepared: name of the preparation, index of the first
    sample, key. None if the row does not have it."""
    found = _PREPARED_BY.fullmatch(row.path)
    if found is None:
        return None
    name = found[1].encode(errors="surrogateescape").decode(errors="replace")
    return name, int(found[2]), bytes.fromhex(found[3])


def closed_shard(row: ShardRow, domain: Domain, preparations: Preparations) -> OpenShard:
    """Return a shard of a predecessor as a closed one."""
    verify, tolerant = bool(row.flags & VERIFIED), bool(row.flags & TOLERANT)
    identity = FileIdentity(*row.identity)
    key = ShardKey(identity, row.asked or None, verify, tolerant, domain.owner)
    path, preparation, first = row.path, None, 0
    if row.flags & PREPARED:
        found = preparation_of(row)
        assert found is not None and domain.owner is not None, "it was checked"
        name, first, how = found
        preparation = preparations.obtain(domain.owner, how, name)
        key = prepared_key(key, row.fingerprint, how, first, domain.owner)
        path = f"prepared by {name}"
    return OpenShard(
        key=key,
        path=path,
        format=row.format,
        fd=-1,
        size=0 if preparation is not None else row.identity[2],
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
        preparation=preparation,
        first=first,
        adopted=True,
    )
