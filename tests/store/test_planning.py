"""When blocks will be used: compared with a plain loop over the order."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ffserve.store.planning import NEVER, BlockOrder, Progress

COUNT = 12
SPANS = st.lists(
    st.tuples(st.integers(0, COUNT - 1), st.integers(0, 3)).map(
        lambda s: (s[0], min(s[0] + s[1], COUNT - 1))
    ),
    min_size=1, max_size=40,
)  # fmt: skip


def order_of(spans: list[tuple[int, int]]) -> BlockOrder:
    firsts, lasts = (np.array(each, np.int64) for each in zip(*spans, strict=True))
    return BlockOrder(firsts, lasts, COUNT)


@given(SPANS, st.integers(0, 45))
def test_next_uses(spans: list[tuple[int, int]], position: int) -> None:
    expected = [NEVER] * COUNT
    for at in range(len(spans) - 1, position - 1, -1):
        for block in range(spans[at][0], spans[at][1] + 1):
            expected[block] = at
    assert order_of(spans).next_uses(position).tolist() == expected


@given(SPANS, st.integers(0, 45), st.integers(1, 50), st.integers(1, 3))
def test_upcoming(spans: list[tuple[int, int]], position: int, horizon: int, least: int) -> None:
    seen: dict[int, int] = {}
    for first, last in spans[position : position + horizon]:
        for block in range(first, last + 1):
            seen[block] = seen.get(block, 0) + 1
    found = order_of(spans).upcoming(position, horizon, least).tolist()
    assert found == [block for block, uses in seen.items() if uses >= least]


def test_progress_over_epochs() -> None:
    progress = Progress()
    assert not len(progress.upcoming(10, 1)) and np.isinf(progress.next_uses(3)).all()
    progress.announce(0, order_of([(0, 0), (1, 1), (2, 2)]))
    progress.announce(1, order_of([(2, 2), (0, 0), (3, 3)]))
    progress.reached(0, 0, 0.0)
    progress.reached(0, 2, 1.0)
    assert progress.rate == 0.5 * 1000 + 0.5 * 2
    progress.rate = 1.0
    assert progress.upcoming(10, 1).tolist() == [2, 0, 3]
    assert progress.next_uses(COUNT).tolist()[:5] == [2.0, math.inf, 0.0, 3.0, math.inf]
    progress.reached(0, 3, 2.0)
    assert (progress.epoch, progress.position) == (1, 0) and list(progress.orders) == [1]
    progress.rate = 1.0
    # No epoch after it is announced: in its middle.
    assert progress.next_uses(COUNT).tolist()[:2] == [1.0, 4.5]
    progress.announce(0, order_of([(5, 5)]))
    assert (progress.epoch, progress.position) == (0, 0)
