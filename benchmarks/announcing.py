"""The cost of announcing very many samples, and its effect on other clients.

Four jobs, each with an order of its own for two epochs, announce at one moment to a daemon. Two
observers read other data meanwhile: one hits, which needs no daemon; one misses, so it sees the
daemon's event loop stall. To tell that from a lack of processors, the jobs then do the same without
a daemon: they check and copy, but send nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import ffserve
from benchmarks.closed_loop import wait_for, write_data
from benchmarks.harness import measuring
from benchmarks.rows import make_many, many_samples
from ffserve.bench import child_processes
from ffserve.bench.ceilings import Case, Delivered

JOBS = 4
HOT, COLD, SIZE = 256, 12_000, 31_000
ALONE_S = 3.0


def announcer(case: Case) -> Delivered:
    """Announce two epochs and report how long it takes: a contestant."""
    from ffserve.torch.announce import Announcement, Announcer

    with ffserve.open(case["path"], server=case["server"]) as reader:
        orders = [
            np.random.default_rng([case["seed"], epoch]).permutation(len(reader))
            for epoch in range(2)
        ]
        yield 0, 0
        background = Announcer(reader)
        started, cpu = time.monotonic(), time.process_time()
        current = Announcement(0, orders[0])
        announced = background.begin(current, 0, lambda: Announcement(1, orders[1]))
        returned = time.monotonic()
        background.settle()
        ended = time.monotonic()
        cpu_s = time.process_time() - cpu
        Path(f"{case['ended']}-{case['client']}").touch()
        while not os.path.exists(case["stop"]):  # so that the daemon's memory can be read
            time.sleep(0.01)
        del announced
        yield {
            "returned_s": returned - started,
            "announced_s": ended - started,
            "ended": ended,
            "cpu_s": cpu_s,
        }


def observer(case: Case) -> Delivered:
    """Read batches until the stop file exists, and report the begin and the time of each."""
    with ffserve.open(case["path"], server=case["server"]) as reader:
        random = np.random.default_rng(1)
        if case["hot"]:
            reader.read_batch(range(len(reader)))
        yield 0, 0
        begun, seconds = [], []
        while not os.path.exists(case["stop"]):
            time.sleep(0.0005)
            indices = random.integers(0, len(reader), 64 if case["hot"] else 1)
            start = time.monotonic()
            reader.read_batch(indices)
            begun.append(start)
            seconds.append(time.monotonic() - start)
        yield {"begun": begun, "batch_s": seconds}


def _memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def announcing(folder: Path, samples: int = 10_000_000) -> list[dict[str, Any]]:
    """Measure and print: with a daemon, then without."""
    many = many_samples(str(folder), samples, 100)
    make_many(many)
    paths = {
        "hot": write_data(folder, HOT, SIZE, "-hot"), "cold": write_data(folder, COLD, SIZE),
    }  # fmt: skip
    rows = []
    for with_daemon in (True, False):
        rows.append(_round(folder, many.paths[0], paths, samples, with_daemon=with_daemon))
        _show(rows[-1], samples)
    return rows


def _round(
    folder: Path, path: str, paths: dict[str, str], samples: int, *, with_daemon: bool
) -> dict[str, Any]:
    with (
        child_processes.daemon([str(folder)], 192 << 20) as daemon,
        contextlib.ExitStack() as stack,
    ):
        daemon.await_arena()
        directory = os.path.dirname(daemon.socket)
        stop, ended = os.path.join(directory, "stop"), os.path.join(directory, "ended")
        common = {"seed": 0, "warm": 1, "seconds": 1e9, "stop": stop, "ended": ended}
        observers = [
            stack.enter_context(
                measuring.contestant(
                    {**common, "function": "benchmarks.announcing:observer", "clients": 1,
                     "path": each, "hot": name == "hot", "server": daemon.socket}
                )
            )
            for name, each in paths.items()
        ]  # fmt: skip
        jobs = stack.enter_context(
            measuring.contestant(
                {**common, "function": "benchmarks.announcing:announcer", "clients": JOBS,
                 "path": path, "server": daemon.socket if with_daemon else "off"}
            )
        )  # fmt: skip
        for each in observers:
            each.begin()
        pid = daemon.process.pid
        usual = -_cpu(pid)
        time.sleep(ALONE_S)
        usual = (usual + _cpu(pid)) / ALONE_S
        memory, cpu, begun = _memory(pid), _cpu(pid), time.monotonic()
        jobs.begin()
        wait_for(
            lambda: all(os.path.exists(f"{ended}-{k}") for k in range(JOBS)),
            "the jobs have announced",
        )
        over = time.monotonic()
        grown = _memory(pid) - memory
        # Without its work for the observers.
        cpu = _cpu(pid) - cpu - usual * (over - begun)
        Path(stop).touch()
        announced = jobs.finish().clients
        seen = [each.finish().clients[0] for each in observers]
        wait_for(lambda: not daemon.status()["progress"], "the daemon has forgotten the jobs")
        left = _memory(pid) - memory
    over = min(over, max(each["ended"] for each in announced))
    row: dict[str, Any] = {
        "daemon": with_daemon,
        "returned_s": max(each["returned_s"] for each in announced),
        "announced_s": max(each["announced_s"] for each in announced),
        "job_cpu_s": max(each["cpu_s"] for each in announced),
        "daemon_cpu_ns_per_position": 1e9 * cpu / (2 * JOBS * samples),
        "daemon_bytes_per_sample": grown / samples,
        "left_bytes_per_sample": left / samples,
    }
    for name, each in zip(paths, seen, strict=True):
        row[f"{name}_before_ms"] = _percentiles_ms(each, begun - ALONE_S, begun)
        row[f"{name}_during_ms"] = _percentiles_ms(each, begun, over)
    return row


def _percentiles_ms(seen: dict[str, Any], begin: float, end: float) -> list[float]:
    """Return median, p99 and maximum of an observer's batches that began between two times."""
    when, batch_ms = np.array(seen["begun"]), np.array(seen["batch_s"]) * 1e3
    chosen = batch_ms[(when >= begin) & (when < end)]
    return [round(float(np.percentile(chosen, q)), 3) for q in (50, 99, 100)]


def _show(row: dict[str, Any], samples: int) -> None:
    print(f"{JOBS} jobs, 2 epochs of {samples:,} samples each, "
          f"{'announced' if row['daemon'] else 'only checked (no daemon)'}")  # fmt: skip
    print(f"  the training loop waits {1e3 * row['returned_s']:.1f} ms; announcements end after "
          f"{row['announced_s']:.2f} s, with {row['job_cpu_s']:.2f} s of CPU per job; the daemon: "
          f"{row['daemon_cpu_ns_per_position']:.1f} ns per position, "
          f"{row['daemon_bytes_per_sample']:.1f} bytes per sample for all jobs, "
          f"{row['left_bytes_per_sample']:.1f} after they have ended")  # fmt: skip
    for name in ("hot", "cold"):
        before, during = row[f"{name}_before_ms"], row[f"{name}_during_ms"]
        print(f"  a {name} batch in ms (median, p99, worst): before {before}, during {during}",
              flush=True)  # fmt: skip
