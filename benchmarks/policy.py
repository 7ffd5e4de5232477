"""The policy in the real thing: `python -m benchmarks.policy [PART…]`.

Job processes, a daemon and a disk, beside the simulated hit rate, which is the same policy under a
virtual clock, and Belady's, which knows the whole future. The parts:

    cells     one, two and four jobs, announced and silent, the disk fast enough; bytes read as the
              daemon counts them, as the kernel counts the processes', and as the device counts
    disk      a disk that gives half of what two jobs ask for: announced, silent, simulated, ideal
    memory    daemon and jobs in a cgroup whose limit leaves no room for a page cache
    rivals    two data sets that compete: a job on one is four times as fast as that on the other
    pages     the same jobs through the page cache, everything fitting and a quarter
    announce  10 million samples announced by four jobs, and what others notice
    cost      what the policy does for a used sample, by itself
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import node
from benchmarks.announcing import announcing
from benchmarks.confine import CannotConfine, Group, confined
from ffserve.cache.simulation import Job, Simulation, belady, shuffled

SAMPLES, SIZE = 12_000, 31_000
SLOT = 32 * 1024
"""What a sample of SIZE takes, with the device's blocks at both ends."""
PACE = 4_000.0
BATCH = 64
WARM, EPOCHS = 2, 2
OVERHEAD = 40 << 20
"""Memory of the daemon beside its arena, and of each job, that a limit leaves room for."""
AGREE = 0.01
"""The daemon's and the kernel's count of what was read for it differ by no more than this."""
PARTS = ("cells", "disk", "memory", "rivals", "pages", "announce", "cost")


@dataclass(frozen=True)
class Cell:
    """One row. Args: disk: samples a second; None: as fast as it is."""

    title: str
    job_count: int
    announces: bool
    share: float
    pace: float = PACE
    disk: float | None = None
    how: str = "ffserve"
    warm: float = WARM


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


def specs(cell: Cell, path: str) -> list[dict[str, Any]]:
    """Return what the jobs are told."""
    return [
        {"path": path, "how": cell.how, "seed": seed, "pace": cell.pace, "batch": BATCH,
         "announces": cell.announces}
        for seed in range(cell.job_count)
    ]  # fmt: skip


def run(
    cell: Cell, path: str, *, daemon: Group | None = None, jobs: Group | None = None
) -> dict[str, Any]:
    """Run a cell for real, and simulate it."""
    epoch_s = SAMPLES / cell.pace
    warm_s, seconds = cell.warm * epoch_s, EPOCHS * epoch_s
    found = node.watch(
        specs(cell, path),
        arena=int(SAMPLES * SLOT * cell.share),
        warm_s=warm_s,
        seconds=seconds,
        join_daemon=daemon.join if daemon else None,
        join_jobs=jobs.join if jobs else None,
    )
    demand = cell.pace * cell.job_count * found["took_s"]
    row = {
        "title": cell.title,
        "cache": found["slots"] / SAMPLES,
        "hit_rate": 1 - found["reads"] / found["used"],
        "requests": found["asked"] / found["used"],
        "speed": found["used"] / demand,
        "stalled": found["stalled_s"] / found["took_s"],
        **{key: found[key] for key in ("daemon_bytes", "kernel_bytes", "device_bytes", "wasted")},
        **simulated(cell, found["slots"], warm_s, seconds),
    }
    needed = demand * (1 - row["belady"])
    row["ideal"] = 1.0 if cell.disk is None else min(cell.disk * found["took_s"] / needed, 1.0)
    return row


def simulated(cell: Cell, slots: int, warm_s: float, seconds: float) -> dict[str, float]:
    """Return hit rate and speed of the same cell in simulation, and Belady's hit rate."""
    jobs = [
        Job(shuffled(SAMPLES, seed), pace=cell.pace, announces=cell.announces, batch=BATCH)
        for seed in range(cell.job_count)
    ]
    simulation = Simulation(SAMPLES, slots / SAMPLES, jobs, disk_rate=cell.disk)
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
def halved(path: str, job_count: int) -> Iterator[tuple[float, float, Group | None, str]]:
    """A disk that gives half of what the jobs ask for.

    Yields: the jobs' pace and the disk's speed in samples a second, the daemon's cgroup, and the
        way. Where the disk cannot be slowed down, the jobs become fast.
    """
    rate = PACE * job_count / 2
    try:
        with confined(read_rate=int(rate * (SIZE + 512)), path=path) as group:
            yield PACE, rate, group, "the daemon's reads held down by a cgroup"
    except CannotConfine as error:
        rate = measured(path)
        why = f"the jobs ask for twice what the disk was measured to give, since {error}"
        yield 2 * rate / job_count, rate, None, why


def measured(path: str, seconds: float = 2.0) -> float:
    """Return the samples a second that the disk gives in random order."""
    import numpy as np

    import ffserve

    with ffserve.open(path, server="off") as reader:
        begun, count = time.monotonic(), 0
        for batch in reader.batches(np.random.default_rng(9).permutation(len(reader)), count=128):
            count += len(batch)
            if time.monotonic() - begun > seconds:
                break
        return count / (time.monotonic() - begun)


def slow_disk(path: str) -> list[dict[str, Any]]:
    """Two jobs, a quarter of the data in memory, half of the disk that they ask for."""
    rows = []
    with halved(path, 2) as (pace, disk, group, way):
        print(f"a disk of half the demand: {way}")
        for announces in (True, False):
            title = f"two jobs{'' if announces else ', silent'}, half the disk"
            cell = Cell(title, 2, announces, 0.25, pace, disk, warm=3)
            rows.append(run(cell, path, daemon=group))
            show(rows[-1])
    print(f"announcing is worth a factor of {rows[0]['speed'] / rows[1]['speed']:.2f} in speed")
    return rows


# --------------------------------------------------------------------------- a memory limit


def little_memory(path: str) -> list[dict[str, Any]]:
    """Two jobs and the daemon, all in one cgroup with little more than the arena."""
    rows = []
    for share in (0.25, 0.5):
        size = int(SAMPLES * SLOT * share) + 3 * OVERHEAD
        with confined(memory_size=size) as group:
            cell = Cell("two jobs, memory limited", 2, True, share)
            rows.append({**run(cell, path, daemon=group, jobs=group), "killed": group.killed()})
            show(rows[-1])
            print(f"  limit {size >> 20} MiB, at most {group.peak() >> 20} MiB taken, "
                  f"{group.killed()} processes killed")  # fmt: skip
    return rows


# --------------------------------------------------------------------------- rivals


def rivals(paths: tuple[str, str]) -> list[dict[str, Any]]:
    """A fast job and a slow one, each on its data set; a quarter of both fits together."""
    found = node.watch(
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
        print(f"  {group['jobs']}: {group['used'] >> 20} MiB kept, never below "
              f"{group['floor'] >> 20} MiB")  # fmt: skip
    return rows


# --------------------------------------------------------------------------- the page cache

PAGES_SAMPLES = 24_000
WAYS = ("preadv", "preadv-random", "mmap-random", "ffrecord")
"""mmap without advice reads 8 MiB at a touch on some machines, and is left out."""


def against_pages(
    folder: Path, ways: list[str], job_counts: list[int], chosen: list[str] | None
) -> list[dict[str, Any]]:
    """Jobs that announce nothing and compute nothing, by the daemon and through the page cache.

    Both in a cgroup of the same size: what daemon and jobs of ours took at most, tables included.
    """
    path = node.data(folder, PAGES_SAMPLES, SIZE, "-pages")
    rows = []
    print(f"{'':40s}{'an epoch takes':>16s}{'reads of the data':>18s}")
    for share, title in ((1.05, "everything fits"), (0.25, "a quarter fits")):
        if chosen and title not in chosen:
            continue
        for job_count in job_counts:
            peak: int | None = None
            for way in ["ffserve", *ways]:
                node.drop_cache(path)
                limit = peak or int(PAGES_SAMPLES * SLOT * share) + (job_count + 4) * OVERHEAD
                with confined(memory_size=limit) as group:
                    found = node.watch(
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
                    "epoch_s": job_count * found["took_s"] / epochs,
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
    """Return the microseconds a used sample that the policy takes in the daemon, by batch size;
    and what the jobs' progress takes beside it (positions, and departures from orders)."""
    jobs = [Job(shuffled(samples, k), pace=1e5) for k in range(job_count)]
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
        # The middle of several parts: others may run on the machine.
        parts: list[tuple[float, float]] = []
        for _ in range(6):
            spent["policy"] = spent["progress"] = 0.0
            used = sum(job.used for job in jobs)
            for _ in range(50 * 1024 // batch // job_count):
                for job, progress in zip(jobs, simulation._progress, strict=True):
                    job.batch = batch
                    simulation._step(job, progress, simulation.uses.now + batch / 1e5 / job_count)
            used = sum(job.used for job in jobs) - used
            parts.append((1e6 * spent["policy"] / used, 1e6 * spent["progress"] / used))
        costs[f"policy, batches of {batch}"], costs[f"job progress, batches of {batch}"] = (
            np.median(parts, axis=0).tolist()
        )
    simulation.close()
    return costs


def main() -> None:
    """Run the parts that are asked for; all of them unless told otherwise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="for the data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    parser.add_argument("--cell", action="append", help="such as 'two jobs', 'a quarter fits'")
    parser.add_argument("--way", action="append", choices=WAYS, help="of 'pages'; those there are")
    parser.add_argument("--jobs", type=int, action="append", help="of 'pages': 1 and 2")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {' '.join(unknown)}")
    folder: Path = options.folder
    folder.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    for part in options.parts or PARTS:
        try:
            if part == "cost":
                found[part] = policy_cost()
                for what, cost in found[part].items():
                    print(f"{what:32s} {cost:5.2f} us a used sample")
            elif part == "announce":
                found[part] = announcing(folder)
            elif part == "pages":
                ways = options.way or [way for way in WAYS if way != "ffrecord" or _original()]
                found[part] = against_pages(folder, ways, options.jobs or [1, 2], options.cell)
            elif part == "rivals":
                both = tuple(node.data(folder, SAMPLES, SIZE, name) for name in ("", "-other"))
                found[part] = rivals((both[0], both[1]))
            else:
                path = node.data(folder, SAMPLES, SIZE)
                print(HEAD)
                if part == "disk":
                    found[part] = slow_disk(path)
                elif part == "memory":
                    found[part] = little_memory(path)
                else:
                    found[part] = []
                    for cell in CELLS:
                        if not options.cell or cell.title in options.cell:
                            found[part].append(run(cell, path))
                            show(found[part][-1])
        except CannotConfine as error:
            print(f"{part}: not measured, {error}")
            found[part] = str(error)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def _original() -> bool:
    return importlib.util.find_spec("ffrecord") is not None


if __name__ == "__main__":
    main()
