"""Who will ask for what, and when: the walks of all jobs through their data sets.

A *walk* is one job's way through one data set. It has the orders that the job announced (of this
epoch and the next), the position that it reported, and its pace. No clock: `now` is monotonic time
in seconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.orders import Arriving, Order
from ffserve.errors import UsageError

MOST_EPOCHS = 4
"""Epochs that one walk may have announced at a time."""
SMALLEST_LIMIT = 1 << 30
"""Bytes that all orders together may always take."""

Int64s = NDArray[np.int64]


class Walk:
    """One job's way through one data set.

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
        self.orders: dict[int, Order] = {}
        self.epoch = 0
        self.position = 0
        self.name: str | None = None
        self.announcer: object = None
        """Who announced (a data set of a session); when that ends, so does what it announced."""

    @property
    def order(self) -> Order | None:
        """The order of the current epoch."""
        return self.orders.get(self.epoch)

    @property
    def size(self) -> int:
        """Bytes that its orders take."""
        return sum(order.size for order in self.orders.values())

    def announced(self, epoch: int, order: Order, name: str | None, announcer: object) -> None:
        """Take an order in; it replaces another of this epoch.

        An epoch before the current one means that the job began anew.
        """
        if not self.orders or epoch <= self.epoch:
            if epoch != self.epoch:
                self.orders.clear()
            self.epoch, self.position = epoch, 0
        self.orders[epoch] = order
        if len(self.orders) > MOST_EPOCHS:
            del self.orders[sorted(self.orders)[-2]]
        self.name = name
        self.announcer = announcer

    def reached(self, epoch: int, position: int) -> None:
        """The job used the first `position` samples of an epoch; what went before is over."""
        if epoch < self.epoch:
            return
        if epoch > self.epoch:
            self._enter(epoch)
        order = self.order
        if order is None:
            return
        self.position = min(max(position, self.position), order.count)
        order.passed(self.position)
        if self.position == order.count and epoch + 1 in self.orders:
            self._enter(epoch + 1)

    def _enter(self, epoch: int) -> None:
        for old in [e for e in self.orders if e < epoch]:
            del self.orders[old]
        self.epoch, self.position = epoch, 0

    def end(self, announcer: object) -> None:
        """A session ended: forget what it announced."""
        if self.announcer is announcer:
            self.silence()

    def silence(self) -> None:
        """Forget what was announced."""
        self.orders.clear()
        self.announcer = self.name = None


class NextUse:
    """All walks.

    Args: most_size: bytes that all orders together may take.
    """

    def __init__(self, most_size: int = SMALLEST_LIMIT) -> None:
        self._most_size = most_size
        self._walks: dict[tuple[str, bytes], Walk] = {}

    def join(self, job: str, bases: Int64s, counts: Int64s) -> Walk:
        """A session of a job has a data set open, whose shards own these runs of numbers."""
        key = job, np.stack((bases, counts)).tobytes()
        walk = self._walks.get(key)
        if walk is None:
            filled = counts > 0
            low = int(bases[filled].min(initial=1 << 62)) if filled.any() else 0
            high = int((bases + counts)[filled].max(initial=0))
            walk = self._walks[key] = Walk(job, int(counts.sum()), low, high - low)
        walk.sessions += 1
        return walk

    def leave(self, walk: Walk, announcer: object) -> None:
        """A session has the data set open no more."""
        walk.end(announcer)
        walk.sessions -= 1
        if walk.sessions == 0:
            self._walks = {key: w for key, w in self._walks.items() if w is not walk}

    @property
    def walks(self) -> list[Walk]:
        """Return every job's walks."""
        return list(self._walks.values())

    def arriving(self, walk: Walk, count: int, *, replacement: bool) -> Arriving:
        """Make room for an order.

        Raises: UsageError when it cannot be meant, or all orders together would be too large.
        """
        arriving = Arriving(
            count,
            sample_count=walk.sample_count,
            low=walk.low,
            span=walk.span,
            replacement=replacement,
        )
        size = sum(w.size for w in self._walks.values()) + 6 * count
        if size > self._most_size:
            raise UsageError(
                f"all announced orders together would take {size} bytes",
                hint=f"the daemon keeps {self._most_size}; jobs of one seed share theirs",
            )
        return arriving

    def announced(
        self, walk: Walk, epoch: int, order: Order, name: str | None, announcer: object
    ) -> None:
        """Take a whole order in; what another job announced likewise is held once."""
        for other in self._walks.values():
            for known in other.orders.values():
                if known.same(order):
                    order.share(known)
                    break
        walk.announced(epoch, order, name, announcer)
