"""The torch side of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import ffserve.torch
from ffserve.bench.contestant import Case, Delivered

WORKERS = 2
BUNDLE_COUNT, BUNDLE_SIZE = 32, 8 << 20
ENOUGH = 4096
"""Samples that the data set in memory really has; its indices wrap around."""


def tensors_of(samples: list[Any]) -> list[torch.Tensor]:
    """What a user's `process` may do."""
    return [torch.from_numpy(sample) for sample in samples]


class Tensors(ffserve.torch.Dataset):
    """A tensor a sample."""

    def process(self, indices: list[int], data: list[Any]) -> list[Any]:
        """Make tensors."""
        return tensors_of(data)


class InMemory(torch.utils.data.Dataset[Any]):
    """The same tensors from samples that lie in the workers' memory."""

    def __init__(self, count: int, step: int) -> None:
        self.count = count
        self.table = np.ones((min(count, ENOUGH), step), np.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return tensors_of([self.table[k % len(self.table)].copy() for k in indices])


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _loader(case: Case, dataset: Any, **options: Any) -> Any:
    # As many batches a message as the loader itself would choose for a dataset that it knows. The
    # workers stay: an epoch of these data takes a tenth of a second, starting them half that.
    bundle = max(1, min(BUNDLE_COUNT, BUNDLE_SIZE // (case["batch"] * case["step"])))
    return ffserve.torch.DataLoader(
        dataset,
        batch_size=case["batch"],
        shuffle=True,
        num_workers=WORKERS,
        bundle=bundle,
        persistent_workers=True,
        **options,
    )


def raw(case: Case) -> Delivered:
    """Raw samples to the training process, shuffled, no collation."""
    for samples in _endless(_loader(case, ffserve.torch.Dataset(case["paths"]), collate_fn=list)):
        yield len(samples), sum(len(sample) for sample in samples)


def tensors(case: Case) -> Delivered:
    """Tensors, collated by torch."""
    for batch in _endless(_loader(case, Tensors(case["paths"]))):
        yield len(batch), batch.nbytes


def tensors_in_memory(case: Case) -> Delivered:
    """The yardstick of `tensors`."""
    for batch in _endless(_loader(case, InMemory(case["count"], case["step"]))):
        yield len(batch), batch.nbytes
