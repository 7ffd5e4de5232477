"""Batches that are all in memory: the short way that they take, and what it must not leave out."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from daemon import sample, serving, until, write
from hypothesis import given
from hypothesis import strategies as st

import ffserve
from ffserve.client.daemon.client_statistics import RecentHits
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


@pytest.mark.parametrize("size", [100, 20_000])
def test_cached_arrays(size: int, tmp_path: Path) -> None:
    """Each has memory of its own: of small ones, one that was kept held its whole batch."""
    samples = [bytes([k]) * (size + k % 2) for k in range(40)]
    path = write(tmp_path / "a.ffr", samples)
    with serving() as daemon, daemon.open(path) as reader:
        wanted = [*range(39), 3, 3]
        reader.read(wanted)
        asked = daemon.status()["jobs"][0]["missed"]
        hits = reader.stats()["hits"]
        for errors in ("raise", "return"):
            got = reader.read(np.array(wanted), errors=errors)  # type: ignore[call-overload]
            assert [one.tobytes() for one in got] == [samples[k] for k in wanted]
        assert all(one.flags.writeable and one.ndim == 1 for one in got)
        assert all(one.flags.owndata and one.base is None for one in got)
        got[-1][:] = 255
        assert got[-2].tobytes() == reader[3].tobytes() == samples[3]
        assert reader.stats()["hits"] == hits + 2 * len(wanted) + 1
        assert daemon.status()["jobs"][0]["missed"] == asked
        assert reader.read([]) == []
        # One is missing: what the look-up found goes with the request.
        assert [one.tobytes() for one in reader.read([5, 39, 5])] == [
            samples[k] for k in (5, 39, 5)
        ]
        bad: Any
        for bad in (np.array([0, 40]), [40], np.array([-41])):
            with pytest.raises(IndexError):
                reader.read(bad)
        for bad in (np.array(1), np.array([[1]]), np.array([1.0])):
            with pytest.raises(UsageError):
                reader.read(bad)
        assert reader.read(np.arange(40)[::2].astype(np.int32))[3].tobytes() == samples[6]


def test_the_files_of_a_hit(tmp_path: Path) -> None:
    """docs/ARCHITECTURE.md counts the files that a hit passes."""
    path = write(tmp_path / "a.ffr", [bytes(100)] * 10)
    folder = Path(ffserve.__file__).parent
    files = set[str]()

    def note(frame: FrameType, *_: object) -> None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(folder):
            files.add(str(file.relative_to(folder)))

    with serving() as daemon, daemon.open(path) as reader:
        indices = np.arange(10)
        for read in (reader.read_batch, reader.read):
            read(indices)
            passed = []
            for _ in range(3):  # now and then a read also tells the daemon what was used
                files.clear()
                sys.setprofile(note)
                try:
                    read(indices)
                finally:
                    sys.setprofile(None)
                passed.append(set(files))
            assert min(passed, key=len) == {
                "reader.py",
                "client/daemon/shared_memory.py",
                "engine/shm.py",
                "client/daemon/client_statistics.py",
            }


WITHOUT = """
import sys
sys.modules["ffserve.engine._arrays"] = None
import ffserve
from ffserve.engine import arrays, io
assert "lists of arrays by Python: " in io.describe(), io.describe()
path, socket = sys.argv[1:]
for server in (socket, "off"):
    with ffserve.open(path, server=server) as reader:
        for _ in range(2):
            print(*(one.tobytes().hex() for one in reader.read([5, 0, 199, 5])), sep="\\n")
        for wrong in ([200], [-1], [2**70]):
            try:
                reader.read(wrong)
            except IndexError:
                print("outside")
"""


@pytest.mark.check
def test_the_same_without_the_module_that_makes_arrays(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [sample(k) for k in range(200)])
    with serving() as daemon:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", WITHOUT, path, daemon.socket],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0 and not done.stderr, done.stderr
    expected = [bytes(sample(k)).hex() for k in (5, 0, 199, 5)]
    assert done.stdout.splitlines() == 2 * (2 * expected + 3 * ["outside"])


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
