"""The messages of /dev/fuse, as bytes (include/uapi/linux/fuse.h, versions 7.31 to 7.45).

A message begins with a header, which names an operation, the request's number (`unique`) and the
node that it is about. It is answered by a header with the same number, an errno or 0, and a
structure. Numbers are in the machine's byte order, which is little-endian here as everywhere in
ffserve.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import struct

from ffserve.errors import ReadError

HEADER = struct.Struct("<IIQQIIIHH")
"""A request begins with its size, operation, number, node, uid, gid and thread, and two fields that
are not used here."""
_ANSWER = struct.Struct("<IiQ")
_ENTRY = struct.Struct("<4Q2I3Q")
_ATTRIBUTES_FOR = struct.Struct("<Q2I3Q")
_COMMON = struct.Struct("<3Q10I")
_DIRENT = struct.Struct("<2Q2I")
_STATFS = struct.Struct("<5Q10I")
_OPENED = struct.Struct("<Q2i")
_INIT = struct.Struct("<4I2H2I2H2IH22x")
_INIT_ASKED = struct.Struct("<5I")
READ = struct.Struct("<2QI")
"""A read has a handle, an offset and a size; the fields that follow are not used here."""

REQUEST_SIZE = 16 << 10
"""A request is read into a buffer of this size; the kernel demands at least 8 KiB."""
BLOCK_SIZE = 512
FOREVER_S = 1 << 30
"""The kernel may keep names, sizes and bytes for this time, because they never change."""
READ_SIZE = 1 << 20
"""The largest read has this size, which is the kernel's own limit (fs.fuse.max_pages_limit)."""
READ_AHEAD_SIZE = 1 << 20
READS_IN_BACKGROUND = 64

_MINOR_LEAST, _MINOR = 31, 41

_ASYNC_READ, _READDIRPLUS = 1 << 0, 1 << 13
_ASYNC_DIO, _NO_OPEN, _PARALLEL_DIROPS = 1 << 15, 1 << 17, 1 << 18
_MAX_PAGES, _NO_OPENDIR, _EXTENDED, _PASSTHROUGH = 1 << 22, 1 << 24, 1 << 30, 1 << 37
_WANTED = (
    _ASYNC_READ | _READDIRPLUS | _ASYNC_DIO | _NO_OPEN | _PARALLEL_DIROPS | _MAX_PAGES
    | _NO_OPENDIR | _EXTENDED
)  # fmt: skip
_KEEP_CACHE, _NO_FLUSH, _OPEN_PASSTHROUGH = 1 << 1, 1 << 5, 1 << 7
_STACK_DEPTH = 2
"""File systems may be stacked this deep: the view on an overlay on another one."""
_BACKING_OPEN = 0x4010E501
_BACKING = struct.Struct("<iIQ")


class Operation(enum.IntEnum):
    """The operations that a read-only file system answers, besides those of
    engine/memory/fuse.c."""

    LOOKUP = 1
    GETATTR = 3
    OPEN = 14
    READ = 15
    STATFS = 17
    RELEASE = 18
    FLUSH = 25
    INIT = 26
    READDIR = 28
    INTERRUPT = 36
    DESTROY = 38
    READDIRPLUS = 44


def answer(unique: int, payload: bytes | bytearray | memoryview = b"", error: int = 0) -> bytes:
    """Return the header of an answer. error: an errno, 0 for none."""
    return _ANSWER.pack(_ANSWER.size + len(payload), -error, unique)


def common(mode: int, uid: int, gid: int, mtime_ns: int) -> bytes:
    """Return the part of `attributes` and `entry` that many nodes have in common.

    Args: mode: with the type. mtime_ns: since 1970.
    """
    seconds, rest = divmod(mtime_ns, 1_000_000_000)
    # 1 link, also of directories: find(1) then does not count subdirectories by it.
    return _COMMON.pack(
        seconds, seconds, seconds, rest, rest, rest, mode, 1, uid, gid, 0, 4096, 0
    )  # fmt: skip


def attributes(node: int, size: int, common: bytes) -> bytes:
    """Return the answer to GETATTR. size: bytes of a file, 0 of a directory."""
    blocks = -(-size // BLOCK_SIZE)
    return _ATTRIBUTES_FOR.pack(FOREVER_S, 0, 0, node, size, blocks) + common


def entry(node: int, size: int, common: bytes) -> bytes:
    """Return the answer to LOOKUP. size: as for `attributes`."""
    blocks = -(-size // BLOCK_SIZE)
    return _ENTRY.pack(node, 0, FOREVER_S, FOREVER_S, 0, 0, node, size, blocks) + common


ENTRY_SIZE = _ENTRY.size + _COMMON.size
NO_ENTRY = _ENTRY.pack(0, 0, FOREVER_S, *[0] * 6) + bytes(_COMMON.size)
"""This answers a LOOKUP of a name that does not exist; the kernel remembers it."""
NO_NODE = bytes(ENTRY_SIZE)
"""This stands before an entry of READDIRPLUS; the kernel asks for the file when it is needed."""


def directory_entry(name: bytes, node: int, kind: int, offset: int) -> bytes:
    """Return one entry of READDIR; in READDIRPLUS each has that of LOOKUP before it.

    Args: kind: S_IFDIR or S_IFREG. offset: of the entry behind it.
    """
    return _DIRENT.pack(node, offset, len(name), kind >> 12) + name + bytes(-len(name) % 8)


def statfs(size: int, count: int) -> bytes:
    """Return the answer to STATFS: a full file system of this size in bytes, with so many files."""
    return _STATFS.pack(-(-size // 4096), 0, 0, count, 0, 4096, 255, 4096, *[0] * 7)


def opened(backing: int = 0) -> bytes:
    """Return the answer to OPEN. backing: the number from `open_backing`; 0 for files that are read
    by READ."""
    if backing:
        return _OPENED.pack(0, _OPEN_PASSTHROUGH | _NO_FLUSH, backing)
    return _OPENED.pack(0, _KEEP_CACHE | _NO_FLUSH, 0)


def greet(device: int, *, passthrough: bool) -> bool:
    """Answer the kernel's first message, INIT.

    Args: passthrough: take it if the kernel offers it.
    Returns: whether the kernel offers it.
    Raises: ReadError: the kernel is too old, or the file system was unmounted meanwhile.
    """
    try:
        request = os.read(device, REQUEST_SIZE)
    except OSError as error:
        raise ReadError(
            f"the view was unmounted before it was served: {error.strerror}", path="/dev/fuse"
        ) from error
    _, operation, unique, *_ = HEADER.unpack_from(request)
    assert operation == Operation.INIT
    major, minor, _, low, high = _INIT_ASKED.unpack_from(request, HEADER.size)
    if (major, minor) < (7, _MINOR_LEAST):
        os.write(device, answer(unique, error=errno.EPROTO))
        raise ReadError(
            f"the kernel has version {major}.{minor} of FUSE, and 7.{_MINOR_LEAST} is needed",
            path="/dev/fuse",
            hint="use Linux 5.4 or later",
        )
    offered = low | (high << 32 if low & _EXTENDED else 0)
    flags = offered & (_WANTED | (_PASSTHROUGH if passthrough else 0))
    payload = _INIT.pack(
        7, min(minor, _MINOR), READ_AHEAD_SIZE, flags & 0xFFFFFFFF,
        READS_IN_BACKGROUND, READS_IN_BACKGROUND * 3 // 4, 4096, 1,
        READ_SIZE >> 12, 0, flags >> 32, _STACK_DEPTH if flags & _PASSTHROUGH else 0, 0,
    )  # fmt: skip
    os.write(device, answer(unique, payload) + payload)
    return bool(offered & _PASSTHROUGH)


def open_backing(device: int, fd: int) -> int:
    """Let the kernel read a file of the view from an open file; return the number of that file.

    Raises: OSError: no permission (CAP_SYS_ADMIN), or a file system that does not do it.
    """
    number: int = fcntl.ioctl(device, _BACKING_OPEN, bytearray(_BACKING.pack(fd, 0, 0)))
    return number
