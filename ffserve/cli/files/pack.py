"""``ffserve pack``: pack many files into a few record files."""

from __future__ import annotations

import os

import click

from ffserve.cli.files.record_files import total_size
from ffserve.cli.terminal import counted, print_json, progress
from ffserve.config import format_size
from ffserve.errors import printable


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="DIR|FILES...")
@click.option(
    "-o", "--output", "out", required=True, metavar="OUT", help="Record file or directory to write."
)
@click.option(
    "--shards",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    help="Number of record files; if more than one, OUT is a directory.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=min(4, os.cpu_count() or 1),
    show_default=True,
    help="Number of processes; each writes one shard at a time.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it is an existing file.")
@click.option(
    "--labels", metavar="FILE",
    help="A .csv, .json or .parquet file with columns for each file, by its 'name'.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
def pack(
    paths: tuple[str, ...],
    out: str,
    shards: int,
    jobs: int,
    force: bool,
    labels: str | None,
    as_json: bool,
) -> int:
    """Pack a directory or files into record files (FFRecord).

    Names, and labels if there are any, are stored at the end of each file, as in ffrecord's
    PackedFolder; readers show the files only. A text or tar file becomes one sample, too: 'ffserve
    convert' makes one of each line or member. OUT takes its name when it is complete and on disk;
    after an error nothing of it remains.

    \b
      ffserve pack photos/ -o photos.ffr
      ffserve pack photos/ -o /data/photos --shards 64 --jobs 8
      ffserve pack photos/ -o photos.ffr --labels photos.csv
      ffserve cat photos.ffr cats/tom.jpg > tom.jpg
    """
    from ffserve import folders as packed_folders

    with progress("packing", total_size(paths), as_bytes=True) as shown:
        written = packed_folders.pack(
            paths,
            out,
            shards=shards,
            jobs=jobs,
            force=force,
            labels=labels,
            progress=lambda _count, size: shown.advance(size),
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
