"""The way through a RecordIO file, from chunk to chunk.

The scan runs in C (``engine/codec.c``) over all that is sound; at what is not it stops, and
``Scan._look`` finds out what that is. The two agree (``tests/test_recordio_walk.py``). All that a
header claims is held against the bytes that are there: the payload against the file, the decoded
size against what the compression can do at best, the number of records against the decoded size.

A header has no checksum of its own. So a file that was opened tolerantly is read whole, every
payload is held against its checksum, and behind one that does not match the next one is looked
for that does.
"""

from __future__ import annotations

from ffserve.engine import codec
from ffserve.engine.codec import checksum
from ffserve.errors import ChecksumError, FFServeError, FormatError, TruncatedError
from ffserve.formats.base import PIECE_SIZE, ReadAt, read_exactly
from ffserve.formats.recordio_codec import (
    GO,
    GZIP,
    HEADER,
    MAGIC,
    NONE,
    PREFIX,
    PY,
    U32_MAX,
    Dialect,
    Header,
    dialect_of,
    frame,
    most_decoded,
    varint,
)

MAGIC_BYTES = MAGIC.to_bytes(4, "little")
_MXNET_MAGIC = 0xCED7230A
_DIALECTS = (PY, GO)
"""As the C core numbers them."""
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


class Scan:
    """The way from header to header.

    `at` is where the next chunk begins; everything before it is in `table`. `problems`: of rows of
    the table that cannot be read.
    """

    def __init__(self, read_at: ReadAt, size: int, path: str) -> None:
        self.table = codec.ChunkScanner(
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
            if self.table.feed(window, base) == codec.ChunkScanner.FAULT:
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
        if not head.startswith(MAGIC_BYTES[: len(head)]):
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
            at = piece.find(MAGIC_BYTES, 0, len(part))
            while at >= 0:
                self.dialect = known
                try:
                    header, _ = self._look(start + at)
                    budget -= header.size
                    if budget >= 0 and self._mismatch(start + at, header) is None:
                        return start + at
                except FormatError:
                    pass
                at = piece.find(MAGIC_BYTES, at + 1, len(part))
            start += len(part) - len(MAGIC_BYTES) + 1
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
