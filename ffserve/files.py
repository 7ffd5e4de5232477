"""Opening and reading files, with errors that name them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Callable
from typing import TypeVar

from ffserve.errors import AccessDenied, FFServeError, MissingFile, ReadError
from ffserve.formats.base import GZIP_MAGIC, HEAD_SIZE, ZLIB_MAGIC, ReadAt

T = TypeVar("T")

_NAMES_NOTHING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""What the operating system says of a path at which there can be nothing."""
_HINTS = {
    **dict.fromkeys(_NAMES_NOTHING, "is the path right on this machine?"),
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the machine has no file descriptors left",
    errno.ENOMEM: "is a limit on address space (ulimit -v) in force?",
    errno.EFBIG: "is a limit on the size of files (ulimit -f) in force?",
    errno.ENOSPC: "free some space and try again",
    errno.ESTALE: "the network file system lost the file; open it again",
    errno.EIO: "the device failed; see the kernel's log",
}
_DENIED = "`namei -l` shows who may read it, and who may pass the directories above it"


def os_error(error: OSError, path: str, *, hint: str | None = None) -> FFServeError:
    """Return ours for the operating system's, naming the file; with the usual hint or another."""
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError):
        return AccessDenied(reason, path=path, hint=hint or _DENIED)
    kind = MissingFile if names_nothing(error) else ReadError
    return kind(reason, path=path, hint=hint or os_hint(error))


def os_hint(error: OSError) -> str | None:
    """Return what can be done about it, where that is known."""
    return _HINTS.get(error.errno or 0)


def names_nothing(error: OSError) -> bool:
    """Whether it is the path that is wrong."""
    return error.errno in _NAMES_NOTHING


def wrap_os_error(call: Callable[[str], T], path: str) -> T:
    """Return call(path), an OSError turned into ours."""
    try:
        return call(path)
    except OSError as error:
        raise os_error(error, path) from error


def open_regular(path: str) -> int:
    """Open a regular file for reading through the page cache; return its descriptor.

    A pipe of that name does not hold us up.

    Raises: MissingFile, AccessDenied, ReadError.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = wrap_os_error(lambda p: os.open(p, flags), path)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise ReadError("this is no regular file", path=path)


def read_at_of(fd: int, path: str) -> ReadAt:
    """Return a reader of a descriptor that was opened without O_DIRECT."""

    def read_at(offset: int, into: memoryview, /) -> int:
        done = 0
        while done < len(into):
            try:
                got = os.preadv(fd, [into[done:]], offset + done)
            except OSError as error:
                raise os_error(error, path) from error
            if got == 0:
                break
            done += got
        return done

    return read_at


def is_compressed(path: str) -> bool:
    """Whether a file is a compressed TFRecord file; what cannot be opened is none.

    Most files are not, which their first bytes tell without importing how others are read.
    """
    try:
        with open(path, "rb", buffering=0, opener=opener) as file:
            head = file.read(HEAD_SIZE)
    except OSError:
        return False
    if not head.startswith((GZIP_MAGIC, ZLIB_MAGIC)):
        return False
    from ffserve.formats.tfstream import compression_of

    return compression_of(head) is not None


def opener(path: str, flags: int) -> int:
    """For `open`: a pipe of that name does not hold us up."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def raise_file_limit() -> None:
    """Take all descriptors that are allowed: every open shard holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
