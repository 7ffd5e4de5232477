"""Packing: which samples make up each sequence of a given number of tokens.

Language models train on sequences of one length, and documents have any. ``plan`` decides from the
table of sizes alone, before anything is read, so a plan can be computed anew by every process, and
its sequences can be shuffled, split among ranks, announced and resumed like samples.

A document longer than a sequence is cut into pieces of the full length and a rest; shorter ones are
never cut. Rests and short documents are put into sequences by best fit decreasing, in windows: in
random order they are taken ``window`` at a time, and from the largest to the smallest each goes to
the sequence of its window with the least room that is enough. Pieces of one size are placed
together, so the cost is that of the different sizes, not of the samples.

Source: Krell et al., "Efficient Sequence Packing without Cross-contamination" (2021), for packing
the histogram of sizes; Ding et al., "Fewer Truncations Improve Language Modeling" (2024), for best
fit without cutting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Int64s
from ffserve.errors import UsageError
from ffserve.order import MAX_SAMPLE_COUNT, checked_integer, permutation

WINDOW = 1 << 16
_PIECES, _PLACES, _SEQUENCES = (0, 2), (1, 2), (2, 2)
"""Keys of what is drawn: the order of pieces, their places in their sequences, the order of
sequences. Those of epochs are (epoch,) and (epoch, 1), and a sampler may have the same seed."""


class Plan:
    """The sequences of a plan: each is some pieces of samples, side by side.

    Attributes:
        length: tokens of a sequence.
        offsets: int64[len(plan) + 1]: the pieces of sequence s are offsets[s] … offsets[s+1] - 1.
        samples: int64[pieces]: index of the sample of each piece.
        starts: int64[pieces]: the first token of the piece in its sample.
        sizes: int64[pieces]: tokens of the piece.
    """

    def __init__(
        self, length: int, offsets: Int64s, samples: Int64s, starts: Int64s, sizes: Int64s
    ) -> None:
        self.length = length
        self.offsets = offsets
        self.samples = samples
        self.starts = starts
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def waste(self) -> float:
        """The share of all places that no token fills, 0 … 1."""
        places = len(self) * self.length
        return 1 - int(self.sizes.sum()) / places if places else 0.0

    def pieces(self, sequences: Any) -> tuple[Int64s, Int64s]:
        """Return the pieces of sequences.

        Args:    sequences: int64[n], indices of sequences; repeats allowed, order kept.
        Returns: the numbers of their pieces, one sequence after another; and int64[n + 1], where
            each sequence's pieces begin among them.
        """
        sequences = np.asarray(sequences, np.int64)
        counts = self.offsets[sequences + 1] - self.offsets[sequences]
        ends = np.concatenate(([0], np.cumsum(counts)))
        numbers = np.arange(ends[-1]) + np.repeat(self.offsets[sequences] - ends[:-1], counts)
        return numbers, ends


def plan(sizes: Any, length: int, seed: int, *, window: int = WINDOW) -> Plan:
    """Pack samples into sequences.

    Every token of every sample is in exactly one sequence. A sample of no tokens is in none.

    Args:
        sizes: tokens of each sample, integers from 0.
        length: tokens of a sequence, at least 1.
        seed: integer from 0. It decides which samples come together; the plan depends on nothing
            but the arguments.
        window: so many pieces are packed together. More waste less, and cost memory in none but
            this function.
    Returns: a Plan, its sequences in random order.
    Raises:  UsageError for arguments out of range.
    Cost:    about 1.5 µs per sample: some sorts, and for each window some steps of Python for each
        size that occurs in it.
    """
    table = _checked_sizes(sizes)
    length = checked_integer("length", length, 1 << 31)
    seed = checked_integer("seed", seed, 1 << 128)
    window = checked_integer("window", window, MAX_SAMPLE_COUNT)
    if length == 0 or window == 0:
        raise UsageError(f"length is {length} and window is {window}, but 1 is the least")
    whole, rest = np.divmod(table, length)
    # The rests, in random order, then the pieces that fill a sequence.
    short = np.flatnonzero(rest)
    short = short[permutation(len(short), seed, _PIECES)]
    bins = np.empty(len(short), np.int64)
    bin_count = 0
    for first in range(0, len(short), window):
        part = rest[short[first : first + window]]
        bins[first : first + window], count = _best_fit(part, length)
        bins[first : first + window] += bin_count
        bin_count += count
    numbers = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    samples = np.concatenate((short, np.repeat(np.arange(len(table)), whole)))
    starts = np.concatenate((whole[short], numbers)) * length
    pieces = np.concatenate((rest[short], np.full(len(numbers), length, np.int64)))
    bins = np.concatenate((bins, bin_count + np.arange(len(numbers))))
    # The sequences in random order, and the pieces of each.
    order = permutation(bin_count + len(numbers), seed, _SEQUENCES)[bins]
    mixed = permutation(len(bins), seed, _PLACES)
    mixed = mixed[order[mixed].argsort(kind="stable")]
    counts = np.bincount(order, minlength=bin_count + len(numbers))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return Plan(length, offsets, samples[mixed], starts[mixed], pieces[mixed])


def _checked_sizes(sizes: Any) -> Int64s:
    table = np.asarray(sizes)
    if table.ndim != 1 or (table.size and table.dtype.kind not in "iu"):
        raise UsageError(
            f"sizes is an array of {table.dtype} with {table.ndim} dimensions, "
            "but must be one of integers with one"
        )
    table = table.astype(np.int64)
    if table.size and int(table.min()) < 0:
        raise UsageError(f"sample {int(table.argmin())} has {int(table.min())} tokens")
    return table


def _best_fit(sizes: Int64s, length: int) -> tuple[Int64s, int]:
    """Return the bin of each piece, and the number of bins, by best fit decreasing.

    Bins are numbered as they are opened. Those with the same room are kept as ranges of numbers,
    and pieces of one size fill a range at once: as many pieces to each bin as find room, for the
    bin that has just got one has the least room of all that are left.
    """
    by_size = sizes.argsort(kind="stable")[::-1]
    values, counts = np.unique(sizes, return_counts=True)
    rooms: list[int] = []  # sorted
    ranges: dict[int, list[tuple[int, int]]] = {}  # by room: first bin, number of bins
    first_bins: list[int] = []
    bin_counts: list[int] = []
    copies: list[int] = []
    opened = 0

    def keep(room: int, first: int, count: int) -> None:
        if room and count:
            if room not in ranges:
                ranges[room] = []
                insort(rooms, room)
            ranges[room].append((first, count))

    for size, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms[at]
                first, count = ranges[room].pop()
                if not ranges[room]:
                    del ranges[room], rooms[at]
            else:
                room, first, count = length, opened, -(-left // (length // size))
                opened += count
            each = room // size
            full = min(count, left // each)
            over = left - full * each if full < count else 0
            for bins, number in ((full, each), (int(over > 0), over)):
                if bins:
                    first_bins.append(first)
                    bin_counts.append(bins)
                    copies.append(number)
                    keep(room - number * size, first, bins)
                    first, count, left = first + bins, count - bins, left - bins * number
            keep(room, first, count)
    return _spread(by_size, first_bins, bin_counts, copies), opened


def _spread(
    by_size: Int64s, first_bins: list[int], bin_counts: list[int], copies: list[int]
) -> Int64s:
    """Return the bin of each piece: placements took the pieces in the order of their sizes."""
    counts = np.array(bin_counts, np.int64)
    before = np.cumsum(counts) - counts
    numbers: NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(
        np.array(first_bins, np.int64) - before, counts
    )
    bins = np.empty(len(by_size), np.int64)
    bins[by_size] = np.repeat(numbers, np.repeat(np.array(copies, np.int64), counts))
    return bins
