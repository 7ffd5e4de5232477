"""``index``: walk over files that have no tables, so that opening them need not."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from ffserve.cli import exit_code_of_all, report
from ffserve.cli.recordfiles import format_option, jobs_option, json_option
from ffserve.cli.terminal import counted, print_json, progress
from ffserve.errors import FFServeError, UsageError


@click.command()
@click.argument("files", nargs=-1, required=True)
@jobs_option
@click.option("--renew", is_flag=True, help="Walk also over files whose index is sound.")
@format_option
@json_option
def index(
    files: tuple[str, ...], jobs: int, renew: bool, format_name: str | None, as_json: bool
) -> int:
    """Find the records of files that have no tables of their own (TFRecord), and keep that.

    FILES are files, directories or patterns. The index of a file lies beside it as .NAME.ffx, or
    in the user's cache directory where nothing may be written beside it. It is checked before it
    is used, and made again when the file has changed. Files are also indexed when they are first
    opened; this does it in advance, for all users at once.

    \b
      ffserve index /data/tfrecords
    """
    from ffserve.cli.pack import total_size
    from ffserve.dataset import expand_paths
    from ffserve.formats import suffixes
    from ffserve.shardfile import write_index_file

    def walk(path: str) -> dict[str, Any]:
        try:
            found = write_index_file(path, format_name, renew=renew)
        except UsageError:
            raise
        except FFServeError as error:
            if not as_json:
                report(error)
            return {"path": path, "error": error.code, "message": str(error)}
        finally:
            shown.advance(os.path.getsize(path) if os.path.isfile(path) else 0)
        if found is None:
            return {"path": path, "index": None}
        return {"path": path, "samples": found[0].count, "index": found[1]}

    paths = expand_paths(files, suffixes=suffixes())
    with (
        progress("indexing", total_size(paths), as_bytes=True) as shown,
        ThreadPoolExecutor(jobs) as pool,
    ):
        facts = list(pool.map(walk, paths))
    bad = [fact for fact in facts if "error" in fact]
    if as_json:
        print_json(facts)
    else:
        samples = sum(fact.get("samples", 0) for fact in facts)
        indexed = sum(fact.get("index") is not None for fact in facts)
        plain = len(facts) - indexed - len(bad)
        words = [f"{counted(indexed, 'file')} indexed, {counted(samples, 'sample')}"]
        words += [f"{counted(plain, 'file')} without need of an index"] * bool(plain)
        words += [f"{counted(len(bad), 'unreadable file')}"] * bool(bad)
        click.echo("; ".join(words))
    return exit_code_of_all(fact["error"] for fact in bad)
