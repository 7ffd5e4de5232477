"""``FileWriter`` and ``FileReader`` of the original ffrecord, over ffserve's own.

Same names, arguments and results. Where the original raises AssertionError, TypeError or
RuntimeError for a wrong call, the errors here are those too, beside being ffserve's.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import operator
import os
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ffserve import parallel
from ffserve.client.source import Batch
from ffserve.dataset import expand_paths
from ffserve.errors import MissingFile, SampleIndexError, UsageError
from ffserve.formats import by_name, suffixes
from ffserve.output import staged_directory
from ffserve.writer import create

_PROCESSES_MAX = 16
_REPORT_EVERY = 256
_SAY_EVERY_SECONDS = 2.0


class FileNameError(UsageError, AssertionError):
    """A file name that FFRecord does not take (it has to end in .ffr)."""


class FileTypeError(UsageError, TypeError, AssertionError):
    """Neither a path nor a list of paths."""


class FileMissingError(MissingFile, AssertionError):
    """There is no such file."""


class FileWriter:
    """Write an FFRecord file.

    The file takes its name when ``close`` has written and synced all of it. A writer that is
    dropped before, or left by an exception, removes what it wrote; one that is dropped when all
    ``n`` samples are there finishes the file, as the original does.

    Args:
        fname: str or PathLike ending in ``.ffr``; an existing file is replaced.
        n: the number of samples; may be left out, then it is what was written by ``close``.
    Raises:  FileNameError (an AssertionError) for another suffix; ReadError or AccessDenied when
             no file can be made there.
    Source:  HFAiLab/ffrecord 1.4.
    """

    def __init__(self, fname: str | os.PathLike[str], n: int | None = None) -> None:
        self._writer = create(_checked_name(fname), format="ffrecord", n=n)
        self._closed = False

    @property
    def n(self) -> int | None:
        """Samples announced; if none were, None until ``close`` and the number written after."""
        if self._writer.n is None and self._closed:
            return self._writer.count
        return self._writer.n

    @property
    def count(self) -> int:
        """Samples written so far."""
        return self._writer.count

    def write_one(self, buf: Any) -> None:
        """Append one sample.

        Args:    buf: any buffer, of any item size and shape; stored whole, in C order.
        Raises:  UsageError (a RuntimeError) for more than ``n`` samples, and for what is no
                 buffer (then a TypeError also); ReadError when the file cannot be written.
        """
        self._writer.write(buf)

    def close(self) -> None:
        """Finish the file; a second call does nothing.

        Raises:  UsageError (a RuntimeError) when fewer than ``n`` samples were written; writing
                 may then go on.
        """
        self._writer.close()
        self._closed = True

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._writer.__exit__(kind, *rest)
        self._closed = kind is None

    def __del__(self) -> None:
        # The original's destructor finishes a file that has all its samples, and programs rely
        # on it; an unfinished one it lets abort the whole process.
        writer = getattr(self, "_writer", None)
        if writer is None:
            return
        with contextlib.suppress(Exception):
            if writer.n is not None and writer.count == writer.n:
                writer.close()
            elif not writer.finished:
                warnings.warn(
                    f"{writer!r} was dropped unfinished; what it wrote is removed",
                    ResourceWarning,
                    stacklevel=2,
                )
                writer.abort()


class FileReader:
    """Read FFRecord files by sample index; one index space over all of them, in order.

    Args:
        fname: a file, a directory (its ``*.ffr``, not those below, sorted by name), or a list or
            tuple of files.
        check_data: compare the metadata's and every sample's checksum.
    Raises:  FileTypeError (a TypeError), FileNameError, FileMissingError (AssertionErrors) for a
             wrong name; FormatError and its kind for a damaged file.
    Cost:    opening: 12 bytes a sample read, by the daemon once for everybody if there is one.
    Source:  HFAiLab/ffrecord 1.4.
    """

    _format: str | None = "ffrecord"

    def __init__(
        self,
        fname: str | os.PathLike[str] | list[Any] | tuple[Any, ...],
        check_data: bool = True,
    ) -> None:
        import ffserve

        self._reader: Any = None
        self._n = 0
        self._fnames = self._expanded(fname)
        self._check_data = bool(check_data)
        self._reader = ffserve.open(self._fnames, format=self._format, verify=self._check_data)
        self._n = len(self._reader)

    @property
    def n(self) -> int:
        """Samples in all files together."""
        return self._n

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(shard.size for shard in self._open().shards)

    @property
    def fnames(self) -> list[str]:
        """The files, in order."""
        return self._fnames

    @property
    def check_data(self) -> bool:
        """Whether checksums are compared."""
        return self._check_data

    def read(self, indices: Iterable[int]) -> list[NDArray[np.uint8]]:
        """Read a batch of any size.

        Args:
            indices: list, tuple, ndarray, range, set or generator of integers in [0, n); order
                is kept, repeats are allowed.
        Returns: one 1-D writable uint8 array a sample, each the caller's own.
        Raises:  SampleIndexError (an IndexError) before anything is read; ChecksumError,
                 TruncatedError, ReadError for a sample that cannot be had; UsageError when closed.
        Cost:    one request to the daemon, or one batch of reads.
        """
        arrays: list[NDArray[np.uint8]] = self._open().read(self._checked(indices))
        return arrays

    def copied(
        self, indices: NDArray[np.int64], out: NDArray[np.uint8] | None = None
    ) -> Batch | None:
        """Read a batch if all of it is in memory; as ``ffserve.Reader.copied``."""
        batch: Batch | None = self._open().copied(indices, out)
        return batch

    def read_one(self, index: int) -> NDArray[np.uint8]:
        """Read one sample; as ``read`` for a single index."""
        try:
            number = operator.index(index)
        except TypeError:
            raise FileTypeError(f"a sample's index cannot be {index!r}") from None
        return self.read((number,))[0]

    def announce(
        self,
        order: Any,
        epoch: int = 0,
        *,
        name: str | None = None,
        replacement: bool = False,
    ) -> None:
        """Tell the daemon which samples will be asked for, in order; as ``Reader.announce``."""
        self._open().announce(order, epoch, name=name, replacement=replacement)

    def reached(self, epoch: int, position: int) -> None:
        """Tell the daemon how far an announced order was used; as ``Reader.reached``."""
        self._open().reached(epoch, position)

    def get_offsets(self, file_index: int) -> NDArray[np.int64]:
        """Return where the samples of one file begin, and as last entry the file's size.

        Args:    file_index: position in ``fnames``.
        Returns: int64[N+1], the caller's own.
        """
        reader, k = self._open(), self._file_index(file_index)
        starts = reader.tables(k)[0]
        offsets = np.empty(len(starts) + 1, np.int64)
        offsets[:-1] = starts
        offsets[-1] = reader.shards[k].size
        return offsets

    def get_checksums(self, file_index: int) -> NDArray[np.uint32]:
        """Return the stored checksums of one file's samples: uint32[N], the caller's own."""
        reader = self._open()
        return np.array(reader.tables(self._file_index(file_index))[2], np.uint32)

    def validate(self) -> None:
        """Read the metadata of all files again and check it, whatever ``check_data`` is.

        Raises:  ChecksumError or another FormatError (RuntimeErrors) for the first bad file.
        Cost:    12 bytes a sample read; samples are not.
        """
        self._open()
        ffrecord = by_name("ffrecord")
        for name in self._fnames:
            with open(name, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size

                def read_at(offset: int, into: memoryview, fd: int = file.fileno()) -> int:
                    return os.preadv(fd, [into], offset)

                ffrecord.open(read_at, size, name)

    def close(self) -> None:
        """Free everything; a second call does nothing. Later reads raise, attributes stay."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reader is None:
            return type(self), (self._fnames, self._check_data)
        # Of its own, also for copy.copy; it connects at its first use.
        reader = copy.copy(self._reader)
        return _copy, (type(self), self._fnames, self._check_data, reader, self._n)

    def __repr__(self) -> str:
        state = "closed, " if self._reader is None else ""
        return f"<FileReader: {state}{self._n} samples in {len(self._fnames)} files>"

    @staticmethod
    def _expanded(fname: Any) -> list[str]:
        return _expanded(fname)

    def _open(self) -> Any:
        if self._reader is None:
            raise UsageError("the reader is closed", path=self._fnames[0])
        return self._reader

    def _file_index(self, file_index: int) -> int:
        k = operator.index(file_index)
        if not 0 <= k < len(self._fnames):
            raise SampleIndexError(f"there is no file {k}, only {len(self._fnames)} files")
        return k

    def _checked(self, indices: Iterable[int]) -> NDArray[np.int64]:
        known = isinstance(indices, np.ndarray) and indices.dtype.kind != "O"
        given: NDArray[Any] = np.asarray(indices) if known else _integers(indices)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise FileTypeError(
                f"indices must be whole numbers in one row, not {given.dtype} of shape "
                f"{given.shape}"
            )
        wrong = np.flatnonzero((given < 0) | (given >= self._n)) if given.size else given
        if wrong.size:
            index = int(given[wrong[0]])
            raise SampleIndexError(
                f"there is no such sample: the files hold {self._n}",
                path=self._fnames[0] if len(self._fnames) == 1 else None,
                index=index,
                hint="indices run from 0 to n-1; negative ones are not counted from the end",
            )
        return given.astype(np.int64)


class RecordReader(FileReader):
    """A FileReader of files of any format that ffserve reads.

    Args:
        fname: as ``paths`` of ``ffserve.open``: file, directory, pattern, or a sequence of these.
        check_data: compare checksums.
    Raises:  what ``ffserve.open`` raises.
    """

    _format = None

    @staticmethod
    def _expanded(fname: Any) -> list[str]:
        return list(expand_paths(fname, suffixes=suffixes()))

    def validate(self) -> None:
        """Read again what the files say of themselves and check it; samples are not read.

        Raises:  FormatError or its kind for the first bad file.
        """
        import ffserve

        ffserve.open(self._fnames, server="off").close()


def reader_of(fnames: Any, check_data: bool) -> FileReader:
    """Return a FileReader where the original takes these names, else one of any format."""
    if isinstance(fnames, (str, os.PathLike)) and Path(fnames).is_dir():
        original = next(Path(fnames).glob("*.ffr"), None) is not None
    else:
        names = fnames if isinstance(fnames, (list, tuple)) else [fnames]
        paths = [name for name in names if isinstance(name, (str, os.PathLike))]
        original = len(paths) < len(names) or all(
            Path(os.fsdecode(name)).suffix == ".ffr" and not glob.has_magic(os.fsdecode(name))
            for name in paths
        )
    return (FileReader if original else RecordReader)(fnames, check_data)


def _copy(
    kind: type[FileReader], fnames: list[str], check_data: bool, reader: Any, n: int
) -> FileReader:
    made = kind.__new__(kind)
    made._fnames, made._check_data, made._reader, made._n = fnames, check_data, reader, n
    return made


def _integers(indices: Iterable[int]) -> NDArray[Any]:
    if type(indices) is list and set(map(type, indices)) == {int}:
        with contextlib.suppress(OverflowError):
            return np.array(indices, np.int64)
    try:
        numbers = [operator.index(i) for i in indices]
    except TypeError as error:
        raise FileTypeError(f"indices must be whole numbers: {error}") from None
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        index = max(numbers, key=abs)
        raise SampleIndexError("there is no such sample", index=index) from None


def _checked_name(fname: Any) -> str:
    if not isinstance(fname, (str, os.PathLike)):
        raise FileTypeError(f"a file name must be str or PathLike, not {type(fname).__name__}")
    name = os.fsdecode(fname)
    if Path(name).suffix != ".ffr":
        raise FileNameError(
            "the file's name does not end in .ffr",
            path=name,
            hint="rename it, or read a file of another format with ffserve.open",
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
        raise FileNameError("there is no .ffr file", path=str(fname) if fname else None)
    for name in names:
        if not Path(name).is_file():
            raise FileMissingError("there is no such file", path=name)
    return names


# ---- dump ------------------------------------------------------------------------------------


def dump(ds: Any, fname: str | os.PathLike[str], nfiles: int, verbose: bool = False) -> None:
    """Write a dataset to FFRecord files, several at a time.

    Args:
        ds: supports ``len()`` and ``[i]``; items are buffers. It is reached by fork, so that it
            need not pickle.
        fname: with ``nfiles=1`` the file, ending in ``.ffr``; else a directory, which gets
            ``PART_00000.ffr`` and so on, in order. Parts already there are replaced once all new
            ones are complete.
        nfiles: how many files; a dataset that does not fill them gets fewer, with a warning.
        verbose: report progress on standard error.
    Raises:  whatever ``ds[i]`` raised, whole; WorkerError when a worker died; UsageError,
             ReadError as ``FileWriter``. Nothing is left behind then.
    Cost:    one pass over ``ds`` in up to 16 processes.
    Source:  HFAiLab/ffrecord 1.4.
    """
    n = len(ds)
    if nfiles < 1:
        raise UsageError(f"nfiles={nfiles} has to be 1 at least")
    report = _Said(n).report if verbose else None
    if nfiles == 1:
        _write_part(os.fspath(fname), ds, 0, n, report or _nobody)
        return
    if n == 0:
        raise UsageError(f"an empty dataset does not fill {nfiles} files")
    size = -(-n // nfiles)
    starts = range(0, n, size)
    if len(starts) != nfiles:
        warnings.warn(f"{n} samples fill {len(starts)} files, not {nfiles}", stacklevel=2)
    _warn_of_leftovers(fname, len(starts))
    with staged_directory(fname, replace=True) as staging:
        work = [
            (os.path.join(staging, _part_name(k)), ds, start, min(start + size, n))
            for k, start in enumerate(starts)
        ]
        jobs = min(_PROCESSES_MAX, len(work))
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
    """Parts of an earlier, longer dump would be read together with the new ones."""
    if not os.path.isdir(directory):
        return
    new = {_part_name(k) for k in range(count)}
    others = sorted(
        name for name in os.listdir(directory) if name.endswith(".ffr") and name not in new
    )
    if others:
        warnings.warn(
            f"{os.fspath(directory)} also holds {len(others)} other .ffr files, such as "
            f"{others[0]}, which stay",
            stacklevel=3,
        )


class _Said:
    """Progress in words: a line now and then on standard error."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._done = 0
        self._next = time.monotonic() + _SAY_EVERY_SECONDS

    def report(self, samples: int, size: int) -> None:
        self._done += samples
        if self._done == self._count or time.monotonic() >= self._next:
            self._next = time.monotonic() + _SAY_EVERY_SECONDS
            print(f"{self._done}/{self._count} samples written", file=sys.stderr, flush=True)


def _nobody(samples: int, size: int) -> None:
    """Progress that nobody asked for."""
