"""Deflate streams: one pass that finds the beginnings of blocks, and decoding from one of them on.

The Python face of records/inflate.h. Nothing here reads a file. The GIL is released during every
call.
"""

from __future__ import annotations

import errno
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bytes
from ffserve.engine.core import NULL, U8S, ffi, from_buffer, lib

WINDOW_SIZE = 32 << 10
"""Bytes of output to which a block may refer back."""
MARK_DTYPE = np.dtype([("bit", "<u8"), ("out", "<u8")])
"""The beginning of a block: its bit in the file, and its offset in the output."""
_MARK_UNIT = 256
"""Marks at different places of the output are at least so far apart."""


def library() -> str:
    """Return the library that decodes: "ISA-L" or "zlib"; "" if the core was built without."""
    return str(ffi.string(lib.ffs_inflate_library()).decode())


class BlockInflater:
    """A pass over a compressed file: a zlib stream, or any number of gzip members.

    Args: compression: "gzip" or "zlib".
    """

    MORE: int = lib.FFS_INFLATE_MORE
    BAD: int = lib.FFS_INFLATE_BAD
    REST: int = lib.FFS_INFLATE_REST

    def __init__(self, compression: str) -> None:
        self._c = ffi.new("ffs_inflater *")
        _check(lib.ffs_inflate_begin(self._c, compression == "gzip"))
        self._end = weakref.finalize(self, lib.ffs_inflate_end, self._c)
        # When the process ends, a thread may still be in `run`, which needs what this would free.
        self._end.atexit = False

    @property
    def used(self) -> int:
        """Bytes of the file that were used so far."""
        return int(self._c.used)

    @property
    def made(self) -> int:
        """Bytes of output so far."""
        return int(self._c.made)

    @property
    def whole(self) -> bool:
        """Whether the bytes so far end with the end of a stream."""
        return bool(self._c.whole)

    @property
    def message(self) -> str:
        """The fault of the stream, after BAD."""
        return str(ffi.string(self._c.message).decode())

    def run(self, data: memoryview, out: Bytes) -> tuple[int, NDArray[Any]]:
        """Continue with the file's bytes from `used` on.

        Returns: MORE, BAD or REST; and the marks that were found, rising in both fields.
        """
        marks = np.empty(len(out) // _MARK_UNIT + 2, MARK_DTYPE)
        self._c.marks = ffi.cast("ffs_block_mark *", marks.ctypes.data)
        self._c.room = len(marks)
        with from_buffer(U8S, data) as in_, from_buffer(U8S, out) as out_:
            why = lib.ffs_inflate_run(self._c, in_, len(in_), out_, len(out_))
        return _check(why), marks[: self._c.count]


def inflate_span(
    data: memoryview, bit: int, window: bytes, skip: int, out: Bytes, *, members: bool
) -> tuple[int, int, int]:
    """Decode from the beginning of a block on.

    Args:
        data: the file's bytes from the one on in which the block begins, at this bit of it.
        window: the up to WINDOW_SIZE bytes of output before the block.
        skip: bytes of output to drop. out: gets the output after that, exactly as much as it holds.
        members: gzip members may follow the one of the block.
    Returns: 0, or a negative errno if the output could not be completed (EBADMSG: the stream is
        damaged or has ended; ENODATA: the data end); bytes used, and bytes written to `out`.
    """
    span = ffi.new("ffs_span *")
    with (
        from_buffer(U8S, data) as data_,
        from_buffer(U8S, window) as window_,
        from_buffer(U8S, out) as out_,
    ):
        span.data, span.data_size, span.bit, span.gzip = data_, len(data_), bit, members
        span.window, span.window_size = window_ if len(window) else NULL, len(window)
        span.skip, span.out, span.out_size = skip, out_, len(out_)
        why = int(lib.ffs_inflate_span(span))
    if why == -errno.ENOMEM:
        raise MemoryError
    return why, int(span.used), int(span.made)


def _check(why: int) -> int:
    if why == -errno.ENOMEM:
        raise MemoryError
    assert why >= 0, "the core was built without zlib"
    return int(why)
