"""Views of record files, mounted for real: what programs see, and how views begin and end."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ENVIRONMENT, error_of, run, spawned, text_of
from daemon import DEADLINE_S, Daemon, damage, run_python, sample, until, write
from origins import http_origin
from own_daemons import own_daemons
from view import Mounted, clear, mounted, needs_fuse

from ffserve.view import mounting

NOBODY = 65534
COUNT = 10_003
BAD = 3
"""The damaged sample of bad.ffr and of bad.rio."""
NAMES = {
    b"one.txt": b"1",
    b"empty": b"",
    b"cats/tom.jpg": sample(6),
    b"cats/line\nfeed": b"2",
    b"cats/" + b"n" * 255: b"3",
    b"cats/deep/er/not utf-8 \xff": b"4",
    b"large": sample(0, sizes=(3 << 20,)),
}
SAMPLES = [sample(k) for k in range(14)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record files of every kind."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in NAMES.items():
        path = os.path.join(os.fsencode(folder), b"photos", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
    (folder / "photos" / "nothing").mkdir()
    run("pack", folder / "photos", "-o", folder / "photos.ffr")
    write(folder / "many.tfrecord", [b"%d" % k for k in range(COUNT)])
    write(folder / "bad.ffr", SAMPLES)
    damage(folder / "bad.ffr", BAD)
    write(folder / "bad.rio", SAMPLES)
    with open(folder / "bad.rio", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    write(folder / "good.rio", SAMPLES)
    return folder


@pytest.fixture(scope="module")
def view(files: Path) -> Iterator[Mounted]:
    with mounted(*sorted(files.glob("*.*"))) as running:
        yield running


def failing(call: object, *arguments: object) -> int | None:
    """Return the errno of a call that fails."""
    try:
        call(*arguments)  # type: ignore[operator]
    except OSError as error:
        return error.errno
    return None


def test_a_packed_folder_is_as_it_was(view: Mounted, files: Path) -> None:
    for top in (files / "photos", view.samples / "photos.ffr"):
        found = {}
        for directory, names, inner in os.walk(os.fsencode(top)):
            for name in inner:
                path = os.path.join(directory, name)
                with open(path, "rb") as file:
                    found[os.path.relpath(path, os.fsencode(top))] = file.read()
                assert os.stat(path).st_size == len(found[os.path.relpath(path, os.fsencode(top))])
            if directory == os.fsencode(top):
                assert sorted(names) == [b"cats", b"nothing"]
        assert found == NAMES


def test_samples_without_names_are_in_folders(view: Mounted) -> None:
    many = view.samples / "many.tfrecord"
    assert sorted(os.listdir(many)) == ["0", "1"]
    assert sorted(os.listdir(many / "0")) == [f"{k:05}" for k in range(10_000)]
    assert sorted(os.listdir(many / "1")) == ["10000", "10001", "10002"]
    for k in (0, 9_999):
        assert (many / "0" / f"{k:05}").read_bytes() == b"%d" % k
    assert (many / "1" / "10002").read_bytes() == b"10002"
    for wrong in ("0/10000", "1/10003", "0/0", "2", "0/00000/x"):
        assert not (many / wrong).exists()


def test_shards_are_the_files(view: Mounted, files: Path) -> None:
    names = sorted(path.name for path in files.glob("*.*"))
    assert sorted(os.listdir(view.shards)) == sorted(os.listdir(view.samples)) == names
    for name in names:
        assert (view.shards / name).read_bytes() == (files / name).read_bytes()
        there, here = (view.shards / name).stat(), (files / name).stat()
        assert (there.st_size, there.st_mtime_ns) == (here.st_size, here.st_mtime_ns)


@pytest.mark.parametrize("path", ["shards/photos.ffr", "samples/photos.ffr/large"])
def test_files_can_be_mapped(view: Mounted, path: str) -> None:
    with open(view.path / path, "rb") as file:
        content = file.read()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == content and len(content) >= 3 << 20
        assert os.pread(file.fileno(), 100, 1_000_000) == content[1_000_000:1_000_100]
        assert os.pread(file.fileno(), 100, len(content) - 5) == content[-5:]


def test_a_damaged_sample_is_an_error_and_others_are_served(view: Mounted) -> None:
    folder = view.samples / "bad.ffr" / "0"
    assert len(os.listdir(folder)) == len(SAMPLES)
    for k, each in enumerate(SAMPLES):
        path = folder / f"{k:02}"
        if k == BAD:
            assert path.stat().st_size == len(each)
            assert failing(path.read_bytes) == errno.EIO
        else:
            assert path.read_bytes() == each
    assert "checksum" in view.log()


def test_a_sample_of_unknown_size_in_a_damaged_chunk_fails_at_stat(view: Mounted) -> None:
    folder = view.samples / "bad.rio" / "0"
    names = sorted(os.listdir(folder))
    assert names == [f"{k:02}" for k in range(len(SAMPLES))]
    assert failing(os.stat, folder / names[-1]) == errno.EIO
    assert failing(open, folder / names[-1]) == errno.EIO
    good = view.samples / "good.rio" / "0"
    assert [(good / name).read_bytes() for name in names] == SAMPLES


def test_nothing_can_be_written(view: Mounted) -> None:
    path = view.samples / "photos.ffr" / "one.txt"
    for call in (path.unlink, lambda: path.write_bytes(b""), lambda: path.chmod(0o777),
                 (view.path / "new").mkdir, lambda: path.rename(view.path / "other")):  # fmt: skip
        assert failing(call) == errno.EROFS


def test_the_file_system_is_full(view: Mounted, files: Path) -> None:
    state = os.statvfs(view.path)
    size = sum(path.stat().st_size for path in files.glob("*.*"))
    assert state.f_bfree == 0 and state.f_blocks == -(-size // 4096)
    assert state.f_namemax == 255 and state.f_flag & os.ST_RDONLY


def test_programs_for_files(view: Mounted, files: Path, tmp_path: Path) -> None:
    tar = subprocess.run(
        ["tar", "-C", view.samples / "photos.ffr", "-cf", "-", "."], check=True, capture_output=True
    )
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-C", tmp_path / "out", "-xf", "-"], input=tar.stdout, check=True)
    subprocess.run(["diff", "-r", files / "photos", tmp_path / "out"], check=True)
    many = view.samples / "many.tfrecord"
    found = subprocess.run(["find", many, "-type", "f"], check=True, capture_output=True)
    assert len(found.stdout.splitlines()) == COUNT
    found = subprocess.run(
        ["find", many, "-type", "f", "-size", "-5c"], check=True, capture_output=True
    )
    assert len(found.stdout.splitlines()) == 10_000


def test_many_programs_read_at_once(view: Mounted) -> None:
    program = (
        "import random, sys; names = sys.argv[1].split()\n"
        "for k in random.Random(sys.argv[2]).choices(range(10000), k=300):\n"
        "    assert open(f'{sys.argv[1]}/0/{k:05}', 'rb').read() == b'%d' % k"
    )
    path = view.samples / "many.tfrecord"
    running = [
        subprocess.Popen([sys.executable, "-S", "-c", program, path, str(k)]) for k in range(4)
    ]
    assert [process.wait(DEADLINE_S) for process in running] == [0] * 4


# ---- with a daemon, for other users --------------------------------------------------------------


def test_samples_come_from_the_daemon(daemon: Daemon, tmp_path: Path) -> None:
    write(tmp_path / "a.ffr", SAMPLES)
    with mounted(tmp_path / "a.ffr", options=("--server", daemon.socket)) as view:
        assert "by daemon" in view.log()
        found = [(view.samples / "a.ffr" / "0" / f"{k:02}").read_bytes() for k in range(14)]
        assert found == SAMPLES
        assert daemon.cache()["blocks_read"] > 0


@pytest.mark.check
def test_samples_of_remote_files_come_through_a_daemon_that_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.ffr", SAMPLES)
    write(tmp_path / "b.rio", SAMPLES)
    with http_origin() as origin, own_daemons(tmp_path) as socket:
        monkeypatch.setitem(ENVIRONMENT, "FFSERVE_SOCKET", socket)
        monkeypatch.setitem(ENVIRONMENT, "XDG_RUNTIME_DIR", str(tmp_path / "run"))
        monkeypatch.setitem(ENVIRONMENT, "FFSERVE_STORE", str(tmp_path / "store"))
        urls = [origin.put(name, (tmp_path / name).read_bytes()) for name in ("a.ffr", "b.rio")]
        with mounted(*urls, tmp_path / "a.ffr", options=("--server", "auto")) as view:
            shown = [*view.samples.glob("**/a.ffr"), *view.samples.glob("**/b.rio")]
            assert len(shown) == 3
            for folder in shown:
                found = [(folder / "0" / f"{k:02}").read_bytes() for k in range(14)]
                assert found == SAMPLES
            files = [path for path in view.shards.rglob("*") if path.is_file()]
            assert [path.name for path in files] == ["a.ffr"]
            assert files[0].read_bytes() == (tmp_path / "a.ffr").read_bytes()
            assert "remote files are not in shards/" in view.log()
            assert f"by daemon {socket}" in view.log()
        assert origin.total == sum(map(len, origin.files.values()))


SEEN = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    for folder, names, files in os.walk(sys.argv[1]):
        for name in names + files:
            print(os.path.relpath(os.path.join(folder, name), sys.argv[1]))
    os.listdir(sys.argv[1])
except PermissionError:
    print("refused")
if len(sys.argv) > 2:
    print(open(sys.argv[2], "rb").read().hex())
"""
"""What a user without rights finds."""


def seen(view: Mounted, *path: Path) -> list[str]:
    return run_python(SEEN, view.path, *path).stdout.splitlines()


@pytest.mark.check
def test_other_users_saw_names_and_sizes_of_files_that_they_may_not_read() -> None:
    with tempfile.TemporaryDirectory(prefix="ffs-") as directory:
        folder = Path(directory)
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0o700)
        for name in ("open.ffr", "private.ffr", "closed/hidden.ffr"):
            write(folder / name, SAMPLES)
            (folder / name).chmod(0o644)
        (folder / "private.ffr").chmod(0o640)
        paths = [folder / "open.ffr", folder / "private.ffr", folder / "closed/hidden.ffr"]
        with mounted(*paths, options=("--server", "off", "--allow-other")) as view:
            sample = view.samples / "open.ffr" / "0" / "05"
            *found, content = seen(view, sample)
            assert bytes.fromhex(content) == SAMPLES[5] == sample.read_bytes()
            numbers = [f"samples/open.ffr/0/{k:02}" for k in range(len(SAMPLES))]
            assert sorted(found) == [
                "samples", "samples/open.ffr", "samples/open.ffr/0", *numbers,
                "shards", "shards/open.ffr",
            ]  # fmt: skip
            assert os.statvfs(view.path).f_blocks == -(
                -(folder / "open.ffr").stat().st_size // 4096
            )
            assert "left out because of --allow-other: 2 of 3" in view.log()
        with mounted(*paths) as view:
            assert seen(view) == ["refused"]
            for name in ("open", "private", "hidden"):
                assert (view.samples / f"{name}.ffr" / "0" / "05").read_bytes() == SAMPLES[5]
        (folder / "place").mkdir()
        words = ["--foreground", "--allow-other", "--server", "off", folder / "place"]
        assert "none that everybody may read" in error_of("mount", *words, paths[1], code=2)


@pytest.mark.check
def test_remote_files_are_shown_to_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    words = ["--foreground", "--allow-other", "--server", "off", tmp_path / "place"]
    with http_origin() as origin:
        url = origin.put("a.ffr", Path(write(tmp_path / "a.ffr", SAMPLES)).read_bytes())
        assert "none that everybody may read" in error_of("mount", *words, url, code=2)


# ---- begin and end -------------------------------------------------------------------------------


@pytest.mark.check
def test_a_view_ends_with_its_process_and_begins_again(tmp_path: Path) -> None:
    needs_fuse()
    write(tmp_path / "a.ffr", SAMPLES)
    place = tmp_path / "place"
    place.mkdir()
    try:
        # In the background, until it is unmounted.
        done = spawned(["mount", str(place), str(tmp_path / "a.ffr"), "--server", "off"])
        assert done.returncode == 0 and b"14 samples in 1 file" in done.stdout, done.stderr
        assert (place / "samples/a.ffr/0/05").read_bytes() == SAMPLES[5]
        assert "already" in error_of("mount", "--foreground", place, tmp_path / "a.ffr", code=2)
        with open(place / "samples/a.ffr/0/05"):
            assert "--lazy" in error_of("unmount", place, code=2)
        run("unmount", place)
        assert mounting.find(str(place)) is None and os.listdir(place) == []
        assert "no view" in error_of("unmount", place, code=2)
        # Killed by a signal that can be caught, with a file open.
        with mounted(tmp_path / "a.ffr", place=place) as view:
            with open(view.shards / "a.ffr", "rb"):
                assert view.end(signal.SIGINT) == 0
            assert "files of the view open" in view.log() and os.listdir(place) == []
        # Killed by one that cannot.
        with mounted(tmp_path / "a.ffr", place=place) as view:
            view.end(signal.SIGKILL)
            until(lambda: failing(os.statvfs, place) == errno.ENOTCONN, "its processes have ended")
            with mounted(tmp_path / "a.ffr", place=place) as again:
                assert (again.samples / "a.ffr/0/05").read_bytes() == SAMPLES[5]
                assert "had been killed" in again.log()
                again.end(signal.SIGKILL)
                until(lambda: failing(os.statvfs, place) == errno.ENOTCONN, "they have ended too")
                run("unmount", place)
            assert os.listdir(place) == []
    finally:
        clear(place)


def test_what_cannot_be_mounted(tmp_path: Path, files: Path) -> None:
    write(tmp_path / "a.ffr", SAMPLES)
    empty = tmp_path / "empty"
    empty.mkdir()

    def error(place: Path, *words: str | Path, code: int = 2) -> str:
        return error_of("mount", "--foreground", place, *words, code=code)

    assert "mkdir" in error(tmp_path / "missing", tmp_path / "a.ffr")
    assert "not a directory" in error(tmp_path / "a.ffr", tmp_path / "a.ffr")
    assert "not empty" in error(tmp_path, tmp_path / "a.ffr")
    assert "missing.ffr" in error(empty, tmp_path / "missing.ffr")
    assert "suffix" in error(empty, tmp_path / "a.ffr", "--suffix", "a/b")
    (tmp_path / "b.ffr").write_bytes((tmp_path / "a.ffr").read_bytes()[:30])
    assert "b.ffr" in error(empty, tmp_path / "b.ffr", code=1)
    assert mounting.find(str(empty)) is None
    assert "Usage" in text_of("mount", "--help")


def test_names_that_cannot_be_read_are_numbers(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "photos.ffr"
    path.write_bytes((files / "photos.ffr").read_bytes())
    damage(path, len(NAMES))
    with mounted(path) as view:
        assert "are named by number" in view.log()
        names = os.listdir(view.samples / "photos.ffr" / "0")
        assert len(names) == len(NAMES) + 1


@pytest.mark.check
def test_without_fuse_the_error_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / "a.ffr", SAMPLES)
    (tmp_path / "place").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(mounting, "DEVICE", str(tmp_path / "none"))
        text = error_of("mount", "--foreground", tmp_path / "place", tmp_path / "a.ffr", code=2)
        assert "modprobe fuse" in text
    with monkeypatch.context() as patch:
        patch.setattr(mounting, "_HELPERS", ("no-such-program",))
        patch.setattr(os, "geteuid", lambda: NOBODY)
        text = error_of("mount", "--foreground", tmp_path / "place", tmp_path / "a.ffr", code=2)
        assert "package fuse3" in text
