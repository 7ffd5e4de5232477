"""Claims: which session prepares which sample.

Clients make prepared samples and hand them over; the daemon keeps them as samples of *prepared
shards* (`catalog.Catalog.open_prepared`), which have no file. To it they are bytes. A sample is
claimed by one session at a time, so that two that need it at about the same time prepare it once. A
session hands over what it has claimed before it waits for others, so sessions never wait for one
another in a circle. docs/decisions/prepared.md has the reasons.

No socket and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.tables import Directory
from ffserve.dtypes import Int64s
from ffserve.limits import LEAST_WAITING, MOST_HELD, MOST_USER_CLAIMED
from ffserve.protocol import ELSEWHERE, MOST_CLAIMED, READABLE, UNSHARED, YOURS

CLAIM_S = 30.0
"""A claim that is older goes to a session that waits for it."""

States: TypeAlias = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class WaitingClaim:
    """A CLAIM that is answered when no other holder prepares its samples.

    shared: whether the preparation is still shared. answer: takes the states. later: called when
    `Claims.settle` must be called soon.
    """

    holder: object
    numbers: Int64s
    shared: Callable[[], bool]
    answer: Callable[[States], object]
    later: Callable[[WaitingClaim], object]
    claim: _HeldClaim | None = None
    """The claim that this one waits for. When that has ended, it waits for the next, if any."""

    @property
    def amount(self) -> int:
        """The number of samples that this claim counts as, of those that a user may have."""
        return max(len(self.numbers), LEAST_WAITING)


@dataclass(slots=True, eq=False)
class _HeldClaim:
    """A sample that a holder has claimed. handed_over: the sample is being copied. waiting: the
    CLAIMs that wait for it, in the order in which they came."""

    holder: object
    since: float
    handed_over: bool = False
    waiting: dict[WaitingClaim, None] | None = None


class Claims:
    """Which holder (a data set of a session) prepares which samples.

    A CLAIM that waits does so for one claim at a time. So what ends a claim costs little, however
    many wait and however much they want.

    Args: user_of: returns the user of a holder. most_user_claimed: see MOST_USER_CLAIMED.
    """

    def __init__(
        self,
        directory: Directory,
        user_of: Callable[[Any], object] = lambda holder: holder,
        *,
        most_user_claimed: int = MOST_USER_CLAIMED,
    ) -> None:
        self._most_user_claimed = most_user_claimed
        self._directory = directory
        self._user_of = user_of
        self._claims: dict[int, _HeldClaim] = {}
        self._awaited: dict[int, _HeldClaim] = {}
        """Claims that a session waits, or has waited, for."""
        self._held: dict[object, set[int]] = {}
        self._waiting: dict[object, set[WaitingClaim]] = {}
        self._amounts: Counter[object] = Counter()
        """Samples that each user has claimed, or waits for."""

    def claim(self, holder: object, numbers: Int64s, now: float) -> States:
        """Claim the samples that are not in memory and that no other session prepares.

        Returns: the state of each sample, as in CLAIMED.
        """
        directory = self._directory
        states = np.full(len(numbers), READABLE, np.uint8)
        absent = np.flatnonzero(directory.entries["seq"][numbers] & 1 == 0)
        held, user = self._held.setdefault(holder, set()), self._user_of(holder)
        room = len(held) + min(MOST_HELD - len(held), self._most_user_claimed - self._amounts[user])
        before = len(held)
        taken = directory.slot_of[numbers[absent]] != 0
        for k, number, loading in zip(
            absent.tolist(), numbers[absent].tolist(), taken.tolist(), strict=True
        ):
            claim = self._claims.get(number)
            if claim is not None:
                mine = claim.holder is holder and not claim.handed_over
                states[k] = YOURS if mine else ELSEWHERE
            elif loading or len(held) >= room:
                states[k] = UNSHARED
            else:
                self._claims[number] = _HeldClaim(holder, now)
                held.add(number)
                states[k] = YOURS
        self._count(user, len(held) - before)
        if not held:
            del self._held[holder]
        return states

    def _count(self, user: object, amount: int) -> None:
        self._amounts[user] += amount
        if not self._amounts[user]:
            del self._amounts[user]

    def wait(self, waiting: WaitingClaim, now: float) -> None:
        """As `claim`; answer when none of the samples is claimed by another holder any more."""
        holder, user = waiting.holder, self._user_of(waiting.holder)
        if self._amounts[user] + waiting.amount > self._most_user_claimed:
            states = self.claim(holder, waiting.numbers, now)
            states[states == ELSEWHERE] = UNSHARED
            waiting.answer(states)
            return
        self._count(user, waiting.amount)
        self._waiting.setdefault(holder, set()).add(waiting)
        self.settle(waiting, now)

    def waiting_count(self, holder: object) -> int:
        """Return how many CLAIMs of a holder wait."""
        return len(self._waiting.get(holder, ()))

    def settle(self, waiting: WaitingClaim, now: float) -> None:
        """Answer a CLAIM, or wait for what another holder has claimed."""
        if waiting not in self._waiting.get(waiting.holder, ()):
            return
        if not waiting.shared():
            self._answer(waiting, np.full(len(waiting.numbers), UNSHARED, np.uint8))
            return
        # Nothing is claimed before the wait, since holders that wait could wait for one another in
        # a circle.
        waiting.claim = claim = self._elsewhere(waiting, now)
        if claim is None:
            self._answer(waiting, self.claim(waiting.holder, waiting.numbers, now))
            return
        if claim.waiting is None:
            claim.waiting = {}
        claim.waiting[waiting] = None

    def _elsewhere(self, waiting: WaitingClaim, now: float) -> _HeldClaim | None:
        """Return a claim that a CLAIM has to wait for; old ones end."""
        numbers = waiting.numbers
        for number in numbers[self._directory.entries["seq"][numbers] & 1 == 0].tolist():
            claim = self._claims.get(number)
            if claim is None or (claim.holder is waiting.holder and not claim.handed_over):
                continue
            if claim.handed_over or now - claim.since <= CLAIM_S:
                self._awaited[number] = claim
                return claim
            self.end(claim.holder, [number])
        return None

    def _answer(self, waiting: WaitingClaim, states: States) -> None:
        mine = self._waiting[waiting.holder]
        mine.discard(waiting)
        if not mine:
            del self._waiting[waiting.holder]
        self._stop_waiting(waiting)
        waiting.answer(states)

    def _stop_waiting(self, waiting: WaitingClaim) -> None:
        self._count(self._user_of(waiting.holder), -waiting.amount)
        if waiting.claim is not None and waiting.claim.waiting is not None:
            waiting.claim.waiting.pop(waiting, None)

    def hand_over(self, holder: object, numbers: Int64s) -> NDArray[np.bool_]:
        """Note that a holder has handed samples over, which are being copied until `end`.

        Returns: which of them it has claimed, and has not handed over yet.
        """
        taken = np.zeros(len(numbers), np.bool_)
        for k, number in enumerate(numbers.tolist()):
            claim = self._claims.get(number)
            if claim is not None and claim.holder is holder and not claim.handed_over:
                claim.handed_over = taken[k] = True
        return taken

    def end(self, holder: object, numbers: list[int]) -> None:
        """End claims of a holder: the samples are in memory, or free to be claimed."""
        held = self._held.get(holder, set())
        before, woken = len(held), list[WaitingClaim]()
        for number in numbers:
            if number not in held:
                continue
            held.discard(number)
            self._awaited.pop(number, None)
            woken += self._claims.pop(number).waiting or ()
        self._count(self._user_of(holder), len(held) - before)
        if not held:
            self._held.pop(holder, None)
        for waiting in woken:
            waiting.claim = None
            waiting.later(waiting)

    def leave(self, holder: object) -> Iterator[None]:
        """Forget a holder that has gone, in steps. Claims of samples that it has handed over end
        when these are copied."""
        for waiting in self._waiting.pop(holder, ()):
            self._stop_waiting(waiting)
            waiting.answer(np.full(len(waiting.numbers), UNSHARED, np.uint8))
        held = self._held.get(holder, ())
        left = [number for number in held if not self._claims[number].handed_over]
        for first in range(0, len(left), MOST_CLAIMED):
            self.end(holder, left[first : first + MOST_CLAIMED])
            yield None

    def expire(self, now: float) -> None:
        """End old claims that others wait for, unless the samples were handed over."""
        old = [
            (claim.holder, number)
            for number, claim in self._awaited.items()
            if claim.waiting and now - claim.since > CLAIM_S and not claim.handed_over
        ]
        for holder, number in old:
            self.end(holder, [number])
