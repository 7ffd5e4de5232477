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
    """Frames and the samples behind them, on their way into a socket.

    Args:
        head: sent first.
        arena: uint8[...] over its mapping, which outlives this.
        starts, lengths: int64[n], contiguous: pieces of the arena.
    """

    __slots__ = ("_arena", "_c", "_keep", "sent", "size")

    def __init__(
        self, head: bytes, arena: NDArray[np.uint8], starts: Int64s, lengths: Int64s
    ) -> None:
        self._arena = arena
        self._keep = (head, starts, lengths)
        c = self._c = ffi.new("ffs_sending *")
        c.arena = ffi.from_buffer(_U8S, arena)
        c.head, c.head_size = ffi.from_buffer(_U8S, head), len(head)
        c.starts, c.lengths = ffi.from_buffer(_I64S, starts), ffi.from_buffer(_I64S, lengths)
        c.count = len(starts)
        self.size = len(head) + int(lengths.sum())
        """Bytes in all."""
        self.sent = 0
        """Bytes sent so far."""

    def send(self, fd: int) -> bool:
        """Send as much as a non-blocking Unix stream socket takes; return whether all is sent.

        Raises: BlockingIOError when the socket takes nothing; OSError.
        """
        self._c.sock = fd
        sent: int = lib.ffs_send(self._c, self.sent)
        if sent < 0:
            raise OSError(-sent, os.strerror(-sent))
        self.sent += sent
        return self.sent == self.size

    def rest(self) -> bytes:
        """Return a copy of the bytes that are not sent yet."""
        head, starts, lengths = self._keep
        pieces: list[bytes | memoryview] = [head]
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            pieces.append(self._arena[start : start + length].data)
        return b"".join(pieces)[self.sent :]
