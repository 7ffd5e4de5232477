"""Members: the records of a shard that are fields of samples, and the names of all of them.

In a tar file a record is a member, a sample a run of members with one key, and a field the member
of a sample with one extension. Caches, engines and the protocol know records only. What else a
reader needs is here: which fields there are, and where the names are. The number of a record's
field stands in the place of its checksum, since tar has none of contents.

Names are kept in compressed blocks, of which a reader asks for those that it needs: names of a
million members take about 5 MB.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ffserve.dtypes import UInt32s
from ffserve.engine.tar import BLOCK_COUNT, FIRST, MOST_NAME
from ffserve.errors import FormatError

ABOUT = (1 << 32) - 1
"""The block of this number is the description of the shard."""
_BLOCK_SIZE = BLOCK_COUNT * (MOST_NAME + 1)
_HEAD = struct.Struct("<QQB")


@dataclass(frozen=True)
class Members:
    """What a shard's records are.

    fields: the names of all fields, by number. samples: how many there are. skipped: files in the
    archive that belong to none. uniform: all samples have all fields, in this order. blocks: the
    names of the records.
    """

    fields: tuple[str, ...]
    samples: int
    skipped: int
    uniform: bool
    blocks: tuple[bytes, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return sum(map(len, self.blocks)) + 64 * (len(self.blocks) + len(self.fields))

    def block(self, number: int) -> bytes:
        """Return a block of names, or the description of the shard (ABOUT)."""
        return self.about if number == ABOUT else self.blocks[number]

    @cached_property
    def about(self) -> bytes:
        """All but the names of records, as bytes."""
        names = b"".join(name.encode(errors="surrogateescape") + b"\0" for name in self.fields)
        return _HEAD.pack(self.samples, self.skipped, self.uniform) + names

    @classmethod
    def of_kinds(
        cls, kinds: UInt32s, fields: tuple[str, ...], skipped: int, blocks: tuple[bytes, ...]
    ) -> Members:
        """Return what records of these kinds are."""
        row = np.arange(len(fields), dtype=np.uint32)
        row[:1] |= np.uint32(FIRST)
        uniform = bool(fields) and not len(kinds) % len(fields)
        uniform = uniform and bool((kinds.reshape(-1, len(fields)) == row).all())
        samples = np.count_nonzero(kinds & np.uint32(FIRST))
        return cls(fields, int(samples), skipped, uniform, blocks)

    @classmethod
    def of(cls, about: bytes, records: int, path: str = "") -> Members:
        """Return what `about` has returned. Raises: FormatError: these are no such bytes."""
        if len(about) >= _HEAD.size:
            samples, skipped, uniform = _HEAD.unpack_from(about)
            names = about[_HEAD.size :].split(b"\0")
            fields = tuple(name.decode(errors="surrogateescape") for name in names[:-1])
            plausible = not names[-1] and samples <= records and bool(fields) == bool(records)
            if plausible and (not uniform or samples * len(fields) == records):
                return cls(fields, samples, skipped, bool(uniform))
        raise FormatError("the description of its members is malformed", path=path)


def packed(names: bytes) -> bytes:
    """Return a block of names, each with a zero behind it."""
    return zlib.compress(names, 1)


def unpacked(block: bytes, path: str = "") -> list[bytes]:
    """Return the names in a block. Raises: FormatError: it is damaged."""
    try:
        stream = zlib.decompressobj()
        names = stream.decompress(block, _BLOCK_SIZE)
        if stream.eof and names.endswith(b"\0"):
            return names[:-1].split(b"\0")
    except zlib.error:
        pass
    raise FormatError("a block of names is damaged", path=path)


def split_name(name: bytes) -> tuple[bytes, bytes]:
    """Split a member's name into key and field, at the first dot of its last part."""
    folder, slash, last = name.rpartition(b"/")
    stem, _, field = last.partition(b".")
    return folder + slash + stem, field.lower()


def key_of(name: bytes) -> str:
    """Return the key of the sample that a member belongs to."""
    return as_text(split_name(name)[0])


def as_text(name: bytes) -> str:
    """Return a name, with surrogates as those of `os.listdir`."""
    return name.decode(errors="surrogateescape")
