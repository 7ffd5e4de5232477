"""Batches over files that no kernel reads: their bytes come as ranges, by functions of the caller.

A `FetchingEngine` takes batches as an engine does and leaves the same in them: payloads at their
destinations, a status and a checksum for each record. So whatever makes and collects batches
(`records`, `chunks`) reads such files too. Reads with small gaps between them become one range,
and all ranges of a batch are asked for when it is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from ffserve.dtypes import Int64s
from ffserve.engine.codec import checksums, scatter
from ffserve.engine.io import EngineBatch
from ffserve.errors import STATUS_CHECKSUM, STATUS_FORMAT, FFServeError
from ffserve.reads.records import BatchEngine, part_of, rows_of

GAP = 64 << 10
"""Reads with at most this many bytes between them are fetched together."""

Fetch: TypeAlias = Callable[[int, int], list[tuple[int, int, Future[Any]]]]
"""Asks for the bytes [begin, end) of a file: begin, end and future bytes of each part. An exception
of a future is an FFServeError."""


@dataclass(slots=True)
class _Range:
    """The range [begin, end) of a file, for these reads of a batch."""

    reads: Int64s
    begin: int
    end: int
    coming: list[tuple[int, int, Future[Any]]]


@dataclass(slots=True)
class _Begun:
    """The requests for a batch. local: its reads that the engine does; rows: their records."""

    ranges: list[_Range]
    local: EngineBatch | None
    rows: Int64s


class FetchingEngine:
    """An engine that reads files through another engine, or by fetching ranges of them.

    Args:
        engine: reads the other files.
        fetches: how each file's bytes are had, by its descriptor.
    """

    def __init__(self, engine: BatchEngine, fetches: Mapping[int, Fetch]) -> None:
        self.kind = engine.kind
        self._engine = engine
        self._fetches = fetches
        self._numbers: dict[int, Fetch] = {}
        """By the engine's number of the file."""
        self._begun: WeakKeyDictionary[EngineBatch, _Begun] = WeakKeyDictionary()

    def add_file(self, fd: int, alignment: int, around: int = 0) -> int:
        """Add a file; return its number."""
        number = self._engine.add_file(fd, alignment, around)
        if fd in self._fetches:
            self._numbers[number] = self._fetches[fd]
        return number

    def remove_file(self, file: int) -> None:
        """Remove a file."""
        self._numbers.pop(file, None)
        self._engine.remove_file(file)

    def submit(self, batch: EngineBatch) -> None:
        """Ask for the ranges of the fetched files, and submit the reads of the others."""
        reads = batch.reads
        fetched = np.isin(reads["file"], list(self._numbers))
        begun = self._begun[batch] = _Begun([], None, np.zeros(0, np.int64))
        begins = reads["offset"].astype(np.int64)
        ends = begins + reads["length"].astype(np.int64)
        for file in np.unique(reads["file"][fetched]).tolist():
            mine = np.flatnonzero(reads["file"] == file)
            for some in neighbours(begins[mine], ends[mine]):
                begin, end = int(begins[mine[some[0]]]), int(ends[mine[some]].max())
                coming = self._numbers[file](begin, end)
                begun.ranges.append(_Range(mine[some], begin, end, coming))
        # Last: what the engine has begun must be waited for, even if a range cannot be asked for.
        if not fetched.all():
            others = np.flatnonzero(~fetched)
            begun.local, begun.rows = part_of(batch, others)
            self._engine.submit(begun.local)

    def wait(self, batch: EngineBatch) -> None:
        """Wait until all bytes have come; verify and copy the records."""
        begun = self._begun.pop(batch)
        if begun.local is not None:
            self._engine.wait(begun.local)
            batch.records[begun.rows] = begun.local.records
            begun.local.free()
        for each in begun.ranges:
            _settle(batch, each)
        batch.ended_elsewhere()


def _settle(batch: EngineBatch, fetched: _Range) -> None:
    """Wait for a range; verify the records that lie in it, and copy them to their destinations."""
    rows, records = rows_of(batch, fetched.reads), batch.records
    starts = records["offset"][rows].astype(np.int64) - fetched.begin
    lengths = records["length"][rows].astype(np.int64)
    content = np.empty(fetched.end - fetched.begin, np.uint8)
    there = np.ones(len(rows), np.bool_)
    for begin, end, future in fetched.coming:
        low, high = begin - fetched.begin, end - fetched.begin
        try:
            content[low:high] = np.frombuffer(future.result(), np.uint8)
        except FFServeError as error:
            lost = (starts < high) & (starts + lengths > low)
            there &= ~lost
            batch.errors.update(dict.fromkeys(rows[lost].tolist(), error))
    records["status"][rows[~there]] = STATUS_FORMAT
    rows, starts, lengths = rows[there], starts[there], lengths[there]
    kind = int(batch.reads["checksum_kind"][fetched.reads[0]])
    if kind:
        found = checksums(kind, content, starts.astype(np.uint64), lengths.astype(np.uint64))
        records["found"][rows] = found
        records["status"][rows[found != records["checksum"][rows]]] = STATUS_CHECKSUM
    scatter(content, starts, lengths, records["dest"][rows])


def neighbours(begins: Int64s, ends: Int64s) -> Iterator[Int64s]:
    """Yield the rows of extents that are fetched together, each run in the order of the file."""
    if not len(begins):
        return
    order = np.argsort(begins, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    edges = np.flatnonzero(begins[order][1:] > reach[:-1] + GAP) + 1
    yield from np.split(order, edges)
