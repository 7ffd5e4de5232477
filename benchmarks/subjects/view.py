"""Rows of the view: files of `ffserve mount`, beside the plain file and beside `read_batch`."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.measuring import (
    Bench,
    Contestant,
    Group,
    Result,
    Row,
    Yardstick,
    held_in_memory,
    ratio,
)
from ffserve.bench.ceilings import Case, Delivered, delivering
from ffserve.bench.samples import MIB, BenchmarkData
from ffserve.errors import FFServeError

HERE = "benchmarks.subjects.view"
READERS = 4
LISTED_COUNT = 100_000
FOLDER_COUNT = 10_000
"""Samples in a folder of the view."""
READ_SIZE = 1 << 20
TMPFS = "/dev/shm"
"""A file system that has its files in pages of 4 KiB, as FUSE has them."""

Note = Callable[[str], None]


# --------------------------------------------------------------------------- contestants


def whole_file(case: Case) -> Delivered:
    """Read a file from its beginning to its end, over and over."""
    into = bytearray(READ_SIZE)
    fd = os.open(case["file"], os.O_RDONLY)
    for offset in itertools.cycle(range(0, os.fstat(fd).st_size, READ_SIZE)):
        yield 1, os.preadv(fd, [into], offset)


def _read_file(path: str, into: bytearray) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.readv(fd, [into])
    finally:
        os.close(fd)


def _names(case: Case) -> list[str]:
    """Return the paths of all samples."""
    [path] = case["paths"]
    count = case["count"]
    folders, digits = len(str((count - 1) // FOLDER_COUNT)), len(str(count - 1))
    top = f"{case['place']}/samples/{os.path.basename(path)}"
    return [f"{top}/{k // FOLDER_COUNT:0{folders}}/{k:0{digits}}" for k in range(count)]


def files(case: Case) -> Delivered:
    """Read random samples as files."""
    names, into = _names(case), bytearray(2 * case["sample_size"])

    def read(indices: NDArray[np.int64]) -> int:
        return sum(_read_file(names[k], into) for k in indices.tolist())

    return delivering(case, read)


def files_once(case: Case) -> Delivered:
    """Read each sample as a file, once, a share of all by each client."""
    names, into = _names(case), bytearray(2 * case["sample_size"])
    order = np.random.default_rng(0).permutation(len(names))
    for k in order[case["seed"] % READERS :: READERS].tolist():
        yield 1, _read_file(names[k], into)


def plain_files(case: Case) -> Delivered:
    """Read random ordinary files of the same size."""
    folder, into = Path(case["folder"]), bytearray(2 * case["sample_size"])
    names = [str(folder / str(k)) for k in range(case["count"])]

    def read(indices: NDArray[np.int64]) -> int:
        return sum(_read_file(names[k], into) for k in indices.tolist())

    return delivering(case, read)


def listing(case: Case) -> Delivered:
    """List all samples, folder by folder."""
    top = Path(_names(case)[0]).parents[1]
    begun = time.perf_counter()
    count = sum(len(os.listdir(folder)) for folder in sorted(top.iterdir()))
    yield {"samples": count, "listing_s": time.perf_counter() - begun}


# --------------------------------------------------------------------------- rows


@contextlib.contextmanager
def mounted(bench: Bench, data: BenchmarkData, server: str) -> Iterator[str]:
    """Mount data; give the mount point."""
    command = bench.installation.command("ffserve")
    with tempfile.TemporaryDirectory(prefix="ffserve-view-") as place:
        done = subprocess.run(
            [*command, "mount", place, *data.paths, "--server", server],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise FFServeError(f"cannot mount a view: {done.stderr.strip()}")
        try:
            yield place
        finally:
            subprocess.run([*command, "unmount", "--lazy", place], check=True)


def groups(bench: Bench, data: BenchmarkData, many: BenchmarkData, note: Note) -> list[Group]:
    """Return all groups.

    Args: many: of at least 100,000 samples, for listing.
    """
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        note("view: not measured, it needs root and /dev/fuse")
        return []
    return [_shards(bench, data), *_samples(bench, data), _listing(bench, many)]


def _shards(bench: Bench, data: BenchmarkData) -> Group:
    [path] = data.paths

    def plain() -> Result:
        with held_in_memory(data.paths):
            return bench.run(f"{HERE}:whole_file", data, file=path, warm=64)

    def shown() -> Result:
        with held_in_memory(data.paths), mounted(bench, data, "off") as place:
            file = f"{place}/shards/{os.path.basename(path)}"
            return bench.run(f"{HERE}:whole_file", data, file=file, warm=64)

    row = Row(f"view/{data.name}/shards", "a file of shards/, in order", ratio, limit=0.9)
    return Group(
        "files of a view, in the page cache", Yardstick("the file itself", plain),
        (Contestant("ffserve mount, shards/", shown, (row,)),),
        data.make, {"state": "view", "bytes": MIB},
    )  # fmt: skip


def _samples(bench: Bench, data: BenchmarkData) -> list[Group]:
    def batches() -> Result:
        return bench.run(
            "benchmarks.harness.contestants:read_batch", data, batch=64, clients=READERS,
            daemon=bench.hot_daemon(data), warm=8,
        )  # fmt: skip

    def again() -> Result:
        with mounted(bench, data, bench.hot_daemon(data).socket) as place:
            for _ in files_of(place, data):
                pass
            return bench.run(
                f"{HERE}:files", data, clients=READERS, place=place, batch=64, warm=1
            )  # fmt: skip

    def first() -> Result:
        with mounted(bench, data, bench.hot_daemon(data).socket) as place:
            for folder in {os.path.dirname(name) for name in _names(_case(place, data))}:
                os.listdir(folder)
            return bench.run(f"{HERE}:files_once", data, clients=READERS, place=place)

    def plain(top: str) -> Result:
        with tempfile.TemporaryDirectory(prefix="ffserve-files-", dir=top) as folder:
            content = os.urandom(data.mean)
            names = [f"{folder}/{k}" for k in range(data.count)]
            for name in names:
                Path(name).write_bytes(content)
            os.sync()
            for name in names:
                _read_in(name)
            return bench.run(
                f"{HERE}:plain_files", data, clients=READERS, folder=folder, batch=64, warm=1
            )

    name = f"view/{data.name}/readers{READERS}"
    of = {"state": "view", "bytes": data.mean, "batch": 64, "clients": READERS}
    shown = "ffserve mount, samples/"
    return [
        Group(
            f"samples of a view, {data.name}, {READERS} readers",
            Yardstick("read_batch of 64", batches),
            (
                Contestant(shown, again, (Row(f"{name}/again", "read before", ratio),)),
                Contestant(
                    f"{shown}, once", first,
                    (Row(f"{name}/first", "listed, not read before", ratio),),
                ),
                Contestant(
                    "ordinary files", lambda: plain(bench.folder),
                    (Row(f"{name}/plain", "ordinary files in the page cache", ratio),),
                ),
                Contestant(
                    "files in tmpfs", lambda: plain(TMPFS),
                    (Row(f"{name}/tmpfs", "files in tmpfs", ratio),),
                ),
            ),
            data.make, of,
        ),
        Group(
            f"samples of a view and files in tmpfs, {data.name}, {READERS} readers",
            Yardstick("files in tmpfs", lambda: plain(TMPFS)),
            (
                Contestant(
                    shown, again, (Row(f"{name}/again/tmpfs", "read before", ratio, limit=0.8),)
                ),
            ),
            data.make, of,
        ),
    ]  # fmt: skip


def _read_in(name: str) -> None:
    """Have a file in the page cache as it was read: written ones are in larger pages."""
    with open(name, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.read()


def _case(place: str, data: BenchmarkData) -> Case:
    return {"paths": data.paths, "count": data.count, "place": place}


def files_of(place: str, data: BenchmarkData) -> Iterator[int]:
    """Read every sample as a file, once."""
    into = bytearray(2 * data.mean)
    for name in _names(_case(place, data)):
        yield _read_file(name, into)


def _listing(bench: Bench, data: BenchmarkData) -> Group:
    def run() -> Result:
        with mounted(bench, data, "off") as place:
            return bench.run(f"{HERE}:listing", data, place=place)

    def seconds(result: Result, base: Result | None) -> float:
        return result.total("listing_s") / result.total("samples") * LISTED_COUNT

    row = Row("view/list", "100,000 entries are listed", seconds, "s", 1.0, at_most=True)
    return Group(
        f"listing a view of {data.count:,} samples", None,
        (Contestant("ffserve mount, samples/", run, (row,)),), data.make, {"state": "view"},
    )  # fmt: skip
