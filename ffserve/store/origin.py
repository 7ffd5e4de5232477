"""Origins: list remote files, identify them, read ranges of them, and report errors.

Everything here blocks and is called in threads of the store. A scheme (`schemes/`) gives the file
system of a URL, which is used by its public calls (`info`, `glob`, `ls`, `find`), and opens a
version of an object, of which each read is one request.

An object is identified by URL, size, ETag (or the version that its origin has instead) and
modification time. An answer to a read says to which version its bytes belong; if it does not, the
object is looked at again after the read. So no two versions of an object are ever mixed.

Nothing here writes to an origin (`public.py: RemoteDirectory` does). Credentials are those that the
packages find (environment, their own files), or those of an `Access` and no others. No message
contains any.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import glob
import importlib
import itertools
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ffserve.errors import AccessDenied, FFServeError, MissingFile, ReadError, UsageError
from ffserve.limits import ASKED_AT_ONCE
from ffserve.store import cache_network, urls
from ffserve.store.credentials import Access
from ffserve.store.schemes import protocol_of, scheme_of, union
from ffserve.store.schemes.scheme import BROKEN, Meaning, OpenVersion, Scheme, Sent, fsspec_settings

Entry: TypeAlias = tuple[str, dict[str, Any]]
"""A file or directory of a listing: its name, and what is known of it."""
_ANY = "[!\0]"
"""A question mark of a pattern, for file systems that take it for the beginning of a query."""
HIDDEN, SPECIAL = "hidden", "not a regular file"
"""Reasons for which a file is left out of a listing."""
_URL_INSIDE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_QUERY_INSIDE = re.compile(r"\?[^\s'\"<>]*=[^\s'\"<>]*")
_BUSY = {408, 425, 429, 500, 502, 503, 504}


class OriginError(Exception):
    """A failed call of an origin.

    Args: error: for the caller. again: whether to try again. answered: whether it came from there.
    """

    def __init__(self, error: FFServeError, *, again: bool, answered: bool = True) -> None:
        super().__init__(str(error))
        self.error = error
        self.again = again
        self.answered = answered


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """One version of a remote object.

    Args:
        url: as it was given, or listed.
        size: bytes; -1 if the origin does not say.
        tag: ETag, or the version that the origin has instead; "" if it has none.
        modified: seconds since 1970; 0 if unknown.
    """

    url: str
    size: int
    tag: str
    modified: int

    @property
    def key(self) -> str:
        """A text that differs for each object and version."""
        return "\n".join((self.url, str(self.size), self.tag, str(self.modified)))


# ---- file systems --------------------------------------------------------------------------------


def file_system(
    url: str, access: Access | None = None, systems: dict[str, Any] | None = None
) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Args: access: with what it is reached; None: with what this process has. systems: those that
        files opened together share, by origin; it gets those that are new.
    Raises: UsageError for an unknown protocol or a package that is missing; OriginError.
    """
    protocol, scheme = protocol_of(url), scheme_of(url)
    if systems is not None and scheme.at_once > ASKED_AT_ONCE:
        place = urls.origin_of(url)
        if place not in systems:
            systems[place] = file_system(url, access)[0]
        return systems[place], scheme.path_in(systems[place], url)
    try:
        if access is not None and not access.own:
            return access.file_system(url)
        return scheme.connect_own(url, fsspec_settings().get(protocol, {}))
    except ImportError as error:
        raise UsageError(
            f"the protocol {protocol}:// needs a package that is missing: {error}",
            path=urls.shown(url),
            hint=_installing(scheme, error),
        ) from None
    except ValueError as error:
        raise UsageError(f"invalid URL: {error}", path=urls.shown(url)) from None
    except Exception as error:
        raise failure(error, url) from error


def _installing(scheme: Scheme, error: ImportError) -> str | None:
    """Return what installs the package of a scheme. fsspec names those of others itself."""
    ours = scheme.package is not None and (scheme.package != "fsspec" or error.name == "fsspec")
    return f"pip install {scheme.package}" if ours else None


# ---- what failed ---------------------------------------------------------------------------------


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def _status(error: BaseException) -> int:
    """Return the HTTP status of an exception of `web.py`, requests or httpx; 0 if it has none."""
    response = getattr(getattr(error, "response", None), "status_code", None)
    for value in (response, getattr(error, "status", None)):
        if isinstance(value, int):
            return value
    return 0


def _code(error: BaseException) -> str:
    code = getattr(error, "code", "")
    return code if isinstance(code, str) else ""


def failure(error: BaseException, url: str) -> OriginError:
    """Return the error for an exception of the packages of a scheme."""
    if isinstance(error, OriginError):
        return error
    chain = list(_chain(error))
    names = {base.__name__ for each in chain for base in type(each).__mro__}
    status = next((s for s in map(_status, chain) if s), 0)
    code = next((c for c in map(_code, chain) if c), "")
    scheme, where = scheme_of(url), urls.shown(url)
    text = _text(chain, scheme)
    if names & union(lambda each: each.credential_errors):
        message = f"the origin accepts no credentials of this process: {text}"
        hint = "check the credentials in the environment, or those of the origin's own tools"
        return OriginError(AccessDenied(message, path=where, hint=hint), again=False)
    if (meaning := scheme.meaning(text)) is not None:
        return _meant(meaning, scheme, text, where)
    if status in (401, 403) or code in scheme.denied_codes or "PermissionError" in names:
        message = f"the origin denies access: {text}"
        hint = "check the credentials, and the rights that they have"
        return OriginError(AccessDenied(message, path=where, hint=hint), again=False)
    if status in _BUSY or code in scheme.busy_codes:
        kind = "is throttled or overloaded" if status in (429, 503) else "failed"
        return _later(f"the origin {kind} (status {status or code}): {text}", where)
    if status in (404, 410) or "NoSuchBucket" in code:
        what = "no such bucket" if "NoSuchBucket" in code else "no such file at the origin"
        return OriginError(MissingFile(what, path=where, hint="check the URL"), again=False)
    if status in (412, 416):
        return OriginError(changed(url), again=False)
    if names & {"TimeoutError", "FSTimeoutError", "ReadTimeoutError", "ConnectTimeoutError",
                "TimeoutException"}:  # fmt: skip
        return _later(f"the origin did not answer in time: {text}", where, answered=False)
    if _is_connection(chain, names):
        return _later(f"the connection to the origin failed: {text}", where, answered=False)
    if "FileNotFoundError" in names:
        message = "no such file at the origin"
        return OriginError(MissingFile(message, path=where, hint="check the URL"), again=False)
    return OriginError(ReadError(f"the origin failed: {text}", path=where), again=False)


def _meant(meaning: Meaning, scheme: Scheme, text: str, where: str) -> OriginError:
    error: FFServeError
    hint = scheme.hints.get(meaning)
    match meaning:
        case Meaning.DENIED:
            error = AccessDenied(f"the origin denies access: {text}", path=where, hint=hint)
            return OriginError(error, again=False)
        case Meaning.UNKNOWN:
            error = UsageError(f"unknown name service: {text}", path=where, hint=hint)
            return OriginError(error, again=False)
        case Meaning.LATER:
            return _later(f"the origin failed: {text}", where)
        case Meaning.BROKEN:
            return _later(f"the connection to the origin failed: {text}", where, answered=False)


def _is_connection(chain: list[BaseException], names: set[str]) -> bool:
    usual = {"ConnectionError", "EOFError", "gaierror", "SSLEOFError", "SSLZeroReturnError"}
    if names & (usual | union(lambda each: each.connection_errors)):
        return True
    closed = tuple(union(lambda each: each.closed_texts))
    return any(
        isinstance(each, OSError) and (each.errno in BROKEN or str(each).startswith(closed))
        for each in chain
    )


def _later(message: str, where: str, *, answered: bool = True) -> OriginError:
    hint = "check the network and the origin"
    return OriginError(ReadError(message, path=where, hint=hint), again=True, answered=answered)


def _text(chain: list[BaseException], scheme: Scheme) -> str:
    """Return the text of a chain of exceptions, without the secrets of URLs."""
    root = chain[-1]
    words = " ".join(str(root).split()) or type(root).__name__
    words = _URL_INSIDE.sub(lambda found: urls.shown(found[0]), scheme.shortened(words))
    return _QUERY_INSIDE.sub("?…", words)[:300]


def changed(url: str) -> ReadError:
    """Return the error for an object that is not the one that was opened."""
    return ReadError(
        "the object changed at the origin since it was opened",
        path=urls.shown(url),
        hint="open it again; to replace an object in use, write a new one under another name",
    )


@contextlib.contextmanager
def failures(url: str) -> Iterator[None]:
    """Raise exceptions of packages in the block as OriginErrors."""
    try:
        with scheme_of(url).call():
            yield
    except OriginError:
        raise
    except FFServeError as error:
        raise error.located(path=urls.shown(url)) from error.__cause__
    except Exception as error:
        raise failure(error, url) from error


# ---- listing -------------------------------------------------------------------------------------


def _seconds(value: Any) -> int:
    """Return a modification time in whole seconds: listings are more precise than headers."""
    if isinstance(value, datetime.datetime):
        return int(value.timestamp())
    if isinstance(value, (int, float)):
        return int(value / 1000 if value > 1 << 36 else value)  # WebHDFS counts milliseconds
    return _seconds_of(value) if isinstance(value, str) else 0


@functools.lru_cache(256)
def _seconds_of(value: str) -> int:
    if value:
        with contextlib.suppress(ValueError, TypeError):
            return int(datetime.datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp())
        from email.utils import parsedate_to_datetime

        with contextlib.suppress(ValueError, TypeError):
            return int(parsedate_to_datetime(value).timestamp())
    return 0


def _identity(url: str, facts: dict[str, Any]) -> ObjectVersion:
    """Raises: OriginError for a directory."""
    if facts.get("type") == "directory":
        hint = "name its files, or give a pattern"
        error = MissingFile("the path is a directory, not a file", path=urls.shown(url), hint=hint)
        raise OriginError(error, again=False)
    size = facts.get("size")
    if not isinstance(size, int) or size < 0:
        size = -1
    scheme = scheme_of(url)
    tag = next((str(facts[name]) for name in scheme.tags if facts.get(name)), "").strip('"')
    modified = next((_seconds(facts[name]) for name in scheme.times if facts.get(name)), 0)
    return ObjectVersion(url, size, tag, modified)


def sized(identity: ObjectVersion) -> ObjectVersion:
    """Return an identity. Raises: ReadError if its size is unknown: no range of it can be read."""
    if identity.size < 0:
        raise ReadError(
            "the origin does not report the size of the file",
            path=urls.shown(identity.url),
            hint="copy the file to a local disk, or to an origin that reports sizes",
        )
    return identity


def identify(url: str, access: Access | None = None) -> ObjectVersion:
    """Return the present version of an object. Raises: UsageError, ReadError, OriginError."""
    system, path = file_system(url, access)
    with failures(url):
        system.invalidate_cache()
        return sized(_identity(url, system.info(path)))


def send_info(url: str, access: Access | None = None) -> Sent | None:
    """Send the request of a later `identify`, or of `find` for a file, as of `OpenVersion`."""
    sent: Sent | None = None
    with contextlib.suppress(Exception):
        system, path = file_system(url, access)
        send = getattr(system, "send_info", None)
        if send is not None and not url.endswith("/") and not urls.has_magic(url):
            sent = send(path)
    return sent


def find(
    url: str, suffixes: Sequence[str] = (), *, hidden: str = ".", below: bool = False
) -> tuple[list[ObjectVersion], list[tuple[str, str]]]:
    """Return the files that a URL denotes, and what is left out of them.

    Args:
        url: a file, a directory, or a pattern with ``*``, ``?``, ``[…]`` and ``[!…]``.
        suffixes: files of a directory that have none of them are passed over; (): none are.
        hidden: first characters of names that are left out, with all below them, unless the URL
            names them or has a pattern that begins with the same character.
        below: also the files in directories below a directory, and below those that match.
    Returns: files sorted by URL, those of unknown size and empty ones as well; URL and reason of
        what is left out (HIDDEN, SPECIAL).
    Raises: UsageError; OriginError, also for a file that does not exist or a directory that cannot
        be listed.
    """
    given = url
    if urls.has_magic(url) and scheme_of(url).splits_query:
        url = url.replace("?", _ANY)
    system, path = file_system(url)
    search = _Search(system, _prefix(url, path), hidden, below)
    with failures(given):
        system.invalidate_cache()
        if urls.has_magic(url):
            parts = path.split("/")
            first = next((k for k, part in enumerate(parts) if glob.has_magic(part)), 0)
            found = system.glob(path.replace("[^", "[!"), detail=True)
            search.add(found.items(), "/".join(parts[:first]), parts[first:])
        else:
            single = None if url.endswith("/") else _info(system, path)
            if single is not None and single.get("type") != "directory":
                return [_identity(url, single)], []
            # Entry by entry, since a listing may have millions.
            listed = iter(_below(system, path) if below else _entries(system, path))
            if (one := next(listed, None)) is None:
                system.info(path)  # raises if there is no such directory
            else:
                ends, every = tuple(suffixes) or "", itertools.chain((one,), listed)
                chosen = (entry for entry in every if entry[0].endswith(ends))
                search.add(chosen, path.partition("?")[0] if urls.is_web(url) else path, ())
        search.ask()
    files = sorted(search.files.values(), key=lambda each: each.url)
    return files, list(search.left_out.items())


class _Search:
    """The files of one URL. begin: the beginning of URLs, before the path; others as for `find`."""

    def __init__(self, system: Any, begin: str, hidden: str, below: bool) -> None:
        self.files: dict[str, ObjectVersion] = {}
        self.left_out: dict[str, str] = {}
        self._system, self._begin, self._hidden, self._below = system, begin, hidden, below
        self._asked: list[str] = []

    def add(self, entries: Iterable[Entry], root: str, pattern: Sequence[str]) -> None:
        """Add entries below a root, which the parts of a pattern match; () for no pattern."""
        for name, facts in entries:
            inner = name.removeprefix(root).strip("/")
            shown = _hidden_part(inner, self._hidden, pattern)
            if shown is not None:
                self.left_out[self._url(name[: name.rindex(inner)] + shown)] = HIDDEN
            elif facts.get("type") == "directory":
                if pattern and self._below:
                    self.add(_below(self._system, name), root, pattern)
            elif name.endswith("/"):
                pass  # an object that stands for a directory
            elif (
                facts.get("type") == "file"
                and not facts.get("islink")
                and facts.get("size") is not None
            ):
                self._add_file(name, facts)
            else:  # over HTTP there are names only, and links have a size of their own
                self._asked.append(name)

    def ask(self) -> None:
        """Look up files of which the listing says too little, several at once, and add them."""

        def info(name: str) -> dict[str, Any]:
            with failures(self._url(name)):
                facts: dict[str, Any] = self._system.info(name)
                return facts

        if self._asked and getattr(self._system, "async_impl", False):
            with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
                found = list(pool.map(info, self._asked))
        else:
            found = [info(name) for name in self._asked]
        for name, facts in zip(self._asked, found, strict=True):
            self._add_file(name, facts)

    def _add_file(self, name: str, facts: dict[str, Any]) -> None:
        url = self._url(name)
        if facts.get("type") == "file":
            self.files[url] = _identity(url, facts)
        else:
            self.left_out[url] = SPECIAL

    def _url(self, name: str) -> str:
        return name if urls.is_url(name) else self._begin + name


def _hidden_part(name: str, hidden: str, given: Sequence[str]) -> str | None:
    """Return a name up to its first hidden part; None if it has none."""
    parts = name.split("/")
    for k, part in enumerate(parts):
        named = k < len(given) and given[k].startswith(part[:1])
        if part and part[0] in hidden and not named:
            return "/".join(parts[: k + 1])
    return None


def _below(system: Any, path: str) -> Iterator[Entry]:
    """Yield all files below a directory. Raises: what the file system raises."""
    if getattr(system, "flat", False):  # an object store lists all in one go
        yield from ((facts["name"], facts) for facts in system.every(path))
        return
    flat, kind = getattr(system, "flat", None), type(system)
    if flat is None and getattr(kind, "async_impl", False):
        flat = kind._find is not importlib.import_module("fsspec.asyn").AsyncFileSystem._find
    elif flat is None:
        flat = kind.find is not importlib.import_module("fsspec").AbstractFileSystem.find
    if flat:
        found: dict[str, dict[str, Any]] = system.find(path, detail=True)
        yield from (each for each in found.items() if each[1].get("type") != "directory")
        return
    # `find` and `walk` of fsspec leave directories out that cannot be listed.
    waiting, seen = [path], {path.rstrip("/")}
    while waiting:
        for name, facts in _entries(system, waiting.pop()):
            if facts.get("type") != "directory":
                yield name, facts
            elif name.rstrip("/") not in seen:
                seen.add(name.rstrip("/"))
                waiting.append(name)


def _entries(system: Any, path: str) -> Iterator[Entry]:
    own = getattr(system, "entries", None)
    for facts in system.ls(path, detail=True) if own is None else own(path):
        yield str(facts["name"]), facts


def _info(system: Any, path: str) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = system.info(path)
    except IsADirectoryError:
        return None
    return facts


def _prefix(url: str, path: str) -> str:
    """Return the beginning of URLs like this one, before the path in the file system."""
    # `unstrip_protocol` of fsspec drops user, host and port of SFTP.
    given, path = url.rstrip("/"), path.rstrip("/")
    if path and given.endswith(path):
        return given[: len(given) - len(path)]
    return url.partition("://")[0] + "://"


# ---- reading -------------------------------------------------------------------------------------


class RemoteFile:
    """Reads ranges of one version of a remote object. Threads may call it.

    Args: access: of a user. block_size: a cache network is asked for whole blocks. systems: as of
        `file_system`.
    """

    def __init__(
        self,
        identity: ObjectVersion,
        access: Access | None = None,
        block_size: int = 1,
        systems: dict[str, Any] | None = None,
    ) -> None:
        self.identity = identity
        self._access, self._block_size, self._systems = access, block_size, systems
        self.proven = False
        """Whether the origin has shown that this version may be read with this access."""
        self._free: list[tuple[int, OpenVersion]] = []
        """Open files that nobody uses, each with the only thread that may use it; 0: all may. A
        connection of SFTP hangs when two threads use it."""
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def is_cached(self) -> bool:
        """Whether a cache network is asked, for each block by itself. Raises: UsageError."""
        return scheme_of(self.identity.url).cached and cache_network.current() is not None

    def read(self, start: int, end: int, *, direct: bool = False) -> bytes:
        """Return the bytes [start, end) of the object.

        Args:   direct: whether no cache network is asked, such as when what came from it is wrong.
        Raises: UsageError; OriginError, for bytes of another version as well.
        """
        same: bool | None = True
        with failures(self.identity.url):
            file = self._take()
            content = None if direct else self._from_cache(file, start, end)
            if content is None:
                content, facts = file.fetch(start, end)
                same = self._checked(content, facts, start, end)
        if same is None and not self._same(identify(self.identity.url, self._access)):
            raise OriginError(changed(self.identity.url), again=False)
        self._put_back(file)
        return content

    def send(self, start: int, end: int) -> Sent | None:
        """Send the request for bytes that `read` is called for later, as of `OpenVersion`. What
        fails is reported by `read`."""
        sent = None
        with contextlib.suppress(Exception):
            file = self._take()
            if file.send is not None and not self.is_cached:
                sent = file.send(start, end)
            self._put_back(file)
        return sent

    def prove(self) -> None:
        """Ask the origin whether this version may be read, unless it has shown that.

        Raises: as `read`.
        """
        if not self.proven and not self._proves(identify(self.identity.url, self._access)):
            raise OriginError(changed(self.identity.url), again=False)
        self.proven = True

    def _from_cache(self, file: OpenVersion, start: int, end: int) -> bytes | None:
        """Return bytes from the cache network; None: the origin is to be asked."""
        network, url, size = cache_network.current(), self.identity.url, self._block_size
        fetch = file.cached
        if network is None or fetch is None:
            return None
        with self._lock:
            self.prove()
        first, last = start // size * size, min(-(-end // size) * size, self.identity.size)

        def attempt() -> bytes | None:
            with failures(url):
                found = fetch(network, first, last)
            if found is None:
                return None
            if self._checked(*found, first, last) is None:
                raise ValueError("the answer does not say which version it has")
            network.sent += last - first
            return found[0][start - first : end - first]

        content: bytes | None = file.route.fetch(network, urls.origin_of(url), attempt)
        return content

    def distrust(self) -> None:
        """Ask no cache network for a while: the origin has other bytes than came before."""
        network = cache_network.current()
        with self._lock:
            routes = [file.route for _, file in self._free if file.route is not None]
        if network is not None and routes:
            routes[0].failed(network, urls.origin_of(self.identity.url), "it has sent wrong bytes")

    def _checked(
        self, content: bytes, facts: dict[str, Any] | None, start: int, end: int
    ) -> bool | None:
        """Whether bytes are of this version, as of `_agrees`. Raises: OriginError: they are not, or
        not all that were asked for."""
        identity = self.identity
        same = self._agrees(facts)
        if same is False:
            raise OriginError(changed(identity.url), again=False)
        if len(content) != end - start:
            message = (
                f"the origin sent {len(content)} bytes for a range of {end - start} at {start}"
            )
            hint = "open the object again: it was truncated, or its origin ignores ranges"
            error = ReadError(message, path=urls.shown(identity.url), hint=hint)
            raise OriginError(error, again=len(content) < end - start)
        return same

    def after_fork(self) -> None:
        """Keep the parent's file systems in a child process: they may be neither used nor freed
        here."""
        _inherited.append(self._free)
        self._free, self._pid = [], os.getpid()
        self._lock = threading.Lock()

    def _agrees(self, facts: dict[str, Any] | None) -> bool | None:
        """Whether bytes are of this version; None: what came with them does not say it."""
        if not facts or facts["size"] is None:
            return None
        mine, found = self.identity, _identity(self.identity.url, facts)
        if mine.tag and not found.tag:
            return None
        # Bytes of a cache network are asked for when it is proven.
        self.proven = self.proven or self._proves(found)
        return self._same(found if mine.tag else replace(found, tag=""))

    def _proves(self, found: ObjectVersion) -> bool:
        """Whether an answer shows that this version may be read. A user must name its time."""
        timed = self._access is None or self.identity.modified or not found.modified
        return bool(timed) and self._same(found)

    def _same(self, found: ObjectVersion) -> bool:
        mine = self.identity
        if (found.size, found.tag) != (mine.size, mine.tag):
            return False
        return found.modified == mine.modified or not found.modified or not mine.modified

    def _take(self) -> OpenVersion:
        """Return an open file that no other thread uses."""
        with self._lock:
            if self._pid != os.getpid():
                self.after_fork()
            mine = (0, threading.get_ident())
            place = next((k for k, (owner, _) in enumerate(self._free) if owner in mine), None)
            file = None if place is None else self._free.pop(place)[1]
        return self._open() if file is None else file

    def _put_back(self, file: OpenVersion) -> None:
        with self._lock:
            self._free.append((0 if file.shared else threading.get_ident(), file))

    def _open(self) -> OpenVersion:
        identity = self.identity
        system, path = file_system(identity.url, self._access, self._systems)
        scheme = scheme_of(identity.url)
        return scheme.open(system, path, size=identity.size, tag=identity.tag)


_inherited: list[list[tuple[int, OpenVersion]]] = []
"""Open files of the parent process, which are never freed here."""
