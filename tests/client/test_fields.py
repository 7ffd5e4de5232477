"""Samples with fields: tar files through a daemon and without, by threads and in event loops."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, serving, started
from origins import http_origin
from store_servers import reading_daemon
from tar_files import Sample, archive, numbered, write

import ffserve
import ffserve.aio
from ffserve.convert import convert
from ffserve.disk import index_file
from ffserve.errors import FFServeError, FormatError, SampleIndexError, TruncatedError, UsageError
from ffserve.reader import open_files


@pytest.fixture(scope="module", params=["uniform", "irregular"])
def data(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], list[Sample]]:
    """Two files, and their samples."""
    folder = tmp_path_factory.mktemp("data")
    irregular = request.param == "irregular"
    parts = numbered(2500), numbered(700, irregular=irregular)
    paths = [write(folder / f"{k}.tar", part) for k, part in enumerate(parts)]
    return paths, [*parts[0], *parts[1]]


def columns(samples: list[Sample], indices: Any, fields: list[str]) -> dict[str, list[Any]]:
    return {f: [samples[k].get(f) for k in indices] for f in fields}


def as_bytes(batch: dict[str, list[Any]]) -> dict[str, list[bytes | None]]:
    return {f: [None if a is None else bytes(a) for a in col] for f, col in batch.items()}


def row(sample: dict[str, Any]) -> dict[str, bytes]:
    return {name: bytes(each) for name, each in sample.items() if each is not None}


FIELDS = ["jpg", "cls", "json"]


def test_all_fields(data: tuple[list[str], list[Sample]], server: str) -> None:
    paths, samples = data
    with ffserve.open(paths, server=server) as reader:
        assert isinstance(reader, ffserve.FieldReader) and not reader.verified
        assert len(reader) == len(samples) and set(reader.fields) == set(FIELDS)
        assert [(s.first, s.count) for s in reader.shards] == [(0, 2500), (2500, 700)]
        some = random.Random(0).choices(range(len(samples)), k=300)
        expected = columns(samples, some, reader.fields)
        for _ in range(2):  # the second time they are in memory
            for indices in (some, np.array(some), tuple(some)):
                assert as_bytes(reader.read(indices)) == expected
        batch = reader.read_batch(some)
        for name, column in expected.items():
            assert [bytes(each) for each in batch[name]] == [each or b"" for each in column]
        with reader.lease(some) as leased:
            assert as_bytes(leased) == expected
        assert [row(sample) for sample in reader] == samples
        assert row(reader[7]) == samples[7]
        assert as_bytes(reader[5:9]) == columns(samples, range(5, 9), reader.fields)
        sizes = [sum(map(len, samples[k].values())) for k in some]
        assert reader.sizes(some).tolist() == reader.estimates(some).tolist() == sizes
        assert len(reader.sizes()) == len(samples)
        assert as_bytes(reader.read([])) == {name: [] for name in reader.fields}
        with pytest.raises(SampleIndexError):
            reader.read([len(samples)])
        with pytest.raises(UsageError, match="samples have several fields"):
            reader._numbers([0])  # one record each, of which ranges could be read
        found = list(reader.scan(range(100), count=7))
        assert [first for first, _, _ in found] == list(range(0, 100, 7))
        batches = list(reader.batches(range(2000, 3000), count=64))
        assert sum(len(part["jpg"]) for part in batches) == 1000


def test_one_field(data: tuple[list[str], list[Sample]], server: str) -> None:
    paths, samples = data
    some = random.Random(1).choices(range(len(samples)), k=300)
    with ffserve.open(paths, server=server, fields=["jpg"]) as reader:
        assert type(reader) is ffserve.Reader and reader.fields == ["jpg"]
        right = [samples[k]["jpg"] for k in some]
        assert [bytes(each) for each in reader.read(some)] == right
        assert [bytes(each) for each in reader.read_batch(some)] == right
        assert [bytes(each) for each in reader] == [each["jpg"] for each in samples]
        assert reader.sizes(some).tolist() == list(map(len, right))
        reader.select(some[:1])
        assert len(reader) == 1 and bytes(reader[0]) == right[0]
        assert reader.keys([0]) == [f"d/{some[0] % 2500:06}"]
    with ffserve.open(paths, server=server, fields=["json", "CLS"]) as reader:
        assert list(reader.read([1])) == ["json", "cls"]


def test_names(data: tuple[list[str], list[Sample]], server: str) -> None:
    paths, _ = data
    with ffserve.open(paths, server=server) as reader:
        keys = [f"d/{k:06}" for k in (*range(2500), *range(700))]
        assert reader.keys([0, 2499, 2500, 3199]) == [keys[k] for k in (0, 2499, 2500, 3199)]
        assert reader.names == keys and reader.index_of("d/002000") == 2000
    with open_files(paths, server=server, whole=True) as reader:
        assert reader.keys([3 * 3]) == ["d/000003.jpg"]


def test_fields_that_no_sample_has(data: tuple[list[str], list[Sample]], server: str) -> None:
    paths, samples = data
    with pytest.raises(UsageError, match="no sample has the field 'png'") as raised:
        ffserve.open(paths, server=server, fields=["jpg", "png"])
    assert raised.value.hint is not None and "'jpg', 'cls'" in raised.value.hint
    for fields in ([], ["jpg", "jpg"]):
        with pytest.raises(UsageError, match="each name once"):
            ffserve.open(paths, server=server, fields=fields)
    with pytest.raises(UsageError, match=r"write fields=\['jpg'\]"):
        ffserve.open(paths, server=server, fields="jpg")
    lacking = [k for k, sample in enumerate(samples) if "cls" not in sample]
    if not lacking:
        return
    with ffserve.open(paths, server=server, fields=["cls"]) as reader:
        with pytest.raises(FormatError, match="no field 'cls'") as failed:
            reader.read([0, lacking[0]])
        assert failed.value.index == lacking[0]
    with ffserve.open(paths, server=server, fields=["cls"], on_error="skip") as reader:
        assert [error.index for error in reader.damaged] == lacking
        assert [bytes(each) for each in reader] == [s["cls"] for s in samples if "cls" in s]


def _read_in_child(reader: Any, indices: list[int], pipe: Any) -> None:
    pipe.send(as_bytes(reader.read(indices)))
    reader.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(data: tuple[list[str], list[Sample]], server: str, method: str) -> None:
    paths, samples = data
    with ffserve.open(paths, server=server, fields=["cls", "jpg"]) as reader:
        copy = pickle.loads(pickle.dumps(reader))
        with copy:
            assert row(copy[3100]) == {k: v for k, v in samples[3100].items() if k != "json"}
        context = multiprocessing.get_context(method)
        mine, other = context.Pipe()
        child = context.Process(target=_read_in_child, args=(reader, [5, 2600], other))
        child.start()
        other.close()
        assert mine.recv() == columns(samples, [5, 2600], ["cls", "jpg"])
        child.join()


async def test_event_loops(data: tuple[list[str], list[Sample]], server: str) -> None:
    paths, samples = data
    some = random.Random(2).choices(range(len(samples)), k=300)
    async with ffserve.aio.open(paths, server=server) as reader:
        assert as_bytes(await reader.read(some)) == columns(samples, some, reader.fields)
        batch = await reader.read_batch(some)
        assert [bytes(each) for each in batch["json"]] == [samples[k]["json"] for k in some]
        assert [row(sample) async for sample in reader] == samples
        assert (await reader.keys([2500]), await reader.index_of("d/000007")) == (["d/000000"], 7)
        assert len(await reader.sizes(some)) == 300
        await reader.announce(range(len(samples)))
        reader.reached(0, 100)
    async with ffserve.aio.open(paths, server=server, fields=["jpg"]) as reader:
        assert [bytes(each) async for each in reader] == [each["jpg"] for each in samples]
    async with ffserve.aio.open(paths, server=server, fields=["cls"], on_error="skip") as reader:
        assert [bytes(each) async for each in reader] == [s["cls"] for s in samples if "cls" in s]


# ---- the daemon ----------------------------------------------------------------------------------


@pytest.fixture
def own() -> Iterator[Daemon]:
    with serving() as daemon:
        yield daemon


def test_an_announced_order_prefetches_the_chosen_fields(tmp_path: Path, own: Daemon) -> None:
    samples = [{"big": bytes(20_000), "small": b"x" * 100} for _ in range(400)]
    path = write(tmp_path / "x.tar", samples)
    order = random.Random(3).sample(range(400), 400)
    with own.open(path, fields=["small"]) as reader:
        reader.announce(order)
        for first in range(0, 400, 40):
            reader.read(order[first : first + 40])
        assert own.cache()["read_size"] < 400 * 10_000
        [shard] = own.status()["shards"]
        assert shard["format"] == "tar" and shard["count"] == 800 and not shard["verified"]


def test_positions_count_samples(tmp_path: Path, own: Daemon) -> None:
    """The daemon is told of records; a job counts samples."""
    path = write(tmp_path / "x.tar", numbered(60, irregular=True))
    with own.open(path) as reader:
        reader.announce(range(60))
        records = np.cumsum([3 - (k % 3 == 0) for k in range(60)]).tolist()
        assert [reader._counted(0, k)[1] for k in (0, 1, 2, 60, 99)] == [
            0, records[0], records[1], records[59], records[59],
        ]  # fmt: skip
        for k in range(0, 60, 6):
            reader.read(range(k, k + 6))
        reader.reached(0, 60)


def test_daemons_of_a_release_without_tar_files(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", numbered(10))
    patch = (
        "from ffserve.server.sessions.state import ServerState as S\nabout = S.about\n"
        "S.about = lambda s: {k: v for k, v in about(s).items() if k != 'members'}"
    )
    with serving(patch=patch) as daemon:
        with pytest.raises(FFServeError, match="a release that reads no tar files"):
            daemon.open(path)
        os.environ["FFSERVE_SOCKET"] = daemon.socket
        try:
            with ffserve.open(path) as reader:
                assert reader.source.startswith("engine") and len(reader) == 10
        finally:
            del os.environ["FFSERVE_SOCKET"]


def test_jobs_share_members(tmp_path: Path, own: Daemon) -> None:
    """Readers of other fields use one shard, and samples that are in memory."""
    path = write(tmp_path / "x.tar", numbered(100))
    with own.open(path) as every, own.open(path, fields=["cls"]) as one:
        every.read(range(100))
        one.read(range(100))
        assert one.stats()["misses"] == 0 and len(own.status()["shards"]) == 1


# ---- files that change, and their indexes --------------------------------------------------------


def large(path: Path, count: int = 2000) -> list[Sample]:
    """Write a file that is large enough for an index file."""
    samples = [{"a": b"%d" % k * (k % 7), "b": b"x" * 1000} for k in range(count)]
    write(path, samples)
    assert path.stat().st_size > index_file.MIN_INDEXED_SIZE
    return samples


def test_the_index_is_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.tar"
    samples = large(path)
    with ffserve.open(path, server="off") as reader:
        assert [row(sample) for sample in reader] == samples
    assert (tmp_path / ".x.tar.ffx").exists()
    from ffserve.formats.tar import Tar

    monkeypatch.setattr(Tar, "open", None)  # no scan any more
    with ffserve.open(path, server="off") as reader:
        assert [row(sample) for sample in reader] == samples
        assert reader.keys([1999]) == ["d/001999"]


def test_a_file_that_changes_under_its_index_is_scanned_again(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    samples = large(path)
    with ffserve.open(path, server="off") as reader:
        reader.read([0])
    before = path.stat()
    # Samples in another order: the size, and both ends of the file, stay as they are.
    other = [*samples[:100], *samples[1800:100:-1], *samples[1801:]]
    content = archive(other)
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with ffserve.open(path, server="off") as reader:
        assert [row(sample) for sample in reader] == other


def test_files_that_end_early(tmp_path: Path, server: str) -> None:
    path = tmp_path / "cut.tar"
    samples = numbered(400)
    content = archive(samples)
    path.write_bytes(content[: len(content) // 2 + 700])
    with pytest.raises(TruncatedError):
        ffserve.open(path, server=server)
    with ffserve.open(path, server=server, on_error="skip") as reader:
        found = [row(sample) for sample in reader]
        assert 150 < len(found) < 250 and len(reader.damaged) <= 1
        assert found[:-1] == samples[: len(found) - 1]
    with ffserve.open(path, server=server, on_error="skip", fields=["jpg"]) as reader:
        assert [bytes(each) for each in reader] == [s["jpg"] for s in samples[: len(reader)]]


def test_other_files(tmp_path: Path, server: str) -> None:
    tar, record = write(tmp_path / "x.tar", numbered(3)), str(tmp_path / "x.ffr")
    with ffserve.create(record) as writer:
        writer.write(b"sample")
    with pytest.raises(UsageError, match="cannot be one data set"):
        ffserve.open([tar, record], server=server)
    with pytest.raises(UsageError, match="only samples of tar files have fields"):
        ffserve.open(record, server=server, fields=["jpg"])
    with (
        ffserve.open(record, server=server) as reader,
        pytest.raises(UsageError, match="only tar files have keys"),
    ):
        reader.keys([0])
    empty = tmp_path / "empty.tar"
    empty.write_bytes(archive([]))
    with ffserve.open(empty, server=server) as reader:
        assert len(reader) == 0 and reader.fields == [] and list(reader) == []
    with ffserve.open([empty, tar], server=server) as reader:
        assert len(reader) == 3 and reader.keys([0]) == ["d/000000"]


def test_samples_of_one_field_each(tmp_path: Path, server: str) -> None:
    """Where no sample has several fields, samples are their bytes, whatever the fields are."""
    samples = [{("jpg", "png")[k % 2]: b"%d" % k} for k in range(50)]
    path = write(tmp_path / "x.tar", samples)
    with ffserve.open(path, server=server) as reader:
        assert reader.fields == ["jpg", "png"]
        assert [bytes(each) for each in reader.read([49, 0])] == [b"49", b"0"]
    with ffserve.open(path, server=server, fields=["png", "jpg"]) as reader:
        assert as_bytes(reader.read([0, 1])) == {"png": [None, b"1"], "jpg": [b"0", None]}


@pytest.mark.parametrize("format", [None, "tar"])
def test_compressed_archives_say_convert(tmp_path: Path, format: str | None) -> None:
    import gzip

    samples = numbered(20)
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(archive(samples)))
    with pytest.raises(FFServeError, match="compressed tar file") as raised:
        ffserve.open(path, format=format, server="off")
    assert "ffserve convert" in str(raised.value)
    convert(path, tmp_path / "y.tar", verify=True)
    with ffserve.open(tmp_path / "y.tar", server="off") as reader:
        assert [row(sample) for sample in reader] == samples
        assert reader.names == [f"d/{k:06}" for k in range(20)]


def test_remote_files_by_ranges(tmp_path: Path) -> None:
    samples = [{"big": os.urandom(200_000), "small": b"%d" % k} for k in range(30)]
    content = archive(samples)
    with http_origin() as origin:
        url = origin.put("x.tar", content)
        with ffserve.open(url, server="off", fields=["small"]) as reader:
            assert reader.source == "ranged reads"
            before = origin.total
            assert [bytes(each) for each in reader.read(range(30))] == [
                each["small"] for each in samples
            ]
            # Neighbours are fetched together, but not what lies between them.
            assert origin.total - before < 100_000
        with ffserve.open(url, server="off") as reader:
            assert [row(each) for each in reader] == samples
            assert reader.keys([29]) == ["d/000029"]


def test_remote_files_by_a_daemon(tmp_path: Path) -> None:
    samples = numbered(300, irregular=True)
    with http_origin() as origin, started(reading_daemon(tmp_path)) as daemon:
        url = origin.put("x.tar", archive(samples))
        for _ in range(2):  # the second time by its index in the store
            with daemon.open(url) as reader:
                assert [row(each) for each in reader] == samples
                assert reader.keys([299]) == ["d/000299"]
        with daemon.open(url, fields=["jpg"]) as reader:
            assert [bytes(each) for each in reader] == [each["jpg"] for each in samples]
