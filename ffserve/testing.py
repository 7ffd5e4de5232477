"""Conformance tests for file formats, and an audit of loaders.

``loader_audit(loader)`` runs an epoch of any torch loader and reports samples that were lost,
doubled or out of order, and how well it shuffles.

Test your own format with a subclass, under pytest or any runner that calls ``test_*`` methods::

    from ffserve.testing import FormatConformance
    from mine import FORMAT

    class TestMine(FormatConformance):
        format = FORMAT
        options = ({}, {"compression": "gzip"})     # option sets of its writer

No format opens a file: formats read bytes in memory. ``samples`` reads such bytes as ffserve
does; use it for further tests of your own.
"""

from __future__ import annotations

import importlib
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ffserve.engine.codec import checksum
from ffserve.errors import ChecksumError, FFServeError, TruncatedError, UsageError
from ffserve.formats.base import (
    HEAD_SIZE,
    PIECE_SIZE,
    ChunkedShard,
    Format,
    GrowingEncoder,
    Heads,
    ReadAt,
    Shard,
    opens_small,
)
from ffserve.reads.shard_tables import bound_lengths

SMALL = (b"first", b"", b"\0" * 20, b"the fourth", b"", b"last")
"""There are few and short samples, so that tests can damage their files at every byte and every
bit."""
MEMORY_LIMIT = 32 << 20
"""Opening a file of a few hundred bytes may allocate at most this much memory."""

Outcome = list[bytes | FFServeError]


def written(format: Format, payloads: Sequence[bytes], **options: Any) -> bytes:
    """Return the content of a file with the given samples."""
    encoder = format.writer(**options)
    body = bytearray()
    for payload in payloads:
        for piece in encoder.encode(memoryview(payload)):
            body += piece
    for piece in encoder.tail():
        body += piece
    head = b"".join(bytes(piece) for piece in encoder.head())
    assert len(head) == encoder.head_size(len(payloads)), "head() is as long as head_size() says"
    return head + bytes(body)


def reader_of(content: bytes) -> ReadAt:
    """Return a ``ReadAt`` over bytes in memory that checks its arguments."""

    def read_at(offset: int, into: memoryview, /) -> int:
        assert 0 < len(into) <= PIECE_SIZE, "a read has 1 to PIECE_SIZE bytes"
        assert offset >= 0
        part = content[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    return read_at


def opened(format: Format, content: bytes, **options: Any) -> Shard:
    """Open bytes as a file of the format."""
    shard = format.open(reader_of(content), len(content), "file", **options)
    assert (shard.path, shard.size) == ("file", len(content))
    assert 0 <= shard.fingerprint < 2**64 and shard.count >= 0
    return shard


def samples(format: Format, content: bytes, *, verify: bool = True, **options: Any) -> Outcome:
    """Read all samples of a file given as bytes; damaged samples are returned as errors.

    Raises:  as ``Format.open``.
    """
    shard = opened(format, content, verify=verify, **options)
    offsets, lengths = np.empty(shard.count, np.uint64), np.empty(shard.count, np.uint64)
    checksums = np.empty(shard.count, np.uint32)
    shard.load(offsets, lengths, checksums)
    if isinstance(shard, ChunkedShard):
        return list(_decoded(shard, content))
    bound_lengths(offsets, lengths, len(content), "file")
    found: Outcome = []
    for index in range(shard.count):
        offset, length = int(offsets[index]), int(lengths[index])
        payload = content[offset : offset + length]
        where: dict[str, Any] = {"path": "file", "index": index, "offset": offset}
        if len(payload) < length:
            found.append(TruncatedError("the file ends inside this sample", **where))
        elif verify and shard.checksum_kind:
            right = checksum(shard.checksum_kind, payload) == checksums[index]
            found.append(payload if right else ChecksumError("damaged", **where))
        else:
            found.append(payload)
    return found


def _decoded(shard: ChunkedShard, content: bytes) -> Iterator[bytes | FFServeError]:
    chunks = shard.chunks
    assert len(chunks.firsts) == len(chunks) + 1 and chunks.firsts[-1] == shard.count
    for chunk in range(len(chunks)):
        count = int(chunks.firsts[chunk + 1] - chunks.firsts[chunk])
        begin, end = int(chunks.begins[chunk]), int(chunks.ends[chunk])
        assert 0 <= begin <= end <= len(content), "a chunk lies in its file"
        try:
            into = np.empty(int(chunks.sizes[chunk]), np.uint8)
            starts, lengths = shard.decode(chunk, memoryview(content)[begin:end], into)
        except FFServeError as error:
            yield from [error] * count
            continue
        assert len(starts) == len(lengths) == count
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            assert start >= 0 and length >= 0 and start + length <= len(into)
            yield into[start : start + length].tobytes()


def __getattr__(name: str) -> Any:
    # Formats are tested without torch.
    if name in ("LoaderAudit", "loader_audit"):
        return getattr(importlib.import_module("ffserve.torch.audit"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class FormatConformance:
    """Conformance tests of one format.

    Attributes:
        format: the format.
        options: sets of arguments of ``format.writer``; all tests run with each of them.
    """

    format: ClassVar[Format]
    options: ClassVar[Sequence[Mapping[str, Any]]] = ({},)

    def _files(self, payloads: Sequence[bytes] = SMALL) -> Iterator[bytes]:
        for options in self.options:
            yield written(self.format, payloads, **options)

    def test_what_was_written_is_read(self) -> None:
        """Samples are read back unchanged, with and without verification, strict and tolerant."""
        rng = np.random.default_rng(0)
        for payloads in (
            [],
            [b""],
            [b"", b"", b""],
            [b"x"],
            list(SMALL),
            [rng.bytes(k) for k in range(200)],
            [rng.bytes(int(k)) for k in (0, 70_000, 1, 511, 512, 513, 4096, 300_000)],
            [bytes(100_000)] * 3,
        ):
            for content in self._files(payloads):
                for verify in (True, False):
                    for tolerant in (True, False):
                        found = samples(self.format, content, verify=verify, tolerant=tolerant)
                        assert found == payloads

    def test_one_sample_in_pieces(self) -> None:
        """A sample written in pieces gives the same file as a sample written at once."""
        for options in self.options:
            encoder = self.format.writer(**options)
            if not isinstance(encoder, GrowingEncoder):
                continue
            body = b"".join(map(bytes, encoder.encode(memoryview(b"ab"))))
            body += b"".join(map(bytes, encoder.extend(memoryview(b"cde"))))
            body += b"".join(map(bytes, encoder.tail()))
            content = b"".join(map(bytes, encoder.head())) + body
            assert content == written(self.format, [b"abcde"], **options)

    def test_sniffing_never_denies_an_intact_file(self) -> None:
        """Detection never rejects an intact file and never raises."""
        for content in self._files():
            assert self.format.sniff(content[:HEAD_SIZE], len(content)) is not False
            for size in range(len(content)):
                self.format.sniff(content[: min(size, HEAD_SIZE)], size)

    def test_fingerprint(self) -> None:
        """Copies have equal fingerprints, different files different ones."""
        for options in self.options:
            files = [written(self.format, SMALL[:k], **options) for k in range(len(SMALL))]
            prints = [opened(self.format, content).fingerprint for content in files]
            assert len(set(prints)) == len(files)
            assert prints == [opened(self.format, bytes(c)).fingerprint for c in files]

    def test_every_cut(self) -> None:
        """A truncated file raises, returns errors, or is a valid file of fewer samples."""
        whole = list(SMALL)
        for content in self._files():
            for size in range(len(content)):
                try:
                    found = samples(self.format, content[:size])
                except FFServeError as error:
                    self._check_located(error)
                else:
                    self._check_right(found, whole)
                    if all(isinstance(each, bytes) for each in found):
                        assert found == whole[: len(found)]
                self._check_tolerant(content[:size], whole)

    def test_every_flipped_bit(self) -> None:
        """A flipped bit raises, returns errors, or changes nothing."""
        whole = list(SMALL)
        for content in self._files():
            for bit in range(8 * len(content)):
                damaged = bytearray(content)
                damaged[bit // 8] ^= 1 << bit % 8
                try:
                    found = samples(self.format, bytes(damaged))
                except FFServeError as error:
                    self._check_located(error)
                else:
                    self._check_right(found, whole)
                    if all(isinstance(each, bytes) for each in found):
                        assert found == whole
                self._check_tolerant(bytes(damaged), whole)
                self._check_unverified(bytes(damaged))

    def test_absurd_numbers_cost_no_memory(self) -> None:
        """Huge numbers anywhere in a small file raise or change nothing, and allocate no memory."""
        tracemalloc.start()
        try:
            for content in self._files():
                for offset in range(len(content) - 3):
                    for value in (2**32 - 1, 2**40, 2**62, 2**64 - 1):
                        damaged = bytearray(content)
                        part = value.to_bytes(8, "little")[: 4 if value < 2**32 else 8]
                        damaged[offset : offset + len(part)] = part
                        self._check_unverified(bytes(damaged[: len(content)]))
            assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
        finally:
            tracemalloc.stop()

    def test_any_bytes(self) -> None:
        """Arbitrary bytes open, or raise an FFServeError."""
        rng = np.random.default_rng(1)
        for size in [*range(64), *range(64, 600, 29)]:
            for content in (rng.bytes(size), bytes(size), b"\xff" * size):
                self._check_unverified(content)
        for content in self._files():
            for size in range(0, len(content), 7):
                self._check_unverified(content[:size] + rng.bytes(40))

    def test_file_that_shrinks_while_it_is_read(self) -> None:
        """A file that is truncated while it is read raises."""
        for content in self._files():
            for size in range(0, len(content), 3):
                try:
                    shard = self.format.open(reader_of(content[:size]), len(content), "file")
                    count = shard.count
                    shard.load(
                        np.empty(count, np.uint64),
                        np.empty(count, np.uint64),
                        np.empty(count, np.uint32),
                    )
                except FFServeError as error:
                    self._check_located(error)

    def test_files_opened_together(self) -> None:
        """Small files, cut and damaged ones among them, are opened together as one by one, or are
        left to that."""
        if not opens_small(self.format):
            return
        for content in self._files():
            cuts = [content[:size] for size in range(len(content))]
            flips = [bytearray(content) for _ in range(8 * len(content))]
            for bit, damaged in enumerate(flips):
                damaged[bit // 8] ^= 1 << bit % 8
            files = [content, *cuts, content, *map(bytes, flips), content]
            for most in (len(content) // 2, len(content), len(content) + 9):
                self._check_together(files, most)

    def _check_together(self, files: list[bytes], most: int) -> None:
        assert opens_small(self.format)
        bytes_ = np.zeros((len(files), most), np.uint8)
        for row, content in zip(bytes_, files, strict=True):
            row[: len(content)] = np.frombuffer(content[:most], np.uint8)
        sizes = np.array([len(content) for content in files], np.int64)
        small = self.format.open_small(
            Heads(bytes_, np.minimum(sizes, most), sizes), ["file"] * len(files)
        )
        assert not small.counts[~small.done].any()
        ends = np.cumsum(small.counts)
        for k in np.flatnonzero(small.done).tolist():
            shard = opened(self.format, files[k])
            offsets, lengths = np.empty(shard.count, np.uint64), np.empty(shard.count, np.uint64)
            checksums = np.empty(shard.count, np.uint32)
            shard.load(offsets, lengths, checksums)
            rows = slice(int(ends[k]) - shard.count, int(ends[k]))
            assert np.array_equal(offsets, small.offsets[rows])
            assert np.array_equal(lengths, small.lengths[rows])
            assert np.array_equal(checksums, small.checksums[rows])
            assert small.counts[k] == shard.count
            assert small.fingerprints[k] == shard.fingerprint
            assert small.kinds[k] == shard.checksum_kind
            chunked = small.chunked[k] if small.chunked else None
            payload_size = lengths.sum()
            if isinstance(shard, ChunkedShard):
                assert chunked is not None and chunked.count == shard.count
                for name in ("firsts", "begins", "ends", "sizes"):
                    one, other = getattr(chunked.chunks, name), getattr(shard.chunks, name)
                    assert np.array_equal(one, other)
                one, other = (list(_decoded(each, files[k])) for each in (chunked, shard))
                assert list(map(str, one)) == list(map(str, other))
                payload_size = shard.chunks.sizes.sum()
            assert small.payload_sizes[k] == payload_size

    def test_unknown_options_are_refused(self) -> None:
        """An unsupported option is a UsageError."""
        try:
            self.format.writer(compression="no such compression")
        except UsageError:
            return
        raise AssertionError("an unknown compression was accepted")

    # ---- rules ------------------------------------------------------------------------------

    def _check_located(self, error: FFServeError) -> None:
        assert error.path == "file", f"the error does not name its file: {error!r}"

    def _check_right(self, found: Outcome, whole: list[bytes]) -> None:
        """The samples are some of those written, in order, with errors in between."""
        rest = iter(whole)
        for each in found:
            if isinstance(each, bytes):
                assert any(each == other for other in rest), f"wrong bytes: {each!r}"
            else:
                self._check_located(each)

    def _check_tolerant(self, content: bytes, whole: list[bytes]) -> None:
        """Tolerant reading returns only samples that were written, in order."""
        try:
            self._check_right(samples(self.format, content, tolerant=True), whole)
        except FFServeError as error:
            self._check_located(error)

    def _check_unverified(self, content: bytes) -> None:
        """Without verification the result may be wrong, but only FFServeErrors are raised."""
        for verify in (True, False):
            for tolerant in (True, False):
                try:
                    samples(self.format, content, verify=verify, tolerant=tolerant)
                except FFServeError as error:
                    self._check_located(error)
