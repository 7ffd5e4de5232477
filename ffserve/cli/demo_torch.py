"""A training job with PyTorch, as one writes it for ffserve.

All that concerns ffserve is the dataset, whose ``process`` turns the bytes of a batch into
tensors inside the worker processes, and the DataLoader. Nothing names the daemon: it is found by
its socket, and without one the same lines read the files directly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import ffserve.torch
from ffserve.cli.demo_job import BATCH_COUNT, CONTEXT, Batch, cut_windows


class SourceFiles(ffserve.torch.Dataset):
    """A few windows out of each source file, and the file's size."""

    def process(self, indices: Sequence[int], data: list[NDArray[np.uint8]]) -> Any:
        """Turn the bytes of a batch into what the model learns from; runs in the workers."""
        return [
            (cut_windows(index, sample), len(sample))
            for index, sample in zip(indices, data, strict=True)
        ]


def epochs(files: list[str], workers: int) -> Iterator[Iterable[Batch]]:
    """Yield the same loader again and again; each time it is read in a new order."""
    loader = ffserve.torch.DataLoader(
        SourceFiles(files),
        batch_size=BATCH_COUNT,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(0),
    )
    while True:
        yield loader


class Model:
    """Embedding, one hidden layer, softmax over the 256 bytes; Adam."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.network = torch.nn.Sequential(
            torch.nn.Embedding(256, 16),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * CONTEXT, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 256),
        )
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=3e-3)
        self.loss = torch.nn.CrossEntropyLoss()

    def step(self, windows: torch.Tensor) -> float:
        """Learn from windows; return the loss in bits a byte before that."""
        windows = windows.reshape(-1, CONTEXT + 1)
        self.optimizer.zero_grad()
        loss = self.loss(self.network(windows[:, :-1]), windows[:, -1])
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()) / math.log(2)
