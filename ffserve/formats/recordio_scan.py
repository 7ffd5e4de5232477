"""Scan of the chunk headers of a RecordIO file.

The scanner in C (engine/records/codec.c) has the rules: every number in a header is checked, the
payload against the file size, the decoded size against the best possible compression, the number of
records against the decoded size. It stops at a fault, which becomes an error here.

A header has no checksum of its own. So a tolerant scan reads the whole file, verifies every payload
against its checksum, and after a mismatch searches for the next chunk with a matching checksum.
"""

from __future__ import annotations

import mmap
from functools import cached_property

from ffserve.engine.codec import ChunkScanner, checksum
from ffserve.errors import ChecksumError, FFServeError, FormatError, TruncatedError
from ffserve.formats.base import (
    PIECE_SIZE,
    Admit,
    ReadAt,
    next_data,
    read_exactly,
    unbounded,
)
from ffserve.formats.recordio_codec import (
    GO,
    GZIP,
    HEADER,
    MAGIC,
    PY,
    Dialect,
    Header,
)

MAGIC_BYTES = MAGIC.to_bytes(4, "little")
_MXNET_MAGIC = 0xCED7230A
DIALECTS_BY_NUMBER = (PY, GO)
"""In the numbering of the C core."""
_RECORDS_ALLOWED, _RECORDS_PER_BYTE = 1 << 20, 8
"""A file may have _RECORDS_ALLOWED records, and _RECORDS_PER_BYTE for each of its bytes. Tables are
allocated by what headers claim, and a few compressed bytes can decode to very many empty
records."""
_CHUNK_TABLE_SIZE, _PROBLEM_SIZE = 64, 2048
"""Bytes that a shard keeps for a chunk, and for a place that a tolerant scan has skipped."""
_SEARCHED_AGAIN = 8
"""Searches for intact chunks read at most this many times the size of the file."""


# Large buffers are mapped: they return to the system when a scan ends, while malloc keeps memory of
# its own for each thread.


class _Window:
    """Serves small forward reads of a file from few large ones if they are close together."""

    _SMALLEST = 4096
    _WHOLE = 64 << 10
    """Files up to this size are read at once."""

    def __init__(self, read_at: ReadAt, size: int, path: str) -> None:
        self._read_at = read_at
        self._size = size
        self._path = path
        self._memory: bytearray | mmap.mmap = bytearray()
        self._bytes = memoryview(self._memory)
        self._begin = 0
        self._reach = self._SMALLEST

    def get(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes, at most 64; fewer at the end of the file."""
        size = max(0, min(size, self._size - offset))
        window, begin = self.holding(offset, size)
        return bytes(window[offset - begin : offset - begin + size])

    def holding(self, offset: int, size: int) -> tuple[memoryview, int]:
        """Return a buffer that contains the given bytes, and its offset in the file.

        The buffer is valid until the next call.
        """
        size = min(size, self._size - offset)
        if not 0 <= offset - self._begin <= len(self._bytes) - size:
            self._fill(offset)
        return self._bytes, self._begin

    def _fill(self, offset: int) -> None:
        near = 0 <= offset - self._begin <= 2 * len(self._bytes)
        self._reach = min(2 * self._reach, PIECE_SIZE) if near else self._SMALLEST
        if self._size <= self._WHOLE:
            self._reach = self._size
        if len(self._memory) < self._reach:
            small = self._reach <= self._WHOLE
            self._memory = bytearray(self._reach) if small else mmap.mmap(-1, PIECE_SIZE)
        piece = memoryview(self._memory)[: min(self._reach, self._size - offset)]
        self._begin, self._bytes = offset, piece[:0]
        read_exactly(self._read_at, offset, piece, self._path)
        self._bytes = piece


class Scan:
    """A scan from header to header.

    at: offset of the next chunk; all chunks before it are in `table`. problems: errors of the rows
    of the table that cannot be read.
    """

    def __init__(self, read_at: ReadAt, size: int, path: str, admit: Admit = unbounded) -> None:
        self._admit = admit
        self.table = ChunkScanner(
            size, records_allowed=_RECORDS_ALLOWED, records_per_byte=_RECORDS_PER_BYTE
        )
        self.problems: dict[int, FFServeError] = {}
        self._read_at = read_at
        self._size = size
        self._path = path
        self._window = _Window(read_at, size, path)

    @cached_property
    def _payload(self) -> mmap.mmap:
        """A piece of a chunk's payload."""
        return mmap.mmap(-1, PIECE_SIZE)

    @cached_property
    def _searched(self) -> mmap.mmap:
        """A piece of the file in which chunks are searched for."""
        return mmap.mmap(-1, PIECE_SIZE)

    @property
    def at(self) -> int:
        """Offset of the next chunk."""
        return self.table.at

    @property
    def dialect(self) -> Dialect | None:
        """Dialect of the file; None before its first chunk."""
        number = self.table.dialect
        return None if number is None else DIALECTS_BY_NUMBER[number]

    @dialect.setter
    def dialect(self, dialect: Dialect | None) -> None:
        self.table.dialect = None if dialect is None else DIALECTS_BY_NUMBER.index(dialect)

    def _feed(self, *, single: bool = False) -> int:
        window, base = self._window.holding(self.table.wanted, HEADER.size)
        found = self.table.feed(window, base, single=single)
        self._charge()
        return found

    def _charge(self) -> None:
        """Ask whether the tables found so far may be kept."""
        kept = _CHUNK_TABLE_SIZE * self.table.count + _PROBLEM_SIZE * len(self.problems)
        self._admit(self.table.records, kept)

    def strictly(self) -> None:
        """Scan to the end of the file; raise at the first fault."""
        while self.at < self._size:
            if self._feed() == ChunkScanner.FAULT:
                raise self._fault(self.at)

    def _add(self, header: Header, decoded: int) -> None:
        """Add the chunk at `at` to the table and advance."""
        table, end = self.table, self.at + HEADER.size + header.size
        table.add(self.at, end, header.records, decoded, header.checksum, header.compressor)
        table.at = end
        self._charge()

    def _skip(self, end: int, problem: FFServeError) -> None:
        """Add the bytes before `end` to the table as one record that cannot be read."""
        self.problems[self.table.count] = problem
        self.table.add(self.at, self.at, 1, 0, 0, 0)
        self.table.at = end

    def tolerantly(self) -> None:
        """Scan to the end of the file; skip damage between intact chunks."""
        start = self._next_intact(0)
        if start is None:
            self.dialect = None
        while self.at < self._size:
            try:
                header, decoded = self._examine(self.at)
                problem: FFServeError | None = self._mismatch(self.at, header)
            except FormatError as error:
                if self.table.fault == ChunkScanner.LIMIT:
                    raise
                header, decoded, problem = Header(0, 0, 0, 0), 0, error
            if problem is None:
                self._add(header, decoded)
                continue
            following = self._next_intact(self.at + 1)
            end = self._size if following is None else following
            if self.at + HEADER.size + header.size == end and header.records:
                # The header ends at an intact chunk, so it is right: its records are lost.
                self._add(header, decoded)
            else:
                self._skip(end, problem)

    def tail_is_lost(self) -> bool:
        """Whether no intact chunk follows `at`."""
        return self._next_intact(self.at + 1) is None

    def _examine(self, at: int) -> tuple[Header, int]:
        """Return the header at an offset and the decoded size of the payload; raise if the chunk
        is not valid."""
        table, resume = self.table, self.at
        table.at = at
        while (found := self._feed(single=True)) == ChunkScanner.MORE:
            pass
        table.at = resume
        if found == ChunkScanner.FAULT:
            raise self._fault(at)
        return Header(*table.header), table.decoded

    def _fault(self, at: int) -> FormatError:
        """Return the error for the chunk at an offset, which the scanner has just refused."""
        fault = self.table.fault
        if fault == ChunkScanner.NO_HEADER:
            head = self._window.get(at, HEADER.size)
            if not head.startswith(MAGIC_BYTES[: len(head)]):
                return self._not_a_chunk(at, head)
            return self._truncated(at, f"the file has only {len(head)} bytes of its header")
        dialect = self.dialect
        assert dialect is not None
        if fault == ChunkScanner.DIALECT:
            other = GO if dialect is PY else PY
            return self._wrong(
                at, f"its header has dialect {other.name}, unlike the chunks before it"
            )
        header, decoded = Header(*self.table.header), self.table.decoded
        if fault == ChunkScanner.COMPRESSOR:
            hint = "PaddlePaddle Fluid writes such files; its format is not supported"
            return self._wrong(at, f"unknown compressor {header.compressor}", hint)
        if fault == ChunkScanner.CUT:
            return self._truncated(
                at,
                f"the file has only {self._size - at - HEADER.size} of the {header.size} bytes of "
                "its payload",
            )
        compression = dialect.compression(header.compressor)
        if fault == ChunkScanner.PAYLOAD:
            reason = "invalid length at its beginning"
            if compression == GZIP:
                reason = "it is too short"
            elif dialect.framed:
                reason = f"invalid frame at byte {self.table.examined} of the file"
            return self._wrong(at, f"invalid {compression} payload: {reason}")
        if fault == ChunkScanner.SIZE:
            return self._wrong(
                at,
                f"its payload of {header.size} bytes claims {decoded} decoded bytes, more than "
                f"{compression} allows",
            )
        if fault == ChunkScanner.RECORDS:
            return self._wrong(
                at, f"its header counts {header.records} records in {decoded} decoded bytes"
            )
        assert fault == ChunkScanner.LIMIT
        end = at + HEADER.size + header.size
        return self._wrong(
            at,
            f"the first {end} bytes of the file claim {self.table.records + header.records} "
            "records, more than allowed",
            "the file is damaged or hostile; files with this many empty records are refused",
        )

    def _mismatch(self, at: int, header: Header) -> FFServeError | None:
        """Read a payload and verify its checksum; return the error for a mismatch."""
        assert self.dialect is not None
        found, done = 0, 0
        while done < header.size:
            part = memoryview(self._payload)[: header.size - done]
            read_exactly(self._read_at, at + HEADER.size + done, part, self._path)
            found = checksum(self.dialect.checksum_kind, part, found)
            done += len(part)
        if found == header.checksum:
            return None
        return ChecksumError(
            f"checksum mismatch: the header stores {self.dialect.checksum_name} "
            f"{header.checksum:08x}, the payload gives {found:08x}",
            path=self._path,
            offset=at,
            hint="restore the file from a copy",
        )

    def _next_intact(self, start: int) -> int | None:
        """Return the offset of the next chunk with a matching checksum, or None."""
        budget = _SEARCHED_AGAIN * self._size
        piece = self._searched
        known = self.dialect
        while self._size - start > HEADER.size:
            data = next_data(self._read_at, start)
            if data > start + PIECE_SIZE:  # no chunk begins in a hole
                start = data
                continue
            part = memoryview(piece)[: self._size - start]
            read_exactly(self._read_at, start, part, self._path)
            at = piece.find(MAGIC_BYTES, 0, len(part))
            while at >= 0:
                self.dialect = known
                try:
                    header, _ = self._examine(start + at)
                    budget -= header.size
                    if budget >= 0 and self._mismatch(start + at, header) is None:
                        return start + at
                except FormatError:
                    pass
                at = piece.find(MAGIC_BYTES, at + 1, len(part))
            start += len(part) - len(MAGIC_BYTES) + 1
        self.dialect = known
        return None

    def _wrong(self, at: int, reason: str, hint: str | None = None) -> FormatError:
        return FormatError(
            f"chunk {self.table.count}: {reason}",
            path=self._path,
            offset=at,
            hint=hint
            or "restore the file from a copy, or read its intact samples with on_error='skip'",
        )

    def _truncated(self, at: int, reason: str) -> TruncatedError:
        return TruncatedError(
            f"chunk {self.table.count} is incomplete: {reason}",
            path=self._path,
            offset=at,
            hint="the writer died or the file was truncated: read the chunks before it with "
            "on_error='skip', or cut it off with ffserve.recordio.File(path, 'a')",
        )

    def _not_a_chunk(self, at: int, head: bytes) -> FormatError:
        if at:
            return self._wrong(at, f"expected a chunk, found bytes {head[:4].hex(' ')}")
        mxnet = head[:4] == _MXNET_MAGIC.to_bytes(4, "little")
        return FormatError(
            "not a RecordIO file of either dialect (py: pyrecordio, go: PaddlePaddle): it begins "
            f"with bytes {head[:4].hex(' ')}",
            path=self._path,
            offset=at,
            hint="MXNet's RecordIO is another format, which ffserve does not support"
            if mxnet
            else "check that this is a RecordIO file",
        )
