"""Writing record files in Spark: the job in the driver, and the files of a task."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from ffserve.arrow import hive
from ffserve.arrow.staged_output import Mode, StagedFile, job_of
from ffserve.arrow.table_writing import TableOutput, check_write, write_task
from ffserve.errors import FFServeError
from ffserve.spark.options import WriteOptions


@dataclass
class Written(WriterCommitMessage):
    """The files and counts that a task has staged."""

    files: list[StagedFile]


class RecordWriter(DataSourceArrowWriter):
    """A write job: the driver creates and commits it, and each task writes with a copy of it."""

    def __init__(
        self, format: str, schema: StructType, overwrite: bool, options: WriteOptions
    ) -> None:
        self._output = TableOutput(
            format,
            options.record_type,
            options.compression,
            options.partition_by,
            options.max_records,
            options.partition_names,
        )
        self._not_null = frozenset(one.name for one in schema if not one.nullable)
        check_write(self._output, to_arrow_schema(schema, timezone="UTC"))
        mode: Mode = "append"
        if overwrite:
            mode = "dynamic" if options.dynamic and options.partition_by else "overwrite"
        elif options.mode == "error":
            mode = "error"
        target = hive.output_path(options.path)
        self._job = job_of(target).begin(target, mode, pid=_driver(), id=options.job)

    def write(self, iterator: Iterator[Any]) -> Written:
        """Write the rows of a task. Raises: FFServeError, with row and column."""
        context = TaskContext.get()
        task = context.partitionId() if context is not None else 0
        try:
            return Written(write_task(self._output, self._job, task, iterator, self._not_null))
        except FFServeError as error:
            raise error.with_traceback(None) from None  # Spark would show all frames

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make the files of all tasks visible."""
        files = [file for message in messages for file in getattr(message, "files", ())]
        try:
            self._job.commit(files)
        except FFServeError as error:
            raise error.with_traceback(None) from None

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
