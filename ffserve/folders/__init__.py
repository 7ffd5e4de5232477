"""Packed folders: many small files in one record file, with their names.

Others import what is named here: the index of names (`folder_index.py`), and packing
(`folder_packing.py`).
"""

from __future__ import annotations

from ffserve.folders.folder_index import (
    MAGIC,
    SIZE_MAX,
    Folder,
    decode,
    encode,
    is_index,
    names,
    walk,
)
from ffserve.folders.folder_packing import (
    checked_output,
    files_below,
    index_samples,
    pack,
    scan,
    write_shard,
)

__all__ = [
    "MAGIC",
    "SIZE_MAX",
    "Folder",
    "checked_output",
    "decode",
    "encode",
    "files_below",
    "index_samples",
    "is_index",
    "names",
    "pack",
    "scan",
    "walk",
    "write_shard",
]
