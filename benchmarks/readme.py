"""Measured sections of documents: text around recorded rows, written between two markers.

A place such as ``{hot/4KiB/lease:.0f}`` is the median of the row of that name; ``{machine}`` is the
machine, ``{jobs}`` the table of two jobs with all peers, ``{spread-…}`` how far turns differ.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measuring import RATIO
from ffserve.errors import UsageError

BEGIN, END = "<!-- measured: begin; from docs/bench.json -->\n", "<!-- measured: end -->"
PLACE = re.compile(r"\{([\w/. -]+):(\.\df)\}")

TEXT = """\
![Samples a second of a loader with two workers, a bar for each package, with its order](docs/images/bench.png)

A DataLoader with two workers collates samples that are in memory into tensors, each package in its own format and as its documents recommend. A bar says in which order: random, out of a shuffle buffer, or one of the package's own, which are easier. ffserve has checked every sample.

| | 4 KiB | 100 KiB |
|---|---|---|
| in memory / memcpy: `read_batch` of 64 | {hot/4KiB/batch64/clients1/read_batch:.2f} | {hot/100KiB/batch64/clients1/read_batch:.2f} |
| in memory / memcpy: two clients | {hot/4KiB/batch64/clients2/read_batch:.2f} | {hot/100KiB/batch64/clients2/read_batch:.2f} |
| in memory / memcpy: torch DataLoader, 2 workers, raw samples | {torch/4KiB/raw:.2f} | {torch/100KiB/raw:.2f} |
| from disk / fio: several batches of 64 in flight | {cold/4KiB/depth128/in_flight:.2f} | {cold/100KiB/depth128/in_flight:.2f} |
| from disk / fio: one batch of 64 at a time | {cold/4KiB/depth64/batch64:.2f} | {cold/100KiB/depth64/batch64:.2f} |
| from disk / fio: without a daemon, several batches | {cold/4KiB/depth128/engine:.2f} | {cold/100KiB/depth128/engine:.2f} |
| from disk / fio: two jobs, one order | {jobs/4KiB/depth128/one-order:.2f} | {jobs/100KiB/depth128/one-order:.2f} |
| from disk / fio: two jobs, orders of their own | {jobs/4KiB/depth128/own-orders:.2f} | {jobs/100KiB/depth128/own-orders:.2f} |
| in order / fio in order | {stream/4KiB/daemon:.2f} | {stream/100KiB/daemon:.2f} |
| from S3 behind a slow link: milliseconds to the first batch ({first-batches}) | | {peers/100KiB/ffserve/first-20ms:.0f} |

Ratios are medians of turns on one virtual machine, which is noisy: {machine}. [BENCHMARKS.md](docs/BENCHMARKS.md#recorded-figures) has the other figures and packages; `ffserve bench` measures your machine and your files.
"""  # noqa: E501

FIGURES = """\
The turns of a row of ffserve differ by {spread-half} % in the median row (highest minus lowest, as a share of the median) and by {spread-tenth} % in the worst tenth.

| in memory / memcpy | 4 KiB | 100 KiB |
|---|---|---|
| `read_batch`, batches of 256, 1 client | {hot/4KiB/batch256/clients1/read_batch:.2f} | {hot/100KiB/batch256/clients1/read_batch:.2f} |
| `read` (list of arrays), batches of 64 | {hot/4KiB/batch64/clients1/read:.2f} | {hot/100KiB/batch64/clients1/read:.2f} |
| torch DataLoader with tensors / the same loader over samples in memory | {torch/4KiB/tensors:.2f} | {torch/100KiB/tensors:.2f} |

| from disk / fio | 4 KiB | 100 KiB |
|---|---|---|
| several batches of 64 in flight / fio that reads the extents of the records | {cold-extents/4KiB/depth128/in_flight:.2f} | {cold-extents/100KiB/depth128/in_flight:.2f} |
| the same, records that begin at blocks of 4 KiB ([how](FORMATS.md#ffrecord)) | {cold/4KiB-at-blocks/depth128/in_flight:.2f} | |
| 2 clients, a batch of 64 each | {cold/4KiB/depth128/clients2:.2f} | {cold/100KiB/depth128/clients2:.2f} |
| one batch of 64 at a time / fio that reads these extents a batch at a time | {cold-batches/4KiB/depth64/batch64:.2f} | {cold-batches/100KiB/depth64/batch64:.2f} |

{jobs}

{peers}64 clients at once, half of their samples in memory, get {crowd/4KiB/throughput:.2f} (4 KiB) and {crowd/100KiB/throughput:.2f} (100 KiB) of the throughput of two. The 99th percentile of a batch is {crowd/4KiB/p99:.1f} and {crowd/100KiB/p99:.1f} times its median; the slowest client gets {crowd/4KiB/fair:.2f} and {crowd/100KiB/fair:.2f} of the mean. Random batches of 1024 samples of 100 bytes are {tokens/100B/numpy:.1f} times as fast as a numpy array's `table[indices]`. A second process opens 10 million samples in {open/10M/time:.1f} ms. A miss costs the daemon {cold/4KiB/depth128/daemon-cpu:.1f} µs of CPU at 4 KiB and {cold/100KiB/depth128/daemon-cpu:.1f} µs at 100 KiB, checksum included; while a client only hits, it uses {hot/4KiB/daemon-cpu:.2f} % of a core.
"""  # noqa: E501


WINDOWED = """\
| rate / fio in order | 1 KiB | 4 KiB |
|---|---|---|
| through the daemon, several batches of 64 in flight | {windowed/1KiB/daemon:.2f} | {windowed/4KiB/daemon:.2f} |
| through the daemon, one batch of 64 at a time | {windowed/1KiB/daemon64:.2f} | {windowed/4KiB/daemon64:.2f} |
| without a daemon, several batches | {windowed/1KiB/engine:.2f} | {windowed/4KiB/engine:.2f} |
| without a daemon, one batch at a time | {windowed/1KiB/engine64:.2f} | {windowed/4KiB/engine64:.2f} |

| quality | 1 KiB | 4 KiB | a shuffle buffer of 16,384, 4096 samples | uniform |
|---|---|---|---|---|
| displacement | {windowed/1KiB/displacement:.2f} | {windowed/4KiB/displacement:.2f} | {windowed/1KiB/buffer-displacement:.2f}, {windowed/4KiB/buffer-displacement:.2f} | 1 |
| together, per cent | {windowed/1KiB/together:.2f} | {windowed/4KiB/together:.2f} | {windowed/1KiB/buffer-together:.2f}, {windowed/4KiB/buffer-together:.2f} | below 0.01 |
| design effect | {windowed/1KiB/design:.1f} | {windowed/4KiB/design:.1f} | {windowed/1KiB/buffer-design:.0f}, {windowed/4KiB/buffer-design:.0f} | 1 |
"""  # noqa: E501

SECTIONS = {"README.md": TEXT, "TORCH.md": WINDOWED, "BENCHMARKS.md": FIGURES}
"""The text of the measured section of each document."""
JOBS = {
    "one-order": "ffserve, one order for both jobs", "own-orders": "ffserve, orders of their own",
}  # fmt: skip


def section(recorded: dict[str, Any], document: str) -> str:
    """Return a document's section without its markers.

    Args:   recorded: the document that `report.record` writes.
    Raises: UsageError for a row that is missing.
    """
    values = {row["name"]: row["value"] for row in recorded["rows"]}

    def value(place: re.Match[str]) -> str:
        if place[1] not in values:
            raise UsageError(f"the row {place[1]} of {document} has not been recorded")
        return format(values[place[1]], place[2])

    text = PLACE.sub(value, SECTIONS[document])
    tables = {
        "machine": _machine, "jobs": _two_jobs, "peers": _peers, "first-batches": _first_batches,
        "spread-half": _spread, "spread-tenth": _most,
    }  # fmt: skip
    for name, table in tables.items():
        if f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", table(recorded))
    return text


def _spread(recorded: dict[str, Any], part: float = 0.5) -> str:
    """Return the quantile of (highest - lowest) / median over ffserve's ratios, per cent."""
    spreads = [
        (row["high"] - row["low"]) / row["value"]
        for row in recorded["rows"]
        if row["unit"] == RATIO and row["value"] and row["turns"] > 1
        if row["contestant"].startswith("ffserve")
    ]
    return f"{100 * float(np.quantile(spreads, part)):.0f}" if spreads else "0"


def _most(recorded: dict[str, Any]) -> str:
    return _spread(recorded, 0.9)


def _machine(recorded: dict[str, Any]) -> str:
    facts = recorded["machine"]
    kernel = ".".join(facts["kernel"].split(".")[:2])
    text = f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB of memory, "
    text += f"Linux {kernel}, {facts['file_system']} on {facts.get('disk', 'a disk')}"
    if (read_ahead := facts.get("read_ahead_kib")) is not None:
        text += f" with {read_ahead} KiB of read-ahead"
    if limit := facts.get("disk_limit"):
        text += (
            f", which delivers at most {limit} to fio and to everybody else "
            "(docs/BENCHMARKS.md says why)"
        )
    return text


def _first_batches(recorded: dict[str, Any]) -> str:
    """Return the milliseconds to the first batch of packages that stream, or that they failed."""
    values = {row["name"]: f"{row['value']:,.0f}" for row in recorded["rows"]}
    names = ((peer, f"peers/100KiB/{peer}/first-20ms") for peer in ("MosaicML", "litData"))
    return ", ".join(f"{peer} {values.get(name, 'failed')}" for peer, name in names)


def _two_jobs(recorded: dict[str, Any]) -> str:
    """Return the table of two jobs: ffserve first, then the peers by their rate."""
    sizes, failed = ("4KiB", "100KiB"), -1.0
    found: dict[str, dict[str, float]] = {}
    for row in recorded["rows"]:
        state, size, _, *_ = [*row["name"].split("/"), "", ""]
        if state == "jobs" and size in sizes:
            label = JOBS.get(row["name"].rpartition("/")[2], row["description"])
            found.setdefault(label, {})[size] = row["value"]
    for name in recorded.get("left_out", {}):
        if name.startswith("jobs/"):
            found.setdefault(name.rpartition("/")[2], {})[name.split("/")[1]] = failed
    if not found.keys() >= set(JOBS.values()):
        raise UsageError("the rows jobs/ of README.md have not been recorded")
    peers = sorted(found.keys() - set(JOBS.values()), key=lambda k: -max(found[k].values()))
    lines = ["| two jobs on one data set, from disk / fio | 4 KiB | 100 KiB |", "|---|---|---|"]
    for label in [*JOBS.values(), *peers]:
        shown = [
            "" if (value := found[label].get(size)) is None
            else "failed" if value == failed else f"{value:.2f}"
            for size in sizes
        ]  # fmt: skip
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


PEER_COLUMNS = {
    "per-core": ("samples/s a core", ",.0f"), "cpu": ("CPU µs", ".0f"), "pss": ("PSS, MB", ",.0f"),
    "first": ("first batch, ms", ",.0f"), "first-20ms": ("over 20 ms, ms", ",.0f"),
    "bytes": ("bytes / size", ".2f"), "requests": ("requests", ",.0f"),
    "design": ("design effect", ".1f"), "lost": ("lost, %", ".1f"),
    "doubled": ("doubled, %", ".1f"),
}  # fmt: skip


def _peers(recorded: dict[str, Any]) -> str:
    """Return the table of the rows peers/; nothing until they have been recorded."""
    found: dict[str, dict[str, float]] = {}
    for row in recorded["rows"]:
        if row["name"].startswith("peers/100KiB/"):
            _, _, who, what = row["name"].split("/")
            found.setdefault(who, {})[what] = row["value"]
    if not found:
        return ""
    heads = [head for head, _ in PEER_COLUMNS.values()]
    lines = [f"| loader, 100 KiB | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for who, values in found.items():
        cells = [
            format(values[what], form) if values.get(what, -1.0) >= 0 else ""
            for what, (_, form) in PEER_COLUMNS.items()
        ]
        lines.append(f"| {who} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def measured(text: str) -> str:
    """Return the text between the markers of a document."""
    return text.partition(BEGIN)[2].partition(END)[0]


def write(recorded: dict[str, Any], path: Path) -> None:
    """Replace the section between the markers of a document. Raises: UsageError."""
    if path.name not in SECTIONS:
        raise UsageError(
            f"this document has no measured section; those that have: {', '.join(SECTIONS)}",
            path=str(path),
        )
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise UsageError("the markers of the measured section are missing", path=str(path))
    path.write_text(before + begin + section(recorded, path.name) + end + after)
