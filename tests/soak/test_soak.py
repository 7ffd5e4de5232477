"""Crash loops for as long as one likes: `make soak`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from daemon import sample, serving, write
from reading_jobs import COUNT, SIZES, jobs

import ffserve

SECONDS = 120


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
def test_a_hundred_million_samples(tmp_path: Path) -> None:
    """40 bytes a sample in the daemon once they are open, none of it the clients' own."""
    count, size = 100_000_000, 100
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


@pytest.mark.soak
def test_daemon_and_jobs_killed_at_random(tmp_path: Path) -> None:
    """Every job that lives gets every sample once, whoever else dies, and nothing stays behind."""
    path = write(tmp_path / "a.ffr", [sample(i, SIZES) for i in range(COUNT)])
    with serving() as calm, jobs(1, path, calm.socket) as [alone]:
        truth = sorted(alone.end()[0])
    chance = random.Random(0)
    deadline = time.monotonic() + SECONDS
    rounds = 0
    with serving(arena="2MiB") as daemon:
        while time.monotonic() < deadline:
            with jobs(3, path, daemon.socket, pause=0.01) as running:
                time.sleep(chance.random() * 0.3)
                victim = chance.choice(("daemon", "job", "worker", "stop"))
                if victim == "daemon":
                    daemon.end(signal.SIGKILL)
                    time.sleep(chance.random() * 0.3)
                    daemon.start()
                elif victim == "job":
                    running[0].kill()
                elif victim == "worker":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(running[0].workers[0], signal.SIGKILL)
                elif victim == "stop":
                    daemon.end(signal.SIGTERM)
                    daemon.start()
                for job in running[1:]:
                    assert sorted(job.end()[0]) == truth
            rounds += 1
    assert rounds > 3
