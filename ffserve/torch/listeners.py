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
    """Which listener below a concatenation each sample of its announced orders comes from."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[list[Any], NDArray[np.unsignedinteger[Any]]]] = {}
        self._epoch = -1
        self._position = 0
        self._counts = np.zeros(0, np.int64)

    def add(self, epoch: int, below: list[Any], which: Int64s) -> None:
        if self._parts and epoch < min(self._parts):
            self._parts.clear()
        self._parts[epoch] = below, which.astype(np.min_scalar_type(len(below)))
        while len(self._parts) > _EPOCHS_KEPT:
            del self._parts[min(self._parts)]
        if epoch == self._epoch:
            self._epoch = -1

    def counts(self, epoch: int, position: int) -> list[tuple[Any, int]]:
        """Return each listener, and its number of samples among the first ones of an order."""
        if epoch not in self._parts:
            return []
        below, which = self._parts[epoch]
        if epoch != self._epoch or position < self._position:
            self._epoch, self._position = epoch, 0
            self._counts = np.zeros(len(below), np.int64)
        passed = which[self._position : position]
        self._counts += np.bincount(passed, minlength=len(below))
        self._position += len(passed)
        return list(zip(below, self._counts.tolist(), strict=True))


_parts: WeakKeyDictionary[Any, _Parts] = WeakKeyDictionary()


class _Below:
    """An order of a concatenation, sample by sample followed down to who listens.

    Who listens for several parts (the same dataset, or another over the same files) is told one
    order: a second one for the same samples would take the place of the first.
    """

    def __init__(self, order: Int64s) -> None:
        self.listeners: list[Any] = []
        self.which = np.zeros(len(order), np.int64)
        self.indices = np.zeros(len(order), np.int64)
        self._numbers: dict[Hashable, int] = {}

    def follow(self, dataset: Any, order: Int64s, places: Int64s) -> None:
        """Note where the samples of a dataset at these places of the whole order come from."""
        if type(dataset) in SUBSETS:
            indices = np.asarray(dataset.indices, dtype=np.int64)
            self.follow(dataset.dataset, indices[order], places)
        elif type(dataset) in CONCATENATIONS:
            self.split(dataset, order, places)
        else:
            number = self._numbers.setdefault(_samples_of(dataset), len(self.listeners))
            if number == len(self.listeners):
                self.listeners.append(dataset)
            self.which[places] = number
            self.indices[places] = order

    def split(self, concatenation: Any, order: Int64s, places: Int64s) -> None:
        """As `follow`, of a concatenation of any class."""
        ends = np.asarray(concatenation.cumulative_sizes, dtype=np.int64)
        which = np.searchsorted(ends, order, side="right")
        start = 0
        for number, part in enumerate(concatenation.datasets):
            here = np.flatnonzero(which == number)
            self.follow(part, order[here] - start, places[here])
            start = int(ends[number])


def _samples_of(listener: Any) -> Hashable:
    """Return what two listeners have in common when the same index is the same sample to them."""
    if getattr(type(listener), "announce", None) in PASSED_ON:
        return frozenset(sources(listener))
    return id(listener)


SUBSETS: set[type] = {torch.utils.data.Subset}
"""Classes with ``dataset`` and ``indices``,"""
CONCATENATIONS: set[type] = {torch.utils.data.ConcatDataset}
"""with ``datasets`` and ``cumulative_sizes``,"""
PASSED_ON: set[Any] = set()
"""and ``announce`` methods that hand indices on unchanged: `dataset` adds its own."""


def announce_parts(
    concatenation: Any, order: Int64s, epoch: int, *, name: str | None, replacement: bool
) -> None:
    """Announce to all below a concatenation their part of an order."""
    below = _Below(order)
    below.split(concatenation, order, np.arange(len(order)))
    _parts.setdefault(concatenation, _Parts()).add(epoch, below.listeners, below.which)
    for number, listener in enumerate(below.listeners):
        part_order = below.indices[below.which == number]
        if len(part_order):
            repeats = replacement or has_repeats(part_order)
            announce(listener, part_order, epoch, name=name, replacement=repeats)


def reached_parts(concatenation: Any, epoch: int, position: int) -> None:
    """Tell all below a concatenation how far the job has come in their part."""
    parts = _parts.get(concatenation)
    for listener, count in () if parts is None else parts.counts(epoch, position):
        reached(listener, epoch, count)
