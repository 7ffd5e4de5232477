"""Columns of tf.train.Example and SequenceExample messages, as arrays; over records/example.c."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffserve.dtypes import Bools, Bytes, Int32s, Int64s, UInt64s
from ffserve.engine.core import I32S, NULL, ffi, from_buffer, lib

BYTES, FLOAT, INT64 = lib.FFS_EXAMPLE_BYTES, lib.FFS_EXAMPLE_FLOAT, lib.FFS_EXAMPLE_INT64
MALFORMED, KIND = lib.FFS_EXAMPLE_MALFORMED, lib.FFS_EXAMPLE_KIND
SEVERAL, PLACE = lib.FFS_EXAMPLE_SEVERAL, lib.FFS_EXAMPLE_PLACE
INEXACT, LARGE = lib.FFS_EXAMPLE_INEXACT, lib.FFS_EXAMPLE_LARGE


class Fault(Exception):
    """A record that cannot be decoded.

    row: its position in the batch. column: which one, -1 for none in particular. what: one of the
    constants above. kind: of the feature, where `what` is about it.
    """

    def __init__(self, row: int, column: int, what: int, kind: int) -> None:
        super().__init__(row, column, what, kind)
        self.row, self.column, self.what, self.kind = row, column, what, kind


class ExampleRecords(NamedTuple):
    """Records in a buffer: record k is buffer[starts[k], + lengths[k])."""

    buffer: Bytes
    starts: UInt64s
    lengths: UInt64s


@dataclass(frozen=True, slots=True)
class WantedColumn:
    """A column to decode.

    kind: BYTES, FLOAT or INT64. depth: 0 for one value in a record, 1 for a list, 2 for a list of
    lists (a feature list). wide: floats as float64.
    """

    name: bytes
    kind: int
    depth: int
    wide: bool = False


@dataclass(slots=True)
class Decoded:
    """A decoded column of n records.

    valid: bool[n]. outer: int32[n + 1], offsets of a record's values (depth 1) or lists (depth 2).
    inner: int32[...], offsets of a list's values (depth 2). values: int64, float32 or float64; for
    byte strings uint8, with their offsets in edges: int32[...].
    """

    valid: Bools
    outer: Int32s | None
    inner: Int32s | None
    values: NDArray[Any]
    edges: Int32s | None


class Found(NamedTuple):
    """A feature of a batch; see `ffs_example_feature`. rows, empty: by kind, the first record."""

    name: bytes
    rows: tuple[int, ...]
    empty: tuple[int, ...]
    several: bool
    listed: bool
    binary: bool


class ColumnSource(NamedTuple):
    """A column to encode.

    valid: bool[n] or None. outer, inner: int64 offsets as in `Decoded`, which need not begin at 0.
    values: int64, float32 or uint8, contiguous. edges: int64 offsets of byte strings.
    """

    name: bytes
    kind: int
    depth: int
    valid: Bools | None
    outer: Int64s | None
    inner: Int64s | None
    values: NDArray[Any]
    edges: Int64s | None


def decode(
    records: ExampleRecords, wanted: Sequence[WantedColumn], *, sequence: bool
) -> list[Decoded]:
    """Decode columns of records.

    Args:    wanted: names differ. sequence: the records are SequenceExamples.
    Raises:  Fault.
    Cost:    two passes over the features that are wanted, one over the others.
    """
    batch, kept = _batch(records, sequence)
    n = len(records.starts)
    columns = ffi.new("ffs_example_column[]", max(1, len(wanted)))
    for column, one in zip(columns, wanted, strict=False):
        name = ffi.from_buffer("uint8_t[]", one.name)
        column.name, column.name_size = name, len(one.name)
        column.kind, column.depth, column.wide = one.kind, one.depth, one.wide
        places = np.empty(n, np.uint8), np.empty(n, np.uint64), np.empty(n, np.uint64)
        pointers = [ffi.from_buffer("char[]", array) for array in places]
        kept += [name, *pointers]
        column.places = ffi.cast("uint8_t *", pointers[0])
        column.begins = ffi.cast("uint64_t *", pointers[1])
        column.sizes = ffi.cast("uint64_t *", pointers[2])
    _check(lib.ffs_example_find(batch, columns, len(wanted)), batch, -1)
    return [_column(batch, columns[k], k, n) for k in range(len(wanted))]


def _column(batch: Any, column: Any, number: int, n: int) -> Decoded:
    _check(lib.ffs_example_count(batch, ffi.addressof(column)), batch, number)
    is_bytes = column.kind == BYTES
    valid = np.empty(n, np.bool_)
    outer = np.empty(n + 1, np.int32) if column.depth else None
    inner = np.empty(column.steps + 1, np.int32) if column.depth == 2 else None
    kind = np.int64 if column.kind == INT64 else np.float64 if column.wide else np.float32
    values: NDArray[Any] = (
        np.empty(column.size, np.uint8) if is_bytes else np.empty(column.items, kind)
    )
    edges = np.empty(column.items + 1, np.int32) if is_bytes else None
    kept = []

    def pointer(array: NDArray[Any] | None) -> Any:
        if array is None:
            return NULL
        kept.append(ffi.from_buffer("char[]", array))
        return kept[-1]

    column.valid = ffi.cast("uint8_t *", pointer(valid))
    column.outer = ffi.cast("int32_t *", pointer(outer))
    column.inner = ffi.cast("int32_t *", pointer(inner))
    column.edges = ffi.cast("int32_t *", pointer(edges))
    column.values = pointer(None if is_bytes else values)
    column.data = ffi.cast("uint8_t *", pointer(values if is_bytes else None))
    _check(lib.ffs_example_fill(batch, ffi.addressof(column)), batch, number)
    return Decoded(valid, outer, inner, values, edges)


def infer(records: ExampleRecords, *, sequence: bool) -> list[Found]:
    """Collect the features of records. Raises: Fault. Cost: one pass over the records."""
    batch, kept = _batch(records, sequence)
    room = 256
    while True:
        features = ffi.new("ffs_example_feature[]", room)
        slots = np.empty(2 * room, np.int32)
        found = lib.ffs_example_infer(batch, features, room, from_buffer(I32S, slots), 2 * room)
        if found != -2:
            break
        room *= 4
    _check(min(found, 0), batch, -1)
    del kept
    view = records.buffer
    return [
        Found(
            view[one.name_at : one.name_at + one.name_size].tobytes(),
            tuple(one.rows),
            tuple(one.empty),
            bool(one.several),
            bool(one.listed),
            bool(one.binary),
        )
        for one in features[0:found]
    ]


def types_of(record: Bytes) -> dict[str, str]:
    """Return the features of a record as types of Python by name, such as "int" or "list[float]".

    Returns: sorted by name; {} if the record is no Example, or has no features with a kind.
    """
    lengths = np.array([len(record)], np.uint64)
    try:
        found = infer(ExampleRecords(record, np.zeros(1, np.uint64), lengths), sequence=False)
    except Fault:
        return {}
    types = {}
    for one in found:
        for kind, name in ((BYTES, "bytes"), (INT64, "int"), (FLOAT, "float")):
            if one.rows[kind] >= 0 or one.empty[kind] >= 0:
                single = one.rows[kind] >= 0 and not one.several
                types[one.name.decode(errors="backslashreplace")] = (
                    name if single else f"list[{name}]"
                )
    return dict(sorted(types.items()))


def _batch(records: ExampleRecords, sequence: bool) -> tuple[Any, list[Any]]:
    """Return the struct of a batch, and what must live as long."""
    buffer, starts, lengths = records
    ends = starts + lengths
    if len(starts) and (int(ends.max()) > len(buffer) or (ends < starts).any()):
        raise ValueError("a record is outside of the buffer")
    batch = ffi.new("ffs_example_batch *")
    pointers = [
        ffi.from_buffer("uint8_t[]", buffer),
        ffi.from_buffer("uint64_t[]", starts),
        ffi.from_buffer("uint64_t[]", lengths),
    ]
    batch.bytes, batch.starts, batch.lengths = pointers
    batch.n, batch.sequence = len(starts), sequence
    return batch, pointers


def _check(result: int, batch: Any, column: int) -> None:
    if result:
        raise Fault(batch.row, column, batch.fault, batch.found)


def encode(sources: Sequence[ColumnSource], n: int, *, sequence: bool) -> tuple[Bytes, Int64s]:
    """Encode n records.

    Args:    sources: in the order in which the features are to be written.
    Returns: the records back to back, and int64[n + 1], their offsets.
    """
    columns = ffi.new("ffs_example_source[]", max(1, len(sources)))
    kept: list[Any] = []

    def pointer(kind: str, array: Any) -> Any:
        if array is None:
            return NULL
        kept.append(ffi.from_buffer("char[]", array))
        return ffi.cast(kind, kept[-1])

    for column, one in zip(columns, sources, strict=False):
        column.name, column.name_size = pointer("uint8_t *", one.name), len(one.name)
        column.kind, column.depth = one.kind, one.depth
        column.valid = pointer("uint8_t *", one.valid)
        column.outer = pointer("int64_t *", one.outer)
        column.inner = pointer("int64_t *", one.inner)
        column.values = pointer("void *", one.values)
        column.edges = pointer("int64_t *", one.edges)
    edges = np.zeros(n + 1, np.int64)
    sizes = np.empty(n, np.int64)
    lib.ffs_example_measure(columns, len(sources), n, sequence, from_buffer("int64_t[]", sizes))
    np.cumsum(sizes, out=edges[1:])
    out = np.empty(int(edges[-1]), np.uint8)
    lib.ffs_example_encode(columns, len(sources), n, sequence, from_buffer("uint8_t[]", out))
    return out, edges
