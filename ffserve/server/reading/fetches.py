"""Fetches: the blocks of remote shards that requests and loads need.

A request whose samples lie in blocks that are not in the store waits at its `BlockGate`, before it
takes any memory of the arena, so it holds up nobody else. When all of its blocks are there, or
cannot be had, it gets its turns; after PART_S a first part of it does, if there is one.

A gate pins the blocks until the loads of its request have ended. A load pins only what is not
pinned so, such as what is prefetched, and waits only for blocks that its request could not know of,
or for which the store has no room. Of these, exactly the bytes that are needed come into a memory
file, at their own offsets, and the engine reads them there. A block that cannot be had fails its
own samples, with the error of the origin.

What announced orders need next is fetched ahead by a thread (`Fetches.look_ahead`), the soonest
needed first, and marked in the store with the time of its use.

The store's disk may be slow, and to ask for a thousand blocks takes milliseconds: that is done in
threads. Everything else is called in the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve.cache.cache import Load
from ffserve.cache.jobs import JobProgress
from ffserve.cache.orders import PARTS
from ffserve.cache.prefetch import Piece
from ffserve.cache.tables import Directory, ShardTable
from ffserve.dtypes import Floats, Int32s, Int64s, UInt32s
from ffserve.errors import AccessDenied, Failure, FFServeError, ReadError
from ffserve.limits import (
    BLOCK_THREADS,
    GATE_BLOCKS,
    MOST_FETCHED_AHEAD,
    MOST_QUEUED,
    POOL_BLOCKS,
)
from ffserve.reads.fetched import GAP
from ffserve.server.files.remote import RemoteShard
from ffserve.server.reading.requests import SampleRequest
from ffserve.server.users.peers import Owner
from ffserve.store.blocks import PRESENT, StoredObject, runs
from ffserve.store.fetching import (
    NOW,
    Fetcher,
    OpenObject,
    Outcome,
    Outcomes,
    by_future,
    outcome_of,
)

log = logging.getLogger("ffserve")

PART_S = 20.0
"""A request whose blocks are not all there after this time is answered in part.
A client waits 120 s for an answer."""
MEND_S = 30.0
"""A damaged block that has not been fetched again after this time fails its samples."""
FEW_SHARDS = 8
"""The loop's thread looks for the blocks of at most this many shards; a thread does it for more."""
AHEAD_S, REST_S = 0.1, 0.01
"""The thread looks at the announced orders at this interval, and when one is announced, but rests
in between, however often that is."""
HORIZON, FAR_HORIZON = 4096, 1 << 18
"""The thread looks at this many samples ahead of a job; at FAR_HORIZON at most if the data do not
fit into the store."""
WORTH = 0.25
"""If the data do not fit into the store, a block is fetched only if an order uses at least this
part of it soon. Otherwise its samples are fetched singly."""
SOON_S = 60.0
"""The pace of a job may be this far behind the expected one."""
LEAST_RATE = 1.0
TURN_S = 0.02
"""After this time the thread goes on with the orders of the next user."""
USES_S = 2.0
"""Next uses are written to the store at this interval."""
LATEST = (1 << 32) - 1
REFUSED_S = 10.0
"""A block that could not be fetched ahead is not asked for again during this time."""

Needs: TypeAlias = list[tuple[RemoteShard, Int64s]]
"""Blocks by shard, in the order in which they are needed."""


@dataclass(slots=True)
class Passed:
    """A memory file with bytes that the store has no room for, by shard."""

    base: int
    fd: int


@dataclass(slots=True, eq=False)
class WaitingLoad:
    """A load whose blocks are not all there.

    rows: of its blocks, those of remote shards, by base of the shard. unpinned: bases of shards
    whose blocks could not be pinned. errors: by row. passed: rows by memory file. known: what the
    request was told of blocks that cannot be had. left: calls that have not ended.
    """

    load: Load
    rows: dict[int, Int64s]
    begun: float
    unpinned: set[int] = field(default_factory=set)
    errors: dict[int, FFServeError] = field(default_factory=dict)
    passed: list[tuple[Passed, Int64s]] = field(default_factory=list)
    known: dict[tuple[StoredObject, int], FFServeError] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], Outcome | FFServeError] = field(default_factory=dict)
    again: set[tuple[int, int]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    left: int = 0


@dataclass(slots=True, eq=False)
class GateLane:
    """The gates of one pool. asking: blocks of those that have asked and do not have all."""

    asking: int = 0
    waiting: deque[BlockGate] = field(default_factory=deque)


class BlockGate:
    """The gate at which a request waits for its blocks, and which keeps them for its loads; see the
    module's text.

    Args:
        needs: returns the blocks. count: samples that it lets through. pool, size: see
            `Fetches.admit`. owner: whose request it is.
    """

    def __init__(
        self,
        fetches: Fetches,
        needs: Callable[[], Needs],
        numbers: Int64s,
        owner: Owner,
        *,
        count: int,
        pool: str,
        size: int,
    ) -> None:
        self._fetches = fetches
        self._needs = needs
        self._numbers = numbers
        self._owner = owner
        self._count = count
        self.pool, self.size = pool, size
        self._left = 1
        self._lock = threading.Lock()
        self._open: Callable[[int, float], object] | None = None
        self._pinned: dict[StoredObject, Int64s] = {}
        self._holders = 1
        """The request, and loads that read from the blocks."""
        self._closed = False
        self.errors: dict[tuple[StoredObject, int], FFServeError] = {}
        """Of blocks that cannot be had."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, opened: Callable[[int, float], object]) -> None:
        """Ask for the blocks.

        Args: opened: called once, in the loop's thread, with the number of samples that the request
            is to be answered for, and the time.
        """
        self._open = opened
        self._fetches.in_flight += 1
        self._timer = self._fetches.later(PART_S, self._open_in_part)
        self._fetches.admit(self)

    @property
    def has_ended(self) -> bool:
        """Whether nobody waits at it any more."""
        return self._open is None

    def ask(self) -> None:
        """Ask for the blocks. In a thread; `Fetches.asked` is called when the last one has come."""
        try:
            self._ask()
        finally:
            self._one_came()

    def _ask(self) -> None:
        with contextlib.suppress(FFServeError):  # the session has ended, and the file was closed
            for remote, blocks in self._needs():
                stored = remote.stored
                with self._lock:
                    if self._closed:
                        break
                    rising = np.sort(blocks)
                    try:
                        stored.pin(rising)
                    except OSError:  # the loads read past the store
                        continue
                    self._pinned[stored] = rising
                opened = remote.object_for([self._owner])
                asked = self._fetches.ask(opened, stored.missing(blocks), remote.worth)
                with self._lock:
                    self._left += len(asked)
                for future, some in asked.items():
                    future.add_done_callback(partial(self._came, stored, some))

    def _came(self, stored: StoredObject, blocks: list[int], future: Future[Outcomes]) -> None:
        error = future.exception()
        if isinstance(error, FFServeError):
            self.errors.update({(stored, block): error for block in blocks})
        self._one_came()

    def _one_came(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._fetches.in_loop(self._pass)

    def _pass(self) -> None:
        """End the wait when all blocks are there or cannot be had. In the loop's thread."""
        self._fetches.asked(self)
        self._let_through(self._count)

    def _open_in_part(self) -> None:
        count = self._fetches.ready_count(self._numbers)
        if count:
            self._let_through(count)
        else:
            self._timer = self._fetches.later(PART_S, self._open_in_part)

    def _let_through(self, count: int) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            self._fetches.in_flight -= 1
            self._stop_timer()
            opened(count, time.monotonic())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """The request is answered, or dropped: unpin its blocks when no load reads from them."""
        if self._open is not None:
            self._open = None
            self._fetches.in_flight -= 1
        self._stop_timer()
        self.let_go()

    def keep(self, stored: StoredObject, blocks: Int64s) -> bool:
        """Keep blocks for a load of the request until `let_go`; False: they are not pinned here."""
        pinned = self._pinned.get(stored)
        if pinned is None or not np.isin(blocks, pinned, assume_unique=True).all():
            return False
        self._holders += 1
        return True

    def let_go(self) -> None:
        """The request, or a load, does not need the blocks any more."""
        self._holders -= 1
        if not self._holders:
            self._fetches.in_thread(self._unpin)

    def _unpin(self) -> None:
        with self._lock:
            self._closed = True
            pinned, self._pinned = self._pinned, {}
        for stored, blocks in pinned.items():
            stored.unpin(blocks)


class Fetches:
    """See the module's text.

    Args:
        fetcher: of the store. fetched: called with a load that has waited, when its blocks came or
            cannot be had.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        table: ShardTable,
        directory: Directory,
        fetched: Callable[[WaitingLoad], object],
    ) -> None:
        self._fetcher = fetcher
        self._table = table
        self._directory = directory
        self._fetched = fetched
        self._shards: dict[int, RemoteShard] = {}
        """By the number of the first sample."""
        self._pool = ThreadPoolExecutor(BLOCK_THREADS, "ffserve-blocks")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ahead: dict[JobProgress, list[int]] = {}
        """Announced data sets with remote shards: the first numbers of these."""
        self._followers: dict[JobProgress, dict[Owner, None]] = {}
        """The owners of the sessions that have these data sets open."""
        self._planner: threading.Thread | None = None
        self._ended, self._woken = threading.Event(), threading.Event()
        self._refused: set[tuple[StoredObject, int]] = set()
        """Blocks that could not be fetched ahead, or had no room; cleared now and then."""
        self._refused_at = 0.0
        self._pins_fail = False
        """Whether that was logged."""
        self._lanes: dict[str, GateLane] = {}
        self.in_flight = 0
        """Requests at a gate, and loads that wait."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report to this loop."""
        self._loop = loop

    def shard(self, base: int) -> RemoteShard | None:
        """Return the remote shard with this first number, if it is open."""
        return self._shards.get(base)

    def add(self, base: int, remote: RemoteShard) -> None:
        """Note that a remote shard is open."""
        self._shards[base] = remote

    def remove(self, base: int) -> None:
        """It is closed."""
        self._shards.pop(base, None)

    # ---- threads --------------------------------------------------------------------------

    def in_thread(self, call: Callable[[], object]) -> None:
        """Make a call in a thread, unless the threads have ended."""
        with contextlib.suppress(RuntimeError):
            self._pool.submit(_guarded, call)

    def in_loop(self, call: Callable[[], object]) -> None:
        """Make a call in the loop's thread, unless all has ended by then. Any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._unless_ended, call)

    def later(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        """Make a call in the loop's thread after a time, unless all has ended by then."""
        assert self._loop is not None
        return self._loop.call_later(seconds, self._unless_ended, call)

    def _unless_ended(self, call: Callable[[], object]) -> None:
        if not self._ended.is_set():  # afterwards the engines are closed
            call()

    def ask(
        self, opened: OpenObject, blocks: Int64s, worth: UInt32s
    ) -> dict[Future[Outcomes], list[int]]:
        """Ask for blocks that a request or a load waits for; return them by future. Any thread."""
        now = time.time()
        wanted = worth[blocks] > now
        asked = self._fetcher.ask(opened, blocks[wanted].tolist(), NOW, now)
        asked.update(self._fetcher.ask(opened, blocks[~wanted].tolist(), NOW, None))
        return by_future(asked)

    # ---- requests -------------------------------------------------------------------------

    def gate(self, numbers: Int64s, owner: Owner) -> BlockGate | None:
        """Return the gate at which a request for samples has to wait; None if it need not wait."""
        absent = np.flatnonzero(self._directory.slot_of[numbers] == 0)
        if not len(absent):
            return None
        table = self._table.blocks(numbers[absent])
        bases = self._table.bases[table.shards]
        known = [
            (base, remote)
            for base in np.unique(bases).tolist()
            if (remote := self._shards.get(base)) is not None
        ]

        if not known:
            return None
        block_size = self._fetcher.store.block_size
        # Of larger samples the load waits for the rest, if there is memory for them at all.
        ends = np.minimum(table.ends, table.begins + GATE_BLOCKS * block_size)
        sizes = np.full(len(bases), block_size)
        for base, remote in known:
            sizes[bases == base] = remote.stored.block_size
        firsts, lasts = _covered(table.begins, ends, sizes)
        parts = np.maximum(block_size // sizes, 1)
        rows, size = _reach(table.shards << 40 | firsts, table.shards << 40 | lasts, parts)

        def needs() -> Needs:
            mine = [np.flatnonzero(bases[:rows] == base) for base, _ in known]
            return [
                (remote, _in_order(remote.stored, table.begins[some], ends[some]))
                for (_, remote), some in zip(known, mine, strict=True)
                if len(some)
            ]

        if len(known) <= FEW_SHARDS and self.ready_count(numbers) == len(numbers):
            return None
        count = len(numbers) if rows == len(absent) else int(absent[rows])
        mine = known[0][1].objects.get(owner)
        pool = "" if mine is None else mine.pool
        return BlockGate(self, needs, numbers, owner, count=count, pool=pool, size=size)

    def admit(self, gate: BlockGate) -> None:
        """Let a gate ask for its blocks. Gates of one pool ask for POOL_BLOCKS at a time, also
        after their requests were dropped: to ask takes memory until the blocks come."""
        lane = self._lanes.setdefault(gate.pool, GateLane())
        lane.waiting.append(gate)
        self._admit_more(lane)

    def _admit_more(self, lane: GateLane) -> None:
        while lane.waiting and lane.asking < POOL_BLOCKS:
            gate = lane.waiting.popleft()
            if not gate.has_ended:
                lane.asking += gate.size
                self.in_thread(gate.ask)

    def asked(self, gate: BlockGate) -> None:
        """The blocks of a gate have come, or cannot be had."""
        lane = self._lanes[gate.pool]
        lane.asking -= gate.size
        self._admit_more(lane)
        if not lane.asking:
            del self._lanes[gate.pool]

    def ready_count(self, numbers: Int64s) -> int:
        """Return how many of these samples, from the first one on, are in memory or in the store
        already."""
        absent = np.flatnonzero(self._directory.slot_of[numbers] == 0)
        if not len(absent):
            return len(numbers)
        wanted = numbers[absent]
        bases = self._table.bases[self._table.rows(wanted)]
        # Most calls end here, since the prefetcher waits for the block of one sample.
        remote = self._shards.get(int(bases[0]))
        if remote is not None and not _are_there(remote, wanted[:1] - bases[0])[0]:
            return int(absent[0])
        there = np.ones(len(wanted), np.bool_)
        for base in np.unique(bases).tolist():
            remote = self._shards.get(base)
            if remote is not None:
                mine = bases == base
                there[mine] = _are_there(remote, wanted[mine] - base)
        return len(numbers) if there.all() else int(absent[int(there.argmin())])

    # ---- loads ----------------------------------------------------------------------------

    def hold(self, load: Load, gate: BlockGate | None) -> WaitingLoad | None:
        """Pin the blocks of a load until it ends; return the load if some of them are not there.

        Args: gate: where its request has waited, which keeps the blocks that it has pinned.
        """
        shards = np.unique(load.blocks.shards)
        bases = self._table.bases[load.blocks.shards]
        some = [b for b in self._table.bases[shards].tolist() if b in self._shards]
        if not some:
            return None
        rows, unpinned = {}, set()
        complete = True
        for base in some:
            remote, mine = self._shards[base], np.flatnonzero(bases == base)
            blocks = _covering(remote.stored, load.blocks.begins[mine], load.blocks.ends[mine])
            rows[base] = mine
            if gate is not None and gate.keep(remote.stored, blocks):
                load.releases.append(gate.let_go)
                complete = complete and not len(remote.stored.missing(blocks))
                continue
            try:
                remote.stored.pin(blocks)
            except OSError as error:
                if not self._pins_fail:
                    log.warning("the store cannot pin blocks, so reads pass it: %s", error)
                self._pins_fail = True
                unpinned.add(base)
                continue
            load.releases.append(partial(remote.stored.unpin, blocks))
            complete = complete and not len(remote.stored.missing(blocks))
        if complete and not unpinned:
            return None
        self.in_flight += 1
        known = {} if gate is None else gate.errors
        return WaitingLoad(load, rows, time.monotonic(), unpinned, known=known)

    def fetch(self, waiting: WaitingLoad) -> None:
        """Fetch the blocks of a load, and then call `fetched`."""
        blocks = waiting.load.blocks
        wanted = [
            (base, self._shards[base], blocks.begins[rows], blocks.ends[rows])
            for base, rows in waiting.rows.items()
        ]

        def begin() -> None:
            waiting.left = 1
            for base, remote, begins, ends in wanted:
                covering = _covering(remote.stored, begins, ends)
                if base in waiting.unpinned:
                    waiting.outcomes.update({(base, b): False for b in covering.tolist()})
                    continue
                left: list[int] = []
                for block in remote.stored.missing(covering).tolist():
                    error = waiting.known.get((remote.stored, block))
                    if error is None or isinstance(error, AccessDenied):
                        left.append(block)
                    else:
                        waiting.outcomes[base, block] = error
                self._ask(waiting, base, remote, np.array(left, np.int64))
            self._one_came(waiting)

        self.in_thread(begin)

    def _ask(self, waiting: WaitingLoad, base: int, remote: RemoteShard, missing: Int64s) -> None:
        try:
            opened = remote.object_for(self.askers(waiting.load))
        except ReadError as error:
            with waiting.lock:
                waiting.outcomes.update({(base, block): error for block in missing.tolist()})
            return
        asked = self.ask(opened, missing, remote.worth)
        with waiting.lock:
            waiting.left += len(asked)
        for future, blocks in asked.items():
            future.add_done_callback(partial(self._came, waiting, base, remote, blocks))

    def _came(
        self,
        waiting: WaitingLoad,
        base: int,
        remote: RemoteShard,
        blocks: list[int],
        future: Future[Outcomes],
    ) -> None:
        """Note that blocks are there or cannot be had. Any thread."""
        error, words = future.exception(), remote.stored.state.words
        again: list[int] = []
        with waiting.lock:
            for block in blocks:
                outcome: Outcome | FFServeError
                if error is None:
                    outcome = outcome_of(future.result(), block)
                    retry = outcome is True and words[block] != PRESENT
                else:
                    outcome = _as_error(error)
                    # It may have been asked with the access of another user.
                    retry = isinstance(outcome, AccessDenied) and len(remote.objects) > 1
                    retry = retry and (base, block) not in waiting.again
                    waiting.again.add((base, block))
                if retry:
                    again.append(block)
                elif outcome is not True:
                    waiting.outcomes[base, block] = outcome
        if again:
            self._ask(waiting, base, remote, np.array(again, np.int64))
        self._one_came(waiting)

    def _one_came(self, waiting: WaitingLoad) -> None:
        with waiting.lock:
            waiting.left -= 1
            if waiting.left:
                return
        self.in_thread(lambda: self._pass(waiting))

    def _pass(self, waiting: WaitingLoad) -> None:
        """Go on with a load whose blocks came or cannot be had. Bytes without room in the store
        come past it."""
        refused: dict[int, dict[int, bytes]] = {}
        for (base, block), outcome in waiting.outcomes.items():
            if isinstance(outcome, FFServeError):
                self._fail(waiting, base, block, outcome)
            elif outcome is not True:
                refused.setdefault(base, {})[block] = outcome or b""
        waiting.left = 1
        for base, contents in refused.items():
            self._pass_shard(waiting, base, contents)
        self._one_passed(waiting)

    def _fail(self, waiting: WaitingLoad, base: int, block: int, error: FFServeError) -> None:
        for row in self._touching(waiting, base, [block]).tolist():
            waiting.errors[row] = error

    def _touching(self, waiting: WaitingLoad, base: int, blocks: list[int]) -> Int64s:
        """Return the rows of a load that need any of these blocks."""
        rows, table = waiting.rows[base], waiting.load.blocks
        size = self._shards[base].stored.block_size
        touching = np.zeros(len(rows), np.bool_)
        for first, count in runs(np.sort(blocks)):
            low, high = first * size, (first + count) * size
            touching |= (table.begins[rows] < high) & (table.ends[rows] > low)
        return rows[touching]

    def _pass_shard(self, waiting: WaitingLoad, base: int, contents: dict[int, bytes]) -> None:
        remote = self._shards.get(base)
        rows = self._touching(waiting, base, list(contents))
        rows = rows[[row not in waiting.errors for row in rows.tolist()]]
        if remote is None or not len(rows):
            return
        try:
            opened = remote.object_for(self.askers(waiting.load))
        except ReadError as error:
            waiting.errors.update(dict.fromkeys(rows.tolist(), error))
            return
        try:
            fd = os.memfd_create("ffserve-passing", os.MFD_CLOEXEC)
            waiting.passed.append((Passed(base, fd), rows))
            os.ftruncate(fd, remote.stored.size)
        except OSError as error:
            failure = ReadError(f"there is no memory for bytes that pass the store: {error}")
            waiting.errors.update(dict.fromkeys(rows.tolist(), failure))
            return
        table = waiting.load.blocks
        for begin, end, some in _merged(table.begins[rows], table.ends[rows], rows):
            with waiting.lock:
                waiting.left += 1
            future = self._fetcher.ask_bytes(opened, begin, min(end, remote.stored.size))
            future.add_done_callback(partial(self._passed, waiting, fd, begin, some))

    def _passed(
        self, waiting: WaitingLoad, fd: int, begin: int, rows: list[int], future: Future[bytes]
    ) -> None:
        """Note that bytes have come past the store, or cannot be had. Any thread."""
        failure: FFServeError | None = None
        if (error := future.exception()) is not None:
            failure = _as_error(error)
        else:
            try:
                _write(fd, memoryview(future.result()), begin)
            except OSError as failed:
                failure = ReadError(f"there is no memory for bytes that pass the store: {failed}")
        if failure is not None:
            with waiting.lock:
                waiting.errors.update(dict.fromkeys(rows, failure))
        self._one_passed(waiting)

    def _one_passed(self, waiting: WaitingLoad) -> None:
        with waiting.lock:
            waiting.left -= 1
            if waiting.left:
                return
        self.in_loop(lambda: self._end(waiting))

    def _end(self, waiting: WaitingLoad) -> None:
        self.in_flight -= 1
        self._fetched(waiting)

    def failures(self, waiting: WaitingLoad) -> dict[int, Failure]:
        """Return the failed samples of a load that has waited, by number."""
        found: dict[int, Failure] = {}
        blocks = waiting.load.blocks
        for row, error in waiting.errors.items():
            first, count = int(blocks.firsts[row]), int(blocks.counts[row])
            failure = Failure(-errno.EIO, error=error)
            found.update(dict.fromkeys(range(first, first + count), failure))
        return found

    # ---- damage ---------------------------------------------------------------------------

    def mend(self, remote: RemoteShard, load: Load, begin: int, end: int, passed: int) -> bool:
        """Fetch the pinned blocks of an extent again if they are damaged; return whether any was.

        It waits, so the loop's thread must not call it.

        Args: passed: descriptor of the memory file that has the extent, whose bytes passed the
            store, and which gets what the origin sends now; -1: none.
        """
        with contextlib.suppress(FFServeError, OSError, FutureTimeout):
            opened = remote.object_for(self.askers(load))
            if passed >= 0:
                asked = self._fetcher.ask_bytes(opened, begin, end, direct=True)
                content, before = asked.result(MEND_S), os.pread(passed, end - begin, begin)
                if content == before:
                    return False
                opened.remote.distrust()
                _write(passed, memoryview(content), begin)
                return True
            blocks = _covering(remote.stored, np.array([begin]), np.array([end]))
            if not self._fetcher.repair(opened, blocks):
                return self._fetcher.compare(opened, blocks, MEND_S)
            missing = remote.stored.missing(blocks)
            wait(self._fetcher.ask(opened, missing, NOW, None).values(), MEND_S)
            return True
        return False

    # ---- announced orders -----------------------------------------------------------------

    def askers(self, load: Load) -> list[Owner]:
        """Return the users that wait for a load, or whose jobs have announced its samples: it is
        fetched with their access."""
        found: list[Owner] = []
        for fetch in list(load.fetches):
            if isinstance(fetch, Piece):
                found += self._followers.get(fetch.progress, ())
            elif isinstance(fetch, SampleRequest) and fetch.owner.who is not None:
                found.append(fetch.owner.who)
        return found

    def follow(self, progress: JobProgress, bases: list[int], owner: Owner) -> None:
        """Fetch ahead for a job's data set, as soon as it has announced an order. Args: owner: with
        whose access."""
        self._followers.setdefault(progress, {})[owner] = None
        self._ahead[progress] = sorted(bases)
        progress.ready = self.ready_count
        if self._planner is None:
            self._planner = threading.Thread(
                target=self._keep_looking, name="ffserve-ahead", daemon=True
            )
            self._planner.start()

    def announced(self) -> None:
        """An order was announced: look at the orders now."""
        self._woken.set()

    def leave(self, progress: JobProgress) -> None:
        """Forget a data set that has no session any more."""
        self._ahead.pop(progress, None)
        self._followers.pop(progress, None)

    def _keep_looking(self) -> None:
        due: dict[str, float] = {}
        """By user: when some of the user's orders are looked at again. By order: when it was last
        looked at, and when its next uses were last written."""
        looked: dict[JobProgress, float] = {}
        written: dict[JobProgress, float] = {}
        while not self._ended.wait(REST_S):
            self._woken.wait(AHEAD_S)
            self._woken.clear()
            if self._ended.is_set():
                return
            begun = time.monotonic()
            if begun - self._refused_at > REFUSED_S:
                self._refused, self._refused_at = set(), begun
            ahead, of_users = dict(self._ahead), defaultdict[str, list[JobProgress]](list)
            for progress in ahead:
                of_users[progress.owner].append(progress)
            looked = {one: looked.get(one, 0.0) for one in ahead}
            written = {one: written.get(one, 0.0) for one in ahead}
            due = {user: due.get(user, 0.0) for user in of_users}
            for user, orders in of_users.items():
                if (begun := time.monotonic()) < due[user]:
                    continue
                for progress in sorted(orders, key=looked.__getitem__):
                    if (now := time.monotonic()) - begun > TURN_S:
                        break
                    looked[progress] = now
                    if now - written[progress] > USES_S:
                        written[progress] = now
                        self._look(self._write_uses, progress, ahead[progress], now)
                    self._look(self.look_ahead, progress, ahead[progress], now)
                # A tenth of a processor for each user at most.
                due[user] = begun + 10 * (time.monotonic() - begun)

    def _look(
        self,
        at: Callable[[JobProgress, list[int], float], None],
        progress: JobProgress,
        bases: list[int],
        now: float,
    ) -> None:
        try:
            with contextlib.suppress(ReadError):  # its last reader has closed
                at(progress, bases, now)
        except Exception:
            log.exception("internal error while fetching ahead")

    def _write_uses(self, progress: JobProgress, bases: list[int], now: float) -> None:
        """Tell the store when a job will use each block next. A block that the epoch does not need
        any more is needed in the next one: in its middle, for all that is known."""
        order = progress.orders.get(progress.epoch)
        if order is None:
            return
        after = progress.orders.get(progress.epoch + 1)
        rate, wall = max(progress.rate(now), LEAST_RATE), time.time()
        left = max(order.count - progress.position, 0)
        for base in bases:
            remote = self._shards.get(base)
            if remote is None or not remote.stored.count:
                continue
            parts = _next_parts(remote, order.table, base - order.low)
            seconds = np.full(remote.stored.count, left + order.count / 2)
            if after is not None:
                known = _next_parts(remote, after.table, base - after.low)
                seconds[known > 0] = left + _edges(after.count)[known[known > 0]]
            ahead = _edges(order.count)[parts[parts > 0]] - progress.position
            seconds[parts > 0] = np.maximum(ahead, 0)
            mine = wall + seconds / rate
            uses = remote.stored.state.uses
            before = uses.astype(np.float64)
            # Another job's use stays if it is sooner and not over.
            best = np.where((before > wall) & (before < mine), before, mine + 1)
            uses[:] = np.clip(best, 0, LATEST).astype(np.uint32)

    def look_ahead(self, progress: JobProgress, bases: list[int], now: float) -> None:
        """Ask for the blocks that a job's orders need next. In the thread of the orders."""
        orders, epoch, position = dict(progress.orders), progress.epoch, progress.front
        order = orders.get(epoch)
        shards = {base: remote for base in bases if (remote := self._shards.get(base)) is not None}
        if order is None or not shards:
            return
        store, owners = self._fetcher.store, list(self._followers.get(progress, ()))
        size = sum(remote.stored.size for remote in shards.values())
        horizon, least = HORIZON, 0.0
        if size > store.limit:
            mean = max(progress.payload_size // max(progress.sample_count, 1), 1)
            horizon = min(int(store.limit) // 2 // mean + 1, FAR_HORIZON)
            least = WORTH / mean
        numbers = order.numbers(position, position + horizon)
        after = orders.get(epoch + 1)
        if len(numbers) < horizon and after is not None:
            numbers = np.concatenate((numbers, after.numbers(0, horizon - len(numbers))))
        rate = max(progress.rate(now), LEAST_RATE)
        left = int(min(store.limit / 4, MOST_FETCHED_AHEAD))
        wall = time.time()
        for place, remote, first, count in _upcoming(numbers, shards, least, wall, rate):
            ahead_s, stored = place / rate, remote.stored
            due = wall + ahead_s
            blocks = range(first, first + count)
            wanted = [block for block in blocks if (stored, block) not in self._refused]
            most, left = left // stored.block_size, left - len(wanted) * stored.block_size
            if most <= 0 or not wanted:
                continue
            opened, refused = remote.object_for(owners), self._refused
            new = [b for b in wanted[:most] if not self._fetcher.is_asked(opened, b)]
            if not new:
                continue
            small = stored.block_size < store.block_size
            most_queued = MOST_QUEUED // 4 if small else MOST_QUEUED
            if self._fetcher.queued_count(opened) >= most_queued:
                break
            # Nodes with the same order would ask a cache network for the same block at once.
            early = random.uniform(0.5, 1.0) if opened.remote.is_cached else 1.0
            asked = self._fetcher.ask(opened, new, due - (1.0 - early) * ahead_s, due)
            for future, some in by_future(asked).items():
                future.add_done_callback(partial(_note_refusal, refused, stored, some))

    def close(self) -> None:
        """End the threads."""
        self._ended.set()
        self._woken.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _note_refusal(
    refused: set[tuple[StoredObject, int]],
    stored: StoredObject,
    blocks: list[int],
    future: Future[Outcomes],
) -> None:
    """Note which blocks could not be fetched ahead."""
    failed = future.exception() is not None
    refused.update(
        (stored, block)
        for block in blocks
        if failed or outcome_of(future.result(), block) is not True
    )


def _guarded(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        log.exception("internal error while fetching")


def _as_error(error: BaseException) -> FFServeError:
    if isinstance(error, FFServeError):
        return error
    return ReadError(f"cannot fetch from the origin: {error!r}")


def _in_order(stored: StoredObject, begins: Int64s, ends: Int64s) -> Int64s:
    """Return the different blocks of extents, in their order; extents may be repeated."""
    firsts, spans, places = _spans(*_covered(begins, ends, stored.block_size))
    order = np.argsort(places)
    firsts, spans = firsts[order], spans[order]
    blocks, _ = _each(firsts, firsts + spans - 1)
    different, places = np.unique(blocks, return_index=True)
    ordered: Int64s = different[np.argsort(places)]
    return ordered[ordered < stored.count]


def _covered(begins: Int64s, ends: Int64s, size: int | Int64s) -> tuple[Int64s, Int64s]:
    """Return the first and the last block of extents. Args: size: of blocks."""
    firsts: Int64s = np.floor_divide(begins, size)
    lasts: Int64s = np.floor_divide(np.maximum(ends - 1, begins), size)
    return firsts, lasts


def _spans(firsts: Int64s, lasts: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Return, for runs of blocks, the different first ones, the longest run from each, and where it
    comes first."""
    different, places, rows = np.unique(firsts, return_index=True, return_inverse=True)
    spans = np.zeros(len(different), np.int64)
    np.maximum.at(spans, rows, lasts - firsts + 1)
    return different, spans, places


def _reach(firsts: Int64s, lasts: Int64s, parts: Int64s) -> tuple[int, int]:
    """Return how many runs, from the first one on, have GATE_BLOCKS blocks together, and how many
    they have, about.

    Args: parts: by run: so many neighbours count as one block.
    """
    _, spans, places = _spans(firsts, lasts)
    counts = np.zeros(len(firsts), np.int64)
    counts[places] = -(-spans // parts[places])
    sums = np.cumsum(counts)
    rows = max(int(np.searchsorted(sums, GATE_BLOCKS, side="right")), 1)
    return rows, int(sums[rows - 1])


def _are_there(remote: RemoteShard, own: Int64s) -> NDArray[np.bool_]:
    """Return which samples lie in blocks that are there."""
    firsts, lasts = remote.firsts[own], remote.lasts[own]
    if not remote.stored.count:
        return np.ones(len(own), np.bool_)
    words = remote.stored.state.words
    there: NDArray[np.bool_] = (words[firsts] == PRESENT) & (words[lasts] == PRESENT)
    wide = np.flatnonzero((lasts - firsts > 1) & there)
    if len(wide):
        different, places = np.unique(own[wide], return_inverse=True)
        blocks, begins = _each(remote.firsts[different], remote.lasts[different])
        there[wide] = np.logical_and.reduceat(words[blocks] == PRESENT, begins)[places]
    return there


def _each(firsts: Int32s | Int64s, lasts: Int32s | Int64s) -> tuple[Int64s, Int64s]:
    """Return all blocks of runs, and where those of each run begin."""
    spans: Int64s = (lasts - firsts + 1).astype(np.int64)
    begins: Int64s = np.cumsum(spans, dtype=np.int64) - spans
    blocks: Int64s = np.repeat(firsts - begins, spans) + np.arange(int(spans.sum()))
    return blocks, begins


def _covering(stored: StoredObject, begins: Int64s, ends: Int64s) -> Int64s:
    """Return the blocks of extents, rising."""
    firsts, lasts = _covered(begins, ends, stored.block_size)
    if (lasts - firsts > 1).any():
        return np.sort(_in_order(stored, begins, ends))
    blocks = np.array(sorted({*firsts.tolist(), *lasts.tolist()}), np.int64)
    return blocks[: np.searchsorted(blocks, stored.count)]


def _merged(begins: Int64s, ends: Int64s, rows: Int64s) -> list[tuple[int, int, list[int]]]:
    """Return extents with their rows, near neighbours together."""
    order = np.argsort(begins, kind="stable")
    found: list[tuple[int, int, list[int]]] = []
    columns = begins[order].tolist(), ends[order].tolist(), rows[order].tolist()
    for begin, end, row in zip(*columns, strict=True):
        if found and begin <= found[-1][1] + GAP:
            first, before, some = found[-1]
            found[-1] = first, max(before, end), [*some, row]
        else:
            found.append((begin, end, [row]))
    return found


def _edges(count: int) -> Floats:
    """Return the first position of each part of an order; see `orders.AnnouncedOrder.edge`."""
    edges: Floats = np.ceil((np.arange(PARTS + 2) - 1) * count / PARTS)
    return edges


def _next_parts(remote: RemoteShard, table: NDArray[np.uint8], first: int) -> NDArray[np.uint8]:
    """Return the part of an order in which each block is used next, 0 if it is not.

    Args: table: of the order. first: row of the shard's first sample.
    """
    parts = table[first : first + len(remote.firsts)]
    # As unsigned numbers less 1, samples that do not come are the last.
    ranks = parts - np.uint8(1)
    found = np.full(remote.stored.count, 255, np.uint8)
    firsts, lasts = remote.firsts[: len(parts)], remote.lasts[: len(parts)]
    runs = np.flatnonzero(np.diff(firsts, prepend=-1))
    if len(runs):
        np.minimum.at(found, firsts[runs], np.minimum.reduceat(ranks, runs))
    wide = np.flatnonzero(lasts > firsts)
    np.minimum.at(found, lasts[wide], ranks[wide])
    inner = np.flatnonzero(lasts - firsts > 1)
    blocks, _ = _each(firsts[inner] + 1, lasts[inner] - 1)
    np.minimum.at(found, blocks, np.repeat(ranks[inner], lasts[inner] - firsts[inner] - 1))
    return found + np.uint8(1)


def _upcoming(
    numbers: Int64s, shards: dict[int, RemoteShard], least: float, wall: float, rate: float
) -> list[tuple[int, RemoteShard, int, int]]:
    """Mark the blocks of which these samples use at least so many bytes with the time of their next
    use. Return those that are missing, soonest needed first: the place of their first use, the
    first block, and how many neighbours are used first there.

    Args: least: samples, for each byte of a block; a block has one at least. wall: the time now, in
        seconds since 1970. rate: samples a second.
    """
    found: list[tuple[int, RemoteShard, int, int]] = []
    bases = np.array(sorted(shards), np.int64)
    owners = np.searchsorted(bases, numbers, side="right") - 1
    for k in np.unique(owners[owners >= 0]).tolist():
        base = int(bases[k])
        remote = shards[base]
        places = np.flatnonzero(owners == k)
        own = numbers[places] - base
        inside = own < len(remote.firsts)  # behind it may be numbers of others
        places, own = places[inside], own[inside]
        firsts, lasts = remote.firsts[own], remote.lasts[own]
        blocks, _ = _each(firsts, lasts)
        at = np.repeat(places, lasts - firsts + 1)
        different, first, counts = np.unique(blocks, return_index=True, return_counts=True)
        enough = counts >= math.ceil(least * remote.stored.block_size)
        chosen = np.flatnonzero(enough & (different < remote.stored.count))
        different, at = different[chosen], at[first[chosen]]
        dues = wall + at / rate
        remote.worth[different] = np.minimum(dues + SOON_S, LATEST)
        remote.stored.state.uses[different] = np.minimum(dues + 1, LATEST)
        absent = remote.stored.state.words[different] != PRESENT
        different, at = different[absent], at[absent]
        edges = np.flatnonzero((np.diff(different) != 1) | (np.diff(at) != 0)) + 1
        begins = np.concatenate(([0], edges)) if len(at) else edges
        counts = np.diff(begins, append=len(at))
        rows = at[begins].tolist(), different[begins].tolist(), counts.tolist()
        found.extend((place, remote, *run) for place, *run in zip(*rows, strict=True))
    return sorted(found, key=lambda each: each[0])


def _write(fd: int, content: memoryview, offset: int) -> None:
    while content:
        done = os.pwrite(fd, content, offset)
        content, offset = content[done:], offset + done
