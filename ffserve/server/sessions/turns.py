"""Turns: chooses the connection that the loop works for next.

Whatever a client causes in the loop's thread is done here: its messages are received, decoded and
handled, and work that lasts for more than a moment is done in steps. The users share the time by
`FairShare`, the connections of a user one after another, for SLICE_S at a time; a connection that
has become readable without a session or a job (a greeting, `ffserve status`) is the next of its
user. After TURN_S the loop looks for new connections, arrived messages and completed reads.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ffserve.server.users.shares import FairShare, User

SLICE_S = 0.0005
TURN_S = 0.001
CALM_S = 0.0001
"""After this long without a turn the next one begins at once, with the first message that the loop
reports. Messages that have arrived together are reported within less, and are chosen from. While
turns go on, the first message of a user who has used no more than those who wait is served at once.
"""


class TurnTaker(Protocol):
    """A connection, which takes turns."""

    user: User

    def work(self, until: float) -> bool:
        """Do something, and more until a time on the monotonic clock; return whether more is left
        to do now."""
        ...


class Turns:
    """See the module's text.

    Args: after: called after each turn of the loop. turn_s, calm_s: see TURN_S and CALM_S.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        after: Callable[[], object],
        *,
        turn_s: float = TURN_S,
        calm_s: float = CALM_S,
    ) -> None:
        self._turn_s, self._calm_s = turn_s, calm_s
        self._loop = loop
        self._after = after
        self._share = FairShare()
        self._waiting: dict[User, tuple[deque[TurnTaker], deque[TurnTaker]]] = {}
        """The connections of each user that wait for a turn: those that go first, the others."""
        self._running = False
        self._ended = 0.0
        """When the last turn ended."""

    def add(self, worker: TurnTaker, *, first: bool = False, at_once: bool = False) -> None:
        """Add a connection that has something to do and waits for no turn yet.

        Args:
            first: before the other connections of its user.
            at_once: this may be done within the call, for SLICE_S.
        """
        user = worker.user
        waiting = self._waiting.get(user)
        fresh = waiting is None
        if waiting is None:
            waiting = self._waiting[user] = deque(), deque()
            self._share.begin(user)
        waiting[not first].append(worker)
        if at_once and fresh and self._may_begin(user):
            running, self._running = self._running, True
            self._ended = self._serve(user, time.monotonic(), SLICE_S)
            self._after()
            if not running:
                self._go_on()
        elif not self._running:
            self._running = True
            self._loop.call_soon(self._run)

    def _may_begin(self, user: User) -> bool:
        """Whether a user may have a turn before the loop has reported all that has arrived."""
        if self._running:
            return self._share.is_due(user)
        return time.monotonic() >= self._ended + self._calm_s

    def _run(self) -> None:
        now = time.monotonic()
        end = now + self._turn_s
        while self._waiting and now < end:
            user = self._share.choose(self._waiting)
            now = self._serve(user, now, min(SLICE_S, end - now))
        self._ended = now
        self._after()
        self._go_on()

    def _go_on(self) -> None:
        self._running = bool(self._waiting)
        if self._running:
            self._loop.call_soon(self._run)

    def _serve(self, user: User, now: float, slice_s: float) -> float:
        """Work for a user; return the time."""
        self._work(user, now + slice_s)
        ended = time.monotonic()
        self._share.charge(user, ended - now)
        return ended

    def _work(self, user: User, until: float) -> None:
        first, others = self._waiting[user]
        worker = (first or others).popleft()
        if worker.work(until):
            others.append(worker)
        if not first and not others:
            del self._waiting[user]

    def finish(self) -> None:
        """Do all work that is left, since the daemon ends."""
        while self._waiting:
            self._work(next(iter(self._waiting)), float("inf"))

    def forget(self, user: User) -> None:
        """Forget a user that has no session any more."""
        self._share.forget(user)
