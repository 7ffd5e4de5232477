"""Cache network: ranges of objects from an HTTP cache that several nodes share.

`[store] cache` names the cache, such as the nginx of `deploy/cache-network/` or Dragonfly's proxy.
The requests are those for the origin, signed in their URLs; only the connection leads elsewhere, as
with `curl --connect-to`. No header with credentials goes there. Each answer is compared with the
version that is wanted, as an answer of the origin is. Whether a user may read an object is asked of
the origin, before the cache is asked for anything (`origin.py: RemoteFile`).

The cache is never needed. A request may take CONNECT_S and ANSWER_S. After one that failed, the
origin is asked, and a thread of its own finds out now and then whether the cache works again. A
request that breaks off while others are answered was perhaps at one member of many that ended; only
this one is asked of the origin then. One that is late may have waited for a slow origin, which all
nodes would ask without the cache: fewer are sent at a time, as by TCP's congestion control, and
already when answers take long, before any is late.
"""

from __future__ import annotations

import functools
import http.client
import io
import logging
import math
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ffserve.limits import ORIGIN_THREADS
from ffserve.store.web import Answer, Received, Web, address_of

log = logging.getLogger("ffserve")
T = TypeVar("T")

CONNECT_S, ANSWER_S = 0.5, 1.5
"""A connection, and the whole answer for a block, may take so long: 2 s together."""
SLOW_S = 1.0
"""After an answer that took longer, fewer are asked for at a time. nginx looks each half second
whether a slice that another request fetches is there, so the next answer may be late."""
FIRST_COUNT = ORIGIN_THREADS / 4
"""So many requests are sent at a time first, and in spite of slow answers: many nodes begin at
once."""
SIGNED_S = 900
"""A signed URL is valid for so long: as long as Amazon takes a signed request for a new one."""
SIGNED_AGAIN_S = 300.0
"""A URL is used for so long, since a signature with RSA takes a millisecond."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Pauses between attempts at a cache that has failed; they double."""
LOGGED_S = 60.0
"""A cache that fails again and again is logged at most so often, for each origin; one that has
worked for so long is tried again soon after a failure."""


class SignedUrl(NamedTuple):
    """A URL by which one object is read without any header. secret: whether it allows more than
    that, or for longer than SIGNED_S; then it goes through TLS or a Unix socket only."""

    url: str
    secret: bool = False


class CacheNetwork(Web):
    """The cache that this process uses. Threads may call it.

    Args: address: `http://HOST:PORT`, `https://HOST:PORT` or `unix:/PATH`. certificate, key,
        authorities: files for TLS, of this client and of who may have signed the cache's; "": none,
        and those of the system.
    Raises: OSError, ssl.SSLError: the files cannot be used.
    """

    def __init__(
        self, address: str, certificate: str = "", key: str = "", authorities: str = ""
    ) -> None:
        super().__init__(CONNECT_S, ANSWER_S)
        self._path = address.removeprefix("unix:") if address.startswith("unix:") else ""
        self._to = address_of("http://unix/" if self._path else address)
        self._context: ssl.SSLContext | None = None
        if self._to.tls:
            self._context = ssl.create_default_context(cafile=authorities or None)
            if certificate:
                self._context.load_cert_chain(certificate, key or None)
        self.is_private = bool(self._path) or self._to.tls
        """Whether nobody between here and the cache sees what is asked."""
        self.sent = self.faults = 0
        """Bytes that came from it, and answers that were not used."""

    def get(self, url: str, headers: Mapping[str, str]) -> Answer:
        """Ask for what a URL of an origin leads to. Raises: OSError, ValueError."""
        origin = address_of(url)
        scheme = "https" if origin.tls else "http"
        place = {"Host": origin.place, "X-Forwarded-Proto": scheme}
        return self.request("GET", url, {**headers, **place})

    def new_connection(self, to: object, proxy: object) -> http.client.HTTPConnection:
        return _Connection(self.connected)

    def connected(self) -> socket.socket:
        """Return a socket that is connected to the cache. Raises: OSError."""
        if self._path:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                found.settimeout(CONNECT_S)
                found.connect(self._path)
            except FileNotFoundError:  # which would mean a missing object
                found.close()
                raise ConnectionRefusedError(f"nobody listens at {self._path}") from None
            except BaseException:
                found.close()
                raise
            return found
        found = socket.create_connection((self._to.host, self._to.port), CONNECT_S)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            return found
        return self._context.wrap_socket(found, server_hostname=self._to.host)


class _Connection(http.client.HTTPConnection):
    """A connection to the cache."""

    def __init__(self, connected: Callable[[], socket.socket]) -> None:
        super().__init__("cache")
        self._connected = connected

    def connect(self) -> None:
        self.sock = _TimedSocket(self._connected())


class _TimedSocket:
    """A socket with the calls of `Web`, on which the time from a request to the end of its answer
    is limited: a cache may send a byte now and then for ever."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._until = sock, 0.0
        self.fileno, self.settimeout, self.close = sock.fileno, sock.settimeout, sock.close

    def sendall(self, content: bytes) -> None:
        """Send a request. Raises: OSError."""
        self._until = time.monotonic() + ANSWER_S
        self._sock.settimeout(ANSWER_S)
        self._sock.sendall(content)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the stream of an answer."""
        return io.BufferedReader(_TimedStream(self._sock, self._until))


class _TimedStream(io.RawIOBase):
    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock, self._until = sock, until
        raw = sock.makefile("rb", buffering=0)
        self._raw = Received(sock, raw) if type(sock) is socket.socket else raw

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"its answer took more than {ANSWER_S} s")
        self._sock.settimeout(left)
        return self._raw.readinto(into)

    def close(self) -> None:
        self._raw.close()
        super().close()


class Route:
    """Whether the cache works for the files of one origin. Threads may share it."""

    def __init__(self) -> None:
        self.reset()
        _routes.add(self)

    def reset(self) -> None:
        """Know nothing of the cache."""
        self._lock = threading.Condition()
        self._failed = self._probing = False
        self._active, self._most = 0, FIRST_COUNT
        """Requests on their way, and how many there may be."""
        self._answered = self._halved = -math.inf
        """When the last answer came, and when fewer were allowed."""
        self._pause = self._next = 0.0
        self._logged = self._worked = -math.inf
        """When a failure was last logged, and when the cache last began to work."""

    def fetch(self, network: CacheNetwork, name: str, attempt: Callable[[], T | None]) -> T | None:
        """Return what an attempt at the cache returns, with a value that is right; None: the origin
        is to be asked.

        Args: name: of the origin, for the log. attempt: raises what was wrong.
        """
        with self._lock:
            while not self._failed and self._active >= int(self._most):
                self._lock.wait()
            if works := not self._failed:
                self._active += 1
            probe = not (works or self._probing) and time.monotonic() >= self._next
            self._probing |= probe
        if works:
            return self._asked(network, name, attempt)
        if probe:
            given = network, name, attempt
            threading.Thread(
                target=self._probe, args=given, name="ffserve-cache", daemon=True
            ).start()
        return None

    def _asked(self, network: CacheNetwork, name: str, attempt: Callable[[], T | None]) -> T | None:
        begun = time.monotonic()
        try:
            found = attempt()
        except Exception as error:
            late = isinstance(error.__cause__ or error, TimeoutError)
            if (late or getattr(error, "again", False)) and self._serves_others(begun, late):
                network.faults += 1
            else:
                self.failed(network, name, error)
            return None
        else:
            with self._lock:
                self._answered = time.monotonic()
                if self._answered <= begun + SLOW_S:
                    self._most = min(self._most + 1 / self._most, ORIGIN_THREADS)
                elif begun > self._halved and self._most > FIRST_COUNT:
                    self._most, self._halved = max(self._most / 2, FIRST_COUNT), self._answered
            return found
        finally:
            with self._lock:
                self._active -= 1
                self._lock.notify(2)  # one more may be allowed now

    def _serves_others(self, begun: float, late: bool) -> bool:
        """Whether others were answered lately, so that the cache is asked again; if this request
        was late, fewer are sent at a time then."""
        with self._lock:
            now = time.monotonic()
            if now - self._answered > ANSWER_S:
                return False
            if late and begun > self._halved:
                if self._most < 2:
                    return False
                self._most, self._halved = self._most / 2, now
            return True

    def _probe(self, network: CacheNetwork, name: str, attempt: Callable[[], object]) -> None:
        """Find out whether the cache works again, in a thread that nobody waits for."""
        try:
            works = attempt() is not None
        except Exception:
            network.faults, works = network.faults + 1, False
        with self._lock:
            self._probing, self._failed = False, not works
            if works:
                self._worked, self._most = time.monotonic(), 2.0
            else:
                self._wait()
        if works:
            log.info("store: the cache serves %s again", name)

    def _wait(self) -> None:
        self._pause = min(2 * self._pause or FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._next = time.monotonic() + self._pause

    def failed(self, network: CacheNetwork, name: str, error: object) -> None:
        """Ask the origin from now on, and the cache after a pause."""
        network.faults += 1
        with self._lock:
            if self._failed:  # for others that asked at the same time
                return
            self._failed, now = True, time.monotonic()
            if now > self._worked + LOGGED_S:
                self._pause = 0.0
            self._wait()
            self._lock.notify_all()
            if now < self._logged + LOGGED_S:
                return
            self._logged = now
        log.warning("store: the cache failed, so the origin %s is asked: %s", name, error)


_routes: weakref.WeakSet[Route] = weakref.WeakSet()
_chosen: list[CacheNetwork | None] = []


def choose(network: CacheNetwork | None) -> None:
    """Use this cache in this process, or none, whatever its environment says."""
    _chosen[:] = [network]


def current() -> CacheNetwork | None:
    """Return the cache of this process: the chosen one, else ``$FFSERVE_STORE_CACHE``.

    Raises: UsageError.
    """
    if _chosen:
        return _chosen[0]
    address = os.environ.get("FFSERVE_STORE_CACHE")
    return _named(address) if address else None


@functools.lru_cache(1)
def _named(address: str) -> CacheNetwork:
    from ffserve.config import parse_cache
    from ffserve.errors import UsageError

    try:
        return CacheNetwork(parse_cache(address))
    except UsageError as error:
        raise UsageError(f"FFSERVE_STORE_CACHE: {error.message}", hint=error.hint) from None


def _after_fork() -> None:
    for route in _routes:
        route.reset()


os.register_at_fork(after_in_child=_after_fork)
