"""A request for samples of the daemon: what it still has to get, and what it does step by step.

What a request does is a generator of steps, which waits and copies by whoever drives it:
`remote` by calls that block, `loop_supply` by awaiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeAlias

from ffserve import protocol
from ffserve.client.source import Bytes, Int64s, Target
from ffserve.errors import FFServeError, ProtocolError
from ffserve.protocol import Message


@dataclass(slots=True)
class RemotePending:
    """A request on its way: which positions still have to come, and which were asked for."""

    indices: Int64s
    target: Target
    todo: deque[Int64s] = field(default_factory=deque)
    asked: deque[tuple[int, Int64s]] = field(default_factory=deque)
    unsized: Unsized | None = None


@dataclass(slots=True)
class Unsized:
    """What a request needs whose target cannot be made yet, since lengths are not known.

    failed: by position. held: tags of what came and was not copied yet.
    """

    apart: bool
    out: Bytes | None
    failed: dict[int, FFServeError] = field(default_factory=dict)
    held: deque[int] = field(default_factory=deque)


@dataclass(slots=True)
class Awaited:
    """The answer to this tag is needed.

    early: positions that may be copied before it comes; what of them was not is left there.
    """

    tag: int
    kind: type[Message] = protocol.Ready
    early: Int64s | None = None


@dataclass(slots=True)
class Copy:
    """These positions (None: all) are to be copied, after a pause in seconds."""

    positions: Int64s | None
    pause_s: float = 0.0


Steps: TypeAlias = Generator[Awaited | Copy, protocol.Ready | Int64s, dict[int, FFServeError]]


def failures_of(wire: list[object], count: int) -> dict[int, FFServeError]:
    """Return the errors of a READY by their position among `count` samples."""
    failed: dict[int, FFServeError] = {}
    for entry in wire:
        if type(entry) is not list or len(entry) != 7 or type(entry[0]) is not int:
            raise ProtocolError("the daemon sent an error that is none")
        if not 0 <= entry[0] < count:
            raise ProtocolError("the daemon sent an error for a sample it was not asked for")
        failed[entry[0]] = protocol.error_from_wire(entry[1:])
    return failed
