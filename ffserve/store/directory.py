"""A store: a directory of objects that all processes of a user share, and the limit of its size.

No process owns the store. A process that needs room takes the store's lock (``flock`` on the file
``state``, which ends with the process), counts what it takes, and evicts blocks beyond the limit:

1. blocks of objects that no process has open, those opened longest ago first;
2. blocks of open objects that a job will use later than the new block, farthest first; a use that
   nobody has announced is the farthest.

So no block is evicted for one that is needed later, and blocks of an epoch in an order that nobody
has announced stay (the best policy for such an order, POLICY.md). A block without room is not an
error, and nobody waits for room: its reader reads the bytes that it needs past the store.

A store may have millions of small objects. So eviction takes steps of LOOKED_AT objects, between
which others have the lock (`victims.py` says which objects).

``state``: 8 bytes "ffstore\\n", u32 version, u32 size of a block, 36 bytes boot ID; at 64 u64 bytes
in use, at 72 u64 evictions so far, both mapped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import math
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from ffserve.errors import AccessDenied, FFServeError, ReadError, UsageError
from ffserve.limits import MOST_BLOCKS, MOST_VICTIMS, OVERHEAD_SHARE
from ffserve.store import urls
from ffserve.store.blocks import (
    ABSENT,
    OPEN,
    PAGE,
    PRESENT,
    RESERVED,
    BlockState,
    StoredObject,
    block_count,
    boot_id,
    create,
    is_locked,
    lock,
    runs,
    state_size,
    whole_pages,
)
from ffserve.store.origin import ObjectVersion
from ffserve.store.victims import UNKNOWN, Victim, Victims, closed_rank, first_to_go, open_ranks
from ffserve.system.memfd import punch

log = logging.getLogger("ffserve")

BLOCK_SIZE = 512 << 10
"""The size of a block of a new store. It is small because a run of neighbours begins and ends
within blocks; a request fetches several blocks."""
DEFAULT_SHARE = 0.8
"""The default limit of a store is this share of the free space of its disk and its own size."""
SMALL_BLOCK_SIZE, MOST_SMALL_BLOCKS = 32 << 10, 1 << 19
"""The size of a block of a new object that jobs read in parts, and the number of blocks up to which
it is as small: 16 GiB. A larger object has larger blocks."""
MIN_BLOCKS = 8
"""A store with room for fewer blocks is refused."""
LOOKED_AT = 64
"""A step of an eviction looks at this many objects, which takes 10 ms."""
MOST_STEPS, PAUSE_S = 16, 0.001
"""A block is refused after this many steps; other threads take the lock in the pauses between."""
_HEAD = struct.Struct("<8sII36s")
_MAGIC, _VERSION = b"ffstore\n", 1
_STATE_SIZE = PAGE
_Answer = TypeVar("_Answer")


def cache_directory() -> str:
    """Return the place in the cache of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(base, "ffserve")


def default_directory() -> str:
    """Return the store of this user's own daemon, and of the commands that fetch without one:
    ``$FFSERVE_STORE``, else in the user's cache.

    Raises: UsageError if there is no such place.
    """
    directory = os.environ.get("FFSERVE_STORE") or os.path.join(cache_directory(), "store")
    if not os.path.isabs(directory):
        raise UsageError(
            f"the directory of the store is not an absolute path: {directory!r}",
            hint="set FFSERVE_STORE to a directory on a local disk",
        )
    return directory


def usual_limit(directory: str) -> int:
    """Return the limit of a store for which none is set: a share of the free disk."""
    there = directory
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    free = shutil.disk_usage(there).free
    used = 0
    with contextlib.suppress(OSError), open(os.path.join(directory, "state"), "rb") as state:
        state.seek(64)
        used = int.from_bytes(state.read(8), "little")
    return int(DEFAULT_SHARE * (free + used))


def _problem(error: OSError, directory: str) -> FFServeError:
    text = error.strerror or str(error)
    hint = "choose a writable directory on a local disk (FFSERVE_STORE; store.directory)"
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return AccessDenied(f"cannot write to the store: {text}", path=directory, hint=hint)
    return ReadError(f"cannot use the store: {text}", path=directory, hint=hint)


def name_of(identity: ObjectVersion, domain: str = "") -> str:
    """Return the name of the directory of an object of a domain."""
    seed = f"{domain}\n{identity.key}" if domain else identity.key
    return hashlib.blake2b(seed.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


class Store:
    """The store in a directory. Threads may call it.

    Args:
        directory: made if it is missing; of this user only.
        limit: bytes on disk; None: no limit. block_size: of objects that are new here.
        most_victims: objects that are remembered for eviction.
    Raises: UsageError, AccessDenied, ReadError.
    """

    def __init__(
        self,
        directory: str,
        limit: int | None = None,
        block_size: int = BLOCK_SIZE,
        *,
        most_victims: int = MOST_VICTIMS,
    ) -> None:
        self.directory = directory
        self.block_size = block_size
        self._lock = threading.RLock()
        self._open: dict[str, StoredObject] = {}
        self._victims = Victims(self._objects, self._lock, self._open.__contains__, most_victims)
        self._asked_at = 0.0
        """When the present call of `_in_steps` began. A call lists the objects at most once:
        objects that other processes have open rank too high at each listing."""
        self._fd = -1
        try:
            self._set_up()
        except OSError as error:
            self.abandon()
            raise _problem(error, directory) from error
        except BaseException:
            self.abandon()
            raise
        self.limit = math.inf if limit is None else limit
        if self.limit < MIN_BLOCKS * self.block_size:
            self.abandon()
            raise UsageError(
                f"the store needs at least {MIN_BLOCKS * self.block_size} bytes, not {limit}",
                path=directory,
                hint="free space, or choose another directory (FFSERVE_STORE; store.directory)",
            )
        if self.used > self.limit:
            self._in_steps(lambda first: self._evict(self.limit, 0.0, first), math.inf)

    def _set_up(self) -> None:
        os.makedirs(self.directory, 0o700, exist_ok=True)
        status = os.stat(self.directory)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise UsageError(
                "the store's directory belongs to another user, or others may write to it",
                path=self.directory,
                hint="choose a directory of this user alone (FFSERVE_STORE; store.directory)",
            )
        os.makedirs(self._objects, 0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(os.path.join(self.directory, "state"), flags, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            self._check_state()
            self._mapping = mmap.mmap(self._fd, _STATE_SIZE)
            self._numbers = np.frombuffer(self._mapping, np.uint64, 2, 64)
            if not is_locked(self._fd, OPEN):
                self._recount()
            lock(self._fd, fcntl.F_RDLCK, OPEN)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _check_state(self) -> None:
        head = os.pread(self._fd, _HEAD.size, 0)
        if not head.strip(b"\0"):  # new, or its maker was killed before it wrote the head
            os.ftruncate(self._fd, _STATE_SIZE + self.block_size)
            try:
                punch(self._fd, PAGE, PAGE)
            except OSError as error:
                raise UsageError(
                    f"the file system of the store cannot make holes in files: {error.strerror}",
                    path=self.directory,
                    hint="choose a local disk: ext4, xfs, btrfs (FFSERVE_STORE; store.directory)",
                ) from None
            os.ftruncate(self._fd, _STATE_SIZE)
            os.pwrite(self._fd, _HEAD.pack(_MAGIC, _VERSION, self.block_size, boot_id()), 0)
            return
        size = os.fstat(self._fd).st_size
        magic, version, block_size, _ = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
        if magic != _MAGIC or size != _STATE_SIZE or block_size % PAGE or not block_size:
            raise UsageError(
                "the directory is not a store, or its state file is damaged",
                path=os.path.join(self.directory, "state"),
                hint="remove the directory: it contains only copies of remote files",
            )
        if version != _VERSION:
            raise UsageError(
                f"the store has version {version}, and this program reads version {_VERSION}",
                path=self.directory,
                hint=(
                    "remove the store, or choose another directory (FFSERVE_STORE; store.directory)"
                ),
            )
        self.block_size = block_size

    # ---- numbers --------------------------------------------------------------------------

    @property
    def _objects(self) -> str:
        return f"{self.directory}/objects"

    @property
    def used(self) -> int:
        """Bytes on disk, reserved ones included."""
        return int(self._numbers[0])

    @property
    def evictions(self) -> int:
        """Blocks that were evicted so far, by all processes."""
        return int(self._numbers[1])

    def _add(self, size: int) -> None:
        self._numbers[0] = max(self.used + size, 0)

    def _recount(self) -> None:
        """Count the bytes of all objects, and remove other files. No other process may have the
        store open."""
        total = _STATE_SIZE + 3 * PAGE
        for name in os.listdir(self._objects):
            directory = f"{self._objects}/{name}"
            try:
                state = BlockState(directory)
            except (OSError, ValueError):
                self._remove(directory)
                continue
            if state.boot != boot_id():
                state.uncheck()
            total += self._held_by(state)
            state.close()
        self._numbers[0] = total

    @staticmethod
    def _overhead(size: int, block_size: int) -> int:
        return 2 * PAGE + whole_pages(state_size(size, block_size))

    def _held_by(self, state: BlockState) -> int:
        """Return the bytes of an object on disk, its index and reserved blocks included."""
        with os.scandir(state.directory) as entries:
            names = [e for e in entries if e.name not in ("data", "state")]
            index_size = sum(whole_pages(e.stat().st_size) for e in names)
        return self._overhead(state.size, state.block_size) + index_size + state.held_size

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the store, in this process and among all."""
        with self._lock:
            if self._fd < 0:
                raise UsageError("this store is closed", path=self.directory)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    # ---- objects --------------------------------------------------------------------------

    def open(
        self, identity: ObjectVersion, domain: str = "", *, parts: bool = False
    ) -> StoredObject:
        """Return the object of this version; `close` it as often as it was opened.

        Args:
            domain: objects of two domains are never the same; "": that of the store's user.
            parts: an object that is new here has small blocks.
        Raises: AccessDenied, ReadError, UsageError.
        """
        name, block_size = name_of(identity, domain), self.block_size
        if parts:
            count = block_count(identity.size, MOST_SMALL_BLOCKS)
            small = max(SMALL_BLOCK_SIZE, 1 << (count - 1).bit_length())
            block_size = min(small, block_size)
        try:
            if self._overhead(identity.size, block_size) > self.limit / OVERHEAD_SHARE:
                raise ReadError(
                    f"an object of {identity.size} bytes is too large for the store",
                    path=urls.shown(identity.url),
                    hint="a larger limit of the store",
                )
            if block_count(identity.size, block_size) > MOST_BLOCKS:
                most = MOST_BLOCKS * self.block_size
                raise ReadError(
                    f"an object of {identity.size} bytes is too large: a store keeps objects of "
                    f"up to {most}",
                    path=urls.shown(identity.url),
                    hint="divide the data into more files",
                )
            found = self._in_steps(
                lambda first: self._open_in(name, identity, block_size, first), math.inf
            )
            assert found is not None
            return found
        except OSError as error:
            if isinstance(error, FFServeError):
                raise
            raise _problem(error, self.directory) from error

    def _open_in(
        self, name: str, identity: ObjectVersion, block_size: int, first: bool
    ) -> StoredObject | None:
        """Take a step to open an object; return None if another one is needed."""
        found = self._open.get(name)
        if found is None:
            found = self._opened(name, identity, block_size, first)
            if found is None:
                return None
            self._open[name] = found
            self._victims.note(name, UNKNOWN)
        found.users += 1
        return found

    def _opened(
        self, name: str, identity: ObjectVersion, block_size: int, first: bool
    ) -> StoredObject | None:
        directory = f"{self._objects}/{name}"
        text = "\n".join((urls.shown(identity.url), *identity.key.split("\n")[1:]))
        for last in (False, True):
            counted = 0
            try:
                state = BlockState(directory)
                try:
                    if not text.startswith(state.identity) or state.size != identity.size:
                        raise ValueError("of another object")
                    if state.boot != boot_id():
                        state.uncheck()
                    return StoredObject(state)
                except BaseException:
                    counted = self._held_by(state)
                    state.close()
                    raise
            except (FileNotFoundError, ValueError) as error:
                if last:
                    raise ReadError(
                        f"cannot create the object in the store: {error}", path=directory
                    ) from error
                if counted or not isinstance(error, FileNotFoundError):
                    log.warning("store: an object was damaged and is fetched again: %s", error)
                    self._remove(directory)
                    self._add(-counted)
                if not self._create(directory, text, identity.size, block_size, first):
                    return None
        raise AssertionError("the second attempt returns or raises")

    def _create(self, directory: str, text: str, size: int, block_size: int, first: bool) -> bool:
        """Take a step to make an object; return False if another one is needed. Raises: OSError."""
        overhead = self._overhead(size, block_size)
        if self._evict(self.limit - overhead, None, first) is None:
            return False
        self._add(overhead)
        try:
            create(directory, text, size, block_size)
        except OSError as error:
            self._remove(directory)
            self._add(-overhead)
            if isinstance(error, FileExistsError) and not os.path.lexists(directory):
                return False  # its state was missing
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or self._evict_some(first) is False:
                raise
            return False
        return True

    def share(self, stored: StoredObject) -> None:
        """Keep an open object open; `close` it once more."""
        with self._lock:
            stored.users += 1

    def close(self, stored: StoredObject) -> None:
        """Give an object back."""
        with self._lock:
            stored.users -= 1
            if not stored.users:
                name = os.path.basename(stored.state.directory)
                if self._open.get(name) is stored:
                    del self._open[name]
                    with contextlib.suppress(OSError):
                        self._victims.note(name, closed_rank(stored.state.used_at))
                stored.close()

    def remove(self, stored: StoredObject) -> None:
        """Remove an object whose data file was moved away; it stays open where it is."""
        state = stored.state
        with self._alone():
            self._open.pop(os.path.basename(state.directory), None)
            if state.is_there:
                size = self._held_by(state)
                self._remove(state.directory)
                self._add(-size)

    @staticmethod
    def _remove(directory: str) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    # ---- room -----------------------------------------------------------------------------

    def reserve(self, stored: StoredObject, block: int, use: float | None, count: int = 1) -> bool:
        """Make room for neighbouring blocks that this thread has claimed, `block` and those behind
        it; return False, without any, if there is not enough.

        Args: use: when the blocks will be used next, in seconds since 1970; None: nobody knows.
        """
        blocks = slice(block, block + count)
        reserved = self._in_steps(lambda first: self._reserve(stored.state, blocks, use, first))
        return bool(reserved)

    def _reserve(
        self, state: BlockState, blocks: slice, use: float | None, first: bool
    ) -> bool | None:
        absent = np.flatnonzero(state.words[blocks] == ABSENT)
        if not len(absent):
            state.words[blocks] = RESERVED
            return True
        if not state.is_there:
            return False
        size = sum(state.held(blocks.start + at, count) for at, count in runs(absent))
        found = self._evict(self.limit - size, use, first)
        if found:
            self._add(size)
            state.words[blocks] = RESERVED
        return found

    def give_back(self, stored: StoredObject, block: int) -> None:
        """Give back the room of a block that was reserved but is not written."""
        state = stored.state
        with self._alone():
            if state.words[block] != ABSENT:
                state.words[block] = ABSENT
                self._numbers[1] += np.uint64(1)
                with contextlib.suppress(OSError):
                    stored.discard(block)
                if state.is_there:
                    self._add(-state.held(block))

    def drop(self, stored: StoredObject, block: int) -> None:
        """Drop a damaged block, so that it is fetched again into the same place. Reads in the
        meantime get the old or the new bytes."""
        with self._alone():
            if stored.state.words[block] == PRESENT:
                stored.state.words[block] = RESERVED
                self._numbers[1] += np.uint64(1)

    def keep_index(self, stored: StoredObject, name: str, content: bytes) -> None:
        """Keep the index of a scanned object beside it, if there is room."""
        place = os.path.join(stored.state.directory, name)
        size = whole_pages(len(content))

        def step(first: bool) -> bool | None:
            found = self._evict(self.limit - size, None, first)
            if found:
                before = self._held_by(stored.state)
                temporary = f"{place}.{os.getpid()}"
                try:
                    with open(temporary, "wb") as file:
                        file.write(content)
                    os.replace(temporary, place)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary)
                    raise
                self._add(self._held_by(stored.state) - before)
            return found

        with contextlib.suppress(OSError):
            self._in_steps(step)

    def give_way(self, stored: StoredObject, copied: int, fd: int) -> bool:
        """Make room on the full disk of a file: evict some of the blocks below `copied`, which the
        file has, or else some without an announced use. Return whether there is more room for the
        file."""
        with self._alone():
            if os.fstat(fd).st_dev != os.fstat(self._fd).st_dev:
                return False
            before = self.used
            there = np.flatnonzero(stored.state.words[:copied] != ABSENT)
            for block in there[:MIN_BLOCKS].tolist():
                self._evict_block(stored.state, block)
            if self.used < before:
                return True
        return bool(self._in_steps(self._evict_some))

    def _in_steps(
        self, step: Callable[[bool], _Answer | None], most: float = MOST_STEPS
    ) -> _Answer | None:
        """Take steps until one returns an answer, each under the lock of the store.

        Args: step: its argument says whether it is the first one.
        Returns: None: none of `most` steps returned an answer.
        """
        count, asked_at = 0, time.monotonic()
        while count < most:
            with self._alone():
                self._asked_at = asked_at
                answer = step(count == 0)
            if answer is not None:
                return answer
            self._victims.look()
            time.sleep(PAUSE_S)
            count += 1
        return None

    def _evict_some(self, first: bool) -> bool | None:
        """Take a step to evict some blocks without an announced use; return whether any was
        evicted."""
        before = self.used
        most = max(before - MIN_BLOCKS * self.block_size, 0)
        outcome = self._evict(most, UNKNOWN - 1, first)
        return True if self.used < before else outcome

    def _evict(self, most: float, use: float | None, first: bool) -> bool | None:
        """Take a step to evict until at most `most` bytes are in use.

        Args: use: blocks whose use is announced for an earlier time stay. first: the objects are
            listed before, if it is time.
        Returns: whether so few are in use, and no more can be done; None: another step is needed.
        """
        if self.used <= most:
            return True
        if first and self._victims.is_due:
            return None
        least = UNKNOWN if use is None else use
        in_use: list[tuple[str, float]] = []
        outcome: bool | None = None
        for _ in range(LOOKED_AT):
            if self.used <= most:
                outcome = True
                break
            if self._victims.best <= least:
                self._victims.exhausted()
                again = self._victims.is_due and self._victims.listed_at < self._asked_at
                outcome = None if again else False
                break
            taken = self._victims.take()
            if taken is None:
                continue
            name, victim = taken
            with self._state_of(name) as state:
                if state is not None and self._evict_from(state, name, victim, most, least):
                    in_use.append((name, victim.rank))
        else:
            # Else the next step would look at the same ones; they are listed again.
            in_use.clear()
        for name, rank in in_use:
            self._victims.note(name, rank)
        return outcome

    def _evict_from(
        self, state: BlockState, name: str, victim: Victim, most: float, least: float
    ) -> bool:
        """Evict blocks of an object while they rank highest; return whether any is in use."""
        is_open = state.is_open
        blocks = victim.blocks
        if not blocks:
            stored = self._open.get(name)
            mine = stored if stored is not None and stored.state is state else None
            blocks = first_to_go(state, is_open, mine)
        if not blocks:
            self._remove_if_empty(state)
            return bool((state.words != ABSENT).any())
        least = max(least, math.nextafter(self._victims.best, -math.inf))
        found, now, rank = False, time.time(), 0.0
        while blocks and blocks[-1][0] > least and self.used > most:
            rank, block = blocks.pop()
            # Its use may have been announced since.
            if not is_open or open_ranks(state.uses[block : block + 1], now)[0] >= rank:
                found |= not self._evict_block(state, block)
        if blocks:
            self._victims.note(name, blocks[-1][0], blocks)
        elif not found and (state.words != ABSENT).any():
            self._victims.note(name, rank)
        return found

    def _evict_block(self, state: BlockState, block: int) -> bool:
        """Evict a block if it is there; return False if it is in use."""
        if block >= state.count or state.words[block] == ABSENT:
            return True
        try:
            evicted = state.evict(block, self._numbers[1:])
        except OSError as error:
            log.warning("store: cannot evict from %s: %s", state.directory, error)
            return True
        if evicted:
            self._add(-state.held(block))
            self._remove_if_empty(state)
        return evicted

    def _remove_if_empty(self, state: BlockState) -> None:
        """Remove an object without blocks that no process has open."""
        if not (state.words != ABSENT).any() and not state.is_open:
            size = self._held_by(state)
            self._remove(state.directory)
            self._add(-size)

    @contextlib.contextmanager
    def _state_of(self, name: str) -> Iterator[BlockState | None]:
        """Yield the state of an object while the store is locked; None if it is gone or damaged.

        An object that this process does not have open is opened for this only: a store may have
        more objects than a process may have files, and others remove them and make them anew.
        """
        stored = self._open.get(name)
        if stored is not None and stored.state.is_there:
            yield stored.state
            return
        try:
            state = BlockState(f"{self._objects}/{name}")
        except (OSError, ValueError):
            yield None
            return
        try:
            yield state
        finally:
            state.close()

    # ---- the end --------------------------------------------------------------------------

    def abandon(self) -> None:
        """Close all files. A child process closes its copies of the parent's."""
        for stored in self._open.values():
            stored.close()
        self._open.clear()
        self._victims.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
