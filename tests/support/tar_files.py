"""Tar archives for tests, and what Python's tarfile reads in them."""

from __future__ import annotations

import io
import itertools
import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Sample = Mapping[str, bytes]


def archive(
    samples: Iterable[Sample], format: int = tarfile.USTAR_FORMAT, key: str = "d/{:06}"
) -> bytes:
    """Return an archive of samples, with their numbers as keys."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=format) as out:
        for number, fields in enumerate(samples):
            for field, payload in fields.items():
                info = tarfile.TarInfo(f"{key.format(number)}.{field}")
                info.size = len(payload)
                out.addfile(info, io.BytesIO(payload))
    return content.getvalue()


def numbered(count: int, *, irregular: bool = False) -> list[Sample]:
    """Return samples of three fields; some lack one."""
    samples: list[Sample] = []
    for k in range(count):
        fields = {"jpg": b"picture %d " % k * (k % 50), "cls": b"%d" % (k % 10), "json": b"{}"}
        if irregular and k % 3 == 0:
            del fields["cls"]
        samples.append(fields)
    return samples


def write(path: Path, samples: Sequence[Sample]) -> str:
    """Write an archive; return its path."""
    path.write_bytes(archive(samples))
    return str(path)


def with_checksum(header: bytearray) -> bytearray:
    """Return a header with the checksum that its bytes have."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return header


Members = list[tuple[bytes, int, int]]


def by_tarfile(content: bytes) -> Members | None:
    """Return name, offset and size of the records that tarfile finds; None: it fails, does not see
    the end, or finds what a record cannot be."""
    found: Members = []
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as opened:
            for member in itertools.islice(opened, 10_000):
                name = member.name.encode("utf-8", "surrogateescape")
                if not _is_record(name) or not (member.isreg() or member.islnk()):
                    continue
                if member.issparse():
                    return None
                place = member.offset_data, member.size
                if member.islnk():
                    target = member.linkname.encode("utf-8", "surrogateescape")
                    places = [(at, size) for other, at, size in found if other == target]
                    if not places:
                        return None
                    place = places[-1]
                found.append((name, *place))
            end = content[opened.offset : opened.offset + tarfile.BLOCKSIZE]
            return found if not any(end) and len(end) in (0, tarfile.BLOCKSIZE) else None
    except (tarfile.TarError, ValueError, OverflowError, MemoryError, EOFError):
        return None


def _is_record(name: bytes) -> bool:
    last = name.rpartition(b"/")[2]
    return last.find(b".") > 0 and not re.match(rb"__[^/]*__($|/)", name)
