"""The inputs of ``convert``: record files, compressed streams, directories, tar files, arrays.

A source pickles (each worker process opens it again), has a number of records, and yields a run of
its records in order. No source is ever in memory as a whole. Those of files that other packages
write are in ``kinds``.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import numpy as np

from ffserve import Batch, example, formats
from ffserve import reader as readers
from ffserve.convert import kinds, text_lines
from ffserve.convert.locations import opened
from ffserve.dataset.paths import PathLike, expand_paths
from ffserve.disk.files import is_compressed, os_error, wrap_os_error
from ffserve.errors import FFServeError, FormatError, MissingFile, ReadError, UsageError
from ffserve.folders import files_below
from ffserve.formats import Foreign, kind_of
from ffserve.formats.base import HEAD_SIZE
from ffserve.store.public import is_url, shown

BATCH_COUNT = 16_384
LOOKED_AT = 16
"""So many files of a directory are recognized by their content too, all others by their names."""
_TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_OTHER_SUFFIXES = (*_TAR_SUFFIXES, ".npy", *text_lines.SUFFIXES)


@dataclass(frozen=True, slots=True)
class Record:
    """One record: a buffer, or a dict of bytes by column (None is no value), and its name (parts
    joined by "/") if the source has names."""

    payload: Any
    name: str | None = None


class InputSource(Protocol):
    """Records in order. One whose records are dicts has ``columns`` as well, the names of these."""

    named: bool
    """All records have names, which ``names()`` yields as well, without the contents."""
    sized: bool
    """Whether ``count`` is known without a pass over the records."""

    @property
    def files(self) -> Sequence[str]:
        """The input files."""
        ...

    @property
    def count(self) -> int:
        """Number of records; computed by a pass over the input unless ``sized``."""
        ...

    def records(self, first: int, stop: int | None) -> Iterator[Record | Batch]:
        """Yield the records [first:stop]; stop=None means to the end.

        Records without names may come in batches.
        """
        ...


class RecordFiles:
    """Record files, as ``ffserve.open`` reads them; packed folders have names."""

    sized = True

    def __init__(self, files: tuple[str, ...]) -> None:
        self.files = files
        with self._open() as reader:
            self.count = len(reader)
            self._names: list[str] = reader.names
            self.labelled = bool(reader.label_names)
        self.named = bool(self._names)

    def _open(self) -> Any:
        return readers.open(self.files, server="off")

    def names(self) -> Iterator[str]:
        """Yield the names of the records."""
        return iter(self._names)

    def records(self, first: int, stop: int | None) -> Iterator[Record | Batch]:
        """Yield the records [first:stop]."""
        with self._open() as reader:
            wanted = np.arange(len(reader), dtype=np.int64)[first:stop]
            names = iter(self._names[first:stop])
            for batch in reader.batches(wanted, count=BATCH_COUNT):
                if not self.named:
                    yield batch
                    continue
                for sample in batch:
                    yield Record(sample, next(names) or None)


class StreamedRecords:
    """Compressed TFRecord files: decompressed in order as a whole, in parts read by index."""

    named = False
    sized = False

    def __init__(self, files: tuple[str, ...]) -> None:
        self.files = files

    def _open(self) -> Any:
        return readers.open(self.files, format="tfrecord", server="off")

    @cached_property
    def count(self) -> int:
        """Number of records; opens the files by index."""
        with self._open() as reader:
            return len(reader)

    def records(self, first: int, stop: int | None) -> Iterator[Record | Batch]:
        """Yield the records [first:stop]."""
        with self._open() as reader:
            whole = first == 0 and stop is None
            wanted = None if whole else np.arange(len(reader), dtype=np.int64)[first:stop]
            yield from reader.batches(wanted, count=BATCH_COUNT)


class Folder:
    """The files below a directory, depth first and sorted by name, as in ``ffserve pack``."""

    named = True
    sized = True

    def __init__(self, path: str, out: str) -> None:
        self._entries = files_below(path, out)
        self.count = len(self._entries)
        for k, (_, file) in enumerate(self._entries):
            _refuse_foreign(file, look=k < LOOKED_AT)

    @property
    def files(self) -> Sequence[str]:
        """The paths of the files."""
        return [path for _, path in self._entries]

    def names(self) -> Iterator[str]:
        """Yield the names of the files."""
        return (name for name, _ in self._entries)

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the files [first:stop]."""
        for name, path in self._entries[first:stop]:
            yield Record(wrap_os_error(content_of, path), name)


def _refuse_foreign(path: str, *, look: bool) -> None:
    """Raise if a file holds many records of another package: it would become one record."""
    head = wrap_os_error(_head, path) if look else b""
    kind, tar = kind_of(head, path), formats.by_name("tar")
    if path.lower().endswith(tar.suffixes) or (head and tar.sniff(head, len(head))):
        kind = Foreign("a tar file", "tarfile", converts=True)
    if kind is not None and kind.many:
        reader = (
            "convert it by itself"
            if kind.converts
            else f"read it with {kind.package} and write its records with ffserve.create"
        )
        raise UsageError(
            f"this is {kind.name} with many records, which would become one record",
            path=path,
            hint=f"{reader}; `ffserve pack` stores files as they are",
        )


def _head(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(HEAD_SIZE)


def content_of(path: str) -> bytes:
    """Return the content of a file."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


_PIECE_SIZE = 1 << 20


class TarMembers:
    """The regular files of a tar file, in its order."""

    named = True
    sized = False

    def __init__(self, path: str) -> None:
        self.files = (path,)

    @cached_property
    def count(self) -> int:
        """Number of files; reads all headers."""
        return sum(1 for _ in self.names())

    def names(self) -> Iterator[str]:
        """Yield the names of the files; reads all headers."""
        return (record.name or "" for record in self._members(0, 0))

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the files [first:stop]; skips the ones before."""
        yield from islice(self._members(first, stop), first, stop)

    def check_key(self, before: str | None, name: str) -> str:
        """Return the key of a member's name. Raise if it is that of the member before: a sample of
        several members, which FFRecord would hold as samples of their own."""
        key, extension = split_name(name)
        if key == before:
            raise UsageError(
                f"the sample {key!r} has several members, one of them {extension!r}, and FFRecord "
                "would hold each member as a sample of its own",
                path=self.files[0],
                hint="convert to TFRecord, which holds them together in one tf.train.Example, or "
                "drop names (--drop-names) to mix them",
            )
        return key

    def _members(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield all files; those [first:stop] with their content."""
        [path] = self.files
        k = -1
        try:
            with opened(path) as file, tarfile.open(fileobj=file) as archive:
                place = archive.fileobj
                assert place is not None
                plain = place is file
                at = file.tell()
                size = file.seek(0, os.SEEK_END)
                file.seek(at)
                for member in archive:
                    # tarfile keeps every member; without this, memory grows with the archive.
                    archive.members = []  # type: ignore[attr-defined]
                    if member.isreg():
                        if member.issparse():
                            raise FormatError(
                                f"the member {member.name!r} is a sparse file",
                                path=path,
                                hint="create the tar file without --sparse",
                            )
                        if plain and member.offset_data + member.size > size:
                            raise tarfile.ReadError("unexpected end of data")
                        k += 1
                        wanted = k >= first and (stop is None or k < stop)
                        data = _member(archive, member) if wanted else b""
                        yield Record(data, clean_name(member.name, path))
                # tarfile takes an invalid header for the end; the true end is a block of zeros.
                place.seek(archive.offset)
                if place.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError(f"invalid header at byte {archive.offset}")
                if not plain:
                    while place.read(_PIECE_SIZE):  # the compressed stream ends with a checksum
                        pass
        except (FFServeError, MemoryError):
            raise
        except OSError as error:
            raise os_error(error, path) from error
        except Exception as error:  # from tarfile and from the decompressors it uses
            raise FormatError(
                f"the tar file is damaged: {error}", path=path, hint="restore it from a copy"
            ) from error


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Read a member in pieces, because the size in its header is untrusted."""
    file, pieces, left = archive.extractfile(member), list[bytes](), member.size
    assert file is not None
    while left and (piece := file.read(min(left, _PIECE_SIZE))):
        pieces.append(piece)
        left -= len(piece)
    if left:
        raise tarfile.ReadError("unexpected end of data")
    return b"".join(pieces)


def clean_name(name: str, path: str) -> str:
    """Return a name without empty parts. Raises: FormatError: it leads elsewhere."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise FormatError(
            f"invalid member name {name!r}",
            path=path,
            hint="create the tar file without ..",
        )
    return "/".join(parts)


class ArrayRows:
    """The rows of a NumPy array: the bytes of a[0], a[1], … in C order, without dtype and shape."""

    named = False
    sized = True

    def __init__(self, path: str) -> None:
        self.files = (path,)
        array = self._open()
        self.count = len(array)

    def _open(self) -> Any:
        [path] = self.files
        try:
            with np.errstate(over="ignore"):  # numpy warns about a huge shape before it refuses it
                array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise FormatError(
                f"cannot read the array: {error}", path=path, hint="save it again with numpy.save"
            ) from None
        except OSError as error:
            raise os_error(error, path) from error
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise UsageError("the array has no rows", path=path, hint="save at least one dimension")
        if len(array) and not array.size:  # a header can claim any number of empty rows
            raise UsageError(
                f"the rows of the array are empty: its shape is {array.shape}", path=path
            )
        return array

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the rows [first:stop]."""
        for row in self._open()[first:stop]:
            yield Record(np.ascontiguousarray(row))


class Grouped:
    """A source with names, as one ``tf.train.Example`` per run of files with the same key.

    Args: fields: the payload is a dict of the files by extension instead, and the name the key.
    """

    named = False
    sized = False

    def __init__(self, source: Any, *, fields: bool = False) -> None:
        self._source = source
        self._fields = fields

    @property
    def files(self) -> Sequence[str]:
        """The input files of the source."""
        files: Sequence[str] = self._source.files
        return files

    @cached_property
    def count(self) -> int:
        """Number of groups; reads all names."""
        return sum(1 for _ in self._edges())

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the groups [first:stop]."""
        begin, end = 0, None
        if first or stop is not None:
            with contextlib.closing(self._edges()) as edges:
                begin = next(islice(edges, first, None), self._source.count)
                end = None if stop is None else next(islice(edges, stop - first - 1, None), None)
        yield from self._groups(begin, end)

    def _edges(self) -> Generator[int, None, None]:
        """Yield the number of the first record of each group."""
        before, seen = None, set[str]()
        for number, name in enumerate(self._source.names()):
            key, extension = self._stored(name)
            if before != key or extension in seen:
                yield number
                before, seen = key, set()
            seen.add(extension)

    def _groups(self, first: int, stop: int | None) -> Iterator[Record]:
        features: dict[str, Any] = {}
        for record in self._source.records(first, stop):
            assert isinstance(record, Record)
            key, extension = self._stored(record.name or "")
            if features and (features["__key__"] != key or extension in features):
                yield self._record(features)
                features = {}
            features["__key__"] = key
            features[extension] = bytes(record.payload)
        if features:
            yield self._record(features)

    def _record(self, features: dict[str, Any]) -> Record:
        if not self._fields:
            return Record(example.encode(features))
        return Record(features, os.fsdecode(features.pop("__key__")))

    def _stored(self, name: str) -> tuple[bytes, str]:
        """Return key and extension as an Example stores them: as bytes, and as the name of a
        feature, which has to be UTF-8."""
        key, extension = split_name(name)
        try:
            extension.encode()
            return os.fsencode(key), extension
        except UnicodeEncodeError:
            raise UsageError(
                f"cannot store the name {name!r} in a tf.train.Example: its extension is not UTF-8",
                path=self.files[0] if len(self.files) == 1 else None,
                hint="rename the file, convert to FFRecord, or drop names (--drop-names)",
            ) from None


class Columns:
    """Samples out of the columns of a source: of one, or fields of tar.

    Args:
        source: its records are dicts.
        fields: (name in the output, column) of each.
        format: of the output; only tar has fields.
        start: number of the first sample; a sample without a name has its number as key.
    """

    named = False

    def __init__(
        self, source: Any, fields: Sequence[tuple[str, str]], format: str, start: int
    ) -> None:
        self.files: Sequence[str] = source.files
        self.sized: bool = source.sized
        self._source, self._fields = source, fields
        self._tar, self._start = format == "tar", start
        if not self._tar and len(fields) != 1:
            raise UsageError(
                f"the samples have the columns {', '.join(repr(name) for _, name in fields)}; a "
                f"sample of {format} holds one",
                path=self.files[0] if len(self.files) else None,
                hint="choose one with --fields NAME, or write a tar file (--format tar), whose "
                "samples have fields",
            )

    @property
    def count(self) -> int:
        """Number of samples."""
        return int(self._source.count)

    def records(self, first: int, stop: int | None) -> Iterator[Record]:
        """Yield the samples [first:stop]."""
        for number, record in enumerate(self._source.records(first, stop), self._start + first):
            row = record.payload
            found = {name: row[column] for name, column in self._fields if column in row}
            found = {name: value for name, value in found.items() if value is not None}
            if not found:
                raise UsageError(
                    f"sample {number - self._start} has none of the columns "
                    f"{', '.join(repr(column) for _, column in self._fields)}; it has "
                    f"{', '.join(repr(name) for name, value in row.items() if value is not None)}",
                    path=self.files[0] if len(self.files) == 1 else None,
                    hint="choose a column that all samples have (--fields)",
                )
            if self._tar:
                yield Record(found, record.name or f"{number:09}")
            else:
                yield Record(*found.values())


def split_name(name: str) -> tuple[str, str]:
    """Split a name into key and extension as WebDataset does: at the first dot of its last part.

    The extension is "data" if there is none.
    """
    folder, slash, last = name.rpartition("/")
    begin = len(last) - len(last.lstrip("."))
    stem, _, extension = last[begin:].partition(".")
    return folder + slash + last[:begin] + stem, extension or "data"


# ---- from paths to sources -----------------------------------------------------------------------


def find_sources(
    inputs: PathLike | Sequence[PathLike],
    out: str,
    format: str,
    *,
    names: bool = True,
    kind: str | None = None,
    fields: Sequence[str] | None = None,
) -> list[InputSource]:
    """Return the sources of the given paths, in order; adjacent record files form one source.

    Args:
        out, format: of the output.
        names: they are kept.
        kind: of all inputs, a name of ``kinds.KINDS``; None recognizes it.
        fields: ``COLUMN`` or ``NAME=COLUMN`` of those to take; None for all.
    Raises:  UsageError, MissingFile, and the errors of opening the files.
    """
    paths = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    pairs = None if fields is None else tuple(map(_pair, fields))
    wanted = kinds.Wanted(pairs, out, format, names)
    sources: list[InputSource] = []
    plain: list[str] = []

    def flush() -> None:
        if plain:
            sources.append(RecordFiles(tuple(plain)))
            plain.clear()

    for path, of_kind in (found for given in paths for found in _found(os.fsdecode(given), kind)):
        if os.path.realpath(path) == os.path.realpath(out):
            raise UsageError(
                "the output is also an input", path=path, hint="choose another output path"
            )
        if of_kind is None and not _is_other(path):
            plain.append(path)
            continue
        flush()
        if of_kind is None:
            sources.append(_other(path, out))
        else:
            open_input = kinds.module_of(of_kind).open_input
            sources += [open_input(each, wanted) for each in kinds.inputs_of(of_kind, path)]
    flush()
    start = 0
    for k, source in enumerate(sources):
        sources[k] = _selected(source, wanted, start)
        start += source.count if source.sized else 0
    return sources


def _other(path: str, out: str) -> InputSource:
    """Return the source of a path that is no record file."""
    if os.path.isdir(path):
        return Folder(path, out)
    if path.lower().endswith(".npy"):
        return ArrayRows(path)
    if path.lower().endswith(text_lines.SUFFIXES):
        return text_lines.TextLines(path)
    return TarMembers(path) if path.lower().endswith(_TAR_SUFFIXES) else StreamedRecords((path,))


def _selected(source: InputSource, wanted: kinds.Wanted, start: int) -> InputSource:
    """Return samples of the wanted columns, if a source has columns or such are wanted."""
    columns: Sequence[str] | None = getattr(source, "columns", None)
    if columns is None and wanted.fields is None:
        return source
    if columns is None:
        if not source.named:
            raise UsageError(
                "the records have no fields to choose from",
                path=source.files[0] if len(source.files) else None,
                hint="leave out --fields",
            )
        source = Grouped(source, fields=True)
    fields = wanted.fields or tuple((name, name) for name in columns or ())
    return Columns(source, fields, wanted.format, start)


def _pair(field: str) -> tuple[str, str]:
    """Return the name and the column of a field that is given as COLUMN or NAME=COLUMN."""
    name, equals, column = field.partition("=")
    if not name or (equals and not column):
        raise UsageError(f"invalid field {field!r}", hint="give COLUMN or NAME=COLUMN")
    return name, column or name


def _is_other(path: str) -> bool:
    """Whether a path is no record file, or one that is decompressed in order."""
    other = os.path.isdir(path) or path.lower().endswith(_OTHER_SUFFIXES)
    return other or is_compressed(path)


def _found(given: str, kind: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the files of a path, each with its kind; a directory of others as it is."""
    if is_url(given):
        yield from ((path, None) for path in _remote(given, kind))
        return
    if kind is not None:
        paths = (given,) if os.path.isdir(given) else expand_paths(given)
        yield from ((path, kind) for path in paths)
        return
    for path in _expand(given):
        known = formats.by_suffix(path) is not None or not os.path.exists(path)
        yield path, None if known or _is_other_file(path) else kinds.recognized(path)


def _is_other_file(path: str) -> bool:
    return not os.path.isdir(path) and _is_other(path)


def _expand(path: str) -> tuple[str, ...]:
    """Return the files of a path; a directory of other files is returned as it is."""
    if os.path.isdir(path):
        own = tuple(suffix for suffix in formats.suffixes() if suffix not in _TAR_SUFFIXES)
        for suffixes in (own, _TAR_SUFFIXES):
            with contextlib.suppress(ReadError):
                return expand_paths(path, suffixes=suffixes)
        return (path,)
    return expand_paths(path)


def _remote(url: str, kind: str | None) -> tuple[str, ...]:
    """Return the files of a URL. Raises: UsageError: not record files, tar files or text."""
    own = tuple(suffix for suffix in formats.suffixes() if suffix not in _TAR_SUFFIXES)
    found: tuple[str, ...] = ()
    for suffixes in (own, _TAR_SUFFIXES, text_lines.SUFFIXES, ()):
        with contextlib.suppress(MissingFile):
            found = expand_paths(url, suffixes=suffixes)
            break
    else:
        found = expand_paths(url)  # says what is missing
    local = (".npy", *(each for name in kinds.KINDS for each in kinds.module_of(name).SUFFIXES))
    every = kind is not None or not suffixes
    other = next((path for path in found if every or path.lower().endswith(local)), None)
    if other is not None:
        raise UsageError(
            "record files, tar files and text are converted from URLs, and this is none of them",
            path=shown(other),
            hint="`ffserve stage URL -o DIRECTORY` makes local files of it, which are converted",
        )
    return found
