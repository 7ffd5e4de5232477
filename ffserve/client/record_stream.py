"""Compressed TFRecord files as a stream of batches.

In order such a file is read without an index, from its first byte to its last, by this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, cast

import numpy as np

from ffserve.client.source import Batch
from ffserve.disk.files import opener, os_error
from ffserve.errors import FFServeError, ReadError
from ffserve.formats.base import HEAD_SIZE
from ffserve.formats.tfstream import (
    FrameStream,
    Inflater,
    Records,
    compression_of,
    record_error,
)
from ffserve.store.fetching import identity_of
from ffserve.store.ranges import RangedObject, ReadAtStream
from ffserve.store.urls import is_url

READ_SIZE = 256 << 10


class RecordStream:
    """One pass over TFRecord files, compressed or plain.

    Args:
        paths: the files. verify: check lengths and payloads against their checksums. tolerant:
            leave out damaged records.
        damaged: gets the errors of records that were left out, so far.

    samples, size: records and bytes that were given so far.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        *,
        verify: bool,
        tolerant: bool,
        damaged: list[FFServeError],
    ) -> None:
        self.samples = self.size = 0
        self._paths = paths
        self._verify = verify
        self._tolerant = tolerant
        self._damaged = damaged
        self._count = 0
        """Records of the last file, the damaged ones as well."""

    def batches(self, count: int, size: int) -> Iterator[Batch]:
        """Yield everything in order, in batches of at most `count` samples and about `size` bytes.

        Raises: FormatError, ChecksumError, TruncatedError, ReadError; see `Reader.batches`.
        """
        first = 0
        for path in self._paths:
            for records in self._records(path, first):
                yield from self._cut(records, count, size)
            first += self._count

    def _records(self, path: str, first: int) -> Iterator[Records]:
        """Yield the records of a file, without its damaged ones."""
        stream = FrameStream(path, verify=self._verify)
        try:
            for piece in _pieces(path):
                while (records := stream.feed(piece)) is not None:
                    piece = b""
                    yield from self._intact_of(records, path, first)
            stream.close()
        except FFServeError as error:
            if not self._tolerant or isinstance(error, ReadError):
                raise
            self._damaged.append(error.located(index=first + stream.count))
        self._count = stream.count

    def _intact_of(self, records: Records, path: str, first: int) -> Iterator[Records]:
        bad = np.flatnonzero(records.damaged)
        if not len(bad):
            yield records
            return
        errors = [record_error(path, first + records.first + row) for row in bad.tolist()]
        if self._tolerant:
            self._damaged += errors
            yield records.without(bad)
            return
        yield records.without(np.arange(bad[0], len(records.offsets)))
        raise errors[0]

    def _cut(self, records: Records, count: int, size: int) -> Iterator[Batch]:
        block = np.frombuffer(records.block, np.uint8)
        ends = np.cumsum(records.lengths)
        at = 0
        while at < len(ends):
            limit = size + (int(ends[at - 1]) if at else 0)
            upto = min(max(int(np.searchsorted(ends, limit, side="right")), at + 1), at + count)
            lengths = records.lengths[at:upto]
            edges = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=edges[1:])
            places = zip(records.offsets[at:upto].tolist(), lengths.tolist(), strict=True)
            parts = [block[offset : offset + length] for offset, length in places]
            batch = Batch(np.concatenate(parts), edges)
            self.samples += len(batch)
            self.size += batch.buffer.nbytes
            yield batch
            at += len(lengths)


def _opened(path: str) -> IO[bytes]:
    if is_url(path):
        opened = RangedObject(identity_of(path))
        return cast(IO[bytes], ReadAtStream(opened.read_at(), opened.size))
    return open(path, "rb", buffering=0, opener=opener)


def _pieces(path: str) -> Iterator[bytes]:
    """Yield a file's bytes, uncompressed."""
    try:
        with _opened(path) as file:
            head = file.read(HEAD_SIZE)
            inflater = Inflater(path, compression_of(head) or "none")
            yield from inflater.feed(head)
            while data := file.read(READ_SIZE):
                yield from inflater.feed(data)
            inflater.close()
    except OSError as error:
        if isinstance(error, FFServeError):
            raise
        raise os_error(error, path) from error
