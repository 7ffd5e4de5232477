"""Compressed TFRecord files as writers of all kinds make them, in memory."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tfrecord_files import starts, written

from ffserve.formats.tfcompressed import PASS_SIZES, CompressedShard, PassSizes
from ffserve.formats.tfrecord import TFRecord
from ffserve.testing import reader_of

FLUSHES = {"none": None, "sync": zlib.Z_SYNC_FLUSH, "full": zlib.Z_FULL_FLUSH}


def squeeze(
    plain: bytes,
    compression: str = "gzip",
    *,
    level: int = 6,
    cuts: Sequence[int] = (),
    flush: str = "none",
    members: bool = False,
) -> bytes:
    """Compress bytes; at each cut comes a flush, or with `members` a new gzip member."""
    wbits = {"gzip": 31, "zlib": 15}[compression]
    edges = [0, *sorted(min(cut, len(plain)) for cut in cuts), len(plain)]
    out, stream = b"", zlib.compressobj(level, wbits=wbits)
    for begin, end in pairwise(edges):
        out += stream.compress(plain[begin:end])
        if end == len(plain) and begin != end:
            continue
        if members and compression == "gzip":
            out += stream.flush()
            stream = zlib.compressobj(level, wbits=wbits)
        elif FLUSHES[flush] is not None:
            out += stream.flush(FLUSHES[flush])
    return out + stream.flush()


def indexed(
    content: bytes,
    *,
    sizes: PassSizes = PASS_SIZES,
    **options: Any,
) -> CompressedShard:
    shard = TFRecord(sizes=sizes).open(reader_of(content), len(content), "file", **options)
    assert isinstance(shard, CompressedShard)
    return shard


def chunk(shard: CompressedShard, content: bytes, number: int) -> list[bytes]:
    """Decode one chunk into memory of exactly its size, from exactly its extent."""
    chunks = shard.chunks
    extent = bytes(content[int(chunks.begins[number]) : int(chunks.ends[number])])
    into: NDArray[np.uint8] = np.empty(int(chunks.sizes[number]), np.uint8)
    places, lengths = shard.decode(number, memoryview(extent), into)
    return [into[a : a + n].tobytes() for a, n in zip(places, lengths, strict=True)]


def all_of(shard: CompressedShard, content: bytes) -> list[bytes]:
    return [each for k in range(len(shard.chunks)) for each in chunk(shard, content, k)]


__all__ = ["FLUSHES", "all_of", "chunk", "indexed", "squeeze", "starts", "written"]
