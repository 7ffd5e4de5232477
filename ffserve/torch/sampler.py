"""A sampler whose order is known beforehand and whose position can be saved.

With workers, a sampler is asked for indices long before the training loop gets their
batches, so a count of what was drawn says too much. ``ffserve.torch.DataLoader``
therefore ``follow``s the sampler: it reports each batch when it hands it to the loop, and
``state_dict`` then tells what was used, not what was drawn.

A position is a pair: ``split_at`` of the whole order's samples were used when it was last split
among ranks (0 unless an epoch was restored into another number of ranks), and ``position`` of this
rank's since. So with W ranks split_at + W position samples are used, which any other number of
ranks can go on from.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from ffserve.errors import UsageError
from ffserve.order import epoch_order, rank_sample_count, shared_seed

_IDENTITY = ("n", "shuffle", "window", "shared")
_COUNTS = ("seed", "world_size", "epoch", "split_at", "position")
_CHUNK = 4096
_MOST_NAME = 180
_ORDERS_KEPT = 2
"""The current epoch's, and the next one's when it was announced."""


class EpochSampler(torch.utils.data.Sampler[int]):
    """Draw the indices of one rank's epoch in the order of ``ffserve.order.epoch_order``.

    Call ``set_epoch`` before each epoch, as with torch's DistributedSampler; without it every
    epoch has the same order. ``len(sampler)`` is the whole epoch's count also after a restore.

    Args:
        n: number of samples in the dataset.
        seed: integer from 0; the same on every rank.
        shuffle: False keeps the order of the dataset.
        rank: this process, 0 … world_size-1.
        world_size: processes that share an epoch; each gets the same number of samples.
        window: shuffle only so many samples with one another, so that neighbours are read
            together (``epoch_order`` tells what it costs); None shuffles all.
        shared: a name. All samplers of this name have the same order whatever their own seed, and
            announce it under the name: jobs of a sweep then read each sample once together.
    Raises:  UsageError for an argument outside its range.
    """

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
    ) -> None:
        epoch_order(0, seed=seed, epoch=0, rank=rank, world_size=world_size, window=window)
        if n < 0:
            raise UsageError(f"n is {n}, but a number of samples is needed")
        if shared is not None and not (isinstance(shared, str) and 0 < len(shared) <= _MOST_NAME):
            raise UsageError(
                f"shared is {shared!r}, but a name of 1 to {_MOST_NAME} characters is needed"
            )
        self.n = int(n)
        self.seed = int(seed)
        self.shuffle = bool(shuffle)
        self.rank = int(rank)
        self.world_size = int(world_size)
        self.window = None if window is None else int(window)
        self.shared = shared
        self.epoch = 0
        self._split_at = 0
        self._position = 0
        self._restored: tuple[int, int] | None = None
        self._run = 0
        self._followed = False
        self._orders: dict[tuple[int, int], NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return rank_sample_count(self.n, self.world_size)

    def __iter__(self) -> Iterator[int]:
        # All of it runs at the first next(): torch's multi-process iterator calls iter() twice.
        followed = self._followed
        rest = self.rest()
        start, run = self._position, self._run
        for chunk_start in range(0, len(rest), _CHUNK):
            chunk = rest[chunk_start : chunk_start + _CHUNK].tolist()
            for drawn, index in enumerate(chunk, start + chunk_start + 1):
                if not followed:
                    self.handed_out(run, drawn)
                yield index

    def rest(self) -> NDArray[np.int64]:
        """Begin the iteration that ``follow`` announced; return all that it hands out, for who
        reports it: ``order()`` from the position on. Not to be written to.
        """
        if not self._followed:
            self._begin()
        self._followed = False
        self._restored = None
        return self.order()[self._position :]

    @property
    def restored(self) -> bool:
        """Whether the next iteration goes on inside an epoch, at a restored position."""
        return self._restored not in (None, (0, 0))

    @property
    def position(self) -> int:
        """How many samples of ``order()`` were used."""
        return self._position

    @property
    def order_name(self) -> str | None:
        """The name that this rank's order is announced under: that of ``shared``."""
        if self.shared is None or self.world_size == 1:
            return self.shared
        return f"{self.shared}/{self.rank}"

    def order(self, epoch: int | None = None) -> NDArray[np.int64]:
        """Return this rank's order of an epoch.

        Args:    epoch: None for the current one; of this, only what is behind ``split_at`` if it
            was restored into another number of ranks.
        Returns: int64[len(self)], less for the rest of an epoch; kept for a while; not to be
            written to.
        Cost:    one ``epoch_order`` an epoch.
        """
        split_at = self._split_at if epoch is None else 0
        key = (self.epoch if epoch is None else epoch, split_at)
        order = self._orders.get(key)
        if order is None:
            order = epoch_order(
                self.n,
                seed=self.seed if self.shared is None else shared_seed(self.shared),
                epoch=key[0],
                shuffle=self.shuffle,
                rank=self.rank,
                world_size=self.world_size,
                window=self.window,
                start=split_at,
            )
            order.flags.writeable = False
            kept = list(self._orders.items())[1 - _ORDERS_KEPT :]
            self._orders = dict([*kept, (key, order)])
        return order

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows.

        Args: epoch: integer from 0. The current one is no change, so a position that
            was just restored into this epoch stays; any other epoch starts at its beginning.
        Raises: UsageError for a negative epoch.
        """
        epoch_order(0, seed=self.seed, epoch=epoch)
        if epoch != self.epoch:
            self.epoch = int(epoch)
            self._move_to(0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on here later.

        Returns: a dict of plain values. ``position`` is the number of this rank's samples
            that were used: exactly those handed to the training loop when
            ``ffserve.torch.DataLoader`` draws from the sampler; those drawn when something
            else does (torch's own loader draws ahead of the loop when it has workers).
        """
        state: dict[str, Any] = {
            name: getattr(self, name) for name in (*_IDENTITY, "seed", "world_size", "epoch")
        }
        return {**state, "split_at": self._split_at, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was called: the next iteration starts behind its position.

        All ranks of a job stand at the same position when it is saved, so the state of one serves
        all. With another world size the samples that none of the saved ranks used are split anew:
        each is used once more by exactly one rank, but for the first ones of the whole order, of
        which fewer than the world size are used a second time to give every rank as many.

        Args: state: from a sampler with the same n, shuffle, window, and seed or shared name; rank
            and world size may be others.
        Raises: UsageError for a state of another sampler, naming what differs.
        """
        missing = [key for key in (*_IDENTITY, *_COUNTS) if key not in state]
        if missing:
            raise UsageError(f"this is no state of an EpochSampler: it lacks {', '.join(missing)}")
        # A shared order has its seed from its name.
        for name in (*_IDENTITY, *(("seed",) if self.shared is None else ())):
            if state[name] != getattr(self, name):
                raise UsageError(
                    f"the state was saved with {name}={state[name]}, "
                    f"but this sampler has {name}={getattr(self, name)}",
                    hint="its position means other samples here; "
                    "build the sampler as the saved one was",
                )
        world_size, split_at, position = (
            _count(name, state[name]) for name in ("world_size", "split_at", "position")
        )
        if world_size == 0 or split_at > self.n:
            raise UsageError(
                f"this is no state of an EpochSampler: its world_size is {world_size}, "
                f"its split_at is {split_at} of {self.n}"
            )
        count = rank_sample_count(self.n - split_at, world_size)
        if position > count:
            raise UsageError(f"position {position} is outside an epoch of {count} samples")
        if world_size != self.world_size:
            split_at, position = min(self.n, split_at + position * world_size), 0
        self.set_epoch(state["epoch"])
        self._move_to(split_at, position)

    def follow(self) -> int:
        """Announce that a loader will report what it hands out of the next iteration.

        Returns: the run's number, for ``handed_out``.
        """
        self._begin()
        self._followed = True
        return self._run

    def handed_out(self, run: int, position: int) -> None:
        """Note that the order's first ``position`` samples are used; an older run is ignored."""
        if run == self._run:
            self._position = position

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}

    def _begin(self) -> None:
        self._run += 1
        self._split_at, self._position = self._restored or (0, 0)

    def _move_to(self, split_at: int, position: int) -> None:
        self._run += 1
        self._followed = False
        self._restored = self._split_at, self._position = split_at, position


def _count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"the state's {name} is {value!r}, but a number from 0 is needed")
    return number
