"""``ffserve scrub``: find damage in record files at a limited rate, while the daemon is idle."""

from __future__ import annotations

import threading
import time

import click

from ffserve.cli.files.record_files import files_of
from ffserve.cli.files.verify import check_files
from ffserve.cli.flags import format_option, json_option, socket_option
from ffserve.config import parse_size
from ffserve.errors import ServerUnavailable, UsageError

LOOK_S = 1.0
"""Seconds between two checks whether the daemon has requests."""


class _Pace:
    """Pauses between reads: to keep the rate, and while the daemon has requests."""

    def __init__(self, rate: int, socket: str | None) -> None:
        self._rate = rate
        self._socket = socket
        self._asked: int | None = None
        self._looked_at = float("-inf")
        self._lock = threading.Lock()

    def pause(self, size: int) -> None:
        """Call this with the bytes of each part that is read."""
        with self._lock:
            time.sleep(size / self._rate)
            while time.monotonic() - self._looked_at >= LOOK_S and not self._idle():
                time.sleep(LOOK_S)

    def _idle(self) -> bool:
        """Whether the daemon had no request since the last check, or there is no daemon."""
        from ffserve.client import public as client

        self._looked_at = time.monotonic()
        try:
            asked = int(client.status(self._socket)["cache"]["asked"])
        except ServerUnavailable:
            return True
        same, self._asked = asked == self._asked, asked
        return same


@click.command()
@click.argument("files", nargs=-1)
@click.option(
    "--rate", metavar="SIZE", default="20MiB", show_default=True, help="Bytes to read a second."
)
@socket_option
@format_option
@json_option
def scrub(
    files: tuple[str, ...], rate: str, socket: str | None, format_name: str | None, as_json: bool
) -> int:
    """Find damage in record files at a limited rate, while the daemon is idle.

    FILES are files, directories or patterns; without any, the files that the daemon has open. It
    reads as `ffserve verify` does, with the same output and exit codes, and pauses while jobs ask
    the daemon for samples that are not in memory. The setting scrub_rate makes the daemon do it.

    \b
      ffserve scrub --rate 50MiB /data/shards
    """
    speed = parse_size(rate)
    if not speed:
        raise UsageError(f"--rate is {rate!r}, but must be a size above 0")
    if files:
        paths = files_of(files, format_name)
    else:
        from ffserve.client import public as client

        shards = client.status(socket)["shards"]
        paths = [shard["path"] for shard in shards if shard["open"]]
    pace = _Pace(speed, socket)
    return check_files(paths, 1, format_name, "scrubbing", as_json, pace.pause)
