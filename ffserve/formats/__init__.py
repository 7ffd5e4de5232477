"""The registry of formats. A new format is one module here and its name in ``NAMES``."""

from __future__ import annotations

import importlib
import os

from ffserve.errors import FormatError, UsageError
from ffserve.formats.base import ChunkedShard, Encoder, Format, ReadAt, Shard

NAMES = (
    "ffrecord",
    "recordio",
    "tfrecord",
)  # fmt: skip
"""Modules of this package, each with a ``FORMAT``; asked in this order, imported when needed."""

_loaded: dict[str, Format] = {}

__all__ = [
    "NAMES",
    "ChunkedShard",
    "Encoder",
    "Format",
    "ReadAt",
    "Shard",
    "by_name",
    "by_suffix",
    "check_name",
    "detect",
    "suffixes",
]


def check_name(name: str) -> None:
    """Raise UsageError unless a format is called ``name``; imports none."""
    if name not in NAMES:
        raise UsageError(f"no format is called {name!r}", hint=f"known: {', '.join(NAMES)}")


def by_name(name: str) -> Format:
    """Return the format called ``name``.

    Raises:  UsageError when there is none.
    """
    check_name(name)
    if name not in _loaded:
        _loaded[name] = importlib.import_module(f"{__name__}.{name}").FORMAT
    return _loaded[name]


def by_suffix(path: str | os.PathLike[str]) -> Format | None:
    """Return the format whose suffix ``path`` has, or None."""
    name = os.path.basename(os.fspath(path)).lower()
    for known in NAMES:
        if name.endswith(by_name(known).suffixes):
            return by_name(known)
    return None


def suffixes(only: str | None = None) -> tuple[str, ...]:
    """Return the suffixes of all formats, or of one: what counts as a record file in a directory.

    Imports them.
    """
    names = NAMES if only is None else (only,)
    return tuple(suffix for name in names for suffix in by_name(name).suffixes)


def detect(head: bytes, path: str, size: int) -> Format:
    """Tell the format of a file: by its content, then by its suffix.

    A suffix also decides for a file that by its content belongs to nobody, so that a damaged
    file is refused by its own format, which can say what is wrong with it.

    Args:
        head: the file's beginning, ``HEAD_SIZE`` bytes or all there are.
        path: its name.
        size: its size in bytes.
    Raises:  FormatError when neither content nor suffix tells.
    """
    unsure = []
    for name in NAMES:
        answer = by_name(name).sniff(head, size)
        if answer:
            return by_name(name)
        if answer is None:
            unsure.append(name)
    known = by_suffix(path)
    if known is not None:
        return known
    if len(unsure) == 1:
        return by_name(unsure[0])
    raise FormatError(
        f"neither the content ({head[:16].hex() or 'empty'}...) nor the suffix tells a format",
        path=path,
        offset=0,
        hint=f"if it is a record file, give the format by name: {', '.join(NAMES)}; "
        "`ffserve pack` makes a record file of other files",
    )
