"""Files of every format through one daemon: the same promises for all, in one arena."""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon, damage, run_python, sample, serving, write

import ffserve
from ffserve.errors import ChecksumError, FFServeError, FormatError, TruncatedError

NAMES = ["a.ffr", "a.tfrecord"]
SAMPLES = [sample(i) for i in range(100)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One for all tests of this file."""
    with serving() as running:
        yield running


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file of each format."""
    return write(tmp_path / request.param, SAMPLES)


def same(found: list[object]) -> bool:
    return [bytes(each) for each in found] == SAMPLES  # type: ignore[call-overload]


def test_served_read_twice_and_leased(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as reader:
        assert reader.source.startswith("daemon") and same(reader.read(range(100)))
        read = daemon.cache()["blocks_read"]
        assert same(list(reader)) and daemon.cache()["blocks_read"] == read
        with reader.lease(range(100)) as views:
            assert same(views)
        batch = reader.read_batch([7, 3, 3])
        assert [bytes(each) for each in batch] == [SAMPLES[7], SAMPLES[3], SAMPLES[3]]
        assert reader.shards[0].format == {"ffr": "ffrecord"}.get(path[-3:], "tfrecord")


def test_same_without_a_daemon(path: str) -> None:
    with ffserve.open(path, server="off") as reader:
        assert same(list(reader)) and same(reader.read(range(100)))
        assert reader.sizes().tolist() == [len(each) for each in SAMPLES]


@pytest.mark.parametrize("verify", [True, False])
def test_damaged_sample_fails_alone_and_only_when_checked(
    daemon: Daemon, path: str, verify: bool
) -> None:
    damage(path, 13)
    for server in (daemon.socket, "off"):
        with ffserve.open(path, server=server, verify=verify) as reader:
            found = reader.read(range(100), errors="return")
        wrong = [k for k, each in enumerate(found) if isinstance(each, FFServeError)]
        assert wrong == ([13] if verify else [])
        if verify:
            error = found[13]
            assert isinstance(error, ChecksumError) and (error.path, error.index) == (path, 13)
        else:
            assert bytes(found[13]) != SAMPLES[13]  # type: ignore[arg-type]


def test_skip_leaves_out_the_damaged_one(daemon: Daemon, path: str) -> None:
    damage(path, 13)
    for server in (daemon.socket, "off"):
        with ffserve.open(path, server=server, on_error="skip") as reader:
            assert [bytes(each) for each in reader] == SAMPLES[:13] + SAMPLES[14:]
            assert [error.index for error in reader.damaged] == [13]


@pytest.mark.parametrize("last", [(1 << 62) + 1, (1 << 63) - 4096, (1 << 63) - 1])
def test_an_offset_that_no_file_can_have_is_refused_when_it_is_opened(
    daemon: Daemon, tmp_path: Path, last: int
) -> None:
    tables = struct.pack("<q4I4q", 4, zlib.crc32(b"abc"), 0, 0, 0, 60, 63, last, last)
    path = tmp_path / "lie.ffr"
    path.write_bytes(struct.pack("<I", zlib.crc32(tables)) + tables + b"abc")
    for server in (daemon.socket, "off"):
        with pytest.raises(FormatError, match=f"record 2 begins at byte {last}"):
            ffserve.open(path, server=server)


def test_replaced_file_new_session_new_bytes(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as before:
        write(path, SAMPLES[::-1])
        with daemon.open(path) as after:
            assert [bytes(each) for each in after] == SAMPLES[::-1]
        assert same(before.read(range(100)))


def test_bytes_are_those_of_the_file_whoever_reads_it(daemon: Daemon, path: str) -> None:
    with daemon.open(path) as served, ffserve.open(path, server="off") as local:
        for ours, theirs in zip(served.tables(0), local.tables(0), strict=True):
            assert ours.tolist() == theirs.tolist()
        assert served.shards[0].fingerprint == local.shards[0].fingerprint


@pytest.mark.check
def test_processes_of_different_formats_share_one_arena(tmp_path: Path) -> None:
    program = """
import sys, ffserve
with ffserve.open(sys.argv[1:-1], server=sys.argv[-1]) as reader:
    for _ in range(2):
        print(sum(sample.sum(dtype="u8") for sample in reader))
"""
    paths = [write(tmp_path / name, SAMPLES) for name in (*NAMES, "a.recordio")]
    expected = f"{sum(sum(each) for each in SAMPLES)}\n" * 2
    with serving() as daemon:
        for path in paths:
            assert run_python(program, path, daemon.socket).stdout == expected
        first = daemon.cache()
        assert 0 < first["blocks_read"] <= len(paths) * len(SAMPLES)
        both = run_python(program, *paths, daemon.socket).stdout
        assert int(both.split()[0]) == len(paths) * int(expected.split()[0])
        assert daemon.cache()["blocks_read"] == first["blocks_read"]


def test_damaged_framing_is_refused_by_both(daemon: Daemon, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", SAMPLES)
    with open(path, "r+b") as file:
        file.seek(12 + len(SAMPLES[0]) + 4)
        file.write(b"\xff")
    for server in (daemon.socket, "off"):
        with pytest.raises(ChecksumError, match="length of record 1;") as caught:
            ffserve.open(path, server=server)
        assert (caught.value.path, caught.value.offset) == (path, 16 + len(SAMPLES[0]))
    assert os.listdir(tmp_path) == ["a.tfrecord"]


@pytest.mark.parametrize("which", ["header", "tail"])
def test_skip_goes_on_behind_damaged_framing(daemon: Daemon, tmp_path: Path, which: str) -> None:
    path = write(tmp_path / "a.tfrecord", SAMPLES)
    place = 3 * 16 + sum(map(len, SAMPLES[:3]))
    with open(path, "r+b") as file:
        if which == "tail":
            file.truncate(place + 5)
        else:
            file.seek(place)
            file.write(b"\xff")
    for server in (daemon.socket, "off"):
        with ffserve.open([path, path], server=server, on_error="skip") as reader:
            intact = SAMPLES[:3] + (SAMPLES[4:] if which == "header" else [])
            assert [bytes(each) for each in reader] == 2 * intact and len(reader) == 2 * len(intact)
            assert [error.index for error in reader.damaged] == [3, len(intact) + 4]
            assert [error.offset for error in reader.damaged] == [place, place]
            assert all(error.path == path for error in reader.damaged)
            kind = TruncatedError if which == "tail" else ChecksumError
            assert all(isinstance(error, kind) for error in reader.damaged)
            copy = pickle.loads(pickle.dumps(reader))
            assert bytes(copy[len(intact)]) == SAMPLES[0]
            copy.close()
