"""The order that a sampler will hand out, drawn before anybody asks for it.

An order can be announced only when all of it is known beforehand. For some of torch's samplers it
can be had without any change to what the loop sees: those that draw all their random numbers at the
first index anyway. Their draw is done here, from the same generator, at the same time and with the
same outcome, the generator's state included; the tests hold each against the installed torch.
Samplers that draw as they go (with replacement from a generator that others may use, say) and those
that nobody knows are left alone: they have no ``Draw``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ffserve.torch.listeners import Int64s
from ffserve.torch.sampler import EpochSampler

Forecast = Callable[[], Int64s | None]
_CHUNK = 4096


class Draw(ABC):
    """How one sampler's order is drawn, an iteration at a time."""

    epoch: int | None = None
    """The epoch that the sampler was set to, if it has epochs."""
    name: str | None = None
    """The name of the order."""
    replacement: bool | None = False
    """Whether an order may visit an index more than once; None where it has to be seen."""

    hands_out = False
    """Whether ``draw`` is needed to hand out indices, not only to announce them."""

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """An iteration is about to begin; what the last one drew is past."""

    @abstractmethod
    def draw(self) -> Int64s | None:
        """Return the order of the iteration that begins now; None where it is none of indices."""

    @abstractmethod
    def indices(self, order: Int64s | None) -> Iterable[Any]:
        """Return what hands out the indices of the order just drawn; `Drawn` where that is all."""

    def forecast(self, epoch: int, base_seed: bool) -> Forecast:
        """Return what draws the next iteration's order, as far as that can be known.

        Args:
            epoch: that the sampler will be set to, if it has epochs.
            base_seed: torch draws its workers' seed from the sampler's generator, too.
        Returns: a function for another thread, as it may take a while.
        """
        return _unknown

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs to draw the present iteration's order again."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Have the next iteration draw the order that ``state`` is of."""


class FixedDraw(Draw):
    """The same indices every time: a SequentialSampler, a list, a list of batches."""

    def __init__(self, source: Any, *, batches: bool = False) -> None:
        self._source = source
        self._batches = batches
        self.replacement = False if type(source) is SequentialSampler else None

    def draw(self) -> Int64s | None:
        if type(self._source) is SequentialSampler:
            return np.arange(len(self._source), dtype=np.int64)
        try:
            if self._batches:
                parts = [np.asarray(batch) for batch in self._source if len(batch)]
                return _whole_numbers(np.concatenate(parts)) if parts else None
            return _whole_numbers(np.asarray(self._source))
        except (TypeError, ValueError):  # rows of different lengths, or no sequences at all
            return None

    def indices(self, order: Int64s | None) -> Iterable[Any]:
        if type(self._source) is SequentialSampler:
            return Drawn(range(len(self._source)))
        source: Iterable[Any] = self._source
        return source

    def forecast(self, epoch: int, base_seed: bool) -> Forecast:
        return self.draw


class EpochDraw(Draw):
    """An EpochSampler, which knows all its orders."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler

    @property
    def epoch(self) -> int | None:  # type: ignore[override]
        return self._sampler.epoch

    @property
    def name(self) -> str | None:  # type: ignore[override]
        return self._sampler.order_name

    def draw(self) -> Int64s | None:
        return self._sampler.order()

    def indices(self, order: Int64s | None) -> Iterable[Any]:
        if type(self._sampler).__iter__ is not EpochSampler.__iter__:
            return self._sampler
        return Drawn(self._sampler.rest())

    def forecast(self, epoch: int, base_seed: bool) -> Forecast:
        return partial(self._sampler.order, epoch)


class DistributedDraw(Draw):
    """torch's DistributedSampler, whose order follows from seed and epoch."""

    hands_out = True
    _SAVED = ("num_replicas", "seed", "shuffle", "drop_last")

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self._sampler = sampler

    @property
    def epoch(self) -> int | None:  # type: ignore[override]
        return self._sampler.epoch

    def draw(self) -> Int64s | None:
        return self._order(self._sampler.epoch)

    def indices(self, order: Int64s | None) -> Iterable[Any]:
        return self._sampler if order is None else Drawn(order)

    def forecast(self, epoch: int, base_seed: bool) -> Forecast:
        return partial(self._order, epoch)

    def state(self) -> dict[str, Any]:
        saved = {name: getattr(self._sampler, name, None) for name in self._SAVED}
        return {"epoch": self._sampler.epoch, **saved}

    def restore(self, state: dict[str, Any]) -> None:
        self._sampler.set_epoch(state["epoch"])

    def _order(self, epoch: int) -> Int64s | None:
        sampler = self._sampler
        if type(sampler) is not DistributedSampler:
            return None
        n = len(sampler.dataset)  # type: ignore[arg-type]
        positions = np.arange(
            sampler.rank, sampler.total_size, sampler.num_replicas, dtype=np.int64
        )
        if n == 0:
            return positions[:0]
        if not sampler.drop_last:
            positions %= n
        if not sampler.shuffle:
            return positions
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + epoch)
        permutation: Int64s = torch.randperm(n, generator=generator).numpy()
        return permutation[positions]


class RandomDraw(Draw):
    """A sampler of torch that draws from a generator, all at its first index.

    Args:
        sampler: with a ``generator``, or None in its place for torch's global one.
        order: draws the order from a generator as the sampler would.
        end: draws what the sampler draws when it is exhausted.
    """

    hands_out = True

    def __init__(
        self,
        sampler: Any,
        order: Callable[[Any, torch.Generator], Int64s],
        end: Callable[[Any, torch.Generator], None] | None = None,
    ) -> None:
        self._sampler = sampler
        self._order = order
        self._end = end
        self.replacement = (
            None if order is _subset_order else getattr(sampler, "replacement", False)
        )
        self._before: torch.Tensor | None = None
        self._after: torch.Tensor | None = None
        self._replayed: torch.Tensor | None = None

    def begin(self) -> None:
        self._before = None

    def draw(self) -> Int64s | None:
        generator = self._generator
        source = torch.default_generator if generator is None else generator
        replayed, self._replayed = self._replayed, None
        if replayed is not None:
            # What torch drew from the same generator just before (the workers' seed) does not
            # matter then. torch's global generator is not set back for one sampler's sake.
            source = torch.Generator() if generator is None else source
            source.set_state(replayed)
        self._before = source.get_state()
        order = self._order(self._sampler, source)
        self._after = source.get_state() if generator is not None else None
        return order

    def indices(self, order: Int64s | None) -> Iterable[Any]:
        assert order is not None
        return Drawn(order, self._draw_end)

    def forecast(self, epoch: int, base_seed: bool) -> Forecast:
        after, sampler, end, order = self._after, self._sampler, self._end, self._order
        # What else is drawn from torch's global generator until then nobody knows.
        if after is None:
            return _unknown

        def draw() -> Int64s:
            generator = torch.Generator()
            generator.set_state(after)
            if end is not None:
                end(sampler, generator)
            if base_seed:
                _draw_seed(generator)
            return order(sampler, generator)

        return draw

    def state(self) -> dict[str, Any]:
        state = self._before if self._replayed is None else self._replayed
        return {"generator": state, "own_generator": self._generator is not None}

    def restore(self, state: dict[str, Any]) -> None:
        self._replayed = state["generator"]

    @property
    def _generator(self) -> torch.Generator | None:
        generator: torch.Generator | None = self._sampler.generator
        return generator

    def _draw_end(self) -> None:
        if self._end is not None and self._generator is not None:
            self._end(self._sampler, self._generator)


class Drawn:
    """Hands out an order that was drawn.

    Iterated over it gives the plain integers that torch's samplers hand out.

    Args: order: indices. end: called when they are exhausted.
    """

    def __init__(self, order: Int64s | range, end: Callable[[], None] | None = None) -> None:
        self._order = order
        self._end = end

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self._order), _CHUNK):
            yield from self._part(start, start + _CHUNK).tolist()
        self._finish()

    def batches(self, size: int, drop_last: bool) -> Iterator[Int64s]:
        """Yield the batches that torch's BatchSampler would make of it, as arrays."""
        count = len(self._order)
        whole = count // size * size
        for start in range(0, whole, size):
            yield self._part(start, start + size)
        self._finish()
        if whole < count and not drop_last:
            yield self._part(whole, count)

    def _part(self, start: int, stop: int) -> Int64s:
        part = self._order[start:stop]
        if isinstance(part, range):
            return np.arange(part.start, part.stop, part.step, dtype=np.int64)
        return part

    def _finish(self) -> None:
        if self._end is not None:
            self._end()


def draw_of(sampler: Any) -> Draw | None:
    """Return how the order of this sampler can be drawn beforehand; None if it cannot."""
    if isinstance(sampler, EpochSampler):
        return EpochDraw(sampler)
    if isinstance(sampler, DistributedSampler):
        return DistributedDraw(sampler)
    kind = type(sampler)
    if kind is SequentialSampler or isinstance(sampler, (list, tuple, range, np.ndarray)):
        return FixedDraw(sampler)
    if kind is RandomSampler:
        if sampler.replacement or sampler.num_samples > len(sampler.data_source):
            return None
        return RandomDraw(sampler, _random_order, _random_end)
    if kind is SubsetRandomSampler:
        if not isinstance(sampler.indices, (list, tuple, range)):
            return None
        if _whole_numbers(np.asarray(sampler.indices)) is None:
            return None
        return RandomDraw(sampler, _subset_order)
    if kind is WeightedRandomSampler and sampler.weights.device.type == "cpu":
        return RandomDraw(sampler, _weighted_order)
    return None


def draw_of_batches(batch_sampler: Any) -> Draw | None:
    """Return how a batch sampler's order can be drawn beforehand; None if it cannot.

    That is a sequence of batches (of which each iteration gives the same ones), or torch's own
    BatchSampler over a sampler that ``draw_of`` knows.
    """
    if type(batch_sampler) is BatchSampler:
        return draw_of(batch_sampler.sampler)
    if isinstance(batch_sampler, Sequence):
        return FixedDraw(batch_sampler, batches=True)
    return None


def _unknown() -> Int64s | None:
    return None


def _whole_numbers(values: NDArray[Any]) -> Int64s | None:
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        return None
    return values.astype(np.int64, copy=False)


def _draw_seed(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _random_order(sampler: Any, generator: torch.Generator) -> Int64s:
    if sampler.generator is None:
        seed = _draw_seed(generator)
        generator = torch.Generator()
        generator.manual_seed(seed)
    n = len(sampler.data_source)
    order: Int64s = torch.randperm(n, generator=generator).numpy()
    return order[: sampler.num_samples]


def _random_end(sampler: Any, generator: torch.Generator) -> None:
    # It draws one permutation more than it needs whenever whole ones are enough.
    n = len(sampler.data_source)
    if sampler.generator is not None and sampler.num_samples == n:
        torch.randperm(n, generator=generator)


def _subset_order(sampler: Any, generator: torch.Generator) -> Int64s:
    places = torch.randperm(len(sampler.indices), generator=generator).numpy()
    order: Int64s = np.asarray(sampler.indices, dtype=np.int64)[places]
    return order


def _weighted_order(sampler: Any, generator: torch.Generator) -> Int64s:
    order: Int64s = torch.multinomial(
        sampler.weights, sampler.num_samples, sampler.replacement, generator=generator
    ).numpy()
    return order
