"""Directories of partitioned tables: ``country=NL/day=2024-01-31/part-….tfrecord``.

Names and values are escaped as Hive and Spark escape them; ``__HIVE_DEFAULT_PARTITION__`` is null.
The types of values are those that Spark infers: int, long, decimal of 38 digits, double, date,
timestamp, string. Names that begin with ``_`` or ``.`` are not data.
"""

from __future__ import annotations

import datetime
import glob
import os
import re
import stat
import zoneinfo
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import pyarrow as pa

from ffserve.disk.files import wrap_os_error
from ffserve.errors import FormatError, MissingFile, UsageError
from ffserve.store import urls
from ffserve.store.public import ObjectVersion, find, sized
from ffserve.store.urls import has_magic, is_url, shown

NULL = "__HIVE_DEFAULT_PARTITION__"
_UNSAFE = re.compile(r"[\x00-\x1f\"#%'*/:=?\\\x7f{\[\]^]")
_ESCAPE = re.compile("%([0-9a-fA-F]{2})")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


# ---- names of directories ----------------------------------------------------------------------


def escape(text: str) -> str:
    """Return a name or value as it stands in the name of a directory."""
    return _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", text)


def unescape(text: str) -> str:
    """Return the name or value of an escaped one."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)


def directory_of(names: Sequence[str], values: Sequence[str | None]) -> str:
    """Return the relative directory of a partition. An empty value is null, as in Spark."""
    pairs = zip(names, values, strict=True)
    return "/".join(f"{escape(name)}={escape(value) if value else NULL}" for name, value in pairs)


def parse(directory: str) -> tuple[str, str | None] | None:
    """Return the name and the value of one directory; None if it is not ``name=value``."""
    name, equals, value = directory.partition("=")
    if not equals or not name:
        return None
    return unescape(name), None if value == NULL else unescape(value)


# ---- files -------------------------------------------------------------------------------------

Values: TypeAlias = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a table: path, bytes, and by partition column its value as text, or None.
    version: of a remote file, whose path is a URL."""

    path: str
    size: int
    values: Values = ()
    version: ObjectVersion | None = None


def local_path(path: str) -> str:
    """Return a path of this machine for a path or ``file:`` URL.

    Raises: UsageError for another scheme, or another machine.
    """
    found, local = _SCHEME.match(path), urls.local_path(path, escaped=False)
    if local is None or (found is not None and local == path):
        assert found is not None
        raise UsageError(
            f"the file system {found[1]!r} is not supported",
            path=path,
            hint="use a path that all machines have mounted, or a URL (SCHEME://…)",
        )
    return local


def output_path(path: str) -> str:
    """Return the absolute path, or the URL, of an output directory. Raises: as `local_path`."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(local_path(path))


def find_files(paths: Iterable[str], base: str | None = None) -> list[DataFile]:
    """List the files of a table.

    Args:
        paths: files, directories, glob patterns, and URLs of these.
        base: the directory below which directories are partition columns; None: each directory
            that was given, or that a pattern has found.
    Returns: sorted by path. All have the same partition columns.
    Raises:  MissingFile: no such path. AccessDenied, ReadError. FormatError: a directory that is
             not ``column=value``, or files at different depths. UsageError.
    """
    found: dict[str, DataFile] = {}
    root = base
    if base is not None and not is_url(base):
        root = os.path.abspath(local_path(base))
    for path in paths:
        if is_url(path):
            for file in _remote(path, root):
                found.setdefault(file.path, file)
            continue
        for match in _matches(local_path(path)):
            top = os.path.abspath(match)
            values = _values_between(root, top)
            for file in _below(top, values):
                found.setdefault(file.path, file)
    files = sorted(found.values(), key=lambda file: file.path)
    _check_columns(files)
    return files


def _matches(path: str) -> list[str]:
    if not path:
        raise UsageError("the path is empty")
    if os.path.lexists(path):
        return [path]
    matches = sorted(glob.glob(path)) if glob.has_magic(path) else []
    if not matches:
        raise MissingFile(
            "no file matches the pattern" if glob.has_magic(path) else "no such file or directory",
            path=path,
            hint="check the path; it must exist under this name on the driver and all executors",
        )
    return matches


def _remote(url: str, root: str | None) -> Iterator[DataFile]:
    """Yield the files that a URL denotes, and those below the directories that it denotes."""
    listed, _ = find(url, below=True)
    if not listed and has_magic(url):
        raise MissingFile("no file matches the pattern", path=shown(url), hint="check the URL")
    depth = len(url.rstrip("/").split("/"))
    for identity in listed:
        parts = identity.url.split("/")
        if any(map(_is_hidden, parts[depth:])):
            continue
        place = "/".join(parts[:depth])
        values = _values_between(root, place)
        for name in parts[depth:-1]:
            place = f"{place}/{name}"
            values = _with_column(values, name, place)
        yield DataFile(identity.url, sized(identity).size, values, identity)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _with_column(values: Values, name: str, path: str) -> Values:
    """Return partition values and that of another directory. Raises: FormatError."""
    pair = parse(name)
    if pair is None:
        raise FormatError(
            "the directory is not named column=value, as the directories of a partitioned table "
            "are",
            path=path,
            hint="load this directory alone, or name the files by a pattern",
        )
    if pair[0] in dict(values):
        raise FormatError(f"the partition column {pair[0]!r} comes twice", path=path)
    return (*values, pair)


def _values_between(root: str | None, top: str) -> Values:
    if root is None:
        return ()
    relative = os.path.relpath(top, root)
    if relative.startswith(os.pardir):
        raise UsageError(f"basePath {root!r} is not a parent of the path", path=top)
    parts = [] if relative == os.curdir else relative.split(os.sep)
    return tuple(pair for part in parts if (pair := parse(part)) is not None)


def _below(top: str, values: Values) -> Iterable[DataFile]:
    state = wrap_os_error(os.stat, top)
    if not stat.S_ISDIR(state.st_mode):
        yield DataFile(top, state.st_size, values)
        return
    for entry in sorted(wrap_os_error(lambda p: list(os.scandir(p)), top), key=lambda e: e.name):
        if _is_hidden(entry.name):
            continue
        if not entry.is_dir():
            yield DataFile(entry.path, wrap_os_error(os.stat, entry.path).st_size, values)
            continue
        yield from _below(entry.path, _with_column(values, entry.name, entry.path))


def _check_columns(files: Sequence[DataFile]) -> None:
    for file in files[1:]:
        one, other = ([name for name, _ in each.values] for each in (files[0], file))
        if one != other:
            raise FormatError(
                f"its partition columns {other} differ from {one} of {files[0].path}",
                path=file.path,
                hint="load the two sets of files separately",
            )


# ---- values ------------------------------------------------------------------------------------


def _as_int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def _bounded(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        value = _as_int(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    return convert


def _as_double(text: str) -> float:
    if text[-1:] in "dDfF" or "_" in text or text != text.strip():
        raise ValueError(text)
    if re.fullmatch(r"(?i)[+-]?(inf|nan)", text):
        raise ValueError(text)
    return float(text)


def _as_decimal(text: str) -> Decimal:
    value = _as_int(text)
    if abs(value) >= 10**38:
        raise ValueError(text)
    return Decimal(value)


def _as_date(text: str) -> datetime.date:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        raise ValueError(text)
    return datetime.date.fromisoformat(text)


def _as_timestamp(text: str) -> datetime.datetime:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2}(\.\d{1,6})?", text):
        raise ValueError(text)
    whole, _, part = text.partition(".")
    return datetime.datetime.fromisoformat(whole) + datetime.timedelta(
        microseconds=int(part.ljust(6, "0")) if part else 0
    )


_INFERRED: tuple[tuple[str, Any, Callable[[str], Any]], ...] = (
    ("int", pa.int32(), _bounded(-(2**31), 2**31 - 1)),
    ("long", pa.int64(), _bounded(-(2**63), 2**63 - 1)),
    ("decimal", pa.decimal128(38, 0), _as_decimal),
    ("double", pa.float64(), _as_double),
    ("date", pa.date32(), _as_date),
    ("timestamp", pa.timestamp("us", "UTC"), _as_timestamp),
)
_NUMBERS = ("int", "long", "decimal", "double")


def _fits(convert: Callable[[str], Any], text: str) -> bool:
    try:
        convert(text)
    except ValueError:
        return False
    return True


def infer_type(values: Iterable[str | None]) -> Any:
    """Return the Arrow type of a partition column with these values; null has any type."""
    kinds = {
        next((kind for kind, _, convert in _INFERRED if _fits(convert, text)), "string")
        for text in values
        if text is not None
    }
    for kinds_of_one in (_NUMBERS, ("date", "timestamp")):
        if kinds and kinds <= set(kinds_of_one):
            widest = max(kinds, key=kinds_of_one.index)
            return next(type for kind, type, _ in _INFERRED if kind == widest)
    return pa.string()


def convert_value(name: str, text: str | None, type: Any, zone: str, path: str) -> Any:
    """Return a pyarrow.Scalar of a partition value.

    Args:    name: the column. zone: the time zone of timestamps. path: a file, for errors.
    Raises:  FormatError: the text is not a value of this type.
    """
    if text is None:
        return pa.scalar(None, type)
    try:
        return pa.scalar(_python_value(text, type, zone), type)
    except (ValueError, ArithmeticError, pa.ArrowInvalid, zoneinfo.ZoneInfoNotFoundError) as error:
        raise FormatError(
            f"the value {text!r} of the partition column {name!r} is not of type {type}",
            path=path,
            hint="give the column the type string in the schema",
        ) from error


def _python_value(text: str, type: Any, zone: str) -> Any:
    if pa.types.is_integer(type):
        return _as_int(text)
    if pa.types.is_floating(type):
        return float(text)
    if pa.types.is_decimal(type):
        return Decimal(text).quantize(Decimal(1).scaleb(-type.scale))
    if pa.types.is_boolean(type):
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if pa.types.is_date(type):
        return _as_date(text[:10])
    if pa.types.is_timestamp(type):
        moment = _as_timestamp(text) if len(text) > 10 else datetime.datetime.fromisoformat(text)
        return moment if type.tz is None else moment.replace(tzinfo=zoneinfo.ZoneInfo(zone))
    if pa.types.is_binary(type) or pa.types.is_large_binary(type):
        return text.encode()
    return text


def text_of(value: Any) -> str | None:
    """Return a value as text, as in the name of its partition.

    Args: value: None, bool, int, float, Decimal, date, datetime or str.
    Raises: UsageError for any other type.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.datetime):
        seconds = value.strftime("%Y-%m-%d %H:%M:%S")
        part = f".{value.microsecond:06d}".rstrip("0") if value.microsecond else ""
        return seconds + part
    if isinstance(value, (int, float, Decimal, datetime.date)):
        return str(value)
    raise UsageError(
        f"a partition column cannot hold {type(value).__name__}",
        hint="partition by numbers, strings, dates, timestamps or booleans",
    )
