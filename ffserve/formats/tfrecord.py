"""The TFRecord format of TensorFlow. Compressed files: ``tfcompressed.py``, ``tfstream.py``.

A file is a sequence of frames, little-endian, without magic or table::

    0        u64      n, length of the payload
    8        u32      masked CRC-32C of those 8 bytes
    12       n bytes  payload
    12+n     u32      masked CRC-32C of the payload

with mask(c) = ((c >> 15) | (c << 17)) + 0xa282ead8 modulo 2^32. The offset of a record follows only
from all records before it, so opening a file is a scan from header to header: with large reads if
records are small, with one small read per record if they are large. ``index_file.py`` keeps the
result for later openings.

After a damaged header, the position of the next frame is unknown; a tolerant scan searches for it.
If the bytes between the damaged header and some position match the checksum at that position, they
are the payload, and the next frame begins after the checksum. This is proof, even if the payload
itself contains frames. If there is no such position, because that payload or the next header is
damaged too, the scan continues at the next frame that is intact.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ffserve.dtypes import Bools, Bytes, Int64s, UInt32s, UInt64s
from ffserve.engine import codec
from ffserve.engine.codec import FRAME_FOOTER_SIZE, FRAME_HEADER_SIZE, FRAME_SIZE
from ffserve.errors import GAP_CHECKSUM, ChecksumError, FFServeError, TruncatedError, UsageError
from ffserve.formats import tfcompressed
from ffserve.formats.base import (
    CHECKSUM_CRC32C,
    HEAD_SIZE,
    PIECE_SIZE,
    Admit,
    Encoder,
    Heads,
    ReadAt,
    SmallShards,
    TableShard,
    next_data,
    read_exactly,
    refuse_options,
    scan_fingerprint,
    sums,
    unbounded,
)
from ffserve.formats.tfcompressed import PASS_SIZES, SPAN_SIZE, CompressedShard, PassSizes
from ffserve.formats.tfstream import WBITS, compression_of

LARGE_SIZE = 128 << 10
"""For payloads of this size and more, the scan reads headers only."""
REACH = 64 << 20
"""Bytes after a damaged header in which the scan searches for the end of its payload."""
SEARCH_SIZE = 1 << 30
"""All searches of one scan may read this much plus eight times the file. Without a limit, a hostile
file could make the cost of the searches quadratic in its size."""

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")


@dataclass
class TFRecordShard(TableShard):
    """One uncompressed TFRecord file after its scan. Its checksums are the CRC-32C of payloads,
    unmasked."""

    format = "tfrecord"
    checksum_kind = CHECKSUM_CRC32C

    @property
    def kept(self) -> bytes:
        """Nothing: an index file keeps lengths and checksums only."""
        return b""

    def agrees(self, read_at: ReadAt, records: Int64s) -> bool:
        """Whether a file has these records; see `TFRecord.agrees`."""
        tables = self.offsets[records], self.lengths[records], self.checksums[records]
        return FORMAT.agrees(read_at, *tables)


class _Scan:
    """One scan of a file."""

    def __init__(
        self,
        read_at: ReadAt,
        size: int,
        path: str,
        *,
        verify: bool,
        tolerant: bool,
        admit: Admit,
        reach: int,
        search_size: int,
    ) -> None:
        self._read_at = read_at
        self._reach = reach
        self._size = size
        self._path = path
        self._tolerant = tolerant
        self._admit = admit
        self._scanner = codec.FrameScanner(size, verify=verify or tolerant)
        self._window = bytearray(0)
        self._listing = verify
        self._budget = 8 * size + search_size
        self.sound = True

    def run(self) -> tuple[UInt64s, UInt64s, UInt32s]:
        scanner, window = self._scanner, 64 << 10
        while True:
            want = FRAME_SIZE if scanner.last_length >= LARGE_SIZE else window
            window = min(2 * window, PIECE_SIZE)
            base = scanner.wanted
            stop = scanner.feed(self._bytes(base, want), base)
            self._admit(scanner.count)
            if stop == codec.FrameScanner.END:
                return scanner.tables()
            if stop != codec.FrameScanner.MORE and not self._go_on(stop):
                return scanner.tables()

    def _bytes(self, base: int, want: int) -> memoryview:
        """Return ``want`` bytes of the file from ``base`` on, or all up to its end."""
        want = min(want, self._size - base)
        if len(self._window) < want:
            self._window = bytearray(want)
        view = memoryview(self._window)[:want]
        read_exactly(self._read_at, base, view, self._path)
        return view

    def _go_on(self, stop: int) -> bool:
        """Raise the error of a fault, or skip to the next frame if tolerant; False at the end."""
        at, record = self._scanner.at, self._scanner.count
        kind: type[FFServeError] = TruncatedError
        if stop == codec.FrameScanner.CUT_HEADER:
            text = f"{self._size - at} bytes follow record {record - 1}, too few for a record"
            if not record:
                text = f"the file has {self._size} bytes, an empty record has {FRAME_SIZE}"
        elif stop == codec.FrameScanner.CUT_RECORD:
            length, _ = _HEADER.unpack(self._bytes(at, FRAME_HEADER_SIZE))
            text = (
                f"the file ends inside record {record}: it has {length} bytes, of which only "
                f"{self._size - at - FRAME_HEADER_SIZE} are left"
            )
        else:
            kind = ChecksumError
            text = (
                f"checksum mismatch in the length of record {record}; the position of the next "
                "record is unknown"
            )
        if not self._tolerant:
            hint = "restore the file, or read its intact samples with on_error='skip'"
            raise kind(text, path=self._path, offset=at, hint=hint)
        self.sound = False
        if stop == codec.FrameScanner.BAD_HEADER:
            if self._listing:
                self._scanner.add(at, 0, GAP_CHECKSUM)
            self._scanner.skip_to(self._find(at))
            return True
        # Longer than the rest of the file: reading it reports a truncated file.
        self._scanner.add(at, self._size - at + 1, 0)
        return False

    def _find(self, lost: int) -> int:
        """Return the offset of the frame after a damaged header; the file size if there is none."""
        if self._size - lost < FRAME_SIZE:
            return self._size
        for proven in (True, False):
            finder = codec.FrameFinder(self._size, lost, proven=proven)
            while self._budget > 0:
                base = finder.wanted
                # Headers of zeros are damaged, so none begins in a hole, but for its last bytes.
                if not proven and next_data(self._read_at, base) > base + PIECE_SIZE:
                    base = next_data(self._read_at, base) - FRAME_HEADER_SIZE
                    finder = codec.FrameFinder(self._size, base - 1, proven=False)
                window = self._bytes(base, PIECE_SIZE)
                self._budget -= len(window)
                if finder.feed(window, base):
                    if proven or self._sound(finder.at):
                        return finder.at
                    finder.refuse()
                elif base + len(window) == self._size or (proven and base > lost + self._reach):
                    break
        return self._size

    def _sound(self, at: int) -> bool:
        """Whether the payload of a frame matches its checksum."""
        length, _ = _HEADER.unpack(self._bytes(at, FRAME_HEADER_SIZE))
        self._budget -= length
        if self._budget < 0:
            return False
        begin, end, crc = at + FRAME_HEADER_SIZE, at + FRAME_HEADER_SIZE + length, 0
        for place in range(begin, end, PIECE_SIZE):
            crc = codec.crc32c(self._bytes(place, min(PIECE_SIZE, end - place)), crc)
        return _FOOTER.pack(codec.mask(crc)) == self._bytes(end, FRAME_FOOTER_SIZE)


def frame_header(length: int) -> bytes:
    """Return the header of a frame."""
    packed = struct.pack("<Q", length)
    return packed + _FOOTER.pack(codec.mask(codec.crc32c(packed)))


class TFRecordEncoder:
    """Encodes samples into frames."""

    def head_size(self, count: int) -> int:
        """Return 0; a file begins with its first record."""
        return 0

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Return one frame, without a copy of the payload."""
        footer = _FOOTER.pack(codec.mask(codec.crc32c(payload)))
        return (frame_header(len(payload)), payload, footer)

    def encode_batch(self, payloads: Bytes, edges: Int64s) -> Iterable[bytes | memoryview]:
        """Return the frames of all samples in one piece."""
        return (codec.frame_all(payloads, edges).data,)

    def tail(self) -> Iterable[bytes | memoryview]:
        """Return nothing; a file ends with its last record."""
        return ()

    def head(self) -> Iterator[bytes | memoryview]:
        """Return nothing."""
        return iter(())


class CompressedEncoder:
    """Encodes samples into one GZIP member or ZLIB stream of frames.

    Between two records, after ``SPAN_SIZE`` bytes of them, it makes a full flush: a reader can
    begin to decode there without the output before. Every decoder reads such a stream (RFC 1951:
    an empty stored block), and it is larger by about a hundredth. Members would do as well, but
    only in GZIP.
    """

    def __init__(self, compression: str) -> None:
        self._frames = TFRecordEncoder()
        self._stream = zlib.compressobj(wbits=WBITS[compression])
        self._size = 0
        """Bytes of records since the last flush."""

    def head_size(self, count: int) -> int:
        """Return 0; the header of the stream comes with its first bytes."""
        return 0

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Return the output of the compressor, often none."""
        encoded = []
        if self._size >= SPAN_SIZE:
            encoded.append(self._stream.flush(zlib.Z_FULL_FLUSH))
            self._size = 0
        encoded += [self._stream.compress(piece) for piece in self._frames.encode(payload)]
        self._size += FRAME_SIZE + len(payload)
        return encoded

    def tail(self) -> Iterable[bytes | memoryview]:
        """Return the rest of the stream."""
        return (self._stream.flush(),)

    def head(self) -> Iterator[bytes | memoryview]:
        """Return nothing."""
        return iter(())


class TFRecord:
    """The TFRecord format.

    Args: reach, search_size, sizes: bounds of a scan, and of a pass over a compressed file.
    """

    name = "tfrecord"
    suffixes = (
        *(".tfrecord", ".tfrecords", ".tfrec"),
        *(".tfrecord.gz", ".tfrecords.gz", ".tfrecord.zlib", ".tfrecords.zlib"),
        *(".tfrecord.deflate", ".tfrecords.deflate"),
    )

    def __init__(
        self,
        reach: int = REACH,
        search_size: int = SEARCH_SIZE,
        sizes: PassSizes = PASS_SIZES,
    ) -> None:
        self._reach, self._search_size, self._sizes = reach, search_size, sizes

    def sniff(self, head: bytes, size: int) -> bool | None:
        """Detect a file, compressed or not, by the checksum of its first record's length.

        An empty file has no records and cannot be detected.
        """
        return codec.frame_header_is_valid(head) or compression_of(head) is not None

    def open(
        self,
        read_at: ReadAt,
        size: int,
        path: str,
        *,
        verify: bool = True,
        tolerant: bool = False,
        admit: Admit = unbounded,
    ) -> TFRecordShard | CompressedShard:
        """Scan the frames of a file; payloads are not verified, except in a compressed file.

        Args:    as ``Format.open``; ``verify`` checks the lengths. Without ``verify``, a tolerant
                 scan skips damage without a record for it, because its error would need a
                 checksum.
        Raises:  ChecksumError: a damaged header. TruncatedError: a record longer than the rest of
                 the file, or 1 to 15 bytes left at its end. FormatError: damaged compression.
        Cost:    one read of the file; from 128 KiB per record on, one small read per record. 20
                 bytes of memory per record. A compressed file is decompressed once; up to 32 KiB
                 of memory, usually less than 4, per MiB of records.
        Source:  tensorflow/core/lib/io/record_writer.h.
        """
        head = bytearray(min(size, HEAD_SIZE))
        if head:
            read_exactly(read_at, 0, memoryview(head), path)
        compression = compression_of(bytes(head))
        if compression is not None:
            return tfcompressed.scan(
                read_at,
                size,
                path,
                compression,
                verify=verify,
                tolerant=tolerant,
                admit=admit,
                sizes=self._sizes,
            )
        scan = _Scan(
            read_at,
            size,
            path,
            verify=verify,
            tolerant=tolerant,
            admit=admit,
            reach=self._reach,
            search_size=self._search_size,
        )
        tables = scan.run()
        return TFRecordShard(path, size, *tables, sound=scan.sound)

    def open_small(self, heads: Heads, paths: list[str], *, verify: bool = True) -> SmallShards:
        """Open files that are whole in their heads, and not compressed."""
        found = codec.small_tfrecord(heads.bytes, heads.got, heads.sizes)
        return self.small_shards(*found, heads.sizes)

    def small_shards(
        self,
        done: Bools,
        counts: Int64s,
        tables: codec.Tables,
        sizes: Int64s,
    ) -> SmallShards:
        """Return shards that were opened together. Args: as of `SmallShards`; sizes of files."""
        ends = np.cumsum(counts).tolist()
        _, lengths, checksums = tables
        fingerprints = [
            scan_fingerprint(
                "tfrecord", lengths[end - count : end], checksums[end - count : end], size
            )
            for end, count, size in zip(ends, counts.tolist(), sizes.tolist(), strict=True)
        ]
        kinds = [CHECKSUM_CRC32C] * len(sizes)
        return SmallShards(done, counts, fingerprints, kinds, sums(lengths, counts), *tables)

    def restore(
        self,
        lengths: UInt64s,
        checksums: UInt32s,
        kept: bytes,
        size: int,
        path: str,
    ) -> TFRecordShard | CompressedShard | None:
        """Return the shard of an earlier scan of an intact file.

        Args:    lengths, checksums: of the records' payloads; the shard keeps the arrays. kept: of
                 a compressed file, see ``CompressedShard.kept``.
        Returns: None if such records do not fill a file of ``size`` bytes.
        Cost:    one pass over the lengths.
        """
        if kept:
            return tfcompressed.restore(lengths, checksums, kept, size, path)
        if len(lengths) > size // FRAME_SIZE or (lengths > np.uint64(size)).any():
            return None
        ends = np.cumsum(lengths + np.uint64(FRAME_SIZE))
        wrapped = (ends[1:] < ends[:-1]).any() if len(ends) else False
        if wrapped or (int(ends[-1]) if len(ends) else 0) != size:
            return None
        offsets = ends - lengths - np.uint64(FRAME_FOOTER_SIZE)
        return TFRecordShard(path, size, offsets, lengths, checksums)

    def agrees(
        self,
        read_at: ReadAt,
        offsets: UInt64s,
        lengths: UInt64s,
        checksums: UInt32s,
    ) -> bool:
        """Whether a file has records with these payloads.

        Args:    offsets, lengths, checksums: of the payloads, as a scan returns them.
        Cost:    two small reads per record, of its header and of its checksum.
        """
        frame = memoryview(bytearray(FRAME_SIZE))
        header, footer = frame[:FRAME_HEADER_SIZE], frame[FRAME_HEADER_SIZE:]
        rows = zip(offsets.tolist(), lengths.tolist(), checksums.tolist(), strict=True)
        for offset, length, checksum in rows:
            got = read_at(offset - FRAME_HEADER_SIZE, header) + read_at(offset + length, footer)
            expected = frame_header(length) + _FOOTER.pack(codec.mask(checksum))
            if got != FRAME_SIZE or frame != expected:
                return False
        return True

    def writer(
        self,
        *,
        n: int | None = None,
        compression: str | None = None,
        dialect: str | None = None,
        max_chunk_size: int | None = None,
    ) -> Encoder:
        """Return an encoder; ``n`` may be None."""
        refuse_options(self.name, {"dialect": dialect, "max_chunk_size": max_chunk_size})
        if compression in (None, "none"):
            return TFRecordEncoder()
        if compression not in WBITS:
            raise UsageError(
                f"tfrecord does not support compression={compression!r}",
                hint=f"use one of {', '.join(WBITS)}",
            )
        return CompressedEncoder(compression)


FORMAT = TFRecord()
