"""RecordIO files for the tests, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ffserve.errors import FFServeError
from ffserve.formats import by_name
from ffserve.formats.base import PIECE_SIZE, ReadAt

RECORDIO = by_name("recordio")
WAYS = [(d, c) for d in ("py", "go") for c in ("none", "snappy", "gzip")]


def read_at(content: bytes) -> ReadAt:
    def read(offset: int, into: memoryview) -> int:
        assert 0 < len(into) <= PIECE_SIZE
        part = content[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    return read


def opened(content: bytes, **options: Any) -> Any:
    return RECORDIO.open(read_at(content), len(content), "some.recordio", **options)


def written(payloads: Iterable[bytes], **options: Any) -> bytes:
    encoder = RECORDIO.writer(**options)
    assert encoder.head_size(0) == encoder.head_size(10**6) == 0
    body = b"".join(bytes(b) for p in payloads for b in encoder.encode(memoryview(p)))
    body += b"".join(bytes(b) for b in encoder.tail())
    return body + b"".join(encoder.head())


def records(content: bytes, **options: Any) -> list[bytes | FFServeError]:
    """All records; in place of one that cannot be had, its error."""
    shard = opened(content, **options)
    found: list[bytes | FFServeError] = []
    for chunk in range(len(shard.chunks)):
        first, stop = shard.chunks.firsts[chunk : chunk + 2].tolist()
        into = np.full(shard.chunks.sizes[chunk], 0xEE, np.uint8)
        extent = content[shard.chunks.begins[chunk] : shard.chunks.ends[chunk]]
        try:
            starts, lengths = shard.decode(chunk, memoryview(extent), into)
        except FFServeError as error:
            found += [error] * (stop - first)
        else:
            assert len(starts) == len(lengths) == stop - first
            found += [
                into[s : s + n].tobytes()
                for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)
            ]
    assert len(found) == shard.count
    return found


def intact(found: Sequence[bytes | FFServeError]) -> list[bytes]:
    return [record for record in found if isinstance(record, bytes)]
