"""Second read: wrong bytes in the page cache, right ones on the disk; and damage of both."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, sample, serving, write

import ffserve
from benchmarks.harness.measuring import held_in_memory
from ffserve.engine.codec import checksum
from ffserve.engine.io import buffered
from ffserve.errors import STATUS_CHECKSUM, STATUS_TRUNCATED, ChecksumError, FFServeError
from ffserve.reads.second_read import PIECE_SIZE, right_status, second_reads

SIZE, COUNT, BAD = 6000, 40, 7
FAR = 0.85
"""The part of a file up to which the kernel may read ahead when it is opened."""
SMALL = [sample(index, [300]) for index in range(2000)]
"""Several of them are read into one slot."""
SAMPLES = [sample(index, [SIZE]) for index in range(COUNT)]
FOUR, LEAD = 2000, 192
"""Four samples of FOUR bytes are a block. One that begins up to LEAD bytes behind the beginning of
a disk block is read into its slot together with these bytes, whatever the disk blocks' size."""
IN_FOURS = [sample(index, [FOUR]) for index in range(2400)]
WRONG = r".* gave wrong bytes, which were right when they were read again: .*"
FORMATS = ("ffr", "recordio", "tfrecord")


class Disk:
    """A file system on a loop device, whose blocks the test changes below it."""

    def __init__(self, image: Path, root: Path) -> None:
        self.image = image
        self.root = root

    def flip(self, content: bytes) -> None:
        """Turn a bit of the blocks that have these bytes: one of the file, and others that it had
        while it was written."""
        places = [each.start() for each in re.finditer(re.escape(content), self.image.read_bytes())]
        assert places
        with self.image.open("r+b") as file:
            for place in places:
                file.seek(place)
                file.write(bytes([content[0] ^ 1]))


@pytest.fixture
def disk() -> Iterator[Disk]:
    """An ext4 file system of 16 MiB. It is mounted where no clean-up of pytest comes."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4")
    directory = Path(tempfile.mkdtemp(prefix="ffs-disk-"))
    image, root = directory / "image", directory / "root"
    root.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    mounting = ["mount", "-o", "loop", image, root]
    made = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if made.returncode:
        shutil.rmtree(directory)
        pytest.skip(f"cannot mount a loop device: {made.stderr}")
    try:
        yield Disk(image, root)
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)
        shutil.rmtree(directory)


def turn_bit(path: str) -> None:
    """Damage a sample; it is not compressed."""
    place = Path(path).read_bytes().index(SAMPLES[BAD][100:1100])
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(bytes([SAMPLES[BAD][100] ^ 1]))


def drop(path: str) -> None:
    """Forget a file's pages."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def wrong_in_page_cache(
    disk: Disk, kind: str, samples: list[bytes] = SAMPLES, wrong: int = BAD
) -> Iterator[str]:
    """A file of which the page cache has wrong bytes in one sample, and the disk right ones."""
    path = write(disk.root / f"data.{kind}", samples)
    drop(path)
    content = samples[wrong][100:1100]
    disk.flip(content)
    with held_in_memory([path]):
        assert content not in Path(path).read_bytes(), "the page cache has the wrong bytes"
        disk.flip(bytes([content[0] ^ 1]) + content[1:])
        yield path


@contextlib.contextmanager
def right_in_page_cache(
    disk: Disk, samples: list[bytes], chosen: Callable[[int, int], bool] = lambda *_: True
) -> Iterator[tuple[str, int]]:
    """A file, and a sample in it of which the disk has wrong bytes. The page cache has the right
    ones of its first page, and nothing of the next, into which it reaches: so the daemon reads it
    past the page cache. Args: chosen: of its index and offset: whether it may be this sample."""
    path = write(disk.root / "data.ffr", samples)
    size, whole = len(samples[0]), Path(path).read_bytes()
    begin = whole.index(samples[0])
    wrong = next(
        k
        for k in range(len(samples))
        if begin + k * size > FAR * len(whole)
        and -(begin + k * size) % 4096 in range(150, size)
        and chosen(k, begin + k * size)
    )
    place = begin + wrong * size
    assert whole[place : place + size] == samples[wrong]
    drop(path)
    page = place // mmap.PAGESIZE * mmap.PAGESIZE
    with (
        open(path, "rb", buffering=0) as file,
        mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ, offset=page) as memory,
    ):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        memory.madvise(mmap.MADV_RANDOM)
        # The page must stay, however little memory the machine has.
        address = np.frombuffer(memory, np.uint8).ctypes.data
        locked = ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(address), mmap.PAGESIZE)
        assert locked == 0, os.strerror(ctypes.get_errno())
        disk.flip(samples[wrong][:150])
        yield path, wrong


def facts_of(daemon: Daemon) -> dict[str, Any]:
    """Return what status says of damage."""
    facts = daemon.status()
    (shard,) = facts["shards"]
    return {
        "corrected": facts["cache"]["corrected"],
        "failed": facts["cache"]["checksum_failures"],
        "damaged": shard["damaged"],
    }


@pytest.mark.check
@pytest.mark.parametrize("kind", FORMATS)
def test_a_sample_that_is_wrong_in_the_page_cache_is_read_from_the_disk(
    disk: Disk, kind: str
) -> None:
    with wrong_in_page_cache(disk, kind) as path, serving(expect=[WRONG]) as daemon:
        with daemon.open(path) as reader:
            assert [each.tobytes() for each in reader.read(range(COUNT))] == SAMPLES
        asked = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 5)
        # An older kernel does not say what is in the page cache: the daemon reads past it.
        assert facts_of(daemon) == {"corrected": int(asked), "failed": 0, "damaged": 0}
        assert ("gave wrong bytes" in daemon.text()) == asked


@pytest.mark.check
@pytest.mark.parametrize("samples", [SAMPLES, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("before", [0, 30])
def test_a_sample_that_is_wrong_on_the_disk_is_read_from_the_page_cache(
    disk: Disk, samples: list[bytes], before: int
) -> None:
    with (
        right_in_page_cache(disk, samples) as (path, wrong),
        serving(expect=[WRONG]) as daemon,
    ):
        with daemon.open(path) as reader:
            # Singly into its slot, or with others in one read.
            for some in (slice(wrong - before, wrong + 1), slice(wrong - 30, wrong + 3)):
                found = [each.tobytes() for each in reader.read(range(some.start, some.stop))]
                assert found == samples[some]
        assert facts_of(daemon) == {"corrected": 1, "failed": 0, "damaged": 0}


def test_a_sample_that_is_read_again_overwrites_none_of_its_block(disk: Disk) -> None:
    """Its block was read into its slot from the beginning of a disk block on."""

    def chosen(index: int, offset: int) -> bool:
        return index % 4 == 1 and 0 < (offset - FOUR) % 4096 <= LEAD

    with (
        right_in_page_cache(disk, IN_FOURS, chosen) as (path, wrong),
        serving(expect=[WRONG]) as daemon,
    ):
        with daemon.open(path) as reader:
            block = range(wrong - 1, wrong + 3)
            assert [each.tobytes() for each in reader.read(block)] == IN_FOURS[
                wrong - 1 : wrong + 3
            ]
        assert facts_of(daemon) == {"corrected": 1, "failed": 0, "damaged": 0}


def test_nor_one_that_was_read_through_the_page_cache(disk: Disk) -> None:
    """Its block was read into its slot without the bytes before it."""
    block = slice(len(IN_FOURS) - 8, len(IN_FOURS) - 4)
    with wrong_in_page_cache(disk, "ffr", IN_FOURS, block.start + 1) as path:
        assert Path(path).read_bytes().index(IN_FOURS[block.start]) % 512
        with serving(expect=[WRONG]) as daemon, daemon.open(path) as reader:
            found = reader.read(range(block.start, block.stop))
            assert [each.tobytes() for each in found] == IN_FOURS[block]


@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_without_a_daemon(disk: Disk, kind: str) -> None:
    with wrong_in_page_cache(disk, kind) as path, ffserve.open(path, server="off") as reader:
        assert [each.tobytes() for each in reader.read(range(COUNT))] == SAMPLES


def test_a_file_that_was_overwritten_was_blamed_on_the_disk(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """The first read may come before the new bytes, and the second one behind them."""
    with wrong_in_page_cache(disk, "ffr") as path:
        with serving() as daemon, daemon.open(path) as reader:
            os.utime(path)
            assert [each.tobytes() for each in reader.read(range(COUNT))] == SAMPLES
            assert facts_of(daemon) == {"corrected": 0, "failed": 0, "damaged": 0}
        with ffserve.open(path, server="off") as reader:
            os.utime(path)
            assert [each.tobytes() for each in reader.read(range(COUNT))] == SAMPLES
    assert "wrong once" not in caplog.text


@pytest.mark.check
@pytest.mark.parametrize("kind", FORMATS)
def test_damage_is_counted_by_file(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"data.{kind}", SAMPLES)
    turn_bit(path)
    with serving() as daemon, daemon.open(path) as reader:
        for _ in range(2):
            for index in range(COUNT):
                with contextlib.suppress(FFServeError):
                    assert reader.read([index])[0].tobytes() == SAMPLES[index]
                    continue
                assert kind == "recordio" or index == BAD
        with pytest.raises(ffserve.ChecksumError):
            reader.read([BAD])
        found = facts_of(daemon)
        assert found["corrected"] == 0
        assert found["damaged"] == 1 or kind == "recordio"
        assert found["damaged"] >= 1 and found["failed"] > found["damaged"]


@pytest.fixture
def extents(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A file of several pieces, and its bytes."""
    content = np.random.default_rng(0).bytes(END)
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o600)
    with path.open("rb") as file:
        yield file.fileno(), content


END = 3 * PIECE_SIZE + 999
EXTENTS = ((0, 1), (PIECE_SIZE - 3, 7), (5 * SIZE, SIZE), (1, 2 * PIECE_SIZE), (END - 9, 9))


def test_an_extent_is_read_by_two_paths(extents: tuple[int, bytes]) -> None:
    fd, content = extents
    for begin, length in EXTENTS:
        expected = content[begin : begin + length]
        assert [bytes(each) for each in second_reads(fd, begin, length)] == 2 * [expected]
        into = memoryview(bytearray(length))
        right = checksum(1, expected)
        assert right_status(fd, 1, begin, length, right, into) == (0, right)
        assert into == expected
        assert right_status(fd, 1, begin, length, right ^ 1) == (STATUS_CHECKSUM, right)
    assert not list(second_reads(fd, END - 9, 10))
    assert right_status(fd, 1, END - 9, 10, 7)[0] == STATUS_TRUNCATED


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
def test_a_file_that_may_not_be_opened_again_is_read_by_its_descriptor(
    extents: tuple[int, bytes], direct: int
) -> None:
    fd, content = extents
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) | direct
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        with buffered(fd) as plain:
            assert not fcntl.fcntl(plain, fcntl.F_GETFL) & os.O_DIRECT
        found = [bytes(each) for each in second_reads(fd, 5, PIECE_SIZE)]
    finally:
        os.seteuid(0)
    assert found == 2 * [content[5 : 5 + PIECE_SIZE]]
    assert fcntl.fcntl(fd, fcntl.F_GETFL) == flags


def test_thousands_of_wrong_samples_in_one_request(tmp_path: Path) -> None:
    """Those beyond a bound are not read again: each is reported, and the daemon goes on."""
    count = 3000
    path = write(tmp_path / "a.ffr", [b"%d" % (k % 10) for k in range(count)])
    content = Path(path).read_bytes()
    with serving() as daemon:
        times = os.stat(path)
        Path(path).write_bytes(content[:-count] + bytes(b ^ 1 for b in content[-count:]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with daemon.open(path) as reader:
            with pytest.raises(ChecksumError):
                reader.read_batch(range(count))
            assert daemon.cache()["checksum_failures"] == count
            daemon.end(signal.SIGTERM)
            daemon.start()
