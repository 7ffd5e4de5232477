"""Extents that are read as they stand, in pieces, whatever they are like."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ffserve.engine.extents import PIECE_SIZE, Extents, Spares
from ffserve.engine.io import ETRUNCATED, Engine

SIZE = 3 * PIECE_SIZE + 777


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    body = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
    (tmp_path / "x").write_bytes(body)
    return body


def read(engine: Engine, fd: int, places: list[tuple[int, int]]) -> tuple[bytes, list[int], int]:
    begins, ends = (np.array(column, np.int64) for column in zip(*places, strict=True))
    raw = np.zeros(int((ends - begins).sum()), np.uint8)
    file = engine.add_file(fd, 512)
    extents = Extents(engine, np.full(len(places), file, np.int32), begins, ends, raw)
    before = engine.counters()["reads"]
    engine.submit(extents.batch)
    engine.wait(extents.batch)
    statuses = extents.statuses()
    engine.remove_file(file)
    return raw.tobytes(), statuses, engine.counters()["reads"] - before


def test_pieces_come_together(tmp_path: Path, content: bytes) -> None:
    edges = [0, 1, 511, 4095, 4096, PIECE_SIZE - 1, PIECE_SIZE, PIECE_SIZE + 1, SIZE - 1, SIZE]
    places = [(low, high) for low in edges for high in edges if low <= high]
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    with Engine("threads", depth=4) as engine:
        found, statuses, _ = read(engine, fd, places)
        assert statuses == [0] * len(places)
        assert found == b"".join(content[low:high] for low, high in places)
        # As few as there can be: one where it fits, and none that begins inside of a block.
        assert read(engine, fd, [(5000, 5000 + PIECE_SIZE - 904)])[2] == 1
        assert read(engine, fd, [(0, 2 * PIECE_SIZE)])[2] == 2
    os.close(fd)


def test_a_piece_that_fails_fails_its_extent_only(tmp_path: Path, content: bytes) -> None:
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    with Engine("threads", depth=4) as engine:
        os.truncate(tmp_path / "x", 2 * PIECE_SIZE)
        places = [(0, SIZE), (7, 2 * PIECE_SIZE), (SIZE - 9, SIZE), (3, 3)]
        assert read(engine, fd, places)[1] == [ETRUNCATED, 0, ETRUNCATED, 0]
    os.close(fd)


def test_memory_is_used_again_up_to_a_bound() -> None:
    spares = Spares(4 * PIECE_SIZE)
    first = spares.take(PIECE_SIZE + 1)
    assert len(first) == 2 * PIECE_SIZE
    spares.give(first)
    assert spares.take(10 * PIECE_SIZE) is not first
    assert spares.take(100) is not first or len(first) <= 2 * 100 + PIECE_SIZE
    assert spares.take(PIECE_SIZE) is first
    assert spares.take(PIECE_SIZE) is not first
    large = spares.take(5 * PIECE_SIZE)
    spares.give(large)
    assert spares.take(5 * PIECE_SIZE) is not large
