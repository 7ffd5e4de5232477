"""Turn order: chooses the user, the job and the session that have the next turn.

Users take turns by `FairShare`, within a user its jobs do, and within a job its sessions. A user
that holds less than an equal share of the arena need not wait for the request that is favoured.

No socket and no clock: `now` is monotonic time in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ffserve.cache.arena import Arena
from ffserve.server.reading.requests import Requester, SampleRequest
from ffserve.server.users.shares import ACTIVE_S, FairShare, User

SEVERAL_SHARE = 4
"""While several users are active, 1 part in SEVERAL_SHARE of the reads is in flight, so that the
turn of another user comes soon. That keeps a disk busy for more than a turn of the loop."""
FLOWING_SIZE = 8 << 20
"""One of several active users that has this many bytes in flight waits with its next turn. A disk
reads that in 4 ms."""
FAVOUR_S = (0.1, 1.0)
"""While the oldest blocked request has waited between these times, no other request takes memory.
"""
_FEW_PINS = 1024


@dataclass(eq=False, slots=True)
class UserTurns:
    """The turns of one user: its runnable and blocked requests, its reads, pins and leases."""

    user: User
    jobs: deque[str] = field(default_factory=deque)
    """Jobs with a runnable request."""
    sessions: dict[str, deque[Requester]] = field(default_factory=dict)
    """The sessions of these jobs that have a runnable request."""
    blocked: deque[SampleRequest] = field(default_factory=deque)
    """Requests that wait for memory, the one that has waited longest first."""
    tried: int = 0
    """The number of `blocked` that is tried next."""
    failed_at: float = float("-inf")
    failed_after: int = 0
    """The time at which no memory was found last, and the number of releases of pins by then."""
    pins: deque[tuple[float, Requester, int]] = field(default_factory=deque)
    """Finished GETs: the time, the session and the tag; some are acknowledged already."""
    most_pins: int = _FEW_PINS
    reads: int = 0
    read_size: int = 0
    """Reads in flight, and their bytes."""
    pinned_size: int = 0
    pinning_size: int = 0
    """Bytes of slots that finished GETs hold, and requests that are not finished."""
    leased_size: int = 0
    leased_count: int = 0
    """Bytes of slots that leases hold, and samples that they were asked for."""
    seen: float = float("-inf")
    """The time of the last request."""

    @property
    def idle(self) -> bool:
        """Whether the user has nothing under way."""
        return not (self.jobs or self.blocked or self.pins or self.reads or self.leased_count)

    def sweep(self) -> None:
        """Drop acknowledged GETs from the list of pins."""
        while self.pins and self.pins[0][2] not in self.pins[0][1].unacknowledged:
            self.pins.popleft()
        if len(self.pins) > self.most_pins:
            # A client that never acknowledges stays at the head; drop those behind it.
            self.pins = deque(pin for pin in self.pins if pin[2] in pin[1].unacknowledged)
            self.most_pins = 2 * len(self.pins) + _FEW_PINS


class TurnOrder:
    """See the module's text.

    Args: most_reads: reads in flight of all users, of which each of several has a part.
    """

    def __init__(self, arena: Arena, most_reads: int) -> None:
        self._arena = arena
        self._most_reads = most_reads
        self.share = FairShare()
        self.users: dict[User, UserTurns] = {}
        self.runnable: dict[User, UserTurns] = {}
        """Users with a runnable request."""
        self.active = 1
        """Users that have made a request lately, or wait."""

    def of(self, user: User) -> UserTurns:
        turns = self.users.get(user)
        if turns is None:
            for each in self.users.values():
                each.sweep()
            gone = [u for u, t in self.users.items() if t.idle and not u.sessions]
            for other in [each for each in gone if not each.requests.held]:
                del self.users[other]
                self.share.forget(other)
            turns = self.users[user] = UserTurns(user)
        return turns

    def look_at_users(self, now: float) -> list[UserTurns]:
        """Count the active users; return those with blocked requests."""
        self.active, blocked = 0, []
        for turns in self.users.values():
            if turns.blocked:
                blocked.append(turns)
            if turns.blocked or turns.jobs or now - turns.seen < ACTIVE_S:
                self.active += 1
        return blocked

    def queue(self, owner: Requester) -> None:
        if owner.runnable and not owner.queued:
            owner.queued = True
            turns = self.users[owner.user]
            if not turns.jobs:
                self.runnable[owner.user] = turns
                self.share.begin(owner.user)
            sessions = turns.sessions.get(owner.job)
            if sessions is None:
                sessions = turns.sessions[owner.job] = deque()
                turns.jobs.append(owner.job)
            sessions.append(owner)

    def next_user(self, favoured: SampleRequest | None) -> User | None:
        """Return the user whose turn it is; None: none has one now."""
        if self.active == 1:
            (user,) = self.runnable
            return user
        users = {
            user: turns
            for user, turns in self.runnable.items()
            if self.may_read(turns) and self.may_pass(turns, favoured)
        }
        return self.share.choose(users) if users else None

    def next_owner(self, user: User) -> Requester:
        turns = self.runnable[user]
        job = turns.jobs.popleft()
        sessions = turns.sessions[job]
        owner = sessions.popleft()
        owner.queued = False
        if sessions:
            turns.jobs.append(job)
        else:
            del turns.sessions[job]
            if not turns.jobs:
                del self.runnable[user]
        return owner

    def may_read(self, turns: UserTurns) -> bool:
        """Whether one of several users may have another turn now."""
        return not turns.reads or (
            turns.reads < max(self._most_reads // SEVERAL_SHARE // self.active, 1)
            and turns.read_size < FLOWING_SIZE
            and turns.pinning_size + turns.leased_size < self.equal_size
        )

    def may_pass(self, turns: UserTurns, favoured: SampleRequest | None) -> bool:
        """Whether a user need not wait for the favoured request."""
        if favoured is None:
            return True
        return turns.user is not favoured.owner.user and self.has_little(turns)

    def has_little(self, turns: UserTurns) -> bool:
        """Whether a user holds less than an equal share of the arena."""
        held_size = turns.pinned_size + turns.pinning_size + turns.leased_size
        return held_size < self.equal_size

    @property
    def equal_size(self) -> int:
        """An equal share of the arena for each user that has made a request lately."""
        return self._arena.size // max(self.active, 2)

    def favoured(self, blocked: list[UserTurns], now: float) -> SampleRequest | None:
        """Return the request for which all others wait now, or None."""
        if not blocked:
            return None
        oldest = min((turns.blocked[0] for turns in blocked), key=blocked_since)
        began = blocked_since(oldest)
        return oldest if began + FAVOUR_S[0] <= now < began + FAVOUR_S[1] else None


def blocked_since(request: SampleRequest) -> float:
    """Return the time since when a blocked request waits."""
    assert request.blocked_since is not None
    return request.blocked_since
