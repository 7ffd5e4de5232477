"""Compressed TFRecord by index, side by side with RecordIO chunks and with reading in order.

    python -m benchmarks.compressed [--directory /dev/shm] [--size 256MiB] [--rounds 3]

Every figure is a ratio to another one of the same run. The files are in the page cache: what is
compared is the work of decoding. Readers have no daemon; batches have 64 samples.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ffserve
from ffserve.config import parse_size
from ffserve.disk.shardfile import write_index_file
from ffserve.formats.tfrecord import TFRecordEncoder

SAMPLE_SIZE = 16 << 10
BATCH_COUNT = 64
RANDOM_BATCHES = 20


def samples(size: int) -> list[bytes]:
    """Return samples of about the given total size that compress to a quarter, as text does."""
    rng = np.random.default_rng(1)
    words = np.array([rng.bytes(int(n)) for n in rng.integers(3, 10, 4000)], object)
    found = []
    for _ in range(size // SAMPLE_SIZE):
        chosen = words[rng.zipf(1.3, SAMPLE_SIZE // 5) % 4000]
        found.append(b" ".join(chosen.tolist())[:SAMPLE_SIZE])
    return found


def written(folder: Path, payloads: list[bytes]) -> dict[str, Path]:
    """Write the samples in every way that is compared."""
    encoder = TFRecordEncoder()
    plain = b"".join(bytes(b) for p in payloads for b in encoder.encode(memoryview(p)))
    paths = {name: folder / name for name in ("other.tfrecord.gz", "other.tfrecord.zlib")}
    paths["other.tfrecord.gz"].write_bytes(gzip.compress(plain, 6))
    paths["other.tfrecord.zlib"].write_bytes(zlib.compress(plain, 6))
    for name, options in (
        ("ours.tfrecord.gz", {}),
        ("gzip.recordio", {"compression": "gzip", "max_chunk_size": 1 << 20}),
        ("snappy.recordio", {"compression": "snappy", "max_chunk_size": 1 << 20}),
        ("plain.tfrecord", {}),
    ):
        paths[name] = folder / name
        with ffserve.create(paths[name], **options) as writer:  # type: ignore[arg-type]
            for payload in payloads:
                writer.write(payload)
    return paths


def at_random(path: Path) -> float:
    """Return the samples per second of batches of random samples."""
    with ffserve.open(path, server="off") as reader:
        order = np.random.default_rng(2).permutation(len(reader))
        batches = np.split(order[: RANDOM_BATCHES * BATCH_COUNT], RANDOM_BATCHES)
        reader.read_batch(batches[0])
        begin = time.perf_counter()
        for batch in batches[1:]:
            reader.read_batch(batch)
        return BATCH_COUNT * (RANDOM_BATCHES - 1) / (time.perf_counter() - begin)


def in_order(path: Path, *, indexed: bool) -> float:
    """Return the samples per second of one pass in order, streamed or by index."""
    with ffserve.open(path, server="off") as reader:
        count = len(reader) if indexed else 0
        begin = time.perf_counter()
        count = sum(len(batch) for batch in reader.batches(range(count) if indexed else None))
        return count / (time.perf_counter() - begin)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Print the ratios, each the median of some rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--size", default="256MiB")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.directory))
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        payloads = samples(parse_size(arguments.size))
        paths = written(folder, payloads)
        del payloads
        for name, path in paths.items():
            print(f"{name:22} {path.stat().st_size / (1 << 20):8.1f} MiB")
        rows: dict[str, list[float]] = {}

        def unpacked() -> None:
            subprocess.run(["gzip", "-dc", other], stdout=subprocess.DEVNULL, check=True)

        def indexed() -> None:
            write_index_file(other, renew=True)

        def add(name: str, value: float) -> None:
            rows.setdefault(name, []).append(value)

        other = str(paths["other.tfrecord.gz"])
        for _ in range(arguments.rounds):
            unpack = timed(unpacked)
            add("speed of an index pass / gzip -d", unpack / timed(indexed))
            stream = in_order(paths["other.tfrecord.gz"], indexed=False)
            by_index = in_order(paths["other.tfrecord.gz"], indexed=True)
            add("in order by index / streamed", by_index / stream)
            speeds = {name: at_random(path) for name, path in paths.items()}
            for name, speed in speeds.items():
                add(f"random {name} / random gzip.recordio", speed / speeds["gzip.recordio"])
            for name in ("other.tfrecord.gz", "ours.tfrecord.gz"):
                add(f"random {name} / streamed in order", speeds[name] / stream)
        for name, values in rows.items():
            shown = " ".join(f"{value:.3f}" for value in values)
            print(f"{np.median(values):8.3f}  {name}   ({shown})")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
