"""Anonymous shared memory that no crash leaves behind.

A memfd has no name: when the last process that maps it ends, it is gone (POSIX shared memory
stays when its owner is killed). The file gets mode 0600 and is handed out reopened read-only, so
that a client of another user can neither write through its descriptor nor open it for writing
again; SHRINK and GROW are sealed, so nobody can make a mapping fault. (F_SEAL_FUTURE_WRITE would
also lock out the daemon that adopts the memory after a restart.) memfd_create(2), Linux 4.11.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import ReadError

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_MAP_NORESERVE = 0x4000
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SharedMemory:
    """A sealed memfd and this process's writable mapping of it.

    Args:
        name: shows up in /proc/PID/maps; not a path.
        size: bytes, a multiple of the page size; memory is taken only when touched.
    """

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self.fd = -1
        try:
            self.fd = sealed_file(name, size)
            self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
            # A core file (the watchdog of systemd asks for one) would be as large as the arena,
            # hold everybody's samples and keep the next daemon waiting.
            self._map.madvise(mmap.MADV_DONTDUMP)
        except (OSError, ValueError) as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise ReadError(
                f"cannot set up {size} bytes of shared memory for {name}: {error}",
                hint="is an address-space limit (ulimit -v) in force?",
            ) from error
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address: int = self.array.ctypes.data
        self.view = memoryview(self._map).toreadonly()

    def reader_fd(self) -> int:
        """Open the memory anew, read-only. The caller closes the descriptor."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def populate(self, offset: int, size: int) -> None:
        """Take pages [offset, offset + size) now, as huge pages where the kernel agrees.

        The fault of a first touch would otherwise be paid inside a read. Linux 5.14 and 6.1;
        older kernels take the pages when they are touched.
        """
        _libc.madvise(self.address + offset, size, _MADV_POPULATE_WRITE)
        _libc.madvise(self.address + offset, size, _MADV_COLLAPSE)

    def discard(self, offset: int, size: int) -> None:
        """Give the whole pages inside [offset, offset + size) back; they read as zeros again."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end <= start:
            self.array[offset : offset + size] = 0
            return
        self.array[offset:start] = 0
        self.array[end : offset + size] = 0
        if _libc.madvise(self.address + start, end - start, _MADV_REMOVE):
            self.array[start:end] = 0

    def close(self) -> None:
        """Unmap and close. Arrays over the memory must be gone, else the mapping stays."""
        del self.array
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)


def sealed_file(name: str, size: int) -> int:
    """Return the descriptor of a new memfd of `size` bytes that nobody can resize.

    Raises: OSError.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def private_zeros(count: int, dtype: np.dtype[np.int32]) -> NDArray[np.int32]:
    """Return `count` zeros that take memory only where they are touched."""
    size = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype)[:count]


def is_sealed(fd: int) -> bool:
    """Return whether a descriptor's file can neither shrink nor grow under a mapping."""
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        return False
    return seals & _SEAL_SHRINK != 0 and seals & _SEAL_GROW != 0


def map_read_only(fd: int, offset: int, size: int) -> NDArray[np.uint8]:
    """Map [offset, offset + size) of a descriptor; the array keeps the mapping alive.

    Raises: ReadError when the mapping is refused.
    """
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    lead = offset - start
    try:
        mapping = mmap.mmap(fd, size + lead, prot=mmap.PROT_READ, offset=start)
        mapping.madvise(mmap.MADV_DONTDUMP)
    except (OSError, ValueError, OverflowError) as error:
        raise ReadError(
            f"cannot map {size} bytes of the daemon's memory: {error}",
            hint="is an address-space limit (ulimit -v) in force?",
        ) from error
    return np.frombuffer(mapping, np.uint8)[lead : lead + size]
