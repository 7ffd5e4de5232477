"""Registry of file formats. A format is one module in this package and its name in ``NAMES``."""

from __future__ import annotations

import importlib
import os

from ffserve.errors import FormatError, UsageError
from ffserve.formats.base import ChunkedShard, Encoder, Format, ReadAt, Shard
from ffserve.formats.foreign import Foreign, kind_of

NAMES = (
    "ffrecord",
    "recordio",
    "tfrecord",
    "tar",
)  # fmt: skip
"""Modules of this package, each with a ``FORMAT``; detected in this order, imported on demand."""

_loaded: dict[str, Format] = {}

__all__ = [
    "NAMES",
    "ChunkedShard",
    "Encoder",
    "Foreign",
    "Format",
    "ReadAt",
    "Shard",
    "by_name",
    "by_suffix",
    "check_name",
    "detect",
    "kind_of",
    "suffixes",
]


def check_name(name: str) -> None:
    """Raise UsageError unless ``name`` is a format; imports no format."""
    if name not in NAMES:
        raise UsageError(f"unknown format {name!r}", hint=f"use one of {', '.join(NAMES)}")


def by_name(name: str) -> Format:
    """Return the format with this name.

    Raises:  UsageError: unknown name.
    """
    check_name(name)
    if name not in _loaded:
        _loaded[name] = importlib.import_module(f"{__name__}.{name}").FORMAT
    return _loaded[name]


def by_suffix(path: str | os.PathLike[str]) -> Format | None:
    """Return the format that has the suffix of ``path``, or None."""
    name = os.path.basename(os.fspath(path)).lower()
    for known in NAMES:
        if name.endswith(by_name(known).suffixes):
            return by_name(known)
    return None


def suffixes(only: str | None = None) -> tuple[str, ...]:
    """Return the suffixes of the record files of all formats, or of one; imports the formats."""
    names = NAMES if only is None else (only,)
    return tuple(suffix for name in names for suffix in by_name(name).suffixes)


def detect(head: bytes, path: str, size: int) -> Format:
    """Detect the format of a file, by content, then by suffix.

    The suffix also decides if the content matches no format: a damaged file is then refused by its
    own format, whose error is more precise.

    Args:
        head: the first ``HEAD_SIZE`` bytes of the file, or all of them.
        path: name of the file.
        size: size of the file in bytes.
    Raises:  FormatError: neither content nor suffix determines the format.
    """
    unsure = []
    for name in NAMES:
        answer = by_name(name).sniff(head, size)
        if answer:
            return by_name(name)
        if answer is None:
            unsure.append(name)
    if (foreign := kind_of(head, path)) is not None:
        raise FormatError(
            f"this is {foreign.name}, not a record file",
            path=path,
            offset=0,
            hint=f"`ffserve convert` makes a record file of it, by {foreign.package}"
            if foreign.converts
            else f"read it with {foreign.package}, and write its records with ffserve.create",
        )
    known = by_suffix(path)
    if known is not None:
        return known
    if len(unsure) == 1:
        return by_name(unsure[0])
    raise FormatError(
        f"unknown format: neither the content ({head[:16].hex() or 'empty'}...) nor the suffix "
        "determines it",
        path=path,
        offset=0,
        hint=f"if it is a record file, give its format, one of {', '.join(NAMES)}; else make one: "
        "of lines of text (.txt, .jsonl) by `ffserve convert`, of other files by `ffserve pack`",
    )
