"""Packed folders: many small files in one FFRecord file, with their names.

The samples of a packed folder are the files of a directory, depth first and sorted by name,
followed by the folder index, a sample with the names (``folder_index.py``). The original reads and
writes the same layout. If a folder is packed into several shards, every shard is a packed folder
with a run of the files and can be used alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve.compat.ffrecord import FileNameError, FileReader
from ffserve.disk.files import os_error
from ffserve.disk.output import staged_directory
from ffserve.errors import FFServeError, FormatError, UsageError
from ffserve.folders import folder_index
from ffserve.folders.folder_index import Folder
from ffserve.system import parallel
from ffserve.writer import create

BLOCK_SIZE = 8 << 20
"""Bytes per read of an input file; large files are never in memory as a whole."""

_REPORT_FILES = 256
_REPORT_SIZE = 64 << 20


class NoSuchName(UsageError, AssertionError, LookupError):
    """A name does not exist in a packed folder, or is a directory where a file is needed."""


class NotPackedError(UsageError):
    """The last sample of a file is not a folder index."""


@dataclass(frozen=True)
class PackReport:
    """The result of ``pack``."""

    paths: tuple[str, ...]
    """The written files, in order."""
    files: int
    """Number of packed files; every shard has one more sample, the folder index."""
    bytes: int
    """Total size of the packed files."""


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
        return self.reader.read_one(self._index(fname))

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
        for parts, node in folder_index.walk(folder, recursive):
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


def index_samples(reader: Any) -> list[int]:
    """Return the indices of the samples that are folder indices.

    Args:    reader: an ``ffserve.Reader`` or a ``FileReader``.
    Returns: dataset indices, ascending; one for each shard that is a packed folder.
    Raises:  as ``Reader.read``.
    Cost:    reads the last sample of every shard.
    """
    inner = reader._open() if isinstance(reader, FileReader) else reader
    last = [shard.first + shard.count - 1 for shard in inner.shards if shard.count]
    return [
        index
        for index, sample in zip(last, inner.read(last), strict=True)
        if folder_index.is_index(sample[:16].tobytes())
    ]


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
    tree = _scan([os.fsdecode(folder)], os.fsdecode(out))
    _write_shard(_checked_out(out), tree, parallel.no_progress, print if verbose else None)


def pack(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    shards: int = 1,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> PackReport:
    """Pack directories and files into packed folders.

    Args:
        paths: one directory, whose contents are packed; or several files and directories, which
            are packed under their own names.
        out: with one shard a file ending in ``.ffr``; with several a new or empty directory, which
            receives ``PART_00000.ffr`` and so on, each with a run of the sorted files.
        shards: number of output files.
        jobs: number of worker processes (spawned: a script needs a ``__main__`` guard).
        progress: called with the samples and bytes done since the last call.
    Returns: the written files, and the number and total size of the packed files.
    Raises:  UsageError: an input cannot be packed, or there is no file. ReadError,
             AccessDenied: reading or writing failed. No file is left behind.
    Cost:    one pass over the files, in pieces of 8 MiB.
    """
    if shards < 1 or jobs < 1:
        raise UsageError(f"shards={shards} and jobs={jobs} must be at least 1")
    target = os.fsdecode(out)
    tree = _scan([os.fsdecode(path) for path in paths], target)
    if not tree.count:
        raise UsageError(
            "nothing to pack: there is no file in the input",
            path=os.fsdecode(paths[0]),
            hint="give at least one file, or a directory with files",
        )
    if shards == 1:
        size = _write_shard(_checked_out(target), tree, progress or parallel.no_progress)
        return PackReport((target,), tree.count, size)
    if tree.count < shards:
        raise UsageError(
            f"cannot split {tree.count} files into {shards} shards",
            hint=f"use at most {tree.count} shards",
        )
    names = [f"PART_{k:05d}.ffr" for k in range(shards)]
    with staged_directory(target) as staging:
        work = [
            (os.path.join(staging, name), part)
            for name, part in zip(names, tree.split(shards), strict=True)
        ]
        sizes = parallel.run(_write_shard, work, jobs=jobs, method="spawn", progress=progress)
    return PackReport(tuple(os.path.join(target, name) for name in names), tree.count, sum(sizes))


@dataclass
class _Tree:
    """The input, depth first: (parts of the name, path) per file, (parts, None) per directory."""

    entries: list[tuple[tuple[str, ...], str | None]]

    @property
    def count(self) -> int:
        return sum(source is not None for _, source in self.entries)

    def split(self, shards: int) -> list[_Tree]:
        """Cut into runs with nearly equal numbers of files; a directory goes with the next file."""
        count, done, parts = self.count, 0, [_Tree([]) for _ in range(shards)]
        for parts_of_name, source in self.entries:
            shard = min(done * shards // count, shards - 1)
            parts[shard].entries.append((parts_of_name, source))
            done += source is not None
        return parts

    def structure(self) -> Folder:
        """Return the folder index, with the files numbered in order."""
        top: Folder = OrderedDict()
        count = 0
        for parts, source in self.entries:
            node = top
            for part in parts[:-1]:
                node = node.setdefault(part, OrderedDict())
            if source is None:
                node.setdefault(parts[-1], OrderedDict())
            else:
                node[parts[-1]] = count
                count += 1
        return top


def _scan(paths: list[str], out: str) -> _Tree:
    """List the input before anything is written."""
    final = os.path.realpath(out)
    tree = _Tree([])
    if len(paths) == 1 and os.path.isdir(paths[0]):
        _descend(paths[0], (), tree, final, [])
        return tree
    named: dict[str, str] = {}
    for path in paths:
        name = os.path.basename(os.path.abspath(path))
        if name in named:
            raise UsageError(
                f"two inputs have the name {name!r}",
                path=path,
                hint="pack their common directory instead",
            )
        named[name] = path
    if not named:
        raise UsageError("no input to pack", hint="give at least one file or directory")
    for name in sorted(named):
        _enter(named[name], (name,), tree, final, [])
    return tree


def files_below(path: str, out: str) -> list[tuple[str, str]]:
    """List the files below a directory, depth first and by name.

    Args:    path: the directory. out: the output file, which must not be among the input.
    Returns: (name relative to the directory, path) of each file.
    Raises:  UsageError: an entry is neither file nor directory. ReadError, AccessDenied.
    """
    entries = _scan([path], out).entries
    return [("/".join(parts), source) for parts, source in entries if source is not None]


def _descend(
    folder: str, parts: tuple[str, ...], tree: _Tree, final: str, above: list[tuple[int, int]]
) -> None:
    with _reading(folder):
        found = os.stat(folder)
        here = (found.st_dev, found.st_ino)
        if here in above:
            raise UsageError(
                "this link leads to a directory above itself", path=folder, hint="remove the link"
            )
        if len(above) >= folder_index.DEPTH_MAX:
            raise UsageError(
                f"directories are nested more than {folder_index.DEPTH_MAX} deep", path=folder
            )
        names = sorted(os.listdir(folder))
    for name in names:
        _enter(os.path.join(folder, name), (*parts, name), tree, final, [*above, here])


def _enter(
    path: str, parts: tuple[str, ...], tree: _Tree, final: str, above: list[tuple[int, int]]
) -> None:
    with _reading(path):
        mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        tree.entries.append((parts, None))
        _descend(path, parts, tree, final, above)
    elif not stat.S_ISREG(mode):
        raise UsageError(
            "cannot pack: neither a file nor a directory",
            path=path,
            hint="remove it from the folder",
        )
    elif os.path.realpath(path) == final:
        raise UsageError(
            "the output file is inside the folder to pack", path=path, hint="write it elsewhere"
        )
    else:
        tree.entries.append((parts, path))


def _write_shard(
    out: str,
    tree: _Tree,
    report: parallel.Progress,
    say: Callable[[str], object] | None = None,
) -> int:
    """Write one packed folder; return the total size of its files."""
    index = folder_index.encode(tree.structure())
    count, width = tree.count, len(str(tree.count))
    total = reported = reported_bytes = 0
    with create(out, format="ffrecord", n=count + 1) as writer:
        for parts, source in tree.entries:
            if source is None:
                continue
            before = writer.position
            writer.write_pieces(_blocks(source))
            total += writer.position - before
            if say is not None:
                say(f"{writer.count:{width}}/{count} {'/'.join(parts)}")
            if writer.count - reported >= _REPORT_FILES or total - reported_bytes >= _REPORT_SIZE:
                report(writer.count - reported, total - reported_bytes)
                reported, reported_bytes = writer.count, total
        writer.write(index)
    report(count - reported, total - reported_bytes)
    return total


def _blocks(source: str) -> Iterator[bytes]:
    with _reading(source), open(source, "rb", buffering=0) as file:
        while block := file.read(BLOCK_SIZE):
            yield block


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Convert an OSError to an FFServeError that names the input file."""
    try:
        yield
    except FFServeError:
        raise
    except OSError as error:
        hint = "the symbolic link is broken" if os.path.islink(path) else None
        raise os_error(error, path, hint=hint) from error


def _checked_out(out: str | os.PathLike[str]) -> str:
    name = os.fsdecode(out)
    if not name.endswith(".ffr"):
        raise FileNameError(
            "the output name does not end in .ffr", path=name, hint="choose a name such as x.ffr"
        )
    return name


def _structure(reader: FileReader) -> tuple[Folder, int]:
    """Return the folder of a reader's files and the number of files in it."""
    shards = reader._open().shards
    if reader.n == 0:
        raise NotPackedError("not a packed folder: the file has no samples", path=reader.fnames[0])
    last = [shard.first + shard.count - 1 for shard in shards if shard.count]
    samples = reader.read(last)
    packed = [folder_index.is_index(sample[:16].tobytes()) for sample in samples]
    if not packed[-1]:
        raise NotPackedError(
            "not a packed folder: the last sample is not a folder index",
            path=reader.fnames[-1],
            hint="read it with FileReader",
        )
    if not all(packed):  # one folder over several files, with one index at the end of the last
        index = reader.n - 1
        path = reader.fnames[-1]
        return folder_index.decode(samples[-1].data, index, path=path, index=index), index
    merged: Folder = OrderedDict()
    first = 0
    for end, sample, shard in zip(last, samples, (s for s in shards if s.count), strict=True):
        part = folder_index.decode(sample.data, end - first, path=shard.path, index=end)
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
