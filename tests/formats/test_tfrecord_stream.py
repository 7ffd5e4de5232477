"""TFRecord in order: compressed files, streams fed byte by byte, bombs, damage."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import tracemalloc
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tfrecord_files import SMALL, starts, written

import ffserve
from ffserve.errors import ChecksumError, FFServeError, FormatError, TruncatedError, UsageError
from ffserve.formats import detect
from ffserve.formats.tfrecord import frame_header
from ffserve.formats.tfstream import PIECE_SIZE, FrameStream, Inflater, compression_of
from ffserve.reader import StreamReader

GOLDEN = Path(__file__).parents[1] / "golden" / "tfrecord"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
MANY = [bytes([k % 251]) * (k % 40) for k in range(300)]
PACK: dict[str, Any] = {
    "none": bytes,
    "gzip": gzip.compress,
    "zlib": zlib.compress,
}


def through(pieces: Iterable[bytes], compression: str, **options: Any) -> list[bytes]:
    """Records of a file that comes in pieces; an error is kept for after the records."""
    inflater, stream = Inflater("some", compression), FrameStream("some", **options)
    found: list[bytes] = []

    def take(data: bytes) -> None:
        while (records := stream.feed(data)) is not None:
            data = b""
            for offset, length, bad in zip(
                records.offsets.tolist(), records.lengths.tolist(), records.damaged, strict=True
            ):
                if bad:
                    raise ChecksumError("damaged", index=len(found))
                found.append(records.block[offset : offset + length])

    try:
        for piece in pieces:
            for plain in inflater.feed(piece):
                assert 0 < len(plain) <= max(PIECE_SIZE, len(piece))
                take(plain)
        inflater.close()
        stream.close()
    except FFServeError as error:
        error.found = found  # type: ignore[attr-defined]
        raise
    return found


def one_by_one(content: bytes) -> list[bytes]:
    return [content[k : k + 1] for k in range(len(content))]


def outcome(pieces: Iterable[bytes], compression: str) -> tuple[list[bytes], type | None]:
    try:
        return through(pieces, compression), None
    except FFServeError as error:
        return error.found, type(error)  # type: ignore[attr-defined]


@pytest.mark.parametrize("compression", PACK)
def test_whole_feed_equals_byte_by_byte(compression: str) -> None:
    content = PACK[compression](written(SMALL))
    assert through([content], compression) == SMALL
    assert through(one_by_one(content), compression) == SMALL
    assert through([b"", content[:7], b"", content[7:], b""], compression) == SMALL


@pytest.mark.parametrize("compression", PACK)
def test_every_cut_raises_or_leaves_whole_records(compression: str) -> None:
    plain = written(SMALL)
    content, places = PACK[compression](plain), starts(SMALL)
    for size in range(len(content)):
        found, error = outcome([content[:size]], compression)
        assert outcome(one_by_one(content[:size]), compression) == (found, error)
        whole = compression == "none" and size in places
        assert error is (None if whole else TruncatedError)
        assert found == SMALL[: len(found)]


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_every_flipped_bit_raises_or_changes_nothing(compression: str) -> None:
    content = PACK[compression](written(SMALL))
    changed_nothing = 0
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        found, error = outcome([bytes(damaged)], compression)
        assert outcome(one_by_one(bytes(damaged)), compression) == (found, error)
        assert found == SMALL[: len(found)]
        assert found == SMALL if error is None else issubclass(error, FormatError)
        changed_nothing += error is None
    # the headers have a time, an operating system, a window size: nothing checks those
    assert changed_nothing < (90 if compression == "gzip" else 8)


@given(st.lists(st.binary(max_size=200), max_size=20), st.data())
def test_members_and_pieces_as_they_come(payloads: list[bytes], data: st.DataObject) -> None:
    plain = written(payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(plain)), max_size=4)))
    edges = [0, *cuts, len(plain)]
    members = [gzip.compress(plain[a:b]) for a, b in pairwise(edges)]
    content = b"".join(members) + bytes(data.draw(st.integers(0, 3)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=4)))
    edges = [0, *cuts, len(content)]
    pieces = [content[a:b] for a, b in pairwise(edges)]
    assert through(pieces, "gzip") == payloads


def test_rest_behind_a_stream() -> None:
    content = zlib.compress(written(SMALL))
    with pytest.raises(FormatError, match="bytes follow the end") as caught:
        through([content + b"x"], "zlib")
    assert caught.value.offset == len(content)
    with pytest.raises(FormatError, match="gzip stream is damaged"):
        through([gzip.compress(written(SMALL)) + b"garbage that is no member"], "gzip")


def test_sniffing_is_by_the_bytes() -> None:
    for name in ("mixed.tfrecord.gz", "mixed.tfrecord.zlib"):
        head = (GOLDEN / name).read_bytes()[:4096]
        assert compression_of(head) == {"gz": "gzip", "zlib": "zlib"}[name.rsplit(".", 1)[1]]
        assert detect(head, "no-suffix", 75000).name == "tfrecord"
    for other in (b"", b"x", b"\x1f", b"x\x9c", b"x^2 is x times x", b"plain", written(MANY)):
        assert compression_of(other) is None
    assert compression_of(b"\x1f\x8b\x08") == "gzip", "cut, but surely that"
    assert compression_of(gzip.compress(b"short")) is None
    assert compression_of(zlib.compress(b"short")) is None
    assert compression_of(gzip.compress(b"")) == "gzip"
    assert compression_of(zlib.compress(b"")) == "zlib"
    assert compression_of(gzip.compress(b"no frames here, none at all")) is None
    assert compression_of(zlib.compress(b"no frames here, none at all")) is None
    assert compression_of(gzip.compress(b"") + gzip.compress(written(SMALL))) == "gzip"
    # plain files whose first length begins like a compressed file
    for length in (0x088B1F, 0x9C78):
        assert compression_of(frame_header(length) + bytes(100)) is None


@pytest.mark.check
@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_bomb_costs_no_more_than_the_limit(compression: str) -> None:
    zeros = zlib.compressobj(9, zlib.DEFLATED, 31 if compression == "gzip" else 15)
    huge = 256 << 20
    bomb = zeros.compress(written([b"first"]) + frame_header(huge))
    for _ in range(huge >> 20):
        bomb += zeros.compress(bytes(1 << 20))
    bomb += zeros.flush()
    assert len(bomb) < 300_000
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="limit of 1048576") as caught:
            through([bomb], compression, limit=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.found == [b"first"]  # type: ignore[attr-defined]
    assert caught.value.index == 1


@pytest.mark.parametrize("length", [2**31, 2**62, 2**64 - 1])
def test_absurd_length(length: int) -> None:
    with pytest.raises(FormatError, match=f"record 1 has {length} bytes"):
        through([written([b"a"]) + frame_header(length) + b"rest"], "none")


# ---- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixed.tfrecord.gz", "mixed.tfrecord.zlib"])
def test_golden_reads_as_tensorflow_wrote_it(name: str) -> None:
    with ffserve.open(GOLDEN / name) as reader:
        for _ in range(2):
            found = [
                {"len": len(s), "sha256": hashlib.sha256(s.tobytes()).hexdigest()} for s in reader
            ]
            assert found == MANIFEST["files"][name]["samples"]
        assert reader.source == "stream" and reader.stats()["samples"] == len(found)


def packed(path: Path, payloads: Sequence[bytes], **options: Any) -> Path:
    with ffserve.create(path, format="tfrecord", **options) as writer:
        for payload in payloads:
            writer.write(payload)
    return path


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("a.tfrecord.gz", {}, "gzip"),
        ("a.tfrecord.zlib", {}, "zlib"),
        ("a.tfrecord", {"compression": "gzip"}, "gzip"),
        ("a.bin", {"compression": "zlib"}, "zlib"),
        ("a.tfrecord.gz", {"compression": "none"}, None),
    ],
)
def test_written_and_read(
    tmp_path: Path, name: str, options: dict[str, str], expected: str | None
) -> None:
    path = packed(tmp_path / name, MANY, **options)
    assert compression_of(path.read_bytes()[:4096]) == expected
    with ffserve.open(path, server="off") as reader:
        assert isinstance(reader, StreamReader) is (expected is not None)
        assert [sample.tobytes() for sample in reader] == MANY
        assert all(sample.flags.writeable for sample in reader)
        batches = list(reader.batches(count=7, size=100))
        assert max(map(len, batches)) <= 7 and sum(map(len, batches)) == len(MANY)


def test_empty_compressed_file(tmp_path: Path) -> None:
    with ffserve.open(packed(tmp_path / "a.tfrecord.gz", [])) as reader:
        assert list(reader) == []


ATTEMPTS: dict[str, Any] = {
    "len": lambda reader: len(reader) == len(MANY),
    "index": lambda reader: bytes(reader[7]) == MANY[7],
    "slice": lambda reader: [bytes(each) for each in reader[3:6]] == MANY[3:6],
    "read": lambda reader: (
        [bytes(each) for each in reader.read(np.array([5, 2]))] == [MANY[5], MANY[2]]
    ),
    "read_batch": lambda reader: reader.read_batch(np.array([9])).buffer.tobytes() == MANY[9],
    "sizes": lambda reader: reader.sizes().tolist() == [len(each) for each in MANY],
    "estimates": lambda reader: len(reader.estimates()) == len(MANY),
    "shards": lambda reader: reader.shards[0].count == len(MANY),
    "tables": lambda reader: reader.tables(0)[1].tolist() == [len(each) for each in MANY],
    "announce": lambda reader: reader.announce(range(len(MANY))) is None,
    "lease": lambda reader: [bytes(each) for each in _leased(reader, [4, 4])] == [MANY[4]] * 2,
    "batches": lambda reader: sum(map(len, reader.batches(range(9)))) == 9,
    "scan": lambda reader: sum(len(batch) for _, batch, _ in reader.scan()) == len(MANY),
    "contains": lambda reader: len(list(reversed(reader))) == len(MANY),
}


def _leased(reader: Any, indices: list[int]) -> list[bytes]:
    with reader.lease(indices) as views:
        return [bytes(each) for each in views]


@pytest.mark.parametrize("name", ["a.tfrecord.gz", "a.tfrecord.zlib"])
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_what_needs_an_index_makes_one(tmp_path: Path, name: str, attempt: str) -> None:
    path = packed(tmp_path / name, MANY)
    with ffserve.open(path, server="off") as reader:
        assert reader and reader.source == "stream" and str(path) in repr(reader)
        assert bytes(next(iter(reader))) == MANY[0] and reader.source == "stream"
        assert ATTEMPTS[attempt](reader)
        assert reader.source.startswith("engine") and len(reader) == len(MANY)
        for same in (reader, pickle.loads(pickle.dumps(reader))):
            assert [sample.tobytes() for sample in same] == MANY and "300 samples" in repr(same)


def test_a_copy_streams_until_it_needs_an_index(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tfrecord.gz", MANY)
    with ffserve.open(path, server="off") as reader:
        copy = pickle.loads(pickle.dumps(reader))
        assert sum(1 for _ in copy) == len(MANY) and copy.source == "stream"
        assert len(copy) == len(MANY) and reader.source == "stream"


def test_threads_that_ask_at_once_open_the_files_once(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tfrecord.gz", MANY)
    with ffserve.open(path, server="off", on_error="skip") as reader, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: reader[k].tobytes(), range(40)))
    assert found == MANY[:40]


def test_damaged_file_has_no_index_but_is_read_up_to_the_damage(tmp_path: Path) -> None:
    whole, path = gzip.compress(written(MANY)), tmp_path / "a.tfrecord.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with ffserve.open(path, server="off") as reader:
        for _ in range(2):
            with pytest.raises(TruncatedError, match="ends inside its gzip stream") as caught:
                len(reader)
            assert caught.value.offset == len(whole) // 2
        with pytest.raises(TruncatedError):
            list(reader.batches())
    with ffserve.open(path, server="off", on_error="skip") as reader:
        streamed = [sample.tobytes() for batch in reader.batches() for sample in batch]
        assert 0 < len(reader) == len(streamed) and [bytes(s) for s in reader] == streamed
        [error] = reader.damaged
        assert isinstance(error, TruncatedError) and error.index == len(streamed)


def test_a_closed_reader_went_on_reading_in_order(tmp_path: Path) -> None:
    reader = ffserve.open(packed(tmp_path / "a.tfrecord.gz", MANY))
    batches = reader.batches(count=10)
    next(batches)
    reader.close()
    for left in (batches, reader.batches()):
        with pytest.raises(UsageError, match="closed"):
            next(left)


def test_several_files_some_plain(tmp_path: Path) -> None:
    paths = [
        packed(tmp_path / "a.tfrecord.gz", MANY[:100]),
        packed(tmp_path / "b.tfrecord", MANY[100:200]),
        packed(tmp_path / "c.tfrecord.zlib", MANY[200:]),
    ]
    with ffserve.open(paths) as reader:
        assert [sample.tobytes() for sample in reader] == MANY
        assert len(reader) == len(MANY) and bytes(reader[250]) == MANY[250]
    with ffserve.open(paths[1:], server="off") as reader:
        assert [sample.tobytes() for sample in reader] == MANY[100:]


def test_records_larger_than_the_pieces(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    payloads = [rng.bytes(size) for size in (3 << 20, 5, 1 << 20, 0, 2_500_000)]
    with ffserve.open(packed(tmp_path / "a.tfrecord.gz", payloads)) as reader:
        assert [sample.tobytes() for sample in reader] == payloads


def test_damaged_record_in_a_stream(tmp_path: Path) -> None:
    plain, places = bytearray(written(MANY)), starts(MANY)
    for record in (7, 250):
        plain[places[record] + 12] ^= 1
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(bytes(plain)))
    seen = []
    with ffserve.open([path, path]) as reader, pytest.raises(ChecksumError) as caught:
        for sample in reader:
            seen.append(sample.tobytes())
    assert seen == MANY[:7] and (caught.value.index, caught.value.path) == (7, str(path))
    with ffserve.open([path, path], on_error="skip") as reader:
        intact = [m for k, m in enumerate(MANY) if k not in (7, 250)]
        for _ in range(2):
            assert [sample.tobytes() for sample in reader] == 2 * intact
            assert [error.index for error in reader.damaged] == [7, 250, 307, 550]
    with ffserve.open(path, on_error="skip") as reader:
        for _ in range(2):  # the first call counted the damaged ones
            assert reader.sizes().tolist() == [len(m) for m in intact]
    with ffserve.open(path, verify=False) as reader:
        assert len(list(reader)) == len(MANY)


def test_cut_and_damaged_streams_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    whole, path = gzip.compress(written(MANY)), tmp_path / "a.tfrecord.gz"
    path.write_bytes(whole[: len(whole) // 2])
    other = packed(tmp_path / "b.tfrecord.gz", SMALL)
    with ffserve.open([path, other]) as reader, pytest.raises(TruncatedError):
        list(reader)
    with ffserve.open([path, other], on_error="skip") as reader:
        found = [sample.tobytes() for sample in reader]
        [error] = reader.damaged
    some = len(found) - len(SMALL)
    assert 0 < some < len(MANY) and found == MANY[:some] + SMALL
    assert isinstance(error, TruncatedError) and (error.index, error.path) == (some, str(path))


def test_file_that_vanished(tmp_path: Path) -> None:
    path = packed(tmp_path / "a.tfrecord.gz", SMALL)
    for mode in ("raise", "skip"):
        with ffserve.open([path, packed(tmp_path / "b.tfrecord.gz", SMALL)], on_error=mode) as r:  # type: ignore[arg-type]
            (tmp_path / "b.tfrecord.gz").unlink()
            with pytest.raises(ffserve.ReadError, match=r"b\.tfrecord\.gz"):
                list(r)
