"""Data sets of files that are opened together: of all kinds and sizes, damaged ones among them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, damage, run_python, sample, serving, until, write

import ffserve
from ffserve import formats
from ffserve.errors import ChecksumError, FFServeError, FormatError, MissingFile, ReadError
from ffserve.server.opening import SMALL_SIZE
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
from ffserve.client.connection import status
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
