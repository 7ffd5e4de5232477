"""Scheme: everything that is special about the remote files of one protocol, in one object.

Each other module of this folder defines one scheme as `SCHEME`: the protocols of its URLs, the
packages that it needs, the credentials that travel to the daemon, its file systems with their
timeouts, how one version of an object is read, and what its errors mean. `Scheme` itself is the
scheme of every protocol that has no module here: fsspec knows its package, and nothing is special.

Packages are imported when a file system is made, never before.

Retries are not here: the packages below make none (each scheme turns theirs off), and
`store/fetching.py: Breaker` tries again for all schemes alike.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from ffserve.errors import ReadError
from ffserve.limits import ASKED_AT_ONCE

BROKEN = {errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EIO,
          errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED}  # fmt: skip
"""Errors of the system that mean a lost connection."""

KEPT_HEADERS = frozenset(
    ("accept", "accept-encoding", "connection", "if-match", "range", "user-agent")
)
"""Headers that go to another host that the first one names. All others may be credentials, whatever
they are called."""
USER_SETTINGS = (
    "HOME", "USER", "LOGNAME", "NETRC", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTP_PROXY",
    "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
"""Environment variables from which packages of every scheme take settings."""
_USER_SETTINGS = frozenset(name.encode() for name in USER_SETTINGS)
Options: TypeAlias = dict[str, Any]


class Meaning(enum.Enum):
    """The meaning of the text of an error, where classes and status do not show it."""

    DENIED = enum.auto()
    UNKNOWN = enum.auto()
    """The origin that the URL names does not exist."""
    LATER = enum.auto()
    """The origin answered that it cannot serve the request now."""
    BROKEN = enum.auto()
    """The connection was lost."""


class Sent:
    """A request that was sent; or nothing, for a call that needs none."""

    def close(self) -> None:
        """End it, unless its answer was asked for."""


@dataclass(frozen=True, slots=True)
class OpenVersion:
    """One version of an object, open for reading.

    Args:
        fetch: returns the bytes [start, end), and what is known of the version that they belong to;
            None: its caller looks at the object again. Raises: what the package raises.
        shared: whether threads may use it at the same time.
        send: sends the request for bytes that `fetch` is called for later, if a connection is open.
            Returns what the caller closes then; None: it was not sent.
        cached: does the same by a cache of `cache_network.py`, and returns None if that cannot be
            asked. route: whether this cache works.
    """

    fetch: Callable[[int, int], tuple[bytes, dict[str, Any] | None]]
    shared: bool = False
    send: Callable[[int, int], Sent | None] | None = None
    cached: Callable[[Any, int, int], tuple[bytes, dict[str, Any]] | None] | None = None
    route: Any = None


class Scheme:
    """The remote files of one protocol, or of several with the same package.

    A file system here is one of fsspec, or an object with the same calls `info`, `glob`, `ls`,
    `find` and `invalidate_cache`, and with `async_impl`: whether threads may share it.

    Args: name: of a protocol that has no scheme of its own.
    """

    name: str
    """The name of the options of this scheme in an `Access`."""
    protocols: tuple[str, ...]
    """The part of a URL before `://`, in lower case."""

    # ---- URLs ----
    has_query: ClassVar[bool] = False
    """Whether a question mark begins the query of a URL, as in web addresses."""
    splits_query: ClassVar[bool] = False
    """Whether the file system takes a question mark for a query, although its URLs are paths; its
    patterns have no `?`."""
    in_process: ClassVar[bool] = False
    """Whether the files are in the memory of one process."""

    cached: ClassVar[bool] = False
    """Whether a cache network may have the files."""

    # ---- packages ----
    package: ClassVar[str | None] = "fsspec"
    """The package that a user installs, as an argument of `pip install`."""
    module: ClassVar[str | None] = None
    """The module that the daemon needs to fetch for others; None: it fetches for its own user."""
    loggers: ClassVar[tuple[str, ...]] = ()
    """Loggers of the packages. Their lines below warnings contain headers of requests."""

    # ---- waiting ----
    at_once: ClassVar[int] = ASKED_AT_ONCE
    """Files of one opening whose origin is asked at the same time, unless a daemon asks for fewer.
    With more than ASKED_AT_ONCE each is read by the thread that opens it: threads share the
    connections."""
    connect_s: ClassVar[float] = 10.0
    """An origin that does not accept a connection for this long has failed."""
    silent_s: ClassVar[float] = 30.0
    """An origin that sends nothing for this long has failed."""

    # ---- settings ----
    settings: tuple[str, ...]
    """Beginnings of the variables of the environment that the packages take settings from."""
    forgotten: ClassVar[tuple[str, ...]] = ()
    """Variables that a daemon that reads for others deletes, since the packages would use them."""
    own_files: ClassVar[tuple[str, ...]] = ()
    """Variables that name files of settings; in such a daemon they name an empty file."""
    options: ClassVar[Mapping[str, type[Any]]] = {}
    """Options that travel to the daemon, and their types."""
    needed: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Options that need others."""

    # ---- versions and errors ----
    tags: ClassVar[tuple[str, ...]] = (
        "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "sha256", "checksum",
        "modification_time",
    )  # fmt: skip
    """Names of facts that differ for each version of a file, the best first."""
    times: ClassVar[tuple[str, ...]] = (
        "LastModified", "last_modified", "Last-Modified", "updated", "modificationTime",
        "modification_time", "mtime",
    )  # fmt: skip
    """Names of facts that give the modification time of a file, the best first."""
    credential_errors: ClassVar[tuple[str, ...]] = ()
    """Names of exception classes that mean missing or invalid credentials. These and the names and
    texts of failed connections count for all schemes, since packages use the same libraries."""
    denied_codes: ClassVar[tuple[str, ...]] = ()
    """Codes in an answer that mean that access is denied."""
    busy_codes: ClassVar[tuple[str, ...]] = ()
    """Codes in an answer that mean that the request may be repeated later."""
    connection_errors: ClassVar[tuple[str, ...]] = ()
    """Names of exception classes that mean that the connection failed."""
    closed_texts: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the texts of an OSError without a number that means that the connection
    failed."""
    hints: ClassVar[Mapping[Meaning, str]] = {}
    """Hints for the user, by the meaning that `meaning` found."""

    def __init__(self, name: str = "") -> None:
        if name:
            self.name, self.protocols, self.settings = name, (name,), (name.upper(),)

    @property
    def travels(self) -> bool:
        """Whether the daemon fetches these URLs with credentials that a client passes."""
        return self.module is not None

    def is_installed(self) -> bool:
        """Whether this process has the module that the daemon needs."""
        if self.module is None:
            return False
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # of the package above it
            return False

    # ---- credentials ----

    def collect(self, settings: Options) -> Options:
        """Return the options that the daemon needs to read as this process would.

        It reads files, and may ask services for credentials.

        Args: settings: what the user has set for the protocol in fsspec's configuration.
        Raises: ReadError: the daemon cannot have them. What the packages raise.
        """
        raise cannot_pass(f"the access to {self.name}://")

    def is_valid(self, name: str, value: Any) -> bool:
        """Whether an option of the right type can have a value."""
        if isinstance(value, dict):
            texts = [*value, *value.values()]
            if not all(isinstance(text, str) for text in texts):
                return False
            return not any("\r" in text or "\n" in text or "\0" in text for text in texts)
        if name == "endpoint_url":
            return str(value).startswith(("http://", "https://"))
        if name == "port":
            return not isinstance(value, bool) and 0 < value < 65536
        return True

    def place(self, url: str, origin: str, options: Options, access: str) -> str:
        """Return the place of the bytes of a URL, for people and `[store] common`: its origin, and
        options that lead elsewhere under the same name.

        Args: access: text that is another one for each access.
        """
        return origin

    # ---- file systems ----

    def connect(self, url: str, options: Options) -> tuple[Any, str]:
        """Return a new file system that is made of these options alone, and the path of a URL in
        it. Nothing comes from the environment and the files of this process.

        Raises: what the packages raise; ValueError: the URL is invalid.
        """
        raise NotImplementedError

    def connect_own(self, url: str, settings: Options) -> tuple[Any, str]:
        """Return the file system of a URL with the settings of this process, and the path in it.

        Args: settings: of fsspec's configuration.
        Raises: ImportError: a package is missing. What the packages raise.
        """
        core = importlib.import_module("fsspec.core")
        defaults = self.defaults(settings)
        given = {name: value for name, value in defaults.items() if name not in settings}
        system, path = core.url_to_fs(url, **given)
        if not self.is_connected(system):
            type(system).clear_instance_cache()
            system, path = core.url_to_fs(url, **given)
        return system, str(path)

    def defaults(self, settings: Options) -> Options:
        """Return options of `connect_own`: limits of waiting, and no retries below those of the
        store. Settings of the user are kept."""
        return {}

    def is_connected(self, system: Any) -> bool:
        """Whether a file system that was used before can be used again."""
        return True

    def path_in(self, system: Any, url: str) -> str:
        """Return the path of a URL in a file system of `connect`."""
        return str(type(system)._strip_protocol(url))

    def open(self, system: Any, path: str, *, size: int, tag: str) -> OpenVersion:
        """Open a version of an object for reading.

        Args: tag: ETag of the version, or what its origin has instead; "" if it has none.
        Raises: what the packages raise.
        """
        return open_file(system, path)

    def call(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the packages are called."""
        return contextlib.nullcontext()

    # ---- errors ----

    def meaning(self, text: str) -> Meaning | None:
        """Return the meaning of the text of an error; None if it shows none."""
        return None

    def shortened(self, text: str) -> str:
        """Return the part of the text of an error that helps a user."""
        return text


def cannot_pass(what: str) -> ReadError:
    """Return the error for an access that cannot be passed to the daemon."""
    return ReadError(
        f"{what} cannot be passed to the daemon, which could not read these files",
        hint="this process reads the files itself, by ranges",
    )


def refuse_others(settings: Options, scheme: Scheme) -> None:
    """Raise a ReadError for unknown settings, since the daemon would read without them."""
    for name in settings:
        raise cannot_pass(f"the option {name!r} of {scheme.name}:// in fsspec's configuration")


def fsspec_settings() -> dict[str, Options]:
    """Return what the user has set in fsspec's configuration, by protocol."""
    try:
        found: dict[str, Options] = importlib.import_module("fsspec").config.conf
    except ImportError:
        return {}
    return found


def set_variables(prefixes: Iterable[str]) -> dict[bytes, bytes]:
    """Return the variables of the environment that some packages take settings from.

    Args: prefixes: beginnings of the names of those that not all packages read.
    """
    # Each file that is opened asks; decoding the whole environment took a fifth of its time.
    beginnings = tuple(prefix.encode() for prefix in prefixes)
    found = [n for n in os.environb if n.startswith(beginnings) or n.upper() in _USER_SETTINGS]
    return {name: os.environb[name] for name in found}


def listing_too_long(what: str) -> ReadError:
    """Return the error for a listing that exceeds a limit. Args: what: exceeds which."""
    return ReadError(
        f"the origin lists {what}",
        hint="give a directory or a pattern with fewer files, or the names of files; an origin "
        "whose listing has no end is broken",
    )


def without_none(options: Options) -> Options:
    """Return the options that are set."""
    return {name: value for name, value in options.items() if value is not None}


def new_file_system(url: str, **options: Any) -> tuple[Any, str]:
    """Return a file system of fsspec that is not shared, and the path of a URL in it."""
    core = importlib.import_module("fsspec.core")
    system, path = core.url_to_fs(url, skip_instance_cache=True, **options)
    return system, str(path)


def restrict_session(session: Any) -> None:
    """Let a session of requests take no settings of this process, and pass few headers on to
    another host."""

    def rebuild(prepared: Any, response: Any) -> None:
        if session.should_strip_auth(response.request.url, prepared.url):
            for name in [name for name in prepared.headers if name.lower() not in KEPT_HEADERS]:
                del prepared.headers[name]

    session.trust_env = False
    session.rebuild_auth = rebuild


def open_file(system: Any, path: str) -> OpenVersion:
    """Open a file of fsspec without a cache; each read is one request."""
    try:
        file = system.open(path, "rb", cache_type="none")
    except TypeError:  # of a file system whose files have no cache
        file = system.open(path, "rb")

    def fetch(start: int, end: int) -> tuple[bytes, None]:
        file.seek(start)
        return file.read(end - start), None

    return OpenVersion(fetch, getattr(getattr(file, "fs", None), "async_impl", False))
