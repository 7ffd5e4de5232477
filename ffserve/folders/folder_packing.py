"""Packing: files of directories to packed folders.

The samples of a packed folder are the files of a directory, depth first and sorted by name,
followed by the folder index, a sample with the names (``folder_index.py``). If a folder is packed
into several shards, every shard is a packed folder with a run of the files and can be used alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ffserve.disk.files import os_error
from ffserve.disk.output import staged_directory
from ffserve.errors import FFServeError, FileNameError, UsageError
from ffserve.folders import folder_index, label_tables
from ffserve.folders.folder_index import Folder
from ffserve.system import parallel
from ffserve.writer import create

BLOCK_SIZE = 8 << 20
"""An input file is read this many bytes at a time; a large file is never in memory as a whole."""


_REPORT_SIZE = 64 << 20


@dataclass(frozen=True)
class PackReport:
    """The result of ``pack``."""

    paths: tuple[str, ...]
    """The written files, in order."""
    files: int
    """Number of packed files; every shard has one more sample, the folder index."""
    bytes: int
    """Total size of the packed files."""


def pack(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    shards: int = 1,
    jobs: int = 1,
    force: bool = False,
    labels: str | os.PathLike[str] | None = None,
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
        force: replace ``out`` if it is an existing file.
        labels: a CSV, JSON or Parquet file with columns for each file, by name: what
            ``Reader.labels`` returns.
        progress: called with the samples and bytes done since the last call.
    Returns: the written files, and the number and total size of the packed files.
    Raises:  UsageError: an input cannot be packed, there is no file, ``out`` exists, or a shard has
             more than 1 GiB of names and labels. ReadError, AccessDenied: reading or writing
             failed. No file is left behind.
    Cost:    one pass over the files, in pieces of 8 MiB.
    """
    if shards < 1 or jobs < 1:
        raise UsageError(f"shards={shards} and jobs={jobs} must be at least 1")
    target = os.fsdecode(out)
    tree = scan([os.fsdecode(path) for path in paths], target)
    if not tree.count:
        raise UsageError(
            "nothing to pack: there is no file in the input",
            path=os.fsdecode(paths[0]),
            hint="give at least one file, or a directory with files",
        )
    if labels is not None:
        tree.add_labels(os.fsdecode(labels))
    if shards == 1:
        if os.path.isfile(checked_output(target)) and not force:
            raise UsageError(
                "the output exists already",
                path=target,
                hint="choose another name, or replace it with force=True (--force)",
            )
        size = write_shard(target, tree, progress or parallel.no_progress)
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
        sizes = parallel.run(write_shard, work, jobs=jobs, method="spawn", progress=progress)
    return PackReport(tuple(os.path.join(target, name) for name in names), tree.count, sum(sizes))


@dataclass
class _Tree:
    """The input, depth first: (parts of the name, path) per file, (parts, None) per directory."""

    entries: list[tuple[tuple[str, ...], str | None]]
    labels: label_tables.Columns = field(default_factory=dict)

    def add_labels(self, path: str) -> None:
        """Read the labels of the files. Raises: UsageError, and as `label_tables.read`."""
        names = ["/".join(parts) for parts, source in self.entries if source is not None]
        self.labels = label_tables.columns_of(label_tables.read(path), names, path)

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
        first = 0
        for part in parts:
            end = first + part.count
            part.labels = {name: values[first:end] for name, values in self.labels.items()}
            first = end
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


def scan(paths: list[str], out: str) -> _Tree:
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
    entries = scan([path], out).entries
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


def write_shard(
    out: str,
    tree: _Tree,
    report: parallel.Progress,
    say: Callable[[str], object] | None = None,
) -> int:
    """Write one packed folder; return the total size of its files."""
    index = folder_index.encode(tree.structure())
    if tree.labels:
        index += label_tables.encode(tree.labels)
    if len(index) > folder_index.SIZE_MAX:
        raise UsageError(
            f"the names and labels have {len(index)} bytes, more than the limit of "
            f"{folder_index.SIZE_MAX} in one file",
            path=out,
            hint="pack into more shards (--shards)",
        )
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
            if writer.count - reported >= 256 or total - reported_bytes >= _REPORT_SIZE:
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


def checked_output(out: str | os.PathLike[str]) -> str:
    """Return the name of an output file. Raises: FileNameError: it does not end in .ffr."""
    name = os.fsdecode(out)
    if not name.endswith(".ffr"):
        raise FileNameError(
            "the output name does not end in .ffr", path=name, hint="choose a name such as x.ffr"
        )
    return name
