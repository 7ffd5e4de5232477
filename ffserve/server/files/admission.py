"""Admission: whether the files of an OPEN may be open, beside those of all others.

The limit on open files is shared. Idle shards are closed for an OPEN that needs their descriptors;
an OPEN that is refused fails at once, and its error says how many files are in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ffserve.errors import ReadError
from ffserve.limits import FDS_OF_OBJECT
from ffserve.server.files.closing import ShardCloser
from ffserve.server.files.holding import HeldShards
from ffserve.server.files.shards import Alias, Request
from ffserve.server.users.peers import Owner, Peer, account_of


class Admission:
    """Admits the files of OPENs."""

    def __init__(self, held: HeldShards, closer: ShardCloser) -> None:
        self._held = held
        self._closer = closer
        self._promised: list[tuple[Owner, set[Alias]]] = []
        """For each OPEN its owner, and its shards that are not open yet."""

    @contextlib.contextmanager
    def promising(self, request: Request, owner: Owner, positions: list[int]) -> Iterator[None]:
        """Count the files of an OPEN against the limit before they are open: of two OPENs at a
        time, the second is refused at once if there is no room for both."""
        # Shards that other users have proven need no room, but this one must not learn of them.
        mine = owner, {request.aliases[position] for position in positions}
        self._promised.append(mine)
        try:
            yield
        finally:
            self._promised = [each for each in self._promised if each is not mine]

    def opened(self, owner: Owner, aliases: list[Alias]) -> None:
        """Note that these shards of an owner's OPENs are open now."""
        for each, promised in self._promised:
            if each == owner:
                promised.difference_update(aliases)

    async def make_room(self, request: Request, peer: Peer, positions: list[int]) -> None:
        """Close idle shards, so that those of an OPEN can be opened.

        Raises: ReadError: the OPEN needs more descriptors than there are, or than its user may
            have.
        """
        held = self._held
        objects = sum(map(request.remote.__contains__, positions)) if request.remote else 0
        room = held.budget.shard_count(objects)
        mine = held.count_of(peer.account)
        limited = not peer.is_administrator
        most = room // 2 if limited else room
        at_most = sum(len(aliases) for _, aliases in self._promised)
        if len(held.open) + at_most <= room and mine + at_most <= most:
            return
        promised = {(owner, alias) for owner, aliases in self._promised for alias in aliases}
        new = len({request.identities[position] for position in positions})
        shown, more = held.budget.shard_count(), f"{new} more"
        if objects:
            more += f", of which {objects} are remote and need {FDS_OF_OBJECT + 1} each"
        mine += sum(account_of(owner) == peer.account for owner, _ in promised)
        if limited and mine > most:
            raise ReadError(
                f"user {peer.uid} may have {shown // 2} files open in the daemon, half of its own "
                f"limit; {mine - new} are in use, and this data set has {more}",
                path=request.paths[positions[0]],
                hint="raise the daemon's limit on open files (LimitNOFILE= in the systemd "
                "unit, ulimit -n)",
            )
        count = len(held.open) + len(promised)
        used = count - len(held.idle)
        if used <= room < count:
            await self._closer.close_idle(list(held.idle.values()), count - room)
            count = len(held.open) + len(promised)
        if count > room:
            raise ReadError(
                f"the daemon may have {shown} files open; {used - new} are in use, "
                f"and this data set has {more}",
                path=request.paths[positions[0]],
                hint="raise the limit on open files (ulimit -n, LimitNOFILE= in the systemd unit)",
            )
