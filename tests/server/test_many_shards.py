"""A data set of ten thousand files: more than an io_uring's table of files holds."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from daemon import serving

import ffserve
from ffserve.client.daemon.connection import status
from ffserve.errors import ReadError

SHARDS, EACH, KINDS = 10_000, 3, 16
ROOM = 14_000  # the daemon leaves a quarter of its descriptors for other things


def sample(shard: int, position: int) -> bytes:
    return b"%d of %d;" % (position, shard % KINDS) * (20 + shard % KINDS)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    contents = []
    for kind in range(KINDS):
        path = folder / "one.ffr"
        with ffserve.create(path, n=EACH) as writer:
            for position in range(EACH):
                writer.write(sample(kind, position))
        contents.append(path.read_bytes())
        path.unlink()
    for shard in range(SHARDS):
        (folder / f"{shard:05}.ffr").write_bytes(contents[shard % KINDS])
    return folder


def check(reader: ffserve.Reader) -> None:
    assert len(reader) == SHARDS * EACH
    assert len(reader.shards) == SHARDS
    random = np.random.default_rng(3)
    for _ in range(20):
        chosen = random.integers(0, len(reader), 500)
        for index, got in zip(chosen.tolist(), reader.read(chosen), strict=True):
            assert got.tobytes() == sample(index // EACH, index % EACH)


@pytest.mark.check
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < ROOM,
    reason="too few open files are allowed",
)
@pytest.mark.parametrize("way", ["daemon", "off"])
def test_ten_thousand_shards(way: str, shards: Path) -> None:
    if way == "off":
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            with ffserve.open(shards, server="off") as reader:
                check(reader)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        return
    with serving(arena="64MiB") as daemon:
        with ffserve.open(shards, server=daemon.socket) as reader:
            check(reader)
        read = status(daemon.socket)["cache"]["blocks_read"]
        # The second job finds the shards open and their samples in memory.
        with ffserve.open(shards, server=daemon.socket) as reader:
            check(reader)
        assert status(daemon.socket)["cache"]["blocks_read"] == read


FEW = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))"


@pytest.mark.check
def test_more_shards_than_the_daemon_may_open(shards: Path) -> None:
    """The error names the limit and a remedy, and the daemon serves smaller data sets."""
    with serving(arena="64MiB", patch=FEW) as daemon:
        with pytest.raises(ReadError, match=r"may have 375 files open.*10000 more.*ulimit -n"):
            ffserve.open(shards, server=daemon.socket)
        some = sorted(shards.iterdir())[:100]
        with ffserve.open(some, server=daemon.socket) as reader:
            assert reader[299].tobytes() == sample(99, 2)


def test_more_shards_than_this_process_may_open(shards: Path) -> None:
    program = f"{FEW}\nimport ffserve\nffserve.open({str(shards)!r}, server='off')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("ffserve.errors.ReadError: ") and "ulimit -n" in last
