"""The training job of ``ffserve demo``: predict the next byte of source code from those before.

One sample is one source file; a few windows are cut out of each. ``demo_torch.py`` is the job
as one writes it with PyTorch, and the example to read; ``demo_numpy.py`` has the same shape and
runs where there is no torch.

Run by itself: ``python -m ffserve.cli.demo_job --data DIR``. It writes one JSON object a line.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import json
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

CONTEXT = 8
"""Bytes that the model sees before the one it predicts."""
WINDOWS = 16
"""Windows cut out of every sample."""
BATCH_COUNT = 64
REPORT_EVERY_S = 0.2

Batch: TypeAlias = tuple[Any, Any]
"""Windows, int64[samples, WINDOWS, CONTEXT + 1], and the sizes of the samples in bytes."""


def cut_windows(index: int, sample: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Cut windows out of a sample at random places, which depend on its index only.

    Args:    sample: uint8[any]; one that is too short for a window is filled up with zeros.
    Returns: int64[WINDOWS, CONTEXT + 1].
    """
    if len(sample) <= CONTEXT:
        sample = np.concatenate([sample, np.zeros(CONTEXT + 1 - len(sample), np.uint8)])
    windows = np.lib.stride_tricks.sliding_window_view(sample, CONTEXT + 1)
    places = np.random.default_rng(index).integers(0, len(windows), WINDOWS)
    return windows[places].astype(np.int64)


def shards_in(directory: str) -> list[str]:
    """Return the shards in a directory, in order."""
    return sorted(glob.glob(os.path.join(glob.escape(directory), "*.ffr")))


class Model(Protocol):
    """What both models can do."""

    def step(self, windows: Any) -> float:
        """Learn from one batch; return its loss in bits a byte before learning."""
        ...


def say(**facts: Any) -> None:
    """Write one line for whoever started this job."""
    print(json.dumps(facts), flush=True)


def train(model: Model, epochs: Iterator[Iterable[Batch]], epoch_count: int) -> None:
    """Run the epochs and report on each."""
    for epoch in range(epoch_count):
        started = spoke = time.monotonic()
        samples = size = 0
        losses: list[float] = []
        for windows, sizes in next(epochs):
            losses.append(model.step(windows))
            samples += len(sizes)
            size += int(sizes.sum())
            if time.monotonic() - spoke > REPORT_EVERY_S:
                spoke = time.monotonic()
                say(event="step", epoch=epoch, samples=samples)
        tenth = max(1, len(losses) // 10)
        say(
            event="epoch",
            epoch=epoch,
            samples=samples,
            size_bytes=size,
            seconds=time.monotonic() - started,
            first_loss=float(np.mean(losses[:tenth])) if losses else None,
            last_loss=float(np.mean(losses[-tenth:])) if losses else None,
        )


def main() -> None:
    """Train on the shards in a directory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="directory of .ffr shards")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-torch", action="store_true", help="train with numpy")
    options = parser.parse_args()

    files = shards_in(options.data)
    if not options.no_torch and importlib.util.find_spec("torch") is not None:
        from ffserve.cli import demo_torch

        say(event="start", framework="PyTorch", workers=options.workers)
        train(demo_torch.Model(), demo_torch.epochs(files, options.workers), options.epochs)
    else:
        from ffserve.cli import demo_numpy

        say(event="start", framework="numpy", workers=0)
        train(demo_numpy.Model(), demo_numpy.epochs(files), options.epochs)


if __name__ == "__main__":
    main()
