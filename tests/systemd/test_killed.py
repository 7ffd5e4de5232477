"""The acceptance of the service's healing: a daemon that is killed every five seconds while jobs
train (`make systemd seconds=300` for five minutes of it)."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import ExitStack

import pytest
from daemon import until
from service_machine import FILE, PRIVATE, WHOLE, answers_again, has_moved, job, status
from systemd_container import DATA, Container

pytestmark = [pytest.mark.systemd, pytest.mark.usefixtures("sound"), pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("SECONDS_OF_KILLS") or 60)
BETWEEN_S = 5.0
HEALED_S = 30.0
"""So long after the last kill jobs are served from memory."""


def test_a_daemon_that_is_killed_every_five_seconds_fails_no_batch(machine: Container) -> None:
    shutil.copy(machine.data / "train.ffr", machine.data / "third.ffr")
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(job(machine, "auto", least=WHOLE, path=path))
            for path in (FILE, PRIVATE, f"{DATA}/third.ffr")
        ]
        kills, end = 0, time.monotonic() + SECONDS
        while time.monotonic() < end:
            due = time.monotonic() + BETWEEN_S
            os.kill(until(machine.pid, "a daemon"), signal.SIGKILL)
            kills += 1
            time.sleep(max(due - time.monotonic(), 0.0))
        last = time.monotonic()
        answers_again(machine, 0)
        has_moved(machine, *jobs)
        healed_s = time.monotonic() - last
        assert status(machine, "root")["cache"]["blocks_read"] == 0, "from memory, not from disk"
        assert healed_s < HEALED_S
    for each in jobs:
        print(f"{each['batches']} batches, the longest {each['longest_s']} s, by {each['sources']}")
    print(f"{kills} kills in {SECONDS:g} s; served from memory {healed_s:.1f} s after the last")
    assert kills >= SECONDS / BETWEEN_S - 2
