"""Screens of `ffserve status` and `ffserve top`: an overview of a daemon as tables of rich.

Colours mark faults: red needs an administrator, yellow may need one. Texts of clients reach the
terminal as plain text (`printable`), never as markup.
"""

from __future__ import annotations

import functools
import pwd
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from ffserve.cli.terminal import counted, duration, percent, write_lines
from ffserve.config import format_size
from ffserve.errors import printable
from ffserve.server.status.overview import (
    FileRow,
    JobRow,
    LineRow,
    MemoryRow,
    Overview,
    PreparationRow,
    SlowRow,
    Totals,
    overview,
)

WRONG, CAREFUL, QUIET = "red", "yellow", "dim"
WAITS_CAREFUL, WAITS_WRONG = 0.2, 0.5
"""A job is marked if it waits for at least this share of its time."""
NAME_LENGTH, USER_LENGTH = 14, 8
"""The names of jobs and users have at most this many characters in tables."""
JOBS_SHOWN, ENDED_SHOWN, ROWS_SHOWN, LINES_SHOWN = 5, 3, 4, 3
"""`ffserve status` shows at most this many jobs, names of jobs that have ended, rows of other
tables, and lines of the log; all of them with --all."""
WIDTH = 80
"""The width of a terminal that does not report its own."""
UNBOUNDED = 10_000
"""The width where the output is not a terminal: nothing is cut."""
WAITED = 0.1
"""The reason is shown of a job that waits for at least this share of its time."""

Row = TypeVar("Row")

Column = tuple[str, bool]
"""Its head, and whether it is aligned to the right."""


def amount(value: float) -> str:
    """Return a number in at most five characters: ``950``, ``12.3k``, ``1.23M``."""
    if value < 999.5:
        return f"{value:.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if value < 999.5:
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f}{unit}"
    return f"{value:.0e}"


def share(part: float | None, style: str = "") -> Text:
    """Return a share without decimals; a dash if there is none."""
    return Text("-" if part is None else f"{100 * part:.0f} %", style)


def hit_rate(rate: float | None) -> str:
    """Return a hit rate; a dash without samples."""
    return "-" if rate is None else percent(rate, 1)


@functools.cache
def user_name(uid: int) -> str:
    """Return the name of a user, or the number."""
    if uid < 0:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def table(heads: Iterable[Column], rows: Iterable[Sequence[Text | str]]) -> Table:
    """Return a table; where the screen is not wide enough the last column is cut."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET)
    columns = list(heads)
    for place, (head, right) in enumerate(columns):
        # Columns that may wrap give way first; no text does.
        last = place == len(columns) - 1
        justify: JustifyMethod = "right" if right else "left"
        made.add_column(_text(head), justify=justify, no_wrap=not last)
    for row in rows:
        made.add_row(*map(_text, row))
    return made


def _text(cell: Text | str) -> Text:
    text = cell if isinstance(cell, Text) else Text(cell)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def lines_of(totals: Totals, graphs: Mapping[str, str] | None = None) -> Table:
    """Return the daemon as a whole, one subject per line, some of them with a graph."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(style=QUIET, no_wrap=True)
    if graphs is not None:
        made.add_column(no_wrap=True)
    made.add_column()  # only this one gives way; see `table`
    for name, line in (
        ("memory", _memory_line(totals)),
        ("samples", _sample_line(totals)),
        ("hit rate", _hit_line(totals)),
        ("disk", _disk_line(totals)),
        ("sessions", _session_line(totals)),
        ("errors", _error_line(totals)),
    ):
        graph = [] if graphs is None else [_text(graphs.get(name, ""))]
        made.add_row(_text(name), *graph, _text(line))
    return made


def _memory_line(totals: Totals) -> Text:
    used, size = totals.arena_used, totals.arena_size
    line = Text(f"{format_size(used)} of {format_size(size)} ({percent(used, size)})")
    if totals.arena_target != size:
        line.append(f", resizing to {format_size(totals.arena_target)}", CAREFUL)
    if totals.arena_held:
        line.append(f" when {format_size(totals.arena_held)} are released", CAREFUL)
    return line.append(f"; {amount(totals.evicted)} samples evicted")


def _sample_line(totals: Totals) -> Text:
    now = f"{amount(totals.per_s)} per second now; " if totals.per_s else ""
    return Text(f"{now}{amount(totals.samples)} in all")


def _hit_line(totals: Totals) -> Text:
    now = f"{hit_rate(totals.hit_rate_now)} now; " if totals.per_s else ""
    return Text(f"{now}{hit_rate(totals.hit_rate)} in all")


def _disk_line(totals: Totals) -> Text:
    now = f"{format_size(totals.read_per_s)} per second now; " if totals.read_per_s else ""
    queue = f"{amount(totals.in_flight)} in flight, {amount(totals.queued)} queued"
    in_all = f"{format_size(totals.read_size)} in {amount(totals.reads)} reads in all"
    return Text(f"{now}{queue}; {in_all}")


def _session_line(totals: Totals) -> Text:
    style = CAREFUL if totals.sessions_short else ""
    most = f" of {totals.most_sessions:,}" if totals.most_sessions else ""
    line = Text().append(f"{totals.sessions:,}{most}", style)
    line.append(f"; {counted(totals.requests, 'request')}")
    return _noted(
        line,
        (totals.blocked, f", {totals.blocked:,} of them wait for memory", CAREFUL),
        (totals.refused, f"; {counted(totals.refused, 'client')} refused", CAREFUL),
        (totals.cut_off, f"; {totals.cut_off:,} cut off", CAREFUL),
    )


def _error_line(totals: Totals) -> Text:
    if not (totals.errors or totals.failed or totals.corrected):
        return Text("none")
    line = Text().append(counted(totals.errors, "error"), WRONG if totals.errors else "")
    line.append(f" of jobs; {counted(totals.failed, 'block')} not read")
    wrong = f"; {counted(totals.checksum_failures, 'checksum')} wrong"
    return _noted(
        line,
        (totals.checksum_failures, wrong, WRONG),
        (totals.corrected, f"; {totals.corrected:,} right when read again", CAREFUL),
    )


def _noted(line: Text, *notes: tuple[int, str, str]) -> Text:
    """Append notes whose number is not 0: number, text, style."""
    for number, text, style in notes:
        if number:
            line.append(text, style)
    return line


# ---- jobs --------------------------------------------------------------------------------------


def waiting(job: JobRow) -> Text:
    """Return how much of its time a job waited lately, and why most of that."""
    waited, cause = job.waited, job.cause
    style = WRONG if waited >= WAITS_WRONG else CAREFUL if waited >= WAITS_CAREFUL else ""
    return share(waited, style).append("" if cause is None else f" {cause}")


def epoch(job: JobRow) -> str:
    """Return the position of a job: epoch and part of it."""
    number = "" if job.epoch is None else f"{job.epoch} "
    return number + ("" if job.done is None else f"{100 * job.done:.0f} %")


def name_of(job: JobRow) -> Text:
    """Return the label of a job: quiet if it is idle, red if it has errors."""
    label = job.label if len(job.label) <= NAME_LENGTH else job.label[: NAME_LENGTH - 1] + "…"
    return Text(label, WRONG if job.errors else "" if job.at_work else QUIET)


JobColumn = tuple[str, bool, Callable[[JobRow], Text | str]]
JOB: JobColumn = ("job", False, name_of)
USER: JobColumn = ("user", False, lambda job: user_name(job.user)[:USER_LENGTH])
PER_S: JobColumn = ("per s", True, lambda job: amount(job.per_s))
HITS: JobColumn = ("hits", True, lambda job: hit_rate(job.hit_rate_now))
ALL_HITS: JobColumn = ("in all", True, lambda job: hit_rate(job.hit_rate))
DISK: JobColumn = ("disk/s", True, lambda job: format_size(job.read_per_s))
MEMORY: JobColumn = ("memory", True, lambda job: format_size(job.memory))
EPOCH: JobColumn = ("epoch", True, epoch)
ENDS: JobColumn = ("ends in", True, lambda job: "" if job.ends_s is None else duration(job.ends_s))
WAITS: JobColumn = ("waits", True, waiting)
COMMAND: JobColumn = ("command", False, lambda job: Text(job.command or job.data, QUIET))
JOBS: tuple[JobColumn, ...] = (JOB, USER, PER_S, HITS, ALL_HITS, EPOCH, ENDS, WAITS)


def jobs_table(jobs: Sequence[JobRow], columns: Sequence[JobColumn] = JOBS) -> Table:
    """Return a row per job."""
    heads = [(head, right) for head, right, _ in columns]
    return table(heads, ([cell(job) for *_, cell in columns] for job in jobs))


def ended_line(jobs: Sequence[JobRow], shown: int) -> Text:
    """Return the names of the jobs that ended last."""
    names = [f"{name_of(job).plain} {duration(job.idle_s)} ago" for job in jobs[:shown]]
    more = f", and {len(jobs) - shown:,} more" if len(jobs) > shown else ""
    return Text(f"ended: {', '.join(names)}{more} (--all shows them)", QUIET)


def origins_table(jobs: Sequence[JobRow]) -> Table:
    """Return where each job comes from, and what it reads."""
    heads = (("job", False), ("pid", True), ("order", False), ("read", True), ("at best", True))
    return table(
        [*heads, ("command and data", False)],
        (
            [
                name_of(job),
                "-" if job.pid is None else str(job.pid),
                job.order[:12],
                format_size(job.read_size),
                format_size(job.alone_size),
                Text("\n".join(filter(None, (job.command, job.data)))),
            ]
            for job in jobs
        ),
    )


CAUSES = ("disk", "queue", "taken", "decode", "memory", "origin")
_CAUSE_HEADS = ("disk", "queue", "memory taken", "decode", "no memory", "origin", "trainer")


def causes_table(jobs: Sequence[JobRow]) -> Table:
    """Return why jobs waited in the last minute."""
    rows = []
    for job in jobs:
        cells = [share(job.waits.get(cause, 0.0)) for cause in CAUSES]
        if job.waits.get("taken") and job.taken_by:
            cells[2].append(f" by {job.taken_by[:NAME_LENGTH]}")
        rows.append([name_of(job), *cells, share(max(1.0 - job.waited, 0.0))])
    return table([("time of job", False), *((head, True) for head in _CAUSE_HEADS)], rows)


# ---- memory, files, log ------------------------------------------------------------------------


def memory_table(rows: Sequence[MemoryRow], arena_size: int) -> Table:
    """Return how much memory each user has."""
    return table(
        [
            ("size", True), ("of the arena", True), ("guaranteed", True), ("policy", False),
            ("memory of jobs", False),
        ],
        (
            [
                format_size(row.used),
                percent(row.used, arena_size),
                format_size(row.floor),
                row.rule,
                ", ".join(row.jobs) or "(ended)",
            ]
            for row in rows
        ),
    )  # fmt: skip


def files_table(rows: Sequence[FileRow]) -> Table:
    """Return what is in memory of each file."""
    return table(
        [
            ("samples", True), ("size", True), ("in memory", True), ("sessions", True),
            ("damaged", True), ("file", False),
        ],
        (
            [
                f"{row.count:,}",
                format_size(row.size),
                "-" if row.cached is None else percent(row.cached, 1),
                str(row.sessions),
                Text(f"{row.damaged:,}", WRONG) if row.damaged else "",
                row.path,
            ]
            for row in rows
        ),
    )  # fmt: skip


def slow_table(rows: Sequence[SlowRow]) -> Table:
    """Return files with slow reads."""
    return table(
        [("slow reads", True), ("longest", True), ("last", True), ("file", False)],
        (
            [
                Text(f"{row.reads:,}", CAREFUL),
                duration(row.longest_s),
                f"{duration(row.last_s)} ago",
                row.path,
            ]
            for row in rows
        ),
    )


def log_table(rows: Sequence[LineRow]) -> Table:
    """Return lines of the log."""
    return table(
        [("time", False), ("warnings and errors", False)],
        (
            [
                time.strftime("%b %d %H:%M:%S", time.localtime(row.time)),
                Text(row.text, CAREFUL if row.level == "warning" else WRONG),
            ]
            for row in rows
        ),
    )


def preparations_table(rows: Sequence[PreparationRow]) -> Table:
    """Return what sharing prepared samples saves."""
    return table(
        [
            ("prepared", True), ("found", True), ("each", True), ("saved", True),
            ("shared", False), ("preparation", False),
        ],
        (
            [
                f"{row.prepared:,}",
                f"{row.found:,}",
                f"{1000 * row.each_s:.2f} ms",
                duration(row.saved_s),
                Text("yes") if row.shared else Text("no: not deterministic", CAREFUL),
                row.name,
            ]
            for row in rows
        ),
    )  # fmt: skip


# ---- the screen of `ffserve status` ------------------------------------------------------------


def print_status(facts: dict[str, Any], *, everything: bool = False) -> None:
    """Print a REPORT; on a terminal what is too wide is cut.

    Args: everything: all rows, also of jobs that have ended.
    Raises: as `overview`.
    """
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDTH, 24)).columns if terminal else UNBOUNDED
    console = Console(width=width)
    with console.capture() as capture:
        for part in status_parts(facts, overview(facts), everything=everything):
            console.print(part)
    write_lines(line.rstrip() for line in capture.get().split("\n")[:-1])


def status_parts(
    facts: dict[str, Any], view: Overview, *, everything: bool = False
) -> list[RenderableType]:
    """Return what is printed, one below the other."""
    totals = view.totals
    parts: list[RenderableType] = [
        Text(
            f"ffserve {totals.version}, pid {facts['pid']}, up {duration(totals.uptime_s)}, "
            f"engine {totals.engine}",
            "bold",
        ),
        Text(f"{printable(facts['socket'])}, roots {printable(' '.join(facts['roots']))}"),
        lines_of(totals),
    ]

    def add(rows: Sequence[Row], most: int, *tables: Callable[[Sequence[Row]], Table]) -> None:
        shown, more = (rows, 0) if everything else (rows[:most], len(rows) - most)
        for table in tables if shown else ():
            parts.extend(("", table(shown)))
        if more > 0:
            parts.append(Text(f"and {more:,} more (--all shows them)", QUIET))

    # Clients that opened no data set, such as this command, are no jobs.
    ended = [job for job in view.jobs if job.has_ended]
    jobs = view.jobs if everything else [job for job in view.jobs if not job.has_ended]
    add(jobs, JOBS_SHOWN, jobs_table, origins_table)
    if ended and not everything:
        parts += ["", ended_line(ended, ENDED_SHOWN)]
    waiting = [job for job in jobs[:JOBS_SHOWN] if job.waited >= WAITED]
    add(waiting, JOBS_SHOWN, causes_table)
    add(view.memory, ROWS_SHOWN, lambda rows: memory_table(rows, totals.arena_size))
    add(view.files, ROWS_SHOWN, files_table)
    add(view.slow, ROWS_SHOWN, slow_table)
    add(view.preparations, ROWS_SHOWN, preparations_table)
    add(view.lines[:LINES_SHOWN], LINES_SHOWN, log_table)
    return parts
