"""Ranged reads: bytes of one version of a remote object, straight from its origin; none are kept.

Ranges come in threads of their origin, several at once. Waiting, retries and what is known of an
origin are those of `fetching.py`.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from itertools import pairwise

from ffserve.formats.base import ReadAt
from ffserve.store import urls
from ffserve.store.fetching import NOW, Outcome, call, threads_of
from ffserve.store.origin import Identity, RemoteFile

RANGE_SIZE = 4 << 20
"""Bytes of one request at most: larger ranges come by several, at once."""
HEAD_SIZE = 64 << 10
"""Bytes that are read first of an object that is opened: a small one's tables are among them."""
PIECE_SIZE = 1 << 20
MOST_AHEAD = 16
"""Pieces that are asked for ahead of a reader in order."""
IN_ORDER = 3
"""Reads in order after which more are expected. Opening a file with tables takes fewer."""


class RangedObject:
    """A version of a remote object that is read by ranges. Threads may call it."""

    def __init__(self, identity: Identity) -> None:
        self.identity, self.size = identity, identity.size
        self.shown = urls.shown(identity.url)
        self._remote = RemoteFile(identity)

    def ask(self, start: int, end: int) -> Future[Outcome]:
        """Ask for bytes; return at once. The exception of the future is an FFServeError."""
        future: Future[Outcome] = Future()
        url = self.identity.url
        threads_of(url).put(NOW, lambda: call(url, partial(self._remote.read, start, end)), future)
        return future

    def ask_all(self, start: int, end: int) -> list[tuple[int, int, Future[Outcome]]]:
        """Ask for bytes by requests of at most RANGE_SIZE: begin, end and future of each."""
        edges = [*range(start, end, RANGE_SIZE), end]
        return [(a, b, self.ask(a, b)) for a, b in pairwise(edges)]

    def read_at(self) -> ReadAt:
        """Return a `ReadAt` for one thread. What is read in order is asked for ahead.

        Raises: as `ask`, when it is called.
        """
        head = min(HEAD_SIZE, self.size)
        first_bytes = self.ask(0, head) if head else None
        coming: dict[int, Future[Outcome]] = {}
        last, streak = -1, 0

        def read(offset: int, into: memoryview, /) -> int:
            nonlocal last, streak
            end = min(offset + len(into), self.size)
            if end <= offset:
                return 0
            if end <= head and first_bytes is not None:
                into[: end - offset] = bytes_of(first_bytes)[offset:end]
                return end - offset
            first, behind = offset // PIECE_SIZE, -(-end // PIECE_SIZE)
            streak = streak + 1 if first - last in (0, 1) else 0
            last = behind - 1
            if streak < IN_ORDER:
                coming.clear()
                parts = [bytes_of(future) for _, _, future in self.ask_all(offset, end)]
            else:
                ahead = min(1 << (streak - IN_ORDER), MOST_AHEAD)
                parts = self._pieces(coming, offset, end, range(first, behind), ahead)
            into[: end - offset] = b"".join(parts)
            return end - offset

        return read

    def _pieces(
        self, coming: dict[int, Future[Outcome]], start: int, end: int, wanted: range, ahead: int
    ) -> list[bytes]:
        """Return bytes, of pieces that are kept in `coming`, and ask for those behind them."""
        for piece in [piece for piece in coming if piece < wanted.start]:
            del coming[piece]
        count = -(-self.size // PIECE_SIZE)
        for piece in range(wanted.start, min(wanted.stop + ahead, count)):
            begin = piece * PIECE_SIZE
            if piece not in coming or (coming[piece].done() and coming[piece].exception()):
                coming[piece] = self.ask(begin, min(begin + PIECE_SIZE, self.size))
        parts = []
        for piece in wanted:
            begin = piece * PIECE_SIZE
            parts.append(bytes_of(coming[piece])[max(start - begin, 0) : end - begin])
        return parts


def bytes_of(future: Future[Outcome]) -> bytes:
    """Wait for bytes that were asked for. Raises: FFServeError."""
    content = future.result()
    assert isinstance(content, bytes)
    return content
