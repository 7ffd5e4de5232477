"""convert: everything that can be read into every format, whole, resumed, verified."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import tarfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import error_of, run, text_of
from daemon import damage, sample

import ffserve
from ffserve import example
from ffserve.convert import PLAN_NAME, convert, text_lines
from ffserve.convert.inputs import split_name
from ffserve.errors import ChecksumError, FormatError, ReadError, UsageError

SAMPLES = [sample(i) for i in range(60)]
GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {
    "a.txt": b"A",
    "cats/1.cls": b"7",
    "cats/1.jpg": b"one",
    "cats/1.seg.png": b"seg",
    "cats/2.cls": b"",
    "cats/2.jpg": bytes(5000),
    "noextension": b"none",
}


def written(path: Path, samples: Sequence[bytes], **options: Any) -> Path:
    with ffserve.create(path, **options) as writer:
        for each in samples:
            writer.write(each)
    return path


def content(paths: Any) -> list[bytes]:
    with ffserve.open(paths, server="off") as reader:
        return [each.tobytes() for each in reader]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of files that are no records."""
    for name, data in FILES.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "folder"


@pytest.fixture(params=["a.tar", "a.tar.gz"])
def tar(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same files in a tar file, and a directory among them."""
    with tarfile.open(tmp_path / request.param, "w:gz" if "gz" in request.param else "w") as out:
        entry = tarfile.TarInfo("./cats")
        entry.type = tarfile.DIRTYPE
        out.addfile(entry)
        for name, data in FILES.items():
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(data)
            out.addfile(entry, io.BytesIO(data))
    return tmp_path / request.param


# ---- formats ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["b.ffr", "b.recordio", "b.tfrecord", "b.tfrecord.gz"])
@pytest.mark.parametrize("origin", ["a.ffr", "a.recordio", "a.tfrecord", "a.tfrecord.zlib"])
def test_every_format_into_every_other(tmp_path: Path, origin: str, target: str) -> None:
    source = written(tmp_path / origin, SAMPLES)
    seen: list[tuple[int, int]] = []
    report = convert(
        source, tmp_path / target, verify=True, progress=lambda *done: seen.append(done)
    )
    assert content(tmp_path / target) == SAMPLES
    size = sum(map(len, SAMPLES))
    assert (report.paths, report.samples, report.bytes) == ((str(tmp_path / target),), 60, size)
    assert tuple(map(sum, zip(*seen, strict=True))) == (60, size)


def test_several_inputs_keep_their_order(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / "b.tfrecord", SAMPLES[:10]),
        written(tmp_path / "a.ffr", SAMPLES[10:20]),
        written(tmp_path / "c.tfrecord.gz", SAMPLES[20:30]),
        written(tmp_path / "0.ffr", SAMPLES[30:]),
    ]
    report = convert(paths, tmp_path / "out", format="tfrecord", shards=7)
    assert content(report.paths) == SAMPLES
    sizes = [len(content(path)) for path in report.paths]
    assert len(sizes) == 7 and max(sizes) - min(sizes) <= 1


def test_directory_of_records_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    written(tmp_path / "in" / "b.tfrecord", SAMPLES[30:])
    written(tmp_path / "in" / "a.ffr", SAMPLES[:30])
    (tmp_path / "in" / "README").write_bytes(b"no records")
    for given in (tmp_path / "in", str(tmp_path / "in" / "*.[ft]*")):
        convert(given, tmp_path / "out.ffr")
        assert content(tmp_path / "out.ffr") == SAMPLES


def test_rows_of_an_array(tmp_path: Path) -> None:
    rows = np.arange(60, dtype=np.float32).reshape(10, 3, 2)
    np.save(tmp_path / "a.npy", np.asfortranarray(rows))
    np.save(tmp_path / "flat.npy", rows.ravel())
    convert(tmp_path / "a.npy", tmp_path / "a.ffr")
    assert content(tmp_path / "a.ffr") == [row.tobytes() for row in rows]
    convert(tmp_path / "flat.npy", tmp_path / "b.tfrecord")
    assert content(tmp_path / "b.tfrecord") == [value.tobytes() for value in rows.ravel()]


LINES = [b"one", b"", b"two", b"\rx\ry", b"three " * 40, b"last"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("closed", [True, False])
def test_lines_of_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes, closed: bool
) -> None:
    monkeypatch.setattr(text_lines, "_PIECE_SIZE", 7)
    path = tmp_path / "corpus.txt"
    path.write_bytes(end.join(LINES) + closed * end)
    convert([path], tmp_path / "a.tfrecord", verify=True)
    assert content(tmp_path / "a.tfrecord") == LINES
    source = text_lines.TextLines(str(path))
    assert source.count == len(LINES)
    for first in range(8):
        for stop in (*range(first, 8), None):
            found = [bytes(line) for batch in source.records(first, stop) for line in batch]
            assert found == LINES[first:stop]


def test_lines_of_a_compressed_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(LINES)))
    convert([tmp_path / "a.jsonl.gz"], tmp_path / "a.ffr", verify=True)
    assert content(tmp_path / "a.ffr") == LINES
    for bad in (gzip.compress(b"one\n")[:-5], b"plain", gzip.compress(bytes(99))[:-9] + bytes(9)):
        (tmp_path / "a.txt.gz").write_bytes(bad)
        with pytest.raises(FormatError, match=r"a\.txt\.gz.*damaged"):
            convert([tmp_path / "a.txt.gz"], tmp_path / "b.ffr")
    assert not (tmp_path / "b.ffr").exists()


def test_lines_in_shards_and_of_several_files(tmp_path: Path) -> None:
    for k in range(2):
        (tmp_path / f"{k}.jsonl").write_text("".join(f'{{"k": {k}{i}}}\n' for i in range(50)))
    (tmp_path / "empty.txt").touch()
    inputs = [tmp_path / "empty.txt", tmp_path / "*.jsonl"]
    report = convert(inputs, tmp_path / "out", format="ffrecord", shards=3, verify=True)
    assert report.samples == 100
    assert content(tmp_path / "out") == [
        b'{"k": %d%d}' % (k, i) for k in range(2) for i in range(50)
    ]
    with pytest.raises(FormatError, match="of lines of text"):
        ffserve.open(tmp_path / "0.jsonl")


@pytest.mark.parametrize("bad", [np.float32(3), np.array([{}], object), None])
def test_files_that_are_not_arrays(tmp_path: Path, bad: Any) -> None:
    if bad is None:
        (tmp_path / "a.npy").write_bytes(b"garbage")
    else:
        np.save(tmp_path / "a.npy", bad, allow_pickle=True)
    with pytest.raises((UsageError, FormatError), match=r"a\.npy"):
        convert(tmp_path / "a.npy", tmp_path / "a.ffr")
    assert os.listdir(tmp_path) == ["a.npy"]


def edited(content: bytes, field: bytes, at: int = 124) -> bytes:
    """A tar file whose first header has another field, its size if not said, and a right sum."""
    header = bytearray(content[:512])
    header[at : at + len(field)] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content[512:]


@pytest.mark.parametrize("kind", ["2^62", "2^63", "2^94", "octal", "no number", "pax", "sparse"])
def test_tar_files_that_lie_about_a_size(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as out:
        entry = tarfile.TarInfo("a.bin")
        entry.size = 10
        if kind == "pax":
            entry.pax_headers = {"size": str(10**14)}
        if kind == "sparse":
            sparse = {"map": "0,5,1099511627776,5", "size": str(1 << 41)}
            entry.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}
        out.addfile(entry, io.BytesIO(b"0123456789"))
    sizes = {
        "2^62": b"\x80" + (1 << 62).to_bytes(11, "big"),
        "2^63": b"\x80" + (1 << 63).to_bytes(11, "big"),
        "2^94": b"\x80" + b"\xff" * 11,
        "octal": b"77777777777\0",
        "no number": b"zzzzzzzzzzz\0",
    }
    if kind in sizes:
        path.write_bytes(edited(path.read_bytes(), sizes[kind]))
    for shards in (1, 2):
        with pytest.raises(FormatError, match=r"a\.tar"):
            convert(path, tmp_path / "out", format="ffrecord", shards=shards)


def test_a_compressed_tar_file_that_is_damaged_in_the_middle(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as out:
        entry = tarfile.TarInfo("a.bin")
        entry.size = 100_000
        out.addfile(entry, io.BytesIO(np.random.default_rng(1).bytes(100_000)))
    content = (tmp_path / "a.tar.gz").read_bytes()
    for at in range(20, len(content), len(content) // 20):
        damaged = content[:at] + b"\xff" * 9 + content[at + 9 :]
        (tmp_path / "a.tar.gz").write_bytes(damaged)
        with pytest.raises((FormatError, ReadError), match=r"a\.tar\.gz"):
            convert(tmp_path / "a.tar.gz", tmp_path / "out.ffr")


@pytest.mark.parametrize("shape", ["(1152921504606846976, 4)", "(-2, -3)", "(1000000000000, 0)"])
def test_arrays_that_claim_more_rows_than_their_file_holds(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(118)
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(32)
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises((UsageError, FormatError), match=r"a\.npy"):
        convert(tmp_path / "a.npy", tmp_path / "a.ffr")
    assert os.listdir(tmp_path) == ["a.npy"]


# ---- names ------------------------------------------------------------------------------------


def check_packed(path: Any) -> None:
    with ffserve.PackedFolder(path) as packed:
        assert sorted(map(str, packed.list(recursive=True, list_dir=False))) == sorted(FILES)
        for name, data in FILES.items():
            assert packed.read_one(name).tobytes() == data


def test_names_are_kept_in_ffrecord(tmp_path: Path, folder: Path) -> None:
    # In this order no two members of one sample stand side by side.
    with tarfile.open(tmp_path / "apart.tar", "w") as out:
        for name in sorted(FILES, key=lambda name: (name.rpartition(".")[2], name)):
            entry = tarfile.TarInfo(name)
            entry.size = len(FILES[name])
            out.addfile(entry, io.BytesIO(FILES[name]))
    for source in (folder, tmp_path / "apart.tar"):
        convert(source, tmp_path / "out.ffr", verify=True)
        check_packed(tmp_path / "out.ffr")
    report = convert(tmp_path / "apart.tar", tmp_path / "shards", format="ffrecord", shards=3)
    check_packed(list(report.paths))
    convert(report.paths, tmp_path / "again.ffr")
    check_packed(tmp_path / "again.ffr")
    assert content(tmp_path / "again.ffr") == content(tmp_path / "out.ffr")


def test_members_of_one_sample_became_samples_of_their_own(tmp_path: Path, tar: Path) -> None:
    for options in ({}, {"shards": 2}):
        with pytest.raises(UsageError, match=r"'cats/1' has several members, one of them 'jpg'"):
            convert(tar, tmp_path / "out", format="ffrecord", **options)
    error = error_of("convert", tar, tmp_path / "out.ffr", code=2)
    assert "TFRecord" in error and "--drop-names" in error
    assert not (tmp_path / "out.ffr").exists()


def grouped(path: Any) -> dict[bytes, dict[str, bytes]]:
    found = [example.decode(each) for each in content(path)]
    plain = [{name: value[0] for name, value in features.items()} for features in found]
    return {features.pop("__key__"): features for features in plain}  # type: ignore[misc]


EXAMPLES = {
    b"a": {"txt": b"A"},
    b"cats/1": {"cls": b"7", "jpg": b"one", "seg.png": b"seg"},
    b"cats/2": {"cls": b"", "jpg": bytes(5000)},
    b"noextension": {"data": b"none"},
}


def test_names_become_examples_elsewhere(tmp_path: Path, folder: Path, tar: Path) -> None:
    for source in (folder, tar):
        convert(source, tmp_path / "out.tfrecord")
        assert grouped(tmp_path / "out.tfrecord") == EXAMPLES
        assert len(content(tmp_path / "out.tfrecord")) == len(EXAMPLES)
    report = convert(tar, tmp_path / "shards", format="tfrecord", shards=4)
    assert [len(content(path)) for path in report.paths] == [1, 1, 1, 1]
    assert grouped(report.paths) == EXAMPLES
    convert(folder, tmp_path / "packed.ffr")
    convert(tmp_path / "packed.ffr", tmp_path / "from-packed.tfrecord")
    assert grouped(tmp_path / "from-packed.tfrecord") == EXAMPLES


def test_a_name_that_is_not_utf_8_ended_in_a_traceback(tmp_path: Path) -> None:
    top = os.fsencode(tmp_path / "folder")
    os.makedirs(top + b"/\xe9t\xe9")
    for name, content in ((b"/\xe9t\xe9/\xff.cls", b"7"), (b"/\xe9t\xe9/\xff.txt", b"text")):
        with open(top + name, "wb") as file:
            file.write(content)
    run("pack", os.fsdecode(top), "-o", tmp_path / "a.ffr")
    run("convert", tmp_path / "a.ffr", tmp_path / "b.ffr", "--verify")
    assert (tmp_path / "b.ffr").read_bytes() == (tmp_path / "a.ffr").read_bytes()
    for source in (tmp_path / "a.ffr", os.fsdecode(top)):
        run("convert", source, tmp_path / "c.tfrecord", "--verify")
        with ffserve.open(tmp_path / "c.tfrecord", server="off") as reader:
            [record] = [example.decode(bytes(sample)) for sample in reader]
        assert {name: bytes(value[0]) for name, value in record.items()} == {
            "__key__": b"\xe9t\xe9/\xff",
            "cls": b"7",
            "txt": b"text",
        }
    with open(top + b"/other.\xff", "wb"):
        pass
    for options in ([], ["--shards", "2", "--jobs", "2"]):
        out = tmp_path / "d.tfrecord"
        error = error_of("convert", os.fsdecode(top), out, "--format", "tfrecord", *options, code=2)
        assert "its extension is not UTF-8" in error and "--drop-names" in error
    run("convert", os.fsdecode(top), tmp_path / "e.tfrecord", "--drop-names")


def test_names_can_be_dropped(tmp_path: Path, folder: Path, tar: Path) -> None:
    for source in (folder, tar):
        for target in ("out.ffr", "out.tfrecord"):
            convert(source, tmp_path / target, names="drop")
            assert content(tmp_path / target) == [FILES[name] for name in sorted(FILES)]


@pytest.mark.parametrize(
    ("name", "key", "extension"),
    [
        ("a/b/x.jpg", "a/b/x", "jpg"),
        ("x.seg.png", "x", "seg.png"),
        ("a.b/x", "a.b/x", "data"),
        ("a/.hidden.txt", "a/.hidden", "txt"),
        ("x.", "x", "data"),
    ],
)
def test_key_and_extension(name: str, key: str, extension: str) -> None:
    assert split_name(name) == (key, extension)


def test_two_files_of_one_name(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"two inputs"):
        convert([folder, folder], tmp_path / "out.ffr")
    assert not (tmp_path / "out.ffr").exists()


@pytest.mark.parametrize("name", ["../evil", "a/../../b", "/"])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        out.addfile(tarfile.TarInfo(name))
    with pytest.raises(FormatError, match="invalid member name"):
        convert(tmp_path / "a.tar", tmp_path / "out.ffr")


def test_cut_tar_file(tmp_path: Path, tar: Path) -> None:
    whole = tar.read_bytes()
    for size in (len(whole) // 2, len(whole) // 3, 700 if tar.suffix == ".tar" else 30):
        tar.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            convert(tar, tmp_path / "out.tfrecord")
        assert not (tmp_path / "out.tfrecord").exists()


# ---- shards, again, and damage ----------------------------------------------------------------


def test_finished_shards_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "a.tfrecord", SAMPLES)
    out = tmp_path / "out"
    first = convert(source, out, format="ffrecord", shards=4)
    assert (first.kept, first.samples) == (0, 60)
    inodes = [os.stat(path).st_ino for path in first.paths]
    again = convert(source, out, format="ffrecord", shards=4)
    assert (again.kept, again.samples, again.paths) == (4, 0, first.paths)
    os.unlink(first.paths[2])
    (out / ".PART_00002.ffr.0123456789ab.tmp").write_bytes(b"left by a writer that was killed")
    third = convert(source, out, format="ffrecord", shards=4)
    assert (third.kept, third.samples) == (3, 15) and content(third.paths) == SAMPLES
    assert [os.stat(path).st_ino for path in first.paths][:2] == inodes[:2]


def test_other_conversion_into_the_same_directory_is_refused(tmp_path: Path) -> None:
    source, out = written(tmp_path / "a.tfrecord", SAMPLES), tmp_path / "out"
    convert(source, out, format="ffrecord", shards=4)
    for change in ({"shards": 5}, {"format": "tfrecord"}, {"names": "drop"}):
        with pytest.raises(UsageError, match="contains other files"):
            convert(source, out, **{"format": "ffrecord", "shards": 4, **change})  # type: ignore[arg-type]
    written(tmp_path / "a.tfrecord", SAMPLES[::-1])
    with pytest.raises(UsageError, match="changed input"):
        convert(source, out, format="ffrecord", shards=4)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_bytes(b"mine")
    with pytest.raises(UsageError, match="contains other files"):
        convert(source, tmp_path / "other", format="ffrecord", shards=4)
    assert os.listdir(tmp_path / "other") == ["thesis.txt"]
    (out / PLAN_NAME).write_bytes(b"[garbage")
    with pytest.raises(UsageError, match="contains other files"):
        convert(source, out, format="ffrecord", shards=4)


@pytest.mark.check
def test_finished_shards_stay_when_a_process_fails(tmp_path: Path) -> None:
    source = written(tmp_path / "a.tfrecord", SAMPLES)
    report = convert(source, tmp_path / "out", format="tfrecord", shards=4, jobs=2, verify=True)
    assert content(report.paths) == SAMPLES
    damage(source, 40)
    with pytest.raises(ChecksumError) as caught:
        convert(source, tmp_path / "bad", format="ffrecord", shards=4)
    assert (caught.value.index, caught.value.path) == (40, str(source))
    left = sorted(name for name in os.listdir(tmp_path / "bad") if name[0] != ".")
    assert left == ["PART_00000.ffr", "PART_00001.ffr"]


def test_compressed_shards(tmp_path: Path) -> None:
    source = written(tmp_path / "a.tfrecord.gz", SAMPLES)
    report = convert(source, tmp_path / "out", format="tfrecord", shards=3, compression="gzip")
    assert all(path.endswith(".tfrecord.gz") for path in report.paths)
    assert content(report.paths) == SAMPLES


def test_a_file_that_differs_from_the_input_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "a.tfrecord", SAMPLES)
    real = ffserve.create

    def lying(path: Any, **options: Any) -> Any:
        writer = real(path, **options)
        write = writer.write_batch
        writer.write_batch = lambda data, edges: write(data[::-1].copy(), edges)
        return writer

    monkeypatch.setattr(importlib.import_module("ffserve.convert"), "create", lying)
    with pytest.raises(ChecksumError, match="verification failed"):
        convert(source, tmp_path / "out.ffr", verify=True)
    assert not (tmp_path / "out.ffr").exists()


def test_a_shard_that_could_not_be_read_back_was_kept_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "a.tfrecord", SAMPLES)
    real = ffserve.create

    def spoiling(path: Any, **options: Any) -> Any:
        writer = real(path, **options)
        close = writer.close

        def close_and_damage() -> None:
            close()
            damage(path, 3)

        writer.close = close_and_damage  # type: ignore[method-assign]
        return writer

    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("ffserve.convert"), "create", spoiling)
        with pytest.raises(ChecksumError, match="sample 3"):
            convert(source, tmp_path / "out", format="ffrecord", shards=2, verify=True)
    assert os.listdir(tmp_path / "out") == [PLAN_NAME]
    report = convert(source, tmp_path / "out", format="ffrecord", shards=2, verify=True)
    assert report.kept == 0 and content(report.paths) == SAMPLES


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shards": 0}, "at least 1"),
        ({"jobs": 0}, "at least 1"),
        ({"format": "parquet"}, "unknown format"),
        ({"compression": "snappy"}, "compression"),
        ({"names": "maybe"}, "invalid names"),
        ({"shards": 61}, "cannot split"),
    ],
)
def test_invalid_options(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    source = written(tmp_path / "a.tfrecord", SAMPLES)
    with pytest.raises(UsageError, match=what):
        convert(source, tmp_path / "out.tfrecord", **options)
    assert not (tmp_path / "out.tfrecord").is_file()


def test_invalid_input(tmp_path: Path) -> None:
    source = written(tmp_path / "a.tfrecord", SAMPLES)
    with pytest.raises(ReadError, match="No such file"):
        convert(tmp_path / "none.ffr", tmp_path / "b.ffr")
    with pytest.raises(UsageError, match="also an input"):
        convert(source, source)
    with pytest.raises(UsageError, match="unknown suffix"):
        convert(source, tmp_path / "b.bin")
    (tmp_path / "x").write_bytes(b"neither this nor that")
    with pytest.raises(FormatError, match="neither the content"):
        convert(tmp_path / "x", tmp_path / "b.ffr")
    assert content(source) == SAMPLES


def test_files_of_other_packages_became_one_sample_each(tmp_path: Path) -> None:
    heads = {
        "part-0.parquet": (b"PAR1 and the rest", "a Parquet file", "pyarrow"),
        "a": (b"ARROW1\0\0 and the rest", "an Arrow file", "pyarrow"),
        "data.mdb": (bytes(16) + b"\xde\xc0\xef\xbe", "an LMDB database", "lmdb"),
        "shard.00000.mds": (b"\1\0\0\0", r"a shard of MosaicML streaming \(MDS\)", "streaming"),
        "b": (b"\x83\xafp\xd1\r\x88J?" + bytes(32), "an ArrayRecord file", "array_record"),
        "c": (b"Obj\x01", "an Avro file", "fastavro"),
    }
    for k, (name, (head, kind, package)) in enumerate(heads.items()):
        (tmp_path / f"{k}").mkdir()
        (tmp_path / f"{k}" / "other.bin").write_bytes(b"other")
        file = tmp_path / f"{k}" / name
        file.write_bytes(head)
        if name != "data.mdb":  # a directory with it is the database
            alone = "read it with fastavro" if package == "fastavro" else "convert it by itself"
            with pytest.raises(UsageError, match=rf"{kind} with many records.*{alone}"):
                convert(tmp_path / f"{k}", tmp_path / "out.ffr")
        with pytest.raises(FormatError, match=rf"this is {kind}, not a record.*{package}"):
            ffserve.open(file, server="off")
    with tarfile.open(tmp_path / "0" / "a", "w") as out:
        out.addfile(tarfile.TarInfo("x"))
    with ffserve.open(tmp_path / "0" / "a", server="off") as reader:
        assert len(reader) == 0  # of a name without an extension
    with pytest.raises(UsageError, match=r"a tar file with many records.*convert it by itself"):
        convert(tmp_path / "0", tmp_path / "out.ffr")
    assert not (tmp_path / "out.ffr").exists()
    text_of("pack", tmp_path / "0", "-o", tmp_path / "files.ffr")
    assert content(tmp_path / "files.ffr")[2] == heads["part-0.parquet"][0]


def test_pack_replaced_a_file_without_a_word(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "a.ffr"
    out.write_bytes(b"precious")
    error = error_of("pack", folder, "-o", out, code=2)
    assert "exists" in error and "--force" in error and out.read_bytes() == b"precious"
    text_of("pack", folder, "-o", out, "--force")
    check_packed(out)


@pytest.mark.check
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    block = bytes(1 << 20)
    source = written(tmp_path / "a.tfrecord", [block] * 200)
    tracemalloc.start()
    try:
        convert(source, tmp_path / "b.ffr")
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()


# ---- the command ------------------------------------------------------------------------------


def test_command(tmp_path: Path, folder: Path) -> None:
    source = written(tmp_path / "a.tfrecord.gz", SAMPLES)
    said = text_of("convert", source, tmp_path / "b.ffr", "--verify")
    assert said.startswith("60 samples, ") and ", verified" in said
    assert content(tmp_path / "b.ffr") == SAMPLES
    command = ["convert", str(folder), str(tmp_path / "out"), "--format", "ffrecord", "--shards=2"]
    facts = json.loads(text_of(*command, "--jobs=2", "--json"))
    assert facts["samples"] == len(FILES) and len(facts["paths"]) == 2 and facts["kept"] == 0
    assert "(2 of them from an earlier run)" in text_of(*command)
    assert run("cat", facts["paths"][0], "cats/1.jpg").stdout == b"one"
    assert "unknown suffix" in error_of("convert", source, tmp_path / "x.zip", code=2)
    damaged = GOLDEN / "tfrecord" / "bad_data.tfrecord"
    assert "sample 3" in error_of("convert", damaged, tmp_path / "c.ffr", code=1)
    assert not (tmp_path / "c.ffr").exists()


@pytest.mark.check
def test_recordio_with_its_options(tmp_path: Path) -> None:
    source = written(tmp_path / "a.tfrecord", SAMPLES)
    text_of(
        *("convert", source, tmp_path / "go.recordio", "--dialect=go", "--compress=gzip"),
        *("--max-chunk-size", "100KiB", "--verify"),
    )
    [facts] = json.loads(text_of("inspect", "--json", tmp_path / "go.recordio"))
    assert facts["samples"] == 60 and content(tmp_path / "go.recordio") == SAMPLES
    with pytest.raises(UsageError, match="dialect"):
        convert(source, tmp_path / "b.ffr", dialect="go")
    report = convert(source, tmp_path / "out", format="recordio", shards=3, jobs=2)
    assert content(report.paths) == SAMPLES
