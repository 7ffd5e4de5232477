"""Windows of an order: after which samples every run of neighbours that has begun is complete.

A windowed shuffle (`ffserve/order.py`) visits blocks of neighbours, each within a short part of the
epoch. A reader that takes such a part as a whole, sorts it and reads neighbours together reads each
block once, in large pieces. This module finds where such a part ends. It looks at the order only,
so it also works for an order that another program made, for the rest of a resumed epoch, and for
the slice of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ffserve.dtypes import Int64s

RUN_BITS = 5
"""log2 of the samples in a run: neighbours from a multiple of 32 on. A rank of 16 still has two
samples in each."""
FEWEST_IN_RUN = 2
"""Mean samples per run that make an order windowed."""
DIVIDED_SHARE = 16
"""A part may end where at most one in DIVIDED_SHARE runs that have begun is divided."""
KNOWN_SHARE = 3 / 4
"""A part may end within this share of the examined positions."""
LEAST_SIZE = 4 << 20
"""Windows of fewer bytes are joined until they have this many."""
LARGEST_MEAN = 32 << 10
"""An order of samples with a larger mean has no windows: a disk reads such samples one by one
at full speed."""


def fewest(mean_size: float, least_size: int) -> int:
    """Return the fewest samples of a window; 0 if samples of this mean size have none."""
    return max(int(least_size / mean_size), 1) if mean_size <= LARGEST_MEAN else 0


def window_ends(numbers: Int64s, least: int, *, last: bool = False) -> Iterator[int]:
    """Yield where parts of an order end that divide hardly any run of neighbours.

    Args:
        numbers: the next samples of an order, as many as could be read together.
        least: a shorter part is of no use, at least 1.
        last: these samples are the last ones of the order, so a part ends behind them.
    Yields: the ends, rising, each at least `least` behind the one before it; none if the order has
        no such part. Samples behind the last end are to be looked at again, with those that follow.
    Cost: for the first end 10 ns per sample, and 8 bytes per run of the data set, mostly untouched;
        for each other one a fifth of that.
    """
    count = len(numbers)
    if count <= least:
        if last and count:
            yield count
        return
    runs = numbers >> RUN_BITS
    runs -= runs.min()
    positions = np.arange(count, dtype=np.int32)
    places = np.empty(int(runs.max()) + 1, np.int32)
    places[runs] = positions
    ends = np.flatnonzero(places[runs] == positions)  # the last sample of each run
    if count < FEWEST_IN_RUN * len(ends):
        return
    places[runs[::-1]] = positions[::-1]
    begins = places[runs[ends]]
    # Near the end of the examined part, runs seem undivided because nothing is known behind it.
    known = count + 1 if last else int(count * KNOWN_SHARE)
    start = 0
    while start + least < known:
        behind = begins >= start  # hardly any other run has samples behind `start`
        starts, stops = begins[behind] - start, ends[behind] - start
        # A cut before position e divides the runs with begin < e <= end.
        begun = np.cumsum(np.bincount(starts + 1, minlength=count - start + 2))
        divided = begun - np.cumsum(np.bincount(stops + 1, minlength=count - start + 2))
        inside = slice(least, known - start)
        cuts = np.flatnonzero(divided[inside] * DIVIDED_SHARE <= begun[inside])
        if not len(cuts):
            return
        near = least + int(cuts[0])
        further = 2 * (int(begun[near]) // DIVIDED_SHARE) + 1
        start += near + int(np.argmin(divided[near : min(near + further, known - start)]))
        yield start
