"""HTTP: the status page, metrics and health, on an address or a Unix socket of their own.

Any program that can reach the address may connect, so nothing here waits for a client and no client
costs much. A connection carries one request, which must come within REQUEST_TIMEOUT_S and be read
within ANSWER_TIMEOUT_S, or be the one that brings the page its events, each of which must be read
within that time. Beyond MOST_HTTP_CONNECTIONS the oldest one of the address (or user) that has most
is closed, so a new one is always served, and a flood closes its own. All of them together are one
user of the loop's time (`turns`), which a flood cannot exceed. The metrics are made in steps, at
most once in LEAST_AGE_S for all who ask; so are the events, and only while somebody watches.

Names of jobs and users are shown to administrators, who come through a Unix socket, or to all who
connect if the configuration says so; others get totals.

A web site can give its own name the address 127.0.0.1, and a browser on this machine then takes the
daemon for that site, whose scripts may read all answers (DNS rebinding). So a request that comes to
a loopback address must ask for a name of this machine, or for an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator

import h11

from ffserve.config import ServerConfig, split_address
from ffserve.errors import UsageError
from ffserve.limits import MOST_HTTP_CONNECTIONS, MOST_HTTP_REQUEST_SIZE
from ffserve.server.sessions import server
from ffserve.server.sessions.server import Server
from ffserve.server.status import metrics, page
from ffserve.server.users.descriptors import DescriptorReceiver, closer_of, refuse_descriptors
from ffserve.server.users.peers import Peer
from ffserve.server.users.shares import User
from ffserve.system.socket_path import prepare_socket_directory

log = logging.getLogger("ffserve")

REQUEST_TIMEOUT_S, ANSWER_TIMEOUT_S = 5.0, 10.0
EVENTS_BUFFER = 64 << 10
"""The kernel keeps at most this many bytes of events for a browser."""
LEAST_AGE_S = 1.0
"""Metrics that are younger are sent again; older ones are made anew."""
_CHUNK = 4096
_ACCEPTED, _ACCEPT_INTERVAL_S = 8, 0.005
"""One turn of the loop accepts this many connections, and the next turn comes after
_ACCEPT_INTERVAL_S: each connection takes 20 us."""
_ACCEPT_PAUSE_S = 0.2
"""The pause after accept() has failed, for example because no descriptor is free."""
_BACKLOG = 128
_PEER = struct.Struct("3i")
_TEXT = "text/plain; charset=utf-8"
_FOREIGN = (
    b"the Host header of this request does not name this machine: use localhost or an address; "
    b"a proxy must send one of these as Host\n"
)


def listen(config: ServerConfig, group: int | None) -> socket.socket:
    """Return a listening socket for the address or path in the configuration.

    Args: group: of a Unix socket; None: the daemon's own.
    Raises: UsageError: the address cannot be used. AccessDenied, ReadError.
    """
    address = split_address(config.http)
    if isinstance(address, str):
        prepare_socket_directory(address)
        mode = config.socket_mode
        return server.listen(address, mode=mode, group=group, backlog=_BACKLOG)
    host, port = address
    listener = None
    try:
        family, kind, number, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise UsageError(
            f"cannot listen on {config.http} for HTTP: {error.strerror}",
            hint=(
                "choose another address; for the system service, which has no network, configure "
                "the socket unit (docs/OPERATIONS.md)"
            ),
        ) from error
    return listener


class HttpServer:
    """Accepts connections and answers their requests.

    Args: listener: closed by `close`. show_jobs: to all who connect.
    """

    def __init__(self, server: Server, listener: socket.socket, *, show_jobs: bool) -> None:
        self.server = server
        self.user = User(-1, trusted=False)
        self.show_jobs = show_jobs
        self.is_unix = listener.family == socket.AF_UNIX
        self._listener = listener
        self.refuses_descriptors = self.is_unix and refuse_descriptors(listener)
        self._connections: dict[_HttpConnection, int | bytes] = {}
        """Open connections, the oldest first, with the client of each; see `_client_of`."""
        self._scrapes = {
            (names, plain): _Scrape(self, names, plain)
            for names in (False, True)
            for plain in (False, True)
        }
        self._events = {False: _Events(self, False), True: _Events(self, True)}
        """These by whether names of jobs are shown."""
        self._files = page.read_files()
        listener.setblocking(False)
        server.loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        pause_s = _ACCEPT_INTERVAL_S
        for _ in range(_ACCEPTED):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                pause_s = _ACCEPT_PAUSE_S
                break
            sock.setblocking(False)
            if len(self._connections) >= MOST_HTTP_CONNECTIONS:
                ((most, _),) = Counter(self._connections.values()).most_common(1)
                next(c for c, client in self._connections.items() if client == most).close()
            self._connections[_HttpConnection(self, sock)] = _client_of(sock)
        self.server.loop.remove_reader(self._listener.fileno())
        self.server.loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self.server.loop.add_reader(self._listener.fileno(), self._accept)

    def forget(self, connection: _HttpConnection) -> None:
        """A connection was closed."""
        self._connections.pop(connection, None)
        for scrape in self._scrapes.values():
            scrape.waiting.pop(connection, None)
        for events in self._events.values():
            events.watching.pop(connection, None)

    def answer(self, connection: _HttpConnection, path: str, *, jobs: bool, accept: str) -> None:
        """Answer a GET, now or later.

        Args: jobs: whether names of jobs may be shown. accept: the types that are accepted.
        """
        if path == "/metrics":
            self._scrapes[jobs, metrics.wants_plain(accept)].ask(connection)
        elif path == "/healthz":
            connection.respond(200, _TEXT, b"ok\n")
        elif path == "/readyz":
            reason = self.server.not_ready
            connection.respond(503 if reason else 200, _TEXT, f"{reason or 'ok'}\n".encode())
        elif path == "/events":
            self._events[jobs].watch(connection)
        elif path in self._files:
            connection.respond(200, *self._files[path])
        else:
            connection.respond(404, _TEXT, b"/, /metrics, /healthz or /readyz\n")

    def close(self) -> None:
        """Close the listening socket and all connections."""
        self.server.loop.remove_reader(self._listener.fileno())
        path = self._listener.getsockname() if self.is_unix else None
        self._listener.close()
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)
        for connection in list(self._connections):
            connection.close()
        for events in self._events.values():
            events.stop()


def _client_of(sock: socket.socket) -> int | bytes:
    """Return who has connected: a user, or an address. An IPv6 host has 2^64 of them."""
    if sock.family == socket.AF_UNIX:
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        return int(_PEER.unpack(peer)[1])
    try:
        return _address(sock.getpeername()).packed[:8]
    except OSError:  # it has gone
        return b""


def _address(place: tuple[str, int]) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(place[0])
    return getattr(found, "ipv4_mapped", None) or found


class _Made(ABC):
    """Bytes that are made in steps, for all connections that wait for them; a worker of `turns`."""

    def __init__(self, http: HttpServer, names: bool) -> None:
        self.user = http.user
        self._http = http
        self._names = names
        self._steps: Generator[None, None, bytes] | None = None

    def _begin(self, steps: Generator[None, None, bytes]) -> None:
        self._steps = steps
        self._http.server.turns.add(self)

    def work(self, until: float) -> bool:
        """Take steps; see `turns.Worker`."""
        assert self._steps is not None
        made: bytes | None = None
        try:
            while time.monotonic() < until:
                next(self._steps)
            return True
        except StopIteration as end:
            made = end.value
        except Exception:
            self._log()
        self._steps = None
        self._end(made)
        return False

    @abstractmethod
    def _log(self) -> None:
        """Log the exception that ended the steps."""

    @abstractmethod
    def _end(self, made: bytes | None) -> None:
        """Send what was made; None: there was an exception."""


class _Scrape(_Made):
    """Makes the metrics for all who ask for them meanwhile."""

    def __init__(self, http: HttpServer, names: bool, plain: bool) -> None:
        super().__init__(http, names)
        self._plain = plain
        self._type = metrics.CONTENT_TYPES[plain]
        self.waiting: dict[_HttpConnection, None] = {}
        self._body = b""
        self._made_at = float("-inf")

    def ask(self, connection: _HttpConnection) -> None:
        """Answer a connection with the metrics."""
        now = time.monotonic()
        if self._steps is None and now < self._made_at + LEAST_AGE_S:
            connection.respond(200, self._type, self._body)
            return
        self.waiting[connection] = None
        if self._steps is None:
            server, plain = self._http.server, self._plain
            self._begin(metrics.render(server, jobs=self._names, plain=plain, now=now))

    def _log(self) -> None:
        log.exception("internal error while making metrics")

    def _end(self, made: bytes | None) -> None:
        status, kind, body = 500, _TEXT, b"internal error: see the log of the daemon\n"
        if made is not None:
            self._body, self._made_at = made, time.monotonic()
            status, kind, body = 200, self._type, made
        waiting, self.waiting = self.waiting, {}
        for connection in waiting:
            connection.respond(status, kind, body)


class _Events(_Made):
    """Makes events for all who watch the page."""

    def __init__(self, http: HttpServer, names: bool) -> None:
        super().__init__(http, names)
        self.watching: dict[_HttpConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        """Until the next event is made; the last one is fresh."""
        self._last = b""

    def watch(self, connection: _HttpConnection) -> None:
        """Send events to a connection from now on."""
        if not connection.begin_events():
            return
        self.watching[connection] = None
        if self._timer is not None:
            connection.send_event(self._last)
        elif self._steps is None:
            self._next()

    def _next(self) -> None:
        self._timer = None
        if self.watching:
            now = time.monotonic()
            self._begin(page.event(self._http.server.state, now, names=self._names))

    def _log(self) -> None:
        log.exception("internal error while making the status page")

    def _end(self, made: bytes | None) -> None:
        self._last = self._last if made is None else made
        for connection in list(self.watching):
            if made is None:
                connection.close()
            else:
                connection.send_event(made)
        self._timer = self._http.server.loop.call_later(page.EVENT_INTERVAL_S, self._next)

    def stop(self) -> None:
        """Make no further event."""
        if self._timer is not None:
            self._timer.cancel()


class _HttpConnection:
    """One request and its answer; a worker of `turns`."""

    def __init__(self, http: HttpServer, sock: socket.socket) -> None:
        self.user = http.user
        self._http = http
        self._sock = sock
        self._fd = sock.fileno()
        self._h11: h11.Connection | None = None
        self._receiver = (
            DescriptorReceiver(sock, http.refuses_descriptors) if http.is_unix else None
        )
        self._out: list[memoryview] = []
        self._queued = self._closed = self._answered = self._head_only = self._has_events = False
        loop = http.server.loop
        self._timer = loop.call_later(REQUEST_TIMEOUT_S, self.close)
        loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        if not self._queued:
            self._queued = True
            self._http.server.turns.add(self)
        else:
            self._http.server.loop.remove_reader(self._fd)

    def work(self, until: float) -> bool:
        """Receive a part of the request; see `turns.Worker`."""
        self._queued = False
        if self._closed or self._answered:
            return False
        try:
            chunk = self._receive()
            if chunk:
                self._handle(chunk)
            elif chunk is not None:
                self.close()
        except OSError:
            self.close()
        except h11.RemoteProtocolError as error:
            self.respond(error.error_status_hint, _TEXT, f"invalid request: {error}\n".encode())
        if not self._closed and not self._answered:
            self._http.server.loop.add_reader(self._fd, self._readable)
        return False

    def _receive(self) -> bytes | None:
        """Return what has come; None: nothing. Raises: OSError."""
        try:
            if self._receiver is None:
                return self._sock.recv(_CHUNK)
            chunk, fds, _ = self._receiver.receive(_CHUNK)
            closer_of(self.user).close_fds(fds)
            return chunk
        except (BlockingIOError, InterruptedError):
            return None

    def _handle(self, chunk: bytes) -> None:
        """Go on with the request. Raises: h11.RemoteProtocolError."""
        if self._h11 is None:  # not earlier, since that takes longer than to accept a connection
            size = MOST_HTTP_REQUEST_SIZE
            self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=size)
        self._h11.receive_data(chunk)
        event = self._h11.next_event()
        if not isinstance(event, h11.Request):
            return
        self._answered = True  # nothing more is received
        self._http.server.loop.remove_reader(self._fd)
        self._timer.cancel()
        self._timer = self._http.server.loop.call_later(ANSWER_TIMEOUT_S, self.close)
        self._head_only = event.method == b"HEAD"
        if event.method not in (b"GET", b"HEAD"):
            self.respond(405, _TEXT, b"only GET and HEAD\n")
            return
        if not self._http.is_unix and not self._asks_for_this_machine(event):
            self.respond(421, _TEXT, _FOREIGN)
            return
        path = event.target.partition(b"?")[0].decode("ascii", "replace")
        # One header may come as several.
        values = [value.decode("latin-1") for name, value in event.headers if name == b"accept"]
        jobs = self._http.show_jobs or self._is_administrator()
        self._http.answer(self, path, jobs=jobs, accept=",".join(values))

    def _asks_for_this_machine(self, request: h11.Request) -> bool:
        """Whether the Host header names this machine, or need not; see the module."""
        if not _address(self._sock.getsockname()).is_loopback:
            return True
        hosts = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        return all(_is_of_this_machine(host) for host in hosts)

    def _is_administrator(self) -> bool:
        if not self._http.is_unix:
            return False
        server = self._http.server
        peer: Peer = server.namespaces.peer(self._sock)
        server.left_namespace(peer)
        return peer.is_administrator

    def respond(self, status: int, kind: str, body: bytes) -> None:
        """Send an answer, then close the connection."""
        if self._closed:
            return
        assert self._h11 is not None
        self._answered = True
        self._http.server.loop.remove_reader(self._fd)
        head = self._head(status, kind, [("Content-Length", str(len(body)))])
        self._out = [memoryview(head)] if self._head_only else [memoryview(head), memoryview(body)]
        self._send()

    def _head(self, status: int, kind: str, more: list[tuple[str, str]]) -> bytes:
        assert self._h11 is not None
        headers = [
            ("Content-Type", kind),
            *more,
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
            *page.SECURITY,
        ]
        head = self._h11.send(h11.Response(status_code=status, headers=headers))
        assert head is not None
        return head

    def begin_events(self) -> bool:
        """Begin an answer of events; return whether they are wanted."""
        # A browser that does not read gets few events, not megabytes of them.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, EVENTS_BUFFER)
        self._out = [memoryview(self._head(200, page.EVENTS, []))]
        self._has_events = not self._head_only
        self._send()
        return self._has_events and not self._closed

    def send_event(self, event: bytes) -> None:
        """Send an event, unless an earlier one is not read yet."""
        if self._closed or self._out:
            return
        assert self._h11 is not None
        chunk = self._h11.send(h11.Data(data=event))
        assert chunk is not None
        self._out = [memoryview(chunk)]
        self._timer = self._http.server.loop.call_later(ANSWER_TIMEOUT_S, self.close)
        self._send()

    def _send(self) -> None:
        try:
            while self._out:
                sent = self._sock.send(self._out[0])
                if sent == len(self._out[0]):
                    self._out.pop(0)
                else:
                    self._out[0] = self._out[0][sent:]
        except (BlockingIOError, InterruptedError):
            self._http.server.loop.add_writer(self._fd, self._send)
        except OSError:
            self.close()
        else:
            if self._has_events:
                self._timer.cancel()
                self._http.server.loop.remove_writer(self._fd)
            else:
                self.close()

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        loop = self._http.server.loop
        self._timer.cancel()
        loop.remove_reader(self._fd)
        loop.remove_writer(self._fd)
        self._out.clear()
        carrying = self._receiver is not None and self._receiver.carrying
        closer_of(self.user).close_socket(self._sock, carrying)
        self._http.forget(self)


def _is_of_this_machine(host: str) -> bool:
    """Whether a header Host has an address, or a name of this machine."""
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    name = name.removesuffix(".")
    known = {"", "localhost", socket.gethostname().lower()}
    return name in known or name.endswith(".localhost") or name in _names_of_loopback()


@functools.lru_cache(1)
def _names_of_loopback() -> frozenset[str]:
    """Return the names that this machine has for itself, such as its name with its domain."""
    names: set[str] = set()
    with (
        contextlib.suppress(OSError),
        open("/etc/hosts", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            address, *others = line.partition("#")[0].split() or [""]
            with contextlib.suppress(ValueError):
                if ipaddress.ip_address(address).is_loopback:
                    names.update(map(str.lower, others))
    return frozenset(names)
