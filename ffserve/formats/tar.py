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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ffserve.dtypes import Int64s, UInt32s, UInt64s
from ffserve.engine import tar
from ffserve.engine.tar import (
    BLOCK_COUNT,
    BLOCK_SIZE,
    FIRST,
    MOST_FIELDS,
    MOST_NAME,
    MOST_PAX,
    Tables,
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
    ForetoldReadAt,
    ReadAt,
    TableShard,
    read_exactly,
    refuse_options,
    unbounded,
)
from ffserve.formats.foreign import kind_of
from ffserve.formats.members import Members, split_name

LARGE_SIZE = 64 << 10
"""From members of this size on, the scan reads headers only."""
HEADER_SIZE = 2048
"""Then it reads this many bytes for each: an extended header and its text come with it."""
FAR_COUNT = 4
"""After so many members that are far from each other (`ForetoldReadAt`), the next headers of a
remote file are fetched ahead."""
PARTS, PART_COUNT, SEARCHED = 16, 128, 64 << 10
"""A remote file is divided into at most PARTS parts, of PART_COUNT members at least since half a
member is fetched in vain to find the first header of each, by so many bytes at a time."""
MOST_LINKS = 1 << 20
"""A file has at most this many hard links, whose targets are looked up together."""
LINK_SIZE = 300
"""Bytes of memory for a hard link meanwhile."""
RECORD_SIZE = 10_240
"""Archives are written in multiples of this many bytes."""

_KEPT = struct.Struct("<II")
"""Checksum of the headers, size of the description (`Members.about`). It follows, then the offsets
of the records, the sizes of the blocks of names, and these blocks."""
_RESTORE = "restore the file, or write it anew"
_FAULTS = {
    "BAD_CHECKSUM": "a header does not match its checksum",
    "BAD_NUMBER": "a header has a field that is not a number",
    "CUT_HEADER": "the file ends inside a header",
    "CUT_MEMBER": "the file ends early: {name} has {length} bytes, of which only {left} are left",
    "CUT_ZEROS": "the file ends early: the zeros behind {name} are missing",
    "BAD_PAX": "an extended header is malformed",
    "LONG_PAX": f"an extended header has more than {MOST_PAX} bytes",
    "LONG_NAME": f"a name has more than {MOST_NAME} bytes",
    "GLOBAL": "a global header has a name or a size for all members",
    "SPARSE": "{name} is a sparse file",
    "TWICE": "the sample {key} has two members {field}",
    "FIELDS": f"its members have more than {MOST_FIELDS} different extensions, or long ones",
    "NO_MEMBER": "an extended header is the last one",
}
"""Faults of a header, see tar.h."""
_HINTS = {
    "SPARSE": "create the archive without --sparse",
    "TWICE": "give each sample a key of its own",
    "FIELDS": "an extension begins at the first dot of a name; `ffserve convert` takes archives of "
    "other names",
}


@dataclass
class TarShard(TableShard):
    """One archive after its scan. Its checksums are the kinds of its records, see `members.py`."""

    members: Members
    digest: int
    format = "tar"
    checksum_kind = CHECKSUM_NONE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fingerprint ^= self.digest * 0x9E37_79B9_7F4A_7C15 % (1 << 64)

    @property
    def kept(self) -> bytes:
        """What an index file keeps besides lengths and kinds."""
        about, blocks = self.members.about, self.members.blocks
        sizes = np.array([len(block) for block in blocks], "<u4").tobytes()
        head = _KEPT.pack(self.digest, len(about))
        return b"".join((head, about, self.offsets.astype("<u8").tobytes(), sizes, *blocks))

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
        window = min(max(size, HEADER_SIZE), PIECE_SIZE)
        self._scanner = tar.TarScanner(size, window, tolerant=tolerant)
        self._tables: list[Tables] = []
        self._blocks: list[bytes] = []
        self._count = self._names_size = 0
        self._links: dict[int, bytes] = {}

    def run(self) -> TarShard:
        """Scan the file."""
        scanner, state, most = self._scanner, self._scanner.state, 64 << 10
        headers, far = getattr(self._read_at, "headers", None), 0
        foretold: ForetoldReadAt | None = getattr(self._read_at, "foretold", None)
        while True:
            base, large = state.at, state.length >= LARGE_SIZE
            if foretold is not None and state.length > foretold.near:
                far += 1
                if far == FAR_COUNT:
                    self._read_ahead(base, state.length, foretold.will_need)
            size = min(max(state.wanted, HEADER_SIZE if large else most), self._size - base)
            most = HEADER_SIZE if large else min(2 * most, PIECE_SIZE)
            read_exactly(self._read_at, base, scanner.window[:size], self._path)
            while (stop := scanner.feed(base, size)) in (tar.ROWS, tar.LINK):
                self._note(stop)
            if stop == tar.MORE and headers is not None:
                stop = headers(scanner, HEADER_SIZE, LARGE_SIZE)
                self._note(stop)
            if stop == tar.END:
                return self._finished()
            if stop == tar.FAULT:
                raise self._fault()

    def _read_ahead(self, begin: int, length: int, will_need: Callable[[int, int], object]) -> None:
        """Have the headers of a remote file come from `begin` on, those of different parts at the
        same time. Each part is followed from a header that is found near its begin. What is taken
        for a header here, and is none, costs a request.

        Args: length: of a member.
        """
        size = max((self._size - begin) // PARTS, PART_COUNT * length)
        size += -size % BLOCK_SIZE
        begins = range(begin + size, self._size - size // 2, size)
        found, looking = [begin], dict(zip(begins, begins, strict=True))
        while looking:
            for at in looking.values():
                will_need(at, SEARCHED)
            for first, at in list(looking.items()):
                place = _first_header(self._bytes(at, SEARCHED))
                looking[first] = at + SEARCHED
                if place >= 0:
                    found.append(at + place)
                if place >= 0 or at >= min(first + 2 * length, self._size - SEARCHED):
                    del looking[first]
        edges = sorted({*found, self._size})
        going = list(pairwise(edges))
        while going:
            for at, _ in going:
                will_need(at, HEADER_SIZE)
            going = [(at, end) for at, end in map(self._next_far, going) if at < end]

    def _next_far(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return where the first header behind another one is that is far from it, and the end of
        the part."""
        at, end = place
        for _ in range(PART_COUNT):
            step = _padded_size(self._bytes(at, BLOCK_SIZE))
            at += step
            if not step or step > SEARCHED or at >= end:
                return at if step else end, end
        return end, end

    def _bytes(self, offset: int, size: int) -> bytes:
        content = bytearray(max(min(size, self._size - offset), 0))
        read_exactly(self._read_at, offset, memoryview(content), self._path)
        return bytes(content)

    def _note(self, stop: int) -> None:
        if stop == tar.ROWS:
            self._take()
        elif stop == tar.LINK:
            if len(self._links) == MOST_LINKS:
                raise self._error(f"it has more than {MOST_LINKS} hard links")
            self._links[self._count + self._scanner.state.held - 1] = self._scanner.link

    def _take(self) -> None:
        names, tables = self._scanner.take()
        if names:
            self._blocks.append(members.packed(names))
            self._names_size += len(self._blocks[-1]) + 64
        self._tables.append(tables)
        self._count += len(tables[0])
        self._admit(self._count, self._names_size + LINK_SIZE * len(self._links))

    def _finished(self) -> TarShard:
        self._take()
        offsets, lengths, kinds = map(np.concatenate, zip(*self._tables, strict=True))
        self._follow_links(offsets, lengths)
        state, fields = self._scanner.state, map(members.as_text, self._scanner.fields())
        about = Members.of_kinds(kinds, tuple(fields), state.skipped, tuple(self._blocks))
        tables = offsets, lengths, kinds
        return TarShard(self._path, self._size, *tables, about, state.digest, sound=not state.cut)

    def _follow_links(self, offsets: UInt64s, lengths: UInt64s) -> None:
        """Give hard links the bytes of the last member before them that has the name."""
        latest = dict.fromkeys(self._links.values(), -1)
        names = (name for block in self._blocks for name in members.unpacked(block))
        for record, name in enumerate(names if latest else ()):
            if (target := self._links.get(record)) is not None:
                if (found := latest[target]) < 0:
                    raise self._error(
                        f"the member {_text(name)} is a hard link to {_text(target)}, which is no "
                        "member of a sample before it"
                    )
                offsets[record], lengths[record] = offsets[found], lengths[found]
            if name in latest:
                latest[name] = record

    def _error(self, text: str, hint: str = _RESTORE, *, cut: bool = False) -> FFServeError:
        kind = TruncatedError if cut else FormatError
        return kind(text, path=self._path, offset=self._scanner.state.at, hint=hint)

    def _fault(self) -> FFServeError:
        """Return the error for what the scanner has stopped at."""
        scanner, at, length = self._scanner, self._scanner.state.at, self._scanner.state.length
        fault, left = scanner.fault, self._size - at - BLOCK_SIZE
        foreign = kind_of(bytes(scanner.window[:HEAD_SIZE]), self._path)
        if fault == "BAD_CHECKSUM" and not at and foreign is not None:
            text, hint = f"this is {foreign.name}", "`ffserve convert` makes a tar file of it"
            return self._error(text, hint if foreign.package == "tarfile" else _RESTORE)
        if fault == "CUT_MEMBER" and left >= length:
            fault = "CUT_ZEROS"
        key, field = map(_text, split_name(scanner.name))
        name = f"the member {_text(scanner.name)}"
        text = _FAULTS[fault].format(name=name, length=length, left=left, key=key, field=field)
        return self._error(text, _HINTS.get(fault, _RESTORE), cut=fault.startswith("CUT"))


def _first_header(content: bytes) -> int:
    """Return where the first header is; -1: there is none."""
    for at in range(0, len(content) - BLOCK_SIZE + 1, BLOCK_SIZE):
        if content[at + 257 : at + 262] == b"ustar" and header_is_valid(content[at : at + 512]):
            return at
    return -1


def _padded_size(header: bytes) -> int:
    """Return the bytes of a header and what belongs to it; 0: it is none."""
    if not header_is_valid(header[:BLOCK_SIZE]):
        return 0
    size = int.from_bytes(header[125:136], "big")
    if header[124] < 128:
        digits = header[124:136].strip(b" \0")
        size = int(digits, 8) if digits.isdigit() and not {56, 57} & {*digits} else 0
    return BLOCK_SIZE + size + -size % BLOCK_SIZE


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
        return _HeaderScan(read_at, size, path, tolerant=tolerant, admit=admit).run()

    def restore(
        self, lengths: UInt64s, checksums: UInt32s, kept: bytes, size: int, path: str
    ) -> TarShard | None:
        """Return the shard of an earlier scan of an intact file.

        Returns: None if such records cannot be in a file of ``size`` bytes.
        """
        count, blocks_count = len(lengths), -(-len(lengths) // BLOCK_COUNT)
        try:
            digest, about_size = _KEPT.unpack_from(kept)
            at = _KEPT.size + about_size
            stated = Members.of(kept[_KEPT.size : at], count)
            offsets = np.frombuffer(kept, "<u8", count, at).astype(np.uint64)
            sizes = np.frombuffer(kept, "<u4", blocks_count, at + 8 * count)
        except (struct.error, ValueError, FormatError):
            return None
        end = at + 8 * count + 4 * blocks_count
        edges = [end, *(end + np.cumsum(sizes, dtype=np.int64)).tolist()]
        blocks = tuple(kept[low:high] for low, high in pairwise(edges))
        about = Members.of_kinds(checksums, stated.fields, stated.skipped, blocks)
        limit = np.uint64(size)
        fields = checksums & np.uint32(FIRST - 1)
        known = not count or (checksums[0] >= FIRST and int(fields.max()) < len(about.fields))
        fits = known and (offsets <= limit).all() and (lengths <= limit - offsets).all()
        if edges[-1] != len(kept) or not fits or about.about != stated.about:
            return None
        return TarShard(path, size, offsets, lengths, checksums, about, digest)

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


FORMAT = Tar()
