"""All samples of a message read together, where reading is left to `ffserve.torch.Dataset`.

A read costs some 10 µs however many samples it is for, and what is not in memory comes sooner the
more is asked for at once. What is all in memory, and will not cross as it was read, is copied batch
by batch instead, into memory that the batch before had: it is still in the processor's cache when
`process` and collation take it from there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from ffserve.client.source import Bytes, Int64s
from ffserve.compat.ffrecord import FileReader
from ffserve.torch.dataset import Dataset, Subset
from ffserve.torch.placed import ALIGNMENT, Alive, address_of
from ffserve.torch.plan import Ticket

ARRAY_ALIGNMENT = 16
"""Bytes; samples begin at multiples of it, as arrays with memory of their own do."""
PAUSE = 64
"""Messages after which it is tried again what did not come off."""


class Joint(NamedTuple):
    """Whose `process` gets samples, and what reads them; subsets: from the outermost on, whose
    indices lead to its own."""

    dataset: Dataset
    reader: FileReader
    subsets: tuple[Any, ...] = ()

    def mean_size(self) -> int:
        """Return about how many bytes a sample has."""
        return self.reader.size // max(1, self.reader.n)


def asked_of(tickets: Sequence[Ticket], subsets: Sequence[Any]) -> list[Int64s] | None:
    """Return the indices that each ticket asks for, below these subsets; None if it cannot be said
    of all of them."""
    asked = []
    for ticket in tickets:
        indices = ticket.wanted if subsets else ticket.indices
        if not ticket.drawn and type(indices) is not list:
            return None
        asked.append(indices)
    return below(asked, subsets)


def below(asked: Sequence[Any], subsets: Sequence[Any]) -> list[Int64s] | None:
    """Return indices of what subsets are of, for indices of the subsets, batch by batch."""
    found = []
    for indices in asked:
        try:
            for subset in subsets:
                own = subset.indices
                indices = [own[i] for i in indices]
            numbers: NDArray[Any] = np.asarray(indices, None if len(indices) else np.int64)
        except (IndexError, TypeError, OverflowError, ValueError):
            return None
        if numbers.ndim != 1 or numbers.dtype.kind != "i":
            return None
        found.append(numbers.astype(np.int64, copy=False))
    return found


def seen_through(dataset: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return what subsets are of, and them; None if one of them does more than a subset does."""
    subsets = []
    while type(dataset) is torch.utils.data.Subset or isinstance(dataset, Subset):
        kind = type(dataset)
        if isinstance(dataset, Subset) and (
            kind.__getitem__ is not Subset.__getitem__ or not is_plain(dataset)
        ):
            return None
        subsets.append(dataset)
        dataset = dataset.dataset
    return dataset, tuple(subsets)


def joint_of(dataset: Any) -> Joint | None:
    """Return how to read for a data set, if all it does is what `Dataset` and subsets of it do."""
    found = seen_through(dataset)
    if found is None:
        return None
    dataset, subsets = found
    if not isinstance(dataset, Dataset) or not is_plain(dataset):
        return None
    if type(dataset).__getitem__ is not Dataset.__getitem__:
        return None
    reader = vars(dataset).get("reader")
    if not isinstance(reader, FileReader) or type(reader).read is not FileReader.read:
        return None
    return None if "read" in vars(reader) else Joint(dataset, reader, subsets)


def is_plain(dataset: Dataset) -> bool:
    """Whether a batch is asked of a data set as `Dataset` has it asked."""
    kind: Any = type(dataset)
    return (
        kind.__getattribute__ is object.__getattribute__
        and kind.__getitems__ is Dataset.__getitems__
        and "__getitems__" not in vars(dataset)
    )


class Warm:
    """Memory for one batch after the other: the same, unless somebody still has samples of it."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._alive: Alive = _nobody
        self._pause = 0
        """Messages for which it is not tried, since samples were of different sizes."""

    def begin(self) -> bool:
        """Begin a message; return whether it shall be tried."""
        self._pause = max(0, self._pause - 1)
        return not self._pause

    def copied(self, reader: FileReader, numbers: Int64s) -> list[Bytes] | None:
        """Return a batch that is all in memory and of one size; None for another."""
        batch = None
        if len(self._memory):
            if self._alive() is not None:
                self._memory = _aligned(len(self._memory))
            # Through a buffer, so that views have this very array as their base.
            own = np.frombuffer(self._memory.data, np.uint8)
            self._alive = weakref.ref(own)
            batch = reader.copied(numbers, own)
        if batch is None:
            batch = reader.copied(numbers)  # perhaps there was too little room
            if batch is None:
                return None
            self._memory, self._alive = _aligned(len(batch.buffer)), _nobody
        sizes = batch.offsets[1:] - batch.offsets[:-1]
        size = int(sizes[0]) if len(sizes) else 0
        if size % ARRAY_ALIGNMENT or (sizes != size).any():
            self._pause = PAUSE
            return None
        return [*batch.buffer.reshape(len(sizes), size)]


def _nobody() -> None:
    return None


def _aligned(size: int) -> Bytes:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -address_of(memory) % ALIGNMENT
    return memory[first : first + size]


class Samples:
    """Gives `process` the samples of a message, batch by batch.

    Args:
        joint, numbers: whose, and what is to be read for each batch.
        read: reads any number of batches at once.
        warm: for batches that are all in memory; None: all of the message is read at once.
    """

    def __init__(
        self,
        joint: Joint,
        numbers: Sequence[Int64s],
        read: Callable[[FileReader, Int64s], Sequence[Bytes]],
        warm: Warm | None,
    ) -> None:
        self._joint = joint
        self._numbers = numbers
        self._read = read
        self._warm = warm
        self._next = 0
        self._rest: Sequence[Bytes] | None = None
        """What was read at once,"""
        self._at = 0
        """and how many of it were taken."""
        self._failed = False

    def processed(self, wanted: Any) -> Any:
        """Return what `process` makes of the next batch, `wanted` being what was asked for."""
        number, self._next = self._next, self._next + 1
        samples = self._take(number)
        numbers = self._numbers[number]
        if self._joint.subsets:
            wanted = numbers.tolist()
        if samples is None:
            # By itself, to tell whose error it is.
            samples = self._joint.reader.read(numbers)
        return self._joint.dataset.process(wanted, samples)

    def skip(self) -> None:
        """Leave the next batch out."""
        number, self._next = self._next, self._next + 1
        if self._rest is not None:
            self._at += len(self._numbers[number])

    def _take(self, number: int) -> list[Bytes] | None:
        """Return the samples of a batch; None if they cannot be had with others."""
        numbers = self._numbers[number]
        if self._failed:
            return None
        if self._rest is None:
            if self._warm is not None:
                copied = self._warm.copied(self._joint.reader, numbers)
                if copied is not None:
                    return copied
            try:
                self._rest = self._read(self._joint.reader, np.concatenate(self._numbers[number:]))
            except Exception:  # it may be of any of these batches, and of a user's own class
                self._failed = True
                return None
        first, self._at = self._at, self._at + len(numbers)
        samples: Any = self._rest[first : self._at]
        return samples  # type: ignore[no-any-return]
