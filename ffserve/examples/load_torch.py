"""Read record files through a PyTorch DataLoader: shuffled, in worker processes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

import ffserve.torch


class Beginnings(ffserve.torch.Dataset):
    """The first bytes of each sample as a tensor."""

    def process(self, indices: Sequence[int], data: list[NDArray[Any]]) -> list[torch.Tensor]:
        """Make a tensor of each sample; runs in the workers, once per batch."""
        tensors = []
        for sample in data:
            tensor = torch.zeros(64)
            tensor[: len(sample)] = torch.from_numpy(sample[:64]).float()
            tensors.append(tensor)
        return tensors


def main() -> None:
    """Read the files for some epochs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", help="record files, directories or patterns")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    dataset = Beginnings(options.paths)
    loader = ffserve.torch.DataLoader(
        dataset, batch_size=64, shuffle=True, num_workers=options.workers
    )
    for epoch in range(options.epochs):
        started = time.monotonic()
        count = sum(len(batch) for batch in loader)
        print(f"epoch {epoch + 1}: {count} samples in {time.monotonic() - started:.2f} s")


if __name__ == "__main__":
    main()
