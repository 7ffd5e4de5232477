"""Samples of the daemon through the socket, for a process that cannot map the daemon's memory.

One GET per request where that is possible: SENDING then tells all lengths, the destination is
allocated, and the bytes are received straight into it. A request that the daemon answers in parts
is assembled from them, at the cost of one more copy.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.client.channel import MOST_BUFFERS, Steps
from ffserve.client.shared_memory import GETS_IN_FLIGHT, DaemonSource
from ffserve.client.source import Batch, Bytes, Indices, Int64s, Leased, Target, check_out
from ffserve.engine.shm import Located
from ffserve.errors import FFServeError, ProtocolError, UsageError, raise_first

_UNKNOWN = (1 << 48) - 1

Tables: TypeAlias = tuple[NDArray[np.uint64], Int64s, NDArray[np.uint32]]
"""Offsets, lengths and checksums, one a sample."""


class InlineSource(DaemonSource):
    """A data set of the daemon whose samples come through the socket."""

    def size_request(self, indices: Int64s | None) -> InlineSizeRequest:
        """Return a request for lengths: one round trip for 65,536 samples. Unknown ones are
        read."""
        return InlineSizeRequest(self, self.all_indices() if indices is None else indices)

    def estimate(self, indices: Int64s) -> Int64s:
        """Return a guess at the lengths in bytes; never asks."""
        return self.mean_lengths(indices)

    def tables(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of a shard's payload offsets, lengths and checksums."""
        first, end = int(self.layout.firsts[shard]), int(self.layout.firsts[shard + 1])
        request = LookupRequest(self, np.arange(first, end, dtype=np.int64))
        offsets, lengths, checksums = self.blocking.run(request)
        return offsets, lengths.astype(np.uint64), checksums

    def cached_batch(self, indices: NDArray[Any], out: Bytes | None) -> Batch | Located | None:
        """Return None: every sample has to be sent."""
        return None

    def cached_arrays(self, indices: Indices) -> list[Bytes] | Located | None:
        """Return None: every sample has to be sent."""
        return None

    def start(
        self,
        indices: Int64s,
        *,
        apart: bool,
        out: Bytes | None = None,
        found: Located | None = None,
    ) -> InlineReadRequest:
        """Ask for all samples."""
        if out is not None:
            check_out(out, 0)
        if self.refused is not None:
            self.check_refused(0)
        request = InlineReadRequest(self, indices, apart, out)
        request.ask()
        self.connection.flush()
        return request

    def lease(self, indices: Int64s) -> Leased:
        """Return read-only copies: nothing can be read in place."""
        copies = dict(enumerate(self.copies(indices)))
        nowhere = np.zeros(len(indices), np.int64)
        sizes = np.array([copy.nbytes for copy in copies.values()], np.int64)
        return Leased(np.zeros(0, np.uint8), nowhere, sizes, copies)


class InlineReadRequest:
    """One request for samples. `target` exists when it is finished.

    Args: apart, out: as of `Source.start`.
    """

    target: Target

    def __init__(
        self, source: InlineSource, indices: Int64s, apart: bool, out: Bytes | None
    ) -> None:
        self._source = source
        self._channel = source.connection.channel
        self._indices = indices
        self._apart = apart
        self._out = out
        positions = np.arange(len(indices), dtype=np.int64)
        parts = range(0, len(indices), protocol.MAX_GET_COUNT)
        self._todo = deque(positions[k : k + protocol.MAX_GET_COUNT] for k in parts)
        self._asked: deque[tuple[int, Int64s, SampleSink]] = deque()
        self._parts: list[tuple[Int64s, Target]] = []

    def ask(self) -> None:
        """Queue GETs, as many as may be on their way."""
        source = self._source
        while self._todo and len(self._asked) < GETS_IN_FLIGHT:
            positions = self._todo.popleft()
            sink = SampleSink(
                len(positions),
                source.connection.handshake.arena_size,
                apart=self._apart,
                out=self._out if len(positions) == len(self._indices) else None,
            )
            tag = self._channel.get(source.dataset, self._indices[positions], sink)
            self._asked.append((tag, positions, sink))

    def steps(self) -> Steps[dict[int, FFServeError]]:
        """Wait for all samples; returns errors by position."""
        errors: dict[int, FFServeError] = {}
        while self._todo or self._asked:
            self.ask()
            tag, positions, sink = self._asked[0]
            ready: protocol.Ready = yield tag
            self._asked.popleft()
            for k, error in self._source.errors_of(ready, len(positions)).items():
                errors[int(positions[k])] = error
            raise_first(sink.refused)
            self._parts.append((positions[: ready.count], sink.complete(ready.count)))
            if ready.count < len(positions):
                self._todo.appendleft(positions[ready.count :])
        self.target = self._assembled()
        self._source.statistics.count(0, len(self._indices), int(self.target.offsets[-1]))
        return errors

    def _assembled(self) -> Target:
        """Return the target of the whole request."""
        count = len(self._indices)
        if len(self._parts) == 1 and len(self._parts[0][0]) == count:
            return self._parts[0][1]
        lengths = np.zeros(count, np.int64)
        for positions, part in self._parts:
            lengths[positions] = np.diff(part.offsets[: len(positions) + 1])
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        out = self._out
        if out is not None:
            out = check_out(out, int(offsets[-1]))
        target = Target(offsets, apart=self._apart, out=out)
        for positions, part in self._parts:
            if part.arrays is not None and target.arrays is not None:
                for k, position in enumerate(positions.tolist()):
                    target.arrays[position] = part.arrays[k]
            elif part.buffer is not None and target.buffer is not None and len(positions):
                # Positions of a part follow each other.
                first, last = int(positions[0]), int(positions[-1]) + 1
                size = int(part.offsets[len(positions)])
                target.buffer[offsets[first] : offsets[last]] = part.buffer[:size]
        return target

    def copy(self, positions: Int64s | None) -> Int64s:
        """Nothing is copied: samples are received where they belong."""
        raise AssertionError(positions)

    def give_up(self) -> None:
        """The request is not run any further."""
        for tag, _, _ in self._asked:
            self._channel.give_up(tag)
        self._asked.clear()
        self._todo.clear()


class LookupRequest:
    """A request for what the daemon's index says of samples."""

    def __init__(self, source: InlineSource, indices: Int64s) -> None:
        self.source = source
        self.indices = indices
        self._asked: deque[tuple[int, slice]] = deque()
        self._read: InlineReadRequest | None = None

    def steps(self) -> Steps[Any]:
        """Return the tables. Lengths that the index does not have are read.

        Raises: the error of the first sample that had to be read for it and could not be.
        """
        offsets, lengths, checksums = yield from self._look_up()
        unknown = np.flatnonzero(lengths >= _UNKNOWN)
        if len(unknown):
            self._read = self.source.start(self.indices[unknown], apart=False)
            errors = yield from self._read.steps()
            raise_first(errors)
            lengths[unknown] = np.diff(self._read.target.offsets)
        return offsets, lengths, checksums

    def _look_up(self) -> Steps[Tables]:
        count = len(self.indices)
        channel = self.source.connection.channel
        offsets, lengths = np.empty(count, np.uint64), np.empty(count, np.int64)
        checksums = np.empty(count, np.uint32)
        starts = deque(range(0, count, protocol.MAX_GET_COUNT))
        while starts or self._asked:
            while starts and len(self._asked) < GETS_IN_FLIGHT:
                start = starts.popleft()
                part = slice(start, min(start + protocol.MAX_GET_COUNT, count))
                tag = channel.look_up(self.source.dataset, self.indices[part])
                self._asked.append((tag, part))
            tag, part = self._asked[0]
            found: protocol.Found = yield tag
            self._asked.popleft()
            size = part.stop - part.start
            offsets[part] = protocol.unpack_numbers(found.offsets, size, "<u8")
            lengths[part] = protocol.unpack_numbers(found.lengths, size, "<u8").astype(np.int64)
            checksums[part] = protocol.unpack_numbers(found.checksums, size, "<u4")
        return offsets, lengths, checksums

    def copy(self, positions: Int64s | None) -> Int64s:
        """Nothing is copied."""
        raise AssertionError(positions)

    def give_up(self) -> None:
        """The request is not run any further."""
        for tag, _ in self._asked:
            self.source.connection.channel.give_up(tag)
        if self._read is not None:
            self._read.give_up()


class InlineSizeRequest(LookupRequest):
    """A request for lengths."""

    def steps(self) -> Steps[Any]:
        """Return the lengths; see LookupRequest."""
        _, lengths, _ = yield from super().steps()
        return lengths


class SampleSink:
    """Receives the samples of one GET; fulfils `channel.PayloadSink`.

    Args:
        count: samples asked for. most: the longest one that there can be, in bytes.
        apart, out: as of `Source.start`; `out` only where the GET is the whole request.
    """

    def __init__(self, count: int, most: int, *, apart: bool, out: Bytes | None) -> None:
        self.target: Target | None = None
        self.refused: dict[int, FFServeError] = {}
        """Why `out` cannot be used, at 0; the bytes are received elsewhere."""
        self._count = count
        self._most = most
        self._apart = apart
        self._out = out
        self._received = 0
        self._total = 0

    def begin(self, lengths: NDArray[np.uint64]) -> None:
        """Take the lengths and allocate the target."""
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
                self.refused[0] = error
        self.target = Target(offsets, apart=self._apart, out=out)
        self._views = self._destinations(self.target)

    def _destinations(self, target: Target) -> deque[memoryview]:
        arrays = [target.buffer] if target.arrays is None else target.arrays
        return deque(a.data for a in arrays if a is not None and a.nbytes)

    def buffers(self, size: int) -> list[memoryview]:
        """Return where the next bytes go."""
        if self.target is None or size > self._total - self._received:
            raise ProtocolError("the daemon sends more bytes than SENDING announced")
        views: list[memoryview] = []
        for view in islice(self._views, MOST_BUFFERS):
            views.append(view[:size])
            size -= len(views[-1])
            if not size:
                break
        return views

    def filled(self, size: int) -> None:
        """So many bytes were received."""
        self._received += size
        while size:
            view = self._views[0]
            if len(view) > size:
                self._views[0] = view[size:]
                return
            size -= len(view)
            self._views.popleft()

    def complete(self, count: int) -> Target:
        """Return the target, with its first `count` samples received.

        Raises: ProtocolError when bytes are missing.
        """
        if self.target is None:
            self.target = Target(np.zeros(1, np.int64), apart=self._apart)
        offsets = self.target.offsets
        if count >= len(offsets) or int(offsets[count]) > self._received:
            raise ProtocolError("the daemon sent fewer bytes than SENDING announced")
        return self.target
