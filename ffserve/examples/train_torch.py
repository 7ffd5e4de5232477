"""Train a small model with PyTorch.

Two things concern ffserve: the dataset, whose ``process`` turns the bytes of a batch into tensors
in the worker processes, and the DataLoader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import ffserve.torch
from ffserve.examples.next_byte import (
    BATCH_COUNT,
    CONTEXT,
    Batch,
    cut_windows,
    files_in,
    parse_arguments,
    train,
)


class SourceFiles(ffserve.torch.Dataset):
    """Some windows of each source file, and the file's size."""

    def process(self, indices: Sequence[int], data: list[NDArray[np.uint8]]) -> Any:
        """Turn the bytes of a batch into training examples; runs in the workers."""
        return [
            (cut_windows(index, sample), len(sample))
            for index, sample in zip(indices, data, strict=True)
        ]


def epochs(files: list[str], workers: int) -> Iterator[Iterable[Batch]]:
    """Yield the same loader again and again; each iteration has a new order."""
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
        """Learn from windows; return the loss in bits per byte before learning."""
        windows = windows.reshape(-1, CONTEXT + 1)
        self.optimizer.zero_grad()
        loss = self.loss(self.network(windows[:, :-1]), windows[:, -1])
        loss.backward()
        self.optimizer.step()
        return float(loss.detach()) / math.log(2)


def main() -> None:
    """Train on the files in a directory."""
    options = parse_arguments(__doc__)
    train(
        Model().step, epochs(files_in(options.data), options.workers), options,
        framework="PyTorch", workers=options.workers,
    )  # fmt: skip


if __name__ == "__main__":
    main()
