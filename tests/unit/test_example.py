"""tf.train.Example and SequenceExample without TensorFlow."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffserve
from ffserve import example
from ffserve.errors import FormatError, UsageError
from ffserve.example import Field

GOLDEN = Path(__file__).parents[1] / "golden" / "tfrecord"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())


def as_listed(value: example.Value) -> dict[str, list[Any]]:
    """A feature as the manifest has it."""
    if isinstance(value, list):
        return {"bytes_list": [each.hex() for each in value]}
    if value.dtype == np.float32:
        return {"float_list": [repr(float(each)) for each in value]}
    assert value.dtype == np.int64
    return {"int64_list": value.tolist()}


def listed(features: dict[str, example.Value]) -> dict[str, Any]:
    return {name: as_listed(value) for name, value in features.items()}


def same(a: example.Value, b: example.Value) -> bool:
    if isinstance(a, list) or isinstance(b, list):
        return bool(a == b)
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


def test_golden_examples() -> None:
    with ffserve.open(GOLDEN / "example.tfrecord", server="off") as reader:
        decoded = [example.decode(sample) for sample in reader]
    assert [listed(features) for features in decoded] == MANIFEST["files"]["example.tfrecord"][
        "decoded"
    ]
    for features in decoded:
        again = example.decode(example.encode(features))
        assert again.keys() == features.keys()
        assert all(same(again[name], features[name]) for name in features)


def test_golden_sequence_examples() -> None:
    with ffserve.open(GOLDEN / "sequence_example.tfrecord", server="off") as reader:
        samples = list(reader)
    decoded = [example.decode_sequence(sample) for sample in samples]
    found = [
        {
            "context": listed(context),
            "feature_lists": {
                name: [as_listed(step) for step in steps] for name, steps in lists.items()
            },
        }
        for context, lists in decoded
    ]
    assert found == MANIFEST["files"]["sequence_example.tfrecord"]["decoded"]
    for context, lists in decoded:
        again = example.decode_sequence(example.encode_sequence(context, lists))
        assert listed(again.context) == listed(context)
        assert {n: [as_listed(s) for s in steps] for n, steps in again.lists.items()} == {
            n: [as_listed(s) for s in steps] for n, steps in lists.items()
        }


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def wrapped(kind: int, values: bytes) -> bytes:
    """An Example of one feature "x", from the bytes of its list."""
    return field(1, field(1, field(1, b"x") + field(2, field(kind, values))))


def test_packed_and_unpacked_lists() -> None:
    integers = bytes([1, 2, 0x80, 1])
    packed = wrapped(3, field(1, integers))
    unpacked = wrapped(3, b"\x08\x01\x08\x02\x08\x80\x01")
    mixed = wrapped(3, b"\x08\x01" + field(1, integers[1:]))
    for sample in (packed, unpacked, mixed):
        assert example.decode(sample)["x"].tolist() == [1, 2, 128]  # type: ignore[union-attr]
    floats = struct.pack("<2f", 1.5, -2)
    packed = wrapped(2, field(1, floats))
    unpacked = wrapped(2, b"\x0d" + floats[:4] + b"\x0d" + floats[4:])
    for sample in (packed, unpacked):
        assert example.decode(sample)["x"].tolist() == [1.5, -2]  # type: ignore[union-attr]
    assert example.encode({"x": [1, 2, 128]}) == wrapped(3, field(1, integers))


NAMES = st.text(max_size=10)
VALUES = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8),
    st.lists(st.floats(width=32), min_size=1, max_size=8),
    st.lists(st.binary(max_size=20), max_size=8),
)


@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_what_was_encoded_is_decoded(features: dict[str, list[Any]]) -> None:
    found = example.decode(example.encode(features))
    assert found.keys() == features.keys()
    for name, value in found.items():
        expected: Any = features[name]
        if isinstance(value, np.ndarray):
            expected = np.array(expected, value.dtype)
        assert same(value, expected)


@given(st.dictionaries(NAMES, st.lists(VALUES, max_size=4), max_size=4))
def test_feature_lists_come_back(lists: dict[str, list[Any]]) -> None:
    context, found = example.decode_sequence(example.encode_sequence({"id": 7}, lists))
    assert as_listed(context["id"]) == {"int64_list": [7]}
    assert {n: len(steps) for n, steps in found.items()} == {n: len(s) for n, s in lists.items()}


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_raise_ours(content: bytes) -> None:
    for decode in (example.decode, example.decode_sequence):
        try:
            decode(content)
        except FormatError as error:
            assert "is not a tf.train." in str(error)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, {"int64_list": [3]}),
        (np.uint8(3), {"int64_list": [3]}),
        (np.arange(3, dtype=np.int8), {"int64_list": [0, 1, 2]}),
        (range(3), {"int64_list": [0, 1, 2]}),
        ([1, 2.5], {"float_list": ["1.0", "2.5"]}),
        (np.float64(0.5), {"float_list": ["0.5"]}),
        ("é", {"bytes_list": ["c3a9"]}),
        (["a", b"b", bytearray(b"c"), memoryview(b"d")], {"bytes_list": ["61", "62", "63", "64"]}),
        (np.array(["a", "b"]), {"bytes_list": ["61", "62"]}),
        (np.array([b"a"], object), {"bytes_list": ["61"]}),
        (np.zeros(0, np.int32), {"int64_list": []}),
        (np.zeros(0), {"float_list": []}),
        ([float("inf"), float("nan")], {"float_list": ["inf", "nan"]}),
        ([], {"bytes_list": []}),
    ],
)
def test_what_python_and_numpy_give(value: Any, expected: dict[str, list[Any]]) -> None:
    assert as_listed(example.decode(example.encode({"x": value}))["x"]) == expected


def test_none_is_a_missing_feature() -> None:
    assert example.decode(example.encode({"x": None, "y": 1})).keys() == {"y"}
    assert example.encode({"b": 1, "a": "z"}) == example.encode({"a": "z", "b": 1})


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (True, "boolean"),
        ([np.True_], "boolean"),
        (np.zeros(3, bool), "dtype bool"),
        ([1, "a"], "mixes"),
        ([1, None], "NoneType"),
        (2**63, "64 bits"),
        (np.array([2**63], np.uint64), "64 bits"),
        (1e39, "32 bits"),
        (np.zeros((2, 2)), "shape"),
        (1j, "complex"),
        ({"a": 1}.values, "not int"),
        (np.zeros(1, "M8[s]"), "dtype"),
    ],
)
def test_what_cannot_be_stored_names_the_feature(value: Any, what: str) -> None:
    with pytest.raises(UsageError, match=rf"feature 'its name'.*{what}"):
        example.encode({"its name": value})
    with pytest.raises(UsageError, match=rf"feature 'its name\[1\]'.*{what}"):
        example.encode_sequence({}, {"its name": [1, value]})


def test_names_and_steps_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="not a str"):
        example.encode({b"x": 1})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="must not contain None"):
        example.encode_sequence({}, {"x": [None]})


# ---- inference --------------------------------------------------------------------------------


def inferred(*records: dict[str, Any]) -> dict[str, Field]:
    return example.infer_from([example.encode(record) for record in records])


def test_one_value_everywhere_is_a_value_and_any_longer_a_list() -> None:
    assert inferred({"x": 1}, {"x": [2]}, {}) == {"x": Field("int64", 0)}
    assert inferred({"x": 1}, {"x": [2, 3]}) == {"x": Field("int64", 1)}


def test_empty_decides_nothing_unless_all_are() -> None:
    empty = np.zeros(0, np.float32)
    assert inferred({"x": empty}, {"x": 1}) == {"x": Field("int64", 0)}
    assert inferred({"x": empty}, {"x": empty}) == {"x": Field("float", 1)}
    assert inferred({"x": []}, {"y": 1}) == {"y": Field("int64", 0)}


def test_stronger_kind_wins() -> None:
    assert inferred({"x": 1}, {"x": 1.5}) == {"x": Field("float", 0)}
    assert inferred({"x": 1.5}, {"x": "a"}, {"x": 3}) == {"x": Field("bytes", 0)}
    assert inferred({"x": [1, 2]}, {"x": "a"}) == {"x": Field("bytes", 1)}


def test_feature_lists_are_lists_of_lists() -> None:
    samples = [
        example.encode_sequence({"id": 1}, {"x": [[1], [2.5]], "e": []}),
        example.encode_sequence({"id": 2, "x": 3}, {}),
    ]
    assert example.infer_from(samples, record="SequenceExample") == {
        "id": Field("int64", 0),
        "x": Field("float", 2),
    }


def test_infer_over_as_many_files_and_records_as_asked(tmp_path: Path) -> None:
    for name, values in (("a.tfrecord", [1, 2]), ("b.tfrecord.gz", [[3, 4]]), ("c.ffr", ["x"])):
        with ffserve.create(tmp_path / name) as writer:
            for value in values:
                writer.write(example.encode({"x": value}))
    paths = [tmp_path / "a.tfrecord", tmp_path / "c.ffr"]
    assert example.infer(paths, files=1) == {"x": Field("int64", 0)}
    assert example.infer(paths) == {"x": Field("bytes", 0)}
    assert example.infer(paths, records=2) == {"x": Field("int64", 0)}
    assert example.infer([tmp_path / "b.tfrecord.gz", paths[0]]) == {"x": Field("int64", 1)}
    found = example.infer(GOLDEN / "example.tfrecord")
    assert found["id"] == Field("int64", 0) and found["vec"] == Field("float", 1)
    assert found["name"] == Field("bytes", 0) and found["blobs"] == Field("bytes", 1)


def test_infer_says_which_record_is_none() -> None:
    with pytest.raises(FormatError, match=r"sample 1: .* is not a tf\.train\.Example"):
        example.infer_from([example.encode({"x": 1}), b"\xff\xff"])
    with pytest.raises(UsageError, match="invalid record"):
        example.infer_from([], record="Other")  # type: ignore[arg-type]


def test_package_and_formats_do_without_protobuf() -> None:
    program = (
        "import sys; sys.modules['google.protobuf'] = None\n"
        "import ffserve, ffserve.example\n"
        "try: ffserve.example.encode({})\n"
        "except ffserve.UsageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'ffserve[example]'" in done.stdout, done.stderr
