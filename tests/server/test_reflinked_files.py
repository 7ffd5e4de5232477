"""Files that share blocks of the disk: reflinks, deduplicated ranges, snapshots of subvolumes."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon, run_python, sample, serving, until, write
from test_threats import ALICE, BOB, becoming, read_by

import ffserve
from ffserve.errors import FormatError

pytestmark = pytest.mark.check

FICLONERANGE, FIDEDUPERANGE = 0x4020940D, 0xC0189436  # linux/fs.h
COUNT = 200
TRUTH = [sample(index, (5000, 70_000)) for index in range(COUNT)]


@pytest.fixture(params=["btrfs", "xfs"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system that shares blocks, in a directory that everybody can search."""
    make = shutil.which(f"mkfs.{request.param}")
    if os.geteuid() or make is None:
        pytest.skip(f"needs root and mkfs.{request.param}")
    with tempfile.TemporaryDirectory(prefix="ffs-") as directory:
        os.chmod(directory, 0o755)
        image, place = Path(directory) / "image", Path(directory) / "mounted"
        with image.open("wb") as file:
            file.truncate(400 << 20)
        subprocess.run([make, str(image)], check=True, capture_output=True)
        place.mkdir()
        mount = ["mount", "-o", "loop", str(image), str(place)]
        done = subprocess.run(mount, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount {request.param}: {done.stderr.decode()}")
        try:
            yield place
        finally:
            # The kernel gives up the files of a ring a moment after its process has ended.
            unmount = ["umount", str(place)]
            until(lambda: subprocess.run(unmount, check=False).returncode == 0, "nobody uses it")


def clone(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--reflink=always", "--preserve", source, target], check=True)


def contents(daemon: Daemon, path: Path) -> list[bytes]:
    with daemon.open(str(path)) as reader:
        return [bytes(each) for each in reader.read(range(len(reader)))]


def change(path: Path, index: int) -> None:
    """Change the last byte of a sample in place; the file keeps size and modification time."""
    with ffserve.open(str(path), server="off") as reader:
        offsets, lengths, _ = reader.tables(0)
    before = os.stat(path)
    with path.open("r+b") as file:
        file.seek(int(offsets[index] + lengths[index]) - 1)
        file.write(b"\xff" if TRUTH[index][-1] != 0xFF else b"\0")
        file.flush()
        os.fsync(file.fileno())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_clone_that_is_changed_is_another_file(folder: Path) -> None:
    first, second = folder / "a.ffr", folder / "b.ffr"
    write(first, TRUTH)
    clone(first, second)
    with serving() as daemon:
        assert contents(daemon, first) == contents(daemon, second) == TRUTH
        change(second, 7)
        with daemon.open(str(second)) as reader, pytest.raises(FormatError):
            reader.read([7])
        assert contents(daemon, first) == TRUTH


def test_a_snapshot_has_the_inodes_of_its_subvolume(folder: Path) -> None:
    original, snapshot = folder / "original", folder / "snapshot"
    make = ["btrfs", "subvolume", "create", str(original)]
    if not shutil.which("btrfs") or subprocess.run(make, check=False).returncode:
        pytest.skip("needs btrfs")
    write(original / "a.ffr", TRUTH)
    subprocess.run(
        ["btrfs", "subvolume", "snapshot", str(original), str(snapshot)],
        check=True,
        capture_output=True,
    )
    one, other = os.stat(original / "a.ffr"), os.stat(snapshot / "a.ffr")
    same = ("st_ino", "st_size", "st_mtime_ns")
    assert all(getattr(one, name) == getattr(other, name) for name in same)
    with serving() as daemon:
        assert contents(daemon, original / "a.ffr") == TRUTH
        change(snapshot / "a.ffr", 7)
        with daemon.open(str(snapshot / "a.ffr")) as reader, pytest.raises(FormatError):
            reader.read([7])
        assert contents(daemon, original / "a.ffr") == TRUTH


def test_ranges_that_are_deduplicated_while_they_are_read(folder: Path) -> None:
    first, second = folder / "a.ffr", folder / "b.ffr"
    for path in (first, second):
        write(path, TRUTH)
        os.sync()
    size = first.stat().st_size & -(1 << 16)
    with serving(arena="4MiB") as daemon, daemon.open([str(first), str(second)]) as reader:
        with first.open("rb") as source, second.open("r+b") as target:
            for at in range(0, size, 1 << 16):
                argument = struct.pack("<QQHHI", at, 1 << 16, 1, 0, 0)
                argument += struct.pack("<qQQiI", target.fileno(), at, 0, 0, 0)
                fcntl.ioctl(source, FIDEDUPERANGE, argument)
                if at % (1 << 20) == 0:
                    part = range(at >> 16, (at >> 16) + 20)
                    found = [bytes(each) for each in reader.read(part)]
                    assert found == [(TRUTH + TRUTH)[k] for k in part]
        assert [bytes(each) for each in reader.read(range(2 * COUNT))] == TRUTH + TRUTH


@pytest.mark.attack
def test_one_block_a_thousand_times_in_a_file_of_millions_of_records(folder: Path) -> None:
    """Such a file is stored as far as stat(2) tells: its tables grew the daemon by 264 MB."""
    daemon_options = ["--socket-mode", "0666"]
    hostile, block = folder / "a.tfrecord", 4 << 20
    with hostile.open("w+b") as file:
        file.write(bytes(block))
        file.flush()
        os.fsync(file.fileno())
        for k in range(1, 512):
            argument = struct.pack("<qQQQ", file.fileno(), 0, block, k * block)
            fcntl.ioctl(file, FICLONERANGE, argument)
    os.chown(hostile, ALICE, ALICE)
    assert hostile.stat().st_blocks * 512 >= hostile.stat().st_size
    with serving(options=daemon_options) as daemon:
        honest = write(daemon.directory / "honest.ffr", TRUTH[:50])
        assert read_by(daemon, honest, BOB) == TRUTH[:50]
        before = daemon.private_size()
        program = """
try:
    ffserve.open(sys.argv[2], server=sys.argv[1], format="tfrecord", verify=False)
except ffserve.ReadError as error:
    print(error)
"""
        said = run_python(becoming(ALICE) + program, daemon.socket, hostile).stdout
        assert "blocks that are in it several times" in said
        assert daemon.private_size() - before < 100 << 20
        assert read_by(daemon, honest, BOB) == TRUTH[:50]
