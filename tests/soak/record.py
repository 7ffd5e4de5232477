"""The record of a long run as a section of a document: `python record.py FILE.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20


def section(record: dict[str, Any]) -> str:
    """Return the figures of a run in Markdown."""
    machine, totals = record["machine"], record["totals"]
    samples = sum(each["samples"] for each in totals.values())
    size = sum(each["size"] for each in totals.values())
    epochs = sum(each["epochs"] for each in totals.values())
    events = sum(record["events"].values())
    lines = [
        f"{record['date']}; {machine['cores']} cores, {machine['memory'] / (1 << 30):.1f} GiB of "
        f"memory, Linux {machine['kernel'].split('-')[0]}, Python {machine['python']}; seed "
        f"{record['seed']}, {record['seconds']:.0f} s: **{samples:,} samples hashed** "
        f"({size / (1 << 30):.1f} GiB, {samples / record['seconds']:,.0f} a second), {epochs:,} "
        f"epochs delivered whole, {events:,} events.",
        "",
        "| clients | processes | samples hashed | MiB | epochs | errors that had to come |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {kind} | {record['clients'].get(kind, 0):,} | {each['samples']:,} | "
        f"{each['size'] / MIB:,.0f} | {each['epochs']:,} | {each['errors']:,} |"
        for kind, each in sorted(totals.items())
    ]
    lines += ["", "| event | times |", "|---|---|"]
    lines += [f"| {event} | {count:,} |" for event, count in record["events"].items()]
    lines += [
        "",
        "Medians of the three thirds of the run; memory in MiB:",
        "",
        "| process | private | proportional (PSS) | descriptors | threads | mappings |",
        "|---|---|---|---|---|---|",
    ]
    for name, quantities in record["thirds"].items():
        cells = [
            _cell(quantities[quantity], unit)
            for quantity, unit in (
                ("anonymous", MIB),
                ("pss", MIB),
                ("descriptors", 1),
                ("threads", 1),
                ("mappings", 1),
            )
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(thirds: list[float], unit: int) -> str:
    return ", ".join(f"{value / unit:.0f}" for value in thirds)


if __name__ == "__main__":
    print(section(json.loads(Path(sys.argv[1]).read_text())), end="")
