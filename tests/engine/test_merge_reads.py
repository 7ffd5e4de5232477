"""Adjacent extents are read together within the stated limits, others separately."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from daemon import serving
from hypothesis import given
from hypothesis import strategies as st

import ffserve
from ffserve.client.daemon.connection import status
from ffserve.client.local import local_source as local
from ffserve.engine.io import MERGED_GAP, MERGED_SIZE, merge_reads
from ffserve.errors import ReadError

COUNT, SIZE = 3000, 777


@given(
    st.lists(
        st.tuples(st.integers(-200, 2 * MERGED_GAP), st.integers(0, MERGED_SIZE), st.booleans()),
        min_size=1,
        max_size=200,
    ),
    st.integers(0, MERGED_SIZE),
)
def test_a_read_is_a_run_within_the_limits(steps: list[tuple[int, int, bool]], most: int) -> None:
    begins, ends, files = [], [], []
    at, file = 1000, 0
    for gap, length, same in steps:
        at, file = at + gap, file + (not same)
        begins.append(at)
        ends.append(at + length)
        files.append(file)
        at += length
    firsts = merge_reads(np.array(begins), np.array(ends), np.array(files), most).tolist()
    assert firsts[0] == 0 and firsts == sorted(set(firsts))
    for first, next_ in zip(firsts, [*firsts[1:], len(begins)], strict=True):
        run = range(first, next_)
        if len(run) == 1:
            continue
        assert len({files[k] for k in run}) == 1
        assert all(ends[k] - begins[k] <= most for k in run)
        assert all(0 <= begins[k + 1] - ends[k] <= MERGED_GAP for k in run[:-1])
        assert ends[run[-1]] - begins[run[0]] < MERGED_SIZE + most


def make(path: Path, count: int = COUNT) -> list[bytes]:
    random = np.random.default_rng(5)
    samples = [random.bytes(SIZE + 7 * (k % 50)) for k in range(count)]
    with ffserve.create(path, n=count) as writer:
        for sample in samples:
            writer.write(sample)
    return samples


def test_a_scan_through_the_daemon_reads_neighbours_together(tmp_path: Path) -> None:
    samples = [*make(tmp_path / "a.ffr"), *make(tmp_path / "b.ffr")]
    with serving(arena="64MiB") as daemon:
        with ffserve.open(tmp_path, server=daemon.socket) as reader:
            assert [sample.tobytes() for sample in reader] == samples
            scattered = np.random.default_rng(1).permutation(len(samples))[:100]
            assert [s.tobytes() for s in reader.read(scattered)] == [samples[k] for k in scattered]
        report = status(daemon.socket)
    assert report["cache"]["blocks_read"] > 500
    assert report["engine"]["reads"] < report["cache"]["blocks_read"] / 5


def test_one_bad_block_does_not_take_its_neighbours_along(tmp_path: Path) -> None:
    """The file is /proc/self/mem with a page missing, whose read is an I/O error."""
    samples = make(tmp_path / "a.ffr")
    image = np.fromfile(tmp_path / "a.ffr", np.uint8)
    page, low = mmap.PAGESIZE, 16 * mmap.PAGESIZE
    with ffserve.open(tmp_path / "a.ffr", server="off") as reader:
        offsets, lengths, _ = reader.tables(0)
        source = reader._selector.source
        assert isinstance(source, local.LocalSource)
        # The first bytes of the file are below vm.mmap_min_addr; records from `low` on are used.
        usable = np.flatnonzero(offsets >= low).tolist()
        end = -(-len(image) // page) * page
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        place = libc.mmap(low, end - low, mmap.PROT_READ | mmap.PROT_WRITE, fixed, -1, 0)
        if place != low:
            pytest.skip("addresses as low as the file's offsets cannot be mapped here")
        ctypes.memmove(low, image[low:].ctypes.data, len(image) - low)
        hole = low + 40 * page
        libc.munmap(ctypes.c_void_p(hole), ctypes.c_size_t(page))
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        os.dup2(memory, source._files.fd(0))
        os.close(memory)
        got = reader.read(usable, errors="return")
        libc.munmap(ctypes.c_void_p(low), ctypes.c_size_t(end - low))
    bad = 0
    for index, sample in zip(usable, got, strict=True):
        begin, stop = int(offsets[index]), int(offsets[index] + lengths[index])
        if begin < hole + page and stop > hole:
            assert isinstance(sample, ReadError)
            bad += 1
        else:
            assert isinstance(sample, np.ndarray) and sample.tobytes() == samples[index]
    assert 1 <= bad <= 10
