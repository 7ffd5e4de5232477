"""Session: one client's connection, without its socket.

`receive` takes a message and the time; messages for the client go to `send`. The session answers
requests for samples itself; its data sets are in `opened.py`, prepared samples in
`prepared/sharing.py`, answers about failed samples in `failures.py`.

    phase        message                                       next
    NEW          HELLO                                         READY (or refused)
    READY        OPEN GET LEASE RELEASE STATUS CLOSE TELL      READY
    READY        FILES ORDER REACHED SEEN RESIZE TIMES         READY
    READY        HANDOVER PREPARE CLAIM PUT DISTRUST NAMES     READY
    READY        BYE                                           OVER
    any          anything else: FAIL with tag 0                OVER

The session gives back its data sets, pins and leases in `leave`, however it ends.

It reads no clock: a message, and each step of work that lasts, brings the time with it. Nor do
scheduler, cache, orders and claims, so that all of these can be simulated. What they give to other
threads (engines, catalog, explainer) measures with a clock of its own how long that takes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from ffserve import protocol
from ffserve.dtypes import Int64s
from ffserve.errors import (
    FFServeError,
    ProtocolError,
    SampleIndexError,
    UsageError,
)
from ffserve.protocol import Message
from ffserve.server.files.shards import Request
from ffserve.server.life import handover
from ffserve.server.prepared.sharing import PrepareRequest, Sharing
from ffserve.server.reading.requests import Reply, Requester, SampleRequest
from ffserve.server.reading.statistics import LARGEST_COUNT
from ffserve.server.sessions.context import NEW, OVER, READY, SessionContext
from ffserve.server.sessions.datasets import FEW, STEP_COUNT, OpenDataset, Steps, parts
from ffserve.server.sessions.failures import FailedRequests
from ffserve.server.sessions.job_table import Job
from ffserve.server.sessions.opened import SessionDatasets
from ffserve.server.sessions.outbox import MemoryMessage
from ffserve.server.sessions.state import ServerState
from ffserve.server.status.report import arena_facts, status
from ffserve.server.users.peers import Peer
from ffserve.server.users.shares import Bound, User

MOST_DIRECT_REPLIES = 4
"""A request gets a direct reply while its user has fewer requests than this, and its
session has no other. With more requests, the loop answers several of them in one turn."""


def _no_heir(tag: int) -> None:
    raise ProtocolError("unexpected HANDOVER message")


class Session:
    """See the module's text.

    Args:
        state: shared by all sessions.
        peer: the user behind the connection.
        send: takes a message for the client.
        opener: called with (tag, request) to open a data set.
        direct_reply: makes a direct reply of a READY; None: all messages go through `send`.
        user: with whom the session shares bounds and turns.
        later: has these steps taken before the next message is received.
        refusal: why this session may open no data set; None: it may.
        heir: called with a tag when the client is to take this daemon over; may raise
            FFServeError.
        preparer: called with the tag and what is asked for to open prepared samples.
    """

    def __init__(
        self,
        state: ServerState,
        peer: Peer,
        send: Callable[[Message | MemoryMessage], None],
        opener: Callable[[int, Request], None],
        direct_reply: Callable[[protocol.Ready], Reply] | None = None,
        *,
        user: User | None = None,
        later: Callable[[Steps], object],
        refusal: FFServeError | None = None,
        heir: Callable[[int], object] = _no_heir,
        preparer: Callable[[int, PrepareRequest], None] | None = None,
    ) -> None:
        self.peer = peer
        self.user = User() if user is None else user
        self.owner = Requester(self.finished, user=self.user, who=peer.owner)
        self.context = SessionContext(state, peer, self.user, self.owner, send, later)
        self.later = later
        self.fail = self.context.fail
        self._state = state
        self._send = send
        self._direct_reply = direct_reply
        self._direct_tag = 0
        """The tag of the latest request with a direct reply."""
        self._locks = False
        """Whether the client shows a successor of the daemon that it holds leases. Others get none:
        the successor would write to what they read."""
        self._heir = heir
        self._takes_over = False
        """Whether the client is a daemon that will take this one over."""
        self.datasets = SessionDatasets(self.context, opener, refusal)
        self._failures = FailedRequests(self.context, self._answer)
        self.sharing = Sharing(self, self.datasets, self.context, preparer)

    def receive(self, message: Message, now: float) -> Steps | None:  # noqa: C901 (one case each)
        """Handle a message.

        Returns: what is left to do before the next message is received.
        Raises: ProtocolError: the message breaks the protocol; the session must be closed. The
            steps raise it likewise.
        """
        if self.context.phase == NEW:
            if not isinstance(message, protocol.Hello):
                raise ProtocolError("the first message is not HELLO")
            self._hello(message, now)
            return None
        assert self.context.job is not None
        self.context.job.last_seen = now
        match message:
            case protocol.Get() | protocol.Lease():
                return self._ask(message, now)
            case protocol.Tell():
                return self._tell(message, now)
            case protocol.Claim():
                return self.sharing.claim(message, now)
            case protocol.Put():
                return self.sharing.put(message, now)
            case protocol.Prepare():
                self.sharing.prepare(message, now)
            case protocol.Names():
                self.datasets.members(message)
            case protocol.Distrust():
                return self.sharing.distrust(message)
            case protocol.Release():
                return self._release(message, now)
            case protocol.Open():
                return self.datasets.open(message, now)
            case protocol.Files():
                self.datasets.take_files(message)
            case protocol.Order():
                return self.datasets.orders.receive(
                    message, self.datasets.get(message.dataset, "ORDER")
                )
            case protocol.Reached():
                return self._reached(message, now)
            case protocol.Seen():
                return self._seen(message, now)
            case protocol.Close():
                return self.datasets.close(message.dataset)
            case protocol.Status():
                return self._status(message.tag, now)
            case protocol.Resize():
                self._resize(message, now)
            case protocol.Times():
                self._state.statistics.take_times(message.took_ns, message.counts)
            case protocol.Handover():
                self._hand_over(message)
            case protocol.Bye():
                self.context.phase = OVER
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__} message")
        return None

    def _hello(self, message: protocol.Hello, now: float) -> None:
        about = message.about
        general = self._state.about()
        version = protocol.common_version(about, general["server"])
        job = Job.greeted(about, self.peer.viewer, now)
        accepted = about.get("payload", ["shared"])
        if not isinstance(accepted, list) or "shared" not in accepted:
            raise ProtocolError(
                f"the client accepts the payload {reprlib.repr(accepted)}, but the daemon offers "
                "only 'shared': it passes samples in shared memory",
                hint="upgrade ffserve in this client; a process that cannot map shared memory "
                "reads the files without the daemon (server='auto' or 'off')",
            )
        self._locks = about.get("locks") is True
        self._takes_over = about.get("handover") is True
        self.context.job = job
        self.owner.job = job.key
        self.context.phase = READY
        welcome = protocol.Welcome({**general, "version": version})
        self._send(MemoryMessage(welcome, [self._state.memory.page.file]))

    def _resize(self, message: protocol.Resize, now: float) -> None:
        try:
            self._state.resize(message.size, self.peer, now)
        except FFServeError as error:
            self.fail(message.tag, error)
        else:
            self._send(protocol.Report(message.tag, {"arena": arena_facts(self._state)}))

    def _hand_over(self, message: protocol.Handover) -> None:
        if not self._takes_over:
            raise ProtocolError(
                "unexpected HANDOVER message: the HELLO message did not announce it"
            )
        try:
            handover.check(self.peer)
            self._heir(message.tag)
        except FFServeError as error:
            self.fail(message.tag, error)

    # ---- samples --------------------------------------------------------------------------

    def _count(self, hits: int, hit_size: int, now: float) -> None:
        """Add the client's counters."""
        assert self.context.job is not None
        if hits < 0 or hit_size < 0:
            raise ProtocolError("a counter in a message is negative")
        self.context.job.hits = min(self.context.job.hits + hits, LARGEST_COUNT)
        self.context.job.hit_size = min(self.context.job.hit_size + hit_size, LARGEST_COUNT)
        self._state.statistics.hits += hits
        self._state.statistics.hit_size += hit_size
        if hits:
            self.owner.time.used_at = now

    def _acknowledge(self, packed: bytes, first: int) -> None:
        """Unpin the samples of the next few acknowledged GETs, from a byte on."""
        self._state.reading.scheduler.pins.acknowledge(self.owner, _tags(packed, first))

    def _tell(self, message: protocol.Tell, now: float) -> Steps:
        self._count(message.hits, message.hit_size, now)
        dataset = self.datasets.find(message.dataset)
        if dataset is not None and dataset.preparation is not None:
            self.sharing.count_found(dataset.preparation, message.hits)
        for first in range(0, len(message.acknowledged), 4 * FEW):
            self._acknowledge(message.acknowledged, first)
            now = yield None
        self._state.reading.scheduler.pump(now)

    def _release(self, message: protocol.Release, now: float) -> Steps:
        for first in range(0, len(message.tags), 4 * FEW):
            self._state.reading.scheduler.pins.release(self.owner, _tags(message.tags, first))
            now = yield None
        self._state.reading.scheduler.pump(now)

    def _ask(self, message: protocol.Get | protocol.Lease, now: float) -> Steps:
        """Take a request, as soon as its user may have another one."""
        tag, lease, asked = message.tag, isinstance(message, protocol.Lease), now
        if isinstance(message, protocol.Get):
            self._count(message.hits, message.hit_size, now)
            for first in range(0, len(message.acknowledged), 4 * FEW):
                if first:
                    now = yield None
                self._acknowledge(message.acknowledged, first)
        now = yield from self.may_ask(now)
        dataset = self.datasets.get(message.dataset, "LEASE" if lease else "GET")
        if dataset.preparation is not None:
            raise ProtocolError(
                "GET or LEASE message for prepared samples: a client asks for these with CLAIM"
            )
        self.check_tag(tag)
        indices = protocol.unpack_indices(message.indices)
        numbers = yield from self.numbers_of(tag, dataset, indices)
        if numbers is None:
            return
        hits = 0
        if lease:
            hits = yield from self._count_hits(numbers, now)
        if len(numbers) > STEP_COUNT:
            now = yield None
        assert self.context.job is not None
        self.context.job.missed += len(numbers) - hits
        self._state.statistics.missed += len(numbers) - hits
        request = SampleRequest(
            self.owner, tag, numbers, lease=lease, dataset=dataset, indices=indices, asked=asked
        )
        crowded = self.owner.waiting or self.user.requests.held >= MOST_DIRECT_REPLIES
        if dataset.remote and self._state.reading.engines.fetches is not None:
            request.gate = self._state.reading.engines.fetches.gate(numbers, self.peer.owner)
        crowded = crowded or request.gate is not None
        if self._direct_reply is not None and not (crowded or lease):
            request.reply = self._direct_reply(protocol.Ready(tag, len(numbers), []))
            self._direct_tag = tag
        dataset.requests += 1
        if len(indices) == 0 or (lease and not self._locks):
            request.gate = None
            self.finished(request, now)
            return
        self._state.reading.scheduler.add(request, now)
        yield from self._asked(dataset, numbers, now)  # while the disk works

    def _asked(self, dataset: OpenDataset, numbers: Int64s, now: float) -> Steps:
        """Note that samples of a data set were asked for."""
        for first in range(0, len(numbers), STEP_COUNT):
            if first:
                now = yield None
            part = numbers[first : first + STEP_COUNT]
            self._state.memory.cache.used(part)
            self._state.memory.cache.invalidate(dataset.progress.asked(part, now))

    def may_ask(self, now: float) -> Generator[Bound, float, float]:
        """Wait until the user may have another request; return the time."""
        user, waiting = self.user, self.owner.time
        if user.requests.full or user.asked.full:
            waiting.ask(now)
            while user.requests.full or user.asked.full:
                self._state.reading.scheduler.pins.limit(user)
                if user.requests.full or user.asked.full:
                    now = yield user.requests if user.requests.full else user.asked
            waiting.answer(now)
        return now

    def check_tag(self, tag: int) -> None:
        """Raise ProtocolError for a tag that must not be used now."""
        owner = self.owner
        if not 0 < tag < 1 << 32:
            raise ProtocolError(f"invalid tag {tag}: tags go from 1 to 2^32 - 1")
        if tag in owner.unacknowledged or tag in owner.leases or tag in owner.waiting:
            raise ProtocolError(f"tag {tag} is in use already")
        if len(owner.waiting) >= protocol.MOST_REQUESTS:
            raise ProtocolError(
                f"the session has more than {protocol.MOST_REQUESTS} unanswered requests"
            )

    def numbers_of(
        self, tag: int, dataset: OpenDataset, indices: Int64s
    ) -> Generator[None, float, Int64s | None]:
        """Return the samples' numbers; None if one is out of range, and FAIL was sent."""
        layout = dataset.layout
        # As unsigned numbers negative ones are too large as well: one comparison for each.
        if len(indices) and int(indices.view(np.uint64).max()) >= layout.count:
            bad = int(indices[(indices < 0) | (indices >= layout.count)][0])
            self.fail(
                tag,
                SampleIndexError(
                    f"the index is outside the dataset of {layout.count} samples", index=bad
                ),
            )
            return None
        if len(indices) <= STEP_COUNT:
            return layout.numbers(indices)
        numbers = []
        for part in parts(indices):
            numbers.append(layout.numbers(part))
            yield None
        return np.concatenate(numbers)

    def _count_hits(self, numbers: Int64s, now: float) -> Generator[None, float, int]:
        """Count hits of a lease; return how many there are. A client that copies counts its hits
        itself, and asks for misses only."""
        count = 0
        for first in range(0, len(numbers), STEP_COUNT):
            if first:
                now = yield None
            part = numbers[first : first + STEP_COUNT]
            hit = part[self._state.memory.directory.entries["seq"][part] & 1 == 1]
            self._count(len(hit), int(self._state.memory.directory.lengths(hit).sum()), now)
            count += len(hit)
        return count

    @property
    def owes_answer(self) -> bool:
        """Whether the client waits for something."""
        return bool(self.owner.waiting or self._failures.explaining or self.datasets.owes_answer)

    @property
    def has_requests(self) -> bool:
        """Whether a GET or LEASE is not answered yet."""
        return bool(self.owner.waiting)

    @property
    def awaits_direct_reply(self) -> bool:
        """Whether a direct reply may have been sent that this session does not know of."""
        return self._direct_tag in self.owner.waiting

    def finished(self, request: SampleRequest, now: float) -> None:
        """Answer a request that has its outcome."""
        if request.source is not None:
            self.sharing.copied(request)
        if request.failures:
            self.later(self._failures.explain(request))
        else:
            self._answer(request, [], now)

    def _answer(self, request: SampleRequest, errors: list[Any], now: float) -> None:
        if request.reply is None or not request.reply.sent:
            self._send(protocol.Ready(request.tag, request.count, errors))
        dataset: OpenDataset = request.dataset
        assert self.context.job is not None
        waited_s = now - request.asked
        self.context.job.waited_s += waited_s
        self._state.statistics.requests.note(waited_s)
        self.datasets.request_ended(dataset)

    # ---- orders and progress ----------------------------------------------------------------

    def _reached(self, message: protocol.Reached, now: float) -> Steps:
        progress = self.datasets.get(message.dataset, "REACHED").progress
        epoch, position = message.epoch, message.position
        if not (0 <= epoch <= LARGEST_COUNT and 0 <= position <= LARGEST_COUNT):
            raise ProtocolError(
                "invalid REACHED message: the epoch or the position is out of range"
            )
        while True:
            used = progress.advance_to(epoch, position, now)
            for part in parts(used):
                self._state.memory.cache.invalidate(part)
                now = yield None
            self._state.reading.scheduler.prefetcher.advanced(progress)
            if not progress.behind(epoch, position):
                break
        self._state.reading.scheduler.pump(now)

    def _seen(self, message: protocol.Seen, now: float) -> Steps:
        dataset = self.datasets.get(message.dataset, "SEEN")
        indices, layout = protocol.unpack_order(message.indices), dataset.layout
        if len(indices) and int(indices.max()) >= layout.count:
            raise ProtocolError("invalid SEEN message: an index is outside the data set")
        progress = dataset.progress
        for part in parts(indices):
            if not progress.orders or progress.on_demand:
                numbers = layout.numbers(part)
                if progress.orders:
                    progress.passed(numbers)
                else:
                    progress.visited(numbers, now)
                self._state.memory.cache.invalidate(numbers)
                now = yield None

    def _status(self, tag: int, now: float) -> Steps:
        facts = yield from status(self._state, now, self.peer)
        self._send(protocol.Report(tag, facts))

    def leave(self, now: float) -> Steps:
        """Give everything back when the connection is closed: requests at once, the rest in
        steps."""
        if self.context.joined:
            assert self.context.job is not None
            self.context.job.sessions -= 1
            self.context.job.last_seen = now
            self.context.job.time.end(self.owner.time, now)
        self.context.phase = OVER
        self.datasets.refuse_files(UsageError("the session has ended"))
        self.datasets.orders.forget()
        return self._leaving(self._state.reading.scheduler.leave(self.owner, now))

    def _leaving(self, pins: Iterator[None]) -> Steps:
        yield from pins
        yield from self.datasets.leave()


def _tags(packed: bytes, first: int) -> list[int]:
    """Return the next few tags, from a byte on."""
    if len(packed) % 4:
        raise ProtocolError(f"invalid tags: {len(packed)} bytes are not a multiple of 4")
    return protocol.unpack_tags(packed[first : first + 4 * FEW])
