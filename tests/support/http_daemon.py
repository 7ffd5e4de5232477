"""Daemons with HTTP, and clients of it."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from typing import Any

from daemon import DEADLINE_S, Daemon, serving, until


class UnixConnection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connection_to(address: str) -> http.client.HTTPConnection:
    """Return a connection to a port or a Unix socket."""
    if address.startswith("/"):
        return UnixConnection(address)
    host, _, port = address.rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)


def ask(
    address: str, path: str = "/metrics", method: str = "GET", accept: str = ""
) -> tuple[int, str, str]:
    """Return status, content type and body."""
    with contextlib.closing(connection_to(address)) as connection:
        connection.request(method, path, headers={"Accept": accept} if accept else {})
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()


FRESH = "import ffserve.server.status.http_server as http; http.LEAST_AGE_S = 0.02\n"
"""Metrics are made anew as often as a test asks."""


@contextlib.contextmanager
def free_port() -> Iterator[str]:
    """An address that nobody listens on. No other program gets it: it is bound here, in the way
    in which a server may bind it as well."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


@contextlib.contextmanager
def measured(*options: str, patch: str = "", **more: Any) -> Iterator[tuple[Daemon, str]]:
    """A daemon with HTTP on a port, and its address."""
    with (
        free_port() as address,
        serving(options=["--http", address, *options], patch=FRESH + patch, **more) as daemon,
    ):
        until(lambda: answers(address), "it answers HTTP requests")
        yield daemon, address


def answers(address: str) -> bool:
    """Return whether something listens."""
    with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        return ask(address, "/healthz")[0] == 200
    return False


@contextlib.contextmanager
def measured_unix(*options: str, patch: str = "") -> Iterator[tuple[Daemon, str]]:
    """A daemon with HTTP on a Unix socket that every user can reach, and its path."""
    with contextlib.closing(Daemon()) as place:
        path = str(place.directory / "http")
        options = ("--http", path, "--socket-mode", "0666", *options)
        with serving(options=options, patch=FRESH + patch) as daemon:
            until(lambda: answers(path), "it answers HTTP requests")
            yield daemon, path
