"""Remote files of clients: their owners, the right of a user to read them, and their tables.

A remote file is an object of the store (`ffserve/store/`), a sparse file that the engines read as
any other; `fetches.py` brings its blocks before they are read. The client names the version that it
wants and passes its access (`store/credentials.py`). The daemon asks the origin with that access,
and with nothing of its own, so the origin decides what a user may read. An object belongs to the
domain of the user, unless its place is one of `[store] common`. The store, too, keeps the objects
of two domains apart. With `store.access = "own"` the daemon asks with its own access, for its own
user and nobody else, and opens its store when that user first needs it.

Origins may not answer: all that asks them runs in threads. Each user has threads of its own for
each place, so users share the network equally, and one whose origin hangs holds up nobody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from ffserve.config import ServerConfig, format_size
from ffserve.dtypes import Int32s, Int64s, UInt32s
from ffserve.errors import FFServeError, FormatError, MissingFile, ReadError, UsageError
from ffserve.formats.base import Admit, ForetoldReadAt, Shard
from ffserve.formats.ffrecord import LAST_SIZE
from ffserve.limits import MOST_ORIGINS, MOST_TAG, MOST_URL, PROVEN_AT_ONCE
from ffserve.protocol import EVERY
from ffserve.reads.shard_tables import Tables
from ffserve.server.users.peers import OWN, Account, Owner, Peer, account_of
from ffserve.store import cache_network
from ffserve.store.blocks import PRESENT, StoredObject
from ffserve.store.cache_network import CacheNetwork
from ffserve.store.credentials import Access, forget_own_settings, quieten_packages, served
from ffserve.store.directory import Store, name_of, usual_limit
from ffserve.store.fetching import MOST_ALIKE, Fetcher, OpenObject, Patience
from ffserve.store.object_tables import parsed
from ffserve.store.origin import ObjectVersion
from ffserve.store.ranges import pipelined
from ffserve.store.schemes import travelling
from ffserve.store.urls import shown

log = logging.getLogger("ffserve")


GIVE_UP_S = 75.0
"""The daemon asks a failing origin again for this long. A client waits 120 s for an answer, and the
last attempt can take another 30 s."""
COMPARE_S = 15.0
"""If tables are damaged, an OPEN waits this long for their blocks to be fetched again."""


class WantedFile(NamedTuple):
    """A remote file of an OPEN.

    owner: of the domain that it belongs to. name: of the domain in the store. place: see
    `Access.place`. file: what the shard is identified by, instead of what stat(2) says. parts: see
    `OpenObject`.
    """

    position: int
    identity: ObjectVersion
    access: Access
    owner: Owner | None
    name: str
    place: str
    file: tuple[int, int, int, int, int]
    parts: bool = False


@dataclass(slots=True, eq=False)
class RemoteShard:
    """The parts of a shard whose file is an object of the store.

    objects: by user who has it open, each with that user's access. firsts, lasts: the first and the
    last block of each sample. worth: the time, in seconds since 1970, until which each block is
    worth its fetch; see `fetches.WORTH`.
    """

    stored: StoredObject
    objects: dict[Owner, OpenObject]
    firsts: Int32s
    lasts: Int32s
    worth: UInt32s = field(init=False)
    last: bytes | None = None
    """The first bytes of the last sample, if it may be a folder index; b"": they are not known.
    None: nobody has looked."""
    proofs: dict[Owner, bytes] = field(default_factory=dict)
    """By user: the digest of the access with which the origin let the user read the object."""

    def __post_init__(self) -> None:
        self.worth = np.zeros(self.stored.count, np.uint32)

    def object_for(self, owners: Iterable[Owner]) -> OpenObject:
        """Return the object with the access of the first of these users that has it open. Nobody
        fetches with the access of another one, also where they share the object.

        Raises: ReadError: none of them has it open any more.
        """
        for owner in owners:
            if (found := self.objects.get(owner)) is not None:
                return found
        raise ReadError("the readers that wanted this remote file have closed it")


class RemoteFiles:
    """The store of a daemon, and the rules for what comes into it.

    Raises: UsageError, AccessDenied, ReadError: the store cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.own = config.store_access == "own"
        """Whether it reads for its own user alone, with that user's credentials."""
        self.directory = config.store_directory
        self.cache = _cache(config)
        cache_network.choose(self.cache)
        self.fetcher = Fetcher(lambda: self._made_store(_limit(config)), Patience(GIVE_UP_S))
        self.protocols = travelling(installed=True)
        """The protocols that WELCOME offers."""
        self._common = frozenset(config.store_common)
        quieten_packages()
        if self.own:
            self.protocols.append(EVERY)
            self._common = frozenset()
        else:
            forget_own_settings()
            self.fetcher.store  # noqa: B018 - its first use opens it
        self._reached = set[str]()
        """Places at which a daemon that reads for its own user has found an object."""
        self._instance = secrets.token_hex(8)
        """It differs for each daemon, also for one that has the memory of its predecessor."""
        self._lock = threading.Lock()
        self._pools: dict[Account, Counter[str]] = {}
        """By user and pool: how many objects are open."""
        self._accounts: dict[OpenObject, Account] = {}
        self._accesses: WeakValueDictionary[tuple[Owner, bytes], Access] = WeakValueDictionary()

    def _made_store(self, limit: int) -> Store:
        store = Store(self.directory, limit)
        self._device = os.stat(self.directory).st_dev
        used, most = format_size(store.used), format_size(limit)
        log.info("remote files: store %s, %s of %s", self.directory, used, most)
        return store

    def open_store(self) -> None:
        """Open the store, unless it is open. It waits for its disk.

        Raises: ReadError, AccessDenied: it cannot be used.
        """
        try:
            self.fetcher.store  # noqa: B018 - its first use opens it
        except UsageError as error:
            raise ReadError(error.message, path=error.path, hint=error.hint) from error

    # ---- in the loop's thread -------------------------------------------------------------

    def serves(self, url: str, peer: Peer) -> bool:
        """Whether the daemon fetches a URL for a peer."""
        return served(url) or (self.own and peer.is_self)

    def wanted(
        self, position: int, identity: ObjectVersion, access: Access, peer: Peer, *, parts: bool
    ) -> WantedFile:
        """Return a remote file with its owner and its name in the store."""
        place = access.place(identity.url)
        owner = None if place in self._common else peer.owner
        own = owner == (os.geteuid(), OWN)
        # Without a name, the objects are shared with this user's processes that use the same store.
        name = "" if own else f"{self._domain_name(owner)}\n{place}"
        seed = f"{name_of(identity, name)} {name}".encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(seed, digest_size=24).digest()
        inode, mtime, ctime = (int.from_bytes(digest[k : k + 8], "little") >> 1 for k in (0, 8, 16))
        file = self._device, inode, identity.size, mtime, ctime
        return WantedFile(position, identity, access, owner, name, place, file, parts)

    def access_for(self, peer: Peer, access: Access, some: Sequence[str]) -> Access:
        """Return the access with which URLs are read for a peer. If its user has passed the same
        access before, that object is returned, since it has connections.

        Raises: ReadError: the daemon does not read them for this peer, or not with its own access.
        """
        if self.own:
            if not peer.is_self:
                raise ReadError(
                    "this daemon reads remote files for its own user only",
                    path=shown(some[0]),
                    hint="use your own daemon, or the machine's daemon",
                )
            access.use_own(some)
        return self._accesses.setdefault((peer.owner, access.digest), access)

    def _domain_name(self, owner: Owner | None) -> str:
        """Return the name of a domain in the store. The number of a container may be another's in
        the next daemon: then the blocks that were fetched for the container are not used again."""
        if owner is None:
            return "common"
        uid, namespace = owner
        which = "" if 0 <= namespace <= 1 else f" {self._instance}"
        return f"user {uid} namespace {namespace}{which}"

    # ---- in threads -----------------------------------------------------------------------

    def identify(self, wanted: Sequence[WantedFile], peer: Peer) -> list[OpenObject]:
        """Open objects for a peer; ask their origins whether the peer may read them.

        Raises: the error of an origin; ReadError: an object has changed, or cannot be opened. Then
            none is open.
        """
        # The client of a daemon of the same user has just found the files at their origins; one of
        # each origin shows that the daemon can read there as well.
        new = {one.place: one for one in wanted if one.place not in self._reached}
        found: list[OpenObject] = []

        def prove(opened: OpenObject) -> None:
            try:
                self.fetcher.prove(opened)
            except (MissingFile, UsageError) as error:
                if not self.own:
                    raise
                # The client has found the file, so it has settings that the daemon lacks.
                raise ReadError(error.message, path=error.path, hint=error.hint) from error

        try:
            for one in wanted:  # by one thread, since the store opens one at a time
                found.append(self.open_object(one, peer.owner))
                found[-1].remote.proven = self.own and new.get(one.place) is not one
            some = [one.identity.url for one in wanted]
            list(pipelined(prove, self.fetcher.send_proof, found, some, PROVEN_AT_ONCE))
        except BaseException:
            self.close(found)
            raise
        if self.own:
            self._reached.update(new)
        return found

    def parse(
        self,
        opened: OpenObject,
        format: str | None,
        verify: bool,
        tolerant: bool,
        admit: Admit,
        reading: Callable[[int], object],
    ) -> Shard:
        """Read the tables of an object, which fetches the blocks that these lie in.

        Args: admit, reading: as of `shardfile.open_shard`.
        Raises: FormatError, ChecksumError, TruncatedError, AccessDenied, ReadError.
        """
        blocks: dict[int, None] = {}
        """The blocks that were read, in the order of their last reads."""
        read_at = self.fetcher.read_at(opened)

        def noted(offset: int, into: memoryview, /) -> int:
            if (end := offset + len(into)) <= len(opened.head):
                into[:] = opened.head[offset:end]
                return len(into)
            for block in opened.blocks(offset, offset + len(into)).tolist():
                blocks.pop(block, None)
                blocks[block] = None
            return read_at(offset, into)

        read = partial(
            parsed,
            ForetoldReadAt(noted, read_at.will_need, read_at.near),
            opened.stored.size,
            opened.shown,
            format,
            verify=verify,
            tolerant=tolerant,
            kept=(self.fetcher.store, opened.stored),
            admit=admit,
            reading=reading,
        )
        try:
            return read()
        except FormatError:
            if opened.head:  # it may have come damaged
                opened.head = b""
                return self.parse(opened, format, verify, tolerant, admit, reading)
            there = np.flatnonzero(opened.stored.state.words == PRESENT)
            if not (self.fetcher.repair(opened, there) or self._came_damaged(opened, list(blocks))):
                raise
        return read()

    def begins(self, lasts: Sequence[tuple[OpenObject, int]]) -> list[bytes]:
        """Return the first bytes of last samples; b"" where the origin fails.

        Args: lasts: objects, and the offset of the last sample in each.
        """

        def extent(last: tuple[OpenObject, int]) -> tuple[OpenObject, int, int]:
            opened, begin = last
            return opened, begin, begin + LAST_SIZE

        def read(last: tuple[OpenObject, int]) -> bytes:
            with contextlib.suppress(FFServeError, OSError):
                return self.fetcher.few(*extent(last))
            return b""

        urls = [opened.identity.url for opened, _ in lasts]
        send = lambda last: self.fetcher.send_few(*extent(last))  # noqa: E731
        return list(pipelined(read, send, lasts, urls, PROVEN_AT_ONCE))

    def _came_damaged(self, opened: OpenObject, blocks: Sequence[int]) -> bool:
        """Fetch blocks again in which an error was found; return whether any has other bytes now.
        In an object that was scanned the error is in one of the last blocks."""
        stored, latest = opened.stored, np.array(blocks[: -MOST_ALIKE - 1 : -1], np.int64)
        pinned = np.sort(latest)
        with contextlib.suppress(FFServeError, OSError):
            stored.pin(pinned)
            try:
                there = latest[stored.state.words[latest] == PRESENT]
                return self.fetcher.compare(opened, there, COMPARE_S)
            finally:
                stored.unpin(pinned)
        return False

    def open_object(self, one: WantedFile, owner: Owner) -> OpenObject:
        """Open an object for a user; `close` gives it back. Raises: AccessDenied,
        ReadError."""
        account = account_of(owner)
        pool = pool_of(account, one.place)
        with self._lock:
            pools = self._pools.setdefault(account, Counter())
            if pool not in pools and len(pools) >= MOST_ORIGINS:
                raise ReadError(
                    f"user {owner[0]} already has files of {MOST_ORIGINS} origins open",
                    path=shown(one.identity.url),
                    hint="close readers of other origins",
                )
            pools[pool] += 1
        try:
            opened = self.fetcher.open(
                one.identity, domain=one.name, access=one.access, pool=pool, parts=one.parts
            )
        except BaseException:
            self._leave(account, pool)
            raise
        self._accounts[opened] = account
        return opened

    def close(self, objects: Iterable[OpenObject]) -> None:
        """Give objects back."""
        for opened in objects:
            self.fetcher.close(opened)
            self._leave(self._accounts.pop(opened), opened.pool)

    def _leave(self, account: Account, pool: str) -> None:
        with self._lock:
            pools = self._pools[account]
            pools[pool] -= 1
            if not pools[pool]:
                del pools[pool]
                self.fetcher.forget(pool)
            if not pools:
                del self._pools[account]


def pool_of(account: Account, place: str) -> str:
    """Return the name of the threads that fetch from a place for a user."""
    return f"{account} {place}"


def blocks_of(tables: Tables, offsets: Int64s, lengths: Int64s, size: int) -> tuple[Int32s, Int32s]:
    """Return the first and the last block of each sample.

    Args: offsets, lengths: of plain samples. size: bytes of a block.
    """
    begins, ends = offsets, offsets + lengths
    if tables.chunked is not None:
        chunks = tables.chunked.chunks
        holding = chunks.holding(np.arange(tables.count))
        begins, ends = chunks.begins[holding], chunks.ends[holding]
    most = max(-(-tables.size // size) - 1, 0)
    firsts = np.clip(begins // size, 0, most)
    lasts = np.clip(np.maximum(ends - 1, begins) // size, firsts, most)
    return firsts.astype(np.int32), lasts.astype(np.int32)


def identity_from(
    url: str, size: int, tag: object, modified: int, serves: Callable[[str], bool]
) -> ObjectVersion:
    """Return the version of a remote file that a client names.

    Args: serves: whether the daemon fetches a URL for this client.
    Raises: UsageError: no file has such a version. ReadError: the daemon does not fetch the URL.
    """
    if not isinstance(tag, str) or len(tag) > MOST_TAG or not 0 <= modified < 1 << 62:
        raise UsageError("the client sent an invalid version of a remote file", path=shown(url))
    if len(url) > MOST_URL or not serves(url):
        raise ReadError(
            "the daemon does not fetch this URL",
            path=shown(url),
            hint=f"it fetches {', '.join(name + '://' for name in travelling())}",
        )
    return ObjectVersion(url, size, tag, modified)


def try_store(config: ServerConfig) -> None:
    """Open the store and close it. Raises: UsageError, AccessDenied, ReadError: it cannot be
    used."""
    _cache(config)
    if config.store_directory and config.store_access != "own":
        Store(config.store_directory, _limit(config)).abandon()


def _limit(config: ServerConfig) -> int:
    size = config.store_size_bytes
    return usual_limit(config.store_directory) if size is None else size


def _cache(config: ServerConfig) -> CacheNetwork | None:
    """Return the cache network that is set. Raises: UsageError: it cannot be used."""
    address, files = config.store_cache, [
        config.store_cache_certificate, config.store_cache_key, config.store_cache_ca
    ]  # fmt: skip
    if any(files) and not address.startswith("https://"):
        raise UsageError(
            "a certificate, a key or an authority is set for a cache that is not reached by https",
            hint="write store.cache = 'https://HOST:PORT', or remove them",
        )
    if not address:
        return None
    try:
        return CacheNetwork(address, *files)
    except OSError as error:  # of TLS as well
        raise UsageError(
            f"the certificate, key or authorities of store.cache cannot be used: {error}",
            hint="check these files, and whether the daemon's user may read them",
        ) from error


def store_facts(remote: RemoteFiles | None) -> dict[str, Any]:
    """Return the state of the store for STATUS; sizes in bytes."""
    cache = None if remote is None else remote.cache
    facts = {
        "directory": "" if remote is None else remote.directory,
        "limit": 0,
        "used": 0,
        "fetched": 0,
        "evicted": 0,
        "from_cache": 0 if cache is None else cache.sent,
        "cache_faults": 0 if cache is None else cache.faults,
    }
    if remote is not None and remote.fetcher.has_store:
        store = remote.fetcher.store
        facts |= {"limit": int(store.limit), "used": store.used, "evicted": store.evictions}
        facts["fetched"] = remote.fetcher.fetched
    return facts
