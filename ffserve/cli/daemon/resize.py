"""``ffserve resize``: change the size of a running daemon's arena."""

from __future__ import annotations

import time
from typing import Any

import click

from ffserve.cli.flags import json_option, socket_option
from ffserve.cli.terminal import print_json
from ffserve.config import format_size, parse_size
from ffserve.system.socket_path import find_socket

_POLL_S = 0.05
_PATIENCE_S = 1.0
"""After this time the command reports what it waits for."""


@click.command()
@click.argument("size", metavar="SIZE")
@socket_option
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait until the arena has its new size.  [default: --wait]",
)
@json_option
def resize(size: str, socket: str | None, wait: bool, as_json: bool) -> int:
    """Change the size of the daemon's arena while it serves.

    Only root and the daemon's user may do this. Growing ends when the memory has been allocated.
    Shrinking evicts samples and waits for leased ones; a later resize replaces one that waits.
    Interrupting this command does not interrupt the resize.

    \b
      ffserve resize 32GiB
      ffserve resize 2GiB --no-wait
    """
    from ffserve.client.public import Connection

    wanted = parse_size(size)
    connection = Connection(find_socket(socket), "resize")
    try:
        before = connection.status()["arena"]["size"]
        facts = connection.resize(wanted)
        target = facts["target"]
        patience, reported = time.monotonic() + _PATIENCE_S, False
        while wait and _under_way(facts):
            if facts["target"] != target:
                click.echo(
                    f"another resize replaced this one, to {format_size(facts['target'])}", err=True
                )
                break
            if not reported and facts["held"] and time.monotonic() > patience:
                reported = True
                click.echo(
                    f"waiting for {format_size(facts['held'])} of samples in use, "
                    f"{format_size(facts['leased'])} of them leased",
                    err=True,
                )
            time.sleep(_POLL_S)
            facts = connection.status()["arena"]
    finally:
        connection.close()
    if as_json:
        print_json(facts)
    elif _under_way(facts):
        to = format_size(facts["target"])
        if before == facts["target"]:
            click.echo(
                f"the arena has {to}, of which {format_size(facts['populated'])} are allocated"
            )
        else:
            click.echo(f"resizing the arena from {format_size(before)} to {to}")
    else:
        click.echo(f"the arena has {format_size(facts['size'])}")
    return 0


def _under_way(facts: dict[str, Any]) -> bool:
    return bool(facts["resizing"]) or facts["populated"] < facts["size"]
