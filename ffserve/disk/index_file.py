"""Index files: the record lengths and checksums of a file without tables, kept for later openings.

A TFRecord file stores neither the number of its records nor their offsets; opening it means a scan
of the whole file. The index file of a file holds the result: 8 bytes per record (12 if a record
has 4 GiB or more), and what else the format needs to find them (the seek points of compressed
files, ``formats/tfcompressed.py``). It lies beside the file as ``.NAME.ffx``, hidden so that no
pattern for data files matches it, or in the user's cache directory.

An index file is untrusted input. Record boundaries cannot be checked without a scan, so the owner
decides first: the index file must belong to the owner of the file, to this user or to root, and
nobody else may have write permission. It must describe this file (size, modification time, first
and last 4 KiB), match its own checksum, and its records must fill the file to the byte. Any other
index file is ignored and the file is scanned again. Payloads are verified when they are read, as
always.

Size and modification time of a file can be kept while its middle changes; its ctime cannot. If the
ctime is later than the index file, `shardfile.py` compares some records with the file first. An
index file that contradicts its file is replaced by a new one, or by one without records, which is
never valid. The newest one counts, so the cache can override a file beside that is read-only.

Layout, little-endian::

    0    8 bytes   "ffserve\n"
    8    u32       version, 2
    12   u32       bytes per length: 4 or 8
    16   16 bytes  name of the format, padded with zeros
    32   u64       size of the file
    40   i64       modification time of the file, in ns
    48   u32       CRC-32C of its first 4096 bytes
    52   u32       CRC-32C of its last 4096 bytes
    56   u64       N, number of records
    64   u64       K, bytes that the format keeps beside lengths and checksums
    72   lengths[N], then u32 checksums[N], then the K bytes
    end  u32       CRC-32C of all bytes before
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ffserve.disk.files import read_at_of
from ffserve.disk.output import NAME_MAX
from ffserve.dtypes import Bools, Bytes, Int64s, UInt32s, UInt64s
from ffserve.engine.codec import CRC_32C, Tables, checksums, crc32c, small_tfrecord_index
from ffserve.errors import FFServeError
from ffserve.formats.base import RECORD_TABLE_SIZE, Admit, ScannedShard, unbounded

MAGIC = b"ffserve\n"
VERSION = 2
END_SIZE = 4096
"""The index file has a checksum of this many bytes at each end of its file."""
CACHE_LIMIT = 4 << 30
"""The index files in a cache directory have at most this many bytes in all, enough for about 500
million records. A larger index file is not read, wherever it is."""
CACHE_COUNT = 1 << 15
"""The index files in a cache directory are at most this many."""
TRIMMED_SHARE = 8
"""If a cache directory is full, 1 part in TRIMMED_SHARE of its files is removed: it must be listed
for that."""
LISTED_AFTER = 1024
"""A process that has written this many index files lists the directory again, since others may have
written to it, too."""
MIN_INDEXED_SIZE = 1 << 20
"""Smaller files get no index file unless the user asks for one, since their scan is cheap."""

INDEX_ALLOWED, INDEX_PER_BYTE = 64 << 20, 64
"""Size of an index file at most: a constant, plus a number per byte of its file."""

_HEADER = struct.Struct("<8sII16sQqIIQQ")

Keep = Literal["beside", "own", "inode"]
"""Where to write an index file. "beside": beside the file, else in the cache. "own": the same, but
beside the file only if file and directory belong to this user alone. "inode": in the cache only,
where it is found by device and inode: the daemon does not know by which names its clients know the
file, and opens nothing by a name of theirs."""


@dataclass(frozen=True)
class Indexed:
    """The content of a valid index file."""

    path: str
    """Of the index file."""
    lengths: UInt64s
    checksums: UInt32s
    kept: bytes
    """The format's own, see `ScannedShard.kept`."""
    written_ns: int
    """Modification time of the index file."""


@dataclass(frozen=True)
class Identity:
    """The properties by which an index file recognizes its file."""

    format: str
    size: int
    mtime_ns: int
    head: int
    tail: int

    @classmethod
    def of(cls, fd: int, path: str, format: str) -> Identity:
        """Return the identity of an open file."""
        status, read_at = os.fstat(fd), read_at_of(fd, path)
        ends = []
        for offset in (0, max(0, status.st_size - END_SIZE)):
            piece = bytearray(min(END_SIZE, status.st_size))
            got = read_at(offset, memoryview(piece)) if piece else 0
            ends.append(crc32c(piece[:got]))
        return cls(format, status.st_size, status.st_mtime_ns, *ends)


def encode(
    identity: Identity,
    lengths: UInt64s,
    checksums: UInt32s,
    kept: bytes = b"",
) -> bytes:
    """Return the bytes of an index file."""
    width = 4 if not len(lengths) or int(lengths.max()) < 1 << 32 else 8
    body = b"".join(
        (
            _HEADER.pack(
                MAGIC,
                VERSION,
                width,
                identity.format.encode(),
                identity.size,
                identity.mtime_ns,
                identity.head,
                identity.tail,
                len(lengths),
                len(kept),
            ),
            lengths.astype(f"<u{width}").tobytes(),
            checksums.astype("<u4").tobytes(),
            kept,
        )
    )
    return body + struct.pack("<I", crc32c(body))


@dataclass(frozen=True)
class _Head:
    """The header of an index file. width: bytes of a length. more: bytes of the format's own."""

    identity: Identity
    width: int
    count: int
    more: int

    @property
    def size(self) -> int:
        """Bytes of the index file."""
        return _HEADER.size + self.count * (self.width + 4) + self.more + 4

    @classmethod
    def of(cls, content: bytes | bytearray) -> _Head | None:
        """Parse the first bytes of an index file; None if they are not those of one."""
        if len(content) < _HEADER.size:
            return None
        magic, version, width, name, *facts, count, more = _HEADER.unpack_from(content)
        if (magic, version) != (MAGIC, VERSION) or width not in (4, 8):
            return None
        identity = Identity(name.rstrip(b"\0").decode(errors="replace"), *facts)
        return cls(identity, width, count, more)


def decode(
    content: bytes | bytearray, identity: Identity, path: str = "", written_ns: int = 0
) -> Indexed | None:
    """Parse the bytes of an index file; None if it is damaged or describes another file."""
    head = _Head.of(content)
    if head is None or head.identity != identity or len(content) != head.size:
        return None
    width, count, whole = head.width, head.count, memoryview(content)
    if crc32c(whole[:-4]) != int.from_bytes(whole[-4:], "little"):
        return None
    lengths = np.frombuffer(content, f"<u{width}", count, _HEADER.size)
    checksums = np.frombuffer(content, "<u4", count, _HEADER.size + width * count)
    kept = bytes(whole[_HEADER.size + count * (width + 4) : -4])
    return Indexed(path, lengths.astype(np.uint64), checksums.astype(np.uint32), kept, written_ns)


def decode_small(
    indexes: Bytes,
    got: Int64s,
    index_sizes: Int64s,
    sizes: Int64s,
    mtimes: Int64s,
    heads: Bytes,
    tails: Bytes,
) -> tuple[Bools, Int64s, Tables]:
    """Return the tables of TFRecord files, not compressed, out of valid index files.

    Args:
        indexes, got, index_sizes: see `codec.small_tfrecord_index`.
        sizes, mtimes: of the files. heads, tails: uint8[n, END_SIZE or more], contiguous; their
            first and last END_SIZE bytes.
    Returns: which are valid; the records of each; the tables of one after another.
    """
    crcs = [
        checksums(CRC_32C, each.reshape(-1), np.arange(len(each)) * each.shape[1], full)
        for each, full in ((ends, np.full(len(ends), END_SIZE)) for ends in (heads, tails))
    ]
    return small_tfrecord_index(indexes, got, index_sizes, sizes, mtimes, *crcs)


def beside(path: str) -> str | None:
    """Return the path of the index file beside a file; None if the name would be too long."""
    return _beside(os.path.realpath(path))


def _beside(real: str) -> str | None:
    directory, name = os.path.split(real)
    hidden = f".{name}.ffx"
    return os.path.join(directory, hidden) if len(os.fsencode(hidden)) <= NAME_MAX else None


def cached(path: str) -> str | None:
    """Return the path of a file's index file in the user's cache; None if there is no cache."""
    return _in_cache(os.fsencode(os.path.realpath(path)))


def places(fd: int, path: str) -> Iterator[str | None]:
    """Yield `beside` and `cached` of an open file."""
    real = ""
    with contextlib.suppress(OSError):
        # A system call, where `os.path.realpath` needs one for each directory.
        real = os.readlink(f"/proc/self/fd/{fd}")
    if not real.startswith("/"):
        real = os.path.realpath(path)
    yield _beside(real)
    yield _in_cache(os.fsencode(real))


def cached_by_inode(fd: int) -> str | None:
    """Return the same where files are known by device and inode."""
    status = os.fstat(fd)
    return _in_cache(_inode_key(status.st_dev, status.st_ino))


def are_cached(inodes: Iterable[tuple[int, int]]) -> list[bool]:
    """Return for which files, by device and inode, there may be a file at `cached_by_inode`."""
    root = _cache_root()
    if root is None:
        return [False for _ in inodes]
    return [os.access(_named(root, _inode_key(*inode)), os.F_OK) for inode in inodes]


def _inode_key(device: int, inode: int) -> bytes:
    return b"%d:%d" % (device, inode)


def _in_cache(key: bytes) -> str | None:
    """Return a path in the cache directory."""
    root = _cache_root()
    return None if root is None else _named(root, key)


def _named(root: str, key: bytes) -> str:
    name = hashlib.blake2b(key, digest_size=16).hexdigest()
    return os.path.join(root, "index", f"{name}.ffx")


def _cache_root() -> str | None:
    """Return the cache directory; None: there is none.

    It is the service's ``CacheDirectory=`` if systemd sets one, else
    ``$XDG_CACHE_HOME/ffserve``, else ``~/.cache/ffserve``.
    """
    root = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    if not root:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.path.join(base, "ffserve")
    return root if os.path.isabs(root) else None


def are_trusted(modes: UInt32s, owners: UInt32s, file_owners: UInt32s) -> Bools:
    """Return which index files may be used: their modes and owners, and the owners of the files."""
    trusted: Bools = np.isin(owners, [0, os.geteuid()]) | (owners == file_owners)
    trusted &= modes & (stat.S_IWGRP | stat.S_IWOTH) == 0
    return trusted


def find(
    fd: int,
    path: str,
    identity: Identity,
    keep: Keep = "own",
    passed: int | None = None,
    admit: Admit = unbounded,
) -> Indexed | None:
    """Return the content of the newest trusted index file of an open file, or None.

    The header of an index file is read first. The rest is read only if the file has the size that
    the header says, and if its tables are admitted.

    Args:
        fd: the file.
        path: its name; index files are found by name, unless `keep` is "inode".
        identity: the file's current identity.
        passed: descriptor of another index file, which a client opened.
        admit: see ``formats.base.Format.open``.
    Cost:    one read of 8 bytes per record; the file itself is not read.
    """
    owners = {0, os.geteuid(), os.fstat(fd).st_uid}
    places = (cached_by_inode(fd),) if keep == "inode" else (beside(path), cached(path))
    with contextlib.ExitStack() as opened:
        found: list[tuple[int, str, int, _Head]] = []
        for place in filter(None, places):
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
            with contextlib.suppress(OSError):
                index = os.open(place, flags)
                opened.callback(os.close, index)
                found += _sound(index, place, owners, identity)
        if passed is not None:
            found += _sound(passed, "", owners, identity)
        for written_ns, place, index, head in sorted(found, key=lambda f: f[0], reverse=True):
            admit(head.count, table_size(head.count, head.more))
            content = _content(index, head.size)
            indexed = decode(content, identity, place, written_ns)
            if indexed is not None:
                return indexed
    return None


def table_size(count: int, more: int) -> int:
    """Return the bytes of the format's own tables in memory, if it keeps `more` bytes in an index
    file of `count` records: if it keeps any, then lengths and checksums as well."""
    return more + RECORD_TABLE_SIZE * count if more else 0


def _sound(
    fd: int, place: str, owners: set[int], identity: Identity
) -> list[tuple[int, str, int, _Head]]:
    """Return modification time, place, descriptor and header of an index file of this file, if one
    of `owners` owns it, nobody else may write, and it has the right size."""
    with contextlib.suppress(FFServeError, OSError):
        status = os.fstat(fd)
        trusted = stat.S_ISREG(status.st_mode) and status.st_uid in owners
        if not trusted or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return []
        head = _Head.of(_content(fd, _HEADER.size))
        # A record takes a byte of the file at least, and so does a chunk of a compressed one.
        most = _HEADER.size + INDEX_ALLOWED + INDEX_PER_BYTE * identity.size
        if head is None or head.identity != identity:
            return []
        if head.size == status.st_size <= min(most, CACHE_LIMIT):
            return [(status.st_mtime_ns, place, fd, head)]
    return []


def _content(fd: int, size: int) -> bytearray:
    """Return the first bytes of an index file, fewer if it has become shorter."""
    content = bytearray(size)
    with contextlib.suppress(FFServeError):
        del content[read_at_of(fd, "")(0, memoryview(content)) :]
        return content
    return bytearray()


def store(fd: int, path: str, identity: Identity, scanned: ScannedShard, keep: Keep) -> str | None:
    """Write an index file atomically.

    Args:
        fd: the file that was scanned.
        path: its name.
        identity: the file's identity before the scan; a file that changed since gets no index file.
        scanned: result of the scan.
        keep: where the index file may be written.
    Returns: path of the index file; None if it could not be written, which is not an error.
    """
    if Identity.of(fd, path, identity.format) != identity:
        return None
    content = encode(identity, scanned.lengths, scanned.checksums, scanned.kept)
    return _keep(fd, path, content, keep)


def discard(fd: int, path: str, identity: Identity, keep: Keep) -> None:
    """Make the index files of a file invalid, so that its next opening scans it.

    Args: as for `store`. Nothing happens where `store` could not write either.
    """
    nothing = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    _keep(fd, path, encode(identity, *nothing), keep)


def _keep(fd: int, path: str, content: bytes, keep: Keep) -> str | None:
    """Write an index file to the first place that can be written; return that."""
    places = [cached_by_inode(fd) if keep == "inode" else cached(path)]
    if keep == "beside" or (keep == "own" and _own(fd, path)):
        places.insert(0, beside(path))
    return next((p for p in places if p is not None and _write(p, content)), None)


class CacheDirectory:
    """The index files in a cache directory, as far as this process knows them.

    Args: most_size, most_count: bytes and number of its index files at most.
    """

    def __init__(
        self, path: str, most_size: int = CACHE_LIMIT, most_count: int = CACHE_COUNT
    ) -> None:
        self._path, self._most_size, self._most_count = path, most_size, most_count
        self._count = self._size = 0
        self._written = LISTED_AFTER
        """Index files that this process wrote since it has listed the directory."""

    def _fits(self, size: int) -> bool:
        """Whether another file of this size fits."""
        return self._count < self._most_count and self._size + size <= self._most_size

    def make_room(self, size: int) -> bool:
        """Make room for an index file; return False if it is too large. The directory is listed
        only if it may be full."""
        if self._written >= LISTED_AFTER or not self._fits(size):
            self._trim(size)
        if not self._fits(size):
            return False
        self._count, self._size, self._written = (
            self._count + 1,
            self._size + size,
            self._written + 1,
        )
        return True

    def _trim(self, size: int) -> None:
        """List the directory; if another file of `size` does not fit, remove the oldest ones."""
        found: list[tuple[int, int, str]] = []
        with contextlib.suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.endswith(".ffx") or entry.name.startswith(".ffx-"):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, entry.path))
        self._count, self._size = len(found), sum(each for _, each, _ in found)
        self._written = 0
        if self._fits(size):
            return
        most_size = self._most_size - max(self._most_size // TRIMMED_SHARE, size)
        most_count = self._most_count - max(self._most_count // TRIMMED_SHARE, 1)
        for _, each, path in sorted(found):
            if self._size <= most_size and self._count <= most_count:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                self._count, self._size = self._count - 1, self._size - each


cache_directories: dict[str, CacheDirectory] = {}
"""The cache directories that this process has written to, by path."""


def _own(fd: int, path: str) -> bool:
    """Whether file and directory belong to this user, and nobody else may write."""
    with contextlib.suppress(OSError):
        directory = os.stat(os.path.dirname(os.path.realpath(path)))
        owners = {directory.st_uid, os.fstat(fd).st_uid}
        return owners == {os.geteuid()} and not directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return False


def _is_private(directory: str) -> bool:
    """Whether a cache directory is one of this user's, in which no other user may write. Where
    another could make it, it may be a link to files that are not to be removed."""
    status = os.lstat(directory)
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(place: str, content: bytes) -> bool:
    directory, name = os.path.split(place)
    temporary = os.path.join(directory, f".ffx-{secrets.token_hex(6)}.tmp")
    try:
        if not name.startswith("."):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            known = cache_directories.setdefault(directory, CacheDirectory(directory))
            if not _is_private(directory) or not known.make_room(len(content)):
                return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o644)
    except OSError:
        return False
    try:
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(temporary, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return False
    return True
