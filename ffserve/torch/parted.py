"""A concatenation's messages, of which the samples of each part are read together.

As in joint.py, part by part: each is read once a message, and its `process` gets of each batch what
is its own, as `ConcatDataset` would hand it over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch.utils.data

from ffserve.client.source import Int64s
from ffserve.torch.dataset import ConcatDataset, check_answer
from ffserve.torch.joint import Joint, Samples, asked_of, below, is_plain, joint_of, seen_through
from ffserve.torch.plan import Ticket


class Parted(NamedTuple):
    """A concatenation whose parts can all be read for; subsets of it: as for `Joint`."""

    concatenation: Any
    parts: tuple[Joint | Parted, ...]
    subsets: tuple[Any, ...] = ()


class Turn(NamedTuple):
    """What of a batch is a part's: where in the batch, and the part's own indices."""

    part: int
    places: Int64s
    indices: Int64s


class Split(NamedTuple):
    """What is to be read for the batches of a message: of each batch its turns, of each part what
    is to be read for those batches that it has a turn in."""

    counts: list[int]
    turns: list[list[Turn]]
    below: list[list[Int64s] | Split]


Way: TypeAlias = Joint | Parted
Numbers: TypeAlias = "list[Int64s] | Split"


def way_of(dataset: Any) -> Way | None:
    """Return how to read for a data set, its parts and their subsets; None if any of them does more
    than ffserve's own classes do."""
    joint = joint_of(dataset)
    if joint is not None:
        return joint
    found = seen_through(dataset)
    if found is None:
        return None
    concatenation, subsets = found
    if type(concatenation) is not torch.utils.data.ConcatDataset and (
        not isinstance(concatenation, ConcatDataset)
        or not is_plain(concatenation)
        or type(concatenation).__getitem__ is not ConcatDataset.__getitem__
    ):
        return None
    parts = []
    for part in concatenation.datasets:
        way = way_of(part)
        if way is None:
            return None
        parts.append(way)
    return Parted(concatenation, tuple(parts), subsets)


def numbers_of(way: Way, tickets: Sequence[Ticket]) -> Numbers | None:
    """Return what is to be read for tickets; None if it cannot be said of all of them."""
    asked = asked_of(tickets, way.subsets)
    return asked if asked is None or isinstance(way, Joint) else _split(way, asked)


def _split(way: Parted, asked: list[Int64s]) -> Split | None:
    ends = np.array(way.concatenation.cumulative_sizes, np.int64)
    turns = []
    own: list[list[Int64s]] = [[] for _ in way.parts]
    for numbers in asked:
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < int(ends[-1]):
            return None
        which = np.searchsorted(ends, numbers, side="right")
        turn = []
        for part in np.unique(which).tolist():
            places = np.flatnonzero(which == part)
            indices = numbers[places] - (int(ends[part - 1]) if part else 0)
            turn.append(Turn(part, places, indices))
            own[part].append(indices)
        turns.append(turn)
    found: list[Numbers] = []
    for part_way, part_asked in zip(way.parts, own, strict=True):
        numbers_below = below(part_asked, part_way.subsets)
        if numbers_below is None:
            return None
        if isinstance(part_way, Joint):
            found.append(numbers_below)
            continue
        split = _split(part_way, numbers_below)
        if split is None:
            return None
        found.append(split)
    return Split([*map(len, asked)], turns, found)


class PartedSamples:
    """Gives the `process` of each part the samples of a message, batch by batch.

    Args: way, split: of whom, and what it is. parts: what gives the samples of each part.
    """

    def __init__(self, way: Parted, split: Split, parts: Sequence[Given]) -> None:
        self._way = way
        self._split = split
        self._parts = parts
        self._next = 0

    def processed(self, wanted: Any) -> list[Any]:
        """Return the next batch, as `ConcatDataset` puts it together."""
        number, self._next = self._next, self._next + 1
        samples: list[Any] = [None] * self._split.counts[number]
        turns = self._split.turns[number]
        done = 0
        try:
            for part, places, indices in turns:
                done += 1
                answer = self._parts[part].processed(indices.tolist())
                check_answer(part, self._way.concatenation.datasets[part], len(indices), answer)
                for place, sample in zip(places.tolist(), answer, strict=True):
                    samples[place] = sample
        finally:
            for part, *_ in turns[done:]:
                self._parts[part].skip()
        return samples

    def skip(self) -> None:
        """Leave the next batch out."""
        number, self._next = self._next, self._next + 1
        for part, *_ in self._split.turns[number]:
            self._parts[part].skip()


Given: TypeAlias = Samples | PartedSamples
"""What gives `process` the samples of a message."""
