"""FFRecord on disk: the original's files in both directions, and everything that can be broken."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.errors import (
    ChecksumError,
    FFServeError,
    FormatError,
    ReadError,
    TruncatedError,
    UsageError,
)
from ffserve.formats import by_name, by_suffix, detect
from ffserve.formats.base import HEAD_SIZE, PIECE_SIZE, Shard
from ffserve.formats.ffrecord import FFRecord
from ffserve.testing import reader_of

GOLDEN = Path(__file__).parents[1] / "golden" / "ffrecord"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
DAMAGED = MANIFEST["damaged"]
WHOLE = sorted(name for name in MANIFEST["files"] if name != "unfinished.ffr")
FFRECORD = by_name("ffrecord")


def opened(content: bytes, verify: bool = True) -> Shard:
    return FFRECORD.open(reader_of(content), len(content), "some.ffr", verify=verify)


def tables(shard: Shard) -> tuple[list[int], list[int], list[int]]:
    offsets = np.full(shard.count, 2**63, np.uint64)
    lengths = np.full(shard.count, 2**63, np.uint64)
    checksums = np.full(shard.count, 2**31, np.uint32)
    shard.load(offsets, lengths, checksums)
    return offsets.tolist(), lengths.tolist(), checksums.tolist()


def samples(content: bytes, verify: bool = True) -> list[bytes | str]:
    """All samples; in place of one that cannot be had, what is wrong with it."""
    shard = opened(content, verify)
    found: list[bytes | str] = []
    for offset, length, checksum in zip(*tables(shard), strict=True):
        if length and offset + length > shard.size:
            found.append("cut")
            continue
        payload = content[offset : offset + length]
        intact = not verify or zlib.crc32(payload) == checksum
        found.append(payload if intact else "checksum")
    return found


def written(payloads: Sequence[bytes]) -> bytes:
    encoder = FFRECORD.writer()
    body = b"".join(bytes(b) for p in payloads for b in encoder.encode(memoryview(p)))
    body += b"".join(encoder.tail())
    head = b"".join(encoder.head())
    assert len(head) == encoder.head_size(len(payloads))
    return head + body


def header(content: bytes) -> tuple[int, int]:
    crc, count = struct.unpack_from("<Iq", content)
    return crc, count


def with_crc(content: bytes | bytearray) -> bytes:
    count = header(bytes(content))[1]
    return struct.pack("<I", zlib.crc32(content[4 : 12 + 12 * count])) + bytes(content[4:])


@pytest.mark.parametrize("name", WHOLE)
def test_golden_reads_as_the_original_wrote_it(name: str) -> None:
    content, facts = (GOLDEN / name).read_bytes(), MANIFEST["files"][name]
    assert hashlib.sha256(content).hexdigest() == facts["file_sha256"]
    shard: Any = opened(content)
    assert (shard.count, shard.size) == (facts["n"], facts["bytes"])
    assert shard.metadata_checksum == facts["meta_crc"]
    assert (shard.format, shard.checksum_kind) == ("ffrecord", 1)
    found = [s for s in samples(content) if isinstance(s, bytes)]
    assert len(found) == facts["n"]
    if "sha256" in facts:
        assert [len(s) for s in found] == facts["sizes"]
        assert [hashlib.sha256(s).hexdigest() for s in found] == facts["sha256"]
    else:
        joined = hashlib.sha256(b"".join(found)).hexdigest()
        assert joined == facts["sha256_of_concatenation"]


@pytest.mark.parametrize("name", [*WHOLE, "packed.ffr"])
def test_golden_is_rewritten_byte_for_byte(name: str) -> None:
    content = (GOLDEN / name).read_bytes()
    assert written([bytes(s) for s in samples(content)]) == content  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(DAMAGED))
def test_damaged_is_refused_where_the_original_refuses_it(name: str) -> None:
    content, facts = (GOLDEN / "damaged" / name).read_bytes(), DAMAGED[name]["check"]
    if "exc" in facts["open"]:
        kind = TruncatedError if name == "zero_length.ffr" else ChecksumError
        with pytest.raises(kind) as caught:
            opened(content)
        assert caught.value.path == "some.ffr"
        assert caught.value.hint and caught.value.offset is not None
        return
    for index, sample in enumerate(samples(content)):
        assert isinstance(sample, bytes) == (facts["read_one"][str(index)] == "ok")


@pytest.mark.parametrize("name", sorted(DAMAGED))
def test_damaged_without_checks_gives_what_the_original_gives(name: str) -> None:
    content, facts = (GOLDEN / "damaged" / name).read_bytes(), DAMAGED[name]["nocheck"]
    if name in ("zero_length.ffr", "n_plus_1.ffr"):  # the original runs out of memory here
        with pytest.raises(FormatError):
            opened(content, verify=False)
        return
    plain = samples((GOLDEN / "plain.ffr").read_bytes())
    offsets = tables(opened(content, verify=False))[0]
    assert [*offsets, len(content)] == facts["offsets_head"]
    for index, sample in enumerate(samples(content, verify=False)):
        expected = facts["read_one"]
        expected = "ok" if expected == "all ok" else expected[str(index)]
        if expected == "ok":
            assert sample == plain[index]
        else:
            assert isinstance(sample, bytes)
            assert hashlib.sha256(sample).hexdigest() == expected["sha256"]


def test_unfinished_is_refused_and_not_taken_for_empty() -> None:
    content = (GOLDEN / "unfinished.ffr").read_bytes()
    for verify in (True, False):
        for part in (content, content[:12]):
            with pytest.raises(FormatError, match="unfinished"):
                opened(part, verify)
    with pytest.raises(FormatError, match="unfinished"):
        opened((GOLDEN / "zero.ffr").read_bytes() + b"x")


def test_every_truncation_is_told() -> None:
    content = (GOLDEN / "empties.ffr").read_bytes()
    whole, end = samples(content), 12 + 12 * 10
    for size in range(len(content)):
        if size < end:
            with pytest.raises(TruncatedError):
                opened(content[:size])
            continue
        left = samples(content[:size])
        for index, (now, then) in enumerate(zip(left, whole, strict=True)):
            assert now == then or now in ("cut", "checksum"), (size, index)
            assert isinstance(then, bytes)
            if now != then:
                assert len(then) > 0
        assert left != whole or size >= len(content)


def test_cut_before_the_last_sample_is_reported_as_cut() -> None:
    content = (GOLDEN / "plain.ffr").read_bytes()
    start = tables(opened(content))[0][-1]
    for size in (start, start - 1, start - 40):
        left = samples(content[:size])
        assert left[-1] == "cut"
        assert samples(content)[:12] == left[:12]


def test_appended_bytes_fail_the_last_sample_only() -> None:
    content = (GOLDEN / "plain.ffr").read_bytes()
    assert samples(content + b"!") == [*samples(content)[:-1], "checksum"]


@pytest.mark.parametrize("name", ["one.ffr", "one_empty.ffr", "zero.ffr", "empties.ffr"])
def test_every_single_bit_flip_is_told(name: str) -> None:
    content = (GOLDEN / name).read_bytes()
    whole, end = samples(content), 12 + 12 * header(content)[1]
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        if bit // 8 < end:
            with pytest.raises(FormatError):
                opened(bytes(damaged))
            # without checks the result may be wrong, but only our errors come out
            with contextlib.suppress(FFServeError):
                samples(bytes(damaged), verify=False)
        else:
            found = samples(bytes(damaged))
            wrong = [k for k, sample in enumerate(found) if sample != whole[k]]
            assert len(wrong) == 1 and found[wrong[0]] == "checksum"


@pytest.mark.parametrize("count", [-1, -(2**63), 2**28, 2**40, 2**62, 2**63 - 1, 0xFFFFFFFF])
def test_absurd_count_allocates_nothing(count: int) -> None:
    content = with_crc(struct.pack("<Iq", 0, count) + bytes(100)) if count > 100 else b""
    content = content or struct.pack("<Iq", 7, count) + bytes(100)
    for verify in (True, False):
        with pytest.raises(FormatError, match=r"header.* counts"):
            opened(content, verify)


@pytest.mark.parametrize(
    ("offsets", "index"),
    [((47, 48, 49), 0), ((49, 48, 49), 0), ((48, 50, 49), 2), ((48, -1, 49), 1), ((0, 0, 0), 0)],
)
def test_offsets_out_of_order_are_refused_though_the_crc_is_right(
    offsets: tuple[int, ...], index: int
) -> None:
    content = struct.pack("<Iq3I3q", 0, 3, 1, 2, 3, *offsets) + bytes(9)
    for verify in (True, False):
        with pytest.raises(FormatError, match=f"invalid offset .* of sample {index}:") as caught:
            opened(with_crc(content), verify)
        assert caught.value.offset == 12 + 4 * 3 + 8 * index


def test_disorder_across_a_piece_border_is_found() -> None:
    count = PIECE_SIZE // 8 + 5
    offsets = np.arange(count, dtype="<i8") + (12 + 12 * count)
    for at in (PIECE_SIZE // 8, PIECE_SIZE // 8 + 1, count - 1):
        wrong = offsets.copy()
        wrong[at] = wrong[at - 1] - 1
        content = struct.pack("<Iq", 0, count) + bytes(4 * count) + wrong.tobytes() + bytes(count)
        with pytest.raises(FormatError, match=f"invalid offset .* of sample {at}:"):
            opened(with_crc(content))


def test_old_file_without_metadata_crc_opens_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = (GOLDEN / "plain.ffr").read_bytes()
    old = bytes(4) + content[4:]
    with caplog.at_level(logging.WARNING, "ffserve"):
        assert samples(old) == samples(content)
    assert "old ffrecord" in caplog.text and "some.ffr" in caplog.text
    damaged = bytearray(old)
    damaged[-1] ^= 1
    assert samples(bytes(damaged))[-1] == "checksum"
    assert opened(old).fingerprint == opened(content).fingerprint
    caplog.clear()


def test_fingerprint_tells_files_apart_and_copies_not() -> None:
    names = [*WHOLE, "packed.ffr"]
    prints = {opened((GOLDEN / name).read_bytes()).fingerprint for name in names}
    assert len(prints) == len(names)
    assert all(0 <= value < 2**64 for value in prints)
    assert opened((GOLDEN / "plain.ffr").read_bytes()).fingerprint == 0xBEEA12F241925980


def test_small_tables_were_read_twice() -> None:
    content = (GOLDEN / "plain.ffr").read_bytes()
    asked = []

    def read_at(offset: int, into: memoryview, /) -> int:
        asked.append((offset, len(into)))
        return reader_of(content)(offset, into)

    shard = FFRECORD.open(read_at, len(content), "some.ffr")
    tables(shard)
    assert asked == [(0, 12), (12, 12 * shard.count)]


@pytest.mark.parametrize("name", WHOLE)
def test_small_tables_are_kept_as_large_ones_are_read(name: str) -> None:
    content = (GOLDEN / name).read_bytes()
    shard = opened(content)
    other = FFRecord(kept_count=-1).open(reader_of(content), len(content), "some.ffr")
    assert (shard.count, shard.fingerprint) == (other.count, other.fingerprint)
    assert tables(shard) == tables(other)


def test_load_refuses_tables_that_changed() -> None:
    content = bytearray((GOLDEN / "plain.ffr").read_bytes())
    shard = FFRecord(kept_count=0).open(
        lambda offset, into: reader_of(bytes(content))(offset, into), len(content), "some.ffr"
    )
    content[13] ^= 1
    with pytest.raises(ReadError, match="changed"):
        tables(shard)
    del content[100:]
    with pytest.raises(TruncatedError):
        tables(shard)


def test_load_wants_arrays_of_the_right_length() -> None:
    shard = opened((GOLDEN / "one.ffr").read_bytes())
    with pytest.raises(UsageError, match="shape"):
        shard.load(np.zeros(2, np.uint64), np.zeros(1, np.uint64), np.zeros(1, np.uint32))


@pytest.mark.check
def test_ten_million_samples_open_and_load_within_a_second(tmp_path: Path) -> None:
    count = 10_000_000
    path = tmp_path / "many.ffr"
    checksums = np.arange(count, dtype="<u4")
    offsets = 12 + 12 * count + 1000 * np.arange(count, dtype="<i8")
    body = struct.pack("<q", count) + checksums.tobytes() + offsets.tobytes()
    path.write_bytes(struct.pack("<I", zlib.crc32(body)) + body)
    os.truncate(path, 12 + 12 * count + 1000 * count)
    into = np.ones(count, np.uint64), np.ones(count, np.uint64), np.ones(count, np.uint32)
    fd = os.open(path, os.O_RDONLY)
    try:
        begun = time.perf_counter()
        shard = FFRECORD.open(
            lambda offset, view: os.preadv(fd, [view], offset), os.fstat(fd).st_size, str(path)
        )
        opened_at = time.perf_counter()
        shard.load(*into)
        loaded_at = time.perf_counter()
    finally:
        os.close(fd)
    assert (into[0] == offsets).all() and (into[1] == 1000).all() and (into[2] == checksums).all()
    print(f"10 M samples: open {opened_at - begun:.3f} s, load {loaded_at - opened_at:.3f} s")
    assert loaded_at - begun < 10  # 0.2 s alone on 2 cores; the margin is for a busy machine


def test_2_to_the_28_samples_are_walked_in_pieces() -> None:
    """The tables (3 GiB) exist only as a function; the walk is stopped after the first pieces."""
    count = 2**28 + 3
    asked: list[tuple[int, int]] = []

    class Enough(Exception):
        pass

    def read(offset: int, into: memoryview) -> int:
        asked.append((offset, len(into)))
        if len(asked) == 4:
            raise Enough
        if offset == 0:
            into[:] = struct.pack("<Iq", 1, count)
        return len(into)

    with pytest.raises(Enough):
        FFRECORD.open(read, 12 + 12 * count + 5, "huge.ffr")
    assert asked[1:] == [(12 + k * PIECE_SIZE, PIECE_SIZE) for k in range(3)]


def test_sniff_and_detect() -> None:
    for name in [*WHOLE, "packed.ffr"]:
        content = (GOLDEN / name).read_bytes()
        found = FFRECORD.sniff(content[:HEAD_SIZE], len(content))
        assert found is (None if name == "wide.ffr" else True)
        assert detect(content[:HEAD_SIZE], "no-suffix", len(content)).name == "ffrecord"
    for name in DAMAGED:  # by suffix, so that FFRecord can say what is wrong
        content = (GOLDEN / "damaged" / name).read_bytes()
        assert detect(content[:HEAD_SIZE], name, len(content)).name == "ffrecord"
    assert FFRECORD.sniff(b"", 0) is False
    with pytest.raises(FormatError, match="format"):
        detect(b"", "nothing", 0)
    assert by_suffix("a/B.FFR") is FFRECORD and by_suffix("a.zip") is None
    with pytest.raises(UsageError, match="ffrecord"):
        by_name("parquet")


def test_options_that_the_format_lacks() -> None:
    FFRECORD.writer(compression="none")
    for options in ({"compression": "gzip"}, {"dialect": "py"}, {"max_chunk_size": 5}):
        with pytest.raises(UsageError, match=next(iter(options))):
            FFRECORD.writer(**options)  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=300), max_size=30))
def test_written_then_read_is_identity(payloads: list[bytes]) -> None:
    content = written(payloads)
    assert samples(content) == payloads
    assert FFRECORD.sniff(content[:HEAD_SIZE], len(content)) is True


@given(st.binary(max_size=400))
def test_any_bytes_open_or_raise_ours(content: bytes) -> None:
    for verify in (True, False):
        try:
            samples(content, verify)
        except FFServeError:
            continue


@given(st.integers(0, 30), st.data())
def test_any_tables_with_a_right_crc_open_or_raise_ours(count: int, data: st.DataObject) -> None:
    tail = data.draw(st.binary(min_size=12 * count, max_size=12 * count + 50))
    content = with_crc(struct.pack("<Iq", 0, count) + tail)
    try:
        offsets, lengths, _ = tables(opened(content))
    except FFServeError:
        return
    assert all(o >= 12 + 12 * count for o in offsets) and all(n < 2**63 for n in lengths)
