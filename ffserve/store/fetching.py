"""Fetching: blocks of remote objects into the store, each once, soonest needed first.

Neighbouring blocks that are asked for together are one task, since a block is too small for a task;
a thread that asks for one of them waits for all. Neighbours that are asked for otherwise come with
them, in one request. Among processes, who locks the claim of a block fetches it, and the others
wait for it. Each origin has threads of its own, so an origin that hangs holds up nobody else. What
failed and may be tried again is tried again after pauses that double and vary. An origin that
failed several times in a row is asked by one thread at a time (circuit breaker); the others wait
for what it finds out.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ffserve.dtypes import Int64s
from ffserve.engine.codec import crc32c
from ffserve.errors import FFServeError, MissingFile, ReadError, UsageError
from ffserve.formats.base import ForetoldReadAt
from ffserve.limits import ASKED_AT_ONCE, FETCH_SIZE, HEAD_SIZE, MOST_READ_AHEAD, ORIGIN_THREADS
from ffserve.store import origin, urls
from ffserve.store.blocks import PRESENT, RESERVED, UNCHECKED, StoredObject, write_at
from ffserve.store.blocks import runs as neighbours
from ffserve.store.credentials import Access
from ffserve.store.directory import Store, default_directory, usual_limit
from ffserve.store.origin import ObjectVersion, OriginError, RemoteFile
from ffserve.store.schemes import scheme_of
from ffserve.store.schemes.scheme import Sent

log = logging.getLogger("ffserve")
T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
GIVE_UP_S = 120.0
"""A failing origin is asked again for this long before its error is raised."""
CONTACT_S = 15.0
"""An origin that has never answered is asked again for only this long, since its name may be
wrong."""
FAILURES = 5
"""After this many failures in a row, one thread at a time asks an origin."""
POLL_S = 0.005
"""A block that another process fetches is looked at with this interval."""
FULL_S = 5.0
"""A copy waits this long for room on a full disk, since the store may give way."""
MOST_ALIKE = 256
"""An object of which the origin has sent this many damaged blocks twice alike is damaged there."""
LISTED_S = 30.0
"""A listing counts as the present state of an object for this long."""
NEAR = 256 << 10
"""Bytes between reads that are fetched, too, where only parts of an object are read. At 100 MB/s
the headers of larger members come sooner by requests of their own."""
LONG_SIZE = 128 * HEAD_SIZE
"""Of an object of this size or a larger one, opening asks for the beginning only."""
NOW = 0.0
"""The priority of a block that a thread waits for. Other blocks have the time at which they will be
needed, in seconds since 1970."""

Outcome: TypeAlias = "bool | bytes"
"""The outcome of fetching a block. True: it is in the store. False: the store has no room for it,
so its reader reads the bytes past the store. bytes: it was fetched, but could not be written."""
Outcomes: TypeAlias = "bool | dict[int, Outcome]"
"""The outcome of blocks that were asked for together: True if all are in the store, else those of
the blocks that are not."""


class Patience(NamedTuple):
    """For how long a failing origin is asked again (contact_s: one that has never answered), and
    the pause before the first repetition."""

    give_up_s: float = GIVE_UP_S
    contact_s: float = CONTACT_S
    first_pause_s: float = FIRST_PAUSE_S


class Breaker:
    """The state of one origin: whether it answers. Threads share it."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        self._failures = 0
        self._probing = False
        self._next = self._since = 0.0
        self._pause = patience.first_pause_s
        self._last: FFServeError | None = None
        self._known = False
        """Whether it has ever answered."""

    @property
    def works(self) -> bool:
        """Whether the last call was answered."""
        return not self._failures

    def call(self, attempt: Callable[[], T]) -> T:
        """Return the result of a call of the origin, made again while that may help.

        Raises: FFServeError: what the origin said last.
        """
        begun = time.monotonic()
        pause = self._patience.first_pause_s
        for count in itertools.count(1):
            deadline = begun + self._patience_s
            probe = self._admit(deadline)
            try:
                result = attempt()
            except OriginError as error:
                self._known |= error.answered
                self._answered(probe, None if not error.again else error.error)
                wait = random.uniform(0.5, 1.0) * pause
                if not error.again:
                    raise error.error from error.__cause__
                if time.monotonic() + wait > deadline:
                    last = tried(error.error, count, time.monotonic() - begun)
                    raise last from error.__cause__
                time.sleep(wait)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            except BaseException:
                self._answered(probe, None)
                raise
            else:
                self._known = True
                self._answered(probe, None)
                return result
        raise AssertionError("the loop ends with a result or an error")

    @property
    def _patience_s(self) -> float:
        return self._patience.give_up_s if self._known else self._patience.contact_s

    def _admit(self, deadline: float) -> bool:
        """Wait until the origin may be asked; return whether this thread probes for the others.

        Raises: the last error, when the origin has failed for so long that all have given up.
        """
        with self._changed:
            while self._failures >= FAILURES:
                now = time.monotonic()
                if now >= self._next and not self._probing:
                    self._probing = True
                    return True
                deadline = min(deadline, self._since + self._patience_s)
                if now >= deadline:
                    assert self._last is not None
                    raise tried(self._last, self._failures, now - self._since)
                until = deadline if self._probing else min(self._next, deadline)
                self._changed.wait(max(until - now, 0.001))
            return False

    def _answered(self, probe: bool, error: FFServeError | None) -> None:
        with self._changed:
            if error is None:
                self._failures, self._pause = 0, self._patience.first_pause_s
            else:
                if not self._failures:
                    self._since = time.monotonic()
                self._failures += 1
                self._last = error
                if probe or self._failures == FAILURES:
                    self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
                    self._next = time.monotonic() + random.uniform(0.5, 1.0) * self._pause
                if self._failures == FAILURES:
                    log.warning(
                        "store: the origin does not answer, so it is asked less often: %s", error
                    )
            if probe:
                self._probing = False
            self._changed.notify_all()


def tried(error: FFServeError, count: int, seconds: float) -> FFServeError:
    """Return an error that says how often a request was made before it was given up."""
    often = "once" if count == 1 else f"{count} times in {seconds:.0f} s"
    return type(error)(f"{error.message}; tried {often}", path=error.path, hint=error.hint)


@dataclass(order=True)
class _QueuedCall:
    due: float
    number: int
    run: Callable[[], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)


@dataclass(slots=True, eq=False)
class _Run:
    """Neighbouring blocks that were asked for, and are one task. pool: the origin whose threads
    fetch them. use: as for `Store.reserve`."""

    first: int
    count: int
    future: Future[Outcomes]
    pool: str
    use: float | None

    @property
    def end(self) -> int:
        """The block behind the last one."""
        return self.first + self.count


class Threads:
    """The threads of one origin; started when there is work, they end after a while without.

    Args: most: threads.
    """

    IDLE_S = 10.0

    def __init__(self, name: str, most: int = ORIGIN_THREADS) -> None:
        self._name = name
        self._most = most
        self._changed = threading.Condition()
        self._waiting: list[_QueuedCall] = []
        self._numbers = itertools.count()
        self._count = self._idle = 0

    @property
    def queued_count(self) -> int:
        """Tasks that wait for a thread."""
        return len(self._waiting)

    def put(self, due: float, run: Callable[[], Any], future: Future[Any]) -> None:
        """Run a task after all tasks with an earlier time have begun. A future that runs already is
        left out, since a task may be put again with an earlier time."""
        with self._changed:
            heapq.heappush(self._waiting, _QueuedCall(due, next(self._numbers), run, future))
            if self._idle < len(self._waiting) and self._count < self._most:
                self._count += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            else:
                self._changed.notify()

    def take(self, future: Future[Any]) -> bool:
        """Let the calling thread set the result of a task; return False if the task has begun."""
        with self._changed:
            begun = future.running() or future.done()
            return not begun and future.set_running_or_notify_cancel()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            _complete(task.future, task.run)
            del task

    def _next(self) -> _QueuedCall | None:
        with self._changed:
            while True:
                while self._waiting:
                    task = heapq.heappop(self._waiting)
                    future = task.future
                    if future.running() or future.done():
                        continue
                    if future.set_running_or_notify_cancel():
                        return task
                self._idle += 1
                woken = self._changed.wait(self.IDLE_S)
                self._idle -= 1
                if not woken and not self._waiting:
                    self._count -= 1
                    return None


def _complete(future: Future[Any], run: Callable[[], Any]) -> None:
    try:
        result = run()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


class OpenObject:
    """An object of the store together with its origin. Made by `Fetcher.open`.

    pool: whose threads fetch it, and who shares what is known of the origin. parts: only parts of
    it are read, so bytes between these are worth requests. least: bytes of a range that a cache
    network is asked for, at least.
    """

    head = b""
    """The bytes with which the origin has shown that it may be read, until its tables are read."""

    def __init__(
        self,
        stored: StoredObject,
        identity: ObjectVersion,
        access: Access | None,
        pool: str,
        *,
        least: int,
        parts: bool,
    ) -> None:
        self.stored, self.identity, self.access = stored, identity, access
        self.remote = RemoteFile(identity, access, max(least, stored.block_size))
        self.shown = urls.shown(identity.url)
        self.pool, self.parts = pool, parts

    def blocks(self, start: int, end: int) -> Int64s:
        """Return the blocks of an extent."""
        size = self.stored.block_size
        return np.arange(start // size, -(-min(end, self.stored.size) // size))


class Fetcher:
    """Brings blocks into one store. Threads may call it.

    Args:
        store: or what opens it, at its first use. patience: None: that of this process.
        threads: for each origin. fetch_size: bytes of neighbours in one request at most.
        read_ahead: bytes that are asked for ahead of a reader in order at most.
    """

    def __init__(
        self,
        store: Store | Callable[[], Store],
        patience: Patience | None = None,
        *,
        threads: int = ORIGIN_THREADS,
        fetch_size: int = FETCH_SIZE,
        read_ahead: int = MOST_READ_AHEAD,
    ) -> None:
        self._store = store
        self._patience = patience
        self._most_threads, self._fetch_size, self._read_ahead = threads, fetch_size, read_ahead
        self._opening, self._lock = threading.Lock(), threading.Lock()
        self._tasks: dict[tuple[StoredObject, int], _Run] = {}
        """By block."""
        self._threads: dict[str, Threads] = {}
        self._full = False
        self.fetched = 0
        """Bytes that came from origins."""

    @property
    def store(self) -> Store:
        """The store, which is opened at the first use. Raises: as `Store`."""
        with self._opening:
            if not isinstance(self._store, Store):
                self._store = self._store()
            return self._store

    @property
    def has_store(self) -> bool:
        """Whether the store is open."""
        return isinstance(self._store, Store)

    def open(
        self,
        identity: ObjectVersion,
        *,
        domain: str = "",
        access: Access | None = None,
        pool: str | None = None,
        parts: bool = False,
    ) -> OpenObject:
        """Open an object, without asking its origin.

        Args:
            domain: as of `Store.open`. access: with what the origin is reached; None: with what
                this process has. pool, parts: see `OpenObject`; None: that of the origin.
        Raises: as `Store.open`.
        """
        name = urls.origin_of(identity.url) if pool is None else pool
        # A cache network has slices of the size of most blocks, and brings them whole.
        parts = parts and not RemoteFile(identity).is_cached
        stored = self.store.open(identity, domain, parts=parts)
        least = self.store.block_size
        return OpenObject(stored, identity, access, name, least=least, parts=parts)

    def breaker(self, pool: str) -> Breaker:
        """Return what is known of the origin of a pool."""
        return _breaker(pool, self._patience)

    def close(self, opened: OpenObject) -> None:
        """Give an object back."""
        self.store.close(opened.stored)

    def forget(self, pool: str) -> None:
        """End the threads of a pool when no object of it is open any more; tasks under way are
        finished."""
        with self._lock:
            self._threads.pop(pool, None)
        with _lock:
            _breakers.pop(pool, None)

    def _of(self, opened: OpenObject) -> Threads:
        with self._lock:
            if opened.pool not in self._threads:
                self._threads[opened.pool] = Threads("ffserve-fetch", self._most_threads)
            return self._threads[opened.pool]

    def ask(
        self,
        opened: OpenObject,
        blocks: Iterable[int],
        due: float,
        use: float | None,
        *,
        here: bool = False,
    ) -> dict[int, Future[Outcomes]]:
        """Ask for blocks; return at once, unless they are fetched here.

        Args:
            blocks: neighbours that follow each other here have one future.
            due: NOW, or when they will be needed: the soonest is fetched first.
            use: as of `Store.reserve`.
            here: the calling thread fetches those whose fetch has not begun, and returns then.
        Returns: a future of each; its exception is an FFServeError.
        """
        threads, stored = self._of(opened), opened.stored
        most = self._most(opened)
        found: dict[int, Future[Outcomes]] = {}
        new: list[_Run] = []
        earlier: dict[_Run, None] = {}
        with self._lock:
            for block in map(int, blocks):
                run = self._tasks.get((stored, block))
                if run is None or run.future.done():
                    if not new or new[-1].end != block or new[-1].count == most:
                        new.append(_Run(block, 0, Future(), opened.pool, use))
                    run = new[-1]
                    run.count += 1
                    self._tasks[stored, block] = run
                else:
                    earlier[run] = None
                found[block] = run.future
        for run in new:
            self.store.share(stored)
            run.future.add_done_callback(partial(self._ended, stored, run))
        soon = [run for run in earlier if due == NOW and not run.future.running()]
        for run in (*new, *soon):
            fetch = partial(self._fetch, opened, run)
            if here and threads.take(run.future):
                _complete(run.future, fetch)
            else:
                threads.put(due, fetch, run.future)
        return found

    def prove(self, opened: OpenObject) -> None:
        """Let the origin show that an object may be read: with the first block, or the beginning of
        a long object, if that is missing and nobody has asked for it. Raises: FFServeError."""
        if self._shows(opened) and self._is_long(opened):
            opened.head = self.few(opened, 0, HEAD_SIZE)
            self.fetched += HEAD_SIZE
        elif self._shows(opened):
            here = scheme_of(opened.identity.url).at_once > ASKED_AT_ONCE
            self.ask(opened, [0], NOW, None, here=here)[0].result()
        if not opened.remote.proven:
            self.breaker(opened.pool).call(opened.remote.prove)

    def send_proof(self, opened: OpenObject) -> Sent | None:
        """Send the request of `prove`, as of `OpenVersion`."""
        remote = opened.remote
        if remote.proven and not self._shows(opened):
            return Sent()
        if not self.breaker(opened.pool).works:
            return None
        if self._shows(opened):
            end = HEAD_SIZE if self._is_long(opened) else opened.stored.state.end(0)
            return remote.send(0, end)
        return origin.send_info(remote.identity.url, opened.access)

    def _shows(self, opened: OpenObject) -> bool:
        """Whether fetching the first block is to show what its user may read."""
        stored = opened.stored
        missing = stored.count and stored.state.words[0] != PRESENT
        return bool(missing) and not self.is_asked(opened, 0)

    @staticmethod
    def _is_long(opened: OpenObject) -> bool:
        """Whether the tables are worth a request of their own, whose bytes come twice: a data set
        of many long files has gigabytes of first blocks, and its jobs may read others first."""
        long = opened.stored.size >= LONG_SIZE and opened.stored.block_size > HEAD_SIZE
        return long and not opened.remote.is_cached

    def _most(self, opened: OpenObject) -> int:
        """Return how many blocks come by one request; of a cache network each block by itself."""
        if opened.remote.is_cached:
            return self._piece(opened)
        return int(max(self._fetch_size // opened.stored.block_size, 1))

    def _ended(self, stored: StoredObject, run: _Run, _: Future[Outcomes]) -> None:
        with self._lock:
            for block in range(run.first, run.end):
                if self._tasks.get((stored, block)) is run:
                    del self._tasks[stored, block]
        self.store.close(stored)

    def is_asked(self, opened: OpenObject, block: int) -> bool:
        """Whether a block is on its way, or will be."""
        with self._lock:
            return (opened.stored, block) in self._tasks

    def queued_count(self, opened: OpenObject) -> int:
        """Return how many calls of an object's origin wait for a thread."""
        return self._of(opened).queued_count

    def wait(self, opened: OpenObject, block: int, future: Future[Outcomes]) -> Outcome:
        """Return the outcome of a block that was asked for and is pinned. Raises: FFServeError."""
        while True:
            outcome = outcome_of(future.result(), block)
            if outcome is not True or opened.stored.state.words[block] == PRESENT:
                return outcome
            # The block came before it was pinned, and was evicted.
            future = self.ask(opened, [block], NOW, None)[block]

    def ask_bytes(
        self, opened: OpenObject, start: int, end: int, *, direct: bool = False
    ) -> Future[bytes]:
        """Ask for bytes past the store; return at once. Args: direct: as of `RemoteFile.read`."""
        future: Future[bytes] = Future()
        run = partial(self._download, opened, start, end, direct=direct)
        self._of(opened).put(NOW, run, future)
        return future

    def send_few(self, opened: OpenObject, start: int, end: int) -> Sent | None:
        """Send the request of a later `few`, as of `OpenVersion`."""
        if not len(opened.stored.missing(opened.blocks(start, end))):
            return Sent()
        return opened.remote.send(start, end) if self.breaker(opened.pool).works else None

    def few(self, opened: OpenObject, start: int, end: int) -> bytes:
        """Return bytes, for which no block is fetched: by a request for them alone, if some are not
        in the store. Raises: FFServeError."""
        blocks = opened.blocks(start, end)
        opened.stored.pin(blocks)
        try:
            if not len(opened.stored.missing(blocks)):
                return self._part(opened, int(blocks[0]), start, end, True)
        finally:
            opened.stored.unpin(blocks)
        read = partial(opened.remote.read, start, end, direct=True)
        attempt = partial(self.breaker(opened.pool).call, read)
        if scheme_of(opened.identity.url).at_once > ASKED_AT_ONCE:
            return attempt()
        future: Future[bytes] = Future()
        self._of(opened).put(NOW, attempt, future)
        return future.result()

    def _download(self, opened: OpenObject, start: int, end: int, *, direct: bool = False) -> bytes:
        read = partial(opened.remote.read, start, end, direct=direct)
        content = self.breaker(opened.pool).call(read)
        self.fetched += len(content)
        return content

    def _fetch(self, opened: OpenObject, run: _Run) -> Outcomes:
        """Fetch blocks, and neighbours that are asked for."""
        runs = self._with_neighbours(opened, run)
        try:
            try:
                outcomes = self._fetch_runs(opened, runs) or True
            except OSError as error:
                if isinstance(error, FFServeError):
                    raise
                raise ReadError(f"the store failed: {error}", path=opened.shown) from error
        except BaseException as error:
            for near in runs:
                if near is not run:
                    near.future.set_exception(error)
            raise
        for near in runs:
            if near is not run:
                near.future.set_result(outcomes)
        return outcomes

    def _with_neighbours(self, opened: OpenObject, run: _Run) -> list[_Run]:
        """Return a run with those beside it that were asked for and have not begun, rising; they
        are taken from the threads."""
        threads, most = self._of(opened), self._most(opened) - run.count
        found = [run]
        for ahead in (True, False):
            while True:
                block = found[-1].end if ahead else found[0].first - 1
                with self._lock:
                    near = self._tasks.get((opened.stored, block))
                if near is None or near.pool != opened.pool or near.count > most:
                    break
                if not threads.take(near.future):
                    break
                most -= near.count
                found.insert(len(found) if ahead else 0, near)
        return found

    def _fetch_runs(self, opened: OpenObject, runs: Sequence[_Run]) -> dict[int, Outcome]:
        """Fetch neighbouring runs; return the outcomes of blocks that are not in the store then."""
        stored, words = opened.stored, opened.stored.state.words
        outcomes: dict[int, Outcome] = {}
        block, end = runs[0].first, runs[-1].end
        while block < end:
            count = end - block
            while count and not stored.claim(block, count):
                count //= 2
            if count:
                try:
                    self._fetch_claimed(opened, runs, range(block, block + count), outcomes)
                finally:
                    stored.unclaim(block, count)
                block += count
            elif words[block] == PRESENT:
                block += 1
            else:  # another process fetches it
                time.sleep(random.uniform(0.5, 1.0) * POLL_S)
        return outcomes

    def _fetch_claimed(
        self,
        opened: OpenObject,
        runs: Sequence[_Run],
        claimed: range,
        outcomes: dict[int, Outcome],
    ) -> None:
        """Fetch claimed blocks of runs, by one request if there is room for them and none is there
        already."""
        stored, words = opened.stored, opened.stored.state.words
        reserved: list[int] = []
        try:
            for run in runs:
                blocks = np.arange(max(run.first, claimed.start), min(run.end, claimed.stop))
                for block in blocks[words[blocks] == UNCHECKED].tolist():
                    if stored.agrees(block):
                        stored.trust(block)
                for first, count in neighbours(stored.missing(blocks)):
                    kept = self._reserve(stored, first, count, run.use)
                    reserved += range(first, first + kept)
                    outcomes.update(dict.fromkeys(range(first + kept, first + count), False))
            for first, count in neighbours(np.array(reserved, np.int64)):
                self._bring(opened, first, count, outcomes)
        except BaseException:
            for block in reserved:
                if words[block] == RESERVED:
                    self.store.give_back(stored, block)
            raise

    def _reserve(self, stored: StoredObject, first: int, count: int, use: float | None) -> int:
        """Make room for as many neighbouring blocks as there can be; return how many."""
        kept, step = 0, count
        while kept < count and step:
            step = min(step, count - kept)
            if self.store.reserve(stored, first + kept, use, step):
                kept += step
            else:
                step //= 2
        return kept

    def _bring(
        self, opened: OpenObject, first: int, count: int, outcomes: dict[int, Outcome]
    ) -> None:
        """Fetch claimed and reserved blocks by one request."""
        stored, size = opened.stored, opened.stored.block_size
        content = self._download(opened, first * size, stored.state.end(first + count - 1))
        try:
            stored.publish(first, content)
        except OSError as error:
            for k in range(count):
                self.store.give_back(stored, first + k)
                outcomes[first + k] = content[k * size : (k + 1) * size]
            with self._lock:
                known, self._full = self._full, True
            if not known:
                log.warning("store: cannot write blocks, so reads pass the store: %s", error)
        else:
            self._full = False

    # ---- in order -------------------------------------------------------------------------

    def read_at(self, opened: OpenObject) -> ForetoldReadAt:
        """Return a `ReadAt` over an object, which fetches what is missing, ahead of it as well if
        it is read in order. Raises: FFServeError."""
        near_size = min(NEAR, self.store.block_size) if opened.parts else self.store.block_size
        near, least = max(near_size // opened.stored.block_size, 1), self._piece(opened)
        # The first read is not one in order, also if it is of the first block.
        last, run, asked = -near - 1, 0, 0

        def read(offset: int, into: memoryview, /) -> int:
            nonlocal last, run, asked
            size = int(max(min(len(into), opened.stored.size - offset), 0))
            if size:
                blocks = opened.blocks(offset, offset + size)
                first, end = int(blocks[0]), int(blocks[-1])
                if 0 <= first - last <= near:
                    run += end - last
                else:
                    run = asked = 0
                if run >= least and end > last:
                    asked = self.ask_ahead(opened, end + 1, asked, 2 * run)
                last = end
                into[:size] = self.content(opened, offset, offset + size)
            return size

        def will_need(offset: int, size: int) -> None:
            missing = opened.stored.missing(opened.blocks(offset, offset + size))
            self.ask(opened, missing.tolist(), NOW, None)

        return ForetoldReadAt(read, will_need, near_size)

    def ask_ahead(self, opened: OpenObject, first: int, asked: int, most: int | None = None) -> int:
        """Ask for `most` blocks from this one on, which a reader in order needs soon.

        Args: asked: blocks before this one were asked for already.
        Returns: up to which block all were asked for; few are left to the next call.
        """
        size = opened.stored.block_size
        limit = self._read_ahead // size
        most = limit if most is None else min(most, limit)
        if self.store.limit != math.inf:
            most = min(most, int(self.store.limit) // size // 4)
        begin, end = max(first, asked), min(first + most, opened.stored.count)
        if end - begin < min(self._piece(opened), most) and end < opened.stored.count:
            return begin
        missing = opened.stored.missing(np.arange(begin, end))
        if len(missing):
            self.ask(opened, missing.tolist(), time.time(), None)
        return int(max(begin, end))

    def content(self, opened: OpenObject, start: int, end: int) -> bytes:
        """Return bytes of an object, fetched if they are missing. Raises: FFServeError."""
        stored, blocks = opened.stored, opened.blocks(start, end)
        stored.pin(blocks)
        try:
            waiting = self.ask(opened, stored.missing(blocks).tolist(), NOW, None)
            parts = [
                self._part(
                    opened, low, max(start, low * stored.block_size), min(end, stop), outcome
                )
                for low, stop, outcome in self._outcomes(opened, blocks, waiting)
            ]
        finally:
            stored.unpin(blocks)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _outcomes(
        self, opened: OpenObject, blocks: Int64s, waiting: dict[int, Future[Outcomes]]
    ) -> Iterator[tuple[int, int, Outcome]]:
        """Wait for pinned neighbours; yield the first block, the offset behind the last one, and
        the outcome of those that have the same."""
        passed = {
            block: outcome
            for block, future in waiting.items()
            if (outcome := self.wait(opened, block, future)) is not True
        }

        def kind(block: int) -> tuple[bool, int]:
            outcome = passed.get(block, True)
            return outcome is True, block if isinstance(outcome, bytes) else -1

        for _, group in itertools.groupby(blocks.tolist(), kind):
            alike = list(group)
            yield alike[0], opened.stored.state.end(alike[-1]), passed.get(alike[0], True)

    def copy(self, opened: OpenObject, fd: int, check: Callable[[], object]) -> None:
        """Write an object to an empty file. The file shares the disk's blocks with the store where
        the file system can, and has copies elsewhere; so it stays what it is whatever becomes of
        the store's. If the store has no room for the whole object, the rest comes past the store.

        Args:   check: called before each piece; it raises when the file is no longer wanted.
        Raises: FFServeError; OSError of the file.
        """
        stored, asked, step = opened.stored, 0, self._piece(opened)
        for first in range(0, stored.count, step):
            check()
            blocks = np.arange(first, min(first + step, stored.count))
            stored.pin(blocks)
            try:
                asked = self.ask_ahead(opened, first, asked)
                waiting = self.ask(opened, stored.missing(blocks).tolist(), NOW, None)
                for low, end, outcome in self._outcomes(opened, blocks, waiting):
                    self._copy_part(opened, low, end, outcome, fd, check)
            finally:
                stored.unpin(blocks)

    def _piece(self, opened: OpenObject) -> int:
        """Return how many blocks of an object are as large as one of most others."""
        return int(max(self.store.block_size // opened.stored.block_size, 1))

    def _copy_part(
        self,
        opened: OpenObject,
        block: int,
        end: int,
        outcome: Outcome,
        fd: int,
        check: Callable[[], object],
    ) -> None:
        stored = opened.stored
        start = block * stored.block_size
        content = b"" if outcome is True else self._part(opened, block, start, end, outcome)
        room_until = math.inf
        while True:
            try:
                if content or not stored.copy_to(fd, start, end):
                    write_at(fd, content or self._part(opened, block, start, end, True), start)
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if self.store.give_way(stored, block, fd):
                    room_until = math.inf
                    continue
                # Blocks that are being fetched or copied at this moment may give way soon.
                room_until = min(room_until, time.monotonic() + FULL_S)
                if time.monotonic() >= room_until:
                    raise
                check()
                time.sleep(POLL_S)

    def _part(
        self, opened: OpenObject, block: int, start: int, end: int, outcome: Outcome
    ) -> bytes:
        if isinstance(outcome, bytes):
            first = block * opened.stored.block_size
            return outcome[start - first : end - first]
        if not outcome:
            return self.ask_bytes(opened, start, end).result()
        try:
            content = opened.stored.read(start, end)
        except OSError as error:
            raise ReadError(f"cannot read the store: {error}", path=opened.shown) from error
        if len(content) != end - start:
            raise ReadError(
                "the file of the object in the store was truncated", path=opened.stored.path
            )
        return content

    def repair(self, opened: OpenObject, blocks: Int64s) -> bool:
        """Drop blocks whose bytes on disk are not what was written; return whether any of them is
        to be fetched again."""
        stored = opened.stored
        for block in blocks.tolist():
            if stored.state.words[block] == PRESENT and not stored.agrees(block):
                log.warning("store: block %d of %s was damaged on disk", block, opened.shown)
                self.store.drop(stored, block)
        return len(stored.missing(blocks)) > 0

    def compare(self, opened: OpenObject, blocks: Int64s, most_s: float) -> bool:
        """Ask the origin once more for blocks that contain a damaged record, and are pinned; those
        that it has sent twice alike are left out. Return whether any bytes are others now.

        Args: most_s: how long this may take, about.
        """
        changed, until = False, time.monotonic() + most_s
        for block in blocks.tolist():
            left_s = until - time.monotonic()
            if left_s > 0 and len(opened.stored.sent_alike) < MOST_ALIKE:
                changed |= self._compare(opened, block, left_s)
        return changed

    def _compare(self, opened: OpenObject, block: int, most_s: float) -> bool:
        """See `compare`; of one block."""
        stored = opened.stored
        before = int(stored.state.checksums[block])
        if stored.sent_alike.get(block) == before:
            return False
        begin, end = block * stored.block_size, stored.state.end(block)
        content = self.ask_bytes(opened, begin, end, direct=True)
        with contextlib.suppress(FutureTimeout):
            found = content.result(most_s)
            if crc32c(found) != before:
                log.warning("store: block %d of %s had come damaged", block, opened.shown)
                opened.remote.distrust()
                stored.publish(block, found)
                return True
            stored.sent_alike[block] = before
        return False


def outcome_of(outcomes: Outcomes, block: int) -> Outcome:
    """Return the outcome of a block that was asked for with others."""
    return outcomes.get(block, True) if isinstance(outcomes, dict) else True


def by_future(asked: dict[int, Future[Outcomes]]) -> dict[Future[Outcomes], list[int]]:
    """Return the blocks that were asked for by their future."""
    found: dict[Future[Outcomes], list[int]] = {}
    for block, future in asked.items():
        found.setdefault(future, []).append(block)
    return found


# ---- of this process -----------------------------------------------------------------------------

_lock = threading.Lock()
_fetchers: dict[str, Fetcher] = {}
_threads: dict[str, Threads] = {}
_breakers: dict[str, Breaker] = {}
_listed: dict[str, tuple[float, ObjectVersion]] = {}
_patience = Patience()


def _breaker(name: str, patience: Patience | None = None) -> Breaker:
    with _lock:
        if name not in _breakers:
            _breakers[name] = Breaker(patience or _patience)
        return _breakers[name]


def breaker_of(url: str) -> Breaker:
    """Return what this process knows of the origin of a URL."""
    return _breaker(urls.origin_of(url))


def threads_of(url: str) -> Threads:
    """Return the threads of this process that read past any store from the origin of a URL."""
    name = urls.origin_of(url)
    with _lock:
        if name not in _threads:
            _threads[name] = Threads("ffserve-ranges")
        return _threads[name]


def process_fetcher() -> Fetcher:
    """Return the fetcher of this user's store, for commands that need no daemon.

    Its directory is ``$FFSERVE_STORE``, else in the user's cache; its limit is
    ``$FFSERVE_STORE_SIZE``, else a share of the free disk.
    Raises: UsageError, AccessDenied, ReadError.
    """
    directory = default_directory()
    with _lock:
        if directory not in _fetchers:
            _fetchers[directory] = Fetcher(Store(directory, _limit(directory)))
        return _fetchers[directory]


def _limit(directory: str) -> int:
    from ffserve.config import parse_size

    named = os.environ.get("FFSERVE_STORE_SIZE")
    if named:
        try:
            return parse_size(named)
        except UsageError as error:
            raise UsageError(f"FFSERVE_STORE_SIZE: {error.message}", hint=error.hint) from None
    return usual_limit(directory)


def call(url: str, attempt: Callable[[], T]) -> T:
    """Return the result of a call of the origin of a URL, made again while that may help. What
    the packages raise in it becomes an error that names the URL. Raises: FFServeError."""

    def once() -> T:
        with origin.failures(url):
            return attempt()

    return breaker_of(url).call(once)


def reach(url: str) -> None:
    """Collect what this process needs to reach an origin, which threads share then, without asking
    it. Raises: FFServeError."""
    call(url, lambda: origin.file_system(url))


def find(
    url: str, suffixes: Sequence[str] = (), *, hidden: str = ".", below: bool = False
) -> tuple[list[ObjectVersion], list[tuple[str, str]]]:
    """Return the files that a URL denotes, and what is left out, as `origin.find`.

    Raises: FFServeError.
    """
    files, left_out = call(url, lambda: origin.find(url, suffixes, hidden=hidden, below=below))
    now = time.monotonic()
    with _lock:
        while _listed and now - (oldest := next(iter(_listed.values())))[0] > LISTED_S:
            del _listed[oldest[1].url]
        _listed.update((each.url, (now, each)) for each in files if each.size >= 0)
    return files, left_out


def listing(url: str, suffixes: Sequence[str] = (), *, below: bool = False) -> list[ObjectVersion]:
    """Return the objects that a URL denotes, sorted by URL; of a directory those that have one of
    `suffixes` and are not hidden.

    Args: below: also those in directories below the directory.
    Raises: FFServeError: MissingFile if there is none; ReadError for one of unknown size.
    """
    files, _ = find(url, suffixes, below=below and not urls.has_magic(url))
    if not files:
        nothing = "no file at the origin matches this pattern"
        if not urls.has_magic(url):
            wanted = ", ".join("*" + suffix for suffix in suffixes) or "files"
            nothing = f"the directory contains no {wanted}"
        raise MissingFile(nothing, path=urls.shown(url), hint="check the URL")
    return [origin.sized(each) for each in files]


def identity_of(url: str) -> ObjectVersion:
    """Return the present version of an object; that of a listing made just before.

    Raises: FFServeError.
    """
    with _lock:
        at, found = _listed.pop(url, (-math.inf, None))
    if found is not None and time.monotonic() - at < LISTED_S:
        return found
    return call(url, lambda: origin.identify(url))


def send_identity(url: str) -> Sent | None:
    """Send the request of a later `identity_of`, or `listing`, as of `OpenVersion`."""
    known = _listed.get(url)
    if known and time.monotonic() - known[0] < LISTED_S:
        return Sent()
    return origin.send_info(url) if breaker_of(url).works else None


def forget(patience: Patience = _patience) -> None:
    """Forget stores, threads and origins, and ask origins with this patience from now on."""
    global _patience
    _patience = patience
    _fetchers.clear()
    _threads.clear()
    _breakers.clear()
    _listed.clear()


def _forget() -> None:
    """Forget files, threads and locks in a child process: they belong to the parent."""
    global _lock
    _lock = threading.Lock()
    for fetcher in _fetchers.values():
        fetcher.store.abandon()
    forget(_patience)


os.register_at_fork(after_in_child=_forget)
