"""Opening files for reads past the page cache."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

from ffserve.engine.core import ffi, lib
from ffserve.errors import UsageError

_LARGEST = 128 << 10
"""FFS_ALIGNMENT_MAX of the C core."""


def _logical_block_size(device: int) -> int:
    """Of the block device a file lies on; 4096 where there is none or nobody says."""
    place = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in ("queue", "../queue"):  # a partition's queue is its disk's
        try:
            with open(f"{place}/{queue}/logical_block_size", encoding="ascii") as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return 4096


def _reads_aligned(fd: int, alignment: int) -> bool:
    """Whether one direct read at this alignment succeeds, at the start and further on."""
    with mmap.mmap(-1, max(alignment, mmap.PAGESIZE)) as page:
        try:
            with memoryview(page) as whole, whole[:alignment] as piece:
                os.preadv(fd, [piece], 0)
                os.preadv(fd, [piece], alignment)
        except OSError:
            return False
    return True


_proven: set[tuple[int, int]] = set()
"""Devices and alignments at which reading was tried."""


def direct_alignment(fd: int) -> int:
    """Alignment of reads from a descriptor that has O_DIRECT, or 1 if none works.

    Asks the kernel (statx, Linux 6.1), else the block device; then makes sure by reading.
    """
    out = ffi.new("uint32_t[2]")
    candidates = []
    told = lib.ffs_dio_alignment(fd, out, out + 1) == 0
    if told:
        if not out[1]:
            return 1
        candidates.append(int(max(out[0], out[1])))
    else:
        candidates.append(_logical_block_size(os.fstat(fd).st_dev))
    candidates += [size for size in (4096, 65536) if size > candidates[0]]
    candidates = [size for size in candidates if size <= _LARGEST]
    device = os.fstat(fd).st_dev
    for alignment in candidates:
        if told and (device, alignment) in _proven:
            return alignment
        if alignment & (alignment - 1) == 0 and _reads_aligned(fd, alignment):
            # What the kernel says of a file need not be tried for every file of the device.
            if told:
                _proven.add((device, alignment))
            return alignment
    return 1


def open_direct(path_or_fd: str | os.PathLike[str] | int) -> tuple[int, int]:
    """Open a regular file for reading past the page cache, or buffered where that does not work.

    Args:
        path_or_fd: a path, or a descriptor that is opened anew (its own flags stay as they are).
    Returns: (fd, alignment): the caller closes fd; alignment 1 means buffered.
    Raises: OSError as open() does; UsageError when it is not a regular file or a block device.
    """
    given = path_or_fd if isinstance(path_or_fd, int) else None
    path = os.fspath(path_or_fd) if not isinstance(path_or_fd, int) else f"/proc/self/fd/{given}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as refused:
        fd = _open_buffered(path, given, refused)
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise UsageError("not a regular file", path=os.fspath(path))
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return fd, 1
        alignment = direct_alignment(fd)
        if alignment == 1:
            buffered = _open_buffered(path, given, None)
            os.close(fd)
            fd = buffered
    except BaseException:
        os.close(fd)
        raise
    return fd, alignment


def _open_buffered(path: str, given: int | None, refused: OSError | None) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        # A descriptor that was handed to us may be of a file that we could not open ourselves.
        if given is None:
            raise
        return os.dup(given)
    except OSError as error:
        raise error from refused
