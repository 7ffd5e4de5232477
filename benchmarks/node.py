"""A daemon and jobs in processes of their own, watched for a while: one cell of the policy's table.

All jobs begin at one moment. After `warm_s` everything is counted for `seconds`: on the jobs'
board, in the daemon's status, and by the kernel (what it read for the daemon and for the jobs, and
what the device read for whomever).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import confine, job
from ffserve.client.connection import status
from ffserve.errors import ServerUnavailable

DEADLINE_S = 60.0

Join = Callable[[], None]


def wait_for(condition: Callable[[], Any], processes: list[subprocess.Popen[Any]]) -> Any:
    """Wait until something is so; the processes have to live meanwhile."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if any(process.poll() is not None for process in processes):
            raise SystemExit("a process ended before its time; what it said stands above")
        if time.monotonic() > deadline:
            raise SystemExit("nothing happened for a minute")
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def daemon(
    folder: Path, arena: int, join: Join | None = None
) -> Iterator[tuple[str, subprocess.Popen[Any]]]:
    """A fresh daemon with all of its arena there; yields its socket and its process."""
    with tempfile.TemporaryDirectory(prefix="ffserve-policy-") as place:
        socket = os.path.join(place, "s")
        command = [sys.executable, "-m", "ffserve", "serve", "--socket", socket]
        command += ["--arena", str(arena), "--root", str(folder), "--log-level", "error"]
        process = subprocess.Popen(command, preexec_fn=join)

        def populated() -> bool:
            with contextlib.suppress(ServerUnavailable):
                now = status(socket)["arena"]
                return bool(now["populated"] >= now["size"])
            return False

        try:
            wait_for(populated, [process])
            yield socket, process
            if process.poll() is not None:
                raise SystemExit(f"the daemon ended by itself: {process.returncode}")
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def jobs(
    specs: list[dict[str, Any]], join: Join | None = None
) -> Iterator[tuple[Any, list[subprocess.Popen[Any]]]]:
    """The jobs, ready to begin; yields their board and their processes."""
    with tempfile.TemporaryDirectory(prefix="ffserve-policy-") as place:
        path = os.path.join(place, "board")
        board = job.board(path, len(specs))
        command = [sys.executable, "-m", "benchmarks.job"]
        running = [
            subprocess.Popen([*command, json.dumps(spec), path, str(k)], preexec_fn=join)
            for k, spec in enumerate(specs)
        ]
        try:
            wait_for(lambda: bool(board[:-1, 0].all()), running)
            yield board, running
            board[-1, 0] = job.STOP
            for process in running:
                if process.wait(DEADLINE_S):
                    raise SystemExit("a job failed; what it said stands above")
        finally:
            for process in running:
                process.kill()
                process.wait()


def watch(
    specs: list[dict[str, Any]],
    *,
    arena: int | None,
    warm_s: float,
    seconds: float,
    warm_used: float = 0.0,
    join_daemon: Join | None = None,
    join_jobs: Join | None = None,
) -> dict[str, Any]:
    """Run jobs beside one another.

    Args:
        specs: of the jobs, see `benchmarks.job`. arena: bytes; None: no daemon.
        warm_used: samples that every job must have used before anything is counted.
        join_daemon, join_jobs: put the processes into their cgroups.
    Returns: what came to pass in `seconds`, over all jobs, and in "jobs" for each.
    """
    path = specs[0]["path"]
    with contextlib.ExitStack() as stack:
        socket, server = None, None
        if arena is not None:
            socket, server = stack.enter_context(daemon(Path(path).parent, arena, join_daemon))
        specs = [{**spec, "socket": socket} for spec in specs]
        board, running = stack.enter_context(jobs(specs, join_jobs))

        def look() -> dict[str, Any]:
            facts = status(socket) if socket else {}
            return {
                "now": time.monotonic(),
                "board": np.array(board),
                "cache": facts.get("cache", {}),
                "facts": facts,
                "kernel": sum(
                    confine.process_read(p.pid) for p in [*running, *([server] if server else [])]
                ),
                "device": confine.device_read(path),
            }

        board[-1, 0] = job.RUN
        time.sleep(warm_s)
        wait_for(lambda: (board[:-1, job.USED] >= warm_used).all(), running)
        board[-1, 0] = job.MEASURE
        before = look()
        time.sleep(seconds)
        after = look()
        facts = after["facts"]
        names = {process.pid: k for k, process in enumerate(running)}
        read = np.zeros(len(specs))
        for snapshot, sign in ((before, -1), (after, 1)):
            for known in snapshot["facts"].get("jobs", ()):
                if known["pid"] in names:
                    read[names[known["pid"]]] += sign * known["read_size"]
    # The jobs wrote their last figures as they ended.
    latency = float(np.max(board[:-1, job.LATENCY_S]))
    change = (after["board"] - before["board"])[:-1]
    took = after["now"] - before["now"]
    counted = {key: after["cache"][key] - before["cache"][key] for key in after["cache"]}
    return {
        "took_s": took,
        "used": float(change[:, job.USED].sum()),
        "asked": float(change[:, job.ASKED].sum()),
        "stalled_s": float(change[:, job.STALLED_S].mean()),
        "p99_s": latency,
        "jobs": [
            {"used": float(row[job.USED]), "stalled_s": float(row[job.STALLED_S]), "read": size}
            for row, size in zip(change, read.tolist(), strict=True)
        ],
        "reads": counted.get("blocks_read", 0),
        "wasted": counted.get("wasted", 0),
        "daemon_bytes": counted.get("read_size", 0),
        "kernel_bytes": after["kernel"] - before["kernel"],
        "device_bytes": after["device"] - before["device"],
        "slots": after["cache"]["blocks_read"] - after["cache"]["evicted"] if facts else 0,
        "groups": facts.get("groups", []),
    }


def drop_cache(path: str) -> None:
    """Take a file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def data(folder: Path, samples: int, size: int, name: str = "") -> str:
    """Write a data set, once."""
    import ffserve

    path = folder / f"policy{name}-{samples}-{size}.ffr"
    if not path.exists():
        content = np.random.default_rng(0).bytes(size)
        with ffserve.create(path, n=samples) as writer:
            for _ in range(samples):
                writer.write(content)
    drop_cache(str(path))
    return str(path)
