"""A sampler whose order is known beforehand and whose position can be saved.

With workers, a sampler is asked for indices long before the training loop gets their
batches, so a count of what was drawn says too much. ``ffserve.torch.DataLoader``
therefore ``follow``s the sampler: it reports each batch when it hands it to the loop, and
``state_dict`` then tells what was used, not what was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray

from ffserve.errors import UsageError
from ffserve.order import epoch_order, rank_sample_count

_IDENTITY = ("n", "seed", "shuffle", "world_size")
_CHUNK = 4096


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
    Raises:  UsageError for an argument outside its range.
    """

    def __init__(
        self, n: int, *, seed: int, shuffle: bool = True, rank: int = 0, world_size: int = 1
    ) -> None:
        epoch_order(0, seed=seed, epoch=0, rank=rank, world_size=world_size)
        if n < 0:
            raise UsageError(f"n is {n}, but a number of samples is needed")
        self.n = int(n)
        self.seed = int(seed)
        self.shuffle = bool(shuffle)
        self.rank = int(rank)
        self.world_size = int(world_size)
        self.epoch = 0
        self._start = 0
        self._position = 0
        self._run = 0
        self._followed = False
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return rank_sample_count(self.n, self.world_size)

    def __iter__(self) -> Iterator[int]:
        # All of it runs at the first next(): torch's multi-process iterator calls iter() twice.
        order = self.order()
        start, self._start = self._start, 0
        followed, self._followed = self._followed, False
        if not followed:
            self._run += 1
            self._position = start
        run = self._run
        for chunk_start in range(start, len(order), _CHUNK):
            chunk = order[chunk_start : chunk_start + _CHUNK].tolist()
            for drawn, index in enumerate(chunk, chunk_start + 1):
                if not followed:
                    self.handed_out(run, drawn)
                yield index

    @property
    def start(self) -> int:
        """How many samples of the epoch the next iteration leaves out: 0 but after a restore."""
        return self._start

    def order(self) -> NDArray[np.int64]:
        """Return the whole order of this rank in the current epoch.

        Returns: int64[len(self)], kept until the epoch changes; not to be written to.
        Cost:    one ``epoch_order`` an epoch.
        """
        if self._order is None or self._order[0] != self.epoch:
            order = epoch_order(
                self.n,
                seed=self.seed,
                epoch=self.epoch,
                shuffle=self.shuffle,
                rank=self.rank,
                world_size=self.world_size,
            )
            order.flags.writeable = False
            self._order = (self.epoch, order)
        return self._order[1]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows.

        Args: epoch: integer from 0. The current one is no change, so a position that
            was just restored into this epoch stays; any other epoch starts at its beginning.
        Raises: UsageError for a negative epoch.
        """
        epoch_order(0, seed=self.seed, epoch=epoch)
        if epoch != self.epoch:
            self.epoch = int(epoch)
            self._order = None
            self._move_to(0)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on here later.

        Returns: a dict of plain integers and booleans. ``position`` is the number of this epoch's
            samples that were used: exactly those handed to the training loop when
            ``ffserve.torch.DataLoader`` draws from the sampler; those drawn when something
            else does (torch's own loader draws ahead of the loop when it has workers).
        """
        state: dict[str, Any] = {name: getattr(self, name) for name in _IDENTITY}
        return {**state, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was called: the next iteration starts behind its position.

        Args: state: from a sampler with the same n, seed, shuffle and world size; the rank may be
            another, since all ranks of a job stand at the same position.
        Raises: UsageError for a state of another sampler, naming what differs.
        """
        missing = [key for key in (*_IDENTITY, "epoch", "position") if key not in state]
        if missing:
            raise UsageError(f"this is no state of an EpochSampler: it lacks {', '.join(missing)}")
        for name in _IDENTITY:
            if state[name] != getattr(self, name):
                raise UsageError(
                    f"the state was saved with {name}={state[name]}, "
                    f"but this sampler has {name}={getattr(self, name)}",
                    hint="its position means other samples here; "
                    "build the sampler as the saved one was",
                )
        position = state["position"]
        if not 0 <= position <= len(self):
            raise UsageError(f"position {position} is outside an epoch of {len(self)} samples")
        self.set_epoch(state["epoch"])
        self._move_to(int(position))

    def follow(self) -> int:
        """Announce that a loader will report what it hands out of the next iteration.

        Returns: the run's number, for ``handed_out``.
        """
        self._run += 1
        self._followed = True
        self._position = self._start
        return self._run

    def handed_out(self, run: int, position: int) -> None:
        """Note that the epoch's first ``position`` samples are used; an older run is ignored."""
        if run == self._run:
            self._position = position

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def _move_to(self, position: int) -> None:
        self._run += 1
        self._followed = False
        self._start = self._position = position
