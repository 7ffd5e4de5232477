"""Copying samples out of shared memory while somebody else changes it."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.engine import ring
from ffserve.engine.checksum import CRC_32, checksum
from ffserve.engine.direct import open_direct
from ffserve.engine.ring import Engine
from ffserve.engine.view import ENTRY_DTYPE, NOWHERE, View, publish, retract
from ffserve.errors import ReadError, SampleIndexError, UsageError

UNKNOWN = (0xFFFFFFFF, 0xFFFF << 48)


def directory(count: int) -> npt.NDArray[np.void]:
    entries = np.frombuffer(mmap.mmap(-1, max(1, count) * ENTRY_DTYPE.itemsize), ENTRY_DTYPE)[
        :count
    ]
    entries["length_low"], entries["place"] = UNKNOWN
    return entries


def shared(size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def take_back(entries: npt.NDArray[np.void], first: int, count: int, slot: int, size: int) -> None:
    retract(
        entries.ctypes.data,
        np.array([first]),
        np.array([count]),
        np.array([slot], np.uint64),
        np.array([size], np.uint64),
    )


class Shelf:
    """An arena of 1 MiB with ten samples in it, 100, 101, ... bytes long, sample 3 missing."""

    def __init__(self) -> None:
        self.arena = shared(1 << 20)
        self.arena[:] = np.random.default_rng(1).integers(0, 256, len(self.arena), np.uint8)
        self.entries = directory(10)
        for k in range(10):
            if k != 3:
                publish(self.entries.ctypes.data, k, 1000 * k + 7, 100 + k)
        address = self.entries.ctypes.data
        size = ENTRY_DTYPE.itemsize
        # Four segments over one array: as many shards, one of them empty.
        self.view = View(
            self.arena.ctypes.data,
            len(self.arena),
            [
                (address, 0, 2),
                (address + 2 * size, 2, 0),
                (address + 2 * size, 2, 3),
                (address + 5 * size, 5, 5),
            ],
        )

    def sample(self, k: int) -> bytes:
        return self.arena[1000 * k + 7 : 1000 * k + 107 + k].tobytes()


@given(indices=st.lists(st.integers(0, 9), max_size=40))
def test_any_samples_in_any_order(indices: list[int]) -> None:
    shelf = Shelf()
    wanted = np.array(indices, np.int64)
    offsets, missing, unknown = shelf.view.locate(wanted)
    lengths = [0 if k == 3 else 100 + k for k in indices]
    assert offsets.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert missing.tolist() == [i for i, k in enumerate(indices) if k == 3]
    assert unknown == len(missing)
    buffer = np.zeros(offsets[-1], np.uint8)
    left = shelf.view.gather(wanted, offsets, buffer)
    assert left is not None
    assert left.tolist() == missing.tolist()
    expected = b"".join(shelf.sample(k) for k in indices if k != 3)
    assert buffer.tobytes() == expected
    places = shelf.view.places(wanted)
    assert places.tolist() == [NOWHERE if k == 3 else 1000 * k + 7 for k in indices]


def test_to_addresses_and_some_positions() -> None:
    shelf = Shelf()
    wanted = np.array([9, 1, 3, 1, 5])
    offsets, _, _ = shelf.view.locate(wanted)
    rooms = [np.zeros(200, np.uint8) for _ in wanted]
    dests = np.array([room.ctypes.data for room in rooms], np.uint64)
    left = shelf.view.gather(wanted, offsets, None, dests, np.array([4, 2, 0]))
    assert left is not None
    assert left.tolist() == [2]
    assert rooms[0][:109].tobytes() == shelf.sample(9)
    assert rooms[4][:105].tobytes() == shelf.sample(5)
    assert not rooms[0][109:].any()
    assert not rooms[1].any()


@pytest.mark.parametrize("index", [-1, 10, 2**62, -(2**63)])
@pytest.mark.parametrize("at", [0, 7, 8, 20])
def test_index_outside_is_named(index: int, at: int) -> None:
    shelf = Shelf()
    wanted = np.full(30, 4)
    offsets, _, _ = shelf.view.locate(wanted)
    wanted[at] = index
    with pytest.raises(SampleIndexError) as caught:
        shelf.view.locate(wanted)
    assert caught.value.index == index
    with pytest.raises(IndexError):
        shelf.view.gather(wanted, offsets, np.zeros(offsets[-1], np.uint8))
    with pytest.raises(IndexError):
        shelf.view.places(wanted)


def test_view_of_nothing() -> None:
    view = View(0, 0, [])
    empty = np.empty(0, np.int64)
    offsets, missing, unknown = view.locate(empty)
    assert (offsets.tolist(), missing.tolist(), unknown) == ([0], [], 0)
    assert view.gather(empty, offsets, np.empty(0, np.uint8)) is not None
    with pytest.raises(IndexError):
        view.locate(np.array([0]))


def test_sample_that_changed_its_length() -> None:
    shelf = Shelf()
    wanted = np.array([3])
    offsets, missing, unknown = shelf.view.locate(wanted)
    assert (missing.tolist(), unknown) == ([0], 1)
    publish(shelf.entries.ctypes.data, 3, 50, 60)
    assert shelf.view.gather(wanted, offsets, np.zeros(1000, np.uint8)) is None
    offsets, missing, unknown = shelf.view.locate(wanted)
    assert (offsets.tolist(), missing.size, unknown) == ([0, 60], 0, 0)


@pytest.mark.parametrize("offset", [(1 << 20) - 59, 1 << 20, 1 << 40, (1 << 48) - 1])
def test_entry_that_points_outside_of_the_arena(offset: int) -> None:
    shelf = Shelf()
    publish(shelf.entries.ctypes.data, 3, offset, 60)
    wanted = np.array([2, 3])
    offsets, _, _ = shelf.view.locate(wanted)
    with pytest.raises(ReadError):
        shelf.view.gather(wanted, offsets, np.zeros(1000, np.uint8))
    with pytest.raises(ReadError):
        shelf.view.places(wanted)


def test_length_beyond_four_gib() -> None:
    shelf = Shelf()
    publish(shelf.entries.ctypes.data, 3, 7, (5 << 32) + 11)
    offsets, missing, _ = shelf.view.locate(np.array([3]))
    assert offsets[1] == (5 << 32) + 11
    assert missing.size == 0


def test_retract_spares_what_lies_elsewhere() -> None:
    shelf = Shelf()
    before = shelf.entries["seq"].copy()
    take_back(shelf.entries, 1, 5, 2007, 2001)  # samples 2 and 4 start in there, 3 is not readable
    after = shelf.entries["seq"]
    assert np.flatnonzero(after != before).tolist() == [2, 4]
    _, missing, unknown = shelf.view.locate(np.arange(10))
    assert missing.tolist() == [2, 3, 4]
    assert unknown == 1  # the lengths of the others are still known


def test_wrong_calls() -> None:
    shelf = Shelf()
    wanted = np.arange(3)
    offsets, _, _ = shelf.view.locate(wanted)
    with pytest.raises(UsageError):
        shelf.view.gather(wanted, offsets, np.zeros(offsets[-1] - 1, np.uint8))
    with pytest.raises(UsageError):
        shelf.view.gather(wanted, offsets[:-1], np.zeros(1000, np.uint8))
    with pytest.raises(UsageError):
        shelf.view.gather(wanted, offsets, None)
    with pytest.raises(UsageError):
        View(0, 0, [(0, 1, 5)])


def test_no_torn_copy_is_accepted() -> None:
    """A process refills four slots with one byte's copies while this one copies them out."""
    count, size = 8, 4096
    arena, entries = shared(4 * size), directory(count)
    stop = shared(1)
    pid = os.fork()
    if pid == 0:
        try:
            turn, holds = 0, [-1] * 4
            while not stop[0]:
                slot, turn = turn % 4, turn + 1
                entry = slot + 4 * (turn // 4 % 2)
                if holds[slot] >= 0:
                    take_back(entries, holds[slot], 1, slot * size, size)
                arena[slot * size : (slot + 1) * size] = turn % 251
                publish(entries.ctypes.data, entry, slot * size, size)
                holds[slot] = entry
        finally:
            os._exit(0)
    try:
        view = View(arena.ctypes.data, len(arena), [(entries.ctypes.data, 0, count)])
        wanted = np.arange(count)
        offsets = np.arange(count + 1) * size
        accepted = refused = 0
        kinds: set[int] = set()
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            buffer = np.zeros((count, size), np.uint8)
            left = view.gather(wanted, offsets, buffer.reshape(-1))
            if left is None:
                continue  # not yet published for the first time
            whole = np.delete(buffer, left, axis=0)
            assert (whole == whole[:, :1]).all()
            accepted += len(whole)
            refused += len(left)
            kinds.update(whole[:, 0].tolist())
    finally:
        stop[0] = 1
        os.waitpid(pid, 0)
    assert accepted > 1000
    assert refused > 0
    assert len(kinds) > 50


@pytest.mark.parametrize("kind", ring.probe())
def test_no_sample_is_taken_for_another(kind: ring.Kind, tmp_path: Path) -> None:
    """The engine fills four slots with ever other samples while the same thread's rival reads."""
    count, size, slots = 64, 3000, 4
    content = np.random.default_rng(3).integers(0, 256, (count, size), np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    room = 12288
    arena, entries = shared(slots * room), directory(count)
    stop = shared(1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            fd, alignment = open_direct(tmp_path / "file")
            with Engine(kind, depth=4, threads=2) as engine:
                engine.set_arena(arena.ctypes.data, len(arena), entries.ctypes.data, count)
                file = engine.add_file(fd, alignment)
                random = np.random.default_rng(5)
                holds: list[int] = [-1] * slots
                batch = engine.batch(1, 1)
                while not stop[0]:
                    slot, sample = int(random.integers(slots)), int(random.integers(count))
                    if sample in holds:
                        continue
                    if holds[slot] >= 0:
                        take_back(entries, holds[slot], 1, slot * room, room)
                    holds[slot] = sample
                    crc = checksum(CRC_32, content[sample])
                    batch.reads[0] = (sample * size, size, slot * room, room, file, 1, 0, 1)
                    batch.records[0] = (sample * size, size, sample, 0, crc, 0, 0, 0)
                    engine.submit(batch)
                    engine.wait(batch)
                    assert batch.failed == 0
            status = 0
        finally:
            os._exit(status)
    try:
        view = View(arena.ctypes.data, len(arena), [(entries.ctypes.data, 0, count)])
        wanted = np.arange(count)
        offsets = np.arange(count + 1) * size
        accepted = 0
        until = time.monotonic() + 1
        while time.monotonic() < until:
            buffer = np.zeros((count, size), np.uint8)
            left = view.gather(wanted, offsets, buffer.reshape(-1))
            if left is None:  # a length is still unknown to the directory
                known = np.flatnonzero(entries["seq"] > 0)
                for sample in known:
                    one = np.zeros(size, np.uint8)
                    got = view.gather(wanted[sample : sample + 1], offsets[:2], one)
                    if got is not None and not len(got):
                        accepted += 1
                        assert (one == content[sample]).all()
                continue
            there = np.delete(wanted, left)
            assert (buffer[there] == content[there]).all()
            accepted += len(there)
    finally:
        stop[0] = 1
        _, ended = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended) == 0
    assert accepted > 500
