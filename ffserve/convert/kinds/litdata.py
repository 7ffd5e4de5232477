"""litData: the chunks that `optimize` writes, plain or compressed.

A sample is a tree; its leaves are the columns, named by their place in it ("image", "meta.width",
"0"). Bytes, text and encoded pictures are taken as they are stored, and so are pickles, which are
never unpickled. Numbers and JSON become text, arrays and tensors .npy files. Chunks are only read:
litData itself removes a compressed chunk once it has decompressed it.
"""

from __future__ import annotations

import mmap
import os
import struct
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
from ffserve.errors import UsageError

SUFFIXES = ()
_ARRAYS = {"numpy", "no_header_numpy", "tensor", "no_header_tensor"}
_TEXTS = {"int", "float", "bool", "json"}


def recognizes(path: str, found: str) -> bool:
    """Whether a directory has an index of chunks."""
    return bool(index_of(path, "chunks", "config"))


class LitDataChunks:
    """The samples of a directory of chunks, in their order."""

    named = False
    sized = True

    def __init__(self, path: str, wanted: Wanted) -> None:
        self._path = path
        index = index_of(path, "chunks", "config")
        self._chunks, self._config = index["chunks"], index["config"]
        loader = self._config.get("item_loader") or "PyTreeLoader"
        if loader != "PyTreeLoader" or self._config.get("encryption"):
            what = "encrypted" if self._config.get("encryption") else f"written for {loader}"
            raise UsageError(
                f"the chunks are {what}, which cannot be converted",
                path=path,
                hint="read them with litdata, and write the samples with ffserve.create",
            )
        with reading(os.path.join(path, "index.json")):
            self._counts = [int(chunk["chunk_size"]) for chunk in self._chunks]
            self._leaves = self._names(self._config["data_spec"], self._config["data_format"])
        self.count = sum(self._counts)
        self.columns = wanted.of(self._leaves, path)
        self.files = [
            os.path.join(path, "index.json"), *(self._file(k) for k in range(len(self._chunks)))
        ]  # fmt: skip

    def _names(self, spec: str | None, formats: list[str]) -> list[str]:
        """Return the names of the leaves."""
        if spec is None:
            return [str(k) for k in range(len(formats))]
        trees = needed("litdata.utilities._pytree", "litdata", self._path)
        tree = trees.tree_unflatten(list(range(len(formats))), trees.treespec_loads(spec))
        return [".".join(place) or "bin" for _, place in sorted(_leaves(tree, ()))]

    def _file(self, number: int) -> str:
        """Return the file of a chunk. litData may have decompressed it."""
        path = os.path.join(self._path, self._chunks[number]["filename"])
        plain = path.replace(f".{self._config.get('compression')}", "")
        return plain if os.path.exists(plain) and not os.path.exists(path) else path

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the samples [first:stop]."""
        for number, low, high in parts_of(self._counts, first, stop):
            path = self._file(number)
            with (
                reading(path),
                open(path, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                decoders = self._decoders()
                for k, item in enumerate(self._items(path, content, low, high), low):
                    yield Record(self._sample(item, decoders, path, k))

    def _items(self, path: str, content: Any, low: int, high: int) -> Iterator[bytes]:
        """Yield the samples [low:high] of a chunk as they are stored."""
        compression, level = (self._config.get(k) for k in ("compression", "compression_level"))
        if level == "batch":
            yield from self._framed(content, low, high)
            return
        data = content
        if compression and level in (None, "chunk") and compression in path:
            known = needed("litdata.streaming.compression", "litdata", path)._COMPRESSORS
            if compression not in known:
                raise ImportError(f"litdata needs the package {compression.partition(':')[0]}")
            data = known[compression].decompress(content[:])
        (count,) = struct.unpack("<I", data[:4])
        edges = np.frombuffer(data[4 : 8 + 4 * count], "<u4").tolist()
        unpack = bytes
        if level == "sample":
            module = needed("litdata.streaming.framed_zstd", "litdata", path)
            unpack = module.make_zstd_codec(compression).decompress
        for k in range(low, high):
            yield unpack(data[edges[k] : edges[k + 1]])

    def _framed(self, content: Any, low: int, high: int) -> Iterator[bytes]:
        module = needed("litdata.streaming.framed_zstd", "litdata", self._path)
        header = module.parse_framed_header(content)
        codec = module.make_zstd_codec(self._config.get("compression"))
        for number, frame in enumerate(header.frames):
            begin, end = frame.first_item, frame.first_item + frame.n_items
            if begin < high and end > low:
                data = memoryview(module.inflate_frame(content, header, number, codec))
                edges = [edge - header.offsets[begin] for edge in header.offsets[: end + 1]]
                for k in range(max(begin, low), min(end, high)):
                    yield bytes(data[edges[k] : edges[k + 1]])

    def _decoders(self) -> list[Any]:
        """Return for each leaf what makes bytes of what is stored, or None."""
        module = needed("litdata.streaming.serializers", "litdata", self._path)
        found: list[Any] = []
        for name, kind in zip(self._leaves, self._config["data_format"], strict=True):
            key = kind.partition(":")[0]
            if key not in _ARRAYS | _TEXTS:
                found.append(bytes)
                continue
            serializer = module._get_serializers(None)[key]
            serializer.setup(kind)
            found.append(_decoder(serializer.deserialize, name, array=key in _ARRAYS))
        return found

    def _sample(
        self, item: bytes, decoders: list[Any], path: str, index: int
    ) -> dict[str, bytes | None]:
        at = 4 * len(decoders)
        sizes = np.frombuffer(item[:at], "<u4").tolist()
        if len(sizes) != len(decoders) or at + sum(sizes) != len(item):
            raise damaged(path, f"the lengths of sample {index} of the chunk contradict its size")
        found = {}
        for name, size, decode in zip(self._leaves, sizes, decoders, strict=True):
            if name in self.columns:
                found[name] = decode(item[at : at + size])
            at += size
        return found


def _decoder(deserialize: Any, name: str, *, array: bool) -> Any:
    def text(data: bytes) -> bytes | None:
        return encoded(deserialize(data))

    def content(data: bytes) -> bytes:
        value = deserialize(bytearray(data))  # PyTorch warns of memory that cannot be written
        try:
            return npy(value)
        except TypeError as error:
            raise UsageError(
                f"NumPy cannot hold the arrays of column {name!r}: {error}",
                hint="choose other columns (--fields)",
            ) from error

    return content if array else text


def _leaves(tree: Any, place: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the number and the place of each leaf."""
    if isinstance(tree, int):
        yield tree, place
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, each in items:
        yield from _leaves(each, (*place, str(key)))


def open_input(path: str, wanted: Wanted) -> LitDataChunks:
    """Return the samples of a directory. Raises: UsageError: it has no index of chunks."""
    if not index_of(path, "chunks", "config"):
        raise UsageError(
            "there is no index of chunks", path=path, hint="give the directory of index.json"
        )
    return LitDataChunks(path, wanted)
