"""RecordIO through the daemon and without one: the same samples, errors and limits."""

from __future__ import annotations

import gzip
import os
import signal
import zlib
from pathlib import Path

import numpy as np
import pytest
from daemon import Daemon, run_python, sample, serving, until, write
from engines import engine_reads
from recordio_files import (
    COUNT,
    FILES,
    GOLDEN,
    SAMPLES,
    WAYS,
    as_bytes,
    chunk,
    create,
    flipped,
    framed,
    golden,
    intact,
    opened,
    promised,
    records,
    sums,
)

import ffserve
from ffserve.errors import ChecksumError, FormatError, ReadError, TruncatedError, UsageError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    place = tmp_path_factory.mktemp("recordio")
    return {
        way: create(
            place / f"{'-'.join(way)}.recordio",
            dialect=way[0], compression=way[1], max_chunk_size=20_000 * (1 + k),
        )
        for k, way in enumerate(WAYS)
    }  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize("way", WAYS)
def test_samples_are_what_was_written(
    way: tuple[str, str], files: dict[tuple[str, str], str], server: str
) -> None:
    chosen = np.random.default_rng(5).integers(0, COUNT, 500)
    expected = [SAMPLES[k] for k in chosen]
    with ffserve.open(files[way], server=server) as reader:
        assert len(reader) == COUNT and reader.shards[0].format == "recordio"
        assert as_bytes(reader.read_batch(chosen)) == expected
        assert as_bytes(reader.read(chosen)) == expected
        assert as_bytes(reader) == SAMPLES
        assert reader.sizes().tolist() == [len(s) for s in SAMPLES]
        assert reader[COUNT - 1].tobytes() == SAMPLES[-1]
        with reader.lease(chosen[:40]) as views:
            assert as_bytes(views) == expected[:40]
        out = np.empty(sum(map(len, expected)) + 7, np.uint8)
        assert reader.read_batch(chosen, out=out).buffer.base is out


def test_a_buffer_that_is_too_small_is_refused_also_when_lengths_are_unknown(
    server: str, tmp_path: Path
) -> None:
    path = create(tmp_path / "x.recordio")
    with ffserve.open(path, server=server) as reader:
        for _ in range(2):
            with pytest.raises(UsageError, match="out has 3 bytes"):
                reader.read_batch([4, 6], out=np.empty(3, np.uint8))
        assert as_bytes(reader.read([4, 6])) == [SAMPLES[4], SAMPLES[6]]


def test_sizes_of_unread_samples(server: str, tmp_path: Path) -> None:
    path = create(tmp_path / "x.recordio", max_chunk_size=9000, compression="gzip")
    with ffserve.open(path, server=server) as reader:
        assert reader.sizes([6, 0, 6]).tolist() == [20_000, 0, 20_000]
        assert reader.sizes().tolist() == [len(s) for s in SAMPLES]
        offsets, lengths, _ = reader.tables(0)
        assert lengths.tolist() == [len(s) for s in SAMPLES]
        assert offsets[0] == 0 and (np.diff(offsets.astype(np.int64)) >= 0).all()


def test_formats_mix_in_one_data_set(
    server: str, files: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    plain = write(tmp_path / "plain.ffr", SAMPLES)
    frames = tmp_path / "frames.tfrecord"
    with ffserve.create(frames) as writer:
        for each in SAMPLES:
            writer.write(each)
    paths = [plain, files["go", "snappy"], str(frames), files["py", "gzip"], files["py", "none"]]
    with ffserve.open(paths, server=server) as reader:
        assert [s.format for s in reader.shards[:3]] == ["ffrecord", "recordio", "tfrecord"]
        chosen = np.random.default_rng(6).integers(0, len(reader), 700)
        expected = [SAMPLES[k % COUNT] for k in chosen]
        assert as_bytes(reader.read_batch(chosen)) == expected
        assert as_bytes(reader.read(chosen)) == expected
        assert as_bytes(reader) == 5 * SAMPLES


@pytest.mark.parametrize("name", sorted(FILES))
def test_golden_files(name: str, server: str) -> None:
    path = str(GOLDEN / name)
    if "trunc" in name:
        with pytest.raises(TruncatedError, match="chunk 7") as cut:
            ffserve.open(path, server=server)
        assert cut.value.path == path and cut.value.offset == FILES[name]["tail_offset"]
    elif "corrupt" not in name:
        with ffserve.open(path, server=server) as reader:
            assert sums(as_bytes(reader)) == promised(name)
    bad = FILES[name].get("bad_indices", [])
    with ffserve.open(path, server=server, on_error="skip") as reader:
        assert sums(as_bytes(reader)) == [s for k, s in enumerate(promised(name)) if k not in bad]
        assert [error.index for error in reader.damaged][: len(bad)] == bad
        assert len(reader.damaged) == len(bad) + ("trunc" in name)
        for error in reader.damaged:
            assert isinstance(error, FormatError) and error.path == path
            assert error.offset is not None


def test_damaged_chunk_fails_only_its_own_samples(server: str, tmp_path: Path) -> None:
    path = create(tmp_path / "x.recordio", max_chunk_size=900, compression="none")
    content = bytearray(Path(path).read_bytes())
    shard = opened(bytes(content))
    hit = int(shard.chunks.holding(np.array([150]))[0])
    content[int(shard.chunks.ends[hit]) - 1] ^= 4
    Path(path).write_bytes(content)
    first, stop = shard.chunks.firsts[hit : hit + 2].tolist()
    lost = set(range(first, stop))
    with ffserve.open(path, server=server) as reader:
        for _ in range(3):
            found = reader.read(range(COUNT), errors="return")
            for k, each in enumerate(found):
                if k not in lost:
                    assert bytes(each) == SAMPLES[k]
                    continue
                assert isinstance(each, ChecksumError) and f"chunk {hit}" in each.message
                assert (each.path, each.index, each.offset) == (
                    path, k, shard.chunks.begins[hit],
                )  # fmt: skip
        with pytest.raises(ChecksumError):
            reader.read([0, first])
        with pytest.raises(ChecksumError):
            reader.sizes([first])
        assert as_bytes(reader.read([first - 1, stop])) == [SAMPLES[first - 1], SAMPLES[stop]]
    with ffserve.open(path, server=server, on_error="skip") as reader:
        assert as_bytes(reader) == [s for k, s in enumerate(SAMPLES) if k not in lost]
        assert [error.index for error in reader.damaged] == sorted(lost)


@pytest.mark.check
@pytest.mark.parametrize("way", [("py", "snappy"), ("go", "none")])
def test_any_bit_of_a_header_flipped(way: tuple[str, str], server: str, tmp_path: Path) -> None:
    words = [b"a", b"", b"bc" * 9, b"d" * 40]
    path = tmp_path / "x.recordio"
    create(path, words, dialect=way[0], compression=way[1], max_chunk_size=40)
    content = path.read_bytes()
    middle = opened(content).chunks.begins[1]
    for place, damaged in flipped(content):
        if not middle <= place < middle + 20 or (server != "off" and place % 4):
            continue
        path.write_bytes(damaged)
        expected = records(damaged, tolerant=True)
        with ffserve.open(path, server=server, on_error="skip") as reader:
            assert as_bytes(reader) == intact(expected)
            assert len(reader.damaged) == len(expected) - len(intact(expected))


def bomb(path: Path, size: int) -> str:
    """A small chunk, one that is large when decoded, and a small one."""
    compressor = zlib.compressobj(9, wbits=31)
    payload = compressor.compress((size - 4).to_bytes(4, "little"))
    for done in range(0, size - 4, 1 << 20):
        payload += compressor.compress(bytes(min(1 << 20, size - 4 - done)))
    payload += compressor.flush()
    small = chunk(framed(b"small"), 1)
    path.write_bytes(small + chunk(payload, 1, "py", 3) + small)
    return str(path)


@pytest.mark.check
def test_a_chunk_beyond_the_limit_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.recordio", 200 << 20)
    assert os.path.getsize(path) < 1 << 20
    with serving(options=["--max-chunk-size", "64MiB"]) as daemon, daemon.open(path) as reader:
        before = peak(daemon.pid)
        found = reader.read([0, 1, 2], errors="return")
        assert bytes(found[0]) == bytes(found[2]) == b"small"
        assert isinstance(found[1], FormatError) and "limit" in found[1].message
        assert "max_chunk_size" in str(found[1])
        assert peak(daemon.pid) - before < 32 << 20


def test_a_chunk_larger_than_the_arena_is_refused(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.recordio", 20 << 20)
    with serving(arena="8MiB") as daemon, daemon.open(path) as reader:
        before = peak(daemon.pid)
        with pytest.raises(ReadError, match="does not fit") as caught:
            reader.read([2, 0, 1])
        assert str(20 << 20) in str(caught.value) and caught.value.index == 1
        assert bytes(reader[2]) == b"small"
        assert peak(daemon.pid) - before < 16 << 20
    with ffserve.open(path, server="off") as reader:
        assert reader[1].nbytes == (20 << 20) - 4 and not reader[1].any()


def peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


def test_a_bomb_that_lies_about_its_size_ends_with_its_slot(server: str, tmp_path: Path) -> None:
    small = framed(b"x" * 60)
    lying = bytearray(gzip.compress(framed(bytes(4 << 20))))
    lying[-4:] = len(small).to_bytes(4, "little")
    path = tmp_path / "x.recordio"
    path.write_bytes(chunk(bytes(lying), 1, "py", 3) + chunk(small, 1))
    with ffserve.open(path, server=server) as reader:
        with pytest.raises(FormatError, match="chunk 0"):
            reader.read([0])
        assert bytes(reader[1]) == b"x" * 60


@pytest.mark.check
def test_everything_goes_through_a_small_arena(files: dict[tuple[str, str], str]) -> None:
    paths = [files[way] for way in WAYS]
    with serving(arena="1MiB") as daemon, daemon.open(paths) as reader:
        chosen = np.random.default_rng(7).permutation(len(reader))
        found = as_bytes(reader.read(chosen))
        assert found == [SAMPLES[k % COUNT] for k in chosen]
        assert daemon.cache()["evicted"] > 0
        assert as_bytes(reader) == len(WAYS) * SAMPLES


def test_a_scan_in_order_decodes_each_chunk_once(tmp_path: Path) -> None:
    samples = [sample(k, (9000, 12_000)) for k in range(1500)]
    path = create(tmp_path / "x.recordio", samples, max_chunk_size=100_000, compression="snappy")
    chunks = len(opened(Path(path).read_bytes()).chunks)
    with serving(arena="64MiB") as daemon, daemon.open(path) as reader:
        assert as_bytes(reader) == samples
        assert daemon.cache()["blocks_read"] == chunks
    before = engine_reads()
    with ffserve.open(path, server="off") as reader:
        assert as_bytes(reader) == samples
    assert engine_reads() - before == chunks


def test_neighbours_are_not_decoded_again(tmp_path: Path) -> None:
    path = create(tmp_path / "x.recordio", max_chunk_size=1 << 20)
    with ffserve.open(path, server="off") as reader:
        assert reader[0].tobytes() == SAMPLES[0]
        before = engine_reads()
        for k in range(1, 40):
            assert reader[k].tobytes() == SAMPLES[k]
        assert engine_reads() == before


def test_small_chunks_share_a_block(tmp_path: Path) -> None:
    samples = [sample(k, (100,)) for k in range(2000)]
    path = create(tmp_path / "x.recordio", samples)
    with serving() as daemon, daemon.open(path) as reader:
        assert as_bytes(reader.read(range(2000))) == samples
        assert daemon.cache()["blocks_read"] < 2000 * 104 // 8192 + 4
        assert len(opened(Path(path).read_bytes()).chunks) == 200


OTHER = """
import sys
import ffserve
paths, socket = sys.argv[2:], sys.argv[1]
with ffserve.open(paths, server=socket) as reader:
    print(sum(int(sample.sum()) for sample in reader))
"""


@pytest.mark.check
def test_two_processes_of_different_formats_share_one_arena(
    files: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    plain = write(tmp_path / "plain.ffr", SAMPLES)
    packed = files["go", "gzip"]
    total = sum(sum(s) for s in SAMPLES)
    with serving() as daemon, daemon.open(plain) as reader:
        assert as_bytes(reader) == SAMPLES
        assert int(run_python(OTHER, daemon.socket, packed).stdout) == total
        read = daemon.cache()["blocks_read"]
        # Each now finds in memory what the other has read.
        assert int(run_python(OTHER, daemon.socket, plain, packed).stdout) == 2 * total
        with daemon.open(packed) as other:
            assert as_bytes(other) == SAMPLES
        assert daemon.cache()["blocks_read"] == read
        shards = {s["format"]: s for s in daemon.status()["shards"]}
        assert shards["ffrecord"]["cached_size"] > 0 and shards["recordio"]["cached_size"] > 0


KILLED = """
import os, signal, sys
import numpy as np
import ffserve
reader = ffserve.open(sys.argv[2], server=sys.argv[1])
with reader.lease([0, 1]):
    for start in range(0, 300, 10):
        reader._selector.current().start(np.arange(start, start + 10), apart=False)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_client_leaves_nothing_behind(tmp_path: Path) -> None:
    path = create(tmp_path / "x.recordio", max_chunk_size=50_000, compression="gzip")
    with serving(arena="1MiB") as daemon:
        done = run_python(KILLED, daemon.socket, path, code=None)
        assert done.returncode == -signal.SIGKILL, done.stderr
        with daemon.open(path) as reader:
            assert as_bytes(reader.read(range(COUNT))) == SAMPLES
        until(lambda: not any(j["sessions"] for j in daemon.status()["jobs"]), "sessions end")


def test_a_reader_goes_on_when_the_daemon_starts_anew(tmp_path: Path) -> None:
    path = create(tmp_path / "x.recordio", compression="snappy", max_chunk_size=5000)
    daemon = Daemon()
    try:
        daemon.start()
        with daemon.open(path) as reader:
            found = []
            for k, batch in enumerate(reader.batches(count=20)):
                found += as_bytes(batch)
                if k == 5:
                    daemon.end(signal.SIGKILL)
                    daemon.start()
            assert found == SAMPLES
        assert daemon.end() == 0
    finally:
        daemon.close()


def test_workers_after_a_fork(files: dict[tuple[str, str], str], server: str) -> None:
    with ffserve.open(files["py", "snappy"], server=server) as reader:
        assert reader[6].tobytes() == SAMPLES[6]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if as_bytes(reader.read(range(COUNT))) == SAMPLES else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert as_bytes(reader.read(range(COUNT))) == SAMPLES


def test_golden_is_what_the_manifest_says() -> None:
    for name in FILES:
        golden(name)
