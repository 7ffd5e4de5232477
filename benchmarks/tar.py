"""Tar files: the index, random batches beside FFRecord's, one of two fields, and other readers.

Every figure is a median of turns in one run, and a ratio: of members and FFRecord's samples of the
same bytes, of bytes that a field has and that are read for it, of samples a second beside wids and
Energon, where they are installed, when nothing is in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ffserve
from ffserve.disk.files import read_at_of
from ffserve.formats import by_name

SIZES = {4096: 50_000, 102_400: 3000}
"""Samples by their bytes."""
COLD_SIZES = {4096: 250_000, 102_400: 10_000}
"""Of which nothing is in memory: 1 GB, as read-ahead would bring a smaller file whole."""
TURNS, TURN_S, BATCH = 5, 1.0, 64


def made(folder: Path, size: int, count: int) -> tuple[str, str]:
    """Return an FFRecord file and a tar file of the same samples."""
    rng = np.random.default_rng(0)
    paths = str(folder / f"{size}.ffr"), str(folder / f"{size}.tar")
    with ffserve.create(paths[0], n=count) as record, ffserve.create(paths[1]) as tar:
        for _ in range(count):
            payload = rng.bytes(size)
            record.write(payload)
            tar.write({"bin": payload})
    return paths


def two_fields(folder: Path, size: int, count: int) -> str:
    """Return a tar file of samples with two fields of the same size."""
    rng, path = np.random.default_rng(1), str(folder / f"two-{size}.tar")
    with ffserve.create(path) as tar:
        for _ in range(count):
            tar.write({"a": rng.bytes(size), "b": rng.bytes(size)})
    return path


def forget(path: str) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run a daemon; yield its socket."""
    socket = str(folder / "daemon.sock")
    command = [sys.executable, "-m", "ffserve", "serve", "--socket", socket, "--arena", "1GiB"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as daemon:
        try:
            while subprocess.call(
                [sys.executable, "-m", "ffserve", "status", "--socket", socket],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            ):  # fmt: skip
                time.sleep(0.1)
            yield socket
        finally:
            daemon.terminate()


def rate(count: int, read: Callable[[Any], object], turn: int, cold: str = "") -> float:
    """Return samples a second of random batches. Args: cold: path of a file of which nothing is in
    memory when a batch begins, as of one that is much larger than memory."""
    order = np.random.default_rng(turn).permutation(count)
    seconds, done = 0.0, 0
    while seconds < TURN_S:
        if cold:
            forget(cold)
        begun, at = time.perf_counter(), done % (count - BATCH)
        read(order[at : at + BATCH])
        seconds += time.perf_counter() - begun
        done += BATCH
    return done / seconds


def beside(name: str, readings: dict[str, Callable[[int], float]]) -> None:
    """Print the rates of readings that take turns, as shares of the first one's."""
    found: dict[str, list[float]] = {each: [] for each in readings}
    for turn in range(TURNS):
        for each, reading in readings.items():
            found[each].append(reading(turn))
    medians = {each: statistics.median(rates) for each, rates in found.items()}
    first = next(iter(medians.values()))
    for each, median in medians.items():
        print(f"{name:34} {each:24} {median:10.0f} samples/s  {median / first:6.3f}")


def index(path: str) -> None:
    """Print how many members a second are indexed on one core, from the page cache."""
    rates = []
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    for _ in range(TURNS):
        begun = time.process_time()
        shard = by_name("tar").open(read_at_of(fd, path), size, path)
        rates.append(shard.count / (time.process_time() - begun))
    os.close(fd)
    print(f"{'index ' + os.path.basename(path):34} {statistics.median(rates):35.0f} members/s")


def cold_index(path: str) -> None:
    """Print how many members a second are indexed from the disk, and how fast the same file is read
    in order, in turns."""
    rates: dict[str, list[float]] = {"index": [], "in order": []}
    with open(path, "rb", buffering=0) as file:
        size, piece = os.fstat(file.fileno()).st_size, memoryview(bytearray(4 << 20))
        for turn in range(2 * TURNS):
            forget(path)
            begun = time.perf_counter()
            if turn % 2:
                while file.readinto(piece):
                    pass
                file.seek(0)
            else:
                count = by_name("tar").open(read_at_of(file.fileno(), path), size, path).count
            rates["in order" if turn % 2 else "index"].append(time.perf_counter() - begun)
    for name, seconds in rates.items():
        taken = statistics.median(seconds)
        print(f"{'cold ' + os.path.basename(path):34} {name:24} {count / taken:10.0f} members/s  "
              f"{size / taken / 1e6:6.0f} MB/s")  # fmt: skip


def _hot(path: str, server: str) -> Callable[[int], float]:
    reader = ffserve.open(path, server=server)
    for _ in reader.batches():
        pass
    return lambda turn: rate(len(reader), reader.read_batch, turn)


def _cold(path: str, server: str, open_: Callable[[str, str], Any]) -> Callable[[int], float]:
    def turn_of(turn: int) -> float:
        count, read, close = open_(path, server)
        try:
            return rate(count, read, turn, path)
        finally:
            close()

    return turn_of


def ours(path: str, server: str) -> tuple[int, Callable[[Any], object], Callable[[], None]]:
    """Open a file; return its number of samples, and how they are read and it is closed."""
    reader = ffserve.open(path, server=server)
    return len(reader), reader.read, reader.close


def wids(path: str, _: str) -> tuple[int, Callable[[Any], object], Callable[[], None]]:
    """Do the same by wids' index of one file."""
    from wids.wids import IndexedTarSamples

    samples = IndexedTarSamples(path=path)
    mapped = samples.reader.mmapped_file
    mapped.madvise(mmap.MADV_DONTNEED)  # what is mapped is not forgotten

    def read(indices: Any) -> object:
        found = [{name: bytes(each.read()) for name, each in samples[k].items()
                  if name != "__key__"} for k in indices.tolist()]  # fmt: skip
        mapped.madvise(mmap.MADV_DONTNEED)
        return found

    return len(samples), read, samples.close


def energon(path: str, _: str) -> tuple[int, Callable[[Any], object], Callable[[], None]]:
    """Do the same by Energon's tar reader, from the offset of each sample."""
    from megatron.energon.flavors.webdataset.itar import ITarFile

    with ffserve.open(path, server="off") as reader:
        offsets = (reader.tables(0)[0] - np.uint64(512)).tolist()
    file = open(path, "rb")  # noqa: SIM115
    archive = ITarFile.open(fileobj=file, mode="r:")

    def read(indices: Any) -> object:
        found = []
        for k in indices.tolist():
            archive.offset = offsets[k]
            content = archive.extractfile(archive.next())
            found.append(content.read() if content is not None else b"")
        return found

    return len(offsets), read, file.close


def fields(path: str, size: int, folder: Path) -> None:
    """Print how many bytes a daemon reads for one of two fields, in random order."""
    forget(path)
    with serving(folder) as socket, ffserve.open(path, server=socket, fields=["b"]) as reader:
        order = list(range(len(reader)))
        random.Random(0).shuffle(order)
        for first in range(0, len(order), BATCH):
            reader.read(order[first : first + BATCH])
        from ffserve.client.public import status

        read = status(socket)["cache"]["read_size"]
        print(f"one of two fields of {size:7} bytes {'':24} {read / (size * len(order)):6.3f}")


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="on the disk to be measured")
    sys.path += glob.glob(f"{sys.prefix}/peers/webdataset*/lib/*/site-packages")  # wids
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as name:
        folder = Path(name)
        for size, count in SIZES.items():
            record, tar = made(folder, size, count)
            index(tar)
            cold_index(tar)
            both = {"FFRecord": record, "tar": tar}
            with serving(folder) as socket:
                beside(f"hot {size}", {k: _hot(path, socket) for k, path in both.items()})
            beside(f"hot {size}, no daemon", {k: _hot(path, "off") for k, path in both.items()})
            two = two_fields(folder, size, count // 2)
            fields(two, size, folder)
        for size, count in COLD_SIZES.items():
            record, tar = made(folder, size, count)
            cold = {
                k: _cold(path, "off", ours) for k, path in {"FFRecord": record, "tar": tar}.items()
            }
            for peer, package in ((wids, "wids"), (energon, "megatron.energon")):
                with contextlib.suppress(ImportError):
                    __import__(package)
                    cold[package] = _cold(tar, "", peer)
            beside(f"cold {size}, no daemon", cold)


if __name__ == "__main__":
    main()
