"""The daemon as a source: out of shared memory where it can be mapped, else through the socket."""

from __future__ import annotations

from ffserve import protocol
from ffserve.client import connections
from ffserve.client.connection import Connection
from ffserve.client.inline import InlineSource
from ffserve.client.remote import RemoteSource


def open_source(
    path: str, paths: tuple[str, ...], format: str | None, verify: bool, tolerant: bool
) -> RemoteSource:
    """Open a data set over this process's connection to the daemon at `path`.

    Raises: ServerUnavailable, and what the daemon answers.
    """
    connection = connections.connect(path)
    try:
        return source_over(connection, connection.open(paths, format, verify, tolerant), paths)
    except BaseException:
        connection.leave()
        raise


def source_over(
    connection: Connection, opened: protocol.Opened, paths: tuple[str, ...]
) -> RemoteSource:
    """Return the source that suits the connection. Raises: ProtocolError."""
    kind = InlineSource if connection.given.inline else RemoteSource
    return kind(connection, opened, paths)
