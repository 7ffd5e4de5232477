"""Session: one client's connection, without its socket.

`receive` takes a message and the time; messages for the client go to `send`. Opening a data set
takes other threads: it goes out through `opener` and comes back through `opened` or `failed`;
`need` asks the client for descriptors meanwhile. So does explaining why samples failed
(`explaining.py`).

    phase        message                                       next
    NEW          HELLO                                         READY (or refused)
    READY        OPEN GET LEASE RELEASE STATUS CLOSE TELL      READY
    READY        FILES ORDER REACHED SEEN RESIZE TIMES         READY
    READY        HANDOVER PREPARE CLAIM PUT DISTRUST           READY
    READY        BYE                                           OVER
    any          anything else: FAIL with tag 0                OVER

The session gives back its data sets, pins and leases in `leave`, however it ends.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ffserve import protocol
from ffserve.cache.cache import Int64s
from ffserve.dataset import Layout
from ffserve.errors import (
    AccessDenied,
    Failure,
    FFServeError,
    MissingFile,
    ProtocolError,
    ReadError,
    SampleIndexError,
    UsageError,
)
from ffserve.protocol import Message
from ffserve.server.files.explaining import FailedSample
from ffserve.server.files.remote import identity_from
from ffserve.server.files.shards import Identity, OpenShard, PassedFile, Request
from ffserve.server.life import handover
from ffserve.server.prepared.sharing import PrepareRequest, Sharing
from ffserve.server.reading.scheduler import Owner, Reply, SampleRequest
from ffserve.server.sessions.datasets import STEP_COUNT, Dataset, OrderReceiver, Steps, parts
from ffserve.server.sessions.outbox import MemoryMessage
from ffserve.server.sessions.state import LARGEST_COUNT, Job, ServerState
from ffserve.server.status.report import arena_facts, status
from ffserve.server.users.peers import Peer
from ffserve.server.users.shares import MOST_USER_DATASETS, Bound, User
from ffserve.store.access import Access, served
from ffserve.store.origin import Identity as RemoteIdentity
from ffserve.store.urls import is_url, shown

NEW, READY, OVER = "new", "ready", "over"

MOST_DATASETS = 4096
MOST_ERRORS = 1024
"""Failed samples in one READY, so that it fits into a frame; it then answers for fewer samples."""
MOST_DIRECT_REPLIES = 4
"""A request gets a direct reply while its user has fewer requests than this, and its
session has no other. With more requests, the loop answers several of them in one turn."""
ROW_SIZE = protocol.IDENTITY_DTYPE.itemsize
FEW = 64
"""Tags, paths, shards, data sets or errors that are handled in one step."""


@dataclass(slots=True)
class _Needed:
    """Descriptors that were asked for. answer: takes them, or why they do not come."""

    tag: int
    positions: list[int]
    answer: Callable[[list[PassedFile] | FFServeError], None]


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
        self.phase = NEW
        self.peer = peer
        self.job: Job | None = None
        self._state = state
        self._send = send
        self._opener = opener
        self._direct_reply = direct_reply
        self._direct_tag = 0
        """The tag of the latest request with a direct reply."""
        self._locks = False
        """Whether the client shows a successor of the daemon that it holds leases. Others get none:
        the successor would write to what they read."""
        self.user = User() if user is None else user
        self.later = later
        self._refusal = refusal
        self._heir = heir
        self._takes_over = False
        """Whether the client is a daemon that will take this one over."""
        self.owner = Owner(self.finished, user=self.user, who=peer.owner)
        self._datasets: dict[int, Dataset] = {}
        self._closing: set[Dataset] = set()
        self._mapped: set[int] = set()
        """Domains whose memory the client has got."""
        self._next_dataset = 1
        self._opening = 0
        self._explaining = 0
        """Answers that wait until it is known why samples failed."""
        self._needed: _Needed | None = None
        self.received: list[int] = []
        """Descriptors that came since NEED was sent."""
        self.received_too_many = False
        """The kernel dropped descriptors, since the daemon may have no more."""
        self.joined = False
        """Whether it counts for its job: it has opened a data set."""
        self._orders = OrderReceiver(state, self.user, send, self.fail)
        self.sharing = Sharing(self, state, send, preparer)

    def receive(self, message: Message, now: float) -> Steps | None:  # noqa: C901 (one case each)
        """Handle a message.

        Returns: what is left to do before the next message is received.
        Raises: ProtocolError: the message breaks the protocol; the session must be closed. The
            steps raise it likewise.
        """
        if self.phase == NEW:
            if not isinstance(message, protocol.Hello):
                raise ProtocolError("the first message is not HELLO")
            self._hello(message, now)
            return None
        assert self.job is not None
        self.job.last_seen = now
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
                self.sharing.prepare(message)
            case protocol.Distrust():
                return self.sharing.distrust(message)
            case protocol.Release():
                return self._release(message, now)
            case protocol.Open():
                return self._open(message, now)
            case protocol.Files():
                self._files(message)
            case protocol.Order():
                return self._orders.receive(message, self.dataset_of(message.dataset, "ORDER"))
            case protocol.Reached():
                return self._reached(message, now)
            case protocol.Seen():
                return self._seen(message, now)
            case protocol.Close():
                return self._close(message.dataset)
            case protocol.Status():
                return self._status(message.tag, now)
            case protocol.Resize():
                self._resize(message)
            case protocol.Times():
                self._state.statistics.take_times(message.took_ns, message.counts)
            case protocol.Handover():
                self._hand_over(message)
            case protocol.Bye():
                self.phase = OVER
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
                f"the client accepts the payload {reprlib.repr(accepted)}, the daemon offers "
                "'shared': samples go through shared memory only",
                hint="a process that cannot map it reads the files without the daemon "
                "(server='auto' or 'off'); upgrade ffserve in this client",
            )
        self._locks = about.get("locks") is True
        self._takes_over = about.get("handover") is True
        self.job = job
        self.owner.job = job.name
        self.phase = READY
        welcome = protocol.Welcome({**general, "version": version})
        self._send(MemoryMessage(welcome, [self._state.page.file]))

    def _resize(self, message: protocol.Resize) -> None:
        try:
            self._state.resize(message.size, self.peer)
        except FFServeError as error:
            self.fail(message.tag, error)
        else:
            self._send(protocol.Report(message.tag, {"arena": arena_facts(self._state)}))

    def _hand_over(self, message: protocol.Handover) -> None:
        if not self._takes_over:
            raise ProtocolError("a HANDOVER message that HELLO did not announce")
        try:
            handover.check(self.peer)
            self._heir(message.tag)
        except FFServeError as error:
            self.fail(message.tag, error)

    def fail(self, tag: int, error: FFServeError) -> None:
        """Report that a request failed; tag 0: that the session did."""
        if self.job is not None:
            self.job.errors += 1
        self._state.statistics.errors[error.code] += 1
        self._send(protocol.Fail(tag, protocol.error_to_wire(error)))

    # ---- data sets ------------------------------------------------------------------------

    def _join_job(self, now: float) -> None:
        """Count for the job from the first data set on: a client that asks for the status only is
        no job."""
        assert self.job is not None
        if self.joined:
            return
        self.joined = True
        self.job = self._state.join(self.job, self.peer, now)
        self.job.time.begin(self.owner.time, now)
        self.owner.job = self.job.name

    def _open(self, message: protocol.Open, now: float) -> Steps:
        what, user = message.what, self.user
        paths: Any = what.get("paths")
        name, verify = what.get("format"), what.get("verify")
        tolerant = what.get("tolerant", False)
        if self._refusal is not None:
            self._state.note_refused(self.peer.uid, self._refusal, now)
            self.fail(0, self._refusal)
            self.phase = OVER
            return
        if not isinstance(paths, list):
            paths = []
        valid = bool(paths)
        identities: list[Identity] = []
        remote = _Remote(what, len(paths), self._serves)
        for first in range(0, len(paths), FEW):
            part = paths[first : first + FEW]
            valid = valid and all(isinstance(p, str) and "\0" not in p for p in part)
            rows = message.identities[ROW_SIZE * first : ROW_SIZE * (first + len(part))]
            identities += protocol.unpack_identities(rows, len(part))
            if valid:
                valid = remote.take(paths, identities, first)
            now = yield None
        if len(message.identities) != ROW_SIZE * len(paths):
            raise ProtocolError("invalid OPEN message: not one identity for each path")
        if (
            not valid
            or not (name is None or isinstance(name, str))
            or not isinstance(verify, bool)
            or not isinstance(tolerant, bool)
        ):
            raise ProtocolError("invalid OPEN message: no absolute paths, or an invalid option")
        if remote.error is not None:
            self.fail(message.tag, remote.error)
            return
        if (most := self.most_datasets()) is not None:
            hint = "close readers, or open many files as one data set"
            self.fail(message.tag, UsageError(most, hint=hint))
            return
        while user.opening.full:
            now = yield user.opening
        self._join_job(now)
        self.begin_opening()
        found = remote.versions, remote.access
        self._opener(message.tag, Request(paths, identities, name, verify, tolerant, *found))

    def _serves(self, url: str) -> bool:
        remote = self._state.remote
        return served(url) if remote is None else remote.serves(url, self.peer)

    def need(
        self,
        tag: int,
        positions: list[int],
        answer: Callable[[list[PassedFile] | FFServeError], None],
    ) -> None:
        """Ask the client for descriptors of files of an OPEN; one OPEN at a time.

        Args: answer: called once, with descriptors of the first few of these files, which become
            the callee's, or with the reason why there are none.
        """
        assert self._needed is None
        if self.phase != READY:
            answer(UsageError("the session has ended"))
            return
        self._needed = _Needed(tag, positions, answer)
        self._send(protocol.Need(tag, protocol.pack_positions(positions)))

    def refuse_files(self, error: FFServeError) -> None:
        """Wait no longer for the descriptors that were asked for."""
        needed, self._needed = self._needed, None
        if needed is not None:
            needed.answer(error)

    @property
    def needs_files(self) -> bool:
        """Whether descriptors may come with the next bytes; others are left to the kernel."""
        return self._needed is not None

    def _files(self, message: protocol.Files) -> None:
        needed = self._needed
        if needed is None or needed.tag != message.tag:
            return  # too late: the OPEN has failed
        kinds, fds = message.kinds, self.received
        if self.received_too_many:
            self.refuse_files(
                ReadError(
                    "the daemon cannot take more descriptors: it has too many files open",
                    hint="raise the limit on open files (ulimit -n, LimitNOFILE= in the systemd "
                    "unit)",
                )
            )
        elif kinds and not fds:
            self.refuse_files(
                AccessDenied(
                    f"{len(kinds)} descriptors were announced, but none came with the message",
                    hint="only a direct connection through a Unix socket passes descriptors: is "
                    "there a proxy in between?",
                )
            )
        elif len(kinds) != len(fds):
            raise ProtocolError(f"{len(fds)} descriptors came with a FILES message of {len(kinds)}")
        elif not kinds:
            self.refuse_files(UsageError("the client gave up opening the data set"))
        else:
            files = self._assign(needed.positions, kinds, fds)
            self._needed, self.received = None, []
            needed.answer(files)

    def _assign(self, positions: list[int], kinds: bytes, fds: list[int]) -> list[PassedFile]:
        """Assign descriptors to the files that were asked for."""
        files: list[PassedFile] = []
        for kind, fd in zip(kinds, fds, strict=True):
            if kind == protocol.RECORD_FILE and len(files) < len(positions):
                files.append(PassedFile(positions[len(files)], fd))
            elif kind == protocol.INDEX_FILE and files and files[-1].index is None:
                files[-1].index = fd
            else:
                raise ProtocolError(f"invalid FILES message: kind {kind} is not due")
        return files

    def most_datasets(self) -> str | None:
        """Return why no further data set may be opened."""
        if len(self._datasets) + self._opening >= MOST_DATASETS:
            return f"this process already has {MOST_DATASETS} data sets open"
        if self.user.datasets >= MOST_USER_DATASETS:
            return f"user {self.user.uid} already has {MOST_USER_DATASETS} data sets open"
        return None

    def opened(self, tag: int, paths: list[str], shards: list[OpenShard]) -> None:
        """The data set is open; the session holds its shards from now on."""
        if self.phase != READY:
            self._state.catalog.close(shards, self.peer.owner)
            self._opening -= 1
            self.user.datasets -= 1
            return
        counts = np.array([shard.count for shard in shards], np.int64)
        bases = np.array([shard.base for shard in shards], np.int64)
        assert self.job is not None
        progress = self._state.next_use.join(self.job.name, bases, counts)
        progress.payload_size = sum(shard.payload_size for shard in shards)
        if not self.job.paths:
            more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
            self.job.paths = paths[0] + more
        fetches = self._state.engines.fetches
        dataset = Dataset(paths, shards, Layout(counts, bases), progress)
        if fetches is not None:
            remote = [each.base for each in shards if each.remote is not None and each.count]
            dataset.remote = bool(remote)
            if remote:
                fetches.follow(progress, remote)
        self.enter(tag, dataset)

    def begin_opening(self) -> None:
        """A data set is being opened; `enter` or `not_opened` ends that."""
        self.user.datasets += 1
        self._opening += 1

    def enter(self, tag: int, dataset: Dataset) -> None:
        """Enter a data set that was opened, and answer."""
        self._opening -= 1
        number = self._next_dataset
        self._next_dataset += 1
        self._datasets[number] = dataset
        self.later(self._answer_open(tag, number, dataset.shards))

    def not_opened(self, tag: int, error: FFServeError) -> None:
        """A data set could not be opened: answer."""
        self.user.datasets -= 1
        self._opening -= 1
        self.fail(tag, error)

    def _answer_open(self, tag: int, number: int, shards: list[OpenShard]) -> Steps:
        table = np.zeros(len(shards), protocol.SHARD_DTYPE)
        for first in range(0, len(shards), FEW):
            part = shards[first : first + FEW]
            rows = table[first : first + FEW]
            rows["base"] = [shard.base for shard in part]
            rows["count"] = [shard.count for shard in part]
            rows["size"] = [shard.size for shard in part]
            rows["fingerprint"] = [shard.fingerprint for shard in part]
            rows["checksum_kind"] = [shard.checksum_kind for shard in part]
            yield None
        formats = [shard.format for shard in shards]
        table["domain"] = [shard.domain.serial for shard in shards]
        self._send_opened(protocol.Opened(tag, number, table.tobytes(), formats), shards)

    def _send_opened(self, message: protocol.Opened, shards: list[OpenShard]) -> None:
        """Send OPENED, with the memory of the domains that the client does not have yet."""
        fresh = {shard.domain.serial: shard.domain for shard in shards}
        for serial in self._mapped:
            fresh.pop(serial, None)
        if not fresh:
            self._send(message)
            return
        self._mapped.update(fresh)
        message.domains = protocol.pack_tags(list(fresh))
        files = [file for domain in fresh.values() for file in domain.files]
        self._send(MemoryMessage(message, files))

    def failed(self, tag: int, error: FFServeError, now: float) -> None:
        """The data set could not be opened."""
        if not isinstance(error, (MissingFile, UsageError)):
            uid, lines = self.peer.uid, self._state.repeated
            lines.warning("cannot open files for user %d: %s", uid, error, user=uid, now=now)
        self.not_opened(tag, error)

    def _close(self, number: int) -> Steps | None:
        dataset = self._datasets.pop(number, None)
        if dataset is None:
            return None
        self._leave_progress(dataset)
        self._orders.forget(dataset)
        self._closing.add(dataset)
        return self._leave_claims(dataset, close=not dataset.requests)

    def _leave_claims(self, dataset: Dataset, *, close: bool) -> Steps:
        yield from self._state.claims.leave(dataset)
        if close:
            yield from self._close_shards(dataset)

    def _close_shards(self, dataset: Dataset) -> Steps:
        """Close the shards; `leave` goes on with it if these steps end early."""
        if dataset.memory_file is not None:
            file, dataset.memory_file = dataset.memory_file, None
            assert dataset.source is not None
            dataset.source.feeds -= 1
            self._state.engines.copier.drop(file)
            self.user.memory_files -= 1
        while part := dataset.shards[dataset.closed : dataset.closed + FEW]:
            dataset.closed += len(part)
            self._state.catalog.close(part, self.peer.owner)
            yield None
        self._closing.discard(dataset)
        self.user.datasets -= 1

    def _leave_progress(self, dataset: Dataset) -> None:
        self._state.next_use.leave(dataset.progress, dataset)
        fetches = self._state.engines.fetches
        if dataset.remote and fetches is not None and not dataset.progress.sessions:
            fetches.leave(dataset.progress)
        self._state.scheduler.prefetcher.advanced(dataset.progress)

    def dataset_of(self, number: int, message: str) -> Dataset:
        """Return an open data set. Raises: ProtocolError: the number in a message is none."""
        dataset = self._datasets.get(number)
        if dataset is None:
            raise ProtocolError(f"{message} for data set {number}, which is not open")
        return dataset

    # ---- samples --------------------------------------------------------------------------

    def _count(self, hits: int, hit_size: int, now: float) -> None:
        """Add the client's counters."""
        assert self.job is not None
        if hits < 0 or hit_size < 0:
            raise ProtocolError("negative counter in a message")
        self.job.hits = min(self.job.hits + hits, LARGEST_COUNT)
        self.job.hit_size = min(self.job.hit_size + hit_size, LARGEST_COUNT)
        self._state.statistics.hits += hits
        self._state.statistics.hit_size += hit_size
        if hits:
            self.owner.time.used_at = now

    def _acknowledge(self, packed: bytes, first: int) -> None:
        """Unpin the samples of the next few acknowledged GETs, from a byte on."""
        self._state.scheduler.acknowledge(self.owner, _tags(packed, first))

    def _tell(self, message: protocol.Tell, now: float) -> Steps:
        self._count(message.hits, message.hit_size, now)
        dataset = self._datasets.get(message.dataset)
        if dataset is not None and dataset.preparation is not None:
            self.sharing.count_found(dataset.preparation, message.hits)
        for first in range(0, len(message.acknowledged), 4 * FEW):
            self._acknowledge(message.acknowledged, first)
            now = yield None
        self._state.scheduler.pump(now)

    def _release(self, message: protocol.Release, now: float) -> Steps:
        for first in range(0, len(message.tags), 4 * FEW):
            self._state.scheduler.release(self.owner, _tags(message.tags, first))
            now = yield None
        self._state.scheduler.pump(now)

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
        dataset = self.dataset_of(message.dataset, "LEASE" if lease else "GET")
        if dataset.preparation is not None:
            raise ProtocolError("GET or LEASE of prepared samples, which are claimed")
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
        assert self.job is not None
        self.job.missed += len(numbers) - hits
        self._state.statistics.missed += len(numbers) - hits
        request = SampleRequest(
            self.owner, tag, numbers, lease=lease, dataset=dataset, indices=indices, asked=asked
        )
        crowded = self.owner.waiting or self.user.requests.held >= MOST_DIRECT_REPLIES
        if dataset.remote and self._state.engines.fetches is not None:
            request.gate = self._state.engines.fetches.gate(numbers, self.peer.owner)
        crowded = crowded or request.gate is not None
        if self._direct_reply is not None and not (crowded or lease):
            request.reply = self._direct_reply(protocol.Ready(tag, len(numbers), []))
            self._direct_tag = tag
        dataset.requests += 1
        if len(indices) == 0 or (lease and not self._locks):
            request.gate = None
            self.finished(request, now)
            return
        self._state.scheduler.add(request, now)
        yield from self._asked(dataset, numbers, now)  # while the disk works

    def _asked(self, dataset: Dataset, numbers: Int64s, now: float) -> Steps:
        """Samples of a data set were asked for: note that they are used."""
        for first in range(0, len(numbers), STEP_COUNT):
            if first:
                now = yield None
            part = numbers[first : first + STEP_COUNT]
            self._state.cache.used(part)
            self._state.cache.invalidate(dataset.progress.asked(part, now))

    def may_ask(self, now: float) -> Generator[Bound, float, float]:
        """Wait until the user may have another request; return the time."""
        user, waiting = self.user, self.owner.time
        if user.requests.full or user.asked.full:
            waiting.ask(now)
            while user.requests.full or user.asked.full:
                self._state.scheduler.limit_pins(user)
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
            raise ProtocolError(f"more than {protocol.MOST_REQUESTS} unanswered requests")

    def numbers_of(
        self, tag: int, dataset: Dataset, indices: Int64s
    ) -> Generator[None, float, Int64s | None]:
        """Return the samples' numbers; None: one is out of range, and FAIL was sent."""
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
            hit = part[self._state.directory.entries["seq"][part] & 1 == 1]
            self._count(len(hit), int(self._state.directory.lengths(hit).sum()), now)
            count += len(hit)
        return count

    @property
    def serves(self) -> bool:
        """Whether it has begun, and has not ended."""
        return self.phase == READY

    @property
    def owes_answer(self) -> bool:
        """Whether the client waits for something."""
        if self.owner.waiting or self._explaining or self._opening or self._orders.receiving:
            return True
        return any(map(self._state.claims.waiting_count, self._datasets.values()))

    @property
    def has_requests(self) -> bool:
        """Whether a GET or LEASE is not answered yet."""
        return bool(self.owner.waiting)

    @property
    def awaits_direct_reply(self) -> bool:
        """Whether a direct reply may have been sent that this session does not know of."""
        return self._direct_tag in self.owner.waiting

    def finished(self, request: SampleRequest, now: float) -> None:
        """A request has its outcome: answer."""
        if request.source is not None:
            self.sharing.copied(request)
        if request.failures:
            self.later(self._explain(request))
        else:
            self._answer(request, [], now)

    def _explain(self, request: SampleRequest) -> Steps:
        """Find out why samples failed, and answer."""
        failed: list[FailedSample] = []
        yield from self._list_failed(request, failed)

        def explained() -> None:
            self._explaining -= 1
            if self.phase == READY:
                self.later(self._answer_failures(request, failed))

        self._explaining += 1
        self._state.explainer.explain(self.user, failed, explained)

    def _answer_failures(self, request: SampleRequest, failed: list[FailedSample]) -> Steps:
        errors: list[Any] = []
        now = yield None
        for each in failed:
            error = each.explained()
            if each.shard is not None:
                self._state.note_failed(each.shard, each.number, error, now, self.peer.uid)
            errors.append([each.position, *protocol.error_to_wire(error)])
            if len(errors) % FEW == 0:
                now = yield None
        assert self.job is not None
        self.job.errors += len(errors)
        if self.phase == READY:
            self._answer(request, errors, now)

    def _answer(self, request: SampleRequest, errors: list[Any], now: float) -> None:
        if request.reply is None or not request.reply.sent:
            self._send(protocol.Ready(request.tag, request.count, errors))
        dataset: Dataset = request.dataset
        assert self.job is not None
        waited_s = now - request.asked
        self.job.waited_s += waited_s
        self._state.statistics.requests.note(waited_s)
        self.request_ended(dataset)

    def request_ended(self, dataset: Dataset) -> None:
        """A request for a data set is answered, or was dropped."""
        dataset.requests -= 1
        if self.phase == READY and not dataset.requests and dataset in self._closing:
            self.later(self._close_shards(dataset))

    def _list_failed(self, request: SampleRequest, failed: list[FailedSample]) -> Steps:
        """List the failed samples of an answer."""
        failures = request.failures
        for first in range(0, request.count, STEP_COUNT):
            part = request.numbers[first : min(first + STEP_COUNT, request.count)]
            for position, number in enumerate(part.tolist(), first):
                failure = failures.get(number)
                if failure is None:
                    continue
                if len(failed) == MOST_ERRORS:
                    request.count = position
                    return
                failed.append(self._failed(request, failure, position, number))
                if len(failed) % FEW == 0:
                    yield None
            yield None

    def _failed(
        self, request: SampleRequest, failure: Failure, position: int, number: int
    ) -> FailedSample:
        dataset: Dataset = request.dataset
        state, index = self._state, int(request.indices[position])
        shard = int(dataset.layout.shards(request.indices[position : position + 1])[0])
        one = request.numbers[position : position + 1]
        path = dataset.paths[shard]
        offset, length = int(state.directory.offsets[number]), int(state.directory.lengths(one)[0])
        error = failure.named(path, index, offset, length, arena_size=state.cache.arena.size)
        opened = dataset.shards[shard] if dataset.preparation is None else None
        return FailedSample(position, number, opened, error, (offset, length, failure.expected))

    # ---- orders and progress ----------------------------------------------------------------

    def _reached(self, message: protocol.Reached, now: float) -> Steps:
        progress = self.dataset_of(message.dataset, "REACHED").progress
        epoch, position = message.epoch, message.position
        if not (0 <= epoch <= LARGEST_COUNT and 0 <= position <= LARGEST_COUNT):
            raise ProtocolError("invalid REACHED message: epoch or position out of range")
        while True:
            used = progress.advance_to(epoch, position, now)
            for part in parts(used):
                self._state.cache.invalidate(part)
                now = yield None
            self._state.scheduler.prefetcher.advanced(progress)
            if not progress.behind(epoch, position):
                break
        self._state.scheduler.pump(now)

    def _seen(self, message: protocol.Seen, now: float) -> Steps:
        dataset = self.dataset_of(message.dataset, "SEEN")
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
                self._state.cache.invalidate(numbers)
                now = yield None

    def _status(self, tag: int, now: float) -> Steps:
        facts = yield from status(self._state, now, self.peer)
        self._send(protocol.Report(tag, facts))

    def leave(self, now: float) -> Steps:
        """The connection is closed: give everything back, requests at once, the rest in steps."""
        if self.joined:
            assert self.job is not None
            self.job.sessions -= 1
            self.job.time.end(self.owner.time, now)
        self.phase = OVER
        self.refuse_files(UsageError("the session has ended"))
        self._orders.forget()
        return self._leaving(self._state.scheduler.leave(self.owner, now))

    def _leaving(self, pins: Iterator[None]) -> Steps:
        yield from pins
        for dataset in self._datasets.values():
            self._leave_progress(dataset)
            yield from self._state.claims.leave(dataset)
            yield from self._close_shards(dataset)
        for dataset in tuple(self._closing):
            yield from self._state.claims.leave(dataset)
            yield from self._close_shards(dataset)
        self._datasets.clear()


class _Remote:
    """The remote files of an OPEN, from what the client says of them.

    Args: what: of the message. count: of its paths. serves: whether the daemon fetches a URL.
    """

    def __init__(self, what: dict[str, Any], count: int, serves: Callable[[str], bool]) -> None:
        self.versions: dict[int, RemoteIdentity] = {}
        self.access: Access | None = None
        self.error: FFServeError | None = None
        """Why they cannot be opened."""
        self._tags: Any = what.get("tags")
        self._access: Any = what.get("access")
        self._count = count
        self._serves = serves

    def take(self, paths: list[str], identities: list[Identity], first: int) -> bool:
        """Take the next paths, from this position on, and give URLs without secrets and identities
        that are no files'; return False if one is neither a path nor a URL with a version."""
        for k in range(first, len(identities)):
            if paths[k].startswith("/"):
                continue
            tags = self._tags
            if not isinstance(tags, list) or len(tags) != self._count or not is_url(paths[k]):
                return False
            if not isinstance(self._access, str):
                return False
            _, _, size, modified, _ = identities[k]
            try:
                if self.access is None:
                    self.access = Access(self._access)
                if self.error is None:
                    version = size, tags[k], modified
                    self.versions[k] = identity_from(paths[k], *version, self._serves)
            except FFServeError as error:
                self.error = error
            paths[k] = shown(paths[k])
            # No file has it; the catalog makes one of the object.
            identities[k] = 0, k, size, modified, -1
        return True


def _tags(packed: bytes, first: int) -> list[int]:
    """Return the next few tags, from a byte on."""
    if len(packed) % 4:
        raise ProtocolError(f"invalid tags: {len(packed)} bytes")
    return protocol.unpack_tags(packed[first : first + 4 * FEW])
