"""Which batches an iteration asks for, and where the training loop stands among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ffserve.errors import UsageError
from ffserve.torch.sampler import EpochSampler


class Ticket(NamedTuple):
    """One batch to be made: what to ask the dataset for, and where the epoch stands behind it."""

    batches: int
    samples: int
    indices: Any


class Plan(torch.utils.data.Sampler[Ticket]):
    """The tickets of an iteration, and the position of the training loop in the epoch.

    The position counts from the epoch's start: ``batches``, and with an EpochSampler the
    sampler's own count of samples. Each iteration is a numbered run, so that an iterator
    left over from an earlier one cannot move the position.
    """

    def __init__(self, batch_sampler: Iterable[Any] | None, sampler: Iterable[Any]) -> None:
        self.step = 0
        self._batched = batch_sampler is not None
        self._source: Iterable[Any] = sampler if batch_sampler is None else batch_sampler
        # Batches of torch's own BatchSampler are consecutive pieces of the order; of another batch
        # sampler nothing is known.
        self._order: Iterable[Any] | None = None
        self._batch_size = 1
        if not self._batched:
            self._order = sampler
        elif type(batch_sampler) is BatchSampler:
            self._order = batch_sampler.sampler
            self._batch_size = batch_sampler.batch_size
        self.epoch_sampler = self._order if isinstance(self._order, EpochSampler) else None
        self._batches = 0
        self._resume: int | None = None
        self._generator_state: torch.Tensor | None = None
        self._run = 0
        self._sampler_run = 0
        self._skipped_batches = 0
        self._start_sample = 0

    def begin(self) -> int:
        """Start a run at the position that was restored, else at ``step``; return its number."""
        self._run += 1
        self._start_sample = 0
        resumed = False
        if self.epoch_sampler is not None:
            resumed = self.epoch_sampler.restored
            self._sampler_run = self.epoch_sampler.follow()
            self._start_sample = self.epoch_sampler.position
        if resumed:
            self._skipped_batches = 0
        elif self._resume is not None:
            self._skipped_batches = self._resume
        else:
            self._skipped_batches = self.step
            self._generator_state = None
        self._resume = None
        self._batches = self._skipped_batches
        return self._run

    def samples_left_out(self) -> int:
        """Return how many of the order's first samples the run that just began leaves out."""
        return self._start_sample + self._skipped_batches * self._batch_size

    def handed_out(self, run: int, batches: int, samples: int) -> None:
        """Note that the training loop has everything up to here."""
        if run != self._run:
            return
        self._batches = batches
        if self.epoch_sampler is not None:
            self.epoch_sampler.handed_out(self._sampler_run, samples)

    def __iter__(self) -> Iterator[Ticket]:
        # All of it runs at the first next(): torch's multi-process iterator calls iter() twice.
        generator = self._replayed_generator()
        if generator is not None:
            # RandomSampler draws its permutation at its first next(), just below; so what torch
            # drew from the same generator before (the workers' seed) does not matter.
            if self._generator_state is not None:
                generator.set_state(self._generator_state)
            self._generator_state = generator.get_state()
        items = iter(self._source)
        batches, samples = self._skipped_batches, self._start_sample
        for item in islice(items, batches):
            samples += len(item) if self._batched else 1
        for item in items:
            batches += 1
            samples += len(item) if self._batched else 1
            yield Ticket(batches, samples, item)

    def state_dict(self, shape: dict[str, Any]) -> dict[str, Any]:
        if self.epoch_sampler is not None:
            return {"kind": "samples", "sampler": self.epoch_sampler.state_dict()}
        state: dict[str, Any] = {"kind": "batches", "batches": self._batches, **shape}
        if isinstance(self._order, DistributedSampler):
            state["epoch"] = self._order.epoch
        elif self._replayed_generator() is not None:
            state["generator"] = self._generator_state
        elif not self._is_fixed():
            raise UsageError(
                f"the order of {type(self._order or self._source).__name__} cannot be drawn again",
                hint="use ffserve.torch.EpochSampler; or give shuffle=True a generator; or, if "
                "the order is the same every time, count batches yourself and use set_step",
            )
        return state

    def load_state_dict(self, state: dict[str, Any], shape: dict[str, Any]) -> None:
        kind = "batches" if self.epoch_sampler is None else "samples"
        if state.get("kind") != kind:
            raise UsageError(
                f"the state counts {state.get('kind')}, but this loader counts {kind}",
                hint="a state fits a loader with the same kind of sampler",
            )
        if self.epoch_sampler is not None:
            self.epoch_sampler.load_state_dict(state["sampler"])
            self._run += 1
            return
        here = self.state_dict(shape)
        for name in shape:
            if state.get(name) != here[name]:
                raise UsageError(
                    f"the state was saved with {name} {state.get(name)}, here it is {here[name]}"
                )
        if set(state) != set(here):
            raise UsageError("the state was saved with another sampler")
        if isinstance(self._order, DistributedSampler):
            self._order.set_epoch(state["epoch"])
        self._generator_state = state.get("generator")
        self._batches = self._resume = state["batches"]
        self._run += 1

    def _is_fixed(self) -> bool:
        order = self._order
        return type(order) is SequentialSampler or isinstance(
            order, (list, tuple, range, np.ndarray)
        )

    def _replayed_generator(self) -> torch.Generator | None:
        order = self._order
        if type(order) is not RandomSampler or order.replacement:
            return None
        generator: torch.Generator | None = order.generator
        return generator
