"""Overview: what `ffserve status`, `ffserve top` and the status page show, made of one REPORT.

A REPORT has one list per subject. Here the facts about one job come together: its counters, its
rates, its position in the epoch, its memory and why it waits. Texts that clients chose are made
`printable`; how they are escaped further is a matter of the screen.

No I/O and no clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ffserve.errors import ProtocolError, printable

Facts: TypeAlias = Mapping[str, Any]

AT_WORK_S = 10.0
"""A job that was not seen for this long is shown as idle."""
LABEL_LENGTH = 12
"""A job without a title is shown by this many characters of its number."""
MOST_LABEL = 64
"""A label has at most this many characters; escapes make a title longer."""
NEARLY = 0.9
"""A limit of which this share is used is shown as nearly reached."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job.

    label: its title, else the beginning of its number. user: uid. samples, hit_rate, errors,
    read_size: since it was first seen; hit_rate None: no sample yet. per_s, hit_rate_now,
    read_per_s: lately. order: the name of its order, else what is known of it
    (`report.kind_of`). done: share of the epoch, 0 to 1. ends_s: time to its end. memory: bytes of
    the arena that are kept for it, with the jobs that share them. waits: shares of its time lately,
    by cause. taken_by: the label of the job that took memory from it.
    """

    number: str
    label: str
    title: str
    user: int
    pid: int | None
    command: str
    data: str
    sessions: int
    idle_s: float
    samples: int
    hit_rate: float | None
    errors: int
    read_size: int
    alone_size: int
    per_s: float
    hit_rate_now: float | None
    read_per_s: float
    order: str
    epoch: int | None
    done: float | None
    ends_s: float | None
    memory: int
    waits: dict[str, float]
    taken_by: str | None

    @property
    def has_ended(self) -> bool:
        """Whether it has no session any more."""
        return not self.sessions

    @property
    def at_work(self) -> bool:
        """Whether it was seen lately."""
        return self.idle_s < AT_WORK_S

    @property
    def waited(self) -> float:
        """The share of its time that it waited lately."""
        return sum(self.waits.values())

    @property
    def cause(self) -> str | None:
        """Why it waited most of that; None: it did not."""
        cause = max(self.waits, key=self.waits.__getitem__, default=None)
        return cause if cause is not None and self.waits[cause] > 0 else None


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory of jobs that share their data; see `report.group_facts`. jobs: their labels."""

    jobs: list[str]
    used: int
    floor: int
    rule: str


@dataclass(frozen=True, slots=True)
class FileRow:
    """One shard. cached: share of it that is in memory, 0 to 1; None of prepared samples, of which
    it is not known. damaged: samples found damaged."""

    path: str
    count: int
    size: int
    used: int
    cached: float | None
    sessions: int
    damaged: int


@dataclass(frozen=True, slots=True)
class SlowRow:
    """One file with slow reads: how many, the longest, and the time since the last."""

    path: str
    reads: int
    longest_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class LineRow:
    """A warning or an error in the log. time: in seconds since 1970."""

    time: float
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class PreparationRow:
    """Samples that a preparation made; see `report.preparation_facts`."""

    name: str
    prepared: int
    found: int
    each_s: float
    saved_s: float
    shared: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """The daemon as a whole. Sizes in bytes; what ends in `_s` per second, lately."""

    version: str
    uptime_s: float
    engine: str
    arena_size: int
    arena_target: int
    arena_used: int
    arena_held: int
    arena_leased: int
    evicted: int
    evicted_per_s: float
    samples: int
    hit_rate: float | None
    per_s: float
    hit_size_per_s: float
    hit_rate_now: float | None
    read_size: int
    read_per_s: float
    reads: int
    reads_per_s: float
    in_flight: int
    queued: int
    sessions: int
    most_sessions: int
    requests: int
    blocked: int
    errors: int
    errors_per_s: float
    failed: int
    checksum_failures: int
    corrected: int
    refused: int
    cut_off: int

    @property
    def sessions_short(self) -> bool:
        """Whether few more sessions can be had."""
        return 0 < NEARLY * self.most_sessions <= self.sessions


@dataclass(frozen=True, slots=True)
class Overview:
    """See the module's text. jobs: those at work first, the fastest first; those that have ended
    last, the latest first. memory, files: the largest first. slow, lines: the latest first."""

    totals: Totals
    jobs: list[JobRow]
    memory: list[MemoryRow]
    files: list[FileRow]
    slow: list[SlowRow]
    lines: list[LineRow]
    preparations: list[PreparationRow]


def overview(facts: Facts) -> Overview:
    """Return what is shown of a REPORT.

    Raises: ProtocolError: it is of a release other than this and the last one.
    """
    try:
        return _overview(_filled(facts))
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(
            f"this release cannot show the report of a daemon of another release: {error!r}",
            hint="install the same release of ffserve as the daemon's, or use --json",
        ) from error


def _filled(facts: Facts) -> dict[str, Any]:
    """Return a report with what a daemon of the last release does not tell."""
    jobs = [{**_UNKNOWN, **job} for job in facts["jobs"]]
    totals = {
        key: sum(job[key] for job in jobs) for key in ("hits", "hit_size", "missed", "errors")
    }
    clients = dict.fromkeys(("most_sessions", "requests", "refused", "cut_off"), 0)
    clients["sessions"] = sum(job["sessions"] for job in jobs)
    lists: dict[str, Any] = {"slow_files": [], "lines": [], "preparations": []}
    return {
        "samples": totals,
        "clients": clients,
        "rates": _NO_RATES,
        **lists,
        **facts,
        "jobs": jobs,
    }


_NO_RATES = dict.fromkeys(
    ("hits", "missed", "hit_size", "read_size", "reads", "evicted", "errors"), 0.0
)
_UNKNOWN = {"title": "", "user": -1, "command": "", "rates": _NO_RATES}


def _overview(facts: Facts) -> Overview:
    labels = {job["name"]: _label(job) for job in facts["jobs"]}
    memory: defaultdict[str, int] = defaultdict(int)
    for group in facts["groups"]:
        for name in group["jobs"]:
            memory[name] += group["used"]
    progress: dict[str, Facts] = {}
    for row in facts["progress"]:
        known = progress.get(row["job"])
        if known is None or (row["count"] or 0) > (known["count"] or 0):
            progress[row["job"]] = row
    jobs = [
        _job(job, progress.get(job["name"]), memory[job["name"]], labels) for job in facts["jobs"]
    ]
    return Overview(
        totals=_totals(facts),
        jobs=sorted(jobs, key=_place),
        memory=[
            MemoryRow(
                [labels.get(name, printable(name[:LABEL_LENGTH])) for name in group["jobs"]],
                group["used"],
                group["floor"],
                group["rule"],
            )
            for group in facts["groups"]
            if group["used"]
        ],
        files=sorted(map(_file, facts["shards"]), key=lambda file: -file.used),
        slow=[
            SlowRow(printable(row["path"]), row["reads"], row["longest_s"], row["last_s"])
            for row in facts["slow_files"]
        ],
        lines=[
            LineRow(row["time"], row["level"], printable(row["text"]))
            for row in reversed(facts["lines"])
        ],
        preparations=[
            PreparationRow(
                printable(each["name"]),
                each["prepared"],
                each["found"],
                each["cost_s"] / max(each["prepared"], 1),
                each["saved_s"],
                each["shared"],
            )
            for each in facts["preparations"]
        ],
    )


def _place(job: JobRow) -> tuple[bool, float, bool, float, str]:
    """Return the key by which jobs are sorted; see `Overview`."""
    ended_s = job.idle_s if job.has_ended else 0.0
    return job.has_ended, ended_s, not job.at_work, -job.per_s, job.label


def _label(job: Facts) -> str:
    return printable(job["title"] or job["name"][:LABEL_LENGTH])[:MOST_LABEL]


def _job(job: Facts, progress: Facts | None, memory: int, labels: Mapping[str, str]) -> JobRow:
    rates, samples = job["rates"], job["hits"] + job["missed"]
    per_s = rates["hits"] + rates["missed"]
    order, epoch, done, ends_s = "", None, None, None
    if progress is not None:
        order, ends_s = progress["name"] or progress["kind"], progress["epoch_end_s"]
        if progress["announced"]:
            epoch = progress["epoch"]
        if progress["count"]:
            done = min(progress["position"] / progress["count"], 1.0)
    rival = job["taken_by"]
    return JobRow(
        number=job["name"],
        label=labels[job["name"]],
        title=printable(job["title"]),
        user=job["user"],
        pid=job["pid"],
        command=printable(job["command"]),
        data=printable(job["paths"]),
        sessions=job["sessions"],
        idle_s=job["idle_s"],
        samples=samples,
        hit_rate=job["hits"] / samples if samples else None,
        errors=job["errors"],
        read_size=job["read_size"],
        alone_size=job["alone_size"],
        per_s=per_s,
        hit_rate_now=rates["hits"] / per_s if per_s else None,
        read_per_s=rates["read_size"],
        order=printable(order),
        epoch=epoch,
        done=done,
        ends_s=ends_s,
        memory=memory,
        waits={cause: share for cause, share in job["recent"].items() if cause != "trainer"},
        taken_by=None if rival is None else labels.get(rival, printable(rival[:LABEL_LENGTH])),
    )


def _file(shard: Facts) -> FileRow:
    # Slots of small samples are larger than the samples.
    size, used = shard["payload_size"], shard["cached_size"]
    cached: float | None = min(used / size, 1.0) if size else 0.0
    if shard["format"] == "prepared":  # what is not in memory has no size yet
        size, cached = used, None
    path = printable(shard["path"])
    sessions, damaged = shard["sessions"], shard.get("damaged", 0)
    return FileRow(path, shard["count"], size, used, cached, sessions, damaged)


def _totals(facts: Facts) -> Totals:
    arena, cache, clients, engine, rates, samples = (
        facts[key] for key in ("arena", "cache", "clients", "engine", "rates", "samples")
    )
    count, per_s = samples["hits"] + samples["missed"], rates["hits"] + rates["missed"]
    return Totals(
        version=facts["version"],
        uptime_s=facts["uptime_s"],
        engine=engine["kind"],
        arena_size=arena["size"],
        arena_target=arena["target"],
        arena_used=arena["used"],
        arena_held=arena["held"],
        arena_leased=arena["leased"],
        evicted=cache["evicted"],
        evicted_per_s=rates["evicted"],
        samples=count,
        hit_rate=samples["hits"] / count if count else None,
        per_s=per_s,
        hit_size_per_s=rates["hit_size"],
        hit_rate_now=rates["hits"] / per_s if per_s else None,
        read_size=cache["read_size"],
        read_per_s=rates["read_size"],
        reads=cache["blocks_read"],
        reads_per_s=rates["reads"],
        in_flight=engine["inflight"],
        queued=engine["queued"],
        sessions=clients["sessions"],
        most_sessions=clients["most_sessions"],
        requests=clients["requests"],
        blocked=cache["blocked"],
        errors=samples["errors"],
        errors_per_s=rates["errors"],
        failed=cache["failed"],
        checksum_failures=cache["checksum_failures"],
        corrected=cache.get("corrected", 0),
        refused=clients["refused"],
        cut_off=clients["cut_off"],
    )
