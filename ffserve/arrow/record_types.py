"""Options that all engines for tables have: types of records, and compressions by format."""

from __future__ import annotations

from typing import Literal, cast

from ffserve.errors import UsageError

RecordType = Literal["Example", "SequenceExample", "ByteArray"]

_RECORD_TYPES = ("Example", "SequenceExample", "ByteArray")
COMPRESSIONS = {
    "tfrecord": ("none", "gzip", "zlib"),
    "recordio": ("none", "gzip", "snappy"),
    "ffrecord": ("none",),
}


def record_type_of(name: str, option: str) -> RecordType:
    """Return the record type of this name, which may be in any case.

    Args: option: what users call it.
    Raises: UsageError.
    """
    for known in _RECORD_TYPES:
        if known.lower() == name.lower():
            return cast(RecordType, known)
    raise UsageError(f"invalid {option} {name!r}", hint=f"use {', '.join(_RECORD_TYPES)}")


def check_compression(format: str, compression: str | None, named: str, option: str) -> None:
    """Check that files of a format can be compressed so.

    Args: compression: None if it is unknown. named: as it was given. option: what users call it.
    Raises: UsageError.
    """
    if compression not in COMPRESSIONS[format]:
        raise UsageError(
            f"{format} does not support the {option} {named!r}",
            hint=f"use {', '.join(COMPRESSIONS[format])}",
        )


def check_sampling(ratio: float, option: str) -> float:
    """Return a fraction of the records. Raises: UsageError: it is not above 0 and at most 1."""
    if not 0 < ratio <= 1:
        raise UsageError(f"{option} must be above 0 and at most 1, not {ratio}")
    return ratio
