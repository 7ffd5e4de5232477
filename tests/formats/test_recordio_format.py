"""RecordIO on disk: the originals' files, both dialects, and everything that can be broken."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordio_files import (
    FILES,
    RECORDIO,
    WAYS,
    chunk,
    flipped,
    framed,
    golden,
    intact,
    opened,
    promised,
    reader_of,
    records,
    sums,
    written,
)

from ffserve.errors import (
    ChecksumError,
    FFServeError,
    FormatError,
    ReadError,
    TruncatedError,
    UsageError,
)
from ffserve.formats import by_suffix, detect
from ffserve.formats.base import UNKNOWN_LENGTH, ChunkedShard

WHOLE = sorted(name for name, facts in FILES.items() if not facts["damaged"])
WORDS = [b"a", b"", b"bc" * 9, b"d" * 40, b"", b"e" * 3, b"fgh" * 5]


@pytest.mark.parametrize("name", WHOLE)
def test_golden_reads_as_the_original_wrote_it(name: str) -> None:
    shard = opened(golden(name))
    facts = FILES[name]
    assert sums(intact(records(golden(name)))) == promised(name)
    assert shard.count == len(promised(name))
    assert shard.chunks.begins.tolist() == [c["offset"] for c in facts["chunks"]]
    assert np.diff(shard.chunks.firsts).tolist() == [c["num_records"] for c in facts["chunks"]]
    assert shard.compressors.tolist() == [c["compressor"] for c in facts["chunks"]]
    if shard.count:
        assert shard.dialect.name == name[:2]
        assert shard.checksum_kind == (2 if name.startswith("py") else 1)


@pytest.mark.parametrize(
    "name", ["py/words_no_compression_20.recordio", "go/words_none_20.recordio"]
)
def test_golden_is_rewritten_byte_for_byte(name: str) -> None:
    content = golden(name)
    again = written(
        intact(records(content)), dialect=name[:2], compression="none", max_chunk_size=20
    )
    assert again == content


@pytest.mark.parametrize("name", [name for name in WHOLE if "empty" not in name])
def test_chunks_end_where_the_original_ends_them(name: str) -> None:
    sizes = {"words": 20, "mixed_gzip_1024": 1024, "mixed_snappy_6000": 6000}
    stem = name[3:].removesuffix(".recordio")
    most = sizes.get(stem, sizes.get(stem.split("_")[0], 1 << 20))
    content = golden(name)
    shard = opened(content)
    again = opened(
        written(
            intact(records(content)),
            dialect=name[:2],
            compression=shard.compression(0),
            max_chunk_size=most,
        )
    )
    assert again.chunks.firsts.tolist() == shard.chunks.firsts.tolist()
    assert again.chunks.sizes.tolist() == shard.chunks.sizes.tolist()


@pytest.mark.parametrize("dialect", ["py", "go"])
def test_damaged_chunk_fails_only_its_own_records(dialect: str) -> None:
    name = f"{dialect}/corrupt_payload.recordio"
    found = records(golden(name))
    bad = FILES[name]["bad_indices"]
    assert [k for k, record in enumerate(found) if not isinstance(record, bytes)] == bad
    assert sums(intact(found)) == [s for k, s in enumerate(promised(name)) if k not in bad]
    error = found[bad[0]]
    assert isinstance(error, ChecksumError)
    assert error.path == "some.recordio" and "chunk 2" in error.message
    assert error.offset == FILES[name]["chunks"][2]["offset"]
    assert sums(intact(records(golden(name), verify=False))) != promised(name)
    # Tolerantly the same, since the chunk's header is sound.
    assert intact(records(golden(name), tolerant=True)) == intact(found)
    assert len(records(golden(name), tolerant=True)) == 20


@pytest.mark.parametrize("dialect", ["py", "go"])
def test_cut_tail_is_refused_and_left_out(dialect: str) -> None:
    name = f"{dialect}/trunc_body.recordio"
    with pytest.raises(TruncatedError, match="chunk 7") as caught:
        opened(golden(name))
    assert caught.value.offset == FILES[name]["tail_offset"]
    found = records(golden(name), tolerant=True)
    assert sums(intact(found)) == promised(name)
    [error] = found[len(promised(name)) :]
    assert isinstance(error, TruncatedError) and error.offset == FILES[name]["tail_offset"]
    shard, end = RECORDIO.complete(reader_of(golden(name)), len(golden(name)), "x")  # type: ignore[attr-defined]
    assert (shard.count, end) == (len(promised(name)), FILES[name]["tail_offset"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=40), st.sampled_from(WAYS), st.integers(1, 120))
def test_what_is_written_is_read(payloads: list[bytes], way: tuple[str, str], most: int) -> None:
    dialect, compression = way
    options = {"dialect": dialect, "compression": compression, "max_chunk_size": most}
    if dialect == "go" and any(len(p) > most for p in payloads):
        with pytest.raises(UsageError, match="max_chunk_size"):
            written(payloads, **options)
        return
    content = written(payloads, **options)
    assert records(content) == payloads
    assert records(content, tolerant=True) == payloads
    for first, stop in zip(
        *(lambda f: (f[:-1], f[1:]))(opened(content).chunks.firsts), strict=True
    ):
        assert stop - first == 1 or sum(map(len, payloads[first:stop])) <= most


def test_mixed_compressors_in_one_file() -> None:
    for dialect in ("py", "go"):
        parts = [
            written(WORDS, dialect=dialect, compression=c, max_chunk_size=64)
            for c in ("gzip", "none", "snappy", "gzip")
        ]
        assert records(b"".join(parts)) == 4 * WORDS


def test_small_reads_give_what_large_ones_give() -> None:
    content = written([b"x" * (k % 90) for k in range(400)], max_chunk_size=100)

    def byte_by_byte(offset: int, into: memoryview) -> int:
        into[:1] = content[offset : offset + 1]
        return min(1, len(into))

    slow = RECORDIO.open(byte_by_byte, len(content), "x")
    whole = opened(content)
    assert isinstance(slow, ChunkedShard)
    assert slow.fingerprint == whole.fingerprint
    assert slow.chunks.begins.tolist() == whole.chunks.begins.tolist()


def test_tables_hold_what_a_chunk_says_of_its_records() -> None:
    content = written(WORDS, max_chunk_size=20, compression="none")
    shard = opened(content)
    offsets, lengths = np.zeros(len(WORDS), np.uint64), np.zeros(len(WORDS), np.uint64)
    checksums = np.zeros(len(WORDS), np.uint32)
    shard.load(offsets, lengths, checksums)
    assert set(lengths.tolist()) == {UNKNOWN_LENGTH}
    of = shard.chunks.holding(np.arange(len(WORDS)))
    assert offsets.tolist() == shard.chunks.begins[of].tolist()
    assert checksums.tolist() == shard.checksums[of].tolist()


def test_another_content_has_another_fingerprint() -> None:
    contents = {written(WORDS, dialect=d, compression=c) for d, c in WAYS}
    contents |= {written([*WORDS[:-1], b"x"]), written(WORDS, max_chunk_size=20), b""}
    assert len({opened(content).fingerprint for content in contents}) == len(contents)


@pytest.mark.parametrize("way", WAYS)
def test_every_truncation_is_noticed(way: tuple[str, str]) -> None:
    content = written(WORDS, dialect=way[0], compression=way[1], max_chunk_size=40)
    shard = opened(content)
    ends = [0, *shard.chunks.ends.tolist()]
    for size in range(len(content)):
        cut = content[:size]
        kept = sum(end <= size for end in ends) - 1
        whole = WORDS[: shard.chunks.firsts[kept]]
        if size in ends:
            assert records(cut) == whole
            continue
        with pytest.raises(TruncatedError) as caught:
            opened(cut)
        assert caught.value.offset == ends[kept]
        found = records(cut, tolerant=True)
        assert found[:-1] == whole
        assert isinstance(found[-1], TruncatedError) and found[-1].offset == ends[kept]
        shard_, end = RECORDIO.complete(reader_of(cut), size, "x")  # type: ignore[attr-defined]
        assert (shard_.count, end) == (len(whole), ends[kept])


@pytest.mark.check
@pytest.mark.parametrize("way", WAYS)
def test_every_flipped_bit_is_noticed(way: tuple[str, str]) -> None:
    content = written(WORDS, dialect=way[0], compression=way[1], max_chunk_size=40)
    shard = opened(content)
    for place, damaged in flipped(content):
        hit = int(np.searchsorted(shard.chunks.ends, place, side="right"))
        first, stop = shard.chunks.firsts[hit : hit + 2].tolist()
        try:
            found = records(damaged)
        except FormatError as error:
            assert error.path == "some.recordio" and error.offset is not None
        else:
            errors = [record for record in found if not isinstance(record, bytes)]
            assert errors and all(isinstance(error, FormatError) for error in errors)
            assert all(f"chunk {hit}" in error.message for error in errors)
        # What is intact stays: all other chunks, and nothing else.
        found = records(damaged, tolerant=True)
        assert intact(found) == WORDS[:first] + WORDS[stop:], (place, damaged[:40])
        assert len(found) > len(intact(found))


def test_a_damaged_size_does_not_swallow_the_next_chunk() -> None:
    one = chunk(framed(b"1" * 8), 1)
    three = one + chunk(framed(b"2" * 8), 1) + chunk(framed(b"3" * 8), 1)
    damaged = bytearray(three)
    assert damaged[16] == 12 and 12 ^ 32 == 12 + 20 + 12
    damaged[16] ^= 32
    found = records(bytes(damaged), tolerant=True)
    assert intact(found) == [b"2" * 8, b"3" * 8] and len(found) == 3
    assert len(intact(records(bytes(damaged)))) == 1


def test_garbage_between_chunks_is_left_out_as_one_place() -> None:
    one, two = written(WORDS[:3]), written(WORDS[3:], compression="gzip")
    found = records(one + b"\x04\x03\x02\x01" * 500 + two + b"zz", tolerant=True)
    assert intact(found) == WORDS
    errors = [record for record in found if not isinstance(record, bytes)]
    assert [error.offset for error in errors] == [len(one), len(one) + 2000 + len(two)]


@pytest.mark.parametrize("dialect", ["py", "go"])
@pytest.mark.parametrize(
    ("compressor", "payload", "count", "what"),
    [
        ("none", framed(b"ab", b"c"), 3, "records"),
        ("none", framed(b"ab", b"c"), 1, "records"),
        ("none", framed(b"ab") + b"\x05\x00\x00\x00abc", 2, "records"),
        ("none", framed(b"ab") + b"\x01", 1, "records"),
        ("none", framed(b"ab"), 0, "counts"),
        ("none", framed(b"ab"), 2**32 - 1, "counts"),
        ("gzip", gzip.compress(framed(b"ab"), mtime=0) * 2, 1, "gzip"),
        ("gzip", gzip.compress(framed(b"ab"), mtime=0)[:-4] + b"\xff" * 4, 1, "allows"),
        ("gzip", gzip.compress(framed(b"ab"), mtime=0)[:-4] + b"\x07\0\0\0", 1, "gzip"),
        ("gzip", b"x" * 17, 1, "too short"),
        ("gzip", b"x" * 14 + b"\x08\0\0\0", 1, "damaged"),
    ],
)  # fmt: skip
def test_a_chunk_must_add_up(
    dialect: str, compressor: str, payload: bytes, count: int, what: str
) -> None:
    number = {"none": 0, "gzip": 2}[compressor] + (dialect == "py")
    bad = chunk(payload, count, dialect, number)
    good = chunk(framed(b"good"), 1, dialect)
    try:
        found = records(bad + good)
    except FormatError as error:
        assert what in error.message and error.offset == 0
    else:
        assert intact(found) == [b"good"]
        assert isinstance(found[0], FormatError) and what in found[0].message
    assert intact(records(bad + good, tolerant=True)) == [b"good"]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\xff\xff\xff\xff\x01",
        b"\xff\xff\xff\xff\x0f",
        b"\x80",
        b"\x06",
        b"\x06\x14abcdefgh",
        b"\x06\x00",
        b"\x08\x20" + framed(b"abcde"),
    ],
)
def test_raw_snappy_must_add_up(payload: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        for record in records(chunk(payload, 1, "py", 2)):
            assert isinstance(record, FFServeError)
            raise record
    assert caught.value.offset == 0


@pytest.mark.parametrize(
    "stream",
    [
        b"\x00\xff\xff\xff....\xff\xff\x03",
        b"\x00\x09\x00\x00....\xff\xff\xff\xff\x0f",
        b"\x01\x06\x00\x00....ab",
        b"\x02\x01\x00\x00a",
        b"\x01\x01\x00\x00a",
        b"\x01",
        b"\xff\x06\x00\x00sNaPpX",
        b"\xff\x05\x00\x00sNaPp",
    ],
)
def test_framed_snappy_must_add_up(stream: bytes) -> None:
    for payload in (stream, b"\xff\x06\x00\x00sNaPpY" + stream):
        with pytest.raises(FormatError) as caught:
            for record in records(chunk(payload, 1, "go", 1)):
                assert isinstance(record, FFServeError)
                raise record
        assert caught.value.offset == 0


def test_claims_cost_no_memory() -> None:
    claims = [
        struct.pack("<5I", 0x01020304, 2**32 - 1, 0, 1, 2**32 - 1) + b"x" * 80,
        struct.pack("<5I", 0x01020304, 0, 0, 2**32 - 1, 2**32 - 1) + b"x" * 80,
        chunk(b"\xff\xff\xff\xff\x0f" + b"x" * 75, 2**32 - 1, "py", 2),
        chunk(b"x" * 76 + b"\xff" * 4, 2**32 - 1, "py", 3),
        chunk(b"\x00\x08\x00\x00....\x80\x80\x04x" * 6, 2**32 - 1, "go", 1),
    ]
    tracemalloc.start()
    try:
        for content in claims:
            with pytest.raises(FormatError):
                opened(content)
            for record in records(content, tolerant=True):
                assert isinstance(record, FormatError)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_tables_are_not_made_for_whatever_number_is_claimed() -> None:
    payload = gzip.compress(bytes(40 << 20))
    content = chunk(payload, 10 << 20, "py", 3)
    assert len(content) < 1 << 16
    for tolerant in (False, True):
        with pytest.raises(FormatError, match="claim 10485760 records"):
            opened(content, tolerant=tolerant)
    assert len(records(written([b""] * 100_000, compression="gzip"))) == 100_000


def test_chunks_beyond_the_limit_are_refused() -> None:
    content = written([b"a" * 5000, b"b", b"c"], compression="gzip", max_chunk_size=4)
    shard = opened(content)
    shard.limit(1000)
    assert (shard.chunks.sizes > 0).tolist() == [False, True]
    with pytest.raises(FormatError, match="limit of 1000") as caught:
        shard.decode(0, memoryview(b""), np.empty(0, np.uint8))
    assert "max_chunk_size" in (caught.value.hint or "")


def test_a_file_that_changes_is_noticed() -> None:
    content = written(WORDS, compression="none")
    shard = opened(content)
    into = np.empty(shard.chunks.sizes[0], np.uint8)
    with pytest.raises(ReadError, match="changed"):
        shard.decode(0, memoryview(b"\x04\x03\x02\x01" + b"\0" * (len(content) - 4)), into)
    with pytest.raises(TruncatedError):
        shard.decode(0, memoryview(content[:-1]), into)


def test_who_wrote_it_is_said_where_it_is_neither_dialect() -> None:
    with pytest.raises(FormatError, match="either dialect") as caught:
        opened(bytes.fromhex("0a23d7ce") + b"\0" * 30)
    assert "MXNet" in str(caught.value)
    payload = framed(b"ab")
    fluid = struct.pack("<5I", 0x01020304, 1, zlib.crc32(payload), 0, len(payload)) + payload
    with pytest.raises(FormatError, match="Fluid"):
        opened(fluid)
    [error] = records(
        struct.pack("<5I", 0x01020304, 1, zlib.crc32(payload), 1, len(payload)) + payload
    )
    assert isinstance(error, ChecksumError) and "Fluid" in str(error)
    with pytest.raises(FormatError, match="dialect"):
        opened(written(WORDS, dialect="py") + written(WORDS, dialect="go"))


def test_detected_by_content_then_suffix() -> None:
    content = written(WORDS)
    assert detect(content[:4096], "x.bin", len(content)).name == "recordio"
    assert detect(b"", "x.recordio", 0).name == "recordio"
    assert detect(content[:3], "x.recordio", 3).name == "recordio"
    found = by_suffix("A.RecordIO")
    assert found is not None and found.name == "recordio"


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zlib"},
        {"dialect": "mxnet"},
        {"max_chunk_size": 0},
        {"max_chunk_size": 2**31},
        {"max_chunk_size": 1.5},
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RECORDIO.writer(**options)


def test_an_encoder_survives_a_record_that_it_refuses() -> None:
    encoder = RECORDIO.writer(dialect="go", max_chunk_size=4, compression="none")
    pieces = [bytes(b) for b in encoder.encode(memoryview(b"abc"))]
    with pytest.raises(UsageError):
        encoder.encode(memoryview(b"abcde"))
    pieces += [bytes(b) for b in (*encoder.encode(memoryview(b"d")), *encoder.tail())]
    assert records(b"".join(pieces)) == [b"abc", b"d"]
