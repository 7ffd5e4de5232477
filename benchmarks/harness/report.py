"""The result of a benchmark: tables, sentences, a JSON document, and comparison with recorded rows.

Only ratios of ffserve to a yardstick of the same run are compared with recorded ones, never times:
another machine is neither progress nor a regression.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measuring import RATIO
from ffserve.errors import UsageError

MeasuredRows = Sequence[dict[str, Any]]
Table = tuple[str, list[str], list[list[str]]]
"""A title, the heads of the columns, and the lines."""
FIGURES = (("mb_s", ",.0f"), ("cpu_us", ",.1f"), ("anonymous_mb", ",.0f"))
SAME_MACHINE = ("cpu", "cores", "memory_gib", "file_system", "disk", "disk_limit")
"""The facts in which two machines differ; others, such as the kernel, change on one machine."""
TOLERANCE = 0.25
"""See docs/BENCHMARKS.md, "Comparing"."""


# --------------------------------------------------------------------------- tables


def group_table(title: str, rows: MeasuredRows) -> Table:
    """Return one group's rows as a table."""
    first = rows[0]
    if first["yardstick"]:
        title += f"; 1.00 is {first['yardstick']}"
        if "yardstick_mb_s" in first:
            title += f", {first['yardstick_mb_s']:,.0f} MB/s"
    heads = ["", "ratio", "turns", "limit", "", "MB/s", "CPU us", "anon. MB"]
    seen: set[str] = set()
    lines = []
    for row in rows:
        figures = [
            format(row[name], form) if name in row and row["contestant"] not in seen else ""
            for name, form in FIGURES
        ]
        seen.add(row["contestant"])
        lines.append(
            [
                row["description"],
                shown(row["value"], row["unit"]),
                f"{shown(row['low'], row['unit'])} to {shown(row['high'], row['unit'])}",
                limit_of(row),
                {None: "", True: "reached", False: "missed"}[row["reached"]],
                *figures,
            ]
        )
    return title, heads, lines


def both_table(title: str, rows: MeasuredRows) -> Table:
    """Return one group's rows over two installations as a table."""
    heads = ["", "this", "other", "this/other", "turns", ""]
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
    return title, heads, lines


def shown(value: float, unit: str) -> str:
    """Return a value with its unit; ratios have none."""
    digits = 2 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}" + ("" if unit == RATIO else f" {unit}")


def limit_of(row: dict[str, Any]) -> str:
    """Return a row's limit as text, empty when it has none."""
    if row["limit"] is None:
        return ""
    return f"{'<=' if row['at_most'] else '>='} {shown(row['limit'], row['unit'])}"


# --------------------------------------------------------------------------- sentences


def verdict(rows: MeasuredRows) -> list[str]:
    """Return sentences: ffserve beside its fastest peer, and the limits that were missed."""
    sentences = []
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["unit"] == RATIO and not row["at_most"]:
            groups.setdefault(row["name"].rpartition("/")[0], []).append(row)
    for group in groups.values():
        own = [row for row in group if row["contestant"].startswith("ffserve ")]
        others = [
            row for row in group
            if row not in own and "in order" not in row["description"]
            and not row["name"].endswith("/nothing")  # a bound, not a peer
        ]  # fmt: skip
        if not own or not others:
            continue
        best = max(own, key=lambda row: row["value"])
        peer = max(others, key=lambda row: row["value"])
        times = best["value"] / peer["value"]
        sentences.append(
            f"{best['state'].capitalize()}, samples of {best['bytes']:,} bytes: "
            f"{best['contestant']} reaches {best['value']:.2f} of {best['yardstick']}, "
            f"{times:.1f} times the fastest peer ({peer['contestant']}, {peer['value']:.2f})."
        )
    judged = [row for row in rows if row["reached"] is not None]
    if judged:
        missed = [row for row in judged if not row["reached"]]
        sentences.append(f"{len(judged) - len(missed)} of {len(judged)} limits are reached.")
        if missed:
            named = ", ".join(
                f"{row['name']} ({shown(row['value'], row['unit'])}, {limit_of(row)})"
                for row in missed
            )
            sentences.append(f"Missed: {named}.")
    return sentences


# --------------------------------------------------------------------------- recorded rows


def reasons(left_out: Mapping[str, str]) -> list[str]:
    """Return a line per reason for which rows are left out."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return [f"left out: {', '.join(some)}: {reason}" for reason, some in names.items()]


def document(
    facts: dict[str, Any], rows: MeasuredRows, notes: Sequence[str], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """Return everything for JSON, floats rounded to four significant digits."""
    return {
        "machine": facts,
        "notes": list(notes),
        "left_out": dict(left_out),
        "rows": [_rounded(row) for row in rows],
    }


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def check_machine(path: Path, facts: dict[str, Any]) -> None:
    """Raise UsageError if a file has rows of another machine."""
    if not path.exists():
        return
    recorded = json.loads(path.read_text())["machine"]
    for name in SAME_MACHINE:
        if recorded.get(name) != facts.get(name):
            raise UsageError(
                f"cannot record here: the rows in it are of another machine ({name}: "
                f"{recorded.get(name)}, not {facts.get(name)})",
                path=str(path),
                hint="record all rows into a new file",
            )


def record(path: Path, result: dict[str, Any]) -> None:
    """Merge a document's rows into a file: replace those of the same names, keep the others.

    A row whose contestant failed is removed; the file keeps the reason.

    Raises: UsageError if the file has rows of another machine.
    """
    check_machine(path, result["machine"])
    old = json.loads(path.read_text()) if path.exists() else {"rows": []}
    new = {row["name"]: row for row in result["rows"]}
    left_out = {**old.get("left_out", {}), **result["left_out"]}
    left_out = {name: reason for name, reason in left_out.items() if name not in new}
    merged = [new.pop(row["name"], row) for row in old["rows"] if row["name"] not in left_out]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in [*merged, *new.values()])
    facts = json.dumps(result["machine"], ensure_ascii=False)
    failed = json.dumps(left_out, ensure_ascii=False, indent=0)
    part = path.with_name(path.name + ".part")
    part.write_text(f'{{"machine": {facts},\n"left_out": {failed},\n"rows": [\n{lines}\n]}}\n')
    os.replace(part, path)


def _comparable(row: dict[str, Any]) -> bool:
    return bool(row["unit"] == RATIO and row["contestant"].startswith("ffserve"))


def compare(recorded: MeasuredRows, measured: MeasuredRows) -> tuple[list[str], int, int]:
    """Compare rows of ffserve by name.

    A row is worse when both its median and its best turn are worse than the recorded median by
    more than TOLERANCE of it.

    Returns: a line per row that is worse; how many are better by more than TOLERANCE; how many
        were compared.
    """
    known = {row["name"]: row for row in recorded if _comparable(row)}
    worse, better, compared = [], 0, 0
    for row in measured:
        old = known.get(row["name"])
        if old is None or not _comparable(row):
            continue
        compared += 1
        before, now, best = old["value"], row["value"], row["low" if row["at_most"] else "high"]
        if row["at_most"]:
            fell = min(now, best) > before * (1 + TOLERANCE)
            rose = now < before / (1 + TOLERANCE)
        else:
            fell = max(now, best) < before * (1 - TOLERANCE)
            rose = now > before / (1 - TOLERANCE)
        better += rose
        if fell:
            worse.append(f"{row['name']}: recorded {before:.2f}, measured {now:.2f}")
    return worse, better, compared
