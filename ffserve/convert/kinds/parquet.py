"""Parquet files: a row is a sample, its columns are those of the file.

Bytes and text are taken as they are. A structure of ``bytes`` and ``path``, as Hugging Face writes
pictures and sounds, is its bytes. All else becomes JSON. A null is no field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ffserve.convert.inputs import Record
from ffserve.convert.kinds import Wanted, count_at_once, encoded, holds, needed, reading
from ffserve.errors import UsageError

SUFFIXES = (".parquet",)


def recognizes(path: str, found: str) -> bool:
    """Whether it is such a file, or a directory of them."""
    return found == "a Parquet file" or holds(path, SUFFIXES)


class ParquetRows:
    """The rows of a file, in their order."""

    named = False
    sized = True

    def __init__(self, path: str, wanted: Wanted) -> None:
        self.files = (path,)
        with self._open() as file:
            self.count: int = file.metadata.num_rows
            self.columns = wanted.of(file.schema_arrow.names, path)

    def _open(self) -> Any:
        [path] = self.files
        module = needed("pyarrow.parquet", "pyarrow", path)
        with reading(path):
            # A row group can be larger than memory: its pages are read as they are needed.
            return module.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the rows [first:stop]."""
        [path] = self.files
        left = (self.count if stop is None else stop) - first
        skipped = 0
        with reading(path), self._open() as file:
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if left <= 0:
                    return
                if skipped + group.num_rows <= first:
                    skipped += group.num_rows
                    continue
                for batch in file.iter_batches(
                    count_at_once(group.total_byte_size, group.num_rows),
                    row_groups=[number],
                    columns=list(self.columns),
                ):
                    part = batch.slice(max(first - skipped, 0), left)
                    skipped = min(skipped + len(batch), first)
                    left -= len(part)
                    yield from rows_of(part, path)


def rows_of(batch: Any, path: str) -> Iterator[Record]:
    """Yield the rows of a record batch."""
    columns = [values_of(column, path) for column in batch.columns]
    names = batch.schema.names
    for row in zip(*columns, strict=True):
        yield Record(dict(zip(names, row, strict=True)))


def values_of(column: Any, path: str) -> list[bytes | None]:
    """Return the values of an Arrow array as bytes."""
    types = needed("pyarrow.types", "pyarrow", path)
    while hasattr(column, "storage"):
        column = column.storage
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    names = [field.name for field in column.type] if types.is_struct(column.type) else []
    if sorted(names) == ["bytes", "path"]:
        parts = dict(zip(names, column.flatten(), strict=True))
        content: list[bytes | None] = parts["bytes"].to_pylist()
        for value, place in zip(content, parts["path"].to_pylist(), strict=True):
            if value is None and place is not None:
                raise UsageError(
                    f"the file has the path of {place!r}, but not its content",
                    path=path,
                    hint="embed the contents first (to_parquet and push_to_hub of Hugging Face do)",
                )
        return content
    return [encoded(value) for value in column.to_pylist()]


def open_input(path: str, wanted: Wanted) -> ParquetRows:
    """Return the rows of a file."""
    return ParquetRows(path, wanted)
