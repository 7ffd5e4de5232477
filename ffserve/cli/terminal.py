"""Output of the commands: progress, tables, JSON. rich is imported when it is needed."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ffserve.config import format_size
from ffserve.errors import printable

LINE_EVERY_S = 5.0
"""Interval of progress lines where no bar can be drawn."""

BARS = "▁▂▃▄▅▆▇█"


class Progress:
    """The progress of long work; threads may call it."""

    def __init__(self, advance: Callable[[int], None], line: Callable[[str], None]) -> None:
        self.advance = advance
        """Add an amount to the work that is done."""
        self.line = line
        """Write a line of the command's output without disturbing the bar; see `printable`."""


@contextmanager
def progress(label: str, total: int, *, as_bytes: bool = False) -> Iterator[Progress]:
    """Show the progress of long work on standard error: a bar on a terminal, lines elsewhere.

    Args:
        label: the work, such as "packing".
        total: the amount of work.
        as_bytes: amounts are bytes.
    """
    if sys.stderr.isatty():
        from rich import progress as bars
        from rich.console import Console

        amount: bars.ProgressColumn = (
            bars.DownloadColumn(binary_units=True) if as_bytes else bars.MofNCompleteColumn()
        )
        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), amount)
        with bars.Progress(
            *columns, bars.TimeRemainingColumn(), console=Console(stderr=True), transient=True
        ) as bar:
            task = bar.add_task(label, total=total)

            def above_the_bar(text: str) -> None:
                bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

            yield Progress(
                lambda more: bar.advance(task, more),
                above_the_bar if sys.stdout.isatty() else _line,
            )
        return

    lock = threading.Lock()
    done = 0
    reported = time.monotonic()

    def advance(more: int) -> None:
        nonlocal done, reported
        with lock:
            done += more
            now = time.monotonic()
            if now - reported < LINE_EVERY_S:
                return
            reported = now
            shown = format_size if as_bytes else "{:,}".format
            click.echo(f"{label}: {shown(done)} of {shown(total)}", err=True)

    yield Progress(advance, _line)


def _line(text: str) -> None:
    click.echo(printable(text))


def print_json(facts: Any) -> None:
    """Write facts as JSON, one document, keys in the order given."""
    click.echo(_json(json.dumps(facts, indent=2, ensure_ascii=False)))


def write_json_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as a JSON array, one per line, as they come."""
    texts = (_json(json.dumps(row, ensure_ascii=False)) for row in rows)
    last = next(texts, None)
    if last is None:
        click.echo("[]")
        return

    def lines() -> Iterator[str]:
        nonlocal last
        yield "["
        for text in texts:
            yield f"  {last},"
            last = text
        yield f"  {last}"
        yield "]"

    write_lines(lines())


def write_lines(lines: Iterable[str]) -> None:
    """Write many lines, some at a time."""
    lines = iter(lines)
    while some := list(itertools.islice(lines, 1024)):
        click.echo("\n".join(some))


def _json(text: str) -> str:
    # File names that are not UTF-8 have lone surrogates, which JSON writes as escapes.
    return text.encode("utf-8", "backslashreplace").decode()


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Write a table of plain text; the first column is aligned to the left, all others right."""
    lines = [heads, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for number, line in enumerate(lines):
        cells = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text = "  ".join(cells).rstrip()
        click.echo(click.style(text, dim=True) if number == 0 else text)


def print_facts(facts: list[tuple[str, str]]) -> None:
    """Write names and values, one pair per line."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"  {name.ljust(width)}  {printable(value)}")


def histogram(counts: list[int]) -> str:
    """Draw counts as a line of bars; every count above 0 is visible."""
    top = max(counts, default=0)
    if top == 0:
        return ""
    return "".join(" " if n == 0 else BARS[min(7, n * 8 // (top + 1))] for n in counts)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 file``, ``2,000 files``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return seconds as text: ``0.3 s``, ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if 0 < seconds < 9.95 else f"{seconds:.0f} s"


def percent(part: int | float, whole: int | float) -> str:
    """Return a share as text; a dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
