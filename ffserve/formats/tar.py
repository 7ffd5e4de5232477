"""Tar archives of samples, as WebDataset writes them: ustar, pax and GNU's long names.

A record is a regular member whose name has an extension; a sample is a run of records with one key,
the name up to the first dot of its last part; a field is a record of a sample, by extension, in
lower case (`members.py`). Directories, devices and symbolic links are skipped, as are files without
an extension, hidden ones, and WebDataset's own (`__name__`). A hard link is a record with the bytes
of the member that it names. Where a key comes again after another, a new sample begins.

There is no table: opening a file is a pass over all headers, by the C core, whose result an index
file keeps (``index_file.py``). The headers' checksums are compared; contents have none. An archive
ends with its first block of zeros, or with the file. What a header means is what Python's tarfile
takes it for; where that skips, guesses or stops at what is damaged, this is an error.
"""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ffserve.dtypes import Int64s, UInt32s, UInt64s
from ffserve.engine.tar import (
    BLOCK_SIZE,
    MOST_FIELDS,
    MOST_NAME,
    MOST_PAX,
    TarScanner,
    header_is_valid,
)
from ffserve.errors import FFServeError, FormatError, TruncatedError, UsageError
from ffserve.formats import members
from ffserve.formats.base import (
    CHECKSUM_NONE,
    HEAD_SIZE,
    PIECE_SIZE,
    Admit,
    Encoder,
    ReadAt,
    read_exactly,
    refuse_options,
    scan_fingerprint,
    unbounded,
)
from ffserve.formats.foreign import kind_of
from ffserve.formats.members import BLOCK_COUNT, FIRST, Members

LARGE_SIZE = 64 << 10
"""From members of this size on, the scan reads headers only."""
HEADER_SIZE = 2048
"""Then it reads this many bytes for each: an extended header and its text come with it."""
MOST_LINKS = 1 << 20
"""A file has at most this many hard links, whose targets are looked up together."""
LINK_SIZE = 300
"""Bytes of memory for a hard link meanwhile."""
RECORD_SIZE = 10_240
"""Archives are written in multiples of this many bytes."""

_KEPT = struct.Struct("<IQQI")
"""Checksum of the headers, samples, skipped files, bytes of the fields' names. These names, offsets
and the sizes of the blocks of names follow, and the blocks."""
_RESTORE = "restore the file, or write it anew"


@dataclass
class TarShard:
    """One archive after its scan."""

    path: str
    size: int
    count: int
    fingerprint: int
    members: Members
    digest: int
    offsets: UInt64s = field(repr=False)
    lengths: UInt64s = field(repr=False)
    checksums: UInt32s = field(repr=False)
    """The kind of each record, see `members.py`."""
    sound: bool = True
    """Whether the file ends where a member does."""
    format: str = "tar"
    checksum_kind: int = CHECKSUM_NONE

    def load(self, offsets: UInt64s, lengths: UInt64s, checksums: UInt32s) -> None:
        """Fill the caller's arrays.

        Args:    offsets, lengths, checksums: arrays of ``count`` entries, overwritten.
        Raises:  UsageError: arrays of another shape.
        """
        for name, into, table in (
            ("offsets", offsets, self.offsets),
            ("lengths", lengths, self.lengths),
            ("checksums", checksums, self.checksums),
        ):
            if into.shape != (self.count,):
                raise UsageError(f"{name} has shape {into.shape}, but must have ({self.count},)")
            into[:] = table

    @property
    def kept(self) -> bytes:
        """What an index file keeps besides lengths and kinds."""
        about, blocks = self.members, self.members.blocks
        names = b"".join(
            name.encode(errors="surrogateescape") + b"\0" for name in self.members.fields
        )
        head = _KEPT.pack(self.digest, about.samples, about.skipped, len(names))
        sizes = np.array([len(block) for block in blocks], "<u4").tobytes()
        return b"".join((head, names, self.offsets.astype("<u8").tobytes(), sizes, *blocks))

    def agrees(self, read_at: ReadAt, records: Int64s) -> bool:
        """Whether a file has these records; see `Tar.agrees`."""
        tables = self.offsets[records], self.lengths[records], self.checksums[records]
        return FORMAT.agrees(read_at, *tables)


class _HeaderScan:
    """One scan of a file."""

    def __init__(
        self, read_at: ReadAt, size: int, path: str, *, tolerant: bool, admit: Admit
    ) -> None:
        self._read_at, self._size, self._path = read_at, size, path
        self._admit = admit
        self.scanner = TarScanner(size, tolerant=tolerant)
        self._window = bytearray(0)
        self._blocks: list[bytes] = []
        self._names_size = 0
        self._links: dict[int, bytes] = {}

    def run(self) -> tuple[bytes, ...]:
        """Scan the file; return the blocks of names."""
        scanner, window = self.scanner, 64 << 10
        while True:
            large = scanner.last_length >= LARGE_SIZE
            base = scanner.at
            view = self._bytes(base, max(scanner.wanted, HEADER_SIZE if large else window))
            window = min(2 * window, PIECE_SIZE)
            while (stop := scanner.feed(view, base)) in (scanner.NAMES, scanner.LINK):
                if stop == scanner.NAMES:
                    self._take_names()
                elif len(self._links) == MOST_LINKS:
                    raise self._error(f"it has more than {MOST_LINKS} hard links")
                else:
                    self._links[scanner.count - 1] = scanner.link
            more = self._names_size + LINK_SIZE * len(self._links)
            self._admit(scanner.count, more)
            if stop == scanner.END:
                self._take_names()
                self._follow_links()
                return tuple(self._blocks)
            if stop != scanner.MORE:
                raise self._fault()

    def _bytes(self, base: int, want: int) -> memoryview:
        """Return ``want`` bytes of the file from ``base`` on, or all up to its end."""
        want = min(want, self._size - base)
        if len(self._window) < want:
            self._window = bytearray(want)
        view = memoryview(self._window)[:want]
        read_exactly(self._read_at, base, view, self._path)
        return view

    def _take_names(self) -> None:
        if names := self.scanner.take_names():
            self._blocks.append(members.packed(names))
            self._names_size += len(self._blocks[-1]) + 64

    def _follow_links(self) -> None:
        """Give hard links the bytes of the last member before them that has the name."""
        if not self._links:
            return
        offsets, lengths, _ = self.scanner.tables()
        latest = dict.fromkeys(self._links.values(), -1)
        record = 0
        for block in self._blocks:
            for name in members.unpacked(block):
                if (target := self._links.get(record)) is not None:
                    found = latest[target]
                    if found < 0:
                        raise self._error(
                            f"the member {_text(name)} is a hard link to {_text(target)}, which "
                            "is no member of a sample before it"
                        )
                    offsets[record], lengths[record] = offsets[found], lengths[found]
                if name in latest:
                    latest[name] = record
                record += 1

    def _error(
        self, text: str, kind: type[FFServeError] = FormatError, hint: str = _RESTORE
    ) -> FFServeError:
        return kind(text, path=self._path, offset=self.scanner.at, hint=hint)

    def _fault(self) -> FFServeError:
        """Return the error for what the scanner has stopped at."""
        s = self.scanner
        name = f"the member {_text(s.name)}"
        if s.fault == s.BAD_CHECKSUM and not s.at:
            head = bytes(self._bytes(0, min(self._size, HEAD_SIZE)))
            if (kind := kind_of(head, self._path)) is not None:
                text, hint = f"this is {kind.name}", "`ffserve convert` makes a tar file of it"
                return self._error(text, hint=hint if kind.package == "tarfile" else _RESTORE)
        if s.fault == s.CUT_HEADER:
            return self._error("the file ends inside a header", TruncatedError)
        if s.fault == s.CUT_MEMBER:
            left = self._size - s.at - BLOCK_SIZE
            text = f"{name} has {s.last_length} bytes, of which only {left} are left"
            if left >= s.last_length:
                text = f"the zeros behind {name} are missing"
            return self._error(f"the file ends early: {text}", TruncatedError)
        if s.fault == s.SPARSE:
            hint = "create the archive without --sparse"
            return self._error(f"{name} is a sparse file", hint=hint)
        if s.fault == s.TWICE:
            key, extension = (_text(part) for part in members.split_name(s.name))
            text = f"the sample {key} has two members {extension}"
            return self._error(text, hint="give each sample a key of its own")
        if s.fault == s.FIELDS:
            return self._error(
                f"its members have more than {MOST_FIELDS} different extensions, or long ones",
                hint="an extension begins at the first dot of a name; `ffserve convert` takes "
                "archives of other names",
            )
        return self._error(_FAULTS[s.fault])


_FAULTS = {
    TarScanner.BAD_CHECKSUM: "a header does not match its checksum",
    TarScanner.BAD_NUMBER: "a header has a field that is not a number",
    TarScanner.BAD_PAX: "an extended header is malformed",
    TarScanner.LONG_PAX: f"an extended header has more than {MOST_PAX} bytes",
    TarScanner.LONG_NAME: f"a name has more than {MOST_NAME} bytes",
    TarScanner.GLOBAL: "a global header has a name or a size for all members",
    TarScanner.NO_MEMBER: "an extended header is the last one",
}


def _text(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace"))


class TarEncoder:
    """Encodes members: a header, with a pax header before it where it has no room for a name or a
    size, and the contents."""

    def __init__(self) -> None:
        self._size = self._count = 0
        self._key: str | None = None
        """Of the last sample."""

    def head_size(self, count: int) -> int:
        """Return 0; a file begins with its first member."""
        return 0

    def encode(self, payload: memoryview) -> Iterable[bytes | memoryview]:
        """Return a sample with one field, "bin", and its number as key."""
        return self.encode_fields({"bin": payload}, None)

    def encode_fields(
        self, fields: Mapping[str, memoryview], key: str | None
    ) -> Iterable[bytes | memoryview]:
        """Return the members of a sample, without copies of their contents.

        Args: key: None: its number.
        Raises: UsageError: a reader would not find this sample and these fields in them.
        """
        if key is None:
            key = f"{self._count:09}"
        if key == self._key:
            raise UsageError(f"the sample before has the key {key!r}, too")
        names = member_names(key, fields)
        pieces = map(self._member, names, fields.values())
        self._key, self._count = key, self._count + 1
        return [piece for member in pieces for piece in member]

    def _member(self, name: str, payload: memoryview) -> Iterable[bytes | memoryview]:
        info = tarfile.TarInfo(name)
        info.size = len(payload)
        header = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        zeros = bytes(-len(payload) % BLOCK_SIZE)
        self._size += len(header) + len(payload) + len(zeros)
        return (header, payload, zeros)

    def tail(self) -> Iterable[bytes | memoryview]:
        """Return the end: two blocks of zeros or more."""
        end = 2 * BLOCK_SIZE
        return (bytes(end + -(self._size + end) % RECORD_SIZE),)

    def head(self) -> Iterator[bytes | memoryview]:
        """Return nothing."""
        return iter(())


def member_names(key: str, fields: Iterable[str]) -> list[str]:
    """Return the names of the members of a sample that is to be written.

    Raises: UsageError: a reader would not find this sample and these fields in them.
    """
    names = [f"{key}.{field}" for field in fields]
    folded = [name[len(key) + 1 :].lower() for name in names]
    last = key.rpartition("/")[2]
    valid = bool(last) and "." not in last and not key.startswith("/")
    if not valid or ".." in key.split("/") or key.startswith("__") or "\0" in key:
        raise UsageError(
            f"invalid key {key!r}",
            hint="a key is a relative path without dots in its last part, such as 'cats/000017'",
        )
    bad = [field for field in folded if not field or "/" in field or "\0" in field]
    if bad or not names or len(set(folded)) < len(names):
        raise UsageError(
            f"invalid fields {sorted(folded)}",
            hint="a sample has one field or more, whose names are extensions such as 'jpg'",
        )
    if any(len(name.encode(errors="surrogateescape")) > MOST_NAME for name in names):
        raise UsageError(f"a name has more than {MOST_NAME} bytes: {names[0][:80]!r}…")
    return names


class Tar:
    """The tar format."""

    name = "tar"
    suffixes = (".tar",)

    def sniff(self, head: bytes, size: int) -> bool | None:
        """Detect an archive by its first header. One without members cannot be detected."""
        if len(head) < BLOCK_SIZE:
            return False
        if head[257:262] == b"ustar" or header_is_valid(head):
            return True
        return False if any(head) else None

    def open(
        self,
        read_at: ReadAt,
        size: int,
        path: str,
        *,
        verify: bool = True,
        tolerant: bool = False,
        admit: Admit = unbounded,
    ) -> TarShard:
        """Scan the headers of an archive.

        Args:    as ``Format.open``; headers are verified in any case. A tolerant scan takes a file
                 that ends early, whose last member then fails; any other damage is an error.
        Raises:  FormatError: what is no header, or is not supported. TruncatedError: the file ends
                 inside a member.
        Cost:    one read of the file; from 64 KiB per member on, one small read per member.
        Source:  POSIX.1-2001 pax; Python's tarfile; webdataset/tariterators.py.
        """
        if not size:
            raise TruncatedError("the file is empty", path=path, offset=0, hint=_RESTORE)
        scan = _HeaderScan(read_at, size, path, tolerant=tolerant, admit=admit)
        blocks, scanner = scan.run(), scan.scanner
        offsets, lengths, kinds = scanner.tables()
        fields = tuple(name.decode(errors="surrogateescape") for name in scanner.fields())
        uniform = members.is_uniform(kinds, len(fields))
        about = Members(fields, scanner.samples, scanner.skipped, uniform, blocks)
        return _shard(
            path, size, about, scanner.digest, offsets, lengths, kinds, sound=not scanner.cut
        )

    def restore(
        self, lengths: UInt64s, checksums: UInt32s, kept: bytes, size: int, path: str
    ) -> TarShard | None:
        """Return the shard of an earlier scan of an intact file.

        Returns: None if such records cannot be in a file of ``size`` bytes.
        """
        count, blocks_count = len(lengths), -(-len(lengths) // BLOCK_COUNT)
        if len(kept) < _KEPT.size:
            return None
        digest, samples, skipped, names_size = _KEPT.unpack_from(kept)
        at = _KEPT.size + names_size
        end = at + 8 * count + 4 * blocks_count
        if end > len(kept):
            return None
        offsets = np.frombuffer(kept, "<u8", count, at).astype(np.uint64)
        sizes = np.frombuffer(kept, "<u4", blocks_count, at + 8 * count).astype(np.int64)
        edges = [end, *(end + np.cumsum(sizes)).tolist()]
        names = kept[_KEPT.size : at].split(b"\0")
        limit = np.uint64(size)
        if edges[-1] != len(kept) or names[-1] or not (offsets <= limit).all():
            return None
        fits = bool((lengths <= limit - offsets).all())
        known = bool(((checksums & np.uint32(FIRST - 1)) < len(names) - 1).all())
        begins = int(np.count_nonzero(checksums & np.uint32(FIRST)))
        if not fits or not known or begins != samples or (count and not checksums[0] & FIRST):
            return None
        fields = tuple(name.decode(errors="surrogateescape") for name in names[:-1])
        if bool(fields) != bool(count):
            return None
        blocks = tuple(kept[a:b] for a, b in pairwise(edges))
        uniform = members.is_uniform(checksums, len(fields))
        about = Members(fields, samples, skipped, uniform, blocks)
        return _shard(path, size, about, digest, offsets, lengths, checksums)

    def agrees(
        self, read_at: ReadAt, offsets: UInt64s, lengths: UInt64s, checksums: UInt32s
    ) -> bool:
        """Whether a file has members with these contents.

        Cost:    one small read per member, of its header.
        """
        header = bytearray(BLOCK_SIZE)
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            if offset < BLOCK_SIZE:
                return False
            got = read_at(offset - BLOCK_SIZE, memoryview(header))
            if got != BLOCK_SIZE or not header_is_valid(bytes(header)):
                return False
            # Of a size that the header has no room for, an extended one tells.
            stated = header[124:136].strip(b" \0").lstrip(b"0")
            if length < 8 << 30 and stated != (b"%o" % length if length else b""):
                return False
        return True

    def writer(
        self,
        *,
        n: int | None = None,
        compression: str | None = None,
        dialect: str | None = None,
        max_chunk_size: int | None = None,
    ) -> Encoder:
        """Return an encoder; ``n`` may be None."""
        options = {"dialect": dialect, "max_chunk_size": max_chunk_size}
        refuse_options(self.name, options | {"compression": compression})
        return TarEncoder()


def _shard(
    path: str,
    size: int,
    about: Members,
    digest: int,
    offsets: UInt64s,
    lengths: UInt64s,
    kinds: UInt32s,
    *,
    sound: bool = True,
) -> TarShard:
    headers = scan_fingerprint("tar", lengths, kinds, size)
    return TarShard(
        path=path,
        size=size,
        count=len(lengths),
        fingerprint=headers ^ digest * 0x9E37_79B9_7F4A_7C15 % (1 << 64),
        members=about,
        digest=digest,
        offsets=offsets,
        lengths=lengths,
        checksums=kinds,
        sound=sound,
    )


FORMAT = Tar()
