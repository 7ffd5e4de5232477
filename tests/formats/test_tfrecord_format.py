"""TFRecord on disk: TensorFlow's files, and everything that can be broken."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tfrecord_files import SMALL, TFRECORD, starts, written

from ffserve.engine.codec import crc32c, mask
from ffserve.errors import ChecksumError, FFServeError, TruncatedError, UsageError
from ffserve.formats import detect
from ffserve.formats.base import HEAD_SIZE, PIECE_SIZE
from ffserve.formats.tfrecord import FORMAT, LARGE_SIZE, TFRecord, TFRecordShard, frame_header
from ffserve.formats.tfstream import compression_of
from ffserve.testing import reader_of

GOLDEN = Path(__file__).parents[1] / "golden" / "tfrecord"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
PLAIN = [
    name
    for name, facts in MANIFEST["files"].items()
    if not facts["compression"] and not facts["damaged"]
]


def opened(content: bytes, format: TFRecord = FORMAT, **options: Any) -> TFRecordShard:
    shard = format.open(reader_of(content), len(content), "some.tfrecord", **options)
    assert isinstance(shard, TFRecordShard)
    return shard


def samples(content: bytes, **options: Any) -> list[bytes | None]:
    """All samples, None in place of one that cannot be read."""
    shard = opened(content, **options)
    offsets = np.empty(shard.count, np.uint64)
    lengths, checksums = np.empty_like(offsets), np.empty(shard.count, np.uint32)
    shard.load(offsets, lengths, checksums)
    found: list[bytes | None] = []
    for offset, length, checksum in zip(
        offsets.tolist(), lengths.tolist(), checksums.tolist(), strict=True
    ):
        payload = content[offset : offset + length]
        assert len(payload) == length or options.get("tolerant")
        intact = len(payload) == length and crc32c(payload) == checksum
        found.append(payload if intact else None)
    return found


def skipped(content: bytes | bytearray, format: TFRecord = FORMAT) -> list[bytes]:
    """What a tolerant reading of a file gives."""
    return [s for s in samples(bytes(content), format=format, tolerant=True) if s is not None]


# ---- what TensorFlow wrote --------------------------------------------------------------------


def test_checksums_are_those_of_the_published_examples() -> None:
    known = MANIFEST["known"]
    assert crc32c(b"123456789") == int(known['crc32c(b"123456789")'], 16)
    assert mask(crc32c(b"123456789")) == int(known["masked"], 16)
    assert mask(crc32c(b"")) == int(known['masked_crc32c(b"")'], 16)


@pytest.mark.parametrize("name", PLAIN)
def test_golden_reads_as_tensorflow_wrote_it_and_is_rewritten_byte_for_byte(name: str) -> None:
    content, facts = (GOLDEN / name).read_bytes(), MANIFEST["files"][name]
    assert hashlib.sha256(content).hexdigest() == facts["sha256"]
    found = [sample for sample in samples(content) if sample is not None]
    assert [{"len": len(s), "sha256": hashlib.sha256(s).hexdigest()} for s in found] == facts[
        "samples"
    ]
    assert written(found) == content
    assert detect(content[:HEAD_SIZE], "no-suffix", len(content)).name == "tfrecord"


def test_golden_damaged_record_fails_alone() -> None:
    facts = MANIFEST["files"]["bad_data.tfrecord"]
    found = samples((GOLDEN / "bad_data.tfrecord").read_bytes())
    assert [k for k, sample in enumerate(found) if sample is None] == facts["bad_indices"]
    intact = samples((GOLDEN / "small.tfrecord").read_bytes())
    assert all(a == b for a, b in zip(found, intact, strict=True) if a is not None)


def test_golden_cut_tail() -> None:
    content = (GOLDEN / "trunc_30.tfrecord").read_bytes()
    tail = MANIFEST["files"]["trunc_30.tfrecord"]["tail_offset"]
    with pytest.raises(TruncatedError, match="the file ends inside record") as caught:
        opened(content)
    assert (caught.value.offset, caught.value.path) == (tail, "some.tfrecord")
    assert samples(content, tolerant=True) == [*samples(content[:tail]), None]
    shard = opened(content, tolerant=True)
    assert shard.offsets[-1] == tail and shard.offsets[-1] + shard.lengths[-1] > len(content)


# ---- damage -----------------------------------------------------------------------------------


def test_cut_at_every_byte_raises_or_leaves_whole_records() -> None:
    content, places = written(SMALL), starts(SMALL)
    for size in range(len(content)):
        whole = sum(place <= size for place in places[1:])
        if size in places:
            assert samples(content[:size]) == SMALL[:whole]
        else:
            with pytest.raises(TruncatedError) as caught:
                opened(content[:size])
            assert caught.value.offset == places[whole]
        shard = opened(content[:size], tolerant=True)
        assert shard.sound is (size in places)
        assert samples(content[:size], tolerant=True) == SMALL[:whole] + [None] * (not shard.sound)
        assert shard.offsets[whole:].tolist() == [places[whole]] * (not shard.sound)


NESTED = [b"first", written([b"in", b"ner", b""]), written(SMALL), b"!"]


@pytest.mark.parametrize("payloads", [SMALL, NESTED], ids=["bytes", "frames within frames"])
def test_every_single_bit_flip_is_told_and_costs_one_record(payloads: list[bytes]) -> None:
    content, places = written(payloads), starts(payloads)
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        record = sum(place <= bit // 8 for place in places) - 1
        rest = [p for k, p in enumerate(payloads) if k != record]
        if bit // 8 < places[record] + 12:
            with pytest.raises(ChecksumError, match=f"length of record {record};") as caught:
                opened(bytes(damaged))
            assert caught.value.offset == places[record]
            shard = opened(bytes(damaged), tolerant=True)
            assert not shard.sound and shard.offsets[record] == places[record]
            assert samples(bytes(damaged), tolerant=True)[record] is None
            assert skipped(damaged) == rest
            # without checks the result may be wrong, but only our errors come out
            with contextlib.suppress(FFServeError):
                samples(bytes(damaged), verify=False)
        else:
            found = samples(bytes(damaged))
            assert found[record] is None and [s for s in found if s is not None] == rest
            assert opened(bytes(damaged), tolerant=True).sound


@given(st.data(), st.lists(st.binary(max_size=60), min_size=1, max_size=12))
def test_whatever_is_damaged_the_other_records_are_read(
    data: st.DataObject, payloads: list[bytes]
) -> None:
    damage_and_skip(data, payloads)


@pytest.mark.fuzz
@given(st.data(), st.lists(st.binary(max_size=200), min_size=1, max_size=40))
@settings(max_examples=15_000, deadline=None)
def test_whatever_is_damaged_many_times_over(data: st.DataObject, payloads: list[bytes]) -> None:
    damage_and_skip(data, payloads)


def damage_and_skip(data: st.DataObject, payloads: list[bytes]) -> None:
    content, places = bytearray(written(payloads)), starts(payloads)
    hit = data.draw(st.sets(st.integers(0, len(payloads) - 1)))
    for record in hit:
        frame = range(places[record], places[record + 1])
        for place in data.draw(st.sets(st.sampled_from(frame), min_size=1, max_size=3)):
            content[place] ^= data.draw(st.integers(1, 255))
    assert skipped(content) == [p for k, p in enumerate(payloads) if k not in hit]
    assert opened(bytes(content), tolerant=True).count >= len(payloads) - len(hit)


def test_tolerance_without_checks_leaves_lost_places_out() -> None:
    damaged = bytearray(written(SMALL))
    damaged[0] ^= 1
    assert samples(bytes(damaged), tolerant=True, verify=False) == SMALL[1:]


@pytest.mark.check
def test_frame_behind_a_damaged_header_is_found_across_window_borders() -> None:
    for size in (PIECE_SIZE - 40, PIECE_SIZE - 17, PIECE_SIZE - 12, PIECE_SIZE, PIECE_SIZE + 1):
        payloads = [bytes(size), b"second", b"third"]
        damaged = bytearray(written(payloads))
        damaged[0] ^= 1
        assert skipped(damaged) == payloads[1:]
        damaged[100] ^= 1
        assert skipped(damaged) == payloads[1:]


def test_search_without_the_proof_finds_the_same_frame() -> None:
    payloads = [bytes(2 * PIECE_SIZE), b"second", b"third"]
    damaged = bytearray(written(payloads))
    damaged[0] ^= 1
    assert skipped(damaged, TFRecord(reach=-1)) == payloads[1:]


def test_file_made_to_be_searched_is_given_up() -> None:
    count = 3000
    body = b"".join(frame_header(16 * (count - k) - 12) + b"none" for k in range(count))
    content = written([b"first"]) + b"\xff" * 12 + body
    read = 0

    def counting(offset: int, into: memoryview) -> int:
        nonlocal read
        read += len(into)
        return reader_of(content)(offset, into)

    shard = TFRecord(search_size=0).open(counting, len(content), "some.tfrecord", tolerant=True)
    assert not shard.sound and shard.offsets[0] == 12
    assert read < 20 * len(content)


@pytest.mark.parametrize("length", [101, 2**31, 2**32, 2**62, 2**63, 2**64 - 17, 2**64 - 1])
def test_absurd_length_with_a_right_checksum_allocates_nothing(length: int) -> None:
    content = written([b"first"]) + frame_header(length) + bytes(100)
    for options in ({}, {"verify": False}):
        with pytest.raises(TruncatedError, match=f"record 1: it has {length} bytes"):
            opened(content, **options)
    assert samples(content, tolerant=True) == [b"first", None]


@pytest.mark.parametrize("left", range(1, 12))
def test_bytes_left_at_the_end(left: int) -> None:
    content = written(SMALL)
    with pytest.raises(TruncatedError, match=f"{left} bytes follow record 4"):
        opened(content + bytes(left))
    with pytest.raises(TruncatedError, match=f"the file has {left} bytes"):
        opened(bytes(left))
    assert samples(content + bytes(left), tolerant=True) == [*SMALL, None]
    assert samples(bytes(left), tolerant=True) == [None]


def test_file_that_shrinks_during_the_walk() -> None:
    content = written(SMALL)
    for size in range(len(content)):
        with pytest.raises(TruncatedError, match="unexpected end of file"):
            TFRECORD.open(reader_of(content[:size]), len(content), "some.tfrecord")


# ---- the walk ---------------------------------------------------------------------------------


def random(sizes: Sequence[int]) -> list[bytes]:
    rng = np.random.default_rng(1)
    return [rng.bytes(size) for size in sizes]


def test_large_and_small_records_in_turn_are_walked_over_without_reading_the_large() -> None:
    payloads = random([3, LARGE_SIZE, 0, 5 * LARGE_SIZE, LARGE_SIZE - 1, 7, 64 * LARGE_SIZE, 1])
    content = written(payloads)
    read: list[tuple[int, int]] = []

    def counting(offset: int, into: memoryview) -> int:
        read.append((offset, len(into)))
        return reader_of(content)(offset, into)

    shard = TFRECORD.open(counting, len(content), "some.tfrecord")
    assert shard.count == len(payloads) and samples(content) == payloads
    assert len(content) > 70 * LARGE_SIZE > 5 * sum(size for _, size in read)
    assert all(b[0] >= a[0] + a[1] - 4 for a, b in pairwise(read[1:]))


def test_many_small_records_need_few_reads_and_no_more_memory_than_the_file() -> None:
    content = written([b"x"]) * 300_000
    read: list[int] = []

    def counting(offset: int, into: memoryview) -> int:
        read.append(len(into))
        return reader_of(content)(offset, into)

    shard = TFRECORD.open(counting, len(content), "some.tfrecord")
    assert shard.count == 300_000 and len(read) < 12
    assert shard.offsets.base.nbytes <= len(content)  # type: ignore[union-attr]


@pytest.mark.parametrize("shift", range(-20, 20))
def test_frames_across_window_borders(shift: int) -> None:
    payloads = random([(64 << 10) + shift - 16, 5, (128 << 10) - 30, 0, 1])
    assert samples(written(payloads)) == payloads


def test_empty_file_has_no_records() -> None:
    assert opened(b"").count == 0 and samples(b"", tolerant=True) == []
    assert TFRECORD.sniff(b"", 0) is False
    assert detect(b"", "a.tfrecord", 0).name == "tfrecord"


def test_fingerprint_tells_files_apart_and_copies_not() -> None:
    prints = {opened((GOLDEN / name).read_bytes()).fingerprint for name in PLAIN}
    assert len(prints) == len(PLAIN)
    assert opened(written(SMALL)).fingerprint == opened(bytes(written(SMALL))).fingerprint
    assert opened(written(SMALL)).fingerprint != opened(written(SMALL[::-1])).fingerprint


def test_restore_gives_the_same_shard_and_refuses_what_does_not_fill_the_file() -> None:
    shard = opened(written(SMALL))
    again = TFRECORD.restore(shard.lengths, shard.checksums, b"", shard.size, shard.path)
    assert again.offsets.tolist() == shard.offsets.tolist()
    assert again.fingerprint == shard.fingerprint
    lengths = shard.lengths

    def refused(change: Callable[[Any], Any], size: int = shard.size) -> bool:
        given = change(lengths.copy())
        sums = np.zeros(len(given), np.uint32)
        return TFRECORD.restore(given, sums, b"", size, "x") is None

    assert refused(lambda lengths: lengths[:-1])
    assert refused(lambda lengths: lengths + 1)
    assert refused(lambda lengths: lengths, shard.size + 1)
    assert refused(lambda lengths: np.append(lengths, np.uint64(2**64 - 16)))
    assert refused(lambda lengths: np.full(5, 2**63, np.uint64))


def test_load_wants_arrays_of_the_right_length() -> None:
    with pytest.raises(UsageError, match="shape"):
        opened(written(SMALL)).load(
            np.zeros(2, np.uint64), np.zeros(5, np.uint64), np.zeros(5, np.uint32)
        )


def test_options_that_the_format_lacks() -> None:
    TFRECORD.writer(compression="none", n=3)
    for options in ({"compression": "snappy"}, {"dialect": "py"}, {"max_chunk_size": 5}):
        with pytest.raises(UsageError, match=next(iter(options))):
            TFRECORD.writer(**options)


@given(st.lists(st.binary(max_size=300), max_size=30))
def test_written_then_read_is_identity(payloads: list[bytes]) -> None:
    content = written(payloads)
    assert samples(content) == payloads
    assert TFRECORD.sniff(content[:HEAD_SIZE], len(content)) is bool(payloads)


@given(st.binary(max_size=400), st.lists(st.binary(max_size=30), max_size=3))
def test_any_bytes_open_or_raise_ours_and_tolerance_never_raises(
    garbage: bytes, payloads: list[bytes]
) -> None:
    content = written(payloads) + garbage
    for options in ({}, {"verify": False}):
        with contextlib.suppress(FFServeError):
            samples(content, **options)
    if compression_of(content) is None:
        assert samples(content, tolerant=True)[: len(payloads)] == payloads


@given(st.lists(st.integers(0, 2**64 - 1), max_size=5), st.binary(max_size=64))
def test_any_lengths_with_right_checksums_open_or_raise_ours(
    lengths: list[int], tail: bytes
) -> None:
    content = b"".join(frame_header(length % 50) + bytes(20) for length in lengths) + tail
    content += b"".join(map(frame_header, lengths))
    with contextlib.suppress(FFServeError):
        shard = opened(content)
        assert (shard.offsets + shard.lengths <= len(content)).all()
    if compression_of(content) is None:
        opened(content, tolerant=True)


def test_header_is_as_published() -> None:
    assert frame_header(40) == (GOLDEN / "small.tfrecord").read_bytes()[:12]
    assert struct.unpack("<Q", frame_header(2**40)[:8]) == (2**40,)
