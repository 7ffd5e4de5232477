"""Announcing of orders: the order of each iteration, and the position of the training loop in it.

The announcement itself (10 million indices through a socket, the daemon's answer, the computation
of the next epoch's order) runs in a thread that ends when everything is announced. The training
loop reports positions itself, a few times a second; while the thread lives, the thread reports
them. Announcing is useful, not necessary: the first failure is logged, and training goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ffserve.dtypes import Int64s
from ffserve.torch.dataset import announce, has_repeats, reached, readers_below, sources

log = logging.getLogger("ffserve")

REPORT_INTERVAL_S = 0.05
"""The position of the loop is reported after this time."""
REPORTS_PER_EPOCH = 100
"""The position is also reported after this fraction of the epoch, if that is sooner."""
MIN_INTERVAL_S = 0.01
"""The position is never reported more often than this."""
SETTLE_TIMEOUT_S = 0.5
"""An iteration waits this long for the announcements of the one before it, and then begins
unannounced. Only a daemon that hangs takes this long."""


@dataclass(slots=True)
class Announcement:
    """An order as it is announced. replacement: None if the order itself shows whether it has
    repeats."""

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


PredictNext = Callable[[], Announcement | None]


class AnnouncedIteration:
    """One iteration, and the position that was reported last. It is over when this object is gone,
    because no loop iterates any more."""

    def __init__(self, current: Announcement, position: int, predict_next: PredictNext) -> None:
        self.current = current
        self.predict_next = predict_next
        self.position = position
        self.reported = position
        self.reported_at = 0.0
        self.over = False
        self.failed = False
        self.busy = True
        """The thread is reporting."""
        self.lock = threading.Lock()


class Announcer:
    """Announces the iterations of one loader to its dataset.

    The daemon knows one order per job and dataset. So of two loaders over the same files in this
    process the last announcement counts, and each announcer tells the others which files it has
    announced to: they announce again when that iteration is over.

    Args: clock: monotonic time in seconds.
    """

    def __init__(self, dataset: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._dataset = dataset
        self._clock = clock
        self._readers: list[Any] = []
        self._sources: set[Hashable] = set()
        """Keys of the readers announced to, which are kept alive: a key may be the id of one."""
        self._replaced_by: list[weakref.ref[AnnouncedIteration]] = []
        """Iterations of other loaders that have replaced what was announced here."""
        self._next: Announcement | None = None
        self._thread: threading.Thread | None = None
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Announcer, (self._dataset,)

    def begin(
        self, current: Announcement, position: int, predict_next: PredictNext
    ) -> AnnouncedIteration | None:
        """Announce the iteration that begins, then the next one; return at once.

        Args:
            current: the whole order of the epoch. position: where in it the iteration begins.
            predict_next: computes the next iteration's order, in another thread.
        Returns: what to report with; None if there is nobody to announce to.
        """
        if not self.has_readers() or not self.settle(SETTLE_TIMEOUT_S):
            return None
        iteration = AnnouncedIteration(current, position, predict_next)
        return iteration if self._start(iteration) else None

    def has_readers(self) -> bool:
        """Return whether any reader or dataset takes announcements."""
        try:
            return next(readers_below(self._dataset), None) is not None
        except Exception as error:  # a dataset of the user's may fail in any way
            self._warn(error)
            return False

    def reached(self, iteration: AnnouncedIteration, position: int, *, end: bool = False) -> None:
        """Note the training loop's position, and report it now and then.

        Args: end: the iteration is over, all of the order used or left out.
        """
        iteration.position = position = max(iteration.position, position)
        now = self._clock()
        if end:
            iteration.over = True
        else:
            elapsed = now - iteration.reported_at
            advance = (position - iteration.reported) * REPORTS_PER_EPOCH
            if elapsed < REPORT_INTERVAL_S and (
                elapsed < MIN_INTERVAL_S or advance < len(iteration.current.order)
            ):
                return
        with iteration.lock:
            if iteration.busy or iteration.failed:
                return
            iteration.busy = again = not end and self._may_announce_again()
        if again:
            iteration.failed = not self._start(iteration)
        else:
            self._report_position(iteration)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is announced; return False if it takes longer."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
            self._thread = None
        return True

    def _start(self, iteration: AnnouncedIteration) -> bool:
        try:
            self._readers = list(readers_below(self._dataset))
            self._sources = sources(self._readers)
            with _lock:
                expected, self._next = (None if self._replaced_by else self._next), None
                self._replaced_by.clear()
                _announcers.add(self)
                for other in _announcers:
                    if other is not self and other._sources & self._sources:
                        other._note_replaced(iteration)
            self._thread = threading.Thread(
                target=self._announce_all,
                args=(iteration, expected),
                name="ffserve-announce",
                daemon=True,
            )
            self._thread.start()
            return True
        except Exception as error:  # of the user's dataset; or no thread can be started
            self._thread = None
            self._warn(error)
            return False

    def _note_replaced(self, iteration: AnnouncedIteration) -> None:
        running = [other for other in self._replaced_by if not _is_over(other)]
        self._replaced_by = [*running, weakref.ref(iteration)]

    def _may_announce_again(self) -> bool:
        """Return whether other loaders have announced orders of the same files, and are done."""
        return bool(self._replaced_by) and all(map(_is_over, self._replaced_by))

    def _announce_all(self, iteration: AnnouncedIteration, expected: Announcement | None) -> None:
        if not iteration.current.same(expected):
            self._try(iteration, lambda: self._announce(iteration.current))
        self._report_position(iteration)
        self._try(iteration, lambda: self._announce_next(iteration))
        while True:
            with iteration.lock:
                if iteration.failed or iteration.reported == iteration.position:
                    iteration.busy = False
                    return
            self._report_position(iteration)

    def _report_position(self, iteration: AnnouncedIteration) -> None:
        epoch, position = iteration.current.epoch, iteration.position
        iteration.reported, iteration.reported_at = position, self._clock()
        self._try(iteration, lambda: reached(self._dataset, epoch, position))

    def _announce_next(self, iteration: AnnouncedIteration) -> None:
        upcoming = iteration.predict_next()
        if upcoming is not None:
            self._announce(upcoming)
            self._next = upcoming

    def _announce(self, what: Announcement) -> None:
        replacement = has_repeats(what.order) if what.replacement is None else what.replacement
        announce(self._dataset, what.order, what.epoch, name=what.name, replacement=replacement)

    def _try(self, iteration: AnnouncedIteration, call: Callable[[], None]) -> None:
        if iteration.failed:
            return
        try:
            call()
        except Exception as error:  # a reader of the user's may fail in any way
            iteration.failed = True
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the order of samples is not announced: %s", error)


_announcers: weakref.WeakSet[Announcer] = weakref.WeakSet()
"""Announcers that have announced an order and are still in use."""
_lock = threading.Lock()
"""It guards `_announcers`, and what replaced the announcements of each."""


def _unlock_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_after_fork)


def _is_over(reference: weakref.ref[AnnouncedIteration]) -> bool:
    iteration = reference()
    return iteration is None or iteration.over
