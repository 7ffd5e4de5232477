"""Measure everything, record it, compare it, draw it: `make bench`, `python -m benchmarks`.

Rows may be run a few at a time: `--record FILE` puts what was measured in the place of what stood
there under the same names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import cases, compare, picture, readme
from ffserve import cli
from ffserve.bench import report, yardsticks
from ffserve.bench.cases import installed
from ffserve.bench.runner import Bench, Checkout, measure, measure_both
from ffserve.cli import own
from ffserve.config import ENGINES
from ffserve.errors import FFServeError

QUICK_S = 0.3


def main() -> int:
    """Run what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="for data, kept")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each run in a turn")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="of the daemons")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the data's sizes")
    parser.add_argument("--list", action="store_true", help="show the names of the rows")
    parser.add_argument("--make", action="store_true", help="make the data, measure nothing")
    parser.add_argument("--json", type=Path, help="write all of this run there")
    parser.add_argument("--record", type=Path, help="put this run's rows into that file")
    parser.add_argument("--compare", type=Path, help="with that file; exit 1 if worse")
    parser.add_argument("--picture", type=Path, help="draw what was measured, or stands in "
                        "--record's file, as PNG or SVG")  # fmt: skip
    parser.add_argument("--readme", type=Path, help="write the measured section of that README")
    parser.add_argument("--against", type=Path, metavar="DIR", help="run another checkout of "
                        "ffserve beside this one, and show both and their quotient")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="the important rows, short runs")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    if asked.quick:
        asked.only = asked.only or list(cases.QUICK)
        asked.seconds = min(asked.seconds, QUICK_S)
    try:
        if asked.against:
            return _against(asked)
        rows = [] if asked.draw_only else _measure(asked)
        return 0 if asked.list or asked.make else _conclude(asked, rows)
    except FFServeError as error:
        cli.report(error)
        return cli.exit_code(error)
    except KeyboardInterrupt:
        return cli.EXIT_INTERRUPTED


def _against(asked: argparse.Namespace) -> int:
    """Measure this tree and another one in turns."""
    asked.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    with (
        own.interruptible(),
        Bench(str(asked.folder), asked.seconds, asked.engine) as here,
        Bench(
            str(asked.folder), asked.seconds, asked.engine, Checkout(str(asked.against))
        ) as there,
    ):
        facts = report.machine(str(asked.folder))
        print(report.describe_machine(facts), flush=True)
        both = zip(*(cases.groups(each, [], asked.scale) for each in (here, there)), strict=True)
        for group, other in both:
            kept, its = group.only(tuple(asked.only)), other.only(tuple(asked.only))
            if kept is None or its is None:
                continue
            found = measure_both(kept, its, asked.turns, notes.append)
            if found:
                report.print_both(kept.title, found)
            rows += found
    if asked.json:
        document = report.document(facts, rows, notes)
        asked.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    for line in notes:
        print(line)
    return 1 if notes else 0


def _measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    asked.folder.mkdir(parents=True, exist_ok=True)
    rivals, notes = ([], []) if asked.no_peers else installed()
    if not yardsticks.has_fio():
        notes.append(f"{yardsticks.FIO_MISSING}: rows about the disk are not judged")
    rows: list[dict[str, Any]] = []
    with own.interruptible(), Bench(str(asked.folder), asked.seconds, asked.engine) as bench:
        kept = [
            chosen
            for group in cases.groups(bench, rivals, asked.scale)
            if (chosen := group.only(tuple(asked.only))) is not None
        ]
        if asked.list:
            for group in kept:
                for entrant in group.entrants:
                    print(*(row.name for row in entrant.rows), sep="\n")
            return []
        if asked.make:
            for group in kept:
                group.before()
                for entrant in group.entrants:
                    if entrant.optional:
                        _try(entrant.who, entrant.run)
            return []
        facts = report.machine(str(asked.folder))
        print(report.describe_machine(facts), flush=True)
        for group in kept:
            found = measure(group, asked.turns, notes.append)
            if found:
                report.print_group(group.title, found)
            rows += found
            if asked.record:  # now: a run that is broken off keeps what it has
                _record(asked.record, report.document(facts, found, notes))
    print()
    for line in [*notes, *report.verdict(rows)]:
        print(line)
    document = report.document(facts, rows, notes)
    if asked.json:
        asked.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return rows


def _try(who: str, run: Any) -> None:
    try:
        run()
    except FFServeError as error:
        print(f"{who}: {error}", file=sys.stderr)


def _record(path: Path, document: dict[str, Any]) -> None:
    """Replace the rows of the same names, add the others, keep the rest."""
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    new = {row["name"]: row for row in document["rows"]}
    kept = [new.pop(row["name"], row) for row in old["rows"]]
    merged = {"machine": document["machine"], "rows": [*kept, *new.values()]}
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in merged["rows"])
    machine = json.dumps(merged["machine"], ensure_ascii=False)
    part = path.with_name(path.name + ".part")
    part.write_text(f'{{"machine": {machine},\n"rows": [\n{lines}\n]}}\n')
    os.replace(part, path)


def _conclude(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    shown = json.loads(asked.record.read_text())["rows"] if asked.record else rows
    if asked.picture:
        try:
            picture.draw(shown, asked.picture)
        except ModuleNotFoundError as error:
            print(f"no picture: {error.name} is not installed (pip install {error.name})")
    if asked.readme:
        readme.write(shown, asked.readme)
    if asked.compare:
        recorded = json.loads(asked.compare.read_text())
        worse, better, compared = compare.compare(recorded["rows"], rows)
        print(
            f"{compared} ratios compared with {asked.compare}: {len(worse)} worse and {better} "
            f"better by more than {compare.TOLERANCE:.0%}"
        )
        for line in worse:
            print(f"  {line}")
        return 1 if worse else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
