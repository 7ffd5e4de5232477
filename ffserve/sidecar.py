"""What a walk over a record file found, kept in a small file for the next time.

A TFRecord file says nowhere how many records it has or where they lie: one has to walk over it.
The lengths and checksums found are the *sidecar*: 8 bytes a record (12 from 4 GiB a record on)
instead of a walk over everything. It lies beside the file as ``.NAME.ffx``, hidden so that no
pattern for data files matches it, or in the user's cache directory.

A sidecar is hostile until checked. Which bytes make a record cannot be told without the walk, so
first of all it must come from somebody who could have changed the file as well, or from
ourselves: its owner is the file's, this user, or root, and nobody else may write to it. Then it
must be about this file (size, time of change, first and last 4 KiB), be whole (checksum), and its
records must fill the file to the byte. Whatever else is found is as good as nothing: the walk is
done again. Payloads are held against their checksums when they are read, as always.

Little-endian::

    0    8 bytes   "ffserve\\n"
    8    u32       version, 1
    12   u32       bytes of one length: 4 or 8
    16   16 bytes  name of the format, padded with zeros
    32   u64       size of the file
    40   i64       its time of change, in ns
    48   u32       CRC-32C of its first 4096 bytes
    52   u32       CRC-32C of its last 4096 bytes
    56   u64       N, number of records
    64   lengths[N], then u32 checksums[N]
    end  u32       CRC-32C of all before
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ffserve.engine.frames import crc32c
from ffserve.errors import FFServeError
from ffserve.files import read_at_of
from ffserve.formats.base import WalkedShard

MAGIC = b"ffserve\n"
VERSION = 1
END_SIZE = 4096
"""How much of the file's head and tail is held against the sidecar."""
CACHE_LIMIT = 4 << 30
"""Bytes of sidecars in a cache directory: those of about 500 million records."""
WORTH_SIZE = 1 << 20
"""Files below this are walked over each time unless a sidecar is asked for."""

_HEADER = struct.Struct("<8sII16sQqIIQ")
_NAME_MAX = 255

Keep = Literal["beside", "own", "cache"]
"""Where to put one: beside the file or else in the cache; beside files that lie in directories of
this user's own and else in the cache; in the cache only."""


@dataclass(frozen=True)
class Kept:
    """What a sidecar says about all records of its file."""

    place: str
    """Where it lies."""
    lengths: NDArray[np.uint64]
    checksums: NDArray[np.uint32]


@dataclass(frozen=True)
class Identity:
    """What a sidecar knows of its file."""

    format: str
    size: int
    mtime_ns: int
    head: int
    tail: int

    @classmethod
    def of(cls, fd: int, path: str, format: str) -> Identity:
        """Return that of an open file."""
        status, read_at = os.fstat(fd), read_at_of(fd, path)
        ends = []
        for offset in (0, max(0, status.st_size - END_SIZE)):
            piece = bytearray(min(END_SIZE, status.st_size))
            got = read_at(offset, memoryview(piece)) if piece else 0
            ends.append(crc32c(piece[:got]))
        return cls(format, status.st_size, status.st_mtime_ns, *ends)


def encode(identity: Identity, lengths: NDArray[np.uint64], checksums: NDArray[np.uint32]) -> bytes:
    """Return a sidecar's bytes."""
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
            ),
            lengths.astype(f"<u{width}").tobytes(),
            checksums.astype("<u4").tobytes(),
        )
    )
    return body + struct.pack("<I", crc32c(body))


def decode(content: bytes, identity: Identity, place: str = "") -> Kept | None:
    """Return what is in a sidecar's bytes; None when it is damaged or about another file."""
    if len(content) < _HEADER.size + 4:
        return None
    magic, version, width, name, size, mtime_ns, head, tail, count = _HEADER.unpack_from(content)
    if (magic, version) != (MAGIC, VERSION) or width not in (4, 8):
        return None
    about = Identity(name.rstrip(b"\0").decode(errors="replace"), size, mtime_ns, head, tail)
    if about != identity or len(content) != _HEADER.size + count * (width + 4) + 4:
        return None
    body = memoryview(content)[:-4]
    if crc32c(body) != int.from_bytes(content[-4:], "little"):
        return None
    lengths = np.frombuffer(content, f"<u{width}", count, _HEADER.size)
    checksums = np.frombuffer(content, "<u4", count, _HEADER.size + width * count)
    return Kept(place, lengths.astype(np.uint64), checksums.astype(np.uint32))


def beside(path: str) -> str | None:
    """Return the name of the sidecar beside a file; None when that would be too long."""
    directory, name = os.path.split(os.path.realpath(path))
    hidden = f".{name}.ffx"
    return os.path.join(directory, hidden) if len(os.fsencode(hidden)) <= _NAME_MAX else None


def cached(path: str) -> str | None:
    """Return the name of a file's sidecar in the user's cache; None when there is no such place.

    The place is what systemd gives the service (``CacheDirectory=``), else
    ``$XDG_CACHE_HOME/ffserve``, else ``~/.cache/ffserve``.
    """
    root = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    if not root:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.path.join(base, "ffserve")
    if not os.path.isabs(root):
        return None
    name = hashlib.blake2b(os.fsencode(os.path.realpath(path)), digest_size=16).hexdigest()
    return os.path.join(root, "sidecars", f"{name}.ffx")


def find(fd: int, path: str, identity: Identity) -> Kept | None:
    """Return what a trusted sidecar says about an open file; None when there is none.

    Args:
        fd: the file.
        path: its name, by which sidecars are looked for.
        identity: of the file, now.
    Cost:    nothing that grows with the file; one read of 8 bytes a record.
    """
    owners = {0, os.geteuid(), os.fstat(fd).st_uid}
    for place in (beside(path), cached(path)):
        if place and (content := _read(place, owners, identity.size)) is not None:
            kept = decode(content, identity, place)
            if kept is not None:
                return kept
    return None


def _read(place: str, owners: set[int], file_size: int) -> bytes | None:
    """Return a sidecar's bytes if it belongs to one of `owners` and only they may write to it."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(place, flags)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        trusted = stat.S_ISREG(status.st_mode) and status.st_uid in owners
        if not trusted or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        # A record has a byte at least, so no sound one is larger; nothing larger is read.
        if status.st_size > _HEADER.size + 12 * file_size + 4:
            return None
        content = bytearray(status.st_size)
        got = read_at_of(fd, place)(0, memoryview(content))
        return bytes(content) if got == len(content) else None
    except FFServeError:
        return None
    finally:
        os.close(fd)


def store(fd: int, path: str, identity: Identity, walked: WalkedShard, keep: Keep) -> str | None:
    """Write a sidecar, whole or not at all.

    Args:
        fd: the file that was walked over.
        path: its name.
        identity: of the file, before the walk; a file that changed meanwhile gets no sidecar.
        walked: what the walk found.
        keep: where it may lie.
    Returns: where it lies; None when it could not be written anywhere, which is no error.
    """
    if Identity.of(fd, path, identity.format) != identity:
        return None
    places = [cached(path)]
    if keep == "beside" or (keep == "own" and _own(fd, path)):
        places.insert(0, beside(path))
    content = encode(identity, walked.lengths, walked.checksums)
    return next((p for p in places if p is not None and _write(p, content)), None)


def _make_room(directory: str, size: int) -> bool:
    """Remove the oldest sidecars of a cache directory until another one fits."""
    there: list[tuple[int, int, str]] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            there.append((status.st_mtime_ns, status.st_size, entry.path))
    total = sum(each for _, each, _ in there) + size
    for _, each, path in sorted(there):
        if total <= CACHE_LIMIT:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
            total -= each
    return total <= CACHE_LIMIT


def _own(fd: int, path: str) -> bool:
    """Whether the file and its directory belong to this user, and nobody else may write there."""
    with contextlib.suppress(OSError):
        directory = os.stat(os.path.dirname(os.path.realpath(path)))
        owners = {directory.st_uid, os.fstat(fd).st_uid}
        return owners == {os.geteuid()} and not directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return False


def _write(place: str, content: bytes) -> bool:
    directory, name = os.path.split(place)
    if not name.startswith(".") and not _make_room(directory, len(content)):
        return False
    temporary = os.path.join(directory, f".ffx-{secrets.token_hex(6)}.tmp")
    try:
        if not name.startswith("."):
            os.makedirs(directory, mode=0o700, exist_ok=True)
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
