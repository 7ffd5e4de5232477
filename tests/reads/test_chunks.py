"""Chunks are read as they are in the file and decoded, and one that fails fails alone."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ffserve.engine.io import ETRUNCATED, Engine
from ffserve.errors import ChecksumError, FFServeError
from ffserve.formats.base import Chunks
from ffserve.reads.chunks import (
    BATCH_SIZE,
    BUFFER_UNIT,
    ChunkBatch,
    ChunkRun,
    DecodedChunk,
    ReusableBuffers,
    batches,
)
from ffserve.reads.second_read import second_reads

SIZE = 3 * BUFFER_UNIT + 777


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    body = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
    (tmp_path / "x").write_bytes(body)
    return body


class Plain:
    """A shard of chunks that are one record each, encoded as they are; `bad`: error by chunk."""

    format = "plain"

    def __init__(self, places: list[tuple[int, int]], bad: dict[int, Exception]) -> None:
        begins, ends = (np.array(column, np.int64) for column in zip(*places, strict=True))
        self.chunks = Chunks(np.arange(len(places) + 1), begins, ends, ends - begins)
        self._bad = bad

    def decode(
        self, chunk: int, extent: memoryview, into: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if chunk in self._bad:
            raise self._bad[chunk]
        into[:] = np.frombuffer(extent, np.uint8)
        return np.zeros(1, np.int64), np.array([len(extent)], np.int64)


def nothing(_offset: int, _length: int) -> list[memoryview]:
    return []


def runs(
    places: list[tuple[int, int]], joined: int = 1, bad: dict[int, Exception] | None = None
) -> list[ChunkRun]:
    shard: Any = Plain(places, bad or {})
    found = []
    for low in range(0, len(places), joined):
        high = min(low + joined, len(places))
        found.append(
            ChunkRun(shard, low, high, places[low][0], places[high - 1][1], 0, second=nothing)
        )
    return found


def decode(
    fd: int, chunks: list[ChunkRun], memory: int | None = None
) -> tuple[list[bytes | FFServeError | int], list[int], int]:
    """Return the outcomes, the offsets in the runs, and how many reads there were."""
    with Engine("threads", depth=4) as engine:
        file = engine.add_file(fd, 512)
        for run in chunks:
            run.file, run.second = file, partial(second_reads, fd)
        reading = ChunkBatch(chunks, ReusableBuffers(0))
        engine.submit(reading.batch)
        engine.wait(reading.batch)
        reads = engine.counters()["reads"]

    def room(run: ChunkRun, offset: int, size: int) -> NDArray[np.uint8]:
        if memory is not None and size > memory:
            raise MemoryError
        return np.zeros(size, np.uint8)

    outcomes: list[bytes | FFServeError | int] = []
    offsets = []
    for _, _, offset, outcome, _ in reading.decode(room):
        outcomes.append(outcome.buffer.tobytes() if isinstance(outcome, DecodedChunk) else outcome)
        offsets.append(offset)
    return outcomes, offsets, reads


def test_pieces_come_together(tmp_path: Path, content: bytes) -> None:
    edges = [0, 1, 511, 4095, 4096, BUFFER_UNIT - 1, BUFFER_UNIT, BUFFER_UNIT + 1, SIZE - 1, SIZE]
    places = [(low, high) for low in edges for high in edges if low <= high]
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    assert decode(fd, runs(places))[0] == [content[low:high] for low, high in places]
    # As few as there can be: one where it fits, and none that begins inside of a block.
    assert decode(fd, runs([(5000, 5000 + BUFFER_UNIT - 904)]))[2] == 1
    assert decode(fd, runs([(0, 2 * BUFFER_UNIT)]))[2] == 2
    os.close(fd)


def test_a_run_is_read_as_one_and_its_chunks_lie_side_by_side(
    tmp_path: Path, content: bytes
) -> None:
    places = [(10, 500), (510, 2000), (2000, 2001), (3000, 9000), (9000, 9500)]
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    outcomes, offsets, reads = decode(fd, runs(places, joined=3))
    assert outcomes == [content[low:high] for low, high in places]
    assert offsets == [0, 490, 490 + 1490, 0, 6000] and reads == 2
    os.close(fd)


def test_a_piece_that_fails_fails_its_extent_only(tmp_path: Path, content: bytes) -> None:
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    os.truncate(tmp_path / "x", 2 * BUFFER_UNIT)
    places = [(0, SIZE), (7, 2 * BUFFER_UNIT), (SIZE - 9, SIZE), (3, 3)]
    outcomes, _, _ = decode(fd, runs(places))
    assert outcomes == [ETRUNCATED, content[7 : 2 * BUFFER_UNIT], ETRUNCATED, b""]
    os.close(fd)


def test_a_chunk_that_cannot_be_decoded_fails_alone(tmp_path: Path, content: bytes) -> None:
    damaged = ChecksumError("damaged")
    bad = {1: damaged, 3: ZeroDivisionError("a fault")}
    places = [(k * 1000, k * 1000 + 900) for k in range(5)] + [(5000, 9000)]
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    outcomes, _, _ = decode(fd, runs(places, joined=6, bad=bad), memory=1000)
    os.close(fd)
    assert [outcomes[k] for k in (0, 2, 4)] == [content[k : k + 900] for k in (0, 2000, 4000)]
    assert outcomes[1] is damaged and outcomes[5] == -errno.ENOMEM
    assert isinstance(outcomes[3], FFServeError)
    assert "decoder of plain failed" in str(outcomes[3]) and "a fault" in str(outcomes[3])


def test_batches_are_of_one_engine_and_bounded() -> None:
    sizes = [BATCH_SIZE // 2, BATCH_SIZE // 2, 1, 3 * BATCH_SIZE, 5, 6]
    ends = np.cumsum(sizes).tolist()
    some = runs([(end - size, end) for size, end in zip(sizes, ends, strict=True)])
    found = list(batches([*((0, run) for run in some), *((1, run) for run in some)]))
    for engine in (0, 1):
        groups = [group for of, group in found if of == engine]
        assert [run for group in groups for run in group] == some, "in order"
        assert [len(group) for group in groups] == [2, 1, 1, 2]


def test_memory_is_used_again_up_to_a_bound() -> None:
    buffers = ReusableBuffers(4 * BUFFER_UNIT)
    first = buffers.take(BUFFER_UNIT + 1)
    assert len(first) == 2 * BUFFER_UNIT
    buffers.give(first)
    assert buffers.take(10 * BUFFER_UNIT) is not first
    assert buffers.take(100) is not first or len(first) <= 2 * 100 + BUFFER_UNIT
    assert buffers.take(BUFFER_UNIT) is first
    assert buffers.take(BUFFER_UNIT) is not first
    large = buffers.take(5 * BUFFER_UNIT)
    buffers.give(large)
    assert buffers.take(5 * BUFFER_UNIT) is not large
