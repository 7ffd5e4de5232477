"""Examples in Ray Data, side by side with Parquet and with Ray's own TFRecord.

    python -m benchmarks.ray [--directory /dev/shm] [--size 256MiB] [--own 8MiB] [--rounds 3]

Every figure is the time of Parquet divided by that of the way for the same table in the same run:
best of the rounds, files in the page cache, two cores. Ray's own reader and writer get a table of
`--own` bytes, and the figure is of bytes per second; they need TensorFlow (and crc32c) and are left
out without it. Needs `make ray`.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data

import ffserve.ray
from ffserve.config import parse_size

ROW_SIZE = 300
Ways = dict[str, tuple[int, Callable[[], None]]]
"""By name the bytes of the table, and what is measured."""


def rows_of(batch: dict[str, Any]) -> Any:
    """Return rows of an integer, a float, 32 floats and a text."""
    number = batch["id"]
    count = len(number)
    chance = np.random.default_rng(int(number[0]))
    edges = np.arange(count + 1, dtype=np.int32) * 32
    floats = chance.random(32 * count, np.float32)
    texts = [f"text of the record {k:032x}{-k:032x}" for k in number.tolist()]
    return pa.table(
        {
            "id": number,
            "x": chance.random(count, np.float32),
            "v": pa.ListArray.from_arrays(edges, floats),
            "t": texts,
        }
    )


def table(size: int) -> Any:
    """Return a materialized table of 4 blocks."""
    dataset = ray.data.range(size // ROW_SIZE, override_num_blocks=4)
    return dataset.map_batches(rows_of, batch_size=None).materialize()


def consume(dataset: Any) -> None:
    """Read everything and drop it."""
    for _ in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
        pass


def best(rounds: int, ways: Ways) -> dict[str, float]:
    """Return the shortest time per byte of each way, taken in turns."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, (size, run) in ways.items():
            begun = time.perf_counter()
            run()
            found[name] = min(found[name], (time.perf_counter() - begun) / size)
    return found


def report(title: str, times: dict[str, float], size: int) -> None:
    """Print a ratio per way."""
    for name, seconds in times.items():
        ratio = times["parquet"] / seconds
        print(f"{title:6} {name:24} {seconds * size:8.2f} s  {ratio:6.3f}", flush=True)


def compare(folder: Path, size: int, own: int, rounds: int) -> None:
    """Write and read the table in all ways."""

    def fresh(name: str) -> str:
        shutil.rmtree(folder / name, ignore_errors=True)
        return str(folder / name)

    rows = table(size)
    writing: Ways = {
        "parquet": (size, lambda: rows.write_parquet(fresh("parquet"))),
        "tfrecord": (
            size,
            lambda: ffserve.ray.write(rows, fresh("tfrecord"), format="tfrecord"),
        ),
    }
    few = None
    if own and importlib.util.find_spec("tensorflow"):
        few = table(own)
        if importlib.util.find_spec("crc32c"):
            writing["Ray's own tfrecord"] = (own, lambda: few.write_tfrecords(fresh("written")))
        ffserve.ray.write(few, f"{folder}/own", format="tfrecord")
    report("write", best(rounds, writing), size)
    found = ffserve.ray.read(f"{folder}/tfrecord", sampling_ratio=0.001).schema()
    schema = found.base_schema
    reading: Ways = {
        "parquet": (size, lambda: consume(ray.data.read_parquet(f"{folder}/parquet"))),
        "tfrecord with a schema": (
            size,
            lambda: consume(ffserve.ray.read(f"{folder}/tfrecord", schema=schema)),
        ),
        "tfrecord": (size, lambda: consume(ffserve.ray.read(f"{folder}/tfrecord"))),
    }
    if few is not None:
        files = [str(path) for path in sorted((folder / "own").glob("part-*"))]
        reading["tfrecord, small table"] = (
            own, lambda: consume(ffserve.ray.read(files, schema=schema)),
        )  # fmt: skip
        reading["Ray's own, small table"] = (
            own, lambda: consume(ray.data.read_tfrecords(files, file_extensions=None)),
        )  # fmt: skip
    report("read", best(rounds, reading), size)


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--size", type=parse_size, default=256 << 20)
    parser.add_argument("--own", type=parse_size, default=8 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=3 * options.size + (100 << 20),
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        compare(folder, options.size, options.own, options.rounds)
    finally:
        shutil.rmtree(folder)
        ray.shutdown()


if __name__ == "__main__":
    main()
