"""Writers: the same bytes as the original, and never half a file under its name."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ffrecord_files import split
from hypothesis import given, settings
from hypothesis import strategies as st

from ffserve import writer as writer_module
from ffserve.compat.ffrecord import FileNameError, FileTypeError, FileWriter
from ffserve.disk.output import staged_directory, temporary_name
from ffserve.errors import FFServeError, ReadError, UsageError
from ffserve.writer import create, flat

GOLDEN = Path(__file__).parents[1] / "golden" / "ffrecord"
GOLDEN_NAMES = sorted(
    str(path.relative_to(GOLDEN))
    for path in [*GOLDEN.glob("*.ffr"), *GOLDEN.glob("multi/*.ffr")]
    if path.name != "unfinished.ffr"
)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_is_written_byte_for_byte(name: str, known: bool, tmp_path: Path) -> None:
    content = (GOLDEN / name).read_bytes()
    payloads = split(content)
    with create(tmp_path / "a.ffr", n=len(payloads) if known else None) as writer:
        for payload in payloads:
            writer.write(payload)
        assert writer.count == len(payloads)
    with FileWriter(tmp_path / "b.ffr", len(payloads) if known else None) as dropin:
        for payload in payloads:
            dropin.write_one(bytearray(payload))
    assert dropin.n == dropin.count == len(payloads)
    assert (tmp_path / "a.ffr").read_bytes() == content
    assert (tmp_path / "b.ffr").read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["a.ffr", "b.ffr"]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kernel_copies", [True, False])
def test_large_samples_go_through_every_path(
    known: bool, kernel_copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel_copies:  # as on file systems that answer EXDEV or ENOSYS

        def refuse(*_: Any) -> int:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "copy_file_range", refuse)
    rng = np.random.default_rng(1)
    sizes = [*rng.integers(0, 600_000, 30).tolist(), 0, writer_module.BUFFER_SIZE + 1, 7]
    payloads = [rng.bytes(size) for size in sizes]
    assert sum(sizes) > writer_module._MOVE_SIZE
    with create(tmp_path / "a.ffr", n=len(payloads) if known else None) as writer:
        for payload in payloads:
            writer.write(payload)
    assert split((tmp_path / "a.ffr").read_bytes()) == payloads


def test_a_file_without_n_needed_its_size_twice(tmp_path: Path) -> None:
    used: list[int] = []
    writer = create(tmp_path / "a.ffr")
    for _ in range(10):
        writer.write(bytes(4 << 20))
    files = writer._files

    def measure(event: str, _: tuple[object, ...]) -> None:
        if event == "os.truncate" and not done.is_set():  # what was copied is about to be freed
            used.append(sum(os.fstat(fd).st_blocks * 512 for fd in (files.fd, files.spool())))

    done = threading.Event()
    sys.addaudithook(measure)
    try:
        writer.close()
    finally:
        done.set()
    assert len(used) == 5 and max(used) < 49 << 20
    assert (tmp_path / "a.ffr").stat().st_size == 12 + 120 + (40 << 20)


BUFFERS: list[tuple[str, Any, bytes]] = [
    ("bytes", b"abc", b"abc"),
    ("bytearray", bytearray(b"abc"), b"abc"),
    ("float32", np.arange(5, dtype=np.float32), np.arange(5, dtype=np.float32).tobytes()),
    ("two dimensions", np.arange(6, dtype=np.int64).reshape(2, 3), np.arange(6).tobytes()),
    ("scalar array", np.array(2.5), np.array(2.5).tobytes()),
    ("big-endian", np.arange(4, dtype=">i4"), np.arange(4, dtype=">i4").tobytes()),
    ("every second", np.arange(8, dtype=np.uint8)[::2], bytes([0, 2, 4, 6])),
    ("backwards", memoryview(b"abc")[::-1], b"cba"),
    ("Fortran", np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6).tobytes()),
    ("structure", np.zeros(3, [("a", "u1"), ("b", ">u4")]), bytes(15)),
    ("no rows", np.zeros((0, 3)), b""),
    ("ctypes", (ctypes.c_uint16 * 2)(1, 2), bytes([1, 0, 2, 0])),
]


@pytest.mark.parametrize(
    ("given_", "expected"), [b[1:] for b in BUFFERS], ids=[b[0] for b in BUFFERS]
)
def test_any_buffer_is_written_whole(given_: Any, expected: bytes, tmp_path: Path) -> None:
    with create(tmp_path / "a.ffr") as writer:
        writer.write(given_)
    assert split((tmp_path / "a.ffr").read_bytes()) == [expected]


@pytest.mark.parametrize("wrong", ["text", 5, None, [1, 2], np.array([object()])])
def test_what_is_no_buffer_is_refused_and_writing_goes_on(wrong: Any, tmp_path: Path) -> None:
    with create(tmp_path / "a.ffr", n=1) as writer:
        for kind in (UsageError, TypeError, ValueError, RuntimeError):
            with pytest.raises(kind, match="a sample cannot be"):
                writer.write(wrong)
        writer.write(b"good")
    assert split((tmp_path / "a.ffr").read_bytes()) == [b"good"]


def test_more_than_n_raises_and_fewer_may_go_on(tmp_path: Path) -> None:
    for make in (
        lambda: create(tmp_path / "a.ffr", n=2),
        lambda: FileWriter(tmp_path / "a.ffr", 2),
    ):
        writer: Any = make()
        write = getattr(writer, "write_one", None) or writer.write
        write(b"1")
        with pytest.raises(UsageError, match="1 of n=2 samples were written"):
            writer.close()
        assert not (tmp_path / "a.ffr").exists()
        write(b"2")
        with pytest.raises(RuntimeError, match="more than n=2 samples"):
            write(b"3")
        writer.close()
        writer.close()
        with pytest.raises(UsageError, match="closed"):
            write(b"4")
        assert split((tmp_path / "a.ffr").read_bytes()) == [b"1", b"2"]
        (tmp_path / "a.ffr").unlink()
    assert os.listdir(tmp_path) == []


def test_an_exception_inside_with_goes_through_and_leaves_nothing(tmp_path: Path) -> None:
    for make in (create, FileWriter):
        with pytest.raises(KeyError, match="the user's"), make(tmp_path / "a.ffr") as writer:
            getattr(writer, "write_one", None) or writer.write(b"1")  # type: ignore[union-attr]
            raise KeyError("the user's")
        assert os.listdir(tmp_path) == []
    with pytest.raises(UsageError), create(tmp_path / "a.ffr", n=3) as short:
        short.write(b"1")
    assert os.listdir(tmp_path) == []


NAMELESS = [True, False]
"""Whether the file system can make files without a name."""


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files with names only. O_DIRECTORY in O_TMPFILE's place fails as on a file system that
    cannot make others (EISDIR)."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)


@pytest.mark.parametrize("nameless", NAMELESS)
def test_until_close_the_old_file_stays(
    nameless: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not nameless:
        request.getfixturevalue("named")
    path = tmp_path / "a.ffr"
    path.write_bytes(b"old")
    path.chmod(0o640)
    (tmp_path / "link.ffr").symlink_to("a.ffr")
    writer = create(tmp_path / "link.ffr", n=1)
    writer.write(b"new")
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.glob("*.ffr"))) == 2
    assert len(os.listdir(tmp_path)) == (2 if nameless else 3)
    writer.close()
    assert split(path.read_bytes()) == [b"new"]
    assert (tmp_path / "link.ffr").is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    aborted = create(path)
    aborted.write(b"newer")
    aborted.abort()
    aborted.close()
    assert split(path.read_bytes()) == [b"new"] and len(os.listdir(tmp_path)) == 2


def test_a_dropped_writer(tmp_path: Path) -> None:
    writer = create(tmp_path / "a.ffr")
    writer.write(b"1")
    del writer
    assert os.listdir(tmp_path) == []
    dropin = FileWriter(tmp_path / "b.ffr", 2)
    dropin.write_one(b"1")
    with pytest.warns(ResourceWarning, match="dropped before close"):
        del dropin
    assert os.listdir(tmp_path) == []
    complete = FileWriter(tmp_path / "c.ffr", 1)
    complete.write_one(b"1")
    del complete
    assert split((tmp_path / "c.ffr").read_bytes()) == [b"1"]


def test_names_and_options_that_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        FileWriter(tmp_path / "a.bin", 1)
    with pytest.raises(FileNameError, match=r"\.ffr"):
        FileWriter(str(tmp_path / "ffr"), 1)
    with pytest.raises(FileTypeError):
        FileWriter(5, 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="suffix"):
        create(tmp_path / "a.bin")
    with pytest.raises(UsageError, match="unknown format"):
        create(tmp_path / "a.ffr", format="zip")
    for n in (-1, 1.5, "3"):
        with pytest.raises(UsageError, match="number of samples"):
            create(tmp_path / "a.ffr", n=n)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="compression"):
        create(tmp_path / "a.ffr", compression="gzip")
    with pytest.raises(ReadError, match="No such file"):
        create(tmp_path / "missing" / "a.ffr")
    (tmp_path / "dir.ffr").mkdir()
    with pytest.raises(UsageError, match="not a regular file"):
        create(tmp_path / "dir.ffr")
    with pytest.raises(UsageError, match="pickle"), create(tmp_path / "a.ffr") as writer:
        pickle.dumps(writer)
    assert os.listdir(tmp_path) == ["dir.ffr"]


def test_a_name_of_full_length(tmp_path: Path) -> None:
    path = tmp_path / ("数" * 83 + "12.ffr")
    with create(path) as writer:
        writer.write(b"1")
    assert split(path.read_bytes()) == [b"1"]
    assert len(os.fsencode(os.path.basename(temporary_name(str(path))))) <= 255


def test_pieces_make_one_sample(tmp_path: Path) -> None:
    with create(tmp_path / "a.ffr") as writer:
        writer.write_pieces([b"one ", bytearray(b"two "), np.array([51], np.uint8)])
        writer.write_pieces(iter(()))
    assert split((tmp_path / "a.ffr").read_bytes()) == [b"one two 3", b""]


def test_an_error_in_the_middle_of_a_sample_gives_the_file_up(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise KeyError("source")

    writer = create(tmp_path / "a.ffr")
    with pytest.raises(KeyError, match="source"):
        writer.write_pieces(pieces())
    for call in (writer.close, lambda: writer.write(b"x")):
        with pytest.raises(ReadError, match="KeyError in the middle"):
            call()
    assert os.listdir(tmp_path) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=20), st.booleans(), st.integers(1, 64))
def test_written_is_what_was_given(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], known: bool, gather: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.ffr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "BUFFER_SIZE", gather)
        with create(path, n=len(payloads) if known else None) as writer:
            for payload in payloads:
                writer.write(payload)
    assert split(path.read_bytes()) == payloads


def test_threads_lose_nothing(tmp_path: Path) -> None:
    with create(tmp_path / "a.ffr") as writer:

        def write(k: int) -> None:
            for i in range(500):
                writer.write(f"{k} {i} ".encode() * 20)

        threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = split((tmp_path / "a.ffr").read_bytes())
    assert sorted(found) == sorted(f"{k} {i} ".encode() * 20 for k in range(4) for i in range(500))
    for k in range(4):
        own = [s for s in found if s.startswith(f"{k} ".encode())]
        assert own == [f"{k} {i} ".encode() * 20 for i in range(500)]


def _in_child(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_forked_copy_neither_finishes_nor_removes(named: None, tmp_path: Path) -> None:
    writer = create(tmp_path / "a.ffr", n=2)
    writer.write(b"parent")

    def child() -> None:
        with pytest.raises(UsageError, match="forked"):
            writer.write(b"child")
        writer.close()
        writer.abort()
        writer.__exit__(None, None, None)
        writer._dropped()

    writer._lock.acquire()  # as if another thread were writing at the moment of the fork
    _in_child(child)
    writer._lock.release()
    assert len(os.listdir(tmp_path)) == 1
    writer.write(b"more")
    writer.close()
    assert split((tmp_path / "a.ffr").read_bytes()) == [b"parent", b"more"]


@pytest.mark.check
@pytest.mark.parametrize("moment", ["writing", "closing"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("nameless", NAMELESS)
def test_sigkill_leaves_nothing_or_a_temporary_file_until_the_next_writer(
    moment: str, known: bool, nameless: bool, named: None, tmp_path: Path
) -> None:
    path = tmp_path / "a.ffr"
    code = f"""
        import os, time
        if not {nameless}:
            os.O_TMPFILE = os.O_DIRECTORY
        from ffserve.writer import create
        n = 6 if {known} else None
        writer = create({str(path)!r}, n=n)
        for i in range(6):
            writer.write(bytes(3 << 20))
        if {moment!r} == "closing":
            def stop(fd):
                print("now", flush=True)
                time.sleep(60)
            os.fsync = stop
            writer.close()
        print("now", flush=True)
        time.sleep(60)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"now\n"
    left = os.listdir(tmp_path)
    create(path).abort()
    assert os.listdir(tmp_path) == left, "a writer that lives is left alone"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(left) == (0 if nameless else 1)
    assert all(name.startswith(".a.ffr.") and name.endswith(".tmp") for name in left)
    others = [".a.ffr.kept.tmp", ".b.ffr.0123456789ab.tmp"]
    for name in others:
        (tmp_path / name).touch()
    with create(path) as writer:
        writer.write(b"whole")
    assert sorted(os.listdir(tmp_path)) == [*others, "a.ffr"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mount)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [100_000, 5 << 20])
def test_a_full_disk_is_named_and_nothing_stays(known: bool, size: int, small_disk: Path) -> None:
    path = small_disk / "a.ffr"
    with pytest.raises(ReadError, match="No space left") as caught:  # noqa: SIM117
        with create(path, n=50 if known else None) as writer:
            for _ in range(50):
                writer.write(bytes(size))
    assert caught.value.path == str(path) and "free space" in str(caught.value)
    assert isinstance(caught.value, OSError) and isinstance(
        pickle.loads(pickle.dumps(caught.value)), ReadError
    )
    assert os.listdir(small_disk) == []
    with create(path) as writer:
        writer.write(bytes(100_000))
    assert path.stat().st_size == 100_024


def test_a_failed_write_is_told_again_by_close(small_disk: Path) -> None:
    writer = create(small_disk / "a.ffr", n=1)
    for _ in range(3):
        with pytest.raises(ReadError, match="No space left"):
            writer.write(bytes(5 << 20))
    with pytest.raises(ReadError, match="No space left"):
        writer.close()
    writer.abort()


def _over_the_limit(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with pytest.raises(ReadError, match="ulimit") as caught, create(path, n=1) as writer:
        writer.write(bytes(5 << 20))
    assert caught.value.path == path


def test_a_limit_on_file_size_is_named(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_over_the_limit, args=(str(tmp_path / "a.ffr"),)
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_a_directory_one_may_not_write_is_a_permission_error() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)

        def child() -> None:
            os.setuid(65534)
            with pytest.raises(PermissionError):
                create(os.path.join(directory, "a.ffr"))

        _in_child(child)


def test_flat_copies_only_what_it_must() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    view = flat(array)
    array[0, 0] = 77
    assert view[0] == 77 and view.nbytes == len(view) == 24


def test_a_staged_directory_whose_writer_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged_directory(out) as living:
        shutil.copytree(living, killed := temporary_name(str(out)))
        (Path(killed) / "PART_00000.ffr").touch()
        with pytest.raises(KeyError), staged_directory(out):
            assert not os.path.exists(killed)
            raise KeyError
        assert os.path.isdir(living)
    assert os.listdir(tmp_path) == ["out"]


def test_staged_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with pytest.raises(KeyError), staged_directory(out) as staging:
        Path(staging, "x.ffr").write_bytes(b"1")
        raise KeyError
    assert not out.exists() and os.listdir(tmp_path / "a") == []
    with staged_directory(out) as staging:
        Path(staging, "x.ffr").write_bytes(b"1")
        assert not out.exists()
    assert os.listdir(out) == ["x.ffr"]
    with pytest.raises(UsageError, match="not empty"), staged_directory(out):
        pass
    with staged_directory(out, replace=True) as staging:
        Path(staging, "x.ffr").write_bytes(b"2")
        Path(staging, "y.ffr").write_bytes(b"3")
        assert (out / "x.ffr").read_bytes() == b"1"
    assert sorted(os.listdir(out)) == ["x.ffr", "y.ffr"] and (out / "x.ffr").read_bytes() == b"2"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="not a directory"), staged_directory(tmp_path / "file"):
        pass


def test_small_samples_are_written_together(tmp_path: Path) -> None:
    def writes() -> int:
        (line,) = re.findall(r"syscw: (\d+)", Path("/proc/self/io").read_text())
        return int(line)

    before = writes()
    with create(tmp_path / "a.ffr") as writer:
        for _ in range(200_000):
            writer.write(b"0123456789abcdef")
    assert writes() - before < 1000
    assert issubclass(UsageError, FFServeError)


@pytest.mark.parametrize("name", ["a.ffr", "a.tfrecord", "a.tfrecord.gz"])
def test_batches_make_the_same_file_as_single_samples(tmp_path: Path, name: str) -> None:
    samples = [bytes([k]) * (k % 7) for k in range(50)] + [bytes(5 << 20), b"", b"x"]
    one, other = tmp_path / name, tmp_path / f"2{name}"
    with create(one) as writer:
        for sample in samples:
            writer.write(sample)
    with create(other, n=len(samples)) as writer:
        for part in (samples[:20], [], samples[20:52], samples[52:]):
            edges = np.cumsum([0, *map(len, part)])
            writer.write_batch(np.frombuffer(b"".join(part), np.uint8), edges)
        with pytest.raises(UsageError, match="more than n="):
            writer.write_batch(np.zeros(1, np.uint8), np.array([0, 1]))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("edges", [[], [0], [0, 4], [1, 3], [0, 2, 1, 3], [0, -1, 3]])
def test_offsets_that_do_not_fit_their_payloads(tmp_path: Path, edges: list[int]) -> None:
    with create(tmp_path / "a.tfrecord") as writer:
        with pytest.raises(UsageError, match="rise from 0"):
            writer.write_batch(np.zeros(3, np.uint8), np.array(edges, np.int64))
        writer.write(b"still usable")
    assert (tmp_path / "a.tfrecord").stat().st_size == 28
