"""Scheduler: gives requests their turns, and lets them wait for memory.

`turn_order.py` says whose turn it is, `pins.py` has what answered requests hold. A turn is at most
QUANTUM samples and QUANTUM_SIZE bytes, so a request for 100,000 samples delays its neighbours by
one turn, and a job with sixteen workers gets no more of the disk than one with two. The number of
reads in flight is bounded, so that the next turn comes soon; while several users ask, each has a
part of it. `pump` gives MOST_TURNS turns and then lets the loop serve others. No request blocks for
ever:

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

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ffserve.cache.cache import Cache, Load
from ffserve.cache.prefetch import Piece, Prefetcher
from ffserve.errors import STATUS_ARENA_BUSY, Failure
from ffserve.limits import ARENA_SHARE, MOST_COUNTED_JOBS, MOST_UNACKNOWLEDGED
from ffserve.server.reading.pins import Pins
from ffserve.server.reading.requests import Answered, Reply, Requester, SampleRequest
from ffserve.server.reading.statistics import Histogram
from ffserve.server.reading.turn_order import FAVOUR_S, TurnOrder, UserTurns, blocked_since
from ffserve.server.reading.waiting import JobReads
from ffserve.server.users.shares import User

QUANTUM, QUANTUM_SIZE = 256, 12 << 20
"""A turn is at most this many samples and bytes. A device reads that in 2 to 6 ms."""
TURN_COUNT = 100
"""A turn costs the loop as much as this many samples do (1 us each), even if it finds no memory."""
MOST_TURNS = 4
"""One `pump` gives this many turns, or one while several users are active. The loop looks for
messages before the next `pump`."""
SEVERAL_QUANTUM = 64
"""A turn is at most this many samples while several users are active, so that the turn of another
user comes soon."""
SLAB_COST, SEVERAL_SLABS = 1.0, 4
"""Emptying a slab, and moving one to another domain, each cost as much as a turn (0.7 ms). Several
users together get as many emptied slabs as this in one turn: one user with many size classes once
took 370 ms in a turn."""
MOST_TRIED = 4
"""One `pump` tries this many blocked requests of a user again: the oldest, and others in turn.
While several users are active, it tries one of each user."""
RETRY_S = 0.01
"""While several users are active, a user that found no memory does not look for any for this long.
A user with less than an equal share looks again as soon as a pin was released."""
GIVE_UP_S = 20.0
"""The next sample of a request that has been blocked for this long fails."""
MEASURED_SIZE, MEASURED = 16 << 20, 8
"""The time of a read is measured over this many bytes that are read while reads are in flight; a
mean of about MEASURED measurements is kept."""


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
        self._reading: dict[int, tuple[UserTurns | None, JobReads, int, float]] = {}
        """The loads in flight: user (None: prefetching), job, reads that these were counted for,
        begin."""
        self.prefetcher = Prefetcher(cache)
        self._order = TurnOrder(cache.arena, most_reads)
        self.pins = Pins(cache, self._order)
        self.wake: Callable[[], object] | None = None
        """Called when `pump` has stopped after MOST_TURNS: it must be called again soon. None: it
        does not stop."""
        self._waking = False
        self.put_ended: Callable[[SampleRequest], object] = _nothing
        """Called when a PUT of a session that has gone is in memory, or will not be."""
        self.request_count = 0
        """Requests of all sessions that are not finished."""
        self.blocked_count = 0
        """Requests that wait for memory."""
        self._pumped = 0.0
        self._busy_since, self._busy_size = 0.0, 0
        """The time since when reads are in flight, or of the last measurement, and the bytes read
        since then."""
        self._stopped = False
        self.queued, self.blocked = Histogram(), Histogram()
        """How long requests waited for their first turn; and for memory."""
        self.reads_of: dict[str, JobReads] = {}
        """The reads of each job, by its name."""

    @property
    def _share_size(self) -> int:
        return max(1, self._cache.arena.size // ARENA_SHARE)

    @property
    def idle(self) -> bool:
        """Whether no request and no read is under way."""
        return self.request_count == 0 and self._reads == 0

    def add(self, request: SampleRequest, now: float) -> None:
        """Accept a request and give turns."""
        if request.lease and not self.pins.lends:
            request.owner.finished(request, now)
            return
        owner = request.owner
        owner.user.requests.take(1)
        owner.user.asked.take(len(request.numbers))
        turns = self._order.of(owner.user)
        turns.seen = now
        self.request_count += 1
        owner.waiting[request.tag] = request
        owner.time.ask(now)
        if request.gate is not None:
            owner.time.fetch(now, 1)
            request.gate.begin(lambda count, opened: self._fetched(request, count, opened))
            return
        owner.runnable.append(request)
        self._order.queue(owner)
        if not self._waking:
            self.pump(now)
        elif self._order.active > 1 and self._order.share.is_due(owner.user):
            self._serve_at_once(owner.user, now)
        if not request.turned:
            self._wait_for_turn(request, now)

    def _fetched(self, request: SampleRequest, count: int, now: float) -> None:
        """Note that the blocks of the first `count` samples of a request are there, or cannot be
        had."""
        owner = request.owner
        owner.time.fetch(now, -1)
        self._order.of(owner.user).seen = now
        owner.user.asked.give(len(request.numbers) - count)
        request.numbers, request.indices = request.numbers[:count], request.indices[:count]
        owner.runnable.append(request)
        self._order.queue(owner)
        if self.wake is None:
            self.pump(now)
        elif not self._waking:
            # The caller that is woken also sets the timers of requests that are blocked then.
            self._waking = True
            self.wake()
        if not request.turned:
            self._wait_for_turn(request, now)

    def _wait_for_turn(self, request: SampleRequest, now: float) -> None:
        """Note for whose reads a request has to wait for its first turn."""
        of_job = self.reads_of.get(request.owner.job)
        if self._reads:
            mine = 0 if of_job is None else of_job.in_flight
            request.queued = 1.0 - mine / self._reads
            request.owner.time.queue(now, request.queued)

    def _serve_at_once(self, user: User, now: float) -> None:
        """Give a turn to a user that would have the next one anyway."""
        self._cache.next_use.turn_at = now
        turns = self._order.users[user]
        blocked = [each for each in self._order.users.values() if each.blocked]
        if (
            self._reads < self._most_reads
            and self._order.may_read(turns)
            and self._order.may_pass(turns, self._order.favoured(blocked, now))
        ):
            self._serve(user, now)

    def go_on(self, now: float) -> None:
        """Give turns, unless `pump` will be called anyway. With several users it is called when
        the loop has looked for messages."""
        if self._waking:
            return
        if self._order.active > 1 and self.wake is not None:
            self._waking = True
            self.wake()
        else:
            self.pump(now)

    def loaded(self, load: Load, failures: dict[int, Failure], now: float) -> None:
        """Note that a load has ended. `go_on` must be called when all loads that have ended by now
        are noted."""
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
        """Measure the recent time of reading a byte, while reads are in flight."""
        if self._busy_size >= MEASURED_SIZE:
            busy_s = max(now - self._busy_since, 0.0) / self._busy_size
            self._cache.next_use.miss_s += (busy_s - self._cache.next_use.miss_s) / MEASURED
            self._busy_since, self._busy_size = now, 0

    def leave(self, owner: Requester, now: float) -> Iterator[None]:
        """Drop the requests of a session that has ended, and give back its pins and leases in
        steps."""
        owner.gone = True
        user, turns = owner.user, self._order.of(owner.user)
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

    def _leaving(self, owner: Requester, now: float) -> Iterator[None]:
        yield from self.pins.leave(owner)
        self.pump(now)

    def next_deadline(self) -> float | None:
        """Return when `pump` must be called again if nothing else happens; None: never."""
        if not self.blocked_count:
            # While a read is in flight, its end comes soon enough.
            paused = self.prefetcher.paused_until
            return paused if paused > self._pumped and not self._reads else None
        blocked = [turns.blocked[0] for turns in self._order.users.values() if turns.blocked]
        oldest = min(map(blocked_since, blocked))
        deadlines = [t for edge in (*FAVOUR_S, GIVE_UP_S) if (t := oldest + edge) > self._pumped]
        if self._order.active > 1:
            deadlines.append(self._pumped + RETRY_S)
        return min([*deadlines, *self.pins.deadlines()], default=None)

    def stop(self) -> None:
        """Begin no further read, also when blocks of remote files come.

        A client may go on reading its leased samples after its session ended, so no slot may be
        written to from now on, and a successor finds all leases in the cache's table.
        """
        self._stopped = self.pins.keeps_leases = True

    # ---- turns ----------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Give turns until every request is blocked, enough reads are in flight, or MOST_TURNS were
        given."""
        self._pumped = self._cache.next_use.turn_at = now
        self._waking = False
        if self._stopped:
            return
        favoured = None
        if blocked := self._order.look_at_users(now):
            self._unblock(blocked, now)
            favoured = self._order.favoured([turns for turns in blocked if turns.blocked], now)
        if favoured is not None and self._order.active == 1:
            return
        left = MOST_TURNS if self._order.active == 1 else 1
        while self._order.runnable and self._reads < self._most_reads:
            user = self._order.next_user(favoured)
            if user is None:
                break
            if not left and self.wake is not None:
                self._waking = True
                self.wake()
                return
            left -= 1
            self._serve(user, now)

        if self._cache.next_use.has_orders and not (self._order.runnable or self.blocked_count):
            self._prefetch(now)

    def _serve(self, user: User, now: float) -> None:
        """Give a turn to a session of a user."""
        owner = self._order.next_owner(user)
        if owner.gone or not owner.runnable:
            return
        part = self.prefetcher.next_of_window(owner.job, now)
        if part is not None:
            self._start(part, owner.job, now)
        elif self._turn(owner.runnable[0], now):
            owner.runnable.popleft()
        self._order.queue(owner)

    def _prefetch(self, now: float) -> None:
        """Read for announced jobs."""
        self._cache.allocator.emptied, self._cache.allocator.most_emptied = 0, math.inf
        while self._reads < self._most_reads // 2:
            load = self.prefetcher.next_load(now)
            if load is None:
                break
            self._start(*load, now)

    def _start(
        self,
        load: Load,
        job: str,
        now: float,
        turns: UserTurns | None = None,
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

    def _is_futile(self, turns: UserTurns, now: float) -> bool:
        """Whether one of several users found no memory lately, and would find none now."""
        if now >= turns.failed_at + RETRY_S:
            return False
        return turns.failed_after == self._cache.release_count or not self._order.has_little(turns)

    def _must_wait(self, turns: UserTurns, favoured: SampleRequest | None, now: float) -> bool:
        """Whether a blocked user has used more than others who can have a turn now."""
        order, since = self._order, turns.blocked[0].blocked_since
        if favoured is not None and favoured.owner.user is turns.user:
            return False
        if order.share.is_due(turns.user) or (since is not None and now >= since + GIVE_UP_S):
            return False
        others = (each for user, each in order.runnable.items() if user is not turns.user)
        return any(order.may_read(each) and order.may_pass(each, favoured) for each in others)

    def _turn(self, request: SampleRequest, now: float) -> bool:
        """Advance a request; return True when it needs no further turn for now."""
        before, waiting, share_size = request.cursor, request.waiting, self._share_size
        self._note_turn(request, now)
        turns = self._order.users[request.owner.user]
        load, cost, slabs = None, 0.0, 0
        if self._order.active == 1 or not self._is_futile(turns, now):
            self._cache.allocator.emptied = self._cache.arena.moved = 0
            load = self._advance(request, turns, share_size)
            if request.cursor == before:
                load = self._advance_again(request, turns, share_size, now)
            cost = (TURN_COUNT + request.cursor - before) / (TURN_COUNT + QUANTUM)
            slabs = self._cache.allocator.emptied + self._cache.arena.moved
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
        if self._order.active > 1:
            self._order.share.charge(turns.user, cost + SLAB_COST * slabs)
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

    def _advance(self, request: SampleRequest, turns: UserTurns, share_size: int) -> Load | None:
        size = min(QUANTUM_SIZE, max(share_size - request.pinned_size, 1))
        turns.pinning_size -= request.pinned_size
        several = self._order.active > 1
        count = SEVERAL_QUANTUM if several else QUANTUM
        self._cache.allocator.most_emptied = SEVERAL_SLABS if several else math.inf
        load = self._cache.advance(request, count, size)
        turns.pinning_size += request.pinned_size
        return load

    def _advance_again(
        self, request: SampleRequest, turns: UserTurns, share_size: int, now: float
    ) -> Load | None:
        """Advance a request that found no memory, with pins of users that had too many."""
        load, before = None, request.cursor
        if self._order.active > 1 and self.pins.take_from_others(turns):
            load = self._advance(request, turns, share_size)
        if request.cursor == before:
            turns.failed_at, turns.failed_after = now, self._cache.release_count
        return load

    def _finish(self, request: SampleRequest, now: float) -> None:
        owner, turns = request.owner, self._order.users[request.owner.user]
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
                self.pins.acknowledge(owner, [next(iter(owner.unacknowledged))])
            turns.sweep()
        elif not self.pins.grant(request, turns):
            self._cache.release(request.pins)
            request.count = 0
            owner.user.asked.give(len(request.numbers))
        owner.user.requests.give(1)
        owner.finished(request, now)

    def make_room(self, now: float) -> None:
        """Take back all pins that may be taken back now."""
        self.prefetcher.make_room()
        self.pins.take_back(now)

    def _unblock(self, blocked: list[UserTurns], now: float) -> None:
        """Try blocked requests again: of every user the oldest, and some of the others."""
        self.make_room(now)
        favoured = self._order.favoured(blocked, now)
        for turns in sorted(blocked, key=lambda each: self._order.share.used(each.user)):
            if self._order.active > 1 and (
                self._is_futile(turns, now) or self._must_wait(turns, favoured, now)
            ):
                continue
            waiting = turns.blocked
            count = len(waiting)
            first = turns.tried if 0 < turns.tried < count else 1
            tried = MOST_TRIED if self._order.active == 1 else 1
            places = (0, *range(first, min(first + tried - 1, count)))
            turns.tried = first + tried - 1
            for request in [waiting[place] for place in places]:
                if request is favoured or self._order.may_pass(turns, favoured):
                    self._try_again(request, turns, now)

    def _try_again(self, request: SampleRequest, turns: UserTurns, now: float) -> None:
        if request.blocked_since is None:
            return  # It was finished in the meantime.
        began, place = request.blocked_since, turns.blocked.index(request)
        del turns.blocked[place]
        self.blocked_count -= 1
        request.blocked_since = None
        request.owner.time.block(now, -1)
        if not self._turn(request, now):
            request.owner.runnable.appendleft(request)
            self._order.queue(request.owner)
            self.blocked.note(now - began)
        elif request.blocked_since is not None:
            turns.blocked.remove(request)
            turns.blocked.insert(place, request)
            request.blocked_since = began
            if now >= began + GIVE_UP_S and request.waiting == 0:
                self._give_up(request, now)
        else:
            self.blocked.note(now - began)

    def _give_up(self, request: SampleRequest, now: float) -> None:
        request.failures[int(request.numbers[request.cursor])] = Failure(STATUS_ARENA_BUSY)
        request.cursor += 1
        self._finish(request, now)


def _nothing(_request: SampleRequest) -> None:
    pass
