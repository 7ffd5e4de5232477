"""Packed folders as data sets: their names are no samples, wherever they are read."""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from origins import http_origin

import ffserve
from ffserve import PackedFolder
from ffserve.dataset.layout import Numbering, Selection
from ffserve.errors import (
    ChecksumError,
    FFServeError,
    FormatError,
    ReadError,
    SampleIndexError,
    UsageError,
)
from ffserve.folders import FolderSearch, folder_index, pack
from ffserve.folders.folder_index import MAGIC, encode
from ffserve.formats.ffrecord import may_be_indices
from ffserve.formats.members import ABOUT

GOLDEN = Path(__file__).parents[1] / "golden" / "ffrecord"
FILES = {
    f"{kind}/{k:02d}.txt": f"{kind} {k}".encode() * (k + 1) for kind in ("a", "b") for k in range(9)
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "tree" / "empty").mkdir()
    return tmp_path / "tree"


@pytest.fixture(params=[1, 4])
def packed(request: pytest.FixtureRequest, tree: Path) -> Iterator[Path]:
    out = tree.parent / ("one.ffr" if request.param == 1 else "many")
    pack([tree], out, shards=request.param)
    yield out


def as_bytes(samples: object) -> list[bytes]:
    return [bytes(sample) for sample in samples]  # type: ignore[attr-defined]


def test_samples_are_the_files(packed: Path, server: str) -> None:
    contents = list(FILES.values())
    with ffserve.open(packed, server=server) as reader:
        for _ in range(2):  # the second time they are in memory
            assert len(reader) == len(FILES) == sum(shard.count for shard in reader.shards)
            assert reader.names == list(FILES) and as_bytes(reader) == contents
            backwards = list(reversed(range(len(FILES))))
            assert as_bytes(reader.read(backwards)) == contents[::-1]
            assert as_bytes(reader.read(np.array(backwards))) == contents[::-1]
            assert as_bytes(reader.read_batch([0, 17, 9])) == [
                contents[0], contents[17], contents[9],
            ]  # fmt: skip
            with reader.lease([16, 3]) as leased:
                assert as_bytes(leased) == [contents[16], contents[3]]
            found = [part for _, batch, failed in reader.scan() for part in batch if not failed]
            assert as_bytes(found) == contents
        assert reader.sizes().tolist() == [len(each) for each in contents]
        assert reader.estimates([17]).tolist() == [len(contents[17])]
        assert reader.directories == ["a", "b", "empty"]
        assert [reader.index_of(name) for name in ("a/00.txt", "b/08.txt")] == [0, 17]
        first = 0
        for k, shard in enumerate(reader.shards):
            assert shard.first == first and all(len(t) == shard.count for t in reader.tables(k))
            first += shard.count
        with pytest.raises(SampleIndexError, match="18 samples"):
            reader.read([18])
        with pytest.raises(SampleIndexError, match="18 samples"):
            reader.read_batch(np.array([3, 18]))
        with pytest.raises(LookupError, match=r"no file has the name 'a/9'.*reader\.names"):
            reader.index_of("a/9")
        copy = pickle.loads(pickle.dumps(reader))
        with copy:
            assert copy.names == list(FILES) and as_bytes(copy.read([12])) == [contents[12]]


def test_an_announced_order_counts_files(packed: Path, server: str) -> None:
    with ffserve.open(packed, server=server) as reader:
        order = np.random.default_rng(0).permutation(len(reader))
        reader.announce(order)
        got = [sample for k in range(0, 18, 6) for sample in reader.read(order[k : k + 6])]
        assert as_bytes(got) == [list(FILES.values())[k] for k in order]
        with pytest.raises(SampleIndexError):
            reader.announce([18])


def test_an_event_loop_sees_the_files(packed: Path, server: str) -> None:
    async def read() -> None:
        async with ffserve.aio.open(packed, server=server) as reader:
            assert len(reader) == 18 == sum(shard.count for shard in reader.shards)
            assert as_bytes(await reader.read([17, 4])) == [FILES["b/08.txt"], FILES["a/04.txt"]]
            assert await reader.names() == list(FILES) and await reader.index_of("b/00.txt") == 9
            assert (await reader.sizes()).tolist() == list(map(len, FILES.values()))
            assert as_bytes([s async for s in reader]) == list(FILES.values())

    asyncio.run(read())


def test_the_originals_reader_has_the_names_as_a_sample(packed: Path, tree: Path) -> None:
    shards = 1 if packed.suffix else 4
    with ffserve.FileReader(packed) as reader:
        assert reader.n == len(FILES) + shards and not reader.names
        assert bytes(reader.read_one(reader.n - 1))[:9] == MAGIC
    with PackedFolder(packed) as folder:
        assert folder.num_files() == len(FILES)


def test_files_packed_by_the_original_and_other_files(tmp_path: Path) -> None:
    with ffserve.create(tmp_path / "plain.ffr") as writer:
        for sample in (b"one", b"two", MAGIC):  # too short for names
            writer.write(sample)
    with ffserve.open([tmp_path / "plain.ffr"]) as reader:
        assert len(reader) == 3 and reader.names == [] and reader.directories == []
        with pytest.raises(UsageError, match="the files have no names"):
            reader.index_of("one")
    with ffserve.open([tmp_path / "plain.ffr", GOLDEN / "packed.ffr"]) as reader:
        assert len(reader) == 9 and reader.names[:4] == ["", "", "", "a.txt"]
        assert reader.index_of("a.txt") == 3


def test_files_of_every_size_are_told_apart_by_their_tables() -> None:
    flat: OrderedDict[str, int] = OrderedDict((chr(97 + k), k) for k in range(26))
    deep: OrderedDict[str, object] = OrderedDict()
    for k in range(60):
        deep[f"{k}"] = OrderedDict((chr(97 + j), (26 * k + j) % 256) for j in range(26))
    for folder, count in ((flat, 26), (deep, 60 * 26), (OrderedDict(a=0), 1)):
        for protocol in (2, 3, 4, 5):
            size = len(MAGIC) + len(pickle.dumps(folder, protocol=protocol))
            assert may_be_indices(np.array([size]), np.array([count + 1])).all()
    assert not may_be_indices(np.array([4096, 20]), np.array([10_000, 2])).any()
    assert may_be_indices(np.array([len(encode(flat))]), np.array([27])).all()


def test_damage(tree: Path) -> None:
    path = tree.parent / "one.ffr"
    pack([tree], path)
    content = bytearray(path.read_bytes())
    content[content.index(b"b 3")] ^= 1
    path.write_bytes(content)
    with ffserve.open(path, server="off", on_error="skip") as reader:
        assert len(reader) == 17 and len(reader.damaged) == 1
        assert reader.names == [name for name in FILES if name != "b/03.txt"]
        assert reader.index_of("b/04.txt") == 12
        assert as_bytes(reader.read([12])) == [FILES["b/04.txt"]]
    content[-5] ^= 1
    path.write_bytes(content)
    with ffserve.open(path, server="off") as reader:
        assert len(reader) == 18 and as_bytes(reader.read([17])) == [FILES["b/08.txt"]]
        with pytest.raises(ChecksumError):
            _ = reader.names


def test_errors_name_the_index_of_the_file(tree: Path) -> None:
    packed = pack([tree], tree.parent / "many", shards=4)
    path = Path(packed.paths[3])
    content = bytearray(path.read_bytes())
    content[content.index(b"b 8")] ^= 1
    path.write_bytes(content)
    with ffserve.open(packed.paths, server="off") as reader:
        for call in (
            lambda: reader.read([0, 17]),
            lambda: reader.read_batch([17]),
            lambda: reader.lease([17]).__enter__(),
            lambda: list(reader.batches()),
        ):
            with pytest.raises(ChecksumError) as caught:
                call()
            assert caught.value.index == 17
        [_, error] = reader.read([0, 17], errors="return")
        assert isinstance(error, FFServeError) and error.index == 17


def test_errors_about_lengths_and_orders_named_the_sample_by_number(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "x").write_bytes(name.encode() * 1000)
    packed = pack([tmp_path / "tree"], tmp_path / "many", shards=2)
    with ffserve.create(tmp_path / "c.recordio", max_chunk_size=100) as writer:
        writer.write(b"c" * 1000)
    content = bytearray((tmp_path / "c.recordio").read_bytes())
    content[-5] ^= 1
    (tmp_path / "c.recordio").write_bytes(content)
    paths = [*packed.paths, tmp_path / "c.recordio"]

    async def sizes() -> None:
        async with ffserve.aio.open(paths, server="off") as reader:
            await reader.sizes([2])

    with ffserve.open(paths, server="off") as reader:
        assert len(reader) == 3 and reader.sample_numbers([2]).tolist() == [4]
        with pytest.raises(SampleIndexError, match="more than once") as twice:
            reader.announce([0, 2, 2])
        assert twice.value.index == 2
        for call in (lambda: reader.sizes([2]), lambda: asyncio.run(sizes())):
            with pytest.raises(FFServeError) as caught:
                call()
            assert caught.value.index == 2


def test_remote_files(packed: Path) -> None:
    files = sorted(packed.iterdir()) if packed.is_dir() else [packed]
    with http_origin() as origin:
        urls = [origin.put(path.name, path.read_bytes()) for path in files]
        with ffserve.open(urls, server="off") as reader:
            assert len(reader) == 18 and reader.names == list(FILES)
            assert as_bytes(reader.read([17])) == [FILES["b/08.txt"]]


def counts(path: str | Path) -> list[int]:
    """Return how many samples the readers without a daemon show."""

    async def count() -> int:
        async with ffserve.aio.open(path, server="off") as reader:
            return len(reader)

    with ffserve.open(path, server="off") as reader:
        return [len(reader), asyncio.run(count())]


def test_damaged_names_are_names_wherever_they_are(tree: Path) -> None:
    pack([tree], tree.parent / "one.ffr")
    content = bytearray((tree.parent / "one.ffr").read_bytes())
    content[-5] ^= 1
    with http_origin() as origin:
        url = origin.put("one.ffr", bytes(content))
        assert counts(url) == [18, 18]  # it was 19: the names became a sample
        with ffserve.open(url, server="off") as reader, pytest.raises(ChecksumError):
            _ = reader.names


def test_names_that_cannot_be_read_are_no_sample(tree: Path) -> None:
    path = tree.parent / "one.ffr"
    (tree / "large").write_bytes(bytes(64 << 10))  # so they do not come with the tables
    pack([tree], path)
    with http_origin() as origin:
        url = origin.put("one.ffr", path.read_bytes())
        origin.refused_from = 1
        with pytest.raises(FFServeError, match=r"one\.ffr"):
            ffserve.open(url, server="off")
        with pytest.raises(FFServeError, match=r"one\.ffr"):
            asyncio.run(ffserve.aio.open(url, server="off").__aenter__())


def test_of_large_remote_samples_the_first_bytes_are_read(tmp_path: Path) -> None:
    with ffserve.create(tmp_path / "large.ffr") as writer:
        writer.write(bytes(4 << 20))
    with http_origin() as origin:
        assert counts(origin.put("large.ffr", (tmp_path / "large.ffr").read_bytes())) == [1, 1]
        assert origin.total < 1 << 20


def test_a_process_without_descriptors_finds_the_names(tree: Path) -> None:
    path = tree.parent / "many"
    pack([tree], path, shards=4)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ffserve.open(path, server="off") as reader:
        reader.read([0])  # has an engine
        highest = max(map(int, os.listdir("/proc/self/fd")))
        others = [os.dup(0)]
        while others[-1] <= highest:  # connections that earlier tests have left are among them
            others.append(os.dup(0))
        os.close(free := others.pop())
        # Four for the source; with the one that is left every second file is looked at.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 5, before[1]))
        try:
            with ffserve.open(path, server="off") as second:
                assert len(second) == 18
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for fd in others:
                os.close(fd)


def test_a_file_that_was_replaced_is_left_to_the_source(tree: Path, server: str) -> None:
    path = tree.parent / "one.ffr"
    pack([tree], path)
    with ffserve.open(path, server=server) as reader:
        source = reader.current_source()
        search = FolderSearch(source.shards, source.states, ())
        sizes = source.estimate(search.last)
        assert search.look(sizes) == [] and search.found == [18]
        (tree.parent / "new.ffr").write_bytes(bytes(path.stat().st_size))
        os.replace(tree.parent / "new.ffr", path)
        search = FolderSearch(source.shards, source.states, ())
        assert search.look(sizes) == [(0, ABOUT)] and search.found == []
        assert search.hear(source.named([(0, ABOUT)])).tolist() == [18] and search.found == []
        with pytest.raises(ReadError, match="lost"):
            search.take(search.last, [], {0: ReadError("lost")})


def test_more_names_than_are_read_are_an_error(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack([tree], tree.parent / "one.ffr")
    monkeypatch.setattr(folder_index, "SIZE_MAX", 100)
    with pytest.raises(UsageError, match=r"more than the limit of 100 .*more shards"):
        pack([tree], tree.parent / "two.ffr")
    assert not (tree.parent / "two.ffr").exists()
    with pytest.raises(FormatError, match=r"one\.ffr.*more than the limit of 100"):
        ffserve.open(tree.parent / "one.ffr", server="off")


def test_numberings() -> None:
    hidden = Numbering(np.array([2, 5, 6]), 9)
    shown = np.array([0, 1, 3, 4, 7, 8])
    assert hidden.count == 6 and hidden.numbers(np.arange(6)).tolist() == shown.tolist()
    assert hidden.indices(shown).tolist() == list(range(6))
    last = Numbering(np.array([7, 8]), 9)
    assert last.numbers(np.arange(7)).tolist() == list(range(7))
    chosen = Selection(np.array([5, 0, 3]))
    assert chosen.numbers(np.array([2, 0])).tolist() == [3, 5]
    assert chosen.indices(np.array([3, 5, 0])).tolist() == [2, 0, 1]
