"""Files of other packages, which this one does not read: what they are, and what reads them."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass

from ffserve.formats.base import GZIP_MAGIC


@dataclass(frozen=True, slots=True)
class Foreign:
    """A kind of file. package: reads it. many: one file holds many records. converts: so does
    `ffserve convert`, by that package."""

    name: str
    package: str
    many: bool = True
    converts: bool = False


_MAGIC = (
    (0, b"PAR1", Foreign("a Parquet file", "pyarrow", converts=True)),
    (0, b"ARROW1\0\0", Foreign("an Arrow file", "pyarrow", converts=True)),
    (0, b"ORC", Foreign("an ORC file", "pyarrow")),
    (0, b"Obj\x01", Foreign("an Avro file", "fastavro")),
    (0, b"\x83\xafp\xd1\r\x88J?", Foreign("an ArrayRecord file", "array_record", converts=True)),
    (0, b"SQLite format 3\0", Foreign("an SQLite database", "sqlite3")),
    (16, b"\xde\xc0\xef\xbe", Foreign("an LMDB database", "lmdb", converts=True)),
    (0, b"\x89HDF\r\n\x1a\n", Foreign("an HDF5 file", "h5py", many=False, converts=True)),
    (0, b"PK\x03\x04", Foreign("a zip file", "zipfile", many=False)),
    (0, b"(\xb5/\xfd", Foreign("a file compressed with zstd", "zstandard", many=False)),
)
"""Offset and bytes by which a file is recognized; the head of a file has `formats.base.HEAD_SIZE`
bytes or more."""

_SUFFIXES = {
    ".parquet": Foreign("a Parquet file", "pyarrow", converts=True),
    ".arrow": Foreign("an Arrow file", "pyarrow", converts=True),
    ".mds": Foreign("a shard of MosaicML streaming (MDS)", "streaming", converts=True),
    ".mds.zstd": Foreign("a shard of MosaicML streaming (MDS)", "streaming", converts=True),
    **dict.fromkeys(
        (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz"),
        Foreign("a compressed tar file", "tarfile", converts=True),
    ),
}
_COMPRESSED_TAR = _SUFFIXES[".tgz"]


def kind_of(head: bytes, path: str) -> Foreign | None:
    """Return the kind of a file that is known to belong to another package, or None.

    Args:
        head: the first bytes of the file. path: its name; the suffix decides where the content
            does not.
    """
    for offset, magic, kind in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return kind
    if head.startswith(GZIP_MAGIC) and _begins_with_tar(head):
        return _COMPRESSED_TAR
    name = os.path.basename(path).lower()
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def _begins_with_tar(head: bytes) -> bool:
    """Whether the first bytes of a gzip file decompress to a header of tar."""
    try:
        begin = zlib.decompressobj(wbits=31).decompress(head, 512)
    except zlib.error:
        return False
    return begin[257:262] == b"ustar"
