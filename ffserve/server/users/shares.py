"""Users: what each user has of the daemon, and whose turn is next.

Users share the daemon, not sessions or jobs: a user with a thousand connections gets no more of it
than one with a single connection. Two rules see to that.

*Turns* go to the user that has used least of late (`FairShare`, start-time fair queueing: Goyal,
Vin and Cheng, SIGCOMM 1996). A user that was idle begins at the present: idle users save nothing
up, and a user who asks for little is served at once however much others ask for.

*Bounds* (`Bound`) limit what a user holds at a time. A connection whose next message would exceed
one waits, and no other user notices. What cannot wait (sessions, leases, announced orders) has a
limit that falls as others take: a user may have OTHERS_SHARE times what is left (dynamic
thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998). So one user alone
gets four fifths, and a newcomer always finds something. Administrators (`peers.Peer`), who could
stop the daemon anyway, have the limit of all users together instead.

No socket and no clock: `now` is monotonic time in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from ffserve.errors import ServerUnavailable
from ffserve.limits import (
    MOST_ASKED,
    MOST_CLOSING,
    MOST_PATHS,
    MOST_RECEIVED,
    MOST_UNSENT,
    MOST_USER_REQUESTS,
    OTHERS_SHARE,
)

ACTIVE_S = 1.0
"""A user who has sent no request for this long does not count as one who shares the disk."""
_FEW = 64


@dataclass(eq=False, slots=True)
class Bound:
    """A limit on something that a user holds; what would exceed it waits.

    Args: most: the limit.
    """

    most: int
    held: int = 0
    full: bool = False
    """Whether nothing more may be taken."""
    waiting: deque[Callable[[], bool]] = field(default_factory=deque)
    """Called to go on; False: it does not wait any more."""
    exempt: object = None
    """The holder that may go on though it is full, so that one does."""

    def take(self, amount: int) -> None:
        """Hold more. The last one to take may exceed the limit."""
        self.held += amount
        self.full = self.held >= self.most
        if self.waiting:
            self._wake()

    def give(self, amount: int) -> None:
        """Hold less."""
        self.held -= amount
        assert self.held >= 0, "what is given back was taken"
        self.full = self.held >= self.most
        if self.waiting:
            self._wake()

    def _wake(self) -> None:
        # One at a time: each wakes the next when it has taken something.
        while self.waiting and not self.full and not self.waiting.popleft()():
            pass


@dataclass(eq=False, slots=True)
class User:
    """One user of the daemon.

    Args:
        uid: of its processes.
        trusted: an administrator; see `peers.Peer`.
    """

    uid: int = 0
    trusted: bool = True
    sessions: int = 0
    datasets: int = 0
    memory_files: int = 0
    """Files that prepared samples come through."""
    received: Bound = field(default_factory=lambda: Bound(MOST_RECEIVED))
    unsent: Bound = field(default_factory=lambda: Bound(MOST_UNSENT))
    requests: Bound = field(default_factory=lambda: Bound(MOST_USER_REQUESTS))
    asked: Bound = field(default_factory=lambda: Bound(MOST_ASKED))
    opening: Bound = field(default_factory=lambda: Bound(MOST_PATHS))
    closing: Bound = field(default_factory=lambda: Bound(MOST_CLOSING))
    closer: Any = None
    """Closes the descriptors that came from this user; see `descriptors.Closer`."""

    def may_take(self, wanted: int, held: int, all_held: int, most: int) -> bool:
        """Whether the user may take `wanted` more of something that cannot be taken back.

        Args: held: of it by this user. all_held: by all users. most: by all users together.
        """
        left = most - all_held
        return wanted <= left and (self.trusted or held + wanted <= OTHERS_SHARE * left)

    def too_many_sessions(self, count: int, most: int) -> ServerUnavailable:
        """Return the error for another session of this user, beside `count` of all users."""
        if count >= most:
            return ServerUnavailable(
                f"the daemon already serves {most} sessions",
                hint="raise --max-sessions, or close readers",
            )
        return ServerUnavailable(
            f"user {self.uid} already has {self.sessions} sessions; a user may have at most "
            f"{OTHERS_SHARE} times as many as are left, and {most - count} of {most} are left",
            hint="close readers, or raise --max-sessions",
        )


class FairShare:
    """Chooses the user whose turn is next: the one that has used least of late."""

    def __init__(self) -> None:
        self._used: dict[User, float] = {}
        self._present = 0.0

    def begin(self, user: User) -> None:
        """A user wants a turn, and did not before."""
        if self._used.get(user, -1.0) < self._present:
            self._used[user] = self._present

    def choose(self, users: Collection[User]) -> User:
        """Return the one of these users whose turn it is; all of them have begun."""
        if len(users) == 1:
            (chosen,) = users
        else:
            chosen = min(users, key=self._used.__getitem__)
        used = self._used[chosen]
        if used > self._present:
            self._present = used
        return chosen

    def is_due(self, user: User) -> bool:
        """Whether a user that wants a turn has used no more than any other that does."""
        return self._used.get(user, self._present) <= self._present

    def used(self, user: User) -> float:
        """Return what a user has used, on a scale that only this class knows."""
        return self._used.get(user, 0.0)

    def charge(self, user: User, cost: float) -> None:
        """A user has had a turn that cost so much; nothing for one that was forgotten in it."""
        used = self._used.get(user)
        if used is not None:
            self._used[user] = (self._present if used < self._present else used) + cost

    def forget(self, user: User) -> None:
        """A user has no session any more."""
        self._used.pop(user, None)


class Users:
    """The users that have sessions, and others that have something left to close."""

    def __init__(self) -> None:
        self._users: dict[tuple[int, bool], User] = {}
        self._most = _FEW
        """Users with which those of whom nothing is left are looked for."""

    def of(self, uid: int, *, trusted: bool) -> User:
        """Return a user, also one without a session yet. The roots of all containers are one."""
        user = self._users.get((uid, trusted))
        if user is None:
            if len(self._users) >= self._most:
                self._users = {k: u for k, u in self._users.items() if u.sessions or u.closing.held}
                self._most = 2 * len(self._users) + _FEW
            user = self._users[uid, trusted] = User(uid, trusted=trusted)
        return user

    def left(self, user: User) -> bool:
        """A session has ended; return whether it was the last one of its user."""
        user.sessions -= 1
        if user.sessions:
            return False
        if not user.closing.held:
            self._users.pop((user.uid, user.trusted), None)
        return True
