"""One client's conversation with the daemon, without its socket.

`receive` takes a message and the time; what the client is to get is handed to `send`. Opening a
data set takes other threads, so it goes out through `opener` and comes back through `opened` or
`failed`.

    state        message                                       next
    NEW          HELLO                                         READY (or refused)
    READY        OPEN GET LEASE RELEASE STATUS CLOSE TELL      READY
    READY        ORDER REACHED SEEN LOOKUP RESIZE              READY
    READY        BYE                                           OVER
    any          anything else: FAIL with tag 0                OVER

What a session acquires (data sets, pins, leases) it gives back in `leave`, however it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ffserve import protocol
from ffserve.cache.cache import Fetch, Int64s
from ffserve.cache.jobs import JobProgress
from ffserve.cache.orders import Arriving
from ffserve.dataset import Layout
from ffserve.errors import FFServeError, ProtocolError, SampleIndexError, UsageError, status_error
from ffserve.protocol import Message
from ffserve.server.access import Peer
from ffserve.server.inline import InlineReply, Outbox
from ffserve.server.report import arena_facts, status
from ffserve.server.scheduler import Owner, Promise, Request
from ffserve.server.state import MOST_COUNTED, Job, ServerState

if TYPE_CHECKING:
    from ffserve.server.catalog import OpenShard

NEW, READY, OVER = "new", "ready", "over"

MOST_DATASETS = 4096
MOST_ERRORS = 1024
"""Failed samples in one READY, so that it fits into a frame; it then answers for fewer samples."""
MOST_PROMISED = 4
"""Requests of all sessions up to which an answer goes out by itself, if it is the sole one of its
session. With more on their way nobody waits for a wake, and the loop wakes one for several."""
_PLACE = (1 << 48) - 1
MOST_NAME = 200
"""Characters of the name of an order that jobs share."""


@dataclass(slots=True, eq=False)
class Dataset:
    """A data set as one session sees it."""

    paths: list[str]
    """By which this session named the shards; they may have been opened by others."""
    shards: list[OpenShard]
    layout: Layout
    progress: JobProgress
    requests: int = 0
    """On their way; the shards are held until they are decided, even if it was closed."""


@dataclass(slots=True)
class _Announcement:
    """An order of which not all pieces have come."""

    tag: int
    dataset: Dataset
    epoch: int
    name: str | None
    order: Arriving


class Announcing:
    """The order that one session is being told; only one is under way at a time.

    Args: fail: tells the client, by tag, why an order is not taken.
    """

    def __init__(self, state: ServerState, fail: Callable[[int, FFServeError], None]) -> None:
        self._state = state
        self._fail = fail
        self._begun: _Announcement | None = None

    @property
    def under_way(self) -> bool:
        """Whether an order has begun to come and has not ended."""
        return self._begun is not None

    def forget(self, dataset: Dataset | None = None) -> None:
        """The rest of the order will not come, if it is for this data set; None: for any."""
        if dataset is None or (self._begun is not None and self._begun.dataset is dataset):
            self._begun = None

    def take(self, message: protocol.Order, dataset: Dataset) -> protocol.Ready | None:
        """Take a piece in; pieces of an order that was refused are passed over.

        Returns: the answer to the last piece.
        Raises: ProtocolError.
        """
        if not 0 < message.tag < 1 << 32 or not 0 <= message.epoch <= MOST_COUNTED:
            raise ProtocolError("the client announced an order with an impossible tag or epoch")
        indices = protocol.unpack_order(message.indices)
        try:
            return self._take_piece(message, dataset, indices)
        except FFServeError as error:
            if isinstance(error, ProtocolError):
                raise
            self._begun = None
            self._fail(message.tag, error)
            return None

    def _take_piece(
        self, message: protocol.Order, dataset: Dataset, indices: Int64s
    ) -> protocol.Ready | None:
        layout = dataset.layout
        announcement = self._begun
        if message.start == 0:
            if announcement is not None:
                self._begun = None
                self._fail(announcement.tag, UsageError("another order came before this one ended"))
            announcement = self._begun = self._begin(message, dataset)
        elif announcement is None or announcement.tag != message.tag:
            return None
        order = announcement.order
        if message.start != order.arrived or message.count != order.count or not len(indices):
            raise UsageError(
                f"a piece of the order says it begins at position {message.start} of "
                f"{message.count}, but {order.arrived} of {order.count} have come"
            )
        if int(indices.max()) >= layout.count:
            bad = int(indices.max())
            raise SampleIndexError(
                f"the order visits sample {bad}, outside the dataset of {layout.count} samples",
                index=bad,
            )
        order.add(layout.numbers(indices))
        if order.arrived < order.count:
            return None
        self._begun = None
        try:
            whole = order.finish()
        except SampleIndexError as error:
            assert error.index is not None
            raise error.located(index=layout.index(error.index)) from None
        progress, uses = announcement.dataset.progress, self._state.uses
        self._state.scheduler.prefetcher.replaced(progress, announcement.epoch)
        uses.announced(progress, announcement.epoch, whole, announcement.name, dataset)
        return protocol.Ready(message.tag, whole.count, [])

    def _begin(self, message: protocol.Order, dataset: Dataset) -> _Announcement:
        name, replacement = message.what.get("name"), message.what.get("replacement")
        if not isinstance(replacement, bool) or not (
            name is None or (isinstance(name, str) and len(name) <= MOST_NAME)
        ):
            raise ProtocolError("the client announced an order of no known kind")
        arriving = self._state.uses.arriving(
            dataset.progress, message.count, replacement=replacement
        )
        return _Announcement(message.tag, dataset, message.epoch, name, arriving)


class Session:
    """See the module's text.

    Args:
        state: everything the sessions share.
        peer: the user behind the connection.
        send: takes a message for the client.
        opener: is called with (session, tag, paths, format, verify, tolerant) to open a data set.
        outbox: where samples go that leave through the socket; None: they cannot.
        promise: makes of a READY one that goes out by itself; None: all go through `send`.
    """

    def __init__(
        self,
        state: ServerState,
        peer: Peer,
        send: Callable[[Message], None],
        opener: Callable[[Session, int, list[str], str | None, bool, bool], None],
        outbox: Outbox | None = None,
        promise: Callable[[protocol.Ready], Promise] | None = None,
    ) -> None:
        self.phase = NEW
        self.peer = peer
        self.job: Job | None = None
        self._state = state
        self._send = send
        self._opener = opener
        self._outbox = outbox
        self._promise = promise
        self._promised = 0
        """The tag that a promise was made for last."""
        self.inline = False
        """Whether samples go through the socket."""
        self._delivering: set[int] = set()
        self._owner = Owner(self._finished)
        self._datasets: dict[int, Dataset] = {}
        self._closing: set[Dataset] = set()
        self._next_dataset = 1
        self._opening = 0
        self._joined = False
        self._announcing = Announcing(state, self.fail)

    def receive(self, message: Message, now: float) -> None:
        """Take a message in.

        Raises: ProtocolError when it breaks the rules: the session is of no more use.
        """
        if self.phase == NEW:
            if not isinstance(message, protocol.Hello):
                raise ProtocolError("the client did not begin with HELLO")
            self._hello(message, now)
            return
        assert self.job is not None
        self.job.last_seen = self._state.uses.now = now
        match message:
            case protocol.Get():
                self._tell(message.hits, message.hit_size, message.acknowledged)
                self._ask(message.tag, message.dataset, message.indices, now, lease=False)
            case protocol.Tell():
                self._tell(message.hits, message.hit_size, message.acknowledged)
                self._state.scheduler.pump(now)
            case protocol.Lookup():
                self._look_up(message)
            case protocol.Lease():
                if self.inline:
                    raise ProtocolError("the client leased memory that it does not have")
                self._ask(message.tag, message.dataset, message.indices, now, lease=True)
            case protocol.Release():
                self._state.scheduler.release(self._owner, protocol.unpack_tags(message.tags))
                self._state.scheduler.pump(now)
            case protocol.Open():
                self._open(message, now)
            case protocol.Order():
                self._order(message)
                self._state.scheduler.pump(now)
            case protocol.Reached():
                self._reached(message, now)
                self._state.scheduler.pump(now)
            case protocol.Seen():
                self._seen(message, now)
            case protocol.Close():
                self._close(message.dataset)
            case protocol.Status():
                self._send(protocol.Report(message.tag, status(self._state, now)))
            case protocol.Resize():
                self._resize(message)
            case protocol.Bye():
                self.phase = OVER
            case _:
                raise ProtocolError(f"a {type(message).__name__} has no place in a session")

    def _hello(self, message: protocol.Hello, now: float) -> None:
        about = message.about
        versions = about.get("versions")
        if not isinstance(versions, list) or protocol.VERSION not in versions:
            raise ProtocolError(
                f"the client speaks versions {versions!r} of the protocol, this daemon "
                f"version {protocol.VERSION}",
                hint="install the same ffserve for the daemon and its clients",
            )
        name = about.get("job")
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise ProtocolError("the client's HELLO names no job")
        can = about.get("payload", ["shared"])
        chosen = self._state.payload
        if chosen == "shared" and isinstance(can, list) and "shared" not in can:
            chosen = "inline"
        if not isinstance(can, list) or chosen not in can:
            raise ProtocolError(
                f"the client takes samples as {can!r}, this daemon gives them as {chosen!r}",
                hint="install the same ffserve for the daemon and its clients",
            )
        self.inline = chosen == "inline"
        if self.inline:
            assert self._outbox is not None
            self._owner.taken_back = self._outbox.stop
        self.job = Job(name, now, now)
        self._owner.job = name
        self.phase = READY
        self._send(protocol.Welcome({**self._state.about(), "payload": chosen}))

    def _resize(self, message: protocol.Resize) -> None:
        try:
            self._state.resize(message.size, self.peer)
        except FFServeError as error:
            self.fail(message.tag, error)
        else:
            self._send(protocol.Report(message.tag, {"arena": arena_facts(self._state)}))

    # ---- data sets ------------------------------------------------------------------------

    def _join_job(self, now: float) -> None:
        """Count for the job from the first data set on: who only looks is no job."""
        assert self.job is not None
        if self._joined:
            return
        self._joined = True
        self.job = self._state.job(self.job.name, now)
        self.job.sessions += 1
        self.job.pid = self.job.pid or self.peer.pid

    def _open(self, message: protocol.Open, now: float) -> None:
        what = message.what
        paths, name, verify = what.get("paths"), what.get("format"), what.get("verify")
        tolerant = what.get("tolerant", False)
        if (
            not isinstance(paths, list)
            or not paths
            or not all(isinstance(p, str) and p.startswith("/") and "\0" not in p for p in paths)
            or not (name is None or isinstance(name, str))
            or not isinstance(verify, bool)
            or not isinstance(tolerant, bool)
        ):
            raise ProtocolError("the client sent an OPEN that names no absolute paths")
        if len(self._datasets) + self._opening >= MOST_DATASETS:
            error = UsageError(
                f"this process has {MOST_DATASETS} data sets open already",
                hint="close readers, or open many files as one data set",
            )
            self.fail(message.tag, error)
            return
        self._join_job(now)
        self._opening += 1
        self._opener(self, message.tag, paths, name, verify, tolerant)

    def opened(self, tag: int, paths: list[str], shards: list[OpenShard]) -> None:
        """The data set is open; the session holds its shards now."""
        self._opening -= 1
        if self.phase != READY:
            self._state.catalog.close(shards)
            return
        counts = np.array([shard.count for shard in shards], np.int64)
        bases = np.array([shard.base for shard in shards], np.int64)
        number = self._next_dataset
        self._next_dataset += 1
        assert self.job is not None
        progress = self._state.uses.join(self.job.name, bases, counts)
        self._datasets[number] = Dataset(paths, shards, Layout(counts, bases), progress)
        if not self.job.paths:
            more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
            self.job.paths = paths[0] + more
        table = np.zeros(len(shards), protocol.SHARD_DTYPE)
        table["base"], table["count"] = bases, counts
        table["size"] = [shard.size for shard in shards]
        table["fingerprint"] = [shard.fingerprint for shard in shards]
        table["checksum_kind"] = [shard.checksum_kind for shard in shards]
        formats = [shard.format for shard in shards]
        self._send(protocol.Opened(tag, number, table.tobytes(), formats))

    def _close(self, number: int) -> None:
        dataset = self._datasets.pop(number, None)
        if dataset is None:
            return
        self._leave_walk(dataset)
        self._announcing.forget(dataset)
        if dataset.requests:
            self._closing.add(dataset)
        else:
            self._state.catalog.close(dataset.shards)

    def _leave_walk(self, dataset: Dataset) -> None:
        self._state.uses.leave(dataset.progress, dataset)
        self._state.scheduler.prefetcher.passed(dataset.progress)

    def failed(self, tag: int, error: FFServeError) -> None:
        """The data set could not be opened."""
        self._opening -= 1
        self.fail(tag, error)

    def fail(self, tag: int, error: FFServeError) -> None:
        """Tell the client that a request failed; tag 0: that the session did."""
        if self.job is not None:
            self.job.errors += 1
        self._send(protocol.Fail(tag, protocol.error_to_wire(error)))

    # ---- samples --------------------------------------------------------------------------

    def _tell(self, hits: int, hit_size: int, acknowledged: bytes) -> None:
        assert self.job is not None
        if hits < 0 or hit_size < 0:
            raise ProtocolError("the client counts backwards")
        self.job.hits = min(self.job.hits + hits, MOST_COUNTED)
        self.job.hit_size = min(self.job.hit_size + hit_size, MOST_COUNTED)
        if acknowledged:
            tags = protocol.unpack_tags(acknowledged)
            # What is being sent stays pinned, whatever the client says.
            tags = [tag for tag in tags if tag not in self._delivering]
            self._state.scheduler.acknowledge(self._owner, tags)

    def _ask(self, tag: int, number: int, packed: bytes, now: float, *, lease: bool) -> None:
        dataset = self._datasets.get(number)
        if dataset is None:
            raise ProtocolError(f"the client asked for samples of data set {number}, not open here")
        owner = self._owner
        if not 0 < tag < 1 << 32:
            raise ProtocolError(f"the client used the tag {tag}, which is no u32 above 0")
        if (
            tag in owner.unacknowledged
            or tag in owner.leases
            or tag in owner.waiting
            or tag in self._delivering
        ):
            raise ProtocolError(f"the client used the tag {tag} twice")
        if len(owner.waiting) + len(self._delivering) >= protocol.MOST_REQUESTS:
            raise ProtocolError(
                f"the client has {protocol.MOST_REQUESTS} requests on their way already"
            )
        indices = protocol.unpack_indices(packed)
        numbers = self._numbers(tag, dataset, indices)
        if numbers is None:
            return
        assert self.job is not None
        self._count(numbers, hits_unreported=lease or self.inline)
        request = Request(owner, tag, Fetch(numbers), lease, (dataset, indices, now))
        crowded = owner.waiting or self._state.scheduler.request_count >= MOST_PROMISED
        if self._promise is not None and not (crowded or lease or self.inline):
            request.promise = self._promise(protocol.Ready(tag, len(numbers), []))
            self._promised = tag
        dataset.requests += 1
        if len(indices) == 0:
            self._finished(request)
            return
        self._state.scheduler.add(request, now)
        # While the disk works.
        self._state.cache.used(numbers)
        self._state.cache.invalidate(dataset.progress.asked(numbers, now))

    def _numbers(self, tag: int, dataset: Dataset, indices: Int64s) -> Int64s | None:
        """Return the samples' numbers; None: one is outside, and the client was told so."""
        layout = dataset.layout
        # As unsigned numbers negative ones are too large as well: one look at each.
        if len(indices) and int(indices.view(np.uint64).max()) >= layout.count:
            bad = int(indices[(indices < 0) | (indices >= layout.count)][0])
            self.fail(
                tag,
                SampleIndexError(
                    f"sample index {bad} is outside the dataset of {layout.count} samples",
                    index=bad,
                ),
            )
            return None
        return layout.numbers(indices)

    def _count(self, numbers: Int64s, *, hits_unreported: bool) -> None:
        """Count a request's samples, and the hits among them if the client does not report them."""
        assert self.job is not None
        hits = 0
        if hits_unreported:
            hit = numbers[self._state.directory.entries["seq"][numbers] & 1 == 1]
            hits = len(hit)
            self.job.hits += hits
            self.job.hit_size += int(self._state.directory.lengths(hit).sum())
        self.job.missed += len(numbers) - hits

    def _look_up(self, message: protocol.Lookup) -> None:
        dataset = self._dataset(message.dataset, "asked about samples")
        indices = protocol.unpack_indices(message.indices)
        numbers = self._numbers(message.tag, dataset, indices)
        if numbers is not None:
            directory = self._state.directory
            offsets = directory.offsets[numbers].astype("<u8").tobytes()
            # As clients read an entry: records in chunks may have no length yet.
            entries = directory.entries[numbers]
            high = entries["place"] >> np.uint64(48) << np.uint64(32)
            lengths = (high | entries["length_low"]).astype("<u8").tobytes()
            checksums = directory.checksums[numbers].astype("<u4").tobytes()
            self._send(protocol.Found(message.tag, offsets, lengths, checksums))

    def _deliver(self, request: Request, errors: list[Any]) -> None:
        """Send the samples, pinned as they are, then READY."""
        tag, directory = request.tag, self._state.directory
        numbers = request.fetch.numbers[: request.count]
        lengths = directory.lengths(numbers)
        lengths[[error[0] for error in errors]] = 0
        entries = directory.entries[numbers]
        assert ((entries["seq"] & 1 == 1) | (lengths == 0)).all(), "what is pinned is readable"
        starts = (entries["place"] & np.uint64(_PLACE)).astype(np.int64)

        def over(count: int) -> protocol.Ready:
            self._delivering.discard(tag)
            self._state.scheduler.acknowledge(self._owner, [tag])
            return protocol.Ready(tag, count, [e for e in errors if e[0] < count])

        outbox = self._outbox
        assert outbox is not None
        self._delivering.add(tag)
        outbox.put(InlineReply(tag, self._state.memory.array, starts, lengths, over))

    @property
    def announcing(self) -> bool:
        """Whether an order has begun to come and has not ended."""
        return self._announcing.under_way

    @property
    def promised(self) -> bool:
        """Whether an answer may have gone out of which this session has not heard."""
        return self._promised in self._owner.waiting

    @property
    def delivering_count(self) -> int:
        """GETs whose samples are on their way through the socket."""
        return len(self._delivering)

    def _finished(self, request: Request) -> None:
        errors: list[Any] = []
        if request.fetch.failures:
            errors = self._errors(request)
        if self.inline and request.count:
            self._deliver(request, errors)
        elif request.promise is None or not request.promise.sent:
            self._send(protocol.Ready(request.tag, request.count, errors))
        dataset, _, asked = _context(request)
        assert self.job is not None
        self.job.waited_s += max(self._state.uses.now - asked, 0.0)
        dataset.requests -= 1
        if not dataset.requests and dataset in self._closing:
            self._closing.discard(dataset)
            self._state.catalog.close(dataset.shards)

    def _errors(self, request: Request) -> list[Any]:
        dataset, indices, _ = _context(request)
        state, failures = self._state, request.fetch.failures
        errors: list[Any] = []
        for position, number in enumerate(request.fetch.numbers[: request.count].tolist()):
            failure = failures.get(number)
            if failure is None:
                continue
            if len(errors) == MOST_ERRORS:
                request.count = position
                break
            index = int(indices[position])
            shard = int(dataset.layout.shards(indices[position : position + 1])[0])
            one = request.fetch.numbers[position : position + 1]
            path = dataset.paths[shard]
            if failure.error is not None:
                error = failure.error.located(index=index)
                error.path = path
                errors.append([position, *protocol.error_to_wire(error)])
                continue
            error = status_error(
                failure.status,
                path=path,
                index=index,
                offset=int(state.directory.offsets[number]),
                length=failure.size or int(state.directory.lengths(one)[0]),
                found=failure.found,
                expected=failure.expected,
                arena_size=state.cache.arena.size,
            )
            errors.append([position, *protocol.error_to_wire(error)])
        assert self.job is not None
        self.job.errors += len(errors)
        return errors

    # ---- what will be asked for -----------------------------------------------------------

    def _dataset(self, number: int, what: str) -> Dataset:
        dataset = self._datasets.get(number)
        if dataset is None:
            raise ProtocolError(f"the client {what} of data set {number}, not open here")
        return dataset

    def _order(self, message: protocol.Order) -> None:
        dataset = self._dataset(message.dataset, "announced an order")
        answer = self._announcing.take(message, dataset)
        if answer is not None:
            self._send(answer)

    def _reached(self, message: protocol.Reached, now: float) -> None:
        dataset = self._dataset(message.dataset, "reported its position in an order")
        if not (0 <= message.epoch <= MOST_COUNTED and 0 <= message.position <= MOST_COUNTED):
            raise ProtocolError("the client reported an impossible position")
        passed = dataset.progress.advance_to(message.epoch, message.position, now)
        self._state.cache.invalidate(passed)
        self._state.scheduler.prefetcher.passed(dataset.progress)

    def _seen(self, message: protocol.Seen, now: float) -> None:
        dataset = self._dataset(message.dataset, "reported hits")
        indices, layout = protocol.unpack_order(message.indices), dataset.layout
        if len(indices) and int(indices.max()) >= layout.count:
            raise ProtocolError("the client reported hits outside its data set")
        if len(indices) and not dataset.progress.orders:
            numbers = layout.numbers(indices)
            dataset.progress.visited(numbers, now)
            self._state.cache.invalidate(numbers)

    def leave(self, now: float) -> None:
        """The connection is gone: give everything back."""
        if self._joined:
            assert self.job is not None
            self.job.sessions -= 1
        self.phase = OVER
        self._state.scheduler.leave(self._owner, now)
        for dataset in self._datasets.values():
            self._leave_walk(dataset)
        self._announcing.forget()
        for dataset in (*self._datasets.values(), *self._closing):
            self._state.catalog.close(dataset.shards)
        self._datasets.clear()
        self._closing.clear()


def _context(request: Request) -> tuple[Dataset, Int64s, float]:
    """Return the data set, the indices, and when they were asked for."""
    return cast(tuple[Dataset, Int64s, float], request.context)
