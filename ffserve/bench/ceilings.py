"""The ceilings of a machine: how fast memory copies samples, and how fast the disk delivers them.

A way to read is a function that takes a case (a dict with ``count``, ``sample_size``, ``batch``,
``seed`` and ``paths``) and yields (samples, bytes) for each batch that it has delivered into memory
of its own. `ffserve bench` runs such functions in its own process, the repository's `benchmarks` in
processes of their own.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import FFServeError

Case = dict[str, Any]
Delivered = Generator[tuple[int, int] | dict[str, Any], None, None]


def batches(case: Case) -> Iterator[NDArray[np.int64]]:
    """Yield random batches of indices without end; with ``once`` one permutation."""
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
    """Make a contestant of a function that reads a batch and returns its bytes."""
    for indices in batches(case):
        yield len(indices), read(indices)


# --------------------------------------------------------------------------- memory and disk

BLOCK = 4096
RAW_THREADS = 32
FIO_MISSING = "fio is not installed (apt-get install fio, dnf install fio)"
STREAM_BLOCK = 1 << 20


def touched(size: int) -> NDArray[np.uint8]:
    """Return private memory that has been touched, in huge pages where possible."""
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    touched = np.frombuffer(mapping, np.uint8)
    touched[::BLOCK] = 1
    return touched


def memcpy(case: Case) -> Delivered:
    """Copy each sample from a random place into one warm buffer, by one call of numpy per batch."""
    step, size = case["sample_size"], case["batch"]
    table = touched(case["count"] * step).reshape(case["count"], step)
    rows = touched(size * step).reshape(size, step)

    def copy(indices: NDArray[np.int64]) -> int:
        np.take(table, indices, axis=0, out=rows[: len(indices)], mode="clip")
        return int(len(indices) * step)

    return delivering(case, copy)


def raw_reads(case: Case) -> Delivered:
    """Read random blocks with threads of preadv and O_DIRECT: the stand-in for fio."""
    step = _whole_blocks(case["sample_size"])
    fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in case["paths"]]
    spans = [max(1, (os.fstat(fd).st_size - step) // BLOCK) for fd in fds]
    requests: SimpleQueue[tuple[int, int]] = SimpleQueue()
    completed: SimpleQueue[int] = SimpleQueue()

    def work() -> None:
        buffer = [mmap.mmap(-1, step)]
        while True:
            file, offset = requests.get()
            completed.put(os.preadv(fds[file], buffer, offset))

    for _ in range(RAW_THREADS):
        threading.Thread(target=work, daemon=True).start()
    random = np.random.default_rng(case["seed"])
    for indices in batches({**case, "once": False}):
        for _ in range(len(indices)):
            file = int(random.integers(len(fds)))
            requests.put((file, int(random.integers(spans[file])) * BLOCK))
        yield len(indices), sum(completed.get() for _ in range(len(indices)))


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def has_fio() -> bool:
    """Return whether fio is installed."""
    return shutil.which("fio") is not None


Pattern = Literal["blocks", "extents", "batches", "stream"]
"""The reads of fio. ``blocks``: random whole blocks of a sample's size. ``extents``: what direct
I/O has to read for a sample that begins anywhere in the file, in logical blocks of the device; only
the sample's own bytes count. ``batches``: extents, ``depth`` of them at a time, the next when all
have completed. ``stream``: from the first byte to the last."""


def fio(
    paths: Sequence[str],
    mean: int,
    depth: int,
    seconds: float,
    pattern: Pattern = "blocks",
    extent: Callable[[], tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """Read a data set's files with fio: io_uring, O_DIRECT.

    Args:
        mean: bytes of a sample, of which the reads are; those in order have STREAM_BLOCK.
        depth: reads in flight.
        extent: returns the bytes of a direct read of such a sample, and their alignment; extents
            and batches need it.
    Returns: the figures of a client.
    Raises:  FFServeError when fio fails.
    """
    step = STREAM_BLOCK if pattern == "stream" else _whole_blocks(mean)
    counted, aligned = step, step
    if pattern in ("extents", "batches"):
        assert extent is not None
        counted, (step, aligned) = mean, extent()
    names = ":".join(path.replace("\\", r"\\").replace(":", r"\:") for path in paths)
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
    finished = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        job = json.loads(finished.stdout[finished.stdout.index("{") :])["jobs"][0]
        count, run_s = int(job["read"]["total_ios"]), job["read"]["runtime"] / 1000
        used_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * run_s
        if finished.returncode != 0 or count == 0:
            raise ValueError
    except (ValueError, KeyError, IndexError):
        lines = (finished.stderr or finished.stdout).strip().splitlines()
        raise FFServeError(f"fio failed: {lines[-1] if lines else 'no output'}") from None
    return {"samples": count, "size": count * counted, "seconds": run_s, "cpu": used_s}
