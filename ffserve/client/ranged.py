"""Samples of remote files, read by this process by ranges of their objects, which are not kept.

What a request needs of an object is asked for at once, neighbours together, by the threads of its
origin. When it has come, samples are compared with their checksums and copied, and chunks decoded.
All reads of a shard are of the version that was opened; an object that has changed is an error.
An order that is announced changes nothing: what is read ahead has to be kept somewhere, and that is
a daemon's work. Local files among the shards are read as by any `LocalSource`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ffserve import formats
from ffserve.client.local import (
    MAX_CHUNK_SIZE,
    LocalRequest,
    LocalSource,
    PartlyRead,
)
from ffserve.client.local_chunks import Chunk, ChunkCache, FileOf, decoding_threads, new_memory
from ffserve.client.source import Batch, Indices, Target
from ffserve.disk.shardfile import FileState
from ffserve.dtypes import Bytes, Int64s
from ffserve.engine.codec import checksums, scatter
from ffserve.engine.io import Engine
from ffserve.errors import STATUS_CHECKSUM, FFServeError, status_error
from ffserve.reads.chunks import decode
from ffserve.reads.opening import How, Tables
from ffserve.store import fetching
from ffserve.store.fetching import identity_of
from ffserve.store.opening import parsed
from ffserve.store.origin import Identity
from ffserve.store.ranges import RangedObject, bytes_of
from ffserve.store.urls import is_url

T = TypeVar("T")
R = TypeVar("R")

OPENED_AT_ONCE = 16
"""Remote objects that are looked up, or whose tables are read, at the same time."""
GAP = 64 << 10
"""Bytes between records that come with them."""


@dataclass(slots=True)
class _Run:
    """Neighbouring samples of a shard, by their positions, and the requests for [begin, end)."""

    shard: int
    positions: Int64s
    begin: int
    end: int
    coming: list[tuple[int, int, Future[fetching.Outcome]]]


@dataclass(slots=True)
class RangedRead(PartlyRead):
    """The samples that are not `left` to an engine come by ranges."""

    runs: list[_Run]


class RangedSource(LocalSource):
    """Shards of which some are remote.

    Args:
        paths: absolute paths, and URLs. identities: of the URLs, in order, if an earlier source of
            these paths has found them; then no origin is asked for them.

    Raises: as `LocalSource`; UsageError for a protocol that is not there.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        format: str | None,
        verify: bool,
        tolerant: bool = False,
        seen: Callable[[int], object] | None = None,
        *,
        share: float | None = None,
        identities: tuple[Identity, ...] = (),
    ) -> None:
        urls = [path for path in paths if is_url(path)]
        self.identities = identities if len(identities) == len(urls) else identified(urls)
        objects = [RangedObject(identity) for identity in self.identities]
        how = How(format, verify, tolerant, MAX_CHUNK_SIZE)
        self._parsed = dict(
            zip(urls, _all(lambda each: _parsed(each, how, seen), objects), strict=True)
        )
        by_url = dict(zip(urls, objects, strict=True))
        self._objects = [by_url.get(path) for path in paths]
        self._is_remote = np.array([each is not None for each in self._objects], np.bool_)
        super().__init__(paths, format, verify, tolerant, seen=seen, share=share)
        self._parsed.clear()
        self.description = "ranged reads"

    def _open_file(self, path: str) -> int:
        if not is_url(path):
            return super()._open_file(path)
        return os.memfd_create("ffserve-remote", os.MFD_CLOEXEC)  # of nothing: no engine reads it

    def _read_tables(
        self, paths: list[str], fds: list[int], states: list[FileState], how: How
    ) -> list[Tables]:
        local = [k for k, path in enumerate(paths) if not is_url(path)]
        names, own_fds = [paths[k] for k in local], [fds[k] for k in local]
        found = iter(super()._read_tables(names, own_fds, [states[k] for k in local], how))
        return [
            Tables.of(self._parsed[path], how.max_chunk_size) if is_url(path) else next(found)
            for path in paths
        ]

    # ---- samples as they are in the file --------------------------------------------------

    def cached_batch(self, indices: NDArray[Any], out: Bytes | None) -> Batch | PartlyRead | None:
        """Return None: nothing is known of what is in memory."""
        return None

    def cached_arrays(self, indices: Indices) -> list[Bytes] | PartlyRead | None:
        """Return None: nothing is known of what is in memory."""
        return None

    def _to_target(
        self, indices: Int64s, edges: Int64s, apart: bool, out: Bytes | None
    ) -> PartlyRead:
        """Ask for the samples of remote shards, and leave the others to the engine."""
        target = self._target(edges, apart, out)
        shards = self.layout.shards(indices)
        remote = self._is_remote[shards]
        runs: list[_Run] = []
        for shard in np.unique(shards[remote]).tolist():
            mine = np.flatnonzero(shards == shard)
            lengths = np.diff(edges)[mine]
            runs.append(_Run(shard, mine[lengths == 0], 0, 0, []))
            mine, lengths = mine[lengths > 0], lengths[lengths > 0]
            starts = self._offsets[indices[mine]].astype(np.int64)
            for rows in _neighbours(starts, starts + lengths):
                begin, end = int(starts[rows[0]]), int((starts + lengths)[rows].max())
                coming = self._object(shard).ask_all(begin, end)
                runs.append(_Run(shard, mine[rows], begin, end, coming))
        return RangedRead(target, np.flatnonzero(~remote), runs)

    def _submit(
        self, engine: Engine, files: NDArray[np.int32], indices: Int64s, found: PartlyRead
    ) -> LocalRequest:
        request = super()._submit(engine, files, indices, found)
        request.coming = found
        return request

    def _errors(self, request: LocalRequest) -> dict[int, FFServeError]:
        """Wait for the ranges as well, and take the samples out of them."""
        errors = super()._errors(request)
        assert isinstance(request.coming, RangedRead)
        for run in request.coming.runs:
            failed = self._take(run, request.indices, request.target)
            errors.update({k: error for k, error in failed.items() if k not in errors})
        return errors

    def _take(self, run: _Run, indices: Int64s, target: Target) -> dict[int, FFServeError]:
        """Copy the samples of a run to their destinations; return the errors by position."""
        numbers = indices[run.positions]
        lengths = np.diff(target.offsets)[run.positions]
        starts = self._offsets[numbers].astype(np.int64) - run.begin
        starts[lengths == 0] = 0
        errors: dict[int, FFServeError] = {}
        content = np.empty(run.end - run.begin, np.uint8)
        intact = np.ones(len(numbers), np.bool_)
        for begin, end, future in run.coming:
            low, high = begin - run.begin, end - run.begin
            try:
                content[low:high] = np.frombuffer(bytes_of(future), np.uint8)
            except FFServeError as error:
                for row in np.flatnonzero((starts < high) & (starts + lengths > low)).tolist():
                    errors[int(run.positions[row])] = error.located(index=int(numbers[row]))
                    intact[row] = False
        kind = int(self._kinds[run.shard])
        expected = self._checksums[numbers]
        # What lies beyond the end of the file has no bytes here, and its error already.
        checked = intact & (self._lengths[numbers] == lengths) & bool(kind)
        found = expected
        if checked.any():
            found = checksums(kind, content, starts.astype(np.uint64), lengths.astype(np.uint64))
        for row in np.flatnonzero(checked & (found != expected)).tolist():
            errors[int(run.positions[row])] = status_error(
                STATUS_CHECKSUM,
                path=self.shards[run.shard].path,
                index=int(numbers[row]),
                offset=run.begin + int(starts[row]),
                length=int(lengths[row]),
                found=int(found[row]),
                expected=int(expected[row]),
            )
        scatter(content, starts, lengths, target.places()[run.positions])
        self._add(len(lengths), int(lengths.sum()))
        return errors

    def read(
        self, indices: Int64s, apart: bool, out: Bytes | None
    ) -> tuple[Target, dict[int, FFServeError]]:
        """Start and finish a request, in a thread that may wait."""
        request = self.start(indices, apart=apart, out=out)
        errors = self.finish(request)
        return request.target, errors

    # ---- chunks, damage, orders -----------------------------------------------------------

    def _new_chunk_cache(self) -> ChunkCache:
        return _RangedChunks(self)

    def _explained(
        self, error: FFServeError, index: int, record: tuple[int, int, int]
    ) -> FFServeError:
        shard = int(self.layout.shards(np.array([index], np.int64))[0])
        return error if self._is_remote[shard] else super()._explained(error, index, record)

    def _object(self, shard: int) -> RangedObject:
        found = self._objects[shard]
        assert found is not None
        return found

    def after_fork(self) -> None:
        """Connections to origins are the parent's as well."""
        super().after_fork()
        for opened in self._objects:
            if opened is not None:
                opened.after_fork()

    def announce(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Do nothing."""

    def reached(self, epoch: int, position: int) -> bool:
        """Return True: nothing is lost."""
        return True

    def follow(self, order: Int64s) -> None:
        """Do nothing."""


class _RangedChunks(ChunkCache):
    """Decoded chunks of which those of remote shards come by ranges."""

    def __init__(self, source: RangedSource) -> None:
        super().__init__(source._chunked, source._learned, source._warn)
        self._source = source

    def _read(self, engine: Engine, file_of: FileOf, chunks: list[Chunk]) -> None:
        for shard, some in groupby(chunks, key=lambda chunk: chunk.key[0]):
            mine = list(some)
            if not self._source._is_remote[shard]:
                super()._read(engine, file_of, mine)
                continue
            begins = np.array([chunk.begin for chunk in mine], np.int64)
            ends = np.array([chunk.end for chunk in mine], np.int64)
            for rows in _neighbours(begins, ends):
                self._ask(shard, [mine[row] for row in rows.tolist()])

    def _ask(self, shard: int, chunks: list[Chunk]) -> None:
        begin, end = chunks[0].begin, max(chunk.end for chunk in chunks)
        coming = self._source._object(shard).ask(begin, end)
        self._keep(chunks)

        def decode_all() -> None:
            try:
                content = memoryview(bytes_of(coming))
            except FFServeError as error:
                for chunk in chunks:
                    self._end(chunk, error, False)
                return
            for chunk in chunks:
                extent = content[chunk.begin - begin : chunk.end - begin]
                size = self.size(chunk.key)
                self._end(chunk, decode(chunk, chunk.low, extent, new_memory, 0, size), False)

        def came(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the process ends
                decoding_threads().submit(self._decode, chunks, decode_all)

        coming.add_done_callback(came)


def _neighbours(starts: Int64s, ends: Int64s) -> Iterator[Int64s]:
    """Yield the rows of extents that come together, each run in the order of the file."""
    if not len(starts):
        return
    order = np.argsort(starts, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    edges = np.flatnonzero(starts[order][1:] > reach[:-1] + GAP) + 1
    yield from np.split(order, edges)


def _parsed(opened: RangedObject, how: How, seen: Callable[[int], object] | None) -> formats.Shard:
    read_at, size, name = opened.read_at(), opened.size, opened.shown
    options = {"verify": how.verify, "tolerant": how.tolerant, "seen": seen}
    return parsed(read_at, size, name, how.format, **options)  # type: ignore[arg-type]


def identified(urls: Sequence[str]) -> tuple[Identity, ...]:
    """Ask the origins for the present versions, several at once."""
    return tuple(_all(identity_of, urls))


def _all(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the results of calls, several at once. Raises: the error of the first that failed."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(len(items), OPENED_AT_ONCE)) as pool:
        return list(pool.map(call, items))
