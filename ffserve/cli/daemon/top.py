"""``ffserve top``: the jobs of a running daemon, live, in an order that keys choose."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ffserve.cli import FloatRange
from ffserve.cli.daemon import screen
from ffserve.cli.flags import socket_option
from ffserve.cli.terminal import BARS, duration
from ffserve.client.public import Connection
from ffserve.errors import FFServeError, UsageError, printable
from ffserve.server.status.overview import JobRow, Overview, Totals, overview
from ffserve.system.socket_path import find_socket

LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.2, 3600.0
GRAPH, JOB_GRAPH = 24, 8
"""The graphs of the daemon and of each job have this many columns."""
WIDE, WIDEST = 100, 120
"""On a terminal of at least this many columns, more is shown of each job."""
EXIT_TERMINATED = 128 + signal.SIGTERM
_SEQUENCE = re.compile(r"\x1b(\[[\d;]*.|O.)?")
"""The escape sequences of arrow keys and the like."""

SortKey: TypeAlias = Callable[[JobRow], Any]


@dataclass(frozen=True, slots=True)
class Sorting:
    """An order of jobs. key: of the keyboard. first: the smallest comes first."""

    key: str
    first: SortKey


ORDERS = {
    "rate": Sorting("s", lambda job: -job.per_s),
    "hits": Sorting("h", lambda job: 2.0 if job.hit_rate_now is None else job.hit_rate_now),
    "disk": Sorting("d", lambda job: -job.read_per_s),
    "memory": Sorting("m", lambda job: -job.memory),
    "waits": Sorting("w", lambda job: -job.waited),
    "end": Sorting("e", lambda job: float("inf") if job.ends_s is None else job.ends_s),
    "user": Sorting("u", lambda job: screen.user_name(job.user)),
    "name": Sorting("n", lambda job: job.label),
}
BY_KEY = {order.key: name for name, order in ORDERS.items()}


@click.command()
@socket_option
@click.option(
    "--interval",
    type=FloatRange(LEAST_INTERVAL_S, MOST_INTERVAL_S),
    default=1.0,
    show_default=True,
    help="Seconds between two looks at the daemon.",
)
@click.option(
    "--sort",
    type=click.Choice(list(ORDERS)),
    default="rate",
    show_default=True,
    help="Order of the jobs at the start.",
)
def top(socket: str | None, interval: float, sort: str) -> int:
    """Show the daemon's jobs, live.

    Keys sort by samples per second (s), hit rate (h), disk (d), memory (m), waiting (w), end of the
    epoch (e), user (u) or name (n). r reverses the order, a shows idle jobs too, q ends. All rates
    are means of the last five seconds.

    \b
      ffserve top
      ffserve top --sort waits --interval 5
    """
    if not sys.stdout.isatty():
        raise UsageError(
            "'ffserve top' needs a terminal", hint="'ffserve status --json' is for scripts"
        )
    console = Console()
    board = Board(sort, console)
    with Watched(find_socket(socket)) as daemon, Keyboard() as keyboard:
        board.take(daemon.status())
        live = Live(board.shown(), console=console, screen=True, auto_refresh=False)
        with _signals(live, keyboard), live:
            return _watch(board, live, daemon, keyboard, interval)


def _watch(board: Board, live: Live, daemon: Watched, keyboard: Keyboard, interval_s: float) -> int:
    """Show the daemon until the user quits; return the exit code."""
    due = time.monotonic() + interval_s
    while True:
        live.update(board.shown(), refresh=True)
        keys = keyboard.wait(due - time.monotonic())
        if keyboard.ended is not None or "q" in keys:
            return keyboard.ended or 0
        for key in keys:
            board.press(key)
        if time.monotonic() >= due:
            try:
                board.take(daemon.status())
            except FFServeError as error:
                board.error = str(error)
            due = time.monotonic() + interval_s


@contextlib.contextmanager
def _signals(live: Live, keyboard: Keyboard) -> Iterator[None]:
    """Leave the terminal as it was found when the process is ended or stopped."""

    def end(number: int, _frame: FrameType | None) -> None:
        keyboard.end(0 if number == signal.SIGINT else EXIT_TERMINATED)

    def suspend(_number: int, _frame: FrameType | None) -> None:
        live.stop()
        keyboard.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        # It has been continued.
        keyboard.set()
        live.start(refresh=True)

    ending = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), end)
    wanted = {**ending, signal.SIGTSTP: suspend}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watched:
    """A daemon that is asked for its status over one connection, made anew when it broke."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: Connection | None = None

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def status(self) -> dict[str, Any]:
        """Return its report. Raises: ServerUnavailable: none answers."""
        if self._connection is None or not self._connection.alive:
            self._connection = Connection(self._path, "top")
        return self._connection.status()


class Keyboard:
    """The keys that are pressed, where standard input is a terminal.

    ended: the exit code, once a signal has come; it is seen where nothing is half done.
    """

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: Any = None
        self._wake = os.pipe()
        self.ended: int | None = None

    def __enter__(self) -> Keyboard:
        self.set()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        for fd in self._wake:
            os.close(fd)

    def end(self, code: int) -> None:
        """Let `wait` return; the handler of a signal calls this."""
        self.ended = code
        os.write(self._wake[1], b".")

    def set(self) -> None:
        """Get keys as they are pressed, without showing them."""
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSADRAIN)

    def restore(self) -> None:
        """Leave the terminal as it was."""
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            self._before = None

    def wait(self, timeout_s: float) -> str:
        """Wait for keys; return them, or nothing after some time."""
        watched = [fd for fd in (self._wake[0], self._fd) if fd >= 0]
        ready = select.select(watched, [], [], max(timeout_s, 0.0))[0]
        if self._wake[0] in ready or self._fd not in ready:
            return ""
        keys = os.read(self._fd, 64).decode(errors="replace")
        if not keys:  # the terminal is gone
            self.ended = EXIT_TERMINATED
        return _SEQUENCE.sub("", keys)


class Board:
    """The content of the screen: the last report, the values before it, and the order of jobs.

    error: why there is no newer report; None: there is.
    """

    def __init__(self, order: str, console: Console) -> None:
        self._order = order
        self._console = console
        self._reversed = self._all = False
        self._view: Overview | None = None
        self._totals: deque[Totals] = deque(maxlen=GRAPH)
        self._rates: defaultdict[str, deque[float | None]] = defaultdict(
            lambda: deque(maxlen=JOB_GRAPH)
        )
        self.error: str | None = None

    def take(self, facts: dict[str, Any]) -> None:
        """Take a report. Raises: ProtocolError."""
        self._view = view = overview(facts)
        self.error = None
        self._totals.append(view.totals)
        for job in view.jobs:
            self._rates[job.number].append(job.per_s)
        for number in self._rates.keys() - {job.number for job in view.jobs}:
            del self._rates[number]

    def press(self, key: str) -> None:
        """Follow a key."""
        if key == "r":
            self._reversed = not self._reversed
        elif key == "a":
            self._all = not self._all
        elif key in BY_KEY:
            self._order, self._reversed = BY_KEY[key], False

    def jobs(self) -> list[JobRow]:
        """Return the jobs that are shown, in order."""
        assert self._view is not None
        jobs = [job for job in self._view.jobs if self._all or job.sessions or job.at_work]
        return sorted(jobs, key=ORDERS[self._order].first, reverse=self._reversed)

    def shown(self) -> RenderableType:
        """Return what is on the screen."""
        assert self._view is not None
        width, height = self._console.size
        head: list[RenderableType] = [self._title(), self._graphs(), ""]
        # Title, six lines, an empty one, heads of the table, the last line.
        room = max(height - 10 - (self.error is not None), 1)
        jobs = self.jobs()
        keys = "  ".join(f"{order.key} {name}" for name, order in ORDERS.items())
        more = f"{len(jobs) - room:,} more; " if len(jobs) > room else ""
        direction = " reversed" if self._reversed else ""
        foot = Text(f"{more}by {self._order}{direction}; {keys}  r reverse  a all  q end", "dim")
        foot.no_wrap, foot.overflow = True, "ellipsis"
        table = screen.jobs_table(jobs[:room], self._columns(width))
        return Group(*head, table, foot)

    def _title(self) -> RenderableType:
        assert self._view is not None
        totals = self._view.totals
        title = Text(
            f"ffserve {totals.version}, up {duration(totals.uptime_s)}, engine {totals.engine}, "
            f"{time.strftime('%H:%M:%S')}",
            "bold",
        )
        if self.error is None:
            return title
        return Group(title, Text(printable(self.error), screen.WRONG, overflow="ellipsis"))

    def _graphs(self) -> Table:
        assert self._view is not None
        before = self._totals
        graphs = {
            "memory": graph([each.arena_used / max(each.arena_size, 1) for each in before], 1.0),
            "samples": graph([each.per_s for each in before]),
            "hit rate": graph([each.hit_rate_now for each in before], 1.0),
            "disk": graph([each.read_per_s for each in before]),
        }
        return screen.lines_of(self._view.totals, {k: v.rjust(GRAPH) for k, v in graphs.items()})

    def _columns(self, width: int) -> Sequence[screen.JobColumn]:
        some: list[screen.JobColumn] = [screen.JOB, screen.PER_S, ("", False, self._graph_of)]
        some += [screen.HITS, screen.DISK]
        some += [screen.EPOCH, screen.ENDS, screen.WAITS]
        if width >= WIDE:
            some[1:1] = [screen.USER]
            some[6:6] = [screen.MEMORY]
        if width >= WIDEST:
            some.append(screen.COMMAND)
        return some

    def _graph_of(self, job: JobRow) -> str:
        return graph(list(self._rates[job.number])).rjust(JOB_GRAPH)


def graph(values: Sequence[float | None], most: float = 0.0) -> str:
    """Draw values as bars; a gap where there is none.

    Args: most: the value of a full bar; 0: the largest of them.
    """
    top = most or max((value for value in values if value is not None), default=0.0)
    if not top:
        return " " * len(values)
    return "".join(
        " " if value is None else BARS[min(int(len(BARS) * value / top), len(BARS) - 1)]
        for value in values
    )
