"""Samples through an engine in this process, where no daemon serves them.

The same C core reads past the page cache into buffers of its own, verifies, and copies each
payload to its destination while the bytes are warm; nothing is kept. Neighbours that are asked
for together are read together.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve import formats, shardfile
from ffserve.client.chunks import MAX_CHUNK_SIZE, ChunkRequest, ChunkStore
from ffserve.client.source import Batch, Bytes, Int64s, Leased, Target, check_out
from ffserve.dataset import Layout, ShardInfo, bound_lengths
from ffserve.engine import io
from ffserve.engine.io import MERGED_SIZE, Engine, merge_reads, open_direct
from ffserve.engine.shm import NOWHERE, Lookup
from ffserve.errors import FFServeError, ServerUnavailable, status_error
from ffserve.files import open_regular, raise_file_limit, wrap_os_error
from ffserve.formats.base import UNKNOWN_LENGTH, ChunkedShard

SIZES_AT_ONCE = 65_536

_lock = threading.Lock()
_engine: Engine | None = None


def process_engine() -> Engine:
    """Return the engine that all readers of this process share."""
    global _engine
    with _lock:
        if _engine is None:
            _engine = Engine("auto", depth=128)
        return _engine


def _in_child() -> None:
    global _engine, _lock
    _lock = threading.Lock()
    if _engine is not None:
        _engine.forget()
        _engine = None


os.register_at_fork(after_in_child=_in_child)


@dataclass(slots=True)
class _File:
    fd: int
    alignment: int
    number: int = -1


@dataclass(slots=True)
class LocalPending:
    """A batch that an engine has; None: there is nothing to read."""

    indices: Int64s
    target: Target
    batch: io.Batch | None
    engine: Engine


@dataclass(slots=True)
class ChunkedPending:
    """A request of which records lie in chunks; `plain`: the others, at these positions.

    The target is made when all lengths are known.
    """

    indices: Int64s
    target: Target
    engine: Engine
    apart: bool
    out: Bytes | None
    chunks: ChunkRequest
    plain: LocalPending | None
    positions: Int64s


class LocalSource:
    """Shards opened by this process.

    Args: paths: absolute, of the shards. engine: returns the one to read by.

    Raises: FormatError, ChecksumError, TruncatedError, AccessDenied, ReadError: the first shard
        that cannot be opened.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        format: str | None,
        verify: bool,
        tolerant: bool = False,
        engine: Callable[[], Engine] = process_engine,
    ) -> None:
        self._choose_engine = engine
        self._files: list[_File] = []
        self._engine: Engine | None = None
        self._attaching = threading.Lock()
        self._pending = 0
        """Requests begun and not finished; the last one after `close` closes the files."""
        self._served = self._size = 0
        self._closed = False
        try:
            self._open(paths, format, verify, tolerant)
        except BaseException:
            self._close_files()
            raise
        self.description = f"engine {engine().kind}"

    def _open(
        self, paths: tuple[str, ...], format: str | None, verify: bool, tolerant: bool
    ) -> None:
        if len(paths) > 256:
            raise_file_limit()
        parsed: list[formats.Shard] = []
        tables: list[tuple[NDArray[np.uint64], NDArray[Any], NDArray[np.uint32]]] = []
        for path in paths:
            shard, table, file = open_shard(path, format, verify, tolerant)
            self._files.append(file)
            parsed.append(shard)
            tables.append(table)
        self.layout = Layout(np.array([shard.count for shard in parsed], np.int64))
        self.count = self.layout.count
        self._offsets = _joined([table[0] for table in tables])
        self._lengths = _joined([table[1] for table in tables])
        self._checksums = _joined([table[2] for table in tables])
        self._sizes = np.array([shard.size for shard in parsed], np.uint64)
        self._kinds = np.array([s.checksum_kind if verify else 0 for s in parsed], np.int32)
        self.shards = [
            ShardInfo(s.path, s.format, s.count, int(first), s.size, s.fingerprint)
            for s, first in zip(parsed, self.layout.firsts[:-1], strict=True)
        ]
        self._chunked = {k: s for k, s in enumerate(parsed) if isinstance(s, ChunkedShard)}
        self._in_chunks = np.array([k in self._chunked for k in range(len(parsed))], np.bool_)
        self._store = ChunkStore(self._chunked, self._learned)

    def _learned(self, shard: int, chunk: int, lengths: Int64s) -> None:
        first = int(self.layout.firsts[shard] + self._chunked[shard].chunks.firsts[chunk])
        self._lengths[first : first + len(lengths)] = lengths

    def _attach(self) -> Engine:
        """Return the engine, and count a request: the files stay open until it is over.

        Raises: ServerUnavailable when the source was closed.
        """
        with self._attaching:
            if self._closed:
                raise ServerUnavailable("this source of samples was closed")
            if self._engine is None:
                engine = self._choose_engine()
                for file in self._files:
                    file.number = engine.add_file(file.fd, file.alignment)
                self._numbers = np.array([file.number for file in self._files], np.int32)
                self._engine = engine
                self._attach_decoding(engine)
            self._pending += 1
            return self._engine

    def _attach_decoding(self, engine: Engine) -> None:
        """Chunks are waited for by threads, which an engine that a loop watches does not allow."""
        self._decoding, self._decoding_numbers = engine, self._numbers
        if self._chunked and engine is not process_engine():
            self._decoding = process_engine()
            added = [self._decoding.add_file(file.fd, file.alignment) for file in self._files]
            self._decoding_numbers = np.array(added, np.int32)

    def _detach(self) -> None:
        with self._attaching:
            self._pending -= 1
            if self._closed and not self._pending:
                self._release()

    def sizes(self, indices: Int64s | None) -> Int64s:
        """Return lengths in bytes; what lies in chunks that were not read yet is read."""
        chosen = np.arange(self.count, dtype=np.int64) if indices is None else indices
        if self._chunked:
            unknown = chosen[self._lengths[chosen] == UNKNOWN_LENGTH]
            for start in range(0, len(unknown), SIZES_AT_ONCE):
                pending = self.start(unknown[start : start + SIZES_AT_ONCE], apart=False)
                for _, error in sorted(self.finish(pending).items()):
                    raise error
        return self._lengths[chosen].astype(np.int64)

    @property
    def knows_sizes(self) -> bool:
        """Whether `sizes` reads nothing."""
        return not self._chunked

    def estimate(self, indices: Int64s) -> Int64s:
        """Return lengths in bytes, a guess where they are not known; never reads."""
        sizes = self._lengths[indices].astype(np.int64)
        unknown = np.flatnonzero(sizes == UNKNOWN_LENGTH) if self._chunked else sizes[:0]
        if len(unknown):
            means = np.array(
                [
                    int(self._chunked[k].chunks.sizes.sum()) // max(shard.count, 1)
                    if k in self._chunked
                    else 0
                    for k, shard in enumerate(self.shards)
                ],
                np.int64,
            )
            sizes[unknown] = means[self.layout.shards(indices[unknown])]
        return sizes

    # ---- reading --------------------------------------------------------------------------

    def copied(self, indices: NDArray[Any], out: Bytes | None) -> Batch | Lookup | None:
        """Return None: every sample has to be read."""
        return None

    def start(
        self,
        indices: Int64s,
        *,
        apart: bool,
        out: Bytes | None = None,
        found: Lookup | None = None,
    ) -> LocalPending | ChunkedPending:
        """Submit the reads."""
        engine = self._attach()
        try:
            if self._chunked:
                inside = self._in_chunks[self.layout.shards(indices)]
                if inside.any():
                    return self._submit_chunks(engine, indices, inside, apart, out)
            return self._submit(engine, self._numbers, indices, apart, out)
        except BaseException:
            self._detach()
            raise

    def _submit(
        self,
        engine: Engine,
        files: NDArray[np.int32],
        indices: Int64s,
        apart: bool,
        out: Bytes | None,
    ) -> LocalPending:
        count = len(indices)
        lengths = self._lengths[indices].astype(np.int64)
        starts = self._offsets[indices].astype(np.int64)
        shards = self.layout.shards(indices)
        # Nothing is allocated for what a cut file does not hold.
        held = np.where(starts + lengths > self._sizes[shards].astype(np.int64), 0, lengths)
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(held, out=offsets[1:])
        if out is not None:
            out = check_out(out, int(offsets[-1]))
        target = Target(offsets, apart=apart, out=out)
        if not count:
            return LocalPending(indices, target, None, engine)
        firsts = merge_reads(starts, starts + held, shards, MERGED_SIZE)
        counts = np.diff(np.append(firsts, count))
        batch = engine.batch(len(firsts), count)
        reads, records = batch.reads, batch.records
        lasts = firsts + counts - 1
        reads["offset"] = starts[firsts]
        reads["length"] = starts[lasts] + held[lasts] - starts[firsts]
        reads["slot"] = NOWHERE
        reads["file"] = files[shards[firsts]]
        reads["checksum_kind"] = self._kinds[shards[firsts]]
        reads["first_record"] = firsts
        reads["record_count"] = counts
        records["offset"] = starts
        records["length"] = held
        records["entry"] = NOWHERE
        records["dest"] = target.places()
        records["checksum"] = self._checksums[indices]
        batch.keep = target
        engine.submit(batch)
        return LocalPending(indices, target, batch, engine)

    def _submit_chunks(
        self,
        engine: Engine,
        indices: Int64s,
        inside: NDArray[np.bool_],
        apart: bool,
        out: Bytes | None,
    ) -> ChunkedPending:
        plain, packed = np.flatnonzero(~inside), np.flatnonzero(inside)
        shards = self.layout.shards(indices[packed])
        records = indices[packed] - self.layout.firsts[shards]
        wanted = deque(self._store.wanted(shards, records, packed))
        request = ChunkRequest(self._store, self._decoding, self._decoding_numbers, wanted)
        request.begin()
        others = None
        if len(plain):
            others = self._submit(
                self._decoding, self._decoding_numbers, indices[plain], False, None
            )
        nothing = Target(np.zeros(1, np.int64), apart=False)
        return ChunkedPending(indices, nothing, engine, apart, out, request, others, plain)

    def finish(self, pending: LocalPending | ChunkedPending) -> dict[int, FFServeError]:
        """Wait for the reads."""
        if isinstance(pending, ChunkedPending):
            return self._finish_chunked(pending)
        if pending.batch is not None and pending.engine is self._engine:
            try:
                pending.engine.wait(pending.batch)
            except BaseException:
                self._detach()
                raise
        return self.collect(pending)

    def collect(self, pending: LocalPending) -> dict[int, FFServeError]:
        """What `finish` does once the reads have ended."""
        if pending.engine is not self._engine:
            raise ServerUnavailable("the process forked while a read was on its way")
        try:
            return self._collect(pending)
        finally:
            self._detach()

    def _collect(self, pending: LocalPending) -> dict[int, FFServeError]:
        if pending.batch is None:
            return {}
        self._served += len(pending.indices)
        self._size += int(pending.target.offsets[-1])
        if pending.batch.failed and len(pending.batch.reads) < len(pending.batch.records):
            self._read_singly(pending.engine, pending.batch)
        errors = self._errors(pending, pending.batch)
        pending.batch.free()
        return errors

    def _finish_chunked(self, pending: ChunkedPending) -> dict[int, FFServeError]:
        if pending.engine is not self._engine:
            raise ServerUnavailable("the process forked while a read was on its way")
        try:
            return self._wait_chunked(pending)
        finally:
            self._detach()

    def _wait_chunked(self, pending: ChunkedPending) -> dict[int, FFServeError]:
        request, plain, positions = pending.chunks, pending.plain, pending.positions
        request.finish()
        indices = pending.indices.tolist()
        errors = {k: error.located(index=indices[k]) for k, error in request.failed.items()}
        size = 0
        if plain is not None:
            assert plain.batch is not None and plain.target.buffer is not None
            plain.engine.wait(plain.batch)
            failed = self._collect(plain)
            errors.update((int(positions[k]), error) for k, error in failed.items())
            edges = plain.target.offsets
            size = int(edges[-1])
            request.found.append((positions, plain.target.buffer, edges[:-1], np.diff(edges)))
        offsets = np.zeros(len(indices) + 1, np.int64)
        np.cumsum(request.lengths(len(indices)), out=offsets[1:])
        out = pending.out
        if out is not None:
            out = check_out(out, int(offsets[-1]))
        pending.target = Target(offsets, apart=pending.apart, out=out)
        request.copy_to(pending.target)
        self._served += len(indices) - len(positions)
        self._size += int(offsets[-1]) - size
        return errors

    def _read_singly(self, engine: Engine, batch: io.Batch) -> None:
        """Read again, each by itself, what the disk refused as a whole."""
        rows = np.flatnonzero(io.refused(batch.records["status"]))
        if not len(rows):
            return
        reads = np.searchsorted(batch.reads["first_record"], rows, side="right") - 1
        again = engine.batch(len(rows), len(rows))
        again.reads[:] = batch.reads[reads]
        again.records[:] = batch.records[rows]
        for name in ("offset", "length"):
            again.reads[name] = again.records[name]
        again.reads["first_record"] = np.arange(len(rows))
        again.reads["record_count"] = 1
        again.keep = batch.keep
        engine.submit(again)
        engine.wait(again)
        batch.records["status"][rows] = again.records["status"]
        batch.records["found"][rows] = again.records["found"]
        again.free()

    def _errors(self, pending: LocalPending, batch: io.Batch) -> dict[int, FFServeError]:
        indices = pending.indices
        cut = self._cut(indices)
        errors: dict[int, FFServeError] = {}
        if not batch.failed and not len(cut):
            return errors
        status = batch.records["status"].copy()
        status[cut] = io.ETRUNCATED
        for position in np.flatnonzero(status).tolist():
            index = int(indices[position])
            record = batch.records[position]
            shard = int(self.layout.shards(indices[position : position + 1])[0])
            errors[position] = status_error(
                int(status[position]),
                path=self.shards[shard].path,
                index=index,
                offset=int(self._offsets[index]),
                length=int(self._lengths[index]),
                found=int(record["found"]),
                expected=int(record["checksum"]),
            )
        return errors

    def _cut(self, indices: Int64s) -> Int64s:
        lengths = self._lengths[indices]
        ends = self._offsets[indices] + lengths
        return np.flatnonzero((lengths > 0) & (ends > self._sizes[self.layout.shards(indices)]))

    def lease(self, indices: Int64s) -> Leased:
        """Return read-only views of one buffer."""
        pending = self.start(indices, apart=False)
        for _, error in sorted(self.finish(pending).items()):
            raise error
        buffer, offsets = pending.target.buffer, pending.target.offsets
        assert buffer is not None
        buffer.flags.writeable = False
        return Leased(buffer, offsets[:-1], np.diff(offsets), {})

    # ---- what will be read: nobody here to whom it would be of use --------------------------

    def announce(self, order: Int64s, epoch: int, name: str | None, replacement: bool) -> None:
        """Do nothing."""

    def reached(self, epoch: int, position: int) -> bool:
        """Do nothing."""
        return True

    # ---- the rest -------------------------------------------------------------------------

    def tables(
        self, shard: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        """Return copies of a shard's payload offsets, lengths and checksums."""
        run = slice(int(self.layout.firsts[shard]), int(self.layout.firsts[shard + 1]))
        return (
            self._offsets[run].copy(),
            self._lengths[run].astype(np.uint64),
            self._checksums[run].copy(),
        )

    def stats(self) -> dict[str, int | float | str]:
        """Return counters since the source was opened."""
        return {
            "hits": 0,
            "misses": self._served,
            "samples": self._served,
            "bytes": self._size,
            "hit_rate": 0.0,
        }

    def after_fork(self) -> None:
        """The engine stayed in the parent; the tables and descriptors are ours as well."""
        self._engine = None
        self._pending = 0
        self._attaching = threading.Lock()
        self._store = ChunkStore(self._chunked, self._learned)

    def close(self) -> None:
        """Close the files, or let the last request that is on its way do it."""
        with self._attaching:
            if not self._closed and not self._pending:
                self._release()
            self._closed = True

    def _release(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            for file in self._files:
                engine.remove_file(file.number)
            if self._decoding is not engine:
                for number in self._decoding_numbers.tolist():
                    self._decoding.remove_file(number)
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                os.close(file.fd)
        self._files = []


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def open_shard(
    path: str, format: str | None, verify: bool, tolerant: bool = False
) -> tuple[formats.Shard, tuple[NDArray[np.uint64], NDArray[Any], NDArray[np.uint32]], _File]:
    """Parse one file's tables (payload offsets, lengths, checksums) and open it for reading.

    Lengths are u32 where they fit, which is half of a reader's memory.

    Raises: FormatError, ChecksumError, TruncatedError, AccessDenied, ReadError.
    """
    plain = open_regular(path)
    try:
        shard = shardfile.open_shard(plain, path, format, verify=verify, tolerant=tolerant)
        chunked = isinstance(shard, ChunkedShard)
        if isinstance(shard, ChunkedShard):
            shard.limit(MAX_CHUNK_SIZE)
        size = shard.size
        offsets, checksums = np.empty(shard.count, np.uint64), np.empty(shard.count, np.uint32)
        lengths = np.empty(shard.count, np.uint64)
        shard.load(offsets, lengths, checksums)
        if not chunked:
            bound_lengths(offsets, lengths, size, path)
        narrow = size < (1 << 32) - 1 and not chunked
        kept = lengths.astype(np.uint32) if narrow else lengths
        fd, alignment = wrap_os_error(lambda _: open_direct(plain), path)
    finally:
        os.close(plain)
    return shard, (offsets, kept, checksums), _File(fd, alignment)
