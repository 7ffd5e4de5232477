"""FFRecord files, read independently of ffserve."""

from __future__ import annotations

import itertools
import struct
import zlib


def split(content: bytes) -> list[bytes]:
    """The samples of an FFRecord file, read independently of what is tested."""
    crc, count = struct.unpack_from("<Iq", content)
    end = 12 + 12 * count
    assert crc == zlib.crc32(content[4:end])
    offsets = [*struct.unpack_from(f"<{count}q", content, 12 + 4 * count), len(content)]
    assert offsets[0] == end
    found = [content[a:b] for a, b in itertools.pairwise(offsets)]
    assert struct.unpack_from(f"<{count}I", content, 12) == tuple(map(zlib.crc32, found))
    return found
