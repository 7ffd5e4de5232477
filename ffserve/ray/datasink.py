"""Writing a Dataset as record files: the job in the driver, and what its tasks do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from ray.data import Dataset
from ray.data.block import BlockAccessor
from ray.data.datasource import Datasink
from ray.data.extensions import (
    ArrowPythonObjectType,
    ArrowVariableShapedTensorType,
    get_arrow_extension_tensor_types,
)

from ffserve import formats
from ffserve.arrow import hive
from ffserve.arrow.record_types import check_compression, record_type_of
from ffserve.arrow.staged_output import Mode, OutputJob, StagedFile, exists, job_of
from ffserve.arrow.table_writing import TableOutput, write_task
from ffserve.errors import FFServeError, UsageError
from ffserve.ray.task_errors import of_user, plain_error
from ffserve.store.public import shown

_MODES: dict[str, Mode] = {
    "error": "error",
    "ignore": "error",
    "append": "append",
    "overwrite": "overwrite",
    "dynamic": "dynamic",
}


def write(
    dataset: Any,
    path: str | os.PathLike[str],
    format: str,
    record_type: str,
    partition_cols: Sequence[str] | None,
    mode: str,
    max_rows_per_file: int | None,
    compression: str | None,
) -> None:
    """Write a Dataset; see ``ffserve.ray.write``."""
    if not isinstance(dataset, Dataset):
        raise UsageError(f"the dataset must be a ray.data.Dataset, not {type(dataset).__name__}")
    formats.check_name(format)
    kind = record_type_of(record_type, "record_type")
    if compression is not None:
        check_compression(format, compression, compression, "compression")
    if mode not in _MODES:
        raise UsageError(f"invalid mode {mode!r}", hint=f"use {', '.join(_MODES)}")
    if isinstance(partition_cols, str):
        raise UsageError(f"partition_cols must be a list of names, not {partition_cols!r}")
    if max_rows_per_file is not None and max_rows_per_file < 1:
        raise UsageError(f"max_rows_per_file must be at least 1, not {max_rows_per_file}")
    columns = tuple(partition_cols or ())
    target = hive.output_path(os.fspath(path))
    if mode in ("error", "ignore") and exists(target):
        if mode == "ignore":
            return
        raise UsageError(
            "the output path exists",
            path=shown(target),
            hint="use the mode 'overwrite' or 'append'",
        )
    output = TableOutput(format, kind, compression or "", columns, max_rows_per_file or 0)
    chosen = _MODES[mode] if columns or mode != "dynamic" else "overwrite"
    job = job_of(target).begin(target, chosen, pid=os.getpid())
    try:
        dataset.write_datasink(FFServeDatasink(output, job))
    except BaseException as error:
        job.discard()
        if (plain := plain_error(error)) is not None:
            raise plain from None  # the frames of the task are in Ray's log
        raise


class FFServeDatasink(Datasink):
    """A write job: the driver begins it, and each task writes with a copy of it."""

    def __init__(self, output: TableOutput, job: OutputJob) -> None:
        self._output = output
        self._job = job

    def write(self, blocks: Iterable[Any], ctx: Any) -> list[StagedFile]:
        """Write the blocks of a task. Raises: FFServeError, with row and column."""
        try:
            return write_task(self._output, self._job, ctx.task_idx, self._batches(blocks))
        except FFServeError as error:
            raise of_user(error) from None

    def _batches(self, blocks: Iterable[Any]) -> Iterator[Any]:
        for block in blocks:
            table = BlockAccessor.for_block(block).to_arrow()
            for batch in table.to_batches():
                yield _plain(batch, self._output.partition_by)

    def on_write_complete(self, write_result: Any) -> None:
        """Make the files of all tasks visible."""
        self._job.commit([file for files in write_result.write_returns for file in files or ()])

    def on_write_failed(self, error: Exception) -> None:
        """Remove what was staged."""
        self._job.discard()


# ---- types of Ray --------------------------------------------------------------------------------


def _plain(batch: Any, partition_by: Sequence[str]) -> Any:
    """Return a batch without the types that only blocks have.

    A column without any value has no type in a block, and is left out; a tensor becomes lists.
    """
    fields, arrays = [], []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        if pa.types.is_null(field.type):
            if field.name not in partition_by:
                continue
            array = array.cast(pa.string())
        array = _lists(field.name, array)
        fields.append(pa.field(field.name, array.type, field.nullable))
        arrays.append(array)
    if not arrays and batch.num_columns:
        raise UsageError(
            "no column has a value, so the columns have no types", hint="leave these rows out"
        )
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _lists(name: str, array: Any) -> Any:
    type = array.type
    if isinstance(type, ArrowPythonObjectType):
        raise UsageError(
            f"column {name!r} holds Python objects", hint="map them to numbers, strings or lists"
        )
    if isinstance(type, get_arrow_extension_tensor_types()):
        variable = isinstance(type, ArrowVariableShapedTensorType)
        if (type.ndim if variable else len(type.shape)) != 1:
            raise UsageError(
                f"column {name!r} holds tensors of more than one dimension",
                hint="flatten them, and write the shape as another column",
            )
        array = array.storage.field("data") if variable else array.storage
    if pa.types.is_fixed_size_list(array.type):
        return array.cast(pa.list_(array.type.value_type))
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
