"""The FFRecord format of HFAiLab/ffrecord 1.4.

Little-endian, without magic, version or padding::

    0        u32      metadata CRC: zlib's CRC-32 over bytes [4, 12+12N)
    4        i64      N, number of samples
    12       u32 * N  CRC-32 of each sample
    12+4N    i64 * N  absolute offset of each sample; the first is 12+12N
    12+12N            the samples, back to back

The last sample ends at the end of the file. The file does not store its size, so if it was
truncated inside its last sample, only the checksum of that sample shows it. A metadata CRC of 0
marks a file of an older writer, without a metadata checksum.

Opening reads both tables once in pieces of bounded size, and keeps them only if they are small;
``load`` reads others again into the caller's arrays and refuses a file that changed in between.
These are two passes over 12 bytes per sample, without a further copy of tables that may have
gigabytes.
"""

from __future__ import annotations

import logging
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bools, Bytes, Int64s, UInt32s, UInt64s
from ffserve.engine.codec import checksums, small_ffrecord
from ffserve.errors import ChecksumError, FormatError, ReadError, TruncatedError, UsageError
from ffserve.formats.base import (
    CHECKSUM_CRC32,
    PIECE_SIZE,
    Admit,
    Encoder,
    Heads,
    ReadAt,
    Shard,
    SmallShards,
    read_exactly,
    refuse_options,
    sums,
    unbounded,
)

_log = logging.getLogger("ffserve")
_HEADER = struct.Struct("<Iq")
_COUNT_MAX = (2**63 - 1 - _HEADER.size) // 12

KEPT_COUNT = 4096
"""The tables of a file with at most this many samples are kept between `open` and `load`."""

LAST_SIZE = 16
"""So many bytes of a last sample show whether it is a folder index, which ends a packed folder
(``folders/folder_index.py``)."""
_FIXED_SIZE, _ITEM_SIZE = 33, 4
"""Bytes that a folder index has at least: its magic and an empty pickled OrderedDict, and for each
file two for its name, as a reference to an equal one, and two for its number."""

_U32 = np.dtype("<u4")
_I64 = np.dtype("<i8")


def may_be_indices(sizes: Int64s, counts: Int64s) -> Bools:
    """Return which last samples may be folder indices by their sizes.

    Args: sizes: of the last samples. counts: of the samples in their files.
    """
    return sizes >= _FIXED_SIZE + _ITEM_SIZE * (counts - 1)


def tables_end(count: int) -> int:
    """Return the offset of the first of ``count`` samples."""
    return _HEADER.size + 12 * count


@dataclass
class _Tables:
    """Result of one pass over the tables."""

    crc: int
    adler: int
    last_offset: int
    last_checksum: int
    problem: FormatError | None
    """Error for the first invalid offset, if any."""
    kept: tuple[Int64s, UInt32s] | None = None
    """Offsets and checksums."""


class _TableReader:
    """One pass over the tables of a file, in pieces, optionally into the caller's arrays."""

    def __init__(self, read_at: ReadAt, count: int, path: str) -> None:
        self._read_at = read_at
        self._count = count
        self._path = path
        packed = struct.pack("<q", count)
        self._crc = zlib.crc32(packed)
        self._adler = zlib.adler32(packed)

    def run(
        self,
        offsets: UInt64s | None = None,
        checksums: UInt32s | None = None,
    ) -> _Tables:
        piece = np.empty(min(PIECE_SIZE, max(8 * self._count, 8)), np.uint8)
        last_checksum = 0
        for first, part in self._pieces(piece, _HEADER.size, _U32):
            if checksums is not None:
                checksums[first : first + len(part)] = part
            last_checksum = int(part[-1])
        previous, problem = tables_end(self._count), None
        for first, part in self._pieces(piece, _HEADER.size + 4 * self._count, _I64):
            if problem is None:
                problem = self._disorder(part, first, previous)
            if offsets is not None:
                offsets[first : first + len(part)] = part.astype(np.uint64)
            previous = int(part[-1])
        return _Tables(self._crc, self._adler, previous, last_checksum, problem)

    def run_once(self) -> _Tables:
        """Read small tables whole, and keep them."""
        count = self._count
        piece = np.empty(12 * count, np.uint8)
        read_exactly(self._read_at, _HEADER.size, piece.data, self._path)
        crc, adler = zlib.crc32(piece.data, self._crc), zlib.adler32(piece.data, self._adler)
        checksums, offsets = piece[: 4 * count].view(_U32), piece[4 * count :].view(_I64)
        problem = self._disorder(offsets, 0, tables_end(count)) if count else None
        last = (int(offsets[-1]), int(checksums[-1])) if count else (0, 0)
        return _Tables(crc, adler, *last, problem, (offsets, checksums))

    def _pieces(
        self, piece: Bytes, start: int, dtype: np.dtype[np.generic]
    ) -> Iterator[tuple[int, NDArray[np.generic]]]:
        step = len(piece) // dtype.itemsize
        for first in range(0, self._count, step):
            part = piece[: dtype.itemsize * min(step, self._count - first)]
            view = part.data
            read_exactly(self._read_at, start + dtype.itemsize * first, view, self._path)
            self._crc = zlib.crc32(view, self._crc)
            self._adler = zlib.adler32(view, self._adler)
            yield first, part.view(dtype)

    def _disorder(self, part: NDArray[np.generic], first: int, previous: int) -> FormatError | None:
        if first == 0 and int(part[0]) != previous:
            at, rule = 0, f"the first sample must begin after the tables, at {previous}"
        elif int(part[0]) < previous:
            at, rule = 0, f"it must not be below the previous offset, {previous}"
        else:
            (falls,) = (part[1:] < part[:-1]).nonzero()  # type: ignore[operator]
            if not len(falls):
                return None
            at = int(falls[0]) + 1
            rule = f"it must not be below the previous offset, {int(part[at - 1])}"
        return FormatError(
            f"invalid offset {int(part[at])} of sample {first + at}: {rule}",
            path=self._path,
            offset=_HEADER.size + 4 * self._count + 8 * (first + at),
            hint="the file is damaged, or not an FFRecord file: restore it from a copy",
        )


@dataclass
class FFRecordShard:
    """One FFRecord file, opened and checked."""

    path: str
    size: int
    count: int
    fingerprint: int
    metadata_checksum: int
    """The stored checksum; 0 in files of old writers."""
    _read_at: ReadAt = field(repr=False)
    _tables: _Tables = field(repr=False)
    format: str = "ffrecord"
    checksum_kind: int = CHECKSUM_CRC32

    @property
    def last_offset(self) -> int:
        """Where the last sample begins, which may be beyond the end of a truncated file."""
        return self._tables.last_offset

    def load(
        self,
        offsets: UInt64s,
        lengths: UInt64s,
        checksums: UInt32s,
    ) -> None:
        """Fill the caller's arrays with the tables.

        Samples beyond the end of a truncated file keep their length from the table. The last
        sample has no length in the table, since it ends with the file. If it begins at or beyond
        the end of the file and its checksum is not that of an empty sample, its length becomes 1,
        so that reading it reports a truncated file and not an empty sample.

        Args:    offsets, lengths, checksums: arrays of ``count`` entries, overwritten.
        Raises:  ReadError: the tables changed since the file was opened. TruncatedError: the file
                 ends inside the tables.
        Cost:    one pass over 12 bytes per sample.
        """
        for name, given in (("offsets", offsets), ("lengths", lengths), ("checksums", checksums)):
            if given.shape != (self.count,):
                raise UsageError(f"{name} has shape {given.shape}, but must have ({self.count},)")
        if self.count == 0:
            return
        found = self._tables
        if found.kept is not None:
            offsets[:], checksums[:] = found.kept
        else:
            found = _TableReader(self._read_at, self.count, self.path).run(offsets, checksums)
        if found.crc != self._tables.crc or found.problem is not None:
            raise ReadError(
                f"the tables changed since the file was opened: their CRC-32 was "
                f"{self._tables.crc:#010x} and is now {found.crc:#010x}",
                path=self.path,
                offset=_HEADER.size,
                hint="do not modify a file in use: write a new file and rename it",
            )
        np.subtract(offsets[1:], offsets[:-1], out=lengths[:-1])
        if found.last_offset < self.size:
            lengths[-1] = self.size - found.last_offset
        else:
            lengths[-1] = 1 if found.last_checksum else 0


class FFRecordEncoder:
    """Encodes samples as FFRecord; keeps 12 bytes per sample in memory."""

    def __init__(self) -> None:
        self._checksums = array("I")
        self._starts = array("Q")
        self._next_start = 0

    def head_size(self, count: int) -> int:
        """Return 12 bytes plus 12 per sample."""
        return tables_end(count)

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Record offset and checksum; the payload is stored unchanged."""
        self._checksums.append(zlib.crc32(payload))
        self._starts.append(self._next_start)
        self._next_start += len(payload)
        return (payload,)

    def encode_batch(self, payloads: Bytes, edges: Int64s) -> Iterable[bytes | memoryview]:
        """Record offsets and checksums; the payloads are stored unchanged."""
        starts = edges[:-1].astype(np.uint64)
        lengths = np.diff(edges).astype(np.uint64)
        found = checksums(CHECKSUM_CRC32, payloads, starts, lengths)
        self._checksums.frombytes(found.tobytes())
        self._starts.frombytes((starts + np.uint64(self._next_start)).tobytes())
        self._next_start += len(payloads)
        return (payloads.data,)

    def extend(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Append bytes to the last sample."""
        self._checksums[-1] = zlib.crc32(payload, self._checksums[-1])
        self._next_start += len(payload)
        return (payload,)

    def tail(self) -> Iterable[bytes | memoryview]:
        """Return nothing; the file ends with its last sample."""
        return ()

    def head(self) -> Iterator[bytes | memoryview]:
        """Yield the header and both tables, in two passes: the checksum comes first."""
        crc = 0
        for part in self._tables():
            crc = zlib.crc32(part, crc)
        yield struct.pack("<I", crc)
        yield from self._tables()

    def _tables(self) -> Iterator[bytes | memoryview]:
        count = len(self._starts)
        yield struct.pack("<q", count)
        step = PIECE_SIZE // 8
        checksums = np.frombuffer(self._checksums, np.uint32)
        starts = np.frombuffer(self._starts, np.uint64)
        for first in range(0, count, step):
            yield checksums[first : first + step].astype(_U32).tobytes()
        for first in range(0, count, step):
            part = starts[first : first + step] + np.uint64(tables_end(count))
            yield part.astype(_I64).tobytes()


class FFRecord:
    """The FFRecord format."""

    name = "ffrecord"
    suffixes: tuple[str, ...] = (".ffr",)

    def __init__(self, kept_count: int = KEPT_COUNT) -> None:
        self._kept_count = kept_count

    def sniff(self, head: bytes, size: int) -> bool | None:
        """Detect an FFRecord file by its first offset, which follows from its count."""
        if len(head) < _HEADER.size:
            return False
        crc, count = _HEADER.unpack_from(head)
        if count < 0 or tables_end(count) > size:
            return False
        if count == 0:
            return bool(size == _HEADER.size and crc == zlib.crc32(head[4:12]))
        place = _HEADER.size + 4 * count
        if len(head) < place + 8:
            return None
        return bool(int.from_bytes(head[place : place + 8], "little") == tables_end(count))

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
        """Read the header and both tables and check them; no sample is touched.

        Offsets may be beyond the end of the file. Then the file was truncated: its first samples
        are intact and only reads of the others fail. ``verify=False`` skips the checksum only;
        ``tolerant`` has no effect, because there are no bytes between samples.

        Args:    as ``Format.open``.
        Raises:  TruncatedError: the file ends inside its tables, or N is too large.
                 ChecksumError: the metadata CRC does not match. FormatError: offsets out of order,
                 a negative N, or the zero header of a writer that died.
        Cost:    one pass over 12 bytes per sample, in reads of at most 4 MiB.
        Source:  HFAiLab/ffrecord 1.4.
        """
        crc, count = self._header(read_at, size, path)
        admit(count)
        reader = _TableReader(read_at, count, path)
        found = reader.run_once() if count <= self._kept_count else reader.run()
        if crc == 0:
            _log.warning(
                "%s: no metadata checksum, as in files of an old ffrecord: the tables are not "
                "verified, the samples are",
                path,
            )
        elif verify and found.crc != crc:
            detail = f"; {found.problem.message}" if found.problem is not None else ""
            raise ChecksumError(
                f"checksum mismatch in the metadata (count, checksums, offsets): the header stores "
                f"CRC-32 {crc:#010x}, the tables give {found.crc:#010x}{detail}",
                path=path,
                offset=0,
                hint="the file is damaged: restore it from a copy or write it again",
            )
        if found.problem is not None:
            raise found.problem
        return FFRecordShard(
            path=path,
            size=size,
            count=count,
            fingerprint=_fingerprint(found.crc, found.adler, count, size),
            metadata_checksum=crc,
            _read_at=read_at,
            _tables=found,
        )

    def open_small(self, heads: Heads, paths: list[str], *, verify: bool = True) -> SmallShards:
        """Open files whose tables are in their heads."""
        done, counts, tables, crcs = small_ffrecord(heads.bytes, heads.got, heads.sizes)
        flat, stride = heads.bytes.reshape(-1).data, heads.bytes.shape[1]
        fingerprints = []
        rows = zip(crcs.tolist(), counts.tolist(), heads.sizes.tolist(), strict=True)
        for k, (crc, count, size) in enumerate(rows):
            adler = zlib.adler32(flat[k * stride + 4 : k * stride + tables_end(count)])
            fingerprints.append(_fingerprint(crc, adler, count, size))
        kinds = [CHECKSUM_CRC32] * len(paths)
        return SmallShards(done, counts, fingerprints, kinds, sums(tables[1], counts), *tables)

    def _header(self, read_at: ReadAt, size: int, path: str) -> tuple[int, int]:
        if size < _HEADER.size:
            raise TruncatedError(
                f"the file has {size} bytes, an FFRecord header has {_HEADER.size}",
                path=path,
                offset=size,
                hint="the file is empty or truncated: write it again",
            )
        header = bytearray(_HEADER.size)
        read_exactly(read_at, 0, memoryview(header), path)
        crc, count = _HEADER.unpack(header)
        if count < 0:
            raise FormatError(
                f"invalid header: it counts {count} samples",
                path=path,
                offset=4,
                hint="check that this is an FFRecord file; if so, its header is damaged",
            )
        if tables_end(count) > size:
            raise TruncatedError(
                f"the header counts {count} samples, whose tables need {tables_end(count)} bytes, "
                f"but the file has {size}",
                path=path,
                offset=4,
                hint="the file is truncated, damaged, or not an FFRecord file",
            )
        if count == 0 and (crc == 0 or size > _HEADER.size):
            raise FormatError(
                "unfinished file: the header counts no samples, "
                f"{size - _HEADER.size} bytes follow it, and the metadata CRC is {crc:#010x}",
                path=path,
                offset=0,
                hint="the writer died before close(): write the file again",
            )
        return crc, count

    def writer(
        self,
        *,
        n: int | None = None,
        compression: str | None = None,
        dialect: str | None = None,
        max_chunk_size: int | None = None,
    ) -> Encoder:
        """Return an encoder; FFRecord has no options, and ``n`` may be None."""
        if compression == "none":
            compression = None
        refuse_options(
            self.name,
            {"compression": compression, "dialect": dialect, "max_chunk_size": max_chunk_size},
        )
        if n is not None and n > _COUNT_MAX:
            raise UsageError(
                f"n={n} is too large", hint=f"use at most {_COUNT_MAX} samples per file"
            )
        return FFRecordEncoder()


def _fingerprint(crc: int, adler: int, count: int, size: int) -> int:
    identity = struct.pack("<IIqQ", crc, adler, count, size)
    return int.from_bytes(blake2b(identity, digest_size=8, person=b"ffrecord").digest(), "little")


FORMAT = FFRecord()
