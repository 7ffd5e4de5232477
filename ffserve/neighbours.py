"""Windows of an order: after which samples every run of neighbours that has begun is complete.

A windowed shuffle (`ffserve/order.py`) visits blocks of neighbours, each within a short part of the
epoch. A reader that takes such a part as a whole, sorts it and reads neighbours together reads each
block once, in large pieces. This module finds where such a part ends. It looks at the order only,
so it also works for an order that another program made, for the rest of a resumed epoch, and for
the slice of one rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

RUN_BITS = 5
"""log2 of the samples in a run: neighbours from a multiple of 32 on. A rank of 16 still has two
samples in each."""
FEWEST_IN_RUN = 2
"""Mean samples per run that make an order windowed."""
DIVIDED_SHARE = 16
"""A part may end where at most one in DIVIDED_SHARE runs that have begun is divided."""
KNOWN_SHARE = 3 / 4
"""The part of what is looked at in which a part may end."""


def window_end(numbers: Int64s, least: int, *, last: bool = False) -> int | None:
    """Return the end of the first part of an order that divides hardly any run of neighbours.

    Args:
        numbers: the next samples of an order, as many as could be read together.
        least: a shorter part is of no use, at least 1.
        last: these samples are the last ones of the order, so a part ends behind them.
    Returns: the end, at least `least`; None if the order has no such part.
    Cost:    30 ns per sample; 8 bytes per run of the data set, mostly untouched.
    """
    count = len(numbers)
    if count <= least:
        return count if last and count else None
    runs = numbers >> RUN_BITS
    runs -= runs.min()
    positions = np.arange(count, dtype=np.int32)
    places = np.empty(int(runs.max()) + 1, np.int32)
    places[runs] = positions
    ends = np.flatnonzero(places[runs] == positions)  # the last sample of each run
    if count < FEWEST_IN_RUN * len(ends):
        return None
    places[runs[::-1]] = positions[::-1]
    begins = places[runs[ends]]
    # A cut before position e divides the runs with begin < e <= end.
    begun = np.cumsum(np.bincount(begins + 1, minlength=count + 2))
    divided = begun - np.cumsum(np.bincount(ends + 1, minlength=count + 2))
    # Near the end of what is looked at, runs seem undivided because nothing is known behind it.
    known = count + 1 if last else int(count * KNOWN_SHARE)
    cuts = np.flatnonzero(divided[least:known] * DIVIDED_SHARE <= begun[least:known])
    if not len(cuts):
        return None
    near = least + int(cuts[0])
    few = int(begun[near]) // DIVIDED_SHARE
    return near + int(np.argmin(divided[near : min(near + 2 * few + 1, known)]))
