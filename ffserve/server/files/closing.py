"""Closing: idle shards give up their files, and closed shards their samples.

The file of a shard that no session has open is closed after a while, or when its descriptor is
needed, so that file systems can be unmounted. Its samples stay in memory until other samples need
the room, and are served again when the same file is opened again. A file that was deleted, replaced
or rewritten cannot be opened again as the file that it was: it is closed at once, and its samples
are evicted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ffserve.disk.shardfile import FileState
from ffserve.engine.many_files import close_fds
from ffserve.server.files.entering import ShardEntries
from ffserve.server.files.holding import HOLD_COUNT, HeldShards, OpenSettings
from ffserve.server.files.shards import FileIdentity, OpenShard
from ffserve.server.users.domains import Domain
from ffserve.server.users.peers import Owner
from ffserve.server.users.threads import in_thread

T = TypeVar("T")

DROP_COUNT = 8192
"""The loop takes a turn after this many samples of a dropped shard were evicted: 1 to 4 ms."""
RELEASE_COUNT = 1 << 18
"""The loop takes a turn after the tables of this many samples of a forgotten shard were given back:
1 ms."""
SILENT_S = 5.0
"""A device whose file system does not answer for this long is silent. Its files are not looked at
until it has answered."""


class ShardCloser:
    """Closes the files of idle shards, and forgets closed shards.

    Args: forgotten: called with the number of the first sample of each shard that leaves the
        tables, since another shard may get that number.
    """

    def __init__(
        self,
        held: HeldShards,
        entries: ShardEntries,
        settings: OpenSettings,
        forgotten: Callable[[int], object],
    ) -> None:
        self._held = held
        self._entries = entries
        self._settings = settings
        self._forgotten = forgotten
        self._tables = held.tables
        self._ended: set[int] = set()
        """Namespaces that have ended, while a domain of one of their users exists."""
        self._silent: set[int] = set()
        """Devices whose file systems do not answer."""

    async def tend(self, now: float) -> None:
        """Close the files of shards that have been idle for long; evict the samples of files that
        cannot be opened again; forget closed shards without samples. The loop calls it regularly.
        """
        held = self._held
        idle = list(held.idle.values())
        # A shard that was closed meanwhile was not looked at: its descriptor may be another file's.
        ended = {s for s in await self._ended_of(idle) if held.idle.get(s.key) is s}
        self._set_apart_ended({s.key.identity for s in ended if s.remote is None})
        before = now - self._settings.close_after_s
        chosen = [
            s
            for s in idle
            if s in ended or s.idle_since <= before or self._has_ended(s.domain.owner)
        ]
        await self.close_idle(chosen, len(chosen))
        for shard in [s for s in held.closed.values() if s.key.is_apart]:
            await self._evict(shard)
        await self._forget_empty()
        await self._drop_ended()
        while len(held.closed) > held.most_closed:
            if not await self._drop(next(iter(held.closed.values()))):
                break

    # ---- files that cannot be opened again ------------------------------------------------------

    async def _ended_of(self, shards: list[OpenShard]) -> set[OpenShard]:
        """Return the shards whose files have no name any more, or were changed, as far as file
        systems answer."""
        by_device: defaultdict[int, list[OpenShard]] = defaultdict(list)
        for shard in shards:
            if shard.device not in self._silent:
                by_device[shard.device].append(shard)
        asked = (
            self._on_device(device, partial(_ended_of, some)) for device, some in by_device.items()
        )
        found: set[OpenShard] = set()
        return found.union(*(answer or () for answer in await asyncio.gather(*asked)))

    async def _on_device(self, device: int, call: Callable[[], T]) -> T | None:
        """Make a call on files of a device in a thread; return None if it takes too long. The
        device is silent then, until the call has ended."""
        task = asyncio.ensure_future(in_thread(call))
        await asyncio.wait({task}, timeout=SILENT_S)
        if task.done():
            return task.result()
        self._silent.add(device)
        task.add_done_callback(lambda _: self._silent.discard(device))
        return None

    def _set_apart_ended(self, ended: set[FileIdentity]) -> None:
        """Set those shards without a session apart whose files cannot be opened again: the shards
        of these identities, and closed shards whose name is a later file's by now."""
        held = self._held
        if self._entries.entered and held.closed:
            latest: dict[tuple[Owner | None, str], int] = {}
            for shard in held.open.values():
                if shard.remote is None:
                    name = shard.key.owner, shard.path
                    latest[name] = max(shard.opened.ctime_ns, latest.get(name, 0))
            for shard in held.closed.values():
                if latest.get((shard.key.owner, shard.path), 0) > shard.opened.ctime_ns:
                    ended.add(shard.key.identity)
        self._entries.entered = False
        if ended:
            for shard in (*held.idle.values(), *held.closed.values()):
                if shard.key.identity in ended:
                    held.set_apart(shard)

    # ---- users that do not come again -----------------------------------------------------------

    def end_namespace(self, number: int) -> None:
        """Drop the cached samples of the users of a mount namespace that has ended."""
        self._ended.add(number)

    def _has_ended(self, owner: Owner | None) -> bool:
        return owner is not None and owner[1] in self._ended

    async def _drop_ended(self) -> None:
        if self._ended:
            closed = self._held.closed.values()
            for shard in [s for s in closed if self._has_ended(s.domain.owner)]:
                await self._drop(shard)
            owners = [each.owner for each in self._tables.domains.all if each.owner is not None]
            self._ended.intersection_update([owner[1] for owner in owners])

    # ---- idle shards ----------------------------------------------------------------------------

    async def close_idle(self, shards: list[OpenShard], most: int) -> None:
        """Close the files of shards that are still idle and not being read, `most` of them."""
        for first in range(0, len(shards), HOLD_COUNT):
            if most > 0:
                most -= await self._close_some(shards[first : first + HOLD_COUNT], most)

    async def _close_some(self, shards: list[OpenShard], most: int) -> int:
        held, table = self._held, self._tables.shards
        fds: defaultdict[int, list[int]] = defaultdict(list)
        closed = 0
        busy = self._tables.cache.shards_being_read() if shards else set()
        for shard in shards:
            if closed >= most:
                break
            unfit = shard.base in busy or shard.device in self._silent
            if held.idle.get(shard.key) is not shard or unfit:
                continue
            del held.idle[shard.key], held.open[shard.key]
            held.drop_aliases(shard)
            shard.proven = frozenset()
            closed += 1
            fds[shard.device] += held.take_fds(shard)
            if shard.count:
                row = table.row(shard.base)
                held.engines.remove_file(int(table.engines[row]), int(table.files[row]))
                table.files[row] = -1
                held.closed[shard.key] = shard
            else:
                shard.domain.shards -= 1
        closing = (self._on_device(each, partial(close_fds, some)) for each, some in fds.items())
        await asyncio.gather(*closing)
        return closed

    # ---- closed shards --------------------------------------------------------------------------

    async def drop_oldest(self) -> bool:
        """Drop a shard that no session has open; return False if none can be dropped."""
        held = self._held
        idle = len(held.idle)
        if not held.closed:
            await self.close_idle(list(held.idle.values()), 1)
        for shard in list(held.closed.values()):
            if await self._drop(shard):
                return True
        return len(held.idle) < idle

    async def drop_tables(self, uid: int, size: int) -> bool:
        """Drop shards that no session has open, until a user pays this much less for tables; return
        False if none can be dropped."""
        held = self._held
        idle = [s for s in held.idle.values() if s.charge is not None and s.charge.uid == uid]
        await self.close_idle(idle, len(idle))
        freed = 0
        for shard in list(held.closed.values()):
            charge = shard.charge
            if charge is not None and charge.uid == uid and freed < size:
                before = charge.size
                freed += before if await self._drop(shard) else 0
        return freed > 0

    async def _drop(self, shard: OpenShard) -> bool:
        """Evict the samples of a closed shard, and forget it if it is still closed; return False
        when one of them is in use."""
        if not await self._evict(shard):
            return False
        if self._held.is_closed(shard):
            if not self._tables.cache.drop(shard.base):
                return False
            await self.forget([shard])
        return True

    async def _evict(self, shard: OpenShard) -> bool:
        """Evict the samples of a closed shard; return False when one of them is in use.

        The loop runs between two steps, and the shard may be opened again meanwhile.
        """
        end = shard.base + shard.count
        for first in range(shard.base, end, DROP_COUNT):
            await asyncio.sleep(0)
            if not self._held.is_closed(shard):
                break
            last = min(first + DROP_COUNT, end)
            if not self._tables.cache.allocator.evict(first, last):
                return False
        return True

    async def _forget_empty(self) -> None:
        """Forget the closed shards without samples."""
        table, held = self._tables.shards, self._held
        empty = table.bases[(table.used == 0) & (table.sessions == 0) & (table.files < 0)].tolist()
        closed = {shard.base: shard for shard in held.closed.values()} if empty else {}
        for first in range(0, len(empty), HOLD_COUNT):
            some = [closed[base] for base in empty[first : first + HOLD_COUNT] if base in closed]
            some = [shard for shard in some if held.is_closed(shard)]
            if self._tables.cache.drop(*(shard.base for shard in some)):
                await self.forget(some)
            await asyncio.sleep(0)

    async def forget(self, shards: list[OpenShard]) -> None:
        """Remove closed shards without samples from the tables, and domains without shards."""
        tables = self._tables
        if shards:
            tables.shards.remove(*(shard.base for shard in shards))
            for shard in shards:
                del self._held.closed[shard.key]
                if shard.charge is not None:
                    shard.charge.give()
                self._forgotten(shard.base)
                tables.inventory.remove_shard(shard.base)
        for shard in shards:
            number, end = shard.domain.number, shard.base + shard.count
            for first in range(shard.base, end, RELEASE_COUNT):
                if first > shard.base:
                    await asyncio.sleep(0)
                with tables.lock:
                    tables.directory.release(first, min(RELEASE_COUNT, end - first), number)
            with tables.lock:
                shard.domain.shards -= 1
                shard.domain.prepared_count -= shard.count * (shard.preparation is not None)
        for domain in tables.domains.all:
            if not domain.shards:
                await self._dissolve(domain)

    async def _dissolve(self, domain: Domain) -> None:
        """Free a domain if it has no shards any more, a few slabs at a time."""
        left = True
        while left:
            with self._tables.lock:
                left = self._tables.domains.dissolve(domain)
            await asyncio.sleep(0)


def _ended_of(shards: list[OpenShard]) -> list[OpenShard]:
    """Return the shards whose files have no name any more, or were changed."""
    ended = []
    for shard in shards:
        with contextlib.suppress(OSError):
            found = os.fstat(shard.fd)
            changed = shard.remote is None and shard.opened != FileState.of_status(found)
            if found.st_nlink == 0 or changed:
                ended.append(shard)
    return ended
