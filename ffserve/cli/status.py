"""``ffserve status``: the memory, files and jobs of a running daemon, on one screen."""

from __future__ import annotations

from typing import Any

import click

from ffserve.cli.options import json_option, socket_option
from ffserve.cli.terminal import percent, print_facts, print_json, print_table
from ffserve.config import format_size
from ffserve.errors import printable

SHARDS_SHOWN = 8
JOBS_SHOWN = 12
AT_WORK_S = 10


@click.command()
@socket_option
@json_option
def status(socket: str | None, as_json: bool) -> int:
    """Show the daemon's memory, files and jobs.

    A hit is a sample that a job finds in shared memory without a request; jobs report hits with
    their next request. The exit code is 3 when no daemon answers.

    \b
      ffserve status
      ffserve status --json | jq '.jobs[] | {name, hit_rate}'
    """
    from ffserve.client import connection

    facts = connection.status(socket)
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def _print(facts: dict[str, Any]) -> None:
    arena, cache, shards, jobs = (facts[key] for key in ("arena", "cache", "shards", "jobs"))
    click.echo(
        f"ffserve {facts['version']}, pid {facts['pid']}, up {duration(facts['uptime_s'])}, "
        f"{printable(facts['socket'])}"
    )
    used = f"{format_size(arena['used'])} of {format_size(arena['size'])}"
    if arena["size"] != arena["target"]:
        used += f", resizing to {format_size(arena['target'])}"
    if arena["held"]:
        used += f" when {format_size(arena['held'])} are released"
    print_facts(
        [
            ("engine", str(facts["engine"]["kind"])),
            ("roots", " ".join(facts["roots"])),
            ("arena", f"{used} ({percent(arena['used'], arena['size'])})"),
            (
                "read from disk",
                f"{format_size(cache['read_size'])}, {cache['blocks_read']:,} reads",
            ),
            ("evicted", f"{cache['evicted']:,} samples"),
            ("failed", f"{cache['failed']:,} reads, {cache['checksum_failures']:,} by checksum"),
        ]
    )
    _print_shards(shards)
    # Clients that opened no data set, such as this command, are not shown.
    _print_jobs([job for job in jobs if job["paths"]])
    _print_progress(facts)


def _print_shards(shards: list[dict[str, Any]]) -> None:
    if not shards:
        return
    click.echo()
    print_table(
        ["shard", "samples", "size", "in memory", "sessions"],
        [
            [
                shard["path"],
                f"{shard['count']:,}",
                format_size(shard["payload_size"]),
                # Slots of small samples are larger than the samples.
                percent(min(shard["cached_size"], shard["payload_size"]), shard["payload_size"]),
                str(shard["sessions"]),
            ]
            for shard in shards[:SHARDS_SHOWN]
        ],
    )
    if len(shards) > SHARDS_SHOWN:
        click.echo(f"and {len(shards) - SHARDS_SHOWN:,} more (--json shows all)")


def _print_jobs(jobs: list[dict[str, Any]]) -> None:
    if not jobs:
        return
    click.echo()
    # Active jobs keep their order from one call to the next.
    latest = sorted(jobs, key=lambda job: job["idle_s"] // AT_WORK_S)
    print_table(
        ["job", "pid", "samples", "hit rate", "errors", "sessions", "last seen", "data"],
        [
            [
                job["name"][:12],
                "-" if job["pid"] is None else str(job["pid"]),
                f"{job['hits'] + job['missed']:,}",
                percent(job["hits"], job["hits"] + job["missed"]),
                f"{job['errors']:,}",
                str(job["sessions"]),
                f"{duration(job['idle_s'])} ago",
                job["paths"],
            ]
            for job in latest[:JOBS_SHOWN]
        ],
    )
    if len(jobs) > JOBS_SHOWN:
        click.echo(f"and {len(jobs) - JOBS_SHOWN:,} more (--json shows all)")


def _print_progress(facts: dict[str, Any]) -> None:
    """Print the positions of the jobs in their epochs, and the memory of each group."""
    names = {job["name"]: job for job in facts["jobs"]}
    rows = [row for row in facts.get("progress", ()) if row["count"] is not None]
    if rows:
        click.echo()
        print_table(
            ["job", "order", "epoch", "position", "per second", "ends in", "window",
             "waited", "from disk", "if alone"],
            [
                [
                    row["job"][:12],
                    row["name"] or row["kind"],
                    str(row["epoch"]) if row["announced"] else "",
                    percent(row["position"], row["count"]),
                    f"{row['rate']:,.0f}",
                    duration(row["epoch_end_s"]) if row["epoch_end_s"] is not None else "",
                    f"{row['window']:,}",
                    duration(names[row["job"]]["waited_s"]) if row["job"] in names else "",
                    format_size(names[row["job"]]["read_size"]) if row["job"] in names else "",
                    format_size(names[row["job"]]["alone_size"]) if row["job"] in names else "",
                ]
                for row in rows[:JOBS_SHOWN]
            ],
        )  # fmt: skip
    groups = [group for group in facts.get("groups", ()) if group["used"]]
    if groups:
        click.echo()
        print_table(
            ["memory of jobs", "size", "of the arena", "guaranteed", "policy"],
            [
                [
                    " ".join(name[:12] for name in group["jobs"][:4]) or "(ended)",
                    format_size(group["used"]),
                    percent(group["used"], facts["arena"]["size"]),
                    format_size(group["floor"]),
                    group["rule"],
                ]
                for group in groups[:SHARDS_SHOWN]
            ],
        )


def duration(seconds: float) -> str:
    """Return seconds as text: ``0.3 s``, ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if 0 < seconds < 9.95 else f"{seconds:.0f} s"
