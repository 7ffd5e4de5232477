"""``tf.train.Example`` and ``SequenceExample`` to and from Python and numpy, without TensorFlow.

    features = example.decode(sample)              # {"label": array([3]), "image": [b"..."]}
    writer.write(example.encode({"label": 3, "image": jpeg, "box": np.float32([0, 0, 1, 1])}))
    schema = example.infer("/data/*.tfrecord")     # {"label": Field("int64", 0), ...}

A feature is a list of integers (int64), floats (float32) or byte strings; it has no shape. It
needs protobuf, as ``pip install 'ffserve[example]'`` brings it. The messages are of our own
``example.proto``, so they do not meet TensorFlow's in one process. Their Python code is made
by::

    python -m grpc_tools.protoc -I. --python_out=. ffserve/example.proto   # grpcio-tools 1.62

with that old a compiler, since newer code refuses older runtimes, and not the other way round.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffserve.errors import FFServeError, FormatError, UsageError

Kind = Literal["int64", "float", "bytes"]
Value = NDArray[np.int64] | NDArray[np.float32] | list[bytes]
"""A feature's values: int64[n], float32[n] (copies), or byte strings. One that has no kind at all,
which TensorFlow reads as missing, is an empty list of byte strings."""

_KINDS: tuple[Kind, ...] = ("int64", "float", "bytes")
_LISTS = {
    **dict.fromkeys("iu", "int64_list"),
    "f": "float_list",
    **dict.fromkeys("SUO", "bytes_list"),
}
"""Kinds of dtypes that can be stored, and where."""
_INT64 = (-(2**63), 2**63 - 1)


class SequenceFeatures(NamedTuple):
    """What a SequenceExample holds: features of the whole, and lists of features, one a step."""

    context: dict[str, Value]
    lists: dict[str, list[Value]]


@dataclass(frozen=True)
class Field:
    """What a feature is in all records that were looked at.

    kind: "int64", "float" or "bytes". depth: 0 one value in every record, 1 a list, 2 a list of
    lists (a SequenceExample's feature list).
    """

    kind: Kind
    depth: int


@functools.cache
def _messages() -> Any:
    try:
        return importlib.import_module("ffserve.example_pb2")
    except ImportError as error:
        raise UsageError(
            f"Example needs protobuf: {error}", hint="pip install 'ffserve[example]'"
        ) from error


# ---- to Python ---------------------------------------------------------------------------------


def decode(sample: Any) -> dict[str, Value]:
    """Decode a record.

    Args:    sample: bytes, or an array of them, such as a reader gives.
    Returns: features by name, of new memory.
    Raises:  FormatError when it is no Example; UsageError without protobuf.
    """
    return _features(_parse("Example", sample).features)


def decode_sequence(sample: Any) -> SequenceFeatures:
    """Decode a SequenceExample; as ``decode``."""
    message = _parse("SequenceExample", sample)
    lists = {
        name: [_value(feature) for feature in steps.feature]
        for name, steps in message.feature_lists.feature_list.items()
    }
    return SequenceFeatures(_features(message.context), lists)


def _parse(name: str, sample: Any) -> Any:
    messages = _messages()
    message = getattr(messages, name)()
    try:
        message.ParseFromString(bytes(sample))
    except Exception as error:
        if type(error).__name__ != "DecodeError":
            raise
        raise FormatError(
            f"the record is no tf.train.{name}: {error}",
            hint="it may hold bytes of another kind, which need no decoding",
        ) from None
    return message


def _features(message: Any) -> dict[str, Value]:
    return {name: _value(feature) for name, feature in message.feature.items()}


def _value(feature: Any) -> Value:
    kind = feature.WhichOneof("kind")
    if kind == "int64_list":
        values = feature.int64_list.value
        return np.fromiter(values, np.int64, len(values))
    if kind == "float_list":
        values = feature.float_list.value
        return np.fromiter(values, np.float32, len(values))
    return list(feature.bytes_list.value)


# ---- from Python -------------------------------------------------------------------------------


def encode(features: Mapping[str, Any]) -> bytes:
    """Encode a record.

    Args:
        features: by name a value or a sequence of them: integers (int64 after all), floats
            (float32 after all), bytes or str (as UTF-8); or a one-dimensional array. None leaves
            the feature out. [] has no kind; an empty array has that of its dtype.
    Returns: the same bytes for the same features, whatever their order.
    Raises:  UsageError naming the feature: values of several kinds, None among them, booleans,
             integers beyond int64, floats beyond float32, arrays of more dimensions.
    """
    message = _messages().Example()
    _fill(message.features, features)
    return bytes(message.SerializeToString(deterministic=True))


def encode_sequence(context: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> bytes:
    """Encode a SequenceExample.

    Args:    context: as for ``encode``. lists: by name a sequence of values as for ``encode``.
    Returns, Raises: as ``encode``.
    """
    message = _messages().SequenceExample()
    _fill(message.context, context)
    for name, steps in lists.items():
        target = message.feature_lists.feature_list[_name(name)]
        for k, step in enumerate(steps):
            if step is None:
                raise _wrong(f"{name}[{k}]", "None has no place in a feature list")
            _set(target.feature.add(), f"{name}[{k}]", step)
    return bytes(message.SerializeToString(deterministic=True))


def _fill(message: Any, features: Mapping[str, Any]) -> None:
    for name, value in features.items():
        if value is not None:
            _set(message.feature[_name(name)], name, value)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise UsageError(f"features are named by str, not by {name!r}")
    return name


def _set(feature: Any, name: str, value: Any) -> None:
    if isinstance(value, (bytes, bytearray, memoryview, str)):
        value = [value]
    elif isinstance(value, (np.ndarray, np.generic)):
        if value.ndim > 1:
            raise _wrong(name, f"it has shape {value.shape}; give value.ravel(), and the shape too")
        if value.dtype.kind not in _LISTS:
            raise _wrong(name, f"it has dtype {value.dtype}")
        if value.size == 0:
            getattr(feature, _LISTS[value.dtype.kind]).SetInParent()
            return
        value = np.atleast_1d(value).tolist()
    elif not isinstance(value, Iterable):
        value = [value]
    values = list(value)
    kinds = {_kind(name, each) for each in values}
    if kinds == {"int64", "float"}:
        kinds = {"float"}
    if len(kinds) > 1:
        raise _wrong(name, f"it has values of several kinds: {', '.join(sorted(kinds))}")
    if kinds == {"int64"}:
        feature.int64_list.value.extend(map(int, values))
    elif kinds == {"float"}:
        feature.float_list.value.extend(_floats(name, values))
    elif kinds:
        feature.bytes_list.value.extend(
            each.encode() if isinstance(each, str) else bytes(each) for each in values
        )


def _kind(name: str, value: Any) -> Kind:
    if isinstance(value, (bool, np.bool_)):
        raise _wrong(name, "a boolean has no kind of its own; give int(value)")
    if isinstance(value, (int, np.integer)):
        if not _INT64[0] <= int(value) <= _INT64[1]:
            raise _wrong(name, f"{value} does not fit into 64 bits")
        return "int64"
    if isinstance(value, (float, np.floating)):
        return "float"
    if isinstance(value, (bytes, bytearray, memoryview, str)):
        return "bytes"
    raise _wrong(name, f"{type(value).__name__} is none of int, float, bytes and str")


def _floats(name: str, values: list[Any]) -> list[float]:
    wide = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    if (np.isinf(narrow) & ~np.isinf(wide)).any():
        raise _wrong(name, "a value does not fit into 32 bits")
    return list(narrow.tolist())


def _wrong(name: str, what: str) -> UsageError:
    return UsageError(f"feature {name!r} cannot be stored: {what}")


# ---- what is in many records -------------------------------------------------------------------


def infer(
    paths: Any,
    *,
    record: Literal["Example", "SequenceExample"] = "Example",
    files: int | None = None,
    records: int | None = None,
    server: str = "auto",
) -> dict[str, Field]:
    """Find out which features records have.

    A feature with one value in every record that has it is a value, any other a list; empty ones
    decide nothing, unless all are. Where records disagree, bytes win over floats, floats over
    integers. Features of a feature list are lists of lists.

    Args:
        paths: as for ``ffserve.open``.
        record: what the records are.
        files: look at so many files only, the first ones.
        records: look at so many records only, the first ones.
        server: as for ``ffserve.open``.
    Returns: fields by name, sorted. A feature that was always empty and without kind is left out.
    Raises:  FormatError when a record is no such message; as ``ffserve.open`` and reading.
    Cost:    one pass over the records.
    """
    import ffserve
    from ffserve import formats
    from ffserve.dataset import expand_paths

    wanted = expand_paths(paths, suffixes=formats.suffixes())[:files]
    with ffserve.open(wanted, server=server) as reader:
        return infer_from(islice(_samples(reader), records), record=record)


def _samples(reader: Any) -> Iterator[NDArray[np.uint8]]:
    for batch in reader.batches():
        yield from batch


def infer_from(
    samples: Iterable[Any], *, record: Literal["Example", "SequenceExample"] = "Example"
) -> dict[str, Field]:
    """As ``infer``, over records at hand."""
    if record not in ("Example", "SequenceExample"):
        raise UsageError(f"record is 'Example' or 'SequenceExample', not {record!r}")
    found: dict[str, Field] = {}
    empty: dict[str, Field] = {}
    for index, sample in enumerate(samples):
        try:
            message = _parse(record, sample)
        except FFServeError as error:
            raise error.located(index=index) from None
        plain = message.features if record == "Example" else message.context
        for name, feature in plain.feature.items():
            _take(found, empty, name, feature, 0)
        if record == "SequenceExample":
            for name, steps in message.feature_lists.feature_list.items():
                for feature in steps.feature:
                    _take(found, empty, name, feature, 2)
    for name, field in empty.items():
        found.setdefault(name, field)
    return dict(sorted(found.items()))


def _take(
    found: dict[str, Field], empty: dict[str, Field], name: str, feature: Any, depth: int
) -> None:
    which = feature.WhichOneof("kind")
    if which is None:
        return
    kind: Kind = which.removesuffix("_list")
    count = len(getattr(feature, which).value)
    target = found if count else empty
    field = Field(kind, max(depth, int(count != 1)))
    before = target.get(name, field)
    stronger = max(before.kind, field.kind, key=_KINDS.index)
    target[name] = Field(stronger, max(before.depth, field.depth))
