"""Simulation: the cache and its policy, the code of the daemon, with a virtual clock and disk.

It tells the effect of a larger cache, another job, or a shared seed. All samples have the same size
and no content. `belady` computes the hit rate of Belady's rule (evict the sample used again last,
with the whole future known) independently: no policy reads less.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.arena import SMALLEST_SLOT, Arena
from ffserve.cache.cache import Cache, Fetch
from ffserve.cache.jobs import JobProgress
from ffserve.cache.next_use import NextUse
from ffserve.cache.orders import PIECE
from ffserve.cache.tables import Directory, ShardTable

Int64s = NDArray[np.int64]


@dataclass
class Job:
    """One training run.

    Args:
        orders: epoch → the sample indices it visits, in order.
        pace: samples per second, when it does not wait for the disk.
        start_s: the time at which it begins.
        announces: whether it announces its orders.
        replacement: its orders repeat samples.
        batch: samples per request.
    """

    orders: Callable[[int], Int64s]
    pace: float = 1000.0
    start_s: float = 0.0
    announces: bool = True
    replacement: bool = False
    batch: int = 64
    name: str = ""
    epoch: int = 0
    position: int = 0
    used: int = 0
    hits: int = 0
    waited_s: float = 0.0
    order: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))


def shuffled(samples: int, seed: int) -> Callable[[int], Int64s]:
    """Visit every sample once per epoch."""
    return lambda epoch: np.random.default_rng([seed, epoch]).permutation(samples)


def ranks_of(samples: int, rank: int, world_size: int, seed: int) -> Callable[[int], Int64s]:
    """Visit one rank's part of every epoch, reshuffled."""
    every = shuffled(samples, seed)
    return lambda epoch: every(epoch)[rank::world_size]


def weighted(samples: int, seed: int) -> Callable[[int], Int64s]:
    """Draw with replacement, some samples eight times as often as others."""

    def order(epoch: int) -> Int64s:
        weights = np.exp2(np.arange(samples) * 3.0 / samples)
        chance = np.random.default_rng([seed, epoch])
        return chance.choice(samples, samples, p=weights / weights.sum())

    return order


@dataclass
class Result:
    """The measurements after the warm-up."""

    slots: int
    used: int
    hits: int
    jobs: list[Job]
    trace: Int64s
    measured_from: int
    """Index in the trace."""

    @property
    def hit_rate(self) -> float:
        """Return the share of samples found in memory."""
        return self.hits / max(self.used, 1)


class Simulation:
    """A node with a real cache and policy; clients, clock and disk are simulated.

    Args:
        samples: of the dataset. cache_share: the share of it that fits into memory.
        disk_rate: samples per second that the disk can read; None: no limit.
        check: called after every batch.
    """

    def __init__(
        self,
        samples: int,
        cache_share: float,
        jobs: list[Job],
        *,
        disk_rate: float | None = None,
        check: Callable[[Simulation], None] | None = None,
    ) -> None:
        self.samples = samples
        self.jobs = jobs
        self._disk_rate = disk_rate
        self._disk_free = 0.0
        self._check = check
        self.next_use = NextUse()
        size = int(samples * cache_share) * SMALLEST_SLOT
        # Rounded to the nearest number of slabs: else 75 % of 60,000 samples would be 74.7.
        slab_size = Arena(size).slab_size
        self.arena = Arena(round(size / slab_size) * slab_size)
        self.directory = Directory(1 << max(22, (samples - 1).bit_length()))
        self.table = ShardTable(self.directory)
        self.cache = Cache(self.arena, self.directory, self.table, _no_readers, self.next_use)
        self._base = self.directory.reserve(samples)
        self.directory.offsets[self._base : self._base + samples] = (
            np.arange(samples, dtype=np.uint64) * SMALLEST_SLOT
        )
        self.directory.set_lengths(self._base, np.full(samples, SMALLEST_SLOT, np.uint64))
        self.table.add(
            self._base,
            samples,
            payload_size=samples * SMALLEST_SLOT,
            alignment=1,
            checksum_kind=0,
            file=0,
            engine=0,
        )
        self.table.sessions[:] = len(jobs)
        self._progress: list[JobProgress] = []
        self._trace: list[Int64s] = []

    @property
    def slots(self) -> int:
        """Samples that fit into memory."""
        return self.arena.size // SMALLEST_SLOT

    def run(self, *, warm_s: float, seconds: float) -> Result:
        """Run the jobs until `warm_s`, reset the counts, and run for `seconds` more."""
        turns = [(job.start_s, k) for k, job in enumerate(self.jobs)]
        bases, counts = np.array([self._base]), np.array([self.samples])
        for k, job in enumerate(self.jobs):
            job.name = job.name or f"job {k}"
            self._progress.append(self.next_use.join(job.name, bases, counts))
        heapq.heapify(turns)
        measured_from = -1
        while turns[0][0] < warm_s + seconds:
            now, k = heapq.heappop(turns)
            if now >= warm_s and measured_from < 0:
                measured_from = sum(map(len, self._trace))
                for job in self.jobs:
                    job.used = job.hits = 0
                    job.waited_s = 0.0
            heapq.heappush(turns, (self._step(self.jobs[k], self._progress[k], now), k))
            if self._check is not None:
                self._check(self)
        return Result(
            self.slots,
            sum(job.used for job in self.jobs),
            sum(job.hits for job in self.jobs),
            self.jobs,
            np.concatenate(self._trace),
            measured_from,
        )

    def _step(self, job: Job, progress: JobProgress, now: float) -> float:
        """Let a job use its next batch; return the time of its next request."""
        self.next_use.now = now
        if job.position == len(job.order):
            job.epoch += bool(len(job.order))
            job.position = 0
            job.order = job.orders(job.epoch)
            if job.announces:
                if job.epoch == 0:
                    self._announce(job, progress, 0, job.order)
                self._announce(job, progress, job.epoch + 1, job.orders(job.epoch + 1))
        numbers = job.order[job.position : job.position + job.batch] + self._base
        self._trace.append(numbers)
        missing = numbers[self.directory.slot_of[numbers] == 0]
        if len(missing):
            self.cache.invalidate(progress.asked(missing, now))
            self._read(np.unique(missing) if job.replacement else missing)
        if not progress.orders and len(missing) < len(numbers):
            hits = numbers[~np.isin(numbers, missing)]
            progress.visited(hits, now)
            self.cache.invalidate(hits)
        job.position += len(numbers)
        job.used += len(numbers)
        job.hits += len(numbers) - len(missing)
        if progress.orders:
            self.cache.invalidate(progress.advance_to(job.epoch, job.position, now))
        ready = now + len(numbers) / job.pace
        if self._disk_rate is None or not len(missing):
            return ready
        self._disk_free = max(self._disk_free, now) + len(missing) / self._disk_rate
        job.waited_s += max(self._disk_free - ready, 0.0)
        return max(ready, self._disk_free)

    def _announce(self, job: Job, progress: JobProgress, epoch: int, order: Int64s) -> None:
        arriving = self.next_use.arriving(progress, len(order), replacement=job.replacement)
        for start in range(0, len(order), PIECE):
            arriving.add(order[start : start + PIECE] + self._base)
        self.next_use.announced(progress, epoch, arriving.finish(), None, job)

    def _read(self, missing: Int64s) -> None:
        fetch = Fetch(missing)
        while fetch.cursor < len(missing):
            load = self.cache.advance(fetch, len(missing), self.arena.size)
            assert load is not None, "no slot is pinned, so there is one to evict"
            self.cache.loaded(load, {})
            self.cache.release(fetch.pins)
            fetch.pins = []

    def close(self) -> None:
        """Free the tables."""
        self.directory.close()


def _no_readers(firsts: Int64s, counts: Int64s, slots: Int64s, sizes: Int64s) -> None:
    """Do nothing: there are no readers."""


def belady(trace: Int64s, slots: int, measured_from: int = 0) -> float:
    """Return the hit rate of the best cache there can be, which knows the whole trace.

    Args: trace: samples in order of use. slots: how many fit. measured_from: index in the trace.
    """
    order = np.argsort(trace, kind="stable")
    following = np.full(len(trace), len(trace))
    again = trace[order[1:]] == trace[order[:-1]]
    following[order[:-1][again]] = order[1:][again]
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for position, (sample, later) in enumerate(
        zip(trace.tolist(), following.tolist(), strict=True)
    ):
        if sample in held:
            hits += position >= measured_from
        elif later == len(trace):
            continue
        elif len(held) >= slots:
            while held.get(farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)
            if -farthest[0][0] <= later:
                continue
            del held[heapq.heappop(farthest)[1]]
        held[sample] = later
        heapq.heappush(farthest, (-later, sample))
    return hits / max(len(trace) - measured_from, 1)
