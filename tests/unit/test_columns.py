"""Arrow columns of Example messages: against protobuf, and with hostile records."""

from __future__ import annotations

from contextlib import suppress
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffserve
from ffserve import example
from ffserve.arrow import columns
from ffserve.arrow.columns import Inference, Place, records_of
from ffserve.engine.example import ExampleRecords
from ffserve.errors import FormatError, UsageError

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=32, allow_nan=False)
VALUES = st.one_of(st.lists(INT64), st.lists(FLOAT), st.lists(st.binary(max_size=9)))
TYPES = {"i": pa.int64(), "f": pa.float32(), "b": pa.binary()}


def feature(kind: str) -> st.SearchStrategy[Any]:
    value = {"i": INT64, "f": FLOAT, "b": st.binary(max_size=9)}[kind]
    return st.none() | st.lists(value, max_size=4)


ROWS = st.lists(st.fixed_dictionaries({kind: feature(kind) for kind in TYPES}), max_size=6)


def typed(kind: str, values: list[Any]) -> Any:
    """An empty list has a kind only as an array."""
    return values or np.empty(0, {"i": np.int64, "f": np.float32, "b": "S1"}[kind])


def split(payload: Any, edges: Any) -> list[bytes]:
    return [payload[a:b].tobytes() for a, b in pairwise(edges)]


@given(ROWS)
def test_messages_are_those_of_protobuf_and_come_back(rows: list[dict[str, Any]]) -> None:
    schema = pa.schema([(kind, pa.list_(type)) for kind, type in TYPES.items()])
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    found = split(*columns.encode(batch))
    expected = [
        example.encode({k: typed(k, v) for k, v in row.items() if v is not None}) for row in rows
    ]
    assert found == expected
    assert columns.decode(records_of(found), schema).equals(batch)
    narrow = pa.schema([schema.field("f")])
    assert columns.decode(records_of(found), narrow).equals(batch.select(["f"]))
    sliced = batch.slice(1)
    assert split(*columns.encode(sliced)) == expected[1:]


@given(st.lists(st.none() | st.lists(st.lists(INT64, max_size=3), max_size=3), max_size=5))
def test_feature_lists_come_back(rows: list[Any]) -> None:
    schema = pa.schema([("x", pa.list_(pa.list_(pa.int64()))), ("y", pa.int64())])
    batch = pa.RecordBatch.from_pylist([{"x": row, "y": 1} for row in rows], schema=schema)
    found = split(*columns.encode(batch, record="SequenceExample"))
    for one, row in zip(found, rows, strict=True):
        lists = example.decode_sequence(one).lists
        assert [step.tolist() if len(step) else [] for step in lists.get("x", [])] == (row or [])
    again = columns.decode(records_of(found), schema, record="SequenceExample")
    assert again.equals(batch)


@given(st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), max_size=4))
def test_inference_agrees_with_that_of_example(rows: list[dict[str, Any]]) -> None:
    records = [example.encode(row) for row in rows]
    inference = Inference()
    inference.add(records_of(records))
    known = example.infer_from(records)
    try:
        schema = inference.schema()
    except FormatError as error:
        assert "byte strings" in str(error)
        return
    kinds = {"int64": (pa.int64(),), "float": (pa.float32(),), "bytes": (pa.string(), pa.binary())}
    assert set(schema.names) == set(known)
    for name, field in known.items():
        leaf = columns.leaf_of(name, schema.field(name).type)
        assert (leaf.type in kinds[field.kind]) and leaf.depth == field.depth
    if not known:
        return
    try:
        assert columns.decode(records_of(records), schema).num_rows == len(rows)
    except FormatError as error:
        assert "cannot hold exactly" in str(error)


@given(st.data())
def test_damaged_messages_are_errors_or_what_protobuf_makes_of_them(data: Any) -> None:
    record = bytearray(
        example.encode(
            {"i": data.draw(st.lists(INT64, max_size=3)), "b": [b"text"], "f": [1.5, 2.0]}
        )
    )
    for _ in range(data.draw(st.integers(1, 3))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    schema = pa.schema([(kind, pa.list_(type)) for kind, type in TYPES.items()])
    whole = bytes(record)
    try:
        found = columns.decode(records_of([whole]), schema).to_pylist()[0]
        Inference().add(records_of([whole]))
    except FormatError:
        return
    try:
        expected = example.decode(whole)
    except FormatError:
        return  # protobuf also checks that names are UTF-8
    for kind in TYPES:
        values = expected.get(kind)
        if values is not None and len(values) and found[kind] is not None:
            if kind == "f":
                np.testing.assert_array_equal(
                    np.float32(found[kind]), np.asarray(values, np.float32)
                )
            else:
                assert found[kind] == list(values)


@given(st.binary(max_size=40))
def test_any_bytes_are_decoded_or_refused(record: bytes) -> None:
    schema = pa.schema([("a", pa.int64()), ("", pa.list_(pa.list_(pa.string())))])
    for kind in columns.RECORD_TYPES:
        for call in (
            lambda kind=kind: columns.decode(records_of([record]), schema, record=kind),
            lambda kind=kind: Inference(kind).add(records_of([record])),
        ):
            with suppress(FormatError):
                call()


def test_names_that_are_not_utf8_are_refused_with_their_row() -> None:
    """It was a UnicodeDecodeError."""
    good, bad = example.encode({"x": [1]}), example.encode({"x": [1]}).replace(b"x", b"\xff")
    inference = Inference()
    inference.add(records_of([good, bad]), Place("/f", 10))
    with pytest.raises(FormatError, match=r"/f: row 11: the name of the feature b'\\xff' is not"):
        inference.schema()
    schema = pa.schema([("x", pa.int64())])
    assert columns.decode(records_of([good, bad]), schema).to_pylist() == [{"x": 1}, {"x": None}]


def test_numbers_that_come_one_by_one_and_merged_lists() -> None:
    # Int64List {value: 1 value: 2}, as old writers have it, and a second list of the same kind.
    lists = b"\x1a\x04\x08\x01\x08\x02" + b"\x1a\x02\x08\x03"
    entry = b"\x0a\x01a" + b"\x12" + bytes([len(lists)]) + lists
    features = b"\x0a" + bytes([len(entry)]) + entry
    record = b"\x0a" + bytes([len(features)]) + features
    assert example.decode(record)["a"].tolist() == [1, 2, 3]
    found = columns.decode(records_of([record]), pa.schema([("a", pa.list_(pa.int64()))]))
    assert found.to_pylist() == [{"a": [1, 2, 3]}]


def test_records_outside_of_their_buffer_are_refused() -> None:
    buffer = np.zeros(4, np.uint8)
    for start, length in ((0, 5), (5, 0), (2**64 - 1, 2)):
        records = ExampleRecords(
            buffer, np.array([start], np.uint64), np.array([length], np.uint64)
        )
        with pytest.raises(ValueError, match="outside"):
            columns.decode(records, pa.schema([("a", pa.int64())]))


def decoding(record: dict[str, Any], field: Any) -> Any:
    records = records_of([example.encode({}), example.encode(record)])
    place = Place("/data/a.tfrecord", 100)
    return columns.decode(records, pa.schema([field]), place=place).column(0).to_pylist()[1]


@pytest.mark.parametrize(
    ("value", "type", "text"),
    [
        (b"x", pa.int64(), "it holds byte strings, and the schema says int64 "),
        ([1, 2], pa.int64(), "it holds several integers, and the schema says one int64"),
        ([1.5, 2], pa.int64(), "it holds floats, and the schema says int64"),
        (2**31, pa.int32(), r"an integer \(int64\) that does not fit into the int32"),
        (2**24 + 1, pa.float32(), r"an integer \(int64\), which the float .* cannot hold exactly"),
        (2**53 + 1, pa.float64(), r"an integer \(int64\), which the double .* cannot hold"),
        (2**63 - 1, pa.float32(), "cannot hold exactly"),
        (1000.0, pa.decimal128(4, 2), "a number that does not fit into the decimal128"),
        (float("nan"), pa.decimal128(4, 2), "does not fit into the decimal"),
        (b"\xff", pa.string(), "a byte string that is not UTF-8, and the schema says string"),
        ([1], pa.list_(pa.list_(pa.int64())), "it is a feature, and the schema says list<.*list<"),
    ],
)
def test_values_that_do_not_fit_name_file_row_and_column(value: Any, type: Any, text: str) -> None:
    with pytest.raises(FormatError, match=text) as caught:
        decoding({"a": value}, pa.field("a", type))
    assert str(caught.value).startswith("/data/a.tfrecord: row 101, column 'a': ")


def test_promotion_decimals_and_nulls() -> None:
    assert decoding({"a": 7}, pa.field("a", pa.float64())) == 7.0
    assert decoding({"a": 3.14}, pa.field("a", pa.decimal128(10, 2))) == Decimal("3.14")
    assert decoding({"a": 2}, pa.field("a", pa.decimal128(10, 2))) == Decimal("2.00")
    assert decoding({"a": []}, pa.field("a", pa.int64())) is None
    assert decoding({"a": np.empty(0, np.float32)}, pa.field("a", pa.int64())) is None
    for type in (pa.decimal128(38, 18), pa.decimal128(38, 28), pa.decimal128(7, 0)):
        assert decoding({"a": 3.25e-9}, pa.field("a", type)) == round(
            Decimal("3.25e-9"), type.scale
        )
        values = [Decimal(v) for v in ("3.14", "-0.1", "0.3")] if type.scale else [Decimal(7)]
        array = pa.array([*values, None], type)
        found = columns.encode(pa.record_batch({"a": array}))
        again = columns.decode(records_of(split(*found)), pa.schema([("a", type)]))
        assert again.column(0).equals(array)
    assert decoding({"a": 2.675}, pa.field("a", pa.decimal128(10, 2))) == Decimal("2.68")
    with pytest.raises(FormatError, match=r"row 100, column 'a'.*NOT NULL"):
        decoding({"a": 1}, pa.field("a", pa.int64(), nullable=False))


def test_values_outside_of_a_slice_do_not_count() -> None:
    lists = pa.array([[1e300], [1.5, 2.5], None, [None]], pa.list_(pa.float64()))
    batch = pa.record_batch({"v": lists}).slice(1, 2)
    payload, edges = columns.encode(batch)
    assert columns.decode(columns.records_at(payload, edges), batch.schema).equals(batch)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array([1.0, 1e39]), "row 1, column 'a': it holds a double that does not fit.*32 bits"),
        (
            pa.array([None, Decimal("12345678.91")]),
            "row 1, column 'a': it holds a decimal128.*digits",
        ),
        (pa.array([[1], None, [2, None]]), "row 2, column 'a'.*element of the array is null"),
        (pa.array([[[1]], [None]]), "row 1, column 'a'.*element of the array is null"),
    ],
)
def test_values_that_cannot_be_written_name_row_and_column(array: Any, text: str) -> None:
    batch = pa.record_batch({"a": array})
    with pytest.raises(FormatError, match=text):
        columns.encode(batch, record="SequenceExample")


def test_types_that_messages_cannot_hold() -> None:
    for type in (
        pa.bool_(),
        pa.struct([("x", pa.int64())]),
        pa.list_(pa.list_(pa.list_(pa.int8()))),
    ):
        with pytest.raises(UsageError, match="which Example messages cannot hold"):
            columns.check_schema(pa.schema([("a", type)]), "Example")
    with pytest.raises(UsageError, match="use SequenceExample"):
        columns.check_schema(pa.schema([("a", pa.list_(pa.list_(pa.int64())))]), "Example")
    with pytest.raises(UsageError, match="invalid record type"):
        columns.check_schema(pa.schema([]), "ByteArray")
    # All but the first were null.
    twice = pa.schema([("a", pa.int64()), ("a", pa.int64())])
    with pytest.raises(UsageError, match="'a' comes twice"):
        columns.decode(records_of([example.encode({"a": 1})]), twice)
    with pytest.raises(UsageError, match="invalid record type 'Sequence'"):
        columns.decode(records_of([]), schema=pa.schema([]), record="Sequence")


def test_batches_of_a_reader(tmp_path: Path) -> None:
    with ffserve.create(tmp_path / "a.tfrecord") as writer:
        for k in range(5):
            writer.write(example.encode({"id": k, "word": f"w{k}"}))
    with ffserve.open(tmp_path / "a.tfrecord", server="off") as reader:
        found = example.to_arrow(reader.read_batch([4, 0]))
        assert found.to_pylist() == [{"id": 4, "word": "w4"}, {"id": 0, "word": "w0"}]
        word = pa.schema([("word", pa.binary())])
        assert example.to_arrow(reader[1:2], word).to_pylist() == [{"word": b"w1"}]


def test_a_number_that_some_records_leave_empty_was_an_array() -> None:
    rows = [{"f": np.float32([k]), "i": np.int64([k]), "l": np.int64([k] * k)} for k in (1, 2)]
    empty = {"f": np.empty(0, np.float32), "i": np.empty(0, np.int64), "l": np.empty(0, np.int64)}
    inference = Inference()
    inference.add(records_of([example.encode(row) for row in [*rows, empty]]))
    schema = inference.schema()
    assert schema.types == [pa.float32(), pa.int64(), pa.list_(pa.int64())]
    last = columns.decode(records_of([example.encode(empty)]), schema).to_pylist()[0]
    assert last["f"] is None and last["i"] is None
