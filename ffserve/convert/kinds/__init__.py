"""Kinds of input that other packages write. A kind is one module here and its name in ``KINDS``.

A module has these names:

    SUFFIXES                   endings of its files, which a directory may hold many of; or ()
    files_of(path)             optional: the names of such files in a directory, if it knows better
    recognizes(path, found)    whether a file or directory is of this kind; `found` is what
                               `formats.kind_of` calls a file
    open_input(path, wanted)   its input, an ``InputSource``: with names, or with ``columns``, whose
                               records are dicts of bytes by column (`inputs.py`)

It imports its package when it opens an input. `convert` knows no kind; what is here is what several
of them do.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ffserve.disk.files import os_error, wrap_os_error
from ffserve.errors import FFServeError, FormatError, UsageError
from ffserve.formats import kind_of
from ffserve.formats.base import HEAD_SIZE

KINDS = {
    "mds": "mds",
    "litdata": "litdata",
    "arrayrecord": "array_record",
    "parquet": "parquet",
    "arrow": "arrow_ipc",
    "lmdb": "lmdb",
    "h5py": "hdf5",
    "imagefolder": "class_folders",
}
"""By name (``--from``), modules of this package; recognized in this order, imported on demand."""

PIECE_SIZE = 8 << 20
"""Kinds that read several records at a time read about this many bytes."""
_BESIDE = (".json", ".md", ".txt")
"""A directory of a kind's files may have such files as well."""


@dataclass(frozen=True)
class Wanted:
    """What is to be read, and what becomes of it.

    fields: (name in the output, column) of each; None for all columns. out, format: the output.
    names: they are kept.
    """

    fields: tuple[tuple[str, str], ...] | None
    out: str
    format: str
    names: bool

    @property
    def grouped(self) -> bool:
        """Whether records whose names are equal up to their first dot become one sample."""
        return self.fields is not None or (self.names and self.format != "ffrecord")

    def of(self, found: Sequence[str], path: str) -> tuple[str, ...]:
        """Return the columns to read. Raises: UsageError: one is not among those found."""
        if self.fields is None:
            return tuple(found)
        columns = tuple(dict.fromkeys(column for _, column in self.fields))
        for name in columns:
            if name not in found:
                raise UsageError(
                    f"there is no column {name!r}; there are {', '.join(map(repr, found))}",
                    path=path,
                )
        return columns


def module_of(name: str) -> Any:
    """Return the module of a kind. Raises: UsageError: unknown name."""
    if name not in KINDS:
        raise UsageError(
            f"unknown kind of input {name!r}",
            hint=f"use one of {', '.join(KINDS)}; record files, tar files, arrays and directories "
            "need none",
        )
    return importlib.import_module(f"{__name__}.{KINDS[name]}")


def recognized(path: str) -> str | None:
    """Return the name of the kind of a file or directory, or None."""
    found = None
    if not os.path.isdir(path):
        found = kind_of(wrap_os_error(_head, path), path)
    name = "" if found is None else found.name
    with reading(path):
        return next((kind for kind in KINDS if module_of(kind).recognizes(path, name)), None)


def inputs_of(name: str, path: str) -> list[str]:
    """Return the inputs that a path stands for: itself, or the files of a directory of files."""
    module = module_of(name)
    suffixes = module.SUFFIXES
    if not suffixes or not os.path.isdir(path):
        return [path]
    names = getattr(module, "files_of", lambda _: None)(path)
    if names is None:
        names = sorted(n for n in os.listdir(path) if n.endswith(suffixes) and n[0] not in "._")
    if not names:
        raise UsageError(f"the directory has no file ending in {' or '.join(suffixes)}", path=path)
    return [os.path.join(path, name) for name in names]


# ---- what kinds share ----------------------------------------------------------------------------


def holds(path: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a path is a directory of files with these suffixes, and of nothing else but texts."""
    if not os.path.isdir(path):
        return False
    names = [name for name in os.listdir(path) if name[0] not in "._"]
    return any(name.endswith(suffixes) for name in names) and all(
        name.endswith((*suffixes, *_BESIDE)) for name in names
    )


def index_of(path: str, *keys: str, name: str = "index.json") -> dict[str, Any]:
    """Return a directory's index, or {} if it has none with these keys."""
    try:
        with open(os.path.join(path, name), encoding="utf-8") as file:
            index = json.load(file)
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) and all(key in index for key in keys) else {}


def needed(module: str, package: str, path: str) -> Any:
    """Import a module of a package that reads the input.

    Raises: UsageError: it cannot be imported; the package is named.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # packages fail in many ways
        raise UsageError(
            f"this input is read by {package}, which cannot be imported: {error}",
            path=path,
            hint=f"pip install {package}",
        ) from error


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert exceptions of a package that reads a file to errors that name the file."""
    try:
        yield
    except (FFServeError, MemoryError):
        raise
    except ImportError as error:
        raise UsageError(
            f"a package is missing: {error}", path=path, hint="install it with pip"
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise os_error(error, path) from error
        raise _unreadable(path, error) from error
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> FormatError:
    return FormatError(
        f"the file cannot be read: {type(error).__name__}: {error}",
        path=path,
        hint="restore it from a copy; its own package says the same",
    )


def damaged(path: str, what: str, index: int | None = None) -> FormatError:
    """Return the error for a file whose content contradicts itself."""
    return FormatError(what, path=path, index=index, hint="restore the file from a copy")


def parts_of(counts: Iterable[int], first: int, stop: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield (number, first, stop) of the parts of these counts that a run of records covers."""
    begin = 0
    for number, count in enumerate(counts):
        low, high = max(first - begin, 0), count if stop is None else min(stop - begin, count)
        if low < high:
            yield number, low, high
        begin += count


def count_at_once(size: int, count: int) -> int:
    """Return how many of `count` records of `size` bytes in all are read at a time."""
    return max(1, min(4096, PIECE_SIZE * count // max(size, 1)))


def encoded(value: Any) -> bytes | None:
    """Return a value as bytes: bytes as they are, text as UTF-8, all else as JSON."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.generic):
        value = value.item()
    return json.dumps(value, default=_plain, ensure_ascii=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise UsageError(
            "bytes within a list or a structure cannot be written as JSON",
            hint="choose other columns (--fields)",
        )
    return str(value)  # dates, decimals


def npy(array: Any) -> bytes:
    """Return an array as the content of a .npy file."""
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=False)
    return file.getvalue()


def _head(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(HEAD_SIZE)
