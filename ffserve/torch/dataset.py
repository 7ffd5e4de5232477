"""Datasets that are indexed by a list: a batch is one call and one request.

``Dataset`` reads through ``ffserve.FileReader`` and hence through the daemon if one runs. torch 2
asks its ``__getitems__`` for a whole batch, so torch's own DataLoader, ``Subset`` and
``random_split`` also make one call per batch. Readers reopen themselves after pickling and after a
fork.

An announced order goes from a dataset down to its readers. An object takes part if it has
``announce(order, epoch=0)`` and, to follow the position of the job, ``reached(epoch, position)``: a
reader, a dataset of ffserve, a dataset of the user's. torch's Subset and ConcatDataset (of which
``random_split`` makes them) have neither; their contents are announced to directly. Other objects
are skipped.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from ffserve import FieldReader, FileReader
from ffserve.dtypes import Int64s
from ffserve.errors import SampleIndexError, UsageError
from ffserve.torch.example_columns import ExampleColumns
from ffserve.torch.prepared import Preparer

_EPOCHS_KEPT = 3
"""The positions of this many announced epochs are counted per part: the current epoch and the next
one."""


class DatasetIndexTypeError(UsageError, TypeError):
    """A dataset was indexed by something else than a list, a tuple or an integer."""


class ConcatError(UsageError, AssertionError):
    """Datasets that cannot be concatenated."""


class ReaderRegistry:
    """An object that lists the FileReaders among its attributes, and those of nested registries."""

    def ffreaders(self) -> list[FileReader]:
        """Return every FileReader that is an attribute here or in a nested registry.

        Returns: the own readers in the order of assignment, then those of the nested registries.
            A reader that has two names is listed twice.
        """
        values = list(vars(self).values())
        readers = [value for value in values if isinstance(value, FileReader)]
        for value in values:
            if isinstance(value, ReaderRegistry):
                readers += value.ffreaders()
        return readers


class Dataset(torch.utils.data.Dataset[Any], ReaderRegistry):
    """Samples of record files, read a batch at a time.

    Override ``process`` to make samples of bytes, or ``__getitem__`` (and ``__init__`` and
    ``__len__`` if the samples come from elsewhere). ``dataset[[3, 1]]`` is a list of two samples,
    ``dataset[3]`` is one. ``RawDataset`` is the one whose samples are the bytes themselves.

    Args:
        fnames: a file, a directory of ``*.ffr`` files, or a list or tuple of files; one global
            index runs over them in order. Files of other formats, directories of them, and
            patterns are accepted as by ``ffserve.open``.
        check_data: verify each sample's checksum.
        features: of records that are tf.train.Examples, the features to decode and their types,
            such as ``{"image": bytes, "label": int, "boxes": list[float]}``. ``process`` and
            ``prepare`` then get a dict with a column for each feature instead of bytes, and the
            samples are dicts with a value for each.
        fields: of tar files, the fields that are read, such as ``["jpg", "cls"]``; None: all. With
            several, ``process`` and ``prepare`` get a dict with a list of arrays for each, in which
            None stands for a field that a sample does not have.
    Raises:  as FileReader does when it opens the files.
    """

    fnames: Any
    reader: FileReader
    _columns: ExampleColumns | None = None
    prepare_version: Hashable = None
    """A value that the results of ``prepare`` depend on, besides its source."""

    def __init__(
        self,
        fnames: Any,
        check_data: bool = True,
        *,
        features: Mapping[str, Any] | None = None,
        fields: Sequence[str] | None = None,
    ) -> None:
        self.fnames = fnames
        if features is not None:
            self._columns = ExampleColumns(features)
        self.reader = FileReader.for_files(fnames, check_data, fields)
        if features is not None and self.reader.several:
            raise UsageError(
                "features cannot be decoded of samples with several fields",
                hint="name the field that is a tf.train.Example, such as fields=['example']",
            )

    def __len__(self) -> int:
        return int(self.reader.n)

    def __getitem__(self, indices: Any) -> Any:
        """Read and process the samples at these indices.

        Args:    indices: a list or tuple of indices (repeats allowed, order kept), or one index.
        Returns: what ``process`` returns: for a list the list of samples, for one index the sample.
        Raises:  DatasetIndexTypeError (a TypeError) for anything else; SampleIndexError outside
            the dataset; ChecksumError, TruncatedError or ReadError from the files.
        Cost:    one request for the whole list.
        """
        if isinstance(indices, (list, tuple)):
            return self.process(indices, self._data(indices))
        index = as_index(indices)
        return self.process([index], self._data([index]))[0]

    def _data(self, indices: Sequence[int]) -> Any:
        """Return the argument `data` of `process`: samples as they are, or prepared."""
        if type(self).prepare is Dataset.prepare:
            return self.contents(indices)
        return self._preparer().values(self, indices)

    def contents(self, indices: Sequence[int]) -> Any:
        """Return the samples as `prepare` and `process` get them: their bytes, or the columns of
        `features`."""
        if self._columns is None:
            return self.reader.read(indices)
        fnames = self.reader.fnames
        path = fnames[0] if len(fnames) == 1 else None
        return self._columns.decode(self.reader.read_batch(indices), indices, path)

    def _preparer(self) -> Preparer:
        found: Preparer | None = vars(self).get("_prepares")
        if found is None:
            found = self._prepares = Preparer()
        return found

    def __add__(self, other: Any) -> Any:
        """Return this dataset and another as one, in this order.

        Returns: a ConcatDataset; torch's if ``other`` cannot be asked for a batch.
        """
        if isinstance(other, Dataset) or has_batch_method(other):
            return ConcatDataset([self, other])
        return super().__add__(other)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Answer torch's fetcher, which asks for a whole batch by this name."""
        return self[indices if isinstance(indices, list) else list(indices)]

    def prepare(self, indices: Sequence[int], data: list[NDArray[np.uint8]]) -> Any:
        """Do the deterministic part of the work, such as decoding. A subclass may override it.

        Results are shared by all processes and jobs of the user that read through one daemon: each
        sample is prepared once, and stays in memory as raw samples do. Jobs share results if the
        class's name, the source of this method and ``prepare_version`` are equal. So put there
        whatever else the result depends on: attributes, functions, versions of libraries.

        Args: as for ``process``.
        Returns: a list with a result for each sample: bytes, an array, a tensor, a number, or a
            tuple or dict of these; always the same for the same sample. ``process`` gets this list.
        """
        raise NotImplementedError

    def process(self, indices: Sequence[int], data: Any) -> Any:
        """Turn the bytes of a batch into samples. A subclass overrides it, unless its samples are
        what ``prepare`` returns, or dicts of ``features``.

        Args:
            indices: the indices asked for.
            data: one 1-D writable uint8 array per sample, in the same order; with ``features``
                their columns, int64 or float32 arrays and lists by name; of samples with several
                ``fields`` a list of arrays (or None) for each; with ``prepare``, what it has
                returned.
        Returns: a list of samples, which the loader hands to ``collate_fn``.
        """
        if type(self).prepare is not Dataset.prepare:
            return data
        if self._columns is not None:
            return self._columns.rows(data)
        raise NotImplementedError(
            f"{type(self).__name__} overrides neither process(indices, data) nor __getitem__; "
            "ffserve.torch.RawDataset gives the bytes as they are"
        )

    def announce(
        self,
        order: Int64s,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Announce to the readers which samples will be asked for, in order, for prefetching.

        The readers are the attribute ``reader``, and those of ``ffreaders()`` that have as many
        samples as this dataset. ``ffserve.torch.DataLoader`` calls this itself. Override it
        if your ``__getitem__`` reads other samples than the indices it is given.

        Args:
            order: indices of this dataset, int64, the whole epoch's.
            epoch: the epoch that the order belongs to, from 0.
            name, replacement: as for ``ffserve.Reader.announce``.
        Raises: what the readers' ``announce`` raises.
        """
        if type(self).prepare is not Dataset.prepare:
            preparer = self._preparer()
            shared = preparer.announce(self, order, epoch, name, replacement)
            if shared and not preparer.reads_ahead(epoch):
                return
        for reader in self._announced_to():
            announce(reader, order, epoch, name=name, replacement=replacement)

    def reached(self, epoch: int, position: int) -> None:
        """Report to the readers that an announced order's first ``position`` samples are used."""
        if type(self).prepare is not Dataset.prepare:
            preparer = self._preparer()
            shared = preparer.reached(self, epoch, position)
            if shared and not preparer.reads_ahead(epoch):
                return
        for reader in self._announced_to():
            reached(reader, epoch, position)

    def _announced_to(self) -> list[Any]:
        """Return the readers or datasets that an announcement of this dataset goes to."""
        own = getattr(self, "reader", None)
        readers = [] if own is None else [own]
        for reader in self.ffreaders():
            if not any(reader is known for known in readers) and reader.n == len(self):
                readers.append(reader)
        return readers


class RawDataset(Dataset):
    """A Dataset whose samples are the payloads as they are: 1-D writable uint8 arrays.

    With ``DataLoader(..., collate_fn=list)`` a batch is read directly into the shared memory in
    which it reaches the training process.
    """

    def process(self, indices: Sequence[int], data: Any) -> Any:
        """Return ``data``, of ``features`` and of several fields as dicts."""
        if self._columns is not None:
            return self._columns.rows(data)
        return FieldReader.rows_of(data) if isinstance(data, dict) else data


class Subset(Dataset):
    """A dataset's samples at the given indices.

    Args:
        dataset: a dataset that is indexed by a list.
        indices: indices into it; repeats allowed, order kept.
    """

    dataset: Any
    indices: Any

    def __init__(self, dataset: Any, indices: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, indices: Any) -> Any:
        """Return the samples at these positions of the subset: a list, or one for an integer."""
        if not isinstance(indices, (list, tuple)):
            return fetch_batch(self.dataset, [self.indices[as_index(indices)]])[0]
        return fetch_batch(self.dataset, [self.indices[i] for i in indices])

    def announce(
        self,
        order: Int64s,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Announce the order to the whole dataset, in its own indices."""
        _announce_subset(self, order, epoch, name=name, replacement=replacement)

    def _announced_to(self) -> list[Any]:
        return [self.dataset]


class ConcatDataset(Dataset):
    """Datasets one after another, as one.

    Args:
        datasets: at least one; each a Dataset, or one that offers torch's ``__getitems__``.
    Raises:  ConcatError (an AssertionError) for an empty list, or a dataset that cannot be asked
            for a batch.
    """

    datasets: list[Any]
    cumulative_sizes: list[int]

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(datasets)
        if not self.datasets:
            raise ConcatError("datasets is empty; at least one dataset is needed")
        for dataset in self.datasets:
            if not isinstance(dataset, Dataset) and not has_batch_method(dataset):
                raise ConcatError(
                    f"a dataset of type {type(dataset).__name__} cannot return a batch",
                    hint="inherit ffserve.torch.Dataset, or define __getitems__(indices)",
                )
        self.cumulative_sizes = self.cumsum(self.datasets)

    @staticmethod
    def cumsum(sequence: Iterable[Any]) -> list[int]:
        """Return the running total of the lengths."""
        ends: list[int] = []
        for dataset in sequence:
            ends.append((ends[-1] if ends else 0) + len(dataset))
        return ends

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, indices: Any) -> Any:
        """Return the samples at these indices, asking each dataset concerned once.

        Args:    indices: a list or tuple (repeats allowed, order kept), or one index; a negative
            index counts from the end.
        Returns: a list of samples in the order asked, or one sample.
        Raises:  SampleIndexError at or beyond the end, UsageError before the beginning; UsageError
            if a dataset does not answer with one sample per index.
        """
        if not isinstance(indices, (list, tuple)):
            return self[[as_index(indices)]][0]
        return _concatenated(self, indices)

    def ffreaders(self) -> list[FileReader]:
        """Return the readers among the attributes, then those of every dataset."""
        readers = super().ffreaders()
        for dataset in self.datasets:
            if isinstance(dataset, ReaderRegistry):
                readers += dataset.ffreaders()
        return readers

    def announce(
        self,
        order: Int64s,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Announce to every dataset its part of the order, which itself shows whether it has
        repeats."""
        _announce_parts(self, order, epoch, name=name)

    def reached(self, epoch: int, position: int) -> None:
        """Report to each dataset how many of its samples are among the order's first ones."""
        _reached_parts(self, epoch, position)

    def _announced_to(self) -> list[Any]:
        return self.datasets


def _concatenated(concatenation: Any, indices: Sequence[int]) -> list[Any]:
    """Return samples of a concatenation, torch's or ours: each part concerned is asked once."""
    positions: dict[int, list[int]] = {}
    local_indices: dict[int, list[int]] = {}
    for position, index in enumerate(indices):
        part, local_index = _convert_index(concatenation.cumulative_sizes, index)
        positions.setdefault(part, []).append(position)
        local_indices.setdefault(part, []).append(local_index)

    samples: list[Any] = [None] * len(indices)
    for part in sorted(positions):
        wanted = local_indices[part]
        dataset = concatenation.datasets[part]
        answer = fetch_batch(dataset, wanted)
        if len(answer) != len(wanted):
            raise UsageError(
                f"dataset {part} ({type(dataset).__name__}) answered "
                f"{len(wanted)} indices with {len(answer)} samples",
                hint="process must return one sample per index, in order",
            )
        for position, sample in zip(positions[part], answer, strict=True):
            samples[position] = sample
    return samples


def _convert_index(ends: list[int], index: int) -> tuple[int, int]:
    total = ends[-1]
    if index < -total:
        raise UsageError(f"index {index} is before the first of {total} samples")
    if index >= total:
        raise SampleIndexError(f"the datasets hold {total} samples", index=int(index))
    if index < 0:
        index += total
    part = bisect.bisect_right(ends, index)
    return part, index - (ends[part - 1] if part else 0)


def as_index(value: Any) -> int:
    """Return the value as one index. Raises: DatasetIndexTypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise DatasetIndexTypeError(
            f"a dataset is indexed by a list or tuple of indices, or by one index, "
            f"not by {type(value).__name__}",
            hint="indices.tolist() makes a list of a tensor or array, list(range(a, b)) of a slice",
        ) from None


def has_batch_method(dataset: Any) -> bool:
    """Return whether a dataset can be asked for a whole batch: it has ``__getitems__``, which
    torch's fetcher uses, or is torch's ConcatDataset of such datasets."""
    if callable(getattr(dataset, "__getitems__", None)):
        return True
    return type(dataset) is torch.utils.data.ConcatDataset and all(
        map(has_batch_method, dataset.datasets)
    )


def fetch_batch(dataset: Any, indices: list[int]) -> Any:
    """Ask a dataset for a batch in one call: by ``__getitems__``, else by a list as index."""
    if callable(getattr(dataset, "__getitems__", None)):
        return dataset.__getitems__(indices)
    if type(dataset) is torch.utils.data.ConcatDataset:
        return _concatenated(dataset, indices)
    return dataset[indices]


def is_raw(dataset: Any) -> bool:
    """Return whether a dataset's samples are the bytes that ``dataset.reader`` reads.

    Such a dataset is a ``RawDataset`` that overrides none of the methods that make its samples.
    """
    if not isinstance(dataset, RawDataset) or dataset._columns is not None:
        return False
    found = vars(dataset).get("reader")
    reader = type(found)
    return (
        not getattr(found, "several", True)
        and getattr(reader, "read", None) is FileReader.read
        and getattr(reader, "read_batch", None) is FileReader.read_batch
        and all(
            getattr(getattr(dataset, name), "__func__", None) is getattr(RawDataset, name)
            for name in ("process", "prepare", "__getitem__", "__getitems__")
        )
    )


def announce(
    dataset: Any,
    order: Int64s,
    epoch: int,
    *,
    name: str | None = None,
    replacement: bool = False,
) -> None:
    """Announce an order to a dataset or reader.

    Args: as for ``ffserve.Reader.announce``. name and replacement are passed only if they are not
        the default, so an ``announce`` of the user's need not have them.
    """
    method = getattr(dataset, "announce", None)
    if callable(method):
        options: dict[str, Any] = {} if name is None else {"name": name}
        if replacement:
            options["replacement"] = True
        method(order, epoch=epoch, **options)
    elif type(dataset) is torch.utils.data.Subset:
        _announce_subset(dataset, order, epoch, name=name, replacement=replacement)
    elif type(dataset) is torch.utils.data.ConcatDataset:
        _announce_parts(dataset, order, epoch, name=name)


def reached(dataset: Any, epoch: int, position: int) -> None:
    """Report to a dataset or reader that an announced order's first samples are used."""
    method = getattr(dataset, "reached", None)
    if callable(method):
        method(epoch, position)
    elif type(dataset) is torch.utils.data.Subset:
        reached(dataset.dataset, epoch, position)
    elif type(dataset) is torch.utils.data.ConcatDataset:
        _reached_parts(dataset, epoch, position)


def readers_below(dataset: Any) -> Iterator[Any]:
    """Yield the readers and datasets that announcements go to in the end."""
    if type(dataset) is torch.utils.data.Subset:
        below = [dataset.dataset]
    elif type(dataset) is torch.utils.data.ConcatDataset:
        below = dataset.datasets
    elif isinstance(dataset, Dataset):
        below = dataset._announced_to()
    else:
        if callable(getattr(dataset, "announce", None)):
            yield dataset
        return
    for each in below:
        yield from readers_below(each)


def sources(readers: Iterable[Any]) -> set[Hashable]:
    """Return a key for the samples of each reader: its files, or the living object itself."""
    return {
        tuple(names) if (names := getattr(reader, "fnames", None)) else id(reader)
        for reader in readers
    }


def has_repeats(indices: Int64s) -> bool:
    """Return whether an index occurs more than once."""
    if not len(indices) or int(indices.min()) < 0:
        return False
    seen = np.zeros(int(indices.max()) + 1, np.bool_)
    seen[indices] = True
    return int(np.count_nonzero(seen)) < len(indices)


def _announce_subset(
    subset: Any, order: Int64s, epoch: int, *, name: str | None, replacement: bool
) -> None:
    indices = np.asarray(subset.indices, dtype=np.int64)
    replacement = replacement or has_repeats(indices)
    announce(subset.dataset, indices[order], epoch, name=name, replacement=replacement)


class _SplitOrder:
    """An order of a concatenation, split among the datasets or readers below it.

    Parts that lead to the same samples (the same dataset twice, or two datasets over the same
    files) get one order together: a second one for the same samples would replace the first.
    """

    def __init__(self, concatenation: Any, order: Int64s) -> None:
        self.below: list[Any] = []
        self.which = np.zeros(len(order), np.int64)
        """For each sample of the order the number of its dataset in `below`, and"""
        self.indices = np.zeros(len(order), np.int64)
        """its index there."""
        self._numbers: dict[Hashable, int] = {}
        self._split(concatenation, order, np.arange(len(order)))

    def _split(self, concatenation: Any, order: Int64s, positions: Int64s) -> None:
        ends = np.asarray(concatenation.cumulative_sizes, dtype=np.int64)
        parts = np.searchsorted(ends, order, side="right")
        start = 0
        for number, dataset in enumerate(concatenation.datasets):
            here = np.flatnonzero(parts == number)
            self._follow(dataset, order[here] - start, positions[here])
            start = int(ends[number])

    def _follow(self, dataset: Any, order: Int64s, positions: Int64s) -> None:
        if type(dataset) in (Subset, torch.utils.data.Subset):
            indices = np.asarray(dataset.indices, dtype=np.int64)
            self._follow(dataset.dataset, indices[order], positions)
        elif (
            type(dataset) is torch.utils.data.ConcatDataset
            or getattr(type(dataset), "announce", None) is ConcatDataset.announce
        ):
            self._split(dataset, order, positions)
        else:
            number = self._numbers.setdefault(_samples_of(dataset), len(self.below))
            if number == len(self.below):
                self.below.append(dataset)
            self.which[positions] = number
            self.indices[positions] = order


def _samples_of(dataset: Any) -> Hashable:
    """Return a key that two datasets share if the same index is the same sample in both."""
    if getattr(type(dataset), "announce", None) is Dataset.announce:
        readers = list(readers_below(dataset))
        shown = frozenset(getattr(reader, "shown", None) for reader in readers)
        return frozenset(sources(readers)), shown
    return id(dataset)


class _PartPositions:
    """How far a job is in each part of the announced orders of a concatenation."""

    def __init__(self) -> None:
        self._orders: dict[int, tuple[list[Any], NDArray[np.unsignedinteger[Any]]]] = {}
        self._epoch = -1
        self._position = 0
        self._counts = np.zeros(0, np.int64)

    def add(self, epoch: int, below: list[Any], which: Int64s) -> None:
        if self._orders and epoch < min(self._orders):
            self._orders.clear()
        self._orders[epoch] = below, which.astype(np.min_scalar_type(len(below)))
        while len(self._orders) > _EPOCHS_KEPT:
            del self._orders[min(self._orders)]
        if epoch == self._epoch:
            self._epoch = -1

    def counts(self, epoch: int, position: int) -> list[tuple[Any, int]]:
        """Return each dataset below, and its number of samples among an order's first ones."""
        if epoch not in self._orders:
            return []
        below, which = self._orders[epoch]
        if epoch != self._epoch or position < self._position:
            self._epoch, self._position = epoch, 0
            self._counts = np.zeros(len(below), np.int64)
        used = which[self._position : position]
        self._counts += np.bincount(used, minlength=len(below))
        self._position += len(used)
        return list(zip(below, self._counts.tolist(), strict=True))


_part_positions: WeakKeyDictionary[Any, _PartPositions] = WeakKeyDictionary()


def _announce_parts(concatenation: Any, order: Int64s, epoch: int, *, name: str | None) -> None:
    split = _SplitOrder(concatenation, order)
    positions = _part_positions.setdefault(concatenation, _PartPositions())
    positions.add(epoch, split.below, split.which)
    for number, dataset in enumerate(split.below):
        part_order = split.indices[split.which == number]
        if len(part_order):
            announce(dataset, part_order, epoch, name=name, replacement=has_repeats(part_order))


def _reached_parts(concatenation: Any, epoch: int, position: int) -> None:
    positions = _part_positions.get(concatenation)
    for dataset, count in () if positions is None else positions.counts(epoch, position):
        reached(dataset, epoch, count)
