"""Copying samples out of shared memory while another thread or process changes it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from daemon import DEADLINE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ffserve.engine import arrays, io
from ffserve.engine.codec import CRC_32, checksum
from ffserve.engine.core import lib
from ffserve.engine.io import Engine, open_direct
from ffserve.engine.shm import NOWHERE, Located, MappedView, publish, retract
from ffserve.engine.slots import ENTRY_DTYPE
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


def whole(
    view: MappedView, indices: Any, out: npt.NDArray[np.uint8] | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]] | None:
    """Copy a batch if every sample can be read."""
    found = view.copy_batch(indices, out)
    return None if found is None or isinstance(found, Located) else (found.buffer, found.offsets)


def take_back(entries: npt.NDArray[np.void], first: int, count: int, slot: int, size: int) -> None:
    retract(
        entries.ctypes.data,
        np.array([first]),
        np.array([count]),
        np.array([slot], np.uint64),
        np.array([size], np.uint64),
    )


class Shelf:
    """Two arenas of 1 MiB with five samples each, 100, 101, ... bytes long, sample 3 missing."""

    def __init__(self) -> None:
        self.arenas = [shared(1 << 20), shared(1 << 20)]
        for seed, arena in enumerate(self.arenas):
            arena[:] = np.random.default_rng(seed).integers(0, 256, len(arena), np.uint8)
        self.entries = directory(10)
        for k in range(10):
            if k != 3:
                publish(self.entries.ctypes.data, k, 1000 * k + 7, 100 + k)
        address = self.entries.ctypes.data
        size = ENTRY_DTYPE.itemsize
        # Four segments of one array, for four shards, one of them empty.
        first, second = (arena.ctypes.data for arena in self.arenas)
        self.view = MappedView(
            1 << 20,
            [
                (address, 0, 2, first),
                (address + 2 * size, 2, 0, second),
                (address + 2 * size, 2, 3, first),
                (address + 5 * size, 5, 5, second),
            ],
        )

    def sample(self, k: int) -> bytes:
        return self.arenas[k // 5][1000 * k + 7 : 1000 * k + 107 + k].tobytes()


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
    lowest = min(arena.ctypes.data for arena in shelf.arenas)
    starts = [arena.ctypes.data - lowest for arena in shelf.arenas]
    expected_places = [NOWHERE if k == 3 else starts[k // 5] + 1000 * k + 7 for k in indices]
    assert places.tolist() == expected_places


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
    view = MappedView(0, [])
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
def test_entry_that_points_outside_the_arena(offset: int) -> None:
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


@given(indices=st.lists(st.integers(0, 9), min_size=1, max_size=40), more=st.integers(0, 100))
def test_whole_batches_in_one_call(indices: list[int], more: int) -> None:
    shelf = Shelf()
    wanted = np.array(indices, np.int64)
    total = sum(100 + k for k in indices)
    for turn in range(2):  # the second time its size is known
        out = np.full(total + more, 0xAA, np.uint8)
        apart, into = shelf.view.copy_batch(wanted), shelf.view.copy_batch(wanted, out)
        if turn == 0 and 3 in indices:
            assert isinstance(apart, Located) and isinstance(into, Located)
            for found in (apart, into):
                assert found.unknown == indices.count(3)
                assert found.missing.tolist() == [k for k, i in enumerate(indices) if i == 3]
                lengths = [0 if i == 3 else 100 + i for i in indices]
                assert np.diff(found.offsets).tolist() == lengths
            publish(shelf.entries.ctypes.data, 3, 3007, 103)
            continue
        assert apart is not None and not isinstance(apart, Located)
        assert into is not None and not isinstance(into, Located)
        for batch in (apart, into):
            assert batch.buffer.tobytes() == b"".join(map(shelf.sample, indices))
            assert np.diff(batch.offsets).tolist() == [100 + k for k in indices]
            assert batch.offsets[0] == 0
        assert apart.buffer.flags.owndata
        assert np.shares_memory(into.buffer, out)
        assert (out[total:] == 0xAA).all()


def test_whole_batches_of_a_size_that_is_expected() -> None:
    """Samples are copied while others are looked up; a batch of another size is noticed."""
    shelf = Shelf()
    wanted = np.array([1, 2, 5], np.int64)
    total = 101 + 102 + 105

    def expecting() -> MappedView:
        for _ in range(3):
            assert whole(shelf.view, wanted) is not None
        return shelf.view

    for indices in ([1, 2, 5], [2, 1, 5], [4, 4, 0], [7, 1], [9], [1, 2, 5, 6], [9] * 30):
        found = whole(expecting(), np.array(indices, np.int64))
        assert found is not None
        assert found[0].tobytes() == b"".join(map(shelf.sample, indices))
        assert found[1].tolist() == [0, *np.cumsum([100 + k for k in indices]).tolist()]
    for bad in ([1, 3, 5], [1, 2, 10], [1, -1, 2], [3], []):
        assert whole(expecting(), np.array(bad, np.int64)) is None
    for room, fits in ((total, True), (total + 9, True), (total - 1, False), (0, False)):
        out = np.full(room, 0xAA, np.uint8)
        into = whole(expecting(), wanted, out)
        assert (into is not None) == fits
        assert (out[total if fits else 0 :] == 0xAA).all()
    for length in (1 << 33, (1 << 48) - 1):  # more than there is room for
        publish(shelf.entries.ctypes.data, 3, 7, length)
        assert whole(expecting(), np.array([1, 3, 5]), np.empty(total, np.uint8)) is None
        shelf.entries["seq"][3] += 1


@given(indices=st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_whole_batches_of_separate_arrays(indices: list[int]) -> None:
    shelf = Shelf()
    wanted = np.array(indices, np.int64)
    for turn in range(2):
        found = shelf.view.copy_arrays(wanted)
        if turn == 0 and 3 in indices:
            known = shelf.view.locate(wanted)
            assert isinstance(found, Located)
            assert found.offsets.tolist() == known.offsets.tolist()
            assert found.missing.tolist() == known.missing.tolist()
            assert found.unknown == known.unknown
            publish(shelf.entries.ctypes.data, 3, 3007, 103)
            continue
        assert found is not None and not isinstance(found, Located)
        arrays, size = found
        assert [one.tobytes() for one in arrays] == list(map(shelf.sample, indices))
        assert size == sum(one.nbytes for one in arrays)


def test_no_whole_batch_of_separate_arrays() -> None:
    shelf = Shelf()
    bad: Any
    for bad in (np.array([1, 10]), np.array([-1]), np.array([1], np.int32), np.arange(8)[::2]):
        assert shelf.view.copy_arrays(bad) is None
    publish(shelf.entries.ctypes.data, 3, (1 << 20) - 5, 60)  # reaches outside of the arena
    assert shelf.view.copy_arrays(np.array([2, 3])) is None

    def evicting(offsets: Any) -> Any:
        take_back(shelf.entries, 5, 1, 5007, 105)
        return arrays.separate(offsets)

    assert shelf.view.copy_arrays(np.array([5, 6]), evicting) is None, "evicted after the look-up"

    def growing(offsets: Any) -> Any:
        take_back(shelf.entries, 6, 1, 6007, 106)
        publish(shelf.entries.ctypes.data, 6, 6007, 2000)
        return arrays.separate(offsets)

    assert shelf.view.copy_arrays(np.array([6]), growing) is None, "longer than its array"


def test_lengths_whose_sum_overflowed_gave_offsets_outside_of_the_buffer() -> None:
    """A sum of 2^64 bytes came out as 0: samples behind it were copied to any address."""
    shelf = Shelf()
    publish(shelf.entries.ctypes.data, 3, 7, 1 << 47)
    wanted = np.full((1 << 17) + 1, 3)
    wanted[-1] = 1
    with pytest.raises(ReadError, match="2\\^63 bytes"):
        shelf.view.locate(wanted)
    assert shelf.view.copy_batch(wanted) is None
    assert shelf.view.copy_arrays(wanted) is None
    assert shelf.view.locate(wanted[:1000]).offsets[-1] == 1000 << 47


def test_no_whole_batch() -> None:
    """Batches that cannot be copied in one call return None; other calls tell the reason."""
    shelf = Shelf()
    good = np.array([1, 2])
    indices: Any
    for indices in (
        np.array([2, 10]), np.array([-1]), np.array([3]), np.array([1, 2], np.int32),
        np.array([1.0, 2.0]), np.array([[1, 2]]), np.arange(4)[::2], np.array(1),
        np.zeros(0, np.int64),
    ):  # fmt: skip
        assert whole(shelf.view, indices) is None
        room = np.full(1000, 0xAA, np.uint8)
        assert whole(shelf.view, indices, room) is None
        assert (room == 0xAA).all()
    small = np.full(202, 0xAA, np.uint8)  # one byte short
    assert whole(shelf.view, good, small) is None
    assert (small == 0xAA).all()
    assert whole(MappedView(0, []), good) is None
    shelf.entries["place"][2] = (1 << 20) - 50
    assert whole(shelf.view, good) is None
    with pytest.raises(ReadError):
        shelf.view.gather(good, np.array([0, 101, 203]), np.zeros(1000, np.uint8))


@pytest.fixture(params=[64, 32, 0])
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    """Widths of the vectors that samples are copied by."""
    most: int = request.param
    if lib.ffs_copy_width(most) != most:
        lib.ffs_copy_width(64)
        pytest.skip("the processor has none of that width")
    yield most
    lib.ffs_copy_width(64)


def gathered(sizes: list[int], places: list[int], into: int = 0) -> None:
    """Copy samples of these sizes from these offsets to `into` bytes after a multiple of 64."""
    # Not a byte more than the samples, so that the sanitizer sees an overrun.
    arena = np.random.default_rng(9).integers(
        0, 256, max(p + s for p, s in zip(places, sizes, strict=True)), np.uint8
    )
    entries = directory(len(sizes))
    for k, (place, size) in enumerate(zip(places, sizes, strict=True)):
        publish(entries.ctypes.data, k, place, size)
    view = MappedView(len(arena), [(entries.ctypes.data, 0, len(sizes), arena.ctypes.data)])
    wanted = np.arange(len(sizes))
    offsets, missing, _ = view.locate(wanted)
    assert not len(missing)
    room = np.full(into + 64 + int(offsets[-1]) + 64, 0xAA, np.uint8)
    start = -room.ctypes.data % 64 + into
    buffer = room[start : start + int(offsets[-1])]
    left = view.gather(wanted, offsets, buffer)
    assert left is not None and not len(left)
    expected = [arena[p : p + s] for p, s in zip(places, sizes, strict=True)]
    assert buffer.tobytes() == b"".join(e.tobytes() for e in expected)
    assert (room[:start] == 0xAA).all() and (room[start + len(buffer) :] == 0xAA).all()
    apart = [np.empty(size, np.uint8) for size in sizes]
    dests = np.array([a.ctypes.data for a in apart], np.uint64)
    left = view.gather(wanted, offsets, None, dests)
    assert left is not None and not len(left)
    assert all(a.tobytes() == e.tobytes() for a, e in zip(apart, expected, strict=True))


def test_every_size_is_copied_whole(width: int) -> None:
    """All sizes near each size at which the copy changes its method."""
    sizes = [*range(130), *range(250, 260), *range(960, 1700), *range(4090, 4200)]
    sizes += [k * 4096 + d for k in (2, 3, 25) for d in (-65, -64, -1, 0, 1, 63, 64, 255, 256)]
    places = np.concatenate(([3], 3 + np.cumsum(sizes)[:-1])).tolist()
    gathered(sizes, places)


@given(
    samples=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9000)), min_size=1, max_size=12),
    into=st.integers(0, 63),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_offset_to_any_offset(width: int, samples: list[tuple[int, int]], into: int) -> None:
    gathered([size for _, size in samples], [place for place, _ in samples], into)


def test_the_next_entry_may_be_invalid(width: int) -> None:
    """The next sample is only prefetched, so its entry may have any content."""
    arena, entries = shared(1 << 20), directory(3)
    arena[:] = np.random.default_rng(2).integers(0, 256, len(arena), np.uint8)
    publish(entries.ctypes.data, 0, len(arena) - 8192, 8192)
    view = MappedView(len(arena), [(entries.ctypes.data, 0, 3, arena.ctypes.data)])
    offsets = np.array([0, 8192, 8192, 8192])
    for place, low in [
        ((1 << 48) - 1, 0xFFFFFFFF), (len(arena) - 1, 0xFFFFFFFF), (len(arena), 9), (0, 0)
    ]:  # fmt: skip
        entries["place"][1:], entries["length_low"][1:] = place, low
        buffer = np.zeros(8192, np.uint8)
        left = view.gather(np.arange(3), offsets, buffer)
        assert left is not None and left.tolist() == [1, 2]
        assert (buffer == arena[-8192:]).all()


def test_retract_spares_entries_of_other_slots() -> None:
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
        MappedView(0, [(0, 1, 5, 0)])


@pytest.mark.parametrize("seconds", [0.4, pytest.param(10.0, marks=pytest.mark.soak)])
def test_no_torn_copy_is_accepted(seconds: float) -> None:
    """A process fills four slots with copies of one byte while this one copies samples."""
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
        view = MappedView(len(arena), [(entries.ctypes.data, 0, count, arena.ctypes.data)])
        wanted = np.arange(count)
        offsets = np.arange(count + 1) * size
        accepted = refused = 0
        kinds: set[int] = set()
        until = time.monotonic() + seconds
        while time.monotonic() < until or (
            not (accepted > 1000 and refused > 0 and len(kinds) > 50)
            and time.monotonic() < until + DEADLINE_S
        ):
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


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(0.3, marks=pytest.mark.check), pytest.param(10.0, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("kind", io.probe())
def test_no_sample_is_taken_for_another(kind: io.Kind, seconds: float, tmp_path: Path) -> None:
    """The engine fills four slots with other samples again and again while a thread reads."""
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
        view = MappedView(len(arena), [(entries.ctypes.data, 0, count, arena.ctypes.data)])
        wanted = np.arange(count)
        offsets = np.arange(count + 1) * size
        accepted = 0
        until = time.monotonic() + seconds
        while time.monotonic() < until or (
            accepted <= 500 and time.monotonic() < until + DEADLINE_S
        ):
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
