"""``ffserve bench``: this machine's memory and disk, ffserve, and whatever else is installed."""

from __future__ import annotations

import os
from typing import Any

import click

from ffserve.cli import own
from ffserve.cli.terminal import print_json, progress
from ffserve.config import format_size
from ffserve.errors import UsageError

MIB = 1 << 20
SIZES = (4096, 100 * 1024)


@click.command()
@click.argument("files", nargs=-1, metavar="[FILES]...")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    help="Where to put data: the disk to be measured. TMPDIR, else /var/tmp, if left out.",
)
@click.option(
    "--size",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="Bytes of each data set; of FILES at most so much is read.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 60),
    default=0.3,
    show_default=True,
    help="How long each contestant runs in a turn.",
)
@click.option(
    "--turns",
    type=click.IntRange(1, 99),
    default=3,
    show_default=True,
    help="How often all take turns; medians are shown.",
)
@click.option(
    "--only",
    metavar="TEXT",
    multiple=True,
    help="Only rows whose name has this text, such as cold/4KiB; may be repeated.",
)
@click.option("--peers/--no-peers", default=True, help="Let other packages join in.")
@click.option("--list", "as_list", is_flag=True, help="Show the names of the rows, run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Write everything as JSON.")
def bench(
    files: tuple[str, ...],
    directory: str | None,
    size: str,
    seconds: float,
    turns: int,
    only: tuple[str, ...],
    peers: bool,
    as_list: bool,
    as_json: bool,
) -> int:
    """Measure ffserve beside this machine's memory and disk.

    Without FILES it writes two data sets, of 4 KiB and of 100 KiB samples. With FILES it reads
    those, as they are, and changes nothing in them. It starts a daemon of its own. Every figure is
    a ratio to a yardstick that ran in the same minute: memcpy for samples in memory, fio for
    samples on disk. LMDB and others take part where Python finds them.

    \b
      ffserve bench
      ffserve bench --dir /data --only cold
      ffserve bench /data/train/*.ffr --json > bench.json
    """
    from ffserve.bench import cases, records, report, runner, yardsticks
    from ffserve.config import parse_size

    most = parse_size(size)
    if most < MIB:
        raise UsageError(f"--size {size} is less than 1 MiB: nothing could be measured")
    rivals, notes = cases.installed() if peers else ([], [])
    if not yardsticks.has_fio():
        notes.append(
            f"{yardsticks.FIO_MISSING}: cold rows are compared with Python threads of preadv "
            "instead, which is less than the disk can do, and their limits are not judged"
        )
    with own.interruptible(), own.work_directory("ffserve-bench-", directory) as work:
        if files:
            sets = [records.existing(files, most)]
        else:
            sets = [records.generated(work, step, most) for step in SIZES]
        with runner.Bench(work, seconds) as bench:
            groups = [
                kept
                for group in cases.standard(bench, sets, rivals)
                if (kept := group.only(only)) is not None
            ]
            if not groups:
                raise UsageError(
                    f"no row's name has {' or '.join(map(repr, only))} in it",
                    hint="'ffserve bench --list' shows them",
                )
            if as_list:
                for group in groups:
                    for entrant in group.entrants:
                        for row in entrant.rows:
                            click.echo(row.name)
                return 0
            facts = report.machine(os.path.dirname(sets[0].paths[0]))
            if not as_json:
                click.echo(report.describe_machine(facts))
                for data in sets:
                    click.echo(
                        f"{data.name}: {data.count:,} samples, {format_size(data.size)}, on the "
                        f"average {data.mean:,} bytes"
                    )
            rows = _run(groups, turns, notes, quiet=as_json)
    if as_json:
        print_json(report.document(facts, rows, notes))
        return 0
    click.echo()
    for line in [*notes, *report.verdict(rows)]:
        click.echo(line)
    return 0


def _run(groups: list[Any], turns: int, notes: list[str], *, quiet: bool) -> list[dict[str, Any]]:
    """Measure group by group, writing each as it comes."""
    from ffserve.bench import report, runner

    rows: list[dict[str, Any]] = []
    with progress("measuring", len(groups)) as shown:
        for group in groups:
            found = runner.measure(group, turns, notes.append)
            rows += found
            if found and not quiet:
                report.print_group(group.title, found)
            shown.advance(1)
    return rows
