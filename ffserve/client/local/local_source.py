"""Samples read by this process itself, for reading without a daemon.

What is in the page cache (`local_files`) is copied in the calling thread. An engine of this process
reads the rest (`ffserve/reads/`), verifies, and copies each payload to its destination while the
bytes are warm. Records in chunks are decoded from them (`local_chunks`). Nothing is kept in memory
but decoded chunks, and the next windows of a windowed order (`window_reads`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.client.local.local_chunks import ChunkCache, ChunkReads, Second, in_decoding_thread
from ffserve.client.local.local_engines import LocalEngines, process_engines
from ffserve.client.local.local_files import (
    FileFaults,
    SampleTables,
    ShardFiles,
    fitting_share,
)
from ffserve.client.local.window_reads import Part, Windows
from ffserve.client.source import Batch, Indices, Leased, Target, places
from ffserve.dataset.layout import as_int64
from ffserve.disk import shardfile
from ffserve.disk.files import open_regular, raise_file_limit
from ffserve.dtypes import Bytes, Int32s, Int64s
from ffserve.engine.io import EngineBatch
from ffserve.errors import (
    STATUS_TRUNCATED,
    Failure,
    FFServeError,
    ServerUnavailable,
    raise_first,
)
from ffserve.formats.base import UNKNOWN_LENGTH
from ffserve.reads.records import BatchEngine, Failures, outcome_of, record_batch
from ffserve.reads.second_read import second_reads
from ffserve.reads.shard_tables import How, Tables, read_all

SIZES_AT_ONCE = 65_536
"""One request reads at most this many samples of unknown length."""
MAX_CHUNK_SIZE = 1 << 30
"""Limit of a chunk's size, encoded or decoded; the daemon's limit is in its configuration."""


@dataclass(slots=True)
class LocalRequest:
    """A request for samples; those at the positions `left` are not in the target yet.

    indices: set by `start`. batch: reads these; None: nothing is to be read. engine: None: it was
    not started.
    elsewhere: brings the samples, in the place of a batch, and may replace the target; it waits,
    and returns the errors by position. begins: where in each sample a part begins, which has the
    length that the target has; None: the samples are read whole, and verified.
    """

    indices: Int64s
    target: Target
    left: Int64s
    batch: EngineBatch | None = None
    engine: BatchEngine | None = None
    elsewhere: Callable[[LocalRequest], dict[int, FFServeError]] | None = None
    begins: Int64s | None = None


class LocalSource:
    """Shards opened by this process.

    Args:
        paths: absolute, of the shards. engines: returns the engines to read with.
        share: of the data that is read through the page cache; None: as much as fits into memory.
        most_at_once: bytes of samples that `start` may copy out of the page cache.

    Raises: FormatError, ChecksumError, TruncatedError, AccessDenied, ReadError: the first shard
        that cannot be opened.
    """

    _remote: frozenset[int] = frozenset()
    """Shards that are read by ranges; set before the others are opened."""

    def __init__(
        self,
        paths: tuple[str, ...],
        format: str | None,
        verify: bool,
        tolerant: bool = False,
        engines: Callable[[], LocalEngines] = process_engines,
        seen: Callable[[int], object] | None = None,
        *,
        share: float | None = None,
        most_at_once: int = 1 << 62,
    ) -> None:
        self._engines = engines
        self._files = ShardFiles()
        self._engine: BatchEngine | None = None
        self._attaching = threading.Lock()
        self._pending = 0
        """Requests that are not finished; after `close` the last one closes the files."""
        self._served = self._size = 0
        self._closed = False
        self._orders: dict[int, Int64s] = {}
        """Announced, by epoch."""
        self._windows: Windows | None = None
        """Of the order that is followed."""
        try:
            self._open(paths, How(format, verify, tolerant, MAX_CHUNK_SIZE, seen=seen))
            size = int(self._samples.sizes.sum())
            self._files.choose_share(fitting_share(size) if share is None else share)
            self._tables = self._files.tables(self._samples, most_at_once=most_at_once)
        except BaseException:
            self._files.close()
            raise
        self.description = f"engine {engines().kind}"

    def _open(self, paths: tuple[str, ...], how: How) -> None:
        if len(paths) > 256:
            raise_file_limit()
        fds: list[int] = []
        try:
            fds.extend(map(self._open_file, paths))
            statuses = [os.fstat(fd) for fd in fds]
            states = list(map(shardfile.FileState.of_status, statuses))
            sizes = np.array([state.size for state in states], np.int64)
            parsed = self._read_tables(fds, list(paths), sizes, how)
            self._samples = SampleTables(parsed, list(paths), verify=how.verify)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        self._members = [tables.members for tables in parsed]
        self._states = [(state, t.scanned) for state, t in zip(states, parsed, strict=True)]
        for k, (path, fd, status) in enumerate(zip(paths, fds, statuses, strict=True)):
            about = status.st_dev, parsed[k].fingerprint
            self._files.add(path, fd, *about, remote=k in self._remote)
        self.layout, self.count = self._samples.layout, self._samples.layout.count
        self.shards, self.fingerprint = self._samples.shards, self._samples.fingerprint
        self._plain = not self._samples.chunked and not self._samples.truncated
        self._faults = FileFaults(self._states, self._samples, self._files, self._remote)
        self._chunk_cache = self._new_chunk_cache()

    def _open_file(self, path: str) -> int:
        return open_regular(path)

    def _read_tables(
        self, fds: list[int], paths: list[str], sizes: Int64s, how: How
    ) -> list[Tables]:
        return read_all(fds, paths, sizes, how)

    def _new_chunk_cache(self) -> ChunkCache:
        samples = self._samples
        return ChunkCache(
            samples.chunked, samples.learned, self._faults.read_wrong, in_decoding_thread
        )

    def _attach(self) -> BatchEngine:
        """Return the engine, and count a request: the files stay open until it is over.

        Raises: ServerUnavailable when the source was closed.
        """
        with self._attaching:
            if self._closed:
                raise ServerUnavailable(
                    "cannot read the files: the reader was closed, or now reads from another source"
                )
            if self._engine is None:
                engine = self._new_engine()
                self._numbers = self._files.attach(engine)
                self._engine = engine
                self._attach_decoding(engine)
            self._pending += 1
            return self._engine

    def _new_engine(self) -> BatchEngine:
        return self._engines().over(self._files.devices())

    def _attach_decoding(self, engine: BatchEngine) -> None:
        """Chunks are waited for by threads, which an engine in an event loop does not allow."""
        self._decoding, self._decoding_numbers = engine, self._numbers
        if self._samples.chunked and self._engines is not process_engines:
            self._decoding = process_engines().over(self._files.devices())
            self._decoding_numbers = self._files.attach(self._decoding)

    def _detach(self) -> None:
        with self._attaching:
            self._pending -= 1
            if self._closed and not self._pending:
                self._release()

    def sizes(self, indices: Int64s) -> Int64s:
        """Return lengths in bytes; chunks that were not read yet are read for it."""
        if self._samples.chunked:
            unknown = indices[self._samples.lengths[indices] == UNKNOWN_LENGTH]
            for start in range(0, len(unknown), SIZES_AT_ONCE):
                request = self.start(unknown[start : start + SIZES_AT_ONCE], apart=False)
                raise_first(self.finish(request))
        return self._samples.lengths[indices].astype(np.int64)

    def named(self, blocks: Sequence[tuple[int, int]]) -> list[bytes]:
        """As of `SampleSource`."""
        found: list[bytes] = []
        for shard, block in blocks:
            members = self._members[shard]
            found.append(b"" if members is None else members.block(block))
        return found

    @property
    def states(self) -> Int64s:
        """See `SampleSource.states`."""
        states = [(state.size, state.mtime_ns, state.ctime_ns) for state, _ in self._states]
        return np.array(states, np.int64)

    @property
    def share(self) -> float:
        """Of the data that is read through the page cache."""
        return self._files.share

    @property
    def knows_sizes(self) -> bool:
        """Whether `sizes` reads nothing."""
        return not self._samples.chunked

    def estimate(self, indices: Int64s) -> Int64s:
        """Return lengths in bytes, a guess where one is not known; never reads."""
        return self._samples.estimate(indices)

    # ---- reading --------------------------------------------------------------------------

    def cached_batch(self, indices: NDArray[Any], out: Bytes | None) -> Batch | LocalRequest | None:
        """Copy a batch of which all is in the page cache, or in a window."""
        if self._windows is not None:
            target = self._from_window(self._windows, indices, apart=False, out=out)
            if target is None:
                return None
            assert target.buffer is not None
            return Batch(target.buffer, target.offsets)
        if out is None and self._plain and (read := self._tables.batch(indices)) is not None:
            if len(read) == 2:
                return Batch(*read)
            buffer, edges, left = read
            return LocalRequest(indices, Target(edges, apart=False, out=buffer), left)
        found = self._read_cached(indices, apart=False, out=out)
        if found is None or len(found.left):
            return found
        assert found.target.buffer is not None
        return Batch(found.target.buffer, found.target.offsets)

    def cached_arrays(self, indices: Indices) -> list[Bytes] | LocalRequest | None:
        """Copy samples that are all in the page cache, or in a window, each to an array."""
        if self._windows is not None:
            numbers = as_int64(indices, self.count)
            target = self._from_window(self._windows, numbers, apart=True, out=None)
            return None if target is None else target.arrays
        if places.place is None:
            if not self._plain:
                return None
            read = self._tables.arrays(indices)
            if read is None or isinstance(read, list):
                return read
            arrays, edges, addresses, left = read
            target = Target(edges, apart=True, arrays=(arrays, addresses))
            return LocalRequest(left[:0], target, left)
        found = self._read_cached(as_int64(indices, self.count), apart=True, out=None)
        return found if found is None or len(found.left) else found.target.arrays

    def _from_window(
        self, windows: Windows, indices: NDArray[Any], *, apart: bool, out: Bytes | None
    ) -> Target | None:
        """Copy samples out of a window that has been read."""
        part = windows.take_read(indices)
        if part is None:
            return None
        window, begin, end = part
        offsets = window.request.target.offsets
        target = Target(offsets[begin : end + 1] - offsets[begin], apart=apart, out=out)
        windows.copy([part], target)
        self._add(len(indices), int(target.offsets[-1]))
        return target

    def _read_cached(
        self, indices: NDArray[Any], *, apart: bool, out: Bytes | None
    ) -> LocalRequest | None:
        """Read what is in the page cache; None for what `start` has to look at."""
        if not self._plain:
            return None
        edges = self._tables.edges(indices)
        return None if edges is None else self._to_target(indices, edges, apart, out)

    def _to_target(
        self, indices: Int64s, edges: Int64s, apart: bool, out: Bytes | None
    ) -> LocalRequest:
        target = Target(edges, apart=apart, out=out)
        to = target.places() if target.buffer is None else target.buffer
        return LocalRequest(indices, target, self._tables.read(indices, edges, to))

    def _edges(self, indices: Int64s) -> Int64s:
        edges = self._tables.edges(indices)
        assert edges is not None, "indices are checked before"
        return edges

    def _add(self, count: int, size: int) -> None:
        """Count samples that were not read by `LocalTables`, which counts by itself."""
        self._served += count
        self._size += size

    def start(
        self,
        indices: Int64s,
        *,
        apart: bool,
        out: Bytes | None = None,
        found: LocalRequest | None = None,
    ) -> LocalRequest:
        """Submit the reads."""
        indices = np.ascontiguousarray(indices)
        engine = self._attach()
        try:
            windows = self._windows
            if windows is not None and (parts := windows.take(indices)) is not None:
                target = Target(self._edges(indices), apart=apart, out=out)
                copy = partial(self._copy_parts, windows, parts)
                return LocalRequest(indices, target, indices[:0], None, engine, copy)
            if self._samples.chunked:
                inside = self._samples.in_chunks[self.layout.shards(indices)]
                if inside.any():
                    nothing = Target(np.zeros(1, np.int64), apart=False)
                    collect = self._submit_chunks(indices, inside, apart, out)
                    return LocalRequest(indices, nothing, indices[:0], None, engine, collect)
            edges = self._edges(indices)
            # The caller's array may have been changed since it was looked up.
            if found is None or not np.array_equal(edges, found.target.offsets):
                found = self._to_target(indices, edges, apart, out)
            found.indices = indices
            return self._submit(engine, self._numbers, found)
        except BaseException:
            self._detach()
            raise

    def _submit(self, engine: BatchEngine, files: Int32s, request: LocalRequest) -> LocalRequest:
        request.engine, target, left = engine, request.target, request.left
        if not len(left):
            return request
        chosen = request.indices[left]
        shards, starts, through = self._located(chosen)
        numbers = files[through.view(np.int8), shards]
        lengths, kinds = self._samples.held[chosen].astype(np.int64), self._samples.kinds[shards]
        if request.begins is not None:
            starts = starts + request.begins[left]
            lengths = np.minimum(lengths, np.diff(target.offsets)[left])
            kinds = np.zeros_like(kinds)
        batch = request.batch = record_batch(
            starts,
            lengths,
            numbers,
            kinds,
            self._samples.checksums[chosen],
            target.places()[left],
        )
        batch.keep = target, self._files
        engine.submit(batch)
        return request

    def in_chunks(self, indices: Int64s) -> NDArray[np.bool_]:
        """Return which samples are in chunks: those have no parts that can be read alone."""
        return self._samples.in_chunks[self.layout.shards(indices)]

    def parts(
        self, indices: Int64s, begins: Int64s, sizes: Int64s
    ) -> tuple[list[Bytes], dict[int, FFServeError]]:
        """Read parts of samples that are in no chunk, without a check; return them, and errors by
        position."""
        engine = self._attach()
        try:
            edges = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
            order = np.lexsort((begins, indices))  # that of the files
            request = LocalRequest(indices, Target(edges, apart=True), order, begins=begins)
            self._submit(engine, self._numbers, request)
        except BaseException:
            self._detach()
            raise
        failed = self.finish(request)
        assert request.target.arrays is not None
        return request.target.arrays, failed

    def _located(self, indices: Int64s) -> tuple[Int64s, Int64s, NDArray[np.bool_]]:
        """Return shards, offsets in them, and which are read through the page cache."""
        shards, starts = (
            self.layout.shards(indices),
            self._samples.offsets[indices].astype(np.int64),
        )
        return shards, starts, self._tables.through_cache(shards, starts)

    def _submit_chunks(
        self, indices: Int64s, inside: NDArray[np.bool_], apart: bool, out: Bytes | None
    ) -> Callable[[LocalRequest], dict[int, FFServeError]]:
        """Begin to read records of which some are in chunks; return what collects them."""
        plain, packed = np.flatnonzero(~inside), np.flatnonzero(inside)
        shards = self.layout.shards(indices[packed])
        records = indices[packed] - self.layout.firsts[shards]
        numbers = self._decoding_numbers

        def file_of(shard: int, offset: int) -> tuple[int, Second]:
            which, at = np.array([shard]), np.array([offset])
            number = numbers[self._tables.through_cache(which, at).view(np.int8), which]
            return int(number[0]), self._second_reads(shard)

        wanted = self._chunk_cache.wanted(shards, records, packed)
        chunks = ChunkReads(self._chunk_cache, self._decoding, file_of, wanted)
        others = None
        if len(plain):
            found = self._to_target(indices[plain], self._edges(indices[plain]), False, None)
            others = self._submit(self._decoding, self._decoding_numbers, found)
        return partial(self._collect_chunks, chunks, others, plain, apart, out)

    def _second_reads(self, shard: int) -> Second:
        return partial(second_reads, self._files.fd(shard))

    def finish(self, request: LocalRequest) -> dict[int, FFServeError]:
        """Wait for the reads."""
        if request.engine is self._engine:
            try:
                _wait(request)
            except BaseException:
                self._detach()
                raise
        return self.collect(request)

    def collect(self, request: LocalRequest) -> dict[int, FFServeError]:
        """Finish a request whose batch has ended."""
        try:
            self._check_engine(request)
            return (request.elsewhere or self._collect)(request)
        finally:
            self._detach()

    def _copy_parts(
        self, windows: Windows, parts: list[Part], request: LocalRequest
    ) -> dict[int, FFServeError]:
        self._add(len(request.indices), int(request.target.offsets[-1]))
        return windows.copy(parts, request.target)

    def _check_engine(self, request: LocalRequest) -> None:
        if request.engine is not self._engine:
            raise ServerUnavailable("the process forked while this read was in flight")

    def _collect(self, request: LocalRequest) -> dict[int, FFServeError]:
        sizes = np.diff(request.target.offsets)[request.left]
        self._add(len(sizes), int(sizes.sum()))
        return self._errors(request)

    def _errors(self, request: LocalRequest) -> dict[int, FFServeError]:
        """Return the errors of a request whose batch has ended, by position."""
        failures: Failures = {}
        batch, positions, engine = request.batch, request.left, request.engine
        while batch is not None:
            again = None
            if batch.failed:
                found = outcome_of(batch, positions)
                failures.update(found.failures)
                for record in found.wrong:
                    shard = self._samples.shard_of(int(request.indices[record.key]))
                    if record.is_right(self._files.fd(shard), record.dest):
                        self._faults.read_wrong(shard)
                    else:
                        failures[record.key] = record.failure
                if found.again is not None:
                    again, positions = found.again, positions[found.rows]
                    assert engine is not None
                    engine.submit(again)
                    engine.wait(again)
            batch.free()
            batch = again
        for position in self._samples.cut(request.indices).tolist():
            failures[position] = Failure(STATUS_TRUNCATED)
        indices = request.indices
        return {k: self._faults.named(int(indices[k]), failures[k]) for k in sorted(failures)}

    def _collect_chunks(
        self,
        chunks: ChunkReads,
        plain: LocalRequest | None,
        positions: Int64s,
        apart: bool,
        out: Bytes | None,
        request: LocalRequest,
    ) -> dict[int, FFServeError]:
        """Decode chunks, and allocate the target when all lengths are known. Args: plain: the other
        records, at these positions."""
        chunks.finish()
        indices = request.indices.tolist()
        errors = {
            k: self._faults.explained(error.located(index=indices[k]), indices[k])
            for k, error in chunks.failed.items()
        }
        size = 0
        if plain is not None:
            assert plain.target.buffer is not None
            _wait(plain)
            failed = self._collect(plain)
            errors.update((int(positions[k]), error) for k, error in failed.items())
            edges = plain.target.offsets
            size = int(edges[-1])
            chunks.add(positions, plain.target.buffer, edges[:-1], np.diff(edges))
        offsets = chunks.edges(len(indices))
        request.target = Target(offsets, apart=apart, out=out)
        chunks.copy_to(request.target)
        self._add(len(indices) - len(positions), int(offsets[-1]) - size)
        return errors

    def lease(self, indices: Int64s) -> Leased:
        """Return read-only views of one buffer."""
        request = self.start(indices, apart=False)
        raise_first(self.finish(request))
        buffer, offsets = request.target.buffer, request.target.offsets
        assert buffer is not None
        buffer.flags.writeable = False
        return Leased(buffer, offsets[:-1], np.diff(offsets), {})

    # ---- orders ---------------------------------------------------------------------------

    def announce(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Follow this order; that of a later epoch when that begins."""
        if not self._orders or epoch <= min(self._orders):
            self._orders.clear()
            self.follow(order)
            if self._windows is not None:
                self._windows.move_to(0)
        self._orders[epoch] = order

    def reached(self, epoch: int, position: int) -> bool:
        """Follow the announced order of this epoch from this position on."""
        order = self._orders.get(epoch)
        if order is None:
            return True
        if position >= len(order):
            epoch, position = epoch + 1, 0
        passed = [known for known in self._orders if known < epoch]
        for old in passed:
            del self._orders[old]
        if passed and epoch in self._orders:
            self.follow(self._orders[epoch])
        if self._windows is not None and epoch in self._orders:
            self._windows.move_to(position)
        return True

    def follow(self, order: Int64s) -> None:
        """Read windows of this order, when its first sample is asked for."""
        if self._samples.chunked or self._engines is not process_engines:
            return  # chunks are kept when they were decoded; an event loop must not wait
        if self._windows is not None:
            self._windows.close()
        mean_size = int(self._samples.sizes.sum()) // max(self.count, 1)
        windows = Windows(order, mean_size, self._advise, self._begin_window, self._finish_window)
        self._windows = windows if windows.any else None

    def _advise(self, indices: Int64s) -> None:
        shards, starts, through = self._located(indices)
        sizes = self._samples.lengths[indices].astype(np.int64)
        self._files.will_need(shards, through, starts, sizes)

    def _begin_window(self, indices: Int64s) -> LocalRequest:
        assert self._engine is not None
        order = np.argsort(indices)  # that of the files
        request = LocalRequest(indices, Target(self._edges(indices), apart=False), order)
        return self._submit(self._engine, self._numbers, request)

    def _finish_window(self, request: LocalRequest) -> dict[int, FFServeError]:
        self._check_engine(request)
        _wait(request)
        return self._errors(request)

    # ---- the rest -------------------------------------------------------------------------

    def tables(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of a shard's payload offsets, lengths and checksums."""
        return self._samples.of_shard(shard)

    def stats(self) -> dict[str, int | float | str]:
        """Return counters since the source was opened."""
        count, size = self._tables.counters
        return {
            "hits": 0,
            "misses": self._served + count,
            "samples": self._served + count,
            "bytes": self._size + size,
            "hit_rate": 0.0,
        }

    def after_fork(self) -> None:
        """The engine belongs to the parent; tables and descriptors are the child's as well."""
        self._engine = None
        self._windows = None
        self._orders.clear()
        self._files.after_fork()
        self._tables.after_fork()
        self._pending = 0
        self._attaching = threading.Lock()
        self._chunk_cache = self._new_chunk_cache()

    def close(self) -> None:
        """Close the files when no request needs them any more."""
        if self._windows is not None:
            self._windows.close()
        self._tables.close()
        with self._attaching:
            if not self._closed and not self._pending:
                self._release()
            self._closed = True

    def _release(self) -> None:
        """Give back files and memory, even if the caller keeps the source."""
        self._engine = None
        self._windows = None
        del self._chunk_cache
        self._members.clear()
        self._files.close()


def _wait(request: LocalRequest) -> None:
    if request.batch is not None:
        assert request.engine is not None
        request.engine.wait(request.batch)
