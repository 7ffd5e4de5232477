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

READ_SIZE, MOST_SIZE = 512 << 10, 1 << 20
"""A read of a sample's file that asks for less reads so many bytes: an origin that is 20 ms away at
50 MB/s takes 30 ms for the first number and 40 ms for the second. A read that continues others
reads as many as they did together, up to the second number; and a read that is so near the end of
the sample, where many files have their index, reads up to the end."""
PLACES = 3
"""A sample's file keeps what it read last at so many places. A video is read at its beginning, in
its index, which may be at its end, and then at one place or, if its streams are apart, two."""


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
        part = reader.read_range(index, 0, self._size if verify else 0, verify=verify)
        self._pieces = [(0, part, 0)]
        """What was read last at each place: where it begins, the bytes, and how many were read
        there in all. The place that was used last comes first."""
        self.verified = part.verified if verify else True

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
        first, position = self._position, self._position
        while position < stop:
            start, part = self._piece(position, stop)
            end = min(start + len(part), stop)
            view[position - first : end - first] = part[position - start : end - start].data
            position = end
        self._position = stop
        return stop - first

    def _piece(self, position: int, stop: int) -> tuple[int, Part]:
        """Return where a piece begins that contains a position, and its bytes: one that is kept, or
        a new one, from the position up to `stop` at least."""
        before = 0
        for k, (start, part, total) in enumerate(self._pieces):
            if start <= position <= start + len(part):
                kept = self._pieces.pop(k)
                if position < start + len(part):
                    self._pieces.insert(0, kept)
                    return start, part
                before = total
                break
        left = self._size - position
        size = left if left <= MOST_SIZE else min(max(READ_SIZE, before), MOST_SIZE)
        part = self._reader.read_range(self._index, position, max(stop, position + size))
        self.verified = self.verified and part.verified
        if len(part) <= MOST_SIZE:
            self._pieces = [(position, part, before + len(part)), *self._pieces[: PLACES - 1]]
        return position, part

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
