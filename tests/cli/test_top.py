"""`ffserve top` on a terminal: what it shows, its keys, and how it leaves the terminal."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import ENVIRONMENT, error_of
from daemon import DEADLINE_S, Daemon, Raw, sample, serving, write
from rich.console import Console

from ffserve.cli.daemon.top import BY_KEY, Board, graph

COUNT = 60
TRUTH = [sample(index, [5000]) for index in range(COUNT)]
SEQUENCE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """`ffserve top` on a terminal of its own."""

    def __init__(self, *options: str, columns: int = 80, rows: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self._ours)
        environment = {**ENVIRONMENT, "TERM": "xterm"}
        environment.pop("COLUMNS")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ffserve", "top", "--interval", "0.2", *options],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            # Not ignored, as in what a shell runs in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        os.close(theirs)
        self.output = ""

    def see(self, pattern: str) -> re.Match[str]:
        """Wait until something is shown after all that was seen before; return it."""
        text, deadline = "", time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if select.select([self._ours], [], [], 0.1)[0]:
                piece = os.read(self._ours, 65536).decode(errors="replace")
                self.output += piece
                text += SEQUENCE.sub("", piece)
                if found := re.search(pattern, text):
                    return found
        raise AssertionError(f"this was not shown: {pattern}\n{text[-3000:]}")

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def end(self, code: int = 0) -> None:
        """Expect the end, with the terminal as it was before."""
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if select.select([self._ours], [], [], 0.05)[0]:
                    self.output += os.read(self._ours, 65536).decode(errors="replace")
        assert self.process.poll() == code, self.output[-2000:]
        with contextlib.suppress(OSError):
            while select.select([self._ours], [], [], 0.05)[0]:
                self.output += os.read(self._ours, 65536).decode(errors="replace")
        assert self.output.rfind(BACK) > self.output.rfind(ALTERNATE) >= 0
        assert termios.tcgetattr(self._ours) == self.before

    def close(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextlib.contextmanager
def top(daemon: Daemon, *options: str, **size: int) -> Iterator[Terminal]:
    """A running `ffserve top`."""
    terminal = Terminal("--socket", daemon.socket, *options, **size)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A record file."""
    return write(tmp_path_factory.mktemp("top") / "a.ffr", TRUTH)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon for most tests."""
    with serving() as daemon:
        yield daemon


def test_jobs_are_shown_live_until_q(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader, top(daemon) as terminal:
        terminal.see(r"samples .*in all")
        reader.read(range(COUNT))
        terminal.see(r"samples .*per second now; \d+ in all")
        terminal.see(r"job +per s +hits .*waits")
        terminal.see(r"[▁▂▃▄▅▆▇█]")
        terminal.press("w")
        terminal.see("by waits;")
        terminal.press("r")
        terminal.see("by waits reversed;")
        terminal.press("\x1b[A")  # an arrow
        terminal.press("n")
        terminal.see("by name;")
        terminal.press("q")
        terminal.end()


def test_more_is_shown_on_a_wide_terminal(daemon: Daemon, path: str) -> None:
    with Raw(daemon.socket, title="resnet", command="train.py") as raw:
        raw.open(path)
        with top(daemon, columns=160) as terminal:
            terminal.see(r"user .*memory .*command")
            terminal.see(r"resnet .*train\.py")
            terminal.press("q")
            terminal.end()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_signals_leave_the_terminal_as_it_was(daemon: Daemon, number: int, code: int) -> None:
    with top(daemon) as terminal:
        terminal.see("samples")
        terminal.process.send_signal(number)
        terminal.end(code)


def test_it_is_stopped_and_continued(daemon: Daemon) -> None:
    with top(daemon) as terminal:
        terminal.see("samples")
        terminal.process.send_signal(signal.SIGTSTP)
        deadline = time.monotonic() + DEADLINE_S
        stat = Path(f"/proc/{terminal.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "it stops"
            time.sleep(0.02)
        assert termios.tcgetattr(terminal._ours) == terminal.before
        terminal.process.send_signal(signal.SIGCONT)
        terminal.see("samples")
        terminal.press("q")
        terminal.end()


@pytest.mark.check
def test_a_daemon_that_goes_is_waited_for(path: str) -> None:
    with serving() as daemon, top(daemon) as terminal:
        terminal.see("samples")
        assert daemon.end() == 0
        terminal.see("no daemon answers|closed the connection")
        daemon.start()
        with daemon.open(path) as reader:
            reader.read([1])
            terminal.see(r"samples .*1 in all")
        terminal.press("q")
        terminal.end()


def test_without_a_terminal_or_a_daemon_it_says_so(tmp_path: Path) -> None:
    assert "needs a terminal" in error_of("top", "--socket", tmp_path / "none", code=2)
    terminal = Terminal("--socket", str(tmp_path / "none"))
    try:
        terminal.see("no daemon answers")
        assert terminal.process.wait(DEADLINE_S) == 3
        assert ALTERNATE not in terminal.output
    finally:
        terminal.close()


@pytest.fixture(scope="module")
def report(daemon: Daemon, path: str) -> dict[str, Any]:
    """A report with one job."""
    with daemon.open(path) as reader:
        reader.announce(range(COUNT))
        reader.read(range(10))
        facts = daemon.status()
    facts["jobs"] = [job for job in facts["jobs"] if job["sessions"]]
    return facts


def with_jobs(report: dict[str, Any], **columns: list[Any]) -> dict[str, Any]:
    """Return the report with a job for each of these values."""
    facts = copy.deepcopy(report)
    job = facts["jobs"][0]
    facts["jobs"] = []
    for number in range(len(next(iter(columns.values())))):
        each = copy.deepcopy(job)
        each["name"] = each["title"] = f"job-{number}"
        for column, values in columns.items():
            target, _, key = column.rpartition("__")
            (each[target] if target else each)[key] = values[number]
        facts["jobs"].append(each)
    return facts


@pytest.mark.parametrize(
    ("key", "columns", "order"),
    [
        ("s", {"rates__hits": [1.0, 3.0, 2.0], "rates__missed": [0.0] * 3}, "120"),
        ("h", {"rates__hits": [9.0, 1.0, 0.0], "rates__missed": [1.0, 9.0, 0.0]}, "102"),
        ("d", {"rates__read_size": [5.0, 7.0, 6.0]}, "120"),
        ("w", {"recent__disk": [0.1, 0.9, 0.5]}, "120"),
        ("u", {"user": [300_001, 200_002, 400_003]}, "102"),
        ("n", {"title": ["c", "a", "b"]}, "120"),
    ],
)
def test_keys_choose_the_order(
    report: dict[str, Any], key: str, columns: dict[str, list[Any]], order: str
) -> None:
    board = Board("memory", Console())
    board.take(with_jobs(report, **columns))
    board.press(key)
    shown = [job.number.removeprefix("job-") for job in board.jobs()]
    assert "".join(shown) == order
    board.press("r")
    assert sorted(job.number for job in board.jobs()) == [f"job-{k}" for k in range(3)]
    assert board.jobs()[0].number.removeprefix("job-") == order[-1]
    assert key in BY_KEY


def test_idle_jobs_are_shown_on_request(report: dict[str, Any]) -> None:
    board = Board("rate", Console())
    board.take(with_jobs(report, sessions=[1, 0, 0], idle_s=[99.0, 99.0, 1.0]))
    assert {job.number for job in board.jobs()} == {"job-0", "job-2"}
    board.press("a")
    assert len(board.jobs()) == 3


def test_more_jobs_than_lines_fit_on_the_screen(report: dict[str, Any]) -> None:
    console = Console(width=80, height=24)
    board = Board("rate", console)
    board.take(with_jobs(report, sessions=[1] * 500))
    lines = console.render_lines(board.shown(), pad=False)
    assert len(lines) == 24
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert "486 more" in text
    for _ in range(500):
        board.take(with_jobs(report, sessions=[1]))
    assert len(board._rates) == 1


def test_a_graph_ends_with_the_present() -> None:
    assert graph([0.0, 1.0, None, 8.0]) == "▁▂ █"
    assert graph([0.5, 1.0, 0.0], 1.0) == "▅█▁"
    assert graph([None, 0.0]) == "  " and graph([]) == ""
