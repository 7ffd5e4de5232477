"""Protocol classes of file formats.

A format turns bytes into shards (tables of payload offset, length and checksum) and samples into
bytes. It never opens a file: it reads through a ``ReadAt`` from the caller, and the caller writes
the pieces that an ``Encoder`` returns. So the same code runs in the daemon, in a client without
one, over a simulated disk, and over a file of 2^28 samples that exists only as a function.

To add a format, write a module in this package with a module-level ``FORMAT``, and add its name to
the registry (``__init__.py``). A ``Shard`` suffices if records are stored as they are; a format
whose records are in encoded chunks has a ``ChunkedShard``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bools, Bytes, Int64s, UInt32s, UInt64s
from ffserve.errors import TruncatedError, UsageError

if TYPE_CHECKING:  # it loads the C core, which commands that install units do without
    from ffserve.formats.members import Members

CHECKSUM_NONE = 0
CHECKSUM_CRC32 = 1
"""zlib's CRC-32."""
CHECKSUM_CRC32C = 2
"""Castagnoli; the three numbers are those of ``engine/records/codec.h``."""

GZIP_MAGIC, ZLIB_MAGIC = b"\x1f\x8b\x08", b"\x78"
"""First bytes of files that are compressed as a whole; other files may begin alike."""
HEAD_SIZE = 4096
"""Bytes at the beginning of a file that ``detect`` takes; fewer are allowed."""

UNKNOWN_LENGTH = (1 << 48) - 1
"""Length of a record that is unknown until its chunk is decoded."""

RECORD_TABLE_SIZE = 20
"""A shard that keeps the tables of its records besides those of `Shard.load` keeps this many bytes
for each."""

PIECE_SIZE = 4 << 20
"""Largest read that a format requests."""


class ReadAt(Protocol):
    """Read bytes at an offset of a file."""

    def __call__(self, offset: int, into: memoryview, /) -> int:
        """Fill ``into`` from ``offset``; return the number of bytes, fewer only at end of file."""
        ...


class ForetoldReadAt:
    """The same `ReadAt`, of a remote file, which is told what will be read.

    Args:
        will_need: called with an offset and a size, returns at once.
        near: reads with at most this many bytes between them are in order: what lies between is
            fetched, too.
    """

    def __init__(self, read_at: ReadAt, will_need: Callable[[int, int], object], near: int) -> None:
        self._read_at, self.will_need, self.near = read_at, will_need, near

    @property
    def foretold(self) -> ForetoldReadAt:
        """Itself, also behind others that read by it."""
        return self

    def __call__(self, offset: int, into: memoryview, /) -> int:
        """Read; see `ReadAt`."""
        return self._read_at(offset, into)


def next_data(read_at: ReadAt, offset: int) -> int:
    """Return the offset of the next byte, from `offset` on, that may be other than zero: a search
    skips the holes of sparse files, if the file knows them."""
    find = getattr(read_at, "next_data", None)
    return offset if find is None else int(find(offset))


class Admit(Protocol):
    """Admit tables before they are taken: raise if there is no room for them."""

    def __call__(self, records: int, more: int = 0, /) -> object:
        """Note what the tables of a file need by now.

        Args: records: all that were found so far. more: bytes besides those of `Shard.load`.
        """
        ...


def unbounded(records: int, more: int = 0, /) -> None:
    """Admit all tables: those of a process that reads for itself."""


class Shard(Protocol):
    """One opened file: its properties, and a method to load its tables."""

    format: str
    """Name of the format."""
    path: str
    size: int
    """Bytes of the file when it was opened."""
    count: int
    """Number of samples."""
    checksum_kind: int
    """0 none, 1 CRC-32, 2 CRC-32C."""
    fingerprint: int
    """u64 that identifies the content; equal for copies of the file on every machine."""

    def load(
        self,
        offsets: UInt64s,
        lengths: UInt64s,
        checksums: UInt32s,
    ) -> None:
        """Fill the caller's arrays, ``count`` entries each.

        Offsets and lengths are those of the payloads in the file. Their order is checked, but they
        may reach beyond the end of a truncated file: a sample with ``offset + length > size`` lacks
        bytes. Such lengths are unbounded; check them before allocating memory.
        """
        ...


@dataclass(slots=True)
class Chunks:
    """Table of the chunks of a shard.

    firsts: int64[n + 1], number of each chunk's first record, then the total count. begins, ends:
    int64[n], extents in the file, including headers; neither falls, but neighbours may overlap.
    sizes: int64[n], decoded bytes as the file claims; ``decode`` verifies them.
    """

    firsts: Int64s
    begins: Int64s
    ends: Int64s
    sizes: Int64s

    def __len__(self) -> int:
        return len(self.begins)

    def holding(self, records: Int64s) -> Int64s:
        """Return the number of the chunk that holds each record."""
        return np.searchsorted(self.firsts, records, side="right") - 1


@runtime_checkable
class ChunkedShard(Shard, Protocol):
    """A shard whose records are in chunks, each read and decoded as a whole.

    ``load`` gives each record its chunk's offset in the file, and the lengths of all records or
    UNKNOWN_LENGTH for all. A format that does not store a checksum per record gives its chunk's.
    """

    chunks: Chunks

    def about(self) -> dict[str, str | int]:
        """Return a summary of the chunks, with the keys of `inspect --json`."""
        ...

    def limit(self, size: int) -> None:
        """Refuse chunks that are larger than ``size`` bytes, in the file or decoded.

        For these chunks, ``chunks.sizes`` becomes 0 and ``decode`` raises.
        """
        ...

    def decode(self, chunk: int, extent: memoryview, into: Bytes) -> tuple[Int64s, Int64s]:
        """Verify and decode one chunk.

        Args:
            chunk: number of the chunk.
            extent: its bytes in the file, from begin to end.
            into: buffer of ``chunks.sizes[chunk]`` bytes; decoding allocates no further memory.
        Returns: (starts, lengths) of its records in ``into``, int64 each, as many as in
            ``chunks.firsts``.
        Raises:  FormatError, ChecksumError, TruncatedError, ReadError, with file, byte and chunk.
        """
        ...


@dataclass(slots=True)
class Heads:
    """The beginnings of several files of one format.

    bytes: uint8[n, most], a row for each file. got: int64[n], bytes of it that are there. sizes:
    int64[n], of the files.
    """

    bytes: Bytes
    got: Int64s
    sizes: Int64s

    def take(self, rows: list[int]) -> Heads:
        """Return those of some files."""
        if len(rows) == len(self.got):
            return self
        return Heads(self.bytes[rows], self.got[rows], self.sizes[rows])


@dataclass(slots=True)
class SmallShards:
    """Shards that were opened together from the heads of their files.

    done: bool[n], which were; the others are opened one by one. counts: int64[n], their samples, 0
    of others. fingerprints, kinds: as of a `Shard`; of others nothing is meant. payload_sizes:
    int64[n]. offsets, lengths, checksums: as `Shard.load` gives them, of one after another.
    chunked: those with chunks.
    """

    done: Bools
    counts: Int64s
    fingerprints: list[int]
    kinds: list[int]
    payload_sizes: Int64s
    offsets: UInt64s
    lengths: UInt64s
    checksums: UInt32s
    chunked: list[ChunkedShard | None] | None = None


class Encoder(Protocol):
    """Turns samples into the bytes of a file: a head, the records, a tail.

    The owner of the file calls ``encode`` for every sample and appends the result, then appends
    ``tail()``, and finally writes ``head()`` in front, exactly ``head_size(count)`` bytes. If the
    head does not depend on the number of samples, ``head_size`` is constant.
    """

    def head_size(self, count: int) -> int:
        """Bytes in front of the first record of a file of ``count`` samples."""
        ...

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Encode one sample (C-contiguous bytes); return the pieces to append now, if any.

        Pieces may refer to ``payload`` and are valid until the next call. An error leaves the
        encoder unchanged.
        """
        ...

    def tail(self) -> Iterable[bytes | memoryview]:
        """Return the end of the file; called once, after the last ``encode``."""
        ...

    def head(self) -> Iterator[bytes | memoryview]:
        """Yield the head in pieces of bounded size; called once, after ``tail``."""
        ...


@runtime_checkable
class GrowingEncoder(Encoder, Protocol):
    """An encoder that accepts a sample in pieces, so that samples may exceed the memory."""

    def extend(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Append bytes to the last sample."""
        ...


@runtime_checkable
class FieldEncoder(Encoder, Protocol):
    """An encoder of samples with fields."""

    def encode_fields(
        self, fields: Mapping[str, memoryview], key: str | None
    ) -> Iterable[bytes | memoryview]:
        """Encode one sample; as ``encode``. Args: key: a name of the sample; None: a number."""
        ...


@runtime_checkable
class BatchEncoder(Encoder, Protocol):
    """An encoder that accepts many samples at once, which is faster for small ones."""

    def encode_batch(self, payloads: Bytes, edges: Int64s) -> Iterable[bytes | memoryview]:
        """Encode samples that are stored back to back; equals ``encode`` for each in turn.

        Args:    payloads: uint8, contiguous. edges: int64[n + 1], rising from 0 to its length.
        """
        ...


class Format(Protocol):
    """One file format."""

    name: str
    suffixes: tuple[str, ...]
    """Such as ``(".ffr",)``, lower case."""

    def sniff(self, head: bytes, size: int) -> bool | None:
        """Whether a file of ``size`` bytes that begins with ``head`` has this format.

        True: yes. False: no, or damaged. None: unknown.
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
        admit: Admit = unbounded,
    ) -> Shard:
        """Read and check a file's metadata.

        Args:
            read_at: the file.
            size: its size in bytes.
            path: its name, for errors.
            verify: False skips checksums, but no other check.
            tolerant: also open a file that is damaged between its records. Each skipped place
                becomes a record of the shard that cannot be read and whose error names the place,
                so reading all records reports all damage.
            admit: called before the tables are taken, again and again as they grow.
        Raises:  FormatError or a subclass: the file cannot be read.
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
        """Return an encoder; an unsupported option is a UsageError."""
        ...


@runtime_checkable
class SmallFormat(Format, Protocol):
    """A format that opens several small files at once, which takes far less time for each."""

    def open_small(self, heads: Heads, paths: list[str], *, verify: bool = True) -> SmallShards:
        """Open files of which the heads have all that is needed, and which are in order.

        They are opened as by `open`, which opens or refuses the others. Checksums of tables are
        verified in any case.

        Args: heads: of several files. paths, verify: as of `open`.
        """
        ...


@runtime_checkable
class ScannedShard(Shard, Protocol):
    """A shard that can be restored from what an index file keeps."""

    lengths: UInt64s
    """Of the payloads."""
    checksums: UInt32s
    sound: bool
    """Whether the scan skipped nothing."""

    @property
    def kept(self) -> bytes:
        """The bytes that an index file keeps for the format, besides lengths and checksums."""
        ...

    def agrees(self, read_at: ReadAt, records: Int64s) -> bool:
        """Whether a file has these records as the shard says.

        Args: read_at: the file. records: their numbers, at least one.
        """
        ...


@dataclass
class TableShard:
    """A scanned shard whose records are stored as they are, with its tables in memory."""

    path: str
    size: int
    offsets: UInt64s = field(repr=False)
    lengths: UInt64s = field(repr=False)
    checksums: UInt32s = field(repr=False)
    sound: bool = field(default=True, kw_only=True)
    """Whether a tolerant scan skipped nothing."""
    format: str = field(init=False)
    count: int = field(init=False)
    fingerprint: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.lengths)
        tables = self.lengths, self.checksums
        self.fingerprint = scan_fingerprint(self.format, *tables, self.size)

    def load(self, offsets: UInt64s, lengths: UInt64s, checksums: UInt32s) -> None:
        """Fill the caller's arrays.

        Args:    offsets, lengths, checksums: arrays of ``count`` entries, overwritten.
        Raises:  UsageError: arrays of another shape.
        """
        for name, into, table in (
            ("offsets", offsets, self.offsets),
            ("lengths", lengths, self.lengths),
            ("checksums", checksums, self.checksums),
        ):
            if into.shape != (self.count,):
                raise UsageError(f"{name} has shape {into.shape}, but must have ({self.count},)")
            into[:] = table


@runtime_checkable
class ScannedChunks(ChunkedShard, Protocol):
    """A scanned shard whose records are in chunks. Its ``decode`` raises ChecksumError for a record
    that is damaged, and not for one that the scan did not find."""

    def fits(self, read_at: ReadAt) -> bool | None:
        """Whether these are the records of a file, also if some of its chunks are damaged.

        Chunks that decode to other records than these are no proof, since they may be damaged; one
        that decodes to these is. None: the chunks are too large to try any.
        """
        ...


@runtime_checkable
class ScannedFormat(Format, Protocol):
    """A format without tables: opening a file means scanning all of it.

    An index file (``ffserve/disk/index_file.py``) keeps the result.
    """

    def open(
        self,
        read_at: ReadAt,
        size: int,
        path: str,
        *,
        verify: bool = True,
        tolerant: bool = False,
        admit: Admit = unbounded,
    ) -> ScannedShard:
        """Scan a file."""
        ...

    def restore(
        self,
        lengths: UInt64s,
        checksums: UInt32s,
        kept: bytes,
        size: int,
        path: str,
    ) -> ScannedShard | None:
        """Return the shard of an earlier scan; None if such records do not fill the file."""
        ...

    def agrees(
        self,
        read_at: ReadAt,
        offsets: UInt64s,
        lengths: UInt64s,
        checksums: UInt32s,
    ) -> bool:
        """Whether a file has records with these payloads; the payloads are not read. Only for
        records that are stored as they are."""
        ...


def scan_fingerprint(name: str, lengths: UInt64s, checksums: UInt32s, size: int) -> int:
    """Return the fingerprint of a scanned shard: of its records, and of the size of its file."""
    crc, adler = zlib.crc32, zlib.adler32
    first, second = (np.ascontiguousarray(table).data for table in (lengths, checksums))
    sums = crc(first), adler(first), crc(second), adler(second)
    identity = struct.pack("<4IQQ", *sums, len(lengths), size)
    digest = blake2b(identity, digest_size=8, person=name.encode()).digest()
    return int.from_bytes(digest, "little")


def sums(values: NDArray[np.unsignedinteger[Any]], counts: Int64s) -> Int64s:
    """Return the sum of each of several runs of values, which follow each other."""
    before = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=before[1:], dtype=np.int64)
    ends = np.cumsum(counts)
    found: Int64s = before[ends] - before[ends - counts]
    return found


def refuse_options(format_name: str, options: Mapping[str, object]) -> None:
    """Raise UsageError for the first option that was given (is not None)."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                f"{format_name} does not support {name}={value!r}", hint=f"leave {name} out"
            )


def read_exactly(read_at: ReadAt, offset: int, into: memoryview, path: str) -> None:
    """Fill ``into``, or raise TruncatedError at the end of the file.

    Args:
        read_at: the file.
        offset: offset of the first byte.
        into: buffer to fill, in reads of at most ``PIECE_SIZE``.
        path: name of the file, for errors.
    """
    done = 0
    while done < len(into):
        got = read_at(offset + done, into[done : done + PIECE_SIZE])
        if got <= 0:
            raise TruncatedError(
                f"unexpected end of file: {len(into) - done} bytes are missing",
                path=path,
                offset=offset + done,
                hint="the file was truncated while in use, or its copy is incomplete: restore it",
            )
        done += got


# isinstance() of a protocol class takes 30 to 60 us in Python 3.11, a third of what opening a small
# file takes.


def is_chunked(shard: Shard) -> TypeGuard[ChunkedShard]:
    """Whether the records of a shard are in chunks."""
    return hasattr(shard, "chunks")


def is_scanned(shard: Shard) -> TypeGuard[ScannedShard]:
    """Whether the tables of a shard are those of a scan."""
    return hasattr(shard, "sound")


def members_of(shard: Shard) -> Members | None:
    """Return what the records of a shard are, if they are members of samples."""
    found: Members | None = getattr(shard, "members", None)
    return found


def needs_scan(format: Format) -> TypeGuard[ScannedFormat]:
    """Whether files of a format have no tables."""
    return hasattr(format, "restore")


def opens_small(format: Format) -> TypeGuard[SmallFormat]:
    """Whether a format opens several small files at once."""
    return hasattr(format, "open_small")
