"""Packed folders among record files: found by the last sample's size, then by its first bytes.

A folder index has at least four bytes per file, so most other files are told apart by their tables
alone. Of the rest the first bytes of the last sample are read, which in FFRecord ends with its
file; the checksum is compared when the names are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ffserve.disk.files import REGULAR_FLAGS
from ffserve.dtypes import Bools, Bytes, Int64s
from ffserve.engine.many_files import close_fds, open_paths, read_pieces
from ffserve.folders.folder_index import MAGIC, SIZE_MAX, is_index
from ffserve.store.urls import is_url

HEAD_SIZE = 16
_FIXED_SIZE = len(MAGIC) + 24
"""A pickled OrderedDict has at least 24 bytes besides its items."""
_ITEM_SIZE = 4
"""An item has at least two bytes for its name, as a reference to an equal one, and two for its
value."""
_AT_ONCE = 256
_MAGIC = np.frombuffer(MAGIC, np.uint8)


def may_be_indices(sizes: Int64s, counts: Int64s) -> Bools:
    """Return which last samples may be folder indices by their sizes.

    Args: sizes: of the last samples. counts: of the samples in their files.
    """
    return (sizes >= _FIXED_SIZE + _ITEM_SIZE * (counts - 1)) & (sizes <= SIZE_MAX)


def are_indices(paths: Sequence[str], sizes: Int64s, ends: Int64s) -> list[bool | None]:
    """Return whether the last samples of local files are folder indices; None: this process cannot
    read it.

    Args: sizes: of the last samples, at least HEAD_SIZE. ends: sizes of the files.
    """
    found: list[bool | None] = []
    while len(found) < len(paths):
        part = slice(len(found), len(found) + _AT_ONCE)
        some = _first_ones(paths[part], sizes[part], np.ascontiguousarray(ends[part]))
        found += some
        if len(some) < len(paths[part]):
            found.append(None)
    return found


def _first_ones(paths: Sequence[str], sizes: Int64s, ends: Int64s) -> list[bool | None]:
    """Return this for the files before the first one that cannot be read."""
    fds, _ = open_paths(paths, REGULAR_FLAGS)
    try:
        heads, got, _ = read_pieces(fds, ends[: len(fds)], HEAD_SIZE, (ends - sizes)[: len(fds)])
    finally:
        close_fds(fds)
    begun = (heads[:, : len(MAGIC)] == _MAGIC).all(axis=1).tolist()
    read = (got == HEAD_SIZE).tolist()
    return [begins if there else None for begins, there in zip(begun, read, strict=False)]


class FolderSearch:
    """Finds the folder indices among the samples of a data set.

    Args: shards: its files, as ``Reader.shards`` has them.

    last: numbers of the last samples of files that can be packed folders; ``look`` wants their
    sizes. found: numbers of folder indices.
    """

    def __init__(self, shards: Iterable[Any]) -> None:
        self._shards = [s for s in shards if s.format == "ffrecord" and s.count]
        self.last = np.array([s.first + s.count - 1 for s in self._shards], np.int64)
        self.found: list[int] = []

    def look(self, sizes: Int64s) -> Int64s:
        """Look at the local files; return the numbers of samples that have to be read as well."""
        counts = np.array([shard.count for shard in self._shards], np.int64)
        chosen = np.flatnonzero(may_be_indices(sizes, counts))
        ends = np.array([shard.size for shard in self._shards], np.int64)
        local = [k for k in chosen.tolist() if not is_url(self._shards[k].path)]
        states = are_indices([self._shards[k].path for k in local], sizes[local], ends[local])
        known = dict(zip(local, states, strict=True))
        self.found = [int(self.last[k]) for k, state in known.items() if state]
        unknown = np.array([known.get(k) is None for k in chosen.tolist()], np.bool_)
        return self.last[chosen[unknown]]

    def take(self, number: int, sample: Bytes) -> None:
        """Take a sample that was read."""
        if is_index(sample[:HEAD_SIZE].tobytes()):
            self.found.append(number)
