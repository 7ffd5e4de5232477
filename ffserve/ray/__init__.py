"""Read and write record files in Ray Data; see docs/RAY.md.

    dataset = ffserve.ray.read("/data/table", columns=["word"])
    ffserve.ray.write(dataset, "/data/copy", format="tfrecord", partition_cols=["day"])

Formats, types, partitions and save modes are those of ``ffserve.spark``. This needs Ray 2.60 with
Ray Data, and pyarrow: ``pip install 'ffserve[ray]'``, on all nodes.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

from ffserve.errors import UsageError

__all__ = ["read", "skipped", "write"]

PathLike = str | os.PathLike[str]


def read(
    paths: PathLike | Sequence[PathLike],
    *,
    format: str | None = None,
    record_type: str = "Example",
    schema: Any = None,
    columns: Sequence[str] | None = None,
    parallelism: int = -1,
    server: str = "auto",
    on_error: Literal["raise", "skip"] = "raise",
    base_path: PathLike | None = None,
    sampling_ratio: float = 1.0,
    merge_schema: bool = True,
) -> Any:
    """Return the records of files as a Dataset.

    Args:
        paths: files, directories and glob patterns, which all nodes have mounted, or URLs.
            Directories ``column=value`` become columns.
        format: "ffrecord", "recordio" or "tfrecord"; None: that of the first file.
        record_type: "Example", "SequenceExample", or "ByteArray" for one column ``byteArray``.
        schema: pyarrow.Schema of the wanted columns; None infers it from the records.
        columns: names of the wanted columns; None for all. Others are not decoded.
        parallelism: number of tasks; big files are divided by records. -1 chooses it.
        server: as for ``ffserve.open``: "auto" reads through the daemon of each node that has one,
            and URLs by ranges.
        on_error: "skip" leaves damaged records out; see ``skipped``.
        base_path: the directory below which directories are partition columns; None: each path.
        sampling_ratio: fraction of the records, besides the first of each file, that the inference
            examines.
        merge_schema: infer from all files, not only from the first that has columns.
    Returns: ray.data.Dataset, which reads when it is consumed, with a column per feature, sorted by
        name, and then the partition columns.
    Raises:  FFServeError: a path is missing, records differ, or nothing can be inferred.
        UsageError: an invalid argument, or Ray is not installed.
    Cost:    without a schema one pass over all records in this process.
    """
    return _module("datasource").read(
        [paths] if isinstance(paths, (str, os.PathLike)) else list(paths),
        format,
        record_type,
        schema,
        columns,
        parallelism,
        server,
        on_error,
        base_path,
        sampling_ratio,
        merge_schema,
    )


def write(
    dataset: Any,
    path: PathLike,
    *,
    format: str,
    record_type: str = "Example",
    partition_cols: Sequence[str] | None = None,
    mode: Literal["error", "append", "overwrite", "dynamic", "ignore"] = "error",
    max_rows_per_file: int | None = None,
    compression: str | None = None,
) -> None:
    """Write a Dataset to a directory of record files.

    All files appear at the end, and ``_SUCCESS`` last. A write that fails changes nothing.

    Args:
        dataset: ray.data.Dataset.
        path: the directory, which all nodes have mounted, or a URL.
        format: "ffrecord", "recordio" or "tfrecord".
        record_type: "Example", "SequenceExample", or "ByteArray" of one column of type binary.
        partition_cols: columns that become directories ``column=value``.
        mode: what happens if the path exists: "error"; "append"; "overwrite" replaces everything,
            "dynamic" only the partitions that get rows; "ignore" writes nothing.
        max_rows_per_file: None for any number. Each write task has files of its own.
        compression: "none", "gzip", "zlib" (TFRecord), "snappy" (RecordIO); None: the format's own
            choice.
    Raises:  FFServeError: the path exists, a value cannot be written, or the disk is full; with row
        (of a task) and column. UsageError: an invalid argument, or Ray is not installed.
    """
    _module("datasink").write(
        dataset,
        path,
        format,
        record_type,
        partition_cols,
        mode,
        max_rows_per_file,
        compression,
    )


def skipped() -> int:
    """Return how many damaged records reads with ``on_error="skip"`` have left out so far.

    It counts the tasks of this program. A task that ran twice may count twice.
    """
    return int(_module("datasource").skipped())


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"ffserve.ray.{name}")
    except ImportError as error:
        raise UsageError(
            f"Ray 2.60 or newer and pyarrow are needed: {error}", hint="pip install 'ffserve[ray]'"
        ) from error
