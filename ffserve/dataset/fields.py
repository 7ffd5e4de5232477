"""Fields: which records of a data set are which fields of its samples.

Where records are members of samples (tar files), a source knows records only, by number. A reader
shows a selection of fields as it shows some samples where it hides others, and what it reads of
samples are *rows*: one record each, or with several fields those of each sample, which are given
back by field. If all samples have the same fields in the same order, as is usual, a record follows
from arithmetic; else there is a table with 8 bytes for each sample and 2 for each record. Nothing
here reads a file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np

from ffserve.dataset.layout import Selection, ShardInfo, digest
from ffserve.dtypes import Int64s, UInt32s
from ffserve.engine.shm import Batch
from ffserve.engine.tar import BLOCK_COUNT, FIRST
from ffserve.errors import FFServeError, FormatError, UsageError
from ffserve.formats.members import Members, unpacked

T = TypeVar("T")
Block: TypeAlias = tuple[int, int]
"""The position of a file, and the number of a block of names in it."""
_MOST_FIELDS = 65_535
_unpacked = lru_cache(1024)(unpacked)
"""Names of a million records, about 64 MB."""


class MemberNames:
    """The names of records: the blocks of them that a reader has asked for.

    Args: shards: the files, as a source has them.
    """

    def __init__(self, shards: Sequence[ShardInfo]) -> None:
        self._firsts = np.array([shard.first for shard in shards], np.int64)
        self._paths = [shard.path for shard in shards]
        self._blocks: dict[Block, bytes] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}

    def _places(self, numbers: Int64s) -> Int64s:
        """Return file, block and place in it of each record, int64[n, 3]."""
        shards = np.searchsorted(self._firsts, numbers, side="right") - 1
        return np.stack((shards, *divmod(numbers - self._firsts[shards], BLOCK_COUNT)), axis=1)

    def missing(self, numbers: Int64s) -> list[Block]:
        """Return the blocks that the names of records need, and that are not known."""
        blocks = np.unique(self._places(numbers)[:, :2], axis=0).tolist()
        return [(k, n) for k, n in blocks if (k, n) not in self._blocks]

    def take(self, numbers: Int64s, asked: list[Block], blocks: list[bytes]) -> list[bytes]:
        """Return the names of records. Args: blocks: those that were missing.

        Raises: FormatError: a block is damaged.
        """
        self._blocks.update(zip(asked, blocks, strict=True))
        found = []
        for shard, block, place in self._places(numbers).tolist():
            names = _unpacked(self._blocks[shard, block], self._paths[shard])
            if place >= len(names):
                raise FormatError("a block of names is damaged", path=self._paths[shard])
            found.append(names[place])
        return found


class FieldTable:
    """The records of all samples of a data set, and their fields.

    Args: shards: of each file what its records are. kinds: returns the kinds of a file's records;
        called if they are needed. paths: of the files, for errors.

    names: of all fields, in the order in which they first come. counts: samples of each file.
    width: fields of each sample if all have the same, else 0. single: no sample has several.
    """

    def __init__(
        self, shards: Sequence[Members], kinds: Callable[[int], UInt32s], paths: Sequence[str]
    ) -> None:
        numbers: dict[str, int] = {}
        own = [[numbers.setdefault(f, len(numbers)) for f in each.fields] for each in shards]
        if len(numbers) > _MOST_FIELDS:
            raise FormatError(f"the files have more than {_MOST_FIELDS} fields", path=paths[0])
        self.names, self.counts = list(numbers), [each.samples for each in shards]
        known = [(each.uniform, row) for each, row in zip(shards, own, strict=True) if each.samples]
        self.width = len(numbers) if all(each == (True, known[0][1]) for each in known) else 0
        self.single = self.width <= 1
        if self.width or not numbers:
            return
        tables = [kinds(k) for k in range(len(shards))]
        for table, count, row, path in zip(tables, self.counts, own, paths, strict=True):
            begins = np.flatnonzero(table & np.uint32(FIRST))
            valid = (table & np.uint32(FIRST - 1) < len(row)).all() and len(begins) == count
            if not valid or bool(len(table)) != (begins[:1].tolist() == [0]):
                raise FormatError("the table of its members is malformed", path=path)
        rows = zip(tables, own, strict=True)
        fields = [np.array(row, np.uint16)[table & np.uint32(FIRST - 1)] for table, row in rows]
        firsts = np.concatenate(tables) & np.uint32(FIRST)
        self._kinds = np.concatenate(fields)
        self._starts = np.append(np.flatnonzero(firsts), len(firsts))
        self.single = len(self._starts) == len(firsts) + 1

    def starts(self, samples: Int64s) -> Int64s:
        """Return the first record of each sample; behind the last their number."""
        return samples * self.width if self.width else self._starts[samples]

    def samples_of(self, records: Int64s) -> Int64s:
        """Return the sample that each record belongs to."""
        if self.width:
            return records // self.width
        return np.searchsorted(self._starts, records, side="right") - 1

    def records(self, samples: Int64s, fields: list[int]) -> Int64s:
        """Return the record of each field of each sample, int64[samples, fields]; -1: it has none.

        Args: fields: their numbers, ascending.
        """
        if self.width:
            found: Int64s = samples[:, None] * self.width + np.array(fields)
            return found
        begins = self._starts[samples]
        counts = self._starts[samples + 1] - begins
        numbers = np.repeat(begins - (np.cumsum(counts) - counts), counts)
        numbers += np.arange(len(numbers))
        positions, kinds = np.repeat(np.arange(len(samples)), counts), self._kinds[numbers]
        kept = np.isin(kinds, fields)
        found = np.full((len(samples), len(fields)), -1, np.int64)
        found[positions[kept], np.searchsorted(fields, kinds[kept])] = numbers[kept]
        return found


class FieldSelection:
    """Some fields of the samples of a data set, as a `layout.Numbering`.

    Args: fields: names, in the order in which fields are given back; None: all. path: for errors.
    Raises: UsageError: a name that no sample has, or one that comes twice.

    count: samples. several: a sample is a dict of its fields, else one record, whichever its field
    is if all are shown. is_identity: it is the record of the same number.
    """

    def __init__(self, table: FieldTable, fields: Sequence[str] | None, path: str) -> None:
        if isinstance(fields, str):
            raise UsageError(
                f"invalid fields={fields!r}: a string is not a list of names",
                path=path,
                hint=f"write fields=[{fields!r}]",
            )
        names = list(table.names) if fields is None else [name.lower() for name in fields]
        unknown = [name for name in names if name not in table.names]
        if unknown or len(set(names)) < len(names) or (not names and table.names):
            some = ", ".join(map(repr, table.names[:20])) or "no fields"
            raise UsageError(
                f"no sample has the field {unknown[0]!r}"
                if unknown
                else f"invalid fields={fields!r}: each name once, at least one",
                path=path,
                hint=f"there are {some}" + (", …" if len(table.names) > 20 else ""),
            )
        self.table, self.names, self._path = table, names, path
        self.count = sum(table.counts)
        self.is_identity = table.single and (fields is None or table.width == 1)
        self.several = len(names) > 1 and not self.is_identity
        self.fields = sorted(table.names.index(name) for name in names)
        """Their numbers. Records are read in this order, which is that of files that have one."""
        self._shown: Selection | None = None
        """The samples that are shown; None: all."""

    def select(self, indices: Int64s) -> FieldSelection:
        """Return the same of some samples, in this order."""
        other = copy.copy(self)
        other._shown, other.count = Selection(self._samples(indices)), len(indices)
        return other

    def without(self, indices: Int64s) -> FieldSelection:
        """Return the same without some samples."""
        return self.select(np.setdiff1d(np.arange(self.count), indices))

    @property
    def key(self) -> object:
        """Equal if the same is shown."""
        return tuple(self.names), digest(None if self._shown is None else self._shown.chosen)

    def _samples(self, indices: Int64s) -> Int64s:
        return indices if self._shown is None else self._shown.numbers(indices)

    def rows(self, indices: Int64s, *, together: bool = False) -> Rows:
        """Return what is read of samples. Args: together: with the records of each field together,
        not those of each sample."""
        if self.several:
            return FieldRows(self, self._samples(indices), together=together)
        return Rows(self.numbers(indices))

    def first_records(self, indices: Int64s) -> Int64s:
        """Return the record of each sample, with several fields its first."""
        return self.table.starts(self._samples(indices)) if self.several else self.numbers(indices)

    def numbers(self, indices: Int64s) -> Int64s:
        """Return the record of each sample.

        Raises: FormatError: one has none. UsageError: a sample has several.
        """
        if self.several:
            raise UsageError(
                f"samples have several fields, {', '.join(map(repr, self.names[:20]))}",
                path=self._path,
                hint=f"open the file with one of them, such as fields=[{self.names[0]!r}]",
            )
        found: Int64s = self.table.records(self._samples(indices), self.fields)[:, 0]
        if len(found) and int(found.min()) < 0:
            raise self._lacks(int(indices[int(np.argmin(found))]))
        return found

    def indices(self, numbers: Int64s) -> Int64s:
        """Return the sample of each record."""
        samples = self.table.samples_of(numbers)
        return samples if self._shown is None else self._shown.indices(samples)

    def lacking(self) -> dict[int, FFServeError]:
        """Return errors for the samples that do not have the one field."""
        if self.several or self.table.width:
            return {}
        found = self.table.records(np.arange(self.count), self.fields)[:, 0]
        return {index: self._lacks(index) for index in np.flatnonzero(found < 0).tolist()}

    def _lacks(self, index: int) -> FormatError:
        return FormatError(
            f"the sample has no field {self.names[0]!r}",
            index=index,
            hint="on_error='skip' leaves out samples without it",
        )


class Rows:
    """What is read of some samples: one record each, which is given back as it is.

    numbers: of the records. width: at most so many a sample. ends: how many of them the first 0, 1,
    … n samples have; None: as many.
    """

    width, ends = 1, None

    def __init__(self, numbers: Int64s) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.numbers)

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.numbers[part])

    def by_field(self, values: Any) -> Any:
        """Return values of records as a caller gets them, who asked for samples."""
        return values

    def divided(self, batch: Batch) -> Any:
        """Return a batch that was read with fields together as a caller gets it."""
        return batch

    def by_sample(self, failed: dict[int, FFServeError]) -> dict[int, FFServeError]:
        """Return errors by the positions of samples instead of records; of several the first."""
        return failed

    def sums(self, sizes: Int64s) -> Int64s:
        """Return the sizes of samples, of those of records."""
        return sizes


class FieldRows(Rows):
    """Rows of samples with several fields: a record for each selected field that a sample has."""

    def __init__(self, selection: FieldSelection, samples: Int64s, *, together: bool) -> None:
        self._selection, self._samples, self._together = selection, samples, together
        self.width = len(selection.fields)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, part: slice) -> FieldRows:
        return FieldRows(self._selection, self._samples[part], together=self._together)

    @cached_property
    def _records(self) -> Int64s:
        """The record of each field of each sample, or of each sample and field; -1: it has none."""
        found = self._selection.table.records(self._samples, self._selection.fields)
        return found.T if self._together else found

    def _spread(self, values: Any, empty: Any) -> Any:
        """Return the values of records as `_records` stand, with another where there is none."""
        found = np.full(self._records.shape, empty)
        found[self._records >= 0] = values
        return found

    def _by_name(self, columns: Iterable[T]) -> dict[str, T]:
        found = dict(zip(self._selection.fields, columns, strict=True))
        names = self._selection.table.names
        return {name: found[names.index(name)] for name in self._selection.names}

    @property
    def numbers(self) -> Int64s:  # type: ignore[override]
        """See `Rows`."""
        return self._records[self._records >= 0]

    @property
    def ends(self) -> Int64s:  # type: ignore[override]
        """See `Rows`."""
        return np.append(0, np.cumsum((self._records >= 0).sum(axis=1)))

    def by_field(self, values: Iterable[Any]) -> dict[str, list[Any]]:
        """Return a list for each field; None where a sample has none."""
        return self._by_name(self._spread(np.fromiter(values, object), None).T.tolist())

    def divided(self, batch: Batch) -> dict[str, Batch]:
        """Return a batch for each field; one that a sample does not have takes no bytes."""
        sizes = np.cumsum(self._spread(np.diff(batch.offsets), 0), axis=1)
        edges = np.cumsum(sizes[:, -1:]) if len(self) else np.zeros(len(sizes), np.int64)
        parts = np.split(batch.buffer, edges[:-1])
        offsets = np.concatenate((np.zeros((len(sizes), 1), np.int64), sizes), axis=1)
        return self._by_name(map(Batch, parts, offsets))

    def by_sample(self, failed: dict[int, FFServeError]) -> dict[int, FFServeError]:
        """See `Rows`."""
        positions = np.nonzero(self._records >= 0)[0].tolist()
        return {positions[k]: failed[k] for k in sorted(failed, reverse=True)}

    def sums(self, sizes: Int64s) -> Int64s:
        """See `Rows`."""
        found: Int64s = self._spread(sizes, 0).sum(axis=1)
        return found


def rows_of(batch: Any) -> Any:
    """Return the samples of a batch; of several fields each is a dict."""
    if not isinstance(batch, dict):
        return batch
    rows = zip(*batch.values(), strict=True)
    return [dict(zip(batch, values, strict=True)) for values in rows]


def copies(batch: Any) -> Iterator[Any]:
    """Yield the samples of a batch, in memory of their own."""
    for row in rows_of(batch):
        if isinstance(row, dict):
            yield {name: None if one is None else one.copy() for name, one in row.items()}
        else:
            yield row.copy()
