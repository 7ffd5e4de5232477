"""What lies in clients' sockets by reference, and the pins that keep it as it is.

A large sample goes into a socket as the arena's own pages (`engine/sending.c`), so its slot must
neither be evicted nor written to until the client has read it. The pins for that are taken run by
run, apart from those of the request, and given back when the kernel says that the bytes are gone:
it is not asked of the client, who may die, stop or lie. A socket that was closed on our side is
kept until then, since its peer can still read what is in it.

A client that never reads keeps what is in its socket. All of them together keep REFERRED_SHARE of
the arena at most; beyond that samples are copied.

What was received by reference can be held by reference (splice, tee), and be looked at when other
samples lie there. So it is only done for those who may see the whole arena.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from ffserve.cache.cache import Cache, Int64s
from ffserve.engine.sending import unread

REFERRED_SHARE = 8
"""One part in this many of the arena."""
RUN_SHARE = 4
"""Of that, what one run has at most."""
SEND_BUFFER_SIZE = 4 * 1024 * 1024
"""Of a socket that holds references, which take no memory: a client that copies 4 MiB waits for
nobody."""
_SO_SNDBUFFORCE = 32


def widen(sock: socket.socket, size: int) -> None:
    """Give a socket that samples go through a larger buffer, so that both sides work at once.

    The usual 208 KiB cost a wake for every two samples of 100 KiB. What the kernel allows is
    taken (net.core.wmem_max; any size for root).
    """
    for option in (socket.SO_SNDBUF, _SO_SNDBUFFORCE):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, size)


class References:
    """Of all sockets."""

    def __init__(self, cache: Cache) -> None:
        self.size = 0
        """Bytes of the slots that are kept."""
        self._cache = cache
        self._holding: set[Unread] = set()
        self._lingering: set[Unread] = set()

    def of(self, sock: socket.socket) -> Unread | None:
        """Return the account of a socket; None where the kernel does not say what was read."""
        try:
            unread(sock.fileno())
        except OSError:
            return None
        return Unread(self, sock)

    @property
    def lingering_count(self) -> int:
        """Sockets that are only kept until they are read."""
        return len(self._lingering)

    def look(self) -> None:
        """Give back the pins of what was read meanwhile."""
        for account in list(self._holding):
            account.look()

    @property
    def most(self) -> int:
        """Bytes of slots that may be kept."""
        return self._cache.arena.size // REFERRED_SHARE

    def take(self, account: Unread, slots: Int64s) -> int | None:
        """Pin slots; return their size in bytes, or None when they are too much."""
        size = int(self._cache.arena.sizes(slots).sum())
        if self.size + size > self.most:
            self.look()
            if self.size + size > self.most:
                return None
        self._cache.hold(slots)
        self.size += size
        self._holding.add(account)
        return size

    def give_back(self, slots: Int64s, size: int) -> None:
        """Undo a `take`."""
        self._cache.release([slots])
        self.size -= size

    def linger(self, account: Unread) -> None:
        """An account waits without a connection."""
        self._lingering.add(account)

    def forget(self, account: Unread) -> None:
        """An account holds nothing any more."""
        self._holding.discard(account)
        self._lingering.discard(account)

    def abandon(self) -> None:
        """Close the sockets that linger: from here on nothing is written to the arena."""
        for account in list(self._lingering):
            account.abandon()


class Unread:
    """What lies in one socket. It owns that when it was told to `close`."""

    def __init__(self, references: References, sock: socket.socket) -> None:
        self.position = 0
        """Bytes that were sent so far, or fewer."""
        self._references = references
        self._sock = sock
        self._held: deque[tuple[int, Int64s, int]] = deque()
        """Position behind a run, its slots, their size."""
        self._closing = self._wide = False

    @property
    def run_size(self) -> int:
        """Bytes that one run should have at most."""
        return self._references.most // RUN_SHARE

    def refer(self, slots: Int64s, end: int) -> bool:
        """Pin slots until all before the position `end` was read; False: copy instead."""
        self.look()
        size = self._references.take(self, slots)
        if size is None:
            return False
        self._held.append((end, slots, size))
        if not self._wide:
            self._wide = True
            widen(self._sock, SEND_BUFFER_SIZE)
        return True

    def look(self) -> None:
        """Give back the pins of what was read."""
        if not self._held:
            return
        # The kernel counts a buffer as a whole until its last byte was read, and more than its
        # bytes: what it calls read was.
        read = self.position - unread(self._sock.fileno())
        while self._held and self._held[0][0] <= read:
            _, slots, size = self._held.popleft()
            self._references.give_back(slots, size)
        if not self._held:
            self._references.forget(self)
            if self._closing:
                self._sock.close()

    def close(self) -> None:
        """Close the socket, now or when its peer has read what lies there, or has gone."""
        self._closing = True
        if not self._held:
            self._sock.close()
            return
        # Nothing more is sent.
        ends = deque((min(end, self.position), slots, size) for end, slots, size in self._held)
        self._held = ends
        self._references.linger(self)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.look()

    def abandon(self) -> None:
        """Close the socket whatever lies there."""
        self._references.forget(self)
        self._sock.close()
