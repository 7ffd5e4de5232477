"""The drop-in FileReader and FileWriter: what the original does, and what it gets wrong."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon
from ffrecord_files import split

from ffserve.compat.ffrecord import FileReader, FileWriter
from ffserve.errors import (
    ChecksumError,
    FFServeError,
    FormatError,
    SampleIndexError,
    TruncatedError,
    UsageError,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "ffrecord"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
DAMAGED = MANIFEST["damaged"]
WHOLE = sorted(name for name in MANIFEST["files"] if name != "unfinished.ffr")
PLAIN = split((GOLDEN / "plain.ffr").read_bytes())
MULTI = [s for k in (0, 1) for s in split((GOLDEN / f"multi/PART_0000{k}.ffr").read_bytes())]


@pytest.fixture
def plain() -> Iterator[FileReader]:
    with FileReader(GOLDEN / "plain.ffr") as reader:
        yield reader


def as_bytes(arrays: list[Any]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("check_data", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_golden_files(name: str, check_data: bool) -> None:
    content = (GOLDEN / name).read_bytes()
    with FileReader(str(GOLDEN / name), check_data) as reader:
        assert reader.n == MANIFEST["files"][name]["n"]
        assert reader.fnames == [str(GOLDEN / name)] and reader.check_data is check_data
        assert as_bytes(reader.read(range(reader.n))) == split(content)
        offsets, checksums = reader.get_offsets(0), reader.get_checksums(0)
        assert offsets.dtype == np.int64 and checksums.dtype == np.uint32
        assert len(offsets) == reader.n + 1 and len(checksums) == reader.n
        assert offsets[0] == 12 + 12 * reader.n and offsets[-1] == len(content)
        reader.validate()


def test_files_directories_and_lists(tmp_path: Path) -> None:
    parts = [GOLDEN / "multi" / f"PART_0000{k}.ffr" for k in (0, 1)]
    for given in (GOLDEN / "multi", str(GOLDEN / "multi"), parts, tuple(map(str, parts))):
        with FileReader(given) as reader:
            assert reader.fnames == [str(part) for part in parts]
            assert as_bytes(reader.read(range(12))) == MULTI
            assert reader.get_offsets(1)[-1] == parts[1].stat().st_size
            assert len(reader.get_checksums(1)) == 5
            for k in (-1, 2):
                with pytest.raises(IndexError):
                    reader.get_offsets(k)
    with FileReader(parts[::-1]) as reader:
        assert as_bytes(reader.read(range(12))) == MULTI[7:] + MULTI[:7]
    (tmp_path / "sub.ffr").mkdir()
    for wrong in (tmp_path / "none.ffr", tmp_path, [], tmp_path / "a.bin", [parts[0], "x.ffr"]):
        with pytest.raises(AssertionError):
            FileReader(wrong)
    with pytest.raises(FileNotFoundError):
        FileReader(tmp_path / "none.ffr")
    for wrong in (5, None, [5], b"a.ffr"):
        with pytest.raises(TypeError):
            FileReader(wrong)  # type: ignore[arg-type]


def test_every_kind_of_indices(plain: FileReader) -> None:
    wanted = [3, 0, 15, 3, 3]
    for given in (
        wanted,
        tuple(wanted),
        np.array(wanted),
        np.array(wanted, np.uint8),
        np.array(wanted, np.uint64)[::1],
        (i for i in wanted),
        [np.int32(i) for i in wanted],
    ):
        assert as_bytes(plain.read(given)) == [PLAIN[i] for i in wanted]
    assert as_bytes(plain.read(range(15, -1, -5))) == [PLAIN[i] for i in (15, 10, 5, 0)]
    assert sorted(as_bytes(plain.read({1, 2, 9}))) == sorted(PLAIN[i] for i in (1, 2, 9))
    assert plain.read([]) == [] == plain.read(np.array([], np.int64)) == plain.read(iter(()))


def test_arrays_are_the_callers_own(plain: FileReader) -> None:
    one, same = plain.read([5, 5])
    offsets = plain.get_offsets(0)
    for array in (one, same, plain.read_one(5)):
        assert array.dtype == np.uint8 and array.ndim == 1
        assert array.flags.writeable
    assert not np.shares_memory(one, same)
    one[:] = 0
    offsets[:] = 0
    assert same.tobytes() == PLAIN[5] == plain.read_one(5).tobytes()
    assert plain.get_offsets(0)[0] == 204
    plain.close()
    assert same.tobytes() == PLAIN[5]


@pytest.mark.parametrize(
    "index", [-1, 16, 17, -(2**63), 2**63, 2**70, np.int64(-3), np.uint64(2**63)]
)
def test_an_index_outside_raises_before_anything_is_read(plain: FileReader, index: Any) -> None:
    for kind in (SampleIndexError, IndexError, RuntimeError):
        with pytest.raises(kind):
            plain.read_one(index)
        with pytest.raises(kind):
            plain.read([0, index])
    with pytest.raises(SampleIndexError) as caught:
        plain.read([0, index])
    assert caught.value.index == index
    with pytest.raises(SampleIndexError):
        plain.read(np.array([index]))


@pytest.mark.parametrize("wrong", [1.0, "1", None, [1]])
def test_invalid_indices(plain: FileReader, wrong: Any) -> None:
    with pytest.raises(TypeError):
        plain.read_one(wrong)
    with pytest.raises(TypeError):
        plain.read([0, wrong])
    with pytest.raises(TypeError):
        plain.read(np.array([[1, 2]]))
    with pytest.raises(TypeError):
        plain.read(np.array([1.0]))


def test_more_than_4096_in_one_batch() -> None:
    with FileReader(GOLDEN / "wide.ffr") as reader:
        order = np.random.default_rng(0).permutation(np.repeat(np.arange(5000), 2))
        expected = (order.astype(np.uint64) * 2654435761 % 2**32).astype("<u4").tobytes()
        assert b"".join(as_bytes(reader.read(order))) == expected


@pytest.mark.parametrize("name", sorted(DAMAGED))
def test_damaged_fails_where_the_original_fails(name: str) -> None:
    facts = DAMAGED[name]["check"]
    if "exc" in facts["open"]:
        with pytest.raises(FormatError) as caught:
            FileReader(GOLDEN / "damaged" / name)
        assert caught.value.path == str(GOLDEN / "damaged" / name)
        return
    with FileReader(GOLDEN / "damaged" / name) as reader:
        assert reader.get_offsets(0).tolist() == facts["offsets_head"]
        for i in range(reader.n):
            if facts["read_one"][str(i)] == "ok":
                assert reader.read_one(i).tobytes() == PLAIN[i]
            else:
                for call in (lambda i=i: reader.read_one(i), lambda: reader.read(range(16))):
                    with pytest.raises(ChecksumError) as caught:
                        call()
                    assert (caught.value.index, caught.value.path) == (i, reader.fnames[0])
        assert as_bytes(reader.read([0, 3])) == [PLAIN[0], PLAIN[3]]
        reader.validate()


@pytest.mark.parametrize("name", sorted(DAMAGED))
def test_damaged_without_checks(name: str) -> None:
    facts = DAMAGED[name]["nocheck"]
    if name in ("zero_length.ffr", "n_plus_1.ffr"):  # the original runs out of memory here
        with pytest.raises(FormatError):
            FileReader(GOLDEN / "damaged" / name, check_data=False)
        return
    with FileReader(GOLDEN / "damaged" / name, check_data=False) as reader:
        assert reader.get_offsets(0).tolist() == facts["offsets_head"]
        for i, sample in enumerate(reader.read(range(reader.n))):
            expected = facts["read_one"]
            expected = "ok" if expected == "all ok" else expected[str(i)]
            if expected == "ok":
                assert sample.tobytes() == PLAIN[i]
            else:
                assert len(sample) == expected["len"]
                assert hashlib.sha256(sample.tobytes()).hexdigest() == expected["sha256"]
        if facts["validate"] is None:
            reader.validate()
        else:
            with pytest.raises(RuntimeError, match="CRC"):
                reader.validate()


def test_unfinished_is_refused_and_not_read_as_empty() -> None:
    for check_data in (True, False):
        with pytest.raises(FormatError, match="unfinished"):
            FileReader(GOLDEN / "unfinished.ffr", check_data)


@pytest.mark.parametrize("check_data", [True, False])
def test_a_cut_file_fails_only_where_it_is_cut(check_data: bool, tmp_path: Path) -> None:
    content = (GOLDEN / "plain.ffr").read_bytes()
    starts = np.cumsum([204] + [len(s) for s in PLAIN])
    (tmp_path / "a.ffr").write_bytes(content[: starts[10] + 7])
    with FileReader(tmp_path / "a.ffr", check_data) as reader:
        assert reader.n == 16
        assert as_bytes(reader.read(range(10))) == PLAIN[:10]
        for i in range(10, 16):
            with pytest.raises(TruncatedError) as caught:
                reader.read([0, i])
            assert caught.value.index == i and caught.value.path == reader.fnames[0]


def test_a_hostile_offset_allocates_nothing(tmp_path: Path) -> None:
    """Tables in order, but one sample is said to be 2^62 bytes long."""
    import struct
    import zlib

    body = struct.pack("<q2I2q", 2, 0, 0, 36, 2**62)
    (tmp_path / "a.ffr").write_bytes(struct.pack("<I", zlib.crc32(body)) + body + b"abc")
    with FileReader(tmp_path / "a.ffr") as reader, pytest.raises(FFServeError):
        reader.read_one(0)


def test_every_bit_flip_of_a_small_file_is_an_error(tmp_path: Path) -> None:
    content = (GOLDEN / "one.ffr").read_bytes()
    path = tmp_path / "a.ffr"
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.unlink(missing_ok=True)
        path.write_bytes(damaged)
        with pytest.raises(FormatError):  # noqa: SIM117
            with FileReader(path) as reader:
                reader.read_one(0)


def test_after_close_reads_raise_and_attributes_stay(plain: FileReader) -> None:
    plain.close()
    plain.close()
    assert plain.n == 16 and plain.check_data and len(plain.fnames) == 1
    for call in (lambda: plain.read([0]), lambda: plain.read_one(0), lambda: plain.validate()):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert "closed" in repr(plain)
    for name in ("n", "fnames", "check_data"):
        with pytest.raises(AttributeError):
            setattr(plain, name, 1)


def test_descriptors_and_maps_are_freed() -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    with FileReader(GOLDEN / "multi") as reader:
        reader.read([0, 9])
    before = held()
    for _ in range(20):
        with FileReader(GOLDEN / "multi") as reader:
            reader.read([0, 9])
        with pytest.raises(FormatError):
            FileReader([GOLDEN / "plain.ffr", GOLDEN / "unfinished.ffr"])
    assert held() <= before


def test_twenty_readers_at_once() -> None:
    """The original fails at 16: each takes 4096 of the machine's asynchronous I/O slots."""
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(FileReader(GOLDEN / "plain.ffr")) for _ in range(20)]
        for reader in readers:
            assert as_bytes(reader.read([1, 2, 3, 4])) == PLAIN[1:5]


def test_pickle_and_copy_open_again(plain: FileReader) -> None:
    plain.read([0, 1, 2, 3])
    for other in (pickle.loads(pickle.dumps(plain)), copy.copy(plain), copy.deepcopy(plain)):
        with other:
            assert (other.fnames, other.check_data) == (plain.fnames, plain.check_data)
            assert as_bytes(other.read(range(16))) == PLAIN
    assert plain.read_one(0).tobytes() == PLAIN[0]
    with FileReader(GOLDEN / "plain.ffr", check_data=False) as unchecked:
        assert pickle.loads(pickle.dumps(unchecked)).check_data is False


def _read_elsewhere(reader: FileReader, answers: Any) -> None:
    answers.put(as_bytes(reader.read(range(15, -1, -1))))


@pytest.mark.check
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_another_process_reads_though_the_parent_read_before(
    plain: FileReader, method: str
) -> None:
    plain.read(range(16))
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    children = [context.Process(target=_read_elsewhere, args=(plain, answers)) for _ in range(2)]
    for child in children:
        child.start()
    assert [answers.get() for _ in children] == [PLAIN[::-1]] * 2
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert as_bytes(plain.read(range(16))) == PLAIN


def test_threads_share_a_reader(plain: FileReader) -> None:
    wrong: list[BaseException] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(100):
                order = rng.integers(0, 16, 20)
                assert as_bytes(plain.read(order)) == [PLAIN[i] for i in order]
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_written_by_threads_and_read_back(tmp_path: Path) -> None:
    payloads = [os.urandom(i * 31 % 5000) for i in range(300)]
    with FileWriter(tmp_path / "a.ffr") as writer:
        for payload in payloads:
            writer.write_one(payload)
        assert writer.n is None and writer.count == 300
    assert writer.n == 300
    for name in ("n", "count"):
        with pytest.raises(AttributeError):
            setattr(writer, name, 1)
    with FileReader(tmp_path / "a.ffr") as reader:
        assert as_bytes(reader.read(range(300))) == payloads


@pytest.mark.parametrize("sizes", [[4000], [0], [0, 70, 4000], [20_000]])
def test_a_sample_that_was_kept_held_its_whole_batch(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setenv("FFSERVE_SOCKET", daemon.socket)
    payloads = [os.urandom(sizes[k % len(sizes)]) for k in range(400)]
    with FileWriter(tmp_path / "a.ffr", len(payloads)) as writer:
        for payload in payloads:
            writer.write_one(payload)
    with FileReader(tmp_path / "a.ffr") as reader:
        reader.read(range(len(payloads)))
        indices = np.random.default_rng(1).integers(0, len(payloads), 64).tolist()
        arrays = reader.read(indices)
        assert as_bytes(arrays) == [payloads[k] for k in indices]
        assert all(array.flags.writeable and array.ndim == 1 for array in arrays)
        assert all(array.base is None and array.flags.owndata for array in arrays)
        for array in arrays[1:]:
            array[:] = 0
        assert bytes(arrays[0]) == payloads[indices[0]]
        assert reader.read([]) == []


def test_errors_of_a_worker_reach_the_caller_with_all_attributes() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: FileReader("missing.ffr"),
        lambda: FileReader(5),  # type: ignore[arg-type]
        lambda: FileWriter("a.bin", 1),
        lambda: FileReader(GOLDEN / "unfinished.ffr"),
    ]
    for call in calls:
        with pytest.raises(FFServeError) as caught:
            call()
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is type(caught.value) and str(again) == str(caught.value)
        assert again.path == caught.value.path
