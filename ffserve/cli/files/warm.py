"""``ffserve warm``: files into the daemon's store and memory, or into the store of this user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from ffserve.cli import exit_code_of_all, report
from ffserve.cli.flags import json_option, socket_option
from ffserve.cli.terminal import counted, print_json, progress
from ffserve.config import format_size
from ffserve.errors import FFServeError, ReadError, ServerUnavailable

STEP_SIZE = 32 << 20
"""About this many bytes are read at once."""
STEP_COUNT = 4096


@dataclass(slots=True)
class WarmedFiles:
    """The result of warming some files.

    rows: for JSON, one per file. text: for people. errors: of files or samples. left: bytes that
    the store has no room for.
    """

    rows: list[dict[str, Any]]
    text: str
    errors: list[FFServeError]
    left: int = 0


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@socket_option
@json_option
def warm(paths: tuple[str, ...], socket: str | None, as_json: bool) -> int:
    """Bring record files into store and memory before a job starts.

    Paths are files, patterns or directories, local ones and URLs. A daemon reads them: as much as
    fits into its memory, and remote files as a whole into its store, if it has one. Without a
    daemon remote files go into the store of this user. What is there is not read again. If a store
    has no room for all, the rest is left out, and the exit code is 1.

    \b
      ffserve warm 's3://bucket/train-*.ffr'
      ffserve warm /data/train                  # into the daemon's memory
    """
    from ffserve import formats
    from ffserve.client import public as client
    from ffserve.dataset.paths import expand_paths
    from ffserve.store.urls import is_url

    files = expand_paths(paths, suffixes=formats.suffixes)
    local = [path for path in files if not is_url(path)]
    remote = [path for path in files if is_url(path)]
    daemon: dict[str, Any] | None = None
    try:
        daemon = client.status(socket)
    except ServerUnavailable:
        if local or socket is not None:
            raise  # there is no other memory that outlives this process
    done = [_through_daemon(local, socket, daemon)] if local and daemon else []
    if remote:
        done.append(_remote(remote, socket, daemon))
    errors = [error for outcome in done for error in outcome.errors]
    if as_json:
        print_json([row for outcome in done for row in outcome.rows])
    else:
        for error in errors:
            report(error)
        for outcome in done:
            click.echo(outcome.text)
    left = sum(outcome.left for outcome in done)
    return exit_code_of_all(error.code for error in errors) or int(left > 0)


def _remote(paths: list[str], socket: str | None, daemon: dict[str, Any] | None) -> WarmedFiles:
    if daemon is not None and daemon["store"]["directory"]:
        try:
            return _through_daemon(paths, socket, daemon)
        except ReadError as error:
            click.echo(f"the daemon is not used: {error}", err=True)
    return _into_own_store(paths)


def _through_daemon(paths: list[str], socket: str | None, daemon: dict[str, Any]) -> WarmedFiles:
    """Read files in order, as a job that has announced this. Raises: as `ffserve.open`."""
    import numpy as np

    import ffserve
    from ffserve.client import public as client
    from ffserve.store.urls import is_url, shown

    errors: list[FFServeError] = []
    limit = daemon["arena"]["limit"]
    with ffserve.open(paths, server=socket or "require") as reader:
        sizes = {shown(shard.path): shard.size for shard in reader.shards}
        count, size = len(reader), sum(sizes.values())
        is_remote = is_url(paths[0])
        if not is_remote and size > limit:  # more would only push out what came before
            count = count * limit // size
        reader.announce(np.arange(count))
        step = max(min(STEP_COUNT, STEP_SIZE * count // max(size, 1)), 1)
        with progress("warming", count) as bar:
            for first in range(0, count, step):
                some = range(first, min(first + step, count))
                found = reader.read(some, errors="return")
                errors += [each for each in found if isinstance(each, FFServeError)]
                bar.advance(len(some))
        now = client.status(socket)
        store, held = now["store"], {each["path"]: each["cached_size"] for each in now["shards"]}
    left = max(size - store["limit"], 0) if is_remote else 0
    rows = [
        {"url": path, "size_bytes": length, "in_memory_bytes": held.get(path)}
        for path, length in sizes.items()
    ]
    in_memory = sum(held.get(path, 0) for path in sizes)
    words = [f"{counted(len(sizes), 'file')}, {format_size(size)}"]
    words += [f"in the store {store['directory']}"] * is_remote
    words += [f"{format_size(in_memory)} in the memory of the daemon"]
    words += [f"the store has no room for {format_size(left)}"] * bool(left)
    words += [f"{counted(len(errors), 'failed sample')}"] * bool(errors)
    return WarmedFiles(rows, "; ".join(words), errors, left)


def _into_own_store(paths: list[str]) -> WarmedFiles:
    """Fetch files into the store of this user."""
    from ffserve.store.public import warm_up

    with progress("warming", len(paths)) as shown:
        done = warm_up(paths, lambda: shown.advance(1))
    errors = [each.error for each in done if each.error is not None]
    left = sum(each.left for each in done)
    rows = []
    for each in done:
        facts: dict[str, Any] = {
            "url": each.url, "path": each.path, "size_bytes": each.size,
            "fetched": each.fetched > 0, "fetched_bytes": each.fetched,
            "left_out_bytes": each.left,
        }  # fmt: skip
        if each.error is not None:
            facts.update(error=each.error.code, message=str(each.error))
        rows.append(facts)
    words = [f"{counted(len(done) - len(errors), 'file')}"]
    words[0] += f", {format_size(sum(each.size for each in done))}"
    words += [f"{format_size(sum(each.fetched for each in done))} fetched"]
    words += [f"the store has no room for {format_size(left)}"] * bool(left)
    return WarmedFiles(rows, "; ".join(words), errors, left)
