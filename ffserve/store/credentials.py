"""Access: the credentials of a client for origins, so that the daemon can fetch for it.

A client collects the options of its file systems (`collect`): the credentials that the packages
find in its environment and files, and the endpoint of an origin. They travel to the daemon as text.
The daemon uses nothing else (`Access`): it has neither credentials nor keys nor configuration of
its own, so that nobody reads with the rights of the daemon. It takes only the options that a scheme
names (`schemes/`). What cannot travel (Kerberos tickets, keys in an agent) stays with the client.

A daemon that reads for its own user alone (`store.access = "own"`) has what that user's processes
have: environment, files, tickets. If these are the client's (`own_settings`), it reads any protocol
as the client would by itself (`Access.own`).

Nothing here is logged or shown. The text of an `Access` object has no secrets.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeAlias
from urllib.parse import urlsplit

from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.limits import MOST_ACCESS, MOST_ORIGINS
from ffserve.store import urls
from ffserve.store.schemes import protocol_of, scheme_of, schemes, union
from ffserve.store.schemes.scheme import (
    Options,
    Scheme,
    cannot_pass,
    fsspec_settings,
    set_variables,
)

_PROXIES = "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "FTP_PROXY"
_PLACE = re.compile(r"[^/?#\0-\x1f]+://[^/?#\0-\x1f]*(?=[^\0-\x1f]*\Z)")
"""The beginning of a URL without control characters: protocol and host, or bucket."""
_LOGGERS = ("asyncio", "fsspec", "urllib3")
"""Loggers of the packages that several schemes use."""

Passed: TypeAlias = dict[str, Options]
"""Options by the name of their scheme."""


class _Own(Scheme):
    """The digest of the client's settings, which travels beside the options of schemes."""

    options: ClassVar = {"settings": str}


_OWN = _Own("own")


# ---- in the client -------------------------------------------------------------------------------


def collect(some: Sequence[str], *, own: bool = False) -> str:
    """Return the access of this process to the origins of URLs, as text for the daemon.

    It reads files, and may ask services for credentials.

    Args: own: whether the daemon uses its own settings if they are those of this process.
    Raises: ReadError: the daemon cannot have what is needed.
    """
    settings = {"own": {"settings": own_settings(some)}} if own else {}
    try:
        text = json.dumps({**_passed(some), **settings}, separators=(",", ":"))
        if len(text) > MOST_ACCESS:
            raise cannot_pass(f"an access to origins of {len(text)} bytes")
        return text
    except ReadError:
        if not own or any(scheme_of(url).in_process for url in some):
            raise
        return json.dumps(settings)


def own_settings(some: Sequence[str]) -> str:
    """Return a digest of the settings by which this process reads URLs: variables of the
    environment, and fsspec's configuration."""
    conf = fsspec_settings()
    protocols = sorted({protocol_of(url) for url in some})
    prefixes = {each for url in some for each in scheme_of(url).settings}
    variables = set_variables(prefixes)
    found = sorted((os.fsdecode(name), os.fsdecode(text)) for name, text in variables.items())
    seed = repr([found, [(name, conf.get(name, {})) for name in protocols]])
    return hashlib.blake2b(seed.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _passed(some: Iterable[str]) -> Passed:
    """Return the options for URLs. Raises: ReadError: the daemon cannot have them."""
    found: Passed = {}
    conf = fsspec_settings()
    for protocol, scheme in sorted({protocol_of(url): scheme_of(url) for url in some}.items()):
        try:
            options = scheme.collect(dict(conf.get(protocol, {})))
        except FFServeError:
            raise
        except Exception as error:  # of the packages; the reader says what it is
            raise cannot_pass(f"the access to {protocol}:// ({type(error).__name__})") from error
        options.pop("expires", None)
        for name in options.keys() - scheme.options.keys():
            raise cannot_pass(f"the option {name!r} of {protocol}:// in fsspec's configuration")
        if found.setdefault(scheme.name, options) != options:
            raise cannot_pass(
                f"an access to {protocol}:// that differs from the access to another URL of its "
                "kind"
            )
    return found


# ---- in the daemon -------------------------------------------------------------------------------


def forget_own_settings() -> None:
    """Clear fsspec's configuration in this process, which reads for others, delete the variables
    that the packages of the schemes would take settings from, and lead them to no file of this
    user. Most packages cannot be told to look at none of that, or look again in a part of theirs
    (to renew a token), so the process has none of it."""
    fsspec_settings().clear()
    forgotten = tuple(union(lambda scheme: scheme.forgotten))
    for name in list(os.environ):
        if name.startswith(forgotten) or name.upper() in _PROXIES:
            del os.environ[name]
    for files in union(lambda scheme: scheme.own_files) | {"NETRC"}:
        os.environ[files] = os.devnull


def quieten_packages() -> None:
    """Log nothing of the packages but warnings: their other lines have headers of requests."""
    for name in {*_LOGGERS, *union(lambda scheme: scheme.loggers)}:
        logging.getLogger(name).setLevel(logging.WARNING)


class Access:
    """The access that a client passed; used for that client's user only. Threads may call it.

    Args: text: of `collect`.
    Raises: UsageError: the text is not valid.
    """

    def __init__(self, text: str) -> None:
        self._options = _checked(text)
        self._settings = self._options.pop("own", {}).get("settings")
        self.own = False
        """Whether the settings of this process are used."""
        self.digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
        """Another one for each access."""
        self._lock = threading.Lock()
        self._shared: dict[tuple[str, str], Any] = {}
        """File systems that all threads may use, by protocol and host."""
        self._own = threading.local()

    def __repr__(self) -> str:
        return "Access(…)"

    def use_own(self, some: Sequence[str]) -> None:
        """Use the settings of this process, which reads for its own user alone, if they are the
        client's.

        Raises: ReadError: they are not, and the client could not pass its own.
        """
        self.own = self._settings == own_settings(some)
        if not self.own and not {scheme_of(url).name for url in some} <= set(self._options):
            raise ReadError(
                "the daemon was started with other settings for these files (environment, or "
                "fsspec's configuration) than this process has",
                path=urls.shown(some[0]),
                hint="`ffserve stop` ends it, and the next reader starts another",
            )

    def place(self, url: str) -> str:
        """Return where the bytes of a URL come from, for people and `[store] common`: its origin,
        and what leads elsewhere under the same name."""
        origin = urls.origin_of(url)
        if self.own:
            return origin
        scheme = scheme_of(url)
        return scheme.place(url, origin, self._options_of(scheme), self.digest.hex()[:16])

    def file_system(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL, and the path in it. Raises: what the packages raise."""
        scheme = scheme_of(url)
        key = protocol_of(url), url.partition("://")[2].partition("/")[0]
        own: dict[tuple[str, str], Any] = self._own.__dict__.setdefault("systems", {})
        with self._lock:
            found = self._shared.get(key) or own.get(key)
        if found is not None and scheme.is_connected(found):
            return found, scheme.path_in(found, url)
        found, path = scheme.connect(url, self._options_of(scheme))
        with self._lock:
            if getattr(found, "async_impl", False):
                found = self._shared.setdefault(key, found)
                if len(self._shared) > MOST_ORIGINS:
                    del self._shared[next(iter(self._shared))]  # what is open has it still
            else:
                own[key] = found
        return found, path

    def _options_of(self, scheme: Scheme) -> Options:
        return self._options.get(scheme.name, {})


def _checked(text: str) -> Passed:
    """Return the options in a text. Raises: UsageError."""
    if len(text) > MOST_ACCESS:
        raise UsageError("invalid access to an origin: it is too long")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError("invalid access to an origin: it is not a map of options")
    for name, options in found.items():
        scheme = _OWN if name == "own" else schemes().get(name)
        known = scheme is _OWN or (scheme is not None and scheme.travels)
        if scheme is None or not known or not isinstance(options, dict):
            raise UsageError(
                f"invalid access to an origin: it has the unknown scheme {name[:40]!r}"
            )
        wrong = next((option for option in options if not _fits(scheme, option, options)), None)
        if wrong is not None:
            raise UsageError(
                f"invalid access to an origin: the option {wrong[:40]!r} of {name} is invalid"
            )
    return found


def _fits(scheme: Scheme, name: str, options: Options) -> bool:
    """Whether an option is one of a scheme, has a valid value, and has the others that it needs."""
    value = options[name]
    return (
        isinstance(value, scheme.options.get(name, ()))
        and scheme.is_valid(name, value)
        and all(other in options for other in scheme.needed.get(name, ()))
    )


def served(url: str) -> bool:
    """Whether the daemon fetches this URL: it has a known protocol, and no other one below it
    (`::`)."""
    found = _PLACE.match(url)
    if "::" in url or found is None or not scheme_of(url).travels:
        return False
    try:
        parts = urlsplit(found[0])  # it remembers those of one place
        port = parts.port
    except ValueError:
        return False
    return bool(parts.netloc) and (port is None or port > 0)
