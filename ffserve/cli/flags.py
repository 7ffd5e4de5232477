"""Options that several commands have."""

from __future__ import annotations

import os

import click

format_option = click.option(
    "--format",
    "format_name",
    metavar="ffrecord|recordio|tfrecord|tar",
    help="Format of the files.  [default: by content, then suffix]",
)
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    default=min(4, os.cpu_count() or 1),
    show_default=True,
    help="Number of files to read at the same time.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
socket_option = click.option(
    "--socket",
    metavar="PATH",
    help="The daemon's socket.  [default: FFSERVE_SOCKET, else the usual place]",
)
