"""Who is served next, and who has to wait for room.

Jobs take turns, and within a job its sessions, of at most QUANTUM samples and QUANTUM_SIZE bytes
each: a request for 100,000 samples delays its neighbours by one turn, and a job with sixteen
workers gets no more of the disk than one with two. Reads submitted and not yet done are bounded, so
that a turn comes soon. Nobody can be blocked for good:

* A finished GET keeps its samples pinned until the client acknowledges it, so that it can copy
  them; when others wait for room, a pin older than PIN_GRACE_S is taken back. That is safe at any
  time: a client that copies too late sees the seqlock move and asks again.
* A request that cannot get on although some of its samples are there ends early; the client asks
  for the rest, acknowledging what it has.
* While the oldest waiting request has waited for FAVOUR_S[0] to FAVOUR_S[1], nobody else takes
  room, so that small samples do not for ever take what a large one waits for.
* What announced jobs will ask for is read ahead when nobody else has a turn, at half of that depth
  at most, and its pins are given up when anybody waits for room (`ahead`).
* After GIVE_UP_S (only leases can hold room that long) its next sample fails with ReadError.

No socket and no clock: `now` is monotonic time in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ffserve.cache.cache import Cache, Failure, Fetch, Int64s, Load
from ffserve.errors import STATUS_ARENA_BUSY
from ffserve.server.prefetch import Prefetcher

QUANTUM, QUANTUM_SIZE = 256, 12 << 20
"""What a device reads in 2 to 6 ms. A turn costs the loop 100 us and 1 us a sample."""
PIN_GRACE_S = 0.05
FAVOUR_S = (0.1, 1.0)
GIVE_UP_S = 20.0
ARENA_SHARE = 8
"""A request pins at most one part in this many of the arena before it is answered in part."""
LEASED_SHARE = 2
"""All leases together take at most one part in this many; beyond, clients get copies."""
MOST_COUNTED = 1024
"""Jobs whose reads are counted."""
_FEW_PINS = 1024


class Promise(Protocol):
    """An answer that goes out by itself when all that was submitted with it has been read well."""

    def arm(self) -> None:
        """Nothing further is submitted with it. Before this is called it does not go out."""
        ...

    @property
    def sent(self) -> bool:
        """Whether it went out; certain when the loads have ended."""
        ...


@dataclass(eq=False, slots=True)
class Request:
    """One GET or LEASE. `context` is the asker's own."""

    owner: Owner
    tag: int
    fetch: Fetch
    lease: bool
    context: object
    blocked_since: float | None = None
    enough: bool = False
    """Whether it is to be answered in part, having pinned its share of the arena."""
    count: int = 0
    """How many of the samples were dealt with, once it is finished."""
    promise: Promise | None = None
    """Answers for all of it, if it waits for nothing but loads of its own."""


@dataclass(eq=False, slots=True)
class Owner:
    """What one session has with the scheduler."""

    finished: Callable[[Request], None]
    """Called when a request is decided."""
    job: str = ""
    """Whose turn it shares."""
    taken_back: Callable[[int], None] | None = None
    """Called with its tag before the pins of a finished GET are taken back."""
    runnable: deque[Request] = field(default_factory=deque)
    waiting: dict[int, Request] = field(default_factory=dict)
    """Everything that is not finished, by tag."""
    unacknowledged: dict[int, list[Int64s]] = field(default_factory=dict)
    leases: dict[int, Fetch] = field(default_factory=dict)
    queued: bool = False
    gone: bool = False


class Scheduler:
    """Turns over the cache.

    Args:
        submit: read a load; `loaded` is to be called when it ended. The second argument is a
            request's promise, which waits for the load, or None.
        most_reads: submitted to the device and not yet done before turns wait; neighbours that
            are read together count once.
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
        """Jobs with something to do."""
        self._lines: dict[str, deque[Owner]] = {}
        """The sessions of these jobs."""
        self._blocked: deque[Request] = deque()
        self._by_fetch: dict[Fetch, Request] = {}
        self._pins: deque[tuple[float, Owner, int]] = deque()
        self._most_pins = _FEW_PINS
        self.leased_size = 0
        """Bytes of the slots that leases hold."""
        self._pumped = 0.0
        self._stopped = False
        self.read_sizes: dict[str, int] = {}
        """Bytes that were read from files for each job; reads that another began count for him."""

    @property
    def _share(self) -> int:
        return max(1, self._cache.arena.size // ARENA_SHARE)

    @property
    def _most_leased(self) -> int:
        return self._cache.arena.size // LEASED_SHARE

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._by_fetch and self._reads == 0

    @property
    def request_count(self) -> int:
        """Requests that are not decided yet, of all sessions."""
        return len(self._by_fetch)

    @property
    def blocked_count(self) -> int:
        """Requests that wait for room."""
        return len(self._blocked)

    def add(self, request: Request, now: float) -> None:
        """Take a request in and serve what can be served."""
        if request.lease and self.leased_size >= self._most_leased:
            request.owner.finished(request)
            return
        self._by_fetch[request.fetch] = request
        request.owner.waiting[request.tag] = request
        request.owner.runnable.append(request)
        self._queue(request.owner)
        self.pump(now)

    def acknowledge(self, owner: Owner, tags: list[int]) -> None:
        """The samples of these GETs were copied."""
        for tag in tags:
            pins = owner.unacknowledged.pop(tag, None)
            if pins is not None:
                self._cache.release(pins)

    def release(self, owner: Owner, tags: list[int]) -> None:
        """These leases are over. One that has not come yet is pinned as for a GET."""
        for tag in tags:
            if tag in owner.waiting:
                owner.waiting[tag].lease = False
            fetch = owner.leases.pop(tag, None)
            if fetch is not None:
                self.leased_size -= fetch.pinned_size
                self._cache.release(fetch.pins)

    def loaded(self, load: Load, failures: dict[int, Failure], now: float) -> None:
        """A load ended."""
        self._reads -= load.reads
        for fetch in self._cache.loaded(load, failures):
            request = self._by_fetch.get(fetch)
            if request is None:
                if not self.prefetcher.loaded(fetch, now):
                    self._cache.release(fetch.pins)
                    fetch.pins = []
            elif fetch.complete or request.enough or request.blocked_since is not None:
                self._finish(request, now)
        self.pump(now)

    def leave(self, owner: Owner, now: float) -> None:
        """A session ended: drop its requests and give back all its pins."""
        owner.gone = True
        for request in owner.waiting.values():
            del self._by_fetch[request.fetch]
            if request.fetch.waiting == 0:
                self._cache.release(request.fetch.pins)
                request.fetch.pins = []
        owner.waiting.clear()
        owner.runnable.clear()
        self._blocked = deque(r for r in self._blocked if r.owner is not owner)
        self.acknowledge(owner, list(owner.unacknowledged))
        self.release(owner, list(owner.leases))
        self.pump(now)

    def next_deadline(self) -> float | None:
        """When `pump` must be called again though nothing happens; None: need not."""
        if not self._blocked:
            return None
        since = self._since(self._blocked[0])
        deadlines = [t for edge in (*FAVOUR_S, GIVE_UP_S) if (t := since + edge) > self._pumped]
        self._sweep()
        if self._pins:
            deadlines.append(self._pins[0][0] + PIN_GRACE_S)
        return min(deadlines, default=None)

    def stop(self) -> None:
        """Read nothing any more: whose session ends from now on may still look at what it leased,
        and nobody would leave that alone."""
        self._stopped = True

    # ---- turns ----------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Give turns until nobody can get on or enough is on its way."""
        self._pumped = self._cache.uses.now = now
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
            if self._turn(owner.runnable[0], now):
                owner.runnable.popleft()
            self._queue(owner)

        if self._turns or self._blocked:
            return
        while self._reads < self._most_reads // 2:
            load = self.prefetcher.next_load(now)
            if load is None:
                break
            self._start(*load)

    def _start(self, load: Load, job: str, promise: Promise | None = None) -> None:
        if job not in self.read_sizes and len(self.read_sizes) >= MOST_COUNTED:
            del self.read_sizes[next(iter(self.read_sizes))]
        size = self.read_sizes.get(job, 0) + load.size
        self.read_sizes[job] = size
        self._submit(load, promise)
        self._reads += load.reads

    def _next_owner(self) -> Owner:
        job = self._turns.popleft()
        line = self._lines[job]
        owner = line.popleft()
        owner.queued = False
        if line:
            self._turns.append(job)
        else:
            del self._lines[job]
        return owner

    def _queue(self, owner: Owner) -> None:
        if owner.runnable and not owner.queued:
            owner.queued = True
            line = self._lines.get(owner.job)
            if line is None:
                line = self._lines[owner.job] = deque()
                self._turns.append(owner.job)
            line.append(owner)

    def _turn(self, request: Request, now: float) -> bool:
        """Advance a request; True when it needs no further turn for now."""
        fetch = request.fetch
        before, waiting = fetch.cursor, fetch.waiting
        size = min(QUANTUM_SIZE, max(self._share - fetch.pinned_size, 1))
        load = self._cache.advance(fetch, QUANTUM, size)
        if load is not None:
            waiting += 1
            self._start(load, request.owner.job, request.promise)
        if fetch.waiting > waiting:
            request.promise = None  # another began to read a part of it
        # Remembered, since the arena may grow before what is on its way has come.
        request.enough = fetch.pinned_size >= self._share
        if fetch.cursor == len(fetch.numbers) or request.enough:
            if fetch.waiting == 0:
                self._finish(request, now)
            elif (
                request.promise is not None
                and fetch.cursor == len(fetch.numbers)
                and not fetch.failures
            ):
                request.promise.arm()
            return True
        if fetch.cursor > before:
            return False
        if fetch.cursor and fetch.waiting == 0:
            self._finish(request, now)
        else:
            request.blocked_since = now
            self._blocked.append(request)
        return True

    def _finish(self, request: Request, now: float) -> None:
        fetch, owner = request.fetch, request.owner
        request.count = fetch.cursor
        del self._by_fetch[fetch]
        owner.waiting.pop(request.tag, None)
        if request.blocked_since is not None:
            self._blocked.remove(request)
            request.blocked_since = None
        if not request.lease:
            owner.unacknowledged[request.tag] = fetch.pins
            self._pins.append((now, owner, request.tag))
            self._sweep()
        elif self.leased_size + fetch.pinned_size <= self._most_leased:
            owner.leases[request.tag] = fetch
            self.leased_size += fetch.pinned_size
        else:
            self._cache.release(fetch.pins)
            request.count = 0
        owner.finished(request)

    def _sweep(self) -> None:
        while self._pins and self._pins[0][2] not in self._pins[0][1].unacknowledged:
            self._pins.popleft()
        if len(self._pins) > self._most_pins:
            # One client that never acknowledges keeps the head; the others' are long gone.
            self._pins = deque(pin for pin in self._pins if pin[2] in pin[1].unacknowledged)
            self._most_pins = 2 * len(self._pins) + _FEW_PINS

    def make_room(self, now: float) -> None:
        """Take back the pins that may be taken back."""
        self.prefetcher.make_room()
        while self._pins and self._pins[0][0] + PIN_GRACE_S <= now:
            _, owner, tag = self._pins.popleft()
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
                if now >= since + GIVE_UP_S and request.fetch.waiting == 0:
                    self._give_up(request, now)

    def _give_up(self, request: Request, now: float) -> None:
        fetch = request.fetch
        fetch.failures[int(fetch.numbers[fetch.cursor])] = Failure(STATUS_ARENA_BUSY)
        fetch.cursor += 1
        self._finish(request, now)

    def _favours(self, oldest: Request, now: float) -> bool:
        since = self._since(oldest)
        return since + FAVOUR_S[0] <= now < since + FAVOUR_S[1]

    @staticmethod
    def _since(request: Request) -> float:
        assert request.blocked_since is not None
        return request.blocked_since
