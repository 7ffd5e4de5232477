"""Labels of packed files: a table with a row for each file, and the files that it is read from.

The table is stored behind the pickle in the folder index, where unpickling ignores it (as pickle's
documentation says): so other programs read a packed folder with labels as one without. It is the
line ``ffserve-labels`` and a JSON object, column → values in the order of the samples.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ffserve.disk.files import os_error
from ffserve.errors import FormatError, UsageError

MARK = b"\nffserve-labels\n"
Columns = dict[str, list[Any]]
"""Values by column, in the order of the samples."""
_NAMES = ("name", "file_name")
"""The column with the names of the files; the second is that of Hugging Face's metadata files."""
_MOST_NAMED = 3
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(_INTEGER.pattern + r"(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def encode(columns: Columns) -> bytes:
    """Return a table as bytes."""
    return MARK + json.dumps(columns, separators=(",", ":")).encode()


def decode(content: bytes, count: int) -> Columns:
    """Return the table in the bytes behind a pickle.

    Args:    count: files in the folder.
    Raises:  FormatError.
    """
    columns: Any = None
    try:
        columns = json.loads(content[len(MARK) :])
    except (ValueError, RecursionError) as error:
        raise _damaged(str(error)) from None
    if type(columns) is not dict:
        raise _damaged("it is not a JSON object")
    for name, values in columns.items():
        if type(values) is not list or len(values) != count:
            raise _damaged(f"column {name!r} does not have a value for each of {count} files")
    found: Columns = columns
    return found


def _damaged(what: str) -> FormatError:
    return FormatError(
        f"invalid table of labels: {what}",
        hint="the file is damaged or hostile: restore it from a copy",
    )


def read(path: str) -> dict[str, dict[str, Any]]:
    """Read the labels of files.

    Args:    path: of a ``.csv``, ``.json`` or ``.parquet`` file. A column ``name`` (or
        ``file_name``) has the names of the files, parts joined by "/"; JSON may also be an object
        of objects by name. In CSV a column is of integers or floats if all its values are, as 7,
        -0.5 and 1e-3; else of texts, as 007 and 1_1.
    Returns: name → column → value.
    Raises:  UsageError: another file, no names, a name that comes twice, a row of CSV with too few
             or too many values, a value that JSON cannot hold. MissingFile, AccessDenied,
             ReadError.
    """
    readers: dict[str, Callable[[str], list[Any]]] = {
        ".csv": _csv_rows,
        ".json": _json_rows,
        ".parquet": _parquet_rows,
    }
    read_rows = readers.get(os.path.splitext(path)[1].lower())
    if read_rows is None:
        raise UsageError(
            "the labels are in a file of an unknown type",
            path=path,
            hint="give a .csv, .json or .parquet file",
        )
    try:
        rows = read_rows(path)
    except OSError as error:
        raise os_error(error, path) from error
    except (ValueError, csv.Error) as error:  # a FFServeError, too, and those of pyarrow
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"cannot read the labels: {error}", path=path) from None
    return _by_name(rows, path)


def _by_name(rows: Iterable[Any], path: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name, labels = row if isinstance(row, tuple) else _parted(row, path)
        if name in found:
            raise UsageError(f"the name {name!r} comes twice", path=path)
        found[name] = labels
        for column, value in labels.items():
            _check(value, name, column, path)
    return found


def _parted(row: Any, path: str) -> tuple[str, dict[str, Any]]:
    key = next((each for each in _NAMES if isinstance(row, dict) and each in row), None)
    if key is None:
        raise UsageError(
            "the labels have no column with the names of the files",
            path=path,
            hint="call it 'name'; names are those below the packed directory, as cats/tom.jpg",
        )
    return str(row[key]), {column: value for column, value in row.items() if column != key}


def _check(value: Any, name: str, column: str, path: str) -> None:
    if isinstance(value, list):
        for each in value:
            _check(each, name, column, path)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise UsageError(
            f"column {column!r} of {name!r} is a {type(value).__name__}, which cannot be stored",
            path=path,
            hint="use integers, floats, texts, booleans, or lists of these",
        )


def _csv_rows(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file)
        rows: list[dict[str, Any]] = []
        for row in reader:
            if None in row or None in row.values():
                many = "more" if None in row else "fewer"
                raise UsageError(
                    f"line {reader.line_num} has {many} values than there are columns", path=path
                )
            rows.append(row)
    for column in set(rows[0] if rows else ()) - set(_NAMES):
        typed = _typed([row[column] for row in rows])
        for row, value in zip(rows, typed, strict=True):
            row[column] = value
    return rows


def _typed(values: list[str]) -> Sequence[int | float | str]:
    if all(map(_INTEGER.fullmatch, values)):
        return list(map(int, values))
    if all(map(_FLOAT.fullmatch, values)):
        numbers = list(map(float, values))
        if all(map(math.isfinite, numbers)):
            return numbers
    return values


def _json_rows(path: str) -> list[Any]:
    with open(path, encoding="utf-8") as file:
        content = json.load(file, object_pairs_hook=lambda pairs: _unique(pairs, path))
    if isinstance(content, dict):
        return [
            (name, row if isinstance(row, dict) else {"label": row})
            for name, row in content.items()
        ]
    if not isinstance(content, list):
        raise UsageError(
            "the labels are neither an object nor an array",
            path=path,
            hint='such as {"cats/tom.jpg": {"age": 3}}',
        )
    return content


def _unique(pairs: list[tuple[str, Any]], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UsageError(f"the name {name!r} comes twice", path=path)
        found[name] = value
    return found


def _parquet_rows(path: str) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"pyarrow is not installed: {error}", hint="pip install 'ffserve[arrow]'"
        ) from error
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def columns_of(rows: Mapping[str, dict[str, Any]], names: Sequence[str], path: str) -> Columns:
    """Return the table for files of these names, in their order; a value that a row lacks is None.

    Raises: UsageError: a file without a row, or a row without a file.
    """
    missing = [name for name in names if name not in rows]
    if missing:
        raise UsageError(f"{_some(missing)} without a label", path=path, hint="add a row for each")
    if len(rows) > len(names):
        known = set(names)
        left = [name for name in rows if name not in known]
        raise UsageError(
            f"labels for {_some(left)} that is not in the input",
            path=path,
            hint="names are those below the packed directory, as cats/tom.jpg",
        )
    columns = dict.fromkeys(column for row in rows.values() for column in row)
    return {column: [rows[name].get(column) for name in names] for column in columns}


def _some(names: list[str]) -> str:
    shown = ", ".join(map(ascii, names[:_MOST_NAMED]))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{len(names)} {'file' if len(names) == 1 else 'files'} ({shown}{more})"
