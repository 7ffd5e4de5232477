"""Opening: the files of a data set become shards, each opened and parsed once for all sessions.

The daemon reads a file through descriptors that clients opened (`users/access.py`). Shards that the
client's user has proven are held at once. For the others the client is asked for descriptors, some
hundred at a time; it opens the next files while `parsing.py` parses those that it has passed, in a
thread. A file that another session opens is waited for, not opened twice. Remote files are opened
by the store (`remote.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from ffserve.disk.files import os_error
from ffserve.engine.many_files import close_fds
from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.formats.ffrecord import FORMAT as FFRECORD
from ffserve.limits import ASKED_AT_ONCE, MOST_SCANS, REMOTE_COUNT
from ffserve.server.files.admission import Admission
from ffserve.server.files.charges import TablesFull
from ffserve.server.files.closing import ShardCloser
from ffserve.server.files.entering import ShardEntries
from ffserve.server.files.holding import HOLD_COUNT, HeldShards, OpenSettings
from ffserve.server.files.parsing import (
    Identified,
    IdentifiedFiles,
    IdentifiedObjects,
    OpeningGroup,
    ShardParser,
    close_passed,
)
from ffserve.server.files.remote import RemoteFiles, WantedFile
from ffserve.server.files.shards import (
    FileIdentity,
    OpenShard,
    PassedFile,
    Passing,
    Request,
    ShardKey,
)
from ffserve.server.users.domains import Domain
from ffserve.server.users.peers import Peer, viewer_of
from ffserve.server.users.threads import in_thread

OBJECT_COUNT = 32
"""One thread opens this many of them; those that are left after `parsing.SINGLY_S` come next."""
DROPPED_SHARE = 16
"""If a user has no room for tables, 1 part in DROPPED_SHARE of the room of all users is freed, if
as much of it is not in use."""
LOOK_S = 0.25
"""A session that waits for files which others open looks so often whether these wait for something
else by now."""


@dataclass(frozen=True, slots=True)
class PendingOpen:
    """An OPEN that is not answered yet. found: the shards that are held, by position."""

    request: Request
    peer: Peer
    found: dict[int, OpenShard] = field(default_factory=dict)


class ShardOpener:
    """Opens the files of data sets."""

    def __init__(
        self,
        held: HeldShards,
        entries: ShardEntries,
        closer: ShardCloser,
        settings: OpenSettings,
    ) -> None:
        self._held = held
        self._entries = entries
        self._closer = closer
        self._settings = settings
        self._tables = held.tables
        self._admission = Admission(held, closer)
        self._parser = ShardParser(held.tables, held.budget, settings)
        self._opening: dict[ShardKey, OpeningGroup] = {}
        """Files that are being opened, with those that are opened together."""
        self._scans: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        """By user: tolerant openings, which may search whole files."""

    async def open(self, request: Request, peer: Peer, passing: Passing) -> list[OpenShard]:
        """Open the shards of one data set for one session; `HeldShards.release` gives them back.

        Raises: AccessDenied, FormatError, ChecksumError, TruncatedError, ReadError: of the first
            shard that cannot be served; then none is held.
        """
        pending = PendingOpen(request, peer)
        if not request.wanted():
            raise UsageError("the session has ended")
        try:
            left: list[int] = []
            for first in range(0, len(request.paths), HOLD_COUNT):
                some = range(first, min(first + HOLD_COUNT, len(request.paths)))
                request.name(some)
                local = [k for k in some if k not in request.remote] if request.remote else some
                left += self._hold_proven(pending, local)
                await asyncio.sleep(0)
            if request.remote:
                await self._open_remote(pending, sorted(request.remote))
            if left:
                with self._admission.promising(request, peer.owner, left):
                    await self._admission.make_room(request, peer, left)
                    await self._open_local(pending, left, passing)
        except BaseException:
            self._held.release(list(pending.found.values()), peer.owner)
            raise
        return [pending.found[position] for position in range(len(request.paths))]

    # ---- which files ----------------------------------------------------------------------------

    def _hold_proven(self, pending: PendingOpen, positions: Sequence[int]) -> list[int]:
        """Hold the shards that this peer's owner has proven; return the positions of the others."""
        owner, aliases = pending.peer.owner, pending.request.aliases
        left, held = [], []
        shards = self._held.proven([aliases[position] for position in positions], owner)
        for position, shard in zip(positions, shards, strict=True):
            if shard is None:
                left.append(position)
            else:
                held.append(shard)
                pending.found[position] = shard
        self._held.hold(held, owner)
        return left

    async def _open_local(self, pending: PendingOpen, left: list[int], passing: Passing) -> None:
        """Open the shards at some positions. The client opens the next files while those that it
        has passed are parsed."""
        request, peer, most = pending.request, pending.peer, self._held.budget.most_asked
        asking: asyncio.Future[list[PassedFile]] | None = None
        asked: list[int] = []
        try:
            while left or asking is not None:
                passed: list[PassedFile] = []
                if asking is not None:
                    passed, asking = await asking, None
                    left = asked[len({one.position for one in passed}) :] + left
                asked, left = left[:most], left[most:]
                asked = self._hold_proven(pending, asked)
                try:
                    if asked:
                        await self._admission.make_room(request, peer, asked)
                        asking = asyncio.ensure_future(passing(asked))
                    if passed:
                        taken, passed = passed, []
                        identify = partial(self._parser.identify, request, taken, peer)
                        await self._obtain(pending, identify, partial(close_passed, taken))
                finally:
                    if passed:
                        await in_thread(partial(close_passed, passed))
        except BaseException:
            if asking is not None:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, FFServeError):
                    unused = await asking
                    await in_thread(partial(close_passed, unused))
            raise

    async def _open_remote(self, pending: PendingOpen, positions: list[int]) -> None:
        """Open the remote files of an OPEN, some at a time."""
        remote, request, peer = self._held.remote, pending.request, pending.peer
        if remote is None or request.access is None:
            raise ReadError(
                "the daemon has no store for remote files",
                path=request.paths[positions[0]],
                hint="set [store] directory in its configuration",
            )
        urls = [request.remote[k].url for k in positions]
        access = remote.access_for(peer, request.access, urls)
        if not remote.fetcher.has_store:
            await in_thread(remote.open_store)
        unproven: list[IdentifiedObjects] = []
        for first in range(0, len(positions), REMOTE_COUNT):
            some = positions[first : first + REMOTE_COUNT]
            wanted = [
                remote.wanted(k, request.remote[k], access, peer, parts=request.parts) for k in some
            ]
            # The name without a format decides as the content does: a user's own choice.
            how = request.format, request.verify, request.tolerant
            keys = [ShardKey(FileIdentity(*one.file), *how, one.owner) for one in wanted]
            files = IdentifiedObjects(remote, peer, wanted, [request.paths[k] for k in some], keys)
            unproven += self._hold_readable(pending, files)
            await asyncio.sleep(0)
        new = [position for files in unproven for position in files.positions]
        if new:
            with self._admission.promising(request, peer.owner, new):
                await self._admission.make_room(request, peer, new)
                for files in unproven:
                    # Another OPEN of this user may have opened them in the meantime.
                    for left in self._hold_readable(pending, files):
                        await self._obtain(pending, left.identify, left.close)
                    await asyncio.sleep(0)
        await self._read_lasts(pending, remote, positions)

    async def _read_lasts(
        self, pending: PendingOpen, remote: RemoteFiles, positions: list[int]
    ) -> None:
        """Look at the last samples of remote files that nobody has looked at."""
        for first in range(0, len(positions), REMOTE_COUNT):
            shards = [pending.found[k] for k in positions[first : first + REMOTE_COUNT]]
            left = [shard for shard in shards if shard.remote and shard.remote.last is None]
            left = [shard for shard in left if shard.format == FFRECORD.name and shard.count]
            if left:
                read = partial(self._parser.read_lasts, remote, left, pending.peer.owner)
                await in_thread(read)
            await asyncio.sleep(0)

    def _hold_readable(
        self, pending: PendingOpen, files: IdentifiedObjects
    ) -> list[IdentifiedObjects]:
        """Hold the open objects that their origin has let this peer's owner read; return the
        others, if there are any."""
        rows = enumerate(zip(files.wanted, files.keys, strict=True))
        proven = [k for k, (one, key) in rows if self._may_read(one, key, pending.peer)]
        self._hold_opened(pending, files, proven)
        left = files.without(proven)
        return [left] if left else []

    def _may_read(self, one: WantedFile, key: ShardKey, peer: Peer) -> bool:
        """Whether the origin has let this user read an open object with the same access, with which
        it is open."""
        shard = self._held.open.get(key)
        if shard is None or shard.remote is None or not shard.sessions:
            return False
        return shard.remote.proofs.get(peer.owner) == one.access.digest

    # ---- local and remote files -----------------------------------------------------------------

    async def _obtain(
        self,
        pending: PendingOpen,
        identify: Callable[[], Identified],
        close: Callable[[], object],
    ) -> None:
        """Hold the shards of some files of an OPEN.

        Args: identify: checks the files; close: gives back what is not needed of them. Both are
            called in threads.
        """
        try:
            files = await in_thread(identify)
            for owner in {key.owner for key in files.keys}:
                while self._tables.domains.is_full(owner) and await self._closer.drop_oldest():
                    pass
            left = most = len(files.keys)
            while left:
                try:
                    most = await self._open_missing(pending, files, most)
                except TablesFull as error:
                    # Tables that nobody uses give way, and not to a few files each time.
                    size = max(error.missing, self._tables.accounts.most // DROPPED_SHARE)
                    if not await self._closer.drop_tables(pending.peer.uid, size):
                        raise
                left = self._hold_opened(pending, files, range(len(files.keys)))
        except asyncio.CancelledError:
            raise  # The daemon ends, and a thread may still read the files.
        except BaseException:
            await in_thread(close)
            raise
        await in_thread(close)

    async def _open_missing(self, pending: PendingOpen, files: Identified, most: int) -> int:
        """Open those of some files that are neither open nor being opened, at most `most` at once;
        if there are none, wait for those that other sessions open.

        Returns: how many to open at once from now on: until they are closed, passed descriptors
            take room beside the new ones.
        """
        mine: dict[ShardKey, int] = {}
        others: set[asyncio.Future[None]] = set()
        for k, key in enumerate(files.keys):
            if key in self._held.open:
                continue
            if not self._is_missing(key):
                others.add(self._opening[key].ended)
            elif len(mine) < most:
                mine.setdefault(key, k)
        try:
            if isinstance(files, IdentifiedObjects):
                await self._open_each(pending, files, mine)
            elif mine:
                await self._open_new(pending, files, mine)
        except OSError as error:
            if len(mine) > 1 and _is_emfile(error) and isinstance(files, IdentifiedFiles):
                return len(mine) // 2
            failure = self._opening_error(error, files.paths[min(mine.values())])
            if failure is error:
                raise
            raise failure from error
        if not mine and others:
            await asyncio.wait(others, timeout=LOOK_S)
        return most

    def _is_missing(self, key: ShardKey) -> bool:
        """Whether a file is neither open nor being opened, or waits too long for others."""
        if key in self._held.open:
            return False
        group = self._opening.get(key)
        return group is None or group.holds_up(key, time.monotonic())

    async def _open_each(
        self, pending: PendingOpen, files: IdentifiedObjects, mine: dict[ShardKey, int]
    ) -> None:
        """Open remote files, some of them in each of several threads."""
        left, failed = list(mine.items()), list[BaseException]()

        async def open_some() -> None:
            while left and not failed:
                some, left[:OBJECT_COUNT] = dict(left[:OBJECT_COUNT]), ()
                some = {key: row for key, row in some.items() if self._is_missing(key)}
                try:
                    if some:
                        await self._open_new(pending, files, some)
                except BaseException as error:
                    failed.append(error)

        # After a failure, too, all threads are waited for: each user has a bounded number of them.
        await asyncio.gather(*(open_some() for _ in range(ASKED_AT_ONCE)))
        if failed:
            raise failed[0]

    async def _open_new(
        self, pending: PendingOpen, files: Identified, mine: dict[ShardKey, int]
    ) -> None:
        """Open the shards of some keys, by their rows, in a thread, and hold them."""
        if not pending.request.tolerant:
            await self._open_now(pending, files, mine)
            return
        uid = pending.peer.uid
        scans = self._scans.setdefault(uid, asyncio.Semaphore(MOST_SCANS))
        async with scans:
            fresh = {k: row for k, row in mine.items() if k not in self._held.open}
            if fresh and not fresh.keys() & self._opening.keys():
                await self._open_now(pending, files, fresh)

    async def _open_now(
        self, pending: PendingOpen, files: Identified, mine: dict[ShardKey, int]
    ) -> None:
        opened = self._held.open
        ended = asyncio.get_running_loop().create_future()
        group = OpeningGroup(time.monotonic(), len(mine) == 1, ended, pending.peer)
        self._opening.update(dict.fromkeys(mine, group))
        domains: list[Domain] = []
        rows = list(mine.values())
        try:
            # Each domain counts its shards already, so that it is not dissolved while it is empty.
            with self._tables.lock:
                for key in mine:
                    domains.append(self._tables.domains.obtain(key.owner))
                    domains[-1].shards += 1
            shards = await in_thread(
                partial(self._parser.parse, pending.request, files, rows, domains, group)
            )
            fresh = [shard for shard in shards if shard.key not in opened]
            self._entries.enter(fresh)
            self._hold_opened(pending, files, rows)
        finally:
            for domain in domains:
                domain.shards -= 1
            for key in mine:
                if self._opening.get(key) is group:
                    del self._opening[key]
            ended.set_result(None)
        if len(fresh) < len(shards):
            await self._discard([s for s in shards if opened.get(s.key) is not s])

    async def _discard(self, shards: list[OpenShard]) -> None:
        """Close shards whose files another session has opened in the meantime."""
        fds = [fd for shard in shards for fd in self._held.take_fds(shard)]
        for shard in shards:
            if shard.charge is not None:
                shard.charge.give()
        with self._tables.lock:
            for shard in shards:
                self._tables.directory.release(shard.base, shard.count, shard.domain.number)
        await in_thread(partial(close_fds, fds))

    def _hold_opened(self, pending: PendingOpen, files: Identified, rows: Sequence[int]) -> int:
        """Hold the shards of those identified files that are open. The peer has proven them now, if
        the rules are still those by which the files were checked.

        Returns: the number of the others. Another session opens them; if it fails for reasons of
            its own, the next turn opens them for this one.
        """
        request, found = pending.request, pending.found
        owner, positions = pending.peer.owner, files.positions
        viewer, proof = viewer_of(owner), frozenset((owner,))
        aliases, left, held = [], 0, []
        for k in rows:
            position = positions[k]
            if position in found:
                continue
            shard = self._held.open.get(files.keys[k])
            if shard is None:
                left += 1
                continue
            found[position] = shard
            held.append(shard)
            aliases.append(request.aliases[position])
            shard.names[viewer] = files.paths[k]
            if isinstance(files, IdentifiedObjects):
                files.give(k, shard)
            elif files.rules is self._settings.rules:
                if owner not in shard.proven:
                    shard.proven = shard.proven | proof if shard.proven else proof
                # The alias has what the daemon knows of the file, whatever the client says of it.
                self._held.add_alias(shard, request.alias(position, files.keys[k].identity))
        self._admission.opened(owner, aliases)
        self._held.hold(held, owner)
        return left

    def _opening_error(self, error: OSError, path: str) -> Exception:
        """Return the error for files that could not be opened."""
        if _is_emfile(error):
            return ReadError(
                "too many files open in the daemon: others open files at the same time, and its "
                f"limit is {self._held.budget.limit}",
                path=path,
                hint="try again, or raise the daemon's limit on open files (LimitNOFILE= in the "
                "systemd unit, ulimit -n)",
            )
        return error if isinstance(error, FFServeError) else os_error(error, path)


def _is_emfile(error: Exception) -> bool:
    """Whether an error, or its cause, says that no descriptor is left."""
    return errno.EMFILE in (getattr(each, "errno", 0) for each in (error, error.__cause__))
