"""Samplers: EpochSampler, and the orders of torch's samplers before they are iterated.

With workers, torch asks a sampler for indices long before the training loop gets their batches, so
the number of indices handed out says too much. ``ffserve.torch.DataLoader`` therefore calls
``follow`` on an EpochSampler and reports each batch when the loop gets it; ``state_dict`` then
describes the samples that were used.

A position of an EpochSampler is a pair: ``split_at`` samples of the whole order had been used when
the order was last split among ranks (0 unless an epoch was restored with another world size), and
this rank has used ``position`` samples since. With W ranks split_at + W position samples are used,
and any other number of ranks can continue from there.

An order can be announced only if all of it is known beforehand. Some of torch's samplers draw all
their random numbers at the first index. A ``SamplerOrder`` draws the same numbers from the same
generator at the same time and leaves the generator in the same state, so the training loop sees no
difference; the tests compare each with the installed torch. Samplers that draw while they are
iterated, and unknown classes, have no ``SamplerOrder``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ffserve.dtypes import Int64s
from ffserve.errors import UsageError
from ffserve.mixture import MixtureOrder
from ffserve.order import (
    MAX_SAMPLE_COUNT,
    checked_integer,
    epoch_order,
    rank_part,
    rank_sample_count,
    shared_seed,
)

NextOrder = Callable[[], Int64s | None]

_COUNTS = ("seed", "world_size", "epoch", "split_at", "position")
_CHUNK_COUNT = 4096
_MAX_NAME_LENGTH = 180
_ORDERS_KEPT = 2
"""This many orders are kept: that of the current epoch, and that of the next one after it was
announced."""


class EpochSampler(Sampler[int]):
    """Hand out the indices of one rank's epoch in the order of ``ffserve.order.epoch_order``.

    Call ``set_epoch`` before each epoch, as with torch's DistributedSampler; without it every
    epoch has the same order. ``len(sampler)`` is the whole epoch's count also after a restore.

    Args:
        n: number of samples in the dataset.
        seed: integer from 0; the same on every rank.
        shuffle: False keeps the order of the dataset.
        rank: this process, 0 … world_size-1.
        world_size: processes that share an epoch; each gets the same number of samples.
        window: shuffle within windows of this many samples, so that neighbours are read together
            (``epoch_order`` describes the cost); None shuffles all.
        shared: a name. All samplers of this name have the same order whatever their own seed, and
            announce it under the name: jobs of a sweep then read each sample once together.
        replication: so many consecutive ranks get the same samples: the ranks of a tensor, sequence
            or pipeline parallel group. It divides ``world_size``.
    Raises:  UsageError for an argument outside its range.
    """

    replacement: bool | None = False
    """Whether an order may contain an index more than once; None: only the order itself tells."""

    def __init__(
        self,
        n: int,
        *,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        window: int | None = None,
        shared: str | None = None,
        replication: int = 1,
    ) -> None:
        epoch_order(0, seed=seed, epoch=0, rank=rank, world_size=world_size, window=window)
        if checked_integer("replication", replication, 1 << 32) == 0 or world_size % replication:
            raise UsageError(
                f"replication is {replication}, but must divide world_size, which is {world_size}"
            )
        if n < 0:
            raise UsageError(f"n is {n}, but a number of samples from 0 is needed")
        if shared is not None and not (
            isinstance(shared, str) and 0 < len(shared) <= _MAX_NAME_LENGTH
        ):
            raise UsageError(
                f"shared is {shared!r}, but a name of 1 to {_MAX_NAME_LENGTH} characters is needed"
            )
        self.n = int(n)
        self.seed = int(seed)
        self.shuffle = bool(shuffle)
        self.rank = int(rank)
        self.world_size = int(world_size)
        self.replication = int(replication)
        self._group, self._groups = self.rank // replication, self.world_size // replication
        self.window = None if window is None else int(window)
        self.shared = shared
        self.epoch = 0
        self._split_at = 0
        self._position = 0
        self._restored: tuple[int, int] | None = None
        self._iteration = 0
        self._followed = False
        self._orders: dict[tuple[int, int], Int64s] = {}

    def __len__(self) -> int:
        return rank_sample_count(self.n, self._groups)

    def __iter__(self) -> Iterator[int]:
        # All of it runs at the first next(): torch's multi-process iterator calls iter() twice.
        followed = self._followed
        rest = self.rest()
        start, iteration = self._position, self._iteration
        for position, index in enumerate(_integers(rest), start + 1):
            if not followed:
                self.handed_out(iteration, position)
            yield index

    def rest(self) -> Int64s:
        """Begin the iteration that ``follow`` prepared; return all indices that it hands out.

        Returns: ``order()`` from the position on; not to be written to. The caller reports the
            position with ``handed_out``.
        """
        if not self._followed:
            self._begin()
        self._followed = False
        self._restored = None
        return self.order()[self._position :]

    @property
    def restored(self) -> bool:
        """Whether the next iteration continues inside an epoch, at a restored position."""
        return self._restored not in (None, (0, 0))

    @property
    def position(self) -> int:
        """Number of samples of ``order()`` that were used."""
        return self._position

    @property
    def order_name(self) -> str | None:
        """The name under which this rank's order is announced, made from ``shared``."""
        if self.shared is None or self._groups == 1:
            return self.shared
        return f"{self.shared}/{self._group}"

    def order(self, epoch: int | None = None) -> Int64s:
        """Return this rank's order of an epoch.

        Args:    epoch: None for the current one; if this was restored with another world size,
            only the part behind ``split_at``.
        Returns: int64[len(self)], fewer for the rest of an epoch; cached; not to be written to.
        Cost:    one ``epoch_order`` per epoch.
        """
        split_at = self._split_at if epoch is None else 0
        key = (self.epoch if epoch is None else epoch, split_at)
        order = self._orders.get(key)
        if order is None:
            seed = self.seed if self.shared is None else shared_seed(self.shared)
            whole = self._whole_order(seed, key[0])
            order = rank_part(whole, self._group, self._groups, split_at)
            order.flags.writeable = False
            kept = list(self._orders.items())[1 - _ORDERS_KEPT :]
            self._orders = dict([*kept, (key, order)])
        return order

    def _whole_order(self, seed: int, epoch: int) -> Int64s:
        """Return the order of all ranks together, owned by the caller."""
        return epoch_order(self.n, seed=seed, epoch=epoch, shuffle=self.shuffle, window=self.window)

    def _identity(self) -> dict[str, Any]:
        """Return the values that a state must have in common with the sampler, as plain values."""
        return {
            "n": self.n,
            "shuffle": self.shuffle,
            "window": self.window,
            "shared": self.shared,
        }

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows.

        Args: epoch: integer from 0. The current epoch is no change, so a position that was just
            restored into it stays; any other epoch starts at its beginning.
        Raises: UsageError for a negative epoch.
        """
        epoch_order(0, seed=self.seed, epoch=epoch)
        if epoch != self.epoch:
            self.epoch = int(epoch)
            self._move_to(0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that ``load_state_dict`` needs to continue from here.

        Returns: a dict of plain values. ``position`` is the number of this rank's samples
            that were used: those handed to the training loop when ``ffserve.torch.DataLoader``
            uses the sampler; with any other loader those handed out by the sampler (torch's own
            loader asks ahead of the loop when it has workers).
        """
        return {
            **self._identity(),
            "seed": self.seed,
            "world_size": self.world_size,
            "replication": self.replication,
            "epoch": self.epoch,
            "split_at": self._split_at,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was called: the next iteration starts at its position.

        All ranks of a job have the same position when it is saved, so the state of one serves
        all. With another world size the samples that none of the saved ranks used are split again:
        exactly one rank uses each of them, except that fewer than world_size samples from the
        beginning of the whole order are used a second time to give every rank as many.

        Args: state: from a sampler with the same n, shuffle, window, and seed or shared name; rank,
            world size and replication may differ.
        Raises: UsageError for a state of another sampler; the message names the difference.
        """
        identity = self._identity()
        if self.shared is None:  # a shared order has its seed from its name
            identity["seed"] = self.seed
        missing = [key for key in (*identity, *_COUNTS) if key not in state]
        if missing:
            raise UsageError(
                f"invalid state of {_a(type(self).__name__)}: missing {', '.join(missing)}"
            )
        for name, value in identity.items():
            if state[name] != value:
                raise UsageError(
                    f"the state was saved with {name}={state[name]}, "
                    f"but this sampler has {name}={value}",
                    hint="its position means other samples here; "
                    "build the sampler as the saved one was",
                )
        world_size, replication, split_at, position = (
            checked_integer(f"the state's {name}", state.get(name, 1), MAX_SAMPLE_COUNT + 1)
            for name in ("world_size", "replication", "split_at", "position")
        )
        if world_size == 0 or replication == 0 or world_size % replication or split_at > self.n:
            raise UsageError(
                f"invalid state of {_a(type(self).__name__)}: world_size is {world_size}, "
                f"replication is {replication}, split_at is {split_at} of {self.n}"
            )
        groups = world_size // replication
        count = rank_sample_count(self.n - split_at, groups)
        if position > count:
            raise UsageError(f"position {position} is outside an epoch of {count} samples")
        if groups != self._groups:
            split_at, position = min(self.n, split_at + position * groups), 0
        self.set_epoch(state["epoch"])
        self._move_to(split_at, position)

    def follow(self) -> int:
        """Prepare an iteration whose position a loader will report with ``handed_out``.

        Returns: the number of the iteration, for ``handed_out``.
        """
        self._begin()
        self._followed = True
        return self._iteration

    def handed_out(self, iteration: int, position: int) -> None:
        """Note that the order's first ``position`` samples are used; ignore older iterations."""
        if iteration == self._iteration:
            self._position = position

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}

    def _begin(self) -> None:
        self._iteration += 1
        self._split_at, self._position = self._restored or (0, 0)

    def _move_to(self, split_at: int, position: int) -> None:
        self._iteration += 1
        self._followed = False
        self._restored = self._split_at, self._position = split_at, position


def data_rank(mesh: Any, dims: str | Sequence[str]) -> tuple[int, int]:
    """Return this process's rank and the world size among the ranks that get different samples.

    Args:
        mesh: a torch.distributed.device_mesh.DeviceMesh with named dimensions.
        dims: the data-parallel dimension, or several, the outermost first. Processes that differ in
            other dimensions only (tensor, sequence, pipeline) get the same rank.
    Returns: ``rank`` and ``world_size`` for an EpochSampler or ``Mixture.sampler``.
    Raises:  UsageError for a name that the mesh does not have, or a process outside the mesh.
    """
    names = tuple(mesh.mesh_dim_names or ())
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise UsageError("this process is not in the device mesh")
    rank, world_size = 0, 1
    for name in (dims,) if isinstance(dims, str) else dims:
        if name not in names:
            raise UsageError(
                f"the device mesh has no dimension {name!r}, but {', '.join(names) or 'no names'}",
                hint="name the dimensions: init_device_mesh(…, mesh_dim_names=('dp', 'tp'))",
            )
        size = mesh.size(names.index(name))
        rank, world_size = rank * size + coordinates[names.index(name)], world_size * size
    return rank, world_size


class MixtureSampler(EpochSampler):
    """Hand out the indices of one rank's epoch of a mixture.

    ``ffserve.torch.Mixture.sampler`` makes it. Everything is as with EpochSampler, which says what
    the arguments mean.

    Args: mixture: computes the order of all ranks together.
    """

    replacement = None

    def __init__(self, mixture: MixtureOrder, **options: Any) -> None:
        super().__init__(mixture.epoch_size, **options)
        self.mixture = mixture

    def _whole_order(self, seed: int, epoch: int) -> Int64s:
        return self.mixture.order(seed=seed, epoch=epoch, window=self.window)

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), **self.mixture.settings()}


class SamplerOrder(ABC):
    """The order of one sampler, known before each iteration."""

    epoch: int | None = None
    """The epoch that the sampler was set to, if it has epochs."""
    name: str | None = None
    """The name of the order."""
    replacement: bool | None = False
    """Whether an order may contain an index more than once; None: only the order itself tells."""

    needed_to_iterate = False
    """Whether ``compute`` is needed to hand out indices, not only to announce them."""

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Forget the last iteration; another is about to begin."""

    @abstractmethod
    def compute(self) -> Int64s | None:
        """Return the order of the iteration that begins now; None if its items are no indices."""

    @abstractmethod
    def remaining(self, order: Int64s | None) -> Int64s | range | None:
        """Return the indices that the iteration hands out; None to iterate the sampler itself.

        Args: order: what ``compute`` returned, if it was called.
        """

    def exhausted(self) -> None:  # noqa: B027
        """Do what the sampler does after its last index."""

    def predict(self, epoch: int, base_seed: bool) -> NextOrder:
        """Return a function that computes the next iteration's order, or returns None.

        Args:
            epoch: the epoch that the sampler is expected to be set to, if it has epochs.
            base_seed: torch draws its workers' seed from the sampler's generator, too.
        Returns: a function for another thread, as it may take a while.
        """
        return _unknown

    def state(self) -> dict[str, Any]:
        """Return what ``restore`` needs to compute the present iteration's order again."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Make the next iteration compute the order that ``state`` describes."""


class FixedOrder(SamplerOrder):
    """The same indices every time: a SequentialSampler, a list, a list of batches."""

    def __init__(self, source: Any, *, batches: bool = False) -> None:
        self._source = source
        self._batches = batches
        self.replacement = False if type(source) is SequentialSampler else None

    def compute(self) -> Int64s | None:
        if type(self._source) is SequentialSampler:
            return np.arange(len(self._source), dtype=np.int64)
        try:
            if self._batches:
                parts = [np.asarray(batch) for batch in self._source if len(batch)]
                return _whole_numbers(np.concatenate(parts)) if parts else None
            return _whole_numbers(np.asarray(self._source))
        except (TypeError, ValueError):  # rows of different lengths, or no sequences at all
            return None

    def remaining(self, order: Int64s | None) -> Int64s | range | None:
        if type(self._source) is SequentialSampler:
            return range(len(self._source))
        return None if self._batches else order

    def predict(self, epoch: int, base_seed: bool) -> NextOrder:
        return self.compute


class EpochOrder(SamplerOrder):
    """The order of an EpochSampler, which knows those of all epochs."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler

    @property
    def epoch(self) -> int | None:  # type: ignore[override]
        return self._sampler.epoch

    @property
    def name(self) -> str | None:  # type: ignore[override]
        return self._sampler.order_name

    @property
    def replacement(self) -> bool | None:  # type: ignore[override]
        return self._sampler.replacement

    def compute(self) -> Int64s | None:
        return self._sampler.order()

    def remaining(self, order: Int64s | None) -> Int64s | None:
        if type(self._sampler).__iter__ is not EpochSampler.__iter__:
            return None
        return self._sampler.rest()

    def predict(self, epoch: int, base_seed: bool) -> NextOrder:
        return partial(self._sampler.order, epoch)


class DistributedOrder(SamplerOrder):
    """The order of torch's DistributedSampler, which follows from seed and epoch."""

    needed_to_iterate = True
    _SAVED = ("num_replicas", "seed", "shuffle", "drop_last")

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self._sampler = sampler

    @property
    def epoch(self) -> int | None:  # type: ignore[override]
        return self._sampler.epoch

    def compute(self) -> Int64s | None:
        return self._order(self._sampler.epoch)

    def remaining(self, order: Int64s | None) -> Int64s | None:
        return order

    def predict(self, epoch: int, base_seed: bool) -> NextOrder:
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


class GeneratorOrder(SamplerOrder):
    """The order of a sampler of torch that draws from a generator, all at its first index.

    Args:
        sampler: has a ``generator``, which is None for torch's global one.
        draw: draws the order from a generator as the sampler would.
        draw_end: draws what the sampler draws when it is exhausted.
    """

    needed_to_iterate = True

    def __init__(
        self,
        sampler: Any,
        draw: Callable[[Any, torch.Generator], Int64s],
        draw_end: Callable[[Any, torch.Generator], None] | None = None,
    ) -> None:
        self._sampler = sampler
        self._draw = draw
        self._draw_end = draw_end
        self.replacement = None if draw is _draw_subset else getattr(sampler, "replacement", False)
        self._before: torch.Tensor | None = None
        self._after: torch.Tensor | None = None
        self._restored: torch.Tensor | None = None

    def begin(self) -> None:
        self._before = None

    def compute(self) -> Int64s | None:
        generator = self._generator
        source = torch.default_generator if generator is None else generator
        restored, self._restored = self._restored, None
        if restored is not None:
            # torch has drawn the workers' seed from the same generator just before, which does not
            # matter then. The state of torch's global generator is not changed for one sampler.
            source = torch.Generator() if generator is None else source
            source.set_state(restored)
        self._before = source.get_state()
        order = self._draw(self._sampler, source)
        self._after = source.get_state() if generator is not None else None
        return order

    def remaining(self, order: Int64s | None) -> Int64s | None:
        return order

    def exhausted(self) -> None:
        if self._draw_end is not None and self._generator is not None:
            self._draw_end(self._sampler, self._generator)

    def predict(self, epoch: int, base_seed: bool) -> NextOrder:
        after, sampler, draw, draw_end = self._after, self._sampler, self._draw, self._draw_end
        # Other code may draw from torch's global generator until then.
        if after is None:
            return _unknown

        def compute() -> Int64s:
            generator = torch.Generator()
            generator.set_state(after)
            if draw_end is not None:
                draw_end(sampler, generator)
            if base_seed:
                _draw_seed(generator)
            return draw(sampler, generator)

        return compute

    def state(self) -> dict[str, Any]:
        state = self._before if self._restored is None else self._restored
        return {"generator": state, "own_generator": self._generator is not None}

    def restore(self, state: dict[str, Any]) -> None:
        self._restored = state["generator"]

    @property
    def _generator(self) -> torch.Generator | None:
        generator: torch.Generator | None = self._sampler.generator
        return generator


def order_of(sampler: Any) -> SamplerOrder | None:
    """Return the order of a sampler; None if it is not known beforehand."""
    if isinstance(sampler, EpochSampler):
        return EpochOrder(sampler)
    if isinstance(sampler, DistributedSampler):
        return DistributedOrder(sampler)
    kind = type(sampler)
    if kind is SequentialSampler or isinstance(sampler, (list, tuple, range, np.ndarray)):
        return FixedOrder(sampler)
    if kind is RandomSampler:
        if sampler.replacement or sampler.num_samples > len(sampler.data_source):
            return None
        return GeneratorOrder(sampler, _draw_permutation, _draw_permutation_end)
    if kind is SubsetRandomSampler:
        if not isinstance(sampler.indices, (list, tuple, range)):
            return None
        if _whole_numbers(np.asarray(sampler.indices)) is None:
            return None
        return GeneratorOrder(sampler, _draw_subset)
    if kind is WeightedRandomSampler and sampler.weights.device.type == "cpu":
        return GeneratorOrder(sampler, _draw_weighted)
    return None


def order_of_batches(batch_sampler: Any) -> SamplerOrder | None:
    """Return the order of a batch sampler; None if it is not known beforehand.

    It is known for a sequence of batches (each iteration gives the same ones), and for torch's own
    BatchSampler over a sampler that ``order_of`` knows.
    """
    if type(batch_sampler) is BatchSampler:
        return order_of(batch_sampler.sampler)
    if isinstance(batch_sampler, Sequence):
        return FixedOrder(batch_sampler, batches=True)
    return None


def array_of(indices: Int64s | range) -> Int64s:
    """Return indices as an int64 array."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    return indices


def _integers(indices: Int64s | range) -> Iterator[int]:
    """Yield plain integers, as torch's samplers do."""
    for start in range(0, len(indices), _CHUNK_COUNT):
        yield from array_of(indices[start : start + _CHUNK_COUNT]).tolist()


def integers_of(order: SamplerOrder, indices: Int64s | range) -> Iterator[int]:
    """Yield the items that a sampler of this order hands out."""
    yield from _integers(indices)
    order.exhausted()


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _unknown() -> Int64s | None:
    return None


def _whole_numbers(values: NDArray[Any]) -> Int64s | None:
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        return None
    return values.astype(np.int64, copy=False)


def _draw_seed(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _draw_permutation(sampler: Any, generator: torch.Generator) -> Int64s:
    if sampler.generator is None:
        seed = _draw_seed(generator)
        generator = torch.Generator()
        generator.manual_seed(seed)
    n = len(sampler.data_source)
    order: Int64s = torch.randperm(n, generator=generator).numpy()
    return order[: sampler.num_samples]


def _draw_permutation_end(sampler: Any, generator: torch.Generator) -> None:
    # RandomSampler draws one permutation more than it needs whenever whole ones are enough.
    n = len(sampler.data_source)
    if sampler.generator is not None and sampler.num_samples == n:
        torch.randperm(n, generator=generator)


def _draw_subset(sampler: Any, generator: torch.Generator) -> Int64s:
    positions = torch.randperm(len(sampler.indices), generator=generator).numpy()
    order: Int64s = np.asarray(sampler.indices, dtype=np.int64)[positions]
    return order


def _draw_weighted(sampler: Any, generator: torch.Generator) -> Int64s:
    order: Int64s = torch.multinomial(
        sampler.weights, sampler.num_samples, sampler.replacement, generator=generator
    ).numpy()
    return order
