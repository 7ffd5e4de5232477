"""Labels of packed files: `pack --labels`, and what readers and data sets make of them."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ffserve
from ffserve import PackedFolder
from ffserve.cli import cli
from ffserve.errors import FormatError, MissingFile, UsageError
from ffserve.folders import decode, decode_labelled, label_tables, pack
from ffserve.folders.folder_index import MAGIC, encode

NAMES = ["a/0.txt", "a/1.txt", "b/2.txt", "b/caf\udce9.txt", "top.txt"]
ROWS = [{"age": k, "weight": k / 2, "text": f"{k} é"} for k in range(5)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in NAMES:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode("utf-8", "surrogateescape"))
    return tmp_path / "tree"


def table(path: Path, key: str = "name") -> Path:
    """Write the labels to a file, in another order than that of the names."""
    rows = [{key: name, **row} for name, row in zip(NAMES, ROWS, strict=True)][::-1]
    if path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    elif key == "object":
        path.write_text(json.dumps(dict(zip(NAMES, ROWS, strict=True))))
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize(
    ("file", "key"),
    [("a.csv", "name"), ("a.csv", "file_name"), ("a.json", "name"), ("a.json", "object")],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_labels_come_back_by_index(tree: Path, file: str, key: str, shards: int) -> None:
    out = tree.parent / ("one.ffr" if shards == 1 else "many")
    pack([tree], out, shards=shards, labels=table(tree.parent / file, key))
    with ffserve.open(out, server="off") as reader:
        assert len(reader) == 5 and reader.names == NAMES
        assert reader.label_names == ["age", "weight", "text"]
        assert reader.labels(range(5)) == ROWS and reader.labels([3, 0]) == [ROWS[3], ROWS[0]]
        copy = pickle.loads(pickle.dumps(reader))
        assert copy.labels([4]) == [ROWS[4]]

    async def read() -> list[dict[str, Any]]:
        async with ffserve.aio.open(out, server="off") as reader:
            return await reader.labels([1])

    assert asyncio.run(read()) == [ROWS[1]]


def test_other_programs_read_the_folder_as_one_without_labels(tree: Path) -> None:
    out = tree.parent / "one.ffr"
    pack([tree], out, labels=table(tree.parent / "a.json"))
    with ffserve.FileReader(out) as reader:
        index = bytes(reader.read_one(5))
    with PackedFolder(out) as folder:
        assert folder.num_files() == 5
    assert pickle.loads(index[len(MAGIC) :])["top.txt"] == 4  # as the original unpickles it
    assert decode(index, 5) == decode_labelled(index, 5)[0]


def test_parquet(tree: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    names = NAMES[:3] + NAMES[4:]
    (tree / NAMES[3]).unlink()
    boxes = [[k, k + 1] for k in range(4)]
    columns = {"file_name": names, "boxes": boxes, "kind": ["x", None, "y", "z"]}
    pa.parquet = __import__("pyarrow.parquet").parquet
    pa.parquet.write_table(pa.table(columns), tree.parent / "a.parquet")
    pack([tree], tree.parent / "one.ffr", labels=tree.parent / "a.parquet")
    with ffserve.open(tree.parent / "one.ffr") as reader:
        assert reader.labels([1]) == [{"boxes": [1, 2], "kind": None}]


def test_labels_that_do_not_fit(tree: Path) -> None:
    out, here = tree.parent / "one.ffr", tree.parent
    for name, text, message in (
        ("a.txt", "", "unknown type"),
        ("a.csv", "label,x\n1,2\n", "no column with the names"),
        ("a.csv", "name,x\na/0.txt,2\n", "4 files .*'a/1.txt'.* and 1 more.* without a label"),
        ("a.csv", "name,x\na/0.txt,2\na/0.txt,3\n", "'a/0.txt' comes twice"),
        ("a.csv", "name,x\na/0.txt,2\na/1.txt,2,3\n", "line 3 has more values than"),
        ("a.csv", "name,x,y\na/0.txt,2,3\na/1.txt,2\n", "line 3 has fewer values than"),
        ("a.json", '{"a/0.txt": 1, "a/0.txt": 2}', "'a/0.txt' comes twice"),
        ("a.json", '[{"name": "a/0.txt", "x": 1, "x": 2}]', "'x' comes twice"),
        ("a.json", "{", "cannot read the labels"),
        ("a.json", "3", "neither an object nor an array"),
        ("a.json", json.dumps({"a/0.txt": {"x": {"y": 1}}}), "is a dict, which cannot be stored"),
        ("a.json", json.dumps(dict.fromkeys([*NAMES, "b/x"], 1)), r"'b/x'.* not in the input"),
    ):
        (here / name).write_text(text)
        with pytest.raises(UsageError, match=message) as caught:
            pack([tree], out, labels=here / name)
        assert caught.value.path == str(here / name) and not out.exists()
    with pytest.raises(MissingFile):
        pack([tree], out, labels=here / "none.csv")
    pack([tree], out)
    with ffserve.open(out) as reader:
        assert reader.label_names == []
        with pytest.raises(UsageError, match=r"no labels.*pack --labels"):
            reader.labels([0])


@pytest.mark.parametrize(
    ("written", "typed"),
    [
        (["1_1", "11"], None),
        (["007", "7"], None),
        ([" 1", "1"], None),
        (["1e400", "1e500"], None),
        (["1.0", "nan"], None),
        (["-7", "0"], [-7, 0]),
        (["-0.5", "1e-3"], [-0.5, 1e-3]),
    ],
)
def test_texts_that_python_takes_for_numbers_were_merged(
    tmp_path: Path, written: list[str], typed: list[Any] | None
) -> None:
    rows = "".join(f"{k},{text}\n" for k, text in enumerate(written))
    (tmp_path / "a.csv").write_text(f"name,x\n{rows}")
    found = label_tables.read(str(tmp_path / "a.csv"))
    assert [row["x"] for row in found.values()] == (typed or written)


def test_a_label_called_name_replaced_the_name_of_the_file(tmp_path: Path) -> None:
    rows = {"a/0.txt": {"name": "Tom", "age": 3}, "a/1.txt": {"name": "Tom", "age": 4}}
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert label_tables.read(str(tmp_path / "a.json")) == rows


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
def test_the_first_of_several_threads_saw_labels_without_values(tmp_path: Path) -> None:
    columns = {f"x{k}": [k] * 300 for k in range(300)}
    index = encode(OrderedDict((str(k), k) for k in range(300))) + label_tables.encode(columns)
    with ffserve.create(tmp_path / "a.ffr") as writer:
        for sample in [b"x"] * 300 + [index]:
            writer.write(sample)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(10):
            with ffserve.open(tmp_path / "a.ffr", server="off") as reader:
                asked = [threads.submit(reader.labels, [299]) for _ in range(8)]
                assert all(None not in each.result()[0].values() for each in asked)


def test_a_damaged_table_is_refused() -> None:
    index = encode(OrderedDict(a=0))
    for table in (b"", b"[]", b'{"x": 1}', b'{"x": [1, 2]}', b"[" * 100_000, b"\xff"):
        with pytest.raises(FormatError, match="invalid table of labels"):
            decode_labelled(index + label_tables.MARK + table, 1)
    with pytest.raises(FormatError, match="left after STOP"):
        decode_labelled(index + b"x", 1)


def test_the_command(tree: Path) -> None:
    labels, out = table(tree.parent / "a.csv"), tree.parent / "one.ffr"
    done = CliRunner().invoke(cli, ["pack", str(tree), "-o", str(out), "--labels", str(labels)])
    assert done.exit_code == 0, done.output
    with ffserve.open(out) as reader:
        assert reader.labels([2]) == [ROWS[2]]
