"""ArrayRecord files: records without names, as one column."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ffserve.convert.inputs import Record
from ffserve.convert.kinds import Wanted, count_at_once, damaged, holds, needed, reading

SUFFIXES = (".array_record", ".arrayrecord")


def recognizes(path: str, found: str) -> bool:
    """Whether it is such a file, or a directory of them."""
    return found == "an ArrayRecord file" or holds(path, SUFFIXES)


class ArrayRecords:
    """The records of a file, in their order."""

    named = False
    sized = True

    def __init__(self, path: str, wanted: Wanted) -> None:
        self.files = (path,)
        self.columns = wanted.of(["bin"], path)
        with reading(path), self._open() as reader:
            self.count = reader.num_records()

    def _open(self) -> Any:
        """Open the file. What is wrong with it, closing says at the latest."""
        [path] = self.files
        module = needed("array_record.python.array_record_module", "array-record", path)
        return contextlib.closing(module.ArrayRecordReader(path, "readahead_buffer_size:0"))

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the records [first:stop]."""
        [path] = self.files
        last = self.count if stop is None else stop
        step = count_at_once(os.path.getsize(path), self.count)
        with reading(path), self._open() as reader:
            for begin in range(first, last, step):
                records = reader.read(begin, min(begin + step, last))
                if len(records) != min(step, last - begin):
                    raise damaged(path, f"records are missing behind record {begin}")
                for record in records:
                    yield Record({"bin": record})


def open_input(path: str, wanted: Wanted) -> ArrayRecords:
    """Return the records of a file."""
    return ArrayRecords(path, wanted)
