"""A relay in front of an origin: every request takes some milliseconds longer and is counted."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

_REQUEST = b" HTTP/1.1\r\n"
"""The end of a request's first line. A GET has no body, so nothing else looks so."""


_WHOLE, _PART, _RANGE = (
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 206 Partial Content\r\n",
    b"Content-Range: ",
)
"""`rclone serve s3` says 200 of ranges as well, as S3 does not, and some clients refuse that."""


class Relay:
    """Counts the requests to an origin and the bytes that came from it."""

    def __init__(self, origin: tuple[str, int], latency_s: float) -> None:
        self.requests = 0
        self.received = 0
        self._origin, self._latency_s = origin, latency_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Accept no more connections, and wait a while for those of clients that have ended."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(1.0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._relay, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._origin) as origin:
            pump = threading.Thread(target=self._requests, args=(client, origin), daemon=True)
            pump.start()
            self._answers(client, origin)
            pump.join()

    def _requests(self, client: socket.socket, origin: socket.socket) -> None:
        end = b""
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                found = (end + data).count(_REQUEST)
                end = (end + data)[1 - len(_REQUEST) :]
                with self._lock:
                    self.requests += found
                time.sleep(self._latency_s)
                origin.sendall(data)
        _finish(origin)

    def _answers(self, client: socket.socket, origin: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := origin.recv(1 << 18):
                with self._lock:
                    self.received += len(data)
                if data.startswith(_WHOLE) and _RANGE in data.partition(b"\r\n\r\n")[0]:
                    data = _PART + data.removeprefix(_WHOLE)
                client.sendall(data)
        _finish(client)


def _finish(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def relayed(origin: tuple[str, int], latency_s: float) -> Iterator[Relay]:
    """Run a relay."""
    relay = Relay(origin, latency_s)
    try:
        yield relay
    finally:
        relay.close()
