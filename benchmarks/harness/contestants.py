"""The process of a contestant, and the contestants of ffserve.

``python -m benchmarks.harness.contestants '{"function": "module:function", …}'`` forks as many
clients as the case has. The function takes the case and is a generator: it yields (samples, bytes)
per batch, which lie in the client's memory by then, or once a dict, which ends the run and is its
result. Each client warms up with the case's ``warm`` batches; when all are ready, the process
writes "ready" and their process ids and waits for a line; then all run for the case's ``seconds``.
It prints a line of JSON per client: samples, size in bytes, seconds, CPU seconds and memory of the
client and its children, and the seconds of each batch.

This file also runs over another checkout of ffserve (see `harness/installation.py`), so it uses
public names of ffserve only, and the classes of the harness not at all.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import resource
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ffserve
from ffserve.bench.ceilings import BLOCK, Case, Delivered, batches, delivering, touched
from ffserve.errors import FFServeError
from ffserve.order import epoch_order


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process's living threads, to the nanosecond."""
    total = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def memory(pid: int) -> dict[str, int]:
    """Return bytes of memory of a process, shared pages by its proportional share.

    Returns: ``anonymous`` pages, which cannot be dropped; ``pss``, which adds mapped shared memory
        and page cache; ``private`` dirty pages.
    """
    names = {"Pss_Anon:": "anonymous", "Pss:": "pss", "Private_Dirty:": "private"}
    found = dict.fromkeys(names.values(), 0)
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size, *_ = line.split()
            if name in names:
                found[names[name]] = int(size) * 1024
    return found


# --------------------------------------------------------------------------- ffserve


def _open(case: Case) -> ffserve.Reader:
    return ffserve.open(case["paths"], server=case["server"])


def fill(case: Case) -> Delivered:
    """Read every sample once, so that a daemon has them in its arena."""
    with _open(case) as reader:
        yield {"samples": sum(len(batch) for batch in reader.batches(range(case["count"])))}


def read_batch(case: Case) -> Delivered:
    """Read one buffer per batch, one batch at a time."""
    reader = _open(case)
    return delivering(case, lambda indices: reader.read_batch(indices).buffer.nbytes)


def read(case: Case) -> Delivered:
    """Read a list of arrays per batch."""
    reader = _open(case)
    return delivering(case, lambda indices: sum(sample.nbytes for sample in reader.read(indices)))


def drop_in(case: Case) -> Delivered:
    """Read a list of arrays per batch with ffrecord's class: a list of integers in."""
    os.environ["FFSERVE_SOCKET"] = case["server"]
    reader = ffserve.FileReader(case["paths"])
    return delivering(
        case, lambda indices: sum(sample.nbytes for sample in reader.read(indices.tolist()))
    )


def checked_preads(case: Case) -> Delivered:
    """Read a list of arrays per batch with pread and zlib's CRC-32, a sample at a time."""
    places: list[tuple[int, int, int, int]] = []
    with ffserve.open(case["paths"], server="off") as reader:
        for k, path in enumerate(case["paths"]):
            fd = os.open(path, os.O_RDONLY)
            rows = zip(*(table.tolist() for table in reader.tables(k)), strict=True)
            places += ((fd, *row) for row in rows)

    def read_one(fd: int, offset: int, size: int, checksum: int) -> int:
        sample = np.empty(size, np.uint8)
        if os.preadv(fd, [sample.data], offset) != size or zlib.crc32(sample.data) != checksum:
            raise FFServeError("the file changed while it was measured")
        kept.append(sample)
        return size

    def read(indices: NDArray[np.int64]) -> int:
        kept.clear()
        return sum(read_one(*places[index]) for index in indices.tolist())

    kept: list[NDArray[np.uint8]] = []
    return delivering(case, read)


def lease(case: Case) -> Delivered:
    """Lease views into the arena; nothing is copied."""
    reader = _open(case)
    for indices in batches(case):
        with reader.lease(indices) as views:
            count = len(views)
        yield count, count * case["sample_size"]


def in_flight(case: Case) -> Delivered:
    """Read batches in random order with several in flight."""
    reader = _open(case)
    order = np.random.default_rng(case["seed"]).permutation(case["count"])
    for batch in reader.batches(order, count=case["batch"], size=1 << 40):
        yield len(batch), batch.buffer.nbytes


def in_order(case: Case) -> Delivered:
    """Iterate from the first sample to the last, over and over."""
    reader = _open(case)
    samples = itertools.chain.from_iterable(itertools.repeat(reader))
    while True:
        some = list(itertools.islice(samples, case["batch"]))
        yield len(some), sum(sample.nbytes for sample in some)


def windowed(case: Case) -> Delivered:
    """Read a windowed order that was announced, with several batches in flight."""
    reader, order = _open(case), windowed_order(case)
    reader.announce(order)
    yield 0, 0  # nothing was read yet
    for batch in reader.batches(order, count=case["batch"]):
        yield len(batch), batch.buffer.nbytes


def windowed_batch(case: Case) -> Delivered:
    """Read a windowed order that was announced, one batch at a time."""
    reader, order, size = _open(case), windowed_order(case), case["batch"]
    reader.announce(order)
    yield 0, 0
    for first in range(0, len(order), size):
        batch = reader.read_batch(order[first : first + size])
        yield len(batch), batch.buffer.nbytes


def job(case: Case) -> Delivered:
    """Read a shuffled epoch that was announced, with several batches in flight: a training job.

    Jobs with ``shared`` in the case follow one order, others one of their own.
    """
    reader = _open(case)
    shared = case["shared"]
    order = epoch_order(case["count"], seed=1 if shared else case["seed"], epoch=0)
    reader.announce(order, name="benchmark" if shared else None)
    yield 0, 0
    for batch in reader.batches(order, count=case["batch"]):
        yield len(batch), batch.buffer.nbytes


def windowed_order(case: Case) -> NDArray[np.int64]:
    """Return the order of `ffserve.torch.EpochSampler(…, window=…)`, which needs torch."""
    return epoch_order(case["count"], seed=case["seed"], epoch=0, window=case["window"])


HOT_SHARE = 8
"""`mixed` reads one part in so many of the data set again and again."""


def mixed(case: Case) -> Delivered:
    """Read batches half from a part that all clients share and half from unread samples.

    Each client has its own share of the unread samples.
    """
    reader = _open(case)
    hot = max(1, case["count"] // HOT_SHARE)
    order = hot + np.random.default_rng(0).permutation(case["count"] - hot)
    share = np.array_split(order, case["clients"])[case["client"]]
    half = max(1, min(case["batch"] // 2, len(share) // 8))
    random = np.random.default_rng(case["seed"])
    for first in range(0, len(share) - half + 1, half):
        indices = np.concatenate([random.integers(0, hot, (half,)), share[first : first + half]])
        random.shuffle(indices)
        yield len(indices), reader.read_batch(indices).buffer.nbytes


def opening(case: Case) -> Delivered:
    """Open a data set once and report the time and the memory that it takes."""
    _ = ffserve.Reader  # imports the module, which is not to be measured
    case = {**case, "paths": _files(case)}
    before = memory(os.getpid())["private"]
    started = time.perf_counter()
    reader = _open(case)
    seconds = time.perf_counter() - started
    grown = memory(os.getpid())["private"] - before
    assert len(reader) == case["count"]
    reader.read([0, case["count"] - 1])
    yield {"open_ms": seconds * 1e3, "grown_mb": grown / 1e6}


def _files(case: Case) -> list[str]:
    """Return the files; a directory stands for those in it, which may be too many for a command
    line."""
    paths: list[str] = case["paths"]
    if os.path.isdir(paths[0]):
        return sorted(entry.path for entry in os.scandir(paths[0]))
    return paths


def opening_plainly(case: Case) -> Delivered:
    """Open each file, ask for its size, and read its beginning."""
    paths = _files(case)
    started = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.pread(fd, min(os.fstat(fd).st_size, BLOCK), 0)
        os.close(fd)
    yield {"open_ms": (time.perf_counter() - started) * 1e3}


def keep_open(case: Case) -> Delivered:
    """Hold a data set open from the warm-up to the end of the run."""
    with _open(case) as reader:
        yield 0, 0
        yield {"samples": len(reader)}


def array_rows(case: Case) -> Delivered:
    """Index one numpy array: ``table[indices]``."""
    table = touched(case["count"] * case["sample_size"]).reshape(case["count"], case["sample_size"])
    return delivering(case, lambda indices: int(table[indices].nbytes))


# --------------------------------------------------------------------------- the process


def _descendants(pid: int) -> list[int]:
    """Return the living processes below one."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _used_s() -> float:
    """Return the CPU seconds of this process and all of its children, living and ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.process_time()
        + ended.ru_utime
        + ended.ru_stime
        + sum(cpu_s(pid) for pid in _descendants(os.getpid()))
    )


def _measure(case: Case, function: Callable[[Case], Delivered], ready: int, go: int) -> Any:
    """Warm up, wait for the start, run, and return the figures."""
    delivered = function(case)
    early = None
    for _ in range(case["warm"]):
        if isinstance(early := next(delivered, None), dict):
            break
    os.write(ready, b"r")
    os.close(ready)
    os.read(go, 1)  # returns when the last writer has been closed
    if isinstance(early, dict):
        return early
    samples = size = 0
    batch_s: list[float] = []
    used = _used_s()
    started = now = time.perf_counter()
    deadline = started + case["seconds"]
    for batch in delivered:
        if isinstance(batch, dict):
            return batch
        samples += batch[0]
        size += batch[1]
        then, now = now, time.perf_counter()
        batch_s.append(now - then)
        if now >= deadline:
            break
    if not batch_s:
        raise SystemExit("no samples were left after the warm-up: the data set is too small")
    used = _used_s() - used
    occupied = [memory(pid) for pid in (os.getpid(), *_descendants(os.getpid()))]
    delivered.close()
    return {
        "samples": samples,
        "size": size,
        "seconds": now - started,
        "cpu": used,
        "anonymous": sum(m["anonymous"] for m in occupied),
        "pss": sum(m["pss"] for m in occupied),
        "batch_s": [round(t, 7) for t in batch_s],
    }


def _fork(
    case: Case, function: Callable[[Case], Delivered], ready: int, go: tuple[int, int]
) -> tuple[int, int]:
    """Start one client; return its process id and the pipe from which its figures come."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    os.close(out)
    os.close(go[1])
    os.dup2(2, 1)  # packages may print
    figures = _measure(case, function, ready, go[0])
    with open(into, "w") as file:
        json.dump(figures, file)
    sys.exit(0)


def main() -> int:
    """Run the case given as the first argument."""
    case: Case = json.loads(sys.argv[1])
    module, _, name = case["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    for package in case.get("imports", ()):  # once, not in each client
        importlib.import_module(package)
    arrived, ready = os.pipe()
    go = os.pipe()
    clients = [
        _fork({**case, "client": k, "seed": case["seed"] + k}, function, ready, go)
        for k in range(case["clients"])
    ]
    os.close(ready)
    count = 0
    while count < len(clients) and (some := os.read(arrived, 64)):
        count += len(some)
    if count < len(clients):  # a client has ended; standard error says why
        os.close(go[1])
        return 1
    shared = memory(os.getpid())
    print("ready", *(pid for pid, _ in clients), flush=True)
    sys.stdin.readline()
    os.close(go[1])
    code = 0
    for pid, out in clients:
        with open(out) as file:
            text = file.read()
        if os.waitpid(pid, 0)[1] != 0 or not text:
            code = 1
            continue
        figures = json.loads(text)
        for name in {"anonymous", "pss"} & figures.keys():  # pages shared with this process
            figures[name] += shared[name] // len(clients)
        print(json.dumps(figures), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
