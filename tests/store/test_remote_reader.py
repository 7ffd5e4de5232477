"""Remote files through `ffserve.open`: by ranges ("off"), and through a daemon that is started."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import command
import pytest
from daemon import run_python, serving, until
from origins import HttpOrigin, ask_origins, settled
from own_daemons import daemons, own_daemons, use
from tar_files import archive

import ffserve
from ffserve.cli import run
from ffserve.client.daemon import connection
from ffserve.client.local.ranged_source import RangedSource
from ffserve.compat.ffrecord import FileReader
from ffserve.errors import (
    ChecksumError,
    FFServeError,
    FormatError,
    MissingFile,
    ReadError,
    ServerUnavailable,
    TruncatedError,
)
from ffserve.limits import ASKED_AT_ONCE, OPENED_AT_ONCE
from ffserve.reads.fetched import GAP
from ffserve.store import fetching, ranges, web

FORMATS = {"ffrecord": ".ffr", "tfrecord": ".tfrecord", "recordio": ".recordio"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ffrecord", {}), ("tfrecord", {}), ("tfrecord", {"compression": "gzip"}), ("recordio", {}),
    ("recordio", {"compression": "snappy", "max_chunk_size": 30_000}),
]  # fmt: skip


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where readers of this module start a daemon, and find it."""
    with own_daemons(tmp_path_factory.mktemp("own")) as socket:
        yield socket


@pytest.fixture(params=["off", "auto"])
def way(request: pytest.FixtureRequest, own_store: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """`server=` of a reader: by ranges, and through a daemon, which the first test starts."""
    if request.param == "auto":
        use(request.getfixturevalue("started"), monkeypatch)
    return str(request.param)


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


# ---- both ways -----------------------------------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_format_reads_as_the_local_file(
    server: HttpOrigin, tmp_path: Path, way: str, case: int
) -> None:
    format, options = CASES[case]
    samples = samples_of(400, 6000, case)
    url = served(server, tmp_path, format, samples, **options)
    size = len(server.files[url.rpartition("/")[2]])
    order = random.Random(3).sample(range(400), 400)
    with ffserve.open(url, server=way) as reader:
        assert len(reader) == 400
        assert reader.source.startswith("ranged reads" if way == "off" else "daemon ")
        assert plain(reader.read(order[:50])) == [samples[k] for k in order[:50]]
        assert plain(reader.read_batch(order)) == [samples[k] for k in order]
        assert plain(reader) == samples
        with reader.lease(order[:9]) as leased:
            assert plain(leased) == [samples[k] for k in order[:9]]
        assert reader.sizes().tolist() == list(map(len, samples))
        assert reader.shards[0].path == url
        assert int(reader.stats()["samples"]) >= 850
    if way == "off":
        assert not (tmp_path / "store").exists(), "nothing is kept"
    else:
        assert server.total == size, "each byte came once"


def test_objects_of_several_formats_and_local_files_are_one_data_set(
    server: HttpOrigin, tmp_path: Path, way: str
) -> None:
    parts = [samples_of(100, 3000, k) for k in range(6)]
    paths: list[Any] = []
    for k, (format, options) in enumerate([CASES[0], CASES[4], CASES[2]]):
        paths.append(served(server, tmp_path, format, parts[2 * k], f"part-{k}", **options))
        local = tmp_path / f"local-{k}{FORMATS[format]}"
        local.write_bytes(record_file(tmp_path, format, parts[2 * k + 1], **options))
        paths.append(local)
    whole = [sample for part in parts for sample in part]
    with ffserve.open(paths, server=way) as reader:
        order = random.Random(1).sample(range(600), 600)
        assert plain(reader.read(order)) == [whole[k] for k in order]
        assert plain(reader.read_batch(order)) == [whole[k] for k in order]
        assert plain(reader.read(range(100, 200))) == parts[1]


def _child(reader: Any, order: list[int], results: Any) -> None:
    results.put([bytes(s)[:20] for s in reader.read(order)])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.stores)])
def test_forked_and_pickled_readers(
    server: HttpOrigin, tmp_path: Path, way: str, method: str
) -> None:
    samples = samples_of(400, 4000)
    url = served(server, tmp_path, "ffrecord", samples)
    with ffserve.open(url, server=way) as reader:
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


def test_a_request_that_was_begun_before_a_fork_is_made_again(
    server: HttpOrigin, tmp_path: Path
) -> None:
    samples = samples_of(400, 4000)
    url = served(server, tmp_path, "ffrecord", samples)
    with ffserve.open(url, server="off") as reader:
        answers = reader.batches(count=50)
        got = plain(next(answers))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if got + [s for b in answers for s in plain(b)] == samples else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert got + [s for batch in answers for s in plain(batch)] == samples


@pytest.mark.parametrize("format", ["recordio", "ffrecord"])
async def test_aio(server: HttpOrigin, tmp_path: Path, way: str, format: str) -> None:
    samples = samples_of(200, 4000)
    url = served(server, tmp_path, format, samples)
    async with ffserve.aio.open(url, server=way) as reader:
        some = [5, 7, 199, 0]
        both = await asyncio.gather(reader.read(some), reader.read_batch(range(200)))
        assert plain(both[0]) == [samples[k] for k in some]
        assert plain(both[1]) == samples
        assert [bytes(s) async for s in reader] == samples
        assert (await reader.sizes()).tolist() == list(map(len, samples))


def test_threads(server: HttpOrigin, tmp_path: Path, way: str) -> None:
    samples = samples_of(1000, 2000)
    url = served(server, tmp_path, "recordio", samples, compression="snappy", max_chunk_size=9000)
    wrong: list[int] = []
    with ffserve.open(url, server=way) as reader:

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(10):
                first = rng.randrange(900)
                some = [first + rng.randrange(100) for _ in range(30)]
                if plain(reader.read(some)) != [samples[k] for k in some]:
                    wrong.append(first)

        threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("case", [0, 3])
def test_damage_at_the_origin(server: HttpOrigin, tmp_path: Path, way: str, case: int) -> None:
    format, options = CASES[case]
    samples = [bytes([k % 251]) * 1000 for k in range(300)]
    content = bytearray(record_file(tmp_path, format, samples, **options))
    content[len(content) - 500] ^= 1
    url = server.put("a" + FORMATS[format], bytes(content))
    with ffserve.open(url, server=way) as reader:
        got = reader.read(range(300), errors="return")
        bad = [k for k, sample in enumerate(got) if isinstance(sample, FFServeError)]
        assert 0 < len(bad) < 300
        assert all(isinstance(got[k], FormatError) and url in str(got[k]) for k in bad)
        good = sorted(set(range(300)) - set(bad))
        assert plain([got[k] for k in good]) == [samples[k] for k in good]
    if format == "ffrecord":
        with ffserve.open(url, server=way, on_error="skip") as reader:
            assert plain(reader) == samples[:299]
            assert isinstance(reader.damaged[0], ChecksumError)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_bytes_that_were_damaged_on_their_way_are_asked_for_again(
    server: HttpOrigin, tmp_path: Path, way: str, case: int, caplog: pytest.LogCaptureFixture
) -> None:
    format, options = CASES[case]
    samples = [random.Random(k).randbytes(9000) for k in range(300)]
    content = record_file(tmp_path, format, samples, **options)
    url = server.put("a" + FORMATS[format], content)
    # Both bytes are of payloads.
    once = {len(content) // 2 + 4000: 1, len(content) // 3 + 4000: 1}
    if way == "auto" and "gzip" not in options.values():
        # Opening a file without an index brings it into the store.
        server.wrong.update(once)
    with ffserve.open(url, server=way) as reader:
        if way == "off":
            server.wrong.update(once)
        assert plain(reader.read(range(300))) == samples
    assert not any(server.wrong.values())
    assert caplog.text.count("came wrong once from its origin") == (way == "off")
    caplog.clear()


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_header_that_came_damaged_was_not_asked_for_again(
    server: HttpOrigin, tmp_path: Path, way: str, case: int
) -> None:
    format, options = CASES[case]
    samples = samples_of(300, 9000)
    url = served(server, tmp_path, format, samples, **options)
    # Of the number of records, of the checksum of a length, of compressed bytes, of a magic number.
    place = {"ffrecord": 8, "tfrecord": 8, "recordio": 1}[format]
    place = 15 if "gzip" in options.values() else place
    server.wrong[place] = 1
    with ffserve.open(url, server=way) as reader:
        assert plain(reader.read(range(300))) == samples
    assert server.wrong == {place: 0}


def test_tables_that_are_damaged_at_the_origin_are_asked_for_twice_and_no_more(
    server: HttpOrigin, tmp_path: Path, way: str
) -> None:
    content = bytearray(record_file(tmp_path, "ffrecord", samples_of(300, 9000)))
    content[100] ^= 1
    url = server.put("a.ffr", bytes(content))
    with pytest.raises(ChecksumError, match=r"a\.ffr.*metadata"), ffserve.open(url, server=way):
        pass
    settled()
    assert server.total <= 2 * len(content)


class _Refusing(dict[int, int]):
    """What is sent wrong, by an origin that refuses all that is asked for after it."""

    def __init__(self, server: HttpOrigin, wrong: dict[int, int]) -> None:
        super().__init__(wrong)
        self._server = server

    def __setitem__(self, offset: int, times: int) -> None:
        super().__setitem__(offset, times)
        self._server.bodies = False


def test_a_second_request_that_failed_hid_the_checksum(server: HttpOrigin, tmp_path: Path) -> None:
    samples = [random.Random(k).randbytes(9000) for k in range(300)]
    content = record_file(tmp_path, "ffrecord", samples)
    url = server.put("a.ffr", content)
    with ffserve.open(url, server="off") as reader:
        server.wrong = _Refusing(server, {len(content) // 2 + 4000: 1})
        found = reader.read(range(150, 151), errors="return")
    assert not server.bodies
    assert isinstance(found[0], ChecksumError)


@pytest.mark.parametrize("case", [0, 3])
def test_damage_at_the_origin_is_asked_for_twice_and_no_more(
    server: HttpOrigin, tmp_path: Path, case: int
) -> None:
    format, options = CASES[case]
    samples = [random.Random(k).randbytes(9000) for k in range(300)]
    content = bytearray(record_file(tmp_path, format, samples, **options))
    content[len(content) // 2 + 4000] ^= 1  # in the payload of sample 150
    url = server.put("a" + FORMATS[format], bytes(content))
    with ffserve.open(url, server="off") as reader:
        server.spans.clear()
        assert isinstance(reader.read(range(150, 151), errors="return")[0], ChecksumError)
        settled()
        assert len(server.spans) == 2


def test_a_file_that_was_cut_and_a_damaged_length(
    server: HttpOrigin, tmp_path: Path, way: str
) -> None:
    samples = samples_of(200, 3000, 5)
    whole = record_file(tmp_path, "ffrecord", samples)
    url = server.put("cut.ffr", whole[:-5000])
    with ffserve.open(url, server=way) as reader:
        got = reader.read(range(200), errors="return")
        bad = [k for k, sample in enumerate(got) if isinstance(sample, TruncatedError)]
        assert bad and bad == list(range(bad[0], 200))
        assert plain(got[: bad[0]]) == samples[: bad[0]]
    content = bytearray(record_file(tmp_path, "tfrecord", samples))
    at = 0
    for _ in range(50):
        at += struct.unpack_from("<Q", content, at)[0] + 16
    content[at] ^= 1
    url = server.put("gap.tfrecord", bytes(content))
    with pytest.raises(ChecksumError):
        ffserve.open(url, server=way)
    with ffserve.open(url, server=way, on_error="skip") as reader:
        assert len(reader.damaged) == 1
        assert plain(reader) == samples[:50] + samples[51:]


def test_a_changed_object_is_never_mixed(server: HttpOrigin, tmp_path: Path, way: str) -> None:
    old, new = samples_of(300, 3000, 1), samples_of(300, 3000, 2)
    url = served(server, tmp_path, "ffrecord", old)
    with ffserve.open(url, server=way) as reader:
        reader.read([0])
        settled()
        served(server, tmp_path, "ffrecord", new)
        got = reader.read(range(300), errors="return")
        for k, sample in enumerate(got):
            assert isinstance(sample, ReadError) or bytes(sample) == old[k]
        if way == "off":
            assert all("changed at the origin" in str(error) for error in got)
            assert all(error.index == k for k, error in enumerate(got))  # type: ignore[union-attr]
    with ffserve.open(url, server=way) as reader:
        assert plain(reader.read(range(300))) == new


def test_bad_input(server: HttpOrigin, tmp_path: Path, way: str) -> None:
    url = served(server, tmp_path, "ffrecord", [b"a"])
    with pytest.raises(MissingFile, match="no such file at the origin"):
        ffserve.open(f"{server.url}/other.ffr", server=way)
    with pytest.raises(ServerUnavailable, match="no daemon answers"):
        ffserve.open(url, server=str(tmp_path / "none"))
    server.put("text.bin", b"hello" * 100)
    with pytest.raises(FFServeError, match="unknown format"):
        ffserve.open(f"{server.url}/text.bin", server=way)
    with ffserve.open(served(server, tmp_path, "ffrecord", [], "empty"), server=way) as reader:
        assert len(reader) == 0 and plain(reader) == []
    with ffserve.open(server.put("none.tfrecord", b""), server=way) as reader:
        assert len(reader) == 0


# ---- by ranges -----------------------------------------------------------------------------------


@pytest.mark.check
def test_neighbours_come_by_one_request_and_large_samples_by_several(
    server: HttpOrigin, tmp_path: Path
) -> None:
    samples = [random.Random(k).randbytes(10_000) for k in range(600)]
    url = served(server, tmp_path, "ffrecord", samples)
    with ffserve.open(url, server="off") as reader:
        server.spans.clear()
        near, far = range(20, 30), range(20, 600, 2 + GAP // 10_000)
        assert plain(reader.read(near)) == [samples[k] for k in near]
        assert len(server.spans) == 1
        server.spans.clear()
        assert plain(reader.read(far)) == [samples[k] for k in far]
        assert len(server.spans) == len(far)
        assert sum(end - begin for _, begin, end in server.spans) == 10_000 * len(far)
        server.spans.clear()
    ranged = ranges.RangedObject(fetching.identity_of(url), range_size=4000)
    coming = [ranges.bytes_of(future) for _, _, future in ranged.ask_all(1000, 11_000)]
    assert b"".join(coming) == server.files["a.ffr"][1000:11_000]
    assert len(server.spans) == 3


@pytest.mark.check
def test_requests_that_need_the_same_chunk_fetch_it_once(
    server: HttpOrigin, tmp_path: Path
) -> None:
    samples = [random.Random(k).randbytes(100) for k in range(20_000)]
    url = served(server, tmp_path, "recordio", samples, compression="snappy")
    with ffserve.open(url, server="off") as reader:
        server.sent.clear()
        assert [s for batch in reader.batches(count=100) for s in plain(batch)] == samples
        assert server.total <= len(server.files["a.recordio"])


@pytest.mark.check
def test_a_scan_reads_ahead_in_order(server: HttpOrigin, tmp_path: Path) -> None:
    samples = [random.Random(k).randbytes(1000) for k in range(20_000)]
    url = served(server, tmp_path, "tfrecord", samples)
    size = len(server.files["a.tfrecord"])
    with ffserve.open(url, server="off") as reader:
        assert len(reader) == 20_000
        assert 0.99 * size <= server.total < 1.1 * size
        # The last pieces were on their way together.
        begins = [begin for _, begin, _ in server.spans]
        assert sorted(begins) != begins or len(begins) < 40


def test_opening_a_file_with_tables_reads_little(server: HttpOrigin, tmp_path: Path) -> None:
    samples = [b"x" * 4000] * 2000
    url = served(server, tmp_path, "ffrecord", samples)
    with ffserve.open(url, server="off"):
        assert server.total <= ranges.HEAD_SIZE


def test_one_of_two_fields_costs_its_bytes(server: HttpOrigin) -> None:
    samples = [{field: random.Random(k).randbytes(100_000) for field in "ab"} for k in range(60)]
    url = server.put("two.tar", archive(samples))
    order = random.Random(0).sample(range(60), 60)
    with ffserve.open(url, server="off", fields=["b"]) as reader:
        settled()
        assert server.total < 0.1 * len(server.files["two.tar"]), "headers only"
        before = server.total
        for first in range(0, 60, 10):
            some = order[first : first + 10]
            assert plain(reader.read(some)) == [samples[k]["b"] for k in some]
        settled()
        assert server.total - before <= 1.1 * 60 * 100_000


def test_other_samples_are_served_when_an_origin_fails(server: HttpOrigin, tmp_path: Path) -> None:
    ask_origins(0.3)
    samples = samples_of(100, 4000)
    url = served(server, tmp_path, "ffrecord", samples)
    local = tmp_path / "b.ffr"
    local.write_bytes(record_file(tmp_path, "ffrecord", samples))
    with ffserve.open([url, local], server="off") as reader:
        server.status = 503
        got = reader.read(range(200), errors="return")
        assert plain(got[100:]) == samples
        for k, error in enumerate(got[:100]):
            assert isinstance(error, ReadError) and error.index == k
            assert error.path == url and "503" in str(error)
        server.status = 0

        def is_back() -> bool:
            found = reader.read(range(100), errors="return")
            return not any(isinstance(sample, ReadError) for sample in found)

        until(is_back, "somebody tries whether it is back")
        assert plain(reader.read(range(200))) == samples + samples


def test_failures_that_pass_are_survived(server: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(300, 4000)
    url = served(server, tmp_path, "recordio", samples)
    with ffserve.open(url, server="off") as reader:
        server.fail_until = time.monotonic() + 0.2
        server.cut_after, server.cuts = 1000, 2
        assert plain(reader.read(range(300))) == samples


def test_an_announced_order_is_a_hint_that_ranges_ignore(
    server: HttpOrigin, tmp_path: Path
) -> None:
    samples = samples_of(100, 4000)
    url = served(server, tmp_path, "ffrecord", samples)
    with ffserve.open(url, server="off") as reader:
        before = server.total
        reader.announce(range(100))
        reader.reached(0, 10)
        assert [s for b in reader.batches(range(99, -1, -1)) for s in plain(b)] == samples[::-1]
        assert server.total - before <= len(server.files["a.ffr"])


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
    assert command.run("cat", url, "3").stdout == samples[3]
    assert run(["simulate", "--json", "--cache", "0.5", "--samples", "1000", url]) == 0
    assert run(["verify", f"{server.url}/none.ffr"]) == 2
    assert not (tmp_path / "store").exists()
    capsys.readouterr()
    assert run(["convert", url, f"{server.url}/out.ffr"]) == 2
    assert "error: " + server.url in (said := capsys.readouterr().err)
    assert "cannot write to http:// URLs" in said
    assert "hint: write to a local path, or to an object store" in said
    lines = server.put("t/lines.txt", b"one\ntwo\n")
    for source in (lines, f"{server.url}/t/"):
        assert run(["convert", source, str(tmp_path / "lines.ffr")]) == 0
        with ffserve.open(tmp_path / "lines.ffr", server="off") as reader:
            assert plain(reader) == [b"one", b"two"]
    for other in (server.put("rows.npy", b"x"), server.put("u/x.jpg", b"x").removesuffix("x.jpg")):
        capsys.readouterr()
        assert run(["convert", other, str(tmp_path / "none.ffr")]) == 2
        assert "hint: `ffserve stage URL -o DIRECTORY`" in capsys.readouterr().err
    assert run(["convert", f"{server.url}/none/", str(tmp_path / "none.ffr")]) == 2


def test_a_package_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "oss://bucket/a.ffr"]) == 2
    said = capsys.readouterr().err
    assert "error: oss://bucket/a.ffr: the protocol oss:// needs a package that is missing" in said
    assert "ossfs" in said and "pip install fsspec" not in said


def test_the_index_of_a_remote_file_comes_into_the_store(
    server: HttpOrigin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = served(server, tmp_path, "tfrecord", samples_of(50, 400))
    assert run(["index", url]) == 0
    assert "1 file indexed, 50 samples" in capsys.readouterr().out
    total = server.total
    assert run(["index", "--json", url]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert facts["index"].startswith(str(tmp_path / "store"))
    assert facts["samples"] == 50
    assert run(["index", "--renew", url]) == 0
    assert server.total == total
    assert run(["index", served(server, tmp_path, "ffrecord", samples_of(5, 10), "b")]) == 0
    assert "1 file with tables" in capsys.readouterr().out


def test_many_files_are_opened_at_the_same_time(server: HttpOrigin, tmp_path: Path) -> None:
    """At most 16 were, and the first 64 KiB of each stayed in memory until all were open."""
    content = record_file(tmp_path, "ffrecord", samples_of(60, 2000))
    many = [server.put(f"n{k:03}.ffr", content) for k in range(400)]
    server.held.update(f"n{k:03}.ffr" for k in range(200))
    lengths: list[int] = []

    def opened() -> None:
        with ffserve.open(many, server="off") as reader:
            lengths.append(len(reader))

    thread = threading.Thread(target=opened)
    tracemalloc.start()
    try:
        thread.start()
        until(lambda: server.answering >= OPENED_AT_ONCE, "the first ones are on their way")
        time.sleep(0.2)
        assert server.answering == OPENED_AT_ONCE
        server.held.clear()
        thread.join(60)
        assert lengths == [400 * 60]
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ends", [False, True])
def test_a_thread_for_each_file_took_longer_for_the_lock_of_the_interpreter(
    server: HttpOrigin, tmp_path: Path, ends: bool
) -> None:
    """Threads open connections; then one asks for many files before it reads the first answer.
    Whether the origin keeps connections open or not, each file is asked for once."""
    count, most = 3 * OPENED_AT_ONCE, OPENED_AT_ONCE
    many = [
        server.put(f"n{k:03}.ffr", record_file(tmp_path, "ffrecord", [b"%03d" % k, b"x"]))
        for k in range(count)
    ]
    server.ends = ends
    names = [f"n{k:03}.ffr" for k in range(2 * most)]
    server.held.update(names)
    found: list[bytes] = []

    def opened() -> None:
        with ffserve.open(many, server="off") as reader:
            found.extend(map(bytes, reader.read(range(0, 2 * count, 2))))

    thread = threading.Thread(target=opened)
    thread.start()
    try:
        until(lambda: server.answering == most, "the first group is asked for")
        server.held.difference_update(names[:most])
        until(
            lambda: len(server.sent) >= most and server.answering == most,
            "the second group is asked for",
        )
        threads = [each for each in threading.enumerate() if each.name == "ffserve-open"]
        assert (len(threads) > most // 2) == ends
    finally:
        server.held.clear()
        thread.join(60)
    assert found == [b"%03d" % k for k in range(count)]
    unused = [each for each in web._unused.values() if each.port == urlsplit(server.url).port]
    assert len(unused) <= ASKED_AT_ONCE, "all were kept, and closed on the other side only"
    # One for its version, one for its tables, and one for the sample.
    assert (server.requests["HEAD"], server.requests["GET"]) == (count, 2 * count)


def test_a_file_that_is_missing_among_many(server: HttpOrigin, tmp_path: Path) -> None:
    content = record_file(tmp_path, "ffrecord", samples_of(3, 100))
    many = [server.put(f"n{k:03}.ffr", content) for k in range(2 * OPENED_AT_ONCE)]
    identities = RangedSource(tuple(many), None, True).identities
    missing = OPENED_AT_ONCE + 3
    del server.files[f"n{missing:03}.ffr"]
    with pytest.raises(FileNotFoundError, match=f"n{missing:03}.ffr"):
        RangedSource(tuple(many), None, True, identities=identities)
    server.put(f"n{missing:03}.ffr", content)
    server.fail_until = time.monotonic() + 0.3
    assert RangedSource(tuple(many), None, True).count == 3 * len(many)


def test_a_small_file_is_opened_by_one_request(server: HttpOrigin, tmp_path: Path) -> None:
    """Each was asked once more for its last sample, which may be the index of a packed folder."""
    content = record_file(tmp_path, "ffrecord", [bytes([k]) * 400 for k in range(20)])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one").write_bytes(b"content")
    assert run(["pack", str(tmp_path / "folder"), "-o", str(tmp_path / "packed.ffr")]) == 0
    many = [server.put(f"n{k}.ffr", content) for k in range(30)]
    many.append(server.put("packed.ffr", (tmp_path / "packed.ffr").read_bytes()))
    with ffserve.open(many, server="off") as reader:
        assert len(reader) == 601
    assert (server.requests["HEAD"], server.requests["GET"]) == (31, 31)
    large = [bytes(ranges.HEAD_SIZE), bytes(4000)]
    with ffserve.open(served(server, tmp_path, "ffrecord", large), server="off") as reader:
        assert len(reader) == 2
    assert server.requests["GET"] == 31 + 2


def test_the_urls_of_a_list_were_looked_up_one_after_the_other_and_twice(
    server: HttpOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", "off")
    content = record_file(tmp_path, "ffrecord", samples_of(6, 2000))
    many = [server.put(f"n{k}.ffr", content) for k in range(12)]
    found: list[FileReader] = []
    server.stalled.set()
    opening = threading.Thread(target=lambda: found.append(FileReader.for_files(many)))
    opening.start()
    until(lambda: server.requests["HEAD"] == 12, "all are looked up at the same time")
    server.stalled.clear()
    opening.join()
    assert (found[0].n, found[0].fnames) == (72, many)
    found[0].close()
    assert server.requests["HEAD"] == 12


# ---- a daemon that is started --------------------------------------------------------------------


def test_a_daemon_of_ones_own_does_not_look_for_what_its_user_has_found(
    server: HttpOrigin, tmp_path: Path, started: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(started, monkeypatch)
    content = record_file(tmp_path, "ffrecord", samples_of(6, 2000))
    many = [server.put(f"n{k}.ffr", content) for k in range(20)]
    with ffserve.open(many) as reader:
        assert (len(reader), reader.source[:6]) == (120, "daemon")
    assert (server.requests["HEAD"], server.requests["GET"]) == (20, 20)


@pytest.mark.stores
def test_a_loader_reads_remote_files(
    server: HttpOrigin, tmp_path: Path, started: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from ffserve.torch import DataLoader, EpochSampler, RawDataset

    use(started, monkeypatch)
    samples = [bytes([k % 256]) * 500 for k in range(640)]
    url = served(server, tmp_path, "ffrecord", samples)
    dataset = RawDataset(url)
    sampler = EpochSampler(len(dataset), seed=1)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=2, collate_fn=list)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = [bytes(sample) for batch in loader for sample in batch]
        assert sorted(seen) == sorted(samples)
    assert server.total == len(server.files["a.ffr"])


def test_a_machine_s_daemon_that_does_not_serve_leaves_it_to_the_user_s_own(
    server: HttpOrigin,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = samples_of(50, 3000)
    url = served(server, tmp_path, "ffrecord", samples)
    local = tmp_path / "local.ffr"
    local.write_bytes(record_file(tmp_path, "ffrecord", samples))
    with serving() as machine, own_daemons(tmp_path) as own:
        use(own, monkeypatch, machine=machine.socket)
        with ffserve.open(url) as reader:
            assert reader.source == f"daemon {own}"
            assert plain(reader.read(range(50))) == samples
            assert "unserved" not in reader.stats()
            with ffserve.open(local) as near:
                assert near.source == f"daemon {machine.socket}"
            child = multiprocessing.get_context("fork").Process(target=reader.read, args=([1],))
            child.start()
            child.join()
            assert child.exitcode == 0
        assert len(daemons(own)) == 1
        with pytest.raises(ReadError, match="no store for remote files"):
            ffserve.open(url, server="require")
        # A daemon of the user's that runs serves also who starts none.
        monkeypatch.setenv("FFSERVE_START", "0")
        with ffserve.open(url) as reader:
            assert reader.source == f"daemon {own}"
    assert not caplog.messages


def test_without_a_daemon_that_can_be_started_ranges_are_read_and_it_is_said_once(
    server: HttpOrigin,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = samples_of(50, 3000)
    url = served(server, tmp_path, "ffrecord", samples)
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with ffserve.open(url) as reader:  # FFSERVE_START=0
        assert reader.source == "ranged reads"
    assert not caplog.messages
    monkeypatch.delenv("FFSERVE_START")
    (tmp_path / "s").write_text("in the way")
    (tmp_path / "run" / "ffserve").write_text("in the way as well")
    for _ in range(2):
        with ffserve.open(url) as reader:
            assert reader.source == "ranged reads"
            assert plain(reader.read(range(50))) == samples
            assert reader.stats()["unserved"]
    (line,) = caplog.messages
    assert line.startswith("no daemon could be started, so this process reads the files itself: ")
    caplog.clear()


def test_a_daemon_that_was_started_makes_its_store_when_it_needs_it(
    server: HttpOrigin,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = samples_of(50, 3000)
    url = served(server, tmp_path, "ffrecord", samples)
    local = tmp_path / "local.ffr"
    local.write_bytes(record_file(tmp_path, "ffrecord", samples))
    monkeypatch.setenv("FFSERVE_STORE_SIZE", "64MiB")
    with own_daemons(tmp_path) as socket:
        use(socket, monkeypatch)
        store = tmp_path / "own-store"
        with ffserve.open(local, server="start") as reader:
            assert reader.source == f"daemon {socket}"
        facts = connection.status(socket)["store"]
        assert (facts["directory"], facts["limit"]) == (str(store), 0) and not store.exists()
        store.write_text("in the way")
        with ffserve.open(url) as reader:
            assert reader.source == "ranged reads"
            assert plain(reader.read(range(50))) == samples
        assert "store" in caplog.text
        caplog.clear()
        store.unlink()
        assert run(["warm", "--socket", socket, "--json", url]) == 0, "there is room"
        with ffserve.open(url) as reader:
            assert reader.source == f"daemon {socket}"
            assert plain(reader.read(range(50))) == samples
        assert connection.status(socket)["store"]["limit"] == 64 << 20
        # The store is that of the user's processes: what the daemon fetched is there for them.
        before = server.total
        assert run(["warm", "--socket", str(tmp_path / "none"), "--json", url]) == 3
        opened = fetching.process_fetcher().open(fetching.identity_of(url))
        assert opened.stored.complete and server.total == before
        fetching.process_fetcher().close(opened)


def test_a_started_daemon_reads_with_what_its_user_has_if_that_is_what_the_client_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = samples_of(50, 3000)
    (tmp_path / "a.ffr").write_bytes(record_file(tmp_path, "ffrecord", samples))
    url = f"local://{tmp_path}/a.ffr"  # a protocol of which no access can be passed
    with own_daemons(tmp_path) as socket:
        use(socket, monkeypatch)
        with ffserve.open(url) as reader:
            assert reader.source == f"daemon {socket}"
            assert plain(reader.read(range(50))) == samples
        for name in ("HOME", "LOCAL_KEY"):
            with monkeypatch.context() as patch:
                patch.setenv(name, "/nowhere")
                with ffserve.open(url) as reader:
                    assert reader.source == "ranged reads"
                    assert plain(reader.read(range(50))) == samples
                with pytest.raises(ReadError, match="started with other settings"):
                    ffserve.open(url, server="require")
        with ffserve.open(url, server="require") as reader:
            assert plain(reader.read(range(50))) == samples
    assert "started with other settings" in caplog.text
    caplog.clear()


@pytest.mark.check
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_daemon_that_reads_for_its_own_user_reads_for_nobody_else(
    server: HttpOrigin, tmp_path: Path
) -> None:
    url = served(server, tmp_path, "ffrecord", samples_of(50, 3000))
    options = ["--socket-mode", "0666", "--store-access", "own", "--store-directory"]
    program = """
import os, sys, ffserve
with ffserve.open(sys.argv[1], server="off") as reader:  # all modules, while they can be read
    reader.read([0])
os.setgroups([]); os.setgid(4001); os.setuid(4001)
os.environ["HOME"] = "/nonexistent"
for url in sys.argv[1:3]:
    try:
        ffserve.open(url, server=sys.argv[3])
    except ffserve.ReadError as error:
        print(error)
"""
    with serving(options=[*options, str(tmp_path / "store")]) as daemon:
        (daemon.directory / "a.ffr").write_bytes(server.files["a.ffr"])
        near = f"local://{daemon.directory}/a.ffr"
        done = run_python(program, url, near, daemon.socket)
        assert "for its own user only" in done.stdout.splitlines()[0]
        assert "does not fetch this URL" in done.stdout.splitlines()[1]
        assert not (tmp_path / "store").exists()
