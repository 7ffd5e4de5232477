"""Places of input files: local paths and ``file://`` directly, all other URLs through the store.

The rest of this folder uses three functions: `find` lists the files of a URI, `fetch` brings one
file to a local path, where it gets its name when it is complete, and `open_file` opens one as a
stream. No place is written to, and no file is deleted there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, cast

from ffserve.disk.files import open_regular, opener, wrap_os_error
from ffserve.disk.output import writing
from ffserve.errors import MissingFile, ReadError, UsageError
from ffserve.store import public as store
from ffserve.store.public import (
    HIDDEN,
    SPECIAL,
    ObjectVersion,
    check_name,
    is_web,
    name_of,
    shown,
    write_at,
)

_MAGIC = re.compile(r"[*?\[{]")
_COPY_SIZE = 1 << 20
_FICLONE = 0x40049409  # linux/fs.h


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file.

    Args:
        identity: its version. The URL is as the program is told it, an absolute path for a local
            file that was given by path; the tag of a local file is its time.
        name: its place in the directory of its alias, parts joined by "/".
    """

    identity: ObjectVersion
    name: str

    @property
    def uri(self) -> str:
        """The URL, or the path."""
        return self.identity.url

    @property
    def size(self) -> int:
        """Bytes; -1 if the origin does not say."""
        return self.identity.size


@dataclass(slots=True)
class Listing:
    """The files of an input in listing order, and what was left out: (URI, reason)."""

    files: list[InputFile] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def local_path(uri: str) -> str | None:
    """Return the absolute path of a local file; None for the URL of a remote one.

    Raises: UsageError: a ``file:`` URL names another machine.
    """
    path = store.local_path(uri, escaped=False)
    return None if path is None else os.path.join(os.getcwd(), path)


def find(uri: str) -> Listing:
    """List the files of a path, directory or pattern.

    An existing path is taken as it is. In a pattern ``*``, ``?``, ``[…]`` and ``{a,b}`` have the
    meaning that they have in Hadoop. Directories are listed with all below them, each sorted by
    name; empty files are taken. Hidden files (and directories) have names that begin with "." or
    "_"; they are left out unless the URI names them.

    Raises:
        MissingFile: nothing matches, or a symbolic link leads nowhere.
        AccessDenied, ReadError: a directory cannot be listed.
        UsageError: the URL's protocol is unknown, or a package for it is missing.
    """
    path = local_path(uri)
    if "\0" in uri:
        raise UsageError(
            f"invalid input {uri!r}: it contains a NUL character", hint="correct the name"
        )
    if path is None:
        return _find_remote(uri)
    search = _LocalSearch(uri.removesuffix(path) if uri[:6].lower() == "file:/" else "")
    if os.path.lexists(path):
        search.add(path, "" if os.path.isdir(path) else os.path.basename(path.rstrip("/")))
    elif not _MAGIC.search(path):
        raise MissingFile("no such file or directory", path=uri, hint="check the path")
    elif not search.match(path):
        raise _unmatched(uri)
    return search.listing


def _unmatched(uri: str) -> MissingFile:
    return MissingFile("no file matches this pattern", path=shown(uri), hint="check the pattern")


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


# ---- patterns ------------------------------------------------------------------------------------


def alternatives(pattern: str) -> list[str]:
    """Return the patterns that one with alternatives ``{a,b}`` stands for, in order."""
    begin = pattern.find("{")
    while begin >= 0:
        parts, depth, last = [], 0, begin + 1
        for at in range(begin, len(pattern)):
            char = pattern[at]
            depth += (char == "{") - (char == "}")
            if (char == "," and depth == 1) or depth == 0:
                parts.append(pattern[last:at])
                last = at + 1
            if depth == 0:
                tails = alternatives(pattern[at + 1 :])
                heads = [each for part in parts for each in alternatives(part)]
                return [pattern[:begin] + head + tail for head in heads for tail in tails]
        begin = pattern.find("{", begin + 1)
    return [pattern]


def _root(pattern: str) -> str:
    """Return the directory above the first part that is a pattern. The names of files are relative
    to it."""
    found = _MAGIC.search(pattern)
    assert found is not None
    return pattern[: found.start()].rpartition("/")[0]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern.replace("[^", "[!"))


# ---- local files ---------------------------------------------------------------------------------

_Chain = tuple[tuple[int, int], Any] | None
"""Identities of a directory and of those above it, to notice links that lead in a circle."""


class _LocalSearch:
    """The files of one local URI."""

    def __init__(self, prefix: str) -> None:
        self.listing = Listing()
        self._prefix = prefix

    def match(self, pattern: str) -> bool:
        """Add the files of a pattern; return whether something matched."""
        root, found = _root(pattern), False
        for each in alternatives(pattern):
            paths = [root or "/"]
            for part in each[len(root) + 1 :].split("/"):
                paths = [path for above in paths for path in self._step(above, part)]
            for path in paths:
                self.add(path, path[len(root) + 1 :])
                found = True
        return found

    def _step(self, above: str, part: str) -> Iterator[str]:
        """Yield the entries of a directory that one part of a pattern matches."""
        base = "" if above == "/" else above
        if not _MAGIC.search(part):
            path = f"{base}/{part}" if part else above
            if os.path.lexists(path):
                yield path
            return
        if not os.path.isdir(above):
            return
        for name in sorted(wrap_os_error(os.listdir, above), key=os.fsencode):
            if not _matches(name, part):
                continue
            if _is_hidden(name) and name[0] != part[0]:
                self._leave_out(f"{base}/{name}", HIDDEN)
            else:
                yield f"{base}/{name}"

    def add(self, path: str, name: str) -> None:
        """Add a file, or all files below a directory."""
        waiting: list[tuple[str, str, _Chain]] = [(path, name, None)]
        while waiting:
            path, name, above = waiting.pop()
            state = wrap_os_error(os.stat, path)
            if stat.S_ISDIR(state.st_mode):
                chain = ((state.st_dev, state.st_ino), above)
                _check_circle(path, chain)
                inner = self._entries(path)
                start = f"{name}/" if name else ""
                waiting += [(os.path.join(path, e), start + e, chain) for e in reversed(inner)]
            elif not stat.S_ISREG(state.st_mode):
                self._leave_out(path, SPECIAL)
            else:
                changed = str(state.st_mtime_ns)
                identity = ObjectVersion(self._prefix + path, state.st_size, changed, 0)
                self.listing.files.append(InputFile(identity, name))

    def _entries(self, directory: str) -> list[str]:
        names = sorted(wrap_os_error(os.listdir, directory), key=os.fsencode)
        for name in names:
            if _is_hidden(name):
                self._leave_out(os.path.join(directory, name), HIDDEN)
        return [name for name in names if not _is_hidden(name)]

    def _leave_out(self, path: str, reason: str) -> None:
        self.listing.left_out.append((self._prefix + path, reason))


def _check_circle(path: str, chain: _Chain) -> None:
    assert chain is not None
    here, above = chain
    while above is not None:
        if above[0] == here:
            raise ReadError(
                "a symbolic link leads back to a directory above it",
                path=path,
                hint="remove the link, or give the directories that are wanted",
            )
        above = above[1]


# ---- remote files --------------------------------------------------------------------------------


def _find_remote(uri: str) -> Listing:
    # In web addresses a question mark begins the query.
    given, mark, query = uri.partition("?") if is_web(uri) else (uri, "", "")
    root = _root(given) if _MAGIC.search(given) else given.rstrip("/")
    listing, found = Listing(), False
    for each in alternatives(given):
        try:
            files, left_out = store.find(each + mark + query, hidden="._", below=True)
        except MissingFile:
            if each == given:
                raise
            continue
        found = found or bool(files or left_out)
        listing.left_out += left_out
        for identity in sorted(files, key=lambda identity: identity.url.split("/")):
            name = identity.url.removeprefix(root).strip("/")
            name = name_of(identity.url) if identity.url == uri else name
            check_name(name, identity.url)
            listing.files.append(InputFile(identity, name))
    if not found and _MAGIC.search(given):
        raise _unmatched(uri)
    return listing


# ---- fetching and opening ------------------------------------------------------------------------


def open_file(file: InputFile) -> IO[bytes]:
    """Open an input file as a stream of bytes, which can seek unless its size is unknown.

    Raises: MissingFile, AccessDenied, ReadError.
    """
    path = local_path(file.uri)
    if path is None:
        if file.size < 0:
            return cast(IO[bytes], store.UnsizedStream(file.uri))
        return cast(IO[bytes], store.StoredStream(file.identity))
    os.close(open_regular(path))
    return wrap_os_error(lambda p: open(p, "rb", buffering=0, opener=opener), path)


def fetch(file: InputFile, target: str, scratch: str, check: Callable[[], object]) -> None:
    """Bring a file to a local path, where it appears when it is complete.

    A local file is linked where the file system can: it is cloned (the blocks are shared until one
    of both is changed), else it gets a second name. A file of another user, to which the kernel
    allows no second name, gets a symbolic link. From another file system it is copied. A remote
    file comes through the store, whose blocks are cloned where the file system can, else copied.

    Args:    target: a path that does not exist, in a directory that does. scratch: a directory of
             the same file system for incomplete files. check: called now and then; it raises when
             the file is no longer wanted.
    Raises:  MissingFile, AccessDenied, ReadError; UsageError if the target exists.
    """
    path = local_path(file.uri)
    if path is not None:
        _link_or_copy(file, os.path.realpath(path), target, scratch, check)
        return
    with _appearing(target, scratch) as fd:
        if file.size < 0:
            store.call(file.uri, lambda: _fetch_unsized(file, target, fd, check))
            return
        store.copy(file.identity, fd, check)
        if modified := file.identity.modified:
            os.utime(fd, (modified, modified))


@contextlib.contextmanager
def _appearing(target: str, scratch: str) -> Iterator[int]:
    """Make a file that gets its name when the block ends without an error."""
    temporary = os.path.join(scratch, secrets.token_hex(8))
    try:
        with writing(target):
            with open(temporary, "xb", buffering=0) as out:
                yield out.fileno()
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _fetch_unsized(file: InputFile, target: str, fd: int, check: Callable[[], object]) -> None:
    """Write a file of unknown size as a whole, as often as this is called."""
    size = 0
    with open_file(file) as source:
        while content := source.read(_COPY_SIZE):
            check()
            with writing(target):
                write_at(fd, content, size)
            size += len(content)
    with writing(target):
        os.ftruncate(fd, size)


def _link_or_copy(
    file: InputFile, path: str, target: str, scratch: str, check: Callable[[], object]
) -> None:
    fd = open_regular(path)
    try:
        if _clone(fd, target, scratch):
            return
        try:
            os.link(path, target)
        except FileExistsError:
            raise UsageError(
                "cannot place an input: the path exists", path=target, hint="remove it"
            ) from None
        except PermissionError:
            # Only the owner may give it another name (fs.protected_hardlinks), or the file system
            # has no hard links, or the directory cannot be written; that is reported here.
            with writing(target):
                os.symlink(path, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP):
                with writing(target):
                    raise
            _copy(fd, file, target, scratch, check)
    finally:
        os.close(fd)


def _clone(fd: int, target: str, scratch: str) -> bool:
    """Make `target` a clone of an open file; False where the file systems cannot."""
    try:
        with _appearing(target, scratch) as out:
            fcntl.ioctl(out, _FICLONE, fd)
            _copy_times(os.fstat(fd), out)
    except OSError:
        return False  # what is wrong with the directory is found, and said, by the next attempt
    return True


def _copy(fd: int, file: InputFile, target: str, scratch: str, check: Callable[[], object]) -> None:
    before, at = os.fstat(fd), 0
    with _appearing(target, scratch) as out:
        while content := os.pread(fd, _COPY_SIZE, at):
            check()
            write_at(out, content, at)
            at += len(content)
        after = os.fstat(fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise _changed(file, "its size or modification time changed")
        if at != after.st_size:
            raise _changed(file, f"{at} bytes were read instead of {after.st_size}")
        _copy_times(after, out)


def _copy_times(state: os.stat_result, fd: int) -> None:
    os.utime(fd, ns=(state.st_atime_ns, state.st_mtime_ns))


def _changed(file: InputFile, how: str) -> ReadError:
    return ReadError(
        f"the file changed while it was fetched: {how}",
        path=shown(file.uri),
        hint="run the command again when no program writes the file",
    )
