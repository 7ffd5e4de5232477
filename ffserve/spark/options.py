"""Options of the data sources, checked: names as in spark-tfrecord, in any case."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ffserve.arrow.record_types import RecordType, check_compression, check_sampling, record_type_of
from ffserve.errors import UsageError

_HADOOP = "org.apache.hadoop.io.compress."
_CODECS = {
    "": "none",
    "none": "none",
    "uncompressed": "none",
    "gzip": "gzip",
    f"{_HADOOP}gzipcodec": "gzip",
    "deflate": "zlib",
    "zlib": "zlib",
    f"{_HADOOP}defaultcodec": "zlib",
    f"{_HADOOP}deflatecodec": "zlib",
    "snappy": "snappy",
    f"{_HADOOP}snappycodec": "snappy",
}
_READ_OPTIONS = (
    *("path", "paths", "recordType", "codec", "samplingRatio", "mergeSchema"),
    *("on_error", "basePath", "maxPartitionBytes"),
)
_TABLE_OPTIONS = ("owner", "provider", "location", "external", "comment", "collation")
"""Spark adds these properties to the options of a table; they are ignored."""
_WRITE_OPTIONS = ("path", "recordType", "codec", "maxRecordsPerFile", "partitionOverwriteMode")

JOB, SAVE_MODE, PARTITION_BY = "ffserve.job", "ffserve.mode", "ffserve.partitionBy"
PARTITION_NAMES = "ffserve.partitionNames"
"""Options that the wrapper of DataFrameWriter sets; see ``wrapping.py``."""


@dataclass(frozen=True)
class Settings:
    """Properties of the session at ``register``, since the workers of a data source have no
    session."""

    max_partition_bytes: int = 128 << 20
    open_cost_bytes: int = 4 << 20
    time_zone: str = "UTC"
    infer_partition_types: bool = True
    skipped: Any = None
    """Accumulator of the records that ``on_error=skip`` left out."""


@dataclass(frozen=True)
class ReadOptions:
    """Checked options of a read."""

    paths: tuple[str, ...]
    record_type: RecordType
    sampling_ratio: float
    merge_schema: bool
    skip: bool
    base_path: str | None
    max_partition_bytes: int | None


@dataclass(frozen=True)
class WriteOptions:
    """Checked options of a write."""

    path: str
    record_type: RecordType
    compression: str
    """"none", "gzip", "zlib" or "snappy"; "" for the format's own choice."""
    partition_by: tuple[str, ...]
    partition_names: tuple[str, ...]
    max_records: int
    """Per file; 0 for any number."""
    dynamic: bool
    mode: str
    job: str


def read_options(format: str, options: Mapping[str, str]) -> ReadOptions:
    """Check the options of ``spark.read``. Raises: UsageError."""
    # Those of CREATE TABLE … OPTIONS come a second time, with this prefix.
    options = {_plain(name): text for name, text in options.items()}
    _refuse_unknown(format, options, (*_READ_OPTIONS, *_TABLE_OPTIONS))
    _compression(format, options)
    paths = tuple(json.loads(options["paths"])) if "paths" in options else ()
    if "path" in options:
        paths = (options["path"], *paths)
    if not paths:
        raise UsageError(
            "no path", hint="load(path), or CREATE TABLE … LOCATION without a list of columns"
        )
    ratio = check_sampling(_number(options, "samplingRatio", 1.0), "samplingRatio")
    on_error = options.get("on_error", "raise").lower()
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    limit = _count(options, "maxPartitionBytes") if "maxPartitionBytes" in options else None
    return ReadOptions(
        paths,
        _record_type(format, options),
        ratio,
        _flag(options, "mergeSchema", True),
        on_error == "skip",
        options.get("basePath"),
        limit or None,
    )


def _plain(name: str) -> str:
    """Return the name of an option as the user gave it, in the writing that is looked for."""
    name = name.lower().removeprefix("option.")
    return next((known for known in _READ_OPTIONS if known.lower() == name), name)


def write_options(format: str, options: Mapping[str, str]) -> WriteOptions:
    """Check the options of ``df.write``. Raises: UsageError."""
    if JOB not in options:
        # Without the wrapper, the partition columns and the save mode are unknown.
        raise UsageError(
            f"{format} files can be written only with DataFrameWriter.save of Python, not with "
            "saveAsTable, insertInto, writeTo, INSERT INTO or CREATE TABLE … AS",
            hint=f'df.write.mode("append").format("{format}").save(path)',
        )
    if not options.get("path"):
        raise UsageError("no path", hint="save(path)")
    own = JOB, SAVE_MODE, PARTITION_BY, PARTITION_NAMES
    _refuse_unknown(format, options, (*_WRITE_OPTIONS, *own))
    overwriting = options.get("partitionOverwriteMode", "static").lower()
    if overwriting not in ("static", "dynamic"):
        raise UsageError(f"partitionOverwriteMode must be static or dynamic, not {overwriting!r}")
    return WriteOptions(
        options["path"],
        _record_type(format, options),
        _compression(format, options),
        tuple(json.loads(options.get(PARTITION_BY, "[]"))),
        tuple(json.loads(options.get(PARTITION_NAMES, "[]"))),
        _count(options, "maxRecordsPerFile"),
        overwriting == "dynamic",
        options[SAVE_MODE],
        options[JOB],
    )


def _refuse_unknown(format: str, options: Mapping[str, str], known: tuple[str, ...]) -> None:
    by_key = {name.lower(): name for name in known}
    for name in options:
        if name.lower() not in by_key:
            shown = [
                one for one in known if one not in _TABLE_OPTIONS and not one.startswith("ffserve.")
            ]
            close = difflib.get_close_matches(name.lower(), map(str.lower, shown), 1)
            hint = f"did you mean {by_key[close[0]]}?" if close else f"use {', '.join(shown)}"
            raise UsageError(f"{format} has no option {name!r}", hint=hint)


def _record_type(format: str, options: Mapping[str, str]) -> RecordType:
    given = options.get("recordType") or ("Example" if format == "tfrecord" else "ByteArray")
    return record_type_of(given, "recordType")


def _compression(format: str, options: Mapping[str, str]) -> str:
    if "codec" not in options:
        return ""
    found = _CODECS.get(options["codec"].lower())
    check_compression(format, found, options["codec"], "codec")
    return found or ""


def _number(options: Mapping[str, str], name: str, default: float) -> float:
    text = options.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise UsageError(f"{name} must be a number, not {text!r}") from None


def _count(options: Mapping[str, str], name: str) -> int:
    text = options.get(name, "0").strip()
    if not text.isdecimal():
        raise UsageError(f"{name} must be a whole number from 0, not {text!r}")
    return int(text)


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise UsageError(f"{name} must be true or false, not {text!r}")
    return text == "true"
