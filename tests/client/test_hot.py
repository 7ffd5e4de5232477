"""Batches that are all in memory: the short way that they take, and what it must not leave out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import sample, serving, until, write
from hypothesis import given
from hypothesis import strategies as st

from ffserve.client.statistics import RecentHits
from ffserve.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file of 200 samples of very different sizes."""
    return write(tmp_path / "a.ffr", [sample(i) for i in range(200)])


def test_what_is_copied_without_asking_is_counted(path: str) -> None:
    """Hits are entered some batches at a time; none may be lost, whoever looks and when."""
    indices = np.arange(40)
    with serving() as daemon, daemon.open(path), daemon.open(path) as reader:
        size = reader.read_batch(indices).buffer.nbytes
        assert reader.stats()["hits"] == 0
        for k in range(1, 6):
            assert reader.read_batch(indices).buffer.nbytes == size
            assert reader.stats()["hits"] == 40 * k
            assert reader.stats()["bytes"] == size * (k + 1)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: reader.read_batch(indices), range(200)))
        assert reader.stats()["hits"] == 40 * 205
        reader.read_batch(indices)
        reader.close()
        until(lambda: daemon.status()["jobs"][0]["hits"] >= 40 * 206, "the daemon has heard of it")
        assert daemon.status()["jobs"][0]["hits"] == 40 * 206


def test_the_callers_indices_stay_the_callers(path: str) -> None:
    """What was found in memory is reported later, when the array may hold anything."""
    with serving() as daemon, daemon.open(path) as reader:
        reader.announce(np.arange(len(reader)))
        reader.read_batch(np.arange(40))
        indices = np.arange(40)
        first = reader.read_batch(indices)
        indices[:] = -1
        later = reader.read_batch(np.arange(40, 200))
        for batch, numbers in ((first, range(40)), (later, range(40, 200))):
            assert [s.tobytes() for s in batch] == [bytes(sample(k)) for k in numbers]
        with pytest.raises(IndexError):
            reader.read_batch(indices)


def test_a_hot_batch_into_the_callers_buffer(path: str) -> None:
    with serving() as daemon, daemon.open(path) as reader:
        indices = np.arange(30)
        cold = reader.read_batch(indices)
        room = np.zeros(cold.buffer.nbytes + 7, np.uint8)
        for out in (None, room, room[: cold.buffer.nbytes]):
            hot = reader.read_batch(indices, out=out)
            assert hot.buffer.tobytes() == cold.buffer.tobytes()
            assert hot.offsets.tolist() == cold.offsets.tolist()
            assert out is None or np.shares_memory(hot.buffer, out)
        read_only = room.copy()
        read_only.flags.writeable = False
        bad: Any
        for bad in (room[:-8], room[::2], read_only, room.astype(np.int32), room.reshape(1, -1)):
            with pytest.raises(UsageError, match="out"):
                reader.read_batch(indices, out=bad)


def test_batches_are_the_callers_to_keep(path: str) -> None:
    """Each has memory of its own, also when the one before was of the same size."""
    with serving() as daemon, daemon.open(path) as reader:
        orders = [np.arange(k, k + 14) for k in (0, 7, 14, 0)]
        kept = [reader.read_batch(order) for order in (*orders, *orders)]
        for order, batch in zip((*orders, *orders), kept, strict=True):
            assert [s.tobytes() for s in batch] == [bytes(sample(int(k))) for k in order]
            assert batch.buffer.flags.writeable
        kept[-1].buffer[:] = 0
        assert bytes(kept[3][1]) == bytes(sample(1))


@given(
    notes=st.lists(st.lists(st.integers(0, 99), max_size=25), max_size=12),
    size=st.integers(1, 20),
    takes=st.sets(st.integers(0, 11)),
)
def test_the_latest_that_were_noted(notes: list[list[int]], size: int, takes: set[int]) -> None:
    recent, kept = RecentHits(size), list[int]()
    for k, some in enumerate(notes):
        array = np.array(some, np.int64)
        recent.note(array)
        array[:] = -1  # the caller's own may change
        kept = [*kept, *some][-size:]
        if k in takes:
            assert recent.take().tolist() == kept
            kept = []
    assert recent.take().tolist() == kept
    assert recent.take().tolist() == []
