"""RecordIO, in the dialects of ElasticDL's pyrecordio (py) and of PaddlePaddle's recordio (go).

A file is a sequence of chunks and nothing else: no index, no mark at the end. A chunk is a header
of 20 bytes and a payload, maybe compressed, of records, each a u32 length and its bytes. The
header says how many records there are and has a checksum of the payload as it stands in the file
(``recordio_codec.py`` has both layouts). Both originals end a chunk when the lengths of its
records and of the next one come to more than a maximum.

Opening is one scan of the headers, and of the few bytes of each payload that tell how large it is
when decoded, so that whoever decodes can take the room for it beforehand. The scan runs in C
(``engine/chunks.c``) over all that is sound; at what is not it stops, and ``_Scan._look`` finds out
what that is. The two agree (``tests/test_recordio_walk.py``). All that a header
claims is held against the bytes that are there: the payload against the file, the decoded size
against what the compression can do at best, the number of records against the decoded size.

A header has no checksum of its own. So a file that was opened tolerantly is read whole, every
payload is held against its checksum, and behind one that does not match the next one is looked
for that does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ffserve.engine import chunks
from ffserve.engine.checksum import checksum
from ffserve.engine.chunks import split_records
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
    PIECE_SIZE,
    UNKNOWN_LENGTH,
    Chunks,
    Encoder,
    ReadAt,
    read_exactly,
)
from ffserve.formats.recordio_codec import (
    COMPRESSIONS,
    DIALECTS,
    GO,
    GZIP,
    HEADER,
    MAGIC,
    NONE,
    PREFIX,
    PY,
    SNAPPY,
    U32_MAX,
    Dialect,
    Header,
    compress,
    decompress,
    dialect_of,
    frame,
    most_decoded,
    varint,
)

_MAGIC_BYTES = MAGIC.to_bytes(4, "little")
_MXNET_MAGIC = 0xCED7230A
_DIALECTS = (PY, GO)
"""As the C core numbers them."""
_LARGEST_CHUNK = 1 << 30
"""A writer's limit on the bytes of a chunk, prefixes of its records included."""
_RECORDS_ALLOWED, _RECORDS_A_BYTE = 1 << 20, 8
"""A file may have so many records, and so many more a byte: tables are made by what headers claim
before anything is decoded, and compression lets a few bytes stand for very many empty records."""
_SEARCHED_AGAIN = 8
"""A search for the next sound chunk reads at most so many times the file's size."""


class _Window:
    """Small reads of a file, going forward, as few large ones where they lie close."""

    _SMALLEST = 4096

    def __init__(self, read_at: ReadAt, size: int, path: str) -> None:
        self._read_at = read_at
        self._size = size
        self._path = path
        self._memory = bytearray()
        self._bytes = memoryview(self._memory)
        self._begin = 0
        self._reach = self._SMALLEST

    def get(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes, at most 64; fewer at the end of the file."""
        size = max(0, min(size, self._size - offset))
        window, begin = self.holding(offset, size)
        return bytes(window[offset - begin : offset - begin + size])

    def holding(self, offset: int, size: int) -> tuple[memoryview, int]:
        """Return bytes with those wanted among them, and where they begin.

        They are valid until the next call.
        """
        size = min(size, self._size - offset)
        if not 0 <= offset - self._begin <= len(self._bytes) - size:
            self._fill(offset)
        return self._bytes, self._begin

    def _fill(self, offset: int) -> None:
        near = 0 <= offset - self._begin <= 2 * len(self._bytes)
        self._reach = min(2 * self._reach, PIECE_SIZE) if near else self._SMALLEST
        if len(self._memory) < self._reach:
            self._memory = bytearray(self._reach)
        piece = memoryview(self._memory)[: min(self._reach, self._size - offset)]
        self._begin, self._bytes = offset, piece[:0]
        read_exactly(self._read_at, offset, piece, self._path)
        self._bytes = piece


class _Scan:
    """The way from header to header.

    `at` is where the next chunk begins; everything before it is in `table`. `problems`: of rows of
    the table that cannot be read.
    """

    def __init__(self, read_at: ReadAt, size: int, path: str) -> None:
        self.table = chunks.Walk(
            size, records_allowed=_RECORDS_ALLOWED, records_a_byte=_RECORDS_A_BYTE
        )
        self.problems: dict[int, FFServeError] = {}
        self._read_at = read_at
        self._size = size
        self._path = path
        self._window = _Window(read_at, size, path)

    @property
    def at(self) -> int:
        """Where the next chunk begins."""
        return self.table.at

    @property
    def dialect(self) -> Dialect | None:
        """Of the file, None before its first chunk."""
        number = self.table.dialect
        return None if number is None else _DIALECTS[number]

    @dialect.setter
    def dialect(self, dialect: Dialect | None) -> None:
        self.table.dialect = None if dialect is None else _DIALECTS.index(dialect)

    def strictly(self) -> None:
        """Go to the end of the file, or raise where that is not possible."""
        while self.at < self._size:
            window, base = self._window.holding(self.table.wanted, HEADER.size)
            if self.table.feed(window, base) == chunks.FAULT:
                self._enter(*self._look(self.at))

    def _enter(self, header: Header, decoded: int) -> None:
        """Take the chunk at `at` and go on behind it."""
        table, end = self.table, self.at + HEADER.size + header.size
        records = table.records + header.records
        if records > _RECORDS_ALLOWED + _RECORDS_A_BYTE * end:
            raise self._wrong(
                self.at,
                f"with it the first {end} bytes of the file claim {records} records",
                "a file of so many next to empty records is not read",
            )
        table.add(self.at, end, header.records, decoded, header.checksum, header.compressor)
        table.at = end

    def _leave_out(self, end: int, problem: FFServeError) -> None:
        """Enter what lies before `end` as one record that cannot be read."""
        self.problems[self.table.count] = problem
        self.table.add(self.at, self.at, 1, 0, 0, 0)
        self.table.at = end

    def tolerantly(self) -> None:
        """Go to the end of the file; leave out what lies between sound chunks."""
        start = self._next_sound(0)
        if start is None:
            self.dialect = None
        while self.at < self._size:
            try:
                header, decoded = self._look(self.at)
                problem: FFServeError | None = self._mismatch(self.at, header)
            except (FormatError, TruncatedError) as error:
                header, decoded, problem = Header(0, 0, 0, 0), 0, error
            if problem is None:
                self._enter(header, decoded)
                continue
            following = self._next_sound(self.at + 1)
            end = self._size if following is None else following
            if self.at + HEADER.size + header.size == end and header.records:
                # The header is as good as any: its records are known to be lost.
                self._enter(header, decoded)
            else:
                self._leave_out(end, problem)

    def tail_is_lost(self) -> bool:
        """Whether nothing complete follows `at`: no sound chunk, nothing that was one."""
        return self._next_sound(self.at + 1) is None

    def _look(self, at: int) -> tuple[Header, int]:
        """Return the header at a place, checked, and the decoded size that the payload tells."""
        head = self._window.get(at, HEADER.size)
        if not head.startswith(_MAGIC_BYTES[: len(head)]):
            raise self._no_chunk(at, head)
        if len(head) < HEADER.size:
            raise self._cut(at, f"only {len(head)} bytes of its header are there")
        words = HEADER.unpack(head)
        dialect = dialect_of(words)
        if self.dialect is None:
            self.dialect = dialect
        elif dialect is not self.dialect:
            raise self._wrong(
                at, f"its header is of the {dialect.name} dialect, the file's first of the other"
            )
        header = dialect.unpack(words)
        compression = dialect.compression(header.compressor)
        if compression is None:
            hint = "PaddlePaddle Fluid wrote such files; they are of neither dialect"
            raise self._wrong(at, f"compressor {header.compressor} is not known", hint)
        if header.size > self._size - at - HEADER.size:
            raise self._cut(
                at,
                f"its payload has {header.size} bytes, the file has only "
                f"{self._size - at - HEADER.size} more",
            )
        try:
            decoded = self._told(compression, at + HEADER.size, header.size)
        except ValueError as error:
            raise self._wrong(at, f"its payload is no {compression}: {error}") from None
        if decoded > min(most_decoded(compression, header.size), U32_MAX):
            raise self._wrong(
                at,
                f"its payload of {header.size} bytes claims {decoded} bytes, more than "
                f"{compression} can hold",
            )
        if not 0 < header.records <= decoded // PREFIX.size:
            raise self._wrong(
                at, f"its header counts {header.records} records in {decoded} decoded bytes"
            )
        return header, decoded

    def _told(self, compression: str, begin: int, size: int) -> int:
        """Return the decoded size that a payload tells by itself."""
        if compression == NONE:
            return size
        end = begin + size
        if compression == GZIP:
            if size < 18:
                raise ValueError("it is too short")
            return int.from_bytes(self._window.get(end - 4, 4), "little")
        assert self.dialect is not None
        if not self.dialect.framed:
            return varint(self._window.get(begin, min(5, size)))[0]
        decoded, at = 0, begin
        while at < end:
            frame_size, more = frame(self._window.get(at, min(13, end - at)))
            decoded += more
            at += frame_size
        if at != end:
            raise ValueError("a frame is cut")
        return decoded

    def _mismatch(self, at: int, header: Header) -> FFServeError | None:
        """Hold a payload against its checksum, reading it whole."""
        assert self.dialect is not None
        found, done = 0, 0
        piece = bytearray(min(PIECE_SIZE, header.size))
        while done < header.size:
            part = memoryview(piece)[: header.size - done]
            read_exactly(self._read_at, at + HEADER.size + done, part, self._path)
            found = checksum(self.dialect.checksum_kind, part, found)
            done += len(part)
        if found == header.checksum:
            return None
        return ChecksumError(
            f"{self.dialect.checksum_name} {found:08x}, expected {header.checksum:08x}",
            path=self._path,
            offset=at,
        )

    def _next_sound(self, start: int) -> int | None:
        """Return the first place from `start` on where a chunk stands whose checksum is right."""
        budget = _SEARCHED_AGAIN * self._size
        piece = bytearray(PIECE_SIZE)
        known = self.dialect
        while self._size - start > HEADER.size:
            part = memoryview(piece)[: self._size - start]
            read_exactly(self._read_at, start, part, self._path)
            at = piece.find(_MAGIC_BYTES, 0, len(part))
            while at >= 0:
                self.dialect = known
                try:
                    header, _ = self._look(start + at)
                    budget -= header.size
                    if budget >= 0 and self._mismatch(start + at, header) is None:
                        return start + at
                except FormatError:
                    pass
                at = piece.find(_MAGIC_BYTES, at + 1, len(part))
            start += len(part) - len(_MAGIC_BYTES) + 1
        self.dialect = known
        return None

    def _wrong(self, at: int, what: str, hint: str | None = None) -> FormatError:
        return FormatError(
            f"chunk {self.table.count}: {what}",
            path=self._path,
            offset=at,
            hint=hint or "the file is damaged; on_error='skip' reads what is left of it",
        )

    def _cut(self, at: int, what: str) -> TruncatedError:
        return TruncatedError(
            f"chunk {self.table.count}: {what}: its writer died, or the file was cut",
            path=self._path,
            offset=at,
            hint="on_error='skip' reads the chunks before it; appending with "
            "ffserve.recordio.File(path, 'a') cuts it off",
        )

    def _no_chunk(self, at: int, head: bytes) -> FormatError:
        if at:
            return self._wrong(at, f"no chunk begins here, but {head[:4].hex(' ')}")
        mxnet = head[:4] == _MXNET_MAGIC.to_bytes(4, "little")
        return FormatError(
            f"this is RecordIO of neither dialect (py: pyrecordio, go: PaddlePaddle's recordio): "
            f"it begins with {head[:4].hex(' ') or 'nothing'}",
            path=self._path,
            offset=at,
            hint="MXNet's RecordIO is another format" if mxnet else None,
        )


@dataclass
class RecordIOShard:
    """One RecordIO file, opened and checked."""

    path: str
    size: int
    count: int
    checksum_kind: int
    fingerprint: int
    chunks: Chunks
    dialect: Dialect | None
    """None for a file without a chunk."""
    checksums: NDArray[np.uint32]
    """Of each chunk, as stored."""
    compressors: NDArray[np.uint8]
    _problems: dict[int, FFServeError] = field(repr=False)
    _verify: bool = field(repr=False)
    format: str = "recordio"

    def load(
        self,
        offsets: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        checksums: NDArray[np.uint32],
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
        """Return dialect, number and compression of the chunks, and what they decode to."""
        used = np.unique(self.compressors).tolist() if self.dialect is not None else []
        names = [str(self.dialect.compression(k)) for k in used] if self.dialect else []
        return {
            "dialect": self.dialect.name if self.dialect else "none yet",
            "chunks": len(self.chunks),
            "compression": ", ".join(names) or "none yet",
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
                f"decoded {int(chunks.sizes[chunk])}: more than the limit of {size}",
                path=self.path,
                offset=int(chunks.begins[chunk]),
                hint="raise max_chunk_size if this file can be trusted",
            )
            chunks.sizes[chunk] = 0
            chunks.ends[chunk] = chunks.begins[chunk]

    def decode(
        self, chunk: int, extent: memoryview, into: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
        self, chunk: int, dialect: Dialect, extent: memoryview, into: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        chunks = self.chunks
        count = int(chunks.firsts[chunk + 1] - chunks.firsts[chunk])
        size = int(chunks.ends[chunk] - chunks.begins[chunk]) - HEADER.size
        if len(extent) != HEADER.size + size:
            raise TruncatedError(
                f"{len(extent)} bytes of it are there, it has {HEADER.size + size}",
                hint="the file was cut after it was opened",
            )
        expected = int(self.checksums[chunk])
        header = Header(count, expected, int(self.compressors[chunk]), size)
        if extent[: HEADER.size] != dialect.pack(header):
            raise ReadError(
                "its header changed since the file was opened",
                hint="do not write into a file in use; append, or write a new one and rename it",
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
                hint="it is damaged, or was not written by RecordIO",
            )
        return starts, lengths

    @staticmethod
    def _mismatch(
        payload: memoryview, found: int, expected: int, dialect: Dialect
    ) -> ChecksumError:
        fluid = dialect is PY and checksum(CHECKSUM_CRC32, payload) == expected
        return ChecksumError(
            f"its payload has the {dialect.checksum_name} {found:08x}, its header says "
            f"{expected:08x}",
            hint="it is a CRC-32 as PaddlePaddle Fluid writes it, whose files are of neither "
            "dialect"
            if fluid
            else "its bytes were damaged after they were written: restore the file, or leave "
            "these samples out with on_error='skip'",
        )


class RecordIOEncoder:
    """Writes RecordIO; keeps one chunk.

    Args: most: bytes of the records of a chunk, their prefixes not counted.
    """

    def __init__(self, dialect: Dialect, compression: str, most: int) -> None:
        self._dialect = dialect
        self._compression = compression
        self._most = most
        self._chunk = bytearray()
        self._sum = 0
        self._count = 0

    def head_size(self, count: int) -> int:
        """Return 0: a file begins with its first chunk."""
        return 0

    def head(self) -> Iterator[bytes | memoryview]:
        """Yield nothing."""
        return iter(())

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Take a record; return the chunk before it when that has no room for it."""
        size = len(payload)
        if size > self._most and self._dialect is not PY:
            raise UsageError(
                f"a sample of {size} bytes does not fit into a chunk of {self._most}",
                hint="raise max_chunk_size, or write the py dialect",
            )
        if size > U32_MAX - PREFIX.size:
            raise UsageError(f"a sample of {size} bytes is too large for RecordIO")
        full = self._sum + size > self._most
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
            raise UsageError("a chunk of these samples is too large for RecordIO")
        found = checksum(dialect.checksum_kind, payload)
        header = Header(self._count, found, dialect.compressor(self._compression), len(payload))
        return dialect.pack(header), payload


class RecordIO:
    """The format, as the registry knows it."""

    name = "recordio"
    suffixes: tuple[str, ...] = (".recordio", ".rio")

    def sniff(self, head: bytes, size: int) -> bool | None:
        """Tell a file by its magic. One without a byte has none, and is told by its name."""
        if 0 < len(head) < len(_MAGIC_BYTES) and _MAGIC_BYTES.startswith(head):
            return None
        return head.startswith(_MAGIC_BYTES)

    def open(
        self,
        read_at: ReadAt,
        size: int,
        path: str,
        *,
        verify: bool = True,
        tolerant: bool = False,
    ) -> RecordIOShard:
        """Scan the headers of a file.

        Args:    as ``Format.open``; ``verify`` holds payloads against their checksums when they
                 are decoded, ``tolerant`` all of them now.
        Raises:  TruncatedError when the last chunk is not whole; FormatError for what is no chunk,
                 and for a header that claims what cannot be.
        Cost:    reads the headers, up to 4 KiB at each; the frames' headers in the go dialect;
                 everything where chunks are small, and if tolerant. 37 bytes of memory a chunk.
        """
        scan = _Scan(read_at, size, path)
        if tolerant:
            scan.tolerantly()
        else:
            scan.strictly()
        return _shard(scan, size, path, verify)

    def complete(self, read_at: ReadAt, size: int, path: str) -> tuple[RecordIOShard, int]:
        """Scan a file that may end inside of a chunk, since its writer died.

        Returns: the shard of its complete chunks, and where they end.
        Raises:  FormatError when something is damaged that does not look like such an end.
        """
        scan = _Scan(read_at, size, path)
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
        """Return an encoder; ``n`` need not be known.

        Args:
            compression: "snappy" if left out, "gzip" or "none".
            dialect: "py" if left out, or "go".
            max_chunk_size: bytes of the records in a chunk; 1024 in py and 32 MiB in go if left
                out, as the originals have it.
        Raises:  UsageError for any other.
        """
        compression = SNAPPY if compression is None else compression
        if compression not in COMPRESSIONS:
            raise UsageError(
                f"recordio has no compression {compression!r}", hint=f"one of {COMPRESSIONS}"
            )
        chosen = DIALECTS.get("py" if dialect is None else dialect)
        if chosen is None:
            raise UsageError(
                f"recordio has no dialect {dialect!r}", hint=f"one of {tuple(DIALECTS)}"
            )
        most = chosen.default_chunk_size if max_chunk_size is None else max_chunk_size
        if isinstance(most, bool) or not isinstance(most, int) or not 0 < most <= _LARGEST_CHUNK:
            raise UsageError(f"max_chunk_size={most!r} is not from 1 to {_LARGEST_CHUNK} bytes")
        return RecordIOEncoder(chosen, compression, most)


def _shard(scan: _Scan, size: int, path: str, verify: bool) -> RecordIOShard:
    table, dialect = scan.table, scan.dialect
    identity = blake2b(struct.pack("<QQ", size, table.count), digest_size=8, person=b"recordio")
    for name in ("begins", "firsts", "checksums", "compressors"):
        identity.update(table.table(name).data)
    found = Chunks(*(table.table(name) for name in ("firsts", "begins", "ends", "sizes")))
    return RecordIOShard(
        path=path,
        size=size,
        count=table.records,
        checksum_kind=dialect.checksum_kind if dialect else 0,
        fingerprint=int.from_bytes(identity.digest(), "little"),
        chunks=found,
        dialect=dialect,
        checksums=table.table("checksums"),
        compressors=table.table("compressors"),
        _problems=scan.problems,
        _verify=verify,
    )


FORMAT = RecordIO()
