"""The names of a view and the numbers of its nodes, without a mount."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffserve.errors import UsageError
from ffserve.view.tree import FOLDER_COUNT, ROOT, Shown, Tree, names_of, unusable

NAMES = st.text(min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..") and not {"/", "\0"} & {*name} and name.isprintable()
)


def folders(samples: int) -> st.SearchStrategy[OrderedDict[str, Any]]:
    """Folder indices."""
    leaves = st.integers(0, samples - 1)
    return st.recursive(
        st.dictionaries(NAMES, leaves, max_size=4).map(OrderedDict),
        lambda inner: st.dictionaries(NAMES, st.one_of(leaves, inner), max_size=4).map(OrderedDict),
        max_leaves=20,
    )


def walk(tree: Tree, directory: int = ROOT, above: str = "") -> dict[str, int]:
    """Return all nodes by path, and check that each is found by its name and by its position."""
    found: dict[str, int] = {}
    entries = list(tree.entries(directory, 0))
    assert [name for name, _ in entries] == sorted(name for name, _ in entries)
    for position, (name, node) in enumerate(entries):
        assert tree.look_up(directory, name) == node
        if position < 20:
            assert next(tree.entries(directory, position)) == (name, node)
        path = f"{above}/{name.decode()}"
        found[path] = node
        if tree.node(node).directory:
            assert tree.parent(node) == directory
            found.update(walk(tree, node, path))
    return found


def flat(folder: OrderedDict[str, Any], above: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in folder.items():
        found[f"{above}/{name}"] = None if isinstance(each, OrderedDict) else each
        if isinstance(each, OrderedDict):
            found.update(flat(each, f"{above}/{name}"))
    return found


@given(folder=folders(50), first=st.integers(0, 3))
def test_a_folder_has_its_names(folder: OrderedDict[str, Any], first: int) -> None:
    tree = Tree([Shown("a.ffr", 0, first), Shown("b.ffr", first, 51, folder)])
    wanted = flat(folder, "/samples/b.ffr")
    found = {path: node for path, node in walk(tree).items() if path.startswith("/samples/b.ffr/")}
    assert found.keys() == wanted.keys()
    for path, node in found.items():
        index = wanted[path]
        assert tree.node(node) == ((True, 1, -1) if index is None else (False, 1, first + index))
    assert tree.look_up(tree.look_up(ROOT, b"samples"), b"missing") == 0


@pytest.mark.parametrize("count", [0, 1, 10, FOLDER_COUNT, FOLDER_COUNT + 1, 10 * FOLDER_COUNT + 1])
def test_samples_without_names_have_numbers(count: int) -> None:
    tree = Tree([Shown("x", 0, 5), Shown("e", 5, 0), Shown("y", 5, count, suffix=".jpg")])
    found = walk(tree)
    digits = len(str(max(count - 1, 0)))
    mine = {p: n for p, n in found.items() if p.startswith("/samples/y/") and p.endswith(".jpg")}
    assert len(mine) == count
    for path, node in mine.items():
        _, _, _, folder, name = path.split("/")
        number = int(name.removesuffix(".jpg"))
        assert int(folder) == number // FOLDER_COUNT and len(name) == digits + 4
        assert tree.node(node) == (False, 2, 5 + number)
    assert tree.count == len(found) + 1


@pytest.mark.parametrize(
    "name",
    [b"", b"3", b"003", b"05", b"+1", b"-1", b" 1", b"1\n", b"0x", b"\xd9\xa1\xd9\xa2", b"99"],
)
def test_no_other_text_is_a_number(name: bytes) -> None:
    tree = Tree([Shown("x", 0, 12)])
    folder = tree.look_up(tree.look_up(tree.look_up(ROOT, b"samples"), b"x"), b"0")
    assert tree.look_up(folder, name) == (tree.look_up(folder, b"05") if name == b"05" else 0)


def test_files_of_one_name_are_told_apart_by_their_directories() -> None:
    assert names_of(["/a/x", "/a/y"]) == ["x", "y"]
    assert names_of(["/d/a/x", "/d/b/x", "/d/y"]) == ["a/x", "b/x", "y"]
    remote = ["s3://bucket/a/x?versionId=1", "https://host/b/x?secret", "/d/x"]
    assert names_of(remote) == ["s3/bucket/a/x?versionId=1", "https/host/b/x", "d/x"]
    assert names_of(["https://host/b/x?secret"]) == ["x"]
    tree = Tree([Shown("a/x", 0, 1), Shown("b/x", 1, 1, remote=True)])
    assert "/shards/b/x" not in walk(tree)
    assert "/shards/a/x" in walk(tree) and "/samples/b/x/0/0" in walk(tree)
    with pytest.raises(UsageError, match="same name"):
        Tree([Shown("x", 0, 1), Shown("x", 1, 1)])


def test_names_that_no_file_can_have() -> None:
    assert unusable(OrderedDict({"a\nb": 0, "x" * 255: 1, "\udcff": 2})) is None
    assert "256 bytes" in str(unusable(OrderedDict({"x" * 256: 0})))
    assert "256 bytes" in str(unusable(OrderedDict(d=OrderedDict({"é" * 128: 0}))))
    assert "twice" in str(unusable(OrderedDict({"é": 0, "\udcc3\udca9": 1})))
    assert "encoding" in str(unusable(OrderedDict({"\ud800": 0})))
