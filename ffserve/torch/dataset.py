"""Datasets that are indexed by a list, so that a batch costs one call and one request.

``Dataset`` reads through ``ffserve.FileReader`` and hence through the daemon when one runs.
Its ``__getitems__`` is the method that torch 2 asks for a whole batch, so torch's own DataLoader
(and its ``Subset`` and ``random_split``) also makes one call a batch. Readers reopen themselves
after pickling and after a fork, so nothing here has to.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from ffserve.compat.ffrecord import FileReader, reader_of
from ffserve.errors import SampleIndexError, UsageError
from ffserve.torch.listeners import (
    CONCATENATIONS,
    PASSED_ON,
    SUBSETS,
    Int64s,
    announce,
    announce_parts,
    announce_subset,
    reached,
    reached_parts,
)


class DatasetIndexTypeError(UsageError, TypeError):
    """A dataset was indexed by something else than a list, a tuple or an integer."""


class ConcatError(UsageError, AssertionError):
    """Datasets that cannot be concatenated."""


class ReaderRegistry:
    """Know the FileReaders among one's attributes, and those of registries among them."""

    def ffreaders(self) -> list[FileReader]:
        """Return every FileReader that is an attribute here or in a nested registry.

        Returns: the own readers in the order of assignment, then those of the nested registries.
            A reader that stands under two names is listed twice.
        """
        values = list(vars(self).values())
        readers = [value for value in values if isinstance(value, FileReader)]
        for value in values:
            if isinstance(value, ReaderRegistry):
                readers += value.ffreaders()
        return readers


class Dataset(torch.utils.data.Dataset[Any], ReaderRegistry):
    """Samples of record files, read a batch at a time.

    Override ``process`` to make samples of bytes, or ``__getitem__`` (then ``__init__`` and
    ``__len__`` are yours as well if the samples come from elsewhere). ``dataset[[3, 1]]`` is a
    list of two samples, ``dataset[3]`` is one.

    Args:
        fnames: a file, a directory of ``*.ffr`` files, or a list or tuple of files; one global
            index runs over them in order. Files of other formats, directories of them, and
            patterns are taken as by ``ffserve.open``.
        check_data: verify each sample's checksum.
    Raises:  as FileReader does when it opens the files.
    """

    fnames: Any
    reader: FileReader

    def __init__(self, fnames: Any, check_data: bool = True) -> None:
        self.fnames = fnames
        self.reader = reader_of(fnames, check_data)

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
            return self.process(indices, self.reader.read(indices))
        index = as_index(indices)
        return self.process([index], self.reader.read([index]))[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Answer torch's fetcher, which asks for a whole batch by this name."""
        return self[indices if isinstance(indices, list) else list(indices)]

    def process(self, indices: Sequence[int], data: list[NDArray[np.uint8]]) -> Any:
        """Turn the bytes of a batch into samples; to be overridden.

        Args:
            indices: the indices asked for.
            data: one 1-D writable uint8 array a sample, in the same order.
        Returns: a list of samples; the loader hands it to ``collate_fn``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} overrides neither process(indices, data) nor __getitem__"
        )

    def announce(
        self,
        order: Int64s,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Tell the readers which samples will be asked for, in order, so that they can read ahead.

        The readers are the attribute ``reader``, and those of ``ffreaders()`` that have as many
        samples as this dataset. ``ffserve.torch.DataLoader`` calls this by itself. Override it
        if your ``__getitem__`` reads other samples than the indices it is given.

        Args:
            order: indices of this dataset, int64, the whole epoch's.
            epoch: the epoch that the order belongs to, from 0.
            name, replacement: as for ``ffserve.Reader.announce``.
        Raises: what the readers' ``announce`` raises.
        """
        for reader in self._listeners():
            announce(reader, order, epoch, name=name, replacement=replacement)

    def reached(self, epoch: int, position: int) -> None:
        """Tell the readers that an announced order's first ``position`` samples were used."""
        for reader in self._listeners():
            reached(reader, epoch, position)

    def _listeners(self) -> list[Any]:
        """Return what an announcement of this dataset goes to."""
        own = getattr(self, "reader", None)
        readers = [] if own is None else [own]
        for reader in self.ffreaders():
            if not any(reader is known for known in readers) and reader.n == len(self):
                readers.append(reader)
        return readers


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
        announce_subset(self, order, epoch, name=name, replacement=replacement)

    def _listeners(self) -> list[Any]:
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
            raise ConcatError("datasets is empty, but at least one is needed")
        for dataset in self.datasets:
            if not isinstance(dataset, Dataset) and not has_batch_method(dataset):
                raise ConcatError(
                    f"a {type(dataset).__name__} cannot be asked for a batch",
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
            if a dataset does not answer with one sample an index.
        """
        if not isinstance(indices, (list, tuple)):
            return self[[as_index(indices)]][0]
        return concatenated(self, indices)

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
        """Announce to every dataset its part of the order."""
        announce_parts(self, order, epoch, name=name, replacement=replacement)

    def reached(self, epoch: int, position: int) -> None:
        """Tell each dataset how many of its samples are among the order's first ones."""
        reached_parts(self, epoch, position)

    def _listeners(self) -> list[Any]:
        return self.datasets


def concatenated(concatenation: Any, indices: Sequence[int]) -> list[Any]:
    """Return samples of a concatenation, torch's or ours: each part concerned is asked once."""
    places: dict[int, list[int]] = {}
    local_indices: dict[int, list[int]] = {}
    for place, index in enumerate(indices):
        which, local_index = _convert_index(concatenation.cumulative_sizes, index)
        places.setdefault(which, []).append(place)
        local_indices.setdefault(which, []).append(local_index)

    samples: list[Any] = [None] * len(indices)
    for which in sorted(places):
        wanted = local_indices[which]
        answer = fetch_batch(concatenation.datasets[which], wanted)
        check_answer(which, concatenation.datasets[which], len(wanted), answer)
        for place, sample in zip(places[which], answer, strict=True):
            samples[place] = sample
    return samples


def _convert_index(ends: list[int], index: int) -> tuple[int, int]:
    total = ends[-1]
    if index < -total:
        raise UsageError(f"index {index} is before the first of {total} samples")
    if index >= total:
        raise SampleIndexError(f"the datasets hold {total} samples", index=int(index))
    if index < 0:
        index += total
    which = bisect.bisect_right(ends, index)
    return which, index - (ends[which - 1] if which else 0)


def check_answer(which: int, dataset: Any, count: int, answer: Any) -> None:
    """Refuse what a part of a concatenation answered, unless it is a sample an index."""
    if len(answer) != count:
        raise UsageError(
            f"dataset {which} ({type(dataset).__name__}) answered "
            f"{count} indices with {len(answer)} samples",
            hint="process must return one sample an index, in order",
        )


SUBSETS.add(Subset)
CONCATENATIONS.add(ConcatDataset)
PASSED_ON.add(Dataset.announce)


def as_index(value: Any) -> int:
    """Return the value as one index, or say what a dataset may be indexed by."""
    try:
        return operator.index(value)
    except TypeError:
        raise DatasetIndexTypeError(
            f"a dataset is indexed by a list or tuple of indices, or by one, "
            f"but got {type(value).__name__}",
            hint="indices.tolist() makes a list of a tensor or array, list(range(a, b)) of a slice",
        ) from None


def has_batch_method(dataset: Any) -> bool:
    """Say whether a dataset can be asked for a whole batch: torch's fetcher would do it, or it is
    torch's concatenation of such datasets."""
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
        return concatenated(dataset, indices)
    return dataset[indices]
