"""Mixture: several data sets as one, each with its share of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ffserve.mixture import MixtureOrder, Weights
from ffserve.order import checked_integer
from ffserve.torch.dataset import ConcatDataset
from ffserve.torch.samplers import MixtureSampler


class Mixture(ConcatDataset):
    """Several data sets as one, and how many samples of each make up an epoch.

    As a data set it is the ConcatDataset of the others: each sample has one index. ``sampler``
    gives the order that takes the shares::

        mixture = Mixture([web, books], weights=[0.7, 0.3], seed=7)
        loader = DataLoader(mixture, batch_size=64, sampler=mixture.sampler(rank, world_size))

    At most one of weights, repeats and samples is given; none of them takes each sample once.
    Without replacement: in an epoch no sample of a data set comes again before all have come, and
    of a data set that is used in part, consecutive epochs use parts that have nothing in common
    until it is used up.

    Args:
        datasets: as for ConcatDataset.
        weights: the share of each data set in an epoch, relative to their sum. Or a schedule: a
            dict from the epoch (or step) in which weights begin to apply to the weights; its first
            key is 0.
        repeats: how often each data set comes in an epoch: 2 is twice, 0.5 half of it.
        samples: how many samples of each data set come in an epoch.
        seed: integer from 0; the same on every rank.
        epoch_size: samples of an epoch, of all ranks; with weights only. None: as many as the data
            sets have together.
        schedule: what the keys of a schedule count: ``"epoch"``, or ``"step"``, the steps of all
            epochs from the first on.
        batch_size: samples of a step, of all ranks together. Each step has the shares to one
            sample. None: 256.
        floor: at least so many samples of each data set in each whole step; needs batch_size.
            Weights below a floor are raised to it, at the cost of the others.
    Raises:  ConcatError as ConcatDataset does; UsageError for shares that are out of range,
            contradict one another or give a data set no sample.
    """

    def __init__(
        self,
        datasets: Iterable[Any],
        *,
        weights: Weights | None = None,
        repeats: Sequence[float] | None = None,
        samples: Sequence[int] | None = None,
        seed: int,
        epoch_size: int | None = None,
        schedule: str = "epoch",
        batch_size: int | None = None,
        floor: Sequence[int] | None = None,
    ) -> None:
        super().__init__(datasets)
        self.seed = checked_integer("seed", seed, 1 << 128)
        self.mixture_order = MixtureOrder(
            [len(dataset) for dataset in self.datasets],
            weights=weights,
            repeats=repeats,
            samples=samples,
            epoch_size=epoch_size,
            schedule=schedule,
            batch_size=batch_size,
            floor=floor,
        )

    def counts(self, epoch: int = 0) -> list[int]:
        """Return how many samples of each data set an epoch has."""
        return self.mixture_order.counts(epoch)

    def sampler(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        window: int | None = None,
        shared: str | None = None,
        replication: int = 1,
    ) -> MixtureSampler:
        """Return the sampler of one rank, an EpochSampler over the mixture's epochs.

        Args: as for EpochSampler; each data set is shuffled within windows of its own.
        """
        return MixtureSampler(
            self.mixture_order,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            window=window,
            shared=shared,
            replication=replication,
        )
