"""Remote files through `ffserve.open`: all formats, little room, forks, damage, failing origins."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import resource
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import until
from origins import HttpOrigin, settled

import ffserve
from ffserve.cli import run
from ffserve.client.remote import RemoteSource
from ffserve.errors import FFServeError, MissingFile, ReadError, ServerUnavailable, UsageError
from ffserve.order import epoch_order
from ffserve.store import fetching
from ffserve.store.directory import Store
from ffserve.store.fetching import Fetcher, process_fetcher

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

BLOCK = 64 << 10
FORMATS = {"ffrecord": ".ffr", "tfrecord": ".tfrecord", "recordio": ".recordio"}


@pytest.fixture(autouse=True)
def small_blocks(own_store: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a store with small blocks."""
    monkeypatch.setenv("FFSERVE_STORE_SIZE", "1GiB")  # what a test sets is taken back
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    limit_store(tmp_path, 1 << 30)


def limit_store(tmp_path: Path, limit: int) -> Fetcher:
    """Have a store with small blocks; a process that opens it later has the same."""
    directory = str(tmp_path / "store")
    if (old := fetching._fetchers.pop(directory, None)) is not None:
        old.store.abandon()
    os.environ["FFSERVE_STORE_SIZE"] = str(limit)
    fetcher = fetching._fetchers[directory] = Fetcher(Store(directory, limit, BLOCK))
    return fetcher


def samples_of(count: int, size: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randrange(size)) for _ in range(count)]


def record_file(
    tmp_path: Path, format: str, samples: list[bytes], name: str = "a", **options: Any
) -> bytes:
    path = tmp_path / f"{name}{FORMATS[format]}"
    with ffserve.create(path, format=format, **options) as writer:
        for sample in samples:
            writer.write(sample)
    content = path.read_bytes()
    path.unlink()
    return content


def served(
    server: HttpOrigin,
    tmp_path: Path,
    format: str,
    samples: list[bytes],
    name: str = "a",
    **options: Any,
) -> str:
    content = record_file(tmp_path, format, samples, name, **options)
    return server.put(f"{name}{FORMATS[format]}", content)


def plain(arrays: Any) -> list[bytes]:
    return [bytes(array) for array in arrays]


def on_disk_size(directory: Path) -> int:
    found = subprocess.run(["du", "-s", "-B1", str(directory)], capture_output=True, check=True)
    return int(found.stdout.split()[0])


CASES: list[tuple[str, dict[str, Any]]] = [
    ("ffrecord", {}), ("tfrecord", {}), ("tfrecord", {"compression": "gzip"}), ("recordio", {}),
    ("recordio", {"compression": "snappy", "max_chunk_size": 30_000}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_format_reads_as_the_local_file(
    server: HttpOrigin, tmp_path: Path, case: int
) -> None:
    format, options = CASES[case]
    samples = samples_of(400, 6000, case)
    url = served(server, tmp_path, format, samples, **options)
    size = len(server.files[url.rpartition("/")[2]])
    with ffserve.open(url) as reader:
        assert len(reader) == 400 and reader.source.startswith("store ")
        order = list(range(400))
        random.Random(3).shuffle(order)
        assert plain(reader.read(order[:50])) == [samples[k] for k in order[:50]]
        batch = reader.read_batch(order)
        assert plain(batch) == [samples[k] for k in order]
        assert plain(reader) == samples
        with reader.lease(order[:9]) as leased:
            assert plain(leased) == [samples[k] for k in order[:9]]
        assert reader.sizes().tolist() == list(map(len, samples))
        assert reader.shards[0].path == url
    assert server.total == size, "each byte came once"
    with ffserve.open(url) as reader:
        assert plain(reader.read_batch(order)) == [samples[k] for k in order]
    assert server.total == size, "what was fetched is there for the next reader"


LITTLE_ROOM = [
    0, 4, *(pytest.param(case, marks=pytest.mark.stores) for case in range(1, 4))
]  # fmt: skip


@pytest.mark.parametrize("case", LITTLE_ROOM)
def test_with_room_for_a_quarter_every_sample_is_right(
    server: HttpOrigin, tmp_path: Path, case: int
) -> None:
    format, options = CASES[case]
    samples = samples_of(400, 6000, case)
    url = served(server, tmp_path, format, samples, **options)
    limit = max(len(server.files[url.rpartition("/")[2]]) // 4, 9 * BLOCK)
    limit_store(tmp_path, limit)
    with ffserve.open(url) as reader:
        rng = random.Random(4)
        for epoch in range(2):
            order = rng.sample(range(400), 400)
            if epoch:
                reader.announce(order, epoch)
            for start in range(0, 400, 80):
                some = order[start : start + 80]
                assert plain(reader.read_batch(some)) == [samples[k] for k in some]
        assert on_disk_size(tmp_path / "store") <= limit


@pytest.mark.stores
def test_windows_and_threads_with_little_room(server: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(3000, 2000)
    url = served(server, tmp_path, "ffrecord", samples)
    size = server_size = len(server.files["a.ffr"])
    limit_store(tmp_path, size // 3)
    wrong: list[int] = []
    with ffserve.open(url) as reader:

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(40):
                first = rng.randrange(2900)
                some = [first + rng.randrange(100) for _ in range(30)]
                if plain(reader.read(some)) != [samples[k] for k in some]:
                    wrong.append(first)

        threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert on_disk_size(tmp_path / "store") <= server_size // 3
        assert process_fetcher().store.evictions == 0, "no order: what is there stays"


def test_an_announced_order_is_fetched_ahead(server: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(500, 8000)
    url = served(server, tmp_path, "ffrecord", samples)
    with ffserve.open(url) as reader:
        reader.announce(list(range(499, -1, -1)))
        size = len(server.files["a.ffr"])
        until(lambda: server.total >= size, "it is fetched")
        assert server.total == size
        assert plain(reader.read([3, 400])) == [samples[3], samples[400]]


def test_more_files_than_a_process_may_have_open_at_first(
    server: HttpOrigin, tmp_path: Path
) -> None:
    samples = samples_of(3, 100)
    content = record_file(tmp_path, "ffrecord", samples)
    urls = [server.put(f"{number:03}.ffr", content) for number in range(80)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with ffserve.open(urls) as reader:
            assert len(os.listdir("/proc/self/fd")) > few
            assert plain(reader.read(range(len(reader)))) == 80 * samples
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_in_the_store_as_a_whole_is_a_local_file(
    server: HttpOrigin, tmp_path: Path
) -> None:
    samples = samples_of(300, 6000)
    url = served(server, tmp_path, "ffrecord", samples)
    with ffserve.open(url) as reader:
        reader.read_batch(range(300))
        source = reader.current_source()
        assert isinstance(source, RemoteSource)
        until(lambda: reader.read([1]) and source._settled, "all of it is there")
        server.status = 404
        assert plain(reader.read(range(300))) == samples
        # Nothing of it can be evicted.
        stored = source.object_of(0).stored
        assert not stored.state.evict(0, np.zeros(1, np.uint64))
    assert stored.state.fd < 0


def test_several_objects_and_local_files_are_one_data_set(
    server: HttpOrigin, tmp_path: Path
) -> None:
    parts = [samples_of(100, 3000, k) for k in range(4)]
    for k, part in enumerate(parts[:3]):
        served(server, tmp_path, "ffrecord", part, f"part-{k}")
    local = tmp_path / "local.ffr"
    local.write_bytes(record_file(tmp_path, "ffrecord", parts[3]))
    urls = [f"{server.url}/part-{k}.ffr" for k in range(3)]
    whole = [sample for part in parts for sample in part]
    with ffserve.open([*urls, local]) as reader:
        order = random.Random(1).sample(range(400), 400)
        assert plain(reader.read(order)) == [whole[k] for k in order]


def _child(reader: Any, order: list[int], results: Any) -> None:
    results.put([bytes(s)[:20] for s in reader.read(order)])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.stores)])
def test_forked_and_pickled_readers(server: HttpOrigin, tmp_path: Path, method: str) -> None:
    samples = samples_of(400, 4000)
    url = served(server, tmp_path, "ffrecord", samples)
    with ffserve.open(url) as reader:
        reader.read([0, 399])
        context = multiprocessing.get_context(method)
        results = context.Queue()
        order = list(range(0, 400, 3))
        children = [context.Process(target=_child, args=(reader, order, results)) for _ in range(3)]
        for child in children:
            child.start()
        found = [results.get(timeout=60) for _ in children]
        for child in children:
            child.join()
        assert found == [[samples[k][:20] for k in order]] * 3
        assert plain(reader.read(range(400))) == samples
        assert server.total == len(server.files["a.ffr"])
        asked = server.requests.total()
        again = context.Process(target=_child, args=(reader, order, results))
        again.start()
        assert results.get(timeout=60) == found[0]
        again.join()
        assert server.requests.total() == asked, "the version is known"


async def test_aio(server: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(200, 4000)
    url = served(server, tmp_path, "recordio", samples)
    async with ffserve.aio.open(url) as reader:
        some = [5, 7, 199, 0]
        both = await asyncio.gather(reader.read(some), reader.read_batch(range(200)))
        assert plain(both[0]) == [samples[k] for k in some]
        assert plain(both[1]) == samples
        assert [bytes(s) async for s in reader] == samples


def test_other_samples_are_served_when_an_origin_fails(
    server: HttpOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "GIVE_UP_S", 0.3)
    samples = samples_of(400, 4000)
    url = served(server, tmp_path, "ffrecord", samples)
    with ffserve.open(url) as reader:
        source = reader.current_source()
        assert isinstance(source, RemoteSource)
        reader.read(range(100))
        settled()
        there = source._extents(np.arange(400))
        words = source.object_of(0).stored.state.words
        last = (there.ends - 1) // BLOCK
        known = {k for k in range(400) if words[there.starts[k] // BLOCK] and words[last[k]]}
        server.status = 503
        got = reader.read(range(400), errors="return")
        for k, sample in enumerate(got):
            if k in known:
                assert bytes(sample) == samples[k]  # type: ignore[arg-type]
            else:
                assert isinstance(sample, ReadError) and sample.index == k
                assert sample.path == url and "503" in str(sample)
        assert len(known) < 400
        server.status = 0

        def is_back() -> bool:
            found = reader.read(range(400), errors="return")
            return not any(isinstance(sample, ReadError) for sample in found)

        until(is_back, "somebody tries whether it is back")
        assert plain(reader.read(range(400))) == samples


def test_damage_at_the_origin_and_damage_on_disk(
    server: HttpOrigin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [bytes([k % 251]) * 1000 for k in range(300)]
    content = bytearray(record_file(tmp_path, "ffrecord", samples))
    content[len(content) - 500] ^= 1
    url = server.put("a.ffr", bytes(content))
    with ffserve.open(url) as reader:
        got = reader.read(range(300), errors="return")
        assert isinstance(got[299], ffserve.ChecksumError) and url in str(got[299])
        assert plain(got[:299]) == samples[:299]
        assert not caplog.text
        source = reader.current_source()
        assert isinstance(source, RemoteSource)
        with open(source.object_of(0).stored.path, "rb+") as data:
            data.seek(BLOCK + 100)
            data.write(b"damage")
        assert plain(reader.read(range(299))) == samples[:299]
        assert "was damaged on disk" in caplog.text
        caplog.clear()


def test_a_changed_object_is_opened_anew(server: HttpOrigin, tmp_path: Path) -> None:
    old, new = samples_of(300, 3000, 1), samples_of(300, 3000, 2)
    url = served(server, tmp_path, "ffrecord", old)
    with ffserve.open(url) as reader:
        reader.read([0])
        settled()
        served(server, tmp_path, "ffrecord", new)
        got = reader.read(range(300), errors="return")
        for k, sample in enumerate(got):
            assert isinstance(sample, ReadError) or bytes(sample) == old[k]
    with ffserve.open(url) as reader:
        assert plain(reader.read(range(300))) == new


def test_bad_input(server: HttpOrigin, tmp_path: Path) -> None:
    url = served(server, tmp_path, "ffrecord", [b"a"])
    with pytest.raises(MissingFile, match="no such file at the origin"):
        ffserve.open(f"{server.url}/other.ffr")
    with pytest.raises(ServerUnavailable, match="no daemon answers"):
        ffserve.open(url, server=str(tmp_path / "none"))
    server.put("text.bin", b"hello" * 100)
    with pytest.raises(FFServeError, match="unknown format"):
        ffserve.open(f"{server.url}/text.bin")
    os.environ["FFSERVE_STORE"] = "relative"
    with pytest.raises(UsageError, match="not an absolute path"):
        ffserve.open(url)
    os.environ["FFSERVE_STORE"] = "/proc/none"
    with pytest.raises(FFServeError, match="the store"):
        ffserve.open(url)


def test_a_killed_reader_leaves_a_store_that_serves(server: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(500, 8000)
    url = served(server, tmp_path, "ffrecord", samples)
    server.rate = 3e6
    for wait in (0.1, 0.4):
        pid = os.fork()
        if pid == 0:
            try:
                ffserve.open(url).read(range(500))
            finally:
                os._exit(0)
        time.sleep(wait)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    server.rate = 0
    with ffserve.open(url) as reader:
        assert plain(reader.read(range(500))) == samples


def test_commands_take_urls(
    server: HttpOrigin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = samples_of(50, 400)
    url = served(server, tmp_path, "ffrecord", samples)
    assert run(["ls", "--json", url]) == 0
    assert [row["size_bytes"] for row in json.loads(capsys.readouterr().out)] == list(
        map(len, samples)
    )
    assert run(["verify", url]) == 0
    assert "all intact" in capsys.readouterr().out
    assert run(["inspect", "--json", url]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert (facts["path"], facts["samples"]) == (url, 50)
    assert run(["convert", url, str(tmp_path / "out.tfrecord")]) == 0
    with ffserve.open(tmp_path / "out.tfrecord", server="off") as reader:
        assert plain(reader) == samples
    assert server.total == len(server.files["a.ffr"])
    assert run(["verify", f"{server.url}/none.ffr"]) == 2
    assert run(["index", url]) == 2
    assert "written for local files only" in capsys.readouterr().err


@pytest.mark.stores
def test_a_loader_reads_remote_files(server: HttpOrigin, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from ffserve.torch import DataLoader, EpochSampler, RawDataset

    samples = [bytes([k % 256]) * 500 for k in range(640)]
    url = served(server, tmp_path, "ffrecord", samples)
    dataset = RawDataset(url)
    sampler = EpochSampler(len(dataset), seed=1)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=2, collate_fn=list)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = [bytes(sample) for batch in loader for sample in batch]
        assert sorted(seen) == sorted(samples)
    assert torch is not None
    assert server.total == len(server.files["a.ffr"])


@pytest.mark.stores
def test_a_windowed_order_needs_each_block_about_once(server: HttpOrigin, tmp_path: Path) -> None:
    count, window = 1600, 416  # 32 runs of two blocks each
    samples = [random.Random(k).randbytes(10_000) for k in range(count)]
    url = served(server, tmp_path, "ffrecord", samples)
    size = len(server.files["a.ffr"])
    limit_store(tmp_path, size * 6 // 10)
    with ffserve.open(url) as reader:
        for epoch in range(2):
            order = epoch_order(count, seed=1, epoch=epoch, window=window)
            reader.announce(order, epoch)
            before = server.total
            for start in range(0, count, 52):
                some = order[start : start + 52]
                assert plain(reader.read_batch(some)) == [samples[k] for k in some.tolist()]
            print(epoch, (server.total - before) / size)
            assert server.total - before <= 1.6 * size
        assert process_fetcher().store.evictions > 0
        assert on_disk_size(tmp_path / "store") <= size * 6 // 10
