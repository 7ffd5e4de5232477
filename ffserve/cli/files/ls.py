"""``ffserve ls``: numbers, sizes, checksums and names of the samples of record files."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np

from ffserve.cli import report
from ffserve.cli.files.record_files import opened_by_member
from ffserve.cli.flags import format_option, json_option
from ffserve.cli.terminal import write_json_rows, write_lines
from ffserve.errors import FFServeError, outside, printable

if TYPE_CHECKING:
    import ffserve

STEP_COUNT = 16_384
"""This many samples are listed at a time, since the sizes of samples in chunks must be read."""


class _Row(NamedTuple):
    """One sample. checksum: stored in the file, in RecordIO that of its chunk; None: there is
    none."""

    path: str
    sample_index: int
    size: int
    checksum: int | None
    name: str | None

    def facts(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "index": self.sample_index,
            "size_bytes": self.size,
            "checksum": self.shown_checksum,
            "name": self.name,
        }

    @property
    def shown_checksum(self) -> str | None:
        return None if self.checksum is None else f"{self.checksum:08x}"


def _rows(reader: ffserve.Reader, names: list[str], start: int, stop: int) -> Iterator[_Row]:
    """Yield the samples [start, stop). `names`: of all samples, or none."""
    shards = reader.shards
    for position, shard in enumerate(shards):
        first, end = max(start, shard.first), min(stop, shard.first + shard.count)
        if first >= end:
            continue
        checksums = reader.tables(position)[2]
        for low in range(first, end, STEP_COUNT):
            indices = np.arange(low, min(low + STEP_COUNT, end))
            for index, size in zip(indices.tolist(), reader.sizes(indices).tolist(), strict=True):
                name = (names[index] or None) if names else None
                known = None if shard.format == "tar" else int(checksums[index - shard.first])
                yield _Row(shard.path, index, size, known, name)


def _lines(rows: Iterable[_Row], *, several: bool) -> Iterator[str]:
    """Yield the lines of the screen: a head per file, a line per sample."""
    path = ""
    for row in rows:
        if row.path != path:
            if several:
                yield click.style(("\n" if path else "") + printable(row.path), bold=True)
            if several or not path:
                yield click.style(f"{'index':>10}  {'size':>12}  checksum  name", dim=True)
            path = row.path
        name = "  " + printable(row.name) if row.name else ""
        yield f"{row.sample_index:>10}  {row.size:>12}  {row.shown_checksum or '-':8}{name}"


def _show(lines: Iterator[str]) -> None:
    """Write lines to standard output, on a terminal through the user's pager."""
    if sys.stdout.isatty():
        # As git does: end at once if everything fits the screen, and leave it there.
        os.environ.setdefault("LESS", "FRX")
        first = next(lines, None)
        if first is not None:  # click ends the last line
            click.echo_via_pager(itertools.chain([first], ("\n" + line for line in lines)))
        return
    write_lines(lines)


@click.command()
@click.argument("file")
@click.option(
    "--start", type=click.IntRange(0), default=0, show_default=True, metavar="INDEX",
    help="First sample to list.",
)  # fmt: skip
@click.option(
    "--count", type=click.IntRange(0), metavar="N", help="Number of samples.  [default: all]"
)  # fmt: skip
@format_option
@json_option
def ls(file: str, start: int, count: int | None, format_name: str | None, as_json: bool) -> int:
    """List the samples of a record file: index, size in bytes, checksum, and name.

    FILE is a file, a directory, a pattern or a URL. A file made by 'ffserve pack' has names. Of
    a tar file the members are listed, by their numbers; it has no checksums of them.
    Samples are not read, except to learn their sizes in RecordIO. The
    checksum is the one that the file stores, in RecordIO of the whole chunk. If the names are
    damaged, the list has none, and the exit code is 1.
    On a terminal the list is shown in your pager ($PAGER).

    \b
      ffserve ls photos.ffr
      ffserve ls photos.ffr --start 1000 --count 100
      ffserve ls --json photos.ffr | jq -r '.[].name'
    """
    with opened_by_member(file, format_name, "off") as reader:
        if start > len(reader):
            raise outside(start, len(reader)).located(path=file)
        stop = len(reader) if count is None else min(start + count, len(reader))
        code, names = 0, list[str]()
        try:
            names = reader.names
        except FFServeError as error:  # they are damaged
            code = report(error)
        rows, several = _rows(reader, names, start, stop), len(reader.shards) > 1
        if as_json:
            write_json_rows(row.facts() for row in rows)
        else:
            _show(_lines(rows, several=several))
    return code
