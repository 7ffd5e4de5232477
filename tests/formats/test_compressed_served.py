"""Compressed TFRecord through readers: with and without a daemon, index files, commands."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run, text_of
from daemon import Daemon, serving
from tfrecord_files import starts, written

import ffserve
from ffserve.disk import index_file, shardfile
from ffserve.errors import ChecksumError, FFServeError, FormatError, ReadError
from ffserve.formats import tfcompressed

RNG = np.random.default_rng(4)
WORDS = [RNG.bytes(int(n)) for n in RNG.integers(2, 12, 300)]
SAMPLES = [
    b" ".join(WORDS[k] for k in RNG.integers(0, 300, n))
    for n in RNG.integers(0, 5000, 350).tolist()
]
ALL = range(len(SAMPLES))
PLAIN = written(SAMPLES)
PACK: dict[str, Any] = {"gz": gzip.compress, "zlib": zlib.compress}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    return place / "ffserve" / "index"


@pytest.fixture(params=["gz", "zlib", "ours.gz", "ours.zlib"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file of another writer, or of ours; more than one chunk."""
    file = tmp_path / f"a.tfrecord.{request.param.removeprefix('ours.')}"
    if request.param in PACK:
        file.write_bytes(PACK[request.param](PLAIN))
    else:
        with ffserve.create(file) as writer:
            for sample in SAMPLES:
                writer.write(sample)
    return str(file)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read as a whole by this process."""
    seen: list[str] = []
    real = tfcompressed.scan

    def counting(read_at: Any, size: int, path: str, *rest: Any, **options: Any) -> Any:
        seen.append(path)
        return real(read_at, size, path, *rest, **options)

    monkeypatch.setattr(tfcompressed, "scan", counting)
    return seen


def same(found: Any, indices: Any = ALL) -> bool:
    return [bytes(each) for each in found] == [SAMPLES[k] for k in indices]


def test_read_at_random_by_the_daemon_and_without(daemon: Daemon, path: str) -> None:
    order = np.random.default_rng(1).permutation(len(SAMPLES))
    for server in (daemon.socket, "off"):
        with ffserve.open(path, server=server) as reader:
            assert len(reader) == len(SAMPLES)
            assert reader.source.startswith("engine" if server == "off" else "daemon")
            assert reader.sizes().tolist() == [len(each) for each in SAMPLES]
            reader.announce(order)
            for part in np.array_split(order, 9):
                assert same(reader.read_batch(part), part)
            assert same(reader.read(order[:30]), order[:30])
            with reader.lease(order[:40]) as views:
                assert same(views, order[:40])
            assert same(reader) and same(next(reader.batches(range(5))), range(5))
            assert reader.shards[0].format == "tfrecord"
            assert reader.tables(0)[1].tolist() == [len(each) for each in SAMPLES]
    assert daemon.cache()["failed"] == 0


@pytest.mark.check
async def test_awaited(daemon: Daemon, path: str) -> None:
    for server in (daemon.socket, "off"):
        async with ffserve.aio.open(path, server=server) as reader:
            assert len(reader) == len(SAMPLES)
            assert same(await reader.read([300, 2, 2]), [300, 2, 2])
            assert same([sample async for sample in reader])


def test_chunk_is_decoded_once_for_all(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "once.tfrecord.gz"
    file.write_bytes(gzip.compress(PLAIN))
    read = daemon.cache()["blocks_read"]
    with daemon.open(file) as one, daemon.open(file) as two:
        assert same(one) and same(two) and same(one.read(range(len(SAMPLES))))
    chunks = -(-len(PLAIN) // tfcompressed.SPAN_SIZE)
    assert chunks - 2 <= daemon.cache()["blocks_read"] - read <= chunks


@pytest.mark.check
def test_arena_smaller_than_the_records(tmp_path: Path) -> None:
    file = tmp_path / "a.tfrecord.gz"
    payloads = [RNG.bytes(40_000) + bytes(30_000) for _ in range(700)]
    file.write_bytes(gzip.compress(written(payloads), 1))
    order = np.random.default_rng(2).permutation(len(payloads))
    with serving(arena="16MiB") as small, small.open(file) as reader:
        for part in np.array_split(order, 20):
            found = reader.read(part)
            assert [bytes(each) for each in found] == [payloads[k] for k in part]


# ---- index files ---------------------------------------------------------------------------------


def large(tmp_path: Path, name: str = "large.tfrecord.gz") -> tuple[str, list[bytes]]:
    """A file that is large enough to get an index file."""
    payloads = [RNG.bytes(30_000) + SAMPLES[k % 350] for k in range(90)]
    compress = gzip.compress if name.endswith("gz") else zlib.compress
    (tmp_path / name).write_bytes(compress(written(payloads)))
    return str(tmp_path / name), payloads


@pytest.mark.parametrize("name", ["large.tfrecord.gz", "large.tfrecord.zlib"])
def test_second_opening_reads_the_index_file(tmp_path: Path, passes: list[str], name: str) -> None:
    path, payloads = large(tmp_path, name)
    place = tmp_path / f".{name}.ffx"
    for _ in range(3):
        with ffserve.open(path, server="off") as reader:
            assert len(reader) == 90 and bytes(reader[71]) == payloads[71]
        assert place.stat().st_size < 90 * 8 + 72 + 4 + 24 + 3 * 40 + 3 * 33_000
    assert passes == [path]
    with ffserve.open(path, server="off") as reader:
        copy = pickle.loads(pickle.dumps(reader))
        assert len(reader) == 90 and bytes(copy[89]) == payloads[89]
    assert passes == [path]


def test_every_flipped_byte_of_an_index_file_is_noticed(tmp_path: Path, passes: list[str]) -> None:
    path, payloads = large(tmp_path)
    assert "1 file indexed, 90 samples" in text_of("index", path)
    place = index_file.beside(path)
    assert place is not None
    whole = Path(place).read_bytes()
    for at in (70, 200, 900, 1000, len(whole) - 10):
        wrong = bytearray(whole)
        wrong[at] ^= 4
        Path(place).write_bytes(wrong)
        passes.clear()
        with ffserve.open(path, server="off") as reader:
            assert bytes(reader[50]) == payloads[50]
        assert passes == [path] and Path(place).read_bytes() == whole, "made anew"


@pytest.mark.check
@pytest.mark.parametrize("source", ["daemon", "off"])
def test_records_replaced_in_place_make_the_index_anew(tmp_path: Path, source: str) -> None:
    """As with other index files: size and time are kept, both ends of the file as well."""
    path, payloads = large(tmp_path)
    old = Path(path).read_bytes()
    status = os.stat(path)
    run("index", path)
    with serving() as running:
        server = running.socket if source == "daemon" else "off"
        with ffserve.open(path, server=server) as reader:
            assert len(reader) == 90
            changed = [bytes([each[0] ^ 1]) + each[1:] for each in payloads]
            new = gzip.compress(written(changed), 1)
            middle = new[5000 : 5000 + len(old) - 9000]
            with open(path, "r+b") as file:  # a stream that begins and ends as the old one
                file.seek(4500)
                file.write(middle[: len(old) - 9000])
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            failed = reader.read(range(90), errors="return")
            kinds = {type(each) for each in failed if isinstance(each, FFServeError)}
            assert kinds <= {FormatError, ReadError, ChecksumError} and kinds
        with pytest.raises(FFServeError) as caught, ffserve.open(path, server=server) as reader:
            len(reader)
        assert caught.value.path == path, "the damage is found and located when it is opened anew"


def test_stale_index_is_found_by_a_read(tmp_path: Path) -> None:
    path, payloads = large(tmp_path)
    other, _ = large(tmp_path, "other.tfrecord.gz")
    fd = os.open(path, os.O_RDONLY)
    identity = index_file.Identity.of(fd, path, "tfrecord")
    wrong = shardfile.write_index_file(other)
    assert wrong is not None
    shard = wrong[0]
    shard.checksums[:] ^= 1  # an index of other records, as its owner could write it
    assert index_file.store(fd, path, identity, shard, "beside")
    os.close(fd)
    with ffserve.open(path, server="off") as reader:
        try:
            found = reader.read([80], errors="return")
        except FFServeError as error:
            found = [error]
        assert isinstance(found[0], ReadError) or bytes(found[0]) == payloads[80]
    with ffserve.open(path, server="off") as reader:
        assert [bytes(each) for each in reader.read(range(90))] == payloads, "it was made anew"


def test_damage_after_indexing_is_refused_with_its_place_or_fails_its_record(
    tmp_path: Path,
) -> None:
    path, payloads = large(tmp_path)
    run("index", path)
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(status.st_size // 2)
        file.write(b"\xff" * 64)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    # Bytes that deflate stored as they are decode to others; only their record's checksum tells.
    try:
        with ffserve.open(path, server="off") as reader:
            found = reader.read(range(90), errors="return")
    except FormatError as error:
        assert error.path == path
        assert error.offset is not None or error.index is not None
    else:
        failed = [k for k, each in enumerate(found) if isinstance(each, FFServeError)]
        assert all(path in str(found[k]) for k in failed)
        assert 0 < len(failed) < 90
        assert all(bytes(found[k]) == payloads[k] for k in set(range(90)) - set(failed))
    assert "damaged" in text_of("verify", path, code=1)


def test_damaged_record_is_left_out(daemon: Daemon, tmp_path: Path) -> None:
    plain, place = bytearray(PLAIN), starts(SAMPLES)[13]
    plain[place + 12] ^= 1
    file = tmp_path / "a.tfrecord.gz"
    file.write_bytes(gzip.compress(bytes(plain)))
    rest = [k for k in range(len(SAMPLES)) if k != 13]
    for server in (daemon.socket, "off"):
        with ffserve.open(file, server=server) as reader:
            found = reader.read(range(len(SAMPLES)), errors="return")
            error = found.pop(13)
            assert isinstance(error, ChecksumError) and error.index == 13
            assert same(found, rest)
        with ffserve.open(file, server=server, on_error="skip") as reader:
            assert len(reader) == len(rest) and same(reader, rest)
            assert [error.index for error in reader.damaged] == [13]


@pytest.mark.parametrize("source", ["daemon", "off"])
@pytest.mark.parametrize("many", [False, True], ids=["without an index file", "with one"])
def test_damaged_first_and_last_records_were_called_a_stale_index_for_ever(
    daemon: Daemon, tmp_path: Path, source: str, many: bool
) -> None:
    payloads = [RNG.bytes(30_000) for _ in range(90 if many else 5)]
    plain, last = bytearray(written(payloads)), len(payloads) - 1
    for number in (0, last):
        plain[starts(payloads)[number] + 12] ^= 1
    file = tmp_path / "a.tfrecord.gz"
    file.write_bytes(gzip.compress(bytes(plain), 1))
    server = daemon.socket if source == "daemon" else "off"
    for _ in range(3):
        with ffserve.open(file, server=server) as reader:
            found = reader.read(range(len(payloads)), errors="return")
            errors = [found.pop(), found.pop(0)]
            assert [type(error) for error in errors] == [ChecksumError] * 2, errors
            assert [error.index for error in errors] == [last, 0]
            assert [bytes(each) for each in found] == payloads[1:-1]


@pytest.mark.parametrize("source", ["daemon", "off"])
def test_a_damaged_chunk_of_three_was_called_a_stale_index(
    daemon: Daemon, tmp_path: Path, source: str
) -> None:
    path, payloads = large(tmp_path)
    run("index", path)
    with ffserve.open(path, server="off") as reader:
        offsets, _, _ = reader.tables(0)
    place, status = int(offsets[-1]), os.stat(path)
    with open(path, "r+b") as file:
        file.seek(place + 100)
        file.write(b"\xff" * 1000)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    index = index_file.beside(path)
    assert index is not None
    os.utime(index, (status.st_mtime + 3600,) * 2)  # as if the disk had lost the bytes since then
    server = daemon.socket if source == "daemon" else "off"
    for _ in range(2):
        with ffserve.open(path, server=server) as reader:
            found = reader.read(range(90), errors="return")
            failed = [k for k, each in enumerate(found) if isinstance(each, FFServeError)]
            assert 0 < len(failed) < 60 and failed[-1] == 89
            for k in failed:
                assert isinstance(found[k], FormatError) and found[k].index == k, found[k]
            assert all(bytes(found[k]) == payloads[k] for k in set(range(90)) - set(failed))


# ---- users of readers ----------------------------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_loader(
    daemon: Daemon, path: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from ffserve import torch

    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    loader = torch.DataLoader(
        torch.RawDataset(path), batch_size=32, shuffle=True, num_workers=workers, collate_fn=list
    )
    assert len(loader) == 11
    found = sorted(bytes(each) for batch in loader for each in batch)
    assert found == sorted(SAMPLES)


@pytest.mark.check
def test_commands(path: str, tmp_path: Path) -> None:
    [facts] = json.loads(text_of("inspect", "--json", path))
    assert facts["samples"] == len(SAMPLES) and facts["format"] == "tfrecord"
    assert facts["compression"] == ("gzip" if path.endswith("gz") else "zlib")
    assert facts["decoded_size_bytes"] == len(PLAIN)
    assert facts["sample_size_bytes"]["max"] == max(map(len, SAMPLES))
    assert "compression" in text_of("inspect", path)
    assert "all intact" in text_of("verify", path)
    rows = json.loads(text_of("ls", "--json", "--start", "340", "--count", "3", path))
    assert [row["size_bytes"] for row in rows] == [len(each) for each in SAMPLES[340:343]]
    found = run("cat", path, "349", "0", "5:7").stdout
    assert found == b"".join(SAMPLES[k] for k in (349, 0, 5, 6))
    assert "1 file indexed, 350 samples" in text_of("index", path)
    for shards in (1, 3):
        out = tmp_path / f"out{shards}{'.ffr' if shards == 1 else ''}"
        run("convert", path, out, "--format", "ffrecord", "--shards", str(shards), "--verify")
        with ffserve.open(out, server="off") as reader:
            assert same(reader)
