"""Writing a table as record files: the files of one task, by partition."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ffserve import formats
from ffserve.arrow import hive
from ffserve.arrow.columns import Place, byte_strings, check_schema, encode
from ffserve.arrow.record_types import RecordType
from ffserve.arrow.staged_output import Attempt, OutputJob, StagedFile
from ffserve.errors import UsageError
from ffserve.writer import Writer, create

OPEN_FILES = 128
"""A task keeps this many partitions open at once, and closes the one that was written least
recently."""
_SUFFIXES = {"gzip": ".gz", "zlib": ".deflate"}
"""As Hadoop's codecs name their files."""


@dataclass(frozen=True)
class TableOutput:
    """The settings by which a table is written.

    compression: "none", "gzip", "zlib" or "snappy"; "" for the format's own choice. partition_by:
    columns that become directories. max_records: per file; 0 for any number. partition_names: names
    of the directories' columns, if they differ from those of the table.
    """

    format: str
    record_type: RecordType
    compression: str = ""
    partition_by: tuple[str, ...] = ()
    max_records: int = 0
    partition_names: tuple[str, ...] = ()


def check_write(output: TableOutput, schema: Any) -> None:
    """Check that a table of this Arrow schema can be written. Raises: UsageError."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise UsageError(f"the column {name!r} comes twice", hint="rename one")
    for name in output.partition_by:
        if name not in schema.names:
            raise UsageError(
                f"the partition column {name!r} is not a column of the table",
                hint=f"its columns are {', '.join(schema.names)}",
            )
    data = pa.schema([one for one in schema if one.name not in output.partition_by])
    if not len(data):
        raise UsageError("all columns are partition columns", hint="leave a column for the records")
    if output.record_type != "ByteArray":
        check_schema(data, output.record_type)
    elif len(data) > 1 or not _is_binary(data[0].type):
        raise UsageError(
            "with the record type ByteArray the table has one column of type binary besides the "
            f"partition columns, not {', '.join(f'{one.name} {one.type}' for one in data)}"
        )


def _is_binary(type: Any) -> bool:
    return bool(pa.types.is_binary(type) or pa.types.is_large_binary(type))


def write_task(
    output: TableOutput,
    job: OutputJob,
    task: int,
    batches: Iterable[Any],
    not_null: Collection[str] = (),
) -> list[StagedFile]:
    """Write the rows of one attempt of a task to the staging directory of a job.

    Args:
        task: number for the names of files.
        batches: pyarrow.RecordBatches; their columns may differ.
        not_null: columns in which a null is an error, besides those whose field says so.
    Returns: the files, for ``OutputJob.commit``.
    Raises:  FFServeError, with row and column; everything that was written is removed.
    """
    attempt = job.attempt()
    files = _Files(attempt, output, f"part-{task:05d}-{job.id}")
    first, checked = 0, None
    try:
        for batch in batches:
            if batch.schema != checked:
                check_write(output, batch.schema)
                checked = batch.schema
            _write_batch(output, files, batch, not_null, Place(None, first))
            first += batch.num_rows
        return files.close()
    except BaseException:
        files.abort()
        attempt.discard()
        raise


def _write_batch(
    output: TableOutput, files: _Files, batch: Any, not_null: Collection[str], place: Place
) -> None:
    columns = output.partition_by
    schema = pa.schema(
        [
            one.with_nullable(one.nullable and one.name not in not_null)
            for one in batch.schema
            if one.name not in columns
        ]
    )
    data = pa.RecordBatch.from_arrays([batch.column(name) for name in schema.names], schema=schema)
    payload, edges = _encoded(output, data, place)
    if not columns:
        files.write("", payload, edges)
        return
    for directory, rows in _groups(batch, columns, output.partition_names or columns):
        if len(rows) == batch.num_rows:
            files.write(directory, payload, edges)
        else:
            files.write(directory, *_taken(payload, edges, rows))


def _encoded(
    output: TableOutput, data: Any, place: Place
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if output.record_type != "ByteArray":
        return encode(data, record=output.record_type, place=place)
    column = data.column(0)
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise place.error(row, data.schema.names[0], "it is null, and a record cannot be null")
    values, edges = byte_strings(column)
    return values[edges[0] : edges[-1]], edges - int(edges[0])


def _groups(
    batch: Any, columns: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield the directory of each partition in a batch, and its rows. Args: names: of the columns
    in directories."""
    codes = np.zeros(batch.num_rows, np.int64)
    encoded = []
    for name in columns:
        column = batch.column(name).dictionary_encode()
        texts = [hive.text_of(value) for value in column.dictionary.to_pylist()] + [None]
        indices = column.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)
        # Numbered anew after each column, or many columns of many values would run into another.
        codes = np.unique(codes * len(texts) + indices, return_inverse=True)[1]
        encoded.append((texts, indices))
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    for rows in np.split(order, starts[1:]):
        if len(rows):
            values = [texts[indices[rows[0]]] for texts, indices in encoded]
            yield hive.directory_of(names, values), rows


def _taken(
    payload: NDArray[np.uint8], edges: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    whole = pa.Array.from_buffers(
        pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(payload)]
    )
    some = whole.take(pa.array(rows))
    offsets = np.frombuffer(some.buffers()[1], np.int64)[: len(rows) + 1]
    return np.frombuffer(some.buffers()[2] or b"", np.uint8)[: int(offsets[-1])], offsets


class _Files:
    """The open files of a task, by partition."""

    def __init__(self, attempt: Attempt, output: TableOutput, prefix: str) -> None:
        self._attempt = attempt
        self._output = output
        self._prefix = prefix
        self._suffix = formats.by_name(output.format).suffixes[0] + _SUFFIXES.get(
            output.compression if output.format == "tfrecord" else "", ""
        )
        self._open: OrderedDict[str, tuple[Writer, str]] = OrderedDict()
        self._done: list[StagedFile] = []
        self._made = 0

    def write(self, directory: str, payload: NDArray[np.uint8], edges: NDArray[np.int64]) -> None:
        """Append records to the files of a partition."""
        at, limit = 0, self._output.max_records
        while at < len(edges) - 1:
            writer = self._writer(directory)
            room = limit - writer.count if limit else len(edges)
            stop = min(len(edges) - 1, at + room)
            part = edges[at : stop + 1]
            writer.write_batch(payload[part[0] : part[-1]], part - part[0])
            at = stop
            if limit and writer.count >= limit:
                self._close(directory)

    def _writer(self, directory: str) -> Writer:
        if directory in self._open:
            self._open.move_to_end(directory)
            return self._open[directory][0]
        if len(self._open) >= OPEN_FILES:
            self._close(next(iter(self._open)))
        name = f"{self._prefix}-c{self._made:03d}{self._suffix}"
        self._made += 1
        path = self._attempt.path(directory, name)
        output = self._output
        writer = create(path, format=output.format, compression=output.compression or None)
        self._open[directory] = writer, name
        return writer

    def _close(self, directory: str) -> None:
        writer, name = self._open.pop(directory)
        writer.close()
        self._done.append(StagedFile(self._attempt.name, directory, name, writer.count))

    def close(self) -> list[StagedFile]:
        """Finish all files."""
        while self._open:
            self._close(next(iter(self._open)))
        return self._done

    def abort(self) -> None:
        """Give up the files that are open."""
        for writer, _ in self._open.values():
            writer.abort()
