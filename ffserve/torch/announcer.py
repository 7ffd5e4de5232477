"""Announce an iteration's order, and how far it has come, without holding training up.

The announcing itself (10 million indices through a socket, a wait for the daemon's word, the next
epoch's order to be drawn) runs in a thread that ends when all is said. Positions are told by the
training loop itself, a few times a second, but by the thread while it lives. Announcements are of
use, not needed: what goes wrong with them is logged once, and training goes on.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ffserve.torch.listeners import Int64s, announce, has_repeats, listeners, reached, sources

log = logging.getLogger("ffserve")

REPORT_INTERVAL_S = 0.05
"""A position is told so often,"""
REPORT_PARTS = 100
"""or so often in an epoch, if that is more often,"""
LEAST_INTERVAL_S = 0.01
"""but never more often than this."""
PATIENCE_S = 0.5
"""How long an iteration waits for what the one before it still has to say; after that it begins
unannounced. Only a daemon that hangs takes so long."""


@dataclass(slots=True)
class Announcement:
    """An order as it is announced; replacement None: it has to be seen."""

    epoch: int
    order: Int64s
    name: str | None = None
    replacement: bool | None = False

    def same(self, other: Announcement | None) -> bool:
        return (
            other is not None
            and (self.epoch, self.name) == (other.epoch, other.name)
            and (self.order is other.order or np.array_equal(self.order, other.order))
        )


Forecast = Callable[[], Announcement | None]


class Announced:
    """One iteration, as far as it was told. Whoever iterates holds it; when it goes, that ended."""

    def __init__(self, current: Announcement, position: int, forecast: Forecast) -> None:
        self.current = current
        self.forecast = forecast
        self.position = position
        self.told = position
        self.told_at = 0.0
        self.over = False
        self.silent = False
        self.busy = True
        self.lock = threading.Lock()


_Last: TypeAlias = "tuple[object, weakref.ref[Announced]]"
_last: dict[Hashable, _Last] = {}
"""Who announced last to each source of samples, and for which iteration: the daemon knows one order
of a job and data set at a time, so of two loaders over the same files the last one counts."""


class Announcer:
    """Announces the iterations of one loader to its dataset.

    Args: clock: monotonic time in seconds.
    """

    def __init__(self, dataset: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._dataset = dataset
        self._clock = clock
        self._token = object()
        self._sources: set[Hashable] = set()
        self._next: Announcement | None = None
        self._thread: threading.Thread | None = None
        self._complained = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Announcer, (self._dataset,)

    def begin(self, current: Announcement, position: int, forecast: Forecast) -> Announced | None:
        """Announce the iteration that begins, then the next one; return at once.

        Args:
            current: the whole order of the epoch. position: where in it the iteration begins.
            forecast: draws the next iteration's order, in another thread.
        Returns: what to report with; None if nobody listens.
        """
        if not self.listens() or not self.settle(PATIENCE_S):
            return None
        announced = Announced(current, position, forecast)
        return announced if self._start(announced) else None

    def listens(self) -> bool:
        """Whether there is anybody to announce to."""
        try:
            return next(listeners(self._dataset), None) is not None
        except Exception as error:  # a dataset of the user's may fail in any way
            self._complain(error)
            return False

    def reached(self, announced: Announced, position: int, *, end: bool = False) -> None:
        """Note how far the training loop has come, and tell it now and then.

        Args: end: the iteration is over, all of the order used or left out.
        """
        announced.position = position = max(announced.position, position)
        now = self._clock()
        if end:
            announced.over = True
        else:
            since = now - announced.told_at
            step = (position - announced.told) * REPORT_PARTS
            if since < REPORT_INTERVAL_S and (
                since < LEAST_INTERVAL_S or step < len(announced.current.order)
            ):
                return
        with announced.lock:
            if announced.busy or announced.silent:
                return
            announced.busy = again = not end and self._was_talked_over()
        if again:
            announced.silent = not self._start(announced)
        else:
            self._tell_position(announced)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until all is said; False if it takes longer."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
            self._thread = None
        return True

    def _start(self, announced: Announced) -> bool:
        try:
            self._sources = sources(self._dataset)
            talked_over = any(speaker is not self._token for speaker, _ in self._lasts())
            expected, self._next = (None if talked_over else self._next), None
            for source in self._sources:
                _last[source] = self._token, weakref.ref(announced)
            self._thread = threading.Thread(
                target=self._tell_all,
                args=(announced, expected),
                name="ffserve-announce",
                daemon=True,
            )
            self._thread.start()
            return True
        except Exception as error:  # as above; or there can be no more threads
            self._thread = None
            self._complain(error)
            return False

    def _lasts(self) -> list[_Last]:
        return [last for source in self._sources if (last := _last.get(source))]

    def _was_talked_over(self) -> bool:
        """Whether another loader announced to the same files meanwhile, and has ended."""
        others = [other() for speaker, other in self._lasts() if speaker is not self._token]
        return bool(others) and all(other is None or other.over for other in others)

    def _tell_all(self, announced: Announced, expected: Announcement | None) -> None:
        if not announced.current.same(expected):
            self._try(announced, lambda: self._say(announced.current))
        self._tell_position(announced)
        self._try(announced, lambda: self._say_next(announced))
        while True:
            with announced.lock:
                if announced.silent or announced.told == announced.position:
                    announced.busy = False
                    return
            self._tell_position(announced)

    def _tell_position(self, announced: Announced) -> None:
        epoch, position = announced.current.epoch, announced.position
        announced.told, announced.told_at = position, self._clock()
        self._try(announced, lambda: reached(self._dataset, epoch, position))

    def _say_next(self, announced: Announced) -> None:
        upcoming = announced.forecast()
        if upcoming is not None:
            self._say(upcoming)
            self._next = upcoming

    def _say(self, what: Announcement) -> None:
        replacement = has_repeats(what.order) if what.replacement is None else what.replacement
        announce(self._dataset, what.order, what.epoch, name=what.name, replacement=replacement)

    def _try(self, announced: Announced, tell: Callable[[], None]) -> None:
        if announced.silent:
            return
        try:
            tell()
        except Exception as error:  # a listener of the user's may fail in any way
            announced.silent = True
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            log.warning("the order of samples is not announced: %s", error)
