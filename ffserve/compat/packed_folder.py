"""Drop-in for ffrecord's packed folders: ``PackedFolder`` and ``pack_folder``.

The original reads and writes the same layout; ``ffserve/folders/`` has it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve import folders as packed_folders
from ffserve.compat.ffrecord import FileReader
from ffserve.errors import FileNameError, FormatError, UsageError
from ffserve.folders import Folder
from ffserve.system import parallel


class NoSuchName(UsageError, AssertionError, LookupError):
    """A name does not exist in a packed folder, or is a directory where a file is needed."""


class NotPackedError(UsageError):
    """The last sample of a file is not a folder index."""


class PackedFolder:
    """Read a packed folder by name.

    Args:
        f: the file; or a directory or list of shards, each of which is a packed folder. The names
            of all shards form one folder.
        check_data: verify checksums.
    Raises:  NotPackedError (also a ValueError): no folder index. FormatError: an invalid folder
             index. Otherwise as ``FileReader``.
    Cost:    as ``FileReader``, plus the folder index of each shard.
    Source:  HFAiLab/ffrecord 1.4.
    """

    def __init__(self, f: Any, check_data: bool = True) -> None:
        self.reader = FileReader(f, check_data)
        try:
            self.structure, self._files = _structure(self.reader)
        except BaseException:
            self.reader.close()
            raise

    def num_files(self) -> int:
        """Return the number of packed files."""
        return self._files

    def read_one(self, fname: str | os.PathLike[str]) -> NDArray[np.uint8]:
        """Return the bytes of one file: a writable array, owned by the caller.

        Raises:  NoSuchName (also an AssertionError): no such file, or it is a directory.
        """
        content: NDArray[np.uint8] = self.reader.read_one(self._index(fname))
        return content

    def read(self, fnames: Sequence[str | os.PathLike[str]]) -> list[NDArray[np.uint8]]:
        """Return the bytes of several files in one batch, in their order.

        Args:    fnames: list or tuple of names; repeats are allowed.
        Raises:  as ``read_one``, before anything is read.
        """
        if not isinstance(fnames, (list, tuple)):
            raise NoSuchName(
                f"expected a list or tuple of names, not {type(fnames).__name__}",
                hint="use read_one for a single name",
            )
        return self.reader.read([self._index(name) for name in fnames])

    def list(
        self,
        path: str | os.PathLike[str] | None = None,
        list_file: bool = True,
        list_dir: bool = True,
        recursive: bool = False,
    ) -> list[str | Path]:
        """Return the names in a directory, in the order of the file.

        Args:
            path: the directory; None for the top.
            list_file, list_dir: whether to return files, directories.
            recursive: also return the content of all subdirectories, relative to ``path``.
        Returns: str for entries directly in ``path``, Path for deeper ones, as in the original.
        Raises:  NoSuchName: no such directory.
        """
        folder = self.structure if path is None else self._find(path)
        if not isinstance(folder, OrderedDict):
            raise NoSuchName(
                f"{os.fspath(path or '')!r} is a file, not a directory", path=self.reader.fnames[0]
            )
        found: list[str | Path] = []
        for parts, node in packed_folders.walk(folder, recursive):
            if list_file if isinstance(node, int) else list_dir:
                found.append(parts[0] if len(parts) == 1 else Path(*parts))
        return found

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether a file or directory of this name exists."""
        return self._lookup(path) is not None

    def is_file(self, path: str | os.PathLike[str]) -> bool:
        """Whether a file of this name exists."""
        return isinstance(self._lookup(path), int)

    def is_dir(self, path: str | os.PathLike[str]) -> bool:
        """Whether a directory of this name exists."""
        return isinstance(self._lookup(path), OrderedDict)

    def close(self) -> None:
        """Close the files; the names remain available."""
        self.reader.close()

    def __enter__(self) -> PackedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reader.fnames, self.reader.check_data)

    def _lookup(self, path: str | os.PathLike[str]) -> Any:
        node: Any = self.structure
        for part in Path(path).parts:
            if not isinstance(node, OrderedDict) or part not in node:
                return None
            node = node[part]
        return node

    def _find(self, path: str | os.PathLike[str]) -> Any:
        node = self._lookup(path)
        if node is None:
            raise NoSuchName(
                f"{os.fspath(path)!r} does not exist",
                path=self.reader.fnames[0],
                hint="list(recursive=True) returns all names",
            )
        return node

    def _index(self, path: str | os.PathLike[str]) -> int:
        node = self._find(path)
        if not isinstance(node, int):
            raise NoSuchName(
                f"{os.fspath(path)!r} is a directory, not a file", path=self.reader.fnames[0]
            )
        return node


def pack_folder(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], verbose: bool = False
) -> None:
    """Pack a directory into one file, byte for byte as the original does.

    Args:
        folder: the directory; symbolic links are followed.
        out: the output file, ending in ``.ffr``.
        verbose: print a line per file.
    Raises:  UsageError: ``folder`` is not a directory (also an AssertionError), or contains a
             socket, a pipe, or a link to a directory above itself. ReadError: a file cannot be
             read. No file is left behind.
    Cost:    one pass over the files, in pieces of 8 MiB.
    """
    if not os.path.isdir(folder):
        raise FileNameError(
            "not a directory", path=os.fsdecode(folder), hint="give an existing directory"
        )
    tree = packed_folders.scan([os.fsdecode(folder)], os.fsdecode(out))
    name = packed_folders.checked_output(out)
    packed_folders.write_shard(name, tree, parallel.no_progress, print if verbose else None)


def _structure(reader: FileReader) -> tuple[Folder, int]:
    """Return the folder of a reader's files and the number of files in it."""
    shards = reader._open().shards
    if reader.n == 0:
        raise NotPackedError("not a packed folder: the file has no samples", path=reader.fnames[0])
    last = [shard.first + shard.count - 1 for shard in shards if shard.count]
    samples = reader.read(last)
    packed = [packed_folders.is_index(sample[:16].tobytes()) for sample in samples]
    if not packed[-1]:
        raise NotPackedError(
            "not a packed folder: the last sample is not a folder index",
            path=reader.fnames[-1],
            hint="read it with FileReader",
        )
    if not all(packed):  # one folder over several files, with one index at the end of the last
        index = reader.n - 1
        path = reader.fnames[-1]
        return packed_folders.decode(samples[-1].data, index, path=path, index=index), index
    merged: Folder = OrderedDict()
    first = 0
    for end, sample, shard in zip(last, samples, (s for s in shards if s.count), strict=True):
        part = packed_folders.decode(sample.data, end - first, path=shard.path, index=end)
        if len(samples) == 1:
            return part, end
        _merge(merged, part, first, shard.path)
        first = end + 1
    return merged, reader.n - len(samples)


def _merge(target: Folder, part: Folder, first: int, path: str) -> None:
    """Add the names of one shard, whose first sample has the dataset index ``first``."""
    pairs = [(target, part)]
    for into, of in pairs:
        for name, node in of.items():
            existing = into.get(name)
            if isinstance(node, int):
                if existing is not None:
                    raise FormatError(
                        f"the name {name!r} occurs in two shards",
                        path=path,
                        hint="read the shards separately",
                    )
                into[name] = node + first
            elif existing is None or isinstance(existing, OrderedDict):
                pairs.append((into.setdefault(name, OrderedDict()), node))
            else:
                raise FormatError(
                    f"{name!r} is a file in one shard and a directory in another",
                    path=path,
                    hint="read the shards separately",
                )
