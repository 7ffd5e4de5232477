"""Job table: the training runs that the daemon knows, their counters and where their time goes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ffserve import protocol
from ffserve.cache.cache import Cache
from ffserve.cache.jobs import JobProgress
from ffserve.errors import ProtocolError
from ffserve.limits import MOST_KEPT_JOBS, MOST_NAME
from ffserve.server.reading.engines import Engines
from ffserve.server.reading.scheduler import Scheduler
from ffserve.server.reading.statistics import Rates, Statistics
from ffserve.server.reading.waiting import JobReads, JobTime, Use
from ffserve.server.users.peers import Peer, Viewer

JOB_COUNTERS, COUNTERS = 4, 7
"""The numbers of counters that have rates: `JobTable.counters_of`, `JobTable.counters`."""
RIVAL_SHARE = 16
"""A job whose data take less than 1 part in RIVAL_SHARE of the arena is no rival for memory."""


@dataclass(slots=True)
class Job:
    """A training run: the counters of all its sessions since it was first seen."""

    name: str
    first_seen: float
    last_seen: float
    user: Viewer
    sessions: int = 0
    hits: int = 0
    hit_size: int = 0
    missed: int = 0
    errors: int = 0
    waited_s: float = 0.0
    """Time between requests and their answers, summed over its sessions."""
    time: JobTime = field(default_factory=JobTime)
    key: str = field(init=False)
    """Name and user: two users may have jobs of one name, and neither learns of the other's. The
    other parts of the daemon know jobs by their keys."""
    pid: int = 0
    paths: str = ""
    title: str = ""
    """The name that it gave itself."""
    command: str = ""
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.rates = Rates(self.first_seen, JOB_COUNTERS)
        self.key = f"{self.name}\n{self.user}"

    @classmethod
    def greeted(cls, about: dict[str, Any], user: Viewer, now: float) -> Job:
        """Return the job of a HELLO. Raises: ProtocolError."""
        name = about.get("job")
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
            raise ProtocolError("invalid HELLO message: the name of the job is missing or too long")
        job = cls(name, now, now, user)
        for key, most in (("title", protocol.MOST_TITLE), ("command", protocol.MOST_COMMAND)):
            text = about.get(key, "")
            if not isinstance(text, str) or len(text) > most:
                raise ProtocolError(
                    f"invalid HELLO message: {key} is not a text of at most {most} characters"
                )
            setattr(job, key, text)
        return job


class JobTable:
    """See the module's text. Args: now: monotonic time, at which all counters are 0."""

    def __init__(
        self,
        cache: Cache,
        scheduler: Scheduler,
        engines: Engines,
        statistics: Statistics,
        now: float,
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._engines = engines
        self._statistics = statistics
        self.all: OrderedDict[str, Job] = OrderedDict()
        """All known jobs, by key."""
        self._names: Counter[str] = Counter()
        self.rates = Rates(now, COUNTERS)
        """The rates of all jobs together."""

    def obtain(self, name: str, now: float, user: Viewer) -> Job:
        """Return a user's job of this name; create it if it is new."""
        return self._entered(Job(name, now, now, user))

    def name_of(self, key: str, viewer: Viewer | None) -> str:
        """Return the name of a job for a viewer. One who sees everything is told whose it is, if
        jobs of several users have the name."""
        name, _, user = key.rpartition("\n")
        return f"{name} ({user})" if viewer is None and self._names[name] > 1 else name

    def _entered(self, new: Job) -> Job:
        job = self.all.setdefault(new.key, new)
        if job is new:
            self._names[new.name] += 1
            for old in [j for j in self.all.values() if not j.sessions and j is not job]:
                if len(self.all) <= MOST_KEPT_JOBS:
                    break
                del self.all[old.key]
                self._names[old.name] -= 1
                if not self._names[old.name]:
                    del self._names[old.name]
        return job

    def join(self, greeted: Job, peer: Peer, now: float) -> Job:
        """Return the job to which another session belongs from now on.

        Args: greeted: as its HELLO said.
        """
        job = self.obtain(greeted.name, now, greeted.user)
        job.sessions += 1
        job.pid = job.pid or peer.pid
        job.title, job.command = job.title or greeted.title, job.command or greeted.command
        return job

    def counters_of(self, job: Job) -> tuple[int, ...]:
        """Return the counters of a job that have rates: hits, misses, bytes of both."""
        reads = self._scheduler.reads_of.get(job.key)
        return job.hits, job.missed, job.hit_size, 0 if reads is None else reads.size

    def counters(self) -> tuple[int, ...]:
        """Return the counters of all jobs: hits, misses, bytes of hits and of reads, reads, evicted
        samples, errors."""
        statistics, cache = self._statistics, self._cache.counters
        sizes = statistics.hit_size, self._engines.read_size
        failed = statistics.errors.total()
        return (
            *(statistics.hits, statistics.missed, *sizes),
            *(cache.blocks_read, cache.evicted, failed),
        )

    def measure(self, now: float) -> Iterator[None]:
        """Compute where the time of jobs goes and what their rates are, in steps."""
        self.rates.note(now, self.counters())
        data_sets: defaultdict[str, list[JobProgress]] = defaultdict(list)
        memory = []
        for progress in self._cache.next_use.jobs:
            data_sets[progress.job].append(progress)
            used_size = self._cache.policy.used.get(progress.group, 0)
            memory.append((used_size, progress.job, progress.group))
        memory = [row for row in memory if row[0] >= self._cache.arena.size // RIVAL_SHARE]
        memory.sort(reverse=True)
        yield None
        for job in list(self.all.values()):
            job.rates.note(now, self.counters_of(job))
            if not job.time.idle:
                reads = self._scheduler.reads_of.get(job.key) or JobReads()
                job.time.step(now, reads, self._use_of(job, data_sets[job.key], memory, now))
            yield None

    def _use_of(
        self, job: Job, data_sets: list[JobProgress], memory: list[tuple[int, str, int]], now: float
    ) -> Use:
        """Args: memory: bytes, job and group of jobs that may be rivals, the largest first."""
        payload_size = sum(each.payload_size for each in data_sets)
        count = sum(each.sample_count for each in data_sets)
        window = sum(self._scheduler.prefetcher.window(each, now) for each in data_sets)
        used_size = (job.hits + job.missed + window) * payload_size // max(count, 1)
        groups = {each.group for each in data_sets}
        others = [row for row in memory if row[1] != job.key]
        # Jobs of one group share their samples; any other job takes all the memory that it has.
        rival = min(others, key=lambda row: row[2] in groups, default=None)
        fits = min(self._cache.arena.size / max(payload_size, 1), 1.0)
        return Use(used_size, payload_size, fits, None if rival is None else rival[1])
