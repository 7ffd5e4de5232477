"""The caching policy with real jobs, daemon and disk: `python -m benchmarks.policy [PART…]`.

Each row is beside the simulated hit rate, which is the same policy under a virtual clock, and
Belady's, which knows the whole future. The parts:

    cells     one, two and four jobs, announced and silent, on a disk that is fast enough; bytes
              read as the daemon counts them, as the kernel counts the processes', and by the device
    orders    one job and two at 10,000 samples per second each (--pace), with 8 and 64 KiB
    disk      a disk with half the rate that two jobs need: announced, silent, simulated, ideal
    memory    daemon and jobs in a cgroup whose limit leaves no memory for a page cache
    competing two data sets that compete: the job on one is four times as fast as that on the other
    pages     the same jobs through the page cache, with everything and with a quarter fitting
    announce  four jobs announce 10 million samples each, and the effect on other clients
    cost      the policy's time per used sample, by itself
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.announcing import announcing
from benchmarks.closed_loop import watch, write_data
from benchmarks.harness.cgroup import Cgroup, NoCgroup, limited
from ffserve import cli
from ffserve.bench.child_processes import interruptible
from ffserve.bench.samples import evict
from ffserve.cache.simulation import SimulatedJob, Simulation, belady, shuffled
from ffserve.engine.io import open_direct
from ffserve.errors import FFServeError

SAMPLES, SIZE = 12_000, 31_000
SLOT = 32 * 1024
"""Bytes of a slot for a sample of SIZE, with the device's blocks at both ends."""
PACE = 4_000.0
BATCH = 64
WARM, EPOCHS = 2, 2
OVERHEAD = 40 << 20
"""Memory of the daemon besides its arena, and of each job, that a limit allows for."""
AGREE = 0.01
"""The daemon's and the kernel's count of the bytes read for it differ by at most this share."""
PARTS = ("cells", "orders", "disk", "memory", "competing", "pages", "announce", "cost")


@dataclass(frozen=True)
class Cell:
    """One row.

    Args: disk: samples per second that the disk delivers; None: it is not limited.
    """

    title: str
    job_count: int
    announces: bool
    share: float
    pace: float = PACE
    disk: float | None = None
    how: str = "ffserve"
    warm: float = WARM
    samples: int = SAMPLES
    size: int = SIZE

    @property
    def arena(self) -> int:
        """Bytes of the arena."""
        return int(self.samples * self.size * self.share)


CELLS = [
    Cell(title, job_count, announces, share)
    for title, job_count, announces in (
        ("one job", 1, True),
        ("two jobs", 2, True),
        ("four jobs", 4, True),
        ("one job, silent", 1, False),
        ("two jobs, silent", 2, False),
    )
    for share in (0.25, 0.5)
]


ORDERS = [
    Cell(f"{title}, {size >> 10} KiB", job_count, True, 0.25, 10_000.0, samples=samples, size=size)
    for samples, size in ((65_536, 8192), (8192, 65_536))
    for title, job_count in (("one job", 1), ("two jobs", 2))
]


def specs(cell: Cell, path: str) -> list[dict[str, Any]]:
    """Return the jobs of a cell."""
    return [
        {"path": path, "how": cell.how, "seed": seed, "pace": cell.pace, "batch": BATCH,
         "announces": cell.announces}
        for seed in range(cell.job_count)
    ]  # fmt: skip


def run(
    cell: Cell, path: str, *, daemon: Cgroup | None = None, jobs: Cgroup | None = None
) -> dict[str, Any]:
    """Run a cell and simulate it."""
    epoch_s = cell.samples / cell.pace
    warm_s, seconds = cell.warm * epoch_s, EPOCHS * epoch_s
    found = watch(
        specs(cell, path),
        arena=cell.arena,
        warm_s=warm_s,
        seconds=seconds,
        join_daemon=daemon.join if daemon else None,
        join_jobs=jobs.join if jobs else None,
    )
    demand = cell.pace * cell.job_count * found["seconds"]
    row = {
        "title": cell.title,
        "cache": found["slots"] / cell.samples,
        "hit_rate": 1 - found["reads"] / found["used"],
        "requests": found["asked"] / found["used"],
        "speed": found["used"] / demand,
        "stalled": found["stalled_s"] / found["seconds"],
        **{key: found[key] for key in ("daemon_bytes", "kernel_bytes", "device_bytes", "wasted")},
        **simulated(cell, path, warm_s, seconds),
    }
    needed = demand * (1 - row["belady"])
    row["ideal"] = 1.0 if cell.disk is None else min(cell.disk * found["seconds"] / needed, 1.0)
    return row


def simulated(cell: Cell, path: str, warm_s: float, seconds: float) -> dict[str, float]:
    """Return hit rate and speed of the same cell in simulation, and Belady's hit rate with as many
    samples in memory as it has bytes for."""
    file, alignment = open_direct(path)
    os.close(file)
    jobs = [
        SimulatedJob(
            shuffled(cell.samples, seed), pace=cell.pace, announces=cell.announces, batch=BATCH
        )
        for seed in range(cell.job_count)
    ]
    simulation = Simulation(
        cell.samples,
        cell.share,
        jobs,
        sample_size=cell.size,
        alignment=alignment,
        disk_rate=cell.disk,
    )
    result = simulation.run(warm_s=warm_s, seconds=seconds)
    simulation.close()
    return {
        "simulated": result.hit_rate,
        "simulated_speed": result.used / (seconds * cell.pace * cell.job_count),
        "belady": belady(result.trace, result.slots, result.measured_from),
    }


HEAD = (
    f"{'':33s}{'cache':>6s}{'hits':>7s}{'simul.':>7s}{'Belady':>7s}{'asked':>7s}{'speed':>6s}"
    f"{'simul.':>7s}{'ideal':>6s}{'stall':>6s}{'wasted':>7s}  daemon/kernel daemon/device"
)


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    agreed = row["daemon_bytes"] / max(row["kernel_bytes"], 1)
    mark = "" if abs(agreed - 1) <= AGREE else " (differ!)"
    print(
        f"{row['title']:33s}{row['cache']:6.1%}{row['hit_rate']:7.1%}{row['simulated']:7.1%}"
        f"{row['belady']:7.1%}{row['requests']:7.1%}{row['speed']:6.2f}"
        f"{row['simulated_speed']:7.2f}{row['ideal']:6.2f}{row['stalled']:6.1%}"
        f"{row['wasted']:7d}  {agreed:13.3f}{mark}"
        f"{row['daemon_bytes'] / max(row['device_bytes'], 1):14.3f}",
        flush=True,
    )


# --------------------------------------------------------------------------- a slow disk


@contextlib.contextmanager
def halved(path: str, job_count: int) -> Iterator[tuple[float, float, Cgroup | None, str]]:
    """Limit the disk to half of the rate that the jobs need.

    Yields: the jobs' pace and the disk's rate in samples per second, the daemon's cgroup, and a
        description. Where the disk cannot be limited, the jobs are made faster.
    """
    rate = PACE * job_count / 2
    try:
        with limited(read_rate=int(rate * (SIZE + 512)), path=path) as group:
            yield PACE, rate, group, "a cgroup limits the daemon's reads"
    except NoCgroup as error:
        rate = measured(path)
        why = f"the jobs need twice the measured rate of the disk, since {error}"
        yield 2 * rate / job_count, rate, None, why


def measured(path: str, seconds: float = 2.0) -> float:
    """Return the samples per second that the disk delivers in random order."""
    import ffserve

    with ffserve.open(path, server="off") as reader:
        begun, count = time.monotonic(), 0
        for batch in reader.batches(np.random.default_rng(9).permutation(len(reader)), count=128):
            count += len(batch)
            if time.monotonic() - begun > seconds:
                break
        return count / (time.monotonic() - begun)


def slow_disk(path: str) -> list[dict[str, Any]]:
    """Run two jobs with a quarter of the data in memory and half of the disk rate they need."""
    rows = []
    with halved(path, 2) as (pace, disk, group, way):
        print(f"a disk with half the rate that the jobs need: {way}")
        for announces in (True, False):
            title = f"two jobs{'' if announces else ', silent'}, half the disk"
            cell = Cell(title, 2, announces, 0.25, pace, disk, warm=3)
            rows.append(run(cell, path, daemon=group))
            show(rows[-1])
    print(f"speed with announcements / without: {rows[0]['speed'] / rows[1]['speed']:.2f}")
    return rows


# --------------------------------------------------------------------------- a memory limit


def little_memory(path: str) -> list[dict[str, Any]]:
    """Run two jobs and the daemon in one cgroup with little more memory than the arena."""
    rows = []
    for share in (0.25, 0.5):
        cell = Cell("two jobs, memory limited", 2, True, share)
        size = cell.arena + 3 * OVERHEAD
        with limited(memory_size=size) as group:
            rows.append({**run(cell, path, daemon=group, jobs=group), "killed": group.killed()})
            show(rows[-1])
            print(f"  limit {size >> 20} MiB, peak {group.peak() >> 20} MiB, "
                  f"{group.killed()} processes killed")  # fmt: skip
    return rows


# --------------------------------------------------------------------------- competing data sets


def competing(*paths: str) -> list[dict[str, Any]]:
    """Run a fast job and a slow one, each on its own data; a quarter of both fits together."""
    found = watch(
        [
            {"path": path, "how": "ffserve", "seed": seed, "pace": pace, "batch": BATCH,
             "announces": announces}
            for seed, (path, pace, announces) in enumerate(
                [(paths[0], 4 * PACE, False), (paths[1], PACE, False)]
            )
        ],
        arena=SAMPLES * SLOT // 2,
        warm_s=3 * SAMPLES / PACE,
        seconds=2 * SAMPLES / PACE,
    )  # fmt: skip
    rows = []
    for title, job in zip(("a fast job", "a slow job on other data"), found["jobs"],
                          strict=True):  # fmt: skip
        rows.append({"title": title, "hit_rate": 1 - job["read"] / (job["used"] * (SIZE + 512))})
        print(f"{title:33s}      {rows[-1]['hit_rate']:7.1%}")
    for group in found["groups"]:
        print(f"  {group['jobs']}: {group['used'] >> 20} MiB in the arena, at least "
              f"{group['floor'] >> 20} MiB guaranteed")  # fmt: skip
    return rows


# --------------------------------------------------------------------------- the page cache

PAGES_SAMPLES = 24_000
WAYS = ("preadv", "preadv-random", "mmap-random", "ffrecord")
"""mmap without advice is left out: on some machines each fault reads 8 MiB."""


def against_pages(
    folder: Path, ways: list[str], job_counts: list[int], chosen: list[str] | None
) -> list[dict[str, Any]]:
    """Run jobs without announcements and computing, through the daemon and through the page cache.

    Both run in a cgroup of the same size: the peak of the daemon and its jobs, tables included.
    """
    path = write_data(folder, PAGES_SAMPLES, SIZE, "-pages")
    rows = []
    print(f"{'':40s}{'epoch':>16s}{'read / data set':>18s}")
    for share, title in ((1.05, "everything fits"), (0.25, "a quarter fits")):
        if chosen and title not in chosen:
            continue
        for job_count in job_counts:
            peak: int | None = None
            for way in ["ffserve", *ways]:
                evict([path])
                limit = peak or int(PAGES_SAMPLES * SLOT * share) + (job_count + 4) * OVERHEAD
                with limited(memory_size=limit) as group:
                    found = watch(
                        [
                            {"path": path, "how": way, "seed": seed, "pace": 0, "batch": BATCH,
                             "announces": False}
                            for seed in range(job_count)
                        ],
                        arena=int(PAGES_SAMPLES * SLOT * share) if way == "ffserve" else None,
                        warm_s=5,
                        seconds=4,
                        warm_used=PAGES_SAMPLES,
                        join_daemon=group.join,
                        join_jobs=group.join,
                    )  # fmt: skip
                    peak = peak or group.peak()
                epochs = found["used"] / PAGES_SAMPLES
                row = {
                    "title": f"{title}, {job_count} jobs, {way}",
                    "limit": limit,
                    "epoch_s": job_count * found["seconds"] / epochs,
                    "read": found["kernel_bytes"] / (epochs * PAGES_SAMPLES * SIZE),
                }
                rows.append(row)
                print(f"{row['title']:40s}{row['epoch_s']:14.2f} s{row['read']:18.1%}", flush=True)
    return rows


# --------------------------------------------------------------------------- the policy's cost


POLICY = ("victims", "invalidate", "admit", "admit_expendable", "enter", "leave", "idle_victims")


def policy_cost(
    samples: int = 1_000_000, job_count: int = 2, batches: tuple[int, ...] = (64, 256, 1024)
) -> dict[str, float]:
    """Return the policy's microseconds per used sample in the daemon, and those of tracking the
    jobs' progress (positions, and departures from orders), by batch size."""
    jobs = [SimulatedJob(shuffled(samples, k), pace=1e5) for k in range(job_count)]
    simulation = Simulation(samples, 0.25, jobs)
    simulation.run(warm_s=0.6 * samples / 1e5, seconds=0.01)
    spent = {"policy": 0.0, "progress": 0.0}

    def timed(inner: Any, whose: str) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*arguments, **more)
            finally:
                spent[whose] += time.perf_counter() - start

        return call

    for name in POLICY:
        policy = simulation.cache.policy
        setattr(policy, name, timed(getattr(policy, name), "policy"))
    for progress in simulation._progress:
        for name in ("asked", "advance_to"):
            setattr(progress, name, timed(getattr(progress, name), "progress"))
    costs: dict[str, float] = {}
    for batch in batches:
        # The median of several parts, since other programs may run on the machine.
        parts: list[tuple[float, float]] = []
        for _ in range(6):
            spent["policy"] = spent["progress"] = 0.0
            used = sum(job.used for job in jobs)
            for _ in range(50 * 1024 // batch // job_count):
                for job, progress in zip(jobs, simulation._progress, strict=True):
                    job.batch = batch
                    simulation._step(
                        job, progress, simulation.next_use.turn_at + batch / 1e5 / job_count
                    )
            used = sum(job.used for job in jobs) - used
            parts.append((1e6 * spent["policy"] / used, 1e6 * spent["progress"] / used))
        costs[f"policy, batches of {batch}"], costs[f"job progress, batches of {batch}"] = (
            np.median(parts, axis=0).tolist()
        )
    simulation.close()
    return costs


def main() -> int:
    """Run the parts given as arguments, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="directory of the data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument(
        "--pace", type=float, help="for 'orders': samples per second of a job (10000)"
    )
    parser.add_argument("--cell", action="append", help="only this row, such as 'two jobs'")
    parser.add_argument("--way", action="append", choices=WAYS, help="for 'pages': only this one")
    parser.add_argument(
        "--jobs", type=int, action="append", help="for 'pages': number of jobs (1, 2)"
    )
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part: {' '.join(sorted(unknown))}")
    try:
        with interruptible():
            found = {part: _run_part(part, options) for part in options.parts or PARTS}
    except FFServeError as error:
        return cli.report(error)
    except KeyboardInterrupt:
        return cli.EXIT_INTERRUPTED
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def _run_part(part: str, options: argparse.Namespace) -> Any:
    folder: Path = options.folder
    folder.mkdir(exist_ok=True)
    if part == "cost":
        costs = policy_cost()
        for name, cost in costs.items():
            print(f"{name:32s} {cost:5.2f} us per used sample")
        return costs
    if part == "announce":
        return announcing(folder)
    try:
        if part == "pages":
            ways = options.way or [way for way in WAYS if way != "ffrecord" or _original()]
            return against_pages(folder, ways, options.jobs or [1, 2], options.cell)
        if part == "competing":
            names = ("", "-other")
            return competing(*(write_data(folder, SAMPLES, SIZE, name) for name in names))
        print(HEAD)
        if part == "orders":
            return _run_cells(
                [replace(cell, pace=options.pace or cell.pace) for cell in ORDERS], options
            )
        path = write_data(folder, SAMPLES, SIZE)
        if part == "disk":
            return slow_disk(path)
        if part == "memory":
            return little_memory(path)
        return _run_cells(CELLS, options)
    except NoCgroup as error:
        print(f"{part}: not measured: {error}")
        return str(error)


def _run_cells(cells: list[Cell], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for cell in cells:
        if not options.cell or cell.title in options.cell:
            rows.append(run(cell, write_data(options.folder, cell.samples, cell.size)))
            show(rows[-1])
    return rows


def _original() -> bool:
    return importlib.util.find_spec("ffrecord") is not None


if __name__ == "__main__":
    sys.exit(main())
