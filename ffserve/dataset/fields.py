"""Fields: which records of a data set are which fields of its samples.

Where records are members of samples (tar files), a source knows records only, by number. A reader
of one field shows a column of records, as it shows some samples where it hides others; a reader of
several reads the records of its samples and gives them back by field. If all samples have the same
fields in the same order, as is usual, a record follows from arithmetic; else there is a table with
8 bytes for each sample and 2 for each record. Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ffserve.dataset.layout import ShardInfo
from ffserve.dtypes import Int64s, UInt32s
from ffserve.errors import FFServeError, FormatError, UsageError
from ffserve.formats.members import BLOCK_COUNT, FIRST, Members, unpacked

T = TypeVar("T")

Block: TypeAlias = tuple[int, int]
"""The position of a file, and the number of a block of names in it."""
Names: TypeAlias = dict[Block, list[bytes]]

KEPT_BLOCKS = 4096
"""A reader keeps about this many blocks of names."""
NAMES_AT_ONCE = 65_536
_MOST_FIELDS = 65_535


class MemberNames:
    """The names of records, as far as a reader has asked for them. A copy begins without any.

    Args: shards: the files, as `Reader.shards` has them of records.
    """

    def __init__(self, shards: Sequence[ShardInfo]) -> None:
        self._firsts = np.array([shard.first for shard in shards], np.int64)
        self._paths = [shard.path for shard in shards]
        self._blocks: Names = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}

    @staticmethod
    def parts(numbers: Int64s) -> Iterator[Int64s]:
        """Yield the records whose names are asked for together."""
        for first in range(0, len(numbers), NAMES_AT_ONCE):
            yield numbers[first : first + NAMES_AT_ONCE]

    def _places(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        shards = np.searchsorted(self._firsts, numbers, side="right") - 1
        return shards, numbers - self._firsts[shards]

    def look(self, numbers: Int64s) -> tuple[Names, list[Block]]:
        """Return the blocks of names that are known, and which others these records need."""
        shards, records = self._places(numbers)
        if len(self._blocks) > KEPT_BLOCKS:
            self._blocks = {}  # other threads go on with the one that they have
        known = self._blocks
        pairs = np.unique(np.stack((shards, records // BLOCK_COUNT), axis=1), axis=0).tolist()
        return known, [(k, n) for k, n in pairs if (k, n) not in known]

    def take(
        self, numbers: Int64s, known: Names, asked: list[Block], blocks: list[bytes]
    ) -> list[str]:
        """Return the names of records, with surrogates as those of `os.listdir`.

        Args: known, asked: what `look` has returned. blocks: those that were asked for.
        Raises: FormatError: a block is damaged.
        """
        for (shard, number), block in zip(asked, blocks, strict=True):
            known[shard, number] = unpacked(block, self._paths[shard])
        found = []
        places = (each.tolist() for each in self._places(numbers))
        for shard, record in zip(*places, strict=True):
            names = known[shard, record // BLOCK_COUNT]
            if record % BLOCK_COUNT >= len(names):
                raise FormatError("a block of names is damaged", path=self._paths[shard])
            found.append(names[record % BLOCK_COUNT].decode(errors="surrogateescape"))
        return found


def key_of(name: str) -> str:
    """Return the key of the sample that a member belongs to."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


class FieldTable:
    """The fields of all samples of a data set.

    Args: shards: of each file what its records are. kinds: returns the kinds of a file's records;
        called if they are needed. paths: of the files, for errors.

    names: of all fields, in the order in which they first come. count: samples. firsts: int64[n +
    1], index of each file's first sample, then their number. single: no sample has several fields.
    """

    def __init__(
        self, shards: Sequence[Members], kinds: Callable[[int], UInt32s], paths: Sequence[str]
    ) -> None:
        numbers: dict[str, int] = {}
        own = [[numbers.setdefault(f, len(numbers)) for f in each.fields] for each in shards]
        if len(numbers) > _MOST_FIELDS:
            raise FormatError(f"the files have more than {_MOST_FIELDS} fields", path=paths[0])
        self.names = list(numbers)
        self.firsts = np.zeros(len(shards) + 1, np.int64)
        np.cumsum([each.samples for each in shards], out=self.firsts[1:])
        self.count = int(self.firsts[-1])
        filled = [k for k, each in enumerate(shards) if each.samples]
        self._width = 0
        """Fields of each sample, if all have the same; else 0."""
        self._starts, self._kinds = np.zeros(1, np.int64), np.zeros(0, np.uint16)
        same = all(shards[k].uniform and own[k] == own[filled[0]] for k in filled)
        if same:
            self._width = len(self.names)
            self.single = self._width <= 1
            return
        starts, found = [], []
        before = 0
        for k in filled:
            table = kinds(k)
            begins = np.flatnonzero(table & np.uint32(FIRST))
            fields = table & np.uint32(FIRST - 1)
            known = len(fields) and int(fields.max()) < len(own[k]) and not begins[:1].any()
            if not known or len(begins) != shards[k].samples:
                raise FormatError("the table of its members is malformed", path=paths[k])
            starts.append(begins + before)
            found.append(np.array(own[k], np.uint16)[fields])
            before += len(table)
        self._starts = np.append(np.concatenate(starts), before)
        self._kinds = np.concatenate(found)
        self.single = bool((np.diff(self._starts) == 1).all())

    def choose(self, fields: Sequence[str] | None, path: str) -> FieldSelection:
        """Return a selection of fields; None: all of them.

        Raises: UsageError: a name that no sample has, or one that comes twice.
        """
        chosen = list(self.names) if fields is None else [name.lower() for name in fields]
        unknown = [name for name in chosen if name not in self.names]
        if unknown or len(set(chosen)) < len(chosen) or (not chosen and self.names):
            what = f"no sample has the field {unknown[0]!r}" if unknown else f"fields={fields!r}"
            raise UsageError(
                what if unknown else f"invalid {what}: each name once, at least one",
                path=path,
                hint=f"there are {', '.join(map(repr, self.names[:20])) or 'no fields'}"
                + (", …" if len(self.names) > 20 else ""),
            )
        return FieldSelection(self, chosen, single=self.single and fields is None)

    @property
    def is_uniform(self) -> bool:
        """Whether all samples have all fields."""
        return self._width > 0

    @property
    def edges(self) -> tuple[list[int], list[int]]:
        """The first sample of each file, and its number of samples."""
        return self.firsts[:-1].tolist(), np.diff(self.firsts).tolist()

    def rows(self, samples: Int64s) -> tuple[Int64s, Int64s, NDArray[Any]]:
        """Return the records of samples, sample by sample: their numbers, the position of each
        one's sample, and the number of its field."""
        if self._width or not len(samples):
            width = self._width
            records = (samples[:, None] * width + np.arange(width)).reshape(-1)
            return (
                records,
                np.repeat(np.arange(len(samples)), width),
                np.tile(np.arange(width), len(samples)),
            )
        begins = self._starts[samples]
        counts = self._starts[samples + 1] - begins
        ends = np.cumsum(counts)
        records = np.arange(int(ends[-1])) + np.repeat(begins - (ends - counts), counts)
        return records, np.repeat(np.arange(len(samples)), counts), self._kinds[records]

    def first_records(self, samples: Int64s) -> Int64s:
        """Return the number of the first record of each sample."""
        return samples * self._width if self._width else self._starts[samples]

    def samples_of(self, records: Int64s) -> Int64s:
        """Return the sample that each record belongs to."""
        if self._width:
            return records // self._width
        return np.searchsorted(self._starts, records, side="right") - 1

    def column(self, samples: Int64s, field: int) -> Int64s:
        """Return the record of one field of each sample; -1: it has none."""
        if self._width:
            return samples * self._width + field
        records, positions, kinds = self.rows(samples)
        found = np.full(len(samples), -1, np.int64)
        mine = kinds == field
        found[positions[mine]] = records[mine]
        return found


@dataclass(frozen=True, slots=True)
class FieldRows:
    """The records that a selection has of some samples.

    numbers: of the records, sample by sample. samples: for each the position of its sample.
    columns: the position of its field in the selection. count: samples.
    """

    numbers: Int64s
    samples: Int64s
    columns: Int64s
    count: int

    @property
    def ends(self) -> Int64s:
        """For each sample the number of records up to it."""
        return np.searchsorted(self.samples, np.arange(self.count), side="right")

    def by_field(self, names: Sequence[str], values: Iterable[T]) -> dict[str, list[T | None]]:
        """Return values of the records as a list for each field; None where a sample has none."""
        width, columns = len(names), self.columns
        if len(columns) == self.count * width > 0:
            # Nearly always all samples have all fields in one order.
            table = columns.reshape(-1, width)
            if (table == table[0]).all():
                every: list[T | None] = list(values)
                places = table[0].argsort().tolist()
                return {name: every[k::width] for name, k in zip(names, places, strict=True)}
        found: list[list[T | None]] = [[None] * self.count for _ in names]
        rows = zip(self.columns.tolist(), self.samples.tolist(), values, strict=True)
        for column, sample, value in rows:
            found[column][sample] = value
        return dict(zip(names, found, strict=True))

    def by_sample(self, failed: dict[int, FFServeError]) -> dict[int, FFServeError]:
        """Return errors by the positions of samples; of several the first."""
        found: dict[int, FFServeError] = {}
        for position in sorted(failed):
            found.setdefault(int(self.samples[position]), failed[position])
        return found

    def sums(self, sizes: Int64s) -> Int64s:
        """Return the sum of the values of each sample's records."""
        return np.bincount(self.samples, sizes, self.count).astype(np.int64)


class FieldSelection:
    """Some fields of the samples of a data set, which a reader shows.

    Args: names: of the fields, in the order in which they are given back. single: of samples that
        have one field each, whichever it is.

    several: samples are dicts. Otherwise this numbers the samples, as `layout.Numbering` does.
    """

    def __init__(self, table: FieldTable, names: list[str], *, single: bool) -> None:
        self.table, self.names, self._single = table, names, single
        self.count = table.count
        self.several = len(names) > 1 and not single
        self._field = table.names.index(names[0]) if names else 0
        self._columns = np.full(len(table.names), -1, np.int64)
        self._columns[[table.names.index(name) for name in names]] = np.arange(len(names))

    def numbers(self, indices: Int64s) -> Int64s:
        """Return the record of each sample. Raises: FormatError: one has none."""
        if self._single:
            return self.table.first_records(indices)
        found = self.table.column(indices, self._field)
        if not self.table.is_uniform and len(found) and int(found.min()) < 0:
            raise self.lacks(int(indices[int(np.argmin(found))]))
        return found

    def lacks(self, index: int) -> FormatError:
        """Return the error of a sample without the field."""
        return FormatError(
            f"the sample has no field {self.names[0]!r}",
            index=index,
            hint="on_error='skip' leaves out samples without it",
        )

    @property
    def is_identity(self) -> bool:
        """Whether each record is a sample, so that their numbers are equal."""
        return self.table.single and not self.several

    def indices(self, numbers: Int64s) -> Int64s:
        """Return the sample of each record."""
        return self.table.samples_of(numbers)

    def without(self) -> Int64s:
        """Return the samples that do not have the one field."""
        if self._single or self.several or self.table.is_uniform:
            return np.zeros(0, np.int64)
        every = np.arange(self.count, dtype=np.int64)
        return np.flatnonzero(self.table.column(every, self._field) < 0)

    def rows(self, indices: Int64s) -> FieldRows:
        """Return the records of the selected fields of some samples."""
        numbers, samples, kinds = self.table.rows(indices)
        columns = self._columns[kinds]
        if (columns < 0).any():
            kept = columns >= 0
            numbers, samples, columns = numbers[kept], samples[kept], columns[kept]
        return FieldRows(numbers, samples, columns, len(indices))
