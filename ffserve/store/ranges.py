"""Ranged reads: bytes of one version of a remote object, straight from its origin; none are kept.

Threads of the origin fetch ranges, several at once. Timeouts, retries and the state of an origin
are in `fetching.py`.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from ffserve.errors import FFServeError
from ffserve.formats.base import ReadAt
from ffserve.formats.ffrecord import LAST_SIZE
from ffserve.limits import ASKED_AT_ONCE, HEAD_SIZE, OPENED_AT_ONCE
from ffserve.store import urls
from ffserve.store.directory import BLOCK_SIZE
from ffserve.store.fetching import NOW, Outcome, breaker_of, call, threads_of
from ffserve.store.origin import ObjectVersion, RemoteFile
from ffserve.store.schemes import scheme_of
from ffserve.store.schemes.scheme import Sent

T = TypeVar("T")
R = TypeVar("R")

RANGE_SIZE = 4 << 20
"""One request has at most this many bytes; larger ranges come by several requests at once."""
PIECE_SIZE = 1 << 20
KEPT_SIZE = 32 << 20
"""Opening a file keeps this many bytes, since some tables are read twice."""
MOST_AHEAD = 16
"""A reader in order has at most this many pieces fetched ahead."""
IN_ORDER, NEAR = 3, 64 << 10
"""Reads in order, with gaps of this many bytes at most, after which more are expected. Opening a
file with tables takes fewer."""


class RangedObject:
    """A version of a remote object that is read by ranges. Threads may call it.

    Args: range_size: bytes of one request at most. systems: as of `origin.file_system`.
    """

    def __init__(
        self,
        identity: ObjectVersion,
        range_size: int = RANGE_SIZE,
        systems: dict[str, Any] | None = None,
    ) -> None:
        self._range_size = range_size
        self.identity, self.size = identity, identity.size
        self.shown = urls.shown(identity.url)
        self._remote = RemoteFile(identity, block_size=BLOCK_SIZE, systems=systems)
        self._head, self._head_used = b"", 0
        """The first bytes, while the object is opened, and how many of them were read."""
        self._last = 0, b""
        """Bytes that came with these, and where they begin."""

    def after_fork(self) -> None:
        """Prepare a child process to connect anew."""
        self._remote.after_fork()

    def fetch(self, start: int, end: int, *, direct: bool = False) -> bytes:
        """Return bytes; the calling thread fetches them if its scheme lets it.

        Args:   direct: as of `RemoteFile.read`.
        Raises: FFServeError.
        """
        begin, content = self._last
        if self._is_last(start, end) and not direct:
            return content[start - begin : end - begin]
        if scheme_of(self.identity.url).at_once > ASKED_AT_ONCE:
            return self._fetch(start, end, direct)
        return bytes_of(self.ask(start, end, direct=direct))

    def _fetch(self, start: int, end: int, direct: bool) -> bytes:
        return call(self.identity.url, partial(self._remote.read, start, end, direct=direct))

    def _is_last(self, start: int, end: int) -> bool:
        begin, content = self._last
        return begin <= start and end <= begin + len(content)

    def send(self, start: int, end: int) -> Sent | None:
        """Send the request of a later `fetch`, as of `OpenVersion`."""
        if self._is_last(start, end):
            return Sent()
        return self._remote.send(start, end) if breaker_of(self.identity.url).works else None

    def send_head(self) -> Sent | None:
        """Send the request of `head`, as of `OpenVersion`."""
        done = self._head or not self.size
        return Sent() if done else self.send(0, min(HEAD_SIZE, self.size))

    def head(self) -> bytes:
        """Return the first HEAD_SIZE bytes, which the next `read_at` has then.

        Raises: as `fetch`.
        """
        if not self._head:
            self._head = self.fetch(0, min(HEAD_SIZE, self.size)) if self.size else b""
        return self._head

    def spare(self, last: int) -> None:
        """Keep only those of the first bytes that were read, which may be read once more, and some
        from the offset `last` on, if they are there."""
        self._last = last, self._head[last : last + LAST_SIZE]
        self._head = self._head[: self._head_used]

    def ask(self, start: int, end: int, *, direct: bool = False) -> Future[Outcome]:
        """Ask for bytes; return at once. The exception of the future is an FFServeError.

        Args: direct: as of `fetch`.
        """
        future: Future[Outcome] = Future()
        threads_of(self.identity.url).put(NOW, partial(self._fetch, start, end, direct), future)
        return future

    def ask_all(
        self, start: int, end: int, *, direct: bool = False
    ) -> list[tuple[int, int, Future[Outcome]]]:
        """Ask for an extent, as far as the object has bytes there, by requests of limited size.

        Args:    direct: as of `fetch`.
        Returns: begin, end and future of each.
        """
        end, size, first = min(end, self.size), self._range_size, start
        if not direct and self._remote.is_cached:  # each block by itself
            size, first = BLOCK_SIZE, start // BLOCK_SIZE * BLOCK_SIZE
        edges = [start, *range(first + size, end, size), end]
        return [(a, b, self.ask(a, b, direct=direct)) for a, b in pairwise(edges) if a < b]

    def ask_again(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield the bytes of an extent that has come damaged, unless the origin fails."""
        with contextlib.suppress(FFServeError):
            coming = self.ask_all(offset, offset + length, direct=True)
            yield memoryview(b"".join(bytes_of(future) for _, _, future in coming))

    def read_at(self, *, direct: bool = False) -> ReadAt:
        """Return a `ReadAt` for one thread. Bytes that are read in order are asked for ahead.

        Args:   direct: as of `fetch`.
        Raises: as `fetch`, when it is called.
        """
        head = min(HEAD_SIZE, self.size)
        self._head, self._head_used = b"" if direct else self._head, 0
        pieces: _Pieces | None = None
        last, streak = range(0), 0
        kept: dict[range, bytes] = {}
        room = KEPT_SIZE

        def read(offset: int, into: memoryview, /) -> int:
            nonlocal pieces, last, streak, room
            end = min(offset + len(into), self.size)
            if end <= offset:
                return 0
            if end <= head:
                if end > len(self._head):
                    self._head = self.fetch(0, head, direct=direct)
                self._head_used = max(self._head_used, end)
                into[: end - offset] = self._head[offset:end]
                return end - offset
            streak = streak + 1 if last.start <= offset <= last.stop + NEAR else 0
            last = range(offset, end)
            content = kept.get(last)
            if streak < IN_ORDER:
                pieces = None
            if content is None and streak < IN_ORDER:
                asked = self.ask_all(offset, end, direct=direct)
                content = b"".join(bytes_of(future) for _, _, future in asked)
            elif content is None:
                pieces = pieces or _Pieces(partial(self.ask, direct=direct), self.size, offset)
                content = pieces.read(last, min(1 << (streak - IN_ORDER), MOST_AHEAD))
            if len(content) <= room and last not in kept:
                kept[last] = content
                room -= len(content)
            into[: end - offset] = content
            return end - offset

        return read


def at_once(
    call: Callable[[T], R], items: Sequence[T], some: Sequence[str], most: int = OPENED_AT_ONCE
) -> list[R]:
    """Return the results of calls of origins, several at the same time.

    Args: some: URLs of the items. most: how many at the same time, if their schemes allow it.
    Raises: the error of the first that failed.
    """
    return in_threads(call, items, min(most, _most_at_once(some)))


def pipelined(
    call: Callable[[T], R],
    send: Callable[[T], Sent | None],
    items: Sequence[T],
    some: Sequence[str],
    most: int = OPENED_AT_ONCE,
) -> Iterator[R]:
    """Yield the results of calls of origins, of which several are answered at the same time.

    The request of a later call is sent when the answer to an earlier one was read. So one thread is
    enough, and hands the interpreter to nobody, which takes as long as the rest. Where no
    connection is open, threads open them.

    Args: send: sends the request of a later call, as of `OpenVersion`. Others as of `at_once`.
    Raises: what the calls raise.
    """
    most = min(most, _most_at_once(some))
    sent = {k: request for k, item in enumerate(items[:most]) if (request := send(item))}
    try:
        for low in range(0, len(items), most):
            group = range(low, min(low + most, len(items)))
            new = [k for k in group if k not in sent]
            found = dict(zip(new, in_threads(call, [items[k] for k in new], most), strict=True))
            for k in group:
                result = found.pop(k) if k in found else call(items[k])
                if k in sent:
                    sent.pop(k).close()
                if k + most < len(items) and (request := send(items[k + most])):
                    sent[k + most] = request
                yield result
    finally:
        for request in sent.values():
            request.close()


def _most_at_once(some: Sequence[str]) -> int:
    places = {url.partition("://")[0] + "://" for url in some}
    return min([OPENED_AT_ONCE, *(scheme_of(url).at_once for url in places)])


def in_threads(call: Callable[[T], R], items: Sequence[T], most: int) -> list[R]:
    """Return the results of calls, at most so many at the same time. A process that ends does not
    wait for them.

    Raises: the error of the first that failed.
    """
    if len(items) < 2:
        return [call(item) for item in items]
    found, failed = dict[int, R](), dict[int, BaseException]()
    left = enumerate(items)

    def work() -> None:
        for k, item in left:  # a step of it is one call of C, so two threads never get the same
            if failed:
                return
            try:
                found[k] = call(item)
            except BaseException as error:
                failed[k] = error

    threads = [
        threading.Thread(target=work, name="ffserve-open", daemon=True)
        for _ in range(min(len(items), most))
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: nothing else begins
        failed[-1] = error
    if failed:
        raise failed[min(failed)]
    return [found[k] for k in range(len(items))]


class _Pieces:
    """The pieces of an object that a reader in order has asked for, from an offset on."""

    def __init__(self, ask: Callable[[int, int], Future[Outcome]], size: int, offset: int) -> None:
        self._ask, self._size, self._offset = ask, size, offset
        self._coming: dict[int, Future[Outcome]] = {}

    def read(self, wanted: range, ahead: int) -> bytes:
        """Return bytes, and ask for so many pieces behind them. Raises: as `bytes_of`."""
        first = (wanted.start - self._offset) // PIECE_SIZE
        behind = -(-(wanted.stop - self._offset) // PIECE_SIZE)
        for piece in [piece for piece in self._coming if piece < first]:
            del self._coming[piece]
        parts = []
        try:
            for piece in range(first, behind + ahead):
                begin = self._offset + piece * PIECE_SIZE
                end = min(begin + PIECE_SIZE, self._size)
                if begin < end and piece not in self._coming:
                    self._coming[piece] = self._ask(begin, end)
            for piece in range(first, behind):
                begin = self._offset + piece * PIECE_SIZE
                content = bytes_of(self._coming[piece])
                parts.append(content[max(wanted.start - begin, 0) : wanted.stop - begin])
        except FFServeError:
            self._coming.clear()
            raise
        return b"".join(parts)


class ReadAtStream(io.RawIOBase):
    """A stream that can seek, over the bytes of a file of known size."""

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at, self._size = read_at, size
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read from another offset next; return it."""
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        self._at = origins[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer; return how many. Raises: FFServeError."""
        size = self._read_at(self._at, memoryview(buffer).cast("B"))
        self._at += size
        return size


def bytes_of(future: Future[Outcome]) -> bytes:
    """Wait for bytes that were asked for. Raises: FFServeError."""
    content = future.result()
    assert isinstance(content, bytes)
    return content
