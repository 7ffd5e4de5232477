"""Shared memory: sealed memfds and their mappings.

A memfd has no name: it is gone when the last process that maps it ends (POSIX shared memory stays
when its owner is killed). The file has mode 0600 and clients get a descriptor that was opened
read-only, so a client of another user can neither write through it nor reopen it for writing.
SHRINK and GROW are sealed, so no process can make a mapping fault. F_SEAL_FUTURE_WRITE is not set:
under it MADV_REMOVE, by which the daemon returns pages, fails with EPERM. memfd_create(2), Linux
4.11.

Huge pages of a file become huge pages of a mapping only where both begin at a multiple of their
size (thp_vma_suitable_order in the kernel's huge_mm.h); elsewhere each 4 KiB of them takes an entry
of the page table and of the TLB, and MADV_COLLAPSE refuses. The kernel maps a memfd at any address,
so mappings as large as a huge page are placed explicitly.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
import weakref

import numpy as np
from numpy.typing import NDArray

from ffserve.disk.files import os_hint
from ffserve.errors import ReadError

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_FLOCK = struct.Struct("hhqqi4x")
_MODE = 0o600

_MAP_FAILED = ctypes.c_void_p(-1).value

HUGE_PAGE = 2 << 20
"""The size of a huge page in bytes. Where the kernel's huge pages have another size, some mappings
are not aligned to them."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip


class _Mapping:
    """A shared mapping of [offset, offset + size) of a file, excluded from core dumps.

    It has numpy's array interface, and is unmapped when the last array over it is gone.

    Args:   offset: a multiple of the page size.
    Raises: OSError; ValueError when the file is shorter: an access beyond its end raises SIGBUS.
    """

    def __init__(self, fd: int, offset: int, size: int, *, writable: bool) -> None:
        held = os.fstat(fd).st_size
        if not 0 <= offset <= held - size:
            raise ValueError(f"the file has {held} bytes")
        length = size if size < HUGE_PAGE else size + HUGE_PAGE
        start = _map(None, length, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        # Not at exit: other finalizers may still use it.
        weakref.finalize(self, _libc.munmap, start, length).atexit = False
        address = start if length == size else start + (offset - start) % HUGE_PAGE
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        _map(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        # A core dump (systemd's watchdog requests one) would be as large as the arena, contain the
        # samples of all users and delay the next daemon.
        _libc.madvise(address, size, mmap.MADV_DONTDUMP)
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (size,), "data": (address, not writable),
        }  # fmt: skip


def _map(address: int | None, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped: int = _libc.mmap(address, size, protection, flags | _MAP_NORESERVE, fd, offset)
    if mapped == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return mapped


class MemoryFile:
    """A sealed memfd. Its pages are allocated when they are touched.

    Args:
        name: appears in /proc/PID/maps; not a path.
        size: bytes, a multiple of the page size.
    Raises: ReadError.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        try:
            self.fd = sealed_file(name, size)
        except OSError as error:
            raise _setup_error(name, size, error) from error

    @classmethod
    def adopted(cls, name: str, fd: int, size: int) -> MemoryFile:
        """Take over a descriptor from another process, which may be anything.

        Args: fd: becomes the object's.
        Raises: ReadError: it is not such a file, of this size and of this user alone; the
            descriptor is still the caller's then.
        """
        try:
            found, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError as error:
            raise ReadError(f"cannot take over the memory of {name}: {error.strerror}") from error
        fault = None
        if not is_sealed(fd) or not stat.S_ISREG(found.st_mode):
            fault = "it is no sealed memory file"
        elif found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != _MODE:
            fault = f"it belongs to user {found.st_uid}, with mode {stat.S_IMODE(found.st_mode):o}"
        elif found.st_size != size:
            fault = f"it has {found.st_size} bytes, not {size}"
        elif flags & os.O_ACCMODE != os.O_RDWR:
            fault = "its descriptor is not for reading and writing"
        if fault is not None:
            raise ReadError(f"cannot take over the memory of {name}: {fault}")
        file = cls.__new__(cls)
        file.name, file.size, file.fd = name, size, fd
        return file

    def reader_fd(self) -> int:
        """Open the file again, read-only. The caller closes the descriptor."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def punch(self, offset: int, size: int) -> None:
        """Free the pages [offset, offset + size), whoever maps them; they read as zeros then.
        fallocate(2): a mapping of this process is not needed.

        Args: offset, size: multiples of the page size.
        Raises: OSError.
        """
        punch(self.fd, offset, size)

    def close(self) -> None:
        """Close the descriptor. The memory stays while anybody maps it."""
        fd, self.fd = self.fd, -1
        os.close(fd)


class SharedMemory:
    """This process's writable mapping of a memory file, parts of which may show other files.

    Args: name, size: as of MemoryFile. file: that is mapped; None: a new one. Raises: ReadError;
        the file is closed then.
    """

    def __init__(self, name: str, size: int, file: MemoryFile | None = None) -> None:
        self.size = size
        self.file = MemoryFile(name, size) if file is None else file
        try:
            mapping = _Mapping(self.file.fd, 0, size, writable=True)
        except (OSError, ValueError) as error:
            self.file.close()
            raise _setup_error(name, size, error) from error
        self.array: NDArray[np.uint8] = np.asarray(mapping)
        self.address: int = self.array.ctypes.data
        self.view = self.array.data.toreadonly()

    def show(self, file: MemoryFile, offset: int, size: int) -> None:
        """Map [offset, offset + size) of another file of this size in the place of what is there.

        Args: offset, size: multiples of the page size.
        Raises: OSError; nothing has changed then. Each border between two files costs a mapping, of
            which a process may have vm.max_map_count.
        """
        address = self.address + offset
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _map(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, file.fd, offset)
        _libc.madvise(address, size, mmap.MADV_DONTDUMP)

    def populate(self, offset: int, size: int) -> None:
        """Allocate pages [offset, offset + size) now, as huge pages where possible.

        Otherwise the page faults happen during reads. Linux 5.14 and 6.1; older kernels allocate
        the pages when they are touched.
        """
        _libc.madvise(self.address + offset, size, _MADV_POPULATE_WRITE)
        _libc.madvise(self.address + offset, size, _MADV_COLLAPSE)

    def discard(self, offset: int, size: int) -> None:
        """Free the whole pages inside [offset, offset + size); the range reads as zeros again."""
        _discard(self.array, offset, size, _MADV_REMOVE)

    def close(self) -> None:
        """Close. The memory stays mapped until the last array over it is gone."""
        self.view.release()
        del self.array
        self.file.close()


def _setup_error(name: str, size: int, error: OSError | ValueError) -> ReadError:
    reason, hint = str(error), None
    if isinstance(error, OSError):
        reason, hint = error.strerror or reason, os_hint(error)
    return ReadError(f"cannot set up {size} bytes of shared memory for {name}: {reason}", hint=hint)


def sealed_file(name: str, size: int) -> int:
    """Return the descriptor of a new memfd of `size` bytes that cannot be resized.

    Raises: OSError.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, _MODE)
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


def discard_zeros(array: NDArray[np.int32], first: int, end: int) -> None:
    """Make items [first, end) of an array of `private_zeros` zeros, and free the whole pages that
    these take."""
    size = array.itemsize
    _discard(array.view(np.uint8), first * size, (end - first) * size, mmap.MADV_DONTNEED)


def _discard(memory: NDArray[np.uint8], offset: int, size: int, advice: int) -> None:
    """Make [offset, offset + size) of a mapping, which begins on a page, zeros. `advice` frees
    pages."""
    end = offset + size
    low = min(-(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, end)
    high = max(end // mmap.PAGESIZE * mmap.PAGESIZE, low)
    memory[offset:low] = 0
    memory[high:end] = 0
    if high > low and _libc.madvise(memory.ctypes.data + low, high - low, advice):
        memory[low:high] = 0


def is_sealed(fd: int) -> bool:
    """Return whether a descriptor's file can neither shrink nor grow under a mapping."""
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        return False
    return seals & _SEAL_SHRINK != 0 and seals & _SEAL_GROW != 0


def can_map(size: int) -> bool:
    """Return whether this process has address space for a mapping of so many bytes."""
    size += HUGE_PAGE
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _map(None, size, _PROT_NONE, flags, -1, 0)
    except OSError:
        return False
    _libc.munmap(start, size)
    return True


def map_read_only(fd: int, offset: int, size: int) -> NDArray[np.uint8]:
    """Map [offset, offset + size) of a descriptor; the array keeps the mapping alive.

    Raises: ReadError when the mapping is refused.
    """
    if size == 0:
        return np.zeros(0, np.uint8)
    lead = offset % mmap.PAGESIZE
    try:
        mapping = _Mapping(fd, offset - lead, size + lead, writable=False)
    except (OSError, ValueError) as error:
        raise ReadError(
            f"cannot map {size} bytes of the daemon's memory: {error}",
            hint="is an address-space limit (ulimit -v) in force?",
        ) from error
    mapped: NDArray[np.uint8] = np.asarray(mapping)
    return mapped[lead:]


def map_file(fd: int, size: int) -> NDArray[np.uint8]:
    """Map the first `size` bytes of a file for reading and writing; the array keeps the mapping
    alive. Python's `mmap` would keep a descriptor as well. Raises: OSError, ValueError."""
    mapped: NDArray[np.uint8] = np.asarray(_Mapping(fd, 0, size, writable=True))
    return mapped


# ---- locks on a byte of a file, which show who still uses it -------------------------------------


def punch(fd: int, offset: int, size: int) -> None:
    """Make a hole in a file: its bytes read as zeros and take no room. Raises: OSError."""
    if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def lock_byte(fd: int, number: int, *, held: bool) -> None:
    """Hold a shared lock on a byte of a file, which need not be there, or give it back.

    The kernel gives it back when all copies of this descriptor are closed.
    Raises: OSError.
    """
    kind = fcntl.F_RDLCK if held else fcntl.F_UNLCK
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))


def is_locked_below(fd: int, number: int) -> bool:
    """Return whether anybody has locked a byte below this one, through another opening of the file.

    Args: fd: open for writing.
    Raises: OSError.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, number, 0)
    answer: bytes = fcntl.fcntl(fd, _F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
