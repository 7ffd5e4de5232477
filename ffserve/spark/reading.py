"""Reading record files in Spark: the schema, the tasks, and the batches of a task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from ffserve.arrow import hive, table_reading
from ffserve.arrow.table_reading import FilePiece, RecordTable
from ffserve.errors import FFServeError, UsageError
from ffserve.spark.options import ReadOptions, Settings


def record_table(format: str, options: ReadOptions, settings: Settings) -> RecordTable:
    """Return how the files of a read are read."""
    return RecordTable(format, options.record_type, options.skip, zone=settings.time_zone)


def infer_schema(format: str, options: ReadOptions, settings: Settings) -> StructType:
    """Return the columns of the files, sorted by name, and then the partition columns.

    Raises: FFServeError: a file cannot be read, records differ, or there is nothing to infer from.
    """
    schema = table_reading.infer_schema(
        record_table(format, options, settings),
        hive.find_files(options.paths, options.base_path),
        ratio=options.sampling_ratio,
        merge=options.merge_schema,
        typed=settings.infer_partition_types,
    )
    if not len(schema):
        raise UsageError(
            "cannot infer a schema: no file has columns",
            path=", ".join(options.paths),
            hint="give a schema",
        )
    return from_arrow_schema(schema)


class TableReader(DataSourceReader):
    """Reads the columns of a schema from record files."""

    def __init__(
        self, format: str, schema: StructType, options: ReadOptions, settings: Settings
    ) -> None:
        self._table = record_table(format, options, settings)
        self._options = options
        self._settings = settings
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return the tasks. Raises: FFServeError: a path is missing, or a file is of another
        format; UsageError: a column has a type that records cannot hold."""
        limit = self._options.max_partition_bytes or self._settings.max_partition_bytes
        try:
            files = hive.find_files(self._options.paths, self._options.base_path)
            table_reading.check_read(
                self._table, to_arrow_schema(self._schema, timezone="UTC"), files
            )
            pieces = [
                one for file in files for one in table_reading.pieces_of(self._table, file, limit)
            ]
        except FFServeError as error:
            raise error.with_traceback(None) from None  # Spark would show all frames
        return [InputPartition(tuple(group)) for group in self._packed(pieces, limit)]

    def _packed(self, pieces: Iterable[FilePiece], limit: int) -> Iterator[list[FilePiece]]:
        group: list[FilePiece] = []
        total = 0
        for piece in pieces:
            if group and total + piece.size > limit:
                yield group
                group, total = [], 0
            group.append(piece)
            total += piece.size + self._settings.open_cost_bytes
        if group:
            yield group

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the batches of a task.

        Raises: FFServeError: damaged or unfitting records, with file, row and column.
        """
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        counter = self._settings.skipped
        skipped = None if counter is None else counter.add
        try:
            for piece in partition.value or ():
                yield from table_reading.batches(self._table, piece, arrow, skipped)
        except FFServeError as error:
            raise error.with_traceback(None) from None
