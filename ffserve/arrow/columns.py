"""Arrow record batches of tf.train.Example and SequenceExample messages.

Records are decoded and encoded in C (engine/records/example.c), a column at a time. ``Inference``
finds the schema of records. Integers are stored as int64, all other numbers as float32; a value
that does not survive that is an error with its row, never another value. This module needs pyarrow,
and takes only the columns that a schema names, so fewer columns cost less.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ffserve.engine import example as engine
from ffserve.engine.example import ColumnSource, Decoded, ExampleRecords, Fault, Found, WantedColumn
from ffserve.errors import FormatError, UsageError

RECORD_TYPES = ("Example", "SequenceExample")
_KIND_NAMES = {
    0: "no values",
    engine.BYTES: "byte strings",
    engine.FLOAT: "floats",
    engine.INT64: "integers",
}
_FIT = "give a schema that fits"


class Place(NamedTuple):
    """Where records come from, for errors: the file, and their rows in it.

    rows: int64[n]; None for n rows from `first` on.
    """

    path: str | None
    first: int = 0
    rows: NDArray[np.int64] | None = None

    def number(self, row: int) -> int:
        """Return the row in the file of a row of the batch."""
        return self.first + row if self.rows is None else int(self.rows[row])

    def error(
        self, row: int, column: str | None, text: str, hint: str | None = None
    ) -> FormatError:
        """Return an error about a row of the batch."""
        named = "" if column is None else f", column {column!r}"
        return FormatError(f"row {self.number(row)}{named}: {text}", path=self.path, hint=hint)


NOWHERE = Place(None)


class Leaf(NamedTuple):
    """The type of a column: its innermost type, and how many lists are around it."""

    type: Any
    depth: int
    kind: int


def leaf_of(column: str, type: Any) -> Leaf:
    """Return the leaf of a column of this Arrow type.

    Raises: UsageError for a type that Example messages do not have.
    """
    inner, depth = type, 0
    while pa.types.is_list(inner) or pa.types.is_large_list(inner):
        inner, depth = inner.value_type, depth + 1
    for kind, tests in _TYPES.items():
        if depth <= 2 and any(test(inner) for test in tests):
            return Leaf(inner, depth, kind)
    raise UsageError(
        f"column {column!r} has the type {type}, which Example messages cannot hold",
        hint="cast it to int, bigint, float, double, decimal, string or binary, or to an array of "
        "these, or leave it out",
    )


_TYPES = {
    engine.INT64: (pa.types.is_int32, pa.types.is_int64),
    engine.FLOAT: (pa.types.is_float32, pa.types.is_float64, pa.types.is_decimal128),
    engine.BYTES: (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    ),
}


def check_schema(schema: Any, record: str) -> None:
    """Check that messages of this type can hold the columns of an Arrow schema.

    Raises: UsageError.
    """
    _check_names(schema, record)
    for one in schema:
        if leaf_of(one.name, one.type).depth == 2 and record == "Example":
            raise UsageError(
                f"column {one.name!r} is an array of arrays, which an Example cannot hold",
                hint="use SequenceExample",
            )


def _check_names(schema: Any, record: str) -> None:
    if record not in RECORD_TYPES:
        raise UsageError(f"invalid record type {record!r}", hint=f"use {' or '.join(RECORD_TYPES)}")
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise UsageError(f"the column {name!r} comes twice", hint="rename one")


# ---- decoding ----------------------------------------------------------------------------------


def decode(
    records: ExampleRecords, schema: Any, *, record: str = "Example", place: Place = NOWHERE
) -> Any:
    """Decode the columns of a schema.

    Args:
        records: the messages.
        schema: pyarrow.Schema of at least one column; a feature that it does not name is skipped.
        record: "Example" or "SequenceExample".
        place: for errors.
    Returns: pyarrow.RecordBatch with one row per record, in new memory. A feature that is missing
        or has no value is null.
    Raises:  FormatError: a record that is not such a message, or whose values do not fit the type
             of their column; the text has file, row and column. UsageError: a type that messages
             cannot hold, or a name that comes twice.
    Cost:    two passes in C over the wanted features.
    """
    _check_names(schema, record)
    leaves = [leaf_of(one.name, one.type) for one in schema]
    wanted = [
        WantedColumn(
            one.name.encode(), leaf.kind, leaf.depth, wide=not pa.types.is_float32(leaf.type)
        )
        for one, leaf in zip(schema, leaves, strict=True)
    ]
    try:
        columns = engine.decode(records, wanted, sequence=record == "SequenceExample")
    except Fault as fault:
        raise _explained(fault, schema, record, place) from None
    arrays = [
        _array(column, one, leaf, place)
        for column, one, leaf in zip(columns, schema, leaves, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _explained(fault: Fault, schema: Any, record: str, place: Place) -> FormatError:
    column = schema.names[fault.column] if fault.column >= 0 else None
    wanted = schema.field(fault.column).type if fault.column >= 0 else None
    found = _KIND_NAMES.get(fault.kind, "values")
    nested = wanted is not None and leaf_of("", wanted).depth == 2
    texts = {
        engine.MALFORMED: (
            f"the record is not a tf.train.{record}",
            "read it with the record type that was written: Example, SequenceExample or ByteArray",
        ),
        engine.KIND: (f"it holds {found}, and the schema says {wanted}", _FIT),
        engine.SEVERAL: (
            f"it holds several {found}, and the schema says one {wanted}",
            "give the column an array type",
        ),
        engine.PLACE: (
            f"it is {'a feature' if nested else 'a feature list'}, and the schema says {wanted}: "
            "only a feature list of a SequenceExample becomes an array of arrays",
            _FIT,
        ),
        engine.INEXACT: (
            f"it holds an integer (int64), which the {wanted} of the schema cannot hold exactly",
            "give a schema with bigint, or with double for integers up to 2^53",
        ),
        engine.LARGE: (
            "a batch holds more than 2 GiB of this column",
            "read fewer records at a time",
        ),
    }
    text, hint = texts[fault.what]
    return place.error(fault.row, column, text, hint)


def _array(column: Decoded, one: Any, leaf: Leaf, place: Place) -> Any:
    if not one.nullable and not column.valid.all():
        row = int(np.argmin(column.valid))
        raise place.error(
            row, one.name, "it is missing or null, and the column is NOT NULL", "allow nulls"
        )
    mask = (
        None if column.valid.all() else pa.py_buffer(np.packbits(column.valid, bitorder="little"))
    )
    items = _items(column, one.name, leaf, place, mask if leaf.depth == 0 else None)
    n, type = len(column.valid), one.type
    if leaf.depth == 0:
        return items
    inner = type.value_type
    if column.inner is not None:
        count = len(column.inner) - 1
        items = _list(inner, count, None, column.inner, items)
    return _list(type, n, mask, column.outer, items)


def _list(type: Any, count: int, mask: Any, edges: Any, items: Any) -> Any:
    wide = pa.types.is_large_list(type)
    offsets = pa.py_buffer(edges.astype(np.int64) if wide else edges)
    return pa.Array.from_buffers(type, count, [mask, offsets], children=[items])


def _items(column: Decoded, name: str, leaf: Leaf, place: Place, mask: Any) -> Any:
    type, values = leaf.type, column.values
    if column.edges is not None:
        wide = pa.types.is_large_string(type) or pa.types.is_large_binary(type)
        edges = pa.py_buffer(column.edges.astype(np.int64) if wide else column.edges)
        buffers = [mask, edges, pa.py_buffer(values)]
        array = pa.Array.from_buffers(type, len(column.edges) - 1, buffers)
        if pa.types.is_string(type) or pa.types.is_large_string(type):
            _check_text(array, column, name, place)
        return array
    if pa.types.is_int32(type):
        narrow = values.astype(np.int32)
        _check_fit(narrow == values, column, name, place, _unfit("an integer (int64)", type))
        values = narrow
    elif pa.types.is_decimal128(type):
        return _decimals(column, name, type, place, mask)
    return pa.Array.from_buffers(type, len(values), [mask, pa.py_buffer(values)])


def _decimals(column: Decoded, name: str, type: Any, place: Place, mask: Any) -> Any:
    fit = np.abs(column.values) < 10.0 ** (type.precision - type.scale)
    _check_fit(fit, column, name, place, _unfit("a number", type))
    array = _decimals_of(column.values, type)
    return pa.Array.from_buffers(type, len(array), [mask, array.buffers()[1]])


def _decimals_of(values: NDArray[np.float64], type: Any) -> Any:
    """Return the decimals that numbers of 32 bits stand for: 3.14, not 3.1400001049."""
    values = np.where(np.abs(values) < 10.0 ** (-type.scale - 1), 0.0, values)
    narrow = values.astype(np.float32)
    # The shortest text that gives the number again; integers may have more than 24 bits.
    text = np.where(narrow == values, narrow.astype("U"), values.astype("U"))
    exact = pa.array(text, pa.string()).cast(pa.decimal256(76, 38))
    compute = importlib.import_module("pyarrow.compute")  # 70 ms, which most programs need not pay
    rounded = compute.round(exact, ndigits=type.scale, round_mode="half_towards_infinity")
    return rounded.cast(type)


def _unfit(value: str, type: Any) -> str:
    return f"it holds {value} that does not fit into the {type} of the schema"


def _check_fit(fit: Any, column: Decoded, name: str, place: Place, text: str) -> None:
    if not fit.all():
        row = _row_of(int(np.argmin(fit)), column.outer, column.inner)
        raise place.error(row, name, text, "give the column a wider type")


def _check_text(array: Any, column: Decoded, name: str, place: Place) -> None:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        for item, value in enumerate(array.cast(pa.large_binary())):
            try:
                (value.as_py() or b"").decode()
            except UnicodeDecodeError:
                row = _row_of(item, column.outer, column.inner)
                text = f"it holds a byte string that is not UTF-8, and the schema says {array.type}"
                raise place.error(row, name, text, "give the column the type binary") from None
        raise


def _row_of(item: int, outer: Any, inner: Any) -> int:
    """Return the row that holds a value."""
    for edges in (inner, outer):
        if edges is not None:
            item = int(np.searchsorted(edges, item, side="right")) - 1
    return item


# ---- encoding ----------------------------------------------------------------------------------


def encode(
    batch: Any, *, record: str = "Example", place: Place = NOWHERE
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Encode the rows of a record batch; equal bytes for equal rows.

    Args:    batch: pyarrow.RecordBatch. record, place: as for `decode`.
    Returns: the messages back to back, and int64[n + 1], their offsets. A null is left out.
    Raises:  FormatError: a null in a column that is NOT NULL or in an array, or a number that a
             float32 does not represent. UsageError: a type that messages cannot hold.
    """
    check_schema(batch.schema, record)
    order = sorted(range(batch.num_columns), key=lambda k: batch.schema.names[k].encode())
    sources = [_source(batch.column(k), batch.schema.field(k), place) for k in order]
    return engine.encode(sources, batch.num_rows, sequence=record == "SequenceExample")


def _source(array: Any, one: Any, place: Place) -> ColumnSource:
    leaf = leaf_of(one.name, one.type)
    valid = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        if not one.nullable:
            row = int(np.argmin(valid))
            raise place.error(row, one.name, "it is null, and the column is NOT NULL")
    outer = inner = None
    items = array
    if leaf.depth:
        outer, items = _elements(array)
        if leaf.depth == 2:
            _check_elements(items, one.name, valid, outer, None, place)
            inner, items = _elements(items)
        _check_elements(items, one.name, valid, outer, inner, place)
    edges = None
    values: NDArray[Any]
    if leaf.kind == engine.BYTES:
        values, edges = byte_strings(items)
    elif leaf.kind == engine.INT64:
        values = _numbers(items, np.int32 if pa.types.is_int32(leaf.type) else np.int64)
        values = values.astype(np.int64, copy=False)
    else:
        values = _floats(items, leaf, one.name, (outer, inner), place)
    return ColumnSource(
        one.name.encode(), leaf.kind, leaf.depth, valid, outer, inner, values, edges
    )


def _elements(array: Any) -> tuple[NDArray[np.int64], Any]:
    """Return the offsets of lists, and the values of these lists only: an array may be a slice."""
    edges = array.offsets.to_numpy().astype(np.int64)
    first = int(edges[0])
    return edges - first, array.values.slice(first, int(edges[-1]) - first)


def _check_elements(
    items: Any, name: str, valid: Any, outer: Any, inner: Any, place: Place
) -> None:
    if not items.null_count:
        return
    for item in np.flatnonzero(items.is_null().to_numpy(zero_copy_only=False)).tolist():
        row = _row_of(item, outer, inner)
        if 0 <= row < len(outer) - 1 and (valid is None or valid[row]):
            text = "an element of the array is null, which an Example cannot hold"
            raise place.error(row, name, text, "remove nulls from the array")


def _numbers(items: Any, kind: Any) -> NDArray[Any]:
    """Return the values of an array of numbers, without a copy; those of nulls are undefined."""
    data = items.buffers()[1]
    if data is None:
        return np.zeros(len(items), kind)
    return np.frombuffer(data, kind)[items.offset : items.offset + len(items)]


def byte_strings(items: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return a buffer with the byte strings of an array, and int64[n + 1], their offsets in it."""
    wide = pa.types.is_large_string(items.type) or pa.types.is_large_binary(items.type)
    _, offsets, data = items.buffers()
    if offsets is None:
        return np.zeros(0, np.uint8), np.zeros(len(items) + 1, np.int64)
    edges: NDArray[Any] = np.frombuffer(offsets, np.int64 if wide else np.int32)
    some = edges[items.offset : items.offset + len(items) + 1]
    return np.frombuffer(data or b"", np.uint8), some.astype(np.int64)


def _floats(items: Any, leaf: Leaf, name: str, edges: Any, place: Place) -> NDArray[np.float32]:
    if pa.types.is_float32(leaf.type):
        return _numbers(items, np.float32)
    if pa.types.is_decimal128(leaf.type):
        wide = _numbers(items.cast(pa.float64()), np.float64)
    else:
        wide = _numbers(items, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype(np.float32)
    fit = ~(np.isinf(narrow) & ~np.isinf(wide))
    text = f"it holds a {leaf.type} that does not fit into the floats of an Example (32 bits)"
    if pa.types.is_decimal128(leaf.type):
        fit = _survives(items, narrow, leaf.type)
        text = f"it holds a {leaf.type} with more digits than the floats of an Example"
    if items.null_count:
        fit |= items.is_null().to_numpy(zero_copy_only=False)
    if not fit.all():
        row = _row_of(int(np.argmin(fit)), *reversed(edges))
        raise place.error(row, name, text, "cast the column to string")
    return narrow


def _survives(items: Any, narrow: NDArray[np.float32], type: Any) -> NDArray[np.bool_]:
    """Whether a reader gets each decimal back from its float."""
    wide = narrow.astype(np.float64)
    fit: NDArray[np.bool_] = np.abs(wide) < 10.0 ** (type.precision - type.scale)
    back = _decimals_of(np.where(fit, wide, 0.0), type)
    compute = importlib.import_module("pyarrow.compute")
    same = compute.equal(back, items).fill_null(False).to_numpy(zero_copy_only=False)
    return fit & np.asarray(same, np.bool_)


# ---- inference ---------------------------------------------------------------------------------


@dataclass
class _Seen:
    """The kinds of values that a feature has, each with a place where it occurs."""

    kinds: dict[int, Place] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)
    depths: dict[bool, Place] = field(default_factory=dict)
    """Whether the feature is a feature list, each with a place where it is."""
    several: bool = False
    binary: bool = False


class Inference:
    """The schema of records that are added batch by batch.

    A feature that nowhere has more than one value is a scalar (an empty one is null), any other a
    list; a feature list is a list of lists. Integers in some records and floats in others are
    floats. Byte strings are text if all of them are UTF-8.
    """

    def __init__(self, record: str = "Example") -> None:
        self._record = record
        self._seen: dict[bytes, _Seen] = {}

    def add(self, records: ExampleRecords, place: Place = NOWHERE) -> None:
        """Add a batch. Raises: FormatError: a record that is not such a message."""
        try:
            found = engine.infer(records, sequence=self._record == "SequenceExample")
        except Fault as fault:
            raise _explained(fault, None, self._record, place) from None
        for one in found:
            self._take(one, place)

    def _take(self, one: Found, place: Place) -> None:
        seen = self._seen.setdefault(one.name, _Seen())
        for kind in (engine.BYTES, engine.FLOAT, engine.INT64):
            if one.rows[kind] >= 0:
                seen.kinds.setdefault(kind, Place(place.path, place.number(one.rows[kind])))
            if one.empty[kind] >= 0:
                seen.empty.add(kind)
        row = min((row for row in (*one.rows, *one.empty) if row >= 0), default=0)
        seen.depths.setdefault(one.listed, Place(place.path, place.number(row)))
        seen.several |= one.several
        seen.binary |= one.binary

    def merge(self, other: Inference) -> None:
        """Add the features that another inference has found."""
        for name, theirs in other._seen.items():
            seen = self._seen.setdefault(name, _Seen())
            seen.kinds = {**theirs.kinds, **seen.kinds}
            seen.depths = {**theirs.depths, **seen.depths}
            seen.empty |= theirs.empty
            seen.several |= theirs.several
            seen.binary |= theirs.binary

    def schema(self) -> Any:
        """Return the pyarrow.Schema, columns sorted by name.

        Raises: FormatError: a feature is text in one record and numbers in another, or a list of
                features in one and a feature in another; the text names both places. Or its name
                is not UTF-8.
        """
        columns = [(name, self._type(name, seen)) for name, seen in sorted(self._seen.items())]
        return pa.schema(
            [(_text(name, self._seen[name]), type) for name, type in columns if type is not None]
        )

    def _type(self, name: bytes, seen: _Seen) -> Any:
        if len(seen.depths) > 1:
            raise _conflict(
                name, "a feature list", seen.depths[True], "a feature", seen.depths[False]
            )
        kinds = seen.kinds or dict.fromkeys(seen.empty, NOWHERE)
        if not kinds:
            return None
        if engine.BYTES in kinds and len(seen.kinds) > 1:
            other = next(kind for kind in kinds if kind != engine.BYTES)
            raise _conflict(
                name, "byte strings", kinds[engine.BYTES], _KIND_NAMES[other], kinds[other]
            )
        if engine.BYTES in kinds:
            type = pa.binary() if seen.binary else pa.string()
        else:
            type = pa.float32() if engine.FLOAT in kinds else pa.int64()
        depth = 2 if True in seen.depths else int(seen.several)
        for _ in range(depth):
            type = pa.list_(type)
        return type


def _text(name: bytes, seen: _Seen) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        place = next(iter(seen.depths.values()))
        raise FormatError(
            f"row {place.first}: the name of the feature {name!r} is not UTF-8",
            path=place.path,
            hint="give a schema of the other columns",
        ) from None


def _conflict(name: bytes, one: str, here: Place, other: str, there: Place) -> FormatError:
    return FormatError(
        f"feature {name.decode(errors='replace')!r} holds {one} in row {here.first}, but {other} "
        f"in row {there.first} of {there.path or 'the same records'}",
        path=here.path,
        hint="give a schema without this column, or load the files separately",
    )


def records_at(buffer: NDArray[np.uint8], offsets: NDArray[np.int64]) -> ExampleRecords:
    """Return the records of a ``Batch``: its buffer and offsets."""
    return ExampleRecords(
        buffer, offsets[:-1].astype(np.uint64), np.diff(offsets).astype(np.uint64)
    )


def records_of(messages: Iterable[bytes]) -> ExampleRecords:
    """Return messages back to back in one buffer."""
    parts = list(messages)
    lengths = np.array([len(part) for part in parts], np.uint64)
    return ExampleRecords(
        np.frombuffer(b"".join(parts), np.uint8), np.cumsum(lengths) - lengths, lengths
    )
