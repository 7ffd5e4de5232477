"""Compressed TFRecord files as a reader that can only be read in order.

Such a file has no place to begin at but its first byte, so there are no indices and no length,
and the daemon, which serves samples by index, has nothing to do with it. ``ffserve convert``
makes files of it that can be read in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from ffserve.client.base import BaseReader
from ffserve.client.choice import Wanted
from ffserve.client.in_order import READ_AHEAD_COUNT, READ_AHEAD_SIZE
from ffserve.client.source import Batch, Int64s
from ffserve.client.supply import Supply
from ffserve.dataset import ShardInfo
from ffserve.errors import FFServeError, ReadError
from ffserve.files import opener, os_error
from ffserve.formats.base import HEAD_SIZE
from ffserve.formats.tfstream import (
    RECORD_LIMIT,
    FrameStream,
    Inflater,
    InOrderOnlyError,
    Records,
    compression_of,
    record_error,
)
from ffserve.reader import Reader

READ_SIZE = 256 << 10


class _Nowhere(Supply):
    """No source gives single samples of such a file."""

    def current(self) -> NoReturn:
        raise InOrderOnlyError.of(self._wanted.paths[0])


class StreamReader(Reader):
    """Samples of TFRecord files, compressed or plain, in order. Made by ``ffserve.open``.

    Args:
        paths: the files.
        verify: hold lengths and payloads against their checksums.
        tolerant: leave out damaged records; ``damaged`` says which, so far. Behind a damaged
            length, or damage to the compression, nothing more is found in a file.
        record_limit: bytes of the largest record that is taken.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        *,
        verify: bool = True,
        tolerant: bool = False,
        record_limit: int = RECORD_LIMIT,
    ) -> None:
        BaseReader.__init__(self, Wanted(paths, "tfrecord", "off", verify, tolerant))
        self._limit = record_limit

    def _set_up(self) -> None:
        super()._set_up()
        self._supply = _Nowhere(self._wanted, self._announced)

    def batches(
        self, indices: Any = None, *, count: int = READ_AHEAD_COUNT, size: int = READ_AHEAD_SIZE
    ) -> Iterator[Batch]:
        """Read everything in order, in batches of at most `count` samples and about `size` bytes.

        Raises:
            InOrderOnlyError: `indices` were given.
            FormatError, ChecksumError, TruncatedError: damage, once what lies before it was given.
            ReadError: the operating system failed.

        Cost: one pass over the files; memory for one batch and the largest record.
        """
        if indices is not None:
            self._refuse()
        self._damaged.clear()
        self._wanted.totals = {"misses": 0, "bytes": 0, "hits": 0}
        first = 0
        for path in self._wanted.paths:
            for records in self._records(path, first):
                yield from self._cut(records, count, size)
            first += self._wanted.count

    def _records(self, path: str, first: int) -> Iterator[Records]:
        """Yield the records of a file, without its damaged ones; `_count` is their number then."""
        stream = FrameStream(path, verify=self._wanted.verify, limit=self._limit)
        try:
            for piece in _pieces(path):
                while (records := stream.feed(piece)) is not None:
                    piece = b""
                    yield from self._intact_of(records, path, first)
            stream.close()
        except FFServeError as error:
            if not self._wanted.tolerant or isinstance(error, ReadError):
                raise
            self._damaged.append(error.located(index=first + stream.count))
        self._wanted.count = stream.count

    def _intact_of(self, records: Records, path: str, first: int) -> Iterator[Records]:
        bad = np.flatnonzero(records.damaged)
        if not len(bad):
            yield records
            return
        errors = [record_error(path, first + records.first + row) for row in bad.tolist()]
        if self._wanted.tolerant:
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
            self._wanted.totals["misses"] += len(batch)
            self._wanted.totals["bytes"] += batch.buffer.nbytes
            yield batch
            at += len(lengths)

    # ---- what a stream has not ---------------------------------------------------------------

    def _refuse(self) -> NoReturn:
        raise InOrderOnlyError.of(self._wanted.paths[0])

    def __len__(self) -> int:
        self._refuse()

    def __bool__(self) -> bool:
        return True

    def _numbers(self, indices: Any) -> Int64s:
        self._refuse()

    def _all_numbers(self) -> Int64s:
        self._refuse()

    @property
    def source(self) -> str:
        """Return "stream"."""
        return "stream"

    @property
    def shards(self) -> list[ShardInfo]:
        """Refused: how many samples a file has is known at its end."""
        self._refuse()

    def stats(self) -> dict[str, int | float | str]:
        """Return what the last iteration read so far."""
        samples, size = self._wanted.totals.get("misses", 0), self._wanted.totals.get("bytes", 0)
        counts = {"samples": samples, "bytes": size, "hits": 0, "misses": samples}
        return {**counts, "hit_rate": 0.0, "source": self.source}

    def __repr__(self) -> str:
        return f"<ffserve.Reader in order of {', '.join(self._wanted.paths[:3])}>"


def _pieces(path: str) -> Iterator[bytes]:
    """Yield a file's bytes, uncompressed."""
    try:
        with open(path, "rb", buffering=0, opener=opener) as file:
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
