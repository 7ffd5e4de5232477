"""Inline payload: samples through the socket, for clients that cannot map the arena.

An `InlineReply` answers one GET: SENDING, PAYLOADs, READY. Its samples stay pinned in the arena
until the last byte is in the socket. It is cut into runs, each of which the kernel copies straight
out of the arena (`ffs_payload_send`), so the daemon makes no copy of its own. When other requests
wait for memory and the client is slow, the scheduler takes the pins back: the rest of the current
run is copied first, and the client asks again for the samples that follow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.cache.cache import Int64s
from ffserve.engine.io import PayloadRun
from ffserve.memfd import MemoryFile
from ffserve.server.users import MOST_UNSENT, User

log = logging.getLogger("ffserve")

RUN_SIZE, SMALLEST_RUN_SIZE = 4 * 1024 * 1024, 16 * 1024
"""Bytes in one run: twice the socket's buffer, so that few calls end early; fewer for a user with
many sessions, since a copy of each of their runs may be needed."""
RUN_COUNT = 512
"""Samples in one run: one call of sendmsg."""
SEND_BUFFER_SIZE = 1024 * 1024
_SO_SNDBUFFORCE = 32


def widen_send_buffer(sock: socket.socket) -> None:
    """Give a socket that samples go through a larger buffer, so that both sides work at once.

    The default of 208 KiB costs a wake-up for every two samples of 100 KiB. The kernel caps the
    size at net.core.wmem_max, except for root.
    """
    for option in (socket.SO_SNDBUF, _SO_SNDBUFFORCE):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, SEND_BUFFER_SIZE)


class InlineReply:
    """The samples of one GET: SENDING, PAYLOADs, READY.

    Args:
        arena: uint8[...] over its mapping.
        starts, lengths: int64[n], of each sample in the arena; length 0 for a failed sample.
        end: called once with the number of samples that were sent whole; returns the READY.
    """

    def __init__(
        self,
        tag: int,
        arena: NDArray[np.uint8],
        starts: Int64s,
        lengths: Int64s,
        end: Callable[[int], protocol.Ready],
    ) -> None:
        self.tag = tag
        self.finished = False
        """Whether the last run was returned."""
        self._arena = arena
        self._starts = starts
        self._lengths = lengths
        self._ends = np.cumsum(lengths)
        self._end = end
        self._begun = self._stopped = False
        self._whole = 0
        """Samples that were sent whole when it was stopped."""
        self._position = 0
        """Bytes of payload in all runs so far, the current one included."""

    def stop(self) -> None:
        """The pins are gone: no further run."""
        self._stopped = True
        self._whole = int(self._ends.searchsorted(self._position, side="right"))
        # The client may not read for a long time.
        self._starts = self._lengths = self._ends = np.zeros(0, np.int64)

    def next_run(self, most_size: int) -> PayloadRun | bytes:
        """Return what to send next; READY, the last of them, sets `finished`.

        Args: most_size: of a run.
        """
        if self._stopped:
            self.finished = True
            return protocol.encode(self._end(self._whole))
        first = int(self._ends.searchsorted(self._position, side="right"))
        head = b""
        if not self._begun:
            self._begun = True
            lengths = self._lengths.astype("<u8").tobytes()
            head = protocol.encode(protocol.Sending(self.tag, lengths))
        if first == len(self._ends):
            self.finished = True
            return head + protocol.encode(self._end(first))
        return self._cut(head, first, most_size)

    def _cut(self, head: bytes, first: int, most_size: int) -> PayloadRun:
        """Return the run that begins at the current position, inside of sample `first`."""
        ends, begin = self._ends, self._position
        last = min(first + RUN_COUNT, int(ends.searchsorted(begin + most_size)) + 1, len(ends))
        end = min(begin + most_size, int(ends[last - 1]))
        head += protocol.encode(protocol.Payload(self.tag, end - begin))
        starts, lengths = self._starts[first:last].copy(), self._lengths[first:last].copy()
        begun = begin - int(ends[first] - lengths[0])
        starts[0] += begun
        lengths[0] -= begun
        lengths[-1] -= int(ends[last - 1]) - end
        self._position = end
        return PayloadRun(head, self._arena, starts, lengths)


@dataclass(frozen=True, slots=True)
class MemoryMessage:
    """A message with whose first byte the client gets read-only descriptors of these files."""

    message: protocol.Welcome | protocol.Opened
    files: list[MemoryFile]


@dataclass(frozen=True, slots=True)
class MemoryFrame:
    """The same, encoded."""

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
    """Frames and inline replies in the order in which they leave through a socket.

    Args:
        wake: called when there is something to send.
        user: frames, and copies of samples, count against the user's bound on unsent bytes.
    """

    def __init__(self, wake: Callable[[], None], user: User) -> None:
        self._wake = wake
        self._user = user
        self._queue: deque[bytes | MemoryFrame | InlineReply] = deque()
        self._queued_size = 0
        """Bytes of frames in the queue."""
        self._run: PayloadRun | bytes | MemoryFrame | memoryview | None = None
        """What is sent now; a memoryview: the rest of it."""
        self._reply: InlineReply | None = None
        """The reply that the current run belongs to."""
        self.unsent_size = 0
        """Bytes that count against the bound."""

    def __bool__(self) -> bool:
        return self._run is not None or bool(self._queue)

    def put(self, item: bytes | MemoryFrame | InlineReply) -> None:
        """Append a frame or a reply."""
        self._queue.append(item)
        if not isinstance(item, InlineReply):
            self._queued_size += len(item)
        self._wake()
        self.count()

    def count(self) -> None:
        """Count what has changed against the bound."""
        run = self._run
        size = self._queued_size
        if run is not None and not isinstance(run, PayloadRun):
            size += len(run)
        more, self.unsent_size = size - self.unsent_size, size
        if more > 0:
            self._user.unsent.take(more)
        elif more < 0:
            self._user.unsent.give(-more)

    def send(self, sock: socket.socket) -> bool:
        """Send the next run as far as the socket takes it; return False when nothing is left.

        Raises: BlockingIOError when the socket takes nothing; OSError.
        """
        run = self._run
        if run is None:
            if not self._queue:
                return False
            run = self._run = self._next_run()
        if isinstance(run, PayloadRun):
            if run.send(sock.fileno()):
                self._run = None
        elif isinstance(run, MemoryFrame):
            self._run = memoryview(run.frame)[run.send(sock) :] or None
        else:
            sent = sock.send(run)
            self._run = None if sent == len(run) else memoryview(run)[sent:]
        return True

    def _next_run(self) -> PayloadRun | bytes | MemoryFrame:
        item = self._queue[0]
        if not isinstance(item, InlineReply):
            self._reply = None
            self._queued_size -= len(item)
            self._queue.popleft()
            return item
        self._reply = item
        equal = MOST_UNSENT // max(self._user.sessions, 1)
        run = item.next_run(min(max(equal, SMALLEST_RUN_SIZE), RUN_SIZE))
        if item.finished:
            self._queue.popleft()
        return run

    def clear(self) -> None:
        """Drop everything: the client is gone."""
        self._queue.clear()
        self._run = None
        self._queued_size = 0
        self.count()

    def stop(self, tag: int) -> None:
        """The scheduler takes the pins of a reply back: copy the rest of its run, end it after."""
        run, reply = self._run, self._reply
        if reply is not None and reply.tag == tag and isinstance(run, PayloadRun):
            self._run = run.rest()
        for item in self._queue:
            if isinstance(item, InlineReply) and item.tag == tag:
                item.stop()
        self.count()
