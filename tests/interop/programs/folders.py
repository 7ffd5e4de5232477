"""Folders: many small files packed into one, read by name in workers."""

import os
import sys
from pathlib import Path

import numpy as np
from ffrecord.package import PackedFolder, pack_folder
from ffrecord.torch import DataLoader, Dataset


def content(name):
    return np.random.default_rng(sum(name.encode())).bytes(len(name) * 97)


class Files(Dataset):
    def __init__(self, packed):
        self.folder = PackedFolder(packed)
        self.names = sorted(map(str, self.folder.list(list_dir=False, recursive=True)))

    def __len__(self):
        return len(self.names)

    def __getitem__(self, indices):
        names = [self.names[index] for index in indices]
        return list(zip(names, self.folder.read(names), strict=True))


def main():
    os.chdir(sys.argv[1])
    names = [f"{a}/{b}/{k:03d}.txt" for a in "ab" for b in ("left", "right") for k in range(12)]
    for name in [*names, "top.bin"]:
        Path("files", name).parent.mkdir(parents=True, exist_ok=True)
        Path("files", name).write_bytes(content(name))
    pack_folder("files", "files.ffr", verbose=True)
    folder = PackedFolder("files.ffr")
    assert folder.num_files() == len(names) + 1
    assert folder.is_dir("a/left") and folder.is_file("top.bin") and not folder.exists("c")
    assert folder.list("a") == ["left", "right"]
    assert folder.list("b/left", list_dir=False) == [f"{k:03d}.txt" for k in range(12)]
    assert folder.read_one("top.bin").tobytes() == content("top.bin")
    seen = []
    for batch in DataLoader(Files("files.ffr"), 5, shuffle=True, num_workers=2, collate_fn=list):
        for name, bytes_ in batch:
            assert bytes_.tobytes() == content(name)
            seen.append(name)
    assert sorted(seen) == sorted([*names, "top.bin"])
    try:
        folder.read_one("a")
    except AssertionError:
        print("ok", len(seen))


if __name__ == "__main__":
    main()
