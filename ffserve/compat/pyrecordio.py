"""Drop-in for pyrecordio: ``File``; and ``index``, the chunks of a RecordIO file.

    from ffserve.recordio import File

    with File("x.recordio", "w") as out:
        out.write("abc")
    with File("x.recordio", "r") as records:
        assert records.get(0) == b"abc" and list(records) == [b"abc"]

Reading uses the daemon if there is one, as `ffserve.open` does. A new file takes its name when it
is closed. Appending ('a') writes in place; complete chunks are never lost.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from ffserve import reader as readers
from ffserve import writer as writers
from ffserve.disk.files import open_regular, read_at_of
from ffserve.errors import SampleIndexError, UsageError
from ffserve.formats import ChunkedShard, by_name
from ffserve.reader import Reader
from ffserve.writer import Appender, Writer, flat


class Compressor(enum.Enum):
    """Compression of a chunk, with pyrecordio's names and numbers."""

    no_compression = 1
    snappy = 2
    gzip = 3


_COMPRESSIONS = {"no_compression": "none", "none": "none", "snappy": "snappy", "gzip": "gzip"}


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a file that can be read separately.

    chunks, records: ranges of chunk and record numbers. begin, end: their bytes in the file.
    """

    chunks: range
    records: range
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Index:
    """The chunks of a file.

    offsets, sizes: int64[n], bytes of each chunk in the file, including its header. counts:
    int64[n], records in each chunk.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def record_count(self) -> int:
        """Number of records in the file."""
        return int(self.counts.sum())

    def partition(self, k: int) -> list[Task]:
        """Split the file into `k` runs of whole chunks with about equal numbers of records.

        Returns: `k` tasks in order, which cover the whole file; some are empty if the file has
            fewer than `k` chunks.
        Raises:  UsageError: `k` is below 1.
        Cost:    no I/O.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UsageError(
                f"cannot split a file into {k!r} parts", hint="give an integer of at least 1"
            )
        firsts = np.concatenate(([0], np.cumsum(self.counts))).astype(np.int64)
        aims = np.arange(k + 1) * int(firsts[-1]) / k
        edges = np.searchsorted(firsts, aims)
        before = np.maximum(edges - 1, 0)
        edges = np.where(aims - firsts[before] < firsts[edges] - aims, before, edges)
        edges[0], edges[-1] = 0, len(self)
        places = np.append(self.offsets, 0)
        places[-1] = self.offsets[-1] + self.sizes[-1] if len(self) else 0
        return [
            Task(
                range(low, high),
                range(int(firsts[low]), int(firsts[high])),
                int(places[low]),
                int(places[high]),
            )
            for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ]


def index(path: str | os.PathLike[str]) -> Index:
    """Return the chunks of a RecordIO file.

    Raises:  FormatError, TruncatedError, MissingFile, AccessDenied, ReadError.
    Cost:    one scan of the chunk headers.
    """
    name = os.fspath(path)
    fd = open_regular(name)
    try:
        shard = by_name("recordio").open(read_at_of(fd, name), os.fstat(fd).st_size, name)
    finally:
        os.close(fd)
    assert isinstance(shard, ChunkedShard)
    chunks = shard.chunks
    return Index(chunks.begins, chunks.ends - chunks.begins, np.diff(chunks.firsts))


class File:
    """A RecordIO file, opened for reading, writing or appending.

    Args:
        file_path: the file.
        mode: "r" or "read". "w" or "write": a new file, which replaces an existing one when it is
            closed. "a" or "append": extend a file; an incomplete last chunk, which a writer that
            died leaves behind, is cut off first.
        max_chunk_size: payload bytes per chunk; None for 1024 in dialect py and 32 MiB in go.
        compressor: a Compressor (also pyrecordio's own), or "none", "snappy", "gzip".
        encoder: called with each object given to `write`; returns bytes, or str to store as UTF-8.
        decoder: called with the bytes of each record that is read.
        dialect: "py" or "go"; reading detects it, appending takes the file's own.
        server, on_error: for reading, as for `ffserve.open`.

    Raises:  UsageError: an invalid argument. Otherwise as `ffserve.open` and `ffserve.create`.
    """

    def __init__(
        self,
        file_path: str | os.PathLike[str],
        mode: str = "r",
        *,
        max_chunk_size: int | None = None,
        compressor: Any = Compressor.snappy,
        encoder: Callable[[Any], Any] | None = None,
        decoder: Callable[[bytes], Any] | None = None,
        dialect: str | None = None,
        server: str = "auto",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        self._path = os.fspath(file_path)
        self._encoder = encoder
        self._decoder = decoder
        self._reader: Reader | None = None
        self._writer: Writer | Appender | None = None
        options: dict[str, Any] = {
            "dialect": dialect,
            "compression": _compression(compressor),
            "max_chunk_size": max_chunk_size,
        }
        if mode in ("r", "read"):
            self._reader = readers.open(
                self._path, format="recordio", server=server, on_error=on_error
            )
        elif mode in ("w", "write"):
            self._writer = writers.create(self._path, format="recordio", **options)
        elif mode in ("a", "append"):
            self._writer = Appender(self._path, **options)
        else:
            raise UsageError(f"invalid mode {mode!r}", hint="use 'read', 'write' or 'append'")

    # ---- reading --------------------------------------------------------------------------

    def _reading(self) -> Reader:
        if self._reader is None:
            raise UsageError(
                "cannot read: the file was not opened for reading",
                path=self._path,
                hint="open it with mode 'r'",
            )
        return self._reader

    def _decoded(self, record: bytes) -> Any:
        return record if self._decoder is None else self._decoder(record)

    def get(self, index: int) -> Any:
        """Return one record, decoded.

        Raises:  SampleIndexError (also an IndexError): a negative index, or one beyond the last.
                 Otherwise as `ffserve.Reader.read`.
        """
        return self._decoded(self._reading().read([index])[0].tobytes())

    def count(self) -> int:
        """Return the number of records."""
        return len(self._reading())

    def __len__(self) -> int:
        return self.count()

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        count = self.count()
        if isinstance(index, slice):
            found = self._reading().read(range(count)[index])
            return [self._decoded(record.tobytes()) for record in found]
        if index < -count:
            raise SampleIndexError(
                f"index out of range: the file has {count} records", path=self._path, index=index
            )
        return self.get(index + count if index < 0 else index)

    def get_reader(self, start: int = 0, end: int | None = None) -> Iterator[Any]:
        """Return an iterator over the records [start:end], which reads ahead."""
        reader = self._reading()
        return self._records(reader, range(len(reader))[start:end])

    def _records(self, reader: Reader, chosen: range) -> Iterator[Any]:
        for batch in reader.batches(chosen):
            for record in batch:
                yield self._decoded(record.tobytes())

    def __iter__(self) -> Iterator[Any]:
        return self.get_reader()

    def index(self) -> Index:
        """Return the chunks of the file; `index().partition(k)` splits them among `k` tasks."""
        self._reading()
        return index(self._path)

    # ---- writing --------------------------------------------------------------------------

    def write(self, record: Any) -> None:
        """Append a record.

        Args:    record: bytes, any buffer, or str to store as UTF-8; or the argument of `encoder`.
        Raises:  UsageError: neither buffer nor str, or the file was opened for reading.
                 ReadError: the file cannot be written.
        """
        if self._writer is None:
            raise UsageError(
                "cannot write: the file was not opened for writing",
                path=self._path,
                hint="open it with mode 'w' or 'a'",
            )
        encoded = record if self._encoder is None else self._encoder(record)
        if isinstance(encoded, str):
            encoded = encoded.encode()
        if isinstance(self._writer, Writer):
            self._writer.write(encoded)
        else:
            self._writer.write(flat(encoded))

    # ---- life -----------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the file. Further calls do nothing."""
        for side in (self._reader, self._writer):
            if side is not None:
                side.close()

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None and isinstance(self._writer, Writer):
            self._writer.abort()
        self.close()


def _compression(compressor: Any) -> str:
    name = compressor.name if isinstance(compressor, enum.Enum) else compressor
    found = _COMPRESSIONS.get(name) if isinstance(name, str) else None
    if found is None:
        raise UsageError(f"unknown compressor {compressor!r}", hint="use none, snappy or gzip")
    return found
