"""How far an order is from a uniform shuffle.

Three measures:

*displacement*: the mean of |position - index|, relative to a uniform shuffle. A shuffle buffer that
is small beside the data moves samples little, so it is near 0.

*together*: the probability that two neighbours of the data set come into the same batch, which is
(batch - 1) / (n - 1) in a uniform shuffle. If neighbours are alike, their batch is less varied.

*design effect*: the variance of the batches' mean index, relative to a uniform shuffle (Kish 1965,
Survey Sampling, for samples drawn in clusters). It is the factor by which the variance of a batch's
mean grows for anything that varies slowly along the data set, such as the class in files sorted by
class: the batch is worth that many times fewer independent samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ffserve.order import design_effect, displacement, epoch_order, together

Order = NDArray[np.int64]


def buffered(n: int, size: int, seed: int) -> Order:
    """Return the order of a shuffle buffer over samples in order, as tf.data and WebDataset do."""
    random = np.random.default_rng(seed)
    places = random.integers(0, size, n)
    buffer = list(range(size))
    order = np.empty(n, np.int64)
    for position in range(n - size):
        order[position] = buffer[places[position]]
        buffer[places[position]] = size + position
    order[n - size :] = random.permutation(buffer)
    return order


MEASURES = {
    "displacement": ("mean displacement / that of a uniform shuffle", ""),
    "together": ("the probability that neighbours share a batch", "%"),
    "design": ("the variance of batch means / that of a uniform shuffle", ""),
}
"""Each measure's description and unit."""


def _measured(order: Order, batch: int) -> dict[str, float]:
    return {
        "displacement": displacement(order),
        "together": 100 * together(order, batch),
        "design": design_effect(order, batch),
    }


def of_windows(count: int, window: int, batch: int) -> dict[str, float]:
    """Return the measures of a windowed order."""
    return _measured(epoch_order(count, seed=1, epoch=0, window=window), batch)


def of_buffer(count: int, size: int, batch: int) -> dict[str, float]:
    """Return the measures of a shuffle buffer of as many samples."""
    return _measured(buffered(count, size, 1), batch)
