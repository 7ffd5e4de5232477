"""Descriptors: the client opens the files of a data set, and the daemon reads from them.

So the kernel decides what this process may read, and a path means here what it means to the caller,
whatever the daemon would find there. OPEN names the files by what stat(2) says of them; the daemon
asks for descriptors of those that it does not have open for this user yet.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from stat import S_IFREG
from typing import Any, Protocol

import numpy as np

from ffserve import formats, protocol
from ffserve.disk import index_file
from ffserve.disk.files import REGULAR_FLAGS, open_regular, os_error
from ffserve.engine.many_files import KIND_BITS, close_fds, open_paths, stat_fds, stat_paths
from ffserve.errors import FFServeError, ReadError
from ffserve.formats.base import needs_scan
from ffserve.store.credentials import collect
from ffserve.store.origin import ObjectVersion
from ffserve.store.urls import is_url

AT_ONCE = 256
"""One call looks at this many files; no signal interrupts it."""
OPENED_AT_ONCE = 64
"""One call opens this many files; with their index files, not all may fit into a message."""


class DatasetRequest(Protocol):
    """The data set that an OPEN asks for; see `failover.OpenRequest`."""

    paths: tuple[str, ...]
    format: str | None
    verify: bool
    tolerant: bool
    identities: tuple[ObjectVersion, ...]
    states: bytes
    parts: bool


@dataclass(frozen=True, slots=True)
class DescribedFiles:
    """The description of files in OPEN. identities: packed. tags, access: of remote files; see
    [PROTOCOL.md](../../docs/PROTOCOL.md)."""

    identities: bytes
    tags: list[str] | None = None
    access: str | None = None


def described(request: DatasetRequest, fetches: frozenset[str], daemon: str) -> DescribedFiles:
    """Return the states of files for OPEN. For a file that was opened before it is the state of
    then: the daemon has that file open as long as any client has, even if another file has got its
    name.

    Args: fetches: protocols by which the daemon fetches. daemon: its socket, for errors.
    Raises: MissingFile, AccessDenied, ReadError: also if the daemon fetches no such files.
    """
    paths, remote = request.paths, request.identities
    packed = np.zeros(len(paths), protocol.IDENTITY_DTYPE)
    if request.states:
        packed = np.frombuffer(request.states, protocol.IDENTITY_DTYPE).copy()
    rows = [k for k, path in enumerate(paths) if is_url(path)] if remote else []
    urls = [paths[k] for k in rows]
    for url in urls:
        protocol_name = url.partition("://")[0].lower()
        if protocol_name not in fetches and protocol.EVERY not in fetches:
            reason = (
                f"the daemon does not fetch {protocol_name}://"
                if fetches
                else ("the daemon has no store for remote files, or is of an older release")
            )
            raise ReadError(reason, path=daemon, hint="see [store] in its configuration")
    if not request.states:
        of_url = set(rows)
        _describe_local(packed, paths, [k for k in range(len(paths)) if k not in of_url])
    if not rows:
        return DescribedFiles(packed.tobytes())
    tags = [""] * len(paths)
    for k, identity in zip(rows, remote, strict=True):
        tags[k], packed["size"][k], packed["mtime"][k] = (
            identity.tag,
            identity.size,
            identity.modified,
        )
    return DescribedFiles(packed.tobytes(), tags, collect(urls, own=protocol.EVERY in fetches))


def _describe_local(
    packed: np.ndarray[Any, Any], paths: tuple[str, ...], positions: Sequence[int]
) -> None:
    for first in range(0, len(positions), AT_ONCE):
        rows = positions[first : first + AT_ONCE]
        some = [paths[k] for k in rows]
        states, error = stat_paths(some)
        if error is not None:
            raise os_error(error, some[len(states)]) from error
        for name in protocol.IDENTITY_DTYPE.names or ():
            packed[name][np.array(rows, np.int64)] = states[name]


def changed_file(paths: tuple[str, ...], states: bytes) -> str:
    """Return the first file that is not in its state of `DescribedFiles` any more; the first one if
    that is not known."""
    found = np.zeros(len(paths), protocol.IDENTITY_DTYPE)
    known = np.frombuffer(states, protocol.IDENTITY_DTYPE) if states else found
    for k, path in enumerate(paths):
        if is_url(path):
            continue
        try:
            _describe_local(found, paths, [k])
        except FFServeError:
            return path
        if found[k] != known[k]:
            return path
    return paths[0]


class PassedFiles:
    """Files that were opened for the daemon, until they are sent.

    fds: their descriptors. kinds: as in FILES.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.kinds = bytearray()

    @classmethod
    def of(cls, paths: tuple[str, ...], positions: list[int]) -> PassedFiles:
        """Open files, or the first few if this process may have no more descriptors.

        Raises: MissingFile, AccessDenied, ReadError.
        """
        files = cls()
        left = [paths[position] for position in positions]
        try:
            while left and len(files.fds) < protocol.MOST_FILES:
                some = left[: min(OPENED_AT_ONCE, protocol.MOST_FILES - len(files.fds))]
                if not files._add(some):
                    break
                left = left[len(some) :]
        except BaseException:
            files.close()
            raise
        return files

    @classmethod
    def memory(cls, fd: int) -> PassedFiles:
        """Return a memory file alone. Args: fd: of it, which stays the caller's."""
        files = cls()
        files.fds.append(os.dup(fd))
        files.kinds.append(protocol.RECORD_FILE)
        return files

    def _add(self, paths: list[str]) -> bool:
        """Open files, and their index files; return whether there were descriptors for all."""
        opened, failed = open_paths(paths, REGULAR_FLAGS)
        states, unknown = stat_fds(opened)
        if failed or unknown or (states["mode"] & KIND_BITS != S_IFREG).any():
            close_fds(opened)
            return all(map(self._add_slowly, paths))
        rows = zip(paths, opened.tolist(), states["size"].tolist(), strict=True)
        for k, (path, fd, size) in enumerate(rows):
            if not self._enter(path, fd, size):
                close_fds(opened[k + 1 :])
                return False
        return True

    def _add_slowly(self, path: str) -> bool:
        """Open one file: where one of several cannot be opened, this says which and why."""
        if len(self.fds) == protocol.MOST_FILES:
            return False
        try:
            fd = open_regular(path)
        except FFServeError as error:
            if self.fds and getattr(error.__cause__, "errno", 0) == errno.EMFILE:
                return False
            raise
        return self._enter(path, fd, os.fstat(fd).st_size)

    def _enter(self, path: str, fd: int, size: int) -> bool:
        """Take a descriptor, and open the index file; return False if there is no room for both."""
        self.fds.append(fd)
        self.kinds.append(protocol.RECORD_FILE)
        index = _open_index(fd, path) if size >= index_file.MIN_INDEXED_SIZE else None
        if index is None:
            return True
        if len(self.fds) == protocol.MOST_FILES:
            # Both come first in the next message.
            os.close(index)
            os.close(self.fds.pop())
            self.kinds.pop()
            return False
        self.fds.append(index)
        self.kinds.append(protocol.INDEX_FILE)
        return True

    def close(self) -> None:
        """Close the descriptors."""
        while self.fds:
            os.close(self.fds.pop())


def _open_index(fd: int, path: str) -> int | None:
    """Open the index file of a file if it may have one. The daemon checks what is in it."""
    known = formats.by_suffix(path)
    if known is not None and not needs_scan(known):
        return None
    for place in index_file.places(fd, path):
        with contextlib.suppress(OSError):
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
            if place is not None:
                return os.open(place, flags)
    return None


def send(sock: socket.socket, output: memoryview, fds: list[int], flags: int = 0) -> int:
    """Send bytes, the first of them with descriptors; return how many the socket took.

    Raises: OSError; BlockingIOError also when descriptors of this user that nobody has received
        yet are too many.
    """
    if not fds:
        return sock.send(output, flags)
    try:
        return socket.send_fds(sock, [output], fds, flags)
    except OSError as error:
        if error.errno == errno.ETOOMANYREFS:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        raise
