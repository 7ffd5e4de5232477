"""Second read: an extent whose checksum was wrong is read once more by other paths.

Bytes may be wrong in the page cache and right on the disk, or wrong on their way from the disk and
right in the page cache. So an extent is read through the page cache, then past it, until its
checksum is right. All of this waits for the disk: a thread's work, not an event loop's.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ffserve.engine.codec import checksum
from ffserve.engine.io import buffered, memory_at
from ffserve.errors import STATUS_CHECKSUM, STATUS_TRUNCATED, Failure

ALIGNMENT = 4096
"""Direct reads begin and end at multiples of it, whatever the device has."""
PIECE_SIZE = 4 << 20
"""This many bytes are read at once, since samples may be as large as the arena."""


@dataclass(frozen=True, slots=True)
class WrongRecord:
    """A record whose checksum was wrong.

    key: of the caller's. file: the engine's number. offset, length: in the file. slot, read_offset:
    of the read that brought it into a slot; slot is NOWHERE if there was none. dest: its address
    then. kind, expected, found: its checksum.
    """

    key: int
    file: int
    offset: int
    length: int
    slot: int
    read_offset: int
    dest: int
    kind: int
    expected: int
    found: int

    @classmethod
    def of(cls, key: int, read: Any, record: Any) -> WrongRecord:
        """Return a record of a batch that has ended, with the read that brought it."""
        return cls(
            key,
            int(read["file"]),
            int(record["offset"]),
            int(record["length"]),
            int(read["slot"]),
            int(read["offset"]),
            int(record["dest"]),
            int(read["checksum_kind"]),
            int(record["checksum"]),
            int(record["found"]),
        )

    def is_right(self, fd: int, address: int) -> bool:
        """Read the record a second time, to an address; return whether its checksum is right.

        Args: fd: of its file.
        """
        into = memory_at(address, self.length)
        status, _ = right_status(fd, self.kind, self.offset, self.length, self.expected, into)
        return not status

    @property
    def failure(self) -> Failure:
        """The failure of the record, if the second read finds it wrong as well."""
        return Failure(STATUS_CHECKSUM, self.found, self.expected)


def second_reads(fd: int, offset: int, length: int) -> Iterator[memoryview]:
    """Yield the bytes of an extent of an open file: through the page cache, then past it.

    What cannot be read so is left out.
    """
    for again in other_paths(fd):
        with contextlib.suppress(OSError, EOFError, MemoryError):
            yield whole(again, offset, length)


def whole(fd: int, offset: int, length: int) -> memoryview:
    """Return the bytes of an extent of an open file. Raises: as `read_extent`; MemoryError."""
    memory, done = np.empty(length, np.uint8).data, 0
    for piece in read_extent(fd, offset, length):
        memory[done : done + len(piece)] = piece
        done += len(piece)
    return memory


def right_status(
    fd: int, kind: int, offset: int, length: int, expected: int, into: memoryview | None = None
) -> tuple[int, int]:
    """Read an extent of an open file through the page cache, then past it, until it is right.

    Args: kind, expected: its checksum. into: gets its bytes, which may also be wrong ones.
    Returns: 0 if it is right, else as for `status_error`; the checksum that was found last.
    """
    status, found = STATUS_CHECKSUM, 0
    for again in other_paths(fd):
        try:
            found = extent_checksum(again, kind, offset, length, into)
        except EOFError:
            status = STATUS_TRUNCATED
        except OSError as error:
            status = -(error.errno or errno.EIO)
        except MemoryError:
            status = -errno.ENOMEM
        else:
            status = STATUS_CHECKSUM
            if found == expected:
                return 0, found
    return status, found


def extent_checksum(
    fd: int, kind: int, offset: int, length: int, into: memoryview | None = None
) -> int:
    """Return the checksum of an extent of an open file. Raises: OSError; EOFError: the file ends.

    Args: into: gets the bytes.
    """
    found = done = 0
    for piece in read_extent(fd, offset, length):
        found = checksum(kind, piece, found)
        if into is not None:
            into[done : done + len(piece)] = piece
        done += len(piece)
    return found


def read_extent(fd: int, offset: int, length: int) -> Iterator[memoryview]:
    """Yield the bytes of an extent of an open file, with O_DIRECT or without, in pieces that are
    valid until the next one. Raises: OSError; EOFError: the file ends within it."""
    end = offset + length
    begin = offset - offset % ALIGNMENT
    most = min(-(-(end - begin) // ALIGNMENT) * ALIGNMENT, PIECE_SIZE)
    memory = np.empty(most + ALIGNMENT, np.uint8)
    unused = -memory.ctypes.data % ALIGNMENT
    buffer = memory.data[unused : unused + most]
    while begin < end:
        size = min(most, -(-(end - begin) // ALIGNMENT) * ALIGNMENT)
        done = 0
        # Only the end of the file leaves an unaligned remainder.
        while done < size and done % ALIGNMENT == 0:
            got = os.preadv(fd, [buffer[done:size]], begin + done)
            if not got:
                break
            done += got
        if begin + done < min(end, begin + size):
            raise EOFError
        yield buffer[max(offset - begin, 0) : min(end - begin, size)]
        begin += size


def other_paths(fd: int) -> Iterator[int]:
    """Yield descriptors of an open file by which it is read through the page cache, then past it.

    The second one is the given one if this user may not open the file again.
    """
    with contextlib.suppress(OSError), buffered(fd) as plain:
        yield plain
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except PermissionError:
        yield fd
    except OSError:  # of a file system that has no direct reads
        return
    else:
        try:
            yield direct
        finally:
            os.close(direct)
