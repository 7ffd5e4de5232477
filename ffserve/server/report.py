"""What STATUS says about jobs and about who keeps what: plain numbers and texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ffserve.cache.jobs import JobProgress

if TYPE_CHECKING:
    from ffserve.server.job import Job
    from ffserve.server.node import Node


MOST_COUNTED = (1 << 63) - 1
"""Beyond this a report could not be encoded; only what a client lied about gets there."""


def progress_facts(node: Node, progress: JobProgress, now: float) -> dict[str, Any]:
    """One job's way through one data set."""
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
        "window": node.scheduler.ahead.window(progress, now) if order else 0,
        "order_size": progress.size,
    }


def kind_of(progress: JobProgress) -> str:
    """Return how a job is known: announced, silent, departed (from its order), random (draws
    with replacement)."""
    if progress.order is not None:
        return "announced"
    if progress.departed:
        return "departed"
    return "random" if progress.replacement else "silent"


def group_facts(node: Node, now: float) -> list[dict[str, Any]]:
    """Who keeps what: data sets that share shards, the most memory first."""
    floors, used = node.cache.policy.floors(), node.cache.policy.used
    groups = node.uses.groups
    facts = [
        {
            "group": number,
            "jobs": sorted({each.job for each in groups[number].jobs}) if number in groups else [],
            "used": used.get(number, 0),
            "floor": floors.get(number, 0),
            "rule": "static" if number not in groups or groups[number].static(now) else "next use",
        }
        for number in sorted(used.keys() | groups.keys(), key=lambda n: -used.get(n, 0))
    ]
    return facts[:1000]


def job_facts(node: Node, job: Job, now: float) -> dict[str, Any]:
    """One training run."""
    read_size = node.scheduler.read_sizes.get(job.name, 0)
    return {
        "name": job.name,
        "pid": job.pid,
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
        "alone_size": _alone(node, job),
    }


def _alone(node: Node, job: Job) -> int:
    """Return the bytes that the job would have read with the whole arena to itself: all in its
    first epoch, then what does not fit."""
    jobs = [progress for progress in node.uses.jobs if progress.job == job.name]
    count = sum(progress.sample_count for progress in jobs)
    if not count:
        return 0
    payload = sum(
        shard.payload_size
        for shard in node.catalog.shards()
        if any(progress.low <= shard.base < progress.low + progress.span for progress in jobs)
    )
    used = (job.hits + job.missed) * payload // count
    later = max(used - payload, 0)
    alone = min(used, payload) + int(later * max(1 - node.arena.size / max(payload, 1), 0.0))
    return min(alone, MOST_COUNTED)
