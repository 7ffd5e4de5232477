"""`ffserve ls`: what it lists for each kind of file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import error_of, on_a_terminal, run, spawned, text_of
from daemon import damage, sample, write

import ffserve

GOLDEN = Path(__file__).parents[1] / "golden"
SAMPLES = [sample(i) for i in range(40)]


def rows(*arguments: str | Path) -> list[dict[str, Any]]:
    found = json.loads(text_of("ls", "--json", *arguments))
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("name", ["a.ffr", "a.tfrecord", "a.recordio"])
def test_indices_sizes_and_checksums(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, SAMPLES)
    found = rows(path)
    assert [row["index"] for row in found] == list(range(40))
    assert [row["size_bytes"] for row in found] == list(map(len, SAMPLES))
    assert {(row["path"], row["name"]) for row in found} == {(path, None)}
    with ffserve.open(path, server="off") as reader:
        checksums = [f"{one:08x}" for one in reader.tables(0)[2].tolist()]
    assert [row["checksum"] for row in found] == checksums
    head, *lines = text_of("ls", path).splitlines()
    assert head.split() == ["index", "size", "checksum", "name"]
    assert [line.split() for line in lines] == [
        [str(row["index"]), str(row["size_bytes"]), row["checksum"]] for row in found
    ]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A packed folder with a name that is not UTF-8, one that is dangerous, and an empty file."""
    top = tmp_path / "folder"
    (top / "cats").mkdir(parents=True)
    (top / "cats" / "tom.txt").write_text("meow")
    Path(os.fsdecode(os.fsencode(top) + b"/\xff.bin")).write_bytes(b"xyz")
    (top / "a\nb").touch()
    run("pack", top, "-o", tmp_path / "p.ffr")
    return tmp_path / "p.ffr"


def test_names(packed: Path) -> None:
    found = rows(packed)
    assert [(row["name"], row["size_bytes"]) for row in found] == [
        ("a\nb", 0),
        ("cats/tom.txt", 4),
        ("\udcff.bin", 3),
    ]
    done = spawned(["ls", str(packed)])
    assert done.returncode == 0, done.stderr
    _, *lines = [line.split()[3:] for line in done.stdout.splitlines()]
    assert lines == [[b"a\\nb"], [b"cats/tom.txt"], [b"\xff.bin"]]


def test_a_part(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", SAMPLES)
    for options, part in (
        (["--start", "10"], range(10, 40)),
        (["--count", "3"], range(3)),
        (["--start", "38", "--count", "10"], range(38, 40)),
        (["--start", "40"], range(0)),
        (["--count", "0"], range(0)),
    ):
        assert [row["index"] for row in rows(path, *options)] == list(part)
    assert "outside the dataset of 40" in error_of("ls", path, "--start", "41", code=2)
    error_of("ls", path, "--start", "-1", code=2)
    assert text_of("ls", path, "--start", "40") == ""
    assert text_of("ls", "--json", path, "--start", "40") == "[]\n"


def test_several_files(tmp_path: Path, packed: Path) -> None:
    write(tmp_path / "q.ffr", SAMPLES[:5])
    found = rows(tmp_path)
    assert [row["index"] for row in found] == list(range(8))
    assert [Path(row["path"]).name for row in found] == ["p.ffr"] * 3 + ["q.ffr"] * 5
    assert found[1]["name"] == "cats/tom.txt"
    assert rows(tmp_path, "--start", "2", "--count", "3") == found[2:5]
    done = spawned(["ls", str(tmp_path), "--start", "2", "--count", "3"])
    lines = os.fsdecode(done.stdout).splitlines()
    assert lines[0] == str(packed) and lines[4] == str(tmp_path / "q.ffr") and len(lines) == 8


def test_a_compressed_file() -> None:
    path = GOLDEN / "tfrecord" / "mixed.tfrecord.gz"
    plain = rows(GOLDEN / "tfrecord" / "mixed.tfrecord")
    assert rows(path) == [{**row, "path": str(path)} for row in plain]
    assert rows(path, "--start", "3", "--count", "2") == rows(path)[3:5]


def test_more_than_are_listed_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    count = 40_000
    with ffserve.create(path) as writer:
        writer.write_batch(np.zeros(count, np.uint8), np.arange(count + 1))
    found = rows(path)
    assert [row["index"] for row in found] == list(range(count))
    assert len(text_of("ls", path).splitlines()) == count + 1


def test_bad_input(tmp_path: Path) -> None:
    assert "No such file" in error_of("ls", tmp_path / "none.ffr", code=2)
    (tmp_path / "x.bin").write_bytes(b"nothing that is known")
    assert "unknown format" in error_of("ls", tmp_path / "x.bin", code=1)
    path = write(tmp_path / "a.recordio", SAMPLES)
    damage_chunk = bytearray(Path(path).read_bytes())
    damage_chunk[30] ^= 1
    Path(path).write_bytes(damage_chunk)
    assert "chunk 0" in error_of("ls", path, code=1)
    shutil.copy(GOLDEN / "tfrecord" / "trunc_30.tfrecord", tmp_path)
    assert "the file ends inside" in error_of("ls", tmp_path / "trunc_30.tfrecord", code=1)


def test_a_damaged_sample_is_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", SAMPLES)
    damage(path, 3)
    assert rows(path)[3]["size_bytes"] == len(SAMPLES[3])


def test_a_packed_folder_that_was_cut_had_no_list(packed: Path) -> None:
    whole = rows(packed)
    os.truncate(packed, os.path.getsize(packed) - 1)  # in the names
    done = run("ls", "--json", packed, code=1)
    found = json.loads(done.stdout)
    assert found[:-1] == [{**row, "name": None} for row in whole[:-1]]
    assert found[-1]["index"] == len(whole) - 1
    assert b"checksum mismatch" in done.stderr
    assert len(text_of("ls", packed, code=1).splitlines()) == len(whole) + 1


def test_on_a_terminal_it_goes_through_the_pager(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", SAMPLES)
    output, code = on_a_terminal("ls", path, keyboard=True, PAGER="sed s/^/paged:/")
    assert code == 0
    assert output.count(b"paged:") == 41
    output, code = on_a_terminal("ls", path)
    assert (code, len(output.splitlines())) == (0, 41)
