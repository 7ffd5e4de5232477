"""One training job, in a process of its own: `python -m benchmarks.job SPEC BOARD NUMBER`.

It asks for batches in random order, every sample once an epoch, and computes for a fixed time a
batch. The next batch is fetched while the one before is computed with, as a loader does; what it
then still has to wait is a stall. How it gets on stands on a board in shared memory, so that all
jobs can be looked at in one moment.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

WAIT, RUN, MEASURE, STOP = range(4)
USED, STALLED_S, ASKED, LATENCY_S = range(1, 5)
"""Columns of the board, which float64[jobs, COLUMNS] is; column 0 of a job is 1 once it is ready,
that of the last row, which is nobody's, the phase. LATENCY_S: the 99th percentile of a batch."""
COLUMNS = 8
KEPT = 100_000

Read = Callable[[NDArray[np.int64]], Any]


def board(path: str, jobs: int | None = None) -> NDArray[np.float64]:
    """Open the board, or make one for some jobs."""
    if jobs is None:
        mapped = np.memmap(path, np.float64, "r+").reshape(-1, COLUMNS)
    else:
        mapped = np.memmap(path, np.float64, "w+", shape=(jobs + 1, COLUMNS))
    return mapped


def order(spec: dict[str, Any], epoch: int, count: int) -> NDArray[np.int64]:
    """Return the order of an epoch."""
    return np.random.default_rng([spec["seed"], epoch]).permutation(count)


def reading(spec: dict[str, Any]) -> tuple[int, Read, Any]:
    """Return how many samples there are, how a batch is read, and the ffserve.Reader if it is one.

    Of `spec["how"]`: ffserve (through the daemon), preadv and mmap (through the page cache;
    "-random" with the advice that reads will be), or ffrecord (the original, with its checks).
    """
    path, how = spec["path"], spec["how"]
    if how == "ffrecord":
        import ffrecord  # type: ignore[import-not-found]

        original = ffrecord.FileReader(path, check_data=True)
        return original.n, lambda ids: original.read(ids.tolist()), None
    import ffserve

    if how == "ffserve":
        reader = ffserve.open(path, server=spec["socket"])
        return len(reader), reader.read_batch, reader
    with ffserve.open(path, server="off") as tables:
        offsets, lengths, _ = (np.asarray(part).astype(np.int64) for part in tables.tables(0))
    file = os.open(path, os.O_RDONLY)
    if how.startswith("preadv"):
        if how.endswith("random"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)

        def preadv(ids: NDArray[np.int64]) -> NDArray[np.uint8]:
            edges = np.concatenate(([0], np.cumsum(lengths[ids]))).tolist()
            out = np.empty(edges[-1], np.uint8)
            view = memoryview(out)
            for k, place in enumerate(offsets[ids].tolist()):
                os.preadv(file, [view[edges[k] : edges[k + 1]]], place)
            return out

        return len(offsets), preadv, None
    mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    if how.endswith("random"):
        mapped.madvise(mmap.MADV_RANDOM)
    whole = memoryview(mapped)

    def from_map(ids: NDArray[np.int64]) -> bytes:
        places = zip(offsets[ids].tolist(), lengths[ids].tolist(), strict=True)
        return b"".join([whole[place : place + length] for place, length in places])

    return len(offsets), from_map, None


def main(spec: dict[str, Any], place: str, number: int) -> None:
    """Run until the board says stop."""
    columns = board(place)
    mine, phase = columns[number], columns[-1]
    count, read, reader = reading(spec)
    announces, pace = spec["announces"], spec["pace"]
    if announces:
        reader.announce(order(spec, 0, count), 0)
    mine[0] = 1
    while phase[0] == WAIT:
        time.sleep(0.001)
    latencies = np.zeros(KEPT)
    taken = epoch = 0
    step_end = time.monotonic()
    while phase[0] != STOP:
        if announces:
            reader.announce(order(spec, epoch + 1, count), epoch + 1)
        ids = order(spec, epoch, count)
        for start in range(0, count, spec["batch"]):
            asked = time.monotonic()
            part = ids[start : start + spec["batch"]]
            read(part)
            now = time.monotonic()
            if phase[0] == MEASURE:
                latencies[taken % KEPT] = now - asked
                taken += 1
            mine[STALLED_S] += max(now - step_end, 0.0)
            mine[USED] += len(part)
            if reader is not None:
                mine[ASKED] = reader.stats()["misses"]
            if pace:
                if now < step_end:
                    time.sleep(step_end - now)
                step_end = max(now, step_end) + len(part) / pace
            else:
                step_end = now
            if phase[0] == STOP:
                break
        epoch += 1
    if taken:
        mine[LATENCY_S] = np.percentile(latencies[: min(taken, KEPT)], 99)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
