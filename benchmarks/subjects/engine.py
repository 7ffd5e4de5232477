"""Rows of the I/O engine alone: random reads into an arena, without daemon, cache or client."""

from __future__ import annotations

import mmap
import os
import select
from typing import Any

import numpy as np

import ffserve
from benchmarks.harness.kinds import disk
from benchmarks.harness.measuring import Bench, Contestant, Group, Row, ratio
from ffserve.bench.ceilings import Case, Delivered
from ffserve.bench.samples import MIB, BenchmarkData
from ffserve.engine import io
from ffserve.engine.codec import CRC_32, CRC_NONE
from ffserve.engine.shm import retract
from ffserve.engine.slots import ENTRY_DTYPE

BATCH = 64
DEPTH = 64
BLOCK = 4096
HUGE = 2 * MIB
WAYS = {"in_flight": (4, True), "unchecked": (4, False), "batch64": (1, True)}
"""Name → batches in flight, and whether checksums are verified."""


def group(bench: Bench, data: BenchmarkData) -> Group:
    """Return the group of all engines that this machine has.

    Args: data: records that begin at blocks.
    """

    def contestant(kind: io.Kind, way: str) -> Contestant:
        in_flight, verify = WAYS[way]
        row = Row(f"engine/{data.name}/{kind}/{way}", f"{kind}, {way}", ratio)
        return Contestant(
            f"ffserve {kind} {way}",
            lambda: bench.run(
                "benchmarks.subjects.engine:reads",
                data,
                kind=kind,
                in_flight=in_flight,
                verify=verify,
            ),
            (row,),
        )

    return Group(
        f"the engine alone, {data.name}, against {DEPTH} reads in flight",
        disk(bench, data, DEPTH, "blocks"),
        tuple(contestant(kind, way) for kind in io.probe() for way in WAYS),
        data.make,
        {"state": "cold", "bytes": data.mean, "batch": BATCH, "clients": 1},
    )


def _arena(size: int) -> tuple[Any, Any]:
    """Return memory that begins at a huge page, and what keeps it.

    The daemon's arena has huge pages, too: with small ones a read of 100 KiB is 25 segments to the
    device, which costs up to a third of its rate.
    """
    mapping = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % HUGE
    arena = whole[start : start + size]
    arena[::BLOCK] = 1
    return arena, mapping


def reads(case: Case) -> Delivered:
    """Read random records into slots and publish them: a contestant."""
    size, in_flight = case["sample_size"], case["in_flight"]
    slot_size = -(-size // BLOCK) * BLOCK
    count = in_flight * BATCH
    arena, _mapping = _arena(count * slot_size)
    entries = np.frombuffer(mmap.mmap(-1, count * ENTRY_DTYPE.itemsize), ENTRY_DTYPE)
    with ffserve.open(case["paths"], server="off") as reader:
        offsets, _, checksums = (np.array(table) for table in reader.tables(0))
    file, alignment = io.open_direct(case["paths"][0])
    engine = io.Engine(case["kind"], depth=DEPTH, threads=DEPTH)
    engine.set_arena(arena.ctypes.data, len(arena), entries.ctypes.data, count)
    assert engine.add_file(file, alignment) == 0
    notified = engine.fileno()  # before the first batch, of whose end it would not tell
    random = np.random.default_rng(case["seed"])

    def submit(batch: io.EngineBatch) -> None:
        indices = random.integers(0, len(offsets), BATCH)
        batch.reads["offset"] = batch.records["offset"] = offsets[indices]
        batch.records["checksum"] = checksums[indices]
        retract(
            entries.ctypes.data,
            batch.records["entry"].astype(np.int64),
            np.ones(BATCH, np.int64),
            batch.reads["slot"].copy(),
            batch.reads["slot_size"].copy(),
        )
        engine.submit(batch)

    for k in range(in_flight):
        batch = engine.batch(BATCH, BATCH)
        slots = np.arange(k * BATCH, (k + 1) * BATCH, dtype=np.uint64)
        batch.reads["slot"] = slots * np.uint64(slot_size)
        batch.reads["slot_size"] = slot_size
        batch.reads["length"] = batch.records["length"] = size
        batch.reads["file"] = 0
        batch.reads["checksum_kind"] = CRC_32 if case["verify"] else CRC_NONE
        batch.reads["first_record"] = np.arange(BATCH)
        batch.reads["record_count"] = 1
        batch.records["entry"] = slots
        submit(batch)
    try:
        while True:
            select.select([notified], [], [])
            completed = engine.completed()
            for batch in completed:
                assert batch.failed == 0, batch.records[batch.records["status"] != 0]
                submit(batch)
            yield len(completed) * BATCH, len(completed) * BATCH * size
    finally:
        while in_flight:
            select.select([notified], [], [])
            in_flight -= len(engine.completed())
        engine.close()
        os.close(file)
