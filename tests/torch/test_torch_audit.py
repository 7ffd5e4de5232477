"""loader_audit: intact loaders of every kind pass, and each fault is found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch_cases as cases
from torch.utils.data import RandomSampler, TensorDataset

import ffserve.torch
from ffserve.errors import UsageError
from ffserve.testing import LoaderAudit, loader_audit
from ffserve.torch import EpochSampler, Mixture

N = 200
LOADERS = {"torch": torch.utils.data.DataLoader, "ffserve": ffserve.torch.DataLoader}


@pytest.mark.parametrize("kind", list(LOADERS))
@pytest.mark.parametrize("workers", [0, 2])
def test_intact_loaders(kind: str, workers: int) -> None:
    dataset = TensorDataset(torch.arange(N), torch.rand(N, 3))
    loader = LOADERS[kind](dataset, batch_size=10, shuffle=True, num_workers=workers)
    audit = loader_audit(loader)
    assert audit.intact and (audit.samples, audit.batches) == (N, 20)
    assert (audit.repeated, audit.unvisited) == (0, 0)
    assert 0.8 < audit.displacement < 1.2 and audit.design_effect < 2.5
    assert "lost: 0\n" in str(audit) and "displacement" in str(audit)
    in_order = loader_audit(LOADERS[kind](dataset, batch_size=10, num_workers=workers))
    assert in_order.intact and in_order.displacement == 0
    assert in_order.together > 15 and in_order.design_effect > 9


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"threads": 2}, {"bundle": 3}])
def test_epoch_samplers_and_mixtures(options: dict[str, Any]) -> None:
    if "bundle" in options:
        options = {**options, "num_workers": 1}
    sampler = EpochSampler(N, seed=1, rank=1, world_size=3)
    loader = ffserve.torch.DataLoader(cases.Numbers(N), batch_size=8, sampler=sampler, **options)
    for _ in islice(loader, 3):
        pass
    loader.load_state_dict(loader.state_dict())
    audit = loader_audit(loader)
    assert audit.intact and audit.samples == 67 - 24 and audit.unvisited == N - 43
    mixture = Mixture([cases.Numbers(30), cases.Numbers(50)], repeats=[3, 0.5], seed=0)
    audit = loader_audit(
        ffserve.torch.DataLoader(mixture, batch_size=8, sampler=mixture.sampler(), **options)
    )
    assert audit.intact and (audit.repeated, audit.unvisited) == (60, 25)


class Faulty(torch.utils.data.DataLoader):
    """Loses its third batch, gives its fifth twice, and exchanges the last two."""

    def __iter__(self) -> Iterator[Any]:
        batches = list(super().__iter__())
        batches[2:3] = []
        batches.insert(4, batches[3])
        batches[-1], batches[-2] = batches[-2], batches[-1]
        return iter(batches)


def test_faults_are_found() -> None:
    loader = Faulty(cases.Single(40), batch_size=4)
    audit = loader_audit(loader)
    assert not audit.intact
    assert audit.lost == [8, 9, 10, 11] and audit.doubled == [16, 17, 18, 19]
    # 12 … 19 came a batch early, and the last two batches are exchanged.
    assert audit.out_of_order == 16
    assert "lost: 4 (8, 9, 10, 11)" in str(audit)


def test_what_the_sampler_itself_repeats_is_no_fault() -> None:
    sampler = RandomSampler(range(30), replacement=True, num_samples=60)
    audit = loader_audit(torch.utils.data.DataLoader(cases.Single(30), sampler=sampler))
    assert audit.intact and audit.repeated >= 30
    assert audit.displacement is None, "batches of one"


@pytest.mark.parametrize("kind", list(LOADERS))
def test_loaders_without_batches_or_indexed_by_lists(kind: str) -> None:
    loader = LOADERS[kind](cases.Single(12), batch_size=None, sampler=[3, 1, 4])
    assert loader_audit(loader).intact
    lists = LOADERS[kind](np.arange(12), batch_size=None, sampler=[[3, 1], [4]])
    assert loader_audit(lists).samples == 3
    assert loader_audit(LOADERS[kind](cases.Single(12), batch_sampler=[[5, 2], [7]])).intact


def test_a_list_only_dataset() -> None:
    loader = ffserve.torch.DataLoader(cases.ListOnly(9), batch_size=4, by_list=True)
    assert loader_audit(loader) == LoaderAudit(9, 3, [], [], 0, 0, 0, 0.0, *loader_audit_of_9())


def loader_audit_of_9() -> tuple[float, float]:
    audit = loader_audit(torch.utils.data.DataLoader(cases.Single(9), batch_size=4))
    assert audit.together is not None and audit.design_effect is not None
    return audit.together, audit.design_effect


def test_streams_cannot_be_audited() -> None:
    with pytest.raises(UsageError, match="IterableDataset"):
        loader_audit(torch.utils.data.DataLoader(cases.Stream()))
