"""Arrow files and streams, also those of Hugging Face data sets: as Parquet, see `parquet.py`.

A stream has to have its mark of the end: one that was cut between two batches would lose rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ffserve.convert.inputs import Record
from ffserve.convert.kinds import (
    Wanted,
    count_at_once,
    damaged,
    holds,
    index_of,
    needed,
    parts_of,
    reading,
)
from ffserve.convert.kinds.parquet import rows_of

SUFFIXES = (".arrow", ".feather")
_MAGIC = b"ARROW1"
_END = bytes(4)
"""The length of the message that ends a stream."""


def recognizes(path: str, found: str) -> bool:
    """Whether it is such a file, or a directory of them."""
    return found == "an Arrow file" or holds(path, SUFFIXES)


def files_of(path: str) -> list[str] | None:
    """Return the files of a data set of Hugging Face, which keeps results beside them."""
    files = index_of(path, "_data_files", name="state.json").get("_data_files")
    return None if files is None else [str(file["filename"]) for file in files]


class ArrowRows:
    """The rows of a file, in their order; the file is mapped."""

    named = False
    sized = True

    def __init__(self, path: str, wanted: Wanted) -> None:
        self.files = (path,)
        with reading(path):
            batches = self._batches()
            self.columns = wanted.of(next(batches).names, path)
            self._counts = [len(batch) for batch in batches]
        self.count = sum(self._counts)

    def _batches(self) -> Iterator[Any]:
        """Yield the schema, then the record batches."""
        [path] = self.files
        arrow = needed("pyarrow", "pyarrow", path)
        with arrow.memory_map(path) as source:
            if source.read(len(_MAGIC)) == _MAGIC:
                reader = arrow.ipc.open_file(source)
                yield reader.schema
                yield from map(reader.get_batch, range(reader.num_record_batches))
            else:
                source.seek(max(source.size() - len(_END), 0))
                if source.read() != _END:
                    raise damaged(path, "the stream has no mark of its end: it was cut")
                source.seek(0)
                reader = arrow.ipc.open_stream(source)
                yield reader.schema
                yield from reader

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the rows [first:stop]."""
        [path] = self.files
        wanted = {number: rows for number, *rows in parts_of(self._counts, first, stop)}
        with reading(path):
            batches = self._batches()
            next(batches)
            for number, batch in enumerate(batches):
                low, high = wanted.get(number, (0, 0))
                step = count_at_once(batch.nbytes, len(batch))
                chosen = batch.select(list(self.columns))
                for begin in range(low, high, step):
                    yield from rows_of(chosen.slice(begin, min(step, high - begin)), path)


def open_input(path: str, wanted: Wanted) -> ArrowRows:
    """Return the rows of a file."""
    return ArrowRows(path, wanted)
