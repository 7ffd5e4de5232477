"""Files of a conversion, by path or by URL."""

from __future__ import annotations

import contextlib
import os
from typing import IO, Any

from ffserve.store.public import RemoteDirectory, identity_of, is_url, ranged_stream


def opened(path: str) -> IO[bytes]:
    """Open a file as a stream that can seek.

    Raises: FFServeError: of a remote file. OSError: of a local one.
    """
    return ranged_stream(path) if is_url(path) else open(path, "rb")


def version_of(path: str) -> list[Any]:
    """Return what differs for each file and each version of it. Raises: as `opened`."""
    if is_url(path):
        return [identity_of(path).key]
    status = os.stat(path)
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]


def remove(path: str) -> None:
    """Remove a file, if it is there. Raises: as `opened`."""
    if is_url(path):
        directory, _, name = path.rpartition("/")
        RemoteDirectory(directory).delete([name])
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
