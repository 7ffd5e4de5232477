"""An internal error in the daemon's loop: the daemon says so once and ends, clients go on."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from daemon import DEADLINE_S, Daemon, sample, until, write

import ffserve
from ffserve.client.daemon.channel import ANSWER_TIMEOUT_S
from ffserve.server.life.daemon import EXIT_FAULT

COUNT = 100
FAULTS = {
    "a message": ("ffserve.server.sessions.session", "Session", "numbers_of"),
    "a turn": ("ffserve.cache.cache", "Cache", "advance"),
    "the end of a load": ("ffserve.server.reading.scheduler", "Scheduler", "loaded"),
    "a timer": ("ffserve.server.sessions.server", "Server", "_show_life"),
}
FAULTY = """
import os
from {module} import {owner}
work = {owner}.{method}
def faulty(*arguments, **options):
    if os.path.exists({trigger!r}):
        raise KeyError("fault of the test")
    return work(*arguments, **options)
{owner}.{method} = faulty
"""


@pytest.mark.check
@pytest.mark.parametrize("place", FAULTS)
def test_an_internal_error_left_requests_unanswered_for_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = write(tmp_path / "a.ffr", [sample(i) for i in range(COUNT)])
    trigger = tmp_path / "now"
    module, owner, method = FAULTS[place]
    patch = FAULTY.format(module=module, owner=owner, method=method, trigger=str(trigger))
    daemon = Daemon(patch=patch)
    with contextlib.closing(daemon):
        process = daemon.start().process
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        with ffserve.open(path) as reader:
            assert daemon.socket in reader.source
            assert bytes(reader[0]) == sample(0)
            trigger.touch()
            began = time.monotonic()
            assert [bytes(each) for each in reader.read(range(COUNT))] == [
                sample(i) for i in range(COUNT)
            ]
            assert time.monotonic() - began < ANSWER_TIMEOUT_S / 4
        assert process is not None and process.wait(DEADLINE_S) == EXIT_FAULT
        daemon.process = None
        log = daemon.text()
        assert log.count("Traceback") == log.count("internal error, the daemon ends\n") == 1, log
        assert log.endswith("KeyError: 'fault of the test'\n"), log
        trigger.unlink()
        with daemon.start().open(path) as reader:
            assert bytes(reader[1]) == sample(1)
            until(lambda: daemon.end() == 0, "a daemon without faults ends in order")
