"""Answers that the engine's I/O thread sends by itself: see engine/io.c."""

from __future__ import annotations

from typing import Any

from ffserve.engine.core import ffi, lib
from ffserve.engine.ring import Batch

WHOLE_SIZE = 2048
"""Bytes that a Unix socket takes as one piece or not at all, however small its buffer is."""
_NULL = ffi.NULL


class Line:
    """A client's socket through which answers may go out at any time while it is not held.

    Args: fd: of a Unix stream socket that does not block; stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        c = lib.ffs_reply_socket_new(fd)
        if c == _NULL:
            raise MemoryError("no memory for a line")
        self.c: Any = ffi.gc(c, lib.ffs_reply_socket_free)
        self.held = False

    def hold(self, held: bool) -> None:
        """Let no answer out any more, or again. It is over when this returns."""
        if held != self.held:
            self.held = held
            lib.ffs_reply_socket_block(self.c, held)


class Answer:
    """A frame that is sent when all batches that it waits for have ended without a failure.

    Args: frame: at most 24 bytes.
    """

    __slots__ = ("_c", "_line")

    def __init__(self, line: Line, frame: bytes) -> None:
        self._line = line
        c = self._c = ffi.new("ffs_reply *")
        c.socket, c.left, c.size = line.c, 1, len(frame)
        c.frame = frame

    def awaits(self, batch: Batch) -> None:
        """It waits for this batch too, which is not submitted yet."""
        batch.keep = self
        lib.ffs_reply_wait_for(self._c, batch._c)

    def withhold(self) -> None:
        """It is not to go out."""
        lib.ffs_reply_wait_for(self._c, _NULL)

    def settle(self) -> None:
        """It waits for nothing further; before this is called it does not go out."""
        lib.ffs_reply_arm(self._c)

    @property
    def sent(self) -> bool:
        """Whether it went out; certain once the batches were popped from their engines."""
        return bool(self._c.sent)
