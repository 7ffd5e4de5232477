"""Which source a reader takes, and what it does when that one is lost, decided without any I/O.

A method that returns `Moves` is a generator. It yields what its driver is to do (open a source,
wait so many seconds, announce an order), gets the source sent in or the error thrown in, and
returns when the reader has its source. `supply` drives it by calls that block, `loop_supply` by
awaiting.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from ffserve.client.announced import Announced
from ffserve.client.source import Int64s, Source
from ffserve.dataset import check_same_content, combined_fingerprint
from ffserve.errors import (
    AccessDenied,
    FFServeError,
    ProtocolError,
    ReadError,
    ServerUnavailable,
    UsageError,
)

log = logging.getLogger("ffserve")

RECONNECT_S = {"auto": 5.0, "require": 30.0}
"""How long a reader waits for a daemon that went away, before it reads by itself or gives up."""
RETURN_AFTER_S = 30.0
"""How long a reader that lost its daemon reads by itself before it looks for one again."""
NOT_SERVED = (ServerUnavailable, ProtocolError, AccessDenied, ReadError)
"""The daemon does not serve these files to us, for whatever reason; an engine of our own may."""
_NOBODY = (FileNotFoundError, NotADirectoryError, ConnectionRefusedError)
"""What connecting says where nobody listens."""


class Origin(enum.Enum):
    """Where samples can come from: what is to be opened."""

    REMOTE = "the daemon"
    LOCAL = "an engine in this process"


@dataclass(frozen=True, slots=True)
class Telling:
    """A source that is to be told an order: what `Source.announce` is called with."""

    source: Source
    order: tuple[Int64s, int, str | None, bool]


T = TypeVar("T")
Moves: TypeAlias = Generator[Origin | Telling | float, Any, T]


@dataclass(slots=True)
class Wanted:
    """What a reader was told to open, and what it knows of it whatever source it has.

    paths: the files. format, server, verify: as for `ffserve.open`. tolerant: on_error is "skip".
    count: samples in them. closed: the reader is. totals: counters of sources it has no more.
    unserved: why a daemon that is there does not serve it.
    """

    paths: tuple[str, ...]
    format: str | None
    server: str
    verify: bool
    tolerant: bool
    count: int = 0
    closed: bool = False
    totals: dict[str, int] = field(default_factory=dict)
    unserved: str = ""
    _expected: int | None = None

    @property
    def socket(self) -> str | None:
        """The daemon's socket if it was named."""
        return None if self.server in ("auto", "require", "off") else self.server

    def check(self, source: Source) -> None:
        """Take note of what a new source opened. Raises when it is not what the last one had."""
        if self.closed:
            raise closed_error()
        check_same_content(self._expected, source.shards)
        self._expected = combined_fingerprint(s.fingerprint for s in source.shards)
        self.count = source.count

    def add_totals(self, source: Source) -> None:
        """A source will read no more for this reader."""
        for name in ("hits", "misses", "bytes"):
            self.totals[name] = self.totals.get(name, 0) + int(source.stats()[name])


class Choice:
    """The source that a reader has, and the way to another.

    Args: announced: what another source is told as well.
    """

    def __init__(self, wanted: Wanted, announced: Announced) -> None:
        self.source: Source | None = None
        self.away_since: float | None = None
        """When the daemon went away, or was looked for last; None: it is not missed."""
        self._wanted = wanted
        self._announced = announced

    def opening(self, patience_s: float) -> Moves[None]:
        """Have a first source; a required daemon that is away is waited for."""
        yield from self.taking((yield from self._first(patience_s)))

    def replacing(self, lost: Source) -> Moves[None]:
        """The daemon is gone: wait for the next one, or read by ourselves."""
        if self.source is lost:
            self._retire(lost)
            self.source = None
            yield from self.taking((yield from self._after_loss()))

    def returning(self) -> Moves[bool]:
        """Look for the daemon that went away; whether it is back."""
        try:
            source = yield Origin.REMOTE
        except NOT_SERVED:
            return False
        yield from self.moving(source)
        return True

    def moving(self, source: Source) -> Moves[None]:
        """Have a source, of the daemon that went away, instead of the present one."""
        old = self.source
        yield from self.taking(source)
        self.away_since = None
        self._wanted.unserved = ""
        if old is not None:
            self._retire(old)

    def taking(self, source: Source) -> Moves[None]:
        """Have a source that was opened just now. Raises, and closes it, when it has not what the
        last one had."""
        try:
            self._wanted.check(source)
        except BaseException:
            source.close()
            raise
        # Of this reader's orders another daemon knows nothing. They are of use, not needed.
        with contextlib.suppress(FFServeError):
            for order in self._announced.orders():
                yield Telling(source, order)
            epoch, position = self._announced.position
            if position:
                source.reached(epoch, position)
        self.source = source

    def due(self) -> bool:
        """Whether the daemon that went away is to be looked for; then not soon again."""
        now = time.monotonic()
        if self.away_since is None or now - self.away_since < RETURN_AFTER_S:
            return False
        self.away_since = now
        return True

    def _retire(self, source: Source) -> None:
        self._wanted.add_totals(source)
        source.close()

    def _first(self, patience_s: float) -> Moves[Source]:
        server = self._wanted.server
        deadline = time.monotonic() + patience_s
        while server != "off":
            try:
                source: Source = yield Origin.REMOTE
                self._wanted.unserved = ""
                return source
            except NOT_SERVED as error:
                away = isinstance(error, ServerUnavailable)
                if server == "auto":
                    # No daemon is nothing to talk about; one that cannot be used is.
                    if not away or not isinstance(error.__cause__, _NOBODY):
                        self._do_without("reading without the daemon", error)
                        if away:
                            self.away_since = time.monotonic()
                    break
                if not away or time.monotonic() >= deadline:
                    raise
            yield 0.05
        source = yield Origin.LOCAL
        return source

    def _after_loss(self) -> Moves[Source]:
        server = self._wanted.server
        deadline = time.monotonic() + RECONNECT_S["auto" if server == "auto" else "require"]
        pause = 0.01
        while True:
            try:
                source: Source = yield Origin.REMOTE
                self._wanted.unserved = ""
                return source
            except NOT_SERVED as error:
                final = not isinstance(error, (ServerUnavailable, ProtocolError))
                if final or time.monotonic() >= deadline:
                    if server != "auto":
                        raise
                    self._do_without("the daemon went away, reading without it", error)
                    break
            yield pause
            pause = min(2 * pause, 0.25)
        source = yield Origin.LOCAL
        self.away_since = time.monotonic()
        return source

    def _do_without(self, what: str, error: FFServeError) -> None:
        """Say so, once a process, of a daemon that does not answer whatever the files."""
        self._wanted.unserved = str(error)
        key = f"{what}: {error.path or error}"
        if key not in _said:
            _said.add(key)
            log.warning("%s: %s", what, error)


def closed_error() -> UsageError:
    """Return what a reader that was closed says."""
    return UsageError("this reader is closed")


_said: set[str] = set()
