"""TFRecord files for the tests, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ffserve.formats import by_name

TFRECORD: Any = by_name("tfrecord")


def written(payloads: Sequence[bytes]) -> bytes:
    encoder = TFRECORD.writer()
    pieces = [bytes(piece) for p in payloads for piece in encoder.encode(memoryview(p))]
    assert encoder.head_size(0) == encoder.head_size(9) == 0
    return b"".join(encoder.head()) + b"".join(pieces) + b"".join(encoder.tail())


SMALL = [b"first", b"", b"the third record", bytes(20), b"last"]


def starts(payloads: Sequence[bytes]) -> list[int]:
    """Where the frames begin, and where the last one ends."""
    places = [0]
    for payload in payloads:
        places.append(places[-1] + 16 + len(payload))
    return places
