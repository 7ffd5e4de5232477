"""Which source a reader takes, and what it does when that one is lost, decided without any I/O.

Each function is a generator. It yields what its driver is to do (`REMOTE`, `LOCAL`: open such a
source; a number: wait so many seconds), gets the source sent in or the error thrown in, and
returns the source to use. `Reader` drives it by calls that block, `ffserve.aio` by awaiting.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from ffserve.errors import AccessDenied, ProtocolError, ReadError, ServerUnavailable

log = logging.getLogger("ffserve")

RECONNECT_S = {"auto": 5.0, "require": 30.0}
"""How long a reader waits for a daemon that went away, before it reads by itself or gives up."""
NOT_SERVED = (ServerUnavailable, ProtocolError, AccessDenied, ReadError)
"""The daemon does not serve these files to us, for whatever reason; an engine of our own may."""


_NOBODY = (FileNotFoundError, NotADirectoryError, ConnectionRefusedError)
"""What connecting says where nobody listens."""


class Origin(enum.Enum):
    """Where samples can come from."""

    REMOTE = "the daemon"
    LOCAL = "an engine in this process"


S = TypeVar("S")
Choosing: TypeAlias = Generator[Origin | float, S, S]


def first(server: str, patience_s: float) -> Choosing[S]:
    """Open the files; a required daemon that is away is waited for."""
    deadline = time.monotonic() + patience_s
    while server != "off":
        try:
            return (yield Origin.REMOTE)
        except NOT_SERVED as error:
            away = isinstance(error, ServerUnavailable)
            if server == "auto":
                # No daemon is nothing to talk about; one that cannot be used is.
                if not away or not isinstance(error.__cause__, _NOBODY):
                    _say_once(f"reading without the daemon: {error}")
                break
            if not away or time.monotonic() >= deadline:
                raise
        yield 0.05
    return (yield Origin.LOCAL)


def after_loss(server: str) -> Choosing[S]:
    """The daemon is gone: wait for the next one, or read by ourselves."""
    deadline = time.monotonic() + RECONNECT_S["auto" if server == "auto" else "require"]
    pause = 0.01
    while True:
        try:
            return (yield Origin.REMOTE)
        except NOT_SERVED as error:
            final = not isinstance(error, (ServerUnavailable, ProtocolError))
            if final or time.monotonic() >= deadline:
                if server != "auto":
                    raise
                _say_once(f"the daemon went away, reading without it: {error}")
                break
        yield pause
        pause = min(2 * pause, 0.25)
    return (yield Origin.LOCAL)


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)
