"""Compressed TFRecord by index: seek points, chunks, hostile indices, damage, bombs."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_files import FLUSHES, all_of, chunk, indexed, squeeze, starts, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ffserve.engine import inflate
from ffserve.errors import ChecksumError, FFServeError, FormatError, TruncatedError
from ffserve.formats import tfcompressed
from ffserve.formats.tfcompressed import CompressedShard, PassSizes, restore
from ffserve.formats.tfrecord import frame_header
from ffserve.formats.tfstream import compression_of
from ffserve.testing import reader_of

GOLDEN = Path(__file__).parents[1] / "golden" / "tfrecord"
RNG = np.random.default_rng(5)
WORDS = [RNG.bytes(int(n)) for n in RNG.integers(2, 12, 300)]


def text(size: int, rng: np.random.Generator = RNG) -> bytes:
    """Bytes that compress, and refer far back."""
    words = rng.integers(0, len(WORDS), size // 4 + 1)
    return b" ".join(WORDS[k] for k in words)[:size]


LARGE = [text(int(n)) for n in RNG.integers(0, 9000, 400)]
PLAIN = written(LARGE)


SMALL = PassSizes(span=50_000, read=3000, piece=20_000)
small = functools.partial(indexed, sizes=SMALL)
"""In small spans."""


KINDS: dict[str, dict[str, Any]] = {
    "gzip": {},
    "zlib": {"compression": "zlib"},
    "fast": {"level": 1},
    "stored": {"level": 0},
    "best": {"level": 9, "compression": "zlib"},
    "members": {"members": True, "cuts": range(0, len(PLAIN), 70_001)},
    "small members": {"members": True, "cuts": range(0, len(PLAIN), 999)},
    "full flushes": {"flush": "full", "cuts": range(0, len(PLAIN), 61_003)},
    "sync flushes": {"flush": "sync", "cuts": range(0, len(PLAIN), 100), "compression": "zlib"},
}


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_is_decoded_alone_and_in_any_order(kind: str) -> None:
    content = squeeze(PLAIN, **KINDS[kind])
    shard = small(content)
    assert shard.count == len(LARGE) and len(shard.chunks) > 10, "it has chunks to speak of"
    assert shard.lengths.tolist() == [len(each) for each in LARGE]
    firsts = shard.chunks.firsts
    for number in np.random.default_rng(0).permutation(len(shard.chunks)).tolist():
        assert chunk(shard, content, number) == LARGE[firsts[number] : firsts[number + 1]]
    again = restore(shard.lengths, shard.checksums, shard.kept, len(content), "file")
    assert again is not None and again.fingerprint == shard.fingerprint
    assert again.kept == shard.kept and all_of(again, content) == LARGE


def test_chunks_are_about_as_large_as_they_should_be() -> None:
    payloads = [text(30_000) for _ in range(200)]
    shard = indexed(squeeze(written(payloads)))
    sizes = shard.chunks.sizes
    assert len(sizes) == 6 and sizes[:-1].min() >= 1 << 20 and sizes.max() < (1 << 20) + 30_100
    # each is decoded from a block that begins shortly before it
    assert int(shard.rows["skip"].max()) < 200_000
    extents = shard.chunks.ends - shard.chunks.begins
    assert int(extents.sum()) < 1.4 * shard.size, "it reads little of its neighbours"


def test_records_across_spans_and_pieces_and_larger_than_them() -> None:
    sizes = (3, 200_000, 0, 0, 49_999, 50_000, 50_001, 700_000, 1, 19_988, 20_000, 5, 130_000, 2)
    payloads = [text(size) for size in sizes]
    for options in (
        {},
        {"compression": "zlib"},
        {"level": 0},
        {"members": True, "cuts": [250_000]},
    ):
        content = squeeze(written(payloads), **options)  # type: ignore[arg-type]
        assert all_of(small(content), content) == payloads


def test_no_records_and_empty_members() -> None:
    for content in (gzip.compress(b""), zlib.compress(b""), gzip.compress(b"") * 3):
        shard = small(content)
        assert shard.count == len(shard.chunks) == 0
        assert restore(shard.lengths, shard.checksums, shard.kept, len(content), "file") is not None
    content = gzip.compress(b"") * 3 + gzip.compress(PLAIN) + gzip.compress(b"") + bytes(700)
    assert all_of(small(content), content) == LARGE


# ---- windows -------------------------------------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
def test_window_has_what_is_referred_to_and_nothing_else(kind: str) -> None:
    content = squeeze(PLAIN, **KINDS[kind])
    shard = small(content)
    kept = 0
    for number, row in enumerate(shard.rows):
        window = shard._window(number)
        place = int(shard.chunks.sizes[:number].sum()) - int(row["skip"])
        before = PLAIN[max(0, place - inflate.WINDOW_SIZE) : place]
        if row["window"]:
            assert len(window) == len(before)
            assert all(w in (0, b) for w, b in zip(window, before, strict=True))
            kept += 1
    assert kept == 0 if kind == "stored" else kept or "members" in kind or "flush" in kind
    if kept and kind in ("gzip", "zlib", "best"):
        row, last = shard.rows[-2], len(shard.rows) - 2
        place = int(shard.chunks.sizes[:last].sum()) - int(row["skip"])
        window, out = bytearray(shard._window(last)), np.empty(inflate.WINDOW_SIZE, np.uint8)
        data, bit = memoryview(content)[int(row["bit"]) // 8 :], int(row["bit"]) & 7
        for k in [-1, *np.flatnonzero(np.frombuffer(window, np.uint8))[::7].tolist()]:
            changed = window.copy()
            if k >= 0:
                changed[k] ^= 1
            assert inflate.inflate_span(data, bit, bytes(changed), 0, out, members=True)[0] == 0
            assert (out.tobytes() == PLAIN[place : place + len(out)]) is (k < 0), "it is needed"
    assert len(shard.windows) < len(content) // 4


@pytest.mark.check
def test_files_of_ours_need_no_windows_and_begin_chunks_at_records() -> None:
    from ffserve.formats import by_name

    payloads = [text(9000) for _ in range(700)]
    for compression in ("gzip", "zlib"):
        encoder = by_name("tfrecord").writer(compression=compression)
        content = b"".join(bytes(b) for p in payloads for b in encoder.encode(memoryview(p)))
        content += b"".join(map(bytes, encoder.tail()))
        shard = indexed(content)
        assert len(shard.chunks) == 6 and not shard.windows and not shard.rows["skip"].any()
        assert all_of(shard, content) == payloads
        decompress = gzip.decompress if compression == "gzip" else zlib.decompress
        assert decompress(content) == written(payloads), "any decoder reads it"
        plain = squeeze(written(payloads), compression)
        assert len(content) < 1.01 * len(plain), "the flushes cost less than a hundredth"


# ---- properties ----------------------------------------------------------------------------------


def a_file(data: st.DataObject, most: int) -> tuple[list[bytes], bytes]:
    """Draw records and a compressed file of them."""
    sizes = data.draw(st.lists(st.integers(0, most), max_size=60))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    payloads = [text(size, rng) if data.draw(st.booleans()) else rng.bytes(size) for size in sizes]
    plain = written(payloads)
    cuts = data.draw(st.lists(st.integers(0, max(1, len(plain))), max_size=6))
    content = squeeze(
        plain,
        data.draw(st.sampled_from(["gzip", "zlib"])),
        level=data.draw(st.sampled_from([0, 1, 6, 9])),
        cuts=cuts,
        flush=data.draw(st.sampled_from(list(FLUSHES))),
        members=data.draw(st.booleans()),
    )
    return payloads, content


def sizes_of_the_pass(data: st.DataObject, size: int) -> PassSizes:
    smallest = 1 + size // 2000
    return PassSizes(
        span=data.draw(st.sampled_from([1, 300, 5000, 40_000])),
        read=data.draw(st.sampled_from([smallest, 17 * smallest, 70_000])),
        piece=data.draw(st.sampled_from([300, 5000, 70_000])),
    )


def written_then_read(data: st.DataObject, most: int) -> None:
    payloads, content = a_file(data, most)
    sizes = sizes_of_the_pass(data, len(content))
    if compression_of(content[:4096]) is None:
        return
    shard = indexed(content, sizes=sizes)
    assert all_of(shard, content) == payloads
    again = restore(shard.lengths, shard.checksums, shard.kept, len(content), "file")
    assert again is not None and all_of(again, content) == payloads


def damaged_then_read(data: st.DataObject, most: int) -> None:
    """Damage to the file, after it was indexed and before; to the index; to both."""
    payloads, content = a_file(data, most)
    sizes = sizes_of_the_pass(data, len(content))
    if compression_of(content[:4096]) is None or not payloads:
        return
    shard: CompressedShard | None = indexed(content, sizes=sizes)
    assert shard is not None
    wrong = bytearray(content)
    for place in data.draw(st.lists(st.integers(10, len(content) - 1), max_size=3)):
        wrong[place] ^= data.draw(st.integers(1, 255))
    kept = bytearray(shard.kept)
    for place in data.draw(st.lists(st.integers(0, len(kept) - 1), max_size=3)):
        kept[place] ^= data.draw(st.integers(1, 255))
    shard = restore(shard.lengths, shard.checksums, bytes(kept), len(content), "file")
    for number in range(len(shard.chunks) if shard else 0):
        assert shard is not None
        first, end = shard.chunks.firsts[number : number + 2].tolist()
        shard.limit(1 << 24)
        try:
            assert chunk(shard, bytes(wrong), number) == payloads[first:end]
        except FFServeError as error:
            assert error.path == "file"
    if compression_of(bytes(wrong[:4096])) is None:
        return
    for tolerant in (False, True):
        try:
            found = indexed(bytes(wrong), sizes=sizes, tolerant=tolerant)
        except FFServeError as error:
            assert error.path == "file" and (error.offset is not None or error.index is not None)
            continue
        some = []
        for number in range(len(found.chunks)):
            try:
                some += chunk(found, bytes(wrong), number)
            except FFServeError as error:
                assert error.path == "file" and bytes(wrong) != content
        # A damaged reference may copy a small record to another place, if nothing checks that.
        assert set(some) <= set(payloads)


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.check
@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
def test_written_then_read_is_identity(data: st.DataObject) -> None:
    written_then_read(data, 6000)


@pytest.mark.check
@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
def test_damage_gives_right_records_or_errors(data: st.DataObject) -> None:
    damaged_then_read(data, 3000)


@pytest.mark.fuzz
@given(st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
def test_written_then_read_many_times_over(data: st.DataObject) -> None:
    written_then_read(data, 60_000)


@pytest.mark.fuzz
@given(st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
def test_damage_many_times_over(data: st.DataObject) -> None:
    damaged_then_read(data, 20_000)


# ---- damage --------------------------------------------------------------------------------------


def outcome(shard: CompressedShard, content: bytes) -> list[bytes | str]:
    """The records, and the names of errors in the places of those that failed."""
    found: list[bytes | str] = []
    for number in range(len(shard.chunks)):
        try:
            found += chunk(shard, content, number)
        except FFServeError as error:
            count = int(np.diff(shard.chunks.firsts)[number])
            found += [type(error).__name__] * count
    return found


@pytest.mark.parametrize("kind", ["gzip", "zlib", "members", "stored"])
def test_records_damaged_before_compression_fail_alone(kind: str) -> None:
    places, plain = starts(LARGE), bytearray(PLAIN)
    bad = [k for k in (0, 7, 8, 130, 131, 399) if LARGE[k]]
    for record in bad:
        plain[places[record] + 12] ^= 1
    content = squeeze(bytes(plain), **KINDS[kind])
    for options in ({}, {"tolerant": True}):
        shard = small(content, **options)
        expected = ["ChecksumError" if k in bad else each for k, each in enumerate(LARGE)]
        assert outcome(shard, content) == expected and shard.sound
        again = restore(shard.lengths, shard.checksums, shard.kept, len(content), "file")
        assert again is not None and outcome(again, content) == expected
    found = outcome(small(content, verify=False), content)
    assert len(found) == len(LARGE) and "ChecksumError" not in found


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_file_damaged_or_cut_is_refused_with_the_place(compression: str) -> None:
    whole = squeeze(PLAIN, compression)
    half = bytearray(whole)
    half[len(whole) // 2 : len(whole) // 2 + 40] = b"\xff" * 40
    with pytest.raises(FormatError) as caught:
        small(bytes(half))
    assert caught.value.path == "file"
    assert caught.value.offset is not None or caught.value.index is not None
    with pytest.raises(TruncatedError, match=f"inside its {compression} stream") as cut:
        small(whole[:-20_000])
    assert cut.value.offset == len(whole) - 20_000
    for content in (bytes(half), whole[:-20_000]):
        shard = small(content, tolerant=True)
        found = outcome(shard, content)
        some = len(found) - 1
        assert 50 < some < len(LARGE) and found[:some] == LARGE[:some] and not shard.sound
        assert isinstance(found[-1], str)
    wrong = bytearray(whole)
    wrong[-5 if compression == "gzip" else -1] ^= 1
    with pytest.raises(FormatError, match="stream is damaged: incorrect data check") as sums:
        small(bytes(wrong))
    assert sums.value.offset is not None
    shard = small(bytes(wrong), tolerant=True)
    assert outcome(shard, bytes(wrong)) == [*LARGE, "FormatError"]


def test_length_damaged_before_compression() -> None:
    plain = bytearray(written([b"one", b"two", b"three"]))
    plain[19] ^= 1
    content = gzip.compress(bytes(plain))
    with pytest.raises(ChecksumError, match="in the length of record 1, at byte 19") as caught:
        indexed(content)
    assert caught.value.index == 1
    assert outcome(indexed(content, tolerant=True), content) == [b"one", "ChecksumError"]
    for rest, text_ in ((b"12345", "after 5 bytes of it"), (frame_header(9) + b"x", "13 bytes of")):
        content = zlib.compress(written([b"one"]) + rest)
        with pytest.raises(TruncatedError, match=f"inside record 1, {text_}|{text_}"):
            indexed(content)


def test_damage_after_indexing_fails_one_chunk() -> None:
    content = squeeze(PLAIN)
    shard = small(content)
    begin, end = int(shard.chunks.begins[10]), int(shard.chunks.begins[11])
    wrong = bytearray(content)
    wrong[(begin + end) // 2] ^= 0x10
    found = outcome(shard, bytes(wrong))
    bad = [k for k, each in enumerate(found) if isinstance(each, str)]
    allowed = range(int(shard.chunks.firsts[8]), int(shard.chunks.firsts[13]))
    assert bad and set(bad) <= set(allowed), "neighbours may share its blocks"
    with pytest.raises(FormatError, match="chunk 10") as caught:
        chunk(shard, bytes(wrong), 10)
    assert caught.value.offset is not None and begin <= caught.value.offset


# ---- hostile files and indices -------------------------------------------------------------------


def bomb(pieces: Iterator[bytes]) -> bytes:
    stream = zlib.compressobj(9, wbits=31)
    return b"".join(map(stream.compress, pieces)) + stream.flush()


@pytest.mark.check
def test_bombs_cost_no_memory_and_end() -> None:
    sizes = PassSizes(output_allowed=64 << 20, records_allowed=100_000)
    empty = written([b""]) * 65_536
    zeros = bytes(1 << 20)
    large = [frame_header(1 << 40)] + [zeros] * 256
    for name, pieces in (("records", [empty] * 16), ("bytes", large)):
        content = bomb(iter(pieces))
        assert len(content) < 300_000
        tracemalloc.start()
        try:
            with pytest.raises(FormatError, match=rf"decode to \d+ {name}, more than allowed"):
                indexed(content, sizes=sizes)
            assert tracemalloc.get_traced_memory()[1] < 30 << 20
        finally:
            tracemalloc.stop()


def test_chunk_above_the_limit_is_refused_alone() -> None:
    payloads = [text(1_500_000), RNG.bytes(3 << 20), b"small too"]
    content = squeeze(written(payloads))
    shard = indexed(content)
    shard.limit(2 << 20)
    found = outcome(shard, content)
    assert found == [payloads[0], "FormatError", payloads[2]]
    assert shard.chunks.sizes.max() < 2 << 20


def test_every_impossible_number_in_an_index_is_refused() -> None:
    content = squeeze(PLAIN)
    shard = small(content)
    tables = shard.lengths, shard.checksums
    head, rows = tfcompressed._HEAD, tfcompressed._ROW

    def taken(kept: bytes, lengths: Any = tables[0], checksums: Any = tables[1]) -> bool:
        return restore(lengths, checksums, kept, len(content), "file") is not None

    assert taken(shard.kept)
    for size in (*range(1, head.size + 2 * rows.itemsize), len(shard.kept) - 1):
        assert not taken(shard.kept[:size])
    assert not taken(shard.kept + b"x")
    for name, number, value in (
        ("bit", 3, 8 * len(content) + 80),
        ("bit", 3, 0),
        ("bit", 3, (1 << 64) - 1),
        ("end", 3, len(content) + 1),
        ("end", 3, 0),
        ("end", 3, (1 << 64) - 1),
        ("first", 0, 1),
        ("first", 3, 0),
        ("first", 3, len(LARGE)),
        ("first", 3, (1 << 64) - 1),
        ("skip", 0, 1),
        ("skip", 3, 1 << 40),
        ("skip", 3, (1 << 64) - 1),
        ("window", 0, -1),
        ("window", 3, -2),
        ("window", 3, 1 << 40),
        ("window", 3, -(1 << 63)),
    ):
        changed = shard.rows.copy()
        changed[name][number] = value
        assert not taken(shard.kept[: head.size] + changed.tobytes() + shard.windows), (name, value)
    for place, value in ((0, 2), (0, 1 << 63), (8, 0), (8, 1 << 60), (16, 0), (16, 1 << 63)):
        wrong = bytearray(shard.kept)
        wrong[place : place + 8] = value.to_bytes(8, "little")
        assert not taken(bytes(wrong)), (place, value)
    for value in (0, 1 << 63, (1 << 64) - 1):
        lengths = tables[0].copy()
        lengths[5] = value
        assert not taken(shard.kept, lengths)
    assert not taken(shard.kept, tables[0][:-1], tables[1][:-1])
    assert not taken(shard.kept, tables[0][:0], tables[1][:0])


def test_wrong_index_gives_errors_never_other_bytes() -> None:
    content = squeeze(PLAIN)
    shard = small(content)
    swapped = shard.lengths.copy()
    swapped[[20, 21]] = swapped[[21, 20]]
    other = restore(swapped, shard.checksums, shard.kept, len(content), "file")
    assert other is not None
    for number in range(len(other.chunks)):
        first, end = other.chunks.firsts[number : number + 2].tolist()
        try:
            assert chunk(other, content, number) == LARGE[first:end]
        except FormatError as error:
            assert first <= 21 and end > 20 and "when it was indexed" in error.message
    assert not other.agrees(reader_of(content), np.array([20]))
    assert shard.agrees(reader_of(content), np.arange(len(LARGE)))
    assert not shard.agrees(reader_of(content[:1000]), np.arange(1))


def test_a_file_with_damaged_chunks_has_the_records_that_it_had() -> None:
    content = squeeze(PLAIN)
    for damaged, fits in ((1, True), (len(small(content).chunks), False)):
        shard, wrong = small(content), bytearray(content)
        for number in range(damaged):
            place = int(shard.chunks.begins[number]) + 200
            wrong[place : place + 40] = bytes(40)
        assert shard.fits(reader_of(bytes(wrong))) is fits
        assert shard.fits(reader_of(content)) is fits, "it was found out once"


@pytest.mark.check
def test_chunks_that_are_too_large_are_not_decoded_for_an_error() -> None:
    """Three of up to 1 GiB were."""
    content = squeeze(written([bytes(tfcompressed.COMPARED_SIZE) for _ in range(2)]))
    shard, sizes = indexed(content), []

    def read_at(offset: int, into: memoryview, /) -> int:
        sizes.append(len(into))
        return reader_of(content)(offset, into)

    assert shard.fits(read_at) is None and not sizes
    assert shard.agrees(read_at, np.arange(2)) and sizes, "when it is opened"


def test_file_that_shrinks_under_a_reader() -> None:
    content = squeeze(written(LARGE))
    shard = indexed(content)
    with pytest.raises(TruncatedError, match="has only 5 of its"):
        shard.decode(0, memoryview(content)[:5], np.empty(int(shard.chunks.sizes[0]), np.uint8))


@pytest.mark.parametrize("name", ["mixed.tfrecord.gz", "mixed.tfrecord.zlib"])
def test_golden(name: str) -> None:
    content = (GOLDEN / name).read_bytes()
    expected = json.loads((GOLDEN / "manifest.json").read_text())["files"][name]["samples"]
    found = all_of(indexed(content), content)
    assert [len(each) for each in found] == [each["len"] for each in expected]


# ---- the C core ----------------------------------------------------------------------------------


def test_span_needs_no_byte_behind_its_end_and_says_when_one_is_missing() -> None:
    plain = text(900_000)
    for compression in ("gzip", "zlib"):
        content = squeeze(plain, compression, level=6)
        inflater = inflate.BlockInflater(compression)
        why, marks = inflater.run(memoryview(content), np.empty(len(plain) + 1, np.uint8))
        assert why == inflater.MORE and inflater.whole and inflater.used == len(content)
        assert inflater.made == len(plain) and len(marks) > 3
        for first, last in ((1, 3), (0, 1), (2, len(marks) - 1)):
            bit, place = marks[first].tolist()
            end = -(-int(marks[last]["bit"]) // 8)
            out = np.empty(int(marks[last]["out"]) - place, np.uint8)
            window = plain[max(0, place - 32768) : place]
            part = bytes(content[bit // 8 : end])
            found = inflate.inflate_span(memoryview(part), bit & 7, window, 0, out, members=True)
            assert found[0] == 0 and out.tobytes() == plain[place : place + len(out)]
            short = memoryview(part)[:-10]
            assert inflate.inflate_span(short, bit & 7, window, 0, out, members=True)[0] < 0
            assert inflate.inflate_span(short[:0], 0, b"", 0, out, members=True)[0] < 0
            assert inflate.inflate_span(short[:0], 0, b"", 0, out[:0], members=True)[0] == 0


def test_marks_never_outgrow_their_room() -> None:
    stream = zlib.compressobj(wbits=31)
    content = b""
    for k in range(3000):
        content += stream.compress(bytes([k % 256])) + stream.flush(zlib.Z_FULL_FLUSH)
    content += stream.flush()
    inflater = inflate.BlockInflater("gzip")
    out = np.empty(100_000, np.uint8)
    why, marks = inflater.run(memoryview(content), out)
    assert why == inflater.MORE and 2 <= len(marks) <= 3000 // 256 + 1
    assert (np.diff(marks["out"].astype(int)) >= 256).all()


IN_THREADS = """
import threading, time, zlib
import numpy as np
from ffserve.engine.inflate import BlockInflater
chance = np.random.default_rng(0)
data = memoryview(zlib.compress(chance.integers(0, 8, 16 << 20, np.uint8).tobytes(), 1))
def decode():
    out = np.empty(32 << 20, np.uint8)
    while True:
        BlockInflater("zlib").run(data, out)
for _ in range(4):
    threading.Thread(target=decode, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.check
def test_a_process_that_ended_freed_what_its_threads_were_decoding_with() -> None:
    """A daemon that was stopped while files were opened: malloc(): list corrupted."""
    done = subprocess.run([sys.executable, "-c", IN_THREADS], capture_output=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)
