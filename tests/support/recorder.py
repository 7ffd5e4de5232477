"""An origin that has no files, and keeps what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Recorder:
    """An origin that records the headers of every request. leads_to: where it sends those who
    ask."""

    url: str = ""
    leads_to: str = ""
    seen: list[dict[str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return json.dumps(self.seen)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder: Recorder

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.recorder.seen.append({**dict(self.headers), "": self.requestline})
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(307 if self.recorder.leads_to else 404)
        if self.recorder.leads_to:
            self.send_header("Location", f"{self.recorder.leads_to}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_CONNECT = do_GET


@contextmanager
def recorder(leads_to: str = "") -> Iterator[Recorder]:
    found = Recorder(leads_to=leads_to)
    handler = type("Handler", (_Handler,), {"recorder": found})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
