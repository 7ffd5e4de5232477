"""Scheduler: which request gets the next turn, and which has to wait for memory.

Jobs take turns, and within a job its sessions do. A turn is at most QUANTUM samples and
QUANTUM_SIZE bytes, so a request for 100,000 samples delays its neighbours by one turn, and a job
with sixteen workers gets no more of the disk than one with two. The number of reads in flight is
bounded, so that the next turn comes soon. No request blocks for ever:

* A finished GET keeps its samples pinned until the client acknowledges it, so that the client can
  copy them. When other requests wait for memory, pins older than PIN_GRACE_S are taken back. That
  is safe at any time: a client that copies too late sees the seqlock move and asks again.
* A request that is blocked while some of its samples are ready is answered in part; the client asks
  for the rest and acknowledges the part.
* While the oldest blocked request has waited between FAVOUR_S[0] and FAVOUR_S[1], no other request
  takes memory. Otherwise small samples could for ever take what a large one waits for.
* Prefetching for announced jobs runs when no request has a turn, with at most half of the reads in
  flight, and loses its pins when a request waits for memory (`prefetch.py`).
* After GIVE_UP_S the next sample of a blocked request fails with ReadError. Only leases can hold
  memory for so long.

No socket and no clock: `now` is monotonic time in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ffserve.cache.cache import Cache, Failure, Fetch, Int64s, Load
from ffserve.cache.prefetch import Piece, Prefetcher
from ffserve.errors import STATUS_ARENA_BUSY

QUANTUM, QUANTUM_SIZE = 256, 12 << 20
"""A device reads that in 2 to 6 ms. A turn costs the loop 100 us and 1 us per sample."""
PIN_GRACE_S = 0.05
FAVOUR_S = (0.1, 1.0)
GIVE_UP_S = 20.0
ARENA_SHARE = 8
"""A request that has pinned 1 part in ARENA_SHARE of the arena is answered in part."""
LEASED_SHARE = 2
"""All leases together pin at most 1 part in LEASED_SHARE of the arena; beyond, clients copy."""
LEASED_SLABS = 3 / 4
"""The part of the slabs in which leases may pin slots. Without this bound a few small leases in
every slab would leave none that can be emptied for another size class."""
MOST_UNACKNOWLEDGED = 1024
"""GETs of one session whose pins wait for an acknowledgement; with more, the oldest lose theirs.
So a client that never acknowledges does not make the daemon's memory grow."""
MOST_COUNTED_JOBS = 1024
"""Jobs whose reads are counted."""
_FEW_PINS = 1024


class Reply(Protocol):
    """READY of a request, sent by the I/O thread when all loads that it waits for have succeeded.

    In the daemon this is `engine.io.DirectReply`.
    """

    def arm(self) -> None:
        """Wait for no further load; the reply is not sent before this call."""
        ...

    @property
    def sent(self) -> bool:
        """Whether the reply was sent; final when the loads have ended."""
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
        "indices",
        "lease",
        "owner",
        "reply",
        "tag",
    )

    def __init__(
        self,
        owner: Owner,
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
        self.blocked_since: float | None = None
        self.enough = False
        """Whether the request has pinned its share of the arena and is answered in part."""
        self.count = 0
        """Samples that the answer covers, once the request is finished."""


@dataclass(frozen=True, eq=False, slots=True)
class Lease:
    """The pins of a granted LEASE: slots, their size in bytes, the slabs that they lie in."""

    pins: list[Int64s]
    pinned_size: int
    slabs: Int64s


@dataclass(eq=False, slots=True)
class Owner:
    """One session as the scheduler sees it: its requests, pins and leases."""

    finished: Callable[[SampleRequest], None]
    """Called when a request is finished."""
    job: str = ""
    """Sessions of one job share its turns."""
    taken_back: Callable[[int], None] | None = None
    """Called with its tag before the pins of a finished GET are taken back."""
    runnable: deque[SampleRequest] = field(default_factory=deque)
    waiting: dict[int, SampleRequest] = field(default_factory=dict)
    """Requests that are not finished, by tag."""
    unacknowledged: dict[int, list[Int64s]] = field(default_factory=dict)
    """Pins of finished GETs, by tag."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """Granted leases that pin something, by tag."""
    queued: bool = False
    gone: bool = False


class Scheduler:
    """Gives requests turns at the cache.

    Args:
        submit: reads a load and calls `loaded` when it has ended. The second argument is the
            direct reply that waits for the load, or None.
        most_reads: reads in flight at which turns wait; merged reads count once.
    """

    def __init__(
        self, cache: Cache, submit: Callable[[Load, Any], None], *, most_reads: int
    ) -> None:
        self._cache = cache
        self._submit = submit
        self._most_reads = most_reads
        self._reads = 0
        self.prefetcher = Prefetcher(cache)
        self._turns: deque[str] = deque()
        """Jobs with a runnable request."""
        self._sessions: dict[str, deque[Owner]] = {}
        """The sessions of these jobs that have a runnable request."""
        self._blocked: deque[SampleRequest] = deque()
        self._pins: deque[tuple[float, Owner, int]] = deque()
        self._most_pins = _FEW_PINS
        self.request_count = 0
        """Requests of all sessions that are not finished."""
        self.leased_size = 0
        """Bytes of the slots that leases hold."""
        self._leases_in_slab = np.zeros(len(cache.arena.slab_class), np.int64)
        """Leases with pins in each slab, up to the largest size of the arena."""
        self._leased_slabs = 0
        """Slabs in which a lease pins slots."""
        self._pumped = 0.0
        self._stopped = False
        self.read_sizes: dict[str, int] = {}
        """Bytes read from files by job; a shared read counts for the job that began it."""

    @property
    def _share(self) -> int:
        return max(1, self._cache.arena.size // ARENA_SHARE)

    @property
    def _most_leased(self) -> int:
        return self._cache.arena.size // LEASED_SHARE

    @property
    def _most_leased_slabs(self) -> int:
        return int(self._cache.arena.open_count * LEASED_SLABS)

    @property
    def idle(self) -> bool:
        """Whether no request and no read is under way."""
        return self.request_count == 0 and self._reads == 0

    @property
    def blocked_count(self) -> int:
        """Requests that wait for memory."""
        return len(self._blocked)

    def add(self, request: SampleRequest, now: float) -> None:
        """Accept a request and give turns."""
        if request.lease and (
            self.leased_size >= self._most_leased or self._leased_slabs >= self._most_leased_slabs
        ):
            request.owner.finished(request)
            return
        self.request_count += 1
        request.owner.waiting[request.tag] = request
        request.owner.runnable.append(request)
        self._queue(request.owner)
        self.pump(now)

    def acknowledge(self, owner: Owner, tags: list[int]) -> None:
        """The client has copied the samples of these GETs: unpin them."""
        for tag in tags:
            pins = owner.unacknowledged.pop(tag, None)
            if pins is not None:
                self._cache.release(pins)

    def release(self, owner: Owner, tags: list[int]) -> None:
        """End these leases. A lease that is not granted yet becomes a GET."""
        for tag in tags:
            if tag in owner.waiting:
                owner.waiting[tag].lease = False
            lease = owner.leases.pop(tag, None)
            if lease is not None:
                self.leased_size -= lease.pinned_size
                self._leases_in_slab[lease.slabs] -= 1
                self._leased_slabs -= int(np.sum(self._leases_in_slab[lease.slabs] == 0))
                self._cache.release(lease.pins)

    def loaded(self, load: Load, failures: dict[int, Failure], now: float) -> None:
        """A load has ended."""
        self._reads -= load.reads
        for fetch in self._cache.loaded(load, failures):
            if isinstance(fetch, Piece):
                self.prefetcher.loaded(fetch, now)
                continue
            assert isinstance(fetch, SampleRequest)
            if fetch.owner.gone:
                self._cache.release(fetch.pins)
                fetch.pins = []
            elif fetch.complete or fetch.enough or fetch.blocked_since is not None:
                self._finish(fetch, now)
        self.pump(now)

    def leave(self, owner: Owner, now: float) -> None:
        """A session has ended: drop its requests and give back its pins and leases."""
        owner.gone = True
        for request in owner.waiting.values():
            self.request_count -= 1
            if request.waiting == 0:
                self._cache.release(request.pins)
                request.pins = []
        owner.waiting.clear()
        owner.runnable.clear()
        self._blocked = deque(r for r in self._blocked if r.owner is not owner)
        self.acknowledge(owner, list(owner.unacknowledged))
        self.release(owner, list(owner.leases))
        self.pump(now)

    def next_deadline(self) -> float | None:
        """Return when `pump` must be called again if nothing else happens; None: never."""
        if not self._blocked:
            return None
        since = self._since(self._blocked[0])
        deadlines = [t for edge in (*FAVOUR_S, GIVE_UP_S) if (t := since + edge) > self._pumped]
        self._sweep()
        if self._pins:
            deadlines.append(self._pins[0][0] + PIN_GRACE_S)
        return min(deadlines, default=None)

    def stop(self) -> None:
        """Read nothing any more.

        A client may go on reading its leased samples after its session ended, so no slot may be
        written to from now on.
        """
        self._stopped = True

    # ---- turns ----------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Give turns until every request is blocked or enough reads are in flight."""
        self._pumped = self._cache.next_use.now = now
        if self._stopped:
            return
        if self._blocked:
            self.make_room(now)
            self._unblock(now)
        if self._blocked and self._favours(self._blocked[0], now):
            return
        while self._turns and self._reads < self._most_reads:
            owner = self._next_owner()
            if owner.gone or not owner.runnable:
                continue
            part = self.prefetcher.next_of_window(owner.job, now)
            if part is not None:
                self._start(part, owner.job)
            elif self._turn(owner.runnable[0], now):
                owner.runnable.popleft()
            self._queue(owner)

        if self._turns or self._blocked:
            return
        while self._reads < self._most_reads // 2:
            load = self.prefetcher.next_load(now)
            if load is None:
                break
            self._start(*load)

    def _start(self, load: Load, job: str, reply: Reply | None = None) -> None:
        if job not in self.read_sizes and len(self.read_sizes) >= MOST_COUNTED_JOBS:
            del self.read_sizes[next(iter(self.read_sizes))]
        self.read_sizes[job] = self.read_sizes.get(job, 0) + load.size
        self._submit(load, reply)
        self._reads += load.reads

    def _next_owner(self) -> Owner:
        job = self._turns.popleft()
        sessions = self._sessions[job]
        owner = sessions.popleft()
        owner.queued = False
        if sessions:
            self._turns.append(job)
        else:
            del self._sessions[job]
        return owner

    def _queue(self, owner: Owner) -> None:
        if owner.runnable and not owner.queued:
            owner.queued = True
            sessions = self._sessions.get(owner.job)
            if sessions is None:
                sessions = self._sessions[owner.job] = deque()
                self._turns.append(owner.job)
            sessions.append(owner)

    def _turn(self, request: SampleRequest, now: float) -> bool:
        """Advance a request; return True when it needs no further turn for now."""
        before, waiting = request.cursor, request.waiting
        size = min(QUANTUM_SIZE, max(self._share - request.pinned_size, 1))
        load = self._cache.advance(request, QUANTUM, size)
        if load is not None:
            waiting += 1
            self._start(load, request.owner.job, request.reply)
        if request.waiting > waiting:
            request.reply = None  # it also waits for a load of another request
        # Remembered, since the arena may grow before the loads have ended.
        request.enough = request.pinned_size >= self._share
        whole = request.cursor == len(request.numbers)
        if whole or request.enough:
            if request.waiting == 0:
                self._finish(request, now)
            elif request.reply is not None and whole and not request.failures:
                request.reply.arm()
            return True
        if request.cursor > before:
            return False
        if request.cursor and request.waiting == 0:
            self._finish(request, now)
        else:
            request.blocked_since = now
            self._blocked.append(request)
        return True

    def _finish(self, request: SampleRequest, now: float) -> None:
        owner = request.owner
        request.count = request.cursor
        self.request_count -= 1
        owner.waiting.pop(request.tag, None)
        if request.blocked_since is not None:
            self._blocked.remove(request)
            request.blocked_since = None
        if not request.lease:
            owner.unacknowledged[request.tag] = request.pins
            self._pins.append((now, owner, request.tag))
            if len(owner.unacknowledged) > MOST_UNACKNOWLEDGED:
                self._take_back(owner, next(iter(owner.unacknowledged)))
            self._sweep()
        elif not self._grant(request):
            self._cache.release(request.pins)
            request.count = 0
        owner.finished(request)

    def _grant(self, request: SampleRequest) -> bool:
        """Turn the pins of a request into a lease; return False if leases would hold too much."""
        if self.leased_size + request.pinned_size > self._most_leased:
            return False
        slabs = self._cache.arena.slabs_of(request.pins)
        fresh = int(np.sum(self._leases_in_slab[slabs] == 0))
        if self._leased_slabs + fresh > self._most_leased_slabs:
            return False
        self.leased_size += request.pinned_size
        self._leases_in_slab[slabs] += 1
        self._leased_slabs += fresh
        if request.pins:
            lease = Lease(request.pins, request.pinned_size, slabs)
            request.owner.leases[request.tag] = lease
        return True

    def _sweep(self) -> None:
        """Drop acknowledged GETs from the list of pins."""
        while self._pins and self._pins[0][2] not in self._pins[0][1].unacknowledged:
            self._pins.popleft()
        if len(self._pins) > self._most_pins:
            # A client that never acknowledges stays at the head; drop those behind it.
            self._pins = deque(pin for pin in self._pins if pin[2] in pin[1].unacknowledged)
            self._most_pins = 2 * len(self._pins) + _FEW_PINS

    def make_room(self, now: float) -> None:
        """Take back all pins that may be taken back now."""
        self.prefetcher.make_room()
        while self._pins and self._pins[0][0] + PIN_GRACE_S <= now:
            _, owner, tag = self._pins.popleft()
            self._take_back(owner, tag)

    def _take_back(self, owner: Owner, tag: int) -> None:
        if owner.taken_back is not None:
            owner.taken_back(tag)
        self.acknowledge(owner, [tag])

    def _unblock(self, now: float) -> None:
        waiting = list(self._blocked)
        self._blocked.clear()
        favoured = self._favours(waiting[0], now)
        for request in waiting:
            since = self._since(request)
            if favoured and request is not waiting[0]:
                self._blocked.append(request)
                continue
            request.blocked_since = None
            if not self._turn(request, now):
                request.owner.runnable.appendleft(request)
                self._queue(request.owner)
            elif request.blocked_since is not None:
                request.blocked_since = since
                if now >= since + GIVE_UP_S and request.waiting == 0:
                    self._give_up(request, now)

    def _give_up(self, request: SampleRequest, now: float) -> None:
        request.failures[int(request.numbers[request.cursor])] = Failure(STATUS_ARENA_BUSY)
        request.cursor += 1
        self._finish(request, now)

    def _favours(self, oldest: SampleRequest, now: float) -> bool:
        since = self._since(oldest)
        return since + FAVOUR_S[0] <= now < since + FAVOUR_S[1]

    @staticmethod
    def _since(request: SampleRequest) -> float:
        assert request.blocked_since is not None
        return request.blocked_since
