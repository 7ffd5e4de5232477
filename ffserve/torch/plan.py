"""Which batches an iteration asks for, and where the training loop stands among them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch.utils.data
from torch.utils.data import BatchSampler

from ffserve.errors import UsageError
from ffserve.torch.announcer import PATIENCE_S, Announced, Announcement, Announcer
from ffserve.torch.draws import Draw, Drawn, draw_of, draw_of_batches
from ffserve.torch.listeners import Int64s
from ffserve.torch.sampler import EpochSampler

_POSITION = ("batches", "epoch", "generator")
"""What states of one loader differ in."""


class Ticket(NamedTuple):
    """One batch to be made: what to ask the dataset for, and where the epoch stands behind it.

    drawn: indices are int64[n], in place of a list of plain integers.
    """

    batches: int
    samples: int
    indices: Any
    drawn: bool = False

    @property
    def wanted(self) -> Any:
        """What the sampler handed out."""
        return self.indices.tolist() if self.drawn else self.indices


class Run:
    """One iteration. Whoever iterates holds it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.batches = 0
        self.announced: Announced | None = None


class Plan(torch.utils.data.Sampler[Ticket]):
    """The tickets of an iteration, and the position of the training loop in the epoch.

    The position counts from the epoch's start: ``batches``, and with an EpochSampler the
    sampler's own count of samples. Each iteration is a numbered run, so that an iterator
    left over from an earlier one cannot move the position.

    Args:
        batch_sampler, sampler: the loader's; batch_sampler None: it makes no batches.
        announcer: is told each run's order, where that can be drawn beforehand.
        shares_generator: whether torch draws its workers' seed from this sampler's generator at the
            beginning of each iteration.
        in_order: batches are handed out as they were drawn.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Any] | None,
        sampler: Iterable[Any],
        announcer: Announcer,
        *,
        shares_generator: bool = False,
        in_order: bool = True,
    ) -> None:
        self.step = 0
        self._announcer = announcer
        self._shares_generator = shares_generator
        self._in_order = in_order
        self._batched = batch_sampler is not None
        self._source: Iterable[Any] = sampler if batch_sampler is None else batch_sampler
        # Batches of torch's own BatchSampler are consecutive pieces of the order; of another batch
        # sampler nothing is known.
        self._cut = batch_sampler if type(batch_sampler) is BatchSampler else None
        self._order: Any = sampler if batch_sampler is None else None
        if self._cut is not None:
            self._order = self._cut.sampler
        self._draw: Draw | None = (
            draw_of(sampler) if batch_sampler is None else draw_of_batches(batch_sampler)
        )
        self.epoch_sampler = self._order if isinstance(self._order, EpochSampler) else None
        self._batches = 0
        self._resume: int | None = None
        self._run = 0
        self._newest: weakref.ref[Run] | None = None
        self._resumed = False
        self._finished = False
        self._sampler_run = 0
        self._skipped_batches = 0
        self._start_sample = 0
        self._sampler_epoch: int | None = None
        self._epoch = -1

    def begin(self) -> Run:
        """Start a run at the position that was restored, else at ``step``; return it."""
        # A thread that is still announcing would be forked along with the workers.
        self._announcer.settle(PATIENCE_S)
        self._run += 1
        self._start_sample = 0
        self._resumed = self._resume is not None
        if self.epoch_sampler is not None:
            self._resumed = self.epoch_sampler.restored
            self._sampler_run = self.epoch_sampler.follow()
            self._start_sample = self.epoch_sampler.position
        if self._resumed:
            self._skipped_batches = self._resume or 0
        else:
            self._skipped_batches = self.step
            if self._draw is not None:
                self._draw.begin()
        self._resume = None
        self._batches = self._skipped_batches
        run = Run(self._run)
        self._newest = weakref.ref(run)
        return run

    def handed_out(self, run: Run, batches: int, samples: int) -> None:
        """Note that the training loop has everything up to here."""
        run.batches += 1
        if run.number != self._run:
            return
        self._batches = batches
        if self.epoch_sampler is not None:
            self.epoch_sampler.handed_out(self._sampler_run, samples)
        if run.announced is not None:
            if not self._in_order and self._cut is not None:
                # Which ones they were cannot be told, but how many.
                samples = (self._skipped_batches + run.batches) * self._cut.batch_size
                samples += self._start_sample
            self._announcer.reached(run.announced, samples)

    def exhausted(self, run: Run) -> None:
        """Note that the training loop has asked for more than there is."""
        if run.number == self._run:
            self._finished = True
        if run.announced is not None:
            end = len(run.announced.current.order)
            self._announcer.reached(run.announced, end, end=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_newest": None}

    def __iter__(self) -> Iterator[Ticket]:
        # All of it runs at the first next(): torch's multi-process iterator calls iter() twice.
        source, order, drawn = self._source, None, False
        if self._draw is not None:
            if self._draw.hands_out or self._announcer.listens():
                order = self._draw.draw()
            indices = self._draw.indices(order)
            if self._cut is None:
                source = indices
            elif isinstance(indices, Drawn):
                source = indices.batches(self._cut.batch_size, self._cut.drop_last)
                drawn = True
        items = iter(source)
        batches, samples = self._skipped_batches, self._start_sample
        for item in islice(items, batches):
            samples += len(item) if self._batched else 1
        self._announce(order, samples)
        for item in items:
            batches += 1
            samples += len(item) if self._batched else 1
            yield Ticket(batches, samples, item, drawn)

    def _announce(self, order: Int64s | None, position: int) -> None:
        draw = self._draw
        run = None if self._newest is None else self._newest()
        if draw is None:
            return
        self._count_epoch(draw.epoch)
        if order is None or not len(order) or run is None:
            return
        # An iteration that begins again in the sampler's epoch: nobody sets epochs here.
        following = self._epoch if draw.epoch is None else draw.epoch + (self._epoch == draw.epoch)
        draw_next = draw.forecast(following, self._shares_generator)
        epoch, name, replacement = self._epoch, draw.name, draw.replacement
        asked_for = self._asked_for

        def forecast() -> Announcement | None:
            order = draw_next()
            if order is None:
                return None
            return Announcement(epoch + 1, asked_for(order), name, replacement)

        current = Announcement(epoch, asked_for(order), name, replacement)
        run.announced = self._announcer.begin(current, position, forecast)

    def _count_epoch(self, sampler_epoch: int | None) -> None:
        """Number the epoch that begins, as it is announced.

        That is the sampler's own number if it has one, and one more with each further iteration in
        the same; a mere count of the iterations if not.
        """
        finished, self._finished = self._finished, False
        if sampler_epoch is None:
            self._epoch += 1
        elif sampler_epoch != self._sampler_epoch:
            self._epoch = sampler_epoch
        elif finished and not self._resumed:
            self._epoch += 1
        self._sampler_epoch = sampler_epoch

    def _asked_for(self, order: Int64s) -> Int64s:
        """Return that part of an order which whole batches are made of."""
        if self._cut is None or not self._cut.drop_last:
            return order
        return order[: len(order) // self._cut.batch_size * self._cut.batch_size]

    def state_dict(self, shape: dict[str, Any]) -> dict[str, Any]:
        if self.epoch_sampler is not None:
            return {"kind": "samples", "sampler": self.epoch_sampler.state_dict()}
        if self._draw is None:
            raise UsageError(
                f"the order of {type(self._order or self._source).__name__} cannot be drawn again",
                hint="use ffserve.torch.EpochSampler; or, if the order is the same every time, "
                "count batches yourself and use set_step",
            )
        return {"kind": "batches", "batches": self._batches, **shape, **self._draw.state()}

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
        if set(state) != set(here):
            raise UsageError("the state was saved with another sampler")
        for name in sorted(here, key=lambda name: name in shape):
            if name not in _POSITION and state[name] != here[name]:
                raise UsageError(
                    f"the state was saved with {name} {state[name]}, here it is {here[name]}",
                    hint="ffserve.torch.EpochSampler can go on with another world size"
                    if name == "num_replicas"
                    else None,
                )
        assert self._draw is not None
        self._draw.restore(state)
        self._batches = self._resume = state["batches"]
        self._run += 1
