"""Tar files that webdataset writes, and files that it reads: the same samples on both sides."""

from __future__ import annotations

import itertools
import tarfile
from pathlib import Path
from typing import Any

import pytest

import ffserve

pytestmark = [
    pytest.mark.interop,
    # webdataset leaves its files to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

webdataset = pytest.importorskip("webdataset", reason="needs webdataset (make interop)")


def theirs(paths: list[str]) -> list[tuple[str, dict[str, bytes]]]:
    """Return the keys and fields that webdataset reads."""
    pipeline = webdataset.WebDataset(paths, shardshuffle=False)
    return [
        (each["__key__"], {k: v for k, v in each.items() if not k.startswith("__")})
        for each in pipeline
    ]


def ours(paths: list[str], **options: Any) -> list[tuple[str, dict[str, bytes]]]:
    with ffserve.open(paths, server="off", **options) as reader:
        rows = [reader[k] for k in range(len(reader))]
        return [
            (key, {name: bytes(each) for name, each in sample.items() if each is not None})
            for key, sample in zip(reader.names, rows, strict=True)
        ]


def test_files_of_its_writer(tmp_path: Path) -> None:
    pattern = str(tmp_path / "train-%04d.tar")
    with webdataset.ShardWriter(pattern, maxcount=100, verbose=0) as sink:
        for k in range(350):
            sample = {"__key__": f"some/where/{k:06}", "txt": f"text {k}", "cls": k % 10}
            if k % 7:
                sample["seg.json"] = {"number": k}
            sink.write(sample)
    paths = sorted(map(str, tmp_path.glob("*.tar")))
    assert len(paths) == 4
    found = ours(paths)
    assert found == theirs(paths) and len(found) == 350
    assert found[8][1]["seg.json"] == b'{"number": 8}'


def test_files_of_ours(tmp_path: Path) -> None:
    path = str(tmp_path / "ours.tar")
    with ffserve.create(path) as writer:
        for k in range(120):
            writer.write({"txt": b"text %d" % k, "a.b": b"x" * k}, key="deep/" * (k % 50) + f"{k}")
    assert ours([path]) == theirs([path])


def test_names_of_all_kinds(tmp_path: Path) -> None:
    """Members that webdataset leaves out are left out here, and the others are grouped alike."""
    names = [
        "./0001.jpg", "./0001.CLS", "0002.jpg", "a.b/0003.seg.png", "a.b/0003.jpg", "noextension",
        "__pycache__/x.pyc", "__x__", "0004.jpg", "0002.jpg", "0002.cls",
    ]  # fmt: skip
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as out:
        for name in itertools.chain(["d"], names):
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name == "d" else tarfile.REGTYPE
            out.addfile(info)
    assert ours([str(path)]) == theirs([str(path)])
