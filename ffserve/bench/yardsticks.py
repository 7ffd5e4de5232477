"""What memory and disk can do, measured without any code of ffserve's."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import threading
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ffserve.bench.contestant import Case, Delivered, batches, delivering
from ffserve.bench.records import Data
from ffserve.errors import FFServeError

BLOCK = 4096
RAW_THREADS = 32
FIO_MISSING = "fio is not installed (apt-get install fio, dnf install fio)"
STREAM_BLOCK = 1 << 20
STREAM_DEPTH = 16


def _touched(size: int) -> NDArray[np.uint8]:
    """Return touched private memory, in huge pages if it can be."""
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    memory[::BLOCK] = 1
    return memory


def memcpy(case: Case) -> Delivered:
    """One copy a sample from random places into one warm buffer, by one call of numpy a batch."""
    step, size = case["step"], case["batch"]
    table = _touched(case["count"] * step).reshape(case["count"], step)
    rows = _touched(size * step).reshape(size, step)

    def read(chosen: NDArray[np.int64]) -> int:
        np.take(table, chosen, axis=0, out=rows[: len(chosen)], mode="clip")
        return int(len(chosen) * step)

    return delivering(case, read)


def array_rows(case: Case) -> Delivered:
    """The loop that a program writes over one numpy array: ``table[indices]``."""
    table = _touched(case["count"] * case["step"]).reshape(case["count"], case["step"])
    return delivering(case, lambda chosen: int(table[chosen].nbytes))


def raw_reads(case: Case) -> Delivered:
    """Threads of preadv with O_DIRECT; where there is no fio. Python's own cost bounds it."""
    step = _whole_blocks(case["step"])
    fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in case["paths"]]
    spans = [max(1, (os.fstat(fd).st_size - step) // BLOCK) for fd in fds]
    asked: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
    ended: SimpleQueue[int] = SimpleQueue()

    def work() -> None:
        buffer = [mmap.mmap(-1, step)]
        while (place := asked.get()) is not None:
            ended.put(os.preadv(fds[place[0]], buffer, place[1]))

    for _ in range(RAW_THREADS):
        threading.Thread(target=work, daemon=True).start()
    random = np.random.default_rng(case["seed"])
    for chosen in batches({**case, "once": False}):
        for _ in range(len(chosen)):
            file = int(random.integers(len(fds)))
            asked.put((file, int(random.integers(spans[file])) * BLOCK))
        yield len(chosen), sum(ended.get() for _ in range(len(chosen)))


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def has_fio() -> bool:
    """Whether the disk's yardstick is there."""
    return shutil.which("fio") is not None


Pattern = Literal["blocks", "extents", "batches", "stream"]
"""What fio reads: random whole blocks of a sample's size; what direct I/O has to read for such a
sample, which begins anywhere in the file (some logical blocks of the device, of which the sample's
own bytes count); the same, `depth` of them at a time, the next when all have come; from the first
byte to the last."""


def fio(data: Data, depth: int, seconds: float, pattern: Pattern = "blocks") -> dict[str, Any]:
    """Read a data set's files with fio: io_uring, O_DIRECT.

    Args:
        data: reads have its mean sample's size; those in order STREAM_BLOCK.
        depth: reads in flight.
    Returns: figures as a contestant's.
    Raises:  FFServeError when fio fails.
    """
    step = STREAM_BLOCK if pattern == "stream" else _whole_blocks(data.mean)
    counted, aligned = step, step
    if pattern in ("extents", "batches"):
        counted, (step, aligned) = data.mean, data.extent()
    names = ":".join(path.replace("\\", r"\\").replace(":", r"\:") for path in data.paths)
    command = [
        "fio", "--name=bench", f"--filename={names}", f"--bs={step}", f"--iodepth={depth}",
        f"--blockalign={aligned}",
        f"--rw={'read' if pattern == 'stream' else 'randread'}", "--ioengine=io_uring",
        "--direct=1", "--readonly", "--norandommap", "--randrepeat=0", "--thread=1",
        "--registerfiles=1",
        "--nonvectored=1", "--time_based", f"--runtime={max(1, round(seconds * 1000))}ms",
        "--output-format=json",
    ]  # fmt: skip
    if pattern == "batches":
        command += [f"--iodepth_batch_submit={depth}", f"--iodepth_batch_complete_min={depth}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        count, took_s = int(job["read"]["total_ios"]), job["read"]["runtime"] / 1000
        used_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * took_s
        if done.returncode != 0 or count == 0:
            raise ValueError
    except (ValueError, KeyError, IndexError):
        words = (done.stderr or done.stdout).strip().splitlines()
        raise FFServeError(f"fio failed: {words[-1] if words else 'it said nothing'}") from None
    return {"samples": count, "size": count * counted, "seconds": took_s, "cpu": used_s}
