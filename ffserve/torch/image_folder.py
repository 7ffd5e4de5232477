"""ImageFolder and DatasetFolder: (picture, label) out of packed folders.

Classes and labels are those that torchvision's classes of the same names find in the directory that
was packed: a class for each directory at the top, in the order of their names, and the samples
class by class, directory by directory, by name. torchvision is not needed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from typing import Any

from ffserve.errors import FormatError, MissingFile, UsageError
from ffserve.torch.dataset import Dataset

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class DatasetFolder(Dataset):
    """Samples of packed folders with the directories at the top as classes.

    A sample is ``(loader(content), label)``. ``dataset[[3, 1]]`` is a list of two samples,
    ``dataset[3]`` is one.

    Args:
        paths: what ``ffserve pack`` has written: files, directories of them, patterns, URLs.
        loader: makes an object of the bytes of a file.
        extensions: endings of the files to take, such as ``(".jpg", ".png")``, in lower case.
        transform, target_transform: applied to the object, to the label.
        is_valid_file: instead of ``extensions``; gets a file's name, says whether to take it.
            Without either all files are taken.
        allow_empty: a class may have no file.
        check_data: verify each sample's checksum.

    If the files were packed with labels (``ffserve pack --labels``), a sample has a dict of these
    in place of the class; there need be no classes then, and a file outside of them has the label
    -1 in ``targets``.

    Attributes:
        classes: the names of the classes, sorted. class_to_idx: their labels.
        samples: (name, label) of each sample; imgs: the same list. targets: the labels.
        columns: what was packed as labels, a list for each column.

    Raises:  UsageError: a directory that was not packed, or files without names. MissingFile (a
             FileNotFoundError): there is no class, or one without a file. Otherwise as Dataset.
    Cost:    as Dataset, and one to two seconds per million names.
    Source:  torchvision 0.21, datasets/folder.py.
    """

    classes: list[str]
    class_to_idx: dict[str, int]
    samples: list[tuple[str, int]]
    targets: list[int]
    columns: dict[str, list[Any]]

    def __init__(
        self,
        paths: Any,
        loader: Callable[[bytes], Any],
        extensions: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        check_data: bool = True,
    ) -> None:
        if extensions is not None and is_valid_file is not None:
            raise UsageError("extensions and is_valid_file cannot both be given")
        self.root = paths
        self.loader, self.extensions = loader, extensions
        self.transform, self.target_transform = transform, target_transform
        try:
            super().__init__(paths, check_data)
        except MissingFile as error:
            if isinstance(paths, (str, os.PathLike)) and os.path.isdir(paths):
                raise _not_packed(os.fsdecode(paths)) from error
            raise
        try:
            self._find(is_valid_file, allow_empty)
        except BaseException:
            self.reader.close()
            raise

    def _find(self, is_valid_file: Callable[[str], bool] | None, allow_empty: bool) -> None:
        names = self.reader.names
        path = self.reader.fnames[0]
        if self.reader.fields:
            raise UsageError(
                "samples of tar files are no packed pictures of a directory per class",
                path=path,
                hint="read them with ffserve.torch.Dataset and fields=[…]",
            )
        if not names:
            raise UsageError(
                "the samples have no names, and so no classes",
                path=path,
                hint="pack the directory of the pictures with `ffserve pack`",
            )
        labelled = self.reader.label_names
        self.classes = self.find_classes(self.reader.directories)
        if not self.classes and not labelled:
            raise MissingFile(
                "there is no class: the packed directory has no directories",
                path=path,
                hint="pack a directory with one directory for each class",
            )
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        if is_valid_file is None:
            ends = None if self.extensions is None else tuple(self.extensions)
            found = [ends is None or name.lower().endswith(ends) for name in names]
        else:
            found = [is_valid_file(name) for name in names]
        keys = [
            (*_place(name), index)
            for index, (name, taken) in enumerate(zip(names, found, strict=True))
            if taken and (labelled or "/" in name)
        ]
        keys.sort()
        chosen = [index for *_, index in keys]
        rows = self.reader.labels(chosen) if labelled else []
        self.columns = {column: [row[column] for row in rows] for column in labelled}
        self.reader.select(chosen)
        self.samples = [(names[index], self.class_to_idx.get(top, -1)) for top, _, _, index in keys]
        self.targets = [label for _, label in self.samples]
        empty = sorted(set(self.classes).difference(top for top, *_ in keys))
        if empty and not allow_empty and not labelled:
            wanted = f" that ends in {', '.join(self.extensions)}" if self.extensions else ""
            raise MissingFile(
                f"there is no file{wanted} for the classes {', '.join(map(ascii, empty))}",
                path=path,
                hint="allow_empty=True allows this",
            )

    @property
    def imgs(self) -> list[tuple[str, int]]:
        """The list ``samples``."""
        return self.samples

    def find_classes(self, directories: Sequence[str]) -> list[str]:
        """Return the names of the classes in the order of their labels. A subclass may override it.

        Args: directories: all directories of the packed folder, parts joined by "/".
        """
        return sorted({directory.partition("/")[0] for directory in directories})

    def process(self, indices: Sequence[int], data: list[Any]) -> Any:
        """Return the samples of a batch; ``prepare``, if a subclass has it, takes the place of the
        loader."""
        decoded = type(self).prepare is Dataset.prepare  # else by the subclass
        samples = []
        for k, content in zip(indices, data, strict=True):
            each, target = self._load(k, content) if decoded else content, self._target(k)
            samples.append((each if self.transform is None else self.transform(each), target))
        return samples

    def _target(self, index: int) -> Any:
        target: Any = self.targets[index]
        if self.columns:
            target = {column: values[index] for column, values in self.columns.items()}
        return target if self.target_transform is None else self.target_transform(target)

    def _load(self, index: int, content: Any) -> Any:
        return self.loader(content.tobytes())


class ImageFolder(DatasetFolder):
    """Pictures of packed folders, with the directories at the top as classes.

    Args:
        paths, transform, target_transform, is_valid_file, allow_empty, check_data: as for
            DatasetFolder.
        loader: makes a picture of the bytes of a file; None: Pillow, as RGB.

    Attributes, Raises, Cost, Source: as for DatasetFolder; UsageError without a loader if Pillow is
        not installed. FormatError for a picture that Pillow cannot read.
    """

    def __init__(
        self,
        paths: Any,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        loader: Callable[[bytes], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        check_data: bool = True,
    ) -> None:
        super().__init__(
            paths,
            pillow_loader() if loader is None else loader,
            IMG_EXTENSIONS if is_valid_file is None else None,
            transform,
            target_transform,
            is_valid_file,
            allow_empty,
            check_data,
        )

    def _load(self, index: int, content: Any) -> Any:
        if self.loader is not load_picture:
            return super()._load(index, content)
        try:
            return load_picture(content.tobytes())
        except Exception as error:  # Pillow has errors of many classes for what it cannot read
            raise FormatError(
                f"cannot read the picture {self.samples[index][0]!r}: {error}",
                path=self.reader.fnames[0] if len(self.reader.fnames) == 1 else None,
                index=index,
                hint="leave it out with is_valid_file, or replace it and pack anew",
            ) from error


def load_picture(content: bytes) -> Any:
    """Return the picture in the bytes of a file, as Pillow's Image in RGB."""
    import PIL.Image

    with PIL.Image.open(io.BytesIO(content)) as picture:
        return picture.convert("RGB")


def pillow_loader() -> Callable[[bytes], Any]:
    """Return ``load_picture``. Raises: UsageError: Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Pillow is not installed: {error}",
            hint="pip install 'ffserve[images]', or give a loader",
        ) from error
    return load_picture


def _place(name: str) -> tuple[str, str, str]:
    """Return class, directory and last part of a name: samples are sorted by these."""
    directory, _, last = name.rpartition("/")
    return name.partition("/")[0], directory, last


def _not_packed(directory: str) -> UsageError:
    name = os.path.basename(os.path.abspath(directory)) or "pictures"
    return UsageError(
        "this is a directory of files, not of record files",
        path=directory,
        hint=f"pack it first: ffserve pack {directory} -o {name}.ffr, and give {name}.ffr",
    )
