"""A dataset that prepares its samples and logs which. As a program: `preparing.py LOG PAUSE_MS
BATCH FILE…` reads all samples in order, and writes a digest of what it got."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ffserve.torch import Dataset

try:
    preparing = importlib.import_module("ffserve.client.daemon.preparing")
except ImportError:  # an earlier release (tests/upgrades)
    preparing = importlib.import_module("ffserve.client.prepared")


class Prepared(Dataset):
    """Samples of floats and a label; each preparation is a line of a file.

    Args: log: the file. pause_s: how long the preparation of a sample takes.
    """

    prepare_version = "1"

    def __init__(self, fnames: Any, log: str, pause_s: float = 0.0) -> None:
        super().__init__(fnames)
        self.log = log
        self.pause_s = pause_s

    def prepare(self, indices: Sequence[int], data: Any) -> list[Any]:
        """Note the indices; make tensors."""
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, b"".join(b"%d\n" % index for index in indices))
        os.close(fd)
        time.sleep(self.pause_s * len(indices))
        return [
            (torch.from_numpy(sample.astype(np.float32)), index)
            for sample, index in zip(data, indices, strict=True)
        ]

    def process(self, indices: Sequence[int], data: list[Any]) -> list[Any]:
        """Add something that is not prepared."""
        return [(tensor + 1, label) for tensor, label in data]


def same(one: Any, other: Any) -> bool:
    """Whether two samples are equal, types included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    return bool(one == other)


def digest(samples: list[Any]) -> str:
    """Return a digest of what `process` returned."""
    found = hashlib.sha256()
    for tensor, label in samples:
        found.update(tensor.numpy().tobytes() + b"%d" % label)
    return found.hexdigest()


def prepared(log: str) -> list[int]:
    """Return which samples were prepared, in order."""
    try:
        with open(log) as file:
            return [int(line) for line in file]
    except FileNotFoundError:
        return []


def main() -> None:
    """Read everything; see the module's text."""
    log, pause_ms, batch, *files = sys.argv[1:]
    # Nothing is prepared again to be compared.
    preparing.CHECKED_EVERY = 1 << 60
    dataset = Prepared(files, log, int(pause_ms) / 1000)
    print("ready", flush=True)
    samples: list[Any] = []
    for first in range(0, len(dataset), int(batch)):
        samples += dataset[list(range(first, min(first + int(batch), len(dataset))))]
    print(digest(samples), flush=True)


if __name__ == "__main__":
    main()
