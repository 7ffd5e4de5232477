"""Trust domains: which users share cached samples, and the memory files of each domain.

A client can read all memory that it maps. So samples of files that not everybody may read lie in
files that only their readers get. A domain is the common one, whose samples everybody who may
connect shares, or that of one owner (`peers.Owner`). It has a file for its part of the arena, of
the directory and of the index; all are as large as the daemon's own mappings, which show, slab by
slab and region by region, the file of the domain that the place belongs to. Slabs move between
domains as they move between size classes (`cache/arena.py`); the policy knows no domains.

docs/decisions/domains.md has the reasons.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ffserve.cache.cache import Cache
from ffserve.cache.inventory import COMMON, OWNED, UNCLAIMED, Inventory
from ffserve.cache.tables import Directory
from ffserve.errors import ReadError
from ffserve.limits import (
    LEAST_PREPARED_SIZE,
    MOST_DOMAINS,
    MOST_USER_DOMAINS,
    OTHERS_SHARE,
    PREPARED_SAMPLE_SIZE,
    PREPARED_SHARE,
)
from ffserve.server.users.peers import Owner, account_of
from ffserve.system.memfd import MemoryFile, SharedMemory

SLABS_AT_ONCE = 4
"""One step gives back this many slabs, which takes 0.3 ms each."""


@dataclass(slots=True, eq=False)
class Domain:
    """Users who share all of their cached samples.

    owner: None: everybody who may connect. number: in arena and directory; used again for another
    domain when this one is dissolved. serial: for clients; never used again. shards: that are open,
    idle ones included.
    """

    owner: Owner | None
    number: int
    serial: int
    arena: MemoryFile
    directory: MemoryFile
    index: MemoryFile
    shards: int = 0
    prepared_count: int = 0
    """Samples of its prepared shards, whether they are in memory or not."""

    @property
    def files(self) -> tuple[MemoryFile, MemoryFile, MemoryFile]:
        """The memory files that its clients map."""
        return self.arena, self.directory, self.index


@dataclass(frozen=True, slots=True)
class KeptDomain:
    """A domain of a predecessor; see Domain. claimed: it has its owner."""

    owner: Owner | None
    claimed: bool
    number: int
    serial: int
    files: tuple[MemoryFile, MemoryFile, MemoryFile]


class Domains:
    """The domains of a daemon.

    The memory that exists from the start belongs to the first domain that is asked for, so a daemon
    of one user moves no slab.

    Args:
        move: gives an empty slab, at this offset, the pages of a file, and frees those of the
            other; False: that is not possible. See `resize.Pages.move`.
        inventory: where the domains are entered for a successor; None: nowhere.
        kept: those of a predecessor, the first one at the front; None: new ones.
    """

    def __init__(
        self,
        cache: Cache,
        memory: SharedMemory,
        directory: Directory,
        move: Callable[[int, int, MemoryFile, MemoryFile], bool],
        inventory: Inventory | None = None,
        kept: Sequence[KeptDomain] = (),
    ) -> None:
        self._cache = cache
        self._memory = memory
        self._inventory = inventory
        self.made: Callable[[Domain], object] = lambda domain: None
        self.gone: Callable[[Domain], object] = lambda domain: None
        """Called with a domain that was made, and with one that was dissolved."""
        self._arena = arena = cache.arena
        self._directory = directory
        self._move = move
        self._serials = itertools.count(max((each.serial for each in kept), default=0) + 1)
        files = directory.entries_memory.file, directory.index_memory.file
        serial = kept[0].serial if kept else next(self._serials)
        self._first = Domain(None, 0, serial, memory.file, *files)
        self._claimed = False
        """Whether the first domain has its owner."""
        self._by_owner: dict[Owner | None, Domain] = {}
        self._by_number: dict[int, Domain] = {0: self._first}
        self._unused_numbers: list[int] = []
        arena.give = self._give
        if kept:
            self._adopt(kept)
        else:
            self._enter(self._first)

    def _adopt(self, kept: Sequence[KeptDomain]) -> None:
        first = kept[0]
        self._claimed = first.claimed
        if self._claimed:
            self._first.owner = first.owner
            self._by_owner[first.owner] = self._first
        for each in kept[1:]:
            while self._arena.domain_count <= each.number:
                self._cache.add_domain()
            domain = Domain(each.owner, each.number, each.serial, *each.files)
            self._directory.add_domain(each.number, *each.files[1:])
            self._by_owner[each.owner] = self._by_number[each.number] = domain
        self._unused_numbers = [
            number for number in range(self._arena.domain_count) if number not in self._by_number
        ]

    def _enter(self, domain: Domain) -> None:
        """Enter a domain into the inventory."""
        if self._inventory is not None:
            known = domain is not self._first or self._claimed
            kind = UNCLAIMED if not known else COMMON if domain.owner is None else OWNED
            self._inventory.add_domain(domain.serial, domain.number, kind, domain.owner)

    def show_slabs(self) -> None:
        """Have each domain's slabs show its file, and give back what the files hold beside them.

        Raises: OSError: too many mappings; ReadError.
        """
        size, owners = self._arena.slab_size, self._arena.slab_domain
        edges = np.flatnonzero(np.diff(owners)) + 1
        runs = list(itertools.pairwise([0, *edges.tolist(), len(owners)]))
        in_use = self._arena.slab_count
        for domain in self._by_number.values():
            for low, high in runs:
                mine = owners[low] == domain.number
                if mine and domain.number:
                    self._memory.show(domain.arena, low * size, (high - low) * size)
                start = low if not mine else max(low, in_use)
                if start < high:
                    domain.arena.punch(start * size, (high - start) * size)

    @property
    def fd_count(self) -> int:
        """Return the descriptors of the domains beyond the first, which exists from the start."""
        return len(self._first.files) * (len(self._by_number) - 1)

    @property
    def all(self) -> list[Domain]:
        """Return every domain, the oldest first."""
        return sorted(self._by_owner.values(), key=lambda domain: domain.serial)

    @property
    def every(self) -> list[Domain]:
        """Return every domain, also the first one before it has its owner."""
        return list(self._by_number.values())

    def get(self, owner: Owner | None) -> Domain | None:
        """Return the domain of an owner, if there is one; None: the common one."""
        return self._by_owner.get(owner)

    def is_full(self, owner: Owner | None) -> bool:
        """Whether no further domain can be made for an owner."""
        if not self._claimed or owner in self._by_owner:
            return False
        of_user = 0 if owner is None else len(self._of_account(owner))
        return len(self._by_owner) >= MOST_DOMAINS or of_user >= MOST_USER_DOMAINS

    def obtain(self, owner: Owner | None) -> Domain:
        """Return the domain of an owner, made if there is none; None: the common one.

        Raises: ReadError: there are too many, or no descriptors are left.
        """
        domain = self._by_owner.get(owner)
        if domain is None:
            domain = self._make(owner) if self._claimed else self._first
            domain.owner = owner
            self._claimed = True
            self._by_owner[owner] = domain
            self._enter(domain)
            if domain is not self._first:
                self.made(domain)
        return domain

    def obtain_for(self, owner: Owner, count: int) -> Domain:
        """Return the domain of an owner for another prepared shard, of so many samples.

        Raises: ReadError: as of `obtain`; or the owner's prepared shards would have too many.
        """
        domain = self.obtain(owner)
        most = max(self._arena.size // PREPARED_SHARE, LEAST_PREPARED_SIZE) // PREPARED_SAMPLE_SIZE
        left = most - sum(each.prepared_count for each in self._by_owner.values())
        held = sum(each.prepared_count for each in self._of_account(owner))
        if count > left or held + count > OTHERS_SHARE * left:
            raise ReadError(
                f"user {owner[0]} has {held} prepared samples in the tables, in memory or not, "
                f"and wants {count} more; {left} of {most} are left",
                hint="close data sets of other preparations, or raise the daemon's --arena",
            )
        return domain

    def _of_account(self, owner: Owner) -> list[Domain]:
        """Return the domains of an owner's user, in all namespaces."""
        account = account_of(owner)
        return [
            domain
            for other, domain in self._by_owner.items()
            if other is not None and account_of(other) == account
        ]

    def _make(self, owner: Owner | None) -> Domain:
        if self.is_full(owner):
            raise ReadError(
                f"the daemon keeps the samples of {len(self._by_owner)} users or containers apart, "
                "and has no room for another",
                hint="try again when jobs of others have ended",
            )
        with contextlib.ExitStack() as undo:
            files: list[MemoryFile] = []
            for like in self._first.files:
                files.append(MemoryFile(like.name, like.size))
                undo.callback(files[-1].close)
            undo.pop_all()
        arena, directory, index = files
        number = self._unused_numbers.pop() if self._unused_numbers else self._cache.add_domain()
        self._directory.add_domain(number, directory, index)
        domain = Domain(owner, number, next(self._serials), arena, directory, index)
        self._by_number[number] = domain
        return domain

    def _give(self, slab: int, number: int) -> bool:
        size = self._arena.slab_size
        before = self._by_number[int(self._arena.slab_domain[slab])]
        after = self._by_number[number]
        return self._move(slab * size, size, before.arena, after.arena)

    def dissolve(self, domain: Domain) -> bool:
        """Take a step to free a domain without shards; return whether another step is needed. The
        first domain stays."""
        number, arena = domain.number, self._arena
        if number == 0 or domain.shards or self._by_number.get(number) is not domain:
            return False
        if not arena.is_empty(number) or not arena.give_back(number, SLABS_AT_ONCE):
            return False
        if (arena.slab_domain == number).any():
            return True
        try:
            self._directory.drop_domain(number)
        except OSError:
            return False  # no mappings are left: the next time
        if self._inventory is not None:
            self._inventory.remove_domain(domain.serial)
        self.gone(domain)
        for file in domain.files:
            # Clients that still map it keep no memory by that.
            with contextlib.suppress(OSError):
                file.punch(0, file.size)
            file.close()
        del self._by_owner[domain.owner], self._by_number[number]
        self._unused_numbers.append(number)
        return False
