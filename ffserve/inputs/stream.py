"""STREAM: the lines or samples of a worker's share, for the standard input of its program.

The files of an alias are cut into splits as Hadoop's FileInputFormat cuts them: a file of up to 1.1
times `SPLIT_SIZE` is one split, a larger file has several, and compressed text is never cut. A line
belongs to the split in which it begins. The n splits go to the m workers in contiguous runs; the
first n mod m workers get one split more. Record files give samples, which `ffserve.open` reads and
checks; all others are text. Bytes pass unchanged; only a missing line end at the end of a file is
added.

A shuffle takes the share of an alias in pieces of about 1 MiB in random order, and mixes the lines
or samples of every `WINDOW_SIZE` bytes, or `WINDOW_COUNT` of them; a smaller share is shuffled as
a whole. The order is a pure function of the files, the seed, the epoch, the rank and the number of
workers.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import math
import os
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, cast

import numpy as np

import ffserve
from ffserve import formats
from ffserve.disk.files import os_error
from ffserve.errors import FFServeError, FormatError, TruncatedError, UsageError
from ffserve.formats.base import HEAD_SIZE
from ffserve.inputs.places import InputFile, local_path, open_file
from ffserve.order import permutation
from ffserve.store.public import check_store, error_of, literal, shown

Framing = Literal["lines", "length"]

SPLIT_SIZE = 128 << 20
PIECE_SIZE = 1 << 20
WINDOW_SIZE, WINDOW_COUNT = 32 << 20, 1 << 20
READ_SIZE = 1 << 20
_LINE_LIMIT = 1 << 30
_OPEN_READERS = 16

_PLAIN = (".gz", ".bz2", ".xz")
_UNKNOWN = (".zst", ".lz4", ".snappy", ".deflate", ".lzo")


@dataclass(frozen=True, slots=True)
class Split:
    """Part `part` of `parts` equal parts of a file."""

    file: InputFile
    part: int = 0
    parts: int = 1


def splits_of(files: Sequence[InputFile]) -> list[Split]:
    """Return the splits of the files of an alias, in order."""
    found = []
    for file in files:
        parts = max(1, math.ceil(file.size / SPLIT_SIZE - 0.1))
        if parts > 1 and _is_compressed(file):
            parts = 1
        found += [Split(file, part, parts) for part in range(parts)]
    return found


def share_of(splits: Sequence[Split], rank: int, workers: int) -> list[Split]:
    """Return the contiguous run of splits that one worker gets."""
    count, more = divmod(len(splits), workers)
    first = rank * count + min(rank, more)
    return list(splits[first : first + count + (rank < more)])


def _is_compressed(file: InputFile) -> bool:
    return file.name.lower().endswith(_PLAIN + _UNKNOWN)


def is_record_file(file: InputFile) -> bool:
    """Whether a file contains records, by its first bytes, or else by its suffix."""
    with _reading(file), contextlib.closing(open_file(file)) as stream:
        head = stream.read(HEAD_SIZE)
    size = max(file.size, len(head))
    # The samples of tar files have fields, which a stream of records cannot tell apart.
    names = [name for name in formats.NAMES if name != "tar"]
    if any(formats.by_name(name).sniff(head, size) is True for name in names):
        return True
    known = formats.by_suffix(file.name)
    return known is not None and known.name in names


class WorkerStream:
    """The bytes that the program of one worker reads.

    Args:
        shares: the splits of this worker, for each alias in order.
        framing: "lines" ends each line or sample with a line feed, "length" puts its size before
            it, as an unsigned 64-bit little-endian number.
        epochs: how often everything is given. seed: of the shuffle, None for none. rank: of the
            worker. piece_size, window_size: of a shuffle (see above). read_size: bytes of text
            that are read at a time.
    Raises: UsageError, AccessDenied, ReadError: there are remote files, and the store cannot be
        used.
    """

    def __init__(
        self,
        shares: Sequence[Sequence[Split]],
        *,
        framing: Framing,
        epochs: int,
        seed: int | None,
        rank: int,
        piece_size: int = PIECE_SIZE,
        window_size: int = WINDOW_SIZE,
        read_size: int = READ_SIZE,
    ) -> None:
        self._piece_size, self._window_size = piece_size, window_size
        self._read_size = read_size
        self._shares = shares
        self._framing = framing
        self._epochs = epochs
        self._seed = seed
        self._rank = rank
        self._kinds: dict[str, bool] = {}
        if any(local_path(split.file.uri) is None for splits in shares for split in splits):
            check_store()  # a fault of the store is reported before a program starts
        self._readers: dict[str, Any] = {}

    def blocks(self) -> Generator[bytes, None, None]:
        """Yield the bytes that the program reads.

        Raises: FFServeError: a file is damaged or cannot be read; it is named.
        """
        try:
            for epoch in range(self._epochs):
                for alias, splits in enumerate(self._shares):
                    if self._seed is None:
                        for split in splits:
                            yield from self._in_order(split)
                    else:
                        yield from self._shuffled(splits, self._seed, (epoch, self._rank, alias))
        finally:
            for reader in self._readers.values():
                reader.close()

    def _in_order(self, split: Split) -> Iterator[bytes]:
        if self._framing == "lines" and not self._has_records(split.file):
            yield from _line_blocks(split, self._read_size)
            return
        for items in self._items(split):
            yield _framed(items, self._framing)

    def _shuffled(
        self, splits: Sequence[Split], seed: int, key: tuple[int, ...]
    ) -> Iterator[bytes]:
        pieces = [piece for split in splits for piece in self._pieces(split)]
        window: list[bytes] = []
        number = size = 0
        for place in permutation(len(pieces), seed, (*key, 0)).tolist():
            for items in self._items(pieces[place]):
                window += items
                size += sum(map(len, items))
                if size >= self._window_size or len(window) >= WINDOW_COUNT:
                    number += 1
                    yield self._mixed(window, seed, (*key, number))
                    window, size = [], 0
        if window:
            yield self._mixed(window, seed, (*key, number + 1))

    def _mixed(self, window: list[bytes], seed: int, key: tuple[int, ...]) -> bytes:
        order = permutation(len(window), seed, key).tolist()
        return _framed([window[place] for place in order], self._framing)

    def _pieces(self, split: Split) -> Iterator[Split]:
        count = max(1, math.ceil(split.file.size / split.parts / self._piece_size))
        if _is_compressed(split.file):
            count = 1
        first, parts = split.part * count, split.parts * count
        for part in range(first, first + count):
            yield Split(split.file, part, parts)

    def _items(self, split: Split) -> Iterator[list[bytes]]:
        """Yield the lines (without their ends) or samples of a split."""
        if not self._has_records(split.file):
            for block in _line_blocks(split, self._read_size):
                yield block[:-1].split(b"\n")
            return
        reader = self._reader(split.file)
        wanted = None
        if split.parts > 1:
            count = len(reader)
            first = count * split.part // split.parts
            wanted = range(first, count * (split.part + 1) // split.parts)
        index = 0 if wanted is None else wanted.start
        for batch in reader.batches(wanted):
            items = [bytes(sample) for sample in batch]
            if self._framing == "lines":
                for number, item in enumerate(items):
                    if b"\n" in item:
                        raise UsageError(
                            "the sample contains a line feed and cannot be written as a line",
                            path=shown(split.file.uri),
                            index=index + number,
                            hint="add --framing length",
                        )
            index += len(items)
            yield items

    def _has_records(self, file: InputFile) -> bool:
        if file.uri not in self._kinds:
            self._kinds[file.uri] = is_record_file(file)
        return self._kinds[file.uri]

    def _reader(self, file: InputFile) -> Any:
        if file.uri in self._readers:
            return self._readers[file.uri]
        while len(self._readers) >= _OPEN_READERS:
            self._readers.pop(next(iter(self._readers))).close()
        self._readers[file.uri] = ffserve.open(local_path(file.uri) or literal(file.uri))
        return self._readers[file.uri]


def _framed(items: list[bytes], framing: Framing) -> bytes:
    if framing == "lines":
        return b"\n".join([*items, b""])
    sizes = np.fromiter(map(len, items), "<u8", len(items)).tobytes()
    parts = [b""] * (2 * len(items))
    parts[::2] = [sizes[at : at + 8] for at in range(0, len(sizes), 8)]
    parts[1::2] = items
    return b"".join(parts)


# ---- text ----------------------------------------------------------------------------------------


def _line_blocks(split: Split, read_size: int) -> Iterator[bytes]:
    """Yield the lines that begin in a split, in blocks of whole lines, each with its end."""
    file = split.file
    with _reading(file), contextlib.closing(open_file(file)) as stream:
        if _is_compressed(file):
            yield from _cut_lines(_decompressed(stream, file), 0, None, file, read_size)
            return
        start = file.size * split.part // split.parts
        last = split.part + 1 == split.parts
        stop = None if last else file.size * (split.part + 1) // split.parts
        yield from _cut_lines(stream, start, stop, file, read_size)


def _decompressed(stream: IO[bytes], file: InputFile) -> IO[bytes]:
    suffix = os.path.splitext(file.name)[1].lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=stream, mode="rb"))
    if suffix == ".bz2":
        return cast(IO[bytes], bz2.BZ2File(stream))
    if suffix == ".xz":
        return cast(IO[bytes], lzma.LZMAFile(stream))
    raise UsageError(
        f"cannot decompress {suffix} files",
        path=shown(file.uri),
        hint="decompress it first, or compress it as .gz, .bz2 or .xz",
    )


def _cut_lines(
    stream: IO[bytes], start: int, stop: int | None, file: InputFile, read_size: int
) -> Iterator[bytes]:
    """Yield the lines that begin at start or later, and before stop.

    A line begins behind a line feed, so the byte before `start` tells whether one begins there, and
    the lines end with the first line feed at ``stop - 1`` or later.
    """
    if start == stop:
        return
    at = max(start - 1, 0)
    if at:
        stream.seek(at)
    skipping = start > 0
    rest: list[bytes] = []
    while data := stream.read(read_size):
        if skipping:
            cut = data.find(b"\n") + 1
            at += cut or len(data)
            if stop is not None and at >= stop:
                return
            if not cut:
                continue
            skipping = False
            data = data[cut:]
        end = -1 if stop is None else data.find(b"\n", max(stop - 1 - at, 0))
        at += len(data)
        if end >= 0:
            yield b"".join(rest) + data[: end + 1]
            return
        end = data.rfind(b"\n") + 1
        if end:
            yield b"".join(rest) + data[:end]
            rest = []
        if len(data) > end:
            rest.append(data[end:])
            if len(rest) > _LINE_LIMIT // read_size:
                raise FormatError(
                    "a line is longer than 1 GiB",
                    path=shown(file.uri),
                    hint="is this a file of lines? pack it with `ffserve pack` if it is not",
                )
    if rest:
        yield b"".join(rest) + b"\n"


@contextlib.contextmanager
def _reading(file: InputFile) -> Iterator[None]:
    """Convert exceptions of reading a file to errors that name it."""
    try:
        yield
    except FFServeError:
        raise
    except EOFError:
        raise TruncatedError(
            "the compressed file ends too early",
            path=shown(file.uri),
            hint="restore the file from a copy",
        ) from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise _damaged(file, error) from error
    except Exception as error:
        path = local_path(file.uri)
        if path is None:
            raise error_of(error, file.uri) from error
        if isinstance(error, OSError) and error.errno is not None:
            raise os_error(error, path) from error
        if isinstance(error, (OSError, ValueError)):  # of bz2
            raise _damaged(file, error) from error
        raise


def _damaged(file: InputFile, error: Exception) -> FormatError:
    return FormatError(
        f"the compressed file is damaged: {error}",
        path=shown(file.uri),
        hint="restore the file from a copy",
    )


def write_all(fd: int, blocks: Iterable[bytes]) -> None:
    """Write blocks to a pipe, until its reader has closed it."""
    for block in blocks:
        left = memoryview(block)
        while left:
            try:
                left = left[os.write(fd, left) :]
            except BrokenPipeError:
                return
