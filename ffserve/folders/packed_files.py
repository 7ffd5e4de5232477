"""Packed folders among record files: found by the last sample's size, then by its first bytes.

A folder index has at least four bytes per file, which tells many other files apart by their tables
alone. No size is too large: directories without files and labels are not bounded by the number of
samples. So of the rest the first bytes of the last sample are read, which in FFRecord ends with its
file, of remote files by ranges, which a daemon has read when it opened them; the checksum is
compared when the names are read. Every process decides alike: what cannot be read is an error at
opening, never a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ffserve.disk.files import REGULAR_FLAGS
from ffserve.dtypes import Bytes, Int64s
from ffserve.engine.many_files import close_fds, contents_of, open_paths, read_pieces, stat_fds
from ffserve.errors import FFServeError, raise_first
from ffserve.folders.folder_index import MAGIC, check_size, is_index
from ffserve.formats.ffrecord import LAST_SIZE, may_be_indices
from ffserve.formats.members import ABOUT
from ffserve.store.ranges import RangedObject, pipelined
from ffserve.store.urls import is_url

_AT_ONCE = 256
_MAGIC = np.frombuffer(MAGIC, np.uint8)


def are_indices(paths: Sequence[str], sizes: Int64s, states: Int64s) -> list[bool | None]:
    """Return whether the last samples of local files are folder indices; None: this process cannot
    read it, or the file is not the one that was opened.

    Args: sizes: of the last samples, at least LAST_SIZE. states: of the files when they were
        opened, as of `contents_of`.
    """
    found: list[bool | None] = []
    while len(found) < len(paths):
        part = slice(len(found), len(found) + _AT_ONCE)
        some = _first_ones(paths[part], sizes[part], states[part])
        found += some
        if len(some) < len(paths[part]):
            found.append(None)
    return found


def _first_ones(paths: Sequence[str], sizes: Int64s, states: Int64s) -> list[bool | None]:
    """Return the same as `are_indices` for the files before the first one that cannot be read."""
    ends = np.ascontiguousarray(states[:, 0])
    fds, _ = open_paths(paths, REGULAR_FLAGS)
    try:
        heads, got, _ = read_pieces(fds, ends[: len(fds)], LAST_SIZE, (ends - sizes)[: len(fds)])
        now, _ = stat_fds(fds[: len(got)])
    finally:
        close_fds(fds)
    begun = (heads[:, : len(MAGIC)] == _MAGIC).all(axis=1).tolist()
    same = (contents_of(now) == states[: len(now)]).all(axis=1)
    read = ((got[: len(now)] == LAST_SIZE) & same).tolist()
    return [begins if there else None for begins, there in zip(begun, read, strict=False)]


def _are_remote_indices(objects: Sequence[RangedObject], sizes: Sequence[int]) -> list[bool | None]:
    """Return the same for remote files."""

    def extent(last: tuple[RangedObject, int]) -> tuple[int, int]:
        begin = last[0].size - last[1]
        return begin, begin + LAST_SIZE

    def begins_so(last: tuple[RangedObject, int]) -> bool | None:
        try:
            return is_index(last[0].fetch(*extent(last)))
        except FFServeError:  # the source may have it, or says why not
            return None

    urls = [opened.identity.url for opened in objects]
    lasts = list(zip(objects, sizes, strict=True))
    return list(pipelined(begins_so, lambda last: last[0].send(*extent(last)), lasts, urls))


class FolderSearch:
    """Finds the folder indices among the samples of a data set.

    Args: shards: its files, as ``Reader.shards`` has them. states: of the local ones when they were
        opened, as of `contents_of`, a row for each file. objects: the remote ones by file, None for
        others; empty: these are read through their source.

    last: numbers of the last samples of files that can be packed folders; ``look`` wants their
    sizes, ``hear`` what a source says of those that are left then, and ``take`` the samples that
    are left of these. found: numbers of folder indices.
    """

    def __init__(
        self, shards: Iterable[Any], states: Int64s, objects: Sequence[RangedObject | None]
    ) -> None:
        files, self._objects = list(shards), objects
        rows = [k for k, shard in enumerate(files) if shard.format == "ffrecord" and shard.count]
        self._rows, self._states = np.array(rows, np.int64), states
        self._shards = [files[k] for k in rows]
        self.last = np.array([s.first + s.count - 1 for s in self._shards], np.int64)
        self.found: list[int] = []
        self._sizes, self._left = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def look(self, sizes: Int64s) -> list[tuple[int, int]]:
        """Look at the files; return of which a source is to be asked, as `SampleSource.named` is.

        Raises: FormatError: a folder index is too large.
        """
        counts = np.array([shard.count for shard in self._shards], np.int64)
        ends = np.array([shard.size for shard in self._shards], np.int64)
        # A sample that a cut file does not have as a whole is damaged, and nothing else.
        chosen = np.flatnonzero(may_be_indices(sizes, counts) & (sizes <= ends))
        remote = np.array([is_url(self._shards[k].path) for k in chosen.tolist()], np.bool_)
        near, far = chosen[~remote], chosen[remote]
        paths = [self._shards[k].path for k in near.tolist()]
        states = are_indices(paths, sizes[near], self._states[self._rows[near]])
        if self._objects:
            some = [each for k in self._rows[far].tolist() if (each := self._objects[k])]
            states += _are_remote_indices(some, sizes[far].tolist())
        else:
            states += [None] * len(far)
        self._sizes = sizes
        self._left = self._decide(np.concatenate((near, far)), states)
        return [(k, ABOUT) for k in self._rows[self._left].tolist()]

    def hear(self, answers: Sequence[bytes]) -> Int64s:
        """Take what a source says; return the numbers of samples that have to be read.

        Args: answers: the first LAST_SIZE bytes of each; b"": it does not know them.
        Raises: as `look`.
        """
        states = [is_index(each) if each else None for each in answers]
        return self.last[self._decide(self._left, states)]

    def _decide(self, rows: Int64s, states: list[bool | None]) -> Int64s:
        """Enter folder indices; return the rows that are still unknown, sorted."""
        found = rows[[bool(state) for state in states]]
        self._enter(found, self._sizes[found])
        unknown: Int64s = rows[[state is None for state in states]]
        return np.sort(unknown)

    def take(
        self, numbers: Int64s, batch: Sequence[Bytes], failed: dict[int, FFServeError]
    ) -> None:
        """Take samples that were read. Raises: the first error: they cannot be told apart."""
        raise_first(failed)
        chosen = [is_index(sample[:LAST_SIZE].tobytes()) for sample in batch]
        sizes = np.array([len(sample) for sample in batch], np.int64)
        self._enter(np.searchsorted(self.last, numbers[chosen]), sizes[chosen])

    def _enter(self, found: Int64s, sizes: Int64s) -> None:
        if len(found):
            largest = int(sizes.argmax())
            check_size(int(sizes[largest]), self._shards[int(found[largest])].path)
            self.found += self.last[found].tolist()
