"""Every import path and public name of the original ffrecord."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

import ffserve

NAMES = {
    "": "FileReader FileWriter PackedFolder checkFsAlign fileio pack_folder package torch utils",
    ".fileio": "FileReader FileWriter checkFsAlign",
    ".package": "MAGIC_BYTES PackedFolder pack_folder",
    ".utils": "dump",
    ".torch": "ConcatDataset DataLoader Dataset ReaderRegistry Subset",
    ".torch.dataset": "ConcatDataset Dataset ReaderRegistry Subset",
    ".torch.dataloader": "DataLoader",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_program_finds_the_names_where_the_original_has_them(module: str) -> None:
    here = importlib.import_module(f"ffserve{module}")
    for name in NAMES[module].split():
        assert getattr(here, name) is not None
        assert module == ".torch.dataset" or name in here.__all__
    assert here.__doc__


def test_names_are_the_same_object_by_every_path() -> None:
    fileio, package = ffserve.fileio, ffserve.package
    assert fileio.FileReader is ffserve.FileReader and fileio.FileWriter is ffserve.FileWriter
    assert fileio.checkFsAlign is ffserve.checkFsAlign
    assert package.PackedFolder is ffserve.PackedFolder
    assert package.pack_folder is ffserve.pack_folder
    loader = importlib.import_module("ffserve.torch.dataloader")
    assert loader.DataLoader is ffserve.torch.DataLoader


def test_a_file_system_that_does_not_know_the_question_does_not_align(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    fd = os.open(path, os.O_RDONLY)
    assert ffserve.checkFsAlign(fd) is False
    os.close(fd)
    assert ffserve.checkFsAlign(fd) is False, "a closed descriptor"
    with pytest.raises(TypeError):
        ffserve.checkFsAlign("a")  # type: ignore[arg-type]
