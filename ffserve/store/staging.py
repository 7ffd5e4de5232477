"""Staging and warming: remote files to a local directory, as files of their own, or into the store.

Blocks are fetched into a store below the directory (``.ffserve-stage``), so an interrupted run
continues where it ended, and concurrent runs fetch each block once. A file gets its name when it is
complete and synced. Its version is recorded beside it: a file that exists already is not fetched
again, and one whose object has changed is replaced.

A user's runs on one machine fetch a version once, also to different directories: who stages it
holds the lock of its note in the user's cache, and leaves there where the file is. The next run
copies that file, unless it is gone or was changed.

Warming fills the store of this user before a job reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from ffserve.disk.files import os_error, raise_file_limit
from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.store import urls
from ffserve.store.blocks import boot_id, copy_range, lock
from ffserve.store.directory import Store, cache_directory
from ffserve.store.fetching import (
    NOW,
    Fetcher,
    OpenObject,
    Outcomes,
    Threads,
    by_future,
    identity_of,
    listing,
    outcome_of,
    process_fetcher,
)
from ffserve.store.origin import ObjectVersion

HIDDEN = ".ffserve-stage"
FILES_AT_ONCE = 4
STOP_S = 5.0
"""An interrupted run waits this long for the pieces that are on their way."""
FORGOTTEN_S = 30 * 86_400.0
"""Notes of an earlier start of the machine are removed after this time."""
_FINISH = 1 << 42
"""Lock of the state file of an object: its holder gives the file its name."""


Facts: TypeAlias = dict[str, object]
"""The note of a staged file: its path, size, inode and time, and the version of its object."""


@dataclass(frozen=True, slots=True)
class Item:
    """A file to stage. name: its path in the directory."""

    identity: ObjectVersion
    name: str


@dataclass(frozen=True, slots=True)
class Staged:
    """A file that was staged, or failed. fetched: False if it was there already."""

    url: str
    path: str
    size: int
    fetched: bool
    error: FFServeError | None = None


def plan_staging(given: Sequence[str]) -> list[Item]:
    """Return the files that URLs denote, and their names: those in the last part of the URL; below
    a directory their paths there.

    Raises: UsageError for a name that no file can have, or that two URLs have; else as `listing`.
    """
    found: list[tuple[str, list[ObjectVersion]]] = []
    for url in given:
        if (local := urls.local_path(url)) == url:
            raise UsageError("not the URL of a remote file", path=url, hint="such as s3://bucket/x")
        url = url if local is None else f"file://{local}"
        found.append((url, listing(url, below=True)))
    return items_of(found)


def items_of(listed: Sequence[tuple[str, list[ObjectVersion]]]) -> list[Item]:
    """Return the files that URLs denote, and their names; see `plan_staging`."""
    items: dict[str, Item] = {}
    for url, found in listed:
        single = len(found) == 1 and found[0].url == url
        for identity in found:
            below = not single and not urls.has_magic(url)
            name = urls.name_of(identity.url)
            if below:
                name = identity.url.removeprefix(url.rstrip("/")).strip("/")
            urls.check_name(name, identity.url, reserved=HIDDEN)
            item = Item(identity, name)
            other = items.setdefault(item.name, item)
            if other.identity.url != identity.url:
                raise UsageError(
                    f"two files have the name {item.name!r}: {urls.shown(other.identity.url)} and "
                    f"{urls.shown(identity.url)}",
                    hint="stage them to different directories",
                )
    for name in items:
        above = os.path.dirname(name)
        while above:
            if above in items:
                shown = urls.shown(items[above].identity.url)
                raise UsageError(f"{shown} is a file and the directory of another one")
            above = os.path.dirname(above)
    return list(items.values())


class Staging:
    """A run that stages files to a directory.

    Args:
        directory: made if it is missing. items: see `plan`.
        advance: gets numbers of bytes as they come, in any thread.
    Raises: UsageError, AccessDenied, ReadError: the directory cannot be used, or has no room.
    """

    def __init__(
        self, directory: str, items: Sequence[Item], advance: Callable[[int], None]
    ) -> None:
        self.directory = os.path.abspath(directory)
        self._items, self._advance = items, advance
        hidden = os.path.join(self.directory, HIDDEN)
        try:
            os.makedirs(os.path.join(hidden, "done"), 0o700, exist_ok=True)
        except OSError as error:
            raise os_error(error, self.directory) from error
        self._fetcher = Fetcher(Store(hidden))
        self._coming: set[Future[Outcomes]] = set()
        self._stopped = False
        self._check_room()

    def _check_room(self) -> None:
        needed = 0
        for item in self._items:
            if not self._is_there(item):
                opened = self._fetcher.open(item.identity)
                needed += item.identity.size - opened.stored.state.held_size
                self._fetcher.close(opened)
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise ReadError(
                f"the files need {needed} more bytes, and the disk has {free}",
                path=self.directory,
                hint="free space, or stage fewer files",
            )

    def run(self) -> list[Staged]:
        """Stage all files, also after one that fails; return what became of each. An exception of
        this thread (Ctrl-C) ends it after the pieces that are on their way."""
        threads = Threads("ffserve-stage", FILES_AT_ONCE)
        futures: list[Future[Staged]] = [Future() for _ in self._items]
        for item, future in zip(self._items, futures, strict=True):
            threads.put(NOW, partial(self._stage, item), future)
        try:
            return [future.result() for future in futures]
        except BaseException:
            self._stopped = True
            for future in futures:
                future.cancel()
            wait([piece for piece in list(self._coming) if not piece.cancel()], STOP_S)
            raise

    def _stage(self, item: Item) -> Staged:
        url, path = urls.shown(item.identity.url), os.path.join(self.directory, item.name)
        size = item.identity.size
        try:
            fetched = self._stage_one(item, path)
        except FFServeError as error:
            return Staged(url, path, size, False, error)
        except OSError as error:
            return Staged(url, path, size, False, os_error(error, path))
        return Staged(url, path, size, fetched)

    def _stage_one(self, item: Item, path: str) -> bool:
        if self._is_there(item):
            self._advance(item.identity.size)
            return False
        self._check_foreign(item, path)
        with _note_of_machine(item) as note:
            opened = self._fetcher.open(item.identity)
            try:
                if self._is_there(item):  # another run has just finished it
                    self._advance(item.identity.size)
                    return False
                copied = _copied(note, opened.stored.path)
                if copied:
                    self._advance(item.identity.size)
                else:
                    if copied is not None:  # blocks that were there were written over
                        self._fetcher.repair(opened, np.arange(opened.stored.count))
                    self._fetch(opened)
                lock(opened.stored.state.fd, fcntl.F_WRLCK, _FINISH, wait=True)
                if not self._is_there(item):
                    facts = self._name(item, opened, path)
                    _write(note, {"path": path, **facts})
                return True
            finally:
                self._fetcher.close(opened)

    def _fetch(self, opened: OpenObject) -> None:
        """Have all blocks; raise the first error, after the others have ended."""
        stored = opened.stored
        missing = stored.missing(np.arange(stored.count))
        self._advance(stored.size - int(sum(_size(opened, b) for b in missing.tolist())))

        def came(blocks: list[int], future: Future[Outcomes]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._advance(sum(_size(opened, block) for block in blocks))

        asked = by_future(self._fetcher.ask(opened, missing.tolist(), NOW, None))
        for future, blocks in asked.items():
            future.add_done_callback(partial(came, blocks))
        self._coming.update(asked)
        if self._stopped:
            raise CancelledError
        failed = [error for future in asked if (error := future.exception()) is not None]
        self._coming.difference_update(asked)
        if failed:
            raise failed[0]
        if not stored.complete:
            raise ReadError("the disk has no room for the file", path=stored.path)

    def _name(self, item: Item, opened: OpenObject, path: str) -> Facts:
        """Give a complete file its name; return its note. Raises: OSError."""
        stored = opened.stored
        fd = stored.open_data()
        try:
            os.fchmod(fd, 0o666 & ~_umask())
            if item.identity.modified:
                os.utime(fd, (item.identity.modified, item.identity.modified))
            os.fsync(fd)
            status = os.fstat(fd)
        finally:
            os.close(fd)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        note: Facts = {"name": item.name, "version": _version(item), **_facts(status)}
        place = self._note_of(item)
        temporary = f"{place}.{os.getpid()}"
        with open(temporary, "w") as file:
            json.dump(note, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
        os.replace(stored.path, path)
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._fetcher.store.remove(stored)
        return note

    # ---- what is there --------------------------------------------------------------------

    def _note_of(self, item: Item) -> str:
        name = hashlib.blake2b(os.fsencode(item.name), digest_size=16).hexdigest()
        return os.path.join(self.directory, HIDDEN, "done", name)

    def _note(self, item: Item) -> Facts:
        with contextlib.suppress(OSError), open(self._note_of(item)) as file:
            return _read(file.fileno())
        return {}

    def _is_there(self, item: Item) -> bool:
        """Whether the file is there as it was staged, of the present version."""
        note = self._note(item)
        return note.get("version") == _version(item) and self._is_noted(item, note)

    def _is_noted(self, item: Item, note: Facts) -> bool:
        try:
            found = os.lstat(os.path.join(self.directory, item.name))
        except OSError:
            return False
        return _fits(note, found)

    def _check_foreign(self, item: Item, path: str) -> None:
        """Raise UsageError if the name is taken by a file that was not staged, or changed since."""
        if os.path.lexists(path) and not self._is_noted(item, self._note(item)):
            raise UsageError(
                "a file of this name exists, and was not staged or was changed since",
                path=path,
                hint="remove it, or stage to another directory",
            )


# ---- once per machine ---------------------------------------------------------------------------


@contextlib.contextmanager
def _note_of_machine(item: Item) -> Iterator[int]:
    """Yield a descriptor of this machine's note about a version, locked; -1 if there is no cache
    directory in which files can be locked. Machines that share the cache have separate notes."""
    fd = -1
    try:
        with contextlib.suppress(OSError, FFServeError):
            notes = os.path.join(cache_directory(), "staged")
            directory = os.path.join(notes, boot_id().decode())
            if not os.path.isdir(directory):
                os.makedirs(directory, 0o700, exist_ok=True)
                _remove_old(notes)
            place = os.path.join(directory, _version(item))
            fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def _remove_old(notes: str) -> None:
    """Remove notes of earlier starts of this machine, or of others, that are older than
    FORGOTTEN_S."""
    for entry in list(os.scandir(notes)):
        if time.time() - entry.stat().st_mtime > FORGOTTEN_S:
            shutil.rmtree(entry.path, ignore_errors=True)


def _copied(note: int, to: str) -> bool | None:
    """Copy the file of a note.

    Returns: False: the copy failed, or the file changed meanwhile. None: nothing was written, since
        the file is missing or is not the one that was staged.
    """
    copied: bool | None = None
    facts, flags = _read(note), os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(KeyError, OSError):
        source = os.open(str(facts["path"]), os.O_RDONLY | flags)
        with open(source, "rb") as file, open(to, "rb+") as copy:
            if not _fits(facts, os.fstat(source)):
                return None
            copied = False
            if not copy_range(source, copy.fileno(), 0, os.fstat(source).st_size):
                shutil.copyfileobj(file, copy)
            copied = _fits(facts, os.fstat(source))
    return copied


def _facts(status: os.stat_result) -> Facts:
    return {"size": status.st_size, "inode": status.st_ino, "mtime_ns": status.st_mtime_ns}


def _fits(note: Facts, status: os.stat_result) -> bool:
    """Whether a file is the one that a note is about, and unchanged."""
    return stat.S_ISREG(status.st_mode) and _facts(status).items() <= note.items()


def _read(fd: int) -> Facts:
    """Return the note in a file, which may be empty or cut."""
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
        if isinstance(note, dict):
            return note
    return {}


def _write(fd: int, note: Facts) -> None:
    with contextlib.suppress(OSError):
        os.truncate(fd, 0)
        os.pwrite(fd, json.dumps(note).encode(), 0)


def _version(item: Item) -> str:
    key = item.identity.key.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(key, digest_size=16).hexdigest()


def _size(opened: OpenObject, block: int) -> int:
    return int(opened.stored.state.end(block) - block * opened.stored.block_size)


def _umask() -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


# ---- warming ----

FILES_SHARE = 8
"""One file is kept open for this many descriptors that a process may have; each takes three."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """The outcome of one file. fetched, left: bytes that came just now, and that the store has no
    room for."""

    url: str
    path: str
    size: int
    fetched: int
    left: int
    error: FFServeError | None = None


def warm_up(given: Sequence[str], advance: Callable[[], None]) -> list[Warmed]:
    """Fetch files into the store; return the outcome for each.

    Args: given: URLs of files. advance: is called after each file, in any thread.
    Raises: UsageError for a path that is no URL, or a store that cannot be used.
    """
    local = next((path for path in given if not urls.is_url(path)), None)
    if local is not None:
        raise UsageError(
            "the argument is not the URL of a remote file", path=local, hint="such as s3://bucket/x"
        )
    fetcher = process_fetcher()
    raise_file_limit()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_SHARE
    kept: list[OpenObject] = []
    """Files stay open until the end, so that none is evicted for one that comes after it."""

    def one(url: str) -> Warmed:
        try:
            opened = fetcher.open(identity_of(url))
            try:
                return _warm(fetcher, opened)
            finally:
                if len(kept) < most:
                    kept.append(opened)
                else:
                    fetcher.close(opened)
        except FFServeError as error:
            return Warmed(urls.shown(url), "", 0, 0, 0, error)
        finally:
            advance()

    try:
        with ThreadPoolExecutor(FILES_AT_ONCE, "ffserve-warm") as pool:
            return list(pool.map(one, given))
    finally:
        for opened in kept:
            fetcher.close(opened)


def _warm(fetcher: Fetcher, opened: OpenObject) -> Warmed:
    stored = opened.stored
    missing = stored.missing(np.arange(stored.count)).tolist()
    asked = fetcher.ask(opened, missing, NOW, None)
    fetched = left = 0
    for block, future in asked.items():
        size = stored.state.end(block) - block * stored.block_size
        if outcome_of(future.result(), block) is True:
            fetched += size
        else:
            left += size
    return Warmed(opened.shown, stored.path, stored.size, fetched, left)
