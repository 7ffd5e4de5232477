"""Train a small model with numpy: a reader, a random order, batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

import ffserve
from ffserve.examples.next_byte import (
    BATCH_COUNT,
    Batch,
    cut_windows,
    files_in,
    parse_arguments,
    train,
)


def epochs(files: list[str]) -> Iterator[Iterable[Batch]]:
    """Yield one epoch after the other, each in a different order."""
    with ffserve.open(files) as reader:
        epoch = 0
        while True:
            yield _batches(reader, np.random.default_rng(epoch).permutation(len(reader)))
            epoch += 1


def _batches(reader: ffserve.Reader, order: NDArray[np.int64]) -> Iterator[Batch]:
    for first in range(0, len(order), BATCH_COUNT):
        indices = order[first : first + BATCH_COUNT]
        samples = reader.read(indices)
        windows = [cut_windows(int(i), sample) for i, sample in zip(indices, samples, strict=True)]
        yield np.stack(windows), np.array([len(sample) for sample in samples])


class NumpyModel:
    """Softmax over the next byte given the last one: a table of 256 by 256, AdaGrad."""

    def __init__(self) -> None:
        self.table = np.zeros((256, 256))
        self.squares = np.full((256, 256), 1e-8)

    def step(self, windows: NDArray[np.int64]) -> float:
        """Learn from windows; return the loss in bits per byte before learning."""
        before, target = windows[..., -2].ravel(), windows[..., -1].ravel()
        scores = self.table[before]
        scores -= scores.max(axis=1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(axis=1, keepdims=True)
        rows = np.arange(len(target))
        loss = -np.log2(shares[rows, target] + 1e-12).mean()
        shares[rows, target] -= 1
        gradient = np.zeros_like(self.table)
        np.add.at(gradient, before, shares)
        self.squares += gradient**2
        self.table -= 0.5 * gradient / np.sqrt(self.squares)
        return float(loss)


def main() -> None:
    """Train on the files in a directory."""
    options = parse_arguments(__doc__)
    train(NumpyModel().step, epochs(files_in(options.data)), options, framework="numpy", workers=0)


if __name__ == "__main__":
    main()
