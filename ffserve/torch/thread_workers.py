"""Threads in place of worker processes: they make batches while the training loop works.

Reading and copying run outside of the interpreter's lock, so for a light ``process`` threads are
enough; nothing crosses between processes, and nothing is pickled. torch's own loader runs over
them: its sampler takes requests ahead of the loop, starts threads on them and yields the futures
in order; its dataset waits for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.utils.data

BATCHES_AHEAD = 2
"""Each thread has begun this many batches before the loop asks for them."""


class ThreadedRequests(torch.utils.data.Sampler[Future[Any]]):
    """Requests on which threads begin as soon as they are known.

    An iterator that is dropped cancels what has not begun; its threads end with what has.

    Args:
        requests: iterated in the loop's own thread.
        make: answers a request, in any thread.
        count: number of threads.
    """

    def __init__(self, requests: Iterable[Any], make: Callable[[Any], Any], count: int) -> None:
        self._requests = requests
        self._make = make
        self._count = count

    def __iter__(self) -> Iterator[Future[Any]]:
        pool = ThreadPoolExecutor(self._count, thread_name_prefix="ffserve-loader")
        begun: deque[Future[Any]] = deque()
        try:
            for request in self._requests:
                begun.append(pool.submit(self._make, request))
                if len(begun) > BATCHES_AHEAD * self._count:
                    yield begun.popleft()
            while begun:
                yield begun.popleft()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
