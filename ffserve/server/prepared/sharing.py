"""Sharing: PREPARE, CLAIM, PUT, DISTRUST of one session; `claims.py` has the claims of all."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.dataset.layout import Layout
from ffserve.dtypes import Int64s, UInt64s
from ffserve.errors import FFServeError, ProtocolError, ReadError, UsageError
from ffserve.limits import MOST_NAME, MOST_WAITING
from ffserve.server.files.preparations import Preparation
from ffserve.server.files.shards import Sources, items
from ffserve.server.prepared.claims import WaitingClaim
from ffserve.server.reading.requests import SampleRequest
from ffserve.server.sessions.context import READY, SessionContext
from ffserve.server.sessions.datasets import OpenDataset, Steps
from ffserve.server.sessions.opened import SessionDatasets
from ffserve.server.users.shares import Bound

EVICTED_COUNT = 1024
"""One step evicts this many prepared samples."""


@dataclass(slots=True, eq=False)
class PrepareRequest:
    """The content of a PREPARE message.

    source: the data set, which stays open meanwhile; None: the samples are made of no file.
    sources, firsts: what they are made of, and the index of the first sample of each.
    """

    source: OpenDataset | None
    sources: Sources
    firsts: list[int]
    key: bytes
    name: str

    @property
    def paths(self) -> list[str]:
        """The names of what the samples are made of."""
        return [self.name] if self.source is None else self.source.paths


class SessionRequests(Protocol):
    """The interface of a session's requests that sharing needs, since a PUT is a request."""

    def may_ask(self, now: float) -> Generator[Bound, float, float]:
        """Wait until the user may have another request; return the time."""
        ...

    def check_tag(self, tag: int) -> None:
        """Raise ProtocolError for a tag that must not be used now."""
        ...

    def numbers_of(
        self, tag: int, dataset: OpenDataset, indices: Int64s
    ) -> Generator[None, float, Int64s | None]:
        """Return the samples' numbers; None if one is out of range, and FAIL was sent."""
        ...

    def finished(self, request: SampleRequest, now: float) -> None:
        """Answer a request that has its outcome."""
        ...


class Sharing:
    """The part of a session that shares prepared samples.

    Args:
        preparer: called with the tag and what is asked for to get the memory file; `opened` or
            `not_opened` must be called then. None: nothing is shared.
    """

    def __init__(
        self,
        requests: SessionRequests,
        datasets: SessionDatasets,
        context: SessionContext,
        preparer: Callable[[int, PrepareRequest], None] | None,
    ) -> None:
        self._requests = requests
        self._datasets = datasets
        self._context = context
        self._state = context.state
        self._preparer = preparer

    def prepare(self, message: protocol.Prepare, now: float) -> None:
        """Open the prepared samples of a data set, or of no file."""
        context, state = self._context, self._state
        tag = message.tag
        source: OpenDataset | None = None
        sources: Sources
        name, count = message.what.get("name"), message.what.get("count")
        if message.dataset or count is None:
            source = self._datasets.get(message.dataset, "PREPARE")
            sources, firsts = source.shards, source.layout.firsts[:-1].tolist()
        elif type(count) is not int or not 0 < count < 1 << 48:
            raise ProtocolError("invalid PREPARE message: the count is invalid")
        elif self._datasets.refuses(now):
            return
        else:
            context.join_job(now)
            sources, firsts = [items(count, context.peer.owner)], [0]
        if (
            len(message.key) != protocol.KEY_SIZE
            or not isinstance(name, str)
            or len(name) > MOST_NAME
        ):
            raise ProtocolError("invalid PREPARE message: the key or the name is invalid")
        if source is not None and source.preparation is not None:
            raise ProtocolError("PREPARE message for a data set that has prepared samples itself")
        assert self._preparer is not None
        if (most := self._datasets.refusal()) is not None:
            context.fail(tag, UsageError(most, hint="close readers"))
            return
        user, most_files = context.user, state.reading.engines.copier.most_files
        files = state.reading.engines.copier.file_count
        if not user.may_take(1, user.memory_files, files, most_files):
            context.fail(
                tag,
                ReadError(
                    f"user {user.uid} has {user.memory_files} data sets of prepared samples open, "
                    f"and all users together have {files} of at most {most_files}",
                    hint="close readers, or raise the daemon's limit on open files "
                    "(LimitNOFILE= in the systemd unit, ulimit -n)",
                ),
            )
            return
        user.memory_files += 1
        self._datasets.begin_opening()
        if source is not None:
            source.requests += 1
        self._preparer(tag, PrepareRequest(source, sources, firsts, message.key, name))

    def opened(self, tag: int, request: PrepareRequest, fd: int) -> None:
        """Take the memory file for prepared samples; the session owns it from now on.

        Raises: ReadError: the tables are full. `not_opened` must be called then.
        """
        context, source = self._context, request.source
        owner = context.peer.owner
        catalog, next_use = self._state.files.catalog, self._state.memory.next_use
        if context.phase != READY:
            raise UsageError("the session has ended")
        shards = catalog.open_prepared(
            request.sources, request.firsts, request.key, request.name, owner
        )
        file = self._state.reading.engines.copier.open(fd)
        counts = np.array([shard.count for shard in shards], np.int64)
        bases = np.array([shard.base for shard in shards], np.int64)
        assert context.job is not None
        progress = next_use.join(context.job.key, bases, counts)
        progress.on_demand = True
        preparation = catalog.preparations.obtain(owner, request.key, request.name)
        group = next_use.groups[progress.group]
        group.saved_s, group.owner = preparation.saved_per_byte_s, progress.owner
        if source is not None:
            source.progress.feeds += 1
        elif not context.job.paths:
            context.job.paths = shards[0].path
        dataset = OpenDataset(
            request.paths,
            shards,
            Layout(counts, bases),
            progress,
            preparation=preparation,
            memory_file=file,
            source=None if source is None else source.progress,
        )
        self._datasets.enter(tag, dataset)
        if source is not None:
            self._datasets.request_ended(source)

    def not_opened(self, tag: int, request: PrepareRequest, error: FFServeError) -> None:
        """Answer a PREPARE that failed."""
        self._context.user.memory_files -= 1
        if request.source is not None:
            self._datasets.request_ended(request.source)
        self._datasets.not_opened(tag, error)

    def _prepared(self, number: int, message: str) -> tuple[OpenDataset, Preparation]:
        dataset = self._datasets.get(number, message)
        if dataset.preparation is None:
            raise ProtocolError(f"{message} message for a data set that has no prepared samples")
        return dataset, dataset.preparation

    def claim(self, message: protocol.Claim, now: float) -> Steps:
        """Answer a CLAIM, at once or when no other session prepares its samples."""
        dataset, preparation = self._prepared(message.dataset, "CLAIM")
        claims, indices = self._state.claims, protocol.unpack_indices(message.indices)
        if len(indices) > protocol.MOST_CLAIMED or claims.waiting_count(dataset) >= MOST_WAITING:
            raise ProtocolError(
                "invalid CLAIM message: it names too many samples, or too many CLAIMs wait"
            )
        numbers = yield from self._requests.numbers_of(message.tag, dataset, indices)
        if numbers is None:
            return

        def answer(states: NDArray[np.uint8]) -> None:
            self._context.send(protocol.Claimed(message.tag, states.tobytes()))

        if not preparation.trusted:
            answer(np.full(len(numbers), protocol.UNSHARED, np.uint8))
        elif message.wait:
            waiting = WaitingClaim(
                dataset, numbers, lambda: preparation.trusted, answer, self._settle_later
            )
            claims.wait(waiting, now)
        else:
            answer(claims.claim(dataset, numbers, now))
            self._state.memory.cache.invalidate(dataset.progress.asked(numbers, now))
            if dataset.progress.orders:
                dataset.progress.passed(numbers)
                self._state.memory.cache.invalidate(numbers)

    def _settle_later(self, waiting: WaitingClaim) -> None:
        self._context.later(self._settle(waiting))

    def _settle(self, waiting: WaitingClaim) -> Steps:
        now = yield None
        self._state.claims.settle(waiting, now)

    def put(self, message: protocol.Put, now: float) -> Steps:
        """Copy prepared samples that this session has claimed out of its memory file."""
        requests, state = self._requests, self._state
        dataset, preparation = self._prepared(message.dataset, "PUT")
        indices = protocol.unpack_indices(message.indices)
        places, sizes = _extents(message, len(indices))
        asked, now = now, (yield from requests.may_ask(now))
        requests.check_tag(message.tag)
        numbers = yield from requests.numbers_of(message.tag, dataset, indices)
        if numbers is None:
            return
        claimed = state.claims.hand_over(dataset, numbers)
        chosen = claimed & (sizes > 0) & (state.memory.directory.slot_of[numbers] == 0)
        chosen &= preparation.trusted
        same = state.memory.directory.set_new_lengths(
            numbers[chosen], sizes[chosen].astype(np.int64)
        )
        state.memory.directory.offsets[numbers[chosen]] = places[chosen]
        given_up = numbers[claimed & ~chosen].tolist()
        if not same.all():
            given_up += numbers[chosen].tolist()
            chosen[:] = False
        state.claims.end(dataset, given_up)
        if chosen.any():
            self._count(preparation, sizes[chosen], message.cost_us)
        request = SampleRequest(
            self._context.owner,
            message.tag,
            numbers[chosen],
            dataset=dataset,
            indices=indices[chosen],
            asked=asked,
        )
        request.source = dataset.memory_file
        dataset.requests += 1
        if len(request.numbers):
            state.reading.scheduler.add(request, now)
        else:
            requests.finished(request, now)
        if not same.all():
            yield from self._stop(dataset, preparation)

    def _count(self, preparation: Preparation, sizes: UInt64s, cost_us: int) -> None:
        arena, largest = self._state.memory.arena, int(sizes.max())
        if not preparation.count and int(sizes.min()) == largest <= arena.slab_size:
            arena.make_class(largest)  # as `Cache.fit` does for the samples of a file
        preparation.count += len(sizes)
        preparation.size += int(sizes.sum())
        preparation.cost_s += cost_us / 1e6
        statistics = self._state.statistics
        statistics.prepared += len(sizes)
        statistics.preparing_s += cost_us / 1e6

    def count_found(self, preparation: Preparation, count: int) -> None:
        """Count samples that a client found in memory."""
        preparation.shared_count += count
        statistics = self._state.statistics
        statistics.prepared_found += count
        statistics.preparing_saved_s += count * preparation.mean_cost_s

    def copied(self, request: SampleRequest) -> None:
        """End the claims of a PUT, whose samples are in memory or could not be copied."""
        self._state.reading.scheduler.pins.acknowledge(self._context.owner, [request.tag])
        self._state.claims.end(request.dataset, request.numbers.tolist())

    def distrust(self, message: protocol.Distrust) -> Steps:
        """Share no sample of a preparation any more."""
        dataset, preparation = self._prepared(message.dataset, "DISTRUST")
        return self._stop(dataset, preparation)

    def _stop(self, dataset: OpenDataset, preparation: Preparation) -> Steps:
        """Forget the samples of a preparation that is not deterministic, as far as they are not in
        use."""
        state = self._state
        state.files.catalog.preparations.distrust(preparation)
        for shard in dataset.shards:
            for first in range(shard.base, shard.base + shard.count, EVICTED_COUNT):
                end = min(first + EVICTED_COUNT, shard.base + shard.count)
                state.memory.cache.allocator.evict(first, end)
                yield None


def _extents(message: protocol.Put, count: int) -> tuple[UInt64s, UInt64s]:
    """Return the places and the sizes in a PUT. Raises: ProtocolError."""
    places: UInt64s = protocol.unpack_numbers(message.places, count, "<u8")
    sizes: UInt64s = protocol.unpack_numbers(message.lengths, count, "<u8")
    if count > protocol.MOST_CLAIMED or not 0 <= message.cost_us < 1 << 53:
        raise ProtocolError(
            "invalid PUT message: it names too many samples, or its cost is invalid"
        )
    if count and (int(sizes.max()) > protocol.MOST_PREPARED_SIZE or int(places.max()) >> 62):
        raise ProtocolError("invalid PUT message: a place or length is out of range")
    return places, sizes
