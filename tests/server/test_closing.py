"""Files that no job has open are closed; their samples stay, and are served again, unless the file
was replaced."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, Raw, client, sample, serving, until, write

COUNT = 40
TRUTH = [sample(i) for i in range(COUNT)]
SOON = ("--close-after", "0")
AT_ONCE = "import ffserve.server.sessions.server as s; s.TEND_INTERVAL_S = 0.02"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that looks for idle files all the time, and closes them after 30 s."""
    with serving(patch=AT_ONCE) as running:
        yield running


@pytest.fixture(scope="module")
def soon() -> Iterator[Daemon]:
    """One that closes them at once."""
    with serving(options=SOON, patch=AT_ONCE) as running:
        yield running


def held(daemon: Daemon, path: str | Path) -> list[str]:
    """Return the daemon's descriptors of a file, under whatever name."""
    found = []
    for fd in os.listdir(f"/proc/{daemon.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{daemon.pid}/fd/{fd}"))
    return [name for name in found if name.removesuffix(" (deleted)") == str(path)]


def shards(daemon: Daemon, path: str | Path | None = None) -> list[dict[str, Any]]:
    """What STATUS says of the shards of a file; None: of all."""
    found: list[dict[str, Any]] = daemon.status()["shards"]
    return [each for each in found if path is None or each["path"] == str(path)]


def read_all(daemon: Daemon, path: str | Path) -> list[bytes]:
    """Return all samples, as a job of its own reads them."""
    with daemon.open(path) as reader:
        return [bytes(one) for one in reader.read(range(len(reader)))]


@pytest.mark.check
@pytest.mark.parametrize("suffix", ["ffr", "tfrecord", "recordio"])
def test_a_closed_file_is_served_from_memory_when_it_is_opened_again(
    soon: Daemon, tmp_path: Path, suffix: str
) -> None:
    samples = TRUTH * 30
    path = write(tmp_path / f"a.{suffix}", samples)
    assert read_all(soon, path) == samples
    until(lambda: not held(soon, path), "the file is closed")
    (shard,) = shards(soon, path)
    assert not shard["open"] and shard["cached_size"] > 0
    read = soon.cache()["blocks_read"]
    for _ in range(3):
        assert read_all(soon, path) == samples
        until(lambda: not held(soon, path), "the file is closed")
    assert soon.cache()["blocks_read"] == read, "nothing is read twice"
    assert len(shards(soon, path)) == 1


@pytest.mark.check
def test_a_file_is_closed_when_no_job_has_it_open_for_some_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", TRUTH)
    with serving(options=("--close-after", "1"), patch=AT_ONCE) as daemon:
        with daemon.open(path) as reader:
            assert bytes(reader[0]) == TRUTH[0]
            time.sleep(1.2)
            assert held(daemon, path), "in use"
            ended = time.monotonic()
        until(lambda: shards(daemon)[0]["sessions"] == 0, "the job has ended")
        kept = bool(held(daemon, path)) and shards(daemon)[0]["open"]
        assert kept or time.monotonic() - ended > 1
        until(lambda: not held(daemon, path), "the file is closed")


def test_the_space_of_a_deleted_file_stayed_taken(daemon: Daemon, tmp_path: Path) -> None:
    """Until the daemon ended; now it is given back when no job has the file open."""
    path = write(tmp_path / "a.ffr", TRUTH)
    with daemon.open(path) as reader:
        assert bytes(reader[0]) == TRUTH[0]
        os.unlink(path)
        assert [bytes(one) for one in reader.read(range(COUNT))] == TRUTH
        assert held(daemon, path)
    until(lambda: not held(daemon, path), "it is closed long before 30 s are over", 20)


def test_a_file_that_is_deleted_while_idle_is_closed(daemon: Daemon, tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", TRUTH)
    assert read_all(daemon, path) == TRUTH
    assert held(daemon, path)
    os.unlink(path)
    until(lambda: not held(daemon, path), "it is closed long before 30 s are over", 20)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounts a file system")
    place = tmp_path / "mounted"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "none", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr}")
    yield place
    subprocess.run(["umount", "-l", place], capture_output=True)


def test_umount_was_busy_until_the_daemon_ended(soon: Daemon, mounted: Path) -> None:
    path = write(mounted / "a.ffr", TRUTH)
    with soon.open(path) as reader:
        assert bytes(reader[1]) == TRUTH[1]
        assert subprocess.run(["umount", mounted], capture_output=True).returncode
    until(lambda: not held(soon, path), "the file is closed")

    def unmounted() -> bool:
        return not subprocess.run(["umount", mounted], capture_output=True).returncode

    until(unmounted, "the ring has let the file go, too")


def test_another_file_with_the_identity_of_a_closed_one(tmp_path: Path) -> None:
    """A deleted file's inode number is given to the next file, whose size and times may be equal:
    here the daemon is told that they are."""
    first = write(tmp_path / "a.ffr", [b"one", b"two"])
    second = write(tmp_path / "b.ffr", [b"1ne", b"2wo"])
    patch = (
        "import ffserve.server.files.parsing as p\nreal = p.identities_of\n"
        "p.identities_of = lambda states: [\n"
        "    each._replace(inode=7, mtime_ns=7, ctime_ns=7) for each in real(states)\n]\n"
        "import ffserve.server.files.closing as c\nc._ended_of = lambda shards: []"
    )
    with serving(options=SOON, patch=patch) as daemon:
        assert read_all(daemon, first) == [b"one", b"two"]
        until(lambda: not held(daemon, first), "the file is closed")
        assert read_all(daemon, second) == [b"1ne", b"2wo"]
        until(lambda: not held(daemon, second), "the file is closed")
        assert read_all(daemon, second) == [b"1ne", b"2wo"]
        assert daemon.cache()["blocks_read"] == 2


def test_closed_shards_give_way_when_memory_is_needed(tmp_path: Path) -> None:
    """Their rows in the tables go with their last sample."""
    paths = [
        write(tmp_path / f"{k}.ffr", [sample(i, [0, 70_000], k) for i in range(1, 40, 2)])
        for k in range(8)
    ]
    with serving(arena="4MiB", options=SOON) as daemon:
        for _ in range(3):
            for k, path in enumerate(paths):
                expected = [sample(i, [0, 70_000], k) for i in range(1, 40, 2)]
                assert read_all(daemon, path) == expected
        until(lambda: not any(s["open"] for s in shards(daemon)), "all are closed")
        until(lambda: all(s["cached_size"] for s in shards(daemon)), "empty ones are forgotten")
        assert 0 < len(shards(daemon)) < len(paths)


@pytest.mark.check
def test_only_so_many_closed_shards_are_kept(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{k:02}.ffr", [b"%d" % k] * 5) for k in range(30)]
    patch = "import ffserve.limits as h; h.MOST_CLOSED = 10\n"
    patch += "import ffserve.server.files.closing as c; c.DROP_COUNT = 2"
    with serving(options=SOON, patch=patch) as daemon:
        for path in paths:
            read_all(daemon, path)
        until(lambda: len(shards(daemon)) == 10, "the others are dropped")
        assert {s["path"] for s in shards(daemon)} == set(paths[-10:])
        read = daemon.cache()["blocks_read"]
        assert read_all(daemon, paths[-1]) == [b"29"] * 5
        assert daemon.cache()["blocks_read"] == read


@pytest.mark.check
def test_jobs_that_come_and_go_while_files_are_closed(tmp_path: Path) -> None:
    """Every second all idle shards are closed, in the middle of whatever else happens."""
    paths = [write(tmp_path / f"{k}.ffr", [sample(i, seed=k) for i in range(20)]) for k in range(6)]
    patch = "import ffserve.server.sessions.server as s; s.TEND_INTERVAL_S = 0.002"
    program = """
import sys, random, ffserve
sys.path.insert(0, sys.argv[2])
from daemon import sample
print("ready", flush=True)
chance = random.Random(int(sys.argv[3]))
for _ in range(150):
    k = chance.randrange(6)
    with ffserve.open(sys.argv[4 + k], server=sys.argv[1]) as reader:
        chosen = [chance.randrange(20) for _ in range(5)]
        for index, got in zip(chosen, reader.read(chosen)):
            assert bytes(got) == sample(index, seed=k)
print("right", flush=True)
"""
    support = Path(__file__).parents[1] / "support"
    with serving(arena="2MiB", options=SOON, patch=patch) as daemon, contextlib.ExitStack() as all_:
        jobs = [
            all_.enter_context(client(program, daemon.socket, support, seed, *paths))
            for seed in range(3)
        ]
        for job in jobs:
            assert job.stdout is not None and job.stdout.readline() == "right\n"


def test_a_proof_ends_with_the_file(soon: Daemon, tmp_path: Path) -> None:
    """A closed file must be shown again: nothing else says who may read it."""
    from daemon import asking

    from ffserve import protocol

    path = write(tmp_path / "a.ffr", TRUTH)
    assert read_all(soon, path) == TRUTH
    until(lambda: not held(soon, path), "the file is closed")
    with Raw(soon.socket) as raw:
        raw.send(asking(path))
        assert isinstance(raw.receive(), protocol.Need)
        os.rename(write(tmp_path / "b.ffr", TRUTH[::-1]), path)
        raw.pass_files(1, [path])
        assert isinstance(raw.receive(), protocol.Opened)
    assert read_all(soon, path) == TRUTH[::-1]


def test_closing_keeps_no_shard_of_a_stopped_reader(soon: Daemon, tmp_path: Path) -> None:
    """A file is not closed while a session has it open, however long nobody reads it."""
    path = write(tmp_path / "a.ffr", TRUTH)
    with soon.open(path) as reader:
        time.sleep(0.3)
        chosen = np.arange(COUNT)[::-1]
        assert [bytes(one) for one in reader.read(chosen)] == TRUTH[::-1]


# ---- files that cannot be opened again ---------------------------------------------------------


def replace(served: Path, fresh: str, way: str) -> None:
    """Put a file in the place of a served one."""
    if way == "rewritten":
        shutil.copyfile(fresh, served)
        return
    if way == "deleted":
        served.unlink()
    copy = served.with_name("copy")
    shutil.copyfile(fresh, copy)
    os.rename(copy, served)


def size_of_tables(daemon: Daemon) -> int:
    """Bytes that the directory and the index take."""
    size = 0
    for fd in os.listdir(f"/proc/{daemon.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            name = f"/proc/{daemon.pid}/fd/{fd}"
            if os.readlink(name).startswith(("/memfd:ffserve-directory", "/memfd:ffserve-index")):
                size += os.stat(name).st_blocks * 512
    return size


@pytest.mark.check
@pytest.mark.parametrize("way", ["rewritten", "renamed", "deleted"])
@pytest.mark.parametrize("in_use", [False, True], ids=["idle", "open"])
def test_each_replacement_of_a_served_file_left_its_shard_in_the_tables(
    daemon: Daemon, tmp_path: Path, way: str, in_use: bool
) -> None:
    """And 36 bytes a sample, whether a session had it open meanwhile or not."""
    contents = [[b"%d of %d" % (i, k) for i in range(2000)] for k in range(2)]
    fresh = [write(tmp_path / f"fresh{k}.ffr", each) for k, each in enumerate(contents)]
    served = Path(shutil.copyfile(fresh[0], tmp_path / "served.ffr"))
    most = 0
    with contextlib.ExitStack() as stack:
        assert read_all(daemon, served) == contents[0]
        size = size_of_tables(daemon)
        for turn in range(1, 49):
            if in_use:
                stack.close()
                old = stack.enter_context(daemon.open(served))
                assert bytes(old[1]) == contents[(turn - 1) % 2][1]
            replace(served, fresh[turn % 2], way)
            assert read_all(daemon, served) == contents[turn % 2]
            if in_use and way != "rewritten":
                assert [bytes(one) for one in old.read([0, 1999])] == [
                    contents[(turn - 1) % 2][k] for k in (0, 1999)
                ]
            if turn % 12 == 0:
                most = max(most, len(shards(daemon, served)))
        stack.close()
        until(lambda: len(shards(daemon, served)) == 1, "the others are gone")
        assert most < 24
        assert size_of_tables(daemon) <= size + 4 * 4096, "their tables, too"
        read = daemon.cache()["blocks_read"]
        assert read_all(daemon, served) == contents[0]
        assert daemon.cache()["blocks_read"] == read, "the file of today is still in memory"


@pytest.mark.check
@pytest.mark.parametrize("way", ["rewritten", "renamed", "deleted"])
def test_a_file_that_was_replaced_when_it_was_closed_already(
    soon: Daemon, tmp_path: Path, way: str
) -> None:
    """It is known by its name when the next one is opened."""
    fresh = [write(tmp_path / f"fresh{k}.ffr", TRUTH[k : k + 3]) for k in range(4)]
    served = Path(shutil.copyfile(fresh[0], tmp_path / "served.ffr"))
    for k in range(4):
        if k:
            replace(served, fresh[k], way)
        assert read_all(soon, served) == TRUTH[k : k + 3]
        until(lambda: not held(soon, served), "it is closed")
        until(lambda: len(shards(soon, served)) == 1, "the one before is gone")
    (shard,) = shards(soon, served)
    assert not shard["open"] and shard["cached_size"]


def test_an_old_file_that_is_in_use_does_not_drop_the_samples_of_the_present_one(
    soon: Daemon, tmp_path: Path
) -> None:
    served, other = Path(write(tmp_path / "a.ffr", TRUTH)), write(tmp_path / "b.ffr", TRUTH)
    with soon.open(served) as old:
        replace(served, write(tmp_path / "fresh.ffr", TRUTH[::-1]), "renamed")
        for path in (served, other):
            assert read_all(soon, path) == (TRUTH[::-1] if path == served else TRUTH)
            until(lambda: sum(s["open"] for s in shards(soon)) == 1, "the old one alone is open")
        read = soon.cache()["blocks_read"]
        assert read_all(soon, served) == TRUTH[::-1]
        assert soon.cache()["blocks_read"] == read
        assert [bytes(one) for one in old.read(range(COUNT))] == TRUTH
