"""The order of an epoch as a pure function.

The order depends only on the arguments: not on a clock, a global generator or an earlier epoch.
Every process that knows (n, seed, epoch, rank, world size) knows the order: a restarted job,
another rank, the daemon that prefetches.

Random keys come from ``SeedSequence`` and ``PCG64.random_raw``, whose streams numpy keeps fixed
across releases (NEP 19, numpy's random number policy). ``Generator.permutation`` would be shorter,
but NEP 19 allows ``Generator`` methods to change between releases; a job resumed after an upgrade
would then silently repeat some samples and miss others. Instead, each index becomes the low bits
of a 64-bit word with random high bits, and the words are sorted. All words differ, so every sorting
algorithm returns the same order.
"""

from __future__ import annotations

import hashlib
import operator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Int64s
from ffserve.errors import UsageError

Part: TypeAlias = "tuple[int, int] | None"

MAX_SAMPLE_COUNT = 1 << 40
BLOCKS_PER_WINDOW = 32
"""Number of blocks of neighbours, from random positions, in each window of a windowed shuffle."""


def epoch_order(
    n: int,
    *,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    rank: int = 0,
    world_size: int = 1,
    window: int | None = None,
    start: int = 0,
) -> Int64s:
    """Return the sample indices that one rank visits in one epoch, in order.

    The ranks share one order of all n samples, the whole order. It is split as torch's
    DistributedSampler does by default: the whole order is continued from its own beginning until
    its length is a multiple of ``world_size``, and rank r takes positions r, r + world_size, … .
    So every rank gets ``rank_sample_count(n, world_size)`` samples, every sample is visited,
    and at most ``world_size - 1`` are visited twice (more often only if there are fewer samples
    than ranks). With n a multiple of ``world_size`` the ranks' slices are disjoint; with
    ``world_size=1`` the order is a bijection of 0 … n-1.

    With ``start``, the first ``start`` positions of the whole order count as used, by any number of
    ranks, and the rest is split in the same way: rank r takes positions start + r,
    start + r + world_size, … . After each of W ranks has used p samples, the first p W positions
    are used, so another number of ranks continues with ``start = min(n, p W)``.

    A windowed shuffle reads neighbours close together in time. The samples are split into blocks of
    window // 32 neighbours (at least one; the last block may be shorter), the blocks are put into
    random order, and then every ``window`` consecutive samples are shuffled among themselves. So a
    window reads 32 runs of neighbours completely before the next one begins. This costs
    randomness: samples of one block are within two windows of each other in every epoch, so a
    batch has about one thirty-second of its samples from each of 32 positions. If neighbours are
    alike (files sorted by class), shuffle when the files are written, or use a larger window. A
    window of n or more equals the full shuffle in distribution, though not in order; a window
    below 64 has blocks of one sample and no locality.

    Args:
        n: number of samples, 0 … 2^40.
        seed: any integer from 0 to 2^128 - 1; the same on every rank.
        epoch: any integer from 0.
        shuffle: False gives 0 … n-1 before the split.
        rank: this process, 0 … world_size-1.
        world_size: number of processes that share the epoch.
        window: number of samples that are mixed with one another, at least 1; None for all.
        start: number of used positions of the whole order, 0 … n.
    Returns: int64[rank_sample_count(n - start, world_size)], owned by the caller.
    Raises:  UsageError: an argument is out of range.
    Cost:    one sort of n 64-bit words (10 million: 0.1 to 0.9 s, by the processor's vector
        instructions) and at most 24 n bytes. Beyond 2^32 samples the random part has under
        32 bits, so that some neighbours share it and stand in ascending order.
    Source:  NEP 19 for what numpy keeps stable; torch.utils.data.DistributedSampler for the split.
    """
    n = checked_integer("n", n, MAX_SAMPLE_COUNT + 1)
    seed = checked_integer("seed", seed, 1 << 128)
    epoch = checked_integer("epoch", epoch, 1 << 64)
    world_size = checked_integer("world_size", world_size, 1 << 32)
    if world_size == 0:
        raise UsageError("world_size is 0, but must be at least 1")
    rank = checked_integer("rank", rank, world_size)
    start = checked_integer("start", start, n + 1)
    if window is not None and checked_integer("window", window, 1 << 64) == 0:
        raise UsageError("window is 0, but must be at least 1")

    if not shuffle:
        order = np.arange(n, dtype=np.int64)
    elif window is None:
        # The epoch as a spawn key, not as a second word of entropy: numpy then pads the seed, so
        # that no pair (seed, epoch) runs into another.
        order = permutation(n, seed, (epoch,))
    else:
        order = permutation(n, seed, (epoch, 1), window=window)
    return rank_part(order, rank, world_size, start)


def rank_part(whole: Int64s, rank: int, world_size: int, start: int = 0) -> Int64s:
    """Return the part of a whole order that one rank visits, as ``epoch_order`` describes."""
    if world_size == 1:
        return whole[start:]
    n = len(whole)
    count = rank_sample_count(n - start, world_size)
    positions = np.arange(start + rank, start + count * world_size, world_size, dtype=np.int64)
    if n > 0:
        positions %= n
    return whole[positions]


def rank_sample_count(n: int, world_size: int) -> int:
    """Return how many samples each rank visits in an epoch: n / world_size, rounded up."""
    return -(-n // world_size)


def shared_seed(name: str) -> int:
    """Return the seed of the order that all jobs with the same name use: half of its SHA-256."""
    digest = hashlib.sha256(b"ffserve shared order\0" + name.encode()).digest()
    return int.from_bytes(digest[:16], "little")


def permutation(
    n: int, seed: int, key: tuple[int, ...], *, window: int | None = None, part: Part = None
) -> Int64s:
    """Return the numbers 0 … n-1 in an order that follows from seed and key.

    Args:
        window: as for ``epoch_order``; a key is used with a window or without, not both.
        part: return only the positions [first, stop) of it, which costs less.
    """
    source = _source(seed, *key)
    if window is None:
        row: Int64s = _permutations(source, 1, n, part)[0]
        return row
    order = _windowed(source, n, min(window, max(n, 1)))
    return order if part is None else order[part[0] : part[1]]


def shuffled_rows(rows: NDArray[np.uint64], kinds: int, seed: int, key: tuple[int, ...]) -> None:
    """Shuffle each row of numbers below ``kinds``, in place, by seed and key."""
    low_mask = _low_mask(kinds)
    words: NDArray[np.uint64] = _source(seed, *key).random_raw(rows.size).reshape(rows.shape)
    words &= ~low_mask
    rows |= words
    rows.sort(axis=1)
    rows &= low_mask


def _source(seed: int, *spawn_key: int) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=spawn_key))


def _low_mask(count: int) -> np.uint64:
    """Return the bits that the numbers below ``count`` need."""
    return np.uint64((1 << max(count - 1, 0).bit_length()) - 1)


def _permutations(source: np.random.PCG64, rows: int, count: int, part: Part = None) -> Int64s:
    """Draw int64[rows, count], each row the numbers 0 … count-1 in random order."""
    words: NDArray[np.uint64] = source.random_raw(rows * count).reshape(rows, count)
    low_mask = _low_mask(count)
    words &= ~low_mask
    words |= np.arange(count, dtype=np.uint64)
    if part is not None:
        # First which words these positions have, then their order: most words are never sorted.
        first, end = part
        if 0 < first < count:
            words.partition(first, axis=1)
        words = words[:, first:]
        if 0 < end - first < count - first:
            words.partition(end - first, axis=1)
        words = words[:, : end - first].copy()
    words.sort(axis=1)
    words &= low_mask
    return words.view(np.int64)


def _windowed(source: np.random.PCG64, n: int, window: int) -> Int64s:
    block = max(1, window // BLOCKS_PER_WINDOW)
    blocks = _permutations(source, 1, -(-n // block))[0]
    numbers = (blocks[:, np.newaxis] * block + np.arange(block)).ravel()
    order: Int64s = numbers[numbers < n]
    windows = n // window
    whole = order[: windows * window].reshape(windows, window)
    whole[:] = np.take_along_axis(whole, _permutations(source, windows, window), axis=1)
    rest = order[windows * window :]
    rest[:] = rest[_permutations(source, 1, len(rest))[0]]
    return order


def checked_integer(name: str, value: int, end: int) -> int:
    """Return the value as an int. Raises: UsageError if it is none, or not in 0 … end - 1."""
    try:
        value = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}, but must be an integer") from None
    if not 0 <= value < end:
        raise UsageError(f"{name} is {value}, but must be in 0 … {end - 1}")
    return value


# ---- how far an order is from a uniform shuffle -------------------------------------------------


def displacement(order: Int64s) -> float:
    """Return the mean displacement / that of a uniform shuffle, which is (n² - 1) / 3n."""
    n = len(order)
    return float(np.abs(order - np.arange(n)).mean() / ((n * n - 1) / (3 * n)))


def together(order: Int64s, batch: int) -> float:
    """Return the probability that neighbours share a batch."""
    n = len(order)
    batch_of = np.empty(n, np.int64)
    batch_of[order] = np.arange(n) // batch
    return float((batch_of[1:] == batch_of[:-1]).mean())


def design_effect(order: Int64s, batch: int) -> float:
    """Return the variance of the batches' means / that of samples drawn without replacement."""
    n = len(order) - len(order) % batch
    means = order[:n].reshape(-1, batch).mean(axis=1)
    uniform = (len(order) + 1) * (len(order) - batch) / (12 * batch)
    return float(((means - (len(order) - 1) / 2) ** 2).mean() / uniform)
