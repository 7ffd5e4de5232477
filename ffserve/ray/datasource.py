"""Reading record files in Ray Data: the plan of a read, and what its tasks do."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa
import ray
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from ffserve.arrow import hive, table_reading
from ffserve.arrow.hive import DataFile
from ffserve.arrow.record_types import check_sampling, record_type_of
from ffserve.arrow.table_reading import FilePiece, RecordTable
from ffserve.errors import FFServeError, UsageError
from ffserve.ray.task_errors import of_user
from ffserve.reader import check_options

TASK_SIZE, SMALL_TASK_SIZE = 64 << 20, 4 << 20
"""A task reads about TASK_SIZE bytes of files. It reads less if there would be fewer than two tasks
per core, but at least SMALL_TASK_SIZE.
"""
_COUNTER = "ffserve-skipped"


def read(
    paths: Sequence[str | os.PathLike[str]],
    format: str | None,
    record_type: str,
    schema: Any,
    columns: Sequence[str] | None,
    parallelism: int,
    server: str,
    on_error: Literal["raise", "skip"],
    base_path: str | os.PathLike[str] | None,
    sampling_ratio: float,
    merge_schema: bool,
) -> Any:
    """Return a Dataset; see ``ffserve.ray.read``."""
    check_options(format, server, on_error)
    kind = record_type_of(record_type, "record_type")
    ratio = check_sampling(sampling_ratio, "sampling_ratio")
    if parallelism != -1 and parallelism < 1:
        raise UsageError(f"parallelism must be at least 1, or -1, not {parallelism}")
    if schema is not None and not isinstance(schema, pa.Schema):
        raise UsageError(f"the schema must be a pyarrow.Schema, not {type(schema).__name__}")
    base = None if base_path is None else os.fspath(base_path)
    names = [os.fspath(path) for path in paths]
    files = hive.find_files(names, base)
    table = RecordTable(format or table_reading.format_of(files), kind, on_error == "skip", server)
    if schema is None:
        schema = table_reading.infer_schema(table, files, ratio=ratio, merge=merge_schema)
        if not len(schema):
            raise UsageError(
                "cannot infer a schema: no file has columns",
                path=", ".join(names),
                hint="give a schema",
            )
    if columns is not None:
        schema = _chosen(schema, columns)
    table_reading.check_read(table, schema, files)
    count = parallelism if parallelism > 0 else _task_count(files)
    source = FFServeDatasource(table, schema, _groups(table, files, count))
    return ray.data.read_datasource(source, override_num_blocks=max(1, source.task_count))


def _chosen(schema: Any, columns: Sequence[str]) -> Any:
    """Return the columns of a schema with these names."""
    if isinstance(columns, str) or not columns or len(set(columns)) < len(columns):
        raise UsageError(f"columns must be a list of different names, not {columns!r}")
    for name in columns:
        if name not in schema.names:
            raise UsageError(
                f"there is no column {name!r}", hint=f"the columns are {', '.join(schema.names)}"
            )
    return pa.schema([schema.field(name) for name in columns])


def _task_count(files: Iterable[DataFile]) -> int:
    if not ray.is_initialized():
        ray.init()
    cores = int(ray.cluster_resources().get("CPU", 1))
    total = sum(file.size for file in files)
    return max(1, -(-total // TASK_SIZE), min(2 * cores, -(-total // SMALL_TASK_SIZE)))


def _groups(table: RecordTable, files: Sequence[DataFile], count: int) -> list[list[FilePiece]]:
    """Divide files into about `count` tasks of equal size."""
    total = sum(file.size for file in files)
    limit = -(-total // count)
    if len(files) >= count:
        # Tasks that differ cost less than the index of each file that is divided.
        limit *= 2
    groups: list[list[FilePiece]] = [[] for _ in range(count)]
    at = 0
    for file in files:
        for piece in table_reading.pieces_of(table, file, limit):
            middle = at + piece.size // 2
            groups[min(count - 1, middle * count // max(1, total))].append(piece)
            at += piece.size
    return [group for group in groups if group]


class FFServeDatasource(Datasource):
    """Reads the columns of a schema from pieces of record files, a task per group of pieces."""

    def __init__(self, table: RecordTable, schema: Any, groups: list[list[FilePiece]]) -> None:
        super().__init__()
        self._table = table
        self._schema = schema
        self._groups = groups
        self._projection_map: dict[str, str] | None = None

    @property
    def task_count(self) -> int:
        """The number of tasks."""
        return len(self._groups)

    def estimate_inmemory_data_size(self) -> int:
        return sum(piece.size for group in self._groups for piece in group)

    def supports_projection_pushdown(self) -> bool:
        return True

    def apply_projection(self, projection_map: dict[str, str] | None) -> FFServeDatasource:
        clone = copy.copy(self)
        if projection_map is not None:
            clone._schema = pa.schema([self._schema.field(name) for name in projection_map])
            clone._projection_map = {name: name for name in projection_map}
        return clone

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return the tasks; their number was chosen when the files were divided."""
        counter = _counter() if self._table.skip else None
        tasks = []
        for group in self._groups or [[]]:
            counts = [piece.stop and piece.stop - piece.start for piece in group]
            known = None if self._table.skip or None in counts else sum(filter(None, counts))
            metadata = BlockMetadata(
                num_rows=known,
                size_bytes=sum(piece.size for piece in group),
                input_files=sorted({piece.path for piece in group}),
                exec_stats=None,
            )
            read = _reading(self._table, group, self._schema, counter)
            tasks.append(ReadTask(read, metadata, self._schema, per_task_row_limit))
        return tasks


def _reading(
    table: RecordTable, group: Sequence[FilePiece], schema: Any, counter: Any
) -> Callable[[], Iterable[Any]]:
    def read_records() -> Iterator[Any]:
        skipped = None if counter is None else lambda n: ray.get(counter.add.remote(n))
        empty = True
        try:
            for piece in group:
                for batch in table_reading.batches(table, piece, schema, skipped):
                    empty = False
                    yield _block(batch)
        except FFServeError as error:
            raise of_user(error) from None
        if empty:
            yield _block(schema.empty_table())

    return read_records


def _block(batch: Any) -> Any:
    table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
    if table.num_columns:
        return table
    # Ray replaces no columns by a hidden one, which keeps the number of rows.
    return BlockAccessor.for_block(table).select([])


# ---- records that were skipped -------------------------------------------------------------------


class _Skipped:
    """Actor that counts."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, n: int) -> None:
        self._count += n

    def total(self) -> int:
        return self._count


_counters: dict[str, Any] = {}
"""The actor of each job, which lives as long as it is referred to."""


def _counter() -> Any:
    job = ray.get_runtime_context().get_job_id()
    if job not in _counters:
        actor = ray.remote(num_cpus=0)(_Skipped)
        _counters[job] = actor.options(name=_COUNTER, get_if_exists=True).remote()
    return _counters[job]


def skipped() -> int:
    """Return how many records were left out; see ``ffserve.ray.skipped``."""
    if not ray.is_initialized():
        return 0
    return int(ray.get(_counter().total.remote()))
