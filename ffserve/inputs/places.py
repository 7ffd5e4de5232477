"""Places of input files: local paths and ``file://`` directly, all other URLs by fsspec.

Three functions are all that the rest of the package knows of places: `find` lists the files of a
URI, `fetch` brings one file to a local path under its name only when it is complete, and
`open_file` opens one as a stream. Nothing is written to a place, and nothing is deleted there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import importlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from ffserve.errors import FFServeError, MissingFile, ReadError, UsageError
from ffserve.files import open_regular, opener, wrap_os_error
from ffserve.output import writing
from ffserve.store.origin import failure
from ffserve.store.urls import is_url, name_of, shown

HIDDEN, EMPTY, SPECIAL = "hidden", "empty", "not a regular file"
"""Why a file is left out."""

_FILE_URI = re.compile(r"file:(?://(?:localhost)?)?(?=/)", re.I)
_MAGIC = re.compile(r"[*?\[{]")
_BLOCK_SIZE = 8 << 20
_FICLONE = 0x40049409  # linux/fs.h


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file.

    Args:
        uri: as the program is told it; an absolute path for a local file that was given by path.
        name: its place in the directory of its alias, parts joined by "/".
        size: bytes; -1 if the place does not say.
        version: text that is another one after a change, as far as the place says.
    """

    uri: str
    name: str
    size: int
    version: str


@dataclass(slots=True)
class Listing:
    """The files of an input in listing order, and what was left out: (URI, reason)."""

    files: list[InputFile] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def local_path(uri: str) -> str | None:
    """Return the absolute path of a local file; None for the URL of a remote one."""
    found = _FILE_URI.match(uri)
    if found is not None:
        return uri[found.end() :]
    remote = is_url(uri) or uri[:7].lower() == "file://"  # of another host
    return None if remote else os.path.join(os.getcwd(), uri)


def find(uri: str) -> Listing:
    """List the files of a path, directory or pattern.

    An existing path is taken as it is. In a pattern ``*``, ``?``, ``[…]`` and ``{a,b}`` have the
    meaning that they have in Hadoop. Directories are listed with all below them, each sorted by
    name. Hidden files (and directories) have names that begin with "." or "_"; they are left out
    unless the URI names them.

    Raises:
        MissingFile: nothing matches, or a symbolic link leads nowhere.
        AccessDenied, ReadError: a directory cannot be listed.
        UsageError: the URL's protocol is unknown, or a package for it is missing.
    """
    path = local_path(uri)
    if "\0" in uri:
        raise UsageError(f"invalid input {uri!r}: a name has no NUL", hint="correct the name")
    if path is None:
        return _find_remote(uri)
    found = _FILE_URI.match(uri)
    search = _LocalSearch(uri[: found.end()] if found else "")
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
    """Return the directory above the first part that is a pattern; names are relative to it."""
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
            elif state.st_size == 0:
                self._leave_out(path, EMPTY)
            else:
                uri = self._prefix + path
                version = str(state.st_mtime_ns)
                self.listing.files.append(InputFile(uri, name, state.st_size, version))

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


def file_system(uri: str) -> tuple[Any, str]:
    """Return the file system of fsspec for a URL, and the path in it.

    Raises: UsageError: fsspec or the package for this protocol is missing.
    """
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        raise UsageError(
            "remote files need the package fsspec",
            path=shown(uri),
            hint="pip install 'ffserve[remote]'",
        ) from None
    try:
        found, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"cannot use this URL: {str(error).replace(uri, shown(uri))}",
            path=shown(uri),
            hint="check the protocol, and install the package that fsspec names",
        ) from None
    except Exception as error:
        raise place_error(error, uri) from error
    return found, str(path)


def place_error(error: BaseException, uri: str) -> FFServeError:
    """Return the error for an exception of fsspec, or of a package below it."""
    return error if isinstance(error, FFServeError) else failure(error, uri).error


@contextlib.contextmanager
def at_place(uri: str) -> Iterator[None]:
    """Convert exceptions of fsspec in the block to errors that name the URL."""
    try:
        yield
    except Exception as error:
        raise place_error(error, uri) from error


def _find_remote(uri: str) -> Listing:
    search = _RemoteSearch(uri)
    web = uri.lower().startswith(("http://", "https://"))  # "?" begins a query there
    if web or not _MAGIC.search(search.path):
        with at_place(uri):
            only = search.places.info(search.path)
        search.add([only])
        return search.listing
    search.root = _root(search.path)
    search.pattern = search.path[len(search.root) + 1 :].split("/")
    found = False
    for each in alternatives(search.path):
        with at_place(uri):
            infos = list(search.places.glob(each, detail=True).values())
        search.add(infos)
        found = found or bool(infos)
    if not found:
        raise _unmatched(uri)
    return search.listing


class _RemoteSearch:
    """The files of one URL.

    root: the path that names are relative to. pattern: the parts of the pattern below it.
    """

    def __init__(self, uri: str) -> None:
        self.listing = Listing()
        self.places, path = file_system(uri)
        self.root = self.path = path.rstrip("/")
        self.pattern: list[str] = []
        self._uri = uri
        given = uri.rstrip("/")
        # `unstrip_protocol` loses user, host and port of SFTP.
        ends = bool(self.path) and given.endswith(self.path)
        self._prefix = given[: len(given) - len(self.path)] if ends else None

    def add(self, infos: Iterable[dict[str, Any]]) -> None:
        """Add files, and all files below directories."""
        for info in sorted(infos, key=lambda info: str(info["name"]).split("/")):
            place = str(info["name"]).rstrip("/")
            uri = self._uri_of(place)
            name = place[len(self.root) :].lstrip("/") or name_of(place)
            if place != self.root and self._is_hidden(name):
                self.listing.left_out.append((uri, HIDDEN))
            elif info.get("type") == "directory":
                with at_place(uri):
                    inner = self.places.find(info["name"], detail=True)
                self.add(each for each in inner.values() if each["name"].rstrip("/") != place)
            elif info.get("size") == 0:
                self.listing.left_out.append((uri, EMPTY))
            else:
                _check_name(name, uri)
                size = info.get("size")
                version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
                file = InputFile(uri, name, -1 if size is None else int(size), version)
                self.listing.files.append(file)

    def _uri_of(self, place: str) -> str:
        if self._prefix is None:
            return str(self.places.unstrip_protocol(place))
        return self._prefix + place

    def _is_hidden(self, name: str) -> bool:
        given = [part[:1] for part in self.pattern]
        return any(
            _is_hidden(part) and given[number : number + 1] != [part[0]]
            for number, part in enumerate(name.split("/"))
        )


_VERSIONS = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "updated")


def _check_name(name: str, uri: str) -> None:
    """Refuse the name of an object that would lead out of a directory: stores allow any name."""
    if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name:
        raise UsageError(
            f"the name {name!r} cannot be a path below a directory",
            path=shown(uri),
            hint="rename the object, or exclude it by a pattern",
        )


# ---- fetching and opening ------------------------------------------------------------------------


def open_file(file: InputFile) -> IO[bytes]:
    """Open an input file as a stream of bytes that can seek.

    Raises: MissingFile, AccessDenied, ReadError.
    """
    path = local_path(file.uri)
    if path is not None:
        os.close(open_regular(path))
        return wrap_os_error(lambda p: open(p, "rb", buffering=0, opener=opener), path)
    places, inner = file_system(file.uri)
    with at_place(file.uri):
        stream: IO[bytes] = places.open(inner, "rb", block_size=_BLOCK_SIZE)
        return stream


def fetch(file: InputFile, target: str, scratch: str) -> None:
    """Bring a file to a local path, where it appears when it is complete.

    A local file is linked where the file system can: it is cloned (the blocks are shared until one
    of both is changed), else it gets a second name. A file of another user, to which the kernel
    allows no second name, gets a symbolic link. From another file system it is copied.

    Args:    target: a path that does not exist, in a directory that does. scratch: a directory of
             the same file system for incomplete files.
    Raises:  MissingFile, AccessDenied, ReadError; UsageError if the target exists.
    """
    path = local_path(file.uri)
    if path is not None:
        _link_or_copy(file, os.path.realpath(path), target, scratch)
        return
    places, inner = file_system(file.uri)
    temporary = os.path.join(scratch, secrets.token_hex(8))
    try:
        with writing(target), at_place_or_disk(file.uri):
            places.get_file(inner, temporary)
            size = os.stat(temporary).st_size
            if file.size not in (-1, size):
                raise _changed(file, f"{size} bytes came instead of {file.size}")
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


@contextlib.contextmanager
def at_place_or_disk(uri: str) -> Iterator[None]:
    """Convert exceptions of fsspec as `at_place` does, but leave those of the local disk."""
    try:
        yield
    except Exception as error:
        local = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG)
        if isinstance(error, OSError) and error.errno in local:
            raise
        raise place_error(error, uri) from error


def _changed(file: InputFile, how: str) -> ReadError:
    return ReadError(
        f"the file changed while it was fetched: {how}",
        path=shown(file.uri),
        hint="run it again when nothing writes the file",
    )


def _link_or_copy(file: InputFile, path: str, target: str, scratch: str) -> None:
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
            _copy(fd, file, target, scratch)
    finally:
        os.close(fd)


def _clone(fd: int, target: str, scratch: str) -> bool:
    """Make `target` a clone of an open file; False where the file systems cannot."""
    temporary = os.path.join(scratch, secrets.token_hex(8))
    try:
        with open(temporary, "xb", buffering=0) as out:
            fcntl.ioctl(out.fileno(), _FICLONE, fd)
        state = os.fstat(fd)
        os.utime(temporary, ns=(state.st_atime_ns, state.st_mtime_ns))
        os.link(temporary, target)
    except OSError:
        return False  # what is wrong with the directory is found, and said, by the next attempt
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return True


def _copy(fd: int, file: InputFile, target: str, scratch: str) -> None:
    temporary = os.path.join(scratch, secrets.token_hex(8))
    try:
        with writing(target):
            before = os.fstat(fd)
            with open(fd, "rb", closefd=False) as source, open(temporary, "xb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            after, copied = os.fstat(fd), os.stat(temporary)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise _changed(file, "its size or time is another one")
            if copied.st_size != after.st_size:
                raise _changed(file, f"{copied.st_size} bytes came instead of {after.st_size}")
            os.utime(temporary, ns=(after.st_atime_ns, after.st_mtime_ns))
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
