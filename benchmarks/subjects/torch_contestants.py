"""Contestants that read through a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import ffserve.torch
from ffserve.bench.ceilings import Case, Delivered

WORKERS = 2
BUNDLE_COUNT, BUNDLE_SIZE = 32, 8 << 20
"""Batches per message, at most so many bytes: the loader's own choice for a dataset of ffserve."""
IN_MEMORY_COUNT = 4096
"""Samples of the data set in memory; indices wrap around."""


def same(samples: list[Any]) -> list[Any]:
    """Return raw samples as they are; see `_raw_loading`."""
    return samples


def tensors_of(samples: list[Any]) -> list[torch.Tensor]:
    """Make a tensor of each sample."""
    return [torch.from_numpy(sample) for sample in samples]


class Raw(ffserve.torch.Dataset):
    """Raw samples; see `_raw_loading`."""

    def process(self, indices: list[int], data: list[Any]) -> list[Any]:
        """Return raw samples as they are."""
        return data


class Tensors(ffserve.torch.Dataset):
    """A tensor per sample."""

    def process(self, indices: list[int], data: list[Any]) -> list[Any]:
        """Make tensors."""
        return tensors_of(data)


class InMemory(torch.utils.data.Dataset[Any]):
    """The same tensors from samples in the workers' memory."""

    def __init__(self, count: int, sample_size: int) -> None:
        self.count = count
        self.table = np.ones((min(count, IN_MEMORY_COUNT), sample_size), np.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return tensors_of([self.table[k % len(self.table)].copy() for k in indices])


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _loader(case: Case, dataset: Any, **options: Any) -> Any:
    # The workers persist: an epoch takes a tenth of a second, starting them half of that.
    bundle = max(1, min(BUNDLE_COUNT, BUNDLE_SIZE // (case["batch"] * case["sample_size"])))
    return ffserve.torch.DataLoader(
        dataset,
        batch_size=case["batch"],
        shuffle=True,
        num_workers=WORKERS,
        bundle=bundle,
        persistent_workers=True,
        **options,
    )


def _raw_loading(paths: list[str]) -> tuple[ffserve.torch.Dataset, Any]:
    """Return the dataset and the collation with which the loader sends raw batches.

    Older checkouts recognize a `process` and a collation that return their argument.
    """
    if hasattr(ffserve.torch, "RawDataset"):
        return ffserve.torch.RawDataset(paths), list
    return Raw(paths), same


def raw(case: Case) -> Delivered:
    """Bring raw samples to the training process, shuffled, without collation."""
    dataset, collate = _raw_loading(case["paths"])
    for samples in _endless(_loader(case, dataset, collate_fn=collate)):
        yield len(samples), sum(len(sample) for sample in samples)


def tensors(case: Case) -> Delivered:
    """Bring tensors, collated by torch."""
    for batch in _endless(_loader(case, Tensors(case["paths"]))):
        yield len(batch), batch.nbytes


def tensors_in_memory(case: Case) -> Delivered:
    """Bring tensors of samples in the workers' memory: the yardstick of `tensors`."""
    for batch in _endless(_loader(case, InMemory(case["count"], case["sample_size"]))):
        yield len(batch), batch.nbytes
