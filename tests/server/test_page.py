"""The status page: its files, its events, and that nobody who watches it does harm."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, Raw, damage, run_python, sample, until, write
from http_daemon import ask, connection_to, measured, measured_unix

from ffserve import limits
from ffserve.errors import ChecksumError

pytest.importorskip("h11")
pytest.importorskip("prometheus_client")

COUNT, GOOD = 60, 30
TRUTH = [sample(index, [5000]) for index in range(COUNT)]
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\n\ndata: {}\udcff"
FAST = """
import ffserve.server.status.page as page, ffserve.server.reading.engines as io
page.EVENT_INTERVAL_S, http.ANSWER_TIMEOUT_S, io.SLOW_READ_S = 0.1, 1.0, 0.0
"""
ASSETS = Path(__file__).parents[2] / "ffserve" / "server" / "status" / "assets"


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A record file."""
    return write(tmp_path / "a.ffr", TRUTH)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, str, str]]:
    """A daemon that shows names to all, its address, and a record file with a damaged sample."""
    path = write(tmp_path_factory.mktemp("page") / "a.ffr", TRUTH)
    damage(path, 3)
    with measured("--http-jobs", "all", patch=FAST) as (daemon, address):
        yield daemon, address, path


@contextlib.contextmanager
def watching(address: str) -> Iterator[http.client.HTTPResponse]:
    """A browser that watches the page."""
    with contextlib.closing(connection_to(address)) as connection:
        connection.request("GET", "/events")
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
        yield answer


def next_event(answer: http.client.HTTPResponse) -> dict[str, Any]:
    """Return the next event, as a browser takes it."""
    assert answer.readline() == b"event: overview\n"
    line = answer.readline()
    assert line.startswith(b"data: ") and line.isascii()
    assert answer.readline() == b"\n"
    return dict(json.loads(line.removeprefix(b"data: ")))


def test_the_page_has_files_and_a_strict_policy(shown: tuple[Daemon, str, str]) -> None:
    _, address, _ = shown
    for path in ("/", "/page.css", "/page.js"):
        with contextlib.closing(connection_to(address)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
            policy = answer.getheader("Content-Security-Policy", "")
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert ask(address, "/")[1] == "text/html; charset=utf-8"
    assert ask(address, "/page.js")[1] == "text/javascript; charset=utf-8"
    assert ask(address, "/page.py")[0] == ask(address, "/../page.py")[0] == 404
    assert ask(address, "/events", "HEAD")[::2] == (200, "")


def test_the_page_loads_nothing_from_elsewhere_and_has_no_markup_of_names() -> None:
    html, style, script = (
        (ASSETS / name).read_text() for name in ("page.html", "page.css", "page.js")
    )
    for text in (html, style, script):
        # The name of a vocabulary, not an address.
        assert not re.search(r"//\w", text.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", html)
    markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\("
    assert not re.search(markup, script)
    assert set(re.findall(r'(?:src|href)="([\w.]+)"', html)) == {
        "page.css", "page.js", "metrics",
    }  # fmt: skip


@pytest.mark.check
def test_events_bring_the_overview_and_go_on(path: str) -> None:
    with measured_unix("--max-sessions", "77") as (daemon, unix), daemon.open(path) as reader:
        reader.read(range(COUNT // 2))  # not announced yet, so none of it is read ahead
        reader.announce(range(COUNT))
        reader.reached(0, COUNT // 2)
        until(lambda: daemon.status()["progress"][0]["position"] == COUNT // 2, "it is reported")
        with watching(unix) as answer:
            first = next_event(answer)
            assert first["names"] and first["totals"]["samples"] == COUNT // 2
            assert first["totals"]["most_sessions"] == 77
            (job,) = first["jobs"]
            assert job["data"] == path and job["epoch"] == 0 and 0.4 < job["done"] <= 0.5
            assert [file["path"] for file in first["files"]] == [path]
            second = next_event(answer)
            assert second["totals"]["uptime_s"] > first["totals"]["uptime_s"]
            with watching(unix) as other:
                event = next_event(other)
                while second["totals"]["uptime_s"] < event["totals"]["uptime_s"]:
                    second = next_event(answer)
                assert event == second, "an event is made once for all"
            reader.close()
            assert daemon.end() == 0, "a daemon that is watched ends"


def test_strangers_see_totals_only(path: str) -> None:
    damage(path, 3)
    with measured() as (daemon, address), daemon.open(path) as reader:
        with pytest.raises(ChecksumError):
            reader.read([3])
        with watching(address) as answer:
            event = next_event(answer)
        assert event["totals"]["errors"] == 1 and event["totals"]["sessions"] == 1
        lists = {key: rows for key, rows in event.items() if isinstance(rows, list)}
        assert set(lists) == {"jobs", "memory", "files", "slow", "lines", "preparations"}
        assert not any(lists.values()) and not event["names"]
        text = json.dumps(event)
        assert path not in text and daemon.socket not in text


def test_jobs_that_run_come_before_those_that_have_ended(path: str) -> None:
    with (
        measured("--http-jobs", "all", patch=FAST) as (daemon, address),
        Raw(daemon.socket, job="runs") as running,
    ):
        running.open(path)
        for number in range(2 * limits.MOST_PAGE_JOBS):
            with Raw(daemon.socket, job=f"job {number}") as raw:
                raw.open(path)
            until(lambda: daemon.status()["clients"]["sessions"] == 2, "it has ended")
        with watching(address) as answer:
            event = next_event(answer)
    assert len(event["jobs"]) == limits.MOST_PAGE_JOBS
    assert [job["has_ended"] for job in event["jobs"][:2]] == [False, True]
    assert event["jobs"][1]["number"] == f"job {2 * limits.MOST_PAGE_JOBS - 1}", "the last to end"
    assert event["ended"] == 2 * limits.MOST_PAGE_JOBS, "more than the page has"


def test_names_of_clients_are_data_and_nothing_else(shown: tuple[Daemon, str, str]) -> None:
    daemon, address, path = shown
    with Raw(daemon.socket, job="hostile", title=HOSTILE[:60], command=HOSTILE) as raw:
        raw.open(path)
        with watching(address) as answer:
            for _ in range(3):  # no event ends early
                event = next_event(answer)
    (job,) = [job for job in event["jobs"] if job["number"] == "hostile"]
    assert job["command"].startswith("</script><img src=x onerror=alert(1)>\\u202e\\n\\ndata")


def test_errors_and_slow_files_are_shown(shown: tuple[Daemon, str, str]) -> None:
    daemon, address, path = shown
    with daemon.open(path) as reader, pytest.raises(ChecksumError):
        reader.read([3])
    with watching(address) as answer:
        next_event(answer)  # it may have been made before
        event = next_event(answer)
    assert [row["path"] for row in event["slow"]] == [path]
    (line,) = event["lines"]
    assert line["level"] == "error" and "damaged sample" in line["text"]
    assert abs(line["time"] - time.time()) < 600


@pytest.mark.check
def test_watchers_who_do_not_read_are_closed_and_harm_nobody(
    shown: tuple[Daemon, str, str],
) -> None:
    daemon, address, path = shown
    host, _, port = address.rpartition(":")
    with daemon.open(path) as reader, contextlib.ExitStack() as stack:
        before = daemon.socket_count()
        for _ in range(30):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect((host, int(port)))
            sock.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        good = range(GOOD, COUNT)
        with watching(address) as answer:
            for _ in range(10):
                next_event(answer)
                assert [bytes(each) for each in reader.read(good)] == TRUTH[GOOD:]
        # Pages of the kernel take some events.
        until(lambda: daemon.socket_count() <= before, "they are closed")


def test_a_new_watcher_is_served_beyond_the_bound(shown: tuple[Daemon, str, str]) -> None:
    daemon, address, _ = shown
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            next_event(stack.enter_context(watching(address)))
        assert daemon.socket_count() < 80
        assert ask(address, "/healthz")[0] == 200


def test_an_internal_error_of_the_page_harms_no_job(path: str) -> None:
    patch = FAST + "\ndef broken(facts): raise ValueError('of the test')\npage.overview = broken"
    lines = ["internal error while making the status page", r"Traceback .*", r" .*", "ValueError.*"]
    with measured(patch=patch, expect=lines) as (daemon, address), daemon.open(path) as reader:
        with watching(address) as answer, contextlib.suppress(http.client.IncompleteRead):
            assert answer.read() == b""
        assert bytes(reader[1]) == TRUTH[1]
        assert ask(address, "/healthz")[0] == 200


@pytest.mark.check
def test_an_event_of_thousands_of_jobs_is_small_and_made_in_steps() -> None:
    program = """
import json
import numpy as np
from ffserve.config import ServerConfig
from ffserve.limits import MOST_PAGE_JOBS
from ffserve.server.status.page import event
from ffserve.server.sessions.state import ServerState
state = ServerState(ServerConfig(arena_size_bytes=16 << 20))
for k in range(5000):
    job = state.jobs.obtain(f"{k:0200}", 0.0, 0)
    job.sessions, job.paths, job.title, job.command = 1, "/" + "x" * 4000, "t" * 64, "c" * 256
    job.last_seen = float(k)
    for part in (1, 2):
        state.memory.next_use.join(job.key, np.array([2 * k]), np.array([part]))
steps, count = event(state, 5000.0, names=True), 0
while True:
    try:
        next(steps)
    except StopIteration as end:
        text = end.value
        break
    count += 1
facts = json.loads(text.decode().split("data: ")[1])
assert len(facts["jobs"]) == MOST_PAGE_JOBS and count > 100
assert len(text) < 400_000, len(text)
state.close()
"""
    run_python(program)
