"""Windows of an order without a daemon: each block of neighbours is read once, in large pieces.

Samples of a windowed order are scattered over the blocks of a window (`ffserve/reads/windows.py`),
so a batch of them costs a read per sample, although its window costs a few large reads. There are
two ways out, for two kinds of program:

* One that reads in the order that it announced, or gave to `Reader.batches`, gets its samples out
  of windows: each is one request, sorted, into one buffer, and the next ones are read meanwhile.
* Where other processes read (the workers of a loader), the process that announced the order has
  the kernel read its windows into the page cache, in a thread, since the kernel holds the caller
  while it looks for memory, up to 60 ms a window.

A read that does not follow the order is read by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.client.source import Target
from ffserve.dtypes import Int64s
from ffserve.engine.codec import scatter
from ffserve.errors import FFServeError
from ffserve.reads.windows import LEAST_SIZE, fewest, window_ends

LOOK_SIZE, LOOK_COUNT = 128 << 20, 1 << 18
"""The search for a window ends after this many bytes or samples; a larger window is not found."""
AHEAD_SIZE = 32 << 20
"""A source reads windows of this many bytes ahead of the one in use, and at least one window."""


class WindowRead(Protocol):
    """The request of a window; its target has the samples in the window's order."""

    target: Target


@dataclass(slots=True, eq=False)
class Window:
    """A window of the positions [begin, end) of an order, on its way."""

    begin: int
    end: int
    request: WindowRead
    lock: threading.Lock = field(default_factory=threading.Lock)
    errors: dict[int, FFServeError] | None = None
    """By position in the window; None until its reads were waited for."""


Part: TypeAlias = tuple[Window, int, int]
"""Samples of a window: from its first on, and up to its end."""


class Windows:
    """The windows of one order.

    Args:
        order: sample numbers. mean_size: bytes of a sample.
        advise: has the kernel read samples (in rising order) into the page cache.
        submit: begins to read samples into one buffer, neighbours together.
        finish: waits for that; returns the errors by position.

    any: whether the order has windows, at its beginning.
    """

    def __init__(
        self,
        order: Int64s,
        mean_size: int,
        advise: Callable[[Int64s], object],
        submit: Callable[[Int64s], WindowRead],
        finish: Callable[[Any], dict[int, FFServeError]],
    ) -> None:
        mean_size = max(mean_size, 1)
        self._least = fewest(mean_size, LEAST_SIZE)
        self._order = order if self._least else order[:0]
        self._look = min(LOOK_SIZE // mean_size, LOOK_COUNT)
        self._ahead = AHEAD_SIZE // mean_size
        self._advise, self._submit, self._finish = advise, submit, finish
        self._lock = threading.Lock()
        self._position = 0
        self._begun: deque[Window] = deque()
        """Those that this process reads."""
        self._known = 0
        """The end of the windows that were begun, or that the kernel was told about."""
        following = self._from(0)
        first = next(following, None)
        self.any = first is not None
        self._following = following if first is None else chain((first,), following)
        self._thread: threading.Thread | None = None

    def _from(self, begin: int) -> Iterator[Int64s]:
        """Yield the windows from a position on; it ends where the order has none."""
        while begin < len(self._order):
            some = self._order[begin : begin + self._look]
            end, last = 0, begin + self._look >= len(self._order)
            for each in window_ends(some, self._least, last=last):
                yield some[end:each]
                end = each
            if not end:
                return
            begin += end

    # ---- a program that reads -------------------------------------------------------------

    def take_read(self, indices: NDArray[Any]) -> Part | None:
        """Return where samples come from that are the next ones of a window that has been read;
        None: `take` has to look. indices: any array."""
        with self._lock:
            if not self._begun or indices.dtype != np.int64 or indices.ndim != 1:
                return None
            window, begin, end = self._begun[0], self._position, self._position + len(indices)
            if window.errors != {} or not window.begin <= begin < end <= window.end:
                return None
            if self._order[begin:end].tobytes() != indices.tobytes():
                return None
            self._position = end
            return window, begin - window.begin, end - window.begin

    def take(self, indices: Int64s) -> list[Part] | None:
        """Return where samples come from; None: they are not the next ones of the order."""
        with self._lock:
            begin, end = self._position, self._position + len(indices)
            if not len(indices) or self._order[begin:end].tobytes() != indices.tobytes():
                return None
            while self._begun and not self._begun[0].begin <= begin < self._begun[0].end:
                self._wait(self._begun.popleft())
            if not self._begun and self._known != begin:
                self._known, self._following = begin, self._from(begin)
            while self._known < end or self._known < self._begun[0].end + self._ahead:
                numbers = next(self._following, None)
                if numbers is None:
                    break
                known = self._known + len(numbers)
                self._begun.append(Window(self._known, known, self._submit(numbers.copy())))
                self._known = known
            if self._known < end:
                return None
            self._position = end
            parts = []
            for window in self._begun:
                first, last = max(begin, window.begin), min(end, window.end)
                if first < last:
                    parts.append((window, first - window.begin, last - window.begin))
            return parts

    def copy(self, parts: list[Part], target: Target) -> dict[int, FFServeError]:
        """Wait for windows and copy samples out of them; return the errors by position."""
        failed: dict[int, FFServeError] = {}
        at = 0
        for window, begin, end in parts:
            for k, error in self._wait(window).items():
                if begin <= k < end:
                    failed[at + k - begin] = error.located()
            buffer, offsets = window.request.target.buffer, window.request.target.offsets
            assert buffer is not None
            first, last, count = int(offsets[begin]), int(offsets[end]), end - begin
            if target.buffer is not None:
                place = int(target.offsets[at])
                target.buffer[place : place + last - first] = buffer[first:last]
            else:
                lengths = np.diff(offsets[begin : end + 1])
                scatter(buffer, offsets[begin:end], lengths, target.places()[at : at + count])
            at += count
        return failed

    def _wait(self, window: Window) -> dict[int, FFServeError]:
        with window.lock:
            if window.errors is None:
                window.errors = self._finish(window.request)
            return window.errors

    # ---- a program whose workers read -----------------------------------------------------

    def move_to(self, position: int) -> None:
        """The program has used the samples before this position; it may have asked for more."""
        with self._lock:
            self._position = max(self._position, position)
            if not self._begun and self._known < self._position:
                self._known, self._following = self._position, self._from(self._position)
            if self._thread is None and self._is_due():
                thread = threading.Thread(
                    target=self._advise_windows, name="ffserve-ahead", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # no thread: no hints
                    thread.start()
                    self._thread = thread

    def _is_due(self) -> bool:
        end = min(self._position + self._ahead, len(self._order))
        return not self._begun and self._known < end

    def _advise_windows(self) -> None:
        while True:
            with self._lock:
                numbers = next(self._following, None) if self._is_due() else None
                if numbers is None:
                    self._thread = None
                    return
                self._known += len(numbers)
            self._advise(np.sort(numbers))

    def close(self) -> None:
        """Read no more, and wait for what is on its way."""
        with self._lock:
            self._order, self._following = self._order[:0], iter(())
            while self._begun:
                self._wait(self._begun.popleft())
        if (thread := self._thread) is not None:
            thread.join()
