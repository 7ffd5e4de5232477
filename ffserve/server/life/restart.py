"""Restart: the memory of a daemon that was here before is checked, and taken over.

A service manager keeps the descriptors of a daemon's memory (`fd_store.py`), or a running daemon
passes them (`handover.py`); either way they come here by name. Nothing of them is believed: a
descriptor that is not what its name says, or an inventory that contradicts itself, is left out or
ends the attempt, and the daemon then starts with empty memory and says why. What is taken over is
in docs/decisions/restart.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ffserve.cache.inventory import (
    CHUNKED,
    COMMON,
    IN_DOUBT,
    NAME,
    OWNED,
    PREPARED,
    UNCLAIMED,
    Inventory,
    ShardRow,
)
from ffserve.cache.tables import CAPACITY, REGION_UNIT, SMALLEST_CAPACITY
from ffserve.config import ServerConfig, format_size
from ffserve.engine.codec import CRC_32, CRC_32C, CRC_NONE
from ffserve.errors import ReadError
from ffserve.limits import MOST_DOMAINS
from ffserve.server.files.shards import preparation_of
from ffserve.server.users.domains import KeptDomain
from ffserve.server.users.peers import HOST, OWN, Owner, namespace_marks
from ffserve.system.memfd import MemoryFile

log = logging.getLogger("ffserve")

PAGE_NAME = "ffserve-page"
FILE_NAMES = ("ffserve-arena", "ffserve-directory", "ffserve-index")
"""The names of the files of a domain; its serial follows each name."""
MOST_ATTEMPTS = 3
"""Memory is not used after this many daemons have ended while they were taking it over."""
QUARANTINE_S = 60.0
"""Slots that were being filled are not used for this long: the kernel may write to them after a
process has died, 31 to 198 ms later as measured."""
RETURN_S = 30.0
"""The samples of a predecessor are kept for this long for jobs that have not come back."""


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """The memory of a predecessor, checked. domains: by number. shards: by first sample."""

    page: MemoryFile
    inventory: Inventory
    domains: list[KeptDomain]
    shards: list[ShardRow]

    @property
    def slab_size(self) -> int:
        """Bytes of a slab."""
        return self.inventory.get("slab_size")

    @property
    def limit(self) -> int:
        """Bytes to which the arena can grow."""
        return self.inventory.get("slabs") * self.slab_size

    @property
    def runs(self) -> dict[int, list[tuple[int, int]]]:
        """The numbers of samples by domain: first and count of each shard, rising."""
        numbers = {domain.serial: domain.number for domain in self.domains}
        runs: dict[int, list[tuple[int, int]]] = {domain.number: [] for domain in self.domains}
        for shard in self.shards:
            runs[numbers[shard.domain]].append((shard.base, shard.count))
        return runs


def file_names(serial: int) -> list[str]:
    """Return the names of a domain's files."""
    return [f"{name}-{serial}" for name in FILE_NAMES]


def terms_of(config: ServerConfig) -> bytes:
    """Return a digest of what decides who shares samples with whom, besides their files."""
    groups = sorted({os.getegid(), *os.getgroups()}) if config.common == "user" else []
    with open("/proc/self/uid_map", "rb") as file:  # what users' numbers mean
        users = file.read().decode().split()
    terms = json.dumps([config.common, os.geteuid(), groups, users])
    return hashlib.sha256(terms.encode()).digest()


def take(fds: dict[str, int], config: ServerConfig) -> KeptMemory:
    """Check what a predecessor left.

    Args: fds: by name; those that are used are removed from it and belong to the result.
    Raises: ReadError: it cannot be used; the rest of `fds` is still the caller's.
    """
    missing = [name for name in (PAGE_NAME, NAME) if name not in fds]
    if missing:
        raise ReadError(f"the descriptor {missing[0]} is missing")
    with contextlib.ExitStack() as undo:
        inventory = Inventory.adopt(fds[NAME], os.fstat(fds[NAME]).st_size)
        undo.callback(inventory.close)
        del fds[NAME]
        _check(inventory, config)
        page = MemoryFile.adopted(PAGE_NAME, fds[PAGE_NAME], mmap.PAGESIZE)
        undo.callback(page.close)
        del fds[PAGE_NAME]
        domains = _domains(inventory, fds)
        for file in (file for domain in domains.values() for file in domain.files):
            undo.callback(file.close)
        if domains and min(domain.number for domain in domains.values()) == 0:
            shards = _shards(inventory, domains)
            undo.pop_all()
            kept = sorted(domains.values(), key=lambda each: each.number)
            return KeptMemory(page, inventory, kept, shards)
        raise ReadError("the memory of the first domain is missing")


def _check(inventory: Inventory, config: ServerConfig) -> None:
    """Check the header. Raises: ReadError."""
    get = inventory.get
    limit = get("slab_size") * get("slabs")
    if bytes(inventory.header["terms"][0]) != terms_of(config):
        raise ReadError(
            "the previous daemon had another user, other groups or another value of 'common'"
        )
    if get("state") == IN_DOUBT:
        raise ReadError("the previous daemon ended with an internal error")
    if get("attempts") >= MOST_ATTEMPTS:
        raise ReadError(
            f"the last {get('attempts')} daemons ended while they were taking over this memory"
        )
    if config.arena_size > limit:
        raise ReadError(
            f"an arena of {format_size(config.arena_size)} does not fit into the kept memory of "
            f"{format_size(limit)}"
        )
    if config.arena_size < 4 * get("slab_size"):
        raise ReadError(
            f"an arena of {format_size(config.arena_size)} cannot have the slabs of the kept "
            f"memory, which have {format_size(get('slab_size'))} each"
        )
    if not 0 < get("generation") < 1 << 40:
        raise ReadError(f"the inventory has an invalid generation: {get('generation')}")
    capacity = get("capacity")
    if not SMALLEST_CAPACITY <= capacity <= CAPACITY or capacity.bit_count() != 1:
        raise ReadError(f"the inventory has invalid sizes: {capacity} samples")


def _domains(inventory: Inventory, fds: dict[str, int]) -> dict[int, KeptDomain]:
    """Return the domains that can be taken over, by serial."""
    capacity = inventory.get("capacity")
    arena_size = inventory.get("slabs") * inventory.get("slab_size")
    sizes = arena_size, capacity * 16, capacity * 12
    domains: dict[int, KeptDomain] = {}
    inodes: set[int] = set()
    for row in inventory.domains():
        kind, serial, number, uid, namespace = row
        try:
            _check_domain(inventory, row, domains.values())
            files = _files(serial, sizes, fds, inodes)
        except ReadError as error:
            log.info("dropped the samples of user %d, namespace %d: %s", uid, namespace, error)
            inventory.remove_domain(serial)
            continue
        owner = (uid, namespace) if kind == OWNED else None
        domains[serial] = KeptDomain(owner, kind != UNCLAIMED, number, serial, files)
    return domains


def _check_domain(
    inventory: Inventory, row: tuple[int, int, int, int, int], others: Iterable[KeptDomain]
) -> None:
    """Check the row of a domain. Raises: ReadError."""
    kind, serial, number, uid, namespace = row
    owner = (uid, namespace) if kind == OWNED else None
    if kind not in (COMMON, OWNED, UNCLAIMED) or (kind == UNCLAIMED and number):
        raise ReadError(f"the domain has an invalid kind: {kind}")
    if serial <= 0 or not 0 <= number < MOST_DOMAINS or number in {d.number for d in others}:
        raise ReadError(f"the domain has an invalid number: {number}")
    if kind != UNCLAIMED and owner in {each.owner for each in others if each.claimed}:
        raise ReadError("another domain belongs to the same owner")
    if owner is not None and not _lasts(inventory, owner):
        raise ReadError("the user namespace of its owner has ended")


def _files(
    serial: int, sizes: tuple[int, int, int], fds: dict[str, int], inodes: set[int]
) -> tuple[MemoryFile, MemoryFile, MemoryFile]:
    """Return the files of a domain. Raises: ReadError: one is missing, or is not what it should be,
    or is one of those with these inodes as well."""
    names = file_names(serial)
    missing = [name for name in names if name not in fds]
    if missing:
        raise ReadError(f"the descriptor {missing[0]} is missing")
    found = {os.fstat(fds[name]).st_ino for name in names}
    if len(found) < len(names) or found & inodes:
        raise ReadError("one of its files was passed under two names")
    arena, directory, index = (
        MemoryFile.adopted(kind, fds[name], size)
        for kind, name, size in zip(FILE_NAMES, names, sizes, strict=True)
    )
    inodes |= found
    for name in names:
        del fds[name]
    return arena, directory, index


def _lasts(inventory: Inventory, owner: Owner) -> bool:
    """Whether an owner's numbers mean the same people as before."""
    marks = dict(zip((OWN, HOST), namespace_marks(), strict=True))
    known = {OWN: inventory.get("own_mount"), HOST: inventory.get("host_mount")}
    namespace = owner[1]
    return namespace in known and marks[namespace] == known[namespace] >= 0 and owner[0] >= 0


def _is_prepared(row: ShardRow, domain: KeptDomain) -> bool:
    """Whether the row of a shard of prepared samples is one."""
    return domain.owner is not None and not row.flags & CHUNKED and preparation_of(row) is not None


def _shards(inventory: Inventory, domains: Mapping[int, KeptDomain]) -> list[ShardRow]:
    capacity = inventory.get("capacity")
    kept: list[ShardRow] = []
    keys = set()
    end = region_end = 0
    last = None
    for row in sorted(inventory.shards(), key=lambda each: each.base):
        domain = domains.get(row.domain)
        of = row.path if row.flags & PREPARED else ""
        key = row.identity, row.asked, row.flags, row.domain, of
        sound = (
            domain is not None
            and domain.claimed
            and 0 < row.count <= capacity - row.base
            and row.identity[2] >= 0
            and row.payload_size >= 0
            and 0 < row.alignment <= 1 << 20
            and row.alignment.bit_count() == 1
            and row.checksum_kind in (CRC_NONE, CRC_32, CRC_32C)
            and 0 <= row.flags < 16
            and (not row.flags & PREPARED or _is_prepared(row, domain))
            and 0 <= row.group < 1 << 31
            and key not in keys
        )
        if sound:
            assert domain is not None
            # Regions of two domains have no page in common.
            low = row.base // REGION_UNIT * REGION_UNIT if domain.number else row.base
            sound = row.base >= end if domain is last else low >= max(end, region_end)
        if not sound:
            inventory.remove_shard(row.base)
            continue
        assert domain is not None
        end, last = row.base + row.count, domain
        region_end = -(-end // REGION_UNIT) * REGION_UNIT if domain.number else end
        keys.add(key)
        kept.append(row)
    return kept
