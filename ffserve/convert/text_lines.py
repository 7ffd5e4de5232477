"""Text files as an input of ``convert``: each line is a record, without its end.

A line ends with a line feed, or with the file; a carriage return before it belongs to the end. An
empty line is an empty record, so that record k is line k + 1. Files ending in .gz are decompressed.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from functools import cached_property
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from ffserve import Batch
from ffserve.convert.locations import opened
from ffserve.disk.files import os_error
from ffserve.errors import FormatError

_ENDINGS = (".txt", ".jsonl", ".ndjson")
SUFFIXES = (*_ENDINGS, *(f"{ending}.gz" for ending in _ENDINGS))
_PIECE_SIZE = 1 << 20
_FEED, _RETURN = b"\n\r"


class TextLines:
    """The lines of a text file."""

    named = False
    sized = False

    def __init__(self, path: str) -> None:
        self.files = (path,)

    @cached_property
    def count(self) -> int:
        """Number of lines; reads the file."""
        return sum(len(batch) for batch in self.records(0, None))

    def records(self, first: int, stop: int | None) -> Iterator[Batch]:
        """Yield the lines [first:stop]; skips the ones before."""
        passed = 0
        for piece in self._pieces():
            ends = np.flatnonzero(piece == _FEED)
            low = max(first - passed, 0)
            high = len(ends) if stop is None else min(stop - passed, len(ends))
            if low < high:
                begin = 0 if low == 0 else int(ends[low - 1]) + 1
                yield _lines(piece[begin : ends[high - 1] + 1], ends[low:high] - begin)
            passed += len(ends)
            if stop is not None and passed >= stop:
                return

    def _pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the file in pieces of whole lines, each with a line feed at its end."""
        [path] = self.files
        rest: list[bytes] = []
        try:
            with opened(path) as plain, _plain(plain, path) as file:
                for block in itertools.takewhile(bool, iter(lambda: file.read(_PIECE_SIZE), None)):
                    whole, feed, begun = block.rpartition(b"\n")
                    if feed:
                        yield np.frombuffer(b"".join([*rest, whole, feed]), np.uint8)
                        rest.clear()
                    rest.append(begun)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FormatError(
                f"the compressed text is damaged: {error}", path=path, hint="restore it from a copy"
            ) from error
        except OSError as error:
            raise os_error(error, path) from error
        if any(rest):
            yield np.frombuffer(b"".join([*rest, b"\n"]), np.uint8)


def _plain(file: IO[bytes], path: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.lower().endswith(".gz") else file


def _lines(text: NDArray[np.uint8], ends: NDArray[np.int64]) -> Batch:
    """Return the lines of a text, which end at these line feeds, without their ends."""
    begins = np.concatenate([[0], ends[:-1] + 1])
    returns = (ends > begins) & (text[ends - 1] == _RETURN)
    kept = np.ones(len(text), np.bool_)
    kept[ends] = False
    kept[ends[returns] - 1] = False
    dropped = np.concatenate([[0], np.cumsum(1 + returns)])
    return Batch(text[kept], np.concatenate([[0], ends + 1]) - dropped)
