"""A local source and the page cache: what is read through it, and what in the calling thread."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import damage, sample, write
from engines import engine_reads, reads_of

import ffserve
from benchmarks.harness.measuring import held_in_memory
from ffserve import aio
from ffserve.client.local import local_files
from ffserve.client.local.local_files import SampleTables, ShardFiles, fitting_share
from ffserve.client.local.local_source import LocalSource
from ffserve.client.loop import loop_state
from ffserve.engine import arrays, io
from ffserve.engine.cached import REGION_BITS, cached_pages
from ffserve.errors import ChecksumError, ReadError, SampleIndexError, UsageError
from ffserve.reads.shard_tables import How, read_all

COUNT = 700
TRUTH = [sample(i) for i in range(COUNT)]


@pytest.fixture(autouse=True)
def _file_system_that_tells(tmp_path: Path) -> None:
    """What is in memory can be told on a disk's file system, not on overlayfs or tmpfs."""
    probe = tmp_path / "probe"
    probe.write_bytes(b"x")
    fd = os.open(probe, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError as error:
        pytest.skip(f"the file system of {tmp_path} cannot tell what is in memory: {error}")
    finally:
        os.close(fd)
    direct, alignment = io.open_direct(probe)
    os.close(direct)
    if alignment == 1:
        pytest.skip(f"the file system of {tmp_path} has no direct I/O")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "a.ffr", TRUTH)


@pytest.fixture
def large(tmp_path: Path) -> str:
    """Larger than a few regions."""
    rng = np.random.default_rng(3)
    return write(tmp_path / "large.ffr", [rng.bytes(100_000) for _ in range(200)])


@pytest.fixture
def memory_path() -> Iterator[str]:
    directory = Path("/dev/shm") / f"ffserve-test-{os.getpid()}"
    directory.mkdir()
    yield write(directory / "a.ffr", TRUTH)
    shutil.rmtree(directory)


def evict(path: str) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def check(reader: ffserve.Reader, indices: list[int]) -> None:
    for index, got in zip(indices, reader.read(indices), strict=True):
        assert bytes(got) == TRUTH[index]


def test_every_epoch_read_the_disk_again(path: str) -> None:
    """The kernel may drop pages at any time, so one epoch of several must need no disk."""
    evict(path)
    rng = np.random.default_rng(0)
    reads = []
    with ffserve.open(path, server="off") as reader:
        for _ in range(6):
            before = engine_reads()
            check(reader, rng.permutation(COUNT).tolist())
            assert bytes(reader.read_batch(np.arange(COUNT)).buffer) == b"".join(TRUTH)
            reads.append(engine_reads() - before)
    assert reads[0] > 0
    assert 0 in reads


def test_a_first_epoch_took_a_read_of_the_disk_for_each_small_record(tmp_path: Path) -> None:
    """A disk of 30,000 reads a second gave no more than 30,000 records of 4 KiB a second."""
    rng = np.random.default_rng(0)
    records = [rng.bytes(4096) for _ in range(2000)]
    path = write(tmp_path / "small.ffr", records)
    evict(path)
    before = engine_reads()
    with ffserve.open(path, server="off") as reader:
        for indices in rng.permutation(2000).reshape(-1, 50):
            for index, got in zip(indices, reader.read(indices), strict=True):
                assert bytes(got) == records[index]
    assert engine_reads() - before < 2000 / 3


def test_file_that_was_just_written_was_fetched_from_the_disk(tmp_path: Path) -> None:
    reads = []
    for attempt in range(5):
        path = write(tmp_path / f"{attempt}.ffr", TRUTH)
        before = engine_reads()
        with ffserve.open(path, server="off") as reader:
            check(reader, list(range(COUNT)))
        reads.append(engine_reads() - before)
    assert 0 in reads


def test_one_missing_record_left_the_rest_of_its_batch_to_the_engine(large: str) -> None:
    """The kernel may drop pages at any time, hence some attempts."""
    found = []
    with ffserve.open(large, server="off") as reader:
        offsets, _, _ = reader.tables(0)
        for _ in range(5):
            wanted = [bytes(one) for one in reader.read(range(200))]
            fd = os.open(large, os.O_RDONLY)
            os.posix_fadvise(fd, int(offsets[3]), 100_000, os.POSIX_FADV_DONTNEED)
            missing = cached_pages(fd, int(offsets[3]), 100_000) < 20
            os.close(fd)
            before = engine_reads()
            assert [bytes(one) for one in reader.read(range(200))] == wanted
            found.append((missing, engine_reads() - before))
    assert any(missing and 0 < reads < 10 for missing, reads in found), found


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_any_share_gives_the_same_samples(large: str, share: float) -> None:
    with ffserve.open(large, server="off") as truth:
        wanted = [bytes(one) for one in truth.read(list(range(len(truth))))]
    evict(large)
    source = LocalSource((large,), None, True, share=share)
    try:
        for _ in range(2):
            indices = np.random.default_rng(1).integers(0, len(wanted), 500)
            request = source.start(indices, apart=True)
            assert source.finish(request) == {}
            arrays = request.target.arrays
            assert arrays is not None
            assert [bytes(one) for one in arrays] == [wanted[i] for i in indices]
    finally:
        source.close()


def test_only_the_chosen_regions_are_kept_in_memory(large: str) -> None:
    """The kernel may take pages back at any time, but adds none: the best of some attempts."""
    size, indices = 1 << REGION_BITS, np.arange(200)
    kept = 0.0
    for _ in range(5):
        evict(large)
        source = LocalSource((large,), None, True, share=0.5)
        source.finish(source.start(indices, apart=False))
        parts = np.array(resident(large))
        starts = np.arange(len(parts), dtype=np.int64) * size
        chosen = source._tables.through_cache(np.zeros(len(parts), np.int64), starts)
        source.close()
        assert chosen.any() and not chosen.all()
        # A record at a region's edge brings some pages of the next one.
        kept = max(kept, float(parts[chosen].mean()))
        assert parts[~chosen].mean() < 0.3, parts
        if kept > 0.7:
            return
    raise AssertionError(f"of the chosen regions only {kept:.2f} was in memory")


def resident(path: str) -> list[float]:
    """Return the part of each region whose pages are in the page cache."""
    size, step = os.stat(path).st_size, 1 << REGION_BITS
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        for start in range(0, size, step):
            length = min(step, size - start)
            try:
                parts.append(cached_pages(fd, start, length) / -(-length // 4096))
            except OSError as error:
                pytest.skip(f"the kernel does not say what is in memory: {error}")
        return parts
    finally:
        os.close(fd)


def test_smaller_share_lies_in_a_larger_one(path: str) -> None:
    shards = np.zeros(20_000, np.int64)
    offsets = np.arange(20_000, dtype=np.int64) << REGION_BITS
    before = np.zeros(20_000, np.bool_)
    for step in range(local_files.SHARE_STEPS + 1):
        files = ShardFiles()
        fd = os.open(path, os.O_RDONLY)
        files.add(path, fd, os.fstat(fd).st_dev, 12345)
        files.choose_share(step / local_files.SHARE_STEPS)
        size = np.array([os.fstat(fd).st_size])
        parsed = read_all([fd], [path], size, How(None, True, False, 1 << 30))
        samples = SampleTables(parsed, [path], verify=True)
        now = files.tables(samples).through_cache(shards, offsets)
        files.close()
        assert (now | ~before).all()
        assert abs(now.mean() - step / local_files.SHARE_STEPS) < 0.02
        before = now


def test_fitting_share() -> None:
    assert fitting_share(0, 1000) == 1
    assert fitting_share(800, 1000) == 1
    assert fitting_share(1600, 1000) == 0.5
    assert fitting_share(1700, 1000) == 7 / 16
    assert fitting_share(10**9, 1000) == 0


def test_damage_is_told_alike_in_memory_and_on_disk(path: str) -> None:
    damage(path, 73)
    told = []
    for cached in (False, True):
        with ffserve.open(path, server="off") as reader:
            if cached:
                check(reader, [72, 74])
            else:
                evict(path)
            with pytest.raises(ChecksumError) as caught:
                reader.read(list(range(64, 128)))
            told.append(str(caught.value))
            check(reader, [72, 74])
    assert told[0] == told[1]


def test_file_cut_while_it_is_open(path: str) -> None:
    with ffserve.open(path, server="off") as reader:
        check(reader, [COUNT - 1])
        offsets, _, _ = reader.tables(0)
        os.truncate(path, int(offsets[COUNT - 1]) + 1)
        with pytest.raises(ReadError, match="changed since it was opened"):
            reader.read([COUNT - 1])
        check(reader, [0, 5])


def test_files_in_memory_need_no_engine(memory_path: str) -> None:
    before = engine_reads()
    with ffserve.open(memory_path, server="off") as reader:
        check(reader, list(range(COUNT)))
    assert engine_reads() == before


OVERLAY = """
import os, subprocess, sys
import ffserve
from ffserve.client.local.local_engines import process_engines
below, name = os.path.split(sys.argv[1])
made = [os.path.join(sys.argv[2], part) for part in ("upper", "work", "merged")]
for part in made:
    os.mkdir(part)
options = f"lowerdir={below},upperdir={made[0]},workdir={made[1]}"
mount = ["mount", "-t", "overlay", "overlay", "-o", options, made[2]]
if subprocess.run(mount).returncode:
    sys.exit(77)
with ffserve.open(sys.argv[1], server="off") as plain:
    wanted = [bytes(one) for one in plain.read(list(range(500)))]
reads = lambda: sum(engine.counters()["reads"] for engine in process_engines().all)
before = reads()
with ffserve.open(os.path.join(made[2], name), server="off") as reader:
    for _ in range(2):
        assert [bytes(one) for one in reader.read(list(range(500)))] == wanted
assert reads() > before
"""


def test_overlay_cannot_tell_what_is_in_memory(path: str, tmp_path: Path) -> None:
    """There an engine reads everything, through the page cache of the files below."""
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid():
        pytest.skip("mounting an overlay needs root and unshare (util-linux)")
    other = tmp_path / "overlay"
    other.mkdir()
    command = [unshare, "-m", sys.executable, "-c", OVERLAY, path, str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if done.returncode == 77:
        pytest.skip(f"no overlay can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def _share_of(reader: ffserve.Reader) -> float:
    check(reader, [7])
    share = reader._request.share
    assert share is not None
    return share


def test_workers_choose_the_same_regions(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = os.stat(path).st_size
    monkeypatch.setattr(local_files, "free_memory", lambda: size)
    with ffserve.open(path, server="off") as reader:
        assert _share_of(reader) == 12 / 16
        monkeypatch.undo()
        assert _share_of(pickle.loads(pickle.dumps(reader))) == 12 / 16
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(_share_of, (reader,)) == 12 / 16


async def test_event_loop_copies_no_large_batch(large: str) -> None:
    """A batch of 20 MB is read by the engine's thread, although it is in memory."""
    with held_in_memory([large]):
        await _check_batches(large)


async def _check_batches(large: str) -> None:
    async with await aio.open(large, server="off") as reader:
        small = await reader.read([0])
        engines = loop_state().engine().engines
        before = reads_of(engines)
        batch = await reader.read_batch(list(range(200)))
        assert bytes(batch[0]) == bytes(small[0])
        assert reads_of(engines) > before
        before = reads_of(engines)
        await reader.read([1, 2, 3])
        assert reads_of(engines) == before


def calls_of(action: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, an action calls."""
    count = 0

    def count_calls(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # other tests of this process may have left callbacks of it
    sys.setprofile(count_calls)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count - 2  # the action itself, and the end of profiling


@pytest.mark.check
def test_one_sample_in_memory_took_forty_calls(path: str) -> None:
    """A sample of 4 KiB is copied and verified in the time of a few of them."""
    assert not arrays.MISSING
    many = np.arange(COUNT)
    with ffserve.FileReader(path) as drop_in, ffserve.open(path, server="off") as reader:

        def calls(read: Callable[[Any], object], indices: Any) -> int:
            with held_in_memory([path]):
                return calls_of(lambda: read(indices))

        for indices in ([7], (7, 9), many):
            assert calls(reader.read, indices) <= 8
        assert calls(drop_in.read, [7]) <= 10
        for indices in ([7], (7, 9), many, many[:1]):
            assert calls(reader.read_batch, indices) <= 14


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_all_kinds_of_indices_are_read_alike(path: str, kind: Any) -> None:
    with ffserve.open(path, server="off") as reader, ffserve.FileReader(path) as drop_in:
        for indices in ([], [3], [5, 5, 1], list(range(40)), list(range(COUNT - 1, -1, -1))):
            wanted = [TRUTH[k] for k in indices]
            for each in (reader, drop_in):
                assert [bytes(one) for one in each.read(kind(indices))] == wanted
            batch = reader.read_batch(kind(indices))
            assert [bytes(one) for one in batch] == wanted
            assert batch.buffer.flags.owndata and batch.buffer.flags.writeable
        for bad in ([0, COUNT], [-1], [2**63 - 1], [0, -(2**63)]):
            for each in (reader, drop_in):
                with pytest.raises(SampleIndexError):
                    each.read(kind(bad))
            with pytest.raises(SampleIndexError):
                reader.read_batch(kind(bad))


@pytest.mark.parametrize("evicted", ["none", "half", "all"])
@pytest.mark.parametrize("name", ["read", "read_batch"])
def test_samples_in_memory_and_on_disk_in_one_list(path: str, evicted: str, name: str) -> None:
    with ffserve.open(path, server="off") as reader:
        offsets = reader.tables(0)[0]
        evict(path)
        before = reader.stats()
        order = np.random.default_rng(3).permutation(COUNT).tolist()
        if evicted != "all":
            last = COUNT if evicted == "none" else COUNT // 2
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                file.read(int(offsets[last - 1]) + len(TRUTH[last - 1]))
        samples = getattr(reader, name)(order)
        assert [bytes(one) for one in samples] == [TRUTH[k] for k in order]
        now = reader.stats()
        assert int(now["samples"]) - int(before["samples"]) == COUNT
        assert int(now["bytes"]) - int(before["bytes"]) == sum(map(len, TRUTH))


def test_closing_waits_for_the_threads_that_copy(path: str) -> None:
    """Else they would read from whatever file gets the descriptor next."""
    other = os.open("/dev/zero", os.O_RDONLY)
    try:
        for _ in range(20):
            reader = ffserve.open(path, server="off")
            reader.read([0])
            begun, wrong = threading.Barrier(3), []

            def read(reader: Any = reader, begun: Any = begun, wrong: Any = wrong) -> None:
                begun.wait()
                with contextlib.suppress(UsageError):
                    while True:
                        found = reader.read(list(range(COUNT)))
                        wrong += [k for k, one in enumerate(found) if bytes(one) != TRUTH[k]]

            threads = [threading.Thread(target=read) for _ in range(2)]
            for thread in threads:
                thread.start()
            begun.wait()
            reader.close()
            taken = [os.dup(other) for _ in range(8)]
            for thread in threads:
                thread.join()
            for fd in taken:
                os.close(fd)
            assert not wrong
    finally:
        os.close(other)


def test_readers_dropped_without_close_leaked_their_files(path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        reader = ffserve.open(path, server="off")
        check(reader, [1, 2])
        del reader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # of the engine, if it is new


def test_linux_aio_read_the_page_cache_one_by_one() -> None:
    """Linux AIO waits for each buffered read, so a process that reads by itself uses threads."""
    with io.local_engine("aio") as engine:
        assert engine.kind == "threads"
