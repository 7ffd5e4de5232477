"""The order of an epoch, as a pure function.

An epoch's order depends on nothing but its arguments: no clock, no global generator, no state
left over from the epoch before. Whoever knows (n, seed, epoch, rank, world size) knows the order:
a restarted job, another rank, the daemon that reads ahead.

Random keys come from ``SeedSequence`` and ``PCG64.random_raw``, whose streams numpy keeps fixed
across releases (NEP 19, numpy's random number policy). ``Generator.permutation`` would be shorter,
but NEP 19 lets ``Generator`` methods change between releases, and then a job resumed
after an upgrade would silently repeat some samples and miss others. Instead each index is put
into the low bits of a 64-bit word below random high bits, and the words are sorted: all words
differ, so every sorting algorithm gives the same answer.
"""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import UsageError

MAX_SAMPLE_COUNT = 1 << 40
_CHUNK = 1 << 16


def epoch_order(
    n: int,
    *,
    seed: int,
    epoch: int,
    shuffle: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> NDArray[np.int64]:
    """Return the sample indices that one rank visits in one epoch, in order.

    The permutation of all n samples is split as torch's DistributedSampler does by default: it is
    continued from its own beginning until its length is a multiple of ``world_size``, and rank r
    takes positions r, r + world_size, … . So every rank gets ``rank_sample_count(n, world_size)``
    samples, every sample is visited, and at most ``world_size - 1`` are visited twice (more often
    only if there are fewer samples than ranks). With n a multiple of ``world_size`` the ranks'
    slices are disjoint; with ``world_size=1`` the order is a bijection of 0 … n-1.

    Args:
        n: number of samples, 0 … 2^40.
        seed: any integer from 0 to 2^128 - 1; the same on every rank.
        epoch: any integer from 0.
        shuffle: False gives 0 … n-1 before the split.
        rank: this process, 0 … world_size-1.
        world_size: number of processes that share the epoch.
    Returns: int64[rank_sample_count(n, world_size)], owned by the caller.
    Raises:  UsageError for an argument outside its range.
    Cost:    one sort of n 64-bit words (10 million: a fraction of a second) and 16 n bytes at its
        height. Beyond 2^32 samples the random part has under 32 bits, so that some
        neighbours share it and stand in ascending order.
    Source:  NEP 19 for what numpy keeps stable; torch.utils.data.DistributedSampler for the split.
    """
    n = _checked("n", n, MAX_SAMPLE_COUNT + 1)
    seed = _checked("seed", seed, 1 << 128)
    epoch = _checked("epoch", epoch, 1 << 64)
    world_size = _checked("world_size", world_size, 1 << 32)
    if world_size == 0:
        raise UsageError("world_size is 0, but at least one process reads")
    rank = _checked("rank", rank, world_size)

    order = _permutation(n, seed, epoch) if shuffle else np.arange(n, dtype=np.int64)
    if world_size == 1:
        return order
    count = rank_sample_count(n, world_size)
    positions = np.arange(rank, count * world_size, world_size, dtype=np.int64)
    if n > 0:
        positions %= n
    return order[positions]


def rank_sample_count(n: int, world_size: int) -> int:
    """Return how many samples each rank visits in an epoch: n / world_size, rounded up."""
    return -(-n // world_size)


def _permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # The epoch as a spawn key, not as a second word of entropy: numpy then pads the seed, so that
    # no pair (seed, epoch) runs into another.
    source = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    index_bits = np.uint64(max(n - 1, 0).bit_length())
    index_mask = np.uint64((1 << int(index_bits)) - 1)
    words: NDArray[np.uint64] = source.random_raw(n)
    low_bits = np.arange(min(n, _CHUNK), dtype=np.uint64)
    for start in range(0, n, _CHUNK):
        chunk = words[start : start + _CHUNK]
        chunk &= ~index_mask
        chunk |= low_bits[: len(chunk)] + np.uint64(start)
    words.sort()
    words &= index_mask
    return words.view(np.int64)


def _checked(name: str, value: int, end: int) -> int:
    try:
        value = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}, but an integer is needed") from None
    if not 0 <= value < end:
        raise UsageError(f"{name} is {value}, but must be in 0 … {end - 1}")
    return value
