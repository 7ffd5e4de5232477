"""Commands over tar files: members, fields, and that their contents have no checksums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import error_of, text_of
from tar_files import numbered, write

from ffserve.errors import FormatError
from ffserve.view.tree import folder_of


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "x.tar", numbered(40, irregular=True))


def test_inspect(path: str) -> None:
    text = text_of("inspect", path)
    assert "of headers only, none of contents" in text and "jpg, json, cls" in text
    [facts] = json.loads(text_of("inspect", "--json", path))
    assert (facts["samples"], facts["members"], facts["skipped_files"]) == (40, 106, 0)
    assert facts["fields"] == ["jpg", "json", "cls"]


def test_ls_and_cat(path: str) -> None:
    rows = json.loads(text_of("ls", "--json", path))
    assert [row["name"] for row in rows[:3]] == ["d/000000.jpg", "d/000000.json", "d/000001.jpg"]
    assert {row["checksum"] for row in rows} == {None} and len(rows) == 106
    assert "-         d/000001.cls" in text_of("ls", path)
    assert text_of("cat", path, "d/000001.cls") == text_of("cat", path, "3") == "1"
    assert "no sample has the name" in error_of("cat", path, "nothing", code=2)


def test_index_counts_samples(path: str) -> None:
    assert text_of("index", path) == "1 file indexed, 40 samples\n"


def test_verify(path: str, tmp_path: Path) -> None:
    text = text_of("verify", path)
    assert "1 file, 106 members" in text
    assert "all readable\n1 tar file without checksums of contents" in text
    assert json.loads(text_of("verify", "--json", path))["unverified"] == [path]
    content = bytearray(Path(path).read_bytes())
    content[10] ^= 1  # of a name
    (tmp_path / "bad.tar").write_bytes(content)
    assert "does not match its checksum" in text_of("verify", tmp_path / "bad.tar", code=1)
    (tmp_path / "cut.tar").write_bytes(content[512:20_000])
    assert "cut.tar: sample 19: " in text_of("verify", tmp_path / "cut.tar", code=1)


def test_names_in_a_view() -> None:
    assert folder_of(["./a/b.jpg", "a/c.jpg", "d"], "x") == {"a": {"b.jpg": 0, "c.jpg": 1}, "d": 2}
    for names in (["../x.jpg"], ["a.b", "a.b"], ["a.b", "a.b/c.d"], ["a.b/c.d", "a.b"]):
        with pytest.raises(FormatError, match="cannot be a file here"):
            folder_of(names, "x")
