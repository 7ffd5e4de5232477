"""Fetching: blocks of remote objects into the store, each once, soonest needed first.

A block that several threads ask for is one task; neighbours that are asked for come with it, in one
request. Among processes, who locks the block's claim fetches it, and the others wait for it. Each
origin has threads of its own, so an origin that hangs holds up nobody else. What failed and may be
tried again is tried again after pauses that double and vary. An origin that failed several times in
a row is asked by one thread at a time (circuit breaker); the others wait for what it finds out.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ffserve.dtypes import Int64s
from ffserve.engine.codec import crc32c
from ffserve.errors import FFServeError, MissingFile, ReadError, UsageError
from ffserve.formats.base import ReadAt
from ffserve.limits import FETCH_SIZE, MOST_READ_AHEAD, ORIGIN_THREADS
from ffserve.store import origin, urls
from ffserve.store.blocks import ABSENT, PRESENT, UNCHECKED, StoredObject, write_at
from ffserve.store.credentials import Access
from ffserve.store.directory import Store, default_directory, usual_limit
from ffserve.store.origin import ObjectVersion, OriginError, RemoteFile

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
NOW = 0.0
"""The priority of a block that a thread waits for. Other blocks have the time at which they will be
needed, in seconds since 1970."""

Outcome: TypeAlias = "bool | bytes"
"""The outcome of fetching a block. True: it is in the store. False: the store has no room for it,
so its reader reads the bytes past the store. bytes: it was fetched, but could not be written."""


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


@dataclass(frozen=True, slots=True)
class _Asked:
    """A block that was asked for. pool: the origin whose threads fetch it. use: as for
    `Store.reserve`."""

    future: Future[Outcome]
    pool: str
    use: float | None


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

    def take(self, future: Future[Outcome]) -> bool:
        """Let the calling thread set the result of a task; return False if the task has begun."""
        with self._changed:
            begun = future.running() or future.done()
            return not begun and future.set_running_or_notify_cancel()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                result = task.run()
            except BaseException as error:
                task.future.set_exception(error)
            else:
                task.future.set_result(result)
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


class OpenObject:
    """An object of the store together with its origin. Made by `Fetcher.open`.

    pool: whose threads fetch it, and who shares what is known of the origin.
    """

    def __init__(
        self, stored: StoredObject, identity: ObjectVersion, access: Access | None, pool: str
    ) -> None:
        self.stored, self.identity, self.access = stored, identity, access
        self.remote = RemoteFile(identity, access, stored.block_size)
        self.shown = urls.shown(identity.url)
        self.pool = pool

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
        self._tasks: dict[tuple[StoredObject, int], _Asked] = {}
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
    ) -> OpenObject:
        """Open an object, without asking its origin.

        Args:
            domain: as of `Store.open`. access: with what the origin is reached; None: with what
                this process has. pool: see `OpenObject`; None: that of the origin.
        Raises: as `Store.open`.
        """
        name = urls.origin_of(identity.url) if pool is None else pool
        return OpenObject(self.store.open(identity, domain), identity, access, name)

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
        self, opened: OpenObject, blocks: Iterable[int], due: float, use: float | None
    ) -> dict[int, Future[Outcome]]:
        """Ask for blocks; return at once.

        Args:
            due: NOW, or when they will be needed: the soonest is fetched first.
            use: as of `Store.reserve`.
        Returns: a future of each; its exception is an FFServeError.
        """
        threads, stored = self._of(opened), opened.stored
        found = {}
        for block in blocks:
            key = stored, int(block)
            with self._lock:
                asked = self._tasks.get(key)
                if new := asked is None or asked.future.done():
                    asked = self._tasks[key] = _Asked(Future(), opened.pool, use)
            assert asked is not None
            found[key[1]] = future = asked.future
            if new:
                self.store.share(stored)
                future.add_done_callback(partial(self._ended, key))
            if new or (due == NOW and not future.running()):
                threads.put(due, self._fetching(opened, key[1], use), future)
        return found

    def _ended(self, key: tuple[StoredObject, int], future: Future[Outcome]) -> None:
        with self._lock:
            asked = self._tasks.get(key)
            if asked is not None and asked.future is future:
                del self._tasks[key]
        self.store.close(key[0])

    def is_asked(self, opened: OpenObject, block: int) -> bool:
        """Whether a block is on its way, or will be."""
        with self._lock:
            return (opened.stored, block) in self._tasks

    def queued_count(self, opened: OpenObject) -> int:
        """Return how many calls of an object's origin wait for a thread."""
        return self._of(opened).queued_count

    def wait(self, opened: OpenObject, block: int, future: Future[Outcome]) -> Outcome:
        """Return the outcome of a block that was asked for and is pinned. Raises: FFServeError."""
        while True:
            outcome = future.result()
            if outcome is not True or opened.stored.state.words[block] == PRESENT:
                return outcome
            # The block came before it was pinned, and was evicted.
            future = self.ask(opened, [block], NOW, None)[block]

    def ask_bytes(
        self, opened: OpenObject, start: int, end: int, *, direct: bool = False
    ) -> Future[Outcome]:
        """Ask for bytes past the store; return at once. Args: direct: as of `RemoteFile.read`."""
        future: Future[Outcome] = Future()
        run = partial(self._download, opened, start, end, direct=direct)
        self._of(opened).put(NOW, run, future)
        return future

    def _download(self, opened: OpenObject, start: int, end: int, *, direct: bool = False) -> bytes:
        read = partial(opened.remote.read, start, end, direct=direct)
        content = self.breaker(opened.pool).call(read)
        self.fetched += len(content)
        return content

    def _fetching(self, opened: OpenObject, block: int, use: float | None) -> Callable[[], Outcome]:
        return lambda: self._fetch(opened, block, use)

    def _fetch(self, opened: OpenObject, block: int, use: float | None) -> Outcome:
        try:
            return self._fetch_claimed(opened, block, use)
        except OSError as error:
            if isinstance(error, FFServeError):
                raise
            raise ReadError(f"the store failed: {error}", path=opened.shown) from error

    def _fetch_claimed(self, opened: OpenObject, block: int, use: float | None) -> Outcome:
        stored = opened.stored
        while not stored.claim(block):  # another process fetches it
            if stored.state.words[block] == PRESENT:
                return True
            time.sleep(random.uniform(0.5, 1.0) * POLL_S)
        try:
            word = stored.state.words[block]
            if word == PRESENT:
                return True
            if word == UNCHECKED and stored.agrees(block):
                stored.trust(block)
                return True
            if not self.store.reserve(stored, block, use):
                return False
            return self._bring_with_neighbours(opened, block)
        finally:
            stored.unclaim(block)

    def _bring_with_neighbours(self, opened: OpenObject, block: int) -> Outcome:
        """Fetch a block that is claimed and reserved, and neighbours that are asked for."""
        futures = self._take_neighbours(opened, block)
        blocks = sorted([block, *futures])
        outcomes: list[Outcome] = []
        failure: BaseException | None = None
        try:
            outcomes = self._bring(opened, blocks)
        except BaseException as error:
            failure = error
        for k, near in enumerate(blocks):
            if near == block:
                continue
            opened.stored.unclaim(near)
            if failure is not None:
                futures[near].set_exception(failure)
            else:
                futures[near].set_result(outcomes[k])
        if failure is not None:
            raise failure
        return outcomes[blocks.index(block)]

    def _take_neighbours(self, opened: OpenObject, block: int) -> dict[int, Future[Outcome]]:
        """Claim and reserve neighbours that were asked for and are not on their way yet."""
        stored, threads = opened.stored, self._of(opened)
        most = 0 if opened.remote.is_cached else self._fetch_size // stored.block_size - 1
        found: dict[int, Future[Outcome]] = {}
        for step in (1, -1):
            near = block + step
            while len(found) < most and 0 <= near < stored.count:
                future = self._take(opened, threads, near)
                if future is None:
                    break
                found[near] = future
                near += step
        return found

    def _take(self, opened: OpenObject, threads: Threads, block: int) -> Future[Outcome] | None:
        stored = opened.stored
        with self._lock:
            asked = self._tasks.get((stored, block))
        if asked is None or asked.pool != opened.pool or stored.state.words[block] != ABSENT:
            return None
        if not threads.take(asked.future):
            return None
        claimed = False
        try:
            claimed = stored.claim(block)
            if claimed and stored.state.words[block] == ABSENT:
                if self.store.reserve(stored, block, asked.use):
                    return asked.future
                outcome: Outcome = False
                stored.unclaim(block)
            elif claimed:  # another process was faster
                stored.unclaim(block)
                outcome = True
            else:  # it is fetching it
                waiting: Future[Outcome] = Future()
                waiting.add_done_callback(partial(_pass_on, asked.future))
                threads.put(NOW, self._fetching(opened, block, asked.use), waiting)
                return None
        except BaseException as error:
            if claimed:
                stored.unclaim(block)
            asked.future.set_exception(error)
        else:
            asked.future.set_result(outcome)
        return None

    def _bring(self, opened: OpenObject, blocks: list[int]) -> list[Outcome]:
        """Fetch a run of blocks by one request; return the outcome of each."""
        stored, size = opened.stored, opened.stored.block_size
        start, end = blocks[0] * size, stored.state.end(blocks[-1])
        parts: list[memoryview] = []
        done = 0
        try:
            content = memoryview(self._download(opened, start, end))
            parts = [content[k * size : (k + 1) * size] for k in range(len(blocks))]
            for block, part in zip(blocks, parts, strict=True):
                stored.publish(block, part)
                done += 1
        except BaseException as error:
            for block in blocks[done:]:
                self.store.give_back(stored, block)
            if isinstance(error, FFServeError) or not isinstance(error, OSError):
                raise
            with self._lock:
                known, self._full = self._full, True
            if not known:
                log.warning("store: cannot write blocks, so reads pass the store: %s", error)
        else:
            self._full = False
        outcomes: list[Outcome] = [True] * done
        return outcomes + [bytes(part) for part in parts[done:]]

    # ---- in order -------------------------------------------------------------------------

    def read_at(self, opened: OpenObject) -> ReadAt:
        """Return a `ReadAt` over an object, which fetches what is missing, ahead of it as well if
        it is read in order. Raises: FFServeError."""
        last, run = -2, 0  # the first read is not one in order, also if it is of the first block

        def read(offset: int, into: memoryview, /) -> int:
            nonlocal last, run
            size = int(max(min(len(into), opened.stored.size - offset), 0))
            if size:
                blocks = opened.blocks(offset, offset + size)
                if last in (blocks[0], blocks[0] - 1):
                    run += int(blocks[-1]) - last
                else:
                    run = 0
                if run and blocks[-1] > last:
                    self.ask_ahead(opened, int(blocks[-1]) + 1, 2 * run)
                last = int(blocks[-1])
                into[:size] = self.content(opened, offset, offset + size)
            return size

        return read

    def ask_ahead(self, opened: OpenObject, first: int, most: int | None = None) -> None:
        """Ask for `most` blocks from this one on, which a reader in order needs soon."""
        limit = self._read_ahead // opened.stored.block_size
        most = limit if most is None else min(most, limit)
        if self.store.limit != math.inf:
            most = min(most, int(self.store.limit) // opened.stored.block_size // 4)
        blocks = np.arange(first, min(first + most, opened.stored.count))
        missing = opened.stored.missing(blocks)
        if len(missing):
            self.ask(opened, missing.tolist(), time.time(), None)

    def content(self, opened: OpenObject, start: int, end: int) -> bytes:
        """Return bytes of an object, fetched if they are missing. Raises: FFServeError."""
        stored, blocks = opened.stored, opened.blocks(start, end)
        stored.pin(blocks)
        try:
            waiting = self.ask(opened, stored.missing(blocks).tolist(), NOW, None)
            parts = []
            for block in blocks.tolist():
                begin = max(start, block * stored.block_size)
                stop = min(end, stored.state.end(block))
                outcome = self.wait(opened, block, waiting[block]) if block in waiting else True
                parts.append(self._part(opened, block, begin, stop, outcome))
        finally:
            stored.unpin(blocks)
        return b"".join(parts)

    def copy(self, opened: OpenObject, fd: int, check: Callable[[], object]) -> None:
        """Write an object to an empty file. The file shares the disk's blocks with the store where
        the file system can, and has copies elsewhere; so it stays what it is whatever becomes of
        the store's. If the store has no room for the whole object, the rest comes past the store.

        Args:   check: called before each block; it raises when the file is no longer wanted.
        Raises: FFServeError; OSError of the file.
        """
        stored = opened.stored
        for number in range(stored.count):
            check()
            block = np.array([number])
            stored.pin(block)
            try:
                self.ask_ahead(opened, number)
                waiting = self.ask(opened, stored.missing(block).tolist(), NOW, None)
                outcome = self.wait(opened, number, waiting[number]) if waiting else True
                self._copy_block(opened, number, outcome, fd, check)
            finally:
                stored.unpin(block)

    def _copy_block(
        self, opened: OpenObject, block: int, outcome: Outcome, fd: int, check: Callable[[], object]
    ) -> None:
        stored = opened.stored
        start, end = block * stored.block_size, stored.state.end(block)
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
            passed = self.ask_bytes(opened, start, end).result()
            assert isinstance(passed, bytes)
            return passed
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
            assert isinstance(found, bytes)
            if crc32c(found) != before:
                log.warning("store: block %d of %s had come damaged", block, opened.shown)
                opened.remote.distrust()
                stored.publish(block, found)
                return True
            stored.sent_alike[block] = before
        return False


def _pass_on(to: Future[Outcome], done: Future[Outcome]) -> None:
    """Give a future the result of another."""
    if (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


# ---- of this process -----------------------------------------------------------------------------

_lock = threading.Lock()
_fetchers: dict[str, Fetcher] = {}
_threads: dict[str, Threads] = {}
_breakers: dict[str, Breaker] = {}
_listed: dict[str, tuple[float, ObjectVersion]] = {}
_patience = Patience()


def _breaker(name: str, patience: Patience | None = None) -> Breaker:
    with _lock:
        return _breakers.setdefault(name, Breaker(patience or _patience))


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


def find(
    url: str, suffixes: Sequence[str] = (), *, hidden: str = ".", below: bool = False
) -> tuple[list[ObjectVersion], list[tuple[str, str]]]:
    """Return the files that a URL denotes, and what is left out, as `origin.find`.

    Raises: FFServeError.
    """
    files, left_out = call(url, lambda: origin.find(url, suffixes, hidden=hidden, below=below))
    now = time.monotonic()
    with _lock:
        for each in [each for each, (at, _) in _listed.items() if now - at > LISTED_S]:
            del _listed[each]
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
