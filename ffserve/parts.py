"""Parts of samples: ranges of bytes, and samples as files.

The formats' checksums are of whole samples. So a part that is copied out of a sample in memory,
whose checksum was compared when it was read, is verified, and one that is read by itself is not.
"""

from __future__ import annotations

import io
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import UsageError

READ_SIZE = 256 << 10
"""A read of a sample's file that asks for less reads so many bytes: an origin takes about as long
for these as for one."""


class Part(np.ndarray[Any, np.dtype[np.uint8]]):
    """A part of a sample: uint8[size], writable. verified: whether its bytes are of a sample whose
    checksum was compared; False for arrays that are made of it."""

    verified = False

    @classmethod
    def of(cls, content: NDArray[np.uint8], *, verified: bool) -> Part:
        """Return an array as a part."""
        part = content.view(cls)
        part.verified = verified
        return part


class PartReader(Protocol):
    """What a `SampleFile` needs of a reader."""

    def sizes(self, indices: Any = None) -> NDArray[np.int64]:
        """Return lengths of samples in bytes."""
        ...

    def read_range(self, index: int, start: int, stop: int, *, verify: bool = False) -> Part:
        """Return a part of a sample."""
        ...


class SampleFile(io.RawIOBase):
    """A sample as a read-only file. It can be pickled; a copy begins where this one stands.

    verified: whether all bytes that were read so far are of samples whose checksum was compared.

    Args: verify: read the whole sample and compare it, at once. position: where to begin.
    """

    def __init__(
        self, reader: PartReader, index: int, *, verify: bool = False, position: int = 0
    ) -> None:
        self._reader = reader
        self._index = index
        self._verify = verify
        self._position = position
        self._size = int(reader.sizes([index])[0])
        self._start = 0
        self._part = reader.read_range(index, 0, self._size if verify else 0, verify=verify)
        """The bytes that were read last, from `_start` on."""
        self.verified = self._part.verified if verify else True

    def __reduce__(self) -> Any:
        return _opened, (self._reader, self._index, self._verify, self._position)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; return it. It may lie behind the end."""
        self._check()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise UsageError(f"whence is {whence}", hint="it is 0, 1 or 2")
        base = (0, self._position, self._size)[whence]
        if base + offset < 0:
            raise UsageError(f"position {base + offset} is before the beginning of the sample")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the sample goes; return the number of bytes."""
        self._check()
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._size)
        if self._position >= stop:
            return 0
        count, position = stop - self._position, self._position
        if not self._start <= position <= stop <= self._start + len(self._part):
            reach = max(stop, min(position + READ_SIZE, self._size))
            self._part = self._reader.read_range(self._index, position, reach)
            self._start = position
            self.verified = self.verified and self._part.verified
        begin = position - self._start
        view[:count] = self._part[begin : begin + count].data
        self._position = stop
        return count

    def readall(self) -> bytes:
        """Return the rest of the sample."""
        rest = bytearray(max(self._size - self._position, 0))
        self.readinto(rest)
        return bytes(rest)

    def _check(self) -> None:
        if self.closed:
            raise UsageError("this file is closed")


def _opened(reader: PartReader, index: int, verify: bool, position: int) -> SampleFile:
    return SampleFile(reader, index, verify=verify, position=position)
