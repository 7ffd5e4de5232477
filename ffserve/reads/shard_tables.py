"""Opening: from open files to the tables of their shards, those of several files at a time.

Each step is one call of C for all files. Files that are small, or whose tables are, are read from
their heads (`formats.base.Format.open_small`); others, and all that are not in order, are opened
one by one (`shardfile.py`), which says what is wrong. The tables of all are then entered into
arrays of the caller's: the directory of the daemon, or the tables of a source.

A file system can hang in any call on its files: a daemon does all of this in threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ffserve import formats
from ffserve.disk import index_file
from ffserve.disk.shardfile import open_shard, scanned_as
from ffserve.dtypes import Int64s
from ffserve.engine.many_files import read_pieces, stat_fds
from ffserve.errors import FFServeError, FormatError
from ffserve.formats.base import (
    HEAD_SIZE,
    UNKNOWN_LENGTH,
    Admit,
    ChunkedShard,
    Heads,
    Shard,
    SmallShards,
    is_chunked,
    members_of,
    needs_scan,
    opens_small,
    unbounded,
)
from ffserve.formats.members import Members
from ffserve.formats.tfrecord import FORMAT as TFRECORD

SMALL_SIZE = 16 << 10
"""Bytes of each file that are read at once: 4 MiB of 256 files."""
OPENED_AT_ONCE = 256
"""One call reads the heads of this many files."""
_MAX_OFFSET = 1 << 62
"""A read that begins here ends below 2^63, the limit of off_t."""
_STEP = 1 << 20
"""This many samples are checked at a time, which bounds temporary memory for large tables."""


@dataclass(frozen=True, slots=True)
class How:
    """The settings by which shards are opened.

    format: name; None detects it. verify, tolerant, seen, keep: see `shardfile.open_shard`.
    max_chunk_size: larger chunks, encoded or decoded, are unreadable.
    """

    format: str | None
    verify: bool
    tolerant: bool
    max_chunk_size: int
    keep: index_file.Keep = "own"
    seen: Callable[[int], object] | None = None


@dataclass(slots=True)
class OpenFiles:
    """Open files whose heads were read; the first files only, if an error ended that.

    fds: without O_DIRECT. formats: of each, None if that is not known; then parsing says what is
    wrong. indexes: descriptors of index files that came with them.
    """

    fds: list[int]
    paths: list[str]
    heads: Heads
    formats: list[str | None]
    indexes: list[int | None]

    @classmethod
    def of(
        cls,
        fds: Sequence[int],
        paths: list[str],
        sizes: Int64s,
        format: str | None,
        indexes: list[int | None] | None = None,
    ) -> OpenFiles:
        """Read the heads of files, and detect their formats so that naming them or not leads to the
        same shards. Args: sizes: of the files."""
        content, got, _ = read_pieces(np.array(fds, np.int32), sizes, SMALL_SIZE)
        return cls.with_heads(Heads(content, got, sizes), paths, format, fds, indexes)

    @classmethod
    def with_heads(
        cls,
        heads: Heads,
        paths: list[str],
        format: str | None,
        fds: Sequence[int] = (),
        indexes: list[int | None] | None = None,
    ) -> OpenFiles:
        """Return the same of files whose heads were read. Args: fds: (): the heads are all that is
        read of them."""
        names: list[str | None] = [format] * len(paths)
        rows = zip(paths, heads.got.tolist(), heads.sizes.tolist(), strict=False)
        for k, (path, there, size) in enumerate(() if format else rows):
            with contextlib.suppress(FFServeError):
                head = heads.bytes[k, : min(there, HEAD_SIZE)].tobytes()
                names[k] = formats.detect(head, path, size).name
        indexes = [None] * len(paths) if indexes is None else indexes
        return cls(list(fds), paths, heads, names, indexes)


@dataclass(slots=True)
class Tables:
    """The tables of a file of `size` bytes, before they are entered anywhere.

    small, at: it was opened with others; the row of its first sample in their tables. single: it
    was opened by itself. scanned: see `shardfile.scanned_as`. truncated: records reach beyond the
    end of the file.
    """

    format: str
    size: int
    count: int
    kind: int
    fingerprint: int
    chunked: ChunkedShard | None
    scanned: str | None
    payload_size: int = 0
    truncated: bool = False
    small: SmallShards | None = None
    at: int = 0
    single: Shard | None = None

    @property
    def members(self) -> Members | None:
        """What the records are, if they are members of samples."""
        return None if self.single is None else members_of(self.single)

    @classmethod
    def of(cls, shard: Shard, max_chunk_size: int, scanned: str | None = None) -> Tables:
        """Return the tables of a shard that was opened alone."""
        chunked = shard if is_chunked(shard) else None
        if chunked is not None:
            chunked.limit(max_chunk_size)
        about = shard.format, shard.size, shard.count, shard.checksum_kind, shard.fingerprint
        return cls(*about, chunked, scanned, single=shard)


class Destination(Protocol):
    """The destination of tables."""

    @property
    def offsets(self) -> NDArray[np.uint64]:
        """By sample: of the payload in its file."""
        ...

    @property
    def checksums(self) -> NDArray[np.uint32]:
        """By sample."""
        ...

    def set_lengths(self, start: int, lengths: NDArray[np.uint64]) -> None:
        """Enter lengths from a sample on."""
        ...


# ---- reading -------------------------------------------------------------------------------------


def read_together(files: OpenFiles, rows: Sequence[int], how: How) -> dict[int, Tables]:
    """Return the tables of those of some files that are read together, by row."""
    found: dict[int, Tables] = {}
    by_name: dict[str, list[int]] = {}
    for k in rows:
        name = files.formats[k]
        if name and not how.tolerant and k < len(files.heads.got):
            by_name.setdefault(name, []).append(k)
    for name, some in by_name.items():
        chosen = formats.by_name(name)
        if how.seen is not None and needs_scan(chosen):
            continue
        if opens_small(chosen):
            paths = [files.paths[k] for k in some]
            small = chosen.open_small(files.heads.take(some), paths, verify=how.verify)
            _enter(found, files, some, name, small, how)
        if name == TFRECORD.name:
            _read_indexed(found, files, [k for k in some if k not in found], how)
    return found


def _enter(
    found: dict[int, Tables],
    files: OpenFiles,
    rows: list[int],
    name: str,
    small: SmallShards,
    how: How,
) -> None:
    scanned = name if needs_scan(formats.by_name(name)) else None
    chunked = small.chunked or [None] * len(rows)
    columns = small.done, small.counts, np.cumsum(small.counts), small.payload_sizes
    lists = (each.tolist() for each in columns)
    each = zip(rows, *lists, small.fingerprints, small.kinds, chunked, strict=True)
    for k, done, count, end, payload_size, fingerprint, kind, shard in each:
        if not done:
            continue
        size = int(files.heads.sizes[k])
        if shard is not None and max(payload_size, size) > how.max_chunk_size:
            shard.limit(how.max_chunk_size)
            payload_size = int(shard.chunks.sizes.sum())
        about = name, size, count, kind, fingerprint, shard, scanned, payload_size
        found[k] = Tables(*about, small=small, at=end - count)


def _read_indexed(found: dict[int, Tables], files: OpenFiles, rows: list[int], how: How) -> None:
    """Read the tables of TFRecord files that came with small index files."""
    sizes, got = files.heads.sizes, files.heads.got
    rows = [
        k
        for k in rows
        if files.indexes[k] is not None
        and sizes[k] >= index_file.MIN_INDEXED_SIZE
        and got[k] == SMALL_SIZE
    ]
    if not rows:
        return
    heads = files.heads.take(rows)
    fds = np.array([files.fds[k] for k in rows], np.int32)
    indexes = np.array([files.indexes[k] for k in rows], np.int32)
    states, gone = stat_fds(fds)
    about, lost = stat_fds(indexes)
    begins = heads.sizes - index_file.END_SIZE
    tails, tail_sizes, unread = read_pieces(fds, heads.sizes, index_file.END_SIZE, begins)
    index_sizes = about["size"].copy()
    content, content_sizes, failed = read_pieces(indexes, index_sizes, SMALL_SIZE)
    if gone or lost or unread or failed or (tail_sizes < index_file.END_SIZE).any():
        return  # one by one it becomes clear which file it is
    done, counts, tables = index_file.decode_small(
        content, content_sizes, index_sizes, heads.sizes, states["mtime"].copy(),
        heads.bytes, tails,
    )  # fmt: skip
    # Older ones are compared with the file, and newer ones in the cache count.
    fresh = states["ctime"] <= about["mtime"]
    fresh &= index_file.are_trusted(about["mode"], about["uid"], states["uid"])
    inodes = zip(states["device"].tolist(), states["inode"].tolist(), strict=True)
    fresh &= ~np.array(index_file.are_cached(inodes), np.bool_)
    small = TFRECORD.small_shards(done, counts, tables, heads.sizes)
    small.done = done & fresh
    _enter(found, files, rows, TFRECORD.name, small, how)


def read_all(fds: list[int], paths: list[str], sizes: Int64s, how: How) -> list[Tables]:
    """Return the tables of open files, several at a time, in a thread that may wait for the disk.

    Raises: FormatError, ChecksumError, TruncatedError, ReadError: the first that cannot be read.
    """
    found: list[Tables] = []
    for low in range(0, len(fds), OPENED_AT_ONCE):
        some = slice(low, low + OPENED_AT_ONCE)
        files = OpenFiles.of(fds[some], paths[some], sizes[some], how.format)
        rows = range(len(files.fds))
        together = read_together(files, rows, how)
        found += [together.get(k) or read_single(files, k, how) for k in rows]
    return found


def read_single(
    files: OpenFiles,
    row: int,
    how: How,
    admit: Admit = unbounded,
    reading: Callable[[int], object] | None = None,
) -> Tables:
    """Return the tables of one file. Args, Raises: as of `shardfile.open_shard`."""
    parsed = open_shard(
        files.fds[row],
        files.paths[row],
        files.formats[row],
        verify=how.verify,
        tolerant=how.tolerant,
        keep=how.keep,
        seen=how.seen,
        passed_index=files.indexes[row],
        admit=admit,
        reading=reading,
    )
    return Tables.of(parsed, how.max_chunk_size, scanned_as(parsed))


# ---- entering ------------------------------------------------------------------------------------


def enter(
    tables: Sequence[Tables],
    bases: Sequence[int],
    paths: Sequence[str],
    into: Destination,
) -> None:
    """Enter tables under the numbers of their first samples. Raises: FormatError, ReadError."""
    begin = 0
    for k, each in enumerate(tables):
        following = tables[k + 1] if k + 1 < len(tables) else None
        if each.single is not None:
            _load(each, bases[k], paths[k], into)
        elif (
            following is not None
            and following.small is each.small
            and following.at == each.at + each.count
            and bases[k + 1] == bases[k] + each.count
        ):
            continue
        else:
            _copy(tables[begin], bases[begin], each.at + each.count, into)
        begin = k + 1


def _copy(first: Tables, base: int, end: int, into: Destination) -> None:
    """Enter the rows up to `end` of shards that were opened together."""
    small = first.small
    assert small is not None
    rows, run = slice(first.at, end), slice(base, base + end - first.at)
    into.offsets[run], into.checksums[run] = small.offsets[rows], small.checksums[rows]
    into.set_lengths(base, small.lengths[rows])


def _load(tables: Tables, base: int, path: str, into: Destination) -> None:
    """Enter the tables of a shard that was opened alone."""
    shard, end = tables.single, base + tables.count
    assert shard is not None
    lengths = np.empty(tables.count, np.uint64)
    shard.load(into.offsets[base:end], lengths, into.checksums[base:end])
    if tables.chunked is None:
        tables.truncated = bound_lengths(into.offsets[base:end], lengths, tables.size, path)
    into.set_lengths(base, lengths)
    chunked = tables.chunked
    tables.payload_size = int((lengths if chunked is None else chunked.chunks.sizes).sum())


def bound_lengths(
    offsets: NDArray[np.uint64], lengths: NDArray[np.uint64], size: int, path: str
) -> bool:
    """Shorten, in place, the lengths of samples that reach beyond the end of a truncated file.

    Such a length becomes one byte more than the file has left: a read still meets the end of the
    file, and no length stored in a file can cause an allocation larger than the file.

    Returns: whether there are such samples.
    Raises: FormatError: a record of 256 TiB or more, or one that begins beyond any valid offset.
    """
    truncated = False
    for start in range(0, len(lengths), _STEP):
        piece = lengths[start : start + _STEP]
        begins = offsets[start : start + _STEP]
        if _within(begins, piece, min(size, UNKNOWN_LENGTH - 1)):
            continue
        cut = (piece > 0) & ((begins > size) | (piece > size))
        cut |= (piece > 0) & ~cut & (begins + piece > size)
        if cut.any():
            truncated = True
            held = np.uint64(size) - np.minimum(begins[cut], np.uint64(size))
            piece[cut] = held + np.uint64(1)
        if int(piece.max()) >= UNKNOWN_LENGTH:
            raise FormatError(
                f"record {start + int(piece.argmax())} has {int(piece.max())} bytes, more than the "
                f"limit of {UNKNOWN_LENGTH - 1}",
                path=path,
                hint="store the content in smaller records",
            )
        if int(begins.max()) > _MAX_OFFSET:
            raise FormatError(
                f"record {start + int(begins.argmax())} begins at byte {int(begins.max())}, beyond "
                f"the largest possible file",
                path=path,
                hint="the file is damaged: restore it from a copy or write it again",
            )
    return truncated


def _within(begins: NDArray[np.uint64], lengths: NDArray[np.uint64], size: int) -> bool:
    """Whether all samples end within `size` bytes."""
    if int(begins.max()) > size or int(lengths.max()) > size:
        return False
    return int((begins + lengths).max()) <= size
