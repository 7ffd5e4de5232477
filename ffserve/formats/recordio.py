"""The RecordIO format, in the dialects of ElasticDL's pyrecordio (py) and PaddlePaddle (go).

A file is a sequence of chunks, without an index or an end mark. A chunk is a header of 20 bytes and
a payload, which may be compressed. The decoded payload is a sequence of records, each a u32 length
and its bytes. The header stores the number of records and a checksum of the payload as stored in
the file (``recordio_codec.py`` has both layouts). Both originals end a chunk when the next record
would make the sum of record lengths exceed a maximum.

Opening is one scan of the headers, and of the few bytes of each payload that give its decoded size,
so that memory can be allocated before decoding (``recordio_scan.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bytes, Int64s, UInt32s, UInt64s
from ffserve.engine.codec import CHUNK_TABLES, checksum, small_recordio, split_records
from ffserve.errors import (
    ChecksumError,
    FFServeError,
    FormatError,
    ReadError,
    TruncatedError,
    UsageError,
)
from ffserve.formats.base import (
    CHECKSUM_CRC32,
    UNKNOWN_LENGTH,
    Admit,
    ChunkedShard,
    Chunks,
    Encoder,
    Heads,
    ReadAt,
    SmallShards,
    sums,
    unbounded,
)
from ffserve.formats.recordio_codec import (
    COMPRESSIONS,
    DIALECTS,
    HEADER,
    PREFIX,
    PY,
    SNAPPY,
    U32_MAX,
    Dialect,
    Header,
    compress,
    decompress,
)
from ffserve.formats.recordio_scan import DIALECTS_BY_NUMBER, MAGIC_BYTES, Scan

_LARGEST_CHUNK = 1 << 30
"""Largest chunk that is written, including the length prefixes of its records."""
_MOST_SMALL_RECORDS = 4096
"""A file is opened together with others if it has at most this many records."""


@dataclass(slots=True)
class RecordIOShard:
    """One RecordIO file, opened and checked."""

    path: str
    size: int
    count: int
    checksum_kind: int
    fingerprint: int
    chunks: Chunks
    dialect: Dialect | None
    """None for an empty file."""
    checksums: UInt32s
    """Stored checksum of each chunk."""
    compressors: Bytes
    _problems: dict[int, FFServeError] = field(repr=False)
    _verify: bool = field(repr=False)
    format: str = "recordio"

    def load(
        self,
        offsets: UInt64s,
        lengths: UInt64s,
        checksums: UInt32s,
    ) -> None:
        """Fill the caller's arrays; see ``ChunkedShard``."""
        counts = np.diff(self.chunks.firsts)
        offsets[:] = np.repeat(self.chunks.begins.astype(np.uint64), counts)
        lengths[:] = UNKNOWN_LENGTH
        checksums[:] = np.repeat(self.checksums, counts)

    def compression(self, chunk: int) -> str:
        """Return the name of a chunk's compression."""
        assert self.dialect is not None
        return self.dialect.compression(int(self.compressors[chunk])) or "unknown"

    def about(self) -> dict[str, str | int]:
        """Return dialect, number, compression and decoded sizes of the chunks."""
        used = np.unique(self.compressors).tolist() if self.dialect is not None else []
        names = [str(self.dialect.compression(k)) for k in used] if self.dialect else []
        return {
            "dialect": self.dialect.name if self.dialect else "unknown",
            "chunks": len(self.chunks),
            "compression": ", ".join(names) or "unknown",
            "decoded_size_bytes": int(self.chunks.sizes.sum()),
            "largest_chunk_size_bytes": int(self.chunks.sizes.max(initial=0)),
        }

    def limit(self, size: int) -> None:
        """Refuse chunks that are larger; see ``ChunkedShard``."""
        chunks = self.chunks
        held = np.maximum(chunks.sizes, chunks.ends - chunks.begins)
        for chunk in np.flatnonzero(held > size).tolist():
            self._problems[chunk] = FormatError(
                f"chunk {chunk} has {int(chunks.ends[chunk] - chunks.begins[chunk])} bytes, "
                f"{int(chunks.sizes[chunk])} decoded, more than the limit of {size}",
                path=self.path,
                offset=int(chunks.begins[chunk]),
                hint="raise the daemon's max_chunk_size if you trust this file",
            )
            chunks.sizes[chunk] = 0
            chunks.ends[chunk] = chunks.begins[chunk]

    def decode(self, chunk: int, extent: memoryview, into: Bytes) -> tuple[Int64s, Int64s]:
        """Verify and decode a chunk; see ``ChunkedShard``."""
        problem = self._problems.get(chunk)
        if problem is not None:
            raise problem.located()
        assert self.dialect is not None
        try:
            return self._decode(chunk, self.dialect, extent, into)
        except FFServeError as error:
            begin = int(self.chunks.begins[chunk])
            raise type(error)(
                f"chunk {chunk}: {error.message}", path=self.path, offset=begin, hint=error.hint
            ) from None

    def _decode(
        self, chunk: int, dialect: Dialect, extent: memoryview, into: Bytes
    ) -> tuple[Int64s, Int64s]:
        chunks = self.chunks
        count = int(chunks.firsts[chunk + 1] - chunks.firsts[chunk])
        size = int(chunks.ends[chunk] - chunks.begins[chunk]) - HEADER.size
        if len(extent) != HEADER.size + size:
            raise TruncatedError(
                f"the file has only {len(extent)} of its {HEADER.size + size} bytes",
                hint="the file was truncated while in use: restore it and open it again",
            )
        expected = int(self.checksums[chunk])
        header = Header(count, expected, int(self.compressors[chunk]), size)
        if extent[: HEADER.size] != dialect.pack(header):
            raise ReadError(
                "its header changed since the file was opened",
                hint="do not modify a file in use: append, or write a new file and rename it",
            )
        payload = extent[HEADER.size :]
        if self._verify:
            found = checksum(dialect.checksum_kind, payload)
            if found != expected:
                raise self._mismatch(payload, found, expected, dialect)
        decompress(self.compression(chunk), payload, into, framed=dialect.framed)
        starts, lengths, end = split_records(into, count)
        if len(starts) != count or end != len(into):
            raise FormatError(
                f"its header counts {count} records in {len(into)} decoded bytes, but "
                f"{len(starts)} records end at byte {end}",
                hint="the file is damaged, or was not written by RecordIO",
            )
        return starts, lengths

    @staticmethod
    def _mismatch(
        payload: memoryview, found: int, expected: int, dialect: Dialect
    ) -> ChecksumError:
        fluid = dialect is PY and checksum(CHECKSUM_CRC32, payload) == expected
        return ChecksumError(
            f"checksum mismatch: the header stores {dialect.checksum_name} {expected:08x}, the "
            f"payload gives {found:08x}",
            hint="PaddlePaddle Fluid wrote this file; its format is not supported"
            if fluid
            else "restore the file from a copy, or skip these samples with on_error='skip'",
        )


class RecordIOEncoder:
    """Encodes samples as RecordIO; keeps one chunk in memory.

    Args: max_size: bytes of the records of a chunk, without their length prefixes.
    """

    def __init__(self, dialect: Dialect, compression: str, max_size: int) -> None:
        self._dialect = dialect
        self._compression = compression
        self._max_size = max_size
        self._chunk = bytearray()
        self._sum = 0
        self._count = 0

    def head_size(self, count: int) -> int:
        """Return 0; a file begins with its first chunk."""
        return 0

    def head(self) -> Iterator[bytes | memoryview]:
        """Yield nothing."""
        return iter(())

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Add a record; return the previous chunk if the record does not fit into it."""
        size = len(payload)
        if size > self._max_size and self._dialect is not PY:
            raise UsageError(
                f"a sample of {size} bytes does not fit into a chunk of {self._max_size} bytes",
                hint="raise max_chunk_size, or use dialect='py'",
            )
        if size > U32_MAX - PREFIX.size:
            raise UsageError(
                f"a sample of {size} bytes is too large for RecordIO",
                hint="split it, or use another format",
            )
        full = self._sum + size > self._max_size
        full = full or len(self._chunk) + PREFIX.size + size > _LARGEST_CHUNK
        done = self._packed() if full and self._count else ()
        if done:
            self._chunk, self._sum, self._count = bytearray(), 0, 0
        self._chunk += PREFIX.pack(size)
        self._chunk += payload
        self._sum += size
        self._count += 1
        return done

    def tail(self) -> Iterable[bytes | memoryview]:
        """Return the last chunk."""
        return self._packed() if self._count else ()

    def _packed(self) -> tuple[bytes | memoryview, ...]:
        dialect = self._dialect
        payload = compress(self._compression, self._chunk, framed=dialect.framed)
        if len(payload) > U32_MAX:
            raise UsageError(
                f"a chunk of {len(payload)} bytes is too large for RecordIO",
                hint="use another compression, or smaller chunks",
            )
        found = checksum(dialect.checksum_kind, payload)
        header = Header(self._count, found, dialect.compressor(self._compression), len(payload))
        return dialect.pack(header), payload


class RecordIO:
    """The RecordIO format."""

    name = "recordio"
    suffixes: tuple[str, ...] = (".recordio", ".rio")

    def sniff(self, head: bytes, size: int) -> bool | None:
        """Detect a file by its magic; an empty file has none."""
        if 0 < len(head) < len(MAGIC_BYTES) and MAGIC_BYTES.startswith(head):
            return None
        return head.startswith(MAGIC_BYTES)

    def open(
        self,
        read_at: ReadAt,
        size: int,
        path: str,
        *,
        verify: bool = True,
        tolerant: bool = False,
        admit: Admit = unbounded,
    ) -> RecordIOShard:
        """Scan the headers of a file.

        Args:    as ``Format.open``; ``verify`` checks payloads when they are decoded, ``tolerant``
                 checks all of them now.
        Raises:  TruncatedError: the last chunk is incomplete. FormatError: bytes that are not a
                 chunk, or a header with impossible numbers.
        Cost:    reads up to 4 KiB at each header, and the frame headers in the go dialect; the
                 whole file if chunks are small or if ``tolerant``. 37 bytes of memory per chunk.
        """
        scan = Scan(read_at, size, path, admit)
        if tolerant:
            scan.tolerantly()
        else:
            scan.strictly()
        return _shard(scan, size, path, verify)

    def open_small(self, heads: Heads, paths: list[str], *, verify: bool = True) -> SmallShards:
        """Open files that are whole in their heads."""
        done, counts, tables, dialects = small_recordio(
            heads.bytes, heads.got, heads.sizes, _MOST_SMALL_RECORDS
        )
        chunked: list[ChunkedShard | None] = []
        at = before = 0
        rows = zip(paths, done.tolist(), counts.tolist(), dialects.tolist(), strict=True)
        for (path, whole, count, number), size in zip(rows, heads.sizes.tolist(), strict=True):
            if not whole:
                chunked.append(None)
                continue
            mine = {name: table[at : at + count] for name, table in tables.items()}
            mine["firsts"] = tables["firsts"][at + before : at + before + count + 1]
            at, before = at + count, before + 1
            dialect = None if number < 0 else DIALECTS_BY_NUMBER[number]
            chunked.append(_made(mine, dialect, {}, size, path, verify))
        # Behind the last chunk of a file, the numbers begin again.
        last = np.cumsum(counts[done] + 1) - 1
        records = np.delete(np.diff(tables["firsts"], append=0), last)
        return SmallShards(
            done,
            np.array([0 if shard is None else shard.count for shard in chunked], np.int64),
            [0 if shard is None else shard.fingerprint for shard in chunked],
            [0 if shard is None else shard.checksum_kind for shard in chunked],
            sums(tables["sizes"], counts),
            np.repeat(tables["begins"].astype(np.uint64), records),
            np.full(int(records.sum()), UNKNOWN_LENGTH, np.uint64),
            np.repeat(tables["checksums"], records),
            chunked,
        )

    def complete(self, read_at: ReadAt, size: int, path: str) -> tuple[RecordIOShard, int]:
        """Scan a file that may end with an incomplete chunk, as a writer that died leaves it.

        Returns: the shard of the complete chunks, and the offset of their end.
        Raises:  FormatError: the damage is not an incomplete last chunk.
        """
        scan = Scan(read_at, size, path)
        try:
            scan.strictly()
        except TruncatedError:
            if not scan.tail_is_lost():
                raise
        return _shard(scan, scan.at, path, True), scan.at

    def writer(
        self,
        *,
        n: int | None = None,
        compression: str | None = None,
        dialect: str | None = None,
        max_chunk_size: int | None = None,
    ) -> Encoder:
        """Return an encoder; ``n`` may be None.

        Args:
            compression: "snappy" (default), "gzip" or "none".
            dialect: "py" (default) or "go".
            max_chunk_size: bytes of the records in a chunk; the default is that of the originals,
                1024 in py and 32 MiB in go.
        Raises:  UsageError: any other value.
        """
        compression = SNAPPY if compression is None else compression
        if compression not in COMPRESSIONS:
            raise UsageError(
                f"recordio does not support compression={compression!r}",
                hint=f"use one of {', '.join(COMPRESSIONS)}",
            )
        chosen = DIALECTS.get("py" if dialect is None else dialect)
        if chosen is None:
            raise UsageError(
                f"unknown RecordIO dialect {dialect!r}", hint=f"use one of {', '.join(DIALECTS)}"
            )
        most = chosen.default_chunk_size if max_chunk_size is None else max_chunk_size
        if isinstance(most, bool) or not isinstance(most, int) or not 0 < most <= _LARGEST_CHUNK:
            raise UsageError(
                f"invalid max_chunk_size={most!r}", hint=f"use 1 to {_LARGEST_CHUNK} bytes"
            )
        return RecordIOEncoder(chosen, compression, most)


def _shard(scan: Scan, size: int, path: str, verify: bool) -> RecordIOShard:
    tables = {name: scan.table.table(name) for name in CHUNK_TABLES}
    return _made(tables, scan.dialect, scan.problems, size, path, verify)


def _made(
    tables: dict[str, NDArray[Any]],
    dialect: Dialect | None,
    problems: dict[int, FFServeError],
    size: int,
    path: str,
    verify: bool,
) -> RecordIOShard:
    firsts, begins = tables["firsts"], tables["begins"]
    checksums, compressors = tables["checksums"], tables["compressors"]
    identity = blake2b(struct.pack("<QQ", size, len(begins)), digest_size=8, person=b"recordio")
    for table in (begins, firsts, checksums, compressors):
        identity.update(table.data)
    return RecordIOShard(
        path=path,
        size=size,
        count=int(firsts[-1]),
        checksum_kind=dialect.checksum_kind if dialect else 0,
        fingerprint=int.from_bytes(identity.digest(), "little"),
        chunks=Chunks(firsts, begins, tables["ends"], tables["sizes"]),
        dialect=dialect,
        checksums=checksums,
        compressors=compressors,
        _problems=problems,
        _verify=verify,
    )


FORMAT = RecordIO()
