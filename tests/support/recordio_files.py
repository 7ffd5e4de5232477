"""RecordIO files for the tests: in memory, the originals' files, and on disk."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from daemon import sample

import ffserve
from ffserve.engine.codec import CRC_32C, checksum
from ffserve.errors import FFServeError
from ffserve.formats import by_name
from ffserve.testing import reader_of

RECORDIO = by_name("recordio")
WAYS = [(d, c) for d in ("py", "go") for c in ("none", "snappy", "gzip")]


def opened(content: bytes, **options: Any) -> Any:
    return RECORDIO.open(reader_of(content), len(content), "some.recordio", **options)


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


GOLDEN = Path(__file__).parents[1] / "golden" / "recordio"


FILES = {
    f"{d}/{name}": facts
    for d in ("py", "go")
    for name, facts in json.loads((GOLDEN / d / "manifest.json").read_text())["files"].items()
}


def golden(name: str) -> bytes:
    content = (GOLDEN / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == FILES[name]["sha256"]
    return content


def sums(found: list[bytes]) -> list[tuple[int, str]]:
    return [(len(record), hashlib.sha256(record).hexdigest()) for record in found]


def promised(name: str) -> list[tuple[int, str]]:
    return [(s["len"], s["sha256"]) for s in FILES[name]["samples"]]


def chunk(payload: bytes, count: int, dialect: str = "py", compressor: int | None = None) -> bytes:
    """A chunk with a right checksum, whatever else is wrong with it."""
    if dialect == "py":
        words = (count, checksum(CRC_32C, payload), compressor or 1, len(payload))
    else:
        words = (zlib.crc32(payload), compressor or 0, len(payload), count)
    return struct.pack("<5I", 0x01020304, *words) + payload


def framed(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def flipped(content: bytes) -> Iterator[tuple[int, bytes]]:
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bit // 8, bytes(damaged)


SIZES = (0, 1, 511, 3, 5000, 70, 20_000)
COUNT = 300
SAMPLES = [sample(k, SIZES) for k in range(COUNT)]


def create(path: Path, samples: list[bytes] = SAMPLES, **options: Any) -> str:
    with ffserve.create(path, format="recordio", **options) as writer:
        for each in samples:
            writer.write(each)
    return str(path)


def as_bytes(batch: Any) -> list[bytes]:
    return [bytes(each) for each in batch]
