"""Read-ahead of a windowed order without a daemon: each block of neighbours is read once.

Samples of a windowed order are scattered over the blocks of a window. A batch of them costs a read
per sample, although its window costs a few large reads. So a window (`ffserve.neighbours`) is read
as one request, sorted, into one buffer that has the samples in the order in which they are asked
for. A batch is then a copy of a part of that buffer. The next windows are read meanwhile.

The calling thread plans windows and copies batches. The engine's I/O thread does the rest, also
what the kernel does for the page cache, which holds a caller for milliseconds.

It serves a program that reads in the order that it announced, or that it gave to
`Reader.batches`. A read that does not follow the order is read by itself. If other processes read
(the workers of a loader), the process that announced the order has the kernel read its windows into
the page cache, where they find them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.client.source import Int64s, Target
from ffserve.engine.codec import scatter
from ffserve.errors import FFServeError
from ffserve.neighbours import window_ends

LOOK_SIZE, LOOK_COUNT = 128 << 20, 1 << 18
"""How far a window is looked for, in bytes and samples. A larger window is not found."""
AHEAD_SIZE = 32 << 20
"""Bytes of windows that are read ahead of the one in use; one window at least."""
LEAST_SIZE = 4 << 20
"""Smaller windows are read several together."""
LARGEST_MEAN = 32 << 10
"""Larger samples are read singly at the full speed of a disk."""

_INT64 = np.dtype(np.int64)


class WindowRead(Protocol):
    """The request of a window."""

    indices: Int64s
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


@dataclass(slots=True)
class AheadRequest:
    """A request whose samples come out of windows."""

    indices: Int64s
    target: Target
    ahead: ReadAhead
    parts: list[Part]


class ReadAhead:
    """The windows of one order.

    Args:
        order: sample numbers. mean_size: bytes of a sample.
        prepare: has the kernel read samples (in rising order) into the page cache.
        submit: begins to read samples into one buffer, neighbours together.
        finish: waits for that; returns the errors by position.
    """

    def __init__(
        self,
        order: Int64s,
        mean_size: int,
        prepare: Callable[[Int64s], None],
        submit: Callable[[Int64s], WindowRead],
        finish: Callable[[Any], dict[int, FFServeError]],
    ) -> None:
        mean_size = max(mean_size, 1)
        self._order = order
        self._windowed = mean_size <= LARGEST_MEAN
        self._look = min(LOOK_SIZE // mean_size, LOOK_COUNT)
        self._least = max(LEAST_SIZE // mean_size, 1)
        self._ahead = AHEAD_SIZE // mean_size
        self._prepare = prepare
        self._submit = submit
        self._finish = finish
        self._lock = threading.Lock()
        self._windows: deque[Window] = deque()
        self._position = 0
        self._prepared = 0
        """The end of the windows that the kernel reads."""
        self._ends: Iterator[int] = iter(())
        """The ends of windows that were found and not begun, counted from `_looked`."""
        self._looked = self._found = 0
        """Where they were looked for; the end of the last one that was begun."""
        self._preparing: threading.Thread | None = None
        """Runs `_prepare_windows`."""

    def move_to(self, position: int) -> None:
        """The program has used the samples before this position; it may have asked for more.

        If it does not read by itself, the kernel is told about the next windows in a thread: it
        holds the caller for as long as it looks for memory, up to 60 ms a window.
        """
        with self._lock:
            self._position = max(self._position, position)
            if self._preparing is None and self._wants_prepared():
                thread = threading.Thread(
                    target=self._prepare_windows, name="ffserve-ahead", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # no thread: they are read when asked for
                    thread.start()
                    self._preparing = thread

    def _wants_prepared(self) -> bool:
        self._prepared = max(self._prepared, self._position)
        end = min(self._position + self._ahead, len(self._order))
        return self._windowed and not self._windows and self._prepared < end

    def _prepare_windows(self) -> None:
        while True:
            with self._lock:
                numbers = self._next_window(self._prepared) if self._wants_prepared() else None
                if numbers is None:
                    self._preparing = None
                    return
                self._prepared += len(numbers)
            numbers.sort()
            self._prepare(numbers)

    def take_read(self, indices: NDArray[Any]) -> Part | None:
        """Return where the samples come from if they are the next ones of a window that has been
        read; None for all that `take` has to look at. indices: any array."""
        with self._lock:
            if not self._windows or indices.dtype != _INT64 or indices.ndim != 1:
                return None
            window = self._windows[0]
            first = self._position - window.begin
            last = first + len(indices)
            if window.errors != {} or first < 0 or first == last:
                return None
            if window.request.indices[first:last].tobytes() != indices.tobytes():
                return None
            self._position = window.begin + last
            return window, first, last

    def take(self, indices: Int64s) -> list[Part] | None:
        """Return where the samples come from; None if they are not the next ones of the order."""
        with self._lock:
            begin = self._position
            end = begin + len(indices)
            if not (
                self._windowed
                and len(indices)
                and end <= len(self._order)
                and self._order[begin] == indices[0]
                and self._extend(begin, end)
            ):
                return None
            parts = []
            for window in self._windows:
                first, last = max(begin, window.begin), min(end, window.end)
                if first >= last:
                    break
                inside = slice(first - window.begin, last - window.begin)
                # The window's own numbers: the order may have changed since.
                if not np.array_equal(
                    window.request.indices[inside], indices[first - begin : last - begin]
                ):
                    return None
                parts.append((window, inside.start, inside.stop))
            self._position = end
            return parts

    @property
    def _known(self) -> int:
        """The end of the last window."""
        return self._windows[-1].end if self._windows else 0

    def _extend(self, begin: int, end: int) -> bool:
        """Begin to read windows up to some positions, and the next ones; forget older windows.

        Returns: False if the order is not windowed there.
        """
        while self._windows and not self._windows[0].begin <= begin < self._windows[0].end:
            self._wait(self._windows.popleft())
        at = self._known or begin
        while at < len(self._order) and (at < end or at < self._windows[0].end + self._ahead):
            numbers = self._next_window(at)
            if numbers is None:
                break
            self._windows.append(Window(at, at + len(numbers), self._submit(numbers)))
            at += len(numbers)
        return at >= end

    def _next_window(self, begin: int) -> Int64s | None:
        """Return the samples of the window at a position; None, now and later, if there is none."""
        end = next(self._ends, None) if begin == self._found else None
        if end is None:
            numbers = self._order[begin : begin + self._look]
            last = begin + self._look >= len(self._order)
            self._looked = begin
            self._ends = window_ends(numbers, self._least, last=last)
            end = next(self._ends, None)
        self._windowed = end is not None
        if end is None:
            return None
        self._found = self._looked + end
        return self._order[begin : self._found].copy()

    def errors(self, parts: list[Part]) -> dict[int, FFServeError]:
        """Wait for windows; return the errors of a request by position."""
        failed: dict[int, FFServeError] = {}
        first = 0
        for window, begin, end in parts:
            for k, error in self._wait(window).items():
                if begin <= k < end:
                    failed[first + k - begin] = error.located()
            first += end - begin
        return failed

    def _wait(self, window: Window) -> dict[int, FFServeError]:
        with window.lock:
            if window.errors is None:
                window.errors = self._finish(window.request)
            return window.errors

    def close(self) -> None:
        """Wait for the windows that are still on their way."""
        with self._lock:
            self._windowed = False
            while self._windows:
                self._wait(self._windows.popleft())
        if (thread := self._preparing) is not None:
            thread.join()


def offsets_of(parts: list[Part]) -> Int64s:
    """Return the running sum of the samples' lengths."""
    if len(parts) == 1:
        window, begin, end = parts[0]
        own = window.request.target.offsets
        moved: Int64s = own[begin : end + 1] - own[begin]
        return moved
    lengths = [np.diff(window.request.target.offsets[a : b + 1]) for window, a, b in parts]
    offsets = np.zeros(sum(map(len, lengths)) + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return offsets


def copy_parts(parts: list[Part], target: Target) -> None:
    """Copy samples out of their windows, which have been read."""
    at = 0
    for window, begin, end in parts:
        buffer, offsets = window.request.target.buffer, window.request.target.offsets
        assert buffer is not None
        first, last = int(offsets[begin]), int(offsets[end])
        count = end - begin
        if target.buffer is not None:
            place = int(target.offsets[at])
            target.buffer[place : place + last - first] = buffer[first:last]
        else:
            places = target.places()[at : at + count]
            scatter(buffer, offsets[begin:end], np.diff(offsets[begin : end + 1]), places)
        at += count
