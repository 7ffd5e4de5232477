"""Crash loops for as long as one likes: `make soak`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from daemon import sample, serving, write
from test_restart import COUNT, SIZES, jobs

SECONDS = 120


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
                for job in running:
                    job.begun()
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
