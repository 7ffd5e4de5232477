"""The commands over files of all formats."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from command import error_of, run, text_of
from daemon import sample, write

import ffserve

GOLDEN = Path(__file__).parents[1] / "golden" / "tfrecord"
SAMPLES = [sample(i) for i in range(40)]


@pytest.fixture(params=["a.ffr", "a.tfrecord"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file of each format."""
    return write(tmp_path / request.param, SAMPLES)


def test_inspect_verify_and_cat(path: str) -> None:
    [facts] = json.loads(text_of("inspect", "--json", path))
    assert facts["samples"] == 40 and facts["cut_samples"] == []
    assert facts["sample_size_bytes"]["max"] == 70_000
    assert "all intact" in text_of("verify", path)
    assert run("cat", path, "3", "5:8").stdout == SAMPLES[3] + b"".join(SAMPLES[5:8])


def test_verify_names_the_damaged(tmp_path: Path) -> None:
    for name in ("small.tfrecord", "bad_data.tfrecord", "trunc_30.tfrecord"):
        shutil.copy(GOLDEN / name, tmp_path)
    found = json.loads(text_of("verify", "--json", tmp_path, code=1))
    assert [(entry["index"], entry["error"]) for entry in found["damaged"]] == [
        (3, "checksum"),
        (7, "truncated"),
    ]
    assert found["unreadable"] == []


def test_index_reports_each_kind_of_file(tmp_path: Path) -> None:
    for name in ("small.tfrecord", "mixed.tfrecord", "trunc_30.tfrecord"):
        shutil.copy(GOLDEN / name, tmp_path)
    write(tmp_path / "b.ffr", SAMPLES)
    done = run("index", tmp_path, code=1)
    assert done.stdout.decode() == (
        "2 files indexed, 57 samples; 1 file with tables; 1 unreadable file\n"
    )
    assert b"trunc_30.tfrecord, byte 413" in done.stderr
    facts = json.loads(text_of("index", "--json", "--renew", tmp_path / "small.tfrecord"))
    assert facts[0]["samples"] == 8 and os.path.exists(facts[0]["index"])


def test_one_file_that_cannot_be_read_ended_the_indexing_of_all(tmp_path: Path) -> None:
    for name in ("small.tfrecord", "mixed.tfrecord.gz"):
        shutil.copy(GOLDEN / name, tmp_path)
    assert run("index", tmp_path).stdout == b"2 files indexed, 57 samples\n"
    (tmp_path / "mixed.tfrecord.gz").write_bytes((GOLDEN / "mixed.tfrecord.gz").read_bytes()[:-9])
    done = run("index", tmp_path, code=1)
    assert done.stdout == b"1 file indexed, 8 samples; 1 unreadable file\n"
    assert b"mixed.tfrecord.gz" in done.stderr


def test_index_of_a_missing_file(tmp_path: Path) -> None:
    assert "No such file" in error_of("index", tmp_path / "none.tfrecord", code=2)


@pytest.mark.parametrize("name", ["mixed.tfrecord.gz", "mixed.tfrecord.zlib"])
def test_compressed_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    shutil.copy(GOLDEN / name, path)
    [facts] = json.loads(text_of("inspect", "--json", path))
    [plain] = json.loads(text_of("inspect", "--json", GOLDEN / "mixed.tfrecord"))
    same = ("samples", "sample_size_bytes", "histogram")
    assert [facts[key] for key in same] == [plain[key] for key in same]
    assert "49 samples" in text_of("verify", path)
    which = ("4", "2", "2", "7:9", "8", "3:3", "1:9")
    expected = run("cat", GOLDEN / "mixed.tfrecord", *which).stdout
    assert len(expected) > 70_000 and run("cat", path, *which).stdout == expected
    assert "outside the dataset of 49 samples" in error_of("cat", path, "49", code=2)
    assert "the file has no names" in error_of("cat", path, "name", code=2)
    assert text_of("index", path).startswith("1 file indexed, 49 samples")
    path.write_bytes(path.read_bytes()[:50_000])
    found = json.loads(text_of("verify", "--json", path, code=1))
    assert [entry["error"] for entry in found["damaged"]] == ["truncated"]
    error_of("index", path, code=1)


def test_a_compressed_file_without_samples_and_runs_without_end(tmp_path: Path) -> None:
    path = write(tmp_path / "none.tfrecord", [])
    assert "outside the dataset of 0 samples" in error_of("cat", path, "0", code=2)
    with ffserve.create(tmp_path / "none.tfrecord.gz", compression="gzip"):
        pass
    for which in ("0", f"0:{10**30}"):
        error = error_of("cat", tmp_path / "none.tfrecord.gz", which, code=2)
        assert "sample 0: the index is outside the dataset of 0 samples" in error
    assert run("cat", tmp_path / "none.tfrecord.gz", "0:0").stdout == b""


def keeping_times(path: Path, content: bytes) -> None:
    """Replace the content of a file in place, as rsync --inplace --times does."""
    times = os.stat(path)
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_verify_believed_the_index_file(tmp_path: Path) -> None:
    samples = [bytes([k]) * 5000 for k in range(250)]
    path = Path(write(tmp_path / "a.tfrecord", samples))
    text_of("index", path)
    sound = bytearray(path.read_bytes())
    content, frame = bytearray(sound), 5000 + 16
    for at in (70 * frame, 140 * frame + 9, 211 * frame - 1):  # a length, its checksum, a payload's
        content[at] ^= 1
    keeping_times(path, content)
    for _ in range(2):
        found = json.loads(text_of("verify", "--json", path, code=1))
        assert [entry["index"] for entry in found["damaged"]] == [70, 140, 210]
    assert "length of record 70" in error_of("inspect", path, code=1)
    keeping_times(path, sound)
    assert "250 samples" in text_of("verify", path) and "all intact" in text_of("verify", path)


def test_verify_called_replaced_records_damaged(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.tfrecord", [bytes([k]) * 5000 for k in range(250)]))
    text_of("index", path)
    others = [bytes([k ^ (20 < k < 230)]) * 5000 for k in range(250)]
    keeping_times(path, Path(write(tmp_path / "b.tfrecord", others)).read_bytes())
    assert "all intact" in text_of("verify", path)
    with ffserve.open(path, server="off") as reader:
        assert [sample.tobytes() for sample in reader] == others
