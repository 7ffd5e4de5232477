"""Loads read by a real engine, without a daemon."""

from __future__ import annotations

import asyncio
import mmap
import os
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from arena import descriptors
from daemon import until

import ffserve
from ffserve.cache.arena import Arena
from ffserve.cache.cache import Cache, Fetch, Load
from ffserve.cache.tables import Directory, ShardTable
from ffserve.disk.shardfile import open_shard
from ffserve.dtypes import Int64s
from ffserve.engine import io
from ffserve.engine.shm import MappedView
from ffserve.errors import Failure
from ffserve.formats.base import ChunkedShard
from ffserve.server.reading.engines import Engines
from ffserve.system.memfd import SharedMemory

COUNT, SIZE, GOOD_PAGES = 60, 3000, 20
STEP = 10
MIB = 1 << 20


class Events:
    """What the engines report; each report stops the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.failures: list[dict[int, Failure]] = []
        self.breaks = 0

    def ended(self, loads: list[Load], now: float) -> None:
        self.failures += [load.failures for load in loads]
        if loads:
            self._loop.stop()

    def broken(self) -> None:
        self.breaks += 1
        self._loop.stop()

    def slow_disk(self, device: str, seconds: float, now: float) -> None:
        raise AssertionError

    def slow_read(self, numbers: Int64s, seconds: float, now: float) -> None:
        pass

    def corrected(self, numbers: Int64s, now: float) -> None:
        raise AssertionError


class Reading:
    """An arena with its tables and an engine that reads COUNT samples of one file."""

    def __init__(self, kind: io.Kind) -> None:
        self.arena = Arena(4 * MIB)
        self.memory = SharedMemory("test-arena", self.arena.size)
        self.directory = Directory(1 << 22)
        self.table = ShardTable(self.directory)
        self.cache = Cache(self.arena, self.directory, self.table, lambda *_: None)
        self.loop = asyncio.new_event_loop()
        self.events = Events(self.loop)
        self.engines = Engines(
            kind, 16, self.memory, self.arena, self.directory, self.table, self.events
        )
        self.base = self.directory.reserve(COUNT)
        self.run = slice(self.base, self.base + COUNT)

    def add(
        self, fd: int, checksum_kind: int, size: int, shard: ChunkedShard | None = None
    ) -> None:
        """Serve a file whose offsets, lengths and checksums are in the directory."""
        one, none = np.array([1], np.int64), np.array([-1], np.int32)
        engine, (file,) = self.engines.add_files(0, np.array([fd], np.int32), one, none)
        self.table.add(
            self.base,
            COUNT,
            payload_size=size,
            alignment=1,
            checksum_kind=checksum_kind,
            file=file,
            engine=engine,
            chunked=shard,
        )
        self.engines.attach(self.loop)

    def submit(self, first: int, end: int) -> Load:
        """Read the samples [first, end) of the file."""
        load = self.cache.advance(
            Fetch(np.arange(self.base + first, self.base + end)), COUNT, 1 << 30
        )
        assert load is not None
        self.engines.submit(load)
        return load

    def close(self) -> None:
        """End the engine."""
        self.engines.close()
        self.loop.close()


@pytest.mark.parametrize("kind", [kind for kind in io.probe() if kind != "aio"])
def test_an_unreadable_block_does_not_fail_its_neighbours(kind: io.Kind) -> None:
    """The file is /proc/self/mem with a part missing, whose read is an I/O error. (Linux AIO cannot
    read files of /proc.)"""
    held = os.memfd_create("test-file", os.MFD_CLOEXEC)
    os.ftruncate(held, -(-COUNT * SIZE // mmap.PAGESIZE) * mmap.PAGESIZE)
    pages = np.frombuffer(mmap.mmap(held, 0), np.uint8)
    pages[:] = np.random.default_rng(2).integers(0, 256, len(pages), np.uint8)
    content = pages.tobytes()
    start = pages.ctypes.data
    lost = GOOD_PAGES * mmap.PAGESIZE
    os.ftruncate(held, lost)

    reading = Reading(kind)
    base, directory = reading.base, reading.directory
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    places = range(0, COUNT * SIZE, SIZE)
    directory.offsets[reading.run] = [start + at for at in places]
    directory.set_lengths(base, np.full(COUNT, SIZE, np.uint64))
    directory.checksums[reading.run] = [zlib.crc32(content[at : at + SIZE]) for at in places]
    reading.add(fd, 1, COUNT * SIZE)
    assert len(reading.submit(0, COUNT).slots) == COUNT
    reading.loop.run_forever()

    bad = {base + k for k, at in enumerate(places) if at + SIZE > lost}
    assert [set(failures) for failures in reading.events.failures] == [bad]
    assert all(-200 < failure.status < 0 for failure in reading.events.failures[0].values())
    entries = directory.entries_memory.address
    view = MappedView(reading.arena.size, [(entries, 0, COUNT, reading.memory.address)])
    offsets, missing, _ = view.locate(np.arange(COUNT))
    assert {base + k for k in missing.tolist()} == bad
    buffer = np.zeros(int(offsets[-1]), np.uint8)
    good = np.delete(np.arange(COUNT), missing)
    left = view.gather(np.arange(COUNT), offsets, buffer, positions=good)
    assert left is not None and not len(left)
    for k in good.tolist():
        assert buffer[k * SIZE : (k + 1) * SIZE].tobytes() == content[k * SIZE : (k + 1) * SIZE]
    reading.close()
    os.close(fd)
    os.close(held)


def _waits(thread: str) -> bool:
    stat = Path(f"/proc/self/task/{thread}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


@pytest.mark.skipif("uring" not in io.probe(), reason="no io_uring")
def test_chunks_submitted_to_a_broken_engine_raised_in_the_scheduler(tmp_path: Path) -> None:
    """Other reads report a broken engine by `ReadEvents.broken`, so that the daemon ends."""
    path = str(tmp_path / "x.recordio")
    with ffserve.create(path, max_chunk_size=SIZE) as writer:
        for k in range(COUNT):
            writer.write(bytes([k]) * (SIZE - 100))
    fd = os.open(path, os.O_RDONLY)
    shard = open_shard(fd, path)
    assert isinstance(shard, ChunkedShard) and len(shard.chunks) > 2
    before, threads = descriptors("[eventfd]"), set(os.listdir("/proc/self/task"))
    reading = Reading("uring")
    own = descriptors("[eventfd]") - before
    directory, lengths = reading.directory, np.empty(COUNT, np.uint64)
    shard.load(directory.offsets[reading.run], lengths, directory.checksums[reading.run])
    directory.set_lengths(reading.base, lengths)
    reading.add(fd, 0, int(shard.chunks.sizes.sum()), shard)
    [wakes] = own - {reading.engines._devices.all[0].engine.fileno()}
    # A thread that does not wait yet is not woken, and would read the batch.
    new = set(os.listdir("/proc/self/task")) - threads
    until(lambda: all(map(_waits, new)), "the I/O thread waits")
    # Writing to it fails from now on. Only closed, its number could be given to another file.
    unwritable = os.open(os.devnull, os.O_RDONLY)
    os.dup2(unwritable, wakes)
    os.close(unwritable)
    for first in (0, COUNT // 2):
        reading.events.breaks = 0
        reading.submit(first, first + COUNT // 2)
        if not reading.events.breaks:
            reading.loop.run_forever()
        assert reading.events.breaks and reading.engines.broken
    reading.close()
    os.close(fd)


def test_chunks_that_were_decoded_when_the_daemon_ended_were_an_internal_error(
    tmp_path: Path,
) -> None:
    """Others, which waited for a thread, were handed to threads that had ended."""
    path = str(tmp_path / "x.recordio")
    with ffserve.create(path, max_chunk_size=SIZE) as writer:
        for k in range(COUNT):
            writer.write(bytes([k]) * (SIZE - 100))
    fd = os.open(path, os.O_RDONLY)
    shard = open_shard(fd, path)
    assert isinstance(shard, ChunkedShard)
    reading = Reading("threads")
    directory, lengths = reading.directory, np.empty(COUNT, np.uint64)
    shard.load(directory.offsets[reading.run], lengths, directory.checksums[reading.run])
    directory.set_lengths(reading.base, lengths)
    reading.add(fd, 0, int(shard.chunks.sizes.sum()), shard)
    for first in range(0, COUNT, STEP):
        reading.submit(first, first + STEP)
    loader, raised = reading.engines._chunks, list[object]()
    reading.loop.set_exception_handler(lambda _, what: raised.append(what))

    def turn() -> None:
        reading.loop.call_soon(reading.loop.stop)
        reading.loop.run_forever()

    until(lambda: turn() or bool(loader._read), "more chunks than threads have been read")
    time.sleep(0.2)
    reading.engines.close()
    turn()
    reading.loop.close()
    os.close(fd)
    assert not raised
