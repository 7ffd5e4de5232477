"""Remote files through a daemon with a store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, Raw, run_python, serving, started, until
from origins import HttpOrigin, http_origin
from tar_files import archive

import ffserve
import ffserve.aio
from ffserve import limits, protocol
from ffserve.cache.jobs import JobProgress
from ffserve.cache.orders import AnnouncedOrder
from ffserve.cli import run
from ffserve.client import failover
from ffserve.config import ServerConfig
from ffserve.errors import AccessDenied, FFServeError, ReadError
from ffserve.formats.ffrecord import LAST_SIZE
from ffserve.formats.members import ABOUT
from ffserve.limits import HEAD_SIZE
from ffserve.server.files.remote import RemoteShard
from ffserve.server.reading import fetches
from ffserve.server.sessions.state import ServerState
from ffserve.store import directory
from ffserve.store.credentials import Access
from ffserve.store.directory import Store
from ffserve.store.fetching import LONG_SIZE, Fetcher, identity_of
from ffserve.store.origin import ObjectVersion

pytest.importorskip("fsspec")

BLOCK = 64 << 10
PATCH = (
    "import ffserve.config as c, ffserve.store.directory as d, ffserve.store.fetching as f\n"
    f"c.MIN_STORE_SIZE = 0\nd.Store.__init__.__defaults__ = (None, {BLOCK})\n"
    "f.Patience.__new__.__defaults__ = (f.GIVE_UP_S, f.CONTACT_S, 0.01)\n"
)
NO_PINS = (
    "import errno, threading\nimport ffserve.store.blocks as b\npinned = b.StoredObject.pin\n"
    "def pin(self, blocks):\n"
    "    if threading.current_thread().name.startswith(('MainThread', 'ffserve-blocks')):\n"
    "        raise OSError(errno.ENOLCK, 'No locks available')\n"
    "    pinned(self, blocks)\n"
    "b.StoredObject.pin = pin\n"
)
"""Bytes pass the store: it cannot pin blocks."""
UNPINNED = r"the store cannot pin blocks, so reads pass it: .*No locks available"
LINES = [r"remote files: store /.*, .* of .*"]
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("ffrecord", {}), ("tfrecord", {}), ("tfrecord", {"compression": "gzip"}), ("recordio", {}),
    ("recordio", {"compression": "snappy", "max_chunk_size": 30_000}),
]  # fmt: skip


@pytest.fixture
def origin() -> Iterator[HttpOrigin]:
    with http_origin() as running:
        yield running


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other daemon is started."""
    monkeypatch.setenv("FFSERVE_START", "0")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def daemon_options(
    tmp_path: Path, size: int = 1 << 30, options: tuple[str, ...] = (), **others: Any
) -> dict[str, Any]:
    where = "--store-directory", str(tmp_path / "store"), "--store-size", str(size)
    expect = [*LINES, *others.pop("expect", [])]
    patch = PATCH + others.pop("patch", "")
    return {"options": [*where, *options], "expect": expect, "patch": patch, **others}


def samples_of(count: int, size: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randrange(size)) for _ in range(count)]


def served(
    origin: HttpOrigin, tmp_path: Path, samples: list[bytes], name: str = "a.ffr",
    format: str = "ffrecord", **options: Any,
) -> str:  # fmt: skip
    path = tmp_path / f"file-{name}"
    with ffserve.create(path, format=format, **options) as writer:
        for sample in samples:
            writer.write(sample)
    url = origin.put(name, path.read_bytes())
    path.unlink()
    return url


def plain(arrays: Any) -> list[bytes]:
    return [bytes(array) for array in arrays]


def on_disk_size(directory: Path) -> int:
    found = subprocess.run(["du", "-s", "-B1", str(directory)], capture_output=True, check=True)
    return int(found.stdout.split()[0])


@pytest.mark.check
def test_every_format_is_read_through_the_store_once(origin: HttpOrigin, tmp_path: Path) -> None:
    urls, wanted = [], []
    for k, (format, options) in enumerate(FORMATS):
        samples = samples_of(200, 6000, k)
        urls.append(served(origin, tmp_path, samples, f"{k}.data", format, **options))
        wanted += samples
    order = random.Random(3).sample(range(len(wanted)), len(wanted))
    with serving(**daemon_options(tmp_path)) as daemon:
        for _ in range(2):
            with daemon.open(urls[:1]) as reader:
                assert reader.source.startswith("daemon ")
        for url, k in zip(urls, range(len(urls)), strict=True):
            mine = wanted[200 * k : 200 * (k + 1)]
            with daemon.open(url) as reader:
                assert plain(reader.read(range(100))) == mine[:100]
                with reader.lease([150, 3]) as leased:
                    assert plain(leased) == [mine[150], mine[3]]
                assert plain(reader.read_batch(range(200))) == mine
        store = daemon.status()["store"]
        assert store["fetched"] == origin.total == sum(map(len, origin.files.values()))
        assert os.path.samefile(store["directory"], tmp_path / "store")
        with daemon.open([urls[0], urls[1]]) as first, daemon.open([urls[1], urls[0]]) as second:
            some = [k for k in order if k < 400]
            assert plain(first.read(some)) == [wanted[k] for k in some]
            assert plain(second.read(some)) == [wanted[(k + 200) % 400] for k in some]
        assert origin.total == store["fetched"]
    # The store of the daemon's user is that of its own processes as well.
    own = Store(str(tmp_path / "store"), 1 << 30)
    assert all(own.open(identity_of(url)).complete for url in urls)
    own.abandon()


NO_LOOKS = (
    "from ffserve.errors import ReadError\n"
    "def few(*_): raise ReadError('the origin does not answer')\n"
    "f.Fetcher.few, f.Fetcher.send_few = few, lambda *_: None\n"
)
OLDER = (
    "import ffserve.server.sessions.state as s\nnow = s.ServerState.about\n"
    "s.ServerState.about = lambda self: {**now(self), 'last': False}\n"
)


@pytest.mark.parametrize("patch", ["", NO_LOOKS, OLDER], ids=["looks", "no-looks", "older"])
def test_opening_large_files_fetched_the_last_block_of_each(
    origin: HttpOrigin, tmp_path: Path, patch: str
) -> None:
    """Its last sample may be the index of a packed folder. Now 16 bytes show whether it is; where
    they are not to be had, the sample is read."""
    (tmp_path / "folder").mkdir()
    for name in ("one", "two"):
        (tmp_path / "folder" / name).write_bytes(os.urandom(2 * BLOCK))
    assert run(["pack", str(tmp_path / "folder"), "-o", str(tmp_path / "packed.ffr")]) == 0
    samples = [os.urandom(BLOCK) for _ in range(4)]
    urls = [served(origin, tmp_path, samples, f"{k}.ffr") for k in range(70)]
    urls.insert(3, origin.put("packed.ffr", (tmp_path / "packed.ffr").read_bytes()))
    urls.append(served(origin, tmp_path, samples, "0.tfrecord", "tfrecord"))

    async def read() -> None:
        async with ffserve.aio.open(urls[:-1], server=daemon.socket) as reader:
            assert len(reader) == 70 * 4 + 2

    with serving(**daemon_options(tmp_path, patch=patch)) as daemon:
        for _ in range(2):
            with daemon.open(urls[:-1]) as reader:
                assert len(reader) == 70 * 4 + 2
                looks = sum(end - begin == LAST_SIZE for _, begin, end in origin.spans)
                assert looks == (0 if patch == NO_LOOKS else 71)
                assert (origin.total <= 71 * BLOCK) == (not patch)
            asyncio.run(read())
        with daemon.open(urls[:-1]) as reader:
            assert reader.names[4 * 3 - 1 : 4 * 3 + 3] == ["", "one", "two", ""]
            assert bytes(reader.read([4 * 3 + 2])[0]) == samples[0]


def test_opening_long_files_fetched_the_first_block_of_each(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    """Half a megabyte of each, which is gigabytes for a large data set. Now it asks for the
    beginning, which has the tables; where these came damaged, or are longer, a block is fetched."""
    samples = [os.urandom(3_000_000) for _ in range(3)]
    served(origin, tmp_path, samples, "0.ffr")
    content, count = origin.files["0.ffr"], limits.REMOTE_COUNT + 2
    urls = [origin.put(f"{k}.ffr", content) for k in range(count)]
    many = [
        b"%08d" % k * 125 for k in range(LONG_SIZE // 1000)
    ]  # the tables are longer than HEAD_SIZE
    others = [
        served(origin, tmp_path, many, "many.ffr"),
        served(origin, tmp_path, samples, "0.tfrecord", "tfrecord"),
    ]
    with serving(**{**daemon_options(tmp_path), "patch": ""}) as daemon:
        with daemon.open(urls) as reader:
            assert origin.total == HEAD_SIZE * count
            assert plain(reader.read([7, 1, 3 * count - 1])) == [samples[k] for k in (1, 1, 2)]
            requests = origin.requests["GET"]
            with daemon.open(urls) as again:
                assert len(again) == 3 * count and origin.requests["GET"] == requests
        before, origin.wrong[100] = origin.total, 1
        with daemon.open(urls[8]) as reader:
            assert origin.wrong == {100: 0}
            assert plain(reader.read(range(3))) == samples
        with daemon.open(others) as reader:
            assert plain(reader.read([len(many) - 1, len(many) + 2])) == [many[-1], samples[2]]
        whole = len(content) + sum(len(origin.files[name]) for name in ("many.ffr", "0.tfrecord"))
        assert origin.total - before <= whole + 3 * HEAD_SIZE


def test_what_is_said_of_last_samples(origin: HttpOrigin, tmp_path: Path) -> None:
    """Of files of other formats there is nothing to ask, and of local files it is not known."""
    samples = [os.urandom(BLOCK) for _ in range(4)]
    urls = [served(origin, tmp_path, samples, "a.ffr"), served(origin, tmp_path, samples[:1], "b")]
    urls.append(served(origin, tmp_path, [b"few", b"bytes"], "c.ffr"))
    local = tmp_path / "local.ffr"
    with ffserve.create(local) as writer:
        writer.write(samples[0])
    urls += [str(local), served(origin, tmp_path, samples, "0.tfrecord", "tfrecord")]
    expect = ["closed a session .*: invalid NAMES message.*"]
    with serving(**daemon_options(tmp_path, expect=expect)) as daemon, daemon.open(urls) as reader:
        source = reader.current_source()
        asked = [(k, ABOUT) for k in range(4)]
        assert source.named(asked) == [samples[3][:LAST_SIZE], samples[0][:LAST_SIZE], b"", b""]
        with pytest.raises(ffserve.FFServeError, match="invalid NAMES message: block 0 of shard 0"):
            source.named([(0, 0)])
        with daemon.open(urls) as again:
            other = again.current_source()
            with pytest.raises(ffserve.FFServeError, match="of shard 4"):
                other.named([(4, ABOUT)])


@pytest.mark.stores
def test_remote_and_local_files_are_one_data_set(origin: HttpOrigin, tmp_path: Path) -> None:
    parts = [samples_of(50, 3000, k) for k in range(3)]
    urls = [served(origin, tmp_path, parts[k], f"part-{k}.ffr") for k in range(2)]
    local = tmp_path / "local.ffr"
    with ffserve.create(local) as writer:
        for sample in parts[2]:
            writer.write(sample)
    with serving(**daemon_options(tmp_path)) as daemon:
        with daemon.open([urls[0], str(local), urls[1]]) as reader:
            whole = parts[0] + parts[2] + parts[1]
            order = random.Random(5).sample(range(150), 150)
            assert plain(reader.read(order)) == [whole[k] for k in order]
        assert origin.total == sum(map(len, origin.files.values()))


@pytest.mark.stores
def test_jobs_that_start_together_fetch_each_byte_once(origin: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(1000, 4000)
    url = served(origin, tmp_path, samples)
    wrong: list[int] = []
    with serving(**daemon_options(tmp_path)) as daemon:

        def read(seed: int) -> None:
            order = random.Random(seed).sample(range(1000), 1000)
            with daemon.open(url) as reader:
                reader.announce(order)
                for start in range(0, 1000, 100):
                    some = order[start : start + 100]
                    if plain(reader.read(some)) != [samples[k] for k in some]:
                        wrong.append(seed)

        threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert origin.total == len(origin.files["a.ffr"])


@pytest.mark.stores
def test_an_announced_order_is_fetched_ahead_by_the_daemon(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    samples = samples_of(500, 6000)
    url = served(origin, tmp_path, samples)
    with serving(**daemon_options(tmp_path)) as daemon, daemon.open(url) as reader:
        reader.announce(np.arange(499, -1, -1))
        until(lambda: origin.total == len(origin.files["a.ffr"]), "all is fetched")
        assert plain(reader.read([3, 400])) == [samples[3], samples[400]]


@pytest.mark.check
def test_fetching_ahead_waited_for_the_next_look_at_the_orders(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    url = served(origin, tmp_path, samples_of(500, 6000))
    seldom = "import ffserve.server.reading.fetches as g\ng.AHEAD_S = 3600.0\n"
    with serving(**daemon_options(tmp_path, patch=seldom)) as daemon, daemon.open(url) as reader:
        reader.announce(np.arange(499, -1, -1))
        until(lambda: origin.total == len(origin.files["a.ffr"]), "all is fetched")


@pytest.mark.parametrize(
    "case", [pytest.param(0, marks=pytest.mark.check), pytest.param(4, marks=pytest.mark.stores)]
)
def test_with_little_room_samples_pass_the_store(
    origin: HttpOrigin, tmp_path: Path, case: int
) -> None:
    limit = 9 * BLOCK
    format, options = FORMATS[case]
    samples = samples_of(300, 6000)
    url = served(origin, tmp_path, samples, "a.data", format, **options)
    order = random.Random(1).sample(range(300), 300)
    with serving(**daemon_options(tmp_path, limit, arena="2MiB")) as daemon:
        with daemon.open(url) as reader:
            for start in range(0, 300, 100):
                some = order[start : start + 100]
                assert plain(reader.read(some)) == [samples[k] for k in some]
            assert on_disk_size(tmp_path / "store") <= limit
        assert daemon.status()["store"]["used"] <= limit


@pytest.mark.stores
def test_a_killed_daemon_finds_what_was_fetched(origin: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(300, 6000)
    url = served(origin, tmp_path, samples)
    with started(Daemon(**daemon_options(tmp_path))) as daemon:
        with daemon.open(url) as reader:
            assert plain(reader.read_batch(range(300))) == samples
        daemon.end(9)
        daemon.start()
        with daemon.open(url) as reader:
            assert plain(reader.read_batch(range(300))) == samples
        assert origin.total == len(origin.files["a.ffr"])
        daemon.end(9)
        # Another version is another object, whatever is in the store.
        new = samples_of(300, 6000, 1)
        served(origin, tmp_path, new)
        daemon.start()
        with daemon.open(url) as reader:
            assert plain(reader.read_batch(range(300))) == new


@pytest.mark.check
def test_an_origin_that_stalls_holds_up_nobody_else(origin: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(300, 6000)
    local = tmp_path / "local.ffr"
    with ffserve.create(local) as writer:
        for sample in samples:
            writer.write(sample)
    patch = "import ffserve.server.sessions.server as s; s.ALIVE_INTERVAL_S = 0.1"
    options = daemon_options(tmp_path, arena="2MiB", patch=patch)
    with http_origin() as other, serving(**options) as daemon:
        slow = daemon.open(served(origin, tmp_path, samples))
        fine = daemon.open(served(other, tmp_path, samples))
        near = daemon.open(local)
        origin.stalled.set()
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.extend(slow.read(range(10, 300))))
        thread.start()
        until(lambda: daemon.status()["clients"]["requests"] > 0, "the request waits")
        for reader in (near, fine):
            for _ in range(2):
                assert plain(reader.read_batch(range(300))) == samples
        assert not got
        origin.stalled.clear()
        thread.join()
        assert plain(got) == samples[10:]
        until(
            lambda: sum(job["time_s"]["origin"] for job in daemon.status()["jobs"]) > 0,
            "the wait has its cause",
        )
        for reader in (slow, fine, near):
            reader.close()


SMALL_BLOCKS = "d.Store.__init__.__defaults__ = (None, 4096)\n"


def test_requests_for_blocks_that_never_come_took_all_memory(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    """A block that was asked for took 3 KB as long as its origin was silent. And a sample of many
    blocks that was asked for many times in one request took all of these each time."""
    count, some = 4000, range(0, 4000, 7)
    samples = [bytes([k % 251]) * 4096 for k in range(count)] + [b"large" * (1 << 20)]
    url = served(origin, tmp_path, samples)

    def read(reader: ffserve.Reader, numbers: list[int]) -> None:
        with contextlib.suppress(FFServeError):  # it is closed
            reader.read(numbers)

    with (
        serving(**daemon_options(tmp_path, patch=SMALL_BLOCKS)) as daemon,
        daemon.open(url) as reader,
        contextlib.ExitStack() as stack,
    ):
        assert plain(reader.read([count - 1, 3])) == [samples[count - 1], samples[3]]
        origin.held.add("a.ffr")
        before, wanted = daemon.private_size(), [[count] * 500]
        wanted += [list(range(first, first + 250)) for first in range(0, count, 250)]
        for numbers in wanted:
            one = stack.enter_context(daemon.open(url))
            threading.Thread(target=read, args=(one, numbers), daemon=True).start()
        time.sleep(2)
        grown = daemon.private_size() - before
        origin.held.clear()
        assert plain(reader.read_batch(some)) == [samples[k] for k in some]
        assert grown < 4 << 20, grown


def test_orders_of_blocks_that_never_come_took_all_memory(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    """Each data set with an announced order asked for 256 MiB ahead."""
    store = Store(str(tmp_path / "blocks"), 1 << 30, 4096)
    fetcher, owner, count = Fetcher(store), (1001, 0), 2 * limits.MOST_QUEUED
    origin.put("a", bytes(count * 4096))
    opened = fetcher.open(identity_of(f"{origin.url}/a"))
    origin.held.add("a")
    firsts = np.arange(count, dtype=np.int32)
    state = ServerState(ServerConfig(arena_size_bytes=16 << 20))
    parts = fetcher, state.memory.table, state.memory.directory
    looking = fetches.Fetches(*parts, lambda load: None)
    progress = JobProgress("job", count, 0, count)
    pieces: list[Any] = [np.arange(count, dtype=np.uint32)]
    progress.orders[0] = AnnouncedOrder(count, 0, np.ones(count, np.uint8), pieces, None)
    looking.add(0, RemoteShard(opened.stored, {owner: opened}, firsts, firsts))
    looking._followers[progress] = {owner: None}
    for _ in range(3):
        looking.look_ahead(progress, [0], 1.0)
    assert fetcher.queued_count(opened) <= limits.MOST_QUEUED
    until(lambda: origin.answering, "some of them are asked for")
    origin.held.clear()
    until(lambda: not fetcher.queued_count(opened), "they are fetched")
    looking.close()
    fetcher.close(opened)
    state.close()
    store.abandon()


async def test_blocks_that_came_when_the_engines_were_closed_ended_the_daemon(
    tmp_path: Path,
) -> None:
    """With an internal error, so that its successor began with empty memory."""
    store = Store(str(tmp_path / "blocks"), 1 << 30, BLOCK)
    state = ServerState(ServerConfig(arena_size_bytes=16 << 20))
    parts = Fetcher(store), state.memory.table, state.memory.directory
    looking = fetches.Fetches(*parts, lambda load: None)
    looking.attach(asyncio.get_running_loop())
    made: list[str] = []
    looking.in_loop(lambda: made.append("before"))
    await asyncio.sleep(0.01)
    looking.in_loop(lambda: made.append("behind"))
    looking.later(0.0, lambda: made.append("later"))
    looking.close()
    await asyncio.sleep(0.01)
    assert made == ["before"]
    state.close()
    store.abandon()


def test_the_orders_of_one_user_held_up_those_of_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread looks ahead for all, and looked at all orders before it began again."""
    store = Store(str(tmp_path / "blocks"), 1 << 30, BLOCK)
    state = ServerState(ServerConfig(arena_size_bytes=16 << 20))
    parts = Fetcher(store), state.memory.table, state.memory.directory
    looking = fetches.Fetches(*parts, lambda load: None)
    seen: list[str] = []

    def look(progress: JobProgress, bases: list[int], now: float) -> None:
        seen.append(progress.owner)
        time.sleep(0.001)

    monkeypatch.setattr(looking, "look_ahead", look)  # counts calls
    for user, count in (("1001", 60), ("1002", 1)):
        for k in range(count):
            looking.follow(JobProgress(f"job {k}\n0\n{user}", 4, 0, 4), [0], (int(user), 0))
    until(lambda: seen.count("1002") > 5, "another user's order is looked at")
    until(lambda: seen.count("1001") > 60, "all orders of the user are looked at")
    looking.close()
    gaps = [len(list(run)) for user, run in itertools.groupby(seen) if user == "1001"]
    assert max(gaps) < 40, gaps
    state.close()
    store.abandon()


@pytest.mark.check
def test_who_sent_a_remote_file_together_with_one_that_stalls_held_up_its_first_opener(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    common, own, more = (served(origin, tmp_path, [k], f"{k!r}.ffr") for k in (b"1", b"2", b"3"))
    origin.held.add(own.rpartition("/")[2])
    got: list[bytes] = []

    def read_all() -> None:
        with daemon.open([common, own, more]) as reader:
            got.extend(plain(reader.read(range(3))))

    with serving(**daemon_options(tmp_path)) as daemon:
        slow = threading.Thread(target=read_all)
        slow.start()
        until(lambda: origin.requests["GET"], "they are being opened")
        program = """
import sys, ffserve
with ffserve.open(sys.argv[2:], server=sys.argv[1]) as reader:
    print(*map(bytes, reader.read([0, 1])))
"""
        assert run_python(program, daemon.socket, more, common).stdout == "b'3' b'1'\n"
        assert not got and slow.is_alive()
        origin.held.clear()
        slow.join()
        assert got == [b"1", b"2", b"3"]
        assert len(daemon.status()["shards"]) == 3


def test_blocks_that_could_not_be_pinned_left_a_request_waiting(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    samples = samples_of(100, 6000)
    url = served(origin, tmp_path, samples)
    with (
        serving(**daemon_options(tmp_path, patch=NO_PINS, expect=[UNPINNED])) as daemon,
        daemon.open(url) as reader,
    ):
        assert plain(reader.read(range(100))) == samples
        origins = [job["time_s"]["origin"] for job in daemon.status()["jobs"]]
        assert sum(origins) < fetches.PART_S


@pytest.mark.check
def test_files_that_are_open_were_counted_again_for_the_next_job(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    """And descriptors of the store were not counted before they were open."""
    served(origin, tmp_path, [b"x"])
    urls = [origin.put(f"{k}.ffr", origin.files["a.ffr"]) for k in range(700)]
    patch = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))\n"
    with serving(**daemon_options(tmp_path, patch=patch)) as daemon:
        refused = r"1500 files open; 0 are in use, .* has 700 more, of which 700 are remote"
        with pytest.raises(ReadError, match=refused):
            daemon.open(urls)
        with daemon.open(urls[:500]) as one, daemon.open(urls[:500]) as other:
            assert len(one) == len(other) == 500


@pytest.mark.check
def test_errors_of_an_origin_are_those_of_the_caller(origin: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(300, 6000)
    url = served(origin, tmp_path, samples)
    expect = [r"cannot read a sample: .*", r"cannot open files for user .*"]
    with serving(**daemon_options(tmp_path, expect=expect)) as daemon:
        with daemon.open(url) as reader:
            assert bytes(reader[0]) == samples[0]
            served(origin, tmp_path, samples_of(300, 6000, 1))
            found = reader.read(range(300), errors="return")
            assert bytes(found[0]) == samples[0]
            errors = [each for each in found if isinstance(each, FFServeError)]
            assert errors and all(isinstance(each, ReadError) for each in errors)
            assert "changed at the origin" in str(errors[0]) and url in str(errors[0])
            assert daemon.status()["jobs"][0]["errors"] == len(errors)
        with daemon.open(url) as reader:
            origin.status = 403
            with pytest.raises(AccessDenied, match="denies access"):
                reader.read(range(300))
            origin.status = 0
            assert len(reader.read(range(300))) == 300


def test_secrets_are_neither_shown_nor_logged(
    origin: HttpOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    samples = samples_of(100, 6000)
    origin.password = "geheim-1"
    url = served(origin, tmp_path, samples) + "?token=geheim-1"
    monkeypatch.setitem(
        fsspec.config.conf, "http", {"headers": {"Authorization": "Bearer geheim-2"}}
    )
    expect = [r"cannot read a sample: .*", r"cannot open files for user .*"]
    with serving(**daemon_options(tmp_path, expect=expect)) as daemon:
        with daemon.open(url) as reader:
            assert bytes(reader[0]) == samples[0]
            origin.status = 403
            with pytest.raises(AccessDenied):
                reader.read(range(100))
            origin.status = 0
            shown = json.dumps(daemon.status())
            assert f"{origin.url}/a.ffr?…" in json.loads(shown)["shards"][0]["path"]
            assert "geheim" not in shown
        with pytest.raises(AccessDenied):
            daemon.open(url.replace("geheim-1", "geheim-3"))
        assert "geheim" not in daemon.text()
        for place, _, names in os.walk(tmp_path / "store"):
            for name in names:
                assert b"geheim" not in Path(place, name).read_bytes()


@pytest.mark.stores
def test_what_somebody_edited_in_the_store_is_fetched_again(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    expect = [r"store: block \d+ of .* was damaged on disk"]

    def check(url: str, samples: list[bytes]) -> None:
        with (
            serving(**daemon_options(tmp_path, expect=expect)) as daemon,
            daemon.open(url) as reader,
        ):
            assert plain(reader.read_batch(range(200))) == samples

    for format, options in (FORMATS[0], FORMATS[4]):
        samples = samples_of(200, 6000)
        url = served(origin, tmp_path, samples, f"{format}.data", format, **options)
        check(url, samples)
        largest = max((tmp_path / "store").rglob("data"), key=lambda p: p.stat().st_mtime)
        with open(largest, "r+b") as file:
            file.seek(3 * BLOCK + 100)
            file.write(b"somebody's" * 1000)
        check(url, samples)


@pytest.mark.parametrize("kind", [0, 1, 3])
def test_blocks_that_came_damaged_are_fetched_again_once(
    origin: HttpOrigin, tmp_path: Path, kind: int
) -> None:
    format, options = FORMATS[kind]
    samples = [random.Random(k).randbytes(9000) for k in range(100)]
    url = served(origin, tmp_path, samples, "a.data", format, **options)
    content = origin.files["a.data"]
    place = len(content) // 2 + 4000  # in a payload
    origin.wrong[place] = 1
    came_damaged = r"store: block \d+ of .* had come damaged"
    with serving(**daemon_options(tmp_path, expect=[came_damaged])) as daemon:
        with daemon.open(url) as reader:
            assert plain(reader.read(range(100))) == samples
        assert origin.wrong == {place: 0}
        # Its sample lies in one block, or two.
        assert origin.total <= len(content) + 2 * BLOCK


@pytest.mark.parametrize("kind", [0, 1, 3, 4])
def test_bytes_that_pass_the_store_and_came_damaged_were_an_error(
    origin: HttpOrigin, tmp_path: Path, kind: int
) -> None:
    """Nobody asked the origin for them again, as for blocks of the store."""
    format, options = FORMATS[kind]
    samples = [random.Random(k).randbytes(9000) for k in range(100)]
    url = served(origin, tmp_path, samples, "a.data", format, **options)
    place = len(origin.files["a.data"]) // 2 + 4000  # in a payload
    with (
        serving(**daemon_options(tmp_path, patch=NO_PINS, expect=[UNPINNED])) as daemon,
        daemon.open(url) as reader,
    ):
        origin.wrong[place] = 1
        assert plain(reader.read(range(100))) == samples
        assert origin.wrong == {place: 0}


@pytest.mark.parametrize("kind", [0, 3])
def test_a_block_that_is_damaged_at_the_origin_is_asked_for_twice_and_no_more(
    origin: HttpOrigin, tmp_path: Path, kind: int
) -> None:
    format, options = FORMATS[kind]
    samples = [random.Random(k).randbytes(9000) for k in range(100)]
    url = served(origin, tmp_path, samples, "a.data", format, **options)
    content = bytearray(origin.files["a.data"])
    content[len(content) // 2 + 4000] ^= 1  # in a payload
    origin.put("a.data", bytes(content))
    with serving(**daemon_options(tmp_path, expect=["sample .*", ".*checksum.*"])) as daemon:
        for _ in range(2):
            with daemon.open(url) as reader:
                for _ in range(3):
                    got = reader.read(range(100), errors="return")
                    bad = [k for k, sample in enumerate(got) if isinstance(sample, FFServeError)]
                    assert 0 < len(bad) < 100
        assert origin.total <= len(content) + 2 * BLOCK


def test_without_a_daemon_that_has_a_store_ranges_are_read_and_it_is_said_once(
    origin: HttpOrigin, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    samples = samples_of(50, 3000)
    url = served(origin, tmp_path, samples)
    with serving() as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        for _ in range(2):
            with ffserve.open(url) as reader:
                assert reader.source == "ranged reads"
                assert plain(reader.read(range(50))) == samples
        with pytest.raises(ReadError, match="no store for remote files"):
            ffserve.open(url, server="require")
    texts = [record.getMessage() for record in caplog.records if "without" in record.getMessage()]
    assert len(texts) == 1 and "no store for remote files" in texts[0]
    caplog.clear()


@pytest.mark.stores
def test_a_lost_daemon_is_replaced_by_ranged_reads(
    origin: HttpOrigin, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    samples = samples_of(50, 3000)
    url = served(origin, tmp_path, samples)
    monkeypatch.setitem(failover.RECONNECT_S, "auto", 0.1)
    with started(Daemon(**daemon_options(tmp_path))) as daemon:
        monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
        with ffserve.open(url) as reader:
            assert reader.source.startswith("daemon ")
            assert bytes(reader[0]) == samples[0]
            # Its version stays that which was opened.
            daemon.end(9)
            assert plain(reader.read(range(50))) == samples
            assert reader.source == "ranged reads"
            served(origin, tmp_path, samples_of(50, 3000, 1))
            with pytest.raises(ReadError, match="changed at the origin"):
                reader.read([0])
    caplog.clear()


@pytest.mark.check
def test_a_handed_over_daemon_serves_remote_samples_from_memory(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    samples = samples_of(200, 6000)
    url = served(origin, tmp_path, samples)
    expect = [r"took over .*", r"stopping: .*", r"shown by .*"]
    with started(Daemon(**daemon_options(tmp_path, expect=expect))) as daemon:
        with daemon.open(url) as reader:
            assert plain(reader.read_batch(range(200))) == samples
        before = daemon.process
        assert before is not None
        daemon.process, daemon.command = None, [*daemon.command, "--handover"]
        daemon.start(wait=False)
        assert before.wait(60) == 0
        until(daemon._answers, "the successor answers")
        with daemon.open(url) as reader:
            assert plain(reader.read_batch(range(200))) == samples
            status = daemon.status()
            assert status["cache"]["blocks_read"] == 0, "they are the predecessor's"
        served(origin, tmp_path, samples_of(200, 6000, 7))
        with daemon.open(url) as reader:
            assert plain(reader.read_batch(range(200))) == samples_of(200, 6000, 7)


def opening(url: str, **what: Any) -> protocol.Open:
    row = np.zeros(1, protocol.IDENTITY_DTYPE)
    row["size"], row["mtime"] = what.pop("size", 10), what.pop("modified", 0)
    usual = {"paths": [url], "format": None, "verify": True, "tags": [""], "access": "{}"}
    return protocol.Open(1, {**usual, **what}, row.tobytes())


def test_hostile_openings_are_refused(origin: HttpOrigin, tmp_path: Path) -> None:
    url = served(origin, tmp_path, samples_of(5, 100))
    expect = [r"cannot open files for user .*", r"closed a session .*"]
    with serving(**daemon_options(tmp_path, expect=expect)) as daemon:
        for message, code in (
            (opening("file:///etc/passwd"), "protocol"),
            (opening("local:///etc/passwd"), "read"),
            (opening("simplecache::http://127.0.0.1/x"), "protocol"),
            (opening("http://127.0.0.1:1::zip://x"), "read"),
            (opening("http://[::1/x"), "read"),
            (opening("hdfs://host/x"), "read"),
            (opening("http:///x"), "read"),
            (opening(url), "read"),
            (opening(url, modified=-1), "usage"),
            (opening(url, size=1 << 63), "read"),
            (opening(url, tags=None), "protocol"),
            (opening(url, tags=["", ""]), "protocol"),
            (opening(url, tags=[7]), "usage"),
            (opening(url, access=None), "protocol"),
            (opening(url, access="["), "usage"),
            (opening(url, access="[" * 60_000), "usage"),
            (opening(url, access='{"file": {}}'), "usage"),
            (opening(url, access='{"own": {"settings": 3}}'), "usage"),
            (opening("local:///etc/passwd", access='{"own": {"settings": ""}}'), "read"),
            (opening(url, access='{"s3": {"profile": "x"}}'), "usage"),
            (opening(url, access='{"s3": {"endpoint_url": "file:///etc"}}'), "usage"),
            (opening(url, access='{"http": {"headers": {"a": "b\\r\\nc: d"}}}'), "usage"),
            (opening(url, access='{"sftp": {"port": true}}'), "usage"),
            (opening(url, access=json.dumps({"s3": {"key": "x" * 70_000}})), "usage"),
        ):
            with Raw(daemon.socket) as raw:
                raw.send(message)
                answer = raw.receive()
                assert isinstance(answer, protocol.Fail), message
                assert answer.error[0] == code, (message, answer)
        content = json.dumps(daemon.status())
        assert "passwd" not in content


@pytest.mark.stores
def test_a_store_that_cannot_be_used_stops_the_daemon(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        done = subprocess.run(
            [sys.executable, "-m", "ffserve", "serve", "--socket", str(tmp_path / "s"),
             "--arena", "8MiB", "--store-directory", str(place)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode != 0 and str(place) in done.stderr, done


def test_what_one_user_announced_was_fetched_with_the_keys_of_another(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    """In a common place, where they share the object."""
    store = Store(str(tmp_path / "blocks"), 1 << 30, BLOCK)
    fetcher = Fetcher(store)
    origin.put("a", bytes(4 * BLOCK))
    known = identity_of(f"{origin.url}/a")
    owners = (1001, 0), (1002, 0)
    objects = {
        owner: fetcher.open(
            known, access=Access(json.dumps({"http": {"headers": {"X-Who": str(owner[0])}}}))
        )
        for owner in owners
    }
    firsts = np.arange(4, dtype=np.int32)
    remote = RemoteShard(objects[owners[0]].stored, objects, firsts, firsts)
    for owner in owners:
        assert remote.object_for([(7, 7), owner]) is objects[owner]
    with pytest.raises(ReadError, match="have closed it"):
        remote.object_for([(7, 7)])
    arena = ServerState(ServerConfig(arena_size_bytes=16 << 20))
    parts = fetcher, arena.memory.table, arena.memory.directory
    looking = fetches.Fetches(*parts, lambda load: None)
    progress = JobProgress("job", 4, 0, 4)
    pieces: list[Any] = [np.arange(4, dtype=np.uint32)]
    progress.orders[0] = AnnouncedOrder(4, 0, np.ones(4, np.uint8), pieces, None)
    looking.add(0, remote)
    looking._followers[progress] = {owners[1]: None}
    looking.look_ahead(progress, [0], 1.0)
    until(lambda: origin.sent["a"] == 4 * BLOCK, "all is fetched ahead")
    assert set(origin.who) == {"1002"}
    looking.close()
    for each in objects.values():
        fetcher.close(each)
    arena.close()
    store.abandon()


def test_next_uses_of_blocks_are_those_of_their_samples(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "blocks"), 1 << 30, BLOCK)
    rng = np.random.default_rng(7)
    for _ in range(20):
        sizes = rng.integers(0, rng.integers(2, 3 * BLOCK), 300)
        ends = np.cumsum(sizes)
        stored = store.open(ObjectVersion("http://a/x", int(ends[-1]), "", 0))
        begins = np.where(rng.random(300) < 0.5, ends - sizes, np.sort(ends - sizes))
        size = np.maximum(np.minimum(begins + sizes, stored.size) - begins, 0)
        most = stored.count - 1
        firsts = np.minimum(begins // BLOCK, most).astype(np.int32)
        lasts = np.maximum(np.minimum((begins + size - 1) // BLOCK, most), firsts).astype(np.int32)
        remote = RemoteShard(stored, {}, firsts, lasts)
        table = np.concatenate((rng.integers(0, 4, 5), rng.integers(0, 251, 300))).astype(np.uint8)
        expected = np.zeros(stored.count, np.uint8)
        for part, first, last in zip(table[5:], firsts, lasts, strict=True):
            for block in range(first, last + 1):
                if part and (not expected[block] or part < expected[block]):
                    expected[block] = part
        assert fetches._next_parts(remote, table, 5).tolist() == expected.tolist()
        store.close(stored)
    store.abandon()


@pytest.mark.parametrize(
    ("size", "most"), [(100_000, 2.1), (400_000, 1.1), (1_000_000, 1.1), (3_000_000, 1.1)]
)
def test_one_of_two_fields_costs_its_bytes(
    origin: HttpOrigin, tmp_path: Path, size: int, most: float
) -> None:
    """Below 256 KiB the file comes whole, for its index."""
    count = max(24_000_000 // size, 10)
    rng = np.random.default_rng(size)
    samples = [{"a": rng.bytes(size), "b": rng.bytes(size)} for _ in range(count)]
    url = origin.put("a.tar", archive(samples))
    options = {**daemon_options(tmp_path), "patch": ""}
    order = rng.permutation(count).tolist()
    for _ in range(2):
        with serving(**options) as daemon, daemon.open(url, fields=["a"]) as reader:
            for k in order:
                assert bytes(reader.read([k])[0]) == samples[k]["a"]
        assert origin.total <= most * size * count, origin.total / (size * count)


def test_small_neighbours_count_as_the_block_that_they_would_be() -> None:
    firsts, lasts = np.array([0, 100, 32, 0]), np.array([31, 131, 32, 31])
    assert fetches._reach(firsts, lasts, np.array([16, 1, 16, 16])) == (4, 2 + 32 + 1)
    firsts = np.arange(0, 20_000, 20)
    rows, size = fetches._reach(firsts, firsts + 15, np.full(1000, 16))
    assert rows == size == limits.GATE_BLOCKS


def test_objects_with_blocks_of_another_size_are_read_on(
    origin: HttpOrigin, tmp_path: Path
) -> None:
    """A tar file that was first read as a whole has large blocks."""
    samples = [{"a": b"%06d" % k * 10_000, "b": b"b" * 300_000} for k in range(20)]
    content = archive(samples)
    urls = [origin.put(name, content) for name in ("old.tar", "new.tar")]
    store = Store(str(tmp_path / "store"), 1 << 30)
    fetcher = Fetcher(store)
    old = fetcher.open(identity_of(urls[0]))
    fetcher.content(old, 600_000, 700_000)
    new = fetcher.open(identity_of(urls[1]), parts=True)
    sizes = old.stored.block_size, new.stored.block_size
    assert sizes == (directory.BLOCK_SIZE, directory.SMALL_BLOCK_SIZE)
    fetcher.close(old)
    fetcher.close(new)
    store.abandon()
    order = random.Random(0).sample(range(40), 40)
    for _ in range(2):
        with (
            serving(**{**daemon_options(tmp_path), "patch": ""}) as daemon,
            daemon.open(urls, fields=["a"]) as reader,
        ):
            for k in order:
                assert bytes(reader.read([k])[0]) == samples[k % 20]["a"]
        assert origin.sent["old.tar"] <= len(content) and origin.sent["new.tar"] <= len(content)
    store = Store(str(tmp_path / "store"), 1 << 30)
    fetcher = Fetcher(store)
    old, new = (fetcher.open(identity_of(url)) for url in urls)
    assert sizes == (old.stored.block_size, new.stored.block_size)
    assert fetcher.content(old, 0, len(content)) == content
    assert fetcher.content(new, 0, len(content)) == content
    assert origin.sent["old.tar"] == origin.sent["new.tar"] == len(content)
    store.abandon()


@pytest.mark.stores
def test_epochs_in_windows_over_a_small_store(origin: HttpOrigin, tmp_path: Path) -> None:
    samples = samples_of(1500, 3000)
    url = served(origin, tmp_path, samples)
    limit = 16 * BLOCK
    rng = random.Random(3)
    with (
        serving(**daemon_options(tmp_path, limit, arena="2MiB")) as daemon,
        daemon.open(url) as reader,
    ):
        for epoch in range(2):
            order: list[int] = []
            for first in range(0, 1500, 250):
                order += rng.sample(range(first, first + 250), 250)
            reader.announce(order, epoch)
            for start in range(0, 1500, 50):
                some = order[start : start + 50]
                assert plain(reader.read(some)) == [samples[k] for k in some]
                reader.reached(epoch, start + 50)
            assert on_disk_size(tmp_path / "store") <= limit
