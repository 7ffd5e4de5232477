"""Output files and directories that take their name only when they are complete.

Data goes to a temporary file in the directory of the final one. When the temporary file is complete
and synced, it is renamed and the directory is synced. So the final name always denotes a complete
file, also after a crash or a power failure. Where the file system supports O_TMPFILE, the
temporary file has no name, and a killed writer leaves nothing behind. Elsewhere (NFS, most FUSE
mounts) it leaves ``.NAME.<random>.tmp``, which no reader takes for data and which the next writer
of NAME removes. A lock (flock) marks the temporary files of live writers.
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

from ffserve.disk.files import is_missing
from ffserve.errors import AccessDenied, FFServeError, MissingFile, ReadError, UsageError

NAME_MAX = 255
_ENDING = re.compile(r"[0-9a-f]{12}\.tmp")
_ENDING_SIZE = 16


class OutputFile:
    """The temporary file of one output file, and its spool: a second, nameless file."""

    def __init__(self, path: str) -> None:
        self._final = os.path.realpath(path)
        self.owner = os.getpid()
        mode = None
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self._final)
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(
                    "cannot write: the path exists and is not a regular file",
                    path=path,
                    hint="choose another path",
                )
            mode = stat.S_IMODE(found.st_mode)
        self._temporary, self.fd = self._make()
        self._spool = -1
        if mode is not None:
            with contextlib.suppress(OSError):
                os.fchmod(self.fd, mode)

    def spool(self) -> int:
        """Return the descriptor of the spool, created at the first call."""
        if self._spool < 0:
            name, self._spool = self._make()
            if name:
                os.unlink(name)
        return self._spool

    def publish(self) -> None:
        """Sync the file, rename it to its final name, and sync the directory."""
        os.fsync(self.fd)
        if not self._temporary:
            # link() cannot replace an existing file; rename() can.
            name = temporary_name(self._final)
            _link(self.fd, name)
            self._temporary = name
        os.replace(self._temporary, self._final)
        self._temporary = ""
        self._close()
        sync_directory(os.path.dirname(self._final))

    def discard(self) -> None:
        """Close the descriptors; in the process that created the file, also remove it."""
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
        """Create a temporary file; return its name (empty with O_TMPFILE) and its descriptor."""
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
    """Give an O_TMPFILE file a name."""
    # linkat() follows the link in /proc; Python calls it only if a directory descriptor is given.
    here = os.open(_DESCRIPTORS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(fd), path, src_dir_fd=here)
    finally:
        os.close(here)


def temporary_name(path: str) -> str:
    """Return a new hidden name beside ``path`` that no pattern for data files matches."""
    return _temporary_prefix(path) + secrets.token_hex(6) + ".tmp"


def _temporary_prefix(path: str) -> str:
    """Return the common prefix of all temporary names for a path."""
    directory, name = os.path.split(path)
    kept = os.fsencode(name)[: NAME_MAX - _ENDING_SIZE - 2]
    return os.path.join(directory, f".{os.fsdecode(kept)}.")


def _claim(fd: int, path: str) -> bool:
    """Lock a new temporary file or directory; False if another writer removed it meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # No locks here, so no other writer can remove it either.
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False


def _remove_leftovers(final: str) -> None:
    """Remove the temporary files that killed writers of this name left."""
    prefix = _temporary_prefix(final)
    directory, start = os.path.split(prefix)
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name.startswith(start) and _ENDING.fullmatch(name, len(start)):
                with contextlib.suppress(OSError):
                    _remove_leftover(os.path.join(directory, name))


def _remove_leftover(path: str) -> None:
    whole = stat.S_ISDIR(os.lstat(path).st_mode)
    # NFS locks only files that are open for writing.
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
    """Make the names in a directory durable, if its file system supports that."""
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
    """Write a directory of files that appear together or not at all.

    Args:
        out: the directory; missing parents are created. If it does not exist or is empty, it
            appears by one rename. Otherwise ``replace`` is required, and the files are moved into
            it one by one after all of them are complete.
        replace: allow a directory that is not empty.
    Returns: in a ``with``, the temporary directory to write into; an exception removes it.
    Raises:  UsageError if ``out`` is not a directory, or is not empty and ``replace`` is False.
    """
    final = os.path.realpath(os.fsdecode(out))
    with writing(final):
        filled = os.path.lexists(final) and _is_filled(final)
        if filled and not replace:
            raise UsageError(
                "the output directory is not empty",
                path=final,
                hint="remove it, or choose another directory",
            )
        if not filled:
            os.makedirs(os.path.dirname(final), exist_ok=True)
        staging, lock = _make_directory(os.path.join(final, "parts") if filled else final)
    try:
        yield staging
        with writing(final):
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
    """Create a temporary directory; return its name and the descriptor that holds its lock."""
    _remove_leftovers(final)
    while True:
        path = temporary_name(final)
        os.mkdir(path)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _claim(fd, path):
                return path, fd
            os.close(fd)


def _is_filled(path: str) -> bool:
    if not os.path.isdir(path):
        raise UsageError("not a directory", path=path, hint="give a directory for the output")
    with os.scandir(path) as entries:
        return next(entries, None) is not None


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Convert an OSError in the block to an FFServeError about the output file `path`."""
    try:
        yield
    except FFServeError:
        raise
    except OSError as error:
        raise write_error(error, path) from error


_WRONG_PATH = {
    errno.ENAMETOOLONG: f"choose a shorter name; a file system takes {NAME_MAX} bytes at most",
    errno.ENOTDIR: "a parent of this path is a file, not a directory: choose another path",
    errno.ELOOP: "the symbolic links of this path lead in a circle: remove one",
}


def write_error(error: OSError, path: str) -> FFServeError:
    """Return the FFServeError for an OSError while `path` was written."""
    if isinstance(error, FFServeError):
        return error
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return AccessDenied(
            f"cannot write: {error.strerror}",
            path=path,
            hint="check the directory's permissions (`ls -ld`) and mount options (`findmnt -T`)",
        )
    if is_missing(error):
        wrong = _WRONG_PATH.get(error.errno or 0, "create the directory first")
        return MissingFile(f"cannot write: {error.strerror}", path=path, hint=wrong)
    if isinstance(error, FileExistsError):
        return UsageError(
            "cannot write: a parent of this path is a file, not a directory",
            path=path,
            hint="choose another path",
        )
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free space and write the file again; the incomplete file has been removed"
    elif error.errno == errno.EFBIG:
        hint = "raise the limit on file sizes (ulimit -f), or use a file system with a higher one"
    return ReadError(f"cannot write: {error.strerror or error}", path=path, hint=hint)
