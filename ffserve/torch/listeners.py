"""Whom an announcement reaches: from a dataset down to the readers that its samples come from.

A listener is anything with ``announce(order, epoch=0)`` and, if it wants to know how far the job
has come, ``reached(epoch, position)``: a reader, a dataset of ffserve, a dataset of the user's that
has them. torch's own Subset and ConcatDataset (of which ``random_split`` makes them) have neither
and are seen through. Everything else does not listen, and is passed over in silence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

_EPOCHS_KEPT = 3
"""Announced epochs whose positions can be told apart: one in use, and the next, begun early."""


def announce(
    listener: Any,
    order: Int64s,
    epoch: int,
    *,
    name: str | None = None,
    replacement: bool = False,
) -> None:
    """Announce an order to a listener.

    Args: as for ``ffserve.Reader.announce``. name and replacement are handed on only if they say
        something, so a listener's ``announce`` need not have them.
    """
    tell = getattr(listener, "announce", None)
    if callable(tell):
        options: dict[str, Any] = {} if name is None else {"name": name}
        if replacement:
            options["replacement"] = True
        tell(order, epoch=epoch, **options)
    elif type(listener) is torch.utils.data.Subset:
        announce_subset(listener, order, epoch, name=name, replacement=replacement)
    elif type(listener) is torch.utils.data.ConcatDataset:
        announce_parts(listener, order, epoch, name=name, replacement=replacement)


def reached(listener: Any, epoch: int, position: int) -> None:
    """Tell a listener that the first ``position`` samples of an announced order were used."""
    tell = getattr(listener, "reached", None)
    if callable(tell):
        tell(epoch, position)
    elif type(listener) is torch.utils.data.Subset:
        reached(listener.dataset, epoch, position)
    elif type(listener) is torch.utils.data.ConcatDataset:
        reached_parts(listener, epoch, position)


def listeners(dataset: Any) -> Iterator[Any]:
    """Yield those at the end of the way: readers, or datasets of which nothing more is known."""
    if type(dataset) is torch.utils.data.Subset:
        below = [dataset.dataset]
    elif type(dataset) is torch.utils.data.ConcatDataset:
        below = dataset.datasets
    elif callable(getattr(dataset, "_listeners", None)):
        below = dataset._listeners()
    else:
        if callable(getattr(dataset, "announce", None)):
            yield dataset
        return
    for listener in below:
        yield from listeners(listener)


def sources(dataset: Any) -> set[Hashable]:
    """Return what tells whether two datasets announce to the same data: a key each of theirs."""
    return {
        tuple(names) if (names := getattr(listener, "fnames", None)) else id(listener)
        for listener in listeners(dataset)
    }


def has_repeats(indices: Int64s) -> bool:
    """Say whether an index comes more than once."""
    if not len(indices) or int(indices.min()) < 0:
        return False
    seen = np.zeros(int(indices.max()) + 1, np.bool_)
    seen[indices] = True
    return int(np.count_nonzero(seen)) < len(indices)


def announce_subset(
    subset: Any, order: Int64s, epoch: int, *, name: str | None, replacement: bool
) -> None:
    """Announce an order of a subset (``dataset``, ``indices``) to its dataset."""
    indices = np.asarray(subset.indices, dtype=np.int64)
    replacement = replacement or has_repeats(indices)
    announce(subset.dataset, indices[order], epoch, name=name, replacement=replacement)


class _Parts:
    """Which part each sample of a concatenation's announced orders comes from."""

    def __init__(self, part_count: int) -> None:
        self._part_count = part_count
        self._parts: dict[int, NDArray[np.unsignedinteger[Any]]] = {}
        self._epoch = -1
        self._position = 0
        self._counts = np.zeros(part_count, np.int64)

    def add(self, epoch: int, which: Int64s) -> None:
        if self._parts and epoch < min(self._parts):
            self._parts.clear()
        self._parts[epoch] = which.astype(np.min_scalar_type(self._part_count))
        while len(self._parts) > _EPOCHS_KEPT:
            del self._parts[min(self._parts)]
        if epoch == self._epoch:
            self._epoch = -1

    def counts(self, epoch: int, position: int) -> list[int] | None:
        """Return each part's number of samples among the first ones of an order."""
        which = self._parts.get(epoch)
        if which is None:
            return None
        if epoch != self._epoch or position < self._position:
            self._epoch, self._position = epoch, 0
            self._counts[:] = 0
        passed = which[self._position : position]
        self._counts += np.bincount(passed, minlength=self._part_count)
        self._position += len(passed)
        return [int(count) for count in self._counts]


_parts: WeakKeyDictionary[Any, _Parts] = WeakKeyDictionary()


def announce_parts(
    concatenation: Any, order: Int64s, epoch: int, *, name: str | None, replacement: bool
) -> None:
    """Announce to each of a concatenation's ``datasets`` its part of an order."""
    datasets = concatenation.datasets
    ends = np.asarray(concatenation.cumulative_sizes, dtype=np.int64)
    which = np.searchsorted(ends, order, side="right")
    _parts.setdefault(concatenation, _Parts(len(datasets))).add(epoch, which)
    start = 0
    for number, dataset in enumerate(datasets):
        part = order[which == number] - start
        if len(part):
            announce(dataset, part, epoch, name=name, replacement=replacement)
        start = int(ends[number])


def reached_parts(concatenation: Any, epoch: int, position: int) -> None:
    """Tell each of a concatenation's ``datasets`` how far the job has come in its part."""
    parts = _parts.get(concatenation)
    counts = None if parts is None else parts.counts(epoch, position)
    if counts is not None:
        for dataset, count in zip(concatenation.datasets, counts, strict=True):
            reached(dataset, epoch, count)
