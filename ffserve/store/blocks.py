"""One remote object on the local disk: a sparse file, and the state of each of its blocks.

``data`` has the bytes of the object at their own offsets, so an engine reads it as any other file.
``state`` is mapped by all processes that use the object:

    0     8 bytes   "ffstore\\n"
    8     u32       version, 1
    12    u32       bytes of a block
    16    u64       bytes of the object
    24    u32       CRC-32C of bytes 0 to 24, of the identity's length and of the identity
    28    u32       bytes of the identity
    32    36 bytes  boot ID under which the words below were written
    68    identity  text of `ObjectVersion.key`, URL without secrets; up to 4096
    4096  u32[n]    words: ABSENT, RESERVED, PRESENT or UNCHECKED
          u32[n]    CRC-32C of each block that is there
          u32[n]    when a job will use it next, in seconds since 1970; 0: unknown

A block is written, its checksum is stored, and only then its word becomes PRESENT: a killed process
leaves a block ABSENT or RESERVED, never wrong. Nothing is synced, so the content of the disk
after a power failure is unknown. Words of another boot therefore become UNCHECKED, and such a block
is compared with its checksum before its first use.

The kernel's locks on bytes of ``state`` (of open file descriptions, so they end with the process)
say what processes do: CLAIMS + block: is fetching it; PINS + block: is reading it, nobody may evict
it; OPEN: has the object open. A process has one description of an object that it has open, and
opens another one to evict, which sees the locks of all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Int64s
from ffserve.engine.codec import CRC_32C, checksums, crc32c
from ffserve.errors import ServerUnavailable
from ffserve.system.memfd import map_file, punch

ABSENT, RESERVED, PRESENT, UNCHECKED = range(4)
"""The states of a block. A RESERVED block counts in the size of the store, but is not written
yet."""

CLAIMS, PINS, OPEN = 0, 1 << 40, 1 << 41
"""The first byte of each kind of locks."""
PAGE = 4096
_WRITE_SIZE = 128 << 10
"""Bytes of one write at most. The page cache takes memory in as large pieces as a write is long.
For larger ones the kernel moves other pages, which took up to eight times as long as the write."""
HEAD_SIZE = 4096
_HEAD = struct.Struct("<8sIIQII36s")
_MAGIC, _VERSION = b"ffstore\n", 1
_FLOCK = struct.Struct("hhqqi4x")
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)


@functools.cache
def boot_id() -> bytes:
    """Return the boot ID, which changes with each start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:36]


def lock(fd: int, kind: int, first: int, count: int = 1, *, wait: bool = False) -> bool:
    """Take or give back (`fcntl.F_UNLCK`) a lock on bytes; return False if others hold it."""
    asked = _FLOCK.pack(kind, os.SEEK_SET, first, count, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, asked)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(fd: int, place: int) -> bool:
    """Return whether a byte is locked through another opening of the file."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    answer: bytes = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def runs(blocks: Int64s) -> list[list[int]]:
    """Return first and count of each run of consecutive numbers; `blocks` rise."""
    found: list[list[int]] = []
    for block in blocks.tolist():  # NumPy needs ten times as long for a few
        if found and block == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([block, 1])
    return found


def whole_pages(size: int) -> int:
    """Return the bytes that a file of this size takes on disk."""
    return -(-size // PAGE) * PAGE


def block_count(size: int, block_size: int) -> int:
    """Return the number of blocks of an object."""
    return -(-size // block_size)


def state_size(size: int, block_size: int) -> int:
    """Return the bytes of an object's state file."""
    return HEAD_SIZE + 12 * block_count(size, block_size)


def write_at(fd: int, content: bytes | memoryview, at: int) -> None:
    """Write all of some bytes at an offset. Raises: OSError."""
    view = memoryview(content)
    while view:
        done = os.pwrite(fd, view[:_WRITE_SIZE], at)
        at, view = at + done, view[done:]


def copy_range(source: int, to: int, start: int, end: int) -> bool:
    """Copy bytes of a file to the same offset of another file within the kernel.

    Btrfs and XFS share the bytes until one of the files is changed (copy_file_range(2), Linux 4.5).

    Returns: False if the kernel cannot copy between these files, or the source ends before `end`.
    Raises: OSError.
    """
    while start < end:
        try:
            done = os.copy_file_range(source, to, end - start, start, start)
        except AttributeError:  # a Python for an old C library
            return False
        except OSError as error:
            if error.errno in _NO_COPY:
                return False
            raise
        if not done:
            return False
        start += done
    return True


def create(directory: str, text: str, size: int, block_size: int) -> None:
    """Make the files of an object without blocks. Raises: OSError."""
    os.mkdir(directory, 0o700)
    identity = text.encode("utf-8", "surrogateescape")[: HEAD_SIZE - _HEAD.size]
    packed = _head(identity, size, block_size)
    for name in ("data", "state"):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(f"{directory}/{name}", flags, 0o600)
        try:
            if name == "data":
                os.ftruncate(fd, size)
            else:  # it is written by its mapping, where a full disk is a SIGBUS
                os.pwrite(fd, packed + identity, 0)
                os.posix_fallocate(fd, 0, state_size(size, block_size))
        finally:
            os.close(fd)


def _head(identity: bytes, size: int, block_size: int) -> bytes:
    begin = struct.pack("<8sIIQ", _MAGIC, _VERSION, block_size, size)
    crc = crc32c(begin + struct.pack("<I", len(identity)) + identity)
    return begin + struct.pack("<II36s", crc, len(identity), boot_id())


class BlockState:
    """The mapped state of an object: which blocks are there, and which are locked.

    Args: directory: of the object.
    Raises: OSError; ValueError if the files are not what `create` made.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._path = f"{directory}/state"
        self.fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOATIME)
        """For locks."""
        self._is_opened = False
        try:
            self._map()
        except BaseException:
            os.close(self.fd)
            raise

    def _map(self) -> None:
        head = os.pread(self.fd, HEAD_SIZE, 0)
        if len(head) < HEAD_SIZE:
            raise ValueError("the state file is too short")
        magic, version, block_size, size, crc, length, boot = _HEAD.unpack_from(head)
        identity = head[_HEAD.size : _HEAD.size + length]
        found = crc32c(head[:24] + struct.pack("<I", length) + identity)
        if (magic, version) != (_MAGIC, _VERSION) or crc != found or block_size % PAGE:
            raise ValueError("the state file is damaged, or of another version")
        if not block_size or os.fstat(self.fd).st_size != state_size(size, block_size):
            raise ValueError("the length of the state file differs from the length in its header")
        self.identity = identity.decode("utf-8", "surrogateescape")
        self.size, self.block_size, self.boot = size, block_size, boot
        self.count = block_count(size, block_size)
        # A mapping keeps a description, and with it the locks, for as long as an array is over it.
        other = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NOATIME)
        try:
            self._mapping = map_file(other, state_size(size, block_size))
        finally:
            os.close(other)
        tables = self._mapping[HEAD_SIZE:].view(np.uint32)
        self.words, self.checksums, self.uses = tables.reshape(3, self.count)

    def uncheck(self) -> None:
        """Mark all blocks that were written before this start of the machine as unchecked. No other
        process may have the object open."""
        self.words[self.words == PRESENT] = UNCHECKED
        self.boot = boot_id()
        self._mapping[32:68] = np.frombuffer(self.boot.ljust(36, b"\0"), np.uint8)

    def held(self, first: int, count: int = 1) -> int:
        """Return the bytes that blocks take on disk, from `first` on."""
        return whole_pages(self.end(first + count - 1) - first * self.block_size)

    def end(self, block: int) -> int:
        """Return the offset behind a block."""
        return int(min((block + 1) * self.block_size, self.size))

    @property
    def held_size(self) -> int:
        """Bytes of all blocks that are there or reserved."""
        kept = np.flatnonzero(self.words != ABSENT)
        total = len(kept) * whole_pages(self.block_size)
        if len(kept) and kept[-1] == self.count - 1:
            total += self.held(self.count - 1) - whole_pages(self.block_size)
        return int(total)

    @property
    def is_there(self) -> bool:
        """Whether these are still the object's files: it may have been removed, and made anew."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self.fd))
        except OSError:
            return False

    @property
    def is_open(self) -> bool:
        """Whether any process has the object open."""
        return self._is_opened or is_locked(self.fd, OPEN)

    def note_open(self) -> None:
        """Note that this process has the object open, until `close`. Raises: OSError."""
        lock(self.fd, fcntl.F_RDLCK, OPEN)
        self._is_opened = True
        now = time.time()
        os.utime(self.fd, (now, now))

    @property
    def used_at(self) -> float:
        """The time of the last opening of the object."""
        return os.fstat(self.fd).st_atime

    def evict(self, block: int, moved: NDArray[np.uint64]) -> bool:
        """Give a block's bytes back to the file system, unless a process reads or fetches it.

        Args: moved: counts evicted blocks.
        Raises: OSError.
        """
        # An opening does not see its own locks.
        with open(self._path, "rb+", buffering=0) as other:
            if not lock(other.fileno(), fcntl.F_WRLCK, PINS + block):
                return False
            if self.words[block] == RESERVED and is_locked(other.fileno(), CLAIMS + block):
                return False
            with open(f"{self.directory}/data", "rb+", buffering=0) as data:
                self.words[block] = ABSENT
                moved += np.uint64(1)
                punch(data.fileno(), block * self.block_size, self.held(block))
        return True

    def close(self) -> None:
        """Close the file; the mapping stays as long as an array over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd, self._is_opened = -1, False


class StoredObject:
    """An object that this process has open. Threads may call it; made by `Store.open`.

    Args: state: closed with the object.
    """

    def __init__(self, state: BlockState) -> None:
        self.state = state
        self.count, self.block_size, self.size = state.count, state.block_size, state.size
        self.users = 0
        self.sent_alike: dict[int, int] = {}
        """The checksums of blocks with damaged records that the origin has sent twice alike."""
        self._lock = threading.Lock()
        self._pins = np.zeros(state.count, np.int32)
        self.data_fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        """Of the sparse file."""
        try:
            if os.fstat(self.data_fd).st_size != state.size:
                raise ValueError("the length of the data file differs from that of the object")
            state.note_open()
        except BaseException:
            os.close(self.data_fd)
            raise

    @property
    def path(self) -> str:
        """Of the sparse file."""
        return f"{self.state.directory}/data"

    def open_data(self) -> int:
        """Return a descriptor of the sparse file for reading; the caller's."""
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def missing(self, blocks: Int64s) -> Int64s:
        """Return which of these blocks are not there."""
        missing: Int64s = blocks[self.state.words[blocks] != PRESENT]
        return missing

    @property
    def complete(self) -> bool:
        """Whether all blocks are there."""
        return bool((self.state.words == PRESENT).all())

    # ---- pins and claims ------------------------------------------------------------------

    @property
    def pinned(self) -> NDArray[np.bool_]:
        """Whether this process pins each block."""
        pinned: NDArray[np.bool_] = self._pins != 0
        return pinned

    def pin(self, blocks: Int64s) -> None:
        """Keep blocks, those that are there and those that come; `blocks` rise.

        Raises: OSError: the kernel has no room for locks; then none is pinned.
        """
        with self._lock:
            self._check_open()
            new = blocks[self._pins[blocks] == 0]
            try:
                for first, count in runs(new):
                    lock(self.state.fd, fcntl.F_RDLCK, PINS + first, count, wait=True)
            except OSError:
                with contextlib.suppress(OSError):
                    for first, count in runs(new):
                        lock(self.state.fd, fcntl.F_UNLCK, PINS + first, count)
                raise
            self._pins[blocks] += 1

    def unpin(self, blocks: Int64s) -> None:
        """Take back one `pin`."""
        with self._lock:
            if self.state.fd < 0:
                return
            self._pins[blocks] -= 1
            for first, count in runs(blocks[self._pins[blocks] == 0]):
                lock(self.state.fd, fcntl.F_UNLCK, PINS + first, count)

    def claim(self, first: int, count: int = 1) -> bool:
        """Claim neighbouring blocks, so that only this process fetches them; return False, without
        any, if another process has claimed one."""
        self._check_open()
        return lock(self.state.fd, fcntl.F_WRLCK, CLAIMS + first, count)

    def unclaim(self, first: int, count: int = 1) -> None:
        """Let others fetch the blocks."""
        if self.state.fd >= 0:
            lock(self.state.fd, fcntl.F_UNLCK, CLAIMS + first, count)

    def _check_open(self) -> None:
        if self.state.fd < 0:
            raise ServerUnavailable(
                "cannot read the file: the reader was closed, or now reads from another source"
            )

    # ---- bytes ----------------------------------------------------------------------------

    def publish(self, first: int, content: bytes | memoryview) -> None:
        """Write neighbouring blocks that are claimed and reserved. Raises: OSError."""
        write_at(self.data_fd, content, first * self.block_size)
        begins = np.arange(0, len(content), self.block_size, dtype=np.uint64)
        sizes = np.minimum(np.uint64(len(content)) - begins, np.uint64(self.block_size))
        blocks = slice(first, first + len(begins))
        self.state.checksums[blocks] = checksums(CRC_32C, content, begins, sizes)
        self.state.words[blocks] = PRESENT

    def discard(self, block: int) -> None:
        """Give a block's bytes back to the file system. Raises: OSError."""
        punch(self.data_fd, block * self.block_size, self.state.held(block))

    def agrees(self, block: int) -> bool:
        """Read a block; return whether it has the checksum with which it was written."""
        try:
            content = self.read(block * self.block_size, self.state.end(block))
        except OSError:
            return False
        whole = len(content) == self.state.end(block) - block * self.block_size
        return whole and crc32c(content) == int(self.state.checksums[block])

    def trust(self, block: int) -> None:
        """A claimed block of an earlier start of the machine agrees with its checksum."""
        self.state.words[block] = PRESENT

    def read(self, start: int, end: int) -> bytes:
        """Return bytes of blocks that are there, and pinned. Raises: OSError."""
        parts = []
        while start < end:
            part = os.pread(self.data_fd, end - start, start)
            if not part:
                break
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def copy_to(self, fd: int, start: int, end: int) -> bool:
        """Copy bytes of blocks that are present and pinned; see `copy_range`."""
        return copy_range(self.data_fd, fd, start, end)

    def read_index(self, name: str) -> bytes:
        """Return what `Store.keep_index` kept; b"" if there is nothing."""
        try:
            return Path(self.state.directory, name).read_bytes()
        except OSError:
            return b""

    def close(self) -> None:
        """Give up pins, claims and files. A child process gives up only its copies."""
        self.state.close()
        fd, self.data_fd = self.data_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


@contextlib.contextmanager
def holding_heads(objects: Sequence[StoredObject], size: int) -> Iterator[list[bool]]:
    """Keep the first `size` bytes of objects; yield of which they are there, and in one block."""
    first, held = np.zeros(1, np.int64), list[StoredObject]()
    try:
        for each in objects:
            if each.count == 1 or (each.count and each.block_size >= size):
                each.pin(first)
                held.append(each)
        pinned = set(held)
        yield [each in pinned and each.state.words[0] == PRESENT for each in objects]
    finally:
        for each in held:
            each.unpin(first)
