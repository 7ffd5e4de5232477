"""Writing record files in Spark: the job in the driver, and the files of a task."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from ffserve import formats, hive
from ffserve.columns import Place, check_schema, encode
from ffserve.errors import UsageError
from ffserve.spark.options import Settings, WriteOptions
from ffserve.staging import Attempt, Mode, OutputJob, StagedFile
from ffserve.writer import Writer, create

OPEN_FILES = 128
"""Partitions that a task keeps open at once; the one that was written least recently gives way."""
_SUFFIXES = {"gzip": ".gz", "zlib": ".zlib"}


@dataclass
class Written(WriterCommitMessage):
    """What a task has staged."""

    files: list[StagedFile]


class RecordWriter(DataSourceArrowWriter):
    """One job: made and committed in the driver, a copy of it writes in each task."""

    def __init__(
        self,
        format: str,
        schema: StructType,
        overwrite: bool,
        options: WriteOptions,
        settings: Settings,
    ) -> None:
        self._format = format
        self._options = options
        self._schema = schema
        self._check()
        mode: Mode = "append"
        if overwrite:
            mode = "dynamic" if options.dynamic and options.partition_by else "overwrite"
        elif options.mode == "error":
            mode = "error"
        target = os.path.abspath(hive.local_path(options.path))
        self._job = OutputJob.begin(target, mode, pid=_driver(), id=options.job)

    def _check(self) -> None:
        names = self._schema.fieldNames()
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"the column {name!r} comes twice", hint="rename one")
        for name in self._options.partition_by:
            if name not in names:
                raise UsageError(
                    f"the partition column {name!r} is not a column of the DataFrame",
                    hint=f"its columns are {', '.join(names)}",
                )
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        data = pa.schema([one for one in arrow if one.name not in self._options.partition_by])
        if not len(data):
            raise UsageError(
                "all columns are partition columns", hint="leave a column for the records"
            )
        if self._options.record_type != "ByteArray":
            check_schema(data, self._options.record_type)
        elif len(data) > 1 or not pa.types.is_binary(data[0].type):
            raise UsageError(
                "with recordType=ByteArray the DataFrame has one column of type binary besides "
                f"the partition columns, not {', '.join(f'{one.name} {one.type}' for one in data)}"
            )

    def write(self, iterator: Iterator[Any]) -> Written:
        """Write the rows of a task. Raises: FFServeError, with row and column."""
        context = TaskContext.get()
        task = context.partitionId() if context is not None else 0
        attempt = self._job.attempt()
        files = _Files(attempt, self._format, self._options, f"part-{task:05d}-{self._job.id}")
        try:
            first = 0
            for batch in iterator:
                self._write_batch(files, batch, Place(None, first))
                first += batch.num_rows
            return Written(files.close())
        except BaseException:
            files.abort()
            attempt.discard()
            raise

    def _write_batch(self, files: _Files, batch: Any, place: Place) -> None:
        columns = self._options.partition_by
        schema = pa.schema([one for one in batch.schema if one.name not in columns])
        schema = pa.schema([one.with_nullable(self._schema[one.name].nullable) for one in schema])
        data = pa.RecordBatch.from_arrays(
            [batch.column(name) for name in schema.names], schema=schema
        )
        payload, edges = self._encoded(data, place)
        if not columns:
            files.write("", payload, edges)
            return
        for directory, rows in _groups(batch, columns):
            if len(rows) == batch.num_rows:
                files.write(directory, payload, edges)
            else:
                files.write(directory, *_taken(payload, edges, rows))

    def _encoded(self, data: Any, place: Place) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        if self._options.record_type != "ByteArray":
            return encode(data, record=self._options.record_type, place=place)
        column = data.column(0)
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise place.error(row, data.schema.names[0], "it is null, and a record cannot be null")
        _, offsets, values = column.buffers()
        if offsets is None:
            return np.zeros(0, np.uint8), np.zeros(len(column) + 1, np.int64)
        edges = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
        whole = np.frombuffer(values or b"", np.uint8)[edges[0] : edges[-1]]
        return whole, edges.astype(np.int64) - int(edges[0])

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make the files of all tasks visible."""
        files = [file for message in messages for file in getattr(message, "files", ())]
        self._job.commit(files)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove what was staged."""
        self._job.discard()


def _driver() -> int:
    """Return the process of the driver: the Java process above this one, else its parent."""
    pid = os.getpid()
    while pid > 1:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name == "java":
            return pid
        pid = int(rest.split()[1])
    return os.getppid()


def _groups(batch: Any, columns: Sequence[str]) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield the directory of each partition in a batch, and its rows."""
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
            yield hive.directory_of(columns, values), rows


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

    def __init__(self, attempt: Attempt, format: str, options: WriteOptions, prefix: str) -> None:
        self._attempt = attempt
        self._format = format
        self._options = options
        self._prefix = prefix
        self._suffix = formats.by_name(format).suffixes[0] + _SUFFIXES.get(
            options.compression if format == "tfrecord" else "", ""
        )
        self._open: OrderedDict[str, tuple[Writer, str]] = OrderedDict()
        self._done: list[StagedFile] = []
        self._made = 0

    def write(self, directory: str, payload: NDArray[np.uint8], edges: NDArray[np.int64]) -> None:
        """Append records to the files of a partition."""
        at, limit = 0, self._options.max_records
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
        writer = create(path, format=self._format, compression=self._options.compression or None)
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
