"""``ffserve index``: index files for record files without tables, such as TFRecord."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from ffserve.cli import exit_code_of_all, report
from ffserve.cli.files.record_files import total_size
from ffserve.cli.flags import format_option, jobs_option, json_option
from ffserve.cli.terminal import counted, print_json, progress
from ffserve.errors import FFServeError, UsageError


@click.command()
@click.argument("files", nargs=-1, required=True)
@jobs_option
@click.option("--renew", is_flag=True, help="Scan files again that have a valid index.")
@format_option
@json_option
def index(
    files: tuple[str, ...], jobs: int, renew: bool, format_name: str | None, as_json: bool
) -> int:
    """Scan files that have no tables of their own (TFRecord), and write index files.

    FILES are files, directories, patterns or URLs. The index of a file is written beside it as
    .NAME.ffx, or in the user's cache directory if its directory is not writable; that of a remote
    file comes into your store, with the file itself. An index is checked before it is used, and
    rewritten when its file has changed. Files are also indexed when they are first opened; this
    command does it in advance, and beside a file for all users.

    \b
      ffserve index /data/tfrecords
    """
    from ffserve.dataset.paths import expand_paths
    from ffserve.disk.shardfile import write_index_file
    from ffserve.formats import suffixes
    from ffserve.formats.base import members_of
    from ffserve.store.public import is_url, keep_index

    def scan(path: str) -> dict[str, Any]:
        done = 0

        def seen(end: int) -> None:
            nonlocal done
            shown.advance(end - done)
            done = end

        write = keep_index if is_url(path) else write_index_file
        try:
            found = write(path, format_name, renew=renew, seen=seen)
        except FFServeError as error:
            if isinstance(error, UsageError) and error.path is None:  # about the options
                raise
            if not as_json:
                report(error)
            return {"path": path, "error": error.code, "message": str(error)}
        finally:
            seen(os.path.getsize(path) if os.path.isfile(path) else 0)
        if found is None:
            return {"path": path, "index": None}
        members = members_of(found[0])
        samples = found[0].count if members is None else members.samples
        return {"path": path, "samples": samples, "index": found[1]}

    paths = expand_paths(files, suffixes=suffixes())
    with (
        progress("indexing", total_size(paths), as_bytes=True) as shown,
        ThreadPoolExecutor(jobs) as pool,
    ):
        facts = list(pool.map(scan, paths))
    bad = [fact for fact in facts if "error" in fact]
    if as_json:
        print_json(facts)
    else:
        samples = sum(fact.get("samples", 0) for fact in facts)
        indexed = sum(fact.get("index") is not None for fact in facts)
        plain = len(facts) - indexed - len(bad)
        words = [f"{counted(indexed, 'file')} indexed, {counted(samples, 'sample')}"]
        words += [f"{counted(plain, 'file')} with tables"] * bool(plain)
        words += [f"{counted(len(bad), 'unreadable file')}"] * bool(bad)
        click.echo("; ".join(words))
    return exit_code_of_all(fact["error"] for fact in bad)
