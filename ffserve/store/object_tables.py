"""Opening: the tables of a remote record file, or its index, which a store keeps beside it."""

from __future__ import annotations

from collections.abc import Callable

from ffserve import formats
from ffserve.disk import index_file
from ffserve.disk.shardfile import Counted, watched
from ffserve.engine.codec import crc32c
from ffserve.formats.base import HEAD_SIZE, Admit, ReadAt, needs_scan, read_exactly, unbounded
from ffserve.store.blocks import StoredObject
from ffserve.store.directory import Store


def parsed(
    read_at: ReadAt,
    size: int,
    name: str,
    format: str | None = None,
    *,
    verify: bool = True,
    tolerant: bool = False,
    seen: Callable[[int], object] | None = None,
    kept: tuple[Store, StoredObject] | None = None,
    renew: bool = False,
    admit: Admit = unbounded,
    reading: Callable[[int], object] | None = None,
) -> formats.Shard:
    """Read an object's tables, or its index.

    Args: read_at, size: of its bytes. name: for errors. kept: where its index is kept; None:
        nowhere. renew: scan it, even if there is an index. Others as of `shardfile.open_shard`.
    Raises: as that; AccessDenied, ReadError of the origin.
    """
    if reading is not None:
        read_at = Counted(read_at, reading)
    head = bytearray(min(size, HEAD_SIZE))
    read_exactly(read_at, 0, memoryview(head), name)
    chosen = formats.by_name(format) if format else formats.detect(bytes(head), name, size)
    if not needs_scan(chosen):
        known = _with_head(read_at, head)
        return chosen.open(known, size, name, verify=verify, tolerant=tolerant, admit=admit)
    if seen is not None:
        read_at = watched(read_at, seen)
    if kept is None:
        return chosen.open(read_at, size, name, verify=verify, tolerant=tolerant, admit=admit)
    store, stored = kept
    tail = bytearray(min(size, index_file.END_SIZE))
    read_exactly(read_at, size - len(tail), memoryview(tail), name)
    ends = crc32c(bytes(head[: index_file.END_SIZE])), crc32c(bytes(tail))
    identity = index_file.Identity(chosen.name, size, 0, *ends)
    place = f"index-{chosen.name}"
    index = b"" if renew else stored.read_index(place)
    if reading is not None:
        reading(len(index))
    indexed = index_file.decode(index, identity)
    if indexed is not None:
        tables = indexed.lengths, indexed.checksums, indexed.kept
        admit(len(indexed.lengths), index_file.table_size(len(indexed.lengths), len(indexed.kept)))
        if (shard := chosen.restore(*tables, size, name)) is not None:
            return shard
    scanned = chosen.open(read_at, size, name, verify=verify, tolerant=tolerant, admit=admit)
    if verify and scanned.sound:
        content = index_file.encode(identity, scanned.lengths, scanned.checksums, scanned.kept)
        store.keep_index(stored, place, content)
    return scanned


def _with_head(read_at: ReadAt, head: bytearray) -> ReadAt:
    """Return the same `ReadAt`, of an object whose first bytes are known."""

    def read(offset: int, into: memoryview, /) -> int:
        end = offset + len(into)
        if end > len(head):
            return read_at(offset, into)
        into[:] = head[offset:end]
        return len(into)

    return read
