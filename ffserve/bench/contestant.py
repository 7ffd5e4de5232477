"""One contestant: ``python -m ffserve.bench.contestant '{"who": "module:function", …}'``.

The function takes the case and yields (samples, bytes) a batch, what it delivered being in this
process's memory then. It runs in as many forked processes as the case has clients. Each warms up;
when all have, this one says "ready" and waits for a line; then all run for the time given, and one
line of JSON for each is printed: what was delivered, the seconds, the CPU seconds and memory of the
process and its children, the seconds of each batch.

Memory is taken when the time is over, of all these processes together. ``own`` is what nobody else
has and nobody could take from it (anonymous pages); ``pss`` adds the share of shared memory and of
the page cache that is mapped.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Case = dict[str, Any]
Delivered = Iterator[tuple[int, int]]


def batches(case: Case) -> Iterator[NDArray[np.int64]]:
    """Yield random batches for ever; with ``once`` a permutation, then end."""
    count, size = case["count"], case["batch"]
    random = np.random.default_rng(case["seed"])
    while True:
        order: NDArray[np.int64] = (
            random.permutation(np.arange(count))
            if case["once"]
            else random.integers(0, count, (count,))
        )
        for first in range(0, max(1, count - size + 1), size):
            yield order[first : first + size]
        if case["once"]:
            return


def delivering(case: Case, read: Callable[[NDArray[np.int64]], int]) -> Delivered:
    """Turn a function that reads a batch and returns its bytes into a contestant."""
    for chosen in batches(case):
        yield len(chosen), read(chosen)


def descendants(pid: int) -> list[int]:
    """Return the living processes below one."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process's living threads, to the nanosecond."""
    total = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def memory(pid: int) -> dict[str, int]:
    """Return a process's share of anonymous memory (``own``), of all memory (``pss``), and its
    ``private`` dirty pages, in bytes."""
    names = {"Pss_Anon:": "own", "Pss:": "pss", "Private_Dirty:": "private"}
    found = dict.fromkeys(names.values(), 0)
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size, *_ = line.split()
            if name in names:
                found[names[name]] = int(size) * 1024
    return found


def _used_s() -> float:
    """CPU seconds of this process and all of its children, living and dead."""
    dead = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.process_time()
        + dead.ru_utime
        + dead.ru_stime
        + sum(cpu_s(pid) for pid in descendants(os.getpid()))
    )


def _compete(case: Case, function: Callable[[Case], Any], ready: int, go: int) -> dict[str, Any]:
    """Warm up, wait, run, and return the figures."""
    running = function(case)
    if not isinstance(running, dict):
        for _ in range(case["warm"]):
            next(running, None)
    os.write(ready, b"r")
    os.close(ready)
    os.read(go, 1)  # ends when the last of the writers is closed
    if isinstance(running, dict):
        return running
    samples = size = 0
    took: list[float] = []
    used = _used_s()
    begin = now = time.perf_counter()
    deadline = begin + case["seconds"]
    for count, length in running:
        samples += count
        size += length
        then, now = now, time.perf_counter()
        took.append(now - then)
        if now >= deadline:
            break
    if not took:
        raise SystemExit("nothing was left to read when the clock began: the data are too few")
    used = _used_s() - used
    occupied = [memory(pid) for pid in (os.getpid(), *descendants(os.getpid()))]
    running.close()
    return {
        "samples": samples,
        "size": size,
        "seconds": now - begin,
        "cpu": used,
        "own": sum(m["own"] for m in occupied),
        "pss": sum(m["pss"] for m in occupied),
        "took": [round(t, 7) for t in took],
    }


def _fork(case: Case, function: Callable[[Case], Any], ready: int, go: tuple[int, int]) -> Any:
    """Start one client; return (pid, the pipe its figures come through)."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    os.close(out)
    os.close(go[1])
    os.dup2(2, 1)  # a package may print
    figures = _compete(case, function, ready, go[0])
    with open(into, "w") as file:
        json.dump(figures, file)
    sys.exit(0)


def main() -> int:
    """Run the case that is the first argument."""
    case: Case = json.loads(sys.argv[1])
    module, _, name = case["who"].partition(":")
    function = getattr(importlib.import_module(module), name)
    for package in case.get("imports", ()):  # once, not once a client
        importlib.import_module(package)
    arrived, ready = os.pipe()
    go = os.pipe()
    clients = [
        _fork({**case, "client": k, "seed": case["seed"] + k}, function, ready, go)
        for k in range(case["clients"])
    ]
    os.close(ready)
    here = 0
    while here < len(clients) and (some := os.read(arrived, 64)):
        here += len(some)
    if here < len(clients):  # one died; what it said stands on standard error
        os.close(go[1])
        return 1
    before = memory(os.getpid())
    print("ready", flush=True)
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
        for name in {"own", "pss"} & figures.keys():  # what the first process shares with them
            figures[name] += before[name] // len(clients)
        print(json.dumps(figures), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
