"""Contestants that only developers need."""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import ffserve
from ffserve.bench.contestant import Case, Delivered, memory
from ffserve.bench.records import Data
from ffserve.formats.ffrecord import tables_end

HOT_SHARE = 8
"""One part in so many of a mixed data set is read again and again."""


def mixed(case: Case) -> Delivered:
    """Half of each batch from the part that all clients read again and again, half from samples
    that nobody read before, of which each client has its own."""
    reader = ffserve.open(case["paths"], server=case["server"])
    hot = max(1, case["count"] // HOT_SHARE)
    order = hot + np.random.default_rng(0).permutation(case["count"] - hot)
    own = np.array_split(order, case["clients"])[case["client"]]
    half = max(1, min(case["batch"] // 2, len(own) // 8))
    random = np.random.default_rng(case["seed"])
    for first in range(0, len(own) - half + 1, half):
        chosen = np.concatenate([random.integers(0, hot, (half,)), own[first : first + half]])
        random.shuffle(chosen)
        yield len(chosen), reader.read_batch(chosen).buffer.nbytes


def opening(case: Case) -> dict[str, float]:
    """Open a data set that another client has open already; the modules are there."""
    assert ffserve.Reader  # imported when it is first asked for
    before = memory_now()
    begun = time.perf_counter()
    reader = ffserve.open(case["paths"], server=case["server"])
    took_s = time.perf_counter() - begun
    grown = memory_now() - before
    assert len(reader) == case["count"]
    reader.read([0, case["count"] - 1])
    return {"open_ms": took_s * 1e3, "grown_mb": grown / 1e6}


def memory_now() -> int:
    """Return the bytes that only this process has."""
    return memory(os.getpid())["private"]


def many_samples(folder: str, count: int, step: int) -> Data:
    """Describe a file of very many samples of zeros; `make_many` writes it."""
    return Data(
        f"{count // 1_000_000}M", (str(Path(folder) / f"{count}.ffr"),), count, count * step
    )


def make_many(data: Data) -> None:
    """Write the file: its tables, and a hole for the samples."""
    path = Path(data.paths[0])
    if path.exists():
        return
    step = data.mean
    checksums = np.full(data.count, zlib.crc32(bytes(step)), "<u4").tobytes()
    offsets = np.arange(data.count, dtype="<i8") * step + tables_end(data.count)
    body: list[Any] = [struct.pack("<q", data.count), checksums, offsets.tobytes()]
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    part_path = path.with_suffix(".part")
    with open(part_path, "wb") as file:
        file.write(struct.pack("<I", crc))
        for part in body:
            file.write(part)
        file.truncate(tables_end(data.count) + data.size)
    part_path.rename(path)
