"""Requests: a GET, LEASE or PUT on its way through the scheduler, and the session that made it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ffserve.cache.cache import Fetch
from ffserve.dtypes import Int64s
from ffserve.server.reading.waiting import SessionTime
from ffserve.server.users.shares import User


class Reply(Protocol):
    """READY of a request, sent by the I/O thread when all loads that it waits for have succeeded.

    In the daemon this is `engine.io.DirectReply`.
    """

    def arm(self) -> None:
        """Let the reply wait only for the loads that are submitted, or, if none of these is under
        way, for the next one. The reply is not sent without this call."""
        ...

    @property
    def sent(self) -> bool:
        """Whether the reply was sent; final when the loads have ended."""
        ...


class Gate(Protocol):
    """The gate at which a request waits for blocks of remote files before it takes memory; see
    `fetches.BlockGate`."""

    def begin(self, opened: Callable[[int, float], object]) -> None:
        """Begin to wait.

        Args: opened: called once, with the number of samples that can be read, and the time.
        """
        ...

    def close(self) -> None:
        """Give the gate up, since the request is answered or dropped."""
        ...


class SampleRequest(Fetch):
    """One GET or LEASE, on its way through scheduler and cache.

    Args:
        numbers: int64[n], of the samples.
        dataset, indices, asked: of the session that asks: its data set, the indices in it, and the
            time of the request.
        reply: answers the whole request, if it waits for loads of its own only.
    """

    __slots__ = (
        "asked",
        "blocked_since",
        "count",
        "dataset",
        "enough",
        "gate",
        "indices",
        "lease",
        "owner",
        "queued",
        "reply",
        "tag",
        "turned",
    )

    def __init__(
        self,
        owner: Requester,
        tag: int,
        numbers: Int64s,
        *,
        lease: bool = False,
        dataset: Any = None,
        indices: Int64s | None = None,
        asked: float = 0.0,
        reply: Reply | None = None,
    ) -> None:
        super().__init__(numbers)
        self.owner = owner
        self.tag = tag
        self.lease = lease
        self.dataset = dataset
        self.indices = numbers if indices is None else indices
        self.asked = asked
        self.reply = reply
        self.gate: Gate | None = None
        """Where it waits before its first turn; None: nowhere."""
        self.blocked_since: float | None = None
        self.turned = False
        """Whether the request has had a turn."""
        self.queued = 0.0
        """While it waits for its first turn: the part of the reads in flight that were of other
        jobs when it began to."""
        self.enough = False
        """Whether the request has pinned its share of the arena and is answered in part."""
        self.count = 0
        """Samples that the answer covers, once the request is finished."""


@dataclass(frozen=True, eq=False, slots=True)
class GrantedLease:
    """The pins of a granted LEASE: slots, their size in bytes, the slabs that they lie in."""

    pins: list[Int64s]
    pinned_size: int
    slabs: Int64s
    count: int
    """Samples that it was asked for."""


@dataclass(eq=False, slots=True)
class Answered:
    """The pins of a finished GET: slots, their size in bytes, the samples that it was asked for."""

    pins: list[Int64s]
    pinned_size: int
    count: int


@dataclass(eq=False, slots=True)
class Requester:
    """One session as the scheduler sees it: its requests, pins and leases."""

    finished: Callable[[SampleRequest, float], None]
    """Called when a request is finished, with the time."""
    job: str = ""
    """Sessions of one job share its turns."""
    user: User = field(default_factory=User)
    """Jobs of one user share its turns."""
    runnable: deque[SampleRequest] = field(default_factory=deque)
    waiting: dict[int, SampleRequest] = field(default_factory=dict)
    """Requests that are not finished, by tag."""
    unacknowledged: dict[int, Answered] = field(default_factory=dict)
    """Finished GETs, by tag."""
    leases: dict[int, GrantedLease] = field(default_factory=dict)
    """Granted leases that pin something, by tag."""
    time: SessionTime = field(default_factory=SessionTime)
    who: tuple[int, int] | None = None
    """User and namespace."""
    queued: bool = False
    gone: bool = False
