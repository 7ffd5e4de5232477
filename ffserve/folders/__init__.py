"""Packed folders: many small files in one record file, with their names.

Others import what is named here: the index of names (`folder_index.py`), which files have one
(`packed_files.py`), the labels of the files (`label_tables.py`), and packing (`folder_packing.py`).
"""

from __future__ import annotations

from ffserve.folders.folder_index import (
    MAGIC,
    SIZE_MAX,
    Folder,
    UnknownName,
    decode,
    decode_labelled,
    encode,
    is_index,
    names,
    walk,
)
from ffserve.folders.folder_packing import (
    checked_output,
    files_below,
    pack,
    scan,
    write_shard,
)
from ffserve.folders.packed_files import FolderSearch

__all__ = [
    "MAGIC",
    "SIZE_MAX",
    "Folder",
    "FolderSearch",
    "UnknownName",
    "checked_output",
    "decode",
    "decode_labelled",
    "encode",
    "files_below",
    "is_index",
    "names",
    "pack",
    "scan",
    "walk",
    "write_shard",
]
