"""A loader without worker processes: threads make the batches while the training loop works.

Reading and copying happen outside of the interpreter's lock, so for a light ``process`` threads are
enough; nothing is handed from process to process, and nothing is pickled. torch's own loader runs
over them: its "sampler" draws tickets ahead of the loop, has threads begin with them, and
yields what will be the answers, in order; its "dataset" waits for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch.utils.data

AHEAD = 2
"""Batches that are begun for each thread before the loop asks for them."""


class Begun(NamedTuple):
    """A message that a thread is making, or has made."""

    answers: Future[Any]


class Threads(torch.utils.data.Sampler[Begun]):
    """Tickets that are worked on as soon as they are drawn.

    An iterator that is dropped calls off what has not begun; its threads end with what has.

    Args:
        tickets: what to make, drawn in the loop's own thread.
        make: makes it, in any thread.
        count: threads.
    """

    def __init__(self, tickets: Iterable[Any], make: Callable[[Any], Any], count: int) -> None:
        self._tickets = tickets
        self._make = make
        self._count = count

    def __iter__(self) -> Iterator[Begun]:
        pool = ThreadPoolExecutor(self._count, thread_name_prefix="ffserve-loader")
        begun: deque[Future[Any]] = deque()
        try:
            for ticket in self._tickets:
                begun.append(pool.submit(self._make, ticket))
                if len(begun) > AHEAD * self._count:
                    yield Begun(begun.popleft())
            while begun:
                yield Begun(begun.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
