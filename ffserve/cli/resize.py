"""``ffserve resize``: another size for a running daemon's arena."""

from __future__ import annotations

import time
from typing import Any

import click

from ffserve.cli.terminal import print_json
from ffserve.config import format_size, parse_size
from ffserve.socket_path import find_socket

_POLL_S = 0.05
_PATIENCE_S = 1.0
"""After which it says what it waits for."""


@click.command()
@click.argument("size", metavar="SIZE")
@click.option("--socket", metavar="PATH", help="The daemon's socket; found by itself if left out.")
@click.option("--wait/--no-wait", default=True, help="Wait until it is done.  [default: --wait]")
@click.option("--json", "as_json", is_flag=True, help="Write what became of it as JSON.")
def resize(size: str, socket: str | None, wait: bool, as_json: bool) -> int:
    """Give the daemon's arena another size while it serves.

    Root may, and the user that the daemon runs as. Growing is done when the memory has been taken.
    Shrinking evicts samples, and waits for those that a process holds by a lease; a later resize
    takes the place of one that waits. Ending this command ends nothing.

    \b
      ffserve resize 32GiB
      ffserve resize 2GiB --no-wait
    """
    from ffserve.client.connection import Connection

    connection = Connection(find_socket(socket), "resize")
    try:
        facts = connection.resize(parse_size(size))
        before, target = facts["size"], facts["target"]
        patience, told = time.monotonic() + _PATIENCE_S, False
        while wait and _under_way(facts):
            if facts["target"] != target:
                click.echo(f"another resize took over: {format_size(facts['target'])}", err=True)
                break
            if not told and facts["held"] and time.monotonic() > patience:
                told = True
                click.echo(
                    f"waiting: {format_size(facts['held'])} of the arena hold samples in use, "
                    f"{format_size(facts['leased'])} are leased",
                    err=True,
                )
            time.sleep(_POLL_S)
            facts = connection.status()["arena"]
    finally:
        connection.close()
    if as_json:
        print_json(facts)
    elif _under_way(facts):
        click.echo(
            f"the arena is on its way from {format_size(before)} to {format_size(facts['target'])}"
        )
    else:
        click.echo(f"the arena has {format_size(facts['size'])} now")
    return 0


def _under_way(facts: dict[str, Any]) -> bool:
    return bool(facts["resizing"]) or facts["populated"] < facts["size"]
