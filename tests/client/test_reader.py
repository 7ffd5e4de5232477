"""The reader's contract, the same with a daemon and without one."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import struct
import sys
import threading
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, damage, run_python, sample, serving, until, write

import ffserve
from ffserve.dataset import paths as dataset_paths
from ffserve.dataset.fields import Rows
from ffserve.dataset.paths import expand_paths
from ffserve.engine import many_files
from ffserve.errors import (
    ChecksumError,
    FFServeError,
    FormatError,
    MissingFile,
    ReadError,
    SampleIndexError,
    TruncatedError,
    UsageError,
)
from ffserve.order import epoch_order
from ffserve.reader import read_ahead

COUNTS = (120, 0, 80)
COUNT = sum(COUNTS)
TRUTH = [sample(i) for i in range(COUNT)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards, the middle one empty."""
    directory = tmp_path_factory.mktemp("shards")
    edges = np.cumsum((0, *COUNTS)).tolist()
    return [
        write(directory / f"{k}.ffr", TRUTH[edges[k] : edges[k + 1]]) for k in range(len(COUNTS))
    ]


@pytest.fixture(params=["off", "daemon"])
def server(request: pytest.FixtureRequest) -> str:
    """What to give as `server`: both kinds of source."""
    if request.param == "off":
        return "off"
    daemon = request.getfixturevalue("daemon")
    assert isinstance(daemon, Daemon)
    return daemon.socket


@pytest.fixture
def reader(files: list[str], server: str) -> Iterator[ffserve.Reader]:
    with ffserve.open(files, server=server) as opened:
        yield opened


def listed(samples: Any) -> list[bytes]:
    return [one.tobytes() for one in samples]


def wanted(indices: Any) -> list[bytes]:
    return [TRUTH[int(i)] for i in indices]


def digest(reader: ffserve.Reader, queue: Any = None) -> bool:
    """Whether a reader, perhaps in another process, reads what it should."""
    order = np.random.default_rng(os.getpid()).permutation(COUNT)
    right = listed(reader.read(order)) == wanted(order)
    if queue is not None:
        queue.put((right, reader.source))
    return right


def one_sample(argument: tuple[ffserve.Reader, int]) -> bytes:
    reader, index = argument
    return reader[index].tobytes()


class TestReader:
    # ---- indices ---------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "indices",
        [
            [0, 5, 199, 120, 119],
            (3, 3, 3, 1),
            range(10),
            range(190, 100, -7),
            {4, 9, 150},
            np.array([7, 6, 5]),
            np.array([7, 6, 5], np.uint8),
            np.array([7, 6, 5], ">i4"),
            np.arange(100)[::-3],
            np.array([1, 2], np.uint64),
            [np.int64(4), np.uint8(5), 6],
            [np.uint64(4), 5],
            [],
            (),
            range(0),
            np.array([], np.int64),
            np.array([]),
            set(),
        ],
        ids=repr,
    )
    def test_every_kind_of_indices(self, reader: ffserve.Reader, indices: Any) -> None:
        expected = wanted(indices)
        assert listed(reader.read(indices)) == expected
        batch = reader.read_batch(indices)
        assert listed(batch) == expected
        assert batch.offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
        assert batch.buffer.tobytes() == b"".join(expected)
        with reader.lease(indices) as views:
            assert listed(views) == expected
        assert reader.sizes(indices).tolist() == [len(s) for s in expected]
        assert reader.sizes(indices).dtype == np.int64

    def test_generator(self, reader: ffserve.Reader) -> None:
        assert listed(reader.read(i * i for i in range(10))) == wanted(i * i for i in range(10))

    @pytest.mark.parametrize(
        "indices",
        [
            [-1],
            [COUNT],
            [0, 2**70],
            [-(2**70)],
            [3, -200, 4],
            [np.uint64(2**63), 1],
            range(-1, 3),
            range(3, COUNT + 1),
            range(10**18, 10**30),
        ],
    )
    def test_indices_outside(self, reader: ffserve.Reader, indices: Any) -> None:
        asks = (reader.read, reader.read_batch, reader.lease, reader.sizes, reader.__getitem__)
        for ask in asks:
            with pytest.raises(SampleIndexError, match="outside the dataset of 200") as caught:
                ask(indices)
            assert caught.value.index in indices
            assert isinstance(caught.value, IndexError)

    @pytest.mark.parametrize(
        "indices",
        [
            [1.0],
            np.array([1.0, 2.0]),
            [True, False],
            np.array([True]),
            [[1, 2], [3, 4]],
            [[1], [2, 3]],
            np.zeros((2, 2), np.int64),
            np.zeros((0, 2), np.int64),
            np.array(3),
            ["1"],
            "12",
            [None],
            None,
            3,
            3.5,
            [1, "x"],
            [...],
            np.array(["1"]),
            "12",
            b"12",
        ],
        ids=repr,
    )
    def test_indices_that_are_none(self, reader: ffserve.Reader, indices: Any) -> None:
        for ask in (reader.read, reader.read_batch, reader.lease):
            with pytest.raises(UsageError):
                ask(indices)

    # ---- what comes back -------------------------------------------------------------------

    def test_samples_are_the_callers_own(self, reader: ffserve.Reader) -> None:
        first, again = reader.read([5, 5])
        for one in (first, again):
            assert one.dtype == np.uint8 and one.ndim == 1
            assert one.flags.writeable and one.flags.c_contiguous
        assert not np.shares_memory(first, again)
        first[:] = 0
        assert again.tobytes() == reader[5].tobytes() == TRUTH[5]

    def test_batch(self, reader: ffserve.Reader) -> None:
        batch = reader.read_batch([6, 0, 6, 5])
        assert len(batch) == 4
        assert batch.buffer.flags.owndata and batch.buffer.flags.writeable
        assert listed(batch[1:3]) == wanted([0, 6])
        assert batch[-1].tobytes() == TRUTH[5]
        for outside in (4, -5):
            with pytest.raises(IndexError):
                batch[outside]

    def test_batch_into_the_callers_buffer(self, reader: ffserve.Reader) -> None:
        need = len(TRUTH[5]) + len(TRUTH[6])
        for out in (np.zeros(need, np.uint8), np.zeros(need + 10, np.uint8)):
            batch = reader.read_batch([6, 5], out=out)
            assert np.shares_memory(batch.buffer, out)
            assert batch.buffer.nbytes == need
            assert listed(batch) == wanted([6, 5])
            assert not out[need:].any()
        read_only = np.zeros(need, np.uint8)
        read_only.flags.writeable = False
        for bad in (
            np.zeros(need - 1, np.uint8),
            np.zeros(need, np.int8),
            np.zeros(2 * need, np.uint8)[::2],
            np.zeros((1, need), np.uint8),
            read_only,
            bytearray(need),
        ):
            with pytest.raises(UsageError, match="out"):
                reader.read_batch([6, 5], out=bad)  # type: ignore[arg-type]

    def test_items_and_slices(self, reader: ffserve.Reader) -> None:
        assert reader[6].tobytes() == reader[np.int64(6)].tobytes() == TRUTH[6]
        assert listed(reader[3:9]) == TRUTH[3:9]
        assert listed(reader[::-37]) == TRUTH[::-37]
        assert listed(reader[-3:]) == TRUTH[-3:]
        assert reader[500:] == []
        assert listed(reader[[9, 1]]) == listed(reader[np.array([9, 1])]) == wanted([9, 1])
        for index in (-1, COUNT):
            with pytest.raises(IndexError):
                reader[index]
        for bad in (True, 1.0, None, "1"):
            with pytest.raises(UsageError):
                reader[bad]  # type: ignore[index]

    def test_iteration(self, reader: ffserve.Reader) -> None:
        assert listed(reader) == TRUTH
        assert all(one.flags.owndata for one in reader)
        sizes = [len(batch) for batch in reader.batches(count=7, size=50_000)]
        assert sum(sizes) == COUNT and max(sizes) <= 7
        order = list(range(COUNT - 1, -1, -1))
        assert [s for b in reader.batches(order, count=50) for s in listed(b)] == TRUTH[::-1]
        two = [iter(reader), iter(reader)]
        assert [next(it).tobytes() for it in two * 3] == [TRUTH[i // 2] for i in range(6)]

    @pytest.mark.parametrize(
        ("count", "size", "counts"),
        [
            (64, 4096, [2, 4, 8, 8, 8]),
            (64, 16_384, [2, 2, 2, 2, 2]),
            (200, 100, [1, 1, 2, 2, 2]),
            (1000, 100, [1, 1, 1, 1, 1]),
        ],
    )
    def test_small_batches_are_asked_for_together_the_first_ones_soon(
        self, count: int, size: int, counts: list[int]
    ) -> None:
        parts = [(Rows(np.arange(k * count, (k + 1) * count)), count * size) for k in range(30)]
        requests = list(read_ahead(parts))
        assert [len(some) for some, _ in requests[:5]] == counts
        order = np.concatenate([part.numbers for some, _ in requests for part in some])
        assert np.array_equal(order, np.arange(30 * count))
        assert np.array_equal(order, np.concatenate([whole for _, whole in requests]))

    @pytest.mark.check
    def test_iterations_that_are_given_up_leave_nothing(self, reader: ffserve.Reader) -> None:
        before = resident_size()
        for _ in range(300):
            assert next(iter(reader)).tobytes() == TRUTH[0]
        gc.collect()
        assert resident_size() - before < 100_000_000

    def test_length_sizes_shards_tables(self, reader: ffserve.Reader, files: list[str]) -> None:
        assert len(reader) == COUNT
        assert reader.sizes().tolist() == [len(s) for s in TRUTH]
        assert [s.path for s in reader.shards] == files
        assert [s.count for s in reader.shards] == list(COUNTS)
        assert [s.first for s in reader.shards] == [0, 120, 120]
        for k in range(3):
            offsets, lengths, checksums = reader.tables(k)
            assert len(offsets) == len(lengths) == len(checksums) == COUNTS[k]
            content = Path(files[k]).read_bytes()
            first = reader.shards[k].first
            for i in range(0, COUNTS[k], 11):
                start, length = int(offsets[i]), int(lengths[i])
                assert content[start : start + length] == TRUTH[first + i]
        for bad in (-1, 3):
            with pytest.raises(UsageError):
                reader.tables(bad)

    @pytest.mark.parametrize("bad", [-1, COUNT, 2**62])
    def test_lease_of_an_array_looks_at_it_on_entry(self, reader: ffserve.Reader, bad: int) -> None:
        with pytest.raises(SampleIndexError), reader.lease(np.array([3, bad])):
            pass

    def test_lease_outlives_nothing(self, reader: ffserve.Reader) -> None:
        with reader.lease(range(20)) as views:
            assert not any(v.flags.writeable for v in views)
            assert listed(reader.read(range(20))) == listed(views) == TRUTH[:20]
        with pytest.raises(RuntimeError, match="mine"), reader.lease([1]):
            raise RuntimeError("mine")
        assert reader[1].tobytes() == TRUTH[1]

    def test_stats(self, reader: ffserve.Reader) -> None:
        reader.read(range(10))
        reader.read_batch(range(5))
        stats = reader.stats()
        assert stats["samples"] == 15
        assert stats["bytes"] == sum(map(len, TRUTH[:10])) + sum(map(len, TRUTH[:5]))
        assert stats["source"] == reader.source
        assert repr(reader).startswith("<ffserve.Reader of 200 samples in /")

    # ---- life ------------------------------------------------------------------------------

    def test_closed(self, files: list[str], server: str) -> None:
        reader = ffserve.open(files, server=server)
        iterator = iter(reader)
        next(iterator)
        batches = reader.batches(count=5)
        next(batches)
        reader.close()
        reader.close()
        calls: list[Callable[[], Any]] = [
            lambda: reader.read([0]),
            lambda: reader.read_batch([]),
            lambda: reader.lease([0]),
            lambda: reader[0],
            reader.sizes,
            reader.stats,
            lambda: reader.source,
            lambda: next(iter(reader)),
            lambda: next(batches),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="closed"):
                call()
        assert len(reader) == COUNT
        with pytest.raises(UsageError, match="closed"):
            pickle.loads(pickle.dumps(reader)).read([0])

    def test_nothing_is_left_open(self, files: list[str], server: str) -> None:
        def open_files() -> set[str]:
            found = set()
            for fd in os.listdir("/proc/self/fd"):
                with contextlib.suppress(FileNotFoundError):  # the one of the listing
                    found.add(os.readlink(f"/proc/self/fd/{fd}"))
            return found & {*files}

        with ffserve.open(files, server=server) as reader:
            reader.read(range(COUNT))
            batches: Any = reader.batches(count=5)
            next(batches)
        batches.close()
        assert not open_files()

    def test_threads(self, reader: ffserve.Reader) -> None:
        problems: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                chance = np.random.default_rng(seed)
                for _ in range(15):
                    order = chance.integers(0, COUNT, 60)
                    assert listed(reader.read(order)) == wanted(order)
                    assert listed(reader.read_batch(order)) == wanted(order)
                    with reader.lease(order[:5]) as views:
                        assert listed(views) == wanted(order[:5])
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems

    def test_closed_while_threads_read(self, files: list[str], server: str) -> None:
        for _ in range(10):
            reader = ffserve.open(files, server=server)
            problems: list[BaseException] = []

            def work(reader: ffserve.Reader, problems: list[BaseException]) -> None:
                try:
                    while True:
                        assert listed(reader.read(range(30))) == TRUTH[:30]
                except BaseException as error:
                    problems.append(error)

            threads = [threading.Thread(target=work, args=(reader, problems)) for _ in range(3)]
            for thread in threads:
                thread.start()
            reader.read([100])
            reader.close()
            for thread in threads:
                thread.join(30)
            assert [type(p) for p in problems] == [UsageError] * 3, problems

    # ---- processes -------------------------------------------------------------------------

    @pytest.mark.check
    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_other_processes(self, reader: ffserve.Reader, method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        reader.read(range(50))
        queue = context.SimpleQueue()
        processes = [context.Process(target=digest, args=(reader, queue)) for _ in range(2)]
        for process in processes:
            process.start()
        assert digest(reader), "the parent goes on meanwhile"
        assert [queue.get() for _ in processes] == [(True, reader.source)] * 2
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert digest(reader)

    def test_pool(self, reader: ffserve.Reader) -> None:
        with multiprocessing.get_context("fork").Pool(3) as pool:
            got = pool.map(one_sample, [(reader, i) for i in range(0, COUNT, 9)])
            pool.close()
            pool.join()
        assert got == TRUTH[::9]

    @pytest.mark.check
    def test_fork_while_threads_read(self, reader: ffserve.Reader) -> None:
        stop = threading.Event()
        problems: list[BaseException] = []

        def work() -> None:
            try:
                while not stop.is_set():
                    assert digest(reader)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                assert in_a_child(lambda: digest(reader))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not problems

    def test_fork_in_the_middle_of_an_iteration_and_a_lease(self, reader: ffserve.Reader) -> None:
        batches = reader.batches(count=10)
        got = listed(next(batches))
        with reader.lease(range(10)) as views:

            def child() -> bool:
                rest = [s for batch in batches for s in listed(batch)]
                return listed(views) == TRUTH[:10] and got + rest == TRUTH

            with contextlib.ExitStack() as stack:
                stack.enter_context(reader.lease([3]))
                assert in_a_child(child)

                def leaves() -> bool:
                    stack.close()
                    return digest(reader)

                assert in_a_child(leaves)
        assert got + [s for batch in batches for s in listed(batch)] == TRUTH

    def test_child_closes_its_copy_and_the_parent_goes_on(self, reader: ffserve.Reader) -> None:
        reader.read([0])

        def child() -> bool:
            reader.close()
            return True

        assert in_a_child(child)
        assert digest(reader)

    def test_pickles(self, reader: ffserve.Reader) -> None:
        with pickle.loads(pickle.dumps(reader)) as copy:
            assert len(copy) == COUNT
            assert listed(copy.read(range(9))) == TRUTH[:9]
            assert copy.source == reader.source
            assert copy.stats()["samples"] == 9

    def test_copy_refuses_a_file_that_was_replaced(self, tmp_path: Path, server: str) -> None:
        path = write(tmp_path / "a.ffr", TRUTH[:10])

        def refuses() -> bool:
            with pickle.loads(packed) as copy:
                try:
                    assert copy[5].tobytes() == TRUTH[5], "the daemon has it open"
                except FormatError as error:
                    assert error.path == path and "replaced or rewritten" in str(error)
                    return True
                return False

        with ffserve.open(path, server=server) as reader:
            packed = pickle.dumps(reader)
            write(path, TRUTH[1:11])
            assert reader[5].tobytes() == TRUTH[5]
            assert refuses() == (server == "off")
        until(refuses, "the old file is closed")
        copy = pickle.loads(packed)
        for _ in range(2):
            with pytest.raises(FormatError, match="replaced or rewritten"):
                copy.read([0])
        write(path, TRUTH[:10])
        assert copy[5].tobytes() == TRUTH[5]
        copy.close()

    # ---- files -----------------------------------------------------------------------------

    def test_directory_glob_list_and_nested_order(self, tmp_path: Path, server: str) -> None:
        names = ["b.ffr", "a.ffr", "c/d.ffr", ".hidden.ffr", "x.txt"]
        (tmp_path / "c").mkdir()
        for k, name in enumerate(names):
            write(tmp_path / name, [name.encode()] * (k + 1))

        def opened(paths: Any) -> list[str]:
            with ffserve.open(paths, server=server) as reader:
                return list(dict.fromkeys(s.tobytes().decode() for s in reader))

        top = str(tmp_path)
        assert opened(tmp_path) == ["a.ffr", "b.ffr"]
        assert opened(top + "/*.ffr") == ["a.ffr", "b.ffr"]
        assert opened([tmp_path / "b.ffr", top + "/a.ffr"]) == ["b.ffr", "a.ffr"]
        assert opened((tmp_path / "c", tmp_path)) == ["c/d.ffr", "a.ffr", "b.ffr"]
        assert opened([top + "/x.*", tmp_path / ".hidden.ffr"]) == ["x.txt", ".hidden.ffr"]
        with ffserve.open([tmp_path / "b.ffr"] * 3, server=server) as reader:
            assert len(reader) == 3

    def test_names_that_are_no_text(self, tmp_path: Path, server: str) -> None:
        for name in ("grün\n .ffr", "grün\udcff.ffr"):
            path = write(tmp_path / name, [b"x"])
            with ffserve.open(path, server=server) as reader:
                assert reader[0].tobytes() == b"x"

    @pytest.mark.parametrize("paths", [[], None, 3, b"/x", [None], [b"/x"]])
    def test_paths_that_are_none(self, paths: Any, server: str) -> None:
        with pytest.raises(UsageError):
            ffserve.open(paths, server=server)

    @pytest.mark.parametrize("lie", [1 << 40, (1 << 48) + 5, 1 << 62])
    def test_lengths_that_lie(self, tmp_path: Path, server: str, lie: int) -> None:
        """A cut or hostile file costs no memory, and its empty sample is intact."""
        body = struct.pack("<q3I3q", 3, zlib.crc32(b"abcd"), 0, 0, 48, 52, lie)
        content = struct.pack("<I", zlib.crc32(body)) + body + b"abcdefgh"
        path = tmp_path / "a.ffr"
        path.write_bytes(content)
        with ffserve.open(path, server=server) as reader:
            good, cut, empty = reader.read(range(3), errors="return")
            assert isinstance(cut, TruncatedError) and cut.index == 1
            assert not isinstance(good, FFServeError) and good.tobytes() == b"abcd"
            assert not isinstance(empty, FFServeError) and empty.tobytes() == b""
            assert reader.sizes().max() <= len(content)

    def test_files_that_are_not_there_or_none_of_ours(self, tmp_path: Path, server: str) -> None:
        def refused(content: bytes | None, error: type[FFServeError], **options: Any) -> None:
            path = tmp_path / "a.ffr"
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(error) as caught:
                ffserve.open(path, server=server, **options)
            assert caught.value.path == str(path)

        good = Path(write(tmp_path / "good.ffr", TRUTH[:20])).read_bytes()
        refused(None, ReadError)
        refused(b"", FormatError)
        refused(b"\0" * 1000, FormatError)
        refused(b"hello world, this is text\n" * 50, FormatError)
        refused(good[:10], FormatError)
        refused(good[:100], TruncatedError)
        refused(good[:40] + bytes([good[40] ^ 1]) + good[41:], ChecksumError)
        for bad in (tmp_path / "none", tmp_path / "*.none"):
            with pytest.raises(ReadError):
                ffserve.open(bad, server=server)
        with pytest.raises(UsageError):
            ffserve.open(tmp_path / "good.ffr", format="wav", server=server)

    def test_empty_data_set(self, tmp_path: Path, server: str) -> None:
        path = write(tmp_path / "a.ffr", [])
        with ffserve.open([path, path], server=server) as reader:
            assert len(reader) == 0 and list(reader) == [] and reader.read([]) == []
            assert reader.sizes().tolist() == []
            with pytest.raises(SampleIndexError):
                reader.read([0])

    @pytest.mark.parametrize("suffix", ["ffr", "recordio", "tfrecord"])
    def test_a_file_overwritten_while_it_was_open_was_called_damaged(
        self, tmp_path: Path, server: str, suffix: str
    ) -> None:
        path = write(tmp_path / f"a.{suffix}", [bytes([k]) * 3000 for k in range(40)])
        other = write(tmp_path / f"b.{suffix}", [bytes([k + 1]) * 3000 for k in range(40)])
        with ffserve.open(path, server=server) as reader:
            Path(path).write_bytes(Path(other).read_bytes())  # in place
            for ask in (reader.read, reader.read_batch):
                with pytest.raises(ReadError, match="changed since") as caught:
                    ask([5, 6])
                assert (caught.value.path, caught.value.index) == (path, 5)
        with ffserve.open(path, server=server) as reader:
            assert reader[5].tobytes() == bytes([6]) * 3000

    def test_damaged_samples(self, tmp_path: Path, server: str) -> None:
        paths = [write(tmp_path / f"{k}.ffr", TRUTH[:20]) for k in range(2)]
        damage(paths[1], 5)
        damage(paths[1], 6)
        with ffserve.open(paths, server=server) as reader:
            offset = int(reader.tables(1)[0][5])
            for ask in (reader.read, reader.read_batch, lambda i: reader.lease(i).__enter__()):
                with pytest.raises(ChecksumError) as caught:
                    ask([1, 26, 25, 2])
                assert (caught.value.path, caught.value.index) == (paths[1], 26)
            got = reader.read([25, 3, 25, 26], errors="return")
            assert [type(g) for g in got] == [
                ChecksumError,
                np.ndarray,
                ChecksumError,
                ChecksumError,
            ]
            assert isinstance(got[0], ChecksumError) and got[0].offset == offset
            again = pickle.loads(pickle.dumps(got[0]))
            assert str(again) == str(got[0]) and "25" in str(again)
            with pytest.raises(ChecksumError):
                list(reader)
        with ffserve.open(paths, server=server, verify=False) as reader:
            assert len(reader[25]) == len(TRUTH[5])
        with ffserve.open(paths, server=server, on_error="skip") as reader:
            assert len(reader) == 38
            assert listed(reader) == TRUTH[:20] + TRUTH[:5] + TRUTH[7:20]
            assert listed(reader.read([24, 25])) == [TRUTH[4], TRUTH[7]]
            assert [error.index for error in reader.damaged] == [25, 26]
            assert reader.sizes().tolist() == [len(s) for s in listed(reader)]
            with pytest.raises(SampleIndexError, match="38"):
                reader.read([38])
            copy = pickle.loads(pickle.dumps(reader))
            assert listed(copy[20:]) == TRUTH[:5] + TRUTH[7:20]
            copy.close()

    @pytest.mark.parametrize("options", [{"on_error": "x"}, {"server": ""}, {"server": 3}])
    def test_options_that_are_none(self, files: list[str], options: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            ffserve.open(files, **options)


def test_a_close_while_another_thread_sent_was_reported_by_chance_only(files: list[str]) -> None:
    """The data set stayed open in the daemon, however much was read over the connection."""
    with serving() as daemon, daemon.open(files[0]) as reader:
        other = daemon.open(files[0])
        connection = other._selector.source.connection  # type: ignore[union-attr]
        with connection._sending:
            other.close()
        reader.read(range(len(reader)))
        until(lambda: daemon.status()["shards"][0]["sessions"] == 1, "it is closed")


def resident_size() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def in_a_child(call: Callable[[], bool]) -> bool:
    """Fork; return what a call gives in the child, False for an exception or a hang."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if call() else 2
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        _, status = until(lambda: _waited(pid), "the child ends")
    except AssertionError:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise
    return bool(status == 0)


def _waited(pid: int) -> tuple[int, int] | None:
    got, status = os.waitpid(pid, os.WNOHANG)
    return (got, status) if got else None


@pytest.mark.check
@pytest.mark.parametrize("source", ["off", "copied"])
def test_failed_batches_kept_their_buffers_until_garbage_collection(
    tmp_path: Path, source: str
) -> None:
    """copied: only half of the arena can be leased, and the damaged sample is of the other half."""
    path = write(tmp_path / "large.ffr", [bytes(1 << 20)] * 8)
    damage(path, 7)
    with contextlib.ExitStack() as stack:
        server = "off"
        if source != "off":
            server = stack.enter_context(serving(arena="12MiB")).socket
        for how in ("read", "read_batch", "lease", "out"):
            with ffserve.open(path, server=server) as reader:
                assert held_after_failures(reader, how) < 12 << 20, how


def held_after_failures(reader: ffserve.Reader, how: str) -> int:
    """Return the bytes that are held after ten batches of which a sample is damaged."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(10):
            with contextlib.suppress(ChecksumError, UsageError):
                if how == "lease":
                    with reader.lease(range(8)):
                        pass
                elif how == "out":
                    reader.read_batch([0, 1], out=np.empty(1 << 20, np.uint8))
                else:
                    getattr(reader, how)(range(8))
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()


def kept_objects() -> Counter[str]:
    """Count the objects of clients and data sets in this process, by class."""
    kinds = [type(each) for each in gc.get_objects()]
    core = ("ffserve.client", "ffserve.dataset")
    return Counter(kind.__name__ for kind in kinds if kind.__module__.startswith(core))


@pytest.mark.parametrize("name", ["a.ffr", "a.recordio"])
def test_closed_readers_kept_tables_chunks_and_windows_until_garbage_collection(
    tmp_path: Path, server: str, name: str
) -> None:
    """A job that opened readers one after the other held several of them."""
    path = write(tmp_path / name, [bytes(100)] * 40_000)
    order = epoch_order(40_000, seed=1, epoch=0, window=4096)
    gc.collect()
    gc.disable()
    try:
        before = kept_objects()
        with ffserve.open(path, server=server) as reader:
            reader.announce(order, 0)
            next(iter(reader.batches(order, count=256)))
            with reader.lease(range(8)):
                pass
            reader.read(range(9))
            del reader
        if server == "off":  # a connection stays
            ffserve.open(path, server=server).read_batch(range(9))  # and is not closed
        left = (kept_objects() - before).keys()
        assert left <= {"_Slot"}, "of the sockets that this process knows"
    finally:
        gc.enable()


CHANGING = """
import sys, threading, time
import numpy as np
import ffserve
reader = ffserve.open(sys.argv[1], server=sys.argv[2])
contents = [reader[k].tobytes() for k in (0, 1)]
indices, ended = np.zeros(64, np.int64), False

def change():
    other = np.tile(np.array([1, int(sys.argv[3])]), 32)
    while not ended:
        indices[:] = other
        indices[:] = 0

def lease():
    with reader.lease(indices) as samples:
        return [sample.tobytes() for sample in samples]

calls = {
    "read": lambda: [sample.tobytes() for sample in reader.read(indices)],
    "read_batch": lambda: [sample.tobytes() for sample in reader.read_batch(indices)],
    "lease": lease,
}
thread = threading.Thread(target=change)
thread.start()
for call in calls.values():
    until = time.monotonic() + 0.7
    while time.monotonic() < until:
        try:
            assert set(call()) <= set(contents)
        except ffserve.FFServeError:
            pass
ended = True
thread.join()
print("ok")
"""


@pytest.mark.check
@pytest.mark.parametrize("other", [1, 1 << 40])
def test_indices_that_another_thread_changes_led_out_of_the_buffer(
    tmp_path: Path, server: str, other: int
) -> None:
    path = write(tmp_path / "sizes.ffr", [b"short", bytes(100_000)])
    assert run_python(CHANGING, path, server, other).stdout == "ok\n"


def test_each_path_was_looked_up_twice_to_expand_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / f"{k}.ffr", [b"x"]) for k in range(20)]
    calls: list[str] = []

    def seen(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in ("stat", "lstat"):
            calls.append(function.__name__)

    def looking(given: Sequence[str]) -> tuple[many_files.States, OSError | None]:
        calls.extend(given)
        return many_files.stat_paths(given)

    monkeypatch.setattr(dataset_paths, "stat_paths", looking)
    for given, most in ((paths, len(paths)), (tmp_path, 1)):
        calls.clear()
        sys.setprofile(seen)
        try:
            found = expand_paths(given, suffixes=(".ffr",))
        finally:
            sys.setprofile(None)
        assert sorted(found) == sorted(map(str, paths))
        assert 1 <= len(calls) <= most


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    path = tmp_path / "a b%#ä.ffr"
    write(path, [b"x"])
    for url in (path.as_uri(), f"file://localhost{path.as_uri()[7:]}", f"FILE:{path.as_uri()[7:]}"):
        assert expand_paths(url) == expand_paths([url]) == (str(path),)
        with ffserve.open(url, server="off") as reader:
            assert bytes(reader.read([0])[0]) == b"x"
    assert expand_paths(f"{tmp_path.as_uri()}/*.ffr") == (str(path),)
    for wrong in ("file://other/x.ffr", "file://x.ffr"):
        with pytest.raises(UsageError, match="names the host"):
            expand_paths(wrong)


def test_a_hint_for_braces_as_webdataset_writes_them(tmp_path: Path) -> None:
    write(tmp_path / "x-{0..1}.ffr", [b"x"])
    assert len(expand_paths(tmp_path / "x-{0..1}.ffr")) == 1
    for name in ("x-{0..5}.ffr", "x-{0..5}*.ffr"):
        with pytest.raises(MissingFile, match="in place of braces write"):
            expand_paths(tmp_path / name)


def test_directories_without_files_and_with_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "circle.ffr").symlink_to("circle.ffr")
    (tmp_path / "broken.ffr").symlink_to("nowhere")
    (tmp_path / "inner.ffr").mkdir()
    with pytest.raises(MissingFile, match=r"contains no \*\.ffr"):
        expand_paths(tmp_path, suffixes=(".ffr",))
    assert expand_paths(tmp_path / "broken.ffr") == (str(tmp_path / "broken.ffr"),)
    write(tmp_path / "real.ffr", [b"x"])
    (tmp_path / "link.ffr").symlink_to("real.ffr")
    expected = tuple(str(tmp_path / name) for name in ("link.ffr", "real.ffr"))
    assert expand_paths(tmp_path, suffixes=(".ffr",)) == expected
    assert expand_paths(f"{tmp_path}/*.ffr") == expected
