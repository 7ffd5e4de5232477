"""Hints: the kernel reads the windows of an order into the page cache before they are asked for.

Samples of a windowed order are scattered over the blocks of a window (`ffserve/reads/windows.py`),
so a batch of them costs a read per sample, although its window costs a few large reads. Without a
daemon nothing is kept in memory of this process. The kernel is told which extents come next, and
all processes that read the same order find them in the page cache.

A thread gives the hints, since the kernel holds the caller while it looks for memory, up to 60 ms a
window.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray

from ffserve.client.source import Int64s
from ffserve.reads.windows import window_ends

LOOK_SIZE, LOOK_COUNT = 128 << 20, 1 << 18
"""How far a window is looked for, in bytes and samples. A larger window is not found."""
AHEAD_SIZE = 32 << 20
"""Bytes of windows that the kernel reads ahead of the position; one window at least."""
LEAST_SIZE = 4 << 20
"""Windows that are smaller are taken several at a time."""
LARGEST_MEAN = 32 << 10
"""Larger samples are read singly at the full speed of a disk."""


class WindowHints:
    """The hints for one order.

    Args:
        order: sample numbers. mean_size: bytes of a sample.
        advise: tells the kernel about samples, which rise.

    windowed: whether the order has windows.
    """

    def __init__(self, order: Int64s, mean_size: int, advise: Callable[[Int64s], object]) -> None:
        mean_size = max(mean_size, 1)
        self._order = order
        self._look = min(LOOK_SIZE // mean_size, LOOK_COUNT)
        self._least = max(LEAST_SIZE // mean_size, 1)
        self._ahead = AHEAD_SIZE // mean_size
        self._advise = advise
        self._lock = threading.Lock()
        self._position = 0
        self._thread: threading.Thread | None = None
        self._advised = 0
        """The end of the windows that the kernel was told about."""
        self._windows = self._windows_from(0)
        self._next = next(self._windows, None) if mean_size <= LARGEST_MEAN else None
        self.windowed = self._next is not None

    def _windows_from(self, begin: int) -> Iterator[Int64s]:
        while begin < len(self._order):
            some = self._order[begin : begin + self._look]
            end, last = 0, begin + self._look >= len(self._order)
            for each in window_ends(some, self._least, last=last):
                yield some[end:each]
                end = each
            if not end:
                return
            begin += end

    def read(self, indices: NDArray[Any]) -> None:
        """Samples were asked for: if they are the next ones of the order, the position moves."""
        if not len(indices):
            return
        end = self._position + len(indices)
        part = self._order[self._position : end]
        if len(part) == len(indices) and part.tobytes() == indices.tobytes():
            self.move_to(end)

    def move_to(self, position: int) -> None:
        """The samples before this position are used, or asked for."""
        with self._lock:
            self._position = max(self._position, position)
            if self._advised < self._position:
                self._advised = self._position
                self._windows = self._windows_from(self._position)
                self._next = next(self._windows, None)
            if self._thread is None and self._due():
                thread = threading.Thread(
                    target=self._advise_windows, name="ffserve-hints", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # no thread: no hints
                    thread.start()
                    self._thread = thread

    def _due(self) -> bool:
        return self._next is not None and self._advised <= self._position + self._ahead

    def _advise_windows(self) -> None:
        while True:
            with self._lock:
                if not self._due():
                    self._thread = None
                    return
                numbers = self._next
                assert numbers is not None
                self._advised += len(numbers)
                self._next = next(self._windows, None)
            numbers = numbers.copy()
            numbers.sort()
            self._advise(numbers)

    def close(self) -> None:
        """Give no more hints, and wait for the thread."""
        with self._lock:
            self._next = None
        if (thread := self._thread) is not None:
            thread.join()
