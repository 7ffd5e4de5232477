"""One job's way through one data set: what it announced, how far it is, how fast it goes.

A job that announced is known exactly: the time of a sample's next use is (position - now) / pace,
over this epoch's order and the next one's. Of a job that is silent one bit a sample is known,
"seen this epoch": one that it has not seen comes at some time before its epoch ends, one that it
has seen at some time in the next. No clock: `now` is monotonic time in seconds.
"""

from __future__ import annotations

from math import exp

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.orders import PARTS, Order
from ffserve.engine.plan import mark

MOST_EPOCHS = 4
"""Epochs that one progress may have announced at a time."""
PACE_S = 20.0
"""How far back a pace is measured."""
UNKNOWN_PACE = 1000.0
"""Samples a second, of who has not got anywhere yet."""
ASLEEP_S = 10.0
"""A job that got nowhere for so long, and a tenth of its epoch, counts for nothing."""
REFRESH = 256
"""How often an epoch times are computed anew."""
AHEAD_SHARE, AHEAD = 0.06, 8192
"""How far from its position a job may ask, in parts of the epoch or in samples: its workers run
ahead."""
LOOKED_AT = 256
"""Samples that a job asked for before it is judged whether it keeps to its order."""
REPEATS = 0.05
"""A silent job that asks for more of its samples again within an epoch draws with replacement."""
FEW = 64
NEARBY = 512
FADE = 0.98
"""What is left of a step or lead with each report."""

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Table = tuple[Order, Floats]
_NONE: Int64s = np.zeros(0, np.int64)


class Pace:
    """Samples a second, of late."""

    __slots__ = ("_amount", "_since", "_time")

    def __init__(self) -> None:
        self._amount = self._time = 0.0
        self._since: float | None = None

    def add(self, amount: int, now: float) -> None:
        """So many more have been used."""
        if self._since is not None:
            passed = now - self._since
            kept = exp(-passed / PACE_S)
            self._amount = self._amount * kept + amount
            self._time = self._time * kept + passed
        self._since = now

    def rate(self, now: float) -> float:
        """Return samples a second; 0.0 while it is unknown."""
        if self._since is None or self._time == 0.0:
            return 0.0
        return self._amount / (self._time + max(now - self._since, 0.0))


class JobProgress:
    """See the module's text.

    Args:
        job: its name. low, span: of the data set's sample numbers.
        sample_count: of the data set.
    """

    def __init__(self, job: str, sample_count: int, low: int, span: int) -> None:
        self.job = job
        self.sample_count = sample_count
        self.low = low
        self.span = span
        self.sessions = 0
        self.group = 0
        self.pace = Pace()
        self.last_used: float | None = None
        # announced
        self.orders: dict[int, Order] = {}
        self.epoch = 0
        self.position = 0
        self.front = 0
        """Behind the last position that it is known to have asked for."""
        self.step = 0.0
        """Positions between two reports, of late."""
        self.lead = 0.0
        """How far its workers ran ahead of its position, of late."""
        self.name: str | None = None
        self.announcer: object = None
        """Who announced (a data set of a session); when that ends, so does what it announced."""
        self.departed = False
        """Its requests departed from what it announced; it counts as silent since."""
        self._told = False
        self._near = self._far = 0
        self._tables: list[Table] = []
        self._tables_until = 0.0
        # silent
        self.seen: NDArray[np.bool_] | None = None
        self.seen_count = 0
        self.replacement = False
        self._repeats = 0

    # ---- what it announces ----------------------------------------------------------------

    @property
    def order(self) -> Order | None:
        """The order of the current epoch."""
        return self.orders.get(self.epoch)

    @property
    def size(self) -> int:
        """Bytes that its orders take."""
        return sum(order.size for order in self.orders.values())

    def announced(
        self, epoch: int, order: Order, name: str | None, announcer: object, now: float
    ) -> None:
        """Take an order in; it replaces another of this epoch.

        An epoch before the current one means that the job began anew.
        """
        if not self.orders or epoch <= self.epoch:
            if epoch != self.epoch:
                self.orders.clear()
            self._begin(epoch)
        self.orders[epoch] = order
        if len(self.orders) > MOST_EPOCHS:
            del self.orders[sorted(self.orders)[-2]]
        self.name = name
        self.announcer = announcer
        self.departed = False
        self.seen = None
        self.last_used = now
        self._tables_until = 0.0

    def advance_to(self, epoch: int, position: int, now: float) -> Int64s:
        """The job used the first `position` samples of an epoch; what went before is over.

        Returns: the samples that it passed.
        """
        if epoch < self.epoch:
            return _NONE
        passed = _NONE
        if epoch > self.epoch:
            order = self.order
            if order is not None and self.position > order.count * 9 // 10:
                # The end went unreported; an epoch that was abandoned earlier was not used.
                passed = self._advance(order.count, now)
            if self.epoch != epoch:
                self._enter(epoch)
        self._told = True
        more = self._advance(position, now)
        return np.concatenate((passed, more)) if len(passed) else more

    def _advance(self, position: int, now: float) -> Int64s:
        order = self.order
        if order is None:
            return _NONE
        position, passed = min(position, order.count), _NONE
        if position > self.position:
            self._use(position - self.position, now)
            self.step = max(self.step * FADE, float(position - self.position))
            self.lead = max(self.lead * FADE, float(self.front - position))
            self.position = position
            self.front = max(self.front, position)
            passed = order.advance(position)
        if position == order.count and self.epoch + 1 in self.orders:
            self._enter(self.epoch + 1)
        return passed

    def _enter(self, epoch: int) -> None:
        for old in [e for e in self.orders if e < epoch]:
            del self.orders[old]
        ahead = self.front - self.position if epoch == self.epoch + 1 else 0
        self._begin(epoch)
        order = self.order
        self.front = min(max(ahead, 0), order.count) if order else 0

    def _begin(self, epoch: int) -> None:
        self.epoch, self.position, self.front = epoch, 0, 0
        self._told = False
        self._tables_until = 0.0

    def end(self, announcer: object) -> None:
        """Somebody left: forget what he announced."""
        if self.announcer is announcer:
            self.silence()

    def silence(self) -> None:
        """Forget what was announced."""
        self.orders.clear()
        self.announcer = self.name = None
        self._tables_until = 0.0
        self._tables = []

    # ---- what it does ---------------------------------------------------------------------

    def _use(self, count: int, now: float) -> None:
        self.pace.add(count, now)
        self.last_used = now

    def asked(self, numbers: Int64s, now: float) -> Int64s:
        """The job asked the daemon for samples. Returns: what it passed or used by that."""
        order = self.order
        if order is None:
            self.visited(numbers, now)
            return numbers
        self.last_used = now
        if not len(numbers):
            return _NONE
        parts, lowest, last, place = order.c.parts(numbers)
        ahead = int(max(AHEAD, AHEAD_SHARE * order.count)) + order.count // PARTS
        low, high = order.part(max(self.position - ahead, 0)), order.part(self.front + ahead)
        kept = len(numbers)
        # With replacement the table knows only where a sample comes next, maybe after this use.
        if order.following is None and not (low <= lowest and last <= high):
            near = (parts >= low) & (parts <= high)
            following = self.orders.get(self.epoch + 1)
            if following is not None and self.front + ahead > order.count:
                end = following.part(min(self.front + ahead - order.count, following.count))
                early = following.parts(numbers)
                near |= (early >= 1) & (early <= end)
            kept = int(np.count_nonzero(near))
            parts[~near] = 0
            last = int(np.maximum.reduce(parts))
            place = int((parts == last).nonzero()[0][-1])
        self._near += kept
        self._far += len(numbers) - kept
        if self._near + self._far >= LOOKED_AT:
            if self._far > (self._near + self._far) // 4:
                self.silence()
                self.departed = True
                return _NONE
            self._near //= 2
            self._far //= 2
        front = order.part(self.front)
        if last < front:
            return _NONE
        # Requests follow the order mostly, so that the last of them comes last in it.
        self._found(order, last, int(numbers[place]))
        self.lead = max(self.lead, float(self.front - self.position))
        if not self._told:
            # Nobody reports: what is asked for has been got to, with some disorder.
            lag = min(AHEAD, order.count // 16)
            first = int(np.minimum.reduce(parts[parts >= front]))
            return self._advance(min(self.front, order.edge(first)) - lag, now)
        return _NONE

    def _found(self, order: Order, part: int, number: int) -> None:
        """A sample that stands in this part was asked for: move the front behind it."""
        start = max(order.edge(part), self.front)
        edge = order.edge(part + 1)
        # Mostly it stands nearby.
        for stop in (min(start + NEARBY, edge), edge):
            places = (order.numbers(start, stop) == number).nonzero()[0]
            if len(places):
                self.front = start + int(places[-1]) + 1
                return

    def visited(self, numbers: Int64s, now: float) -> None:
        """A silent job used samples, whether it had to ask for them or not."""
        self._use(len(numbers), now)
        if self.seen is None:
            self.seen = np.zeros(self.span, np.bool_)
            self.seen_count = self._repeats = 0
        fresh, again = mark(self.seen, numbers, self.low)
        places = fresh + again
        if again > 0.8 * places and again > FEW // 8 and not self.replacement:
            # Everything again at once: another epoch.
            self.seen[:] = False
            self.seen_count = self._repeats = 0
            fresh, again = mark(self.seen, numbers, self.low)
        self._repeats += again
        self.replacement = self._repeats > REPEATS * self.seen_count + FEW
        self.seen_count += fresh
        if self.replacement and self.seen_count > 0.9 * self.sample_count:
            self.seen[:] = False
            self.seen_count = self._repeats = 0

    # ---- what can be expected of it -------------------------------------------------------

    @property
    def count(self) -> int:
        """Samples of an epoch."""
        return self.order.count if self.order else max(self.sample_count, 1)

    def rate(self, now: float) -> float:
        """Return samples a second, guessed if need be."""
        return self.pace.rate(now) or UNKNOWN_PACE

    def epoch_s(self, now: float) -> float:
        """Return how long an epoch takes."""
        return self.count / self.rate(now)

    def active(self, now: float) -> bool:
        """Whether it gets on."""
        if self.last_used is None:
            return False
        idle_s = now - self.last_used
        return idle_s < ASLEEP_S or idle_s < 0.1 * self.epoch_s(self.last_used)

    def same_set(self) -> bool:
        """Whether every epoch visits the same samples once, as far as is known."""
        order, following = self.order, self.orders.get(self.epoch + 1)
        if order is None:
            return not self.replacement
        if order.following is not None:
            return False
        if order.count == self.sample_count or following is None:
            return True
        if self._compared is None or self._compared[0] is not following:
            self._compared = following, order.visits_like(following)
        return self._compared[1]

    _compared: tuple[Order, bool] | None = None

    def tables(self, now: float) -> list[Table]:
        """Return for each order the absolute time that each of its parts stands for."""
        if now >= self._tables_until:
            self._tables = self._timed(now)
            self._tables_until = now + self.epoch_s(now) / REFRESH
        return self._tables

    def _timed(self, now: float) -> list[Table]:
        order = self.order
        if order is None:
            return []
        pace = self.rate(now)
        # A time for each value that a byte can have.
        middles = (np.arange(256) - 0.5) / PARTS
        times = now + np.maximum(middles * order.count - self.position, 0.0) / pace
        left = order.count - self.position
        following = self.orders.get(self.epoch + 1)
        # What comes after the orders that are known comes in the middle of the next.
        known = following is not None or order.count < self.sample_count
        times[0] = np.inf if known else now + (left + 0.5 * order.count) / pace
        tables = [(order, times)]
        if following is not None:
            after = now + (left + middles * following.count) / pace
            after[0] = np.inf
            tables.append((following, after))
        return tables

    def expected(self, now: float) -> tuple[NDArray[np.bool_] | None, int, float, float]:
        """Return how likely a silent job is to want samples: what it has seen of its own, or None
        where that tells nothing, the first of these, and the chance a second to want one that it
        has seen, and one that it has not."""
        pace = self.rate(now)
        if self.seen is None or self.replacement:
            chance = pace / max(self.sample_count, 1)
            return None, self.low, chance, chance
        left_s = self.left_s(now)
        return self.seen, self.low, 1 / (left_s + 0.5 * self.sample_count / pace), 2 / left_s

    def left_s(self, now: float) -> float:
        """Return how long a silent job's epoch will still take."""
        return max(self.sample_count - self.seen_count, 1) / self.rate(now)
