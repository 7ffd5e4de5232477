"""What takes much memory, or a minute: `make soak`."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from daemon import serving, until, write

import ffserve
from ffserve.limits import LEAST_TABLES_SIZE, OPENING_SAMPLE_SIZE, TABLE_SAMPLE_SIZE


def memory_of(pid: int | str, name: str) -> int:
    """Bytes, from /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def write_sparse(path: Path, count: int, size: int) -> None:
    """An FFRecord file of `count` samples of zeros, all of them in a hole."""
    crc = zlib.crc32(bytes(size))
    checksums = np.full(1 << 20, crc, "<u4")
    with path.open("wb") as out:
        out.write(struct.pack("<Iq", 0, count))  # 0: no checksum of the tables
        for start in range(0, count, 1 << 20):
            out.write(checksums[: min(1 << 20, count - start)].data)
        for start in range(0, count, 1 << 20):
            upto = min(start + (1 << 20), count)
            out.write((np.arange(start, upto, dtype="<i8") * size + 12 + 12 * count).data)
        out.truncate(12 + 12 * count + size * count)


@pytest.mark.soak
def test_as_many_samples_as_the_smallest_arena_allows(tmp_path: Path) -> None:
    """40 bytes a sample in the daemon once they are open, none of it the clients' own."""
    size = 100
    count = LEAST_TABLES_SIZE // (TABLE_SAMPLE_SIZE + OPENING_SAMPLE_SIZE) - 2000
    path = tmp_path / "huge.ffr"
    write_sparse(path, count, size)
    with serving(arena="64MiB", expect=[r".* no metadata checksum.*"]) as daemon:
        base = memory_of(daemon.pid, "VmRSS")
        with ffserve.open(path, server=daemon.socket) as first:
            assert len(first) == count
            assert memory_of(daemon.pid, "VmRSS") - base < 40 * count
            # Opening takes the lengths once more, for as long as it lasts.
            assert memory_of(daemon.pid, "VmHWM") - base < 48 * count
            private = memory_of("self", "RssAnon")
            with ffserve.open(path, server=daemon.socket) as second:
                chosen = np.random.default_rng(0).integers(0, count, 10_000)
                batch = second.read_batch(chosen)
                assert batch.buffer.nbytes == size * len(chosen) and not batch.buffer.any()
            assert memory_of("self", "RssAnon") - private < 8 << 20


REPLACING_S = 600.0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_file_that_is_replaced_for_ten_minutes(tmp_path: Path) -> None:
    """In each way, with a session that has an old one open and without; nothing grows."""
    fresh = [
        write(tmp_path / f"{k}.ffr", [b"%d of %2d;" % (k, i % 100) * 12 for i in range(20_000)])
        for k in range(2)
    ]
    chosen, served = np.arange(0, 20_000, 7), tmp_path / "served.ffr"
    shutil.copyfile(fresh[0], served)
    most, turn, sizes = 0, 0, []
    with serving(arena="64MiB") as daemon, contextlib.ExitStack() as stack:
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < REPLACING_S:
            turn += 1
            if turn % 3 == 0:
                served.unlink()
            if turn % 3 == 1:
                shutil.copyfile(fresh[turn % 2], served)
            else:
                shutil.copyfile(fresh[turn % 2], tmp_path / "copy")
                os.rename(tmp_path / "copy", served)
            with daemon.open(served) as reader:
                batch = reader.read_batch(chosen)
                assert bytes(batch[1]) == b"%d of  7;" % (turn % 2) * 12
            if turn % 50 == 0:
                stack.close()
                stack.enter_context(daemon.open(served))
                most = max(most, len(daemon.status()["shards"]))
            if passed > REPLACING_S / 10 * (1 + len(sizes)):
                until(lambda: len(daemon.status()["shards"]) <= 2, "old ones are dropped")
                sizes.append(memory_of(daemon.pid, "VmRSS"))
        stack.close()
        until(lambda: len(daemon.status()["shards"]) == 1, "old ones are dropped")
    assert turn > 500 and most < 500
    assert max(sizes[1:]) - sizes[0] < 6 << 20, sizes


@pytest.mark.soak
def test_all_kinds_of_jobs_and_all_that_can_happen_to_them() -> None:
    """What `make soak-hour` does, for less than a minute."""
    program = Path(__file__).with_name("everything.py")
    subprocess.run([sys.executable, program, "--seconds", "45"], check=True)
