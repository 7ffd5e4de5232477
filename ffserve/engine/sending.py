"""The Python face of sending.c: samples out of the arena into a socket."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.core import ffi, lib

Int64s = NDArray[np.int64]

_I64S = ffi.typeof("int64_t[]")
_U8S = ffi.typeof("uint8_t[]")


class Run:
    """A head and pieces of the arena on their way into a socket.

    Args:
        head: sent first.
        fd, arena: the arena's file, and uint8[...] over its mapping. Both outlive this.
        starts, lengths: int64[n], contiguous: pieces inside of the arena.
        refer_from: pieces of so many bytes and more go by reference; 0: all are copied.
    """

    __slots__ = ("_arena", "_c", "_keep", "referred", "sent", "size")

    def __init__(
        self,
        head: bytes,
        fd: int,
        arena: NDArray[np.uint8],
        starts: Int64s,
        lengths: Int64s,
        refer_from: int,
    ) -> None:
        self._arena = arena
        self._keep = (head, starts, lengths)
        c = self._c = ffi.new("ffs_sending *")
        c.memory, c.arena = fd, ffi.from_buffer(_U8S, arena)
        c.head, c.head_size = ffi.from_buffer(_U8S, head), len(head)
        c.starts, c.lengths = ffi.from_buffer(_I64S, starts), ffi.from_buffer(_I64S, lengths)
        c.count, c.refer_from = len(starts), refer_from
        self.size = len(head) + int(lengths.sum())
        self.sent = 0
        """Bytes, as its owner says."""
        self.referred = refer_from > 0

    def send(self, fd: int) -> int:
        """Send what a Unix stream socket that does not block takes of the rest; return its size.

        Raises: BlockingIOError when that is nothing; OSError.
        """
        self._c.sock = fd
        went: int = lib.ffs_send(self._c, self.sent)
        if went < 0:
            raise OSError(-went, os.strerror(-went))
        return went

    def rest(self) -> bytes:
        """Return a copy of what has not been sent."""
        head, starts, lengths = self._keep
        pieces: list[bytes | memoryview] = [head]
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            pieces.append(self._arena[start : start + length].data)
        return b"".join(pieces)[self.sent :]


def unread(fd: int) -> int:
    """Return how many bytes were sent into a Unix socket and not read, or more; 0 when all were,
    or nobody can any more.

    Raises: OSError.
    """
    size: int = lib.ffs_unread(fd)
    if size < 0:
        raise OSError(-size, os.strerror(-size))
    return size
