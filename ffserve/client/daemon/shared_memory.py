"""Samples of the daemon out of shared memory: cached ones are copied, missing ones asked for.

A request looks every sample up in the shared directory, sends GETs for those that are missing,
copies those that are cached, and then waits. A sample that is evicted between look-up and copy is
asked for like a missing one; the daemon pins what a READY announces until it is acknowledged, so
every round makes progress.

Lengths of records that lie in chunks are not known until the daemon has decoded those. A request
for such records first waits for all of them, and allocates its memory then; a length that is known
once stays known.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve import protocol
from ffserve.client.daemon.channel import Steps
from ffserve.client.daemon.client_statistics import ClientStatistics
from ffserve.client.daemon.connection import Connection, Driver
from ffserve.client.daemon.mapped_memory import address, span
from ffserve.client.source import Batch, Indices, Leased, Target, arrays_of, check_out, cut, places
from ffserve.dataset.layout import Layout, ShardInfo, combined_fingerprint
from ffserve.dtypes import Bytes, Int64s
from ffserve.engine.arrays import integers, separate
from ffserve.engine.many_files import contents_of
from ffserve.engine.shm import Located, MappedView
from ffserve.errors import (
    ArenaBusyError,
    ArenaError,
    FFServeError,
    ProtocolError,
    raise_first,
)
from ffserve.formats.base import UNKNOWN_LENGTH

GET_COUNT = 1024
"""One GET asks for at most this many samples: many times the depth of the engine."""
GET_SIZE = 8 << 20
"""Bytes of samples in one GET, if that is more than one sample: while the client copies them, the
daemon reads the next ones."""
GETS_IN_FLIGHT = 4
"""A request has this many GETs in flight: the daemon works on the next one while this process
copies the last."""
_MOST_EMPTY_ROUNDS = 1000
REFUSED_S = 30.0
"""How long the daemon is not asked again for what its arena could not hold: the arena can be
resized, and leases end."""


class DaemonSource:
    """A data set of the daemon, whose samples are copied out of the mapped arena.

    Args: opened: the daemon's answer. paths: absolute, of the shards, as they were asked for.

    Raises: ProtocolError when the answer is malformed; UnmappedError. The connection is still the
        caller's then.

    Methods that wait need a connection with blocking calls; in an event loop its driver runs the
    requests.
    """

    def __init__(self, connection: Driver, opened: protocol.Opened, paths: tuple[str, ...]) -> None:
        self.connection = connection
        self.dataset = opened.dataset
        if (
            len(opened.shards) != len(paths) * protocol.SHARD_DTYPE.itemsize
            or len(opened.formats) != len(paths)
            or not all(isinstance(name, str) for name in opened.formats)
        ):
            raise ProtocolError("invalid OPENED: it does not have as many shards as the request")
        table = np.frombuffer(opened.shards, protocol.SHARD_DTYPE)
        self._bases = table["base"].astype(np.int64)
        self._domains: list[int] = table["domain"].tolist()
        self.layout = Layout(table["count"].astype(np.int64), self._bases)
        self.count = self.layout.count
        self.fingerprint = combined_fingerprint(table["fingerprint"])
        self._means = table["size"].astype(np.int64) // np.maximum(self.layout.counts, 1)
        self._about = paths, opened.formats, table
        self._shards: list[ShardInfo] | None = None
        self.paths = paths
        self.description = f"daemon {connection.path}"
        self.statistics = ClientStatistics(connection, opened.dataset)
        self.closed = False
        self.identities = b""
        """The identities of the files, as the OPEN message had them."""
        self.replaceable = False
        """Whether a request ends at its first ArenaError, since the reader can read without the
        daemon; else every error is one of its sample."""
        self.refused: tuple[float, int, FFServeError] | None = None
        """Until when requests for a sample of this many bytes or more end with this error."""
        self._busy_count = 0
        self.look_at = 0.0
        """When to look for a daemon instead of one that has gone."""
        self._map()

    def _map(self) -> None:
        """Map the directory's entries and the arenas. Raises: ProtocolError, UnmappedError."""
        memories = self.connection.channel.memories
        assert memories is not None
        self._memories = [memories.of(domain) for domain in self._domains]
        segments = []
        self._mappings = []
        arenas = {}
        for first, base, count in self.layout.runs(self._domains):
            memory = self._memories[int(self.layout.shards(np.array([first]))[0])]
            entries = memory.entries(base, count)
            self._mappings.append(entries)
            arena = address(memory.arena)
            arenas[arena] = memory.arena
            segments.append((address(entries), first, count, arena))
        self.view = MappedView(memories.arena_size, segments)
        self.statistics.take_times = self.view.take_times
        self._arena = span(list(arenas.values()))

    @property
    def shards(self) -> list[ShardInfo]:
        """The files, in order. They are described when they are first asked for."""
        if self._shards is None:
            paths, names, table = self._about
            firsts = self.layout.firsts[:-1].tolist()
            counts, sizes = table["count"].tolist(), table["size"].tolist()
            fingerprints = table["fingerprint"].tolist()
            rows = zip(paths, names, counts, firsts, sizes, fingerprints, strict=True)
            self._shards = [ShardInfo(*row) for row in rows]
        return self._shards

    @property
    def states(self) -> Int64s:
        """See `SampleSource.states`."""
        return contents_of(np.frombuffer(self.identities, protocol.IDENTITY_DTYPE))

    @property
    def look_due(self) -> bool:
        """Whether the daemon has gone and another one is to be looked for. What is mapped can be
        read as long as there is none."""
        return self.connection.channel.broken is not None and time.monotonic() >= self.look_at

    @property
    def blocking(self) -> Connection:
        """The connection, whose calls block."""
        assert isinstance(self.connection, Connection)
        return self.connection

    @property
    def job(self) -> str:
        """The training run that the data set is opened for."""
        return self.connection.job

    def sizes(self, indices: Int64s) -> Int64s:
        """Return lengths in bytes; reads what must be read to know them."""
        return self.blocking.run(self.measuring(indices))

    def finish(self, request: ReadRequest) -> dict[int, FFServeError]:
        """Wait for a request; return the errors by position."""
        return self.blocking.run(request.steps(), request)

    def errors_of(
        self, ready: protocol.Ready, count: int, sizes: Int64s | None = None
    ) -> dict[int, FFServeError]:
        """Return the errors of a READY by position.

        Args: sizes: of the samples asked for, in bytes; None: not known.
        Raises: ProtocolError; ArenaError if the source is replaceable.
        """
        failed = ready_errors(ready, count)
        if failed and self.replaceable:
            for k, error in failed.items():
                if isinstance(error, ArenaError):
                    self._refuse(error, 0 if sizes is None else int(sizes[k]))
                    # No variable of this frame names the error: it is freed with the request.
                    raise error.located()
        return failed

    def _refuse(self, error: ArenaError, size: int) -> None:
        busy = isinstance(error, ArenaBusyError)
        if not busy and not size:
            return
        # The time doubles, each time that the arena was busy, which costs a wait of 20 s.
        refused_s = REFUSED_S * 2 ** (min(self._busy_count, 4) if busy else 0)
        self.refused = time.monotonic() + refused_s, size, error
        self._busy_count += busy

    def check_refused(self, size: int) -> None:
        """Raise what the daemon answered lately to such a request; `refused` is not None.

        Args: size: bytes of the largest sample that is missing, 0 if it is not known.
        """
        assert self.refused is not None
        until, refused_size, error = self.refused
        if time.monotonic() >= until:
            self.refused = None
        elif size >= refused_size:
            raise error.located()

    def copies(self, indices: Int64s) -> list[Bytes]:
        """Return read-only copies. Raises: the error of the first sample that failed."""
        request = self.start(indices, apart=True)
        raise_first(self.finish(request))
        assert request.target.arrays is not None
        for array in request.target.arrays:
            array.flags.writeable = False
        return request.target.arrays

    def announce(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Tell the daemon the order of an epoch."""
        self.blocking.announce(self.dataset, epoch, order, name, replacement)

    def reached(self, epoch: int, position: int) -> bool:
        """Tell the daemon the job's position in an epoch's order; False: it is gone."""
        self.connection.channel.reached(self.dataset, epoch, position)
        self.connection.report()
        return self.connection.alive

    def stats(self) -> dict[str, int | float | str]:
        """Return counters since the source was opened."""
        return self.statistics.facts()

    def after_fork(self) -> None:
        """The connection belongs to the parent."""
        self.closed = True

    def close(self) -> None:
        """Close the data set; the last reader of a connection closes that."""
        if self.closed:
            return
        self.closed = True
        if self.connection.alive:
            self.statistics.enter_hits()
            self.connection.close_dataset(self.dataset)
        self.connection.leave()

    # ---- lengths --------------------------------------------------------------------------

    def measuring(self, indices: Int64s) -> Steps[Int64s]:
        """Return lengths in bytes; what lies in chunks that were never decoded is read.

        Raises: the error of the first sample whose length cannot be known.
        """
        offsets, missing, unknown = self.view.locate(indices)
        if unknown:
            blank = indices[missing[np.diff(offsets)[missing] == 0]]
            read = self.start(blank, apart=False)
            try:
                yield from read.decode_missing()
            finally:
                read.give_up()
            raise_first(read.errors)
            offsets = self.view.locate(indices).offsets
        return np.diff(offsets)

    def estimate(self, indices: Int64s) -> Int64s:
        """Return lengths in bytes, a guess where one is not known; never asks."""
        offsets, missing, unknown = self.view.locate(indices)
        sizes = np.diff(offsets)
        if unknown:
            blank = missing[sizes[missing] == 0]
            sizes[blank] = self._means[self.layout.shards(indices[blank])]
        return sizes

    # ---- members --------------------------------------------------------------------------

    def naming(self, blocks: Sequence[tuple[int, int]]) -> Steps[list[bytes]]:
        """Return blocks of names; see `SampleSource.named`. Raises: ProtocolError."""
        found: list[bytes] = []
        names = self._about[1]
        if not self.connection.channel.tells_last and any(names[k] != "tar" for k, _ in blocks):
            return [b""] * len(blocks)  # of last samples; tar files are asked for by themselves
        while len(found) < len(blocks):
            part = blocks[len(found) : len(found) + protocol.MOST_NAMED]
            answer = yield self.connection.channel.members(self.dataset, part)
            some: list[bytes] = answer.blocks
            valid = 0 < len(some) <= len(part) and all(type(each) is bytes for each in some)
            if not valid:
                raise ProtocolError("invalid NAMED: it does not have the blocks asked for")
            found += some
        return found

    def named(self, blocks: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return blocks of names; see `SampleSource.named`."""
        return self.blocking.run(self.naming(blocks))

    # ---- reading --------------------------------------------------------------------------

    def cached(self, indices: Int64s) -> NDArray[np.bool_]:
        """Return which samples are in memory."""
        found = np.ones(len(indices), np.bool_)
        found[self.view.locate(indices).missing] = False
        return found

    def cached_batch(self, indices: NDArray[Any], out: Bytes | None) -> Batch | Located | None:
        """Copy a batch of cached samples. The most frequent call: it does no more than it must."""
        if self.look_due:
            return None
        if out is not None:
            check_out(out, 0)
        found = self.view.copy_batch(indices, out)
        if isinstance(found, Batch):
            self.statistics.add_hits(indices, len(found.buffer))
        return found

    def cached_arrays(self, indices: Indices) -> list[Bytes] | Located | None:
        """Copy cached samples, each to an array of its own."""
        if self.look_due:
            return None
        if type(indices) is not np.ndarray:
            numbers = integers(indices, self.count)
            if numbers is None:
                return None
            indices = numbers
        allocate = separate if places.place is None else arrays_of
        found = self.view.copy_arrays(indices, allocate)
        if found is None or isinstance(found, Located):
            return found
        arrays, size = found
        self.statistics.add_hits(indices, size)
        return arrays

    def start(
        self,
        indices: Int64s,
        *,
        apart: bool,
        out: Bytes | None = None,
        found: Located | None = None,
    ) -> ReadRequest:
        """Ask for missing samples."""
        found = self.view.locate(indices) if found is None else found
        request = ReadRequest(self, indices, found, apart, out)
        if len(found.missing):
            if self.refused is not None:
                self.check_refused(request.largest_missing())
            self.statistics.report_hits()
            request.ask()
            self.connection.flush()
        return request

    # ---- leases ---------------------------------------------------------------------------

    def lease(self, indices: Int64s) -> Leased:
        """Return read-only views of the arena, which do not change until they are released.

        The daemon pins the samples; those beyond what it pins (leases together take at most half
        of the arena) are copied.
        """
        offsets, missing, unknown = self.view.locate(indices)
        if self.refused is not None and len(missing):
            self.check_refused(0 if unknown else int(np.diff(offsets)[missing].max()))
        held = _Held(self.blocking)
        try:
            starts = self._pinned(indices, held)
            if len(missing):
                offsets = self.view.locate(indices).offsets
            sizes, size = offsets[1:] - offsets[:-1], int(offsets[-1])
            copies: dict[int, Bytes] = {}
            if len(starts) and int(starts.min()) < 0:
                copied = np.flatnonzero(starts < 0)
                size -= int(sizes[copied].sum())
                copies = dict(zip(copied.tolist(), self.copies(indices[copied]), strict=True))
                sizes[copied] = [copy.nbytes for copy in copies.values()]
            pinned = len(indices) - len(copies)
            misses = min(len(missing), pinned)
            self.statistics.count_asked(pinned - misses, misses, size)
            return Leased(self._arena, starts, sizes, copies, held)
        except BaseException:
            held.release()
            raise

    def _pinned(self, indices: Int64s, held: _Held) -> Int64s:
        """Have the daemon pin samples; return their offsets in the arena, -1 for those that it did
        not pin. Raises: the error of the first sample that failed."""
        parts: list[Int64s] = []
        first = 0
        while first < len(indices):
            part = indices[first : first + protocol.MAX_GET_COUNT]
            ready = held.ask(self.dataset, part)
            raise_first(self.errors_of(ready, len(part)))
            if not ready.count:
                break
            parts.append(self.view.places(part[: ready.count]).view(np.int64))  # NOWHERE: -1
            first += ready.count
        if first < len(indices):
            parts.append(np.full(len(indices) - first, -1, np.int64))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    # ---- tables ---------------------------------------------------------------------------

    def tables(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of a shard's payload offsets, lengths and checksums."""
        count = int(self.layout.counts[shard])
        first = int(self.layout.firsts[shard])
        offsets, checksums = self._memories[shard].index(int(self._bases[shard]), count)
        edges, missing, unknown = self.view.locate(np.arange(first, first + count, dtype=np.int64))
        lengths = np.diff(edges).astype(np.uint64)
        if unknown:
            lengths[missing[lengths[missing] == 0]] = UNKNOWN_LENGTH
        return offsets, lengths, checksums


class ReadRequest:
    """One request for samples: the missing ones, the GETs, the destination.

    Args: found: of the directory. apart, out: as of `SampleSource.start`.

    Raises: UsageError for an `out` that cannot be used.
    """

    def __init__(
        self,
        source: DaemonSource,
        indices: Int64s,
        found: Located,
        apart: bool,
        out: Bytes | None,
    ) -> None:
        self.indices = indices
        self.target = _NO_TARGET
        self._source = source
        self._channel = source.connection.channel
        self._apart = apart
        self._out = out
        self._missing = found.missing
        self._lengths_known = not found.unknown
        if self._lengths_known:
            self._allocate(found.offsets)
        self._todo = self._parts(found.missing)
        self._asked: deque[tuple[int, Int64s]] = deque()
        """GETs without an answer: tag and positions."""
        self._held: deque[int] = deque()
        """Tags of GETs that are acknowledged when their samples were copied."""
        self.errors: dict[int, FFServeError] = {}

    def _allocate(self, offsets: Int64s) -> None:
        self.target = Target(offsets, apart=self._apart, out=self._out)

    def _parts(self, positions: Int64s) -> deque[Int64s]:
        """Cut positions into those of one GET each."""
        offsets = self.target.offsets
        if offsets[-1] <= GET_SIZE:  # or not known yet
            parts = range(0, len(positions), GET_COUNT)
            return deque(positions[k : k + GET_COUNT] for k in parts)
        sizes = np.diff(offsets)[positions]
        return deque(part for part, _ in cut(positions, sizes, GET_COUNT, GET_SIZE))

    def _other_than(self, positions: Int64s) -> Int64s:
        others = np.ones(len(self.indices), np.bool_)
        others[positions] = False
        return np.flatnonzero(others)

    def largest_missing(self) -> int:
        """Return the bytes of the largest missing sample; 0 if lengths are not known."""
        return int(np.diff(self.target.offsets)[self._missing].max()) if self._lengths_known else 0

    def ask(self) -> None:
        """Queue GETs, as many as may be on their way."""
        source = self._source
        while self._todo and len(self._asked) < GETS_IN_FLIGHT:
            positions = self._todo.popleft()
            tag = self._channel.get(source.dataset, self.indices[positions])
            self._asked.append((tag, positions))

    def steps(self) -> Steps[dict[int, FFServeError]]:
        """Copy cached samples, then the missing ones as they come; returns errors by position."""
        try:
            count, missed = len(self.indices), len(self._missing)
            hits = self._other_than(self._missing) if missed else None
            readable = hits if self._lengths_known else (yield from self._learn_lengths())
            if readable is None or len(readable):
                vanished = yield readable
                if len(vanished):
                    missed = min(count, missed + len(vanished))
                    self._todo.append(vanished)
            self._acknowledge_held()
            statistics = self._source.statistics
            if hits is None or len(hits):
                statistics.note_hits(self.indices if hits is None else self.indices[hits])
            statistics.count(count - missed, missed, int(self.target.offsets[-1]))
            if self._todo or self._asked:
                yield from self._collect()
        except BaseException:
            self.give_up()
            raise
        return self.errors

    def _collect(self) -> Steps[None]:
        """Wait for what was asked for and copy it, until nothing is missing."""
        empty_rounds = 0
        while self._todo or self._asked:
            self.ask()
            tag, _ = self._asked[0]
            ready: protocol.Ready = yield tag
            done, rest = self._take(ready)
            if empty_rounds > 10:
                yield 0.001
            vanished = yield done
            self._channel.acknowledge(tag)
            progress = bool(ready.errors) or len(vanished) < len(done)
            empty_rounds = 0 if progress else empty_rounds + 1
            if empty_rounds > _MOST_EMPTY_ROUNDS:
                raise ArenaBusyError(
                    "the daemon's arena is too busy: samples are evicted before they are copied",
                    hint="start the daemon with a larger --arena",
                )
            if len(vanished) or len(rest):
                self._todo.appendleft(np.concatenate((vanished, rest)))

    def _take(self, ready: protocol.Ready) -> tuple[Int64s, Int64s]:
        """Take the answer to the oldest GET; return the positions that are readable, and those
        that are still missing."""
        _, positions = self._asked.popleft()
        offsets = self.target.offsets
        sizes = np.diff(offsets)[positions] if ready.errors and self._lengths_known else None
        failed = self._source.errors_of(ready, len(positions), sizes)
        done, rest = positions[: ready.count], positions[ready.count :]
        if failed:
            self.errors.update((int(done[k]), error) for k, error in failed.items())
            done = np.delete(done, list(failed))
        return done, rest

    def decode_missing(self) -> Steps[None]:
        """Wait until every missing sample was decoded once, so that its length is known.

        The last few answers are not acknowledged, so that most requests find all samples cached.
        If the arena has no room for all samples of a GET, every answer is: others wait for it.
        """
        while self._todo or self._asked:
            self.ask()
            tag, _ = self._asked[0]
            _, rest = self._take((yield tag))
            self._held.append(tag)
            while len(self._held) > (0 if len(rest) else GETS_IN_FLIGHT):
                self._channel.acknowledge(self._held.popleft())
            if len(rest):
                self._todo.appendleft(rest)

    def _learn_lengths(self) -> Steps[Int64s]:
        """Allocate when all lengths are known; return the positions that are readable then."""
        yield from self.decode_missing()
        found = self._source.view.locate(self.indices)
        if found.unknown > len(self.errors):
            raise ProtocolError("the daemon does not know the length of a sample that it has read")
        self._allocate(found.offsets)
        failed = np.array(sorted(self.errors), np.int64)
        self._todo = self._parts(np.setdiff1d(found.missing, failed))
        return np.setdiff1d(self._other_than(found.missing), failed)

    def copy(self, positions: Int64s | None) -> Int64s:
        """Copy samples (None: all); return the positions of those that could not be read."""
        target = self.target
        left = self._source.view.gather(
            self.indices, target.offsets, target.buffer, target.addresses, positions
        )
        if left is None:
            raise ProtocolError("the length of a sample has changed while its data set was open")
        return left

    def give_up(self) -> None:
        """The request is not run any further."""
        for tag, _ in self._asked:
            self._channel.give_up(tag)
        self._asked.clear()
        self._todo.clear()
        self._acknowledge_held()

    def _acknowledge_held(self) -> None:
        while self._held:
            self._channel.acknowledge(self._held.popleft())


class _Held:
    """Leases that the daemon was asked for; fulfils `source.Held`."""

    __slots__ = ("_connection", "_tags")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tags: list[int] = []

    def ask(self, dataset: int, indices: Int64s) -> protocol.Ready:
        """Ask for a lease; return the answer."""
        return self._connection.lease(dataset, indices, self._tags)

    def release(self) -> None:
        """Give all of them back. A second call does nothing."""
        tags, self._tags = self._tags, []
        if tags:
            self._connection.release(tags)


def ready_errors(ready: protocol.Ready, count: int) -> dict[int, FFServeError]:
    """Return the errors of a READY to a request of `count` samples, by position.

    Raises: ProtocolError when the READY does not suit the request.
    """
    if not 0 <= ready.count <= count:
        raise ProtocolError(f"invalid READY: {ready.count} samples of {count}")
    failed: dict[int, FFServeError] = {}
    for entry in ready.errors:
        if type(entry) is not list or len(entry) != 7 or type(entry[0]) is not int:
            raise ProtocolError("invalid READY: malformed error")
        if not 0 <= entry[0] < ready.count:
            raise ProtocolError(f"invalid READY: an error for position {entry[0]} of {ready.count}")
        failed[entry[0]] = protocol.error_from_wire(entry[1:])
    return failed


_NO_TARGET = Target(np.zeros(1, np.int64), apart=False)
