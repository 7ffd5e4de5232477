"""The rows of `ffserve bench`: ffserve beside the ceilings of memory and of the disk.

Everything is read by this process, with one client. A ratio is computed within a turn, in which the
ceiling and the ways to read run one after the other; every other turn goes the other way round.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ffserve
from ffserve.bench import ceilings, child_processes
from ffserve.bench.ceilings import Delivered
from ffserve.bench.samples import MIB, BenchmarkData, evict
from ffserve.errors import FFServeError, UsageError

COLD_ARENA_SIZE = 512 * MIB
HOT_BATCH = 256
IN_FLIGHT = 64
"""The samples of a batch where several batches are in flight."""
WARM_BATCHES = 2
Ways = dict[str, Callable[[], float]]
"""The end of a row's name → a run of that way to read, which returns bytes a second."""


@dataclass(frozen=True)
class Comparison:
    """Ways of ffserve to read some data, and the ceiling that they are compared with.

    Args:
        name: the beginning of the names of its rows.
        limits: the end of each row's name, and the project's own goal for it, if there is one.
        ceiling: its name. is_substitute: it stands in for one that is not installed, so no goal is
            judged.
        ceiling_rate: runs it and returns bytes a second.
        ways: makes what the ways need for as long as its context lasts.
    """

    name: str
    title: str
    limits: Mapping[str, float | None]
    ceiling: str
    is_substitute: bool
    ceiling_rate: Callable[[], float]
    ways: Callable[[], contextlib.AbstractContextManager[Ways]]

    def row_names(self, texts: Sequence[str] = ()) -> list[str]:
        """Return the names of its rows that contain one of the texts; all if there are none."""
        names = [f"{self.name}/{way}" for way in self.limits]
        return [name for name in names if not texts or any(text in name for text in texts)]

    def measure(self, turns: int, names: Sequence[str]) -> list[dict[str, Any]]:
        """Run all turns and return a dict for each of the rows with these names.

        Returns: name, contestant, yardstick, value (the median ratio), low, high, limit, reached
            (None where nothing is judged), turns, mb_s and yardstick_mb_s.
        """
        wanted = [way for way in self.limits if f"{self.name}/{way}" in names]
        rates: dict[str, list[float]] = {way: [] for way in ("", *wanted)}
        with self.ways() as ways:
            runs = {"": self.ceiling_rate, **ways}
            for turn in range(turns):
                for way in [*rates][:: 1 if turn % 2 == 0 else -1]:
                    rates[way].append(runs[way]())
        return [self._row(way, rates[way], rates[""]) for way in wanted]

    def _row(self, way: str, rates: list[float], ceiling: list[float]) -> dict[str, Any]:
        ratios = [rate / most for rate, most in zip(rates, ceiling, strict=True)]
        value, limit = statistics.median(ratios), self.limits[way]
        return {
            "name": f"{self.name}/{way}",
            "contestant": f"ffserve {way}",
            "yardstick": self.ceiling,
            "value": value,
            "low": min(ratios),
            "high": max(ratios),
            "limit": limit,
            "reached": None if limit is None or self.is_substitute else value >= limit,
            "turns": len(ratios),
            "mb_s": statistics.median(rates) / 1e6,
            "yardstick_mb_s": statistics.median(ceiling) / 1e6,
        }


def comparisons(data: BenchmarkData, seconds: float) -> list[Comparison]:
    """Return all comparisons for a data set, with runs of so many seconds."""
    return [
        _hot(data, seconds),
        _cold(data, seconds, 128, {"in_flight": 0.95, "batch256": 0.8}),
        _cold(data, seconds, 64, {"batch64": 0.8}),
    ]


def _hot(data: BenchmarkData, seconds: float) -> Comparison:
    case = {"sample_size": data.mean, "count": data.count, "batch": HOT_BATCH, "seed": 1}
    case["once"] = False

    @contextlib.contextmanager
    def ways() -> Iterator[Ways]:
        with (
            child_processes.daemon(data.roots, 64 * MIB + 2 * data.size) as daemon,
            ffserve.open(data.paths, server=daemon.socket) as reader,
        ):
            daemon.await_arena()
            for _ in reader.batches(range(data.count)):
                pass
            before = daemon.status()["cache"]["blocks_read"]
            yield {
                "read_batch": lambda: rate_of(
                    ceilings.delivering(case, lambda some: reader.read_batch(some).buffer.nbytes),
                    seconds,
                ),
                "read": lambda: rate_of(
                    ceilings.delivering(
                        case, lambda some: sum(sample.nbytes for sample in reader.read(some))
                    ),
                    seconds,
                ),
            }
            if daemon.status()["cache"]["blocks_read"] > before:
                raise FFServeError(
                    f"the daemon read from disk in a hot run: its arena does not hold {data.size} "
                    "bytes"
                )

    return Comparison(
        name=f"hot/{data.name}/batch{HOT_BATCH}/clients1",
        title=f"hot, {data.name}, batches of {HOT_BATCH}, 1 client",
        limits={"read_batch": 0.85, "read": None},
        ceiling="memcpy",
        is_substitute=False,
        ceiling_rate=lambda: rate_of(ceilings.memcpy(case), seconds),
        ways=ways,
    )


def _cold(
    data: BenchmarkData, seconds: float, depth: int, limits: dict[str, float | None]
) -> Comparison:
    """Every sample is read once, in random order, by a new daemon."""
    arena = max(64 * MIB, min(COLD_ARENA_SIZE, data.size // 2))
    order = np.random.default_rng(1).permutation(data.count)

    def in_flight(reader: ffserve.Reader, size: int) -> Delivered:
        for batch in reader.batches(order, count=size, size=1 << 40):
            yield len(batch), batch.buffer.nbytes

    def by_batches(reader: ffserve.Reader, size: int) -> Delivered:
        for first in range(0, data.count - size + 1, size):
            batch = reader.read_batch(order[first : first + size])
            yield len(batch), batch.buffer.nbytes

    def run(read: Callable[[ffserve.Reader, int], Delivered], batch: int) -> float:
        evict(data.paths)
        size = min(batch, max(1, data.count // 4))  # a small data set must last for some batches
        warm = min(WARM_BATCHES, data.count // size - 1)
        with child_processes.daemon(data.roots, arena) as daemon:
            daemon.await_arena()
            with ffserve.open(data.paths, server=daemon.socket) as reader:
                return rate_of(read(reader, size), seconds, warm)

    def disk() -> float:
        evict(data.paths)
        if ceilings.has_fio():
            figures = ceilings.fio(data.paths, data.mean, depth, seconds)
            return float(figures["size"] / figures["seconds"])
        case = {"sample_size": data.mean, "count": data.count, "paths": data.paths, "seed": 1}
        return rate_of(ceilings.raw_reads({**case, "batch": ceilings.RAW_THREADS}), seconds)

    found: Ways = {
        "in_flight": lambda: run(in_flight, IN_FLIGHT),
        "batch256": lambda: run(by_batches, 256),
        "batch64": lambda: run(by_batches, 64),
    }
    substitute = f"{ceilings.RAW_THREADS} Python threads of preadv (no fio)"
    return Comparison(
        name=f"cold/{data.name}/depth{depth}",
        title=f"cold, {data.name}, against {depth} reads in flight",
        limits=limits,
        ceiling=f"fio at depth {depth}" if ceilings.has_fio() else substitute,
        is_substitute=not ceilings.has_fio(),
        ceiling_rate=disk,
        ways=lambda: contextlib.nullcontext(found),
    )


def rate_of(delivered: Delivered, seconds: float, warm: int = WARM_BATCHES) -> float:
    """Warm up, read for so many seconds, and return bytes a second.

    Raises: UsageError when nothing is left to read after the warm-up.
    """
    for _ in range(warm):
        next(delivered, None)
    size = 0
    started = now = time.perf_counter()
    for batch in delivered:
        assert isinstance(batch, tuple)
        size += batch[1]
        now = time.perf_counter()
        if now - started >= seconds:
            break
    delivered.close()
    if not size:
        raise UsageError("no samples were left after the warm-up: the data set is too small")
    return size / (now - started)
