"""What an announcement of very many samples takes, and what others notice of it.

Four jobs, each with an order of its own for two epochs, announce at one moment through the socket
of a real daemon. Two witnesses read other data meanwhile: one hits, which needs no daemon; one
misses, and so sees the daemon's loop stand still. To tell that from the mere want of processors,
the jobs do the same once without a daemon (checks and copies of their own, nothing sent).

Run as a module it is one of these processes: `python -m benchmarks.announcing ROLE SPEC`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contestants import make_many, many_samples
from benchmarks.node import daemon, data, wait_for
from ffserve.client.connection import status

JOBS = 4
HOT, COLD, SIZE = 256, 12_000, 31_000
ALONE_S = 3.0


def announcer(spec: dict[str, Any]) -> None:
    """Announce two epochs when told to; say how long it took."""
    import ffserve
    from ffserve.torch.announce import Announcement, Announcer

    with ffserve.open(spec["path"], server=spec["server"]) as reader:
        orders = [
            np.random.default_rng([spec["seed"], epoch]).permutation(len(reader))
            for epoch in range(2)
        ]
        print("ready", flush=True)
        sys.stdin.readline()
        background = Announcer(reader)
        begun, cpu = time.monotonic(), time.process_time()
        current = Announcement(0, orders[0])
        announced = background.begin(current, 0, lambda: Announcement(1, orders[1]))
        returned = time.monotonic()
        background.settle()
        result = {
            "returned_s": returned - begun,
            "told_s": time.monotonic() - begun,
            "cpu_s": time.process_time() - cpu,
        }
        print(json.dumps(result), flush=True)
        sys.stdin.readline()
        del announced


def witness(spec: dict[str, Any]) -> None:
    """Read batches until told to stop; say how long each took, and when."""
    import ffserve

    with ffserve.open(spec["path"], server=spec["server"]) as reader:
        chance = np.random.default_rng(1)
        if spec["hot"]:
            reader.read_batch(range(len(reader)))
        print("ready", flush=True)
        begun, took = [], []
        while not select.select([0], [], [], 0.0005)[0]:
            ids = chance.integers(0, len(reader), 64 if spec["hot"] else 1)
            start = time.monotonic()
            reader.read_batch(ids)
            begun.append(start)
            took.append(time.monotonic() - start)
        print(json.dumps({"begun": begun, "took": took, "stats": reader.stats()}), flush=True)


def _start(role: str, spec: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.announcing", role, json.dumps(spec)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    _heard(process, "ready")
    return process


def _heard(process: subprocess.Popen[str], wanted: str = "") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line or (wanted and line.strip() != wanted):
        raise SystemExit("a process ended before its time; what it said stands above")
    return line


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def announcing(folder: Path, samples: int = 10_000_000) -> list[dict[str, Any]]:
    """Measure and print; with the daemon, then the same without it."""
    many = many_samples(str(folder), samples, 100)
    make_many(many)
    hot, cold = data(folder, HOT, SIZE, "-hot"), data(folder, COLD, SIZE)
    rows = []
    for tells in (True, False):
        with daemon(folder, 192 << 20) as (socket, server):
            witnesses = [
                _start("witness", {"path": path, "server": socket, "hot": path is hot})
                for path in (hot, cold)
            ]
            place = socket if tells else "off"
            jobs = [
                _start("announcer", {"path": many.paths[0], "server": place, "seed": seed})
                for seed in range(JOBS)
            ]
            usual = -_cpu(server.pid)
            time.sleep(ALONE_S)
            usual = (usual + _cpu(server.pid)) / ALONE_S
            memory, cpu, begun = _memory(server.pid), _cpu(server.pid), time.monotonic()
            for job in jobs:
                _tell(job)
            said = [json.loads(_heard(job)) for job in jobs]
            over = time.monotonic()
            grown = _memory(server.pid) - memory
            # Without what it does for the witnesses.
            cpu = _cpu(server.pid) - cpu - usual * (over - begun)
            for process in (*witnesses, *jobs):
                _tell(process)
            seen = [json.loads(_heard(each)) for each in witnesses]
            for process in (*witnesses, *jobs):
                process.communicate()
            wait_for(lambda: not status(socket)["progress"], [server])
            left = _memory(server.pid) - memory
        row: dict[str, Any] = {
            "daemon": tells,
            "returned_s": max(each["returned_s"] for each in said),
            "told_s": max(each["told_s"] for each in said),
            "job_cpu_s": max(each["cpu_s"] for each in said),
            "daemon_cpu_ns_a_position": 1e9 * cpu / (2 * JOBS * samples),
            "daemon_bytes_a_sample": grown / samples,
            "left_bytes_a_sample": left / samples,
        }
        for name, each in zip(("hot", "cold"), seen, strict=True):
            when, took = np.array(each["begun"]), np.array(each["took"]) * 1e3
            meanwhile = (when >= begun) & (when < over)
            before = (when >= begun - ALONE_S) & (when < begun)
            for label, rows_of in (("alone", before), ("meanwhile", meanwhile)):
                row[f"{name}_{label}_ms"] = [
                    round(float(np.percentile(took[rows_of], q)), 3) for q in (50, 99, 100)
                ]
        rows.append(row)
        _show(row, samples)
    return rows


def _show(row: dict[str, Any], samples: int) -> None:
    print(f"{JOBS} jobs, 2 epochs of {samples:,} samples each, "
          f"{'announced' if row['daemon'] else 'only checked (no daemon)'}")  # fmt: skip
    print(f"  the training loop waits {1e3 * row['returned_s']:.1f} ms; all is known after "
          f"{row['told_s']:.2f} s, {row['job_cpu_s']:.2f} s of CPU a job; the daemon: "
          f"{row['daemon_cpu_ns_a_position']:.1f} ns a position, "
          f"{row['daemon_bytes_a_sample']:.1f} bytes a sample for all, "
          f"{row['left_bytes_a_sample']:.1f} when they have gone")  # fmt: skip
    for name in ("hot", "cold"):
        before, meanwhile = row[f"{name}_alone_ms"], row[f"{name}_meanwhile_ms"]
        print(f"  a {name} batch takes ms (median, p99, worst): before {before}, "
              f"meanwhile {meanwhile}", flush=True)  # fmt: skip


if __name__ == "__main__":
    {"announcer": announcer, "witness": witness}[sys.argv[1]](json.loads(sys.argv[2]))
