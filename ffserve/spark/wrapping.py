"""DataFrameWriter for the formats of ffserve: partitionBy and the four save modes.

Spark's Python data sources know no partition columns, and of the save modes only append and
overwrite. So ``save`` is wrapped: for our formats it takes the partition columns from Spark's
writer and hands them, and the save mode, to the data source as options. Other formats pass through
unchanged.
"""

from __future__ import annotations

import functools
import json
import uuid
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrameWriter

from ffserve.arrow import hive, staged_output
from ffserve.spark.data_source import NAMES
from ffserve.spark.options import JOB, PARTITION_BY, PARTITION_NAMES, SAVE_MODE
from ffserve.store.public import is_url, shown

_MODES = {"error": "error", "errorifexists": "error", "default": "error", "append": "append"}
_MODES |= {"overwrite": "overwrite", "ignore": "ignore"}
_STATE = "_ffserve_state"


def wrap_writer() -> None:
    """Wrap the methods of DataFrameWriter, once per process."""
    if getattr(DataFrameWriter.save, _STATE, None) is None:
        for name in ("format", "mode", "partitionBy", "option", "options", "save"):
            setattr(DataFrameWriter, name, _WRAPPERS[name](getattr(DataFrameWriter, name)))
        setattr(DataFrameWriter.save, _STATE, True)


def _state(writer: Any) -> dict[str, Any]:
    state: dict[str, Any] = writer.__dict__.setdefault(_STATE, {"options": {}})
    return state


def _format(original: Any) -> Any:
    @functools.wraps(original)
    def format(self: Any, source: str) -> Any:
        _state(self)["format"] = source
        return original(self, source)

    return format


def _mode(original: Any) -> Any:
    @functools.wraps(original)
    def mode(self: Any, saveMode: str | None) -> Any:  # noqa: N803
        if saveMode:
            _state(self)["mode"] = saveMode
        return original(self, saveMode)

    return mode


def _partition_by(original: Any) -> Any:
    @functools.wraps(original)
    def partitionBy(self: Any, *cols: Any) -> Any:  # noqa: N802
        listed = len(cols) == 1 and isinstance(cols[0], (list, tuple))
        _state(self)["columns"] = list(cols[0] if listed else cols)
        return original(self, *cols)

    return partitionBy


def _option(original: Any) -> Any:
    @functools.wraps(original)
    def option(self: Any, key: str, value: Any) -> Any:
        _state(self)["options"][key.lower()] = value
        return original(self, key, value)

    return option


def _options(original: Any) -> Any:
    @functools.wraps(original)
    def options(self: Any, **options: Any) -> Any:
        _state(self)["options"].update({key.lower(): value for key, value in options.items()})
        return original(self, **options)

    return options


def _save(original: Any) -> Any:
    @functools.wraps(original)
    def save(
        self: Any,
        path: str | None = None,
        format: str | None = None,
        mode: str | None = None,
        partitionBy: Any = None,  # noqa: N803
        **options: Any,
    ) -> None:
        source = format or _state(self).get("format") or _default_format(self)
        if source.lower() not in NAMES:
            original(self, path, format, mode, partitionBy, **options)
            return
        self.mode(mode).options(**options).format(source)
        if partitionBy is not None:
            self.partitionBy(*([partitionBy] if isinstance(partitionBy, str) else partitionBy))
        _save_records(self, path)

    return save


_WRAPPERS = {
    "format": _format,
    "mode": _mode,
    "partitionBy": _partition_by,
    "option": _option,
    "options": _options,
    "save": _save,
}


def _default_format(writer: Any) -> str:
    return str(writer._spark.conf.get("spark.sql.sources.default"))


def _save_records(writer: Any, path: str | None) -> None:
    """Save in a format of ffserve."""
    state = _state(writer)
    given = path if path is not None else state["options"].get("path")
    mode = _MODES.get(str(state.get("mode", "error")).lower(), "error")
    conf, options = writer._spark.conf, state["options"]
    given_names = list(state.get("columns", []))
    added = {PARTITION_BY: json.dumps(_partition_columns(writer, given_names))}
    added |= {PARTITION_NAMES: json.dumps(given_names), SAVE_MODE: mode}
    added[JOB] = job = uuid.uuid4().hex
    for name in ("maxRecordsPerFile", "partitionOverwriteMode"):
        if name.lower() not in options:
            added[name] = conf.get(f"spark.sql.{_CONF[name]}").lower()
    target = None if given is None else hive.output_path(str(given))
    there = target is not None and staged_output.exists(target)
    if target is not None and there and mode in ("error", "ignore"):
        if mode == "ignore":
            return
        where = shown(target) if is_url(target) else f"file:{target}"
        raise AnalysisException(
            f'Path {where} already exists. Set mode as "overwrite" to overwrite the existing path.',
            errorClass="PATH_ALREADY_EXISTS",
            messageParameters={"outputPath": where},
        )
    _unwrapped("mode")(writer, "overwrite" if mode == "overwrite" else "append")
    _unwrapped("partitionBy")(writer, [])
    _unwrapped("options")(writer, **added)
    try:
        _unwrapped("save")(writer, path)
    finally:
        _unwrapped("partitionBy")(writer, state.get("columns", []))
        _unwrapped("mode")(writer, mode)
        if target is not None:
            # A plan that failed before its first task is not aborted by Spark.
            staged_output.job_of(target)(target, job, "append", not there).discard()


def _partition_columns(writer: Any, given: list[str]) -> list[str]:
    """Return the table's columns of the given names, which may be in another case. The directories
    have the given names, as Spark's own formats have (`AttributeSeq.resolve`)."""
    known = writer._df.columns
    if str(writer._spark.conf.get("spark.sql.caseSensitive")).lower() == "true":
        return given
    by_key = {name.lower(): name for name in known}
    return [name if name in known else by_key.get(name.lower(), name) for name in given]


def _unwrapped(name: str) -> Any:
    """Return a method of DataFrameWriter as pyspark has it."""
    return getattr(DataFrameWriter, name).__wrapped__


_CONF = {
    "maxRecordsPerFile": "files.maxRecordsPerFile",
    "partitionOverwriteMode": "sources.partitionOverwriteMode",
}
