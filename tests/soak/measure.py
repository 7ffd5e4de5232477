"""Sizes of processes over time, and whether they grow."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Of one process: bytes of memory (resident; proportional share; private, not of files; in
    memory files that it has open), descriptors, threads, mappings."""

    rss: int
    pss: int
    anonymous: int
    memory_files: int
    descriptors: int
    threads: int
    mappings: int


GROWTH: dict[str, tuple[float, int]] = {
    "anonymous": (1.1, 16 * MIB),
    "memory_files": (1.0, 160 * MIB),
    "descriptors": (1.1, 8),
    "threads": (1.0, 4),
    "mappings": (1.1, 32),
}
"""The median of the last third of a run may be so many times that of the second third, and so much
more: an arena is 64 to 192 MiB by chance. RSS and PSS are recorded and not judged: they count
shared pages that others map or not."""
FEWEST = 5
"""Measurements in a third, below which nothing is said."""


def sizes_of(pid: int) -> Sizes:
    """Measure a process. Raises: OSError, ValueError: it has ended."""
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
    """Measurements of processes that live through the whole run, by name."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[float, Sizes]]] = {}

    def measure(self, name: str, pid: int, now_s: float) -> None:
        """Add a measurement of a process that lives."""
        self._rows.setdefault(name, []).append((now_s, sizes_of(pid)))

    def last(self, name: str) -> Sizes:
        """Return the last measurement of a process."""
        return self._rows[name][-1][1]

    def thirds(self, seconds: float) -> dict[str, dict[str, list[float]]]:
        """Return the medians of the three thirds of the run, by process and quantity."""
        found: dict[str, dict[str, list[float]]] = {}
        for name, rows in self._rows.items():
            parts = [
                [sizes for when, sizes in rows if third * seconds / 3 <= when < end]
                for third, end in enumerate((seconds / 3, 2 * seconds / 3, float("inf")))
            ]
            if min(map(len, parts)) < FEWEST:
                continue
            found[name] = {
                quantity: [statistics.median(getattr(s, quantity) for s in p) for p in parts]
                for quantity in Sizes.__dataclass_fields__
            }
        return found

    def as_rows(self) -> dict[str, list[dict[str, float]]]:
        """Return all measurements, for the record."""
        return {
            name: [{"s": round(when, 1), **asdict(sizes)} for when, sizes in rows]
            for name, rows in self._rows.items()
        }


def growth(thirds: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return what grew from the second third to the last, in words."""
    found = []
    for name, quantities in thirds.items():
        for quantity, (factor, more) in GROWTH.items():
            _, second, last = quantities[quantity]
            if last > second * factor + more:
                found.append(f"{quantity} of {name}: {second:.0f} in the second third, {last:.0f}")
    return found
