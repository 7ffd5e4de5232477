"""A cache network of one member: an HTTP proxy that keeps ranges, and fails in the way it is told.

It asks the origin that the header Host names, as nginx does, and keeps what came under address,
version and range, whoever asked. It writes down all headers that it gets.
"""

from __future__ import annotations

import http.client
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

FAULTS = (
    "stopped", "slow", "silent", "away", "short", "long", "cut", "tag", "no tag", "bytes", "range",
    "whole", "noise", 302, 403, 404, 412, 500, 502,
)  # fmt: skip
"""Ways in which it fails. stopped: it accepts connections, and no more. silent: in the middle of an
answer. slow: a byte now and then. whole: it ignores ranges. Numbers: its status."""


class Asked(NamedTuple):
    """A request. address: host, path and query."""

    address: str
    headers: dict[str, str]


@dataclass
class SharedCache:
    """What it keeps, and was asked for. fault: one of `FAULTS`; None: it works."""

    address: str = ""
    fault: str | int | None = None
    asked: list[Asked] = field(default_factory=list)
    kept: dict[tuple[str, ...], tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    hits: int = 0
    lock: Any = field(default_factory=threading.Lock)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cache: SharedCache

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return "nobody"

    def do_GET(self) -> None:
        cache, headers = self.cache, {name.lower(): text for name, text in self.headers.items()}
        host, fault = headers["host"], cache.fault
        with cache.lock:
            cache.asked.append(Asked(host + self.path, headers))
        if fault == "stopped":
            while cache.fault == "stopped":
                time.sleep(0.01)
            self.close_connection = True
            return
        if fault == "away":
            self.close_connection = True
            return
        if fault == "noise":
            self.wfile.write(b"\x15\x03\x01\x00\x02\x02\n" * 10)
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._send(fault, {"Location": "http://127.0.0.1:9/"}, b"no")
            return
        path, _, query = self.path.partition("?")
        known = "" if "Signature=" in query else query
        version = headers.get("if-match", ""), headers.get("range", "")
        key = headers["x-forwarded-proto"], host, path, known, *version
        with cache.lock:
            found = cache.kept.get(key)
            cache.hits += found is not None
        if found is None:
            found = self._fetched(host, headers)
            if found[0] == 206:
                cache.kept[key] = found
        self._send(*(found if fault is None else self._wrong(str(fault), *found)))

    def _fetched(self, host: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        passed = {name: headers[name] for name in ("range", "if-match") if name in headers}
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", self.path, headers=passed)
        answer = connection.getresponse()
        content, given = answer.read(), dict(answer.getheaders())
        connection.close()
        return answer.status, given, content

    def _wrong(
        self, fault: str, status: int, headers: dict[str, str], content: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        headers = dict(headers)
        if fault == "short":
            content = content[:-1]
        elif fault == "long":
            content += b"x"
        elif fault == "tag":
            headers["ETag"] = '"another"'
        elif fault == "no tag":
            headers.pop("ETag")
        elif fault == "bytes":
            content = bytes(255 - byte for byte in content)
        elif fault == "range":
            headers["Content-Range"] = "bytes 7-8/99"
        elif fault == "whole":
            status = 200
            headers.pop("Content-Range")
        return status, headers, content

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, text in headers.items():
            if name.lower() not in ("content-length", "date", "server"):
                self.send_header(name, text)
        cut = self.cache.fault == "cut"
        self.send_header("Content-Length", str(len(content) + cut))
        self.end_headers()
        if cut:
            self.close_connection = True
        at = 0
        while self.cache.fault in ("slow", "silent") and at < len(content):
            if self.cache.fault == "slow" or not at:
                self.wfile.write(content[at : at + 1])
                at += 1
            time.sleep(0.05)
        self.wfile.write(content[at:])


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        pass  # clients go away


class _UnixServer(_Server):
    address_family = socketserver.UnixStreamServer.address_family


@contextmanager
def shared_cache(
    path: Path | None = None, context: ssl.SSLContext | None = None
) -> Iterator[SharedCache]:
    """Run a cache in threads of this process. Args: path: of its socket; None: a port."""
    cache = SharedCache()
    handler = type("Handler", (_Handler,), {"cache": cache})
    if path is None:
        server: _Server = _Server(("127.0.0.1", 0), handler)
        scheme = "http" if context is None else "https"
        cache.address = f"{scheme}://127.0.0.1:{server.server_address[1]}"
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
    else:
        server = _UnixServer(str(path), handler)  # type: ignore[arg-type]
        cache.address = f"unix:{path}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield cache
    finally:
        cache.fault = None
        server.shutdown()
        thread.join()
        server.server_close()
