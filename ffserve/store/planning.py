"""When the blocks of a data set will be used: from announced orders, and the pace of a job."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

NEVER = 1 << 62
FIRST_RATE = 1000.0
"""Samples a second, until the job's own speed is known."""


class BlockOrder:
    """The blocks that the samples of one order lie in.

    Args:
        firsts, lasts: number of the first and the last block of the sample at each position.
        count: number of blocks of the data set.
    """

    def __init__(self, firsts: Int64s, lasts: Int64s, count: int) -> None:
        self.count = count
        self.length = len(firsts)
        spans = lasts - firsts + 1
        before = np.cumsum(spans) - spans
        self._blocks = np.repeat(firsts - before, spans)
        self._blocks += np.arange(len(self._blocks))
        self._begins = before

    def next_uses(self, position: int) -> Int64s:
        """Return for each block the first position from this one on that needs it, or NEVER."""
        uses = np.full(self.count, NEVER)
        if position < self.length:
            rest = np.arange(position, self.length)
            spans = np.diff(np.append(self._begins[position:], len(self._blocks)))
            # Of equal blocks the last assignment counts: that of the nearest position.
            uses[self._blocks[self._begins[position] :][::-1]] = np.repeat(rest, spans)[::-1]
        return uses

    def upcoming(self, position: int, horizon: int, least: int) -> Int64s:
        """Return different blocks of the next positions, soonest first.

        Args: horizon: number of positions. least: samples of a block that must be among them.
        """
        if position >= self.length:
            return np.zeros(0, np.int64)
        begin, end = int(self._begins[position]), len(self._blocks)
        if position + horizon < self.length:
            end = int(self._begins[position + horizon])
        different, firsts, counts = np.unique(
            self._blocks[begin:end], return_index=True, return_counts=True
        )
        chosen = counts >= least
        found: Int64s = different[chosen][np.argsort(firsts[chosen])]
        return found


class Progress:
    """A job's place in its announced orders, and how fast it goes."""

    def __init__(self) -> None:
        self.orders: dict[int, BlockOrder] = {}
        self.epoch = self.position = 0
        self.rate = FIRST_RATE
        self._since: float | None = None
        self._count = 0

    def announce(self, epoch: int, order: BlockOrder) -> None:
        """Take the order of an epoch; one that is not later than the present one begins anew."""
        if not self.orders or epoch <= self.epoch:
            self.orders.clear()
            self.epoch, self.position = epoch, 0
        self.orders[epoch] = order

    def reached(self, epoch: int, position: int, now: float) -> None:
        """The job has used so many samples of an epoch."""
        order = self.orders.get(epoch)
        if order is not None and position >= order.length and epoch + 1 in self.orders:
            epoch, position = epoch + 1, 0
        done = position - self.position if epoch == self.epoch else position
        self.epoch, self.position = epoch, position
        for old in [known for known in self.orders if known < epoch]:
            del self.orders[old]
        if self._since is None or done < 0:
            self._since, self._count = now, 0
            return
        self._count += done
        passed = now - self._since
        if passed >= 0.5:
            self.rate = max(0.5 * self.rate + 0.5 * self._count / passed, 1.0)
            self._since, self._count = now, 0

    def next_uses(self, count: int) -> NDArray[np.float64]:
        """Return in how many seconds each block will be used; inf if no order says so.

        A block that the present epoch needs no more, and that no next one is announced for, is
        needed in the next epoch: in its middle, for all that is known.
        """
        seconds = np.full(count, np.inf)
        order = self.orders.get(self.epoch)
        if order is None:
            return seconds
        uses = order.next_uses(self.position)
        known = uses != NEVER
        seconds[known] = (uses[known] - self.position) / self.rate
        left = order.length - self.position
        after = self.orders.get(self.epoch + 1)
        if after is None:
            seconds[~known] = (left + order.length / 2) / self.rate
            return seconds
        uses = after.next_uses(0)
        next_known = ~known & (uses != NEVER)
        seconds[next_known] = (left + uses[next_known]) / self.rate
        return seconds

    def upcoming(self, horizon: int, least: int) -> Int64s:
        """Return blocks as `BlockOrder.upcoming`, across the end of the epoch."""
        found = np.zeros(0, np.int64)
        order = self.orders.get(self.epoch)
        if order is not None:
            found = order.upcoming(self.position, horizon, least)
            left = order.length - self.position
            after = self.orders.get(self.epoch + 1)
            if left < horizon and after is not None:
                more = after.upcoming(0, horizon - left, least)
                found = np.append(found, more[~np.isin(more, found)])
        return found
