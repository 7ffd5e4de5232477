"""Catalog: the open shards of the daemon, as its sessions see them.

`opening.py` opens files, `entering.py` enters them into the tables, `holding.py` knows which
sessions have them open, `closing.py` closes them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

from ffserve.cache.inventory import ShardRow
from ffserve.engine.many_files import close_fds
from ffserve.server.files.closing import ShardCloser
from ffserve.server.files.entering import ShardEntries
from ffserve.server.files.holding import (
    CatalogTables,
    DescriptorBudget,
    FileEngines,
    HeldShards,
    OpenSettings,
)
from ffserve.server.files.opening import ShardOpener
from ffserve.server.files.remote import RemoteFiles
from ffserve.server.files.shards import OpenShard, Passing, Request, Sources
from ffserve.server.users.access import Rules
from ffserve.server.users.peers import Owner, Peer


class Catalog:
    """Opens, shares and closes shards.

    Args:
        forgotten: called with the number of the first sample of each shard that leaves the tables,
            since another shard may get that number.
        remote: the store; None: remote files are not served.
    """

    def __init__(
        self,
        tables: CatalogTables,
        engines: FileEngines,
        settings: OpenSettings,
        forgotten: Callable[[int], object],
        remote: RemoteFiles | None = None,
    ) -> None:
        self._settings = settings
        self._held = HeldShards(tables, engines, DescriptorBudget(tables.domains), remote)
        self._entries = ShardEntries(self._held)
        self.closer = ShardCloser(self._held, self._entries, settings, forgotten)
        self._opener = ShardOpener(self._held, self._entries, self.closer, settings)
        self.preparations = self._entries.preparations

    def reconfigure(self, rules: Rules | None, max_chunk_size: int, close_after_s: float) -> None:
        """Follow other settings. Open shards stay open; with other rules (None: they stay), a user
        who opens one from now on proves anew that they allow it."""
        self._settings.max_chunk_size = max_chunk_size
        self._settings.close_after_s = close_after_s
        if rules is not None:
            self._settings.rules = rules
            self._held.forget_proofs()

    # ---- for sessions ---------------------------------------------------------------------------

    async def open(self, request: Request, peer: Peer, passing: Passing) -> list[OpenShard]:
        """See `ShardOpener.open`; `close` gives the shards back."""
        return await self._opener.open(request, peer, passing)

    def open_prepared(
        self, sources: Sources, firsts: list[int], key: bytes, name: str, owner: Owner
    ) -> list[OpenShard]:
        """See `ShardEntries.open_prepared`; `close` gives the shards back."""
        return self._entries.open_prepared(sources, firsts, key, name, owner)

    def close(self, shards: list[OpenShard], owner: Owner) -> None:
        """Give back what `open` or `open_prepared` returned."""
        self._held.release(shards, owner)

    def set_stale(self, shard: OpenShard) -> None:
        """See `HeldShards.set_stale`."""
        self._held.set_stale(shard)

    def changed(self, bases: Container[int]) -> set[int]:
        """See `HeldShards.changed`."""
        return self._held.changed(bases)

    # ---- for the daemon -------------------------------------------------------------------------

    def adopt(self, rows: Sequence[ShardRow]) -> None:
        """See `ShardEntries.adopt`."""
        self._entries.adopt(rows)

    def end_return(self) -> None:
        """See `ShardEntries.end_return`."""
        self._entries.end_return()

    async def tend(self, now: float) -> None:
        """See `ShardCloser.tend`."""
        await self.closer.tend(now)

    def end_namespace(self, number: int) -> None:
        """See `ShardCloser.end_namespace`."""
        self.closer.end_namespace(number)

    def shards(self) -> Iterator[list[OpenShard]]:
        """See `HeldShards.shards`."""
        return self._held.shards()

    def has(self, shard: OpenShard) -> bool:
        """See `HeldShards.has`."""
        return self._held.has(shard)

    def shutdown(self) -> None:
        """Close every descriptor."""
        for shards in self.shards():
            for shard in shards:
                close_fds(self._held.take_fds(shard))
