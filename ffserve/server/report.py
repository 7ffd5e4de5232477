"""Report: the content of REPORT (`ffserve status --json`), as plain numbers and texts."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any

import numpy as np

from ffserve import __version__
from ffserve.cache.jobs import JobProgress
from ffserve.server.access import Peer, Viewer, viewer_of
from ffserve.server.shards import OpenShard
from ffserve.server.state import LARGEST_COUNT, Job, ServerState

MOST_ROWS = 1000
"""Rows in each list, so that a REPORT fits into a frame whatever clients open."""
STEP_ROWS = 64
"""Rows that are made in one step."""


def status(state: ServerState, now: float, peer: Peer) -> Generator[None, None, dict[str, Any]]:
    """Return the answer to STATUS, in steps.

    Root and the daemon's own user see everything. Others see totals and what is their own, since
    the names of files and jobs tell much about a user.
    """
    viewer = None if peer.is_administrator else peer.viewer
    counters = state.cache.counters
    engine = state.engines.counters()
    shards: list[OpenShard] = []
    for part in state.catalog.shards():
        shards += [shard for shard in part if viewer is None or viewer in shard.names]
        yield None
    jobs = [job for job in state.jobs.values() if viewer in (None, job.user)]
    own = {job.name for job in jobs}
    progress = [each for each in state.next_use.jobs if each.job in own]
    alone_sizes = yield from _alone_sizes(state, shards)
    rows = yield from _rows(
        shards=(shard_facts(state, shard, viewer) for shard in shards),
        progress=(progress_facts(state, each, now) for each in progress),
        groups=iter(group_facts(state, now, None if viewer is None else own)),
        jobs=(job_facts(state, job, now, alone_sizes.get(job.name, 0)) for job in jobs),
        domains=iter(domain_facts(state, viewer)),
    )
    return {
        "version": __version__,
        "pid": os.getpid(),
        "started": state.started,
        "uptime_s": round(time.monotonic() - state.began, 3),
        "socket": state.config.socket,
        "roots": list(state.config.roots),
        "engine": {"kind": state.engines.kind, **engine},
        "arena": arena_facts(state),
        "cache": {
            "asked": counters.asked,
            "resident": counters.resident,
            "joined": counters.joined,
            "blocks_read": counters.blocks_read,
            "evicted": counters.evicted,
            "failed": counters.failed,
            "read_size": state.engines.read_size,
            "checksum_failures": state.engines.checksum_failures,
            "blocked": state.scheduler.blocked_count,
            "prefetched": counters.prefetched,
            "wasted": counters.wasted,
        },
        **rows,
    }


def _rows(
    **facts: Iterator[dict[str, Any]],
) -> Generator[None, None, dict[str, list[dict[str, Any]]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, each in facts.items():
        mine = rows[name] = []
        while part := list(islice(each, min(STEP_ROWS, MOST_ROWS - len(mine)))):
            mine += part
            yield None
    return rows


def shard_facts(state: ServerState, shard: OpenShard, viewer: Viewer | None) -> dict[str, Any]:
    """Return the facts about one shard, by the name that this user has for it."""
    used = int(state.table.used[state.table.row(shard.base)]) if shard.count else 0
    return {
        "path": shard.path if viewer is None else shard.names.get(viewer, ""),
        "format": shard.format,
        "count": shard.count,
        "size": shard.size,
        "payload_size": shard.payload_size,
        "sessions": shard.sessions,
        "open": shard.fd >= 0,
        "cached_size": used,
    }


def domain_facts(state: ServerState, viewer: Viewer | None) -> list[dict[str, Any]]:
    """Return the memory of each domain; sizes in bytes."""
    return [
        {
            "user": None if domain.owner is None else domain.owner[0],
            "namespace": None if domain.owner is None else domain.owner[1],
            "size": state.arena.slabs_in(domain.number) * state.arena.slab_size,
            "shards": domain.shards,
        }
        for domain in state.domains.all[:MOST_ROWS]
        if viewer is None or domain.owner is None or viewer_of(domain.owner) == viewer
    ]


def arena_facts(state: ServerState) -> dict[str, Any]:
    """Return the state of the arena, for STATUS and RESIZE; sizes in bytes."""
    return {
        "size": state.resizing.size,
        "target": state.resizing.target,
        "limit": state.arena.limit,
        "used": state.arena.used_size,
        "populated": state.pages.populated,
        "held": state.resizing.held_size,
        "leased": state.scheduler.leased_size,
        "resizing": state.resizing.under_way,
    }


def progress_facts(state: ServerState, progress: JobProgress, now: float) -> dict[str, Any]:
    """Return the progress of one job in one data set."""
    order, rate = progress.order, progress.pace.rate(now)
    position = progress.position if order else progress.seen_count
    count = order.count if order else progress.sample_count
    known = order is not None or progress.seen is not None
    return {
        "job": progress.job,
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
        "window": state.scheduler.prefetcher.window(progress, now) if order else 0,
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


def group_facts(state: ServerState, now: float, own: set[str] | None) -> list[dict[str, Any]]:
    """Return the memory of each group of data sets that share shards, the largest first.

    Args: own: only groups with these jobs, and of their jobs only these; None: all.
    """
    floors, used = state.cache.policy.floors(), state.cache.policy.used
    groups = state.next_use.groups
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
    if own is not None:
        for each in facts:
            each["jobs"] = [name for name in each["jobs"] if name in own]
        facts = [each for each in facts if each["jobs"]]
    return facts[:MOST_ROWS]


def job_facts(state: ServerState, job: Job, now: float, alone_size: int) -> dict[str, Any]:
    """Return the counters of one job."""
    read_size = state.scheduler.read_sizes.get(job.name, 0)
    return {
        "name": job.name,
        "pid": job.pid or None,
        "paths": job.paths,
        "sessions": job.sessions,
        "age_s": round(now - job.first_seen, 3),
        "idle_s": round(now - job.last_seen, 3),
        "hits": job.hits,
        "hit_size": job.hit_size,
        "missed": job.missed,
        "errors": job.errors,
        "hit_rate": job.hits / max(1, job.hits + job.missed),
        "waited_s": round(job.waited_s, 3),
        "read_size": read_size,
        "alone_size": alone_size,
    }


def _alone_sizes(
    state: ServerState, shards: list[OpenShard]
) -> Generator[None, None, dict[str, int]]:
    """Return the bytes that each job would have read with the whole arena for itself: everything
    in its first epoch, later what does not fit."""
    bases = np.array([shard.base for shard in shards], np.int64)
    payload_sizes = np.array([shard.payload_size for shard in shards], np.int64)
    yield None
    data_sets: defaultdict[str, list[JobProgress]] = defaultdict(list)
    for progress in state.next_use.jobs:
        data_sets[progress.job].append(progress)
    sizes = {}
    for name, every in data_sets.items():
        job, count = state.jobs.get(name), sum(progress.sample_count for progress in every)
        if job is None or not count:
            continue
        inside = np.zeros(len(bases), np.bool_)
        for progress in every:
            inside |= (bases >= progress.low) & (bases < progress.low + progress.span)
            yield None
        payload = int(payload_sizes[inside].sum())
        used = (job.hits + job.missed) * payload // count
        later = max(used - payload, 0)
        alone = min(used, payload) + int(later * max(1 - state.arena.size / max(payload, 1), 0.0))
        sizes[name] = min(alone, LARGEST_COUNT)
    return sizes
