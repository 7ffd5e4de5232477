"""HTTP for origins: requests of threads, kept connections, and redirects that leak no secrets.

Python's `http.client` speaks it. Here are the connections, which threads share, and what it leaves
to its callers: an origin may lie, and gets a clear error. Nothing comes from the environment and
the files of this process, except proxies where they are asked for. A child process connects anew.
`docs/decisions/origins.md` says why it is no package.

Source: RFC 9110 and 9112.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import itertools
import os
import re
import select
import socket
import ssl
import struct
import threading
import weakref
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, cast
from urllib.parse import quote, unquote, urljoin, urlsplit
from weakref import WeakValueDictionary

from ffserve.limits import ASKED_AT_ONCE, MOST_UNUSED, OPENED_AT_ONCE
from ffserve.store.schemes.scheme import KEPT_HEADERS, Sent

_LINES_SIZE = 64 << 10
"""Bytes of the lines of an answer (status, headers, sizes of chunks) at most, beside as many as the
body has."""
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?![0-9])")
_LENGTH = re.compile(r"[0-9]{1,18}")
_WAITS = 4
"""A call that receives a long part waits for a time in all, and returns what came. After so many
calls in which nothing came the origin is silent."""
_MOST_HOPS = 5
_ELSEWHERE = 301, 302, 303, 307, 308
_Proxy: TypeAlias = tuple[str, int, dict[str, str]]
"""Host, port, and the headers that it needs."""
_PLAIN = re.compile(r"(https?://[A-Za-z0-9.:-]+)(/[A-Za-z0-9._~%/+-]*(?:\?[A-Za-z0-9._~%/&=+-]+)?)")
"""URLs whose path is asked for as it is."""
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
        super().__init__("the origin broke off in the middle of an answer")


class WebAddress(NamedTuple):
    """Where a URL leads: the host, and what is asked of it."""

    tls: bool
    host: str
    port: int
    path: str

    @property
    def place(self) -> str:
        """The host, and its port if it is not the usual one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


@functools.lru_cache(128)  # as `urlsplit` has
def address_of(url: str) -> WebAddress:
    """Return where a URL leads. Raises: ValueError."""
    if plain := _PLAIN.fullmatch(url):  # most, of which few hosts are to be parsed
        return address_of(plain[1])._replace(path=plain[2])
    parts = urlsplit(url)
    tls = parts.scheme.lower() == "https"
    if not parts.hostname or (not tls and parts.scheme.lower() != "http"):
        raise ValueError("it is not the URL of a web server")
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    # What a URL must not have as it is (spaces, other alphabets) is escaped, and nothing twice.
    path = quote(path, safe=_SAFE)
    return WebAddress(tls, parts.hostname, parts.port or (443 if tls else 80), path)


class _Received(io.RawIOBase):
    """The bytes that come through a socket without TLS, whose waiting the kernel limits (`_limit`).
    A long part is received by one call, so the interpreter does not run for each of its packets."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        flags = socket.MSG_WAITALL if len(into) > io.DEFAULT_BUFFER_SIZE else 0
        for _ in range(_WAITS):
            with contextlib.suppress(BlockingIOError):  # nothing came
                return self._sock.recv_into(into, 0, flags)
        raise TimeoutError("timed out")

    def makefile(self, _mode: str) -> _Content:
        """Return the stream of an answer."""
        return _Content(self)


def _limit(sock: socket.socket, silent_s: float) -> None:
    """Limit how long calls of a socket wait. That of Python takes another call of the kernel for
    each, in which threads change."""
    if type(sock) is not socket.socket:
        sock.settimeout(silent_s)
        return
    sock.settimeout(None)
    for option, limit_s in (socket.SO_RCVTIMEO, silent_s / _WAITS), (socket.SO_SNDTIMEO, silent_s):
        wait = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, option, wait)


class _Content(io.BufferedReader):
    """The bytes of an answer: no line without its end, nor lines without end."""

    _lines = _body = 0

    def read(self, size: int | None = None) -> bytes:
        if size is None or size < 0:  # of a chunk
            raise ValueError("the origin sent an invalid length")
        found = super().read(size)
        self._body += len(found)
        return found

    def readline(self, size: int | None = None) -> bytes:
        line, first = super().readline(size or _LINES_SIZE + 1), not self._lines
        self._lines += len(line)
        if self._lines > _LINES_SIZE + self._body:
            raise ConnectionError(f"the origin sent more than {_LINES_SIZE} bytes of headers")
        if line[-1:] != b"\n" and (line or not first):
            raise CutError
        return line


class _Response(http.client.HTTPResponse):
    """Reads its headers itself: the parser of `email` takes a third of the CPU of a small request,
    and lines for headers that are none. `fields` has them by their names in lower case."""

    fields: Mapping[str, str]

    def __init__(self, sock: socket.socket, method: str) -> None:
        plain = type(sock) is socket.socket
        super().__init__(cast(socket.socket, _Received(sock) if plain else sock), method=method)
        self._has_body = method != "HEAD"
        if not plain:
            self.fp = _Content(self.fp.detach())

    def begin(self) -> None:
        """Read what is before the body of the final answer. Raises: OSError, ValueError."""
        status, version, headers = 0, b"", dict[str, str]()
        while status < 200:
            if not (line := self.fp.readline()):
                raise http.client.RemoteDisconnected("")
            if (found := _STATUS.match(line)) is None:
                raise http.client.BadStatusLine(line.decode("latin-1"))
            version, status, headers = found[1], int(found[2]), {}
            while (line := self.fp.readline()) not in (b"\r\n", b"\n"):
                name, _, text = line.decode("latin-1").partition(":")
                name, text = name.lower(), text.strip()
                if name.split() != [name]:
                    raise ConnectionError("the origin sent a line that is no header")
                if headers.setdefault(name, text) != text:
                    headers[name] += f", {text}"
        self.status, self.fields = status, headers
        length = headers.get("content-length", "0")
        if not _LENGTH.fullmatch(length):
            raise ValueError("the origin sent an invalid length")
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise ValueError("the origin sent a body in an unknown coding")
        self.chunked, self.chunk_left = "transfer-encoding" in headers, None
        self.length = int(length) if "content-length" in headers else None
        if not self._has_body or status in (204, 304):
            self.chunked, self.length = False, 0
        elif self.chunked:
            self.length = None
        said = headers.get("connection", "").lower()
        ends = "close" in said if version == b"1" else "keep-alive" not in said
        self.will_close = ends or (self.length is None and not self.chunked)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise errors of `http.client` as OSError and ValueError, in plain words."""
    try:
        yield
    except http.client.InvalidURL:
        raise ValueError("it is not the URL of a web server") from None
    except http.client.IncompleteRead:
        raise CutError from None
    except http.client.RemoteDisconnected:
        raise ConnectionError("the origin closed the connection without an answer") from None
    except http.client.HTTPException as error:
        raise ConnectionError(f"the origin sent no valid HTTP: {error!s:.80}") from None
    except OSError as error:
        if not str(error).startswith("Tunnel connection failed"):
            raise
        raise ConnectionError(f"the proxy refuses a connection: {error}") from None


class Answer:
    """The answer to a request; its body is read once, from the beginning on."""

    data = b""
    """The body, where somebody wants it here."""

    def __init__(
        self, web: Web, to: WebAddress, connection: http.client.HTTPConnection, method: str
    ) -> None:
        self._web, self._address = web, to
        self._connection: http.client.HTTPConnection | None = connection
        self._response = response = _Response(connection.sock, method)
        try:
            response.begin()
        except BaseException:
            self.close()
            raise
        self.status = response.status
        self.headers = response.fields
        if response.length == 0:
            self.read(0)

    def read(self, most: int) -> bytes:
        """Return the next bytes of the body, fewer only at its end. Raises: OSError, ValueError."""
        response = self._response
        try:
            with _plain_errors():
                content = response.read(most)
            if response.length and len(content) < most:
                raise CutError
        except BaseException:
            self.close()
            raise
        if response.isclosed() and self._connection is not None:
            if response.will_close:
                self._connection.close()
            self._web.keep(self._address, self._connection)
            self._connection = None
        return content

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
            self._response.close()
            self._connection.close()


class WebRequest(Sent):
    """A request. One thread at a time uses it.

    Args:
        body: if it is in parts, its length is among the headers. follow: whether to go where the
            origin leads; no header that may be a secret goes to another one.
    Raises: ValueError.
    """

    signed_with: Any = None
    """The options of its maker, who renews them if the origin refuses it."""

    def __init__(
        self,
        web: Web,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Iterable[bytes] = b"",
        *,
        follow: bool = False,
    ) -> None:
        self._connection: http.client.HTTPConnection | None = None
        """By which it was sent."""
        self._web, self._method, self._body, self._follow = web, method, body, follow
        self._prepare(url, headers)

    def _prepare(self, url: str, headers: Mapping[str, str]) -> None:
        self._url, self._headers, self._to = url, headers, (to := address_of(url))
        self._proxy = proxy = self._web.proxy_of(to)
        path, body, names = to.path, self._body, {*map(str.lower, headers)}
        usual = {"Host": to.place, "User-Agent": "ffserve", "Accept-Encoding": "identity"}
        if isinstance(body, bytes) and (body or self._method in ("POST", "PUT")):
            usual["Content-Length"] = str(len(body))
        if proxy is not None and not to.tls:
            path, usual = f"http://{to.place}{path}", {**usual, **proxy[2]}
        lines = [f"{name}: {text}" for name, text in usual.items() if name.lower() not in names]
        lines += [f"{name}: {text}" for name, text in headers.items()]
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a header has more than one line")
        self._head = "\r\n".join([f"{self._method} {path} HTTP/1.1", *lines, "", ""]).encode()

    def send(self, key: object) -> bool:
        """Send it by a connection that is open already, and leave it in `Web.ahead` for whoever
        wants the answer; return False if there is none, or such a request is there.

        Raises: OSError.
        """
        connection = self._web.kept(self._to)
        if connection is None or not self._send(connection):
            return False
        self._key = key
        if self._web.ahead.setdefault(key, self) is self:
            return True
        connection.close()
        return False

    def _send(self, connection: http.client.HTTPConnection | None) -> bool:
        """Send it. Args: connection: one that is open; None: a new one."""
        self._used = connection is not None
        connection = connection or self._web.new_connection(self._to, self._proxy)
        body = self._body
        try:
            if not self._used:
                self._web.connect(connection)
            connection.sock.sendall(self._head)
            for part in (body,) if isinstance(body, bytes) else body:
                if part:
                    connection.sock.sendall(part)
        except BaseException as error:
            connection.close()
            if isinstance(error, BlockingIOError):  # of a request that it does not take
                raise TimeoutError("timed out") from None
            if not self._is_closed(error):
                raise
            return False
        self._connection = connection
        return True

    def _is_closed(self, error: BaseException) -> bool:
        """Whether the origin closed the connection while nobody used it, and has not seen the
        request."""
        closed = isinstance(error, (ConnectionResetError, BrokenPipeError))
        return self._used and closed and self._method in ("GET", "HEAD")

    def answer(self) -> Answer:
        """Return the answer, whatever its status, to the request, which is sent unless it was.

        Raises: ValueError, OSError.
        """
        for _ in range(_MOST_HOPS):
            with _plain_errors():
                answer = self._answer()
            place, to = answer.headers.get("location"), self._to
            if not self._follow or place is None or answer.status not in _ELSEWHERE:
                return answer
            answer.read(io.DEFAULT_BUFFER_SIZE)
            answer.close()
            url, headers = urljoin(self._url, place).partition("#")[0], self._headers
            if address_of(url)[:3] != to[:3]:
                headers = {
                    name: text for name, text in headers.items() if name.lower() in KEPT_HEADERS
                }
            self._prepare(url, headers)
        raise ConnectionError("the origin redirects without end")

    def _answer(self) -> Answer:
        while True:
            if self._connection is None and not self._send(self._web.kept(self._to)):
                continue
            connection, self._connection = self._connection, None
            assert connection is not None
            try:
                return Answer(self._web, self._to, connection, self._method)
            except OSError as error:
                if not self._is_closed(error):
                    raise

    def close(self) -> None:
        """End it, unless somebody has taken it from `Web.ahead`."""
        ahead = self._web.ahead
        mine = ahead.get(self._key) is self and ahead.pop(self._key, None) is self
        if mine and self._connection is not None:
            self._connection.close()


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
        self._proxy_of = functools.lru_cache(128)(_proxy_of if proxies else lambda *_: None)
        self._verify = verify
        self._lock = threading.Lock()
        self._idle: dict[Any, list[int]] = {}
        """Numbers of connections that nobody uses, by address; some are closed."""
        self.ahead: WeakValueDictionary[Any, WebRequest] = WeakValueDictionary()
        """Requests that were sent before they are asked for, while somebody holds them."""
        weakref.finalize(self, _close, self._idle)
        _webs.add(self)

    def after_fork(self) -> None:
        """Leave the connections to the parent."""
        self._lock = threading.Lock()
        self.ahead = WeakValueDictionary()
        _close(self._idle)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Iterable[bytes] = b"",
        *,
        follow: bool = False,
    ) -> Answer:
        """Return the answer to a `WebRequest`. Raises: ValueError, OSError."""
        return WebRequest(self, method, url, headers, body, follow=follow).answer()

    def proxy_of(self, to: WebAddress) -> _Proxy | None:
        """Return the proxy by which an address is reached, if any."""
        return self._proxy_of(to.tls, to.place)

    def connect(self, connection: http.client.HTTPConnection) -> None:
        """Open a connection. Raises: OSError, HTTPException."""
        connection.connect()
        _limit(connection.sock, self._silent_s)

    def kept(self, to: WebAddress) -> http.client.HTTPConnection | None:
        """Return an open connection that nobody uses, if there is one."""
        while True:
            with self._lock:
                free = self._idle.get(to[:3])
                number = free.pop() if free else None
            if number is None:
                return None
            found = _unused.pop(number, None)
            if found is None:
                continue
            poll = select.poll()
            poll.register(found.sock, select.POLLIN)
            if not poll.poll(0):  # it is open, and nothing came that nobody asked for
                return found
            found.close()

    def new_connection(self, to: WebAddress, proxy: _Proxy | None) -> http.client.HTTPConnection:
        """Return a connection that is not open yet."""
        place = proxy[:2] if proxy is not None else (to.host, to.port)
        made = http.client.HTTPConnection(*place, self._connect_s)
        if to.tls:
            tls = _tls(self._verify)
            made = http.client.HTTPSConnection(*place, timeout=self._connect_s, context=tls)
            if proxy is not None:
                made.set_tunnel(to.host, to.port, dict(proxy[2]))
        made.response_class = _Response
        return made

    def keep(self, to: WebAddress, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose answer was read for later requests."""
        surplus = connection
        with self._lock:
            free = self._idle.setdefault(to[:3], [])
            if len(free) >= OPENED_AT_ONCE:
                free[:] = [number for number in free if number in _unused]
            if connection.sock is not None and len(free) < OPENED_AT_ONCE:
                free.append(next(_numbers))
                _unused[free[-1]] = connection
                if len(_unused) <= MOST_UNUSED:
                    return
                surplus = _unused.popitem(last=False)[1]
        surplus.close()


_numbers = itertools.count()
_unused: OrderedDict[int, http.client.HTTPConnection] = OrderedDict()
"""Connections of all `Web`s that nobody uses, by number, the oldest first. Each access is one call
of C, so it needs no lock."""
_webs: weakref.WeakSet[Web] = weakref.WeakSet()


def close_unused(most: int = ASKED_AT_ONCE) -> None:
    """Close connections that nobody uses, the oldest first, but for so many. Opening many files
    needs more of them than what follows, and origins close them after a while on their side only.
    """
    while len(_unused) > most:
        with contextlib.suppress(KeyError):  # another thread took it
            _unused.popitem(last=False)[1].close()


def _after_fork() -> None:
    for web in _webs:
        web.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _close(idle: dict[Any, list[int]]) -> None:
    while idle:
        for number in idle.popitem()[1]:
            if (connection := _unused.pop(number, None)) is not None:
                connection.close()


@functools.cache
def _tls(verify: str | bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    if verify is False:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _proxy_of(tls: bool, place: str) -> _Proxy | None:
    """Return the proxy by which the environment has a place reached."""
    from urllib.request import getproxies, proxy_bypass

    named = getproxies().get("https" if tls else "http")
    if not named or proxy_bypass(place):
        return None
    parts = urlsplit(named if "://" in named else f"http://{named}")
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    password = {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"}
    return parts.hostname or "", parts.port or 80, password if parts.username else {}
