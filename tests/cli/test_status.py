"""`ffserve status`: what it shows of whom, on 80 columns, and what it marks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import on_a_terminal, text_of
from daemon import Daemon, Raw, damage, ready, sample, serving, until, write

from ffserve import protocol
from ffserve.cli.daemon.screen import amount
from ffserve.errors import ChecksumError, ProtocolError
from ffserve.server.life.log import LatestLines
from ffserve.server.reading.statistics import RATE_S, Rates
from ffserve.server.status import report
from ffserve.server.status.overview import overview

COUNT, SIZE = 60, 5000
TRUTH = [sample(index, [SIZE]) for index in range(COUNT)]
HOSTILE = "\x1b[31mred\x1b[0m \u202e[bold]x[/bold]\n<script>"
READING = """
import sys, ffserve
path, socket = sys.argv[1:3]
with ffserve.open(path, server=socket) as reader:
    reader.announce(range(len(reader)))
    reader.read(range(len(reader) // 2))
    print("ready", flush=True)
    sys.stdin.read()
"""
STYLE = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A record file with a long name."""
    directory = tmp_path_factory.mktemp("status") / ("a-long-name-" * 10)
    directory.mkdir()
    return write(directory / "a.ffr", TRUTH)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon for most tests."""
    with serving(expect=[r"closed a session .*: invalid HELLO.*"]) as daemon:
        yield daemon


@contextlib.contextmanager
def job(daemon: Daemon, path: str, title: str, *more: str) -> Iterator[None]:
    """A job in a process of its own that has half of an epoch behind it."""
    command = [sys.executable, "-c", READING, path, daemon.socket, *more]
    with ready(command, env={**os.environ, "FFSERVE_JOB": title}):
        yield


def on_screen(daemon: Daemon, columns: int = 80) -> tuple[str, str]:
    """Return what `status` writes to a terminal, and the same without styles."""
    output, code = on_a_terminal("status", "--socket", daemon.socket, COLUMNS=str(columns))
    assert code == 0, output
    return output.decode(), STYLE.sub("", output.decode())


def test_a_job_names_itself_and_is_shown_with_user_and_command(daemon: Daemon, path: str) -> None:
    with job(daemon, path, "resnet-7", "--lr", "0.1"):
        (facts,) = [job for job in daemon.status()["jobs"] if job["title"] == "resnet-7"]
        assert facts["title"] == "resnet-7" and facts["user"] == os.geteuid()
        assert facts["command"] == f"-c {path} {daemon.socket} --lr 0.1"[: protocol.MOST_COMMAND]
        text = text_of("status", "--socket", daemon.socket)
        assert "resnet-7" in text and path in text and "50 %" in text
        assert f"of {daemon.status()['clients']['most_sessions']:,}" in text
        assert "announced" in text


@pytest.mark.check
def test_status_fits_on_eighty_columns(daemon: Daemon, path: str) -> None:
    with job(daemon, path, "x" * 500, "y" * 500), job(daemon, path, "字" * 40):
        shown, text = on_screen(daemon)
        assert max(map(len, text.split("\r\n"))) <= 80, text
        assert "…" in text and "\x1b[" in shown
        assert len(text.splitlines()) <= 40
        # Elsewhere nothing is cut.
        assert path in text_of("status", "--socket", daemon.socket)


def test_names_that_clients_chose_reach_the_terminal_as_text(daemon: Daemon, path: str) -> None:
    with Raw(daemon.socket, job="hostile", title=HOSTILE, command=HOSTILE) as raw:
        raw.open(path)
        shown, text = on_screen(daemon, 200)
        assert "\\x1b[31mred" in text and "[bold]x[/bold]\\n<script>" in text
        assert "\x1b[31mred" not in shown and "\u202e" not in shown
        titles = {job["name"]: job["title"] for job in daemon.status()["jobs"]}
        assert titles["hostile"] == HOSTILE


@pytest.mark.parametrize("about", [{"title": 5}, {"command": None}, {"title": "x" * 65}])
def test_a_title_that_is_no_short_text_is_refused(daemon: Daemon, about: dict[str, Any]) -> None:
    with Raw(daemon.socket, hello=False) as raw:
        answer = raw.hello(**about)
    assert isinstance(answer, protocol.Fail)
    error = protocol.error_from_wire(answer.error)
    assert isinstance(error, ProtocolError) and f"{next(iter(about))} is not a text" in str(error)


def test_jobs_that_have_ended_are_one_line_below_those_that_run(path: str) -> None:
    with serving() as daemon, Raw(daemon.socket, job="running") as raw:
        raw.open(path)
        over = [Raw(daemon.socket, job=f"over {number}") for number in range(9)]
        for each in reversed(over):  # the first one is the last that asks for something
            each.open(path)
        for ended, each in enumerate(over, 1):
            each.socket.close()
            until(lambda n=11 - ended: daemon.status()["clients"]["sessions"] == n, "it has ended")
        lines = text_of("status", "--socket", daemon.socket).splitlines()
        assert sum("running" in line for line in lines) >= 2
        (line,) = [line for line in lines if "over " in line]
        names = "over 8 0 s ago, over 7 0 s ago, over 6 0 s ago"
        assert re.sub(r"[\d.]+ s ago", "0 s ago", line) == (
            f"ended: {names}, and 6 more (--all shows them)"
        )
        everything = text_of("status", "--all", "--socket", daemon.socket)
        assert all(everything.count(f"over {number}") == 2 for number in range(9))
        first = everything.index("over 8")
        assert everything.index("running") < first < everything.index("over 0")


@pytest.mark.check
def test_errors_are_red_and_slow_files_and_the_log_are_shown(tmp_path: Path) -> None:
    path, chunks = (write(tmp_path / name, TRUTH) for name in ("a.ffr", "a.recordio"))
    damage(path, 3)
    patch = (
        "import ffserve.server.reading.engines; ffserve.server.reading.engines.SLOW_READ_S = 0.0"
    )
    with serving(patch=patch) as daemon, daemon.open([path]) as reader:
        shown, text = on_screen(daemon)
        assert "errors    none" in text and "\x1b[31m" not in shown
        with pytest.raises(ChecksumError):
            reader.read([3])
        shown, text = on_screen(daemon)
        assert "\x1b[31m1 error\x1b[0m" in shown
        assert "damaged sample" in text
        with daemon.open(chunks) as other:
            other.read([1])
        rows = daemon.status()["slow_files"]
        assert {row["path"] for row in rows} == {path, chunks}
        assert all(row["reads"] >= 1 and 0 <= row["longest_s"] < 60 for row in rows)
        assert "slow reads" in text_of("status", "--socket", daemon.socket)


def test_rates_are_those_of_the_last_seconds(path: str) -> None:
    with serving() as daemon, daemon.open(path) as reader:
        reader.read(range(COUNT))

        def facts() -> dict[str, Any]:
            reader.read(range(COUNT))
            return daemon.status()

        found = until(lambda: (f := facts())["rates"]["hits"] > 0 and f, "hits are reported")
        (of_job,) = found["jobs"]
        for rates in (found["rates"], of_job["rates"]):
            assert rates["missed"] > 0 and rates["read_size"] > 0
            assert rates["hit_size"] == pytest.approx(SIZE * rates["hits"], rel=0.01)
        assert found["samples"]["hits"] == of_job["hits"]
        assert found["samples"]["missed"] == COUNT and found["clients"]["sessions"] == 2
        assert json.loads(text_of("status", "--socket", daemon.socket, "--json"))["rates"]
        view = overview(found)
        both = of_job["rates"]["hits"] + of_job["rates"]["missed"]
        assert view.jobs[0].per_s == pytest.approx(both)
        assert view.totals.hit_rate_now is not None and 0 < view.totals.hit_rate_now < 1


def test_a_rate_is_a_mean_of_seconds_and_forgets() -> None:
    rates = Rates(100.0, 1)
    assert rates.per_second(100.0, (50,)) == [50.0], "no more than within a second"
    for k in range(1, 21):
        rates.note(100.0 + k / 2, (100 * k,))
    assert rates.per_second(110.0, (2000,)) == pytest.approx([200.0])
    rates.note(112.0, (2000,))
    rates.note(114.0, (2000,))
    rates.note(110.0 + 2 * RATE_S, (2000,))
    assert rates.per_second(110.0 + 2 * RATE_S, (2000,)) == [0.0]


def test_lines_of_the_log_are_shown_to_administrators_and_to_whom_they_are_about() -> None:
    latest = LatestLines()
    log = logging.Logger("of this test")
    log.addHandler(latest)
    log.warning("of %s", "alice", extra={"user": 1001})
    log.error("of bob", extra={"user": 1002})
    log.warning("of the daemon")
    log.info("nothing")
    texts = {viewer: [row["text"] for row in report.line_facts(viewer, latest)] for viewer in (
        None, 1001, 1002, -1, (1001, 7),
    )}  # fmt: skip
    assert texts == {
        None: ["of alice", "of bob", "of the daemon"],
        1001: ["of alice"],
        1002: ["of bob"],
        -1: [],
        (1001, 7): [],
    }
    for _ in range(500):
        log.warning("x" * 10_000)
    assert len(latest.lines()) <= 100 and len(latest.lines()[0].text) <= 500


def test_a_report_of_an_unknown_release_is_an_error_and_not_a_traceback(
    daemon: Daemon, path: str
) -> None:
    with daemon.open(path):
        facts = daemon.status()
    for key in ("arena", "jobs", "cache"):
        with pytest.raises(ProtocolError, match="a daemon of another release"):
            overview({name: value for name, value in facts.items() if name != key})
    last = {
        key: value
        for key, value in facts.items()
        if key not in {"clients", "samples", "rates", "slow_files", "lines"}
    }
    fresh = {"title", "user", "command", "rates"}
    last["jobs"] = [{k: v for k, v in job.items() if k not in fresh} for job in facts["jobs"]]
    assert len(overview(last).jobs) == len(facts["jobs"]), "one of the last release is shown"


def test_an_amount_has_at_most_five_characters() -> None:
    shown = [amount(value) for value in (0, 999, 999.6, 1234, 99_949, 99_950, 1.5e6, 2e12)]
    assert shown == ["0", "999", "1.00k", "1.23k", "99.9k", "100k", "1.50M", "2.00T"]
