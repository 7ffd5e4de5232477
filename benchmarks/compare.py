"""Whether a change made something slower: this run's ratios beside the recorded ones.

Only ratios of ours to a yardstick of the same run are compared, never a time: a faster machine is
no progress, a slower one no regression. A row counts as worse when it is worse than the recorded
one by more than TOLERANCE of it, and worse than that in its best turn, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ffserve.bench.runner import RATIO

TOLERANCE = 0.25
"""See docs/BENCHMARKS.md, "Noise", for how it was found."""

Rows = Sequence[dict[str, Any]]


def comparable(row: dict[str, Any]) -> bool:
    """Whether a row is one of ours and a ratio."""
    return bool(row["unit"] == RATIO and row["who"].startswith("ffserve"))


def compare(recorded: Rows, found: Rows) -> tuple[list[str], int, int]:
    """Compare rows by name.

    Returns: a line for each that became worse, how many became better by more than TOLERANCE,
        how many were compared.
    """
    known = {row["name"]: row for row in recorded if comparable(row)}
    worse, better, compared = [], 0, 0
    for row in found:
        old = known.get(row["name"])
        if old is None or not comparable(row):
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
            worse.append(f"{row['name']}: {before:.2f} was recorded, now it is {now:.2f}")
    return worse, better, compared
