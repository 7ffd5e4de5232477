"""Samples on their way through a socket, for clients that cannot map the arena.

A delivery is what one GET asked for: the places of its samples in the arena, which stay pinned
until the last byte was handed to the kernel. It is cut into runs, each of which goes from the arena
to the socket by one or a few calls of C, without a copy of our own: samples of REFER_SIZE and more
by reference, if the client may have them so (`references`), the others copied by the kernel. When
others wait for room and the client is slow, the pins are taken back: what is left of the run under
way is copied (RUN_SIZE at most) unless it has pins of its own, and the client asks for the rest
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ffserve import protocol
from ffserve.cache.cache import Int64s
from ffserve.cache.shm import SharedMemory
from ffserve.engine.sending import Run
from ffserve.server.references import Unread

RUN_SIZE = 4 * 1024 * 1024
"""Bytes in one run of copies: twice what a socket takes, so that few calls end early."""
REFERRED_RUN_SIZE = protocol.MAX_FRAME_SIZE
"""Bytes in one run by reference, in a large arena; nobody has to copy what is left of it."""
RUN_COUNT = 512
"""Samples in one run."""
REFER_SIZE = 16 * 1024
"""From here on a sample goes by reference: below, a system call each costs more than copying."""

Item: TypeAlias = "memoryview | Run"
"""What is sent next: a frame, or samples behind their frames."""


class Delivery:
    """The samples of one GET: SENDING, PAYLOADs, READY.

    Args:
        memory: the arena.
        starts, lengths: int64[n], of each sample in the arena; length 0 for what failed.
        slots: int64[n], what each lies in.
        unread: the socket's account if samples may go by reference.
        over: called once, with the number of samples that were sent whole; returns the READY.
    """

    def __init__(
        self,
        tag: int,
        memory: SharedMemory,
        starts: Int64s,
        lengths: Int64s,
        slots: Int64s,
        unread: Unread | None,
        over: Callable[[int], protocol.Ready],
    ) -> None:
        self.tag = tag
        self.over = False
        self._memory = memory
        self._starts = starts
        self._lengths = lengths
        self._slots = slots
        self._ends = np.cumsum(lengths)
        self._unread = unread
        self._end = over
        self._begun = self._stopped = False
        self._sent = 0
        """Bytes of all runs so far, the one under way included."""

    def stop(self) -> None:
        """The pins are gone: no further run."""
        self._stopped = True

    def run(self) -> Item:
        """Return what is to be sent next; `over` is set when nothing comes after it."""
        ends = self._ends
        first = int(ends.searchsorted(self._sent, side="right"))
        head = b""
        if not self._begun and not self._stopped:
            self._begun = True
            lengths = self._lengths.astype("<u8").tobytes()
            head = protocol.encode(protocol.Sending(self.tag, lengths))
        if self._stopped or first == len(ends):
            self.over = True
            return memoryview(head + protocol.encode(self._end(first)))
        if (
            self._unread is not None
            and self._lengths[first : first + RUN_COUNT].max() >= REFER_SIZE
        ):
            most = min(REFERRED_RUN_SIZE, self._unread.run_size)
            run = self._cut(head, first, most, REFER_SIZE)
            if run is not None:
                return run
        run = self._cut(head, first, RUN_SIZE, 0)
        assert run is not None
        return run

    def _cut(self, head: bytes, first: int, most: int, refer_from: int) -> Run | None:
        """Return the run of at most `most` bytes that begins inside of a sample; None: it may not
        go by reference."""
        ends, begin = self._ends, self._sent
        last = min(first + RUN_COUNT, int(ends.searchsorted(begin + most)) + 1, len(ends))
        end = min(begin + most, int(ends[last - 1]))
        head += protocol.encode(protocol.Payload(self.tag, end - begin))
        starts, lengths = self._starts[first:last].copy(), self._lengths[first:last].copy()
        if refer_from:
            assert self._unread is not None
            # All of the run, so that it needs the request's pins no more.
            slots = self._slots[first:last][lengths > 0]
            if not self._unread.refer(slots, self._unread.position + len(head) + end - begin):
                return None
        begun = begin - int(ends[first] - lengths[0])
        starts[0] += begun
        lengths[0] -= begun
        lengths[-1] -= int(ends[last - 1]) - end
        self._sent = end
        return Run(head, self._memory.fd, self._memory.array, starts, lengths, refer_from)


class Outbox:
    """Frames and deliveries in the order in which they leave through a socket.

    Args: wake: called when there is something to send.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.unread: Unread | None = None
        """Set where samples may go by reference, before the first of them."""
        self._wake = wake
        self._queue: deque[bytes | Delivery] = deque()
        self._now: Item | None = None
        self._delivery: Delivery | None = None
        """Whose run is under way."""
        self.frames_size = 0
        """Bytes of frames that wait."""

    def __bool__(self) -> bool:
        return self._now is not None or bool(self._queue)

    def put(self, item: bytes | Delivery) -> None:
        """Append a frame or a delivery."""
        self._queue.append(item)
        if isinstance(item, bytes):
            self.frames_size += len(item)
        self._wake()

    def take(self) -> Item | None:
        """Return what to send next; None when there is nothing. `sent` must follow."""
        if self._now is None and self._queue:
            item = self._queue[0]
            if isinstance(item, bytes):
                self._now = memoryview(item)
                self.frames_size -= len(item)
                self._queue.popleft()
                self._delivery = None
            else:
                self._now = item.run()
                self._delivery = item
                if item.over:
                    self._queue.popleft()
        return self._now

    def sent(self, size: int) -> None:
        """So many bytes of what `take` returned have left."""
        if self.unread is not None:
            self.unread.position += size
        now = self._now
        if isinstance(now, Run):
            now.sent += size
            if now.sent == now.size:
                self._now = None
        elif now is not None:
            self._now = now[size:] if size < len(now) else None

    def clear(self) -> None:
        """Nobody is there to send to."""
        self._queue.clear()
        self._now = None

    def stop(self, tag: int) -> None:
        """The pins of a delivery are taken back: copy what is left of its run."""
        now, delivery = self._now, self._delivery
        # What goes by reference has pins of its own.
        if delivery is not None and delivery.tag == tag and isinstance(now, Run):
            self._now = now if now.referred else memoryview(now.rest())
        for item in self._queue:
            if isinstance(item, Delivery) and item.tag == tag:
                item.stop()
