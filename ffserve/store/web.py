"""HTTP for origins: requests of threads, kept connections, and redirects that leak no secrets.

It is here, and no package, because a package costs more than the transfer: see
`docs/decisions/origins.md`. A large body arrives by few system calls in the object that its reader
gets, and the interpreter is free meanwhile. Nothing comes from the environment and the files of
this process, except proxies where they are asked for. A child process connects anew.

Source: RFC 9110 and 9112.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import socket
import ssl
import struct
import threading
import weakref
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from ffserve.limits import ORIGIN_THREADS
from ffserve.store.schemes.scheme import KEPT_HEADERS

BUFFER_SIZE = 16 << 10
_HEAD_SIZE = 64 << 10
"""Bytes of the headers of an answer at most."""
_MOST_HOPS = 5
_MOST_LINES = 100
"""Lines behind a body in chunks, and answers before the final one (status 1xx), at most."""
_SAFE = "".join(map(chr, range(33, 127)))


class StatusError(Exception):
    """An answer that is no success. code: in the origin's own words; "" if it has none."""

    def __init__(self, status: int, text: str, code: str = "") -> None:
        super().__init__(text)
        self.status, self.code = status, code


class MissingError(StatusError, FileNotFoundError):
    """The origin has no such object."""


class CutError(ConnectionError):
    """The origin ended an answer before its announced end."""

    def __init__(self) -> None:
        super().__init__("the origin closed it in the middle of an answer")


class _UnansweredError(ConnectionResetError):
    """The origin closed a connection without an answer."""


class WebAddress(NamedTuple):
    """Where a URL leads: the host, and what is asked of it."""

    tls: bool
    host: str
    port: int
    path: str

    @property
    def origin(self) -> tuple[bool, str, int]:
        """What a connection serves."""
        return self[:3]

    @property
    def place(self) -> str:
        """The host, and its port if it is not the usual one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


@functools.lru_cache(128)  # as `urlsplit` has
def address_of(url: str) -> WebAddress:
    """Return where a URL leads. Raises: ValueError."""
    parts = urlsplit(url)
    tls = parts.scheme.lower() == "https"
    if not parts.hostname or (not tls and parts.scheme.lower() != "http"):
        raise ValueError("it is not the URL of a web server")
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    # What a URL must not have as it is (spaces, other alphabets) is escaped, and nothing twice.
    path = quote(path, safe=_SAFE)
    return WebAddress(tls, parts.hostname, parts.port or (443 if tls else 80), path)


class _SocketReader(io.RawIOBase):
    """The bytes that come from a socket. A body is waited for as a whole where the kernel can."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._whole = sock, not isinstance(sock, ssl.SSLSocket)

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        if self._whole and len(view) > BUFFER_SIZE:
            try:
                return self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError("timed out") from None
        try:
            return self._socket.recv_into(view)
        except BlockingIOError:
            raise TimeoutError("timed out") from None


class _Connection:
    """A connection to a host. proxy: to which requests name the whole URL."""

    def __init__(self, sock: socket.socket, proxy: Proxy | None = None) -> None:
        self.socket, self.proxy = sock, proxy
        self.reader = io.BufferedReader(_SocketReader(sock), BUFFER_SIZE)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def is_idle(self) -> bool:
        """Whether it is open, and nothing came that nobody asked for."""
        return not self._poll.poll(0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class Answer:
    """The answer to a request; its body is read once, from the beginning on."""

    data = b""
    """The body, where somebody wants it here."""

    def __init__(self, web: Web, to: WebAddress, connection: _Connection, method: str) -> None:
        self._web, self._address = web, to
        self._connection: _Connection | None = connection
        self._reader = connection.reader
        self.status, self.headers, self._keep = _head(self._reader)
        coding = self.headers.get("transfer-encoding", "").lower()
        self._chunked = coding == "chunked"
        self._left = 0
        """Bytes of the body, or of its present chunk, that were not read; -1: all up to the end."""
        if method == "HEAD" or self.status in (204, 304):
            self._chunked = False
        elif self._chunked:
            self._next_chunk()
        elif coding or "content-length" not in self.headers:
            self._left, self._keep = -1, False
        else:
            self._left = number_of(self.headers["content-length"])
        self._finish()

    def read(self, most: int) -> bytes:
        """Return the next bytes of the body, fewer only at its end. Raises: OSError."""
        parts: list[bytes] = []
        try:
            while most and self._left:
                size = min(most, BUFFER_SIZE if self._left < 0 else self._left)
                part = self._reader.read(size)
                parts.append(part)
                most -= len(part)
                if self._left < 0:
                    self._left = -1 if part else 0
                    continue
                self._left -= len(part)
                if most and self._left:
                    raise CutError
                if not self._left and self._chunked:
                    self._reader.readline(BUFFER_SIZE)
                    self._next_chunk()
        except BaseException:
            self.close()
            raise
        self._finish()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def content(self, most: int) -> bytes:
        """Return the whole body. Raises: OSError; ValueError: it has more bytes than `most`."""
        found = self.read(most + 1)
        self.close()
        if len(found) > most:
            raise ValueError(f"the origin sent more than {most} bytes")
        return found

    def close(self) -> None:
        """End the connection, unless the whole body was read."""
        if self._connection is not None:
            self._connection.close()

    def _next_chunk(self) -> None:
        reader = self._reader
        line = reader.readline(BUFFER_SIZE)
        if not line.endswith(b"\n"):
            raise CutError
        self._left = number_of(line.partition(b";")[0].decode("latin-1"), 16)
        for _ in range(0 if self._left else _MOST_LINES):
            if reader.readline(BUFFER_SIZE) in (b"\r\n", b"\n", b""):
                return
        self._keep &= bool(self._left)

    def _finish(self) -> None:
        if not self._left and (connection := self._connection) is not None:
            self._connection = None
            if self._keep:
                self._web.keep(self._address, connection)
            else:
                connection.close()


class Web:
    """Connections to origins. Threads may call it.

    Args: connect_s, silent_s: how long an origin may take to accept a connection, and may be
        silent. proxies: whether requests go where the environment of this process says. verify: a
        file of certificates of authorities; True: those of the system; False: any certificate.
    """

    def __init__(
        self, connect_s: float, silent_s: float, *, proxies: bool = False, verify: str | bool = True
    ) -> None:
        self._connect_s, self._silent_s = connect_s, silent_s
        self._proxies, self._verify = proxies, verify
        self._lock = threading.Lock()
        self._idle: dict[tuple[bool, str, int], list[_Connection]] = {}
        weakref.finalize(self, _close, self._idle)
        _webs.add(self)

    def after_fork(self) -> None:
        """Leave the connections to the parent."""
        self._lock = threading.Lock()
        _close(self._idle)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Iterable[bytes] = (),
        *,
        follow: bool = False,
    ) -> Answer:
        """Return the answer to a request, whatever its status.

        Args: body: its parts, whose length is among the headers. follow: whether to go where the
            origin leads; no header that may be a secret goes to another one.
        Raises: ValueError, OSError.
        """
        for _ in range(_MOST_HOPS):
            to = address_of(url)
            answer = self._ask(method, to, url, headers, body)
            place = answer.headers.get("location")
            if not follow or place is None or answer.status not in (301, 302, 303, 307, 308):
                return answer
            answer.read(BUFFER_SIZE)
            answer.close()
            url = urljoin(url, place).partition("#")[0]
            if address_of(url).origin != to.origin:
                headers = {
                    name: text for name, text in headers.items() if name.lower() in KEPT_HEADERS
                }
        raise ConnectionError("the origin redirects without end")

    def _ask(
        self,
        method: str,
        to: WebAddress,
        url: str,
        headers: Mapping[str, str],
        body: Iterable[bytes],
    ) -> Answer:
        while True:
            connection, used = self._taken(to)
            try:
                connection.socket.sendall(_asked(method, to, url, headers, connection.proxy))
                for part in body:
                    connection.socket.sendall(part)
                return Answer(self, to, connection, method)
            except BaseException as error:
                connection.close()
                if isinstance(error, BlockingIOError):
                    raise TimeoutError("timed out") from None
                # The origin closed it while nobody used it, and has not seen the request.
                closed = isinstance(error, (ConnectionResetError, BrokenPipeError))
                if not (used and closed and method in ("GET", "HEAD")):
                    raise

    def _taken(self, to: WebAddress) -> tuple[_Connection, bool]:
        """Return a connection, and whether it was used before."""
        while True:
            with self._lock:
                free = self._idle.get(to.origin)
                found = free.pop() if free else None
            if found is None:
                return self._connected(to), False
            if found.is_idle:
                return found, True
            found.close()

    def keep(self, to: WebAddress, connection: _Connection) -> None:
        """Keep a connection whose answer was read for later requests."""
        with self._lock:
            free = self._idle.setdefault(to.origin, [])
            if len(free) < ORIGIN_THREADS:
                free.append(connection)
                return
        connection.close()

    def _connected(self, to: WebAddress) -> _Connection:
        proxy = _proxy_of(to) if self._proxies else None
        host, port = (to.host, to.port) if proxy is None else (proxy.host, proxy.port)
        sock = socket.create_connection((host, port), self._connect_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if to.tls:
                if proxy is not None:
                    _tunnel(sock, to, proxy)
                sock = _tls(self._verify).wrap_socket(sock, server_hostname=to.host)
                sock.settimeout(self._silent_s)
                return _Connection(sock)
            sock.settimeout(None)
            limit = struct.pack("ll", int(self._silent_s), int(self._silent_s % 1 * 1e6))
            for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, side, limit)
            return _Connection(sock, proxy)
        except BaseException:
            sock.close()
            raise


_webs: weakref.WeakSet[Web] = weakref.WeakSet()


def _after_fork() -> None:
    for web in _webs:
        web.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _close(idle: dict[Any, list[_Connection]]) -> None:
    while idle:
        for connection in idle.popitem()[1]:
            connection.close()


def number_of(text: str, base: int = 10) -> int:
    """Return a number in an answer. Raises: ValueError."""
    if not (text := text.strip()).isalnum():
        raise ValueError("the origin sent an invalid length")
    return int(text, base)


def _head(reader: io.BufferedReader[Any]) -> tuple[int, dict[str, str], bool]:
    """Return status and headers of an answer, and whether its connection stays open."""
    for _ in range(_MOST_LINES):
        line, size = reader.readline(_HEAD_SIZE), 0
        if not line:
            raise _UnansweredError("the origin closed the connection without an answer")
        version, _, rest = line.decode("latin-1").partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ConnectionError("the origin sent something that is not HTTP")
        status, headers = int(rest[:3]), dict[str, str]()
        while (line := reader.readline(_HEAD_SIZE)) not in (b"\r\n", b"\n"):
            size += len(line)
            if not line.endswith(b"\n"):
                raise CutError
            if size > _HEAD_SIZE:
                raise ConnectionError(f"the origin sent more than {_HEAD_SIZE} bytes of headers")
            name, _, text = line.decode("latin-1").partition(":")
            headers[name.lower()] = text.strip()
        if status >= 200:
            wish = headers.get("connection", "").lower()
            return status, headers, wish == "keep-alive" or (wish, version) == ("", "HTTP/1.1")
    raise ConnectionError("the origin sends no answer but preliminary ones")


def _asked(
    method: str, to: WebAddress, url: str, headers: Mapping[str, str], proxy: Proxy | None
) -> bytes:
    """Return line and headers of a request. Raises: ValueError: a header would be two."""
    names = {name.lower() for name in headers}
    path = to.path if proxy is None else f"http://{to.place}{to.path}"
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
    if "host" not in names:
        lines.insert(1, f"Host: {to.place}")
    if "user-agent" not in names:
        lines.append("User-Agent: ffserve")
    if proxy is not None and proxy.password:
        lines.append(f"Proxy-Authorization: {proxy.password}")
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header has more than one line")
    return "\r\n".join((*lines, "", "")).encode("utf-8")


@functools.cache
def _tls(verify: str | bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    if verify is False:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Proxy(NamedTuple):
    """A proxy of HTTP. password: the header that it needs; "": none."""

    host: str
    port: int
    password: str


def _proxy_of(to: WebAddress) -> Proxy | None:
    """Return the proxy by which the environment has an address reached."""
    from urllib.request import getproxies, proxy_bypass

    named = getproxies().get("https" if to.tls else "http")
    if not named or proxy_bypass(to.place):
        return None
    parts = urlsplit(named if "://" in named else f"http://{named}")
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    password = f"Basic {b64encode(user.encode()).decode()}" if parts.username else ""
    return Proxy(parts.hostname or "", parts.port or 80, password)


def _tunnel(sock: socket.socket, to: WebAddress, proxy: Proxy) -> None:
    """Have a proxy connect to an address. Raises: ConnectionError."""
    place = f"{to.host}:{to.port}"
    password = f"Proxy-Authorization: {proxy.password}\r\n" if proxy.password else ""
    sock.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n{password}\r\n".encode())
    # The host behind it says nothing before the client does.
    status, _, _ = _head(io.BufferedReader(_SocketReader(sock), BUFFER_SIZE))
    if status != 200:
        raise ConnectionError(f"the proxy {proxy.host} refuses a connection (status {status})")
