"""Client side of the protocol, without I/O: the requests and answers of one connection.

A driver owns the socket: `connection` with blocking calls, for threads; `loop` in an event loop. It
sends `output`, hands what it receives to `feed`, and wakes the waiters of the tags that were
answered. Everything else is decided here: tags, acknowledgements, counters,
which messages are kept back, and how answers are given back that no thread or task waits for.

Two kinds of messages leave a client. *Requests* are queued at once, except that a GET or LEASE is
kept back while the daemon has as many as it takes. *Reports* (counters, acknowledgements, closed
data sets, the position in an order) are state until everything queued was sent, and are written
then; so they do not pile up in front of a daemon that reads nothing.

A channel may be used by threads. The lock is held for bookkeeping only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.client.daemon.mapped_memory import Memories
from ffserve.client.daemon.passed_files import DatasetRequest, DescribedFiles, PassedFiles
from ffserve.client.source import Target
from ffserve.dtypes import Int64s
from ffserve.errors import FFServeError, ProtocolError, ServerUnavailable
from ffserve.protocol import Message

T = TypeVar("T")

REPORT_INTERVAL_S = 1.0
"""How often a client that only hits reports its counters."""
ANSWER_TIMEOUT_S = 120.0
"""A daemon that lives but owes an answer for this long (its disk is dead) counts as gone. Its own
limits on waiting are far below that."""
ORDER_PIECE = 16_384
"""One ORDER has at most this many positions: the daemon serves others between the pieces."""
RECEIVE_SIZE = 256 * 1024
_ANSWERS: dict[type[Message], tuple[type[Message], ...]] = {
    protocol.Open: (protocol.Opened, protocol.Need),
    protocol.Get: (protocol.Ready,),
    protocol.Lease: (protocol.Ready,),
    protocol.Order: (protocol.Ready,),
    protocol.Status: (protocol.Report,),
    protocol.Resize: (protocol.Report,),
    protocol.Prepare: (protocol.Opened, protocol.Need),
    protocol.Claim: (protocol.Claimed,),
    protocol.Put: (protocol.Ready,),
    protocol.Names: (protocol.Named,),
}
"""The answers to each request, besides FAIL."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A step: work that may wait for a file system. drop: called for results that are not taken any
    more."""

    make: Callable[[], Any]
    drop: Callable[[Any], object] | None = None


Steps: TypeAlias = Generator["int | float | Beside | Int64s | None", Any, T]
"""The steps of a request, for a driver. Yields an int, the tag of an answer, and is sent that
message; a float, a pause in seconds; `Beside`, and is sent the result; positions (None: all of the
request) to be copied, and is sent those that could not be. If it is closed the request is given
up."""


class SilentError(ServerUnavailable):
    """The daemon owes an answer and sends nothing: it is stopped."""


class Copying(Protocol):
    """A request whose steps copy samples."""

    @property
    def target(self) -> Target:
        """Where they are copied to."""
        ...

    def copy(self, positions: Int64s | None) -> Int64s:
        """Copy samples; return the positions of those that could not be read."""
        ...


@dataclass(slots=True)
class _Waiting:
    """A request without a collected answer. since: when it was made, on the monotonic clock.
    given_up: nobody will collect it."""

    kind: type[Message]
    dataset: int | None
    since: float
    answer: Message | None = None
    given_up: bool = False


class Channel:
    """See the module's text.

    Args:
        path: the daemon's socket, for error messages.
        decoder: of what the daemon sends.
        takes_orders: the daemon wants ORDER, REACHED and SEEN.
        memories: take what comes with OPENED; None: no data set is opened.
    """

    def __init__(
        self,
        path: str,
        decoder: protocol.Decoder,
        *,
        takes_orders: bool,
        memories: Memories | None,
    ) -> None:
        self.path = path
        self.memories = memories
        self._opening: set[int] = set()
        """Tags of OPENs without an answer, or with NEED."""
        self.lock = threading.RLock()
        self.broken: FFServeError | None = None
        self.leased: set[int] = set()
        """Tags of LEASEs that were not released."""
        self.urgent = False
        """A request waits to be sent."""
        self.report_due = False
        """A report that does not wait for the next request: `queue_reports` queues it."""
        self._takes_orders = takes_orders
        self._decoder = decoder
        self._next_tag = 1
        self._queue: list[bytes] = []
        self._front = memoryview(b"")
        """The bytes that are being sent."""
        self._files: deque[tuple[bytes, PassedFiles]] = deque()
        """FILES to be sent, each by itself, before the queue."""
        self._passing: PassedFiles | None = None
        """Goes with the first byte of `_front`."""
        self._waiting: dict[int, _Waiting] = {}
        self.unanswered: set[int] = set()
        """Tags of GETs and LEASEs that were sent."""
        self._kept_back: deque[tuple[int, bytes]] = deque()
        """GETs and LEASEs beyond MOST_REQUESTS, by tag."""
        self._acknowledged: list[int] = []
        self._hits = self._hit_size = 0
        self.takes_times = self.tells_last = False
        """Whether the daemon wants TIMES."""
        self._times: NDArray[np.uint64] | None = None
        """How long hits took, not reported yet; see `MappedView.take_times`."""
        self._times_reported = self._reported = time.monotonic()
        self._prepared_hits: dict[int, tuple[int, int]] = {}
        """Hits and their bytes, by data set of prepared samples."""
        self._datasets: set[int] = set()
        """Data sets that are open."""
        self._closed_datasets: list[int] = []
        self._positions: dict[int, tuple[int, int]] = {}

    # ---- requests -------------------------------------------------------------------------

    def open(self, request: DatasetRequest, files: DescribedFiles) -> int:
        """Queue an OPEN; return its tag. The answer may be a NEED: `pass_files` then, and wait for
        the next answer to the tag."""
        what: dict[str, Any] = {
            "paths": list(request.paths),
            "format": request.format,
            "verify": request.verify,
            "tolerant": request.tolerant,
        }
        if files.tags is not None:
            what["tags"], what["access"] = files.tags, files.access
            what["parts"] = request.parts
        message = protocol.Open(self._tag(), what, files.identities)
        with self.lock:
            tag = self._request(message)
            self._opening.add(tag)
            return tag

    def prepare(self, dataset: int | None, key: bytes, what: dict[str, Any]) -> int:
        """Queue a PREPARE; return its tag. The answer is a NEED, as to an OPEN. Args: dataset:
        None: the samples are made of no file."""
        with self.lock:
            tag = self._request(protocol.Prepare(self._tag(), dataset or 0, key, what), dataset)
            self._opening.add(tag)
            return tag

    def members(self, dataset: int, blocks: Sequence[tuple[int, int]]) -> int:
        """Queue a NAMES of at most MOST_NAMED blocks; return its tag."""
        packed = np.array(blocks, "<u4").tobytes()
        return self._request(protocol.Names(self._tag(), dataset, packed), dataset)

    def claim(self, dataset: int, indices: Int64s, *, wait: bool) -> int:
        """Queue a CLAIM; return its tag."""
        packed = protocol.pack_indices(indices)
        return self._request(protocol.Claim(self._tag(), dataset, packed, int(wait)), dataset)

    def put(
        self, dataset: int, indices: Int64s, places: Int64s, lengths: Int64s, cost_us: int
    ) -> int:
        """Queue a PUT of samples in the memory file; return its tag."""
        which, where, sizes = map(protocol.pack_indices, (indices, places, lengths))
        message = protocol.Put(self._tag(), dataset, which, where, sizes, cost_us)
        return self._request(message, dataset)

    def distrust(self, dataset: int, index: int) -> None:
        """Queue a DISTRUST."""
        frame = protocol.encode(protocol.Distrust(dataset, index))
        with self.lock:
            self._check(dataset)
            self._push(frame)

    def pass_files(self, tag: int, files: PassedFiles) -> None:
        """Queue a FILES, the answer to a NEED, unless the OPEN has failed in the meantime."""
        with self.lock:
            waiting = self._waiting.get(tag)
            if self.broken is not None or waiting is None or waiting.answer is not None:
                files.close()
                return
            waiting.since = time.monotonic()
            self._files.append((protocol.encode(protocol.Files(tag, bytes(files.kinds))), files))
            self.urgent = True

    def pass_no_files(self, tag: int) -> None:
        """Queue the answer to a NEED that gives the OPEN up; nobody waits for its end."""
        with self.lock:
            self.pass_files(tag, PassedFiles())
            self.give_up(tag)

    def get(self, dataset: int, indices: Int64s) -> int:
        """Queue a GET, with acknowledgements and counters; return its tag."""
        packed = protocol.pack_indices(indices)
        with self.lock:
            tag = self._tag()
            acknowledged, hits, hit_size = self._take_counters()
            message = protocol.Get(tag, dataset, packed, acknowledged, hits, hit_size)
            return self._request(message, dataset)

    def lease(self, dataset: int, indices: Int64s, tags: list[int]) -> int:
        """Queue a LEASE; return its tag.

        Args: tags: gets the tag as well; the caller releases all of these, whatever happens.
        """
        packed = protocol.pack_indices(indices)
        with self.lock:
            tag = self._tag()
            tags.append(tag)
            self.leased.add(tag)
            return self._request(protocol.Lease(tag, dataset, packed), dataset)

    def release(self, tags: list[int]) -> None:
        """Queue a RELEASE of leases."""
        with self.lock:
            self.leased.difference_update(tags)
            for tag in tags:
                self.give_up(tag)
            if self.broken is None:
                self._push(protocol.encode(protocol.Release(protocol.pack_tags(tags))))

    def order_pieces(
        self, dataset: int, epoch: int, order: Int64s, name: str | None, replacement: bool
    ) -> Iterator[int]:
        """Queue an order piece by piece; yields its tag after each. Pieces of two orders must not
        mix."""
        tag = self._tag()
        what = {"name": name, "replacement": replacement}
        for start in range(0, len(order), ORDER_PIECE):
            packed = protocol.pack_order(order[start : start + ORDER_PIECE])
            piece = protocol.Order(tag, dataset, epoch, len(order), start, packed, what)
            if start == 0:
                self._request(piece, dataset)
            else:
                with self.lock:
                    self._check(dataset)
                    self._push(protocol.encode(piece))
            yield tag

    @property
    def takes_orders(self) -> bool:
        """Whether the daemon wants to know orders and positions in them."""
        return self._takes_orders

    def status(self) -> int:
        """Queue a STATUS; return its tag."""
        return self._request(protocol.Status(self._tag()))

    def resize(self, size: int) -> int:
        """Queue a RESIZE; return its tag."""
        return self._request(protocol.Resize(self._tag(), size))

    def seen(self, dataset: int, indices: Int64s) -> None:
        """Queue a SEEN of at most MAX_GET_COUNT cached samples, to go out with the next GET."""
        if self._takes_orders:
            frame = protocol.encode(protocol.Seen(dataset, protocol.pack_order(indices)))
            with self.lock:
                self._check(dataset)
                self._push(frame)

    def _tag(self) -> int:
        with self.lock:
            tag = self._next_tag
            self._next_tag = tag % 0xFFFFFFFF + 1
            return tag

    def _request(self, message: Any, dataset: int | None = None) -> int:
        tag: int = message.tag
        frame = protocol.encode(message)
        with self.lock:
            self._check(dataset)
            self._waiting[tag] = _Waiting(type(message), dataset, time.monotonic())
            if isinstance(message, (protocol.Get, protocol.Lease, protocol.Put)):
                if len(self.unanswered) >= protocol.MOST_REQUESTS:
                    self._kept_back.append((tag, frame))
                    return tag
                self.unanswered.add(tag)
            self._push(frame)
        return tag

    def _check(self, dataset: int | None) -> None:
        """Raise if the connection is broken, or the data set closed: a message that names it behind
        its CLOSE would end the session."""
        if self.broken is not None:
            raise self.gone()
        if dataset is not None and dataset not in self._datasets:
            raise _closed_error(self.path)

    def _push(self, frame: bytes) -> None:
        self._queue.append(frame)
        self.urgent = True

    # ---- reports --------------------------------------------------------------------------

    def acknowledge(self, tag: int) -> None:
        """The samples of a GET were copied."""
        with self.lock:
            self._acknowledged.append(tag)

    def count_hits(self, count: int, size: int, prepared: int | None = None) -> bool:
        """Count cached samples that were copied; return whether a report is due.

        Args: prepared: the data set, if they are prepared samples.
        """
        with self.lock:
            if prepared is None:
                self._hits += count
                self._hit_size += size
            else:
                before = self._prepared_hits.get(prepared, (0, 0))
                self._prepared_hits[prepared] = before[0] + count, before[1] + size
        return time.monotonic() - self._reported > REPORT_INTERVAL_S

    def count_times(self, times: NDArray[np.uint64]) -> None:
        """Count how long hits took; see `MappedView.take_times`."""
        with self.lock:
            if self.takes_times:
                self._times = times if self._times is None else self._times + times

    def reached(self, dataset: int, epoch: int, position: int) -> None:
        """Note the job's position in an order that it announced. Only the latest is reported."""
        with self.lock:
            if self._takes_orders and dataset in self._datasets:
                self._positions[dataset] = epoch, position
                self.report_due = True

    def close_dataset(self, dataset: int) -> list[int]:
        """A data set is not needed any more. Its requests that were kept back fail; return their
        tags."""
        with self.lock:
            self._datasets.discard(dataset)
            self._closed_datasets.append(dataset)
            self.report_due = True
            closed = protocol.error_to_wire(_closed_error(self.path))
            failed = [tag for tag, _ in self._kept_back if self._waiting[tag].dataset == dataset]
            for tag in failed:
                self._waiting[tag].answer = protocol.Fail(tag, closed)
            kept = (each for each in self._kept_back if self._waiting[each[0]].answer is None)
            self._kept_back = deque(kept)
            return failed

    def queue_reports(self) -> None:
        """Queue the reports that are due, if everything queued before has been sent."""
        with self.lock:
            if self._queue or self._front or self._files or self.broken is not None:
                return
            self.report_due = False
            acknowledged, hits, hit_size = self._take_counters()
            if acknowledged or hits:
                tell = protocol.Tell(0, hits, hit_size, acknowledged)
                self._queue.append(protocol.encode(tell))
            due = self._reported > self._times_reported + REPORT_INTERVAL_S
            if due and self._times is not None:
                counts = np.minimum(self._times[1:], (1 << 32) - 1).astype("<u4").tobytes()
                self._queue.append(protocol.encode(protocol.Times(int(self._times[0]), counts)))
                self._times, self._times_reported = None, self._reported
            for dataset, (hits, hit_size) in self._prepared_hits.items():
                self._queue.append(protocol.encode(protocol.Tell(dataset, hits, hit_size, b"")))
            self._prepared_hits.clear()
            for dataset, (epoch, position) in self._positions.items():
                self._queue.append(protocol.encode(protocol.Reached(dataset, epoch, position)))
            self._positions.clear()
            for dataset in self._closed_datasets:
                self._queue.append(protocol.encode(protocol.Close(dataset)))
            self._closed_datasets.clear()

    def _take_counters(self) -> tuple[bytes, int, int]:
        acknowledged, self._acknowledged = self._acknowledged, []
        hits, self._hits = self._hits, 0
        hit_size, self._hit_size = self._hit_size, 0
        self._reported = time.monotonic()
        return protocol.pack_tags(acknowledged), hits, hit_size

    # ---- output ---------------------------------------------------------------------------

    def output(self) -> memoryview:
        """Return the bytes to send next; empty: none. For one sender at a time."""
        with self.lock:
            if not self._front and self._files:
                frame, self._passing = self._files.popleft()
                self._front = memoryview(frame)
            elif not self._front and self._queue:
                queued, self._queue = self._queue, []
                self._front = memoryview(queued[0] if len(queued) == 1 else b"".join(queued))
            return self._front

    @property
    def passing(self) -> list[int]:
        """The descriptors that go with the first byte of `output`."""
        return self._passing.fds if self._passing is not None else []

    def sent(self, size: int) -> None:
        """The socket took so many bytes of `output`."""
        with self.lock:
            if size and self._passing is not None:
                self.drop_passing()
            self._front = self._front[size:]
            if not self._front and not self._queue and not self._files:
                self.urgent = False

    def drop_passing(self) -> None:
        """Close the descriptors of `passing`. Only the sender calls this, since other files may get
        the numbers as soon as they are closed."""
        passing, self._passing = self._passing, None
        if passing is not None:
            passing.close()

    # ---- input ----------------------------------------------------------------------------

    @property
    def memories_due(self) -> Memories | None:
        """The memories whose descriptors may come with the next bytes; None: none may."""
        return self.memories if self._opening else None

    def feed(self, chunk: bytes) -> list[int]:
        """Take received bytes; return the tags that were answered.

        Raises: ProtocolError; the error by which the daemon ended the session. The caller then
            calls `fail` with it.
        """
        answered: list[int] = []
        with self.lock:
            for message in self._decoder.feed(chunk):
                self._take(message, answered)
            while self._kept_back and len(self.unanswered) < protocol.MOST_REQUESTS:
                tag, frame = self._kept_back.popleft()
                self.unanswered.add(tag)
                self._push(frame)
        return answered

    def _take(self, message: Any, answered: list[int]) -> None:
        if isinstance(message, protocol.Welcome):
            raise ProtocolError("the daemon sent a second WELCOME", path=self.path)
        if isinstance(message, protocol.Alive):
            self._check_patience()
            return
        tag: int = message.tag
        if isinstance(message, protocol.Fail) and tag == 0:
            raise protocol.error_from_wire(message.error)
        self.unanswered.discard(tag)
        if tag in self._opening:
            self._take_memory(message)
        waiting = self._waiting.get(tag)
        if waiting is None:
            return
        due = _ANSWERS[waiting.kind]
        if type(message) not in due and type(message) is not protocol.Fail:
            raise ProtocolError(
                f"the daemon answered with {type(message).__name__.upper()} where "
                f"{due[0].__name__.upper()} is due",
                path=self.path,
            )
        if waiting.given_up:
            del self._waiting[tag]
            self._give_back(waiting.kind, message)
            return
        waiting.answer = message
        answered.append(tag)

    def _take_memory(self, message: Message) -> None:
        """An answer to an OPEN has come; the last one brings memory."""
        if isinstance(message, protocol.Need):
            return
        self._opening.discard(message.tag)  # type: ignore[union-attr]
        if isinstance(message, protocol.Opened) and message.domains and self.memories is not None:
            self.memories.assign(protocol.unpack_tags(message.domains))

    def _check_patience(self) -> None:
        since = self.owes_since
        if since is not None and time.monotonic() - since > ANSWER_TIMEOUT_S:
            raise ServerUnavailable(
                f"the daemon has not answered a request for {ANSWER_TIMEOUT_S:g} s",
                path=self.path,
                hint="check whether the disk of the daemon still responds",
            )

    def _give_back(self, kind: type[Message], answer: Message) -> None:
        """Give back the pins or the data set of an answer that is not collected."""
        self.report_due = True
        if kind is protocol.Get and isinstance(answer, protocol.Ready):
            self._acknowledged.append(answer.tag)
        elif isinstance(answer, protocol.Opened):
            self._closed_datasets.append(answer.dataset)
        elif isinstance(answer, protocol.Need) and self.broken is None:
            self._waiting[answer.tag] = _Waiting(kind, None, time.monotonic())
            self.pass_no_files(answer.tag)

    # ---- answers --------------------------------------------------------------------------

    @property
    def owes_since(self) -> float | None:
        """Since when the daemon owes its oldest answer, on the monotonic clock; None: none."""
        owed = (waiting.since for waiting in self._waiting.values() if waiting.answer is None)
        return min(owed, default=None)

    def has_answer(self, tag: int) -> bool:
        """Whether `collect` returns or raises at once."""
        waiting = self._waiting.get(tag)
        return waiting is None or waiting.answer is not None

    def collect(self, tag: int) -> Any:
        """Return the answer to a request, once. After a NEED another one follows.

        Raises: what the daemon answered; why the connection broke before that.
        """
        with self.lock:
            waiting = self._waiting.pop(tag, None)
            if waiting is None or waiting.answer is None:
                raise self.gone()
            if isinstance(waiting.answer, protocol.Need):
                # The OPEN may fail while the files are opened.
                self._waiting[tag] = _Waiting(waiting.kind, None, time.monotonic())
            if isinstance(waiting.answer, protocol.Opened):
                self._datasets.add(waiting.answer.dataset)
        if isinstance(waiting.answer, protocol.Fail):
            raise protocol.error_from_wire(waiting.answer.error)
        return waiting.answer

    def give_up(self, tag: int) -> None:
        """Forget a request. The pins or the data set that its answer brings are given back."""
        with self.lock:
            waiting = self._waiting.pop(tag, None)
            if waiting is None:
                return
            if waiting.answer is not None:
                self._give_back(waiting.kind, waiting.answer)
                return
            for kept in self._kept_back:
                if kept[0] == tag:
                    self._kept_back.remove(kept)
                    return
            if self.broken is None:
                waiting.given_up = True
                self._waiting[tag] = waiting

    # ---- the end --------------------------------------------------------------------------

    def fail(self, error: FFServeError) -> None:
        """The connection is broken; the first reason stays."""
        with self.lock:
            self.broken = self.broken or error
            self._kept_back.clear()
            self._queue.clear()
            while self._files:
                self._files.popleft()[1].close()
            self.urgent = False

    def gone(self) -> FFServeError:
        """Return why requests fail."""
        if self.broken is None:
            return ServerUnavailable(
                "the request was given up before its answer came", path=self.path
            )
        return self.broken.located()


def _closed_error(path: str) -> ServerUnavailable:
    """Return the error for a request after its data set was closed."""
    return ServerUnavailable("the data set was closed", path=path)
