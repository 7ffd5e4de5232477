"""Lists of integers and lists of arrays: memory/arrays.c, or the same in Python without it.

The module in C is built against numpy's headers. It is missing where those were missing, or if
numpy was later replaced by one of another ABI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from ffserve.dtypes import Bytes, Int64s, UInt64s
from ffserve.engine.core import DESTS, SOURCES, ffi, from_buffer, lib

_UINT8 = np.dtype(np.uint8)

integers: Callable[[object, int], Int64s | None]
"""Return a list or tuple of integers from 0 to `count` - 1 as int64[n]; None for anything else,
which may still be valid indices."""

separate: Callable[[Int64s], tuple[list[Bytes], UInt64s]]
"""Return a new array of uint8 for each of n samples, not initialized, and their addresses.

Args: offsets: int64[n + 1], contiguous, running sum of the sizes.
Raises: MemoryError; ValueError for a negative size.
"""

PartOfArrays: TypeAlias = tuple[list[Bytes], Int64s, UInt64s, Int64s]

read_cached: Callable[[int, object], list[Bytes] | PartOfArrays | None]
"""Read samples that are in the page cache, each to a new array; verify them. Waits for no device.

Args: address of an `ffs_local`, which outlives the call. indices: list, tuple or int64[n].
Returns: the arrays; if some were not read: the arrays, int64[n + 1] the running sum of their sizes,
    their addresses, and the positions of those that are left. None for invalid indices, other
    types, and where it is not built.
Raises: MemoryError.
"""

read_joined: Callable[[int, object, int], tuple[Any, ...] | None]
"""The same into one new buffer.

Args: as of `read_cached`; bytes that the buffer may have at most.
Returns: the buffer and int64[n + 1], the running sum of the samples' sizes; if some were not read,
    also their positions. None as `read_cached`, and for a larger buffer.
"""


def _no_integers(indices: object, count: int) -> None:
    return None


def _read_nothing(tables: int, indices: object) -> None:
    return None


def _join_nothing(tables: int, indices: object, most: int) -> None:
    return None


def _separate(offsets: Int64s) -> tuple[list[Bytes], UInt64s]:
    arrays = [np.empty(size, _UINT8) for size in (offsets[1:] - offsets[:-1]).tolist()]
    return arrays, addresses(arrays)


def addresses(arrays: Sequence[Bytes]) -> UInt64s:
    """Return the address of each array's bytes. Cost: 0.1 us per array."""
    pointers = ffi.new(DESTS, [from_buffer("uint8_t[]", array) for array in arrays])
    return np.frombuffer(ffi.buffer(pointers), np.uint64)


def _address_of(function: str) -> int:
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, function)))


def _load() -> tuple[ModuleType | None, str]:
    """Return the module in C, or None and why it cannot be used."""
    try:
        from ffserve.engine import _arrays
    except ImportError as error:
        return None, str(error)
    if SOURCES and _arrays.SOURCES != SOURCES:
        return None, "it was built from other sources than those in its folder"
    _arrays.connect(_address_of("ffs_local_edges"), _address_of("ffs_local_read"))
    return _arrays, ""


_module, MISSING = _load()
integers = _no_integers if _module is None else _module.integers
separate = _separate if _module is None else _module.separate
read_cached = _read_nothing if _module is None else _module.read_cached
read_joined = _join_nothing if _module is None else _module.read_joined
