"""Data sets of files that are opened together: of all kinds and sizes, damaged ones among them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import (
    DEADLINE_S,
    Daemon,
    Raw,
    asking,
    damage,
    ready,
    run_python,
    sample,
    serving,
    until,
    write,
)

import ffserve
from ffserve import formats, protocol
from ffserve.errors import ChecksumError, FFServeError, FormatError, MissingFile, ReadError
from ffserve.limits import USER_OPENINGS
from ffserve.reads.shard_tables import SMALL_SIZE
from ffserve.testing import written

ALICE = 61_001


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with serving(options=["--socket-mode", "0666"]) as running:
        yield running


def create(path: Path, samples: list[bytes], **options: Any) -> str:
    with ffserve.create(path, **options) as writer:
        for each in samples:
            writer.write(each)
    return str(path)


def of_all_kinds(folder: Path) -> list[str]:
    """Files of each format: empty, small, with large tables, with large samples; and with an index
    file."""
    shapes = {"empty": [], "small": [7, 0, 30], "many": [3] * 3000, "large": [400_000] * 3}
    kinds: list[dict[str, Any]] = [
        {"format": "ffrecord"},
        {"format": "tfrecord"},
        {"format": "tfrecord", "compression": "gzip"},
        {"format": "recordio"},
        {"format": "recordio", "dialect": "go", "compression": "gzip", "max_chunk_size": 100_000},
    ]
    found = []
    for name, sizes in shapes.items():
        for k, options in enumerate(kinds):
            suffix = formats.by_name(options["format"]).suffixes[0]
            samples = [sample(i, [size], k) for i, size in enumerate(sizes)]
            if options.get("dialect") == "go":
                samples = [each[:90_000] for each in samples]
            found.append(create(folder / f"{name}{k}{suffix}", samples, **options))
    return found


def facts(reader: ffserve.Reader, *, lengths: bool) -> list[Any]:
    tables = [[t.tolist() for t in reader.tables(k)] for k in range(len(reader.shards))]
    return [reader.shards, [(o, n if lengths else None, c) for o, n, c in tables]]


@pytest.mark.check
def test_files_of_all_kinds_in_one_data_set(daemon: Daemon, tmp_path: Path) -> None:
    """In any order; each is what it is without a daemon."""
    paths = of_all_kinds(tmp_path) + [write(tmp_path / f"{k}.ffr", [b"%d" % k]) for k in range(40)]
    order = np.random.default_rng(1).permutation(len(paths)).tolist()
    paths = [paths[k] for k in order]
    for options in ({}, {"verify": False}, {}):
        with (
            ffserve.open(paths, server="off", **options) as local,  # type: ignore[arg-type]
            daemon.open(paths, **options) as served,
        ):
            # What lies in chunks has its length when it is decoded.
            assert facts(served, lengths=False) == facts(local, lengths=False)
            chosen = np.random.default_rng(2).permutation(len(local))[:3000]
            for one, other in zip(served.read(chosen), local.read(chosen), strict=True):
                assert one.tobytes() == other.tobytes()


def many(folder: Path, name: str, count: int) -> list[str]:
    """Files with two samples each."""
    chosen = formats.by_suffix(name)
    assert chosen is not None
    paths = [folder / f"{k:03}{name}" for k in range(count)]
    for k, path in enumerate(paths):
        path.write_bytes(written(chosen, [b"%d" % k, b"abc"]))
    return list(map(str, paths))


@pytest.mark.check
@pytest.mark.parametrize("name", ["a.ffr", "a.tfrecord", "a.recordio"])
@pytest.mark.parametrize("fault", ["cut", "changed", "no format", "missing", "pipe"])
def test_one_of_many_is_not_in_order(name: str, fault: str, daemon: Daemon, tmp_path: Path) -> None:
    """The error names it, nothing is held, and the others can be opened."""
    paths = many(tmp_path, name, 300)
    bad, before = Path(paths[170]), daemon.fd_count()
    content = bad.read_bytes()
    kind: type[FFServeError] = FormatError
    if fault == "cut":
        bad.write_bytes(content[:20] if name == "a.ffr" else content[:-1])
    elif fault == "changed":
        place = 16 if name == "a.ffr" else 2
        bad.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    elif fault == "no format":
        bad = bad.rename(tmp_path / "other")
        bad.write_bytes(b"no such format at all")
    else:
        kind = MissingFile if fault == "missing" else ReadError
        bad.unlink()
        if fault == "pipe":
            os.mkfifo(bad)
    with pytest.raises(kind) as raised:
        daemon.open([*paths[:170], str(bad), *paths[171:]])
    assert raised.value.path == str(bad)
    until(lambda: daemon.fd_count() <= before, "nothing is held")
    with daemon.open(paths[:170] + paths[171:]) as reader:
        assert [bytes(reader[2 * k]) for k in (0, 170, 298)] == [b"0", b"171", b"299"]


def test_a_truncated_file_among_many(daemon: Daemon, tmp_path: Path) -> None:
    """Its tables are intact, so it is opened, and only its last samples fail."""
    paths = [write(tmp_path / f"{k:03}.ffr", [b"%d" % k, b"abc"]) for k in range(20)]
    os.truncate(paths[7], os.path.getsize(paths[7]) - 1)
    damage(paths[9], 1)
    with daemon.open(paths) as reader:
        found = reader.read(range(40), errors="return")
    for k, each in enumerate(found):
        if k in (15, 19):
            assert isinstance(each, ChecksumError if k == 19 else FFServeError)
        else:
            assert bytes(each) == (b"abc" if k % 2 else b"%d" % (k // 2))  # type: ignore[arg-type]


def test_files_of_a_data_set_are_neighbours(daemon: Daemon, tmp_path: Path) -> None:
    """In the tables: so its samples are one run to its clients."""
    paths = many(tmp_path, "a.tfrecord", 300)
    with daemon.open(paths) as reader:
        assert len(reader._selector.current().layout.runs([0] * 300)) == 1  # type: ignore[attr-defined]


def test_chunks_above_the_limit_in_small_files(tmp_path: Path) -> None:
    small = [create(tmp_path / f"{k}.recordio", [b"%d" % k] * 3, format="recordio") for k in (1, 2)]
    large = create(
        tmp_path / "large.recordio", [b"a", bytes(2 << 20)], format="recordio", max_chunk_size=100
    )
    assert os.path.getsize(large) > SMALL_SIZE  # snappy's
    packed = create(
        tmp_path / "packed.recordio", [b"a", bytes(2 << 20)],
        format="recordio", compression="gzip", max_chunk_size=100,
    )  # fmt: skip
    assert os.path.getsize(packed) < SMALL_SIZE
    with serving(options=["--max-chunk-size", "1MiB"]) as daemon:
        with daemon.open([small[0], packed, large, small[1]]) as reader:
            found = reader.read(range(len(reader)), errors="return")
        for k, each in enumerate(found):
            if k in (4, 6):
                assert isinstance(each, FormatError) and "more than the limit" in str(each)
            else:
                assert bytes(each) == [b"1", b"a", b"a", b"2"][(k >= 3) + (k >= 5) + (k >= 7)]  # type: ignore[arg-type]


# ---- files that let others wait ----------------------------------------------------------------


@contextlib.contextmanager
def leased(path: str) -> Iterator[int]:
    """A descriptor of a file that nobody else can open for lease-break-time, 45 s: a write lease.
    It is given back at the end."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # which does nothing
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"the file system of {path} has no leases: {error}")
        yield fd
    finally:
        os.close(fd)


def waits(raw: Raw) -> bool:
    """Whether an OPEN is not answered yet."""
    raw.socket.settimeout(0.1)
    try:
        raw.receive()
    except TimeoutError:
        return True
    finally:
        raw.socket.settimeout(DEADLINE_S)
    return False


def test_who_sent_a_file_together_with_one_under_a_lease_held_up_its_first_opener(
    tmp_path: Path,
) -> None:
    """For 45 s each. The second session opens the common file itself, and both have one shard."""
    paths = [write(tmp_path / f"{name}.ffr", [name.encode()]) for name in ("common", "own", "more")]
    common, own, more = paths
    with leased(own) as fd, serving() as daemon, Raw(daemon.socket) as slow:
        slow.send(asking(common, own, more))
        assert isinstance(slow.receive(), protocol.Need)
        slow.pass_files(1, [common, fd, more])
        until(lambda: fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_WRLCK, "it is being opened")
        with daemon.open([common, more]) as reader:
            assert [bytes(one) for one in reader.read([0, 1])] == [b"common", b"more"]
            assert waits(slow), "its own file is not open yet"
            before = daemon.fd_count()
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            assert isinstance(slow.receive(), protocol.Opened)
            found = sorted((s["path"], s["sessions"]) for s in daemon.status()["shards"])
            assert found == [(common, 2), (more, 2), (own, 1)]
            # Of the passed files and of those that were opened twice none is left.
            until(lambda: daemon.fd_count() <= before, "nothing else is held")


def test_who_sent_a_file_behind_one_that_is_scanned_for_long_held_up_its_first_opener(
    tmp_path: Path,
) -> None:
    """A file that takes long itself is read once, for all who want it."""
    begin, log = tmp_path / "begin", tmp_path / "log"
    begin.touch()
    patch = f"""
import os, time
import ffserve.reads.shard_tables as o
real = o.open_shard
def slowly(fd, path, *arguments, **options):
    with open({str(log)!r}, "a") as out:
        out.write(os.path.basename(path) + "\\n")
    while "slow" in path and os.path.exists({str(begin)!r}):
        time.sleep(0.01)
    return real(fd, path, *arguments, **options)
o.open_shard = slowly
"""
    large = [sample(i, [3]) for i in range(3000)]
    slow, common = (write(tmp_path / f"{name}.ffr", large) for name in ("slow", "common"))
    with serving(patch=patch) as daemon, contextlib.ExitStack() as stack:
        first, *others = (stack.enter_context(Raw(daemon.socket)) for _ in range(3))
        first.send(asking(slow, common))
        assert isinstance(first.receive(), protocol.Need)
        first.pass_files(1, [slow, common])
        until(log.exists, "the first file is being read")
        for raw in others:
            raw.send(asking(slow))
            assert isinstance(raw.receive(), protocol.Need)
            raw.pass_files(1, [slow])
        with daemon.open(common) as reader:
            assert bytes(reader[2999]) == large[2999]
            assert all(map(waits, (first, *others)))
        begin.unlink()
        for raw in (first, *others):
            assert isinstance(raw.receive(), protocol.Opened)
    assert sorted(log.read_text().split()) == ["common.ffr", "slow.ffr"], "each was read once"


LEASES = f"""
import fcntl, os, signal, sys, threading
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
import daemon as support
os.setgroups([]); os.setgid({ALICE}); os.setuid({ALICE})
raws, fds = [], []
for path in sys.argv[2:]:
    fds.append(os.open(path, os.O_RDONLY))
    fcntl.fcntl(fds[-1], fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(fds[-1], fcntl.F_SETLEASE, fcntl.F_WRLCK)
    raws.append(support.Raw(sys.argv[1]))
    raws[-1].send(support.asking(path))
def send():
    for raw, fd in zip(raws, fds):
        raw.receive()
        raw.pass_files(1, [fd])
threading.Thread(target=send, daemon=True).start()
print("ready", flush=True)
sys.stdin.readline()
for fd in fds:
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
os._exit(0)
"""
"""A user whose files do not let themselves be opened."""


@pytest.mark.check
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, makes mount namespaces")
def test_a_user_held_up_four_threads_in_each_mount_namespace() -> None:
    """And everybody can make any number of these."""

    def threads() -> int:
        return len(os.listdir(f"/proc/{daemon.pid}/task"))

    with serving(options=["--socket-mode", "0666"]) as daemon:
        folder = daemon.directory / "leases"
        folder.mkdir()
        os.chmod(folder, 0o755)
        before, most = threads(), 0
        with contextlib.ExitStack() as stack:
            for k in range(6):
                paths = [write(folder / f"{k}{i}.ffr", [b"x"]) for i in range(4)]
                for path in paths:
                    os.chown(path, ALICE, ALICE)
                words = [sys.executable, "-c", LEASES, daemon.socket, *paths]
                client = stack.enter_context(ready(["unshare", "-m", *words]))
                assert client.stdin is not None
                stack.callback(client.communicate, "\n")
            until(lambda: threads() >= before + USER_OPENINGS, "they wait")
            for _ in range(50):
                most = max(most, threads() - before)
                time.sleep(0.02)
            with daemon.open(write(folder / "other.ffr", [b"y"])) as reader:
                assert bytes(reader[0]) == b"y", "others are served"
        assert most <= USER_OPENINGS + 4, "some more close descriptors"
        until(lambda: threads() <= before + 4, "all have ended")


@pytest.mark.check
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_each_of_many_files_is_common_or_not(daemon: Daemon) -> None:
    """Also where links, private files and directories, and names of others lie among them."""
    folder = daemon.directory / "kinds"
    (folder / "private").mkdir(parents=True)
    os.chmod(folder / "private", 0o700)
    paths = [write(folder / f"{k:02}.ffr", [b"%d" % k]) for k in range(12)]
    inside = write(folder / "private" / "inside.ffr", [b"inside"])
    for path in (*paths, inside):
        os.chmod(path, 0o644)
        os.chown(path, ALICE, ALICE)
    os.chown(folder / "private", ALICE, ALICE)
    os.chmod(paths[3], 0o600)
    (folder / "link.ffr").symlink_to(paths[5])
    (folder / "inner.ffr").symlink_to(inside)
    (folder / "hidden.ffr").symlink_to(paths[3])
    chosen = [
        *paths,
        *(str(folder / f"{name}.ffr") for name in ("link", "inner", "hidden")),
        inside,
    ]
    program = f"""
import os, sys
import ffserve, ffserve.reader
from ffserve.client.daemon.connection import status
os.setgroups([]); os.setgid({ALICE}); os.setuid({ALICE})
with ffserve.open(sys.argv[2:], server=sys.argv[1]) as reader:
    print(*(bytes(one).decode() for one in reader.read(range(len(reader)))))
    print(sorted((each["user"] or 0, each["shards"]) for each in status(sys.argv[1])["domains"]))
"""
    before = {each["user"]: each["shards"] for each in daemon.status()["domains"]}
    done = run_python(program, daemon.socket, *chosen).stdout.splitlines()
    assert done[0].split() == [*map(str, range(12)), "5", "inside", "3", "inside"]
    after = {each["user"]: each["shards"] for each in daemon.status()["domains"]}
    # Two names of one file are one shard; the private file and the one in the private directory.
    assert after[None] - before.get(None, 0) == 11
    assert after[ALICE] == 2
