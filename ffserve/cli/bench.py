"""``ffserve bench``: ffserve and other packages beside this machine's memory and disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ffserve.cli import FloatRange
from ffserve.cli.terminal import print_json, print_table, progress
from ffserve.config import format_size
from ffserve.errors import UsageError

if TYPE_CHECKING:
    from ffserve.bench.harness import Group

MIB = 1 << 20
SIZES = (4096, 100 * 1024)


@click.command()
@click.argument("files", nargs=-1, metavar="[FILES]...")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    help="Directory for the data, on the disk to measure.  [default: TMPDIR, else /var/tmp]",
)
@click.option(
    "--size",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="Bytes of each data set; of FILES at most this much is read.",
)
@click.option(
    "--seconds",
    type=FloatRange(0.01, 60),
    default=0.3,
    show_default=True,
    help="Length of each run.",
)
@click.option(
    "--turns",
    type=click.IntRange(1, 99),
    default=3,
    show_default=True,
    help="How often all contestants run; medians are shown.",
)
@click.option(
    "--only",
    metavar="TEXT",
    multiple=True,
    help="Only rows whose name contains TEXT, such as cold/4KiB; may be repeated.",
)
@click.option(
    "--peers/--no-peers", default=True, help="Measure other packages, too.  [default: --peers]"
)
@click.option(
    "--list", "as_list", is_flag=True, help="Print the names of the rows, measure nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
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
    those files and does not change them. It starts its own daemon. Every figure is a ratio to a
    yardstick of the same turn: memcpy for samples in memory, fio for samples on disk. LMDB and
    other packages take part where they are installed.

    \b
      ffserve bench
      ffserve bench --dir /data --only cold
      ffserve bench /data/train/*.ffr --json > bench.json
    """
    from ffserve.bench import contestants, harness, report, rows
    from ffserve.bench.processes import interruptible, work_directory
    from ffserve.config import parse_size

    limit = parse_size(size)
    if limit < MIB:
        raise UsageError(f"--size {size} is too small: at least 1 MiB is needed to measure")
    installed, notes = rows.installed_peers() if peers else ([], [])
    if not contestants.has_fio():
        notes.append(
            f"{contestants.FIO_MISSING}: cold rows are compared with Python threads of preadv, "
            "which are slower than the disk, and their limits are not judged"
        )
    with interruptible(), work_directory("ffserve-bench-", directory) as work:
        if files:
            sets = [harness.existing(files, limit)]
        else:
            sets = [harness.generated(work, sample_size, limit) for sample_size in SIZES]
        with harness.Bench(work, seconds) as running:
            groups = rows.standard(running, sets, installed)
            groups = harness.chosen(groups, only, "ffserve bench --list")
            if as_list:
                for group in groups:
                    click.echo("\n".join(group.row_names()))
                return 0
            facts = report.machine(os.path.dirname(sets[0].paths[0]))
            if not as_json:
                click.echo(report.describe_machine(facts))
                for data in sets:
                    click.echo(
                        f"{data.name}: {data.count:,} samples, {format_size(data.size)}, mean "
                        f"{data.mean:,} bytes"
                    )
            left_out: dict[str, str] = {}
            measured = _run(groups, turns, left_out, quiet=as_json)
    if as_json:
        print_json(report.document(facts, measured, notes, left_out))
        return 0
    click.echo()
    for line in [*notes, *report.reasons(left_out), *report.verdict(measured)]:
        click.echo(line)
    return 0


def _run(
    groups: list[Group], turns: int, left_out: dict[str, str], *, quiet: bool
) -> list[dict[str, Any]]:
    """Measure all groups and print each when it is done."""
    from ffserve.bench import harness, report

    measured: list[dict[str, Any]] = []
    with progress("measuring", len(groups)) as shown:
        for group in groups:
            found = harness.measure(group, turns, left_out)
            measured += found
            if found and not quiet:
                title, heads, lines = report.group_table(group.title, found)
                click.echo(f"\n{title}")
                print_table(heads, lines)
            shown.advance(1)
    return measured
