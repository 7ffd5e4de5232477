"""Schemes: a module in their folder is all that a new one needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import serving

import ffserve
from ffserve.errors import AccessDenied, MissingFile, UsageError
from ffserve.store import origin, schemes
from ffserve.store.credentials import Access, collect, served
from ffserve.store.fetching import listing
from ffserve.store.urls import has_magic, shown

pytest.importorskip("fsspec")

FOLDER = '''
"""Files below a directory, which only the process of a client knows."""

import importlib
import os

from ffserve.store.schemes.scheme import Scheme


class Folder(Scheme):
    name, protocols, package, module = "folder", ("folder",), "folder-files", "json"
    has_query = True
    options = {"root": str}
    settings = ("FOLDER_",)
    credential_errors = ("FolderLocked",)

    def collect(self, settings):
        return {"root": os.environ["FOLDER_ROOT"]}

    def connect(self, url, options):
        dirs = importlib.import_module("fsspec.implementations.dirfs")
        system = dirs.DirFileSystem(options["root"], target_protocol="file")
        return system, self.path_in(system, url)

    def connect_own(self, url, settings):
        return self.connect(url, {"root": os.environ["FOLDER_ROOT"]})

    def path_in(self, system, url):
        return url.partition("://")[2].partition("?")[0]


SCHEME = Folder()
'''
LOST = '''
"""A scheme whose package nobody has."""

import importlib

from ffserve.store.schemes.scheme import Scheme


class Lost(Scheme):
    name, protocols, package, module = "lost", ("lost",), "lost-files", "lost_files.there"
    settings = ("LOST_",)

    def connect_own(self, url, settings):
        return importlib.import_module("lost_files"), url


SCHEME = Lost()
'''


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder of schemes has two modules more; return the statement that makes it so."""
    folder = tmp_path / "schemes"
    folder.mkdir()
    for name, program in (("folder", FOLDER), ("lost", LOST)):
        (folder / f"{name}.py").write_text(program)
    schemes.__path__.append(str(folder))
    monkeypatch.setenv("FOLDER_ROOT", str(tmp_path / "files"))
    _look_again()
    yield f"import ffserve.store.schemes as n\nn.__path__.append({str(folder)!r})\n"
    schemes.__path__.remove(str(folder))
    _look_again()


def _look_again() -> None:
    schemes.schemes.cache_clear()
    schemes._by_protocol.cache_clear()
    for name in ("folder", "lost"):
        sys.modules.pop(f"{schemes.__name__}.{name}", None)


@pytest.fixture
def samples(tmp_path: Path) -> list[bytes]:
    """Of two files `box/a.ffr` and `box/b.ffr` in the directory of the scheme."""
    found = [bytes([k]) * (1000 + k) for k in range(200)]
    (tmp_path / "files" / "box").mkdir(parents=True)
    for name, mine in (("a", found[:100]), ("b", found[100:])):
        with ffserve.create(tmp_path / "files" / "box" / f"{name}.ffr") as writer:
            for sample in mine:
                writer.write(sample)
    return found


def read(reader: Any) -> list[bytes]:
    return [bytes(sample) for sample in reader.read(range(len(reader)))]


def test_a_scheme_in_a_new_file_is_read_by_ranges(added: str, samples: list[bytes]) -> None:
    for url in ("folder://box/*.ffr", "folder://box", ["folder://box/a.ffr", "folder://box/b.ffr"]):
        with ffserve.open(url) as reader:
            assert reader.source.startswith("ranged reads")
            assert read(reader) == samples


def test_a_scheme_in_a_new_file_is_listed_and_staged(
    added: str, samples: list[bytes], tmp_path: Path
) -> None:
    found = ["folder://box/a.ffr", "folder://box/b.ffr"]
    assert [each.url for each in listing("folder://box/[ab].ffr")] == found
    assert [each.url for each in listing("folder://box", [".ffr"])] == found
    assert not has_magic("folder://box/a.ffr?x=1")
    assert shown("folder://box/a.ffr?signature=secret") == "folder://box/a.ffr?…"
    with pytest.raises(MissingFile, match="no such file at the origin"):
        ffserve.open("folder://box/c.ffr")
    locked = type("FolderLocked", (Exception,), {})
    assert isinstance(origin.failure(locked("it is locked"), found[0]).error, AccessDenied)


def test_a_scheme_in_a_new_file_is_fetched_by_the_daemon(
    added: str, samples: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--store-directory", str(tmp_path / "daemon"), "--store-size", "1GiB"]
    with serving(
        options=options,
        expect=[r"remote files: store /.*, .* of .*"],
        patch=f"{added}import os\ndel os.environ['FOLDER_ROOT']\n",
    ) as daemon:
        for _ in range(2):
            with daemon.open("folder://box/*.ffr") as reader:
                assert reader.source.startswith("daemon ")
                assert read(reader) == samples
        size = sum(path.stat().st_size for path in (tmp_path / "files" / "box").iterdir())
        assert daemon.status()["store"]["fetched"] == size
        # The origin decides what a user may read: here another root has other files.
        monkeypatch.setenv("FOLDER_ROOT", str(tmp_path))
        with daemon.open("folder://files/box/a.ffr") as reader:
            assert read(reader) == samples[:100]


def test_what_a_new_scheme_does_not_name_is_refused(added: str) -> None:
    assert json.loads(collect(["folder://box/a"])).keys() == {"folder"}
    Access('{"folder": {"root": "/x"}}')
    for text in ('{"folder": {"other": "/x"}}', '{"folder": {"root": 7}}', '{"memory": {}}'):
        with pytest.raises(UsageError, match="invalid access"):
            Access(text)
    assert served("folder://box/a") and served("lost://box/a") and not served("tray://box/a")


def test_a_scheme_whose_package_is_missing_says_so(added: str) -> None:
    with pytest.raises(UsageError, match="lost:// needs a package that is missing") as missing:
        ffserve.open("lost://box/a.ffr")
    assert missing.value.hint == "pip install lost-files"
    offered = schemes.travelling(installed=True)
    assert "folder" in offered and "lost" not in offered
    assert "lost" in schemes.travelling()


def test_the_guide_has_a_row_for_each_scheme_that_travels() -> None:
    text = (Path(__file__).parents[2] / "docs" / "howto" / "remote.md").read_text()
    for scheme in schemes.schemes().values():
        if scheme.travels:
            assert f"| `{scheme.name}" in text, scheme.name
