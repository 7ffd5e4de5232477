"""ImageFolder: a directory for each class, with its pictures; classes are numbered by name.

Files and names are those of ``ffserve pack``, and an FFRecord file is the same as of that command:
``ffserve.torch.ImageFolder`` finds the classes in the names. In other formats each picture has its
class besides, as the field "cls".
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ffserve.convert.inputs import Record, content_of
from ffserve.convert.kinds import Wanted
from ffserve.disk.files import wrap_os_error
from ffserve.errors import UsageError
from ffserve.folders import files_below

SUFFIXES = ()
PICTURES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Those of torchvision and ``ffserve.torch``."""
_LOOKED_AT = 16
"""So many directories are looked into."""


def recognizes(path: str, found: str) -> bool:
    """Whether all entries of a directory are directories of pictures."""
    if not os.path.isdir(path):
        return False
    names = sorted(name for name in os.listdir(path) if name[0] != ".")
    classes = [os.path.join(path, name) for name in names]
    return bool(classes) and all(map(os.path.isdir, classes)) and all(
        map(_has_pictures, classes[:_LOOKED_AT])
    )  # fmt: skip


def _has_pictures(path: str) -> bool:
    names = [name for name in os.listdir(path) if name[0] != "."]
    return bool(names) and all(
        name.lower().endswith(PICTURES) or os.path.isdir(os.path.join(path, name)) for name in names
    )


class ClassFolders:
    """The pictures of all classes, class by class; if labels, the class behind each."""

    named = True
    sized = True

    def __init__(self, path: str, out: str, *, labels: bool) -> None:
        found = files_below(path, out)
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
        classes = {name: b"%d" % label for label, name in enumerate(names)}
        if not classes:
            raise UsageError("there is no class: the directory has no directories", path=path)
        self.files = [file for _, file in found]
        self._entries: list[tuple[str, str | bytes]] = []
        for name, file in found:
            self._entries.append((name, file))
            top, slash, _ = name.partition("/")
            if labels and slash:
                stem = os.path.join(os.path.dirname(name), os.path.basename(name).partition(".")[0])
                self._entries.append((f"{stem}.cls", classes[top]))
        self.count = len(self._entries)

    def names(self) -> Iterator[str]:
        """Yield the names of the records."""
        return (name for name, _ in self._entries)

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the records [first:stop]."""
        for name, content in self._entries[first:stop]:
            if isinstance(content, str):
                content = wrap_os_error(content_of, content)
            yield Record(content, name)


def open_input(path: str, wanted: Wanted) -> ClassFolders:
    """Return the pictures of a directory."""
    return ClassFolders(path, wanted.out, labels=wanted.grouped)
