"""A daemon whose arena has no memory for a sample: a reader that may reads it by itself."""

from __future__ import annotations

import gc
import logging
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_cases as cases
from daemon import Daemon, run_python, sample, serving, until, write

import ffserve
from ffserve import aio
from ffserve.client import failover
from ffserve.client.daemon.shared_memory import ReadRequest
from ffserve.client.local.local_source import LocalRequest
from ffserve.compat.ffrecord import FileReader
from ffserve.errors import ArenaBusyError, ArenaError, ChecksumError, ReadError
from ffserve.torch import DataLoader, RawDataset

SIZES = [4000, 3_000_000, 5000]
"""Every third sample is larger than the arena."""
TRUTH = [sample(i, SIZES) for i in range(9)]
SAYS = "the daemon has no memory for samples"


@pytest.fixture(scope="module")
def small() -> Iterator[Daemon]:
    with serving(arena="1MiB") as daemon:
        yield daemon


@pytest.fixture
def auto(small: Daemon, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """Readers that say nothing find this daemon."""
    monkeypatch.setenv("FFSERVE_SOCKET", small.socket)
    return small


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", TRUTH)


@pytest.fixture
def chunked(tmp_path: Path) -> str:
    """The same samples in chunks, whose records have no length before they are decoded."""
    path = str(tmp_path / "a.recordio")
    with ffserve.create(path, max_chunk_size=1000) as writer:
        for each in TRUTH:
            writer.write(each)
    return path


def plain(samples: Any) -> list[bytes]:
    return [bytes(each) for each in samples]


@pytest.mark.parametrize("name", ["path", "chunked"])
def test_samples_larger_than_the_arena_are_read_without_the_daemon(
    name: str, auto: Daemon, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    path = request.getfixturevalue(name)
    order = [4, 0, 8, 1, 4, 7, 2]
    with ffserve.open(path) as reader:
        assert reader.source == f"daemon {auto.socket}"
        for _ in range(2):
            assert plain(reader.read(order)) == [TRUTH[i] for i in order]
            assert plain(reader.read_batch(order)) == [TRUTH[i] for i in order]
        out = np.zeros(sum(len(TRUTH[i]) for i in order) + 5, np.uint8)
        batch = reader.read_batch(order, out=out)
        assert batch.buffer.base is out and plain(batch) == [TRUTH[i] for i in order]
        with reader.lease([0, 1, 2]) as views:
            assert plain(views) == TRUTH[:3]
        assert plain(reader) == TRUTH
        assert [len(batch) for batch in reader.batches(range(7), count=3)] == [3, 3, 1]
        assert not any(failed for _, _, failed in reader.scan())
        assert reader.sizes().tolist() == [len(each) for each in TRUTH]
        assert bytes(reader[1]) == TRUTH[1] and bytes(reader[0]) == TRUTH[0]
        assert reader.source == f"daemon {auto.socket}", "the others still come from there"
        stats = reader.stats()
        assert "does not fit" in str(stats["unserved"]) and int(stats["bytes"]) > 30_000_000
    assert caplog.text.count(SAYS) == 1 and "--arena" in caplog.text
    caplog.clear()


@pytest.mark.parametrize("name", ["path", "chunked"])
async def test_the_reader_for_event_loops_does_the_same(
    name: str, auto: Daemon, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    path = request.getfixturevalue(name)
    async with aio.open(path) as reader:
        assert plain(await reader.read([4, 0, 1])) == [TRUTH[4], TRUTH[0], TRUTH[1]]
        assert plain(await reader.read_batch([1, 2])) == TRUTH[1:3]
        out = np.zeros(3_100_000, np.uint8)
        assert plain(await reader.read_batch([1, 2], out=out)) == TRUTH[1:3]
        assert (await reader.sizes()).tolist() == [len(each) for each in TRUTH]
        assert plain([each async for each in reader]) == TRUTH
        assert reader.source == f"daemon {auto.socket}"
        assert int(reader.stats()["bytes"]) > 10_000_000
    assert caplog.text.count(SAYS) == 1
    caplog.clear()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_drop_in_and_its_loader_do_the_same(
    workers: int, auto: Daemon, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FileReader(path) as reader:
        assert plain(reader.read([4, 0])) == [TRUTH[4], TRUTH[0]]
        assert bytes(reader.read_one(7)) == TRUTH[7]
        copy = pickle.loads(pickle.dumps(reader))
        assert plain(copy.read([1])) == [TRUTH[1]]
        copy.close()
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    raw = DataLoader(RawDataset(path), collate_fn=list, **options)
    assert plain(each for batch in raw for each in batch) == TRUTH
    processed = DataLoader(cases.Raw(path), collate_fn=list, **options)
    assert [each for batch in processed for each in batch] == TRUTH
    assert caplog.text.count(SAYS) == 1
    caplog.clear()


@pytest.mark.check
@pytest.mark.parametrize("name", ["path", "chunked"])
def test_a_refused_request_is_freed_at_once(
    name: str,
    auto: Daemon,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = request.getfixturevalue(name)
    monkeypatch.setattr("ffserve.client.daemon.shared_memory.REFUSED_S", 0.0)
    gc.collect()
    gc.disable()
    try:
        with ffserve.open(path) as reader:
            for _ in range(3):
                assert plain(reader.read([0, 1, 2])) == plain(reader.read_batch(range(3)))
                with reader.lease([1]) as views:
                    assert views[0].nbytes == len(TRUTH[1])
                assert len(reader.sizes()) == 9
                assert sum(1 for _ in reader) == 9
            kinds = ReadRequest, LocalRequest
            assert not [each for each in gc.get_objects() if type(each) in kinds]
    finally:
        gc.enable()
    caplog.clear()


def test_it_is_said_once_per_process(auto: Daemon, path: str) -> None:
    done = run_python(
        "import sys, ffserve\n"
        "for _ in range(2):\n"
        "    with ffserve.open(sys.argv[1]) as reader: print(reader[1].nbytes, reader[4].nbytes)",
        path,
    )
    assert done.stdout.split() == ["3000000"] * 4
    assert done.stderr.count(SAYS) == 1, done.stderr


def test_who_requires_the_daemon_gets_the_error(auto: Daemon, path: str) -> None:
    for server in ("require", auto.socket):
        with ffserve.open(path, server=server) as reader:
            got = reader.read(range(3), errors="return")
            assert isinstance(got[1], ArenaError) and bytes(got[2]) == TRUTH[2]
            with pytest.raises(ArenaError, match="does not fit") as caught:
                reader.read([0, 1])
            assert isinstance(caught.value, ReadError) and not caught.value.retryable
            assert (caught.value.path, caught.value.index) == (path, 1)


def test_damage_is_found_without_the_daemon_too(auto: Daemon, path: str) -> None:
    with ffserve.open(path, server="off", verify=False) as reader:
        place = int(reader.tables(0)[0][4])
    with open(path, "r+b") as file:
        file.seek(place + 100)
        file.write(bytes([TRUTH[4][100] ^ 1]))
    with ffserve.open(path) as reader:
        got = reader.read([1, 4, 5], errors="return")
        assert isinstance(got[1], ChecksumError) and got[1].index == 4
        assert plain([got[0], got[2]]) == [TRUTH[1], TRUTH[5]]
    with ffserve.open(path, on_error="skip") as reader:
        assert plain(reader) == [each for i, each in enumerate(TRUTH) if i != 4]


def test_files_that_this_process_cannot_open_fail_alone(
    auto: Daemon, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ffserve.open(path) as reader:
        Path(path).unlink()
        got = reader.read(range(3), errors="return")
        assert isinstance(got[1], ArenaError) and plain([got[0], got[2]]) == [TRUTH[0], TRUTH[2]]
        with pytest.raises(ArenaError), reader.lease([1]):
            pass


BUSY = "import ffserve.server.reading.scheduler as scheduler; scheduler.GIVE_UP_S = 0.25"


def errors_of(daemon: Daemon) -> int:
    """Return how many samples the daemon had no memory for."""
    return sum(job["errors"] for job in daemon.status()["jobs"])


def test_an_arena_full_of_leases_delays_one_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = [sample(i, [190_000]) for i in range(10)] + [sample(9, [3_000_000])] * 3
    path = write(tmp_path / "a.ffr", truth)
    with serving(arena="4MiB", patch=BUSY) as daemon, daemon.open(path) as other:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        with other.lease(range(10)) as held, ffserve.open(path) as reader:
            assert plain(held) == truth[:10]
            with pytest.raises(ArenaBusyError) as caught:
                other.read([10])
            assert caught.value.retryable
            before = errors_of(daemon)
            reader.read([10])
            asked = errors_of(daemon)
            assert asked > before
            for _ in range(40):
                assert plain(reader.read([10, 11, 12, 0])) == [*truth[10:], truth[0]]
            assert errors_of(daemon) == asked, "the daemon was asked once"
            assert plain(reader.read([3])) == [truth[3]], "what is cached is copied"
            assert int(reader.stats()["hits"]) >= 1
        assert caplog.text.count(SAYS) == 1 and "no memory became free" in caplog.text
        caplog.clear()


@pytest.mark.check
def test_an_arena_that_stays_full_is_asked_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.ffr", [*[bytes(190_000)] * 10, bytes(3_000_000)])
    failover._logged.add("busy")
    monkeypatch.setattr("ffserve.client.daemon.shared_memory.REFUSED_S", 0.05)
    with serving(arena="4MiB", patch=BUSY) as daemon, daemon.open(path) as other:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        with other.lease(range(10)), ffserve.open(path) as reader:
            end = time.monotonic() + 4.0
            while time.monotonic() < end:
                assert reader.read([10])[0].nbytes == 3_000_000
            # At 0, 0.3, 0.65, 1.1, 1.75, 2.8, 3.85 s; with equal pauses 14 times.
            assert 2 <= daemon.status()["jobs"][0]["errors"] <= 7


def test_the_daemon_is_asked_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.ffr", [b"small", sample(1, [3_000_000])])
    with serving(arena="1MiB") as daemon, caplog.at_level(logging.ERROR, logger="ffserve"):
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        with ffserve.open(path) as reader:
            monkeypatch.setattr("ffserve.client.daemon.shared_memory.REFUSED_S", 0.5)
            began = time.monotonic()

            def asked() -> int:
                assert len(reader.read([0, 1])) == 2
                return errors_of(daemon)

            assert asked() == 1
            until(lambda: asked() == 2, "it is asked again")
            assert time.monotonic() - began > 0.5


@pytest.mark.check
def test_a_fork_and_a_close_leave_nothing_open(auto: Daemon, path: str) -> None:
    done = run_python(
        "import os, sys, logging, asyncio, ffserve, ffserve.aio\n"
        "def count(): return len(os.listdir('/proc/self/fd'))\n"
        "logging.disable()\n"
        "ffserve.open(sys.argv[1], server='off').close()\n"
        "with ffserve.open(sys.argv[1]) as reader: reader.read([1])\n"
        "before = count()\n"
        "with ffserve.open(sys.argv[1]) as reader:\n"
        "    big = reader.read([1])[0].tobytes()\n"
        "    pid = os.fork()\n"
        "    assert reader.read([1, 0])[0].tobytes() == big\n"
        "    if not pid: os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "assert count() == before, (count(), before)\n"
        "async def main():\n"
        "    async with ffserve.aio.open(sys.argv[1]) as reader:\n"
        "        got = await asyncio.gather(*(reader.read([i % 9]) for i in range(40)))\n"
        "        assert got[1][0].tobytes() == got[10][0].tobytes() == big\n"
        "    while any(sys.argv[1] in os.path.realpath(f'/proc/self/fd/{n}') for n in\n"
        "              os.listdir('/proc/self/fd')): await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
        "print('done')",
        path,
    )
    assert done.stdout == "done\n"
