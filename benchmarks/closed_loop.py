"""Training jobs at a fixed pace beside a daemon, observed for some time.

A job asks for batches in random order, every sample once per epoch, and computes for a fixed time
per batch. The next batch is fetched while the one before is computed on, as a loader does; any
further wait is a stall. The progress of all jobs is on a board in shared memory, so that `watch`
reads it at one moment: after `warm_s` it counts for `seconds` on the board, in the daemon's status
and by the kernel (bytes read for the daemon and the jobs, and by the device for any process).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ffserve
from benchmarks.harness import cgroup, measuring
from ffserve.bench import child_processes, samples
from ffserve.bench.ceilings import Case, Delivered
from ffserve.errors import FFServeError

TIMEOUT_S = 60.0
RUN, MEASURE, STOP = range(3)
USED, STALLED_S, ASKED = range(3)
"""Columns of the board, float64[jobs + 1, COLUMNS]; the last row's first column is the phase."""
COLUMNS = 8
LATENCY_COUNT = 100_000

ReadBatch = Callable[[NDArray[np.int64]], Any]
Join = Callable[[], None]


# --------------------------------------------------------------------------- a job


def job(case: Case) -> Delivered:
    """Read as ``case["jobs"][client]`` says until the board's phase is STOP: a contestant."""
    spec = case["jobs"][case["client"]]
    board = np.memmap(case["board"], np.float64, "r+").reshape(-1, COLUMNS)
    own, phase = board[case["client"]], board[-1]
    count, read, reader = _reading(spec, case["server"])
    announces, pace = spec["announces"], spec["pace"]
    if announces:
        reader.announce(_order(spec, 0, count), 0)
    yield 0, 0
    latencies = np.zeros(LATENCY_COUNT)
    taken = epoch = 0
    step_end = time.monotonic()
    while phase[0] != STOP:
        if announces:
            reader.announce(_order(spec, epoch + 1, count), epoch + 1)
        order = _order(spec, epoch, count)
        for start in range(0, count, spec["batch"]):
            asked = time.monotonic()
            indices = order[start : start + spec["batch"]]
            read(indices)
            now = time.monotonic()
            if phase[0] == MEASURE:
                latencies[taken % LATENCY_COUNT] = now - asked
                taken += 1
            own[STALLED_S] += max(now - step_end, 0.0)
            own[USED] += len(indices)
            if reader is not None:
                own[ASKED] = reader.stats()["misses"]
            if pace:
                if now < step_end:
                    time.sleep(step_end - now)
                step_end = max(now, step_end) + len(indices) / pace
            else:
                step_end = now
            if phase[0] == STOP:
                break
        epoch += 1
    kept = latencies[: min(taken, LATENCY_COUNT)]
    yield {"p99_s": float(np.percentile(kept, 99)) if taken else 0.0}


def _order(spec: dict[str, Any], epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng([spec["seed"], epoch]).permutation(count)


def _reading(spec: dict[str, Any], server: str) -> tuple[int, ReadBatch, Any]:
    """Return the number of samples, a function that reads a batch, and the Reader if there is one.

    Of ``spec["how"]``: ffserve (through the daemon), preadv and mmap (through the page cache;
    "-random" with that advice to the kernel), or ffrecord (the original, with its checks).
    """
    path, how = spec["path"], spec["how"]
    if how == "ffrecord":
        import ffrecord  # type: ignore[import-not-found]

        original = ffrecord.FileReader(path, check_data=True)
        return original.n, lambda indices: original.read(indices.tolist()), None
    if how == "ffserve":
        reader = ffserve.open(path, server=server)
        return len(reader), reader.read_batch, reader
    with ffserve.open(path, server="off") as tables:
        offsets, lengths, _ = (np.asarray(part).astype(np.int64) for part in tables.tables(0))
    file = os.open(path, os.O_RDONLY)
    if how.startswith("preadv"):
        if how.endswith("random"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)

        def preadv(indices: NDArray[np.int64]) -> NDArray[np.uint8]:
            edges = np.concatenate(([0], np.cumsum(lengths[indices]))).tolist()
            out = np.empty(edges[-1], np.uint8)
            view = memoryview(out)
            for k, offset in enumerate(offsets[indices].tolist()):
                os.preadv(file, [view[edges[k] : edges[k + 1]]], offset)
            return out

        return len(offsets), preadv, None
    mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    if how.endswith("random"):
        mapped.madvise(mmap.MADV_RANDOM)
    whole = memoryview(mapped)

    def from_map(indices: NDArray[np.int64]) -> bytes:
        extents = zip(offsets[indices].tolist(), lengths[indices].tolist(), strict=True)
        return b"".join([whole[offset : offset + length] for offset, length in extents])

    return len(offsets), from_map, None


# --------------------------------------------------------------------------- watching


def wait_for(condition: Callable[[], Any], description: str) -> None:
    """Wait until a condition holds.

    Raises: FFServeError when it does not within TIMEOUT_S.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise FFServeError(f"not within {TIMEOUT_S:.0f} s: {description}")
        time.sleep(0.02)


def watch(
    jobs: list[dict[str, Any]],
    *,
    arena: int | None,
    warm_s: float,
    seconds: float,
    warm_used: float = 0.0,
    join_daemon: Join | None = None,
    join_jobs: Join | None = None,
) -> dict[str, Any]:
    """Run jobs beside one another and count.

    Args:
        jobs: path, how, seed, pace (samples per second; 0: no computing), batch, announces of each.
        arena: bytes of the daemon's arena; None: no daemon.
        warm_used: samples that every job must have used before anything is counted.
        join_daemon, join_jobs: put the processes into their cgroups.
    Returns: the figures of `seconds`, over all jobs, and in "jobs" for each.
    """
    path = jobs[0]["path"]
    with contextlib.ExitStack() as stack:
        server = None
        if arena is not None:
            roots = [os.path.dirname(path)]
            server = stack.enter_context(
                child_processes.daemon(roots, arena, before_exec=join_daemon)
            )
            server.await_arena()
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ffserve-policy-"))
        board_path = os.path.join(directory, "board")
        board = np.memmap(board_path, np.float64, "w+", shape=(len(jobs) + 1, COLUMNS))
        case = {
            "function": "benchmarks.closed_loop:job", "clients": len(jobs), "jobs": jobs, "seed": 0,
            "board": board_path, "server": server.socket if server else "off",
            "warm": 1, "seconds": 1e9,
        }  # fmt: skip
        running = stack.enter_context(measuring.contestant(case, before_exec=join_jobs))
        pids = [*running.pids, *([server.process.pid] if server else [])]

        def look() -> dict[str, Any]:
            facts = server.status() if server else {}
            return {
                "now": time.monotonic(),
                "board": np.array(board),
                "cache": facts.get("cache", {}),
                "facts": facts,
                "kernel": sum(map(cgroup.process_read, pids)),
                "device": cgroup.device_read(path),
            }

        board[-1, 0] = RUN
        running.begin()
        time.sleep(warm_s)
        wait_for(lambda: bool((board[:-1, USED] >= warm_used).all()), "the jobs have warmed up")
        board[-1, 0] = MEASURE
        before = look()
        time.sleep(seconds)
        after = look()
        board[-1, 0] = STOP
        result = running.finish()
    latency_s = max(client["p99_s"] for client in result.clients)
    return {**_difference(before, after, running.pids), "p99_s": latency_s}


def _difference(before: dict[str, Any], after: dict[str, Any], pids: list[int]) -> dict[str, Any]:
    """Return the figures between two looks.

    Args: pids: of the jobs, in their order.
    """
    facts = after["facts"]
    read = np.zeros(len(pids))
    for snapshot, sign in ((before, -1), (after, 1)):
        for known in snapshot["facts"].get("jobs", ()):
            if known["pid"] in pids:
                read[pids.index(known["pid"])] += sign * known["read_size"]
    change = (after["board"] - before["board"])[:-1]
    counted = {key: after["cache"][key] - before["cache"][key] for key in after["cache"]}
    return {
        "seconds": after["now"] - before["now"],
        "used": float(change[:, USED].sum()),
        "asked": float(change[:, ASKED].sum()),
        "stalled_s": float(change[:, STALLED_S].mean()),
        "jobs": [
            {"used": float(row[USED]), "stalled_s": float(row[STALLED_S]), "read": size}
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


def write_data(folder: Path, count: int, size: int, name: str = "") -> str:
    """Write a data set unless it exists, remove it from the page cache, and return its path."""
    path = folder / f"policy{name}-{count}-{size}.ffr"
    if not path.exists():
        content = np.random.default_rng(0).bytes(size)
        with ffserve.create(path, n=count) as writer:
            for _ in range(count):
                writer.write(content)
    samples.evict([str(path)])
    return str(path)
