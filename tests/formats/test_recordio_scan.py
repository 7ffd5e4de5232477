"""The scan of RecordIO headers in C, compared with a plain statement of its rules."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordio_files import WAYS, written

from ffserve.engine.codec import ChunkScanner
from ffserve.errors import FFServeError
from ffserve.formats.recordio_scan import Scan
from ffserve.testing import reader_of

NAMES = ("begins", "ends", "firsts", "sizes", "checksums", "compressors")


def content(way: tuple[str, str], sizes: list[int]) -> bytes:
    random = np.random.default_rng(len(sizes))
    payloads = [random.integers(0, 4, size, np.uint8).tobytes() for size in sizes]
    return written(payloads, dialect=way[0], compression=way[1], max_chunk_size=100_000)


FILES = [content(way, [3, 0, 90_000, 20, 70_000, 70_000, 1, 5000]) for way in WAYS]
SMALL = [content(way, [40] * 5) + content(way, [7]) for way in WAYS]


def tables(scan: ChunkScanner) -> dict[str, list[int]]:
    return {name: scan.table(name).tolist() for name in NAMES}


def varint(head: bytes) -> int:
    """The u32 at the beginning of a raw snappy block."""
    value = 0
    for k, byte in enumerate(head[:5]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            assert value < 2**32
            return value
    raise AssertionError


def decoded_size(kind: int, framed: bool, payload: bytes) -> int:
    """The decoded size that a payload states."""
    if kind == 0:
        return len(payload)
    if kind == 2:
        assert len(payload) >= 18
        return int.from_bytes(payload[-4:], "little")
    if not framed:
        return varint(payload)
    decoded = 0
    while payload:
        assert len(payload) >= 4
        size, more = int.from_bytes(payload[1:4], "little"), 0
        if payload[0] == 0x00:
            more = varint(payload[8:13])
        elif payload[0] == 0x01:
            more = size - 4
        else:
            assert size == 6 if payload[0] == 0xFF else payload[0] >= 0x80
        assert 0 <= more <= 65_536 and 4 + size <= len(payload)
        decoded, payload = decoded + more, payload[4 + size :]
    return decoded


def stated(body: bytes) -> tuple[list[tuple[int, ...]], int]:
    """The chunks of a file up to the first fault, and what is wrong there, 0 for nothing.

    A chunk is its begin, end, records, decoded size, checksum and compressor.
    """
    chunks: list[tuple[int, ...]] = []
    at, go = 0, None
    while at < len(body):
        words = struct.unpack("<5I", body[at : at + 20].ljust(20, b"\0"))
        if words[0] != 0x01020304 or len(body) - at < 20:
            return chunks, ChunkScanner.NO_HEADER
        if go is not None and go != (words[3] > 3):
            return chunks, ChunkScanner.DIALECT
        go = words[3] > 3
        crc, compressor, size, records = words[1:] if go else (words[2], *words[3:], words[1])
        kind = compressor if go else compressor - 1
        if not 0 <= kind <= 2:
            return chunks, ChunkScanner.COMPRESSOR
        end = at + 20 + size
        if end > len(body):
            return chunks, ChunkScanner.CUT
        try:
            decoded = decoded_size(kind, go, body[at + 20 : end])
        except AssertionError:
            return chunks, ChunkScanner.PAYLOAD
        if decoded > min(size * (1, 22, 1032)[kind], 2**32 - 1):
            return chunks, ChunkScanner.SIZE
        if not 0 < records <= decoded // 4:
            return chunks, ChunkScanner.RECORDS
        if records + sum(chunk[2] for chunk in chunks) > 2**20 + 8 * end:
            return chunks, ChunkScanner.LIMIT
        chunks.append((at, end, records, decoded, crc, compressor))
        at = end
    return chunks, 0


def found(body: bytes, *, single: bool) -> Any:
    """As `stated`, of a scan of the whole file or of one chunk after the other."""
    scan = Scan(reader_of(body), len(body), "some.recordio")
    fault = 0
    try:
        if single:
            while scan.at < len(body):
                scan._add(*scan._examine(scan.at))
        else:
            scan.strictly()
    except FFServeError as error:
        assert error.offset == scan.at
        fault = scan.table.fault
    columns = tables(scan.table)
    columns["firsts"] = np.diff(columns["firsts"]).tolist()
    return list(zip(*columns.values(), strict=True)), fault


def check(body: bytes) -> None:
    assert found(body, single=False) == found(body, single=True) == stated(body)


def test_valid_files_give_the_chunks_they_state() -> None:
    for body in FILES + SMALL:
        check(body)
        assert stated(body)[1] == 0


def flips(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 255)), max_size=3)


@pytest.mark.check
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damaged_files_stop_at_their_first_fault(data: st.DataObject) -> None:
    body = bytearray(data.draw(st.sampled_from(SMALL)))
    for place, value in data.draw(flips(len(body))):
        body[place] = value
    cut = bytes(body[: data.draw(st.integers(0, len(body)))])
    body = cut + data.draw(st.sampled_from([b"", SMALL[0], SMALL[4]]))
    check(body)


def test_every_value_of_every_byte_stops_at_its_fault() -> None:
    for way in WAYS:
        body = bytearray(content(way, [40, 3]))
        for place in range(min(len(body), 48)):
            before = body[place]
            for value in {*range(8), 0x7F, 0x80, 0xFE, 0xFF, before ^ 1}:
                body[place] = value
                check(bytes(body))
            body[place] = before


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_windows_do_not_matter(data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(FILES + SMALL))
    scan = ChunkScanner(len(body), records_allowed=1 << 20, records_per_byte=8)
    for _ in range(1000):
        before = data.draw(st.integers(0, 30))
        base = max(0, scan.wanted - before)
        window = bytearray(body[base : scan.wanted + data.draw(st.integers(20, 100_000))])
        why = scan.feed(memoryview(window), base)
        if why == ChunkScanner.END:
            break
        assert why != ChunkScanner.FAULT
    whole = Scan(reader_of(body), len(body), "some.recordio")
    whole.strictly()
    assert tables(scan) == tables(whole.table)
    assert scan.at == len(body)


def test_tables_grow_with_what_was_found() -> None:
    body = content(("py", "none"), [40]) * 5000
    scan = ChunkScanner(len(body), records_allowed=1 << 20, records_per_byte=8)
    assert scan.feed(memoryview(bytearray(body)), 0) == ChunkScanner.END
    assert scan.count == scan.records == 5000
    assert scan.table("begins").tolist() == list(range(0, len(body), len(body) // 5000))
    assert sum(scan.table(name).nbytes for name in NAMES) == 37 * 5000 + 8


def test_tables_of_a_small_file_took_a_thousand_rows() -> None:
    body = content(("py", "none"), [1000]) * 10
    scan = Scan(reader_of(body), len(body), "ten chunks")
    scan.strictly()
    kept = [scan.table.table(name).base for name in NAMES]
    assert scan.table.count == 10
    assert sum(table.nbytes for table in kept if table is not None) <= 37 * 65 + 8


def test_a_small_file_was_read_twice() -> None:
    body = content(("py", "none"), [1000]) * 30
    reads: list[int] = []

    def read_at(offset: int, into: memoryview, /) -> int:
        reads.append(offset)
        return reader_of(body)(offset, into)

    Scan(read_at, len(body), "thirty chunks").strictly()
    assert reads == [0]
