"""An origin of remote files: an HTTP server with ranges, which counts, throttles, cuts and lies."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from daemon import until

from ffserve.formats.ffrecord import LAST_SIZE
from ffserve.store import fetching


@dataclass
class HttpOrigin:
    """Files by name. The other fields change how it answers; threads read them at each request."""

    files: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    conditional: bool = True
    """Whether If-Match is looked at."""
    ranges: bool = True
    etags: bool = True
    unsized: set[str] = field(default_factory=set)
    """Names of files whose length it does not say, and of which it has no ranges."""
    status: int = 0
    """Of all answers, if it is not 0."""
    fail_until: float = 0.0
    """Until then (monotonic) answers have status 503."""
    cut_after: int = 0
    """Bytes of a body after which the connection ends, if it is not 0; `cuts` times."""
    cuts: int = 1 << 30
    short: int = 0
    """Bytes that are missing at the end of a range, without an error."""
    wrong: dict[int, int] = field(default_factory=dict)
    """How often the byte at an offset is sent wrong, each time in another way."""
    rate: float = 0.0
    """Bytes a second, of all answers together; 0: as fast as it can."""
    stalled: threading.Event = field(default_factory=threading.Event)
    """While it is set, no answer begins."""
    bodies: bool = True
    """Whether it sends any; else the files are there, and cannot be read."""
    refused_from: int = 0
    """Ranges that begin at this byte or behind it are refused, if it is not 0."""
    held: set[str] = field(default_factory=set)
    """Names of files whose bodies do not begin."""
    admits: Callable[[str], bool] = lambda _: True
    """Whether a request with this Authorization is answered; others get status 403."""
    password: str = ""
    """The token that a request must have, if it is not empty."""
    google: bool = False
    """Whether it says what it has of a file as the JSON interface of Google does."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of bodies, by name."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """Ranges that were sent as a whole."""
    answering: int = 0
    """Bodies that are on their way."""
    ends: bool = False
    """Whether it closes each connection after an answer, without a word."""
    requests: Counter[str] = field(default_factory=Counter)
    who: Counter[str] = field(default_factory=Counter)
    """Requests with a header `X-Who`, by its text."""
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    """Ranges that were asked for with a key of S3: key, name, first byte."""
    url: str = ""
    _lock: Any = field(default_factory=threading.Lock)
    _due: float = 0.0

    def put(self, name: str, content: bytes) -> str:
        """Have a file; return its URL."""
        self.files[name] = content
        self.times[name] = self.times.get(name, 1_700_000_000.0) + 10
        return f"{self.url}/{name}"

    def etag(self, name: str) -> str:
        return _etag(self.files[name])

    def throttle(self, size: int) -> None:
        if rate := self.rate:
            with self._lock:
                self._due = max(self._due, time.monotonic()) + size / rate
                due = self._due
            time.sleep(max(due - time.monotonic(), 0))

    def recover(self) -> None:
        """Answer well from now on."""
        self.status = self.cut_after = self.short = 0
        self.fail_until = self.rate = 0.0
        self.ranges, self.bodies, self.password, self.ends = True, True, "", False
        self.stalled.clear()

    def sent_of(self, name: str) -> int:
        """Return the bytes of a file that were sent, but for those that show what its last sample
        is."""
        looks = sum(each == name and end - begin == LAST_SIZE for each, begin, end in self.spans)
        return self.sent[name] - LAST_SIZE * looks

    @property
    def total(self) -> int:
        """The same of all files."""
        return sum(map(self.sent_of, list(self.sent)))


_KEY = re.compile("Credential=([^/]+)/")


@functools.lru_cache(maxsize=64)
def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    origin: HttpOrigin

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        with self.origin._lock:
            self.origin.answering += 1
        try:
            self._answer(body=True)
            self.close_connection |= self.origin.ends
        finally:
            with self.origin._lock:
                self.origin.answering -= 1

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, *, body: bool) -> None:
        origin, name = self.origin, unquote(self.path.partition("?")[0]).lstrip("/")
        with origin._lock:
            origin.requests[self.command] += 1
            if "X-Who" in self.headers:
                origin.who[self.headers["X-Who"]] += 1
            if key := _KEY.search(self.headers.get("Authorization", "")):
                first = self.headers.get("Range", "bytes=0").removeprefix("bytes=").partition("-")
                origin.asked.append((key[1], name, int(first[0])))
        while origin.stalled.is_set() or (body and name in origin.held):
            time.sleep(0.01)
        if origin.status or time.monotonic() < origin.fail_until:
            return self._refuse(origin.status or 503)
        if not origin.admits(self.headers.get("Authorization", "")):
            with origin._lock:
                origin.requests["refused"] += 1
            return self._refuse(403)
        if origin.password and f"token={origin.password}" not in self.path:
            return self._refuse(403)
        if name.endswith("/") or name == "":
            return self._list(name, body=body)
        if name not in origin.files or (body and not origin.bodies):
            return self._refuse(404)
        if name in origin.unsized:
            return self._send_unsized(origin.files[name], body=body)
        content = origin.files[name]
        tag = _etag(content)
        if origin.google and "alt=media" not in self.path:
            updated = datetime.fromtimestamp(origin.times[name], timezone.utc).isoformat()
            return self._send_json({"size": len(content), "generation": "1", "updated": updated})
        wanted = self.headers.get("If-Match")
        if origin.conditional and wanted and wanted != tag:
            return self._refuse(412)
        begin, end, status = 0, len(content), 200
        asked = self.headers.get("Range")
        if asked and origin.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1, len(content)), 206
        if body and origin.refused_from and begin >= origin.refused_from:
            return self._refuse(404)
        end -= origin.short if body else 0
        self.send_response(status)
        if origin.etags:
            self.send_header("ETag", tag)
            self.send_header("Last-Modified", formatdate(origin.times[name], usegmt=True))
        if origin.google:
            self.send_header("X-Goog-Generation", "1")
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.send_header("Content-Length", str(max(end - begin, 0)))
        self.end_headers()
        if body:
            self._send(name, content, begin, end)

    def _send(self, name: str, content: bytes, begin: int, end: int) -> None:
        origin, at = self.origin, begin
        while at < end:
            piece = self._damaged(content[at : min(at + 65536, end)], at)
            if origin.cut_after and origin.cuts > 0 and at - begin >= origin.cut_after:
                origin.cuts -= 1
                self.close_connection = True
                self.connection.close()
                return
            origin.throttle(len(piece))
            at += len(piece)
            # Counted before the client can have it.
            with origin._lock:
                origin.sent[name] += len(piece)
                if at == end:
                    origin.spans.append((name, begin, end))
            try:
                self.wfile.write(piece)
            except OSError:
                with origin._lock:
                    origin.sent[name] -= len(piece)
                    if at == end:
                        origin.spans.remove((name, begin, end))
                return

    def _damaged(self, piece: bytes, at: int) -> bytes:
        with self.origin._lock:
            for offset, times in self.origin.wrong.items():
                if times and at <= offset < at + len(piece):
                    self.origin.wrong[offset] -= 1
                    changed = bytearray(piece)
                    changed[offset - at] ^= times
                    piece = bytes(changed)
        return piece

    def _send_json(self, said: dict[str, Any]) -> None:
        text = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _send_unsized(self, content: bytes, *, body: bool) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        origin = self.origin
        cut = origin.cut_after if origin.cut_after and origin.cuts > 0 else 0
        for part in (content[: cut or None], b"") if body else ():
            if cut and not part:
                origin.cuts -= 1
                self.close_connection = True
                return
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

    def _list(self, name: str, *, body: bool) -> None:
        names = sorted(n for n in self.origin.files if n.startswith(name))
        text = "".join(f'<a href="/{n}">{n}</a>\n' for n in names).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if body:
            self.wfile.write(text)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, *_: object) -> None:
        pass  # clients go away


@contextmanager
def http_origin(
    address: str = "127.0.0.1", port: int = 0, context: ssl.SSLContext | None = None
) -> Iterator[HttpOrigin]:
    """Run an origin in threads of this process. Args: context: of TLS, which it speaks then."""
    origin = HttpOrigin()
    server = _Server((address, port), type("Handler", (_Handler,), {"origin": origin}))
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    origin.url = f"{'http' if context is None else 'https'}://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield origin
    finally:
        origin.recover()
        server.shutdown()
        thread.join()
        server.server_close()


def tls_context(directory: Path) -> tuple[ssl.SSLContext, str]:
    """Return the context of a server on 127.0.0.1, and the file of its certificate."""
    key, certificate = directory / "key", directory / "certificate"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
         "-out", certificate, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, str(certificate)


def ask_origins(*patience: float) -> None:
    """Let this process know no origin, and wait little before it asks one again.

    Args: patience: give_up_s and contact_s of `Patience`.
    """
    fetching.forget(fetching.Patience(*patience)._replace(first_pause_s=0.01))


def settled() -> None:
    """Wait until this process has nothing on its way."""
    fetchers, threads = list(fetching._fetchers.values()), list(fetching._threads.values())
    until(
        lambda: (
            not any(each._tasks for each in fetchers)
            and all(each._idle == each._count for each in threads)
        ),
        "nothing is on its way",
    )
