"""The engine against fio, and copying out of the arena against plain copies, in one run.

Ratios are what counts: a virtual disk's speed changes from minute to minute, so the engines and
fio take turns and the median turn is reported.

    python -m benchmarks.engine [--folder .bench] [--size-gib 2] [--turns 3] [--seconds 2]
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import resource
import select
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ffserve.bench import yardsticks
from ffserve.bench.records import Data
from ffserve.engine import io
from ffserve.engine.codec import CRC_32, CRC_NONE, checksums
from ffserve.engine.io import open_direct
from ffserve.engine.shm import ENTRY_DTYPE, View, retract

MIB = 1 << 20
BATCH = 64
DEPTH = 64
HUGE = 2 * MIB


def cpu_s() -> float:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def make_file(path: Path, size: int) -> None:
    """Write random bytes, and take them out of the page cache."""
    if path.exists() and path.stat().st_size == size:
        return
    random = np.random.default_rng(0)
    with open(path, "wb") as out:
        for _ in range(size // (64 * MIB)):
            out.write(random.bytes(64 * MIB))
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def checksums_of(path: Path, size: int, step: int) -> npt.NDArray[np.uint32]:
    count = size // step
    with open(path, "rb") as source, mmap.mmap(source.fileno(), size, prot=mmap.PROT_READ) as all_:
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(step)
        found = checksums(CRC_32, all_, offsets, np.full(count, step, np.uint64))
        all_.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return found


class Cold:
    """Random reads into slots of an arena, published, ``ahead`` batches in flight.

    The arena has huge pages, as the daemon's has: with small ones a read of 100 KiB is 25 pieces
    of memory to the device, which costs up to a third of its speed.
    """

    def __init__(
        self, path: Path, step: int, kind: io.Kind, ahead: int, verify: bool = True
    ) -> None:
        self.step, self.ahead = step, ahead
        self.size = path.stat().st_size
        self.crcs = checksums_of(path, self.size, step)
        self.fd, alignment = open_direct(path)
        room = -(-step // 4096) * 4096
        count = ahead * BATCH
        size = (count * room // HUGE + 2) * HUGE
        mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
        start = -whole.ctypes.data % HUGE
        self.arena = whole[start : start + count * room]
        self.arena[::4096] = 1
        self.entries = np.frombuffer(mmap.mmap(-1, count * ENTRY_DTYPE.itemsize), ENTRY_DTYPE)
        self.engine = io.Engine(kind, depth=DEPTH, threads=DEPTH)
        self.engine.set_arena(
            self.arena.ctypes.data, len(self.arena), self.entries.ctypes.data, count
        )
        self.batches = []
        for k in range(ahead):
            batch = self.engine.batch(BATCH, BATCH)
            slots = np.arange(k * BATCH, (k + 1) * BATCH, dtype=np.uint64)
            batch.reads["slot"] = slots * np.uint64(room)
            batch.reads["slot_size"] = room
            batch.reads["length"] = batch.records["length"] = step
            batch.reads["file"] = 0
            batch.reads["checksum_kind"] = CRC_32 if verify else CRC_NONE
            batch.reads["first_record"] = np.arange(BATCH)
            batch.reads["record_count"] = 1
            batch.records["entry"] = slots
            self.batches.append(batch)
        assert self.engine.add_file(self.fd, alignment) == 0
        self.random = np.random.default_rng(1)

    def submit(self, batch: io.Batch) -> None:
        chosen = self.random.integers(0, len(self.crcs), BATCH)
        batch.reads["offset"] = batch.records["offset"] = chosen * self.step
        batch.records["checksum"] = self.crcs[chosen]
        retract(
            self.entries.ctypes.data,
            batch.records["entry"].astype(np.int64),
            np.ones(BATCH, np.int64),
            batch.reads["slot"].copy(),
            batch.reads["slot_size"].copy(),
        )
        self.engine.submit(batch)

    def run(self, seconds: float) -> tuple[float, float]:
        """Reads a second, and microseconds of this process's CPU a read."""
        fd = self.engine.fileno()
        begin, used = time.perf_counter(), cpu_s()
        for batch in self.batches:
            self.submit(batch)
        ended, flying = 0, len(self.batches)
        while flying:
            select.select([fd], [], [])
            for batch in self.engine.completed():
                assert batch.failed == 0, batch.records[batch.records["status"] != 0]
                ended += BATCH
                if time.perf_counter() - begin < seconds:
                    self.submit(batch)
                else:
                    flying -= 1
        took = time.perf_counter() - begin
        return ended / took, (cpu_s() - used) / ended * 1e6

    def close(self) -> None:
        self.engine.close()
        os.close(self.fd)


def fio(path: Path, step: int, seconds: float) -> tuple[float, float]:
    """Reads a second, and microseconds of fio's CPU a read."""
    size = path.stat().st_size
    found = yardsticks.fio(Data(path.name, (str(path),), size // step, size), DEPTH, seconds)
    return found["samples"] / found["seconds"], found["cpu"] / found["samples"] * 1e6


def turns(
    contestants: dict[str, Callable[[], tuple[float, float]]], count: int
) -> dict[str, tuple[float, float]]:
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(count):
        for name, run in contestants.items():
            results[name].append(run())
    return {
        name: (statistics.median(r for r, _ in runs), statistics.median(c for _, c in runs))
        for name, runs in results.items()
    }


def cold(path: Path, step: int, count: int, seconds: float) -> None:
    contestants: dict[str, Callable[[], tuple[float, float]]] = {}
    if yardsticks.has_fio():
        contestants["fio io_uring"] = lambda: fio(path, step, seconds)
    opened = []
    for kind in io.probe():
        for what, ahead, verify in (
            ("4 batches in flight", 4, True),
            ("the same, no checksum", 4, False),
            ("one batch at a time", 1, True),
        ):
            bench = Cold(path, step, kind, ahead, verify)
            opened.append(bench)
            contestants[f"{kind}, {what}"] = functools.partial(bench.run, seconds)
    results = turns(contestants, count)
    yardstick = results.get("fio io_uring", (float("nan"),))[0]
    print(f"\ncold, {step} bytes, depth {DEPTH}        reads/s     MB/s  CPU us  ratio to fio")
    for name, (rate, cpu) in results.items():
        print(
            f"  {name:32} {rate:9.0f} {rate * step / 1e6:8.0f} {cpu:7.1f} {rate / yardstick:8.2f}"
        )
    for bench in opened:
        bench.close()


def hot(step: int, batch: int, count: int, arena_size: int = 1 << 30) -> None:
    """gather() against numpy's take, which is one memcpy a sample from the same places."""
    samples = arena_size // step
    arena = np.frombuffer(mmap.mmap(-1, arena_size), np.uint8)
    arena[::4096] = 1
    entries = np.zeros(samples, ENTRY_DTYPE)
    entries["seq"] = 1
    entries["length_low"] = step
    entries["place"] = np.arange(samples, dtype=np.uint64) * np.uint64(step)
    view = View(arena.ctypes.data, arena_size, [(entries.ctypes.data, 0, samples)])
    table = arena[: samples * step].reshape(samples, step)
    buffer = np.zeros(batch * step, np.uint8)
    rows = buffer.reshape(batch, step)
    random = np.random.default_rng(2)
    rounds = max(1, (256 * MIB) // (batch * step))

    def plain() -> tuple[float, float]:
        picks = random.integers(0, samples, (rounds, batch))
        begin = time.perf_counter()
        for chosen in picks:
            np.take(table, chosen, axis=0, out=rows, mode="clip")
        return rounds * batch / (time.perf_counter() - begin), 0

    def gathered() -> tuple[float, float]:
        picks = random.integers(0, samples, (rounds, batch))
        begin = time.perf_counter()
        for chosen in picks:
            offsets, _, _ = view.locate(chosen)
            view.gather(chosen, offsets, buffer)
        return rounds * batch / (time.perf_counter() - begin), 0

    result = turns({"memcpy": plain, "gather": gathered}, max(5, count))
    one, other = result["memcpy"][0], result["gather"][0]
    print(
        f"  {step:7} bytes, batches of {batch:4}: memcpy {1e9 / one:7.0f} ns, "
        f"locate and gather {1e9 / other:7.0f} ns a sample, ratio {other / one:.2f}"
    )
    chosen = random.integers(0, samples, batch)
    begin = time.perf_counter()
    for _ in range(1000):
        view.locate(chosen)
    print(f"           locate alone: {(time.perf_counter() - begin) * 1e3:.2f} us a batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    parser.add_argument("--size-gib", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    print(io.describe())
    print("\nhot")
    for step in (4096, 100 << 10):
        for batch in (64, 256):
            hot(step, batch, arguments.turns)
    path = arguments.folder / "engine.bin"
    make_file(path, arguments.size_gib << 30)
    for step in (4096, 100 << 10):
        cold(path, step, arguments.turns, arguments.seconds)


if __name__ == "__main__":
    main()
