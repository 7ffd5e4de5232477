"""URLs of remote files: recognition, text for messages, patterns, and names."""

from __future__ import annotations

import glob
import os
import re
from urllib.parse import unquote, urlsplit, urlunsplit

from ffserve.errors import UsageError
from ffserve.store.schemes import scheme_of

_URL = re.compile(r"(?!(?i:file)://)[A-Za-z][A-Za-z0-9+.-]*://")
_PLAIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\0-\x1f@?#]*")
"""URLs that have no secrets, and are shown as they are: most, which is seen without parsing."""
NAME_MAX = 255
"""The longest part of a path on Linux file systems, in bytes."""


def is_url(path: str) -> bool:
    """Whether a path is the URL of a remote file (`s3://…`), not the name of a local one."""
    return _URL.match(path) is not None


def local_path(path: str, *, escaped: bool = True) -> str | None:
    """Return the path of a local file, given as a path or a ``file:`` URL; None for the URL of a
    remote file.

    Args:   escaped: whether `%20` in a ``file:`` URL is a space; Hadoop does not take it for one.
    Raises: UsageError: the URL names another machine, or no path.
    """
    if path[:6].lower() != "file:/":
        return None if is_url(path) else path
    host, rest = "", path[5:]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        rest = slash + rest
    if host.lower() not in ("", "localhost") or not rest:
        raise UsageError(
            f"the URL of a local file names the host {host!r}, not this machine",
            path=path,
            hint="write file:///PATH, or the URL of a protocol that reaches that host",
        )
    return unquote(rest, errors="surrogateescape") if escaped else rest


def is_web(url: str) -> bool:
    """Whether a URL is a web address: a question mark begins its query."""
    return scheme_of(url).has_query


def shown(url: str) -> str:
    """Return a URL without its secrets, for messages: no password, no query (signatures)."""
    if _PLAIN.fullmatch(url) or not is_url(url):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # such as an invalid IPv6 address
        return url.split("?")[0]
    host = parts.netloc
    if not host:  # hdfs:///path, which would lose two of its slashes
        return url
    if "@" in host:
        user, _, place = host.rpartition("@")
        host = f"{user.partition(':')[0]}@{place}"
    web = is_web(url)
    query = "…" if parts.query and web else parts.query
    return urlunsplit((parts.scheme, host, parts.path, query, "" if web else parts.fragment))


def origin_of(url: str) -> str:
    """Return the origin of a URL, whose files fail together: protocol and host, or bucket."""
    scheme, _, rest = shown(url).partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def has_magic(url: str) -> bool:
    """Whether a URL is a pattern. In web addresses a question mark begins the query."""
    rest = url.partition("://")[2]
    if is_web(url):
        path = rest.partition("?")[0].partition("/")[2]
        return "*" in path or "[" in path
    return glob.has_magic(rest)


def literal(url: str) -> str:
    """Return the pattern that matches this URL only."""
    if not has_magic(url):
        return url
    scheme, mark, rest = url.partition("://")
    return scheme + mark + re.sub(r"[*[]" if is_web(url) else r"[*?[]", r"[\g<0>]", rest)


def name_of(url: str) -> str:
    """Return the last part of a URL: the name of the file."""
    if is_web(url):
        url = url.partition("?")[0].partition("#")[0]
    return url.rstrip("/").rpartition("/")[2]


def check_name(name: str, url: str, *, reserved: str = "") -> None:
    """Raise UsageError unless the name of an object can be a path below a directory: stores allow
    any name."""
    parts = name.split("/")
    wrong = next(
        (part for part in parts if part in ("", ".", "..", reserved) or "\0" in part), None
    )
    if wrong is None:
        wrong = next((part for part in parts if len(os.fsencode(part)) > NAME_MAX), None)
    if wrong is not None:
        raise UsageError(
            f"no local file can have the name {wrong[:80]!r}",
            path=shown(url),
            hint="rename the object, or leave it out",
        )
