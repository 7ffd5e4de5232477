"""The order of a mixture of data sets as a pure function.

An epoch of a mixture has a fixed number of samples from each data set. Its order depends only on
the arguments of ``MixtureOrder``, the seed and the epoch, as ``ffserve.order`` describes for one
data set. It is made of two independent draws:

*Which data set comes when.* The epoch is cut into steps of ``batch_size`` samples. Each step gets
every data set's share of a step, rounded down or up, and is shuffled. Which data sets are rounded
up in which step follows systematic sampling: the remainders lie end to end on a scale, and each
step takes the data sets that its evenly spaced points hit. Because the points of all steps together
cover the scale exactly, each data set gets exactly its number of samples in the epoch; because
consecutive steps are far apart on the scale (the golden ratio), each part of the epoch comes close.

*Which sample of a data set.* Its samples come in permutations of the whole data set, one after
another, so in an epoch no sample comes a second time before all have come once. If an epoch needs
only a part of a permutation, consecutive epochs take consecutive parts of one.

Source: Madow, "On the Theory of Systematic Sampling, II" (1949), for unequal shares.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Int64s
from ffserve.errors import UsageError
from ffserve.order import MAX_SAMPLE_COUNT, checked_integer, permutation, shuffled_rows

Weights: TypeAlias = "Sequence[float] | Mapping[int, Sequence[float]]"

DEFAULT_STEP = 256
"""The shares are kept in steps of this many samples if the caller names no batch size."""
MOST_DATASETS = 1 << 16
_PASSES, _PARTS, _STEPS, _OFFSET = range(4)
"""Second word of a key: for a pass of one epoch, for one that epochs share, for the steps' order,
for the data sets that are rounded up."""


class MixtureOrder:
    """The whole order of each epoch of a mixture.

    At most one of ``weights``, ``repeats`` and ``samples`` is given; none of them means every
    sample once. Indices are those of the data sets one after another.

    Args:
        sizes: number of samples of each data set.
        weights: the share of each data set, relative to the sum. Or a schedule: a dict from the
            epoch (or step) in which weights begin to apply to the weights; its first key is 0.
        repeats: how often each data set comes in an epoch: 2 is twice, 0.5 half of it.
        samples: how many samples of each data set come in an epoch.
        epoch_size: samples of an epoch; with ``weights`` only. None: as many as there are.
        schedule: what the keys of a schedule count: ``"epoch"``, or ``"step"``, the steps since the
            beginning of epoch 0.
        batch_size: samples of a step, of all ranks together. Each step has the shares to one
            sample. None: 256.
        floor: at least so many samples of each data set in each whole step; needs ``batch_size``.
            Weights below a floor are raised to it, at the cost of the others.
    Raises:  UsageError: an argument is out of range or contradicts another.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        weights: Weights | None = None,
        repeats: Sequence[float] | None = None,
        samples: Sequence[int] | None = None,
        epoch_size: int | None = None,
        schedule: str = "epoch",
        batch_size: int | None = None,
        floor: Sequence[int] | None = None,
    ) -> None:
        self.sizes = [checked_integer("a size", size, MAX_SAMPLE_COUNT + 1) for size in sizes]
        if not 0 < len(self.sizes) <= MOST_DATASETS:
            raise UsageError(f"a mixture has 1 to {MOST_DATASETS} data sets, not {len(sizes)}")
        if schedule not in ("epoch", "step"):
            raise UsageError(f"schedule is {schedule!r}, but must be 'epoch' or 'step'")
        given = [("weights", weights), ("repeats", repeats), ("samples", samples)]
        names = [name for name, value in given if value is not None]
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} are given, but one of them says all")
        if epoch_size is not None and weights is None:
            raise UsageError(
                "epoch_size is given without weights",
                hint="repeats and samples already say how large an epoch is",
            )
        if batch_size is None and (floor is not None or schedule == "step"):
            raise UsageError(
                "floors and schedules by step need batch_size, the samples of a step of all ranks"
            )
        size = DEFAULT_STEP if batch_size is None else batch_size
        self.batch_size = checked_integer("batch_size", size, MAX_SAMPLE_COUNT)
        if self.batch_size == 0:
            raise UsageError("batch_size is 0, but must be at least 1")
        self.schedule = schedule
        floors = self._per_dataset("floor", [0] * len(self.sizes) if floor is None else floor)
        self.floor = [checked_integer("a floor", least, 1 << 63) for least in floors]
        if sum(self.floor) > self.batch_size:
            raise UsageError(
                f"the floors need {sum(self.floor)} samples of a batch of {self.batch_size}"
            )
        self._starts: list[int] = [0]
        if weights is None:
            counts = self._fixed_counts(repeats, samples)
            self.epoch_size = sum(counts)
            self._weights = [counts]
        else:
            size = sum(self.sizes) if epoch_size is None else epoch_size
            self.epoch_size = checked_integer("epoch_size", size, MAX_SAMPLE_COUNT + 1)
            self._read_weights(weights)
        self._shares = [
            self._checked_shares(row, raised=weights is not None) for row in self._weights
        ]

    def _per_dataset(self, name: str, values: Any) -> list[Any]:
        entries: list[Any] = list(values)
        if len(entries) != len(self.sizes):
            raise UsageError(f"{name} has {len(entries)} entries for {len(self.sizes)} data sets")
        return entries

    def _fixed_counts(
        self, repeats: Sequence[float] | None, samples: Sequence[int] | None
    ) -> list[int]:
        if samples is not None:
            values = self._per_dataset("samples", samples)
            return [checked_integer("a number of samples", c, MAX_SAMPLE_COUNT) for c in values]
        if repeats is None:
            return list(self.sizes)
        factors = [_fraction("repeats", r) for r in self._per_dataset("repeats", repeats)]
        pairs = list(zip(factors, self.sizes, strict=True))
        counts = [math.floor(factor * size + Fraction(1, 2)) for factor, size in pairs]
        for d, (factor, size) in enumerate(pairs):
            if factor * size > 0 and not counts[d]:
                raise UsageError(
                    f"data set {d} would get no sample: {float(factor):.3g} of its {size} are none",
                    hint="raise its repeats, or set them to 0",
                )
        return counts

    def _read_weights(self, weights: Weights) -> None:
        rows = weights if isinstance(weights, Mapping) else {0: weights}
        starts = sorted(checked_integer("a key of the schedule", key, 1 << 64) for key in rows)
        if not starts or starts[0] != 0:
            raise UsageError("the schedule of weights does not begin at 0")
        self._starts = starts
        self._weights = [self._per_dataset("weights", rows[start]) for start in starts]

    def _checked_shares(self, weights: Sequence[Any], *, raised: bool) -> list[Fraction]:
        """Return the share of each data set, at least its floor."""
        exact = [_fraction("weights", weight) for weight in weights]
        total = sum(exact)
        if total == 0 and self.epoch_size > 0:
            raise UsageError("all weights are 0")
        shares = [weight / total if total else weight for weight in exact]
        floors = [Fraction(m, self.batch_size) for m in self.floor]
        low = [d for d, share in enumerate(shares) if share < floors[d]]
        if low and not raised:
            d = low[0]
            raise UsageError(
                f"data set {d} has {weights[d]} of {self.epoch_size} samples of an epoch, "
                f"too few for a floor of {self.floor[d]} in each batch of {self.batch_size}",
                hint="weights are raised to a floor; repeats and samples are not",
            )
        shares = _raised(shares, floors)
        for d, share in enumerate(shares):
            if share and not self.sizes[d]:
                raise UsageError(f"data set {d} is empty, but has a share of the mixture")
            if 0 < share * self.epoch_size < 1:
                raise UsageError(
                    f"data set {d} would get no sample: its share of an epoch of "
                    f"{self.epoch_size} samples is {float(share * self.epoch_size):.3g}",
                    hint="raise epoch_size or the weight, or set the weight to 0",
                )
        return shares

    def settings(self) -> dict[str, Any]:
        """Return everything that the order depends on but the seed, as plain values."""
        rows = zip(self._starts, self._weights, strict=True)
        return {
            "sizes": self.sizes,
            "weights": [[start, [float(weight) for weight in row]] for start, row in rows],
            "schedule": self.schedule,
            "batch_size": self.batch_size,
            "floor": self.floor,
        }

    def counts(self, epoch: int = 0) -> list[int]:
        """Return how many samples of each data set an epoch has: its share, to one sample."""
        columns = zip(*(segment.counts for segment in self._segments(epoch)), strict=True)
        return [sum(column) for column in columns] or [0] * len(self.sizes)

    def order(self, *, seed: int, epoch: int, window: int | None = None) -> Int64s:
        """Return the sample indices of an epoch, in the order of all ranks together.

        Args:    seed, epoch, window: as for ``epoch_order``; each data set has its own windows.
        Returns: int64[epoch_size], owned by the caller.
        Raises:  UsageError: an argument is out of range.
        Cost:    a sort for each pass over a data set, and one of the steps; at most 40 bytes per
            sample. A data set of which an epoch needs a part costs 8 bytes and a random word for
            each of its samples, and a sort of the part.
        """
        seed = checked_integer("seed", seed, 1 << 128)
        epoch = checked_integer("epoch", epoch, 1 << 64)
        if window is not None and checked_integer("window", window, 1 << 64) == 0:
            raise UsageError("window is 0, but must be at least 1")
        segments = self._segments(epoch)
        which = [
            self._datasets(number, segment, seed, epoch) for number, segment in enumerate(segments)
        ]
        # Stable: the samples of a data set keep their order.
        places = np.concatenate([np.zeros(0, np.uint8), *which]).argsort(kind="stable")
        order = np.empty(len(places), np.int64)
        first = start = 0
        for d, count in enumerate(self.counts(epoch)):
            for samples in self._samples(d, count, seed, epoch, window):
                samples += start
                order[places[first : first + len(samples)]] = samples
                first += len(samples)
            start += self.sizes[d]
        return order

    def _segments(self, epoch: int) -> list[_Segment]:
        """Return the parts of an epoch in which the weights are the same.

        A part has whole steps only, or is the shorter step that ends the epoch. Its numbers of
        samples make up for what the parts before it were rounded, so those of the epoch are exact
        to one sample as well.
        """
        whole, tail = divmod(self.epoch_size, self.batch_size)
        step_count = whole + (tail > 0)
        runs = [(bisect_right(self._starts, epoch) - 1, 0, step_count)]
        if self.schedule == "step":
            edges = [start - epoch * step_count for start in self._starts] + [step_count]
            runs = [
                (row, max(first, 0), min(end, step_count))
                for row, (first, end) in enumerate(pairwise(edges))
            ]
        segments: list[_Segment] = []
        ahead = [Fraction(0)] * len(self.sizes)
        for row, first, end in runs:
            steps = min(end, whole) - first
            parts = [(steps, self.batch_size)] if steps > 0 else []
            if first < end and end > whole:
                parts.append((1, tail))
            for steps, size in parts:
                quotas = [
                    s * steps * size - a for s, a in zip(self._shares[row], ahead, strict=True)
                ]
                least = [m * steps * (size == self.batch_size) for m in self.floor]
                counts = _rounded(quotas, steps * size, least)
                ahead = [c - q for c, q in zip(counts, quotas, strict=True)]
                segments.append(_Segment(steps, size, counts))
        return segments

    def _datasets(self, number: int, segment: _Segment, seed: int, epoch: int) -> NDArray[Any]:
        """Return the number of the data set at each position of a segment."""
        steps, size = segment.steps, segment.size
        base, remainders = zip(*(divmod(count, steps) for count in segment.counts), strict=True)
        extra = size - sum(base)
        rows = np.empty((steps, size), np.uint64)
        rows[:, : size - extra] = np.repeat(np.arange(len(base), dtype=np.uint64), base)
        if extra:
            key = (number, _OFFSET, epoch)
            offset = int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])
            points = (offset % steps + _stride(steps) * np.arange(steps, dtype=np.int64)) % steps
            scale = points[:, np.newaxis] + steps * np.arange(extra, dtype=np.int64)
            rows[:, size - extra :] = np.cumsum(remainders).searchsorted(scale, side="right")
        shuffled_rows(rows, len(base), seed, (number, _STEPS, epoch))
        return rows.ravel().astype(np.uint8 if len(base) <= 256 else np.uint16)

    def _samples(
        self, d: int, count: int, seed: int, epoch: int, window: int | None
    ) -> Iterator[Int64s]:
        """Yield the samples that an epoch has of a data set: whole passes, then a part of one."""
        size = self.sizes[d]
        passes, rest = divmod(count, max(size, 1))
        for number in range(passes):
            yield permutation(size, seed, (d, _PASSES, epoch, number), window=window)
        if rest:
            shared, slot = divmod(epoch, size // rest)
            part = slot * rest, slot * rest + rest
            yield permutation(size, seed, (d, _PARTS, shared), window=window, part=part)


class _Segment(NamedTuple):
    """Consecutive steps of equal weights: their number, the samples of each, and in all of them
    together the samples of each data set."""

    steps: int
    size: int
    counts: list[int]


def _fraction(name: str, value: Any) -> Fraction:
    try:
        exact = Fraction(value if isinstance(value, (int, Fraction)) else float(value))
    except (TypeError, ValueError, OverflowError):
        exact = Fraction(-1)
    if exact < 0:
        raise UsageError(f"{name} has the entry {value!r}, but needs finite numbers from 0")
    return exact


def _raised(shares: list[Fraction], floors: list[Fraction]) -> list[Fraction]:
    """Return shares of which none is below its floor; the others keep their proportions."""
    raised: set[int] = set()
    while low := {d for d, share in enumerate(shares) if d not in raised and share < floors[d]}:
        raised |= low
        free = 1 - sum(floors[d] for d in raised)
        others = sum(share for d, share in enumerate(shares) if d not in raised)
        factor = free / others if others else Fraction(0)
        shares = [floors[d] if d in raised else share * factor for d, share in enumerate(shares)]
    return shares


def _rounded(quotas: list[Fraction], total: int, least: list[int]) -> list[int]:
    """Round quotas down or up to a total, the largest remainders up; none below its least."""
    counts = [max(math.floor(quota), low) for quota, low in zip(quotas, least, strict=True)]
    short = total - sum(counts)
    by_need = sorted(range(len(quotas)), key=lambda d: counts[d] - quotas[d])
    for d in by_need[: max(short, 0)]:
        counts[d] += 1
    for d in [d for d in reversed(by_need) if counts[d] > least[d]][: max(-short, 0)]:
        counts[d] -= 1
    return counts


def _stride(steps: int) -> int:
    """Return a number without common divisor with ``steps``, near a golden section of it."""
    stride = max(1, int(steps * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, steps) > 1:
        stride += 1
    return stride
