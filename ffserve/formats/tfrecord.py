"""TFRecord, the format of TensorFlow, as plain files; compressed ones are in ``tfstream.py``.

Little-endian frames, one after the other, without magic or table::

    0        u64      n, length of the payload
    8        u32      masked CRC-32C of those 8 bytes
    12       n bytes  payload
    12+n     u32      masked CRC-32C of the payload

with mask(c) = ((c >> 15) | (c << 17)) + 0xa282ead8 modulo 2^32. Where a record lies is known only
to who walked over all records before it, so opening a file is a walk from header to header: in
large reads where records are small, from place to place where they are large. What a walk over a
sound file found is the same as long as the file is; ``index_file.py`` keeps it.

A damaged header loses the frames behind it. A tolerant walk finds them again. The next frame
begins where the payload read so far matches the checksum in front of it: that is proof, also when
a payload holds frames itself. Only if no place does, because that payload or the next header is
damaged as well, the next frame is taken that is sound itself.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from ffserve.engine import codec
from ffserve.engine.codec import FRAME_FOOTER_SIZE, FRAME_HEADER_SIZE, FRAME_SIZE
from ffserve.errors import GAP_CHECKSUM, ChecksumError, FFServeError, TruncatedError, UsageError
from ffserve.formats.base import (
    CHECKSUM_CRC32C,
    HEAD_SIZE,
    PIECE_SIZE,
    Encoder,
    ReadAt,
    read_exactly,
    refuse_options,
)
from ffserve.formats.tfstream import WBITS, InOrderOnlyError, compression_of

LARGE_SIZE = 128 << 10
"""From this payload on the walk reads the next header alone instead of everything up to it."""
FIRST_WINDOW = 64 << 10
REACH = 64 << 20
"""So far behind a damaged header the next frame is looked for that its payload proves."""
SEARCH_SIZE = 1 << 30
"""Searches of one walk may read this much, and eight times the file, before they give up: a file
made to be searched (headers that claim what follows them) would cost its size squared."""

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")


@dataclass
class TFRecordShard:
    """One plain TFRecord file, walked over."""

    path: str
    size: int
    count: int
    fingerprint: int
    offsets: NDArray[np.uint64] = field(repr=False)
    lengths: NDArray[np.uint64] = field(repr=False)
    checksums: NDArray[np.uint32] = field(repr=False)
    """CRC-32C, unmasked."""
    sound: bool = True
    """Whether a tolerant walk left nothing out."""
    format: str = "tfrecord"
    checksum_kind: int = CHECKSUM_CRC32C

    def load(
        self,
        offsets: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        checksums: NDArray[np.uint32],
    ) -> None:
        """Fill the caller's arrays.

        Args:    offsets, lengths, checksums: arrays of ``count`` entries, overwritten.
        Raises:  UsageError for arrays of another shape.
        """
        for name, into, table in (
            ("offsets", offsets, self.offsets),
            ("lengths", lengths, self.lengths),
            ("checksums", checksums, self.checksums),
        ):
            if into.shape != (self.count,):
                raise UsageError(f"{name} has shape {into.shape}, ({self.count},) is needed")
            into[:] = table


class _Scan:
    """One walk over a file."""

    def __init__(
        self, read_at: ReadAt, size: int, path: str, *, verify: bool, tolerant: bool
    ) -> None:
        self._read_at = read_at
        self._size = size
        self._path = path
        self._tolerant = tolerant
        self._walk = codec.FrameScanner(size, verify=verify or tolerant)
        self._window = bytearray(0)
        self._listing = verify
        self._budget = 8 * size + SEARCH_SIZE
        self.sound = True

    def run(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]:
        walk, window = self._walk, FIRST_WINDOW
        while True:
            want = FRAME_SIZE if walk.last_length >= LARGE_SIZE else window
            window = min(2 * window, PIECE_SIZE)
            base = walk.wanted
            why = walk.feed(self._bytes(base, want), base)
            if why == codec.FrameScanner.END:
                return walk.tables()
            if why != codec.FrameScanner.MORE and not self._go_on(why):
                return walk.tables()

    def _bytes(self, base: int, want: int) -> memoryview:
        """Return the file's bytes from ``base`` on, ``want`` of them or what there is."""
        want = min(want, self._size - base)
        if len(self._window) < want:
            self._window = bytearray(want)
        view = memoryview(self._window)[:want]
        read_exactly(self._read_at, base, view, self._path)
        return view

    def _go_on(self, why: int) -> bool:
        """Raise what the walk met, or note it and go to the next frame; False: there is none."""
        at, record = self._walk.at, self._walk.count
        kind: type[FFServeError] = TruncatedError
        if why == codec.FrameScanner.CUT_HEADER:
            text = f"{self._size - at} bytes are left behind record {record - 1}: too few for one"
            if not record:
                text = f"the file has {self._size} bytes, a record alone has {FRAME_SIZE} at least"
        elif why == codec.FrameScanner.CUT_RECORD:
            length, _ = _HEADER.unpack(self._bytes(at, FRAME_HEADER_SIZE))
            text = (
                f"record {record} says that it has {length} bytes, but only "
                f"{self._size - at - FRAME_HEADER_SIZE} are left: the file was cut"
            )
        else:
            kind = ChecksumError
            text = (
                f"the length of record {record} does not match its checksum, so that nothing "
                "tells where the next one begins"
            )
        if not self._tolerant:
            hint = 'take another copy of it, or read what is whole with on_error="skip"'
            raise kind(text, path=self._path, offset=at, hint=hint)
        self.sound = False
        if why == codec.FrameScanner.BAD_HEADER:
            if self._listing:
                self._walk.add(at, 0, GAP_CHECKSUM)
            self._walk.skip_to(self._find(at))
            return True
        # Longer than the rest of the file: whoever reads it is told that the file was cut.
        self._walk.add(at, self._size - at + 1, 0)
        return False

    def _find(self, lost: int) -> int:
        """Return where the frame behind a damaged header begins; the file's size for nowhere."""
        if self._size - lost < FRAME_SIZE:
            return self._size
        for proven in (True, False):
            finder = codec.FrameFinder(self._size, lost, proven=proven)
            while self._budget > 0:
                base = finder.wanted
                window = self._bytes(base, PIECE_SIZE)
                self._budget -= len(window)
                if finder.feed(window, base):
                    if proven or self._sound(finder.at):
                        return finder.at
                    finder.refuse()
                elif base + len(window) == self._size or (proven and base > lost + REACH):
                    break
        return self._size

    def _sound(self, at: int) -> bool:
        """Whether a frame's payload matches its checksum."""
        length, _ = _HEADER.unpack(self._bytes(at, FRAME_HEADER_SIZE))
        self._budget -= length
        if self._budget < 0:
            return False
        begin, end, crc = at + FRAME_HEADER_SIZE, at + FRAME_HEADER_SIZE + length, 0
        for place in range(begin, end, PIECE_SIZE):
            crc = codec.crc32c(self._bytes(place, min(PIECE_SIZE, end - place)), crc)
        return _FOOTER.pack(codec.mask(crc)) == self._bytes(end, FRAME_FOOTER_SIZE)


def frame_header(length: int) -> bytes:
    """Return what stands in front of a payload."""
    packed = struct.pack("<Q", length)
    return packed + _FOOTER.pack(codec.mask(codec.crc32c(packed)))


class TFRecordEncoder:
    """Encodes samples into frames."""

    def head_size(self, count: int) -> int:
        """Return 0: nothing stands in front of the first record."""
        return 0

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Return one frame; the payload itself is not copied."""
        footer = _FOOTER.pack(codec.mask(codec.crc32c(payload)))
        return (frame_header(len(payload)), payload, footer)

    def encode_batch(
        self, payloads: NDArray[np.uint8], edges: NDArray[np.int64]
    ) -> Iterable[bytes | memoryview]:
        """Return the frames of all, in one piece."""
        return (codec.frame_all(payloads, edges).data,)

    def tail(self) -> Iterable[bytes | memoryview]:
        """Return nothing: nothing follows the last record."""
        return ()

    def head(self) -> Iterator[bytes | memoryview]:
        """Return nothing."""
        return iter(())


class CompressedEncoder:
    """Encodes samples into one GZIP member or ZLIB stream of frames."""

    def __init__(self, compression: str) -> None:
        self._frames = TFRecordEncoder()
        self._stream = zlib.compressobj(wbits=WBITS[compression])

    def head_size(self, count: int) -> int:
        """Return 0: the stream's own header comes with its first bytes."""
        return 0

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Return what the compressor gives, often nothing."""
        return [self._stream.compress(piece) for piece in self._frames.encode(payload)]

    def tail(self) -> Iterable[bytes | memoryview]:
        """Return the rest of the stream."""
        return (self._stream.flush(),)

    def head(self) -> Iterator[bytes | memoryview]:
        """Return nothing."""
        return iter(())


class TFRecord:
    """The format itself."""

    name = "tfrecord"
    suffixes = (
        *(".tfrecord", ".tfrecords", ".tfrec"),
        *(".tfrecord.gz", ".tfrecords.gz", ".tfrecord.zlib", ".tfrecords.zlib"),
    )

    def sniff(self, head: bytes, size: int) -> bool | None:
        """Tell a TFRecord file, compressed or not, by the checksum of its first record's length.

        An empty file is a sound one of no records, but nothing tells it from any other.
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
    ) -> TFRecordShard:
        """Walk over a file's frames; payloads are not looked at.

        Args:    as ``Format.open``; ``verify`` holds the lengths' checksums against them. What
                 ``tolerant`` leaves out behind a damaged header is left out unseen without
                 ``verify``, since nothing could tell it from an empty record.
        Raises:  ChecksumError where a header is damaged; TruncatedError for a record longer than
                 the rest of the file, and for 1 to 15 bytes that are left at its end;
                 InOrderOnlyError, a UsageError, for a compressed file.
        Cost:    one read of the file where records are small, one small read a record from
                 128 KiB on; 20 bytes of memory a record.
        Source:  tensorflow/core/lib/io/record_writer.h.
        """
        head = bytearray(min(size, HEAD_SIZE))
        if head:
            read_exactly(read_at, 0, memoryview(head), path)
        if compression_of(bytes(head)) is not None:
            raise InOrderOnlyError.of(path)
        scan = _Scan(read_at, size, path, verify=verify, tolerant=tolerant)
        return _shard(*scan.run(), size, path, scan.sound)

    def restore(
        self, lengths: NDArray[np.uint64], checksums: NDArray[np.uint32], size: int, path: str
    ) -> TFRecordShard | None:
        """Return the shard that an earlier walk over a sound file found.

        Args:    lengths, checksums: of the records' payloads; the arrays are kept.
        Returns: None when such records do not make a file of ``size`` bytes.
        Cost:    one pass over the lengths.
        """
        if len(lengths) > size // FRAME_SIZE or (lengths > np.uint64(size)).any():
            return None
        ends = np.cumsum(lengths + np.uint64(FRAME_SIZE))
        wrapped = (ends[1:] < ends[:-1]).any() if len(ends) else False
        if wrapped or (int(ends[-1]) if len(ends) else 0) != size:
            return None
        return _shard(ends - lengths - np.uint64(FRAME_FOOTER_SIZE), lengths, checksums, size, path)

    def writer(
        self,
        *,
        n: int | None = None,
        compression: str | None = None,
        dialect: str | None = None,
        max_chunk_size: int | None = None,
    ) -> Encoder:
        """Return an encoder; ``n`` need not be known."""
        refuse_options(self.name, {"dialect": dialect, "max_chunk_size": max_chunk_size})
        if compression in (None, "none"):
            return TFRecordEncoder()
        if compression not in WBITS:
            raise UsageError(
                f"TFRecord has no compression {compression!r}", hint=f"it has {', '.join(WBITS)}"
            )
        return CompressedEncoder(compression)


def _shard(
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    checksums: NDArray[np.uint32],
    size: int,
    path: str,
    sound: bool = True,
) -> TFRecordShard:
    sums = [
        function(np.ascontiguousarray(table).data)
        for table in (lengths, checksums)
        for function in (zlib.crc32, zlib.adler32)
    ]
    identity = struct.pack("<4IQQ", *sums, len(lengths), size)
    return TFRecordShard(
        path=path,
        size=size,
        count=len(lengths),
        fingerprint=int.from_bytes(
            blake2b(identity, digest_size=8, person=b"tfrecord").digest(), "little"
        ),
        offsets=offsets,
        lengths=lengths,
        checksums=checksums,
        sound=sound,
    )


FORMAT = TFRecord()
