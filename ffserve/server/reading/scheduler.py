"""Scheduler: which request gets the next turn, and which has to wait for memory.

Users take turns (`users.FairShare`, by samples and bytes), within a user its jobs do, and within a
job its sessions. A turn is at most QUANTUM samples and QUANTUM_SIZE bytes, so a request for 100,000
samples delays its neighbours by one turn, and a job with sixteen workers gets no more of the disk
than one with two. The number of reads in flight is bounded, so that the next turn comes soon; while
several users ask, each has a part of it. `pump` gives MOST_TURNS turns and then lets the loop serve
others. No request blocks for ever:

* A finished GET keeps its samples pinned until the client acknowledges it, so that the client can
  copy them. When other requests wait for memory, pins older than PIN_GRACE_S are taken back, and
  younger ones of a user who holds more than an equal share of the arena (pins, leases, requests
  under way) when another user waits. That is safe at any time: a client that copies too late sees
  the seqlock move and asks again.
* A request that is blocked while some of its samples are ready is answered in part; the client asks
  for the rest and acknowledges the part.
* While the oldest blocked request has waited between FAVOUR_S[0] and FAVOUR_S[1], no other request
  takes memory. Otherwise small samples could for ever take what a large one waits for. Other users
  with less than an equal share of the arena go on.
* Prefetching for announced jobs runs when no request has a turn, with at most half of the reads in
  flight, and loses its pins when a request waits for memory (`prefetch.py`).
* After GIVE_UP_S the next sample of a blocked request fails with ReadError. Only leases can hold
  memory for so long.

No socket and no clock: `now` is monotonic time in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np

from ffserve.cache.cache import Cache, Fetch, Load
from ffserve.cache.prefetch import Piece, Prefetcher
from ffserve.dtypes import Int64s
from ffserve.errors import STATUS_ARENA_BUSY, Failure
from ffserve.server.reading.statistics import Histogram
from ffserve.server.reading.waiting import JobReads, SessionTime
from ffserve.server.users.shares import ACTIVE_S, MOST_ASKED, FairShare, User

QUANTUM, QUANTUM_SIZE = 256, 12 << 20
"""A device reads that in 2 to 6 ms."""
TURN_COUNT = 100
"""A turn costs the loop as much as so many samples (1 us each), also if it finds no memory."""
MOST_TURNS = 4
"""Turns that one `pump` gives, one with several users; the next one comes after the loop has looked
for messages."""
SEVERAL_QUANTUM, SEVERAL_SHARE = 64, 4
"""With several users a turn is shorter, and 1 part in SEVERAL_SHARE of the reads is in flight, so
that the turn of another user comes soon. A disk is busy with that, for more turns of the loop."""
FLOWING_SIZE = 8 << 20
"""Bytes that one of several users has in flight, at which its turns wait: 4 ms of a disk."""
MOST_TRIED = 4
"""Blocked requests of one user that one `pump` tries again: the oldest, and others in turn. With
several users: the oldest, and one of the others."""
RETRY_S = 0.01
"""With several users: how long a user that found no memory does not look for any. A user with less
than an equal share looks again as soon as a pin was released."""
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
MEASURED_SIZE, MEASURED = 16 << 20, 8
"""Bytes read, while reads are in flight, over which their time is measured; the number of
measurements that are remembered."""
_FEW_PINS = 1024
_FEW = 16
"""Tags whose pins one step of `leave` gives back."""


class Reply(Protocol):
    """READY of a request, sent by the I/O thread when all loads that it waits for have succeeded.

    In the daemon this is `engine.io.DirectReply`.
    """

    def arm(self) -> None:
        """Wait for no further load than those submitted, or, if none of these is under way, than
        the next one; the reply is not sent without this call."""
        ...

    @property
    def sent(self) -> bool:
        """Whether the reply was sent; final when the loads have ended."""
        ...


class Gate(Protocol):
    """Where a request waits for blocks of remote files before it takes memory: `fetches.Gate`."""

    def begin(self, opened: Callable[[int, float], object]) -> None:
        """Begin to wait.

        Args: opened: called once, with the number of samples that can be read, and the time.
        """
        ...

    def close(self) -> None:
        """The request is answered, or dropped."""
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
class Lease:
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
class Owner:
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
    leases: dict[int, Lease] = field(default_factory=dict)
    """Granted leases that pin something, by tag."""
    time: SessionTime = field(default_factory=SessionTime)
    who: tuple[int, int] | None = None
    """User and namespace."""
    queued: bool = False
    gone: bool = False


@dataclass(eq=False, slots=True)
class _Turns:
    """What the scheduler knows of one user."""

    user: User
    jobs: deque[str] = field(default_factory=deque)
    """Jobs with a runnable request."""
    sessions: dict[str, deque[Owner]] = field(default_factory=dict)
    """The sessions of these jobs that have a runnable request."""
    blocked: deque[SampleRequest] = field(default_factory=deque)
    """By the time since when they wait."""
    tried: int = 0
    """The number of `blocked` that is tried next."""
    failed_at: float = float("-inf")
    failed_after: int = 0
    """When no memory was found last, and how many releases of pins there had been by then."""
    pins: deque[tuple[float, Owner, int]] = field(default_factory=deque)
    """When GETs were finished, their sessions and tags; some are acknowledged already."""
    most_pins: int = _FEW_PINS
    reads: int = 0
    read_size: int = 0
    """Reads in flight, and their bytes."""
    pinned_size: int = 0
    pinning_size: int = 0
    """Bytes of slots that finished GETs hold, and requests that are not finished."""
    leased_size: int = 0
    leased_count: int = 0
    """Bytes of slots that leases hold, and samples that they were asked for."""
    seen: float = float("-inf")
    """The time of the last request."""

    @property
    def idle(self) -> bool:
        """Whether nothing of it is under way."""
        return not (self.jobs or self.blocked or self.pins or self.reads or self.leased_count)


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
        self._reading: dict[int, tuple[_Turns | None, JobReads, int, float]] = {}
        """The loads in flight: user (None: prefetching), job, reads that these were counted for,
        begin."""
        self.prefetcher = Prefetcher(cache)
        self._share = FairShare()
        self._users: dict[User, _Turns] = {}
        self._runnable: dict[User, _Turns] = {}
        """Users with a runnable request."""
        self._active = 1
        """Users that have made a request lately, or wait."""
        self.wake: Callable[[], object] | None = None
        """Called when `pump` has stopped after MOST_TURNS: it must be called again soon. None: it
        does not stop."""
        self._waking = False
        self.put_ended: Callable[[SampleRequest], object] = _nothing
        """Called when a PUT of a session that has gone is in memory, or will not be."""
        self.request_count = 0
        """Requests of all sessions that are not finished."""
        self.blocked_count = 0
        """Those that wait for memory."""
        self.leased_size = 0
        """Bytes of the slots that leases hold."""
        self._leases_in_slab = np.zeros(len(cache.arena.slab_class), np.int64)
        """Leases with pins in each slab, up to the largest size of the arena."""
        self._leased_slabs = 0
        """Slabs in which a lease pins slots."""
        self._pumped = 0.0
        self._busy_since, self._busy_size = 0.0, 0
        """Since when reads are in flight, or were measured, and the bytes read since."""
        self._stopped = False
        self.queued, self.blocked = Histogram(), Histogram()
        """How long requests waited for their first turn; and for memory."""
        self.reads_of: dict[str, JobReads] = {}
        """By job."""

    @property
    def _share_size(self) -> int:
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

    def add(self, request: SampleRequest, now: float) -> None:
        """Accept a request and give turns."""
        if request.lease and (
            self.leased_size >= self._most_leased or self._leased_slabs >= self._most_leased_slabs
        ):
            request.owner.finished(request, now)
            return
        owner = request.owner
        owner.user.requests.take(1)
        owner.user.asked.take(len(request.numbers))
        turns = self._turns_of(owner.user)
        turns.seen = now
        self.request_count += 1
        owner.waiting[request.tag] = request
        owner.time.ask(now)
        if request.gate is not None:
            owner.time.fetch(now, 1)
            request.gate.begin(lambda count, opened: self._fetched(request, count, opened))
            return
        owner.runnable.append(request)
        self._queue(owner)
        if not self._waking:
            self.pump(now)
        elif self._active > 1 and self._share.is_due(owner.user):
            self._serve_at_once(owner.user, now)
        if not request.turned:
            self._wait_for_turn(request, now)

    def _fetched(self, request: SampleRequest, count: int, now: float) -> None:
        """The blocks of the first `count` samples of a request are there, or cannot be had."""
        owner = request.owner
        owner.time.fetch(now, -1)
        self._turns_of(owner.user).seen = now
        owner.user.asked.give(len(request.numbers) - count)
        request.numbers, request.indices = request.numbers[:count], request.indices[:count]
        owner.runnable.append(request)
        self._queue(owner)
        if self.wake is None:
            self.pump(now)
        elif not self._waking:
            # Who is woken also sets the timers of requests that are blocked then.
            self._waking = True
            self.wake()
        if not request.turned:
            self._wait_for_turn(request, now)

    def _wait_for_turn(self, request: SampleRequest, now: float) -> None:
        """A request has to wait for its first turn: note for whose reads."""
        of_job = self.reads_of.get(request.owner.job)
        if self._reads:
            mine = 0 if of_job is None else of_job.in_flight
            request.queued = 1.0 - mine / self._reads
            request.owner.time.queue(now, request.queued)

    def _serve_at_once(self, user: User, now: float) -> None:
        """Give a turn to a user that would have the next one anyway."""
        self._cache.next_use.turn_at = now
        turns = self._users[user]
        blocked = [each for each in self._users.values() if each.blocked]
        if (
            self._reads < self._most_reads
            and self._may_read(turns)
            and self._may_pass(turns, self._favoured(blocked, now))
        ):
            self._serve(user, now)

    def go_on(self, now: float) -> None:
        """Give turns, unless `pump` will be called anyway. With several users it is called when
        the loop has looked for messages."""
        if self._waking:
            return
        if self._active > 1 and self.wake is not None:
            self._waking = True
            self.wake()
        else:
            self.pump(now)

    def _turns_of(self, user: User) -> _Turns:
        turns = self._users.get(user)
        if turns is None:
            for each in self._users.values():
                self._sweep(each)
            gone = [u for u, t in self._users.items() if t.idle and not u.sessions]
            for other in [each for each in gone if not each.requests.held]:
                del self._users[other]
                self._share.forget(other)
            turns = self._users[user] = _Turns(user)
        return turns

    def acknowledge(self, owner: Owner, tags: list[int]) -> None:
        """The client has copied the samples of these GETs: unpin them."""
        for tag in tags:
            answered = owner.unacknowledged.pop(tag, None)
            if answered is not None:
                self._users[owner.user].pinned_size -= answered.pinned_size
                owner.user.asked.give(answered.count)
                self._cache.release(answered.pins)

    def release(self, owner: Owner, tags: list[int]) -> None:
        """End these leases. A lease that is not granted yet becomes a GET."""
        for tag in tags:
            if tag in owner.waiting:
                owner.waiting[tag].lease = False
            lease = owner.leases.pop(tag, None)
            if lease is not None:
                turns = self._users[owner.user]
                turns.leased_size -= lease.pinned_size
                turns.leased_count -= lease.count
                owner.user.asked.give(lease.count)
                self.leased_size -= lease.pinned_size
                self._leases_in_slab[lease.slabs] -= 1
                self._leased_slabs -= int(np.sum(self._leases_in_slab[lease.slabs] == 0))
                if not self._stopped:
                    self._cache.end_lease(lease.pins)

    def loaded(self, load: Load, failures: dict[int, Failure], now: float) -> None:
        """A load has ended. `go_on` must be called when all that have ended by now are known."""
        self._reads -= load.reads
        turns, of_job, reads, begun = self._reading.pop(load.number)
        if load.source is None:
            self._busy_size += load.size
            self._measure(now)
            of_job.end(reads, now - begun, load.read_s, load.decode_s, load.fetch_s)
        if turns is not None:
            turns.reads -= reads
            turns.read_size -= load.size
        for fetch in self._cache.loaded(load, failures):
            if isinstance(fetch, Piece):
                self.prefetcher.loaded(fetch, now)
                continue
            assert isinstance(fetch, SampleRequest)
            if fetch.owner.gone:
                self._cache.release(fetch.pins)
                fetch.pins = []
                if fetch.source is not None:
                    self.put_ended(fetch)
            elif fetch.complete or fetch.enough or fetch.blocked_since is not None:
                self._finish(fetch, now)

    def _measure(self, now: float) -> None:
        """Note how long reading a byte takes, as of late: while reads are in flight."""
        if self._busy_size >= MEASURED_SIZE:
            busy_s = max(now - self._busy_since, 0.0) / self._busy_size
            self._cache.next_use.miss_s += (busy_s - self._cache.next_use.miss_s) / MEASURED
            self._busy_since, self._busy_size = now, 0

    def leave(self, owner: Owner, now: float) -> Iterator[None]:
        """A session has ended: drop its requests, and give back its pins and leases in steps."""
        owner.gone = True
        user, turns = owner.user, self._turns_of(owner.user)
        for request in owner.waiting.values():
            if request.gate is not None:
                request.gate.close()
            self.request_count -= 1
            user.requests.give(1)
            user.asked.give(len(request.numbers))
            turns.pinning_size -= request.pinned_size
            if request.waiting == 0:
                self._cache.release(request.pins)
                request.pins = []
                if request.source is not None:
                    self.put_ended(request)
        owner.waiting.clear()
        owner.runnable.clear()
        self.blocked_count -= len(turns.blocked)
        turns.blocked = deque(r for r in turns.blocked if r.owner is not owner)
        self.blocked_count += len(turns.blocked)
        return self._leaving(owner, now)

    def _leaving(self, owner: Owner, now: float) -> Iterator[None]:
        for held, give in ((owner.unacknowledged, self.acknowledge), (owner.leases, self.release)):
            while held:
                give(owner, list(islice(held, _FEW)))
                yield
        self.pump(now)

    def next_deadline(self) -> float | None:
        """Return when `pump` must be called again if nothing else happens; None: never."""
        if not self.blocked_count:
            # While something is read, its end is soon enough.
            paused = self.prefetcher.paused_until
            return paused if paused > self._pumped and not self._reads else None
        blocked = [turns.blocked[0] for turns in self._users.values() if turns.blocked]
        since = min(map(self._since, blocked))
        deadlines = [t for edge in (*FAVOUR_S, GIVE_UP_S) if (t := since + edge) > self._pumped]
        if self._active > 1:
            deadlines.append(self._pumped + RETRY_S)
        for turns in self._users.values():
            self._sweep(turns)
            if turns.pins:
                deadlines.append(turns.pins[0][0] + PIN_GRACE_S)
        return min(deadlines, default=None)

    def stop(self) -> None:
        """Read nothing any more, also when blocks of remote files come.

        A client may go on reading its leased samples after its session ended, so no slot may be
        written to from now on, and a successor finds all leases in the cache's table.
        """
        self._stopped = True

    # ---- turns ----------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Give turns until every request is blocked, enough reads are in flight, or MOST_TURNS were
        given."""
        self._pumped = self._cache.next_use.turn_at = now
        self._waking = False
        if self._stopped:
            return
        favoured = None
        if blocked := self._look_at_users(now):
            self._unblock(blocked, now)
            favoured = self._favoured([turns for turns in blocked if turns.blocked], now)
        if favoured is not None and self._active == 1:
            return
        left = MOST_TURNS if self._active == 1 else 1
        while self._runnable and self._reads < self._most_reads:
            user = self._next_user(favoured)
            if user is None:
                break
            if not left and self.wake is not None:
                self._waking = True
                self.wake()
                return
            left -= 1
            self._serve(user, now)

        if self._cache.next_use.has_orders and not (self._runnable or self.blocked_count):
            self._prefetch(now)

    def _serve(self, user: User, now: float) -> None:
        """Give a turn to a session of a user."""
        owner = self._next_owner(user)
        if owner.gone or not owner.runnable:
            return
        part = self.prefetcher.next_of_window(owner.job, now)
        if part is not None:
            self._start(part, owner.job, now)
        elif self._turn(owner.runnable[0], now):
            owner.runnable.popleft()
        self._queue(owner)

    def _prefetch(self, now: float) -> None:
        """Read for announced jobs."""
        while self._reads < self._most_reads // 2:
            load = self.prefetcher.next_load(now)
            if load is None:
                break
            self._start(*load, now)

    def _look_at_users(self, now: float) -> list[_Turns]:
        """Count the active users; return those with blocked requests."""
        self._active, blocked = 0, []
        for turns in self._users.values():
            if turns.blocked:
                blocked.append(turns)
            if turns.blocked or turns.jobs or now - turns.seen < ACTIVE_S:
                self._active += 1
        return blocked

    def _start(
        self,
        load: Load,
        job: str,
        now: float,
        turns: _Turns | None = None,
        reply: Reply | None = None,
    ) -> None:
        of_job = self.reads_of.get(job)
        if of_job is None:
            if len(self.reads_of) >= MOST_COUNTED_JOBS:
                del self.reads_of[next(iter(self.reads_of))]
            of_job = self.reads_of[job] = JobReads()
        self._submit(load, reply)
        if load.source is None:
            of_job.size += load.size
        if not self._reads:
            self._busy_since, self._busy_size = self._pumped, 0
        self._reads += load.reads
        of_job.begin(load.reads, self._reads)
        if turns is not None:
            turns.reads += load.reads
            turns.read_size += load.size
        self._reading[load.number] = turns, of_job, load.reads, now

    def _next_user(self, favoured: SampleRequest | None) -> User | None:
        """Return the user whose turn it is; None: none has one now."""
        if self._active == 1:
            (user,) = self._runnable
            return user
        users = {
            user: turns
            for user, turns in self._runnable.items()
            if self._may_read(turns) and self._may_pass(turns, favoured)
        }
        return self._share.choose(users) if users else None

    def _may_read(self, turns: _Turns) -> bool:
        """Whether one of several users may have another turn now."""
        return not turns.reads or (
            turns.reads < max(self._most_reads // SEVERAL_SHARE // self._active, 1)
            and turns.read_size < FLOWING_SIZE
            and turns.pinning_size + turns.leased_size < self._equal_size
        )

    def _may_pass(self, turns: _Turns, favoured: SampleRequest | None) -> bool:
        """Whether a user need not wait for the favoured request."""
        if favoured is None:
            return True
        return turns.user is not favoured.owner.user and self._has_little(turns)

    def _is_futile(self, turns: _Turns, now: float) -> bool:
        """Whether one of several users found no memory lately, and would find none now."""
        if now >= turns.failed_at + RETRY_S:
            return False
        return turns.failed_after == self._cache.release_count or not self._has_little(turns)

    def _has_little(self, turns: _Turns) -> bool:
        """Whether a user holds less than an equal share of the arena."""
        held_size = turns.pinned_size + turns.pinning_size + turns.leased_size
        return held_size < self._equal_size

    @property
    def _equal_size(self) -> int:
        """An equal share of the arena for each user that has made a request lately."""
        return self._cache.arena.size // max(self._active, 2)

    def _next_owner(self, user: User) -> Owner:
        turns = self._runnable[user]
        job = turns.jobs.popleft()
        sessions = turns.sessions[job]
        owner = sessions.popleft()
        owner.queued = False
        if sessions:
            turns.jobs.append(job)
        else:
            del turns.sessions[job]
            if not turns.jobs:
                del self._runnable[user]
        return owner

    def _queue(self, owner: Owner) -> None:
        if owner.runnable and not owner.queued:
            owner.queued = True
            turns = self._users[owner.user]
            if not turns.jobs:
                self._runnable[owner.user] = turns
                self._share.begin(owner.user)
            sessions = turns.sessions.get(owner.job)
            if sessions is None:
                sessions = turns.sessions[owner.job] = deque()
                turns.jobs.append(owner.job)
            sessions.append(owner)

    def _turn(self, request: SampleRequest, now: float) -> bool:
        """Advance a request; return True when it needs no further turn for now."""
        before, waiting, share_size = request.cursor, request.waiting, self._share_size
        self._note_turn(request, now)
        turns = self._users[request.owner.user]
        load, cost = None, 0.0
        if self._active == 1 or not self._is_futile(turns, now):
            load = self._advance(request, turns, share_size)
            if request.cursor == before:
                load = self._advance_again(request, turns, share_size, now)
            cost = (TURN_COUNT + request.cursor - before) / (TURN_COUNT + QUANTUM)
        if request.waiting > waiting + (load is not None):
            request.reply = None  # it also waits for a load of another request
        whole = request.cursor == len(request.numbers)
        reply = request.reply if whole and not request.failures else None
        if reply is not None and not waiting:
            reply.arm()  # reads from memory may end within `_start`
        if load is not None:
            cost = max(cost, load.size / QUANTUM_SIZE)
            self._start(load, request.owner.job, now, turns, request.reply)
        if reply is not None and waiting:
            reply.arm()  # not before: without the loads of earlier turns it would wait for nothing
        if self._active > 1:
            self._share.charge(turns.user, cost)
        # Remembered, since the arena may grow before the loads have ended.
        request.enough = request.pinned_size >= share_size
        if whole or request.enough:
            if request.waiting == 0:
                self._finish(request, now)
            return True
        if request.cursor > before:
            return False
        if request.cursor and request.waiting == 0:
            self._finish(request, now)
        else:
            request.blocked_since = now
            request.owner.time.block(now, 1)
            turns.blocked.append(request)
            self.blocked_count += 1
        return True

    def _note_turn(self, request: SampleRequest, now: float) -> None:
        if not request.turned:
            request.turned = True
            self.queued.note(now - request.asked)
            if request.queued:
                request.owner.time.queue(now, -request.queued)

    def _advance(self, request: SampleRequest, turns: _Turns, share_size: int) -> Load | None:
        size = min(QUANTUM_SIZE, max(share_size - request.pinned_size, 1))
        turns.pinning_size -= request.pinned_size
        count = QUANTUM if self._active == 1 else SEVERAL_QUANTUM
        load = self._cache.advance(request, count, size)
        turns.pinning_size += request.pinned_size
        return load

    def _advance_again(
        self, request: SampleRequest, turns: _Turns, share_size: int, now: float
    ) -> Load | None:
        """There was no memory: advance with pins that others had too many of."""
        load, before = None, request.cursor
        if self._active > 1 and self._others_give(turns):
            load = self._advance(request, turns, share_size)
        if request.cursor == before:
            turns.failed_at, turns.failed_after = now, self._cache.release_count
        return load

    def _finish(self, request: SampleRequest, now: float) -> None:
        owner, turns = request.owner, self._users[request.owner.user]
        request.count = request.cursor
        self.request_count -= 1
        owner.waiting.pop(request.tag, None)
        if request.gate is not None:
            request.gate.close()
        turns.pinning_size -= request.pinned_size
        if request.blocked_since is not None:
            self.blocked.note(now - request.blocked_since)
            turns.blocked.remove(request)
            self.blocked_count -= 1
            owner.time.block(now, -1)
            request.blocked_since = None
        owner.time.answer(now)
        if not request.lease:
            answered = Answered(request.pins, request.pinned_size, len(request.numbers))
            owner.unacknowledged[request.tag] = answered
            turns.pinned_size += request.pinned_size
            turns.pins.append((now, owner, request.tag))
            if len(owner.unacknowledged) > MOST_UNACKNOWLEDGED:
                self.acknowledge(owner, [next(iter(owner.unacknowledged))])
            self._sweep(turns)
        elif not self._grant(request, turns):
            self._cache.release(request.pins)
            request.count = 0
            owner.user.asked.give(len(request.numbers))
        owner.user.requests.give(1)
        owner.finished(request, now)

    def _grant(self, request: SampleRequest, turns: _Turns) -> bool:
        """Turn the pins of a request into a lease; return False if leases would hold too much."""
        user, size, count = request.owner.user, request.pinned_size, len(request.numbers)
        if not request.pins:
            user.asked.give(count)
            return True
        if not user.may_take(size, turns.leased_size, self.leased_size, self._most_leased):
            return False
        if turns.leased_count + count > MOST_ASKED // 2:
            return False
        slabs = self._cache.arena.slabs_of(request.pins)
        fresh = int(np.sum(self._leases_in_slab[slabs] == 0))
        if self._leased_slabs + fresh > self._most_leased_slabs:
            return False
        self.leased_size += size
        turns.leased_size += size
        turns.leased_count += count
        self._leases_in_slab[slabs] += 1
        self._leased_slabs += fresh
        self._cache.lease(request.pins)
        request.owner.leases[request.tag] = Lease(request.pins, size, slabs, count)
        return True

    def limit_pins(self, user: User) -> None:
        """The user has asked for as many samples as it may: take back pins, the oldest first."""
        turns = self._turns_of(user)
        while turns.pins and user.asked.full:
            _, owner, tag = turns.pins.popleft()
            self.acknowledge(owner, [tag])

    def _sweep(self, turns: _Turns) -> None:
        """Drop acknowledged GETs from the list of pins."""
        while turns.pins and turns.pins[0][2] not in turns.pins[0][1].unacknowledged:
            turns.pins.popleft()
        if len(turns.pins) > turns.most_pins:
            # A client that never acknowledges stays at the head; drop those behind it.
            turns.pins = deque(pin for pin in turns.pins if pin[2] in pin[1].unacknowledged)
            turns.most_pins = 2 * len(turns.pins) + _FEW_PINS

    def make_room(self, now: float) -> None:
        """Take back all pins that may be taken back now."""
        self.prefetcher.make_room()
        for turns in self._users.values():
            while turns.pins and turns.pins[0][0] + PIN_GRACE_S <= now:
                _, owner, tag = turns.pins.popleft()
                self.acknowledge(owner, [tag])

    def _others_give(self, waiting: _Turns) -> bool:
        """Take back pins of users with more than an equal share while another user waits; return
        whether there were any."""
        given = False
        for turns in self._users.values():
            while turns is not waiting and turns.pins and not self._has_little(turns):
                _, owner, tag = turns.pins.popleft()
                given |= tag in owner.unacknowledged
                self.acknowledge(owner, [tag])
        return given

    def _unblock(self, blocked: list[_Turns], now: float) -> None:
        """Try blocked requests again: of every user the oldest, and some of the others."""
        self.make_room(now)
        favoured = self._favoured(blocked, now)
        for turns in sorted(blocked, key=lambda each: self._share.used(each.user)):
            if self._active > 1 and self._is_futile(turns, now):
                continue
            waiting = turns.blocked
            count = len(waiting)
            first = turns.tried if 0 < turns.tried < count else 1
            tried = MOST_TRIED if self._active == 1 else 1
            places = (0, *range(first, min(first + tried - 1, count)))
            turns.tried = first + tried - 1
            for request in [waiting[place] for place in places]:
                if request is favoured or self._may_pass(turns, favoured):
                    self._try_again(request, turns, now)

    def _try_again(self, request: SampleRequest, turns: _Turns, now: float) -> None:
        if request.blocked_since is None:
            return  # It was finished in the meantime.
        since, place = request.blocked_since, turns.blocked.index(request)
        del turns.blocked[place]
        self.blocked_count -= 1
        request.blocked_since = None
        request.owner.time.block(now, -1)
        if not self._turn(request, now):
            request.owner.runnable.appendleft(request)
            self._queue(request.owner)
            self.blocked.note(now - since)
        elif request.blocked_since is not None:
            turns.blocked.remove(request)
            turns.blocked.insert(place, request)
            request.blocked_since = since
            if now >= since + GIVE_UP_S and request.waiting == 0:
                self._give_up(request, now)
        else:
            self.blocked.note(now - since)

    def _give_up(self, request: SampleRequest, now: float) -> None:
        request.failures[int(request.numbers[request.cursor])] = Failure(STATUS_ARENA_BUSY)
        request.cursor += 1
        self._finish(request, now)

    def _favoured(self, blocked: list[_Turns], now: float) -> SampleRequest | None:
        """Return the request for which all others wait now, or None."""
        if not blocked:
            return None
        oldest = min((turns.blocked[0] for turns in blocked), key=self._since)
        since = self._since(oldest)
        return oldest if since + FAVOUR_S[0] <= now < since + FAVOUR_S[1] else None

    @staticmethod
    def _since(request: SampleRequest) -> float:
        assert request.blocked_since is not None
        return request.blocked_since


def _nothing(_request: SampleRequest) -> None:
    pass
