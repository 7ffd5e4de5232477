"""Remote files for the guests of the package, such as `ffserve run`. Guests list, read and write by
URL with the names of this module only; other modules of this folder may change.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, TypeVar

from ffserve.disk.files import open_regular
from ffserve.errors import MissingFile, ReadError, UsageError
from ffserve.formats import Shard, by_name
from ffserve.formats.base import needs_scan
from ffserve.store.blocks import write_at
from ffserve.store.fetching import call, find, identity_of, process_fetcher, tried
from ffserve.store.object_tables import parsed
from ffserve.store.origin import HIDDEN, SPECIAL, ObjectVersion, failure, file_system, sized
from ffserve.store.ranges import RangedObject, ReadAtStream
from ffserve.store.schemes import protocol_of
from ffserve.store.staging import Staging, plan_staging, warm_up
from ffserve.store.urls import check_name, is_url, is_web, literal, local_path, name_of, shown

__all__ = [
    "HIDDEN",
    "SPECIAL",
    "ObjectVersion",
    "OutputObject",
    "RangedObject",
    "RemoteDirectory",
    "Staging",
    "StoredStream",
    "UnsizedStream",
    "call",
    "check_name",
    "check_store",
    "copy",
    "error_of",
    "file_system",
    "find",
    "identity_of",
    "is_url",
    "is_web",
    "keep_index",
    "literal",
    "local_path",
    "name_of",
    "parsed",
    "plan_staging",
    "ranged_stream",
    "shown",
    "sized",
    "warm_up",
    "write_at",
]

T = TypeVar("T")
_PIECE_SIZE = 1 << 20


def check_store() -> None:
    """Open the store of this user, unless it is open.

    Raises: UsageError, AccessDenied, ReadError: it cannot be used.
    """
    process_fetcher()


def copy(version: ObjectVersion, fd: int, check: Callable[[], object]) -> None:
    """Write an object to a file, through the store.

    Args:    check: called now and then; it raises when the copy is no longer wanted.
    Raises:  MissingFile, AccessDenied, ReadError.
    """
    fetcher = process_fetcher()
    opened = fetcher.open(version)
    try:
        fetcher.copy(opened, fd, check)
    finally:
        fetcher.close(opened)


def keep_index(
    url: str, format: str | None, *, renew: bool, seen: Callable[[int], object]
) -> tuple[Shard, str] | None:
    """Scan a remote file through the store, which keeps it and its index.

    Args, Returns: as `shardfile.write_index_file`.
    Raises: FFServeError.
    """
    fetcher = process_fetcher()
    opened = fetcher.open(identity_of(url))
    try:
        read_at, kept = fetcher.read_at(opened), (fetcher.store, opened.stored)
        options: Any = {"seen": seen, "kept": kept, "renew": renew}
        shard = parsed(read_at, opened.identity.size, opened.shown, format, **options)
        name = f"index-{shard.format}"
        if not needs_scan(by_name(shard.format)):
            return None
        if not opened.stored.read_index(name):
            hint = "set FFSERVE_STORE_SIZE to a larger size"
            raise ReadError("the store has no room for the index", path=opened.shown, hint=hint)
        return shard, os.path.join(opened.stored.state.directory, name)
    finally:
        fetcher.close(opened)


def error_of(error: BaseException, url: str) -> Exception:
    """Return the error for an exception of the packages of a scheme, which names the URL.

    A stream was being read, which cannot begin again.
    """
    found = failure(error, url)
    return tried(found.error, 1, 0.0) if found.again else found.error


class StoredStream(ReadAtStream):
    """A remote file as a stream, through the store."""

    def __init__(self, version: ObjectVersion) -> None:
        self._fetcher = process_fetcher()
        self._opened = self._fetcher.open(version)
        super().__init__(self._fetcher.read_at(self._opened), version.size)

    def close(self) -> None:
        if not self.closed:
            self._fetcher.close(self._opened)
        super().close()


def ranged_stream(url: str) -> IO[bytes]:
    """Open a remote file as a stream that can seek, read by ranges. Raises: FFServeError."""
    opened = RangedObject(identity_of(url))
    return io.BufferedReader(ReadAtStream(opened.read_at(), opened.size), _PIECE_SIZE)


class UnsizedStream(io.RawIOBase):
    """A remote file of unknown size as a stream from its beginning; no range of it can be read
    again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._file = call(url, self._open)

    def _open(self) -> Any:
        system, path = file_system(self._url)
        return system.open(path, "rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        content = self._file.read(len(view))
        view[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class RemoteDirectory:
    """A directory at an origin, or a file there. Calls that fail for a while are tried again, so
    each of them may be repeated.

    Raises: UsageError: a package is missing, or the origin takes no files. AccessDenied, ReadError.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        system, path = self._call(lambda: file_system(uri))
        if not hasattr(system, "put_file"):
            raise UsageError(
                f"ffserve cannot write to {protocol_of(uri)}:// URLs",
                path=shown(uri),
                hint="write to a local path, or to an object store (such as s3://BUCKET/NAME)",
            )
        self._path = path.rstrip("/")

    @property
    def _places(self) -> Any:
        # A lost connection needs another file system object.
        return file_system(self._uri)[0]

    def _call(self, attempt: Callable[[], T]) -> T:
        return call(self._uri, attempt)

    def exists(self) -> bool:
        """Whether the directory exists."""
        return self._call(lambda: self._is_there(self._path))

    def _is_there(self, whole: str) -> bool:
        # For `exists` of fsspec every failure is an absence.
        self._places.invalidate_cache()
        try:
            self._places.info(whole)
        except FileNotFoundError:
            return False
        return True

    def entries(self, path: str) -> list[str]:
        """Return the names in a directory; none if it does not exist."""
        whole = self._whole(path)

        def listed() -> list[str]:
            self._places.invalidate_cache()
            try:
                return list(self._places.ls(whole, detail=False))
            except FileNotFoundError:
                return []

        names = [str(name).rstrip("/") for name in self._call(listed)]
        return [name.rpartition("/")[2] for name in names if name != whole]

    def files(self, path: str) -> list[str]:
        """Return all files below a directory, relative to it."""
        whole = self._whole(path)
        return [name[len(whole) + 1 :] for name in self._call(lambda: self._below(whole))]

    def _below(self, whole: str) -> list[str]:
        self._places.invalidate_cache()
        return sorted(str(name) for name in self._places.find(whole))

    def make(self, path: str) -> None:
        """Create a directory and those above it."""
        self._call(lambda: self._places.makedirs(self._whole(path), exist_ok=True))

    def put(self, source: str, path: str) -> None:
        """Write a local file."""
        whole = self._whole(path)
        os.close(open_regular(source))

        def written() -> None:
            self._places.makedirs(whole.rpartition("/")[0], exist_ok=True)
            self._places.put_file(source, whole)

        self._call(written)

    def publish(self, source: str, path: str) -> None:
        """Write a local file, which appears when it is complete."""
        if not _moves(self._places):  # in an object store each object does
            return self.put(source, path)
        folder, _, name = self._whole(path).rpartition("/")
        beside, end = f"{folder}/.{secrets.token_hex(6)}.tmp", f"{folder}/{name}"

        def written() -> None:
            system = self._places
            system.makedirs(folder, exist_ok=True)
            try:
                system.put_file(source, beside)
                if self._is_there(end):  # not every `mv` replaces
                    system.rm(end)
                system.mv(beside, end)
            except BaseException:
                with contextlib.suppress(Exception):
                    system.rm(beside)
                raise

        return self._call(written)

    def write(self, path: str, content: bytes) -> None:
        """Write a small file."""
        whole = self._whole(path)

        def written() -> None:
            self._places.makedirs(whole.rpartition("/")[0], exist_ok=True)
            self._places.pipe_file(whole, content)

        self._call(written)

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None if it is not there."""

        def content() -> bytes | None:
            self._places.invalidate_cache()
            try:
                with contextlib.closing(self._places.open(self._whole(path), "rb")) as file:
                    return b"".join(iter(lambda: file.read(_PIECE_SIZE), b""))
            except FileNotFoundError:
                return None

        return self._call(content)

    def move(self, names: Mapping[str, str]) -> None:
        """Move files to new names. In an object store they are copied, several at once, and the old
        ones stay. Raises: MissingFile: one is not there; others may have been moved."""
        if not _moves(self._places):
            begins, ends = (list(map(self._whole, some)) for some in (names, names.values()))
            if names:
                self._call(lambda: self._places.copy(begins, ends, on_error="raise"))
            return
        for old, new in names.items():
            if not self.rename(old, new):
                message = "a file that was to be moved is no longer there"
                raise MissingFile(message, path=f"{shown(self._uri)}/{old}")

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, as far as they are there."""
        unwanted = {self._whole(name) for name in names}

        def deleted() -> None:
            if some := [name for name in self._below(self._path) if name in unwanted]:
                self._places.rm(some)

        if unwanted:
            self._call(deleted)

    def rename(self, old: str, new: str) -> bool:
        """Rename a file or directory; False if it is not there."""
        begin, end, attempts = self._whole(old), self._whole(new), 0

        def renamed() -> bool:
            nonlocal attempts
            attempts += 1
            system = self._places
            system.makedirs(end.rpartition("/")[0], exist_ok=True)
            if _moves(system):
                if attempts > 1 and not self._is_there(begin):
                    return self._is_there(end)  # it was done, only the answer was lost
                try:
                    system.mv(begin, end)
                except FileNotFoundError:
                    return False
                return True
            # In an object store, files that an earlier attempt has moved are no longer there.
            if not (names := self._below(begin)):
                return attempts > 1 and self._is_there(end)
            system.copy(names, [end + name[len(begin) :] for name in names], on_error="raise")
            system.rm(names)
            return True

        return self._call(renamed)

    def remove(self, path: str) -> None:
        """Remove a directory and all below it, if it is there."""
        with contextlib.suppress(Exception):
            self._call(lambda: self._places.rm(self._whole(path), recursive=True))

    def prune(self, path: str) -> None:
        """Remove a directory below the output if it is empty; object stores have none.

        Some file systems of fsspec remove a directory with all below it, and some a bucket.
        """
        with contextlib.suppress(Exception):
            if path and not self.entries(path):
                self._places.rmdir(self._whole(path))

    def _whole(self, path: str) -> str:
        return f"{self._path}/{path}" if path else self._path


def _moves(system: Any) -> bool:
    """Whether a file system has a way of its own to move a directory, which object stores lack."""
    own = getattr(type(system), "mv", None)
    return own is not None and own is not importlib.import_module("fsspec").AbstractFileSystem.mv


class OutputObject:
    """The temporary file of a file at an origin; the calls are those of `output.OutputFile`.

    It has no name, in the directory for temporary files ($TMPDIR), and is sent when it is complete.
    """

    def __init__(self, url: str) -> None:
        self.owner = os.getpid()
        self._place = RemoteDirectory(url)
        self.fd, self._spool = _nameless(), -1

    def spool(self) -> int:
        """Return the descriptor of the spool, created at the first call."""
        if self._spool < 0:
            self._spool = _nameless()
        return self._spool

    def publish(self) -> None:
        """Write the file to the origin. Raises: FFServeError."""
        self._place.publish(f"/proc/self/fd/{self.fd}", "")
        self.discard()

    def discard(self) -> None:
        """Remove the temporary files."""
        for fd in (self.fd, self._spool):
            if fd >= 0:
                os.close(fd)
        self.fd = self._spool = -1


def _nameless() -> int:
    """Return the descriptor of a new temporary file without a name."""
    fd, name = tempfile.mkstemp(prefix="ffserve-")
    os.unlink(name)
    return fd
