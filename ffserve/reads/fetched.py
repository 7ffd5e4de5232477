"""Batches over files that no kernel reads: their bytes come as ranges, by functions of the caller.

A `FetchingEngine` takes batches as an engine does and leaves the same in them: payloads at their
destinations, a status and a checksum for each record. So whatever makes and collects batches
(`records`, `chunks`) reads such files too. Reads with small gaps between them become one range,
and all ranges of a batch are asked for when it is submitted. Records whose checksum is wrong are
asked for once more, since their bytes may have been damaged on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from ffserve.dtypes import Int64s
from ffserve.engine.codec import checksums, scatter
from ffserve.engine.io import EngineBatch
from ffserve.errors import STATUS_CHECKSUM, STATUS_FORMAT, FFServeError
from ffserve.reads.records import MOST_AGAIN, BatchEngine, part_of, rows_of

GAP = 64 << 10
"""Reads with at most this many bytes between them are fetched together."""

Fetch: TypeAlias = Callable[[int, int], list[tuple[int, int, Future[Any]]]]
"""Asks for the bytes [begin, end) of a file: begin, end and future bytes of each part. An exception
of a future is an FFServeError."""


class FetchedFile(NamedTuple):
    """A file whose bytes are fetched. again: asks for those that were wrong. corrected: called when
    a record was right only when it was asked for a second time."""

    ask: Fetch
    again: Fetch
    corrected: Callable[[], object]


@dataclass(slots=True)
class _Range:
    """The range [begin, end) of a file, for these records of a batch, with checksums of a kind."""

    file: FetchedFile
    kind: int
    rows: Int64s
    begin: int
    end: int
    coming: list[tuple[int, int, Future[Any]]]

    @classmethod
    def asked(
        cls, file: FetchedFile, kind: int, rows: Int64s, begins: Int64s, ends: Int64s
    ) -> _Range:
        """Ask for the bytes of extents."""
        begin, end = int(begins.min()), int(ends.max())
        return cls(file, kind, rows, begin, end, file.ask(begin, end))


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
        fetched: these files, by descriptor.
    """

    def __init__(self, engine: BatchEngine, fetched: Mapping[int, FetchedFile]) -> None:
        self.kind = engine.kind
        self._engine = engine
        self._fetched = fetched
        self._numbers: dict[int, FetchedFile] = {}
        """By the engine's number of the file."""
        self._begun: WeakKeyDictionary[EngineBatch, _Begun] = WeakKeyDictionary()

    def add_file(self, fd: int, alignment: int, around: int = 0) -> int:
        """Add a file; return its number."""
        number = self._engine.add_file(fd, alignment, around)
        if fd in self._fetched:
            self._numbers[number] = self._fetched[fd]
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
                chosen = mine[some]
                about = self._numbers[file], int(reads["checksum_kind"][chosen[0]])
                rows = rows_of(batch, chosen)
                begun.ranges.append(_Range.asked(*about, rows, begins[chosen], ends[chosen]))
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
        again: list[_Range] = []
        for each in begun.ranges:
            wrong = _settle(batch, each)[:MOST_AGAIN]
            begins = batch.records["offset"][wrong].astype(np.int64)
            ends = begins + batch.records["length"][wrong].astype(np.int64)
            for some in neighbours(begins, ends):
                about = each.file._replace(ask=each.file.again), each.kind, wrong[some]
                again.append(_Range.asked(*about, begins[some], ends[some]))
        for each in again:
            _settle(batch, each, again=True)
            if (batch.records["status"][each.rows] == 0).any():
                each.file.corrected()
        batch.ended_elsewhere()


def _settle(batch: EngineBatch, fetched: _Range, *, again: bool = False) -> Int64s:
    """Wait for a range, verify its records and copy them to their destinations.

    Args: again: the range was fetched for these records before, and their checksums were wrong.
    Returns: the records whose checksum is wrong. With `again` an error of the origin changes
        nothing: they stay wrong.
    """
    rows, records = fetched.rows, batch.records
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
            if not again:
                batch.errors.update(dict.fromkeys(rows[lost].tolist(), error))
                records["status"][rows[lost]] = STATUS_FORMAT
    rows, starts, lengths = rows[there], starts[there], lengths[there]
    scatter(content, starts, lengths, records["dest"][rows])
    if not fetched.kind:
        return rows[:0]
    extents = starts.astype(np.uint64), lengths.astype(np.uint64)
    found = records["found"][rows] = checksums(fetched.kind, content, *extents)
    wrong = found != records["checksum"][rows]
    records["status"][rows] = np.where(wrong, STATUS_CHECKSUM, 0)
    bad: Int64s = rows[wrong]
    return bad


def neighbours(begins: Int64s, ends: Int64s) -> Iterator[Int64s]:
    """Yield the rows of extents that are fetched together, each run in the order of the file."""
    if not len(begins):
        return
    order = np.argsort(begins, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    edges = np.flatnonzero(begins[order][1:] > reach[:-1] + GAP) + 1
    yield from np.split(order, edges)
