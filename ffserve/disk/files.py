"""Open and read files; errors of the operating system become ffserve's and name the file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ffserve.errors import AccessDenied, FFServeError, MissingFile, ReadError
from ffserve.formats.base import GZIP_MAGIC, HEAD_SIZE, ZLIB_MAGIC

if TYPE_CHECKING:  # it loads the C core, which commands that install units do without
    from ffserve.engine.tar import TarScanner

T = TypeVar("T")

_SECTOR_SIZE = 512
"""stat(2) counts blocks of this size on all file systems."""
SPARSE_SHARE = 16
"""A file of which less than 1 part in SPARSE_SHARE is allocated seems to be nearly empty."""
EXTENTS_COUNT = 1024
MAPPED_TIMES = 64
"""The extents of a file that may share blocks are looked at in parts of EXTENTS_COUNT, and of more
than MAPPED_TIMES parts the rest counts as not stored."""
_FIEMAP, _LAST, _UNPLACED, _SHARED = 0xC020660B, 0x1, 0x2 | 0x4 | 0x200, 0x2000
_FIEMAP_HEAD = struct.Struct("<QQIIII")
_EXTENT_DTYPE = np.dtype({
    "names": ["logical", "physical", "length", "flags"],
    "formats": ["<i8", "<i8", "<i8", "<u4"], "offsets": [0, 8, 16, 40], "itemsize": 56,
})  # fmt: skip
"""linux/fiemap.h."""

_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""These errno values mean that the path is wrong."""
_HINTS = {
    **dict.fromkeys(_MISSING, "check the path on this machine"),
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit on open files (sysctl fs.file-max)",
    errno.ENOMEM: "check the limit on address space (ulimit -v)",
    errno.EFBIG: "check the limit on file sizes (ulimit -f)",
    errno.ENOSPC: "free space on the device and try again",
    errno.ESTALE: "the network file system lost the file: open it again",
    errno.EIO: "check the kernel log for device errors",
}
_DENIED = "check the permissions of the file and of all directories above it with `namei -l`"


def os_error(error: OSError, path: str, *, hint: str | None = None) -> FFServeError:
    """Convert an OSError about a file to an FFServeError.

    Args:    path: the file. hint: None for the usual hint of this errno.
    """
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError):
        return AccessDenied(reason, path=path, hint=hint or _DENIED)
    kind = MissingFile if is_missing(error) else ReadError
    return kind(reason, path=path, hint=hint or os_hint(error))


def os_hint(error: OSError) -> str | None:
    """Return what the user can do about an OSError; None if unknown."""
    return _HINTS.get(error.errno or 0)


def is_missing(error: OSError) -> bool:
    """Whether the path of a failed call does not exist."""
    return error.errno in _MISSING


def wrap_os_error(call: Callable[[str], T], path: str) -> T:
    """Return ``call(path)``; raise an OSError as an FFServeError that names the path."""
    try:
        return call(path)
    except OSError as error:
        raise os_error(error, path) from error


REGULAR_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""A file that should be a regular one is opened with these flags, so that a named pipe does not
block."""


def open_regular(path: str) -> int:
    """Open a regular file for reading through the page cache; return its descriptor.

    A named pipe is refused and does not block.

    Raises: MissingFile, AccessDenied, ReadError.
    """
    fd = wrap_os_error(lambda p: os.open(p, REGULAR_FLAGS), path)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise ReadError("not a regular file", path=path, hint="give a file, not a pipe or a device")


@dataclass(frozen=True, slots=True)
class FileReadAt:
    """A `ReadAt` over a descriptor that was opened without O_DIRECT.

    head: the first bytes of the file, which are not read again.
    """

    fd: int
    path: str
    head: bytes = b""

    def __call__(self, offset: int, into: memoryview, /) -> int:
        """Read; see `ReadAt`."""
        done = max(min(len(self.head) - offset, len(into)), 0)
        if done:
            into[:done] = self.head[offset : offset + done]
        while done < len(into):
            try:
                got = os.preadv(self.fd, [into[done:]], offset + done)
            except OSError as error:
                raise os_error(error, self.path) from error
            if got == 0:
                break
            done += got
        return done

    def headers(self, scanner: TarScanner, size: int, large: int) -> int:
        """Let a scan read headers by itself; see `TarScanner.headers`."""
        return scanner.headers(self.fd, size, large)

    def next_data(self, offset: int) -> int:
        """Return where the next bytes are that are not in a hole; the size of the file if none
        are."""
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA)
        except OSError as error:
            return os.fstat(self.fd).st_size if error.errno == errno.ENXIO else offset


def read_at_of(fd: int, path: str, head: bytes = b"") -> FileReadAt:
    """Return a `ReadAt` over a descriptor; see `FileReadAt`."""
    return FileReadAt(fd, path, head)


def allocated_size(fd: int) -> int:
    """Return the bytes of a file that its file system stores: what it costs its owner.

    Some file systems count blocks late, or not at all. So the extents of a file that seems to be
    nearly empty are looked at, the first EXTENTS_COUNT. A block that is in a file several times
    (reflinks) is stored once.
    """
    status = os.fstat(fd)
    found = status.st_blocks * _SECTOR_SIZE
    if found * SPARSE_SHARE >= status.st_size:
        return min(found, _distinct_size(fd, found))
    total = end = 0
    with contextlib.suppress(OSError):  # ENXIO: no data follows
        for _ in range(EXTENTS_COUNT):
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            total += end - begin
    return max(found, total)


def _distinct_size(fd: int, otherwise: int) -> int:
    """Return the bytes of a file without those that are in it several times; `otherwise` if it
    shares none, or the file system does not tell."""
    parts: list[np.ndarray] = []
    at = 0
    for _ in range(MAPPED_TIMES):
        asked = bytearray(_FIEMAP_HEAD.size + EXTENTS_COUNT * _EXTENT_DTYPE.itemsize)
        _FIEMAP_HEAD.pack_into(asked, 0, at, (1 << 63) - at, 0, 0, EXTENTS_COUNT, 0)
        try:
            fcntl.ioctl(fd, _FIEMAP, asked)
        except OSError:
            return otherwise
        count = _FIEMAP_HEAD.unpack_from(asked)[3]
        part = np.frombuffer(asked, _EXTENT_DTYPE, count, _FIEMAP_HEAD.size)
        parts.append(part)
        if not count or part["flags"][-1] & _LAST:
            break
        at = int(part["logical"][-1] + part["length"][-1])
    extents = np.concatenate(parts)
    if not (extents["flags"] & _SHARED).any():
        return otherwise
    placed = extents["flags"] & _UNPLACED == 0
    size = int(extents["length"][~placed].sum())
    extents = np.sort(extents[placed], order="physical")
    ends = extents["physical"] + extents["length"]
    before = np.maximum.accumulate(np.concatenate(([0], ends[:-1])))
    return size + int(np.maximum(ends - np.maximum(extents["physical"], before), 0).sum())


def is_compressed(path: str) -> bool:
    """Whether a file is a compressed TFRecord file; False if it cannot be opened."""
    try:
        with open(path, "rb", buffering=0, opener=opener) as file:
            return is_compressed_head(file.read(HEAD_SIZE))
    except OSError:
        return False


def is_compressed_head(head: bytes) -> bool:
    """Whether a file that begins with these HEAD_SIZE bytes is a compressed TFRecord file.

    The first bytes rule out most files before the module for compressed files is imported.
    """
    if not head.startswith((GZIP_MAGIC, ZLIB_MAGIC)):
        return False
    from ffserve.formats.tfstream import compression_of

    return compression_of(head) is not None


def opener(path: str, flags: int) -> int:
    """Opener for `open` that does not block on a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit; every open shard holds a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
