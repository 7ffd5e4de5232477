"""Remote files for the guests of the package, such as `ffserve run`. Guests list, read and write by
URL with the names of this module only; other modules of this folder may change.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from ffserve.store.blocks import write_at
from ffserve.store.fetching import call, find, identity_of, process_fetcher, tried
from ffserve.store.object_tables import parsed
from ffserve.store.origin import HIDDEN, SPECIAL, ObjectVersion, failure, file_system, sized
from ffserve.store.ranges import RangedObject, ReadAtStream
from ffserve.store.staging import Staging, plan_staging, warm_up
from ffserve.store.urls import check_name, is_url, is_web, literal, local_path, name_of, shown

__all__ = [
    "HIDDEN",
    "SPECIAL",
    "ObjectVersion",
    "RangedObject",
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
    "literal",
    "local_path",
    "name_of",
    "parsed",
    "plan_staging",
    "shown",
    "sized",
    "warm_up",
    "write_at",
]


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
