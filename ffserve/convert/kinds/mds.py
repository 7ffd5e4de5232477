"""MDS: the shards of MosaicML streaming, plain or compressed.

Bytes, text, JSON and encoded pictures are taken as they are stored, and so are pickles, which are
never unpickled. Numbers become text, arrays .npy files. The hashes that an index has are compared.
A compressed shard is decompressed in memory, as a whole.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from ffserve.convert.inputs import Record
from ffserve.convert.kinds import (
    Wanted,
    damaged,
    encoded,
    index_of,
    needed,
    npy,
    parts_of,
    reading,
)
from ffserve.errors import ChecksumError, UsageError

SUFFIXES = ()
_PACKAGE = "mosaicml-streaming"
_SHARD = "a shard of MosaicML streaming (MDS)"
_NUMBERS = {"int", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def recognizes(path: str, found: str) -> bool:
    """Whether a directory has an index of shards, or a file is one of them."""
    return found == _SHARD or bool(index_of(path, "version", "shards"))


class MDSShards:
    """The samples of a directory of shards, in their order."""

    named = False
    sized = True

    def __init__(self, path: str, wanted: Wanted) -> None:
        self._path = path
        self._shards: list[dict[str, Any]] = index_of(path, "version", "shards")["shards"]
        with reading(os.path.join(path, "index.json")):
            readers = [self._reader(k) for k in range(len(self._shards))]
            self._counts = [reader.samples for reader in readers]
            self.count = sum(self._counts)
            self.columns = wanted.of(readers[0].column_names, path)
        self.files = [os.path.join(path, "index.json"), *(self._file(r)[0] for r in readers)]

    def _reader(self, number: int) -> Any:
        read = needed("streaming.base.format", _PACKAGE, self._path).reader_from_json
        return read(self._path, None, self._shards[number])

    def _file(self, reader: Any) -> tuple[str, Any]:
        """Return the file of a shard, and what the index says of it."""
        path = os.path.join(self._path, reader.raw_data.basename)
        if reader.zip_data is None or os.path.exists(path):
            return path, reader.raw_data
        return os.path.join(self._path, reader.zip_data.basename), reader.zip_data

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the samples [first:stop]."""
        for number, low, high in parts_of(self._counts, first, stop):
            reader = self._reader(number)
            path, facts = self._file(reader)
            with (
                reading(path),
                open(path, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                yield from self._samples(reader, path, facts, content, low, high)

    def _samples(
        self, reader: Any, path: str, facts: Any, content: Any, low: int, high: int
    ) -> Iterator[Record]:
        if len(content) != facts.bytes:
            raise damaged(path, f"the shard has {len(content)} bytes, the index says {facts.bytes}")
        for name, value in facts.hashes.items():
            if needed("streaming.base.hashing", _PACKAGE, path).get_hash(name, content) != value:
                raise ChecksumError(f"the shard does not match its {name} in the index", path=path)
        data = content
        if facts is reader.zip_data:
            unpack = needed("streaming.base.compression", _PACKAGE, path).decompress
            data = unpack(reader.compression, content[:])
        edges = np.frombuffer(data[4 : 8 + 4 * reader.samples], "<u4").tolist()
        decode = needed("streaming.base.format.mds.encodings", _PACKAGE, path).mds_decode
        for k in range(low, high):
            yield Record(self._sample(reader, data[edges[k] : edges[k + 1]], decode, path, k))

    def _sample(
        self, reader: Any, data: bytes, decode: Any, path: str, index: int
    ) -> dict[str, bytes | None]:
        variable = sum(not size for size in reader.column_sizes)
        lengths = iter(np.frombuffer(data[: 4 * variable], "<u4").tolist())
        at, found = 4 * variable, {}
        for name, encoding, size in zip(
            reader.column_names, reader.column_encodings, reader.column_sizes, strict=True
        ):
            end = at + (size or next(lengths, 0))
            if name in self.columns:
                found[name] = _value(encoding, data[at:end], decode)
            at = end
        if at != len(data):
            raise damaged(path, f"the lengths of sample {index} of the shard contradict its size")
        return found


def _value(encoding: str, data: bytes, decode: Any) -> bytes | None:
    kind = encoding.partition(":")[0]
    if kind == "ndarray":
        return npy(decode(encoding, data))
    return encoded(decode(encoding, data)) if kind in _NUMBERS else data


def open_input(path: str, wanted: Wanted) -> MDSShards:
    """Return the samples of a directory.

    Raises: UsageError: it has no index of such shards.
    """
    shards = index_of(path, "version", "shards").get("shards", ())
    if not shards or any(shard.get("format") != "mds" for shard in shards):
        raise UsageError(
            "there is no index of MDS shards", path=path, hint="give the directory of index.json"
        )
    return MDSShards(path, wanted)
