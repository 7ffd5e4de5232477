"""Metrics: the state of the daemon, in steps, as OpenMetrics or in the older text format.

prometheus_client writes the text. Names and units follow its conventions: base units (seconds,
bytes), counters that end with `_total`, histograms in seconds. docs/REFERENCE.md explains each; a
test compares. The number of series is bounded, whatever clients do.
"""

from __future__ import annotations

import heapq
import mmap
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import accumulate
from typing import TypeAlias, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest as plain_text
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as open_metrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ffserve._version import __version__
from ffserve.cache.jobs import JobProgress
from ffserve.errors import BY_CODE, printable
from ffserve.limits import MOST_LABEL, MOST_SERIES_DOMAINS, MOST_SERIES_FILES, MOST_SERIES_JOBS
from ffserve.server.files.remote import store_facts
from ffserve.server.reading.statistics import BOUNDS_S, Histogram
from ffserve.server.sessions.job_table import Job
from ffserve.server.sessions.server import Server
from ffserve.server.sessions.state import ServerState
from ffserve.server.status.report import arena_facts, domain_facts, progress_facts

OPEN_METRICS = "application/openmetrics-text"
CONTENT_TYPES: dict[bool, str] = {
    False: CONTENT_TYPE_LATEST,
    True: "text/plain; version=0.0.4; charset=utf-8",
}
"""By whether the text format 0.0.4 of Prometheus is wanted, instead of OpenMetrics."""
_STEP_COUNT, _STEP_JOBS = 64, 1024
"""One step looks at this many positions of jobs, or this many jobs."""
_END = b"# EOF\n"
_LABELS = ("ffserve_job", "number", "user")
"""A label `job` would collide with Prometheus' own, the name of the scrape."""

T = TypeVar("T")
Steps: TypeAlias = Generator["Metric | None", None, T]
"""A generator that yields families, and None between other steps."""


def wants_plain(accept: str) -> bool:
    """Return whether a scraper wants the text format 0.0.4, by its header `Accept`: OpenMetrics is
    for those that accept it at least as much."""
    shares = {}
    for part in accept.split(","):
        kind, *parameters = (word.strip().lower() for word in part.split(";"))
        weights = [word[2:] for word in parameters if word.startswith("q=")]
        try:
            shares[kind] = float(weights[0]) if weights else 1.0
        except ValueError:
            shares[kind] = 0.0
    other = shares.get("*/*", 0.0)
    plain = shares.get("text/plain", shares.get("text/*", other))
    return plain > shares.get(OPEN_METRICS, shares.get("application/*", other))


def render(server: Server, *, jobs: bool, plain: bool, now: float) -> Generator[None, None, bytes]:
    """Return the metrics as text, in steps.

    Args: jobs: whether names of jobs and numbers of users are shown. plain: see CONTENT_TYPES.
    """
    parts: list[bytes] = []
    for family in _families(server, jobs, now):
        if family is not None:
            one = _One(family)
            parts.append(plain_text(one) if plain else open_metrics(one).removesuffix(_END))
        yield
    return b"".join(parts if plain else [*parts, _END])


class _One(Collector):
    """One family, as prometheus_client wants it."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def _families(server: Server, jobs: bool, now: float) -> Steps[None]:
    """Yield families, and None between other steps."""
    state = server.state
    running, latest = yield from _jobs_of(state)
    yield InfoMetricFamily(
        "ffserve_build",
        "Version and engine of the daemon.",
        {"version": __version__, "engine": state.reading.engines.kind},
    )
    yield from _process(state)
    yield from _samples(state)
    yield from _disk(state)
    yield from _store(state)
    yield from _memory(state)
    yield from _clients(server, running)
    yield from _durations(state)
    if jobs:
        yield _domains(state)
        yield from _damaged(state)
        yield from _jobs(state, _labelled(latest), now)


def _process(state: ServerState) -> Iterator[Metric]:
    """Yield the usual metrics of a process. The library's own would list all descriptors, of which
    there may be half a million."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = file.read().split()
    sizes = {"virtual": int(pages[0]), "resident": int(pages[1])}
    for kind, count in sizes.items():
        name, size = f"process_{kind}_memory_bytes", count * mmap.PAGESIZE
        yield GaugeMetricFamily(name, f"{kind.capitalize()} memory size in bytes.", size)
    cpu_s = time.process_time()
    yield CounterMetricFamily("process_cpu_seconds", "User and system CPU time spent.", cpu_s)
    started, most_files = state.started, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield GaugeMetricFamily("process_start_time_seconds", "Start, since 1970.", started)
    yield GaugeMetricFamily("process_max_fds", "Largest number of descriptors.", most_files)
    count = os.stat("/proc/self/fd").st_size
    if count:  # Linux 6.2
        yield GaugeMetricFamily("process_open_fds", "Number of open descriptors.", count)


def _counter(name: str, text: str, value: float, unit: str = "") -> Metric:
    return CounterMetricFamily(f"ffserve_{name}", text, value, unit=unit)


def _gauge(name: str, text: str, value: float, unit: str = "") -> Metric:
    return GaugeMetricFamily(f"ffserve_{name}", text, value, unit=unit)


def _samples(state: ServerState) -> Iterator[Metric]:
    statistics, counters = state.statistics, state.memory.cache.counters
    yield _counter("hits", "Samples that clients found in memory.", statistics.hits)
    yield _counter("hit_bytes", "Bytes of these samples.", statistics.hit_size)
    yield _counter("misses", "Samples that clients asked the daemon for.", statistics.missed)
    yield _counter(
        "misses_resident",
        "Samples that clients asked the daemon for and that were in memory already.",
        counters.resident,
    )
    yield _counter("evicted_samples", "Samples evicted from memory.", counters.evicted)
    yield _counter("prefetched_blocks", "Blocks read ahead of a job.", counters.prefetched)
    yield _counter(
        "prefetch_wasted_blocks",
        "Blocks read ahead of a job that were evicted before use.",
        counters.wasted,
    )
    errors = CounterMetricFamily(
        "ffserve_errors", "Failed samples and requests, by class.", labels=("class",)
    )
    for code in BY_CODE:
        errors.add_metric((code,), statistics.errors[code])
    yield errors
    yield _counter("prepared", "Samples that clients prepared and shared.", statistics.prepared)
    yield _counter(
        "prepared_found", "Prepared samples found in memory instead.", statistics.prepared_found
    )
    yield _counter("preparing_seconds", "Time that preparing took.", statistics.preparing_s)
    yield _counter(
        "preparing_saved_seconds",
        "Time that preparing those found would have taken.",
        statistics.preparing_saved_s,
    )


def _disk(state: ServerState) -> Iterator[Metric]:
    engine = state.reading.engines.counters()
    yield _counter("read_bytes", "Bytes read from files.", state.reading.engines.read_size)
    yield _counter(
        "read_blocks", "Blocks read from files.", state.memory.cache.counters.blocks_read
    )
    yield _counter("device_reads", "Completed reads of devices.", engine["reads"])
    yield _counter(
        "failed_blocks", "Blocks that could not be read.", state.memory.cache.counters.failed
    )
    yield _counter(
        "corrected_samples",
        "Samples whose checksum was right at the second read only.",
        state.statistics.corrected,
    )
    yield _counter("scrubbed_bytes", "Bytes read to find damage.", state.files.scrubber.size)
    yield _counter("scrub_passes", "Passes through all open files.", state.files.scrubber.passes)
    yield _gauge("reads_in_flight", "Reads that devices carry out.", engine["inflight"])
    yield _gauge("reads_queued", "Reads that wait for a device.", engine["queued"])


def _store(state: ServerState) -> Iterator[Metric]:
    """Yield what is known of remote files; zeros without a store."""
    facts = store_facts(state.files.remote)
    yield _gauge("store_used_bytes", "Blocks of remote files on disk.", facts["used"], "bytes")
    yield _gauge("store_limit_bytes", "Limit of these.", facts["limit"], "bytes")
    yield _counter("fetched_bytes", "Bytes of remote files that came.", facts["fetched"])
    yield _counter("cache_bytes", "Of these, from the cache network.", facts["from_cache"])
    yield _counter("cache_faults", "Answers of the cache not used.", facts["cache_faults"])
    yield _counter("store_evicted_blocks", "Blocks evicted from disk.", facts["evicted"])


def _memory(state: ServerState) -> Iterator[Metric]:
    arena = arena_facts(state)
    yield _gauge("arena_size_bytes", "Memory for samples.", arena["size"], "bytes")
    yield _gauge("arena_limit_bytes", "Largest size of the arena.", arena["limit"], "bytes")
    yield _gauge("arena_used_bytes", "Memory that holds samples.", arena["used"], "bytes")
    yield _gauge("arena_populated_bytes", "Memory with pages.", arena["populated"], "bytes")
    yield _gauge("arena_leased_bytes", "Memory that leases hold.", arena["leased"], "bytes")
    orders = state.memory.next_use.order_size
    yield _gauge("orders_bytes", "Memory of announced orders.", orders, "bytes")


def _clients(server: Server, running: int) -> Iterator[Metric]:
    state, statistics = server.state, server.state.statistics
    yield _gauge("sessions", "Connected clients.", server.connection_count)
    yield _gauge("sessions_limit", "Largest number of clients.", server.state.clients.most)
    yield _gauge("jobs", "Jobs with a session.", running)
    yield _counter("clients_refused", "Clients refused: too many.", statistics.refused)
    yield _counter("clients_cut_off", "Clients that broke the protocol.", statistics.cut_off)
    yield _gauge(
        "requests", "Requests that are not answered yet.", state.reading.scheduler.request_count
    )
    yield _gauge(
        "requests_blocked", "Requests that wait for memory.", state.reading.scheduler.blocked_count
    )


def _durations(state: ServerState) -> Iterator[Metric]:
    yield _histogram(
        "hit_batch_duration",
        "Copying a batch of cached samples, as clients report it; one batch in eight is timed.",
        {"": state.statistics.hit_batches},
    )
    yield _histogram(
        "request_duration",
        "From a request for missing samples to its answer.",
        {"": state.statistics.requests},
    )
    yield _histogram(
        "request_phase_duration",
        "Parts of requests: waiting for a turn, for memory, reads of a device, decoding of chunks.",
        {
            "queue": state.reading.scheduler.queued,
            "memory": state.reading.scheduler.blocked,
            "disk": state.reading.engines.reading,
            "decode": state.reading.engines.decoding,
        },
    )


def _histogram(name: str, text: str, histograms: dict[str, Histogram]) -> Metric:
    labels = ("phase",) if len(histograms) > 1 else ()
    family = HistogramMetricFamily(f"ffserve_{name}", text, labels=labels, unit="seconds")
    ends = [*map(floatToGoString, BOUNDS_S), "+Inf"]
    for phase, histogram in histograms.items():
        buckets = list(zip(ends, map(float, accumulate(histogram.counts)), strict=True))
        family.add_metric((phase,) if labels else (), buckets, histogram.sum_s)
    return family


# ---- by user and job ---------------------------------------------------------------------------


def _domains(state: ServerState) -> Metric:
    family = GaugeMetricFamily(
        "ffserve_domain_memory_bytes",
        "Memory of each domain; user and namespace are empty for the common one.",
        labels=("user", "namespace"),
        unit="bytes",
    )
    rows = heapq.nlargest(
        MOST_SERIES_DOMAINS, domain_facts(state, None), key=lambda row: row["size"]
    )
    for row in rows:
        labels = ("" if row[key] is None else str(row[key]) for key in ("user", "namespace"))
        family.add_metric(tuple(labels), row["size"])
    return family


def _damaged(state: ServerState) -> Iterator[Metric | None]:
    family = GaugeMetricFamily(
        "ffserve_damaged_samples",
        "Samples that were found damaged, of the files with the most.",
        labels=("path",),
    )
    rows: Counter[str] = Counter()
    for part in state.files.catalog.shards():
        for shard in part:
            if shard.damaged:
                rows[_label(shard.path[-MOST_LABEL:])] += shard.damaged
        yield None
    for path in heapq.nlargest(MOST_SERIES_FILES, rows, key=rows.__getitem__):
        family.add_metric((path,), rows[path])
    yield family


def _jobs_of(state: ServerState) -> Steps[tuple[int, list[Job]]]:
    """Return the number of jobs with a session, and the jobs that are shown."""
    jobs, running = list(state.jobs.all.values()), 0
    latest: list[Job] = []
    for first in range(0, len(jobs), _STEP_JOBS):
        part = jobs[first : first + _STEP_JOBS]
        running += sum(job.sessions > 0 for job in part)
        latest = heapq.nlargest(
            MOST_SERIES_JOBS, latest + part, key=lambda job: (job.sessions > 0, job.last_seen)
        )
        yield None
    return running, latest


_Labelled: TypeAlias = dict[tuple[str, str, str], Job]


def _labelled(jobs: list[Job]) -> _Labelled:
    """Return jobs by their labels. Two numbers of one user that differ only in what is cut off are
    shown as one job."""
    shown: _Labelled = {}
    numbers = set()
    for job in jobs:
        number, user = _label(job.name), _label(str(job.user))
        if (number, user) not in numbers:
            numbers.add((number, user))
            shown[_label(job.title or job.name), number, user] = job
    return shown


def _jobs(state: ServerState, shown: _Labelled, now: float) -> Iterator[Metric | None]:
    reads = state.reading.scheduler.reads_of
    columns: dict[str, tuple[str, Callable[[Job], float]]] = {
        "hits": ("Samples found in memory.", lambda job: job.hits),
        "hit_bytes": ("Bytes of these.", lambda job: job.hit_size),
        "misses": ("Samples asked for.", lambda job: job.missed),
        "errors": ("Samples and requests that failed.", lambda job: job.errors),
        "read_bytes": (
            "Bytes read from files for the job.",
            lambda job: reads[job.key].size if job.key in reads else 0,
        ),
        "waited_seconds": ("Time between requests and answers.", lambda job: job.waited_s),
    }
    for name, (text, value) in columns.items():
        counter = CounterMetricFamily(f"ffserve_job_{name}", text, labels=_LABELS)
        for labels, job in shown.items():
            counter.add_metric(labels, value(job))
        yield counter
    times = CounterMetricFamily(
        "ffserve_job_time_seconds",
        "Time of its sessions: why they waited, or the trainer's own.",
        labels=(*_LABELS, "cause"),
    )
    rivals = GaugeMetricFamily(
        "ffserve_job_memory_taken",
        "Share of its time, lately, that it waited since another job took memory.",
        labels=(*_LABELS, "by"),
    )
    for labels, job in shown.items():
        for cause, seconds in job.time.causes.items():
            times.add_metric((*labels, cause), seconds)
        if job.time.taken_by is not None:
            share = job.time.recent(now)["taken"]
            rival = state.jobs.all.get(job.time.taken_by)
            by = "" if rival is None else rival.title
            by = by or state.jobs.name_of(job.time.taken_by, None)
            rivals.add_metric((*labels, _label(by)), share)
    yield times
    yield rivals
    sessions = GaugeMetricFamily("ffserve_job_sessions", "Connected sessions.", labels=_LABELS)
    for labels, job in shown.items():
        sessions.add_metric(labels, job.sessions)
    yield sessions
    yield from _progress(state, shown, now)


def _label(text: str) -> str:
    return printable(text.encode(errors="backslashreplace").decode())[:MOST_LABEL]


def _progress(state: ServerState, shown: _Labelled, now: float) -> Iterator[Metric | None]:
    """Yield where jobs are in their largest data set."""
    largest: dict[str, JobProgress] = {}
    for count, progress in enumerate(list(state.memory.next_use.jobs)):
        known = largest.get(progress.job)
        if known is None or progress.sample_count > known.sample_count:
            largest[progress.job] = progress
        if count % _STEP_COUNT == 0:
            yield None
    epoch = GaugeMetricFamily("ffserve_job_epoch", "Current epoch.", labels=_LABELS)
    ratio = GaugeMetricFamily(
        "ffserve_job_epoch_ratio", "Part of the epoch that is done, 0 to 1.", labels=_LABELS
    )
    rate = GaugeMetricFamily(
        "ffserve_job_samples_per_second", "Samples that the job uses.", labels=_LABELS
    )
    for labels, job in shown.items():
        if job.key not in largest:
            continue
        facts = progress_facts(state, largest[job.key], now, None)
        epoch.add_metric(labels, facts["epoch"])
        rate.add_metric(labels, facts["rate"])
        if facts["count"]:
            ratio.add_metric(labels, min(facts["position"] / facts["count"], 1.0))
    yield from (epoch, ratio, rate)
