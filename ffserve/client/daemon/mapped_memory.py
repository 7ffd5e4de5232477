"""Memory of the daemon in this process: the files that came as descriptors, and their mappings.

WELCOME brings the descriptor of one page, which shows whether descriptors arrive and can be mapped.
OPENED brings three descriptors for each domain in which this session opens something for the first
time: arena, directory, index. All are mapped read-only, each part when it is first needed. Where
this cannot be done (a proxy, a limit on descriptors or on the address space, a filter of system
calls) this process reads files by itself.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bytes
from ffserve.engine.slots import ENTRY_DTYPE
from ffserve.errors import ProtocolError, ReadError, ServerUnavailable
from ffserve.protocol import MOST_FILES
from ffserve.system.memfd import can_map, is_sealed, map_read_only

FILES = 3
"""The daemon passes this many descriptors for each domain."""
_NO_MORE_FILES = "this process may have no more open files"
MORE_FILES = "raise its limit: ulimit -n"


class UnmappedError(ServerUnavailable):
    """This process cannot map the daemon's memory. Another daemon would not help."""

    retryable = False


class DomainMemory:
    """The arena, directory and index of one domain.

    Args: fds: their descriptors, of which the object becomes the owner. capacity: of the tables.
    Raises: ProtocolError: the memory could shrink under a mapping.
    """

    def __init__(self, path: str, fds: list[int], arena_size: int, capacity: int) -> None:
        self._path = path
        self._fds = fds
        self._arena_size = arena_size
        self._capacity = capacity
        self._arena: Bytes | None = None
        weakref.finalize(self, close_all, fds).atexit = False
        if not all(map(is_sealed, fds)):
            self.close()
            raise ProtocolError("the daemon's memory is not sealed", path=path)

    @property
    def arena(self) -> Bytes:
        """The mapped arena, as large as it may become. Raises: UnmappedError."""
        if self._arena is None:
            self._arena = _mapped(self._path, self._fds[0], 0, self._arena_size)
        return self._arena

    def entries(self, base: int, count: int) -> Bytes:
        """Map the directory's entries of samples [base, base + count). Raises: UnmappedError."""
        self._check_run(base, count)
        size = ENTRY_DTYPE.itemsize
        return _mapped(self._path, self._fds[1], base * size, count * size)

    def index(self, base: int, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of the payload offsets and the checksums of a run of samples."""
        self._check_run(base, count)
        if count == 0:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
        offsets = map_read_only(self._fds[2], base * 8, count * 8).view(np.uint64)
        start = self._capacity * 8 + base * 4
        return offsets.copy(), map_read_only(self._fds[2], start, count * 4).view(np.uint32).copy()

    def _check_run(self, base: int, count: int) -> None:
        if base < 0 or count < 0 or base + count > self._capacity:
            raise ProtocolError(
                f"invalid OPENED: samples {base} to {base + count} of {self._capacity}",
                path=self._path,
            )
        if not self._fds:
            raise ServerUnavailable("the connection was closed", path=self._path)

    def close(self) -> None:
        """Close the descriptors; mappings stay."""
        close_all(self._fds)


class Memories:
    """The memory of all domains of one connection.

    Args: path: of the socket. arena_size, capacity: as in WELCOME.
    """

    def __init__(self, path: str, arena_size: int, capacity: int) -> None:
        self._path = path
        self.arena_size = arena_size
        self._capacity = capacity
        self._received: deque[int] = deque()
        """Descriptors that came, and whose OPENED did not."""
        self._domains: dict[int, DomainMemory] = {}

    def receive(self, fds: list[int]) -> None:
        """Take descriptors in the order in which they came."""
        self._received.extend(fds)

    def assign(self, domains: list[int]) -> None:
        """An OPENED has come: its descriptors, which came before, belong to these domains.

        Raises: UnmappedError: they did not come. ProtocolError.
        """
        for domain in domains:
            if domain in self._domains:
                raise ProtocolError(
                    f"invalid OPENED: domain {domain} came a second time", path=self._path
                )
            if len(self._received) < FILES:
                raise _unmapped(self._path, _NO_MORE_FILES, MORE_FILES)
            fds = [self._received.popleft() for _ in range(FILES)]
            self._domains[domain] = DomainMemory(self._path, fds, self.arena_size, self._capacity)

    def of(self, domain: int) -> DomainMemory:
        """Return the memory of a domain. Raises: ProtocolError."""
        memory = self._domains.get(domain)
        if memory is None:
            raise ProtocolError(f"invalid OPENED: unknown domain {domain}", path=self._path)
        return memory

    def close(self) -> None:
        """Close all descriptors; mappings stay."""
        close_all(self._received)
        for memory in self._domains.values():
            memory.close()


def receive(sock: socket.socket, size: int, memories: Memories | None) -> bytes:
    """Receive bytes, and the descriptors that come with them, for `memories`. Raises: OSError."""
    if memories is None:
        return sock.recv(size)
    chunk, fds, _flags, _address = socket.recv_fds(sock, size, MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    memories.receive(fds)
    return chunk


def check_page(path: str, fds: list[int], epoch: object, arena_size: int, *, lost: bool) -> None:
    """Check whether this process can map the daemon's memory.

    Args: fds: that came with WELCOME; epoch: that WELCOME names; lost: the kernel dropped some.
    Raises: UnmappedError: it cannot. ProtocolError.
    """
    if lost:
        raise _unmapped(path, _NO_MORE_FILES, MORE_FILES)
    if len(fds) != 1:
        raise _unmapped(
            path,
            f"{len(fds)} descriptors came with WELCOME, not 1",
            "connect to the daemon without a proxy: only a direct connection through a Unix socket "
            "passes descriptors",
        )
    if not is_sealed(fds[0]):
        raise ProtocolError("the daemon's memory is not sealed", path=path)
    page = _mapped(path, fds[0], 0, mmap.PAGESIZE)
    spare: list[int] = []
    try:
        # Each OPENED may bring some more.
        spare.extend(os.dup(fds[0]) for _ in range(FILES))
    except OSError as error:
        raise _unmapped(path, _NO_MORE_FILES, MORE_FILES) from error
    finally:
        close_all(spare)
    if int(page[:8].view("<u8")[0]) != epoch:
        raise ProtocolError("invalid WELCOME: its page belongs to another daemon", path=path)
    if not can_map(arena_size):
        text = f"this process has no address space for the arena of {arena_size} bytes"
        raise _unmapped(path, text, "raise its limit: ulimit -v")


def _mapped(path: str, fd: int, offset: int, size: int) -> Bytes:
    try:
        return map_read_only(fd, offset, size)
    except ReadError as error:
        raise UnmappedError(error.message, path=path, hint=error.hint) from error


def _unmapped(path: str, reason: str, hint: str | None) -> UnmappedError:
    return UnmappedError(f"cannot map the daemon's memory: {reason}", path=path, hint=hint)


def address(array: Bytes) -> int:
    """Return where an array begins in this process."""
    start: int = array.__array_interface__["data"][0]
    return start


def span(arenas: list[Bytes]) -> Bytes:
    """Return one array from the start of the arena with the lowest address to the end of the last.

    What lies between two arenas must not be touched. The array keeps all of them mapped.
    """
    if len(arenas) < 2:
        return arenas[0] if arenas else np.zeros(0, np.uint8)
    return np.asarray(_Span(arenas))


class _Span:
    def __init__(self, arenas: list[Bytes]) -> None:
        self._arenas = arenas
        starts = [address(arena) for arena in arenas]
        size = max(s + a.nbytes for s, a in zip(starts, arenas, strict=True)) - min(starts)
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (size,), "data": (min(starts), True),
        }  # fmt: skip


def close_all(fds: list[int] | deque[int]) -> None:
    """Close descriptors, and forget them."""
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
