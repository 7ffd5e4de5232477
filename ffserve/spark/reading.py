"""Reading record files in Spark: the schema, the tasks, and the batches of a task.

The driver lists the files and divides them into tasks: small files share one, big ones are split by
records. Splitting needs the number of records: FFRecord and RecordIO store it, plain TFRecord files
get it from their index file or a scan; compressed TFRecord files are not split. A task decodes
records into Arrow batches.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from ffserve import formats, hive
from ffserve.columns import Inference, Place, check_schema, decode, records_at
from ffserve.engine.codec import FRAME_HEADER_SIZE
from ffserve.engine.example import Records
from ffserve.errors import FFServeError, FormatError, UsageError
from ffserve.files import is_compressed, open_regular, wrap_os_error
from ffserve.formats.base import HEAD_SIZE, PIECE_SIZE
from ffserve.formats.tfstream import FrameStream, record_error
from ffserve.formats.tfstream import Records as FrameRecords
from ffserve.hive import DataFile
from ffserve.spark.options import ReadOptions, Settings

log = logging.getLogger("ffserve.spark")

BATCH_COUNT, BATCH_SIZE = 8192, 8 << 20
"""An Arrow batch has at most so many records, and about so many bytes of them."""
BYTES_COLUMN = "byteArray"
Numbered = tuple[Records, NDArray[np.int64]]
"""Records, and their numbers in the file."""


@dataclass(frozen=True)
class Piece:
    """Records of one file: [start, stop), or all of them if stop is None.

    begin, end: bytes of the file that hold them, if its frames are read in order; -1: its end.
    """

    path: str
    values: tuple[tuple[str, str | None], ...]
    start: int = 0
    stop: int | None = None
    begin: int = 0
    end: int = -1


# ---- the schema ----------------------------------------------------------------------------------


def infer_schema(format: str, options: ReadOptions, settings: Settings) -> StructType:
    """Return the columns of the files, sorted by name, and then the partition columns.

    Raises: FFServeError: a file cannot be read, records differ, or there is nothing to infer from.
    """
    files = hive.find_files(options.paths, options.base_path)
    columns = _file_columns(format, options, files)
    partitions = _partition_columns(files, settings)
    for one in partitions:
        if one.name in columns.names:
            raise FormatError(
                f"the column {one.name!r} is in the records and in the name of the directory",
                path=files[0].path,
                hint="give a schema: the value of the directory then counts",
            )
    if not len(columns) and not len(partitions):
        raise UsageError(
            "no schema: there are no files with columns",
            path=", ".join(options.paths),
            hint="give a schema",
        )
    return from_arrow_schema(pa.schema([*columns, *partitions]))


def _file_columns(format: str, options: ReadOptions, files: Sequence[DataFile]) -> Any:
    if options.record_type == "ByteArray":
        return pa.schema([(BYTES_COLUMN, pa.binary())] if files else [])
    inference = Inference(options.record_type)
    if not options.merge_schema:
        for file in files:
            inference.merge(_infer_file(format, options, file))
            if len(inference.schema()):
                break
        return inference.schema()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for found in threads.map(lambda file: _infer_file(format, options, file), files):
            inference.merge(found)
    return inference.schema()


def _infer_file(format: str, options: ReadOptions, file: DataFile) -> Inference:
    inference = Inference(options.record_type)
    chance = np.random.default_rng(zlib.crc32(os.fsencode(file.path)))
    for records, rows in _records(format, Piece(file.path, ()), options.skip):
        if options.sampling_ratio < 1:
            chosen = (chance.random(len(rows)) < options.sampling_ratio) | (rows == 0)
            records = Records(records.buffer, records.starts[chosen], records.lengths[chosen])
            rows = rows[chosen]
        if len(rows):
            inference.add(records, Place(file.path, rows=rows))
    return inference


def _partition_columns(files: Sequence[DataFile], settings: Settings) -> list[Any]:
    columns = []
    for k, (name, _) in enumerate(files[0].values if files else ()):
        values = (file.values[k][1] for file in files)
        type = hive.infer_type(values) if settings.infer_partition_types else pa.string()
        columns.append(pa.field(name, type))
    return columns


# ---- the tasks -----------------------------------------------------------------------------------


class RecordReader(DataSourceReader):
    """Reads the columns of a schema from record files."""

    def __init__(
        self, format: str, schema: StructType, options: ReadOptions, settings: Settings
    ) -> None:
        self._format = format
        self._options = options
        self._settings = settings
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return the tasks. Raises: FFServeError: a path is missing, or a file is of another
        format; UsageError: a column has a type that records cannot hold."""
        files = hive.find_files(self._options.paths, self._options.base_path)
        names = {name for name, _ in files[0].values} if files else set()
        self._check_schema(names)
        limit = self._options.max_partition_bytes or self._settings.max_partition_bytes
        pieces = [piece for file in files for piece in self._pieces(file, limit)]
        return [InputPartition(tuple(group)) for group in self._packed(pieces, limit)]

    def _check_schema(self, partition_names: set[str]) -> None:
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        data = pa.schema([one for one in arrow if one.name not in partition_names])
        if self._options.record_type != "ByteArray":
            check_schema(data, self._options.record_type)
        elif len(data) > 1 or any(not pa.types.is_binary(one.type) for one in data):
            raise UsageError(
                f"with recordType=ByteArray the schema has one column of type binary, not "
                f"{', '.join(f'{one.name} {one.type}' for one in data)}"
            )

    def _pieces(self, file: DataFile, limit: int) -> Iterator[tuple[Piece, int]]:
        """Yield the pieces of a file, and their sizes in bytes."""
        parts = -(-file.size // limit)
        if parts < 2 or is_compressed(file.path):
            yield Piece(file.path, file.values), file.size
            return
        _check_format(self._format, file.path)
        edges = _cuts(self._format, file.path, parts, self._options.skip)
        for (start, begin), (stop, end) in pairwise(edges):
            yield Piece(file.path, file.values, start, stop, begin, end), -(-file.size // parts)

    def _packed(self, pieces: Iterable[tuple[Piece, int]], limit: int) -> Iterator[list[Piece]]:
        group: list[Piece] = []
        total = 0
        for piece, size in pieces:
            if group and total + size > limit:
                yield group
                group, total = [], 0
            group.append(piece)
            total += size + self._settings.open_cost_bytes
        if group:
            yield group

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the batches of a task.

        Raises: FFServeError: damaged or unfitting records, with file, row and column.
        """
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        for piece in partition.value or ():
            yield from self._batches(piece, arrow)

    def _batches(self, piece: Piece, arrow: Any) -> Iterator[Any]:
        values = dict(piece.values)
        data = pa.schema([one for one in arrow if one.name not in values])
        constants = {
            one.name: hive.convert_value(
                one.name, values[one.name], one.type, self._settings.time_zone, piece.path
            )
            for one in arrow
            if one.name in values
        }
        for one in arrow:
            if one.name in constants and not one.nullable and not constants[one.name].is_valid:
                raise FormatError(
                    f"row {piece.start}, column {one.name!r}: the partition value is null, and "
                    "the column is NOT NULL",
                    path=piece.path,
                )
        if not len(data) and not self._options.skip:
            yield from _repeated(constants, arrow, _count(self._format, piece))
            return
        skipped = self._settings.skipped
        for records, rows in _records(self._format, piece, self._options.skip, skipped):
            batch = self._decoded(records, rows, data, piece.path)
            columns = [
                pa.repeat(constants[one.name], len(rows))
                if one.name in constants
                else batch.column(data.get_field_index(one.name))
                for one in arrow
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=arrow)

    def _decoded(self, records: Records, rows: NDArray[np.int64], data: Any, path: str) -> Any:
        place = Place(path, rows=rows)
        if self._options.record_type == "ByteArray":
            arrays = [_as_binary(records, place)] if len(data) else []
            return pa.RecordBatch.from_arrays(arrays, schema=data)
        return decode(records, data, record=self._options.record_type, place=place)


def _repeated(constants: dict[str, Any], arrow: Any, count: int) -> Iterator[Any]:
    """Yield batches of partition values only."""
    for first in range(0, count, BATCH_COUNT):
        n = min(BATCH_COUNT, count - first)
        yield pa.RecordBatch.from_arrays(
            [pa.repeat(constants[name], n) for name in arrow.names], schema=arrow
        )


def _count(format: str, piece: Piece) -> int:
    """Return the number of records of a piece; their bytes are not read."""
    if piece.stop is not None:
        return piece.stop - piece.start
    from ffserve.reader import open as open_files

    _check_format(format, piece.path)
    with open_files(piece.path, format=format, server="off") as reader:
        return len(reader)


def _as_binary(records: Records, place: Place) -> Any:
    buffer, starts, lengths = records
    if len(buffer) >= 1 << 31:
        raise place.error(0, None, "the record has 2 GiB or more, which Spark cannot hold")
    # The bytes between records, such as frames, become rows that are left out.
    edges = np.stack((starts, starts + lengths), axis=1).ravel().astype(np.int32)
    gaps = pa.Array.from_buffers(
        pa.binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(buffer)]
    )
    return gaps.take(pa.array(np.arange(0, len(edges), 2)))


# ---- files ---------------------------------------------------------------------------------------


def _cuts(format: str, path: str, parts: int, tolerant: bool) -> list[tuple[int, int]]:
    """Return records that divide a file into parts of about equal size, and where they begin."""
    from ffserve.shardfile import open_shard

    fd = open_regular(path)
    try:
        shard = open_shard(fd, path, format, tolerant=tolerant)
        offsets = np.empty(shard.count, np.uint64)
        shard.load(offsets, np.empty_like(offsets), np.empty(shard.count, np.uint32))
    finally:
        os.close(fd)
    places = np.linspace(0, shard.size, parts + 1)[1:-1]
    found = np.searchsorted(offsets, places.astype(np.uint64)).tolist()
    inner = sorted(row for row in set(found) if 0 < row < shard.count)
    begins = [int(offsets[row]) - FRAME_HEADER_SIZE for row in inner]
    return list(zip([0, *inner, shard.count], [0, *begins, -1], strict=True))


def _check_format(format: str, path: str) -> None:
    """Refuse a file that is of another format by its content."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        head = wrap_os_error(lambda _: os.pread(fd, HEAD_SIZE, 0), path)
    finally:
        os.close(fd)
    if size and formats.by_name(format).sniff(head, size) is False:
        for other in formats.NAMES:
            if other != format and formats.by_name(other).sniff(head, size):
                raise FormatError(
                    f"the file is {other}, not {format}", path=path, hint=f"format({other!r})"
                )


def _records(format: str, piece: Piece, skip: bool, skipped: Any = None) -> Iterator[Numbered]:
    """Yield the records of a piece.

    Args: skip: leave out damaged records, and log how many. skipped: accumulator of their number.
    Raises: FFServeError.
    """
    _check_format(format, piece.path)
    if format != "tfrecord":
        yield from _by_index(format, piece, skip, skipped)
    elif is_compressed(piece.path):
        yield from _streamed(piece, skip, skipped)
    elif skip and os.path.getsize(piece.path):
        yield from _by_index(format, piece, skip, skipped)
    else:
        yield from _framed(piece)


def _framed(piece: Piece) -> Iterator[Numbered]:
    """Read the frames of a TFRecord file in order: without an index, and without another copy.

    The bytes from the first damage on are read by index, which finds the file's error.
    """
    fd = open_regular(piece.path)
    row = piece.start
    try:
        size = os.fstat(fd).st_size
        end = size if piece.end < 0 else piece.end
        for records in _blocks(fd, piece, end, FrameStream(piece.path, limit=size)):
            count = len(records.offsets)
            intact = int(np.argmax(records.damaged)) if records.damaged.any() else count
            starts, lengths = records.offsets[:intact], records.lengths[:intact]
            if intact:
                buffer = np.frombuffer(records.block, np.uint8)
                some = Records(buffer, starts.astype(np.uint64), lengths.astype(np.uint64))
                yield some, np.arange(row, row + intact)
            row += intact
            if intact < count:
                raise record_error(piece.path, row)
    except FormatError:
        yield from _by_index("tfrecord", replace(piece, start=row), False)
        raise
    finally:
        os.close(fd)


def _blocks(fd: int, piece: Piece, end: int, stream: FrameStream) -> Iterator[FrameRecords]:
    at = piece.begin
    while at < end:
        data = wrap_os_error(partial(_pread, fd, at, min(PIECE_SIZE, end - at)), piece.path)
        if not data:
            break
        at += len(data)
        while (records := stream.feed(data)) is not None:
            data = b""
            yield records
    stream.close()


def _pread(fd: int, at: int, size: int, path: str) -> bytes:
    return os.pread(fd, size, at)


def _by_index(format: str, piece: Piece, skip: bool, skipped: Any = None) -> Iterator[Numbered]:
    from ffserve.reader import Reader

    damaged: list[FFServeError] = []
    with Reader((piece.path,), format, "off", True, skip) as reader:
        chosen = np.arange(piece.start, len(reader) if piece.stop is None else piece.stop)
        for first, batch, failed in reader.scan(chosen, count=BATCH_COUNT, size=BATCH_SIZE):
            if failed and not skip:
                raise failed[min(failed)]
            damaged += failed.values()
            kept = np.ones(len(batch), np.bool_)
            kept[list(failed)] = False
            rows = chosen[first : first + len(batch)][kept]
            buffer, starts, lengths = records_at(batch.buffer, batch.offsets)
            if len(rows):
                yield Records(buffer, starts[kept], lengths[kept]), rows
    _report(piece.path, damaged, skipped)


def _streamed(piece: Piece, skip: bool, skipped: Any) -> Iterator[Numbered]:
    from ffserve.reader import StreamReader

    with StreamReader((piece.path,), tolerant=skip) as reader:
        first = 0
        for batch in reader.batches(count=BATCH_COUNT, size=BATCH_SIZE):
            records = records_at(batch.buffer, batch.offsets)
            yield records, np.arange(first, first + len(batch))
            first += len(batch)
        _report(piece.path, reader.damaged, skipped)


def _report(path: str, damaged: Sequence[FFServeError], skipped: Any) -> None:
    if damaged:
        if skipped is not None:
            skipped.add(len(damaged))
        log.warning("%s: skipped %d damaged records, the first: %s", path, len(damaged), damaged[0])
