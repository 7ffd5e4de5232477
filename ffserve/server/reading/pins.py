"""Pins: the slots that answered GETs hold until their client has copied the samples, and leases.

A finished GET keeps its samples pinned until the client acknowledges it. Its pins can be taken back
at any time: a client that copies too late sees the seqlock move and asks again. Leases cannot, so
all of them together pin a bounded part of the arena.

No socket and no clock: `now` is monotonic time in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ffserve.cache.cache import Cache
from ffserve.limits import LEASED_SHARE, LEASED_SLABS, MOST_ASKED
from ffserve.server.reading.requests import GrantedLease, Requester, SampleRequest
from ffserve.server.reading.turn_order import TurnOrder, UserTurns
from ffserve.server.users.shares import User

PIN_GRACE_S = 0.05
"""When other requests wait for memory, the daemon takes back pins of finished GETs that are
older than this."""
_FEW = 16
"""One step of `leave` gives back the pins of this many tags."""


class Pins:
    """See the module's text."""

    def __init__(self, cache: Cache, order: TurnOrder) -> None:
        self._cache = cache
        self._order = order
        self._users = order.users
        self.leased_size = 0
        """Bytes of the slots that leases hold."""
        self._leases_in_slab = np.zeros(len(cache.arena.slab_class), np.int64)
        """Leases with pins in each slab, up to the largest size of the arena."""
        self._leased_slabs = 0
        """Slabs in which a lease pins slots."""
        self.keeps_leases = False
        """Whether the slots of ended leases stay pinned, since the daemon ends."""

    @property
    def lends(self) -> bool:
        """Whether another lease may be granted."""
        return self.leased_size < self._most_leased and self._leased_slabs < self._most_leased_slabs

    @property
    def _most_leased(self) -> int:
        return self._cache.arena.size // LEASED_SHARE

    @property
    def _most_leased_slabs(self) -> int:
        return int(self._cache.arena.open_count * LEASED_SLABS)

    def acknowledge(self, owner: Requester, tags: list[int]) -> None:
        """Unpin the samples of GETs that the client has acknowledged."""
        for tag in tags:
            answered = owner.unacknowledged.pop(tag, None)
            if answered is not None:
                self._users[owner.user].pinned_size -= answered.pinned_size
                owner.user.asked.give(answered.count)
                self._cache.release(answered.pins)

    def release(self, owner: Requester, tags: list[int]) -> None:
        """End these leases. A lease that is not granted yet becomes a GET."""
        for tag in tags:
            if tag in owner.waiting:
                owner.waiting[tag].lease = False
            lease = owner.leases.pop(tag, None)
            if lease is not None:
                turns = self._users[owner.user]
                turns.leased_size -= lease.pinned_size
                turns.leased_count -= lease.count
                owner.user.asked.give(lease.count)
                self.leased_size -= lease.pinned_size
                self._leases_in_slab[lease.slabs] -= 1
                self._leased_slabs -= int(np.sum(self._leases_in_slab[lease.slabs] == 0))
                if not self.keeps_leases:
                    self._cache.end_lease(lease.pins)

    def grant(self, request: SampleRequest, turns: UserTurns) -> bool:
        """Turn the pins of a request into a lease; return False if leases would hold too much."""
        user, size, count = request.owner.user, request.pinned_size, len(request.numbers)
        if not request.pins:
            user.asked.give(count)
            return True
        if not user.may_take(size, turns.leased_size, self.leased_size, self._most_leased):
            return False
        if turns.leased_count + count > MOST_ASKED // 2:
            return False
        slabs = self._cache.arena.slabs_of(request.pins)
        fresh = int(np.sum(self._leases_in_slab[slabs] == 0))
        if self._leased_slabs + fresh > self._most_leased_slabs:
            return False
        self.leased_size += size
        turns.leased_size += size
        turns.leased_count += count
        self._leases_in_slab[slabs] += 1
        self._leased_slabs += fresh
        self._cache.lease(request.pins)
        request.owner.leases[request.tag] = GrantedLease(request.pins, size, slabs, count)
        return True

    def limit(self, user: User) -> None:
        """Take back pins, the oldest first, of a user that has asked for as many samples as it
        may."""
        turns = self._order.of(user)
        while turns.pins and user.asked.full:
            _, owner, tag = turns.pins.popleft()
            self.acknowledge(owner, [tag])

    def take_back(self, now: float) -> None:
        """Take back all pins that are older than PIN_GRACE_S."""
        for turns in self._users.values():
            while turns.pins and turns.pins[0][0] + PIN_GRACE_S <= now:
                _, owner, tag = turns.pins.popleft()
                self.acknowledge(owner, [tag])

    def take_from_others(self, waiting: UserTurns) -> bool:
        """Take back pins of users with more than an equal share while another user waits; return
        whether there were any."""
        given = False
        for turns in self._users.values():
            while turns is not waiting and turns.pins and not self._order.has_little(turns):
                _, owner, tag = turns.pins.popleft()
                given |= tag in owner.unacknowledged
                self.acknowledge(owner, [tag])
        return given

    def deadlines(self) -> Iterator[float]:
        """Yield the times at which pins may be taken back."""
        for turns in self._users.values():
            turns.sweep()
            if turns.pins:
                yield turns.pins[0][0] + PIN_GRACE_S

    def leave(self, owner: Requester) -> Iterator[None]:
        """Give back the pins and leases of a session that has ended, in steps."""
        for held, give in ((owner.unacknowledged, self.acknowledge), (owner.leases, self.release)):
            while held:
                give(owner, list(islice(held, _FEW)))
                yield
