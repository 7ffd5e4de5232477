"""What a file format must be able to do, and nothing about how files are reached.

A format turns bytes into *shards* (tables of payload offset, length and checksum) and samples
into bytes. It never opens a file: reading goes through a ``ReadAt`` that the caller supplies,
writing through an ``Encoder`` whose pieces the caller puts into the file. So the same code runs
in the daemon, in a client without one, over a simulated disk, and over a file of 2^28 samples
that exists only as a function.

Adding a format: one module here with a module-level ``FORMAT``, and its name in the registry
(``__init__.py``). Where records stand in the file as they are, a ``Shard`` is all that is needed;
where they lie in chunks that must be decoded, a ``ChunkedShard``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import TruncatedError, UsageError

CHECKSUM_NONE = 0
CHECKSUM_CRC32 = 1
"""zlib's CRC-32."""
CHECKSUM_CRC32C = 2
"""Castagnoli; the three numbers are those of ``engine/codec.h``."""

GZIP_MAGIC, ZLIB_MAGIC = b"\x1f\x8b\x08", b"\x78"
"""How files begin that are compressed as a whole; others do as well."""
HEAD_SIZE = 4096
"""How much of a file's beginning ``detect`` wants to see; less is allowed."""

UNKNOWN_LENGTH = (1 << 48) - 1
"""Length of a record that stands inside a chunk and can be told only when that is decoded."""

PIECE_SIZE = 4 << 20
"""No format asks for more than this in one read."""


class ReadAt(Protocol):
    """Read bytes at a place in a file."""

    def __call__(self, offset: int, into: memoryview, /) -> int:
        """Fill ``into`` from ``offset``; return how many bytes, fewer only at the file's end."""
        ...


class Shard(Protocol):
    """One opened file: what its header says, and the way to get its tables."""

    format: str
    """Name of the format."""
    path: str
    size: int
    """Of the file, in bytes, when it was opened."""
    count: int
    """Samples."""
    checksum_kind: int
    """0 none, 1 CRC-32, 2 CRC-32C."""
    fingerprint: int
    """u64 of the content's identity: the same file has the same one on every machine."""

    def load(
        self,
        offsets: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        checksums: NDArray[np.uint32],
    ) -> None:
        """Fill the caller's arrays, ``count`` entries each.

        Offsets and lengths are those of the payloads in the file. They are checked for order but
        may reach behind the end of a file that was cut: a sample that is not empty and has
        ``offset + length > size`` lacks bytes. Whoever allocates by ``lengths`` looks at that
        first, for those lengths are bounded by nothing.
        """
        ...


@dataclass(slots=True)
class Chunks:
    """Where the chunks of a shard lie and what they hold.

    firsts: int64[n + 1], number of each chunk's first record, and the count of all. begins, ends:
    int64[n], their extents in the file, headers included. sizes: int64[n], bytes that each has
    when it is decoded, as its headers tell; ``decode`` makes sure.
    """

    firsts: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begins)

    def holding(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the chunk that holds each record."""
        return np.searchsorted(self.firsts, records, side="right") - 1


@runtime_checkable
class ChunkedShard(Shard, Protocol):
    """A shard whose records lie in chunks, each read and decoded as a whole.

    ``load`` gives each record its chunk's offset in the file, its chunk's checksum, and
    UNKNOWN_LENGTH.
    """

    chunks: Chunks

    def about(self) -> dict[str, str | int]:
        """Return what people may want to know of the chunks, by names of `inspect --json`."""
        ...

    def limit(self, size: int) -> None:
        """Refuse chunks that are larger than ``size`` bytes, in the file or decoded.

        Their records cannot be read from then on: ``chunks.sizes`` becomes 0 for them, and
        ``decode`` raises.
        """
        ...

    def decode(
        self, chunk: int, extent: memoryview, into: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Verify and decode one chunk.

        Args:
            chunk: its number.
            extent: the bytes of the file from its begin to its end.
            into: ``chunks.sizes[chunk]`` bytes, overwritten; no more memory than that is taken.
        Returns: (starts, lengths) of its records in ``into``, int64 each, as many as
            ``chunks.firsts`` says.
        Raises:  FormatError, ChecksumError, TruncatedError, ReadError, with file, byte and chunk.
        """
        ...


class Encoder(Protocol):
    """Turns samples into the bytes of a file: a head, the records, a tail.

    The owner of the file calls ``encode`` for every sample and appends what it returns, appends
    ``tail()`` at the end, and then puts ``head()`` in front, which takes exactly
    ``head_size(count)`` bytes. A format whose head does not depend on the number of samples
    returns the same size for every count.
    """

    def head_size(self, count: int) -> int:
        """Bytes that stand in front of the first record when there are ``count`` samples."""
        ...

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Take one sample (C-contiguous bytes); return what to append now, maybe nothing.

        Pieces may refer to ``payload`` and are valid until the next call. An error leaves the
        encoder as it was.
        """
        ...

    def tail(self) -> Iterable[bytes | memoryview]:
        """Return what follows the last record; called once, after the last ``encode``."""
        ...

    def head(self) -> Iterator[bytes | memoryview]:
        """Yield the head in bounded pieces; called once, after ``tail``."""
        ...


@runtime_checkable
class GrowingEncoder(Encoder, Protocol):
    """An encoder that takes one sample in several pieces, so that none need be in memory whole."""

    def extend(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Add more bytes to the sample that was encoded last."""
        ...


@runtime_checkable
class BatchEncoder(Encoder, Protocol):
    """An encoder that takes many samples at once, which is quicker for small ones."""

    def encode_batch(
        self, payloads: NDArray[np.uint8], edges: NDArray[np.int64]
    ) -> Iterable[bytes | memoryview]:
        """Take samples that lie back to back; return what ``encode`` would for each in turn.

        Args:    payloads: uint8, contiguous. edges: int64[n + 1], rising from 0 to its length.
        """
        ...


class Format(Protocol):
    """One file format."""

    name: str
    suffixes: tuple[str, ...]
    """Such as ``(".ffr",)``, lower case."""

    def sniff(self, head: bytes, size: int) -> bool | None:
        """Say whether a file of ``size`` bytes beginning with ``head`` is one of ours.

        True: for certain. False: certainly not, or not an intact one. None: cannot tell.
        """
        ...

    def open(
        self,
        read_at: ReadAt,
        size: int,
        path: str,
        *,
        verify: bool = True,
        tolerant: bool = False,
    ) -> Shard:
        """Read and check a file's metadata.

        Args:
            read_at: the file.
            size: its size in bytes.
            path: for errors.
            verify: False leaves out checksums only.
            tolerant: open a file also where it is damaged between its records. Each place that
                had to be left out is a record of the shard that cannot be read and whose error
                says where it is, so that whoever reads all learns of every one.
        Raises:  FormatError, or what is below it, for a file that cannot be used.
        """
        ...

    def writer(
        self,
        *,
        n: int | None = None,
        compression: str | None = None,
        dialect: str | None = None,
        max_chunk_size: int | None = None,
    ) -> Encoder:
        """Return an encoder; an option that the format lacks is a UsageError."""
        ...


@runtime_checkable
class ScannedShard(Shard, Protocol):
    """A shard whose records follow from their lengths alone."""

    lengths: NDArray[np.uint64]
    """Of the payloads."""
    checksums: NDArray[np.uint32]
    sound: bool
    """Whether nothing was left out on the walk."""


@runtime_checkable
class ScannedFormat(Format, Protocol):
    """A format without tables, so that opening a file means a walk over the whole of it.

    What the walk found is kept in an index file (``ffserve/index_file.py``).
    """

    def open(
        self,
        read_at: ReadAt,
        size: int,
        path: str,
        *,
        verify: bool = True,
        tolerant: bool = False,
    ) -> ScannedShard:
        """Walk over a file."""
        ...

    def restore(
        self, lengths: NDArray[np.uint64], checksums: NDArray[np.uint32], size: int, path: str
    ) -> ScannedShard | None:
        """Return the shard that an earlier walk found; None when such records do not fill it."""
        ...


def refuse_options(format_name: str, options: Mapping[str, object]) -> None:
    """Raise UsageError for the first option that was given (is not None)."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                f"{format_name} has no option {name}={value!r}", hint=f"leave {name} out"
            )


def read_exactly(read_at: ReadAt, offset: int, into: memoryview, path: str) -> None:
    """Fill ``into`` or raise TruncatedError saying where the file ended.

    Args:
        read_at: the file.
        offset: where to begin.
        into: what to fill; reads are split so that none exceeds ``PIECE_SIZE``.
        path: for the error.
    """
    done = 0
    while done < len(into):
        got = read_at(offset + done, into[done : done + PIECE_SIZE])
        if got <= 0:
            raise TruncatedError(
                f"the file ended, {len(into) - done} bytes were still expected",
                path=path,
                offset=offset + done,
                hint="it was shortened while open, or a copy of it was interrupted",
            )
        done += got
