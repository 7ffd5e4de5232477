"""What the page cache holds of the daemon's files is read from there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, damage, serving

import ffserve
from benchmarks.harness.measuring import held_in_memory
from ffserve.engine import io
from ffserve.engine.cached import cached_extents, cached_pages
from ffserve.errors import ChecksumError
from ffserve.reads.page_cache import ASKED_EVERY, CachedFiles, open_cached

COUNT, SIZE = 600, 50_000
FORMATS: list[dict[str, Any]] = [
    {"format": "ffrecord"},
    {"format": "recordio", "compression": "none", "max_chunk_size": 200_000},
]


@pytest.fixture(autouse=True)
def _kernel_that_tells(tmp_path: Path) -> None:
    """Direct I/O, and a kernel that says what is in the page cache."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(8192))
    fd, alignment = io.open_direct(probe)
    try:
        if alignment == 1:
            pytest.skip(f"the file system of {tmp_path} has no direct I/O")
        try:
            if cached_pages(fd, 0, 8192) != 2:
                pytest.skip(f"the file system of {tmp_path} does not say what is in memory")
        except OSError as error:
            pytest.skip(f"the kernel does not say what is in memory: {error}")
    finally:
        os.close(fd)


def written(path: Path, **options: Any) -> list[bytes]:
    samples = [np.random.default_rng(k).bytes(SIZE) for k in range(COUNT)]
    with ffserve.create(path, **options) as writer:
        for one in samples:
            writer.write(one)
    return samples


def read_from_disk(daemon: Daemon) -> int:
    """Bytes that the kernel has read from devices for the daemon."""
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def evict(path: Path, begin: int = 0, size: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, begin, size, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.check
@pytest.mark.parametrize("options", FORMATS, ids=lambda options: options["format"])
def test_data_set_that_was_just_written_was_fetched_from_the_disk(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """The kernel may drop pages at any time, if it is not forbidden, hence some attempts."""
    found = []
    for attempt in range(4):
        path = tmp_path / f"{attempt}"
        samples = written(path, **options)
        with (
            held_in_memory([str(path)]),
            serving(arena="128MiB", roots=[tmp_path]) as daemon,
            ffserve.open(path, server=daemon.socket, format=options["format"]) as reader,
        ):
            before = read_from_disk(daemon)
            order = np.random.default_rng(1).permutation(COUNT)
            for index, got in zip(order.tolist(), reader.read(order), strict=True):
                assert bytes(got) == samples[index]
            found.append((read_from_disk(daemon) - before) / (COUNT * SIZE))
        if found[-1] < 0.1:
            return
    raise AssertionError(f"share read from the disk, by attempt: {found}")


def test_file_of_which_a_part_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    samples = written(path)
    evict(path, COUNT * SIZE // 3, COUNT * SIZE // 3)
    with (
        serving(arena="128MiB", roots=[tmp_path]) as daemon,
        ffserve.open(path, server=daemon.socket) as reader,
    ):
        assert [bytes(one) for one in reader.read(range(COUNT))] == samples
        assert read_from_disk(daemon) > COUNT * SIZE // 4
        assert reader.stats()["samples"] == COUNT


def test_damage_in_the_page_cache_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    samples = written(path)
    damage(str(path), 7)
    with (
        serving(arena="128MiB", roots=[tmp_path]) as daemon,
        ffserve.open(path, server=daemon.socket) as reader,
    ):
        answers = reader.read(range(20), errors="return")
        assert isinstance(answers[7], ChecksumError) and answers[7].index == 7
        for k in {*range(20)} - {7}:
            assert bytes(answers[k]) == samples[k]  # type: ignore[arg-type]


def opened_cached(fd: int) -> int:
    begin, end = np.array([4096], np.int64), np.array([1 << 20], np.int64)
    return int(open_cached(np.array([fd], np.int32), begin, end)[0])


def test_files_of_which_nothing_is_in_memory_are_opened_once(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(1 << 20))
    direct, _ = io.open_direct(path)
    try:
        with held_in_memory([str(path)]):
            plain = opened_cached(direct)
        assert plain >= 0
        os.close(plain)
        evict(path)
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file.read(100)  # its tables
        assert opened_cached(direct) == -1
    finally:
        os.close(direct)


def test_files_that_turn_cold_are_asked_about_seldom(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    try:
        files = CachedFiles()
        files.add(*(np.array([each], np.int32) for each in (3, fd, 4)))
        numbers = np.full(64, 3, np.int32)
        begins = np.arange(64, dtype=np.int64) * 4096
        with held_in_memory([str(path)]):
            assert files.find(numbers, begins, begins + 4096) is not None
        evict(path)
        assert not cached_extents(np.full(64, fd, np.int32), begins, begins + 4096).any()
        for _ in range(20):
            assert files.find(numbers, begins, begins + 4096) is None
        # Nothing asks now, until the probe.
        with held_in_memory([str(path)]):
            found = [files.find(numbers, begins, begins + 4096) for _ in range(ASKED_EVERY + 2)]
        assert found[0] is None
        assert any(one is not None and one.all() for one in found)
        assert files.remove(3) == 4
        assert files.find(numbers, begins, begins + 4096) is None
    finally:
        os.close(fd)
