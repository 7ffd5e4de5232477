"""Outbox: frames on their way through one client's socket, some with descriptors of memory."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ffserve import protocol
from ffserve.server.users.shares import User
from ffserve.system.memfd import MemoryFile

log = logging.getLogger("ffserve")


@dataclass(frozen=True, slots=True)
class MemoryMessage:
    """A message with whose first byte the client gets read-only descriptors of these files."""

    message: protocol.Welcome | protocol.Opened
    files: list[MemoryFile]


@dataclass(frozen=True, slots=True)
class MemoryFrame:
    """A MemoryMessage, encoded."""

    frame: bytes
    files: list[MemoryFile]

    def __len__(self) -> int:
        return len(self.frame)

    def send(self, sock: socket.socket) -> int:
        """Send the descriptors and as many bytes as the socket takes; return how many.

        Raises: BlockingIOError when the socket takes nothing; OSError.
        """
        fds: list[int] = []
        try:
            fds.extend(file.reader_fd() for file in self.files)
            return socket.send_fds(sock, [self.frame], fds)
        except (BlockingIOError, InterruptedError, BrokenPipeError, ConnectionResetError):
            raise
        except OSError as error:
            log.warning("cannot send the shared memory to a client: %s", error)
            raise
        finally:
            for fd in fds:
                os.close(fd)


class Outbox:
    """Frames in the order in which they leave through a socket.

    Args:
        wake: called when there is something to send.
        user: frames count against the user's bound on unsent bytes.
    """

    def __init__(self, wake: Callable[[], None], user: User) -> None:
        self._wake = wake
        self._user = user
        self._queue: deque[bytes | memoryview | MemoryFrame] = deque()
        """A memoryview: the rest of a frame."""
        self._size = 0
        """Bytes in the queue."""
        self.unsent_size = 0
        """Bytes that count against the bound."""

    def __bool__(self) -> bool:
        return bool(self._queue)

    def put(self, frame: bytes | MemoryFrame) -> None:
        """Append a frame."""
        self._queue.append(frame)
        self._size += len(frame)
        self._wake()
        self.count()

    def count(self) -> None:
        """Count what has changed against the bound."""
        more, self.unsent_size = self._size - self.unsent_size, self._size
        if more > 0:
            self._user.unsent.take(more)
        elif more < 0:
            self._user.unsent.give(-more)

    def send(self, sock: socket.socket) -> bool:
        """Send the next frame as far as the socket takes it; return False when nothing is left.

        Raises: BlockingIOError when the socket takes nothing; OSError.
        """
        if not self._queue:
            return False
        frame = self._queue[0]
        if isinstance(frame, MemoryFrame):
            sent, frame = frame.send(sock), frame.frame
        else:
            sent = sock.send(frame)
        self._size -= sent
        if sent == len(frame):
            self._queue.popleft()
        else:
            self._queue[0] = memoryview(frame)[sent:]
        return True

    def clear(self) -> None:
        """Drop all frames, since the client is gone."""
        self._queue.clear()
        self._size = 0
        self.count()
