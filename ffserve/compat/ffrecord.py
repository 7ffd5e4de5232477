"""Drop-in for ffrecord: ``FileReader``, ``FileWriter`` and ``dump``.

Names, arguments and results are those of HFAiLab/ffrecord 1.4. Where the original raises
AssertionError, TypeError or RuntimeError for a wrong call, the errors here inherit these as well.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import glob
import operator
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve import Batch
from ffserve import reader as readers
from ffserve.dataset.paths import expand_paths
from ffserve.disk.files import read_at_of
from ffserve.disk.output import staged_directory
from ffserve.errors import FileNameError, MissingFile, SampleIndexError, UsageError
from ffserve.formats import by_name, suffixes
from ffserve.store.urls import is_url
from ffserve.system import parallel
from ffserve.writer import create

_CHECK_FS_ALIGN = 0x8004_6664
"""Number of the ioctl request by which such a file system says so: _IOR('f', 100, int)."""
_REPORT_EVERY = 256
_REPORT_SECONDS = 2.0


class FileTypeError(UsageError, TypeError, AssertionError):
    """An argument of the wrong type."""


class FileMissingError(MissingFile, AssertionError):
    """A file that does not exist."""


class FileWriter:
    """Write an FFRecord file.

    The file takes its name when ``close`` has completely written and synced it. A writer that is
    dropped earlier, or left by an exception, removes the incomplete file. A writer that is dropped
    after all ``n`` samples were written finishes the file, as the original does.

    Args:
        fname: str or PathLike ending in ``.ffr``; an existing file is replaced.
        n: number of samples; None if it is not known before ``close``.
    Raises:  FileNameError (also an AssertionError): another suffix. MissingFile, AccessDenied,
             ReadError: the file cannot be created.
    Source:  HFAiLab/ffrecord 1.4.
    """

    def __init__(self, fname: str | os.PathLike[str], n: int | None = None) -> None:
        self._writer = create(_checked_name(fname), format="ffrecord", n=n)
        self._closed = False

    @property
    def n(self) -> int | None:
        """Number of samples given, or None; after ``close`` the number of samples written."""
        if self._writer.n is None and self._closed:
            return self._writer.count
        return self._writer.n

    @property
    def count(self) -> int:
        """Samples written so far."""
        return self._writer.count

    def write_one(self, buf: Any) -> None:
        """Append one sample.

        Args:    buf: any buffer, of any item size and shape; all its bytes are stored, in C order.
        Raises:  UsageError (also a RuntimeError): more than ``n`` samples, or not a buffer (then
                 also a TypeError). ReadError: the file cannot be written.
        """
        self._writer.write(buf)

    def close(self) -> None:
        """Finish the file. Further calls do nothing.

        Raises:  UsageError (also a RuntimeError): fewer than ``n`` samples were written; more can
                 then still be written.
        """
        self._writer.close()
        self._closed = True

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._writer.__exit__(kind, *rest)
        self._closed = kind is None

    def __del__(self) -> None:
        # The original's destructor finishes a complete file, and programs rely on that. For an
        # incomplete file it aborts the process; we only warn.
        writer = getattr(self, "_writer", None)
        if writer is None:
            return
        with contextlib.suppress(Exception):
            if writer.n is not None and writer.count == writer.n:
                writer.close()
            elif not writer.finished:
                warnings.warn(
                    f"{writer!r} was dropped before close(); its incomplete file is removed",
                    ResourceWarning,
                    stacklevel=2,
                )
                writer.abort()


class FileReader:
    """Read FFRecord files by sample index; the indices count through all files in order.

    Args:
        fname: a file, a directory (its ``*.ffr`` files sorted by name, not recursive), or a list
            or tuple of files.
        check_data: verify the checksums of the metadata and of every sample.
    Raises:  FileTypeError (also a TypeError), FileNameError, FileMissingError (also
             AssertionErrors): a wrong name. FormatError or a subclass: a damaged file.
    Cost:    opening reads 12 bytes per sample, only once per machine if there is a daemon.
    Source:  HFAiLab/ffrecord 1.4.
    """

    _format: str | None = "ffrecord"
    _whole = True
    """The names of a packed folder are a sample, as in the original."""
    _chosen: NDArray[np.int64] | None = None
    """The samples that `select` chose, by their index at opening; None: all."""
    _asked: Sequence[str] | None = None
    """The fields of tar files that are read; None: all."""

    @staticmethod
    def for_files(
        fnames: Any, check_data: bool = True, fields: Sequence[str] | None = None
    ) -> FileReader:
        """Return a FileReader if the original accepts these names; else one for files of any
        format, with names and fields as for ``ffserve.open``. The samples are those of
        ``ffserve.open``: of a packed folder its files."""
        if fields is not None:
            return RecordReader(fnames, check_data, fields)
        if isinstance(fnames, (str, os.PathLike)) and Path(fnames).is_dir():
            original = next(Path(fnames).glob("*.ffr"), None) is not None
        else:
            names = fnames if isinstance(fnames, (list, tuple)) else [fnames]
            paths = [name for name in names if isinstance(name, (str, os.PathLike))]
            original = len(paths) < len(names) or all(
                Path(os.fsdecode(name)).suffix == ".ffr"
                and not glob.has_magic(os.fsdecode(name))
                and not is_url(os.fsdecode(name))
                for name in paths
            )
        return (OpenedReader if original else RecordReader)(fnames, check_data)

    def __init__(
        self,
        fname: str | os.PathLike[str] | list[Any] | tuple[Any, ...],
        check_data: bool = True,
    ) -> None:
        self._reader: Any = None
        self._n = 0
        files = self._expanded(fname)
        self._fnames = list(files)
        self._check_data = bool(check_data)
        self._reader = readers.open_files(
            files,
            self._format,
            verify=self._check_data,
            whole=self._whole,
            fields=self._asked,
        )
        self._n = len(self._reader)

    @property
    def n(self) -> int:
        """Number of samples in all files."""
        return self._n

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(shard.size for shard in self._open().shards)

    @property
    def fnames(self) -> list[str]:
        """The files, in order."""
        return self._fnames

    @property
    def check_data(self) -> bool:
        """Whether checksums are verified."""
        return self._check_data

    def read(self, indices: Iterable[int]) -> list[NDArray[np.uint8]]:
        """Read a batch of any size.

        Args:
            indices: list, tuple, ndarray, range, set or generator of integers in [0, n); order is
                kept, repeats are allowed.
        Returns: one 1-D writable uint8 array per sample; the caller owns the arrays.
        Raises:  SampleIndexError (also an IndexError): an invalid index; nothing is read then.
                 ChecksumError, TruncatedError, ReadError: a sample cannot be read. UsageError: the
                 reader is closed.
        Cost:    one request to the daemon, or one batch of reads.
        """
        arrays: list[NDArray[np.uint8]]
        reader, kind = self._reader, type(indices)
        if reader is None or (kind is not list and kind is not tuple):
            arrays = self._open().read(self._checked(indices))
            return arrays
        try:
            arrays = reader.read(indices)
        except (UsageError, SampleIndexError):
            # These checks raise the errors of the original.
            arrays = reader.read(self._checked(indices))
        return arrays

    def read_batch(self, indices: Any, out: NDArray[np.uint8] | None = None) -> Batch:
        """Read a batch into one buffer; see ``ffserve.Reader.read_batch``."""
        batch: Batch = self._open().read_batch(indices, out=out)
        return batch

    def sizes(self, indices: Any = None) -> NDArray[np.int64]:
        """Return the sizes of samples in bytes; see ``ffserve.Reader.sizes``."""
        sizes: NDArray[np.int64] = self._open().sizes(indices)
        return sizes

    def read_one(self, index: int) -> Any:
        """Read one sample; as ``read`` for a single index."""
        try:
            number = operator.index(index)
        except TypeError:
            raise FileTypeError(f"invalid sample index {index!r}: not an integer") from None
        read: Any = self.read((number,))
        return {name: column[0] for name, column in read.items()} if self.several else read[0]

    def announce(
        self,
        order: Any,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Announce the samples that will be read, in order; see ``Reader.announce``."""
        self._open().announce(order, epoch, name=name, replacement=replacement)

    def reached(self, epoch: int, position: int) -> None:
        """Report how far an announced order was used; see ``Reader.reached``."""
        self._open().reached(epoch, position)

    def current_source(self, *, lead: bool = False) -> Any:
        """Return where samples come from at present; see `Reader.current_source`."""
        return self._open().current_source(lead=lead)

    @property
    def source(self) -> str:
        """Where samples come from now; see ``ffserve.Reader.source``."""
        source: str = self._open().source
        return source

    @property
    def fields(self) -> list[str]:
        """The fields of the samples of tar files; see ``ffserve.Reader.fields``."""
        fields: list[str] = self._open().fields
        return fields

    @property
    def several(self) -> bool:
        """Whether samples have several fields, so that ``read`` returns a dict."""
        return isinstance(self._reader, readers.FieldReader)

    def keys(self, indices: Any) -> list[str]:
        """Return the keys of samples of tar files; see ``ffserve.Reader.keys``."""
        keys: list[str] = self._open().keys(indices)
        return keys

    @property
    def names(self) -> list[str]:
        """The names of the samples; see ``ffserve.Reader.names``."""
        names: list[str] = self._open().names
        return names

    @property
    def directories(self) -> list[str]:
        """The directories of packed folders; see ``ffserve.Reader.directories``."""
        directories: list[str] = self._open().directories
        return directories

    @property
    def label_names(self) -> list[str]:
        """The columns of the labels; see ``ffserve.Reader.label_names``."""
        names: list[str] = self._open().label_names
        return names

    def labels(self, indices: Any) -> list[dict[str, Any]]:
        """Return the labels of samples; see ``ffserve.Reader.labels``."""
        rows: list[dict[str, Any]] = self._open().labels(indices)
        return rows

    @property
    def shown(self) -> tuple[Any, ...]:
        """A key of the samples; see ``ffserve.Reader.shown``."""
        shown: tuple[Any, ...] = self._open().shown
        return shown

    def select(self, indices: Any) -> None:
        """Show only these samples, in this order; see ``ffserve.Reader.select``."""
        chosen = np.asarray(indices, np.int64)
        self._open().select(chosen)
        self._n = len(self._reader)
        self._chosen = chosen if self._chosen is None else self._chosen[chosen]

    def sample_numbers(self, indices: Any) -> NDArray[np.int64]:
        """Return what ``current_source`` takes for these indices; see ``Reader.sample_numbers``."""
        numbers: NDArray[np.int64] = self._open().sample_numbers(indices)
        return numbers

    def sample_indices(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of such numbers."""
        indices: NDArray[np.int64] = self._open().sample_indices(numbers)
        return indices

    def get_offsets(self, file_index: int) -> NDArray[np.int64]:
        """Return the offsets of the samples of one file, followed by the end of the last one: the
        size of the file, or the offset of a packed folder's names where these are no sample.

        Args:    file_index: position in ``fnames``.
        Returns: int64[N+1], owned by the caller.
        """
        reader, k = self._open(), self._file_index(file_index)
        starts, sizes, _ = reader.tables(k)
        shard = reader.shards[k]
        offsets = np.empty(len(starts) + 1, np.int64)
        offsets[:-1] = starts
        offsets[-1] = shard.size
        if shard.format == "ffrecord" and len(starts):
            offsets[-1] = int(starts[-1]) + int(sizes[-1])
        return offsets

    def get_checksums(self, file_index: int) -> NDArray[np.uint32]:
        """Return the stored checksums of one file's samples: uint32[N], owned by the caller."""
        reader = self._open()
        return np.array(reader.tables(self._file_index(file_index))[2], np.uint32)

    def validate(self) -> None:
        """Read and check the metadata of all files again, regardless of ``check_data``.

        Raises:  ChecksumError or another FormatError (also RuntimeErrors): the first damaged file.
        Cost:    reads 12 bytes per sample; the samples are not read.
        """
        self._open()
        ffrecord = by_name("ffrecord")
        for name in self._fnames:
            with open(name, "rb", buffering=0) as file:
                fd = file.fileno()
                ffrecord.open(read_at_of(fd, name), os.fstat(fd).st_size, name)

    def close(self) -> None:
        """Free all resources. Further calls do nothing, and later reads raise; the attributes
        remain."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reader is None:
            kept = type(self), self._fnames, self._check_data, self._asked, self._chosen
            return _reopened, kept
        # The copy has its own reader, which connects at its first use.
        kept = type(self), self._fnames, self._check_data, self._asked, self._chosen
        return _copy, (*kept, copy.copy(self._reader), self._n)

    def __repr__(self) -> str:
        state = "closed, " if self._reader is None else ""
        return f"<FileReader: {state}{self._n} samples in {len(self._fnames)} files>"

    @staticmethod
    def _expanded(fname: Any) -> Sequence[str]:
        return _expanded(fname)

    def _open(self) -> Any:
        if self._reader is None:
            raise UsageError(
                "cannot read: the reader is closed", path=self._fnames[0], hint="open a new one"
            )
        return self._reader

    def _file_index(self, file_index: int) -> int:
        k = operator.index(file_index)
        if not 0 <= k < len(self._fnames):
            raise SampleIndexError(
                f"file index {k} is out of range",
                hint=f"use file indices from 0 to {len(self._fnames) - 1}",
            )
        return k

    def _checked(self, indices: Iterable[int]) -> NDArray[np.int64]:
        known = isinstance(indices, np.ndarray) and indices.dtype.kind != "O"
        given: NDArray[Any] = np.asarray(indices) if known else _integers(indices)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise FileTypeError(
                f"invalid indices: expected integers in one dimension, not {given.dtype} of shape "
                f"{given.shape}"
            )
        numbers = given.astype(np.int64)
        # As an unsigned number a negative one is too large as well.
        if numbers.size and int(numbers.view(np.uint64).max()) >= self._n:
            index = int(given[np.flatnonzero((given < 0) | (given >= self._n))[0]])
            raise SampleIndexError(
                f"index out of range: the files contain {self._n} samples",
                path=self._fnames[0] if len(self._fnames) == 1 else None,
                index=index,
                hint="use indices from 0 to n-1; negative ones are not supported",
            )
        return numbers


class OpenedReader(FileReader):
    """A FileReader whose samples are those of ``ffserve.open``: of a packed folder its files."""

    _whole = False


class RecordReader(OpenedReader):
    """A FileReader for files of any format.

    Args:
        fname: as ``paths`` of ``ffserve.open``: file, directory, pattern, or a sequence of these.
        check_data: verify checksums. fields: as of ``ffserve.open``.
    Raises:  as ``ffserve.open``.
    """

    _format = None

    def __init__(
        self, fname: Any, check_data: bool = True, fields: Sequence[str] | None = None
    ) -> None:
        self._asked = fields
        super().__init__(fname, check_data)

    @staticmethod
    def _expanded(fname: Any) -> Sequence[str]:
        return expand_paths(fname, suffixes=suffixes())

    def validate(self) -> None:
        """Read and check the metadata of all files again; the samples are not read.

        Raises:  FormatError or a subclass: the first damaged file.
        """
        with readers.open(self._fnames, server="off") as reader:
            _ = reader.shards  # a reader of compressed files opens them now


def checkFsAlign(fd: int) -> bool:  # noqa: N802
    """Return whether the file system says that it aligns reads itself.

    Only the original's own file system knows the question; nothing here depends on the answer.

    Args:    fd: descriptor of an open file.
    Source:  HFAiLab/ffrecord 1.4.
    """
    answer = bytearray(4)
    try:
        fcntl.ioctl(fd, _CHECK_FS_ALIGN, answer)
    except (OSError, ValueError):
        return False
    return int.from_bytes(answer, sys.byteorder) == 1


def _copy(
    kind: type[FileReader],
    fnames: list[str],
    check_data: bool,
    asked: Sequence[str] | None,
    chosen: NDArray[np.int64] | None,
    reader: Any,
    n: int,
) -> FileReader:
    made = kind.__new__(kind)
    made._fnames, made._check_data, made._chosen = fnames, check_data, chosen
    made._asked = asked
    made._reader, made._n = reader, n
    return made


def _reopened(
    kind: type[FileReader],
    fnames: list[str],
    check_data: bool,
    asked: Sequence[str] | None,
    chosen: NDArray[np.int64] | None,
) -> FileReader:
    fields = () if asked is None else (asked,)
    made = kind(fnames, check_data, *fields)
    if chosen is not None:
        made.select(chosen)
    return made


def _integers(indices: Iterable[int]) -> NDArray[Any]:
    try:
        numbers = [operator.index(i) for i in indices]
    except TypeError as error:
        raise FileTypeError(f"invalid indices: {error}") from None
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        index = max(numbers, key=abs)
        raise SampleIndexError(
            "index out of range: it does not fit into 64 bits", index=index
        ) from None


def _checked_name(fname: Any) -> str:
    if not isinstance(fname, (str, os.PathLike)):
        raise FileTypeError(
            f"invalid file name: expected str or PathLike, not {type(fname).__name__}"
        )
    name = os.fsdecode(fname)
    if Path(name).suffix != ".ffr":
        raise FileNameError(
            "the file name does not end in .ffr",
            path=name,
            hint="rename the file, or read other formats with ffserve.open",
        )
    return name


def _expanded(fname: Any) -> list[str]:
    if isinstance(fname, (list, tuple)):
        names = [_checked_name(name) for name in fname]
    elif isinstance(fname, (str, os.PathLike)) and Path(fname).is_dir():
        names = sorted(str(path) for path in Path(fname).glob("*.ffr"))
    else:
        names = [_checked_name(fname)]
    if not names:
        raise FileNameError(
            "no .ffr file found",
            path=str(fname) if fname else None,
            hint="give at least one file, or a directory that contains .ffr files",
        )
    for name in names:
        if not Path(name).is_file():
            raise FileMissingError("no such file", path=name, hint="check the path on this machine")
    return names


# ---- dump ------------------------------------------------------------------------------------


def dump(ds: Any, fname: str | os.PathLike[str], nfiles: int, verbose: bool = False) -> None:
    """Write a dataset to FFRecord files in parallel.

    Args:
        ds: supports ``len()`` and ``[i]``; items are buffers. Worker processes inherit it by fork,
            so it need not pickle.
        fname: with ``nfiles=1`` the file, ending in ``.ffr``; else a directory that receives
            ``PART_00000.ffr`` and so on, in order. Existing parts are replaced after all new ones
            are complete.
        nfiles: number of files; a dataset too small for them gets fewer, with a warning.
        verbose: report progress on standard error.
    Raises:  the exception of ``ds[i]``; WorkerError: a worker process died; UsageError, ReadError:
             as ``FileWriter``. No file is left behind.
    Cost:    one pass over ``ds`` in up to 16 processes.
    Source:  HFAiLab/ffrecord 1.4.
    """
    n = len(ds)
    if nfiles < 1:
        raise UsageError(f"nfiles={nfiles} must be at least 1")
    report = _ProgressLine(n).report if verbose else None
    if nfiles == 1:
        _write_part(os.fspath(fname), ds, 0, n, report or parallel.no_progress)
        return
    if n == 0:
        raise UsageError(
            f"the dataset is empty and cannot be split into {nfiles} files", hint="use nfiles=1"
        )
    size = -(-n // nfiles)
    starts = range(0, n, size)
    if len(starts) != nfiles:
        warnings.warn(f"{n} samples fill only {len(starts)} files, not {nfiles}", stacklevel=2)
    _warn_of_leftovers(fname, len(starts))
    with staged_directory(fname, replace=True) as staging:
        work = [
            (os.path.join(staging, _part_name(k)), ds, start, min(start + size, n))
            for k, start in enumerate(starts)
        ]
        jobs = min(16, len(work))
        parallel.run(_write_part, work, jobs=jobs, method="fork", progress=report)


def _part_name(k: int) -> str:
    return f"PART_{k:05d}.ffr"


def _write_part(out: str, ds: Any, start: int, end: int, report: parallel.Progress) -> None:
    reported = 0
    with FileWriter(out, end - start) as writer:
        for i in range(start, end):
            writer.write_one(ds[i])
            if writer.count - reported == _REPORT_EVERY:
                report(_REPORT_EVERY, 0)
                reported = writer.count
    report(end - start - reported, 0)


def _warn_of_leftovers(directory: str | os.PathLike[str], count: int) -> None:
    """Warn about parts of an earlier dump, which would be read together with the new ones."""
    if not os.path.isdir(directory):
        return
    new = {_part_name(k) for k in range(count)}
    others = sorted(
        name for name in os.listdir(directory) if name.endswith(".ffr") and name not in new
    )
    if others:
        warnings.warn(
            f"{os.fspath(directory)} contains {len(others)} other .ffr files, such as "
            f"{others[0]}; they are kept",
            stacklevel=3,
        )


class _ProgressLine:
    """Progress as a line on standard error every few seconds."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._done = 0
        self._next = time.monotonic() + _REPORT_SECONDS

    def report(self, samples: int, size: int) -> None:
        self._done += samples
        if self._done == self._count or time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_SECONDS
            print(f"{self._done}/{self._count} samples written", file=sys.stderr, flush=True)
