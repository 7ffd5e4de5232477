"""Chunks: batches that read them as they are in the file, and their decoding.

Chunks are read many at a time as one batch of an engine. A thread then verifies and decodes each of
them into memory that the caller provides; the compression libraries release the GIL. A damaged
chunk is read a second time (`second_read`); if it is damaged again, it fails alone.

No memory is allocated because a file states a size: extents were compared with the file when it was
opened, and decoding stops at the end of the memory that it was given.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from ffserve.dtypes import Bytes, Int64s
from ffserve.engine.io import EngineBatch
from ffserve.engine.shm import NOWHERE
from ffserve.errors import FFServeError, FormatError
from ffserve.formats.base import ChunkedShard

BATCH_SIZE = 1 << 20
"""Bytes of chunks that are read as one batch and decoded by one thread, unless one is larger."""
BUFFER_UNIT = 256 << 10
"""Sizes of reusable buffers are multiples of this."""
THREADS = min(4, os.cpu_count() or 1)


@dataclass(slots=True)
class ChunkRun:
    """Adjacent chunks [low, high) of one shard, at [begin, end) of the file.

    file: number of the file in the engine that reads it. second: gives the bytes of an extent
    (offset, length) by other paths, such as `second_reads`. mend: has what is damaged of a remote
    file fetched again, and returns whether there was any. It may wait for an origin, so the chunks
    of such a run are not read a second time by the thread that decodes.
    """

    shard: ChunkedShard
    low: int
    high: int
    begin: int
    end: int
    file: int
    second: Callable[[int, int], Iterable[memoryview]]
    mend: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class DecodedChunk:
    """The bytes of a chunk, and the places of its records in them."""

    buffer: Bytes
    starts: Int64s
    lengths: Int64s


Outcome: TypeAlias = "DecodedChunk | FFServeError | int"
"""The outcome of a chunk; a number is the status of a read that failed."""
Run = TypeVar("Run", bound=ChunkRun)
Key = TypeVar("Key")
Memory: TypeAlias = Callable[[Run, int, int], Bytes]
"""Called with a run, an offset and a size, returns `size` bytes for the chunk whose decoded bytes
begin `offset` bytes after those of the run."""


def batches(runs: Iterable[tuple[Key, Run]]) -> Iterator[tuple[Key, list[Run]]]:
    """Divide the runs of each engine into batches of up to BATCH_SIZE bytes, in order."""
    groups: dict[Key, tuple[int, list[Run]]] = {}
    for engine, run in runs:
        size, group = groups.get(engine, (0, []))
        more = run.end - run.begin
        if group and size + more > BATCH_SIZE:
            yield engine, group
            size, group = 0, []
        group.append(run)
        groups[engine] = size + more, group
    for engine, (_, group) in groups.items():
        yield engine, group


class ReusableBuffers:
    """Memory that is used again, by any thread; fresh memory costs a page fault per page.

    Args: most: bytes that are kept while they are not in use.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: list[Bytes] = []

    def take(self, size: int) -> Bytes:
        """Return memory of at least `size` bytes, with any content."""
        with self._lock:
            for k, buffer in enumerate(self._kept):
                if size <= len(buffer) <= 2 * size + BUFFER_UNIT:
                    return self._kept.pop(k)
        return np.empty(-(-size // BUFFER_UNIT) * BUFFER_UNIT, np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Keep memory that nothing refers to any more."""
        with self._lock:
            self._kept.append(buffer)
            while sum(map(len, self._kept)) > self._most:
                del self._kept[0]


class ChunkBatch(Generic[Run]):
    """Chunks that are read as one batch and decoded by one thread.

    Args:
        runs: of files of one engine, to which `batch` is then submitted.
        buffers: memory for the encoded bytes.
    """

    def __init__(self, runs: list[Run], buffers: ReusableBuffers) -> None:
        begins = np.array([run.begin for run in runs], np.int64)
        sizes = np.array([run.end for run in runs], np.int64) - begins
        self.runs = runs
        self.size = int(sizes.sum())
        self._buffers = buffers
        self._raw = buffers.take(self.size)
        self.batch = batch = EngineBatch(len(runs), len(runs))
        reads, records = batch.reads, batch.records
        reads["offset"] = records["offset"] = begins
        reads["length"] = records["length"] = sizes
        reads["slot"] = records["entry"] = NOWHERE
        reads["file"] = [run.file for run in runs]
        reads["first_record"] = np.arange(len(runs))
        reads["record_count"] = 1
        records["dest"] = self._raw.__array_interface__["data"][0] + np.cumsum(sizes) - sizes
        batch.keep = self._raw

    def decode(self, memory: Memory[Run]) -> Iterator[tuple[Run, int, int, Outcome, bool]]:
        """Verify and decode the chunks of a batch that has ended; only once, since it is freed.

        Returns: (run, number of the chunk, its offset, its outcome, whether it was right at the
            second read only), in order. An exception is an outcome too.
        """
        statuses, errors = self.batch.records["status"].tolist(), self.batch.errors
        self.batch.free()
        raw, at = self._raw.data, 0
        for row, (run, status) in enumerate(zip(self.runs, statuses, strict=True)):
            chunks, offset = run.shard.chunks, 0
            for chunk in range(run.low, run.high):
                size, first = int(chunks.sizes[chunk]), at + int(chunks.begins[chunk]) - run.begin
                extent = raw[first : first + int(chunks.ends[chunk] - chunks.begins[chunk])]
                outcome = errors.get(row) or status
                outcome = outcome or decode(run, chunk, extent, memory, offset, size)
                again = False
                if isinstance(outcome, FormatError) and run.mend is None:
                    found = read_again(run, chunk, memory, offset)
                    if found is not None:
                        outcome, again = found, True
                yield run, chunk, offset, outcome, again
                offset += size
            at += run.end - run.begin
        self._buffers.give(self._raw)


def read_again(run: Run, chunk: int, memory: Memory[Run], offset: int) -> DecodedChunk | None:
    """Read and decode a chunk that was damaged once more; return None if it is damaged again."""
    chunks = run.shard.chunks
    begin, size = int(chunks.begins[chunk]), int(chunks.sizes[chunk])
    for extent in run.second(begin, int(chunks.ends[chunk]) - begin):
        outcome = decode(run, chunk, extent, memory, offset, size)
        if isinstance(outcome, DecodedChunk):
            return outcome
    return None


def decode(
    run: Run,
    chunk: int,
    extent: memoryview,
    memory: Memory[Run],
    offset: int,
    size: int,
) -> Outcome:
    """Verify and decode the bytes of a chunk; see `ChunkBatch.decode`."""
    try:
        into = memory(run, offset, size)
        return DecodedChunk(into, *run.shard.decode(chunk, extent, into))
    except FFServeError as error:
        return error
    except MemoryError:
        return -errno.ENOMEM
    except Exception as error:
        # An unexpected error of a decoder must not make a request wait for ever.
        return FFServeError(f"the decoder of {run.shard.format} failed: {error!r}")


def thread_pool(count: int = THREADS) -> ThreadPoolExecutor:
    """Return a pool of threads for decoding."""
    return ThreadPoolExecutor(count, thread_name_prefix="ffserve-decode")
