"""The scan of RecordIO headers in C, compared with the one in Python that names the fault."""

from __future__ import annotations

from typing import Any

import numpy as np
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


def outcome(body: bytes, *, in_c: bool) -> Any:
    """Return the tables, up to the end or to the fault, and the fault."""
    scan = Scan(reader_of(body), len(body), "some.recordio")
    problem: Any = None
    try:
        if in_c:
            scan.strictly()
        else:
            while scan.at < len(body):
                scan._add(*scan._parse(scan.at))
    except FFServeError as error:
        problem = type(error), str(error)
    return scan.at, tables(scan.table), scan.dialect, problem


def test_valid_files_give_equal_tables() -> None:
    for body in FILES + SMALL:
        found = outcome(body, in_c=True)
        assert found == outcome(body, in_c=False)
        assert found[0] == len(body) and found[-1] is None


def flips(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 255)), max_size=3)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damaged_files_stop_both_at_the_same_place(data: st.DataObject) -> None:
    body = bytearray(data.draw(st.sampled_from(SMALL)))
    for place, value in data.draw(flips(len(body))):
        body[place] = value
    cut = bytes(body[: data.draw(st.integers(0, len(body)))])
    body = cut + data.draw(st.sampled_from([b"", SMALL[0], SMALL[4]]))
    assert outcome(body, in_c=True) == outcome(body, in_c=False)


def test_every_value_of_every_byte_stops_both_at_the_same_place() -> None:
    for way in WAYS:
        body = bytearray(content(way, [40, 3]))
        for place in range(min(len(body), 48)):
            before = body[place]
            for value in {*range(8), 0x7F, 0x80, 0xFE, 0xFF, before ^ 1}:
                body[place] = value
                assert outcome(bytes(body), in_c=True) == outcome(bytes(body), in_c=False)
            body[place] = before


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_windows_do_not_matter(data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(FILES + SMALL))
    scan = ChunkScanner(len(body), records_allowed=1 << 20, records_a_byte=8)
    for _ in range(1000):
        before = data.draw(st.integers(0, 30))
        base = max(0, scan.wanted - before)
        window = bytearray(body[base : scan.wanted + data.draw(st.integers(20, 100_000))])
        why = scan.feed(memoryview(window), base)
        if why == ChunkScanner.END:
            break
        assert why != ChunkScanner.FAULT
    assert tables(scan) == outcome(body, in_c=False)[1]
    assert scan.at == len(body)


def test_tables_grow_with_what_was_found() -> None:
    body = content(("py", "none"), [40]) * 5000
    scan = ChunkScanner(len(body), records_allowed=1 << 20, records_a_byte=8)
    assert scan.feed(memoryview(bytearray(body)), 0) == ChunkScanner.END
    assert scan.count == scan.records == 5000
    assert scan.table("begins").tolist() == list(range(0, len(body), len(body) // 5000))
    assert sum(scan.table(name).nbytes for name in NAMES) == 37 * 5000 + 8
