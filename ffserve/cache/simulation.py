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

from ffserve.cache.arena import Arena
from ffserve.cache.cache import Cache, Fetch, Load
from ffserve.cache.jobs import JobProgress
from ffserve.cache.next_use import NextUse
from ffserve.cache.orders import PIECE
from ffserve.cache.prefetch import Piece, Prefetcher
from ffserve.cache.tables import SMALL_RECORD_SIZE, Directory, ShardTable
from ffserve.dtypes import Bools, Int64s
from ffserve.engine.slots import RESIDENT

REPORT_INTERVAL_S, SLOW_READS_S = 0.01, 0.005
"""A reader reports its position after this long, and earlier if a read was slow; see
ffserve/reader.py."""
SAMPLE_SIZE = 4096
"""Bytes of a sample whose size does not matter: no part of a slot or slab is unused."""
HEAD_SIZE = 12
"""Bytes of the file before the first sample."""


@dataclass
class SimulatedJob:
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
    reads: int = 0
    prepared: int = 0
    """Samples that it has prepared itself."""
    waited_s: float = 0.0
    asked_s: float = 0.0
    reported_s: float = 0.0
    order: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))


def shuffled(samples: int, seed: int) -> Callable[[int], Int64s]:
    """Visit every sample once per epoch."""
    return lambda epoch: np.random.default_rng([seed, epoch]).permutation(samples)


@dataclass
class SimulationResult:
    """The measurements after the warm-up."""

    slots: int
    used: int
    reads: int
    jobs: list[SimulatedJob]
    trace: Int64s
    measured_from: int
    """Index in the trace."""
    prepared: int = 0

    @property
    def shared_rate(self) -> float:
        """Return the share of used samples that nobody had to prepare."""
        return 1 - self.prepared / max(self.used, 1)

    @property
    def hit_rate(self) -> float:
        """Return the share of used samples for which nothing was read."""
        return 1 - self.reads / max(self.used, 1)


class Simulation:
    """A node with a real cache, policy and prefetcher; clients, clock and disk are simulated.

    Args:
        samples: of the dataset. cache_share: memory / data, in bytes.
        sample_size: bytes. alignment: of reads; a slot of a large sample holds what is read.
        disk_rate: samples per second that the disk can read; None: no limit.
        prepared_size, prepare_s: bytes of a prepared sample, and how long preparing it takes;
            None: nothing is prepared. cache_share is memory / prepared samples then.
        check: called after every batch.
    """

    def __init__(
        self,
        samples: int,
        cache_share: float,
        jobs: list[SimulatedJob],
        *,
        sample_size: int = SAMPLE_SIZE,
        alignment: int = 1,
        disk_rate: float | None = None,
        prepared_size: int | None = None,
        prepare_s: float = 0.0,
        check: Callable[[Simulation], None] | None = None,
    ) -> None:
        self.samples = samples
        self.jobs = jobs
        self._sample_size = sample_size
        self._disk_rate = disk_rate
        self._disk_free = 0.0
        self._check = check
        self.next_use = NextUse()
        self._prepared_size, self._prepare_s = prepared_size, prepare_s
        kept_size = prepared_size or sample_size
        size = int(samples * cache_share) * kept_size
        # Rounded to the nearest number of slabs: else 75 % of 60,000 samples would be 74.7.
        slab_size = Arena(size).slab_size
        self.arena = Arena(round(size / slab_size) * slab_size)
        self.directory = Directory(1 << max(22, (2 * samples - 1).bit_length()))
        self.table = ShardTable(self.directory)
        self.cache = Cache(self.arena, self.directory, self.table, _no_readers, self.next_use)
        self.prefetcher = Prefetcher(self.cache)
        self._base = self._add_shard(sample_size, alignment)
        self._prepared_base = -1
        if prepared_size is not None:
            self._prepared_base = self._add_shard(max(prepared_size, SMALL_RECORD_SIZE), 1)
            if disk_rate is not None:
                self.next_use.miss_s = 1 / disk_rate / sample_size
        self.table.sessions[:] = len(jobs)
        self._progress: list[JobProgress] = []
        self._raw_progress: list[JobProgress] = []
        """With preparation; `_progress` is that of the prepared samples then."""
        self._trace: list[Int64s] = []
        self._events: list[tuple[float, int, SimulatedJob | Load]] = []
        """When a job asks for its next batch, or a load ends; with a number that tells which comes
        first of two at the same time."""
        self._event_count = 0

    def _add_shard(self, size: int, alignment: int) -> int:
        """Add a shard of samples of one size; return its first number."""
        base = self.directory.reserve(self.samples)
        places = HEAD_SIZE + np.arange(self.samples, dtype=np.uint64) * np.uint64(size)
        self.directory.offsets[base : base + self.samples] = places
        self.directory.set_lengths(base, np.full(self.samples, size, np.uint64))
        self.table.add(
            base,
            self.samples,
            payload_size=self.samples * size,
            alignment=alignment,
            checksum_kind=0,
            file=0,
            engine=0,
        )
        self.cache.fit([base])
        return base

    @property
    def slots(self) -> int:
        """Samples that the bytes of the memory are enough for."""
        return self.arena.size // (self._prepared_size or self._sample_size)

    def run(self, *, warm_s: float, seconds: float) -> SimulationResult:
        """Run the jobs until `warm_s`, reset the counts, and run for `seconds` more."""
        for k, job in enumerate(self.jobs):
            job.name = job.name or f"job {k}"
            self._join(job)
            self._at(job.start_s, job)
        measured_from = -1
        while self._events[0][0] < warm_s + seconds:
            now, _, what = heapq.heappop(self._events)
            self.next_use.turn_at = now
            if now >= warm_s and measured_from < 0:
                measured_from = sum(map(len, self._trace))
                for job in self.jobs:
                    job.used = job.reads = job.prepared = 0
                    job.waited_s = 0.0
            if isinstance(what, Load):
                self._ended(what)
            else:
                self._at(self._step(what, self._progress[self.jobs.index(what)], now), what)
            self._prefetch(now)
            if self._check is not None:
                self._check(self)
        return SimulationResult(
            self.slots,
            sum(job.used for job in self.jobs),
            sum(job.reads for job in self.jobs),
            self.jobs,
            np.concatenate(self._trace),
            measured_from,
            sum(job.prepared for job in self.jobs),
        )

    def _join(self, job: SimulatedJob) -> None:
        raw = self.next_use.join(job.name, np.array([self._base]), np.array([self.samples]))
        if self._prepared_size is None:
            self._progress.append(raw)
            return
        size, raw_size = self._prepared_size, self._sample_size
        bases, counts = np.array([self._prepared_base]), np.array([self.samples])
        progress = self.next_use.join(job.name, bases, counts)
        progress.on_demand = True
        raw.feeds += 1
        self.next_use.groups[progress.group].saved_s = lambda miss_s: (
            (self._prepare_s + raw_size * miss_s) / size
        )
        self._progress.append(progress)
        self._raw_progress.append(raw)

    def _at(self, time_s: float, what: SimulatedJob | Load) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (time_s, self._event_count, what))

    def _step(self, job: SimulatedJob, progress: JobProgress, now: float) -> float:
        """Let a job use its next batch; return the time of its next request."""
        if job.position == len(job.order):
            job.epoch += bool(len(job.order))
            job.position = 0
            job.order = job.orders(job.epoch)
            if job.announces:
                if job.epoch == 0:
                    self._announce(job, progress, 0, job.order)
                self._announce(job, progress, job.epoch + 1, job.orders(job.epoch + 1))
        numbers = job.order[job.position : job.position + job.batch] + self._first
        self._trace.append(numbers)
        absent = self._absent(numbers)
        missing, there, worked_s = numbers[absent], now, 0.0
        if len(missing) and self._prepared_size is not None:
            worked_s = self._prepare(np.unique(missing), job, now)
            self.cache.invalidate(progress.asked(missing, now))
        elif len(missing):
            there = self._ask(np.unique(missing) if job.replacement else missing, job, now)
            self.cache.used(missing)
            self.cache.invalidate(progress.asked(missing, now))
        if not progress.orders and len(missing) < len(numbers):
            progress.visited(numbers[~absent], now)
            self.cache.invalidate(numbers[~absent])
        job.position += len(numbers)
        job.used += len(numbers)
        over = job.position == len(job.order)
        since, job.asked_s = now - job.asked_s, now
        due = since >= SLOW_READS_S or now - job.reported_s >= REPORT_INTERVAL_S
        if progress.orders and (over or due):
            job.reported_s = now
            self.cache.invalidate(progress.advance_to(job.epoch, job.position, now))
            self.prefetcher.advanced(progress)
        ready = now + len(numbers) / job.pace
        job.waited_s += max(there - ready, 0.0)
        return max(ready, there) + worked_s

    @property
    def _first(self) -> int:
        """The number of the first of the samples that jobs use."""
        return self._base if self._prepared_size is None else self._prepared_base

    def _absent(self, numbers: Int64s) -> Bools:
        slots = self.directory.slot_of[numbers] - 1
        absent: Bools = (slots < 0) | (self.cache.state[slots] != RESIDENT)
        return absent

    def _prepare(self, missing: Int64s, job: SimulatedJob, now: float) -> float:
        """Let a job prepare samples, and keep them as far as there is room; return how long that
        takes, with reading what of the raw samples is not in memory."""
        raw = missing - self._prepared_base + self._base
        wanted = raw[self._absent(raw)]
        there = self._ask(wanted, job, now) if len(wanted) else now
        self.cache.invalidate(self._raw_progress[self.jobs.index(job)].asked(raw, now))
        job.prepared += len(missing)
        fetch = Fetch(missing)
        while fetch.cursor < len(missing):
            before = fetch.cursor
            load = self.cache.advance(fetch, len(missing), self.arena.size)
            if load is not None:
                self.cache.loaded(load, {})
            elif fetch.cursor == before:
                break
        self._release(fetch)
        return there - now + len(missing) * self._prepare_s

    def _announce(
        self, job: SimulatedJob, progress: JobProgress, epoch: int, order: Int64s
    ) -> None:
        arriving = self.next_use.arriving(progress, len(order), replacement=job.replacement)
        for start in range(0, len(order), PIECE):
            arriving.add(order[start : start + PIECE] + self._first)
        now = self.next_use.turn_at
        self.next_use.announced(progress, epoch, arriving.finish(), None, job, now)

    def _ask(self, missing: Int64s, job: SimulatedJob, now: float) -> float:
        """Request samples for a job; return the time at which it has them."""
        fetch, there = Fetch(missing), now
        while fetch.cursor < len(missing):
            before = fetch.cursor
            load = self.cache.advance(fetch, len(missing), self.arena.size)
            if load is not None:
                self._begin(load, job, now)
            elif fetch.cursor == before:
                self.prefetcher.make_room()
                there = max(there, self._finish_first())
        for end, _, what in self._events:
            if isinstance(what, Load) and fetch in what.fetches:
                there = max(there, end)
        if not fetch.waiting:
            self._release(fetch)
        return there

    def _finish_first(self) -> float:
        """End the load that ends first, so that its slots can be evicted; return when it ends."""
        loads = [event for event in self._events if isinstance(event[2], Load)]
        if not loads:
            return 0.0
        first = min(loads, key=lambda event: event[:2])
        self._events.remove(first)
        heapq.heapify(self._events)
        assert isinstance(first[2], Load)
        self._ended(first[2])
        return first[0]

    def _prefetch(self, now: float) -> None:
        """Let the prefetcher read while the disk has nothing else to read."""
        while self._disk_free <= now and (found := self.prefetcher.next_load(now)) is not None:
            load, name = found
            self._begin(load, next(job for job in self.jobs if job.name == name), now)

    def _begin(self, load: Load, job: SimulatedJob, now: float) -> None:
        job.reads += len(load.slots)
        if self._disk_rate is None:
            self._ended(load)
            return
        self._disk_free = max(self._disk_free, now) + len(load.slots) / self._disk_rate
        self._at(self._disk_free, load)

    def _ended(self, load: Load) -> None:
        for fetch in self.cache.loaded(load, {}):
            if isinstance(fetch, Piece):
                self.prefetcher.loaded(fetch, self.next_use.turn_at)
            elif fetch.complete:
                self._release(fetch)

    def _release(self, fetch: Fetch) -> None:
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
