"""Records that an engine reads: from extents to a batch, and from a batch that has ended to the
outcome of each record.

Neighbours are read together. If the kernel refuses such a read, what it had joined is read once
more one by one, so that an unreadable record does not fail its neighbours. A record whose checksum
is wrong is read a second time, by other paths (`second_read`).

A record is known by a key of the caller's: its number in the daemon, its position in a request
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Int32s, Int64s
from ffserve.engine.io import MERGED_SIZE, EngineBatch, merge_reads, refused
from ffserve.engine.shm import NOWHERE
from ffserve.errors import STATUS_CHECKSUM, Failure
from ffserve.reads.second_read import WrongRecord

MOST_AGAIN = 1024
"""At most this many wrong records of a batch are read a second time. A block may hold 8192 small
samples; where more of them are wrong, the others are reported as they are."""

Failures: TypeAlias = dict[int, Failure]
"""Records that failed, by key."""


class BatchEngine(Protocol):
    """An object that reads batches: an engine, or a `fetched.FetchingEngine`."""

    @property
    def kind(self) -> str:
        """The name of the interface of the kernel that it uses."""
        ...

    def add_file(self, fd: int, alignment: int, around: int = 0) -> int:
        """Add a file; return its number."""
        ...

    def remove_file(self, file: int) -> None:
        """Remove a file."""
        ...

    def submit(self, batch: EngineBatch) -> None:
        """Begin to read; return at once."""
        ...

    def wait(self, batch: EngineBatch) -> object:
        """Block until a batch has ended."""
        ...


def record_batch(
    starts: Int64s,
    lengths: Int64s,
    files: Int32s,
    kinds: Int32s,
    checksums: NDArray[np.uint32],
    places: NDArray[np.uint64],
) -> EngineBatch:
    """Return a batch that reads records to addresses of the caller's, neighbours together.

    Args:
        starts, lengths: int64[n], of the payloads in their files.
        files: int32[n], the engine's number of each record's file.
        kinds, checksums: int32[n], uint32[n]: the check of each.
        places: uint64[n], the address of each record's destination.
    """
    ends = starts + lengths
    firsts = merge_reads(starts, ends, files.astype(np.int64), MERGED_SIZE)
    counts = np.diff(np.append(firsts, len(starts)))
    batch = EngineBatch(len(firsts), len(starts))
    reads, records = batch.reads, batch.records
    reads["offset"] = starts[firsts]
    reads["length"] = ends[firsts + counts - 1] - starts[firsts]
    reads["slot"] = NOWHERE
    reads["file"] = files[firsts]
    reads["checksum_kind"] = kinds[firsts]
    reads["first_record"] = firsts
    reads["record_count"] = counts
    records["offset"], records["length"] = starts, lengths
    records["entry"] = NOWHERE
    records["dest"], records["checksum"] = places, checksums
    return batch


@dataclass(slots=True)
class Outcome:
    """The outcome of a batch: its wrong and failed records. All others are at their destinations.

    failures: those that failed. wrong: those to read a second time. again: a batch that reads what
    a refused read had joined, to be submitted to the same engine; rows: its records' rows in the
    batch that has ended.
    """

    failures: Failures = field(default_factory=dict)
    wrong: list[WrongRecord] = field(default_factory=list)
    again: EngineBatch | None = None
    rows: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))


def outcome_of(batch: EngineBatch, keys: Int64s, units: Int64s | None = None) -> Outcome:
    """Return the outcome of a batch that has ended with failures.

    Args:
        keys: int64[n], of its records.
        units: int64[n], rising: records of one unit are always read together. None: each is one.
    """
    found = Outcome()
    reads, records = batch.reads, batch.records
    status = records["status"].copy()
    owners = np.repeat(np.arange(len(reads)), reads["record_count"])
    units = np.arange(len(records)) if units is None else units
    firsts = reads["first_record"].astype(np.int64)
    joined = units[firsts] != units[firsts + reads["record_count"] - 1]
    rows = np.flatnonzero(refused(status) & joined[owners])
    if len(rows):
        found.again, found.rows = _one_by_one(batch, rows, units[rows], owners[rows]), rows
        status[rows] = 0
    # A gap of a tolerant scan has no bytes.
    wrong = np.flatnonzero((status == STATUS_CHECKSUM) & (records["length"] > 0))[:MOST_AGAIN]
    for row in wrong.tolist():
        found.wrong.append(WrongRecord.of(int(keys[row]), reads[owners[row]], records[row]))
    status[wrong] = 0
    bad = np.flatnonzero(status)
    columns = bad, keys[bad], status[bad], records["found"][bad], records["checksum"][bad]
    for row, key, why, got, right in zip(*(each.tolist() for each in columns), strict=True):
        found.failures[key] = Failure(why, got, right, error=batch.errors.get(row))
    return found


def rows_of(batch: EngineBatch, reads: Int64s) -> Int64s:
    """Return the rows of the records of some reads of a batch."""
    counts = batch.reads["record_count"][reads].astype(np.int64)
    before = np.cumsum(counts) - counts
    rows: Int64s = np.repeat(batch.reads["first_record"][reads] - before, counts)
    return rows + np.arange(len(rows))


def part_of(batch: EngineBatch, reads: Int64s) -> tuple[EngineBatch, Int64s]:
    """Return a batch of some reads of another one, and the rows of their records in that one."""
    rows = rows_of(batch, reads)
    part = EngineBatch(len(reads), len(rows))
    part.reads[:], part.records[:] = batch.reads[reads], batch.records[rows]
    part.reads["first_record"] = np.cumsum(part.reads["record_count"]) - part.reads["record_count"]
    part.keep = batch.keep
    return part, rows


def _one_by_one(batch: EngineBatch, rows: Int64s, units: Int64s, owners: Int64s) -> EngineBatch:
    """Return a batch that reads some records of another one, those of each unit together."""
    firsts = np.flatnonzero(np.diff(units, prepend=-1))
    lasts = np.append(firsts[1:], len(rows)) - 1
    again = EngineBatch(len(firsts), len(rows))
    again.records[:] = records = batch.records[rows]
    reads = again.reads
    reads[:] = batch.reads[owners[firsts]]
    reads["offset"] = records["offset"][firsts]
    reads["length"] = records["offset"][lasts] + records["length"][lasts] - reads["offset"]
    reads["first_record"], reads["record_count"] = firsts, lasts - firsts + 1
    again.keep = batch.keep
    return again
