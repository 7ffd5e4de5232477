"""convert: what other packages write, their columns, and shards after a SIGKILL. pyarrow stands for
all packages; the others are in tests/interop."""

from __future__ import annotations

import datetime
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import error_of, text_of
from daemon import sample

import ffserve
from ffserve.convert import convert
from ffserve.convert.kinds import KINDS, class_folders, module_of
from ffserve.errors import FormatError, MissingFile, UsageError
from ffserve.folders import pack

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SAMPLES = [sample(i) for i in range(60)]


def table(first: int = 0, stop: int = 60) -> Any:
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    rows = range(first, stop)
    return arrow.table(
        {
            "image": arrow.array([{"bytes": SAMPLES[k], "path": f"{k}.jpg"} for k in rows], kind),
            "label": list(rows),
            "text": [f"täxt {k}" for k in rows],
        }
    )


def in_parquet(path: Path, rows: Any) -> Path:
    parquet.write_table(rows, path, row_group_size=7)
    return path


def as_file(path: Path, rows: Any) -> Path:
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=7)
    return path


def as_stream(path: Path, rows: Any) -> Path:
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=7)
    return path


def content(paths: Any, **options: Any) -> list[bytes]:
    with ffserve.open(paths, server="off", **options) as reader:
        return [bytes(each) for each in reader]


def rows_of(paths: Any) -> list[tuple[str, dict[str, bytes]]]:
    with ffserve.open(paths, server="off") as reader:
        rows = [
            {name: bytes(value) for name, value in row.items() if value is not None}
            for row in reader
        ]
        return list(zip(reader.names, rows, strict=True))


# ---- columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 7])
@pytest.mark.parametrize("write", [in_parquet, as_file, as_stream])
def test_a_column_becomes_the_samples(tmp_path: Path, write: Any, shards: int) -> None:
    name = "a.parquet" if write is in_parquet else "a.arrow"
    source = write(tmp_path / name, table())
    for format in ("ffrecord", "tfrecord", "recordio"):
        out = tmp_path / format
        report = convert(source, out, format=format, shards=shards, fields=["image"], verify=True)
        assert content(report.paths) == SAMPLES


def test_columns_become_fields_of_tar(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    in_parquet(tmp_path / "in" / "0.parquet", table(0, 25))
    in_parquet(tmp_path / "in" / "1.parquet", table(25, 60))
    (tmp_path / "in" / "dataset_info.json").write_text("{}")
    report = convert(
        tmp_path / "in", tmp_path / "out", format="tar", shards=3, verify=True,
        fields=["jpg=image", "cls=label", "txt=text"],
    )  # fmt: skip
    assert rows_of(report.paths) == [
        (f"{k:09}", {"jpg": SAMPLES[k], "cls": b"%d" % k, "txt": f"täxt {k}".encode()})
        for k in range(60)
    ]
    convert(tmp_path / "in", tmp_path / "all.tar")
    with ffserve.open(tmp_path / "all.tar", server="off") as reader:
        assert sorted(reader.fields) == ["image", "label", "text"]


def test_values_of_all_types(tmp_path: Path) -> None:
    values = {
        "bytes": b"\x00\xff", "large": b"long", "text": "é", "int": -7, "float": 0.5, "true": True,
        "list": [1, 2], "struct": {"a": "é", "b": None}, "none": None,
        "date": datetime.date(2026, 11, 28), "category": "red",
    }  # fmt: skip
    types = {
        "large": arrow.large_binary(), "none": arrow.binary(),
        "category": arrow.dictionary(arrow.int8(), arrow.string()),
    }  # fmt: skip
    columns = {k: arrow.array([v], types.get(k)) for k, v in values.items() if k != "category"}
    columns["category"] = arrow.array(["red"]).dictionary_encode()
    for write in (in_parquet, as_file):
        convert(write(tmp_path / f"{write.__name__}", arrow.table(columns)), tmp_path / "out.tar")
        assert rows_of(tmp_path / "out.tar")[0][1] == {
            "bytes": b"\x00\xff", "large": b"long", "text": "é".encode(), "int": b"-7",
            "float": b"0.5", "true": b"true", "list": b"[1, 2]",
            "struct": '{"a": "é", "b": null}'.encode(), "date": b'"2026-11-28"', "category": b"red",
        }  # fmt: skip


def test_what_a_format_cannot_hold_is_said(tmp_path: Path) -> None:
    source = in_parquet(tmp_path / "a.parquet", table())
    error = error_of("convert", source, tmp_path / "out.ffr", code=2)
    assert "'image', 'label', 'text'" in error and "--fields" in error and "--format tar" in error
    error = error_of("convert", source, tmp_path / "out.ffr", "--fields", "jpg", code=2)
    assert "no column 'jpg'; there are 'image', 'label', 'text'" in error
    assert "invalid field" in error_of(
        "convert", source, tmp_path / "out.ffr", "--fields", "a=", code=2
    )
    half = arrow.table({"x": arrow.array([b"a", None], arrow.binary())})
    with pytest.raises(UsageError, match="sample 1 has none of the columns 'x'"):
        convert(in_parquet(tmp_path / "half.parquet", half), tmp_path / "out.ffr")
    nested = arrow.table({"x": [[b"a"]]})
    with pytest.raises(UsageError, match="bytes within a list"):
        convert(in_parquet(tmp_path / "nested.parquet", nested), tmp_path / "out.ffr")
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    outside = arrow.table({"image": arrow.array([{"bytes": None, "path": "a.jpg"}], kind)})
    with pytest.raises(UsageError, match=r"the path of 'a\.jpg', but not its content"):
        convert(in_parquet(tmp_path / "outside.parquet", outside), tmp_path / "out.ffr")
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(UsageError, match="no fields to choose from"):
        convert(tmp_path / "a.npy", tmp_path / "out.ffr", fields=["x"])
    assert not (tmp_path / "out.ffr").exists()


def test_one_field_of_tar_files(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as out:
        for k in range(30):
            for field, data in (("jpg", SAMPLES[k]), ("cls", b"%d" % k)):
                entry = tarfile.TarInfo(f"x/{k:03}.{field}")
                entry.size = len(data)
                out.addfile(entry, io.BytesIO(data))
    report = convert(
        tmp_path / "a.tar.gz", tmp_path / "out", format="ffrecord", shards=4, fields=["jpg"]
    )
    assert content(report.paths) == SAMPLES[:30]
    report = convert(tmp_path / "a.tar.gz", tmp_path / "t", format="tar", shards=4, fields=["cls"])
    with ffserve.open(report.paths, server="off") as reader:
        assert reader.fields == ["cls"] and reader.names == [f"x/{k:03}" for k in range(30)]
        assert [bytes(each) for each in reader] == [b"%d" % k for k in range(30)]
    with pytest.raises(UsageError, match="sample 0 has none of the columns 'png'; it has 'jpg'"):
        convert(tmp_path / "a.tar.gz", tmp_path / "out.ffr", fields=["png"])


# ---- kinds ------------------------------------------------------------------------------------


def test_damaged_files_and_unknown_kinds(tmp_path: Path) -> None:
    whole = in_parquet(tmp_path / "a.parquet", table()).read_bytes()
    for cut in (8, len(whole) // 2, len(whole) - 3):
        (tmp_path / "a.parquet").write_bytes(whole[:cut])
        with pytest.raises(FormatError, match=r"a\.parquet"):
            convert(tmp_path / "a.parquet", tmp_path / "out.ffr", fields=["image"])
    (tmp_path / "a.parquet").write_bytes(whole)
    (tmp_path / "a.parquet").rename(tmp_path / "odd")
    report = convert(tmp_path / "odd", tmp_path / "b.ffr", kind="parquet", fields=["image"])
    assert content(report.paths) == SAMPLES
    with pytest.raises(UsageError, match="unknown kind of input 'csv'"):
        convert(tmp_path / "odd", tmp_path / "out.ffr", kind="csv")
    with pytest.raises(FormatError, match="odd"):
        convert(tmp_path / "odd", tmp_path / "out.ffr", kind="arrow")
    with pytest.raises(MissingFile):
        convert(tmp_path / "none", tmp_path / "out.ffr", kind="arrow")
    with pytest.raises(UsageError, match=r"no file ending in \.parquet"):
        convert(tmp_path, tmp_path / "out.ffr", kind="parquet")


def test_results_that_hugging_face_keeps_beside_a_data_set_were_converted_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "saved").mkdir()
    for name, first in (("data-1.arrow", 0), ("data-0.arrow", 30)):
        as_stream(tmp_path / "saved" / name, table(first, first + 30))
    as_stream(tmp_path / "saved" / "cache-0.arrow", arrow.table({"indices": [3, 1, 2]}))
    files = [{"filename": name} for name in ("data-1.arrow", "data-0.arrow")]
    (tmp_path / "saved" / "state.json").write_text(json.dumps({"_data_files": files}))
    convert(tmp_path / "saved", tmp_path / "out.ffr", fields=["image"])
    assert content(tmp_path / "out.ffr") == SAMPLES


def test_a_stream_that_was_cut_between_two_batches_lost_rows(tmp_path: Path) -> None:
    whole = as_stream(tmp_path / "a.arrow", table()).read_bytes()
    with arrow.OSFile(str(tmp_path / "cut.arrow"), "wb") as file:
        writer = arrow.ipc.new_stream(file, table().schema)
        for batch in table().to_batches(max_chunksize=7)[:3]:
            writer.write_batch(batch)
        size = file.tell()
        writer.close()
    (tmp_path / "cut.arrow").write_bytes(whole[:size])
    with arrow.memory_map(str(tmp_path / "cut.arrow")) as file:
        assert arrow.ipc.open_stream(file).read_all().num_rows == 21  # as pyarrow reads it
    with pytest.raises(FormatError, match="no mark of its end"):
        convert(tmp_path / "cut.arrow", tmp_path / "out.ffr", fields=["image"])


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lmdb").mkdir()
    (tmp_path / "lmdb" / "data.mdb").write_bytes(bytes(16) + b"\xde\xc0\xef\xbe" + bytes(4096))
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds" / "index.json").write_text(
        json.dumps({"version": 2, "shards": [{"format": "mds", "version": 2}]})
    )
    (tmp_path / "lit").mkdir()
    index = {"chunks": [], "config": {"data_spec": "[1, null]", "data_format": ["bytes"]}}
    (tmp_path / "lit" / "index.json").write_text(json.dumps(index))
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    (tmp_path / "a.array_record").write_bytes(b"\x83\xafp\xd1\r\x88J?" + bytes(32))
    for name, package in (
        ("lmdb", "lmdb"), ("mds", "mosaicml-streaming"), ("lit", "litdata"), ("a.h5", "h5py"),
        ("a.array_record", "array-record"),
    ):  # fmt: skip
        for module in (
            "lmdb", "h5py", "streaming.base.format", "litdata.utilities._pytree",
            "array_record.python.array_record_module",
        ):  # fmt: skip
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=rf"read by {package}, .*pip install {package}"):
            convert(tmp_path / name, tmp_path / "out.ffr")


def test_every_kind_has_what_a_kind_has() -> None:
    help_text = text_of("convert", "--help")
    howto = Path(__file__).parents[2] / "docs" / "howto" / "convert.md"
    rows = re.findall(r"^\| (`.+?) \|", howto.read_text(), re.M)
    assert {*KINDS} <= set(re.findall(r"`(\w+)`", " ".join(rows)))
    for name in KINDS:
        assert {"SUFFIXES", "recognizes", "open_input"} <= vars(module_of(name)).keys()
        assert name in help_text


# ---- a directory for each class ---------------------------------------------------------------


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    for k, name in enumerate(("dogs/b.JPG", "cats/2/x.png", "dogs/a.jpg", "cats/1.jpeg")):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(SAMPLES[k])
    return tmp_path / "pictures"


def test_class_folders_are_packed_as_by_pack(tmp_path: Path, classes: Path) -> None:
    convert(classes, tmp_path / "a.ffr", verify=True)
    pack([classes], tmp_path / "b.ffr")
    assert (tmp_path / "a.ffr").read_bytes() == (tmp_path / "b.ffr").read_bytes()
    convert(classes, tmp_path / "c.tfrecord", names="drop")
    assert len(content(tmp_path / "c.tfrecord")) == 4


def test_class_folders_have_classes_in_tar(tmp_path: Path, classes: Path) -> None:
    expected = [
        ("cats/1", {"jpeg": SAMPLES[3], "cls": b"0"}),
        ("cats/2/x", {"png": SAMPLES[1], "cls": b"0"}),
        ("dogs/a", {"jpg": SAMPLES[2], "cls": b"1"}),
        ("dogs/b", {"jpg": SAMPLES[0], "cls": b"1"}),
    ]
    for options in ({}, {"shards": 3}, {"kind": "imagefolder"}):
        out = tmp_path / f"out{len(options)}{'kind' in options}"
        report = convert(classes, out, format="tar", verify=True, **options)
        assert rows_of(report.paths) == expected
    report = convert(classes, tmp_path / "labels.tfrecord", fields=["cls"])
    assert content(report.paths) == [b"0", b"0", b"1", b"1"]


def test_pictures_are_those_of_the_torch_side() -> None:
    pytest.importorskip("torch")
    from ffserve.torch import image_folder

    assert class_folders.PICTURES == image_folder.IMG_EXTENSIONS


# ---- killed -----------------------------------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize("kind", ["parquet", "stream", "classes"])
@pytest.mark.parametrize("format", ["ffrecord", "tar"])
def test_a_killed_conversion_goes_on_to_the_same_bytes(
    tmp_path: Path, classes: Path, kind: str, format: str
) -> None:
    source, choice = classes, []
    if kind == "classes":
        for k in range(60):
            (classes / "cats" / f"{k}.jpg").write_bytes(SAMPLES[k])
    else:
        write, choice = (in_parquet, as_stream)[kind == "stream"], ["--fields", "image"]
        source = write(tmp_path / f"a.{'arrow' if kind == 'stream' else kind}", table())
    options = ["--format", format, "--shards", "30", "--jobs", "1", *choice]
    text_of("convert", source, tmp_path / "whole", *options)
    killed = tmp_path / "killed"
    program = [sys.executable, "-m", "ffserve", "convert", str(source), str(killed), *options]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None and not list(killed.glob("PART*")):
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    _, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL, stderr
    before = {path: os.stat(path).st_ino for path in killed.glob("PART*")}
    assert 0 < len(before) < 30
    said = text_of("convert", source, killed, *options, "--verify")
    assert f"({len(before)} of them from an earlier run)" in said
    assert all(os.stat(path).st_ino == inode for path, inode in before.items())
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert whole == {path.name: path.read_bytes() for path in killed.iterdir()}
