"""Opened: the data sets that one session has open, from OPEN and FILES to CLOSE.

Opening takes other threads: it goes out through `opener` and comes back through `opened` or
`failed`; `need` asks the client for descriptors meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ffserve import protocol
from ffserve.dataset.layout import Layout
from ffserve.errors import (
    AccessDenied,
    FFServeError,
    MissingFile,
    ProtocolError,
    ReadError,
    UsageError,
)
from ffserve.limits import MOST_DATASETS, MOST_USER_DATASETS
from ffserve.server.files.remote import identity_from
from ffserve.server.files.shards import Identity, OpenShard, PassedFile, Request
from ffserve.server.sessions.context import OVER, READY, SessionContext
from ffserve.server.sessions.datasets import FEW, OpenDataset, OrderReceiver, Steps
from ffserve.server.sessions.outbox import MemoryMessage
from ffserve.store.credentials import Access, served
from ffserve.store.origin import ObjectVersion
from ffserve.store.urls import is_url, shown

NAMED_SIZE = 256 << 10
"""A NAMED ends with the block with which it has this many bytes."""
ROW_SIZE = protocol.IDENTITY_DTYPE.itemsize


@dataclass(slots=True)
class _Needed:
    """Descriptors that were asked for. answer: called with them, or with the reason why they do not
    come."""

    tag: int
    positions: list[int]
    answer: Callable[[list[PassedFile] | FFServeError], None]


class SessionDatasets:
    """See the module's text.

    Args:
        opener: called with (tag, request) to open a data set.
        refused: why this session may open no data set; None: it may.
    """

    def __init__(
        self,
        context: SessionContext,
        opener: Callable[[int, Request], None],
        refused: FFServeError | None,
    ) -> None:
        self._context = context
        self._opener = opener
        self._refused = refused
        self._datasets: dict[int, OpenDataset] = {}
        self._closing: set[OpenDataset] = set()
        self._mapped: set[int] = set()
        """Domains whose memory the client has got."""
        self._next_dataset = 1
        self.opening = 0
        """Data sets that are being opened."""
        self._needed: _Needed | None = None
        self.received: list[int] = []
        """Descriptors that came since NEED was sent."""
        self.received_too_many = False
        """The kernel dropped descriptors, since the daemon may have no more."""
        self.orders = OrderReceiver(context.state, context.user, context.send, context.fail)

    def open(self, message: protocol.Open, now: float) -> Steps:
        """Check an OPEN, and let `opener` open the data set."""
        what, user = message.what, self._context.user
        paths: Any = what.get("paths")
        name, verify = what.get("format"), what.get("verify")
        tolerant, parts = what.get("tolerant", False), what.get("parts", False)
        if self.refuses(now):
            return
        if not isinstance(paths, list):
            paths = []
        valid = bool(paths)
        identities: list[Identity] = []
        remote = _RemotePaths(what, len(paths), self._serves)
        for first in range(0, len(paths), FEW):
            part = paths[first : first + FEW]
            valid = valid and all(isinstance(p, str) and "\0" not in p for p in part)
            rows = message.identities[ROW_SIZE * first : ROW_SIZE * (first + len(part))]
            identities += protocol.unpack_identities(rows, len(part))
            if valid:
                valid = remote.take(paths, identities, first)
            now = yield None
        if len(message.identities) != ROW_SIZE * len(paths):
            raise ProtocolError("invalid OPEN message: it does not have one identity for each path")
        if (
            not valid
            or not (name is None or isinstance(name, str))
            or not isinstance(verify, bool)
            or not isinstance(tolerant, bool)
            or not isinstance(parts, bool)
        ):
            raise ProtocolError(
                "invalid OPEN message: a path is not absolute, or an option is invalid"
            )
        if remote.error is not None:
            self._context.fail(message.tag, remote.error)
            return
        if (most := self.refusal()) is not None:
            hint = "close readers, or open many files as one data set"
            self._context.fail(message.tag, UsageError(most, hint=hint))
            return
        while user.opening.full:
            now = yield user.opening
        self._context.join_job(now)
        self.begin_opening()
        found = remote.versions, remote.access, parts
        request = Request(paths, identities, name, verify, tolerant, *found, self._is_wanted)
        self._opener(message.tag, request)

    def refuses(self, now: float) -> bool:
        """Whether this session may open no data set; it is told so then, and over."""
        if self._refused is None:
            return False
        self._context.state.faults.refused(self._context.peer.uid, self._refused, now)
        self._context.fail(0, self._refused)
        self._context.phase = OVER
        return True

    def _is_wanted(self) -> bool:
        return self._context.phase == READY

    def _serves(self, url: str) -> bool:
        remote = self._context.state.files.remote
        return served(url) if remote is None else remote.serves(url, self._context.peer)

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
        if self._context.phase != READY:
            answer(UsageError("the session has ended"))
            return
        self._needed = _Needed(tag, positions, answer)
        self._context.send(protocol.Need(tag, protocol.pack_positions(positions)))

    def refuse_files(self, error: FFServeError) -> None:
        """Wait no longer for the descriptors that were asked for."""
        needed, self._needed = self._needed, None
        if needed is not None:
            needed.answer(error)

    @property
    def needs_files(self) -> bool:
        """Whether descriptors may come with the next bytes; others are left to the kernel."""
        return self._needed is not None

    def take_files(self, message: protocol.Files) -> None:
        """Take the descriptors that came with a message."""
        needed = self._needed
        if needed is None or needed.tag != message.tag:
            return  # too late: the OPEN has failed
        kinds, fds = message.kinds, self.received
        if self.received_too_many:
            self.refuse_files(
                ReadError(
                    "the daemon cannot receive more descriptors: it has too many files open",
                    hint="raise the limit on open files (ulimit -n, LimitNOFILE= in the systemd "
                    "unit)",
                )
            )
        elif kinds and not fds:
            self.refuse_files(
                AccessDenied(
                    f"{len(kinds)} descriptors were announced, but none came with the message",
                    hint="only a direct connection through a Unix socket passes descriptors; "
                    "connect without a proxy",
                )
            )
        elif len(kinds) != len(fds):
            raise ProtocolError(
                f"a FILES message announces {len(kinds)} descriptors, but {len(fds)} came with it"
            )
        elif not kinds:
            self.refuse_files(UsageError("the client stopped opening the data set"))
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
                raise ProtocolError(
                    f"invalid FILES message: a descriptor of kind {kind} is not expected"
                )
        return files

    def refusal(self) -> str | None:
        """Return why no further data set may be opened."""
        if len(self._datasets) + self.opening >= MOST_DATASETS:
            return f"this process already has {MOST_DATASETS} data sets open"
        if self._context.user.datasets >= MOST_USER_DATASETS:
            return f"user {self._context.user.uid} already has {MOST_USER_DATASETS} data sets open"
        return None

    def opened(self, tag: int, paths: list[str], shards: list[OpenShard]) -> None:
        """Take a data set that is open; the session holds its shards from now on."""
        if self._context.phase != READY:
            self._context.state.files.catalog.close(shards, self._context.peer.owner)
            self.opening -= 1
            self._context.user.datasets -= 1
            return
        counts = np.array([shard.count for shard in shards], np.int64)
        bases = np.array([shard.base for shard in shards], np.int64)
        assert self._context.job is not None
        progress = self._context.state.memory.next_use.join(self._context.job.key, bases, counts)
        progress.payload_size = sum(shard.payload_size for shard in shards)
        if not self._context.job.paths:
            more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
            self._context.job.paths = paths[0] + more
        fetches = self._context.state.reading.engines.fetches
        dataset = OpenDataset(paths, shards, Layout(counts, bases), progress)
        if fetches is not None:
            remote = [each.base for each in shards if each.remote is not None and each.count]
            dataset.remote = bool(remote)
            if remote:
                fetches.follow(progress, remote, self._context.peer.owner)
        self.enter(tag, dataset)

    def begin_opening(self) -> None:
        """Note that a data set is being opened, until `enter` or `not_opened` is called."""
        self._context.user.datasets += 1
        self.opening += 1

    def enter(self, tag: int, dataset: OpenDataset) -> None:
        """Enter a data set that was opened, and answer."""
        self.opening -= 1
        number = self._next_dataset
        self._next_dataset += 1
        self._datasets[number] = dataset
        self._context.later(self._answer_open(tag, number, dataset.shards))

    def not_opened(self, tag: int, error: FFServeError) -> None:
        """Answer for a data set that could not be opened."""
        self._context.user.datasets -= 1
        self.opening -= 1
        self._context.fail(tag, error)

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
            self._context.send(message)
            return
        self._mapped.update(fresh)
        message.domains = protocol.pack_tags(list(fresh))
        files = [file for domain in fresh.values() for file in domain.files]
        self._context.send(MemoryMessage(message, files))

    def failed(self, tag: int, error: FFServeError, now: float) -> None:
        """Answer an OPEN that failed."""
        if not isinstance(error, (MissingFile, UsageError)):
            uid, lines = self._context.peer.uid, self._context.state.faults.lines
            lines.warning("cannot open files for user %d: %s", uid, error, user=uid, now=now)
        self.not_opened(tag, error)

    def close(self, number: int) -> Steps | None:
        """Close a data set, in steps; its shards stay open for requests under way."""
        dataset = self._datasets.pop(number, None)
        if dataset is None:
            return None
        self._leave_progress(dataset)
        self.orders.forget(dataset)
        self._closing.add(dataset)
        return self._leave_claims(dataset, close=not dataset.requests)

    def _leave_claims(self, dataset: OpenDataset, *, close: bool) -> Steps:
        yield from self._context.state.claims.leave(dataset)
        if close:
            yield from self._close_shards(dataset)

    def _close_shards(self, dataset: OpenDataset) -> Steps:
        """Close the shards; `leave` goes on with it if these steps end early."""
        if dataset.memory_file is not None:
            file, dataset.memory_file = dataset.memory_file, None
            if dataset.source is not None:
                dataset.source.feeds -= 1
            self._context.state.reading.engines.copier.drop(file)
            self._context.user.memory_files -= 1
        while part := dataset.shards[dataset.closed : dataset.closed + FEW]:
            dataset.closed += len(part)
            self._context.state.files.catalog.close(part, self._context.peer.owner)
            yield None
        self._closing.discard(dataset)
        self._context.user.datasets -= 1

    def _leave_progress(self, dataset: OpenDataset) -> None:
        self._context.state.memory.next_use.leave(dataset.progress, dataset)
        fetches = self._context.state.reading.engines.fetches
        if dataset.remote and fetches is not None and not dataset.progress.sessions:
            fetches.leave(dataset.progress)
        self._context.state.reading.scheduler.prefetcher.advanced(dataset.progress)

    def find(self, number: int) -> OpenDataset | None:
        """Return an open data set; None if no data set has the number."""
        return self._datasets.get(number)

    def get(self, number: int, message: str) -> OpenDataset:
        """Return an open data set. Raises: ProtocolError: no data set has the number."""
        dataset = self._datasets.get(number)
        if dataset is None:
            raise ProtocolError(f"{message} message for data set {number}, which is not open")
        return dataset

    def members(self, message: protocol.Names) -> None:
        """Answer with names of members."""
        shards = self.get(message.dataset, "NAMES").shards
        if len(message.blocks) % 8 or not 0 < len(message.blocks) <= 8 * protocol.MOST_NAMED:
            raise ProtocolError(f"invalid NAMES message: {len(message.blocks)} bytes of blocks")
        found: list[bytes] = []
        size = 0
        for shard, number in np.frombuffer(message.blocks, "<u4").reshape(-1, 2).tolist():
            block = shards[shard].block(number) if shard < len(shards) else None
            if block is None:
                raise ProtocolError(f"invalid NAMES message: block {number} of shard {shard}")
            found.append(block)
            size += len(block)
            if size >= NAMED_SIZE:
                break
        self._context.send(protocol.Named(message.tag, list(found)))

    @property
    def owes_answer(self) -> bool:
        """Whether the client waits for a data set, for the answer to an order or to a CLAIM."""
        if self.opening or self.orders.receiving:
            return True
        return any(map(self._context.state.claims.waiting_count, self._datasets.values()))

    def request_ended(self, dataset: OpenDataset) -> None:
        """Note that a request for a data set is answered, or was dropped."""
        dataset.requests -= 1
        if self._context.phase == READY and not dataset.requests and dataset in self._closing:
            self._context.later(self._close_shards(dataset))

    def leave(self) -> Steps:
        """Close all data sets of a session that has ended, in steps."""
        for dataset in self._datasets.values():
            self._leave_progress(dataset)
            yield from self._context.state.claims.leave(dataset)
            yield from self._close_shards(dataset)
        for dataset in tuple(self._closing):
            yield from self._context.state.claims.leave(dataset)
            yield from self._close_shards(dataset)
        self._datasets.clear()


class _RemotePaths:
    """The remote files of an OPEN, as the client describes them.

    Args: what: of the message. count: of its paths. serves: whether the daemon fetches a URL.
    """

    def __init__(self, what: dict[str, Any], count: int, serves: Callable[[str], bool]) -> None:
        self.versions: dict[int, ObjectVersion] = {}
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
            # No file has this identity; the catalog makes the identity of the object.
            identities[k] = 0, k, size, modified, -1
        return True
