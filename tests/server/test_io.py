"""Loads read by a real engine, without a daemon."""

from __future__ import annotations

import asyncio
import mmap
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from arena import descriptors

import ffserve
from ffserve.cache.arena import Arena
from ffserve.cache.cache import Cache, Failure, Fetch, Load
from ffserve.cache.shm import SharedMemory
from ffserve.cache.tables import Directory, ShardTable
from ffserve.engine import io
from ffserve.engine.shm import View
from ffserve.formats.base import ChunkedShard
from ffserve.server.io import Engines
from ffserve.shardfile import open_shard

COUNT, SIZE, GOOD_PAGES = 60, 3000, 20
MIB = 1 << 20


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

    arena = Arena(4 * MIB)
    memory, directory = SharedMemory("test-arena", arena.size), Directory(1 << 22)
    table = ShardTable(directory)
    cache = Cache(arena, directory, table, lambda *_: None)
    loop = asyncio.new_event_loop()
    ended: list[dict[int, Failure]] = []

    def loaded(load: Load, failures: dict[int, Failure], now: float) -> None:
        ended.append(failures)
        loop.stop()

    engines = Engines(kind, 16, memory, arena, directory, table)
    engines.loaded = loaded
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    engine, file = engines.add_file(0, fd, 1)
    base = directory.reserve(COUNT)
    places = range(0, COUNT * SIZE, SIZE)
    directory.offsets[base : base + COUNT] = [start + at for at in places]
    directory.set_lengths(base, np.full(COUNT, SIZE, np.uint64))
    directory.checksums[base : base + COUNT] = [
        zlib.crc32(content[at : at + SIZE]) for at in places
    ]
    table.add(
        base,
        COUNT,
        payload_size=COUNT * SIZE,
        alignment=1,
        checksum_kind=1,
        file=file,
        engine=engine,
    )
    engines.attach(loop)
    fetch = Fetch(np.arange(base, base + COUNT))
    load = cache.advance(fetch, COUNT, 1 << 30)
    assert load is not None and len(load.slots) == COUNT
    engines.submit(load)
    loop.run_forever()

    bad = {base + k for k, at in enumerate(places) if at + SIZE > lost}
    assert [set(failures) for failures in ended] == [bad]
    assert all(-200 < failure.status < 0 for failure in ended[0].values())
    view = View(memory.address, arena.size, [(directory.entries_memory.address, 0, COUNT)])
    offsets, missing, _ = view.locate(np.arange(COUNT))
    assert {base + k for k in missing.tolist()} == bad
    buffer = np.zeros(int(offsets[-1]), np.uint8)
    good = np.delete(np.arange(COUNT), missing)
    left = view.gather(np.arange(COUNT), offsets, buffer, positions=good)
    assert left is not None and not len(left)
    for k in good.tolist():
        assert buffer[k * SIZE : (k + 1) * SIZE].tobytes() == content[k * SIZE : (k + 1) * SIZE]
    engines.close()
    loop.close()
    os.close(fd)
    os.close(held)


@pytest.mark.skipif("uring" not in io.probe(), reason="no io_uring")
def test_chunks_submitted_to_a_broken_engine_raised_in_the_scheduler(tmp_path: Path) -> None:
    """Other reads report a broken engine by `on_broken`, so that the daemon ends."""
    path = str(tmp_path / "x.recordio")
    with ffserve.create(path, max_chunk_size=SIZE) as writer:
        for k in range(COUNT):
            writer.write(bytes([k]) * (SIZE - 100))
    fd = os.open(path, os.O_RDONLY)
    shard = open_shard(fd, path)
    assert isinstance(shard, ChunkedShard) and len(shard.chunks) > 2
    arena = Arena(4 * MIB)
    memory, directory = SharedMemory("test-arena", arena.size), Directory(1 << 22)
    table = ShardTable(directory)
    cache = Cache(arena, directory, table, lambda *_: None)
    before = descriptors("[eventfd]")
    reading = Engines("uring", 16, memory, arena, directory, table)
    reading.loaded = lambda *_: None
    own = descriptors("[eventfd]") - before
    engine, file = reading.add_file(0, fd, 1)
    base = directory.reserve(COUNT)
    lengths = np.empty(COUNT, np.uint64)
    run = slice(base, base + COUNT)
    shard.load(directory.offsets[run], lengths, directory.checksums[run])
    directory.set_lengths(base, lengths)
    size = int(shard.chunks.sizes.sum())
    table.add(
        base,
        COUNT,
        payload_size=size,
        alignment=1,
        checksum_kind=0,
        file=file,
        engine=engine,
        chunked=shard,
    )
    loop = asyncio.new_event_loop()
    broke: list[None] = []
    reading.on_broken = lambda: (broke.append(None), loop.stop())
    reading.attach(loop)
    [wakes] = own - {reading._engines[0].fileno()}
    # Writing to it fails from now on. Only closed, its number could be given to another file.
    unwritable = os.open(os.devnull, os.O_RDONLY)
    os.dup2(unwritable, wakes)
    os.close(unwritable)
    for half in (range(COUNT // 2), range(COUNT // 2, COUNT)):
        broke.clear()
        load = cache.advance(Fetch(base + np.array(half)), COUNT, 1 << 30)
        assert load is not None
        reading.submit(load)
        if not broke:
            loop.run_forever()
        assert broke and reading.broken
    reading.close()
    loop.close()
    os.close(fd)
