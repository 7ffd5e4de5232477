"""A torch dataset over a list of pictures, as it is and wrapped by `ffserve.torch.cache`.

    python -m benchmarks.kept [--size 1.0] [--ranks 2] [--workers 4]

--size is that of the decoded pictures, in 10^9 bytes. A job has ranks, each with a loader of
spawned workers. The first job decodes everything; then the memory of all its processes and of the
daemon is added up (PSS: shared pages in proportion): mapped files of ffserve, and all beyond what
the same processes had before the first batch. A second job says which share of its first epoch it
finds. A hit is timed against one of `Dataset.prepare`, and the wrapped dataset without a daemon
against the dataset itself. Needs Pillow.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

from benchmarks.prepared import EDGE, Prepared, decoded, write
from ffserve.client.daemon import connection
from ffserve.torch import cache

BATCH, FILES = 32, 100
ITEM_SIZE = 3 * EDGE * EDGE


class Pictures(torch.utils.data.Dataset[Any]):
    """So many items out of FILES pictures, each with its index in its first pixel."""

    def __init__(self, folder: str, count: int) -> None:
        self.folder = folder
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        content = Path(self.folder, f"{index % FILES}.jpg").read_bytes()
        picture = torch.from_numpy(decoded(content).copy())
        picture[0, 0] = torch.tensor([index >> 16, index >> 8 & 255, index & 255])
        return picture, index


class Arrays(Pictures):
    """The pictures alone, as `Prepared` has them."""

    def __getitem__(self, index: int) -> Any:
        return decoded(Path(self.folder, f"{index % FILES}.jpg").read_bytes())


def pss(pids: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of processes: of ffserve's mapped files, and of all."""
    ours = everything = 0
    for pid in pids:
        mine = False
        for row in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            first, *rest = row.split(None, 5)
            if first == "Pss:":
                everything += int(rest[0])
                ours += mine * int(rest[0])
            elif not first.endswith(":"):
                mine = "memfd:ffserve" in row
    return 1024 * ours, 1024 * everything


def rank(number: int, folder: str, options: Any, barrier: Any, out: Any) -> None:
    """Follow two epochs of a rank's part; tell the pids of the workers."""
    torch.set_num_threads(1)
    dataset = cache(Pictures(folder, options.count), version=1)
    sampler: Any = torch.utils.data.DistributedSampler(dataset, options.ranks, number)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, sampler=sampler, num_workers=options.workers,
        multiprocessing_context="spawn", persistent_workers=True,
    )  # fmt: skip
    batches: Any = iter(loader)
    out.put([os.getpid(), *(worker.pid for worker in batches._workers)])
    for epoch in range(options.epochs):
        barrier.wait()
        begun = time.monotonic()
        if epoch:
            sampler.set_epoch(epoch)
            batches = iter(loader)
        for pictures, indices in batches:
            stamps = pictures[:, 0, 0].long() @ torch.tensor([1 << 16, 1 << 8, 1])
            assert torch.equal(stamps, indices), "each item is that of its index"
        out.put(time.monotonic() - begun)
    barrier.wait()
    barrier.wait()


@contextmanager
def job(folder: str, options: Any) -> Iterator[tuple[list[int], list[float]]]:
    """Run a job; give the pids of its processes, and the seconds of each epoch, while it lives."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(options.ranks + 1), context.Queue()
    ranks = [
        context.Process(target=rank, args=(k, folder, options, barrier, out))
        for k in range(options.ranks)
    ]
    for each in ranks:
        each.start()
    pids = [pid for _ in ranks for pid in out.get(timeout=600)]
    seconds = []
    for _ in range(options.epochs):
        barrier.wait(600)
        seconds.append(max(out.get(timeout=600) for _ in ranks))
    barrier.wait(600)
    yield pids, seconds
    barrier.wait(600)
    for each in ranks:
        each.join()


@contextmanager
def daemon(folder: str, size: int) -> Iterator[tuple[str, int]]:
    """Run a daemon with an arena; give its socket and its pid."""
    socket = f"{folder}/s"
    command = (sys.executable, "-m", "ffserve", "serve", "--socket", socket, "--arena", str(size))
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not os.path.exists(socket):
            time.sleep(0.05)
        yield socket, process.pid
    finally:
        process.terminate()
        process.wait()


def shared(folder: str, options: Any) -> dict[str, float]:
    """Run two jobs; return the figures."""
    size = options.count * ITEM_SIZE
    found: dict[str, float] = {"items": options.count, "bytes": size}
    with daemon(folder, int(1.03 * size) + (8 << 20)) as (socket, pid):
        os.environ["FFSERVE_SOCKET"] = socket

        def made() -> int:
            return sum(int(row["prepared"]) for row in connection.status(socket)["preparations"])

        with job(folder, options) as (pids, seconds):
            found["mapped"], found["pss"] = pss([pid, *pids])
            found["first_s"], found["next_s"] = seconds[0], seconds[-1]
        before = made()
        with job(folder, options) as (_, seconds):
            found["second_job_s"] = seconds[0]
        found["made"], found["second_job_hits"] = before, 1 - (made() - before) / options.count
    return found


def timed(
    calls: dict[str, Callable[[list[int]], Any]], count: int, rounds: int
) -> dict[str, float]:
    """Return the median microseconds of each call for an item, taking turns."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    random = np.random.default_rng(0)
    for _ in range(rounds):
        batch = random.choice(count, BATCH, replace=False).tolist()
        for name, call in calls.items():
            begun = time.perf_counter()
            call(batch)
            took[name].append(1e6 * (time.perf_counter() - begun) / BATCH)
    return {name: statistics.median(each) for name, each in took.items()}


def hits(folder: str, path: str) -> dict[str, float]:
    """Return what a hit costs, and one of `prepare`; without a daemon, and the dataset itself."""
    with daemon(folder, 256 << 20) as (socket, _):
        os.environ["FFSERVE_SOCKET"] = socket
        prepared, plain = Prepared(path), Pictures(folder, FILES)
        kept = cache(Arrays(folder, FILES), version=2)
        calls: dict[str, Callable[[list[int]], Any]] = {
            "prepare": lambda batch: prepared._preparer().values(prepared, batch),
            "cache": kept.__getitems__,
        }
        for call in calls.values():
            call(list(range(FILES)))
        found = timed(calls, FILES, 400)
    os.environ["FFSERVE_SOCKET"] = f"{folder}/none"
    alone = cache(list(range(FILES)), version=1)
    calls = {
        "list": lambda batch: [alone.dataset[i] for i in batch],
        "list, cached": alone.__getitems__,
    }
    found |= timed(calls, FILES, 2000)
    alone = cache(plain, version=1)
    calls = {
        "dataset": lambda batch: [plain[i] for i in batch],
        "no daemon": alone.__getitems__,
    }
    return found | timed(calls, FILES, 20)


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=1.0)
    for name, default in (("ranks", 2), ("workers", 4), ("epochs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    options.count = int(options.size * 1e9 / ITEM_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        path = write(folder, FILES, 256)
        for name, figure in hits(folder, path).items():
            print(f"{name:16} {figure:10.2f} us an item")
        for name, figure in shared(folder, options).items():
            print(f"{name:16} {figure:16.4f}", flush=True)


if __name__ == "__main__":
    main()
