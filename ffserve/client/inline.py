"""Samples through the socket, for a process that cannot map the daemon's memory.

One GET a request where that is possible: SENDING then tells all lengths, the destination is
allocated, and the bytes are received straight into it. A request that the daemon answers in parts
is put together from them, at the cost of one more copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.client.inbox import MOST_PIECES
from ffserve.client.remote import RemoteSource
from ffserve.client.request import Awaited, failures_of
from ffserve.client.source import Batch, Bytes, Int64s, Leased, Pending, Target, check_out
from ffserve.errors import FFServeError, ProtocolError, UsageError

GETS_IN_FLIGHT = 4
_UNKNOWN = (1 << 48) - 1


Tables: TypeAlias = tuple[NDArray[np.uint64], Int64s, NDArray[np.uint32]]
"""Offsets, lengths and checksums, one a sample."""


class Parcel:
    """The samples of one GET, as they come: the `Sink` of a connection's inbox.

    Args:
        count: samples asked for. most: the longest one that there can be, in bytes.
        apart, out: as of `Source.start`; `out` only where the GET is the whole request.
    """

    def __init__(self, count: int, most: int, *, apart: bool, out: Bytes | None) -> None:
        self.target: Target | None = None
        self.refused: UsageError | None = None
        """Why `out` cannot be used; the bytes went elsewhere."""
        self._count = count
        self._most = most
        self._apart = apart
        self._out = out
        self._come = 0
        self._total = 0

    def begin(self, lengths: NDArray[np.uint64]) -> None:
        """Take the lengths."""
        if self.target is not None or len(lengths) > self._count:
            raise ProtocolError("the daemon sends samples that were not asked for")
        if len(lengths) and int(lengths.max()) > self._most:
            raise ProtocolError("the daemon sends a sample that is larger than its arena")
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths.astype(np.int64), out=offsets[1:])
        self._total = int(offsets[-1])
        out = None
        if self._out is not None and len(lengths) == self._count:
            try:
                out = check_out(self._out, self._total)
            except UsageError as error:
                self.refused = error
        self.target = Target(offsets, apart=self._apart, out=out)
        self._views = self._destinations(self.target)

    def _destinations(self, target: Target) -> deque[memoryview]:
        arrays = [target.buffer] if target.arrays is None else target.arrays
        return deque(a.data for a in arrays if a is not None and a.nbytes)

    def room(self, size: int) -> list[memoryview]:
        """Where the next bytes go."""
        if self.target is None or size > self._total - self._come:
            raise ProtocolError("the daemon sends more bytes than it said")
        views: list[memoryview] = []
        for view in islice(self._views, MOST_PIECES):
            views.append(view[:size])
            size -= len(views[-1])
            if not size:
                break
        return views

    def filled(self, size: int) -> None:
        """So many bytes have come."""
        self._come += size
        while size:
            view = self._views[0]
            if len(view) > size:
                self._views[0] = view[size:]
                return
            size -= len(view)
            self._views.popleft()

    def whole(self, count: int) -> Target:
        """Return the target, of which the first `count` samples have come.

        Raises: ProtocolError when they have not.
        """
        if self.target is None:
            self.target = Target(np.zeros(1, np.int64), apart=self._apart)
        offsets = self.target.offsets
        if count >= len(offsets) or int(offsets[count]) > self._come:
            raise ProtocolError("the daemon sent fewer bytes than it said")
        return self.target


@dataclass(slots=True)
class InlinePending:
    """A request on its way. `target` is there when it is finished."""

    indices: Int64s
    apart: bool
    out: Bytes | None
    todo: deque[Int64s] = field(default_factory=deque)
    asked: deque[tuple[int, Int64s, Parcel]] = field(default_factory=deque)
    parts: list[tuple[Int64s, Target]] = field(default_factory=list)
    target: Target = field(init=False)


class InlineSource(RemoteSource):
    """A data set of the daemon whose samples come through the socket."""

    def _map(self) -> None:
        """Nothing is mapped."""

    def sizes(self, indices: Int64s | None) -> Int64s:
        """Return lengths in bytes: one round trip for 65,536 samples. What nobody knows is read."""
        return self._looked_up(indices)[1]

    def estimate(self, indices: Int64s) -> Int64s:
        """Return a guess at the lengths in bytes; never asks."""
        means = np.array([shard.size // max(1, shard.count) for shard in self.shards], np.int64)
        return means[self.layout.shards(indices)]

    def _looked_up(self, indices: Int64s | None) -> Tables:
        steps = self.looking_up(indices)
        try:
            step = next(steps)
            while True:
                step = steps.send(self.connection.wait_for(step.tag, step.kind))
        except StopIteration as end:
            tables: Tables = end.value
            return tables

    def looking_up(self, indices: Int64s | None) -> Generator[Awaited, Any, Tables]:
        """Ask for offsets, lengths and checksums; yields what is to be awaited.

        Raises: the error of the first sample that had to be read for it and could not be.
        """
        chosen = self._all() if indices is None else indices
        offsets, lengths, checksums = yield from self._look_up(chosen)
        unknown = np.flatnonzero(lengths >= _UNKNOWN)
        if len(unknown):
            pending = self.start(chosen[unknown], apart=False)
            errors = yield from self.steps(pending)
            for _, error in sorted(errors.items()):
                raise error
            lengths[unknown] = np.diff(pending.target.offsets)
        return offsets, lengths, checksums

    def _look_up(self, indices: Int64s) -> Generator[Awaited, Any, Tables]:
        count = len(indices)
        offsets, lengths = np.empty(count, np.uint64), np.empty(count, np.int64)
        checksums = np.empty(count, np.uint32)
        tags: deque[tuple[int, slice]] = deque()
        starts = deque(range(0, count, protocol.MAX_GET_COUNT))
        while starts or tags:
            while starts and len(tags) < GETS_IN_FLIGHT:
                part = slice(starts[0], min(starts[0] + protocol.MAX_GET_COUNT, count))
                starts.popleft()
                tags.append((self.connection.look_up(self.dataset, indices[part]), part))
            tag, part = tags.popleft()
            found = yield Awaited(tag, protocol.Found)
            size = part.stop - part.start
            offsets[part] = protocol.unpack_numbers(found.offsets, size, "<u8")
            lengths[part] = protocol.unpack_numbers(found.lengths, size, "<u8").astype(np.int64)
            checksums[part] = protocol.unpack_numbers(found.checksums, size, "<u4")
        return offsets, lengths, checksums

    def tables(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of a shard's payload offsets, lengths and checksums."""
        first = int(self.layout.firsts[shard])
        run = np.arange(first, int(self.layout.firsts[shard + 1]), dtype=np.int64)
        offsets, lengths, checksums = self._looked_up(run)
        return offsets, lengths.astype(np.uint64), checksums

    # ---- reading --------------------------------------------------------------------------

    def copied(self, indices: Int64s, out: Bytes | None) -> Batch | None:
        """None: every sample has to be sent."""
        return None

    def start(  # type: ignore[override]
        self, indices: Int64s, *, apart: bool, out: Bytes | None = None
    ) -> InlinePending:
        """Ask for everything."""
        if out is not None:
            check_out(out, 0)
        pending = InlinePending(indices, apart, out)
        positions = np.arange(len(indices), dtype=np.int64)
        for k in range(0, len(indices), protocol.MAX_GET_COUNT):
            pending.todo.append(positions[k : k + protocol.MAX_GET_COUNT])
        self._ask_for(pending)
        return pending

    def _ask_for(self, pending: InlinePending) -> None:
        while pending.todo and len(pending.asked) < GETS_IN_FLIGHT:
            positions = pending.todo.popleft()
            alone = len(positions) == len(pending.indices)
            parcel = Parcel(
                len(positions),
                self.connection.given.arena_size,
                apart=pending.apart,
                out=pending.out if alone else None,
            )
            tag = self.connection.get(self.dataset, pending.indices[positions], parcel)
            pending.asked.append((tag, positions, parcel))

    def steps(self, pending: Pending) -> Generator[Awaited, Any, dict[int, FFServeError]]:
        """What `finish` does; see RemoteSource.steps."""
        assert isinstance(pending, InlinePending)
        errors: dict[int, FFServeError] = {}
        while pending.todo or pending.asked:
            self._ask_for(pending)
            tag, positions, parcel = pending.asked[0]
            ready = yield Awaited(tag)
            assert isinstance(ready, protocol.Ready)
            pending.asked.popleft()
            if not 0 <= ready.count <= len(positions):
                raise ProtocolError("the daemon answered for samples it was not asked for")
            for k, error in failures_of(ready.errors, ready.count).items():
                errors[int(positions[k])] = error
            if parcel.refused is not None:
                raise parcel.refused
            pending.parts.append((positions[: ready.count], parcel.whole(ready.count)))
            if ready.count < len(positions):
                pending.todo.appendleft(positions[ready.count :])
        pending.target = _put_together(pending)
        self._tally.count(0, len(pending.indices), int(pending.target.offsets[-1]))
        return errors

    def give_up(self, pending: Pending) -> list[int]:
        """Nobody waits for a request any more; return the tags that are still to be answered."""
        assert isinstance(pending, InlinePending)
        tags = [tag for tag, _, _ in pending.asked]
        pending.asked.clear()
        pending.todo.clear()
        return tags

    def lease(self, indices: Int64s) -> Leased:
        """Return read-only copies: there is nothing to look at in place."""
        copies = dict(enumerate(self._copies(indices)))
        nowhere = np.zeros(len(indices), np.int64)
        sizes = np.array([copy.nbytes for copy in copies.values()], np.int64)
        return Leased(np.zeros(0, np.uint8), nowhere, sizes, copies)


def _put_together(pending: InlinePending) -> Target:
    """Return the target of the whole request."""
    count = len(pending.indices)
    if len(pending.parts) == 1 and len(pending.parts[0][0]) == count:
        return pending.parts[0][1]
    lengths = np.zeros(count, np.int64)
    for positions, part in pending.parts:
        lengths[positions] = np.diff(part.offsets[: len(positions) + 1])
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    out = pending.out
    if out is not None:
        out = check_out(out, int(offsets[-1]))
    target = Target(offsets, apart=pending.apart, out=out)
    for positions, part in pending.parts:
        if part.arrays is not None and target.arrays is not None:
            for k, position in enumerate(positions.tolist()):
                target.arrays[position] = part.arrays[k]
        elif part.buffer is not None and target.buffer is not None and len(positions):
            # Positions of a part follow each other.
            first, last = int(positions[0]), int(positions[-1]) + 1
            size = int(part.offsets[len(positions)])
            target.buffer[offsets[first] : offsets[last]] = part.buffer[:size]
    return target
