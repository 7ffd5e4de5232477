"""The daemon's log: its forms, severities for the journal, and lines that repeat."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, Raw, asking, damage, sample, serving, write

import ffserve
from ffserve.errors import ChecksumError
from ffserve.limits import MOST_LOG_KEYS, MOST_SAME_LINES, MOST_USER_LOG_KEYS
from ffserve.server.life.log import LONGEST_INTERVAL_S, RepeatedLines, SameLines

COUNT = 20
TRUTH = [sample(index, [5000]) for index in range(COUNT)]
DAMAGED = 3


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """A record file with one damaged sample, whose name would forge a line of the log."""
    path = write(tmp_path / "a\n<0>ffserve: b.ffr", TRUTH)
    damage(path, DAMAGED)
    return path


def fail(daemon: Daemon, path: str, times: int) -> None:
    """Read a damaged sample."""
    with daemon.open(path) as reader:
        for _ in range(times):
            with pytest.raises(ChecksumError):
                reader.read([DAMAGED])


@contextlib.contextmanager
def in_journal(*options: str) -> Iterator[Daemon]:
    """A daemon that takes its log file for the stream of the journal."""
    daemon = Daemon(options=options)
    try:
        daemon.log.touch()
        found = daemon.log.stat()
        stream = f"{found.st_dev}:{found.st_ino}"
        daemon.environment = {**os.environ, "JOURNAL_STREAM": stream}
        yield daemon
    finally:
        daemon.close()


def test_a_name_with_line_breaks_is_one_line_with_a_severity(damaged: str) -> None:
    with in_journal() as daemon:
        daemon.start()
        fail(daemon, damaged, 1)
        daemon.end()
        lines = daemon.text().splitlines()
    assert [line[:10] for line in lines] == ["<6>serving", "<3>damaged", "<6>stoppin"], lines
    assert r"a\n<0>ffserve: b.ffr, sample 3" in lines[1]


@pytest.mark.parametrize("options", [["--arena", "1"], ["--socket", "/nonexistent/s"]])
def test_an_error_at_the_start_is_one_for_the_journal(options: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        found = os.fstat(file.fileno())
        environment = os.environ | {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        command = [sys.executable, "-m", "ffserve", "serve", *options]
        done = subprocess.run(command, stderr=file, env=environment)
    assert done.returncode == 2
    assert all(line.startswith("<3>") for line in log.read_text().splitlines()), log.read_text()


def test_another_stream_than_the_journals_gets_no_severities(damaged: str) -> None:
    with serving() as daemon:
        daemon.environment = {**os.environ, "JOURNAL_STREAM": "1:2"}
        daemon.end()
        daemon.start()
        fail(daemon, damaged, 1)
        assert daemon.text().splitlines()[-1].startswith("ffserve: damaged sample: ")


def test_json_says_the_same_as_the_text(damaged: str) -> None:
    with contextlib.closing(Daemon(options=["--log-format", "json"])) as daemon:
        daemon.start()
        fail(daemon, damaged, 4)
        pid = daemon.pid
        daemon.end()
        lines: list[dict[str, Any]] = [json.loads(each) for each in daemon.text().splitlines()]
    assert [line["level"] for line in lines] == ["info", "error", "info", "error"]
    assert {line["pid"] for line in lines} == {pid}
    for line in lines:
        assert set(line) == {"time", "level", "message", "pid"}
        moment = datetime.strptime(line["time"], "%Y-%m-%dT%H:%M:%S.%fZ")
        passed = datetime.now(timezone.utc) - moment.replace(tzinfo=timezone.utc)
        assert 0 <= passed.total_seconds() < 120
    first, last = lines[1]["message"], lines[3]["message"]
    assert first.startswith(f"damaged sample: {damaged}, sample 3"), "JSON has names unchanged"
    assert re.fullmatch(re.escape(first) + r" \(3 more in \d+ s\)", last)


def test_an_error_that_ends_a_daemon_with_json_is_json() -> None:
    command = [
        sys.executable,
        "-m",
        "ffserve",
        "serve",
        "--log-format",
        "json",
        "--socket",
        "/no/s",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    line = json.loads(done.stderr)
    assert line["level"] == "critical" and line["message"].startswith("cannot serve: /no")


def test_each_line_of_a_traceback_has_the_severity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import logging, sys
from ffserve.server.life.log import start_logging
start_logging("info", sys.argv[1])
try:
    raise KeyError("lost")
except KeyError:
    logging.getLogger("ffserve").critical("internal error", exc_info=True)
"""
    log = tmp_path / "log"
    for form in ("text", "json"):
        with log.open("wb") as file:
            found = os.fstat(file.fileno())
            monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
            subprocess.run([sys.executable, "-c", program, form], stderr=file, check=True)
        lines = log.read_text().splitlines()
        assert all(line.startswith("<2>") for line in lines)
        assert (len(lines) == 1) == (form == "json")
        if form == "json":
            assert "KeyError: 'lost'" in json.loads(lines[0][3:])["traceback"]
        else:
            assert lines[-1] == "<2>KeyError: 'lost'"


def test_a_refused_client_is_logged_once_and_then_by_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", TRUTH)
    with serving(options=["--max-sessions", "1"]) as daemon:
        with Raw(daemon.socket):
            for _ in range(5):
                with Raw(daemon.socket) as raw:
                    raw.send(asking(path))
                    assert "already serves 1 sessions" in str(raw.refused())
        daemon.end()
        refused = [each for each in daemon.text().splitlines() if "refused" in each]
        assert len(refused) == 2, refused
        uid = os.geteuid()
        assert f"refused a client of user {uid}: the daemon already serves" in refused[0]
        assert re.search(r"\(4 more in \d+ s\)$", refused[1]), refused
        assert "more in" not in refused[0]


def test_files_that_the_daemon_refuses_are_logged_with_their_user(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", TRUTH)
    (tmp_path / "served").mkdir()
    with serving(roots=[tmp_path / "served"]) as daemon:
        for _ in range(3):
            with pytest.raises(ffserve.AccessDenied):
                daemon.open(path)
        text = daemon.text()
        assert text.count(f"cannot open files for user {os.geteuid()}: ") == 1, text
        assert f"{path}: " in text


# ---------------------------------------------------------------- without a daemon


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the messages since the last call."""
    caplog.set_level(logging.INFO, logger="ffserve")

    def texts() -> list[str]:
        found = list(caplog.messages)
        caplog.clear()
        return found

    return texts


def test_lines_that_repeat_are_counted_in_growing_intervals(
    logged: Callable[[], list[str]],
) -> None:
    repeated = RepeatedLines()
    for second in range(60):
        repeated.warning("number %d", second, key="a", now=1000.0 + second)
        repeated.flush(1000.0 + second)
    assert logged() == ["number 0"]
    repeated.flush(1060.0)
    assert logged() == ["number 59 (59 more in 60 s)"]
    repeated.warning("number %d", 60, key="a", now=1061.0)
    repeated.flush(1179.0)
    assert logged() == []
    repeated.flush(1180.0)
    assert logged() == ["number 60 (1 more in 120 s)"]
    repeated.flush(1180.0 + 240)  # nothing happened: the next time is the first
    repeated.error("number %d", 61, key="a", now=1500.0)
    assert logged() == ["number 61"]
    repeated.error("number %d", 62, key="a", now=1501.0)
    repeated.flush(1510.0, ending=True)
    assert logged() == ["number 62 (1 more in 10 s)"]


def test_something_that_goes_on_for_days_is_written_once_an_hour(
    logged: Callable[[], list[str]],
) -> None:
    repeated = RepeatedLines()
    for second in range(0, 7 * 24 * 3600, 10):
        repeated.warning("slow", key=None, now=float(second))
        repeated.flush(float(second))
    hours = 7 * 24 * 3600 / LONGEST_INTERVAL_S
    assert hours <= len(logged()) < hours + 8


def test_many_keys_take_bounded_memory(logged: Callable[[], list[str]]) -> None:
    repeated = RepeatedLines()
    for key in range(10 * MOST_USER_LOG_KEYS):
        repeated.warning("file %d", key, user=7, key=key, now=1.0)
    assert len(logged()) == MOST_USER_LOG_KEYS + 1
    repeated.warning("file %d", 5, user=8, key=5, now=1.0)
    assert logged() == ["file 5"], "another user is not affected"
    last, more = 10 * MOST_USER_LOG_KEYS - 1, 9 * MOST_USER_LOG_KEYS - 1
    repeated.flush(61.0)
    assert logged() == [f"file {last} ({more} more in 60 s)"]
    assert len(repeated._lines) == 1
    for user in range(2 * MOST_LOG_KEYS):
        repeated.warning("user %d", user, user=user, now=61.0)
    assert len(repeated._lines) <= MOST_LOG_KEYS + 1
    repeated.flush(1000.0)
    repeated.flush(2000.0)
    assert not repeated._lines and not repeated._of_user


def test_the_level_is_the_lowest_that_is_written() -> None:
    program = """
import logging
from ffserve.server.life.log import start_logging
start_logging("warning", "text")
logging.getLogger("ffserve").info("not this")
logging.getLogger("ffserve").warning("this")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "ffserve: this\n"


def test_an_origin_for_each_line_filled_the_log_without_a_bound() -> None:
    lines = SameLines(interval_s=0.2)

    def written(text: str) -> str | None:
        record = logging.LogRecord("ffserve", logging.WARNING, "", 0, text, ("x",), None)
        return record.getMessage() if lines.filter(record) else None

    found = [written("no answer of %s") for _ in range(MOST_SAME_LINES + 5)]
    assert found == ["no answer of x"] * MOST_SAME_LINES + [None] * 5
    assert written("another text: %s") == "another text: x"
    time.sleep(0.3)
    assert written("no answer of %s") == "no answer of x (5 more before)"
    assert written("no answer of %s") == "no answer of x"
