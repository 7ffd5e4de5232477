"""The data sources that Spark loads; they delegate to `reading` and `writing`.

Spark starts a process for each question about a data source, so each imports only what it needs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, ClassVar

from pyspark.sql.datasource import (
    CaseInsensitiveDict,
    DataSource,
    DataSourceReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from ffserve.errors import FFServeError
from ffserve.spark import options as options_of
from ffserve.spark.options import Settings

NAMES = {"tfrecord": "tfrecord", "tfrecords": "tfrecord", "ffrecord": "ffrecord"}
NAMES["recordio"] = "recordio"
"""Format by name of the data source."""
_OPTIONS = "ffserve.options"
"""The metadata of the first column has the options under this name. For a table (CREATE TABLE …
LOCATION, which makes the path a URL) Spark keeps the schema, but passes no options to the
reader."""


def _plainly(call: Callable[..., Any]) -> Callable[..., Any]:
    """Raise the errors of a method without the frames below it, which Spark would print."""

    @functools.wraps(call)
    def plainly(*arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except FFServeError as error:
            raise error.with_traceback(None) from None

    return plainly


class RecordSource(DataSource):
    """Base of the data sources; ``source_class`` makes those that are registered."""

    source_name: ClassVar[str]
    format: ClassVar[str]
    settings: ClassVar[Settings]

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format(…)``."""
        return cls.source_name

    @_plainly
    def schema(self) -> StructType:
        """Infer the schema. Raises: FFServeError."""
        from ffserve.spark.reading import infer_schema

        options = options_of.read_options(self.format, self.options)
        schema = infer_schema(self.format, options, self.settings)
        if self.options.get("path", "").startswith("file:"):
            schema[0].metadata = {_OPTIONS: json.dumps(dict(self.options))}
        return schema

    @_plainly
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of these columns. Raises: UsageError."""
        from ffserve.spark.reading import TableReader

        given = self.options
        if not given.keys() & {"path", "paths"} and _OPTIONS in (schema[0].metadata or {}):
            given = CaseInsensitiveDict(json.loads(schema[0].metadata[_OPTIONS]))
        options = options_of.read_options(self.format, given)
        return TableReader(self.format, schema, options, self.settings)

    @_plainly
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Begin a job that writes these columns. Raises: FFServeError."""
        from ffserve.spark.writing import RecordWriter

        options = options_of.write_options(self.format, self.options)
        return RecordWriter(self.format, schema, overwrite, options)


def source_class(name: str, settings: Settings) -> type[DataSource]:
    """Return a class for ``spark.dataSource.register``.

    It is made here, so it is pickled as a whole, with the settings.
    """
    return type(
        "RecordSource",
        (RecordSource,),
        {"source_name": name, "format": NAMES[name], "settings": settings},
    )
