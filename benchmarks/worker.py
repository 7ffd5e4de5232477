"""One contestant in a process of its own: `python -m benchmarks.worker '{"case": …}'`.

Warms up, says "ready", waits for a line, runs for the time it was given and prints one line of
JSON: bytes and batches delivered, seconds, and CPU seconds of this process.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

Case = dict[str, Any]


def batches(count: int, size: int, seed: int, *, once: bool) -> Iterator[np.ndarray[Any, Any]]:
    """Random batches; `once`: a permutation, so that nothing is asked for twice."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(count) if once else random.integers(0, count, count)
        for k in range(0, count - size + 1, size):
            yield order[k : k + size]
        if once:
            return


def huge(size: int) -> np.ndarray[Any, Any]:
    """Touched private memory."""
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    memory[::4096] = 1
    return memory


def memcpy(case: Case) -> Callable[[Any], int]:
    """One copy a sample from random places into one warm buffer, all in huge pages if it can be."""
    step, batch, samples = case["step"], case["batch"], case["count"]
    table = huge(samples * step).reshape(samples, step)
    rows = huge(batch * step).reshape(batch, step)

    def one(chosen: Any) -> int:
        np.take(table, chosen, axis=0, out=rows[: len(chosen)], mode="clip")
        return len(chosen) * step

    return one


def preadv(case: Case) -> Callable[[Any], int]:
    """What a loader without a library does: one pread a sample, through the page cache."""
    step = case["step"]
    fd = os.open(case["raw"], os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def one(chosen: Any) -> int:
        size = 0
        for index in chosen.tolist():
            size += len(os.pread(fd, step, index * step))
        return size

    return one


def reader(case: Case) -> Callable[[Any], int]:
    """`read_batch` or `read` of a Reader."""
    import ffserve

    opened = ffserve.open(case["paths"], server=case["server"])
    if case["way"] == "read":
        return lambda chosen: sum(a.nbytes for a in opened.read(chosen))
    return lambda chosen: opened.read_batch(chosen).buffer.nbytes


def streamed(case: Case) -> Iterator[int]:
    """`Reader.batches`: several batches on their way."""
    import ffserve

    opened = ffserve.open(case["paths"], server=case["server"])
    order = np.random.default_rng(case["seed"]).permutation(case["count"])
    for batch in opened.batches(order, count=case["batch"], size=1 << 40):
        yield batch.buffer.nbytes


def loader(case: Case) -> Iterator[int]:
    """Raw samples through a torch DataLoader with two workers."""
    from benchmarks.torch_cases import raw_loader

    while True:
        for samples in raw_loader(case):
            yield sum(len(sample) for sample in samples)


def steps(case: Case) -> Generator[int, None, None]:
    if case["case"] in ("streamed", "loader"):
        yield from streamed(case) if case["case"] == "streamed" else loader(case)
        return
    one = {"memcpy": memcpy, "preadv": preadv, "reader": reader}[case["case"]](case)
    for chosen in batches(case["count"], case["batch"], case["seed"], once=case["once"]):
        yield one(chosen)


def main() -> None:
    case: Case = json.loads(sys.argv[1])
    running = steps(case)
    for _ in range(case["warm"]):
        next(running)
    print("ready", flush=True)
    sys.stdin.readline()
    size = rounds = 0
    begin, deadline = time.perf_counter(), time.perf_counter() + case["seconds"]
    used = resource.getrusage(resource.RUSAGE_SELF)
    for got in running:
        size += got
        rounds += 1
        if time.perf_counter() >= deadline:
            break
    seconds = time.perf_counter() - begin
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    print(json.dumps({"size": size, "rounds": rounds, "seconds": seconds, "cpu": cpu}), flush=True)
    running.close()


if __name__ == "__main__":
    main()
