"""Prepared samples of a torch dataset: the results of `Dataset.prepare`, shared by a user's jobs.

A result travels as a header and the bytes of its parts. The header says what the parts are (bytes,
strings, arrays, tensors, numbers, and tuples, lists and dicts of these). Nothing is pickled.
Headers are checked when they are read: they may come from another release. Items of other data sets
(`kept.py`) travel in the same way.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ffserve import FileReader, __version__
from ffserve.client.public import PreparedSource, prepared_source
from ffserve.dtypes import Bytes, Int64s
from ffserve.errors import FormatError, ProtocolError, ServerUnavailable, UsageError

_HEAD = struct.Struct("<4sII")
"""The header begins with its magic, its whole size and the number of parts."""
_PART = struct.Struct("<BBBBQ")
"""Each part has its kind, its dimensions, the bytes of the name of its type, the bytes of its key,
and the bytes of its content. The members of a container follow it, and have its length as their
number."""
ENCODING = b"FFP2"
"""The magic. Samples that were encoded otherwise are prepared anew."""
_BYTES, _STR, _NONE, _INT, _FLOAT, _BOOL, _TUPLE, _LIST, _DICT, _ARRAY, _SCALAR, _TENSOR = range(12)
_ALIGNMENT = 64
_MOST_PARTS = 256
COLD_SHARE = 0.25
"""Raw samples are read ahead if less than this share of the prepared ones is in memory."""
_MOST_LAYOUTS = 4096
"""This many different headers are kept in parsed form."""
_CONTAINERS: dict[type[Any], int] = {tuple: _TUPLE, list: _LIST, dict: _DICT}
_NUMBERS: dict[type[Any], tuple[int, Any]] = {
    int: (_INT, struct.Struct("<q")),
    float: (_FLOAT, struct.Struct("<d")),
    bool: (_BOOL, struct.Struct("<?")),
}
_PACKED: dict[int, Any] = dict(_NUMBERS.values())


class _ValuePart(NamedTuple):
    """One part of a result: its kind, type and shape, and the place of its bytes."""

    kind: int
    type: Any
    shape: tuple[int, ...]
    key: str
    start: int
    end: int


class _Layout(NamedTuple):
    parts: list[_ValuePart]
    size: int


# ---- to bytes ------------------------------------------------------------------------------------


def pieces(value: Any) -> list[Any]:
    """Return a result as buffers: a header, and the bytes of its parts.

    Raises: UsageError for what cannot be shared.
    """
    rows, contents = list[bytes](), list[Any]()
    _add("", value, rows, contents)
    body = b"".join(rows)
    size = -(-(_HEAD.size + len(body)) // _ALIGNMENT) * _ALIGNMENT
    head = (_HEAD.pack(ENCODING, size, len(rows)) + body).ljust(size, b"\0")
    found: list[Any] = [head]
    for content in contents[:-1]:
        found += [content, bytes(-len(content) % _ALIGNMENT)]
    return found + contents[-1:]


def _add(key: Any, part: Any, rows: list[bytes], contents: list[Any]) -> None:
    """Add the rows and contents of a part, and of those in it."""
    if len(rows) == _MOST_PARTS or type(key) is not str or len(key) >= 64:
        raise UsageError(
            "a sample has a part that cannot be shared",
            hint=f"it has at most {_MOST_PARTS} parts, and the keys of dicts are short strings; of "
            "many numbers make an array",
        )
    container, name, shape = _CONTAINERS.get(type(part)), b"", tuple[int, ...]()
    if container is None:
        kind, name, shape, content = _described(part)
    else:
        kind, shape, content = container, (len(part),), b""
    packed = key.encode()
    rows.append(_PART.pack(kind, len(shape), len(name), len(packed), len(content)))
    rows[-1] += struct.pack(f"<{len(shape)}q", *shape) + name + packed
    contents.append(content)
    if kind == _DICT:
        for each, value in part.items():
            _add(each, value, rows, contents)
    elif container is not None:
        for value in part:
            _add("", value, rows, contents)


def _described(part: Any) -> tuple[int, bytes, tuple[int, ...], Any]:
    """Return a part's kind, type, shape and bytes."""
    number = _NUMBERS.get(type(part))
    if number is not None:
        try:
            return number[0], b"", (), number[1].pack(part)
        except struct.error:
            raise UsageError(f"a sample has the number {part}, which exceeds 64 bits") from None
    if type(part) is bytes:
        return _BYTES, b"", (), part
    if type(part) is str:
        return _STR, b"", (), part.encode(errors="surrogatepass")
    if part is None:
        return _NONE, b"", (), b""
    if type(part) is np.ndarray and not part.dtype.hasobject and part.dtype.names is None:
        flat = np.ascontiguousarray(part).reshape(-1)
        return _ARRAY, part.dtype.str.encode(), part.shape, flat.view(np.uint8).data
    if isinstance(part, (np.number, np.bool_)):
        return _SCALAR, part.dtype.str.encode(), (), part.tobytes()
    plain = type(part) is torch.Tensor and part.layout is torch.strided
    if plain and part.device.type == "cpu" and not part.requires_grad and not part.is_quantized:
        tensor = part.contiguous().reshape(-1)
        content = tensor.view(torch.uint8).numpy().data if tensor.numel() else b""
        return _TENSOR, str(part.dtype).encode(), tuple(part.shape), content
    raise UsageError(
        f"a sample has a value of type {type(part).__name__}, which cannot be shared",
        hint="shared are bytes, strings, numbers, None, arrays without objects, dense tensors in "
        "memory without a gradient, and tuples, lists and dicts of these; of a picture make an "
        "array: np.array(picture)",
    )


# ---- from bytes ----------------------------------------------------------------------------------

_layouts: dict[bytes, _Layout] = {}


def value(sample: Bytes) -> Any:
    """Return the result that bytes encode. Arrays and tensors are views of the bytes.

    Raises: FormatError.
    """
    head = bytes(sample[: _HEAD.size])
    if len(head) == _HEAD.size:
        magic, size, _ = _HEAD.unpack(head)
        if magic == ENCODING and _HEAD.size <= size <= len(sample):
            packed = sample[:size].tobytes()
            layout = _layouts.get(packed)
            if layout is None:
                layout = _parsed(packed)
                if len(_layouts) < _MOST_LAYOUTS:
                    _layouts[packed] = layout
            if layout.size == len(sample):
                parts = iter(layout.parts)
                return _made(next(parts), parts, sample)
    raise FormatError("a prepared sample in memory is malformed", hint="change prepare_version")


def _parsed(packed: bytes) -> _Layout:
    try:
        return _parse(packed)
    except Exception as error:  # numpy and torch refuse names of types in many ways
        raise FormatError(f"the header of a prepared sample is malformed: {error}") from error


def _parse(packed: bytes) -> _Layout:
    _, start, count = _HEAD.unpack_from(packed)
    at, end, parts = _HEAD.size, start, list[_ValuePart]()
    missing = 1
    while missing and len(parts) < min(count, _MOST_PARTS):
        kind, dimensions, name_size, key_size, size = _PART.unpack_from(packed, at)
        at += _PART.size
        shape = struct.unpack_from(f"<{dimensions}q", packed, at)
        at += 8 * dimensions
        name, key = packed[at : at + name_size].decode(), packed[at + name_size :][:key_size]
        at += name_size + key_size
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + size
        parts.append(
            _ValuePart(kind, _type(kind, name, shape, size), shape, key.decode(), start, end)
        )
        missing += (shape[0] if kind in _CONTAINERS.values() else 0) - 1
    if missing or len(parts) != count:
        raise ValueError(f"it has {count} parts, which do not fit together")
    return _Layout(parts, end)


def _type(kind: int, name: str, shape: tuple[int, ...], size: int) -> Any:
    """Return the type of a part, having checked its size."""
    if any(length < 0 for length in shape):
        raise ValueError(f"a part has the shape {shape}")
    if kind in _PACKED and size != _PACKED[kind].size:
        raise ValueError(f"a number has {size} bytes")
    if kind in (_TUPLE, _LIST, _DICT) and (len(shape) != 1 or size):
        raise ValueError(f"a container has the shape {shape} and {size} bytes")
    if kind <= _DICT:
        return None
    count = 1
    for length in shape:
        count *= length
    if kind in (_ARRAY, _SCALAR):
        found: Any = np.dtype(name)
        if found.hasobject:
            raise ValueError("a part is an array of objects")
        item = found.itemsize
    elif kind == _TENSOR:
        found = getattr(torch, name.removeprefix("torch."))
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{name} is not a type of tensors")
        item = found.itemsize
    else:
        raise ValueError(f"a part is of the unknown kind {kind}")
    if count * item != size:
        raise ValueError(f"a part has {size} bytes for {count} items of {item} bytes")
    return found


def _made(part: _ValuePart, parts: Iterator[_ValuePart], sample: Bytes) -> Any:
    """Return the value of a part. Args: parts: those that follow it."""
    kind = part.kind
    if kind == _DICT:
        following = (next(parts) for _ in range(part.shape[0]))
        return {each.key: _made(each, parts, sample) for each in following}
    if kind in (_TUPLE, _LIST):
        made = [_made(next(parts), parts, sample) for _ in range(part.shape[0])]
        return tuple(made) if kind == _TUPLE else made
    content = sample[part.start : part.end]
    if kind == _TENSOR:
        if not len(content):
            return torch.empty(part.shape, dtype=part.type)
        return torch.from_numpy(content).view(part.type).reshape(part.shape)
    if kind == _ARRAY:
        return content.view(part.type).reshape(part.shape)
    if kind == _SCALAR:
        return content.view(part.type)[0]
    packed = content.tobytes()
    if kind == _BYTES:
        return packed
    if kind == _STR:
        return packed.decode(errors="surrogatepass")
    return None if kind == _NONE else _PACKED[kind].unpack(packed)[0]


# ---- keys ----------------------------------------------------------------------------------------


def key_of(dataset: Any) -> tuple[bytes, str]:
    """Return the key of a dataset's preparation, and its name.

    Raises: UsageError for a `prepare_version` without a text of its own.
    """
    kind = type(dataset)
    name = name_of(kind)
    text = text_of(dataset.prepare_version, "prepare_version")
    function = kind.prepare
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # typed in, not in a file
        source = repr(_code(getattr(function, "__code__", None)))
    features = () if dataset._columns is None else (repr(dataset._columns),)
    reader = getattr(dataset, "reader", None)
    fields = tuple(reader.fields) if isinstance(reader, FileReader) else ()
    chosen = (*features, fields) if fields else features
    parts = (ENCODING, __version__, name, source, text, torch.__version__, np.__version__, *chosen)
    digest = hashlib.sha256(repr(parts).encode())
    return digest.digest(), name


def name_of(kind: type[Any]) -> str:
    """Return the name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"[-200:]  # limits.MOST_NAME


def text_of(version: Any, option: str) -> str:
    """Return the text of a version. Raises: UsageError: it has none of its own."""
    text = repr(version)
    if " at 0x" in text:
        raise UsageError(
            f"{option} is {text}, whose text differs from process to process",
            hint="use numbers, strings, and tuples of them",
        )
    return text


def _code(code: Any) -> Any:
    """Return the content of a function's code, without addresses."""
    if code is None:
        return None
    constants = [_code(c) if hasattr(c, "co_code") else c for c in code.co_consts]
    return code.co_code, constants, code.co_names


# ---- sharing -------------------------------------------------------------------------------------


class Preparer:
    """Prepares the samples of one dataset object, and shares them where it can.

    A copy in another process begins without a source of prepared samples.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._of: object = None
        """The reader's source that `_shared` was opened for."""
        self._shared: PreparedSource | None = None
        self._orders: dict[int, tuple[Int64s, str | None, bool]] = {}
        self._cold_epoch = -1
        """In this epoch most samples are prepared anew."""

    def __reduce__(self) -> Any:
        return Preparer, ()

    def values(self, dataset: Any, indices: Sequence[int]) -> list[Any]:
        """Return the prepared samples."""

        def make(some: Int64s) -> list[Any]:
            return prepare(dataset.reader.sample_indices(some).tolist())

        def prepare(wanted: list[int]) -> list[Any]:
            made = list(dataset.prepare(wanted, dataset.contents(wanted)))
            if len(made) != len(wanted):
                raise UsageError(
                    f"prepare of {type(dataset).__name__} answered {len(wanted)} indices with "
                    f"{len(made)} samples",
                    hint="prepare must return one sample per index, in order",
                )
            return made

        shared = self.shared(dataset)
        numbers = self._numbers(dataset, indices) if shared is not None else None
        if shared is None or numbers is None:
            return prepare(list(indices))
        try:
            return shared.values(numbers, make)
        except (ServerUnavailable, ProtocolError):
            if shared.connection.alive:
                raise
            # The reader finds another source; the samples of this batch are prepared here.
            return make(numbers)

    @staticmethod
    def _numbers(dataset: Any, indices: Sequence[int]) -> Int64s | None:
        """Return the numbers of valid indices; None: the reader raises the error."""
        try:
            numbers = np.array(indices, np.int64)
        except (TypeError, ValueError, OverflowError):
            return None
        count = dataset.reader.n
        if not len(numbers) or int(numbers.min()) < -count or int(numbers.max()) >= count:
            return None
        shown = np.where(numbers < 0, numbers + count, numbers)
        found: Int64s = dataset.reader.sample_numbers(shown)
        return found

    def shared(self, dataset: Any, *, lead: bool = False) -> PreparedSource | None:
        """Return the prepared samples that are shared; None: each process prepares its own."""
        source = dataset.reader.current_source(lead=lead)
        if source is self._of and self._pid == os.getpid():
            shared = self._shared  # read after `_of`, which is set after it
            return shared if shared is None or shared.trusted else None
        if self._pid != os.getpid():
            # The lock, and the source, belong to the parent.
            self._lock, self._pid = threading.Lock(), os.getpid()
            self._of = self._shared = None
        with self._lock:
            if source is not self._of:
                if self._shared is not None:
                    self._shared.close()
                key, name = key_of(dataset)
                shown = dataset.reader.sample_indices
                self._shared = prepared_source(source, key, name, pieces, value, shown)
                self._of = source
                for epoch, order in self._orders.items():
                    self._announce(epoch, *order)
            return self._shared

    # ---- orders ---------------------------------------------------------------------------

    def announce(
        self, dataset: Any, order: Int64s, epoch: int, name: str | None, replacement: bool
    ) -> bool:
        """Announce an order to the shared samples; return False if there are none."""
        shared = self.shared(dataset, lead=True)
        if shared is None:
            return False
        numbers = dataset.reader.sample_numbers(order)
        if not self._orders and shared.found_share(numbers) < COLD_SHARE:
            self._cold_epoch = epoch
        while len(self._orders) > 2:
            del self._orders[min(self._orders)]
        self._orders[epoch] = numbers, name, replacement
        self._announce(epoch, numbers, name, replacement)
        return True

    def reads_ahead(self, epoch: int) -> bool:
        """Whether the raw samples of an order should be read ahead, because most are still to be
        prepared. A raw sample is not used any more when the prepared one is in memory."""
        return epoch == self._cold_epoch

    def _announce(self, epoch: int, order: Int64s, name: str | None, replacement: bool) -> None:
        if self._shared is not None:
            self._shared.announce(order, epoch, name, replacement)

    def reached(self, dataset: Any, epoch: int, position: int) -> bool:
        """Report a position to the shared samples; return False if there are none."""
        shared = self.shared(dataset)
        if shared is None or epoch not in self._orders:
            return False
        shared.reached(epoch, position)
        return True
