"""The data sources: what Spark asks of them, handed on to reading and writing."""

from __future__ import annotations

from typing import ClassVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter
from pyspark.sql.types import StructType

from ffserve.spark import options as options_of
from ffserve.spark.options import Settings
from ffserve.spark.reading import RecordReader, infer_schema
from ffserve.spark.writing import RecordWriter

NAMES = {"tfrecord": "tfrecord", "tfrecords": "tfrecord", "ffrecord": "ffrecord"}
NAMES["recordio"] = "recordio"
"""Format by name of the data source."""


class RecordSource(DataSource):
    """Base of the data sources; ``source_class`` makes those that are registered."""

    source_name: ClassVar[str]
    format: ClassVar[str]
    settings: ClassVar[Settings]

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format(…)``."""
        return cls.source_name

    def schema(self) -> StructType:
        """Infer the schema. Raises: FFServeError."""
        options = options_of.read_options(self.format, self.options)
        return infer_schema(self.format, options, self.settings)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of these columns. Raises: UsageError."""
        options = options_of.read_options(self.format, self.options)
        return RecordReader(self.format, schema, options, self.settings)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Begin a job that writes these columns. Raises: FFServeError."""
        options = options_of.write_options(self.format, self.options)
        return RecordWriter(self.format, schema, overwrite, options, self.settings)


def source_class(name: str, settings: Settings) -> type[DataSource]:
    """Return a class for ``spark.dataSource.register``.

    It is made here, so it is pickled as a whole, with the settings.
    """
    return type(
        "RecordSource",
        (RecordSource,),
        {"source_name": name, "format": NAMES[name], "settings": settings},
    )
