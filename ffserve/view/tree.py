"""The names of a view, and the number of the node behind each.

    shards/NAME                   a file
    samples/NAME/cats/tom.jpg     a sample of a packed folder
    samples/NAME/0012/0123456     a sample without a name, by its number in the file

The number of a node is a place in the table of names, or follows from the number of a folder or of
a sample. So nothing changes while the view is mounted, every process can answer every request, and
the kernel may forget any node. Names of ten million numbered samples take no memory; a packed
folder takes about 40 bytes a file.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import FormatError, UsageError
from ffserve.folders import Folder
from ffserve.store.urls import is_url, shown

ROOT = 1
FOLDER_COUNT = 10_000
"""A folder has this many numbered samples."""
NAME_SIZE = 255
"""The kernel takes names of at most this many bytes."""
_FOLDERS, SAMPLES = 1 << 40, 1 << 41
"""Node numbers of the folders, and of the samples, that have numbers for names."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A file of the view.

    Args:
        path: its name below shards/ and samples/, without ``..``.
        first, count: the dataset indices of its samples.
        folder: their names; None: they go by number.
        suffix: of the names of numbered samples.
        remote: it is not in shards/.
    """

    path: str
    first: int
    count: int
    folder: Folder | None = None
    suffix: str = ""
    remote: bool = False


class Node(NamedTuple):
    """The file, folder or sample that a node stands for.

    Args:
        directory: or a file.
        shard: number of the file that it belongs to; -1 for directories above the files.
        sample: dataset index; -1: none. A file without a sample is the shard itself.
    """

    directory: bool
    shard: int
    sample: int = -1


class Tree:
    """All names.

    Raises: UsageError: two files have the same path, or a name of a folder cannot be one here; use
        `unusable` first.
    """

    def __init__(self, files: Sequence[Shown]) -> None:
        self._files = files
        self._first_samples = [each.first for each in files]
        self._first_folders: list[int] = []
        """Number of each file's first folder of numbered samples."""
        total = 0
        for each in files:
            self._first_folders.append(total)
            total += 0 if each.folder is not None else -(-each.count // FOLDER_COUNT)
        self._folder_total = total
        self._kind = array("b")
        self._shard, self._parent = array("i"), array("q")
        self._sample = array("q")
        self._first, self._count = array("q"), array("q")
        """Of directories: their entries, which lie side by side, sorted by name."""
        self._ends = array("q")
        self._names = bytearray()
        self._build()

    # ---- the table of names ------------------------------------------------------------------

    def _build(self) -> None:
        all_files = self._paths(range(len(self._files)))
        local = self._paths(k for k, each in enumerate(self._files) if not each.remote)
        self._add(b"", _DIRECTORY, -1, -1, 0)
        waiting: deque[tuple[int, Any, int, bool]] = deque(
            [(0, {"shards": local, "samples": all_files}, -1, False)]
        )
        while waiting:
            position, content, shard, samples = waiting.popleft()
            self._first[position] = len(self._kind)
            self._count[position] = len(content)
            for name, each in sorted((os.fsencode(name), each) for name, each in content.items()):
                at = len(self._kind)
                if shard >= 0:  # in a packed folder
                    if isinstance(each, OrderedDict):
                        self._add(name, _DIRECTORY, shard, -1, position)
                        waiting.append((at, each, shard, True))
                    else:
                        first = self._first_samples[shard]
                        self._add(name, _SAMPLE, shard, first + each, position)
                elif isinstance(each, dict):
                    self._add(name, _DIRECTORY, -1, -1, position)
                    waiting.append((at, each, -1, samples or name == b"samples"))
                elif not samples:
                    self._add(name, _SHARD, each, -1, position)
                elif (folder := self._files[each].folder) is not None:
                    self._add(name, _DIRECTORY, each, -1, position)
                    waiting.append((at, folder, each, True))
                else:
                    self._add(name, _NUMBERED, each, -1, position)

    def _paths(self, numbers: Iterable[int]) -> dict[str, Any]:
        """Return the numbers of files by their paths, as dictionaries of dictionaries."""
        top: dict[str, Any] = {}
        for number in numbers:
            node = top
            *above, last = self._files[number].path.split("/")
            for part in above:
                node = node.setdefault(part, {})
            if last in node:
                path = self._files[number].path
                raise UsageError("two files have the same name in the view", path=path)
            node[last] = number
        return top

    def _add(self, name: bytes, kind: int, shard: int, sample: int, parent: int) -> None:
        self._names += name
        self._ends.append(len(self._names))
        self._kind.append(kind)
        self._shard.append(shard)
        self._sample.append(sample)
        self._parent.append(parent)
        self._first.append(0)
        self._count.append(0)

    def _name(self, position: int) -> bytes:
        return bytes(self._names[self._ends[position - 1] : self._ends[position]])

    @property
    def count(self) -> int:
        """Number of directories and files."""
        numbered = sum(each.count for each in self._files if each.folder is None)
        return len(self._kind) + self._folder_total + numbered

    def samples(self) -> NDArray[np.int64]:
        """Return the sample of node k + 1 at position k, or -1; other samples are nodes from
        `SAMPLES` on."""
        return np.frombuffer(self._sample, np.int64)

    # ---- questions of the kernel -----------------------------------------------------------

    def node(self, number: int) -> Node:
        """Return the meaning of a node. Raises: LookupError: there is no such node."""
        if number >= SAMPLES:
            sample = number - SAMPLES
            return Node(False, bisect_right(self._first_samples, sample) - 1, sample)
        if number >= _FOLDERS:
            return Node(True, self._shard_of_folder(number - _FOLDERS))
        kind = self._kind[number - ROOT]
        sample = self._sample[number - ROOT]
        return Node(kind in (_DIRECTORY, _NUMBERED), self._shard[number - ROOT], sample)

    def parent(self, number: int) -> int:
        """Return the directory that a directory is in; the root is in itself."""
        if number >= _FOLDERS:
            shard = self._shard_of_folder(number - _FOLDERS)
            return self._numbered_directory(shard)
        return max(self._parent[number - ROOT], 0) + ROOT

    def look_up(self, directory: int, name: bytes) -> int:
        """Return the node of a name in a directory; 0: there is none."""
        if directory >= SAMPLES:
            return 0
        if directory >= _FOLDERS:
            folder = directory - _FOLDERS
            shard = self._shard_of_folder(folder)
            return self._look_up_number(shard, folder - self._first_folders[shard], name)
        position = directory - ROOT
        if self._kind[position] == _NUMBERED:
            shard = self._shard[position]
            folders = self._folders_of(shard)
            number = _number(name, _digits(folders), b"")
            return _FOLDERS + self._first_folders[shard] + number if 0 <= number < folders else 0
        low = self._first[position]
        end = high = low + self._count[position]
        while low < high:
            middle = (low + high) // 2
            if self._name(middle) < name:
                low = middle + 1
            else:
                high = middle
        return low + ROOT if low < end and self._name(low) == name else 0

    def _look_up_number(self, shard: int, folder: int, name: bytes) -> int:
        file = self._files[shard]
        number = _number(name, _digits(file.count), os.fsencode(file.suffix))
        if number >= 0 and number // FOLDER_COUNT == folder and number < file.count:
            return SAMPLES + file.first + number
        return 0

    def entries(self, directory: int, position: int) -> Iterator[tuple[bytes, int]]:
        """Yield names and nodes of a directory, from a position in it on."""
        if directory >= _FOLDERS:
            folder = directory - _FOLDERS
            shard = self._shard_of_folder(folder)
            yield from self._numbers(shard, folder - self._first_folders[shard], position)
            return
        at = directory - ROOT
        if self._kind[at] == _NUMBERED:
            shard = self._shard[at]
            folders = self._folders_of(shard)
            digits, first = _digits(folders), _FOLDERS + self._first_folders[shard]
            for number in range(position, folders):
                yield b"%0*d" % (digits, number), first + number
            return
        first, count = self._first[at], self._count[at]
        for each in range(first + position, first + count):
            yield self._name(each), each + ROOT

    def _numbers(self, shard: int, folder: int, position: int) -> Iterator[tuple[bytes, int]]:
        file = self._files[shard]
        digits, suffix, node = _digits(file.count), os.fsencode(file.suffix), SAMPLES + file.first
        begin = folder * FOLDER_COUNT
        for number in range(begin + position, min(begin + FOLDER_COUNT, file.count)):
            yield b"%0*d%s" % (digits, number, suffix), node + number

    def _folders_of(self, shard: int) -> int:
        return -(-self._files[shard].count // FOLDER_COUNT)

    def _shard_of_folder(self, folder: int) -> int:
        if not 0 <= folder < self._folder_total:
            raise LookupError(folder)
        # If several files begin at the same number, all but the last one have no numbered samples.
        return bisect_right(self._first_folders, folder) - 1

    def _numbered_directory(self, shard: int) -> int:
        directory = ROOT
        for part in ("samples", *self._files[shard].path.split("/")):
            directory = self.look_up(directory, os.fsencode(part))
        return directory


_DIRECTORY, _NUMBERED, _SHARD, _SAMPLE = range(4)


def _digits(count: int) -> int:
    return len(str(max(count - 1, 0)))


def _number(name: bytes, digits: int, suffix: bytes) -> int:
    """Return the number that a name consists of; -1 if it is not a number."""
    if not name.endswith(suffix):
        return -1
    text = name[: len(name) - len(suffix)]
    return int(text) if len(text) == digits and text.isdigit() else -1


def unusable(folder: Folder) -> str | None:
    """Return why the names of a folder cannot be those of files; None: they can."""
    waiting = [folder]
    while waiting:
        seen: set[bytes] = set()
        for name, each in waiting.pop().items():
            try:
                encoded = os.fsencode(name)
            except UnicodeEncodeError:
                return f"the name {name!r} does not exist in this encoding"
            if len(encoded) > NAME_SIZE:
                return f"a name has {len(encoded)} bytes, more than {NAME_SIZE}"
            if encoded in seen:
                return f"the name {name!r} occurs twice"
            seen.add(encoded)
            if isinstance(each, OrderedDict):
                waiting.append(each)
    return None


def folder_of(names: Iterable[str], path: str) -> Folder:
    """Return the members of an archive, by name. Raises: FormatError: they are no files' names."""
    top: Folder = OrderedDict()
    for number, name in enumerate(names):
        parts = [part for part in name.split("/") if part not in ("", ".")]
        node: Any = top
        for part in parts[:-1]:
            node = node.setdefault(part, OrderedDict()) if isinstance(node, OrderedDict) else None
        if ".." in parts or not isinstance(node, OrderedDict) or parts[-1] in node:
            raise FormatError(f"the member {name!r} cannot be a file here", path=path)
        node[parts[-1]] = number
    return top


def names_of(paths: Sequence[str]) -> list[str]:
    """Return the names of files in the view: their own, or with their directories below the common
    one where two files have the same. The protocol and the host of a URL become directories."""
    places = [_place(path) for path in paths]
    names = [os.path.basename(place) for place in places]
    if len(set(names)) == len(names):
        return names
    above = os.path.commonpath([os.path.dirname(place) for place in places])
    return [os.path.relpath(place, above) for place in places]


def _place(path: str) -> str:
    if not is_url(path):
        return path
    protocol, _, rest = shown(path).partition("://")
    return os.path.normpath(f"/{protocol}/{rest.removesuffix('?…')}")
