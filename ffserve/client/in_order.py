"""In what pieces samples are read that are wanted in order, and how many are on their way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ffserve.client.source import Batch, Int64s
from ffserve.errors import FFServeError

READ_AHEAD_SIZE = 4 * 1024 * 1024
READ_AHEAD_COUNT = 1024
READ_AHEAD_BATCHES = 3
"""Iteration keeps this many batches of about this size on their way..."""
READ_AHEAD_SAMPLES = 512
READ_AHEAD_MOST = 8
"""... of smaller ones up to that many, if they are for fewer samples than this together: four times
the engine's depth, since half of what was asked for is on its way between the processes..."""
READ_AHEAD_MEMORY = 64 * 1024 * 1024
"""... and take less memory than this together."""
TOGETHER_COUNT, TOGETHER_SIZE = 512, 2 << 20
"""Small batches are asked for together, up to so many samples and bytes: a request costs the daemon
as much as fifty samples do..."""
TOGETHER_FIRST = 128
"""... but the first ones up to that many, and each of those that follow up to twice as many as the
one before it, since nobody is to wait for the first batch until 512 samples were read."""
SIZES_AT_ONCE = 65_536
"""Samples whose lengths are looked up together."""


def cut(numbers: Int64s, sizes: Int64s, count: int, size: int) -> Iterator[tuple[Int64s, int]]:
    """Cut into parts of at most `count` samples and about `size` bytes, at least one sample.

    Yields: the part and its bytes.
    """
    ends = np.cumsum(sizes)
    at = 0
    while at < len(numbers):
        before = int(ends[at - 1]) if at else 0
        upto = int(np.searchsorted(ends, before + size, side="right"))
        upto = min(max(upto, at + 1), at + count, len(numbers))
        yield numbers[at:upto], int(ends[upto - 1]) - before
        at = upto


def requests(
    parts: Iterable[tuple[Int64s, int]], count: int
) -> Iterator[tuple[list[Int64s], Int64s, int]]:
    """Yield one request after the other: the batches that it is for, of up to `count` samples each,
    all their samples, and how many requests such as it are kept on their way."""
    for some, total in together(parts):
        whole = some[0] if len(some) == 1 else np.concatenate(some)
        yield some, whole, batches_ahead(max(count, TOGETHER_COUNT), total)


def batches_ahead(count: int, size: int) -> int:
    """Return how many batches of up to `count` samples, the last of which has about `size` bytes,
    iteration keeps on their way."""
    wanted = min(-(-READ_AHEAD_SAMPLES // max(count, 1)), READ_AHEAD_MEMORY // max(size, 1))
    return min(max(wanted, READ_AHEAD_BATCHES), READ_AHEAD_MOST)


def together(parts: Iterable[tuple[Int64s, int]]) -> Iterator[tuple[list[Int64s], int]]:
    """Put neighbouring batches together that are small; `parts` and what is yielded: see `cut`."""
    some: list[Int64s] = []
    count = total = 0
    most = TOGETHER_FIRST
    for part, size in parts:
        if some and (count + len(part) > most or total + size > TOGETHER_SIZE):
            yield some, total
            some, count, total = [], 0, 0
            most = min(2 * most, TOGETHER_COUNT)
        some.append(part)
        count, total = count + len(part), total + size
    if some:
        yield some, total


def taken_apart(
    parts: list[Int64s], batch: Batch, failed: dict[int, FFServeError]
) -> Iterator[tuple[Int64s, Batch, dict[int, FFServeError]]]:
    """Yield each of the batches that were asked for together: its samples' numbers, the batch, a
    part of the whole one's buffer, and the errors by position in it."""
    if len(parts) == 1:
        yield parts[0], batch, failed
        return
    first = 0
    for part in parts:
        offsets = batch.offsets[first : first + len(part) + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        errors = {k - first: e for k, e in failed.items() if 0 <= k - first < len(part)}
        yield part, Batch(batch.buffer[low:high], offsets - low), errors
        first += len(part)
