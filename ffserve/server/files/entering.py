"""Entering: new shards, prepared shards and a predecessor's shards get their rows in the tables.

A file that is opened again gets back the samples of the closed shard that it was, if the tables of
the two are equal: another file can have its inode by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from ffserve.cache.adoption import drop_other_blocks
from ffserve.cache.inventory import CHUNKED, ShardRow
from ffserve.formats.base import UNKNOWN_LENGTH
from ffserve.limits import MOST_CLOSED
from ffserve.server.files.holding import HeldShards
from ffserve.server.files.preparations import Preparation, Preparations
from ffserve.server.files.shards import (
    Items,
    OpenShard,
    Sources,
    closed_shard,
    prepared_key,
    prepared_shard,
    row_of,
)
from ffserve.server.users.peers import Owner


class ShardEntries:
    """Enters shards into the tables."""

    def __init__(self, held: HeldShards) -> None:
        self._held = held
        self._tables = held.tables
        self.preparations = Preparations()
        self.entered = False
        """Whether shards were entered since `closing.py` last compared closed shards with them."""

    # ---- files ----------------------------------------------------------------------------------

    def enter(self, shards: list[OpenShard]) -> None:
        """Enter parsed shards into the tables."""
        held, engines, table = self._held, self._held.engines, self._tables.shards
        by_device: defaultdict[int, list[OpenShard]] = defaultdict(list)
        self.entered = True
        for shard in shards:
            held.open[shard.key] = shard
            shard.domain.shards += 1
            held.budget.remote_count += shard.remote is not None
            if shard.count:
                by_device[shard.device].append(shard)
        fresh, numbers, adopted = [], [], []
        for device, some in by_device.items():
            engine, files = engines.add_files(
                device,
                np.array([shard.fd for shard in some], np.int32),
                np.array([shard.alignment for shard in some], np.int64),
                np.array([shard.cached_fd for shard in some], np.int32),
            )
            inherited = [self._inherit(shard) for shard in some]
            if remotes := {s.base: s.remote for s in some if s.remote is not None}:
                theirs = files[[shard.remote is not None for shard in some]]
                engines.set_remotes(engine, theirs, remotes)
            for shard, file, closed in zip(some, files.tolist(), inherited, strict=True):
                if closed is None:
                    fresh.append(shard)
                    numbers.append((file, engine))
                    continue
                row = table.row(shard.base)
                table.engines[row], table.files[row] = engine, file
                if closed.adopted:
                    adopted.append(shard.base)
        if adopted:
            self._tables.cache.fit(adopted)
        if fresh:
            self._add_new(fresh, numbers)
            self._tables.cache.fit([shard.base for shard in fresh])

    def _inherit(self, shard: OpenShard) -> OpenShard | None:
        """Return the closed shard of the same file, whose samples belong to this shard from now on;
        None if there is none."""
        closed = self._held.closed.pop(shard.key, None)
        if closed is None:
            return None
        old, new = (slice(s.base, s.base + s.count) for s in (closed, shard))
        directory = self._tables.directory
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
            # It is a new file with the inode, size and times of a deleted one.
            self._held.closed[closed.key] = closed
            self._held.set_apart(closed)
            return None
        with self._tables.lock:
            directory.release(shard.base, shard.count, shard.domain.number)
        if closed.charge is not None:
            closed.charge.give()
        shard.domain.shards -= 1  # it was counted twice
        shard.base, shard.chunked = closed.base, closed.chunked or shard.chunked
        return closed

    def _suits(self, closed: OpenShard, shard: OpenShard) -> bool:
        """Whether the lengths that a predecessor found are those of the file, and the blocks that
        it cached are those that this daemon reads."""
        entries, table = self._tables.directory.entries, self._tables.shards
        if bool(table.chunked[table.row(closed.base)]) != (shard.chunked is not None):
            return False
        if shard.chunked is None:
            old, new = (entries[s.base : s.base + s.count] for s in (closed, shard))
            return np.array_equal(old["length_low"], new["length_low"]) and np.array_equal(
                old["place"] >> np.uint64(48), new["place"] >> np.uint64(48)
            )
        table.set_chunks(closed.base, shard.chunked)
        return drop_other_blocks(self._tables.cache, closed.base, closed.count)

    def _add_new(
        self, shards: list[OpenShard], numbers: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Add shards to the table and to the inventory."""
        self._add_rows(shards, numbers)
        for shard in shards:
            if not shard.key.is_apart:
                self._tables.inventory.add_shard(row_of(shard))

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
        self._tables.shards.add_all(np.array(columns, np.int64).T, chunked, has_chunks)

    # ---- a predecessor's ------------------------------------------------------------------------

    def adopt(self, rows: Sequence[ShardRow]) -> None:
        """Enter the shards of a predecessor as closed ones; their numbers are reserved already.
        Their samples are served when a client passes a descriptor of the same file."""
        held, tables = self._held, self._tables
        domains = {domain.serial: domain for domain in tables.domains.all}
        shards = [closed_shard(row, domains[row.domain], self.preparations) for row in rows]
        for shard in shards:
            shard.domain.shards += 1
            shard.domain.prepared_count += shard.count * (shard.preparation is not None)
            held.closed[shard.key] = shard
        if rows:
            self._add_rows(shards, has_chunks=[bool(row.flags & CHUNKED) for row in rows])
        # They do not count as idle: the jobs that had them open are on their way back.
        tables.shards.sessions[:] = 1
        held.most_closed = max(MOST_CLOSED, len(rows))
        tables.cache.next_use.adopt({row.base: row.group for row in rows if row.group})

    def end_return(self) -> None:
        """The shards of the predecessor that no client has opened count as idle from now on."""
        held, tables = self._held, self._tables
        held.most_closed = MOST_CLOSED
        left = [shard.base for shard in held.closed.values() if shard.adopted]
        if left:
            tables.shards.set_sessions(left, [0] * len(left))
            tables.cache.allocator.idle_changed = True

    # ---- prepared samples -----------------------------------------------------------------------

    def open_prepared(
        self, sources: Sources, firsts: list[int], key: bytes, name: str, owner: Owner
    ) -> list[OpenShard]:
        """Open the prepared shards of shards that a session has open, or of items;
        `HeldShards.release` gives them back.

        Args: firsts: the index of the first sample of each, on which results may depend.
        Raises: ReadError: there is no room in the tables, or for another domain.
        """
        held = self._held
        preparation = self.preparations.obtain(owner, key, name)
        count = sum(source.count for source in sources)
        preparation.raw_size = sum(source.payload_size for source in sources) / max(count, 1)
        found: list[OpenShard] = []
        fresh: list[OpenShard] = []
        try:
            for source, first in zip(sources, firsts, strict=True):
                own = prepared_key(source.key, source.fingerprint, key, first, owner)
                shard = held.prepared.get(own) or held.closed.pop(own, None)
                if shard is None:
                    shard = self._new_prepared(source, preparation, first)
                    fresh.append(shard)
                elif shard.adopted:
                    shard.adopted = False
                    like = prepared_shard(source, preparation, first, shard.base, shard.domain)
                    shard.path, shard.names = like.path, like.names
                held.prepared[own] = shard
                found.append(shard)
        finally:
            # If it fails, those that were made are held and released: they are forgotten as closed
            # ones are.
            if fresh := [shard for shard in fresh if shard.count]:
                self._add_new(fresh)
            held.hold(found, owner)
            if len(found) < len(sources):
                held.release(found, owner)
        return found

    def _new_prepared(
        self, source: OpenShard | Items, preparation: Preparation, first: int
    ) -> OpenShard:
        directory = self._tables.directory
        with self._tables.lock:
            domain = self._tables.domains.obtain_for(preparation.owner, source.count)
            base = directory.reserve(source.count, domain.number) if source.count else 0
            domain.shards += source.count > 0
            domain.prepared_count += source.count
        directory.set_lengths(base, np.full(source.count, UNKNOWN_LENGTH, np.uint64))
        return prepared_shard(source, preparation, first, base, domain)
