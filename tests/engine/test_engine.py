"""Every kind of engine reads the same bytes, whatever the extents, the file and the accidents.

One class, run for each kind that works on this machine, over real files: on the disk (direct)
and in /dev/shm (buffered).
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
import select
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from arena import MIB, Arena
from daemon import DEADLINE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ffserve.engine import io
from ffserve.engine.codec import CRC_32, CRC_32C, CRC_NONE, checksum
from ffserve.engine.io import Engine, EngineBatch, open_direct
from ffserve.engine.shm import NOWHERE
from ffserve.engine.slots import ENTRY_DTYPE
from ffserve.errors import UsageError
from ffserve.limits import BOUNCES_KEPT
from ffserve.system.memfd import SharedMemory

CONTENT = np.random.default_rng(7).integers(0, 256, 8 * MIB + 777, np.uint8).tobytes()
PIECE, BOUNCE = 128 * MIB, MIB // 4  # engine/reading/backend.h
LEAST_BOUND = 8192  # engine/reading/uring.c
SIZES = [0, 1, 511, 512, 4095, 4096, 4097, 100 << 10, 3 * MIB]


class Opened:
    """A file with CONTENT (or other bytes) added to an engine."""

    def __init__(self, engine: Engine, path: Path, content: bytes = CONTENT) -> None:
        path.write_bytes(content)
        self.path, self.content = path, content
        self.fd, self.alignment = open_direct(path)
        self.id = engine.add_file(self.fd, self.alignment)


def pieces(
    engine: Engine, file: Opened, extents: Sequence[tuple[int, int]], crc: int = CRC_32
) -> tuple[EngineBatch, list[npt.NDArray[np.uint8]]]:
    """A batch that bounces every extent, as one record, into an array of its own."""
    batch = engine.batch(len(extents), len(extents))
    dests = [np.full(length + 16, 0xA5, np.uint8) for _, length in extents]
    for k, (offset, length) in enumerate(extents):
        batch.reads[k] = (offset, length, NOWHERE, 0, file.id, crc, k, 1)
        expected = checksum(crc, file.content[offset : offset + length])
        batch.records[k] = (offset, length, NOWHERE, dests[k].ctypes.data, expected, 0, 99, 0)
    return batch, dests


def check(file: Opened, batch: EngineBatch, dests: list[npt.NDArray[np.uint8]]) -> None:
    assert batch.done
    assert batch.records["status"].tolist() == [0] * len(dests)
    assert batch.failed == 0
    for record, dest in zip(batch.records, dests, strict=True):
        offset, length = int(record["offset"]), int(record["length"])
        assert dest[:length].tobytes() == file.content[offset : offset + length]
        assert (dest[length:] == 0xA5).all()


def place(batch: EngineBatch, file: Opened, offset: int, length: int, slot: int, size: int) -> None:
    """One read into a slot, one record published as entry 0."""
    batch.reads[0] = (offset, length, slot, size, file.id, CRC_32, 0, 1)
    batch.records[0] = (
        offset,
        length,
        0,
        0,
        zlib.crc32(file.content[offset : offset + length]),
        0,
        0,
        0,
    )


def bounces_size() -> int:
    """Return the bytes of private memory that a child of this process would not have."""
    size = found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            size, private = 0, rest[0] == "rw-p" and len(rest) == 4
        elif first == "Anonymous:" and private:
            size = int(rest[0]) << 10
        elif first == "VmFlags:" and "dc" in rest:
            found += size
    return found


@pytest.fixture(params=io.probe())
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(request.param, depth=16, threads=4) as opened:
        yield opened


@pytest.fixture(params=["disk", "memory"])
def file(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[Opened]:
    path = (
        tmp_path / "file"
        if request.param == "disk"
        else Path(f"/dev/shm/ffserve-test-{os.getpid()}")
    )
    opened = Opened(engine, path)
    if request.param == "memory":
        # tmpfs supports O_DIRECT since Linux 6.6; before, the file is read buffered.
        assert opened.alignment in (1, mmap.PAGESIZE)
    yield opened
    os.close(opened.fd)
    path.unlink()


@pytest.fixture
def disk_file(engine: Engine, tmp_path: Path) -> Iterator[Opened]:
    opened = Opened(engine, tmp_path / "file")
    yield opened
    os.close(opened.fd)


class TestEngine:
    @pytest.mark.check
    @pytest.mark.parametrize("crc", [CRC_NONE, CRC_32, CRC_32C])
    def test_any_size_at_any_offset(self, engine: Engine, file: Opened, crc: int) -> None:
        offsets = [0, 1, 511, 512, 513, 4096, 4 * MIB + 3]
        extents = [(offset, size) for offset in offsets for size in SIZES]
        extents += [(len(CONTENT) - size, size) for size in SIZES]
        batch, dests = pieces(engine, file, extents, crc)
        engine.submit(batch)
        assert engine.wait(batch)
        check(file, batch, dests)
        assert batch.bytes >= sum(size for _, size in extents)

    def test_batch_of_nothing(self, engine: Engine) -> None:
        batch = engine.batch(0, 0)
        engine.submit(batch)
        assert engine.wait(batch)
        assert batch.failed == 0

    @pytest.mark.check
    def test_large_extent_of_a_sparse_file(self, engine: Engine, tmp_path: Path) -> None:
        size = 300 * MIB
        with open(tmp_path / "sparse", "wb") as out:
            out.truncate(size + 1)
            out.seek(size - 1)
            out.write(b"ab")
        fd, alignment = open_direct(tmp_path / "sparse")
        arena = Arena(size + 2 * MIB, 1).serve(engine)
        batch = engine.batch(1, 1)
        batch.reads[0] = (1, size, 4096, size + MIB, engine.add_file(fd, alignment), 0, 0, 1)
        batch.records[0] = (1, size, 0, 0, 0, 0, 0, 0)
        engine.submit(batch)
        engine.wait(batch)
        os.close(fd)
        assert batch.failed == 0
        start = int(arena.view().places(np.array([0]))[0])
        assert arena.bytes[start + size - 2 : start + size].tobytes() == b"ab"
        assert not arena.bytes[start : start + size - 2 : 4093].any()

    def test_batch_is_submitted_again(self, engine: Engine, file: Opened) -> None:
        batch, dests = pieces(engine, file, [(5, 1000), (7, 2000)])
        for _ in range(3):
            engine.submit(batch)
            engine.wait(batch)
            check(file, batch, dests)

    @pytest.mark.check
    def test_more_reads_than_depth_from_many_threads(self, engine: Engine, file: Opened) -> None:
        failures: list[BaseException] = []

        def caller(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(20):
                    extents = [
                        (int(random.integers(0, 4 * MIB)), int(random.integers(0, 20000)))
                        for _ in range(40)
                    ]
                    batch, dests = pieces(engine, file, extents)
                    engine.submit(batch)
                    engine.wait(batch)
                    check(file, batch, dests)
            except BaseException as error:
                failures.append(error)

        callers = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join()
        assert not failures
        counters = engine.counters()
        assert counters["reads"] == 4 * 20 * 40
        assert counters["submits"] == 80
        assert counters["inflight"] == counters["queued"] == 0

    def test_run_of_records_in_a_slot_with_one_damaged(self, engine: Engine, file: Opened) -> None:
        count, length, first = 100, 777, 12345
        arena = Arena(MIB, count).serve(engine)
        batch = engine.batch(1, count)
        batch.reads[0] = (first, count * length, 8192, MIB - 8192, file.id, CRC_32C, 0, count)
        for k in range(count):
            at = first + k * length
            crc = checksum(CRC_32C, CONTENT[at : at + length])
            batch.records[k] = (at, length, k, 0, crc ^ (k == 42), 0, 0, 0)
        engine.submit(batch)
        engine.wait(batch)
        assert batch.failed == 1
        assert batch.records["status"][42] == io.ECHECKSUM
        assert batch.records["found"][42] == batch.records["checksum"][42] ^ 1
        assert engine.counters()["checksum_errors"] == 1
        view = arena.view()
        indices = np.arange(count)
        offsets, missing, unknown = view.locate(indices)
        assert missing.tolist() == [42]
        assert unknown == 1
        buffer = np.zeros(offsets[-1], np.uint8)
        left = view.gather(indices, offsets, buffer, positions=np.delete(indices, 42))
        assert left is not None
        assert left.size == 0
        whole = CONTENT[first : first + count * length]
        assert buffer.tobytes() == whole[: 42 * length] + whole[43 * length :]
        assert (arena.entries["seq"] == 1).sum() == count - 1

    def test_bounced_record_is_published_where_it_was_copied(
        self, engine: Engine, file: Opened
    ) -> None:
        arena = Arena(MIB, 3).serve(engine)
        batch = engine.batch(1, 3)
        batch.reads[0] = (1000, 9000, NOWHERE, 0, file.id, CRC_32, 0, 3)
        parts = [(1000, 3000, 0), (4000, 3000, 100_001), (7000, 3000, 200_000)]
        for k, (at, length, to) in enumerate(parts):
            crc = zlib.crc32(CONTENT[at : at + length]) ^ (k == 1)
            batch.records[k] = (at, length, k, arena.address + to, crc, 0, 0, 0)
        engine.submit(batch)
        engine.wait(batch)
        assert batch.records["status"].tolist() == [0, io.ECHECKSUM, 0]
        assert arena.view().places(np.arange(3)).tolist() == [0, NOWHERE, 200_000]
        for at, length, to in (parts[0], parts[2]):
            assert arena.bytes[to : to + length].tobytes() == CONTENT[at : at + length]
        for outside in (MIB - 2999, MIB, -1, 0x7FFF00000000):
            batch.records["dest"][2] = arena.address + outside
            with pytest.raises(UsageError):
                engine.submit(batch)

    def test_entry_that_is_readable_is_left_alone(self, engine: Engine, file: Opened) -> None:
        arena = Arena(MIB, 1).serve(engine)
        batch = engine.batch(1, 1)
        place(batch, file, 100, 500, 0, 65536)
        engine.submit(batch)
        engine.wait(batch)
        before = arena.entries.copy()
        place(batch, file, 100, 500, 65536, 65536)
        engine.submit(batch)
        engine.wait(batch)
        assert batch.failed == 0
        assert (arena.entries == before).all()

    def test_end_of_file_inside_an_extent(self, engine: Engine, tmp_path: Path) -> None:
        file = Opened(engine, tmp_path / "short", CONTENT[:10001])
        arena = Arena(MIB, 4).serve(engine)
        batch = engine.batch(2, 5)
        batch.reads[0] = (8000, 5000, 0, 65536, file.id, CRC_32, 0, 4)
        batch.reads[1] = (1 << 30, 5000, 65536, 65536, file.id, CRC_32, 4, 1)
        parts = [(8000, 1000), (9000, 1001), (10001, 100), (12000, 0)]
        for k, (offset, length) in enumerate(parts):
            crc = zlib.crc32(file.content[offset : offset + length])
            batch.records[k] = (offset, length, k, 0, crc, 0, 0, 0)
        batch.records[4] = (1 << 30, 5000, NOWHERE, 0, 0, 0, 0, 0)
        engine.submit(batch)
        assert engine.wait(batch, DEADLINE_S)
        end = io.ETRUNCATED
        assert batch.records["status"].tolist() == [0, 0, end, 0, end]
        assert arena.entries["seq"].tolist() == [1, 1, 0, 1]
        os.close(file.fd)

    def test_reads_larger_than_a_buffer_are_made_in_pieces(
        self, engine: Engine, file: Opened
    ) -> None:
        edges = [BOUNCE - 1, BOUNCE, BOUNCE + 1, 2 * BOUNCE, 5 * BOUNCE + 1, 3 * MIB + 5]
        extents = [(offset, size) for size in edges for offset in (0, 1, 4095, 12345)]
        batch, dests = pieces(engine, file, extents)
        batch.records["checksum"][[3, 9]] ^= 1
        for _ in range(2):
            engine.submit(batch)
            assert engine.wait(batch, DEADLINE_S)
            assert np.flatnonzero(batch.records["status"]).tolist() == [3, 9]
            assert batch.records["status"][9] == io.ECHECKSUM
            assert batch.failed == 2
        batch.records["checksum"][[3, 9]] ^= 1
        engine.submit(batch)
        assert engine.wait(batch, DEADLINE_S)
        check(file, batch, dests)
        assert engine.counters()["reads"] > 3 * len(extents)

    def test_records_of_a_read_in_pieces(self, engine: Engine, file: Opened) -> None:
        """In a slot and bounced: complete records, one that crosses pieces, and a damaged one."""
        first, lengths = 1001, [1000, 0, 700_000, 300_000, 5]
        places = first + np.cumsum([0, *lengths[:-1]])
        total = sum(lengths)
        arena = Arena(4 * MIB, 5).serve(engine)
        dests = [np.zeros(length, np.uint8) for length in lengths]
        batch = engine.batch(2, 10)
        batch.reads[0] = (first, total, 512, 2 * MIB, file.id, CRC_32, 0, 5)
        batch.reads[1] = (first, total, NOWHERE, 0, file.id, CRC_32, 5, 5)
        for k, (at, length) in enumerate(zip(places.tolist(), lengths, strict=True)):
            crc = zlib.crc32(CONTENT[at : at + length]) ^ (k == 3)
            batch.records[k] = (at, length, k, 0, crc, 0, 0, 0)
            batch.records[5 + k] = (at, length, NOWHERE, dests[k].ctypes.data, crc, 0, 0, 0)
        engine.submit(batch)
        assert engine.wait(batch, DEADLINE_S)
        assert batch.records["status"].tolist() == 2 * [0, 0, 0, io.ECHECKSUM, 0]
        assert arena.entries["seq"].tolist() == [1, 1, 1, 0, 1]
        for k in (0, 2, 4):
            expected = CONTENT[places[k] : places[k] + lengths[k]]
            assert dests[k].tobytes() == expected
            start = int(arena.view().places(np.array([k]))[0])
            assert arena.bytes[start : start + lengths[k]].tobytes() == expected

    def test_end_of_file_inside_a_read_in_pieces(self, engine: Engine, tmp_path: Path) -> None:
        size = 3 * MIB + 777
        file = Opened(engine, tmp_path / "short", CONTENT[:size])
        extents = [(5, size - 5), (5, size - 4), (9, size + MIB), (size + 1, MIB), (7, 2 * MIB)]
        batch, dests = pieces(engine, file, extents)
        engine.submit(batch)
        assert engine.wait(batch, DEADLINE_S)
        end = io.ETRUNCATED
        assert batch.records["status"].tolist() == [0, end, end, end, 0]
        assert batch.failed == 3
        assert dests[0][: size - 5].tobytes() == CONTENT[5:size]
        os.close(file.fd)

    def test_close_amid_a_read_in_pieces(self, engine: Engine, file: Opened) -> None:
        with Engine(engine.kind, depth=2, threads=2) as own:
            mine = Opened(own, file.path, file.content)
            batch, dests = pieces(own, mine, [(1, 6 * MIB), (3, 7 * MIB), (5, 100)])
            own.submit(batch)
            own.close()
            assert batch.done
            for record, dest in zip(batch.records, dests, strict=True):
                at, length = int(record["offset"]), int(record["length"])
                assert record["status"] in (0, -125)  # ECANCELED
                if record["status"] == 0:
                    assert dest[:length].tobytes() == CONTENT[at : at + length]
            assert batch.failed == np.count_nonzero(batch.records["status"])
            os.close(mine.fd)

    def test_file_is_cut_while_it_is_read(self, engine: Engine, file: Opened) -> None:
        batches = [pieces(engine, file, [(k * 20000, 20000) for k in range(400)]) for _ in range(5)]
        for batch, _ in batches[:-1]:
            engine.submit(batch)
        os.truncate(file.path, 3 * MIB + 5)
        engine.submit(batches[-1][0])  # the others may be over
        seen = set()
        for batch, dests in batches:
            assert engine.wait(batch, DEADLINE_S)
            for record, dest in zip(batch.records, dests, strict=True):
                seen.add(int(record["status"]))
                if record["status"] == 0:
                    at = int(record["offset"])
                    assert dest[:20000].tobytes() == CONTENT[at : at + 20000]
        # A buffered read may see the zeros of a page that is being cut; the checksum then differs.
        assert seen <= {0, io.ETRUNCATED, io.ECHECKSUM}
        assert io.ETRUNCATED in seen

    def test_descriptor_that_cannot_be_read(self, engine: Engine, tmp_path: Path) -> None:
        fd = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
        directory = os.open(tmp_path, os.O_RDONLY)
        batch = engine.batch(2, 3)
        room = np.zeros(100, np.uint8)
        for k, opened in enumerate((fd, directory)):
            batch.reads[k] = (0, 100, NOWHERE, 0, engine.add_file(opened, 1), 0, k, 1 + k)
        for k in range(3):
            batch.records[k] = (0, 100, NOWHERE, room.ctypes.data, 0, 0, 0, 0)
        engine.submit(batch)
        assert engine.wait(batch, DEADLINE_S)
        assert batch.failed == 3
        assert batch.records["status"][0] == -9  # EBADF
        assert set(batch.records["status"][1:].tolist()) <= {-21, -22}  # EISDIR, EINVAL
        assert engine.counters()["errors"] == 2
        os.close(fd)
        os.close(directory)

    def test_file_id_is_used_again(self, engine: Engine, tmp_path: Path) -> None:
        for k in range(5):
            file = Opened(engine, tmp_path / f"file{k}", CONTENT[k * 1000 : k * 1000 + 5000])
            assert file.id == 0
            batch, dests = pieces(engine, file, [(10, 4000)])
            engine.submit(batch)
            engine.wait(batch)
            check(file, batch, dests)
            engine.remove_file(file.id)
            os.close(file.fd)

    def test_removed_file_is_not_held_open(self, engine: Engine, disk_file: Opened) -> None:
        batch, _ = pieces(engine, disk_file, [(0, 100)])
        engine.submit(batch)
        engine.wait(batch)
        readable, writable = os.pipe()
        pipe = engine.add_file(readable, 1)
        room = np.zeros(8, np.uint8)
        piped = engine.batch(1, 1)
        piped.reads[0] = (0, 8, NOWHERE, 0, pipe, 0, 0, 1)
        piped.records[0] = (0, 8, NOWHERE, room.ctypes.data, 0, 0, 0, 0)
        os.write(writable, b"12345678")
        engine.submit(piped)
        engine.wait(piped, DEADLINE_S)
        engine.remove_file(pipe)
        os.close(readable)
        # A write fails when the reading end is closed.
        until = time.monotonic() + DEADLINE_S
        with pytest.raises(BrokenPipeError):
            while time.monotonic() < until:
                os.write(writable, b"x")
                time.sleep(0.001)
        os.close(writable)

    @pytest.mark.check
    @pytest.mark.parametrize(
        "change",
        [
            {"reads": ("file", 5)},
            {"reads": ("file", -1)},
            {"reads": ("checksum_kind", 9)},
            {"reads": ("record_count", 2)},
            {"reads": ("first_record", 1)},
            {"reads": ("first_record", 2**32 - 1)},
            {"reads": ("offset", 2**63)},
            {"reads": ("length", 2**63)},
            {"reads": ("slot", 2**63)},
            {"reads": ("slot", MIB - 512)},
            {"reads": ("slot_size", 2**63)},
            {"reads": ("slot_size", 999)},
            {"reads": ("slot", NOWHERE)},
            {"records": ("offset", 99)},
            {"records": ("offset", 101)},
            {"records": ("length", 1001)},
            {"records": ("length", 2**64 - 50)},
            {"records": ("entry", 1)},
        ],
    )
    def test_a_batch_that_does_not_fit_is_refused(
        self, engine: Engine, disk_file: Opened, change: dict[str, tuple[str, int]]
    ) -> None:
        arena = Arena(MIB, 1).serve(engine)
        batch = engine.batch(1, 1)
        place(batch, disk_file, 100, 1000, 0, 16384)
        for array, (field, value) in change.items():
            getattr(batch, array)[field] = value
        with pytest.raises(UsageError):
            engine.submit(batch)
        assert not batch.in_flight
        place(batch, disk_file, 100, 1000, 0, 16384)
        engine.submit(batch)
        engine.wait(batch)
        assert batch.failed == 0
        assert arena.entries["seq"].tolist() == [1]

    def test_the_descriptor_reports_ended_batches(self, engine: Engine, file: Opened) -> None:
        fd = engine.fileno()
        assert engine.completed() == []
        waiting = {}
        for k in range(30):
            batch, dests = pieces(engine, file, [(k * 1000, 5000)] * 5)
            waiting[batch] = dests
            engine.submit(batch)
        while waiting:
            assert select.select([fd], [], [], 10)[0]
            for batch in engine.completed():
                check(file, batch, waiting.pop(batch))
        assert select.select([fd], [], [], 0)[0] == []
        assert engine.completed() == []

    def test_a_batch_that_was_waited_for_is_not_reported_again(
        self, engine: Engine, file: Opened
    ) -> None:
        engine.fileno()
        filled = [pieces(engine, file, [(k, 100)]) for k in range(5)]
        batches = [batch for batch, _ in filled]
        for batch in batches:
            engine.submit(batch)
        assert engine.wait(batches[3])
        told: list[EngineBatch] = []
        until = time.monotonic() + DEADLINE_S
        while len(told) < 4 and time.monotonic() < until:
            told += engine.completed()
        assert set(map(id, told)) == {id(batches[k]) for k in (0, 1, 2, 4)}

    def test_close_with_work_in_flight(self, engine: Engine, disk_file: Opened) -> None:
        batches = [pieces(engine, disk_file, [(k, 100000)] * 64) for k in range(30)]
        for batch, _ in batches:
            engine.submit(batch)
        engine.close()
        engine.close()
        for batch, dests in batches:
            assert batch.done
            assert batch.failed == np.count_nonzero(batch.records["status"])
            for record, dest in zip(batch.records, dests, strict=True):
                assert record["status"] in (0, -125)  # ECANCELED
                if record["status"] == 0:
                    at = int(record["offset"])
                    assert dest[:100000].tobytes() == CONTENT[at : at + 100000]
        with pytest.raises(UsageError):
            engine.submit(batches[0][0])

    def test_close_while_another_thread_waits(self, engine: Engine, disk_file: Opened) -> None:
        batch, _ = pieces(engine, disk_file, [(0, 3 * MIB)] * 100)
        engine.submit(batch)
        ended: list[bool] = []

        def wait() -> None:
            try:
                ended.append(engine.wait(batch, DEADLINE_S))
            except UsageError:  # on a busy machine it may come too late
                ended.append(batch.done)

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.02)
        engine.close()
        waiter.join(DEADLINE_S)
        assert ended == [True]

    @pytest.mark.check
    def test_everything_dropped_in_flight(self, engine: Engine, disk_file: Opened) -> None:
        own = Engine(engine.kind, depth=8, threads=2)
        other = own.add_file(disk_file.fd, disk_file.alignment)
        kept = []
        for k in range(10):
            batch, dests = pieces(own, disk_file, [(k, 50000)] * 20)
            batch.reads["file"] = other
            own.submit(batch)
            kept.append(dests)
            del batch
        del own
        gc.collect()

    @pytest.mark.check
    def test_arrays_outlive_their_batch(self, engine: Engine, disk_file: Opened) -> None:
        batch, _ = pieces(engine, disk_file, [(0, 10)])
        engine.submit(batch)
        engine.wait(batch)
        records = batch.records
        batch.free()
        batch.free()
        del batch
        gc.collect()
        assert records["status"].tolist() == [0]

    def test_child_after_fork_opens_its_own(self, engine: Engine, disk_file: Opened) -> None:
        batch, dests = pieces(engine, disk_file, [(0, 100000)] * 200)
        engine.submit(batch)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with pytest.raises(UsageError):
                    engine.submit(batch)
                kind = engine.kind
                engine.forget()
                with Engine(kind, depth=8, threads=2) as own:
                    mine = own.add_file(disk_file.fd, disk_file.alignment)
                    again, copies = pieces(own, disk_file, [(9, 5000)] * 20)
                    again.reads["file"] = mine
                    own.submit(again)
                    assert own.wait(again, DEADLINE_S)
                    check(disk_file, again, copies)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert engine.wait(batch, DEADLINE_S)
        check(disk_file, batch, dests)
        with pytest.raises(UsageError):
            engine.forget()

    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(data=st.data())
    def test_any_records_in_any_extent(
        self, engine: Engine, disk_file: Opened, data: st.DataObject
    ) -> None:
        offset = data.draw(st.integers(0, len(CONTENT) - 1))
        length = data.draw(st.integers(0, min(600_000, len(CONTENT) - offset)))
        cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=20)))
        edges = [0, *cuts, length]
        batch = engine.batch(1, len(edges) - 1)
        dests = [np.zeros(b - a + 1, np.uint8) for a, b in itertools.pairwise(edges)]
        batch.reads[0] = (offset, length, NOWHERE, 0, disk_file.id, 1, 0, len(dests))
        for k, dest in enumerate(dests):
            at, size = offset + edges[k], edges[k + 1] - edges[k]
            crc = zlib.crc32(CONTENT[at : at + size])
            batch.records[k] = (at, size, NOWHERE, dest.ctypes.data, crc, 0, 0, 0)
        engine.submit(batch)
        engine.wait(batch)
        assert batch.failed == 0
        assert b"".join(d[:-1].tobytes() for d in dests) == CONTENT[offset : offset + length]


@pytest.mark.skipif("uring" not in io.probe(), reason="only a ring reads from a pipe")
class TestReadAround:
    """Reads through the page cache that bring whole blocks around a small record."""

    AROUND = 32 << 10

    @pytest.mark.parametrize("size", [1, 4096, 32767, 32768, 300_000])
    def test_smaller_records_bring_their_blocks(
        self, engine: Engine, tmp_path: Path, size: int
    ) -> None:
        file = Opened(engine, tmp_path / "content")
        os.close(file.fd)
        with file.path.open("rb") as opened:
            file.id = engine.add_file(opened.fileno(), 1, self.AROUND)
            starts = [0, self.AROUND - 1, 5 * self.AROUND + 777, len(CONTENT) - size]
            for start in starts:
                batch, dests = pieces(engine, file, [(start, size)])
                before = engine.counters()["bytes"]
                engine.submit(batch)
                assert engine.wait(batch, DEADLINE_S)
                check(file, batch, dests)
                first, end = start, start + size
                if size < self.AROUND:
                    first -= start % self.AROUND
                    end = min(end + -end % self.AROUND, len(CONTENT))
                assert engine.counters()["bytes"] - before == end - first

    def test_what_lies_around_cannot_be_read(self, engine: Engine) -> None:
        """Memory of this process with a gap in front of the record stands for a damaged disk."""
        if engine.kind == "aio":
            pytest.skip("the kernel's AIO does not read /proc/self/mem")
        room = mmap.mmap(-1, 4 * self.AROUND, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(room, np.uint8).ctypes.data
        block = address + self.AROUND - address % self.AROUND
        record = block + self.AROUND // 2
        room[record - address : record - address + 4096] = CONTENT[:4096]
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        assert libc.munmap(block, 4096) == 0
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            with pytest.raises(OSError, match="Input/output error"):
                os.pread(memory, 4096, block)
            batch = engine.batch(2, 2)
            dest = np.zeros((2, 4096), np.uint8)
            id_ = engine.add_file(memory, 1, self.AROUND)
            for k, start in enumerate((record, block)):
                batch.reads[k] = (start, 4096, NOWHERE, 0, id_, CRC_NONE, k, 1)
                batch.records[k] = (start, 4096, NOWHERE, dest[k].ctypes.data, 0, 0, 0, 0)
            engine.submit(batch)
            assert engine.wait(batch, DEADLINE_S)
        finally:
            os.close(memory)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED, so that room is whole
            assert libc.mmap(block, 4096, mmap.PROT_READ, flags, -1, 0) == block
        assert batch.records["status"].tolist() == [0, -errno.EIO]
        assert dest[0].tobytes() == CONTENT[:4096]

    def test_only_blocks_of_a_buffered_file(self, engine: Engine, tmp_path: Path) -> None:
        file = Opened(engine, tmp_path / "content")
        for alignment, around in ((1, 3), (1, MIB), (512, 4096)):
            with pytest.raises(UsageError, match="cannot add the file"):
                engine.add_file(file.fd, alignment, around)
        os.close(file.fd)


class TestReadsThatHang:
    """A pipe without data stands for a disk that does not respond."""

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with Engine("uring", depth=16) as opened:
            yield opened

    def test_wait_gives_up_in_time(self, engine: Engine) -> None:
        readable, writable = os.pipe()
        room = np.zeros(1, np.uint8)
        batch = engine.batch(1, 1)
        batch.reads[0] = (0, 1, NOWHERE, 0, engine.add_file(readable, 1), 0, 0, 1)
        batch.records[0] = (0, 1, NOWHERE, room.ctypes.data, 0, 0, 0, 0)
        engine.submit(batch)
        assert not engine.wait(batch, 0)
        assert not engine.wait(batch, 0.05)
        assert batch.in_flight
        with pytest.raises(UsageError):
            engine.submit(batch)
        with pytest.raises(UsageError):
            batch.free()
        os.write(writable, b"!")
        assert engine.wait(batch, DEADLINE_S)
        assert room.tobytes() == b"!"
        batch.free()
        os.close(readable)
        os.close(writable)

    def test_new_work_is_issued_while_older_reads_hang(
        self, engine: Engine, disk_file: Opened
    ) -> None:
        readable, writable = os.pipe()
        room = np.zeros(1, np.uint8)
        hanging = engine.batch(1, 1)
        hanging.reads[0] = (0, 1, NOWHERE, 0, engine.add_file(readable, 1), 0, 0, 1)
        hanging.records[0] = (0, 1, NOWHERE, room.ctypes.data, 0, 0, 0, 0)
        engine.submit(hanging)
        for _ in range(20):
            batch, dests = pieces(engine, disk_file, [(3, 5000)] * 40)
            engine.submit(batch)
            assert engine.wait(batch, DEADLINE_S)
            check(disk_file, batch, dests)
        assert not hanging.done
        os.write(writable, b"!")
        assert engine.wait(hanging, DEADLINE_S)
        os.close(readable)
        os.close(writable)


@pytest.mark.skipif("registered" not in io.probe(), reason="nothing can be registered")
class TestRegisteredMemory:
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with Engine("registered", depth=16) as opened:
            yield opened

    @staticmethod
    def await_registered(engine: Engine, size: int) -> None:
        """Wait until `size` bytes of the arena are registered, beside a part of one bounce buffer.

        While the arena shrinks the counter passes through other values, hence several looks.
        """
        deadline, seen = time.monotonic() + DEADLINE_S, 0
        while seen < 30:
            seen = seen + 1 if engine.counters()["registered"] == size + LEAST_BOUND else 0
            assert time.monotonic() < deadline, engine.counters()
            time.sleep(0.001)

    def test_reads_into_the_arena_are_fixed(self, engine: Engine, disk_file: Opened) -> None:
        arena = Arena(4 * MIB, 1).serve(engine)
        self.await_registered(engine, 4 * MIB)
        batch = engine.batch(1, 1)
        place(batch, disk_file, 1000, 100_000, MIB, MIB)
        engine.submit(batch)
        engine.wait(batch)
        assert batch.failed == 0
        assert engine.counters()["fixed"] == 1
        start = int(arena.view().places(np.array([0]))[0])
        assert arena.bytes[start : start + 100_000].tobytes() == CONTENT[1000:101_000]

    def test_slot_over_two_pieces_is_read_plainly(self, engine: Engine, disk_file: Opened) -> None:
        arena = Arena(PIECE + 4 * MIB, 2).serve(engine)
        self.await_registered(engine, PIECE + 4 * MIB)
        size = MIB // 8
        for slot, fixed in ((PIECE - size // 2, 0), (PIECE, 1)):
            batch = engine.batch(1, 1)
            place(batch, disk_file, 1000, size, slot, 2 * size)
            engine.submit(batch)
            engine.wait(batch)
            assert batch.failed == 0
            assert engine.counters()["fixed"] == fixed
            start = slot + 1000 % disk_file.alignment
            found = arena.bytes[start : start + size].tobytes()
            assert found == CONTENT[1000 : 1000 + size]

    def test_pages_that_were_replaced_are_not_written_to(
        self, engine: Engine, disk_file: Opened
    ) -> None:
        """The pages that were pinned were not those that are mapped."""
        memory = SharedMemory("test-arena", 4 * MIB)
        entries = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), ENTRY_DTYPE)
        engine.set_arena(memory.address, memory.size, entries.ctypes.data, 1)
        for _ in range(50):
            engine.arena_ready(0)
            memory.discard(0, memory.size)
            engine.arena_ready(memory.size)
            batch = engine.batch(1, 1)
            place(batch, disk_file, 0, 100_000, 0, MIB)
            batch.records["entry"] = NOWHERE
            engine.submit(batch)
            engine.wait(batch)
            assert batch.failed == 0  # the checksum is taken of what is mapped
            assert memory.array[:100_000].tobytes() == CONTENT[:100_000]
        self.await_registered(engine, memory.size)
        engine.arena_ready(0)
        self.await_registered(engine, 0)
        engine.close()
        memory.close()

    def test_an_arena_that_grows_and_shrinks_stays_registered_to_its_end(
        self, engine: Engine, disk_file: Opened
    ) -> None:
        arena = Arena(2 * PIECE, 1).serve(engine)
        for end in (4 * MIB, 6 * MIB, PIECE + MIB, PIECE + 3 * MIB, 2 * PIECE, PIECE, 5 * MIB):
            engine.arena_ready(end - MIB, end)
            engine.arena_ready(end, end)
            self.await_registered(engine, end)
            beyond = [(end, 0)] if end < 2 * PIECE else []
            for slot, fixed in ((end - MIB, 1), *beyond):
                before = engine.counters()["fixed"]
                batch = engine.batch(1, 1)
                place(batch, disk_file, 1000, 100_000, slot, MIB)
                engine.submit(batch)
                engine.wait(batch)
                assert batch.failed == 0
                assert engine.counters()["fixed"] == before + fixed
                start = slot + 1000 % disk_file.alignment
                assert arena.bytes[start : start + 100_000].tobytes() == CONTENT[1000:101_000]

    def test_small_reads_looked_up_their_pages_each_time(
        self, engine: Engine, disk_file: Opened
    ) -> None:
        batch, dests = pieces(engine, disk_file, [(k * 100, 5000) for k in range(200)])
        engine.submit(batch)
        engine.wait(batch)
        check(disk_file, batch, dests)
        small = engine.counters()
        assert small["fixed"] == 200
        batch, dests = pieces(engine, disk_file, [(k * 100, 100_000) for k in range(200)])
        engine.submit(batch)
        engine.wait(batch)
        check(disk_file, batch, dests)
        large = engine.counters()
        assert large["fixed"] - small["fixed"] == 200
        # Twice what a read takes at most, for twice as many reads as are in flight at most.
        assert LEAST_BOUND <= small["registered"] <= 32 * LEAST_BOUND
        assert small["registered"] < large["registered"] <= 32 * BOUNCE // 2


@pytest.mark.parametrize("kind", io.probe())
def test_buffers_that_every_engine_kept_were_in_no_limit(kind: io.Kind, tmp_path: Path) -> None:
    """Each engine kept 64 MiB for reads, as long as it lived."""
    others = bounces_size()
    engines = [Engine(kind, depth=128, threads=128) for _ in range(2)]
    files = [Opened(engine, tmp_path / str(k)) for k, engine in enumerate(engines)]
    for _ in range(2):
        for engine, file in zip(engines, files, strict=True):
            batch, dests = pieces(engine, file, [(k << 12, BOUNCE) for k in range(200)])
            engine.submit(batch)
            engine.wait(batch)
            check(file, batch, dests)
    assert bounces_size() - others > 4 * BOUNCE
    assert bounces_size() <= BOUNCES_KEPT + 4 * BOUNCE
    for engine, file in zip(engines, files, strict=True):
        engine.close()
        os.close(file.fd)
    assert bounces_size() <= others


class TestChoice:
    def test_auto_chooses_the_first_that_works(self) -> None:
        with Engine() as engine:
            assert engine.kind == io.probe()[0]

    def test_auto_stops_at_the_first_that_works(self) -> None:
        io._trial.cache_clear()
        with Engine() as engine:
            assert io._trial.cache_info().currsize == 1 + list(io.KINDS).index(engine.kind)

    def test_threads_always_work(self) -> None:
        assert io.probe()[-1] == "threads"

    def test_description_names_every_kind(self) -> None:
        assert all(kind in io.describe() for kind in io.KINDS)
        assert "\n" not in io.describe()

    def test_unknown_kind(self) -> None:
        with pytest.raises(UsageError, match="floppy"):
            Engine("floppy")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("refused", "left"),
        [
            (["io_uring_setup"], ["aio", "threads"]),
            (["io_uring_register"], ["uring", "aio", "threads"]),
            (["io_setup"], ["registered", "uring", "threads"]),
            (["io_uring_setup", "io_setup"], ["threads"]),
        ],
    )
    def test_kinds_that_the_kernel_refuses(self, refused: list[str], left: list[str]) -> None:
        if any(kind not in io.probe() for kind in io.KINDS):
            pytest.skip("the kernel refuses some kinds as it is")
        numbers = SYSTEM_CALLS[os.uname().machine]
        calls = ",".join(str(numbers[name]) for name in refused)
        ran = subprocess.run(
            [sys.executable, "-c", UNDER_SECCOMP, calls, *left],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr

    @pytest.mark.parametrize(
        ("limit", "best"), [(0, "aio"), (MIB // 8, "uring"), (MIB, "registered")]
    )
    def test_memory_that_may_not_be_locked(self, limit: int, best: str) -> None:
        if "registered" not in io.probe():
            pytest.skip("the kernel takes no registered buffers as it is")
        ran = subprocess.run(
            [sys.executable, "-c", UNDER_MEMLOCK, str(limit), best],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr


SYSTEM_CALLS = {
    "x86_64": {"io_uring_setup": 425, "io_uring_register": 427, "io_setup": 206},
    "aarch64": {"io_uring_setup": 425, "io_uring_register": 427, "io_setup": 0},
}
UNDER_MEMLOCK = """
import ctypes, os, resource, sys, time
limit, best = int(sys.argv[1]), sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # capability.h, version 3
held = (ctypes.c_uint32 * 6)()
assert libc.capget(header, held) == 0
held[0] &= ~(1 << 14)  # CAP_IPC_LOCK, effective and permitted
held[1] &= ~(1 << 14)
assert libc.capset(header, held) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))

import mmap
import tempfile
import numpy as np
from ffserve.engine import io
from ffserve.engine.io import open_direct
from ffserve.engine.shm import MappedView
from ffserve.engine.slots import ENTRY_DTYPE

assert io.probe()[0] == best, io.describe()
if best != "registered":
    assert "too little memory may be locked" in io.describe(), io.describe()
arena = np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8)
entries = np.frombuffer(mmap.mmap(-1, 4096), ENTRY_DTYPE)[:1]
content = os.urandom(200_000)
with io.Engine() as engine, tempfile.TemporaryFile() as file:
    file.write(content)
    file.flush()
    engine.set_arena(arena.ctypes.data, len(arena), entries.ctypes.data, 1)
    engine.arena_ready(len(arena))
    fd, alignment = open_direct(file.fileno())
    batch = engine.batch(1, 1)
    batch.reads[0] = (0, len(content), 0, 1 << 20, engine.add_file(fd, alignment), 0, 0, 1)
    batch.records[0] = (0, len(content), 0, 0, 0, 0, 0, 0)
    engine.submit(batch)
    engine.wait(batch)
    assert batch.failed == 0
    assert arena[: len(content)].tobytes() == content
    counters = engine.counters()
    assert counters["fixed"] == 0 and counters["registered"] <= limit, counters
"""
UNDER_SECCOMP = """
import ctypes, struct, sys
refused, left = [int(n) for n in sys.argv[1].split(",")], sys.argv[2:]
# Classic BPF over seccomp_data: load the call's number, EPERM for those named, else allow.
steps = [struct.pack("HBBI", 0x20, 0, 0, 0)]
for number in refused:
    steps += [struct.pack("HBBI", 0x15, 0, 1, number), struct.pack("HBBI", 6, 0, 0, 0x50001)]
steps.append(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(steps))
program = ctypes.create_string_buffer(
    struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0  # PR_SET_SECCOMP

from ffserve.engine import io
from ffserve.errors import ReadError

assert io.probe() == left, io.describe()
with io.Engine() as engine:
    assert engine.kind == left[0]
for kind in io.KINDS:
    if kind not in left:
        assert "not permitted" in io.describe(), io.describe()
        try:
            io.Engine(kind)
        except ReadError as error:
            assert kind in str(error)
        else:
            raise AssertionError(kind)
"""


class TestOpenDirect:
    def test_on_a_disk(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"x" * 10000)
        fd, alignment = open_direct(tmp_path / "file")
        assert alignment & (alignment - 1) == 0
        assert not os.get_inheritable(fd)
        os.close(fd)

    def test_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        fd, _ = open_direct(tmp_path / "file")
        os.close(fd)

    def test_descriptor_keeps_its_own_flags(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"x" * 10000)
        with open(tmp_path / "file", "rb") as given:
            fd, _ = open_direct(given.fileno())
            assert given.read() == b"x" * 10000
            assert fd != given.fileno()
            os.close(fd)

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            open_direct(tmp_path / "file")

    def test_directory(self, tmp_path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises((UsageError, IsADirectoryError)):
            open_direct(tmp_path)
        assert len(os.listdir("/proc/self/fd")) <= before
