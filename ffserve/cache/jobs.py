"""Job progress: the orders, the position and the pace of one job in one dataset.

For a job that announced its order the next use of a sample is known exactly: it is (position of the
sample - position of the job) / pace seconds from now, over the orders of this epoch and the next.
For a silent job one bit per sample is known, "seen this epoch": a sample that it has not seen comes
at some time before its epoch ends, one that it has seen at some time in the next. There is no
clock: `now` is monotonic time in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp

import numpy as np

from ffserve.cache.orders import PARTS, AnnouncedOrder
from ffserve.dtypes import Bools, Floats, Int64s
from ffserve.engine.slots import mark
from ffserve.limits import MOST_EPOCHS

MOST_ADVANCED = 65_536
"""A job advances by at most this many positions in one step, so that the daemon's loop serves
others in between."""
PACE_S = 20.0
"""The pace of a job is an average that fades with this time constant."""
UNKNOWN_PACE = 1000.0
"""A job that has made no progress yet is assumed to read this many samples per second."""
ASLEEP_S = 10.0
"""A job without progress for this long, and for a tenth of its epoch, is inactive."""
REFRESH = 256
"""The times of parts are computed anew this many times per epoch."""
AHEAD_SHARE, AHEAD = 0.06, 8192
"""How far from its position a job may request samples, as a share of the epoch or in samples: its
workers run ahead."""
LOOKED_AT = 256
"""After this many requested samples it is decided whether a job keeps to its order."""
REPEATS = 0.05
"""A silent job that repeats a larger share of its samples in an epoch draws with replacement."""
FEW = 64
NEARBY = 512
FADE = 0.98
"""A step or a lead is multiplied by this factor with each report."""

USUAL = 16
"""The usual step is a fading mean over about this many reports."""

Table = tuple[AnnouncedOrder, Floats]
_NONE: Int64s = np.zeros(0, np.int64)


class Pace:
    """Recent average of samples per second."""

    __slots__ = ("_amount", "_since", "_time")

    def __init__(self) -> None:
        self._amount = self._time = 0.0
        self._since: float | None = None

    def add(self, amount: int, now: float) -> None:
        """Count `amount` more samples."""
        if self._since is not None:
            elapsed = now - self._since
            kept = exp(-elapsed / PACE_S)
            self._amount = self._amount * kept + amount
            self._time = self._time * kept + elapsed
        self._since = now

    def rate(self, now: float) -> float:
        """Return samples per second, 0.0 while unknown."""
        if self._since is None or self._time == 0.0:
            return 0.0
        return self._amount / (self._time + max(now - self._since, 0.0))


def owner_of(job: str) -> str:
    """Return the user in the key of a job (`server/sessions/job_table.py: Job.key`)."""
    _, _, user = job.rpartition("\n") if "\n" in job else ("", "", "")
    return user


class JobProgress:
    """The progress of one job through one dataset; see the module.

    Args:
        job: its name. low, span: the dataset's sample numbers are in [low, low + span).
        sample_count: of the dataset.
    """

    def __init__(self, job: str, sample_count: int, low: int, span: int) -> None:
        self.job = job
        self.owner = owner_of(job)
        self.key = job, b""
        """Its key in `NextUse`."""
        self.sample_count = sample_count
        self.payload_size = 0
        """Bytes of its samples, or of the chunks that they are in."""
        self.low = low
        self.span = span
        self.sessions = 0
        self.ready: Callable[[Int64s], int] | None = None
        """How many of some samples, from the first one on, can be prefetched now; None: all."""
        self.group = 0
        self.pace = Pace()
        self.last_used: float | None = None
        # of a job that announces
        self.orders: dict[int, AnnouncedOrder] = {}
        self.epoch = 0
        self.position = 0
        self.front = 0
        """The position after the last one known to be requested."""
        self.step = 0.0
        """Recent number of positions between two reports."""
        self.usual_step = 0.0
        """A mean of them, so that a late report changes it little."""
        self.lead = 0.0
        """Recent number of positions that its workers run ahead of its own."""
        self.name: str | None = None
        self.announcer: object = None
        """The dataset of a session that announced the orders: they are dropped with it."""
        self.user = 0
        """The user that announced them."""
        self.on_demand = False
        """Its samples are prepared by clients, so none is read ahead."""
        self.feeds = 0
        """Data sets of prepared samples that are made of its samples. It has no floor meanwhile:
        most of its samples are wanted only where prepared ones were evicted."""
        self.departed = False
        """Its requests departed from its order; it counts as silent since."""
        self._reports = False
        self._near = self._far = 0
        self._tables: list[Table] = []
        self._tables_until = 0.0
        # of a silent job
        self.seen: Bools | None = None
        self.seen_count = 0
        self.replacement = False
        self._repeats = 0

    # ---- orders ---------------------------------------------------------------------------

    @property
    def order(self) -> AnnouncedOrder | None:
        """The order of the current epoch."""
        return self.orders.get(self.epoch)

    @property
    def size(self) -> int:
        """Bytes that its orders take."""
        return sum(order.size for order in self.orders.values())

    def announced(
        self,
        epoch: int,
        order: AnnouncedOrder,
        name: str | None,
        announcer: object,
        now: float,
        user: int = 0,
    ) -> None:
        """Add an order; it replaces another of this epoch.

        An epoch before the current one means that the job has restarted.
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
        self.user = user
        self.departed = False
        self.seen = None
        self.last_used = now
        self._tables_until = 0.0

    def advance_to(self, epoch: int, position: int, now: float) -> Int64s:
        """The job reports that it has used the first `position` samples of an epoch.

        A call advances MOST_ADVANCED positions at most: call it again while `behind`.

        Returns: the samples that it used since it was last known.
        """
        if epoch < self.epoch:
            return _NONE
        if epoch > self.epoch:
            order = self.order
            if order is not None and order.count * 9 // 10 < self.position < order.count:
                # The end was not reported; an epoch that was abandoned earlier was not used.
                return self._advance(order.count, now)
            if self.epoch != epoch:
                self._enter(epoch)
        self._reports = True
        return self._advance(position, now)

    def behind(self, epoch: int, position: int) -> bool:
        """Whether it has not advanced as far."""
        if self.epoch != epoch:
            return self.epoch < epoch
        order = self.order
        return order is not None and self.position < min(position, order.count)

    def _advance(self, position: int, now: float) -> Int64s:
        order = self.order
        if order is None:
            return _NONE
        position, advanced = min(position, order.count, self.position + MOST_ADVANCED), _NONE
        if position > self.position:
            self._use(position - self.position, now)
            step = float(position - self.position)
            self.step = max(self.step * FADE, step)
            self.usual_step += (step - self.usual_step) / (USUAL if self.usual_step else 1)
            self.lead = max(self.lead * FADE, float(self.front - position))
            self.position = position
            self.front = max(self.front, position)
            advanced = order.advance(position)
        if position == order.count and self.epoch + 1 in self.orders:
            self._enter(self.epoch + 1)
        return advanced

    def _enter(self, epoch: int) -> None:
        for old in [e for e in self.orders if e < epoch]:
            del self.orders[old]
        ahead = self.front - self.position if epoch == self.epoch + 1 else 0
        self._begin(epoch)
        order = self.order
        self.front = min(max(ahead, 0), order.count) if order else 0

    def _begin(self, epoch: int) -> None:
        self.epoch, self.position, self.front = epoch, 0, 0
        self._reports = False
        self._tables_until = 0.0

    def end(self, announcer: object) -> None:
        """The announcer is gone: drop its orders."""
        if self.announcer is announcer:
            self.silence()

    def silence(self) -> None:
        """Drop all orders."""
        self.orders.clear()
        self.announcer = self.name = None
        self._tables_until = 0.0
        self._tables = []

    # ---- use ------------------------------------------------------------------------------

    def _use(self, count: int, now: float) -> None:
        self.pace.add(count, now)
        self.last_used = now

    def asked(self, numbers: Int64s, now: float) -> Int64s:
        """The job requested samples. Returns: the samples that it has used by that."""
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
        # With replacement the table holds only the next use of a sample, maybe after this one.
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
        # Requests mostly follow the order, so the last of them comes last in it.
        self._found(order, last, int(numbers[place]))
        known = self.position + (self.step if self._reports else 0.0)
        self.lead = max(self.lead, self.front - known)
        if not self._reports:
            # Without reports, requests tell the position, with some disorder.
            lag = min(AHEAD, order.count // 16)
            first = int(np.minimum.reduce(parts[parts >= front]))
            return self._advance(min(self.front, order.edge(first)) - lag, now)
        return _NONE

    def passed(self, numbers: Int64s) -> None:
        """A worker has these samples, and the job will report a position behind them. Until then
        they would count as wanted next, which in a small arena are more than it holds."""
        order = self.order
        if order is None or order.following is not None or not len(numbers):
            return
        end = self.front + int(max(self.lead, self.usual_step, len(numbers))) + NEARBY
        # Reports of cached samples may be late: others are of the epoch before.
        parts = order.parts(numbers)
        here = (parts >= order.part(self.position)) & (parts <= order.part(min(end, order.count)))
        order.pass_over(numbers[here])

    def _found(self, order: AnnouncedOrder, part: int, number: int) -> None:
        """A sample in this part was requested: move the front behind it."""
        start = max(order.edge(part), self.front)
        edge = order.edge(part + 1)
        # Mostly it is nearby.
        for stop in (min(start + NEARBY, edge), edge):
            places = (order.numbers(start, stop) == number).nonzero()[0]
            if len(places):
                self.front = start + int(places[-1]) + 1
                return

    def visited(self, numbers: Int64s, now: float) -> None:
        """A silent job used samples, hits included."""
        self._use(len(numbers), now)
        if self.seen is None:
            self.seen = np.zeros(self.span, np.bool_)
            self.seen_count = self._repeats = 0
        fresh, again = mark(self.seen, numbers, self.low)
        places = fresh + again
        if again > 0.8 * places and again > FEW // 8 and not self.replacement:
            # Nearly all of them were seen before: another epoch has begun.
            self.seen[:] = False
            self.seen_count = self._repeats = 0
            fresh, again = mark(self.seen, numbers, self.low)
        self._repeats += again
        self.replacement = self._repeats > REPEATS * self.seen_count + FEW
        self.seen_count += fresh
        if self.replacement and self.seen_count > 0.9 * self.sample_count:
            self.seen[:] = False
            self.seen_count = self._repeats = 0

    # ---- estimates ------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Samples per epoch."""
        return self.order.count if self.order else max(self.sample_count, 1)

    def rate(self, now: float) -> float:
        """Return samples per second, assumed while unknown."""
        return self.pace.rate(now) or UNKNOWN_PACE

    def epoch_s(self, now: float) -> float:
        """Return how long an epoch takes."""
        return self.count / self.rate(now)

    def active(self, now: float) -> bool:
        """Whether it makes progress."""
        if self.last_used is None:
            return False
        idle_s = now - self.last_used
        return idle_s < ASLEEP_S or idle_s < 0.1 * self.epoch_s(self.last_used)

    def same_set(self) -> bool:
        """Whether every epoch visits the same samples once, as far as is known."""
        order = self.order
        if order is None:
            return not self.replacement
        if order.following is not None:
            return False
        following = self.orders.get(self.epoch + 1)
        if order.count == self.sample_count or following is None:
            return True
        return order.like is not None and order.like == (following, True)

    def tables(self, now: float) -> list[Table]:
        """Return the orders, and for each the absolute time of each of its parts."""
        if now >= self._tables_until:
            self._tables = self._timed(now)
            self._tables_until = now + self.epoch_s(now) / REFRESH
        return self._tables

    def _timed(self, now: float) -> list[Table]:
        order = self.order
        if order is None:
            return []
        pace = self.rate(now)
        # A time for each value of a byte.
        middles = (np.arange(256) - 0.5) / PARTS
        times = now + np.maximum(middles * order.count - self.position, 0.0) / pace
        left = order.count - self.position
        following = self.orders.get(self.epoch + 1)
        # Samples in no known order come in the middle of the epoch after.
        known = following is not None or order.count < self.sample_count
        times[0] = np.inf if known else now + (left + 0.5 * order.count) / pace
        tables = [(order, times)]
        if following is not None:
            after = now + (left + middles * following.count) / pace
            after[0] = np.inf
            tables.append((following, after))
        return tables

    def expected(self, now: float) -> tuple[Bools | None, int, float, float]:
        """Return how likely a silent job is to want samples: the samples that it has seen, or None
        where that tells nothing; the first of these; the chance per second that it wants one that
        it has seen, and one that it has not."""
        pace = self.rate(now)
        if self.seen is None or self.replacement:
            chance = pace / max(self.sample_count, 1)
            return None, self.low, chance, chance
        left_s = self.left_s(now)
        return self.seen, self.low, 1 / (left_s + 0.5 * self.sample_count / pace), 2 / left_s

    def left_s(self, now: float) -> float:
        """Return how long a silent job's epoch will still take."""
        return max(self.sample_count - self.seen_count, 1) / self.rate(now)
