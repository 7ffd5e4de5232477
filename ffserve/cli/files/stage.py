"""``ffserve stage``: remote files to a directory."""

from __future__ import annotations

from typing import Any

import click

from ffserve.cli import exit_code_of_all, report
from ffserve.cli.flags import json_option
from ffserve.cli.terminal import counted, print_json, progress
from ffserve.config import format_size
from ffserve.errors import FFServeError


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "-o", "--output", "directory", required=True, metavar="DIR", help="Where to put them."
)
@json_option
def stage(urls: tuple[str, ...], directory: str, as_json: bool) -> int:
    """Copy remote files to a local directory.

    URLs are files, patterns or directories of S3, HTTP and every other store that fsspec knows.
    Files of a directory keep their paths below it. A file appears under its name when it is
    complete. An interrupted run goes on where it ended; runs at the same time share the work; files
    that are there already are not fetched again.

    \b
      ffserve stage 's3://bucket/train-*.ffr' -o /scratch/train
    """
    from ffserve.store.public import Staging, plan_staging

    items = plan_staging(urls)
    total = sum(item.identity.size for item in items)
    with progress("staging", total, as_bytes=True) as shown:
        done = Staging(directory, items, shown.advance).run()
    bad = [each.error for each in done if each.error is not None]
    if as_json:
        print_json(
            [_facts(each.url, each.path, each.size, each.fetched, each.error) for each in done]
        )
    else:
        for error in bad:
            report(error)
        there = sum(not each.fetched for each in done) - len(bad)
        words = [f"{counted(len(done) - len(bad), 'file')}, {format_size(total)} in {directory}"]
        words += [f"{counted(there, 'file')} already there"] * bool(there)
        words += [f"{counted(len(bad), 'failed file')}"] * bool(bad)
        click.echo("; ".join(words))
    return exit_code_of_all(error.code for error in bad)


def _facts(
    url: str, path: str, size: int, fetched: bool, error: FFServeError | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {"url": url, "path": path, "size_bytes": size, "fetched": fetched}
    if error is not None:
        facts.update(error=error.code, message=str(error))
    return facts
