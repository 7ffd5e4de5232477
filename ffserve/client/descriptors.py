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

from ffserve import formats, index_file, protocol
from ffserve.errors import FFServeError
from ffserve.files import open_regular, wrap_os_error
from ffserve.formats.base import needs_scan


def identities(paths: tuple[str, ...]) -> bytes:
    """Return the states of files, for OPEN. Raises: MissingFile, AccessDenied, ReadError."""
    return protocol.pack_identities([wrap_os_error(os.stat, path) for path in paths])


class OpenFiles:
    """Files that were opened for the daemon, until they are sent.

    fds: their descriptors. kinds: as in FILES.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.kinds = bytearray()

    @classmethod
    def of(cls, paths: tuple[str, ...], positions: list[int]) -> OpenFiles:
        """Open files, or the first few if this process may have no more descriptors.

        Raises: MissingFile, AccessDenied, ReadError.
        """
        files = cls()
        try:
            for position in positions:
                if not files._add(paths[position]):
                    break
        except BaseException:
            files.close()
            raise
        return files

    def _add(self, path: str) -> bool:
        """Open one file, and its index file; return False if there is no descriptor for it."""
        if len(self.fds) == protocol.MOST_FILES:
            return False
        try:
            fd = open_regular(path)
        except FFServeError as error:
            if self.fds and getattr(error.__cause__, "errno", 0) == errno.EMFILE:
                return False
            raise
        self.fds.append(fd)
        self.kinds.append(protocol.RECORD_FILE)
        if os.fstat(fd).st_size < index_file.MIN_INDEXED_SIZE:
            return True
        index = _open_index(path)
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


def _open_index(path: str) -> int | None:
    """Open the index file of a file if it may have one. The daemon checks what is in it."""
    known = formats.by_suffix(path)
    if known is not None and not needs_scan(known):
        return None
    for place in (index_file.beside(path), index_file.cached(path)):
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
