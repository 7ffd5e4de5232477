"""HDF5 files: sample i is row i of each data set of the file; the data sets are the columns.

Text and bytes are taken as they are, the numbers of a data set with one dimension become text. Of
more dimensions a row is its bytes in C order, as of .npy arrays; type and shape are not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ffserve.convert.inputs import Record
from ffserve.convert.kinds import Wanted, count_at_once, encoded, needed, reading
from ffserve.errors import UsageError

SUFFIXES = (".h5", ".hdf5")
_AT_ONCE = 64
"""Rows of unknown size that are read at a time."""
_CHUNK_CACHE = 64 << 20
"""A chunk of up to this size is decompressed once for all its rows."""


def recognizes(path: str, found: str) -> bool:
    """Whether it is such a file. In a directory each may be a sample: it has to be said."""
    return found == "an HDF5 file"


class HDF5Rows:
    """The rows of the data sets of a file."""

    named = False
    sized = True

    def __init__(self, path: str, wanted: Wanted) -> None:
        self.files = (path,)
        counts: dict[str, int] = {}
        with self._open() as file, reading(path):
            file.visititems(lambda name, node: _add(counts, name, node))
        self.columns = wanted.of(list(counts), path)
        lengths = {counts[name] for name in self.columns}
        if len(lengths) > 1:
            shown = ", ".join(f"{name!r} {counts[name]}" for name in self.columns)
            raise UsageError(
                f"the data sets have different numbers of rows: {shown}",
                path=path,
                hint="choose those of one length (--fields)",
            )
        self.count = lengths.pop() if lengths else 0

    def _open(self) -> Any:
        [path] = self.files
        module = needed("h5py", "h5py", path)
        with reading(path):
            return module.File(path, "r", rdcc_nbytes=_CHUNK_CACHE)

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the rows [first:stop]."""
        [path] = self.files
        last = self.count if stop is None else stop
        with self._open() as file, reading(path):
            sets = {name: file[name] for name in self.columns}
            fixed = all(each.dtype.kind != "O" for each in sets.values())
            size = sum(each.size * each.dtype.itemsize for each in sets.values())
            step = count_at_once(size, self.count) if fixed else _AT_ONCE
            for begin in range(first, last, step):
                end = min(begin + step, last)
                rows = {name: each[begin:end] for name, each in sets.items()}
                for k in range(end - begin):
                    yield Record({name: _content(each[k]) for name, each in rows.items()})


def _add(counts: dict[str, int], name: str, node: Any) -> None:
    if getattr(node, "shape", None):  # a data set that is no scalar
        counts[name] = len(node)


def _content(row: Any) -> bytes | None:
    if isinstance(row, (bytes, str)):
        return encoded(row)
    array = np.asarray(row)
    if array.ndim == 0 and array.dtype.kind in "biuf":
        return encoded(array[()])
    if array.dtype.kind == "O":
        raise UsageError(
            "a row has more than one text or list", hint="choose other columns (--fields)"
        )
    return array.tobytes()


def open_input(path: str, wanted: Wanted) -> HDF5Rows:
    """Return the rows of a file."""
    return HDF5Rows(path, wanted)
