"""Files and directories that take their name only when they are complete.

What is written goes to a temporary file in the directory of the one to be. When it is complete and
synced it is renamed, and then the directory is synced: so the final name means a complete file at
any moment, also after a crash or a power cut. Where the file system can, the temporary file has no
name until then (O_TMPFILE), so that a writer that is killed leaves nothing; elsewhere (NFS, most
FUSE mounts) it leaves ``.NAME.<random>.tmp``, which no reader takes for data and which the next
writer of NAME removes. That its writer lives is told by a lock (flock), which ends with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator

from ffserve.errors import AccessDenied, FFServeError, MissingFile, ReadError, UsageError
from ffserve.files import names_nothing

_NAME_MAX = 255
_ENDING = re.compile(r"[0-9a-f]{12}\.tmp")
_ENDING_SIZE = 16


class Files:
    """The temporary file, the nameless one behind it, and who may finish or remove them."""

    def __init__(self, path: str) -> None:
        self._final = os.path.realpath(path)
        self.owner = os.getpid()
        mode = None
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self._final)
            if not stat.S_ISREG(found.st_mode):
                raise UsageError("something that is no file has this name already", path=path)
            mode = stat.S_IMODE(found.st_mode)
        self._temporary, self.fd = self._make()
        self._spool = -1
        if mode is not None:
            with contextlib.suppress(OSError):
                os.fchmod(self.fd, mode)

    def spool(self) -> int:
        """Return the descriptor of the nameless file, made when first asked for."""
        if self._spool < 0:
            name, self._spool = self._make()
            if name:
                os.unlink(name)
        return self._spool

    def publish(self) -> None:
        """Sync the file, give it its name, and sync the name."""
        os.fsync(self.fd)
        if not self._temporary:
            # A link replaces nothing, a rename does.
            name = temporary_name(self._final)
            _link(self.fd, name)
            self._temporary = name
        os.replace(self._temporary, self._final)
        self._temporary = ""
        self._close()
        sync_directory(os.path.dirname(self._final))

    def discard(self) -> None:
        """Close the descriptors; in the process that made it, remove the file also."""
        if self.owner == os.getpid() and self._temporary:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = ""
        self._close()

    def _close(self) -> None:
        for fd in (self.fd, self._spool):
            if fd >= 0:
                os.close(fd)
        self.fd = self._spool = -1

    def _make(self) -> tuple[str, int]:
        """Make a file to write to: its name, empty if it has none yet, and its descriptor."""
        if os.path.isdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                directory = os.path.dirname(self._final)
                return "", os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o666)
        _remove_leftovers(self._final)
        while True:
            path = temporary_name(self._final)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            if _claim(fd, path):
                return path, fd
            os.close(fd)


_DESCRIPTORS = "/proc/self/fd"


def _link(fd: int, path: str) -> None:
    """Give a nameless file a name."""
    # Only with a directory's descriptor does Python call linkat, which follows the link in /proc.
    here = os.open(_DESCRIPTORS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(fd), path, src_dir_fd=here)
    finally:
        os.close(here)


def temporary_name(path: str) -> str:
    """Return a new hidden name beside ``path``, which no pattern for data files matches."""
    return _beginning(path) + secrets.token_hex(6) + ".tmp"


def _beginning(path: str) -> str:
    """Return what all temporary names for a path begin with."""
    directory, name = os.path.split(path)
    kept = os.fsencode(name)[: _NAME_MAX - _ENDING_SIZE - 2]
    return os.path.join(directory, f".{os.fsdecode(kept)}.")


def _claim(fd: int, path: str) -> bool:
    """Show that what was just made has a living writer; False when it was removed meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # Without locks nobody removes anything either.
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False


def _remove_leftovers(final: str) -> None:
    """Remove what writers of this name left that were killed."""
    beginning = _beginning(final)
    directory, start = os.path.split(beginning)
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name.startswith(start) and _ENDING.fullmatch(name, len(start)):
                with contextlib.suppress(OSError):
                    _remove_leftover(os.path.join(directory, name))


def _remove_leftover(path: str) -> None:
    whole = stat.S_ISDIR(os.lstat(path).st_mode)
    # NFS locks only what is open for writing.
    flags = os.O_RDONLY | os.O_DIRECTORY if whole else os.O_RDWR
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if whole:
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    finally:
        os.close(fd)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable, where its file system can."""
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def staged_directory(out: str | os.PathLike[str], *, replace: bool = False) -> Iterator[str]:
    """Fill a directory of files that appear together or not at all.

    Args:
        out: the directory; its parents are made. If it does not exist or is empty, it appears
            by one rename. Otherwise ``replace`` is needed, and the files are moved into it one
            after the other once all are complete.
        replace: allow a directory that holds something.
    Returns: the directory to write into meanwhile, in a ``with``; an exception inside removes it.
    Raises:  UsageError when ``out`` is no directory, or holds something and ``replace`` is off.
    """
    final = os.path.realpath(os.fsdecode(out))
    with naming(final):
        filled = os.path.lexists(final) and _holds_something(final)
        if filled and not replace:
            raise UsageError(
                "the directory is not empty", path=final, hint="remove it, or choose another"
            )
        if not filled:
            os.makedirs(os.path.dirname(final), exist_ok=True)
        staging, lock = _make_directory(os.path.join(final, "parts") if filled else final)
    try:
        yield staging
        with naming(final):
            sync_directory(staging)
            if filled:
                for name in sorted(os.listdir(staging)):
                    os.replace(os.path.join(staging, name), os.path.join(final, name))
                sync_directory(final)
            else:
                os.rename(staging, final)
                sync_directory(os.path.dirname(final))
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _make_directory(final: str) -> tuple[str, int]:
    """Make a directory to write to: its name, and the descriptor that shows that somebody does."""
    _remove_leftovers(final)
    while True:
        path = temporary_name(final)
        os.mkdir(path)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _claim(fd, path):
                return path, fd
            os.close(fd)


def _holds_something(path: str) -> bool:
    if not os.path.isdir(path):
        raise UsageError("this is no directory", path=path)
    with os.scandir(path) as entries:
        return next(entries, None) is not None


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Turn errors of the operating system into ours, naming the file."""
    try:
        yield
    except FFServeError:
        raise
    except OSError as error:
        raise named(error, path) from error


def named(error: OSError, path: str) -> FFServeError:
    """Return ours for the operating system's, naming the file that cannot be written."""
    if isinstance(error, FFServeError):
        return error
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return AccessDenied(
            f"cannot write: {error.strerror}",
            path=path,
            hint="`ls -ld` shows who may write to its directory, `findmnt -T` how it is mounted",
        )
    if names_nothing(error):
        return MissingFile(
            f"cannot write: {error.strerror}", path=path, hint="make the directory first"
        )
    if isinstance(error, FileExistsError):
        return UsageError("cannot write: a file stands where a directory is needed", path=path)
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "make room and write it again; what was written has been removed"
    elif error.errno == errno.EFBIG:
        hint = "a limit on file sizes (ulimit -f, or the file system's own) was reached"
    return ReadError(f"cannot write: {error.strerror or error}", path=path, hint=hint)
