"""Sizes of processes over time, and whether they grow.

Memory is judged by what a process uses: its private memory without what allocators keep free for
the next time (`allocator.py`). It goes up and down with what the process happens to do, by as much
as caches, batches and messages may have; a leak raises its low values. So the lowest fifth of a
third of the run is compared with that of the third before, and what a process may hold by its
limits is no growth. When all clients have ended, a daemon holds what it held at its start, and the
tables that its status names.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allocator import used_size

from ffserve.client.local import local_chunks, window_reads
from ffserve.limits import BOUNCES_KEPT, ORIGIN_THREADS, OWN_SIZE, TABLE_SAMPLE_SIZE

MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Of one process: bytes of memory (resident; proportional share; private, not of files; what it
    uses of these; in memory files that it has open), descriptors, threads, mappings."""

    rss: int
    pss: int
    anonymous: int
    used: int
    memory_files: int
    descriptors: int
    threads: int
    mappings: int


def lowest_fifth(values: list[float]) -> float:
    """Return the value below which a fifth of these are: a single one may be wrong, since memory
    that malloc keeps may never have been written to, and then takes none."""
    return sorted(values)[len(values) // 5]


GROWTH: dict[str, tuple[Callable[[list[float]], float], float, int]] = {
    "used": (lowest_fifth, 1.1, 16 * MIB),
    "memory_files": (statistics.median, 1.0, 160 * MIB),
    "descriptors": (statistics.median, 1.1, 8),
    "threads": (statistics.median, 1.0, 4),
    "mappings": (statistics.median, 1.1, 32),
}
"""The figure of the last third of a run may be so many times that of the second third, and so much
more: an arena is 64 to 192 MiB by chance. RSS, PSS and private memory are recorded and not judged:
they count pages that others map or not, and what malloc keeps."""
KNOWN = {
    ("client alone", "used"): 64 * MIB
    + local_chunks.KEPT_SIZE
    + local_chunks.REUSED_SIZE
    + 2 * window_reads.AHEAD_SIZE,
    ("daemon succeeded", "used"): OWN_SIZE + BOUNCES_KEPT,
    ("daemon kept", "used"): OWN_SIZE + BOUNCES_KEPT,
    ("client remote", "descriptors"): 24 + 2 * ORIGIN_THREADS,
    ("client replaced", "descriptors"): 24 + 2 * ORIGIN_THREADS,
}
"""What a kind of process may use: itself and the limits of its caches, which fill up. Of these
200 MiB a client took 80 to 155 over seven minutes: 30 for the tables of its files, 17 for their
chunks, 33 for Python's own allocator (28 at first, with as many objects), the rest for windows, the
program, and pages that malloc keeps: those that were never written to count as free and take none,
so that a young process seems to use less. The daemons that are handed over, and killed, are young
as long as that happens often, by chance in one third of a run more than in another. A client that
has read remote files by itself, while its daemon was away, keeps the connections to their origin
and to a cache."""
QUIET_SIZE = 8 * MIB
"""A quiet daemon may use this much more than OWN_SIZE, besides tables and buffers for reads: 256
jobs, counters, log lines, and sessions that the next collection of garbage frees."""
STORE_SIZE = 16 * MIB
"""A daemon with a store may use this much more: its program, shards of remote files that are kept
open (8 bytes a sample, some KB each), and what 16 threads leave in malloc's arenas."""
FEWEST = 5
"""Measurements in a third, below which nothing is said."""


def sizes_of(pid: int, said: Path) -> Sizes:
    """Measure a process. Args: said: see `used_size`. Raises: OSError, ValueError: it has ended."""
    base = Path(f"/proc/{pid}")
    status = _fields(base / "status")
    rollup = _fields(base / "smaps_rollup")
    seen: set[int] = set()
    memory_files = descriptors = 0
    for name in os.listdir(base / "fd"):
        descriptors += 1
        path = base / "fd" / name
        try:
            if os.readlink(path).startswith("/memfd:"):
                state = os.stat(path)
                if state.st_ino not in seen:
                    seen.add(state.st_ino)
                    memory_files += state.st_blocks * 512
        except OSError:
            continue  # closed meanwhile
    with (base / "maps").open("rb") as maps:
        mappings = sum(1 for _ in maps)
    return Sizes(
        rss=status["VmRSS"] * 1024,
        pss=rollup["Pss"] * 1024,
        anonymous=status["RssAnon"] * 1024,
        used=used_size(said, pid),
        memory_files=memory_files,
        descriptors=descriptors,
        threads=status["Threads"],
        mappings=mappings,
    )


def _fields(path: Path) -> dict[str, int]:
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0])
    if not found:
        raise ValueError(f"{path} is empty: the process has ended")
    return found


class Series:
    """Measurements of processes that live through the whole run, by name. Args: said: see
    `used_size`."""

    def __init__(self, said: Path) -> None:
        self._said = said
        self._rows: dict[str, list[tuple[float, Sizes]]] = {}

    def measure(self, name: str, pid: int, now_s: float) -> None:
        """Add a measurement of a process that lives."""
        self._rows.setdefault(name, []).append((now_s, sizes_of(pid, self._said)))

    def last(self, name: str) -> Sizes:
        """Return the last measurement of a process."""
        return self._rows[name][-1][1]

    def thirds(self, seconds: float) -> dict[str, dict[str, list[float]]]:
        """Return the figures of the three thirds of the run, by process and quantity: medians, but
        for what GROWTH says."""
        found: dict[str, dict[str, list[float]]] = {}
        for name, rows in self._rows.items():
            parts = [
                [sizes for when, sizes in rows if third * seconds / 3 <= when < end]
                for third, end in enumerate((seconds / 3, 2 * seconds / 3, float("inf")))
            ]
            if min(map(len, parts)) < FEWEST:
                continue
            found[name] = {
                quantity: [figure([getattr(s, quantity) for s in p]) for p in parts]
                for quantity in Sizes.__dataclass_fields__
                for figure in (GROWTH[quantity][0] if quantity in GROWTH else statistics.median,)
            }
        return found

    def as_rows(self) -> dict[str, list[dict[str, float]]]:
        """Return all measurements, for the record."""
        return {
            name: [{"s": round(when, 1), **asdict(sizes)} for when, sizes in rows]
            for name, rows in self._rows.items()
        }


def quiet_size(status: dict[str, Any]) -> int:
    """Return the bytes that a daemon without clients may use. Args: status: its own."""
    samples = sum(shard["count"] for shard in status["shards"])
    return OWN_SIZE + BOUNCES_KEPT + samples * TABLE_SAMPLE_SIZE + QUIET_SIZE + STORE_SIZE


def growth(thirds: dict[str, dict[str, list[float]]], alone: Set[str] = frozenset()) -> list[str]:
    """Return what grew from the second third to the last, in words.

    Args: alone: clients that have read files by themselves, while their daemon did not answer:
        they keep what "client alone" does from then on.
    """
    found = []
    for name, quantities in thirds.items():
        for quantity, (_, factor, more) in GROWTH.items():
            _, second, last = quantities[quantity]
            kind = "client alone" if name in alone else name.partition(".")[0]
            known = KNOWN.get((kind, quantity), 0)
            if last > max(second * factor + more, known):
                found.append(f"{quantity} of {name}: {second:.0f} in the second third, {last:.0f}")
    return found
