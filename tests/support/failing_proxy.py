"""A proxy of an HTTP server before which each request fails once: refused, or done without an
answer."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port: int
    how: Literal["refused", "unanswered"]
    seen: set[tuple[str, ...]]
    failures: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = self.command, self.path, self.headers.get("Range", "")
        fails = key not in self.seen
        self.seen.add(key)
        if fails:
            self.failures.append(self.command)
            if self.how == "refused":
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        server = http.client.HTTPConnection("127.0.0.1", self.port)
        server.request(self.command, self.path, body, dict(self.headers))
        answer = server.getresponse()
        content = answer.read()
        server.close()
        if fails:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass


@contextmanager
def failing_proxy(
    port: int, how: Literal["refused", "unanswered"]
) -> Iterator[tuple[str, list[str]]]:
    """Run a proxy of a port; its URL, and the methods of requests that it let fail so far."""
    failures: list[str] = []
    facts = {"port": port, "how": how, "seen": set(), "failures": failures}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), facts))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", failures
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
