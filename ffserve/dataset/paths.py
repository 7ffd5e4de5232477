"""Paths of a data set: files, directories, patterns and URLs to the list of its files."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ffserve.disk.files import wrap_os_error
from ffserve.engine.many_files import KIND_BITS, stat_paths
from ffserve.errors import MissingFile, UsageError
from ffserve.store.urls import is_url, local_path

PathLike = str | os.PathLike[str]
_STATED_AT_ONCE = 256
"""Paths that are looked at in one call, which no signal interrupts."""


class ExpandedPaths(tuple[str, ...]):
    """What `expand_paths` has found, so that it does not ask origins for each file again."""

    __slots__ = ()


def expand_paths(
    paths: PathLike | Sequence[PathLike],
    *,
    suffixes: Sequence[str] | Callable[[], Sequence[str]] = (),
) -> ExpandedPaths:
    """Return the absolute paths of the files that `paths` denotes, in order; URLs of remote ones.

    Args:
        paths: a file, a directory (its files with one of `suffixes`, sorted by name, not
            recursive), a glob pattern (matches sorted by name), the URL of one of these (``file:``
            URLs are local paths), or a sequence of these; `ExpandedPaths` are returned as they are.
        suffixes: suffixes of the files to take from a directory; () takes all that are not hidden.
            A function is called only if there is a directory.

    Raises:
        MissingFile: a file does not exist, or a directory or pattern yields no file.
        AccessDenied, ReadError: a directory cannot be listed or searched.
        UsageError: an empty sequence, an empty path, or an object that is not a path; a
            ``file:`` URL of another machine.
    """
    if isinstance(paths, ExpandedPaths):
        return paths
    if isinstance(paths, (str, os.PathLike)):
        return ExpandedPaths(_expand_one(_without_scheme(os.fspath(paths)), suffixes))
    if isinstance(paths, (bytes, bytearray)) or not isinstance(paths, Iterable):
        raise UsageError(
            f"invalid paths: {type(paths).__name__} is neither a path nor a sequence of paths"
        )
    names: list[str] = []
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"invalid path {path!r}: not a str or PathLike")
        names.append(_without_scheme(os.fspath(path)))
    if not names:
        raise UsageError("no paths given", hint="give at least one file")
    found: list[str] = []
    while names:
        some, names = names[:_STATED_AT_ONCE], names[_STATED_AT_ONCE:]
        found.extend(_files(some) or [f for files in _expand_each(some, suffixes) for f in files])
    return ExpandedPaths(found)


def _expand_each(
    names: list[str], suffixes: Sequence[str] | Callable[[], Sequence[str]]
) -> list[tuple[str, ...]]:
    """Return the files of each name; origins are asked several URLs at the same time."""
    expand = partial(_expand_one, suffixes=suffixes)
    remote = list(filter(is_url, names))
    if len(remote) < 2:
        return list(map(expand, names))
    from ffserve.store.fetching import reach, send_identity
    from ffserve.store.ranges import pipelined
    from ffserve.store.schemes.scheme import Sent

    def send(name: str) -> Sent | None:
        return send_identity(name) if is_url(name) else Sent()

    reach(remote[0])
    return list(pipelined(expand, send, names, remote))


def _without_scheme(path: str) -> str:
    """Return the local path that a ``file:`` URL names; other paths and URLs as they are."""
    return path if (local := local_path(path)) is None else local


def _files(names: list[str]) -> list[str]:
    """Return the absolute paths if all of these exist, and none is a directory; else nothing."""
    if not all(names) or any(map(is_url, names)):
        return []
    absolute = [os.path.abspath(name) for name in names]
    with contextlib.suppress(ValueError):  # characters that no file name can have
        states, error = stat_paths(absolute)
        if error is None and not (states["mode"] & KIND_BITS == stat.S_IFDIR).any():
            return absolute
    return []


def _expand_one(
    path: str, suffixes: Sequence[str] | Callable[[], Sequence[str]]
) -> tuple[str, ...]:
    if not path:
        raise UsageError("empty path", hint="check for an unset shell variable")
    if is_url(path):
        from ffserve.store.fetching import listing

        found = listing(path, suffixes() if callable(suffixes) else suffixes)
        return tuple(identity.url for identity in found)
    absolute = os.path.abspath(path)
    hint = "in place of braces write * or [0-9], or give a list" if "{" in path else None
    mode = None
    with contextlib.suppress(OSError, ValueError):
        mode = os.stat(absolute).st_mode
    if mode is not None and stat.S_ISDIR(mode):
        return _expand_directory(absolute, suffixes() if callable(suffixes) else suffixes)
    if mode is not None:
        return (absolute,)
    try:
        wrap_os_error(os.lstat, absolute)
    except MissingFile as error:
        if not glob.has_magic(path):
            error.hint = hint or error.hint
            raise
    except ValueError as error:  # characters that no file name can have
        raise UsageError(f"invalid path {path!r}: {error}") from None
    else:
        return (absolute,)  # A broken link is reported when it is opened.
    matches = tuple(sorted(m for m in glob.glob(absolute) if os.path.isfile(m)))
    if not matches:
        raise MissingFile(
            "no file matches this pattern",
            path=absolute,
            hint=hint or "check the path on this machine",
        )
    return matches


def _expand_directory(directory: str, suffixes: Sequence[str]) -> tuple[str, ...]:
    ends = tuple(suffixes) or ""

    def listed(directory: str) -> list[str]:
        with os.scandir(directory) as entries:
            return sorted(
                entry.path
                for entry in entries
                if entry.name.endswith(ends) and not entry.name.startswith(".") and _is_file(entry)
            )

    files = wrap_os_error(listed, directory)
    if not files:
        wanted = ", ".join("*" + suffix for suffix in suffixes) or "files"
        raise MissingFile(
            f"the directory contains no {wanted}",
            path=directory,
            hint="give another path, or create record files with `ffserve pack`",
        )
    return tuple(files)


def _is_file(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):  # of a link in a circle, or to what this user may not see
        return entry.is_file()
    return False
