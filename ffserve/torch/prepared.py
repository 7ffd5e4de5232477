"""Prepared samples of a torch dataset: the results of `Dataset.prepare`, shared by a user's jobs.

A result travels as a header and the bytes of its parts. The header says what the parts are (bytes,
arrays, tensors, numbers, alone or in a tuple or dict). Nothing is pickled. Headers are checked when
they are read: they may come from another release.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ffserve import FileReader, __version__
from ffserve.client.public import PreparedSource, prepared_source
from ffserve.dtypes import Bytes, Int64s
from ffserve.errors import FormatError, ProtocolError, ServerUnavailable, UsageError

_HEAD = struct.Struct("<4sHBB")
"""The header begins with its magic, its whole size, the container and the number of parts."""
_PART = struct.Struct("<BBBBQ")
"""Each part has its kind, its dimensions, the bytes of the name of its type, the bytes of its key,
and the bytes of its content."""
_MAGIC = b"FFP1"
_SINGLE, _TUPLE, _DICT = range(3)
_BYTES, _ARRAY, _TENSOR, _INT, _FLOAT, _BOOL = range(6)
_ALIGNMENT = 64
_MOST_PARTS = 64
COLD_SHARE = 0.25
"""Raw samples are read ahead if less than this share of the prepared ones is in memory."""
_MOST_LAYOUTS = 4096
"""This many different headers are kept in parsed form."""
_KINDS: dict[type[Any], int] = {bytes: _BYTES, int: _INT, float: _FLOAT, bool: _BOOL}
_NUMBERS: dict[int, Any] = {_INT: struct.Struct("<q"), _FLOAT: struct.Struct("<d")}


class _ValuePart(NamedTuple):
    """One part of a result: its kind, type and shape, and the place of its bytes."""

    kind: int
    type: Any
    shape: tuple[int, ...]
    key: str
    start: int
    end: int


class _Layout(NamedTuple):
    container: int
    parts: list[_ValuePart]
    size: int


# ---- to bytes ------------------------------------------------------------------------------------


def pieces(value: Any) -> list[Any]:
    """Return a result as buffers: a header, and the bytes of its parts.

    Raises: UsageError for what cannot be shared.
    """
    container, keys, parts = _SINGLE, [""], [value]
    if type(value) is tuple:
        container, keys, parts = _TUPLE, [""] * len(value), list(value)
    elif type(value) is dict:
        container, keys, parts = _DICT, list(value), list(value.values())
    if len(parts) > _MOST_PARTS or not all(type(key) is str and len(key) < 64 for key in keys):
        raise UsageError(
            f"prepare returned a {type(value).__name__} that cannot be shared",
            hint=f"a tuple or dict has at most {_MOST_PARTS} parts, and keys are short strings",
        )
    rows, contents = [], []
    for key, part in zip(keys, parts, strict=True):
        kind, name, shape, content = _described(part)
        packed = key.encode()
        rows.append(_PART.pack(kind, len(shape), len(name), len(packed), len(content)))
        rows[-1] += struct.pack(f"<{len(shape)}q", *shape) + name + packed
        contents.append(content)
    body = b"".join(rows)
    size = -(-(_HEAD.size + len(body)) // _ALIGNMENT) * _ALIGNMENT
    head = (_HEAD.pack(_MAGIC, size, container, len(parts)) + body).ljust(size, b"\0")
    found: list[Any] = [head]
    for content in contents[:-1]:
        found += [content, bytes(-len(content) % _ALIGNMENT)]
    return found + contents[-1:]


def _described(part: Any) -> tuple[int, bytes, tuple[int, ...], Any]:
    """Return a part's kind, type, shape and bytes."""
    kind = _KINDS.get(type(part))
    if kind == _BYTES:
        return _BYTES, b"", (), part
    if kind == _BOOL:
        return _BOOL, b"", (), bytes([part])
    if kind is not None:
        try:
            return kind, b"", (), _NUMBERS[kind].pack(part)
        except struct.error:
            raise UsageError(f"prepare returned {part}, which exceeds 64 bits") from None
    if type(part) is np.ndarray and not part.dtype.hasobject and part.dtype.names is None:
        flat = np.ascontiguousarray(part).reshape(-1)
        return _ARRAY, part.dtype.str.encode(), part.shape, flat.view(np.uint8).data
    plain = type(part) is torch.Tensor and part.layout is torch.strided
    if plain and part.device.type == "cpu" and not part.requires_grad and not part.is_quantized:
        tensor = part.contiguous().reshape(-1)
        content = tensor.view(torch.uint8).numpy().data if tensor.numel() else b""
        return _TENSOR, str(part.dtype).encode(), tuple(part.shape), content
    raise UsageError(
        f"prepare returned a {type(part).__name__} that cannot be shared",
        hint="return bytes, an array without objects, a dense tensor in memory without a gradient, "
        "a number, or a tuple or dict of these",
    )


# ---- from bytes ----------------------------------------------------------------------------------

_layouts: dict[bytes, _Layout] = {}


def value(sample: Bytes) -> Any:
    """Return the result that bytes encode. Arrays and tensors are views of the bytes.

    Raises: FormatError.
    """
    head = bytes(sample[: _HEAD.size])
    if len(head) == _HEAD.size:
        magic, size, _, _ = _HEAD.unpack(head)
        if magic == _MAGIC and _HEAD.size <= size <= len(sample):
            packed = sample[:size].tobytes()
            layout = _layouts.get(packed)
            if layout is None:
                layout = _parsed(packed)
                if len(_layouts) < _MOST_LAYOUTS:
                    _layouts[packed] = layout
            if layout.size == len(sample):
                return _made(layout, sample)
    raise FormatError("a prepared sample in memory is malformed", hint="change prepare_version")


def _parsed(packed: bytes) -> _Layout:
    try:
        return _parse(packed)
    except Exception as error:  # numpy and torch refuse names of types in many ways
        raise FormatError(f"the header of a prepared sample is malformed: {error}") from error


def _parse(packed: bytes) -> _Layout:
    _, start, container, count = _HEAD.unpack_from(packed)
    at, end, parts = _HEAD.size, start, []
    for _ in range(count):
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
    if container not in (_SINGLE, _TUPLE, _DICT) or (container == _SINGLE and count != 1):
        raise ValueError(f"it has a container of kind {container} with {count} parts")
    return _Layout(container, parts, end)


def _type(kind: int, name: str, shape: tuple[int, ...], size: int) -> Any:
    """Return the type of a part, having checked its size."""
    if any(length < 0 for length in shape):
        raise ValueError(f"a part has the shape {shape}")
    if kind in _NUMBERS or kind == _BOOL:
        if size != (1 if kind == _BOOL else 8):
            raise ValueError(f"a number has {size} bytes")
        return None
    if kind == _BYTES:
        return None
    count = 1
    for length in shape:
        count *= length
    if kind == _ARRAY:
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


def _made(layout: _Layout, sample: Bytes) -> Any:
    made = [_part(part, sample[part.start : part.end]) for part in layout.parts]
    if layout.container == _SINGLE:
        return made[0]
    if layout.container == _TUPLE:
        return tuple(made)
    return {part.key: each for part, each in zip(layout.parts, made, strict=True)}


def _part(part: _ValuePart, content: Bytes) -> Any:
    if part.kind == _TENSOR:
        if not len(content):
            return torch.empty(part.shape, dtype=part.type)
        return torch.from_numpy(content).view(part.type).reshape(part.shape)
    if part.kind == _ARRAY:
        return content.view(part.type).reshape(part.shape)
    packed = content.tobytes()
    if part.kind == _BYTES:
        return packed
    return bool(packed[0]) if part.kind == _BOOL else _NUMBERS[part.kind].unpack(packed)[0]


# ---- keys ----------------------------------------------------------------------------------------


def key_of(dataset: Any) -> tuple[bytes, str]:
    """Return the key of a dataset's preparation, and its name.

    Raises: UsageError for a `prepare_version` without a text of its own.
    """
    kind, version = type(dataset), dataset.prepare_version
    name = f"{kind.__module__}.{kind.__qualname__}"[-200:]  # limits.MOST_NAME
    text = repr(version)
    if " at 0x" in text:
        raise UsageError(
            f"prepare_version is {text}, whose text differs from process to process",
            hint="use numbers, strings, and tuples of them",
        )
    function = kind.prepare
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # typed in, not in a file
        source = repr(_code(getattr(function, "__code__", None)))
    features = () if dataset._columns is None else (repr(dataset._columns),)
    reader = getattr(dataset, "reader", None)
    fields = tuple(reader.fields) if isinstance(reader, FileReader) else ()
    chosen = (*features, fields) if fields else features
    parts = (__version__, name, source, text, torch.__version__, np.__version__, *chosen)
    digest = hashlib.sha256(repr(parts).encode())
    return digest.digest(), name


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
