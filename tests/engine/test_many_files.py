"""System calls on many files in one call, compared with those of Python on each."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from ffserve.engine import many_files
from ffserve.engine.io import Engine, open_direct, open_direct_all
from ffserve.errors import FFServeError


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = [tmp_path / f"{k}" for k in range(20)]
    for k, path in enumerate(found):
        path.write_bytes(b"%d" % k * 1000)
    return [str(path) for path in found]


def descriptors(paths: list[str]) -> many_files.Int32s:
    fds, error = many_files.open_paths(paths, os.O_RDONLY | os.O_CLOEXEC)
    assert error is None and len(fds) == len(paths)
    return fds


def as_python(row: np.void) -> tuple[int, ...]:
    return tuple(int(row[name]) for name in row.dtype.names)


def expected(s: os.stat_result) -> tuple[int, ...]:
    times = s.st_mtime_ns, s.st_ctime_ns
    return s.st_dev, s.st_ino, s.st_size, *times, s.st_mode, s.st_uid


def test_states(paths: list[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(paths[3])
    names = [*map(os.path.basename, paths), "link"]
    truth = [expected(os.stat(path)) for path in paths]
    fds, directory = descriptors(paths), os.open(tmp_path, os.O_PATH)
    try:
        states, error = many_files.stat_paths([*paths, str(tmp_path / "link")])
        assert error is None and [as_python(row) for row in states] == [*truth, truth[3]]
        states, error = many_files.stat_fds(fds)
        assert error is None and [as_python(row) for row in states] == truth
        states, error = many_files.stat_names(directory, names)
        assert error is None and [as_python(row) for row in states[:-1]] == truth
        assert states[-1]["mode"] & many_files.KIND_BITS == stat.S_IFLNK
    finally:
        many_files.close_fds(fds)
        os.close(directory)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(int(fds[0]))


@pytest.mark.parametrize("gone", [0, 7, 19])
def test_what_was_done_before_an_error(gone: int, paths: list[str]) -> None:
    os.unlink(paths[gone])
    states, error = many_files.stat_paths(paths)
    assert len(states) == gone and error is not None and error.errno == errno.ENOENT
    fds, error = many_files.open_paths(paths, os.O_RDONLY | os.O_CLOEXEC)
    assert len(fds) == gone and error is not None and error.errno == errno.ENOENT
    again, error = many_files.open_again(np.append(fds, np.int32(-1)), os.O_RDONLY)
    assert len(again) == gone and error is not None
    many_files.close_fds(fds)
    many_files.close_fds(again)
    for call in (many_files.stat_fds, many_files.flags_and_types):
        assert call(np.array([-1], np.int32))[-1].errno == errno.EBADF  # type: ignore[union-attr]


def test_names_that_no_file_can_have(paths: list[str]) -> None:
    with pytest.raises(ValueError):
        many_files.stat_paths([paths[0], "a\0b"])
    with pytest.raises(ValueError):
        many_files.open_paths(["a\0b"], os.O_RDONLY)


def test_flags(paths: list[str]) -> None:
    fds, _ = many_files.open_paths(paths, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags, types, error = many_files.flags_and_types(fds)
        assert error is None and (flags & os.O_NONBLOCK).all() and len(set(types.tolist())) == 1
        many_files.clear_flags(fds, os.O_NONBLOCK)
        assert not (many_files.flags_and_types(fds)[0] & os.O_NONBLOCK).any()
        assert not many_files.have_acls(fds).any()
    finally:
        many_files.close_fds(fds)


@pytest.mark.parametrize("most", [1, 999, 1000, 5000])
def test_heads(most: int, paths: list[str]) -> None:
    """A file that has become shorter has fewer bytes than its size says."""
    fds = descriptors(paths)
    try:
        sizes = np.array([os.path.getsize(path) for path in paths], np.int64)
        os.truncate(paths[5], 3)
        heads, got, error = many_files.read_pieces(fds, sizes, most)
        assert error is None
        for k, path in enumerate(paths):
            content = Path(path).read_bytes()[:most]
            assert heads[k, : got[k]].tobytes() == content and got[k] == len(content)
        begins = np.maximum(sizes - 7, 0)
        tails, got, error = many_files.read_pieces(fds, sizes, most, begins)
        assert error is None
        for k, path in enumerate(paths):
            content = Path(path).read_bytes()[begins[k] :][:most]
            assert tails[k, : got[k]].tobytes() == content
        os.truncate(paths[5], 2000)
        closed = np.append(fds[:5], np.int32(-1))
        _, got, error = many_files.read_pieces(closed, sizes, most)
        assert len(got) == 5 and error is not None and error.errno == errno.EBADF
    finally:
        many_files.close_fds(fds)


def test_direct_io_of_many_files_is_that_of_each(paths: list[str]) -> None:
    """Files in memory among them, for which it is of no use."""
    fds = descriptors(paths)
    in_memory = os.memfd_create("test")
    given = np.insert(fds, 7, in_memory).astype(np.int32)
    opened, alignments = open_direct_all(given)
    try:
        rows = zip(given.tolist(), opened.tolist(), alignments.tolist(), strict=True)
        for fd, one, alignment in rows:
            alone, right = open_direct(fd)
            flags = [
                many_files.flags_and_types(np.array([f], np.int32))[0][0] for f in (one, alone)
            ]
            assert flags[0] == flags[1] and alignment == right
            assert os.path.sameopenfile(one, fd) or os.fstat(one).st_ino == os.fstat(fd).st_ino
            os.close(alone)
    finally:
        many_files.close_fds(opened)
        many_files.close_fds(given)
    count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        open_direct_all(np.array([1 << 20], np.int32))
    assert len(os.listdir("/proc/self/fd")) <= count


def test_numbers_of_files_in_an_engine_are_used_again(paths: list[str]) -> None:
    fds = descriptors(paths)
    try:
        with Engine("threads", depth=1) as engine:
            ones = np.ones(len(fds), np.int64)
            assert engine.add_files(fds, ones).tolist() == list(range(20))
            for file in (3, 11, 7):
                engine.remove_file(file)
            some = np.array([fds[0], -1, fds[1], fds[2], fds[3]], np.int32)
            assert engine.add_files(some, ones[:5]).tolist() == [3, -1, 7, 11, 20]
            assert engine.add_file(int(fds[0]), 1) == 21
            with pytest.raises(FFServeError, match="cannot add the files"):
                engine.add_files(fds, 3 * ones)
            assert engine.add_file(int(fds[0]), 1) == 22
    finally:
        many_files.close_fds(fds)
