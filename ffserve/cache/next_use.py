"""Next use: when each sample will be wanted next, by any job.

Jobs whose datasets share shards form a *group*: they want the same samples, and a sample kept for
one may serve another. Groups compete for memory (see `policy`), jobs within a group do not.
There is no clock: the caller sets `now`, monotonic seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from weakref import WeakSet

import numpy as np

from ffserve.cache.jobs import JobProgress
from ffserve.cache.orders import AnnouncedOrder, Arriving, Steps, done
from ffserve.dtypes import Int64s
from ffserve.engine.slots import Future, SilentJobs
from ffserve.errors import UsageError
from ffserve.limits import LEAST_ORDERS_SIZE

USUAL_MISS_S = 1 / (500 << 20)
"""Until the speed of the disk is known, it is assumed to read a byte in this many seconds."""

FEW_JOBS = 4
"""The silent jobs of a group with more jobs than this are not evaluated anew for every search, at
2 us per job."""
MOMENTS, LONGEST_MOMENT_S = 64, 0.1
"""These jobs are evaluated anew this many times in the rest of the epoch that ends first, and at
least once in LONGEST_MOMENT_S."""


class Group:
    """Jobs over shards that they have, directly or through others, in common."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.jobs: list[JobProgress] = []
        self.saved_s: Callable[[float], float] | None = None
        """Seconds that each byte of its samples saves, of those that reading a byte takes; None:
        just these, as of raw samples."""
        self.owner = ""
        """The user who prepares these samples; empty for raw ones."""
        self._silent: SilentJobs | None = None
        self._known, self._known_at, self._known_until = 0, 0.0, 0.0

    def active(self, now: float) -> list[JobProgress]:
        """Return the jobs that make progress."""
        return [progress for progress in self.jobs if progress.active(now)]

    def static(self, now: float) -> bool:
        """Whether the static rule applies: a sole job that visits the same samples once in every
        epoch, or none."""
        jobs = self.active(now)
        return not jobs or (len(jobs) == 1 and jobs[0].same_set())

    @property
    def announced(self) -> bool:
        """Whether any job announced its order."""
        return any(progress.orders for progress in self.jobs)

    def epoch_s(self, now: float) -> float:
        """Return how long the epoch of the fastest job takes."""
        return min((progress.epoch_s(now) for progress in self.active(now)), default=np.inf)

    def future(self, now: float) -> Future:
        """Return all that is known of when samples will be wanted next."""
        announced = [
            (order.c, times)
            for progress in self.jobs
            if progress.orders
            for order, times in progress.tables(now)
        ]
        return Future(announced, self._expected(now), now)

    def _expected(self, now: float) -> SilentJobs | None:
        """Return what silent jobs are likely to want; for many jobs, as of a moment ago."""
        many = len(self.jobs) > FEW_JOBS
        if many and self._known_at <= now < self._known_until and len(self.jobs) == self._known:
            return self._silent
        jobs = [progress for progress in self.jobs if not progress.orders and progress.active(now)]
        self._silent = SilentJobs([progress.expected(now) for progress in jobs]) if jobs else None
        self._known, self._known_at = len(self.jobs), now
        if many:
            left_s = min((progress.left_s(now) for progress in jobs), default=1.0)
            self._known_until = now + min(left_s / MOMENTS, LONGEST_MOMENT_S)
        return self._silent


class NextUse:
    """All jobs and groups.

    Args: most_size: bytes that all orders together may take.
    """

    def __init__(self, most_size: int = LEAST_ORDERS_SIZE) -> None:
        self.turn_at = 0.0
        """When the scheduler gave its latest turns, for which victims are chosen. It stands still
        between two turns: it is no clock."""
        self.miss_s = USUAL_MISS_S
        """Seconds of reading that each byte in memory saves, as of late."""
        self.groups: dict[int, Group] = {}
        self.merged: list[tuple[int, int]] = []
        """(old, new): groups that became one, which the policy has not seen yet."""
        self.most_size = most_size
        self._jobs: dict[tuple[str, bytes], JobProgress] = {}
        self._announced: dict[JobProgress, None] = {}
        """Those with an order, and some that have none any more."""
        self._arriving: WeakSet[Arriving] = WeakSet()
        self._bases: list[int] = []
        """First samples of the shards of all datasets, rising."""
        self._group_of_base: dict[int, int] = {}
        self._next_group = 1
        self.grouped: Callable[[list[int], int], object] = lambda bases, number: None
        """Called with shards whose group has changed, and the group."""

    # ---- jobs and groups ------------------------------------------------------------------

    def join(self, job: str, bases: Int64s, counts: Int64s) -> JobProgress:
        """A session of a job opens a dataset, whose shards own these runs of numbers."""
        key = job, np.stack((bases, counts)).tobytes()
        progress = self._jobs.get(key)
        if progress is None:
            filled = counts > 0
            low = int(bases[filled].min(initial=1 << 62)) if filled.any() else 0
            high = int((bases + counts)[filled].max(initial=0))
            progress = self._jobs[key] = JobProgress(job, int(counts.sum()), low, high - low)
            progress.key = key
            progress.group = self._unite(bases[filled].tolist())
            self.groups[progress.group].jobs.append(progress)
        progress.sessions += 1
        return progress

    def _unite(self, bases: list[int]) -> int:
        """Return the group of these shards; several become one."""
        groups = self._group_of_base
        found = sorted({groups[base] for base in bases if base in groups})
        if found:
            number = found[0]
        else:
            number = self._next_group
            self._next_group += 1
        group = self.groups.setdefault(number, Group(number))
        fresh = [base for base in bases if base not in groups]
        for old in found[1:]:
            group.saved_s = group.saved_s or self.groups[old].saved_s
            for base in [base for base, other in groups.items() if other == old]:
                groups[base] = number
                fresh.append(base)
            for progress in self.groups.pop(old, Group(old)).jobs:
                progress.group = number
                group.jobs.append(progress)
            self.merged.append((old, number))
        groups.update(dict.fromkeys(bases, number))
        self._bases = sorted(groups)
        if fresh:
            self.grouped(fresh, number)
        return number

    def adopt(self, groups: Mapping[int, int]) -> None:
        """Take over the groups of a predecessor's shards, by their first samples, before there is
        any job."""
        self._group_of_base.update(groups)
        self._bases = sorted(self._group_of_base)
        for number in set(groups.values()):
            self.groups.setdefault(number, Group(number))
        self._next_group = max(groups.values(), default=0) + 1

    def leave(self, progress: JobProgress, announcer: object) -> None:
        """A session closes the dataset."""
        progress.end(announcer)
        progress.sessions -= 1
        if progress.sessions == 0:
            del self._jobs[progress.key]
            self._announced.pop(progress, None)
            self.groups[progress.group].jobs.remove(progress)

    def saved_s(self, number: int, beside: int) -> float:
        """Return how many seconds each byte in memory of a group's samples saves per use, to be
        compared with another group. Clients report what preparing takes, so that counts among
        groups of one user only."""
        group, other = self.groups.get(number), self.groups.get(beside)
        if group is None or group.saved_s is None or other is None:
            return self.miss_s
        if any(progress.owner != group.owner for progress in other.jobs):
            return self.miss_s
        return group.saved_s(self.miss_s)

    def drop(self, *bases: int) -> list[int]:
        """Shards are not there any more; return the groups that have ended with them."""
        for base in bases:
            self._group_of_base.pop(base, None)
        self._bases = sorted(self._group_of_base)
        left = set(self._group_of_base.values())
        ended = [n for n, g in self.groups.items() if n not in left and not g.jobs]
        for number in ended:
            del self.groups[number]
        return ended

    def group_of(self, number: int) -> int:
        """Return the group of a sample, 0 for none."""
        row = bisect_right(self._bases, number)
        return self._group_of_base[self._bases[row - 1]] if row else 0

    @property
    def jobs(self) -> list[JobProgress]:
        """Return the progress of every job through each of its datasets."""
        return list(self._jobs.values())

    # ---- announced orders -----------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether there may be a job with an order."""
        return bool(self._announced)

    @property
    def announced_jobs(self) -> list[JobProgress]:
        """Return the progress of every job with an order."""
        if not all(progress.orders for progress in self._announced):
            self._announced = {each: None for each in self._announced if each.orders}
        return list(self._announced)

    @property
    def order_size(self) -> int:
        """Bytes that all orders take, including those still being received."""
        size = sum(progress.size for progress in self.announced_jobs)
        return size + sum(arriving.size for arriving in self._arriving)

    def announced_by(self, user: int) -> tuple[int, int]:
        """Return the bytes of a user's orders, and in how many data sets they are."""
        mine = [progress for progress in self.announced_jobs if progress.user == user]
        arriving = [each for each in self._arriving if each.user == user]
        size = sum(each.size for each in mine) + sum(each.size for each in arriving)
        return size, len(mine) + len(arriving)

    def arriving(
        self, progress: JobProgress, count: int, *, replacement: bool, user: int = 0
    ) -> Arriving:
        """Begin to receive an order of a user.

        Raises: UsageError when no order of this length is valid, or all orders together, including
            those still being received, would be too large.
        """
        arriving = Arriving(
            count,
            sample_count=progress.sample_count,
            low=progress.low,
            span=progress.span,
            replacement=replacement,
            user=user,
        )
        size = self.order_size + arriving.size
        if size > self.most_size:
            raise UsageError(
                f"all announced orders together would take {size} bytes",
                hint=(
                    f"the daemon keeps {self.most_size} bytes of orders; jobs that draw their "
                    "order with the same seed share it"
                ),
            )
        self._arriving.add(arriving)
        return arriving

    def announced(
        self,
        progress: JobProgress,
        epoch: int,
        order: AnnouncedOrder,
        name: str | None,
        announcer: object,
        now: float,
    ) -> None:
        """As `announcing`, in one step."""
        done(self.announcing(progress, epoch, order, name, announcer, now))

    def announcing(
        self,
        progress: JobProgress,
        epoch: int,
        order: AnnouncedOrder,
        name: str | None,
        announcer: object,
        now: float,
        user: int = 0,
    ) -> Steps[None]:
        """Add a complete order; one that equals another job's is held once."""
        for other in self.announced_jobs:
            for known in tuple(other.orders.values()):
                if (yield from known.same(order)):
                    order.share(known)
                    break
        before, after = progress.orders.get(epoch - 1), progress.orders.get(epoch + 1)
        if before is not None:
            yield from before.compare(order)
        if after is not None:
            yield from order.compare(after)
        progress.announced(epoch, order, name, announcer, now, user)
        if progress.sessions:
            self._announced[progress] = None
