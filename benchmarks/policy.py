"""The policy in the real thing: `python -m benchmarks.policy`.

Job processes, a daemon with a small arena, and a disk: bytes read an epoch, by the daemon's own
count and by the kernel's (/proc/diskstats, which counts everybody's reads), beside the simulated
hit rate and Belady's. Then what an announcement of 10 million samples by four jobs takes, and what
the policy costs a sample.

    python -m benchmarks.policy [--folder .bench] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ffserve.cache.next_use import NextUse
from ffserve.cache.orders import PIECE
from ffserve.cache.simulation import Job, Simulation, belady, shuffled
from ffserve.client.connection import status
from ffserve.errors import ServerUnavailable

SAMPLES, SIZE = 12_000, 32_000
PACE = 4_000.0
WARM, EPOCHS = 2, 2
CELLS = (("one job", 1, True), ("two jobs", 2, True), ("two jobs, silent", 2, False),
         ("four jobs", 4, True))  # fmt: skip
SHARES = (0.25, 0.5)

WORKER = """
import sys, time
import numpy as np
import ffserve
path, socket, seed, pace, epochs, announces = sys.argv[1:]
pace, epochs = float(pace), int(epochs)
def order(epoch):
    return np.random.default_rng([int(seed), epoch]).permutation(len(reader))
with ffserve.open(path, server=socket) as reader:
    if announces == "True":
        reader.announce(order(0), 0)
    sys.stdin.readline()
    begin, used = time.monotonic(), 0
    for epoch in range(epochs):
        if announces == "True":
            reader.announce(order(epoch + 1), epoch + 1)
        ids = order(epoch)
        for start in range(0, len(ids), 64):
            reader.read_batch(ids[start : start + 64])
            used += 64
            # A step of training: the pace is kept as long as the samples are there in time.
            wait = begin + used / pace - time.monotonic()
            if wait > 0:
                time.sleep(wait)
        print(epoch, time.monotonic() - begin, reader.stats()["misses"], flush=True)
    sys.stdin.readline()
"""


def sectors(path: str) -> int:
    """Return the bytes that the kernel has read from the file's device."""
    device = os.stat(path).st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == (os.major(device), os.minor(device)):
            return int(fields[5]) * 512
    return 0


@contextlib.contextmanager
def daemon(folder: Path, arena: int) -> Iterator[str]:
    """A fresh daemon with all of its arena there; yields its socket."""
    with tempfile.TemporaryDirectory(prefix="ffserve-policy-") as place:
        socket = os.path.join(place, "s")
        command = [sys.executable, "-m", "ffserve", "serve", "--socket", socket]
        command += ["--arena", str(arena), "--root", str(folder), "--log-level", "warning"]
        process = subprocess.Popen(command)
        try:
            while True:
                time.sleep(0.05)
                if process.poll() is not None:
                    raise SystemExit("the daemon did not start")
                with contextlib.suppress(ServerUnavailable):
                    now = status(socket)["arena"]
                    if now["populated"] >= now["size"]:
                        break
            yield socket
        finally:
            process.terminate()
            process.wait()


def drop_cache(path: Path) -> None:
    """Take a file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def data(folder: Path) -> str:
    """Write the data set, once."""
    import ffserve

    path = folder / f"policy-{SAMPLES}-{SIZE}.ffr"
    if not path.exists():
        content = np.random.default_rng(0).bytes(SIZE)
        with ffserve.create(path, n=SAMPLES) as writer:
            for _ in range(SAMPLES):
                writer.write(content)
    drop_cache(path)
    return str(path)


def cell(path: str, job_count: int, share: float, announces: bool) -> dict[str, Any]:
    """Run one scenario for real."""
    slot = -(-SIZE // 4096) * 4096 + 4096
    with daemon(Path(path).parent, int(SAMPLES * slot * share)) as socket:
        jobs = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, path, socket, str(seed), str(PACE),
                 str(WARM + EPOCHS), str(announces)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )
            for seed in range(job_count)
        ]  # fmt: skip
        time.sleep(1.5)
        for job in jobs:
            assert job.stdin is not None
            job.stdin.write("go\n")
        before: dict[str, Any] = {}
        misses = took = 0.0
        for epoch in range(WARM + EPOCHS):
            for job in jobs:
                assert job.stdout is not None
                _, seconds, missed = job.stdout.readline().split()
                if epoch == WARM - 1:
                    misses -= float(missed)
                    took = max(took, float(seconds)) if job is not jobs[0] else float(seconds)
                elif epoch == WARM + EPOCHS - 1:
                    misses += float(missed)
            if epoch == WARM - 1:
                before = {**status(socket)["cache"], "disk": sectors(path)}
                started = took
        after = {**status(socket)["cache"], "disk": sectors(path)}
        ended = float(seconds)
        for job in jobs:
            job.communicate("end\n")
    used = EPOCHS * SAMPLES * job_count
    read = after["blocks_read"] - before["blocks_read"]
    return {
        "used": used,
        "read": read,
        "hit_rate": 1 - read / used,
        "asked": misses / used,
        "daemon_bytes": after["read_size"] - before["read_size"],
        "disk_bytes": after["disk"] - before["disk"],
        "speed": EPOCHS * SAMPLES / PACE / max(ended - started, 1e-9),
        "slots": after["blocks_read"] - after["evicted"],
        "wasted": after["wasted"] - before["wasted"],
    }


def simulated(job_count: int, slots: int, announces: bool) -> tuple[float, float]:
    """Return the simulated hit rate of the same scenario, and Belady's."""
    jobs = [
        Job(shuffled(SAMPLES, seed), pace=PACE, announces=announces) for seed in range(job_count)
    ]
    simulation = Simulation(SAMPLES, slots / SAMPLES, jobs)
    epoch_s = SAMPLES / PACE
    result = simulation.run(warm_s=WARM * epoch_s, seconds=EPOCHS * epoch_s)
    simulation.close()
    return result.hit_rate, belady(result.trace, result.slots, result.measured_from)


def announcement(samples: int = 10_000_000, job_count: int = 4) -> dict[str, float]:
    """Time and memory of what the daemon does with announcements, without the socket."""
    uses = NextUse(1 << 40)
    orders = [np.random.default_rng(k).permutation(samples) for k in range(2)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = 0.0
    for k in range(job_count):
        walk = uses.join(f"job {k}", np.array([0]), np.array([samples]))
        for epoch in range(2):
            # Rotated, so that no two jobs share one.
            order = np.roll(orders[epoch], 1000 * k)
            start = time.perf_counter()
            arriving = uses.arriving(walk, samples, replacement=False)
            for at in range(0, samples, PIECE // 4):
                arriving.add(order[at : at + PIECE // 4])
            uses.announced(walk, epoch, arriving.finish(), None, walk)
            seconds += time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {
        "seconds_an_order": seconds / (2 * job_count),
        "ns_a_sample": 1e9 * seconds / (2 * job_count * samples),
        "bytes_a_sample": sum(walk.size for walk in uses.walks) / samples + 4,
        "rss_bytes_a_sample": grown / samples,
    }


def policy_cost(samples: int = 1_000_000, job_count: int = 2, batch: int = 1024) -> float:
    """Return the microseconds a used sample that `victims` and `doubt` take in the daemon."""
    jobs = [Job(shuffled(samples, k), pace=1e5, batch=batch) for k in range(job_count)]
    simulation = Simulation(samples, 0.25, jobs)
    spent = 0.0
    policy = simulation.cache.policy

    def timed(inner: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return inner(*arguments, **more)
            finally:
                spent += time.perf_counter() - start

        return call

    for name in ("victims", "doubt", "keep", "let_pass", "enter", "leave", "idle_victims"):
        setattr(policy, name, timed(getattr(policy, name)))
    epoch_s = samples / 1e5
    simulation.run(warm_s=0.6 * epoch_s, seconds=0.01)
    spent = 0.0
    used = sum(job.position for job in jobs)
    for _ in range(300):
        for job, walk in zip(jobs, simulation._walks, strict=True):
            simulation._step(job, walk, simulation.uses.now + batch / 1e5 / job_count)
    used = sum(job.position for job in jobs) - used
    simulation.close()
    return 1e6 * spent / used


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("real", "cost"))
    parser.add_argument("--cell", action="append", help="such as 'two jobs'; all of them")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    rows = []
    if options.only != "cost":
        path = data(options.folder)
        print(
            "                        cache  hits  simulated  Belady  requests  daemon/disk  speed"
        )
        for title, job_count, announces in CELLS:
            if options.cell and title not in options.cell:
                continue
            for share in SHARES:
                real = cell(path, job_count, share, announces)
                real["simulated"], real["belady"] = simulated(job_count, real["slots"], announces)
                rows.append({"title": title, "share": share, **real})
                print(
                    f"{title:22s} {real['slots'] / SAMPLES:6.1%} {real['hit_rate']:6.1%} "
                    f"{real['simulated']:6.1%} {real['belady']:10.1%} {real['asked']:8.1%} "
                    f"{real['daemon_bytes'] / max(real['disk_bytes'], 1):10.3f} "
                    f"{real['speed']:9.2f}",
                    flush=True,
                )
    costs: dict[str, Any] = {}
    if options.only != "real":
        costs = {"announcement": announcement(), "policy_us_a_sample": policy_cost()}
        print(costs)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, **costs}))


if __name__ == "__main__":
    main()
