"""The task of the training examples: predict the next byte of source code from those before it.

A sample is a source file, of which a batch takes some windows. `run` has what both examples share:
arguments, the loop over epochs, and its report.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

CONTEXT = 8
"""Bytes that the model sees before the one it predicts."""
WINDOWS = 16
"""Windows per sample."""
BATCH_COUNT = 64

Batch: TypeAlias = tuple[Any, Any]
"""Windows, int64[samples, WINDOWS, CONTEXT + 1], and the bytes of each sample."""
Step: TypeAlias = Callable[[Any], float]
"""Learns from the windows of a batch and returns its loss in bits per byte before learning."""


def cut_windows(index: int, sample: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Cut windows out of a sample at random positions, which depend on its index only.

    Args:    sample: uint8[any]; one shorter than a window is padded with zeros.
    Returns: int64[WINDOWS, CONTEXT + 1].
    """
    if len(sample) <= CONTEXT:
        sample = np.concatenate([sample, np.zeros(CONTEXT + 1 - len(sample), np.uint8)])
    windows = np.lib.stride_tricks.sliding_window_view(sample, CONTEXT + 1)
    starts = np.random.default_rng(index).integers(0, len(windows), WINDOWS)
    return windows[starts].astype(np.int64)


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line of a training example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("data", help="directory of record files, such as 'ffserve pack' makes")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="DataLoader workers (PyTorch only)")
    parser.add_argument("--json", action="store_true", help="report as lines of JSON")
    return parser.parse_args()


def files_in(directory: str) -> list[str]:
    """Return the .ffr files in a directory, in order."""
    return sorted(glob.glob(os.path.join(glob.escape(directory), "*.ffr")))


def train(
    step: Step, epochs: Iterator[Iterable[Batch]], options: argparse.Namespace, **facts: Any
) -> None:
    """Train for some epochs and report on each.

    Args:
        step: trains on a batch.
        epochs: yields the batches of one epoch after the other.
        facts: for the first line of the report: framework, workers.
    """

    def report(event: str, text: str | None, **figures: Any) -> None:
        if options.json:
            print(json.dumps({"event": event, **figures}), flush=True)
        elif text is not None:
            print(text, flush=True)

    report("start", f"training with {facts['framework']}", **facts)
    for epoch in range(options.epochs):
        started = reported = time.monotonic()
        samples = size = 0
        losses: list[float] = []
        for windows, sizes in next(epochs):
            losses.append(step(windows))
            samples += len(sizes)
            size += int(sizes.sum())
            if time.monotonic() - reported > 0.2:
                reported = time.monotonic()
                report("step", None, epoch=epoch, samples=samples)
        seconds = time.monotonic() - started
        tenth = max(1, len(losses) // 10)
        first, last = (
            (float(np.mean(losses[:tenth])), float(np.mean(losses[-tenth:])))
            if losses
            else (0.0, 0.0)
        )
        report(
            "epoch",
            f"epoch {epoch + 1}: {samples:,} samples, {size:,} bytes in {seconds:.1f} s, "
            f"loss {first:.2f} → {last:.2f} bits per byte",
            epoch=epoch, samples=samples, size_bytes=size, seconds=seconds,
            first_loss=first, last_loss=last,
        )  # fmt: skip
