"""Report: the content of REPORT (`ffserve status --json`), as plain numbers and texts."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any

from ffserve._version import __version__
from ffserve.cache.jobs import JobProgress
from ffserve.engine.io import best_refusal
from ffserve.limits import MOST_REPORT_ROWS
from ffserve.server.files.remote import store_facts
from ffserve.server.files.shards import OpenShard
from ffserve.server.life.log import NOBODY, LatestLines, latest
from ffserve.server.reading.statistics import LARGEST_COUNT
from ffserve.server.sessions.job_table import Job
from ffserve.server.sessions.state import ServerState
from ffserve.server.users.peers import Peer, Viewer, viewer_of

STEP_ROWS = 64
"""One step makes this many rows."""


def status(state: ServerState, now: float, peer: Peer) -> Generator[None, None, dict[str, Any]]:
    """Return the answer to STATUS, in steps.

    Root and the daemon's own user see everything. Others see totals and what is their own, since
    the names of files and jobs tell much about a user.
    """
    viewer = None if peer.is_administrator else peer.viewer
    counters = state.memory.cache.counters
    engine = state.reading.engines.counters()
    shards: list[OpenShard] = []
    slow: list[OpenShard] = []
    for part in state.files.catalog.shards():
        mine = [shard for shard in part if viewer is None or viewer in shard.names]
        shards += mine
        if state.faults.slow_reads:
            slow += [
                shard for shard in mine if shard.count and shard.base in state.faults.slow_reads
            ]
        yield None
    jobs = [job for job in state.jobs.all.values() if viewer in (None, job.user)]
    own = {job.key for job in jobs}
    progress = [each for each in state.memory.next_use.jobs if each.job in own]
    yield from state.jobs.measure(now)
    rows = yield from _rows(
        shards=(shard_facts(state, s, viewer) for s in shards if state.files.catalog.has(s)),
        progress=(progress_facts(state, each, now, viewer) for each in progress),
        groups=iter(group_facts(state, now, viewer, own)),
        jobs=(job_facts(state, job, now, viewer) for job in jobs),
        domains=iter(domain_facts(state, viewer)),
        preparations=iter(preparation_facts(state, viewer)),
        slow_files=iter(slow_facts(state, slow, now, viewer)),
        lines=iter(line_facts(viewer)),
    )
    return {
        "version": __version__,
        "pid": os.getpid(),
        "started": state.started,
        "uptime_s": round(now - state.began, 3),
        "socket": state.config.socket,
        "roots": list(state.config.roots),
        "engine": {
            "kind": state.reading.engines.kind,
            # Another kind that was chosen on purpose was not tried.
            "refused": best_refusal(state.reading.engines.kind)
            if state.config.engine == "auto"
            else None,
            **engine,
        },
        "arena": arena_facts(state),
        "clients": client_facts(state),
        "samples": sample_facts(state),
        "rates": rate_facts(state, now),
        "cache": {
            "asked": counters.asked,
            "resident": counters.resident,
            "joined": counters.joined,
            "blocks_read": counters.blocks_read,
            "evicted": counters.evicted,
            "failed": counters.failed,
            "read_size": state.reading.engines.read_size,
            "checksum_failures": state.reading.engines.checksum_failures,
            "corrected": state.statistics.corrected,
            "blocked": state.reading.scheduler.blocked_count,
            "prefetched": counters.prefetched,
            "wasted": counters.wasted,
        },
        "store": store_facts(state.files.remote),
        "scrub": {
            "rate": state.files.scrubber.rate,
            "size": state.files.scrubber.size,
            "passes": state.files.scrubber.passes,
        },
        **rows,
    }


def _rows(
    **facts: Iterator[dict[str, Any]],
) -> Generator[None, None, dict[str, list[dict[str, Any]]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, each in facts.items():
        mine = rows[name] = []
        while part := list(islice(each, min(STEP_ROWS, MOST_REPORT_ROWS - len(mine)))):
            mine += part
            yield None
    return rows


def shard_facts(state: ServerState, shard: OpenShard, viewer: Viewer | None) -> dict[str, Any]:
    """Return the facts about one shard, by the name that this user has for it."""
    used = int(state.memory.table.used[state.memory.table.row(shard.base)]) if shard.count else 0
    return {
        "path": shard.path if viewer is None else shard.names.get(viewer, ""),
        "format": shard.format,
        "count": shard.count,
        "size": shard.size,
        "payload_size": shard.payload_size,
        "sessions": shard.sessions,
        "open": shard.fd >= 0,
        "cached_size": used,
        "damaged": shard.damaged,
        "verified": shard.checksum_kind > 0,
    }


def domain_facts(state: ServerState, viewer: Viewer | None) -> list[dict[str, Any]]:
    """Return the memory of each domain; sizes in bytes."""
    return [
        {
            "user": None if domain.owner is None else domain.owner[0],
            "namespace": None if domain.owner is None else domain.owner[1],
            "size": state.memory.arena.slabs_in(domain.number) * state.memory.arena.slab_size,
            "shards": domain.shards,
        }
        for domain in state.domains.all[:MOST_REPORT_ROWS]
        if viewer is None or domain.owner is None or viewer_of(domain.owner) == viewer
    ]


def preparation_facts(state: ServerState, viewer: Viewer | None) -> list[dict[str, Any]]:
    """Return what is known of each preparation of samples, and what sharing it has saved."""
    return [
        {
            "name": each.name,
            "user": each.owner[0],
            "shared": each.trusted,
            "prepared": each.count,
            "found": min(each.shared_count, LARGEST_COUNT),
            "cost_s": round(each.cost_s, 3),
            "saved_s": round(each.saved_s, 3),
        }
        for each in state.files.catalog.preparations.all[:MOST_REPORT_ROWS]
        if viewer is None or viewer_of(each.owner) == viewer
    ]


def slow_facts(
    state: ServerState, shards: list[OpenShard], now: float, viewer: Viewer | None
) -> list[dict[str, Any]]:
    """Return the files with slow reads, the latest first."""
    found = [(state.faults.slow_reads.get(shard.base), shard) for shard in shards]
    rows = [
        {
            "path": shard.path if viewer is None else shard.names.get(viewer, ""),
            "reads": slow.count,
            "longest_s": round(slow.longest_s, 3),
            "last_s": round(now - slow.last, 3),
        }
        for slow, shard in found
        if slow is not None
    ]
    return sorted(rows, key=lambda row: row["last_s"])


def line_facts(viewer: Viewer | None, lines: LatestLines = latest) -> list[dict[str, Any]]:
    """Return the latest warnings and errors of the log: all, or those that a user caused."""
    return [
        {"time": round(line.time, 3), "level": line.level, "text": line.text}
        for line in lines.lines()
        if viewer is None or (line.user != NOBODY and line.user == viewer)
    ]


def client_facts(state: ServerState) -> dict[str, int]:
    """Return the numbers of sessions and of requests."""
    return {
        "sessions": state.clients.count,
        "most_sessions": state.clients.most,
        "requests": state.reading.scheduler.request_count,
        "refused": state.statistics.refused,
        "cut_off": state.statistics.cut_off,
    }


def sample_facts(state: ServerState) -> dict[str, int]:
    """Return the counters of all jobs together."""
    statistics = state.statistics
    return {
        "hits": min(statistics.hits, LARGEST_COUNT),
        "hit_size": min(statistics.hit_size, LARGEST_COUNT),
        "missed": statistics.missed,
        "errors": statistics.errors.total(),
    }


def rate_facts(state: ServerState, now: float) -> dict[str, float]:
    """Return what passes in a second, of all jobs together."""
    names = ("hits", "missed", "hit_size", "read_size", "reads", "evicted", "errors")
    rates = state.jobs.rates.per_second(now, state.jobs.counters())
    return {name: round(rate, 3) for name, rate in zip(names, rates, strict=True)}


def arena_facts(state: ServerState) -> dict[str, Any]:
    """Return the state of the arena, for STATUS and RESIZE; sizes in bytes."""
    return {
        "size": state.resizing.size,
        "target": state.resizing.target,
        "limit": state.memory.arena.limit,
        "used": state.memory.arena.used_size,
        "populated": state.pages.populated,
        "held": state.resizing.held_size,
        "leased": state.reading.scheduler.pins.leased_size,
        "resizing": state.resizing.under_way,
    }


def progress_facts(
    state: ServerState, progress: JobProgress, now: float, viewer: Viewer | None
) -> dict[str, Any]:
    """Return the progress of one job in one data set."""
    order, rate = progress.order, progress.pace.rate(now)
    position = progress.position if order else progress.seen_count
    count = order.count if order else progress.sample_count
    known = order is not None or progress.seen is not None
    return {
        "job": state.jobs.name_of(progress.job, viewer),
        "group": progress.group,
        "kind": kind_of(progress),
        "active": progress.active(now),
        "epoch": progress.epoch,
        "position": position,
        "count": count if known else None,
        "announced": sorted(progress.orders),
        "name": progress.name,
        "rate": round(rate, 3),
        "epoch_end_s": round((count - position) / rate, 3) if rate and known else None,
        "window": state.reading.scheduler.prefetcher.window(progress, now) if order else 0,
        "order_size": progress.size,
    }


def kind_of(progress: JobProgress) -> str:
    """Return what is known of the order of a job: announced, silent (nothing), departed (it does
    not follow its order), random (it draws with replacement)."""
    if progress.order is not None:
        return "announced"
    if progress.departed:
        return "departed"
    return "random" if progress.replacement else "silent"


def group_facts(
    state: ServerState, now: float, viewer: Viewer | None, own: set[str]
) -> list[dict[str, Any]]:
    """Return the memory of each group of data sets that share shards, the largest first.

    Args: own: only groups with these jobs, and of their jobs only these, unless the viewer sees
        everything.
    """
    floors, used = state.memory.cache.policy.floors(), state.memory.cache.policy.used
    groups = state.memory.next_use.groups
    facts: list[dict[str, Any]] = [
        {
            "group": number,
            "jobs": sorted({each.job for each in groups[number].jobs}) if number in groups else [],
            "used": used.get(number, 0),
            "floor": floors.get(number, 0),
            "rule": "static" if number not in groups or groups[number].static(now) else "next use",
        }
        for number in sorted(used.keys() | groups.keys(), key=lambda n: -used.get(n, 0))
    ]
    if viewer is not None:
        for each in facts:
            each["jobs"] = [key for key in each["jobs"] if key in own]
        facts = [each for each in facts if each["jobs"]]
    for each in facts[:MOST_REPORT_ROWS]:
        each["jobs"] = [state.jobs.name_of(key, viewer) for key in each["jobs"]]
    return facts[:MOST_REPORT_ROWS]


def job_facts(state: ServerState, job: Job, now: float, viewer: Viewer | None) -> dict[str, Any]:
    """Return the counters of one job."""
    reads, rival = (
        state.reading.scheduler.reads_of.get(job.key),
        state.jobs.all.get(job.time.taken_by or ""),
    )
    taken_by = job.time.taken_by
    if taken_by is not None:
        taken_by = state.jobs.name_of(taken_by, viewer)
    hidden = job.time.taken_by is not None and not (
        viewer is None or (rival is not None and viewer == rival.user)
    )
    rates = (round(rate, 3) for rate in job.rates.per_second(now, state.jobs.counters_of(job)))
    return {
        "name": state.jobs.name_of(job.key, viewer),
        "title": job.title,
        "user": job.user if isinstance(job.user, int) else job.user[0],
        "pid": job.pid or None,
        "command": job.command,
        "paths": job.paths,
        "sessions": job.sessions,
        "age_s": round(now - job.first_seen, 3),
        # No two jobs end within a microsecond, so those that have ended have an order.
        "idle_s": round(now - job.last_seen, 6),
        "hits": job.hits,
        "hit_size": job.hit_size,
        "missed": job.missed,
        "errors": job.errors,
        "hit_rate": job.hits / max(1, job.hits + job.missed),
        "waited_s": round(job.waited_s, 3),
        "read_size": 0 if reads is None else reads.size,
        "rates": dict(zip(("hits", "missed", "hit_size", "read_size"), rates, strict=True)),
        "alone_size": min(job.time.alone_size, LARGEST_COUNT),
        "time_s": {cause: round(part_s, 3) for cause, part_s in job.time.causes.items()},
        "recent": {cause: round(share, 4) for cause, share in job.time.recent(now).items()},
        "taken_by": "(another user)" if hidden else taken_by,
    }
