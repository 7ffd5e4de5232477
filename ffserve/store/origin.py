"""Origins: remote files by fsspec. List them, identify them, read ranges, name what failed.

Everything here blocks and is called in threads of the store. fsspec's file systems are used by
their public calls (`info`, `glob`, `ls`, `open`, `seek`, `read`): a file that is opened with
``cache_type="none"`` sends one request for each read, which S3 makes conditional on the ETag.

An object is identified by URL, size, ETag (or the version that its origin has instead) and
modification time. Whether bytes belong to the object that was identified is checked after they were
read, unless the origin checks it itself, or the bytes are those of a commit. So no two versions of
an object are ever mixed.

Nothing is written to an origin, and nothing is deleted there. Credentials are those that fsspec's
packages find (environment, their own files), or those of an `Access` and no others; they are in no
message.
"""

from __future__ import annotations

import contextlib
import datetime
import glob
import importlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ffserve.errors import AccessDenied, FFServeError, MissingFile, ReadError, UsageError
from ffserve.store import hdfs, urls
from ffserve.store.access import CONNECT_S, SILENT_S, Access, is_connected
from ffserve.store.clouds import Objects

_TAGS = (
    "generation", "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "blob_id", "sha256",
    "fileId", "checksum", "modification_time",
)  # fmt: skip
"""`modification_time` is hdfs-native's, in milliseconds: HDFS has no ETag, and its listings are as
precise as its other answers."""
_TIMES = (
    "LastModified", "last_modified", "Last-Modified", "updated", "modificationTime",
    "modification_time", "mtime",
)  # fmt: skip
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs",
    "az": "adlfs", "sftp": "paramiko", "ssh": "paramiko", "http": "aiohttp", "https": "aiohttp",
    "hdfs": "'ffserve[hdfs]'", "viewfs": "'ffserve[hdfs]'", "hf": "huggingface_hub",
    "webhdfs": "requests",
}  # fmt: skip
_URL_PATHS = (*hdfs.PROTOCOLS, "webhdfs", "swebhdfs")
"""Protocols whose file systems take a question mark for the beginning of a query."""
_ANY = "[!\0]"
"""A question mark of a pattern, for these."""
_CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
    "TokenRetrievalError", "ProfileNotFound", "AuthenticationException", "DefaultCredentialsError",
    "RefreshError", "ClientAuthenticationError", "SSOTokenLoadError", "UnauthorizedSSOTokenError",
)  # fmt: skip
"""Exception classes of the packages below fsspec, which are not imported here."""
_DENIED_CODES = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "AccessDenied")
_BUSY_CODES = ("SlowDown", "ServiceUnavailable", "RequestTimeout", "Throttling", "InternalError")
HIDDEN, SPECIAL = "hidden", "not a regular file"
"""Why a file is left out of a listing."""
ASKED_AT_ONCE = 16
"""Requests about files of a listing."""
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
class Identity:
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
        """Text that is another one for each object and version."""
        return "\n".join((self.url, str(self.size), self.tag, str(self.modified)))


# ---- file systems --------------------------------------------------------------------------------


def _fsspec() -> Any:
    try:
        return importlib.import_module("fsspec")
    except ImportError:
        raise UsageError(
            "remote files need the package fsspec", hint="pip install 'ffserve[remote]'"
        ) from None


def _defaults(protocol: str, conf: dict[str, Any]) -> dict[str, Any]:
    """Return options of a file system that its user has not set: limits of waiting, and no retries
    below those of the store."""
    options: dict[str, Any] = {}
    if protocol in ("s3", "s3a") and "config_kwargs" not in conf:
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_S,
            "read_timeout": SILENT_S,
            "retries": {"max_attempts": 1},
            "max_pool_connections": 64,
        }
    if protocol in ("http", "https") and "client_kwargs" not in conf:
        aiohttp = importlib.import_module("aiohttp")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
        options["client_kwargs"] = {"timeout": timeout}
    if protocol in ("sftp", "ssh") and "timeout" not in conf:
        options["timeout"] = CONNECT_S
    return {name: value for name, value in options.items() if name not in conf}


def file_system(url: str, access: Access | None = None) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Args: access: with what it is reached; None: with what this process has.
    Raises: UsageError for an unknown protocol or a package that is missing; OriginError.
    """
    fsspec = _fsspec()
    protocol = url.partition("://")[0].lower()
    conf = fsspec.config.conf.get(protocol, {})
    try:
        if access is not None and not access.own:
            found, path = access.file_system(url)
        elif protocol in hdfs.PROTOCOLS:
            found, path = hdfs.client(url, conf)
        else:
            found, path = fsspec.core.url_to_fs(url, **_defaults(protocol, conf))
            if not is_connected(found):
                type(found).clear_instance_cache()
                found, path = fsspec.core.url_to_fs(url, **_defaults(protocol, conf))
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        hint = f"pip install {package}" if package else None
        raise UsageError(
            f"the protocol {protocol}:// needs a package that is missing: {error}",
            path=urls.shown(url),
            hint=hint,
        ) from None
    except ValueError as error:
        raise UsageError(f"invalid URL: {error}", path=urls.shown(url)) from None
    except Exception as error:
        raise failure(error, url) from error
    if protocol in ("s3", "s3a"):
        found.retries = 1  # s3fs's own: the store waits and tries again by itself
    return found, str(path)


# ---- what failed ---------------------------------------------------------------------------------


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _status(error: BaseException) -> int:
    """Return the HTTP status of an exception of aiohttp, botocore, gcsfs, requests or azure."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        response = getattr(response, "status_code", None)
    for value in (response, getattr(error, "status", None), getattr(error, "status_code", None)):
        if isinstance(value, int):
            return value
    code = getattr(error, "code", None)
    return code if isinstance(code, int) and 100 <= code < 600 else 0


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def failure(error: BaseException, url: str) -> OriginError:
    """Return what an exception of fsspec, or of a package below it, means."""
    if isinstance(error, OriginError):
        return error
    chain = list(_chain(error))
    names = {base.__name__ for each in chain for base in type(each).__mro__}
    status = next((s for s in map(_status, chain) if s), 0)
    code = next((c for c in map(_code, chain) if c), "")
    where, text = urls.shown(url), _text(chain)
    if names & {*_CREDENTIALS}:
        message = f"the origin accepts no credentials of this process: {text}"
        hint = "check the credentials in the environment, or those of the origin's own tools"
        return OriginError(AccessDenied(message, path=where, hint=hint), again=False)
    if hdfs.serves(url) and (found := _hdfs_failure(text, where)):
        return found
    # gcsfs has no status for what is forbidden.
    denied = "PermissionError" in names or text.startswith("Forbidden: ")
    if status in (401, 403) or code in _DENIED_CODES or denied:
        message = f"the origin denies access: {text}"
        hint = "check the credentials, and the rights that they have"
        return OriginError(AccessDenied(message, path=where, hint=hint), again=False)
    if status in _BUSY or code in _BUSY_CODES:
        kind = "is throttled or overloaded" if status in (429, 503) else "failed"
        return _later(f"the origin {kind} (status {status or code}): {text}", where)
    if status in (404, 410) or "NoSuchBucket" in code:
        what = "no such bucket" if "NoSuchBucket" in code else "no such file at the origin"
        return OriginError(MissingFile(what, path=where, hint="check the URL"), again=False)
    if status == 412 or "FileExpired" in names or "pre-conditions" in text.lower():
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


def _hdfs_failure(text: str, where: str) -> OriginError | None:
    error: FFServeError
    match hdfs.meaning(text):
        case hdfs.Meaning.DENIED:
            hint = "check HADOOP_USER_NAME or the Kerberos ticket (klist), and this user's rights"
            error = AccessDenied(f"the origin denies access: {text}", path=where, hint=hint)
            return OriginError(error, again=False)
        case hdfs.Meaning.UNKNOWN:
            hint = "give host and port of a NameNode, or set HADOOP_CONF_DIR to Hadoop's settings"
            error = UsageError(f"unknown name service: {text}", path=where, hint=hint)
            return OriginError(error, again=False)
        case hdfs.Meaning.LATER:
            return _later(f"the origin failed: {text}", where)
        case hdfs.Meaning.BROKEN:
            return _later(f"the connection to the origin failed: {text}", where, answered=False)
        case None:
            return None


def _is_connection(chain: list[BaseException], names: set[str]) -> bool:
    if names & {"ConnectionError", "EndpointConnectionError", "ClientConnectionError", "EOFError",
                "ClientPayloadError", "IncompleteReadError", "ResponseStreamingError",
                "ConnectionClosedError", "SSHException", "gaierror", "ChunkedEncodingError",
                "TransportError", "ServiceRequestError", "ServiceResponseError"}:  # fmt: skip
        return True
    closed = ("Socket is closed", "Server connection dropped")  # of paramiko
    return any(
        isinstance(each, OSError) and (each.errno in hdfs.BROKEN or str(each).startswith(closed))
        for each in chain
    )


def _later(message: str, where: str, *, answered: bool = True) -> OriginError:
    hint = "check the network and the origin; it was tried again for a while"
    return OriginError(ReadError(message, path=where, hint=hint), again=True, answered=answered)


def _text(chain: list[BaseException]) -> str:
    """Return the texts of a chain of exceptions, without what a URL must not show."""
    root = chain[-1]
    words = " ".join(str(root).split()) or type(root).__name__
    words = _URL_INSIDE.sub(lambda found: urls.shown(found[0]), hdfs.shortened(words))
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
    """Raise exceptions of fsspec in the block as OriginErrors."""
    try:
        with hdfs.call() if hdfs.serves(url) else contextlib.nullcontext():
            yield
    except (OriginError, FFServeError):
        raise
    except Exception as error:
        raise failure(error, url) from error


# ---- listing -------------------------------------------------------------------------------------


def _seconds(value: Any) -> int:
    """Return a modification time in whole seconds: listings are more precise than headers."""
    if isinstance(value, datetime.datetime):
        return int(value.timestamp())
    if isinstance(value, (int, float)):
        return int(value / 1000 if value > 1 << 36 else value)  # WebHDFS counts milliseconds
    if isinstance(value, str):
        with contextlib.suppress(ValueError, TypeError):
            return int(datetime.datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp())
        from email.utils import parsedate_to_datetime

        with contextlib.suppress(ValueError, TypeError):
            return int(parsedate_to_datetime(value).timestamp())
    return 0


def _identity(url: str, facts: dict[str, Any]) -> Identity:
    """Raises: OriginError for a directory."""
    if facts.get("type") == "directory":
        hint = "give its files, or a pattern"
        error = MissingFile("a directory, not a file", path=urls.shown(url), hint=hint)
        raise OriginError(error, again=False)
    size = facts.get("size")
    if not isinstance(size, int) or size < 0:
        size = -1
    tag = next((str(facts[name]) for name in _TAGS if facts.get(name)), "").strip('"')
    modified = next((_seconds(facts[name]) for name in _TIMES if facts.get(name)), 0)
    return Identity(url, size, tag, modified)


def sized(identity: Identity) -> Identity:
    """Return an identity. Raises: ReadError if its size is unknown: no range of it can be read."""
    if identity.size < 0:
        raise ReadError(
            "the origin does not say how large the file is",
            path=urls.shown(identity.url),
            hint="copy it to a local disk, or to an origin that says so",
        )
    return identity


def identify(url: str, access: Access | None = None) -> Identity:
    """Return the present version of an object. Raises: UsageError, ReadError, OriginError."""
    system, path = file_system(url, access)
    with failures(url):
        system.invalidate_cache()
        return sized(_identity(url, system.info(path)))


def find(
    url: str, suffixes: Sequence[str] = (), *, hidden: str = ".", below: bool = False
) -> tuple[list[Identity], list[tuple[str, str]]]:
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
    if urls.has_magic(url) and url.partition("://")[0].lower() in _URL_PATHS:
        url = url.replace("?", _ANY)
    system, path = file_system(url)
    search = _Search(system, _prefix(url, path), hidden, below)
    with failures(given):
        system.invalidate_cache()
        if urls.has_magic(url):
            parts = path.split("/")
            first = next((k for k, part in enumerate(parts) if glob.has_magic(part)), 0)
            found = system.glob(path.replace("[^", "[!"), detail=True)
            search.add(found, "/".join(parts[:first]), parts[first:])
        else:
            single = None if url.endswith("/") else _info(system, path)
            if single is not None and single.get("type") != "directory":
                return [_identity(url, single)], []
            listed = _below(system, path) if below else _entries(system, path)
            if not listed:
                system.info(path)  # raises if there is no such directory
            ends = tuple(suffixes) or ""
            listed = {n: f for n, f in listed.items() if n.endswith(ends)}
            search.add(listed, path.partition("?")[0] if urls.is_web(url) else path, ())
        search.ask()
    files = sorted(search.files.values(), key=lambda each: each.url)
    return files, list(search.left_out.items())


class _Search:
    """The files of one URL. begin: what stands before paths in URLs; others as of `find`."""

    def __init__(self, system: Any, begin: str, hidden: str, below: bool) -> None:
        self.files: dict[str, Identity] = {}
        self.left_out: dict[str, str] = {}
        self._system, self._begin, self._hidden, self._below = system, begin, hidden, below
        self._asked: list[str] = []

    def add(self, entries: dict[str, dict[str, Any]], root: str, pattern: Sequence[str]) -> None:
        """Add entries below a root, which the parts of a pattern match; () for no pattern."""
        for name, facts in entries.items():
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
        """Add the files of which their listing does not say enough, several at once."""

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


def _below(system: Any, path: str) -> dict[str, dict[str, Any]]:
    """Return all files below a directory. Raises: what the file system raises."""
    spec, asyn = importlib.import_module("fsspec.spec"), importlib.import_module("fsspec.asyn")
    kind = type(system)
    if getattr(kind, "async_impl", False):
        flat = kind._find is not asyn.AsyncFileSystem._find
    else:
        flat = kind.find is not spec.AbstractFileSystem.find
    if flat:  # an object store lists all in one go
        found: dict[str, dict[str, Any]] = system.find(path, detail=True)
        return {name: facts for name, facts in found.items() if facts.get("type") != "directory"}
    # `find` and `walk` of fsspec leave directories out that cannot be listed.
    files, waiting, seen = dict[str, dict[str, Any]](), [path], {path.rstrip("/")}
    while waiting:
        for name, facts in _entries(system, waiting.pop()).items():
            if facts.get("type") != "directory":
                files[name] = facts
            elif name.rstrip("/") not in seen:
                seen.add(name.rstrip("/"))
                waiting.append(name)
    return files


def _entries(system: Any, path: str) -> dict[str, dict[str, Any]]:
    return {str(each["name"]): each for each in system.ls(path, detail=True)}


def _info(system: Any, path: str) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = system.info(path)
    except IsADirectoryError:
        return None
    return facts


def _prefix(url: str, path: str) -> str:
    """Return what stands before the path of a file system in URLs like this one."""
    # `unstrip_protocol` of fsspec drops user, host and port of SFTP.
    given, path = url.rstrip("/"), path.rstrip("/")
    if path and given.endswith(path):
        return given[: len(given) - len(path)]
    return url.partition("://")[0] + "://"


# ---- reading -------------------------------------------------------------------------------------


class RemoteFile:
    """Reads ranges of one version of a remote object. Threads may call it."""

    def __init__(self, identity: Identity, access: Access | None = None) -> None:
        self.identity = identity
        self._access = access
        self._free: list[tuple[int, Any]] = []
        """Open files that nobody uses, each with the only thread that may use it; 0: all may. A
        connection of SFTP hangs when two threads use it."""
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of the object.

        Raises: UsageError; OriginError, for bytes of another version as well.
        """
        identity = self.identity
        with failures(identity.url):
            file, conditional = self._take()
            file.seek(start)
            content: bytes = file.read(end - start)
        if len(content) != end - start:
            message = (
                f"the origin sent {len(content)} bytes for a range of {end - start} at {start}"
            )
            hint = "the origin ignores ranges, or the object was cut: open it again"
            error = ReadError(message, path=urls.shown(identity.url), hint=hint)
            raise OriginError(error, again=len(content) < end - start)
        if not conditional and not self._same(identify(identity.url, self._access)):
            raise OriginError(changed(identity.url), again=False)
        shared = getattr(getattr(file, "fs", None), "async_impl", False)
        with self._lock:
            self._free.append((0 if shared else threading.get_ident(), file))
        return content

    def after_fork(self) -> None:
        """This process is a child: fsspec's file systems are not to be used there, nor freed."""
        hdfs.inherited.append(self._free)
        self._free, self._pid = [], os.getpid()
        self._lock = threading.Lock()

    def _same(self, found: Identity) -> bool:
        mine = self.identity
        if (found.size, found.tag) != (mine.size, mine.tag):
            return False
        return found.modified == mine.modified or not found.modified or not mine.modified

    def _take(self) -> tuple[Any, bool]:
        """Return an open file that no other thread uses, and whether its reads are conditional."""
        with self._lock:
            if self._pid != os.getpid():
                self.after_fork()
            mine = (0, threading.get_ident())
            place = next((k for k, (owner, _) in enumerate(self._free) if owner in mine), None)
            file = None if place is None else self._free.pop(place)[1]
        if file is None:
            file = self._open()
        conditional = getattr(file, "conditional", False)
        return file, conditional or bool(getattr(file, "req_kw", {}).get("IfMatch"))

    def _open(self) -> Any:
        identity = self.identity
        system, path = file_system(identity.url, self._access)
        if isinstance(system, Objects):
            return system.open(path, version=identity.tag)
        protocol = identity.url.partition("://")[0].lower()
        if protocol == "hf":
            return self._open_commit(system, path)
        options: dict[str, Any] = {}
        if protocol in ("http", "https"):
            # Offsets are those of the file, not of its compressed form.
            headers = {**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
            options = {"size": identity.size, "headers": headers}
            if identity.tag and not identity.tag.startswith("W/"):
                options["headers"]["If-Match"] = f'"{identity.tag}"'
        try:
            file = system.open(path, "rb", cache_type="none", **options)
        except TypeError:  # of a file system whose files have no cache
            file = system.open(path, "rb")
        facts = getattr(file, "details", None)
        if protocol in ("s3", "s3a") and facts:
            # What was opened just now is what every read is conditional on.
            found = _identity(identity.url, facts)
            if not self._same(found):
                raise OriginError(changed(identity.url), again=False)
        return file

    def _open_commit(self, system: Any, path: str) -> Any:
        """Open a file of the Hugging Face Hub at the present commit, which nobody can change."""
        hub = importlib.import_module("huggingface_hub")
        found = system.resolve_path(path)
        if not hasattr(found, "repo_id"):  # a bucket, which has no commits
            return system.open(path, "rb", cache_type="none")
        api = hub.HfApi(endpoint=system.endpoint, token=system.token)
        asked = {"repo_type": found.repo_type, "revision": found.revision, "timeout": SILENT_S}
        commit = api.repo_info(found.repo_id, **asked).sha
        before = hub.constants.REPO_TYPES_URL_PREFIXES.get(found.repo_type, "")
        pinned = f"{before}{found.repo_id}@{commit}/{found.path_in_repo}"
        file = system.open(pinned, "rb", cache_type="none")
        if not self._same(_identity(self.identity.url, file.details)):
            raise OriginError(changed(self.identity.url), again=False)
        file.conditional = True
        return file
