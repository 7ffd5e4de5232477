"""Measure, record, compare and draw every row of docs/BENCHMARKS.md."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks import picture, readme, rows
from benchmarks.harness import cgroup, report
from benchmarks.harness.installation import Installation
from benchmarks.harness.kinds import installed_peers
from benchmarks.harness.measuring import Bench, Group, chosen, measure, measure_both
from ffserve import cli
from ffserve.bench import ceilings, child_processes, machine
from ffserve.cli.terminal import print_table
from ffserve.config import ENGINES
from ffserve.errors import FFServeError, UsageError

QUICK_S = 0.3
LIST_COMMAND = "python -m benchmarks --list"


def main() -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args()
    if options.quick:
        options.only = options.only or list(rows.QUICK)
        options.seconds = min(options.seconds, QUICK_S)
    try:
        with child_processes.interruptible(), _limited_disk(options):
            if options.against:
                return _compare_installations(options)
            measured = [] if options.draw_only else _measure(options)
            return 0 if options.list or options.make else _finish(options, measured)
    except FFServeError as error:
        return cli.report(error)
    except KeyboardInterrupt:
        return cli.EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--folder", type=Path, default=Path(".bench"), help="directory of the data, which is kept")
    add("--turns", type=int, default=3, help="how often all contestants run (default: 3)")
    add("--seconds", type=float, default=1.0, help="length of a run (default: 1)")
    add("--only", action="append", default=[], metavar="TEXT",
        help="only rows whose name contains TEXT; may be repeated")  # fmt: skip
    add("--quick", action="store_true", help="only the important rows, in short runs")
    add("--engine", choices=ENGINES, default="auto", help="of the daemons")
    add("--no-peers", action="store_true", help="leave other packages out")
    add("--scale", type=float, default=1.0, help="multiplies the sizes of the data")
    add("--disk-limit", type=_disk_limit, metavar="MB,READS",
        help="let the disk deliver at most MB megabytes and READS reads a second to contestants "
        "and fio alike (cgroup, needs root)")  # fmt: skip
    add("--warm-disk", action="store_true",
        help="before each contestant, read what it reads from disk once past the page cache: for "
        "virtual disks, whose hosts have in memory what was read before")  # fmt: skip
    add("--list", action="store_true", help="print the names of the rows, measure nothing")
    add("--make", action="store_true", help="write the data, measure nothing")
    add("--against", type=Path, metavar="DIR",
        help="measure another checkout of ffserve in turns with this one; print both values of "
        "each row and their quotient")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the result to FILE")
    add("--record", type=Path, metavar="FILE", help="merge the measured rows into FILE")
    add("--resume", action="store_true", help="leave out the rows that --record's file has")
    add("--minutes", type=float, default=math.inf, metavar="N",
        help="begin no group of rows after N minutes")  # fmt: skip
    add("--compare", type=_existing, metavar="FILE",
        help="compare with the rows recorded in FILE; exit code 1 if any is worse")  # fmt: skip
    add("--picture", type=Path, metavar="FILE",
        help="draw the measured rows, or those in --record's file, as PNG or SVG")  # fmt: skip
    add("--readme", type=_existing, action="append", default=[], metavar="FILE",
        help="write the measured section of FILE (README.md, TORCH.md) from the same rows; may be "
        "repeated")  # fmt: skip
    add("--draw-only", action="store_true", help="measure nothing")
    return parser


def _existing(name: str) -> Path:
    if not (path := Path(name)).is_file():
        raise argparse.ArgumentTypeError(f"missing file {name}")
    return path


def _disk_limit(text: str) -> tuple[int, int]:
    try:
        megabytes, reads = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MB,READS, such as 500,100000") from None
    return megabytes, reads


@contextlib.contextmanager
def _limited_disk(options: argparse.Namespace) -> Iterator[None]:
    """Put this process, from which all others inherit it, into a cgroup with --disk-limit."""
    if options.disk_limit is None:
        yield
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    megabytes, reads = options.disk_limit
    try:
        with cgroup.limited(
            read_rate=megabytes * 1_000_000, read_iops=reads, path=str(options.folder)
        ) as group:
            group.join()
            try:
                yield
            finally:
                group.leave()
    except cgroup.NoCgroup as error:
        raise UsageError(
            f"--disk-limit: {error}", hint="it needs root and a block device"
        ) from None


def _print(table: report.Table) -> None:
    title, heads, lines = table
    click.echo(f"\n{title}")
    print_table(heads, lines)


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    facts = machine.machine(str(options.folder))
    if options.disk_limit:
        megabytes, reads = options.disk_limit
        facts["disk_limit"] = f"{megabytes} MB/s, {reads:,} reads a second"
    if options.warm_disk:
        facts["disk"] += ", read once before"
    print(machine.describe_machine(facts), flush=True)
    return facts


def _write_json(options: argparse.Namespace, document: dict[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _compare_installations(options: argparse.Namespace) -> int:
    """Measure this tree and another one in turns; the exit code is 1 if a contestant failed."""
    options.folder.mkdir(parents=True, exist_ok=True)
    measured: list[dict[str, Any]] = []
    notes: list[str] = []
    place = str(options.folder), options.seconds, options.engine
    other_place = *place, Installation(str(options.against))
    warm = options.warm_disk
    with Bench(*place, warm_disk=warm) as here, Bench(*other_place, warm_disk=warm) as there:
        facts = _machine(options)
        both = [
            chosen(rows.groups(each, [], options.scale), options.only, LIST_COMMAND)
            for each in (here, there)
        ]
        for group, other in zip(*both, strict=True):
            found = measure_both(group, other, options.turns, notes.append)
            if found:
                _print(report.both_table(group.title, found))
            measured += found
    _write_json(options, report.document(facts, measured, notes, {}))
    for line in notes:
        print(line)
    return 1 if notes else 0


def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 60 * options.minutes
    options.folder.mkdir(parents=True, exist_ok=True)
    peers, notes = ([], []) if options.no_peers else installed_peers()
    if not ceilings.has_fio():
        notes.append(f"{ceilings.FIO_MISSING}: rows about the disk are not judged")
    measured: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    place = str(options.folder), options.seconds, options.engine
    with Bench(*place, warm_disk=options.warm_disk) as bench:
        groups = rows.groups(bench, peers, options.scale, notes.append)
        groups = chosen(groups, options.only, LIST_COMMAND)
        if options.resume and options.record and options.record.exists():
            recorded = {row["name"] for row in json.loads(options.record.read_text())["rows"]}
            groups = [kept for group in groups if (kept := group.without(recorded)) is not None]
        if options.list:
            for group in groups:
                print(*group.row_names(), sep="\n")
            return []
        if options.make:
            _make(groups)
            return []
        facts = _machine(options)
        if options.record:
            report.check_machine(options.record, facts)
        for group in groups:
            if time.monotonic() > deadline:
                notes.append(f"not measured after {options.minutes:g} minutes: {group.title}")
                continue
            failed: dict[str, str] = {}
            found = measure(group, options.turns, failed)
            left_out |= failed
            if found:
                _print(report.group_table(group.title, found))
            measured += found
            if options.record:  # now, so that an interrupted run keeps its rows
                report.record(options.record, report.document(facts, found, notes, failed))
    print()
    for line in [*notes, *report.reasons(left_out), *report.verdict(measured)]:
        print(line)
    _write_json(options, report.document(facts, measured, notes, left_out))
    return measured


def _make(groups: list[Group]) -> None:
    """Write the data and the peers' files."""
    for group in groups:
        group.prepare()
        for contestant in group.contestants:
            if contestant.optional:
                try:
                    contestant.run()
                except FFServeError as error:
                    print(f"{contestant.name}: {error}", file=sys.stderr)


def _finish(options: argparse.Namespace, measured: list[dict[str, Any]]) -> int:
    """Draw and compare; return the exit code."""
    shown = measured
    if options.record:
        recorded = json.loads(options.record.read_text())
        shown = recorded["rows"]
    elif options.readme:
        raise UsageError("--readme writes recorded rows: name their file with --record")
    if options.picture:
        try:
            picture.draw(shown, options.picture)
        except ModuleNotFoundError as error:
            print(f"no picture: {error.name} is not installed (pip install {error.name})")
    for document in options.readme:
        readme.write(recorded, document)
    if options.compare:
        recorded = json.loads(options.compare.read_text())
        worse, better, compared = report.compare(recorded["rows"], measured)
        print(
            f"{compared} ratios compared with {options.compare}: {len(worse)} worse and {better} "
            f"better by more than {report.TOLERANCE:.0%}"
        )
        for line in worse:
            print(f"  {line}")
        return 1 if worse else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
