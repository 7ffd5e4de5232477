"""Reading record files as a table: the schema, the pieces, and the batches of a piece.

The planner lists the files (``hive.find_files``) and divides them into pieces: a small file is one
piece, a big one is split by records. Splitting needs the number of records: FFRecord and RecordIO
store it, plain TFRecord files get it from their index file or a scan; compressed TFRecord files are
not split. The task that reads a piece gets Arrow batches. This module depends on no engine for
tables: ``ffserve.spark`` and ``ffserve.ray`` hand its pieces to their tasks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ffserve import formats
from ffserve.arrow import hive
from ffserve.arrow.columns import Inference, Place, check_schema, decode, records_at
from ffserve.arrow.hive import DataFile
from ffserve.arrow.record_types import COMPRESSIONS, RecordType
from ffserve.disk.files import is_compressed, is_compressed_head, open_regular, read_at_of
from ffserve.dtypes import Bytes
from ffserve.engine import codec
from ffserve.engine.codec import FRAME_HEADER_SIZE, FRAME_SIZE, checksums
from ffserve.engine.example import ExampleRecords
from ffserve.errors import FFServeError, FormatError, UsageError, outside
from ffserve.formats.base import CHECKSUM_CRC32C, HEAD_SIZE, ReadAt
from ffserve.store.public import ObjectVersion, RangedObject, parsed
from ffserve.system.socket_path import find_socket

if TYPE_CHECKING:
    from ffserve.reader import Reader

log = logging.getLogger("ffserve")

BATCH_COUNT, BATCH_SIZE = 8192, 8 << 20
"""An Arrow batch has at most this many records, and about this many bytes of them."""
FRAMES_SIZE = 1 << 20
"""This many bytes of frames are read and decoded at a time, so that they stay in the core's
cache."""
_NEVER = 1 << 64
BYTES_COLUMN = "byteArray"
Numbered = tuple[ExampleRecords, NDArray[np.int64]]
"""Records, and their numbers in the file."""


@dataclass(frozen=True)
class RecordTable:
    """The settings by which record files are read as a table.

    format: of the files. record_type: of their records. skip: leave out damaged records, and log
    how many. server: as for ``ffserve.open``; remote files are read by ranges with "auto", too: a
    task reads each byte once. zone: the time zone of partition timestamps. frames_size: bytes of
    frames that are read and decoded at a time.
    """

    format: str
    record_type: RecordType
    skip: bool = False
    server: str = "off"
    zone: str = "UTC"
    frames_size: int = FRAMES_SIZE


@dataclass(frozen=True)
class FilePiece:
    """Records of one file: [start, stop), or all of them if stop is None.

    size: about so many bytes of the file. begin, end: the bytes that hold the records, if the
    file's frames are read in order; -1: its end. version: of a remote file, which all pieces read.
    """

    path: str
    size: int
    values: hive.Values = ()
    start: int = 0
    stop: int | None = None
    begin: int = 0
    end: int = -1
    version: ObjectVersion | None = None


# ---- the schema ----------------------------------------------------------------------------------


def infer_schema(
    table: RecordTable,
    files: Sequence[DataFile],
    *,
    ratio: float = 1.0,
    merge: bool = True,
    typed: bool = True,
) -> Any:
    """Return the columns of the files, sorted by name, and then the partition columns.

    Args:
        ratio: fraction of the records, besides the first of each file, that is examined.
        merge: examine all files, not only the first that has columns.
        typed: find the types of partition values; else they are strings.
    Returns: pyarrow.Schema; empty if there is nothing to infer from.
    Raises: FFServeError: a file cannot be read, or records differ.
    """
    columns = _file_columns(table, files, ratio, merge)
    partitions = _partition_columns(files, typed)
    for one in partitions:
        if one.name in columns.names:
            raise FormatError(
                f"the column {one.name!r} is in the records and in the name of the directory",
                path=files[0].path,
                hint="give a schema: the value of the directory then counts",
            )
    return pa.schema([*columns, *partitions])


def _file_columns(table: RecordTable, files: Sequence[DataFile], ratio: float, merge: bool) -> Any:
    if table.record_type == "ByteArray":
        return pa.schema([(BYTES_COLUMN, pa.binary())] if files else [])
    inference = Inference(table.record_type)
    if not merge:
        for file in files:
            inference.merge(_infer_file(table, file, ratio))
            if len(inference.schema()):
                break
        return inference.schema()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for found in threads.map(lambda file: _infer_file(table, file, ratio), files):
            inference.merge(found)
    return inference.schema()


def _infer_file(table: RecordTable, file: DataFile, ratio: float) -> Inference:
    inference = Inference(table.record_type)
    chance = np.random.default_rng(zlib.crc32(os.fsencode(file.path)))
    for records, rows in _records(table, FilePiece(file.path, file.size, version=file.version)):
        if ratio < 1:
            chosen = (chance.random(len(rows)) < ratio) | (rows == 0)
            records = ExampleRecords(
                records.buffer, records.starts[chosen], records.lengths[chosen]
            )
            rows = rows[chosen]
        if len(rows):
            inference.add(records, Place(file.path, rows=rows))
    return inference


def _partition_columns(files: Sequence[DataFile], typed: bool) -> list[Any]:
    columns = []
    for k, (name, _) in enumerate(files[0].values if files else ()):
        values = (file.values[k][1] for file in files)
        columns.append(pa.field(name, hive.infer_type(values) if typed else pa.string()))
    return columns


def check_read(table: RecordTable, schema: Any, files: Sequence[DataFile]) -> None:
    """Check that the records can have the columns of a schema.

    Raises: UsageError.
    """
    partitions = {name for name, _ in files[0].values} if files else set()
    data = pa.schema([one for one in schema if one.name not in partitions])
    if table.record_type != "ByteArray":
        check_schema(data, table.record_type)
    elif len(data) > 1 or any(not pa.types.is_binary(one.type) for one in data):
        raise UsageError(
            f"with the record type ByteArray the schema has one column of type binary, not "
            f"{', '.join(f'{one.name} {one.type}' for one in data)}"
        )


def format_of(files: Sequence[DataFile]) -> str:
    """Return the format of files: that of the first one that is not empty, by content and suffix.

    Raises: FormatError: neither determines it. UsageError: there is no file.
    """
    if not files:
        raise UsageError("there are no files", hint="check the path, or give a schema and a format")
    first = min(files, key=lambda one: one.size == 0)
    head, size = _head_of(first)
    found = formats.detect(head, first.path, size).name
    if found not in COMPRESSIONS:
        raise UsageError(
            f"records of {found} files cannot be read as tables",
            path=first.path,
            hint="`ffserve convert` makes a TFRecord file of it",
        )
    return found


@contextlib.contextmanager
def _opened(file: DataFile | FilePiece) -> Iterator[tuple[ReadAt, int]]:
    """Open a file: how it is read, and its size."""
    if file.version is not None:
        opened = RangedObject(file.version)
        yield opened.read_at(), opened.size
        return
    fd = open_regular(file.path)
    try:
        yield read_at_of(fd, file.path), os.fstat(fd).st_size
    finally:
        os.close(fd)


def _head_of(file: DataFile | FilePiece) -> tuple[bytes, int]:
    """Return the first bytes of a file, by which its format is recognized, and its size."""
    if file.version is not None:
        return _remote_head(file.version), file.version.size
    with _opened(file) as (read_at, size):
        return _head(read_at, size), size


@functools.lru_cache(maxsize=64)
def _remote_head(version: ObjectVersion) -> bytes:
    return _head(RangedObject(version).read_at(), version.size)


def _head(read_at: ReadAt, size: int) -> bytes:
    head = bytearray(min(size, HEAD_SIZE))
    return bytes(head[: read_at(0, memoryview(head))])


def _is_compressed(file: DataFile | FilePiece) -> bool:
    if file.version is None:
        return is_compressed(file.path)
    return is_compressed_head(_head_of(file)[0])


# ---- the pieces ----------------------------------------------------------------------------------


def pieces_of(table: RecordTable, file: DataFile, limit: int) -> Iterator[FilePiece]:
    """Divide a file into pieces of about `limit` bytes.

    Raises: FFServeError: the file is damaged, or of another format.
    Cost:   for a file above the limit that of opening it, which for TFRecord without an index file
            is a scan. A remote TFRecord file is one piece: a scan would read it as a whole.
    """
    parts = -(-file.size // max(1, limit))
    whole = file.version is not None and table.format == "tfrecord"
    if parts < 2 or whole or _is_compressed(file):
        yield FilePiece(file.path, file.size, file.values, version=file.version)
        return
    _check_format(table.format, file)
    edges, size = _cuts(table, file, parts), -(-file.size // parts)
    for (start, begin), (stop, end) in pairwise(edges):
        yield FilePiece(file.path, size, file.values, start, stop, begin, end, file.version)


def _cuts(table: RecordTable, file: DataFile, parts: int) -> list[tuple[int, int]]:
    """Return records that divide a file into parts of about equal size, and where they begin."""
    from ffserve.disk.shardfile import open_shard

    if file.version is not None:
        with _opened(file) as (read_at, size):
            shard = parsed(read_at, size, file.path, table.format, tolerant=table.skip)
            offsets = _offsets(shard)
    else:
        fd = open_regular(file.path)
        try:
            shard = open_shard(fd, file.path, table.format, tolerant=table.skip)
            offsets = _offsets(shard)
        finally:
            os.close(fd)
    places = np.linspace(0, shard.size, parts + 1)[1:-1]
    found = np.searchsorted(offsets, places.astype(np.uint64)).tolist()
    inner = sorted(row for row in set(found) if 0 < row < shard.count)
    begins = [int(offsets[row]) - FRAME_HEADER_SIZE for row in inner]
    return list(zip([0, *inner, shard.count], [0, *begins, -1], strict=True))


def _offsets(shard: formats.Shard) -> NDArray[np.uint64]:
    offsets = np.empty(shard.count, np.uint64)
    shard.load(offsets, np.empty_like(offsets), np.empty(shard.count, np.uint32))
    return offsets


# ---- the batches ---------------------------------------------------------------------------------


def batches(
    table: RecordTable, piece: FilePiece, schema: Any, skipped: Callable[[int], None] | None = None
) -> Iterator[Any]:
    """Yield the pyarrow.RecordBatches of a piece.

    Args:
        schema: the wanted columns, also of the partition; others are not decoded. Of a schema with
            partition columns only, or without columns, records are counted and not read.
        skipped: gets the number of damaged records that were left out.
    Raises:  FFServeError: damaged or unfitting records, with file, row and column.
    """
    values = dict(piece.values)
    data = pa.schema([one for one in schema if one.name not in values])
    constants = _constants(table, piece, schema)
    if not len(data) and not table.skip:
        yield from _repeated(constants, schema, count(table, piece))
        return
    for records, rows in _records(table, piece, skipped):
        batch = _decoded(table, records, rows, data, piece.path)
        columns = [
            pa.repeat(constants[one.name], len(rows))
            if one.name in constants
            else batch.column(data.get_field_index(one.name))
            for one in schema
        ]
        yield _batch(columns, schema, len(rows))


def _constants(table: RecordTable, piece: FilePiece, schema: Any) -> dict[str, Any]:
    """Return the values of the partition columns in a schema."""
    values, found = dict(piece.values), {}
    for one in schema:
        if one.name not in values:
            continue
        text = values[one.name]
        found[one.name] = hive.convert_value(one.name, text, one.type, table.zone, piece.path)
        if not one.nullable and text is None:
            raise FormatError(
                f"row {piece.start}, column {one.name!r}: the partition value is null, and the "
                "column is NOT NULL",
                path=piece.path,
            )
    return found


def _batch(columns: list[Any], schema: Any, count: int) -> Any:
    if columns:
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    # A batch without columns still has a number of rows.
    return pa.RecordBatch.from_struct_array(
        pa.StructArray.from_buffers(pa.struct([]), count, [None])
    )


def _decoded(
    table: RecordTable, records: ExampleRecords, rows: NDArray[np.int64], data: Any, path: str
) -> Any:
    place = Place(path, rows=rows)
    if table.record_type == "ByteArray":
        arrays = [_as_binary(records, place)] if len(data) else []
        return pa.RecordBatch.from_arrays(arrays, schema=data)
    return decode(records, data, record=table.record_type, place=place)


def _repeated(constants: dict[str, Any], schema: Any, count: int) -> Iterator[Any]:
    """Yield batches of partition values only."""
    for first in range(0, count, BATCH_COUNT):
        n = min(BATCH_COUNT, count - first)
        yield _batch([pa.repeat(constants[name], n) for name in schema.names], schema, n)


def count(table: RecordTable, piece: FilePiece) -> int:
    """Return the number of records of a piece; their bytes are not read, except by a scan.

    Raises: FFServeError.
    """
    if piece.stop is not None and table.format != "ffrecord":  # its last sample may be names
        return piece.stop - piece.start
    _check_format(table.format, piece)
    with _reader(table, piece) as reader:
        return len(_rows_of(table, piece, reader))


def _rows_of(table: RecordTable, piece: FilePiece, reader: Reader) -> range:
    """Return the samples of a piece.

    Raises: SampleIndexError: the file has lost samples since it was divided.
    """
    count, stop = len(reader), piece.stop
    if stop is None or (table.format == "ffrecord" and stop == count + 1):  # names are no sample
        stop = count
    if stop > count:
        raise outside(stop - 1, count).located(path=piece.path)
    return range(piece.start, stop)


def _as_binary(records: ExampleRecords, place: Place) -> Any:
    buffer, starts, lengths = records
    if len(buffer) >= 1 << 31:
        raise place.error(0, None, "the record has 2 GiB or more, which a batch cannot hold")
    # The bytes between records, such as frames, become rows that are left out.
    edges = np.stack((starts, starts + lengths), axis=1).ravel().astype(np.int32)
    gaps = pa.Array.from_buffers(
        pa.binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(buffer)]
    )
    return gaps.take(pa.array(np.arange(0, len(edges), 2)))


# ---- the records ---------------------------------------------------------------------------------


def _check_format(format: str, file: DataFile | FilePiece) -> None:
    """Refuse a file that is of another format by its content."""
    head, size = _head_of(file)
    if size and formats.by_name(format).sniff(head, size) is False:
        for other in formats.NAMES:
            if other != format and formats.by_name(other).sniff(head, size):
                raise FormatError(
                    f"the file is {other}, not {format}",
                    path=file.path,
                    hint=f"read it with the format {other!r}, apart from the others",
                )


def _records(
    table: RecordTable, piece: FilePiece, skipped: Callable[[int], None] | None = None
) -> Iterator[Numbered]:
    """Yield the records of a piece. Raises: FFServeError."""
    _check_format(table.format, piece)
    if table.format != "tfrecord" or _from_daemon(table, piece):
        yield from _by_index(table, piece, skipped)
    elif _is_compressed(piece):
        yield from _streamed(piece, table.skip, skipped)
    elif table.skip and piece.size:
        yield from _by_index(table, piece, skipped)
    else:
        yield from _framed(table, piece)


def _from_daemon(table: RecordTable, piece: FilePiece) -> bool:
    """Whether a TFRecord file is to be read through a daemon; without one its frames are read in
    order, which needs no index."""
    if piece.version is not None and table.server == "auto":
        return False
    if table.server in ("auto", "start"):
        from ffserve.client.public import start_wanted

        starts = table.server == "start" or start_wanted()
        there = starts or os.path.exists(find_socket())
        return there and not _is_compressed(piece)
    return table.server != "off"


def _framed(table: RecordTable, piece: FilePiece) -> Iterator[Numbered]:
    """Read the frames of a TFRecord file in order: without an index, and without another copy.

    All records are in one memory, which the next ones overwrite. The bytes from the first damage on
    are read by index, which finds the file's error.
    """
    row, at = piece.start, piece.begin
    with _opened(piece) as (read_at, size):
        end = size if piece.end < 0 else piece.end
        buffer = np.empty(table.frames_size, np.uint8)
        while at < end:
            records, taken, wanted = _frames(read_at, at, buffer[: end - at])
            if taken:
                yield records, np.arange(row, row + len(records.starts))
                row += len(records.starts)
                at += taken
            if not wanted:
                continue
            if wanted > end - at:
                break
            roomy = max(wanted, min(4 * wanted, BATCH_SIZE))
            if roomy > len(buffer):
                buffer = np.empty(roomy, np.uint8)
    if at < end:
        yield from _by_index(replace(table, server="off"), replace(piece, start=row), None)
        raise FormatError(
            "the file was changed while it was read", path=piece.path, hint="read it again"
        )


def _frames(read_at: ReadAt, at: int, buffer: Bytes) -> tuple[ExampleRecords, int, int]:
    """Read frames into a buffer.

    Returns: the records before the first damage and the end of the buffer; the bytes of their
        frames; 0, or the bytes that the next frame needs: of a damaged one more than any file has.
    """
    block = buffer[: read_at(at, buffer.data)]
    scanner = codec.FrameScanner(len(block))
    stop = scanner.feed(block.data, 0)
    offsets, lengths, expected = scanner.tables()
    wrong = checksums(CHECKSUM_CRC32C, block, offsets, lengths) != expected
    intact = int(np.argmax(wrong)) if wrong.any() else len(wrong)
    records = ExampleRecords(block, offsets[:intact], lengths[:intact])
    if intact < len(wrong):
        return records, int(offsets[intact]) - FRAME_HEADER_SIZE, _NEVER
    taken, wanted = scanner.at, 0
    if stop == codec.FrameScanner.CUT_RECORD:
        [length] = struct.unpack_from("<Q", block.data, taken)
        wanted = length + FRAME_SIZE
    elif not taken:
        wanted = _NEVER
    return records, taken, wanted


def _reader(table: RecordTable, piece: FilePiece) -> Reader:
    from ffserve.reader import Reader

    remote = piece.version is not None
    server = "off" if remote and table.server == "auto" else table.server
    versions = (piece.version,) if piece.version is not None else ()
    return Reader((piece.path,), table.format, server, True, table.skip, identities=versions)


def _by_index(
    table: RecordTable, piece: FilePiece, skipped: Callable[[int], None] | None
) -> Iterator[Numbered]:
    damaged: list[FFServeError] = []
    with _reader(table, piece) as reader:
        chosen = np.array(_rows_of(table, piece, reader), np.int64)
        for first, batch, failed in reader.scan(chosen, count=BATCH_COUNT, size=BATCH_SIZE):
            if failed and not table.skip:
                raise failed[min(failed)]
            damaged += failed.values()
            kept = np.ones(len(batch), np.bool_)
            kept[list(failed)] = False
            rows = chosen[first : first + len(batch)][kept]
            buffer, starts, lengths = records_at(batch.buffer, batch.offsets)
            if len(rows):
                yield ExampleRecords(buffer, starts[kept], lengths[kept]), rows
    _report(piece.path, damaged, skipped)


def _streamed(
    piece: FilePiece, skip: bool, skipped: Callable[[int], None] | None
) -> Iterator[Numbered]:
    from ffserve.reader import StreamReader

    with StreamReader((piece.path,), tolerant=skip) as reader:
        first = 0
        for batch in reader.batches(count=BATCH_COUNT, size=BATCH_SIZE):
            records = records_at(batch.buffer, batch.offsets)
            yield records, np.arange(first, first + len(batch))
            first += len(batch)
        _report(piece.path, reader.damaged, skipped)


def _report(
    path: str, damaged: Sequence[FFServeError], skipped: Callable[[int], None] | None
) -> None:
    if damaged:
        if skipped is not None:
            skipped(len(damaged))
        log.warning("%s: skipped %d damaged records, the first: %s", path, len(damaged), damaged[0])
