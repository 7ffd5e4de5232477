"""Several batches in one message.

torch's way of asking a worker and of getting its answer costs 60 to 90 µs a message, more than
copying a batch of 256 KiB. So small batches go several at a time. How many depends on nothing but
the files and the loader's arguments: which worker makes which batch is the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data

from ffserve.compat.ffrecord import FileReader
from ffserve.torch.dataset import ReaderRegistry
from ffserve.torch.listeners import CONCATENATIONS, SUBSETS
from ffserve.torch.plan import Plan, Ticket

BUNDLE_SIZE = 8 << 20
"""Small batches share a message up to so many bytes of samples, and BUNDLE_COUNT batches."""
BUNDLE_COUNT = 32
TURNS = 4
"""Messages that every worker has to make in an epoch at least, or some would have nothing to do."""


class Bundle(NamedTuple):
    """What a worker is asked for in one message."""

    tickets: list[Ticket]

    @property
    def heads(self) -> list[tuple[int, int, int]]:
        """Of each ticket its numbers and how many samples it asks for."""
        return [(batches, samples, len(asked)) for batches, samples, asked, _ in self.tickets]

    def __reduce__(self) -> Any:
        first = self.tickets[0]
        if not first.drawn:
            return Bundle, (self.tickets,)
        count = len(first.indices)
        order = np.concatenate([ticket.indices for ticket in self.tickets])
        return _bundle, (first.batches, first.samples - count, count, order.tobytes())


def _bundle(batches: int, samples: int, count: int, order: bytes) -> Bundle:
    """Make a bundle of drawn tickets again: of the first one's number, of the samples before it, of
    the size of all but the last one, and of all indices."""
    indices = np.frombuffer(order, np.int64)
    tickets = []
    for number, start in enumerate(range(0, len(indices), count), batches):
        part = indices[start : start + count]
        tickets.append(Ticket(number, samples + start + len(part), part, True))
    return Bundle(tickets)


class Bundles(torch.utils.data.Sampler[Bundle]):
    """The plan's tickets, some at a time."""

    def __init__(self, plan: Plan, count: int) -> None:
        self._plan = plan
        self._count = count

    def __iter__(self) -> Iterator[Bundle]:
        tickets = iter(self._plan)
        while bundle := list(islice(tickets, self._count)):
            yield Bundle(bundle)


def batches_a_message(dataset: Any, batch_sampler: Any, workers: int) -> int:
    """Return how many batches to ask a worker for at once (batch_sampler: the loader's)."""
    size = getattr(batch_sampler, "batch_size", None)
    readers = _readers(dataset)
    count = sum(reader.n for reader in readers)
    if not size or not count:
        return 1
    try:
        turns = len(batch_sampler) // (TURNS * workers)
    except TypeError:  # a sampler that does not know its length
        return 1
    batch_bytes = int(size * sum(reader.size for reader in readers) // count)
    return max(1, min(BUNDLE_SIZE // max(1, batch_bytes), BUNDLE_COUNT, turns))


def _readers(dataset: Any) -> list[FileReader]:
    if isinstance(dataset, ReaderRegistry):
        return dataset.ffreaders()
    if type(dataset) in SUBSETS:
        return _readers(dataset.dataset)
    parts = dataset.datasets if type(dataset) in CONCATENATIONS else ()
    return [reader for part in parts for reader in _readers(part)]
