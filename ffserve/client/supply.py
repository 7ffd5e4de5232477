"""The source of a reader whose calls block: opened at first use, made anew when it is lost.

Threads may use it at the same time; one of them looks for another source while the others wait. A
copy in another process begins without a source.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ffserve.client import connections
from ffserve.client.announced import Announced
from ffserve.client.choice import (
    NOT_SERVED,
    RECONNECT_S,
    Choice,
    Moves,
    Origin,
    Telling,
    Wanted,
    closed_error,
)
from ffserve.client.daemon import open_source
from ffserve.client.local import LocalSource
from ffserve.client.remote import RemoteSource
from ffserve.client.source import Source
from ffserve.errors import FFServeError, ServerUnavailable
from ffserve.socket_path import find_socket

T = TypeVar("T")

LOOK_INTERVAL_S = 0.25
"""How often a reader that only announces looks for a daemon that went away."""


class Supply(Choice):
    """See the module's text."""

    def __init__(self, wanted: Wanted, announced: Announced) -> None:
        super().__init__(wanted, announced)
        self._lock = threading.RLock()
        self._former: Source | None = None
        """Of the job that this process inherited; what was under way there may end there."""
        self._looking: threading.Thread | None = None
        self._looked = 0.0

    # ---- what is to be done ---------------------------------------------------------------

    def _run(self, moves: Moves[T]) -> T:
        try:
            step = next(moves)
            while True:
                try:
                    done = self._done(step)
                except FFServeError as error:
                    step = moves.throw(error)
                else:
                    step = moves.send(done)
        except StopIteration as end:
            result: T = end.value
            return result

    def _done(self, step: Origin | Telling | float) -> Source | None:
        if step is Origin.REMOTE:
            return self._open_remote()
        if step is Origin.LOCAL:
            wanted = self._wanted
            return LocalSource(wanted.paths, wanted.format, wanted.verify, wanted.tolerant)
        if isinstance(step, Telling):
            step.source.announce(*step.order)
            return None
        assert isinstance(step, float)
        time.sleep(step)
        return None

    def _open_remote(self) -> Source:
        wanted = self._wanted
        return open_source(
            find_socket(wanted.socket), wanted.paths, wanted.format, wanted.verify, wanted.tolerant
        )

    # ---- the source -----------------------------------------------------------------------

    def open(self) -> None:
        """Have a source. Raises what opening the files does."""
        with self._lock:
            self._run(self.opening(0.0))

    def current(self) -> Source:
        """Return the source, opening it in a process that has none yet."""
        source = self.source
        if source is not None and (self.away_since is None or not self._look_again()):
            return source
        with self._lock:
            if self._wanted.closed:
                raise closed_error()
            if self.source is None:
                # A copy, in a worker: the daemon of the original may be starting anew just now.
                self._run(self.opening(RECONNECT_S["require"]))
            assert self.source is not None
            return self.source

    def retrying(self, attempt: Callable[[Source], T]) -> T:
        """Run a request; when the daemon goes away meanwhile, run it again as a whole."""
        while True:
            source = self.current()
            try:
                return attempt(source)
            except ServerUnavailable as error:
                if isinstance(source, LocalSource):
                    if source is self.source:
                        raise
                    continue
                self.replace(source, error)

    def replace(self, lost: Source, error: FFServeError) -> None:
        """The daemon is gone: have another source."""
        with self._lock:
            if self._wanted.closed:
                raise closed_error() from error
            self._run(self.replacing(lost))

    def has(self, source: Source) -> bool:
        """Whether what was begun at a source can be finished there."""
        return source in (self.source, self._former) or isinstance(source, LocalSource)

    def _look_again(self) -> bool:
        if not self.due():
            return False
        with self._lock:
            return self._run(self.returning())

    def look_for_daemon(self, instead_of: Source | None) -> None:
        """Look for the daemon in a thread, and tell it what was announced: who trains does not
        wait. Once at a time, and not at once again."""
        now = time.monotonic()
        if now - self._looked < LOOK_INTERVAL_S or (self._looking and self._looking.is_alive()):
            return
        self._looked = now
        self._looking = threading.Thread(
            target=self._go_to_daemon, args=(instead_of,), name="ffserve-look", daemon=True
        )
        self._looking.start()

    def _go_to_daemon(self, instead_of: Source | None) -> None:
        with contextlib.suppress(FFServeError):
            source = self._open_remote()
            with self._lock:
                if self._wanted.closed or self.source is not instead_of:
                    source.close()
                    return
                self._run(self.moving(source))

    def lead(self) -> None:
        """Be of a job of this process's own, not one with what its siblings announce."""
        connections.lead_job()
        with self._lock:
            source = self.source
            if not isinstance(source, RemoteSource) or source.job == connections.job_name():
                return
            with contextlib.suppress(*NOT_SERVED):
                self._run(self.taking(self._open_remote()))
                self._wanted.add_totals(source)
                self._former = source

    # ---- life -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back, and have no source any more; idempotent."""
        with self._lock:
            self._wanted.closed = True
            sources = self.source, self._former
            self.source = self._former = None
        for source in sources:
            if source is not None:
                source.close()

    def after_fork(self) -> None:
        """This process is a child: have another source at the next use."""
        self._lock = threading.RLock()
        self._looking = None
        for source in (self.source, self._former):
            if source is not None:
                source.after_fork()
        self._former = None
        if not isinstance(self.source, LocalSource):
            self.source = None
