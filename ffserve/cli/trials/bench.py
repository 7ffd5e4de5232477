"""``ffserve bench``: ffserve beside this machine's memory and disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ffserve.cli import FloatRange
from ffserve.cli.terminal import print_json, print_table, progress
from ffserve.config import format_size, parse_size
from ffserve.errors import UsageError

if TYPE_CHECKING:
    from ffserve.bench.rows import Comparison
    from ffserve.bench.samples import BenchmarkData

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
@click.option("--peers/--no-peers", default=False, hidden=True)
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
    ceiling of the same turn: memcpy for samples in memory, fio for samples on disk. In a clone of
    the repository, python -m benchmarks compares ffserve with other packages.

    \b
      ffserve bench
      ffserve bench --dir /data --only cold
      ffserve bench /data/train/*.ffr --json > bench.json
    """
    from ffserve.bench import ceilings, rows, samples
    from ffserve.bench.child_processes import interruptible, work_directory
    from ffserve.bench.machine import describe_machine, machine

    if peers:
        raise UsageError(
            "ffserve bench no longer measures other packages",
            hint="'python -m benchmarks' in a clone of the repository compares with them",
        )
    limit = parse_size(size)
    if limit < MIB:
        raise UsageError(f"--size {size} is too small: at least 1 MiB is needed to measure")
    notes = []
    if not ceilings.has_fio():
        notes.append(
            f"{ceilings.FIO_MISSING}: cold rows are compared with Python threads of preadv, "
            "which are slower than the disk, and their limits are not judged"
        )
    with interruptible(), work_directory("ffserve-bench-", directory) as work:
        if files:
            sets = [samples.existing(files, limit)]
        else:
            sets = [samples.generated(work, sample_size, limit) for sample_size in SIZES]
        chosen = [
            (data, comparison, names)
            for data in sets
            for comparison in rows.comparisons(data, seconds)
            if (names := comparison.row_names(only))
        ]
        if not chosen:
            raise UsageError(
                f"no row's name contains {' or '.join(map(repr, only))}",
                hint="'ffserve bench --list' prints the names",
            )
        if as_list:
            for _, _, names in chosen:
                click.echo("\n".join(names))
            return 0
        facts = machine(os.path.dirname(sets[0].paths[0]))
        if not as_json:
            click.echo(describe_machine(facts))
            click.echo("\n".join(map(_described, sets)))
        measured = _measure(chosen, turns, quiet=as_json)
    if as_json:
        print_json({"machine": facts, "notes": notes, "rows": [_rounded(row) for row in measured]})
        return 0
    click.echo()
    for line in [*notes, *_verdict(measured)]:
        click.echo(line)
    return 0


def _described(data: BenchmarkData) -> str:
    size = format_size(data.size)
    return f"{data.name}: {data.count:,} samples, {size}, mean {data.mean:,} bytes"


def _measure(
    chosen: list[tuple[BenchmarkData, Comparison, list[str]]], turns: int, *, quiet: bool
) -> list[dict[str, Any]]:
    """Measure the rows with these names, and print each comparison when it is done."""
    measured = []
    with progress("measuring", len(chosen)) as shown:
        for data, comparison, names in chosen:
            data.make()
            found = comparison.measure(turns, names)
            measured += [{**row, "bytes": data.mean} for row in found]
            if not quiet:
                _print(comparison, found)
            shown.advance(1)
    return measured


def _print(comparison: Comparison, rows: list[dict[str, Any]]) -> None:
    rate = rows[0]["yardstick_mb_s"]
    click.echo(f"\n{comparison.title}; 1.00 is {comparison.ceiling}, {rate:,.0f} MB/s")
    lines = [
        [
            row["contestant"],
            f"{row['value']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            _limit(row),
            {None: "", True: "reached", False: "missed"}[row["reached"]],
            f"{row['mb_s']:,.0f}",
        ]
        for row in rows
    ]
    print_table(["", "ratio", "turns", "limit", "", "MB/s"], lines)


def _limit(row: dict[str, Any]) -> str:
    return "" if row["limit"] is None else f">= {row['limit']:.2f}"


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    judged = [row for row in rows if row["reached"] is not None]
    missed = [f"{r['name']} ({r['value']:.2f}, {_limit(r)})" for r in judged if not r["reached"]]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} limits are reached."] if judged else []
    return [*lines, f"Missed: {', '.join(missed)}."] if missed else lines


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
