"""Opening: the tables of a remote record file, or its index, which the store keeps beside it."""

from __future__ import annotations

from collections.abc import Callable

from ffserve import formats, index_file
from ffserve.engine.codec import crc32c
from ffserve.formats.base import HEAD_SIZE, needs_scan, read_exactly
from ffserve.shardfile import watched
from ffserve.store.fetching import Fetcher, OpenObject


def parsed(
    fetcher: Fetcher,
    opened: OpenObject,
    format: str | None = None,
    *,
    verify: bool = True,
    tolerant: bool = False,
    seen: Callable[[int], object] | None = None,
) -> formats.Shard:
    """Read an object's tables, or its index, which is kept beside it in the store.

    Args: as of `shardfile.open_shard`.
    Raises: as that; AccessDenied, ReadError of the origin.
    """
    read_at, size, name = fetcher.read_at(opened), opened.stored.size, opened.shown
    head = bytearray(min(size, HEAD_SIZE))
    read_exactly(read_at, 0, memoryview(head), name)
    chosen = formats.by_name(format) if format else formats.detect(bytes(head), name, size)
    if not needs_scan(chosen):
        return chosen.open(read_at, size, name, verify=verify, tolerant=tolerant)
    tail = bytearray(min(size, index_file.END_SIZE))
    read_exactly(read_at, size - len(tail), memoryview(tail), name)
    ends = crc32c(bytes(head[: index_file.END_SIZE])), crc32c(bytes(tail))
    identity = index_file.Identity(chosen.name, size, 0, *ends)
    kept = f"index-{chosen.name}"
    if seen is None:
        content = opened.stored.read_index(kept)
        indexed = index_file.decode(content, identity)
        if indexed is not None:
            tables = indexed.lengths, indexed.checksums, indexed.kept
            if (shard := chosen.restore(*tables, size, name)) is not None:
                return shard
    if seen is not None:
        read_at = watched(read_at, seen)
    scanned = chosen.open(read_at, size, name, verify=verify, tolerant=tolerant)
    if verify and scanned.sound:
        content = index_file.encode(identity, scanned.lengths, scanned.checksums, scanned.kept)
        fetcher.store.keep_index(opened.stored, kept, content)
    return scanned
