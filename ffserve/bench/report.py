"""What came out: tables for a reader, one document of JSON, a verdict in words."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ffserve
from ffserve.bench import yardsticks
from ffserve.bench.runner import RATIO
from ffserve.cli.terminal import print_table

Rows = Sequence[dict[str, Any]]
FIGURES = (("mb_s", ",.0f"), ("cpu_us", ",.1f"), ("own_mb", ",.0f"))


def machine(folder: str) -> dict[str, Any]:
    """Return what a figure depends on, nothing that names the machine or its user."""
    from ffserve.engine.io import describe

    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "engine": describe(),
        "fio": yardsticks.has_fio(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ffserve": ffserve.__version__,
    }


def _file_system(folder: str) -> str:
    folder = os.path.realpath(folder)
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, name, *_ = line.split()
        below = folder == place or folder.startswith(place.rstrip("/") + "/")
        if below and len(place) >= len(best):
            best, kind = place, name
    return kind


def describe_machine(facts: dict[str, Any]) -> str:
    """Return the machine in one line."""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Linux "
        f"{facts['kernel']}, {facts['file_system']}; {facts['engine']}"
    )


def print_group(title: str, rows: Rows) -> None:
    """Write one group's rows as a table."""
    import click

    yardstick = rows[0]
    against = ""
    if yardstick["against"]:
        against = f"; 1.00 is {yardstick['against']}, {yardstick['yardstick_mb_s']:,.0f} MB/s"
    click.echo(f"\n{title}{against}")
    heads = ["", "ratio", "turns", "limit", "", "MB/s", "CPU us", "own MB"]
    lines = [
        [
            row["what"],
            shown(row["value"], row["unit"]),
            f"{shown(row['low'], row['unit'])} to {shown(row['high'], row['unit'])}",
            limit_of(row),
            {None: "", True: "reached", False: "missed"}[row["reached"]],
            *(figure(row, name, form) if first else "" for name, form in FIGURES),
        ]
        for row, first in zip(rows, _first_of_each(rows), strict=True)
    ]
    print_table(heads, lines)


def print_both(title: str, rows: Rows) -> None:
    """Write one group's rows of two trees as a table."""
    import click

    click.echo(f"\n{title}")
    lines = [
        [
            row["name"],
            shown(row["value"], row["unit"]),
            shown(row["other"], row["unit"]),
            f"{row['quotient']:.3f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            "less is better" if row["at_most"] else "",
        ]
        for row in rows
    ]
    print_table(["", "this", "other", "this/other", "turns", ""], lines)


def shown(value: float, unit: str) -> str:
    """Return a value with its unit; ratios without."""
    digits = 2 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}" + ("" if unit == RATIO else f" {unit}")


def limit_of(row: dict[str, Any]) -> str:
    """Return a row's limit as text, empty when it has none."""
    if row["limit"] is None:
        return ""
    return f"{'<=' if row['at_most'] else '>='} {shown(row['limit'], row['unit'])}"


def figure(row: dict[str, Any], name: str, form: str) -> str:
    """Return one of the figures behind a row; empty when it was not taken."""
    return format(row[name], form) if name in row else ""


def _first_of_each(rows: Rows) -> list[bool]:
    """Whether a row is its contestant's first."""
    return [row["who"] not in {r["who"] for r in rows[:k]} for k, row in enumerate(rows)]


def _is_throughput(row: dict[str, Any]) -> bool:
    return bool(row["unit"] == RATIO and not row["at_most"])


def verdict(rows: Rows) -> list[str]:
    """Return what the rows say, in sentences."""
    said = []
    contests: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if _is_throughput(row):
            contests.setdefault(row["name"].rpartition("/")[0], []).append(row)
    for group in contests.values():
        ours = [row for row in group if row["who"].startswith("ffserve ")]
        others = [row for row in group if row not in ours and "in order" not in row["what"]]
        if not ours or not others:
            continue
        best = max(ours, key=lambda row: row["value"])
        peer = max(others, key=lambda row: row["value"])
        times = best["value"] / peer["value"]
        said.append(
            f"{best['state'].capitalize()}, samples of {best['bytes']:,} bytes: {best['who']} "
            f"delivers {best['value']:.2f} of {best['against']}, {times:.1f} times what the "
            f"fastest of the others does ({peer['who']}, {peer['value']:.2f})."
        )
    judged = [row for row in rows if row["reached"] is not None]
    if judged:
        missed = [row for row in judged if not row["reached"]]
        said.append(f"{len(judged) - len(missed)} of {len(judged)} limits are reached.")
        if missed:
            named = ", ".join(
                f"{row['name']} ({shown(row['value'], row['unit'])}, {limit_of(row)})"
                for row in missed
            )
            said.append(f"Missed: {named}.")
    return said


def document(facts: dict[str, Any], rows: Rows, notes: Sequence[str]) -> dict[str, Any]:
    """Return all of it for JSON, floats rounded to four digits that count."""
    return {"machine": facts, "notes": list(notes), "rows": [_rounded(row) for row in rows]}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
