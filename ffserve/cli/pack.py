"""``ffserve pack``: many files into a few record files."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

import click

from ffserve.cli.terminal import counted, print_json, printable, progress
from ffserve.config import format_size


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="DIR|FILES...")
@click.option("-o", "--output", "out", required=True, metavar="OUT", help="What to write.")
@click.option(
    "--shards",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    help="Record files to write; with more than one, OUT is a directory.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=min(4, os.cpu_count() or 1),
    show_default=True,
    help="Processes; each writes one shard at a time.",
)
@click.option("--json", "as_json", is_flag=True, help="Write what was done as JSON.")
def pack(paths: tuple[str, ...], out: str, shards: int, jobs: int, as_json: bool) -> int:
    """Pack a directory or files into record files (FFRecord).

    Names are kept in one more sample at the end of each file, as ffrecord's PackedFolder has
    them. OUT takes its name when it is complete and on the disk; when anything fails, nothing is
    left of it.

    \b
      ffserve pack photos/ -o photos.ffr
      ffserve pack photos/ -o /data/photos --shards 64 --jobs 8
      ffserve cat photos.ffr cats/tom.jpg > tom.jpg
    """
    from ffserve.compat import packed_folder

    with progress("packing", total_size(paths), as_bytes=True) as shown:
        written = packed_folder.pack(
            paths, out, shards=shards, jobs=jobs, progress=lambda _count, size: shown.advance(size)
        )
    if as_json:
        print_json(
            {"paths": list(written.paths), "files": written.files, "size_bytes": written.bytes}
        )
    else:
        where = out if shards == 1 else f"{shards} files in {out}"
        files, size = counted(written.files, "file"), format_size(written.bytes)
        click.echo(f"{files}, {size}: {printable(where)}")
    return 0


def total_size(paths: Sequence[str]) -> int:
    """Return about how many bytes files and directories have; what cannot be looked at has none."""
    total = 0
    seen: set[tuple[int, int]] = set()
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        try:
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode):
                total += found.st_size
            elif stat.S_ISDIR(found.st_mode) and (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                waiting.extend(os.path.join(path, name) for name in os.listdir(path))
        except OSError:
            continue
    return total
