"""Parsing: files are checked, identified and read in threads, those of one message together.

A data set may have ten thousand files; a client passes a few hundred of them at a time. Their
tables are read by `ffserve/reads/shard_tables.py`, and written into the directory. Those of remote
files are read one by one.

A file system can hang in any call on its files, and an origin in any request. So all of this runs
in threads, which `opening.py` starts. A session that waits for a file which another session opens
must not wait for the other files of that session: `OpeningGroup.current` names the file that the
thread reads at present.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from ffserve.disk.files import allocated_size, os_error
from ffserve.dtypes import Int32s, Int64s
from ffserve.engine.io import open_direct_all
from ffserve.engine.many_files import States, clear_flags, close_fds, stat_fds
from ffserve.errors import FFServeError, ReadError
from ffserve.formats.ffrecord import may_be_indices
from ffserve.limits import TABLE_SAMPLE_SIZE
from ffserve.reads.page_cache import open_cached
from ffserve.reads.shard_tables import (
    SMALL_SIZE,
    How,
    OpenFiles,
    Tables,
    enter,
    read_single,
    read_together,
)
from ffserve.server.files.charges import TableCharge, charge_all
from ffserve.server.files.holding import CatalogTables, DescriptorBudget, OpenSettings
from ffserve.server.files.remote import RemoteFiles, RemoteShard, WantedFile, blocks_of
from ffserve.server.files.shards import FileIdentity, OpenShard, PassedFile, Request, ShardKey
from ffserve.server.users.access import Rules
from ffserve.server.users.domains import Domain
from ffserve.server.users.peers import Owner, Peer
from ffserve.store.blocks import holding_heads
from ffserve.store.fetching import OpenObject

JOIN_S = 1.0
"""A session waits at most this long for a file that waits for other files of another session. To
open 253 small files takes 30 ms, and more on a slow file system."""
SINGLY_S = 0.1
"""When files were opened one by one for this long, those that are open are entered, since other
sessions may wait for one of them."""


@dataclass(slots=True, eq=False)
class OpeningGroup:
    """Files that one thread opens together for a peer.

    begun: monotonic time. alone: whether it is a single file. ended: it has a result when the
    thread has ended, whether the files were opened or not.
    """

    begun: float
    alone: bool
    ended: asyncio.Future[None]
    peer: Peer
    current: ShardKey | None = None
    """The file that the thread reads alone. That takes minutes if the file must be scanned."""

    def holds_up(self, key: ShardKey, now: float) -> bool:
        """Whether one of these files has waited too long for the others."""
        return now - self.begun > JOIN_S and not self.alone and self.current != key


@dataclass(slots=True)
class IdentifiedFiles:
    """Passed files that were checked by these rules. opened: the same files, with their heads.
    keys: of their shards."""

    rules: Rules
    passed: list[PassedFile]
    opened: OpenFiles
    keys: list[ShardKey]

    def allocated(self, row: int) -> Callable[[], int]:
        """Return what tells how many bytes of a file are stored. A charge keeps it."""
        return partial(allocated_size, self.opened.fds[row])

    def read_together(self, rows: list[int], how: How) -> dict[int, Tables]:
        """Return the tables of those of some files that are read together, by row."""
        return read_together(self.opened, rows, how)

    def read(self, row: int, how: How, charge: TableCharge) -> Tables:
        """Return the tables of a file. Raises: as of `read_single`."""
        return read_single(self.opened, row, how, charge.admit, charge.reading)

    @property
    def paths(self) -> list[str]:
        """Their names."""
        return self.opened.paths

    @property
    def positions(self) -> list[int]:
        """In the OPEN."""
        return [one.position for one in self.passed]


@dataclass(slots=True)
class IdentifiedObjects:
    """Remote files of an OPEN. keys: of their shards. objects: opened with this peer's access, once
    that has been checked; None if the object belongs to a shard, empty before."""

    remote: RemoteFiles
    peer: Peer
    wanted: list[WantedFile]
    paths: list[str]
    keys: list[ShardKey]
    objects: list[OpenObject | None] = field(default_factory=list)

    def without(self, proven: list[int]) -> IdentifiedObjects | None:
        """Return the files in other rows, before they are identified; None: there are none."""
        left = sorted({*range(len(self.keys))}.difference(proven))
        wanted, paths = [self.wanted[k] for k in left], [self.paths[k] for k in left]
        keys = [self.keys[k] for k in left]
        return IdentifiedObjects(self.remote, self.peer, wanted, paths, keys) if left else None

    def identify(self) -> IdentifiedObjects:
        """Open the objects; ask the origins whether the peer may read them.
        Raises: as `RemoteFiles.identify`."""
        self.objects += self.remote.identify(self.wanted, self.peer)
        return self

    def close(self) -> None:
        """Give back the objects that belong to no shard."""
        self.remote.close([opened for opened in self.objects if opened is not None])
        self.objects.clear()

    @property
    def positions(self) -> list[int]:
        """In the OPEN."""
        return [one.position for one in self.wanted]

    def allocated(self, row: int) -> Callable[[], int]:
        """Return what tells how many bytes of a file were fetched. A charge keeps it."""
        state = self.object_of(row).stored.state
        return lambda: state.held_size

    def read_together(self, rows: list[int], how: How) -> dict[int, Tables]:
        """Return the same as of other files; those that are scanned have indexes in the store."""
        with holding_heads([self.object_of(k).stored for k in rows], SMALL_SIZE) as there:
            rows = [k for k, each in zip(rows, there, strict=True) if each]
            stored = [self.object_of(k).stored for k in rows]
            fds, sizes = [one.data_fd for one in stored], [one.size for one in stored]
            paths = [self.paths[k] for k in rows]
            heads = OpenFiles.of(fds, paths, np.array(sizes, np.int64), how.format)
        found = read_together(heads, range(len(rows)), how)
        return {rows[k]: tables for k, tables in found.items() if tables.scanned is None}

    def read(self, row: int, how: How, charge: TableCharge) -> Tables:
        """Return the tables of a file. Raises: as of `RemoteFiles.parse`."""
        about = how.format, how.verify, how.tolerant
        shard = self.remote.parse(self.object_of(row), *about, charge.admit, charge.reading)
        return Tables.of(shard, how.max_chunk_size)

    def object_of(self, row: int) -> OpenObject:
        """Return an object that belongs to no shard yet."""
        opened = self.objects[row]
        assert opened is not None
        return opened

    def take(self, row: int) -> OpenObject:
        """Return the same, which belongs to a shard from now on."""
        opened, self.objects[row] = self.object_of(row), None
        opened.head = b""
        return opened

    def give(self, row: int, shard: OpenShard) -> None:
        """Give the object to a shard, unless that has one with the same access: later reads use the
        access that came last, since credentials expire."""
        owner, digest = self.peer.owner, self.wanted[row].access.digest
        remote = shard.remote
        assert remote is not None
        known = remote.objects.get(owner)
        if known is None or known.access is None or known.access.digest != digest:
            remote.objects[owner] = self.take(row)
            self.objects[row] = known
        remote.proofs[owner] = digest


Identified: TypeAlias = IdentifiedFiles | IdentifiedObjects


def close_passed(files: list[PassedFile]) -> None:
    """Close descriptors that clients passed. It may wait for their file systems."""
    fds = [fd for one in files for fd in (one.fd, one.index) if fd is not None and fd >= 0]
    for one in files:
        one.fd, one.index = -1, None
    close_fds(fds)


class ShardParser:
    """Checks files and makes shards of them. All of its methods run in threads.

    Args: settings: `identify` and `parse` follow changes of them.
    """

    def __init__(
        self, tables: CatalogTables, budget: DescriptorBudget, settings: OpenSettings
    ) -> None:
        self._directory = tables.directory
        self._lock = tables.lock
        self._accounts = tables.accounts
        self._budget = budget
        self._settings = settings

    # ---- whose files they are -------------------------------------------------------------------

    def identify(self, request: Request, passed: list[PassedFile], peer: Peer) -> IdentifiedFiles:
        """Check passed files. Raises: AccessDenied, ReadError."""
        rules = self._settings.rules
        paths = [request.paths[one.position] for one in passed]
        fds = np.array([one.fd for one in passed], np.int32)
        with rules.domains(peer) as domains_of:
            files = rules.check(fds, paths, peer)
            _check_indexes(rules, passed, paths, peer)
            # The tables are read through the page cache.
            with contextlib.suppress(OSError):
                clear_flags(fds, os.O_DIRECT | os.O_NONBLOCK)
            indexes = [one.index for one in passed]
            sizes = files.states["size"].copy()
            opened = OpenFiles.of(fds.tolist(), paths, sizes, request.format, indexes)
            owners = domains_of(files)
        how = request.verify, request.tolerant
        rows = zip(identities_of(files.states), opened.formats, owners, strict=True)
        keys = [ShardKey(identity, name, *how, owner) for identity, name, owner in rows]
        return IdentifiedFiles(rules, passed, opened, keys)

    # ---- their tables ---------------------------------------------------------------------------

    def parse(
        self,
        request: Request,
        files: Identified,
        rows: list[int],
        domains: list[Domain],
        opening: OpeningGroup,
    ) -> list[OpenShard]:
        """Open the shards of some files, and close the descriptors that were passed for these. If
        that takes long, only the first files are opened.

        Args: domains: the domain of each.
        Raises: FFServeError: of the first that cannot be opened; then none is. OSError with EMFILE.
        """
        charges: list[TableCharge] = []
        try:
            return self._parsed(request, files, rows, domains, opening, charges)
        except BaseException:
            for charge in charges:
                charge.give()
            raise

    def _parsed(
        self,
        request: Request,
        files: Identified,
        rows: list[int],
        domains: list[Domain],
        opening: OpeningGroup,
        charges: list[TableCharge],
    ) -> list[OpenShard]:
        """Do the same. Args: charges: gets the charge for the tables of each."""
        paths, keys = [files.paths[k] for k in rows], [files.keys[k] for k in rows]
        if isinstance(files, IdentifiedObjects):
            fds = np.array([files.object_of(k).stored.data_fd for k in rows], np.int32)
        else:
            fds = np.array([files.passed[k].fd for k in rows], np.int32)
            _check_unchanged(fds, keys, paths)
        tables = self._read(request, files, rows, opening, charges)
        rows, fds, domains = rows[: len(tables)], fds[: len(tables)], domains[: len(tables)]
        keys, paths = keys[: len(tables)], paths[: len(tables)]
        counts = [each.count for each in tables]
        bases = self._reserve(counts, domains)
        try:
            enter(tables, bases, paths, self._directory)
            opened, alignments = _reopen(fds, paths)
        except BaseException:
            self._release(bases, counts, domains)
            raise
        taken: list[RemoteShard | None] = [None] * len(rows)
        twice = np.flatnonzero((alignments > 1) & (np.array(counts) > 0))
        cached = np.full(len(rows), -1, np.int32)
        if isinstance(files, IdentifiedObjects):
            taken = self._take_objects(files, rows, tables, bases)
            # Blocks that come are in the page cache first, and not on the disk yet.
            cached[twice] = fds[twice]
            for fd in fds[twice].tolist():
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        else:
            close_passed([files.passed[k] for k in rows])
            twice = twice[: max(self._budget.spare, 0)]
            cached[twice] = self._open_cached(opened, twice, bases, keys)
        fds_of = zip(opened.tolist(), cached.tolist(), strict=True)
        columns = zip(
            tables, keys, paths, bases, domains, fds_of, alignments.tolist(), charges, taken,
            strict=True,
        )  # fmt: skip
        return [self._shard(request, *each) for each in columns]

    def _read(
        self,
        request: Request,
        files: Identified,
        rows: list[int],
        opening: OpeningGroup,
        charges: list[TableCharge],
    ) -> list[Tables]:
        """Return the tables of the first files, at least one. Args: charges: as of `_parsed`."""
        how = How(
            request.format,
            request.verify,
            request.tolerant,
            self._settings.max_chunk_size,
            keep="inode",
        )
        found = files.read_together(rows, how)
        tables: list[Tables] = []
        peer = opening.peer
        charged = charge_all(
            self._accounts,
            peer.uid,
            [_table_size(each) for each in found.values()],
            [files.paths[k] for k in found],
            trusted=peer.is_administrator,
        )
        charge_of = dict(zip(found, charged, strict=True))
        begun = time.monotonic()
        try:
            for k in rows:
                if k in found:
                    charges.append(charge_of.pop(k))
                    tables.append(found[k])
                    continue
                if tables and time.monotonic() - begun > SINGLY_S:
                    break
                opening.current = files.keys[k]
                charge = TableCharge(
                    self._accounts,
                    peer.uid,
                    files.paths[k],
                    trusted=peer.is_administrator,
                    allocated=files.allocated(k),
                    wanted=request.wanted,
                    sparse=isinstance(files, IdentifiedFiles),
                )
                charges.append(charge)
                tables.append(files.read(k, how, charge))
                charge.settle()
        finally:
            opening.current = None
            for charge in charge_of.values():  # of files that are not opened this time
                charge.give()
        return tables

    def _take_objects(
        self,
        files: IdentifiedObjects,
        rows: list[int],
        tables: list[Tables],
        bases: list[int],
    ) -> list[RemoteShard | None]:
        """Return what shards have of their objects, which belong to them from now on."""
        taken, directory = list[RemoteShard | None](), self._directory
        for k, each, base in zip(rows, tables, bases, strict=True):
            stored = files.object_of(k).stored
            firsts = lasts = np.zeros(each.count, np.int32)
            if stored.count > 1:
                offsets = directory.offsets[base : base + each.count].astype(np.int64)
                lengths = directory.lengths(np.arange(base, base + each.count))
                firsts, lasts = blocks_of(each, offsets, lengths, stored.block_size)
            taken.append(RemoteShard(stored, {files.peer.owner: files.take(k)}, firsts, lasts))
        return taken

    def read_lasts(self, remote: RemoteFiles, shards: list[OpenShard], owner: Owner) -> None:
        """Keep the first bytes of those last samples of remote FFRecord files that may be folder
        indices: clients ask for them at once, and would make the whole sample be fetched."""
        counts = np.array([shard.count for shard in shards], np.int64)
        numbers = np.array([shard.base for shard in shards], np.int64) + counts - 1
        begins = self._directory.offsets[numbers].astype(np.int64)
        sizes = self._directory.lengths(numbers)
        ends = np.array([shard.size for shard in shards], np.int64)
        asked = may_be_indices(sizes, counts) & (begins + sizes <= ends)
        lasts, chosen = list[tuple[OpenObject, int]](), list[RemoteShard]()
        for shard, begin, may_be in zip(shards, begins.tolist(), asked.tolist(), strict=True):
            assert shard.remote is not None
            if may_be:
                lasts.append((shard.remote.object_for([owner]), begin))
                chosen.append(shard.remote)
            else:
                shard.remote.last = b""
        for each, head in zip(chosen, remote.begins(lasts), strict=True):
            each.last = head

    # ---- their shards ---------------------------------------------------------------------------

    @staticmethod
    def _shard(
        request: Request,
        tables: Tables,
        key: ShardKey,
        path: str,
        base: int,
        domain: Domain,
        fds: tuple[int, int],
        alignment: int,
        charge: TableCharge,
        remote: RemoteShard | None,
    ) -> OpenShard:
        """Return a shard. Args: fds: `fd` and `cached_fd` of it."""
        return OpenShard(
            key=key,
            path=path,
            format=tables.format,
            fd=fds[0],
            size=key.identity.size,
            count=tables.count,
            base=base,
            checksum_kind=tables.kind if request.verify else 0,
            fingerprint=tables.fingerprint,
            alignment=alignment,
            cached_fd=fds[1],
            payload_size=tables.payload_size,
            domain=domain,
            chunked=tables.chunked,
            members=tables.members,
            device=key.identity.device,
            scanned=tables.scanned,
            remote=remote,
            charge=charge,
        )

    # ---- their numbers --------------------------------------------------------------------------

    def _reserve(self, counts: list[int], domains: list[Domain]) -> list[int]:
        """Return the first number of each shard: shards of a domain are neighbours."""
        bases: list[int] = []
        totals: dict[int, int] = {}
        for count, domain in zip(counts, domains, strict=True):
            totals[domain.number] = totals.get(domain.number, 0) + count
        with self._lock, contextlib.ExitStack() as undo:
            following: dict[int, int] = {}
            for number, total in totals.items():
                following[number] = first = self._directory.reserve(total, number)
                undo.callback(self._directory.release, first, total, number)
            undo.pop_all()
        for count, domain in zip(counts, domains, strict=True):
            bases.append(following[domain.number])
            following[domain.number] += count
        return bases

    def _release(self, bases: list[int], counts: list[int], domains: list[Domain]) -> None:
        with self._lock:
            for base, count, domain in zip(bases, counts, domains, strict=True):
                self._directory.release(base, count, domain.number)

    def _open_cached(
        self, fds: Int32s, rows: Int64s, bases: list[int], keys: list[ShardKey]
    ) -> Int32s:
        """Return `page_cache.open_cached` of the files in some rows."""
        begins = self._directory.offsets[np.array(bases, np.int64)[rows]].astype(np.int64)
        ends = np.array([keys[k].identity.size for k in rows.tolist()], np.int64)
        cached = open_cached(fds[rows], begins, ends)
        with self._lock:
            self._budget.cached_count += int((cached >= 0).sum())
        return cached


def _check_indexes(rules: Rules, passed: list[PassedFile], paths: list[str], peer: Peer) -> None:
    """Close those index files that the rules do not allow, since anybody who may write to the
    directory could put them there. Their files are read without an index file."""

    def are_allowed(rows: list[int]) -> bool:
        with contextlib.suppress(FFServeError):
            fds = np.array([passed[k].index for k in rows], np.int32)
            rules.check(fds, [paths[k] for k in rows], peer)
            return True
        return False

    rows = [k for k, one in enumerate(passed) if one.index is not None]
    for k in [] if are_allowed(rows) else rows:
        if not are_allowed([k]):
            close_fds([index for index in (passed[k].index,) if index is not None])
            passed[k].index = None


def _table_size(tables: Tables) -> int:
    """Return the bytes of the tables of a small file."""
    chunks = 0 if tables.chunked is None else len(tables.chunked.chunks)
    return TABLE_SAMPLE_SIZE * (tables.count + chunks)


def identities_of(states: States) -> list[FileIdentity]:
    """Return the identities of files."""
    names = "device", "inode", "size", "mtime", "ctime"
    columns = zip(*(states[name].tolist() for name in names), strict=True)
    return [FileIdentity(*each) for each in columns]


def _check_unchanged(fds: Int32s, keys: list[ShardKey], paths: list[str]) -> None:
    """Raise a ReadError if a file is not what it was when its head was read."""
    states, error = stat_fds(fds)
    for identity, key, path in zip(identities_of(states), keys, paths, strict=False):
        # Some file systems report another ctime each time.
        if identity._replace(ctime_ns=key.identity.ctime_ns) != key.identity:
            raise ReadError("the file changed while it was opened", path=path, hint="try again")
    if error is not None:
        raise os_error(error, paths[len(states)])


def _reopen(fds: Int32s, paths: list[str]) -> tuple[Int32s, Int64s]:
    try:
        return open_direct_all(fds)
    except OSError as error:
        # The error names /proc/self/fd/FD.
        failed = os.path.basename(str(error.filename or ""))
        named = dict(zip(map(str, fds.tolist()), paths, strict=True))
        raise os_error(error, named.get(failed, paths[0])) from error
