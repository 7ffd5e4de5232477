"""Samples on their way through a socket, for clients that cannot map the arena.

A delivery is what one GET asked for: the places of its samples in the arena, which stay pinned
until the last byte was handed to the kernel. It is cut into runs; a run is gathered from the arena
by one or a few sendmsg calls, without a copy of our own. When others wait for room and the client
is slow, the pins are taken back: what is left of the run under way is copied (RUN_SIZE at most),
and the client asks for the rest again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol

RUN_SIZE = 4 * 1024 * 1024
"""Bytes in one run: twice what a socket takes, so that few calls of sendmsg end early."""
RUN_COUNT = 512
"""Samples in one run."""
MOST_PIECES = 1024
"""What one sendmsg takes (IOV_MAX)."""


class Delivery:
    """The samples of one GET: SENDING, PAYLOADs, READY.

    Args:
        arena: the arena's bytes.
        starts, lengths: int64[n], of each sample in the arena; length 0 for what failed.
        over: called once, with the number of samples that were sent whole; returns the READY.
    """

    def __init__(
        self,
        tag: int,
        arena: memoryview,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        over: Callable[[int], protocol.Ready],
    ) -> None:
        self.tag = tag
        self.over = False
        self._arena = arena
        self._starts = starts
        self._lengths = lengths
        self._ends = np.cumsum(lengths)
        self._end = over
        self._begun = self._stopped = False
        self._sent = 0
        """Bytes of all runs so far, the one under way included."""

    def stop(self) -> None:
        """The pins are gone: no further run."""
        self._stopped = True

    def run(self) -> list[bytes | memoryview]:
        """Return what is to be sent next; `over` is set when nothing comes after it."""
        first = int(np.searchsorted(self._ends, self._sent, side="right"))
        pieces: list[bytes | memoryview] = []
        if not self._begun and not self._stopped:
            self._begun = True
            lengths = self._lengths.astype("<u8").tobytes()
            pieces.append(protocol.encode(protocol.Sending(self.tag, lengths)))
        if self._stopped or first == len(self._ends):
            self.over = True
            return [*pieces, protocol.encode(self._end(first))]
        last = min(first + RUN_COUNT, len(self._ends))
        end = min(self._sent + RUN_SIZE, int(self._ends[last - 1]))
        pieces.append(protocol.encode(protocol.Payload(self.tag, end - self._sent)))
        pieces.extend(self._pieces(first, end))
        self._sent = end
        return pieces

    def _pieces(self, first: int, end: int) -> Iterator[memoryview]:
        at = self._sent
        ends = self._ends[first : first + RUN_COUNT].tolist()
        starts = self._starts[first : first + RUN_COUNT].tolist()
        begin = int(self._ends[first - 1]) if first else 0
        for start, upto in zip(starts, ends, strict=True):
            if at >= end:
                return
            if upto > at:
                piece = min(upto, end) - at
                place = start + (at - begin)
                yield self._arena[place : place + piece]
                at += piece
            begin = upto


class Outbox:
    """Frames and deliveries in the order in which they leave through a socket.

    Args: wake: called when there is something to send.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: deque[bytes | Delivery] = deque()
        self._now: deque[bytes | memoryview] = deque()
        self._delivery: Delivery | None = None
        """Whose run is under way."""
        self.frames_size = 0
        """Bytes of frames that wait."""

    def __bool__(self) -> bool:
        return bool(self._now or self._queue)

    def put(self, item: bytes | Delivery) -> None:
        """Append a frame or a delivery."""
        self._queue.append(item)
        if isinstance(item, bytes):
            self.frames_size += len(item)
        self._wake()

    def take(self) -> list[bytes | memoryview]:
        """Return what to send next; empty when there is nothing. `sent` must follow."""
        while not self._now and self._queue:
            item = self._queue[0]
            if isinstance(item, bytes):
                self._now.append(item)
                self.frames_size -= len(item)
                self._queue.popleft()
                self._delivery = None
                continue
            self._now.extend(item.run())
            self._delivery = item
            if item.over:
                self._queue.popleft()
        return list(islice(self._now, MOST_PIECES))

    def sent(self, size: int) -> None:
        """So many bytes of what `take` returned have left."""
        while size:
            piece = self._now[0]
            if len(piece) > size:
                self._now[0] = memoryview(piece)[size:]
                return
            size -= len(piece)
            self._now.popleft()

    def clear(self) -> None:
        """Nobody is there to send to."""
        self._queue.clear()
        self._now.clear()

    def stop(self, tag: int) -> None:
        """The pins of a delivery are taken back: copy what is left of its run."""
        if self._delivery is not None and self._delivery.tag == tag and self._now:
            self._now = deque([b"".join(self._now)])
        for item in self._queue:
            if isinstance(item, Delivery) and item.tag == tag:
                item.stop()
