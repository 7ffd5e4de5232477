"""``ffserve status``: the memory, files and jobs of a running daemon, on one screen."""

from __future__ import annotations

import click

from ffserve.cli.flags import json_option, socket_option
from ffserve.cli.terminal import print_json


@click.command()
@socket_option
@click.option(
    "--all", "everything", is_flag=True, help="Show every row, also of jobs that have ended."
)
@json_option
def status(socket: str | None, everything: bool, as_json: bool) -> int:
    """Show the daemon's memory, files and jobs.

    A hit is a sample that a job finds in shared memory without a request; jobs report hits once a
    second. What happens "now" is a mean of the last five seconds. The exit code is 3 when no daemon
    answers.

    \b
      ffserve status
      ffserve status --all
      ffserve status --json | jq '.jobs[] | {name, hit_rate}'
    """
    from ffserve.client import public as client

    facts = client.status(socket)
    if as_json:
        print_json(facts)
    else:
        from ffserve.cli.daemon.screen import print_status

        print_status(facts, everything=everything)
    return 0
